"""Node 0's list of the machines that are there, and who of them makes up the next world."""

import time
from collections.abc import Sequence
from typing import Any

from axonml_jax.launch.processes.launch_options import LaunchOptions
from axonml_jax.launch.processes.machines.connection import Connection
from axonml_jax.launch.processes.machines.door import Door
from axonml_jax.launch.processes.machines.membership import regrouped
from axonml_jax.launch.processes.machines.trial import Trial


class Roster:
    """The machines that are there; node 0 is, and listens for the others until `close`.

    Args:
      options: of node 0's launcher.
      size: its number of workers.
      token: the job's.

    Attributes:
      sizes: numbers of workers, by node.
      trial: of the machines that have come to the attempt at hand.
    """

    def __init__(self, options: LaunchOptions, size: int, token: bytes):
        self.sizes = {0: size}
        self.trial = Trial()
        self._options = options
        self._door: Door | None = Door(options, size, token)
        self._newest = time.monotonic()

    def sources(self) -> Sequence[Any]:
        """What to select on."""
        return [] if self._door is None else self._door.sources()

    def hear(self) -> list[tuple[int, Connection, str]]:
        """Who has called: its node, the line to it, and what is wrong with it; if nothing is, it is there from now on."""
        heard = []
        for node, size, line, fault in () if self._door is None else self._door.pump(self.sizes):
            fault = fault or self.trial.fault(node)
            if not fault:
                self.sizes[node], self._newest = size, time.monotonic()
            heard.append((node, line, fault))
        return heard

    def drop(self, node: int) -> None:
        """A machine has gone."""
        self.sizes.pop(node, None)

    def next_nodes(self, before: Sequence[int]) -> tuple[int, ...]:
        """The machines of the next world, after one of these."""
        return regrouped(before, self.sizes, self._options.node_unit)

    def few(self, before: Sequence[int]) -> str:
        """Why no world can be made of them, in words; empty where one can."""
        options, count = self._options, len(self.next_nodes(before))
        if count >= options.min_nodes:
            return ""
        unit = f" in groups of {options.node_unit}" if options.node_unit > 1 else ""
        return f"{len(self.sizes)} machine(s) are there, and --nnodes asks for {options.min_nodes}{unit}"

    def could_grow(self, before: Sequence[int]) -> bool:
        """Whether machines wait that would make a larger world than these."""
        return len(self.next_nodes(before)) > len(before) and self.settled

    def to_send_away(self, before: Sequence[int]) -> tuple[int, ...]:
        """The machines that had better go, as the first attempt with them has failed; none where the others are too few."""
        blamed, options = self.trial.blamed, self._options
        others = regrouped(before, self.sizes.keys() - set(blamed), options.node_unit)
        return blamed if len(others) >= options.min_nodes else ()

    @property
    def settled(self) -> bool:
        """Whether no more machines are waited for: all are there, or nobody has come for `--last-call` seconds."""
        if len(self.sizes) == self._options.nnodes:
            return True
        return self._options.elastic and time.monotonic() > self._newest + self._options.last_call

    def close(self) -> None:
        """Listen no more."""
        if self._door is not None:
            self._door.close()
            self._door = None
