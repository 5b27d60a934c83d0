"""An attempt of several machines, as node 0 announces it; or why there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """An attempt.

    Attributes:
      number: attempts before this one.
      port: where its coordinator listens.
      nodes: the machines that belong to it, in the order of their ranks.
      sizes: their numbers of workers.
    """

    number: int
    port: int
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def message(self) -> dict:
        """As launchers say it.

        >>> start = Start(1, 29502, (0, 2), (4, 4))
        >>> Start.of(start.message) == start
        True
        """
        return {"start": self.number, "port": self.port, "nodes": list(self.nodes), "sizes": list(self.sizes)}

    @staticmethod
    def of(message: dict) -> "Start":
        """The inverse of `message`."""
        return Start(message["start"], message["port"], tuple(message["nodes"]), tuple(message["sizes"]))


class Stopped(Exception):
    """A signal came while the launcher waited for others."""


class Over(Exception):
    """No further attempt is made: why, and the launcher's exit status as `status`."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status
