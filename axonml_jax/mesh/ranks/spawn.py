"""Run a function once per rank, each rank a thread with one simulated device: eager code as on many machines."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from axonml_jax.mesh.group import DEFAULT_TIMEOUT
from axonml_jax.mesh.world import World, threaded_worlds


def spawn(
    fn: Callable[..., Any], world_size: int, *, args: Sequence[Any] = (), timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    """`fn(world, *args)` once per rank, each in a thread whose default device is its own simulated one.

    Args:
      fn: what a rank does; it communicates through groups of its `world`.
      world_size: number of ranks. Starts JAX with as many simulated devices if it has not started.
      args: further arguments, the same objects for every rank.
      timeout: seconds a rank waits for the others at a group call, and the others get to end after a failure.

    Returns:
      the ranks' results in rank order.

    Raises:
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
    """A rank of `spawn`. Logging finds it by this thread's `rank` and `world_size`."""

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
        """Let no other rank wait for this one."""
        board = self._call[1].board
        assert board is not None
        board.stop(self.rank, reason)


def _join(ranks: list[RankThread], timeout: float) -> None:
    """Wait for all ranks; once one has failed, for the others only `timeout` seconds more."""
    deadline = float("inf")
    while any(thread.is_alive() for thread in ranks) and time.monotonic() < deadline:
        for thread in ranks:
            thread.join(0.05)
        if deadline == float("inf") and any(thread.error is not None for thread in ranks):
            deadline = time.monotonic() + timeout
