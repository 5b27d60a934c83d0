"""A model's own state that a step joins over ranks as what it is not: found in the model's code, and named in a warning.

Of state that no class declares (`state_joins`) a step takes the mean of the ranks' floats, which is right for averages over
rows, and the first rank's other values, which is right for what depends on no rows. Traces of the model's calls at the whole
batch's shapes and at a rank's show what is neither. Of floats only what is known to be no mean is named: a walk of the
operations (`numbers.py`) that meets one that it does not know says nothing of what is made of it; where such an operation
is not known to keep rows apart (`mixing.py`), as a scatter by rows or a sort, it is named beside the state.

In microbatches state that follows from no rows, such as a teacher that follows the weights, a counter of steps or the
vectors of a spectral norm, moves once a step: every microbatch reads it as the step found it.
"""

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import named_leaves, warn
from axonml_jax.meaning.asked import Asked, Traced, following
from axonml_jax.meaning.mixing import Unlike, lost_in_results, of_size
from axonml_jax.meaning.model_call import Call, Path, Unclear, place_of
from axonml_jax.meaning.numbers import MIXED, UNKNOWN, Numbers
from axonml_jax.meaning.places import Group, Split
from axonml_jax.meaning.plain_mean import Known, NotProven
from axonml_jax.program.program import (
    Equation,
    Program,
    all_but_named,
    aval_of,
    entry_of,
    is_constant,
    read_program,
    rule_of,
    through,
)
from axonml_jax.program.values import SAME, differing


def warn_of_state(asked: Asked, traced: Callable[[Sequence[int]], Traced], *, in_loss: bool) -> None:
    """Warns of undeclared state that depends on rows, or on how many there are, and is no mean over them.

    Args:
      asked: the loss.
      traced: `traced(parts)` is `asked.traced(parts)`.
      in_loss: whether ranks differ, too, in what the loss itself changes of the state.
    """
    leaves = named_leaves(asked.variables.state)
    known = {*filter(asked.model.synchronized(), leaves), *asked.model.state_joins()}
    if asked.mode.training is False or not asked.mode.batch_norm_axes or known.issuperset(leaves):
        return
    try:
        if (halves := asked.in_halves()) is not None:
            asked, traced = halves, halves.traced
        whole = traced(())
        parts = [traced((k,)) for k in asked.everywhere]
    except Exception:  # the user's code takes only some shapes
        return
    wrong = dict[str, str]()
    with following("the model's own state"):
        for group, local in zip(asked.groups, parts, strict=True):
            wrong |= _no_means(asked, group, whole, local, in_loss)
    _warn_of({name: wrong[name] for name in leaves if name in wrong and name not in known}, "a step")


def warn_of_calls_state(of_all: Call, of_part: Call, group: Group, known: Container[str]) -> None:
    """Warns of undeclared state (see `warn_of_state`) that a call outside of a loss changes.

    Args:
      of_all, of_part: the call at the whole batch's shapes, and at a part's.
      group: the parts, and the axes of ranks that have them.
      known: the names of state of which it is known, or said, how ranks join it.
    """
    wrong = dict[str, str]()
    with following("the model's own state"):
        wrong |= dict(_no_means_of(of_all, of_part, group, ()))
    _warn_of({name: why for name, why in wrong.items() if name not in known}, "a call")


def _warn_of(named: Mapping[str, str], what: str) -> None:
    """Warns of state by its names, each with the operation that hides what it is (""; it is known to be no mean)."""
    if named:
        each = ", ".join(f"{name} (not known behind {why})" if why else name for name, why in named.items())
        warn(
            f"the model's own state depends on the batch's rows and is no mean over them, but {what} joins it over ranks as "
            f"one (floats), or takes the first rank's (others): {each}. Declare in the class of its module how "
            "ranks join it, by 'sum', 'max', 'min', 'mean' or 'first', such as state_joins = "
            f"{{{_last(next(iter(named)))!r}: 'sum'}} for what is added up; keep a mean over rows in the place of a sum that "
            "decays; return it as a metric; or say by batch_stats='local' that a rank's own is meant"
        )


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _no_means(asked: Asked, group: Group, whole: Traced, local: Traced, in_loss: bool) -> dict[str, str]:
    """The names of what calls of the model, and the loss, change and is no mean over the ranks of a group (see `_warn_of`)."""
    found = dict[str, str]()
    for a, b in zip(whole.noted, local.noted, strict=False):
        found |= _no_means_of(a, b, group, asked.typed_axes)
    if in_loss and whole.changed == local.changed:
        rows = len(asked.batch_places())
        given, own = (
            [each.avals[number] for number in each.inputs[len(each.inputs) - rows :]]
            for each in (whole.program, local.program)
        )
        found |= dict.fromkeys(_named(whole.changed, _Pair(group, whole.program, local.program, given, own)), "")
    return found


def _no_means_of(a: Call, b: Call, group: Group, axes: Container[str]) -> dict[str, str]:
    if not a.alike(b) or len(a.changed) != len(a.made) - a.out_rest.count(None):  # a variable is several arrays
        return {}
    of_all, of_rank = (read_program(each.traced, all_but_named) for each in (a, b))
    found = dict.fromkeys(_named(a.changed, _Pair(group, of_all, of_rank, a.given, b.given)), "")
    if group.positions:
        return found
    lost = lost_in_results(a, b, group.ranks, axes)[a.out_rest.count(None) :]
    names = ("/".join(map(str, path)) for path in a.changed)
    hidden = {name: sorted(each.note for each in own if not each.sums) for name, own in zip(names, lost, strict=False)}
    return {name: notes[0] for name, notes in hidden.items() if notes} | found


def _named(changed: Sequence[Path], pair: "_Pair") -> Iterator[str]:
    return ("/".join(map(str, path)) for path, wrong in zip(changed, pair.no_means(len(changed)), strict=True) if wrong)


class _Pair(Numbers):
    """A program at both shapes, whose last results are the state that it has changed.

    Args:
      group: the ranks.
      whole, local: the program at the whole batch's shapes and at a rank's.
      given, own: the abstract values of their last inputs, which may have rows.
    """

    def __init__(self, group: Group, whole: Program, local: Program, given: Sequence[Any], own: Sequence[Any]):
        super().__init__((group,))
        self._group, self._whole, self._local, self._avals = group, whole, local, (given, own)

    def no_means(self, count: int) -> list[bool]:
        """Of each of the last `count` results whether it is known to be no mean of the ranks' (others: not their first)."""
        if not count:
            return []
        rows = [self._place(a.shape, b.shape) for a, b in zip(*self._avals, strict=True)]
        given = [*[Known((None,))] * (len(self._whole.inputs) - len(rows)), *rows]
        over = [SAME if known.places == (None,) else frozenset(self._group.axes) for known in given]
        apart = differing(self._local, over, lambda *_: None)
        sized, made = [False] * len(apart), [UNKNOWN] * len(apart)
        with suppress(Unlike):
            sized = of_size(self._whole, self._local, *self._avals, self._group.ranks)
        with suppress(NotProven, Unclear):
            made = self.program(self._whole, self._local, given)
        found = []
        for atom, axes, of_batch, known in zip(self._whole.outputs, apart, sized, made, strict=True):
            is_float = jnp.issubdtype(aval_of(atom, self._whole.avals).dtype, jnp.inexact)
            differs = not axes.isdisjoint(self._group.axes)
            found.append(of_batch or (differs and (not is_float or self._is_no_mean(known))))
        return found[-count:]

    def _place(self, whole: Sequence[int], own: Sequence[int]) -> Known:
        try:
            return Known((place_of(whole, own, self._group),))
        except Unclear:
            return UNKNOWN

    def _is_no_mean(self, known: Known) -> bool:
        return known is MIXED or (known.is_sum and known.factor != self.parts)

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        scaled = any(known.literal for known in given)
        rows = any(isinstance(place, Split) for known in given for place in known.places)
        talks = not set(self._group.axes).isdisjoint(equation.op.mesh_axes) and not rule_of(equation.name).casts
        if talks or (scaled and rows) or any(known is UNKNOWN for known in given):
            return [UNKNOWN] * len(equation.outputs)
        orders = equation.name in ("ceil", "floor", "ge", "gt", "le", "lt", "round", "sign")
        if orders and any(known.is_sum for known in given):  # what is chosen by it is no mean
            return [MIXED]
        alike = any(known.places == (None,) for known in given)
        if alike and equation.name in ("add", "add_any", "sub") and any(map(self._is_no_mean, given)):
            return [MIXED]
        return super()._equation(equation, own, given)


# --------------------------------------------------------------------------------------------------
# State that moves once a step, however many microbatches there are.
# --------------------------------------------------------------------------------------------------


def moved_once(asked: Asked, traced: Callable[[Sequence[int]], Traced], by_loss: Sequence[Path]) -> frozenset[str]:
    """The leaves of the model's state that a step in microbatches moves once, by their names.

    Each of its microbatches begins with such a leaf as the step found it, and what the last one makes of it is kept: on one
    device the loss is called once. These are the leaves that follow from no rows, or only from what running statistics have
    become; not those that depend on how many rows there are, and not those that calls change and whose class says how parts of
    a batch join (`state_joins`).

    Args:
      asked: the loss, of which a microbatch is a part.
      traced: `traced(parts)` is `asked.traced(parts)`.
      by_loss: the paths of what a loss that is run by its program for the whole batch changes itself.
    """
    names, averages = list(named_leaves(asked.variables.state)), asked.model.synchronized()
    found = {"/".join(map(str, path)) for path in by_loss}.intersection(names)
    if all(map(averages, names)) and not _changed_by_loss(asked, traced):  # then calls make them of rows
        return frozenset()
    if asked.mode.training is not False and not found.issuperset(names):
        try:
            part = asked.in_halves() or asked
            whole, local = part.inlined(()), part.inlined(part.everywhere)
        except Exception:  # the user's code takes only some shapes
            return frozenset(found)
        with following("state that moves once a step"), suppress(Unlike):
            given, own = (jax.tree.leaves(part.shapes(parts)[2]) for parts in ((), part.everywhere))
            sized = of_size(whole.program, local.program, given, own, part.groups[0].ranks)[-len(names) :]
            driven = _driven(part, local.program, len(names))
            alike = {name for name, *each in zip(names, driven, sized, strict=True) if not any(each)}
            found |= alike.difference(asked.model.state_joins())
    return frozenset(found)


def _changed_by_loss(asked: Asked, traced: Callable[[Sequence[int]], Traced]) -> bool:
    """Whether the loss itself changes, or may change, the model's state."""
    try:
        return bool(traced(asked.everywhere).changed)
    except Exception:  # it is not traced with a stand-in for the model
        return True


_ROWS = 1
"""The bit of what is made of rows; those above it are of the leaves of the state, in order."""


def _driven(asked: Asked, program: Program, count: int) -> list[bool]:
    """Of the last `count` results, the state, whether each is made of rows, but by what other running statistics become."""
    old = [_ROWS << k for k in range(1, count + 1)]
    first = len(jax.tree.leaves((asked.variables.params, asked.variables.frozen)))
    rows = [_ROWS if any(places) else 0 for _, places in asked.batch_places()]
    given = [0] * (len(program.inputs) - len(rows)) + rows
    given[first : first + count] = old
    new = program.outputs[len(program.outputs) - count :]
    made = _made_of(program, given, frozenset())
    running = {atom for atom, own in zip(new, old, strict=True) if not is_constant(atom) and made[atom] & own}
    made = _made_of(program, given, frozenset(running))
    return [bool(entry_of(atom, made, 0) & _ROWS) for atom in new]


def _made_of(program: Program, given: Sequence[int], ends: frozenset[int]) -> dict[int, int]:
    """What every value of a program is made of, as bits; of what is made of one of `ends` its own are not looked at."""

    def rule(equation: Equation, operands: list[int]) -> list[int]:
        if rule_of(equation.name).passes:
            return operands
        inside = through(equation, operands, rule, operator.or_, 0)
        return [reduce(operator.or_, operands, 0)] * len(equation.outputs) if inside is None else inside

    known, found = dict(zip(program.inputs, given, strict=True)), dict(zip(program.inputs, given, strict=True))
    for equation in program.equations:
        made = rule(equation, [entry_of(atom, known, 0) for atom in equation.inputs])
        found.update(zip(equation.outputs, made, strict=True))
        known.update((number, 0 if number in ends else own) for number, own in zip(equation.outputs, made, strict=True))
    return found
