"""Start one process per rank with torchrun's launch variables, and read what rank 0 says.

Imported by the other benchmarks. `axonml_jax.init()` and `torch.distributed` both read these variables.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

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
    common = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common["WORLD_SIZE"] = str(ranks)
    workers = [
        subprocess.Popen(
            [*(("taskset", "-c", str(cores[rank])) if cores else ()), *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = _wait(workers)
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    return json.loads(outputs[0].strip().splitlines()[-1])


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
