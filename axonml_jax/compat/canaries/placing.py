"""Canaries about where arrays lie: donated buffers, buffers that branches write into, host memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from axonml_jax.compat import versions
from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, floats


def _donated() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), (AXIS,), axis_types=(AxisType.Auto,))
    step = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    x = jax.device_put(jnp.ones(4), NamedSharding(mesh, SPLIT))
    before = sorted(_buffers(x))
    after = sorted(_buffers(jax.block_until_ready(jax.jit(step, donate_argnums=0)(x))))
    expect(x.is_deleted(), "a donated sharded array is still there after the step")
    expect(before == after, "a step does not reuse the buffers of what was donated to it")


def _buffers(x: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


def _in_place() -> None:
    rows, size = 8, 4096

    def step(buffer: Any, i: Any) -> Any:
        put = lambda row: lambda buffer: jax.lax.dynamic_update_index_in_dim(buffer, row(buffer[i % rows]), i % rows, 0)
        return jax.lax.cond(i % 2 == 0, put(jnp.sin), put(jnp.cos), buffer), None

    loop = jax.jit(lambda buffer: jax.lax.scan(step, buffer, jnp.arange(16))[0], donate_argnums=0)
    text = str(loop.lower(floats(rows, size)).compile().as_text())
    copied = [line for line in text.splitlines() if re.search(rf"= f32\[{rows},{size}\]\S* copy\(", line)]
    in_place = versions.BRANCHES_WRITE_IN_PLACE
    expect(
        bool(copied) != in_place,
        f"of a loop whose branches write into its buffer XLA:CPU copies the buffer {len(copied)} times",
    )


def _host() -> None:
    kept = jax.jit(lambda x: jnp.sin(jax.device_put(jnp.cos(x), jax.memory.Space.Host))).trace(floats(4))
    places = [
        line
        for line in kept.lower(lowering_platforms=("tpu",)).as_text().splitlines()
        if "annotate_device_placement" in line
    ]
    expect(
        any("pinned_host" in line for line in places), f"device_put to Space.Host inside a program lowers to {places}"
    )


CANARIES = (
    Canary(
        "donated buffers",
        "A committed, sharded array that is donated is deleted, and the step writes into its buffers.",
        "Every step holds parameters and optimizer state twice.",
        _donated,
    ),
    Canary(
        "branches write in place",
        "From jax 0.11 on XLA:CPU lets a branch write into a buffer of the loop around it.",
        "A pipeline copies everything that it keeps in every tick; or writes twice what it could write once.",
        _in_place,
    ),
    Canary(
        "host memory",
        "device_put to Space.Host inside a program becomes a placement in pinned_host.",
        "What is offloaded stays on the device.",
        _host,
    ),
)
