"""Threads as ranks: every way in which they can disagree, fail, be late, or be called where they are not one."""

import threading
import time

import jax
import numpy as np
import pytest

from axonml_jax.mesh.ranks import PeerError
from axonml_jax.mesh.world import ProcessGroup, World, spawn


def total(x):
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), x)


def shift(x, source, target):
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "data", [(source, target)]), x)


def both_send(world):
    world.default_group().send(np.ones(2), 1 - world.rank, shift=shift)


def receive_other_shape(world):
    group = world.default_group()
    group.send(np.ones(2), 1, shift=shift) if world.rank == 0 else group.recv(0, np.ones(3), shift=shift)


def send_to_self(world):
    world.default_group().send(1.0, world.rank, shift=shift)


DISAGREEMENTS = {
    "shape": (lambda w: w.default_group().run(total, np.ones(2 + w.rank), name="f"), [r"f(float64[2])", "float64[3]"]),
    "dtype": (lambda w: w.default_group().run(total, np.ones(2, "if"[w.rank]), name="f"), ["int32[2]", "float32[2]"]),
    "name": (lambda w: w.default_group().run(total, 1.0, name="fg"[w.rank]), ["rank(s) [0] call f(", "[1] call g("]),
    "tree": (lambda w: w.default_group().run(total, {"ab"[w.rank]: 1.0}, name="f"), ["f(a: ", "f(b: "]),
    "barrier": (
        lambda w: w.default_group().run(total, 1.0, name="f") if w.rank else w.default_group().barrier(),
        ["barrier()", "call f"],
    ),
    "both send": (both_send, ["send 0 -> 1", "send 1 -> 0"]),
    "received shape": (receive_other_shape, ["float64[2]", "float64[3]"]),
    "send to self": (send_to_self, ["from rank", "one of ["]),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_what_the_ranks_disagree_about_is_an_error_in_every_one(case):
    call, words = DISAGREEMENTS[case]

    def fn(world):
        with pytest.raises(ValueError) as error:
            call(world)
        assert all(word in str(error.value) for word in words), error.value
        if "self" not in case:
            return float(world.default_group().run(total, 1.0, name="after"))

    results = spawn(fn, 2, timeout=20)
    assert results == ([2.0, 2.0] if "self" not in case else [None, None])


def test_an_error_inside_the_program_reaches_every_member():
    def broken(x):
        raise KeyError("inside")

    def fn(world):
        with pytest.raises(KeyError, match="inside"):
            world.default_group().run(broken, 1.0, name="broken")
        return True

    assert spawn(fn, 3) == [True] * 3


def test_the_first_failure_is_raised_with_its_rank_and_stops_the_others():
    stopped = []

    def fn(world):
        if world.rank == 2:
            raise OSError("disk full")
        try:
            world.default_group().run(total, 1.0, name="total")
        except PeerError as error:
            stopped.append(str(error))
            raise

    with pytest.raises(OSError, match="disk full") as error:
        spawn(fn, 4)
    assert error.value.__notes__ == ["raised by rank 2 of 4 in spawn"]
    assert len(stopped) == 3
    assert all(
        "total on ranks [0, 1, 2, 3]" in text and "rank 2 has failed: OSError: disk full" in text for text in stopped
    )


def test_waiting_for_a_rank_that_has_returned_is_an_error_at_once():
    def fn(world):
        if world.rank != 1:
            world.default_group().barrier()

    start = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 has returned"):
        spawn(fn, 3, timeout=30)
    assert time.monotonic() - start < 20


def test_a_rank_that_does_not_call_is_named_at_the_timeout():
    release = threading.Event()

    def fn(world):
        if world.rank == 1:
            return release.wait(20)
        try:
            world.default_group().run(total, 1.0, name="total")
        finally:
            release.set()

    with pytest.raises(TimeoutError, match=r"total on ranks \[0, 1, 2\]: rank\(s\) \[1\] did not call it within 0.3 s"):
        spawn(fn, 3, timeout=0.3)


def test_who_never_sent_is_named_at_the_timeout():
    release = threading.Event()

    def fn(world):
        if world.rank == 0:
            return release.wait(20)
        try:
            return world.default_group().recv(0, np.ones(2), shift=shift)
        finally:
            release.set()

    with pytest.raises(TimeoutError, match=r"send 0 -> 1 on ranks \[0, 1\]: rank\(s\) \[0\]"):
        spawn(fn, 2, timeout=0.3)


def test_ranks_that_still_run_after_a_failure_are_named():
    release = threading.Event()

    def fn(world):
        if world.rank == 0:
            raise ValueError("early")
        release.wait(20)

    with pytest.raises(ValueError, match="early") as error:
        spawn(fn, 2, timeout=0.2)
    release.set()
    assert "rank(s) [1] were still running" in error.value.__notes__[1]


def test_a_process_that_holds_several_ranks_is_refused_outside_spawn():
    for group in (World.mock(2).default_group(), ProcessGroup(World.mock(2).mesh)):
        with pytest.raises(ValueError, match=r"total: this process holds 2 ranks .* ax\.spawn.*ax\.spmd.*shard_map"):
            group.run(total, 1.0, name="total")


def test_only_members_may_call():
    def fn(world):
        with pytest.raises(ValueError, match="rank 0 is no member" if world.rank == 0 else "rank 1 is no member"):
            world.new_group([1 - world.rank]).run(total, 1.0, name="total")

    spawn(fn, 2)


def test_impossible_world_sizes_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        spawn(print, 0)
    with pytest.raises(RuntimeError, match="fake_devices"):
        spawn(print, 999)
