"""Every legal way to run a model on a number of devices."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from axonml_jax.cost.decoder.configuration import problems
from axonml_jax.mesh.axes import AXES, batch_axes
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.planner.candidate import Candidate
from axonml_jax.planner.searched_axes import FAMILIES, SEARCHED

REMATS = (None, "selective", "full")


@lru_cache(maxsize=64)
def divisors(number: int) -> tuple[int, ...]:
    """Every divisor, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def meshes(num_devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Every way to give each axis a degree so that the product is the number of devices."""
    if len(axes) == 1:
        yield {axes[0]: num_devices}
        return
    for degree in divisors(num_devices):
        for rest in meshes(num_devices // degree, axes[1:]):
            yield {axes[0]: degree, **rest}


def legal_meshes(
    model: TransformerConfig,
    num_devices: int,
    *,
    global_batch: int,
    length: int,
    axes: tuple[str, ...] = SEARCHED,
    illegal: Counter | None = None,
) -> Iterator[dict[str, int]]:
    """Every mesh (degrees above one) on which the model can run.

    Args:
      model: the transformer.
      num_devices: all of them are used.
      global_batch: sequences per update.
      length: of a sequence.
      axes: mesh axes that may have more than one rank.
      illegal: counts why meshes were refused, where given.
    """
    seen = set()
    for family in FAMILIES:
        if not (allowed := tuple(axis for axis in family if axis in axes)):
            continue
        for mesh in meshes(num_devices, allowed):
            degrees = {axis: mesh[axis] for axis in AXES if mesh.get(axis, 1) > 1}
            if (key := tuple(degrees.items())) in seen:
                continue
            seen.add(key)
            if not (reason := _refused(model, degrees, global_batch, length)):
                yield degrees
            elif illegal is not None:
                illegal[reason] += 1


def candidates(
    model: TransformerConfig,
    num_devices: int,
    *,
    global_batch: int,
    length: int,
    axes: tuple[str, ...] = SEARCHED,
    offload: CPUOffload = CPUOffload.NONE,
) -> Iterator[Candidate]:
    """Every legal way to run on every legal mesh (see `legal_meshes` for the arguments)."""
    for degrees in legal_meshes(model, num_devices, global_batch=global_batch, length=length, axes=axes):
        if offload is CPUOffload.NONE or "pipe" not in degrees:
            for way in ways_on(model, degrees, global_batch, length):
                yield candidate(degrees, way, offload)


class Way(NamedTuple):
    """How to run on a mesh that is given; see `Candidate`."""

    stage: int
    sequence_parallel: bool
    remat: str | None
    schedule: PipelineSchedule | None
    chunks: int
    microbatches: int


def candidate(
    degrees: dict[str, int],
    way: Way,
    offload: CPUOffload = CPUOffload.NONE,
    strategy: AbstractStrategy | None = None,
) -> Candidate:
    """A way on a mesh, with a strategy of the user's own along `fsdp` or without."""
    return Candidate(degrees=tuple(degrees.items()), offload=offload, strategy=strategy, **way._asdict())


def stage_of(strategy: AbstractStrategy) -> int:
    """The stage of ZeRO that reads and reduces when a strategy does.

    Raises:
      ValueError: for one that does not shard parameters at rest over an axis that splits rows.
    """
    role = strategy.role
    if role.parameters != "sharded" or role.batch != "rows" or role.reduces not in ("step", "microbatch"):
        raise ValueError(
            f"strategies: {strategy!r} has the {role}; the planner puts strategies along fsdp that shard parameters at rest "
            "and split rows"
        )
    return 3 if role.reads == "use" else 2 if role.reduces == "microbatch" else 1


def ways_on(
    model: TransformerConfig,
    degrees: dict[str, int],
    global_batch: int,
    length: int,
    remats: tuple[str | None, ...] = REMATS,
) -> tuple[Way, ...]:
    """Every way to run on a mesh, with these kinds of recomputation; the same object for meshes that allow the same."""
    rows = global_batch // math.prod(degrees[axis] for axis in batch_axes(degrees))
    tensor = degrees.get("tensor", 1)
    splits = tensor > 1 and length % tensor == 0
    return _ways(model.num_layers, "fsdp" in degrees, splits, degrees.get("pipe", 1), rows, remats)


@lru_cache(maxsize=1024)
def _ways(
    num_layers: int, sharded: bool, splits: bool, pipe: int, rows: int, remats: tuple[str | None, ...]
) -> tuple[Way, ...]:
    stages, sequence = (1, 2, 3) if sharded else (0,), (False, True) if splits else (False,)
    orders = list(_orders(num_layers, pipe, rows))
    return tuple(
        Way(stage, split, remat, *order)
        for stage in stages
        for split in sequence
        for remat in remats
        for order in orders
    )


def _refused(model: TransformerConfig, degrees: dict[str, int], global_batch: int, length: int) -> str:
    """Why a mesh does not go with a model; empty when it does."""
    grid = any(axis in degrees for axis in ("depth", "row", "col"))
    if grid and model.loss_chunk:
        return "a loss of chunks of words does not go with the grid"
    split: Any = replace(model, split="grid" if grid else "tensor", sequence_parallel=False)
    if problems(split, degrees, length):
        return f"layers do not divide over {'the grid' if grid else 'tensor'}"
    if degrees.get("pipe", 1) > model.num_layers:
        return "fewer blocks than pipeline ranks"
    if global_batch % math.prod(degrees[axis] for axis in batch_axes(degrees)):
        return "the batch does not divide over its shards"
    return ""


def _orders(num_layers: int, pipe: int, rows: int) -> Iterator[tuple[PipelineSchedule | None, int, int]]:
    """(schedule, chunks, microbatches)."""
    for count in divisors(rows):
        if pipe == 1:
            yield None, 1, count
        elif count > 1:
            yield PipelineSchedule.GPIPE, 1, count
            yield PipelineSchedule.ONE_F_ONE_B, 1, count
            for chunks in (2, 4):
                if pipe * chunks <= num_layers:
                    yield PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, chunks, count
