"""The faults of `fault_campaign.py`: how each is made to happen, what must be said of it, and what a run must come to."""

import random
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from fault_job import TIME_LIMIT, WORKER, Job

STEPS, EVERY = 12, 3
KILLED = r"rank {rank} failed first: signal 9 \(SIGKILL\)"
ASLEEP = (
    r"(rank\(s\) \[{rank}\] are missing: rank {rank} has begun step \d+ only and"
    r"|all ranks have begun the same step, .*rank {rank}) is in before at fault_rank"  # the others are within the step's call
)
ON_ONE_RANK = {
    "kill": KILLED,
    "kill-in-save": KILLED,
    "kill-before-commit": KILLED,
    "kill-at-commit": KILLED,
    "kill-in-rotation": KILLED,
    "no-space-at-commit": r"rank (0 failed first(.|\n)*|\d failed first(.|\n)*on process 0: .*)No space left on device",
    "file-too-large": r"rank ({rank} failed first(.|\n)*|\d failed first(.|\n)*on process {rank}: .*)File too large",
    "raise": r"rank {rank} failed first: exit code 1(.|\n)*ValueError: a fault was asked for",
    "out-of-memory": r"rank {rank} failed first: exit code 1(.|\n)*MemoryError",
    "sleep": ASLEEP,
    "stop": r"rank\(s\) \[{rank}\] are missing",
    "worker-exit": r"rank {rank} failed first: exit code 1(.|\n)*a worker of the loader ended with status 0",
    "exit": r"rank\(s\) \[{rank}\] are missing: rank {rank} says nothing any more|rank\(s\) \[{rank}\] had ended",
}
"""What the launcher, or another rank, must say of a fault after which the launcher starts all processes again."""
GOES_ON = {
    "slow": ASLEEP + r"(.|\n)*goes on after \d+ s without progress",
    "stop-and-continue": r"rank\(s\) \[{rank}\] are missing(.|\n)*goes on after \d+ s without progress",
    "clock-forward": "start=0\n",
    "clock-back": "start=0\n",
}
"""What must be said where the run goes on as if nothing had been."""
IN_THE_MAIN_PROCESS = (
    "kill-before-commit", "kill-at-commit", "kill-in-rotation", "no-space-at-commit", "file-too-large",
)  # fmt: skip
OF_THE_DISK = {
    "disk-full": "No space left on device",
    "read-only": "Read-only file system",
    "file-too-large": "File too large",
}
AT_A_SAVE = (
    "kill-in-save", "disk-full", "disk-full-passes", "read-only", "read-only-passes", "file-too-large-passes",
    "kill-in-odd-folder", *IN_THE_MAIN_PROCESS,
)  # fmt: skip
OTHERS = (
    "disk-full", "disk-full-passes", "read-only", "read-only-passes", "file-too-large-passes", "interrupt-launcher",
    "terminate-launcher", "kill-launcher", "terminate-rank", "flip", "truncate", "empty", "other-configuration",
    "kill-with-memory", "kill-in-copy", "port", "world-size", "master", "two-jobs", "reader",
    "kill-in-odd-folder", "other-values",
)  # fmt: skip
KINDS = (*ON_ONE_RANK, *GOES_ON, *OTHERS)


@dataclass(frozen=True)
class Fault:
    """What happens to whom and when, in a training of so many processes under a plan."""

    kind: str
    rank: int
    step: int
    axis: str
    world: int = 2

    def __str__(self):
        return f"{self.kind} rank {self.rank} step {self.step} ({self.axis}, {self.world} processes)"


def suffer(fault: Fault, job: Job) -> str:
    """Make it happen, and go on until the training has ended.

    Returns:
      A pattern that what was said must contain.
    """
    if fault.kind in ON_ONE_RANK:
        job.launch(fault.kind, fault.rank, fault.step)
        return ON_ONE_RANK[fault.kind].format(rank=fault.rank)
    if fault.kind in GOES_ON:
        job.environ["FAULT_STEP_SECONDS"] = "0.4"  # so that there is time to say that it goes on
        _unharmed(job.launch(fault.kind, fault.rank, fault.step, restarts=0))
        return GOES_ON[fault.kind].format(rank=fault.rank)
    return FAMILIES.get(fault.kind, refused)(fault, job)


def _unharmed(status: int) -> None:
    if status:
        raise OSError(f"it ended with status {status}")


def at_a_disk(fault: Fault, job: Job) -> str:
    """The disk takes nothing at a save: the run ends, and goes on when it does again."""
    job.launch(fault.kind, fault.rank, fault.step, restarts=0)
    (job.folder / "filler").unlink(missing_ok=True)
    if fault.kind == "read-only":
        subprocess.run(["umount", job.folder / "checkpoints"], check=True)
    job.launch()
    return rf"rank \d failed first: exit code 1(.|\n)*saving .* failed: (.|\n)*{OF_THE_DISK[fault.kind]}"


def passing(fault: Fault, job: Job) -> str:
    """A save fails on such a disk, or in one process alone, and the run goes on: the next one is good, nothing is restarted."""
    cause = OF_THE_DISK[fault.kind.removesuffix("-passes")]
    if fault.kind == "file-too-large-passes":
        # Process 0, which says it, may have met it itself.
        cause = rf"(on process {fault.rank}: .*{'|' * (fault.rank == 0)}){cause}"
    _unharmed(job.launch(fault.kind, fault.rank, fault.step, restarts=0))
    return rf"saving .*step_{fault.step:08d} failed: (.|\n)*{cause}(.|\n)*The run goes on(.|\n)*saved again, after 1"


def slowly(job: Job, **options) -> int:
    """A launch of which each step takes half a second at least, so that what it prints is read before it is over."""
    job.environ["FAULT_STEP_SECONDS"] = "0.5"
    try:
        return job.launch(**options)
    finally:
        del job.environ["FAULT_STEP_SECONDS"]


def terminate(fault: Fault, job: Job) -> str:
    """A signal to the launcher, or SIGTERM to one rank: the run saves and stops, or ends at once, and goes on from there."""
    if fault.kind == "terminate-rank":
        job.launch("terminate", fault.rank, fault.step)
        return (
            r"SIGTERM caught(.|\n)*(terminated=\d+(.|\n)*start=[1-9]|digest=)"  # the agreed step may be after the last
        )
    name = {"interrupt-launcher": "SIGINT", "terminate-launcher": "SIGTERM", "kill-launcher": "SIGKILL"}[fault.kind]
    sent = []

    def once(process, said):
        if "start=0" in said and not sent:
            sent.append(process.send_signal(signal.Signals[name]))

    slowly(job, meanwhile=once)
    job.settle()  # a killed launcher's guard ends the ranks
    job.launch()
    return "start=0(.|\n)*digest=" if name == "SIGKILL" else rf"(terminated=\d+(.|\n)*)?stopped by {name}(.|\n)*digest="


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
        return rf"optim\.learning_rate is .*0\.02 in process\(es\) \[{fault.rank}\]"
    if fault.kind == "other-values":
        job.launch(fault.kind, fault.rank, 0)
        return rf"first values of layers/0/kernel is (.|\n)*(checksum\) in process\(es\) \[{fault.rank}\])"
    if fault.kind == "port":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            job.launch(flags=[f"--master-port={port}"])
        job.launch()
        return rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = str(fault.world + 1) if fault.kind == "world-size" else str(fault.world)
    rank = "0" if fault.kind == "world-size" else "1"
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank}
    job.environ |= alone | {"FAULT_INIT_TIMEOUT": "5"}
    one = job.beside(WORKER, job.folder)
    job.said += one.communicate(timeout=TIME_LIMIT)[0]
    for name in (*alone, "FAULT_INIT_TIMEOUT"):
        del job.environ[name]
    job.launch()
    missing = ", ".join(map(str, range(1, fault.world + 1))) if fault.kind == "world-size" else "0"
    return rf"process\(es\) \[{missing}\] never arrived within 5 s"


def from_memory(fault: Fault, job: Job) -> str:
    """The state is copied to memory after every step: the restarted run goes on from a step that no checkpoint has."""
    job.environ |= {"FAULT_MEMORY": "1", "FAULT_STEP_SECONDS": "0.1"}  # so that copies are made at every step
    job.launch(fault.kind.replace("-with-memory", ""), fault.rank, 3 * (fault.step // 3) + 3)
    del job.environ["FAULT_MEMORY"]
    restored = (
        r"(state of step \d+ sent|start=(?!(0|3|6|9|12)\n)\d+)"  # a replica may have the copy of a step on disk too
    )
    return rf"rank {fault.rank} failed first: signal 9 \(SIGKILL\)(.|\n)*{restored}"


def two_jobs(fault: Fault, job: Job) -> str:
    """A second job in the folder is refused and told of the first, which goes on unharmed."""
    other = Job(job.folder, fault.axis, fault.world)

    def once(process, said):
        if "start=0" in said and not other.said:
            if not other.launch(restarts=0):
                raise OSError("the second job ended well")
            (job.folder / "go").touch()

    job.environ["FAULT_HOLD"] = "1"
    _unharmed(job.launch(meanwhile=once))
    job.said += other.said
    return r"checkpoints is being written by process \d+(.|\n)*only one process may write there at a time"


def reader(fault: Fault, job: Job) -> str:
    """Another process reads what is newest again and again: what it reads is whole, and the writer does not notice."""
    job.environ["FAULT_HOLD"] = "1"
    reading = job.beside(WORKER, job.folder, "READ")
    try:
        slowly(job)
        end = time.monotonic() + TIME_LIMIT
        said = reading.communicate(timeout=max(1, end - time.monotonic()))[0]
    finally:
        reading.kill()
        reading.wait()
    if reading.returncode or not (read := re.findall(r"read=(\d+) (\w+)", said)):
        raise OSError(f"the reader ended with status {reading.returncode}: {said[-2000:]}")
    job.said += said
    return rf"read={read[-1][0]} {job.digests[-1]}" if job.digests else "a digest"


def odd_folder(fault: Fault, job: Job) -> str:
    """The folder's path has what Orbax globs and TensorStore reads as a slash: the run goes on from what was saved there."""
    job.folder = job.folder / "[run] *?" / "a\\b"
    job.folder.mkdir(parents=True)
    job.launch("kill-in-save", fault.rank, fault.step)
    if aside := sorted(path.name for path in (job.folder / "checkpoints").glob("*.damaged")):
        raise OSError(f"{', '.join(aside)} were whole")
    return KILLED.format(rank=fault.rank) + r"(.|\n)*start=[1-9]"


FAMILIES = {
    "kill-in-odd-folder": odd_folder,
    **dict.fromkeys(("kill-with-memory", "kill-in-copy"), from_memory),
    **dict.fromkeys(("disk-full", "read-only"), at_a_disk),
    **dict.fromkeys(("disk-full-passes", "read-only-passes", "file-too-large-passes"), passing),
    **dict.fromkeys(("interrupt-launcher", "terminate-launcher", "kill-launcher", "terminate-rank"), terminate),
    **dict.fromkeys(("flip", "truncate", "empty"), damage),
    "two-jobs": two_jobs,
    "reader": reader,
}
