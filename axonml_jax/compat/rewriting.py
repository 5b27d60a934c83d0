"""Equations written in the place of others inside a traced program, wherever they are; nothing is traced anew."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p, transpose_p
from jax.lax import optimization_barrier_p

from axonml_jax.compat.jaxpr import Literal
from axonml_jax.compat.operation import Operation

At = Callable[[Operation, "Reader", "Writer"], bool]
"""`at(operation, reader, writer)`: whether the writer has written something that gives the operation's result."""

Reader = Callable[[], Operation | None]
"""`reader()`: the one operation that reads the result; None: several do, or it is returned."""

_OPEN = frozenset(("jit", "closed_call", "scan", "while", "cond", "remat2", "shard_map"))


class Writer:
    """Writes equations that come in the place of one with one result; the last one defines that result.

    Args:
      eqn: JAX's equation.
    """

    def __init__(self, eqn: JaxprEqn):
        self._eqn = eqn
        self._written: list[JaxprEqn] = []

    def transpose(self, x: Any, permutation: Sequence[int]) -> Any:
        """A value with its dims in another order."""
        return self._write(transpose_p, x, permutation=tuple(permutation))

    def barrier(self, x: Any) -> Any:
        """A value across which the compiler merges nothing (`compat/barrier.py`)."""
        return self._write(optimization_barrier_p, x)

    def product(self, a: Any, b: Any, **options: Any) -> Any:
        """`jax.lax.dot_general` of two values."""
        return self._write(dot_general_p, a, b, **options)

    def _write(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        made, _ = primitive.abstract_eval(*(x.aval for x in operands), **params)
        made = made[0] if primitive.multiple_results else made
        result = Var(operands[0].aval.update(shape=made.shape, sharding=made.sharding))
        new = {"primitive": primitive, "invars": list(operands), "outvars": [result], "params": params}
        self._written.append(self._eqn.replace(**new))
        return result

    def equations(self) -> list[JaxprEqn]:
        """What was written, of which the last defines the result."""
        *others, last = self._written
        return [*others, last.replace(outvars=list(self._eqn.outvars))]


def rewritten(jaxpr: Any, at: At, *, where: Callable[[Operation], bool]) -> Any:
    """A jaxpr with other equations in the place of some; the same object where there is none to change.

    Args:
      jaxpr: what `trace` returns.
      at: asked at every equation that has one result and no body.
      where: whether equations in the bodies of one are asked about too, of loops, branches, calls and `shard_map`s.
    """
    return _Rewriting(at, where).of(jaxpr)


class _Rewriting:
    def __init__(self, at: At, where: Callable[[Operation], bool]):
        self.at, self.where = at, where
        self._known: dict[int, tuple[Any, Any]] = {}  # what is called several times stays one

    def of(self, value: Any) -> Any:
        """Of a jaxpr, or of a tuple of some, itself where nothing changes; anything else as it is."""
        if isinstance(value, tuple):
            new = tuple(map(self.of, value))
            return value if all(a is b for a, b in zip(new, value, strict=True)) else new
        if not isinstance(value, (ClosedJaxpr, Jaxpr)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._jaxpr(value)
        return self._known[id(value)][1]

    def _jaxpr(self, jaxpr: Any) -> Any:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        readers = functools.cache(lambda: _readers(inner))
        equations = [new for eqn in inner.eqns for new in self._equation(eqn, readers)]
        if len(equations) == len(inner.eqns) and all(a is b for a, b in zip(equations, inner.eqns, strict=True)):
            return jaxpr
        kept = inner.replace(eqns=equations)
        closed = isinstance(jaxpr, ClosedJaxpr) and not isinstance(jaxpr, Jaxpr)
        return ClosedJaxpr(kept, jaxpr.consts) if closed else kept

    def _equation(self, eqn: JaxprEqn, readers: Callable[[], dict[Var, list[Any]]]) -> list[JaxprEqn]:
        op = Operation(eqn)
        if op.bodies:
            if op.name not in _OPEN or not self.where(op):
                return [eqn]
            new = {key: self.of(value) for key, value in eqn.params.items()}
            changed = any(new[key] is not value for key, value in eqn.params.items())
            return [eqn.replace(params=new) if changed else eqn]
        writer = Writer(eqn)

        def reader() -> Operation | None:
            found = readers().get(op.results[0], ())
            return Operation(found[0]) if len(found) == 1 and found[0] is not None else None

        changes = len(op.results) == 1 and self.at(op, reader, writer)
        return writer.equations() if changes else [eqn]


def _readers(jaxpr: Any) -> dict[Var, list[Any]]:
    """The equations that read each variable of an open jaxpr; None where it is returned."""
    found: dict[Var, list[Any]] = {}
    for eqn in (*jaxpr.eqns, None):
        for atom in jaxpr.outvars if eqn is None else eqn.invars:
            if not isinstance(atom, Literal):
                found.setdefault(atom, []).append(eqn)
    return found
