"""Does a checkpoint fit what shall take it? Everything that does not is told at once."""

from collections.abc import Collection, Mapping

import jax.numpy as jnp

from axonml_jax.checkpoint.arrays import entry_of
from axonml_jax.checkpoint.manifest import Entry
from axonml_jax.sharding.leaf import Leaf

DIFFERENCES = ("missing", "unexpected", "mismatched")
"""What may be accepted: names the checkpoint lacks, names only it has, and arrays of another shape or kind."""

OPTIONAL = ("guard/",)
"""What a run may have or not have without being another run."""

_SHOWN = 10


def differences(
    wanted: Mapping[str, Leaf], found: Mapping[str, Entry], optional: tuple[str, ...] = OPTIONAL
) -> dict[str, dict[str, str]]:
    """What does not fit, by kind of difference and name, in words. Floating-point dtypes fit each other.

    Args:
      wanted: what shall be restored.
      found: what the checkpoint has.
      optional: how names begin that may be missing or unexpected.
    """
    mismatched = {}
    for name, leaf in wanted.items():
        if name in found and (problem := _mismatch(entry_of(leaf), found[name], leaf.entries)):
            mismatched[name] = problem
    missing = {name: _shape(entry_of(leaf)) for name, leaf in wanted.items() if name not in found}
    unexpected = {name: _shape(entry) for name, entry in found.items() if name not in wanted}
    return {
        "missing": {name: text for name, text in missing.items() if not name.startswith(optional)},
        "unexpected": {name: text for name, text in unexpected.items() if not name.startswith(optional)},
        "mismatched": mismatched,
    }


def rounded(wanted: Mapping[str, Leaf], found: Mapping[str, Entry]) -> str:
    """What is said of arrays whose floats lose digits or range on the way, by kind; empty where none does.

    >>> rounded({"w": Leaf(jnp.zeros(2, jnp.bfloat16))}, {"w": Entry((2,), "float32")})
    '1 from float32 to bfloat16 (w)'
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, leaf in wanted.items():
        saved, needed = found[name].dtype, entry_of(leaf).dtype
        if found[name].key is None and not isinstance(leaf.array, bool | int | float) and _loses(saved, needed):
            kinds.setdefault((saved, needed), []).append(name)
    shown = lambda names: ", ".join([*names[:3], "..."] if len(names) > 3 else names)
    return "; ".join(f"{len(names)} from {a} to {b} ({shown(names)})" for (a, b), names in kinds.items())


def _loses(saved: str, needed: str) -> bool:
    if saved == needed or not all(jnp.issubdtype(jnp.dtype(each), jnp.inexact) for each in (saved, needed)):
        return False
    a, b = jnp.finfo(saved), jnp.finfo(needed)
    return a.nmant > b.nmant or a.maxexp > b.maxexp or a.minexp < b.minexp


def refused(where: str, found: Mapping[str, Mapping[str, str]], accept: Collection[str]) -> str | None:
    """The whole message when something does not fit and was not accepted, else None."""
    lines = listing({kind: names for kind, names in found.items() if kind not in accept})
    if not lines:
        return None
    kinds = tuple(kind for kind, names in found.items() if names and kind not in accept)
    return (
        f"{where} does not fit what shall take it:\n" + "\n".join(lines) + "\naccept="
        f"{kinds!r} takes what fits and leaves the rest as it is"
    )


def listing(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A difference a line: all of them, or the first ten and how many there are of each kind."""
    lines = [f"  {name}: {kind} {text}" for kind, names in found.items() for name, text in names.items()]
    if len(lines) <= _SHOWN:
        return lines
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in found.items() if names)
    return [*lines[:_SHOWN], f"  ... and {len(lines) - _SHOWN} more; in all {counts}"]


def _mismatch(need: Entry, got: Entry, entries: str) -> str | None:
    if need.key != got.key:
        return f"(saved as {got.key or got.dtype}, needed as {need.key or need.dtype})"
    if need.shape != got.shape:
        return f"(saved {_shape(got)}, needed {_shape(need)}{entries and f', {entries}'})"
    floating = [jnp.issubdtype(jnp.dtype(entry.dtype), jnp.floating) for entry in (need, got)]
    if need.dtype != got.dtype and not all(floating):
        return f"(saved as {got.dtype}, needed as {need.dtype})"
    return None


def _shape(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"
