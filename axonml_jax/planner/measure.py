"""What this machine's own devices do: products, memory, collectives, a model's blocks, measured in a few seconds."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.collectives.primitives import sum_over
from axonml_jax.compat.processes.platform import backend_started
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Block
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform
from axonml_jax.planner.hardware import Hardware

UNKNOWN_MEMORY = 2.0**40

CHAIN = 16
"""Sums that follow each other where one is measured, as in a step: the first waits for devices that have just begun."""

FEW, MANY, LONG = 1, 8, 512
"""Sequences in which a block is measured, and the most positions of each."""

PATIENCE = 2.0
"""Seconds that a run of the block may take at the speed of products."""


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
      model: one of its blocks is measured too, forward and backward; None, for a model with experts, and where that would
        take this machine more than `PATIENCE` seconds: no block.
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
    ranks, call = len(devices), _seconds(mesh, lambda x: x, (len(devices), 8), dtype)
    small = max(_seconds(mesh, _summed, (len(devices), 8), dtype) - call, 0.0) / CHAIN
    large = max(_seconds(mesh, _summed, (len(devices), elements), dtype) - call, 0.0) / CHAIN
    latency = small / max(1.0, math.log2(ranks))  # as `Hardware.delay` takes it: of two devices
    wire = 2 * elements * jnp.dtype(dtype).itemsize * (ranks - 1) / ranks
    link = wire / max(large - small, 1e-9) if ranks > 1 else UNKNOWN_MEMORY
    stats = devices[0].memory_stats() or {}
    fixed, rate = 0.0, None
    if model is not None and model.experts is None and _block_flops(model) * MANY / flops < PATIENCE:
        fixed, rate = _block(mesh, model, dtype)
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
        block_seconds=fixed,
        reached=None if rate is None else min(rate / flops, 1.0),
        alone=max(alone / flops, 1.0),
        sources=dict.fromkeys(("flops", "memory_bandwidth", "link", "island", "cross"), "measured"),
    )


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


def _block_flops(model: TransformerConfig) -> int:
    """Of forward and backward of a sequence."""
    length = min(LONG, model.max_length)
    two, one = (replace(model, num_layers=number).flops_per_token(length) for number in (2, 1))
    return length * (two - one)


def _block(mesh: Mesh, model: TransformerConfig, dtype: str) -> tuple[float, float]:
    """Seconds of a block's forward and backward however few tokens it has, and the FLOP/s that more of them reach."""
    length = min(LONG, model.max_length)
    graph, weights, rest = nnx.split(Block(model, rngs=nnx.Rngs(0)), nnx.Param, ...)
    weights = jax.tree.map(lambda x: x.astype(dtype), weights)

    def gradients(x: jax.Array) -> Any:
        def total(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.square(nnx.merge(graph, weights, rest)(x)[0]))

        return jax.tree.map(lambda g: g[None], jax.grad(total, (0, 1))(weights, x[0]))

    shape = lambda rows: (mesh.size, rows, length, model.hidden_size)
    few, many = (_seconds(mesh, gradients, shape(rows), dtype, rounds=21, of=median) for rows in (FEW, MANY))
    row = max(many - few, 1e-9) / (MANY - FEW)
    return max(few - FEW * row, 0.0), _block_flops(model) / row


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
