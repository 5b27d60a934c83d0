"""Code inside a model that mixes rows of the batch, such as `x - x.mean(0)`: found in the trace of its calls.

Only what is certain is found: a reduction along the dim that holds the rows whose value then, as a float, as a condition or as
the choice of a branch, meets rows again in an elementwise operation, a concatenation or a product. A count and a truth value
of rows are followed through elementwise operations alone. A contraction over rows of two floats, as in the gradient of weights
that code in the model takes, is such a reduction; not one with a mask (`Chosen`), nor sorts and lookups: routers of experts
send every row by itself with them. So is what a loop over rows carries from one to the next, as a recurrence does whose time
is dim 0.

Code that reads how many rows there are, or which, such as `x * len(x)`, is found by two traces of its calls.
The traces, at the whole batch's shapes and at a rank's, are walked side by side. Only what is certain is found: a number that
differs between both, or an iota along the rows, that meets floats with rows; rows that a static slice, `rev`, `split`,
`concatenate` or scatter takes by their numbers, where they meet rows in another order or are returned; and rows that are put
into state of a fixed size, such as a queue of features. A number that scales rows which are only summed then makes a mean.
What meets indices, counts or values of rows that cannot be followed is not taken for it: routers of experts and padding work
with these.

Of all else it is asked whether it is known to keep rows apart (`not_apart`), by the rules by which losses are run on ranks'
rows; what is not is named. Draws for rows by a key that is the same on all ranks are found by both traces (`drawn_alike`).
"""

import itertools
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from axonml_jax.compat.jaxpr import Operation, is_ours
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.compat.row_keys import draws, is_row_key, rows_of
from axonml_jax.meaning.asked import Asked, Traced, program_of
from axonml_jax.meaning.following import Following
from axonml_jax.meaning.model_call import Call, Unclear, place_of
from axonml_jax.meaning.places import SUM, Group, Place, Places, Split, Step, step_of
from axonml_jax.program.program import (
    Equation,
    Program,
    all_but_named,
    is_constant,
    is_elementwise,
    is_row_by_row,
    read_program,
    results,
    rule_of,
    through,
)

JOINED = "joined"
"""The place of what is made of several rows by more than a sum; a rule of places never says it."""

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_MEETINGS = ("concatenate", "dot_general", "stack")
_KEEP_EXACT = ("broadcast_in_dim", "reshape", "squeeze", "clamp")


def mixing_inside(asked: Asked, local: Traced) -> list[str]:
    """The operations in which a model's own code mixes rows, with the user's lines.

    Args:
      asked: the loss; a model whose BatchNorm keeps to a rank's rows mixes them as it is meant to.
      local: the loss traced at a rank's shapes.
    """
    numbers = [k for k, group in enumerate(asked.groups) if not group.positions]
    if not numbers or not asked.mode.batch_norm_axes:
        return []
    (rows,) = numbers
    walk = _Mixing(asked, local, rows)
    walk.program(local.program, [(places[rows],) for places in asked.places()])
    return list(dict.fromkeys(walk.found))


class Chosen(Split):
    """The place of a mask of rows, such as a router's: of truth values as floats, of whole numbers compared, and of what it
    multiplies."""


class _Mixing(Following):
    """Follows rows on one rank, through the model's own code too."""

    def __init__(self, asked: Asked, local: Traced, rows: int):
        super().__init__((asked.groups[rows]._replace(ranks=1),))
        self.axes, self.noted, self.inside, self.found = frozenset(asked.typed_axes), local.noted, False, []
        self.drawn = rows_of(asked.key) if is_row_key(asked.key) else 0  # rows that keys of rows draw for
        self._choice: Places = ()

    def equation(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of an equation's results; those of a collective over the batch's axes are whole."""
        if equation.name == MODEL_CALL:
            return self._of_model(equation, given)
        if self.axes.intersection(equation.op.mesh_axes) and rule_of(equation.name).sends is not None:
            return [self.none] * len(equation.outputs)
        self._choice = self.settled(given[0]) if equation.branches else ()
        made = super().equation(equation, given)
        if self.drawn and self.inside and rule_of(equation.name).kind == "random":
            made = [(_rows_at(aval.shape, self.drawn),) for aval in equation.op.made]
        return made if equation.bodies or rule_of(equation.name).casts else _marked(equation.op, given, made)

    def _of_model(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        program = read_program(self.noted[equation.op.options["number"]].traced, all_but_named)
        fixed = [self.none] * (len(program.inputs) - len(given))
        self.inside = True
        try:
            made = self.program(program, [*fixed, *map(_rows_alone, given)])
        finally:
            self.inside = False
        return [_rows_alone(places) for places in made]

    def call(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; rows that experts have made are where those are that they were given."""
        return [_made_of(equation.op, given)] if is_row_by_row(equation.op) else super().call(equation, given)

    def steps(self, op: Operation, given: Sequence[Places]) -> list[Step]:
        """What is joined of rows stays so, and is noted where it meets rows."""
        places = [place for (place,) in given]
        floats = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in op.given]
        exact = op.name in _KEEP_EXACT or is_elementwise(op.name)  # counts and truth values of several rows stay so
        joined = any(place in (SUM, JOINED) and (each or exact) for place, each in zip(places, floats, strict=True))
        [step] = self._of_one_row(op, places) or super().steps(op, [(None if p == JOINED else p,) for p in places])
        if not self.inside:
            return [step]
        rows = any(each and isinstance(place, Split) for place, each in zip(places, floats, strict=True))
        meets = [each or (op.name == "select_n" and k == 0) for k, each in enumerate(floats)]
        joins = any(each and place in (SUM, JOINED) for place, each in zip(places, meets, strict=True))
        if joins and rows and (is_elementwise(op.name) or op.name in _MEETINGS):
            self._note(op)
        reduces = op.name in _REDUCTIONS
        joined |= reduces and isinstance(places[0], Split) and bool(step.act)
        joined |= step.made == (SUM,) and _contracts_floats(op, places)
        made = [_made(op.name, place, joined) for place in step.made]
        kept = [exact or reduces or jnp.issubdtype(aval.dtype, jnp.inexact) for aval in op.made]
        return [step._replace(made=tuple(m if m != JOINED or k else None for m, k in zip(made, kept, strict=True)))]

    def solve(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """As ever; what a matrix of several rows solves is made of them, and noted where it solves rows."""
        if not any(place in (SUM, JOINED) for (place,) in given):
            return super().solve(equation, given)
        if any(isinstance(place, Split) for (place,) in given):
            self._note(equation.op)
        return [*given], [(JOINED,)] * len(equation.outputs)

    def branches(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; noted where several rows choose the branch, and it reads rows."""
        if self._choice == (JOINED,) and _has_rows(given, equation.op.given[1:]):
            self._note(equation.op)
        return super().branches(equation, given)

    def scan(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """As ever; noted where a carry takes something from row to row, as a recurrence over rows does."""
        carry, stacks = super().scan(equation, given)
        if not self.inside:
            return carry, stacks
        taken, mixes = _carried_rows(equation, given)
        if mixes:
            self._note(equation.op)
        joined = [(JOINED,) if own and places == (None,) else places for own, places in zip(taken, carry, strict=True)]
        return joined, stacks

    def loop(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; noted where several rows end the loop, and rows go through it."""
        carry = super().loop(equation, given)
        loop, condition = equation.op.loop, equation.condition
        assert loop is not None and condition is not None
        [ends] = self.program(condition, [*map(self.settled, given[: loop.num_condition_consts]), *carry])
        if self.settled(ends) == (JOINED,) and _has_rows(carry, equation.op.made):
            self._note(equation.op)
        return carry

    def _note(self, op: Operation) -> None:
        if self.inside:
            self.found.append(f"{op.name} ({op.line or 'no line known'})")

    def settled(self, places: Places) -> Places:
        """A sum that a call with a derivative of its own, a loop or a branch is given is still one of several rows."""
        return tuple(JOINED if place == SUM else place for place in places)

    def _of_one_row(self, op: Operation, places: Sequence[Place]) -> list[Step]:
        """A reshape of a rank's only row, whose dim of size 1 is where it was; none for other operations."""
        place = places[0] if places else None
        if op.name != "reshape" or not isinstance(place, Split) or op.given[0].shape[place.dim] != place.outer:
            return []
        old, new = op.given[0].shape, op.made[0].shape
        before = math.prod(old[: place.dim]) * place.outer
        there = [dim for dim, size in enumerate(new) if size == 1 and math.prod(new[:dim]) == before]
        return [Step((place,), (Split(there[0]) if there else None,))]


def _marked(op: Operation, given: Sequence[Places], made: Sequence[Places]) -> list[Places]:
    """The places of an operation's results, marked where they are a mask of rows: a rule of places hands a mark on."""
    mark = _chosen if _chooses(op, given) else _plain
    return [tuple(map(mark, each)) for each in made]


def _chooses(op: Operation, given: Sequence[Places]) -> bool:
    """Whether an operation makes a mask of rows, or hands one on."""
    kinds, kind = [aval.dtype for aval in op.given], rule_of(op.name).kind
    if op.name == "convert_element_type" and kinds[0] == jnp.bool_:
        return True
    if rule_of(op.name).compares and not any(jnp.issubdtype(each, jnp.inexact) for each in kinds):
        return True
    if op.name == "dot_general":  # of two masks
        return _has_chosen(given) and all(isinstance(place, Split) for (place,) in given)
    return (is_elementwise(op.name) or kind == "placing") and _has_chosen(given)


def _carried_rows(equation: Equation, given: Sequence[Places]) -> tuple[list[bool], bool]:
    """Which floats that a scan over rows carries are made of the rows before, and whether what it stacks reads them."""
    scan, body = equation.op.scan, equation.body
    assert scan is not None and body is not None
    first, floats = scan.first_scanned, [_is_float(aval) for aval in equation.op.made]
    rows = [isinstance(place, Split) and not place.dim for (place,) in given[first:]]
    carried = [False] * scan.num_carry
    if not any(rows):
        return carried, False

    def made(carry: Sequence[bool], rows: Sequence[bool]) -> list[bool]:
        return results(body, [*[False] * scan.num_consts, *carry, *rows], rule, False)

    def rule(inner: Equation, operands: list[bool]) -> Sequence[bool]:
        found = through(inner, operands, rule, operator.or_, False)
        return [any(operands)] * len(inner.outputs) if found is None else found

    while True:
        new = [own and each for own, each in zip(made(carried, rows), floats[: scan.num_carry], strict=False)]
        if new == carried:
            break
        carried = [a or b for a, b in zip(carried, new, strict=True)]
    stacks = made(carried, [False] * len(rows))[scan.num_carry :]
    return carried, any(own and each for own, each in zip(stacks, floats[scan.num_carry :], strict=True))


def _contracts_floats(op: Operation, places: Sequence[Place]) -> bool:
    """Whether a product sums over rows that both its operands hold as floats, none of them a mask."""
    rows = [isinstance(place, Split) and not isinstance(place, Chosen) for place in places]
    return op.name == "dot_general" and all(rows) and all(jnp.issubdtype(x.dtype, jnp.inexact) for x in op.given)


def _rows_at(shape: Sequence[int], rows: int) -> Place:
    return Split(list(shape).index(rows)) if rows in shape else None


def _chosen(place: Place) -> Place:
    return Chosen(*place) if isinstance(place, Split) else place


def _plain(place: Place) -> Place:
    return Split(*place) if isinstance(place, Split) else place


def _has_chosen(given: Sequence[Places]) -> bool:
    return any(isinstance(place, Chosen) for (place,) in given)


def _has_rows(values: Sequence[Places], avals: Sequence[Any]) -> bool:
    """Whether floats are among values that hold rows."""
    pairs = zip(values, avals, strict=True)
    return any(isinstance(place, Split) and jnp.issubdtype(aval.dtype, jnp.inexact) for (place,), aval in pairs)


def _made(name: str, place: Place, joined: bool) -> Any:
    """The place of a result: a sum that no reduction makes is not known to mix rows."""
    if place is None and joined:
        return JOINED
    return None if place == SUM and not joined and name not in _REDUCTIONS else place


def _rows_alone(places: Places) -> Places:
    return tuple(place if isinstance(place, Split) else None for place in places)


# --------------------------------------------------------------------------------------------------
# What is not known to keep rows apart.
# --------------------------------------------------------------------------------------------------


class Lost(NamedTuple):
    """What an operation makes that is in no rank's rows alone.

    Attributes:
      note: the operation, with the user's line.
      mixes: whether it is certain that rows are mixed in it.
      numbered: whether it takes rows by their numbers, so that only those numbers tell what it mixes.
      sums: whether it is a sum over rows.
    """

    note: str
    mixes: bool
    numbered: bool = False
    sums: bool = False


_BETWEEN = """
cholesky conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum dot_general eigh fft lu qr reduce_window_max
reduce_window_min reduce_window_sum slice sort squeeze svd top_k triangular_solve
"""
_MIXES = frozenset(_BETWEEN.split())
"""Operations whose results are made of several rows where they go along rows of floats that are no mask."""

_KERNELS = ("dot_product_attention", "ffi_call", "pallas_call")
"""What the names of kernels begin with; each is taken to keep rows apart."""


def not_apart(whole: Call, local: Call, ranks: int, axes: Container[str], numbers: Mapping[int, bool]) -> list[Lost]:
    """The operations of a call that are not known to keep rows apart, and that reach the rows that it returns.

    The rules by which a loss is run on ranks' rows (`places.py`) say of every operation where its results are. An operation
    loses rows whose operands a rank would have to send, or whose results are no rank's rows, as sums over them are; what is
    made of its results depends on it.

    Args:
      whole, local: the call, noted at the whole batch's shapes and at a rank's.
      ranks: the number of ranks.
      axes: mesh axes over which a collective makes values of the whole batch.
      numbers: results without rows that are not known to be means over rows, which these operations may reach too, with
        whether each is one if no operation but sums loses rows.
    """
    group, count, made = Group((), ranks), whole.out_rest.count(None), lost_in_results(whole, local, ranks, axes)
    pairs = zip(made[:count], whole.made, local.made, strict=False)
    found = [own for own, a, b in pairs if _place(a.shape, b.shape, group) is not None]
    for k, is_mean in numbers.items() if made else ():
        others = frozenset(lost for lost in made[k] if not lost.sums)
        found.append(others if others or is_mean else made[k])
    return sorted(frozenset[Lost]().union(*found))


def lost_in_results(whole: Call, local: Call, ranks: int, axes: Container[str]) -> list[frozenset[Lost]]:
    """What each result of a call, and each variable that it changes, depends on that has lost rows (see `not_apart`)."""
    if not whole.alike(local) or whole.traced is None:
        return []
    group = Group((), ranks)
    program, walk = program_of(whole.traced), _Apart(group, axes)
    rows = [_place(a.shape, b.shape, group) for a, b in zip(whole.given, local.given, strict=True)]
    walk.program(program, [walk.none] * (len(program.inputs) - len(rows)) + [(place,) for place in rows])
    return results(program, [_NOTHING] * len(program.inputs), walk.facts, _NOTHING)


_NOTHING = frozenset[Lost]()


def _place(whole: Sequence[int], own: Sequence[int], group: Group) -> Place:
    """Where a value has rows by its two shapes; None, too, where that is not clear."""
    try:
        return place_of(whole, own, group)
    except Unclear:
        return None


class _Apart(Following):
    """Follows rows through a model's program of the whole batch, and notes the equations that lose them.

    Attributes:
      lost: by equation what each of its results has lost.
    """

    def __init__(self, group: Group, axes: Container[str]):
        super().__init__((group._replace(ranks=1),))
        self._real = (group,)  # a dim of rows is divided for reshapes alone, where groups of rows must be a rank's
        self.lost, self._axes, self._at = dict[Equation, list[Lost]](), axes, list[Equation]()

    def joins_all(self, equation: Equation) -> bool:
        """Whether an equation is a collective that makes values of the whole batch."""
        sends = rule_of(equation.name).sends is not None
        return sends and any(axis in self._axes for axis in equation.op.mesh_axes)

    def equation(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """The places of an equation's results."""
        if self.joins_all(equation):
            return [self.none] * len(equation.outputs)
        self._at.append(equation)
        made = self.branches(equation, given[1:]) if equation.branches else super().equation(equation, given)
        self._at.pop()
        plain = equation.bodies or rule_of(equation.name).casts
        return made if plain else _marked(equation.op, given, made)

    def steps(self, op: Operation, given: Sequence[Places]) -> list[Step]:
        """As ever; noted where rows would be sent, or what is made is in no rank's rows."""
        places = _aligned(op, [place for (place,) in given])
        [step] = super().steps(op, [(place,) for place in places])
        if op.name.startswith((*_KERNELS, "random_")):
            step = _beside(op, places)
        elif op.name == "reshape":
            [step] = step_of(op, given, self._real)
        elif (taken := _by_numbers(op, places)) is not None:
            step = taken
            if any(isinstance(place, Split) and place.outer == _SOME for place in step.made):
                self._note([False] * len(op.made), numbered=True)
        moved = [k for k, place in enumerate(places) if isinstance(place, Split) and place != step.wanted[k]]
        passes = rule_of(op.name).passes  # a barrier of several values holds others beside rows
        if moved or (not passes and _has_split(places) and not all(map(_has_split, [[place] for place in step.made]))):
            self._note(_certain(op, places, moved), sums=not moved and step.made == (SUM,))
        return [step]

    def call(self, equation: Equation, given: Sequence[Places]) -> list[Places]:
        """As ever; rows that experts have made are where those are that they were given."""
        return [_made_of(equation.op, given)] if is_row_by_row(equation.op) else super().call(equation, given)

    def held(self, made: Sequence[Places], found: Sequence[Places]) -> None:
        """Notes where rows are held whole, as what branches and loops cannot hand on."""
        if any(isinstance(a, Split) and a != b for (a,), (b,) in zip(made, found, strict=True)):
            self._note([False] * len(self._at[-1].outputs))

    def scan(self, equation: Equation, given: Sequence[Places]) -> tuple[list[Places], list[Places]]:
        """As ever; a scan over rows that carries nothing makes each row of its own."""
        scan = equation.op.scan
        assert scan is not None
        over = [isinstance(place, Split) and not place.dim for (place,) in given[scan.first_scanned :]]
        carry, stacks = super().scan(equation, given)
        if not any(over):
            return carry, stacks
        if scan.num_carry or _has_split([place for (place,) in given[: scan.num_consts]]):
            self._note([False] * len(equation.outputs))
            return carry, stacks
        return [], [(Split(0),)] * len(stacks)

    def _note(self, mixes: Sequence[bool], *, numbered: bool = False, sums: bool = False) -> None:
        equation = self._at[-1]
        if not is_ours(equation.op):
            note = f"{equation.name} ({equation.op.line or 'no line known'})"
            self.lost[equation] = [Lost(note, each, numbered, sums) for each in mixes]

    def facts(self, equation: Equation, operands: list[frozenset[Lost]]) -> list[frozenset[Lost]]:
        """What the results of an equation depend on that has lost rows, from what its operands do."""
        if self.joins_all(equation):
            return [_NOTHING] * len(equation.outputs)
        inside = through(equation, operands, self.facts, operator.or_, _NOTHING)
        made = [_NOTHING.union(*operands)] * len(equation.outputs) if inside is None else inside
        own = self.lost.get(equation, [])
        if equation.name == "gather" and not any(operands[1:]):  # by numbers that are made of no rows
            own = [lost._replace(mixes=True) for lost in own]
        return [each | {lost} for each, lost in zip(made, own, strict=True)] if own else made


def _has_split(places: Sequence[Place]) -> bool:
    return any(isinstance(place, Split) for place in places)


def _beside(op: Operation, places: Sequence[Place]) -> Step:
    """The step of a kernel, or a draw by keys of rows: results have rows in the operands' dim, where it has that size."""
    for aval, place in zip(op.given, places, strict=True):
        if isinstance(place, Split):
            rows = slice(place.dim, place.dim + 1)
            sized = [made.shape[rows] == aval.shape[rows] for made in op.made]
            return Step(tuple(places), tuple(place if each else None for each in sized))
    return Step((None,) * len(op.given), (None,) * len(op.made))


def _made_of(op: Operation, given: Sequence[Places]) -> Places:
    """Where rows are that are made one by one of the last operand's, whose dims `jax.vmap` may have put in another order."""
    (place,), made, rows = given[-1], op.made[0].shape, op.given[-1].shape
    if not isinstance(place, Split) or made == rows:
        return (place,)
    there = [dim for dim, size in enumerate(made) if size == rows[place.dim]]
    return (place._replace(dim=there[0]) if len(there) == 1 else None,)


_SOME = -1
"""The `outer` of a dim whose entries are rows that an operation has taken or put beside others, in no order known here."""


def _by_numbers(op: Operation, places: Sequence[Place]) -> Step | None:
    """The step of what takes rows by their numbers or puts them beside others; None: of no other.

    Each entry of its results is still made of one row; in which order is seen by the walk of their numbers.
    """
    splits = [place for place in places if isinstance(place, Split)]
    if not splits or any(place.dim != splits[0].dim for place in splits):
        return None
    if op.name not in ("concatenate", "pad", "slice", "split", "tile"):
        return None
    first = splits[0]
    wanted, sizes = tuple(places), [aval.shape[first.dim] for aval in op.made]
    if op.name == "concatenate" and op.options["dimension"] == first.dim:
        alike = first.outer == 1 and all(places) and len({aval.shape for aval in op.given}) == 1
        return Step(wanted, (first._replace(outer=len(places) if alike else _SOME),))
    if op.name == "tile" and op.options["reps"][first.dim] > 1:
        return Step(wanted, (first._replace(outer=first.outer * op.options["reps"][first.dim]),))
    if (
        op.name == "pad"
        and isinstance(places[0], Split)
        and tuple(op.options["padding_config"][first.dim]) != (0, 0, 0)
    ):
        return Step(wanted, (first._replace(outer=_SOME),))
    if op.name in ("slice", "split") and any(size != op.given[0].shape[first.dim] for size in sizes):
        rows = op.given[0].shape[first.dim] // first.outer
        start, stride = _taken(op, first.dim)
        if stride > 1:
            return None
        blocks = first.outer > 1 and not any(number % rows for number in (start, *sizes))
        return Step(wanted, tuple(first._replace(outer=own // rows if blocks else _SOME) for own in sizes))
    return None


def _taken(op: Operation, dim: int) -> tuple[int, int]:
    """Where along a dim an operation begins to take entries, and every how many."""
    if op.name != "slice":
        return 0, 1
    return op.options["start_indices"][dim], (op.options["strides"] or (1,) * op.given[0].ndim)[dim]


def _aligned(op: Operation, places: Sequence[Place]) -> Sequence[Place]:
    """The places of operands that are put side by side, whose rows are in orders of their own where one has taken some."""
    outer = {place.outer for place in places if isinstance(place, Split)}
    if _SOME not in outer or len(outer) == 1 or not (is_elementwise(op.name) or op.name == "concatenate"):
        return places
    return [place._replace(outer=_SOME) if isinstance(place, Split) else place for place in places]


def _certain(op: Operation, places: Sequence[Place], moved: Sequence[int]) -> list[bool]:
    """Of each result whether it is certain that it is made of several rows."""
    floats = [
        _is_float(aval) and isinstance(at, Split) and not isinstance(at, Chosen)
        for aval, at in zip(op.given, places, strict=True)
    ]
    if op.name == "dot_general":  # of rows and rows; or a sum over rows by a matrix that is made for their number
        mixes = all(floats) if moved else any(floats) and not all(map(_has_split, [[at] for at in places]))
    else:
        keys = range(op.options["num_keys"]) if op.name == "sort" else moved
        meets = op.name in _MIXES or is_elementwise(op.name)  # an elementwise one of rows and rows along other dims
        mixes = meets and bool(moved) and all(floats[k] for k in keys)
    return [mixes and _is_float(aval) for aval in op.made]


# --------------------------------------------------------------------------------------------------
# Draws for a rank's rows by a key that is the same on all ranks; the model's own keys differ from shard to shard.
# --------------------------------------------------------------------------------------------------


def drawn_alike(whole: Call, local: Call) -> list[str]:
    """The draws of a call for its rows whose key is none of the model's own, and is made of no rows.

    Args:
      whole, local: the call, noted at the whole batch's shapes and at a rank's.
    """
    noted, same = draws(whole.traced), []
    if noted == draws(local.traced):
        return same
    rows = [a.shape != b.shape for a, b in zip(whole.given, local.given, strict=True)]
    for (name, shape, own), (_, part, _) in zip(_drawn(whole, rows), _drawn(local, rows), strict=False):
        if shape != part and not own:
            line = next((each.line for each in noted if (each.name, each.shape) == (name, shape)), "")
            same.append(f"{name} of shape {shape} ({line or 'no line known'})")
    return same


def _drawn(call: Call, rows: Sequence[bool]) -> list[tuple[str, tuple[int, ...], bool]]:
    """The draws in a call of the model: the operation, the shape, and whether by the model's own keys, or by ones of rows."""
    found: list[tuple[str, tuple[int, ...], bool]] = []
    program = read_program(call.traced, all_but_named)

    def rule(equation: Equation, operands: list[bool]) -> list[bool]:
        if (inside := through(equation, operands, rule, operator.or_, False)) is not None:
            return inside
        own = any(operands) or equation.name == "axis_index"  # a rank's number makes a key its own
        if rule_of(equation.name).kind == "random":
            found.extend((equation.name, x.shape, own) for x in equation.op.made)
        return [own] * len(equation.outputs)

    fixed = len(program.inputs) - len(rows)
    results(program, [*(k == fixed - 1 for k in range(fixed)), *rows], rule, False)
    return found


# --------------------------------------------------------------------------------------------------
# The number of rows, and rows taken by their numbers.
# --------------------------------------------------------------------------------------------------


class Unlike(Exception):
    """Raised where both traces do not do the same, so that nothing can be said."""


UNLIKE = "other operations for another number of rows"


class State(NamedTuple):
    """What is known of a value.

    Attributes:
      kind: "free": it comes from no rows; "count": it is free, but depends on how many rows there are; "numbered": it is free,
        but depends on the rows' numbers; "sized": it is free, but may depend on either; "rows": it comes from rows; "kept": it
        has rows among others, in as many places however many they are; "other": nothing is known.
      place: of rows, the dim that holds them.
      order: of rows taken by their numbers, these (-1: none of them); None: they are all there, in order.
      scaled: a number that differs with the batch has multiplied them.
      note: the operation that took or scaled them.
    """

    kind: str
    place: Split | None = None
    order: tuple[int, ...] | None = None
    scaled: bool = False
    note: str = ""


FREE, COUNT, NUMBERED, SIZED, OTHER = map(State, ("free", "count", "numbered", "sized", "other"))
_SIZES = (COUNT, NUMBERED, SIZED)
_FIXED = ("free", "count", "numbered")
_LINES = """
add_any broadcast_in_dim convert_element_type conv_general_dilated copy div dot_general mul name neg pvary reduce_sum reshape
select_n squeeze stop_gradient transpose
"""
_LINEAR = frozenset(_LINES.split())
"""Operations that a number which scales their operand also scales."""

_GROUP = (Group((), 1),)


class Numbering(NamedTuple):
    """Where a model's own code reads the number of rows, or their numbers.

    Attributes:
      found: the operations, with the user's lines.
      known: whether it is known in which order all rows are that the calls return.
    """

    found: list[str]
    known: bool

    def unseen(self, lost: Sequence[Lost]) -> list[Lost]:
        """Of what has lost rows that which is not seen here: rows taken by their numbers are, where these are known."""
        return [each for each in lost if not (each.numbered and self.known)]


def numbering_inside(
    whole: Sequence[Call], local: Sequence[Call], ranks: int, joined: Container[str] = ()
) -> Numbering:
    """Where a model's own code reads the number of rows, or their numbers; nothing is known where its traces are unlike.

    Args:
      whole, local: the model's calls, noted at the whole batch's shapes and at a rank's.
      ranks: the number of ranks.
      joined: the names of state of which it is said how ranks join it.
    """
    try:
        return _numbering_of(whole, local, ranks, joined)
    except Unlike as unlike:
        return Numbering(list(unlike.args), known=False)


def _numbering_of(whole: Sequence[Call], local: Sequence[Call], ranks: int, joined: Container[str]) -> Numbering:
    found, known = list[str](), True
    for of_all, of_rank in zip(whole, local, strict=True):
        if not of_all.alike(of_rank):
            raise Unlike
        walk = _Numbering(of_all.given, of_rank.given, ranks)
        if not walk.rows or of_all.traced is None or of_rank.traced is None:
            continue
        returned = of_all.out_rest.count(None)
        made = walk.run(*(read_program(each.traced, all_but_named) for each in (of_all, of_rank)))
        for state, aval in zip(made[:returned], of_all.made[:returned], strict=True):
            if state.kind == "rows" and _is_float(aval) and (state.scaled or state.order is not None):
                walk.found.append(state.note)
        known &= OTHER not in made[:returned]
        changed = ["/".join(map(str, path)) for path in of_all.changed]
        for name, state in zip(changed, made[returned:], strict=False):
            if name not in joined and (state.kind == "kept" or state.order is not None):
                walk.found.append(state.note)
        found += walk.found
    return Numbering(list(dict.fromkeys(found)), known)


def of_size(whole: Program, local: Program, given: Sequence[Any], own: Sequence[Any], ranks: int) -> list[bool]:
    """Which results of a program come from no rows, but depend, or may, on how many there are or on their numbers.

    Args:
      whole, local: the program traced at the whole batch's shapes and at a rank's.
      given, own: the abstract values of their last inputs, which may have rows.
      ranks: the number of ranks.

    Raises:
      Unlike: where both do not do the same.
    """
    walk = _Numbering(given, own, ranks)
    return [state in (COUNT, NUMBERED, SIZED) for state in walk.run(whole, local)]


class _Numbering:
    """Walks two traces of a call; `found` is what it notes.

    Args:
      whole, local: the abstract values of the arrays that it is given.
      ranks: the number of ranks.
    """

    def __init__(self, whole: Sequence[Any], local: Sequence[Any], ranks: int):
        self.found: list[str] = []
        self._states = [self._given(a.shape, b.shape, ranks) for a, b in zip(whole, local, strict=True)]
        pairs = zip(whole, local, self._states, strict=True)
        self.rows = {(a.shape[s.place.dim], b.shape[s.place.dim]) for a, b, s in pairs if s.place is not None}

    def run(self, whole: Program, local: Program) -> list[State]:
        """The states of the results of programs whose last inputs are the arrays."""
        return self.program(whole, local, [*[FREE] * (len(whole.inputs) - len(self._states)), *self._states])

    @staticmethod
    def _given(whole: Sequence[int], own: Sequence[int], ranks: int) -> State:
        grown = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
        if not grown:
            return FREE
        return State("rows", Split(grown[0])) if len(grown) == 1 and whole[grown[0]] == own[grown[0]] * ranks else OTHER

    def program(self, whole: Program, local: Program, given: Sequence[State]) -> list[State]:
        """The states of a program's results."""
        if len(whole.equations) != len(local.equations) or len(whole.constants) != len(local.constants):
            raise _unlike(whole, local)
        env = dict(zip(whole.inputs, given, strict=True))
        for (number, value), own in zip(whole.constants.items(), local.constants.values(), strict=True):
            env[number] = _of_constant(value, own)
        for equation, own in zip(whole.equations, local.equations, strict=True):
            if equation.name != own.name or len(equation.inputs) != len(own.inputs):
                raise _unlike(whole, local)
            read = [_of_atom(a, b, env) for a, b in zip(equation.inputs, own.inputs, strict=True)]
            env.update(zip(equation.outputs, self._equation(equation, own, read), strict=True))
        return [_of_atom(a, b, env) for a, b in zip(whole.outputs, local.outputs, strict=True)]

    def _equation(self, equation: Equation, own: Equation, given: list[State]) -> list[State]:
        op, rule = equation.op, rule_of(equation.name)
        others = [OTHER] * len(equation.outputs)
        if equation.op.bodies and not op.name.startswith("scatter"):
            before = len(self.found)
            try:
                return self._with_bodies(equation, own, given)
            except Unlike:
                del self.found[before:]
                apart = all(state.kind in (*_FIXED, "sized") for state in given)
                return [SIZED] * len(others) if apart and any(state in _SIZES for state in given) else others
        if rule.casts or rule.passes:
            return given
        if rule.kind == "random":  # keys of rows lead
            sized = SIZED if COUNT in given or SIZED in given else FREE
            return [next((state for state in given if state.place is not None), sized)] * len(others)
        if (kept := self._kept(op, own.op, given)) is not None:
            return [kept] * len(others)
        if rule.kind == "collective":
            return others
        if all(state.kind in _FIXED for state in given):
            return [self._fixed(equation, own.op, given)] * len(others)
        if SIZED in given and all(state.kind in (*_FIXED, "sized") for state in given):
            return [SIZED] * len(others)
        if OTHER in given or SIZED in given:
            self._look_at_sizes(op, own.op, given)
            return others
        if _reads_size(op, own.op, given):
            self.found.append(_note(op))
        return self._moved(op, own.op, given) or self._of_rows(op, own.op, given)

    # Bodies

    def _with_bodies(self, equation: Equation, own: Equation, given: list[State]) -> list[State]:
        if equation.op.scan is not None:
            return self._scan(equation, own, given)
        if equation.op.loop is not None:
            return self._loop(equation, own, given)
        if equation.branches:
            if given[0] in _SIZES:
                self.found.append(_note(equation.op))
            made = [self.program(a, b, given[1:]) for a, b in zip(equation.branches, own.branches, strict=True)]
            return [_joined(each) for each in zip(*made, strict=True)]
        if is_row_by_row(equation.op) and given[-1].kind == "rows":
            *_, state = given
            self.found += [state.note] if state.scaled else []  # experts bend it
            (place,) = _made_of(equation.op, [(each.place,) for each in given])
            return [state._replace(place=place, scaled=False)]
        inside = lambda each: each.called if each.called is not None else each.body
        if inside(equation) is None or inside(own) is None:
            raise Unlike
        return self.program(inside(equation), inside(own), given)

    def _scan(self, equation: Equation, own: Equation, given: list[State]) -> list[State]:
        scan, body, own_body = equation.op.scan, equation.body, own.body
        assert scan is not None and body is not None and own_body is not None
        consts, carry = given[: scan.num_consts], given[scan.num_consts : scan.first_scanned]
        avals = equation.op.given
        slices = [_sliced(*each) for each in zip(given[scan.first_scanned :], avals[scan.first_scanned :], strict=True)]
        trip = lambda carry: self.program(body, own_body, [*consts, *carry, *slices])
        made = self._carried(carry, avals[scan.num_consts :], trip)
        carry, stacks = made[: scan.num_carry], made[scan.num_carry :]
        if own.op.scan is None or own.op.scan.options["length"] != scan.options["length"]:  # it counts trips
            first = body.inputs[scan.num_consts :]
            moves = [new != old for old, new in zip(first, body.outputs[: scan.num_carry], strict=False)]
            self._counted(equation.op, [state for state, moved in zip(carry, moves, strict=True) if moved])
            carry = [SIZED if state is FREE and moved else state for state, moved in zip(carry, moves, strict=True)]
            if all(state.kind in (*_FIXED, "sized") for state in given):
                return [SIZED] * len(equation.outputs)
        return [*carry, *map(_stacked, stacks)]

    def _loop(self, equation: Equation, own: Equation, given: list[State]) -> list[State]:
        loop, body, own_body = equation.op.loop, equation.body, own.body
        assert loop is not None and body is not None and own_body is not None
        first = loop.num_condition_consts
        consts, carry = given[first : first + loop.num_body_consts], given[first + loop.num_body_consts :]
        trip = lambda carry: self.program(body, own_body, [*consts, *carry])
        made = self._carried(carry, equation.op.made, trip)
        read = [*given[:first], *given[first + loop.num_body_consts :]]
        if not any(state in _SIZES for state in read) and not _counts(equation.condition, own.condition):
            return made
        self._counted(equation.op, made)
        apart = all(state.kind in (*_FIXED, "sized") for state in given)
        return [SIZED] * len(made) if apart else [SIZED if state is FREE else state for state in made]

    def _counted(self, op: Operation, carry: list[State]) -> None:
        """Notes a loop that makes so many trips as there are rows, where it carries rows."""
        if any(state.kind in ("rows", "kept") for state in carry):
            self.found.append(_note(op))

    def _carried(
        self, carry: list[State], avals: Sequence[Any], trip: Callable[[list[State]], list[State]]
    ) -> list[State]:
        """The results of a trip whose carry holds in every trip; numbers that a loop counts are not known."""
        carry = [_uncounted(state, aval) for state, aval in zip(carry, avals, strict=False)]
        for _ in range(2 * len(carry) + 2):
            made = trip(carry)
            joined = [_joined(pair) for pair in zip(carry, made, strict=False)]
            if joined == carry:
                return [*carry, *made[len(carry) :]]
            carry = joined
        raise Unlike

    # Operations

    def _fixed(self, equation: Equation, own: Operation, given: list[State]) -> State:
        """The result of an operation on what comes from no rows."""
        op, kind = equation.op, rule_of(equation.name).kind
        if op.name == "iota":
            along = op.options["dimension"]
            a, b = op.made[0].shape[along], own.made[0].shape[along]
            numbers = (a, b) in self.rows or (a + 1, b + 1) in self.rows  # the latter in `linspace`
            return FREE if a == b else NUMBERED if numbers else SIZED
        if op.name == "mul" and any(is_constant(atom) and not np.any(atom.val) for atom in equation.inputs):
            return FREE
        grown = [_grown(a.shape, b.shape) for a, b in zip(op.given, own.given, strict=True)]
        made = _grown(op.made[0].shape, own.made[0].shape) if op.made else []
        found = max(given, key=lambda state: _FIXED.index(state.kind), default=FREE)
        if op.name in ("slice", "dynamic_slice") and made and not any(grown):
            return NUMBERED if set(made) <= self.rows else SIZED
        if not made and not any(grown) and found is FREE:
            return FREE if str(op.options) == str(own.options) else COUNT
        if is_elementwise(op.name):
            return COUNT if found is FREE and _powers_differ(op, own) else found
        if op.name == "gather" and given[0] is FREE and not grown[0]:
            return found
        if found is FREE and not any(grown):
            return FREE if op.name in ("broadcast_in_dim", "tile") else SIZED
        if found is FREE:
            return FREE if _repeats(op, own) else SIZED
        return found if kind == "placing" else SIZED

    def _look_at_sizes(self, op: Operation, own: Operation, given: list[State]) -> None:
        """Notes where what depends on the number of rows meets rows, or is added to what may be made of them."""
        floats = [k for k, aval in enumerate(op.given) if _is_float(aval) or (op.name == "select_n" and k == 0)]
        sized = [given[k] for k in floats if given[k].kind in ("count", "numbered", "sized")]
        added = op.name in ("add", "add_any", "sub")
        if not sized or not (is_elementwise(op.name) or op.name in ("concatenate", "stack", "dot_general")):
            return
        if not added and all(state is COUNT for state in sized):
            return
        rows = lambda k: (
            given[k].kind in ("rows", "kept") or (given[k] is OTHER and _grown(op.given[k].shape, own.given[k].shape))
        )
        if any(map(rows, floats)) or (added and any(given[k] is OTHER for k in floats)):
            self.found.append(_note(op))

    def _moved(self, op: Operation, own: Operation, given: list[State]) -> list[State] | None:
        """The results of an operation that takes rows by their numbers; None for all others."""
        state = given[0]
        if op.name == "concatenate":
            return self._concatenated(op, given)
        if state.place is None or (order := self._order(state, op.given[0])) is None:
            return None
        dim, options = state.place.dim, op.options
        taken: list[Any] | None = None
        if op.name == "slice":
            stride = options["strides"][dim] if options["strides"] else 1
            taken = [order[options["start_indices"][dim] : options["limit_indices"][dim] : stride]]
        elif op.name == "rev" and dim in options["dimensions"]:
            taken = [order[::-1]]
        elif op.name == "split" and options["axis"] == dim:
            ends = np.cumsum(options["sizes"])
            taken = [order[end - size : end] for end, size in zip(ends, options["sizes"], strict=True)]
        elif op.name == "pad":
            low, high, inner = options["padding_config"][dim]
            taken = [(-1,) * low + order + (-1,) * high] if min(low, high) >= 0 and not inner else None
        elif op.name.startswith("scatter") and dim in options["dimension_numbers"].scatter_dims_to_operand_dims:
            return self._scattered(op, own, given)
        return None if taken is None else [self._taken(op, state, each) for each in taken]

    @staticmethod
    def _kept(op: Operation, own: Operation, given: list[State]) -> State | None:
        """The result of an operation that puts rows into an array of a fixed size, or goes on with it; None for all others."""
        there = next((state for state in given if state.kind == "kept"), None)
        if there is not None:
            goes_on = is_elementwise(op.name) or rule_of(op.name).kind == "placing"
            return there if goes_on else OTHER
        put = {"concatenate": slice(None), "dynamic_update_slice": slice(1, 2), "scatter": slice(2, 3)}.get(op.name)
        if put is None or any(_grown(a.shape, b.shape) for a, b in zip(op.made, own.made, strict=True)):
            return None
        rows = zip(given[put], op.given[put], own.given[put], strict=True)
        if any(state.kind == "rows" and (state.order is not None or _grown(a.shape, b.shape)) for state, a, b in rows):
            return State("kept", note=_note(op))
        return None

    def _order(self, state: State, aval: Any) -> tuple[int, ...] | None:
        """The numbers of the rows along their dim; None: they are not known."""
        assert state.place is not None
        size = aval.shape[state.place.dim]
        if state.order is not None:
            return state.order
        return tuple(range(size)) if state.place.outer == 1 and size in {whole for whole, _ in self.rows} else None

    def _taken(self, op: Operation, state: State, order: tuple[int, ...]) -> State:
        if len(order) in {whole for whole, _ in self.rows} and order == tuple(range(len(order))):
            return state._replace(order=None, note=state.note if state.scaled else "")
        return state if order == state.order else state._replace(order=order, note=_note(op))

    def _concatenated(self, op: Operation, given: list[State]) -> list[State] | None:
        """Rows after rows, or after values that come from none."""
        order: tuple[int, ...] = ()
        first = next(state for state in given if state.kind == "rows")
        if not any(state.place is not None and state.place.dim == op.options["dimension"] for state in given):
            return None
        for state, aval in zip(given, op.given, strict=True):
            own: tuple[int, ...] | None = (-1,) * aval.shape[op.options["dimension"]] if state is FREE else None
            if state.place is not None and state.place.dim == op.options["dimension"]:
                own = self._order(state, aval)
            if own is None:
                return [OTHER]
            order += own
        return [self._taken(op, first._replace(scaled=any(state.scaled for state in given)), order)]

    def _scattered(self, op: Operation, own: Operation, given: list[State]) -> list[State]:
        table, index, updates = given
        if index.kind not in ("free", "count") or op.given[1].shape != own.given[1].shape or updates.kind == "rows":
            return [OTHER]
        if _is_float(op.given[0]):
            self.found.append(_note(op))
        return [table]

    def _of_rows(self, op: Operation, own: Operation, given: list[State]) -> list[State]:
        """The results of an operation on rows; notes what meets them."""
        meets = [_is_float(aval) or (op.name == "select_n" and k == 0) for k, aval in enumerate(op.given)]
        floats = [state for state, each in zip(given, meets, strict=True) if each]
        rows = [state for state in floats if state.kind == "rows"]
        numbers = [state for state in floats if state in (COUNT, NUMBERED)]
        step = step_of(op, [(state.place,) for state in given], _GROUP)[0]
        joins = is_elementwise(op.name) or op.name in ("concatenate", "stack", "dot_general")
        if any(state in (COUNT, NUMBERED) for state in given) and not (numbers and rows):
            return [OTHER] * len(op.made)
        scales = numbers == [COUNT] and (op.name == "mul" or (op.name == "div" and given[1] is COUNT))
        kept = any(isinstance(place, Split) for place in step.made)
        crossed = joins and len({state.order for state in rows}) > 1
        if crossed or (joins and rows and kept and numbers and not scales) or _powers_differ(op, own):
            self.found.append(_note(op))
            scales = False
        given = [state._replace(order=None) for state in given] if crossed else given
        made = [self._made(op, given, place, aval) for place, aval in zip(step.made, op.made, strict=True)]
        return [self._scaled(op, given, floats, state, scales) for state in made]

    def _made(self, op: Operation, given: list[State], place: Place, aval: Any) -> State:
        taken = next((state for state in given if state.order is not None), None)
        at = place if isinstance(place, Split) else None
        if taken is None or taken.order is None:
            return OTHER if at is None else State("rows", at)
        known = is_elementwise(op.name) or rule_of(op.name).kind == "placing" or op.name.startswith("reduce_")
        if not known and op.name not in ("dot_general", "conv_general_dilated"):
            return OTHER
        fits = at is not None and aval.shape[at.dim] == len(taken.order)
        return State("rows", at if fits else None, taken.order, note=taken.note)

    def _scaled(self, op: Operation, given: list[State], floats: list[State], state: State, scales: bool) -> State:
        """A result that is scaled, as its operands are or as this operation does; noted where it bends them."""
        scaled = [each for each in given if each.scaled]
        if scaled and is_elementwise(op.name):
            sums = op.name in ("add", "sub") and all(each.scaled for each in floats)
            bent = op.name not in _LINEAR and not sums
            if bent or (op.name in ("mul", "div") and (len(scaled) > 1 or (op.name == "div" and given[1].scaled))):
                self.found.append(scaled[0].note)
                return state
        if not (scaled or scales) or state.place is None:
            return state
        return state._replace(scaled=True, note=scaled[0].note if scaled else _note(op))


def _unlike(whole: Program, local: Program) -> Unlike:
    """The error for programs that do not do the same; it says so of the user's code, and nothing of this library's layers."""
    pairs = itertools.zip_longest(whole.equations, local.equations)
    differ = lambda a, b: a is None or b is None or a.name != b.name or len(a.inputs) != len(b.inputs)
    first = next((a or b for a, b in pairs if differ(a, b)), None)
    return Unlike() if first is not None and is_ours(first.op) else Unlike(UNLIKE)


def _of_atom(atom: Any, own: Any, env: dict[int, State]) -> State:
    if is_constant(atom) != is_constant(own):
        raise Unlike
    if not is_constant(atom):
        return env[atom]
    equal_nan = _is_float(np.asarray(atom.val))
    return FREE if np.array_equal(atom.val, own.val, equal_nan=equal_nan) else COUNT


def _reads_size(op: Operation, own: Operation, given: Sequence[State]) -> bool:
    """Whether a slice of rows, or of their features, begins or ends by how many rows there are."""
    if op.name == "dynamic_slice":
        return given[0].kind == "rows" and COUNT in given[1:]
    if op.name != "slice" or given[0].place is None:
        return False
    of_all, of_rank = ([each.options[name] for name in ("start_indices", "limit_indices")] for each in (op, own))
    pairs = zip(zip(*of_all, strict=True), zip(*of_rank, strict=True), strict=True)
    return any(a != b and dim != given[0].place.dim for dim, (a, b) in enumerate(pairs))


def _counts(condition: Program | None, own: Program | None) -> bool:
    """Whether a loop's condition has a constant that depends on the number of rows."""
    assert condition is not None and own is not None
    pairs = [
        pair
        for a, b in zip(condition.equations, own.equations, strict=False)
        for pair in zip(a.inputs, b.inputs, strict=False)
    ]
    return any(is_constant(a) and is_constant(b) and _of_atom(a, b, {}) is COUNT for a, b in pairs)


def _of_constant(value: Any, own: Any) -> State:
    """The state of an array that the code has made without JAX; one that repeats itself rank by rank is free."""
    if value is own or any(isinstance(x, Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in (value, own)):
        return FREE
    if np.ndim(value) != np.ndim(own):
        raise Unlike
    repeats = [a // b if b and a % b == 0 else 0 for a, b in zip(np.shape(value), np.shape(own), strict=True)]
    if np.shape(value) != np.shape(own) and 0 in repeats:
        return OTHER
    return FREE if np.array_equal(np.asarray(value), np.tile(np.asarray(own), repeats)) else NUMBERED


def _repeats(op: Operation, own: Operation) -> bool:
    """Whether an operation whose operands repeat themselves rank by rank along the dims that differ makes what does so too."""
    differ = lambda a, b: [dim for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=False)) if x != y]
    dims = [differ(a, b) for a, b in zip(op.given, own.given, strict=True)]
    if any(len(each) > 1 for each in dims):
        return False
    step = step_of(op, [(Split(each[0]) if each else None,) for each in dims], _GROUP)[0]
    pairs = zip(step.made, op.made, own.made, strict=True)
    return all(isinstance(at, Split) and at.outer == 1 and differ(a, b) == [at.dim] for at, a, b in pairs)


def _powers_differ(op: Operation, own: Operation) -> bool:
    return op.name == "integer_pow" and op.options["y"] != own.options["y"]


def _grown(whole: Sequence[int], own: Sequence[int]) -> list[tuple[int, int]]:
    """The sizes that differ."""
    return [(a, b) for a, b in zip(whole, own, strict=False) if a != b]


def _joined(states: Sequence[State]) -> State:
    """What is known of a value that is one of several."""
    some = [state for state in dict.fromkeys(states) if state is not FREE]
    return FREE if not some else some[0] if len(some) == 1 else OTHER


def _uncounted(state: State, aval: Any) -> State:
    return state if state.kind == "rows" or (state is FREE and not jnp.issubdtype(aval.dtype, jnp.integer)) else OTHER


def _sliced(state: State, aval: Any) -> State:
    if state.kind != "rows" or state.place is None or not state.place.dim:
        return state if state is FREE else OTHER
    return state._replace(place=state.place._replace(dim=state.place.dim - 1))


def _stacked(state: State) -> State:
    return state if state.place is None else state._replace(place=state.place._replace(dim=state.place.dim + 1))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _note(op: Operation) -> str:
    return f"{op.name} ({op.line or 'no line known'})"
