"""What the launcher hands to a process: memory that stays when the process has ended, as open files without a name.

Nobody else can open them, and the kernel frees them when the launcher and all its processes have ended, however they ended.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

MEMORY = "AXONML_JAX_MEMORY"
"""The variable that says which file is whose."""

NAME = "axonml_jax state"
"""How the names begin that the kernel shows for these files."""

GENERATIONS = 2
"""Copies of one process's state: the newest whole one stays while another is written."""


@dataclass(frozen=True)
class Handed:
    """The files of one process, each `GENERATIONS` descriptors.

    Attributes:
      own: for its own state.
      others: for the states of processes on other machines, by their rank.
    """

    own: tuple[int, ...]
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def all(self) -> tuple[int, ...]:
        """Every descriptor."""
        return (*self.own, *(each for files in self.others.values() for each in files))

    def text(self) -> str:
        """As the variable says it.

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
    """What this process was handed; None without a launcher that restarts it, and in a child that has the variable only."""
    text = environ.get(MEMORY)
    found = Handed.parse(text) if text else None
    return found if found is not None and all(map(_is_handed, found.all)) else None


def _is_handed(handle: int) -> bool:
    """Whether an open file is such memory: under its number a child may have any other file."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}").startswith(f"/memfd:{NAME}")
    except OSError:
        return False
