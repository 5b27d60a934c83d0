"""How leaves of a model's own state join over ranks, as module classes declare it, and the hook that runs once per update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax._types import PyTree, named_leaves

Join = Literal["mean", "sum", "first", "max"]
"""What becomes of a leaf of which every rank has its own: the mean over ranks; what it held before, and the sum of what
ranks added; the first rank's; the largest."""

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
            f"{DECLARED} says how state of a model joins over ranks, each of {', '.join(map(repr, get_args(Join)))}; these "
            f"do not:\n  " + "\n  ".join(problems)
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
            yield f"{leaf} is {dtype}, of which there is no mean: declare 'first', 'sum' or 'max', or keep floats"
        if join in ("sum", "max") and not jnp.issubdtype(dtype, jnp.number):
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
