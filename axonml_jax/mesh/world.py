"""The world: every rank of the job, and which of them this process (or this thread of `spawn`) holds."""

import dataclasses
from collections.abc import Sequence

import jax
import jaxlib
import numpy as np
from jax.sharding import AxisType, Mesh

from axonml_jax.compat.processes.platform import backend_started
from axonml_jax.mesh.backend import Backend
from axonml_jax.mesh.fake_devices import fake_devices, requested_devices
from axonml_jax.mesh.group import DEFAULT_TIMEOUT, ProcessGroup, as_ranks
from axonml_jax.mesh.ranks.rendezvous import Board


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class World:
    """All ranks. A rank is a device; launchers count processes (the two agree under one device per process).

    Attributes:
      backend: what carries the messages, and the device of every rank.
      local_ranks: the ranks this process holds, or the one rank of a thread of `spawn`.
      num_processes: number of processes (threads of `spawn` count as processes).
      process_index: which of them this is.
      local_rank: which process of its host this is.
    """

    backend: Backend
    local_ranks: tuple[int, ...]
    num_processes: int
    process_index: int
    local_rank: int = 0
    board: Board | None = dataclasses.field(default=None, compare=False)
    timeout: float = dataclasses.field(default=DEFAULT_TIMEOUT, compare=False)

    @classmethod
    def mock(cls, world_size: int = 1) -> "World":
        """A world of simulated devices, all held by this process.

        Raises:
          RuntimeError: when JAX has started with fewer devices.
        """
        backend = MockBackend(world_size)
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
    """

    name = "mock"

    def __init__(self, num_devices: int | None = None):
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
    """The world of a backend as this process sees it."""
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
    """One world per rank for threads of this process, meeting at one board.

    Raises:
      RuntimeError: when JAX has started with fewer devices.
    """
    backend = MockBackend(world_size)
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
