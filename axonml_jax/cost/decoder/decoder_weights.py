"""The weights of a decoder-only transformer from its configuration: whole, tensor-parallel, on a 3-D grid, or of experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axonml_jax.cost.decoder.configuration import (
    DecoderLike,
    ExpertsLike,
    expert_blocks,
    gated,
    inward_products,
    layer_degrees,
)
from axonml_jax.cost.weight import Place, Weight


def decoder_weights(config: DecoderLike, degrees: Mapping[str, int] | None = None) -> tuple[Weight, ...]:
    """Every parameter of `models.Transformer(config)`, alike in all blocks of a kind: dense ones, and those with experts.

    Args:
      config: its sizes, and how its layers split.
      degrees: of the mesh.
    """
    return _Decoder(config, layer_degrees(config, degrees or {})).weights()


def _kinds(num_layers: int, with_experts: int) -> "Iterator[_Kind]":
    """The kinds of blocks; one of which there is one alone is no unit."""
    if with_experts in (0, num_layers):
        yield _Kind("block", num_layers, "blocks")
        return
    counts: dict[Place, int] = {"dense block": num_layers - with_experts, "expert block": with_experts}
    for place, count in counts.items():
        yield _Kind(place, count, f"{place}s" if count > 1 else "")


def _stacks(block: Sequence[Weight]) -> list[Weight]:
    """A block's weights as `models.Stack` holds them."""
    return [replace(each.stacked(), name=each.name.replace("blocks/", "blocks/layer/")) for each in block]


@dataclass(frozen=True)
class _Kind:
    """Blocks of one kind: dense ones, or those with experts."""

    place: Place
    count: int
    unit: str

    @property
    def shared(self) -> dict[str, Any]:
        """What their weights have in common."""
        return {"place": self.place, "count": self.count, "unit": self.unit}


class _Decoder:
    """A configuration on a mesh."""

    def __init__(self, config: DecoderLike, own: dict[str, int]):
        self.config, self.tensor, self.grid = config, own.get("tensor", 1), config.split == "grid"
        self.outside = ("tensor",) if config.sequence_parallel and self.tensor > 1 else ()
        # What a unit adds last, and what is looked up before the first one, recomputation may leave out.
        self.rebuilds_ends = not (self.outside or config.scan_layers)
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
        """Of all experts in one array each, and of the router, whole on every rank."""
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
        """Experts over ranks, and inside each the dim that `tensor` splits, 0 for none."""
        over = ((("tensor",), inner),) if inner and self.tensor > 1 else ()
        return ((("expert",), 0), *over)

    def _ends(self) -> list[Weight]:
        config, tied = self.config, self.config.tie_embeddings
        shape, place = (config.vocab_size, config.hidden_size), "both ends" if tied else "first"
        found = [
            self._one(
                "embed/embedding", shape, place, splits=self._table(), again=tied, rebuilds=tied or self.rebuilds_ends
            )
        ]
        if config.position == "learned":
            positions = (config.max_length, config.hidden_size)
            found.append(self._one("positions/embedding", positions, "first", again=False, rebuilds=self.rebuilds_ends))
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
        """Norms of each head, whose gradients are summed over the ranks that split heads, and sinks, which these split."""
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
            more = {"again": False, "rebuilds": self.rebuilds_ends or not ends}
            # A grid gathers what comes out of a pair of layers, its bias added: that is kept.
            more["redone"] = not (self.grid and name.endswith("out"))
            found.append(self._one(f"{name}/bias", (fan_out,), splits=bias, summed=summed, **more, **shared))
        return found

    def _splits(self, split: str) -> tuple[tuple, tuple]:
        """How a layer splits its kernel and its bias."""
        if self.grid:
            into, out = ("row", "col") if split == "row" else ("col", "row")
            return (((into, "depth"), 0), ((out,), 1)), (((out,), 0),)
        if self.tensor == 1 or split in ("replicated", "whole"):
            return (), ()
        return (((("tensor",), 1),), ((("tensor",), 0),)) if split == "column" else (((("tensor",), 0),), ())
