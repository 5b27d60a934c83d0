"""Process groups: which ranks talk to each other, along which mesh axes, and running a program on them eagerly."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from axonml_jax.mesh.axes import as_axes
from axonml_jax.mesh.ranks.group_program import Program
from axonml_jax.mesh.ranks.process_engine import ProcessEngine
from axonml_jax.mesh.ranks.rank_engine import Engine, LoneEngine, ThreadEngine
from axonml_jax.mesh.ranks.rendezvous import Board
from axonml_jax.synonyms import AXES as SYNONYMS

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
    board: Board | None = dataclasses.field(default=None, compare=False, kw_only=True)
    timeout: float = dataclasses.field(default=DEFAULT_TIMEOUT, compare=False, kw_only=True)

    def __post_init__(self):
        axes = tuple(axis if axis in self.mesh.axis_names else SYNONYMS.get(axis, axis) for axis in as_axes(self.axes))
        unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
        if unknown or not axes or len(set(axes)) < len(axes):
            raise ValueError(f"group axes {axes}: they must be distinct axes of the mesh, {self.mesh.axis_names}")
        object.__setattr__(self, "axes", axes)
        along = self._ranks_along_axes()
        ranks = along if self.ranks is None else tuple(self.ranks)
        outside = [rank for rank in ranks if rank not in along]
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
        """Whether the group is only some of the ranks along its axes: traced collectives must leave the others out."""
        return self.size < math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where along `axes` the members stand (`jax.lax.axis_index(axes)`), in group order."""
        along = self._ranks_along_axes()
        return tuple(along.index(rank) for rank in self.ranks)

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

    def run(self, program: Program, value: Any, *, name: str) -> Any:
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
        """Give `value` to a member, which must call `recv`. Returns when it has it.

        Both meet, so two ranks that first send to each other are told so at once instead of waiting for ever.

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

    def _engine(self, name) -> Engine:
        if self.board is not None:
            return ThreadEngine(self.ranks, self.sub_mesh, self.ranks[self.rank], self.board)
        sub_mesh = self.sub_mesh
        local = [device for device in sub_mesh.devices.flat if device.process_index == jax.process_index()]
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
    """Ranks in ascending order, as the members of a new group.

    Raises:
      ValueError: when they are empty, repeated or outside the world.
    """
    given = tuple(ranks)
    wrong = sorted({rank for rank in given if given.count(rank) > 1 or not 0 <= rank < world_size})
    if wrong or not given:
        raise ValueError(
            f"new_group({list(given)}): {wrong or 'nothing'} cannot be members; give distinct ranks between 0 and "
            f"{world_size - 1}"
        )
    return tuple(sorted(given))
