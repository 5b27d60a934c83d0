"""A seeded campaign of faults against real processes: nothing is lost, nothing is left behind, every message names the cause.

    python benchmarks/faults/fault_campaign.py --faults 1000 --seconds 480 --jobs 6 [--only kill sleep] [--first N] [--again]
        [--stuck-after 20] [--anew]

Every fault hits a small training of two to four processes under `axonml-jax launch` (DDP, FSDP, hybrid, a pipeline, DiLoCo).
The run is restarted by the launcher or, where that was stopped too, started again by hand, and must end bit for bit like one
that nothing happened to. A fault is drawn by its number alone. Records go to benchmarks/records/faults.jsonl, one line each;
running again continues. Prints a line per fault and, with --write, puts the table into docs/reliability.md; the exit status is
the number of faults that were not survived. What cannot be tried here (some disks need root) is skipped with the reason.

Most of a fault is waiting, so several are tried at a time (`--jobs`). Launchers and their workers are forks of one process that
has its imports made (`fault_forks.py`), but for every twentieth fault and with `--anew`, where Python is started for each.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all folders share

import fault_forks
from fault_job import ROOT, Job, Skipped, root_only, small_disk
from fault_kinds import AT_A_SAVE, EVERY, IN_THE_MAIN_PROCESS, KINDS, STEPS, Fault, suffer
from written_table import written

RECORDS = ROOT / "benchmarks" / "records" / "faults.jsonl"
PROGRAMS = ROOT / "runs" / "fault_programs"
"""Compiled programs, kept between pieces of the campaign."""
CACHED = {
    "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
}
"""Variables of all processes, with which each program is compiled once."""
WORLDS = {**dict.fromkeys(("data", "fsdp", "pipe", "diloco"), (2, 2, 2, 3, 4)), "hybrid": (4,)}
"""Plans, and numbers of processes, small ones more often."""
ANEW = 20
"""Of so many faults one has processes that are started anew."""


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
            problems += [f"its last launch ended with status {job.status}"] * bool(job.status) + job.leftovers()
        except (TimeoutError, subprocess.SubprocessError, OSError, IndexError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return problems, time.monotonic() - start, job


def report(number: int, options: argparse.Namespace, ends: Path) -> None:
    """Try one fault, print and record what came of it.

    Args:
      number: of the fault.
      options: of the campaign.
      ends: a folder of what undisturbed runs come to.
    """
    fault = draw(number, options.seed)
    anew = options.anew or number % ANEW == 0
    line: dict[str, Any] = {"seed": options.seed, "number": number, **vars(fault), "anew": anew}
    known_end = ends / f"{fault.axis}-{fault.world}.json"
    wanted = tuple(json.loads(known_end.read_text())) if known_end.exists() else None
    said = []
    try:
        with fault_forks.forking(not anew):
            problems, seconds, job = survive(fault, wanted, CACHED | {"FAULT_STUCK_AFTER": options.stuck_after})
    except Skipped as reason:
        line |= {"outcome": "skipped", "why": str(reason)}
    else:
        if not (problems or wanted):
            own = known_end.with_suffix(f".{number}")  # another fault may write the same
            own.write_text(json.dumps(job.wanted))
            own.replace(known_end)
        line |= {"outcome": "failed" if problems else "survived", "seconds": round(seconds, 1)}
        line |= {"why": "; ".join(problems)[:500]} if problems else {}
        said = job.said.splitlines()[-60:] if problems else []
    outcome = f"{number:4} {fault}: {line['outcome']} {line.get('why', '')}"
    print("\n".join([outcome, *(f"      {each}" for each in said)]), flush=True)
    with options.records.open("a") as file:
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
    rows = ["", "| By | survived of tried; fewer at the first try in brackets |", "| --- | --- |"]
    for title, name, values in (
        ("fault", "kind", KINDS),
        ("plan", "axis", tuple(WORLDS)),
        ("processes", "world", (2, 3, 4)),
    ):
        said = []
        for value in values:
            own = [line for line in tried if line[name] == value]
            good, at_once = (
                sum(line["outcome"] == "survived" for line in own),
                sum(line["number"] not in first for line in own),
            )
            said.append(f"{value} {good}/{len(own)}" + (f" ({at_once})" if at_once < good else ""))
        rows.append(f"| {title} | {', '.join(said)} |")
    good = sum(line["outcome"] == "survived" for line in tried)
    seconds = sum(line.get("seconds", 0) for line in last)
    said = (
        f"{len(tried):,} faults tried, {good:,} survived, {sum(n not in first for n in records):,} at the first try; "
    )
    said += f"{len(last) - len(tried)} skipped; {seconds / max(1, len(tried)):.0f} seconds a fault."
    return "\n".join([said, *rows])


def slot(todo: list[int], taken: Any, begun: float, options: argparse.Namespace, ends: Path) -> None:
    """One fault after the other, of those that no other slot has taken, until it is time."""
    while time.monotonic() < begun + options.seconds:
        with taken.get_lock():
            taken.value += 1
            place = taken.value - 1
        if place >= len(todo):
            return
        report(todo[place], options, ends)


def campaign(todo: list[int], options: argparse.Namespace, ends: Path) -> None:
    """Try faults, several at a time, each in a process of its own that forks."""
    taken, begun, slots = multiprocessing.get_context("fork").Value("i", 0), time.monotonic(), []
    for _ in range(options.jobs):
        slots.append(os.fork())  # multiprocessing's processes forget what JAX does when a program ends
        if not slots[-1]:
            try:
                slot(todo, taken, begun, options, ends)
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
    try:
        for each in slots:
            os.waitpid(each, 0)
    except BaseException:
        for each in slots:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGTERM)
        raise


def read_options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--numbers", type=int, nargs="*", help="these faults, in the place of first to faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so long")
    parser.add_argument("--again", action="store_true", help="try those again that were not survived")
    parser.add_argument("--jobs", type=int, default=1, help="faults tried at the same time")
    parser.add_argument("--anew", action="store_true", help="start Python for every process")
    parser.add_argument("--stuck-after", default="12", help="seconds without progress; more on a busy machine")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md, and try nothing")
    return parser.parse_args()


def main() -> int:
    """Go on with a campaign."""
    options = read_options()
    if options.write:
        written(ROOT / "docs" / "reliability.md", "faults", table(known(options.records, options.seed)))
        return 0
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    fault_forks.begin(CACHED)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # slots too end their launches then
    before = known(options.records, options.seed)
    done = {n for n, lines in before.items() if not (options.again and lines[-1]["outcome"] == "failed")}
    asked = range(options.first, options.faults) if options.numbers is None else options.numbers
    numbers = [n for n in asked if n not in done]
    with tempfile.TemporaryDirectory() as ends:
        todo = [n for n in numbers if not options.only or draw(n, options.seed).kind in options.only]
        campaign(todo, options, Path(ends))
    after = known(options.records, options.seed)
    tried = sum(map(len, after.values())) - sum(map(len, before.values()))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(table(after))
    print(f"{tried} tried now, {(used.ru_utime + used.ru_stime) / max(1, tried):.1f} seconds of processor time each")
    return min(99, sum(lines[-1]["outcome"] == "failed" for lines in after.values()))


if __name__ == "__main__":
    sys.exit(main())
