"""The folder of a run: a new one, or that of the run to go on with."""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.launch.config import ConfigError, RunConfig
from axonml_jax.launch.leftovers import MARK
from axonml_jax.launch.read_config import as_dict
from axonml_jax.launch.worker_environment import RESTART_COUNT

CHECKPOINT_FOLDER = "checkpoints"
"""Where in it the checkpoints are."""

_LAUNCH = "launch.txt"


def choose_folder(config: RunConfig, environ: Mapping[str, str] = os.environ) -> tuple[str, bool]:
    """The run's folder, made and with its configuration in it.

    Args:
      config: `resume` decides: null makes a new one; `auto` takes the newest of this name that has checkpoints, or else a
        new one; anything else is the folder itself. Workers that their launcher has restarted take the folder of the
        attempt before.
      environ: the launcher's variables.

    Returns:
      The folder, and whether it is that of an earlier run or attempt.

    Raises:
      ConfigError: when the folder to resume has no checkpoints.
    """
    launch = environ.get(MARK, "")
    folder = _before_restart(config, launch) if environ.get(RESTART_COUNT, "0") != "0" else None
    if folder is None and config.resume is not None:
        folder = _newest_with_checkpoints(config) if config.resume == "auto" else _asked_for(config.resume)
    resumed = folder is not None
    folder = folder or _new_folder(config)
    if launch:
        (folder / _LAUNCH).write_text(launch, encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(as_dict(config), sort_keys=False), encoding="utf-8")
    return str(folder), resumed


def _new_folder(config: RunConfig) -> Path:
    """The run's name, or its name with the number after the highest, so that numbers tell the age."""
    root, taken = Path(config.output.dir), _of_this_name(config)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / (f"{config.name}-{max(taken) + 1}" if taken else config.name)
    folder.mkdir()
    return folder


def _of_this_name(config: RunConfig) -> dict[int, Path]:
    """The folders of all runs of this name by number, the newest first."""
    root, numbered = Path(config.output.dir), {}
    for path in root.glob(f"{config.name}*") if root.is_dir() else ():
        rest = path.name.removeprefix(config.name)
        if not rest or (rest[0] == "-" and rest[1:].isdecimal()):
            numbered[int(rest[1:] or 1)] = path
    return dict(sorted(numbered.items(), reverse=True))


def _before_restart(config: RunConfig, launch: str) -> Path | None:
    marked = ((folder, folder / _LAUNCH) for folder in _of_this_name(config).values())
    return next((folder for folder, mark in marked if mark.is_file() and mark.read_text("utf-8") == launch), None)


def _newest_with_checkpoints(config: RunConfig) -> Path | None:
    return next((folder for folder in _of_this_name(config).values() if _has_checkpoints(folder)), None)


def _asked_for(resume: str) -> Path:
    if not _has_checkpoints(folder := Path(resume)):
        raise ConfigError(
            f"resume={resume}: {folder / CHECKPOINT_FOLDER} has no checkpoints; give the folder of a run, or auto"
        )
    return folder


def _has_checkpoints(folder: Path) -> bool:
    return bool(checkpoints_in(folder / CHECKPOINT_FOLDER))
