"""Saying which scan of a model does not pass `check_vma=True`, and what to do about it."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flax
import jax

_INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (jax, flax))


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
