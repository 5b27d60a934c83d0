"""A stand-in for the model while a loss is traced: what it is called with is noted, and shapes alone are returned.

What a model does inside exists at a rank's shapes only: collectives, kernels, experts' capacities. So a call of the model, of
one of its methods or modules, is one equation of the loss's program, and it is made when that program is run on a rank's rows.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.base import is_array, named_leaves
from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.model_call import PRIMITIVE, Transformed, model_call
from axonml_jax.compat.row_keys import Drawn, drawn_by_rows
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.model.view import BoundLinen, Functional, Mode, Variables
from axonml_jax.program.program import Equation

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was noted.

    Attributes:
      path: of the module in the model; () is the model.
      method: its name.
      treedef: of its arguments.
      rest: their leaves, None in the place of arrays.
      given: the abstract values of the arrays.
      made: those of the results: arrays that are returned, then variables of the model that are changed.
      out_treedef, out_rest: of what is returned, likewise.
      changed: the paths of the changed variables.
      draws: what is drawn in it, where keys are those of rows (`compat/row_keys.py`).
    """

    path: Path
    method: str
    treedef: Any
    rest: tuple[Any, ...]
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    out_treedef: Any
    out_rest: tuple[Any, ...]
    changed: tuple[Path, ...]
    draws: tuple[Drawn, ...] = ()

    def alike(self, other: "Call") -> bool:
        """Whether another is the same call, perhaps at other shapes."""
        count = lambda call: (len(call.given), len(call.made))
        same = (self.path, self.method, self.treedef) == (other.path, other.method, other.treedef)
        return same and self.changed == other.changed and count(self) == count(other)

    def run(self, bound: Any, arrays: Sequence[Any]) -> list[Any]:
        """The results of the call of a bound model, on other arrays."""
        out = _invoke(bound, self.path, self.method, self.treedef, self.rest, arrays)
        after = variables_of(bound)
        return [*_arrays(out), *(x for path in self.changed for x in jax.tree.leaves(after[path]))]


@dataclass(eq=False)
class Calls:
    """The calls of one trace.

    Attributes:
      model, mode: as the model is bound.
      variables, key: on which.
      axes: the mesh axes that split the batch.
      noted: the calls, in order.
    """

    model: Functional
    mode: Mode
    variables: Variables
    key: jax.Array
    axes: tuple[str, ...]
    noted: list[Call] = field(default_factory=list)
    _there: dict[Path, Any] = field(default_factory=dict)

    @contextmanager
    def stand_in(self) -> Iterator[Any]:
        """The model as the loss gets it: its variables can be read, and calls are noted."""
        bound = self.model.bind(self.variables, self.key, self.mode)
        self._there = variables_of(bound)
        if isinstance(bound, BoundLinen):
            bound.__class__ = _linen_stand_in(self)
            yield bound
            return
        modules = _modules(bound)
        own = {id(module): (self, bound, path) for path, module in modules}
        for _, module in modules:
            module.__class__ = _nnx_stand_in(type(module))
        _STANDING.update(own)
        try:
            yield bound
        finally:
            for each in own:
                del _STANDING[each]

    def changed_by_loss(self, bound: Any) -> dict[Path, Any]:
        """The variables that the loss has changed itself, besides its calls of the model."""
        return {path: x for path, x in variables_of(bound).items() if self._differs(path, x)}

    def _differs(self, path: Path, x: Any) -> bool:
        old = jax.tree.leaves(self._there.get(path))
        return len(old) != len(jax.tree.leaves(x)) or any(
            a is not b for a, b in zip(old, jax.tree.leaves(x), strict=True)
        )

    def note(self, bound: Any, path: Path, method: str, args: tuple, kwargs: dict) -> Any:
        """Stand in for a call."""
        if self.changed_by_loss(bound):
            raise Transformed  # the real model would not have what the loss changed
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [jnp.asarray(x) for x in leaves if is_array(x)]
        rest = tuple(None if is_array(x) else x for x in leaves)
        seen: dict[str, Any] = {}

        def fun(variables: Variables, key: jax.Array, arrays: list) -> list:
            variables, key, arrays = vary((variables, key, arrays), self.axes)
            own = self.model.bind(variables, key, self.mode)
            before = variables_of(own)
            out = _invoke(own, path, method, treedef, rest, arrays)
            after = variables_of(own)
            new = {at: x for at, x in after.items() if at not in before or not _same(before[at], x)}
            seen.update(
                out=jax.tree.map(lambda x: None if is_array(x) else x, out), new=new, treedef=jax.tree.structure(out)
            )
            seen["rest"] = tuple(None if is_array(x) else x for x in jax.tree.leaves(out))
            return [*_arrays(out), *jax.tree.leaves(list(new.values()))]

        traced = trace(fun, self.variables, self.key, arrays)
        made, given = traced.made, tuple(jax.typeof(x) for x in arrays)
        drawn = drawn_by_rows(self.key, traced.jaxpr)
        out = seen["treedef"], seen["rest"]
        call = Call(path, method, treedef, rest, given, tuple(made), *out, tuple(seen["new"]), drawn)
        self.noted.append(call)
        results = model_call(len(self.noted) - 1, arrays, made)
        own = [tuple(varying_axes(aval) - set(self.axes)) for aval in made]
        results = iter([vary(x, axes) for x, axes in zip(results, own, strict=True)])
        out = call.out_treedef.unflatten([next(results) if x is None else x for x in call.out_rest])
        for at, like in seen["new"].items():
            _put(bound, at, jax.tree.map(lambda _: next(results), like))
        self._there = variables_of(bound)
        return out


def _same(a: Any, b: Any) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _arrays(out: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(out) if is_array(x)]


def _invoke(bound: Any, path: Path, method: str, treedef: Any, rest: Sequence[Any], arrays: Sequence[Any]) -> Any:
    given = iter(arrays)
    args, kwargs = treedef.unflatten([next(given) if x is None else x for x in rest])
    owner = bound
    for part in path:
        owner = owner[part] if isinstance(part, int) or not hasattr(owner, str(part)) else getattr(owner, part)
    return getattr(owner, method)(*args, **kwargs)


def calls_model(equation: Equation) -> bool:
    """Whether an equation of a traced loss is a call of the model, or has one in a program of its own."""
    return equation.name == PRIMITIVE or any(calls_model(each) for body in equation.bodies for each in body.equations)


# The two kinds of models


def _modules(bound: Any) -> list[tuple[Path, Any]]:
    return [(path, node) for path, node in nnx.iter_graph(bound) if isinstance(node, nnx.Module)]


def variables_of(bound: Any) -> dict[Path, Any]:
    """The values of a bound model's variables by path, random streams left out."""
    if isinstance(bound, BoundLinen):
        return {(name,): x for name, x in named_leaves({"params": bound.params, **bound.state}).items()}
    return {
        path: node.get_raw_value()
        for path, node in nnx.iter_graph(bound)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState)
    }


def put_variables(bound: Any, values: Mapping[Path, Any]) -> None:
    """Change variables of a bound model."""
    for path, value in values.items():
        _put(bound, path, value)


def _put(bound: Any, path: Path, value: Any) -> None:
    if isinstance(bound, BoundLinen):
        names = named_leaves(bound.state)
        leaves = [value if (name,) == path else leaf for name, leaf in names.items()]
        bound.state = jax.tree.unflatten(jax.tree.structure(bound.state), leaves)
        return
    node = dict(nnx.iter_graph(bound)).get(path)
    if not isinstance(node, nnx.Variable):  # one that the call has made, as `sow` does
        raise Transformed
    node.set_raw_value(value)


def _linen_stand_in(calls: Calls) -> type:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return calls.note(self, (), "__call__", args, kwargs)

    return type("BoundLinen", (BoundLinen,), {"__call__": __call__})


_STANDING: dict[int, tuple[Calls, Any, Path]] = {}
"""The modules that stand in for others now, by identity: whose calls are noted where, and under which path."""


@functools.cache
def _nnx_stand_in(cls: type) -> type:
    """A subclass of a module's class whose call and methods are noted, where arrays go in."""

    def noting(name: str, plain: Callable) -> Callable:
        @functools.wraps(plain)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _arrays((args, kwargs)):
                return plain(self, *args, **kwargs)
            if id(self) not in _STANDING:
                raise Transformed  # a copy that a transformation of NNX has made
            calls, bound, path = _STANDING[id(self)]
            return calls.note(bound, path, name, args, kwargs)

        return call

    public = (
        name for name in dir(cls) if name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
    )
    plain = {name: getattr(cls, name) for name in public if inspect.isfunction(inspect.getattr_static(cls, name))}
    own = {name: noting(name, function) for name, function in plain.items()}
    return type(cls.__name__, (cls,), {**own, "__module__": cls.__module__, "__qualname__": cls.__qualname__})
