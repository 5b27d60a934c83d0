"""Arrays by name in `safetensors` files, the format in which weights are published, with names mapped on the way."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.model.named import named_arrays

Rename = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str | None] | None
"""Exact names by name, (regular expression, replacement) pairs applied in order, or a function (None leaves the array out)."""

_INDEX = ".safetensors.index.json"
_FLOATS8 = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_HELD = {
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", *_FLOATS8.values(),
}  # fmt: skip


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
      ValueError: listing names that become the same, and arrays of dtypes that the files do not hold; when there is no array.
      OSError: when it cannot be written. What was at the path is left as it was then.
    """
    require_safetensors("save_safetensors")
    from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]

    try:
        named = named_arrays(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"save_safetensors: {error}") from error
    arrays = {name: np.asarray(value, order="C") for name, value in renamed(named, rename).items()}
    if not arrays:
        raise ValueError(f"save_safetensors: there is no array to write to {path}")
    if wrong := [f"{name}: {value.dtype}" for name, value in arrays.items() if value.dtype.name not in _HELD]:
        raise ValueError(f"save_safetensors: the files hold no {', '.join(wrong)}: convert them, or leave them out")
    with written_whole(Path(path)) as temporary:
        save_file(arrays, temporary, metadata=dict(metadata or {}))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write a file, which then appears under its name whole and on disk; after an error it is as it was.

    Raises:
      OSError: when somebody's link, folder or pipe stands where it is written; and what writing raises.
    """
    temporary = path.with_name(f"{path.name}.saving")
    if os.path.lexists(temporary) and (temporary.is_symlink() or not temporary.is_file()):
        raise OSError(f"{temporary}, where {path.name} is written first, is no ordinary file: remove it")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_safetensors(path: str | os.PathLike, *, rename: Rename = None) -> dict[str, np.ndarray]:
    """Whole arrays by name, for `load_state_dict`.

    Args:
      path: a file, the index of several (`model.safetensors.index.json`), or a folder with either.
      rename: from the file's names to those wanted.

    Raises:
      ImportError: without the package safetensors.
      FileNotFoundError: when there is no such file.
      ValueError: listing names that become the same or stand in two files, or saying what is wrong with a file.
    """
    require_safetensors(str(path))
    found: dict[str, np.ndarray] = {}
    for file in safetensors_files(Path(path)):
        with opened_safetensors(file) as opened:
            arrays = {name: _whole(opened, file, name) for name in list(opened.keys())}
        if twice := [name for name in arrays if name in found]:
            raise ValueError(f"{file} has {', '.join(twice[:5])}, as has another file of {path}: which is meant?")
        found |= arrays
    return renamed(found, rename)


def _whole(opened: Any, file: Path, name: str) -> np.ndarray:
    """An array; the package's NumPy side knows no floats of 8 bits, of which the bytes are read here."""
    part = opened.get_slice(name)
    if part.get_dtype() not in _FLOATS8:
        return opened.get_tensor(name)
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        start, end = json.loads(content.read(size))[name]["data_offsets"]
    read = np.fromfile(file, np.uint8, end - start, offset=8 + size + start)
    return read.view(jnp.dtype(_FLOATS8[part.get_dtype()])).reshape(part.get_shape())


@contextmanager
def opened_safetensors(file: Path) -> Iterator[Any]:
    """The package's view of one file.

    Raises:
      ValueError: saying what is wrong with the file, here or when an array is read.
    """
    from safetensors import SafetensorError, safe_open  # pyright: ignore[reportMissingImports]

    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:  # an array that NumPy does not have
        raise ValueError(f"{file} is no safetensors file that can be read here: {error}") from error


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
      FileNotFoundError: when there is none, or not all that an index names.
      ValueError: for an index that is none, or names files outside its folder. Links are followed: Hugging Face's cache is made
        of them.
    """
    if path.is_dir():
        indices = sorted(path.glob("*" + _INDEX))
        return safetensors_files(indices[0]) if indices else _some(path.glob("*.safetensors"), path)
    return _indexed(path) if path.name.endswith(_INDEX) else _some([path], path)


def _indexed(path: Path) -> list[Path]:
    """The files that an index names, all of them beside it or below."""
    try:
        names = list(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) and name for name in names):
            raise TypeError("a file must be named by text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {error!r:.200}") from error
    outside = [name for name in names if name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name]
    if outside:
        raise ValueError(f"{path} names files that are not in its folder: {', '.join(map(repr, outside[:5]))}")
    files = [path.parent / name for name in sorted(set(names))]
    if missing := [f"{file.name:.100}" for file in files if not _is_file(file)]:
        raise FileNotFoundError(f"{path} names files that are not there: {', '.join(missing[:5])}")
    return _some(files, path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _some(files: Iterable[Path], path: Path) -> list[Path]:
    if not (found := sorted(file for file in files if file.is_file())):  # opening a FIFO would wait for a writer
        raise FileNotFoundError(f"no safetensors file at {path}")
    return found
