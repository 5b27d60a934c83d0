"""What a decoder's experts send: tokens to the ranks of their experts and back, and what routers say of all tokens."""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many, most
from axonml_jax.cost.decoder.configuration import DecoderLike, expert_blocks
from axonml_jax.cost.decoder.layer_flows import GATHER, SCATTER, SUM, Layers
from axonml_jax.cost.decoder.routed_experts import RANKS, RoutedExperts
from axonml_jax.cost.flow import EXPERTS, LATER, ONCE, Flow
from axonml_jax.cost.rounds import splitting
from axonml_jax.parallel.experts.router_values import MOST_LOADS
from axonml_jax.parallel.pipeline.policy import AXIS

ROUTER = "router"
"""What routers sum over all ranks that have a part of a microbatch."""

BUFFERS = "buffers"
"""State of the model that ranks join once per step: here the counts by which a selection bias learns."""


def expert_flows(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Of all blocks with experts that the rank runs; recomputing repeats the forward, but not what a unit ends with."""
    yield from _router(layers, experts)
    yield from _counts(layers)
    if experts.capacity is None:
        yield from _gathered(layers, experts)
        yield from _rounds(layers, experts)
    else:
        yield from _round(layers, experts, 1, "all_to_all")


def _ends(layers: Layers) -> int:
    """0 where a unit ends with what comes back from experts, which no recomputation repeats."""
    return int(layers.config.post_norms or not (layers.config.scan_layers or layers.config.sequence_parallel))


def _round(layers: Layers, experts: RoutedExperts, travels: Many, kind: str) -> Iterator[Flow]:
    """To the experts and back: forward, backward, and where the forward is repeated."""
    rows, blocks = experts.slots * experts.width, layers.parts.experts * travels
    for work, times in (("forward", 2), ("backward", 2 + 2 * layers.run.recomputes)):
        flow = layers.flow(kind, RANKS, rows, work, calls=times * blocks, label=EXPERTS)
        yield replace(flow, padding=times * blocks * experts.empty * experts.width)


def _rounds(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """All ranks learn how many rounds there are; of those after the first one stands for however many there will be."""
    travels, again = 1 - experts.gathers, layers.run.recomputes
    blocks, kind = layers.parts.experts * travels, "ragged_all_to_all" if experts.ragged else "all_to_all"
    numbers = experts.ranks * experts.experts
    for work, times in (("forward", 1), ("backward", again)):
        yield layers.flow(GATHER, RANKS, numbers, work, calls=times * blocks, label=EXPERTS, dtype="int32")
    yield from _round(layers, experts, travels, kind)
    # Their backward computes each again; a pipeline's, which lies apart from its forward, all of them once more.
    repeated = 2 * most(again, int(layers.run.pipelined)) * _ends(layers)
    rows = experts.slots * experts.width
    for work, times in (("forward", 2), ("backward", 4 + repeated)):
        flow = layers.flow(kind, RANKS, rows, work, calls=times * blocks, label=EXPERTS)
        yield replace(flow, where=LATER)


def _gathered(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Every rank gets all tokens, their gates and choices, and the outputs are summed where the tokens are."""
    again, calls = layers.run.recomputes, layers.parts.experts * experts.gathers
    wide = jnp.promote_types(layers.dtype, jnp.float32).name
    whole, pairs = experts.ranks * experts.tokens * experts.width, experts.ranks * experts.pairs

    def make(kind: str, work: str, times: Many, elements: Many, dtype: str = "") -> Flow:
        return layers.flow(kind, RANKS, elements, work, calls=times * calls, label=EXPERTS, dtype=dtype)

    for work, times in (("forward", 1), ("backward", again)):
        yield make(GATHER, work, times, whole)
        yield make(GATHER, work, times, pairs, wide)
        yield make(GATHER, work, times, pairs, "int32")
    yield make(SCATTER, "forward", 1, whole)
    yield make(GATHER, "backward", 1, whole)
    yield make(SCATTER, "backward", 1 + again * _ends(layers), whole)
    yield make(SCATTER, "backward", 1, pairs, wide)


def _router(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Sums of counts, probabilities and scores over all tokens of a microbatch, whose gradients are summed too."""
    roles = {axis: role for axis, role in layers.run.roles.items() if role.reduces != "never"}
    axes = splitting(roles, "rows", "positions")
    wide = jnp.promote_types(layers.dtype, jnp.float32).name
    for work, times in (("forward", 1), ("backward", 1 + layers.run.recomputes)):
        calls = times * layers.parts.experts
        flow = layers.flow(SUM, RANKS, 2 * experts.experts + 6, work, calls=calls, label=ROUTER, dtype=wide)
        yield replace(flow, axes=axes, group_size=math.prod(layers.degrees[axis] for axis in axes))


def _counts(layers: Layers) -> Iterator[Flow]:
    """Of a selection bias that follows them: of all blocks, as every rank of a pipeline keeps all state."""
    own = layers.config.experts
    if own is None or own.router != "sigmoid" or not own.bias_rate:
        return
    roles = {axis: role for axis, role in layers.run.roles.items() if role.reduces != "never"}
    axes, blocks = splitting(roles, "rows", "positions"), sum(expert_blocks(layers.config))
    over = {"float32": [axes], "int32": [axes, *([(AXIS,)] if layers.run.pipelined else [])]}
    launches = 1 if layers.config.scan_layers else blocks
    for dtype, each in over.items():
        for names in each:
            yield Flow(
                label=BUFFERS, kind=SUM, axes=names, group_size=math.prod(layers.degrees[name] for name in names),
                dtype=dtype, itemsize=4, elements=blocks * own.num_experts, launches=launches, where=ONCE,
            )  # fmt: skip


def router_metrics(config: DecoderLike) -> int:
    """Metrics that the library's own loss returns of routers (`models.router_metrics`)."""
    if (own := config.experts) is None:
        return 0
    return 6 + (own.num_experts if own.num_experts <= MOST_LOADS else 0)


def router_values(config: DecoderLike, routers: Many) -> Many:
    """Numbers that so many routers' values are, which the stages of a pipeline hand on (`RouterValues`)."""
    return 0 if config.experts is None else routers * (config.experts.num_experts + 5)
