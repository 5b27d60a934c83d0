"""Copies in memory in one world after the other: threads in the place of processes, each as if on a machine of its own."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import jax
import numpy as np
import pytest
from test_complete_step import Coordinator

from axonml_jax.checkpoint import memory as complete_step
from axonml_jax.checkpoint import memory as copy_exchange
from axonml_jax.checkpoint import memory as refill
from axonml_jax.checkpoint.memory import MemoryCopies
from axonml_jax.launch.standby import HostMemory
from axonml_jax.mesh.environment import MEMORY

LIMIT = 60


class Meeting:
    """Where the threads of one world hear each other."""

    def __init__(self, size):
        self.size, self.barrier, self.heard = size, threading.Barrier(size), [None] * size


class Team:
    """What a process has of its job: as `checkpoint.team.Team`."""

    def __init__(self, meeting, rank):
        self._meeting, self.rank, self.size, self.leads = meeting, rank, meeting.size, rank == 0

    def tell_all(self, what, said):
        self._meeting.heard[self.rank] = json.dumps(said)
        self._meeting.barrier.wait(LIMIT)
        heard = [json.loads(each) for each in self._meeting.heard]
        self._meeting.barrier.wait(LIMIT)
        return heard

    def decide(self, what, act):
        return self.tell_all(what, act() if self.leads else None)[0]

    def mine(self, things):
        return things[self.rank :: self.size]


class State:
    """A run whose state is one number; what it holds of the whole is said by the run's name (`of`), which is the shard's."""

    def __init__(self, value=0.0):
        self.value = value

    def resting_arrays(self):
        return {"w": jax.device_put(np.full(4, self.value, np.float32), jax.devices()[0])}

    def take_resting(self, arrays):
        self.value = float(arrays["w"][0])


class Machines:
    """Machines of one process each, whose memory outlives the worlds that they are in."""

    def __init__(self, stack, count, client):
        self._client = client
        self._memory = [stack.enter_context(HostMemory([1] * count, node)) for node in range(count)]

    def world(self, nodes: str, shards: str, act: Callable, **environ: str):
        """What `act(copies, shard, team)` returns in every process of a world.

        Args:
          nodes: of the machines, in the order of ranks.
          shards: what each rank holds, a letter.
          act: what a process does.
          **environ: more of the launcher's variables.
        """
        meeting = Meeting(len(nodes))
        self._client.clear()

        def process(rank):
            memory = self._memory[int(nodes[rank])]
            memory.arrange([1] * len(nodes), rank)
            copies = MemoryCopies(2, {"NODE_RANK": str(rank), MEMORY: memory.of(0).text(), **environ})
            copies._team = copies._rounds.team = Team(meeting, rank)
            with closing(copies):
                return act(copies, shards[rank], copies._team)

        with ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(process, range(len(nodes))))


@pytest.fixture
def machines(monkeypatch):
    client = Coordinator()
    monkeypatch.setattr(complete_step, "coordinator_client", lambda: client)
    monkeypatch.setattr(copy_exchange, "own_addresses", lambda environ: ("127.0.0.1", "127.0.0.1"))
    monkeypatch.setattr(refill, "_PAUSE", 0.01)
    with ExitStack() as stack:
        yield lambda count: Machines(stack, count, client)


VALUES = {"a": 100.0, "b": 200.0, "c": 300.0}


def trains(*steps):
    """Going on from what there is, and making copies after some steps; returns the step and the state gone on from."""

    def act(copies, shard, team):
        run = State()
        start = copies.look(run, of=shard)
        if start is not None:
            assert copies.restore(run).step == start
            assert run.value == VALUES[shard] + start
            assert {each.shard.split()[1] for each in copies._own.look()} == {shard}  # room for the next two
        for step in steps:
            team.tell_all("step", None)
            run.value = VALUES[shard] + step
            assert copies.keep(step, run)
            copies._wait()
        return start

    return act


@pytest.mark.parametrize("steps", [(2, 4), (2, 4, 6)])
def test_a_machine_that_changes_its_place_goes_on_with_the_state_of_the_new_one(machines, steps):
    """Replicas of two machines, 0 1 and 2 3; 0 and 1 go, 3 and 2 take each other's place, and go back."""
    made, last = machines(4), steps[-1]
    assert made.world("0123", "abab", trains(*steps)) == [None] * 4
    assert made.world("32", "ab", trains()) == [last] * 2  # each has the state of the other's place in memory
    assert made.world("32", "ab", trains(8, 10, 12)) == [last] * 2
    assert made.world("23", "ab", trains(14)) == [12, 12]
    assert made.world("32", "ab", trains()) == [14, 14]


def test_what_is_kept_for_another_becomes_a_processs_own(machines):
    """The two swap their places: each has kept the other's copies."""
    made = machines(2)
    assert made.world("01", "ab", trains(2, 4)) == [None, None]
    assert made.world("10", "ab", trains(6, 8)) == [4, 4]
    assert made.world("01", "ab", trains()) == [8, 8]


def test_state_is_sent_again_where_it_did_not_come_and_else_all_stays(machines, monkeypatch):
    made, real, failures = machines(3), copy_exchange.send, iter([True] * 2)
    assert made.world("01", "ab", trains(2, 4, 6)) == [None, None]

    def send(place, token, purpose, *more):
        if purpose == copy_exchange.REFILL and next(failures, False):
            raise ConnectionResetError("it is gone")
        real(place, token, purpose, *more)

    monkeypatch.setattr(copy_exchange, "send", send)
    refused = []

    def fails(copies, shard, team):
        copies.look(State(), of=shard)
        with pytest.raises(
            OSError, match=r"(?s)process 1 did not get its state: .*it is gone.*stay in memory"
        ) as error:
            copies.restore(State())
        refused.append(str(error.value))

    failures = iter([True] * 3)
    made.world("02", "ab", fails)
    assert len(set(refused)) == 1
    failures = iter([True] * 2)
    assert made.world("02", "ab", trains(8)) == [6, 6]


def test_the_last_copies_come_though_their_keeper_is_ready_before(machines, monkeypatch):
    """Process 1 begins to send each copy when process 0 has nothing more to do; then the machine of process 1 is lost."""
    made, real = machines(3), copy_exchange.send

    def late(place, token, purpose, rank, *more):
        time.sleep(0.5 * rank)
        real(place, token, purpose, rank, *more)

    with monkeypatch.context() as patched:
        patched.setattr(copy_exchange, "send", late)
        assert made.world("01", "ab", trains(2, 4)) == [None, None]
    assert made.world("02", "ab", trains()) == [4, 4]


def test_a_process_that_no_longer_comes_is_waited_for_a_while(machines, monkeypatch, caplog):
    def fails(team, what, act):
        assert team.timeout == 60
        raise TimeoutError("process(es) [1] did not come")

    monkeypatch.setattr(copy_exchange, "tell_all_at_length", fails)
    assert machines(2).world("01", "ab", trains(2)) == [None, None]
    assert "may not be complete: process(es) [1] did not come" in caplog.text


def test_copies_that_are_too_much_after_a_restart_go_when_all_have_their_own(machines, monkeypatch):
    made, again = machines(2), {"AXONML_JAX_RESTART_COUNT": "1"}
    assert made.world("01", "ab", trains(2, 4)) == [None, None]

    def sizes(copies, shard, team):
        copies.look(State(), of=shard)
        return copies._known.sizes[0]

    [size, _] = made.world("01", "ab", sizes)
    monkeypatch.setattr("axonml_jax.checkpoint.memory.machine_memory", lambda: 6 * size)  # half: 3, of 4

    def alone(copies, shard, team):
        start = trains(6, 8)(copies, shard, team)
        assert copies._known.keepers == (None, None) and [each.size() for each in copies._others] == [0, 0]
        return start

    assert made.world("10", "ab", alone, **again) == [4, 4]  # each has kept what the other one needs now
    assert made.world("10", "ab", trains(), **again) == [8, 8]


def test_nobody_begins_anew_when_a_part_of_the_state_is_lost_twice(machines):
    made = machines(3)
    assert made.world("01", "ab", trains(2, 4, 6)) == [None, None]

    def looks(copies, shard, team):
        return copies.look(State(), of=shard), copies.lost

    assert made.world("12", "cb", looks) == [(None, 4)] * 2


def test_a_position_in_bytes_comes_back_from_memory_as_from_disk(machines):
    """Grain's iterators say where they are in bytes, by `get_state`, which copies keep as text."""

    class Grains:
        def __init__(self, place):
            self.place = place

        def get_state(self):
            return self.place

        def set_state(self, place):
            self.place = place

    def act(copies, shard, team):
        run, data = State(), Grains(b"start")
        if copies.look(run, of=shard) is not None:
            copies.restore(run, data=data)
        else:
            copies.keep(2, run, data=Grains(b"\x02\xff"))
            copies._wait()
        return data.place

    made = machines(1)
    assert made.world("0", "a", act) == [b"start"]
    assert made.world("0", "a", act) == [b"\x02\xff"]
