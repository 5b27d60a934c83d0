"""What rests on the stages of a pipeline reaches users and files by written collectives: no warning, no whole copies."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.pipeline.store import Spread, StageStore
from axonml_jax.sharding.layout import Layout

WIDTH, VOCABULARY = 8, 13


class Net(nnx.Module):
    """Two blocks that split over tensor, a table that does not divide, and a scalar."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([ax.ParallelMLP(WIDTH, 16, use_bias=True, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.float32(-0.0))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.embed.attend(x) + self.scale[...]


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch).mean()


def equal_bits(found, wanted):
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if np.asarray(found[n]).tobytes() != np.asarray(wanted[n]).tobytes()] == []


@pytest.mark.parametrize("degrees", [{"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"fsdp": 3}], ids=str)
def test_state_dicts_and_checkpoints_give_xla_nothing_to_warn_of(capfd, tmp_path, degrees):
    plan, model = ax.Plan(pipe=ax.Pipelined(num_microbatches=2)), Net()
    wanted = {path: np.asarray(x) for path, x in ax.DDP(model, mesh_of(data=1)).state_dict().items()}
    parallel = ax.parallelize(model, mesh_of(pipe=2, **degrees), plan)
    equal_bits(parallel.state_dict(), wanted)
    trainer = parallel.trainer(optax.adam(1e-2), loss)
    trainer.step(np.arange(24 * 3).reshape(24, 3) % VOCABULARY)
    ax.save(tmp_path / "saved", trainer)
    held, moments = parallel.state_dict(), trainer.opt_state
    alone = ax.DDP(Net(), mesh_of(data=1)).trainer(optax.adam(1e-2), loss)
    ax.restore(tmp_path / "saved", alone)
    equal_bits(alone.model.state_dict(), held)
    jax.tree.map(np.testing.assert_array_equal, moments, alone.opt_state)
    assert "rematerialization" not in capfd.readouterr().err


LEAVES = {  # (shape, how it rests, on which rank) -> how it is split in the end
    "a dim divides": (Layout.replicated(jax.ShapeDtypeStruct((4, 3), "float32")), 0, PartitionSpec(("pipe", "tensor"))),
    "split already": (
        Layout.replicated(jax.ShapeDtypeStruct((8, 4), "float32")).on("tensor", 1, 2),
        1,
        PartitionSpec("pipe", "tensor"),
    ),
    "padded, another dim divides": (
        Layout.replicated(jax.ShapeDtypeStruct((5, 4), "float32")).on("tensor", 0, 2),
        1,
        PartitionSpec(None, ("tensor", "pipe")),
    ),
    "padded, no dim divides": (
        Layout.replicated(jax.ShapeDtypeStruct((5, 3), "float32")).on("tensor", 0, 2),
        0,
        PartitionSpec(),
    ),
    "a scalar in two places": (
        Layout.replicated(jax.ShapeDtypeStruct((), "int32")).on("tensor", 0, 2),
        1,
        PartitionSpec(),
    ),
    "without elements": (
        Layout.replicated(jax.ShapeDtypeStruct((3, 0), "bool")).on("tensor", 0, 2),
        0,
        PartitionSpec(),
    ),
}


def test_a_leaf_is_split_as_far_as_its_dims_divide_and_no_device_holds_more_on_the_way():
    degrees = {"pipe": 2, "tensor": 2}
    mesh = mesh_of(**degrees)
    large = Layout.replicated(jax.ShapeDtypeStruct((64, 32), "float32")).on("tensor", 1, 2)
    layouts, ranks, specs = zip(*LEAVES.values(), (large, 1, PartitionSpec("pipe", "tensor")), strict=True)
    store = StageStore(layouts, ranks, num_stages=2, num_ranks=2, degrees=degrees)
    leaves = [np.asarray(np.random.default_rng(i).normal(size=x.shape) * 9, x.dtype) for i, x in enumerate(layouts)]
    resting = store.place(leaves, mesh)
    found = store.spread(resting, mesh)
    for leaf, wanted, layout, spec in zip(found, leaves, layouts, specs, strict=True):
        assert leaf.sharding.spec == spec and leaf.dtype == layout.dtype
        np.testing.assert_array_equal(leaf, wanted)
    text = jax.jit(lambda x: store.spread(x, mesh)).lower(resting).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= max(x.addressable_shards[0].data.size for x in resting.values()), "the whole is 2,048"
    assert Spread.of(large, 1, degrees).spec == specs[-1]
