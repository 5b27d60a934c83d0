"""The state of processes that have lost theirs, sent by those that have it, before the first step."""

import time
from collections.abc import Callable
from functools import partial

from axonml_jax.checkpoint.memory.common_step import Agreed
from axonml_jax.checkpoint.memory.generation import DamagedCopy
from axonml_jax.checkpoint.places.long_work import tell_all_at_length
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger

_TRIES = 3
_PAUSE = 1.0
"""Seconds before the second try; twice that before the third."""


def refill(team: Team, agreed: Agreed, deliver: Callable[[int], None]) -> None:
    """Send what is missing, and return when it is there; all processes call this. A connection that breaks is made again.

    Args:
      team: the processes.
      agreed: who sends to whom.
      deliver: sends the process of a rank its state; it raises OSError when that fails.

    Raises:
      OSError: in every process, naming who did not get its state. The copies of the others are what they were.
    """
    for number in range(_TRIES):
        faults = tell_all_at_length(team, "refill processes from memory", partial(_sent, team.rank, agreed, deliver))
        failed = {int(rank): fault for each in faults for rank, fault in each.items()}
        if not failed:
            break
        if number == _TRIES - 1:
            lines = [f"process {rank} did not get its state: {fault}" for rank, fault in sorted(failed.items())]
            raise OSError("\n".join([*lines, f"the copies of step {agreed.step} stay in memory, for the next start"]))
        if team.leads:
            logger.warning("process(es) %s did not get their state, it is sent again: %s", sorted(failed), failed)
        agreed = Agreed(agreed.step, tuple(s if r in failed else r for r, s in enumerate(agreed.sources)))
        time.sleep(_PAUSE * 2**number)


def _sent(rank: int, agreed: Agreed, deliver: Callable[[int], None]) -> dict[str, str]:
    """What one process could not send, by whom it was for."""
    faults = {}
    for other in (each for each, source in agreed.moves().items() if source == rank):
        try:
            deliver(other)
        except (OSError, DamagedCopy) as error:
            faults[str(other)] = f"process {rank} sent it: {error}"
    return faults
