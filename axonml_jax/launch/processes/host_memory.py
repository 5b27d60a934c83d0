"""Memory of the launcher that its workers write: it stays when a worker dies, and goes when the launcher does, however it ends.

Linux gives files that are in memory only and have no name (`memfd_create`): nobody else can open them, and nothing can be left
behind. An empty one costs nothing.
"""

import os
from collections.abc import Sequence

from axonml_jax.checkpoint.memory.handed import GENERATIONS, NAME, Handed
from axonml_jax.checkpoint.memory.partners import kept_by


class HostMemory:
    """The files of all workers of one machine, which has the same number of them always. A context.

    Args:
      sizes: workers of every machine.
      node_rank: which machine this is.
    """

    def __init__(self, sizes: Sequence[int], node_rank: int):
        self._own = [_files(f"worker {local}") for local in range(sizes[node_rank])]
        self._kept: list[list[tuple[int, ...]]] = [[] for _ in self._own]
        self.arrange(sizes, node_rank)

    def __enter__(self) -> "HostMemory":
        return self

    def __exit__(self, *exception):
        for handed in self._handed:
            for handle in handed.all:
                os.close(handle)

    def arrange(self, sizes: Sequence[int], node_rank: int, keep: bool = True) -> bool:
        """Say whose copies go where in the next world. What the files hold stays: a copy says itself what it is of.

        Args:
          sizes: workers of every machine.
          node_rank: which machine this is.
          keep: false empties all files, as what they hold is of a training that has gone on without this machine.

        Returns:
          Whether there are more files than before.
        """
        grown, first, self._handed = False, sum(sizes[:node_rank]), list[Handed]()
        for local, (own, files) in enumerate(zip(self._own, self._kept, strict=True)):
            whose = kept_by(first + local, sizes)
            while len(files) < len(whose):
                files.append(_files(f"another machine's, kept by worker {local}"))
                grown = True
            # Those that nobody needs any more are handed on too, for what they hold; no process has a negative rank.
            labels = [*whose, *(-number for number in range(1, len(files) - len(whose) + 1))]
            self._handed.append(Handed(own, dict(zip(labels, files, strict=True))))
        if not keep:
            for handle in (each for handed in self._handed for each in handed.all):
                os.ftruncate(handle, 0)
        return grown

    def of(self, local_rank: int) -> Handed:
        """What a worker is handed."""
        return self._handed[local_rank]


def can_outlive() -> bool:
    """Whether this system has such memory."""
    return hasattr(os, "memfd_create")


def _files(whose: str) -> tuple[int, ...]:
    return tuple(os.memfd_create(f"{NAME} of {whose}") for _ in range(GENERATIONS))
