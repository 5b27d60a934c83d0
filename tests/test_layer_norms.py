"""Norms of gradients and parameters by layer: those of one device under every plan, from scalars alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from own_parts import LinenNet, Net, Squares, columns, squares

import axonml_jax as ax
from axonml_jax.training.rest import layer_of

BATCH = {name: jnp.asarray(array) for name, array in columns(16).items()}
PLANS = {
    "ddp": ({"data": 8}, {}),
    "fsdp": ({"data": 2, "fsdp": 4}, {}),
    "hybrid": ({"data": 2, "fsdp": 4}, {"fsdp": ax.ShardingStrategy.HYBRID_SHARD.on_axis()}),
    "pipeline": ({"data": 4, "pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "pipeline, fsdp": ({"data": 2, "pipe": 2, "fsdp": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
}


def module(linen):
    """A model, its variables where they are given, and its loss."""
    if not linen:
        return Net(8, rngs=nnx.Rngs(0)), None, squares
    made = LinenNet(8)
    return made, made.init(jax.random.key(0), BATCH["x"], True), Squares(1.0)


def expected(linen):
    """The norms by hand."""
    model, variables, loss_fn = module(linen)
    if linen:
        params = variables["params"]
        loss = lambda params: jnp.mean((model.apply({"params": params}, BATCH["x"], True)[:, 0] - BATCH["y"]) ** 2)
    else:
        graph, params = nnx.split(model)
        params = nnx.to_pure_dict(params)

        def loss(params):
            state = nnx.state(model)
            nnx.replace_by_pure_dict(state, params)
            return loss_fn(nnx.merge(graph, state), BATCH)

    found = {}
    for name, tree in {"grad_norm": jax.grad(loss)(params), "param_norm": params}.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            at = "/".join(str(getattr(key, "key", key)) for key in path)
            key = f"{name}/{layer_of(at)}"
            found[key] = found.get(key, 0.0) + float((np.asarray(leaf, np.float64) ** 2).sum())
    return {name: np.sqrt(value) for name, value in found.items()}


@pytest.mark.parametrize("linen", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_they_are_one_devices(plan, linen):
    if linen and plan not in ("ddp", "fsdp"):
        pytest.skip("arrays rest the same for both kinds of model")
    degrees, given = PLANS[plan]
    model, variables, loss_fn = module(linen)
    parallel = ax.parallelize(model, ax.make_mesh(**degrees), ax.Plan(**given), params=variables)
    trainer = parallel.trainer(optax.sgd(0.01), loss_fn, layer_norms=True, max_grad_norm=0.1)
    metrics = {name: float(value) for name, value in trainer.step(BATCH).items() if "/" in name}
    wanted = expected(linen)
    assert metrics.keys() == wanted.keys() and len(wanted) == 8
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)


PADDED = {
    "fsdp": ({"data": 2, "fsdp": 4}, {}),
    "fsdp, int8": ({"data": 2, "fsdp": 4}, {"fsdp": ax.Shard(wire="int8")}),
    "pipeline, fsdp": ({"data": 2, "pipe": 2, "fsdp": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
}


@pytest.mark.parametrize("plan", PADDED)
def test_what_an_update_leaves_in_the_padding_counts_nowhere(plan):
    """Adam without epsilon makes NaN of a gradient that is zero always, as that of padding is."""
    degrees, given = PADDED[plan]
    parallel = ax.parallelize(Net(7, rngs=nnx.Rngs(0)), ax.make_mesh(**degrees), ax.Plan(**given))
    trainer = parallel.trainer(optax.adam(0.01, eps=0.0), squares, layer_norms=True)
    trainer.step(BATCH)
    wanted = {}
    for path, leaf in trainer.model.state_dict().items():
        key = f"param_norm/{layer_of(path)}"
        wanted[key] = wanted.get(key, 0.0) + float((np.asarray(leaf, np.float64) ** 2).sum())
    metrics = trainer.step(BATCH)
    assert np.isfinite(metrics["loss"])
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], np.sqrt(value), rtol=2e-5, err_msg=name)


def test_only_scalars_are_summed():
    def traffic(**options):
        parallel = ax.FSDP(Net(8, rngs=nnx.Rngs(0)), ax.make_mesh(data=2, fsdp=4))
        report = ax.explain(parallel.trainer(optax.sgd(0.01), squares, **options), BATCH)
        return {(row.label, row.kind): row.elements for row in report.traffic}

    plain, measured = traffic(), traffic(layer_norms=True)
    more = {key: measured[key] - plain.get(key, 0) for key in measured if measured[key] != plain.get(key, 0)}
    assert more == {("norm", "all_reduce"): 8}  # four layers, twice


@pytest.mark.parametrize("sync", ["no_sync"])
def test_ranks_with_models_of_their_own_have_norms_of_their_own(sync):
    plan = ax.Plan(data=ax.Replicate(sync_strategy=ax.GradSyncStrategy(sync)))
    trainer = ax.parallelize(Net(8, rngs=nnx.Rngs(0)), ax.make_mesh(data=8), plan).trainer(
        optax.sgd(0.01), squares, layer_norms=True
    )
    metrics = trainer.step(BATCH)
    assert metrics["grad_norm/up"].shape == (8,) and len(set(np.asarray(metrics["grad_norm/up"]).tolist())) == 8
