"""Writing arrays into `safetensors` files of a bounded size, one after the other: one of them is in memory at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from axonml_jax.model.safetensors import written_whole

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Pending:
    """An array that is to be written.

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
        """Bytes."""
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
      writes: whether this process writes. Another one only makes the arrays, as all must do that have a part in that.

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
