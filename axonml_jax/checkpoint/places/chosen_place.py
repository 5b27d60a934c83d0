"""Where the checkpoints of a run are kept: in a folder, there and as copies at a URL, or at a URL."""

import os
from pathlib import Path

from axonml_jax.checkpoint.arrays import require_plain
from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.places.at_url import AtUrl
from axonml_jax.checkpoint.places.in_folder import InFolder
from axonml_jax.checkpoint.places.mirror import Mirror
from axonml_jax.checkpoint.places.object_store import ObjectStore, lie_apart
from axonml_jax.checkpoint.places.staging_folder import staging_of
from axonml_jax.checkpoint.team import Team

Place = InFolder | AtUrl


def place_of(
    given: str | os.PathLike,
    rules: Retention,
    team: Team,
    *,
    mirror: str | None,
    staging: str | os.PathLike | None,
    verify: bool,
) -> Place:
    """The place that a folder or a URL names.

    Args:
      given: the folder, or the URL.
      rules: which checkpoints stay there.
      team: the processes.
      mirror: a URL for copies of a folder's.
      staging: of a URL: the folder in which checkpoints are made.
      verify: read back what is sent.

    Raises:
      ValueError: for a folder that is a file, an option that the place does not have, and one place within the other.
    """
    if is_url(given):
        url = os.fspath(given)
        if mirror is not None:
            raise ValueError(f"mirror={mirror!r} copies a folder of checkpoints, and {url} is a URL: leave mirror out")
        store, folder = ObjectStore(url), staging_of(url, staging)
        require_plain(folder)
        lie_apart(store, folder, f"{url} and {folder}, where checkpoints are made", "give another staging=")
        return AtUrl(store, folder, rules, verify=verify, team=team)
    folder = Path(given)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={os.fspath(folder)!r} is no folder: give one, or a name that is free")
    if staging is not None:
        raise ValueError(
            f"staging={os.fspath(staging)!r} is for checkpoints at a URL, and {folder} is a folder: leave it out"
        )
    folder = folder.absolute()
    require_plain(folder)
    copies = None if mirror is None else Mirror(ObjectStore(mirror), folder, rules, verify=verify)
    return InFolder(folder, rules, copies, team)


def is_url(given: str | os.PathLike) -> bool:
    """Whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("run/checkpoints")
    (True, False)
    """
    return "://" in os.fspath(given)
