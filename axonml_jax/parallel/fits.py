"""What of a plan fits a mesh: axes that would do the same work are refused, defaults that depend on the devices decided."""

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import Mesh, PartitionSpec

from axonml_jax.mesh.axes import LAYER_AXES, as_axes
from axonml_jax.parallel.ddp import Replicate
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.hops import torus_of
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan


def check_axes(plan: Plan, degrees: Mapping[str, int], in_layers: Mapping[str, PartitionSpec]) -> None:
    """Refuse axes along which all ranks would do the same work."""
    used = {axis for spec in in_layers.values() for entry in spec for axis in as_axes(entry or ())}
    known = [axis for axis in plan.strategies if axis not in LAYER_AXES or axis in used] + [AXIS] * (
        plan.pipe is not None
    )
    if plan.pipe is not None and AXIS not in degrees:
        raise ValueError(
            f"the plan is pipelined, but the mesh {dict(degrees)} has no axis {AXIS!r} for the stages: use "
            "ax.make_mesh(pipe=..., data=...), or a plan with pipe=None"
        )
    if plan.pipe is None and degrees.get(AXIS, 1) > 1:
        raise ValueError(
            f"the mesh has {AXIS}={degrees[AXIS]}, and the plan says nothing about stages: give it "
            "pipe=ax.Pipelined(num_microbatches=..., schedule=...), use ax.Pipeline, or a mesh without this axis"
        )
    unknown = {axis: size for axis, size in degrees.items() if axis not in known and size > 1}
    if unknown:
        raise ValueError(
            f"mesh axes {unknown} have no strategy in the plan, which knows {known}: their devices would all do the "
            "same work. Give the mesh these devices on one of the plan's axes, or build the model with layers that split over "
            "them (ax.ColumnParallelLinear, ax.ParallelLinear, ...), or swap its own by ax.auto_parallelize, whose report says "
            "why each was left"
        )


def decided(plan: Plan, mesh: Mesh) -> Plan:
    """Flat buffers on gloo, where many small reductions are slow (elsewhere XLA's combiner needs no copy); hops on a torus."""
    devices, degrees = mesh.devices.flat, dict(mesh.shape)
    gloo = devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1

    def decide(strategy: Replicate | Shard) -> Replicate | Shard:
        if isinstance(strategy, Shard):
            hopping = strategy.hopping(torus_of(list(devices)), degrees.get("fsdp", 1), mesh.size)
            return replace(hopping, flat=gloo) if strategy.flat is None else hopping
        if strategy.gradient_as_bucket_view is not None or strategy.comm_hook is not None:
            return strategy
        return replace(strategy, gradient_as_bucket_view=not gloo)

    return replace(plan, data=decide(plan.data), fsdp=decide(plan.fsdp))
