"""A decoder-only transformer covering the Llama family and GPT-2."""

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.models.attention import Attention
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.layers import make_dropout, make_embedding, make_linear, make_norm
from axonml_jax.models.mlp import FeedForward


class Block(nnx.Module):
    """One pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      config: what the block is made of.
      rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)
        self.dropout = make_dropout(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[b, s, h] -> [b, s, h] (b batch, s sequence, h hidden size)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nnx.Module):
    """A decoder-only language model: tokens in, logits of the next token out.

    Args:
      config: sizes and options; `models.presets` names published ones.
      rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = make_embedding(config, config.vocab_size, rngs=rngs)
        learned = config.position == "learned"
        self.positions = make_embedding(config, config.max_length, rngs=rngs) if learned else None
        self.dropout = make_dropout(config, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = make_norm(config, rngs=rngs)
        head = (config, config.hidden_size, config.vocab_size)
        self.head = None if config.tie_embeddings else make_linear(*head, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of the token after each position, which sees itself and everything before it.

        Args:
          tokens: integer [b, s] (b batch, s sequence, at most `max_length`).

        Returns:
          [b, s, v] (v vocabulary), in the compute dtype.

        Raises:
          ValueError: the sequence is longer than `max_length`.
        """
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length={self.config.max_length}: "
                "shorten it or build the model with a larger max_length"
            )
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(jnp.arange(length))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.head is None else self.head(x)
