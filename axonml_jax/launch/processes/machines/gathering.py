"""Whom the launcher of node 0 lets in, and what it answers: at once where machines come and go, else when all have called."""

from axonml_jax.launch.processes.launch_options import LaunchOptions
from axonml_jax.launch.processes.machines.connection import Connection
from axonml_jax.launch.processes.machines.lines import Lines
from axonml_jax.launch.processes.machines.roster import Roster


class Gathering:
    """The callers of node 0.

    Args:
      options: of its launcher.
      roster: its list of the machines that are there.
      lines: get those that are let in.
    """

    def __init__(self, options: LaunchOptions, roster: Roster, lines: Lines):
        self._options, self._roster, self._lines = options, roster, lines
        self._refused: list[Connection] = []  # they wait for everybody's answer, where all must come
        self._fault = ""

    @property
    def waits(self) -> bool:
        """Whether the first attempt waits for others."""
        return (not self._roster.settled or bool(self._roster.few(()))) and not self._fault

    @property
    def sizes(self) -> list[int]:
        """By node, the number of workers; 0 where nobody has come."""
        return [self._roster.sizes.get(node, 0) for node in range(self._options.nnodes)]

    def welcome(self) -> None:
        """Take in who has called. Where all must come, a wrong one is everybody's fault."""
        for node, line, fault in self._roster.hear():
            if self._options.elastic:
                line.send({"sizes": [0] * self._options.nnodes, "fault": fault})
            if not fault:
                self._lines.add(node, line)
            elif self._options.elastic:
                line.close()
            else:
                self._refused.append(line)
                self._fault = self._fault or fault

    def end(self, seconds: float) -> str:
        """Listen no more where all must come, and tell all how it went.

        Args:
          seconds: how long others were waited for.

        Returns:
          What was wrong, in words; empty where nothing was.
        """
        if self._roster.few(()):
            missing = sorted(set(range(self._options.nnodes)) - set(self._roster.sizes))
            self._fault = self._fault or f"node(s) {missing} never called within {seconds:g} s"
        if not self._options.elastic:
            self._roster.close()
            answer = {"sizes": self.sizes, "fault": self._fault}
            self._lines.tell(answer)
            for line in self._refused:
                line.send(answer)
        return self._fault

    def close(self) -> None:
        """Listen no more, and hang up on those that were refused."""
        self._roster.close()
        for line in self._refused:
            line.close()
