"""A run's folder, opened to read: its configuration, and the model of one of its checkpoints on the devices of this job."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from axonml_jax.checkpoint.contents import AVERAGE
from axonml_jax.checkpoint.manifest import Manifest
from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.checkpoint.store import restore
from axonml_jax.checkpoint.team import Team
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.facade.saved_model import AveragedParams
from axonml_jax.launch.config.nearest_file import nearest_file
from axonml_jax.launch.config.read_config import read_config
from axonml_jax.launch.config.run_checkpoints import CHECKPOINT_FOLDER, best_checkpoint, checkpoints_of, place_said
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.stretches import NEWEST
from axonml_jax.launch.job.run_setup import RunSetup, all_or_refuse, lay_ground
from axonml_jax.launch.own.subject import shapes_of


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run to look at; nothing in its folder is changed.

    Attributes:
      folder: the run's.
      config: its configuration, with the flags that were given.
      checkpoint: the checkpoint that was chosen: a folder, or a URL.
      step: its step.
      ema: take the moving average in the place of the parameters.
    """

    folder: Path
    config: RunConfig
    checkpoint: Path | str
    step: int
    ema: bool = False

    def open(self) -> tuple[RunSetup, ParallelModel]:
        """Start the devices, and put the checkpoint's model on them under the configuration's plan.

        Among several processes it is the main one's checkpoint: a run that is still training writes and removes some meanwhile.

        Raises:
          ConfigError: for a mesh that does not fit the devices, or a checkpoint of another model.
        """
        [ground] = all_or_refuse(partial(lay_ground, self.config))
        [made] = all_or_refuse(partial(shapes_of, self.config, ground.batch))  # no process holds more than its part
        seed = self.config.train.seed
        model = ParallelModel(made.model, ground.mesh, ground.plan, params=made.params, seed=seed)
        own = self.checkpoint if isinstance(self.checkpoint, str) else str(self.checkpoint.absolute())
        checkpoint = Team().decide("choose a checkpoint", lambda: own)
        all_or_refuse(partial(restore, checkpoint, model))
        if self.ema:
            all_or_refuse(partial(restore, checkpoint, AveragedParams(model), part=AVERAGE))
        return ground, model


def saved_run(command: str, given: argparse.Namespace, flags: Sequence[str]) -> SavedRun:
    """The run that the arguments name.

    Args:
      command: for messages.
      given: `run`, `step`, `ema` and `allow_imports`.
      flags: keys of the configuration that shall be other than the run's, such as `--mesh.fsdp 4`.

    Raises:
      ConfigError: for a folder that is none of a run, or a step that has no checkpoint.
    """
    folder, step = Path(given.run), given.step
    if folder.parent.name == CHECKPOINT_FOLDER:  # a checkpoint in its run
        there = {path.name: number for number, path in checkpoints_in(folder.parent).items()}
        step = step or str(there.get(folder.name, folder.name))
        folder = folder.parent.parent
    if not (folder / NEWEST).is_file():
        near = None if folder.is_dir() else nearest_file(folder)
        hint = f"; did you mean {near}?" if near else "; axonml-jax runs FOLDER lists those of a folder"
        raise ConfigError(f"{given.run}: there is no {NEWEST} in it, so it is no run's folder{hint}")
    config = read_config(command, [str(folder / NEWEST), *flags], imports=given.allow_imports)
    number = _chosen(folder, step)
    checkpoint = _checkpoints(folder)[number]
    if given.ema and isinstance(checkpoint, Path):  # of one at a URL it is seen when it is restored
        require_average(checkpoint)
    return SavedRun(
        folder=folder,
        config=replace(config, resume=None),
        checkpoint=checkpoint,
        step=number,
        ema=given.ema,
    )


def require_average(checkpoint: Path) -> None:
    """Refuse a checkpoint that has no moving average.

    Raises:
      ConfigError: when it has none.
    """
    if not any(name.startswith(AVERAGE) for name in Manifest.read(checkpoint).entries):
        raise ConfigError(
            f"--ema: {checkpoint} holds no moving average of the parameters; a run with ema.decay keeps one"
        )


def _chosen(folder: Path, step: str | None) -> int:
    """A checkpoint's step. Only files are read, or a store, as the devices may not have been started yet."""
    steps = list(_checkpoints(folder))
    listed = ", ".join(map(str, steps[-8:])) or "none"
    if not steps:
        raise ConfigError(f"{place_said(folder) or folder / CHECKPOINT_FOLDER} has no checkpoints")
    if step in (None, "last"):
        return steps[-1]
    if step == "best":
        if (best := best_checkpoint(folder, "valid_loss")) is None:
            raise ConfigError(f"--step best: no checkpoint of {folder} was saved with a valid_loss; there are {listed}")
        return best
    if not str(step).isdecimal() or int(step) not in steps:
        raise ConfigError(f"--step {step}: {folder} has no such checkpoint; there are {listed}, or give last or best")
    return int(step)


def _checkpoints(folder: Path) -> Mapping[int, Path | str]:
    try:
        return checkpoints_of(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error
