"""What the processes of a job tell each other about a checkpoint, through JAX's coordinator: never a device collective."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from axonml_jax.checkpoint.manifest import DamagedCheckpoint
from axonml_jax.checkpoint.ownership import FolderInUse
from axonml_jax.compat.processes.coordination import coordinator_client, lost_processes

TIMEOUT = 600.0
"""Seconds to wait for the other processes of a job at a save or a restore."""

_meetings = itertools.count()


class Team:
    """The processes of this job. Every process must make the same calls in the same order.

    Args:
      timeout: seconds to wait for the others.
    """

    def __init__(self, timeout: float = TIMEOUT):
        self.size = jax.process_count() if jax.distributed.is_initialized() else 1
        self.rank = jax.process_index() if self.size > 1 else 0
        self.timeout = timeout
        self._writing: tuple[str, Iterator[int]] = ("", itertools.count())
        self._heard: OSError | None = None

    @property
    def leads(self) -> bool:
        """Whether this process decides: the main one."""
        return self.rank == 0

    def tell_all(self, what: str, said: Any) -> list[Any]:
        """What every process says, by process.

        Args:
          what: for the error when a process does not come.
          said: plain values.

        Raises:
          TimeoutError: naming the processes that did not come.
        """
        if self.size == 1:
            return [said]
        client, folder = coordinator_client(), f"axonml_jax/checkpoint/{next(_meetings)}/"
        client.key_value_set(f"{folder}{self.rank}", json.dumps(said))
        try:
            client.wait_at_barrier(folder, int(1000 * self.timeout))
        except jax.errors.JaxRuntimeError as error:
            if lost := lost_processes(error):
                raise TimeoutError(
                    f"process(es) {lost} ended or were lost before all had come to {what}: a process that has no more to do "
                    "must still save and restore with the others"
                ) from error
            heard = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(folder)}
            missing = sorted(set(range(self.size)) - heard)
            raise TimeoutError(
                f"process(es) {missing} did not come to {what} within {self.timeout:g} s: every process must save and "
                "restore the same checkpoints in the same order"
            ) from error
        heard = dict(client.key_value_dir_get(folder))
        return [json.loads(heard[f"{folder}{rank}"]) for rank in range(self.size)]

    def decide(self, what: str, act: Callable[[], Any]) -> Any:
        """The main process's result of `act` in every process; so is the error it raises.

        Args:
          what: for the error when a process does not come.
          act: returns plain values; only the main process runs it.
        """
        said: Any = None
        error: BaseException | None = None
        if self.leads:
            try:
                said = {"result": act()}
            except Exception as raised:
                error, said = raised, {"error": describe(raised)}
        outcome = self.tell_all(what, said)[0]
        if error is not None:
            raise error
        if "error" in outcome:
            raise rebuilt(outcome["error"])
        return outcome["result"]

    def writes_as(self, name: str) -> None:
        """Under which name the processes meet while they write; the same in all of them, and only theirs."""
        self._writing = (f"axonml_jax/writing/{name}", itertools.count())

    def written(self, *, key: str, timeout_ms: int) -> None:
        """Where Orbax's threads wait for those of all processes, twice a save; it calls its places differently (`key`).

        Raises:
          OSError: in every process, naming those that could not write (see `not_written`).
        """
        del key
        self._meet("", timeout_ms)

    def not_written(self, error: Exception) -> Exception:
        """Tell the others, which wait in `written`, that this process could not write its part.

        Without it they would wait there until their time is over.

        Returns:
          The error of the whole save, the same in every process.
        """
        if self.size == 1 or error is self._heard or isinstance(error, TimeoutError):
            return error
        try:
            self._meet(str(error) or repr(error), int(1000 * self.timeout))
        except Exception as heard:
            return heard
        return error

    def _meet(self, said: str, timeout_ms: int) -> None:
        client, (name, numbers) = coordinator_client(), self._writing
        place = f"{name}/{next(numbers)}/"
        if said:
            client.key_value_set(f"{place}{self.rank}", said)
        try:
            client.wait_at_barrier(place, timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise lost_in_save(error) from error
        failed = sorted((int(key.rsplit("/", 1)[1]), text) for key, text in client.key_value_dir_get(place))
        if failed:
            self._heard = OSError("; ".join(f"on process {process}: {text}" for process, text in failed))
            raise self._heard

    def mine(self, things: Sequence) -> Sequence:
        """This process's share of some work."""
        return things[self.rank :: self.size]


def lost_in_save(error: Exception) -> Exception:
    """An error of JAX's coordinator while arrays are written, as one that names the processes that have gone, if any."""
    lost = lost_processes(error)
    return OSError(f"process(es) {lost} ended or were lost while the others were writing") if lost else error


_KINDS = {
    kind.__name__: kind
    for kind in (DamagedCheckpoint, FolderInUse, FileExistsError, FileNotFoundError, ValueError, OSError)
}
"""Errors that are the same in every process, so that all of them handle one alike."""


def describe(error: BaseException) -> list[str]:
    """An error as plain values: its kind, or the nearest that others know, and its text."""
    return [next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS), "OSError"), str(error)]


def rebuilt(said: Sequence[str]) -> Exception:
    """The error that another process described."""
    return _KINDS[said[0]](said[1])
