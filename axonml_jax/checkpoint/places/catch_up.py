"""Checkpoints without a copy, as a process was killed while it made one or the store was away: which of them are copied."""

from collections.abc import Mapping
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manifest import Manifest, damage
from axonml_jax.logging import logger


def uncopied(here: Mapping[int, Manifest], there: Mapping[int, Manifest], rules: Retention) -> list[int]:
    """The steps to copy, the newest first: those that rules would keep of all, and that have no copy of the same save.

    >>> saved = lambda *steps: {step: Manifest(about={"saved_at": float(step)}) for step in steps}
    >>> uncopied(saved(2, 4, 5, 6), saved(1, 3, 5), Retention(keep=2, every=2))
    [6, 4, 2]

    Args:
      here: what the checkpoints say, by step.
      there: what their copies say.
      rules: for both.
    """
    gone = rules.deletes_of(lambda: {**there, **here})
    alike = {step for step in here if step in there and here[step].saved_at == there[step].saved_at}
    return [step for step in sorted(here, reverse=True) if step not in gone and step not in alike]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint is there, and all its files are what was written; if not, that is said."""
    try:
        manifest = Manifest.read(folder)
        lines = damage(folder, manifest, manifest.files)
    except (OSError, ValueError) as error:
        lines = [str(error)]
    if lines:
        logger.warning("%s has no copy, and is not copied: %s", folder, "; ".join(lines))
    return not lines
