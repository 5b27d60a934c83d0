"""Counts the collectives on a step's trace: entries, rows and their table."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax import base as markup
from axonml_jax.compat.jaxpr import Mapped, Operation, is_jaxpr, live
from axonml_jax.cost.base import GRADIENTS, PARAMETERS, every
from axonml_jax.cost.decoder import Amount, exact, wire_elements
from axonml_jax.program import program as rules
from axonml_jax.program.program import Equation, Program, no_calls, read_program, rule_of

# --------------------------------------------------------------------------------------------------
# What a communicating equation sends. The primitives and their kinds stand in `program/program.py`; their names differ with
# `check_vma` (`psum` off, `psum_invariant` on) and with the JAX version, and tests trace each.
# --------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One communicating equation, without its place in the program."""

    kind: str
    op: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    itemsize: int
    elements: int


def read(op: Operation, axis_sizes: Mapping[str, int]) -> Call | None:
    """Reads what one equation communicates; None if nothing.

    Args:
      op: an equation without inner programs.
      axis_sizes: the sizes of the mesh axes in scope.

    Raises:
      ValueError: for an equation that names mesh axes but is no collective the ledger knows.
    """
    axes, rule = op.mesh_axes, rule_of(op.name)
    if not axes or rule.casts or (rule.kind == "collective" and rule.sends is None):
        return None
    if rule.sends is None:
        raise ValueError(
            f"primitive {op.name!r} names the mesh axes {axes} but the ledger does not know what it sends: "
            f"add it to {rules.__name__}, as a collective or as silent"
        )
    kind, reduction = rule.sends
    unbound = [axis for axis in axes if axis not in axis_sizes]
    if unbound:
        raise ValueError(
            f"{op.name} over {axes}: the sizes of {unbound} are unknown here (known: {dict(axis_sizes)}); "
            "count the jaxpr of the whole shard_map, or pass axis_sizes="
        )
    full = op.made[0] if kind == "all_gather" else op.given[0]
    dtype, elements = _physical(full)
    group = _group_size(op.groups, math.prod(axis_sizes[axis] for axis in axes))
    return Call(kind, reduction, axes, group, dtype.name, dtype.itemsize, elements)


def _group_size(groups: Any, axes_size: int) -> int:
    """The number of ranks per group; of unequal groups the largest, whose ranks send most."""
    return max(map(len, groups)) if groups else axes_size


def _physical(aval: Any) -> tuple[Any, int]:
    """The dtype and number of elements as sent: typed random keys are sent as their words."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval.dtype, math.prod(aval.shape)


# --------------------------------------------------------------------------------------------------
# `Collective`: one communicating call of a program, and the loops and branches it sits in.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loop:
    """One enclosing loop. `trips` is None if it depends on data (a while loop); `unroll` is `lax.scan`'s."""

    trips: int | None = None
    unroll: int = 1

    def __str__(self) -> str:
        return "while[?]" if self.trips is None else f"scan[{self.trips}]"


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of an enclosing `lax.cond` or `lax.switch`: index `index` of `of`, counted from 0 (printed from 1).

    JAX stores a `lax.cond` as a switch on its condition, so the false branch comes first.
    """

    index: int
    of: int

    def __str__(self) -> str:
        return f"branch {self.index + 1}/{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communicating call: its kind, axes, size and number of executions.

    Attributes:
      kind: one of `cost.decoder.KINDS`.
      op: what a reduction computes (`sum`, `max`, `min`), else empty.
      axes: the mesh axes it runs over (empty when read from a lowered program, which may not name them).
      group_size: how many ranks take part. 0 for a permute read from a lowered program, which does not say.
      dtype: numpy's name of the element type on the wire.
      itemsize: bytes per element.
      leaf_elements: elements of the full array, one number per leaf. Several leaves are one call on a tree: one
        reduction for whoever wrote it, one launch per leaf in StableHLO.
      path: enclosing loops and branches, outermost first.
      label: what it moves: the last `axonml.<label>` among its name scopes, `scalars` for unlabelled scalars, or empty.
      scope: its whole name stack.
      padding: how many of the elements are padding, as its scope says (`label_of`).
      counted: False in a branch of a conditional that another branch outweighs: a rank runs only one of them.
      every: it runs in one of so many steps, as its scope says (`period_of`).
      automatic: mesh axes left to the partitioner here. Shapes are global over these and the partitioner may add
        collectives that no trace shows.
    """

    kind: str
    axes: tuple[str, ...] = ()
    group_size: int
    dtype: str
    itemsize: int
    leaf_elements: tuple[int, ...]
    op: str = ""
    path: tuple[Loop | Branch, ...] = ()
    label: str = ""
    scope: str = ""
    padding: int = 0
    counted: bool = True
    every: int = 1
    automatic: tuple[str, ...] = ()

    @property
    def leaves(self) -> int:
        """The number of arrays in one call: its launches in StableHLO."""
        return len(self.leaf_elements)

    @property
    def elements(self) -> int:
        """The number of elements of the full arrays in one execution."""
        return sum(self.leaf_elements)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The enclosing loops, outermost first."""
        return tuple(step for step in self.path if isinstance(step, Loop))

    @property
    def in_loop(self) -> bool:
        """Whether any loop encloses it."""
        return bool(self.loops)

    @property
    def unbounded(self) -> bool:
        """Whether it is in a while loop, whose trip count the program text does not tell."""
        return any(loop.trips is None for loop in self.loops)

    @property
    def executions(self) -> int:
        """The number of executions in one step if its branch is taken; an unknown trip count counts as one."""
        return math.prod(1 if loop.trips is None else loop.trips for loop in self.loops)

    @property
    def count(self) -> int | None:
        """The number of executions in one step, or None if a while loop decides it."""
        return None if self.unbounded else self.executions

    @property
    def where(self) -> str:
        """The enclosing loops and branches as text, or the steps in which it runs.

        >>> path = (Loop(3), Branch(0, 2))
        >>> Collective(kind="permute", group_size=2, dtype="int8", itemsize=1, leaf_elements=(8,), path=path).where
        'scan[3] > branch 1/2'
        """
        return every(self.every) if self.every > 1 else " > ".join(map(str, self.path)) or "once"

    @property
    def wire_bytes(self) -> Amount:
        """Bytes that one rank sends for one execution (ring), padding included."""
        return exact(self.itemsize * wire_elements(self.kind, self.elements, self.group_size))

    @property
    def padding_wire_bytes(self) -> Amount:
        """The part of `wire_bytes` that is padding."""
        return exact(self.itemsize * wire_elements(self.kind, self.padding, self.group_size))

    @property
    def step_wire_bytes(self) -> Amount:
        """Bytes that one rank sends in one step (one trip of each while loop), averaged over `every` steps."""
        return exact(Fraction(self.wire_bytes * self.executions, self.every))

    def __str__(self) -> str:
        leaves = f" in {self.leaves} leaves" if self.leaves > 1 else ""
        axes = ",".join(self.axes) or f"{self.group_size} ranks"
        return f"{self.kind}({axes}) {self.dtype}[{self.elements}]{leaves}, {self.where}"


# --------------------------------------------------------------------------------------------------
# The label of a collective, read from the name scopes around it (`jax.named_scope("axonml.gradients")`).
# --------------------------------------------------------------------------------------------------

_LABEL = re.compile(r"axonml\.([A-Za-z_]\w*)(?:\.pad(\d+))?")
_EVERY = re.compile(r"axonml\.[A-Za-z_]\w*\.every(\d+)")

SCALARS = "scalars"
PADDING = "padding"


def label_of(scope: str, kind: str) -> tuple[str, int]:
    """The innermost `axonml.<label>` in a name stack, and the number of padding elements under it.

    A scope around one flat buffer may say so: `axonml.gradients.pad12` ends in twelve zeros.

    Transformations wrap scopes, as in `transpose(jvp(axonml.parameters))`. A reduction found under the transpose of a
    parameter's gather sums that parameter's gradient, so it is labelled `gradients`; a gather there re-gathers weights.

    Args:
      scope: a name stack as text.
      kind: the collective's kind (`cost.decoder.KINDS`).

    Returns:
      (label, padding): an empty label and no padding where no scope says anything.

    >>> label_of("jit(step)/transpose(jvp(axonml.norm))/psum", "all_reduce")
    ('norm', 0)
    >>> label_of("transpose(jvp(axonml.parameters))", "reduce_scatter")
    ('gradients', 0)
    >>> label_of("axonml.gradients.pad12", "all_reduce")
    ('gradients', 12)
    """
    found = list(_LABEL.finditer(scope))
    if not found:
        return "", 0
    label = found[-1].group(1)
    transposed = "transpose(" in scope[: found[-1].start()]
    reduces = kind in ("all_reduce", "reduce_scatter")
    padding = int(found[-1].group(2) or 0)
    return (GRADIENTS if label == PARAMETERS and transposed and reduces else label), padding


def period_of(scope: str) -> int:
    """The period in steps of what a name stack encloses: `axonml.gradients.every10` runs in the last of ten.

    >>> period_of("jit(step)/axonml.gradients.every10/psum"), period_of("axonml.norm")
    (10, 1)
    """
    found = _EVERY.findall(scope)
    return int(found[-1]) if found else 1


# --------------------------------------------------------------------------------------------------
# Tables as plain text, aligned columns without a dependency or a terminal, and as HTML for notebooks.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrintedTable:
    """Rows under a header, printed as text and shown as HTML.

    Attributes:
      header: names of the columns.
      rows: cells.
      left: columns that hold words; the others hold numbers.
      shares: for every row a number from 0 to 1, drawn as a bar in HTML; empty: no bars.
      spare: columns to leave out in a narrow terminal, in this order.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    shares: Sequence[float] = ()
    spare: Sequence[str] = ()

    def __str__(self) -> str:
        return markup.aligned(self.header, self.rows, self.left, self.spare)

    def _repr_html_(self) -> str:
        return markup.table(self.header, self.rows, self.left, shares=self.shares)


def number(amount: Amount) -> str:
    """Format a number with thousands separators; a fraction with one decimal.

    >>> from fractions import Fraction
    >>> number(1234567), number(Fraction(10, 3))
    ('1,234,567', '3.3')
    """
    return f"{amount:,}" if isinstance(amount, int) else f"{float(amount):,.1f}"


def axes_table(sent: Mapping[str, Amount], total: Amount, name: str = "total") -> PrintedTable:
    """A table of the bytes that one rank sends over each set of mesh axes."""
    rows = [[axes, number(amount)] for axes, amount in sent.items()]
    shares = [float(amount / total) if total else 0.0 for amount in sent.values()]
    return PrintedTable(["axes", "bytes/rank"], [*rows, [name, number(total)]], left=1, shares=[*shares, 0.0])


# --------------------------------------------------------------------------------------------------
# The rows of a traffic table: collectives joined by what they move, over which axes, and where they stand.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """The collectives of one label, kind, axes, dtype and place in one step.

    Attributes:
      label: what they move (`label_of`); `padding` for the padded part of buffers that say so.
      kind: one of `cost.decoder.KINDS`.
      axes: the mesh axes.
      group_size: ranks that take part.
      dtype: the element type on the wire.
      where: enclosing loops and branches, or `once`.
      counted: whether totals include it (no branch that another one outweighs).
      count: calls in one step, or in the one that has them; a call on a tree is one. A while loop counts one trip.
      launches: the same leaf by leaf, as StableHLO launches them.
      elements: elements of the full arrays in one step.
      wire_bytes: bytes one rank sends in one step; of what runs in one of several steps the mean over these.
      unbounded: whether a while loop makes count, elements and bytes those of one trip.
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    where: str
    counted: bool
    count: int
    launches: int
    elements: int
    wire_bytes: Amount
    unbounded: bool


def traffic_rows(entries: Iterable[Collective]) -> tuple[TrafficRow, ...]:
    """Join collectives into rows; the labels that send most come first."""
    joined: dict[tuple, TrafficRow] = {}
    for row in (row for entry in entries for row in _rows_of(entry)):
        key = (row.label, row.kind, row.axes, row.group_size, row.dtype, row.where, row.counted)
        joined[key] = _add(joined[key], row) if key in joined else row
    weight: dict[str, Amount] = {}
    for row in joined.values():
        weight[row.label] = weight.get(row.label, 0) + row.wire_bytes
    return tuple(sorted(joined.values(), key=lambda row: (-weight[row.label], row.label, -row.wire_bytes)))


def _rows_of(entry: Collective) -> list[TrafficRow]:
    """One row, or two if part of the buffer is padding, which has no launch of its own."""
    times = entry.executions
    row = TrafficRow(
        label=entry.label,
        kind=entry.kind,
        axes=entry.axes,
        group_size=entry.group_size,
        dtype=entry.dtype,
        where=entry.where,
        counted=entry.counted,
        count=times,
        launches=times * entry.leaves,
        elements=times * (entry.elements - entry.padding),
        wire_bytes=exact(times * (entry.wire_bytes - entry.padding_wire_bytes) / Fraction(entry.every)),
        unbounded=entry.unbounded,
    )
    if not entry.padding:
        return [row]
    sent = exact(times * entry.padding_wire_bytes / Fraction(entry.every))
    padding = replace(row, label=PADDING, count=0, launches=0, elements=times * entry.padding, wire_bytes=sent)
    return [row, padding]


def _add(a: TrafficRow, b: TrafficRow) -> TrafficRow:
    return replace(
        a,
        count=a.count + b.count,
        launches=a.launches + b.launches,
        elements=a.elements + b.elements,
        wire_bytes=exact(a.wire_bytes + b.wire_bytes),
    )


# --------------------------------------------------------------------------------------------------
# Count the collectives of a traced program: exact, with axes, loops and labels, and without any device.
# --------------------------------------------------------------------------------------------------


def collectives_in(
    program: Any, *args: Any, axis_sizes: Mapping[str, int] | None = None, **kwargs: Any
) -> tuple[Collective, ...]:
    """Every collective of a program, in program order.

    Neighbouring equations of one call on a tree (`psum` of a dict) are one `Collective` with several leaves: JAX binds
    one equation per leaf. A Python loop over leaves on one source line traces to the same program and counts as the
    same; a name scope per bucket tells a loop over buckets apart. Unused results are dropped first, as lowering does.

    Args:
      program: a jaxpr (open or closed), or a callable to trace with `args`: a jitted one, anything with a `trace`
        method, or a plain function.
      *args: arrays or `jax.ShapeDtypeStruct`s; only for a callable.
      axis_sizes: sizes of mesh axes that are bound outside the jaxpr given (the body of a `shard_map`).
      **kwargs: keyword arguments of the callable.

    Returns:
      A tuple of `Collective`. Every branch of a conditional is listed; only those of the branch that sends most bytes
      are `counted`.

    Raises:
      ValueError: for a collective over axes of unknown size, or a primitive that names axes and is not known.
    """
    jaxpr = program if is_jaxpr(program) else trace(program, *args, **kwargs).jaxpr
    place = _Place(axis_sizes=dict(axis_sizes or {}))
    return tuple(_walk(read_program(live(jaxpr), no_calls), place))


def trace(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Trace a step without running it: its own `trace` method if it has one, else `jax.jit`'s."""
    traceable = step if hasattr(step, "trace") else jax.jit(step)
    return traceable.trace(*args, **kwargs)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Place:
    """The surroundings of the equations that are read: mesh axes, loops and branches, name scopes."""

    axis_sizes: dict[str, int] = field(default_factory=dict)
    path: tuple[Loop | Branch, ...] = ()
    scope: str = ""
    automatic: tuple[str, ...] = ()

    def inside(self, step: Loop | Branch) -> "_Place":
        return replace(self, path=(*self.path, step))


def _walk(program: Program, place: _Place) -> Iterator[Collective]:
    """Yield the collectives of one program, with the leaves of each call combined."""
    run = _Run(place)
    for equation in program.equations:
        inner = bool(equation.op.bodies)
        call = None if inner else read(equation.op, place.axis_sizes)
        if call is not None:
            if not run.continues(equation, call):
                yield from run.flush()
            run.add(equation, call)
        elif inner or not rule_of(equation.name).casts:
            yield from run.flush()
            yield from _descend(equation, replace(place, scope=_scope(place, equation)))
    yield from run.flush()


def _descend(equation: Equation, place: _Place) -> Iterator[Collective]:
    """Yield the collectives of an equation's inner programs."""
    op = equation.op
    if equation.branches:
        yield from _branches(equation.branches, place)
        return
    if (scan := op.scan) is not None:
        place = place.inside(Loop(scan.options["length"], unroll=int(scan.options["unroll"])))
    elif op.loop is not None:
        place = place.inside(Loop())
    elif (mapped := op.mapped) is not None:
        place = _enter_shard_map(mapped, place)
    for body in equation.bodies:
        yield from _walk(body, place)


def _enter_shard_map(mapped: Mapped, place: _Place) -> _Place:
    """Bind the mesh: manual axes get sizes, other axes with several ranks are the partitioner's."""
    sizes, manual = mapped.axis_sizes, mapped.manual | set(place.axis_sizes)
    automatic = tuple(axis for axis, size in sizes.items() if axis not in manual and size > 1)
    bound = {axis: size for axis, size in sizes.items() if axis in manual}
    return replace(place, axis_sizes={**place.axis_sizes, **bound}, automatic=automatic)


def _branches(branches: Sequence[Program], place: _Place) -> Iterator[Collective]:
    """Yield the collectives of all branches; those in branches that another outweighs are not counted."""
    each = [list(_walk(branch, place.inside(Branch(index, len(branches))))) for index, branch in enumerate(branches)]
    weights = [sum(entry.step_wire_bytes for entry in entries if entry.counted) for entries in each]
    heaviest = weights.index(max(weights))
    for index, entries in enumerate(each):
        yield from entries if index == heaviest else (replace(entry, counted=False) for entry in entries)


def _scope(place: _Place, equation: Equation) -> str:
    """The full name stack: an inner program's equations name only their part."""
    return "/".join(part for part in (place.scope, str(equation.op.scopes)) if part)


class _Run:
    """Consecutive equations that came from one call on a tree: one source line, collective and scope."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.calls: list[Call] = []
        self.key: Any = None
        self.outputs: set[int] = set()
        self.scope = ""

    def continues(self, equation: Equation, call: Call) -> bool:
        """Whether an equation has the run's source position, collective and scope, and is independent of its results."""
        return self.key == self._key(equation, call) and self.outputs.isdisjoint(equation.read)

    def add(self, equation: Equation, call: Call) -> None:
        self.key, self.scope = self._key(equation, call), _scope(self.place, equation)
        self.calls.append(call)
        self.outputs.update(equation.outputs)

    def flush(self) -> Iterator[Collective]:
        """Yield the run as one `Collective` per dtype."""
        for dtype in dict.fromkeys(call.dtype for call in self.calls):
            yield self._collective([call for call in self.calls if call.dtype == dtype])
        self.calls, self.key, self.outputs = [], None, set()

    def _key(self, equation: Equation, call: Call) -> Any:
        return equation.name, call.axes, call.group_size, _scope(self.place, equation), equation.op.traceback

    def _collective(self, calls: list[Call]) -> Collective:
        first = calls[0]
        label, padding = label_of(self.scope, first.kind)
        scalars = SCALARS if all(call.elements <= 1 for call in calls) else ""
        return Collective(
            kind=first.kind,
            op=first.op,
            axes=first.axes,
            group_size=first.group_size,
            dtype=first.dtype,
            itemsize=first.itemsize,
            leaf_elements=tuple(call.elements for call in calls),
            path=self.place.path,
            label=label or scalars,
            scope=self.scope,
            padding=min(padding, sum(call.elements for call in calls)),
            every=period_of(self.scope),
            automatic=self.place.automatic,
        )
