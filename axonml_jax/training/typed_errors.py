"""What users read of errors in their models and losses: the scan that `check_vma=True` refuses, no frames of ours above it."""

import sysconfig
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flax
import jax

_INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (jax, flax))
_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = sysconfig.get_path("stdlib") + "/"
_NOTE = "axonml_jax has left its own frames out above code that it called; JAX_TRACEBACK_FILTERING=off shows them."


class _Folding:
    """Within this context errors in code that is called back, such as a loss, lose this library's frames above it.

    As JAX's traceback filtering does, and switched off as that is (`jax_traceback_filtering`). Errors of the library itself
    keep all their frames. It is no decorator, whose own frame would stand between a step and its loss.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        shown = jax.config.jax_traceback_filtering == "off"  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, Exception) and not shown:
            _fold(error)


folding = _Folding()


def _fold(error: Exception) -> None:
    frames = list(_frames(error))
    theirs = [i for i, each in enumerate(frames) if _is_theirs(_file(each))]
    if not theirs:
        return
    last, kept = theirs[-1], None
    for i, each in reversed(list(enumerate(frames))):
        if i > last or not _file(each).startswith(_OURS):
            kept = types.TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = kept
    if _NOTE not in getattr(error, "__notes__", ()):
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
