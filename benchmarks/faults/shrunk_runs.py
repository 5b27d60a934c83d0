"""Runs that lose machines, and get them back, against one device that takes the same batches at the same steps.

    python benchmarks/faults/shrunk_runs.py --runs 60 --seconds 480 [--first N] [--again]
    python benchmarks/faults/shrunk_runs.py --write

A run is drawn by its number alone: DDP, FSDP whose parts are of other sizes on fewer machines, or hybrid sharding; two or three
machines; what the batch is on fewer of them; who is lost when and how (worker and launcher killed, the launcher alone, or a
leave); whether it comes back, and whether another is lost after that. Each machine is a launcher of its own. Held: losses,
gradient norms and tokens of every step are those of one device; nothing that was committed is lost (no step twice after a leave
or a coming, at most the steps since the last copy or checkpoint after a loss); every attempt's machines are those that are
there; the run ends well and leaves no process. Records go to benchmarks/records/shrunk_runs.jsonl, one line each; running again
continues. --write puts the table into docs/reliability.md. The exit status is the number of runs that failed.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

from elastic_machines import LIMIT, QUICKSTART, ROOT, SMALL, Machine, Machines
from written_table import written

from axonml_jax.cli.records import read_records
from axonml_jax.launch.launcher import free_port

RECORDS = ROOT / "benchmarks" / "records" / "shrunk_runs.jsonl"
STEPS, BATCH, EVERY = 40, 24, 5
PLANS = {
    "DDP": ("--checkpoint.every=null", "--checkpoint.memory_every=1"),
    "FSDP": ("--mesh.data=1", "--mesh.fsdp=-1", f"--checkpoint.every={EVERY}"),
    "hybrid": ("--mesh.fsdp=2", "--checkpoint.every=null", "--checkpoint.memory_every=1"),
}
PROCESSES = {"DDP": 1, "FSDP": 1, "hybrid": 2}
HOW = ("worker and launcher killed", "launcher killed", "leave")
BATCHES = ("keep_batch", "shrink_batch")


@dataclass(frozen=True)
class Run:
    """What happens.

    Attributes:
      plan: of `PLANS`.
      machines: with how many it begins.
      on_shrink: of `BATCHES`.
      events: in order, ("lost", how) or ("comes", ""), each so many steps after the one before.
      node: which machine is lost, and comes back.
      after: steps of each event.
    """

    plan: str
    machines: int
    on_shrink: str
    node: int
    events: tuple[tuple[str, str], ...]
    after: tuple[int, ...]

    def __str__(self):
        words = ", ".join(f"{kind} {how}".strip() for kind, how in self.events)
        return f"{self.plan}, {self.machines} machines, {self.on_shrink}: node {self.node} {words}"


def draw(number: int, seed: int) -> Run:
    """A run, by its number."""
    numbers = random.Random(f"{seed}:{number}")
    plan, machines = numbers.choice(list(PLANS)), numbers.choice((2, 2, 3))
    lost = [("lost", HOW[(number + each) % len(HOW)]) for each in range(2)]
    events = [lost[0], ("comes", ""), lost[1]][: numbers.choice((1, 2, 3))]
    after = tuple(numbers.randrange(2, 8) for _ in events)
    return Run(plan, machines, BATCHES[number // len(HOW) % 2], numbers.randrange(1, machines), tuple(events), after)


def options_of(run: Run) -> list[str]:
    """Of the training."""
    batch = [f"--train.steps={STEPS}", f"--train.global_batch_size={BATCH}", f"--train.on_shrink={run.on_shrink}"]
    return [*PLANS[run.plan], *batch]


def lose(machine: Machine, how: str) -> None:
    """A machine that is no longer there."""
    workers = {pid for *_, pid in machine.steps}
    if how == "leave":
        machine.process.terminate()
        return
    for pid in workers if how == HOW[0] else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    machine.process.kill()


def newest_checkpoint(folder: Path) -> int:
    """Of all that are committed in the runs of a folder; 0: there is none."""
    return max((int(path.name[5:]) for path in folder.glob("*/checkpoints/step_" + 8 * "[0-9]")), default=0)


def happen(run: Run, machines: Machines) -> tuple[Machine, list[int]]:
    """Let everything happen.

    Returns:
      The first machine, whose launcher has ended, and at each event the newest checkpoint.
    """
    machines.pace(0.2)
    each = {node: machines.start(node) for node in range(run.machines)}
    head, committed = each[0], []
    for attempt, ((kind, how), after) in enumerate(zip(run.events, run.after, strict=True)):
        begun = int(head.wait_for(rf"attempt={attempt} step=(\d+) ")[1])
        head.wait_for(rf"attempt={attempt} step={begun + after} ")
        committed.append(newest_checkpoint(machines.folder / "runs"))
        if kind == "lost":
            lose(each.pop(run.node), how)
        else:
            machines.pace(1)  # it takes some seconds to start
            each[run.node] = machines.start(run.node)
        head.wait_for(rf"attempt={attempt + 1} step=\d+ ")
        machines.pace(0.2)
    machines.pace(0)
    for machine in each.values():
        machine.process.wait(LIMIT)
    return head, committed


def parts_of(run: Run, said: str, made: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Until which step the batch had which size: of every step the attempt counts that made it last."""
    machines = {0: run.machines}
    for attempt, nodes in re.findall(r"attempt (\d+) runs on node\(s\) ([\d, ]+) with", said):
        machines[int(attempt)] = len(nodes.split(","))
    last = {step: attempt for attempt, step, _ in sorted(made)}
    share = lambda step: BATCH * machines[last[step]] // run.machines if run.on_shrink == "shrink_batch" else BATCH
    return [(max(steps), size) for size, steps in itertools.groupby(sorted(last), share)]


def losses_of(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Records of the only run in a folder of runs."""
    return [(record.step, record.metrics) for record in read_records(next(folder.iterdir()) / "metrics.jsonl")]


def oracle(machines: Machines, parts: list[tuple[int, int]]) -> list[tuple[int, dict[str, float]]]:
    """The same training on one device, with these batches."""
    folder = machines.folder / "oracle"
    base = [
        sys.executable,
        "-m",
        "axonml_jax",
        "train",
        QUICKSTART,
        *SMALL,
        "--devices.simulated=null",
        "--resume=auto",
    ]
    base += [f"--data.path={machines.folder / 'text'}", f"--output.dir={folder}", "--output.compiled=null"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    variables |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for until, size in parts:
        own = [f"--train.steps={until}", f"--train.global_batch_size={size}"]
        subprocess.run([*base, *own], env=variables, capture_output=True, check=True, timeout=LIMIT)
    return losses_of(folder)


def problems_of(run: Run, machines: Machines, head: Machine, committed: list[int]) -> list[str]:
    """What is not as it should be, where the newest checkpoint at each event was of these steps."""
    said, made, problems = head.said, head.steps, []
    if head.process.returncode:
        return [f"it ended with status {head.process.returncode}: {said[-1500:]}"]
    attempts = [sorted({step for a, step, _ in made if a == attempt}) for attempt in range(len(run.events) + 1)]
    parts = zip(run.events, itertools.pairwise(attempts), committed, strict=True)
    for number, ((kind, how), (before, after), kept) in enumerate(parts, 1):
        with_it = "with" if kind == "comes" else "without"
        if not re.search(rf"attempt {number} runs on node\(s\) .*{with_it} node\(s\) \[{run.node}\]", said):
            problems.append(f"attempt {number} does not say that it runs {with_it} node {run.node}")
        twice = max(before) + 1 - min(after)
        steady = kind == "comes" or how == "leave"
        from_disk = run.plan == "FSDP" and not steady  # a copy in memory lacks the step that is made and the one before
        if not 0 <= twice <= (max(before) - kept if from_disk else 0 if steady else 2):
            problems.append(f"{twice} steps were made twice when node {run.node} {kind} ({how}), of {kept} committed")
    found, wanted = losses_of(machines.folder / "runs"), oracle(machines, parts_of(run, said, made))
    if [step for step, _ in found] != list(range(1, STEPS + 1)):
        problems.append(f"its records have steps {[step for step, _ in found]}")
    elif len(found) == len(wanted):
        for name in ("loss", "grad_norm", "tokens"):
            own, one = (np.array([metrics[name] for _, metrics in side]) for side in (found, wanted))
            if not np.allclose(own, one, rtol=1e-5, atol=0):
                problems.append(f"{name} is {np.max(np.abs(own / one - 1)):.1e} off that of one device")
    else:
        problems.append(f"one device has {len(wanted)} records")
    return problems + left(str(machines.folder))


def left(folder: str, seconds: float = 15) -> list[str]:
    """Processes with the folder in their command, after a while."""
    deadline, found = time.monotonic() + seconds, [""]
    while found and time.monotonic() < deadline:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(entry.name) != os.getpid() and folder.encode() in (entry / "cmdline").read_bytes():
                    found.append(f"process {entry.name} is left")
        time.sleep(0.2)
    return found


def tried(run: Run) -> tuple[list[str], str]:
    """What went wrong, and what the first machine said."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"processes": PROCESSES[run.plan], "launch": ["--max-restarts=0", "--last-call=60"]}
        with Machines(Path(folder), free_port(), f"1:{run.machines}", options_of(run), **options) as machines:
            try:
                head, committed = happen(run, machines)
                return problems_of(run, machines, head, committed), head.said
            except (TimeoutError, subprocess.SubprocessError, OSError, StopIteration) as error:
                return [f"{type(error).__name__}: {str(error)[:300]}"], machines.started[0].said


def known(path: Path, seed: int) -> dict[int, dict[str, Any]]:
    """The last record of every run."""
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["number"]: line for line in lines if line["seed"] == seed}


def table(records: dict[int, dict[str, Any]]) -> str:
    """What was tried and how it ended: by plan, machines, batch, and what happened."""
    lines = list(records.values())
    good = [line for line in lines if not line["problems"]]
    happened = lambda line: ", then ".join(dict.fromkeys(how or "it comes back" for _, how in line["events"]))
    rows = ["", "| By | equal to one device, of tried |", "| --- | --- |"]
    for title, key in (
        ("plan", lambda line: line["plan"]),
        ("machines", lambda line: str(line["machines"])),
        ("on fewer machines", lambda line: f"`{line['on_shrink']}`"),
        ("what happened", happened),
    ):
        said = [
            f"{value} {sum(key(x) == value for x in good)}/{sum(key(x) == value for x in lines)}"
            for value in sorted({key(line) for line in lines})
        ]
        rows.append(f"| {title} | {'; '.join(said)} |")
    return "\n".join([f"{len(lines)} runs tried, {len(good)} equal to one device.", *rows])


def main() -> int:
    """Go on where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--again", action="store_true", help="try those again that failed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md, and try nothing")
    options, begun = parser.parse_args(), time.monotonic()
    if options.write:
        written(ROOT / "docs" / "reliability.md", "shrunk runs", table(known(RECORDS, options.seed)))
        return 0
    before = known(RECORDS, options.seed)
    for number in range(options.first, options.runs):
        if number in before and not (options.again and before[number]["problems"]):
            continue
        if time.monotonic() > begun + options.seconds:
            break
        run, start = draw(number, options.seed), time.monotonic()
        problems, said = tried(run)
        line = {"seed": options.seed, "number": number, **asdict(run), "problems": problems}
        line["seconds"] = round(time.monotonic() - start, 1)
        print(f"{number:4} {run}: {'; '.join(problems) or 'equal'} ({line['seconds']} s)", flush=True)
        if problems:
            print("".join(f"      {each}\n" for each in said.splitlines()[-80:]), flush=True)
        with RECORDS.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(table(after := known(RECORDS, options.seed)))
    return min(99, sum(bool(line["problems"]) for line in after.values()))


if __name__ == "__main__":
    sys.exit(main())
