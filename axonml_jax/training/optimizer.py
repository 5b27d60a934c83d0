"""An optax optimizer: its checks, its name in errors, the owners and layouts of its state, averages of parameters."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from axonml_jax.base import PyTree
from axonml_jax.collectives.gradients import own_slice
from axonml_jax.collectives.primitives import gather_whole
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, from_stored, is_layout, map_layouts, to_stored

# --------------------------------------------------------------------------------------------------
# One update by an optimizer.
# --------------------------------------------------------------------------------------------------


def apply(
    tx: optax.GradientTransformation, grads: PyTree, opt_state: Any, params: PyTree, loss: jax.Array
) -> tuple[PyTree, Any]:
    """Applies one update of the optimizer to parameters and state; transformations that take `value` get the loss."""
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=loss)
    return optax.apply_updates(params, updates), opt_state


def without_value(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a transformation whose `update` takes no `value`, so that it is not told the loss."""
    return optax.GradientTransformation(tx.init, lambda updates, state, params=None: tx.update(updates, state, params))


# --------------------------------------------------------------------------------------------------
# Which parameter a leaf of the optimizer's state belongs to: seen in the structure of the state, never in names alone.
# --------------------------------------------------------------------------------------------------

Path = tuple[Any, ...]


def owners(state: PyTree, params: PyTree) -> list[int | None]:
    """Finds for every leaf of an optimizer's state the parameter (by its position in the tree) that it belongs to, or None.

    Optax keeps what belongs to parameters in trees shaped like theirs, in which `optax.MaskedNode` may stand for those that
    a mask leaves out, and a parameter may have several leaves. A node of the state whose leaves cover all parameters and
    nothing else is such a tree. A dict of hyperparameters is none, even if one is called like a parameter.

    >>> params = {"learning_rate": 0.0, "w": 1.0}
    >>> owners(({"learning_rate": 3e-4}, {"learning_rate": 0.0, "w": 0.0}, 7), params)
    [None, 0, 1, None]
    """
    positions = {path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_masked)
    roots = {path[:k] for path, _ in nodes for k in range(len(path) + 1)}
    below: dict[Path, list[tuple[Path, bool]]] = {root: [] for root in roots}
    for path, node in nodes:
        for k in range(len(path) + 1):
            below[path[:k]].append((path[k:], _is_masked(node)))
    trees = {root for root, leaves in below.items() if _covers(leaves, positions)}

    def owner(path: Path) -> int | None:
        ends = (path[k:] for k in range(len(path)) if path[:k] in trees)
        return next((positions[end[:k]] for end in ends for k in range(1, len(end) + 1) if end[:k] in positions), None)

    return [owner(path) for path, node in nodes if not _is_masked(node)]


def _covers(leaves: list[tuple[Path, bool]], positions: Mapping[Path, int]) -> bool:
    """Whether the leaves of a node, with those that masks leave out, are those of all parameters and of nothing else."""
    seen: set[int] = set()
    for path, masked in leaves:
        at = next((positions[path[:k]] for k in range(1, len(path) + 1) if path[:k] in positions), None)
        if at is not None:
            seen.add(at)
        elif masked and (left_out := [i for end, i in positions.items() if end[: len(path)] == path]):
            seen.update(left_out)
        else:
            return False
    return len(seen) == len(positions)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


# --------------------------------------------------------------------------------------------------
# What errors call an optimizer: the transformations it is made of, and the optax function that the user wrote.
# --------------------------------------------------------------------------------------------------

_UPDATE = re.compile(r"^(?:.*\.)?(\w+)\.<locals>\.update\w*$")
_WRAPPERS = frozenset(("with_extra_args_support", "without_value", "apply"))


def written(tx: optax.GradientTransformation) -> str:
    """An optimizer by the functions that made it.

    >>> written(optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    'chain(clip, chain(identity, scale))'
    """
    name = _made_by(tx.update)
    parts = list(_parts(tx.update))
    if name in _WRAPPERS and parts:
        return parts[0]
    return f"{name}({', '.join(parts)})" if parts else name


def culprit(tx: optax.GradientTransformation, frames: Sequence[str]) -> str:
    """The name of the transformation in whose update an operation is, and of the optax functions that it may have come with.

    Args:
      tx: the optimizer.
      frames: names of the functions around the operation, innermost first.
    """
    names = [found[1] for frame in frames if (found := _UPDATE.match(frame)) and found[1] not in _WRAPPERS]
    whole = written(tx)
    if not names:
        return f"the optimizer {whole}"
    sources = [path for path in _aliases(names[0]) if path.rsplit(".", 1)[-1] != names[0]]
    of = f" (of {' or '.join(sources)})" if 0 < len(sources) <= 3 else ""
    return f"{names[0]}{of}" if whole == names[0] else f"{names[0]}{of} in the optimizer {whole}"


def _aliases(member: str) -> list[str]:
    """Names of the public functions of optax that use a transformation."""
    found = []
    for module in (optax, optax.contrib):
        for name, value in sorted(vars(module).items()):
            code = getattr(inspect.unwrap(value), "__code__", None) if isinstance(value, FunctionType) else None
            if code is not None and member in code.co_names:
                found.append(f"{module.__name__}.{name}")
    return found


def _made_by(update: Any) -> str:
    name = getattr(update, "__qualname__", repr(update))
    return name.split(".<locals>")[0]


def _parts(update: Any) -> Iterator[str]:
    """Names of the transformations inside one, found in what its function closes over."""
    for cell in getattr(update, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _named(value)


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, optax.GradientTransformation):
        yield written(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _named(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _named(each)
    elif isinstance(value, FunctionType) and _UPDATE.match(value.__qualname__):
        yield written(optax.GradientTransformation(lambda params: None, value))  # pyright: ignore[reportArgumentType]


# --------------------------------------------------------------------------------------------------
# An exponential moving average of the parameters, as a part of the optimizer's state: it rests and is saved as that
# does.
#
# So it is split as the parameters are under every plan, and an update that is skipped leaves it as it was.
# --------------------------------------------------------------------------------------------------


class MovingAverage(NamedTuple):
    """The state of `with_ema`.

    Attributes:
      inner: the optimizer's own.
      ema: the average, a tree like the parameters, in float32 at least.
    """

    inner: Any
    ema: PyTree


def with_ema(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an average: `decay * average + (1 - decay) * parameters`, from the first parameters on.

    >>> tx = with_ema(optax.sgd(1.0), 0.5)
    >>> state = tx.init({"w": jnp.ones(())})
    >>> _, state = tx.update({"w": jnp.ones(())}, state, {"w": jnp.ones(())})
    >>> float(state.ema["w"])
    0.5

    Args:
      tx: the optimizer.
      decay: at least 0 and below 1.

    Raises:
      ValueError: for another decay.
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"ema={decay!r}: the decay must be a number of at least 0 and below 1, such as 0.999")
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> MovingAverage:
        # Copies: a step gives up parameters and average alike.
        return MovingAverage(inner.init(params), jax.tree.map(lambda x: jnp.copy(jnp.asarray(x, _wide(x))), params))

    def update(updates: PyTree, state: Any, params: PyTree = None, **more: Any) -> tuple[PyTree, MovingAverage]:
        updates, own = inner.update(updates, state.inner, params, **more)
        new = optax.apply_updates(params, updates)
        mixed = lambda kept, value: decay * kept + (1 - decay) * value.astype(kept.dtype)
        return updates, MovingAverage(own, jax.tree.map(mixed, state.ema, new))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


# --------------------------------------------------------------------------------------------------
# Where the optimizer's state lives: a leaf that belongs to a parameter lives as the parameter does.
# --------------------------------------------------------------------------------------------------


def opt_owners(placement: Placement, tx: optax.GradientTransformation) -> tuple[PyTree, list[int | None]]:
    """Returns for every leaf of the optimizer's state its layout, and the position of the parameter it belongs to, or None.

    What belongs to a parameter and has its shape lives as the parameter does. Along a pipeline, where one rank has the whole
    parameter, all that belongs to it lives there. Everything else (counts, factored moments) is whole on every rank.
    """
    layouts = placement.params
    whole = jax.tree.map(whole_shape, layouts, is_leaf=is_layout)
    leaves, treedef = jax.tree.flatten(state := jax.eval_shape(tx.init, whole))
    found, params = owners(state, whole), jax.tree.leaves(layouts, is_leaf=is_layout)

    def layout_of(leaf: Any, owner: int | None) -> tuple[Layout, int | None]:
        own = None if owner is None else params[owner]
        if own is not None and own.shape == leaf.shape:
            return Layout(own.shape, leaf.dtype, own.spec, own.stored, own.parts), owner
        alone = placement.stages is not None and own is not None and not own.axes
        return Layout.replicated(leaf), owner if alone else None

    placed = [layout_of(*each) for each in zip(leaves, found, strict=True)]
    return treedef.unflatten([layout for layout, _ in placed]), [owner for _, owner in placed]


def whole_shape(layout: Layout) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the unpadded full array."""
    return jax.ShapeDtypeStruct(layout.shape, layout.dtype)


def gather_leaf(shard: jax.Array, layout: Layout) -> jax.Array:
    """Gathers a resting shard: the full array, uncast, the same on every rank; inside `shard_map`."""
    for axis in reversed(layout.axes):
        shard = gather_whole(shard, axis, layout.dim_of(axis) or 0, invarying=True)
    return from_stored(shard, layout)


def leaf_shard(whole: jax.Array, layout: Layout) -> jax.Array:
    """Cuts this rank's resting shard out of a full array; inside `shard_map`. The inverse of `gather_leaf`."""
    part = to_stored(whole, layout)
    for axis in layout.axes:
        part = own_slice(part, axis, layout.dim_of(axis) or 0)
    return part


def gather_stored(tree: PyTree, layouts: PyTree) -> PyTree:
    """Gathers stored shards: full arrays, the same on every rank; inside `shard_map`."""
    return map_layouts(gather_leaf, tree, layouts)


def own_parts(tree: PyTree, layouts: PyTree) -> PyTree:
    """Cuts this rank's shards out of full arrays; inside `shard_map`. The inverse of `gather_stored`."""
    return map_layouts(lambda x, layout: leaf_shard(jnp.asarray(x), layout), tree, layouts)


# --------------------------------------------------------------------------------------------------
# Optimizers that a step cannot run are refused.
# --------------------------------------------------------------------------------------------------

SKIPPING = {
    optax.MultiStepsState: "optax.MultiSteps would average over steps without an update: use accumulate=",
    optax.ApplyIfFiniteState: "optax.apply_if_finite would average over updates that it skips: use max_nonfinite=",
    optax.contrib.SAMState: "optax.contrib.sam would average over parameters that its adversarial steps leave: leave ema out",
    optax.ConditionallyMaskState: "optax.conditionally_mask would average over updates that it masks: update in every step",
}
"""States of optimizers that make no update in some steps -> why a moving average is refused beside them."""


def checked_optimizer(tx: Any, placement: Placement, *, told: bool = True) -> optax.GradientTransformation:
    """The optimizer as a transformation; refused if it is none, or if its update cannot run.

    Args:
      tx: an optax transformation, or an `optax.MultiSteps` around one.
      placement: where parameters live.
      told: whether it is tried without the loss too, where it does not take it as `value`.

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
        if isinstance(error, TypeError) and "argument 'value'" in str(error) and told:
            return checked_optimizer(without_value(tx), placement, told=False)
        raise ValueError(
            f"the optimizer {written(tx)} cannot be updated from gradients, parameters and the loss's value alone: "
            f"{type(error).__name__}: {error}. Transformations that evaluate the loss themselves (line searches) or want "
            "parameters in a structure of their own (as optax.lookahead does) are not supported: choose another one. Masks and "
            "labels see what trains alone, as nested dicts of arrays: of an nnx.State give nnx.to_pure_dict(mask), or give a "
            "function, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)"
        ) from error
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in ((shapes, state), (new, after))]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the optimizer {written(tx)} changes the shape or dtype of parameters or of its own state in an update, so a "
            f"compiled step cannot repeat it: {_first_change(*kinds)}"
        )
    return tx


def averaging(tx: Any, placement: Placement, ema: float | None) -> optax.GradientTransformation:
    """`checked_optimizer` with a moving average of the parameters (`with_ema`), where `ema` is a decay.

    Raises:
      TypeError, ValueError: as `checked_optimizer`; for a decay out of range; for an optimizer of which some steps
        make no update; or for a plan with rounds.
    """
    tx = checked_optimizer(tx, placement)
    if ema is None:
        return tx
    if placement.plan.rounds:
        raise ValueError(
            f"ema={ema!r}: each replica trains its own parameters, so each would have a different moving average; the outer "
            "parameters, which are the model, are already an average over replicas and rounds: leave ema out"
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
