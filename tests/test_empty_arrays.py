"""Arrays without elements go everywhere that others go: collectives, parameters under every plan, buckets, checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.collectives.gradients import gather_from, split_to
from axonml_jax.testing.equality import assert_equals_single_device

RANKS = 4
SHAPES = [(0,), (0, 4), (4, 0)]


def moved(x, group):
    """Every collective that changes no shape, and those that change dim 0 or the last, with the sizes they give."""
    n, last = len(getattr(group, "ranks", range(RANKS))), x.ndim - 1
    for op in ax.ReduceOp:
        yield x.shape, ax.all_reduce(x, group, op)
    yield x.shape, ax.broadcast(x, group, 1)
    yield x.shape, ax.send_recv(x, [(0, 1)], group)
    yield x.shape, ax.sync_gradients([x], group)[0]
    for dim in {0, last}:
        sized = lambda size, dim=dim: (*x.shape[:dim], size, *x.shape[dim + 1 :])
        yield sized(n * x.shape[dim]), ax.all_gather(x, group, dim)
        yield sized(n * x.shape[dim]), ax.gather(x, group, 1, dim)
        if x.shape[dim] % n == 0:
            yield sized(x.shape[dim] // n), ax.scatter(x, group, 1, dim)
            yield x.shape, ax.all_to_all(x, group, dim, dim)
            for op in ax.ReduceOp:
                yield sized(x.shape[dim] // n), ax.reduce_scatter(x, group, op, dim)
    if n == RANKS:
        yield x.shape, split_to(gather_from(x, "data"), "data")


@pytest.mark.parametrize(("ranks", "check_vma"), [(None, True), (None, False), ((1, 3), True), ((0, 1, 2), False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_collective_and_its_gradient_takes_an_array_without_elements(shape, ranks, check_vma):
    mesh = mesh_of(data=RANKS)
    group = "data" if ranks is None else ax.ProcessGroup(mesh, ranks=ranks, axes=("data",))

    def per_rank(x):
        x = x[0]
        for wanted, result in moved(x, group):
            assert (result.shape, result.dtype) == (wanted, x.dtype)
        total = lambda x: sum(jnp.sum(result) for _, result in moved(x, group))
        return [result[None] for _, result in moved(x, group)], jax.grad(total)(x)[None]

    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(per_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))
    _, grad = jax.block_until_ready(run(jnp.zeros((RANKS, *shape))))
    assert grad.shape == (RANKS, *shape)


class Block(nnx.Module):
    """A linear layer, one through no features at all, a sum of nothing, and a scan over stacks of nothing."""

    def __init__(self, rngs):
        zeros = lambda *shape: nnx.Param(jnp.zeros(shape, jnp.float64))
        self.linear = nnx.Linear(3, 3, param_dtype=jnp.float64, rngs=rngs)
        self.down, self.up = zeros(3, 0), zeros(0, 3)
        self.nothing, self.stack = zeros(0), zeros(3, 0, 2)

    def __call__(self, x):
        x = jnp.tanh(self.linear(x)) + (x @ self.down[...]) @ self.up[...] + jnp.sum(self.nothing[...])
        return jax.lax.scan(lambda x, w: (x + jnp.sum(w), None), x, self.stack[...])[0]


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(nnx.Rngs(i)) for i in range(2)])
        self.last = nnx.Param(jnp.zeros((0, 4), jnp.float64))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x + jnp.sum(self.last[...])


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2) + jnp.sum(batch["nothing"])


def batch(n):
    return {"x": np.random.default_rng(0).normal(size=(n, 3)), "nothing": np.zeros((n, 0))}


PIPED = functools.partial(ax.Pipelined, num_microbatches=2)
PLANS = {
    "ddp": ({"data": 2}, {"check_vma": True}),
    "flat buckets": ({"data": 2}, {"data": ax.Replicate(gradient_as_bucket_view=True), "accumulate": 2}),
    "zero1": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=1, flat=True)}),
    "zero2": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=2), "accumulate": 2, "check_vma": True}),
    "zero3": ({"fsdp": 4}, {"fsdp": ax.Shard(stage=3, prefetch=1, flat=True), "remat": "full"}),
    "hybrid": ({"data": 2, "fsdp": 2}, {"fsdp": ax.Shard(stage=3), "update": "whole"}),
    "offload": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3), "offload": ax.CPUOffload.FULL}),
    "pipeline": ({"pipe": 2}, {"pipe": PIPED(), "check_vma": True}),
    "pipeline, zero3": ({"pipe": 2, "fsdp": 2}, {"pipe": PIPED(gather="tick"), "fsdp": ax.Shard(stage=3)}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_with_parameters_without_elements_trains_as_on_one_device(plan):
    degrees, options = PLANS[plan]
    assert_equals_single_device(
        Net(),
        loss,
        batch(8),
        ax.Plan(**options),
        mesh=mesh_of(**degrees),
        tx=optax.adamw(1e-2),
        max_grad_norm=0.1,
        steps=2,
    )


def by_dims(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "rest", params)


OPTIMIZERS = {
    "whole matrices, shared out": optax.chain(optax.centralize(), optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "momentum of some": optax.partition({"matrix": optax.adam(1e-2), "rest": optax.sgd(0.1, momentum=0.9)}, by_dims),
}


@pytest.mark.parametrize("plan", ["zero3", "pipeline", "pipeline, zero3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_takes_a_parameter_without_elements_as_on_one_device(optimizer, plan):
    degrees, options = PLANS[plan]
    mesh, plan = mesh_of(**degrees), ax.Plan(**options)
    assert_equals_single_device(Net(), loss, batch(8), plan, mesh=mesh, tx=OPTIMIZERS[optimizer], steps=2)


def test_they_are_saved_and_restored_under_another_plan_and_seen_in_their_shapes(tmp_path):
    first = ax.FSDP(Net(), mesh_of(fsdp=4)).trainer(optax.adam(1e-2), loss)
    first.step(batch(8))
    ax.save(tmp_path / "saved", first)
    piped = ax.parallelize(Net(), mesh_of(pipe=2, fsdp=2), ax.Plan(pipe=PIPED()))
    second = piped.trainer(optax.adam(1e-2), loss)
    ax.restore(tmp_path / "saved", second)
    wanted, found = first.model.state_dict(), piped.state_dict()
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in wanted.items()}
    assert wanted["blocks/0/down"].shape == (3, 0)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    ax.save(tmp_path / "again", second)
    ax.restore(tmp_path / "again", first)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0, "shared_size": 8}], ids=["dropless", "capacity"])
@pytest.mark.parametrize(("ranks", "check_vma"), [(1, True), (2, True), (2, False)])
def test_experts_take_no_tokens(ranks, check_vma, options):
    layer = ax.ParallelMoE(6, 8, 4, rngs=nnx.Rngs(0), **options)
    graph, params, others = nnx.split(layer, nnx.Param, ...)
    specs = jax.tree.map(lambda x: PartitionSpec("expert") if x.ndim == 3 else PartitionSpec(), params)
    loss = lambda params, x: (lambda y, r: y.sum() + r.load_balance + r.z)(*nnx.merge(graph, params, others)(x))
    whole = lambda params, x: (nnx.merge(graph, params, others)(x)[0], jax.grad(loss, argnums=(0, 1))(params, x))
    rows = PartitionSpec("expert")
    run = jax.shard_map(
        whole, mesh=mesh_of(expert=ranks), in_specs=(specs, rows), out_specs=(rows, (specs, rows)), check_vma=check_vma
    )
    for shape in ((0, 4, 6), (2, 0, 6)):
        y, (grads, _) = jax.jit(run)(params, jnp.zeros(shape))
        assert (y.shape, y.dtype) == (shape, layer(jnp.zeros((1, 1, 6)))[0].dtype)
        jax.tree.map(lambda grad: np.testing.assert_array_equal(grad, 0), grads)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)], ids=str)
def test_attention_takes_no_rows_no_queries_and_no_keys(sizes, method, ranks):
    rows, queries, keys = sizes
    q, k = jnp.ones((rows, queries, 2, 3)), jnp.ones((rows, keys, 2, 3))
    plain = lambda q, k: jax.nn.dot_product_attention(q, k, k)
    attend = lambda q, k: ax.context_attention(q, k, k, method=method)
    both = lambda attend: lambda q, k: (attend(q, k), jax.grad(lambda q, k: attend(q, k).sum(), argnums=(0, 1))(q, k))
    split = PartitionSpec(None, "context")
    run = jax.shard_map(both(attend), mesh=mesh_of(context=ranks), in_specs=split, out_specs=split)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(q, k), both(plain)(q, k))
