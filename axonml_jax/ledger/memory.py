"""Memory of devices: what they have, what a plan needs, and checks of compiled steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax.base import named_leaves
from axonml_jax.cost.base import Placed, Run, ShardCounts, grouped, placed_leaves
from axonml_jax.cost.memory import gathered, gradients, left_out, rests, whole_of_stages
from axonml_jax.layers.context import SCOPE
from axonml_jax.ledger.compiled import PositionTraffic, collectives_in_compiled, place, position_traffic
from axonml_jax.ledger.count import number
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.view import Functional
from axonml_jax.parallel.placement import Placement, read_shape
from axonml_jax.parallel.plan import CPUOffload
from axonml_jax.sharding.layout import is_layout
from axonml_jax.strategies.strategy import LeftToXLA, units

# --------------------------------------------------------------------------------------------------
# Limits on what compiled programs send where an axis that splits positions is left to XLA's partitioner.
# --------------------------------------------------------------------------------------------------


def accepting(placement: Placement, mesh: Mesh) -> Callable[[Any], None] | None:
    """Returns a check that raises for a compiled step that would hang, or sends more than strategies allow; None: no check."""
    asked = [each for each in (would_hang(placement, mesh), over_budget(placement)) if each is not None]

    def accept(compiled: Any) -> None:
        for refuse in asked:
            refuse(compiled)

    return accept if asked else None


def would_hang(placement: Placement, mesh: Mesh) -> Callable[[Any], None] | None:
    """Returns a check that raises for a compiled program whose devices would wait for each other for ever; None: none can.

    A pipeline's stages are branches, which ranks of other stages do not take. XLA:CPU's permutes wait for all devices, whatever
    their pairs, and the partitioner makes permutes where code shifts positions.

    Raises:
      ValueError: from the function returned; it lists every permute in a branch, and the remedies.
    """
    if placement.stages is None or not placement.automatic or mesh.devices.flat[0].platform != "cpu":
        return None

    def refuse(compiled: Any) -> None:
        there = [each for each in collectives_in_compiled(compiled) if each.in_branch and each.kind == "permute"]
        if there:
            lines = dict.fromkeys(f"  permute of {each.result.split('{')[0]}, by {place(each)}" for each in there)
            raise ValueError(
                "XLA's partitioner sends positions between neighbours in the branch of one stage, which on CPU waits for "
                "the devices of all stages and never ends:\n"
                + "\n".join(lines)
                + "\nuse a mesh without pipe or without "
                f"{', '.join(sorted(placement.automatic))}, or write the model for its rank's positions "
                "(splits_positions = True)"
            )

    return refuse


def over_budget(placement: Placement) -> Callable[[Any], None] | None:
    """Returns a check that raises for a compiled step that sends more than the plan's strategies allow; None: no limit.

    Raises:
      ValueError: from the function returned; it lists every operation that sends, with its bytes, and the remedies.
    """
    budgets = {
        name: own.partitioner_budget
        for axis, each in placement.plan.on(placement.degrees).items()
        for name in as_axes(axis)
        if (own := each.having(LeftToXLA)) is not None and placement.degrees[name] > 1
    }
    if not budgets:
        return None

    def refuse(compiled: Any) -> None:
        for axis, budget in budgets.items():
            traffic = traffic_along(placement, compiled, axis)
            sent, allowed = traffic.bytes(traffic.others), budget(float(traffic.bytes(traffic.attention)))
            if sent > allowed:
                raise ValueError(_refusal(traffic, allowed))

    return refuse


def traffic_along(placement: Placement, compiled: Any, axis: str) -> PositionTraffic:
    """The traffic of a compiled step along an axis that is left to the partitioner."""
    leaves = jax.tree.leaves((placement.params, placement.frozen), is_leaf=is_layout)
    shapes = [read_shape(placement, layout) for layout in leaves]
    sizes = {math.prod(shape) for shape in shapes} | {math.prod(shape[1:]) for shape in shapes if shape}
    return position_traffic(compiled, placement.degrees, axis, scope=SCOPE, parameters=sizes)


def _refusal(traffic: PositionTraffic, allowed: float) -> str:
    sent = lambda some: number(traffic.bytes(some))
    listed = sorted(traffic.others, key=lambda each: traffic.bytes([each]), reverse=True)
    lines = [f"  {each.kind} of {each.result.split('{')[0]}: {sent([each])} bytes, by {place(each)}" for each in listed]
    return (
        f"the model's code sends {sent(traffic.others)} bytes per rank along {traffic.axis} across positions, more than the "
        f"{allowed:,.0f} that are allowed besides attention, which sends {sent(traffic.attention)}:\n"
        + "\n".join(lines[:12])
        + (f"\n  and {len(lines) - 12} more" if len(lines) > 12 else "")
        + "\nallow it by ax.Context(allow_communication=True) or a number of bytes, in a configuration "
        "context.allow_communication, or use a mesh without this axis"
    )


# --------------------------------------------------------------------------------------------------
# Memory of a sharded model: added up from its layouts before anything runs, and measured.
# --------------------------------------------------------------------------------------------------

MIB = 2**20


@dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes per device of model states (Rajbhandari et al. 2020, section 3), padding included; activations are not in it.

    Attributes:
      total_params: trained and frozen parameters of the whole model.
      param_bytes: resting parameters.
      grad_bytes: gradients at their peak.
      optim_bytes: optimizer state; with rounds (`ax.DiLoCo`) a replica's own parameters and the outer momentum too; with error
        feedback the residuals of gradient sums.
      gathered_bytes: gathered parameters beside the resting ones, at their peak.
      joining_bytes: with rounds, what the end of one holds beside what rests, when gradients and gathered parameters are freed.
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
        """Peak bytes on the device in a step."""
        fullest = max(self.grad_bytes + self.gathered_bytes, self.joining_bytes)
        return self.param_bytes + self.optim_bytes + fullest - self.host_bytes

    @property
    def total_memory_mb(self) -> float:
        """`total_bytes` in MiB."""
        return self.total_bytes / MIB

    @property
    def memory_savings(self) -> float:
        """The share of DDP's bytes that is saved, from 0 to 1 (negative if gathering costs more than sharding saves)."""
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
      current_allocation_mb: bytes in use as the device counts them; where it does not count (CPU), those of live arrays.
      peak_memory_mb: the most so far as the device counts it; where it does not count (CPU), what the compiler planned for
        the newest trainer's step: its arguments, results and temporaries. None when neither is known.
      source: "device" or "compiled step": where the peak comes from; "" when unknown.
    """

    current_allocation_mb: float
    peak_memory_mb: float | None
    source: str


def estimate(placement: Placement, moments: int, model: Functional) -> FSDPMemoryStats:
    """Estimates the bytes of model states per device from layouts (`FSDP.memory_estimate`).

    Args:
      placement: the plan on its mesh.
      moments: optimizer values per parameter.
      model: its module types tell ZeRO-3's units.
    """
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
    """The size of a model, and the bytes that every rank would need without sharding."""
    size = lambda each: each.layout.size * each.rest_dtype.itemsize
    trained = sum(size(each) for each in placed if each.weight.trained)
    return {
        "total_params": sum(each.layout.size for each in placed),
        "replicated_bytes": sum(map(size, placed)) + (1 + moments) * trained,
    }


def _units(placement: Placement, model: Functional) -> dict[int, str]:
    """The unit of every parameter if units are gathered at their use; parameters outside of units are gathered together."""
    if not placement.at_use:
        return {}
    names = [*named_leaves(placement.params), *named_leaves(placement.frozen)]
    found = units(names, placement.at_use.wrap, model.module_types())
    inside = {i: f"unit {path}" for path, unit in found.items() for i in unit}
    return {i: inside.get(i, "outside") for i in range(len(names))}


def _of_stages(placement: Placement, moments: int) -> FSDPMemoryStats:
    """The estimate for a pipeline, whose ranks all store buffers of the size that the fullest rank needs."""
    stages, plan, placed = placement.stages, placement.plan, placed_leaves(placement)
    assert stages is not None
    accumulate = plan.precision.accumulate_dtype
    buffers = [list(store.buffers.sizes.items()) for store in (stages.params, stages.frozen)]
    params, frozen = (sum(size * jnp.dtype(group.dtype).itemsize for group, size in sizes) for sizes in buffers)
    grads = sum(size * jnp.dtype(accumulate(group.dtype)).itemsize for group, size in buffers[0])
    read = [each.read_bytes for each in placed]
    sums = [each.sum_bytes * each.weight.trained for each in placed]
    homes, count, whole = stages.assignment.stages, stages.num_stages, 0
    ranks = [None if stage is None else stage % stages.num_ranks for stage in homes]
    if stages.policy.in_ticks:
        whole = whole_of_stages(_most(read, homes, count), _most(sums, homes, count))
    elif plan.precision.compute is not None or any(each.sharded for each in placed):
        whole = _most(read, ranks, stages.num_ranks)
        grads = max(grads, _most(sums, ranks, stages.num_ranks))
    return FSDPMemoryStats(
        param_bytes=params + frozen,
        grad_bytes=grads,
        optim_bytes=moments * params,
        gathered_bytes=whole,
        offload=plan.offload,
        **_whole(placed, moments),
    )


def _most(sizes: Sequence[int], places: Sequence[int | None], count: int) -> int:
    """The largest sum of sizes at one of so many places; None: all places have as much of it."""
    totals = [0] * count
    for size, where in zip(sizes, places, strict=True):
        for each in range(count) if where is None else (where,):
            totals[each] += size // count if where is None else size
    return max(totals)


def measure(mesh: Mesh, trainer: Any) -> MemoryStats:
    """Measures the memory of the fullest device of this process (`FSDP.memory_stats`).

    Args:
      mesh: of the devices.
      trainer: a weak reference to the newest trainer, or None; its compiled step's memory stands in for a peak that devices
        do not count.
    """
    devices = mesh.local_devices
    live = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device in live and shard.data.sharding.memory_kind in (None, "device"):
                live[shard.device] += shard.data.nbytes
    current = max(live.values(), default=0) / MIB
    counted = [stats for device in devices if (stats := device.memory_stats())]
    if counted:
        current = max(stats["bytes_in_use"] for stats in counted) / MIB
        return MemoryStats(current, max(stats["peak_bytes_in_use"] for stats in counted) / MIB, "device")
    planned = trainer() if trainer is not None else None
    compiled = planned.compiled_memory() if planned is not None else None
    return MemoryStats(
        current, None if compiled is None else compiled / MIB, "" if compiled is None else "compiled step"
    )
