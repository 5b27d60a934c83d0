"""From synchronized gradients to new parameters: the norm, clipping, the optimizer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.apply import apply
from axonml_jax.training.on_shards import OnShards
from axonml_jax.training.opt_state import gather_stored, opt_layouts, own_parts, whole_shape
from axonml_jax.training.optimizer_name import written
from axonml_jax.training.staged import StagedOptimizer


def clip(grads: PyTree, norm: jax.Array, max_norm: Any) -> PyTree:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), PyTorch's rule."""
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def whole_norm(grads: PyTree, p: float) -> jax.Array:
    """The p-norm of whole gradients, in at least float32; p may be infinite."""
    sizes = [
        jnp.abs(g).astype(jnp.promote_types(jnp.finfo(g.dtype).dtype, jnp.float32)) for g in jax.tree.leaves(grads)
    ]
    if p == math.inf:
        return jnp.max(jnp.stack([jnp.max(size, initial=0) for size in sizes]))
    return sum((jnp.sum(size**p) for size in sizes), jnp.zeros(())) ** (1 / p)


def update(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    loss: jax.Array,
    placement: Placement,
    on_shards: OnShards | None,
) -> tuple[PyTree, Any]:
    """One optimizer update of resting parameters, inside `shard_map`: on shards (`OnShards.of`), or on gathered leaves.

    Communicates: on shards, see `OnShards.update`; one all-gather of gradients, parameters and the state that belongs to them
    otherwise.
    """
    run = lambda grads, state, params: apply(tx, grads, state, params, loss)
    if placement.stages is not None:
        staged = StagedOptimizer.of(tx, placement)
        with jax.named_scope("axonml.update"):
            if on_shards is None:
                return staged.update_whole(run, grads, opt_state, params)
            return staged.update(on_shards.program(loss), grads, opt_state, params, loss)
    if on_shards is not None:
        with jax.named_scope("axonml.update"):
            return on_shards.update(grads, opt_state, params, loss)
    if placement.plan.update == "shards" or placement.plan.independent:
        return run(grads, opt_state, params)
    layouts = placement.params, opt_layouts(placement, tx)
    with jax.named_scope("axonml.update"):
        grads, params = (gather_stored(tree, placement.params, placement) for tree in (grads, params))
        opt_state = gather_stored(opt_state, layouts[1], placement)
    params, opt_state = run(grads, opt_state, params)
    return own_parts(params, layouts[0], placement), own_parts(opt_state, layouts[1], placement)


def checked_optimizer(tx: Any, placement: Placement) -> optax.GradientTransformation:
    """The optimizer as a transformation; refused if it is none, or if its update cannot run.

    Args:
      tx: an optax transformation, or an `optax.MultiSteps` around one.
      placement: where parameters live.

    Raises:
      TypeError: when tx is no optax.GradientTransformation.
      ValueError: when it needs more than gradients, parameters and the loss, or changes its own structure; says why.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"the optimizer must be an optax.GradientTransformation such as optax.adamw(3e-4), but a {type(tx).__name__} "
            "was given" + (" (give the transformation, not an nnx.Optimizer around it)" if hasattr(tx, "tx") else "")
        )
    shapes = jax.tree.map(whole_shape, placement.params, is_leaf=is_layout)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        state = jax.eval_shape(tx.init, shapes)
        new, after = jax.eval_shape(lambda g, s, p, v: apply(tx, g, s, p, v), shapes, state, shapes, loss)
    except Exception as error:  # whatever a transformation's own code raises
        raise ValueError(
            f"the optimizer {written(tx)} cannot be updated from gradients, parameters and the loss's value alone: "
            f"{type(error).__name__}: {error}. Transformations that evaluate the loss themselves (line searches) or want "
            "parameters in a structure of their own (as optax.lookahead does) are not supported: choose another one"
        ) from error
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in ((shapes, state), (new, after))]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the optimizer {written(tx)} changes the shape or dtype of parameters or of its own state in an update, so a "
            f"compiled step cannot repeat it: {_first_change(*kinds)}"
        )
    return tx


def _first_change(before: Any, after: Any) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "its state has another structure afterwards"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return next(f"{jax.tree_util.keystr(path)}: {old} becomes {new}" for (path, old), new in pairs if old != new)
