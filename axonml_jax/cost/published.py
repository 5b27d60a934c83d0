"""Costs of plans as papers and other libraries state them, as exact formulas."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from axonml_jax.cost.base import Run
from axonml_jax.cost.decoder import Amount, exact
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.placement import Placement, own_part
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import Layout, is_layout
from axonml_jax.strategies.strategy import reducer_of

# --------------------------------------------------------------------------------------------------
# AxoNN's communication model (Singh et al. 2024): bytes that a GPU sends for one layer of its 3-D tensor parallelism.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GridDegrees:
    """Degrees of AxoNN's four dimensions: Gd, Gr, Gc inside a layer, Gdata around it."""

    data: int = 1
    depth: int = 1
    row: int = 1
    col: int = 1


def layer_volumes(
    grid: GridDegrees, batch: int, length: int, inputs: int, outputs: int, transposed: bool = False
) -> dict:
    """Bytes per GPU and step of one fully connected layer, forward and backward, by dimension.

    bf16 weights and activations, float32 gradients over data. B sequences of S, weight K x N:

    | dimension | bytes |
    | --- | --- |
    | data | 4 (Gdata-1)/Gdata KN/(Gc Gr Gd) 2: gradients, all-reduced |
    | depth | 3 (Gd-1)/Gd KN/(Gc Gr) 2: the weight gathered twice, its gradient scattered |
    | row | 2 (Gr-1)/Gr B/(Gdata Gd) S K/Gc 2: the input's gradient, all-reduced |
    | col | 2 (Gc-1)/Gc B/(Gdata Gd) S N/Gr 2: the output, all-reduced |

    Args:
      grid: the degrees.
      batch: B, sequences of the global batch.
      length: S.
      inputs: K.
      outputs: N.
      transposed: the layer splits its inputs over row and its outputs over col.

    Returns:
      Bytes by axis name: data, depth, row, col.
    """
    row, col = (grid.col, grid.row) if transposed else (grid.row, grid.col)
    rows = Fraction(batch, grid.data * grid.depth) * length
    weight = Fraction(inputs * outputs, grid.row * grid.col)
    moved = lambda ranks: Fraction(ranks - 1, ranks)
    by_role = {
        "data": 4 * moved(grid.data) * weight / grid.depth * 2,
        "depth": 3 * moved(grid.depth) * weight * 2,
        "row": 2 * moved(row) * rows * Fraction(inputs, col) * 2,
        "col": 2 * moved(col) * rows * Fraction(outputs, row) * 2,
    }
    if transposed:
        by_role["row"], by_role["col"] = by_role["col"], by_role["row"]
    return {axis: exact(amount) for axis, amount in by_role.items()}


# --------------------------------------------------------------------------------------------------
# What the papers say a plan must send, which the ledger prints beside what a step sends. No plan depends on it.
# --------------------------------------------------------------------------------------------------


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring, padding not counted.

    In elements, with P parameters on N ranks and A microbatches, (N-1)/N times: 2P along a replicated axis (DDP); 2P, (1+A)P
    and 3AP along a sharded one (ZeRO-1, 2 and 3), and then all other axes reduce only a rank's part. A pipeline's rank moves
    its own stages: 2P where it gathers them once per step, 3P for each time that it gathers them otherwise. Gathered parameters
    travel in the compute dtype, gradients in the reduce dtype. Nothing travels along an axis under NO_SYNC. Where
    replicas train by themselves for H steps, 2P/H travels along theirs, on average. A step may send a little less than ZeRO-3's
    amount: what the backward does not read, such as biases and the first layer's weights, is not gathered again.
    """
    trees = ((placement.params, True), (placement.frozen, False))
    leaves = [(each, trained) for tree, trained in trees for each in jax.tree.leaves(tree, is_leaf=is_layout)]
    amounts = [_of_leaf(placement, own_part(placement, layout), trained) for layout, trained in leaves]
    if placement.stages is None:
        return sum(amounts, Fraction(0))
    # The rank with the most.
    stages, ranks = placement.stages.assignment.stages, placement.stages.num_ranks
    own = lambda amount, stage, rank: amount / ranks if stage is None else amount * (stage % ranks == rank)
    each = ([own(a, p, rank) for a, p in zip(amounts, stages, strict=True)] for rank in range(ranks))
    return max(sum(amounts, Fraction(0)) for amounts in each)


def _of_leaf(placement: Placement, layout: Layout, trained: bool) -> Fraction:
    return weight_traffic(placement.plan, placement.degrees, layout.size, layout.axes, layout.dtype, trained)


def weight_traffic(
    plan: Plan, degrees: Mapping[str, int], size: int, split: Collection[str], dtype: Any, trained: bool
) -> Fraction:
    """Bytes per rank and update of one parameter's traffic on a ring, or of several that are sharded alike.

    Frozen parameters count as gathered for the forward alone; a backward through them, as LoRA's, gathers them again.

    Args:
      plan: the plan.
      degrees: of the mesh.
      size: elements of the whole array.
      split: the mesh axes over which ranks hold different parts of it.
      dtype: between steps.
      trained: whether it has gradients.
    """
    share, total, run = Fraction(size), Fraction(0), Run.of(plan, degrees)
    read, reduced = plan.precision.read_dtype(dtype), plan.precision.reduce_dtype(dtype)
    own = lambda axis: as_axes(axis)[0] in split
    within, rounds = plan.within_round().on(degrees), plan.rounds
    outwards = list(within.items())[::-1]
    # Axes that split the leaf come first, layers' before the others: the rest move only a rank's part.
    outwards.sort(key=lambda each: (not own(each[0]), each[1].role.parameters != "layers"))
    for axis, strategy in outwards:
        role, ranks = strategy.role, math.prod(degrees[name] for name in as_axes(axis))
        moved = share * Fraction(ranks - 1, ranks)
        if role.parameters == "sharded":
            often = run.rounds(axis)
            gathers = often.at_start + often.at_use * (1 + trained)
            total += moved * (gathers * read.itemsize + often.reductions * reduced.itemsize * trained)
        elif role.batch is not None and role.reduces != "never" and not own(axis):
            total += 2 * moved * reducer_of(strategy).wire_dtype(reduced).itemsize * trained
        elif axis in rounds and trained:
            total += 2 * moved * rounds[axis].round_dtype(dtype).itemsize / rounds[axis].every
        share /= ranks if own(axis) or role.parameters == "sharded" else 1
    return total


def tensor_traffic(blocks: int, microbatches: int, elements: int, itemsize: int, ranks: int) -> Fraction:
    """Bytes per rank and update of Megatron's layers: four all-reduces of [b, s, h] per block and microbatch."""
    return Fraction(4 * blocks * microbatches * 2 * elements * itemsize * (ranks - 1), ranks)


def pipeline_traffic(chunks: int, microbatches: int, elements: int, itemsize: int) -> int:
    """Bytes per rank and update between stages: one activation and one cotangent per boundary and microbatch."""
    return 2 * chunks * microbatches * elements * itemsize


def experts_traffic(elements: int, top_k: int, itemsize: int, ranks: int) -> Fraction:
    """Bytes per rank of a layer of experts and a microbatch of [b, s, h], forward and backward.

    Tokens travel to their k experts and back; or all tokens to all ranks and sums of outputs back, where that is less.
    """
    return Fraction(4 * min(top_k, ranks) * elements * itemsize * (ranks - 1), ranks)


# --------------------------------------------------------------------------------------------------
# Bytes of model states per device: ZeRO's formulas, and the estimators of DeepSpeed and Megatron with their own
# conventions.
#
# They differ in what they keep in float32 and in what they count, so a figure is only comparable within one convention.
# --------------------------------------------------------------------------------------------------


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

    Each rank's partition has 18 bytes per parameter: float32 parameters, gradients and moments, and 2 bytes of 16-bit gradients
    (stage 2, which adds all 16-bit parameters) or parameters (stage 3, which adds the largest layer, 4 bytes per parameter).

    Args:
      params: P.
      ranks: N.
      stage: 2 or 3.
      largest_layer: L, parameters of the largest layer (stage 3).
      offload: "none"; "optimizer": optimizer and gradients on the CPU; "all": parameters too (stage 3).

    Raises:
      ValueError: for what its estimators do not have, or no ranks.
    """
    if (stage, offload) not in [(2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"), (3, "all")]:
        raise ValueError(
            f"DeepSpeed has no estimator of stage {stage} with offload={offload!r}: stage 2 takes 'none' and 'optimizer', "
            "stage 3 'all' too"
        )
    if ranks < 1:
        raise ValueError(f"ZeRO over {ranks} ranks: give at least one")
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
