"""A decoder's sizes: arithmetic on many candidates at once, the shape of attention, weights and their splits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from axonml_jax.layers.options import LatentConfig
from axonml_jax.mesh.axes import LAYER_AXES

# --------------------------------------------------------------------------------------------------
# `AttentionShape`: the matrices of a kind of attention and the sizes of its heads, which all counts and prices read.
# --------------------------------------------------------------------------------------------------

Split = Literal["column", "keys", "row", "whole"]


class Matrix(NamedTuple):
    """A linear layer of attention.

    Attributes:
      name: of the layer.
      fan_in, fan_out: its sizes.
      split: the part that each of the ranks that split heads has: "column", the outputs of its heads; "keys", likewise, but all
        of it where ranks do not divide the heads of keys; "row", the inputs of its heads; "whole", all of it, on every rank.
    """

    name: str
    fan_in: int
    fan_out: int
    split: Split

    @property
    def opens(self) -> bool:
        """Whether its outputs are split by heads."""
        return self.split in ("column", "keys")


class Scale(NamedTuple):
    """A norm inside attention.

    Attributes:
      name: of the norm.
      size: of what it norms.
      of_heads: whether it norms single heads, of which a rank has some; else it norms a latent, whole on every rank.
    """

    name: str
    size: int
    of_heads: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The shape of one block's attention.

    Attributes:
      matrices: all of them, in the order of their making.
      scales: the norms inside attention.
      heads: of queries.
      kv_heads: of keys and values.
      query_size: elements of a head's query, and of its key.
      value_size: elements of a head's value.
      entering: elements per position of each array that the layers split by heads read.
      shared: elements of a position's key that all heads share.
    """

    matrices: tuple[Matrix, ...]
    scales: tuple[Scale, ...]
    heads: int
    kv_heads: int
    query_size: int
    value_size: int
    entering: tuple[int, ...]
    shared: int = 0

    @property
    def queries(self) -> int:
        """Elements of a position's queries."""
        return self.heads * self.query_size

    @property
    def mixed(self) -> int:
        """Elements of the heads' outputs for a position."""
        return self.heads * self.value_size

    @property
    def keys_and_values(self) -> int:
        """Elements of a position's keys and values."""
        return self.kv_heads * (self.query_size + self.value_size)

    @property
    def opened(self) -> int:
        """Elements per position of layer outputs that are split by heads."""
        return sum(matrix.fan_out for matrix in self.matrices if matrix.opens)

    @property
    def pressed(self) -> int:
        """Elements per position of layer outputs that every rank has in full: latents, and a key that heads share."""
        return sum(matrix.fan_out for matrix in self.matrices if matrix.split == "whole")

    @property
    def products(self) -> int:
        """Multiplications of the matrices per position, equal to their number of elements."""
        return sum(matrix.fan_in * matrix.fan_out for matrix in self.matrices)

    @property
    def pair_products(self) -> int:
        """Multiplications per pair of positions: of scores, and of weights with values."""
        return self.heads * (self.query_size + self.value_size)


def grouped_heads(
    hidden_size: int, heads: int, kv_heads: int, head_size: int, *, qk_norm: bool = False
) -> AttentionShape:
    """The shape of multi-head or grouped-query attention.

    >>> grouped_heads(8, 4, 2, 2).products == 2 * 8 * 8 + 2 * 8 * 4
    True
    """
    queries, keys = heads * head_size, kv_heads * head_size
    return AttentionShape(
        matrices=(
            Matrix("query", hidden_size, queries, "column"),
            Matrix("key", hidden_size, keys, "keys"),
            Matrix("value", hidden_size, keys, "keys"),
            Matrix("out", queries, hidden_size, "row"),
        ),
        scales=(Scale("query_norm", head_size), Scale("key_norm", head_size)) if qk_norm else (),
        heads=heads,
        kv_heads=kv_heads,
        query_size=head_size,
        value_size=head_size,
        entering=(hidden_size,),
    )


def latent_heads(hidden_size: int, heads: int, latent: LatentConfig) -> AttentionShape:
    """The shape of latent attention, whose keys and values are computed from latents.

    >>> latent_heads(8, 2, LatentConfig(kv_rank=4, plain_size=3, rotary_size=2, value_size=3)).entering
    (8, 4)
    >>> latent_heads(8, 2, LatentConfig(kv_rank=4, plain_size=3, rotary_size=2, value_size=3, query_rank=5)).scales
    (Scale(name='query_norm', size=5, of_heads=False), Scale(name='key_value_norm', size=4, of_heads=False))
    """
    queries, made = heads * latent.query_size, heads * (latent.plain_size + latent.value_size)
    whole, scales, rank = [], [], latent.query_rank
    if rank is not None:
        whole, scales = [Matrix("query_down", hidden_size, rank, "whole")], [Scale("query_norm", rank, of_heads=False)]
    return AttentionShape(
        matrices=(
            *whole,
            Matrix("query", rank or hidden_size, queries, "column"),
            Matrix("key_value_down", hidden_size, latent.kv_rank + latent.rotary_size, "whole"),
            Matrix("key_value", latent.kv_rank, made, "column"),
            Matrix("out", heads * latent.value_size, hidden_size, "row"),
        ),
        scales=(*scales, Scale("key_value_norm", latent.kv_rank, of_heads=False)),
        heads=heads,
        kv_heads=heads,
        query_size=latent.query_size,
        value_size=latent.value_size,
        entering=(rank or hidden_size, latent.kv_rank),
        shared=latent.rotary_size,
    )


# --------------------------------------------------------------------------------------------------
# Sizes and counts as the cost model takes them: numbers, or arrays with an entry for every candidate of a planner.
# --------------------------------------------------------------------------------------------------

Many = Any
"""An int, a `Fraction` or a float; or a NumPy array, of floats where numbers are large: integer arrays overflow silently."""


def varies(amount: Many) -> bool:
    """Whether an amount is an array."""
    return isinstance(amount, np.ndarray)


def nothing(amount: Many) -> bool:
    """Whether an amount is the number 0 (arrays count as something)."""
    return not varies(amount) and not amount


def divided(amount: Many, parts: Many) -> Many:
    """`amount // parts`; for arrays, faster than NumPy's floor division of floats, and exact up to 2**53.

    >>> divided(7, 2), divided(np.array([7.0, 8.0]), 2)
    (3, array([3., 4.]))
    """
    return np.floor(amount / parts) if varies(amount) or varies(parts) else amount // parts


def plain(amount: Many) -> Many:
    """Replaces an array of equal entries by their number; other amounts are returned unchanged.

    >>> plain(np.array([2, 4]) * np.array([4, 2])), plain(3)
    (8, 3)
    """
    return amount.flat[0].item() if varies(amount) and (amount == amount.flat[0]).all() else amount


def several(ranks: Many) -> bool:
    """Whether a number of ranks is more than one; True for arrays, some of whose entries may be."""
    return varies(ranks) or ranks > 1


def either(holds: Many, yes: Many, no: Many) -> Many:
    """`yes` where a condition holds, else `no`.

    >>> either(2 > 1, 3, 4), either(np.array([True, False]), 3, 4)
    (3, array([3, 4]))
    """
    if varies(holds):
        return np.where(holds, yes, no)
    return yes if holds else no


def most(*amounts: Many) -> Many:
    """The elementwise maximum of amounts.

    >>> most(1, 2), most(2, np.array([1, 3]))
    (2, array([2, 3]))
    """
    return _chosen(amounts, max, np.maximum)


def least(*amounts: Many) -> Many:
    """The elementwise minimum of amounts."""
    return _chosen(amounts, min, np.minimum)


def _chosen(amounts: tuple[Many, ...], one: Any, many: Any) -> Many:
    numbers = [amount for amount in amounts if not varies(amount)]
    chosen = [one(numbers)] if numbers else []
    for amount in amounts:
        if varies(amount):
            chosen = [many(chosen[0], amount) if chosen else amount]
    return chosen[0]


# --------------------------------------------------------------------------------------------------
# `Weight`: the parameters of one name and shape, how many of them there are, and how a step reads them.
# --------------------------------------------------------------------------------------------------

Place = Literal["first", "block", "dense block", "expert block", "last", "both ends"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of each block, or one by itself, with its split.

    Attributes:
      name: path in the model, without the number of the block.
      shape: of the whole array.
      count: how many there are.
      dtype: as the model makes it.
      unit: ZeRO-3 gathers the weights of one unit together; one that is in no unit is gathered alone.
      splits: (mesh axes, dim) pairs: how the model's own layers split it.
      again: whether the backward reads it.
      rebuilds: whether recomputing a block's activations reads it.
      redone: whether redoing elementwise work alone, as the backward of a scan does, reads it.
      place: where in a pipeline it is: on the first or last stage, on both ends, or in blocks, which all stages share.
      trained: whether it gets gradients.
      summed: mesh axes of the model's layers over which they sum its gradient themselves.
      layers: of a stack of layers in one array, along dim 0, how many.
      stack_dims: how many first dims number layers or experts.
    """

    name: str
    shape: tuple[int, ...]
    count: int = 1
    dtype: str = "float32"
    unit: str = ""
    splits: tuple[tuple[tuple[str, ...], int], ...] = ()
    again: bool = True
    rebuilds: bool = True
    redone: bool = True
    place: Place = "block"
    trained: bool = True
    summed: tuple[str, ...] = ()
    layers: int = 1
    stack_dims: int = 0

    def stacked(self) -> "Weight":
        """The weights of all blocks in one array, as a model that scans its layers holds them."""
        splits = tuple((axes, dim + 1) for axes, dim in self.splits)
        return replace(
            self,
            shape=(self.count, *self.shape),
            count=1,
            splits=splits,
            layers=self.count,
            stack_dims=self.stack_dims + 1,
        )

    @property
    def size(self) -> int:
        """The number of elements of all of them."""
        return self.count * math.prod(self.shape)


# --------------------------------------------------------------------------------------------------
# Protocols of a decoder's configuration, and whether its layers divide over a mesh.
# --------------------------------------------------------------------------------------------------


class ExpertsLike(Protocol):
    """Protocol of a configuration of experts, such as `models.config.ExpertsConfig`."""

    num_experts: int
    top_k: int
    inner_size: int | None
    router: str
    bias_rate: float
    router_bias: bool
    activation: str | None
    shared_size: int
    capacity_factor: float | None
    dispatch: str


class DecoderLike(Protocol):
    """Protocol of a decoder's configuration, such as `models.config.TransformerConfig`."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    max_length: int
    norm: str
    activation: str
    experts: ExpertsLike | None
    latent: LatentConfig | None
    position: str
    tie_embeddings: bool
    use_bias: bool
    qkv_bias: bool
    qk_norm: bool
    zero_centered_norm: bool
    post_norms: bool
    attention_softcap: float | None
    sinks: bool
    window: int | None
    dropout: float
    split: str
    sequence_parallel: bool
    ring: bool
    attention: str
    scan_layers: bool
    dtype: str | None
    param_dtype: str

    @property
    def attention_shape(self) -> AttentionShape:
        """The matrices of a block's attention, and the sizes of its heads."""
        ...

    def window_of(self, block: int) -> int | None:
        """The number of positions visible in a block, the position itself included; None for all before it."""
        ...

    @property
    def mlp_size(self) -> int:
        """Inner width of the feed-forward part."""
        ...

    @property
    def words_at_once(self) -> int:
        """The number of words whose logits the loss holds at once; 0 for all."""
        ...

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        ...

    def flops_per_token(self, length: int) -> int:
        """FLOPs of one training token."""
        ...

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward part of a block is a mixture of experts."""
        ...


def inward_products(config: DecoderLike) -> int:
    """The number of products that lead to the inner features of a dense feed-forward part: two if it is gated."""
    return 1 if config.activation == "gelu" else 2


def gated(config: DecoderLike, experts: ExpertsLike) -> bool:
    """Whether experts are gated, with two inner products."""
    return (experts.activation or config.activation) != "gelu"


def expert_blocks(config: DecoderLike) -> list[bool]:
    """For each block, whether it has experts."""
    return [config.has_experts(block) for block in range(config.num_layers)]


def is_decoder(model: object) -> bool:
    """Whether an object has the attributes of a decoder's configuration."""
    return all(
        hasattr(model, name) for name in ("num_layers", "hidden_size", "attention_shape", "mlp_size", "vocab_size")
    )


def layer_degrees(config: DecoderLike, degrees: Mapping[str, Many]) -> dict[str, Many]:
    """The degrees of the axes over which the model's layers split: `tensor`, or row, col and depth; and `expert`."""
    axes = ("tensor",) if config.split == "tensor" else ("row", "col", "depth")
    axes += ("expert",) if config.experts is not None else ()
    return {axis: degrees.get(axis, 1) for axis in axes}


def problems(config: DecoderLike, degrees: Mapping[str, int], length: int) -> list[str]:
    """Why a model's layers cannot be split over a mesh; empty if they can."""
    own = layer_degrees(config, degrees)
    found = [
        f"{axis}={degrees[axis]} splits nothing in a model with split={config.split!r}"
        for axis in LAYER_AXES
        if degrees.get(axis, 1) > 1 and axis not in own
    ]
    return found + (_grid_problems(config, own) if config.split == "grid" else _tensor_problems(config, own, length))


def _tensor_problems(config: DecoderLike, own: Mapping[str, int], length: int) -> list[str]:
    ranks, kv = own["tensor"], config.attention_shape.kv_heads
    sizes = {"query heads": config.num_heads, "inner features": config.mlp_size}  # words are padded
    if config.sequence_parallel:
        sizes["positions"] = length
    found = [f"{size} {what} do not divide over tensor={ranks}" for what, size in sizes.items() if size % ranks]
    if (experts := config.experts) is not None:
        held, inner = own["expert"], experts.inner_size or config.mlp_size
        if experts.num_experts % held:
            found.append(f"{experts.num_experts} experts do not divide over expert={held}")
        if inner % ranks:
            found.append(f"{inner} inner features of an expert do not divide over tensor={ranks}")
        if experts.shared_size % ranks:
            found.append(f"{experts.shared_size} inner features of a shared expert do not divide over tensor={ranks}")
    if kv % ranks and ranks % kv:
        found.append(f"{kv} key and value heads and tensor={ranks}: neither divides the other")
    return found


def _grid_problems(config: DecoderLike, own: Mapping[str, int]) -> list[str]:
    row, col, depth = own["row"], own["col"], own["depth"]
    hidden, inner, words = config.hidden_size, config.mlp_size, config.vocab_size
    sizes = [
        (config.num_heads, "query heads", row, "row"), (config.attention_shape.kv_heads, "key and value heads", row, "row"),
        (hidden, "features", col * depth, "col x depth"), (hidden, "features", row * depth, "row x depth"),
        (inner, "inner features", row * depth, "row x depth"), (words, "words", col * depth, "col x depth"),
    ]  # fmt: skip
    return [f"{size} {what} do not divide over {axes}={ranks}" for size, what, ranks, axes in sizes if size % ranks]


# --------------------------------------------------------------------------------------------------
# Ring formulas: how many elements (or bytes) one rank sends for one collective. Pure arithmetic, exact.
#
# A ring moves the least any algorithm can for these collectives (Patarasuk and Yuan 2009), so the same formula is the
# cost and the theoretical minimum. `n` is always the *full* array: what an all-gather returns, a reduce-scatter takes.
#
# | kind | elements sent per rank, N ranks |
# | --- | --- |
# | all_reduce | 2n(N-1)/N |
# | all_gather, reduce_scatter, all_to_all | n(N-1)/N |
# | permute | n |
# | broadcast | n (a pipelined ring: every rank but the last forwards the array once) |
# | ragged_all_to_all | n (an upper bound: the sizes are data) |
#
# A collective over one rank moves nothing. For arrays the formulas give floats.
# --------------------------------------------------------------------------------------------------

Amount = int | Fraction
"""A number of elements or bytes: an int where it is whole, else the exact fraction."""

_FORMULAS: dict[str, Callable[[Many, Many], Many]] = {
    "all_reduce": lambda n, ranks: _part(2 * n * (ranks - 1), ranks),
    "all_gather": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "reduce_scatter": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "all_to_all": lambda n, ranks: _part(n * (ranks - 1), ranks),
    "permute": lambda n, ranks: n,
    "broadcast": lambda n, ranks: n,
    "ragged_all_to_all": lambda n, ranks: n,
}


def _part(whole: Many, ranks: Many) -> Many:
    return whole / ranks if varies(whole) or varies(ranks) else Fraction(whole, ranks)


KINDS: tuple[str, ...] = tuple(_FORMULAS)
"""Every kind of collective the ledger knows, by the name StableHLO gives it (permute and broadcast shortened)."""


def exact(amount: Many) -> Many:
    """Converts a whole `amount` to an int; fractions and arrays are returned unchanged.

    >>> exact(Fraction(6, 3)), exact(Fraction(1, 3))
    (2, Fraction(1, 3))
    """
    if varies(amount):
        return amount
    return int(amount) if amount == int(amount) else amount


def wire_elements(kind: str, elements: Many, group_size: Many) -> Many:
    """Elements one rank puts on the wire for one collective (multiply by the itemsize for bytes).

    Args:
      kind: one of `KINDS`.
      elements: n, the size of the full array on one rank, or an array of such sizes.
      group_size: N, the ranks that take part, or an array.

    Returns:
      An int where whole, else a Fraction; for arrays an array of floats.

    Raises:
      ValueError: for an unknown kind, or numbers that are a negative size or an empty group; arrays are not checked.

    >>> wire_elements("all_reduce", 1000, 8), wire_elements("all_gather", 1000, 3)
    (1750, Fraction(2000, 3))
    """
    if kind not in _FORMULAS:
        raise ValueError(f"unknown collective kind {kind!r}: it must be one of {', '.join(KINDS)}")
    if varies(elements) or varies(group_size):
        return either(group_size > 1, _FORMULAS[kind](elements, group_size), 0)
    if elements < 0 or group_size < 1:
        raise ValueError(
            f"{kind} of {elements} elements over {group_size} ranks: give elements >= 0 and at least one rank"
        )
    return 0 if group_size == 1 else exact(_FORMULAS[kind](elements, group_size))


# --------------------------------------------------------------------------------------------------
# The weights of a decoder-only transformer from its configuration: whole, tensor-parallel, on a 3-D grid, or of
# experts.
# --------------------------------------------------------------------------------------------------


def decoder_weights(config: DecoderLike, degrees: Mapping[str, int] | None = None) -> tuple[Weight, ...]:
    """All parameters of `models.Transformer(config)`, one entry for all blocks of a kind: dense, or with experts.

    Args:
      config: its sizes, and how its layers split.
      degrees: of the mesh; None: one device.
    """
    return _Decoder(config, layer_degrees(config, degrees or {})).weights()


def _kinds(num_layers: int, with_experts: int) -> "Iterator[_Kind]":
    """Yield the kinds of blocks; a block that is the only one of its kind is no unit."""
    if with_experts in (0, num_layers):
        yield _Kind("block", num_layers, "blocks")
        return
    counts: dict[Place, int] = {"dense block": num_layers - with_experts, "expert block": with_experts}
    for place, count in counts.items():
        yield _Kind(place, count, f"{place}s" if count > 1 else "")


def _stacks(block: Sequence[Weight]) -> list[Weight]:
    """The weights of a block, stacked as `models.Stack` holds them."""
    return [replace(each.stacked(), name=each.name.replace("blocks/", "blocks/layer/")) for each in block]


@dataclass(frozen=True)
class _Kind:
    """One kind of blocks: dense, or with experts."""

    place: Place
    count: int
    unit: str

    @property
    def shared(self) -> dict[str, Any]:
        """The attributes that all weights of the kind share."""
        return {"place": self.place, "count": self.count, "unit": self.unit}


class _Decoder:
    """The weights of a configuration on a mesh."""

    def __init__(self, config: DecoderLike, own: dict[str, int]):
        self.config, self.tensor, self.grid = config, own.get("tensor", 1), config.split == "grid"
        self.outside = ("tensor",) if config.sequence_parallel and self.tensor > 1 else ()
        # A first block that is the only one of its kind shares a ZeRO-3 unit with the embedding, unless the embedding is split:
        # its sum over ranks is kept.
        kinds = expert_blocks(config)
        self.looks_up_again = any(kinds) and kinds.count(kinds[0]) == 1 and self.tensor == 1 and not self.grid
        self.travels = own.get("expert", 1) > 1

    def weights(self) -> tuple[Weight, ...]:
        config = self.config
        block = [each for kind in _kinds(config.num_layers, sum(expert_blocks(config))) for each in self._block(kind)]
        return tuple(self._ends() + (_stacks(block) if config.scan_layers else block))

    def _block(self, kind: _Kind) -> list[Weight]:
        config, block = self.config, []
        after = ("post_attention_norm", "post_mlp_norm") if config.post_norms else ()
        for name in ("attention_norm", "mlp_norm", *after):
            block += self._norm(f"blocks/{name}", kind)
        block += self._attention(kind)
        experts = config.experts
        if experts is None or kind.place == "dense block":
            return [*block, *self._dense("blocks/mlp", config.mlp_size, inward_products(config) == 2, kind)]
        block += self._experts(experts, kind)
        if experts.shared_size:
            block += self._dense("blocks/mlp/shared", experts.shared_size, gated(config, experts), kind)
        return block

    def _attention(self, kind: _Kind) -> Iterator[Weight]:
        shape = self.config.attention_shape
        few = self.tensor > 1 and shape.kv_heads % self.tensor > 0
        for name, fan_in, fan_out, split in shape.matrices:
            how = ("replicated" if few else "column") if split == "keys" else split
            yield from self._linear(f"blocks/attention/{name}", fan_in, fan_out, how, kind)
        yield from self._inside_attention(kind)

    def _dense(self, name: str, inner: int, gates: bool, kind: _Kind) -> Iterator[Weight]:
        for part in ("gate", "up") if gates else ("up",):
            yield from self._linear(f"{name}/{part}", self.config.hidden_size, inner, "column", kind)
        yield from self._linear(f"{name}/down", inner, self.config.hidden_size, "row", kind)

    def _experts(self, experts: ExpertsLike, kind: _Kind) -> Iterator[Weight]:
        """Yield the weights of all experts, each in one array, and of the router, which is replicated."""
        config, number = self.config, experts.num_experts
        size, inner = config.hidden_size, experts.inner_size or config.mlp_size
        router = {"summed": self.outside, **kind.shared}
        yield self._one("blocks/mlp/router/kernel", (size, number), **router)
        if experts.router_bias:
            yield self._one("blocks/mlp/router/bias", (number,), again=False, **router)
        inward = ("gate", "up") if gated(config, experts) else ("up",)
        shapes = {**dict.fromkeys(inward, (size, inner)), "down": (inner, size)}
        cut = {**dict.fromkeys(inward, 2), "down": 1}
        for name, shape in shapes.items():
            own = {"splits": self._over_experts(cut[name]), "stack_dims": 1, **kind.shared}
            yield self._one(f"blocks/mlp/{name}", (number, *shape), **own)
        for name in shapes if config.use_bias else ():
            # Later rounds are computed again in the backward, with the biases; with capacity there are none, and then a scan
            # redoes what is added to inner products, which the loop over experts of one rank keeps.
            dropless, last = experts.capacity_factor is None, name == "down"
            more = {"again": self.travels and dropless, "redone": not (last or dropless), **kind.shared}
            more |= {"splits": self._over_experts(0 if last else 1), "stack_dims": 1}
            more |= {"summed": ("tensor",) if last and self.tensor > 1 else ()}
            yield self._one(f"blocks/mlp/{name}_bias", (number, shapes[name][1]), **more)

    def _over_experts(self, inner: int) -> tuple:
        """The split of experts over ranks, and of one dim inside each over `tensor` (0: of none)."""
        over = ((("tensor",), inner),) if inner and self.tensor > 1 else ()
        return ((("expert",), 0), *over)

    def _ends(self) -> list[Weight]:
        config, tied = self.config, self.config.tie_embeddings
        shape, place = (config.vocab_size, config.hidden_size), "both ends" if tied else "first"
        found = [
            self._one(
                "embed/embedding", shape, place, splits=self._table(), again=tied, rebuilds=tied or self.looks_up_again
            )
        ]
        if config.position == "learned":
            positions = (config.max_length, config.hidden_size)
            found.append(
                self._one("positions/embedding", positions, "first", again=False, rebuilds=self.looks_up_again)
            )
        found += self._norm("norm", _Kind("last", 1, ""))
        if not tied:
            # On a grid the head is transposed, so that its logits are split over col as those of a tied table are.
            splits = self._splits("row")[0] if self.grid else self._splits("column")[0]
            found.append(self._one("head/kernel", shape[::-1], "last", splits=splits))
        return found

    def _table(self) -> tuple:
        if self.grid:
            return ((("col", "depth"), 0), (("row",), 1))
        return ((("tensor",), 0),) if self.tensor > 1 else ()

    def _one(self, name: str, shape: tuple[int, ...], place: Place, **more: Any) -> Weight:
        return Weight(name=name, shape=shape, place=place, dtype=self.config.param_dtype, **more)

    def _norm(self, name: str, kind: _Kind) -> list[Weight]:
        config, shape = self.config, (self.config.hidden_size,)
        shared = {"summed": self.outside, **kind.shared}
        # Where its gradient is summed over tensor, a copy of the scale is kept for the backward.
        found = [self._one(f"{name}/scale", shape, again=not self.outside, **shared)]
        if config.norm == "layernorm" and config.use_bias:
            found.append(self._one(f"{name}/bias", shape, again=False, **shared))
        return found

    def _inside_attention(self, kind: _Kind) -> list[Weight]:
        """The norms of heads, whose gradients are summed over the ranks that split heads, and the sinks, which these split."""
        config, found, axis = self.config, [], "row" if self.grid else "tensor"
        summed = (axis,) if self.grid or self.tensor > 1 else ()
        for name, size, of_heads in config.attention_shape.scales:
            own_axes = summed if of_heads else self.outside
            own = {"again": not own_axes, "summed": own_axes, **kind.shared}
            found.append(self._one(f"blocks/attention/{name}/scale", (size,), **own))
        if config.sinks:
            own = {"again": False, "splits": (((axis,), 0),) if summed else (), **kind.shared}
            found.append(self._one("blocks/attention/sinks", (config.num_heads,), **own))
        return found

    def _linear(self, name: str, fan_in: int, fan_out: int, split: str, kind: _Kind) -> list[Weight]:
        (kernel, bias), shared = self._splits(split), kind.shared
        replicated = ("tensor",) if split == "replicated" else self.outside if split == "whole" else ()
        # Where ranks read parts of one, whose gradients they sum, the backward keeps a copy, as of a norm's scale.
        again = split != "replicated" or self.tensor == 1
        found = [
            self._one(f"{name}/kernel", (fan_in, fan_out), splits=kernel, summed=replicated, again=again, **shared)
        ]
        opens = any(name.endswith(each) for each in ("attention/query", "attention/key", "attention/value"))
        if self.config.use_bias or (self.config.qkv_bias and opens):
            summed = replicated or (self.outside if split == "row" else ())
            ends = name.endswith("down") and not self.config.post_norms
            more = {"again": False, "rebuilds": not ends}  # recomputation leaves out what a unit adds last
            # A grid gathers what comes out of a pair of layers, its bias added: that is kept.
            more["redone"] = not (self.grid and name.endswith("out"))
            found.append(self._one(f"{name}/bias", (fan_out,), splits=bias, summed=summed, **more, **shared))
        return found

    def _splits(self, split: str) -> tuple[tuple, tuple]:
        """The splits of a layer's kernel and bias."""
        if self.grid:
            into, out = ("row", "col") if split == "row" else ("col", "row")
            return (((into, "depth"), 0), ((out,), 1)), (((out,), 0),)
        if self.tensor == 1 or split in ("replicated", "whole"):
            return (), ()
        return (((("tensor",), 1),), ((("tensor",), 0),)) if split == "column" else (((("tensor",), 0),), ())
