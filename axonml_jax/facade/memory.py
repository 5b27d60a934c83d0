"""Memory of a sharded model: by formula before anything runs, and measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax._types import named_leaves
from axonml_jax.model.functional import Functional
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units.wrap import units
from axonml_jax.sharding.layout import Layout, is_layout

MIB = 2**20


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes per device of model states (Rajbhandari et al. 2020, section 3), padding included; activations are not in it.

    Attributes:
      total_params: trained and frozen parameters of the whole model.
      param_bytes: resting parameters.
      grad_bytes: gradients at their fullest.
      optim_bytes: optimizer state.
      gathered_bytes: whole parameters held during the step beside the resting ones, at their fullest.
      replicated_bytes: parameters, gradients and optimizer state of plain data parallelism (DDP).
      offload: what of these rests in host memory instead of on the device.
    """

    total_params: int
    param_bytes: int
    grad_bytes: int
    optim_bytes: int
    gathered_bytes: int
    replicated_bytes: int
    offload: CPUOffload = CPUOffload.NONE

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        kept = self.offload
        return self.param_bytes * kept.params + self.grad_bytes * kept.gradients + self.optim_bytes * kept.optimizer

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        every = self.param_bytes + self.grad_bytes + self.optim_bytes + self.gathered_bytes
        return every - self.host_bytes

    @property
    def total_memory_mb(self) -> float:
        """`total_bytes` in MB of 2**20 bytes."""
        return self.total_bytes / MIB

    @property
    def memory_savings(self) -> float:
        """The part of DDP's bytes that is saved, from 0 to 1 (negative when gathering costs more than sharding saves)."""
        return 1 - self.total_bytes / self.replicated_bytes if self.replicated_bytes else 0.0

    def __str__(self) -> str:
        rows = {
            "parameters": self.param_bytes,
            "gradients": self.grad_bytes,
            "optimizer": self.optim_bytes,
            "gathered": self.gathered_bytes,
            "on the host": -self.host_bytes,
            "device": self.total_bytes,
        }
        width = max(map(len, rows))
        scale, unit = (MIB, "MB") if self.replicated_bytes >= MIB else (2**10, "KB")
        return "\n".join(f"{name:<{width}}  {size / scale:>12,.1f} {unit}" for name, size in rows.items() if size)


@dataclass(frozen=True)
class MemoryStats:
    """Measured memory of one device, in MB of 2**20 bytes.

    Attributes:
      current_allocation_mb: live arrays.
      peak_memory_mb: the most so far as the device counts it; where it does not count (CPU), what the compiler planned for
        the newest trainer's step: its arguments, results and temporaries. None when neither is known.
      source: "device" or "compiled step": where the peak comes from; "" when unknown.
    """

    current_allocation_mb: float
    peak_memory_mb: float | None
    source: str


def estimate(placement: Placement, moments: int, model: Functional) -> FSDPMemoryStats:
    """See `FSDP.memory_estimate`."""
    trained = jax.tree.leaves(placement.params, is_leaf=is_layout)
    layouts = [*trained, *jax.tree.leaves(placement.frozen, is_leaf=is_layout)]
    if placement.stages is not None:  # a device holds the stages of one rank, padded to the fullest one's
        return _of_stages(placement, moments)
    plan = placement.plan
    reduce = plan.precision.reduce_dtype
    shards = placement.inner_axes or not plan.accumulate > 1
    grads = sum(
        math.prod(layout.shard if shards else placement.read_shape(layout)) * reduce(layout.dtype).itemsize
        for layout in trained
    )
    params, optim = _resting(layouts), moments * _resting(trained)
    whole = sum(layout.size * layout.dtype.itemsize for layout in layouts)
    whole_trained = sum(layout.size * layout.dtype.itemsize for layout in trained)
    return FSDPMemoryStats(
        total_params=sum(layout.size for layout in layouts),
        param_bytes=params,
        grad_bytes=grads,
        optim_bytes=optim,
        gathered_bytes=_gathered(placement, layouts, model),
        replicated_bytes=whole + (1 + moments) * whole_trained,
        offload=plan.offload,
    )


def _of_stages(placement: Placement, moments: int) -> FSDPMemoryStats:
    """The same along a pipeline, where what rests are buffers of the fullest rank."""
    stages, plan = placement.stages, placement.plan
    assert stages is not None
    reduce, trained = plan.precision.reduce_dtype, stages.params.layouts
    rests = [list(store.buffers.sizes.items()) for store in (stages.params, stages.frozen)]
    params, frozen = (sum(size * jnp.dtype(group.dtype).itemsize for group, size in sizes) for sizes in rests)
    grads = sum(size * jnp.dtype(reduce(group.dtype)).itemsize for group, size in rests[0])
    elements = [math.prod(placement.read_shape(layout)) for layout in stages.layouts]
    read = [n * placement.read_itemsize(layout) for n, layout in zip(elements, stages.layouts, strict=True)]
    sums = [n * reduce(layout.dtype).itemsize for n, layout in zip(elements, trained, strict=False)]
    ranks = [stage % stages.num_ranks for stage in stages.stages]
    split, whole = any("fsdp" in layout.axes for layout in stages.layouts), 0
    if stages.policy.in_ticks:  # a forward's stage, a backward's, and one's gradients
        whole = 2 * _most(read, stages.stages) + _most(sums, stages.stages)
    elif split or plan.precision.compute is not None:
        whole, grads = _most(read, ranks), max(grads, _most(sums, ranks))
    bytes_of = lambda layouts: sum(layout.size * layout.dtype.itemsize for layout in layouts)
    return FSDPMemoryStats(
        total_params=sum(layout.size for layout in stages.layouts),
        param_bytes=params + frozen,
        grad_bytes=grads,
        optim_bytes=moments * params,
        gathered_bytes=whole,
        replicated_bytes=bytes_of(stages.layouts) + (1 + moments) * bytes_of(trained),
        offload=plan.offload,
    )


def _most(sizes: Sequence[int], places: Sequence[int]) -> int:
    """The largest sum of sizes at one place."""
    totals: dict[int, int] = {}
    for size, place in zip(sizes, places, strict=False):  # frozen parameters are last, and have no gradients
        totals[place] = totals.get(place, 0) + size
    return max(totals.values(), default=0)


def _resting(layouts: list[Layout]) -> int:
    return sum(math.prod(layout.shard) * layout.dtype.itemsize for layout in layouts)


def _gathered(placement: Placement, layouts: list[Layout], model: Functional) -> int:
    """Whole parameters beside the shards: all of them, or with stage 3 the largest units that are whole at once."""
    if not placement.sharded_axes:
        return 0
    sizes = [math.prod(placement.read_shape(layout)) for layout in layouts]
    read = [size * placement.read_itemsize(layout) for size, layout in zip(sizes, layouts, strict=True)]
    if not placement.gathers_when_used:
        return sum(read)
    names = [*named_leaves(placement.params), *named_leaves(placement.frozen)]
    found = units(names, placement.by_unit.wrap, model.module_types())
    inside = {i for unit in found.values() for i in unit}
    groups = [*found.values(), [i for i in range(len(read)) if i not in inside]]
    dtypes = [placement.plan.precision.reduce_dtype(layout.dtype) for layout in layouts]
    reduced = [size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    trained = len(named_leaves(placement.params))
    weights = max(sum(read[i] for i in group) for group in groups)
    grads = max(sum(reduced[i] for i in group if i < trained) for group in groups)
    # In the backward a unit's weights and their gradients are whole together; prefetched units come on top.
    return (1 + placement.by_unit.prefetch) * weights + grads


def measure(mesh: Mesh, trainer: Any) -> MemoryStats:
    """See `FSDP.memory_stats`."""
    devices = mesh.local_devices
    live = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device in live and shard.data.sharding.memory_kind in (None, "device"):
                live[shard.device] += shard.data.nbytes
    current = max(live.values()) / MIB
    counted = [stats for device in devices if (stats := device.memory_stats())]
    if counted:
        current = max(stats["bytes_in_use"] for stats in counted) / MIB
        return MemoryStats(current, max(stats["peak_bytes_in_use"] for stats in counted) / MIB, "device")
    planned = trainer() if trainer is not None else None
    compiled = planned.compiled_memory() if planned is not None else None
    return MemoryStats(
        current, None if compiled is None else compiled / MIB, "" if compiled is None else "compiled step"
    )
