"""Who is missing when a job stands still, in words; real processes are in test_faults.py."""

import json
import re
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import axonml_jax as ax
from axonml_jax.mesh import watch as room
from axonml_jax.mesh.watch import Said, Standstill, compiles, standstill, where_is


def said(count, begun, at="in train at run.py:1", doing="", marks=0):
    return Said(count, begun, begun - 1, at, doing, marks, 31.4)


OWN = said(9, 12)
CASES = {
    "behind": (
        {1: said(7, 11)},
        {1: said(9, 11, "in load at data.py:7")},
        r"rank\(s\) \[1\] are missing: rank 1 has begun step 11 only and is in load at data\.py:7$",
    ),
    "silent": (
        {1: said(7, 12, "in load at data.py:7")},
        {1: said(7, 12, "in load at data.py:7")},
        r"rank\(s\) \[1\] are missing: rank 1 says nothing any more.*had begun step 12 and was in load at data\.py:7$",
    ),
    "never heard": ({}, {}, r"rank\(s\) \[1\] are missing: rank 1 says nothing any more: it is stopped, .* cut off$"),
    "this one": ({1: said(7, 13)}, {1: said(9, 13)}, r"rank\(s\) \[0\] are missing: rank 0 has begun step 12 only"),
    "compiling": (
        {1: said(7, 11)},
        {1: said(9, 11, doing="compiling")},
        r"\[1\] are missing: rank 1 has begun step 11 only and is compiling, in train at run\.py:1$",
    ),
    "nobody": (
        {1: said(7, 12)},
        {1: said(9, 12)},
        r"all ranks have begun the same step, .* ranks 0, 1 are in train at run\.py:1$",
    ),
    "coordinator": (
        None,
        None,
        r"rank\(s\) \[0\] are missing: process 0, which holds the coordinator, does not answer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_report_names_who_is_missing_and_where_it_is(case):
    before, now, wanted = CASES[case]
    text = standstill(0, 2, before, now, OWN).text
    assert re.search(wanted, text), text
    assert text.startswith("rank 0 has made no progress for 31 s (step 12 begun, 11 done, in train at run.py:1): ")


def test_one_rank_speaks_and_what_all_do_alike_is_known():
    ranks = {r: said(7, 12, doing="validating", marks=4) for r in range(4)}
    later = {r: said(8, 12, doing="validating", marks=4) for r in range(4)}
    found = standstill(2, 4, ranks, later, later[2])
    assert (found.missing, found.alike, found.speaker) == ((), "validating", 0)
    behind = {**later, 0: said(8, 12, doing="validating", marks=3)}
    found = standstill(2, 4, ranks, behind, later[2])
    assert (found.missing, found.alike, found.speaker) == ((0,), "", 1) and "rank 0 has come to 3 of 4" in found.text
    mixed = {**later, 3: said(8, 12)}
    assert standstill(0, 4, ranks, mixed, later[0]).alike == ""


class Store:
    """A coordinator's, in which rank 1 goes on talking of one place until told otherwise."""

    def __init__(self, other):
        self.other, self.values = other, {}

    def key_value_set(self, key, value, allow_overwrite=False):
        self.values[key] = value

    def key_value_dir_get(self, folder):
        found = [(key, value) for key, value in self.values.items() if key.startswith(folder)]
        if folder != "axonml_jax/watchdog/":
            return found
        self.other = {**self.other, "count": self.other["count"] + 1}
        return [*found, (f"{folder}1", json.dumps(self.other))]


@pytest.fixture
def watched(monkeypatch):
    def watched(other, **options):
        store, heard = Store(other), []
        monkeypatch.setattr(room, "coordinator_client", lambda: store)
        dog = ax.Watchdog(None, warning=0.2, warn=heard.append, **options)
        dog._size = 2
        return dog, store, heard

    return watched


def wait_for(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


OTHER = {"count": 0, "begun": 4, "done": 4, "at": "in load at data.py:7"}


def test_a_standstill_is_told_once_and_so_is_its_end(watched):
    dog, store, heard = watched(OTHER)
    done = jnp.zeros(())
    with dog:
        for step in range(1, 6):
            dog.began(step, done)
        wait_for(lambda: heard)
        time.sleep(0.8)  # it stands still for as long again
        assert len(heard) == 1
        assert re.search(r"step 5 begun, 5 done.*rank\(s\) \[1\] are missing: rank 1 has begun step 4 only", heard[0])
        store.other["begun"] = 6
        dog.began(6, done)
        wait_for(lambda: len(heard) == 2)
        assert re.match(
            r"it goes on after \d+ s without progress, at step 6; rank\(s\) \[1\] had been missing", heard[1]
        )


def looks(dog, still):
    """It looks, after so many seconds without progress."""
    dog._looked = -1e9
    dog._warn_of(still)


def test_what_is_over_is_forgiven_and_the_next_standstill_is_told_anew(watched):
    dog, _, heard = watched(OTHER)
    dog._look = lambda: Standstill("stuck", (1,))
    for told in (1, 3):
        looks(dog, 1.0)
        looks(dog, 2.0)
        assert len(heard) == told and heard[-1] == "stuck"
        dog.moved()
        looks(dog, 0.0)
        looks(dog, 0.0)
        assert len(heard) == told + 1 and "goes on" in heard[-1] and heard[-1].endswith("rank(s) [1] had been missing")


@pytest.mark.parametrize(
    ("found", "still", "warns"),
    [
        (Standstill("stuck"), 1.9, False),  # less than twice the longest step so far
        (Standstill("stuck"), 2.1, True),
        (Standstill("stuck", alike="validating"), 99.0, False),
        (Standstill("stuck", (1,)), 0.3, True),  # who is missing is, however long steps take
        (Standstill("stuck", (1,)), 0.1, False),
        (Standstill("stuck", (0,), speaker=1), 99.0, False),
    ],
)
def test_only_what_no_step_and_no_common_work_explains_is_told(watched, found, still, warns):
    dog, _, heard = watched(OTHER)
    dog._look, dog._times.longest = (lambda: found), 1.0
    looks(dog, still)
    assert heard == ["stuck"] * warns


def test_a_slow_rank_is_named_once_forgiven_after_two_windows_and_named_again(watched, monkeypatch):
    dog, _, heard = watched(OTHER)
    slow = SimpleNamespace(rank=1, text="rank 1 is slow", times=2.0)
    forgiven = "rank 1 is no slower than the others any more"
    seen = [slow, None, slow, slow, slow, None, slow, slow, None, None, None, slow, slow]
    told = [0, 0, 0, 1, 0, 0, 0, 0, 0, forgiven, 0, 0, 1]
    for found, wanted in zip(seen, told, strict=True):
        monkeypatch.setattr(room, "stragglers", lambda paces, found=found: [found] if found else [])
        heard.clear()
        dog._judge({})
        assert heard == ([] if not wanted else ["rank 1 is slow" if wanted == 1 else wanted])


def test_what_all_do_alike_for_long_is_no_standstill(watched):
    dog, _, heard = watched({**OTHER, "doing": "validating", "begun": 0})
    with dog, dog.doing("validating"):
        time.sleep(1.2)
        assert not heard
        dog.moved()  # the other one does not
        wait_for(lambda: heard)
        assert "rank 1 has come to 0 of 1 and is validating" in heard[0]


def test_a_step_that_takes_as_long_as_others_did_is_no_standstill(watched):
    dog, _, heard = watched({**OTHER, "begun": 0})
    dog._times.longest = 1.0
    with dog:
        time.sleep(1.2)
        assert not heard
        wait_for(lambda: heard)
        assert "all ranks have begun the same step" in heard[0]


def test_a_job_that_is_stuck_says_so_before_it_writes_and_ends_whatever_comes_of_that(watched, monkeypatch, capsys):
    said, left = [], []
    monkeypatch.setattr(room, "leave_now", left.append)

    class Record:
        def write(self, rank, size, why, error, **parts):
            if why.startswith("stuck"):
                said.append(capsys.readouterr().err)
                raise RuntimeError("nothing can be written")

    dog, _, _ = watched({**OTHER, "begun": 0}, record=Record())
    dog._timeout, dog._warning = 0.2, None
    with dog:
        wait_for(lambda: left)
    assert left == [1] and "axonml_jax: stuck: rank 0 has made no progress" in said[0]


def test_a_coordinator_that_fails_once_is_told_again(watched, monkeypatch):
    monkeypatch.setattr(room, "_TICK", 0.02)
    dog, store, _ = watched(OTHER)
    real, failed = store.key_value_set, []

    def fails_once(*args, **options):
        if not failed:
            failed.append(True)
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        real(*args, **options)

    store.key_value_set = fails_once
    with dog:
        wait_for(lambda: "axonml_jax/watchdog/0" in store.values)


def test_a_connection_lost_before_anybody_has_spoken_names_who_has_ended(watched, monkeypatch):
    written = []

    class Record:
        def write(self, rank, size, why, error, **parts):
            written.append((why, parts["others"]))
            return True

    dog, store, _ = watched(OTHER, record=Record())
    store.values["axonml_jax/dying/1"] = "ValueError: boom"
    monkeypatch.setattr(room, "_heard", dict)
    dog.__exit__(jax.errors.JaxRuntimeError, jax.errors.JaxRuntimeError("Connection closed"), None)
    assert written == [("JaxRuntimeError: Connection closed; rank 1 has ended: ValueError: boom", {})]


def test_a_coordinator_that_is_silent_is_waited_for_once(watched, monkeypatch):
    asked = []
    dog, _, heard = watched(OTHER)
    dog._rank = 1
    monkeypatch.setattr(room, "_heard", lambda: asked.append(None))
    monkeypatch.setattr(room, "SILENT", 60.0)
    with dog:
        wait_for(lambda: heard)
    assert len(asked) == 1 and "rank(s) [0] are missing: process 0, which holds the coordinator" in heard[0]


def test_it_speaks_at_once(watched, monkeypatch):
    monkeypatch.setattr(room, "_TICK", 60.0)
    dog, store, _ = watched(OTHER)
    with dog:
        wait_for(lambda: "axonml_jax/watchdog/0" in store.values)


def test_a_process_alone_is_not_watched_and_numbers_are_checked():
    with ax.Watchdog(0.01, end=lambda text: pytest.fail(text)) as watchdog:
        threading.Event().wait(0.1)
        watchdog.moved()
    with pytest.raises(ValueError, match="timeout=0 must be a positive number of seconds"):
        ax.Watchdog(0)
    with pytest.raises(ValueError, match="warning=-1 must be a positive number of seconds"):
        ax.Watchdog(None, warning=-1)


def test_it_knows_where_a_thread_stands():
    assert re.match(r"in \w+ at \w+\.py:\d+$", where_is(threading.get_ident()))
    assert where_is(-1) == "ended"


def test_it_knows_when_a_thread_compiles():
    def deep(x):
        for _ in range(60):
            x = jnp.sin(x) @ x + jnp.cos(x)
        return x

    main, stop, seen = threading.get_ident(), threading.Event(), []

    def look():
        while not stop.wait(0.001):
            seen.append(compiles(main))

    lowered, array = jax.jit(deep).lower(jnp.ones((8, 8))), jnp.ones((8, 8))
    looking = threading.Thread(target=look)
    assert not compiles(main)
    looking.start()
    compiled = lowered.compile()
    while_compiling, running = [*seen], len(seen)
    for _ in range(20):
        compiled(array).block_until_ready()
    stop.set()
    looking.join()
    assert sum(while_compiling) > len(while_compiling) / 2, seen
    assert not any(seen[running + 2 :])
    traced = []
    jax.jit(lambda x: traced.append(compiles(main)) or x + 1).trace(array)
    assert traced == [True]
