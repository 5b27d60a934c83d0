"""`Step`: a training step on paper, or many of one kind at once; what it sends is one list, what it holds one sum."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from axonml_jax.cost.amounts import Many, divided, either, most
from axonml_jax.cost.decoder.activations import block_activations, fuses_attention, kernel_computes
from axonml_jax.cost.decoder.attention_flows import attention_flows
from axonml_jax.cost.decoder.configuration import DecoderLike
from axonml_jax.cost.decoder.decoder_weights import decoder_weights
from axonml_jax.cost.decoder.expert_flows import expert_flows, router_metrics, router_values
from axonml_jax.cost.decoder.layer_flows import Layers, layer_flows
from axonml_jax.cost.decoder.routed_experts import RoutedExperts
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.decoder.work import computed_pairs, pair_flops
from axonml_jax.cost.flow import Flow
from axonml_jax.cost.held import Memory, batch_bytes, gathered, memory, of_blocks, of_ticks, read_by_stages
from axonml_jax.cost.passing import TickCounts, passing
from axonml_jax.cost.placed import Placed, Setting, rests_at
from axonml_jax.cost.rounds import Run, ShardCounts, splitting
from axonml_jax.cost.small_flows import small_flows
from axonml_jax.cost.weight_flows import weight_flows
from axonml_jax.cost.weight_groups import Weights, grouped
from axonml_jax.parallel.context.pieces.tiles import block_for
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.tensor.megatron.fused_attention import PLATFORMS


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is made of. What is a `Many` may be an array with an entry for every candidate.

    Attributes:
      model: a decoder's configuration, with its layers split as the mesh needs.
      degrees: of the mesh.
      run: how often it does what it does.
      weights: where they rest.
      ranks: what those ranks of a pipeline have that may have most of something.
      rows: sequences of a rank, whole or in part.
      length: of a sequence, over all ranks that share its positions.
      compute: name of the activations' dtype.
      ticks: of a pipeline; None: there is none.
      stage_blocks: blocks of the longest stage.
      chunks: stages per rank.
      attention: where it reads positions of other ranks.
      platform: what is compiled for (see `block_activations`).
      routers_passed: routers whose values reach a pipeline's last stage from others.
      documents: whether rows hold several documents.
    """

    model: DecoderLike
    degrees: Mapping[str, Many]
    run: Run
    weights: Weights
    ranks: Sequence[ShardCounts]
    rows: Many
    length: int
    compute: str
    ticks: TickCounts | None = None
    stage_blocks: Many = 0
    chunks: Many = 1
    attention: SplitAttention | None = None
    platform: str | None = None
    routers_passed: Many = 0
    documents: bool = False

    @property
    def experts(self) -> RoutedExperts | None:
        """How tokens reach experts; None: the model has none."""
        return RoutedExperts.of(self.model, self.degrees, self.tokens, self.platform)

    @property
    def tokens(self) -> Many:
        """Of a rank's microbatch."""
        return divided(self.rows, self.run.microbatches) * self.positions

    @property
    def positions(self) -> Many:
        """Of a sequence on a rank."""
        return divided(self.length, math.prod(self.degrees[axis] for axis in splitting(self.run.roles, "positions")))

    @property
    def fullest(self) -> ShardCounts:
        """What the rank has that reads most of its own, whose traffic is told; the first of several."""
        chosen, *others = self.ranks

        def reads(parts: ShardCounts) -> Many:
            """What both ends read lives on the first stage; the last has a copy, whose gradient it sends there."""
            own = lambda place, count: parts.number(place, count) * (parts.first if place == "both ends" else 1)
            return sum(own(each.place, each.count) * each.read for each in self.weights.groups)

        least = reads(chosen) if others else 0
        for parts in others:
            here = reads(parts)
            chosen, least = chosen.instead(here > least, parts), most(least, here)
        return chosen

    @property
    def layers(self) -> Layers:
        """Those of the fullest rank."""
        return Layers(
            config=self.model, degrees=self.degrees, tokens=self.tokens, length=self.length,
            dtype=self.model.dtype or self.weights.groups[0].read_dtype, parts=self.fullest, run=self.run,
            passed=router_values(self.model, self.routers_passed),
        )  # fmt: skip


def attention_work(step: Step) -> tuple[Many, Many]:
    """FLOPs of a token that attention leaves out as masks hide them, and those that it computes in blocks, not by a kernel.

    Einsums leave nothing out; kernels and blocks do, tile by tile.
    """
    model, apart = step.model, step.attention
    sizes = (step.length, step.compute, step.platform, step.documents)
    if apart is not None:
        tile = apart.span(step.platform)
    elif fuses_attention(model, *sizes):
        tile = block_for(step.platform or "")
    else:
        return 0.0, 0.0
    every, computed = pair_flops(model, step.length), computed_pairs(model, step.length, tile)
    return (1 - computed) * every, either(kernel_computes(model, *sizes, apart), 0.0, computed * every)


def attention_problems(step: Step) -> list[str]:
    """Why the attention that a model names cannot run; nothing where it leaves the choice open."""
    model, apart, asked = step.model, step.attention, step.model.attention
    if asked in ("auto", "blocks"):
        return []
    if asked not in PLATFORMS:
        split = f"attention={asked!r} reads keys of a rank's own positions, and context splits them"
        return [] if apart is None else [f"{split}: set it to auto"]
    found = []
    if apart is not None and asked == "cudnn" and apart.groups > 1:
        found.append(
            f"attention={asked!r} wants whole sequences of some heads: give context method='ulysses', or leave auto"
        )
    if step.platform not in (None, PLATFORMS[asked]):
        found.append(
            f"attention={asked!r} is a kernel for {PLATFORMS[asked]}, and this is for {step.platform}: leave auto"
        )
    elif not found and not kernel_computes(model, step.length, step.compute, step.platform, step.documents, apart):
        found.append(f"attention={asked!r} does not apply to this model and these sequences: leave auto")
    return found


def flows(step: Step) -> Iterator[Flow]:
    """Everything that the fullest rank sends: strategies, metrics and the norm, layers, attention, experts, ticks."""
    layers = step.layers
    yield from weight_flows(step.weights, layers.parts, step.run, step.degrees)
    yield from small_flows(step.weights, layers.parts, step.run, step.degrees, router_metrics(step.model))
    yield from layer_flows(layers, step.weights)
    if step.attention is not None:
        yield from attention_flows(layers, step.attention, step.documents)
    if (experts := step.experts) is not None:
        yield from expert_flows(layers, experts)
    if step.ticks is not None:
        yield from passing(step.ticks, layers.boundary)


def held(step: Step, *, moments: int, offload: CPUOffload, in_ticks: bool) -> Memory:
    """What the rank holds that holds most.

    Args:
      step: which.
      moments: optimizer values per parameter.
      offload: what rests on the host.
      in_ticks: whether a pipeline gathers its stages in its ticks.
    """
    apart = step.ticks is not None or (step.model.scan_layers and step.weights.sliced)
    block = block_activations(
        step.model,
        step.degrees,
        step.tokens,
        step.length,
        step.compute,
        step.run,
        step.platform,
        step.attention,
        step.experts,
        apart=apart,
        documents=step.documents,
    )
    if step.ticks is None:
        activations, pipeline = of_blocks(step.model.num_layers, block), 0
        whole = gathered(step.weights, step.ranks[0], step.run)
    else:
        activations, pipeline = of_ticks(step.stage_blocks, step.ticks, block)
        whole = most(*(read_by_stages(step.weights, parts, step.chunks, in_ticks) for parts in step.ranks))
    return memory(
        step.weights, step.ranks, step.run, activations=activations, pipeline=pipeline, whole=whole, moments=moments,
        batch=batch_bytes(step.rows, step.positions, step.documents), offload=offload,
    )  # fmt: skip


def weights_of(model: DecoderLike, plan: Plan, degrees: Mapping[str, int]) -> Weights:
    """A decoder's weights under a plan; the same object for plans that differ in how a step runs only.

    Args:
      model: its configuration.
      plan: with every default decided.
      degrees: of the mesh; stages of `pipe` share them out.
    """
    own: Any = plan.axes  # hashable, as every plan's are
    sizes = tuple((axis, ranks) for axis, ranks in degrees.items() if axis != AXIS)
    return _weights(model, plan.data, plan.fsdp, plan.context, own, plan.precision, sizes)


@lru_cache(maxsize=4096)
def _weights(
    model: Any, data: Any, fsdp: Any, context: Any, axes: Any, precision: Any, degrees: tuple[tuple[str, int], ...]
) -> Weights:
    plan = Plan(data=data, fsdp=fsdp, context=context, axes=axes, precision=precision)
    setting = Setting.of(plan, dict(degrees))
    weights = decoder_weights(model, dict(degrees))
    return grouped([Placed(weight, rests_at(weight, setting), setting) for weight in weights])
