"""From a plan and a decoder's configuration to its prediction."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp

from axonml_jax.cost.decoder.activations import compute_dtype
from axonml_jax.cost.decoder.configuration import DecoderLike, layer_degrees, problems
from axonml_jax.cost.decoder.cuts import Stages, bubble, stages_of, timetable_of
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.decoder.work import expert_flops, recomputed_flops, stage_costs
from axonml_jax.cost.flow import merged
from axonml_jax.cost.held import Memory, resting
from axonml_jax.cost.passing import TickCounts
from axonml_jax.cost.published.minimum import experts_traffic, pipeline_traffic, tensor_traffic, weight_traffic
from axonml_jax.cost.rounds import Run, ShardCounts, splitting
from axonml_jax.cost.step_cost import Step, attention_problems, attention_work, flows, held, weights_of
from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.predict.prediction import Prediction
from axonml_jax.mesh.axes import AXES, LAYER_AXES, as_axes, flat_axes
from axonml_jax.parallel.fabric import Fabric
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.schedules.timetable import Timetable
from axonml_jax.parallel.plan import Plan


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
    documents: bool = False,
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
      documents: whether rows hold several documents (`segment_ids` and `positions` beside tokens and targets).

    Raises:
      ValueError: with everything that cannot work.
    """
    degrees = {axis: degrees[axis] for axis in (*AXES, *flat_axes(plan.axes)) if axis in degrees}
    plan = plan.decided(Fabric(devices=math.prod(degrees.values()), torus=torus), degrees)
    length = model.max_length if length is None else length
    rows = _rows(plan, model, degrees, global_batch, length)
    stages, timetable = stages_of(model, plan, degrees), timetable_of(plan, degrees)
    step = _step(plan, model, degrees, stages, timetable, rows, length)
    step = replace(step, platform=platform, documents=documents)
    if wrong := [*attention_problems(step), *_rounding_problems(plan, model, degrees)]:
        raise ValueError(f"this plan cannot run: {'; '.join(wrong)}")
    masked, blockwise = attention_work(step)
    in_ticks = plan.pipe is not None and plan.pipe.in_ticks
    memory = held(step, moments=moments, offload=plan.offload, in_ticks=in_ticks)
    flops, costs = model.flops_per_token(length), stage_costs(model, stages.blocks, stages.experts, step.run, length)
    return Prediction(
        degrees={axis: ranks for axis, ranks in degrees.items() if ranks > 1},
        plan=in_words(plan, degrees, model),
        memory=memory,
        traffic=merged(flows(step)),
        minimum=_minimum(plan, step),
        bubble=bubble(timetable, costs),
        ticks=0 if timetable is None else timetable.num_ticks,
        microbatches=plan.microbatches,
        params=model.num_params,
        tokens=global_batch * length,
        layers=model.num_layers,
        flops_per_token=flops,
        recomputed_flops_per_token=recomputed_flops(model, step.run, length),
        causal_balance=1.0 if step.attention is None else step.attention.balance,
        masked_flops_per_token=masked,
        attention_again=int(step.run.recomputes),
        blockwise_flops_per_token=blockwise,
        expert_flops_per_token=expert_flops(model, step.run),
        expert_padding=0.0 if step.experts is None else step.experts.padded,
        notes=_notes(plan, degrees, timetable, memory, step),
        timetable=timetable,
        stage_costs=None if timetable is None else costs,
    )


def _step(
    plan: Plan,
    model: DecoderLike,
    degrees: dict[str, int],
    stages: Stages,
    timetable: Timetable | None,
    rows: int,
    length: int,
) -> Step:
    """What the plan's step is made of, `rows` sequences on every rank."""
    return Step(
        model=model,
        degrees=degrees,
        run=Run.of(plan, degrees),
        weights=weights_of(model, plan, degrees),
        ranks=stages.ranks,
        rows=rows,
        length=length,
        compute=compute_dtype(model, plan.precision.compute),
        ticks=None if timetable is None else TickCounts.of(timetable),
        stage_blocks=max(stages.blocks),
        chunks=1 if plan.pipe is None else plan.pipe.chunks,
        attention=SplitAttention.of(plan, model, degrees, length),
        routers_passed=stages.routers_passed,
    )


def _rows(plan: Plan, model: DecoderLike, degrees: Mapping[str, int], global_batch: int, length: int) -> int:
    """Sequences per rank and update, once everything divides."""
    roles = {axis: strategy.role for axis, strategy in plan.on(degrees).items()}
    shards, positions = (math.prod(degrees[axis] for axis in splitting(roles, what)) for what in ("rows", "positions"))
    parts, cuts = shards * plan.microbatches, plan.batch_layout(degrees).position_parts
    found = problems(model, degrees, length // positions)
    if global_batch % parts:
        found.append(f"{global_batch} sequences do not divide into {shards} shards of {plan.microbatches} microbatches")
    if length % cuts:
        found.append(f"{length} positions do not divide into {cuts} parts over {positions} ranks")
    if length > model.max_length:
        found.append(f"sequences of {length} are longer than the model's {model.max_length}")
    if degrees.get(AXIS, 1) > 1 and plan.pipe is None:
        found.append(f"pipe={degrees[AXIS]} without a pipeline in the plan: give it pipe=ax.Pipelined(...)")
    if degrees.get(AXIS, 1) > 1 and model.scan_layers:
        found.append(
            f"pipe={degrees[AXIS]} cuts between blocks, and scan_layers makes one loop of them: set it to False"
        )
    if found:
        raise ValueError(f"this plan cannot run: {'; '.join(found)}")
    return global_batch // shards


def _rounding_problems(plan: Plan, model: DecoderLike, degrees: Mapping[str, int]) -> list[str]:
    """Why products cannot be rounded to 8 bits as on one device; `parallel/float8/weight_products.py` sees it in programs."""
    own, precision = layer_degrees(model, degrees), plan.precision
    inside = {
        "sequence_parallel": model.sequence_parallel and own.get("tensor", 1) > 1,
        "depth": own.get("depth", 1) > 1,
    }
    if precision.products is None or precision.products_kept or not any(inside.values()):
        return []
    named = ", ".join(name for name, holds in inside.items() if holds)
    return [
        f"products={precision.products!r} reaches no products under {named}: leave these out, or use precision='bf16'"
    ]


def _minimum(plan: Plan, step: Step) -> dict[str, Amount]:
    """What theory allows, by label."""
    degrees, model, run = step.degrees, step.model, step.run
    weights = max(_minimum_of_weights(plan, step, parts) for parts in step.ranks)
    found: dict[str, Amount] = {"gradients+parameters": exact(weights)}
    whole, item = step.tokens * model.hidden_size, jnp.dtype(step.compute).itemsize
    if (tensor := layer_degrees(model, degrees).get("tensor", 1)) > 1:
        found["layers"] = exact(tensor_traffic(step.fullest.blocks, run.microbatches, whole, item, tensor))
    if step.experts is not None and step.experts.ranks > 1:
        layers = step.fullest.experts * run.microbatches
        found["experts"] = exact(layers * experts_traffic(whole, step.experts.top_k, item, step.experts.ranks))
    if step.ticks is not None:
        passed = whole // (tensor if model.sequence_parallel else 1)
        found["activations+cotangents"] = pipeline_traffic(step.chunks, run.microbatches, passed, item)
    return found


def _minimum_of_weights(plan: Plan, step: Step, parts: ShardCounts) -> Fraction:
    """ZeRO's of what rests on a rank."""
    total = Fraction(0)
    for group in step.weights.groups:
        number = resting(group, parts)
        if number:
            whole = group.read * math.prod(step.degrees[axis] for axis in group.axes if axis in LAYER_AXES)
            total += number * weight_traffic(plan, step.degrees, whole, group.axes, group.rest_dtype, group.trained)
    return total


def in_words(plan: Plan, degrees: Mapping[str, int], model: DecoderLike) -> str:
    """A plan in a few words."""
    words = []
    for axis, strategy in plan.on(degrees).items():
        usual = axis == "data" and strategy.role.parameters == "whole" and strategy.rounds is None
        if strategy.role.parameters != "layers" and not usual and any(degrees[name] > 1 for name in as_axes(axis)):
            words.append(strategy.in_words(axis))
    if plan.pipe is not None and degrees.get(AXIS, 1) > 1:
        words.append(plan.pipe.in_words)
    words.append(f"{plan.microbatches} microbatches" if plan.microbatches > 1 else "1 microbatch")
    if model.sequence_parallel and degrees.get("tensor", 1) > 1:
        words.append("sequence parallel")
    words += [f"{plan.remat} recomputation"] if plan.remat else []
    words += [f"offload {plan.offload.value}"] if plan.offload.value != "none" else []
    words += [f"computing in {plan.precision.compute}"] if plan.precision.compute else []
    words += [f"products of {plan.precision.products}"] if plan.precision.products else []
    return ", ".join(words)


def _notes(
    plan: Plan, degrees: Mapping[str, int], timetable: Timetable | None, held: Memory, step: Step
) -> tuple[str, ...]:
    found = {
        "what attention sends of other ranks' keys and values is not counted": (
            step.attention is None and any(degrees[axis] > 1 for axis, _ in plan.batch_layout(degrees).positions)
        ),
        "nothing is sent along an axis under NO_SYNC: its ranks train models of their own": plan.independent,
        **{
            f"rows of every {each.every} steps happen in the last of these, and their bytes are the mean over them": each.every
            > 1
            for each in plan.rounds.values()
        },
        "what layers send is counted for the microbatches that a stage works on; a trace counts every tick's dearest branch": (
            timetable is not None and any(degrees.get(axis, 1) > 1 for axis in LAYER_AXES)
        ),
        "experts get equal loads: of the rounds that other loads need one is listed, as a trace counts it, and is in no sum": (
            step.experts is not None
            and step.experts.capacity is None
            and step.experts.ranks > 1
            and not step.experts.gathers
        ),
        "the bubble is that of the stages' matrix products, the head's on the last": timetable is not None,
        "products of fp8 are as long as those of bfloat16 here: where devices have units for them, they take less time": (
            plan.precision.products is not None
        ),
        f"{held.host:,} bytes rest in host memory; the update brings them to the device "
        + ("in pieces" if timetable is None else "at once"): bool(held.host),
    }
    return tuple(note for note, holds in found.items() if holds)
