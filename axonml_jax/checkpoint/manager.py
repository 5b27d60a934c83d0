"""`CheckpointManager`, `save` and `restore`: the state of a trainer on disk, independent of its plan."""

import functools
import os
import time
from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from axonml_jax.base import logger
from axonml_jax.checkpoint import format as arrays
from axonml_jax.checkpoint.format import (
    ARRAYS,
    DIFFERENCES,
    OPTIONAL,
    SAVED_AT,
    DamagedCheckpoint,
    Entry,
    Manifest,
    Team,
    damage,
    differences,
    filled,
    leaves_of,
    listing,
    number,
    path_of,
    plain,
    refused,
    rounded,
    scope_of,
    step_number,
    takes_arrays,
)
from axonml_jax.checkpoint.ownership import Ownership
from axonml_jax.checkpoint.places import is_url, place_of, read_from, write_to
from axonml_jax.checkpoint.retention import Retention, best_of, require_count, seconds_of
from axonml_jax.checkpoint.saving import Failures, Saving, abandon_from, put_aside, take_over, tidy
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.compat.versions import PACKAGES, installed
from axonml_jax.sharding.layout import AVERAGE, LEFT_OUT, Checkpointable, Leaf

# --------------------------------------------------------------------------------------------------
# `save` and `restore`: one checkpoint, whole, under any plan.
# --------------------------------------------------------------------------------------------------


class Positioned(Protocol):
    """Protocol of an object whose position is small, plain values: a data loader, or an iterator of Grain (`position_of`)."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position."""
        ...


_BYTES = "bytes of get_state"
_TENSOR = "tensor of state_dict"


def position_of(data: Any) -> Any:
    """A loader's position as plain values: its `state_dict()`, or `get_state()` of a Grain iterator.

    Raises:
      TypeError: for what has neither, with what to give, and for a position that is not plain.
    """
    if hasattr(data, "state_dict"):
        return plain("the data position", _as_text(data.state_dict()))
    if not hasattr(data, "get_state"):
        iterates = " its iterator, it = iter(...), which next(it) moves on," if hasattr(data, "__iter__") else ""
        raise TypeError(
            f"data= is a {type(data).__name__}, which has neither state_dict() nor get_state(): give{iterates} a loader of "
            "ax.DataLoader, or an object with these methods"
        )
    return plain("the data position", _as_text(data.get_state()))


def _as_text(value: Any) -> Any:
    """Encode the bytes and tensors in a position, at any depth, as text.

    Grain's loader says where it stands in bytes; in PyTorch's `StatefulDataLoader` a random generator's state is a tensor.
    """
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        array = value.numpy()
        return {_TENSOR: array.tobytes().hex(), "dtype": str(array.dtype), "shape": list(array.shape)}
    if isinstance(value, Mapping):
        return {name: _as_text(each) for name, each in value.items()}
    return [_as_text(each) for each in value] if isinstance(value, list | tuple) else value


def _from_text(value: Any) -> Any:
    if isinstance(value, Mapping) and _TENSOR in value:
        import torch  # pyright: ignore[reportMissingImports]

        array = np.frombuffer(bytes.fromhex(value[_TENSOR]), value["dtype"]).reshape(value["shape"])
        return torch.from_numpy(array.copy())
    if isinstance(value, Mapping):
        text = value.get(_BYTES)
        return {name: _from_text(each) for name, each in value.items()} if text is None else bytes.fromhex(text)
    return [_from_text(each) for each in value] if isinstance(value, list) else value


def go_on(data: Any, position: Any) -> None:
    """Move a loader, or an iterator of Grain, to a position that `position_of` gave; a loader of `ax` refuses other data's."""
    if hasattr(data, "load_state_dict"):
        data.load_state_dict(_from_text(position))
    elif hasattr(data, "set_state"):
        data.set_state(_from_text(position))
    else:
        position_of(data)  # says what to give


@no_mesh_around()
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
      about: plain values for whoever reads `checkpoint.json`; plan, mesh, processes, versions and saved_at are taken.
      replace: take the place of a checkpoint that is there already, or of an empty folder; anything else is refused.
      verify: read the files again from the disk, past the system's cache, before the checkpoint counts.

    Returns:
      The folder, or the URL.

    Raises:
      FileExistsError: when there is one already, or what would be replaced is no checkpoint.
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


@no_mesh_around()
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
    """`restore` from a checkpoint whose files have been checked; either all processes take its arrays, or none does."""
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
        logger.warning(
            "%s is restored in part; these differences were accepted (accept=):\n%s", folder, "\n".join(lines)
        )
    if data is not None and manifest.data is not None:
        go_on(data, manifest.data)  # refuses other data before anything is read
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
    """Raise in every process the error of any one: a writer may remove the checkpoint before all have read it."""
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
    """Warn of moving averages that only the run or only the checkpoint has; returns the names that the checkpoint lacks."""
    kept, saved = ({name for name in names if name.startswith(AVERAGE)} for names in (wanted, found))
    begin, left = kept - saved, saved - kept
    if begin:
        logger.warning(
            "%s holds no moving average of %d parameters: it starts from their restored values", folder, len(begin)
        )
    if left:
        logger.warning(
            "%s holds a moving average of the parameters, which is ignored: this run keeps none (ema)", folder
        )
    return begin


def _without_other_ranks(folder: Path, wanted: Mapping[str, Leaf], found: dict[str, Entry]) -> dict[str, Entry]:
    """Drop error-feedback residuals of another number of ranks or another plan from the arrays to restore, with a warning."""
    saved = {name for name in found if name.startswith(LEFT_OUT)}
    fits = {name for name in saved if name in wanted and found[name].shape == arrays.entry_of(wanted[name]).shape}
    if saved - fits or any(name.startswith(LEFT_OUT) and name not in saved for name in wanted):
        logger.warning(
            "%s: the error-feedback residual was saved for another number of ranks or another plan, and is reset to zero",
            folder,
        )
    return {name: entry for name, entry in found.items() if name not in saved or name in fits}


def checked_manifest(folder: Path, team: Team) -> Manifest:
    """Read a checkpoint's manifest and verify all of its files; the processes share the reading.

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


_LIBRARYS = frozenset({"plan", "mesh", "processes", "versions", SAVED_AT})


def manifest_of(
    state: Any,
    leaves: Mapping[str, Leaf],
    *,
    step: int | None = None,
    data: Positioned | None = None,
    metrics: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Manifest:
    """Make the manifest of a checkpoint that is to be saved.

    Raises:
      ValueError: for a model that was given as shapes and has no values yet, or its trainer; for names in `about` that the
        library's own entries have.
    """
    if taken := sorted(_LIBRARYS.intersection(about or ())):
        raise ValueError(
            f"about has {', '.join(map(repr, taken))}, names of a checkpoint's own entries: give them other names"
        )
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
        data=position_of(data) if data is not None else None,
        metrics={name: number(f"metrics[{name!r}]", value) for name, value in (metrics or {}).items()},
        about={**plan, **kept, SAVED_AT: time.time(), **plain("about", about or {})},
    )


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run: one every n steps, those kept that the rules keep, a damaged one passed over.
# --------------------------------------------------------------------------------------------------


class CheckpointManager:
    """Saves a run's checkpoints in one folder or at one URL, `step_00000100` and so on. All processes make the same calls.

    Opening one, and restoring without `mirror`, change nothing on disk. The first save, or `claim`, makes this job its writer.

    Args:
      folder: made when something is saved; on a file system that all processes share. Or an object store's URL,
        `s3://bucket/path`, `gs://bucket/path` or `file:///folder`: a checkpoint counts when it is there.
      every: `save` saves at steps that are a multiple, and passes the others over; None: whenever it is called.
      keep: how many of the newest to keep; None: all.
      keep_every: keep those too whose step is a multiple of this, for ever.
      keep_for: keep those too that are younger than this: seconds, or a text such as `"12h"`, `"7d"` or `"2w"`.
      best: a metric given to `save`; the best checkpoint by it is kept too.
      mode: whether the best is the lowest or the highest; None: the lowest.
      verify: see `ax.save`; an older checkpoint is deleted only after that.
      max_failures: that many saves in a row that a full, read-only or failing disk spoils end the run with an error. Fewer are
        passed over by `save`, with a warning for each cause, and the next step that is due is saved; 1: the first ends it.
      mirror: of a folder: an object store's URL. What is committed is copied there, by the same rules, and `restore` brings
        back what the folder lacks.
      staging: of a URL: the folder in which a checkpoint is made and then sent, which all processes share; None: one below
        `~/.cache/axonml_jax`.
      asynchronous: write in a background thread; `save` then blocks only while arrays are copied to the host.

    Raises:
      TypeError: for numbers that are not whole, and a `verify` or `asynchronous` that is no bool.
      ValueError: for numbers that are not positive, rules that add nothing, a metric of which more is better by its name
        (`"accuracy"`) without `mode`, a folder that is a file, a URL of another kind, and a `file://` URL of the same folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        keep_for: float | str | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] | None = None,
        verify: bool = False,
        max_failures: int = 1,
        mirror: str | None = None,
        staging: str | os.PathLike | None = None,
        asynchronous: bool = True,
    ):
        if every is not None:
            require_count("every", every, ", or None")
        for name, flag in (("verify", verify), ("asynchronous", asynchronous)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r} must be True or False")
        seconds = None if keep_for is None else seconds_of(keep_for)
        rules = Retention(keep=keep, every=keep_every, seconds=seconds, best=best, mode=mode)
        self._asynchronous, self._verify, self._team = asynchronous, verify, Team()
        self._place = place_of(folder, rules, self._team, mirror=mirror, staging=staging, verify=verify)
        self.folder, self.every, self.best, self.mode = self._place.folder, every, best, mode or "min"
        self._keep, self._ungraded, self._metrics = keep, 0, set[str]()
        if mode is not None and best is None and self._team.leads:
            logger.warning("mode=%r has no effect without best, the name of a metric", mode)
        self._failures = Failures(self.folder, lambda: self._place.known_steps, max_failures)
        self._saver = arrays.checkpointer(self._team)
        self._saving: Saving | None = None
        self._tell: Any = None  # a trainer's, which has callbacks
        self._newest, self._tried, self._claimed, self._restored = None, None, False, False
        self._owner: Ownership | None = None  # in the main process
        self._passed_over: list[Path] = []

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception):
        self._close(together=kind is None)

    def claim(self) -> None:
        """Become the folder's only writer, as the first save does by itself, and remove leftovers of killed processes.

        The owner is one job, whose main process says in `owner.json` who it is, until `close` or its end. An owner that has
        ended is replaced, with a warning; one on another machine when its heartbeat has not changed for a minute.

        Raises:
          FolderInUse: naming the process that writes the folder, and since when.
          OSError: when the folder cannot be written.
        """
        if not self._claimed:
            self._team.decide(f"claim {self.folder}", self._take)
            self._claimed = True

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step without `force`."""
        return (self.every is None or step % self.every == 0) and step != self._newest

    @no_mesh_around()
    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Positioned | None = None,
        metrics: Mapping[str, float] | None = None,
        about: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save, if it is time where the manager was given `every`.

        Checkpoints of this or later steps, which the run has gone back behind, are put aside as `....abandoned`, with a
        warning.

        Args:
          step: updates made.
          state: see `ax.save`.
          data: the data loader.
          metrics: of this step; the best checkpoint is chosen by them.
          about: plain values for whoever reads `checkpoint.json`; plan, mesh, processes, versions and saved_at are taken.
          force: save in any case, unless this step is saved already.

        Returns:
          Whether a save was started.

        Raises:
          OSError: when this one, or the one before, could not be written, and that may not pass (`max_failures`).
          FolderInUse: when another job writes the folder.
          TypeError, ValueError: for a step or values that a checkpoint cannot keep, before anything is written.
        """
        self.check()
        step = step_number(step)
        if not (force or self.due(step)) or step == self._newest:
            return False
        self.settle()
        leaves = leaves_of(state)
        manifest = manifest_of(state, leaves, step=step, data=data, metrics=metrics, about=about)
        try:
            self._begin(step, leaves, manifest)
        except OSError as error:
            self._failures.take(error, self._team.leads)
            return False
        self._note_metrics(manifest.metrics)
        self._newest, self._tell = step, getattr(state, "checkpoint_committed", None)
        getattr(state, "checkpoint_begun", lambda wait: None)(self.wait)
        if not self._asynchronous:
            self.settle()
        return True

    def check(self) -> None:
        """Raise the error of a save that has failed in the background; costs nothing otherwise.

        In a job of one process it also tells the trainer's callbacks of a commit. Several processes do not finish at the same
        step: they tell callbacks, and count failures that may pass, in `save` and `wait`.
        """
        saving, alone = self._saving, self._team.size == 1
        if saving is not None and (saving.done if alone else self._failures.fatal(saving.failure)):
            self.settle()

    @no_mesh_around()
    def wait(self) -> None:
        """Wait until the save under way is committed.

        Raises:
          OSError: when the newest could not be written.
        """
        self.settle()
        self._failures.tell()

    def settle(self) -> None:
        """Wait for the save under way as the next save does: a failure that may pass is counted, not raised."""
        saving, self._saving, tell, self._tell = self._saving, None, self._tell, None
        if saving is None:
            return
        try:
            saving.wait()
        except BaseException as error:
            self._tried, self._newest = self._newest, None  # it may be tried again
            if not isinstance(error, OSError):
                raise
            self._failures.take(error, self._team.leads)
            return
        self._failures.passed(self._team.leads)
        if tell is not None and self._newest is not None:
            tell(self._newest, self._place.name_of(self._newest))

    @property
    def failed_saves(self) -> int:
        """The number of saves that failed and were passed over (`max_failures`)."""
        return self._failures.total

    def close(self) -> None:
        """Wait, and release the threads and the folder; with `mirror` all processes wait until the newest is copied.

        A job that has only restored also copies, or sends to the URL, the checkpoints that earlier jobs left behind, unless
        another job owns the folder.
        """
        self._close(together=True)

    def _close(self, *, together: bool) -> None:
        try:
            with arrays.closing(self._saver):
                self.wait()
                self._tell_ungraded()
                only_restored = self._restored and not self._claimed
                self._place.finish(together=together, only_restored=only_restored, claim=self.claim)
        finally:
            if self._owner is not None:
                self._owner.release()
            self._claimed, self._owner = False, None

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order, as this process sees the folder, or the URL."""
        return self._place.steps

    @property
    def place(self) -> str:
        """The location of the checkpoints: the folder, or the URL."""
        return str(self._place)

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric; None where none has it."""
        return best_of(self._place.said(), self.best or "", self.mode)

    @no_mesh_around()
    def restore(
        self,
        like: Any,
        *,
        step: int | Literal["best"] | None = None,
        data: Positioned | None = None,
        accept: Collection[str] = (),
    ) -> Manifest | None:
        """Restore the newest intact checkpoint, or that of a given step.

        A damaged checkpoint is passed over, with a warning that names its files, and renamed to `....damaged`.

        Args:
          like: a trainer, parallel model or NNX module, which takes the arrays (a pytree: use `ax.restore`).
          step: which one; `"best"`: by the metric; None: the newest that is good.
          data: the data loader, which goes on from where it was.
          accept: see `ax.restore`.

        Returns:
          What the checkpoint says about itself (`step`, `metrics`, `about`); None when there is none at all.

        Raises:
          FileNotFoundError: when the step that was asked for is not there.
          DamagedCheckpoint: when it is damaged, or when all are.
          TypeError: when `like` is a pytree, of which `ax.restore` returns a new one.
          ValueError: listing every array that does not fit.
        """
        if not takes_arrays(like):
            raise TypeError(
                "CheckpointManager.restore restores into a trainer, a parallel model or an NNX module, not into a "
                f"{type(like).__name__}: use ax.restore(path, like) with a path in {self.place}, which returns a new one"
            )
        self.settle()
        failed = None
        with closing(self._place.offers(step, self.best, self.mode, self.claim)) as offers:
            for candidate, folder in offers:
                try:
                    manifest = checked_manifest(folder, self._team)
                    load(folder, manifest, like, self._saver, self._team, data=data, accept=accept)
                except (DamagedCheckpoint, FileNotFoundError) as error:  # its writer may have removed it meanwhile
                    if step is not None:
                        raise
                    failed = error
                    self._pass_over(folder, error)
                    continue
                self._newest, self._tried, self._restored = candidate, None, True
                self._ungraded = -1 if self.best in manifest.metrics else self._ungraded
                if failed is not None and self._team.leads:
                    logger.warning("falling back to the last good checkpoint, %s", self._place.name_of(candidate))
                return manifest
        if failed is not None:
            raise DamagedCheckpoint(f"no checkpoint in {self.place} is intact; the last one tried: {failed}")
        return None

    def _begin(self, step: int, leaves: Mapping[str, Leaf], manifest: Manifest) -> None:
        self.claim()
        if self._failures.in_a_row:  # what could not be removed then
            self._team.decide(f"tidy {self.folder}", partial(tidy, self.folder))
        self._saving = Saving(
            *(path_of(self.folder, step), leaves, manifest, self._team, self._saver),
            replace=True,
            verify=self._verify,
            owner=self._owner,
            begun=partial(abandon_from, self.folder, step + (step == self._tried)),
            placed=self._place.placed and partial(self._place.placed, step),
            committed=partial(self._place.committed, step),
        )

    def _note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Note a save's metrics; before the first deletion, warn if no save had the metric that chooses the best."""
        if self.best in metrics:
            self._ungraded, self._metrics = -1, set()
        elif self._ungraded >= 0:
            self._ungraded += 1
            self._metrics |= metrics.keys()
        if self._keep is not None and self._ungraded > self._keep:
            self._tell_ungraded()

    def _tell_ungraded(self) -> None:
        if self.best is not None and self._ungraded > 0 and self._team.leads:
            given = ", ".join(sorted(self._metrics)) or "none"
            logger.warning(
                "best=%r keeps no checkpoint: no save was given metrics={%r: ...}; given: %s",
                self.best,
                self.best,
                given,
            )
        self._ungraded = -1

    def _pass_over(self, folder: Path, error: Exception) -> None:
        """Set a damaged checkpoint aside; a process that does not own the folder only reads, and leaves it there."""
        if self._team.leads:
            logger.warning("%s", error)
        if folder.parent == self.folder:
            self._passed_over.append(folder)
        if self._claimed:
            self._team.decide(f"pass over {folder}", partial(put_aside, self._passed_over))

    def _take(self) -> None:
        self._owner = take_over(self.folder, self._passed_over)
        self._place.claimed()
