"""Memory of a sharded model: added up from its layouts before anything runs, and measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax._types import named_leaves
from axonml_jax.cost.held import gathered, gradients, left_out, rests, whole_of_stages
from axonml_jax.cost.placed import Placed, placed_leaves
from axonml_jax.cost.rounds import Run, ShardCounts
from axonml_jax.cost.weight_groups import grouped
from axonml_jax.model.functional import Functional
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units.wrap import units

MIB = 2**20


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes per device of model states (Rajbhandari et al. 2020, section 3), padding included; activations are not in it.

    Attributes:
      total_params: trained and frozen parameters of the whole model.
      param_bytes: resting parameters.
      grad_bytes: gradients at their fullest.
      optim_bytes: optimizer state; with rounds (`ax.DiLoCo`) a replica's own parameters and the outer momentum too, and what
        sums of gradients leave out where that is fed back.
      gathered_bytes: whole parameters held during the step beside the resting ones, at their fullest.
      joining_bytes: with rounds, what the end of one holds beside what rests, when gradients and whole parameters are gone.
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
    joining_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        kept = self.offload
        return self.param_bytes * kept.params + self.grad_bytes * kept.gradients + self.optim_bytes * kept.optimizer

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the fullest moment of a step."""
        fullest = max(self.grad_bytes + self.gathered_bytes, self.joining_bytes)
        return self.param_bytes + self.optim_bytes + fullest - self.host_bytes

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
            "joining": self.joining_bytes,
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
    if placement.stages is not None:  # a device holds the stages of one rank, padded to the fullest one's
        return _of_stages(placement, moments)
    plan, placed = placement.plan, placed_leaves(placement, _units(placement, model))
    weights, all_of_it, run = grouped(placed), ShardCounts(1, 1, 1, 1), Run.of(plan, placement.degrees)
    own = rests(weights, all_of_it)
    return FSDPMemoryStats(
        param_bytes=own.parameters + own.padding,
        grad_bytes=gradients(weights, all_of_it, run),
        optim_bytes=(moments + run.copies) * (own.trained + own.trained_padding) + left_out(weights, all_of_it),
        gathered_bytes=gathered(weights, all_of_it, run),
        joining_bytes=int(run.joining * (own.trained + own.trained_padding)),
        offload=plan.offload,
        **_whole(placed, moments),
    )


def _whole(placed: Sequence[Placed], moments: int) -> dict[str, int]:
    """The size of a model, and what it would need where every rank holds all of it."""
    size = lambda each: each.layout.size * each.rest_dtype.itemsize
    trained = sum(size(each) for each in placed if each.weight.trained)
    return {
        "total_params": sum(each.layout.size for each in placed),
        "replicated_bytes": sum(map(size, placed)) + (1 + moments) * trained,
    }


def _units(placement: Placement, model: Functional) -> dict[int, str]:
    """The unit of every parameter where units are gathered at their use; those outside are gathered together."""
    if not placement.gathers_when_used:
        return {}
    names = [*named_leaves(placement.params), *named_leaves(placement.frozen)]
    found = units(names, placement.by_unit.wrap, model.module_types())
    inside = {i: f"unit {path}" for path, unit in found.items() for i in unit}
    return {i: inside.get(i, "outside") for i in range(len(names))}


def _of_stages(placement: Placement, moments: int) -> FSDPMemoryStats:
    """The same along a pipeline, where what rests are buffers of the fullest rank."""
    stages, plan, placed = placement.stages, placement.plan, placed_leaves(placement)
    assert stages is not None
    accumulate = plan.precision.accumulate_dtype
    buffers = [list(store.buffers.sizes.items()) for store in (stages.params, stages.frozen)]
    params, frozen = (sum(size * jnp.dtype(group.dtype).itemsize for group, size in sizes) for sizes in buffers)
    grads = sum(size * jnp.dtype(accumulate(group.dtype)).itemsize for group, size in buffers[0])
    read = [each.read_bytes for each in placed]
    sums = [each.sum_bytes * each.weight.trained for each in placed]
    ranks, whole = [stage % stages.num_ranks for stage in stages.stages], 0
    if stages.policy.in_ticks:
        whole = whole_of_stages(_most(read, stages.stages), _most(sums, stages.stages))
    elif plan.precision.compute is not None or any(each.sharded for each in placed):
        whole, grads = _most(read, ranks), max(grads, _most(sums, ranks))
    return FSDPMemoryStats(
        param_bytes=params + frozen,
        grad_bytes=grads,
        optim_bytes=moments * params,
        gathered_bytes=whole,
        offload=plan.offload,
        **_whole(placed, moments),
    )


def _most(sizes: Sequence[int], places: Sequence[int]) -> int:
    """The largest sum of sizes at one place."""
    totals: dict[int, int] = {}
    for size, where in zip(sizes, places, strict=True):
        totals[where] = totals.get(where, 0) + size
    return max(totals.values(), default=0)


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
