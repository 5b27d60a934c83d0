"""What a plan says of recomputation: `Remat`; `remat.py` does it."""

from typing import Any, Literal

from axonml_jax._types import is_one_of

Remat = Literal["full", "selective"] | None
"""What the backward recomputes: nothing (in scans and pipelines, where it lies apart from its forward, what is elementwise);
all of a unit from its inputs; or all but the results of weight multiplications, which are most of the work and a small part
of the memory (Korthikanti et al. 2022)."""


def checked_remat(remat: Any) -> str | None:
    """What is wrong with a policy, or None."""
    return (
        None
        if is_one_of(remat, (None, "full", "selective"))
        else f"remat={remat!r} must be None, 'full' or 'selective'"
    )
