"""What the layers of a decoder send themselves: Megatron's all-reduces, sequence parallelism's gathers, AxoNN's grid."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many, divided, nothing, varies
from axonml_jax.cost.decoder.configuration import DecoderLike, inward_products, layer_degrees
from axonml_jax.cost.flow import EACH_MICROBATCH, GRADIENTS, PARAMETERS, Flow, named
from axonml_jax.cost.rounds import Run, ShardCounts
from axonml_jax.cost.weight_groups import Weights
from axonml_jax.parallel.pipeline.policy import AXIS

SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The layers that a rank runs, and on how much.

    Attributes:
      config: the model.
      degrees: of the mesh.
      tokens: positions of a rank's rows in one microbatch, whole sequences.
      length: of a sequence.
      dtype: of activations.
      parts: of the model, that the rank has.
      run: microbatches per step, and what the backward recomputes.
      passed: numbers that stages of a pipeline hand on beside activations.
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
        """`calls` collectives of so many elements, in so many arrays, in every microbatch."""
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
        """What a stage of a pipeline hands on of one microbatch, by dtype."""
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
    """Everything that the layers communicate along their own axes."""
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
    """Shoeybi et al. 2019: per block two all-reduces of [b, s, h] forward and two backward."""
    whole = layers.tokens * layers.config.hidden_size
    make = lambda work, calls: layers.flow(SUM, "tensor", whole, work, calls=calls)
    parts, again, scan = layers.parts, layers.run.recomputes, layers.config.scan_layers
    ends = ends_with_product(layers.config)
    halves = 2 * parts.blocks + _shared(layers)
    yield make("forward", halves + parts.first)
    # Recomputing repeats every sum of the forward; in a scan, whose trips end with their units, not what a unit ends with.
    repeated = again * (parts.blocks if ends else halves) + again * parts.first * (not scan)
    yield make("backward", halves - parts.blocks + repeated + parts.last)
    shape = layers.config.attention_shape
    for size in (*shape.entering, *([shape.shared] if shape.shared else [])):
        yield layers.flow(SUM, "tensor", layers.tokens * size, "backward", calls=parts.blocks)
    yield from _gates(layers)
    yield from _loss(layers, "tensor")
    yield from _summed(layers, weights, "tensor")


def ends_with_product(config: DecoderLike) -> bool:
    """Whether a trip of a loop over blocks ends with a product, whose result no norm reads."""
    return config.scan_layers and not config.post_norms


def _shared(layers: Layers) -> Many:
    """Experts through which all tokens go, each a dense layer beside the others."""
    own = layers.config.experts
    return layers.parts.experts if own is not None and own.shared_size else 0


def _gates(layers: Layers) -> Iterator[Flow]:
    """Every rank of `tensor` weighs a part of each expert's outputs: their sum is the gates' gradient."""
    if (own := layers.config.experts) is not None:
        wide = jnp.promote_types(layers.dtype, jnp.float32).name
        pairs, calls = layers.tokens * own.top_k, layers.parts.experts
        yield layers.flow(SUM, "tensor", pairs, "backward", calls=calls, dtype=wide)


def _scores(layers: Layers) -> Iterator[Flow]:
    """With the sequence split each rank's router scores its positions, and all need the choices of all."""
    if (own := layers.config.experts) is not None:
        wide, calls = jnp.promote_types(layers.dtype, jnp.float32).name, layers.parts.experts
        for work, times in (("forward", 1), ("backward", layers.run.recomputes)):
            scores = layers.tokens * own.num_experts
            yield layers.flow(GATHER, "tensor", scores, work, calls=times * calls, dtype=wide)


def _sequence(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Korthikanti et al. 2022: a gather and a scatter per half block each way, and the gathered input again."""
    whole, again = layers.tokens * layers.config.hidden_size, layers.run.recomputes
    first, last, shared = layers.parts.first, layers.parts.last, _shared(layers)
    experts = layers.parts.experts  # in the place of so many dense halves; they keep what they gather
    latent = layers.config.latent is not None
    halves = (1 if latent else 2) * layers.parts.blocks - experts  # attention of latents gathers others than its input

    def make(kind: str, work: str, calls: Many, others: Many) -> Iterator[Flow]:
        """`calls` of halves, which a ring cuts into hops, and those of experts and of what stands around the blocks."""
        ranks, ring = layers.degrees["tensor"], layers.config.ring
        if ring:
            yield layers.flow("permute", "tensor", divided(whole, ranks), work, calls=calls * (ranks - 1))
        yield layers.flow(kind, "tensor", whole, work, calls=others if ring else calls + others)

    yield from make(GATHER, "forward", halves, last + experts + shared)
    yield from make(SCATTER, "forward", halves, first + experts + shared)
    # Recomputing repeats what leads to the last product of a unit, not the scatter after it.
    others = first + (1 + again) * (last + experts) + (2 + again) * shared
    yield from make(GATHER, "backward", (2 + again) * halves, others)
    # A norm after that product reads what is scattered, so that it is repeated too.
    normed = again * layers.config.post_norms
    repeated = again * (halves if layers.config.post_norms else layers.parts.blocks)
    yield from make(SCATTER, "backward", halves + repeated, last + (1 + normed) * (experts + shared))
    if latent:
        yield from _gathered_latents(layers)
    if layers.config.position == "learned":
        yield layers.flow(GATHER, "tensor", layers.length * layers.config.hidden_size, "backward", calls=first)
    yield from _scores(layers)
    yield from _gates(layers)
    yield from _loss(layers, "tensor")
    yield from _summed(layers, weights, "tensor")


def _gathered_latents(layers: Layers) -> Iterator[Flow]:
    """Of attention, with the sequence split: latents are gathered, again for their layers' weights, and the key heads share."""
    shape, blocks, again = layers.config.attention_shape, layers.parts.blocks, layers.run.recomputes
    ends = again * layers.config.post_norms
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
    yield layers.flow(SCATTER, "tensor", whole, "backward", calls=blocks * ends)


def _loss(layers: Layers, axis: str) -> Iterator[Flow]:
    """Cross entropy of split logits: a maximum and a sum of two numbers per token, nothing backward."""
    last, again = layers.parts.last, layers.run.recomputes
    for numbers in (1, 2):
        yield layers.flow(SUM, axis, numbers * layers.tokens, "forward", calls=last, dtype="float32")
        yield layers.flow(SUM, axis, numbers * layers.tokens, "backward", calls=last * again, dtype="float32")


def _summed(layers: Layers, weights: Weights, axis: str) -> Iterator[Flow]:
    """Gradients of parameters that every rank of an axis holds and of which each computes a part."""
    for group in weights.groups:
        if axis in group.summed:
            calls = layers.parts.number(group.place, group.count) * group.layers
            one = divided(group.read, group.layers)
            yield layers.flow(SUM, axis, one, "backward", calls=calls, arrays=group.arrays, dtype=group.read_dtype)


def _grid(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """Singh et al. 2024, with activations whole over row and col between the pairs of layers."""
    yield from _weights_over_depth(layers, weights)
    config, row, col = layers.config, layers.degrees.get("row", 1), layers.degrees.get("col", 1)
    size, inner, tokens, blocks = config.hidden_size, config.mlp_size, layers.tokens, layers.parts.blocks
    shape, again = config.attention_shape, layers.run.recomputes  # recomputing repeats the whole forward
    whole = tokens * size
    over_col = divided(whole, col)
    openings = [[each.fan_out for each in shape.matrices if each.opens], [inner] * inward_products(config)]
    for half, outs in enumerate(openings):
        closed = (shape.mixed, inner)[half]
        ends = again * (not (ends_with_product(config) and half == 1))  # a trip's last product is not repeated
        for out in outs:  # column-like layers: split input, partial outputs summed over col
            yield layers.flow(SUM, "col", divided(tokens * out, row), "forward", calls=blocks)
            yield layers.flow(SUM, "col", divided(tokens * out, row), "backward", calls=blocks * again)
        yield layers.flow(SUM, "row", over_col, "backward", calls=blocks)
        yield layers.flow(GATHER, "col", whole, "backward", calls=blocks)
        # The transposed layer after them: summed over row, its features joined over col.
        yield layers.flow(SUM, "row", over_col, "forward", calls=blocks)
        yield layers.flow(SUM, "row", over_col, "backward", calls=blocks * ends)
        yield layers.flow(GATHER, "col", whole, "forward", calls=blocks)
        yield layers.flow(GATHER, "col", whole, "backward", calls=blocks * ends)
        yield layers.flow(SUM, "col", divided(tokens * closed, row), "backward", calls=blocks)
    yield from _ends_of_grid(layers, row, col)
    yield from _summed(layers, weights, "row")


def _ends_of_grid(layers: Layers, row: Many, col: Many) -> Iterator[Flow]:
    """What the embedding sends, and the head with its loss."""
    size, tokens, again = layers.config.hidden_size, layers.tokens, layers.run.recomputes
    first, last = layers.parts.first, layers.parts.last
    whole, logits = tokens * size, divided(tokens * layers.config.vocab_size, col)
    over_row = divided(whole, row)
    looked_up_again = first * again * (not layers.config.scan_layers)
    yield layers.flow(SUM, "col", over_row, "forward", calls=first)
    yield layers.flow(GATHER, "row", whole, "forward", calls=first)
    yield layers.flow(SUM, "col", over_row, "backward", calls=looked_up_again)
    yield layers.flow(GATHER, "row", whole, "backward", calls=looked_up_again)
    yield layers.flow(GATHER, "row", whole, "backward", calls=last)
    yield layers.flow(SUM, "col", over_row, "backward", calls=last)
    yield layers.flow(SUM, "row", logits, "forward", calls=last)
    yield layers.flow(SUM, "row", logits, "backward", calls=last * again)
    yield from _loss(layers, "col")


def _weights_over_depth(layers: Layers, weights: Weights) -> Iterator[Flow]:
    """The block of every weight is gathered when it is used, forward and backward, and its gradient scattered."""
    scan, ends = layers.config.scan_layers, ends_with_product(layers.config)
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
        once_more = reads - (scan and (looked_up or tied))
        again = (not looked_up) + layers.run.recomputes * (0 if ends and group.closes else once_more)
        yield make(GATHER, PARAMETERS, "backward", number * again)
        yield make(SCATTER, GRADIENTS, "backward", number * reads)
