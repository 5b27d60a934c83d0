"""Machines that come and go, without processes: who makes up the next world, and what launchers say."""

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections import Counter

import pytest
from test_launcher_nodes import HELLO, Silence
from workers.launch import free_port

from axonml_jax.checkpoint.memory import Generation
from axonml_jax.config.config import ConfigError
from axonml_jax.launch import launcher
from axonml_jax.launch import machines as nodes
from axonml_jax.launch.machines import SUBJECT, Nodes, Over, Start, regrouped
from axonml_jax.launch.options import read_options
from axonml_jax.launch.standby import HostMemory
from axonml_jax.launch.workers import Ended, Failure, Supervisor
from axonml_jax.mesh.join import Talk, readable

LIMIT = 20


def test_whoever_stays_in_a_world_keeps_its_place_within_its_group():
    draw = random.Random(0)
    for _ in range(500):
        unit = draw.randint(1, 3)
        before = regrouped((), {0, *draw.sample(range(1, 9), draw.randint(unit - 1, 8))}, unit)
        present = {0, *draw.sample(range(1, 9), draw.randint(unit - 1, 8))}
        after = regrouped(before, present, unit)
        assert after[0] == 0 and len(after) == len(present) // unit * unit and max(Counter(after).values()) == 1
        places = [
            node for place, node in enumerate(after) if node in before and before.index(node) % unit == place % unit
        ]
        groups = len(after) // unit
        kept = [min(groups, sum(node in present for node in before[place::unit])) for place in range(unit)]
        assert len(places) >= sum(kept)  # no part of the state is lost that somebody has


class Launchers:
    """Launchers of a job as threads would have them: every one is polled by hand."""

    def __init__(self, stack, *flags):
        self._stack, self._flags, self.port, self.target = stack, flags, free_port(), __file__

    def come(self, *ranks, to=()):
        """Several launchers, let in by those that are there."""
        made = {}

        def enter(rank):
            given = [*self._flags, f"--node-rank={rank}", f"--rdzv-endpoint=127.0.0.1:{self.port}", __file__]
            silence = self._stack.enter_context(contextlib.closing(Silence()))
            made[rank] = Nodes(read_options(given, {}), 2, silence).__enter__()

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + LIMIT
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(0.01)
            for each in to:
                each.poll(False)
        for each in made.values():
            self._stack.callback(each.__exit__)
        return [made[rank] for rank in ranks]


def starts(number, *launchers):
    """What every launcher hears of the next attempt: a Start, or why there is none."""
    found = {}

    def start(each):
        try:
            found[each] = each.start(number, 30000 + number)
        except Over as over:
            found[each] = over.status

    threads = [threading.Thread(target=start, args=(each,)) for each in launchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return [found.get(each) for each in launchers]


def until(check):
    deadline = time.monotonic() + LIMIT
    while not check() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert check()


@pytest.fixture
def job():
    with contextlib.ExitStack() as stack:
        yield lambda *flags: Launchers(stack, *flags)


def test_a_lost_machine_leaves_the_job_and_another_one_joins(job):
    made = job("--nnodes=1:3", "--last-call=60")
    head, one, two = made.come(0, 1, 2)
    assert starts(0, head, one, two) == [Start(0, 30000, (0, 1, 2), (2, 2, 2))] * 3
    assert not head.poll(False) and not head.changed
    one.__exit__()  # as if it were killed
    until(lambda: head.poll(False) and two.poll(False))
    assert head.changed and two.changed and not head.gently
    both = [threading.Thread(target=each.verdict, args=(None,)) for each in (head, two)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(LIMIT)
    assert starts(1, head, two) == [Start(1, 30001, (0, 2), (2, 2))] * 2
    [again] = made.come(1, to=(head, two))
    until(lambda: head.poll(False) and two.poll(False))
    assert head.gently and two.gently and head.changed and two.changed
    assert starts(2, head, two, again) == [Start(2, 30002, (0, 2, 1), (2, 2, 2))] * 3
    assert not head.poll(False) and not head.lost


def test_groups_wait_until_they_are_filled_and_hear_when_the_job_is_over(job):
    made = job("--nnodes=2:4", "--node-unit=2", "--last-call=0.2")
    head, one, two = made.come(0, 1, 2)
    found = starts(0, head, one)
    assert found == [Start(0, 30000, (0, 1), (2, 2))] * 2
    waits = threading.Thread(target=lambda: found.append(starts(0, two)[0]))
    waits.start()
    time.sleep(0.3)
    assert waits.is_alive() and not head.poll(False)  # no group can be filled
    head.over(3)
    waits.join(LIMIT)
    assert found[-1] == 3


def test_a_last_call_may_last_longer_than_the_time_in_which_enough_must_come(job, monkeypatch):
    monkeypatch.setattr(nodes, "GATHER_TIMEOUT", 0.2)
    begin = time.monotonic()
    [head] = job("--nnodes=1:2", "--last-call=1.5").come(0)
    assert time.monotonic() - begin > 1.4 and starts(0, head) == [Start(0, 30000, (0,), (2,))]


def test_a_job_of_many_attempts_takes_few_ports(job):
    given = ["--nnodes=1:2", "--node-rank=0", "--rdzv-endpoint=a:29500", __file__]
    made = launcher._Job(read_options(given, {}), 2, (), None, None, None, None)
    ports = [made._port(number) for number in range(100)]
    assert set(ports) == set(range(29501, 29517)) and all(one != other for one, other in itertools.pairwise(ports))


def test_too_few_machines_wait_for_others_and_give_up(job, monkeypatch):
    made = job("--nnodes=2:3", "--last-call=0.1")
    head, one = made.come(0, 1)
    assert starts(0, head, one) == [Start(0, 30000, (0, 1), (2, 2))] * 2
    one.leave("asked to")
    until(lambda: head.poll(False))
    monkeypatch.setattr(nodes, "GATHER_TIMEOUT", 0.3)
    assert starts(1, head) == [1]
    assert "1 machine(s) are there, and --nnodes asks for 2: no other came within 0.3 s" in head.lost


def test_machines_that_come_are_checked_and_a_wrong_one_harms_nobody(job):
    made = job("--nnodes=1:2", "--last-call=0")
    [head] = made.come(0)
    assert starts(0, head) == [Start(0, 30000, (0,), (2,))]
    silence, refusals = Silence(), []

    def call(*flags):
        options = read_options([*flags, "--node-rank=1", f"--rdzv-endpoint=127.0.0.1:{made.port}", __file__], {})
        with pytest.raises(ConfigError) as error:
            Nodes(options, 3, silence).__enter__()
        refusals.append(str(error.value))

    for flags in (["--nnodes=1:2"], ["--nnodes=2"]):
        calling = threading.Thread(target=call, args=flags)
        calling.start()
        while calling.is_alive():
            assert not head.poll(False)
    silence.close()
    assert "--nproc-per-node is 3 on node 1 and 2 on node 0" in refusals[0]
    assert "--nnodes is 2 on node 1 and 1:2 on node 0" in refusals[1] and not head.changed


def test_whoever_is_refused_hears_why_and_is_hung_up_on(job):
    made = job("--nnodes=1:2", "--last-call=0")
    [head] = made.come(0)
    starts(0, head)
    talk = Talk(b"", SUBJECT, calls=True)
    with socket.create_connection(("127.0.0.1", made.port), timeout=LIMIT) as caller:
        said = lambda: until(lambda: head.poll(False) or readable([caller], 0)) or caller.recv(2**12)
        caller.sendall(talk.greeting)
        assert talk.greeted(said())
        caller.sendall(talk.sealed(HELLO | {"max-restarts": 7}))
        assert b"--max-restarts is 7 on node 1 and 0 on node 0" in said()
        assert caller.recv(1) == b""


def test_only_a_launcher_that_leaves_asks_the_others_to_end_gently(job):
    head, one = job("--nnodes=1:2", "--last-call=60").come(0, 1)
    starts(0, head, one)
    one.stopping()
    until(lambda: head.poll(False) and head.gently and one.poll(False) and one.gently)
    one.leave("stopped by SIGTERM")
    failure = Failure(0, "here", 1, 143, 1.0, ())
    assert head.verdict(failure) == failure and head.changed
    assert starts(1, head) == [Start(1, 30001, (0,), (2,))]


class Left:
    """A worker that has ended."""

    rank, pid, outlets = 0, 10**8, ()

    def __init__(self, returncode):
        self.returncode = returncode


@pytest.mark.parametrize(("returncode", "attempts"), [(0, 1), (143, 2)])
def test_a_job_whose_workers_all_ended_with_0_is_over_when_a_machine_comes(job, returncode, attempts, monkeypatch):
    made = job("--nnodes=1:2", "--last-call=0")
    [head] = made.come(0)
    given = ["--nnodes=1:2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{made.port}", __file__]
    seen = []

    def attempt(self, start, failures):
        seen.append(start.number)
        if start.number:
            return Ended()
        head._regroup()  # a machine has come, and its launcher's word is faster than the end of the workers
        workers = [Left(0), Left(returncode)]
        return Supervisor(workers, self._interrupts, "nobody", 0.1, head).watch()

    monkeypatch.setattr(launcher._Job, "_attempt", attempt)
    with contextlib.closing(Silence()) as silence:
        assert launcher._Job(read_options(given, {}), 2, (), silence, head, None, None).run() == 0
    assert seen == list(range(attempts))


def test_a_job_is_over_when_the_workers_of_every_machine_ended_with_0(job):
    head, one = job("--nnodes=1:2", "--last-call=60").come(0, 1)
    for number, well in enumerate([(True, True), (True, False)]):
        starts(number, head, one)
        threads = [
            threading.Thread(target=each.verdict, args=(None, mine))
            for each, mine in zip((head, one), well, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert head.finished_well == one.finished_well == all(well)


def test_memory_goes_with_a_worker_into_the_next_world():
    with HostMemory([1, 1], 0) as memory:
        first = memory.of(0)
        os.pwrite(first.own[0], b"mine", 0)
        os.pwrite(first.others[1][0], b"another's", 0)
        assert not memory.arrange([1], 0) and memory.of(0).own == first.own
        assert memory.of(0).others == {-1: first.others[1]}  # nobody's any more, and still read
        assert not memory.arrange([1, 1, 1], 1) and memory.of(0).others == {0: first.others[1]}
        assert memory.arrange([3, 1], 1) and len(memory.of(0).others) == 3  # more files than before
        assert os.pread(first.own[0], 4, 0) == b"mine"
        memory.arrange([1, 1], 0, keep=False)
        assert Generation(first.own[0]).size() == Generation(first.others[1][0]).size() == 0
