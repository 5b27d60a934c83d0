"""Count the collectives of a traced program: exact, with axes, loops and labels, and without any device."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from axonml_jax.collectives.varying import CASTS
from axonml_jax.ledger.entry import Branch, Collective, Loop
from axonml_jax.ledger.label import SCALARS, label_of
from axonml_jax.ledger.primitives import Call, read


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
    jaxpr = program if hasattr(_open(program), "eqns") else trace(program, *args, **kwargs).jaxpr
    place = _Place(axis_sizes=dict(axis_sizes or {}))
    return tuple(_walk(_without_dead_code(_open(jaxpr)), place))


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


def _open(jaxpr: Any) -> Any:
    """A jaxpr without its constants: JAX 0.12 drops the difference between open and closed ones."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner if hasattr(inner, "eqns") else jaxpr


def _without_dead_code(jaxpr: Any) -> Any:
    live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def _walk(jaxpr: Any, place: _Place) -> Iterator[Collective]:
    """The collectives of one jaxpr, joining the leaves of each call."""
    run = _Run(place)
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        call = None if inner else read(eqn, place.axis_sizes)
        if call is not None:
            if not run.continues(eqn, call):
                yield from run.flush()
            run.add(eqn, call)
        elif inner or eqn.primitive.name not in CASTS:
            yield from run.flush()
            yield from _descend(eqn, inner, replace(place, scope=_scope(place, eqn)))
    yield from run.flush()


def _descend(eqn: Any, inner: list[Any], place: _Place) -> Iterator[Collective]:
    """The collectives of an equation's inner jaxprs (jit, checkpoint, custom derivatives: simply those)."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        yield from _branches(params["branches"], place)
        return
    if name == "scan":
        place = place.inside(Loop(params["length"], unroll=int(params["unroll"])))
    elif name == "while":
        place = place.inside(Loop())
    elif name == "shard_map":
        place = _enter_shard_map(params, place)
    for jaxpr in inner:
        yield from _walk(_open(jaxpr), place)


def _enter_shard_map(params: dict[str, Any], place: _Place) -> _Place:
    """Bind the mesh: its manual axes have sizes, the others of more than one rank are the partitioner's."""
    sizes = dict(params["mesh"].shape)
    manual = set(params["newly_manual_axes"]) | set(place.axis_sizes)
    automatic = tuple(axis for axis, size in sizes.items() if axis not in manual and size > 1)
    bound = {axis: size for axis, size in sizes.items() if axis in manual}
    return replace(place, axis_sizes={**place.axis_sizes, **bound}, automatic=automatic)


def _branches(branches: Any, place: _Place) -> Iterator[Collective]:
    """Every branch of a conditional; those that another branch outweighs are not counted."""
    each = [
        list(_walk(_open(branch), place.inside(Branch(index, len(branches))))) for index, branch in enumerate(branches)
    ]
    weights = [sum(entry.step_wire_bytes for entry in entries if entry.counted) for entries in each]
    heaviest = weights.index(max(weights))
    for index, entries in enumerate(each):
        yield from entries if index == heaviest else (replace(entry, counted=False) for entry in entries)


def _scope(place: _Place, eqn: Any) -> str:
    """The whole name stack: an inner jaxpr's equations name only their own part."""
    return "/".join(part for part in (place.scope, str(eqn.source_info.name_stack)) if part)


class _Run:
    """Neighbouring equations that one call on a tree was bound to."""

    def __init__(self, place: _Place) -> None:
        self.place = place
        self.calls: list[Call] = []
        self.key: Any = None
        self.outputs: set[int] = set()
        self.scope = ""

    def continues(self, eqn: Any, call: Call) -> bool:
        """Same source position, collective and scope as the run's, and independent of its results."""
        depends = any(id(var) in self.outputs for var in eqn.invars)
        return self.key == self._key(eqn, call) and not depends

    def add(self, eqn: Any, call: Call) -> None:
        self.key, self.scope = self._key(eqn, call), _scope(self.place, eqn)
        self.calls.append(call)
        self.outputs.update(id(var) for var in eqn.outvars)

    def flush(self) -> Iterator[Collective]:
        """The run as one `Collective` per dtype."""
        for dtype in dict.fromkeys(call.dtype for call in self.calls):
            yield self._collective([call for call in self.calls if call.dtype == dtype])
        self.calls, self.key, self.outputs = [], None, set()

    def _key(self, eqn: Any, call: Call) -> Any:
        info = eqn.source_info
        return (eqn.primitive.name, call.axes, call.group_size, _scope(self.place, eqn), info.traceback)

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
            automatic=self.place.automatic,
        )
