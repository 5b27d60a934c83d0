"""The checkpoints of a run: one every n steps, those kept that the rules keep, a damaged one passed over."""

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from axonml_jax.checkpoint import arrays
from axonml_jax.checkpoint.keeping.failures import Failures
from axonml_jax.checkpoint.keeping.retention import Retention, best_of, require_count, seconds_of
from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest
from axonml_jax.checkpoint.names import path_of
from axonml_jax.checkpoint.ownership import Ownership
from axonml_jax.checkpoint.places.chosen_place import place_of
from axonml_jax.checkpoint.plain_files import step_number
from axonml_jax.checkpoint.saving import Saving, put_aside, take_over, tidy
from axonml_jax.checkpoint.store import Positioned, checked_manifest, leaves_of, load, manifest_of
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger
from axonml_jax.sharding.leaf import Leaf


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
      asynchronous: write behind the training's back; `save` then blocks only while arrays are copied to the host.

    Raises:
      TypeError: for numbers that are not whole, and what is neither true nor false where that is asked.
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
        self._newest, self._claimed, self._restored = None, False, False
        self._owner: Ownership | None = None  # in the main process
        self._passed_over: list[Path] = []

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception):
        self._close(together=kind is None)

    def claim(self) -> None:
        """Become the folder's only writer, as the first save does by itself, and remove what killed processes have left.

        The owner is one job, whose main process says in `owner.json` who it is, until `close` or its end. One that has ended is
        followed with a warning; one on another machine after its heartbeat has been quiet for a minute.

        Raises:
          FolderInUse: naming the process that writes the folder, and since when.
          OSError: when the folder cannot be written.
        """
        if not self._claimed:
            self._team.decide(f"claim {self.folder}", self._take)
            self._claimed = True

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step unforced."""
        return (self.every is None or step % self.every == 0) and step != self._newest

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

        Args:
          step: updates made.
          state: see `ax.save`.
          data: the data loader.
          metrics: of this step; the best checkpoint is chosen by them.
          about: plain values for whoever reads `checkpoint.json`.
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
        """Raise the error of a save that has failed meanwhile; costs nothing otherwise.

        One process tells a trainer of a commit here. Several are not done at the same step: they tell it in `save` and `wait`,
        and there they count a failure that may pass.
        """
        saving, alone = self._saving, self._team.size == 1
        if saving is not None and (saving.done if alone else self._failures.fatal(saving.failure)):
            self.settle()

    def wait(self) -> None:
        """Until the save under way is committed.

        Raises:
          OSError: when the newest could not be written.
        """
        self.settle()
        self._failures.tell()

    def settle(self) -> None:
        """Wait for the save under way as the next one does: a failure that may pass is counted, and not raised."""
        saving, self._saving, tell, self._tell = self._saving, None, self._tell, None
        if saving is None:
            return
        try:
            saving.wait()
        except BaseException as error:
            self._newest = None  # it may be tried again
            if not isinstance(error, OSError):
                raise
            self._failures.take(error, self._team.leads)
            return
        self._failures.passed(self._team.leads)
        if tell is not None and self._newest is not None:
            tell(self._newest, self._place.name_of(self._newest))

    @property
    def failed_saves(self) -> int:
        """How many saves have failed and were passed over (`max_failures`)."""
        return self._failures.total

    def close(self) -> None:
        """Wait, and let go of the threads and the folder; with `mirror` all processes wait until the newest is copied.

        A job that has only restored copies, or sends to the URL, what has been left, unless another job owns the folder.
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
        """Where the checkpoints are: the folder, or the URL."""
        return str(self._place)

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric; None where none has it."""
        return best_of(self._place.said(), self.best or "", self.mode)

    def restore(
        self,
        like: Any,
        *,
        step: int | Literal["best"] | None = None,
        data: Positioned | None = None,
        accept: Collection[str] = (),
    ) -> Manifest | None:
        """Restore the newest good checkpoint, or a certain one.

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
          ValueError: listing every array that does not fit.
        """
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
                self._newest, self._restored = candidate, True
                self._ungraded = -1 if self.best in manifest.metrics else self._ungraded
                if failed is not None and self._team.leads:
                    logger.warning("falling back to the last good checkpoint, %s", self._place.name_of(candidate))
                return manifest
        if failed is not None:
            raise DamagedCheckpoint(f"no checkpoint in {self.place} is whole; the last: {failed}")
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
            placed=self._place.placed and partial(self._place.placed, step),
            committed=partial(self._place.committed, step),
        )

    def _note_metrics(self, metrics: Mapping[str, float]) -> None:
        """Of a save: where none has the metric that the best is chosen by, that is said before a checkpoint is deleted."""
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
        """Put a damaged checkpoint aside; whoever does not own the folder only reads, and leaves it until he does."""
        if self._team.leads:
            logger.warning("%s", error)
        if folder.parent == self.folder:
            self._passed_over.append(folder)
        if self._claimed:
            self._team.decide(f"pass over {folder}", partial(put_aside, self._passed_over))

    def _take(self) -> None:
        self._owner = take_over(self.folder, self._passed_over)
        self._place.claimed()
