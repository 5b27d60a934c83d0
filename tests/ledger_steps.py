"""Small steps for the ledger's tests, on a mesh of no devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

BOTH = ("data", "tensor")
SHARDED = P(BOTH)


def abstract_mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


MESH = abstract_mesh(data=2, tensor=4)


def on_mesh(body, *, mesh=MESH, in_specs=SHARDED, out_specs=SHARDED, check_vma=False, **options):
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **options)
    )


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


class Kind(NamedTuple):
    """One communicating call on a shard of (8, 8) floats: what the ledger must say of it."""

    call: object
    kind: str
    axes: tuple
    group_size: int
    elements: int
    wire_bytes: int
    out_specs: object = SHARDED
    modes: tuple = (False, True)
    op: str = ""


SWAP = [(0, 1), (1, 0)]
PAIRS = ((0, 1), (2, 3))
KINDS = {
    "psum": Kind(lambda x: lax.psum(x, "data"), "all_reduce", ("data",), 2, 64, 256, op="sum"),
    "psum two axes": Kind(lambda x: lax.psum(x, BOTH), "all_reduce", BOTH, 8, 64, 448, P(), op="sum"),
    "psum groups": Kind(
        lambda x: lax.psum(x, "tensor", axis_index_groups=PAIRS), "all_reduce", ("tensor",), 2, 64, 256,
        modes=(False,), op="sum",
    ),
    "psum unequal groups": Kind(
        lambda x: lax.psum(x, "tensor", axis_index_groups=((0, 1, 2), (3,))), "all_reduce", ("tensor",), 3, 48, 256,
        modes=(False,), op="sum",
    ),
    "pmean": Kind(lambda x: lax.pmean(x, "tensor"), "all_reduce", ("tensor",), 4, 64, 384, op="sum"),
    "pmax": Kind(lambda x: lax.pmax(x, "data"), "all_reduce", ("data",), 2, 64, 256, op="max"),
    "pmin": Kind(lambda x: lax.pmin(x, "data"), "all_reduce", ("data",), 2, 64, 256, op="min"),
    "all_gather": Kind(
        lambda x: lax.all_gather(x, "tensor", tiled=True)[:8], "all_gather", ("tensor",), 4, 256, 768
    ),
    "all_gather stacked": Kind(lambda x: lax.all_gather(x, BOTH)[0], "all_gather", BOTH, 8, 512, 1792),
    "all_gather invarying": Kind(
        lambda x: lax.all_gather(x, "data", tiled=True, to="invarying"), "all_gather", ("data",), 2, 128, 256,
        P("tensor"),
    ),
    "all_gather groups": Kind(
        lambda x: lax.all_gather(x, "tensor", axis_index_groups=PAIRS)[0], "all_gather", ("tensor",), 2, 128, 256
    ),
    "psum_scatter": Kind(
        lambda x: lax.psum_scatter(x, "tensor", tiled=True), "reduce_scatter", ("tensor",), 4, 64, 192, op="sum"
    ),
    "psum_scatter two axes": Kind(
        lambda x: lax.psum_scatter(x, BOTH), "reduce_scatter", BOTH, 8, 64, 224, op="sum"
    ),
    "all_to_all": Kind(lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True), "all_to_all", ("data",), 2, 64, 128),
    "all_to_all groups": Kind(
        lambda x: lax.all_to_all(x, "tensor", 0, 1, axis_index_groups=PAIRS, tiled=True),
        "all_to_all", ("tensor",), 2, 64, 128,
    ),
    "ppermute": Kind(lambda x: lax.ppermute(x, "data", SWAP), "permute", ("data",), 2, 64, 256),
    "pshuffle": Kind(lambda x: lax.pshuffle(x, "data", [1, 0]), "permute", ("data",), 2, 64, 256),
    "pbroadcast": Kind(lambda x: lax.pbroadcast(x, ("data",), 0), "broadcast", ("data",), 2, 64, 256),
    "ragged_all_to_all": Kind(
        lambda x: lax.ragged_all_to_all(x, x, *[jnp.zeros(2, jnp.int32)] * 4, axis_name="data"),
        "ragged_all_to_all", ("data",), 2, 64, 256,
    ),
}  # fmt: skip
CASES = [(name, vma) for name, case in KINDS.items() for vma in case.modes]


def ddp_step(mesh, *, check_vma):
    """Plain data parallelism by hand: one reduction for the gradients, one for the loss."""

    def step(params, batch):
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params) if check_vma else params
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(local)
        with jax.named_scope("axonml.gradients"):
            grads = lax.pmean(grads, "data")
        with jax.named_scope("axonml.metrics"):
            loss = lax.pmean(loss, "data")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return on_mesh(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)


def zero3_step(mesh, *, layers, check_vma):
    """Sharded parameters gathered in a checkpointed scan, forward and again backward."""

    def block(x, shard):
        with jax.named_scope("axonml.parameters"):
            weight = lax.all_gather(shard, "fsdp", tiled=True)
        return jnp.tanh(x @ weight), None

    def loss(shards, x):
        y, _ = lax.scan(jax.checkpoint(block), x, shards)
        return jnp.sum(y**2)

    def step(shards, x):
        grads = jax.grad(loss)(shards, x)
        return shards - 0.1 * grads

    return on_mesh(
        step, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P(None, "fsdp"), check_vma=check_vma
    )
