"""What went wrong where: the error of one sample, named by worker and sample."""

import contextlib
import traceback
from collections.abc import Callable, Iterator


class LoadingError(RuntimeError):
    """A sample that could not be read; the message names the worker, the sample and the error, and shows where it came from."""


@contextlib.contextmanager
def named(what: Callable[[], str], worker: int | None) -> Iterator[None]:
    """Errors inside become a `LoadingError` that says what was read, and by which worker process; None: by this one.

    A worker's own error may not pickle, so that its traceback travels as text.
    """
    try:
        yield
    except LoadingError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if worker is None:
            raise LoadingError(f"reading {what()}: {cause}") from error
        where = "".join(traceback.format_exception(error)).rstrip()
        raise LoadingError(f"worker {worker}, reading {what()}: {cause}\n\nin the worker:\n{where}") from None
