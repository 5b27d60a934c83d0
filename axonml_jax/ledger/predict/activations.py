"""Activation bytes of a decoder: what a block keeps for its backward, and what loss and head need at their fullest."""

from dataclasses import dataclass

import jax.numpy as jnp

from axonml_jax.ledger.predict.decoder import DecoderLike, layer_degrees


@dataclass(frozen=True)
class BlockActivations:
    """Bytes on one rank for one microbatch.

    Attributes:
      kept: what one block keeps until its backward.
      rebuilt: what one block holds while it is recomputed (0 where nothing is).
      boundary: the activation between two blocks.
      head: logits, their gradient and what the loss makes of them, at their fullest.
    """

    kept: int
    rebuilt: int
    boundary: int
    head: int


def block_activations(
    config: DecoderLike, degrees: dict[str, int], tokens: int, length: int, itemsize: int, remat: str | None
) -> BlockActivations:
    """What XLA keeps of the reference transformer, written as the tensors it is made of.

    Per token, with h features, f inner ones, a heads of d, k key and value heads, s positions: the attention's weights in
    float32 and as read, a*s each; query, key, value and the mixed heads; the inner features before and after their
    activation; the residual stream and the norms' inputs. Splitting over `tensor` divides what is inside a layer;
    sequence parallelism the rest too.

    Args:
      config: the model.
      degrees: of the mesh.
      tokens: of one microbatch on one rank, whole sequences.
      length: of a sequence.
      itemsize: of the compute dtype.
      remat: what the backward recomputes.
    """
    inside, outside = _cuts(config, degrees)
    size, inner, wide = config.hidden_size, config.mlp_size, 4
    kv, gated = 2 * config.kv_heads * config.head_size, config.activation == "swiglu"
    boundary = tokens * size * itemsize // outside
    within = config.num_heads * length * (wide + itemsize)  # attention weights as the softmax leaves and as it is read
    within += (2 * size + kv) * itemsize + inner * (5 if gated else 3) * itemsize
    between = 3 * size * itemsize + 4 * size * wide  # beside the block's input; what the norms make is in float32
    products = (size + kv + inner * (2 if gated else 1)) * itemsize
    whole = boundary + tokens * within // inside + tokens * between // outside
    # Of what is between the layers: both closing products, and with biases the first of them before its bias.
    closing = size * itemsize * (3 if config.use_bias else 2)
    selective = boundary + tokens * products // inside + tokens * closing // outside
    kept = {None: whole, "full": boundary, "selective": selective}[remat]
    words = config.vocab_size // _vocabulary_cut(config, degrees)
    kept = {None: whole, "full": boundary, "selective": boundary + products}[remat]
    return BlockActivations(kept, whole if remat else 0, boundary, tokens * words * (2 * wide + itemsize))


def _cuts(config: DecoderLike, degrees: dict[str, int]) -> tuple[int, int]:
    """Into how many parts what is inside a layer is split, and what is between them."""
    own = layer_degrees(config, degrees)
    if config.split == "grid":
        return own["row"], 1
    return own["tensor"], own["tensor"] if config.sequence_parallel else 1


def _vocabulary_cut(config: DecoderLike, degrees: dict[str, int]) -> int:
    own = layer_degrees(config, degrees)
    return own["col"] if config.split == "grid" else own["tensor"]


def compute_itemsize(config: DecoderLike, compute: str | None) -> int:
    """Bytes of an activation's element."""
    return jnp.dtype(compute or config.dtype or config.param_dtype).itemsize
