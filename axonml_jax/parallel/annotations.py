"""A model's annotations of how its parameters are split, read for a mesh as path rules and strategies."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx
from flax.core import spmd
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.base import PyTree, aligned, lines, section, table
from axonml_jax.mesh.axes import BATCH_AXES, LAYER_AXES, PARTITIONED, STAGES, as_axes
from axonml_jax.mesh.world import as_mesh
from axonml_jax.model.view import ModelAround, unboxed
from axonml_jax.sharding.layout import as_spec

LogicalRules = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""The mesh axes that logical names of dims mean: `(("embed", None), ("mlp", "model"))`."""


# --------------------------------------------------------------------------------------------------
# Reading the annotation of each parameter, as metadata, boxes or shardings have it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The annotation of one parameter, as it is written.

    Attributes:
      shape: its shape.
      names: for each dim a name, several or None; empty where nothing is written.
      where: "metadata", "array", "Partitioned" or "LogicallyPartitioned".
      rules: what its logical names mean, in order; of two rules for one name the first whose axes are free holds.
      state: the same as `names` for the optimizer's state (`optimizer_sharding`).
    """

    shape: tuple[int, ...]
    names: tuple[Any, ...] = ()
    where: str = ""
    rules: tuple[tuple[str, Any], ...] = ()
    state: tuple[Any, ...] = ()


def written(model: Any, params: PyTree | None, names: Sequence[str]) -> dict[str, Written]:
    """Reads the annotation of every parameter, by path.

    Args:
      model: an NNX module, a function without arguments that makes one, or a Linen module.
      params: a Linen module's variables as `init` returned them, in their boxes, or a function that makes them.
      names: the mesh's axes as its maker calls them: an array that lies split over these says so itself.

    Raises:
      ValueError: for a Linen module without `params`.
    """
    if isinstance(model, ModelAround):
        return written(model.model, params, names)
    if isinstance(model, linen.Module):
        if params is None:
            raise ValueError(
                "a Linen module's annotations are in the boxes of its variables: give params=, what module.init returned, or a "
                "function that calls it (params=lambda: module.init(key, example))"
            )
        tree = jax.eval_shape(params) if callable(params) else params
        inner = tree.get("params", tree) if isinstance(tree, Mapping) else {}
        leaves = jax.tree.leaves_with_path(inner, is_leaf=lambda x: isinstance(x, linen.meta.AxisMetadata))
        return {"/".join(str(getattr(key, "key", key)) for key in path): _boxed(leaf, names) for path, leaf in leaves}
    if not isinstance(model, nnx.Module):
        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(model)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): _of_variable(variable, names) for path, variable in flat}


def _boxed(leaf: Any, names: Sequence[str]) -> Written:
    value = unboxed(leaf)
    shape = getattr(value, "shape", ())
    if isinstance(leaf, linen.LogicallyPartitioned):
        own = (*(leaf.rules or ()), *linen.get_logical_axis_rules())
        return Written(shape, tuple(leaf.names), "LogicallyPartitioned", own)
    if isinstance(leaf, linen.Partitioned):
        return Written(shape, tuple(leaf.names), "Partitioned")
    return Written(shape, *_of_array(value, names))


def _of_array(value: Any, names: Sequence[str]) -> tuple[tuple[Any, ...], str]:
    """The spec of an array that is sharded over axes of the mesh, and where it was read; empty for others."""
    spec = value.sharding.spec if isinstance(getattr(value, "sharding", None), NamedSharding) else ()
    used = {axis for entry in spec for axis in _names_of(entry)}
    return (tuple(spec), "array") if used and used <= set(names) else ((), "")


def _of_variable(variable: nnx.Variable, names: Sequence[str]) -> Written:
    value, metadata = variable.get_value(), variable.get_metadata()
    shape, state = getattr(value, "shape", ()), _entries(metadata.get("optimizer_sharding"))
    lies, where = _of_array(value, names)
    if where:  # rules that were around when it was made have been applied to it
        return Written(shape, lies, where, state=state)
    said = _entries(metadata.get("out_sharding"))
    own = (*reversed(metadata.get("sharding_rules") or ()), *reversed(spmd.get_logical_axis_rules()))  # the last holds
    return Written(shape, said, "metadata" if said else "", own, state)


def _entries(said: Any) -> tuple[Any, ...]:
    """The entries of an annotation: a tuple of names, a PartitionSpec, a NamedSharding or a format."""
    said = getattr(said, "sharding", said)
    return tuple(getattr(said, "spec", said) or ())


def _names_of(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(name for each in entry for name in _names_of(each)) if isinstance(entry, tuple | list) else (entry,)


# --------------------------------------------------------------------------------------------------
# The meaning of annotations: their names become the mesh's axes.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meant:
    """The meaning of one parameter's annotation: for each dim the mesh axes, in this library's names, that split it."""

    shape: tuple[int, ...]
    said: str
    where: str
    axes: tuple[tuple[str, ...], ...] = ()
    state: frozenset[str] = frozenset()

    @property
    def over(self) -> frozenset[str]:
        """The axes that split it."""
        return frozenset(axis for entry in self.axes for axis in entry)


@dataclass(frozen=True)
class Annotations:
    """A model's annotations, read for a mesh; print it.

    Attributes:
      of: what is meant of each parameter, by path.
      degrees: the sizes of the mesh's axes, by this library's names.
      problems: for each parameter, what cannot be meant on this mesh.
    """

    of: Mapping[str, Meant]
    degrees: Mapping[str, int]
    problems: tuple[str, ...] = ()

    @staticmethod
    def read(model: Any, mesh: Any, *, params: PyTree | None = None, rules: LogicalRules = ()) -> "Annotations":
        """Reads the annotations of a model for a mesh.

        Args:
          model: an NNX module, a function without arguments that makes one, or a Linen module.
          mesh: a Mesh, with axis names of your own or this library's.
          params: a Linen module's variables in their boxes, or a function that makes them.
          rules: what logical names mean; they count before those on variables and those in context.
        """
        ours = as_mesh(mesh)
        known = dict(zip(getattr(mesh, "axis_names", ours.axis_names), ours.axis_names, strict=True))
        known |= {name: name for name in ours.axis_names}
        first: tuple[Any, ...] = tuple(rules.items() if isinstance(rules, Mapping) else rules)
        found, problems = {}, []
        for path, each in written(model, params, tuple(known)).items():
            found[path], wrong = _meant(each, first, known, dict(ours.shape))
            problems += [f"  {path} {each.shape}: {why}" for why in wrong]
        return Annotations(found, dict(ours.shape), tuple(problems))

    def check(self) -> None:
        """Refuse annotations that do not fit the mesh.

        Raises:
          ValueError: with every name that has no rule and is no axis, and all else that does not fit the mesh.
        """
        if self.problems:
            raise ValueError(
                f"the model's annotations do not fit the mesh {dict(self.degrees)}:\n"
                + "\n".join(self.problems)
                + "\n(rules= "
                'says what a name means: rules=(("embed", None), ("mlp", "tensor")); None keeps a dim whole)'
            )

    @property
    def split(self) -> frozenset[str]:
        """The axes of more than one rank over which path rules split parameters."""
        return frozenset(axis for each in self.of.values() for axis in each.over if axis in PARTITIONED)

    def sharded(self, *, state: bool = False) -> tuple[str, ...]:
        """The batch axes over which parameters (or the optimizer's state alone) are to rest sharded, outermost first."""
        over = {axis for each in self.of.values() for axis in (each.state - each.over if state else each.over)}
        return tuple(axis for axis in self.degrees if axis in over and axis in BATCH_AXES and axis not in PARTITIONED)

    @property
    def rules(self) -> tuple[tuple[str, PartitionSpec], ...]:
        """A path rule for each parameter."""
        return tuple((re.escape(path), _spec(each)) for path, each in self.of.items())

    def rows(self) -> list[list[str]]:
        """The rows of the table; parameters that differ in numbers of their paths only share one."""
        alike: dict[tuple, list[str]] = {}
        for path, each in self.of.items():
            pattern = re.sub(r"(?<![^/_])\d+(?![^/])", "*", path)
            alike.setdefault((pattern, each.shape, each.said, each.where, self._becomes(each)), []).append(path)
        return [
            [pattern + (f" ({len(paths)})" if len(paths) > 1 else ""), str(shape), said or "-", where or "-", becomes]
            for (pattern, shape, said, where, becomes), paths in alike.items()
        ]

    def _becomes(self, each: Meant) -> str:
        own = [
            f"{' and '.join(axes)} on dim {dim}"
            for dim, entry in enumerate(_spec(each))
            if (axes := as_axes(entry or ()))
        ]
        named = {axis for entry in _spec(each) for axis in as_axes(entry or ())}
        split = [bool(set(as_axes(entry or ())).intersection(PARTITIONED)) for entry in _spec(each)]
        free = sum(split) < len(each.shape)  # what rests sharded takes no dim that is split already
        chosen = [axis for axis in self.sharded() if axis not in named]
        own += [f"{axis} on a dim that the plan chooses" if free else f"whole along {axis}" for axis in chosen]
        return ", ".join(own) or "whole on every rank"

    _HEADER = ("parameter", "shape", "annotated", "by", "becomes")

    def __str__(self) -> str:
        text = aligned(self._HEADER, self.rows(), left=len(self._HEADER))
        return "\n".join([text, *(f"refused:{each[1:]}" for each in self.problems)])

    def __repr__(self) -> str:
        return f"Annotations({sum(bool(each.said) for each in self.of.values())} of {len(self.of)} parameters)"

    def _repr_html_(self) -> str:
        shown = [table(list(self._HEADER), self.rows(), left=5)]
        return section("annotations", *shown, *([lines("\n".join(self.problems))] if self.problems else []))


def _spec(each: Meant) -> PartitionSpec:
    """The path rule of a parameter. Of a dim with axes of both kinds only the tensor-like ones: the plan places the others."""
    entries = []
    for entry in each.axes:
        automatic = tuple(axis for axis in entry if axis in PARTITIONED)
        entries.append(automatic or entry)
    while entries and not entries[-1]:
        entries.pop()
    return as_spec(entries)


def _meant(
    each: Written, first: tuple[tuple[str, Any], ...], known: Mapping[str, str], degrees: Mapping[str, int]
) -> tuple[Meant, list[str]]:
    """Reads the meaning of a parameter's names, and what is wrong with them."""
    rules, problems = (*first, *each.rules), []
    taken: set[str] = set()
    entries = [_axes(_names_of(entry), rules, known, taken, problems.append) for entry in each.names]
    of_state: set[str] = set()
    for entry in each.state:
        _axes(_names_of(entry), rules, known, of_state, problems.append)
    there = lambda axes: tuple(axis for axis in axes if degrees[axis] > 1)
    axes = tuple(there(entry) for entry in entries)
    if len(axes) > len(each.shape):
        problems.append(f"{each.names} has more entries than it has dims")
    for dim, entry in enumerate(axes[: len(each.shape)]):
        split = [axis for axis in entry if axis in PARTITIONED]
        count = 1
        for axis in split:
            count *= degrees[axis]
        if each.shape[dim] % count:
            over = " and ".join(f"{axis}={degrees[axis]}" for axis in split)
            problems.append(f"dim {dim} does not divide over {over} ({each.names})")
    problems += [_elsewhere(axis) for axis in dict.fromkeys(a for entry in axes for a in entry) if _elsewhere(axis)]
    said = str(PartitionSpec(*each.names)).removeprefix("PartitionSpec") if each.names else ""
    return Meant(each.shape, said.removeprefix("P"), each.where, axes, frozenset(there(of_state))), problems


def _axes(
    names: tuple[str, ...],
    rules: Sequence[tuple[str, Any]],
    known: Mapping[str, str],
    taken: set[str],
    problem: Callable[[str], None],
) -> tuple[str, ...]:
    """The mesh axes that the names of one dim mean, without those that another dim has taken."""
    found: list[str] = []
    for name in names:
        choices = [_names_of(tuple(as_axes(axes or ()))) for alias, axes in rules if alias == name]
        if not choices and name not in known:
            problem(f"{name!r} has no rule and is no axis of the mesh")
            continue
        if wrong := [axis for axes in choices for axis in axes if axis not in known]:
            problem(f"the rule of {name!r} names {wrong}, no axis of the mesh")
            continue
        own = [tuple(known[axis] for axis in axes) for axes in (choices or [(name,)])]
        if (free := next((axes for axes in own if not taken.intersection(axes)), None)) is not None:
            found += free
            taken.update(free)
        elif not choices:
            problem(f"{name!r} splits two of its dims")
    return tuple(found)


def _elsewhere(axis: str) -> str:
    """The reason why annotations cannot ask for an axis; "" where they can."""
    if axis == STAGES:
        return (
            "pipe holds stages, which annotations do not cut: give the plan pipe=ax.Pipelined(num_microbatches=...), or use "
            "ax.Pipeline, and keep this name's dim whole by a rule, such as ('layers', None)"
        )
    if axis in PARTITIONED or (axis in BATCH_AXES and axis not in LAYER_AXES):
        return ""
    if axis == "context":
        return "context splits positions: parameters rest sharded over it by Plan(context=ax.Context(shard=True)) alone"
    return f"{axis} is split by layers that do it themselves (ax.ParallelLinear, ax.auto_parallelize) alone"
