"""What the launcher passes to its processes besides their ranks: the launch, memory that outlives them, and who copies to
whom.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RUN_ID = "AXONML_JAX_RUN_ID"
"""The variable with the id of this process's launch; the launcher's guard, which imports nothing, repeats the name."""

# --------------------------------------------------------------------------------------------------
# What the launcher hands to a process: memory that stays when the process has ended, as open files without a name.
#
# Nobody else can open them, and the kernel frees them when the launcher and all its processes have ended, however they
# ended.
# --------------------------------------------------------------------------------------------------

MEMORY = "AXONML_JAX_MEMORY"
"""The environment variable with the descriptors of these files (`Handed.text`)."""

NAME = "axonml_jax state"
"""Prefix of the names that the kernel shows for these files."""

GENERATIONS = 2
"""Copies of one process's state: the newest complete one stays while another is written."""


@dataclass(frozen=True)
class Handed:
    """The file descriptors of a process's copies, `GENERATIONS` for each state that it holds.

    Attributes:
      own: for its own state.
      others: for the states of processes on other machines, by their rank.
    """

    own: tuple[int, ...]
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def all(self) -> tuple[int, ...]:
        """All descriptors."""
        return (*self.own, *(each for files in self.others.values() for each in files))

    def text(self) -> str:
        """The descriptors as the environment variable has them.

        >>> Handed((5, 6), {3: (7, 8)}).text()
        'own=5,6 3=7,8'
        """
        files = {"own": self.own, **self.others}
        return " ".join(f"{whose}={','.join(map(str, each))}" for whose, each in files.items())

    @staticmethod
    def parse(text: str) -> "Handed":
        """The inverse of `text`.

        >>> Handed.parse('own=5,6 3=7,8')
        Handed(own=(5, 6), others={3: (7, 8)})
        """
        files = {whose: tuple(map(int, each.split(","))) for whose, _, each in (p.partition("=") for p in text.split())}
        return Handed(files.pop("own"), {int(rank): each for rank, each in files.items()})


def handed(environ: Mapping[str, str] = os.environ) -> Handed | None:
    """The launcher's files for this process; None without a restarting launcher, or if the variable alone was inherited."""
    text = environ.get(MEMORY)
    found = Handed.parse(text) if text else None
    return found if found is not None and all(map(_is_handed, found.all)) else None


def _is_handed(handle: int) -> bool:
    """Whether a descriptor is a memory file of ours: in a child process the number may be any other file."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}").startswith(f"/memfd:{NAME}")
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------
# Who keeps whose copy: a process of the next machine, so that the loss of one machine loses no state.
# --------------------------------------------------------------------------------------------------


def keepers(sizes: Sequence[int]) -> tuple[int | None, ...]:
    """The rank that keeps a copy of each rank's state, on the next machine; None on a single machine, whose loss takes both.

    Args:
      sizes: processes of every machine, in the order of ranks.

    >>> keepers([2, 2]), keepers([2, 1]), keepers([4])
    ((2, 3, 0, 1), (2, 2, 0), (None, None, None, None))
    """
    if len(sizes) < 2:
        return (None,) * sum(sizes)
    first = [sum(sizes[:node]) for node in range(len(sizes))]
    found = []
    for node, size in enumerate(sizes):
        following = (node + 1) % len(sizes)
        found += [first[following] + local % sizes[following] for local in range(size)]
    return tuple(found)


def kept_by(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose copies one rank keeps.

    >>> kept_by(2, [2, 1]), kept_by(0, [2, 2])
    ((0, 1), (2,))
    """
    return tuple(other for other, keeper in enumerate(keepers(sizes)) if keeper == rank)


def to_send(sizes: Sequence[int], shards: Sequence[str]) -> tuple[int | None, ...]:
    """The rank to which each rank sends its state; None if a process on another machine has the same shards anyway.

    Args:
      sizes: processes of every machine.
      shards: what every process holds, by rank; the same text means the same parts of the same arrays.

    >>> to_send([1, 1], ["a", "a"]), to_send([2, 2], ["a", "b", "a", "c"])
    ((None, None), (None, 3, None, 1))
    """
    node = [node for node, size in enumerate(sizes) for _ in range(size)]
    elsewhere = [
        any(shards[other] == shards[rank] and node[other] != node[rank] for other in range(len(node)))
        for rank in range(len(node))
    ]
    return tuple(None if elsewhere[rank] else keeper for rank, keeper in enumerate(keepers(sizes)))
