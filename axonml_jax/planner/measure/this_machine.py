"""What this machine's own devices do: products, memory, collectives, and with a model its steps, measured."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.compat.processes.platform import backend_started
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform
from axonml_jax.planner.hardware import Hardware
from axonml_jax.planner.measure.steps import from_steps

UNKNOWN_MEMORY = 2.0**40

CHAIN = 16
"""Sums that follow each other where one is measured, as in a step: the first waits for devices that have just begun."""


def measure(
    num_devices: int | None = None,
    *,
    model: TransformerConfig | None = None,
    size: int = 512,
    elements: int = 2**20,
    dtype: str = "float32",
) -> Hardware:
    """Measure with every device at work at once, as in a step: devices that share cores or links are priced so.

    Args:
      num_devices: the first so many of JAX's devices; None: all. More than there are: simulated CPU devices are started,
        where JAX has not.
      model: some of its steps are measured too (see `from_steps`); None, and for a model with experts: none.
      size: of the square matrices that are multiplied.
      elements: of the array that is summed over the devices.
      dtype: of both.

    Raises:
      ValueError: when there are fewer devices.
    """
    devices = _devices(num_devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    flops = 2 * size**3 * 8 / _seconds(mesh, _products, (len(devices), size, size), dtype)
    single = Mesh(devices[:1], ("data",), axis_types=(AxisType.Auto,))
    alone = 2 * size**3 * 8 / _seconds(single, _products, (1, size, size), dtype)
    moved = 2 * elements * jnp.dtype(dtype).itemsize  # read and written
    bandwidth = moved / _seconds(mesh, lambda x: x * 2 + 1, (len(devices), elements), dtype)
    ranks = len(devices)
    usual = lambda body, width: _seconds(mesh, body, (ranks, width), dtype, rounds=21, of=median)
    call = usual(lambda x: x, 8)
    small, large = (max(usual(_summed, width) - call, 0.0) / CHAIN for width in (8, elements))
    latency = small / max(1.0, math.log2(ranks))  # as `Hardware.delay` takes it: of two devices
    wire = 2 * elements * jnp.dtype(dtype).itemsize * (ranks - 1) / ranks
    link = wire / max(large - small, 1e-9) if ranks > 1 else UNKNOWN_MEMORY
    stats = devices[0].memory_stats() or {}
    here = Hardware(
        name=f"{devices[0].device_kind} (measured)",
        flops=flops,
        memory=float(stats.get("bytes_limit", UNKNOWN_MEMORY)),
        memory_bandwidth=bandwidth,
        link=link,
        island=max(ranks, 1),
        cross=link,
        platform=target_platform(),
        torus=Fabric.of(devices).torus,
        latency=latency,
        cross_latency=latency,
        alone=max(alone / flops, 1.0),
        sources=dict.fromkeys(("flops", "memory_bandwidth", "link", "island", "cross"), "measured"),
    )
    if model is None or model.experts is not None:
        return here
    return from_steps(devices, model, here, "bf16" if dtype == "bfloat16" else None)


def _devices(num_devices: int | None) -> list[Any]:
    from axonml_jax.mesh.fake_devices import fake_devices

    if num_devices is not None and jax.config.jax_platforms == "cpu" and not backend_started():
        fake_devices(num_devices)
    devices = jax.devices()[:num_devices]
    if num_devices is not None and len(devices) < num_devices:
        raise ValueError(f"--hardware measure: {num_devices} devices are asked for, this machine has {len(devices)}")
    return devices


def _products(x: jax.Array) -> jax.Array:
    y = x[0]
    for _ in range(8):
        y = y @ x[0]
    return y[None]


def _summed(x: jax.Array) -> jax.Array:
    for _ in range(CHAIN):
        x = sum_over(x, ("data",)) * 0.5
    return x


def _seconds(
    mesh: Mesh, body: Callable, shape: tuple[int, ...], dtype: str, rounds: int = 5, of: Callable = min
) -> float:
    """The shortest, or another, of a few runs of a body on every device at once."""
    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.full(shape, 1e-3, dtype), NamedSharding(mesh, spec))
    jax.block_until_ready(run(x))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - started)
    return of(times)
