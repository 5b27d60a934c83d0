"""Products whose weights or input are gathered or reduced, with an order fixed by barriers, so that both can run at once.

XLA's scheduler starts a collective early and waits for it late where data flow lets it. Barriers add the data flow that says
what may run beside what; no value depends on them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.pairs import zeros_like_varying
from axonml_jax.collectives.primitives import gather_whole, scatter_sum, sum_over
from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.compat.around import current_trace
from axonml_jax.compat.barrier import together

SCOPE = "ordered_products"
"""The name scope by which such products are known in a program."""


@dataclass(frozen=True)
class Border:
    """How an operand of a product is read by the ranks of some axes, and how its gradient returns.

    Attributes:
      axes: bound mesh axes; none: it is this rank's own.
      dim: None: it is the same on every rank; a dim, counted from the end: every rank has a part of that.
    """

    axes: tuple[str, ...] = ()
    dim: int | None = None

    def read(self, x: jax.Array) -> jax.Array:
        """The whole operand. Communicates: one all-gather if it is split."""
        if not self.axes or self.dim is None:
            return vary(x, self.axes)
        return gather_whole(x, self.axes, self.dim, invarying=False)

    def back(self, grad: jax.Array) -> jax.Array:
        """The gradient of what this rank holds. Communicates: one reduce-scatter if it is split, else one all-reduce."""
        if not self.axes:
            return grad
        return sum_over(grad, self.axes) if self.dim is None else scatter_sum(grad, self.axes, self.dim)


class Prefetch:
    """The order of the products in one call of a model, handed from layer to layer (`layer(x, prefetch=order)`).

    Each layer's weights are gathered over `depth` while the layer before it computes, in the forward and, the other way
    round, in the backward: the gather may start when its neighbour starts. Make a new one in every call, and pass the call's
    result through `last`. Gathers inside `jax.checkpoint`, a scan or another traced body wait for nothing outside it.
    """

    def __init__(self) -> None:
        self._token: jax.Array | None = None
        self._trace: Any = None

    def last(self, y: jax.Array) -> jax.Array:
        """`y`, the result of the call: the backward's gathers begin when its gradient is there."""
        return y if self._token is None or self._trace != current_trace() else _last(y, self._token)

    @property
    def token(self) -> jax.Array:
        """Available when the product before has started."""
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
    """`fn(whole x, whole weights)`, of which nothing but the arguments is kept for the backward.

    Args:
      fn: a function of both, such as a product, whose gradients read its operands only; what it closes over gets none.
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
    axes = varying_axes(x).union(*(varying_axes(leaf) for leaf in jax.tree.leaves(weights)))
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


def _backward(rules, saved, cts):
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


_ordered.defvjp(_forward, _backward)
