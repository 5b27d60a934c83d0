"""A product of 8-bit floats: rounded as NumPy rounds, exact beside that, and with nothing kept but its operands."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axonml_jax.compat.order import vjp_without
from axonml_jax.layers.float8 import GRADIENTS, VALUES, ProductForm, float8_product, rounded


def as_numpy(x, kind):
    """(values in 8 bits, the power of two to multiply them by), by NumPy alone."""
    x = np.asarray(x, np.float32)
    most = max(float(np.abs(x).max(initial=0)), 2.0**-110)
    scale = np.float32(2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(kind).max) / most)))
    return (x * scale).astype(kind), 1 / scale


def dequantized(x, kind):
    values, factor = as_numpy(x, kind)
    return values.astype(np.float64) * float(factor)


def _flushed(got, wanted):
    """Where XLA:CPU makes zeros of float8_e5m2's smallest numbers, as it does of float16's."""
    smallest = float(ml_dtypes.finfo(wanted.dtype).smallest_normal) if wanted.dtype == GRADIENTS else 0
    return (np.asarray(got, np.float32) == 0) & (np.abs(wanted.astype(np.float32)) <= smallest)


@pytest.mark.usefixtures("compiled_for_users")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [VALUES, GRADIENTS])
def test_arrays_are_rounded_as_numpy_rounds_them(kind, dtype):
    rng = np.random.default_rng(0)
    spread = rng.normal(size=(64, 33)) * 2.0 ** rng.integers(-40, 3, (64, 33))  # most are below the range
    for x in (spread, spread * 1e30, spread * 1e-30, np.zeros((2, 3)), np.zeros((0, 3)), np.full((3,), 448.0)):
        x = jnp.asarray(x, dtype)
        values, factor = jax.jit(lambda x: rounded(x, kind))(x)
        wanted, by = as_numpy(x, kind)
        got, wanted = np.asarray(values), np.where(_flushed(values, wanted), 0, wanted).astype(wanted.dtype)
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))
        assert float(factor) == float(by)
    for bad in (np.nan, np.inf):
        values, factor = rounded(jnp.array([1.0, bad, 0.0], dtype), kind)
        assert np.isnan(np.asarray(values.astype(jnp.float32) * factor)).all()


# (shape of the left operand, of the right one, summed dims of both)
PRODUCTS = [
    ((6, 5), (5, 4), ((1,), (0,))),
    ((2, 3, 5), (4, 5), ((2,), (1,))),
    ((5, 4), (2, 3, 5), ((0,), (2,))),
    ((2, 3, 4, 5), (5, 7, 4), ((3, 2), (0, 2))),
]


@pytest.mark.usefixtures("compiled_for_users")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("left", "right", "summed"), PRODUCTS)
def test_a_product_and_its_gradients_are_those_of_what_numpy_rounds(left, right, summed, dtype):
    rng = np.random.default_rng(1)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype)
    a, b, form = draw(left), draw(right), ProductForm(summed, jnp.dtype(dtype), native=False)
    plain = lambda a, b: np.tensordot(a, b, summed)
    g = draw(plain(np.zeros(left), np.zeros(right)).shape)

    @jax.jit
    def run(a, b, g):
        y, pull = jax.vjp(lambda a, b: float8_product(form, a, b), a, b)
        return y, *pull(g)

    x, w, of_y = dequantized(a, VALUES), dequantized(b, VALUES), dequantized(g, GRADIENTS)
    _, back = jax.vjp(lambda a, b: jnp.tensordot(a, b, summed), jnp.asarray(x), jnp.asarray(w))
    for got, wanted in zip(run(a, b, g), (plain(x, w), *back(jnp.asarray(of_y))), strict=True):
        assert got.dtype == a.dtype
        if dtype == "float64":  # all sums are exact
            np.testing.assert_array_equal(got, wanted)
        else:
            far = {"float32": 1e-6, "bfloat16": 2.0**-8}[dtype]
            assert np.abs(np.asarray(got, np.float64) - wanted).max() <= far * np.abs(wanted).max()


def test_nothing_but_the_operands_is_kept_for_the_backward():
    x, w = jnp.ones((4, 6), jnp.bfloat16), jnp.ones((6, 5), jnp.bfloat16)
    form = ProductForm(((1,), (0,)), x.dtype, native=False)
    _, _, saved = vjp_without(lambda x, w: (float8_product(form, x, w), None), [x, w], [x, w])
    assert saved.residuals == []


@pytest.mark.parametrize("native", [True, False])
def test_devices_with_units_get_operands_of_8_bits(native):
    x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 16), jnp.bfloat16)
    form = ProductForm(((1,), (0,)), x.dtype, native)
    run = jax.jit(jax.grad(lambda x, w: float8_product(form, x, w).sum().astype(jnp.float32), (0, 1)))
    text = run.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    kinds = re.findall(
        r"dot_general .*: \(tensor<\d+x\d+x(\w+)>, tensor<\d+x\d+x(\w+)>\) -> tensor<\d+x\d+x(\w+)>", text
    )
    wide = ("bf16", "bf16", "bf16")
    wanted = [("f8E4M3FN", "f8E5M2", "bf16"), ("f8E5M2", "f8E4M3FN", "bf16")] if native else [wide, wide]
    assert sorted(kinds)[-2:] == sorted(wanted)
