"""What the papers say a plan must send: the amount beside which the ledger prints what a step sends."""

from fractions import Fraction

import jax

from axonml_jax.parallel.ddp import Replicate
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.tensor.strategy import InLayers
from axonml_jax.sharding.layout import Layout, is_layout


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring, padding not counted.

    With P elements on N ranks and A microbatches, (N-1)/N times: 2P along a replicated axis (DDP); 2P, (1+A)P and 3AP along a
    sharded one (ZeRO-1, 2 and 3), and then the axes outside it reduce only a rank's part. Gathered parameters travel in
    the compute dtype, gradients in the reduce dtype. Nothing under NO_SYNC. A step may send a little less than ZeRO-3's
    amount: what the backward does not read, such as biases and the first layer's weights, is not gathered again.
    """
    if placement.plan.independent:
        return Fraction(0)
    leaves = [(layout, True) for layout in jax.tree.leaves(placement.params, is_leaf=is_layout)]
    leaves += [(layout, False) for layout in jax.tree.leaves(placement.frozen, is_leaf=is_layout)]
    amounts = [_leaf(placement, layout, trained) for layout, trained in leaves]
    if placement.stages is None:
        return sum(amounts, Fraction(0))
    # The rank with the most; activations are not in it.
    stages, ranks = placement.stages.stages, placement.stages.num_ranks
    each = (sum((a for a, p in zip(amounts, stages, strict=True) if p % ranks == r), Fraction(0)) for r in range(ranks))
    return max(each)


def _leaf(placement: Placement, layout: Layout, trained: bool) -> Fraction:
    plan, share, total = placement.plan, Fraction(layout.size), Fraction(0)
    read, reduced = placement.read_itemsize(layout), plan.precision.reduce_dtype(layout.dtype)
    for axis, strategy in reversed(list(plan.strategies.items())):
        ranks = placement.degrees.get(axis, 1)
        moved = share * Fraction(ranks - 1, ranks)
        if isinstance(strategy, InLayers):
            total += 2 * moved * reduced.itemsize * (trained and strategy.sums(layout, axis))
            share /= ranks if axis in layout.axes else 1
            continue
        if isinstance(strategy, Replicate):
            total += 2 * moved * strategy.wire_itemsize(reduced) * trained
            continue
        again = plan.accumulate if strategy.each_microbatch else 1
        gathers = (2 if trained else 1) * plan.accumulate if strategy.when_used else 1
        total += moved * (gathers * read + again * reduced.itemsize * trained)
        share /= ranks
    return total
