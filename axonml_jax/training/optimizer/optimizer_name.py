"""What errors call an optimizer: the transformations it is made of, and the optax function that the user wrote."""

import inspect
import re
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import optax

_UPDATE = re.compile(r"^(?:.*\.)?(\w+)\.<locals>\.update\w*$")
_WRAPPERS = frozenset(("with_extra_args_support", "apply"))


def written(tx: optax.GradientTransformation) -> str:
    """An optimizer by the functions that made it.

    >>> written(optax.chain(optax.clip(1.0), optax.sgd(0.1)))
    'chain(clip, chain(identity, scale))'
    """
    name = _made_by(tx.update)
    parts = list(_parts(tx.update))
    if name in _WRAPPERS and parts:
        return parts[0]
    return f"{name}({', '.join(parts)})" if parts else name


def culprit(tx: optax.GradientTransformation, frames: Sequence[str]) -> str:
    """The member of an optimizer whose update an operation is in, and what of optax it may have come with.

    Args:
      tx: the optimizer.
      frames: names of the functions around the operation, innermost first.
    """
    names = [found[1] for frame in frames if (found := _UPDATE.match(frame)) and found[1] not in _WRAPPERS]
    whole = written(tx)
    if not names:
        return f"the optimizer {whole}"
    sources = [path for path in _aliases(names[0]) if path.rsplit(".", 1)[-1] != names[0]]
    of = f" (of {' or '.join(sources)})" if 0 < len(sources) <= 3 else ""
    return f"{names[0]}{of}" if whole == names[0] else f"{names[0]}{of} in the optimizer {whole}"


def _aliases(member: str) -> list[str]:
    """The public functions of optax that use a transformation."""
    found = []
    for module in (optax, optax.contrib):
        for name, value in sorted(vars(module).items()):
            code = getattr(inspect.unwrap(value), "__code__", None) if isinstance(value, FunctionType) else None
            if code is not None and member in code.co_names:
                found.append(f"{module.__name__}.{name}")
    return found


def _made_by(update: Any) -> str:
    name = getattr(update, "__qualname__", repr(update))
    return name.split(".<locals>")[0]


def _parts(update: Any) -> Iterator[str]:
    """What the transformations inside one are called, from what its function closes over."""
    for cell in getattr(update, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _named(value)


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, optax.GradientTransformation):
        yield written(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _named(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _named(each)
    elif isinstance(value, FunctionType) and _UPDATE.match(value.__qualname__):
        yield written(optax.GradientTransformation(lambda params: None, value))  # pyright: ignore[reportArgumentType]
