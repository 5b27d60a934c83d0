"""Saying which scan of a model does not pass `check_vma=True`, and what to do about it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explain_typed_scan(check_vma: bool) -> Iterator[None]:
    """Turn JAX's error about a loop whose carry changes its varying type into one that names the loop and the remedy."""
    try:
        yield
    except TypeError as error:
        text = str(error)
        if not check_vma or "carry" not in text or "varying" not in text:
            raise
        found = re.search(r"(scan|while_loop|fori_loop)\b.*?function (\S+) at (\S+)", text, re.DOTALL)
        loop = f"the loop over `{found[2]}` ({found[3].rstrip('.,')})" if found else "a loop of the model"
        raise ValueError(
            f"check_vma=True: {loop} starts from a value that is the same on every rank (such as plain zeros) but carries one "
            "that differs from rank to rank, which typed mode refuses. Use check_vma=False (the default; the result is the "
            f"same), or start the loop from a value derived from its input, such as jnp.zeros_like(x[0]). JAX says: {text}"
        ) from error
