"""Attributes of an NNX model's modules that a loss, or a call, sets besides variables: `model.eval()`, `model.scale = 2.0`."""

import functools
import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flax import nnx

from axonml_jax.base import is_array

Path = tuple[Any, ...]

_FLAX_OWN = ("_pytree__", "_object__")
"""Prefixes of the attributes that Flax keeps on modules."""

_DEPTH = 8
"""The depth to which functions, tuples and mappings are looked into."""


@dataclass(frozen=True, eq=False)
class Attribute:
    """A setting of a module: an attribute that has neither modules nor variables nor arrays in it.

    Attributes:
      path: the path of the module.
      name: the name of the attribute, which the module had before.
      value: the value that it has now.
    """

    path: Path
    name: str
    value: Any

    def same(self, other: "Attribute") -> bool:
        """Whether another setting is equal."""
        return (self.path, self.name) == (other.path, other.name) and _alike(self.value, other.value)


@dataclass(frozen=True)
class Changed:
    """The attributes of modules that have changed.

    Attributes:
      settings: changed attributes that were settings before and still are.
      others: all other changed attributes: the module's path, and the attribute's name.
    """

    settings: tuple[Attribute, ...]
    others: tuple[tuple[Path, str], ...]


class Settings:
    """The attributes of a model's modules as they are now, to be compared with later.

    Args:
      nodes: the nodes of the model, with their paths (`nnx.iter_graph`).
    """

    def __init__(self, nodes: Iterable[tuple[Path, Any]]):
        self._known = [(path, vars(x), dict(vars(x))) for path, x in nodes if isinstance(x, nnx.Pytree)]
        values = (x for _, _, own in self._known for name, x in own.items() if not name.startswith(_FLAX_OWN))
        found = ((x, () if _is_container(x) else tuple(vars(x))) for x in values if _has_content(x))
        self._contents = [(x, names, _held(x, names)) for x, names in found]

    def changed(self, *, variables: bool = True, also: Container[tuple[Path, str]] = ()) -> Changed:
        """Returns the attributes that have been set since this object was made.

        Args:
          variables: False leaves out attributes that hold another `nnx.Variable` now.
          also: settings, by module path and name, that are returned although they are as before.
        """
        settings, others = [], []
        for path, now, before in self._known:
            for name in [*now, *(name for name in before if name not in now)]:
                value, old = now.get(name, self), before.get(name, self)
                same = value is old and (path, name) not in also
                if same or name.startswith(_FLAX_OWN) or (not variables and isinstance(value, nnx.Variable)):
                    continue
                if self not in (value, old) and is_setting(value) and is_setting(old):
                    settings.append(Attribute(path, name, value))
                else:
                    others.append((path, name))
        return Changed(tuple(settings), tuple(others))

    def same_contents(self) -> bool:
        """Whether mutable values in attributes, which copies of the model share, have the contents that they had."""
        return all(_alike(_held(x, names), before) for x, names, before in self._contents)


@contextmanager
def having(bound: Any, attributes: Sequence[Attribute]) -> Iterator[None]:
    """Context in which a bound model has these attributes; afterwards it has its own again.

    They are written to the modules' `__dict__`: NNX refuses `setattr` in another trace than the one where the model was bound,
    as in the body of a loop.
    """
    places = [(vars(module_at(bound, each.path)), each.name) for each in attributes]
    old = [own[name] for own, name in places]
    for (own, name), each in zip(places, attributes, strict=True):
        own[name] = each.value
    try:
        yield
    finally:
        for (own, name), value in zip(places, old, strict=True):
            own[name] = value


def module_at(bound: Any, path: Path) -> Any:
    """The module at a path of a model."""
    owner = bound
    for part in path:
        owner = owner[part] if isinstance(part, int) or not hasattr(owner, str(part)) else getattr(owner, part)
    return owner


def is_setting(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value holds no modules, variables or arrays, nor functions that close over some."""
    inner = _inner(value)
    if inner is None:
        return not (is_array(value) or isinstance(value, (nnx.Variable, nnx.Pytree)))
    return depth > 0 and all(is_setting(each, depth - 1) for each in inner)


def _alike(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """Whether two settings are equal, where code that is traced twice has made each of them."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, complex, str, bytes)):
        return a == b
    if inspect.isfunction(a) and a.__code__ is not b.__code__:
        return False
    first, second = _inner(a), _inner(b)
    if first is None or second is None or len(first) != len(second) or not depth:
        return False
    return all(_alike(x, y, depth - 1) for x, y in zip(first, second, strict=True))


def _inner(value: Any) -> list[Any] | None:
    """The values in a value that is looked into; None: it is a leaf."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, value.keywords]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        return [*(_cell(each) for each in value.__closure__ or ()), *(value.__defaults__ or ()), value.__kwdefaults__]
    if isinstance(value, Mapping):
        return [each for item in value.items() for each in item]
    return list(value) if isinstance(value, (tuple, list)) else None


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that is not bound yet
        return None


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, Mapping, set))


def _has_content(value: Any) -> bool:
    """Whether a value can be changed in place: lists, mappings and sets, and objects of the user's classes."""
    apart = callable(value) or isinstance(value, (nnx.Variable, nnx.Pytree)) or inspect.ismodule(value)
    return _is_container(value) or (not apart and not is_array(value) and hasattr(value, "__dict__"))


def _held(value: Any, names: Sequence[str]) -> Any:
    """A copy of a value's contents; of an object its attributes with these names, as it may add others lazily."""
    return _content(value) if _is_container(value) else tuple(_content(vars(value).get(name)) for name in names)


def _content(value: Any, depth: int = _DEPTH) -> Any:
    if isinstance(value, set):
        return tuple(sorted(value, key=repr))
    if not depth or not isinstance(value, (list, tuple, Mapping)):
        return value
    return tuple(_content(x, depth - 1) for x in _inner(value) or ())
