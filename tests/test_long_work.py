"""Copies take as long as they take, and no longer: processes wait for one that works, and no request waits for ever."""

import os
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3_stand_in import StandIn

from axonml_jax.checkpoint import format as long_work


@pytest.mark.slow
def test_all_wait_as_long_as_the_main_process_works(monkeypatch):
    limit, barrier, said = 1.5, threading.Barrier(2), []

    class Half:
        size = 2

        def __init__(self, leads):
            self.leads = leads

        def decide(self, what, act):
            if self.leads:
                said.append(act())
            barrier.wait(limit)
            heard = said[-1]
            barrier.wait(limit)
            return heard

    monkeypatch.setattr(long_work, "_MEET", 0.1)
    work = lambda: time.sleep(2 * limit) or "done"
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda leads: long_work.decide_at_length(Half(leads), "work", work), (True, False)))
    assert found == ["done", "done"]


def test_all_wait_as_long_as_any_of_them_works(monkeypatch):
    limit, barrier, said = 1.0, threading.Barrier(3), [None] * 3

    class Third:
        size = 3

        def __init__(self, rank):
            self.rank = rank

        def tell_all(self, what, mine):
            said[self.rank] = mine
            barrier.wait(limit)
            heard = list(said)
            barrier.wait(limit)
            return heard

    monkeypatch.setattr(long_work, "_MEET", 0.1)

    def works(rank):
        return long_work.tell_all_at_length(Third(rank), "work", lambda: time.sleep(2 * limit * (rank == 1)) or rank)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(works, range(3))) == [[0, 1, 2]] * 3


def test_what_was_told_is_deleted_once_all_have_heard_it(monkeypatch):
    class Coordinator:
        def __init__(self):
            self.values, self.rank = {}, 0

        def key_value_set(self, key, value):
            self.values |= {key: value, f"{key[:-1]}{1 - self.rank}": value}

        def wait_at_barrier(self, name, timeout_in_ms):
            return

        def key_value_dir_get(self, folder):
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

        def key_value_delete(self, folder):
            assert self.rank == 0
            self.values = {key: value for key, value in self.values.items() if not key.startswith(f"{folder}/")}

    for rank in (0, 1):
        client, team = Coordinator(), long_work.Team()
        team.size, team.rank, client.rank = 2, rank, rank
        monkeypatch.setattr(long_work, "coordinator_client", lambda client=client: client)
        assert [team.tell_all("count", n) for n in range(12)] == [[n, n] for n in range(12)]
        assert len(client.values) == (24 if rank else 2)


STALLED = """
from axonml_jax.checkpoint import object_store
assert object_store._STALLED == "30"
object_store._STALLED = "1"
object_store.ObjectStore("s3://bucket/run", tries=1).put("key", b"content")
"""


@pytest.mark.slow
def test_a_request_that_moves_no_byte_is_given_up():
    """A connection that nobody answers; the limit is read once a process."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "JAX_PLATFORMS": "cpu"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ |= StandIn.environ(types.SimpleNamespace(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"))
        found = subprocess.run(
            [sys.executable, "-c", STALLED], env=environ, capture_output=True, text=True, timeout=120
        )
    assert "cannot write key at s3://bucket/run: " in found.stderr and "Operation too slow" in found.stderr
