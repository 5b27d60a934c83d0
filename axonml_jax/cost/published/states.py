"""Bytes of model states per device: ZeRO's formulas, and the estimators of DeepSpeed and Megatron with their own conventions.

They differ in what they keep in float32 and in what they count, so a figure is only comparable within one convention.
"""

from dataclasses import dataclass
from fractions import Fraction

from axonml_jax.cost.wire import Amount, exact


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter of each kind of model state.

    Attributes:
      parameters: of the parameters that compute.
      gradients: of their gradients.
      optimizer: of the optimizer, with a float32 copy of the parameters where there is one.
    """

    parameters: int
    gradients: int
    optimizer: int


MIXED_ADAM = Bytes(2, 2, 12)
"""16-bit parameters and gradients; float32 parameters and two moments in the optimizer (Rajbhandari et al. 2020)."""

FLOAT32_ADAM = Bytes(4, 4, 8)
"""Everything in float32, and two moments: what this library's plans keep, whatever they compute in."""


def zero(params: int, ranks: int, stage: int, each: Bytes = MIXED_ADAM) -> Amount:
    """Bytes of model states per device under ZeRO (Rajbhandari et al. 2020, section 5).

    Args:
      params: P.
      ranks: N, data-parallel ranks.
      stage: 0 (replicated), 1 (optimizer sharded), 2 (gradients too) or 3 (parameters too).
      each: bytes per parameter.

    Returns:
      With mixed-precision Adam 16P; 4P + 12P/N; 2P + 14P/N; 16P/N.

    Raises:
      ValueError: for another stage, or no ranks.

    >>> zero(7_500_000_000, 64, 2) / 1e9
    16.640625
    """
    if stage not in (0, 1, 2, 3) or ranks < 1:
        raise ValueError(f"ZeRO stage {stage} over {ranks} ranks: give a stage from 0 to 3 and at least one rank")
    kinds = [(each.optimizer, 1), (each.gradients, 2), (each.parameters, 3)]
    return exact(sum(Fraction(params * size, ranks if stage >= first else 1) for size, first in kinds))


def deepspeed(params: int, ranks: int, stage: int, *, largest_layer: int = 0, offload: str = "none") -> Amount:
    """Bytes per GPU as DeepSpeed's `estimate_zero{2,3}_model_states_mem_needs` counts them.

    It keeps 16 bytes per parameter in the optimizer's partition (float32 parameters, gradients and moments) beside 16-bit
    parameters; stage 3 adds the largest layer whole, parameters and gradients of 2 bytes each.

    Args:
      params: P.
      ranks: N.
      stage: 2 or 3.
      largest_layer: L, parameters of the largest layer (stage 3).
      offload: "none"; "optimizer": optimizer and gradients on the CPU; "all": parameters too (stage 3).

    Raises:
      ValueError: for what its estimators do not have.
    """
    if (stage, offload) not in [(2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "all")]:
        raise ValueError(
            f"DeepSpeed has no estimator of stage {stage} with offload={offload!r}: stage 2 takes 'none' and 'optimizer', "
            "stage 3 'all' too"
        )
    sharded = {"none": 18, "optimizer": 0 if stage == 2 else 2, "all": 0}[offload]
    whole = 2 * params if stage == 2 else 4 * largest_layer
    return exact(whole + Fraction(sharded * params, ranks))


def megatron(params: int, ranks: int) -> Amount:
    """Bytes per GPU of Megatron-LM's distributed optimizer, bf16 parameters and float32 gradients: (6 + 12/d) P.

    >>> megatron(1000, 4)
    9000
    """
    if ranks < 1:
        raise ValueError(f"a distributed optimizer over {ranks} ranks: give at least one")
    return exact(6 * params + Fraction(12 * params, ranks))
