"""What went wrong where: the error of one sample, named by worker and sample."""

import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any


class LoadingError(RuntimeError):
    """A sample that could not be read; the message names the worker, the sample and the error, and shows where it came from."""


class named:  # used as a function
    """Errors inside become a `LoadingError` that says what was read, and by which worker process; None: by this one.

    A worker's own error may not pickle, so that its traceback travels as text. (No `contextmanager`: one takes an error whose
    cause is a StopIteration for that, and lets it through, which ends whatever iterates.)
    """

    def __init__(self, what: Callable[[], str], worker: int | None):
        self._what, self._worker = what, worker

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends_a_worker = isinstance(error, SystemExit) and self._worker is not None
        if not (isinstance(error, Exception) or ends_a_worker) or isinstance(error, LoadingError):
            return  # in this process an exit ends the program
        cause = f"{type(error).__name__}: {error}"
        if self._worker is None:
            raise LoadingError(f"reading {self._what()}: {cause}") from error
        where = "".join(traceback.format_exception(error)).rstrip()
        raise LoadingError(
            f"worker {self._worker}, reading {self._what()}: {cause}\n\nin the worker:\n{where}"
        ) from None


def collated(collate: Callable[[Sequence], Any], samples: Sequence) -> Any:
    """What a collate makes of samples; a StopIteration of it, which would end whatever iterates, becomes a `LoadingError`."""
    try:
        return collate(samples)
    except StopIteration as error:
        raise LoadingError(f"collate of {len(samples)} samples raised StopIteration: {error}") from error
