"""The layers every part of the transformer is built from, made as its configuration says."""

from flax import nnx

from axonml_jax.models.config import TransformerConfig

INIT_STD = 0.02
"""Standard deviation of initial weights, as in GPT-2 and Llama."""


def make_linear(config: TransformerConfig, in_size: int, out_size: int, *, residual=False, use_bias=None, rngs):
    """A linear layer. One that writes into the residual stream starts smaller by sqrt(2 * num_layers) (GPT-2)."""
    return nnx.Linear(
        in_size,
        out_size,
        use_bias=config.use_bias if use_bias is None else use_bias,
        kernel_init=nnx.initializers.normal(INIT_STD / (2 * config.num_layers) ** 0.5 if residual else INIT_STD),
        dtype=config.dtype,  # pyright: ignore[reportArgumentType]
        param_dtype=config.param_dtype,  # pyright: ignore[reportArgumentType]
        rngs=rngs,
    )


def make_embedding(config: TransformerConfig, num_embeddings: int, *, rngs):
    """A table of `hidden_size` vectors."""
    return nnx.Embed(
        num_embeddings,
        config.hidden_size,
        embedding_init=nnx.initializers.normal(INIT_STD),
        dtype=config.dtype,  # pyright: ignore[reportArgumentType]
        param_dtype=config.param_dtype,  # pyright: ignore[reportArgumentType]
        rngs=rngs,
    )


def make_norm(config: TransformerConfig, *, rngs):
    """The norm over `hidden_size`; its statistics are computed in at least float32."""
    kind = {"epsilon": config.norm_eps, "dtype": config.dtype, "param_dtype": config.param_dtype, "rngs": rngs}
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(config.hidden_size, **kind)
    return nnx.LayerNorm(config.hidden_size, use_bias=config.use_bias, **kind)


def make_dropout(config: TransformerConfig, *, rngs):
    """Dropout at the configured rate; without dropout it keeps no random state."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
