"""A seeded campaign of faults against real processes: nothing is lost, nothing is left behind, every message names the cause.

    python benchmarks/fault_campaign.py --faults 1000 --seconds 480 [--only kill sleep] [--first N] [--again] [--stuck-after 12]

Every fault hits a small training of two to four processes under `axonml-jax launch` (DDP, FSDP, hybrid, a pipeline, DiLoCo).
The run is restarted by the launcher or, where that was stopped too, started again by hand, and must end bit for bit like one
that nothing happened to. A fault is drawn by its number alone. Records go to benchmarks/records/faults.jsonl, one line each;
running again continues. Prints a line per fault and, with --write, puts the table into docs/reliability.md; the exit status is
the number of faults that were not survived. What cannot be tried here (some disks need root) is skipped with the reason.
"""

import argparse
import collections
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fault_job import ROOT, Job, Skipped, root_only, small_disk
from fault_kinds import AT_A_SAVE, EVERY, IN_THE_MAIN_PROCESS, KINDS, STEPS, Fault, suffer
from written_table import written

RECORDS = ROOT / "benchmarks" / "records" / "faults.jsonl"
WORLDS = {**dict.fromkeys(("data", "fsdp", "pipe", "diloco"), (2, 2, 2, 3, 4)), "hybrid": (4,)}
"""Plans, and numbers of processes, small ones more often."""
Wanted = dict[tuple[str, int], tuple[str, str]]
"""By plan and world the digest and the records of a run to which nothing happens."""


def draw(number: int, seed: int, only: list[str] | None = None) -> Fault:
    """A fault of a campaign: every kind in turn, the rest by its number and the seed."""
    numbers, kinds = random.Random(f"{seed}:{number}"), only or KINDS
    kind = kinds[number % len(kinds)]
    late = {"terminate-rank": 6, "slow": 8, "stop-and-continue": 8}.get(kind, STEPS)
    step = numbers.choice(range(6, STEPS, EVERY)) if kind in AT_A_SAVE else numbers.randrange(2, late)
    axis = numbers.choice(["data", "fsdp"] * 2 + ["pipe", "diloco"] * 2 * (kind != "reader") + ["hybrid"])
    world = numbers.choice(WORLDS[axis])
    return Fault(kind, 0 if kind in IN_THE_MAIN_PROCESS else numbers.randrange(world), step, axis, world)


def survive(fault: Fault, wanted: tuple[str, str] | None, environ: dict[str, str]) -> tuple[list[str], float, Job]:
    """What went wrong, if anything, after how many seconds, and the training.

    Args:
      fault: what happens.
      wanted: digest and records of an undisturbed run; None: of one that the last processes make themselves.
      environ: more variables of the training.

    Raises:
      Skipped: when the fault cannot be tried here.
    """
    start, disk = time.monotonic(), tempfile.TemporaryDirectory
    if fault.kind.startswith("disk-full"):
        disk = small_disk
    elif fault.kind.startswith("read-only"):
        disk = root_only
    with disk() as folder:
        job, problems = Job(Path(folder), fault.axis, fault.world), []
        job.environ |= environ | ({} if wanted else {"FAULT_UNDISTURBED": "1"})
        try:
            pattern = suffer(fault, job)
            job.wanted = wanted = wanted or job.undisturbed
            if not re.search(pattern, job.said):
                problems.append(f"no message like {pattern}")
            if job.digests[-1:] != [wanted[0]]:
                problems.append(f"it ended with {job.digests or 'nothing'} instead of {wanted[0]}")
            elif job.losses != wanted[1]:
                problems.append("its records have a gap, a double or another loss")
            problems += job.leftovers()
        except (TimeoutError, subprocess.SubprocessError, OSError, IndexError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return problems, time.monotonic() - start, job


def report(number: int, seed: int, only: list[str] | None, wanted: Wanted, out: Path, **environ: str) -> None:
    """Try one fault, print and record what came of it."""
    fault = draw(number, seed, only)
    line: dict[str, Any] = {"seed": seed, "number": number, **vars(fault)}
    key = fault.axis, fault.world
    try:
        problems, seconds, job = survive(fault, wanted.get(key), environ)
    except Skipped as reason:
        line |= {"outcome": "skipped", "why": str(reason)}
        said = []
    else:
        if not problems:
            wanted[key] = job.wanted
        line |= {"outcome": "failed" if problems else "survived", "seconds": round(seconds, 1)}
        line |= {"why": "; ".join(problems)[:500]} if problems else {}
        said = job.said.splitlines()[-60:] if problems else []
    print(
        "\n".join(
            [f"{number:4} {fault}: {line['outcome']} {line.get('why', '')}", *(f"      {each}" for each in said)]
        ),
        flush=True,
    )
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def known(path: Path, seed: int) -> dict[int, list[dict[str, Any]]]:
    """All records of every fault, in order."""
    found = collections.defaultdict(list)
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        if line["seed"] == seed:
            found[line["number"]].append(line)
    return dict(found)


def table(records: dict[int, list[dict[str, Any]]]) -> str:
    """What was tried and survived: by kind, by plan and by number of processes."""
    last = [lines[-1] for lines in records.values()]
    tried = [line for line in last if line["outcome"] != "skipped"]
    first = {number for number, lines in records.items() if lines[0]["outcome"] == "failed"}
    rows = []
    for title, name, values in (
        ("Fault", "kind", KINDS),
        ("Plan", "axis", tuple(WORLDS)),
        ("Processes", "world", (2, 3, 4)),
    ):
        rows += ["", f"| {title} | tried | survived | at the first try |", "| --- | --- | --- | --- |"]
        for value in values:
            own = [line for line in tried if line[name] == value]
            good = sum(line["outcome"] == "survived" for line in own)
            rows.append(f"| {value} | {len(own)} | {good} | {sum(line['number'] not in first for line in own)} |")
    good = sum(line["outcome"] == "survived" for line in tried)
    seconds = sum(line.get("seconds", 0) for line in last)
    said = f"{len(tried)} of 1,000 faults tried, {good} survived, {sum(n not in first for n in records)} at the first try; "
    said += f"{len(last) - len(tried)} skipped; {seconds / max(1, len(tried)):.0f} seconds a fault."
    return "\n".join([said, *rows])


def main() -> int:
    """Go on with a campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--again", action="store_true", help="try those again that were not survived")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("--stuck-after", default="12", help="seconds without progress; more on a busy machine")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md, and try nothing")
    options = parser.parse_args()
    if options.write:
        written(ROOT / "docs" / "reliability.md", "faults", table(known(options.records, options.seed)))
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    before, begun = known(options.records, options.seed), time.monotonic()
    numbers = range(options.first, options.faults)
    done = {n for n, lines in before.items() if not (options.again and lines[-1]["outcome"] == "failed")}
    todo = [n for n in numbers if n not in done and (not options.only or draw(n, options.seed).kind in options.only)]
    with tempfile.TemporaryDirectory() as programs, ThreadPoolExecutor(options.jobs) as pool:
        cache = {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "JAX_ENABLE_COMPILATION_CACHE": "1"}
        more = {"seed": options.seed, "only": None, "wanted": {}, "out": options.records}
        attempt = partial(report, **more, FAULT_STUCK_AFTER=options.stuck_after, **cache)

        def due(number):
            if time.monotonic() < begun + options.seconds:
                attempt(number)

        list(pool.map(due, todo))
    after = known(options.records, options.seed)
    print(table(after))
    return min(99, sum(lines[-1]["outcome"] == "failed" for lines in after.values()))


if __name__ == "__main__":
    sys.exit(main())
