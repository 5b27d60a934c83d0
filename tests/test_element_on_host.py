"""One expert's or one layer's weights out of a stack that is split over devices: every bit, and no more than it is sent."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import axonml_jax as ax
from axonml_jax.models.weights import _program, element_on_host

STACK = np.random.default_rng(0).normal(size=(8, 4, 64)).astype(np.float32)
STACK[3, 0, :3] = -0.0, np.nan, np.inf
SPECS = [("expert", "fsdp"), (("fsdp", "expert"), None, None), (None, ("expert", "fsdp")), ("fsdp", "expert"), ()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_element_has_its_bits(dtype):
    mesh = ax.make_mesh(expert=2, fsdp=2, devices=jax.devices()[:4])
    whole = STACK.astype(jax.numpy.dtype(dtype)) if dtype != "int8" else np.nan_to_num(STACK, posinf=1).astype(np.int8)
    for spec in SPECS:
        array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
        for index in ((), (3,), (7,), (3, 0), (0, 3)):
            assert element_on_host(array, index).tobytes() == whole[index].tobytes()
            assert element_on_host(whole, index).tobytes() == whole[index].tobytes()


def test_no_collective_carries_more_than_the_element_and_one_program_reads_all():
    mesh = ax.make_mesh(expert=2, fsdp=2, devices=jax.devices()[:4])
    array = jax.device_put(STACK, NamedSharding(mesh, PartitionSpec("expert", "fsdp")))
    _program.cache_clear()
    for k in range(8):
        element_on_host(array, (k,))
    program = _program(mesh, ("expert", "fsdp", None), 1)
    assert _program.cache_info().misses == 1 and program._cache_size() == 1
    text = program.lower(array, np.asarray([5], np.int32)).compile().as_text()
    sent = re.findall(r"\w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+)\(", text)
    assert sent and all(np.prod([int(n) for n in each.split(",")]) <= STACK[0].size for each in sent)
