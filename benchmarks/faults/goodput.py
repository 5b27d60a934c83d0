"""Goodput of a simulated week, by number of devices, way of recovery and interval between copies.

    python benchmarks/faults/goodput.py [--failures llama3] [--weeks 200] [--picture docs/guides/pictures/goodput.png]
    python benchmarks/faults/goodput.py --measure 3

The first prints the table of docs/reliability.md and draws it; every cell is the mean of simulated weeks, and must
agree with the closed form within four standard errors. The second kills a rank of a small training of two processes
under `axonml-jax launch --max-restarts=1`, so many times, and prints what a restart from disk takes: medians until the launcher
says who failed, until all processes have restored, and until the next step is done. No accelerator is needed.
"""

import argparse
import math
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

from simulated_week import simulate

from axonml_jax.planner.hardware import FAILURE_RATES, HOUR, WEEK, Recovery, best_steps, expected_goodput, failure_rate

DEVICES = tuple(2**power for power in range(3, 13))
KILLED = 8
"""The step before which a rank is killed."""


def ways(given: argparse.Namespace) -> dict[str, Recovery]:
    """The ways of recovery that are compared, of a state of the same size."""
    size = given.gib * 2**30
    parts = {"notice": given.notice, "start": given.start, "compile": given.compile, "size": size}
    disk = {"read": given.disk, "write": given.disk, "blocked": 0.04 + size / given.host}
    peers = {"read": given.peers, "write": given.peers, "blocked": size / given.host}
    slow = {"notice": 0.0, "start": given.slow, "compile": 0.0, "size": size}
    return {
        "disk": Recovery(name="restart from disk", **parts, **disk),
        "slow disk": Recovery(name=f"restart from disk, {given.slow:.0f} s", **slow, **disk),
        "peers": Recovery(name="restart from peers' memory", **parts, **peers),
        "shrink": Recovery(
            name="shrink and go on", **parts, read=given.peers, replace=given.replace * HOUR, shrinks=True
        ),
    }


def week(way: Recovery, rate: float, interval: float, replicas: int, weeks: int) -> float:
    """Mean goodput of simulated weeks, after a look at the closed form."""
    sizes = {"rate": rate, "interval": interval, "replicas": replicas}
    found = [simulate(way, **sizes, seed=seed) for seed in range(weeks)]
    mean, expected = statistics.mean(found), expected_goodput(way, **sizes)
    error = statistics.stdev(found) / math.sqrt(weeks)
    # What is being replaced or redone where a week ends, of which a formula for the long run knows nothing.
    ends = rate * (way.pause + interval + way.commit + way.growing) * (way.replace + way.pause + interval) / WEEK
    assert abs(mean - expected) < 4 * error + ends + 1e-4, (way.name, sizes, mean, expected, error)
    return mean


def table(given: argparse.Namespace) -> dict[str, list[float]]:
    """Print the table; (way, interval) -> goodput by number of devices."""
    known, step = ways(given), given.step
    columns: list[tuple[str, str, float | None]] = [
        ("disk", "every 10 min", 600.0), ("disk", "every 60 min", HOUR), ("disk", "best", None),
        ("slow disk", "every 10 min", 600.0), ("slow disk", "best", None), ("peers", "best", None),
        ("shrink", "no copies", step),
    ]  # fmt: skip
    names = [f"{known[way].name}, {words}" for way, words, _ in columns]
    print(f"| Devices | a failure every | {' | '.join(names)} |\n|{' --- |' * (len(names) + 2)}")
    found: dict[str, list[float]] = {name: [] for name in names}
    for devices in DEVICES:
        rate, replicas, cells = devices * given.failures / HOUR, devices // given.replica, []
        for name, (key, _, interval) in zip(names, columns, strict=True):
            way = known[key]
            if way.shrinks and replicas < 2:
                found[name].append(math.nan)
                cells.append("one replica")
                continue
            if interval is None:
                interval = step * best_steps(way, rate=rate, step=step, most=round(WEEK / step))
                said = f" ({interval / 60:.1f} min)"
            else:
                said = ""
            found[name].append(week(way, rate, interval, replicas, given.weeks))
            cells.append(f"{found[name][-1]:.2%}{said}")
        print(f"| {devices:,} | {1 / rate / HOUR:,.1f} h | {' | '.join(cells)} |", flush=True)
    return found


def draw(found: dict[str, list[float]], given: argparse.Namespace) -> None:
    """Goodput lost, over devices and over intervals."""
    from axonml_jax.ledger.pictures import new_figure, save

    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for name, values in found.items():
        left.plot(DEVICES, [100 * (1 - value) for value in values], marker=".", label=name)
    left.set(
        xscale="log", yscale="log", xlabel="devices", ylabel="% of a week that trained nothing", title="by devices"
    )
    left.set_xticks(DEVICES[::3], [f"{each:,}" for each in DEVICES[::3]])
    minutes = [0.2 * 1.25**power for power in range(33)]
    for key, way in ways(given).items():
        if not way.shrinks:
            rate = DEVICES[-1] * given.failures / HOUR
            lost = [100 * (1 - expected_goodput(way, rate=rate, interval=60 * each)) for each in minutes]
            right.plot(minutes, lost, label=way.name, color={"disk": "C2", "slow disk": "C4", "peers": "C5"}[key])
    right.set(xscale="log", xlabel="minutes between copies", title=f"{DEVICES[-1]:,} devices, by interval")
    right.set_xticks([0.2, 1, 10, 60, 240], ["0.2", "1", "10", "60", "240"])
    left.legend(fontsize="x-small")
    right.legend(fontsize="x-small")
    save(figure, given.picture)


def measure(rounds: int) -> None:
    """What a restart takes from the launcher's own launch, on this machine."""
    from fault_job import Job

    parts = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            job, moments = Job(Path(folder), "fsdp"), {"begun": [], "known": []}

            def seen(process, said, moments=moments):
                for name, word in (("begun", "start="), ("known", "failed first")):
                    if len(moments[name]) < said.count(word):
                        moments[name].append(time.time())

            waiting = threading.Thread(target=_await_step, args=(Path(folder) / "metrics.jsonl", moments))
            waiting.start()
            status = job.launch("kill", 1, KILLED, meanwhile=seen)
            waiting.join()
            assert status == 0 and len(moments["begun"]) == 2, job.said
            times = ((Path(folder) / "fault-happened").stat().st_mtime, moments["known"][0], moments["begun"][1])
            parts.append([after - before for before, after in pairwise((*times, moments["stepped"][0]))])
        print("{:.2f} s until it is known, {:.2f} s until restored, {:.2f} s until the next step".format(*parts[-1]))
    known, restored, stepped = (statistics.median(each) for each in zip(*parts, strict=True))
    print(f"medians of {rounds}: {known:.2f} + {restored:.2f} + {stepped:.2f} = {known + restored + stepped:.2f} s")


def _await_step(records: Path, moments: dict[str, list[float]], limit: float = 120.0) -> None:
    """Note when the first step after the restart has been recorded: records of steps to be done again are dropped before."""
    end, before = time.time() + limit, None
    while time.time() < end:
        if len(moments["begun"]) == 2:
            count = records.read_text("utf-8").count("\n")
            if before is not None and count > before:
                moments["stepped"] = [time.time()]
                return
            before = min(count, before or count)
        time.sleep(0.005)


def main() -> None:
    """Read the flags; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, metavar="ROUNDS", help="what a restart takes here, instead of the table")
    parser.add_argument(
        "--failures", type=failure_rate, default="llama3", help=f"a number, or {', '.join(FAILURE_RATES)}"
    )
    parser.add_argument("--weeks", type=int, default=200, help="simulated for each cell")
    parser.add_argument("--step", type=float, default=2.0, help="seconds of a step")
    parser.add_argument("--gib", type=float, default=1.5, help="of a device's state")
    parser.add_argument(
        "--replica", type=int, default=8, help="devices of one replica of the model, which fail together"
    )
    # The next three as `--measure` found them.
    parser.add_argument("--notice", type=float, default=5.4, help="seconds")
    parser.add_argument("--start", type=float, default=9.6, help="seconds until processes run and have met")
    parser.add_argument("--compile", type=float, default=1.8, help="seconds")
    parser.add_argument("--slow", type=float, default=300.0, help="seconds of the same three in a second row, assumed")
    parser.add_argument(
        "--replace", type=float, default=4.0, help="hours until a machine is back, for shrinking; assumed"
    )
    parser.add_argument("--disk", type=float, default=2e12 / 16384, help="bytes per second and device of a checkpoint")
    parser.add_argument("--peers", type=float, default=5e9, help="the same to a peer's memory; assumed")
    parser.add_argument("--host", type=float, default=16e9, help="the same from a device to its host; assumed")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    if given.measure:
        return measure(given.measure)
    found = table(given)
    if given.picture is not None:
        draw(found, given)
    return None


if __name__ == "__main__":
    main()
