"""Derivatives of a user's own (`jax.custom_vjp`) in a model see the whole batch's gradient, or a warning names the line."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental.ode import odeint
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

X = np.random.default_rng(0).normal(size=(16, 6))
BATCH = {"x": X, "y": X[:, :1] ** 2}
F64 = {"param_dtype": jnp.float64}


def product(backward):
    """x @ w, whose derivative is `backward(x, w, gradient)`."""
    call = jax.custom_vjp(lambda x, w: x @ w)
    call.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: backward(*kept, g))
    return call


def of_weights(backward):
    """x @ w behind a derivative of w alone: `backward(w, gradient)`."""
    same = jax.custom_vjp(lambda w: w)
    same.defvjp(lambda w: (w, w), lambda w, g: (backward(w, g),))
    return lambda x, w: x @ same(w)


def centred(x, w):
    """(x - mean) @ w, whose derivative knows that of the mean."""
    return product(lambda x, w, g: ((g - g.mean(0)) @ w.T, (x - x.mean(0)).T @ g))(x, w)


@jax.custom_vjp
def recurrent(x, w, h):
    """Two steps of a cell from a first state, which rows have each for itself."""
    return jnp.tanh(jnp.tanh(h + x @ w) + x @ w)


recurrent.defvjp(
    lambda *given: (recurrent(*given), given),
    lambda given, g: jax.vjp(lambda x, w, h: jnp.tanh(jnp.tanh(h + x @ w) + x @ w), *given)[1](g),
)

of_carry = jax.custom_vjp(lambda h: h)
of_carry.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_jvp
def by_mean(x):
    return 2 * x


@by_mean.defjvp
def _(primals, tangents):
    return by_mean(*primals), tangents[0] * (primals[0].mean(0) + 1)


@jax.custom_jvp
def by_itself(x):
    return 2 * x


@by_itself.defjvp
def _(primals, tangents):
    return by_itself(*primals), tangents[0] * jnp.cos(primals[0])


def in_chunks(x, w, g):
    """The gradient of w summed chunk by chunk, as long products are."""
    chunks = jax.tree.map(lambda each: each.reshape(2, -1, each.shape[-1]), (x, g))
    add = lambda total, chunk: (total + chunk[0].T @ chunk[1], None)
    return g @ w.T, jax.lax.scan(add, jnp.zeros_like(w), chunks)[0]


BENT = {
    "a clip": product(lambda x, w, g: (g @ w.T, jnp.clip(x.T @ g, -0.01, 0.01))),
    "a sign": product(lambda x, w, g: (g @ w.T, 0.1 * jnp.sign(x.T @ g))),
    "a clip of weights": of_weights(lambda w, g: jnp.clip(g, -0.01, 0.01)),
    "a norm": of_weights(lambda w, g: g / (jnp.linalg.norm(g) + 1e-3)),
    "the largest": of_weights(lambda w, g: g / (jnp.abs(g).max() + 1e-3)),
    "decay": of_weights(lambda w, g: g + 0.1 * w),
    "a constant": of_weights(lambda w, g: jnp.cos(w)),
    "in a loop": of_weights(lambda w, g: jax.lax.fori_loop(0, 2, lambda _, g: jnp.clip(2 * g, -0.01, 0.01), g)),
    "orthogonalized": of_weights(lambda w, g: 1.5 * g - 0.5 * g @ g.T @ g),
    "the largest two": of_weights(lambda w, g: jnp.where(jnp.abs(g) >= jax.lax.top_k(jnp.abs(g), 2)[0][:, -1:], g, 0)),
    "by a covariance": product(lambda x, w, g: (g @ w.T, jnp.linalg.solve(x.T @ x + jnp.eye(6), x.T @ g))),
    "by a branch": of_weights(lambda w, g: jax.lax.cond(jnp.sum(g * g) > 1e-4, lambda g: g / 2, lambda g: g, g)),
    "rows by all rows": centred,
    "a rule for tangents": lambda x, w: by_mean(x @ w),
    "a gradient of jax.custom_gradient": jax.custom_gradient(
        lambda x, w: (x @ w, lambda g: (g @ w.T, jnp.sign(x.T @ g)))
    ),
}
HANDED_ON = {
    "as it is": product(lambda x, w, g: (g @ w.T, x.T @ g)),
    "twice": of_weights(lambda w, g: 2 * g),
    "masked": of_weights(lambda w, g: jnp.where(jnp.abs(w) < 0.3, g, 0.0)),
    "reversed": product(lambda x, w, g: (-g @ w.T, -(x.T @ g))),
    "row by row": product(lambda x, w, g: (jnp.clip(g, -1, 1) @ w.T, x.T @ jnp.clip(g, -0.01, 0.01))),
    "in chunks": product(in_chunks),
    "none": of_weights(lambda w, g: jnp.zeros_like(g)),
    "a rule for tangents": lambda x, w: by_itself(x @ w),
    "a carry of zeros": lambda x, w: recurrent(x, w, jnp.zeros_like(x)),
    "a clip of a carry": lambda x, w: jax.lax.scan(
        lambda h, _: (of_carry(h + jnp.tanh(x @ w)), None), jnp.zeros_like(x), None, length=2
    )[0],
    "a guard": of_weights(lambda w, g: jnp.where(jnp.isfinite(g), g, 0.0)),
    "less precision": of_weights(lambda w, g: jax.lax.reduce_precision(g, 11, 52)),
}


class Net(nnx.Module):
    def __init__(self, apply):
        rngs = nnx.Rngs(0)
        self.first, self.second, self.last = (nnx.Linear(6, n, rngs=rngs, **F64) for n in (6, 6, 1))
        self.apply = apply

    def __call__(self, x):
        h = jnp.tanh(self.first(x))
        return self.last(jnp.tanh(self.apply(h, self.second.kernel[...])))


class LinenNet(linen.Module):
    apply_: object

    @linen.compact
    def __call__(self, x):
        h = jnp.tanh(linen.Dense(6, **F64)(x))
        w = self.param("w", linen.initializers.lecun_normal(), (6, 6), jnp.float64)
        return linen.Dense(1, **F64)(jnp.tanh(self.apply_(h, w)))


def mean(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


PLANS = {
    "ddp": ({"data": 4}, ax.Plan()),
    "ddp, typed": ({"data": 4}, ax.Plan(check_vma=True)),
    "zero3": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard())),
    "zero2, hybrid": ({"data": 2, "fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=2))),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("apply", [*BENT.values(), *HANDED_ON.values()], ids=[*BENT, *HANDED_ON])
def test_a_derivative_sees_the_gradient_of_the_whole_batch(apply, plan):
    degrees, settings = PLANS[plan]
    model = Net(apply)
    assert_equals_single_device(model, mean, BATCH, settings, mesh=mesh_of(degrees), tx=optax.sgd(0.1), steps=2)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_a_derivative_whose_function_closes_over_arrays_works(plan):
    degrees, settings = PLANS[plan]
    solved = lambda x, w: odeint(lambda y, t: jnp.tanh(y @ w), x, jnp.array([0.0, 1.0]), rtol=1e-9, atol=1e-9)[-1]
    mesh, tx = mesh_of(degrees), optax.sgd(0.1)
    assert_equals_single_device(Net(solved), mean, BATCH, settings, mesh=mesh, tx=tx, steps=2)


@pytest.mark.parametrize("kind", ["a clip", "a norm"])
def test_in_a_linen_model_too(kind):
    model = LinenNet(BENT[kind])
    params = model.init(jax.random.key(0), X)
    tx, mesh = optax.sgd(0.1), mesh_of(data=4)
    assert_equals_single_device(model, mean, BATCH, ax.Plan(), params=params, mesh=mesh, tx=tx, steps=2)


def test_a_weighted_mean_is_divided_after_its_derivatives():
    clipped = jax.custom_vjp(lambda x: x)
    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))
    model = Net(lambda x, w: clipped(x @ w))
    total = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum()
    weighted = lambda model, batch: ax.WeightedMean(total(model, batch), float(len(batch["x"])))
    grads = nnx.to_pure_dict(nnx.grad(total)(model, BATCH))["first"]["kernel"] / 16
    for degrees, plan in (({"data": 1}, ax.Plan()), ({"data": 4}, ax.Plan()), ({"data": 2}, ax.Plan(accumulate=2))):
        _, own = ax.parallelize(model, mesh_of(degrees), plan).value_and_grad(weighted)(BATCH)
        np.testing.assert_allclose(own["first"]["kernel"], grads, rtol=1e-9, atol=1e-12)


MICROBATCHES = {
    "accumulate": ({"data": 2}, ax.Plan(accumulate=2)),
    "pipeline": ({"pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=("last",)))),
}


@pytest.mark.parametrize("plan", MICROBATCHES)
@pytest.mark.parametrize("kind", BENT)
def test_in_microbatches_a_warning_names_the_line(kind, plan):
    degrees, settings = MICROBATCHES[plan]
    trainer = ax.parallelize(Net(BENT[kind]), mesh_of(degrees), settings).trainer(optax.sgd(0.1), mean)
    with pytest.warns(
        UserWarning, match=r"derivatives of its own .* no sum over rows: \w+ \(line \d+ of test_own_grad"
    ):
        trainer.step(BATCH)


@pytest.mark.parametrize("plan", MICROBATCHES)
@pytest.mark.parametrize("kind", HANDED_ON)
def test_what_a_derivative_hands_on_is_left_as_it_is(kind, plan):
    degrees, settings = MICROBATCHES[plan]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=re.compile(".*no sum over rows").pattern)
        model, mesh, tx = Net(HANDED_ON[kind]), mesh_of(degrees), optax.sgd(0.1)
        assert_equals_single_device(model, mean, BATCH, settings, mesh=mesh, tx=tx, steps=2)
