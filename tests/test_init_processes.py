"""Real processes over gloo: joining, groups, point to point, disagreement, lateness; and the roll call before it."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from workers.strangers import SPOKEN, STRANGERS, stranger

from axonml_jax.mesh.join import roll_call

JOB = """
import dataclasses
import jax
import numpy as np
from axonml_jax.base import logger, print0
from axonml_jax.mesh.init import init, shutdown

def total(x):
    return jax.lax.psum(x, "data")

def shift(x, source, target):
    return jax.lax.ppermute(x, "data", [(source, target)])

world = init(timeout=300)
rank, group = world.rank, world.default_group()
assert (world.world_size, world.num_processes, world.local_ranks, world.local_rank) == (3, 3, (rank,), rank)
assert world.is_main_process == (rank == 0) and world.backend.name == "gloo" and init() == world
assert float(group.run(total, np.float32(rank), name="total")) == 3.0
even = world.new_group([0, 2])
for i in range(50):
    if rank != 1:
        assert float(world.new_group([2, 0]).run(total, np.float32(i * rank), name="total")) == 2 * i
assert even.contains(rank) == (rank != 1)
if rank == 1:
    try:
        even.barrier()
    except ValueError as error:
        assert "only members may call" in str(error)
    group.send(np.arange(3.0), 0, shift=shift)
if rank == 0:
    assert group.recv(1, jax.ShapeDtypeStruct((3,), np.float32), shift=shift).tolist() == [0, 1, 2]
try:
    group.run(total, np.ones(2 + rank, np.float32), name="total")
    raise AssertionError("shapes differ")
except ValueError as error:
    assert all(f"rank(s) [{r}] call total(float32[{2 + r}])" in str(error) for r in range(3)), error
if rank != 1:
    try:
        dataclasses.replace(group, timeout=0.5).run(total, 1.0, name="total")
        raise AssertionError("rank 1 is missing")
    except TimeoutError as error:
        assert "rank(s) [1] did not call it within 0.5 s" in str(error), error
world.backend.synchronize()
print0("main", rank)
logger.warning("ready")
shutdown()
shutdown()
print("done", rank)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank, port, **more):
    unwanted = ("SLURM", "OMPI", "JAX_", "XLA_", "NPROC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "RANK": str(rank)}
    return kept | job | {"JAX_PLATFORMS": "cpu"} | more


@pytest.mark.slow
def test_three_processes_form_a_world_and_their_groups_agree_or_say_who_does_not():
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(JOB)],
            env=environment(rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (out, err) in enumerate(outputs):
        assert f"done {rank}" in out, err
        assert ("main 0" in out) == (rank == 0)
        assert f"[{rank}/3] ready" in err


def call_the_roll(port, calls, timeout, first=lambda: None):
    errors = {}

    def work(index, process, count):
        try:
            roll_call(f"127.0.0.1:{port}", count, process, timeout)
            errors[index] = None
        except (ValueError, TimeoutError) as error:
            errors[index] = error

    threads = [threading.Thread(target=work, args=(i, *call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
        first()
        first = lambda: None
    for thread in threads:
        thread.join(30)
    return [errors[i] for i in range(len(calls))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_roll_call_ends_when_all_are_there_in_whatever_order(order):
    assert call_the_roll(free_port(), [(process, 3) for process in order], timeout=20) == [None] * 3


ROLLS = {
    "some missing": ([(0, 5), (2, 5), (3, 5)], TimeoutError, r"process\(es\) \[1, 4\] never arrived within 0.6 s"),
    "coordinator missing": ([(1, 2)], TimeoutError, r"\[0\] never arrived within 0.6 s \(Connection refused\)"),
    "a number mistyped": ([(0, 10**9)], TimeoutError, r"\[1, 2, .*, 8\] and 999999991 more never arrived within 0.6 s"),
    "same id twice": ([(0, 3), (1, 3), (1, 3)], ValueError, "two processes have id 1"),
    "other number": ([(0, 3), (1, 2)], ValueError, "process 1 says there are 2 processes, process 0 says 3"),
}


@pytest.mark.parametrize("case", ROLLS)
def test_what_is_wrong_with_a_job_is_an_error_in_every_process_that_came(case):
    calls, kind, words = ROLLS[case]
    for error in call_the_roll(free_port(), calls, timeout=0.6):
        assert type(error) is kind
        assert re.search(words, str(error))


def test_a_name_that_does_not_resolve_is_said_to_both_sides():
    port, name = free_port(), "no.such.host.invalid"  # RFC 2606: nobody's
    said = f"the name '{name}' does not resolve on this machine"
    with pytest.raises(TimeoutError, match=rf"\[0\] never arrived within 0.1 s \({said}"):
        roll_call(f"{name}:{port}", 2, 1, 0.1)
    with pytest.raises(TimeoutError, match=rf"\[1\] never arrived within 0.1 s \({said}.*; they may not find it"):
        roll_call(f"127.0.0.1:{port}", 2, 0, 0.1, named=f"{name}:{port}")


@pytest.mark.parametrize(("token", "more"), [("", ()), ("hush", ({"process": 1, "count": 2},))], ids=["open", "sealed"])
def test_the_roll_call_ignores_strangers(token, more, monkeypatch):
    monkeypatch.setenv("AXONML_JAX_TOKEN", token)
    port, begun = free_port(), time.monotonic()
    with contextlib.ExitStack() as stack:
        ways = [dict(said=said) for said in STRANGERS] + [
            dict(said=each, subject="roll call") for each in (*SPOKEN, *more)
        ]
        come = lambda: [stack.enter_context(stranger(port, **way)) for way in ways]
        assert call_the_roll(port, [(0, 2), (1, 2)], timeout=20, first=come) == [None] * 2
    assert time.monotonic() - begun < 10  # silent ones hold up nobody


EXITS = """
import sys
from axonml_jax.compat.processes import when_exiting
when_exiting(lambda code: print("told", repr(code), flush=True))
for end in ("sys.exit(5)", "raise SystemExit(6)"):
    try:
        exec(end)
    except SystemExit as error:
        assert error.code in (5, 6) and error.args == (error.code,)
        error.code = 7
        assert error.code == 7
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    "end, told, status",
    [
        ("sys.exit(3)", "told 3\n", 3),
        ("raise SystemExit(3)", "told 3\n", 3),
        ("sys.exit('no file')", "told 'no file'\n", 1),
        ("sys.exit()", "told None\n", 0),
        ("raise SystemExit(0)", "told 0\n", 0),
        ("pass", "", 0),
        ("1 / 0", "", 1),
    ],
)
def test_an_exit_that_nobody_catches_is_told_with_its_status(end, told, status):
    done = subprocess.run([sys.executable, "-c", EXITS, end], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (told, status), done.stderr


LEAVES = """
import sys, time, axonml_jax as ax
world = ax.init(timeout=120)
world.default_group().barrier()
while world.rank == 0 and sys.argv[2] != "0":
    time.sleep(0.1)
exec(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("end, status", [("sys.exit(3)", 3), ("raise SystemExit('no file')", 1), ("sys.exit(0)", 0)])
def test_a_process_that_exits_with_an_error_ends_the_job_and_others_wait_for_each_other(end, status, tmp_path):
    (tmp_path / "work.py").write_text(LEAVES)
    command = [sys.executable, "-m", "axonml_jax", "launch", "--nproc-per-node=2", "work.py", end, str(status)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            _, error = launcher.communicate(timeout=120)
        finally:
            launcher.terminate()
    assert launcher.returncode == status, error
    assert not status or f"rank 1 failed first: exit code {status}" in error, error
