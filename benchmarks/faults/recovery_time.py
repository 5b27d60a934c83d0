"""Seconds from the kill of one process to the next step, by way of restarting, and what copies in memory cost every step.

    python benchmarks/faults/recovery_time.py [--rounds 3] [--ways disk memory standby shrink shrink-standby torchrun] [--cost]
        [--torch-python PATH]

Two processes train the model of configs/quickstart.yaml (data-parallel, one CPU device each) under `axonml-jax launch
--max-restarts 1`; rank 1 is killed by SIGKILL after step 27. `disk` has a checkpoint every ten steps, `memory` a copy
in memory every step, `standby` processes too that stand by with their imports made. `shrink` has a launcher for each
of the two (`--nnodes 1:2`), of which one is killed with its process: the other goes on alone, with the same batch.
Prints when, after the kill, the launcher had ended the others, the run had been described (processes started, JAX
imported, job joined, data read), the state was back, the first step was made, and step 28, which nobody had made
before; and what processor time process 0 had taken until then, which other work on the machine changes less.
`torchrun --max-restarts 10` restarts a training of the same size in PyTorch from its checkpoint of every ten
steps (`torch_restart.py`; of the Python that has torch). `--cost` trains without a fault, with and without copies, in turns.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from axonml_jax.launch.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
KILLED_AFTER, STEPS = 27, 32
CALLBACK = f"""
import os, signal, time
import jax
import axonml_jax as ax

class Told(ax.Callback):
    def on_step(self, event):
        jax.block_until_ready(event.metrics)
        print(f"step={{event.step}} at={{time.time():.3f}}", flush=True)
        first = os.environ["AXONML_JAX_RESTART_COUNT"] == "0"
        if event.step == {KILLED_AFTER} and first and "KILL" in os.environ:
            time.sleep(float(os.environ["KILL"]))  # the processes that stand by have made their imports
            if os.environ["RANK"] == "1":
                print(f"killed at={{time.time() + 0.5:.3f}}", flush=True)
                time.sleep(0.5)  # the launcher, which may be killed too, passes it on
                if os.environ["GROUP_WORLD_SIZE"] == "2":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
"""
CLOCK = """
import os, sys, threading, time

def tell(path):
    with open(path, "w", buffering=1) as file:
        while True:
            who = os.environ.get("RANK"), os.environ.get("AXONML_JAX_RESTART_COUNT")
            print(time.time(), time.process_time(), *who, file=file)
            time.sleep(0.1)

if "train" in sys.orig_argv and "launch" not in sys.orig_argv:
    place = os.path.join(os.path.dirname(__file__), f"{os.getpid()}.clock")
    threading.Thread(target=tell, args=(place,), daemon=True).start()
"""
WAYS = {
    "disk": ((), ("--checkpoint.every=10",)),
    "memory": ((), ("--checkpoint.every=null", "--checkpoint.memory_every=1")),
    "standby": (("--standby=1",), ("--checkpoint.every=null", "--checkpoint.memory_every=1")),
    "shrink": (("--nnodes=1:2",), ("--checkpoint.every=null", "--checkpoint.memory_every=1")),
    "shrink-standby": (("--nnodes=1:2", "--standby=1"), ("--checkpoint.every=null", "--checkpoint.memory_every=1")),
}
MARKS = {
    "ended": r"restart 1 of 1|attempt 1 runs",
    "described": r"^\[rank 0\] model ",
    "state back": r"resumed after step",
}


def train(folder: Path, flags: tuple[str, ...], settings: tuple[str, ...], **environ: str) -> list[tuple[float, str]]:
    """Launch a training; every line with the time at which it came."""
    (folder / "told.py").write_text(CALLBACK)
    (folder / "sitecustomize.py").write_text(CLOCK)
    machines = 2 if "--nnodes=1:2" in flags else 1
    command = [
        *("--max-restarts=1", *flags, "--module", "axonml_jax", "train", str(ROOT / "configs" / "quickstart.yaml")),
        *("--devices.simulated=null", "--allow-imports=told", "--callbacks=[{class_path: told.Told}]"),
        *(f"--output.dir={folder / 'runs'}", "--output.plot=false", "--train.eval_every=null", "--sample.count=0"),
        *(f"--train.steps={STEPS}", "--train.log_every=1000", "--data.valid_fraction=0.001", *settings),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "PYTHONDONT"))}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{folder}:{ROOT}", "XDG_CACHE_HOME": str(folder.parent / "cache")}
    own |= {"PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode")}  # an installed package has it
    place = [f"--rdzv-endpoint=127.0.0.1:{free_port()}"] if machines > 1 else ["--nproc-per-node=2"]
    said, spoken = os.pipe()
    started = []
    for node in range(machines):
        launch = [sys.executable, "-m", "axonml_jax", "launch", f"--node-rank={node}", *place]
        pipes = {"stdout": spoken, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen([*launch, *command], env=kept | own | environ, **pipes))
    os.close(spoken)
    with os.fdopen(said) as stream:
        lines = [(time.time(), line) for line in stream]
    status, *_ = [process.wait() for process in started]
    assert status == 0, "".join(line for _, line in lines)[-4000:]
    return lines


def recovered(way: str, base: Path) -> dict[str, float]:
    """Seconds after the kill of what happened then."""
    flags, settings = WAYS[way]
    with tempfile.TemporaryDirectory(dir=base) as folder:
        lines = train(Path(folder), flags, settings, KILL="12" if "standby" in way else "0.5")
        clocks = [[each.split() for each in path.read_text().splitlines()] for path in Path(folder).glob("*.clock")]
    text = "".join(line for _, line in lines)
    killed = float(re.findall(r"killed at=([\d.]+)", text)[0])
    after = [(at, line) for at, line in lines if at > killed]
    found = {name: next(at for at, line in after if re.search(mark, line)) for name, mark in MARKS.items()}
    steps = {
        int(step): float(at) for step, at in re.findall(r"rank 0\] step=(\d+) at=([\d.]+)", text) if float(at) > killed
    }
    found |= {"first step": min(steps.values()), f"step {KILLED_AFTER + 1}": steps[KILLED_AFTER + 1]}
    return {name: at - killed for name, at in found.items()} | {"processor": processor(clocks, killed, steps)}


def processor(clocks: list[list[list[str]]], killed: float, steps: dict[int, float]) -> float:
    """Seconds of processor time of process 0 until the next step: since the kill where it stood by, else since its start."""
    used = []
    for clock in clocks:
        own = [
            float(spent)
            for at, spent, rank, attempt in (each for each in clock if len(each) == 4)
            if (rank, attempt) == ("0", "1") and killed < float(at) < steps[KILLED_AFTER + 1] + 0.1
        ]
        before = [float(each[1]) for each in clock if float(each[0]) < killed]
        used += [own[-1] - max(before, default=0.0)] if own else []
    return max(used)


def restarted_by_torchrun(python: str, base: Path) -> dict[str, float]:
    """The same of PyTorch's launcher: its ranks say when they are there again."""
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=10"]
    command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d"]
    with tempfile.TemporaryDirectory(dir=base) as folder:
        command += [str(ROOT / "benchmarks" / "peers" / "torch_restart.py"), folder, str(KILLED_AFTER), str(STEPS)]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    marks = [
        (what, float(at))
        for what, at in re.findall(r"(described|state back|step=\d+|killed) at=([\d.]+)", ended.stdout)
    ]
    killed = dict(marks)["killed"]
    after = {what: at - killed for what, at in reversed(marks) if at > killed}
    first = min(at for what, at in after.items() if what.startswith("step=") and at > after["described"])
    last = after[f"step={KILLED_AFTER + 1}"]
    return {name: after[name] for name in ("described", "state back")} | {
        "first step": first,
        f"step {KILLED_AFTER + 1}": last,
    }


def step_seconds(settings: tuple[str, ...], base: Path) -> tuple[float, str]:
    """The median step, and what the run said of its copies."""
    with tempfile.TemporaryDirectory(dir=base) as folder:
        lines = train(Path(folder), (), ("--checkpoint.every=null", *settings))
    text = "".join(line for _, line in lines)
    times = [float(at) for at in re.findall(r"rank 0\] step=\d+ at=([\d.]+)", text)][4:]
    said = " ".join(re.findall(r"rank 0\] memory +(\d+ copies.*|copied every.*)", text))
    return statistics.median(b - a for a, b in itertools.pairwise(times)), said


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=[*WAYS, "torchrun"])
    parser.add_argument("--torch-python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--cost", action="store_true", help="milliseconds a step instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        if options.cost:
            for number in range(options.rounds):
                for settings in ((), ("--checkpoint.memory_every=1",)):
                    seconds, said = step_seconds(settings, Path(base))
                    print(f"round {number}: {1000 * seconds:.1f} ms a step {' '.join(settings)} {said}", flush=True)
            return
        found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
        for number in range(options.rounds):
            for way in options.ways:
                torchs = way == "torchrun"
                one = restarted_by_torchrun(options.torch_python, Path(base)) if torchs else recovered(way, Path(base))
                found[way].append(one)
                print(number, way, json.dumps({name: round(s, 2) for name, s in found[way][-1].items()}), flush=True)
        for way, rounds in found.items():
            medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            print(f"{way}: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in medians.items()))


if __name__ == "__main__":
    main()
