"""Supervision: whatever happens to a worker or to the launcher, everybody stops, the cause is told, nobody is left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from workers.launch import hearing_ctrl_c

from axonml_jax.__main__ import main
from axonml_jax.launch import workers as supervise

TIME_LIMIT = 30

PRELUDE = """
import os, pathlib, signal, subprocess, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["AXONML_JAX_RESTART_COUNT"])
def remember(pid):  # the test looks for these afterwards
    pathlib.Path("pids").mkdir(exist_ok=True)
    pathlib.Path("pids", str(pid)).touch()
remember(os.getpid())
"""
WITH_CHILDREN = """
remember(subprocess.Popen(["sleep", "600"]).pid)
remember(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)  # hides in a session of its own
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Write the workers' script; the test runs in its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONFAULTHANDLER", "")

    def write(*parts):
        (tmp_path / "work.py").write_text(PRELUDE + "".join(map(textwrap.dedent, parts)))
        return "work.py"

    yield write
    for pid in remembered():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launch(worker, capfd):
    """Launch in this process; returns the status, the output and the error output."""

    def launch(flags, *parts):
        status = main(["launch", *flags, worker(*parts)])
        return status, *capfd.readouterr()

    return launch


@pytest.fixture
def start(worker):
    """Launch in a process of its own that can be signalled; wait until every worker has begun."""
    started = []

    def start(num_workers, processes, *parts):
        command = [sys.executable, "-m", "axonml_jax", "launch", f"--nproc-per-node={num_workers}", worker(*parts)]
        with hearing_ctrl_c():
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        until(lambda: len(remembered()) >= num_workers * processes)
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def remembered():
    return [int(path.name) for path in Path("pids").glob("*")]


def living():
    """Those of the remembered processes that still run."""
    found = []
    for pid in remembered():
        with contextlib.suppress(OSError):
            if Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found


def until(condition):
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def test_workers_run_with_their_arguments_and_show_their_rank(worker, capfd):
    script = worker('print(sys.argv[1:], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])')
    assert main(["launch", "--nproc_per_node", "2", script, "--lr", "1"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[rank {rank}] ['--lr', '1'] 2 127.0.0.1" for rank in (0, 1)] and not err


def test_a_module_is_found_in_the_working_folder(worker, capfd):
    worker("print(__name__, sys.argv[1:])")
    assert main(["launch", "--module", "work", "-x"]) == 0
    assert capfd.readouterr().out == "[rank 0] __main__ ['-x']\n"


def test_lines_of_workers_never_mix_and_an_unfinished_last_line_is_shown(launch):
    write = 'for i in range(300): os.write(1, b"x" * 50); os.write(1, b"y" * 50 + b"\\n")\nos.write(1, b"end")'
    _, out, _ = launch(["--nproc-per-node=3"], write)
    lines = [line.split("] ")[1] for line in out.splitlines()]
    assert sorted(lines) == ["end"] * 3 + ["x" * 50 + "y" * 50] * 900


def test_a_failure_stops_everybody_and_its_rank_and_traceback_come_last(launch):
    start = time.monotonic()
    wait = "pathlib.Path(str(rank)).touch()\nwhile rank != 1: time.sleep(0.01)\n"
    wait += 'while not all(pathlib.Path(str(r)).exists() for r in range(3)): time.sleep(0.01)\nraise ValueError("boom")'
    status, _, err = launch(["--nproc-per-node=3"], WITH_CHILDREN, wait)
    assert status == 1 and time.monotonic() - start < 10
    assert "rank(s) 0, 2 were stopped" in err
    last = err[err.index("axonml-jax launch: rank 1 failed first: exit code 1") :]
    assert "Traceback" in last and last.endswith("    ValueError: boom\n")
    assert len(remembered()) == 9 and not living()


def test_who_does_not_listen_to_sigterm_is_killed_within_ten_seconds(launch, monkeypatch):
    assert supervise.FAILURE_GRACE + supervise._SETTLE < 9
    monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.5)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path('deaf').touch()\n"
    rest = "while rank == 0: time.sleep(1)\nwhile not pathlib.Path('deaf').exists(): time.sleep(0.01)\nsys.exit(7)"
    status, _, err = launch(["--nproc-per-node=2"], f"if rank == 0: {deaf}", rest)
    assert status == 7 and "rank 1 failed first: exit code 7" in err and not living()


def test_shared_memory_of_killed_workers_is_unlinked(launch, monkeypatch):
    """As that of a loader's workers, which hold the batches that they have made."""
    monkeypatch.setattr(supervise, "FAILURE_GRACE", 0.2)
    deaf = """
        from multiprocessing.shared_memory import SharedMemory
        held = SharedMemory(create=True, size=64)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("held").write_text(held.name)
        time.sleep(600)
    """
    fails = (
        "while not (pathlib.Path('held').exists() and pathlib.Path('held').read_text()): time.sleep(0.01)\nsys.exit(7)"
    )
    work = textwrap.indent(textwrap.dedent(deaf), "    ")
    status, _, _ = launch(["--nproc-per-node=2"], f"if rank == 0:{work}\n{fails}")
    assert status == 7 and not living() and not Path("/dev/shm", Path("held").read_text()).exists()


def test_a_killed_worker_is_named_with_its_signal(launch):
    status, _, err = launch(["--nproc-per-node=2"], "os.kill(os.getpid(), 9) if rank == 0 else time.sleep(600)")
    assert status == 128 + 9 and "rank 0 failed first: signal 9 (SIGKILL)" in err and "out-of-memory" in err
    assert not living()


def test_a_worker_that_only_lost_another_is_not_the_cause(launch):
    work = "if rank == 1: time.sleep(0.5); raise ValueError('boom')\nraise OSError('Connection closed by peer')"
    status, _, err = launch(["--nproc-per-node=2"], work)
    assert status == 1 and err.rstrip().endswith("ValueError: boom") and "rank 1 failed first" in err


def test_a_worker_that_ended_well_is_named_before_the_one_that_waited_for_it_in_vain(launch):
    work = "if rank == 0: time.sleep(1); raise TimeoutError('Timed out while waiting for the others')"
    status, _, err = launch(["--nproc-per-node=2"], work)
    assert status == 1
    assert err.index("rank(s) [1] had ended with exit code 0") < err.index("rank 0 failed first: exit code 1")


def test_a_worker_may_end_early_and_long_after_it_the_launcher_says_so(launch, monkeypatch):
    monkeypatch.setattr(supervise, "_LONELY", 0.2)
    status, out, err = launch(["--nproc-per-node=2"], "if rank == 0: time.sleep(1)\nprint('done')")
    assert status == 0 and out.count("done") == 2 and err.count("rank(s) [1] ended") == 1


def test_children_that_a_worker_leaves_behind_end_with_the_job(launch):
    status, _, _ = launch([], WITH_CHILDREN)
    assert status == 0 and len(remembered()) == 3 and not living()


def test_all_start_again_after_a_failure_on_another_port_with_a_count(launch):
    work = 'print(os.environ["MASTER_PORT"], restart, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)\n'
    work += 'pathlib.Path(f"{restart}-{rank}").touch()\nif restart < 2 and rank == 0:\n'
    work += '    while not pathlib.Path(f"{restart}-1").exists(): time.sleep(0.01)\n    sys.exit(3)\n'
    work += "time.sleep(600 * (restart < 2))"
    status, out, err = launch(["--nproc-per-node=2", "--max-restarts=2"], work)
    lines = [line.split()[2:] for line in out.splitlines()]
    assert status == 0 and "restart 1 of 2" in err and "restart 2 of 2" in err
    assert [counts for _, *counts in lines] == [["0", "0"]] * 2 + [["1", "1"]] * 2 + [["2", "2"]] * 2
    assert len({port for port, *_ in lines}) == 3


def test_restarts_come_to_an_end(launch):
    status, out, err = launch(["--max-restarts=1"], "print('try'); sys.exit(3)")
    assert status == 3 and out.count("try") == 2 and err.count("rank 0 failed first") == 2


def test_streams_go_to_files_to_the_console_or_both(launch):
    flags = ["--nproc-per-node=2", "--log-dir=logs", "--tee=0:3,1:2", "--redirects=1:1"]
    _, out, err = launch(flags, "print('out', rank); print('err', rank, file=sys.stderr)")
    (run,) = Path("logs").iterdir()
    kept = {str(path.relative_to(run)): path.read_text() for path in run.rglob("*.log")}
    assert kept == {f"attempt_0/{rank}/std{name}.log": f"{name} {rank}\n" for rank in (0, 1) for name in ("out", "err")}
    assert out == "[rank 0] out 0\n" and {"[rank 0] err 0", "[rank 1] err 1"} <= set(err.splitlines())
    assert str(run) in err


def test_a_log_on_a_full_disk_loses_lines_and_ends_no_job(capfd):
    reading, writing = os.pipe()
    outlet = supervise.Outlet(os.fdopen(reading, "rb"), "[rank 0] ", None, Path("/dev/full"))
    for line in (b"a step\n", b"another\n"):
        os.write(writing, line)
        outlet.pump()
    os.close(writing)
    outlet.pump()
    assert outlet.closed and outlet.last_lines() == ["a step", "another"]
    assert capfd.readouterr().err.count("cannot write to /dev/full (No space left on device)") == 1


def test_gloo_is_not_heard_on_the_console_unless_a_peer_is_missing(launch):
    said = "[Gloo] Rank 0 is connected to {} peer ranks. Expected number of connected peer ranks is : 1"
    lines = [said.format(1), "from me", said.format(0), f"see: {said.format(1)}"]
    status, out, _ = launch(["--nproc-per-node=1", "--log-dir=logs", "--tee=3"], f"print(*{lines}, sep='\\n')")
    assert status == 0 and out.splitlines() == [f"[rank 0] {line}" for line in lines[1:]]
    [log] = Path("logs").rglob("stdout.log")
    assert log.read_text().splitlines() == lines


def test_files_without_a_folder_and_a_taken_port_are_refused(launch):
    assert launch(["--tee=3"])[0] == 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, _, err = launch([f"--master-port={port}"])
    assert status == 2 and f"127.0.0.1:{port}" in err and "--master-port" in err and not remembered()


SAVING = """
def save(*_):
    print("saving", flush=True)
    if sys.argv[-1] != "for ever": sys.exit()
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, save)
remember(10**7 + rank)  # no process has this id: it only says that signals can come
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_reaches_everybody_and_workers_may_save(start, number):
    launcher = start(2, 4, WITH_CHILDREN, SAVING)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=TIME_LIMIT)
    assert launcher.returncode == 128 + number and f"stopped by {number.name}; rank(s) 0, 1 were stopped" in err
    assert sorted(out.splitlines()) == ["[rank 0] saving", "[rank 1] saving"]
    assert len(remembered()) == 8 and not living()


def test_a_second_ctrl_c_ends_at_once_who_takes_too_long(start):
    launcher = start(2, 2, 'sys.argv.append("for ever")', SAVING)
    launcher.send_signal(signal.SIGINT)
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[rank 0] saving\n", "[rank 1] saving\n"]
    begin = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=2 * TIME_LIMIT)
    assert launcher.returncode == 130 and not living()
    assert time.monotonic() - begin < 15  # it would have had 30 s


def test_a_killed_launcher_takes_its_workers_with_it(start):
    launcher = start(2, 3, WITH_CHILDREN, "time.sleep(600)")
    launcher.kill()
    until(lambda: not living())


def test_a_reader_that_goes_away_ends_the_job(start):
    launcher = start(1, 1, "while True: print('x'); time.sleep(0.01)")
    launcher.stdout.close()
    launcher.wait(TIME_LIMIT)
    assert launcher.returncode == 128 + signal.SIGPIPE and not living()
