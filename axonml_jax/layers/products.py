"""Products that communicate, at once or in a ring, the borders of split regions, and lookups."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.collectives.gradients import copy_to, reduce_from, zeros_like_varying
from axonml_jax.collectives.primitives import (
    axis_index,
    axis_size,
    gather_whole,
    require_divisible,
    scatter_sum,
    shift,
    vary,
    vary_alike,
)
from axonml_jax.compat.order import current_trace, together
from axonml_jax.compat.varying_types import varying_axes

# --------------------------------------------------------------------------------------------------
# A linear layer's product over all positions at once: [b, s, i] times [i, o] as [b*s, i] times [i, o].
# --------------------------------------------------------------------------------------------------


def flat_dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers, **options: Any) -> jax.Array:
    """`jax.lax.dot_general` of [..., i] and [i, o] (or [o, i]), with the leading dims flattened to one.

    The same numbers; on CPU the gradient of the kernel is then one plain product, where for three dims XLA makes a slow
    one of two transposed operands (docs/performance.md). Any other product, and one that asks for an output sharding, is
    left as it is.

    Returns:
      [..., o].
    """
    (contracted, _), (batch, _) = dimension_numbers
    plain = x.ndim < 3 or kernel.ndim != 2 or tuple(contracted) != (x.ndim - 1,) or batch
    if plain or options.get("out_sharding") is not None:
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
    numbers = (((1,), dimension_numbers[0][1]), dimension_numbers[1])
    y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), kernel, numbers, **options)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def logits_of(query: jax.Array, table: jax.Array) -> jax.Array:
    """The product of each query [..., f] with each row of a table [v, f]: [..., v]."""
    return flat_dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))


# --------------------------------------------------------------------------------------------------
# Rows of a table of which this rank holds a block: its own are read, the others are zeros, to be summed over the ranks.
# --------------------------------------------------------------------------------------------------


def own_rows(table_shard: jax.Array, ids: jax.Array, axes: tuple[str, ...], words: int | None = None) -> jax.Array:
    """This rank's contribution to `table[ids]`.

    Args:
      table_shard: [v/n, f], block number `axis_index(axes)` of the table.
      ids: integers of any shape; negative ones count from the table's end.
      axes: bound mesh axes of total size n; none at all: the shard is the table.
      words: v, where the last ranks' blocks end with padding; None: nothing is padding.

    Returns:
      [..., f]: zeros where another rank holds the row, and nan where no rank does, as `nnx.Embed` returns.
    """
    rows = table_shard.shape[0]
    total = words or rows * (axis_size(axes) if axes else 1)
    # Compare in a type that holds the table's size: ids may be int8.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    ids = jnp.where(ids < 0, ids + total, ids)
    local = ids - axis_index(axes) * rows if axes else ids
    mine = (local >= 0) & (local < rows)
    taken = jnp.take(table_shard, jnp.where(mine, local, rows), axis=0, mode="fill", fill_value=0)
    nowhere = (ids < 0) | (ids >= total)
    return jnp.where(nowhere[..., None], jnp.nan, taken) if jnp.issubdtype(taken.dtype, jnp.inexact) else taken


def require_integers(name: str, ids: jax.Array) -> None:
    """Refuse ids that are not integers, as `nnx.Embed` does.

    Raises:
      ValueError: naming the dtype.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} looks up integers, not {ids.dtype.name}: cast the ids with astype(jnp.int32)")


# --------------------------------------------------------------------------------------------------
# The keyword arguments that a parallel layer passes on to the Flax layer it is.
# --------------------------------------------------------------------------------------------------


class WeightOptions(TypedDict, total=False):
    """The options that `nnx.Linear` and `nnx.Conv` share."""

    dtype: Any
    param_dtype: Any
    precision: Any
    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    promote_dtype: Callable[..., Any]
    preferred_element_type: Any
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class LinearOptions(WeightOptions, total=False):
    """The options of `nnx.Linear`, with its defaults and its meaning."""

    dot_general: Callable[..., Any]


class EmbedOptions(TypedDict, total=False):
    """The options of `nnx.Embed`, with its defaults and its meaning."""

    dtype: Any
    param_dtype: Any
    embedding_init: nnx.Initializer
    promote_dtype: Callable[..., Any]
    embedding_metadata: Mapping[str, Any]


class ConvOptions(WeightOptions, total=False):
    """The options of `nnx.Conv`, with its defaults and its meaning."""

    padding: Any
    input_dilation: Any
    kernel_dilation: Any
    mask: Any
    conv_general_dilated: Callable[..., Any]


class NormOptions(TypedDict, total=False):
    """The options of `nnx.LayerNorm`, with its defaults and its meaning; all but the bias's are `nnx.RMSNorm`'s too."""

    epsilon: float
    dtype: Any
    param_dtype: Any
    use_bias: bool
    use_scale: bool
    bias_init: nnx.Initializer
    scale_init: nnx.Initializer
    use_fast_variance: bool
    promote_dtype: Callable[..., Any]
    bias_metadata: Mapping[str, Any]
    scale_metadata: Mapping[str, Any]


# --------------------------------------------------------------------------------------------------
# Products whose weights or input are gathered or reduced, with an order fixed by barriers, so that both can run at
# once.
#
# XLA's scheduler starts a collective early and waits for it late where data flow lets it. Barriers add the data flow
# that says what may run beside what; no value depends on them.
# --------------------------------------------------------------------------------------------------

SCOPE = "ordered_products"
"""The name scope by which such products are known in a program."""


@dataclass(frozen=True)
class Border:
    """How the ranks of some axes read an operand of a product, and how its gradient returns.

    Attributes:
      axes: bound mesh axes; (): the rank has its own operand, nothing is sent.
      dim: None: it is the same on every rank; else the dim, counted from the end, of which every rank has a part.
    """

    axes: tuple[str, ...] = ()
    dim: int | None = None

    def read(self, x: jax.Array) -> jax.Array:
        """The full operand. Communicates: one all-gather if it is split."""
        if not self.axes or self.dim is None:
            return copy_to(x, self.axes)
        return gather_whole(x, self.axes, self.dim, invarying=False)

    def back(self, grad: jax.Array) -> jax.Array:
        """The gradient of this rank's part. Communicates: one reduce-scatter if it is split, else one all-reduce."""
        if not self.axes:
            return grad
        return reduce_from(grad, self.axes) if self.dim is None else scatter_sum(grad, self.axes, self.dim)


class Prefetch:
    """Orders the products and gathers of one call of a model; handed from layer to layer (`layer(x, prefetch=order)`).

    Each layer's weights are gathered over `depth` while the layer before it computes, in the forward and, the other way
    round, in the backward: the gather may start when its neighbour starts. Make a new one in every call, and pass the call's
    result through `last`. Gathers inside `jax.checkpoint`, a scan or another traced body wait for nothing outside it.
    """

    def __init__(self) -> None:
        self._token: jax.Array | None = None
        self._trace: Any = None

    def last(self, y: jax.Array) -> jax.Array:
        """Mark `y` as the call's result: the backward's gathers begin when its gradient exists."""
        return y if self._token is None or self._trace != current_trace() else _last(y, self._token)

    @property
    def token(self) -> jax.Array:
        """A scalar that is available once the previous product has started."""
        if self._token is None or self._trace != current_trace():
            return jnp.zeros((), jnp.float32)
        return self._token

    @token.setter
    def token(self, token: jax.Array) -> None:
        self._token, self._trace = token, current_trace()


@jax.custom_vjp
def _last(y, token):
    return y


_last.defvjp(lambda y, token: (y, token), lambda token, ct: (ct, together((ct, zeros_like_varying(token)))[1]))


@dataclass(frozen=True, eq=False)
class _Rules:
    fn: Callable[..., Any]
    x: Border
    weights: Border
    overlap: bool


def ordered(
    fn: Callable[..., Any],
    x: jax.Array,
    weights: Any,
    x_border: Border,
    weights_border: Border,
    *,
    overlap: bool = False,
    prefetch: Prefetch | None = None,
) -> Any:
    """Compute `fn(full x, full weights)`; only the arguments are kept for the backward.

    Args:
      fn: a function of both, such as a product, whose gradients read its operands only; what it closes over gets no gradient.
      x: this rank's part of x, or all of it.
      weights: a pytree of arrays.
      x_border: how x is read.
      weights_border: how each of the weights is read.
      overlap: the gradient of x comes first in the backward, and its reduction runs while the weights' are computed.
      prefetch: the order of products that these weights are gathered ahead of.

    Communicates: forward what `read` does, backward the same again and what `back` does.
    """
    rules = _Rules(fn, x_border, weights_border, overlap)
    # Before jax 0.11 a barrier types all of its results as varying over what any operand varies over.
    axes = varying_axes(x).union(weights_border.axes, *(varying_axes(leaf) for leaf in jax.tree.leaves(weights)))
    summed = x_border.axes if x_border.dim is None else ()  # over these `back` sums the gradient of x
    x = vary(x, tuple(sorted(axes.difference(summed))))
    axes = tuple(sorted(axes.union(x_border.axes)))
    weights = vary(weights, axes)
    token = None if prefetch is None else vary(prefetch.token, axes)
    with jax.named_scope(SCOPE):
        y, token = _ordered(rules, x, weights, token)
    if prefetch is not None:
        prefetch.token = token
    return y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ordered(rules, x, weights, token):
    return _forward(rules, x, weights, token)[0]


def _forward(rules, x, weights, token):
    saved = x, weights
    if token is not None:
        weights, token = together((weights, token))
        x, token = together((x, token))  # the next layer's gathers wait for this layer's input
    y = rules.fn(rules.x.read(x), _each(rules.weights.read, weights, "parameters"))
    return (y, token), saved


def _ordered_backward(rules, saved, cts):
    (x, weights), (ct, token) = saved, cts
    # What is gathered again is tied to the backward: XLA would find the forward's and keep it until here.
    if token is not None:
        weights, token = together((weights, token))
        ct, token = together((ct, token))
    elif rules.weights.dim is not None:
        weights, ct = together((weights, ct))
    if rules.x.dim is not None:
        x, ct = together((x, ct))
    whole_x, whole_weights = rules.x.read(x), _each(rules.weights.read, weights, "parameters")
    if rules.overlap:
        _, pull = jax.vjp(lambda x: rules.fn(x, whole_weights), whole_x)
        (grad,) = pull(ct)
        grad, ct = together((grad, ct))
        grad = rules.x.back(grad)
        _, pull = jax.vjp(lambda weights: rules.fn(whole_x, weights), whole_weights)
        (grads,) = pull(ct)
        return grad, _each(rules.weights.back, grads, "gradients"), token
    _, pull = jax.vjp(rules.fn, whole_x, whole_weights)
    grad, grads = pull(ct)
    grads = _each(rules.weights.back, grads, "gradients")
    return rules.x.back(grad), grads, token


def _each(fn, weights, what):
    with jax.named_scope(f"axonml.{what}"):
        return jax.tree.map(fn, weights)


_ordered.defvjp(_forward, _ordered_backward)


# --------------------------------------------------------------------------------------------------
# Functions that communicate are run again in the backward, so that what they gathered is not kept.
# --------------------------------------------------------------------------------------------------


def rerun(fn: Callable[..., Any], shard: jax.Array, others: Any) -> Any:
    """Compute `fn(shard, others)`; only the arguments are kept for the backward.

    Of a product this recomputes nothing: the gradients read its operands only, and its result is dead code.

    Args:
      fn: a function of both; what it closes over gets no gradient. Its collectives are each other's transposes.
      shard: what this rank holds of the array that `fn` gathers.
      others: a pytree of arrays.
    """
    return _rerun(fn, *vary_alike((shard, others)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rerun(fn, shard, others):
    return fn(shard, others)


def _rerun_backward(fn, saved, ct):
    shard, others = saved
    # The barrier keeps XLA from finding the forward's gather, which would keep the whole array alive until here.
    shard, ct = together((shard, ct))
    _, pull = jax.vjp(fn, shard, others)
    return pull(ct)


_rerun.defvjp(lambda fn, shard, others: (fn(shard, others), (shard, others)), _rerun_backward)


# --------------------------------------------------------------------------------------------------
# A Flax layer's own arithmetic on other values: Flax computes what is local, this library only adds what is
# communicated.
# --------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nnx.Module)


def substitute(module: M, **attributes) -> M:
    """A shallow copy of `module` with some attributes replaced; arrays become parameters.

    The module itself is not touched, so that this works inside any transformation.
    """
    copy = object.__new__(type(module))
    values = {name: nnx.Param(value) if isinstance(value, jax.Array) else value for name, value in attributes.items()}
    for name, value in (vars(module) | values).items():
        object.__setattr__(copy, name, value)  # Flax's own would look at the trace the module was made in
    return copy


def linear(module: nnx.Linear, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Apply `nnx.Linear` with the given kernel and no bias: [..., i] and [i, o] -> [..., o]."""
    return nnx.Linear.__call__(substitute(module, kernel=kernel, bias=None, use_bias=False), x)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias over the last dim as Flax does."""
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


# --------------------------------------------------------------------------------------------------
# Collective matrix products (Wang et al. 2023): a gather or a scatter cut into hops of a ring, one between two
# products.
#
# The bytes are those of the collective they replace; each hop moves one part while the rank multiplies another.
# --------------------------------------------------------------------------------------------------


def ring_gathered(fn: Callable[..., Any], x_shard: jax.Array, weights: Any, axes: tuple[str, ...], dim: int) -> Any:
    """The result of `ordered` with a gathered x, in hops, for an `fn` that treats all positions of `dim` alike.

    Args:
      fn: a function of some positions of x and the weights, such as a product over x's last dim.
      x_shard: [..., s/n, i].
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      dim: the dim that is split, counted from the end; `fn`'s results have it too.

    Returns:
      `fn`'s results, [..., s, o].

    Communicates: n - 1 permutes of the shard forward; twice as many backward.
    """
    count = axis_size(axes)

    def products(part, weights):
        # After k hops a rank holds the part of the rank k places ahead of it.
        parts = [part]
        for _ in range(count - 1):
            parts.append(shift(parts[-1], axes, [(i, (i - 1) % count) for i in range(count)]))
        results = [fn(each, weights) for each in parts]
        return jax.tree.map(lambda *each: _in_order(each, axes, dim), *results)

    return rerun(products, x_shard, weights)


def ring_scattered(fn: Callable[..., Any], x: jax.Array, weights: Any, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The sum over the ranks of `fn(x, weights)`, in hops; each rank keeps its part of `dim`.

    Args:
      fn: a function of some positions of x and the weights, such as a product over x's last dim.
      x: [..., s, i/n]; s must divide by n.
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      dim: the dim to split, counted from the end.

    Returns:
      [..., s/n, o].

    Raises:
      ValueError: when the dim does not divide.

    Communicates: n - 1 permutes of the result forward, as many of its gradient backward.
    """
    count = axis_size(axes)
    require_divisible(f"ring over {axes}", x.shape, dim % x.ndim, count)
    size = x.shape[dim] // count

    def products(x, weights):
        total = None
        for hop in range(count):
            # The sum for rank r begins at rank r + 1 and ends, n - 1 hops later, at r.
            target = (axis_index(axes) - hop - 1) % count
            part = fn(jax.lax.dynamic_slice_in_dim(x, target * size, size, dim % x.ndim), weights)
            total = part if total is None else part + shift(total, axes, [(i, (i + 1) % count) for i in range(count)])
        return total

    return rerun(products, x, weights)


def _in_order(parts, axes, dim) -> jax.Array:
    """Concatenate parts in the order of the ranks; part k belongs to the rank k places after this one."""
    turned = jnp.concatenate(parts, axis=dim)
    return jnp.roll(turned, axis_index(axes) * parts[0].shape[dim], axis=dim)


# --------------------------------------------------------------------------------------------------
# The two borders of a tensor-parallel region: how an activation enters it and how partial sums leave it.
#
# With sequence parallelism (Korthikanti et al. 2022) the activation outside is split along the sequence: the all-reduce
# at each border becomes a reduce-scatter or an all-gather of the same bytes.
# --------------------------------------------------------------------------------------------------

SEQUENCE_DIM = -2
"""The dim that sequence parallelism splits: s of [..., s, h]."""


def entered(
    fn: Callable[..., Any],
    x: jax.Array,
    weights: Any,
    axes: tuple[str, ...],
    *,
    sequence: bool,
    ring: bool = False,
    overlap: bool = False,
) -> Any:
    """Compute `fn(x, weights)` with x read by every rank of `axes`.

    Args:
      fn: a function of the whole x and the rank's weights; one call for all weights that read the same x.
      x: [..., s, h], the same on every rank; with `sequence` [..., s/n, h], this rank's part of the sequence.
      weights: a pytree of arrays.
      axes: bound mesh axes of total size n.
      sequence: whether x is split along the sequence.
      ring: whether its gathers and the scatter are cut into hops between the products (`ring_gathered`); needs `sequence`.
      overlap: whether the reduction of x's gradient is issued before the products of the weights' gradients.

    Communicates: nothing forward and one all-reduce of x backward; with `sequence` one all-gather forward, an all-gather
    and a reduce-scatter backward.
    """
    if sequence and axes:
        _require_sequence(x)
        if ring:
            return ring_gathered(fn, x, weights, axes, SEQUENCE_DIM)
    elif not (overlap and axes):
        return fn(copy_to(x, axes) if axes else x, weights)
    border = Border(axes, SEQUENCE_DIM if sequence else None)
    return ordered(fn, x, weights, border, Border(), overlap=overlap)


def left(y: jax.Array, axes: tuple[str, ...], *, sequence: bool) -> jax.Array:
    """Sum the ranks' partial y: the full sum on all ranks, or with `sequence` each rank's part of the sequence.

    Communicates: one all-reduce forward; with `sequence` one reduce-scatter forward and one all-gather backward.
    """
    if not axes:
        return y
    if not sequence:
        return reduce_from(y, axes)
    _require_sequence(y)
    return scatter_sum(y, axes, SEQUENCE_DIM)


def summed(
    fn: Callable[..., jax.Array], x: jax.Array, weights: Any, axes: tuple[str, ...], *, sequence: bool, ring: bool
) -> jax.Array:
    """Compute `left(fn(x, weights))`; a ring splits the reduce-scatter into hops between the products.

    Communicates: what `left` does.
    """
    if ring and sequence and axes:
        _require_sequence(x)
        return ring_scattered(fn, x, weights, axes, SEQUENCE_DIM)
    return left(fn(x, weights), axes, sequence=sequence)


def outside(parameter: jax.Array | None, axes: tuple[str, ...], *, sequence: bool) -> jax.Array | None:
    """A parameter used outside the split region, such as a norm's scale; with `sequence` its gradient is summed.

    Communicates: with `sequence` one all-reduce of the parameter backward.
    """
    return copy_to(parameter, axes) if sequence and axes and parameter is not None else parameter


def check_ring(layer: str, ring: bool, sequence_parallel: bool, overlap: bool = False) -> None:
    """Refuse a ring without sequence parallelism, and a ring together with overlap.

    Raises:
      ValueError: naming the layer.
    """
    if ring and not sequence_parallel:
        raise ValueError(
            f"{layer}: ring=True cuts the gathers and scatters of sequence parallelism into hops, and there are none: "
            "set sequence_parallel=True too"
        )
    if ring and overlap:
        raise ValueError(
            f"{layer}: ring=True runs the reduction of the input's gradient between parts of the products, overlap=True behind "
            "the weights' gradients: choose one"
        )


def _require_sequence(x: jax.Array) -> None:
    if x.ndim < 2:
        raise ValueError(
            f"sequence parallelism splits dim {SEQUENCE_DIM} of [..., sequence, features], but the activation has shape "
            f"{x.shape}: give it a sequence dim, or set sequence_parallel=False"
        )
