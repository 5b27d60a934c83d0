"""Optimizers that a step cannot run are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import is_layout
from axonml_jax.training.moving_average import with_ema
from axonml_jax.training.optimizer.apply import apply
from axonml_jax.training.optimizer.opt_state import whole_shape
from axonml_jax.training.optimizer.optimizer_name import written

SKIPPING = {
    optax.MultiStepsState: "optax.MultiSteps would average over steps without an update: use accumulate=",
    optax.ApplyIfFiniteState: "optax.apply_if_finite would average over updates that it skips: use max_nonfinite=",
    optax.ConditionallyMaskState: "optax.conditionally_mask would average over updates that it masks: update in every step",
}
"""Of optimizers whose state has one of these in it some steps make no update; what to say of a moving average beside them."""


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


def averaging(tx: Any, placement: Placement, ema: float | None) -> optax.GradientTransformation:
    """`checked_optimizer`, which keeps a moving average of the parameters too where there is a decay (`with_ema`).

    Raises:
      TypeError, ValueError: as `checked_optimizer`; for a decay out of range; for an optimizer of which some steps
        make no update; or for a plan with rounds.
    """
    tx = checked_optimizer(tx, placement)
    if ema is None:
        return tx
    if placement.plan.rounds:
        raise ValueError(
            f"ema={ema!r}: replicas train parameters of their own, and an average of theirs would be another one for each; the "
            "outer parameters, which are the model, are an average over replicas and rounds already: leave ema out"
        )
    state = jax.eval_shape(tx.init, jax.tree.map(whole_shape, placement.params, is_leaf=is_layout))
    nodes = jax.tree.leaves(state, is_leaf=lambda node: type(node) in SKIPPING)
    if said := dict.fromkeys(SKIPPING[type(node)] for node in nodes if type(node) in SKIPPING):
        raise ValueError("\n".join(f"ema beside {why}" for why in said))
    return checked_optimizer(with_ema(tx, ema), placement)


def _first_change(before: Any, after: Any) -> str:
    if jax.tree.structure(before) != jax.tree.structure(after):
        return "its state has another structure afterwards"
    pairs = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return next(f"{jax.tree_util.keystr(path)}: {old} becomes {new}" for (path, old), new in pairs if old != new)
