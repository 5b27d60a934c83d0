"""From synchronized gradients to new parameters: the norm, clipping, the optimizer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.elementwise import first_mixing, operations
from axonml_jax.training.opt_state import gather_stored, opt_layouts, own_parts, shard_shape, whole_shape
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


def apply(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, loss: jax.Array
) -> tuple[PyTree, Any]:
    """One optimizer update; transformations that ask for the loss as `value` get it."""
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def update(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    loss: jax.Array,
    placement: Placement,
) -> tuple[PyTree, Any]:
    """One optimizer update of resting parameters, inside `shard_map`: on shards, or on gathered leaves.

    Communicates: nothing on shards; one all-gather of gradients, parameters and the state that belongs to them otherwise.
    """
    if placement.stages is not None:
        staged = StagedOptimizer.of(tx, placement)
        run = staged.update if placement.plan.update == "shards" else staged.update_whole
        with jax.named_scope("axonml.update"):
            return run(lambda g, s, p: apply(tx, g, s, p, loss), grads, opt_state, params)
    if placement.plan.update == "shards" or placement.plan.independent:
        return apply(tx, grads, opt_state, params, loss)
    layouts = placement.params, opt_layouts(placement, tx)
    with jax.named_scope("axonml.update"):
        grads, params = (gather_stored(tree, placement.params, placement) for tree in (grads, params))
        opt_state = gather_stored(opt_state, layouts[1], placement)
    params, opt_state = apply(tx, grads, opt_state, params, loss)
    return own_parts(params, layouts[0], placement), own_parts(opt_state, layouts[1], placement)


def checked_optimizer(tx: Any, placement: Placement) -> optax.GradientTransformation:
    """The optimizer as a transformation; refused if it is none, or if its update cannot run or would be wrong.

    Args:
      tx: an optax transformation, or an `optax.MultiSteps` around one.
      placement: where parameters live.

    Raises:
      TypeError: when tx is no optax.GradientTransformation.
      ValueError: when it needs more than gradients, parameters and the loss, or is wrong on shards; says why.
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
    if placement.plan.update == "shards" and not placement.plan.independent:
        _check_shards(tx, placement)
    return tx


def _check_shards(tx: optax.GradientTransformation, placement: Placement) -> None:
    """Refuse an optimizer whose update of shards is not the update of the whole."""
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
    pipelined = placement.stages is not None
    if not pipelined and not any(layout.axes for layout in layouts):
        return
    loss, states = jax.ShapeDtypeStruct((), jnp.float32), opt_layouts(placement, tx)
    # Along a pipeline a rank has whole leaves, but not all of them: what mixes elements may mix leaves.
    shards = lambda tree: jax.tree.map(
        lambda each: bool(each.axes) or (pipelined and bool(each.shape)), tree, is_leaf=is_layout
    )
    sharded = [shards(tree) for tree in (placement.params, states)]
    given = [
        [jax.tree.map(shape, tree, is_leaf=is_layout) for tree in (placement.params, states, placement.params)]
        for shape in (shard_shape, whole_shape)
    ]
    run = lambda g, s, p, v: apply(tx, g, s, p, v)
    try:
        culprit = first_mixing(run, [*given[0], loss], [sharded[0], sharded[1], sharded[0], False])
    except (TypeError, ValueError) as error:
        culprit = f"its update of shards fails: {error}"
    if culprit is None and operations(run, *given[0], loss) != operations(run, *given[1], loss):
        culprit = "its update looks at the shapes of parameters, and those of padded or sharded ones differ"
    if culprit:
        raise ValueError(
            f"the optimizer {_name(tx)} does not treat every element alike ({culprit}), so on shards of parameters it would "
            'be silently wrong: give the plan update="whole" to update gathered leaves (FSDP(update="whole")), use '
            "max_grad_norm= in the place of optax's clipping, or choose an element-wise optimizer (adam, sgd, lion)"
        )


def _name(tx: optax.GradientTransformation) -> str:
    return getattr(tx.update, "__qualname__", repr(tx)).split(".<locals>")[0]


def _first_change(before: Any, after: Any) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "its state has another structure afterwards"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return next(f"{jax.tree_util.keystr(path)}: {old} becomes {new}" for (path, old), new in pairs if old != new)
