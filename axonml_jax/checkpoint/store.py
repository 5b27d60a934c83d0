"""`save` and `restore`: one checkpoint, whole, under any plan."""

import functools
import os
import time
from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, Protocol

import jax

from axonml_jax.checkpoint import arrays
from axonml_jax.checkpoint.compare import DIFFERENCES, OPTIONAL, differences, listing, refused, rounded
from axonml_jax.checkpoint.contents import AVERAGE, LEFT_OUT, filled, leaves_of, scope_of
from axonml_jax.checkpoint.manifest import ARRAYS, SAVED_AT, DamagedCheckpoint, Entry, Manifest, damage
from axonml_jax.checkpoint.places.chosen_place import is_url
from axonml_jax.checkpoint.places.single import read_from, write_to
from axonml_jax.checkpoint.plain_files import number, plain
from axonml_jax.checkpoint.saving import Saving
from axonml_jax.checkpoint.team import Team
from axonml_jax.compat.versions import PACKAGES, installed
from axonml_jax.logging import logger
from axonml_jax.sharding.leaf import Checkpointable, Leaf


class Positioned(Protocol):
    """Something with a position that is small, plain values: a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        ...


def save(
    path: str | os.PathLike,
    state: Any,
    *,
    step: Any = None,
    data: Positioned | None = None,
    metrics: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
    replace: bool = False,
    verify: bool = False,
) -> Path | str:
    """Save arrays so that they can be restored on any other mesh, plan and number of processes. Every process must call it.

    The folder appears under its name when everything is on disk, or not at all.

    Args:
      path: the folder to be, on a file system that all processes share; or an object store's URL,
        `s3://bucket/path/name`, `gs://bucket/path/name` or `file:///folder/name`.
      state: a trainer, a parallel model, an NNX module, or any pytree of arrays (a Linen module's variables, say).
      step: the `TrainStep` that a `TrainState` belongs to; it knows their whole shapes.
      data: a data loader, whose position is kept.
      metrics: of the run at this point.
      about: plain values for whoever reads `checkpoint.json`.
      replace: take the place of a checkpoint that is there already.
      verify: read the files again from the disk, past the system's cache, before the checkpoint counts.

    Returns:
      The folder, or the URL.

    Raises:
      FileExistsError: when there is one already.
      FolderInUse: naming the process that saves to this path right now.
      OSError: when it cannot be written; nothing is left then.
      TypeError: naming every value in `metrics`, `about` or the data position that is not plain.
    """
    team = Team()
    leaves = step.state_leaves(state) if step is not None else leaves_of(state)
    with closing(arrays.checkpointer(team)) as saver:
        manifest = manifest_of(state, leaves, data=data, metrics=metrics, about=about)
        write = lambda folder: Saving(
            folder, leaves, manifest, team, saver, replace=replace, verify=verify and folder == place
        ).wait()
        if is_url(path):
            place = os.fspath(path)
            write_to(place, team, write, replace=replace, verify=verify)
        else:
            place = _plainly(path)
            write(place)
    return place


def restore(
    path: str | os.PathLike,
    like: Any,
    *,
    step: Any = None,
    data: Positioned | None = None,
    part: str | None = None,
    accept: Collection[str] = (),
) -> Any:
    """Restore what `save` or a `CheckpointManager` wrote. Every process must call it; each device reads only its share.

    Args:
      path: the checkpoint, a folder or a URL.
      like: what shall take it. A trainer, a parallel model or an NNX module takes the arrays itself and is returned. Of a
        pytree of arrays or shapes a new one is returned, each leaf where the given one is (shapes: as NumPy arrays).
      step: the `TrainStep` of a `TrainState` given as `like`.
      data: a data loader, which goes on from the position that was saved.
      part: take only names under this one, such as `"model"` for a Linen module's variables; a parallel model and an NNX
        module take the model's part by themselves.
      accept: differences that are no error: `"missing"` (what the checkpoint lacks stays as it is), `"unexpected"` (what
        only it has is left out), `"mismatched"` (of another shape: stays as it is). They are logged.

    Floats take the dtype of what takes them. Where that rounds them, or they may be beyond its range (float32 in bfloat16 or
    float16), a warning says how many and which.

    Raises:
      FileNotFoundError: when there is no checkpoint.
      DamagedCheckpoint: naming every file that is not what was written.
      ValueError: listing every array that is missing, unexpected or mismatched; or when `data` is not what it was.
    """
    if wrong := [each for each in accept if each not in DIFFERENCES] + [accept] * isinstance(accept, str):
        raise ValueError(f"accept={wrong[0]!r}: give a collection of {', '.join(map(repr, DIFFERENCES))}")
    team = Team()
    place = read_from(os.fspath(path), team) if is_url(path) else nullcontext(_plainly(path))
    with place as folder, closing(arrays.checkpointer(team)) as saver:
        manifest = checked_manifest(folder, team)
        return load(folder, manifest, like, saver, team, step=step, data=data, part=part, accept=accept)


def load(
    folder: Path,
    manifest: Manifest,
    like: Any,
    saver: Any,
    team: Team,
    *,
    step: Any = None,
    data: Positioned | None = None,
    part: str | None = None,
    accept: Collection[str] = (),
) -> Any:
    """`restore` of a checkpoint whose files have been checked; no process takes anything of it unless all can."""
    wanted = step.state_leaves(like) if step is not None else leaves_of(like)
    prefix = f"{part.strip('/')}/" if part else ""
    scope = prefix or scope_of(like, wanted)
    wanted = {prefix + name: leaf for name, leaf in wanted.items()}
    found = {name: entry for name, entry in manifest.entries.items() if name.startswith(scope)}
    run = part is None and (step is not None or isinstance(like, Checkpointable))
    if run:
        found = _without_other_ranks(folder, wanted, found)
    different = differences(wanted, found, (*OPTIONAL, AVERAGE, LEFT_OUT) if run else OPTIONAL)
    if message := refused(str(folder), different, accept):
        raise ValueError(message)
    if data is not None and manifest.data is None:
        raise ValueError(f"{folder} holds no data position: leave data= out, or save with data=")
    if lines := listing(different):
        logger.warning("%s does not fit in all:\n%s", folder, "\n".join(lines))
    if data is not None and manifest.data is not None:
        data.load_state_dict(manifest.data)  # refuses other data before anything is read
    fitting = {n: leaf for n, leaf in wanted.items() if n in found and n not in different["mismatched"]}
    if text := rounded(fitting, found):
        logger.warning("%s is restored with fewer digits or less range than it was saved with: %s", folder, text)
    values, failed = {}, None
    try:
        values = arrays.read(saver, folder / ARRAYS, fitting, found)
    except (OSError, ValueError, KeyError) as error:
        failed = error
    _compare(folder, team, failed)
    anew = _tell_of_averages(folder, wanted, found) if run else set()
    anew |= {name for name in wanted if run and name.startswith(LEFT_OUT) and name not in found}
    values = {n.removeprefix(prefix): values.get(n, leaf.array) for n, leaf in wanted.items() if n not in anew}
    return step.state_of_leaves(like, values) if step is not None else filled(like, values)


def _compare(folder: Path, team: Team, failed: Exception | None) -> None:
    """Raise in every process what has failed in one: its writer may have removed the checkpoint before one has read it."""
    said = "" if failed is None else str(failed) or repr(failed)
    heard = team.tell_all(f"read {folder}", [said, folder.exists(), isinstance(failed, arrays.NoPlainName)])
    lines = [f"  {ARRAYS}: {text}" for text, _, _ in heard if text]
    if unread := [text for text, _, no_name in heard if no_name]:
        raise OSError(unread[0]) from failed  # nothing is wrong with the checkpoint
    if lines and not all(there for _, there, _ in heard):
        raise FileNotFoundError(f"{folder} was removed while it was read: its writer keeps others") from failed
    if lines:
        raise DamagedCheckpoint("\n".join([f"{folder} is damaged:", *lines])) from failed


def _tell_of_averages(folder: Path, wanted: Mapping[str, Leaf], found: Mapping[str, Entry]) -> set[str]:
    """The moving averages that a run keeps and the checkpoint lacks; they, and those that only it has, are said."""
    kept, saved = ({name for name in names if name.startswith(AVERAGE)} for names in (wanted, found))
    begin, left = kept - saved, saved - kept
    if begin:
        logger.warning(
            "%s holds no moving average of %d parameters: it begins with them, as restored", folder, len(begin)
        )
    if left:
        logger.warning("%s holds a moving average of the parameters, left out: this run keeps none (ema)", folder)
    return begin


def _without_other_ranks(folder: Path, wanted: Mapping[str, Leaf], found: dict[str, Entry]) -> dict[str, Entry]:
    """The arrays of a checkpoint but for what sums of gradients lacked on other ranks than there are; that is said."""
    saved = {name for name in found if name.startswith(LEFT_OUT)}
    fits = {name for name in saved if name in wanted and found[name].shape == arrays.entry_of(wanted[name]).shape}
    if saved - fits or any(name.startswith(LEFT_OUT) and name not in saved for name in wanted):
        logger.warning(
            "%s: what sums left out of the gradients of other ranks, or under another plan, is dropped: it begins with nothing",
            folder,
        )
    return {name: entry for name, entry in found.items() if name not in saved or name in fits}


def checked_manifest(folder: Path, team: Team) -> Manifest:
    """The manifest of a checkpoint, all of whose files are as they were written; the processes share the reading.

    Raises:
      FileNotFoundError, DamagedCheckpoint, ValueError: in every process alike.
    """
    team.decide(f"restore {folder}", lambda: Manifest.read(folder) and None)
    manifest = None
    try:
        manifest = Manifest.read(folder)
        problems = damage(folder, manifest, team.mine(list(manifest.files)))
    except (OSError, ValueError) as error:  # its writer may have removed it meanwhile
        problems = [str(error)]
    lines = sorted(line for each in team.tell_all(f"restore {folder}", problems) for line in each)
    if (folder / ARRAYS).is_symlink():
        lines.append(f"{ARRAYS}: leads out of the checkpoint")
    if lines or manifest is None:
        raise DamagedCheckpoint(f"{folder} is damaged:\n" + "\n".join(f"  {line}" for line in lines))
    return manifest


def _plainly(path: str | os.PathLike) -> Path:
    folder = Path(path).absolute()
    arrays.require_plain(folder)
    return folder


@functools.cache
def _versions() -> dict[str, str | None]:
    return {name: installed(name) for name in PACKAGES}


def manifest_of(
    state: Any,
    leaves: Mapping[str, Leaf],
    *,
    step: int | None = None,
    data: Positioned | None = None,
    metrics: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Manifest:
    """What a checkpoint will say about itself.

    Raises:
      ValueError: for a model that was given as shapes and has no values yet, or its trainer.
    """
    if getattr(state, "hollow", False):
        raise ValueError(
            f"this {type(state).__name__}'s model was given as shapes and has no values yet: there is nothing to save"
        )
    model = getattr(state, "model", state)  # a trainer's
    plan = {"plan": str(model.plan), "mesh": dict(model.mesh.shape)} if hasattr(model, "plan") else {}
    kept = {"processes": jax.process_count(), "versions": _versions()}
    return Manifest(
        step=step,
        entries=arrays.entries_of(leaves),
        data=plain("the data position", data.state_dict()) if data is not None else None,
        metrics={name: number(f"metrics[{name!r}]", value) for name, value in (metrics or {}).items()},
        about={**plan, **kept, SAVED_AT: time.time(), **plain("about", about or {})},
    )
