"""The checkpoints of a run: one every n steps, the newest and the best kept, a damaged one passed over."""

import math
import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from axonml_jax.checkpoint import arrays
from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest
from axonml_jax.checkpoint.saving import Saving, remove, tidy
from axonml_jax.checkpoint.store import Positioned, checked_manifest, leaves_of, load, manifest_of
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger

DAMAGED = ".damaged"
"""What the name of a checkpoint that was passed over ends with; it is kept for inspection."""

CHECKPOINTS = "step_" + 8 * "[0-9]"
"""Which folders are checkpoints, as `Path.glob` finds them."""

_NAME = re.compile(r"step_(\d{8,})")


class CheckpointManager:
    """Saves a run's checkpoints in one folder, `step_00000100` and so on. All processes make the same calls.

    Args:
      folder: made when it is not there; on a file system that all processes share. What killed processes left is removed.
      every: steps between checkpoints; None: only when forced.
      keep: how many of the newest to keep; None: all.
      best: a metric given to `save`; the best checkpoint by it is kept too.
      mode: whether the best is the lowest or the highest.
      asynchronous: write behind the training's back; `save` then blocks only while arrays are copied to the host.

    Raises:
      ValueError: for numbers that are not positive.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every: int | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
    ):
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None")
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} must be 'min' or 'max'")
        self.folder, self.every, self.keep, self.best, self.mode = Path(folder).absolute(), every, keep, best, mode
        self._asynchronous, self._team = asynchronous, Team()
        self._saver = arrays.checkpointer(self._team.size)
        self._saving: Saving | None = None
        self._newest: int | None = None
        self._team.decide(f"open {self.folder}", self._open)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *exception):
        self.close()

    def due(self, step: int) -> bool:
        """Whether `save` saves at this step unforced."""
        return self.every is not None and step % self.every == 0 and step != self._newest

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
        """Save if it is time.

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
          OSError: when this one, or the one before, could not be written.
        """
        self.check()
        if not (force or self.due(step)) or step == self._newest:
            return False
        self.wait()
        leaves = leaves_of(state)
        manifest = manifest_of(state, leaves, step=step, data=data, metrics=metrics, about=about)
        folder = self._path(step)
        self._saving = Saving(
            folder, leaves, manifest, self._team, self._saver, replace=True, committed=partial(self._rotate, step)
        )
        self._newest = step
        if not self._asynchronous:
            self.wait()
        return True

    def check(self) -> None:
        """Raise the error of a save that has failed meanwhile; costs nothing otherwise."""
        if self._saving is not None and self._saving.done:
            self.wait()

    def wait(self) -> None:
        """Until the save under way is committed.

        Raises:
          OSError: when it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def close(self) -> None:
        """Wait, and let go of the threads."""
        try:
            self.wait()
        finally:
            self._saver.close()

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order, as this process sees the folder."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted(int(match[1]) for match in found if match)

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric; None where none has it."""
        values = {step: value for step in self.steps if (value := self._value(step)) is not None}
        sign = 1 if self.mode == "min" else -1
        return min(values, key=lambda step: (sign * values[step], -step)) if values else None

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
        self.wait()
        candidates = self._team.decide(f"restore from {self.folder}", lambda: self._candidates(step))
        failed: DamagedCheckpoint | None = None
        for candidate in candidates:
            folder = self._path(candidate)
            try:
                manifest = checked_manifest(folder, self._team)
            except DamagedCheckpoint as error:
                if step is not None:
                    raise
                failed = error
                self._pass_over(folder, error)
                continue
            load(folder, manifest, like, self._saver, data=data, accept=accept)
            self._newest = candidate
            if failed is not None and self._team.leads:
                logger.warning("falling back to the last good checkpoint, %s", folder)
            return manifest
        if failed is not None:
            raise DamagedCheckpoint(f"no checkpoint in {self.folder} is whole; the last: {failed}")
        return None

    def _candidates(self, step: int | str | None) -> list[int]:
        if step == "best":
            if self.best is None:
                raise ValueError('step="best" needs a metric: CheckpointManager(..., best="valid_loss")')
            step = self.best_step
            if step is None:
                raise FileNotFoundError(f"no checkpoint in {self.folder} has the metric {self.best}")
        if step is None:
            return self.steps[::-1]
        if step not in self.steps:
            raise FileNotFoundError(f"{self.folder} has no checkpoint of step {step}; it has {self.steps}")
        return [int(step)]

    def _pass_over(self, folder: Path, error: DamagedCheckpoint) -> None:
        if self._team.leads:
            logger.warning("%s", error)
        aside = folder.with_name(folder.name + DAMAGED)

        def rename() -> None:
            if aside.exists():
                remove(aside)
            folder.rename(aside)

        self._team.decide(f"pass over {folder}", rename)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tidy(self.folder)

    def _rotate(self, newest: int) -> None:
        """In the main process, after a commit: delete what is neither among the newest nor the best."""
        if self.keep is None:
            return
        kept = {newest, *self.steps[-self.keep :], self.best_step if self.best else None}
        for step in self.steps:
            if step not in kept:
                remove(self._path(step))

    def _value(self, step: int) -> float | None:
        try:
            value = Manifest.read(self._path(step)).metrics.get(self.best or "")
        except (OSError, ValueError):
            return None
        return value if value is not None and math.isfinite(value) else None

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"
