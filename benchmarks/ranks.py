"""Start one process per rank with torchrun's launch variables, and read what rank 0 says.

Imported by the other benchmarks. `axonml_jax.init()` and `torch.distributed` both read these variables.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from turn import READY, TURNS

TIMEOUT = 900


def run_ranks(command: Sequence[str], ranks: int, *, cores: Sequence[int] | None = None, **variables: str) -> Any:
    """Run `command` once per rank; the last line that rank 0 prints, read as JSON.

    Args:
      command: the program and its arguments, alike on all ranks.
      ranks: number of processes.
      cores: pins rank r to `cores[r]`; None leaves placing to the system.
      **variables: environment variables to add.

    Raises:
      RuntimeError: when a rank fails or takes too long; quotes the end of what it printed. All ranks are stopped.
    """
    workers = _start(command, ranks, cores, variables)
    try:
        outputs = _wait(workers)
    finally:
        _stop(workers)
    return json.loads(outputs[0].strip().splitlines()[-1])


def run_in_turns(sides: Mapping[str, Callable[[], "Ranks"]], steps: int, seed: int = 0) -> dict[str, Any]:
    """What rank 0 of every side says at its end; of the sides, which are all started first, one makes a step at a time.

    A round is a step of each, in an order drawn anew, so that what the machine does meanwhile falls on all.
    """
    rng, running = np.random.default_rng(seed), {}
    try:
        for name, start in sides.items():  # one compiles and warms up at a time
            running[name] = start()
            running[name].wait()
        for _ in range(steps):
            for name in rng.permutation(list(running)):
                running[name].step()
        return {name: each.said() for name, each in running.items()}
    finally:
        for each in running.values():
            _stop(each.workers)


class Ranks:
    """Processes, one per rank, that wait for a line before every timed step (see `wait_for_turn`).

    Args:
      command, ranks, cores, variables: as of `run_ranks`.
    """

    def __init__(self, command: Sequence[str], ranks: int, *, cores: Sequence[int] | None = None, **variables: str):
        self.workers = _start(command, ranks, cores, variables | {TURNS: "1"})
        self._lines: list[str] = []

    def wait(self) -> None:
        """Until all are about to make their next step, or have ended.

        Raises:
          RuntimeError: when a rank failed; quotes the end of what it printed.
        """
        for rank, worker in enumerate(self.workers):
            lines = []
            while (line := worker.stdout.readline()) and line != READY:
                lines.append(line)
            if not line and worker.wait():
                raise RuntimeError(f"rank {rank} ended with {worker.returncode}:\n{''.join(lines)[-3000:]}")
            self._lines += lines if rank == 0 else []

    def step(self) -> None:
        """All make one step."""
        for worker in self.workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        self.wait()

    def said(self) -> Any:
        """The last line of rank 0, as JSON, once all have ended."""
        outputs = _wait(self.workers)
        return json.loads([*self._lines, *outputs[0].splitlines()][-1])


def _start(command: Sequence[str], ranks: int, cores: Sequence[int] | None, variables: Mapping[str, str]) -> list:
    common = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common["WORLD_SIZE"] = str(ranks)
    return [
        subprocess.Popen(
            [*(("taskset", "-c", str(cores[rank])) if cores else ()), *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdin=subprocess.PIPE if TURNS in variables else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]


def _stop(workers) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _wait(workers) -> list[str]:
    outputs, deadline = [], time.monotonic() + TIMEOUT
    for rank, worker in enumerate(workers):
        try:
            outputs.append(worker.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"rank {rank} is not done after {TIMEOUT} s") from error
        if worker.returncode:
            raise RuntimeError(f"rank {rank} ended with {worker.returncode}:\n{outputs[-1][-3000:]}")
    return outputs


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
