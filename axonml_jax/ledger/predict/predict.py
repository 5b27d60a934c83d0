"""From a plan and a decoder's configuration to its prediction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from axonml_jax.cost.activations import block_activations, compute_dtype
from axonml_jax.cost.cuts import Stages, bubble, stage_costs, stages_of, timetable_of
from axonml_jax.cost.decoder import DecoderLike, decoder_weights, layer_degrees, problems
from axonml_jax.cost.flow import EACH_TICK, Flow, merged
from axonml_jax.cost.held import Memory, batch_bytes, memory
from axonml_jax.cost.layer_flows import Layers, layer_flows
from axonml_jax.cost.weight import Placed, place
from axonml_jax.cost.weight_flows import minimum_traffic, small_flows, weight_flows
from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.mesh.axes import AXES, LAYER_AXES, as_axes, flat_axes
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.timetable import Timetable
from axonml_jax.parallel.plan import Plan

LOSS_VALUES = 2
"""A weighted mean: the total and its weight."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of which is predicted: how it runs, on how much, and what its ranks hold.

    Attributes:
      tokens: of a rank's microbatch.
      length: of a sequence.
      ranks: weights by rank of the pipe axis.
      fullest: the rank that holds most, whose traffic is told.
    """

    plan: Plan
    model: DecoderLike
    degrees: dict[str, int]
    stages: Stages
    timetable: Timetable | None
    tokens: int
    length: int
    ranks: Sequence[tuple[Placed, ...]]
    fullest: int


def predict(
    plan: Plan,
    model: DecoderLike,
    degrees: Mapping[str, int],
    *,
    global_batch: int,
    length: int | None = None,
    moments: int = 2,
    platform: str | None = None,
    torus: int = 0,
) -> Prediction:
    """Memory, traffic, bubble and FLOPs of a training step, from shapes alone.

    Args:
      plan: how the step runs.
      model: the transformer's configuration; it says how its layers split too.
      degrees: of the mesh.
      global_batch: sequences per update.
      length: of a sequence; None: the longest the model takes.
      moments: values that the optimizer keeps per parameter (Adam 2, Lion 1, SGD 0).
      platform: what it will be compiled for, "tpu" or "cuda", whose kernels of attention hold no scores; None: neither.
      torus: dims of the torus that the devices form, which decides on the hops of FSDP's collectives; 0: none.

    Raises:
      ValueError: with everything that cannot work.
    """
    degrees = {axis: degrees[axis] for axis in (*AXES, *flat_axes(plan.axes)) if axis in degrees}
    plan = plan.decided(Fabric(devices=math.prod(degrees.values()), torus=torus), degrees)
    length = model.max_length if length is None else length
    rows = _rows(plan, model, degrees, global_batch, length)
    stages, timetable = stages_of(model, plan, degrees), timetable_of(plan, degrees)
    ranks = held_by_ranks(model, plan, degrees, stages)
    fullest = max(range(stages.num_ranks), key=lambda rank: sum(each.count * each.read for each in ranks[rank]))
    compute = compute_dtype(model, plan.precision.compute)
    tokens = rows // plan.microbatches * length
    apart = timetable is not None or (model.scan_layers and any(each.slices > 1 for each in ranks[fullest]))
    block = block_activations(model, degrees, tokens, length, compute, plan.remat, platform, apart=apart)
    held = memory(ranks, plan, stages, timetable, block, moments=moments, batch=batch_bytes(rows, length))
    step = _Step(
        plan=plan, model=model, degrees=degrees, stages=stages, timetable=timetable, tokens=tokens, length=length, ranks=ranks,
        fullest=fullest,
    )  # fmt: skip
    flops, costs = model.flops_per_token(length), stage_costs(model, plan, stages, length)
    return Prediction(
        degrees={axis: ranks for axis, ranks in degrees.items() if ranks > 1},
        plan=in_words(plan, degrees, model),
        memory=held,
        traffic=_flows(step),
        minimum=_minimum(step),
        bubble=bubble(timetable, costs),
        ticks=0 if timetable is None else timetable.num_ticks,
        microbatches=plan.microbatches,
        params=model.num_params,
        tokens=global_batch * length,
        flops_per_token=flops,
        recomputed_flops_per_token=_recomputed(model, plan, length),
        notes=_notes(plan, degrees, timetable, held),
        timetable=timetable,
        stage_costs=None if timetable is None else costs,
    )


def _rows(plan: Plan, model: DecoderLike, degrees: Mapping[str, int], global_batch: int, length: int) -> int:
    """Sequences per rank and update, once everything divides."""
    shards = plan.batch_layout(degrees).degree
    parts = shards * plan.microbatches
    found = problems(model, degrees, length)
    if global_batch % parts:
        found.append(f"{global_batch} sequences do not divide into {shards} shards of {plan.microbatches} microbatches")
    if length > model.max_length:
        found.append(f"sequences of {length} are longer than the model's {model.max_length}")
    if degrees.get(AXIS, 1) > 1 and plan.pipe is None:
        found.append(f"pipe={degrees[AXIS]} without a pipeline in the plan: give it pipe=ax.Pipelined(...)")
    if found:
        raise ValueError(f"this plan cannot run: {'; '.join(found)}")
    return global_batch // shards


def held_by_ranks(
    model: DecoderLike, plan: Plan, degrees: Mapping[str, int], stages: Stages
) -> list[tuple[Placed, ...]]:
    """What each rank of the pipe axis holds (the one rank, without a pipeline)."""
    placed = _placed(model, plan, tuple(degrees.items()))
    found = []
    for rank in range(stages.num_ranks):
        here = {
            "block": lambda each, rank=rank: stages.on_rank(rank) * each.count // model.num_layers,
            "first": lambda each, rank=rank: each.count * stages.first(rank),
            "last": lambda each, rank=rank: each.count * stages.last(rank),
            "both ends": lambda each, rank=rank: each.count * (stages.first(rank) or stages.last(rank)),
        }
        away = lambda each, rank=rank: each.weight.place == "both ends" and not stages.first(rank)
        found.append(tuple(each.times(here[each.weight.place](each), away(each)) for each in placed))
    return found


def _placed(model: DecoderLike, plan: Plan, degrees: tuple[tuple[str, int], ...]) -> tuple[Placed, ...]:
    # Where weights rest does not depend on what the step does with them, so placements are shared between plans.
    own: Any = plan.axes  # hashable, as every plan's are
    layouts = _layouts(model, plan.data, plan.fsdp, own, plan.precision.param, degrees)
    return tuple(replace(each, plan=plan) for each in layouts)


@lru_cache(maxsize=4096)
def _layouts(
    model: Any, data: Any, fsdp: Any, axes: Any, param: str | None, degrees: tuple[tuple[str, int], ...]
) -> tuple[Placed, ...]:
    plan = Plan(data=data, fsdp=fsdp, axes=axes, precision=Precision(param=param))
    return tuple(place(weight, plan, dict(degrees)) for weight in decoder_weights(model, dict(degrees)))


def _flows(step: _Step) -> tuple[Flow, ...]:
    """The traffic of the fullest rank."""
    model, stages, rank, placed = step.model, step.stages, step.fullest, step.ranks[step.fullest]
    layers = Layers(
        config=model,
        degrees=step.degrees,
        tokens=step.tokens,
        length=step.length,
        dtype=placed[0].read_dtype.name if model.dtype is None else model.dtype,
        blocks=stages.on_rank(rank),
        first=stages.first(rank),
        last=stages.last(rank),
        times=step.plan.microbatches,
        remat=step.plan.remat,
    )
    flows = [*weight_flows(placed), *small_flows(placed, LOSS_VALUES), *layer_flows(layers, placed)]
    if step.timetable is not None:
        flows += _passing(step.timetable, step.degrees, layers)
    return merged(flows)


def _passing(timetable: Timetable, degrees: dict[str, int], layers: Layers) -> list[Flow]:
    """Activations and cotangents between stages: one permute each way in every tick."""
    own = layer_degrees(layers.config, degrees)
    share = own.get("tensor", 1) if layers.config.sequence_parallel else 1
    make = lambda label, work: replace(
        layers.flow("permute", AXIS, layers.tokens * layers.config.hidden_size // share, work, label=label),
        times=timetable.num_ticks,
        where=EACH_TICK,
    )
    return [make("activations", "forward"), make("cotangents", "backward")]


def _minimum(step: _Step) -> dict[str, Amount]:
    """What theory allows, by label."""
    plan, model = step.plan, step.model
    found: dict[str, Amount] = {"gradients+parameters": exact(max(map(minimum_traffic, step.ranks)))}
    item = jnp.dtype(compute_dtype(model, plan.precision.compute)).itemsize
    whole = step.tokens * model.hidden_size
    tensor = layer_degrees(model, step.degrees).get("tensor", 1)
    if tensor > 1:
        # Megatron: four all-reduces of [b, s, h] per block and microbatch.
        calls = 4 * step.stages.on_rank(step.fullest) * plan.microbatches
        found["layers"] = exact(Fraction(calls * 2 * whole * item * (tensor - 1), tensor))
    if step.timetable is not None and plan.pipe is not None:
        boundaries = plan.pipe.chunks * plan.microbatches
        found["activations+cotangents"] = 2 * boundaries * whole * item // (tensor if model.sequence_parallel else 1)
    return found


def _recomputed(model: DecoderLike, plan: Plan, length: int) -> int:
    """A third of forward and backward again; only attention's own products where weight products are kept.

    A loss that holds some words' logits at a time computes them once more.
    """
    logits = 2 * model.hidden_size * model.vocab_size if model.words_at_once else 0
    if plan.remat is None:
        return logits
    attention = 6 * model.num_layers * model.num_heads * 2 * model.head_size * length
    return (model.flops_per_token(length) if plan.remat == "full" else attention) // 3 + logits


def in_words(plan: Plan, degrees: Mapping[str, int], model: DecoderLike) -> str:
    """A plan in a few words."""
    words = []
    for axis, strategy in plan.on(degrees).items():
        usual = axis == "data" and strategy.role.parameters == "whole"
        if strategy.role.parameters != "layers" and not usual and any(degrees[name] > 1 for name in as_axes(axis)):
            words.append(strategy.in_words(axis))
    if plan.pipe is not None and degrees.get(AXIS, 1) > 1:
        chunks = f" x {plan.pipe.chunks} chunks" if plan.pipe.chunks > 1 else ""
        words.append(f"{plan.pipe.schedule}{chunks}")
    words.append(f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch")
    if model.sequence_parallel and degrees.get("tensor", 1) > 1:
        words.append("sequence parallel")
    words += [f"{plan.remat} recomputation"] if plan.remat else []
    words += [f"offload {plan.offload.value}"] if plan.offload.value != "none" else []
    words += [f"computing in {plan.precision.compute}"] if plan.precision.compute else []
    return ", ".join(words)


def _notes(plan: Plan, degrees: Mapping[str, int], timetable: Timetable | None, held: Memory) -> tuple[str, ...]:
    found = {
        "nothing is sent along an axis under NO_SYNC: its ranks train models of their own": plan.independent,
        "what layers send is counted for the microbatches that a stage works on; a trace counts every tick's dearest branch": (
            timetable is not None and any(degrees.get(axis, 1) > 1 for axis in LAYER_AXES)
        ),
        "the bubble is that of the stages' matrix products, the head's on the last": timetable is not None,
        f"{held.host:,} bytes rest in host memory; the update brings them to the device "
        + ("in pieces" if timetable is None else "at once"): bool(held.host),
    }
    return tuple(note for note, holds in found.items() if holds)
