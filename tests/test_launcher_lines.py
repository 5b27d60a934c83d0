"""Launchers that stand still are found, and those that only wait are not: every launcher says something once a second."""

import contextlib
import socket
import time

import pytest
from test_launcher_nodes import Silence
from test_machines import Launchers, Left, starts, until

from axonml_jax.launch import machines as connection
from axonml_jax.launch.machines import Connection, Start
from axonml_jax.launch.workers import Supervisor
from axonml_jax.mesh.join import Talk, readable

WORDS = r"the launcher of node 1 has said nothing for 1 s"


@pytest.fixture
def pair():
    """Both ends of a line."""
    talks = Talk(b"", "a test", calls=True), Talk(b"", "a test", calls=False)
    assert talks[0].greeted(talks[1].greeting) and talks[1].greeted(talks[0].greeting)
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        ends = stack.enter_context(socket.create_connection(server.getsockname())), server.accept()[0]
        yield [
            stack.enter_context(contextlib.closing(Connection(end, talk)))
            for end, talk in zip(ends, talks, strict=True)
        ]


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE", 1.0)
    monkeypatch.setattr("axonml_jax.launch.machines.SILENCE", 1.0)
    monkeypatch.setattr(connection, "_BEAT", 0.1)
    with contextlib.ExitStack() as stack:
        yield lambda *flags: Launchers(stack, *flags)


def test_a_line_is_silent_unless_the_other_end_beats_and_its_beats_are_no_messages(pair, monkeypatch):
    one, other = pair
    monkeypatch.setattr(connection, "SILENCE", 0.3)
    monkeypatch.setattr(connection, "_BEAT", 0.05)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        one.beat()
        assert other.messages() == [] and not other.silent and not other.cut
    one.send({"alarm": 1})
    until(lambda: other.silent)
    one.send({"alarm": 2})
    time.sleep(0.1)
    other.beat()  # hears it, and keeps it
    assert not other.silent and other.messages() == [{"alarm": 1}, {"alarm": 2}]


def test_a_line_without_a_seal_cuts_the_connection_and_says_nothing(pair):
    one, other = pair
    one._connection.sendall(b'{"alarm": 1}\n')
    assert readable([other], 10) and other.messages() == [] and other.cut


def test_who_stands_still_does_not_hold_up_who_beats(pair, monkeypatch):
    one, other = pair
    monkeypatch.setattr(connection, "_BEAT", -1.0)
    for line in pair:  # full soon: the kernel hangs up on who takes nothing for ten seconds
        line._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        line._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    begin = time.monotonic()
    while one._has_room() and time.monotonic() < begin + 30:
        one.beat()
    for _ in range(100):
        one.beat()
    assert not one.cut and not one._has_room() and time.monotonic() - begin < 30
    assert other.messages() == [] and not other.cut


def beating(one, seconds):
    """A launcher that only waits for its workers' end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one.beat()
        time.sleep(0.02)
        yield


@pytest.mark.slow
def test_a_machine_whose_launcher_stands_still_leaves_a_job_whose_machines_come_and_go(job, capsys):
    head, one = job("--nnodes=1:2", "--last-call=60").come(0, 1)
    starts(0, head, one)
    assert not any(head.poll(False) for _ in beating(one, 2.0))
    until(lambda: head.poll(False))
    assert head.changed and WORDS in capsys.readouterr().err
    assert starts(1, head) == [Start(1, 30001, (0,), (2,))]


def test_the_others_end_without_a_node_0_that_stands_still(job):
    head, one = job("--nnodes=1:2", "--last-call=60").come(0, 1)
    starts(0, head, one)
    until(lambda: one.poll(False))
    assert "node 0 has said nothing" in one.lost


def test_of_a_fixed_number_of_machines_one_that_stands_still_is_waited_for_until_the_workers_have_ended(job):
    head, one = job("--nnodes=2").come(0, 1)
    starts(0, head, one)
    time.sleep(1.2)
    assert not head.poll(False) and not head.lost
    assert head.verdict(None) is None and WORDS in head.lost


class Slow(Left):
    """A worker that takes its time to end."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    @property
    def returncode(self):
        return 0 if time.monotonic() > self._end else None


def test_a_launcher_beats_while_its_workers_end():
    class Others:
        beats = 0

        def beat(self):
            self.beats += 1

    others = Others()
    with contextlib.closing(Silence()) as silence, Supervisor([Slow(0.5)], silence, "nobody", 5.0, others):
        pass
    assert others.beats >= 3
