"""What the layers of a decoder send themselves: Megatron's all-reduces, sequence parallelism's gathers, AxoNN's grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from axonml_jax.cost.decoder import DecoderLike, layer_degrees
from axonml_jax.cost.flow import EACH_MICROBATCH, GRADIENTS, PARAMETERS, Flow
from axonml_jax.cost.weight import Placed

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
      blocks: how many blocks the rank has.
      first, last: whether it has the embedding, and the head with the loss.
      times: microbatches per step.
      remat: what the backward recomputes.
    """

    config: DecoderLike
    degrees: dict[str, int]
    tokens: int
    length: int
    dtype: str
    blocks: int
    first: bool
    last: bool
    times: int
    remat: str | None

    def flow(
        self, kind: str, axis: str, elements: int, work: str, *, calls: int = 1, label: str = "", dtype: str = ""
    ) -> Flow:
        """`calls` collectives of so many elements in every microbatch."""
        sent = jnp.dtype(dtype or self.dtype)
        return Flow(
            label=label,
            kind=kind,
            axes=(axis,),
            group_size=self.degrees.get(axis, 1),
            dtype=sent.name,
            itemsize=sent.itemsize,
            elements=calls * elements,
            launches=calls,
            times=self.times,
            where=EACH_MICROBATCH,
            work=work,
        )


def layer_flows(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """Everything that the layers communicate along their own axes."""
    own = layer_degrees(layers.config, layers.degrees)
    if all(ranks == 1 for ranks in own.values()):
        return
    if layers.config.split == "grid":
        yield from _grid(layers, placed)
    elif layers.config.sequence_parallel:
        yield from _sequence(layers, placed)
    else:
        yield from _tensor(layers, placed)


def _tensor(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """Shoeybi et al. 2019: per block two all-reduces of [b, s, h] forward and two backward."""
    whole = layers.tokens * layers.config.hidden_size
    make = lambda work, calls: layers.flow(SUM, "tensor", whole, work, calls=calls)
    yield make("forward", 2 * layers.blocks + layers.first)
    # Recomputing repeats every sum of the forward; in a scan, whose trips end with their units, not what a unit ends with.
    again, scan = bool(layers.remat), layers.config.scan_layers
    repeated = again * (1 if scan else 2) * layers.blocks + again * (layers.first and not scan)
    yield make("backward", 2 * layers.blocks + repeated + layers.last)
    yield from _loss(layers, "tensor")
    yield from _summed(layers, placed)


def _sequence(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """Korthikanti et al. 2022: a gather and a scatter per half block each way, and the gathered input again."""
    whole, blocks, again = layers.tokens * layers.config.hidden_size, layers.blocks, bool(layers.remat)

    def make(kind: str, work: str, calls: int, ends: int) -> Iterator[Flow]:
        """`calls` of the blocks, which a ring cuts into hops, and those of what stands before and after the blocks."""
        ranks, ring = layers.degrees["tensor"], layers.config.ring
        if ring:
            yield layers.flow("permute", "tensor", whole // ranks, work, calls=calls * (ranks - 1))
        yield layers.flow(kind, "tensor", whole, work, calls=ends if ring else calls + ends)

    yield from make(GATHER, "forward", 2 * blocks, layers.last)
    yield from make(SCATTER, "forward", 2 * blocks, layers.first)
    # Recomputing repeats what leads to the last product of a unit, not the scatter after it.
    yield from make(GATHER, "backward", (4 + 2 * again) * blocks, layers.first + (1 + again) * layers.last)
    yield from make(SCATTER, "backward", (2 + again) * blocks, layers.last)
    if layers.first and layers.config.position == "learned":
        yield layers.flow(GATHER, "tensor", layers.length * layers.config.hidden_size, "backward")
    yield from _loss(layers, "tensor")
    yield from _summed(layers, placed)


def _loss(layers: Layers, axis: str) -> Iterator[Flow]:
    """Cross entropy of split logits: a maximum and a sum of two numbers per token, nothing backward."""
    if layers.last:
        work = "forward" if layers.remat is None else "backward"
        for numbers in (1, 2):
            yield layers.flow(SUM, axis, numbers * layers.tokens, "forward", dtype="float32")
            if work == "backward":
                yield layers.flow(SUM, axis, numbers * layers.tokens, work, dtype="float32")


def _summed(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """Gradients of parameters that every rank of `tensor` holds and of which each computes a part."""
    for each in placed:
        if "tensor" in each.weight.summed and each.count:
            one, calls = each.read // each.weight.layers, each.count * each.weight.layers
            yield layers.flow(SUM, "tensor", one, "backward", calls=calls, dtype=each.read_dtype.name)


def _grid(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """Singh et al. 2024, with activations whole over row and col between the pairs of layers."""
    yield from _weights_over_depth(layers, placed)
    config, row, col = layers.config, layers.degrees.get("row", 1), layers.degrees.get("col", 1)
    size, inner, tokens = config.hidden_size, config.mlp_size, layers.tokens
    kv, again = config.kv_heads * config.head_size, bool(layers.remat)  # recomputing repeats the whole forward
    openings = [[size, kv, kv], [inner] * (2 if config.activation == "swiglu" else 1)]
    for half, outs in enumerate(openings):
        closed, blocks = (size, inner)[half], layers.blocks
        ends = again and not (config.scan_layers and half == 1)  # a trip's last product is not repeated
        for out in outs:  # column-like layers: split input, partial outputs summed over col
            yield layers.flow(SUM, "col", tokens * out // row, "forward", calls=blocks)
            yield layers.flow(SUM, "col", tokens * out // row, "backward", calls=blocks * again)
        yield layers.flow(SUM, "row", tokens * size // col, "backward", calls=blocks)
        yield layers.flow(GATHER, "col", tokens * size, "backward", calls=blocks)
        # The transposed layer after them: summed over row, its features joined over col.
        yield layers.flow(SUM, "row", tokens * size // col, "forward", calls=blocks)
        yield layers.flow(SUM, "row", tokens * size // col, "backward", calls=blocks * ends)
        yield layers.flow(GATHER, "col", tokens * size, "forward", calls=blocks)
        yield layers.flow(GATHER, "col", tokens * size, "backward", calls=blocks * ends)
        yield layers.flow(SUM, "col", tokens * closed // row, "backward", calls=blocks)
    if layers.first:
        yield layers.flow(SUM, "col", tokens * size // row, "forward")
        yield layers.flow(GATHER, "row", tokens * size, "forward")
        looked_up_again = int(again and not config.scan_layers)
        yield layers.flow(SUM, "col", tokens * size // row, "backward", calls=looked_up_again)
        yield layers.flow(GATHER, "row", tokens * size, "backward", calls=looked_up_again)
    if layers.last:
        yield layers.flow(GATHER, "row", tokens * size, "backward")
        yield layers.flow(SUM, "col", tokens * size // row, "backward")
        yield layers.flow(SUM, "row", tokens * config.vocab_size // col, "forward")
        yield layers.flow(SUM, "row", tokens * config.vocab_size // col, "backward", calls=int(again))
        yield from _loss(layers, "col")


def _weights_over_depth(layers: Layers, placed: Sequence[Placed]) -> Iterator[Flow]:
    """The block of every weight is gathered when it is used, forward and backward, and its gradient scattered."""
    for each in placed:
        if not each.count or "depth" not in each.layout.axes:
            continue
        stack, looked_up = each.weight.layers, not each.weight.again
        block, count = each.read // stack * layers.degrees["depth"], each.count * stack
        dtype, tied = each.read_dtype.name, each.weight.place == "both ends"
        reads = 2 if tied else 1
        make = lambda kind, label, work, calls, block=block, dtype=dtype: layers.flow(
            kind, "depth", block, work, calls=calls, label=label, dtype=dtype
        )
        yield make(GATHER, PARAMETERS, "forward", count * reads)
        once_more = reads if not layers.config.scan_layers else reads - (looked_up or each.weight.place == "both ends")
        ends = layers.config.scan_layers and each.weight.name.endswith("down/kernel")
        again = (not looked_up) + bool(layers.remat) * (0 if ends else once_more)
        yield make(GATHER, PARAMETERS, "backward", count * again)
        yield make(SCATTER, GRADIENTS, "backward", count * reads)
