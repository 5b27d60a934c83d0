"""Arrays by name in `safetensors` files, the format in which weights are published, with names mapped on the way."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from axonml_jax.model.named import named_arrays

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str | None] | None
"""Exact names by name, (regular expression, replacement) pairs applied in order, or a function (None leaves the array out)."""

_INDEX = ".safetensors.index.json"


def save_safetensors(
    path: str | os.PathLike,
    values: nnx.Module | Mapping[str, Any],
    *,
    rename: Rename = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write whole arrays, such as a `state_dict`'s, to one file. One process writes.

    Args:
      path: the file.
      values: an NNX module, a Linen module's variables, a nested state (of dicts, or an `nnx.State`), or arrays by name.
        Names are those of `state_dict`: paths such as `blocks/0/norm/scale`.
      rename: from these names to the file's.
      metadata: strings to keep in the file.

    Raises:
      ImportError: without the package safetensors.
      TypeError: for anything else, such as a parallel model (give its `state_dict()`), or leaves that are no arrays.
      ValueError: listing names that become the same.
    """
    require_safetensors("save_safetensors")
    from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]

    try:
        named = named_arrays(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"save_safetensors: {error}") from error
    arrays = {name: np.ascontiguousarray(np.asarray(value)) for name, value in renamed(named, rename).items()}
    temporary = Path(f"{os.fspath(path)}.saving")
    save_file(arrays, temporary, metadata=dict(metadata or {}))
    temporary.replace(path)


def load_safetensors(path: str | os.PathLike, *, rename: Rename = None) -> dict[str, np.ndarray]:
    """Whole arrays by name, for `load_state_dict`.

    Args:
      path: a file, the index of several (`model.safetensors.index.json`), or a folder with either.
      rename: from the file's names to those wanted.

    Raises:
      ImportError: without the package safetensors.
      FileNotFoundError: when there is no such file.
      ValueError: listing names that become the same.
    """
    require_safetensors(str(path))
    from safetensors import safe_open  # pyright: ignore[reportMissingImports]

    found: dict[str, np.ndarray] = {}
    for file in safetensors_files(Path(path)):
        with safe_open(file, framework="numpy") as opened:
            found |= {name: opened.get_tensor(name) for name in list(opened.keys())}
    return renamed(found, rename)


def require_safetensors(what: str) -> None:
    """Say which extra is missing, for which file or function.

    Raises:
      ImportError: without the package safetensors.
    """
    try:
        import safetensors  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{what} needs the library safetensors: pip install 'axonml-jax[safetensors]'") from error


def renamed(values: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """Values by their new names.

    >>> renamed({"h.0.w": 1, "mask": 2}, lambda name: None if name == "mask" else name.replace(".", "/"))
    {'h/0/w': 1}
    >>> renamed({"layers.3.up": 1}, [("layers[.]", "blocks/"), ("[.]", "/")])
    {'blocks/3/up': 1}
    """
    new, clashes = {}, []
    for name, value in values.items():
        if (other := _new_name(name, rename)) is None:
            continue
        if other in new:
            clashes.append(f"{name} -> {other}")
        new[other] = value
    if clashes:
        raise ValueError("rename gives several arrays the same name: " + ", ".join(clashes))
    return new


def _new_name(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    for pattern, replacement in rename:
        name = re.sub(pattern, replacement, name)
    return name


def safetensors_files(path: Path) -> list[Path]:
    """The files that a path means: itself, those of an index, or of the folder.

    Raises:
      FileNotFoundError: when there is none.
    """
    if path.is_dir():
        indices = sorted(path.glob("*" + _INDEX))
        return safetensors_files(indices[0]) if indices else _some(sorted(path.glob("*.safetensors")), path)
    if path.name.endswith(_INDEX):
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return [path.parent / name for name in sorted(set(names))]
    return _some([path] if path.is_file() else [], path)


def _some(files: list[Path], path: Path) -> list[Path]:
    if not files:
        raise FileNotFoundError(f"no safetensors file at {path}")
    return files
