"""What the fields of a manifest may hold: a file that somebody else has written is not believed."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import jax.numpy as jnp

from axonml_jax.checkpoint.plain_files import is_whole

_INT64 = 2**63
_SHOWN = 10


def wrong_fields(content: Mapping[str, Any]) -> list[str]:
    """A line for everything that is not as `Manifest.write` writes it; empty for a manifest."""
    lines = [f"unknown field {name!r}" for name in content if name not in _RULES]
    lines += [f"missing field {name!r}" for name in _RULES if name not in content]
    for name, rule in _RULES.items():
        lines += rule(content[name]) if name in content else ()
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more"]


def _each(field: str, value: Any, problem: Callable[[str, Any], str | None]) -> Iterator[str]:
    """What is wrong with every entry of an object, or that it is none."""
    if not isinstance(value, dict):
        yield f"{field} must be an object"
        return
    for name, each in value.items():
        if said := problem(name, each):
            yield f"{field}[{name!r:.120}] {said}"


def _step(value: Any) -> Iterator[str]:
    if value is not None and not is_whole(value, below=_INT64):
        yield f"step={value!r:.60} must be a whole number or null"


def _data(value: Any) -> Iterator[str]:
    if not isinstance(value, dict | None):
        yield "data must be an object or null"


def _entry(_: str, entry: Any) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"shape", "dtype", "key"}:
        return f"must be an object with dtype, key and shape, not {entry!r:.60}"
    shape, key = entry["shape"], entry["key"]
    if not isinstance(shape, list) or not all(is_whole(size, below=_INT64) for size in shape):
        return f"has shape={shape!r:.60}, which must be a list of whole numbers"
    if not _is_dtype(entry["dtype"]):
        return f"has dtype={entry['dtype']!r:.60}, which must name one of numbers"
    return None if key is None or isinstance(key, str) else f"has key={key!r:.60}, which must be text or null"


def _is_dtype(name: Any) -> bool:
    try:
        dtype = jnp.dtype(name) if isinstance(name, str) else None
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype is not None and dtype.name == name and (jnp.issubdtype(dtype, jnp.number) or dtype.name == "bool")


def _metric(_: str, metric: Any) -> str | None:
    try:
        fits = isinstance(metric, int | float) and not isinstance(metric, bool) and float(metric) is not None
    except OverflowError:
        fits = False
    return None if fits else f"must be a number, not {metric!r:.60}"


def _file(name: str, said: Any) -> str | None:
    if problem := _path(name):
        return problem
    fits = isinstance(said, list) and len(said) == 2 and is_whole(said[0]) and is_whole(said[1], below=2**32)
    return None if fits else f"must be a size in bytes and a CRC-32, not {said!r:.60}"


def _path(name: str) -> str | None:
    """Why a path may not be a file's of a checkpoint."""
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        return "leads out of the checkpoint"
    whole = name and str(PurePosixPath(name)) == name != "." and "\0" not in name
    return None if whole else "is no path of a file"


_RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "step": _step,
    "entries": lambda value: _each("entries", value, _entry),
    "data": _data,
    "metrics": lambda value: _each("metrics", value, _metric),
    "about": lambda value: _each("about", value, lambda *_: None),
    "files": lambda value: _each("files", value, _file),
}
