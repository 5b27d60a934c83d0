"""JAX's connection to the coordinator of a job of several processes: its key-value store and its barriers."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

# "Task 1 heartbeat timeout" of jax 0.12, "/job:jax_worker/replica:0/task:1" before it.
_TASK = re.compile(r"\b[Tt]ask[ :](\d+)")


class CoordinatorClient(Protocol):
    """What the library uses of it. Whatever fails raises `jax.errors.JaxRuntimeError`; times are in milliseconds."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Set a key that nobody has set, or any."""
        ...

    def key_value_increment(self, key: str, increment: int) -> int:
        """Add to a key's number, 0 at first; the sum."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All whole keys under a folder (`key` ends with a slash), with their values."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait until a key is set; its value."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forget a key, or the folder of that name."""
        ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None) -> None:
        """Wait until the processes, or all, have come here; a name is good for one barrier."""
        ...


def lost_processes(error: BaseException) -> list[int]:
    """The processes that JAX names when it fails because some have gone; none where it names nobody, as at a timeout.

    >>> lost_processes(RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout. This indicates that the remote task has failed"))
    [1]
    """
    text = str(error)
    return sorted({int(number) for number in _TASK.findall(text)}) if "heartbeat" in text or "task has" in text else []


def coordinator_client() -> CoordinatorClient:
    """This process's connection."""
    # jax.distributed has no public handle to its key-value store and barriers; Orbax reads the same attribute.
    from jax._src import distributed

    client: Any = distributed.global_state.client
    assert client is not None, "several processes without jax.distributed"
    return client
