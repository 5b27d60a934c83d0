"""`axonml-jax launch`: starts the processes of a job, watches and restarts them."""

import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from axonml_jax.base import CLOSED_PIPE
from axonml_jax.config.config import ConfigError, Machines
from axonml_jax.launch.leftovers import MARK, Guard
from axonml_jax.launch.machines import Nodes, Over, Start, Stopped, changes
from axonml_jax.launch.options import ATTEMPT_PORTS, LaunchOptions, read_options, streams_of
from axonml_jax.launch.standby import HostMemory, Spares, can_outlive
from axonml_jax.launch.workers import (
    Attempt,
    Ended,
    Interrupts,
    Supervisor,
    Worker,
    count_workers,
    print_note,
    report,
    started,
    worker_environment,
)

_SHOWN = 8

# What a process prints that has waited in vain for another, as one that had ended well.
_WAITING = re.compile(
    r"[Tt]imed out|DEADLINE_EXCEEDED|coordination service|CoordinationService|closed by peer|"
    r"are missing|Socket closed|did not come to|did not call it within|ended or were lost"
)


def launch(argv: Sequence[str]) -> int:
    """Run a job; returns its exit status.

    Args:
      argv: torchrun's flags, the script or module, and its arguments.

    Returns:
      0 when every process ended with 0; the exit status of the one that failed first (128 plus the number for a signal);
      or 128 plus the number of the signal that stopped the launcher.

    Raises:
      ConfigError: for flags that cannot work, before anything is started.
    """
    options = read_options(argv, os.environ)
    local_size, gpus = count_workers(options.nproc_per_node, os.environ)
    _check_port(options)
    logs = _log_folder(options)
    with Interrupts() as interrupts:
        try:
            with Nodes(options, local_size, interrupts) as nodes, ExitStack() as stack:
                memory = None
                if (options.max_restarts or options.elastic) and can_outlive():
                    memory = stack.enter_context(HostMemory([local_size] * (1 + options.elastic), 0))
                with _Job(options, local_size, gpus, interrupts, nodes, logs, memory) as job:
                    return job.run()
        except Stopped:
            print_note(f"stopped by {interrupts.received[0].name} while waiting for the other machines' launchers")
            return 128 + interrupts.received[0]
        except BrokenPipeError:  # the reader of our output has gone, as after `| head`; the workers are stopped already
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE


class _Job:
    """The attempts of one launch, as this machine's launcher makes them."""

    def __init__(
        self,
        options: LaunchOptions,
        local_size: int,
        gpus: tuple[str, ...],
        interrupts: Interrupts,
        nodes: Nodes,
        logs: Path | None,
        memory: HostMemory | None,
    ):
        self._options = options
        self._gpus = gpus
        self._interrupts = interrupts
        self._nodes = nodes
        self._run_id = uuid.uuid4().hex
        self._logs = logs
        self._memory = memory
        self._start: Start | None = None
        self._latest: Attempt | None = None
        self._spares: Spares | None = None
        if options.standby is not None:
            program = (options.module, options.target, options.arguments)
            self._spares = Spares(local_size, program, self._spare, options.standby)

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *exception):
        if self._spares is not None:
            self._spares.__exit__()

    def run(self) -> int:
        """Make attempts until one ends well, a signal comes, or no restart is left."""
        failures, number = 0, 0
        while True:
            try:
                start = self._nodes.start(number, self._port(number))
            except Over as over:
                print_note(str(over))
                return self._over(over.status)
            ended = self._attempt(start, failures)
            if ended.received:
                self._nodes.leave(
                    f"the launcher of node {self._options.node_rank} was stopped by {ended.received.name}"
                )
                print_note(f"stopped by {ended.received.name}; {_stopped(ended)}")
                return 128 + ended.received
            if ended.failure is None and not ended.elsewhere:
                return self._over(0)
            status = self._explain(ended)
            if self._nodes.finished_well:
                print_note("all processes of all machines have ended with exit code 0, which is not started again")
                return self._over(0)
            changed = self._nodes.send_away() or self._nodes.changed
            if self._nodes.lost or (not changed and self._nodes.decides and failures == self._options.max_restarts):
                return self._over(status)
            if not changed:
                failures += 1
            if not changed and self._nodes.decides:
                print_note(f"restart {failures} of {self._options.max_restarts}")
            number = start.number + 1

    def _over(self, status: int) -> int:
        self._nodes.over(status)
        return status

    def _explain(self, ended: Ended) -> int:
        """Print why an attempt ended on all machines; returns the exit status for it."""
        if ended.stopped:
            print_note(_stopped(ended))
        cause = self._nodes.verdict(ended.failure, ended.well)
        if self._nodes.changed:
            return 1
        if cause and ended.early and _WAITING.search("\n".join(cause.lines)):
            print_note(
                f"rank(s) {list(ended.early)} had ended with exit code 0 before, and others were still at work with them: "
                "most likely that is the cause of what follows"
            )
        if cause:
            print_note(report(cause))
        if self._nodes.lost or not cause:
            print_note(self._nodes.lost or "another machine's workers failed")
        if ended.records:
            more = f" and {len(ended.records) - _SHOWN} more" if len(ended.records) > _SHOWN else ""
            print_note(f"flight records of this machine's ranks: {', '.join(ended.records[:_SHOWN])}{more}")
        return cause.exit_status if cause else 1

    def _attempt(self, start: Start, failures: int) -> Ended:
        """Start all workers of this machine, and watch them to the end."""
        options, sizes, place = self._options, start.sizes, start.nodes.index(self._options.node_rank)
        if options.elastic:
            self._tell_of_machines(start)
        if self._spares is not None:
            self._spares.hold()  # its thread reads the files that are arranged anew
        if self._memory is not None and self._memory.arrange(sizes, place, keep=self._belongs(start)) and self._spares:
            self._spares.dismiss()  # they do not have the new files
        self._start = start
        attempt = Attempt(
            address=options.master_addr,
            port=start.port,
            world_size=sum(sizes),
            first_rank=sum(sizes[:place]),
            local_size=sizes[place],
            node_rank=place,
            num_nodes=len(sizes),
            restarts=start.number,
            max_restarts=options.max_restarts,
            run_id=self._run_id,
            machines=Machines(options.min_nodes, options.nnodes, options.node_unit) if options.elastic else None,
        )
        self._latest, others = attempt, self._nodes if options.nnodes > 1 else None
        workers: list[Worker] = []
        again = options.elastic or failures < options.max_restarts
        supervisor = Supervisor(workers, self._interrupts, self._run_id, options.shutdown_timeout, others, again)
        with Guard(self._run_id) as guard, supervisor:
            for local_rank in range(sizes[place]):
                workers.append(self._worker(attempt, local_rank))
                guard.watch(workers[-1].pid)
            if self._spares is not None and again:
                self._spares.prepare()
            return supervisor.watch()

    def _belongs(self, start: Start) -> bool:
        """Whether this machine took part in the previous attempt, so that the copies in its memory are of this training."""
        return self._start is not None and self._start.number == start.number - 1

    def _tell_of_machines(self, start: Start) -> None:
        before = () if self._start is None else self._start.nodes
        how = f", {changes(before, start.nodes)}" if before else ""
        nodes, workers = ", ".join(map(str, start.nodes)), sum(start.sizes)
        print_note(f"attempt {start.number} runs on node(s) {nodes} with {workers} process(es){how}")

    def _worker(self, attempt: Attempt, local_rank: int) -> Worker:
        rank = attempt.first_rank + local_rank
        handed = None if self._memory is None else self._memory.of(local_rank)
        return Worker(
            rank,
            self._options.command,
            worker_environment(os.environ, attempt, local_rank, self._gpus, handed),
            tee=streams_of(self._options.tee, local_rank),
            quiet=streams_of(self._options.redirects, local_rank),
            logs=self._logs and self._logs / f"attempt_{attempt.restarts}" / str(rank),
            files=() if handed is None else handed.all,
            spare=self._spares and self._spares.take(local_rank),
        )

    def _spare(self, local_rank: int, command: Sequence[str]) -> subprocess.Popen:
        """Start a standby process with a worker's variables, without the mark by which failed attempts' processes are ended."""
        assert self._latest is not None
        handed = None if self._memory is None else self._memory.of(local_rank)
        environ = worker_environment(os.environ, self._latest, local_rank, self._gpus, handed)
        del environ[MARK]
        return started(command, environ, () if handed is None else handed.all, subprocess.PIPE)

    def _port(self, number: int) -> int:
        # A port that a dead attempt has used may still be held by its last packets.
        given = self._options.master_port
        if self._options.nnodes > 1:
            assert given is not None
            return given + 1 + number % ATTEMPT_PORTS
        return given if given is not None and not number else free_port()


def free_port() -> int:
    """A port of the loopback interface that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _check_port(options: LaunchOptions) -> None:
    """Refuse a port that is in use, before the workers find out one by one."""
    if options.master_port is None or options.nnodes > 1:
        return
    host = options.master_addr.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, options.master_port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"launch: cannot listen on {options.master_addr}:{options.master_port}: {error.strerror}; choose another "
            "--master-port, or leave it out to have a free one picked; --master-addr must be an address of this machine"
        ) from error


def _log_folder(options: LaunchOptions) -> Path | None:
    """Make a folder for this launch's logs, inside the given one."""
    if options.log_dir is None:
        if options.tee or options.redirects:
            raise ConfigError("launch: --tee and --redirects write files: say where with --log-dir DIR")
        return None
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-node{options.node_rank}-{os.getpid()}"
    folder = options.log_dir / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"launch: --log-dir {options.log_dir}: {error.strerror}") from error
    print_note(f"every process's output is kept under {folder}")
    return folder


def _stopped(ended: Ended) -> str:
    return f"rank(s) {', '.join(map(str, ended.stopped)) or 'none'} were stopped"
