"""The layers every part of the transformer is built from, made as its configuration says."""

from typing import Any

from flax import nnx

from axonml_jax.models.config import TransformerConfig
from axonml_jax.parallel.experts.parallel_moe import ParallelMoE
from axonml_jax.parallel.tensor.axonn.embedding3d import ParallelEmbedding
from axonml_jax.parallel.tensor.axonn.linear3d import ROW_COL_DEPTH, ParallelLinear
from axonml_jax.parallel.tensor.dropout import ParallelDropout
from axonml_jax.parallel.tensor.latent.latent_attention import LatentAttention
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.attention import TensorParallelAttention
from axonml_jax.parallel.tensor.megatron.column import ColumnParallelLinear
from axonml_jax.parallel.tensor.megatron.embedding import VocabParallelEmbedding
from axonml_jax.parallel.tensor.megatron.parallel_mlp import ParallelMLP
from axonml_jax.parallel.tensor.megatron.sequence import ParallelLayerNorm, ParallelRMSNorm
from axonml_jax.parallel.tensor.products.pair import PairAxes

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Llama."""

VOCABULARY_AXES = ("col", "tensor")
"""The mesh axes over which a transformer's logits are split, whichever of them is bound."""


def make_attention(config: TransformerConfig, block: int, *, rngs) -> TensorParallelAttention | LatentAttention:
    """Causal self-attention of a block."""
    if config.latent is not None:
        return _make_latent_attention(config, config.latent, rngs=rngs)
    inner: dict[str, Any] = _inner(config) | {"use_bias": config.use_bias or config.qkv_bias}
    theta, scaling = config.rope_of(block)
    return TensorParallelAttention(
        config.hidden_size,
        config.num_heads,
        config.kv_heads,
        head_size=config.head_size,
        rope_theta=theta if config.position == "rotary" else None,
        rope_scaling=scaling,
        qk_norm=config.norm_eps if config.qk_norm else None,
        qk_centered=config.qk_norm and config.zero_centered_norm,
        window=config.window_of(block),
        sinks=config.sinks,
        scale=None if config.query_scalar is None else config.query_scalar**-0.5,
        softcap=config.attention_softcap,
        out_bias=config.use_bias,
        dropout=config.dropout,
        kernel=config.attention,
        **inner,
        rngs=rngs,
    )


def _make_latent_attention(config: TransformerConfig, latent: LatentConfig, *, rngs) -> LatentAttention:
    inner = _inner(config)
    return LatentAttention(
        config.hidden_size,
        config.num_heads,
        latent=latent,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        dropout=config.dropout,
        kernel=config.attention,
        **{name: inner[name] for name in ("out_init", "sequence_parallel", "overlap")},
        **_linear(config),
        rngs=rngs,
    )


def make_mlp(config: TransformerConfig, block: int, *, rngs) -> ParallelMLP | ParallelMoE:
    """The feed-forward part of a block: dense, or a mixture of experts."""
    if config.has_experts(block):
        return _make_experts(config, rngs=rngs)
    activation: Any = config.activation
    return ParallelMLP(config.hidden_size, config.mlp_size, activation=activation, **_inner(config), rngs=rngs)


def _make_experts(config: TransformerConfig, *, rngs) -> ParallelMoE:
    experts, inner = config.experts, _inner(config)
    assert experts is not None
    activation: Any = experts.activation or config.activation
    return ParallelMoE(
        config.hidden_size,
        experts.inner_size or config.mlp_size,
        experts.num_experts,
        router=experts.make_router(),
        activation=activation,
        use_bias=config.use_bias,
        router_bias=experts.router_bias,
        shared_size=experts.shared_size,
        capacity_factor=experts.capacity_factor,
        dispatch=experts.dispatch,
        sequence_parallel=config.sequence_parallel,
        out_init=inner["out_init"],
        rngs=rngs,
        **_linear(config),
    )


def make_vocabulary(config: TransformerConfig, *, rngs) -> VocabParallelEmbedding | ParallelEmbedding:
    """The table of token embeddings, whose rows are split."""
    options: dict[str, Any] = {"embedding_init": nnx.initializers.normal(INIT_STD), "overlap": config.overlap}
    options |= _dtypes(config)
    if config.split == "grid":
        return _as_read(ParallelEmbedding(config.vocab_size, config.hidden_size, rngs=rngs, **options), config)
    sequence = {"sequence_parallel": config.sequence_parallel, "pads": True}
    table = VocabParallelEmbedding(config.vocab_size, config.hidden_size, rngs=rngs, **sequence, **options)
    return _as_read(table, config)


def make_positions(config: TransformerConfig, *, rngs) -> nnx.Embed:
    """The table of positions, whole on every rank."""
    init = nnx.initializers.normal(INIT_STD)
    table = nnx.Embed(config.max_length, config.hidden_size, embedding_init=init, rngs=rngs, **_dtypes(config))
    return _as_read(table, config)


def make_head(config: TransformerConfig, *, rngs) -> ColumnParallelLinear | ParallelLinear:
    """The output layer, whose logits are split over the vocabulary."""
    sizes, options = (
        (config.hidden_size, config.vocab_size),
        {"use_bias": False, "overlap": config.overlap, **_linear(config)},
    )
    if config.split == "grid":  # transposed: its output is split over col, as the tied table's is
        return ParallelLinear(*sizes, transpose=True, gather_output=False, rngs=rngs, **options)
    return ColumnParallelLinear(*sizes, sequence_parallel=config.sequence_parallel, pads=True, rngs=rngs, **options)


def make_norm(config: TransformerConfig, *, rngs) -> ParallelRMSNorm | ParallelLayerNorm:
    """The norm over `hidden_size`; its statistics are computed in at least float32."""
    kind = {"epsilon": config.norm_eps, "sequence_parallel": config.sequence_parallel, **_dtypes(config), "rngs": rngs}
    if config.norm == "rmsnorm":
        return ParallelRMSNorm(config.hidden_size, centered=config.zero_centered_norm, **kind)
    return ParallelLayerNorm(config.hidden_size, use_bias=config.use_bias, **kind)


def make_dropout(config: TransformerConfig, *, rngs) -> ParallelDropout:
    """Dropout of [b, s, h] at the configured rate; without dropout it keeps no random state."""
    axis = "tensor" if config.sequence_parallel else ()
    return ParallelDropout(config.dropout, dim=-2, axis=axis, positions=True, rngs=rngs if config.dropout else None)


def _inner(config: TransformerConfig) -> dict[str, Any]:
    """Of both halves of a block. What writes into the residual stream starts smaller by sqrt(2 * num_layers) (GPT-2)."""
    axis: PairAxes = "tensor" if config.split == "tensor" else ROW_COL_DEPTH
    return {
        "use_bias": config.use_bias,
        "out_init": nnx.initializers.normal(INIT_STD / (2 * config.num_layers) ** 0.5),
        "sequence_parallel": config.sequence_parallel,
        "ring": config.ring,
        "overlap": config.overlap,
        "axis": axis,
        **_linear(config),
    }


def _linear(config: TransformerConfig) -> dict[str, Any]:
    return {"kernel_init": nnx.initializers.normal(INIT_STD), **_dtypes(config)}


def _dtypes(config: TransformerConfig) -> dict[str, Any]:
    return {"dtype": config.dtype, "param_dtype": config.param_dtype}


def _as_read(table: Any, config: TransformerConfig) -> Any:
    """A table that computes in the dtype in which it is read; nnx.Embed keeps that of its parameters.

    With parameters in float32 read in bfloat16 all activations would be float32 otherwise, and every product after them.
    """
    table.dtype = config.dtype
    return table
