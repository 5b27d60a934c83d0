"""Threads as ranks: programs over groups and subgroups, point to point, and what is compiled (errors: test_spawn_errors.py)."""

import random
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axonml_jax as ax
from axonml_jax.mesh import ranks as program_module
from axonml_jax.mesh.world import MockBackend, ProcessGroup, spawn


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


def test_a_barrier_lets_nobody_through_before_the_last_has_come():
    arrived, last = [], threading.Event()

    def fn(world):
        if world.rank == 2:  # the others have long come
            last.wait(0.2)
        arrived.append(world.rank)
        ax.barrier(world.default_group())
        return len(arrived)

    assert spawn(fn, 3) == [3, 3, 3]
