"""Threads as ranks: programs over groups and subgroups, point to point, and every way in which ranks can disagree."""

import random
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonml_jax.mesh import program as program_module
from axonml_jax.mesh.backend import MockBackend
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.rendezvous import PeerError
from axonml_jax.mesh.spawn import spawn
from axonml_jax.mesh.world import World


def total(x):
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, "data"), x)


def scaled(x, factor):
    return jax.lax.psum(x, "data") * factor


def shift(x, source, target):
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "data", [(source, target)]), x)


def test_results_come_in_rank_order_each_from_its_own_device():
    def fn(world, offset):
        return world.rank + offset, jnp.zeros(()).devices()

    results = spawn(fn, 4, args=(10,))
    assert results == [(10 + rank, {jax.devices()[rank]}) for rank in range(4)]


VALUES = {
    "scalar": lambda rank: np.float32(rank),
    "python scalar": lambda rank: float(rank),
    "matrix": lambda rank: np.full((2, 3), rank, np.int32),
    "empty": lambda rank: np.zeros((0, 3), np.float32),
    "tree": lambda rank: {"a": np.full(3, rank, np.float64), "b": [np.array(rank, jnp.bfloat16), ()]},
}


@pytest.mark.parametrize("case", VALUES)
def test_a_program_sees_each_ranks_own_tree_and_gives_each_rank_its_result(case):
    def fn(world):
        return world.default_group().run(total, VALUES[case](world.rank), name="total")

    expected = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *map(VALUES[case], range(3)))
    for rank, result in enumerate(spawn(fn, 3)):
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        jax.tree.map(
            lambda leaf, given: leaf.dtype == jnp.asarray(given).dtype or pytest.fail("dtype"),
            result,
            VALUES[case](rank),
        )
        assert all(leaf.devices() == {jax.devices()[rank]} for leaf in jax.tree.leaves(result))


def test_even_and_odd_ranks_talk_among_themselves():
    def fn(world):
        group = world.new_group([r for r in range(5) if r % 2 == world.rank % 2])
        return group.rank, float(group.run(total, float(world.rank), name="total"))

    assert spawn(fn, 5) == [(0, 6.0), (0, 4.0), (1, 6.0), (1, 4.0), (2, 6.0)]


def test_hundreds_of_random_overlapping_subgroups_end_without_deadlock():
    rng = random.Random(0)
    rounds = [rng.sample(range(5), rng.randint(1, 5)) for _ in range(250)]

    def fn(world):
        seen = []
        for number, ranks in enumerate(rounds):
            if world.rank in ranks:
                value = np.float32(world.rank * 1000 + number)
                seen.append(float(world.new_group(ranks).run(total, value, name=f"round {number}")))
        world.default_group().barrier()
        return seen

    results = spawn(fn, 5, timeout=60)
    for rank in range(5):
        mine = [(number, ranks) for number, ranks in enumerate(rounds) if rank in ranks]
        assert results[rank] == [float(sum(r * 1000 + number for r in ranks)) for number, ranks in mine]


def test_equal_programs_are_compiled_once_and_different_arguments_apart():
    def fn(world):
        group = world.default_group()
        one, *_ = (group.run(partial(scaled, factor=1), 1, name="a") for _ in range(3))
        return (
            one,
            group.run(partial(scaled, factor=1.0), 1, name="b"),
            group.run(partial(scaled, factor=2), 1, name="c"),
        )

    program_module._compiled.cache_clear()
    one, also_one, two = spawn(fn, 2)[1]
    assert (one.dtype.kind, also_one.dtype.kind, int(two)) == ("i", "f", 4)
    assert program_module._compiled.cache_info().misses == 3


def test_send_and_receive_meet():
    def fn(world):
        group = world.default_group()
        if world.rank == 2:
            return group.send({"x": np.arange(3.0)}, 0, shift=shift)
        if world.rank == 0:
            return group.recv(2, {"x": jax.ShapeDtypeStruct((3,), np.float64)}, shift=shift)

    results = spawn(fn, 3)
    np.testing.assert_array_equal(results[0]["x"], np.arange(3.0))
    assert results[1] is results[2] is None


def test_ranks_of_send_are_those_of_the_group():
    def fn(world):
        if world.rank == 0:
            return None
        group = world.new_group([1, 2])
        if group.rank == 0:
            return group.send(np.int32(7), 1, shift=shift)
        return int(group.recv(0, np.int32(0), shift=shift))

    assert spawn(fn, 3) == [None, None, 7]


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
        ["barrier()", "f("],
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
        spawn(fn, 3)
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


def test_a_group_of_one_needs_no_one():
    group = ProcessGroup.mock()
    group.barrier()
    assert (group.size, group.rank, float(group.run(total, 3.0, name="total"))) == (1, 0, 3.0)


def test_threads_of_ones_own_meet_in_a_created_world():
    results = {}

    def work(world):
        results[world.rank] = float(world.default_group().run(total, float(world.rank), name="total"))

    threads = [threading.Thread(target=work, args=(world,)) for world in MockBackend.create_world(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {0: 3.0, 1: 3.0, 2: 3.0}


def test_impossible_world_sizes_are_refused():
    with pytest.raises(ValueError, match="at least one rank"):
        spawn(print, 0)
    with pytest.raises(RuntimeError, match="fake_devices"):
        spawn(print, 999)
