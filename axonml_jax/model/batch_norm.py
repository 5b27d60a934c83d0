"""BatchNorm whose statistics are those of the global batch, for models written for one device.

Flax joins statistics itself when `axis_name` is set, but averages the ranks' means as if every rank counted the same
number of elements. With a `mask` the counts differ, so there the joint mean and variance are computed here from sums
and handed to Flax as if they were running averages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

Statistics = tuple[jax.Array, jax.Array]

Sum = Callable[[jax.Array, Any], jax.Array]
"""`sum_over_ranks(x, axes)`, with the gradient of the sum of all ranks' losses."""


def masked_statistics(x: jax.Array, mask: jax.Array, feature_axis: Any, axes: Any, sum_over_ranks: Sum) -> Statistics:
    """Mean and variance of the unmasked elements of x on all ranks.

    Args:
      x: [..., c], this rank's activations; c features (at `feature_axis`).
      mask: broadcastable to x, True where an element counts.
      feature_axis: the axis or axes that keep their own statistics.
      axes: mesh axes to join.
      sum_over_ranks: how sums are joined.

    Returns:
      mean [c], variance [c], at least float32.

    Communicates: one all-reduce of 2c + c elements.
    """
    features = {axis % x.ndim for axis in ([feature_axis] if isinstance(feature_axis, int) else feature_axis)}
    reduced = tuple(axis for axis in range(x.ndim) if axis not in features)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mask = jnp.broadcast_to(mask, x.shape)
    parts = [jnp.where(mask, value, 0).sum(reduced) for value in (x, jnp.square(x), jnp.ones_like(x))]
    total, squares, count = sum_over_ranks(jnp.stack(parts), axes)
    mean = total / count
    return mean, jnp.maximum(squares / count - jnp.square(mean), 0)


def synchronize_nnx(model: nnx.Module, axes: tuple[str, ...], sum_over_ranks: Sum) -> None:
    """Let every BatchNorm of `model` that joins no axes of its own join `axes`. Changes the model in place."""
    for _, module in list(nnx.iter_graph(model)):
        if isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]  # jax takes several names
            if type(module) is nnx.BatchNorm:
                module.__class__ = _MaskedBatchNorm
                module.sum_over_ranks = sum_over_ranks  # pyright: ignore[reportAttributeAccessIssue]


class _MaskedBatchNorm(nnx.BatchNorm):
    """nnx.BatchNorm, exact when ranks mask unequal numbers of elements."""

    sum_over_ranks: Sum

    def __call__(self, x, use_running_average: bool | None = None, *, mask=None):
        fixed = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or fixed:
            return super().__call__(x, use_running_average=use_running_average, mask=mask)
        mean, var = masked_statistics(x, mask, self.axis, self.axis_name, self.sum_over_ranks)
        old_mean, old_var = self.mean[...], self.var[...]
        self.mean[...], self.var[...] = mean, var
        y = super().__call__(x, use_running_average=True)
        keep = self.momentum
        self.mean[...] = keep * old_mean + (1 - keep) * jax.lax.stop_gradient(mean)
        self.var[...] = keep * old_var + (1 - keep) * jax.lax.stop_gradient(var)
        return y


@contextmanager
def synchronize_linen(axes: tuple[str, ...], sum_over_ranks: Sum | None) -> Iterator[None]:
    """Within this context every linen.BatchNorm that joins no axes of its own joins `axes`."""
    if not axes or sum_over_ranks is None:
        yield
        return

    def join(call: Callable, args: tuple, kwargs: dict, context: Any):
        module = context.module
        if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__" or module.axis_name is not None:
            return call(*args, **kwargs)
        with _set(module, "axis_name", axes):
            return _linen_call(module, call, args, kwargs, sum_over_ranks)

    with linen.intercept_methods(join):
        yield


def _linen_call(module: linen.BatchNorm, call: Callable, args: Any, kwargs: dict, sum_over_ranks: Sum):
    mask = kwargs.pop("mask", None)
    fixed = kwargs.get("use_running_average", args[1] if len(args) > 1 else module.use_running_average)
    if mask is None or fixed or module.is_initializing():
        return call(*args, mask=mask, **kwargs)
    mean, var = masked_statistics(args[0], mask, module.axis, module.axis_name, sum_over_ranks)
    old = {name: module.get_variable("batch_stats", name) for name in ("mean", "var")}
    module.put_variable("batch_stats", "mean", mean)
    module.put_variable("batch_stats", "var", var)
    with _set(module, "use_running_average", None):
        y = call(args[0], use_running_average=True)
    keep = module.momentum
    for name, value in (("mean", mean), ("var", var)):
        module.put_variable("batch_stats", name, keep * old[name] + (1 - keep) * jax.lax.stop_gradient(value))
    return y


@contextmanager
def _set(module: linen.Module, name: str, value: Any) -> Iterator[None]:
    """Another value for a field of a Linen module, which is frozen, for the length of a call."""
    before = getattr(module, name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)
