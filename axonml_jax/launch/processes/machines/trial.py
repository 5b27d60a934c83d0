"""The first attempt with machines that have come: where it soon fails, the others had better go on without them."""

import time
from collections.abc import Collection, Sequence

TRIAL = 1800.0
"""Seconds from the start of an attempt in which its failure is laid to machines that have come to it.

Programs differ in how long they compile before their first step, and launchers see no steps.
"""


class Trial:
    """What is known of the attempt at hand, on node 0, and of the machines that were sent away."""

    def __init__(self):
        self._new: tuple[int, ...] = ()
        self._began = 0.0
        self._away: dict[int, float] = {}

    def begin(self, before: Collection[int], now: Sequence[int]) -> None:
        """An attempt begins.

        Args:
          before: the machines of the attempt before; none at the first.
          now: its machines.
        """
        self._new = tuple(node for node in now if before and node not in before)
        self._began = time.monotonic()

    @property
    def blamed(self) -> tuple[int, ...]:
        """The machines that came to the attempt, while it is new."""
        return self._new if time.monotonic() - self._began < TRIAL else ()

    def send_away(self, node: int) -> None:
        """The attempt has failed, and a machine goes for it."""
        self._away[node] = time.monotonic()

    def fault(self, node: int) -> str:
        """Why a machine that calls is not let in yet, in words; empty where nothing is against it."""
        left = self._away[node] + TRIAL - time.monotonic() if node in self._away else 0.0
        if left <= 0:
            return ""
        return (
            f"the first attempt with node {node} failed, and the others went on without it; it may come again in {left:.0f} s, "
            "or at once with a --node-rank that is free"
        )
