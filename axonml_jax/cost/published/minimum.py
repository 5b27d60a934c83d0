"""What the papers say a plan must send: the amount beside which the ledger prints what a step sends. It decides nothing."""

import math
from collections.abc import Mapping
from fractions import Fraction

import jax

from axonml_jax.cost.rounds import rounds
from axonml_jax.mesh.axes import as_axes
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import Layout, is_layout


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring, padding not counted.

    With P elements on N ranks and A microbatches, (N-1)/N times: 2P along a replicated axis (DDP); 2P, (1+A)P and 3AP along a
    sharded one (ZeRO-1, 2 and 3), and then the axes outside it reduce only a rank's part. A pipeline's rank moves its own
    stages: 2P where it gathers them once per step, 3P for each time that it gathers them otherwise. Gathered parameters
    travel in the compute dtype, gradients in the reduce dtype. Nothing travels along an axis under NO_SYNC. A step may send a
    little less than ZeRO-3's amount: what the backward does not read, such as biases and the first layer's weights, is not
    gathered again.
    """
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
    share, total = Fraction(layout.size), Fraction(0)
    read, reduced = plan.precision.read_dtype(layout.dtype), plan.precision.reduce_dtype(layout.dtype)
    for axis, strategy in reversed(plan.on(degrees).items()):
        role, ranks = strategy.role, math.prod(degrees[name] for name in as_axes(axis))
        moved, split = share * Fraction(ranks - 1, ranks), layout.dim_of(axis) is not None
        if role.parameters == "sharded":
            often = rounds(plan, degrees, role)
            gathers = often.forward + often.backward * trained
            total += moved * (gathers * read.itemsize + often.scatters * reduced.itemsize * trained)
        elif role.batch is not None and role.reduces != "never" and not split:
            total += 2 * moved * strategy.wire_dtype(reduced).itemsize * trained
        share /= ranks if split or role.parameters == "sharded" else 1
    return total
