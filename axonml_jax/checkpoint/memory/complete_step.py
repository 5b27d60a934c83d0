"""Whether every process has its copy of a step: decided once, by whoever asks first, and then the same for all.

A process that counted for itself could find a step complete that another one found incomplete a moment before, and has
overwritten since. So everybody asks about a step that he has told of before he writes the next copy, and whoever is told that
it is incomplete may overwrite it: nobody will ever keep it, and give the complete one before it up for it.
"""

import jax

from axonml_jax.compat.coordination import coordinator_client

_TIMEOUT_MS = 60_000
_COMPLETE, _INCOMPLETE = "complete", "incomplete"


def tell(name: str) -> None:
    """Tell the others that this process has its copy.

    Args:
      name: of the step, the same in every process.
    """
    coordinator_client().key_value_increment(f"{name}/copies", 1)


def complete(name: str, size: int) -> bool:
    """Whether all processes had told when the first one asked.

    Args:
      name: of the step.
      size: how many processes there are.
    """
    client, key = coordinator_client(), f"{name}/verdict"
    found = _COMPLETE if client.key_value_increment(f"{name}/copies", 0) == size else _INCOMPLETE
    try:
        client.key_value_set(key, found)
    except jax.errors.JaxRuntimeError:  # somebody was first, or the coordinator has gone: then this fails too
        found = client.blocking_key_value_get(key, _TIMEOUT_MS)
    return found == _COMPLETE
