"""Memory-bound operations in one pass each way on GPUs: norms, GELU, split products, cross entropy.

Each operation has a plain form in `jax.numpy`, which is what every other platform gets, and kernels
(`layers/fused_kernels.py`) with the same results and gradients up to rounding. Which of them a program gets is decided while
it is traced, by the platform of its mesh (`chosen`), once for both directions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axonml_jax.compat.order import manual_axes, mesh_around, platform_around
from axonml_jax.layers.kernels import target_platform, too_old

MOST_FEATURES = 8192
"""The longest rows for which kernels are chosen, unless the operation says otherwise: longer ones do not fit one program."""

_asked: ContextVar[str] = ContextVar("kernels", default="auto")


@contextmanager
def asking_for(kernels: str) -> Iterator[None]:
    """Within this context operations take the form that a plan's `kernels` names."""
    token = _asked.set(kernels)
    try:
        yield
    finally:
        _asked.reset(token)


def chosen(x: jax.Array, *, features: int = MOST_FEATURES) -> Literal["xla", "triton", "interpret"]:
    """The form of an operation on x [..., n] here: "xla", "triton" or "interpret".

    A kernel is opaque to XLA's partitioner, so there is one only where every axis of the mesh is manual. On GPUs x has 16
    bits: kernels take the hardware's approximate functions, whose errors are finer than those of such results. Triton runs on
    GPUs of NVIDIA's of compute capability 8.0 or more.

    Args:
      x: an array, or what stands for one while a program is traced.
      features: the largest n that the operation's kernel takes.
    """
    asked = _asked.get()
    if asked == "xla" or not 1 < x.shape[-1] <= features or not x.size:
        return "xla"
    around = mesh_around()
    if not around.empty and manual_axes() != frozenset(around.axis_names):
        return "xla"
    if asked == "interpret":
        return "interpret" if x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) else "xla"
    if platform_around() not in ("gpu", "cuda") or x.dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    return "triton" if target_platform() != "rocm" and too_old() is None else "xla"


_apart: ContextVar[bool] = ContextVar("apart", default=False)


@contextmanager
def products_apart() -> Iterator[None]:
    """Within this context each weight has its own product, for code that searches the program for them (LoRA, float8)."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def one_product(x: jax.Array) -> str:
    """As `chosen`, for operations that begin with one product of x with several weights, or with one that omits its bias."""
    return "xla" if _apart.get() else chosen(x)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    from axonml_jax.compat.triton import varying_together

    return varying_together(arrays)


# --------------------------------------------------------------------------------------------------
# Norms over the last dim. The residual stream goes through beside its norm, so that the gradient of both is made in one pass.
# --------------------------------------------------------------------------------------------------


def norm_beside(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, epsilon: float, centers: bool, form: str
) -> tuple[jax.Array, jax.Array]:
    """Returns (norm of x, x), such that one pass computes both gradients of x.

    Args:
      x: [..., n].
      scale: [n].
      shift: [n]; None: there is none.
      epsilon: is added to the variance, or to the mean square.
      centers: layer norm; False: RMS norm.
      form: as `chosen` says, not "xla".

    Returns:
      Twice x's shape and dtype; all sums are in float32.
    """
    more = [] if shift is None else [shift]
    y, same = _norm((epsilon, centers, form == "interpret", True), *_alike(_flat(x), scale, *more))
    return y.reshape(x.shape), same.reshape(x.shape)


def norm(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, epsilon: float, centers: bool, form: str
) -> jax.Array:
    """The norm of x; arguments as for `norm_beside`."""
    more = [] if shift is None else [shift]
    (y,) = _norm((epsilon, centers, form == "interpret", False), *_alike(_flat(x), scale, *more))
    return y.reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(rules, x, scale, shift=None):
    return _norm_forward(rules, x, scale, shift)[0]


def _norm_forward(rules, x, scale, shift=None):
    from axonml_jax.layers import fused_kernels

    epsilon, centers, interpret, beside = rules
    y, inverse, *means = fused_kernels.norm(x, scale, shift, epsilon=epsilon, centers=centers, interpret=interpret)
    return (y, x) if beside else (y,), (x, inverse, means, scale, shift)


def _norm_backward(rules, saved, cts):
    from axonml_jax.layers import fused_kernels

    _, _, interpret, beside = rules
    x, inverse, means, scale, shift = saved
    dy, more = cts if beside else (*cts, None)
    mean = means[0] if means else None
    dx, sums = fused_kernels.norm_back(dy, more, x, inverse, mean, scale, interpret=interpret)
    return dx, sums[0].astype(scale.dtype), None if shift is None else sums[1].astype(shift.dtype)


_norm.defvjp(_norm_forward, _norm_backward)


# --------------------------------------------------------------------------------------------------
# GELU of a product plus its bias.
# --------------------------------------------------------------------------------------------------


def bias_gelu(u: jax.Array, bias: jax.Array, *, form: str) -> jax.Array:
    """gelu(u + bias), the tanh form; only u is kept for the backward: [..., n] and [n] -> [..., n]."""
    return _gelu(form == "interpret", *_alike(_flat(u), bias)).reshape(u.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gelu(interpret, u, bias):
    from axonml_jax.layers import fused_kernels

    return fused_kernels.gelu(u, bias, interpret=interpret)


def _gelu_backward(interpret, saved, dy):
    from axonml_jax.layers import fused_kernels

    u, bias = saved
    du, sums = fused_kernels.gelu_back(dy, u, bias, interpret=interpret)
    return du, sums.astype(bias.dtype)


_gelu.defvjp(lambda interpret, u, bias: (_gelu(interpret, u, bias), (u, bias)), _gelu_backward)


# --------------------------------------------------------------------------------------------------
# One product's result cut into parts, each plus its bias.
# --------------------------------------------------------------------------------------------------


def biased_parts(z: jax.Array, bias: jax.Array, sizes: Sequence[int], *, form: str) -> tuple[jax.Array, ...]:
    """z + bias, split along the last dim: [..., n] and [n] -> [..., each size]; the sizes add up to n."""
    parts = _parts((tuple(sizes), form == "interpret"), *_alike(_flat(z), bias))
    return tuple(part.reshape(*z.shape[:-1], -1) for part in parts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _parts(rules, z, bias):
    from axonml_jax.layers import fused_kernels

    return tuple(fused_kernels.split(z, bias, rules[0], interpret=rules[1]))


def _parts_backward(rules, like, cts):
    from axonml_jax.layers import fused_kernels

    dz, sums = fused_kernels.join(cts, rules[0], interpret=rules[1])
    return dz, sums.astype(like.dtype)


_parts.defvjp(lambda rules, z, bias: (_parts(rules, z, bias), bias[:0]), _parts_backward)


# --------------------------------------------------------------------------------------------------
# The two passes of a cross entropy over logits.
# --------------------------------------------------------------------------------------------------


def softmax_stats(logits: jax.Array, targets: jax.Array, *, form: str) -> tuple[jax.Array, jax.Array]:
    """For each row of logits [..., v], the log of the sum of exponentials and the target's logit, in float32.

    Args:
      logits: [..., v].
      targets: integers [...]; the logit of one outside 0 to v - 1 is 0.
      form: as `chosen` says, not "xla".
    """
    from axonml_jax.layers import fused_kernels

    flat = _alike(_flat(logits), targets.reshape(-1))
    found: Any = fused_kernels.stats(*flat, interpret=form == "interpret")
    return found[0].reshape(targets.shape), found[1].reshape(targets.shape)


def softmax_gradient(
    logits: jax.Array, targets: jax.Array, normalizers: jax.Array, scales: jax.Array, *, form: str
) -> jax.Array:
    """(exp(logits - normalizers) - one at the target) * scales, in the memory of the logits where nothing else reads them.

    Args:
      logits: [..., v].
      targets: integers [...]; one outside 0 to v - 1 is at none.
      normalizers, scales: [...].
      form: as `chosen` says, not "xla".
    """
    from axonml_jax.layers import fused_kernels

    rows = (each.reshape(-1) for each in (targets, normalizers, scales))
    flat = _alike(_flat(logits), *rows)
    return fused_kernels.softmax_back(*flat, interpret=form == "interpret").reshape(logits.shape)
