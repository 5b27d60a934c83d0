"""What a compiled function reads from outside its arguments: who holds these values, and whether they have changed."""

import dataclasses
import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.core import Tracer

from axonml_jax.base import some_of
from axonml_jax.sharding.layout import is_deleted

_NOT_LOOKED_INTO = {*sys.stdlib_module_names, "jax", "jaxlib", "flax", "optax", "numpy", "axonml_jax"}
"""Packages whose functions, classes and modules hold no arrays of a user's."""

_MOST = 20_000
"""The most steps that a search for the holders of a program's constants follows."""

_MOST_BYTES = 2**20
"""How many bytes of NumPy's arrays, the smallest first, are compared before every call."""

_NOT_THERE = (AttributeError, LookupError, TypeError, ValueError)
_GONE = object()


class Held(NamedTuple):
    """One step on the way from a function to an array that it reads: `get(holder, key) is value` while nothing changes.

    Attributes:
      name: the name of the value, as the function's code would write it, and what the first name in it is.
    """

    get: Callable[[Any, Any], Any]
    holder: Any
    key: Any
    value: Any
    name: str


class Outside:
    """The arrays outside of a function that its compiled programs have as constants, and who holds them.

    Closures, globals that code names, defaults, `functools.partial` and `self` hold them, and in these modules, variables,
    containers, and attributes that code names. Before every call it is asked whether they still hold the same objects, and
    whether arrays of NumPy, up to `_MOST_BYTES` together, still have the same bytes.

    Args:
      fun: the user's function.
    """

    def __init__(self, fun: Any):
        self.fun = fun
        self._constants: dict[int, Any] = {}
        self._held: tuple[Held, ...] = ()
        self._from: dict[int, list[Held]] = {}  # by their holder
        self._bytes: dict[int, tuple[np.ndarray, bytes]] = {}

    def note(self, constants: Iterable[Any]) -> None:
        """Remembers the constants of a program that was traced just now, and searches for who holds them."""
        self._constants |= {id(x): x for x in constants if _is_array(x)}
        self._held = _Search(self.fun, self._constants.values()).run() if self._constants else ()
        self._from = {}
        for held in self._held:
            self._from.setdefault(id(held.holder), []).append(held)
        before, self._bytes, room = self._bytes, {}, _MOST_BYTES
        for x in sorted((x for *_, x, _ in self._held if isinstance(x, np.ndarray)), key=lambda x: x.nbytes):
            if id(x) in self._bytes or x.nbytes > room:
                continue
            room -= x.nbytes
            array, kept = before.get(id(x), (None, b""))
            self._bytes[id(x)] = (x, kept if array is x else x.tobytes())

    def changed(self) -> list[str]:
        """Names of values that have changed; nearly always none, at the price of comparing identities, and small arrays."""
        in_place = {key for key, (x, kept) in self._bytes.items() if x.tobytes() != kept}
        try:
            if all(get(holder, key) is value for get, holder, key, value, _ in self._held):
                return list(dict.fromkeys(held.name for held in self._held if id(held.value) in in_place))
        except _NOT_THERE:
            pass
        renewed: dict[Any, Any] = {}
        found = [name for held in self._held for name in self._differing(held, held.holder, renewed)]
        found += [held.name for held in self._held if id(held.value) in in_place]
        if not found:  # other objects with the same values in them
            self._constants = {id(x): x for x in (renewed.get(key, x) for key, x in self._constants.items())}
            self.note(())
        return list(dict.fromkeys(found))

    def refuse_changed(self) -> None:
        """Refuse to run a program whose constants are not what the function would read now.

        Raises:
          ValueError: naming what was changed, and the remedies.
        """
        if not (names := self.changed()):
            return
        raise ValueError(
            f"{getattr(self.fun, '__name__', type(self.fun).__name__)} reads values from outside that changed since it was "
            f"compiled: {some_of(names)}. A compiled program keeps what it read then as constants. For two networks that train "
            "in turn, make one model of both and two trainers of it, each with optax.multi_transform and optax.set_to_zero() "
            "for the other network (docs/guides/losses.md); give numbers, and arrays with rows, in the batch. For a value that "
            "changes rarely, make a new trainer, new = model.trainer(tx, loss_fn) with new.state = trainer.state, or call "
            "model.value_and_grad(loss_fn) again"
        )

    def _differing(self, held: Held, holder: Any, renewed: dict[Any, Any]) -> Iterator[str]:
        """Names of arrays behind a step that differ where `holder` has them; others of equal values are put into `renewed`."""
        try:
            now = held.get(holder, held.key)
        except _NOT_THERE:
            now = _GONE
        asked = id(held), id(holder)
        if now is held.value or renewed.get(asked) is holder:
            return
        renewed[asked] = holder
        if now is _GONE or (_is_array(held.value) and not _equal(held.value, now)):
            yield held.name
        elif _is_array(held.value):
            renewed[id(held.value)] = now
        else:
            for each in self._from[id(held.value)]:
                yield from self._differing(each, now, renewed)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and not isinstance(x, Tracer)


def _is_on_host(x: Any) -> bool:
    """Whether a value is an array that is not deleted and that this process can read in full."""
    return _is_array(x) and not is_deleted(x) and getattr(x, "is_fully_addressable", True)


def _equal(old: Any, new: Any) -> bool:
    """Whether two arrays have equal bytes, as far as this process can tell."""
    if not (_is_on_host(old) and _is_on_host(new)) or (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        old, new = jax.random.key_data(old), jax.random.key_data(new)
    return np.asarray(old).tobytes() == np.asarray(new).tobytes()


class _Search:
    """Searches for all ways from a function to arrays that it reads.

    Args:
      fun: the function at which every way begins.
      arrays: the arrays at which ways end; for one of NumPy, which JAX may have copied, any array of equal values is an end.
    """

    def __init__(self, fun: Any, arrays: Iterable[Any]):
        self._arrays = {id(x) for x in arrays if isinstance(x, jax.Array)}
        self._numbers = [x for x in arrays if isinstance(x, np.ndarray)]
        self._steps: dict[tuple, Held] = {}
        self._names = {"__call__"}
        self._by_name: list[tuple[Any, str, str]] = []  # attributes of these count where code names them
        self._seen, self._queue = {id(fun)}, deque([(fun, "", "")])

    def run(self) -> tuple[Held, ...]:
        """Runs the search, and returns the steps of all ways that end at one of the arrays."""
        before = -1
        while self._queue or before < len(self._steps):
            before = len(self._steps)
            while self._queue:
                self._look_into(*self._queue.popleft())
            for x, name, what in self._by_name:
                self._follow_attributes(x, name, what, self._names.intersection(_attributes(x)))
        return self._leading()

    def _leading(self) -> tuple[Held, ...]:
        ends = {id(step.value) for step in self._steps.values() if self._is_wanted(step.value)}
        while True:
            kept = [step for step in self._steps.values() if id(step.value) in ends]
            more = ends | {id(step.holder) for step in kept}
            if len(more) == len(ends):
                return tuple(kept)
            ends = more

    def _is_wanted(self, x: Any) -> bool:
        same = lambda own: own.shape == x.shape and np.array_equal(np.asarray(own), np.asarray(x).astype(own.dtype))
        return id(x) in self._arrays or (_is_on_host(x) and any(map(same, self._numbers)))

    def _follow(self, get: Callable, holder: Any, key: Any, name: str, what: str) -> Any:
        """Takes one step, and returns what it leads to, which is looked into later, once."""
        try:
            value = get(holder, key)
            if get(holder, key) is not value or len(self._steps) >= _MOST:
                return None
        except _NOT_THERE:  # an empty cell, a name among Python's own
            return None
        if isinstance(value, (str, bytes, int, float, complex, type(None))):
            return None
        if isinstance(value, (FunctionType, type, ModuleType)) and _package(value) in _NOT_LOOKED_INTO:
            return None
        self._steps.setdefault((id(holder), key), Held(get, holder, key, value, f"{name} ({what})" if what else name))
        if id(value) not in self._seen and not _is_array(value):
            self._seen.add(id(value))
            self._queue.append((value, name, what))
        return value

    def _look_into(self, x: Any, name: str, what: str) -> None:
        """Takes the steps to everything that code may read in one object."""
        if isinstance(x, FunctionType):
            self._look_into_function(x)
        elif isinstance(x, MethodType):
            self._follow(getattr, x, "__func__", name, what)
            self._follow(getattr, x, "__self__", "self", "of a bound method")
        elif isinstance(x, functools.partial):
            self._follow(getattr, x, "func", name, what)
            for key in ("args", "keywords"):
                self._follow(getattr, x, key, key, "of a functools.partial")
        elif isinstance(x, (list, tuple, dict)):
            for key in x if isinstance(x, dict) else range(len(x)):
                self._follow(operator.getitem, x, key, f"{name}[{key!r}]", what)
        else:
            self._look_into_object(x, name, what)

    def _look_into_function(self, fun: FunctionType) -> None:
        code, named = fun.__code__, _names(fun.__code__)
        self._names |= named
        cells = self._follow(getattr, fun, "__closure__", "", "") or ()
        for i, free in enumerate(code.co_freevars if cells else ()):
            cell = self._follow(operator.getitem, cells, i, "", "")
            self._follow(getattr, cell, "cell_contents", free, "a variable of the enclosing function")
        self._seen.add(id(fun.__globals__))  # of which only these are read
        names = self._follow(getattr, fun, "__globals__", "", "")
        for each in named.intersection(names):
            self._follow(operator.getitem, names, each, each, "a global")
        for key in ("__defaults__", "__kwdefaults__"):
            self._follow(getattr, fun, key, fun.__name__, "a default of the function")
        self._follow(getattr, fun, "__dict__", fun.__name__, "an attribute of the function")

    def _look_into_object(self, x: Any, name: str, what: str) -> None:
        """Follows all attributes of modules, states and callables; of other objects those that code names."""
        kind = type(x)
        if not isinstance(x, (type, ModuleType)):
            self._follow(getattr, x, "__class__", "", "")
        if _package(kind) == "flax" or isinstance(x, (nnx.Pytree, linen.Module)) or dataclasses.is_dataclass(kind):
            self._follow_attributes(x, name, what, _attributes(x))
        elif hasattr(
            kind, "checkpoint_leaves"
        ):  # a parallel model or a trainer: `model.module` is made of its variables
            self._follow_attributes(x, name, what, {"variables"})
            self._by_name.append((x, name, what))
        elif callable(x) and not isinstance(x, type):
            self._follow_attributes(x, name, what, _attributes(x))
        else:
            self._by_name.append((x, name, what))

    def _follow_attributes(self, x: Any, name: str, what: str, keys: Iterable[str]) -> None:
        for key in keys:
            self._follow(getattr, x, key, name if key.startswith("_") else f"{name}.{key}".removeprefix("."), what)


def _attributes(x: Any) -> set[str]:
    slots = {each for kind in type(x).__mro__ for each in getattr(kind, "__slots__", ())}
    return slots.union(getattr(x, "__dict__", ()))


def _names(code: CodeType) -> set[str]:
    """The names that code uses, with those of the functions defined in it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _package(x: Any) -> str:
    """The top-level package of a function, a class or a module."""
    named = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return str(named).partition(".")[0]
