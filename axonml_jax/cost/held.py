"""Bytes per device of a plan, by kind, on the rank of a pipeline that holds most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from axonml_jax.cost.activations import BlockActivations
from axonml_jax.cost.cuts import Stages
from axonml_jax.cost.weight import Placed
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
      pipeline: buffers of a pipeline's activations and cotangents on their way, slots for idle ticks, and what one tick of a
        stage holds beside the slots.
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

        Gradients grow while activations go: the fullest moment is the beginning of the backward or its end. A pipeline
        accumulates gradients while others of its microbatches are under way: it holds both.
        """
        if self.pipeline:
            return self.activations + self.pipeline + self.gradients + self.gathered
        return max(self.activations, self.gradients) + self.gathered

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
        count, item, plan = each.count * (not each.copied), each.rest_dtype.itemsize, each.plan
        kept = 1 + moments * each.weight.trained
        total["parameters"] += count * (each.shard - each.padding) * item
        total["optimizer"] += count * (each.shard - each.padding) * item * moments * each.weight.trained
        total["padding"] += count * each.padding * item * kept
        if each.weight.trained:
            accumulates_whole = plan.microbatches > 1 and each.rounds.scatters == 1
            own = each.read if accumulates_whole else each.shard
            total["gradients"] += count * own * each.sum_dtype.itemsize
    return total


def gathered(placed: Sequence[Placed]) -> int:
    """Whole parameters beside the shards: all of them, or with stage 3 the largest unit with its gradients."""
    sharded = [each for each in placed if each.sharded]
    if not sharded:
        return 0
    if not sharded[0].rounds.backward:
        return sum(each.count * each.read * each.read_dtype.itemsize for each in placed)
    units: dict[str, list[int]] = {}
    for each in placed:
        sizes = units.setdefault(each.weight.unit or each.weight.name, [0, 0])
        one = (1 if each.weight.unit else each.count) * each.read // each.slices
        sizes[0] += one * each.read_dtype.itemsize
        sizes[1] += one * each.sum_dtype.itemsize
    weights = max(size for size, _ in units.values())
    return (1 + sharded[0].prefetch) * weights + max(size for _, size in units.values())


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
    whole, pipeline = max(gathered(placed) for placed in ranks), 0
    if timetable is None:
        activations = stages.blocks[0] * block.kept + max(block.head, block.rebuilt)
    else:
        activations, pipeline = _of_ticks(max(stages.blocks), timetable, block)
        whole = max(_read_by_stages(placed, plan) for placed in ranks)
    offload, host = plan.offload, 0
    host += offload.params * most["parameters"] + offload.optimizer * most["optimizer"]
    host += offload.gradients * most["gradients"]
    return Memory(**most, activations=activations, gathered=whole, pipeline=pipeline, batch=batch, host=host)


def _of_ticks(blocks: int, timetable: Timetable, block: BlockActivations) -> tuple[int, int]:
    """Slots of a pipeline, and what passes between ranks and through one tick.

    A stage is recomputed as a whole: what enters it is kept, and of its blocks what the policy keeps, but not what enters them.
    """
    slot = blocks * (block.kept - block.boundary) + block.boundary
    tick = blocks * (block.rebuilt or block.kept) + block.head
    passing = timetable.activations.size + timetable.cotangents.size + 2
    return timetable.residuals.size * slot, slot + tick + passing * block.boundary


def _read_by_stages(placed: Sequence[Placed], plan: Plan) -> int:
    """What a pipeline's rank reads beside what rests: all of its stages, or those that it is busy with and one's gradients.

    Weights that are read as they rest are read where they are.
    """
    here = [each for each in placed if each.count]
    as_they_rest = all(each.read_dtype == each.rest_dtype and not each.sharded for each in here)
    if as_they_rest and not any(each.weight.place == "both ends" for each in placed):
        return 0
    assert plan.pipe is not None
    reads = sum(each.count * each.read * each.read_dtype.itemsize for each in here)
    sums = sum(each.count * each.read * each.sum_dtype.itemsize for each in here if each.weight.trained)
    return (2 * reads + sums) // plan.pipe.chunks if plan.pipe.in_ticks else reads


def batch_bytes(rows: int, length: int) -> int:
    """Tokens and targets of a rank's rows, int32."""
    return 2 * 4 * math.prod((rows, length))
