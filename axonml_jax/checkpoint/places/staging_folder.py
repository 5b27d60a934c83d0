"""The folder in which a checkpoint is made before it goes to an object store, or comes to when it is read from there."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from axonml_jax.checkpoint.ownership import Ownership, in_use
from axonml_jax.checkpoint.places.copies import Copies
from axonml_jax.checkpoint.places.long_work import decide_at_length
from axonml_jax.checkpoint.saving import record_of, remove
from axonml_jax.checkpoint.team import Team

_FETCHED = "fetched_"


def staging_of(url: str, given: str | os.PathLike | None) -> Path:
    """The folder for a URL: the one that is given, or one below the user's folder of caches, always the same.

    Args:
      url: of the checkpoints.
      given: a folder; None: `$XDG_CACHE_HOME/axonml_jax`, or `~/.cache/axonml_jax`.
    """
    if given is not None:
        return Path(given).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    readable = re.sub(r"\W+", "-", url)[-40:].strip("-")
    return cache / "axonml_jax" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextmanager
def fetched(copies: Copies, name: str, staging: Path, team: Team) -> Iterator[Path]:
    """A checkpoint of a store as a folder, as long as this is entered; all processes enter it.

    Raises:
      DamagedCheckpoint: naming every file that is not what was written.
      OSError: when the store does not give it, or a process does not see the folder.
    """
    folder = staging / team.decide("name a folder", lambda: f"{_FETCHED}{uuid4().hex}")
    owner = None
    try:
        if team.leads:
            owner = Ownership(record_of(folder), folder)  # kept from whoever tidies meanwhile
        decide_at_length(team, f"fetch from {copies.store}", lambda: copies.fetch(name, folder) and None)
        require_shared(folder, team)
        yield folder
    finally:
        if team.leads:
            remove_if_there(folder)
        if owner is not None:
            owner.release()


def require_shared(folder: Path, team: Team) -> None:
    """See that all processes see a folder.

    Raises:
      OSError: naming those that do not.
    """
    seen = team.tell_all(f"look for {folder}", folder.is_dir())
    if blind := [process for process, sees in enumerate(seen) if not sees]:
        raise OSError(
            f"process(es) {blind} do not see {folder}, which process 0 has made: checkpoints pass through a folder that all "
            "processes share; name one with staging="
        )


def tidy_fetched(staging: Path) -> None:
    """Remove what readers have left that were killed."""
    for path in staging.glob(f"{_FETCHED}*"):
        if path.is_dir() and not in_use(record_of(path)):
            remove(path)


def remove_if_there(folder: Path) -> None:
    """Delete a folder."""
    if folder.exists():
        remove(folder)
