"""Tests that compile alike programs share an executable, and no others do; splitting an array needs no program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axonml_jax.sharding.layout import move


def found(shared, call):
    """How many executables were there already."""
    before = shared.found
    call()
    return shared.found - before


@pytest.mark.slow
def test_programs_are_let_go_before_the_kernel_refuses_to_map_more(shared_programs):
    shared_programs.looked = -100
    assert not shared_programs.make_room(most=2**40) and not shared_programs.make_room(most=0)  # looked at a moment ago
    shared_programs.looked = -100
    assert shared_programs.make_room(most=0) and not shared_programs.kept


def test_alike_programs_share_an_executable_and_others_do_not(shared_programs):
    x = np.arange(5.0)
    double = lambda x: 2.125 * x + 0.375
    alike = lambda **options: jax.jit(lambda x: double(x), **options)  # JAX itself keeps programs of one function
    make = lambda **options: lambda: alike(**options)(jax.device_put(x))
    jax.block_until_ready(make()())
    assert found(shared_programs, make()) == 1
    np.testing.assert_array_equal(make()(), double(x))
    assert found(shared_programs, make(donate_argnums=0)) == 0
    given = jax.device_put(x)
    alike(donate_argnums=0)(given)
    assert given.is_deleted()
    elsewhere = lambda: alike()(jax.device_put(x, jax.devices()[1]))
    assert found(shared_programs, elsewhere) == 0 and elsewhere().devices() == {jax.devices()[1]}
    optimized = make(compiler_options={"xla_cpu_enable_fast_min_max": True})
    assert found(shared_programs, optimized) == 0


def test_programs_that_differ_in_one_constant_of_many_are_two(shared_programs):
    table = np.random.default_rng(0).normal(size=5000)
    changed = table.copy()
    changed[2500] += 1
    program = lambda constant: jax.jit(lambda x: x + constant)
    x = np.zeros(5000)
    np.testing.assert_array_equal(program(table)(x), table)
    np.testing.assert_array_equal(program(changed)(x), changed)
    assert found(shared_programs, lambda: program(table)(x)) == 1


def test_a_program_that_calls_python_is_never_shared(shared_programs):
    seen = []

    def program(number):
        call = lambda x: seen.append(number) or x
        return jax.jit(lambda x: jax.pure_callback(call, jax.ShapeDtypeStruct((3,), jnp.float32), x))

    for number in range(2):
        jax.block_until_ready(program(number)(jnp.ones(3, jnp.float32)))
    assert seen == [0, 1]


def test_an_array_of_one_device_is_split_without_a_program(shared_programs, fake_mesh):
    x = jnp.arange(48.0).reshape(16, 3)
    before = shared_programs.found, shared_programs.compiled
    split = move(x, NamedSharding(fake_mesh, PartitionSpec("data")))
    assert (shared_programs.found, shared_programs.compiled) == before
    np.testing.assert_array_equal(split, x)
    assert len(split.sharding.device_set) == 8 and split.addressable_shards[3].data.shape == (2, 3)
    jax.jit(lambda x: x * 0, donate_argnums=0)(split)
    np.testing.assert_array_equal(x, np.arange(48.0).reshape(16, 3))


def test_a_weak_type_stays_when_an_array_is_split(fake_mesh):
    weak = jax.lax.full((8,), 2.0)
    assert weak.weak_type and move(weak, NamedSharding(fake_mesh, PartitionSpec("data"))).weak_type
