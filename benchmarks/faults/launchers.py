"""DDP, FSDP, tensor and pipeline training on real processes, started by every launcher, each held to one device.

    python benchmarks/faults/launchers.py [--processes 2 4] [--model transformer] [--only ours mpirun] [--torchrun PATH]
        [--install]

Every process has one CPU device (gloo). Losses, gradient norms and parameters after two updates by AdamW of a small model in
float64 must equal the single-device run to 1e-9 in every process, which must know its place and who started it. `--install`
fetches what is missing of Open MPI and Slurm from Debian (as root); Slurm is configured, started and stopped here.
A launcher that is not here is left out, with the reason. Prints the table of docs/reliability.md.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "workers" / "equal_rank.py"
sys.path.insert(0, str(WORKER.parent))

from hosts import ADDRESS, NoHosts, two_hosts
from slurm import one_node_slurm

KINDS = ("ddp", "fsdp", "tensor", "pipeline")
TIME_LIMIT, GRACE = 900, 20
PACKAGES = {"mpirun": "openmpi-bin", "srun": "slurm-wlm", "munged": "munge", "ip": "iproute2"}


class Missing(Exception):
    """Why a launcher cannot be tried here."""


@dataclass(frozen=True)
class Command:
    """One command of a job, and the variables it has beside this process's."""

    words: Sequence[str]
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launcher:
    """A way to start processes.

    Attributes:
      title: for the table.
      reads: whose variables `ax.init()` then finds.
      start: `start(number of processes, options)`, a context with the job's commands; raises `Missing`.
    """

    title: str
    reads: str
    start: Callable


def ours(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """`axonml-jax launch`."""
    yield [Command([sys.executable, "-m", "axonml_jax", "launch", f"--nproc-per-node={number}", str(WORKER)])]


def torchrun(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """PyTorch's own, perhaps of another environment than this one."""
    program = options.torchrun or shutil.which("torchrun")
    if not program:
        raise Missing("torchrun is not installed: name it with --torchrun")
    words = [program, f"--nproc-per-node={number}", f"--master-port={free_port()}", "--no-python", sys.executable]
    yield [Command([*words, str(WORKER)])]


def mpirun(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """Open MPI's."""
    need(options, "mpirun")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    yield [Command(["mpirun", *root, "--oversubscribe", "-n", str(number), sys.executable, str(WORKER)])]


def srun(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """Slurm's, on a Slurm of this machine alone."""
    need(options, "srun", "munged")
    if os.geteuid() != 0:
        raise Missing("a Slurm of one's own is started as root")
    with tempfile.TemporaryDirectory() as folder, one_node_slurm(Path(folder), number) as environ:
        yield [Command(["srun", f"--ntasks={number}", sys.executable, str(WORKER)], environ)]


def kubernetes(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """The variables of an indexed job's pods; their number is said by WORLD_SIZE, or by the program."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = {"WORLD_SIZE": str(number)} if number > 2 else {}
    words = [sys.executable, str(WORKER), *([] if said else [f"--processes={number}"])]
    yield [Command(words, {"JOB_COMPLETION_INDEX": str(index), **address, **said}) for index in range(number)]


def hosts(number: int, options: argparse.Namespace) -> Iterator[list[Command]]:
    """`axonml-jax launch` on two hosts, each with half of the processes."""
    need(options, "ip")
    launch = [sys.executable, "-m", "axonml_jax", "launch", "--nnodes=2", f"--nproc-per-node={number // 2}"]
    try:
        with two_hosts() as names:
            where = [["ip", "netns", "exec", name] for name in names]
            flags = [[f"--node-rank={node}", f"--master-addr={ADDRESS}"] for node in (0, 1)]
            yield [Command([*where[node], *launch, *flags[node], str(WORKER)]) for node in (0, 1)]
    except NoHosts as error:
        raise Missing(str(error)) from error


LAUNCHERS = {
    "ours": Launcher("`axonml-jax launch`", "torchrun", ours),
    "torchrun": Launcher("PyTorch's `torchrun`", "torchrun", torchrun),
    "mpirun": Launcher("Open MPI's `mpirun`", "openmpi", mpirun),
    "srun": Launcher("`srun` on a one-node Slurm", "slurm", srun),
    "kubernetes": Launcher("Kubernetes, by its variables", "kubernetes", kubernetes),
    "hosts": Launcher("`axonml-jax launch` on two hosts (network namespaces)", "torchrun", hosts),
}


def need(options: argparse.Namespace, *programs: str) -> None:
    """Have programs, from Debian's packages if that was asked for."""
    absent = [name for name in programs if not shutil.which(name)]
    if absent and options.install:
        packages = [PACKAGES[name] for name in absent]
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "--quiet", *words], env=quiet, check=True, stdout=sys.stderr)
        absent = [name for name in programs if not shutil.which(name)]
    if absent:
        names = ", ".join(PACKAGES[name] for name in absent)
        raise Missing(f"{', '.join(absent)} not installed (Debian: {names}; --install fetches them)")


def free_port() -> int:
    """Of two neighbours: torchrun keeps the first for itself, JAX's coordinator gets the second."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(commands: Sequence[Command]) -> tuple[list[int], str]:
    """Exit statuses and everything that was said; nothing of the job is left afterwards."""
    unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI", "MASTER_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    children, deadline = [], time.monotonic() + TIME_LIMIT
    with tempfile.TemporaryFile("w+") as said:
        try:
            for command in commands:
                pipes = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True}
                children.append(subprocess.Popen(command.words, env=kept | own | command.environ, **pipes))
            statuses = [child.wait(max(1, deadline - time.monotonic())) for child in children]
        except subprocess.TimeoutExpired:
            statuses = [124] * len(commands)
        finally:
            for child in children:
                end(child)
        said.seek(0)
        return statuses, said.read()


def end(child: subprocess.Popen) -> None:
    """A launcher that still runs stops its processes, if it can, and what is left of its group is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.terminate()
        child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def verdict(launcher: Launcher, number: int, statuses: Sequence[int], said: str) -> dict[str, str]:
    """By kind of parallelism: `equal`, or what went wrong."""
    lines = [json.loads(found) for found in re.findall(r'\{"equal".*?\}', said)]
    wanted = {(rank, number, launcher.reads) for rank in range(number)}
    table = {}
    for kind in KINDS:
        places = [(line["rank"], line["size"], line["by"]) for line in lines if line["equal"] == kind]
        good = set(places) == wanted and len(places) == number and not any(statuses)
        table[kind] = "equal" if good else f"wrong: {sorted(places)}, status {list(statuses)}"
    return table


def attempt(name: str, number: int, options: argparse.Namespace) -> list[str]:
    """The row of one launcher and number of processes."""
    launcher, start = LAUNCHERS[name], time.monotonic()
    try:
        with contextlib.contextmanager(launcher.start)(number, options) as commands:
            statuses, said = run([replace(each, words=[*each.words, f"--model={options.model}"]) for each in commands])
    except (Missing, RuntimeError) as reason:
        return [launcher.title, str(number), *["not tried"] * len(KINDS), str(reason).splitlines()[0]]
    table = verdict(launcher, number, statuses, said)
    if set(table.values()) != {"equal"}:
        print(said[-6000:], file=sys.stderr, flush=True)
    return [launcher.title, str(number), *table.values(), f"{time.monotonic() - start:.0f} s"]


def main() -> int:
    """Try them all; the exit status is the number of wrong rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", choices=["net", "transformer"], default="net")
    parser.add_argument("--only", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--torchrun", help="where torchrun is; None: on the PATH")
    parser.add_argument("--install", action="store_true", help="install missing Debian packages")
    options = parser.parse_args()
    titles = ["Launcher", "processes", *KINDS, "time"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}", flush=True)
    wrong = 0
    for name in options.only:
        for number in options.processes:
            row = attempt(name, number, options)
            wrong += any(cell.startswith("wrong") for cell in row)
            print(f"| {' | '.join(row)} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
