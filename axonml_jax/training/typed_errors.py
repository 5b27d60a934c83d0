"""What users read of errors in their models and losses: the scan that `check_vma=True` refuses, no frames of ours above it."""

import functools
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import flax
import jax

P = ParamSpec("P")
R = TypeVar("R")

_INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (jax, flax))
_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = sysconfig.get_path("stdlib") + "/"
_NOTE = "axonml_jax has left its own frames out above code that it called; JAX_TRACEBACK_FILTERING=off shows them."


def folding(fun: Callable[P, R]) -> Callable[P, R]:
    """The function, whose errors in code that it calls back, such as a loss, come without this library's frames above it.

    As JAX's traceback filtering does, and switched off as that is (`jax_traceback_filtering`). Errors of the library itself
    keep all their frames.
    """

    @functools.wraps(fun)
    def folded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            if jax.config.jax_traceback_filtering != "off":  # pyright: ignore[reportAttributeAccessIssue]
                _fold(error)
            raise  # with the traceback that the error has now, to which this frame is not added

    return folded


def _fold(error: Exception) -> None:
    frames = [each for each in _frames(error) if (each.tb_frame.f_code.co_name, _file(each)) != ("folded", __file__)]
    theirs = [i for i, each in enumerate(frames) if _is_theirs(_file(each))]
    last, kept = theirs[-1] if theirs else -1, None
    for i, each in reversed(list(enumerate(frames))):
        if i > last or not _file(each).startswith(_OURS):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept
    if theirs and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def _frames(error: Exception) -> Iterator[types.TracebackType]:
    each = error.__traceback__
    while each is not None:
        yield each
        each = each.tb_next


def _file(each: types.TracebackType) -> str:
    return each.tb_frame.f_code.co_filename


def _is_theirs(filename: str) -> bool:
    """Whether code is neither this library's, nor JAX's or Flax's, nor Python's own."""
    standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not (standard or filename.startswith((_OURS, *_INSIDE, "<")))


@contextmanager
def explain_typed_scan(check_vma: bool) -> Iterator[None]:
    """Turn JAX's error about a loop whose carry changes its varying type into one that names the loop and the remedy."""
    try:
        yield
    except TypeError as error:
        text = str(error)
        if not check_vma or "carry" not in text or "varying" not in text:
            raise
        raise ValueError(
            f"check_vma=True: the loop at {_callers_line(error)} starts from a value that is the same on every rank (such as "
            "plain zeros) but carries one that differs from rank to rank, which typed mode refuses. Use check_vma=False (the "
            "default; the result is the same), or start the loop from a value derived from its input, such as "
            f"jnp.zeros_like(x[0]). JAX says: {text}"
        ) from error


def _callers_line(error: BaseException) -> str:
    """The innermost line outside JAX and Flax: where the model calls the loop."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_INSIDE)]
    return f"{frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name})"
