"""Which copies in memory all processes have, asked in any order: one step is left that all have."""

import random
import threading
from contextlib import closing

import jax
import jax.numpy as jnp
import pytest

from axonml_jax.checkpoint import memory as complete_step
from axonml_jax.checkpoint.memory import Members, MemoryCopies, OwnCopies, Post, agree, own_addresses, steps_of
from axonml_jax.launch.standby import HostMemory
from axonml_jax.mesh.environment import MEMORY
from axonml_jax.mesh.join import ASKED


class Coordinator:
    """One that lets other processes act before it answers."""

    def __init__(self):
        self.values, self.counts, self.meanwhile, self.lock = {}, {}, lambda: None, threading.Lock()

    def clear(self):
        self.values.clear()
        self.counts.clear()

    def key_value_increment(self, key, increment):
        with self.lock:
            found = self.counts[key] = self.counts.get(key, 0) + increment
        if not increment:
            self.meanwhile()
        return found

    def key_value_set(self, key, value):
        with self.lock:
            if key in self.values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.values[key]


class Run:
    def resting_arrays(self):
        return {"w": ZEROS}


ZEROS = jnp.zeros(4)


class Process:
    """One that makes copies as it comes to them, and finishes them when it is told to."""

    def __init__(self, rank, size, environ):
        self.copies, self.step, self.gate, self.asks = MemoryCopies(2, environ), 0, None, False
        self.copies._team.size, self.copies._team.rank = size, rank
        self.copies._members = Members((0,) * size, tuple("abc"[:size]), (16,) * size)
        self.begin, self.copies._own.begin = self.copies._own.begin, self.begins

    def begins(self, *args):
        finish, self.gate = self.begin(*args), threading.Event()

        def finishes(gate=self.gate):
            gate.wait()
            return finish()

        return finishes

    def goes_on(self):
        self.step, self.asks = self.step + 2, True
        self.copies.keep(self.step, Run())
        self.asks = False

    def finishes(self):
        if self.gate is not None:
            self.gate.set()
            self.copies._wait()

    @property
    def found(self):
        return steps_of(OwnCopies(self.copies._own.generations).look())


@pytest.fixture
def processes(monkeypatch):
    made = []

    def processes(size):
        client, memory = Coordinator(), HostMemory([size], 0)
        memory.__enter__()
        monkeypatch.setattr(complete_step, "coordinator_client", lambda: client)
        found = [Process(r, size, {"NODE_RANK": "0", MEMORY: memory.of(r).text()}) for r in range(size)]
        made.append((memory, found))
        return client, found

    yield processes
    for memory, found in made:
        for each in found:
            each.finishes()
        memory.__exit__(None, None, None)


def newest(everyone):
    """The step that all would go on from if they died now."""
    shards = "abc"[: len(everyone)]
    found = [{shard: steps for steps in p.found.values()} for shard, p in zip(shards, everyone, strict=True)]  # noqa: B035
    agreed = agree(shards, found)
    return agreed and agreed.step


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_any_order_one_step_is_left_that_all_have(processes, size):
    progress = 0
    for seed in range(40):
        numbers, (client, everyone) = random.Random(seed), processes(size)

        def act(numbers=numbers, everyone=everyone):
            free = [each for each in everyone if not each.asks]
            if free:
                who = numbers.choice(free)
                numbers.choice([who.goes_on, who.finishes, who.finishes])()

        client.meanwhile = lambda numbers=numbers, act=act: numbers.random() < 0.5 and act()
        for _ in range(30 * size):
            act()
            known = [each.copies._rounds.complete for each in everyone if each.copies._rounds.complete is not None]
            if known:
                step = newest(everyone)
                assert step is not None and step >= max(known), (seed, [each.found for each in everyone])
        progress += len(known)
    assert progress > 20


def test_who_asks_first_decides_for_all(processes):
    """The second has not told of 4 when the first comes to 6: nobody copies 6, the second either, which has told meanwhile."""
    _, (first, second) = processes(2)
    for _ in range(2):
        for each in (first, second):
            each.goes_on()
        first.finishes()
        if first.step == 2:
            second.finishes()
    first.goes_on()
    second.finishes()
    second.goes_on()
    assert first.copies._rounds.complete == second.copies._rounds.complete == 2 and newest([first, second]) == 4
    assert first.copies._rounds.skipped == second.copies._rounds.skipped == 1
    for each in (first, second):
        each.goes_on()
    assert first.copies._rounds.complete == second.copies._rounds.complete == newest([first, second]) == 4


def test_a_slow_process_has_the_others_make_fewer_copies_and_all_have_the_same(processes, caplog):
    """The second is ready with a copy after the next one is due; then after ten more, which is said."""
    _, (first, second) = processes(2)

    def both_go_on():
        first.goes_on()
        second.goes_on()

    for begun in (2, 6, 10):
        both_go_on()
        first.finishes()
        both_go_on()
        second.finishes()
        assert (
            newest([first, second]) == begun
            and first.copies._rounds.skipped == second.copies._rounds.skipped == (begun + 2) // 4
        )
    assert first.copies._rounds.complete == second.copies._rounds.complete == 6 and not caplog.records
    for _ in range(11):
        both_go_on()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("10 copies of the state in memory were left out in a row: that of step 14 is not ready")
    first.finishes()
    second.finishes()
    assert newest([first, second]) == 14


def test_alone_too_a_copy_counts_only_when_it_is_finished(processes):
    _, [alone] = processes(1)
    alone.goes_on()
    alone.finishes()
    begin = alone.copies._own.begin

    def spoiled(*args):
        begin(*args)
        return lambda: (_ for _ in ()).throw(OSError("no memory"))

    alone.copies._own.begin = spoiled
    alone.goes_on()
    alone.copies._wait()
    alone.copies._own.begin = begin
    alone.goes_on()
    assert alone.copies._rounds.complete == newest([alone]) == 2


def test_the_others_are_told_an_address_that_reaches_this_machine(monkeypatch):
    variables = {"MASTER_ADDR": "node0", "MASTER_PORT": "29501", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    monkeypatch.setenv(ASKED, "0.0.0.0:29501")
    listens, reached = own_addresses({**variables, "NODE_RANK": "0"})
    with closing(Post(listens, b"token", reached)) as post:
        assert listens == "0.0.0.0" and post.address.startswith("node0:")
    monkeypatch.delenv(ASKED)
    assert own_addresses({**variables, "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1"}) == ("127.0.0.1", "127.0.0.1")
