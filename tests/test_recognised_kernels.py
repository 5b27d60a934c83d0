"""Norms and cross entropies of others' models: found whatever the spelling, and kernels in their place change nothing."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import axonml_jax as ax
from axonml_jax.layers import fused, recognise
from axonml_jax.model.view import Variables
from tests.test_fused import both, drawn, gpu

F32, BF16 = jnp.float32, jnp.bfloat16
N, WORDS = 24, 50
CLOSE = {F32: 1e-6, BF16: 2e-2}


def with_kernels(fun):
    """`fun` as a plan with kernels="interpret" runs it."""
    call = lambda variables, args: fun(*args)
    return lambda *args: recognise.reading_kernels(call, "interpret", Variables({}, {}, {}), args)


def kernels_of(fun, *args):
    """How many norms and cross entropies there are in a program."""
    text = str(jax.make_jaxpr(fun)(*args))
    return tuple(len(re.findall(rf"\bname={name}\b", text)) for name in ("norm", "cross_entropy"))


def of_module(module):
    graph, _ = nnx.split(module, nnx.Param)
    return lambda x, **params: nnx.merge(graph, nnx.State({k: nnx.Param(v) for k, v in params.items()}))(x)


def nnx_norm(kind, *names, **options):
    call = of_module(kind(N, rngs=nnx.Rngs(0), **options))
    return lambda x, *given: call(x, **dict(zip(names, given, strict=True)))


def linen_norm(module, *names):
    return lambda x, *given: module.apply({"params": dict(zip(names, given, strict=True))}, x)


def rms(x, scale):
    wide = x.astype(F32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def gemma(x, scale):
    wide = x.astype(F32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (normed * (1 + jnp.expand_dims(scale, range(x.ndim - 1)))).astype(x.dtype)


def layer_norm(x, scale, shift):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + shift


def over_features(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


NORMS = {
    "nnx.LayerNorm": (nnx_norm(nnx.LayerNorm, "scale", "bias"), 2),
    "nnx.LayerNorm, exact variance": (nnx_norm(nnx.LayerNorm, "scale", "bias", use_fast_variance=False), 2),
    "nnx.LayerNorm without bias": (nnx_norm(nnx.LayerNorm, "scale", use_bias=False), 1),
    "nnx.LayerNorm without scale": (nnx_norm(nnx.LayerNorm, "bias", use_scale=False), 1),
    "nnx.LayerNorm alone": (nnx_norm(nnx.LayerNorm, use_scale=False, use_bias=False), 0),
    "nnx.RMSNorm": (nnx_norm(nnx.RMSNorm, "scale"), 1),
    "linen.LayerNorm": (linen_norm(linen.LayerNorm(), "scale", "bias"), 2),
    "linen.RMSNorm": (linen_norm(linen.RMSNorm(), "scale"), 1),
    "RMS norm by hand": (rms, 1),
    "Gemma's": (gemma, 1),
    "by division": (lambda x, s: (x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)) * s, 1),
    "by a power": (lambda x, s: s * (x * jnp.power(jnp.mean(x**2, -1, keepdims=True) + 1e-6, -0.5)), 1),
    "layer norm by hand": (layer_norm, 2),
    "jax.nn.standardize": (lambda x: jax.nn.standardize(x, axis=-1, epsilon=1e-5), 0),
    "its stream goes on": (lambda x, s, b: x + jnp.tanh(layer_norm(x, s, b)) + 2 * x, 2),
    "remat": (jax.checkpoint(lambda x, s: jnp.sin(rms(x, s))), 1),
    "vmap": (jax.vmap(rms, (0, None)), 1),
    "conditional": (lambda x, s: jax.lax.cond(x.sum() > 0, lambda: rms(x, s), lambda: x), 1),
    "scan": (lambda x, s: jax.lax.scan(lambda x, w: (x + rms(x, w), None), x, jnp.stack([s, 2 * s]))[0], 1),
}
NO_NORMS = {
    "epsilon outside of the root": (
        lambda x, s: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5) * s,
        1,
    ),
    "another divisor": (lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / (N - 1) + 1e-6), 0),
    "of another axis": (lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6), 0),
    "last of the vmapped": (jax.vmap(over_features, in_axes=-1, out_axes=-1), 0),
    "of another array": (lambda x: x * jax.lax.rsqrt(jnp.mean(jnp.sin(x) ** 2, -1, keepdims=True) + 1e-6), 0),
    "another's mean": (
        lambda x: (x - jnp.sin(x).mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
        0,
    ),
    "its own mean, not of the variance": (lambda x: x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5), 0),
    "rows spread over features": (
        lambda x: x[0] * jax.lax.rsqrt(jnp.mean(x[0] ** 2, -1) + 1e-6)[None, :],
        0,
    ),
}


def of_norm(vectors, dtype):
    rows = drawn(0, 2, N, N, dtype=dtype)
    return rows, *[(1 + drawn(1 + k, N)).astype(dtype) for k in range(vectors)]


def compare(fun, args, dtype):
    """In 16 bits with the same in 32: plain sums in 16 bits are less exact than the kernels'."""
    exact = both(fun, jax.tree.map(lambda x: x.astype(F32), args))
    for got, own, want in zip(both(jax.jit(with_kernels(fun)), args), both(fun, args), exact, strict=True):
        assert got.dtype == own.dtype and got.shape == own.shape
        size = float(jnp.abs(want.astype(F32)).max()) + 1e-6
        np.testing.assert_allclose(got.astype(F32) / size, want.astype(F32) / size, atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_found_whatever_its_spelling_and_equals_plain_autodiff(name, dtype):
    fun, vectors = NORMS[name]
    args = of_norm(vectors, dtype)
    assert kernels_of(with_kernels(fun), *args) == (1, 0)
    compare(fun, args, dtype)


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_only_looks_like_a_norm_stays_as_it_is(name):
    fun, vectors = NO_NORMS[name]
    args = of_norm(vectors, F32)
    assert kernels_of(with_kernels(fun), *args) == (0, 0)
    compare(fun, args, F32)


TARGETS = jax.random.randint(jax.random.key(6), (3, 7), 0, WORDS)
BYTES = jnp.where(TARGETS % 3 == 0, 255, TARGETS).astype(jnp.uint8)
ONE_HOT = lambda targets: jax.nn.one_hot(targets, WORDS)


def by_labels(targets):
    return lambda logits: optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), targets)


def at_target(values, targets=TARGETS, **options):
    return jnp.take_along_axis(values.astype(F32), targets[..., None], -1, **options)


def log_weights(logits):
    return jax.nn.log_softmax(logits.astype(F32))


LOSSES = {
    "optax, labels": by_labels(TARGETS),
    "optax, labels, in the logits' dtype": lambda logits: optax.softmax_cross_entropy_with_integer_labels(
        logits, TARGETS
    ),
    "optax, one hot": lambda logits: optax.softmax_cross_entropy(logits.astype(F32), ONE_HOT(TARGETS)),
    "optax, some targets at no word": lambda logits: optax.softmax_cross_entropy(
        logits.astype(F32), ONE_HOT(TARGETS - 25)
    ),
    "compared": lambda logits: -jnp.sum(log_weights(logits) * (TARGETS[..., None] == jnp.arange(WORDS)), -1),
    "log_softmax": lambda logits: -at_target(log_weights(logits))[..., 0],
    "its mean": lambda logits: -jnp.mean(at_target(log_weights(logits))),
    "clipped targets": lambda logits: -at_target(log_weights(logits), TARGETS + 25, mode="clip")[..., 0],
    "targets from behind": by_labels(TARGETS - WORDS),
    "some targets beyond": lambda logits: jnp.nan_to_num(by_labels(TARGETS + 25)(logits), nan=7.0),
    "bytes, some at no word": lambda logits: optax.softmax_cross_entropy(logits.astype(F32), ONE_HOT(BYTES)),
    "spread over words": lambda logits: jnp.broadcast_to(-at_target(log_weights(logits)), logits.shape),
    "some targets far behind": lambda logits: jnp.nan_to_num(by_labels(TARGETS - 75)(logits), nan=7.0),
    "logsumexp": lambda logits: jax.nn.logsumexp(logits.astype(F32), -1) - at_target(logits).squeeze(-1),
    "rows by number": lambda logits: -log_weights(logits[0])[jnp.arange(7), TARGETS[0]],
    "vmap": lambda logits: jax.vmap(lambda row, y: -log_weights(row)[y])(logits[0], TARGETS[0]),
    "z-loss beside": lambda logits: by_labels(TARGETS)(logits) + 1e-2 * jax.nn.logsumexp(logits.astype(F32), -1) ** 2,
    "accuracy beside": lambda logits: (by_labels(TARGETS)(logits), (logits.argmax(-1) == TARGETS).mean()),
    "masked": lambda logits: jnp.where(TARGETS % 2, by_labels(TARGETS)(logits), 0).sum() / 3,
}
NO_LOSSES = {
    "smoothed": lambda logits: optax.softmax_cross_entropy(
        logits.astype(F32), optax.smooth_labels(ONE_HOT(TARGETS), 0.1)
    ),
    "rows in another order": lambda logits: -log_weights(logits[0])[jnp.arange(7)[::-1], TARGETS[0]],
    "filled with zero": lambda logits: -at_target(log_weights(logits), TARGETS + 25, mode="fill", fill_value=0.0),
    "more rows than logits": lambda logits: -at_target(log_weights(logits[:1]) / jnp.ones((3, 1, 1))),
    "along another axis": lambda logits: -at_target(jax.nn.log_softmax(logits.astype(F32), axis=1)),
    "other logits": lambda logits: jax.nn.logsumexp(logits.astype(F32), -1) - at_target(2 * logits).squeeze(-1),
    "by weights": lambda logits: optax.softmax_cross_entropy(
        logits.astype(F32), jax.nn.softmax(jnp.roll(logits, 1, -1).astype(F32))
    ),
}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_is_found_whatever_its_spelling_and_equals_plain_autodiff(name, dtype):
    args = (3 * drawn(5, 3, 7, WORDS, dtype=dtype),)
    assert kernels_of(with_kernels(LOSSES[name]), *args) == (0, 1)
    compare(LOSSES[name], args, dtype)


@pytest.mark.parametrize("name", NO_LOSSES)
def test_another_loss_stays_as_it_is(name):
    args = (3 * drawn(5, 3, 7, WORDS),)
    assert kernels_of(with_kernels(NO_LOSSES[name]), *args) == (0, 0)
    compare(NO_LOSSES[name], args, F32)


def test_a_rounding_behind_a_norm_stays():
    rounded = lambda x, scale: rms(x, scale).astype(BF16).astype(F32)
    args = jnp.ones((6, N)).at[:, ::2].set(-2.3), jnp.full((N,), 1.37)
    np.testing.assert_array_equal(with_kernels(rounded)(*args), rounded(*args))


def test_floats_of_8_bits_beside_norms_are_left_as_they_are():
    fun = lambda x, w: over_features(x @ w.astype(BF16)).astype(jnp.float8_e4m3fn).astype(BF16)
    args = drawn(0, 4, N, dtype=BF16), drawn(1, N, N).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(with_kernels(fun)(*args).astype(F32), fun(*args).astype(F32))


@pytest.mark.parametrize("name", ["the same on every rank", "cast before", "targets alone differ"])
def test_kernels_in_typed_mode_vary_as_the_plain_program(name, monkeypatch):
    fun, args = {
        "the same on every rank": (lambda x, w: x @ over_features(w).T, ((8, N), (6, N))),
        "cast before": (
            lambda x, w: x @ over_features(jax.lax.pcast(w, "data", to="varying")).T,
            ((8, N), (6, N)),
        ),
        "targets alone differ": (lambda x, w: by_labels(x[:, 0].astype(int))(w), ((8, N), (2, N))),
    }[name]
    monkeypatch.setattr(fused, "platform_around", lambda: "gpu")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    call = lambda variables, args: fun(*args)
    local = lambda x, w: jax.grad(
        lambda w: recognise.reading_kernels(call, "auto", Variables({}, {}, {}), (x, w)).astype(F32).sum()
    )(w)
    split = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=True)
    assert "pallas" in str(jax.make_jaxpr(run)(*[drawn(k, *shape, dtype=BF16) for k, shape in enumerate(args)]))


# Whole models of others.


class Block(nnx.Module):
    def __init__(self, width, norm, rngs):
        self.first, self.second = norm(width, rngs=rngs), norm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.first(x), mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(jax.nn.gelu(self.up(self.second(x))))


class NNXModel(nnx.Module):
    def __init__(self, rngs, norm=nnx.LayerNorm, width=16):
        self.embed, self.head = nnx.Embed(WORDS, width, rngs=rngs), nnx.Linear(width, WORDS, rngs=rngs)
        self.blocks = nnx.List([Block(width, norm, rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens).astype(self.head.kernel.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(WORDS, 16)(tokens)
        for _ in range(2):
            x = x + linen.Dense(16)(jnp.tanh(linen.Dense(24)(linen.LayerNorm()(x))))
        return linen.Dense(WORDS)(linen.RMSNorm()(x))


def loss_fn(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]).astype(F32), batch["y"])
    return losses.sum() / losses.size


def batch_of(rows=8, length=6):
    tokens = np.random.default_rng(3).integers(0, WORDS, (rows, length + 1)).astype(np.int32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:]}


NNX = lambda: NNXModel(nnx.Rngs(0))
PLANS = {
    "DDP": ({"data": 4}, {}),
    "FSDP, recomputed": ({"fsdp": 4}, {"remat": "full"}),
    "accumulated": ({"data": 2}, {"accumulate": 2}),
    "pipeline": ({"pipe": 2, "data": 2}, {"num_microbatches": 4}),
    "tensor": ({"fsdp": 2, "tensor": 2}, {}),
}


@functools.cache
def one_device(make, steps=2):
    """Losses of so many steps in plain Flax and JAX."""
    if make is LinenModel:
        model = make()
        params = model.init(jax.random.key(0), batch_of()["x"])
        loss = lambda params: loss_fn(lambda tokens: model.apply(params, tokens), batch_of())
    else:
        graph, params = nnx.split(make(), nnx.Param)
        loss = lambda params: loss_fn(nnx.merge(graph, params), batch_of())
    found = []
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        found.append(float(value))
    return found


def wrapped(make, degrees, options):
    """The model under a plan with kernels."""
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    model, more = make(), {}
    if make is LinenModel:
        more = {"params": model.init(jax.random.key(0), batch_of()["x"])["params"]}
    elif "tensor" in degrees:
        ax.auto_parallelize(model, mesh)
    if "pipe" in degrees:
        return ax.Pipeline(model, mesh, kernels="interpret", **options, **more)
    return ax.parallelize(model, mesh, ax.Plan(kernels="interpret", **options), **more)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [NNX, LinenModel], ids=["NNX", "Linen"])
def test_a_model_of_others_trains_with_kernels_as_plainly_on_one_device(make, plan):
    if make is LinenModel and plan == "tensor":
        pytest.skip("layers of Linen models are not swapped")
    trainer = wrapped(make, *PLANS[plan]).trainer(optax.sgd(0.3), loss_fn)
    found = [float(trainer.step(batch_of())["loss"]) for _ in range(2)]
    norms, losses = kernels_of(trainer.train_step, trainer.state, batch_of())
    assert norms >= 3 and losses >= 1
    np.testing.assert_allclose(found, one_device(make), rtol=2e-5)
    seen = float(trainer.evaluate(batch_of())["loss"])
    np.testing.assert_allclose(seen, one_device(make, steps=3)[-1], rtol=2e-5)


@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_on_cpu_there_are_none_unless_they_are_asked_for(kernels):
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    trainer = ax.DDP(NNX(), mesh, kernels=kernels).trainer(optax.sgd(0.3), loss_fn)
    assert "pallas" not in str(trainer.train_step.trace(trainer.state, batch_of()).jaxpr)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "xla"])
def test_a_model_of_others_lowered_for_cuda_has_kernels_unless_they_are_off(kernels, check_vma):
    graph, params = nnx.split(NNXModel(nnx.Rngs(0), width=64), nnx.Param)
    params = jax.tree.map(lambda p: p.astype(BF16), params)
    mesh = gpu(data=2)

    def local(params, batch):
        fun = lambda variables, batch: loss_fn(nnx.merge(graph, variables.params), batch)
        loss = lambda params: recognise.reading_kernels(fun, kernels, Variables(params, {}, {}), batch)
        value, grads = jax.value_and_grad(loss)(params)
        return jax.lax.pmean(value, "data"), jax.tree.map(lambda g: jax.lax.pmean(g, "data"), grads)

    specs = PartitionSpec(), PartitionSpec("data")
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
        text = jax.jit(run).trace(params, batch_of()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == (0 if kernels == "xla" else 12)
