"""The folder of a run: a new one, or that of the run to go on with, of which this job is the only writer."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.memory.memory_copies import MemoryCopies
from axonml_jax.checkpoint.places.chosen_place import is_url
from axonml_jax.checkpoint.places.object_store import ObjectStore, lie_apart
from axonml_jax.checkpoint.team import Team
from axonml_jax.launch.config.machines import MACHINES
from axonml_jax.launch.config.run_checkpoints import CHECKPOINT_FOLDER, checkpoints_of, copies_at, place_said
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.config.stretches import NEWEST
from axonml_jax.launch.processes.leftovers import MARK
from axonml_jax.launch.processes.worker_environment import RESTART_COUNT
from axonml_jax.logging import print0

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
      ConfigError: when the folder to resume has no checkpoints, or has them elsewhere than `checkpoint.url` says; when nothing
        would outlive copies in memory; when a new run would be copied over, or go on from, another one's copies.
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
        if found is not None:
            self._team.decide(
                "look where its checkpoints are", lambda: _require_same_place(Path(found), config.checkpoint.url)
            )
        self.mirrored = config.checkpoint.store is not None and self._team.decide(
            "look for checkpoints in an object store", partial(_has_copies, config, found)
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
    def left_copies(self) -> bool:
        """Whether the processes of an attempt before may have left copies in memory."""
        return self.memory is not None and self._environ.get(RESTART_COUNT, "0") != "0"

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
            section.url or folder / CHECKPOINT_FOLDER,
            every=section.every,
            keep=section.keep,
            keep_every=section.keep_every,
            keep_for=section.keep_for,
            best="valid_loss" if section.best else None,
            verify=section.verify,
            max_failures=section.max_failures,
            mirror=section.mirror,
            staging=section.staging,
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
            f"resume={resume}: {place_said(folder) or folder / CHECKPOINT_FOLDER} has no checkpoints; give the folder of a "
            "run, or auto"
        )
    return folder


def _has_checkpoints(folder: Path) -> bool:
    return bool(checkpoints_of(folder))


def _has_copies(config: RunConfig, resumed: str | None) -> bool:
    """Whether an object store has checkpoints to go on from."""
    section, url = config.checkpoint, config.checkpoint.store
    assert url is not None
    key = f"checkpoint.{'mirror' if section.url is None else 'url'}={url}"
    if section.mirror is not None:
        folder = Path(resumed or Path(config.output.dir, config.name), CHECKPOINT_FOLDER)
        lie_apart(ObjectStore(url), folder, f"{key} and {folder}, the folder of the checkpoints", "give another URL")
    copies = copies_at(url)
    steps = copies.steps
    if steps and resumed is None and config.resume is None:
        raise ConfigError(
            f"{key} has {'copies of ' * (section.url is None)}a run's checkpoints, the newest of step {steps[-1]}: go on with "
            "that run by resume=auto, or give another URL"
        )
    newest = copies.newest if steps and resumed is None else None
    if newest is not None and not is_url(newest.folder) and _number(config, Path(newest.folder).parent) is None:
        raise ConfigError(
            f"{key} has copies of the run in {Path(newest.folder).parent}, whose name is not {config.name}: give another URL, "
            "or go on with that run under its own name"
        )
    return bool(steps)


def _require_same_place(folder: Path, url: str | None) -> None:
    """Refuse to go on with a run whose checkpoints are not where they would be looked for."""
    said = place_said(folder)
    if (folder / NEWEST).is_file() and said != url:
        raise ConfigError(
            f"the checkpoints of {folder} are {f'at {said}' if said else 'in it'}, and checkpoint.url={url or 'null'} looks "
            f"{f'at {url}' if url else 'there'}: set checkpoint.url={said or 'null'}, or begin a new run without resume"
        )
