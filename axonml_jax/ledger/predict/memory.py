"""Bytes per device of a plan, by kind, on the rank of a pipeline that holds most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from axonml_jax.ledger.predict.activations import BlockActivations
from axonml_jax.ledger.predict.stages import Stages
from axonml_jax.ledger.predict.weight import Placed
from axonml_jax.ledger.predict.weight_flows import reads_by_unit, reduces_each
from axonml_jax.parallel.fsdp import Shard
from axonml_jax.parallel.pipeline.timetable import Timetable
from axonml_jax.parallel.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. The first two and the batch rest between steps; the others come and go.

    Attributes:
      parameters: resting parameters, padding left out.
      optimizer: its state, padding left out.
      gradients: at their fullest.
      activations: kept for the backward, and the head's and loss's at their fullest.
      gathered: whole parameters beside resting ones, and unreduced gradients of a unit.
      pipeline: buffers of a pipeline's activations and cotangents on their way, and slots for idle ticks.
      padding: zeros that make leaves divide, in parameters and optimizer.
      batch: the rank's rows.
      host: bytes of all these that rest in host memory instead.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0
    gathered: int = 0
    pipeline: int = 0
    padding: int = 0
    batch: int = 0
    host: int = 0

    @property
    def arguments(self) -> int:
        """What a compiled step takes: everything that rests, in device or host memory."""
        return self.parameters + self.optimizer + self.padding + self.batch

    @property
    def temporaries(self) -> int:
        """What a step needs more, at its fullest moment.

        Gradients grow while activations go: the fullest moment is the beginning of the backward or its end.
        """
        return max(self.activations + self.pipeline, self.gradients) + self.gathered

    @property
    def total(self) -> int:
        """Bytes on the device at the fullest moment."""
        return self.arguments + self.temporaries - self.host

    def by_kind(self) -> dict[str, int]:
        """Every kind that is not zero."""
        return {field.name: size for field in fields(self) if (size := getattr(self, field.name))}


def states(placed: Sequence[Placed], moments: int) -> dict[str, int]:
    """Parameters, optimizer, gradients and padding that one rank rests with."""
    total: dict[str, int] = {"parameters": 0, "optimizer": 0, "gradients": 0, "padding": 0}
    for each in placed:
        count, item, plan = each.count, each.rest_dtype.itemsize, each.plan
        kept = 1 + moments * each.weight.trained
        total["parameters"] += count * (each.shard - each.padding) * item
        total["optimizer"] += count * (each.shard - each.padding) * item * moments * each.weight.trained
        total["padding"] += count * each.padding * item * kept
        if each.weight.trained:
            accumulates_whole = plan.microbatches > 1 and not reduces_each(plan)
            own = each.read if accumulates_whole else each.shard
            total["gradients"] += count * own * each.sum_dtype.itemsize
    return total


def gathered(placed: Sequence[Placed]) -> int:
    """Whole parameters beside the shards: all of them, or with stage 3 the largest unit with its gradients."""
    plan = placed[0].plan
    if not isinstance(plan.fsdp, Shard) or not any(each.sharded for each in placed):
        return 0
    if not reads_by_unit(plan):
        return sum(each.count * each.read * each.read_dtype.itemsize for each in placed)
    units: dict[str, list[int]] = {}
    for each in placed:
        sizes = units.setdefault(each.weight.unit or each.weight.name, [0, 0])
        one = (1 if each.weight.unit else each.count) * each.read // each.slices
        sizes[0] += one * each.read_dtype.itemsize
        sizes[1] += one * each.sum_dtype.itemsize
    weights = max(size for size, _ in units.values())
    return (1 + plan.fsdp.prefetch) * weights + max(size for _, size in units.values())


def memory(
    ranks: Sequence[Sequence[Placed]],
    plan: Plan,
    stages: Stages,
    timetable: Timetable | None,
    block: BlockActivations,
    *,
    moments: int,
    batch: int,
) -> Memory:
    """Memory of the rank that holds most; a pipeline's ranks all allocate what the fullest needs.

    Args:
      ranks: what each rank of a pipeline holds.
      plan: the plan.
      stages: blocks by stage.
      timetable: of a pipeline.
      block: activation bytes of a block.
      moments: optimizer values per parameter.
      batch: bytes of a rank's rows.
    """
    each = [states(placed, moments) for placed in ranks]
    most = {kind: max(own[kind] for own in each) for kind in each[0]}
    whole = max(gathered(placed) for placed in ranks)
    pipeline = 0
    if timetable is None:
        activations = stages.blocks[0] * block.kept + max(block.head, block.rebuilt)
    else:
        deepest = max(stages.blocks)
        slots = timetable.residuals.size
        activations = slots * deepest * block.kept + max(block.head, block.rebuilt)
        passing = timetable.activations.size + timetable.cotangents.size + 2
        pipeline = deepest * block.kept + passing * block.boundary
    offload, host = plan.offload, 0
    host += offload.params * most["parameters"] + offload.optimizer * most["optimizer"]
    host += offload.gradients * most["gradients"]
    return Memory(**most, activations=activations, gathered=whole, pipeline=pipeline, batch=batch, host=host)


def batch_bytes(rows: int, length: int) -> int:
    """Tokens and targets of a rank's rows, int32."""
    return 2 * 4 * math.prod((rows, length))
