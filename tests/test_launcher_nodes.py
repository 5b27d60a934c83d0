"""Several machines: their launchers (here on one) gather, refuse what does not fit, and stop and restart together."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from workers.launch import free_port, hearing_ctrl_c
from workers.strangers import SPOKEN, STRANGERS, stranger

from axonml_jax.config.config import ConfigError
from axonml_jax.launch import machines as nodes
from axonml_jax.launch.machines import Nodes, is_news
from axonml_jax.launch.options import read_options
from axonml_jax.mesh.join import TOKEN

TIME_LIMIT = 40
WORK = """
import os, pathlib, sys, time
rank, restart = os.environ["RANK"], os.environ["AXONML_JAX_RESTART_COUNT"]
names = ["WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"]
print(*(os.environ[name] for name in names), os.environ["MASTER_PORT"], restart, flush=True)
pathlib.Path(f"began-{restart}-{rank}").touch()
while len(list(pathlib.Path(".").glob(f"began-{restart}-*"))) < 3: time.sleep(0.01)
"""


@pytest.fixture
def launchers(tmp_path):
    """Start one launcher per list of flags, all at one address; every one ends with the test."""
    started, port = [], free_port()

    def launchers(work, *flags, ready=True):
        (tmp_path / "work.py").write_text(WORK * ready + work)
        for node, more in enumerate(flags):
            known = [f"--node-rank={node}", f"--nnodes={len(flags)}", f"--rdzv-endpoint=127.0.0.1:{port}"]
            command = [sys.executable, "-m", "axonml_jax", "launch", *known, *more, "work.py"]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            with hearing_ctrl_c():
                started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        return port, started

    yield launchers
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def ends(started, limit=TIME_LIMIT):
    outputs = [launcher.communicate(timeout=limit) for launcher in started]
    return [(launcher.returncode, *output) for launcher, output in zip(started, outputs, strict=True)]


def test_machines_of_unequal_size_restart_together_and_agree_on_the_cause(launchers):
    work = "if restart == '0':\n    if rank == '2': raise ValueError('boom')\n    time.sleep(600)"
    port, started = launchers(work, ["--nproc-per-node=2", "--max-restarts=1"], ["--max-restarts=1"])
    (first, first_out, first_err), (second, second_out, second_err) = ends(started)
    assert (first, second) == (0, 0), first_err + second_err
    said = sorted(line.split("] ")[1].split() for line in (first_out + second_out).splitlines())
    place = {"0": ["0", "0"], "1": ["1", "0"], "2": ["0", "1"]}  # rank: local rank, node
    wanted = [["3", rank, *place[rank], str(port + 1 + n), str(n)] for rank in place for n in (0, 1)]
    assert said == sorted(wanted)
    for error in (first_err, second_err):
        assert "rank 2 failed first: exit code 1" in error and "ValueError: boom" in error and "restart 1 of 1" in error


def test_a_killed_launcher_stops_the_other_machines(launchers, tmp_path):
    _, started = launchers("time.sleep(600)", ["--nproc-per-node=2", "--max-restarts=3"], ["--max-restarts=3"])
    deadline = time.monotonic() + TIME_LIMIT
    while len(list(tmp_path.glob("began-0-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    start = time.monotonic()
    started[1].kill()
    status, _, error = ends(started[:1])[0]
    assert status == 1 and time.monotonic() - start < 10
    assert "rank(s) 0, 1 were stopped" in error and "the launcher of node 1 has gone" in error


class Silence:
    """A launcher's signals, of which none come."""

    def __init__(self):
        self.received = []
        self._ends = socket.socketpair()

    def fileno(self):
        return self._ends[0].fileno()

    def drain(self):
        pass

    def close(self):
        for end in self._ends:
            end.close()


def gather(monkeypatch, *flags, timeout=20.0, first=lambda port: None):
    """The sizes that every launcher hears of, or its refusal; launchers are threads here. `first` comes after node 0."""
    monkeypatch.setattr(nodes, "GATHER_TIMEOUT", timeout)
    port, results = free_port(), {}

    def enter(index, given):
        options = read_options([*given, f"--rdzv-endpoint=127.0.0.1:{port}", __file__], {})
        try:
            with (
                contextlib.closing(Silence()) as silence,
                Nodes(options, int(options.nproc_per_node), silence) as entered,
            ):
                results[index] = entered.sizes
        except ConfigError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=enter, args=pair) for pair in enumerate(flags)]
    for thread in threads:
        thread.start()
        first(port)
        first = lambda port: None
    for thread in threads:
        thread.join(TIME_LIMIT)
    return [results[index] for index in range(len(flags))]


def test_launchers_learn_the_sizes_of_all_machines(monkeypatch):
    flags = [
        ["--nnodes=3", f"--node-rank={node}", f"--nproc-per-node={size}"] for node, size in ((2, 5), (0, 1), (1, 3))
    ]
    assert gather(monkeypatch, *flags) == [[1, 3, 5]] * 3


@pytest.mark.parametrize(
    "node, whom", [(0, "the launchers of the other machines"), (1, r"node 0's launcher at 127\.0\.0\.1:\d+")]
)
def test_a_launcher_that_waits_says_for_whom(monkeypatch, capsys, node, whom):
    monkeypatch.setattr(nodes, "QUIET", 0.1)
    (said,) = gather(monkeypatch, ["--nnodes=2", f"--node-rank={node}"], timeout=1.0)
    assert "--node-rank from 0" in said
    assert len(re.findall(f"launch: waiting for {whom}, up to 1 s\n", capsys.readouterr().err)) == 1


MISFITS = {
    "restarts": (["--nnodes=2", "--node-rank=1", "--max-restarts=1"], "--max-restarts is 1 on node 1 and 0 on node 0"),
    "machines": (["--nnodes=3", "--node-rank=1"], "--nnodes is 3 on node 1 and 2 on node 0"),
    "too many": (["--nnodes=3", "--node-rank=2"], "--nnodes is 3 on node 2 and 2 on node 0"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_launchers_that_do_not_fit_together_all_refuse(case, monkeypatch):
    other, words = MISFITS[case]
    for refusal in gather(monkeypatch, ["--nnodes=2", "--node-rank=0"], other):
        assert words in refusal and "--node-rank from 0" in refusal


def test_two_launchers_of_one_rank_and_missing_ones_are_named(monkeypatch):
    same = ["--nnodes=3", "--node-rank=1"]
    said = gather(monkeypatch, ["--nnodes=3", "--node-rank=0"], same, same)
    assert all("two launchers have --node-rank 1" in refusal for refusal in said)
    said = gather(monkeypatch, ["--nnodes=4", "--node-rank=0"], ["--nnodes=4", "--node-rank=2"], timeout=0.5)
    assert all("node(s) [1, 3] never called within 0.5 s" in refusal for refusal in said)


PAIR = (["--nnodes=2", "--node-rank=0"], ["--nnodes=2", "--node-rank=1", "--nproc-per-node=3"])
HELLO = {"node": 1, "size": 9, "nnodes": 2, "min-nodes": 2, "node-unit": 1, "max-restarts": 0}
HELLO |= {"program": "0" * 64, "arguments": "1" * 64, "versions": "jax 0.12.0"}


@pytest.mark.slow
def test_what_strangers_say_ends_no_gathering(monkeypatch, caplog):
    with contextlib.ExitStack() as stack:
        more = [dict(said=said, subject="launchers") for said in SPOKEN]
        ways = [*(dict(said=said) for said in STRANGERS), *more, dict(said=HELLO, subject="roll call")]
        come = lambda port: [stack.enter_context(stranger(port, **way)) for way in ways]
        assert gather(monkeypatch, *PAIR, first=come) == [[1, 3]] * 2
    assert "ignored a caller at 127.0.0.1:" in caplog.text and "further ones are ignored without a word" in caplog.text


def test_only_who_has_the_token_is_heard(monkeypatch, caplog):
    monkeypatch.setenv(TOKEN, "hush")
    with contextlib.ExitStack() as stack:
        come = lambda port: [
            stack.enter_context(stranger(port, HELLO, subject="launchers", token=token)) for token in (b"guessed", b"")
        ]
        assert gather(monkeypatch, *PAIR, first=come) == [[1, 3]] * 2
    assert f"does not carry the seal of {TOKEN}" in caplog.text and "hush" not in caplog.text
    tokens = [b"one", b"other"]
    monkeypatch.setattr(nodes, "job_token", tokens.pop)
    first, second = gather(monkeypatch, *PAIR, timeout=1.0)
    assert "node(s) [1] never called" in first and f"has every machine the same {TOKEN}" in second


FAILURE = {"rank": 1, "host": "a", "pid": 2, "returncode": -9, "seconds": 1.5, "lines": ["boom"]}
ENDED = {"ended": 0, "node": 1, "well": False}
START = {"start": 1, "port": 29501, "nodes": [1, 0], "sizes": [4, 4]}
NEWS = [
    ({"alarm": 0}, True),
    ({"alarm": [0]}, False),
    (START, True),
    (START | {"port": "29501"}, False),
    (START | {"nodes": [1, 1]}, False),
    (START | {"nodes": [0, 2]}, False),
    (START | {"sizes": [1]}, False),
    (START | {"sizes": [1, 0]}, False),
    ({"start": 1}, False),
    ({"regroup": 2}, True),
    ({"regroup": -1}, False),
    ({"leaving": 0}, True),
    ({"gone": 1, "why": "cut"}, True),
    ({"gone": 2, "why": "cut"}, False),
    ({"gone": 1}, False),
    ({"over": 3}, True),
    ({"over": 256}, False),
    ({"leave": "why"}, True),
    ({"leave": None}, False),
    (ENDED | {"failure": None}, True),
    (ENDED | {"failure": FAILURE}, True),
    (ENDED | {"node": 2, "failure": None}, False),
    (ENDED | {"well": 1, "failure": None}, False),
    (ENDED, False),
    (ENDED | {"failure": FAILURE | {"lines": "boom"}}, False),
    (ENDED | {"failure": FAILURE | {"more": 1}}, False),
    ({"else": 1}, False),
]


@pytest.mark.parametrize(("message", "known"), NEWS)
def test_what_launchers_tell_each_other_is_checked(message, known):
    assert is_news(message, 2) == known


def test_nothing_is_started_before_all_launchers_are_there(launchers, tmp_path):
    port, started = launchers("", [], [])
    started[1].kill()
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:  # until node 0 listens
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            break
        time.sleep(0.05)
    time.sleep(0.3)
    assert not list(tmp_path.glob("began-*"))
    started[0].send_signal(signal.SIGINT)
    status, _, error = ends(started[:1])[0]
    assert status == 130 and "waiting for the other machines" in error
