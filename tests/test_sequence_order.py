"""Which rank holds which positions of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axonml_jax.sharding.layout import ORDERS, causal_balance, order_parts, sequence_order
from axonml_jax.strategies.strategy import ContextSplit, current_split, positions_of, seen_whole, split_by


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
    assert causal_balance(order, 256, 4) == pytest.approx(work.max() / work.mean(), rel=1e-12)


def test_what_does_not_divide_and_unknown_orders_are_refused():
    with pytest.raises(
        ValueError, match=r"12 positions do not divide into the 8 parts of order=.zigzag. over 4 ranks.*to 16"
    ):
        sequence_order("zigzag", 12, 4)
    with pytest.raises(ValueError, match="order='dual' must be one of contiguous, zigzag, striped"):
        sequence_order("dual", 8, 2)


@jax.jit
def own_positions(x):
    split = current_split("context")
    return jnp.full(x.shape, -1) if split is None else split.own_positions(x.shape[0])


def test_a_function_under_an_inner_jit_is_traced_anew_under_another_split():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("context",))
    spec = PartitionSpec("context")

    def seen(within):
        def local(x):
            with within:
                return own_positions(x)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.zeros(8)).tolist()

    assert seen(split_by(ContextSplit("context", "zigzag"))) == sequence_order("zigzag", 8, 2).tolist()
    assert seen(split_by(ContextSplit("context", "striped"))) == sequence_order("striped", 8, 2).tolist()
    assert seen(seen_whole("context")) == [-1] * 8
    assert seen(split_by(ContextSplit("other", "striped"))) == list(range(8))
