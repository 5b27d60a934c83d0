"""Which rank holds up the others, from times that hosts can see; and that they are seen in real processes."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_launcher_training import axonml

from axonml_jax.mesh.watch import Pace, StepTimes, mean_pace, stragglers

WORKER = str(Path(__file__).parent / "workers" / "watched_rank.py")


def pace(**parts):
    return Pace(step=40, steps=20, wall=1.0, **parts)


EVEN = {0: pace(late=0.1, work=0.5), 1: pace(late=0.12, work=0.5), 2: pace(late=0.1, work=0.55)}
CASES = {
    "even": ({}, None),
    "data": ({1: pace(late=0.6, data=0.55, work=0.5)}, "1.10 s of its own in a step, not 0.62: 0.55 s of it waiting for data"),
    "host": ({1: pace(late=0.6, work=0.5)}, r"0.60 s of it between two steps, its devices idle"),
    "stopped": ({1: pace(late=0.1, work=0.5, stopped=0.4)}, "0.40 s of it stopped or not scheduled"),
    "computing": ({1: pace(late=0.1, work=0.9)}, "0.90 s of it computing, or waiting for a processor"),
    "hidden behind the devices": ({1: pace(late=0.1, data=0.1, work=0.5)}, None),
    "a little": ({1: pace(late=0.3, work=0.5)}, None),
    "much, but little of its own time": ({r: pace(late=0.1, work=9.0 + 0.5 * (r == 1)) for r in range(3)}, None),
    "not heard": ({1: Pace()}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_named_that_is_slower_by_a_quarter_of_a_step_and_of_the_others(case):
    changed, wanted = CASES[case]
    found = stragglers(EVEN | changed)
    assert [each.rank for each in found] == ([] if wanted is None else [1])
    if wanted is not None:
        assert re.search(f"^rank 1 takes .* for the last 20 steps: .*{wanted}", found[0].text), found[0].text


def test_of_two_ranks_the_slow_one_is_named_and_of_one_none():
    assert [each.rank for each in stragglers({0: pace(late=0.1), 1: pace(late=0.9)})] == [1]
    assert stragglers({0: pace(late=0.9)}) == []


def test_the_mean_of_steps_is_of_their_parts():
    steps = [Pace(step, 1, 1.0, late, late / 2) for step, late in ((7, 0.2), (8, 0.4))]
    assert mean_pace(steps) == Pace(8, 2, 1.0, 0.3, 0.15) and mean_pace([]) == Pace()


class Result:
    """An array that is ready after a while."""

    def __init__(self, seconds):
        self.at = time.monotonic() + seconds

    def is_deleted(self):
        return False

    def is_ready(self):
        return time.monotonic() >= self.at


def measured(device, drawing, host):
    """The pace of steps of so many seconds."""
    times, stop = StepTimes(on_cpus=False), threading.Event()
    thread = threading.Thread(target=times.watch, args=(stop,))
    thread.start()

    def batches():
        while True:
            time.sleep(drawing)
            yield None

    free = 0.0
    for step, _ in zip(range(1, 9), times.drawing(batches()), strict=False):
        now = time.monotonic()
        free = max(free, now) + device  # the devices do one step after the other
        times.began(step, Result(free - now))
        time.sleep(host)
    time.sleep(max(free - time.monotonic(), 0) + 0.2)
    stop.set()
    thread.join()
    return times.pace()


@pytest.mark.slow
def test_time_counts_as_late_only_while_the_devices_have_nothing_to_do():
    waiting, behind = measured(device=0.02, drawing=0.1, host=0.02), measured(device=0.2, drawing=0.1, host=0.02)
    assert waiting.late == pytest.approx(0.1, abs=0.06) and waiting.data == pytest.approx(waiting.late, abs=0.04)
    assert behind.late < 0.05 and behind.wall == pytest.approx(0.2, abs=0.06)
    between = measured(device=0.02, drawing=0.0, host=0.12)
    assert between.late == pytest.approx(0.1, abs=0.06) and between.data < 0.03


STOPPED = """
import threading, time
from axonml_jax.mesh.watch import StepTimes

class Result:
    ready = False
    def is_deleted(self): return False
    def is_ready(self): return self.ready

times, stop, results = StepTimes(on_cpus=True), threading.Event(), [Result(), Result()]
thread = threading.Thread(target=times.watch, args=(stop,))
thread.start()
for step, result in enumerate(results, 1):
    times.began(step, result)
    if step == 2:
        print("now", flush=True)
        time.sleep(0.3)
        spun = time.process_time() + 0.3
        while time.process_time() < spun:
            pass
    result.ready = True
    time.sleep(0.3)
stop.set()
thread.join()
print(times.pace().stopped, times.pace().work)
"""


@pytest.mark.slow
def test_a_stopped_process_knows_for_how_long_and_what_it_ran():
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        stopped, work = map(float, process.stdout.read().split())
    assert 0.7 < stopped < 3 and 0.3 <= work < 3


@pytest.mark.slow
def test_real_processes_name_the_one_that_waits_for_its_data():
    done = axonml("launch", "--nproc-per-node=2", WORKER, "slow-data")
    assert done.returncode == 0, done.stderr[-3000:]
    named = re.findall(r"rank 1 takes .* for the last 20 steps: .* s of it waiting for data", done.stderr)
    assert len(named) == 1 and "rank 0 takes" not in done.stderr, done.stderr[-3000:]
    assert "'slow_rank': 1" in done.stdout
