"""Where the checkpoints of a run are, which its configuration says: in its folder, or at a URL."""

from collections.abc import Mapping
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import Retention, best_of
from axonml_jax.checkpoint.manifest import manifests_in
from axonml_jax.checkpoint.names import checkpoints_in, name_of
from axonml_jax.checkpoint.places.copies import Copies
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.launch.config.plain_yaml import yaml_in
from axonml_jax.launch.config.stretches import NEWEST

CHECKPOINT_FOLDER = "checkpoints"
"""Where in a run's folder the checkpoints are, unless they are at a URL."""


def place_said(run: Path) -> str | None:
    """The URL of a run's checkpoints (`checkpoint.url`) by the configuration in its folder; None: they are in the folder."""
    try:
        content = yaml_in(run / NEWEST)
        said = content["checkpoint"]["url"]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportCallIssue, reportArgumentType]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return said if isinstance(said, str) else None


def checkpoints_of(run: Path) -> Mapping[int, Path | str]:
    """Every checkpoint of a run by step, in order: a folder, or a URL.

    Raises:
      OSError: when a store does not answer, after all tries.
    """
    if (url := place_said(run)) is None:
        return checkpoints_in(run / CHECKPOINT_FOLDER)
    return {step: f"{url.rstrip('/')}/{name_of(step)}" for step in copies_at(url).steps}


def best_checkpoint(run: Path, metric: str) -> int | None:
    """The step of a run's best checkpoint by a metric, the lowest; None where none has it."""
    url = place_said(run)
    return best_of(manifests_in(run / CHECKPOINT_FOLDER) if url is None else copies_at(url).said(), metric, "min")


def copies_at(url: str) -> Copies:
    """What an object store has under a URL, to read."""
    return Copies(ObjectStore(url), Retention(keep=None))
