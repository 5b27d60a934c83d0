"""What the papers say a plan must send: the floor beside which the ledger prints what a step sends."""

from fractions import Fraction

import jax

from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout


def minimum_traffic(placement: Placement) -> Fraction:
    """Bytes per rank and update of gradients and parameters on a ring.

    For data parallelism over N ranks 2 P (N-1)/N elements of the dtype in which gradients travel; nothing under NO_SYNC.
    """
    if placement.plan.independent:
        return Fraction(0)
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    volume = sum(layout.size * placement.wire_itemsize(layout) for layout in layouts)
    ranks = placement.degrees.get("data", 1)
    return Fraction(2 * volume * (ranks - 1), ranks)
