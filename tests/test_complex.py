"""Complex parameters train as on one device: in pipelines and in scans too, where what the backward reads is kept apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

WIDTH = 4


def gaussian(seed, shape, dtype):
    parts = np.random.default_rng(seed).normal(size=(2, *shape)) / 2
    return jnp.asarray(parts[0] + 1j * parts[1], dtype)


class Block(nnx.Module):
    """Products, a conjugate, a modulus, transforms to and from real numbers, and a scan of the user's over stacked weights."""

    def __init__(self, seed, dtype):
        self.kernel = nnx.Param(gaussian(seed, (WIDTH, WIDTH), dtype))
        self.stack = nnx.Param(gaussian(seed + 1, (2, WIDTH), dtype))
        self.bias = nnx.Param(jnp.zeros(WIDTH, self.kernel.real.dtype))

    def __call__(self, x):
        z = jnp.fft.rfft(x, 2 * WIDTH - 2) @ self.kernel[...]
        z = z / (1 + jnp.abs(z)) + self.bias[...]
        z, _ = jax.lax.scan(
            lambda z, w: (jnp.tanh(z * w) + jnp.conj(z @ self.kernel[...].T) / 4, None), z, self.stack[...]
        )
        return x + jnp.fft.irfft(z)[:, :WIDTH] + jnp.sum(jnp.abs(z) ** 2, -1, keepdims=True) / 8


class Net(nnx.Module):
    def __init__(self, dtype):
        self.blocks = nnx.List([Block(10 * i, dtype) for i in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


PIPED = functools.partial(ax.Pipelined, num_microbatches=2)
OPTIMIZERS = {"sgd": optax.sgd(0.05, momentum=0.9), "adamw": optax.adamw(1e-2), "rmsprop": optax.rmsprop(1e-3)}
CASES = {
    "ddp": ({"data": 2}, {"remat": "selective"}, "complex128", "adamw"),
    "full_shard": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3)}, "complex128", "adamw"),
    "1f1b": ({"pipe": 2}, {"pipe": PIPED()}, "complex64", "sgd"),
    "gpipe": ({"pipe": 2}, {"pipe": PIPED(schedule="gpipe"), "check_vma": True}, "complex128", "adamw"),
    "selective": ({"pipe": 2}, {"pipe": PIPED(), "remat": "selective"}, "complex128", "rmsprop"),
    "zero-bubble": (
        {"pipe": 2, "data": 2},
        {"pipe": PIPED(schedule="zero-bubble"), "remat": "full"},
        "complex128",
        "sgd",
    ),
    "sharded": (
        {"pipe": 2, "fsdp": 2},
        {"pipe": PIPED(gather="tick"), "fsdp": ax.Shard(stage=3)},
        "complex128",
        "adamw",
    ),
    "float32": ({"data": 2}, {"precision": "float32"}, "complex64", "sgd"),
    "float32, sharded": (
        {"fsdp": 2},
        {"precision": ax.Precision(accumulate="float32"), "fsdp": ax.Shard(stage=3), "accumulate": 2},
        "complex64",
        "sgd",
    ),
    "float32, stages": ({"pipe": 2, "data": 2}, {"pipe": PIPED(), "precision": "float32"}, "complex64", "sgd"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_with_complex_parameters_trains_as_on_one_device(case):
    degrees, options, dtype, optimizer = CASES[case]
    real = jnp.zeros((), dtype).real.dtype
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, WIDTH)).astype(real), "y": rng.normal(size=(8, WIDTH)).astype(real)}
    assert_equals_single_device(
        Net(dtype),
        loss,
        batch,
        ax.Plan(**options),
        mesh=mesh_of(**degrees),
        tx=OPTIMIZERS[optimizer],
        max_grad_norm=0.05 if optimizer == "adamw" else None,
        steps=2,
    )


@pytest.mark.parametrize("precision", ["float32", "bf16", "bf16-reduce", "fp16"])
def test_a_precision_leaves_imaginary_parts_of_gradients(precision):
    class Moduli(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(gaussian(0, (WIDTH, WIDTH), "complex64"))

        def __call__(self, x):
            return jnp.abs(x.astype(jnp.complex64) @ self.kernel[...])

    batch = {"x": np.ones((4, WIDTH), np.float32), "y": np.zeros((4, WIDTH), np.float32)}
    gradients = {}
    for name in (None, precision):
        model = ax.parallelize(Moduli(), mesh_of(data=2), ax.Plan(precision=name))
        (gradients[name],) = jax.tree.leaves(model.value_and_grad(loss)(batch)[1])
    np.testing.assert_allclose(gradients[precision], gradients[None], rtol=1e-6)
    assert ax.Replicate(comm_dtype="bfloat16").wire_dtype("complex64") == np.complex64


def test_complex_metrics_are_validated_whole_and_real_parameters_take_no_complex_values():
    module, batch = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), {"x": np.ones((4, WIDTH), np.float32)}

    def turned(model, batch):
        out = model(batch["x"])
        return (out**2).mean(), {"turned": 1j * out.sum(), "each": 1j * out.sum(0)}

    model = ax.parallelize(module, mesh_of(data=2), ax.Plan())
    found = model.trainer(optax.sgd(0.1), turned).validate([batch])
    np.testing.assert_allclose(found["turned"], turned(module, batch)[1]["turned"], rtol=1e-6)
    np.testing.assert_allclose(found["each"], turned(module, batch)[1]["each"], rtol=1e-6)
    values = {**model.state_dict(), "kernel": np.full((WIDTH, WIDTH), 1j, np.complex64)}
    with pytest.raises(ValueError, match="kernel: complex64, needed float32"):
        model.load_state_dict(values)
    with pytest.raises(ValueError, match="kernel: complex64, needed float32"):
        model.set_parameters(values)
