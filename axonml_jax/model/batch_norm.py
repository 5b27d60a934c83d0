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

from axonml_jax.collectives.reduce import all_reduce_sum

Statistics = tuple[jax.Array, jax.Array]


def masked_statistics(x: jax.Array, mask: jax.Array, feature_axis: Any, axes: tuple[str, ...]) -> Statistics:
    """Mean and variance of the unmasked elements of x on all ranks.

    Args:
      x: [..., c], this rank's activations; c features (at `feature_axis`).
      mask: broadcastable to x, True where an element counts.
      feature_axis: the axis or axes that keep their own statistics.
      axes: mesh axes to join; none when empty.

    Returns:
      mean [c], variance [c], at least float32.

    Communicates: one all-reduce of 2c + c elements.
    """
    features = {axis % x.ndim for axis in ([feature_axis] if isinstance(feature_axis, int) else feature_axis)}
    reduced = tuple(axis for axis in range(x.ndim) if axis not in features)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mask = jnp.broadcast_to(mask, x.shape)
    parts = [jnp.where(mask, value, 0).sum(reduced) for value in (x, jnp.square(x), jnp.ones_like(x))]
    total, squares, count = all_reduce_sum(jnp.stack(parts), axes)
    mean = total / count
    return mean, jnp.maximum(squares / count - jnp.square(mean), 0)


def synchronize_nnx(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Let every BatchNorm of `model` that joins no axes of its own join `axes`. Changes the model in place."""
    for _, module in list(nnx.iter_graph(model)):
        if isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]  # jax takes several names
            if type(module) is nnx.BatchNorm:
                module.__class__ = _MaskedBatchNorm


class _MaskedBatchNorm(nnx.BatchNorm):
    """nnx.BatchNorm, exact when ranks mask unequal numbers of elements."""

    def __call__(self, x, use_running_average: bool | None = None, *, mask=None):
        fixed = self.use_running_average if use_running_average is None else use_running_average
        if mask is None or fixed:
            return super().__call__(x, use_running_average=use_running_average, mask=mask)
        mean, var = masked_statistics(x, mask, self.axis, self.axis_name)  # pyright: ignore[reportArgumentType]
        old_mean, old_var = self.mean[...], self.var[...]
        self.mean[...], self.var[...] = mean, var
        y = super().__call__(x, use_running_average=True)
        keep = self.momentum
        self.mean[...] = keep * old_mean + (1 - keep) * jax.lax.stop_gradient(mean)
        self.var[...] = keep * old_var + (1 - keep) * jax.lax.stop_gradient(var)
        return y


@contextmanager
def synchronize_linen(axes: tuple[str, ...]) -> Iterator[None]:
    """Within this context every linen.BatchNorm that joins no axes of its own joins `axes`."""
    if not axes:
        yield
        return

    def join(call: Callable, args: tuple, kwargs: dict, context: Any):
        module = context.module
        if not isinstance(module, linen.BatchNorm) or context.method_name != "__call__" or module.axis_name is not None:
            return call(*args, **kwargs)
        object.__setattr__(module, "axis_name", axes)
        try:
            return _linen_call(module, call, args, kwargs)
        finally:
            object.__setattr__(module, "axis_name", None)

    with linen.intercept_methods(join):
        yield


def _linen_call(module: linen.BatchNorm, call: Callable, args: tuple, kwargs: dict):
    mask = kwargs.pop("mask", None)
    fixed = kwargs.get("use_running_average", args[1] if len(args) > 1 else module.use_running_average)
    if mask is None or fixed or module.is_initializing():
        return call(*args, mask=mask, **kwargs)
    mean, var = masked_statistics(args[0], mask, module.axis, module.axis_name)  # pyright: ignore[reportArgumentType]
    old = {name: module.get_variable("batch_stats", name) for name in ("mean", "var")}
    module.put_variable("batch_stats", "mean", mean)
    module.put_variable("batch_stats", "var", var)
    y = call(args[0], use_running_average=True)
    keep = module.momentum
    for name, value in (("mean", mean), ("var", var)):
        module.put_variable("batch_stats", name, keep * old[name] + (1 - keep) * jax.lax.stop_gradient(value))
    return y
