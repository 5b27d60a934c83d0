"""What this machine's own devices do: products, memory, and collectives among all of them, measured in a few seconds."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform
from axonml_jax.planner.hardware import Hardware

UNKNOWN_MEMORY = 2.0**40


def measure(
    num_devices: int | None = None, *, size: int = 512, elements: int = 2**20, dtype: str = "float32"
) -> Hardware:
    """Measure with every device at work at once, as in a step: devices that share cores or links are priced so.

    Args:
      num_devices: the first so many of JAX's devices; None: all. More than there are: simulated CPU devices are started,
        where JAX has not.
      size: of the square matrices that are multiplied.
      elements: of the array that is summed over the devices.
      dtype: of both.

    Raises:
      ValueError: when there are fewer devices.
    """
    devices = _devices(num_devices)
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    flops = 2 * size**3 * 8 / _seconds(mesh, _products, (len(devices), size, size), dtype)
    moved = 2 * elements * jnp.dtype(dtype).itemsize  # read and written
    bandwidth = moved / _seconds(mesh, lambda x: x * 2 + 1, (len(devices), elements), dtype)
    small = _seconds(mesh, _summed, (len(devices), 8), dtype)
    large = _seconds(mesh, _summed, (len(devices), elements), dtype)
    ranks, call = len(devices), _seconds(mesh, lambda x: x, (len(devices), 8), dtype)
    latency = max(small - call, 0.0) / max(1.0, math.log2(ranks))  # as `Hardware.delay` takes it: of two devices
    wire = 2 * elements * jnp.dtype(dtype).itemsize * (ranks - 1) / ranks
    link = wire / max(large - small, 1e-9) if ranks > 1 else UNKNOWN_MEMORY
    stats = devices[0].memory_stats() or {}
    return Hardware(
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
        sources=dict.fromkeys(("flops", "memory_bandwidth", "link", "island", "cross"), "measured"),
    )


def _devices(num_devices: int | None) -> list[Any]:
    from axonml_jax.mesh.fake_devices import fake_devices

    if num_devices is not None and jax.config.jax_platforms == "cpu":
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
    return sum_over(x, ("data",))


def _seconds(mesh: Mesh, body: Callable, shape: tuple[int, ...], dtype: str, rounds: int = 5) -> float:
    """The shortest of a few runs of a body on every device at once."""
    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(jnp.full(shape, 1e-3, dtype), NamedSharding(mesh, spec))
    run(x).block_until_ready()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times)
