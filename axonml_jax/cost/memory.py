"""The memory of a rank: parameters, gradients, optimizer state, activations; and the parts of a step's cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp

from axonml_jax.cost.base import (
    Flow,
    Group,
    Placed,
    Run,
    Setting,
    ShardCounts,
    TickCounts,
    Weights,
    grouped,
    passing,
    rests_at,
    small_flows,
    splitting,
    weight_flows,
)
from axonml_jax.cost.decoder import (
    DecoderLike,
    Many,
    decoder_weights,
    divided,
    either,
    expert_blocks,
    gated,
    inward_products,
    layer_degrees,
    least,
    most,
)
from axonml_jax.cost.flows import (
    Layers,
    RoutedExperts,
    SplitAttention,
    attention_flows,
    computed_pairs,
    expert_flows,
    layer_flows,
    pair_flops,
    router_metrics,
    router_values,
)
from axonml_jax.layers.kernels import PLATFORMS, kernel_of, shape_obstacles, worth_blocks
from axonml_jax.layers.pieces import block_for
from axonml_jax.parallel.plan import CPUOffload, Plan
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.program.recompute import AHEAD

# --------------------------------------------------------------------------------------------------
# Activation bytes of a decoder: what a block keeps for its backward, and what loss and head need at their peak.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of a block's activations on one rank for one microbatch.

    Attributes:
      kept: what one block keeps until its backward.
      rebuilt: what one block holds while it is recomputed (0 where nothing is).
      boundary: the activation between two blocks.
      sent: the part of `kept` that is in the host's memory meanwhile.
      head: logits, their gradient and the loss's temporaries, at their peak.
      others: what attention holds of other ranks' keys and values while it computes, or experts of a later round.
    """

    kept: Many
    rebuilt: Many
    boundary: Many
    head: Many
    others: Many = 0
    sent: Many = 0


_WIDE = 4
"""Bytes of a number of float32."""

SCRATCH = 1 << 27
"""Bytes of a TPU chip's scratch memory (VMEM of v5e and v5p), in which XLA lays what is small."""

SENDS = {"tpu": 6.5e-5, "cuda": 1.1e-4}
"""By platform, the bytes that a device can send to its host and take back per FLOP computed meanwhile: the least of the
planner's table of hardware at half of the peak FLOP/s. XLA for CPUs sends none."""


def block_activations(
    config: DecoderLike,
    degrees: Mapping[str, Many],
    tokens: Many,
    length: int,
    compute: str,
    run: Run,
    platform: str | None = None,
    attention: SplitAttention | None = None,
    experts: RoutedExperts | None = None,
    *,
    apart: bool,
    documents: bool = False,
) -> BlockActivations:
    """The activations of a block of the reference transformer as XLA keeps them, tensor by tensor.

    Per token, with h features, f inner ones, a heads of d, k key and value heads, s positions: the attention's weights in
    float32 and as read, a*s each (with a fused kernel one number per head instead); query, key, value and the mixed heads, and
    what norms of queries and keys keep; the inner features before and after their activation; the residual stream and the
    norms' inputs. Splitting over `tensor` divides what is inside a layer; sequence parallelism the rest too.

    Args:
      config: the model.
      degrees: of the mesh.
      tokens: of one microbatch on one rank, whole sequences.
      length: of a sequence.
      compute: name of the activations' dtype.
      run: says what the backward recomputes.
      platform: what is compiled for, "tpu", "cuda" or "cpu"; None: no kernel of attention is counted on.
      attention: how it reads positions of other ranks, in blocks or by a kernel; None: it reads a rank's own.
      experts: the experts that replace dense feed-forward parts; None: there are none.
      apart: whether the backward is in another loop than the forward, which then keeps products alone, all of them.
      documents: whether rows hold several documents.
    """
    inside, outside = _cuts(config, degrees)
    size, itemsize = config.hidden_size, jnp.dtype(compute).itemsize
    shape = config.attention_shape
    boundary = divided(tokens * size * itemsize, outside)
    fused = attention is not None or fuses_attention(config, length, compute, platform, documents)
    # Norms and activations go over memory once there, whether by kernels or XLA's fusions.
    one_pass = platform in ("cuda", "tpu") and itemsize == 2
    feed = _feed(config, tokens, inside, itemsize, experts, one_pass)
    whole = boundary + feed.whole + _between_products(config, degrees, tokens, length, itemsize, fused, one_pass)
    # Between the layers both closing products are kept, and with biases the first of them before its bias too.
    closing = size * itemsize * (3 if config.use_bias else 2)
    selective = boundary + divided(tokens * shape.opened * itemsize, inside) + divided(tokens * closing, outside)
    selective += feed.products + divided(tokens * shape.pressed * itemsize, outside)
    scores = config.num_heads * (_WIDE if fused else length * _WIDE) + shape.mixed * itemsize  # and the mixed heads
    plain = whole
    if apart:
        plain = selective + feed.routed + divided(tokens * scores, inside)
    elif config.scan_layers:  # JAX keeps all that the loop's backward reads, what each product reads by itself
        feed_kept = _feed(config, tokens, inside, itemsize, experts)
        plain = boundary + feed_kept.whole + divided(tokens * config.mlp_size * itemsize, inside)
        plain += _between_products(config, degrees, tokens, length, itemsize, fused, one_pass=False)
        plain += divided(tokens * size * 2 * (itemsize + _WIDE), outside)
    full = boundary + _sums(config, degrees, boundary, selective)
    kept = (1 - run.recomputes) * plain + run.full * full + run.selective * selective
    words = -divided(-config.vocab_size, _vocabulary_cut(config, degrees))  # padding of the last ranks is computed too
    words = least(config.words_at_once or words, words)
    rebuilt = (1 if apart else (run.recomputes > 0)) * (whole + feed.gradient)
    kernel = kernel_computes(config, length, compute, platform, documents, attention)
    others = 0 if attention is None else attention.held(tokens, itemsize, platform, kernel)
    others = most(others, 0 if experts is None else experts.held(itemsize))
    # In one pass logits and their gradient are in 16 bits; XLA's own cross entropy has one of them in float32.
    of_logit = itemsize + (2 * _WIDE if not one_pass else itemsize if run.kernels else _WIDE)
    sent = least(kept, _sent(config, divided(tokens, inside), length, platform, run)) if apart else 0
    return BlockActivations(kept, rebuilt, boundary, tokens * words * of_logit, others, sent)


def _between_products(
    config: DecoderLike, degrees: Mapping[str, Many], tokens: Many, length: int, itemsize: int, fused: bool, one_pass: bool
) -> Many:  # fmt: skip
    """Bytes that a block's backward reads besides its input and feed-forward part: those of attention and of norms."""
    (inside, outside), shape, size = _cuts(config, degrees), config.attention_shape, config.hidden_size
    # Attention weights as the softmax leaves and as it is read; of capped scores the tangent too.
    of_scores = (_WIDE if config.attention_softcap is None else 2 * _WIDE) + itemsize
    within = config.num_heads * (_WIDE if fused else length * of_scores)
    within += (shape.queries + shape.keys_and_values + shape.mixed) * itemsize
    within += _head_norms(config, itemsize, one_pass) if config.qk_norm else 0
    # What the norms make is in float32, and twice where rsqrt and scale are one factor.
    normed = 2 * _WIDE if one_pass else size * _WIDE * (1 if config.zero_centered_norm else 2)
    between = 3 * size * itemsize + 2 * normed + (2 * (size * itemsize + normed) if config.post_norms else 0)
    latents = sum(scale.size for scale in shape.scales if not scale.of_heads)
    between += shape.pressed * itemsize + latents * (2 * _WIDE + itemsize)
    return divided(tokens * within, inside) + divided(tokens * between, outside)


def _sent(config: DecoderLike, tokens: Many, length: int, platform: str | None, run: Run) -> Many:
    """Bytes that the link takes to the host while one block's forward is computed; at most the block's share of `run.sends`."""
    of_blocks = config.flops_per_token(length) - 6 * config.hidden_size * config.vocab_size
    link = int(SENDS.get(platform or "", 0.0) * of_blocks / 3 / config.num_layers)
    return least(tokens * link, int(run.sends) // config.num_layers)


def _sums(config: DecoderLike, degrees: Mapping[str, Many], boundary: Many, selective: Many) -> Many:
    """Bytes of the sums over ranks that are kept when the rest of a block is recomputed; on a grid all products."""
    own = layer_degrees(config, degrees)
    if config.split == "grid":
        return either(most(own["row"], own["col"]) > 1, selective - boundary, 0)
    return either(own["tensor"] > 1, boundary * (3 if config.post_norms else 1), 0)


def _head_norms(config: DecoderLike, itemsize: int, one_pass: bool) -> int:
    """Bytes per token of query and key norms: inputs, outputs, factors, and two numbers per head.

    Zero-centered norms keep one array fewer, as rsqrt and scale are separate there; with biases inputs are kept before the bias
    too. In one pass only the inputs are kept, beside the two numbers.
    """
    shape, wides = config.attention_shape, 3 if config.zero_centered_norm else 4
    each = itemsize if one_pass else wides * _WIDE + (itemsize if config.use_bias else 0)
    return (shape.heads + shape.kv_heads) * (shape.query_size * each + 2 * _WIDE)


class _Feed(NamedTuple):
    """Bytes of a block's feed-forward part; with dense and expert blocks the mean over all.

    Attributes:
      whole: what its backward reads.
      products: its dense products alone.
      routed: what is kept of experts where elementwise work is redone.
      gradient: the gradient of dense inner features, beside these in the backward; 0 where other terms include it.
    """

    whole: Many
    products: Many
    routed: Many = 0
    gradient: Many = 0


def _feed(
    config: DecoderLike, tokens: Many, inside: Many, itemsize: int, experts: RoutedExperts | None, one_pass: bool = False
) -> _Feed:  # fmt: skip
    gated = inward_products(config) == 2
    dense = lambda inner, each: divided(tokens * inner * each * itemsize, inside)
    # In one pass the activation's backward recomputes the rest.
    kept = (3 if gated else 2) if one_pass else (5 if gated else 3)
    gradient = dense(config.mlp_size, 1) if one_pass else 0
    own = _Feed(dense(config.mlp_size, kept), dense(config.mlp_size, 2 if gated else 1), gradient=gradient)
    if experts is None or config.experts is None:
        return own
    shared = config.experts.shared_size
    routed = _Feed(
        experts.kept(itemsize) + dense(shared, 5 if experts.gates else 3),
        dense(shared, 2 if experts.gates else 1),
        experts.kept(itemsize, redone=True),
    )
    blocks, total = sum(expert_blocks(config)), config.num_layers
    return _Feed(*(divided(a * blocks + b * (total - blocks), total) for a, b in zip(routed, own, strict=True)))


def fuses_attention(
    config: DecoderLike, length: int, compute: str, platform: str | None, documents: bool = False
) -> bool:  # fmt: skip
    """Whether attention holds no scores of all positions, by a kernel of the platform (None: no kernel) or in blocks."""
    if kernel_computes(config, length, compute, platform, documents):
        return True
    if config.attention == "auto":
        return not config.dropout and worth_blocks(platform, length, length)
    return config.attention == "blocks"


def kernel_computes(
    config: DecoderLike,
    length: int,
    compute: str,
    platform: str | None,
    documents: bool = False,
    attention: SplitAttention | None = None,
) -> Many:
    """Whether a platform's kernel computes attention, for full sequences or split positions."""
    kernel = kernel_of(platform) if config.attention == "auto" else config.attention
    if kernel not in PLATFORMS or not _kernel_applies(
        config, kernel, length, compute, documents, attention is not None
    ):
        return False
    return attention is None or attention.computed_by(kernel)


def _kernel_applies(config: DecoderLike, kernel: str, length: int, compute: str, documents: bool, apart: bool) -> bool:
    refused = config.window is not None or config.attention_softcap is not None or documents
    if config.dropout or (config.sinks and not (apart and kernel == "splash")) or (kernel == "cudnn" and refused):
        return False
    shape = config.attention_shape
    return shape.query_size == shape.value_size and not any(
        shape_obstacles(kernel, compute, length, length, shape.query_size)
    )


def _cuts(config: DecoderLike, degrees: Mapping[str, Many]) -> tuple[Many, Many]:
    """The number of parts into which tensors inside layers are split, and of those between layers."""
    own = layer_degrees(config, degrees)
    if config.split == "grid":
        return own["row"], 1
    return own["tensor"], own["tensor"] if config.sequence_parallel else 1


def _vocabulary_cut(config: DecoderLike, degrees: Mapping[str, Many]) -> Many:
    own = layer_degrees(config, degrees)
    return own["col"] if config.split == "grid" else own["tensor"]


def compute_dtype(config: DecoderLike, compute: str | None) -> str:
    """The name of the activations' dtype, given a policy's `compute`."""
    return jnp.dtype(compute or config.dtype or config.param_dtype).name


# --------------------------------------------------------------------------------------------------
# `Memory`: bytes per device by kind, on the rank that holds most; and how weights and activations add up to it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. Parameters, optimizer, padding and batch persist between steps; the others exist within one.

    Each is a number for one plan, or an array for many candidates at once.

    Attributes:
      parameters: resting parameters, padding left out.
      optimizer: its state, padding left out; with rounds a replica's own parameters and the outer momentum too, and what sums
        of gradients leave out where that is fed back.
      gradients: at their peak.
      activations: kept for the backward, and the head's and loss's at their peak.
      gathered: gathered or cast parameters beside resting ones, and unreduced gradients of a unit.
      pipeline: buffers of a pipeline's activations and cotangents on their way, slots for idle ticks, and what one tick of a
        stage holds beside the slots.
      joining: at the end of a round (`ax.DiLoCo`): a replica's parameters after the step, their differences from the outer ones
        and the sums of these. It comes after the backward, so it is no part of the backward's peak.
      padding: zeros that make leaves divide, in parameters and optimizer.
      batch: the rank's rows.
      host: the bytes of parameters, optimizer and gradients that rest in host memory instead.
      kept_on_host: activations in host memory, which are in none of the others.
      looped: copies of the gradients that are allocated before the backward begins: one for microbatches, one for blocks in a
        loop. A count, not bytes.
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
    kept_on_host: Many = 0
    looped: Many = 0

    @property
    def arguments(self) -> Many:
        """Bytes of a compiled step's arguments: all that persists, in device or host memory."""
        return self.parameters + self.optimizer + self.padding + self.batch

    @property
    def temporaries(self) -> Many:
        """Bytes that a step needs besides its arguments, at its peak.

        Gradients grow while activations are freed: the peak is the beginning or the end of the backward. Gradients that
        accumulate over microbatches, or that a loop over blocks or a pipeline writes, are allocated all the while.
        """
        apart = most(self.activations + self.looped * self.gradients, self.gradients)
        both = self.activations + self.pipeline + self.gradients
        backward = either(self.pipeline > 0, both, apart) + self.gathered
        return most(backward, self.joining)

    @property
    def total(self) -> Many:
        """Peak bytes on the device."""
        return self.arguments + self.temporaries - self.host

    def by_kind(self) -> dict[str, int]:
        """The bytes of every kind that is not zero, by attribute; for one plan only."""
        return {f.name: size for f in fields(self) if f.name != "looped" and (size := getattr(self, f.name))}


class Rests(NamedTuple):
    """Bytes of stored parameters on a rank: of all and of trained ones, without padding, and the padding of each."""

    parameters: Many
    trained: Many
    padding: Many
    trained_padding: Many


def rests(weights: Weights, parts: ShardCounts) -> Rests:
    """The stored parameters of a rank."""
    total = lambda own: sum(resting(group, parts) * own(group) for group in weights.groups)
    return Rests(
        total(lambda group: group.rest_bytes),
        total(lambda group: group.rest_bytes * group.trained),
        total(lambda group: group.padding_bytes),
        total(lambda group: group.padding_bytes * group.trained),
    )


def gradients(weights: Weights, parts: ShardCounts, run: Run) -> Many:
    """Peak bytes of stored gradients on a rank; those reduced at the end of a step are accumulated unsharded."""
    total = 0
    for group in weights.groups:
        if group.trained:
            whole = (run.microbatches > 1) & (run.rounds(group.sharded).reductions == 1)
            total = total + resting(group, parts) * either(whole, group.sum_bytes, group.shard_sum_bytes)
    return total


def left_out(weights: Weights, parts: ShardCounts) -> Many:
    """Bytes of error-feedback residuals, as large as a rank's unsharded gradients."""
    return sum(resting(group, parts) * group.left_bytes * group.trained for group in weights.groups)


def states(weights: Weights, parts: ShardCounts, run: Run, moments: int) -> dict[str, Many]:
    """Bytes of parameters, optimizer state, gradients and padding that one rank stores."""
    own, moments = rests(weights, parts), moments + run.copies
    return {
        "parameters": own.parameters,
        "optimizer": moments * own.trained + left_out(weights, parts),
        "gradients": gradients(weights, parts, run),
        "joining": run.joining * (own.trained + own.trained_padding),
        "padding": own.padding + moments * own.trained_padding,
    }


def resting(group: Group, parts: ShardCounts) -> Many:
    """Number of a group's parameters that rest on a pipeline rank; those that both ends read rest on the first rank."""
    number = parts.number(group.place, group.count)
    return number * parts.first if group.place == "both ends" else number


def gathered(weights: Weights, parts: ShardCounts, run: Run) -> Many:
    """Bytes of gathered parameters besides shards: all, or under ZeRO-3 the units in use and one unit's gradients.

    Without shards, the bytes of parameters that are cast to be read.
    """
    axis = next((group.sharded for group in weights.groups if group.sharded is not None), None)
    if axis is None:  # a cast copy lives until the backward has read it
        return sum(
            parts.number(each.place, each.count) * each.read_bytes * (not each.as_they_rest) for each in weights.groups
        )
    whole = sum(parts.number(group.place, group.count) * group.read_bytes for group in weights.groups)
    return either(run.rounds(axis).at_use > 0, weights.unit_bytes, whole)


def read_by_stages(weights: Weights, parts: ShardCounts, chunks: Many, in_ticks: bool) -> Many:
    """Bytes of parameters that a pipeline rank gathers or copies besides its shards.

    Of all its stages; or, gathered in ticks, of those in use, with one stage's gradients. Weights that are read as they rest
    take none.
    """
    numbers = [parts.number(group.place, group.count) for group in weights.groups]
    here = list(zip(weights.groups, numbers, strict=True))
    elsewhere = any(group.place == "both ends" for group in weights.groups)
    copied = most(0, *(either(number > 0, 1, 0) for group, number in here if elsewhere or not group.as_they_rest))
    reads = sum(number * group.read_bytes for group, number in here)
    return copied * (divided(whole_of_stages(reads, sums_of(weights, parts)), chunks) if in_ticks else reads)


def sums_of(weights: Weights, parts: ShardCounts) -> Many:
    """Bytes of the gradients of all that a pipeline rank reads, before they are reduced."""
    groups = weights.groups
    return sum(parts.number(each.place, each.count) * each.sum_bytes * each.trained for each in groups)


def whole_of_stages(reads: Many, sums: Many) -> Many:
    """Bytes of stages gathered in pipeline ticks: a forward's and a backward's parameters, and one's gradients."""
    return 2 * reads + sums


def memory(
    weights: Weights, ranks: Sequence[ShardCounts], run: Run, *, activations: Many, pipeline: Many, whole: Many, moments: int,
    batch: Many, offload: CPUOffload, sent: Many = 0, looped: Many = 0,
) -> Memory:  # fmt: skip
    """The memory of the rank that holds most; all pipeline ranks allocate what the fullest one needs.

    Args:
      weights: of the model.
      ranks: what each rank of a pipeline has of it.
      run: how a step runs.
      activations, pipeline: as of `Memory`.
      whole: bytes of gathered parameters (`Memory.gathered`).
      moments: optimizer values per parameter.
      batch: bytes of a rank's rows.
      offload: what rests on the host.
      sent: activations in host memory (`Memory.kept_on_host`).
      looped: as of `Memory`.
    """
    each = [states(weights, parts, run, moments) for parts in ranks]
    held = {kind: most(*(own[kind] for own in each)) for kind in each[0]}
    return Memory(
        **held, activations=activations, gathered=whole, pipeline=pipeline, batch=batch, host=on_host(held, offload),
        kept_on_host=sent, looped=looped,
    )  # fmt: skip


def on_host(held: Mapping[str, Many], offload: CPUOffload) -> Many:
    """Bytes of parameters, optimizer state and gradients stored in host memory."""
    away = {"parameters": offload.params, "optimizer": offload.optimizer, "gradients": offload.gradients}
    return sum(size * away.get(kind, False) for kind, size in held.items())


def of_blocks(blocks: Many, block: BlockActivations) -> Many:
    """Bytes of activations that a rank's blocks keep on the device, and of the head or one recomputed block, whichever is more.

    Activations sent to the host are fetched some trips ahead (`AHEAD`).
    """
    here = blocks * (block.kept - block.sent)
    return here + most(block.head, block.rebuilt + block.others + AHEAD * block.sent)


def of_ticks(blocks: Many, ticks: TickCounts, block: BlockActivations, run: Run, grads: Many) -> tuple[Many, Many]:
    """(bytes in the slots of a pipeline, bytes of one tick and of what passes between ranks).

    With recomputation, stages are recomputed block by block and each block's input is kept. Without, a stage's elementwise work
    is made again as a whole, from the stage's input. `grads`: bytes of a stage's gradients until the end of its backward.
    """
    again = run.recomputes > 0
    slot = blocks * block.kept - either(again, 0, (blocks - 1) * block.boundary)
    tick = either(again, 1, blocks) * block.rebuilt + grads + block.head + block.others
    return ticks.slots * slot, slot + tick + (ticks.arriving + 2) * block.boundary


def batch_bytes(rows: Many, positions: Many, documents: bool) -> Many:
    """Bytes of a rank's tokens and targets, int32; for packed documents also segment ids and positions."""
    return (4 if documents else 2) * 4 * rows * positions


# --------------------------------------------------------------------------------------------------
# `Step`: a training step on paper, or many of one kind at once: the flows that it sends, and the memory that it holds.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """The inputs of a step's cost. A `Many` may be an array with an entry for every candidate.

    Attributes:
      model: a decoder's configuration, with its layers split as the mesh needs.
      degrees: of the mesh.
      run: how often it does what.
      weights: the model's, where they rest.
      ranks: the parts of the pipeline ranks that can be the peak of some quantity.
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
        """How tokens reach experts; None if the model has none."""
        return RoutedExperts.of(self.model, self.degrees, self.tokens, self.platform)

    @property
    def tokens(self) -> Many:
        """The number of tokens in a rank's microbatch."""
        return divided(self.rows, self.run.microbatches) * self.positions

    @property
    def positions(self) -> Many:
        """The number of positions of a sequence on a rank."""
        return divided(self.length, math.prod(self.degrees[axis] for axis in splitting(self.run.roles, "positions")))

    @property
    def fullest(self) -> ShardCounts:
        """The parts of the pipeline rank that reads most weights of its own, whose traffic is reported; the first of equals."""
        chosen, *others = self.ranks

        def reads(parts: ShardCounts) -> Many:
            """Elements that a rank reads; what both ends read belongs to the first stage, and the last one has a copy."""
            own = lambda place, count: parts.number(place, count) * (parts.first if place == "both ends" else 1)
            return sum(own(each.place, each.count) * each.read for each in self.weights.groups)

        least = reads(chosen) if others else 0
        for parts in others:
            here = reads(parts)
            chosen, least = chosen.instead(here > least, parts), most(least, here)
        return chosen

    @property
    def layers(self) -> Layers:
        """The layers of the fullest rank."""
        return Layers(
            config=self.model, degrees=self.degrees, tokens=self.tokens, length=self.length,
            dtype=self.model.dtype or self.weights.groups[0].read_dtype, parts=self.fullest, run=self.run,
            passed=router_values(self.model, self.routers_passed),
        )  # fmt: skip


def attention_work(step: Step) -> tuple[Many, Many, Many]:
    """(FLOPs per token that masks skip, FLOPs per token of attention in blocks without a kernel, pairs of positions per token).

    Pairs are those that kernels or blocks compute for a token, over all heads and layers. Kernels and blocks skip masked tiles;
    an attention that holds all scores skips none, and all three are 0.
    """
    model, apart = step.model, step.attention
    sizes = (step.length, step.compute, step.platform, step.documents)
    if apart is not None:
        tile = apart.span(step.platform)
    elif fuses_attention(model, *sizes):
        tile = block_for(step.platform or "")
    else:
        return 0.0, 0.0, 0.0
    every, computed = pair_flops(model, step.length), computed_pairs(model, step.length, tile)
    pairs = computed * model.num_layers * model.attention_shape.heads * step.length
    blockwise = either(kernel_computes(model, *sizes, apart), 0.0, computed * every)
    return (1 - computed) * every, blockwise, pairs


def passes(step: Step) -> Many:
    """Bytes that a rank reads and writes between products in a step, with the fewest passes that the operations allow.

    Per token of a block, forward and backward: a norm with the sum before it reads two arrays and writes two each way; an
    activation reads its products and writes one, and reads these and a gradient and writes theirs; queries, keys and values
    are split with their rotation or biases, and concatenated; a softmax outside of kernels reads and writes its scores, and
    reads them and their gradient and writes one; experts' rows are sent and put together. Recomputation repeats a block's
    passes. Logits are read twice and written once. A pipeline's ranks are taken to have equal parts. The update is
    priced apart.
    """
    model, run, shape = step.model, step.run, step.model.attention_shape
    inside, outside = _cuts(model, step.degrees)
    fused = step.attention is not None or fuses_attention(
        model, step.length, step.compute, step.platform, step.documents
    )
    again = 2 if run.pipelined else 1 + run.recomputes  # a pipeline's stages make again at least what is elementwise
    between = 4 * model.hidden_size * (4 if model.post_norms else 2)
    scores = 0 if fused else model.num_heads * step.length
    within = 2 * shape.opened * (again + 1) + scores * (2 * again + 3)
    routed, every = sum(expert_blocks(model)), model.num_layers
    feeds = routed * _activation_passes(model, True, again) + (every - routed) * _activation_passes(model, False, again)
    blocks = divided(every * between * (again + 1), outside) + divided(every * within + feeds, inside)
    head = 3 * divided(model.vocab_size, _vocabulary_cut(model, step.degrees))
    tokens = step.rows * step.positions
    return tokens * jnp.dtype(step.compute).itemsize * (blocks + head) / step.degrees.get(AXIS, 1)


def _activation_passes(config: DecoderLike, experts: bool, again: Many) -> Many:
    """Elements per token that a block's activation, and its experts' rows on their way, read and write."""
    own, gates, inner, moved = config.experts, inward_products(config) == 2, config.mlp_size, 0
    if experts and own is not None:
        gates, inner = gated(config, own), own.top_k * (own.inner_size or config.mlp_size) + own.shared_size
        moved = 4 * own.top_k * config.hidden_size
    each = (3, 5) if gates else (2, 3)
    return inner * (each[0] * again + each[1]) + moved * (again + 1)


def attention_problems(step: Step) -> list[str]:
    """Why the attention that a model names cannot run; empty if it can, or the model leaves the choice open."""
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
    """Yield everything that the fullest rank sends: strategies, metrics and norm, layers, attention, experts, ticks."""
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
    """The memory of a step on the rank that holds most.

    Args:
      step: the step.
      moments: optimizer values per parameter.
      offload: what rests on the host.
      in_ticks: whether a pipeline gathers its stages in its ticks.
    """
    apart = step.ticks is not None or (step.model.scan_layers and step.weights.sliced)
    block = block_activations(
        step.model, step.degrees, step.tokens, step.length, step.compute, step.run, step.platform, step.attention, step.experts,
        apart=apart, documents=step.documents,
    )  # fmt: skip
    if step.ticks is None:
        activations, pipeline = of_blocks(step.model.num_layers, block), 0
        sent = step.model.num_layers * block.sent
        whole = gathered(step.weights, step.ranks[0], step.run)
    else:
        grads = [divided(sums_of(step.weights, parts), step.chunks) for parts in step.ranks]
        grads = most(2 * most(*grads) - SCRATCH, 0) if step.platform == "tpu" else 0  # XLA:TPU adds them last
        activations, pipeline = of_ticks(step.stage_blocks, step.ticks, block, step.run, grads)
        sent = 0
        whole = most(*(read_by_stages(step.weights, parts, step.chunks, in_ticks) for parts in step.ranks))
    return memory(
        step.weights, step.ranks, step.run, activations=activations, pipeline=pipeline, whole=whole, moments=moments,
        batch=batch_bytes(step.rows, step.positions, step.documents), offload=offload, sent=sent,
        looped=either(step.run.microbatches > 1, 1, 0) + step.model.scan_layers,
    )  # fmt: skip


def weights_of(model: DecoderLike, plan: Plan, degrees: Mapping[str, int]) -> Weights:
    """A decoder's weights under a plan; cached for plans that differ only in how a step runs.

    Args:
      model: its configuration.
      plan: with every default decided.
      degrees: of the mesh; `pipe` is left out, as stages hold whole blocks.
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
