"""One checkpoint at a URL, by its own name: what `save` and `restore` do with a URL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.names import SAVING
from axonml_jax.checkpoint.places.copies import Copies
from axonml_jax.checkpoint.places.copy_commit import commit_of
from axonml_jax.checkpoint.places.long_work import decide_at_length
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.checkpoint.places.staging_folder import fetched, remove_if_there, staging_of
from axonml_jax.checkpoint.team import Team


@contextmanager
def read_from(url: str, team: Team) -> Iterator[Path]:
    """The checkpoint of a URL as a folder, as long as this is entered; all processes enter it.

    Raises:
      FileNotFoundError: when there is none.
      DamagedCheckpoint: naming every file that is not what was written.
      OSError: when the store does not answer, after all tries.
    """
    copies, name = _split(url)
    team.decide(f"look at {url}", lambda: _require(copies, name, url))
    with fetched(copies, name, staging_of(str(copies.store), None), team) as folder:
        yield folder


def write_to(url: str, team: Team, write: Callable[[Path], None], *, replace: bool, verify: bool) -> None:
    """Make a checkpoint in a folder, and send it; all processes call this.

    Args:
      url: its name is the last part.
      team: the processes.
      write: makes it, in all processes.
      replace: whether it may take the place of another.
      verify: read it back before it counts.

    Raises:
      FileExistsError: when there is one already and it may not be replaced.
      OSError: when the store does not take it, after all tries; nothing is left then.
    """
    copies, name = _split(url, verify=verify)
    if not replace:
        team.decide(f"look at {url}", lambda: _refuse(copies, name, url))
    folder = staging_of(str(copies.store), None) / team.decide("name a folder", lambda: f"sent_{uuid4().hex}")
    try:
        write(folder)
        decide_at_length(team, f"send to {url}", lambda: copies.put(folder, name, uuid4().hex, str(copies.store)))
    finally:
        if team.leads:
            remove_if_there(folder)


def _split(url: str, *, verify: bool = False) -> tuple[Copies, str]:
    parent, _, name = url.rstrip("/").rpartition("/")
    if not name or name.endswith(SAVING) or parent.endswith(":/"):
        raise ValueError(f"{url!r} names no checkpoint: give s3://bucket/path/name")
    return Copies(ObjectStore(parent, whole=True), Retention(keep=None), verify=verify), name


def _require(copies: Copies, name: str, url: str) -> None:
    if copies.store.get(commit_of(name)) is None:
        steps = copies.steps
        near = f"; there are steps {steps}" if steps else ""
        inside = Copies(ObjectStore(url), Retention(keep=None)).steps
        near = f"; the newest that is in it is {url.rstrip('/')}/step_{inside[-1]:08d}: give that" if inside else near
        raise FileNotFoundError(f"{url} is no checkpoint: {copies.store} has no object {commit_of(name)}{near}")


def _refuse(copies: Copies, name: str, url: str) -> None:
    if copies.store.get(commit_of(name)) is not None:
        raise FileExistsError(f"{url} exists already: choose another name, or replace it with replace=True")
