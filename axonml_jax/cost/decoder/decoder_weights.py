"""The weights of a decoder-only transformer from its configuration, whole, tensor-parallel or on a 3-D grid."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from axonml_jax.cost.decoder.configuration import DecoderLike, layer_degrees, refuse_experts
from axonml_jax.cost.weight import Place, Weight


def decoder_weights(config: DecoderLike, degrees: Mapping[str, int] | None = None) -> tuple[Weight, ...]:
    """Every parameter of `models.Transformer(config)`, block by block the same.

    Args:
      config: its sizes, and how its layers split.
      degrees: of the mesh.
    """
    refuse_experts(config)
    return _Decoder(config, layer_degrees(config, degrees or {})).weights()


def _stacks(block: Sequence[Weight]) -> list[Weight]:
    """A block's weights as `models.Stack` holds them."""
    return [replace(each.stacked(), name=each.name.replace("blocks/", "blocks/layer/")) for each in block]


class _Decoder:
    """A configuration on a mesh."""

    def __init__(self, config: DecoderLike, own: dict[str, int]):
        self.config, self.tensor, self.grid = config, own.get("tensor", 1), config.split == "grid"
        self.outside = ("tensor",) if config.sequence_parallel and self.tensor > 1 else ()
        # What a unit adds last, and what is looked up before the first one, recomputation may leave out.
        self.rebuilds_ends = not (self.outside or config.scan_layers)

    def weights(self) -> tuple[Weight, ...]:
        config, block = self.config, []
        kv = config.kv_heads * config.head_size
        size, inner = config.hidden_size, config.mlp_size
        for name in ("attention_norm", "mlp_norm"):
            block += self._norm(f"blocks/{name}")
        whole_kv = self.tensor > 1 and config.kv_heads % self.tensor > 0
        block += self._linear("blocks/attention/query", size, size, "column")
        for name in ("key", "value"):
            block += self._linear(f"blocks/attention/{name}", size, kv, "replicated" if whole_kv else "column")
        block += self._linear("blocks/attention/out", size, size, "row")
        for name in ("gate", "up") if config.activation == "swiglu" else ("up",):
            block += self._linear(f"blocks/mlp/{name}", size, inner, "column")
        block += self._linear("blocks/mlp/down", inner, size, "row")
        return tuple(self._ends() + (_stacks(block) if config.scan_layers else block))

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
        found += self._norm("norm", place="last", count=1)
        if not tied:
            # On a grid the head is transposed, so that its logits are split over col as those of a tied table are.
            splits = self._splits("row")[0] if self.grid else self._splits("column")[0]
            found.append(self._one("head/kernel", shape[::-1], "last", splits=splits))
        return found

    def _table(self) -> tuple:
        if self.grid:
            return ((("col", "depth"), 0), (("row",), 1))
        return ((("tensor",), 0),) if self.tensor > 1 else ()

    def _one(
        self, name, shape, place, splits=(), again=True, rebuilds=True, redone=True, summed=(), count=1, unit=""
    ) -> Weight:
        return Weight(
            name=name, shape=shape, count=count, dtype=self.config.param_dtype, unit=unit, splits=splits, again=again,
            rebuilds=rebuilds, redone=redone, place=place, summed=summed,
        )  # fmt: skip

    def _norm(self, name: str, place: Place = "block", count: int | None = None) -> list[Weight]:
        config, shape = self.config, (self.config.hidden_size,)
        count, unit = (config.num_layers, "blocks") if count is None else (count, "")
        shared = {"place": place, "count": count, "unit": unit, "summed": self.outside}
        # Where its gradient is summed over tensor, a copy of the scale is kept for the backward.
        found = [self._one(f"{name}/scale", shape, again=not self.outside, **shared)]
        if config.norm == "layernorm" and config.use_bias:
            found.append(self._one(f"{name}/bias", shape, again=False, **shared))
        return found

    def _linear(self, name: str, fan_in: int, fan_out: int, split: str) -> list[Weight]:
        kernel, bias = self._splits(split)
        shared = {"place": "block", "count": self.config.num_layers, "unit": "blocks"}
        replicated = ("tensor",) if split == "replicated" else ()
        found = [self._one(f"{name}/kernel", (fan_in, fan_out), splits=kernel, summed=replicated, **shared)]
        if self.config.use_bias:
            summed = replicated or (self.outside if split == "row" else ())
            more = {"again": False, "rebuilds": self.rebuilds_ends or not name.endswith("down")}
            # A grid gathers what comes out of a pair of layers, its bias added: that is kept.
            more["redone"] = not (self.grid and name.endswith("out"))
            found.append(self._one(f"{name}/bias", (fan_out,), splits=bias, summed=summed, **more, **shared))
        return found

    def _splits(self, split: str) -> tuple[tuple, tuple]:
        """How a layer splits its kernel and its bias."""
        if self.grid:
            into, out = ("row", "col") if split == "row" else ("col", "row")
            return (((into, "depth"), 0), ((out,), 1)), (((out,), 0),)
        if self.tensor == 1 or split == "replicated":
            return (), ()
        return (((("tensor",), 1),), ((("tensor",), 0),)) if split == "column" else (((("tensor",), 0),), ())
