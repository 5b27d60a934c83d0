"""Worlds, backends and process groups, and ranks that run as threads of this process."""

import abc
import dataclasses
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from axonml_jax.base import AXIS_SYNONYMS
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.compat.processes import backend_started
from axonml_jax.compat.versions import installed
from axonml_jax.mesh.axes import AXES, AxisNames, as_axes, flat_axes
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.simulate import fake_devices, requested_devices

if TYPE_CHECKING:  # imported when a collective is called eagerly
    from axonml_jax.mesh.ranks import Board, Engine, Program

# --------------------------------------------------------------------------------------------------
# Process groups: which ranks talk to each other, along which mesh axes, and running a program on them eagerly.
# --------------------------------------------------------------------------------------------------

DEFAULT_TIMEOUT = 300.0
"""Seconds a rank waits for the others of its group."""


@dataclasses.dataclass(frozen=True, repr=False)
class ProcessGroup:
    """A set of ranks that communicate. A value: two groups are equal when mesh, axes and ranks are.

    Args:
      mesh: the mesh its axes belong to.
      axes: the mesh axes the group spans, the first slowest.
      ranks: global ranks of the members (positions in `jax.devices()`), in group order. None: all ranks along `axes`
        at the caller's place on the other axes.
      caller: the global rank that calls; None: the first rank of this process.
      board: where ranks that are threads meet (`spawn` gives it); None for processes.
      timeout: seconds a rank waits for the others at an eager call.

    Raises:
      ValueError: when an axis is not one of the mesh's, or a rank is not along the axes.
    """

    mesh: Mesh
    axes: tuple[str, ...] = ("data",)
    ranks: tuple[int, ...] = None  # pyright: ignore[reportAssignmentType]  # None only until __post_init__
    caller: int | None = dataclasses.field(default=None, compare=False, kw_only=True)
    board: "Board | None" = dataclasses.field(default=None, compare=False, kw_only=True)
    timeout: float = dataclasses.field(default=DEFAULT_TIMEOUT, compare=False, kw_only=True)

    def __post_init__(self):
        axes = tuple(
            axis if axis in self.mesh.axis_names else AXIS_SYNONYMS.get(axis, axis) for axis in as_axes(self.axes)
        )
        unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
        if unknown or not axes or len(set(axes)) < len(axes):
            raise ValueError(f"group axes {axes}: they must be distinct axes of the mesh, {self.mesh.axis_names}")
        object.__setattr__(self, "axes", axes)
        along = self._ranks_along_axes()
        ranks = along if self.ranks is None else tuple(self.ranks)
        known = set(along)
        outside = [rank for rank in ranks if rank not in known]
        if outside or not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"group ranks {ranks}: they must be distinct ranks along {axes}, which are {along}")
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def mock(cls) -> "ProcessGroup":
        """A group of one rank: this process's first device. Every collective on it is the identity."""
        return cls(Mesh(np.array(jax.local_devices()[:1]), ("data",), axis_types=(AxisType.Auto,)))

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    @property
    def members(self) -> bool:
        """Whether the group has only some of the ranks along its axes, so that traced collectives must leave the others out."""
        return self.size < math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def positions(self) -> tuple[int, ...]:
        """The members' indices along `axes` (`jax.lax.axis_index(axes)`), in group order."""
        places = {rank: place for place, rank in enumerate(self._ranks_along_axes())}
        return tuple(places[rank] for rank in self.ranks)

    @property
    def rank(self) -> int:
        """The caller's rank in the group.

        Raises:
          ValueError: when the caller is not a member.
        """
        caller = self._caller_rank()
        if caller not in self.ranks:
            raise ValueError(f"rank {caller} is no member of {self}; ask group.contains(rank) first")
        return self.ranks.index(caller)

    @property
    def sub_mesh(self) -> Mesh:
        """The members' devices alone, in group order, as one axis named `data`."""
        by_rank = dict(zip(_mesh_ranks(self.mesh).flat, self.mesh.devices.flat, strict=True))
        return Mesh(np.array([by_rank[rank] for rank in self.ranks]), ("data",), axis_types=(AxisType.Auto,))

    def contains(self, rank: int) -> bool:
        """Whether the global rank is a member."""
        return rank in self.ranks

    @no_mesh_around()
    def run(self, program: "Program", value: Any, *, name: str) -> Any:
        """Run one traced program on the whole group, called eagerly by every member with its own value.

        Args:
          program: `program(x) -> y` for use inside `shard_map` over one axis named "data", on `sub_mesh`. Give a
            function of a module, or a `functools.partial` of one: those are compiled once.
          value: this rank's tree of arrays; all ranks' trees, shapes and dtypes must agree.
          name: what is called, and what distinguishes the call; it must agree too, and errors show it.

        Returns:
          this rank's y, on this rank's device.

        Raises:
          ValueError: from a rank outside the group, from a process that holds several of its ranks, or in every member
            when the calls differ.
          TimeoutError: naming the ranks that did not call in time.
          PeerError: when another thread's rank has failed or returned.
        """
        return self._engine(name).run(program, value, name)

    def send(self, value: Any, dst: int, *, shift: Callable[..., Any]) -> None:
        """Send `value` to a member, which must call `recv`. Returns when it has arrived.

        Both meet, so two ranks that first send to each other get an error at once instead of waiting for ever.

        Args:
          value: tree of arrays.
          dst: the receiver's rank in the group.
          shift: traced `shift(x, source=, target=)` along "data" (a ppermute; collectives/ has it).

        Raises:
          ValueError, TimeoutError, PeerError: as `run` does, for the two ranks; both see a mismatch.
        """
        self._transfer(self.rank, dst, value, shift)

    def recv(self, src: int, like: Any, *, shift: Callable[..., Any]) -> Any:
        """The value a member gives with `send`, as a tree like `like` (arrays or `jax.ShapeDtypeStruct`s); see `send`.

        Args:
          src: the sender's rank in the group.
          like: tree whose shapes and dtypes the value has.
          shift: see `send`.
        """
        empty = jax.tree.map(lambda leaf: np.zeros(np.shape(leaf), leaf.dtype), like)
        return self._transfer(src, self.rank, empty, shift)

    def barrier(self) -> None:
        """Return once every member has called it. Raises as `run` does."""
        self._engine("barrier").barrier()

    def _transfer(self, src, dst, value, shift):
        if src == dst or not (0 <= src < self.size and 0 <= dst < self.size):
            raise ValueError(
                f"send or recv from rank {src} to rank {dst} of {self}: give the other's rank in the group, one of "
                f"{[rank for rank in range(self.size) if rank != self.rank]}"
            )
        ranks = (self.ranks[src], self.ranks[dst])
        pair = dataclasses.replace(self, ranks=tuple(sorted(ranks)))
        program = functools.partial(shift, source=pair.ranks.index(ranks[0]), target=pair.ranks.index(ranks[1]))
        return pair.run(program, value, name=f"send {ranks[0]} -> {ranks[1]}")

    def _engine(self, name) -> "Engine":
        from axonml_jax.mesh.ranks import LoneEngine, ProcessEngine, ThreadEngine

        if self.board is not None:
            return ThreadEngine(self.ranks, self.sub_mesh, self.ranks[self.rank], self.board)
        sub_mesh = self.sub_mesh
        local = [device for device in sub_mesh.devices.flat if _is_local(device)]
        if len(local) > 1:
            raise ValueError(
                f"{name}: this process holds {len(local)} ranks of {self}, and an eager call gives one rank's value. "
                "Use ax.spawn(fn, world_size=...) for one thread per rank, or ax.spmd(fn, group) or jax.shard_map to "
                "write all ranks as one program"
            )
        if not local:
            raise ValueError(f"{name}: this process holds no rank of {self}: only members may call")
        if self.size == 1:
            return LoneEngine(self.ranks, sub_mesh)
        rank = self.ranks[list(sub_mesh.devices.flat).index(local[0])]
        return ProcessEngine(self.ranks, sub_mesh, rank, self.timeout)

    def _ranks_along_axes(self) -> tuple[int, ...]:
        grid = _mesh_ranks(self.mesh)
        caller = self._caller_rank()
        place = np.argwhere(grid == caller)[0] if caller in grid else np.zeros(grid.ndim, int)
        names = self.mesh.axis_names
        along = grid[tuple(slice(None) if name in self.axes else int(i) for name, i in zip(names, place, strict=True))]
        order = [[name for name in names if name in self.axes].index(axis) for axis in self.axes]
        return tuple(int(rank) for rank in along.transpose(order).flat)

    def _caller_rank(self) -> int:
        if self.caller is not None:
            return self.caller
        grid = _mesh_ranks(self.mesh)
        local = [rank for rank, d in zip(grid.flat, self.mesh.devices.flat, strict=True) if _is_local(d)]
        return int(min(local, default=-1))

    def __repr__(self):
        return f"ProcessGroup(ranks={self.ranks}, axes={self.axes}, mesh={dict(self.mesh.shape)})"


def _is_local(device):
    return device.process_index == jax.process_index()


def _mesh_ranks(mesh: Mesh) -> np.ndarray:
    """The global rank of every device of the mesh: its position in `jax.devices()`.

    Devices that are not attached (a topology to compile for) count by their position in the mesh.
    """
    known = {device: rank for rank, device in enumerate(jax.devices())}
    devices = mesh.devices
    if all(device in known for device in devices.flat):
        return np.array([known[device] for device in devices.flat], int).reshape(devices.shape)
    return np.arange(devices.size).reshape(devices.shape)


def as_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Check the ranks of a new group, and sort them.

    Raises:
      ValueError: when they are empty, repeated or outside the world.
    """
    given = tuple(ranks)
    wrong = sorted(rank for rank, count in Counter(given).items() if count > 1 or not 0 <= rank < world_size)
    if wrong or not given:
        raise ValueError(
            f"new_group({list(given)}): {wrong or 'nothing'} cannot be members; give distinct ranks between 0 and "
            f"{world_size - 1}"
        )
    return tuple(sorted(given))


# --------------------------------------------------------------------------------------------------
# What carries the messages: gloo (CPU processes), NCCL (GPU), the TPU's own network; simulated devices need none.
# --------------------------------------------------------------------------------------------------


class Backend(abc.ABC):
    """The transport under a world: which collectives JAX uses, and on which devices.

    Subclass it to bring your own (`init(backend=YourBackend())`): `devices` then decides the world.

    Attributes:
      name: its short name, such as `gloo`.
    """

    name: str

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """The version of the library that carries the messages."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple:
        """The device of every rank, in rank order (other processes' devices too)."""

    def synchronize(self) -> None:
        """Wait for everything this process has dispatched."""
        jax.effects_barrier()
        for array in jax.live_arrays():
            try:
                array.block_until_ready()
            except RuntimeError:
                # Another thread may have donated it meanwhile; its computation's results are in the list too.
                if not array.is_deleted():
                    raise

    def __eq__(self, other):
        return type(self) is type(other) and self.devices == other.devices

    def __hash__(self):
        return hash((type(self), self.devices))

    def __repr__(self):
        return f"{type(self).__name__}(name={self.name!r}, version={self.version!r}, devices={len(self.devices)})"


class _JaxBackend(Backend):
    """All devices of JAX's default platform, which must be the one the transport is for."""

    platform: str

    @property
    def version(self) -> str:
        """The version of jaxlib, which holds the transport."""
        return jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]

    @property
    def devices(self) -> tuple:
        """Every device of the job."""
        devices = tuple(jax.devices())
        if devices[0].platform != self.platform:
            raise ValueError(
                f"backend {self.name} needs {self.platform} devices, but JAX runs on {devices[0].platform}: leave "
                f"backend=None to take what fits, or set JAX_PLATFORMS={self.platform} before Python starts"
            )
        return devices


class GlooBackend(_JaxBackend):
    """CPU devices of several processes, which communicate over TCP."""

    name = "gloo"
    platform = "cpu"


class NCCLBackend(_JaxBackend):
    """GPUs, which communicate by NCCL."""

    name = "nccl"
    platform = "gpu"

    @property
    def version(self) -> str:
        """NCCL's version where its package is installed, else jaxlib's."""
        for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
            if found := installed(package):
                return found
        return super().version


class TPUBackend(_JaxBackend):
    """TPU chips over their inter-chip links."""

    name = "tpu"
    platform = "tpu"

    @property
    def version(self) -> str:
        """libtpu's version where its package is installed, else jaxlib's."""
        return installed("libtpu") or super().version


# --------------------------------------------------------------------------------------------------
# The world: every rank of the job, and which of them this process (or this thread of `spawn`) holds.
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class World:
    """All ranks. A rank is a device; launchers count processes (the two agree under one device per process).

    Attributes:
      backend: what carries the messages, and the device of every rank.
      local_ranks: the ranks this process holds, or the one rank of a thread of `spawn`.
      num_processes: number of processes (threads of `spawn` count as processes).
      process_index: which of them this is.
      local_rank: which process of its host this is.
      launcher: what described the job: `torchrun` (and `axonml-jax launch`), `slurm`, `ray` or another launcher,
        `arguments`, `jax.distributed.initialize`, or `alone`.
    """

    backend: Backend
    local_ranks: tuple[int, ...]
    num_processes: int
    process_index: int
    local_rank: int = 0
    launcher: str = "alone"
    board: "Board | None" = dataclasses.field(default=None, compare=False)
    timeout: float = dataclasses.field(default=DEFAULT_TIMEOUT, compare=False)

    @classmethod
    def mock(cls, world_size: int = 1) -> "World":
        """A world of simulated devices, all held by this process.

        Raises:
          RuntimeError: when JAX has started with fewer devices.
        """
        from axonml_jax.mesh.launchers import mark_placed

        backend = MockBackend(world_size)
        mark_placed()
        return cls(backend=backend, local_ranks=tuple(range(world_size)), num_processes=1, process_index=0)

    @property
    def devices(self) -> tuple:
        """The device of every rank, in rank order."""
        return self.backend.devices

    @property
    def world_size(self) -> int:
        """The number of ranks: of devices, not of processes."""
        return len(self.devices)

    @property
    def rank(self) -> int:
        """The first of `local_ranks`."""
        return self.local_ranks[0]

    @property
    def is_main_process(self) -> bool:
        """Whether rank 0 is here."""
        return 0 in self.local_ranks

    @property
    def mesh(self) -> Mesh:
        """All devices along one axis, `data`, in rank order."""
        return Mesh(np.array(self.devices), ("data",), axis_types=(AxisType.Auto,))

    def default_group(self) -> ProcessGroup:
        """The group of all ranks."""
        return self.new_group(range(self.world_size))

    def new_group(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of these ranks, in ascending order. Any rank may make it; only members may call through it eagerly.

        Raises:
          ValueError: when the ranks are empty, repeated or outside the world.
        """
        members = as_ranks(ranks, self.world_size)
        return ProcessGroup(self.mesh, ("data",), members, caller=self.rank, board=self.board, timeout=self.timeout)

    def __repr__(self):
        return (
            f"World(rank={self.rank}, world_size={self.world_size}, local_ranks={self.local_ranks}, "
            f"process={self.process_index}/{self.num_processes}, backend={self.backend.name!r})"
        )


class MockBackend(Backend):
    """Simulated CPU devices of this process: deterministic, and what tests and laptops use.

    Args:
      num_devices: how many ranks; None for all CPU devices of this process.

    Raises:
      RuntimeError: when JAX has started with fewer devices.
      ValueError: for fewer than one.
    """

    name = "mock"

    def __init__(self, num_devices: int | None = None):
        if num_devices is not None and num_devices < 1:
            raise ValueError(f"{num_devices} mock ranks: give at least one")
        if num_devices is not None and not backend_started():
            fake_devices(max(num_devices, requested_devices()))
        devices = tuple(jax.local_devices(backend="cpu"))
        if num_devices is not None and len(devices) < num_devices:
            raise RuntimeError(
                f"{num_devices} mock ranks need as many simulated devices, but JAX has started with {len(devices)}: "
                f"call ax.fake_devices({num_devices}) before the first JAX operation"
            )
        self._devices = devices[:num_devices]

    @property
    def version(self) -> str:
        """The version of jaxlib."""
        return jaxlib.__version__  # pyright: ignore[reportPrivateImportUsage]

    @property
    def devices(self) -> tuple:
        """The simulated devices, one per rank."""
        return self._devices

    @staticmethod
    def create_world(world_size: int) -> list["World"]:
        """One `World` per rank, for threads that you start yourself (`spawn` starts them for you).

        Args:
          world_size: number of ranks, each on a simulated device of its own.

        Raises:
          RuntimeError: when JAX has started with fewer devices.
        """
        return threaded_worlds(world_size)


def local_world(backend: Backend, local_rank: int, timeout: float) -> World:
    """The world of a backend, seen from this process.

    Raises:
      ValueError: when the backend has no device of this process.
    """
    here = jax.process_index()
    local_ranks = tuple(rank for rank, device in enumerate(backend.devices) if device.process_index == here)
    if not local_ranks:
        raise ValueError(f"{backend!r} has no device of process {here}: give every process at least one rank")
    return World(
        backend=backend,
        local_ranks=local_ranks,
        num_processes=jax.process_count(),
        process_index=here,
        local_rank=local_rank,
        timeout=timeout,
    )


def threaded_worlds(world_size: int, timeout: float = DEFAULT_TIMEOUT) -> list[World]:
    """One world per rank, for threads of this process that share one board.

    Raises:
      RuntimeError: when JAX has started with fewer devices.
    """
    from axonml_jax.mesh.launchers import mark_placed
    from axonml_jax.mesh.ranks import Board

    backend = MockBackend(world_size)
    mark_placed()
    board = Board(timeout)
    return [
        World(
            backend=backend,
            local_ranks=(rank,),
            num_processes=world_size,
            process_index=rank,
            local_rank=rank,
            board=board,
            timeout=timeout,
        )
        for rank in range(world_size)
    ]


# --------------------------------------------------------------------------------------------------
# Whatever a user calls a mesh (a Mesh, a World, a group, nothing) as one with the library's axis names, all Auto.
# --------------------------------------------------------------------------------------------------


def as_mesh(
    target: Mesh | AbstractMesh | World | ProcessGroup | None = None,
    rename: Mapping[str, str] | None = None,
    *,
    own: Iterable[AxisNames] = (),
) -> Mesh | AbstractMesh:
    """Convert a mesh, world, group or None to a mesh.

    Args:
      target: a mesh of yours (returned as it is where its names and types are ours), a World, a group (its mesh; only
        the members' devices where it is part of its axes), or None for all devices along `data`.
      rename: your axis names to ours, on top of the synonyms (`base.py`).
      own: names of axes of your own, to which a plan gives a strategy (`Plan(axes=...)`); they stay as they are.

    Raises:
      ValueError: naming every axis that is not in `AXES` nor mapped to it, or that would double another.
      TypeError: for anything else.
      RuntimeError: in one of several launched processes that has not called `ax.init`.

    >>> import jax
    >>> as_mesh(jax.make_mesh((1, 1), ("dp", "model"))).axis_names
    ('data', 'tensor')
    """
    if target is None:
        return make_mesh(data=-1)
    if isinstance(target, World):
        return target.mesh
    if isinstance(target, ProcessGroup):
        return as_mesh(target.sub_mesh if target.members else target.mesh, rename, own=own)
    if not isinstance(target, Mesh | AbstractMesh):
        raise TypeError(f"{target!r} is no mesh: give a jax.sharding.Mesh, a World, a ProcessGroup, or None")
    if isinstance(target, Mesh):
        from axonml_jax.mesh.launchers import refuse_unjoined

        refuse_unjoined()
    kept = flat_axes(own)
    names = tuple(_renamed(target.axis_names, {name: name for name in kept} | dict(rename or {}), {*AXES, *kept}))
    types = (AxisType.Auto,) * len(names)
    if names == target.axis_names and target.axis_types == types:
        return target
    if isinstance(target, AbstractMesh):
        return AbstractMesh(target.axis_sizes, names, axis_types=types)
    return Mesh(target.devices, names, axis_types=types)


def _renamed(names, rename, known) -> list[str]:
    ours = [rename.get(name, AXIS_SYNONYMS.get(name, name)) for name in names]
    unknown = [name for name, our in zip(names, ours, strict=True) if our not in known]
    doubled = [name for name, our in zip(names, ours, strict=True) if our in known and ours.count(our) > 1]
    if unknown or doubled:
        parts = [f"axes {unknown} are unknown"] if unknown else []
        parts += [f"axes {doubled} would share a name"] if doubled else []
        raise ValueError(
            f"mesh with axes {tuple(names)}: {' and '.join(parts)}. Make the mesh with names among "
            f"{', '.join(AXES)} (known synonyms: {', '.join(AXIS_SYNONYMS)}), or give an axis of your own a strategy, "
            f"ax.parallelize(model, mesh, ax.Plan(axes={{{(unknown + doubled)[0]!r}: ax.Replicate()}}))"
        )
    return ours


# --------------------------------------------------------------------------------------------------
# Run a function once per rank, each rank a thread with one simulated device: eager code as on many machines.
# --------------------------------------------------------------------------------------------------


def spawn(
    fn: Callable[..., Any], world_size: int, *, args: Sequence[Any] = (), timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    """Run `fn(world, *args)` once per rank, each in a thread whose default device is its own simulated one.

    Args:
      fn: what a rank does; it communicates through groups of its `world`.
      world_size: number of ranks. Starts JAX with as many simulated devices if it has not started.
      args: further arguments, the same objects for every rank.
      timeout: seconds a rank waits for the others at a group call, and the others get to end after a failure.

    Returns:
      the ranks' results in rank order.

    Raises:
      ValueError: for a world size below 1.
      RuntimeError: when JAX has started with fewer devices.
      Exception: the first failure of a rank, with a note that names the rank; the others are stopped at their next
        group call.

    >>> spawn(lambda world: world.rank ** 2, 1)
    [0]
    """
    if world_size < 1:
        raise ValueError(f"spawn(world_size={world_size}): there must be at least one rank")
    ranks = [RankThread(fn, world, args) for world in threaded_worlds(world_size, timeout)]
    for thread in ranks:
        thread.start()
    try:
        _join(ranks, timeout)
    except BaseException:
        for thread in ranks:
            thread.stop("was interrupted")
        raise
    failed = [thread for thread in ranks if thread.error is not None]
    if not failed:
        return [thread.result for thread in ranks]
    first = min(failed, key=lambda thread: thread.ended)
    assert first.error is not None
    first.error.add_note(f"raised by rank {first.rank} of {world_size} in spawn")
    if running := [thread.rank for thread in ranks if thread.is_alive()]:
        first.error.add_note(f"rank(s) {running} were still running {timeout:g} s later")
    raise first.error


class RankThread(threading.Thread):
    """The thread of one rank of `spawn`. Logging finds it by its `rank` and `world_size`."""

    def __init__(self, fn: Callable[..., Any], world: World, args: Sequence[Any]):
        super().__init__(name=f"rank {world.rank}", daemon=True)
        self.rank = world.rank
        self.world_size = world.world_size
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = float("inf")
        self._call = (fn, world, args)

    def run(self) -> None:
        """Call the function; whatever happens, tell the other ranks that this one makes no further calls."""
        fn, world, args = self._call
        try:
            with jax.default_device(world.devices[self.rank]):
                self.result = fn(world, *args)
            reason = "has returned without making this call"
        except BaseException as error:
            self.error = error
            self.ended = time.monotonic()
            reason = f"has failed: {type(error).__name__}: {error}"
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """Tell the other ranks that this one makes no further calls."""
        board = self._call[1].board
        assert board is not None
        board.stop(self.rank, reason)


def _join(ranks: list[RankThread], timeout: float) -> None:
    """Wait for all ranks; after a failure, wait for the others only `timeout` seconds more."""
    deadline = float("inf")
    while any(thread.is_alive() for thread in ranks) and time.monotonic() < deadline:
        for thread in ranks:
            thread.join(0.05)
        if deadline == float("inf") and any(thread.error is not None for thread in ranks):
            deadline = time.monotonic() + timeout
