"""The folder of a run: a new one, or that of the run to go on with, of which this job is the only writer."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.memory.memory_copies import MemoryCopies
from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.checkpoint.places.mirror import Mirror
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.checkpoint.team import Team
from axonml_jax.launch.config.machines import MACHINES
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.processes.leftovers import MARK
from axonml_jax.launch.processes.worker_environment import RESTART_COUNT
from axonml_jax.logging import print0

CHECKPOINT_FOLDER = "checkpoints"
"""Where in it the checkpoints are."""

_LAUNCH = "launch.txt"


class RunFolder:
    """Finds and claims the folder to go on with, as soon as it is made; a new one is made by `make`. A context.

    All processes make the same calls; the main one decides.

    Args:
      config: of the run.
      environ: the launcher's variables.

    Attributes:
      resumed: whether there is a folder to go on with.
      memory: copies of the state in memory; None: the run makes none.

    Raises:
      ConfigError: when the folder to resume has no checkpoints, nothing would outlive copies in memory, or a new run would be
        copied over, or go on from, another one's copies.
      FolderInUse: naming the process that writes it.
    """

    def __init__(self, config: RunConfig, environ: Mapping[str, str] = os.environ):
        every = config.checkpoint.memory_every
        if every is not None and config.spikes.factor is not None:
            raise ConfigError(
                f"checkpoint.memory_every={every}, spikes.factor={config.spikes.factor}: a copy in memory may be of a step "
                "after a spike that nobody has seen yet; leave one of the two out"
            )
        try:
            self.memory = None if every is None else MemoryCopies(every, environ)
        except ValueError as error:
            raise ConfigError(f"checkpoint.memory_every={every}: {error}") from error
        self._config, self._environ, self._team = config, environ, Team()
        found = self._team.decide("find the run to go on with", partial(earlier_folder, config, environ))
        self.resumed = found is not None
        self.mirrored = config.checkpoint.mirror is not None and self._team.decide(
            "look for copies of checkpoints", partial(_has_copies, config, self.resumed)
        )
        self._manager: CheckpointManager | None = None
        self._path: Path | None = None
        if found is not None:
            self._claim(found)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception):
        if self.memory is not None:
            self.memory.close(together=exception[0] is None)
            print0(f"\nmemory          {self.memory.cost}")
        if self._manager is not None:
            self._manager.__exit__(*exception)

    @property
    def leads(self) -> bool:
        """Whether this process writes into it: the main one."""
        return self._team.leads

    def begins(self) -> bool:
        """Whether there is no checkpoint to go on from: a run that is restarted before its first one begins anew."""
        here = self.resumed and self._team.decide("look for checkpoints", partial(_has_checkpoints, self.path))
        return not (here or self.mirrored)

    @property
    def path(self) -> Path:
        """The folder."""
        assert self._path is not None, "make it first"
        return self._path

    @property
    def manager(self) -> CheckpointManager:
        """Of its checkpoints."""
        assert self._manager is not None, "make the folder first"
        return self._manager

    def make(self) -> None:
        """Make a new folder, unless there is one to go on with."""
        if self._manager is None:
            self._claim(self._team.decide("make the run's folder", partial(new_folder, self._config)))

    def _claim(self, path: str) -> None:
        section, folder = self._config.checkpoint, Path(path)
        manager = CheckpointManager(
            folder / CHECKPOINT_FOLDER,
            every=section.every,
            keep=section.keep,
            keep_every=section.keep_every,
            keep_for=section.keep_for,
            best="valid_loss" if section.best else None,
            verify=section.verify,
            max_failures=section.max_failures,
            mirror=section.mirror,
            asynchronous=section.asynchronous,
        )
        try:
            manager.claim()
        except BaseException:
            manager.close()
            raise
        self._manager, self._path = manager, folder
        if self.leads and (launch := self._environ.get(MARK)):
            (folder / _LAUNCH).write_text(launch, encoding="utf-8")


def unchanged(environ: Mapping[str, str]) -> bool:
    """Whether this is a restart of the same run on the same machines: what its step sends has been said, and took a trace."""
    return environ.get(RESTART_COUNT, "0") != "0" and MACHINES not in environ


def earlier_folder(config: RunConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The folder of the run to go on with, None for a new run. Nothing is written.

    Args:
      config: `resume` decides: null means a new run; `auto` the newest of this name that has checkpoints, if there is one;
        anything else is the folder itself. Workers that their launcher has restarted take that of the attempt before.
      environ: the launcher's variables.

    Raises:
      ConfigError: when the folder to resume has no checkpoints.
    """
    restarted = environ.get(RESTART_COUNT, "0") != "0"
    folder = _before_restart(config, environ.get(MARK, "")) if restarted else None
    if folder is None and config.resume is not None:
        folder = _newest_with_checkpoints(config) if config.resume == "auto" else _asked_for(config.resume)
    return None if folder is None else str(folder)


def new_folder(config: RunConfig) -> str:
    """The run's name, or its name with the number after the highest, so that numbers tell the age."""
    root = Path(config.output.dir)
    root.mkdir(parents=True, exist_ok=True)
    while True:
        taken = _of_this_name(config)
        folder = root / (f"{config.name}-{max(taken) + 1}" if taken else config.name)
        try:
            folder.mkdir()
        except FileExistsError:
            continue  # another run of this name has begun at the same moment
        return str(folder)


def _of_this_name(config: RunConfig) -> dict[int, Path]:
    """The folders of all runs of this name by number, the newest first."""
    root = Path(config.output.dir)
    numbered = ((_number(config, path), path) for path in (root.iterdir() if root.is_dir() else ()))
    return dict(sorted(((number, path) for number, path in numbered if number is not None), reverse=True))


def _number(config: RunConfig, folder: Path) -> int | None:
    """Which run of this name is in a folder; None: one of another name."""
    rest = folder.name.removeprefix(config.name)
    if folder.name.startswith(config.name) and (not rest or (rest[0] == "-" and rest[1:].isdecimal())):
        return int(rest[1:] or 1)
    return None


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


def _has_copies(config: RunConfig, resumed: bool) -> bool:
    """Whether an object store has checkpoints to go on from."""
    assert config.checkpoint.mirror is not None
    folder = Path(config.output.dir, config.name, CHECKPOINT_FOLDER)
    mirror = Mirror(ObjectStore(config.checkpoint.mirror), folder, Retention(keep=None))
    steps = mirror.steps
    if steps and not resumed and config.resume is None:
        raise ConfigError(
            f"checkpoint.mirror={config.checkpoint.mirror} has copies of a run's checkpoints, the newest of step {steps[-1]}: "
            "go on with that run by resume=auto, or give another URL"
        )
    newest = mirror.newest if steps and not resumed else None
    if newest is not None and _number(config, newest.folder.parent) is None:
        raise ConfigError(
            f"checkpoint.mirror={config.checkpoint.mirror} has copies of the run in {newest.folder.parent}, whose name is not "
            f"{config.name}: give another URL, or go on with that run under its own name"
        )
    return bool(steps)
