"""Comparing trees leaf by leaf, with one error that lists every leaf that differs."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.testing.tolerances import FLOAT32, FLOAT64, LOW_PRECISION


def assert_trees_close(got: PyTree, wanted: PyTree, what: str, *, low_precision: bool = False) -> None:
    """Assert that every leaf of `got` is as close to `wanted` as its dtype demands (`testing/tolerances.py`).

    Raises:
      AssertionError: listing every leaf that differs, by path, with the difference and the tolerance.
    """
    ours, theirs = named_leaves(got), named_leaves(wanted)
    assert list(ours) == list(theirs), f"{what}: leaves {list(ours)} are not {list(theirs)}"
    rows = [row for name in ours if (row := difference(ours[name], theirs[name], low_precision))]
    names = [name for name in ours if difference(ours[name], theirs[name], low_precision)]
    table = "\n".join(f"  {name or what}: {row}" for name, row in zip(names, rows, strict=True))
    assert not rows, f"{what} differs from the single-device run:\n{table}"


def difference(got: Any, wanted: Any, low_precision: bool) -> str | None:
    """What is wrong with one leaf, or None."""
    if jnp.shape(got) != jnp.shape(wanted):
        return f"shape {jnp.shape(got)}, wanted {jnp.shape(wanted)}"
    double = jnp.result_type(wanted) in (jnp.float64, jnp.complex128)
    wide = np.complex128 if jnp.iscomplexobj(got) or jnp.iscomplexobj(wanted) else np.float64
    a, b = np.asarray(got, wide), np.asarray(wanted, wide)
    if not a.size:
        return None
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "finite in one and not in the other"
    scale = np.max(np.abs(b))
    allowed = LOW_PRECISION * scale if low_precision else FLOAT64 * max(1.0, scale) if double else FLOAT32 * scale
    worst = np.max(np.abs(a - b))
    return None if worst <= allowed else f"max|a-b| = {worst:.3g} > {allowed:.3g} (max|b| = {scale:.3g})"
