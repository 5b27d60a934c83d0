"""What a decoder's layers send and compute: attention, experts, tensor parallelism, pipeline stages."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import jax.numpy as jnp

from axonml_jax.cost.base import (
    ATTENTION,
    EACH_MICROBATCH,
    EXPERTS,
    GRADIENTS,
    LATER,
    ONCE,
    PARAMETERS,
    Flow,
    Run,
    ShardCounts,
    Weights,
    named,
    splitting,
)
from axonml_jax.cost.decoder import (
    DecoderLike,
    Many,
    divided,
    either,
    expert_blocks,
    gated,
    inward_products,
    layer_degrees,
    least,
    most,
    nothing,
    varies,
)
from axonml_jax.layers.dispatch import RAGGED_PRODUCTS, SLACK, capacity_of
from axonml_jax.layers.experts import MOST_LOADS
from axonml_jax.layers.pieces import BLOCK, LARGEST_PIECE, block_for
from axonml_jax.parallel.plan import Plan
from axonml_jax.pipeline.assign import balanced
from axonml_jax.pipeline.schedules import AXIS, Pipelined
from axonml_jax.pipeline.simulate import simulate
from axonml_jax.pipeline.timetable import StageCosts, Timetable
from axonml_jax.sharding.layout import order_parts
from axonml_jax.strategies.strategy import ContextSplit, LeftToXLA, SplitsPositions, heads_and_gathers

# --------------------------------------------------------------------------------------------------
# What the layers of a decoder send themselves: Megatron's all-reduces, sequence parallelism's gathers, AxoNN's grid.
# --------------------------------------------------------------------------------------------------

SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that a rank runs, and the amounts of data that they process.

    Attributes:
      config: the model.
      degrees: of the mesh.
      tokens: a rank's tokens in one microbatch; sequence parallelism does not divide them.
      length: of a sequence.
      dtype: of activations.
      parts: the parts of the model that the rank has.
      run: microbatches per step, and what the backward recomputes.
      passed: elements that stages of a pipeline pass on beside activations, in at least float32.
    """

    config: DecoderLike
    degrees: Mapping[str, Many]
    tokens: Many
    length: int
    dtype: str
    parts: ShardCounts
    run: Run
    passed: Many = 0

    def flow(
        self, kind: str, axis: str, elements: Many, work: str, *, calls: Many = 1, arrays: Many = 1, label: str = "",
        dtype: str = "",
    ) -> Flow:  # fmt: skip
        """A flow of `calls` collectives of this many elements per microbatch."""
        name, itemsize = named(dtype or self.dtype)
        return Flow(
            label=label,
            kind=kind,
            axes=(axis,),
            group_size=self.degrees.get(axis, 1),
            dtype=name,
            itemsize=itemsize,
            elements=calls * elements,
            launches=calls * arrays,
            times=self.run.microbatches,
            where=EACH_MICROBATCH,
            work=work,
        )

    @property
    def boundary(self) -> tuple[Flow, ...]:
        """The flows between pipeline stages for one microbatch, by dtype."""
        share = 1
        if self.config.sequence_parallel:
            share = layer_degrees(self.config, self.degrees).get("tensor", 1)
        activations = self.flow("permute", AXIS, divided(self.tokens * self.config.hidden_size, share), "")
        wide = named(jnp.promote_types(self.dtype, jnp.float32))[0]
        if nothing(self.passed):
            return (activations,)
        if wide == activations.dtype:
            return (replace(activations, elements=activations.elements + self.passed),)
        return activations, self.flow("permute", AXIS, self.passed, "", dtype=wide)


def layer_flows(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Yield all communication of the layers along their own axes."""
    own = layer_degrees(layers.config, layers.degrees)
    if all(not varies(ranks) and ranks == 1 for ranks in own.values()):
        return
    if layers.config.split == "grid":
        yield from _grid(layers, weights)
    elif layers.config.sequence_parallel:
        yield from _sequence(layers, weights)
    else:
        yield from _tensor(layers, weights)


def _tensor(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Yield Megatron's flows (Shoeybi et al. 2019): per block two all-reduces of [b, s, h] forward and two backward."""
    whole = layers.tokens * layers.config.hidden_size
    make = lambda work, calls: layers.flow(SUM, "tensor", whole, work, calls=calls)
    parts = layers.parts
    halves = 2 * parts.blocks + _shared(layers)
    yield make("forward", halves + parts.first)
    yield make("backward", halves - parts.blocks + parts.last)  # recomputing repeats no sum
    shape = layers.config.attention_shape
    for size in (*shape.entering, *([shape.shared] if shape.shared else [])):
        yield layers.flow(SUM, "tensor", layers.tokens * size, "backward", calls=parts.blocks)
    yield from _gates(layers)
    yield from _loss(layers, "tensor")
    yield from _summed(layers, weights, "tensor")


def ends_with_product(config: DecoderLike) -> bool:
    """Whether a block ends with a product rather than a norm, so that recomputation need not repeat its communication."""
    return not config.post_norms


def _shared(layers: Layers) -> Many:
    """The number of a rank's blocks with shared experts, dense layers that all tokens pass through."""
    own = layers.config.experts
    return layers.parts.experts if own is not None and own.shared_size else 0


def _gates(layers: Layers) -> Iterator[Flow]:
    """Yield the sums of the gates' gradients over `tensor`, where each rank weights a part of each expert's outputs."""
    if (own := layers.config.experts) is not None:
        wide = jnp.promote_types(layers.dtype, jnp.float32).name
        pairs, calls = layers.tokens * own.top_k, layers.parts.experts
        yield layers.flow(SUM, "tensor", pairs, "backward", calls=calls, dtype=wide)


def _scores(layers: Layers) -> Iterator[Flow]:
    """Yield the gathers of router scores if the sequence is split: each rank scores its positions, and all need all choices."""
    if (own := layers.config.experts) is not None:
        wide, calls = jnp.promote_types(layers.dtype, jnp.float32).name, layers.parts.experts
        for work, times in (("forward", 1), ("backward", layers.run.recomputes)):
            scores = layers.tokens * own.num_experts
            yield layers.flow(GATHER, "tensor", scores, work, calls=times * calls, dtype=wide)


def _sequence(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Yield the flows of sequence parallelism (Korthikanti et al. 2022).

    Each half block gathers and scatters once each way, and gathers its input again for weight gradients.
    """
    whole, again = layers.tokens * layers.config.hidden_size, layers.run.recomputes
    first, last, shared = layers.parts.first, layers.parts.last, _shared(layers)
    experts = layers.parts.experts  # each replaces a dense half of a block, and keeps what it gathers
    latent = layers.config.latent is not None
    halves = (1 if latent else 2) * layers.parts.blocks - experts  # attention of latents gathers others than its input

    def make(kind: str, work: str, calls: Many, others: Many) -> Iterator[Flow]:
        """Collectives of half blocks (`calls`), which a ring cuts into hops, and `others`, of experts and outside blocks."""
        ranks, ring = layers.degrees["tensor"], layers.config.ring
        if ring:
            yield layers.flow("permute", "tensor", divided(whole, ranks), work, calls=calls * (ranks - 1))
        yield layers.flow(kind, "tensor", whole, work, calls=others if ring else calls + others)

    yield from make(GATHER, "forward", halves, last + experts + shared)
    yield from make(SCATTER, "forward", halves, first + experts + shared)
    # Recomputing repeats what leads to the last product of a unit, but what a head's loop over words reads is kept.
    whole_words = again * (not layers.config.words_at_once)
    others = first + (1 + whole_words) * last + (1 + again) * experts + (2 + again) * shared
    yield from make(GATHER, "backward", (2 + again) * halves, others)
    # Sums are kept, but those that go round a ring beside products are no sums: one is repeated unless a unit ends with it.
    repeated = again * layers.config.ring * (halves if layers.config.post_norms else layers.parts.blocks)
    yield from make(SCATTER, "backward", halves + repeated, last + experts + shared)
    if latent:
        yield from _gathered_latents(layers)
    if layers.config.position == "learned":
        yield layers.flow(GATHER, "tensor", layers.length * layers.config.hidden_size, "backward", calls=first)
    yield from _scores(layers)
    yield from _gates(layers)
    yield from _loss(layers, "tensor")
    yield from _summed(layers, weights, "tensor")


def _gathered_latents(layers: Layers) -> Iterator[Flow]:
    """Yield flows of latent attention if the sequence is split: latents, again for weight gradients, and the shared key."""
    shape, blocks, again = layers.config.attention_shape, layers.parts.blocks, layers.run.recomputes
    for size in shape.entering:
        entered = layers.tokens * size
        yield layers.flow(GATHER, "tensor", entered, "forward", calls=blocks)
        yield layers.flow(GATHER, "tensor", entered, "backward", calls=blocks * (1 + again))
        yield layers.flow(SCATTER, "tensor", entered, "backward", calls=blocks)
    key, whole = layers.tokens * shape.shared, layers.tokens * layers.config.hidden_size
    yield layers.flow(GATHER, "tensor", key, "forward", calls=blocks)
    yield layers.flow(GATHER, "tensor", key, "backward", calls=blocks * again)
    yield layers.flow(SCATTER, "tensor", key, "backward", calls=blocks)
    yield layers.flow(SCATTER, "tensor", whole, "forward", calls=blocks)
    yield layers.flow(GATHER, "tensor", whole, "backward", calls=blocks)


def _loss(layers: Layers, axis: str) -> Iterator[Flow]:
    """Yield the flows of cross entropy with split logits: a maximum and a sum of two numbers per token, none backward."""
    for numbers in (1, 2):
        yield layers.flow(SUM, axis, numbers * layers.tokens, "forward", calls=layers.parts.last, dtype="float32")


def _summed(layers: Layers, weights: Weights, axis: str) -> Iterator[Flow]:
    """Yield all-reduces of the gradients of replicated parameters of which each rank computes a part."""
    for group in weights.groups:
        if axis in group.summed:
            calls = layers.parts.number(group.place, group.count) * group.layers
            one = divided(group.read, group.layers)
            yield layers.flow(SUM, axis, one, "backward", calls=calls, arrays=group.arrays, dtype=group.read_dtype)


def _grid(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Yield the flows of 3-D layers (Singh et al. 2024), with activations gathered over row and col between pairs of layers."""
    yield from _weights_over_depth(layers, weights)
    config, row, col = layers.config, layers.degrees.get("row", 1), layers.degrees.get("col", 1)
    size, inner, tokens, blocks = config.hidden_size, config.mlp_size, layers.tokens, layers.parts.blocks
    shape, again = config.attention_shape, layers.run.recomputes  # recomputing repeats what gathers, no sum
    whole = tokens * size
    over_col = divided(whole, col)
    openings = [[each.fan_out for each in shape.matrices if each.opens], [inner] * inward_products(config)]
    for half, outs in enumerate(openings):
        closed = (shape.mixed, inner)[half]
        ends = again * (not (ends_with_product(config) and half == 1))  # a trip's last product is not repeated
        for out in outs:  # column-like layers: split input, partial outputs summed over col
            yield layers.flow(SUM, "col", divided(tokens * out, row), "forward", calls=blocks)
        yield layers.flow(SUM, "row", over_col, "backward", calls=blocks)
        yield layers.flow(GATHER, "col", whole, "backward", calls=blocks)
        # The transposed layer after them: summed over row, its features joined over col.
        yield layers.flow(SUM, "row", over_col, "forward", calls=blocks)
        yield layers.flow(GATHER, "col", whole, "forward", calls=blocks)
        yield layers.flow(GATHER, "col", whole, "backward", calls=blocks * ends)
        yield layers.flow(SUM, "col", divided(tokens * closed, row), "backward", calls=blocks)
    yield from _ends_of_grid(layers, row, col)
    yield from _summed(layers, weights, "row")


def _ends_of_grid(layers: Layers, row: Many, col: Many) -> Iterator[Flow]:
    """Yield the flows of the embedding, and of the head with its loss."""
    size, tokens = layers.config.hidden_size, layers.tokens
    first, last = layers.parts.first, layers.parts.last
    whole, logits = tokens * size, divided(tokens * layers.config.vocab_size, col)
    over_row = divided(whole, row)
    yield layers.flow(SUM, "col", over_row, "forward", calls=first)
    yield layers.flow(GATHER, "row", whole, "forward", calls=first)
    yield layers.flow(GATHER, "row", whole, "backward", calls=last)
    yield layers.flow(SUM, "col", over_row, "backward", calls=last)
    yield layers.flow(SUM, "row", logits, "forward", calls=last)
    yield from _loss(layers, "col")


def _weights_over_depth(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Yield the flows of weights over `depth`: gathered at each use, forward and backward, gradients reduce-scattered."""
    ends = ends_with_product(layers.config)
    for group in weights.groups:
        if "depth" not in group.axes:
            continue
        stack, looked_up, tied = group.layers, not group.again, group.place == "both ends"
        block, reads = divided(group.read, stack) * layers.degrees["depth"], 2 if tied else 1
        number = layers.parts.number(group.place, group.count) * stack
        make = lambda kind, label, work, calls, block=block, group=group: layers.flow(
            kind, "depth", block, work, calls=calls, arrays=group.arrays, label=label, dtype=group.read_dtype
        )
        yield make(GATHER, PARAMETERS, "forward", number * reads)
        # Where a product's parts are summed the sum is kept, and nothing multiplies again.
        axis = "row" if tied else group.sums
        once_more = (reads - (looked_up or tied)) * either(layers.degrees.get(axis, 1) > 1, 0, 1)
        again = (not looked_up) + layers.run.recomputes * (0 if ends and group.closes else once_more)
        yield make(GATHER, PARAMETERS, "backward", number * again)
        yield make(SCATTER, GRADIENTS, "backward", number * reads)


# --------------------------------------------------------------------------------------------------
# `SplitAttention`: what a decoder's attention sends and holds where positions of a sequence are split over ranks.
# --------------------------------------------------------------------------------------------------

SCORES = 5
"""Arrays of the size of a tile's scores that its backward holds at once: scores, weights, their cotangents, two operands."""


@dataclass(frozen=True, kw_only=True)
class SplitAttention:
    """How a block's attention reads positions of other ranks (see `context_attention`).

    Attributes:
      split: the mesh axis, the order of positions and the method.
      ranks: N, of the axis.
      among: U, neighbours that split heads (Ulysses); 1: none do.
      gathers: whether the N/U groups gather keys and values of each other; else these go round a ring.
      heads, kv_heads: of a rank's layers.
      query_size: of a head's query, and of a key.
      value_size: of a head's value.
      places: positions of a rank.
      windows: (positions that one sees, itself among them, or None for all before it; number of blocks) pairs.
    """

    split: ContextSplit
    ranks: Many
    among: Many
    gathers: bool
    heads: Many
    kv_heads: Many
    query_size: int
    value_size: int
    places: Many
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)

    @classmethod
    def of(cls, plan: Plan, config: DecoderLike, degrees: Mapping[str, Many], length: int) -> "SplitAttention | None":
        """The split of attention under a plan, on one mesh or many (then with a named method); None for full sequences.

        Raises:
          ValueError: for heads that the ranks cannot split; for a ring that a window cuts short, which is not priced.
        """
        every = (
            own.position_split(axis)
            for axis, strategy in plan.on(degrees).items()
            if (own := strategy.having(SplitsPositions)) is not None and not strategy.having(LeftToXLA)
        )
        split = next((each for each in every if each is not None), None)
        if split is None or (not varies(degrees[split.axis]) and degrees[split.axis] == 1):
            return None
        own = layer_degrees(config, degrees)
        ranks, cut = degrees[split.axis], own["row" if config.split == "grid" else "tensor"]
        heads, kv_heads = divided(config.num_heads, cut), most(1, divided(config.attention_shape.kv_heads, cut))
        if varies(ranks) or varies(cut):
            named: Any = {"gather": (1, True), "ring": (1, False), "ulysses": (ranks, True)}
            method = split.method
            among, gathers = named[method] if isinstance(method, str) else (method[0], method[1] == "gather")
        else:
            split_by = partial(
                heads_and_gathers, split.method, ranks=ranks, heads=heads, kv_heads=kv_heads, causal=True,
                places=length // ranks, order=split.order,
            )  # fmt: skip
            among, gathers = split_by(window=None)
            if gathers and config.window is not None:
                gathers = split_by(window=(config.window - 1, 0))[1]
        if config.window is not None and not gathers:
            raise ValueError(
                f"window={config.window} cuts the rounds of a ring short, which is not priced from a configuration yet: give "
                "context.method='gather' or 'ulysses', or trace the step: ax.explain(trainer, batch)"
            )
        return cls(
            split=split, ranks=ranks, among=among, gathers=gathers, heads=heads, kv_heads=kv_heads,
            query_size=config.attention_shape.query_size, value_size=config.attention_shape.value_size,
            places=divided(length, ranks),
            windows=tuple(Counter(map(config.window_of, range(config.num_layers))).items()),
        )  # fmt: skip

    @property
    def groups(self) -> Many:
        """The number R of groups of ranks, each with other positions."""
        return divided(self.ranks, self.among)

    @property
    def queries(self) -> Many:
        """Elements of a position's queries and outputs."""
        return self.heads * (self.query_size + self.value_size)

    @property
    def keys(self) -> Many:
        """Elements of a position's keys and values; with fewer heads than U, Ulysses repeats them."""
        return most(self.kv_heads, self.among) * (self.query_size + self.value_size)

    @property
    def gradient_hops(self) -> Many:
        """The number of permutes of the gradients of keys and values in a ring, including those to their owners."""
        around = self.groups - 1
        # Contiguous, the last ranks' keys are done before the others': each come home in a round of its own.
        return either(self.groups > 1, 2 * around - 1, 0) if self.split.order == "contiguous" else around

    def computed_by(self, kernel: str) -> Many:
        """Whether a kernel can compute this attention: cuDNN's if ranks split heads alone, splash if sizes fit."""
        if kernel != "splash":
            return self.groups == 1
        queries = self.places * self.among
        keys = self.places * self.ranks if self.gathers else queries
        return (queries % BLOCK == 0) & (queries * keys <= LARGEST_PIECE)

    def held(self, tokens: Many, itemsize: int, platform: str | None, kernel: Many = False) -> Many:
        """Bytes that a block needs besides kept activations: other ranks' keys and values, gradients, one tile of scores.

        Args:
          tokens: of a rank's microbatch.
          itemsize: of activations.
          platform: as of `block_for`.
          kernel: whether a kernel computes attention, so that no scores are in memory.
        """
        wide = max(4, itemsize)
        parts = (itemsize + wide) * self.groups if self.gathers else 2 * itemsize + 3 * wide
        tile = self.tile(platform)
        scores = tokens / self.places * divided(self.heads, self.among) * tile * tile
        scores = either(kernel, 0, scores)
        # What a group exchanges is there before and after; the gradients of queries are added up wide.
        exchanged = either(self.among > 1, 2 * itemsize * (self.queries + self.keys), 0)
        reading = divided(self.queries * (wide + 2 * itemsize), 2) + exchanged
        return tokens * (self.keys * parts + reading) + SCORES * wide * scores

    def tile(self, platform: str | None) -> Many:
        """The number of positions in a tile of scores."""
        chunk = divided(self.places, order_parts(self.split.order, 1))
        return least(chunk, block_for(platform or ""))

    def span(self, platform: str | None) -> Many:
        """The number of positions from a tile's first to its last; striped, other ranks' positions lie between."""
        return self.tile(platform) * (self.ranks if self.split.order == "striped" else 1)

    @property
    def balance(self) -> Many:
        """The causal attention work of the busiest rank over the mean; ranks that split heads do equal work.

        In contiguous order the last rank is the busiest, less so with windows. In other orders windows are left out, as they
        change next to nothing.
        """
        length = self.places * self.ranks
        if self.split.order == "striped":
            return (length + self.ranks - self.among + 1) / (length + 1)
        if self.split.order == "zigzag":
            return 1.0
        before = length - self.places * self.among
        pairs = lambda count: sum(blocks * _pairs(count, window) for window, blocks in self.windows)
        return self.groups * (1 - pairs(before) / pairs(length))


def _pairs(count: Many, window: int | None) -> Many:
    """The number of visible pairs among the first `count` positions of a sequence."""
    full = count if window is None else least(count, window)
    return full * (full + 1) / 2 + (count - full) * (window or 0)


# --------------------------------------------------------------------------------------------------
# The multiplications of a decoder: its stages' work, and what recomputation adds to a token's FLOPs.
# --------------------------------------------------------------------------------------------------


def stage_costs(
    config: DecoderLike, blocks: Sequence[int], experts: Sequence[int], run: Run, length: int
) -> StageCosts:
    """The work of the stages in multiplications per token: of their blocks, and of the head on the last one.

    The embedding is looked up and costs nothing; a tied one multiplies as the head, though it lives on the first stage.

    Args:
      config: the model.
      blocks: number of blocks of each stage.
      experts: how many of these have experts.
      run: says what the backward recomputes.
      length: of a sequence.
    """
    attention = 1.0 * config.attention_shape.pair_products * length
    more = block_products(config, experts=True) - block_products(config) if config.experts is not None else 0.0
    forward = [
        count * (block_products(config) + attention) + own * more for count, own in zip(blocks, experts, strict=True)
    ]
    routed = expert_products(config) / max(1, sum(expert_blocks(config)))
    redone = [count * attention + own * routed for count, own in zip(blocks, experts, strict=True)]
    again = [run.full * own + run.selective * more for own, more in zip(forward, redone, strict=True)]
    forward[-1] += head_products(config)
    again[-1] += run.full * head_products(config)
    back = tuple(own + more for own, more in zip(forward, again, strict=True))
    return StageCosts(tuple(forward), back, tuple(forward))


def pair_flops(config: DecoderLike, length: int) -> int:
    """FLOPs per token, forward and backward, of attention's scores and weighted sums, masked ones included.

    Args:
      config: the model.
      length: of a sequence.
    """
    return 6 * config.num_layers * config.attention_shape.pair_products * length


def computed_pairs(config: DecoderLike, length: int, tile: Many) -> Many:
    """The share of all pairs of positions that tiled attention computes when it skips masked tiles.

    Args:
      config: says how far each block sees.
      length: of a sequence.
      tile: positions of a tile; a tile with one pair that is seen is computed.
    """
    count, windows = length / least(tile, length), Counter(map(config.window_of, range(config.num_layers)))

    def seen(window: int | None) -> Many:
        """Tiles computed: a row of tiles computes its own and those before it in the window; the first rows have fewer."""
        each = count if window is None else least(count, 1 - (1 - window) * count // length)
        return each * (count - (each - 1) / 2)

    return sum(blocks * seen(window) for window, blocks in windows.items()) / (config.num_layers * count**2)


def block_products(config: DecoderLike, *, experts: bool = False, resting: bool = False) -> float:
    """Multiplications of a block's matrices per token.

    Args:
      config: the model.
      experts: whether it has experts; else its feed-forward part is dense.
      resting: count all experts, as a pipeline weighs a block where it cuts; else only the `top_k` of a token.
    """
    size, attention = config.hidden_size, float(config.attention_shape.products)
    own = config.experts
    if not experts or own is None:
        return attention + (inward_products(config) + 1.0) * size * config.mlp_size
    inward = 2 if gated(config, own) else 1
    inner, number = own.inner_size or config.mlp_size, own.num_experts
    each = (inward + 1.0) * size * inner
    # A cut sees the experts' biases as matrices too.
    biases = float(number * (inward * inner + size)) if resting and config.use_bias else 0.0
    shared = (inward + 1.0) * size * own.shared_size
    return attention + size * number + shared + each * (number if resting else own.top_k) + biases


def head_products(config: DecoderLike) -> float:
    """Multiplications of the head's matrix per token."""
    return float(config.hidden_size * config.vocab_size)


def recomputed_flops(config: DecoderLike, run: Run, length: int) -> Many:
    """FLOPs per token of recomputation: the forward's, or with "selective" only those of attention and experts.

    A loss that holds some words' logits at a time computes them once more, whatever `run` says.
    """
    logits = 2 * config.hidden_size * config.vocab_size if config.words_at_once else 0
    parts = pair_flops(config, length) + expert_products(config) * 6
    return run.full * (config.flops_per_token(length) // 3) + run.selective * (parts // 3) + logits


def expert_products(config: DecoderLike) -> int:
    """Multiplications per token of the experts it is sent to, in all blocks."""
    if (own := config.experts) is None:
        return 0
    inward, inner = 2 if gated(config, own) else 1, own.inner_size or config.mlp_size
    return sum(expert_blocks(config)) * own.top_k * (inward + 1) * config.hidden_size * inner


def expert_flops(config: DecoderLike, run: Run) -> Many:
    """FLOPs of experts per token, forward, backward and recomputed."""
    return 2 * expert_products(config) * (3 + run.recomputes)


# --------------------------------------------------------------------------------------------------
# `RoutedExperts`: how a decoder's tokens travel to experts on other ranks under equal loads.
# --------------------------------------------------------------------------------------------------

RANKS = "expert"
"""The mesh axis over which experts lie."""


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The dispatch that `ParallelMoE` chooses for a rank's microbatch (see `Dispatch`), and its sizes.

    Attributes:
      ranks: N, of the axis.
      experts: E.
      top_k: k.
      tokens: T, of a rank's microbatch.
      width, inner: h, and f of one expert on a rank.
      gates: whether experts are gated, with two inner products.
      gathers: 1 where every rank gathers all tokens, else 0.
      ragged: whether only filled slots travel.
      kernel: whether one kernel multiplies all experts' rows.
      capacity: slots of an expert for a rank's tokens; None: no choice is dropped.
    """

    ranks: Many
    experts: int
    top_k: int
    tokens: Many
    width: int
    inner: Many
    gates: bool
    gathers: Many
    ragged: bool
    kernel: bool
    capacity: Many | None

    @classmethod
    def of(
        cls, config: DecoderLike, degrees: Mapping[str, Many], tokens: Many, platform: str | None
    ) -> "RoutedExperts | None":
        """The routed experts of a configuration, on one mesh or many; None if it has no experts.

        Args:
          config: the model.
          degrees: of the mesh.
          tokens: of a rank's microbatch.
          platform: what is compiled for, which decides for `dispatch="auto"`.
        """
        if (own := config.experts) is None:
            return None
        ranks, factor = degrees.get(RANKS, 1), own.capacity_factor
        dropless = factor is None
        gathers = {"auto": (ranks > 1) & (ranks <= own.top_k), "gather": ranks > 1}.get(own.dispatch, False)
        return cls(
            ranks=ranks, experts=own.num_experts, top_k=own.top_k, tokens=tokens, width=config.hidden_size,
            inner=divided(own.inner_size or config.mlp_size, degrees.get("tensor", 1)), gates=gated(config, own),
            gathers=either(dropless & gathers, 1, 0),
            ragged=dropless and (own.dispatch == "ragged" or (own.dispatch == "auto" and platform in RAGGED_PRODUCTS)),
            kernel=platform in RAGGED_PRODUCTS,
            capacity=None if factor is None else _capacity(tokens, own.top_k, own.num_experts, factor),
        )  # fmt: skip

    @property
    def pairs(self) -> Many:
        """The number of (token, expert) pairs of a rank."""
        return self.tokens * self.top_k

    @property
    def slots(self) -> Many:
        """The number of rows that a rank sends in a round to all ranks together, filled or not."""
        if self.capacity is not None:
            return self.experts * self.capacity
        even = -divided(-_floor(SLACK * self.pairs), self.ranks)
        most_of_rank = self.tokens * least(self.top_k, divided(self.experts, self.ranks))
        return self.ranks * most(1, least(even, most_of_rank))

    @property
    def rows(self) -> Many:
        """The number of rows for which a rank's experts have room: of a round, or of gathered tokens."""
        local = divided(self.experts, self.ranks)
        gathered = least(_floor(SLACK * self.pairs), self.ranks * self.tokens * least(self.top_k, local))
        alone = either(self.ranks > 1, self.slots, self.pairs) if self.capacity is None else self.slots
        return either(self.gathers > 0, most(1, gathered), alone)

    @property
    def empty(self) -> Many:
        """The number of rows of one round that carry no token under balanced load."""
        return most(0, self.slots - self.pairs)

    @property
    def padded(self) -> Many:
        """Rows that a rank's experts multiply over its (token, expert) pairs; 0 if other ranks decide how many arrive."""
        return either(self.ranks > 1, 0.0, 1.0) if self.capacity is None else self.slots / self.pairs

    def kept(self, itemsize: int, *, redone: bool = False) -> Many:
        """Bytes that one layer keeps for its backward: rows received and returned, and inner products.

        Args:
          itemsize: of activations.
          redone: whether the backward redoes elementwise work.
        """
        everyone = either(self.gathers > 0, self.ranks * self.tokens * self.width * itemsize, 0)
        wide = max(4, itemsize)  # what comes back is weighed in at least float32
        if self.capacity is None:
            inner = (2 if self.gates else 1) * (self.rows + self.block)
        else:  # as of a dense layer
            inner = ((2 if redone else 5) if self.gates else (1 if redone else 3)) * self.rows
        return everyone + self.rows * self.width * (2 * itemsize + wide) + inner * self.inner * itemsize

    def held(self, itemsize: int) -> Many:
        """Bytes that a layer needs while it computes besides `kept`: row gradients, and what a later round keeps."""
        if self.capacity is not None:
            return 0
        grads = 3 * (self.rows + self.block) * self.width + self.block * self.inner
        return grads * itemsize + either(self.ranks > 1, self.kept(itemsize), 0)

    @property
    def block(self) -> Many:
        """Rows of the largest block in which a loop over experts multiplies; 0 if a kernel does it."""
        local = divided(self.experts, self.ranks)
        return either(self.kernel, 0, 2 * -divided(-self.pairs, local))


def _floor(amount: Many) -> Many:
    return divided(amount, 1) if varies(amount) else int(amount)


def _capacity(tokens: Many, top_k: int, experts: int, factor: float) -> Many:
    """`capacity_of`, for many numbers of tokens at once."""
    if not varies(tokens):
        return capacity_of(tokens, top_k, experts, factor)
    share = Fraction(str(factor)) * top_k / experts
    return most(1, least(tokens, -divided(-tokens * share.numerator, share.denominator)))


# --------------------------------------------------------------------------------------------------
# What attention sends along an axis that splits positions (see docs/guides/context-parallelism.md): its methods'
# formulas.
# --------------------------------------------------------------------------------------------------


def attention_flows(layers: Layers, attention: SplitAttention, documents: bool = False) -> Iterator[Flow]:
    """Yield the flows of attention in a rank's blocks; the backward, and recomputation, repeat the forward's reads.

    Args:
      layers: the rank's.
      attention: how it reads other ranks' positions.
      documents: whether rows hold several documents, whose segment ids every rank then gathers.
    """
    if documents:
        yield from _segments(layers, attention)
    yield from _read(layers, attention, "forward", 1)
    yield from _read(layers, attention, "backward", 1 + layers.run.recomputes)
    if attention.gathers:
        yield _across(layers, attention, SCATTER, "backward", 1)
    else:
        wide = jnp.promote_types(layers.dtype, jnp.float32).name
        yield _across(layers, attention, "permute", "backward", attention.gradient_hops, wide)


def _read(layers: Layers, attention: SplitAttention, work: str, times: Many) -> Iterator[Flow]:
    """All-to-alls that trade positions for heads and back, and permutes of the keys and values of other groups of ranks."""
    exchanged = (attention.queries + attention.keys) * layers.tokens
    yield replace(
        layers.flow(
            "all_to_all",
            attention.split.axis,
            exchanged,
            work,
            calls=times * layers.parts.blocks,
            arrays=4,
            label=ATTENTION,
        ),
        group_size=attention.among,
    )
    if attention.gathers:
        yield _across(layers, attention, GATHER, work, times)
    else:
        yield _across(layers, attention, "permute", work, times * (attention.groups - 1))


def _segments(layers: Layers, attention: SplitAttention) -> Iterator[Flow]:
    """Yield the gathers of segment ids, which the backward keeps."""
    axis, calls, whole = attention.split.axis, layers.parts.blocks, layers.tokens * attention.ranks
    yield layers.flow(GATHER, axis, whole, "forward", calls=calls, label=ATTENTION, dtype="int32")
    again = calls * layers.run.recomputes
    yield layers.flow(GATHER, axis, whole, "backward", calls=again, label=ATTENTION, dtype="int32")


def _across(layers: Layers, attention: SplitAttention, kind: str, work: str, times: Many, dtype: str = "") -> Flow:
    """The flow of keys and values together: of all groups where they are gathered, of one group per hop of a ring."""
    parts = attention.groups if attention.gathers else 1
    calls, elements = times * layers.parts.blocks, attention.keys * layers.tokens * parts
    flow = layers.flow(kind, attention.split.axis, elements, work, calls=calls, label=ATTENTION, dtype=dtype)
    return replace(flow, group_size=attention.groups, apart=attention.among)


# --------------------------------------------------------------------------------------------------
# How a decoder's blocks lie on the stages of a pipeline, and what its timetable means for time and memory.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stages:
    """The numbers of blocks in each pipeline stage.

    Attributes:
      num_ranks: S; 1 without a pipeline.
      blocks: of every stage, S*V of them; stage p lies on rank p mod S.
      experts: those of them that have experts.
    """

    num_ranks: int
    blocks: tuple[int, ...]
    experts: tuple[int, ...]

    def on_rank(self, rank: int) -> tuple[int, int]:
        """(blocks with experts, all blocks) of one rank."""
        return sum(self.experts[rank :: self.num_ranks]), sum(self.blocks[rank :: self.num_ranks])

    @property
    def routers_passed(self) -> int:
        """The number of routers whose values are passed on to the last stage."""
        return sum(self.experts[:-1])

    @property
    def ranks(self) -> tuple[ShardCounts, ...]:
        """The pipeline ranks that can be the peak of some quantity: the first, the largest one between, and the last."""
        last, total = self.num_ranks - 1, sum(self.blocks)
        between = max(range(1, last), key=self.on_rank, default=None)
        chosen = (0, last) if between is None else (0, between, last)
        here = ((rank, *self.on_rank(rank)) for rank in dict.fromkeys(chosen))
        return tuple(ShardCounts(blocks, int(r == 0), int(r == last), total, experts) for r, experts, blocks in here)


@lru_cache(maxsize=4096)
def _cut(costs: tuple[float, ...], loose: frozenset[int], head: float, num_stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage, by balanced costs; a block that is the only one of its kind begins no stage."""
    begins = [i for i in range(len(costs)) if i not in loose]
    own = [costs[i] for i in begins]
    own[0] += sum(costs[: begins[0]])
    own[-1] += sum(costs[begins[-1] + 1 :]) + head
    ends = [0, *(begins[i] for i in balanced(own, num_stages)), len(costs)]
    return tuple(b - a for a, b in pairwise(ends))


def stages_of(config: DecoderLike, plan: Plan, degrees: dict[str, int]) -> Stages:
    """The stages into which a plan's pipeline cuts a model: between blocks, with balanced numbers of multiplications.

    Of blocks in one loop (`scan_layers`) every stage has as many.

    Raises:
      ValueError: when there are fewer blocks than stages, or blocks in one loop do not divide.
    """
    ranks, experts = degrees.get(AXIS, 1), expert_blocks(config)
    if plan.pipe is None or ranks == 1:
        return Stages(1, (config.num_layers,), (sum(experts),))
    count, loose = plan.pipe.num_stages(ranks), frozenset(i for i, own in enumerate(experts) if experts.count(own) == 1)
    loose = loose if any(experts) else frozenset()
    if config.scan_layers:
        each, left = divmod(config.num_layers, count)
        if left or not each:
            raise ValueError(
                f"{config.num_layers} blocks in one loop do not divide into {count} stages (pipe={ranks}): "
                "set scan_layers=False"
            )
        return Stages(ranks, (each,) * count, tuple(sum(experts[i * each : (i + 1) * each]) for i in range(count)))
    if config.num_layers - len(loose) < count:
        alike = f" ({len(loose)} of another kind alone)" if loose else ""
        raise ValueError(f"{config.num_layers} blocks{alike} cannot be cut into {count} stages (pipe={ranks})")
    costs = {own: block_products(config, experts=own, resting=True) for own in set(experts)}
    head = 0.0 if config.tie_embeddings else head_products(config)
    blocks = _cut(tuple(costs[own] for own in experts), loose, head, count)
    starts = [0, *accumulate(blocks)]
    return Stages(ranks, blocks, tuple(sum(experts[a:b]) for a, b in pairwise(starts)))


@lru_cache(maxsize=1024)
def _timetable(pipe: Pipelined, ranks: int, microbatches: int) -> Timetable:
    return pipe.timetable(ranks, microbatches)


def timetable_of(plan: Plan, degrees: dict[str, int]) -> Timetable | None:
    """The timetable that a plan's pipeline executes; None without a pipeline.

    Raises:
      ValueError: for sizes that the schedule refuses.
    """
    ranks = degrees.get(AXIS, 1)
    if plan.pipe is None or ranks == 1:
        return None
    return _timetable(plan.pipe, ranks, plan.microbatches)


def bubble(timetable: Timetable | None, costs: StageCosts | None = None) -> float:
    """Idle time over useful time of a pipeline's ranks; 0 without one."""
    return 0.0 if timetable is None else simulate(timetable, costs).bubble_fraction


# --------------------------------------------------------------------------------------------------
# What a decoder's experts send: tokens to the ranks of their experts and back, and the sums of their routers.
# --------------------------------------------------------------------------------------------------

ROUTER = "router"
"""Label of the sums that routers make over all ranks that have a part of a microbatch."""

BUFFERS = "buffers"
"""Label of model state that ranks sum once per step: here the counts by which a router's selection bias learns."""


def expert_flows(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Yield the flows of experts in a rank's blocks; recomputing repeats the forward except the last exchange of a unit."""
    yield from _router(layers, experts)
    yield from _counts(layers)
    if experts.capacity is None:
        yield from _gathered(layers, experts)
        yield from _rounds(layers, experts)
    else:
        yield from _round(layers, experts, 1, "all_to_all")


def _ends(layers: Layers) -> Many:
    """0 if a recomputed unit ends with the experts' exchange, which recomputation need not repeat; else 1.

    Without recomputation a pipeline's whole stage is one unit, in which only elementwise work is made again.
    """
    within = layers.run.pipelined and not (layers.config.scan_layers or layers.config.sequence_parallel)
    return most(int(layers.config.post_norms), either(layers.run.recomputes > 0, 0, int(within)))


def _round(layers: Layers, experts: RoutedExperts, travels: Many, kind: str) -> Iterator[Flow]:
    """Yield the exchanges with experts: forward, backward, and again where the forward is recomputed."""
    rows, blocks = experts.slots * experts.width, layers.parts.experts * travels
    for work, times in (("forward", 2), ("backward", 2 + 2 * layers.run.recomputes)):
        flow = layers.flow(kind, RANKS, rows, work, calls=times * blocks, label=EXPERTS)
        yield replace(flow, padding=times * blocks * experts.empty * experts.width)


def _rounds(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Yield the gathers of counts, by which ranks agree on the number of rounds, the first round, and one `LATER` round."""
    travels, again = 1 - experts.gathers, layers.run.recomputes
    blocks, kind = layers.parts.experts * travels, "ragged_all_to_all" if experts.ragged else "all_to_all"
    numbers = experts.ranks * experts.experts
    for work, times in (("forward", 1), ("backward", again)):
        yield layers.flow(GATHER, RANKS, numbers, work, calls=times * blocks, label=EXPERTS, dtype="int32")
    yield from _round(layers, experts, travels, kind)
    # The backward of a later round computes it again; a pipeline's, apart from its forward, does so once more.
    repeated = 2 * most(again, int(layers.run.pipelined)) * _ends(layers)
    rows = experts.slots * experts.width
    for work, times in (("forward", 2), ("backward", 4 + repeated)):
        flow = layers.flow(kind, RANKS, rows, work, calls=times * blocks, label=EXPERTS)
        yield replace(flow, where=LATER)


def _gathered(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Yield the flows if every rank gathers all tokens, gates and choices, and outputs are summed."""
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
    yield make(SCATTER, "backward", 1, whole)
    yield make(SCATTER, "backward", 1, pairs, wide)


def _router(layers: Layers, experts: RoutedExperts) -> Iterator[Flow]:
    """Yield the sums of counts, probabilities and scores over all tokens of a microbatch, and of their gradients."""
    roles = {axis: role for axis, role in layers.run.roles.items() if role.reduces != "never"}
    axes = splitting(roles, "rows", "positions")
    wide = jnp.promote_types(layers.dtype, jnp.float32).name
    for work in ("forward", "backward"):
        calls = layers.parts.experts
        flow = layers.flow(SUM, RANKS, 2 * experts.experts + 6, work, calls=calls, label=ROUTER, dtype=wide)
        yield replace(flow, axes=axes, group_size=math.prod(layers.degrees[axis] for axis in axes))


def _counts(layers: Layers) -> Iterator[Flow]:
    """Yield the sums of counts for a selection bias, and the bias's maxima, of all blocks: every pipeline rank keeps all state.

    A maximum travels as integers (`extreme_along`).
    """
    own = layers.config.experts
    if own is None or own.router != "sigmoid" or not own.bias_rate:
        return
    roles = {axis: role for axis, role in layers.run.roles.items() if role.reduces != "never"}
    axes, blocks = splitting(roles, "rows", "positions"), sum(expert_blocks(layers.config))
    launches = 1 if layers.config.scan_layers else blocks
    for names in (axes, axes, *([(AXIS,)] if layers.run.pipelined else [])):
        yield Flow(
            label=BUFFERS, kind=SUM, axes=names, group_size=math.prod(layers.degrees[name] for name in names),
            dtype="int32", itemsize=4, elements=blocks * own.num_experts, launches=launches, where=ONCE,
        )  # fmt: skip


def router_metrics(config: DecoderLike) -> int:
    """The number of metrics of routers that the library's loss returns (`models.router_metrics`)."""
    if (own := config.experts) is None:
        return 0
    return 6 + (own.num_experts if own.num_experts <= MOST_LOADS else 0)


def router_values(config: DecoderLike, routers: Many) -> Many:
    """The number of values of this many routers that pipeline stages pass on (`RouterValues`)."""
    return 0 if config.experts is None else routers * (config.experts.num_experts + 5)
