"""Going on with a run: from its last good checkpoint, saying what is other than it was."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest
from axonml_jax.checkpoint.memory.restore_newest import restore_newest
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config import stretches
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.job.run_folder import RunFolder
from axonml_jax.launch.job.text_task import TextData
from axonml_jax.logging import print0


def begin(folder: RunFolder, config: RunConfig, trainer: Trainer, data: TextData) -> tuple[int, dict[str, Any]]:
    """Go on from the last good checkpoint, if there is one, and note in the folder what it is trained with from here on.

    Returns:
      Updates made, and what the checkpoint says about itself.

    Raises:
      ConfigError: when none is good, or when it is of another model, optimizer or text.
    """
    start, about = 0, {}
    try:
        restored, place = _restored(folder, trainer, data)
    except (DamagedCheckpoint, ValueError) as error:
        raise ConfigError(f"resume: {error}") from error
    if restored is not None:
        start, about = int(trainer.state.step), dict(restored.about)
        _tell(folder, config, trainer, restored, start, place)
    if start < config.train.steps and folder.leads:
        stretches.begin(folder.path, config, start)
    return start, about


def _restored(folder: RunFolder, trainer: Trainer, data: TextData) -> tuple[Manifest | None, str]:
    """What the trainer goes on from now, and where that was: in memory, unless a newer one on disk is good."""
    if folder.memory is not None:
        found, here = restore_newest(folder.memory, folder.manager, trainer, of=str(folder.path), data=data.train)
        print0(f"memory     {folder.memory.bound}")
        return found, "memory" if here else folder.manager.place
    restored = folder.manager.restore(trainer, data=data.train) if folder.resumed or folder.mirrored else None
    return restored, folder.manager.place


def _tell(folder: RunFolder, config: RunConfig, trainer: Trainer, restored: Manifest, start: int, place: str) -> None:
    print0(f"resumed after step {start}, from {place}")
    if folder.leads and (lines := list(_other(folder, config, trainer, restored, start))):
        print0("other settings than those that made this step:", *(f"  {line}" for line in lines), sep="\n")
    steps = config.train.steps
    if start > steps:
        print0(f"train.steps={steps} asks for fewer steps than the {start} that are done: nothing is trained")
    elif start == steps:
        print0(f"all steps of train.steps={steps} are done: nothing is trained")
    print0("", flush=True)


def _other(folder: RunFolder, config: RunConfig, trainer: Trainer, restored: Manifest, start: int) -> Iterator[str]:
    mesh = dict(trainer.model.mesh.shape)
    was = restored.about.get("mesh", mesh)
    if isinstance(was, dict) and was != mesh:
        yield f"mesh: {_degrees(was)}, now {_degrees(mesh)}"
    before = stretches.settings_at(folder.path, start)
    if before is None:
        yield f"unknown, as {folder.path / stretches.NEWEST} cannot be read"
    else:
        yield from stretches.differences(before, config)


def _degrees(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())
