"""`Memory`: bytes per device by kind, on the rank that holds most; and the items of it that weights and activations need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from axonml_jax.cost.amounts import Many, divided, either, most
from axonml_jax.cost.decoder.activations import BlockActivations
from axonml_jax.cost.passing import TickCounts
from axonml_jax.cost.rounds import Run, ShardCounts
from axonml_jax.cost.weight_groups import Group, Weights
from axonml_jax.parallel.offload import CPUOffload


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. The first two and the batch rest between steps; the others come and go.

    Each is a number for one plan, or an array for many candidates at once.

    Attributes:
      parameters: resting parameters, padding left out.
      optimizer: its state, padding left out; with rounds a replica's own parameters and the outer momentum too, and what sums
        of gradients leave out where that is fed back.
      gradients: at their fullest.
      activations: kept for the backward, and the head's and loss's at their fullest.
      gathered: whole parameters beside resting ones, and unreduced gradients of a unit.
      pipeline: buffers of a pipeline's activations and cotangents on their way, slots for idle ticks, and what one tick of a
        stage holds beside the slots.
      joining: at the end of a round (`ax.DiLoCo`): a replica's parameters after the step, their differences from the outer ones
        and the sums of these. It comes after the backward, so its fullest moment is another one.
      padding: zeros that make leaves divide, in parameters and optimizer.
      batch: the rank's rows.
      host: bytes of all these that rest in host memory instead.
    """

    parameters: Many = 0
    optimizer: Many = 0
    gradients: Many = 0
    activations: Many = 0
    gathered: Many = 0
    pipeline: Many = 0
    joining: Many = 0
    padding: Many = 0
    batch: Many = 0
    host: Many = 0

    @property
    def arguments(self) -> Many:
        """What a compiled step takes: everything that rests, in device or host memory."""
        return self.parameters + self.optimizer + self.padding + self.batch

    @property
    def temporaries(self) -> Many:
        """What a step needs more, at its fullest moment.

        Gradients grow while activations go: the fullest moment is the beginning of the backward or its end. A pipeline
        accumulates gradients while others of its microbatches are under way: it holds both.
        """
        both = self.activations + self.pipeline + self.gradients
        backward = either(self.pipeline > 0, both, most(self.activations, self.gradients)) + self.gathered
        return most(backward, self.joining)

    @property
    def total(self) -> Many:
        """Bytes on the device at the fullest moment."""
        return self.arguments + self.temporaries - self.host

    def by_kind(self) -> dict[str, int]:
        """Every kind that is not zero."""
        return {field.name: size for field in fields(self) if (size := getattr(self, field.name))}


class Rests(NamedTuple):
    """Bytes of parameters that rest on a rank: of all, of trained ones, and of the padding of both, which is in neither."""

    parameters: Many
    trained: Many
    padding: Many
    trained_padding: Many


def rests(weights: Weights, parts: ShardCounts) -> Rests:
    """What of a model rests on a rank."""
    total = lambda own: sum(resting(group, parts) * own(group) for group in weights.groups)
    return Rests(
        total(lambda group: group.rest_bytes),
        total(lambda group: group.rest_bytes * group.trained),
        total(lambda group: group.padding_bytes),
        total(lambda group: group.padding_bytes * group.trained),
    )


def gradients(weights: Weights, parts: ShardCounts, run: Run) -> Many:
    """Of what rests on a rank, at their fullest: what is reduced at the end of a step accumulates whole."""
    total = 0
    for group in weights.groups:
        if group.trained:
            whole = (run.microbatches > 1) & (run.rounds(group.sharded).reductions == 1)
            total = total + resting(group, parts) * either(whole, group.sum_bytes, group.shard_sum_bytes)
    return total


def left_out(weights: Weights, parts: ShardCounts) -> Many:
    """What sums of gradients leave out of a rank's, and feed back: as large as all of its whole gradients."""
    return sum(resting(group, parts) * group.left_bytes * group.trained for group in weights.groups)


def states(weights: Weights, parts: ShardCounts, run: Run, moments: int) -> dict[str, Many]:
    """Parameters, optimizer, gradients and padding that one rank rests with."""
    own, moments = rests(weights, parts), moments + run.copies
    return {
        "parameters": own.parameters,
        "optimizer": moments * own.trained + left_out(weights, parts),
        "gradients": gradients(weights, parts, run),
        "joining": run.joining * (own.trained + own.trained_padding),
        "padding": own.padding + moments * own.trained_padding,
    }


def resting(group: Group, parts: ShardCounts) -> Many:
    """How many of each rest on a rank: what both ends of a pipeline read rests on the first."""
    number = parts.number(group.place, group.count)
    return number * parts.first if group.place == "both ends" else number


def gathered(weights: Weights, parts: ShardCounts, run: Run) -> Many:
    """Whole parameters beside the shards: all of them, or those of units that are read at their use and one's gradients."""
    axis = next((group.sharded for group in weights.groups if group.sharded is not None), None)
    if axis is None:
        return 0
    whole = sum(parts.number(group.place, group.count) * group.read_bytes for group in weights.groups)
    return either(run.rounds(axis).at_use > 0, weights.unit_bytes, whole)


def read_by_stages(weights: Weights, parts: ShardCounts, chunks: Many, in_ticks: bool) -> Many:
    """What a pipeline's rank reads beside what rests: all of its stages, or those that it is busy with and one's gradients.

    Weights that are read as they rest are read where they are.
    """
    numbers = [parts.number(group.place, group.count) for group in weights.groups]
    here = list(zip(weights.groups, numbers, strict=True))
    elsewhere = any(group.place == "both ends" for group in weights.groups)
    copied = most(0, *(either(number > 0, 1, 0) for group, number in here if elsewhere or not group.as_they_rest))
    reads = sum(number * group.read_bytes for group, number in here)
    sums = sum(number * group.sum_bytes * group.trained for group, number in here)
    return copied * (divided(whole_of_stages(reads, sums), chunks) if in_ticks else reads)


def whole_of_stages(reads: Many, sums: Many) -> Many:
    """Of stages that are gathered in a pipeline's ticks: a forward's and a backward's are whole, and one's gradients."""
    return 2 * reads + sums


def memory(
    weights: Weights, ranks: Sequence[ShardCounts], run: Run, *, activations: Many, pipeline: Many, whole: Many, moments: int,
    batch: Many, offload: CPUOffload,
) -> Memory:  # fmt: skip
    """Memory of the rank that holds most; a pipeline's ranks all allocate what the fullest needs.

    Args:
      weights: of the model.
      ranks: what each rank of a pipeline has of it.
      run: how a step runs.
      activations, pipeline: as of `Memory`.
      whole: what is whole beside what rests.
      moments: optimizer values per parameter.
      batch: bytes of a rank's rows.
      offload: what rests on the host.
    """
    each = [states(weights, parts, run, moments) for parts in ranks]
    held = {kind: most(*(own[kind] for own in each)) for kind in each[0]}
    return Memory(
        **held, activations=activations, gathered=whole, pipeline=pipeline, batch=batch, host=on_host(held, offload)
    )


def on_host(held: Mapping[str, Many], offload: CPUOffload) -> Many:
    """Bytes of parameters, optimizer and gradients that rest in host memory."""
    away = {"parameters": offload.params, "optimizer": offload.optimizer, "gradients": offload.gradients}
    return sum(size * away.get(kind, False) for kind, size in held.items())


def of_blocks(blocks: Many, block: BlockActivations) -> Many:
    """Activations of a rank's blocks, and the head's or of a block that is recomputed and reads other ranks' positions."""
    return blocks * block.kept + most(block.head, block.rebuilt + block.others)


def of_ticks(blocks: Many, ticks: TickCounts, block: BlockActivations) -> tuple[Many, Many]:
    """Slots of a pipeline, and what passes between ranks and through one tick.

    A stage is recomputed as a whole: what enters it is kept, and of its blocks what the policy keeps, but not what enters them.
    """
    slot = blocks * (block.kept - block.boundary) + block.boundary
    tick = blocks * either(block.rebuilt > 0, block.rebuilt, block.kept) + block.head + block.others
    return ticks.slots * slot, slot + tick + (ticks.arriving + 2) * block.boundary


def batch_bytes(rows: Many, positions: Many, documents: bool) -> Many:
    """Tokens and targets of a rank's part of the batch, int32; of rows of several documents which is where, and places too."""
    return (4 if documents else 2) * 4 * rows * positions
