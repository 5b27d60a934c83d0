"""Which rank holds which positions of a sequence."""

import numpy as np
import pytest

from axonml_jax.parallel.context.context_split import positions_of
from axonml_jax.sharding.sequence_order import ORDERS, order_parts, sequence_order


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_every_position_is_held_once_and_a_rank_knows_its_own(order, ranks):
    length = 3 * order_parts(order, ranks)
    held = sequence_order(order, length, ranks)
    np.testing.assert_array_equal(np.sort(held), np.arange(length))
    for rank, own in enumerate(held.reshape(ranks, -1)):
        np.testing.assert_array_equal(positions_of(order, rank, ranks, len(own)), own)


@pytest.mark.parametrize(("order", "balance"), [("contiguous", 2 - 1 / 4), ("zigzag", 1.0), ("striped", 1.0117)])
def test_the_causal_work_of_ranks_is_as_balanced_as_said(order, balance):
    work = (sequence_order(order, 256, 4).reshape(4, -1) + 1).sum(axis=1)
    assert work.max() / work.mean() == pytest.approx(balance, rel=3e-3)


def test_what_does_not_divide_and_unknown_orders_are_refused():
    with pytest.raises(
        ValueError, match=r"12 positions do not divide into the 8 parts of order=.zigzag. over 4 ranks.*to 16"
    ):
        sequence_order("zigzag", 12, 4)
    with pytest.raises(ValueError, match="order='dual' must be one of contiguous, zigzag, striped"):
        sequence_order("dual", 8, 2)
