"""Every legal way to run a model on a number of devices."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from axonml_jax.cost.decoder.configuration import problems
from axonml_jax.mesh.axes import AXES, batch_axes
from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.context.method import Method, unsplittable
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.schedules.schedule import PipelineSchedule
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.planner.candidate import Candidate
from axonml_jax.planner.searched_axes import FAMILIES, SEARCHED, SHORTEST
from axonml_jax.sharding.sequence_order import order_parts

GRID = ("depth", "row", "col")
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
    shortest: int = SHORTEST,
    illegal: Counter | None = None,
) -> Iterator[dict[str, int]]:
    """Every mesh (degrees above one) on which the model can run.

    Args:
      model: the transformer.
      num_devices: all of them are used.
      global_batch: sequences per update.
      length: of a sequence.
      axes: mesh axes that may have more than one rank.
      shortest: positions of a rank at least.
      illegal: counts why meshes were refused, where given.
    """
    seen = set()
    for family in FAMILIES:
        if not (allowed := tuple(axis for axis in family if axis in axes and _goes_with(model, axis))):
            continue
        for mesh in meshes(num_devices, allowed):
            degrees = {axis: mesh[axis] for axis in AXES if mesh.get(axis, 1) > 1}
            if (key := tuple(degrees.items())) in seen:
                continue
            seen.add(key)
            if not (reason := _refused(model, degrees, global_batch, length, shortest)):
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
    shortest: int = SHORTEST,
    offload: CPUOffload = CPUOffload.NONE,
) -> Iterator[Candidate]:
    """Every legal way to run on every legal mesh (see `legal_meshes` for the arguments)."""
    for degrees in legal_meshes(
        model, num_devices, global_batch=global_batch, length=length, axes=axes, shortest=shortest
    ):
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
    method: Method | None = None
    shared: bool = False
    dispatch: str | None = None


def candidate(
    degrees: Mapping[str, int],
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
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    splits = tensor > 1 and length // context % tensor == 0
    stages = [(stage, context > 1) for stage in (1, 2, 3)] if "fsdp" in degrees or context > 1 else []
    stages += [(0, False)] if "fsdp" not in degrees else []
    carried = tuple(itertools.product(_methods(model, context, tensor), _dispatches(model, degrees.get("expert", 1))))
    return _ways(model.num_layers, tuple(stages), splits, carried, degrees.get("pipe", 1), rows, remats)


def _dispatches(model: TransformerConfig, ranks: int) -> tuple[str | None, ...]:
    """How tokens may reach their experts: as the model says, or, where it leaves that open, the other way too."""
    experts = model.experts
    if experts is None or ranks == 1 or experts.dispatch != "auto" or experts.capacity_factor is not None:
        return (None,)
    return None, "rounds" if ranks <= experts.top_k else "gather"


def _goes_with(model: TransformerConfig, axis: str) -> bool:
    """Whether a model can be split over an axis at all."""
    if axis in GRID:
        return model.experts is None and model.latent is None
    if axis == "context":
        return model.attention != "xla"  # which reads a rank's own positions
    return model.experts is not None or axis != "expert"


def _methods(model: TransformerConfig, context: int, tensor: int) -> tuple[Method | None, ...]:
    """By which attention may read positions of other ranks: with U ranks that split heads, for every U that can."""
    if context == 1:
        return (None,)
    heads = model.num_heads // tensor, max(1, model.attention_shape.kv_heads // tensor)
    able = [count for count in divisors(context)[1:] if not unsplittable(count, *heads)]
    if model.attention == "cudnn":  # a kernel of whole sequences
        return ("ulysses",) if context in able else ()
    whole: list[Method] = ["gather", "ulysses"] if context in able else ["gather"]
    found = whole + [(count, "gather") for count in able if count < context]
    if model.window is None:  # how far a ring goes with a window is not priced
        found += ["ring", *((count, "ring") for count in able if count < context)]
    return tuple(found)


@lru_cache(maxsize=1024)
def _ways(
    num_layers: int, stages: tuple[tuple[int, bool], ...], splits: bool,
    carried: tuple[tuple[Method | None, str | None], ...], pipe: int, rows: int, remats: tuple[str | None, ...],
) -> tuple[Way, ...]:  # fmt: skip
    orders = list(_orders(num_layers, pipe, rows))
    return tuple(
        Way(stage, split, remat, *order, method, shared, dispatch)
        for stage, shared in stages
        for split in ((False, True) if splits else (False,))
        for method, dispatch in carried
        for remat in remats
        for order in orders
    )


def _refused(model: TransformerConfig, degrees: dict[str, int], global_batch: int, length: int, shortest: int) -> str:
    """Why a mesh does not go with a model; empty when it does."""
    grid = any(axis in degrees for axis in GRID)
    if grid and model.loss_chunk:
        return "a loss of chunks of words does not go with the grid"
    split: Any = replace(model, split="grid" if grid else "tensor", sequence_parallel=False)
    if model.experts is not None and model.experts.num_experts % degrees.get("expert", 1):
        return "experts do not divide over their ranks"
    if problems(split, degrees, length):
        return f"layers do not divide over {'the grid' if grid else 'tensor'}"
    if degrees.get("pipe", 1) > model.num_layers:
        return "fewer blocks than pipeline ranks"
    if global_batch % math.prod(degrees[axis] for axis in batch_axes(degrees)):
        return "the batch does not divide over its shards"
    if (context := degrees.get("context", 1)) > 1 and length % order_parts("zigzag", context):
        return "positions do not divide over twice the ranks of context"
    if context > 1 and length // context < shortest:
        return f"fewer than {shortest:,} positions on a rank of context"
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
