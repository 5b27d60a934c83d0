"""Memory of the launcher that its workers write: it stays when a worker dies, and goes when the launcher does, however it ends.

Linux gives files that are in memory only and have no name (`memfd_create`): nobody else can open them, and nothing can be left
behind. An empty one costs nothing.
"""

import os
from collections.abc import Sequence

from axonml_jax.checkpoint.memory.handed import GENERATIONS, NAME, Handed
from axonml_jax.checkpoint.memory.partners import kept_by


class HostMemory:
    """The files of all workers of one machine. A context.

    Args:
      sizes: workers of every machine.
      node_rank: which machine this is.
    """

    def __init__(self, sizes: Sequence[int], node_rank: int):
        self._handed: list[Handed] = []
        first = sum(sizes[:node_rank])
        for rank in range(first, first + sizes[node_rank]):
            others = {other: _files(f"process {other}, kept by {rank}") for other in kept_by(rank, sizes)}
            self._handed.append(Handed(_files(f"process {rank}"), others))

    def __enter__(self) -> "HostMemory":
        return self

    def __exit__(self, *exception):
        for handed in self._handed:
            for handle in handed.all:
                os.close(handle)

    def of(self, local_rank: int) -> Handed:
        """What a worker is handed."""
        return self._handed[local_rank]


def can_outlive() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")


def _files(whose: str) -> tuple[int, ...]:
    return tuple(os.memfd_create(f"{NAME} of {whose}") for _ in range(GENERATIONS))
