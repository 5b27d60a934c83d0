"""Copies of a run's state in host memory that outlives its processes: on the same machine and on another."""

import hashlib
import itertools
import json
import math
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from axonml_jax.base import logger, print0
from axonml_jax.checkpoint.format import DamagedCheckpoint, Manifest, Team, is_whole, tell_all_at_length
from axonml_jax.checkpoint.manager import CheckpointManager, Positioned, go_on, manifest_of
from axonml_jax.compat.processes import coordinator_client
from axonml_jax.mesh.environment import GENERATIONS, handed, to_send
from axonml_jax.mesh.join import (
    ASKED,
    Callers,
    Talk,
    address_towards,
    bind_address,
    greet,
    host_port,
    is_count,
    job_token,
    listen,
    readable,
)
from axonml_jax.mesh.simulate import machine_memory

# --------------------------------------------------------------------------------------------------
# Whether a copy is over in all processes, and whether all have it: decided once, by whoever asks first, then the same
# for all.
#
# A process that counted for itself could find a step complete that another one found incomplete a moment before, and
# has overwritten since. So at every step at which a copy is due all ask about the one before, and hear the same: it is
# complete, and stays while the next is made; or some process could not make it, and the next goes over it; or some
# process is not ready yet, and nobody makes one now. So all make copies of the same steps, those that the slowest
# process has time for.
# --------------------------------------------------------------------------------------------------

_TIMEOUT_MS = 60_000


class Outcome(Enum):
    """The outcome of a copy: all processes have it, some failed to make it, or some are still making it."""

    COMPLETE = "complete"
    FAILED = "failed"
    UNDER_WAY = "under way"


def tell(name: str, made: bool) -> None:
    """Tell the other processes that this one is ready with its copy.

    Args:
      name: of the step, the same in every process.
      made: whether it has the copy.
    """
    client = coordinator_client()
    if made:
        client.key_value_increment(f"{name}/made", 1)
    client.key_value_increment(f"{name}/ready", 1)  # last: who reads that all are ready reads all that were made


def outcome(name: str, size: int, now: int) -> Outcome:
    """The outcome of a copy, as the first process found it that asked at this step.

    Args:
      name: of the copy's step.
      size: how many processes there are.
      now: the step at which all processes ask.
    """
    client, key = coordinator_client(), f"{name}/outcome/{now}"
    found = _found(name, size)
    try:
        client.key_value_set(key, found.value)
    except jax.errors.JaxRuntimeError:  # somebody was first, or the coordinator has gone: then this fails too
        found = Outcome(client.blocking_key_value_get(key, _TIMEOUT_MS))
    return found


def ready(name: str, size: int) -> bool:
    """Whether all processes are ready with a copy by now."""
    return coordinator_client().key_value_increment(f"{name}/ready", 0) == size


def _found(name: str, size: int) -> Outcome:
    if not ready(name, size):
        return Outcome.UNDER_WAY
    made = coordinator_client().key_value_increment(f"{name}/made", 0)
    return Outcome.COMPLETE if made == size else Outcome.FAILED


# --------------------------------------------------------------------------------------------------
# What one process holds of arrays, part by part, and arrays made of such parts again, as they were.
# --------------------------------------------------------------------------------------------------

Part = tuple[str, tuple[tuple[int, int], ...]]
"""An array's name, and from where to where the part reaches in every dim."""


def parts_of(arrays: Mapping[str, jax.Array]) -> dict[Part, tuple[np.dtype, tuple[int, ...]]]:
    """The array parts that this process's devices hold, each once, with dtype and shape. Nothing is copied."""
    found = {}
    for name, array in _plain(arrays).items():
        for index in _places(array):
            found[name, index] = np.dtype(array.dtype), tuple(stop - start for start, stop in index)
    return found


def shard_name(arrays: Mapping[str, jax.Array]) -> str:
    """A short hash that is equal for processes that hold the same parts of the same arrays."""
    shapes = {name: [list(array.shape), str(array.dtype)] for name, array in _plain(arrays).items()}
    parts = sorted((name, index) for name, index in parts_of(arrays))
    return hashlib.sha256(json.dumps([shapes, parts], sort_keys=True).encode()).hexdigest()[:32]


def values_of(arrays: Mapping[str, jax.Array]) -> Iterator[tuple[Part, np.ndarray]]:
    """Copy the parts to the host, in the order of `parts_of`; all transfers start at once."""
    plain = _plain(arrays)
    held = [(name, index, data) for name, array in plain.items() for index, data in _places(array).items()]
    for _, _, data in held:
        data.copy_to_host_async()
    for name, index, data in held:
        yield (name, index), np.asarray(data)


def assembled(like: Mapping[str, jax.Array], read: Callable[[Part], np.ndarray]) -> dict[str, jax.Array]:
    """Build arrays on the devices of the given ones from parts on the host.

    Args:
      like: arrays as they shall be.
      read: a part's values, in memory of their own at every call: JAX may make it the array's, which a step then writes.
    """
    return {name: _assembled(name, array, read) for name, array in like.items()}


def _assembled(name: str, like: jax.Array, read: Callable[[Part], np.ndarray]) -> jax.Array:
    if _is_key(like):
        words = _assembled(name, jax.random.key_data(like), read)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    kind = like.sharding.memory_kind
    shards = [
        jax.device_put(
            read((name, _bounds(shard.index, like.shape))), SingleDeviceSharding(shard.device, memory_kind=kind)
        )
        for shard in like.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _plain(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: jax.random.key_data(array) if _is_key(array) else array for name, array in arrays.items()}


def _places(array: jax.Array) -> dict[tuple[tuple[int, int], ...], jax.Array]:
    # Arrays of their own, one per device, so that no view of a buffer outlives this: the next step donates it.
    shards, held = array.addressable_shards, {}
    for number, shard in enumerate(shards):
        held.setdefault(_bounds(shard.index, array.shape), number)
    return {index: array.addressable_data(number) for index, number in held.items()}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


# --------------------------------------------------------------------------------------------------
# What the processes of a job tell each other before copies are made: machines, shards, sizes.
# --------------------------------------------------------------------------------------------------

SHARE = 0.5
"""The largest share of a machine's memory that copies may take."""

_RESTARTS = "AXONML_JAX_RESTART_COUNT"  # of the launcher


@dataclass(frozen=True)
class Members:
    """Every process of the job, by rank.

    Attributes:
      nodes: its machine.
      shards: what it holds (`shard_name`).
      sizes: bytes of that.
      own: whether copies are made at all.
      partners: whether other machines keep some too.
    """

    nodes: tuple[int, ...]
    shards: tuple[str, ...]
    sizes: tuple[int, ...]
    own: bool = True
    partners: bool = True

    @cached_property
    def keepers(self) -> tuple[int | None, ...]:
        """The ranks to which a process sends its copies; None if it needs none."""
        if not (self.own and self.partners):
            return (None,) * len(self.nodes)
        counts = [len(list(same)) for _, same in itertools.groupby(self.nodes)]
        return to_send(counts, self.shards)

    def kept_by(self, rank: int) -> tuple[int, ...]:
        """The ranks whose copies a process keeps."""
        return tuple(other for other, keeper in enumerate(self.keepers) if keeper == rank)

    def bytes_on(self, node: int) -> int:
        """Bytes of all copies kept on a machine."""
        count = GENERATIONS if self.own else 0
        return count * sum(
            self.sizes[rank] + sum(self.sizes[other] for other in self.kept_by(rank))
            for rank, here in enumerate(self.nodes)
            if here == node
        )


def gather(team: Team, environ: Mapping[str, str], shard: str, size: int) -> Members:
    """Exchange what the processes hold; each must call it.

    Args:
      team: the processes.
      environ: the launcher's variables.
      shard: what this process holds.
      size: bytes of that.

    Raises:
      ValueError: in every process, see `within_memory`.
    """
    own = {"node": int(environ["NODE_RANK"]), "shard": shard, "size": size, "memory": machine_memory()}
    own["again"] = environ.get(_RESTARTS, "0") != "0"
    said = team.tell_all("prepare copies of the state in memory", own)
    nodes, shards, sizes = (tuple(each[name] for each in said) for name in ("node", "shard", "size"))
    members = Members(nodes, shards, sizes)
    again = any(each["again"] for each in said)
    members, warning = within_memory(members, {each["node"]: each["memory"] for each in said}, again)
    if warning and team.leads:
        logger.warning("%s", warning)
    return members


def within_memory(members: Members, memory: Mapping[int, int], again: bool) -> tuple[Members, str]:
    """Limit the copies to each machine's share of memory; returns the members, and a warning of what they lack.

    Args:
      members: as they would be.
      memory: bytes of every machine.
      again: whether the job has run already. On fewer machines each may have to keep twice as much: then the job goes on with
        as many copies as fit. At the first start it is refused.

    Raises:
      ValueError: naming the machines whose memory is too small for the copies.
    """
    if not (over := _over(members, memory)):
        return members, ""
    said = f"copies of the state in memory would take {over}, more than {SHARE:.0%}"
    if not again:
        raise ValueError(f"{said}: split the state over more processes (fsdp), or set checkpoint.memory_every=null")
    alone, then = replace(members, partners=False), "goes back to the last checkpoint on disk"
    if _over(alone, memory):
        return replace(alone, own=False), f"{said}: none are made on these machines, and a restart {then}"
    return alone, f"{said}: machines keep no copies of each other's state, and the loss of one {then}"


def _over(members: Members, memory: Mapping[int, int]) -> str:
    """Describe the machines whose memory the copies would exceed."""
    taken = {node: members.bytes_on(node) for node in memory}
    over = {node: size for node, size in taken.items() if size > SHARE * memory[node]}
    lines = [f"{size / 1e9:.3g} GB of {memory[node] / 1e9:.3g} GB on node {node}" for node, size in over.items()]
    return ", ".join(lines)


# --------------------------------------------------------------------------------------------------
# The steps of which copies are made, equal in all processes: no copy begins while a process is still making the last one.
# --------------------------------------------------------------------------------------------------

_COPIES = "axonml_jax/memory/"
_PATIENCE = 10
"""Copies left out in a row after which that is said."""


class CopyRounds:
    """One process's view of the rounds of copies that all make together. All processes make the same calls.

    Args:
      team: the processes.

    Attributes:
      team: the same.
      complete: the newest step of which every process has a copy; None: there is none.
      begun: the step of the copy that was begun last, and may be under way in some process; None: none is.
      skipped: how many copies were left out.
    """

    def __init__(self, team: Team):
        self.team, self.skipped = team, 0
        self.complete: int | None = None
        self.begun: int | None = None
        self._made: bool | None = None  # whether this process has made its own; None: it is at it
        self._waited, self._number = 0, 0

    def go_on_from(self, step: int | None) -> None:
        """Record that all processes have a copy of this step, or of none, and that none is under way."""
        self.complete, self.begun, self._number = step, None, self._number + 1

    def may_begin(self, step: int) -> bool:
        """Whether the last copy has ended in all processes, so that another may begin; notes it as complete if all made it."""
        if self.begun is None:
            return True
        found = self._outcome(self.begun, step)
        if found is Outcome.COMPLETE:
            self.complete = self.begun
        if found is not Outcome.UNDER_WAY:
            self.begun = None
        return self.begun is None

    def begin(self, step: int) -> None:
        """Record that all processes begin a copy of this step."""
        self.begun, self._made, self._waited = step, None, 0

    def skip(self) -> None:
        """Record that all processes skip a copy, and warn when that happens repeatedly."""
        self.skipped, self._waited = self.skipped + 1, self._waited + 1
        if self._waited == _PATIENCE and self.team.leads:
            logger.warning(
                "%d copies of the state in memory were left out in a row: that of step %s is not ready in all processes yet; "
                "a restart goes back to step %s. A larger checkpoint.memory_every asks for fewer",
                *(_PATIENCE, self.begun, self.complete),
            )

    def end(self, step: int, made: bool) -> None:
        """Tell the others whether this process has its copy; may be called in another thread.

        Raises:
          jax.errors.JaxRuntimeError: when the coordinator has gone.
        """
        self._made = made
        if self.team.size > 1:
            tell(self._name(step), made)

    def _outcome(self, begun: int, step: int) -> Outcome:
        if self.team.size > 1:
            return outcome(self._name(begun), self.team.size, step)
        return Outcome.UNDER_WAY if self._made is None else Outcome.COMPLETE if self._made else Outcome.FAILED

    def _name(self, step: int) -> str:
        return f"{_COPIES}{self._number}/{step}"


# --------------------------------------------------------------------------------------------------
# One copy of one process's state in memory: valid only when it is whole, which its first bytes say last.
#
# Layout: `_HEAD` (magic, sizes, the index's CRC-32), padded to `START`; the parts, each aligned; the index in JSON,
# which has every part's place and CRC-32. A copy that is cut off anywhere has no head; one that was damaged does not
# fit its checksums.
# --------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"axonml\x01\n"
START = 4096
"""The offset at which the parts begin."""

_ALIGN = 64
_CHUNK = 1 << 22
LONGEST_INDEX = 1 << 28
"""Bytes of the longest index that is read."""


class DamagedCopy(ValueError):
    """Raised for a copy whose bytes are not what was written."""


@dataclass(frozen=True)
class CopyIndex:
    """The index of a copy: its step, its parts and their checksums.

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
        """The index as JSON."""
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
    """The offset of each part in a file, and the end of the last."""
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
        """Mark the file as holding no copy."""
        os.pwrite(self._handle, bytes(_HEAD.size), 0)

    def free(self) -> None:
        """`clear`, and release the file's memory."""
        os.ftruncate(self._handle, 0)

    def put(self, place: int, values: np.ndarray | bytes) -> None:
        """Write bytes at an offset; call `clear` first and `commit` when all are written."""
        view = memoryview(values if isinstance(values, bytes) else _bytes(values))
        while view:
            done = os.pwrite(self._handle, view, place)
            view, place = view[done:], place + done

    def checksums(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """CRC-32 of byte ranges, given by offset and size."""
        places = list(places)
        if not any(size for _, size in places):
            return [0 for _ in places]
        length = max(place + size for place, size in places)
        with mmap.mmap(self._handle, length, access=mmap.ACCESS_READ) as memory, memoryview(memory) as view:
            return [zlib.crc32(view[place : place + size]) for place, size in places]

    def commit(self, index: bytes, end: int) -> None:
        """Make the written bytes a valid copy.

        Args:
          index: its index.
          end: where the parts end and the index goes.
        """
        self.put(end, index)
        os.ftruncate(self._handle, end + len(index))
        os.pwrite(self._handle, _HEAD.pack(_MAGIC, end, len(index), zlib.crc32(index)), 0)

    def commit_received(self, end: int, size: int) -> None:
        """`commit` an index of this length that is already in place; `checked` tells whether the copy is intact."""
        index = bytearray(size)
        self.read_into(memoryview(index), end)
        self.commit(bytes(index), end)

    def become(self, other: "Generation") -> None:
        """Hold the same copy as another generation."""
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
        """The index and the end of its parts; None when there is no copy.

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
        """The index, if all parts match their checksums.

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
        """The values of a part, copied out of the file."""
        dtype, shape, place, _ = index.parts[part]
        values = np.empty(_size(dtype, shape), np.uint8)
        self.read_into(memoryview(values), place)
        return values.view(jnp.dtype(dtype)).reshape(shape)

    def read_into(self, view: memoryview, place: int) -> None:
        """Fill a buffer from the file, beginning at an offset."""
        while view:
            done = os.preadv(self._handle, [view], place)
            if not done:
                raise DamagedCopy("a copy is shorter than it was")
            view, place = view[done:], place + done


def peek(generation: Generation) -> CopyIndex | None:
    """The index of a generation's copy, its parts unread; None if there is none or it cannot be read."""
    try:
        found = generation.index()
    except DamagedCopy:
        return None
    return None if found is None else found[0]


def holds(generation: Generation) -> tuple[str, int] | None:
    """The shard and step of a generation's copy, by its index; None if there is none."""
    found = peek(generation)
    return None if found is None else (found.shard, found.step)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


# --------------------------------------------------------------------------------------------------
# The newest step of which every process's state can be had, and who sends whose to whom.
# --------------------------------------------------------------------------------------------------

Found = Mapping[str, Sequence[int]]
"""What one process has: the steps of its whole copies, by the shards that they hold."""


@dataclass(frozen=True)
class Agreed:
    """The step that all processes resume from, and who has each one's state.

    Attributes:
      step: updates made.
      sources: by rank, who has its state; itself where it has.
    """

    step: int
    sources: tuple[int, ...]

    def moves(self) -> dict[int, int]:
        """Map the rank of each process that lost its state to the rank that sends it.

        >>> Agreed(4, (0, 0)).moves()
        {1: 0}
        """
        return {rank: source for rank, source in enumerate(self.sources) if source != rank}


def agree(shards: Sequence[str], found: Sequence[Found], nodes: Sequence[int] | None = None) -> Agreed | None:
    """The newest step that every process can have; None if there is none. All processes compute the same.

    Whoever has lost its state gets it from a process of its own machine, or else of that machine which sends the least.

    Args:
      shards: what every process needs, by rank.
      found: what every process has, by rank.
      nodes: the machine of every process; None: all are on one.

    >>> agree(["a", "b"], [{"a": [4, 6]}, {"b": [4], "a": [2]}])
    Agreed(step=4, sources=(0, 1))
    >>> agree(["a", "b"], [{"a": [4], "b": [4]}, {}])  # the second machine is new
    Agreed(step=4, sources=(0, 0))
    >>> agree(["a"] * 6, [{"a": [4]}] * 4 + [{}] * 2, nodes=(0, 0, 1, 1, 2, 2)).sources
    (0, 1, 2, 3, 0, 2)
    """
    nodes = nodes or [0] * len(shards)
    steps = {step for each in found for kept in each.values() for step in kept}
    for step in sorted(steps, reverse=True):
        if (sources := _sources(shards, step, found, nodes)) is not None:
            return Agreed(step, sources)
    return None


def missing(shards: Sequence[str], found: Sequence[Found]) -> tuple[int, ...]:
    """The ranks whose state is in no process's memory, for any step.

    >>> missing(["a", "b"], [{"a": [4]}, {}])
    (1,)
    """
    return tuple(rank for rank, shard in enumerate(shards) if not any(each.get(shard) for each in found))


def steps_of(copies: Iterable[CopyIndex]) -> dict[str, list[int]]:
    """The steps of copies, by the shards that they hold."""
    found = {}
    for each in copies:
        found.setdefault(each.shard, []).append(each.step)
    return found


def _sources(shards: Sequence[str], step: int, found: Sequence[Found], nodes: Sequence[int]) -> tuple[int, ...] | None:
    of_node, of_process, sources = Counter(), Counter(), []
    for rank, shard in enumerate(shards):
        having = [other for other, each in enumerate(found) if step in each.get(shard, ())]
        if not having:
            return None
        if rank in having:
            sources.append(rank)
            continue
        cost = lambda other, rank=rank: (nodes[other] != nodes[rank], of_node[nodes[other]], of_process[other], other)
        sources.append(source := min(having, key=cost))
        of_node[nodes[source]] += 1
        of_process[source] += 1
    return tuple(sources)


# --------------------------------------------------------------------------------------------------
# The copies of one process's own state: the newest that all processes have stays while the next is written over the
# other.
# --------------------------------------------------------------------------------------------------


class OwnCopies:
    """Two generations of one process's state.

    Args:
      generations: where they are.

    Attributes:
      generations: the same.
      held: shard and step of what each holds, or is being given; None: nothing.
    """

    def __init__(self, generations: Sequence[Generation]):
        self.generations = generations
        self.held: list[tuple[str, int] | None] = [None] * len(generations)

    def look(self) -> list[CopyIndex]:
        """The indices of intact copies; a damaged one is reported and forgotten."""
        whole = whole_copies(self.generations)
        self.held = [None if index is None else (index.shard, index.step) for index in whole]
        return [index for index in whole if index is not None]

    def for_refill(self, step: int, sent: Collection[str]) -> Generation:
        """Choose the generation that receives this process's missing state of a step.

        Args:
          step: a generation that holds another step is taken first.
          sent: the shards that this process sends meanwhile.

        Raises:
          OSError: when every generation holds a copy of this step that this process has to send.
        """
        free = [held is None or held[1] != step for held in self.held]
        free = free if any(free) else [held is None or held[0] not in sent for held in self.held]
        if not any(free):
            raise OSError(
                f"this process has no room for another copy: those of step {step} in its memory are what other processes need"
            )
        return self.generations[free.index(True)]

    def forget(self) -> None:
        """Drop all copies."""
        for number in range(len(self.generations)):
            self._clear(number)

    def keep_only(self, shard: str, step: int) -> None:
        """Drop copies of later steps or of another shard, left from another number of processes."""
        self.held = [holds(generation) for generation in self.generations]
        for number, held in enumerate(self.held):
            if held is not None and (held[0] != shard or held[1] > step):
                self._clear(number)

    def _clear(self, number: int) -> None:
        self.generations[number].clear()
        self.held[number] = None

    def begin(
        self, step: int, arrays: Mapping[str, jax.Array], shard: str, about: Mapping[str, Any], complete: int | None
    ) -> Callable[[], Generation]:
        """Copy arrays to the host.

        Args:
          step: updates made.
          arrays: they may be donated as soon as this returns.
          shard: their `shard_name`.
          about: what else belongs to the copy, as JSON has it.
          complete: the step to keep.

        Returns:
          A function that computes the checksums and commits the copy, for a background thread; it returns the generation.
        """
        free = [number for number, held in enumerate(self.held) if held != (shard, complete)]
        number = min(free, key=lambda each: -1 if (held := self.held[each]) is None else held[1])
        generation, parts = self.generations[number], parts_of(arrays)
        places, end = laid_out(parts)
        generation.clear()
        for part, values in values_of(arrays):
            generation.put(places[part], values)
        self.held[number] = (shard, step)

        def finish() -> Generation:
            sizes = [(places[part], math.prod(shape) * dtype.itemsize) for part, (dtype, shape) in parts.items()]
            sums = generation.checksums(sizes)
            table = {
                part: (str(dtype), shape, places[part], found)
                for (part, (dtype, shape)), found in zip(parts.items(), sums, strict=True)
            }
            generation.commit(CopyIndex(step, shard, dict(about), table, complete).text(), end)
            return generation

        return finish

    def read(self, shard: str, step: int, like: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """Put a step's arrays on the devices of the given ones, and return them with its metadata; call `keep_only` before."""
        generation = self.generations[self.held.index((shard, step))]
        found = generation.index()
        assert found is not None
        return assembled(like, lambda part: generation.part(found[0], part)), found[0].about


def whole_copies(generations: Sequence[Generation]) -> list[CopyIndex | None]:
    """The checked index of each generation; None if it has no copy or a damaged one, which is reported and forgotten."""
    return [_whole(generation) for generation in generations]


def _whole(generation: Generation) -> CopyIndex | None:
    try:
        found = generation.checked()
    except DamagedCopy as error:
        logger.warning("a copy of the state in memory is damaged and not used: %s", error)
        generation.clear()
        return None
    return None if found is None else found[0]


# --------------------------------------------------------------------------------------------------
# Copies on their way between processes, over TCP: announced in a sealed line, checked when they have come, then
# acknowledged.
#
# A copy of a process that is not expected, or of another size, is refused before it is sent. The SHA-256 of all that
# was sent is sealed too. The seal's key is the job's token and a secret of this run, which the processes have from the
# coordinator.
# --------------------------------------------------------------------------------------------------

TIMEOUT = 60.0
"""Seconds without a byte after which a copy on its way is given up."""

_TICK = 0.2
_LINE = 1 << 12
_MOST = 1 << 62
_SUBJECT = "copies of the state"


@dataclass(frozen=True)
class Box:
    """The destination of one process's copies.

    Attributes:
      generations: where they go; the one that holds the step to keep stays.
      size: bytes of the parts of a copy.
      shard: what the copies hold.
    """

    generations: Sequence[Generation]
    size: int
    shard: str


class Post:
    """Receives copies in a thread, until it is closed.

    Args:
      address: of this machine, to listen on.
      token: what a sender must know.
      reached_at: by which address or name the others reach it; None: by the same.

    Attributes:
      boxes: what is expected, by purpose and the sender's rank.
      address: `host:port` for the others.
    """

    def __init__(self, address: str, token: bytes, reached_at: str | None = None):
        self.boxes: dict[tuple[str, int], Box] = {}
        self._token, self._server = token, listen(address, 0, 64)
        self.address = host_port(reached_at or address, self._server.getsockname()[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="copies of other processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        with self._server, closing(self._callers()) as callers:
            while not self._stop.is_set():
                readable(callers.sources(), _TICK)
                for caller, talk, said in callers.pump():
                    with caller:
                        try:
                            self._take(caller, talk, said)
                        except (OSError, DamagedCopy) as error:
                            logger.warning("a copy of the state of process %d did not come: %s", said["rank"], error)

    def _callers(self) -> Callers:
        return Callers(self._server, self._token, _SUBJECT, _is_announced)

    def _take(self, caller: socket.socket, talk: Talk, said: dict) -> None:
        caller.settimeout(TIMEOUT)
        box, keep = self.boxes.get((said["purpose"], said["rank"])), said["keep"]
        fits = box is not None and said["size"] == box.size
        caller.sendall(talk.sealed({"go": fits}))
        if box is None or not fits:
            raise DamagedCopy("it is not expected here, or has another size")
        generation = next(each for each in box.generations if keep is None or holds(each) != (box.shard, keep))
        generation.clear()
        digest, place, end = hashlib.sha256(), START, START + said["size"] + said["index"]
        while place < end:
            chunk = caller.recv(min(end - place, _CHUNK))
            if not chunk:
                raise ConnectionError("its sender has gone")
            digest.update(chunk)
            generation.put(place, chunk)
            place += len(chunk)
        if talk.opened(_line(caller)) != {"sha256": digest.hexdigest()}:
            raise DamagedCopy("what came is not what its sender has sealed")
        generation.commit_received(START + said["size"], said["index"])
        try:
            found = generation.checked()
            if found is None or found[0].step != said["step"]:
                raise DamagedCopy("it is of another step than was announced")
        except DamagedCopy:
            generation.clear()
            raise
        caller.sendall(talk.sealed({"kept": said["step"]}))


def send(place: str, token: bytes, purpose: str, rank: int, generation: Generation, keep: int | None) -> None:
    """Send a copy, and return when the receiver has kept it.

    Args:
      place: `host:port` of the receiver's `Post`.
      token: see `Post`.
      purpose: what it is for there.
      rank: of this process.
      generation: has the copy.
      keep: the step that the receiver must keep meanwhile.

    Raises:
      OSError: when the receiver does not take it, does not keep it, or stops answering.
    """
    found = generation.index()
    assert found is not None, "there is no copy"
    (index, end), whole = found, generation.size()
    host, _, port = place.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT) as line:
        talk = greet(line, token, _SUBJECT)
        hello = {"purpose": purpose, "rank": rank, "step": index.step, "keep": keep}
        line.sendall(talk.sealed(hello | {"size": end - START, "index": whole - end}))
        if talk.opened(_line(line)) != {"go": True}:
            raise ConnectionError(f"{place} does not take it")
        digest, at = hashlib.sha256(), START
        while at < whole:
            chunk = bytearray(min(_CHUNK, whole - at))
            generation.read_into(memoryview(chunk), at)
            digest.update(chunk)
            line.sendall(chunk)
            at += len(chunk)
        line.sendall(talk.sealed({"sha256": digest.hexdigest()}))
        if talk.opened(_line(line)) != {"kept": index.step}:
            raise ConnectionError(f"{place} has not kept it")


def _is_announced(said: dict) -> bool:
    """Whether a message announces a copy."""
    return (
        said.keys() == {"purpose", "rank", "step", "keep", "size", "index"}
        and isinstance(said["purpose"], str)
        and all(is_count(said[name], 0, _MOST) for name in ("rank", "step", "size"))
        and is_count(said["index"], 1, LONGEST_INDEX)
        and (said["keep"] is None or is_count(said["keep"], 0, _MOST))
    )


def _line(line: socket.socket) -> bytes:
    """Read one line, and not a byte beyond it."""
    said = b""
    while not said.endswith(b"\n") and len(said) < _LINE and (byte := line.recv(1)):
        said += byte
    return said


def own_addresses(environ: Mapping[str, str]) -> tuple[str, str]:
    """The address on which this machine listens, and the one by which other machines reach it, by launch variables.

    They differ on process 0's machine if `JAX_COORDINATOR_BIND_ADDRESS` gives an address to listen on, such as `0.0.0.0`,
    which nobody can call.
    """
    host = environ["MASTER_ADDR"].strip("[]")
    if environ["NODE_RANK"] == "0":
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        address, _ = bind_address(place, environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"])
        return address, host if os.environ.get(ASKED) else address
    address = address_towards(host, int(environ["MASTER_PORT"]))
    return address, address


# --------------------------------------------------------------------------------------------------
# The state of processes that have lost theirs, sent by those that have it, before the first step.
# --------------------------------------------------------------------------------------------------

_TRIES = 3
_PAUSE = 1.0
"""Seconds before the second try; twice that before the third."""


def refill(team: Team, agreed: Agreed, deliver: Callable[[int], None]) -> None:
    """Send each process the state that it lacks, with retries; returns when all have it. All processes call this.

    Args:
      team: the processes.
      agreed: who sends to whom.
      deliver: sends the process of a rank its state; it raises OSError when that fails.

    Raises:
      OSError: in every process, naming who did not get its state. The copies of the others are what they were.
    """
    for number in range(_TRIES):
        faults = tell_all_at_length(team, "refill processes from memory", partial(_sent, team.rank, agreed, deliver))
        failed = {int(rank): fault for each in faults for rank, fault in each.items()}
        if not failed:
            break
        if number == _TRIES - 1:
            lines = [f"process {rank} did not get its state: {fault}" for rank, fault in sorted(failed.items())]
            raise OSError("\n".join([*lines, f"the copies of step {agreed.step} stay in memory, for the next start"]))
        if team.leads:
            logger.warning("process(es) %s did not get their state, it is sent again: %s", sorted(failed), failed)
        agreed = Agreed(agreed.step, tuple(s if r in failed else r for r, s in enumerate(agreed.sources)))
        time.sleep(_PAUSE * 2**number)


def _sent(rank: int, agreed: Agreed, deliver: Callable[[int], None]) -> dict[str, str]:
    """Send the agreed states from one process; returns an error text for each receiver that did not get it."""
    faults = {}
    for other in (each for each, source in agreed.moves().items() if source == rank):
        try:
            deliver(other)
        except (OSError, DamagedCopy) as error:
            faults[str(other)] = f"process {rank} sent it: {error}"
    return faults


# --------------------------------------------------------------------------------------------------
# The copies that the processes of one job send each other: who listens where, and what is expected there.
# --------------------------------------------------------------------------------------------------

REFILL = "refill"
"""Purpose of what a process sends to one that has lost its state."""

KEEP = "keep"
"""Purpose of what a process sends to the one that keeps its copies."""

_PARTING = 60.0
"""Seconds that a process waits at its end for another one that says nothing more."""


class Exchange:
    """Listens for copies, and knows where the others listen; all processes create one together.

    Args:
      team: the processes.
      environ: the launcher's variables.
      boxes: what is expected here, by purpose and the sender's rank.
    """

    def __init__(self, team: Team, environ: Mapping[str, str], boxes: Mapping[tuple[str, int], Box]):
        nonce = team.decide("prepare copies in memory", lambda: secrets.token_hex(16))
        self._rank, self._team, self._token = team.rank, team, job_token(environ) + nonce.encode()
        listens, reached = own_addresses(environ)
        self._post = Post(listens, self._token, reached)
        self._post.boxes.update(boxes)
        self._addresses = team.tell_all("prepare copies in memory", self._post.address)

    def send(self, to: int, purpose: str, generation: Generation, keep: int | None = None) -> None:
        """Send a copy to the process of a rank (see `send`).

        Raises:
          OSError: when it is not kept there.
        """
        send(self._addresses[to], self._token, purpose, self._rank, generation, keep)

    def part(self, sent: Callable[[], None]) -> None:
        """Return when no process sends anything more, or when one has stopped answering.

        Args:
          sent: returns when this process has sent all.
        """
        team = copy(self._team)
        team.timeout = _PARTING
        try:
            tell_all_at_length(team, "end with copies in memory", sent)
        except (TimeoutError, jax.errors.JaxRuntimeError) as error:
            logger.warning("the last copies of the state in memory may not be complete: %s", error)

    def close(self) -> None:
        """Stop listening."""
        self._post.close()


# --------------------------------------------------------------------------------------------------
# A run's state in memory every few steps, and back after a restart: what `CheckpointManager` does on disk.
# --------------------------------------------------------------------------------------------------


class AtRest(Protocol):
    """Protocol of an object whose arrays can be copied as they are sharded on devices: a trainer."""

    def resting_arrays(self) -> dict[str, jax.Array]:
        """Every array by a name, as it is sharded on the devices."""
        ...

    def take_resting(self, arrays: Mapping[str, jax.Array]) -> None:
        """Replace the state by such arrays."""
        ...


class MemoryCopies:
    """Copies of what this process's devices hold, in its launcher's memory. All processes make the same calls.

    Call `look` once before the first step, then `restore` or `forget` (see `restore_newest`), `keep` after every step, `close`
    at the end. A copy blocks while the arrays are copied to the host; a background thread computes checksums and sends it to
    another machine.

    Args:
      every: steps between copies.
      environ: the launcher's variables.

    Attributes:
      lost: the newest step that the copies say all processes had, where `look` finds none that all can have; else None.

    Raises:
      ValueError: without a launcher that restarts processes: nothing would outlive them.
    """

    def __init__(self, every: int, environ: Mapping[str, str] = os.environ):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        given = handed(environ)
        if given is None:
            raise ValueError(
                f"copies of the state in memory (every {every} steps) need a launcher that outlives the processes and starts "
                "them again, on Linux: axonml-jax launch --max-restarts 3 ..., or leave them out"
            )
        self._every, self._environ, self._team = every, environ, Team()
        self._own = OwnCopies([Generation(handle) for handle in given.own])
        self._held = {rank: [Generation(handle) for handle in files] for rank, files in given.others.items()}
        self._rounds, self._last, self._told = CopyRounds(self._team), -1, False
        self.lost: int | None = None
        self._members: Members | None = None
        self._agreed: Agreed | None = None
        self._exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._made, self._blocked = 0, 0.0

    def close(self, *, together: bool = True) -> None:
        """Wait for a copy under way, and stop listening.

        Args:
          together: listen until the others are ready too, who may be sending their last copy here; a minute at most where one
            no longer comes. False: this process ends with an error, and so may they.
        """
        self._told = self._told or not together  # the others may have closed already
        if self._exchange is not None and together:
            self._exchange.part(self._wait)
        self._wait()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    @property
    def bound(self) -> str:
        """Describe how much memory the copies take at most."""
        members, rank = self._known, self._team.rank
        if not members.own:
            return "none is made: there is too little on these machines"
        whose = [
            (members.sizes[rank], "its own"),
            *((members.sizes[r], f"process {r}'s") for r in members.kept_by(rank)),
        ]
        sizes = ", ".join(f"{GENERATIONS} x {size / 1e6:,.1f} MB of {name} state" for size, name in whose)
        return f"copied every {self._every} steps; process {rank} keeps {sizes}"

    @property
    def cost(self) -> str:
        """Describe how long the copies have blocked this process so far."""
        skipped = f", {self._rounds.skipped} left out as the one before was under way" if self._rounds.skipped else ""
        each = 1000 * self._blocked / max(self._made, 1)
        return f"{self._made} copies in memory, each blocked {each:.1f} ms{skipped}"

    def look(self, run: AtRest, *, of: str = "") -> int | None:
        """Exchange what copies all processes have, and prepare to make some. Existing copies are not changed.

        Args:
          run: the sharding of its arrays says which copies fit, and what copies will hold.
          of: the run's name: copies of another run in the same launch are not taken.

        Returns:
          The newest step that `restore` can go on from; None: there is none.

        Raises:
          ValueError: when the copies would take more than half of a machine's memory.
        """
        arrays = run.resting_arrays()
        size = laid_out(parts_of(arrays))[1] - START
        self._members = gather(self._team, self._environ, f"{shard_name(arrays)} {of}", size)
        self._agreed = self._agree()
        if (self._agreed and self._agreed.moves()) or any(keeper is not None for keeper in self._members.keepers):
            self._exchange = Exchange(self._team, self._environ, self._boxes(self._agreed))
        return None if self._agreed is None else self._agreed.step

    def restore(self, run: AtRest, *, data: Positioned | None = None) -> Manifest:
        """Resume from the step that `look` found; a process that lost its state first gets it from another.

        Args:
          run: takes its arrays back.
          data: the data loader, which goes on from where it was.

        Returns:
          What a checkpoint of the step would say about itself.

        Raises:
          OSError: in every process, when one does not get its state. All that was there still is, for the next start.
          ValueError: when the data is another.
        """
        agreed, shard = self._agreed, self._known.shards[self._team.rank]
        assert agreed is not None, "look has found nothing"
        if moves := agreed.moves():
            refill(self._team, agreed, partial(self._deliver, agreed.step))
            said = [f"process {rank} from process {source}" for rank, source in moves.items()]
            print0(f"state of step {agreed.step} sent: {', '.join(said)}")
        if self._team.rank not in moves and (shard, agreed.step) not in self._own.held:  # it kept this for another one
            self._own.for_refill(agreed.step, ()).become(self._find(shard, agreed.step))
        self._drop_after(agreed.step)
        values, about = self._own.read(shard, agreed.step, run.resting_arrays())
        manifest = Manifest(**about)
        if data is not None and manifest.data is not None:
            go_on(data, manifest.data)
        run.take_resting(values)
        self._rounds.go_on_from(agreed.step)
        self._last = agreed.step
        return manifest

    def forget(self) -> None:
        """Drop all copies, because the run continues from elsewhere."""
        self._wait()
        self._own.forget()
        for generation in self._others:
            generation.clear()
        self._free_unused(() if self._known.own else self._own.generations)
        self._rounds.go_on_from(None)
        self._last = -1

    def keep(self, step: int, run: Any, *, data: Positioned | None = None, now: bool = False) -> bool:
        """Start a copy if it is due.

        Args:
          step: updates made.
          run: the trainer.
          data: the data loader, whose position belongs to the step.
          now: make one though it is not due, because the run ends here, and the next start may go on from it.

        Returns:
          Whether one was begun, the same in all processes: not while some are still at the one before, without `now`.
        """
        if now:
            self._wait()
        elif step % self._every:
            return False
        if not self._known.own:
            return False
        began = time.perf_counter()
        if step <= self._last:  # the run went back
            self.forget()
        if not self._rounds.may_begin(step) and not now:
            self._rounds.skip()
            return False
        self._wait()
        self._rounds.begin(step)
        self._last = step
        about = asdict(manifest_of(run, {}, step=step, data=data))
        shard = self._known.shards[self._team.rank]
        finish = self._own.begin(step, run.resting_arrays(), shard, about, self._rounds.complete)
        self._thread = threading.Thread(target=self._finish, args=(step, finish), name=f"copy of step {step}")
        self._thread.start()
        self._made, self._blocked = self._made + 1, self._blocked + time.perf_counter() - began
        return True

    @property
    def _known(self) -> Members:
        assert self._members is not None, "call look first"
        return self._members

    @property
    def _others(self) -> list[Generation]:
        """The generations that hold copies of other processes."""
        return [generation for held in self._held.values() for generation in held]

    def _agree(self) -> Agreed | None:
        """The newest step that all processes can resume from."""
        shards, generations = self._known.shards, (*self._own.generations, *self._others)
        # Before those are forgotten whose parts are damaged: they too say what there once was.
        indices = [index for each in generations if (index := peek(each)) is not None and index.shard in shards]
        known = max((index.complete for index in indices if index.complete is not None), default=None)
        whole = [*self._own.look(), *(index for index in whole_copies(self._others) if index is not None)]
        said = self._team.tell_all("compare copies of the state in memory", [steps_of(whole), known])
        everyone = [found for found, _ in said]
        agreed = agree(shards, everyone, self._known.nodes)
        if agreed is None:
            self.lost = max((step for _, step in said if step is not None), default=None)
            if any(everyone):
                gone = missing(shards, everyone)
                what = f"none of process(es) {list(gone)}'s" if gone else "no step of which every process's"
                print0(f"of the copies in memory {what} is there")
        return agreed

    def _boxes(self, agreed: Agreed | None) -> dict[tuple[str, int], Box]:
        """The destinations of what other processes will send."""
        members, rank = self._known, self._team.rank
        boxes = {(KEEP, r): Box(self._held[r], members.sizes[r], members.shards[r]) for r in members.kept_by(rank)}
        moves = {} if agreed is None else agreed.moves()
        if agreed is not None and rank in moves:
            sent = {members.shards[other] for other, source in moves.items() if source == rank}
            place = [self._own.for_refill(agreed.step, sent)]
            boxes[REFILL, moves[rank]] = Box(place, members.sizes[rank], members.shards[rank])
        return boxes

    def _deliver(self, step: int, rank: int) -> None:
        """Send another process its state."""
        assert self._exchange is not None
        self._exchange.send(rank, REFILL, self._find(self._known.shards[rank], step))

    def _drop_after(self, step: int) -> None:
        """Drop copies of later steps, which not every process has: made again in another world, they may differ."""
        self._own.keep_only(self._known.shards[self._team.rank], step)
        for generation in self._others:
            if (held := holds(generation)) is not None and held[1] > step:
                generation.clear()
        self._free_unused()

    def _free_unused(self, own: Sequence[Generation] = ()) -> None:
        """Release the memory of copies for which these machines have no room; by now each process has its state."""
        if not self._known.partners:
            for generation in (*own, *self._others):
                generation.free()

    def _find(self, shard: str, step: int) -> Generation:
        return next(each for each in (*self._own.generations, *self._others) if holds(each) == (shard, step))

    def _finish(self, step: int, finish: Callable[[], Generation]) -> None:
        """In the background: compute checksums, send the copy to another machine, and report the outcome."""
        made, keeper = False, self._known.keepers[self._team.rank]
        try:
            generation = finish()
            if keeper is not None:
                assert self._exchange is not None
                self._exchange.send(keeper, KEEP, generation, self._rounds.complete)
            made = True
        except Exception as error:  # whatever it is: the others wait for word of this copy
            self._tell_once(step, error)
        try:
            self._rounds.end(step, made)
        except jax.errors.JaxRuntimeError as error:
            self._tell_once(step, error)

    def _tell_once(self, step: int, error: Exception) -> None:
        if not self._told:
            self._told = True
            logger.warning("the copy of step %d in memory is not complete, the ones before stay: %s", step, error)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


# --------------------------------------------------------------------------------------------------
# Going on from the newest step that is good, in memory or on disk; copies are given up when the run has gone on from
# disk.
# --------------------------------------------------------------------------------------------------


def restore_newest(
    memory: MemoryCopies, manager: CheckpointManager, run: Any, *, of: str = "", data: Positioned | None = None
) -> tuple[Manifest | None, bool]:
    """Resume from memory, unless a newer step on disk is intact. All processes make the same calls.

    Args:
      memory: the copies in memory.
      manager: of the checkpoints on disk.
      run: a trainer, which takes the arrays.
      of: the run's name (see `MemoryCopies.look`).
      data: the data loader, which goes on from where it was.

    Returns:
      What the step says about itself, and whether it was in memory; None: there is nothing, and never was.

    Raises:
      DamagedCheckpoint: when all on disk are damaged and there is no step in memory, and when all processes had a step in
        memory, no longer have, and there is nothing on disk: nothing begins anew unasked.
      OSError, ValueError: see `MemoryCopies.look` and `restore`, and `CheckpointManager.restore`.
    """
    team, step = Team(), memory.look(run, of=of)
    newest = max(team.decide("look for checkpoints", lambda: manager.steps), default=-1)
    if step is not None and newest <= step:
        return memory.restore(run, data=data), True
    if step is None:
        found = manager.restore(run, data=data)
        if found is None and memory.lost is not None:
            raise DamagedCheckpoint(
                f"all processes had a copy of step {memory.lost} in memory, but no step is complete in memory any more, and "
                f"{manager.place} has no checkpoint: there is nothing to continue from, and the run is not restarted from "
                "the beginning by itself. Start a new run; checkpoint.every saves steps to disk too"
            )
    elif (found := _good(manager, run, data, step, team)) is None:
        return memory.restore(run, data=data), True
    memory.forget()
    return found, False


def _good(manager: CheckpointManager, run: Any, data: Positioned | None, step: int, team: Team) -> Manifest | None:
    """The manifest of the step that all processes restored from disk; None if it is not newer, or not intact in all of them."""
    try:
        found, said = manager.restore(run, data=data), ""
    except DamagedCheckpoint as error:
        found, said = None, str(error)
    heard = team.tell_all("restore from disk", [-1 if found is None else found.step, said])
    if all(each > step for each, _ in heard):
        return found
    if team.leads:
        why = next((text for _, text in heard if text), "the newest checkpoint on disk is damaged")
        logger.warning("the run goes on from step %d in memory: %s", step, why)
    return None
