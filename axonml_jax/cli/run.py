"""A run's folder, devices, mesh and plan, the programs it keeps, and going on from its last good checkpoint."""

import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonml_jax.base import PyTree, aligned, logger, print0
from axonml_jax.checkpoint.format import DamagedCheckpoint, Manifest, Team, checkpoints_in, manifests_in, name_of
from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.memory import MemoryCopies, restore_newest
from axonml_jax.checkpoint.object_store import ObjectStore, lie_apart
from axonml_jax.checkpoint.places import Copies, is_url
from axonml_jax.checkpoint.retention import Retention, best_of
from axonml_jax.cli.flags import in_flags, refusal
from axonml_jax.cli.tasks import OwnSplit, TextData, read_own
from axonml_jax.compat.processes import only_cpu
from axonml_jax.config.config import (
    MACHINES,
    NEWEST,
    ConfigError,
    RunConfig,
    changed_settings,
    for_world,
    keep_settings,
    machines_of,
    settings_at,
    yaml_in,
)
from axonml_jax.config.sections import OwnModel
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.leftovers import MARK
from axonml_jax.launch.workers import RESTART_COUNT, visible_gpus
from axonml_jax.mesh.init import init, num_launched
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.simulate import fake_devices, requested_devices
from axonml_jax.mesh.world import MockBackend, World
from axonml_jax.models.weights import check_pretrained
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import check_batch

# --------------------------------------------------------------------------------------------------
# Where the checkpoints of a run are: in its folder, or at the URL that its configuration names.
# --------------------------------------------------------------------------------------------------

CHECKPOINT_FOLDER = "checkpoints"
"""Where in a run's folder the checkpoints are, unless they are at a URL."""


def place_said(run: Path) -> str | None:
    """The URL of a run's checkpoints (`checkpoint.url`), as its configuration says; None if they are in the folder."""
    return _said(run, "checkpoint", "url")


def _said(run: Path, *keys: str) -> str | None:
    """A text setting in a run folder's configuration; None if it is missing or cannot be read."""
    try:
        content = yaml_in(run / NEWEST)
        for key in keys:
            content = content[key]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript, reportCallIssue, reportArgumentType]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content if isinstance(content, str) else None


def checkpoints_of(run: Path) -> Mapping[int, Path | str]:
    """Every checkpoint of a run by step, in order: a folder, or a URL.

    Raises:
      OSError: when a store does not answer, after all tries.
    """
    if (url := place_said(run)) is None:
        return checkpoints_in(run / CHECKPOINT_FOLDER)
    return {step: f"{url.rstrip('/')}/{name_of(step)}" for step in copies_at(url).steps}


def best_checkpoint(run: Path, metric: str) -> int | None:
    """The step of the checkpoint of a run with the lowest value of a metric; None if none was saved with it."""
    url = place_said(run)
    return best_of(manifests_in(run / CHECKPOINT_FOLDER) if url is None else copies_at(url).said(), metric, "min")


def copies_at(url: str) -> Copies:
    """The checkpoints under a URL of an object store, for reading."""
    return Copies(ObjectStore(url), Retention(keep=None))


# --------------------------------------------------------------------------------------------------
# Compiled programs that outlive their process: JAX's persistent cache, in a folder that is bounded and that the user
# sees.
# --------------------------------------------------------------------------------------------------

AUTO = "auto"
"""The value of `output.compiled` that stands for a folder in this user's caches."""

MOST = 4 * 2**30
"""Bytes that the folder may hold when a run starts; those whose last use is the longest ago go first."""

_LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def keep_compiled(folder: str | None) -> None:
    """Make JAX read and store compiled programs in a folder.

    Small programs too, unlike JAX by itself: making a model and its state compiles dozens of them, for seconds together. A
    folder that JAX was given already (`JAX_COMPILATION_CACHE_DIR`), what it shall leave out
    (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`), and the switch `JAX_ENABLE_COMPILATION_CACHE`, hold.

    Args:
      folder: which; "auto": `axonml_jax/compiled` in the user's caches (`XDG_CACHE_HOME`), and none where it cannot be
        written; None: JAX's own setting.

    Raises:
      ValueError: when the given folder cannot be written, or others may write into it: a program is code that runs.
    """
    if folder is None or not jax.config.jax_enable_compilation_cache or kept_in() is not None:
        return
    try:
        path = _caches() if folder == AUTO else Path(folder).expanduser()
    except RuntimeError as error:  # this user has no home
        if folder == AUTO:
            return
        raise ValueError(f"output.compiled={folder}: {error} Give a folder from the root, or null") from error
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
        if why := shared_with(path):
            raise _Shared(f"{why}, and a program is code that runs")
        _trim(path)
    except OSError as error:
        if folder != AUTO:
            remedy = f"; give a folder that can be written, or null{_Shared.remedy * isinstance(error, _Shared)}"
            raise ValueError(f"output.compiled={folder}: {error}{remedy}") from error
        if isinstance(error, _Shared):
            logger.warning("compiled programs are not kept in %s: %s%s", path, error, _Shared.remedy)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if _LEAST not in os.environ:
        jax.config.update(_LEAST.lower(), 0)


def kept_in() -> Path | None:
    """The folder in which JAX keeps compiled programs; None if it keeps none."""
    folder = jax.config.jax_compilation_cache_dir
    return Path(folder) if folder and jax.config.jax_enable_compilation_cache else None


def compiled_in_words() -> str:
    """Describe where compiled programs are kept, and how many there are."""
    folder = kept_in()
    if folder is None:
        return "programs are compiled anew by every run"
    sizes = [about.st_size for _, about in _programs(folder)]
    return f"programs are kept in {folder}: {len(sizes)} there, {sum(sizes) / 1e6:,.1f} MB"


class _Shared(OSError):
    """Raised for a folder that others may write to."""

    remedy = "; chmod go-w it. JAX_COMPILATION_CACHE_DIR takes a folder as it is"


_UID_MAP, _OVERFLOW = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")


def shared_with(folder: Path) -> str | None:
    """Describe who else may write to a folder; None if only this user and root may.

    Folders above it count too: whoever may write one of these, unless its sticky bit is set, may put another in this one's
    place. What their groups may write is left out, as many users are alone in theirs. In a rootless container `/` may belong to
    the host's root, whom the system calls by the number of all users that the container does not have.
    """
    inner, *above = (folder.resolve(), *folder.resolve().parents)
    about = inner.stat()
    if about.st_uid not in (os.geteuid(), 0):
        return f"{inner} belongs to user {about.st_uid}"
    if about.st_mode & 0o022:
        return f"others may write {inner} (mode {stat.S_IMODE(about.st_mode):04o})"
    trusted = {os.geteuid(), 0, *_outside()}
    for each in above:
        about = each.stat()
        if about.st_uid not in trusted:
            return f"{each} above it belongs to user {about.st_uid}"
        if about.st_mode & 0o002 and not about.st_mode & stat.S_ISVTX:
            return f"others may write {each} above it (mode {stat.S_IMODE(about.st_mode):04o})"
    return None


def _outside() -> tuple[int, ...]:
    """The number that stands for all users outside of this process's user namespace; none if it is in the first one."""
    try:
        if _UID_MAP.read_text("utf-8").split() == ["0", "0", str(2**32 - 1)]:
            return ()
        return (int(_OVERFLOW.read_text("utf-8")),)
    except (OSError, ValueError):
        return ()


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonml_jax" / "compiled"


def _programs(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the programs in a folder, without those that another process removes meanwhile."""
    for path in folder.glob("*-cache"):
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _trim(folder: Path) -> None:
    """Remove the least recently used programs until the others fit; other processes may do the same."""
    found = sorted((about.st_atime, about.st_size, path) for path, about in _programs(folder))
    over = sum(size for _, size, _ in found) - MOST
    for _, size, path in found:
        if over <= 0:
            break
        path.unlink(missing_ok=True)
        over -= size


# --------------------------------------------------------------------------------------------------
# The folder of a run: a new one, or that of the run to go on with, of which this job is the only writer.
# --------------------------------------------------------------------------------------------------

_LAUNCH = "launch.txt"


class RunFolder:
    """Claims the folder of the run to resume at once, or makes a new one in `make`. A context.

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
                "after a spike that has not been noticed yet; leave one of the two out"
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
        """Whether this process is the main one, which writes into the folder."""
        return self._team.leads

    def begins(self) -> bool:
        """Whether the training begins at step 0, as there is no checkpoint to resume from, in the folder or an object store."""
        here = self.resumed and self._team.decide("look for checkpoints", partial(_has_checkpoints, self.path))
        return not (here or self.mirrored)

    @property
    def left_copies(self) -> bool:
        """Whether processes of an earlier attempt may have left copies in memory."""
        return self.memory is not None and self._environ.get(RESTART_COUNT, "0") != "0"

    @property
    def path(self) -> Path:
        """The run's folder."""
        assert self._path is not None, "make it first"
        return self._path

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the run's checkpoints."""
        assert self._manager is not None, "make the folder first"
        return self._manager

    def make(self) -> None:
        """Make a new folder, unless one is resumed."""
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
    """Whether this is a restart on the same machines, so that the ledger, which needs a trace, was printed before."""
    return environ.get(RESTART_COUNT, "0") != "0" and MACHINES not in environ


def earlier_folder(config: RunConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the folder of the run to resume, or None for a new run. Writes nothing.

    Args:
      config: `resume` decides: null means a new run; `auto` the newest of this name that has checkpoints, if there is one;
        anything else is the folder itself. Workers that their launcher has restarted take the folder of the attempt before.
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
    """Make a new run folder: the run's name, with the number after the highest existing one."""
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
    """The folders of all runs with this name by number, newest first."""
    root = Path(config.output.dir)
    numbered = ((_number(config, path), path) for path in (root.iterdir() if root.is_dir() else ()))
    return dict(sorted(((number, path) for number, path in numbered if number is not None), reverse=True))


def _number(config: RunConfig, folder: Path) -> int | None:
    """The number of a run of this name in a folder; None for other names."""
    rest = folder.name.removeprefix(config.name)
    if folder.name.startswith(config.name) and (not rest or (rest[0] == "-" and rest[1:].isdecimal())):
        return int(rest[1:] or 1)
    return None


def _before_restart(config: RunConfig, launch: str) -> Path | None:
    marked = ((folder, folder / _LAUNCH) for folder in _of_this_name(config).values())
    return next((folder for folder, mark in marked if mark.is_file() and mark.read_text("utf-8") == launch), None)


def _newest_with_checkpoints(config: RunConfig) -> Path | None:
    # A number at the end may be part of another run's name: beside `lr`, `lr-2` is that run's folder if it says so.
    own = lambda folder: folder.name == config.name or _said(folder, "name") in (config.name, None)
    return next((each for each in _of_this_name(config).values() if own(each) and _has_checkpoints(each)), None)


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
    """Whether an object store has checkpoints to resume from; refuses those of another run."""
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
    """Refuse to resume a run whose checkpoints are not where the configuration would look for them."""
    said = place_said(folder)
    if (folder / NEWEST).is_file() and said != url:
        raise ConfigError(
            f"the checkpoints of {folder} are {f'at {said}' if said else 'in it'}, and checkpoint.url={url or 'null'} looks "
            f"{f'at {url}' if url else 'there'}: set checkpoint.url={said or 'null'}, or begin a new run without resume"
        )


# --------------------------------------------------------------------------------------------------
# Devices, mesh and plan of a run, checked before anything is allocated.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSetup:
    """What a run works with: devices, mesh, plan and shapes of batches.

    Attributes:
      world: the processes and their devices.
      mesh: the mesh of devices.
      plan: how the model is split and its step runs.
      batch: shapes of a global batch.
      own: the data, if it is the user's own.
    """

    world: World
    mesh: Mesh
    plan: Plan
    batch: PyTree
    own: OwnSplit | None = None

    @property
    def device_words(self) -> str:
        """The mesh's devices in words."""
        device = self.mesh.devices.flat[0]
        simulated = "simulated " if device.platform == "cpu" and self.mesh.size > self.world.num_processes else ""
        processes = f" in {self.world.num_processes} processes" if self.world.num_processes > 1 else ""
        return f"{self.mesh.size} {simulated}{device.device_kind} device{'s' * (self.mesh.size > 1)}{processes}"


def set_up_run(config: RunConfig) -> RunSetup:
    """Start the devices, and check that mesh and batch fit them. Call it before anything uses a JAX device.

    Raises:
      ValueError: for degrees whose product is not the number of devices, a batch that does not divide, or a folder of compiled
        programs that cannot be written.
    """
    keep_compiled(config.output.compiled)  # JAX asks for the folder once, when it compiles for the first time
    world = start_devices(config.devices.simulated)
    try:
        mesh = make_mesh(devices=None, **config.degrees)
    except ValueError as error:
        simulates = world.devices[0].platform == "cpu"
        fewer = "--devices.simulated {}" if simulates else "let the run see {} of them (CUDA_VISIBLE_DEVICES)"
        raise ValueError(f"mesh: {in_flags(str(error), fewer)}") from error
    own = None if config.data.class_path is None else read_own(config.data, config.train.global_batch_size)
    batch, plan = batch_of_tokens(config) if own is None else own.batch, config.build_plan()
    ground = RunSetup(world, mesh, plan, batch, own)
    # A model of one's own decides in which order ranks hold positions, and is made later: see `check_own`.
    if isinstance(config.model, OwnModel) and config.mesh.context != 1:
        plan = replace(config, context=replace(config.context, order="contiguous")).build_plan()
    check_sizes(config, ground, plan)
    return ground


def simulated_where_few(config: RunConfig, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """The configuration with simulated devices added, with a note, if this machine has fewer than its mesh needs."""
    wanted = math.prod(degree for degree in config.degrees.values() if degree != -1)
    gpus = len(visible_gpus(environ))
    here = requested_devices() if only_cpu() else gpus
    if config.devices.simulated is not None or not here or here >= wanted or num_launched() > 1:
        return config
    print0(f"this machine has {here} device{'s' * (here > 1)}: {wanted} are simulated, on which nothing runs\n")
    return replace(config, devices=replace(config.devices, simulated=wanted))


def on_machines(config: RunConfig, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Returns the configuration with batch and accumulation for the machines of now, if they may come and go.

    It then starts the devices.

    Raises:
      ConfigError: with everything for which the run could not go on with another number of machines.
    """
    found = machines_of(environ)
    if found is None:
        return config
    keep_compiled(config.output.compiled)
    machines, now = found
    here = for_world(config, machines, now, start_devices(config.devices.simulated).world_size)
    size, accumulate = here.train.global_batch_size, here.plan.accumulate
    print0(f"machines   {now} of {machines.largest}: train.global_batch_size={size}, plan.accumulate={accumulate}")
    return here


def check_sizes(config: RunConfig, ground: RunSetup, plan: Plan) -> None:
    """Refuse a batch that does not split over the mesh under a plan.

    Raises:
      ValueError: naming the configuration's sizes and the nearest that do.
    """
    length = "" if ground.own is not None else f", data.length={config.data.length}"
    try:
        check_batch(plan.batch_layout(dict(ground.mesh.shape)), ground.batch, plan.microbatches)
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.global_batch_size={config.train.global_batch_size}{length}: {error}") from error


def batch_of_tokens(config: RunConfig) -> PyTree:
    """The shapes of a batch of text or documents."""
    rows = jax.ShapeDtypeStruct((config.train.global_batch_size, config.data.length), np.int32)
    of_documents = {"segment_ids": rows, "positions": rows} if config.data.documents else {}
    return {"tokens": rows, "targets": rows, **of_documents}


def start_devices(simulated: int | None) -> World:
    """The world of simulated CPU devices, or of the devices that JAX finds.

    Raises:
      ValueError: for simulated devices in one of several launched processes, or a platform that JAX does not have.
    """
    if simulated is not None:
        launched = num_launched()
        if launched > 1:
            raise ValueError(
                f"devices.simulated={simulated}: this is one of {launched} launched processes, and simulated "
                "devices are all in one; add --devices.simulated null to use the processes' own devices, or start "
                "axonml-jax train without a launcher"
            )
        fake_devices(simulated)
    try:
        return init()
    except RuntimeError as error:
        if "Unable to initialize backend" not in str(error):
            raise
        raise ValueError(f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: {error}") from error


def all_or_refuse(*attempts: Callable[[], Any]) -> list[Any]:
    """Run all attempts; returns their results, or refuses with all their problems together.

    Raises:
      ConfigError: with every attempt's refusal.
    """
    results, problems = [], {}
    for attempt in attempts:
        try:
            results.append(attempt())
        except Exception as error:
            if (said := refusal(error)) is None:
                raise
            problems[said] = error
    if problems:
        raise ConfigError("\n".join(problems)) from next(iter(problems.values()))
    return results


def check_weights(config: RunConfig) -> None:
    """Check that a new run's initial weights fit its model, and that adapters have weights to adapt.

    Raises:
      ConfigError: when they are not, or are missing.
    """
    if (
        config.finetune.lora.rank is not None
        and config.train.weights is None
        and not isinstance(config.model, OwnModel)
    ):
        raise ConfigError(
            f"finetune.lora.rank={config.finetune.lora.rank}: adapters alone train, and without train.weights the transformer "
            "that they adapt is random. Give train.weights, a folder of Hugging Face weights (axonml-jax export writes one of "
            "a run of yours), or go on with a run that has adapters: --resume FOLDER"
        )
    try:
        if config.train.weights is not None:
            check_pretrained(config.transformer_for("train.weights"), config.train.weights)
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.weights: {error}") from error


# --------------------------------------------------------------------------------------------------
# Resuming a run from its last good checkpoint, and printing the settings that have changed.
# --------------------------------------------------------------------------------------------------


def resumed(folder: RunFolder, config: RunConfig, trainer: Trainer, data: TextData) -> tuple[int, dict[str, Any]]:
    """Resume from the last good checkpoint, if there is one, and record the configuration from here on.

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
        keep_settings(folder.path, config, start)
    return start, about


def _restored(folder: RunFolder, trainer: Trainer, data: TextData) -> tuple[Manifest | None, str]:
    """The step that the trainer resumes from, and from where: memory, unless a newer checkpoint is good."""
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
    before = settings_at(folder.path, start)
    if before is None:
        yield f"unknown, as {folder.path / NEWEST} cannot be read"
    else:
        yield from changed_settings(before, config)


def _degrees(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())


# --------------------------------------------------------------------------------------------------
# `devices`: what JAX sees.
# --------------------------------------------------------------------------------------------------


def devices(simulated: int | None = None) -> int:
    """Print versions, backend, processes, and a table of devices with their memory where it is known.

    Args:
      simulated: number of simulated CPU devices; None: the devices that JAX finds.

    Raises:
      ConfigError: for a number below 1, or launch variables that describe no job.
    """
    [world] = all_or_refuse(partial(start_devices, simulated))
    rows = [[str(d.id), d.platform, d.device_kind, str(d.process_index), _memory(d)] for d in jax.devices()]
    carrier = "memory of this process" if world.backend.name == MockBackend.name else world.backend.name
    print0(f"jax {jax.__version__} on Python {sys.version.split()[0]}, messages by {carrier}")
    print0(
        f"{world.num_processes} process(es), {world.world_size} device(s), {len(world.local_ranks)} in this process\n"
    )
    print0(aligned(["device", "platform", "kind", "process", "memory"], rows, left=3))
    return 0


def _memory(device) -> str:
    # Only the process that holds a device may ask; CPU devices share the host's memory and report none.
    if device.process_index != jax.process_index():
        return "-"
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f"{limit / 2**30:.1f} GiB" if limit else "-"
