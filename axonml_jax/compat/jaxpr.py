"""Traced programs as JAX keeps them: jaxprs, open or closed, in every supported version; only this folder looks into one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import Literal as Literal  # a constant written into a jaxpr: a `val` and an `aval`, but no hash
from jax.interpreters.partial_eval import dce_jaxpr

from axonml_jax._types import PyTree


class Traced(NamedTuple):
    """A function traced on given arguments: its jaxpr over flat arguments, and the structure of what it returns."""

    jaxpr: Any
    out_tree: Any

    @property
    def made(self) -> list[Any]:
        """The abstract values of what it returns, flat."""
        return [atom.aval for atom in _inner(self.jaxpr).outvars]


class Opened(NamedTuple):
    """The parts of a jaxpr.

    Attributes:
      inputs: its arguments; variables, which are compared by identity and have an `aval`.
      constants: pairs of a variable and the value that it stands for.
      equations: as JAX keeps them; `Operation` reads one.
      outputs: variables or literals.
    """

    inputs: Sequence[Any]
    constants: Sequence[tuple[Any, Any]]
    equations: Sequence[Any]
    outputs: Sequence[Any]


def trace(fun: Callable[..., PyTree], *args: PyTree) -> Traced:
    """Trace `fun` on `args` (arrays or tracers), under whatever mesh axes are bound around the call."""
    jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return Traced(jaxpr, jax.tree.structure(shape))


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, open or closed (JAX 0.12 made one type of both), or has one, as a traced `jax.jit`."""
    return isinstance(_inner(value), Jaxpr)


def jaxprs_among(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The jaxprs among an equation's parameters, as they are there: closed ones stay closed."""
    found = []
    for value in params.values():
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append(value)
        elif isinstance(value, tuple):
            found += [each for each in value if isinstance(each, (ClosedJaxpr, Jaxpr))]
    return tuple(found)


def opened(jaxpr: Any) -> Opened:
    """The parts of a jaxpr; the constants of an open one have no values: None stands for them."""
    inner = _inner(jaxpr)
    values = list(getattr(jaxpr, "consts", ())) or [None] * len(inner.constvars)
    return Opened(inner.invars, list(zip(inner.constvars, values, strict=True)), inner.eqns, inner.outvars)


def live(jaxpr: Any) -> Any:
    """A jaxpr without what no result needs, as it is lowered; its inputs stay, and its constants where it is closed."""
    inner = _inner(jaxpr)
    kept, _ = dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return kept if isinstance(jaxpr, Jaxpr) or not isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(kept, jaxpr.consts)


def _inner(jaxpr: Any) -> Any:
    """The open jaxpr in a closed one."""
    return getattr(jaxpr, "jaxpr", jaxpr)
