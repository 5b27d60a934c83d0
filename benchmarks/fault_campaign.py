"""A seeded campaign of faults against real processes: nothing is lost, nothing is left behind, every message names the cause.

    python benchmarks/fault_campaign.py --faults 54 --seed 0 [--only kill sleep] [--jobs 2] [--stuck-after 12]

Every fault hits a small training of two processes under `axonml-jax launch`; the run is restarted by the launcher or, where
that was stopped too, started again by hand, and must end bit for bit like a run that nothing happened to. Prints a line per
fault and the table of docs/reliability.md; the exit status is the number of faults that were not survived. What cannot be tried
here (a full disk needs root, for a small file system of its own) is skipped with the reason.
"""

import argparse
import collections
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_job import TIME_LIMIT, WORKER, Job, Skipped, small_disk

STEPS, EVERY = 12, 3
ON_ONE_RANK = {
    "kill": r"rank {rank} failed first: signal 9 \(SIGKILL\)",
    "kill-in-save": r"rank {rank} failed first: signal 9 \(SIGKILL\)",
    "kill-before-commit": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "kill-at-commit": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "kill-in-rotation": r"rank 0 failed first: signal 9 \(SIGKILL\)",
    "no-space-at-commit": r"rank (0 failed first(.|\n)*|\d failed first(.|\n)*on process 0: .*)No space left on device",
    "file-too-large": r"rank ({rank} failed first(.|\n)*|\d failed first(.|\n)*on process {rank}: .*)File too large",
    "raise": r"rank {rank} failed first: exit code 1(.|\n)*ValueError: a fault was asked for",
    "sleep": r"rank\(s\) \[{rank}\] are missing: rank {rank} has begun step \d+ only and is in before at fault_rank",
    "stop": r"rank\(s\) \[{rank}\] are missing",
    "exit": r"rank\(s\) \[{rank}\] are missing: rank {rank} says nothing any more|rank\(s\) \[{rank}\] had ended",
}
IN_THE_MAIN_PROCESS = (
    "kill-before-commit", "kill-at-commit", "kill-in-rotation", "no-space-at-commit", "file-too-large",
)  # fmt: skip
AT_A_SAVE = ("kill-in-save", "disk-full", "disk-full-passes", "file-too-large-passes", *IN_THE_MAIN_PROCESS)
OTHERS = (
    "disk-full",
    "disk-full-passes",
    "file-too-large-passes",
    "interrupt-launcher",
    "terminate-launcher",
    "terminate-rank",
    "flip",
    "truncate",
    "empty",
    "other-configuration",
    "kill-with-memory",
    "kill-in-copy",
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


def suffer(fault: Fault, job: Job) -> str:
    """Make it happen, and go on until the training has ended.

    Returns:
      A pattern that what was said must contain.
    """
    if fault.kind in ON_ONE_RANK:
        job.launch(fault.kind, fault.rank, fault.step)
        return ON_ONE_RANK[fault.kind].format(rank=fault.rank)
    return FAMILIES.get(fault.kind, refused)(fault, job)


def full(fault: Fault, job: Job) -> str:
    """The disk is full at a save: the run ends, and goes on when there is room again."""
    job.launch("disk-full", fault.rank, fault.step, restarts=0)
    (job.folder / "filler").unlink()
    job.launch()
    return r"rank \d failed first: exit code 1(.|\n)*saving .* failed: (.|\n)*No space left on device"


def passing(fault: Fault, job: Job) -> str:
    """A save fails on a full disk, or in one process alone, and the run goes on: the next one is good, nothing is restarted."""
    cause = (
        "No space left on device" if fault.kind == "disk-full-passes" else rf"on process {fault.rank}: .*File too large"
    )
    if status := job.launch(fault.kind, fault.rank, fault.step, restarts=0):
        raise OSError(f"it ended with status {status}")
    return rf"saving .*step_{fault.step:08d} failed: (.|\n)*{cause}(.|\n)*The run goes on(.|\n)*saved again, after 1"


def terminate(fault: Fault, job: Job) -> str:
    """SIGTERM or Ctrl-C to the launcher, or SIGTERM to one rank: the run saves and stops, and goes on when started again."""
    if fault.kind == "terminate-rank":
        job.launch("terminate", fault.rank, fault.step)
        return (
            r"SIGTERM caught(.|\n)*(terminated=\d+(.|\n)*start=[1-9]|digest=)"  # the agreed step may be after the last
        )
    number, sent = signal.SIGINT if fault.kind == "interrupt-launcher" else signal.SIGTERM, []
    job.environ["FAULT_STEP_SECONDS"] = "0.5"  # or twelve steps may be over before what they print is read

    def once(process, said):
        if "start=0" in said and not sent:
            sent.append(process.send_signal(number))

    job.launch(meanwhile=once)
    del job.environ["FAULT_STEP_SECONDS"]
    job.launch()
    return rf"(terminated=\d+(.|\n)*)?stopped by {number.name}(.|\n)*digest="


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


def from_memory(fault: Fault, job: Job) -> str:
    """The state is copied to memory after every step: the restarted run goes on from a step that no checkpoint has."""
    job.environ |= {"FAULT_MEMORY": "1", "FAULT_STEP_SECONDS": "0.1"}  # so that copies are made at every step
    job.launch(fault.kind.replace("-with-memory", ""), fault.rank, 3 * (fault.step // 3) + 3)
    del job.environ["FAULT_MEMORY"]
    return rf"rank {fault.rank} failed first: signal 9 \(SIGKILL\)(.|\n)*start=(?!(0|3|6|9|12)\n)\d+"


FAMILIES = {
    **dict.fromkeys(("kill-with-memory", "kill-in-copy"), from_memory),
    "disk-full": full,
    **dict.fromkeys(("disk-full-passes", "file-too-large-passes"), passing),
    **dict.fromkeys(("interrupt-launcher", "terminate-launcher", "terminate-rank"), terminate),
    **dict.fromkeys(("flip", "truncate", "empty"), damage),
}


def survive(fault: Fault, wanted: tuple[str, str] | None = None, **environ: str) -> tuple[list[str], float, str]:
    """What went wrong, if anything, after how many seconds, and what was said.

    Args:
      fault: what happens.
      wanted: digest and records of an undisturbed run; None: of one that the last processes make themselves.
      environ: more variables of the training.

    Raises:
      Skipped: when the fault cannot be tried here.
    """
    start = time.monotonic()
    with small_disk() if fault.kind.startswith("disk-full") else tempfile.TemporaryDirectory() as folder:
        job, problems = Job(Path(folder), fault.axis), []
        job.environ |= environ | ({} if wanted else {"FAULT_UNDISTURBED": "1"})
        try:
            pattern = suffer(fault, job)
            wanted = wanted or job.undisturbed
            if not re.search(pattern, job.said):
                problems.append(f"no message like {pattern}")
            if job.digests[-1:] != [wanted[0]]:
                problems.append(f"it ended with {job.digests or 'nothing'} instead of {wanted[0]}")
            elif job.losses != wanted[1]:
                problems.append("its records have a gap, a double or another loss")
            problems += job.leftovers()
        except (TimeoutError, subprocess.TimeoutExpired, OSError, IndexError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return problems, time.monotonic() - start, job.said


def undisturbed(axis: str) -> tuple[str, str]:
    """Digest and records of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), axis)
        status = job.launch()
        assert status == 0, job.said
        return job.digests[0], job.losses


def report(number: int, fault: Fault, wanted: dict[str, tuple[str, str]], stuck_after: str) -> bool | None:
    """Try one fault and print what came of it: whether it was survived; None: it could not be tried."""
    try:
        problems, seconds, said = survive(fault, wanted[fault.axis], FAULT_STUCK_AFTER=stuck_after)
    except Skipped as reason:
        print(f"{number:3} {fault}: skipped: {reason}", flush=True)
        return None
    lines = [f"{number:3} {fault}: {'; '.join(problems) or 'survived'} ({seconds:.0f} s)"]
    lines += [f"      {line}" for line in said.splitlines()[-40:]] if problems else []
    print("\n".join(lines), flush=True)
    return not problems


def main() -> int:
    """Run a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=54)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("--stuck-after", default="12", help="seconds without progress; more on a busy machine")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    faults, start = draw(options.faults, options.seed, options.only), time.monotonic()
    wanted = {axis: undisturbed(axis) for axis in sorted({fault.axis for fault in faults})}
    with ThreadPoolExecutor(options.jobs) as pool:
        attempt = partial(report, wanted=wanted, stuck_after=options.stuck_after)
        outcomes = list(pool.map(attempt, range(1, len(faults) + 1), faults))
    tried = collections.Counter(f.kind for f, outcome in zip(faults, outcomes, strict=True) if outcome is not None)
    survived = collections.Counter(f.kind for f, outcome in zip(faults, outcomes, strict=True) if outcome)
    print("\n| Fault | tried | survived |\n| --- | --- | --- |")
    print("\n".join(f"| {kind} | {count} | {survived[kind]} |" for kind, count in tried.items()))
    print(f"| all | {tried.total()} | {survived.total()} |\n\nin {time.monotonic() - start:.0f} s")
    return tried.total() - survived.total()


if __name__ == "__main__":
    sys.exit(main())
