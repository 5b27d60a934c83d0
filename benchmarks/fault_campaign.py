"""A seeded campaign of faults against real processes: nothing is lost, nothing is left behind, every message names the cause.

    python benchmarks/fault_campaign.py --faults 54 --seed 0 [--only kill sleep]

Every fault hits a small training of two processes under `axonml-jax launch`; the run is restarted by the launcher or, where
that was stopped too, started again by hand, and must end bit for bit like a run that nothing happened to. Prints a line per
fault and the table of docs/reliability.md; the exit status is the number of faults that were not survived.
"""

import argparse
import collections
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "workers" / "fault_rank.py"
STEPS, EVERY, TIME_LIMIT = 12, 3, 300
ON_ONE_RANK = {
    "kill": r"rank {rank} failed first: signal 9 \(SIGKILL\)",
    "kill-in-save": r"rank {rank} failed first: signal 9 \(SIGKILL\)",
    "kill-before-commit": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "kill-at-commit": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "kill-in-rotation": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "disk-full": r"rank \d failed first: exit code 1(.|\n)*saving .* failed: .*No space left on device",
    "raise": r"rank {rank} failed first: exit code 1(.|\n)*ValueError: a fault was asked for",
    "sleep": r"rank\(s\) \[{rank}\] are missing: rank {rank} has begun step \d+ only and is in before at fault_rank",
    "stop": r"rank\(s\) \[{rank}\] are missing",
    "exit": r"rank\(s\) \[{rank}\] are missing: rank {rank} says nothing any more|rank\(s\) \[{rank}\] had ended",
}
IN_THE_MAIN_PROCESS = ("kill-before-commit", "kill-at-commit", "kill-in-rotation", "disk-full")
AT_A_SAVE = ("kill-in-save", *IN_THE_MAIN_PROCESS)
OTHERS = (
    "terminate-launcher",
    "terminate-rank",
    "flip",
    "truncate",
    "empty",
    "other-configuration",
    "port",
    "world-size",
    "master",
)


@dataclass(frozen=True)
class Fault:
    """What happens to whom and when."""

    kind: str
    rank: int
    step: int
    axis: str

    def __str__(self):
        return f"{self.kind} rank {self.rank} step {self.step} ({self.axis})"


def draw(count: int, seed: int, only: list[str] | None = None) -> list[Fault]:
    """A campaign: every kind in turn, the rest by the seed."""
    numbers, kinds = random.Random(seed), only or [*ON_ONE_RANK, *OTHERS]
    faults = []
    for kind in (kinds[i % len(kinds)] for i in range(count)):
        late = 6 if kind == "terminate-rank" else STEPS
        step = numbers.choice(range(6, STEPS, EVERY)) if kind in AT_A_SAVE else numbers.randrange(2, late)
        rank = 0 if kind in IN_THE_MAIN_PROCESS else numbers.randrange(2)
        faults.append(Fault(kind, rank, step, numbers.choice(["data", "fsdp"])))
    return faults


class Job:
    """Launches of one training in one folder."""

    def __init__(self, folder: Path, axis: str):
        self.folder, self.said = folder, ""
        unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI", "FAULT_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        own = {"FAULT_AXIS": axis, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick, "PYTHONPATH": str(ROOT)}
        self.environ = kept | own

    def launch(self, *fault, restarts=1, flags=(), meanwhile: Callable | None = None) -> int:
        """Run to the end; what was said is kept. `meanwhile(process, lines so far)` sees every line as it comes."""
        command = [
            sys.executable,
            "-m",
            "axonml_jax",
            "launch",
            "--nproc-per-node=2",
            f"--max-restarts={restarts}",
            *flags,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": self.environ}
        process = subprocess.Popen([*command, str(WORKER), str(self.folder), *map(str, fault)], **pipes)
        deadline = time.monotonic() + TIME_LIMIT
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self.said += line
                if meanwhile:
                    meanwhile(process, self.said)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"over {TIME_LIMIT} s")
            return process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    @property
    def digests(self) -> list[str]:
        """Of the final states that rank 0 has printed."""
        return re.findall(r"digest=(\w+)", self.said)

    @property
    def losses(self) -> str:
        """All records."""
        return (self.folder / "metrics.jsonl").read_text()

    def leftovers(self) -> list[str]:
        """Processes and unfinished checkpoints that should not be there."""
        found = [p.name for p in (self.folder / "checkpoints").glob("*.saving")]
        found += [p.name for p in (self.folder / "checkpoints").glob("*.replaced")]
        for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
            with contextlib.suppress(OSError, ValueError):
                if int(entry.name) != os.getpid() and str(self.folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(f"process {entry.name}")
        return found


def suffer(fault: Fault, job: Job) -> str:
    """Make it happen, and go on until the training has ended.

    Returns:
      A pattern that what was said must contain.
    """
    if fault.kind in ON_ONE_RANK:
        job.launch(fault.kind, fault.rank, fault.step)
        return ON_ONE_RANK[fault.kind].format(rank=fault.rank)
    return {"terminate": terminate, "damage": damage, "refused": refused}[_family(fault.kind)](fault, job)


def _family(kind: str) -> str:
    return (
        "terminate"
        if kind.startswith("terminate")
        else "damage"
        if kind in ("flip", "truncate", "empty")
        else "refused"
    )


def terminate(fault: Fault, job: Job) -> str:
    """SIGTERM to the launcher or to one rank: the run saves and stops, and goes on when started again."""
    if fault.kind == "terminate-rank":
        job.launch("terminate", fault.rank, fault.step)
        return (
            r"SIGTERM caught(.|\n)*(terminated=\d+(.|\n)*start=[1-9]|digest=)"  # the agreed step may be after the last
        )
    sent = []

    def once(process, said):
        if "start=0" in said and not sent:
            sent.append(process.send_signal(signal.SIGTERM))

    job.launch(meanwhile=once)
    job.launch()
    return r"stopped by SIGTERM(.|\n)*digest="


def damage(fault: Fault, job: Job) -> str:
    """Files of the newest checkpoint change: it is passed over, and the run goes on from the one before."""
    job.launch("kill", fault.rank, STEPS, restarts=0)
    newest = sorted((job.folder / "checkpoints").glob("step_" + 8 * "[0-9]"))[-1]
    numbers = random.Random(f"{fault}")
    path = numbers.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 1))
    content = bytearray(path.read_bytes())
    if fault.kind == "flip":
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    path.write_bytes(content[: {"flip": None, "truncate": len(content) // 2, "empty": 0}[fault.kind]])
    job.launch()
    return rf"{newest.name} is damaged:\n.*{re.escape(path.name)}(.|\n)*falling back to the last good checkpoint"


def refused(fault: Fault, job: Job) -> str:
    """What cannot work is refused with its cause; started right, the training runs."""
    if fault.kind == "other-configuration":
        job.launch(fault.kind, fault.rank, 0)
        return r"optim.learning_rate is 0\.0\d in process\(es\) \[0\], 0\.0\d in process\(es\) \[1\]"
    if fault.kind == "port":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            job.launch(flags=[f"--master-port={port}"])
        job.launch()
        return rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = "3" if fault.kind == "world-size" else "2"
    rank = "0" if fault.kind == "world-size" else "1"
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
    one = subprocess.run(
        [sys.executable, str(WORKER), str(job.folder)],
        env=job.environ | alone | {"FAULT_INIT_TIMEOUT": "5"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    job.said += one.stdout + one.stderr
    job.launch()
    return r"process\(es\) \[1, 2\] never arrived within 5 s" if size == "3" else r"process\(es\) \[0\] never arrived"


def survive(fault: Fault, wanted: tuple[str, str]) -> tuple[list[str], float, str]:
    """What went wrong, if anything, after how many seconds, and what was said."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), fault.axis)
        problems = []
        try:
            pattern = suffer(fault, job)
            if not re.search(pattern, job.said):
                problems.append(f"no message like {pattern}")
            if job.digests[-1:] != [wanted[0]]:
                problems.append(f"it ended with {job.digests or 'nothing'} instead of {wanted[0]}")
            elif job.losses != wanted[1]:
                problems.append("its records have a gap, a double or another loss")
            problems += job.leftovers()
        except (TimeoutError, subprocess.TimeoutExpired, OSError) as error:
            problems.append(str(error))
        return problems, time.monotonic() - start, job.said


def undisturbed(axis: str) -> tuple[str, str]:
    """Digest and records of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), axis)
        status = job.launch()
        assert status == 0, job.said
        return job.digests[0], job.losses


def main() -> int:
    """Run a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=54)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    faults = draw(options.faults, options.seed, options.only)
    wanted = {axis: undisturbed(axis) for axis in sorted({fault.axis for fault in faults})}
    survived, tried, lost = collections.Counter(), collections.Counter(), 0
    for number, fault in enumerate(faults, 1):
        problems, seconds, said = survive(fault, wanted[fault.axis])
        tried[fault.kind] += 1
        survived[fault.kind] += not problems
        lost += bool(problems)
        print(f"{number:3} {fault}: {'; '.join(problems) or 'survived'} ({seconds:.0f} s)", flush=True)
        if problems:
            print("\n".join(f"      {line}" for line in said.splitlines()[-40:]), flush=True)
    print("\n| Fault | tried | survived |\n| --- | --- | --- |")
    print("\n".join(f"| {kind} | {count} | {survived[kind]} |" for kind, count in tried.items()))
    return lost


if __name__ == "__main__":
    sys.exit(main())
