"""The worker processes of a job: their environment, their output, their end."""

import importlib.util
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from axonml_jax.base import Lossy, cores
from axonml_jax.config.config import MACHINES, ConfigError, Machines
from axonml_jax.launch.leftovers import MARK, members, signal_all
from axonml_jax.launch.standby import go
from axonml_jax.mesh.environment import MEMORY, Handed

# --------------------------------------------------------------------------------------------------
# Signals sent to the launcher, kept until its loop looks.
# --------------------------------------------------------------------------------------------------

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupts:
    """While entered, collects signals that would end this process, and wakes whoever selects on `fileno`.

    A signal that was ignored before (SIGHUP under nohup, SIGINT in a shell's background) stays ignored.

    Attributes:
      received: the signals that came, in order.
    """

    def __init__(self):
        self.received: list[signal.Signals] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        # Python tells the wakeup descriptor only of signals that have a handler.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            if handler is not None:  # None: C code had set it, and Python cannot put it back
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        signal.set_wakeup_fd(self._wakeup_before)
        self._wake.close()
        self._woken.close()

    def fileno(self) -> int:
        """A file descriptor that becomes readable when a signal comes or a child ends."""
        return self._woken.fileno()

    def drain(self) -> None:
        """Make `fileno` unreadable again."""
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _receive(self, number, frame):
        self.received.append(signal.Signals(number))


# --------------------------------------------------------------------------------------------------
# One stream of one worker: its lines go to the console with its rank, and to a file; the last lines are kept.
# --------------------------------------------------------------------------------------------------

KEPT_LINES = 200
_LONGEST = 2**16
# What gloo prints to standard output from C++ when a group of processes has connected. A line that misses peers does not match.
_CHATTER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\s*"
)


class Outlet:
    """Reads a worker's stream, and passes on only whole lines, so that lines of ranks never mix.

    Gloo's line that all its peers are connected goes to the file only.

    Args:
      pipe: what the worker writes.
      prefix: before every line on the console.
      console: where lines are shown; None: nowhere.
      log: a file that gets the stream as it is; None: none.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, console: IO[bytes] | None, log: Path | None = None):
        self._pipe = pipe
        self._prefix = prefix.encode()
        self._console = console
        self._log = Lossy(log, "w") if log else None
        self._part = b""
        self._last: deque[bytes] = deque(maxlen=KEPT_LINES)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """The file descriptor to select on."""
        return self._pipe.fileno()

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._pipe.closed

    def pump(self) -> None:
        """Pass on the lines that have arrived; at the end of the stream, close."""
        while not self.closed:
            try:
                chunk = os.read(self._pipe.fileno(), _LONGEST)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
            elif self._log:
                self._log.write(chunk)
            *lines, self._part = (self._part + chunk).split(b"\n")
            if len(self._part) > _LONGEST:
                lines, self._part = [*lines, self._part], b""
            self._show(lines)

    def close(self) -> None:
        """Pass on an unfinished last line, and close the pipe and the log file."""
        if not self.closed:
            self._pipe.close()
            if self._log:
                self._log.close()
            lines, self._part = [self._part] if self._part else [], b""
            self._show(lines)

    def last_lines(self) -> list[str]:
        """The last lines, as text."""
        return [line.decode(errors="replace").rstrip("\r") for line in self._last]

    def _show(self, lines: list[bytes]) -> None:
        self._last.extend(lines)
        shown = [self._prefix + line + b"\n" for line in lines if not _CHATTER.fullmatch(line)]
        if self._console and shown:
            self._console.write(b"".join(shown))
            self._console.flush()


# --------------------------------------------------------------------------------------------------
# The variables of a launched worker: torchrun's names, and which devices it may use.
# --------------------------------------------------------------------------------------------------

RESTART_COUNT = "AXONML_JAX_RESTART_COUNT"
"""How often all workers have been restarted; torchrun's name is set too."""

_FORCED = "xla_force_host_platform_device_count"
_DEVICES = Path("/dev")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# PyTorch's torchrun leaves these where a launch runs inside of one of its workers.
# This launcher's own variables are foreign too: they name files that another launch has open, and its machines.
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", MEMORY, MACHINES)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the workers of one attempt share on one machine.

    Attributes:
      address: host of process 0.
      port: where its coordinator listens.
      world_size: processes in the job.
      first_rank: rank of this machine's first worker.
      local_size: workers on this machine.
      node_rank: which machine this is.
      num_nodes: number of machines.
      restarts: attempts before this one.
      max_restarts: how many there may be.
      run_id: the launch's mark.
      machines: how many there may be, where they come and go; None: always as many.
    """

    address: str
    port: int
    world_size: int
    first_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    restarts: int
    max_restarts: int
    run_id: str
    machines: Machines | None = None


def worker_environment(
    environ: Mapping[str, str], attempt: Attempt, local_rank: int, gpus: Sequence[str], handed: Handed | None = None
) -> dict:
    """All environment variables of one worker.

    Args:
      environ: the launcher's own.
      attempt: see `Attempt`.
      local_rank: which worker of this machine.
      gpus: this machine's GPUs to share out, as CUDA_VISIBLE_DEVICES has them; none: the workers compute on the CPU.
      handed: memory that outlives it; None: there is none.
    """
    kept = {name: value for name, value in environ.items() if name not in _FOREIGN}
    rank = str(attempt.first_rank + local_rank)
    job = {
        "MASTER_ADDR": attempt.address,
        "MASTER_PORT": str(attempt.port),
        "WORLD_SIZE": str(attempt.world_size),
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(attempt.local_size),
        "NODE_RANK": str(attempt.node_rank),
        "GROUP_RANK": str(attempt.node_rank),
        "GROUP_WORLD_SIZE": str(attempt.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(attempt.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        RESTART_COUNT: str(attempt.restarts),
        MARK: attempt.run_id,
        # Standard output is a pipe here: without this, what a killed worker had printed would be lost.
        "PYTHONUNBUFFERED": "1",
    }
    memory = {} if handed is None else {MEMORY: handed.text()}
    memory |= {} if attempt.machines is None else {MACHINES: attempt.machines.text()}
    return kept | job | memory | _devices(local_rank, attempt.local_size, gpus)


def _devices(local_rank: int, local_size: int, gpus: Sequence[str]) -> dict[str, str]:
    if not gpus:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    # A single worker drives all GPUs of its machine; several get one each.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if local_size == 1 else gpus[local_rank]}


def count_workers(wanted: str, environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """The number of workers that `--nproc-per-node` means here, and the GPUs that they share.

    Args:
      wanted: a number, `cpu` (as many as cores that this process may run on), `gpu` (as many as GPUs) or `auto` (GPUs where
        there are any, else cores).
      environ: the launcher's variables; JAX_PLATFORMS=cpu leaves GPUs alone.

    Raises:
      ConfigError: when it is none of these, there are too few GPUs, or JAX_PLATFORMS or simulated devices ask for others.
    """
    _refuse_simulated(environ)
    gpus = () if wanted == "cpu" else visible_gpus(environ)
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not gpus and wanted not in ("cpu", "gpu") and "cpu" not in platforms.split(","):
        raise ConfigError(
            f"launch: JAX_PLATFORMS={platforms}: launched processes compute on NVIDIA GPUs, of which JAX could use none here, "
            "or on the CPU; set JAX_PLATFORMS=cpu for that. On TPUs start one process per machine without axonml-jax launch, "
            "and ax.init() finds the others"
        )
    if not platforms and not gpus and wanted not in ("cpu", "gpu"):
        _tell_of_idle()
    if wanted == "auto":
        wanted = "gpu" if gpus else "cpu"
    if wanted == "gpu":
        if not gpus:
            raise ConfigError(
                "launch: --nproc-per-node gpu: no GPU that JAX could use here (it needs the jax[cuda] package, a visible "
                "device, and JAX_PLATFORMS unset or cuda); use cpu, or a number"
            )
        return len(gpus), gpus
    count = str(cores()) if wanted == "cpu" else wanted
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"launch: --nproc-per-node {wanted}: must be a positive number, auto, cpu or gpu")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and int(count) > files // 2:
        many = f" means {count}" * (count != wanted)
        raise ConfigError(
            f"launch: --nproc-per-node {wanted}{many}: the launcher reads two pipes of every process and may open "
            f"{files} files (ulimit -n): start {files // 2} or fewer"
        )
    if gpus and int(count) > len(gpus):
        raise ConfigError(
            f"launch: --nproc-per-node {wanted}: a process needs a GPU of its own, and {len(gpus)} are visible "
            f"({', '.join(gpus)}); start {len(gpus)} or fewer, or set JAX_PLATFORMS=cpu to compute on the CPU"
        )
    return int(count), gpus


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The NVIDIA GPUs that JAX would find, as CUDA_VISIBLE_DEVICES names them. Starts nothing."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return ()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ignores everything after the first invalid entry; -1 and the empty string hide all.
        return tuple(names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))])
    found = [path for path in _DEVICES.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(str(number) for number in range(len(found)))


def _tell_of_idle() -> None:
    """Print a note if this machine has TPUs or AMD GPUs, which launched processes leave idle."""
    # /dev/vfio/vfio is there without devices too.
    found = sorted(path for pattern in ("accel*", "vfio/[0-9]*", "kfd") for path in _DEVICES.glob(pattern))
    if found:
        print_note(
            f"the workers compute on the CPU, though there is {found[0]}: launched processes take NVIDIA GPUs alone. On TPUs "
            "and AMD GPUs start one process per machine without axonml-jax launch, and ax.init() finds the others; set "
            "JAX_PLATFORMS=cpu if the CPU is meant"
        )


def _refuse_simulated(environ: Mapping[str, str]) -> None:
    found = []
    if _FORCED in environ.get("XLA_FLAGS", ""):
        found.append(f"XLA_FLAGS={environ['XLA_FLAGS']}")
    if environ.get("JAX_NUM_CPU_DEVICES", "1") not in ("", "0", "1", "-1"):
        found.append(f"JAX_NUM_CPU_DEVICES={environ['JAX_NUM_CPU_DEVICES']}")
    if found:
        raise ConfigError(
            f"launch: {' and '.join(found)} asks for simulated devices in every process; launched processes have one CPU "
            "device each. Unset it, and choose their number with --nproc-per-node"
        )


# --------------------------------------------------------------------------------------------------
# One process of a launched job, started in a session of its own, and how it failed.
# --------------------------------------------------------------------------------------------------

STDOUT, STDERR = 1, 2


@dataclass(frozen=True)
class Failure:
    """How a worker failed.

    Attributes:
      rank: which process of the job.
      host: where it ran.
      pid: its process id there.
      returncode: its exit code, or minus the signal that ended it.
      seconds: how long it ran.
      lines: the last lines of its standard error.
    """

    rank: int
    host: str
    pid: int
    returncode: int
    seconds: float
    lines: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """The exit status as a shell gives it: 128 plus the number for a signal."""
        return self.returncode if self.returncode > 0 else 128 - self.returncode

    @property
    def how(self) -> str:
        """The exit code or signal in words."""
        if self.returncode > 0:
            return f"exit code {self.returncode}"
        number = -self.returncode
        known = {member.value: member.name for member in signal.Signals}
        return f"signal {number} ({known.get(number, 'real-time')})"


class Worker:
    """A running worker.

    Args:
      rank: which process of the job it is.
      command: the program and its arguments.
      environ: all its variables.
      tee: which streams go to files too (`STDOUT`, `STDERR`, both, 0).
      quiet: which streams do not show on the console.
      logs: the folder of those files; None: there are none.
      files: open files that it gets under the same numbers.
      spare: a process that stands by to be it; None: a new one is started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        tee: int = 0,
        quiet: int = 0,
        logs: Path | None = None,
        files: Sequence[int] = (),
        spare: subprocess.Popen | None = None,
    ):
        self.rank = rank
        self._started = time.monotonic()
        self._ended = 0.0
        ready = spare is not None and _ordered(spare, environ)
        self._process = spare if ready and spare else started(command, environ, files)
        self.pid = self._process.pid
        self.outlets: list[Outlet] = []
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        streams = ((STDOUT, "stdout", self._process.stdout), (STDERR, "stderr", self._process.stderr))
        for bit, name, pipe in streams:
            assert pipe is not None
            console: IO[bytes] | None = None if quiet & bit else getattr(sys, name).buffer
            log = logs / f"{name}.log" if logs and (tee | quiet) & bit else None
            self.outlets.append(Outlet(pipe, f"[rank {rank}] ", console, log))

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, or None while it runs."""
        code = self._process.poll()
        if code is not None and not self._ended:
            self._ended = time.monotonic()
        return code

    def failure(self) -> Failure:
        """The worker's failure. Call it once it has ended and its streams are drained."""
        assert self.returncode
        lines = tuple(self.outlets[-1].last_lines())
        seconds = self._ended - self._started
        return Failure(self.rank, socket.gethostname(), self.pid, self.returncode, seconds, lines)


def started(
    command: Sequence[str], environ: Mapping[str, str], files: Sequence[int], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """Start a process in its own session, with its output piped.

    Args:
      command: the program and its arguments.
      environ: all its variables.
      files: open files that it gets under the same numbers.
      stdin: its input, as `subprocess` has it.
    """
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=files,
    )


def _ordered(spare: subprocess.Popen, environ: Mapping[str, str]) -> bool:
    """Turn a standby process into the worker; returns whether it was still alive."""
    assert spare.stdin is not None
    try:
        with spare.stdin:
            spare.stdin.write(go(environ))
    except BrokenPipeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Which worker failed first, and what to tell the user about it.
# --------------------------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_SHOWN = 60
_SHOWN_WITHOUT_TRACEBACK = 20

# What JAX, gloo, NCCL and this library say in a process that is well itself but has lost another.
_LOST_ANOTHER = re.compile(
    r"closed by peer|Connection reset|Connection refused|Socket closed|[Hh]eartbeat|coordination service|"
    r"CoordinationService|never arrived|their processes are gone|did not call it within|remote process exited|"
    r"ended or were lost|did not come to|Broken pipe|Read timeout|tasks? (?:has|have) (?:disconnected|failed)"
)

_FLIGHT = re.compile(r"axonml_jax: flight record: (.+)")

_HINTS = {
    -9: "SIGKILL comes from outside: most often the out-of-memory killer (see `dmesg`) or a batch system's limit",
    -11: "a crash in native code: set PYTHONFAULTHANDLER=1 to see where",
    -7: "a bus error: often a full /dev/shm",
}


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the first failure that does not merely report a lost connection; if all do, the first.

    Args:
      failures: in the order in which they were seen; at least one.
    """
    return next((failure for failure in failures if not looks_like_a_consequence(failure)), failures[0])


def looks_like_a_consequence(failure: Failure) -> bool:
    """Whether a worker's last lines say that it lost another one."""
    said = [line for line in failure.lines if line.strip()][-_SHOWN_WITHOUT_TRACEBACK:]
    return failure.returncode not in _HINTS and any(_LOST_ANOTHER.search(line) for line in said)


def report(cause: Failure) -> str:
    """Returns the text that a user should read last: rank, exit code or signal, host, and the end of standard error."""
    head = (
        f"rank {cause.rank} failed first: {cause.how} after {cause.seconds:.1f} s (process {cause.pid} on {cause.host})"
    )
    if hint := _HINTS.get(cause.returncode):
        head += f"; {hint}"
    lines = traceback_of(cause.lines)
    if not lines:
        return f"{head}; it wrote nothing to its standard error"
    return "\n".join([f"{head}; the end of its standard error:", *(f"    {line}" for line in lines)])


def flight_records(lines: Sequence[str]) -> list[str]:
    """The paths of flight records that the lines of dying processes name.

    >>> flight_records(["axonml_jax: flight record: runs/a/flight-rank1.json", "Traceback ..."])
    ['runs/a/flight-rank1.json']
    """
    return [found[1] for line in lines if (found := _FLIGHT.match(line))]


def traceback_of(lines: Sequence[str]) -> list[str]:
    """The last traceback with those it is chained to, or the last lines if there is none.

    >>> traceback_of(["epoch 1", "Traceback (most recent call last):", "  ...", "ValueError: x"])
    ['Traceback (most recent call last):', '  ...', 'ValueError: x']
    """
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        return list(lines[-_SHOWN_WITHOUT_TRACEBACK:])
    first = starts.pop()
    while starts and any(line.strip().startswith(_CHAINED) for line in lines[starts[-1] : first]):
        first = starts.pop()
    found = list(lines[first:])
    if len(found) > _SHOWN:
        found = [*found[: _SHOWN // 3], "  ...", *found[-_SHOWN * 2 // 3 :]]
    return found


# --------------------------------------------------------------------------------------------------
# Watching the workers of one machine: passes on their output, finds the first failure, and stops every process.
# --------------------------------------------------------------------------------------------------

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for those that must stop because another worker failed."""

RESTART_GRACE = 1.0
"""The same if all start again: the others cannot go on without the worker that failed, and every second counts."""

_TICK = 0.1
# A worker that lost another may die before the one that caused it, which is still taking its leave.
_SETTLE = 2.0
_DRAIN = 2.0
_LONELY = 30.0
_UNKILLABLE = 10.0


class Others(Protocol):
    """Protocol of the launchers on the job's other machines, as the supervisor uses them."""

    def sockets(self) -> Iterable:
        """The sockets to select on."""
        ...

    def poll(self, done: bool) -> bool:
        """Whether workers here must stop because of another machine. `done`: all workers here have ended well."""
        ...

    def waiting(self) -> bool:
        """Whether workers elsewhere still run."""
        ...

    def alarm(self) -> None:
        """Tell the others at once that a worker here has failed."""
        ...

    @property
    def gently(self) -> bool:
        """Whether all workers are to end by themselves, because machines come or go."""
        ...

    def beat(self) -> None:
        """Send the others a heartbeat when one is due, at least once a second."""
        ...

    def stopping(self) -> None:
        """Tell the others that workers here end because their launcher was asked to stop."""
        ...


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: by a failure here or elsewhere, by a signal to the launcher, or well.

    Attributes:
      failure: what failed first of this machine's workers.
      elsewhere: whether it ended because a worker failed on another machine, or because machines come or go.
      well: whether all of this machine's workers ended with 0 when machines come or go.
      received: the signal that asked for the end.
      stopped: ranks that were still running then, and were stopped.
      early: ranks that had ended well when others failed.
      records: files in which workers have left their flight records.
    """

    failure: Failure | None = None
    elsewhere: bool = False
    well: bool = False
    received: signal.Signals | None = None
    stopped: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    records: tuple[str, ...] = ()


class Supervisor:
    """Watches workers until all have ended; a context that leaves none behind, used once.

    Args:
      workers: a list; workers may be added before `watch`, and are stopped too if that fails.
      interrupts: the launcher's signals.
      run_id: the launch's mark in the workers' environment.
      patience: seconds the workers have to end by themselves after the launcher was told to stop.
      others: the launchers of other machines; None on a single one.
      restarts: whether all start again when one fails.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        interrupts: Interrupts,
        run_id: str,
        patience: float,
        others: Others | None = None,
        restarts: bool = False,
    ):
        self._workers = workers
        self._interrupts = interrupts
        self._run_id = run_id
        self._patience = patience
        self._others = others
        self._grace = RESTART_GRACE if restarts else FAILURE_GRACE
        self._first_end: float | None = None

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *exception):
        """End all processes of the launch."""
        self._end_all(signal.SIGTERM, self._grace)
        self._drain()

    def watch(self) -> Ended:
        """Wait until the attempt ends; returns how."""
        while True:
            self._pump()
            if self._interrupts.received:
                return self._obey(self._interrupts.received[0])
            failed = [worker for worker in self._workers if worker.returncode]
            done = all(worker.returncode == 0 for worker in self._workers)
            elsewhere = self._others is not None and self._others.poll(done)
            if self._others and self._others.gently:
                stopped = self._running()
                self._end_all(signal.SIGTERM, self._patience)
                well = all(worker.returncode == 0 for worker in self._workers)
                return Ended(elsewhere=True, stopped=stopped, well=well)
            if failed:
                if self._others:
                    self._others.alarm()
                return self._explain(failed)
            if elsewhere:
                return Ended(elsewhere=True, stopped=self._running())
            if done and not (self._others and self._others.waiting()):
                return Ended()
            self._tell_of_lonely_workers()

    def _explain(self, failed: list[Worker]) -> Ended:
        """Wait up to 2 s for a failure that is no consequence of another, end all; returns how the attempt ended."""
        deadline = time.monotonic() + _SETTLE
        while time.monotonic() < deadline and not self._interrupts.received:
            self._pump()
            failed += [worker for worker in self._workers if worker.returncode and worker not in failed]
            if len(failed) == len(self._workers) or not looks_like_a_consequence(failed[-1].failure()):
                break
            if self._others and self._others.poll(False):
                break  # it has lost one on another machine
        stopped = self._running()
        early = tuple(worker.rank for worker in self._workers if worker.returncode == 0)
        self._end_all(signal.SIGTERM, self._grace)
        self._drain()
        records = [path for worker in self._workers for path in flight_records(worker.outlets[-1].last_lines())]
        cause = root_cause([worker.failure() for worker in failed])
        return Ended(cause, stopped=stopped, early=early, records=tuple(dict.fromkeys(records)))

    def _obey(self, received: signal.Signals) -> Ended:
        """Pass a signal on to the workers, and give them time to end by themselves."""
        stopped = self._running()
        if self._others:
            self._others.stopping()
        self._end_all(received, self._patience)
        return Ended(received=received, stopped=stopped)

    def _end_all(self, number: int, patience: float) -> None:
        """Signal all workers, wait, kill the rest. Once one has ended, the others get at most `FAILURE_GRACE`."""
        if not self._left():
            return
        signal_all(self._groups(), self._run_id, number)
        heard, deadline = len(self._interrupts.received), time.monotonic() + patience
        running = len(self._running())
        while self._left() and time.monotonic() < deadline:
            self._pump(hear=False)
            if len(self._interrupts.received) > heard:
                break  # asked again: now
            if len(self._running()) < running:
                running, deadline = 0, min(deadline, time.monotonic() + FAILURE_GRACE)
        deadline = time.monotonic() + _UNKILLABLE
        while self._left() and time.monotonic() < deadline:
            signal_all(self._groups(), self._run_id, signal.SIGKILL)
            self._pump(hear=False)
        if stuck := sorted(members(self._groups(), self._run_id)):
            print_note(f"process(es) {stuck} do not end even by SIGKILL: they wait for a device or a file system")

    def _groups(self) -> set[int]:
        return {worker.pid for worker in self._workers}

    def _left(self) -> bool:
        return bool(self._running() or members(self._groups(), self._run_id))

    def _running(self) -> tuple[int, ...]:
        return tuple(worker.rank for worker in self._workers if worker.returncode is None)

    def _pump(self, *, hear: bool = True) -> None:
        """Wait briefly for output, signals, ends of workers and (with `hear`) other launchers; pass the output on."""
        outlets = [outlet for worker in self._workers for outlet in worker.outlets if not outlet.closed]
        with selectors.PollSelector() as selector:
            for source in (self._interrupts, *outlets, *(self._others.sockets() if self._others and hear else ())):
                selector.register(source, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(_TICK)]
        if self._others:
            self._others.beat()
        self._interrupts.drain()
        for outlet in outlets:
            if outlet in ready:
                outlet.pump()

    def _drain(self) -> None:
        """Pass on the remaining output, for at most 2 s: a process that cannot be killed may keep a pipe open."""
        deadline = time.monotonic() + _DRAIN
        outlets = [outlet for worker in self._workers for outlet in worker.outlets]
        while any(not outlet.closed for outlet in outlets) and time.monotonic() < deadline:
            self._pump(hear=False)
        for outlet in outlets:
            outlet.close()

    def _tell_of_lonely_workers(self) -> None:
        """Report once that some workers ended well while others still run, which may wait for them in a collective."""
        running = self._running()
        if len(running) in (0, len(self._workers)) or self._first_end == -1:
            return
        now = time.monotonic()
        self._first_end = self._first_end or now
        if now - self._first_end > _LONELY:
            ended = sorted({worker.rank for worker in self._workers} - set(running))
            print_note(
                f"rank(s) {ended} ended {_LONELY:g} s ago with exit code 0, rank(s) {list(running)} still run; if those "
                "wait for them in a collective, they wait for ever"
            )
            self._first_end = -1


def print_note(text: str) -> None:
    """Print a line of the launcher itself on standard error."""
    print(f"axonml-jax launch: {text}", file=sys.stderr, flush=True)
