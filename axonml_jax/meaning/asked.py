"""`Asked`: a user's loss with its model and batch, traced at the whole batch's shape or at a rank's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import LossFn, PyTree, is_array, path_name, warn
from axonml_jax.collectives.primitives import joined_over, joined_ranks, vary
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.compat.row_keys import Drawn, drawn_by_rows
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.meaning.following import Following, calls_model
from axonml_jax.meaning.model_call import Call, Calls, Path, Unclear, place_of
from axonml_jax.meaning.places import SUM, Group, Places, Split, local_shape, split_sizes
from axonml_jax.model.loss import Loss, is_weighted, parse_loss
from axonml_jax.model.view import Functional, Mode, Variables
from axonml_jax.program.program import Equation, Program, all_but_named, reached, read_program

SplitOf = Callable[[str, tuple[int, ...]], Mapping[int, tuple[str, ...]]]
"""`split(path, whole shape)`: the mesh axes that split each dim of a leaf of the batch."""


@dataclass(frozen=True)
class Traced:
    """A loss traced with a stand-in for the model.

    Attributes:
      program: the loss as a program of the variables, the key and the batch, flat.
      out_tree: the structure of its results: the `Loss`, then what the loss changed of the model's variables.
      noted: the calls of the model.
      changed: the paths of the variables that the loss changed itself.
      weighted: it returned `WeightedMean`s alone.
      draws: what it draws outside of these calls, where keys are those of rows.
      shared: the model's random streams from which both it and these calls draw.
    """

    program: Program
    out_tree: Any
    noted: list[Call]
    changed: tuple[Path, ...]
    weighted: bool
    draws: tuple[Drawn, ...] = ()
    shared: tuple[str, ...] = ()

    def reads(self, fixed: int) -> bool:
        """Whether a call of the model, or one of its variables, the first `fixed` inputs, reaches the loss."""
        program = self.program
        total = self.out_tree.unflatten(program.outputs)[0].total
        found = reached(program, [total])
        called = [number for each in program.equations if calls_model(each) for number in each.outputs]
        return not found.isdisjoint([*program.inputs[:fixed], *called])


@dataclass(frozen=True)
class Asked:
    """A loss with its model, mode, variables, key and batch, and the groups of ranks that split the batch.

    Attributes:
      groups: the groups of ranks that split the batch's rows, and its positions.
      split: the mesh axes that split each dim of a leaf of the batch.
      model, loss_fn, mode: the user's model and loss, and how the model is bound.
      variables, key: as read.
      batch: a rank's rows, or shapes.
      seeing_whole: entered where code sees whole sequences of positions that ranks split.
      alone: mesh axes that split nothing of this loss, of one rank or of ranks with batches of their own: arrays are typed as
        varying over them all the same.
    """

    groups: tuple[Group, ...]
    split: SplitOf
    model: Functional
    loss_fn: LossFn
    mode: Mode
    variables: Variables
    key: jax.Array
    batch: PyTree
    seeing_whole: Callable[[], AbstractContextManager] = nullcontext
    alone: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split the batch."""
        return tuple(axis for group in self.groups for axis in group.axes)

    @property
    def signature(self) -> Any:
        """A key of all that a trace depends on: structure, shapes and dtypes, and the mode."""
        leaves, treedef = jax.tree.flatten((self.variables, self.key, self.batch))
        return treedef, tuple((_shape(x), _dtype(x)) for x in leaves), self.mode

    @property
    def leaves(self) -> list[Any]:
        """The variables, the key and this rank's rows, flat."""
        return jax.tree.leaves((self.variables, self.key, self.batch))

    @property
    def typed_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a rank's arrays are typed as varying, and those of a trace are not."""
        return self.axes + self.alone

    @property
    def seeing_all(self) -> Mode:
        """The mode of a model that sees the whole batch."""
        return Mode(training=self.mode.training, precision=self.mode.precision)

    @property
    def everywhere(self) -> tuple[int, ...]:
        """The numbers of all groups."""
        return tuple(range(len(self.groups)))

    def batch_places(self) -> list[tuple[tuple[int, ...], Places]]:
        """The whole shape of every leaf of the batch, and its places."""
        found = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch):
            shape = tuple(_shape(leaf))
            dims = {axes: dim for dim, axes in self.split(path_name(path), shape).items()}
            places = tuple(Split(dims[group.axes]) if group.axes in dims else None for group in self.groups)
            whole = list(shape)
            for place, group in zip(places, self.groups, strict=True):
                if isinstance(place, Split):
                    whole[place.dim] *= group.ranks
            found.append((tuple(whole), places))
        return found

    def places(self) -> list[Places]:
        """The places of all leaves."""
        none = (None,) * len(self.groups)
        fixed = len(jax.tree.leaves((self.variables, self.key)))
        return [none] * fixed + [places for _, places in self.batch_places()]

    def shapes(self, parts: Sequence[int]) -> tuple[Variables, Any, PyTree]:
        """The variables, the key, and the batch as shapes: a rank's part for some groups, by number, whole for the others."""
        leaves, treedef = jax.tree.flatten(self.batch)
        keep = lambda places: tuple(place if k in parts else None for k, place in enumerate(places))
        sizes = [local_shape(whole, keep(places), self.groups) for whole, places in self.batch_places()]
        shape = lambda x: jax.ShapeDtypeStruct(_shape(x), _dtype(x))
        batch = [jax.ShapeDtypeStruct(size, _dtype(x)) for size, x in zip(sizes, leaves, strict=True)]
        return jax.tree.map(shape, self.variables), shape(self.key), treedef.unflatten(batch)

    def in_halves(self) -> "Asked | None":
        """The batch split in two, where more than two ranks have one row each, where code may trace otherwise; else None."""
        if len(self.groups) > 1 or any(group.ranks % 2 or group.ranks == 2 for group in self.groups):
            return None
        halves = tuple(group._replace(ranks=2) for group in self.groups)
        leaves, treedef = jax.tree.flatten(self.batch)
        places = self.batch_places()
        rows = [
            _shape(x)[at.dim] for (_, own), x in zip(places, leaves, strict=True) for at in own if isinstance(at, Split)
        ]
        if all(size > 1 for size in rows):
            return None
        batch = [
            jax.ShapeDtypeStruct(local_shape(whole, at, halves), _dtype(x))
            for (whole, at), x in zip(places, leaves, strict=True)
        ]
        return replace(self, groups=halves, batch=treedef.unflatten(batch))

    def typed(self, x: Any, like: Any) -> Any:
        """Types an array of a trace as varying over those axes of `like` that are not the batch's."""
        return vary(x, tuple(varying_axes(like) - set(self.typed_axes))) if isinstance(like, jax.Array) else x

    def _seen(self, parts: Sequence[int]) -> AbstractContextManager:
        whole = any(group.positions and k not in parts for k, group in enumerate(self.groups))
        return self.seeing_whole() if whole else nullcontext()

    def traced(self, parts: Sequence[int]) -> Traced:
        """Traces the loss with a stand-in for the model, at a rank's part for some groups and whole for the others.

        Nothing is typed as varying over the batch's axes in it: a loop that starts from plain zeros may carry rows. What layers
        split is typed as varying over their axes, which losses of parts ask for.
        """
        seen: dict[str, Any] = {}

        def fun(variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, list[jax.Array]]:
            variables = jax.tree.map(self.typed, variables, self.variables)
            seen["calls"] = calls = Calls(self.model, self.mode, variables, key, self.typed_axes)
            with calls.stand_in() as bound:
                loss, seen["weighted"] = _parsed(self.loss_fn(bound, batch))
                changed = calls.changed_by_loss(bound)
            seen["changed"] = tuple(changed)
            seen["shared"] = tuple(sorted("/".join(map(str, at)) for at in calls.drawn & calls.drawn_by_loss))
            return loss, [x for value in changed.values() for x in jax.tree.leaves(value)]

        with self._seen(parts):
            traced = trace(fun, *self.shapes(parts))
        return Traced(
            program_of(traced.jaxpr),
            traced.out_tree,
            seen["calls"].noted,
            seen["changed"],
            seen["weighted"],
            drawn_by_rows(self.key, traced.jaxpr),
            seen["shared"],
        )

    def called(self, call: Call, shapes: Sequence[Sequence[int]], parts: Sequence[int]) -> Call:
        """Traces a call of the model on operands of other shapes."""

        def fun(variables: Variables, key: jax.Array, arrays: list) -> list[jax.Array]:
            variables, key, arrays = vary((variables, key, arrays), self.typed_axes)
            return call.run(self.model.bind(variables, key, self.mode), arrays)

        given = [jax.ShapeDtypeStruct(shape, aval.dtype) for shape, aval in zip(shapes, call.given, strict=True)]
        variables, key, _ = self.shapes(())
        with self._seen(parts):
            traced = trace(fun, variables, key, given)
        drawn = drawn_by_rows(key, traced.jaxpr)
        return replace(call, given=tuple(given), made=tuple(traced.made), draws=drawn, traced=traced.jaxpr)

    def inlined(self, parts: Sequence[int], *, run: bool = False) -> Traced:
        """Traces the loss with the model's own code in it, and the model's state after it.

        In a trace that is `run` layers join nothing over ranks whose rows are there already.
        """

        seen: dict[str, Any] = {}

        def fun(variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, list[jax.Array]]:
            variables = jax.tree.map(self.typed, variables, self.variables)
            bound = self.model.bind(variables, key, self.seeing_all)
            loss, seen["weighted"] = _parsed(self.loss_fn(bound, batch))
            return loss, jax.tree.leaves(self.model.state_of(bound))

        there = {axis for k, group in enumerate(self.groups) if run and k not in parts for axis in group.axes}
        with self._seen(parts), joined_over(tuple(axis for axis in joined_ranks() if axis not in there)):
            traced = trace(fun, *self.shapes(parts))
        program, drawn = program_of(traced.jaxpr), drawn_by_rows(self.key, traced.jaxpr)
        return Traced(program, traced.out_tree, [], (), seen["weighted"], drawn)


class _CallsAlone(Following):
    """Follows a loss of the whole batch, and traces each call of the model at one group's part of its operands."""

    def __init__(self, asked: Asked, whole: Traced, number: int):
        super().__init__((asked.groups[number],))
        self.asked = asked
        self.whole = whole
        self.number = number
        self.noted = []

    def equation(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of an equation's results; those of a call of the model are told from its shapes at both sizes."""
        if equation.name != MODEL_CALL:
            return super().equation(equation, given)
        call, (group,) = self.whole.noted[equation.op.options["number"]], self.groups
        own: list[Places] = [(None if place == SUM else place,) for (place,) in given]
        sizes = split_sizes([aval.shape for aval in call.given], [place for (place,) in own])
        if any(
            place is None and sizes.intersection(aval.shape) for aval, (place,) in zip(call.given, own, strict=True)
        ):
            raise Unclear  # it may have rows all the same
        shapes = [local_shape(aval.shape, places, self.groups) for aval, places in zip(call.given, own, strict=True)]
        self.noted.append(self.asked.called(call, shapes, (self.number,)))
        made = zip(call.made, self.noted[-1].made, strict=True)
        return [(place_of(whole.shape, part.shape, group),) for whole, part in made]


class WholeAlone(Exception):
    """Raised with the error of a model's code that takes the whole batch's rows, and no part of them."""


def calls_alone(asked: Asked, whole: Traced, number: int) -> list[Call] | None:
    """The calls of the model at one group's part, where the loss itself cannot be traced so; None: these are not known either.

    A loss may have sizes that it does not read from the batch, such as a mask over a length that is written down.

    Raises:
      WholeAlone: where the model's code does not take a part of the rows.
    """
    walk = _CallsAlone(asked, whole, number)
    try:
        walk.program(whole.program, [(places[number],) for places in asked.places()])
    except Unclear:
        return None
    except Exception as error:
        raise WholeAlone(error) from error
    return walk.noted


@contextmanager
def following(what: str) -> Iterator[None]:
    """Context in which a model's operations are followed; where that fails nothing is known, and a warning says so.

    Args:
      what: what they are followed for.
    """
    try:
        yield
    except Exception as error:
        warn(
            f"the model's operations could not be followed for {what} ({type(error).__name__}: {error}), so nothing is known "
            "of it. This is an error of axonml_jax: please report it with the model's code"
        )


def program_of(jaxpr: Any) -> Program:
    """The program of a traced loss or call, in which lookups of rows' own entries pair rows."""
    program = read_program(jaxpr, all_but_named)
    if not any(each.name == "gather" or each.name.startswith("scatter") for each in program.equations):
        return program
    from axonml_jax.meaning.paired import paired

    return paired(program)


def _parsed(returned: Any) -> tuple[Loss, bool]:
    """The `Loss` that a user's loss returned, and whether it is of `WeightedMean`s alone."""
    return jax.tree.map(jnp.asarray, parse_loss(returned)), is_weighted(returned)


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array or a shape; () of a number."""
    return tuple(x.shape) if is_array(x) else ()


def _dtype(x: Any) -> Any:
    return x.dtype if is_array(x) else jnp.result_type(x)
