"""One copy of one process's state in memory: valid only when it is whole, which its first bytes say last.

Layout: `_HEAD` (magic, sizes, the index's CRC-32), padded to `START`; the parts, each aligned; the index in JSON, which has
every part's place and CRC-32. A copy that is cut off anywhere has no head; one that was damaged does not fit its checksums.
"""

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.checkpoint.fields import is_whole
from axonml_jax.checkpoint.memory.held_parts import Part

_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"axonml\x01\n"
START = 4096
"""Where the parts begin."""

_ALIGN = 64
_CHUNK = 1 << 22
LONGEST_INDEX = 1 << 28
"""Bytes of the longest index that is read."""


class DamagedCopy(ValueError):
    """A copy whose bytes are not what was written."""


@dataclass(frozen=True)
class CopyIndex:
    """What a copy says about itself.

    Attributes:
      step: updates made.
      shard: which parts of which arrays it holds (`shard_name`).
      about: what else there is to know: the manifest that a checkpoint of this step would have.
      parts: by part: dtype, shape, place, CRC-32.
      complete: the newest step that all processes had when this copy was begun; None: none.
    """

    step: int
    shard: str
    about: dict[str, Any]
    parts: dict[Part, tuple[str, tuple[int, ...], int, int]]
    complete: int | None = None

    def text(self) -> bytes:
        """As JSON."""
        parts = [[name, index, *each] for (name, index), each in self.parts.items()]
        said = {"step": self.step, "shard": self.shard, "about": self.about, "complete": self.complete}
        return json.dumps(said | {"parts": parts}).encode()

    @staticmethod
    def parse(text: bytes) -> "CopyIndex":
        """The inverse of `text`.

        Raises:
          DamagedCopy: when it is no index.
        """
        try:
            said = json.loads(text)
            parts = {
                (str(name), tuple((int(a), int(b)) for a, b in index)): (str(dtype), tuple(shape), place, crc)
                for name, index, dtype, shape, place, crc in said["parts"]
            }
            sizes = [_size(dtype, shape) for dtype, shape, _, _ in parts.values()]
            numbers = [said["step"], *sizes, *(n for _, shape, *more in parts.values() for n in (*shape, *more))]
            numbers += [] if said["complete"] is None else [said["complete"]]
            if not all(is_whole(n) for n in numbers) or not isinstance(said["about"], dict):
                raise ValueError("no whole numbers")
            return CopyIndex(said["step"], str(said["shard"]), said["about"], parts, said["complete"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedCopy(f"the index of a copy cannot be read: {error!r:.120}") from error


def laid_out(parts: Mapping[Part, tuple[np.dtype, tuple[int, ...]]]) -> tuple[dict[Part, int], int]:
    """Where every part goes, and where the last one ends."""
    places, end = {}, START
    for part, (dtype, shape) in parts.items():
        places[part] = end
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
    return places, end


class Generation:
    """A file that holds one copy, or none.

    Args:
      handle: an open file of this process's own.
    """

    def __init__(self, handle: int):
        self._handle = handle

    def clear(self) -> None:
        """From now on it holds none."""
        os.pwrite(self._handle, bytes(_HEAD.size), 0)

    def free(self) -> None:
        """`clear`, and give the memory back."""
        os.ftruncate(self._handle, 0)

    def put(self, place: int, values: np.ndarray | bytes) -> None:
        """Write some bytes at a place; call `clear` first and `commit` when all are written."""
        view = memoryview(values if isinstance(values, bytes) else _bytes(values))
        while view:
            done = os.pwrite(self._handle, view, place)
            view, place = view[done:], place + done

    def checksums(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """CRC-32 of what lies at some places, given with sizes."""
        places = list(places)
        if not any(size for _, size in places):
            return [0 for _ in places]
        length = max(place + size for place, size in places)
        with mmap.mmap(self._handle, length, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            return [zlib.crc32(view[place : place + size]) for place, size in places]

    def commit(self, index: bytes, end: int) -> None:
        """Make what was written a copy.

        Args:
          index: its index.
          end: where the parts end and the index goes.
        """
        self.put(end, index)
        os.ftruncate(self._handle, end + len(index))
        os.pwrite(self._handle, _HEAD.pack(_MAGIC, end, len(index), zlib.crc32(index)), 0)

    def commit_received(self, end: int, size: int) -> None:
        """`commit` of an index that lies at its place already, and is as long as this; `checked` says whether it is one."""
        index = bytearray(size)
        self.read_into(memoryview(index), end)
        self.commit(bytes(index), end)

    def become(self, other: "Generation") -> None:
        """Hold the copy that another generation holds too."""
        found, whole = other.index(), other.size()
        assert found is not None, "there is no copy"
        self.clear()
        for place in range(START, whole, _CHUNK):
            chunk = bytearray(min(_CHUNK, whole - place))
            other.read_into(memoryview(chunk), place)
            self.put(place, bytes(chunk))
        self.commit_received(found[1], whole - found[1])

    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def index(self) -> tuple[CopyIndex, int] | None:
        """The index and where the parts end; None when there is no copy.

        Raises:
          DamagedCopy: when the head or the index is not what was written.
        """
        head = os.pread(self._handle, _HEAD.size, 0)
        if len(head) < _HEAD.size or not any(head):
            return None
        magic, end, size, crc = _HEAD.unpack(head)
        whole = os.fstat(self._handle).st_size
        if magic != _MAGIC or end + size != whole or size > LONGEST_INDEX:
            raise DamagedCopy("the head of a copy is not what was written")
        text = os.pread(self._handle, size, end)
        if zlib.crc32(text) != crc:
            raise DamagedCopy("the index of a copy does not fit its checksum")
        return CopyIndex.parse(text), end

    def checked(self) -> tuple[CopyIndex, int] | None:
        """`index`, when all parts are what was written.

        Raises:
          DamagedCopy: naming what is not.
        """
        found = self.index()
        if found is None:
            return None
        index, end = found
        sizes = {part: _size(dtype, shape) for part, (dtype, shape, _, _) in index.parts.items()}
        if out := [name for (name, at), (*_, place, _) in index.parts.items() if place + sizes[name, at] > end]:
            raise DamagedCopy(f"parts of {', '.join(out[:3])} lie outside of the copy of step {index.step}")
        sums = self.checksums((place, sizes[part]) for part, (*_, place, _) in index.parts.items())
        wrong = [name for ((name, _), (*_, crc)), found in zip(index.parts.items(), sums, strict=True) if crc != found]
        if wrong:
            raise DamagedCopy(f"{', '.join(wrong[:3])} of step {index.step} do not fit their checksums")
        return found

    def part(self, index: CopyIndex, part: Part) -> np.ndarray:
        """The values of a part, in memory of their own."""
        dtype, shape, place, _ = index.parts[part]
        values = np.empty(_size(dtype, shape), np.uint8)
        self.read_into(memoryview(values), place)
        return values.view(jnp.dtype(dtype)).reshape(shape)

    def read_into(self, view: memoryview, place: int) -> None:
        """Fill some memory from a place on."""
        while view:
            done = os.preadv(self._handle, [view], place)
            if not done:
                raise DamagedCopy("a copy is shorter than it was")
            view, place = view[done:], place + done


def peek(generation: Generation) -> CopyIndex | None:
    """What a generation says that it holds, its parts unread; None: nothing, or nothing that can be read."""
    try:
        found = generation.index()
    except DamagedCopy:
        return None
    return None if found is None else found[0]


def holds(generation: Generation) -> tuple[str, int] | None:
    """The shard and the step of what a generation says that it holds; None: nothing."""
    found = peek(generation)
    return None if found is None else (found.shard, found.step)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
