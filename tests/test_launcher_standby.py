"""Processes that stand by: they become the workers of a restart as if just started, and never outlive the launcher."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from axonml_jax.launch.launcher import _Job, free_port
from axonml_jax.launch.leftovers import MARK, Guard
from axonml_jax.launch.machines import Start
from axonml_jax.launch.options import read_options
from axonml_jax.launch.standby import HostMemory, can_outlive, go
from axonml_jax.launch.workers import Ended, Interrupts, started

LIMIT = 120
WORK = """
import json, os, pathlib, sys, time
restart = os.environ["AXONML_JAX_RESTART_COUNT"]
said = [sys.argv, __name__, sys.path[0], sys.stdin.read(), "optax" in sys.modules, os.environ["RANK"]]
print(json.dumps(said), flush=True)
def stand_by():
    found = [p for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if p.exists() and sys.argv[1].encode() in p.read_bytes()]
    return [p for p in found if b"launch.standby" in p.read_bytes()]
if restart == "0":
    while not stand_by(): time.sleep(0.05)
    END
"""


@pytest.fixture
def launched(tmp_path):
    """Start a launch of one worker, with one that stands by; it ends with the test."""
    started = []

    def launched(end):
        (tmp_path / "work.py").write_text(WORK.replace("END", end))
        flags = ["--max-restarts=1", "--standby=0", "work.py", f"mark-{tmp_path.name}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "axonml_jax", "launch", *flags]
        started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        return started[-1]

    yield launched
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def standing_by(mark):
    said = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            said.append(path.read_bytes())
        except OSError:
            continue
    return [each for each in said if b"launch.standby" in each and mark.encode() in each]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked for in /proc")
def test_one_that_stands_by_is_the_worker_of_the_restart_and_none_is_left(launched, tmp_path):
    launcher = launched("os.kill(os.getpid(), 9)")
    out, error = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0 and "restart 1 of 1" in error, error
    argv, mark = ["work.py", f"mark-{tmp_path.name}"], f"mark-{tmp_path.name}"
    said = [line.removeprefix("[rank 0] ") for line in out.splitlines()]
    wanted = '[{}, "__main__", "{}", "", {}, "0"]'
    argv = str(argv).replace("'", '"')
    assert said == [wanted.format(argv, tmp_path, imported) for imported in ("false", "true")]
    assert not standing_by(mark)


SETS = """
import os, sys
os.environ.setdefault("JAX_ENABLE_X64", "1")
print("top", flush=True)
import jax
print(jax.config.jax_enable_x64, sys.argv, os.getpid(), os.environ["GIVEN"])
"""


@pytest.mark.parametrize("given", [{}, {"JAX_ENABLE_X64": "0"}])
def test_what_a_script_sets_before_it_imports_jax_counts_in_one_that_stood_by(given, tmp_path):
    (tmp_path / "work.py").write_text(SETS)
    stand_by = (
        "from axonml_jax.launch import standby; standby.NEEDED = ('jax',)\n"
        "standby.stand_by('script', 'work.py', ['--lr', '1'])"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | given
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", stand_by], cwd=tmp_path, env=environ, **pipes) as process:
        out, error = process.communicate(go(environ | {"GIVEN": "later"}), timeout=LIMIT)
    said = f"{not given} ['work.py', '--lr', '1'] {process.pid} later"
    assert out.decode().splitlines() == [*["top"] * (1 if given else 2), said], error
    assert (b"JAX_ENABLE_X64 set before the import of JAX" in error) == (not given)


@pytest.mark.skipif(not can_outlive(), reason="there are no memory files")
def test_nothing_is_started_while_the_memory_files_are_arranged_anew(tmp_path):
    """The thread that starts who stands by reads the list of files, which is then half made."""
    (tmp_path / "work.py").touch()
    options = read_options(["--max-restarts=1", "--standby=0", str(tmp_path / "work.py")], {})
    during, starting = [], threading.Event()

    class Watched(HostMemory):
        def arrange(self, *given, **more):
            during.append([each for each in threading.enumerate() if isinstance(each, threading.Timer)])
            return super().arrange(*given, **more)

    def slow(local_rank, command):
        starting.set()
        time.sleep(0.5)
        return started([sys.executable, "-c", "input()"], os.environ, (), subprocess.PIPE)

    start = Start(number=1, sizes=(1,), nodes=(0,), port=free_port())
    with Interrupts() as signals, Watched([1], 0) as memory, _Job(options, 1, (), signals, None, None, memory) as job:
        job._spares._start = slow
        job._spares.prepare()
        assert starting.wait(LIMIT)
        ended = job._attempt(start, 1)
    assert ended == Ended() and during[0] == during[1]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked for in /proc")
def test_a_killed_launcher_takes_along_who_stands_by(launched, tmp_path):
    launcher, mark = launched("print('there', flush=True); time.sleep(600)"), f"mark-{tmp_path.name}"
    while "there" not in launcher.stdout.readline():
        assert launcher.poll() is None
    assert standing_by(mark)
    launcher.kill()
    deadline = time.monotonic() + LIMIT
    while standing_by(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not standing_by(mark)


def test_the_guard_ends_what_a_launcher_that_fails_has_left():
    """As one whose output nobody reads any more, in the middle of ending its workers."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        with pytest.raises(BrokenPipeError), Guard("no mark") as guard:
            guard.watch(process.pid)
            raise BrokenPipeError
        assert process.wait(LIMIT) == -15


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="variables are read in /proc")
def test_the_guard_finds_python_where_the_launcher_does_and_carries_no_mark(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setenv(MARK, "of the launch around")
    with Guard("no mark") as guard:
        environ = Path(f"/proc/{guard._process.pid}/environ").read_bytes().split(b"\0")
    assert b"LD_LIBRARY_PATH=/somewhere" in environ and not any(each.startswith(MARK.encode()) for each in environ)
