"""Count the collectives of a traced program: exact, with axes, loops and labels, and without any device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from axonml_jax.compat.jaxpr import is_jaxpr, live
from axonml_jax.compat.operation import Mapped
from axonml_jax.ledger.communicating import Call, read
from axonml_jax.ledger.entry import Branch, Collective, Loop
from axonml_jax.ledger.label import SCALARS, label_of, period_of
from axonml_jax.program.program import Equation, Program, no_calls, read_program
from axonml_jax.program.rules import rule_of


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
    """Where the walk stands: what encloses the equations it reads."""

    axis_sizes: dict[str, int] = field(default_factory=dict)
    path: tuple[Loop | Branch, ...] = ()
    scope: str = ""
    automatic: tuple[str, ...] = ()

    def inside(self, step: Loop | Branch) -> "_Place":
        return replace(self, path=(*self.path, step))


def _walk(program: Program, place: _Place) -> Iterator[Collective]:
    """The collectives of one program, joining the leaves of each call."""
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
    """The collectives of an equation's inner programs (jit, checkpoint, custom derivatives: simply those)."""
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
    """Bind the mesh: its manual axes have sizes, the others of more than one rank are the partitioner's."""
    sizes, manual = mapped.axis_sizes, mapped.manual | set(place.axis_sizes)
    automatic = tuple(axis for axis, size in sizes.items() if axis not in manual and size > 1)
    bound = {axis: size for axis, size in sizes.items() if axis in manual}
    return replace(place, axis_sizes={**place.axis_sizes, **bound}, automatic=automatic)


def _branches(branches: Sequence[Program], place: _Place) -> Iterator[Collective]:
    """Every branch of a conditional; those that another branch outweighs are not counted."""
    each = [list(_walk(branch, place.inside(Branch(index, len(branches))))) for index, branch in enumerate(branches)]
    weights = [sum(entry.step_wire_bytes for entry in entries if entry.counted) for entries in each]
    heaviest = weights.index(max(weights))
    for index, entries in enumerate(each):
        yield from entries if index == heaviest else (replace(entry, counted=False) for entry in entries)


def _scope(place: _Place, equation: Equation) -> str:
    """The whole name stack: an inner program's equations name only their own part."""
    return "/".join(part for part in (place.scope, str(equation.op.scopes)) if part)


class _Run:
    """Neighbouring equations that one call on a tree was bound to."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.calls: list[Call] = []
        self.key: Any = None
        self.outputs: set[int] = set()
        self.scope = ""

    def continues(self, equation: Equation, call: Call) -> bool:
        """Same source position, collective and scope as the run's, and independent of its results."""
        return self.key == self._key(equation, call) and self.outputs.isdisjoint(equation.read)

    def add(self, equation: Equation, call: Call) -> None:
        self.key, self.scope = self._key(equation, call), _scope(self.place, equation)
        self.calls.append(call)
        self.outputs.update(equation.outputs)

    def flush(self) -> Iterator[Collective]:
        """The run as one `Collective` per dtype."""
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
