"""Ranks may hold positions in an order of their own: batches, calls and steps stay in the sequence's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import plain_mesh_of
from position_models import WORDS, Positions, Words, batch_of, loss

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.layers.context import put_back
from axonml_jax.ledger.count import collectives_in
from axonml_jax.sharding.batch import check_batch
from axonml_jax.sharding.layout import sequence_order
from axonml_jax.strategies.strategy import ContextSplit, current_split, split_by


@dataclasses.dataclass(frozen=True)
class Ordered(Positions):
    """Ranks hold positions in an order of their own, draw with the same keys, and the model's code is told so."""

    order: str = "zigzag"
    keys: str = "alike"

    @property
    def role(self):
        return ax.Role(batch="positions", keys=self.keys)

    @property
    def position_order(self):
        return self.order

    def inside(self, axis):
        return split_by(ContextSplit(axis, self.order))

    def model_problems(self, model, axis, degrees):
        return [f"no head along {axis} of {degrees}"] * ("head/kernel" not in named_leaves(model.shapes.params))


class Placed(Words):
    """A model that says which position every token is of, as the split around it says."""

    def __call__(self, tokens):
        split = current_split("seq")
        count = tokens.shape[1]
        own = jnp.arange(count) if split is None else split.own_positions(count)
        return super().__call__(tokens) * (1 + own[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("length", [12, 36])
@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_a_call_is_given_and_gives_positions_in_the_sequences_order(order, length):
    model, tokens = Placed(), np.random.default_rng(0).integers(0, WORDS, (4, length))
    mesh = plain_mesh_of({"data": 2, "seq": 3})
    parallel = ax.parallelize(model, mesh, ax.Plan(axes={"seq": Ordered(order=order)}))
    wanted = model(tokens)
    on_rows = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, PartitionSpec("data")))
    split = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, PartitionSpec("data", "seq")))
    for given in (tokens, jnp.asarray(tokens), on_rows, split, split):
        np.testing.assert_allclose(parallel(given), wanted, rtol=1e-5, atol=1e-5)


def test_leaves_of_other_lengths_are_each_in_the_order_of_their_own_length():
    class Second(Ordered):
        def position_dim(self, path, shape):
            return {"frames": 2, "tokens": 1}.get(path)

    layout = ax.Plan(axes={"seq": Second()}).batch_layout({"data": 2, "seq": 2})
    batch = {
        "frames": np.arange(24).reshape(2, 1, 12),
        "tokens": np.arange(8).reshape(2, 4),
        "mask": np.arange(8).reshape(2, 4),
    }
    placed = layout.opened(layout.place(batch, plain_mesh_of({"data": 2, "seq": 2})))
    assert placed["frames"][0, 0].tolist() == sequence_order("zigzag", 12, 2).tolist()
    assert placed["tokens"][1].tolist() == [4, 7, 5, 6] and placed["mask"].tolist() == batch["mask"].tolist()
    with pytest.raises(TypeError, match=r"orders \{'seq': 'zigzag'\}, but this batch was not placed in them"):
        layout.opened(batch)
    with pytest.raises(
        ValueError, match=r"6 positions \(dim 1\) over \('seq',\) \(2 ranks, order 'zigzag'\): 4 or 8 do"
    ):
        check_batch(layout, {"tokens": np.zeros((2, 6)), "mask": np.zeros((2, 6))})


def test_a_compiled_step_takes_no_batch_in_another_order():
    trainer = ax.parallelize(Words(), plain_mesh_of({"seq": 2}), ax.Plan(axes={"seq": Ordered()})).trainer(
        optax.sgd(0.1), loss
    )
    batch = {name: x[:, :4] if x.ndim > 1 else x for name, x in batch_of().items()}
    compiled = trainer.train_step.lower(trainer.state, batch).compile()
    with pytest.raises(TypeError):
        compiled(trainer.state, batch)


def test_keys_are_alike_or_own_along_positions_and_always_own_along_rows():
    def placement(keys):
        plan = ax.Plan(axes={"seq": Ordered(keys=keys)})
        return ax.parallelize(Words(), plain_mesh_of({"data": 2, "seq": 2}), plan)._placement

    assert (placement("own").axes.keys, placement("alike").axes.keys) == (("data", "seq"), ("data",))
    with pytest.raises(ValueError, match="keys='alike' goes with batch='positions'"):
        ax.Role(keys="alike")


def test_a_strategy_refuses_a_model_and_one_order_is_that_of_one_axis():
    with pytest.raises(ValueError, match=r"no head along seq of \{'seq': 2\}"):
        ax.parallelize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), plain_mesh_of({"seq": 2}), ax.Plan(axes={"seq": Ordered()}))
    layout = ax.Plan(axes={"seq": Ordered(), "more": Positions()}).batch_layout({"seq": 2, "more": 2})
    with pytest.raises(ValueError, match=r"several axes split the positions of \{'x': \('seq', 'more'\)\}"):
        check_batch(layout, {"x": np.zeros((2, 8))})


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_every_process_places_its_own_parts_in_the_ranks_order(order, monkeypatch):
    layout = ax.Plan(axes={"seq": Ordered(order=order)}).batch_layout({"data": 2, "seq": 2})
    tokens, mesh = np.arange(48).reshape(4, 12), plain_mesh_of({"data": 2, "seq": 2})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for given in (tokens, jnp.asarray(tokens)):
        (placed,) = jax.tree.leaves(layout.place({"tokens": given}, mesh))
        np.testing.assert_array_equal(placed, tokens[:, sequence_order(order, 12, 2)])
        assert placed.sharding.spec == PartitionSpec(("data",), ("seq",))


def test_every_process_places_random_keys(monkeypatch):
    layout, mesh = ax.Plan().batch_layout({"data": 2}), plain_mesh_of({"data": 2})
    given = {"key": jax.random.key(1), "rows": jax.random.split(jax.random.key(2), 4)}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    placed = layout.place(given, mesh)
    assert jax.random.bits(placed["key"]) == jax.random.bits(given["key"])
    bits = jax.vmap(jax.random.bits)
    np.testing.assert_array_equal(bits(placed["rows"]), bits(given["rows"]))
    assert placed["rows"].sharding.shard_shape((4,)) == (2,)


@pytest.mark.parametrize(
    ("order", "length", "sent"),
    [("zigzag", 24, [("permute", 8)]), ("striped", 18, [("all_to_all", 6)]), ("striped", 12, [("all_gather", 12)])],
)
def test_outputs_are_put_back_by_exchanges_of_no_more_than_they_hold(order, length, sent):
    """Elements of one row; a gather only where a rank's positions do not divide over the ranks."""
    spec, given = PartitionSpec(None, "seq"), jnp.zeros((1, length))
    local = lambda x: put_back(x, 1, "seq", order)
    program = jax.shard_map(local, mesh=plain_mesh_of({"seq": 3}), in_specs=spec, out_specs=spec)
    assert [(each.kind, each.elements) for each in collectives_in(program, given)] == sent
    in_order = np.arange(length)[sequence_order(order, length, 3)]
    assert jax.jit(program)(in_order[None])[0].tolist() == list(range(length))
