"""Arrays in safetensors files: read by name and part, written in shards."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.base import is_key, some_of
from axonml_jax.model.view import named_arrays

# --------------------------------------------------------------------------------------------------
# Arrays by name in `safetensors` files, the format in which weights are published, with names mapped on the way.
# --------------------------------------------------------------------------------------------------

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
    """Write whole arrays, such as a `state_dict`'s, to one file. Call it in one process only.

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
    new = renamed(named, rename)
    if keys := [f"{name}: {value.dtype}{list(value.shape)}" for name, value in new.items() if is_key(value)]:
        raise TypeError(
            f"save_safetensors: the files hold no random keys: {', '.join(keys)}. Write jax.random.key_data(key) under its "
            "name (jax.random.wrap_key_data makes a key of that), or leave them out: rename= gives None for their names"
        )
    arrays = {name: np.asarray(value, order="C") for name, value in new.items()}
    if not arrays:
        raise ValueError(f"save_safetensors: there is no array to write to {path}")
    if wrong := [f"{name}: {value.dtype}" for name, value in arrays.items() if value.dtype.name not in _HELD]:
        raise ValueError(f"save_safetensors: the files hold no {', '.join(wrong)}: convert them, or leave them out")
    with written_whole(Path(path)) as temporary:
        save_file(arrays, temporary, metadata=dict(metadata or {}))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success the file is synced and renamed to `path`, on an error `path` stays as it was.

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


def load_safetensors(path: str | os.PathLike, *models: Any, rename: Rename = None) -> dict[str, np.ndarray]:
    """Whole arrays by name, for `load_state_dict`.

    Args:
      path: a file, the index of several (`model.safetensors.index.json`), or a folder with either.
      models: must be empty: arrays are returned, not put into a model.
      rename: from the file's names to those wanted.

    Raises:
      TypeError: for a model, saying how the arrays go into one.
      ImportError: without the package safetensors.
      FileNotFoundError: when there is no such file.
      ValueError: listing names that become the same or stand in two files, or saying what is wrong with a file.
    """
    if models:
        raise TypeError(
            f"load_safetensors(path) returns arrays by name and was given a {type(models[0]).__name__} too: put them into a "
            "parallel model, model = ax.DDP(module) and model.load_state_dict(ax.load_safetensors(path)); the plain module "
            "with them is model.module"
        )
    require_safetensors(str(path))
    found: dict[str, np.ndarray] = {}
    for file in safetensors_files(Path(path)):
        with opened_safetensors(file) as opened:
            arrays = {name: _whole(opened, file, name) for name in list(opened.keys())}
        if twice := [name for name in arrays if name in found]:
            raise ValueError(f"{file} has {some_of(twice)}, as has another file of {path}: which is meant?")
        found |= arrays
    return renamed(found, rename)


def _whole(opened: Any, file: Path, name: str) -> np.ndarray:
    """Read an entire array; 8-bit floats, which the package's NumPy side lacks, are read as bytes."""
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
    """Open a file by the safetensors package; its errors become a ValueError.

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
    """Raise an ImportError that names the missing extra, and the file or function that needs it.

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

    Of several indices in a folder, as of variants, `model.safetensors.index.json` is the one.

    Raises:
      FileNotFoundError: when there is none, or not all that an index names.
      ValueError: for a folder with several indices, none of them so called; or an index that is none, or names files outside
        its folder. Links are followed: Hugging Face's cache is made of them.
    """
    if path.is_dir():
        indices = sorted(path.glob("*" + _INDEX))
        indices = [each for each in indices if each.name == INDEX] or indices
        if len(indices) > 1:
            raise ValueError(f"{path} has several indices: give one of {', '.join(each.name for each in indices)}")
        return _indexed(indices[0]) if indices else _some(path.glob("*.safetensors"), path)
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
        raise ValueError(f"{path} names files that are not in its folder: {some_of(list(map(repr, outside)))}")
    files = [path.parent / name for name in sorted(set(names))]
    if missing := [f"{file.name:.100}" for file in files if not _is_file(file)]:
        raise FileNotFoundError(f"{path} names files that are not there: {some_of(missing)}")
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


# --------------------------------------------------------------------------------------------------
# Arrays in `safetensors` files, of which only those parts are read that are asked for.
# --------------------------------------------------------------------------------------------------


class StoredArrays(Mapping[str, "StoredArray"]):
    """The arrays of some files by name; nothing is read but their names, shapes and dtypes.

    Args:
      path: a file, the index of several (`model.safetensors.index.json`), or a folder with either.
      prefixes: removed from the front of names; of several that fit the first.

    Attributes:
      bytes_read: bytes of arrays read so far.

    Raises:
      ImportError: without the package safetensors.
      FileNotFoundError: when there is no such file.
      ValueError: saying what is wrong with a file, or for a name that two have; naming arrays of floats in 8 bits and fewer.
    """

    def __init__(self, path: str | os.PathLike, *, prefixes: tuple[str, ...] = ()):
        require_safetensors(str(path))
        self.bytes_read = 0
        self._arrays: dict[str, StoredArray] = {}
        for file in safetensors_files(Path(path)):
            with opened_safetensors(file) as opened:
                kinds = {name: opened.get_slice(name).get_dtype() for name in list(opened.keys())}
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in kinds}
            if narrow := [f"{name}: {kind}" for name, kind in kinds.items() if kind.startswith(("F8_", "F6_", "F4"))]:
                raise ValueError(
                    f"{file} has weights in few bits, which mean nothing without scales that are not read here: "
                    f"{some_of(narrow)}; give files of bfloat16, into which their publisher's tools convert them"
                )
            for name, shape in shapes.items():
                short = next((name.removeprefix(each) for each in prefixes if name.startswith(each)), name)
                if short in self._arrays:
                    raise ValueError(f"{file} has {name}, as has {self._arrays[short].file}: which is meant?")
                self._arrays[short] = StoredArray(self, file, name, shape)

    def __getitem__(self, name: str) -> "StoredArray":
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True)
class StoredArray:
    """An array in a safetensors file, of which parts are read by slices.

    Attributes:
      counts: whose `bytes_read` grows with what is read.
      file: where it is.
      name: in the file.
      shape: its shape.
    """

    counts: StoredArrays
    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the array, given by a slice for each dim.

        The file is opened for this alone: what is read of one that stays open counts as memory of the process.
        """
        with opened_safetensors(self.file) as opened:
            if 0 in self.shape or not self.shape:  # of which the package slices nothing
                found = np.asarray(opened.get_tensor(self.name)[index])
            else:
                whole: Any = opened.get_slice(self.name)
                found = np.asarray(whole[index])
        self.counts.bytes_read += found.nbytes
        return found


# --------------------------------------------------------------------------------------------------
# Writing arrays into `safetensors` files of a bounded size, one after the other: one of them is in memory at a time.
# --------------------------------------------------------------------------------------------------

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Pending:
    """An array that `write_shards` is to write.

    Attributes:
      name: in the file.
      shape: its shape.
      dtype: name of its dtype.
      make: makes it, when its turn has come.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def write_shards(
    folder: Path, arrays: Sequence[Pending], *, most: int, metadata: Mapping[str, str], writes: bool = True
) -> list[str]:
    """Write arrays into `model.safetensors`, or, where they are more than `most` bytes, into several files with an index.

    Args:
      folder: where to.
      arrays: in this order. A larger one than `most` gets a file of its own.
      most: bytes of arrays in a file.
      metadata: strings to keep in each file.
      writes: whether this process writes. False: it only calls `make`, which may need all processes.

    Returns:
      The names of the files.

    Raises:
      ValueError: for a dtype that the files do not hold, or when the folder has other files of arrays, which would be read too.
    """
    if wrong := [f"{each.name}: {each.dtype}" for each in arrays if each.dtype not in _NAMES]:
        raise ValueError(f"safetensors files hold {', '.join(_NAMES)}, not {'; '.join(wrong)}")
    shards = list(_shards(arrays, most))
    count = len(shards)
    names = [ONE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    kept = {*names, *([INDEX] if count > 1 else [])}
    kept |= {f"{name}.saving" for name in kept}  # what a killed export has left is written again
    if writes and (others := sorted(p.name for p in folder.glob("*.safetensors*") if p.name not in kept)):
        raise ValueError(
            f"{folder} has other arrays, which readers would take too: remove {', '.join(others)}, or give another folder"
        )
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name if writes else None, shard, metadata)
    if writes and count > 1:
        places = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        content = {"metadata": {"total_size": sum(each.size for each in arrays)}, "weight_map": places}
        with written_whole(folder / INDEX) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return names


def _shards(arrays: Sequence[Pending], most: int) -> Iterator[list[Pending]]:
    shard: list[Pending] = []
    for each in arrays:
        if shard and sum(other.size for other in shard) + each.size > most:
            yield shard
            shard = []
        shard.append(each)
    yield shard


def _write(path: Path | None, arrays: Sequence[Pending], metadata: Mapping[str, str]) -> None:
    """One file, which appears under its name when it is whole; without a path the arrays are only made."""
    if path is None:
        for each in arrays:
            each.make()
        return
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for each in arrays:
        header[each.name] = {
            "dtype": _NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": [start, start + each.size],
        }
        start += each.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in arrays:
            _append(file, each)


def _append(file: BinaryIO, array: Pending) -> None:
    value = np.asarray(array.make(), dtype=jnp.dtype(array.dtype), order="C")
    assert value.shape == array.shape, (array.name, value.shape, array.shape)
    file.write(value.reshape(-1).view(np.uint8).data)
