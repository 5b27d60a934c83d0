"""What is asked of a decoder's configuration, and whether its layers divide over a mesh."""

from collections.abc import Mapping
from typing import Protocol

from axonml_jax.cost.amounts import Many
from axonml_jax.cost.decoder.attention_shape import AttentionShape
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig


class ExpertsLike(Protocol):
    """What is asked of the experts of a configuration; `models.experts_config.ExpertsConfig` is such a value."""

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
    """What is asked of a configuration; `models.config.TransformerConfig` is one."""

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
        """How many positions one sees in a block, itself among them; None: all before it."""
        ...

    @property
    def mlp_size(self) -> int:
        """Inner width of the feed-forward part."""
        ...

    @property
    def words_at_once(self) -> int:
        """Words whose logits the loss holds at once; 0: all."""
        ...

    @property
    def num_params(self) -> int:
        """Parameters."""
        ...

    def flops_per_token(self, length: int) -> int:
        """FLOPs of one training token."""
        ...

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward part of a block is a mixture of experts."""
        ...


def inward_products(config: DecoderLike) -> int:
    """How many products lead to the inner features of a dense feed-forward part: two where it is gated."""
    return 1 if config.activation == "gelu" else 2


def gated(config: DecoderLike, experts: ExpertsLike) -> bool:
    """Whether experts multiply two inner products."""
    return (experts.activation or config.activation) != "gelu"


def expert_blocks(config: DecoderLike) -> list[bool]:
    """Of every block whether it has experts."""
    return [config.has_experts(block) for block in range(config.num_layers)]


def is_decoder(model: object) -> bool:
    """Whether a model is such a configuration."""
    return all(
        hasattr(model, name) for name in ("num_layers", "hidden_size", "attention_shape", "mlp_size", "vocab_size")
    )


def layer_degrees(config: DecoderLike, degrees: Mapping[str, Many]) -> dict[str, Many]:
    """The degrees over which the model's own layers split: of `tensor`, or of row, col and depth."""
    axes = ("tensor",) if config.split == "tensor" else ("row", "col", "depth")
    axes += ("expert",) if config.experts is not None else ()
    return {axis: degrees.get(axis, 1) for axis in axes}


def problems(config: DecoderLike, degrees: Mapping[str, int], length: int) -> list[str]:
    """Why the layers of a model cannot be split over a mesh; empty when they can."""
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
