"""A training run: set-up and folder, the loop, saves, resuming, preemption, and monitoring."""

import hashlib
import json
import math
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonml_jax.base import PyTree, aligned, logger, print0
from axonml_jax.checkpoint.format import DamagedCheckpoint, Manifest, Team, checkpoints_in, manifests_in, name_of
from axonml_jax.checkpoint.manager import CheckpointManager, manifest_of, save
from axonml_jax.checkpoint.memory import MemoryCopies, restore_newest
from axonml_jax.checkpoint.object_store import ObjectStore, lie_apart
from axonml_jax.checkpoint.places import Copies, is_url
from axonml_jax.checkpoint.retention import Retention, best_of
from axonml_jax.cli.flags import in_flags, refusal
from axonml_jax.cli.tasks import OwnSplit, TextData, read_own
from axonml_jax.compat.processes import only_cpu
from axonml_jax.config import config as stretches
from axonml_jax.config.config import MACHINES, NEWEST, ConfigError, RunConfig, as_dict, for_world, machines_of, yaml_in
from axonml_jax.config.sections import OwnModel
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.leftovers import MARK
from axonml_jax.launch.workers import RESTART_COUNT, visible_gpus
from axonml_jax.ledger.count import collectives_in
from axonml_jax.mesh.init import init, num_launched
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.simulate import fake_devices, requested_devices
from axonml_jax.mesh.watch import FlightRecord, Watchdog
from axonml_jax.mesh.world import MockBackend, World
from axonml_jax.models.weights import check_pretrained
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import check_batch
from axonml_jax.sharding.layout import replicated, to_host
from axonml_jax.training.callbacks import Throughput, as_floats
from axonml_jax.training.run_state import CompareReplicas, ReplicasDiffer, in_words
from axonml_jax.training.state import TrainState

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
# The loop: draw a batch, make a step, measure, validate; the caller writes the records.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The measurements at a step.

    Attributes:
      step: number of updates made so far.
      metrics: by name: `loss`, `grad_norm` and the loss function's own of this step's batch, `learning_rate` of the last
        update where it is known, `tokens` (or `examples`) seen since the run began, `wall_time` (seconds since it began, those
        of the process before a resumption included), speeds since the record before without what is done after a step, such
        as saves (`compile_time` instead for the first step), `valid_*` after a validation, and `slow_rank` with
        `slow_rank_times` while one holds up the others.
    """

    step: int
    metrics: dict[str, float]


def fit(
    trainer: Trainer,
    batches: Iterator[PyTree],
    *,
    steps: int,
    throughput: Throughput,
    validate: Callable[[], dict[str, float]] | None = None,
    validate_every: int | None = None,
    log_every: int = 10,
    learning_rate: Callable[[int], Any] | None = None,
    start: int = 0,
    elapsed: float = 0.0,
    watchdog: Watchdog | None = None,
    seen: Callable[[int, jax.Array], None] | None = None,
    after: Callable[[int, dict[str, float]], bool] | None = None,
) -> Iterator[Record]:
    """Train up to update `steps`, yielding a record after update 1, every `log_every`-th, every validated and the last.

    Between records nothing waits for the devices. Stop iterating, and the training stops.

    Args:
      trainer: makes the steps.
      batches: global batches, at least `steps - start` of them.
      steps: updates of the whole run, those before `start` included.
      throughput: turns durations into speeds.
      validate: metrics of the model as it is now; its time counts in no speed.
      validate_every: validate after every this many steps, besides the last; None only after the last.
      log_every: steps between records.
      learning_rate: the optimizer's schedule, called with the number of updates made before; None: it is not known.
      start: updates made already; the records of a resumed run are those it would have had uninterrupted.
      elapsed: seconds that the run had taken until then.
      watchdog: hears of every step, and of the beginning and end of validations and of `after`.
      seen: called with the number of every step and its loss on the devices, before `after`.
      after: called after every step with its number and the metrics of its record (none where it has no record); true
        stops the training. If there is one process it is also called when a validation fails, before that is raised.
    """
    before, clock = start, time.perf_counter()
    began = clock - elapsed
    doing = (lambda what: nullcontext()) if watchdog is None else watchdog.doing
    batches = batches if watchdog is None else watchdog.drawing(batches)
    for step, batch in zip(range(start + 1, steps + 1), batches, strict=False):
        measured, first, metrics = trainer.step(batch), step == start + 1, {}
        if watchdog is not None:
            watchdog.began(step, measured["loss"])
        if seen is not None:
            seen(step, measured["loss"])
        due = step == steps or (validate_every is not None and step % validate_every == 0)
        if due or step == 1 or step % log_every == 0:
            metrics = as_floats(measured)
            seconds = time.perf_counter() - clock
            if learning_rate is not None:
                metrics["learning_rate"] = float(learning_rate(max(step - int(metrics.get("skipped", 0)) - 1, 0)))
            metrics |= {throughput.unit: throughput.total(step), "wall_time": time.perf_counter() - began}
            metrics |= {"compile_time": seconds} if first else throughput.of(num_steps=step - before, seconds=seconds)
            try:
                with doing("validating"):
                    valid = validate() if due and validate else {}
            except Exception:
                # What was trained is kept. Other processes may be in the validation's collectives: they could not save with us.
                if after is not None and jax.process_count() == 1:
                    after(step, metrics)
                raise
            metrics |= {f"valid_{name}": value for name, value in as_floats(valid).items()}
            metrics |= {} if watchdog is None else watchdog.slowest()
            yield Record(step, metrics)
        elif first:
            jax.block_until_ready(measured)
        done = time.perf_counter()
        with doing("saving"):
            if after is not None and after(step, metrics):
                return
        # Neither compiling counts in a speed, nor a validation, nor what is done after a step.
        now = time.perf_counter()
        before, clock = (step, now) if metrics or first else (before, clock + now - done)


# --------------------------------------------------------------------------------------------------
# SIGTERM and Ctrl-C: asked for between two steps, with the same answer in all processes.
# --------------------------------------------------------------------------------------------------

_SAID = b"\naxonml_jax: Ctrl-C: the run stops after this step and is saved, if it saves at all; Ctrl-C again ends it at once\n"


class Preemption:
    """While entered, SIGTERM and the first Ctrl-C do not end the process, but ask the run to stop after a step.

    Among several processes JAX's coordinator agrees on the step: a signal to one of them is enough.

    Attributes:
      asked: whether the run was asked to stop.
      interrupted: whether it was Ctrl-C, in this process.
    """

    def __init__(self):
        self.asked = self.interrupted = False
        self._alone = jax.process_count() == 1
        self._before = {}

    def __enter__(self) -> "Preemption":
        if threading.current_thread() is not threading.main_thread():
            return self
        # With several processes JAX has a handler of its own, in C++, that tells the coordinator; one in Python would hide it.
        if self._alone:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a shell's background
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            if handler is not None:  # None: C code had set it, and Python cannot put it back
                signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to stop after this step; equal in all processes, which must all ask after every step."""
        if not self._alone:
            from jax.experimental import multihost_utils

            self.asked = self.asked or multihost_utils.reached_preemption_sync_point(step)
        return self.asked

    def _note(self, number, frame):
        self.asked = True

    def _interrupt(self, number, frame):
        self.interrupted = True
        # The next one needs no Python, which may be waiting for a device.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(OSError):  # a full disk, or a reader that has gone
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SAID)
        if self._alone:
            self.asked = True
        else:
            os.kill(os.getpid(), signal.SIGTERM)


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
# Loss spikes: a run goes back to the checkpoint before, and on past the batches that made it, as PaLM's did.
#
# What is a spike depends on the losses alone, and where a run goes back to on the steps at which it saves: a run that
# is interrupted anywhere finds the same spikes and goes the same way. Losses are read where the host waits for the
# devices anyway.
# --------------------------------------------------------------------------------------------------

_ABOUT = "spikes"


@dataclass(frozen=True)
class Spike:
    """A loss that is far above those before it.

    Attributes:
      step: that made it.
      loss: of that step.
      usual: the median of those before; None: it was not finite before there were enough.
      position: of the data, after that step's batch.
    """

    step: int
    loss: float
    usual: float | None
    position: Mapping[str, Any]

    def __str__(self) -> str:
        usual = "" if self.usual is None else f", the median before it {self.usual:.4g}"
        return f"the loss of step {self.step} was {self.loss:.4g}{usual}"


class Spikes:
    """Detects spikes of the loss: `seen` takes every step, and `good` is asked before anything is saved.

    Args:
      config: the run's; the section `spikes` says what a spike is.
      trainer: the run.
      loader: its training data.
      manager: of its checkpoints; where there is none yet, the first state is saved, so that there is one to go back to.
      about: what the checkpoint that the run goes on from says about itself.

    Attributes:
      found: a spike that the run has not gone back for yet.
      diverged: why the run has stopped, where it has gone back too often, else None.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        loader: DataLoader,
        manager: CheckpointManager,
        about: Mapping[str, Any],
    ):
        self._rule, self._every = config.spikes, config.checkpoint.every
        self._skips_nonfinite = config.train.max_nonfinite is not None
        self._trainer, self._loader, self._manager = trainer, loader, manager
        self._pending: list[tuple[int, jax.Array, dict[str, Any]]] = []
        self._losses: deque[float] = deque(maxlen=self._rule.window)
        self._rollbacks = self._skipped = 0
        self.found: Spike | None = None
        self.diverged: str | None = None
        self._go_on(about)
        if trainer.step_number == 0:
            manager.save(0, trainer, data=loader, about=self.about(), force=True)

    def about(self) -> dict[str, Any]:
        """Returns the losses and counts that a checkpoint keeps, so that a resumed run finds the same spikes."""
        return {_ABOUT: {"losses": list(self._losses), "rollbacks": self._rollbacks, "skipped": self._skipped}}

    def _go_on(self, about: Mapping[str, Any]) -> None:
        """Restore this state from a checkpoint; a run that did not look for spikes has none."""
        kept = about.get(_ABOUT, {})
        self._losses.clear()
        self._losses.extend(kept.get("losses", ()))
        self._rollbacks = max(self._rollbacks, kept.get("rollbacks", 0))
        self._skipped = max(self._skipped, kept.get("skipped", 0))

    def metrics(self) -> dict[str, float]:
        """The number of rollbacks, and of batches left out."""
        return {"rollbacks": self._rollbacks, "skipped_batches": self._skipped}

    def seen(self, step: int, loss: jax.Array) -> None:
        """Note a step, without waiting for its loss."""
        self._pending.append((step, loss, self._loader.state_dict()))

    def good(self) -> bool:
        """Read the new losses; whether none is a spike. All processes read the same ones."""
        for step, loss, position in self._pending:
            value = as_floats({"loss": loss})["loss"]
            usual = median(self._losses) if len(self._losses) == self._rule.window else None
            if self._is_spike(value, usual):
                self.found = Spike(step, value, usual, position)
                break
            if math.isfinite(value):
                self._losses.append(value)
        self._pending.clear()
        if self.found is not None and self._rollbacks == self._rule.limit:
            self.diverged = f"stopped: {self.found}, and the run has gone back {self._rollbacks} times (spikes.limit)"
        return self.found is None

    def _is_spike(self, value: float, usual: float | None) -> bool:
        if not math.isfinite(value):
            return not self._skips_nonfinite
        assert self._rule.factor is not None
        return usual is not None and 0 < self._rule.factor * usual < value

    def roll_back(self) -> int:
        """Restore the last regular checkpoint before the spike, and put the loader `spikes.skip` batches past the spike's.

        Returns:
          The step of that checkpoint.

        Raises:
          RuntimeError: when there is no checkpoint of before the spike.
        """
        spike, self.found = self.found, None
        assert spike is not None and self._every is not None
        self._manager.settle()
        every = self._every
        before = lambda: max((s for s in self._manager.steps if s < spike.step and s % every == 0), default=None)
        step = Team().decide("find the checkpoint before the spike", before)
        if step is None:
            raise RuntimeError(f"{spike}, and {self._manager.place} has no checkpoint of before to go back to")
        restored = self._manager.restore(self._trainer, step=step)
        assert restored is not None
        self._go_on(restored.about)
        self._loader.load_state_dict(dict(spike.position))
        with closing(iter(self._loader)) as batches:  # pyright: ignore[reportArgumentType]
            drawn = sum(1 for _ in islice(batches, self._rule.skip))
        self._rollbacks, self._skipped = self._rollbacks + 1, self._skipped + spike.step - step + drawn
        print0(
            f"{spike}: back to step {step}, and on with other data: {spike.step - step + drawn} batches are left out "
            f"(rollback {self._rollbacks} of {self._rule.limit})",
            flush=True,
        )
        return step


# --------------------------------------------------------------------------------------------------
# Replicas compared every so many steps of a run, before anything is saved.
# --------------------------------------------------------------------------------------------------


class ReplicasCompared:
    """Compares replicas when due; `fit` calls it after every step.

    Args:
      config: `train.compare_replicas` says how often, `train.replicas_differ` what happens then.
      trainer: the run.
      after: called then, as `fit` has it; not after a step whose replicas differ, if that stops the run.
      last: tells whether the run ends after a step, which is then compared too; None: only when due.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        after: Callable[[int, dict[str, float]], bool],
        last: Callable[[int], bool] | None = None,
    ):
        self._every, self._stops = config.train.compare_replicas, config.train.replicas_differ == "stop"
        self._trainer, self._after, self._compare = trainer, after, CompareReplicas()
        self._told, self._last = set[int](), last

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Compare the replicas if it is due.

        Returns:
          Whether to stop, as `after` says.

        Raises:
          ReplicasDiffer: in every process, naming the devices and the arrays, if `train.replicas_differ` is "stop".
        """
        if self._every is not None and (step % self._every == 0 or (self._last is not None and self._last(step))):
            found = self._compare(self._trainer.state)
            if found and self._stops:
                raise ReplicasDiffer(in_words(found, step))
            if jax.process_index() == 0 and {each.device for each in found} - self._told:
                logger.warning("%s", in_words(found, step))
            self._told |= {each.device for each in found}
        return self._after(step, metrics)


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


def lay_ground(config: RunConfig) -> RunSetup:
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
# What happens between two steps of `train`: checkpoints, stopping when asked to, stopping when updates are not finite.
# --------------------------------------------------------------------------------------------------

NONFINITE = "nonfinite"
"""Where in a run's folder the step is saved from which updates were not finite."""


class Saves:
    """Saves checkpoints when due; `fit` calls it after every step.

    Args:
      manager: of the checkpoints; None saves nothing.
      trainer: the run.
      loader: its training data, whose position is saved too.
      config: step `train.steps` is saved in any case; after `train.max_nonfinite` updates in a row that are not finite the run
        stops.
      preemption: asked after every step whether to stop.
      inspection: where to save the first of too many updates in a row that were not finite.
      spikes: asked before anything is saved whether the loss has spiked; None: nobody looks.
      memory: copies of the state in memory; None: there are none.

    Attributes:
      stopped: the step after which SIGTERM or Ctrl-C has stopped the run, else None.
      diverged: why the run was stopped when its updates were not finite or its loss spiked too often, else None.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        trainer: Trainer,
        loader: DataLoader,
        config: RunConfig,
        preemption: Preemption,
        inspection: Path,
        spikes: Spikes | None = None,
        memory: MemoryCopies | None = None,
    ):
        self._manager, self._trainer, self._loader = manager, trainer, loader
        if manager is not None:
            manifest_of(trainer, {}, data=loader)  # what a save would refuse, before the first step
        self._steps, self._preemption, self._inspection = config.train.steps, preemption, inspection
        self._limit, self._spikes, self._memory = config.train.max_nonfinite, spikes, memory
        self._most = config.checkpoint.max_failures
        self._positions: deque[tuple[int, dict[str, Any]]] = deque(
            maxlen=config.train.log_every + (self._limit or 0) + 2
        )
        self._asked = -1
        self.stopped: int | None = None
        self.diverged: str | None = None

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Save if it is due.

        Args:
          step: updates made.
          metrics: of the step's record, empty where it has none.

        Returns:
          Whether to stop.
        """
        last = self.ends_after(step)
        due = self._manager is not None and (last or self._manager.due(step))
        self._positions.append((step, self._loader.state_dict()))
        if self._spikes is not None and (due or metrics) and not self._spikes.good():
            self.diverged = self._spikes.diverged
            return True  # a state after a spike is not saved
        # Only where the host waits for the step anyway is it asked how the step went.
        in_a_row = self._in_a_row() if due or metrics else 0
        if self._memory is not None and step < self._steps:  # before a disk is waited for, or fails
            self._memory.keep(step, self._trainer, data=self._loader, now=self.stopped is not None)
        if self._limit is not None and in_a_row >= self._limit:
            self._save_for_inspection()
        elif self._manager is not None:
            # In the middle of a row of skipped updates there is nothing new to save, unless this is the end.
            if last or not in_a_row:
                about = None if self._spikes is None else self._spikes.about()
                self._manager.save(step, self._trainer, data=self._loader, metrics=metrics, about=about, force=last)
            self._manager.check()
        return self.stopped is not None or self.diverged is not None

    def ends_after(self, step: int) -> bool:
        """Whether the run ends after this step, which is then saved; equal in all processes, which must all ask."""
        if self._asked != step and self._preemption.stop_after(step):
            self.stopped = step
        self._asked = step
        return step == self._steps or self.stopped is not None

    @property
    def goes_back(self) -> bool:
        """Whether training has stopped to resume from the checkpoint before a spike."""
        return self._spikes is not None and self._spikes.found is not None and not (self.stopped or self.diverged)

    @property
    def reason(self) -> str:
        """How the training ended: "finished", "stopped" or "diverged"."""
        return "diverged" if self.diverged else "finished" if self.stopped is None else "stopped"

    @property
    def failures(self) -> dict[str, int]:
        """For records: the number of this process's failed saves that were passed over, if that is allowed."""
        return {} if self._manager is None or self._most == 1 else {"failed_saves": self._manager.failed_saves}

    def _in_a_row(self) -> int:
        guard = self._trainer.state.guard
        return 0 if guard is None else int(np.max(to_host(guard.in_a_row)))

    def _save_for_inspection(self) -> None:
        """Save the state before the first bad update, which is still the current one, and that update's batch position."""
        state, mesh = self._trainer.state, self._trainer.model.mesh
        assert state.guard is not None and self._limit is not None
        counts = to_host(state.guard)
        halted = np.flatnonzero(counts.in_a_row >= self._limit)
        since = int(np.ravel(counts.since)[halted[0]])
        if np.ndim(counts.since):
            return self._save_replicas(state, halted, since)
        guard = self._trainer.train_step.at_rest.kept["guard"].first(None, mesh)
        self._inspect(replace(state, step=replicated(state.guard.since, mesh)).keeping(guard=guard), since)
        self.diverged = (
            f"stopped: {self._limit} updates in a row were not finite, the first after step {since}. The run as it was "
            f"before that one is saved for inspection in {self._inspection}: restore it, and the next step repeats it"
        )

    def _save_replicas(self, state: TrainState, halted: np.ndarray, since: int) -> None:
        """Save the current state if ranks train independently, as the other replicas have gone on."""
        guard = self._trainer.train_step.at_rest.kept["guard"].first(None, self._trainer.model.mesh)
        self._inspect(state.keeping(guard=guard), self._positions[-1][0])
        self.diverged = (
            f"stopped: {self._limit} updates in a row of replica {', '.join(map(str, halted))} were not finite, the first "
            f"after step {since}. The run as it is now is saved for inspection in {self._inspection}: this replica is as it "
            "was before that update, the others have gone on"
        )

    def _inspect(self, state: TrainState, step: int) -> None:
        # From the newest: after a rollback there may be two, and the first is of before it.
        position = next((saved for at, saved in reversed(self._positions) if at == step), None)
        self._inspection.parent.mkdir(parents=True, exist_ok=True)
        loader = None if position is None else _Position(position)
        save(self._inspection, state, step=self._trainer.train_step, data=loader, replace=True)


class _Position:
    """A loader's position a few steps ago."""

    def __init__(self, position: dict[str, Any]):
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state


# --------------------------------------------------------------------------------------------------
# Resuming a run from its last good checkpoint, and printing the settings that have changed.
# --------------------------------------------------------------------------------------------------


def begin(folder: RunFolder, config: RunConfig, trainer: Trainer, data: TextData) -> tuple[int, dict[str, Any]]:
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
        stretches.begin(folder.path, config, start)
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
    before = stretches.settings_at(folder.path, start)
    if before is None:
        yield f"unknown, as {folder.path / stretches.NEWEST} cannot be read"
    else:
        yield from stretches.differences(before, config)


def _degrees(mesh: dict[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.items())


# --------------------------------------------------------------------------------------------------
# The watchdog of a run, and what its flight records say of the run: its configuration's hash, and its step's
# collectives.
# --------------------------------------------------------------------------------------------------


@contextmanager
def run_watchdog(config: RunConfig, ground: RunSetup, trainer: Trainer, folder: Path) -> Iterator[Watchdog]:
    """Watch a run for steps that never end; if it dies, its processes write flight records in its folder.

    Args:
      config: the run's; `train.stuck_timeout` and `train.stuck_warning` are in seconds.
      ground: its mesh and the shapes of its batches.
      trainer: the one whose steps are watched.
      folder: the run's.
    """
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trainer.state)
    collectives = lambda: in_order(lambda: trainer.train_step.trace(state, ground.batch))
    about = {"configuration": configuration_hash(config), "mesh": dict(ground.mesh.shape)}
    with (
        FlightRecord(folder, about=about, collectives=collectives) as record,
        Watchdog(config.train.stuck_timeout, warning=config.train.stuck_warning, record=record) as watchdog,
    ):
        yield watchdog


def configuration_hash(config: RunConfig) -> str:
    """A hash of all settings, equal in processes that were started alike."""
    return hashlib.sha256(json.dumps(as_dict(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def in_order(trace: Callable[[], Any]) -> list[dict[str, Any]]:
    """The collectives of a traced step in program order, as plain values; `bytes` are those of the full arrays."""
    return [
        {
            "kind": each.kind,
            "op": each.op,
            "axes": list(each.axes),
            "ranks": each.group_size,
            "arrays": each.leaves,
            "dtype": each.dtype,
            "bytes": each.itemsize * each.elements,
            "where": each.where,
            "moves": each.label,
        }
        for each in collectives_in(trace().jaxpr)
    ]


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
