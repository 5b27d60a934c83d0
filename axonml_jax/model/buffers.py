"""State that a model changes itself, such as batch statistics, and how ranks join theirs."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen, nnx

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.compat.order import manual_axes

# --------------------------------------------------------------------------------------------------
# Parameters that no optimizer changes, but the model itself.
# --------------------------------------------------------------------------------------------------


class State(nnx.Variable):
    """State of a module that was made with parameters (`as_state`)."""


def as_state(module: nnx.Module) -> nnx.Module:
    """Make the parameters of a module state, which its model may write: a target network that follows another (BYOL, MoCo).

    State is not trained. It is replicated on every rank, saved in checkpoints, and synchronized as batch statistics are.

    >>> class Follows(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.online = nnx.Linear(8, 4, rngs=rngs)
    ...         self.target = as_state(nnx.Linear(8, 4, rngs=rngs))

    Args:
      module: changed in place. Parameters that are shared within it stay shared.

    Returns:
      The module.

    Raises:
      ValueError: where the module has no parameters.
    """
    made: dict[int, State] = {}
    nodes: list[Any] = [node for _, node in nnx.iter_graph(module)]
    for node in nodes:
        by_key = dict(enumerate(node)) if isinstance(node, list) else node if isinstance(node, dict) else None
        put = partial(setattr, node) if by_key is None else node.__setitem__
        held = vars(node) if by_key is None and isinstance(node, nnx.Pytree) else by_key or {}
        for name, value in list(held.items()):
            if isinstance(value, nnx.Param):
                state = made.setdefault(id(value), State(value.get_value(), **value.get_metadata()))
                put(name, state)
    if not made:
        raise ValueError(f"as_state: {type(module).__name__} has no parameters (nnx.Param)")
    return module


# --------------------------------------------------------------------------------------------------
# BatchNorm whose statistics are those of the global batch, for models written for one device.
#
# Flax joins statistics itself when `axis_name` is set, but averages the ranks' means as if every rank counted the same
# number of elements. With a `mask` the counts differ, so there the joint mean and variance are computed here from sums
# and handed to Flax as if they were running averages.
# --------------------------------------------------------------------------------------------------

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

    Communicates: one all-reduce of 3c elements.
    """
    features = {axis % x.ndim for axis in ([feature_axis] if isinstance(feature_axis, int) else feature_axis)}
    reduced = tuple(axis for axis in range(x.ndim) if axis not in features)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mask = jnp.broadcast_to(mask, x.shape)
    parts = [jnp.where(mask, value, 0).sum(reduced) for value in (x, jnp.square(x), jnp.ones_like(x))]
    total, squares, count = sum_over_ranks(jnp.stack(parts), axes)
    mean = total / count
    return mean, jnp.maximum(squares / count - jnp.square(mean), 0)


def _joined(own: Any, axes: tuple[str, ...], sum_over_ranks: Sum) -> tuple[tuple[str, ...], Sum] | None:
    """The axes over which a BatchNorm averages, its `vmap` axes first, and by which sum; None if it names a mesh axis."""
    names = () if own is None else tuple(own) if isinstance(own, list | tuple) else (own,)
    if {*axes, *manual_axes()} & {*names}:
        return None
    return (*names, *axes), _refuse_mask if names else sum_over_ranks


def _refuse_mask(x: jax.Array, axes: Any) -> jax.Array:
    raise ValueError(
        f"BatchNorm with mask= and an axis_name of a vmap would average over {', '.join(axes)}: if masks are unequal, it is "
        "ambiguous whether that is a mean of rows or of the vmap's means. Leave axis_name or mask= out, or take "
        'batch_stats="local"'
    )


def synchronize_nnx(model: nnx.Module, axes: tuple[str, ...], sum_over_ranks: Sum) -> None:
    """Let every BatchNorm of `model` that names no mesh axis join `axes`. Changes the model in place."""
    for _, module in list(nnx.iter_graph(model)):
        if isinstance(module, nnx.BatchNorm) and (joined := _joined(module.axis_name, axes, sum_over_ranks)):
            module.axis_name, how = joined  # pyright: ignore[reportAttributeAccessIssue]  # jax takes several names
            module.__class__ = _masked(type(module))
            module.sum_over_ranks = how  # pyright: ignore[reportAttributeAccessIssue]


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


@functools.cache
def _masked(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """A class of BatchNorm, a user's own among them, whose `super().__call__` is exact for unequal masks."""
    if kind is nnx.BatchNorm:
        return _MaskedBatchNorm
    bases = (kind, _MaskedBatchNorm)
    return type(kind.__name__, bases, {"__module__": kind.__module__})  # pyright: ignore[reportGeneralTypeIssues]


@contextmanager
def synchronize_linen(axes: tuple[str, ...], sum_over_ranks: Sum | None) -> Iterator[None]:
    """Within this context every linen.BatchNorm that names no mesh axis joins `axes`."""
    if not axes or sum_over_ranks is None:
        yield
        return

    def join(call: Callable, args: tuple, kwargs: dict, context: Any):
        module = context.module
        called = isinstance(module, linen.BatchNorm) and context.method_name == "__call__"
        joined = _joined(module.axis_name, axes, sum_over_ranks) if called else None
        if joined is None:
            return call(*args, **kwargs)
        with _set(module, "axis_name", joined[0]):
            return _linen_call(module, call, args, kwargs, joined[1])

    with linen.intercept_methods(join):
        yield


def _linen_call(module: linen.BatchNorm, call: Callable, args: Any, kwargs: dict, sum_over_ranks: Sum):
    mask = kwargs.pop("mask", None)
    given = kwargs.get("use_running_average", args[1] if len(args) > 1 else None)
    fixed = linen.merge_param("use_running_average", module.use_running_average, given)
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
    """Temporarily set a field of a frozen Linen module, for the length of a call."""
    before = getattr(module, name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)


# --------------------------------------------------------------------------------------------------
# How leaves of a model's own state join over ranks, as module classes declare it, and the hook that runs once per
# update.
# --------------------------------------------------------------------------------------------------

Join = Literal["mean", "sum", "first", "max", "min"]
"""How a leaf that differs between ranks is joined: the mean over ranks; its value before, plus the sum of what ranks added; the
first rank's; the largest, or the smallest, element by element."""

DECLARED, HOOK = "state_joins", "after_update"

Kinds = Sequence[tuple[str, type, Callable[[str], list[str] | None]]]
"""Modules as (path, class, the names of the state's leaves that one of its attributes holds, or None: no such attribute)."""


def declared_joins(kinds: Kinds, state: PyTree) -> dict[str, Join]:
    """The join of every leaf that a module class names in `state_joins`, by the leaf's path.

    Raises:
      ValueError: with everything that is wrong with the declarations.
    """
    found: dict[str, Join] = {}
    problems: list[str] = []
    leaves = named_leaves(state)
    for path, kind, held in kinds:
        given, own = getattr(kind, DECLARED, {}), f"{kind.__name__} at {path or 'the root'}"
        if not isinstance(given, Mapping):
            problems.append(f"{own}: {DECLARED}={given!r} must be a mapping of names to joins")
            continue
        for name, join in given.items():
            names = held(name)
            problems += (f"{own}: {problem}" for problem in _problems(name, join, names, leaves))
            for leaf in names or ():
                if found.setdefault(leaf, join) != join:
                    problems.append(f"{own}: {leaf} is declared {join!r}, and {found[leaf]!r} by another module")
    if problems:
        raise ValueError(
            f"{DECLARED} says how the state of a model is joined over ranks, by one of "
            f"{', '.join(map(repr, get_args(Join)))}; these entries are wrong:\n  " + "\n  ".join(problems)
        )
    return found


def _problems(name: str, join: Any, names: list[str] | None, leaves: Mapping[str, Any]) -> Iterator[str]:
    if join not in get_args(Join):
        yield f"{name!r}: {join!r} is no join"
    elif names is None:
        yield f"{name!r} is no state of it: give a variable that is neither a parameter nor an intermediate"
    for leaf in names or ():
        dtype = leaves[leaf].dtype
        if join == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
            yield f"{leaf} is {dtype}, of which there is no mean: declare 'first', 'sum', 'max' or 'min', or keep floats"
        if join in ("sum", "max", "min") and not jnp.issubdtype(dtype, jnp.number):
            yield f"{leaf} is {dtype}, of which there is no {join}: keep numbers, or declare 'first'"


def nnx_kinds(model: nnx.Module, state: PyTree) -> Kinds:
    """The modules of an NNX model that declare joins."""
    nodes = list(nnx.iter_graph(model))
    paths = {id(node): "/".join(map(str, path)) for path, node in nodes if isinstance(node, nnx.Variable)}
    leaves = list(named_leaves(state))

    def holding(module: nnx.Module) -> Callable[[str], list[str] | None]:
        def held(name: str) -> list[str] | None:
            if getattr(module, name, module) is None:  # switched off
                return []
            inner = nnx.iter_graph(getattr(module, name, ()))
            own = [paths[id(node)] for _, node in inner if isinstance(node, nnx.Variable)]
            return [leaf for leaf in leaves if any(f"{leaf}/".startswith(f"{path}/") for path in own)] or None

        return held

    return [
        ("/".join(map(str, path)), type(node), holding(node))
        for path, node in nodes
        if isinstance(node, nnx.Module) and hasattr(type(node), DECLARED)
    ]


def linen_kinds(types: Mapping[str, type], state: PyTree) -> Kinds:
    """The modules of a Linen model, among those seen in calls, that declare joins."""
    leaves = list(named_leaves(state))

    def holding(path: str) -> Callable[[str], list[str] | None]:
        def held(name: str) -> list[str] | None:
            own = f"{path}/{name}/" if path else f"{name}/"
            return [leaf for leaf in leaves if f"{leaf.partition('/')[2]}/".startswith(own)] or None

        return held

    return [(path, kind, holding(path)) for path, kind in types.items() if hasattr(kind, DECLARED)]


def with_hooks(model: nnx.Module) -> list[tuple[str, Any]]:
    """The modules that have `after_update`, inner ones first, with their paths."""
    return [
        ("/".join(map(str, path)), node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module) and callable(getattr(type(node), HOOK, None))
    ]


def run_hooks(modules: Sequence[tuple[str, Any]]) -> None:
    """Every module's `after_update`, once; an error says where it happened."""
    for path, module in modules:
        try:
            getattr(module, HOOK)()
        except Exception as error:
            error.add_note(
                f"in {type(module).__name__}.{HOOK} at {path or 'the root'}, which runs on the model's joined state once per "
                "update: it may read and change variables that are state; parameters and random streams are shapes there"
            )
            raise


def check_same_shapes(before: PyTree, after: PyTree) -> None:
    """Refuse a hook that changed more than values.

    Raises:
      ValueError: naming every leaf whose shape or dtype is another.
    """
    said = lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}"
    pairs = zip(named_leaves(before).items(), jax.tree.leaves(after), strict=True)
    wrong = [f"  {name}: {said(old)}, now {said(new)}" for (name, old), new in pairs if said(old) != said(new)]
    if wrong:
        raise ValueError(f"{HOOK} may change the values of a model's state only, but changed:\n" + "\n".join(wrong))
