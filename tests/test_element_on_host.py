"""One expert's or one layer's weights out of a stack that is split over devices: every bit, and no more than it is sent."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import axonml_jax as ax
from axonml_jax.models import element_on_host as room
from axonml_jax.models.element_on_host import element_on_host

STACK = np.random.default_rng(0).normal(size=(8, 4, 64)).astype(np.float32)
STACK[3, 0, :3] = -0.0, np.nan, np.inf
SPECS = [("expert", "fsdp"), (("fsdp", "expert"), None, None), (None, ("expert", "fsdp")), ("fsdp", "expert"), ()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_element_has_its_bits(spec, dtype):
    mesh = ax.make_mesh(expert=2, fsdp=2, devices=jax.devices()[:4])
    whole = STACK.astype(jax.numpy.dtype(dtype)) if dtype != "int8" else np.nan_to_num(STACK, posinf=1).astype(np.int8)
    array = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    for index in ((), (3,), (7,), (3, 0), (0, 3)):
        assert element_on_host(array, index).tobytes() == whole[index].tobytes()
        assert element_on_host(whole, index).tobytes() == whole[index].tobytes()


def test_no_collective_carries_more_than_the_element(monkeypatch):
    texts, jit = [], jax.jit

    def reading(fun, **options):
        made = jit(fun, **options)
        return lambda *args: (texts.append(made.lower(*args).compile().as_text()), made(*args))[1]

    mesh = ax.make_mesh(expert=2, fsdp=2, devices=jax.devices()[:4])
    array = jax.device_put(STACK, NamedSharding(mesh, PartitionSpec("expert", "fsdp")))
    monkeypatch.setattr(room.jax, "jit", reading)
    element_on_host(array, (5,))
    sent = re.findall(r"\w+\[([\d,]*)\]\S* (?:all-\w+|collective-\w+)\(", texts[0])
    assert sent and all(np.prod([int(n) for n in each.split(",")]) <= STACK[0].size for each in sent)
