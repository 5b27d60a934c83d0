"""How a model's own state joins over ranks, told from its code where its class does not say so.

A step takes the mean of the ranks' floats and the first rank's integers, which is right for averages over rows and for what
does not depend on rows. Here the traces of the model's calls at the whole batch's shapes and at a rank's are walked together
(`numbers.py`): what adds sums over rows to a variable is added up over ranks, and what takes the largest or smallest of rows is
the largest or smallest of the ranks'. Any other state that depends on rows is named in a warning, but for averages over them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from axonml_jax.base import is_key, named_leaves, warn
from axonml_jax.meaning.asked import Asked, Traced, reading
from axonml_jax.meaning.model_call import Call, Path, Unclear, place_of
from axonml_jax.meaning.numbers import MIXED, UNKNOWN, Numbers
from axonml_jax.meaning.places import Group, Split
from axonml_jax.meaning.plain_mean import Known, NotProven
from axonml_jax.meaning.pooled import WHOLE, differing
from axonml_jax.model.buffers import Join
from axonml_jax.program.program import Equation, Program, all_but_named, read_program, results
from axonml_jax.program.values import SAME

_KEEPING = ("convert_element_type", "copy", "stop_gradient", "pvary", "pcast", "reduce_precision")
_RESHAPING = (*_KEEPING, "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose")
_EXTREMES = {"reduce_max": "max", "reduce_min": "min"}
_LARGEST = ("max", "min")

_JOINS = ("sum", "max", "min")

SAME_ON_ALL, OTHER = "same", "other"
"""It does not depend on rows; it is not known how it is made of the ranks'. Between them: "mean", and joins."""


@dataclass(frozen=True)
class Held(Known):
    """A variable of the model's state, or what was made of it; or the extreme of rows.

    Attributes:
      leaf: the variable's number; None: no variable.
      how: what was done to it: "": nothing, "scaled": it decayed, "sum": sums over rows were added, "max" or "min": it is such
        an extreme.
    """

    leaf: int | None = None
    how: str = ""


def joins_of(asked: Asked, traced: Callable[[Sequence[int]], Traced], *, in_loss: bool) -> dict[str, Join]:
    """The joins of undeclared state that follow from the model's code; warns of state that is joined as what it is not.

    Args:
      asked: the loss.
      traced: `traced(parts)` is `asked.traced(parts)`.
      in_loss: whether ranks differ, too, in what the loss itself changes of the state.
    """
    leaves = named_leaves(asked.variables.state)
    known = {*filter(asked.model.synchronized(), leaves), *asked.model.state_joins()}
    if asked.mode.training is False or not asked.mode.batch_norm_axes or known.issuperset(leaves):
        return {}
    try:
        if (halves := asked.in_halves()) is not None:
            asked, traced = halves, halves.traced
        whole = traced(())
        parts = [(group, traced((k,))) for k, group in enumerate(asked.groups)]
    except Exception:  # the user's code takes only some shapes
        return {}
    groups: list[dict[str, str]] = []
    with reading("the model's own state"):
        groups = [_changed(asked, group, whole, local, in_loss) for group, local in parts]
    names = [name for name in leaves if name not in known and any(name in group for group in groups)]
    found = {name: _one([group.get(name, OTHER) for group in groups]) for name in names}
    whole_numbers = [name for name in found if not jnp.issubdtype(leaves[name].dtype, jnp.inexact)]
    found |= {name: OTHER for name in whole_numbers if found[name] == "mean"}
    if wrong := [name for name, how in found.items() if how == OTHER]:
        warn(
            f"it is not known that the model's own state is a mean over rows, but it is joined over ranks as one (floats) or "
            f"as the first rank's: {', '.join(wrong)}. Declare in the class of its module how ranks join it, by 'sum', 'max', "
            f"'min', 'mean' or 'first', as state_joins = {{{wrong[0].rpartition('/')[2]!r}: 'first'}}, compute it from the "
            "batch and return it as a metric, or say by batch_stats='local' that a rank's own is meant"
        )
    return {name: how for name, how in found.items() if how in _JOINS}  # pyright: ignore[reportReturnType]


def _one(kinds: Sequence[str]) -> str:
    """What several calls make of a leaf, or what it is among several groups of ranks."""
    some = {*kinds} - {SAME_ON_ALL}
    if not some:
        return SAME_ON_ALL
    return some.pop() if len(some) == 1 and not ("sum" in some and SAME_ON_ALL in kinds) else OTHER


def _changed(asked: Asked, group: Group, whole: Traced, local: Traced, in_loss: bool) -> dict[str, str]:
    """By the names of leaves what calls of the model, and the loss, make of them among the ranks of a group."""
    names = {name: number for number, name in enumerate(named_leaves(asked.variables.state))}
    first, number = len(asked.leaves) - len(names) - 1 - len(asked.batch_places()), asked.groups.index(group)
    each: dict[str, list[str]] = {}
    for a, b in zip(whole.noted, local.noted, strict=False):
        for name, how in _of_call(group, a, b, first, names):
            each.setdefault(name, []).append(how)
    by_loss = [*map(_name, whole.changed)]
    if not in_loss:
        each = {name: how for name, how in each.items() if name not in by_loss}
    elif by_loss and whole.changed == local.changed:
        given = [Known((places[number],)) for places in asked.places()]
        way = _Way(group, whole.program, local.program, given, first, len(names))
        for name, how in _named(by_loss, way.kinds(len(by_loss)), names):
            each.setdefault(name, []).append(how)
    return {name: _one(how) for name, how in each.items()}


def _of_call(group: Group, whole: Call, local: Call, first: int, names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    count = len(whole.made) - whole.out_rest.count(None)
    if not count or not whole.alike(local) or len(whole.changed) != count:  # or a variable is several arrays
        return iter(())
    of_all, of_rank = (read_program(each.traced, all_but_named) for each in (whole, local))
    places = [_placed(group, a.shape, b.shape) for a, b in zip(whole.given, local.given, strict=True)]
    way = _Way(group, of_all, of_rank, [*[WHOLE] * (len(of_all.inputs) - len(places)), *places], first, len(names))
    return _named([*map(_name, whole.changed)], way.kinds(count), names)


def _placed(group: Group, whole: Sequence[int], own: Sequence[int]) -> Known:
    try:
        return Known((place_of(whole, own, group),))
    except Unclear:
        return UNKNOWN


def _named(changed: Sequence[str], kinds: Sequence[Any], names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    pairs = zip(changed, kinds, strict=True)
    return ((name, kind(names[name])) for name, kind in pairs if name in names)


def _name(path: Path) -> str:
    return "/".join(map(str, path))


class _Way(Numbers):
    """Walks two traces of a call side by side, and follows the variables of the model's state in it.

    Args:
      group: the ranks.
      whole, local: the programs.
      given: what is known of their inputs.
      first, count: which of these are the state's leaves.
    """

    def __init__(self, group: Group, whole: Program, local: Program, given: Sequence[Known], first: int, count: int):
        super().__init__((group,))
        state = [Held((None,), leaf=number) for number in range(count)]
        self._axes, self._whole, self._local = frozenset(group.axes), whole, local
        self._given = [*given[:first], *state, *given[first + count :]]

    def kinds(self, count: int) -> list[Callable[[int], str]]:
        """Of each of the last `count` results a function of a leaf's number: a join, `SAME_ON_ALL` or `OTHER`."""
        rows = [self._axes if known is UNKNOWN or any(known.places) else SAME for known in self._given]
        apart = results(self._local, rows, differing, SAME)[-count:]
        try:
            made = self.program(self._whole, self._local, self._given)[-count:]
        except (NotProven, Unclear):
            made = [UNKNOWN] * count
        kind = lambda differs, known: lambda leaf: self._kind(leaf, known, differs)
        return [kind(not each.isdisjoint(self._axes), known) for each, known in zip(apart, made, strict=True)]

    def _kind(self, leaf: int, known: Known, differs: bool) -> str:
        """What the new value of a leaf is, which differs between ranks or is the same on all."""
        if isinstance(known, Held) and known.how in (_LARGEST if known.leaf is None else _JOINS):
            return known.how if known.leaf in (None, leaf) else OTHER
        if not differs:
            return OTHER if known is MIXED or known.literal else SAME_ON_ALL
        return "mean" if known.is_sum and known.factor == self.parts else OTHER

    def constant(self, value: Any, own: Any) -> Known:
        """A constant; a number that differs is one that came from the batch's size."""
        numbers = not any(isinstance(x, Tracer) or is_key(x) for x in (value, own))
        if numbers and np.shape(value) == np.shape(own) == () and value != own:
            return Known((None,), literal=(value, own))
        return super().constant(value, own)

    def _equation(self, equation: Equation, own: Equation, given: list[Known]) -> list[Known]:
        held = [known for known in given if isinstance(known, Held)]
        ours = equation.name in _EXTREMES or held or any(known.literal for known in given)
        if equation.name == own.name and ours and (found := self._of_state(equation, given)) is not None:
            return [found]
        if any(known.how not in ("", "scaled") for known in held) and equation.called is None:
            return [UNKNOWN] * len(equation.outputs)
        if equation.called is not None and not equation.name.startswith("custom_") and equation.name == own.name:
            try:
                return self._body(equation, own, given)
            except (NotProven, Unclear):
                pass
        return super()._equation(equation, own, given)

    def _of_state(self, equation: Equation, given: list[Known]) -> Known | None:
        """The result of an operation on a variable, an extreme or a number that grows with the batch; None: by other rules."""
        name, first = equation.name, given[0]
        if name in _EXTREMES:
            return self._extreme(equation, first)
        if name in _KEEPING and (isinstance(first, Held) or first.literal):
            return first
        if name in _RESHAPING and (first.literal or (isinstance(first, Held) and first.leaf is None)):
            return first if not first.literal or name == "broadcast_in_dim" else None
        if name in ("add", "add_any", "sub") and len(given) == 2:
            return self._added(name, *given)
        if name in ("scatter-add", "scatter_add") and isinstance(first, Held) and first.leaf is not None:
            return self._scattered(first, *given[1:])
        if name in ("max", "min"):
            return self._larger(name, *given)
        if name in ("mul", "div") and isinstance(first, Held) != isinstance(given[1], Held):
            return self._scaled(*given)
        return None

    def _scattered(self, first: Held, index: Known, added: Known) -> Known | None:
        """A variable to which every row adds where its index says."""
        of_rows = isinstance(next(iter(index.places), None), Split)
        plain = added is not UNKNOWN and added is not MIXED and not added.literal and not added.is_sum
        return replace(first, how="sum") if of_rows and plain and first.how in ("", "sum") else None

    def slice_of(self, known: Known) -> Known:
        """A slice along dim 0; those of a variable are scanned and stacked in one order."""
        return known if isinstance(known, Held) else super().slice_of(known)

    def stack_of(self, known: Known) -> Known:
        """Slices stacked along dim 0."""
        return known if isinstance(known, Held) else super().stack_of(known)

    def _scaled(self, first: Known, second: Known) -> Known | None:
        """A variable times a number that is the same on all ranks."""
        held, by = (first, second) if isinstance(first, Held) else (second, first)
        plain = by is not UNKNOWN and by is not MIXED and not by.literal and not any(by.places)
        assert isinstance(held, Held)
        return replace(held, how="scaled") if plain and held.leaf is not None and held.how in ("", "scaled") else None

    def _extreme(self, equation: Equation, first: Known) -> Known | None:
        how = _EXTREMES[equation.name]
        if isinstance(first, Held):
            return first if first.how == how and first.leaf is None else None
        axes = equation.op.options["axes"]
        over_rows = any(isinstance(place, Split) and place.dim in axes for place in first.places)
        return Held((None,), how=how) if over_rows else None

    def _added(self, name: str, first: Known, second: Known) -> Known | None:
        """A variable to which sums over rows are added, or numbers that grow with them."""
        if not isinstance(first, Held) and isinstance(second, Held) and name != "sub":
            first, second = second, first
        if not isinstance(first, Held) or first.leaf is None or first.how in _LARGEST or second is UNKNOWN:
            return None
        if second.literal:
            whole, own = map(complex, second.literal)
            grows = abs(whole * float(self.parts) - own) <= 1e-6 * abs(own)
        else:
            grows = second.is_sum and second.factor == 1
        if grows and first.how != "scaled":
            return replace(first, how="sum")
        return MIXED if grows or first.how == "sum" or second.literal else None

    def _larger(self, name: str, first: Known, second: Known) -> Known | None:
        held = [known for known in (first, second) if isinstance(known, Held)]
        extremes = [known for known in held if known.how == name]
        if not extremes or any(known.how not in ("", name) for known in held):
            return None
        others = [known for known in (first, second) if not isinstance(known, Held)]
        leaves = {known.leaf for known in held} - {None}
        if len(leaves) > 1 or any(known is UNKNOWN or known is MIXED or any(known.places) for known in others):
            return None
        return Held(extremes[0].places, leaf=next(iter(leaves), None), how=name)
