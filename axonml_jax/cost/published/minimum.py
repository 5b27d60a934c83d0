"""What the papers say a plan must send: the amount beside which the ledger prints what a step sends. It decides nothing."""

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

import jax

from axonml_jax.cost.rounds import Run
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import Layout, is_layout


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring, padding not counted.

    With P elements on N ranks and A microbatches, (N-1)/N times: 2P along a replicated axis (DDP); 2P, (1+A)P and 3AP along a
    sharded one (ZeRO-1, 2 and 3), and then all other axes reduce only a rank's part. A pipeline's rank moves its own
    stages: 2P where it gathers them once per step, 3P for each time that it gathers them otherwise. Gathered parameters
    travel in the compute dtype, gradients in the reduce dtype. Nothing travels along an axis under NO_SYNC. Where
    replicas train by themselves for H steps, 2P/H travels along theirs, on average. A step may send a little less than ZeRO-3's
    amount: what the backward does not read, such as biases and the first layer's weights, is not gathered again.
    """
    trees = ((placement.params, True), (placement.frozen, False))
    leaves = [(each, trained) for tree, trained in trees for each in jax.tree.leaves(tree, is_leaf=is_layout)]
    amounts = [_of_leaf(placement, layout, trained) for layout, trained in leaves]
    if placement.stages is None:
        return sum(amounts, Fraction(0))
    # The rank with the most; activations are not in it.
    stages, ranks = placement.stages.stages, placement.stages.num_ranks
    each = (sum((a for a, p in zip(amounts, stages, strict=True) if p % ranks == r), Fraction(0)) for r in range(ranks))
    return max(each)


def _of_leaf(placement: Placement, layout: Layout, trained: bool) -> Fraction:
    return weight_traffic(placement.plan, placement.degrees, layout.size, layout.axes, layout.dtype, trained)


def weight_traffic(
    plan: Plan, degrees: Mapping[str, int], size: int, split: Collection[str], dtype: Any, trained: bool
) -> Fraction:
    """The same of one parameter, or of several that rest alike.

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
    outwards.sort(
        key=lambda each: (not own(each[0]), each[1].role.parameters != "layers")
    )  # what layers split is never whole
    for axis, strategy in outwards:
        role, ranks = strategy.role, math.prod(degrees[name] for name in as_axes(axis))
        moved = share * Fraction(ranks - 1, ranks)
        if role.parameters == "sharded":
            often = run.rounds(axis)
            gathers = often.at_start + often.at_use * (1 + trained)
            total += moved * (gathers * read.itemsize + often.reductions * reduced.itemsize * trained)
        elif role.batch is not None and role.reduces != "never" and not own(axis):
            total += 2 * moved * strategy.wire_dtype(reduced).itemsize * trained
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
    """Bytes per rank of a layer of experts and a microbatch of [b, s, h]: to each token's k experts and back, both ways.

    Or all tokens to all ranks and the sums of outputs back, where that is less.
    """
    return Fraction(4 * min(top_k, ranks) * elements * itemsize * (ranks - 1), ranks)
