"""How tokens reach their experts on other ranks: one value, chosen by name, or by platform and sizes."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from axonml_jax.parallel.experts.block_products import block_sizes
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform

DispatchName = Literal["auto", "rounds", "ragged", "gather"]
DISPATCHES: tuple[str, ...] = ("auto", "rounds", "ragged", "gather")
SLACK = 1.25
"""Slots of a round over the pairs that travel at uniform load: what random routing needs, and little more."""
RAGGED_PLATFORMS = ("tpu", "cuda", "rocm")
"""Where XLA has a ragged all-to-all."""
RAGGED_PRODUCTS = ("tpu",)
"""Where it has kernels for ragged products; elsewhere it multiplies all rows with all experts."""
LITTLE = 2**18
"""Elements of all rows times all experts up to which their product is cheap on a CPU."""


@dataclass(frozen=True)
class Dispatch:
    """How a rank's pairs travel, with every default decided.

    N ranks hold E experts; a rank has T tokens with k pairs each.

    Attributes:
      name: "rounds": all-to-alls of as many slots for every rank, as often as the fullest needs; "ragged": the same, but only
        filled slots travel; "gather": every rank gets all tokens, and outputs are summed.
      ranks: N.
      experts: E.
      capacity: slots of each expert for each rank's tokens; pairs behind them are dropped. None: none is dropped.
      slots: in a round for each rank.
      products: "ragged" (JAX's ragged product, on TPUs), or "blocks", or "all" experts on all rows where these are few.
      blocks: sizes for the former.
    """

    name: str
    ranks: int
    experts: int
    capacity: int | None
    slots: int
    products: str
    blocks: tuple[int, ...]

    @classmethod
    def of(
        cls, name: str, *, ranks: int, experts: int, tokens: int, top_k: int, width: int, capacity: int | None
    ) -> "Dispatch":
        """Decided for a layer's call.

        Args:
          name: one of `DISPATCHES`.
          ranks, experts, capacity: see the class.
          tokens: T.
          top_k: k.
          width: h.

        Raises:
          ValueError: for what the platform that is compiled for does not have, where anything travels.
        """
        platform, pairs = target_platform(), tokens * top_k
        fast = platform in RAGGED_PRODUCTS
        if name == "ragged" and ranks > 1 and platform not in RAGGED_PLATFORMS:
            raise ValueError(
                f"dispatch='ragged': XLA has no ragged all-to-all for {platform}: use 'rounds', which sends the same tokens"
            )
        if name == "auto":
            name = "gather" if capacity is None and 1 < ranks <= top_k else "ragged" if fast else "rounds"
        local = experts // ranks
        if capacity is not None:
            name, slots, expected = "rounds", capacity * local, pairs
        elif ranks == 1:
            slots = expected = pairs
        elif name == "gather":
            slots, expected = min(int(SLACK * pairs), ranks * tokens * min(top_k, local)), pairs
        else:
            slots, expected = min(-(-int(SLACK * pairs) // ranks), tokens * min(top_k, local)), pairs
        slots = max(1, slots)
        rows = slots if name == "gather" else slots * ranks
        products = "ragged" if fast else "all" if rows * local * width <= LITTLE else "blocks"
        return cls(name, ranks, experts, capacity, slots, products, block_sizes(rows, expected, local, platform))

    @property
    def local(self) -> int:
        """E/N, the experts of a rank."""
        return self.experts // self.ranks

    def alone(self) -> "Dispatch":
        """That of the experts of one rank, whose tokens are there."""
        return replace(self, ranks=1, experts=self.local)


def capacity_of(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Slots of an expert: ceil(factor * k * T / E), at least one and at most T.

    >>> capacity_of(64, 2, 8, 1.0), capacity_of(3, 1, 8, 1.0)
    (16, 1)
    >>> capacity_of(50, 2, 10, 1.1)
    11
    """
    return max(1, min(tokens, math.ceil(Fraction(str(factor)) * top_k * tokens / experts)))
