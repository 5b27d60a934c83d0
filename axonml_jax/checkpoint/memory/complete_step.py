"""Whether a copy is over in all processes, and whether all have it: decided once, by whoever asks first, then the same for all.

A process that counted for itself could find a step complete that another one found incomplete a moment before, and has
overwritten since. So at every step at which a copy is due all ask about the one before, and hear the same: it is complete, and
stays while the next is made; or some process could not make it, and the next goes over it; or some process is not ready yet,
and nobody makes one now. So all make copies of the same steps, those that the slowest process has time for.
"""

from enum import Enum

import jax

from axonml_jax.compat.processes.coordination import coordinator_client

_TIMEOUT_MS = 60_000


class Outcome(Enum):
    """What has become of a copy: all processes have it, some could not make it, or some are still at it."""

    COMPLETE = "complete"
    FAILED = "failed"
    UNDER_WAY = "under way"


def tell(name: str, made: bool) -> None:
    """Tell the others that this process is ready with its copy.

    Args:
      name: of the step, the same in every process.
      made: whether it has the copy.
    """
    client = coordinator_client()
    if made:
        client.key_value_increment(f"{name}/made", 1)
    client.key_value_increment(f"{name}/ready", 1)  # last: who reads that all are ready reads all that were made


def outcome(name: str, size: int, now: int) -> Outcome:
    """What had become of a copy when the first process asked at a step.

    Args:
      name: of the copy's step.
      size: how many processes there are.
      now: the step at which all processes ask.
    """
    client, key = coordinator_client(), f"{name}/outcome/{now}"
    found = _found(name, size)
    try:
        client.key_value_set(key, found.value)
    except jax.errors.JaxRuntimeError:  # somebody was first, or the coordinator has gone: then this fails too
        found = Outcome(client.blocking_key_value_get(key, _TIMEOUT_MS))
    return found


def ready(name: str, size: int) -> bool:
    """Whether all processes are ready with a copy by now."""
    return coordinator_client().key_value_increment(f"{name}/ready", 0) == size


def _found(name: str, size: int) -> Outcome:
    if not ready(name, size):
        return Outcome.UNDER_WAY
    made = coordinator_client().key_value_increment(f"{name}/made", 0)
    return Outcome.COMPLETE if made == size else Outcome.FAILED
