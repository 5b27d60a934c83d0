"""What a `loss_fn` may return: weighted means that stay exact, nested metrics, and one clear error for all else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import linear

import axonml_jax as ax
from axonml_jax.model.loss import parse_loss, per_weight
from axonml_jax.testing.equality import assert_trees_close

RANKS = 2


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


class Net(nnx.Module):
    def __init__(self):
        self.layer = linear(5, 3, nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


def ragged():
    """8 rows whose token counts differ between ranks and between microbatches: 12, 1 on the first rank, 0, 5 on the other."""
    rng = np.random.default_rng(0)
    counts = np.array([6, 6, 1, 0, 0, 0, 3, 2])
    mask = (np.arange(6) < counts[:, None]).astype(float)
    return {"x": rng.normal(size=(8, 6, 5)), "y": rng.normal(size=(8, 6, 3)), "mask": mask}


def losses(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def token_mean(model, batch):
    each, mask = losses(model, batch), batch["mask"]
    correct = (each < 1.5) * mask
    metrics = {
        "accuracy": ax.WeightedMean(correct.sum(), mask.sum()),
        "by": {"kind": {"first": each[:, 0].mean(), "rows": each.shape[0]}, "tokens": ax.WeightedMean(mask.sum(), 1.0)},
    }
    return ax.WeightedMean((each * mask).sum(), mask.sum()), metrics


def one_device(batch, weight):
    graph, params = nnx.split(Net())

    def mean(params):
        return (losses(nnx.merge(graph, params), batch) * weight).sum() / weight.sum()

    loss, grads = jax.value_and_grad(mean)(params)
    return loss, nnx.to_pure_dict(grads)


@functools.cache
def gradients(mesh, accumulate, strategy):
    plan = ax.Plan(accumulate=accumulate, data=ax.Replicate(sync_strategy=strategy))
    return ax.parallelize(Net(), mesh, plan).value_and_grad(token_mean)(ragged())


@pytest.mark.parametrize("accumulate, strategy", [(1, "overlapped"), (2, "overlapped"), (4, "synchronous")])
def test_a_weighted_mean_is_exact_for_unequal_counts_on_ranks_and_microbatches(mesh, accumulate, strategy):
    (loss, metrics), grads = gradients(mesh, accumulate, strategy)
    batch = ragged()
    wanted_loss, wanted = one_device(batch, batch["mask"])
    assert_trees_close({"loss": loss, **grads}, {"loss": wanted_loss, **wanted}, "loss and gradients")
    each = losses(Net(), batch)
    correct = (each < 1.5) * batch["mask"]
    np.testing.assert_allclose(metrics["accuracy"], correct.sum() / batch["mask"].sum(), rtol=1e-12)


def test_weighting_the_examples_is_not_the_same_as_averaging_the_means(mesh):
    plain = ax.parallelize(Net(), mesh).value_and_grad(lambda m, b: losses(m, b).mean())
    _, wanted = one_device(ragged(), np.ones((8, 6)))
    assert_trees_close(plain(ragged())[1], wanted, "gradients of the plain mean")
    weighted = gradients(mesh, 1, "overlapped")[1]
    assert not np.allclose(weighted["layer"]["bias"], wanted["layer"]["bias"], rtol=1e-2)


@pytest.mark.parametrize("total", [jnp.float32, None])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_in_16_bits_are_divided_by_weights_beyond_them(request, mesh, dtype, total):
    if dtype == jnp.float16:
        request.getfixturevalue("float16")
    ddp = ax.DDP(nnx.Linear(4, 4, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype), mesh)
    weight = 100_000.0 if dtype == jnp.float16 else 257.0  # infinite and 256 in these dtypes
    own = lambda x: x.astype(total or dtype)
    loss = lambda model, x: ax.WeightedMean(jnp.sum(own(model(x))), jnp.float32(len(x)) * weight / 8)
    _, grads = ddp.value_and_grad(loss)(np.ones((8, 4), dtype))
    wanted = np.asarray(jnp.asarray(8 / weight, dtype))
    np.testing.assert_array_equal(grads["bias"], np.full(4, wanted))


class Half(nnx.Module):
    """Weights that its maker keeps in 16 bits."""

    def __init__(self):
        self.w = nnx.Param(jnp.full(4, 0.5, jnp.bfloat16))

    def __call__(self, x):
        return x.astype(jnp.bfloat16) * self.w[...]


def test_sums_of_many_microbatches_in_16_bits_are_warned_of_and_in_float32_right(mesh):
    x = np.random.default_rng(0).uniform(0.5, 1.5, (2048, 4)).astype(np.float32)
    loss = lambda model, x: model(x).mean()
    grads = lambda **options: ax.parallelize(Half(), mesh, ax.Plan(**options)).value_and_grad(loss)(x)[1]["w"]
    with pytest.warns(UserWarning, match=r"512 microbatches are summed in bfloat16.*accumulate=\"float32\""):
        grads(accumulate=512)
    got = np.asarray(grads(accumulate=512, precision=ax.Precision(accumulate="float32")), np.float32)
    np.testing.assert_allclose(got, x.mean(0) / 4, rtol=1e-2)
    found = ax.parallelize(Half(), mesh, ax.Plan()).trainer(optax.sgd(0.1), loss).check(x)
    assert found.equal and found.compared == 2, str(found)


def test_a_metric_is_not_replaced_by_one_that_the_step_reports(mesh):
    loss = lambda model, batch: (losses(model, batch).mean(), {"skipped": jnp.float32(7)})
    assert ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), loss).step(ragged())["skipped"] == 7
    with pytest.raises(ValueError, match=r"\['skipped'\], which a step reports itself: give them other names"):
        ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), loss, max_nonfinite=3).step(ragged())


def test_metrics_of_any_nesting_are_named_by_their_path(mesh):
    (_, metrics), _ = gradients(mesh, 2, "overlapped")
    assert set(metrics) == {"accuracy", "by/kind/first", "by/kind/rows", "by/tokens"}
    np.testing.assert_allclose(metrics["by/kind/first"], losses(Net(), ragged())[:, 0].mean(), rtol=1e-12)
    assert metrics["by/kind/rows"] == len(ragged()["mask"])
    assert metrics["by/tokens"] == ragged()["mask"].sum()


def test_no_gradient_flows_through_weights_and_metrics(mesh):
    def loss_fn(model, batch):
        loss = losses(model, batch).mean()
        return ax.WeightedMean(loss * 2.0, 1.0 + jax.lax.stop_gradient(loss) * 0 + loss - loss), {"copy": loss * 1e6}

    def plain(model, batch):
        return 2.0 * losses(model, batch).mean()

    ddp = ax.parallelize(Net(), mesh)
    assert_trees_close(ddp.value_and_grad(loss_fn)(ragged())[1], ddp.value_and_grad(plain)(ragged())[1], "gradients")


REFUSED = {
    "a vector": (lambda: jnp.ones(3), ValueError, r"shape \(3,\) as its loss.*reduce it.*WeightedMean"),
    "nothing": (lambda: None, TypeError, r"NoneType as its loss: return a scalar"),
    "a whole number": (lambda: jnp.sum(jnp.arange(3)), TypeError, r"dtype int.*real floating scalar"),
    "a complex number": (lambda: jnp.array(1j), TypeError, r"dtype complex.*real floating scalar"),
    "a dict": (lambda: {"loss": 1.0}, TypeError, r"dict as its loss"),
    "three values": (lambda: (1.0, {}, {}), TypeError, r"tuple as its loss.*pair"),
    "metrics in a list": (lambda: (1.0, [1.0]), TypeError, r"metrics of type list.*dict of named arrays"),
    "a metric for all metrics": (lambda: (1.0, ax.WeightedMean(1.0, 2.0)), TypeError, r"metrics of type WeightedMean"),
    "a text as a metric": (lambda: (1.0, {"a": {"b": "text"}}), TypeError, r"str as metric 'a/b'"),
    "random keys as a metric": (lambda: (1.0, {"a": jax.random.key(0)}), TypeError, r"random keys as metric 'a'"),
    "a metric that no integer holds": (
        lambda: (1.0, {"a": 2**80}),
        (ValueError, TypeError),
        r"\d+ as metric 'a'.*too large",
    ),
    "a metric that the step reports itself": (
        lambda: (1.0, {"loss": 1.0, "x": 2.0}),
        ValueError,
        r"\['loss'\].*other names",
    ),
    "a weighted vector": (lambda: ax.WeightedMean(jnp.ones(2), 1.0), ValueError, r"shape \(2,\) as its loss"),
    "a vector of weights": (lambda: ax.WeightedMean(1.0, jnp.ones(2)), ValueError, r"shape \(2,\) as its weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_one_clear_error(what):
    returned, error, match = REFUSED[what]
    with pytest.raises(error, match=match):
        parse_loss(returned())


def test_the_error_reaches_the_user_of_a_step(mesh):
    trainer = ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), lambda model, batch: losses(model, batch))
    with pytest.raises(ValueError, match=r"shape \(4, 6\) as its loss"):
        trainer.step(ragged())


# Nothing to learn

NOTHING = {
    "ddp": ({"data": 4}, ax.Plan()),
    "ddp, accumulated": ({"data": 2}, ax.Plan(accumulate=2)),
    "zero-2, typed": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(stage=2), check_vma=True)),
    "fsdp, accumulated, typed": ({"fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=3), accumulate=2, check_vma=True)),
    "hybrid": ({"data": 2, "fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=3))),
    "tensor": ({"data": 2, "tensor": 2}, ax.Plan()),
    "pipeline": ({"data": 2, "pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2))),
    "context": ({"data": 2, "context": 2}, ax.Plan()),
}


class Deep(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([linear(5, 6, nnx.Rngs(0)), linear(6, 3, nnx.Rngs(1))])

    def __call__(self, x):
        return self.blocks[1](jnp.tanh(self.blocks[0](x)))


class LinenDeep(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, param_dtype=float)(jnp.tanh(linen.Dense(6, param_dtype=float)(x)))


def masked(model, batch):
    each, mask = losses(model, batch), batch["mask"]
    return ax.WeightedMean((each * mask).sum(), mask.sum()), {"right": ax.WeightedMean((each < 1.5).sum(), mask.sum())}


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        pytest.param(plan, kind, marks=[] if "typed" in plan and kind == "nnx" else [pytest.mark.slow])
        for plan in NOTHING
        for kind in ("nnx", "linen")
        if (plan, kind) != ("tensor", "linen")
    ],
)
def test_a_batch_without_weight_has_a_loss_a_gradient_and_metrics_of_zero(plan, kind):
    degrees, settings = NOTHING[plan]
    batch = ragged() | {"mask": np.zeros((8, 6))}
    model, params = (Deep(), None) if kind == "nnx" else (LinenDeep(), LinenDeep().init(jax.random.key(0), batch["x"]))
    if "tensor" in degrees:
        ax.auto_parallelize(model, mesh_of(degrees))
    parallel = ax.parallelize(model, mesh_of(degrees), settings, params=params)
    before, trainer = parallel.state_dict(), parallel.trainer(optax.sgd(0.1), masked, max_grad_norm=1.0)
    found = jax.device_get(trainer.step(batch))
    assert (found["loss"], found["grad_norm"], found["right"]) == (0, 0, 0)
    jax.tree.map(np.testing.assert_array_equal, before, parallel.state_dict())
    assert jax.device_get(trainer.evaluate(batch)) == {"loss": 0, "right": 0}


def test_what_is_not_finite_is_not_hidden_by_a_weight_of_zero_nor_a_users_own_division(mesh):
    own = lambda model, batch: (losses(model, batch) * batch["mask"]).sum() / batch["mask"].sum()
    batch = ragged() | {"mask": np.zeros((8, 6))}
    loss, grads = ax.parallelize(Net(), mesh).value_and_grad(own)(batch)
    assert np.isnan(loss) and all(np.isnan(each).all() for each in jax.tree.leaves(grads))
    of_nan = lambda model, batch: ax.WeightedMean(losses(model, batch).sum() * jnp.nan, batch["mask"].sum())
    assert np.isnan(ax.parallelize(Net(), mesh).value_and_grad(of_nan)(batch)[0])
    for weight in (0, 0.0, np.zeros(()), jnp.zeros(())):
        assert ax.WeightedMean(3, weight).value == 0
        assert per_weight(jnp.array(1 + 2j), jnp.asarray(weight)) == 0
