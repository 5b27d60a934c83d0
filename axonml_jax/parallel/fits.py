"""What of a plan fits a mesh: axes that would do the same work are refused."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from axonml_jax.mesh.axes import LAYER_AXES, AxisNames, as_axes
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.replicate import Replicate


def check_axes(plan: Plan, degrees: Mapping[str, int], in_layers: Mapping[str, PartitionSpec]) -> None:
    """Refuse axes along which all ranks would do the same work."""
    used = {axis for spec in in_layers.values() for entry in spec for axis in as_axes(entry or ())}
    known = [name for axis in plan.strategies for name in as_axes(axis) if name not in LAYER_AXES or name in used]
    known += [AXIS] * (plan.pipe is not None)
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
    left = _check_left(plan, degrees)
    _check_rounds(plan, degrees, left=bool(left))
    _check_partition(plan, degrees)
    _check_strategies(plan, degrees)
    unknown = {axis: size for axis, size in degrees.items() if axis not in known and size > 1}
    if unknown:
        raise ValueError(
            f"mesh axes {unknown} have no strategy in the plan, which knows {known}: their devices would all do the "
            "same work. Give the mesh these devices on one of the plan's axes, or build the model with layers that split over "
            "them (ax.ColumnParallelLinear, ax.ParallelLinear, ...), or swap its own by ax.auto_parallelize, whose report says "
            "why each was left"
        )


def _check_left(plan: Plan, degrees: Mapping[str, int]) -> list[AxisNames]:
    """The axes left to the partitioner; refuse what they do not go with."""
    left = [
        axis for axis, each in plan.on(degrees).items() if each.left_to_partitioner and degrees[as_axes(axis)[0]] > 1
    ]
    if left and plan.check_vma:
        raise ValueError(
            f"{', '.join(map(str, left))} is left to XLA's partitioner, since the model's code sees whole sequences, and "
            "JAX has no gradient of attention across ranks in there with types that are checked: leave out check_vma=True, "
            "or write the model for its rank's positions (ax.context_attention, ax.context_positions; splits_positions = True)"
        )
    return left


def _check_rounds(plan: Plan, degrees: Mapping[str, int], *, left: bool) -> None:
    """Refuse rounds without an axis of replicas, and what is not written for a rank's own parameters."""
    for axis, rounds in plan.rounds.items():
        name = type(rounds).__name__
        if missing := [each for each in as_axes(axis) if each not in degrees]:
            raise ValueError(
                f"{name} has its replicas along {', '.join(missing)}, which the mesh {dict(degrees)} lacks: use "
                f"ax.make_mesh({missing[0]}=..., ...), or another strategy"
            )
        if left:
            raise ValueError(
                f"{name}: the model's code sees whole sequences, which leaves the axis of positions to XLA's partitioner, and "
                "the end of a round runs on what a rank holds: write the model for its rank's positions "
                "(ax.context_attention, splits_positions = True), or use a mesh without this axis"
            )


def _check_partition(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse what does not go with axes that path rules leave to the partitioner."""
    if plan.partition is None:
        return
    layout = plan.batch_layout(degrees)
    if plan.check_vma and all(degrees[axis] == 1 for axis in layout.axes):
        raise ValueError(
            f"partition= leaves all axes of {dict(degrees)} that have ranks to XLA's partitioner, which does not accept what "
            "JAX's types write where no other axis splits the batch: leave out check_vma=True, or give data ranks"
        )
    if along := [axis for axis, _ in layout.positions if degrees[axis] > 1]:
        raise ValueError(
            f"{', '.join(along)} splits positions, and partition= leaves an axis to XLA's partitioner, whose outputs are not "
            "known to be whole there: use layers that split themselves (ax.ColumnParallelLinear, ax.auto_parallelize), or no "
            "axis that splits positions"
        )


def _check_strategies(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse strategies that do not go together, or whose options would have no effect."""
    sharded = {
        axis: strategy
        for axis, strategy in plan.on(degrees).items()
        if strategy.role.parameters == "sharded" and any(degrees[name] > 1 for name in as_axes(axis))
    }
    if len(sharded) > 1:
        together = tuple(name for axis in sharded for name in as_axes(axis))
        raise ValueError(
            f"the axes {', '.join(map(str, sharded))} each shard parameters at rest, by {list(sharded.values())}: one strategy "
            f"must own them together, ax.Plan(axes={{{together}: ...}}), or all but one replicate (ax.Replicate())"
        )
    reducer = plan.reducer(degrees)
    asked = lambda strategy: (strategy.bucket_bytes, strategy.overlaps)
    idle = {
        axis: strategy
        for axis, strategy in plan.on(degrees).items()
        if strategy.role.reduces == "step" and asked(strategy) not in (asked(reducer), asked(Replicate()))
    }
    if idle:
        raise ValueError(
            f"buckets and overlap are those of one strategy of a plan, here {reducer!r}; what these say of them would have no "
            f"effect: {idle}. Say it there"
        )
    _check_feedback(plan, degrees)
    acting = [strategy for strategy in plan.on(degrees).values() if strategy.acts_between_steps]
    if acting and (plan.pipe is not None or plan.offload is not CPUOffload.NONE):
        raise ValueError(
            f"{', '.join(map(repr, acting))} acts on parameters between steps (init_state, after_update), which a pipeline's "
            "buffers and what rests in host memory do not give it: use a plan without pipe and without offload, or another "
            "strategy"
        )


def _check_feedback(plan: Plan, degrees: Mapping[str, int]) -> None:
    """Refuse to feed back what sums leave out where a rank has no whole gradient of its own, once a step and in one unit."""
    there = plan.on(degrees)
    if not (fed := {axis: each for axis, each in there.items() if each.feeds_back}):
        return
    roles = {axis: each.role for axis, each in there.items() if any(degrees[name] > 1 for name in as_axes(axis))}
    reducing = [axis for axis in reversed(roles) if roles[axis].reduces in ("step", "microbatch")]
    reducing.sort(key=lambda axis: roles[axis].parameters != "sharded")
    wrong = {
        "a pipeline, whose stages' gradients lie in buffers": plan.pipe is not None,
        "what rests in host memory": plan.offload is not CPUOffload.NONE,
        "rounds, and ranks that train models of their own": bool(plan.rounds)
        or any(role.reduces == "never" for role in roles.values()),
        "axes that are left to XLA's partitioner": bool(plan.left(degrees)),
        "float16, whose loss scale changes": plan.precision.scales_loss,
        "an axis over which layers split parameters and the batch too": any(
            role.parameters == "layers" and role.batch is not None for role in roles.values()
        ),
        "a strategy that reduces after every microbatch": any(each.role.reduces != "step" for each in fed.values()),
        "another axis whose gradients are summed before": bool(reducing) and reducing[0] not in fed,
        "a second strategy that does the same": len(fed) > 1,
    }
    if why := [name for name, found in wrong.items() if found]:
        raise ValueError(
            f"{', '.join(map(repr, fed.values()))} adds what its sums leave out of a rank's gradients to the next step's, and "
            f"does not go with {'; nor with '.join(why)}: leave that out, or use a strategy without feedback (reduce='int8')"
        )
