"""What the papers say a plan must send: the amount beside which the ledger prints what a step sends."""

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import jax

from axonml_jax.parallel.ddp import Replicate
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.tensor.strategy import InLayers
from axonml_jax.sharding.layout import Layout, is_layout


class Rounds(NamedTuple):
    """How often one update moves all parameters of a rank along `fsdp`.

    Attributes:
      forward, backward: gathers; where they are kept for the backward, it has none.
      scatters: reductions of their gradients.
    """

    forward: int
    backward: int
    scatters: int


def rounds(plan: Plan, degrees: Mapping[str, int]) -> Rounds:
    """How often a plan gathers and scatters: as the pipeline's `gather` says, else as ZeRO's stage does.

    >>> rounds(Plan(accumulate=4), {"fsdp": 8})
    Rounds(forward=4, backward=4, scatters=4)
    """
    if plan.pipe is not None and degrees.get(AXIS, 1) > 1:
        often = plan.pipe.gathers(degrees[AXIS], plan.microbatches)
        return Rounds(1, 0, 1) if often is None else Rounds(often, often, often)
    strategy, many = plan.fsdp, plan.microbatches
    when_used = isinstance(strategy, Shard) and strategy.when_used
    each = isinstance(strategy, Shard) and strategy.each_microbatch
    return Rounds(many if when_used else 1, many if when_used else 0, many if each else 1)


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring, padding not counted.

    With P elements on N ranks and A microbatches, (N-1)/N times: 2P along a replicated axis (DDP); 2P, (1+A)P and 3AP along a
    sharded one (ZeRO-1, 2 and 3), and then the axes outside it reduce only a rank's part. A pipeline's rank moves its own
    stages: 2P where it gathers them once per step, 3P for each time that it gathers them otherwise. Gathered parameters
    travel in the compute dtype, gradients in the reduce dtype. Nothing under NO_SYNC. A step may send a little less than
    ZeRO-3's amount: what the backward does not read, such as biases and the first layer's weights, is not gathered again.
    """
    if placement.plan.independent:
        return Fraction(0)
    leaves = [(layout, True) for layout in jax.tree.leaves(placement.params, is_leaf=is_layout)]
    leaves += [(layout, False) for layout in jax.tree.leaves(placement.frozen, is_leaf=is_layout)]
    amounts = [leaf_traffic(placement.plan, placement.degrees, layout, trained) for layout, trained in leaves]
    if placement.stages is None:
        return sum(amounts, Fraction(0))
    # The rank with the most; activations are not in it.
    stages, ranks = placement.stages.stages, placement.stages.num_ranks
    each = (sum((a for a, p in zip(amounts, stages, strict=True) if p % ranks == r), Fraction(0)) for r in range(ranks))
    return max(each)


def leaf_traffic(plan: Plan, degrees: Mapping[str, int], layout: Layout, trained: bool) -> Fraction:
    """The same of one parameter."""
    share, total, often = Fraction(layout.size), Fraction(0), rounds(plan, degrees)
    read, reduced = plan.precision.read_dtype(layout.dtype), plan.precision.reduce_dtype(layout.dtype)
    for axis, strategy in reversed(list(plan.strategies.items())):
        ranks = degrees.get(axis, 1)
        moved = share * Fraction(ranks - 1, ranks)
        if isinstance(strategy, InLayers):
            total += 2 * moved * reduced.itemsize * (trained and strategy.sums(layout, axis))
            share /= ranks if axis in layout.axes else 1
        elif isinstance(strategy, Replicate):
            total += 2 * moved * strategy.wire_itemsize(reduced) * trained
        else:
            gathers = often.forward + often.backward * trained
            total += moved * (gathers * read.itemsize + often.scatters * reduced.itemsize * trained)
            share /= ranks
    return total
