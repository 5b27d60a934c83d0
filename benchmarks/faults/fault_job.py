"""A small training under `axonml-jax launch`, run again and again in one folder: what the fault campaign breaks."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "workers" / "fault_rank.py"
TIME_LIMIT = 300
DISK = "4m"
"""Size of the small disk: some checkpoints of the training, no more."""


class Skipped(Exception):
    """Why a fault cannot be tried on this machine."""


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder that is a file system of its own with little room (Linux, root).

    Raises:
      Skipped: where it cannot be had.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise Skipped(f"no small file system here: {made.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def root_only() -> Iterator[Path]:
    """A folder whose file system may be mounted again, for reading only.

    Raises:
      Skipped: where that needs more rights.
    """
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, text=True, check=False)
        if mounted.returncode:
            raise Skipped(f"nothing can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--recursive", folder], check=True)


class Job:
    """Launches of one training in one folder.

    Args:
      folder: of the run.
      axis: its plan, as `tests/workers/fault_rank.py` names them.
      world: processes.
    """

    def __init__(self, folder: Path, axis: str, world: int = 2):
        self.folder, self.world, self.said = folder, world, ""
        self.status: int | None = None
        self.wanted: tuple[str, str] | None = None
        unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI", "FAULT_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        own = {"FAULT_AXIS": axis, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick, "PYTHONPATH": str(ROOT)}
        self.environ = kept | own

    def launch(self, *fault, restarts=1, flags=(), meanwhile: Callable | None = None) -> int:
        """Run to the end; what was said is kept. `meanwhile(process, lines so far)` sees every line as it comes."""
        launch = [
            sys.executable,
            "-m",
            "axonml_jax",
            "launch",
            f"--nproc-per-node={self.world}",
            f"--max-restarts={restarts}",
        ]
        command = [*launch, *flags, str(WORKER), str(self.folder), *map(str, fault)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": self.environ}
        process, start = subprocess.Popen(command, **pipes), time.monotonic()
        assert process.stdout is not None
        limit = threading.Timer(TIME_LIMIT, process.terminate)
        limit.start()
        try:
            for line in process.stdout:
                self.said += line
                if meanwhile:
                    meanwhile(process, self.said)
            if time.monotonic() > start + TIME_LIMIT:
                raise TimeoutError(f"over {TIME_LIMIT} s")
            self.status = process.wait(60)
            return self.status
        finally:
            limit.cancel()
            process.kill()
            process.wait()
            process.stdout.close()

    def beside(self, *command) -> subprocess.Popen:
        """Another process that knows the folder, with the job's variables."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": self.environ}
        return subprocess.Popen([sys.executable, *map(str, command)], **pipes)

    def settle(self, seconds: float = 20) -> None:
        """Wait until no process of the job is left.

        Raises:
          TimeoutError: naming those that are.
        """
        deadline = time.monotonic() + seconds
        while left := self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{left} still run after {seconds:g} s")
            time.sleep(0.1)

    @property
    def digests(self) -> list[str]:
        """Of the final states that rank 0 has printed."""
        return re.findall(r"\bdigest=(\w+)", self.said)

    @property
    def undisturbed(self) -> tuple[str, str]:
        """Digest and records of the training to which nothing happened, where FAULT_UNDISTURBED asked for one."""
        return re.findall(r"undisturbed=(\w+)", self.said)[-1], (self.folder / "undisturbed.jsonl").read_text()

    @property
    def losses(self) -> str:
        """All records."""
        return (self.folder / "metrics.jsonl").read_text()

    def leftovers(self) -> list[str]:
        """Processes, unfinished checkpoints and owners' records that should not be there."""
        left = (".saving", ".replaced", "owner.json")
        found = [p.name for p in (self.folder / "checkpoints").glob("*") if p.name.endswith(left)]
        return found + self.processes()

    def processes(self) -> list[str]:
        """All that have the folder in their command."""
        found = []
        for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
            with contextlib.suppress(OSError, ValueError):
                if int(entry.name) != os.getpid() and str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(f"process {entry.name}")
        return found
