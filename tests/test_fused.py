"""Kernels of norms, GELU, cut products and cross entropy: equal to plain autodiff, off by name, lowered for CUDA."""

import functools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import axonml_jax as ax
from axonml_jax.layers import fused
from axonml_jax.layers.losses import vocab_parallel_cross_entropy
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.compile import compiler_options
from axonml_jax.training.rest import norm, vectors_together

F32, BF16 = jnp.float32, jnp.bfloat16
CLOSE = {F32: 2e-5, BF16: 2e-2}


def drawn(seed: int, *shape: int, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, F32).astype(dtype)


def plain_norm(x, scale, shift, epsilon, centers):
    wide = x.astype(F32)
    wide = wide - wide.mean(-1, keepdims=True) if centers else wide
    y = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * scale
    return (y if shift is None else y + shift).astype(x.dtype)


def operations(dtype, rows=37, n=96, v=1000):
    """By name: the operation, what it is in plain JAX, its arguments."""
    x, scale, shift = drawn(0, 3, rows, n, dtype=dtype), 1 + drawn(1, n), drawn(2, n)
    bias, z = drawn(3, n), drawn(4, rows, n, dtype=dtype)
    logits = 4 * drawn(5, 3, rows, v, dtype=dtype)
    targets = jax.random.randint(jax.random.key(6), (3, rows), 0, v).at[0, 3].set(-1)

    def beside(centers):
        kind = {"epsilon": 1e-6, "centers": centers}
        return (
            lambda x, *more: fused.norm_beside(x, *more, **kind, form="interpret"),
            lambda x, *more: (plain_norm(x, *more, 1e-6, centers), x),
        )

    def entropy(logits):
        wide = logits.astype(F32)
        at = jnp.take_along_axis(wide, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.where(targets < 0, 0, jax.nn.logsumexp(wide, axis=-1) - at)

    def fused_entropy(logits):
        with fused.asking_for("interpret"):
            return vocab_parallel_cross_entropy(logits, targets, ())

    rms = lambda x, s: plain_norm(x, s, None, 1e-5, False)
    cut = lambda z, b: tuple(jnp.split((z.astype(F32) + b).astype(z.dtype), [32, 80], axis=-1))
    return {
        "layer norm beside": (*beside(True), (x, scale, shift)),
        "RMS norm": (
            lambda x, s: fused.norm(x, s, None, epsilon=1e-5, centers=False, form="interpret"),
            rms,
            (x, scale),
        ),
        "gelu": (
            lambda u, b: fused.bias_gelu(u, b, form="interpret"),
            lambda u, b: jax.nn.gelu(u.astype(F32) + b, approximate=True).astype(u.dtype),
            (x, bias),
        ),
        "parts": (lambda z, b: fused.biased_parts(z, b, (32, 48, 16), form="interpret"), cut, (z, bias)),
        "cross entropy": (fused_entropy, entropy, (logits,)),
    }


def both(fun, args):
    """Results, and gradients of a fixed weighted sum of them."""

    def weighed(*args):
        out = fun(*args)
        parts = [jnp.vdot(drawn(50 + i, *o.shape), o.astype(F32)) for i, o in enumerate(jax.tree.leaves(out))]
        return sum(parts), out

    (_, out), grads = jax.value_and_grad(weighed, range(len(args)), has_aux=True)(*args)
    return jax.tree.leaves((out, grads))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("around", ["plainly", "remat", "vmap", "scan"])
@pytest.mark.parametrize("name", operations(F32))
def test_kernels_and_their_gradients_equal_plain_autodiff(name, around, dtype):
    ours, plain, args = operations(dtype)[name]
    if around == "remat":
        ours = jax.checkpoint(ours)
    elif around == "vmap":
        if args[0].ndim < 3 or name == "cross entropy":
            pytest.skip("its rows are one dim here")
        dims = (0, *[None] * (len(args) - 1))
        ours = jax.vmap(ours, in_axes=dims)
    elif around == "scan":
        once, whole = ours, args[0]
        ours = lambda x, *more: jax.lax.scan(lambda carry, each: (carry, once(each, *more)), 0.0, x[None])[1]
        ours = (lambda inner: lambda *a: jax.tree.map(lambda leaf: leaf[0], inner(*a)))(ours)
        assert whole.ndim
    for got, want in zip(both(jax.jit(ours), args), both(plain, args), strict=True):
        assert got.dtype == want.dtype
        scale = float(jnp.abs(want.astype(F32)).max()) + 1e-6
        np.testing.assert_allclose(got.astype(F32) / scale, want.astype(F32) / scale, atol=CLOSE[dtype])


# Whole models.

GPT = {"vocab_size": 64, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_length": 12, "mlp_hidden_size": 48}
GPT |= {"norm": "layernorm", "activation": "gelu", "position": "learned", "use_bias": True}
LLAMA = GPT | {"norm": "rmsnorm", "activation": "swiglu", "position": "rotary", "use_bias": False, "num_kv_heads": 2}
ALL = {"norm", "norm_back", "cross_entropy", "cross_entropy_back"}
BIASED = {"split", "join"}
MODELS = {
    "GPT": (GPT, ALL | BIASED | {"gelu", "gelu_back"}),
    "Llama": (LLAMA, ALL),
    "Gemma": (LLAMA | {"zero_centered_norm": True, "post_norms": True}, ALL),
    "biased queries": (LLAMA | {"qkv_bias": True}, ALL | BIASED),
    "in one loop": (GPT | {"scan_layers": True}, ALL | BIASED | {"gelu", "gelu_back"}),
}
PLANS = {
    "DDP": ({"data": 4}, {}),
    "FSDP, recomputed": ({"fsdp": 4}, {"remat": "full"}),
    "tensor, FSDP": ({"fsdp": 2, "tensor": 2}, {}),
    "context": ({"context": 2, "data": 2}, {}),
    "accumulated": ({"data": 2}, {"accumulate": 2}),
}


def batch_of(rows=8, length=12):
    tokens = np.random.default_rng(3).integers(0, 64, (rows, length + 1)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, :5] = -1
    return {"x": tokens[:, :-1], "y": targets}


def loss_fn(model, batch):
    return ax.WeightedMean(*model.loss(batch["x"], batch["y"]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_kernels_trains_as_the_plain_one_on_one_device(name, plan):
    (sizes, kernels), (degrees, options) = MODELS[name], PLANS[plan]
    make = lambda: Transformer(TransformerConfig(**sizes), rngs=nnx.Rngs(0))
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    model = ax.parallelize(make(), mesh, ax.Plan(kernels="interpret", **options))
    trainer = model.trainer(optax.sgd(0.3), loss_fn)
    found = [float(trainer.step(batch_of())["loss"]) for _ in range(2)]
    used = set(re.findall(r"\bname=(\w+)", str(trainer.train_step.trace(trainer.state, batch_of()).jaxpr)))
    assert kernels <= used
    np.testing.assert_allclose(found, one_device(name), rtol=2e-5)


@functools.cache
def one_device(name):
    """Two losses of plain JAX: the model and its gradient on one device, without kernels."""
    graph, params = nnx.split(Transformer(TransformerConfig(**MODELS[name][0]), rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params):
        total, weight = nnx.merge(graph, params).loss(batch_of()["x"], batch_of()["y"])
        return total / weight

    run, found = jax.jit(jax.value_and_grad(loss)), []
    for _ in range(2):
        value, grads = run(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        found.append(float(value))
    return found


def gpu(**degrees):
    """A mesh of GPUs that need not be there."""
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    axes = tuple(degrees)
    return AbstractMesh(tuple(degrees.values()), axes, (AxisType.Auto,) * len(axes), abstract_device=device)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "xla"])
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_a_model_lowered_for_cuda_has_kernels_unless_they_are_off(name, kernels, check_vma):
    sizes = MODELS[name][0] | {"vocab_size": 256, "hidden_size": 64, "dtype": "bfloat16", "attention": "xla"}
    graph, params = nnx.split(Transformer(TransformerConfig(**sizes), rngs=nnx.Rngs(0)), nnx.Param)
    batch, mesh = batch_of(), gpu(data=2)

    def grads(params, batch):
        def local(params):
            with fused.asking_for(kernels):
                total, weight = nnx.merge(graph, params).loss(batch["x"], batch["y"])
            return jax.lax.psum(total, "data") / jax.lax.psum(weight, "data")

        return jax.grad(local)(params)

    specs = (PartitionSpec(), PartitionSpec("data"))
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma))
        text = run.trace(params, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == (0 if kernels == "xla" else {"GPT": 20, "Llama": 12}[name])


def test_nothing_but_the_three_words_is_a_choice_of_kernels():
    with pytest.raises(ValueError, match="kernels='triton' must be 'auto', 'xla' or 'interpret'"):
        ax.Plan(kernels="triton")
    with pytest.raises(
        ValueError, match=r"kernels=.interpret. with check_vma=True.*Take check_vma=False to try kernels"
    ):
        ax.Plan(kernels="interpret", check_vma=True)
    assert ax.Plan(kernels="auto", check_vma=True).check_vma


# What decides.


def kernels_of(model, **options):
    """The names of the kernels in a step."""
    plan = ax.Plan(kernels="interpret", **options)
    trainer = ax.parallelize(model, ax.make_mesh(data=1, devices=jax.devices()[:1]), plan).trainer(
        optax.sgd(0.1), loss_fn
    )
    return set(re.findall(r"\bname=(\w+)", str(trainer.train_step.trace(trainer.state, batch_of()).jaxpr)))


def test_weights_that_adapters_or_8_bits_look_for_keep_products_of_their_own():
    make = lambda: Transformer(TransformerConfig(**GPT), rngs=nnx.Rngs(0))
    apart = BIASED | {"gelu", "gelu_back"}
    assert apart <= kernels_of(make())
    adapted = kernels_of(ax.lora(make(), rank=2, alpha=4, targets="kernel$"))
    rounded = kernels_of(make(), precision="fp8")
    assert not apart & adapted and not apart & rounded
    assert {"norm", "cross_entropy"} <= adapted & rounded


@pytest.mark.parametrize("shape, dtype", [((4, 8193), BF16), ((4, 1), BF16), ((0, 8), BF16), ((4, 8), jnp.float64)])
def test_what_no_kernel_takes_is_computed_plainly(shape, dtype):
    with fused.asking_for("interpret"):
        assert fused.chosen(jax.ShapeDtypeStruct(shape, dtype)) == "xla"
        assert fused.chosen(jax.ShapeDtypeStruct((4, 8192), BF16)) == "interpret"


def test_axes_that_are_left_to_the_partitioner_have_no_kernels():
    with jax.sharding.use_abstract_mesh(gpu(data=2)):
        assert fused.chosen(jax.ShapeDtypeStruct((4, 8), BF16)) == "xla"


def test_targets_beyond_the_vocabulary_are_nan_by_kernels_too():
    logits, targets = drawn(0, 3, 40), jnp.array([1, 40, -1])
    loss = lambda logits: jax.jit(lambda t: vocab_parallel_cross_entropy(logits, t, ()))(targets)
    with fused.asking_for("interpret"):
        found, grads = loss(logits), jax.grad(lambda logits: loss(logits).sum())(logits)
    assert np.isnan(found[1]) and found[2] == 0 and np.isfinite(found[0])
    assert np.isnan(grads[1]).all() and (grads[2] == 0).all() and np.isfinite(grads[0]).all()


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_the_norm_of_vectors_that_are_joined_is_that_of_each(p):
    parts = [(drawn(i, *shape), F32, ()) for i, shape in enumerate([(7,), (3, 4), (5,), (2,), ()])]
    joined = vectors_together(parts)
    assert sorted(each.shape for each, _, _ in joined) == [(), (3, 4), (14,)]
    flat = np.concatenate([np.ravel(each) for each, _, _ in parts])
    np.testing.assert_allclose(norm(joined, p), np.linalg.norm(flat, p), rtol=1e-6)


@pytest.mark.parametrize("precision, units, flags, left_out", [
    (None, 8, "", True), (None, 8192, "", False), ("fp8", 8192, "", True),
    (None, 8, "--xla_gpu_enable_triton_gemm=true", False),
])  # fmt: skip
def test_small_models_and_8_bits_build_without_triton_products(precision, units, flags, left_out, monkeypatch):
    shapes = {"kernel": Layout.replicated(jax.ShapeDtypeStruct((units, units), F32))}
    placement = SimpleNamespace(params=shapes, plan=ax.Plan(precision=precision), at_use=None)
    monkeypatch.setattr("axonml_jax.training.compile.platform_around", lambda mesh: "gpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = compiler_options(placement, None)
    assert found == ({"xla_gpu_enable_triton_gemm": "False"} if left_out else None)
    if found:  # XLA knows the option, on CPU too
        assert jax.jit(lambda x: x + 1, compiler_options=found)(1) == 2
