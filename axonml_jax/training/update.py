"""From synchronized gradients to new parameters: the norm, clipping, the optimizer."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.parallel.placement import Placement


def clip(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def global_norm(grads: PyTree, placement: Placement) -> jax.Array:
    """The 2-norm of all gradients on all ranks, each element counted once."""
    return jnp.sqrt(placement.squared_norm(grads))


def apply(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, loss: jax.Array
) -> tuple[PyTree, Any]:
    """One optimizer update; transformations that ask for the loss as `value` get it."""
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def checked_optimizer(tx: Any, params: PyTree) -> optax.GradientTransformation:
    """The optimizer as a transformation; refused if it is none, or needs more than gradients, parameters and the loss.

    Args:
      tx: an optax transformation, or an `optax.MultiSteps` around one.
      params: the parameters' shapes.

    Raises:
      TypeError: when tx is no optax.GradientTransformation.
      ValueError: when its update cannot run; says what it asked for.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"the optimizer must be an optax.GradientTransformation such as optax.adamw(3e-4), but a {type(tx).__name__} "
            "was given" + (" (give the transformation, not an nnx.Optimizer around it)" if hasattr(tx, "tx") else "")
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(tx.init, shapes)
    try:
        new, after = jax.eval_shape(lambda g, s, p, v: apply(tx, g, s, p, v), shapes, state, shapes, loss)
    except TypeError as error:
        raise ValueError(
            f"the optimizer {_name(tx)} cannot be updated from gradients, parameters and the loss's value alone: {error}. "
            "Transformations that evaluate the loss themselves (line searches) are not supported: choose another one"
        ) from error
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in ((shapes, state), (new, after))]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the optimizer {_name(tx)} changes the shape or dtype of parameters or of its own state in an update, so a "
            f"compiled step cannot repeat it: {_first_change(*kinds)}"
        )
    return tx


def _name(tx: optax.GradientTransformation) -> str:
    return getattr(tx.update, "__qualname__", repr(tx)).split(".<locals>")[0]


def _first_change(before: Any, after: Any) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "its state has another structure afterwards"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return next(f"{jax.tree_util.keystr(path)}: {old} becomes {new}" for (path, old), new in pairs if old != new)
