"""A linear layer that is several side by side (queries, keys and values; gate and up) pairs as those alone would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from ledger_steps import abstract_mesh
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.layers.swap import own_of_blocks
from axonml_jax.testing.equality import assert_equals_single_device

F64 = {"param_dtype": jnp.float64}
X = np.random.default_rng(0).normal(size=(4, 3, 8))


def by_split(y):
    return jnp.split(y, 3, axis=-1)


def by_slices(y):
    width = y.shape[-1] // 3
    return y[..., :width], y[..., width : 2 * width], y[..., 2 * width :]


def by_parts_first(y):
    y = y.reshape(*y.shape[:2], 3, -1, 2)
    return y[:, :, 0], y[:, :, 1], y[:, :, 2]


def by_unstacking(y):
    return jnp.moveaxis(y.reshape(*y.shape[:2], 3, -1, 2), 2, 0)


def by_heads_first(y):
    y = y.reshape(*y.shape[:2], -1, 3, 2)
    return y[:, :, :, 0], y[:, :, :, 1], y[:, :, :, 2]


def by_configuration(y):
    return (part.reshape(*part.shape[:2], 4, 2) for part in jnp.split(y, 3, axis=-1))


class Block(nnx.Module):
    """Attention and a gated layer, each with one fused projection; how queries, keys and values are cut is given."""

    def __init__(self, cut):
        rngs, self.cut = nnx.Rngs(0), cut
        self.norm, self.qkv = nnx.LayerNorm(8, rngs=rngs, **F64), nnx.Linear(8, 24, rngs=rngs, **F64)
        self.out = nnx.Linear(8, 8, use_bias=False, rngs=rngs, **F64)
        self.gate_up = nnx.Linear(8, 32, use_bias=False, rngs=rngs, **F64)
        self.down = nnx.Linear(16, 8, rngs=rngs, **F64)

    def __call__(self, x):
        heads = lambda y: y.reshape(*x.shape[:2], -1, 2)
        query, key, value = map(heads, self.cut(self.qkv(self.norm(x))))
        weights = nnx.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(*x.shape[:2], -1))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * up)


class Normed(nnx.Module):
    """Attention that normalizes every head of its queries and keys with parameters that all heads share."""

    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.query, self.key, self.out = (nnx.Linear(8, 8, rngs=rngs, **F64) for _ in range(3))
        self.of_query, self.of_key = norm(2, rngs=rngs, **F64), norm(2, rngs=rngs, **F64)

    def __call__(self, x):
        heads = lambda y: y.reshape(*x.shape[:2], -1, 2)
        query, key = self.of_query(heads(self.query(x))), self.of_key(heads(self.key(x)))
        return x + self.out((query * jnp.sin(key)).reshape(*x.shape[:2], -1))


def mean_square(model, batch):
    return jnp.mean(jnp.square(model(batch)))


CUTS = {
    by_split: "FusedColumnLinear",
    by_slices: "FusedColumnLinear",
    by_parts_first: "FusedColumnLinear",
    by_unstacking: "FusedColumnLinear",
    by_heads_first: "ColumnParallelLinear",
}


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_a_fused_layer_stays_split_however_it_is_cut(cut):
    report = ax.auto_parallelize(Block(cut), abstract_mesh(tensor=2), example=X)
    down = "RowParallelLinear"
    assert report.swapped == {"qkv": CUTS[cut], "gate_up": "FusedColumnLinear", "out": down, "down": down}


def test_a_fused_layer_whose_heads_are_written_into_a_reshape_says_why_it_is_gathered():
    report = ax.auto_parallelize(Block(by_configuration), abstract_mesh(tensor=2), example=X)
    how = {entry.path: entry.why for entry in report.entries}
    assert "on a rank's features the model's code fails: cannot reshape" in how["qkv"]
    assert report.swapped["gate_up"] == "FusedColumnLinear"
    three = ax.auto_parallelize(
        Block(by_split), abstract_mesh(tensor=8), example=X
    )  # 8 of 3 x 8 features, 1 per rank: no head
    assert three.swapped["qkv"] == "ColumnParallelLinear"


@pytest.mark.parametrize(
    ("cut", "degrees", "check_vma"),
    [(by_split, {"data": 2, "tensor": 2}, False), (by_parts_first, {"data": 1, "tensor": 4}, True)],
)
@pytest.mark.slow
def test_a_fused_layer_trains_as_on_one_device_and_rests_as_it_was(cut, degrees, check_vma):
    model, mesh = Block(cut), mesh_of(**degrees)
    kernel, wanted = model.qkv.kernel[...], model(X)
    ax.auto_parallelize(model, mesh, example=X)
    parallel = ax.parallelize(model, mesh, ax.Plan(check_vma=check_vma))
    np.testing.assert_array_equal(parallel.state_dict()["qkv/kernel"], kernel)
    assert ax.tensor_specs(model, mesh.shape)["qkv"]["kernel"] == PartitionSpec(None, "tensor")
    np.testing.assert_allclose(parallel(X), wanted, atol=1e-9)
    assert_equals_single_device(
        model, mean_square, X, mesh=mesh, tx=optax.adamw(1e-2), steps=3, plan=ax.Plan(check_vma=check_vma)
    )


@pytest.mark.parametrize("norm", [nnx.RMSNorm, nnx.LayerNorm])
@pytest.mark.parametrize("check_vma", [False, True])
def test_heads_that_are_normalized_stay_split(norm, check_vma):
    model, mesh = Normed(norm), mesh_of(data=1, tensor=2)
    report = ax.auto_parallelize(model, mesh, example=X)
    assert report.swapped["out"] == "RowParallelLinear"
    options = {"plan": ax.Plan(check_vma=check_vma), "tx": optax.adamw(1e-2), "steps": 3}
    assert_equals_single_device(model, mean_square, X, mesh=mesh, **options)


def test_a_fused_layer_of_general_heads_says_which_dim_does_not_divide():
    model = nnx.Sequential(nnx.LinearGeneral(8, (3, 4, 2), rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    report = ax.auto_parallelize(model, abstract_mesh(tensor=2))
    why = "3 in the first output dim, the only one that is split, do not divide over 2 ranks"
    assert report.left["layers/0"] == why


@pytest.mark.parametrize(("blocks", "ranks"), [(2, 2), (3, 2), (2, 4), (5, 2)])
def test_every_rank_has_its_part_of_every_block(blocks, ranks):
    mesh, whole = mesh_of(data=1, tensor=ranks), np.arange(2 * 2 * blocks * ranks).reshape(2, -1)
    own = jax.shard_map(
        lambda shard: own_of_blocks(shard, blocks, "tensor"),
        mesh=mesh,
        in_specs=PartitionSpec(None, "tensor"),
        out_specs=PartitionSpec(None, "tensor"),
    )
    parts = whole.reshape(2, blocks, ranks, 2)
    np.testing.assert_array_equal(jax.jit(own)(whole), parts.transpose(0, 2, 1, 3).reshape(2, -1))
