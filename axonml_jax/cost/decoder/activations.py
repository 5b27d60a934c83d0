"""Activation bytes of a decoder: what a block keeps for its backward, and what loss and head need at their fullest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many, divided, least, most
from axonml_jax.cost.decoder.configuration import DecoderLike, expert_blocks, inward_products, layer_degrees
from axonml_jax.cost.decoder.routed_experts import RoutedExperts
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.rounds import Run
from axonml_jax.parallel.tensor.megatron.fused_attention import PLATFORMS, kernel_of, shape_obstacles, worth_blocks


@dataclass(frozen=True)
class BlockActivations:
    """Bytes on one rank for one microbatch.

    Attributes:
      kept: what one block keeps until its backward.
      rebuilt: what one block holds while it is recomputed (0 where nothing is).
      boundary: the activation between two blocks.
      head: logits, their gradient and what the loss makes of them, at their fullest.
      others: what attention holds of other ranks' positions while it computes, and of their gradients, or experts of a round.
    """

    kept: Many
    rebuilt: Many
    boundary: Many
    head: Many
    others: Many = 0


def block_activations(
    config: DecoderLike,
    degrees: Mapping[str, Many],
    tokens: Many,
    length: int,
    compute: str,
    run: Run,
    platform: str | None = None,
    attention: SplitAttention | None = None,
    experts: RoutedExperts | None = None,
    *,
    apart: bool,
    documents: bool = False,
) -> BlockActivations:
    """What XLA keeps of the reference transformer, written as the tensors it is made of.

    Per token, with h features, f inner ones, a heads of d, k key and value heads, s positions: the attention's weights in
    float32 and as read, a*s each (with a fused kernel one number per head instead); query, key, value and the mixed heads, and
    what norms of queries and keys keep; the inner features before and after their activation; the residual stream and the
    norms' inputs. Splitting over `tensor` divides what is inside a layer; sequence parallelism the rest too.

    Args:
      config: the model.
      degrees: of the mesh.
      tokens: of one microbatch on one rank, whole sequences.
      length: of a sequence.
      compute: name of the activations' dtype.
      run: says what the backward recomputes.
      platform: what is compiled for, "tpu", "cuda" or "cpu"; None: no kernel of attention is counted on.
      attention: where it reads positions of other ranks: block by block, or by a kernel where ranks split heads alone.
      experts: in the place of dense feed-forward parts.
      apart: whether the backward is in another loop than the forward, which then keeps products alone, all of them.
      documents: whether rows hold several documents.
    """
    inside, outside = _cuts(config, degrees)
    size, wide, itemsize = config.hidden_size, 4, jnp.dtype(compute).itemsize
    shape = config.attention_shape
    boundary = divided(tokens * size * itemsize, outside)
    latents = sum(scale.size for scale in shape.scales if not scale.of_heads)
    fused = attention is not None or fuses_attention(config, length, compute, platform, documents)
    # Attention weights as the softmax leaves and as it is read; of capped scores the tangent too.
    of_scores = (wide if config.attention_softcap is None else 2 * wide) + itemsize
    within = (
        config.num_heads * (wide if fused else length * of_scores)
        + (shape.queries + shape.keys_and_values + shape.mixed) * itemsize
    )
    within = within + (_head_norms(config, wide, itemsize) if config.qk_norm else 0)
    # Beside the block's input; what the norms make is in float32, and twice where rsqrt and scale are one factor.
    normed = size * wide * (1 if config.zero_centered_norm else 2)
    between = 3 * size * itemsize + 2 * normed + (2 * (size * itemsize + normed) if config.post_norms else 0)
    products, feed = shape.opened * itemsize, _feed(config, tokens, inside, itemsize, experts)
    whole = boundary + divided(tokens * within, inside) + divided(tokens * between, outside) + feed.whole
    whole += divided(tokens * (shape.pressed * itemsize + latents * (2 * wide + itemsize)), outside)
    # Of what is between the layers: both closing products, and with biases the first of them before its bias.
    closing = size * itemsize * (3 if config.use_bias else 2)
    selective = boundary + divided(tokens * products, inside) + divided(tokens * closing, outside) + feed.products
    selective += divided(tokens * shape.pressed * itemsize, outside)
    scores = config.num_heads * (wide if fused else length * wide) + shape.mixed * itemsize  # and the mixed heads
    plain = selective + feed.routed + divided(tokens * scores, inside) if apart else whole
    kept = (1 - run.recomputes) * plain + run.full * boundary + run.selective * selective
    words = divided(config.vocab_size, _vocabulary_cut(config, degrees))
    words = least(config.words_at_once or words, words)
    rebuilt = whole if apart else run.recomputes * whole
    kernel = kernel_computes(config, length, compute, platform, documents, attention)
    others = 0 if attention is None else attention.held(tokens, itemsize, platform, kernel)
    others = most(others, 0 if experts is None else experts.held(itemsize))
    return BlockActivations(kept, rebuilt, boundary, tokens * words * (2 * wide + itemsize), others)


def _head_norms(config: DecoderLike, wide: int, itemsize: int) -> int:
    """Of a token's norms of queries and keys, in float32: as they enter and leave, the factor, and two numbers of each head.

    Where rsqrt and scale are one factor it is as large as they are; with biases what enters is kept before them too.
    """
    shape, wides = config.attention_shape, 3 if config.zero_centered_norm else 4
    return (shape.heads + shape.kv_heads) * (
        shape.query_size * (wides * wide + (itemsize if config.use_bias else 0)) + 2 * wide
    )


class _Feed(NamedTuple):
    """Bytes of a block's feed-forward part; of several kinds the mean.

    Attributes:
      whole: what its backward reads.
      products: its dense products alone.
      routed: what is kept of experts where elementwise work is redone.
    """

    whole: Many
    products: Many
    routed: Many = 0


def _feed(
    config: DecoderLike, tokens: Many, inside: Many, itemsize: int, experts: RoutedExperts | None
) -> _Feed:  # fmt: skip
    gated = inward_products(config) == 2
    dense = lambda inner, each: divided(tokens * inner * each * itemsize, inside)
    own = _Feed(dense(config.mlp_size, 5 if gated else 3), dense(config.mlp_size, 2 if gated else 1))
    if experts is None or config.experts is None:
        return own
    shared = config.experts.shared_size
    routed = _Feed(
        experts.kept(itemsize) + dense(shared, 5 if experts.gates else 3),
        dense(shared, 2 if experts.gates else 1),
        experts.kept(itemsize, redone=True),
    )
    blocks, total = sum(expert_blocks(config)), config.num_layers
    return _Feed(*(divided(a * blocks + b * (total - blocks), total) for a, b in zip(routed, own, strict=True)))


def fuses_attention(
    config: DecoderLike, length: int, compute: str, platform: str | None, documents: bool = False
) -> bool:  # fmt: skip
    """Whether attention holds no scores of all positions, on a platform (None: no kernel is counted on)."""
    if kernel_computes(config, length, compute, platform, documents):
        return True
    if config.attention == "auto":
        return not config.dropout and worth_blocks(platform, length, length)
    return config.attention == "blocks"


def kernel_computes(
    config: DecoderLike,
    length: int,
    compute: str,
    platform: str | None,
    documents: bool = False,
    attention: SplitAttention | None = None,
) -> Many:
    """Whether a platform's kernel computes attention, of whole sequences or of positions split over ranks."""
    kernel = kernel_of(platform) if config.attention == "auto" else config.attention
    if kernel not in PLATFORMS or not _kernel_applies(
        config, kernel, length, compute, documents, attention is not None
    ):
        return False
    return attention is None or attention.computed_by(kernel)


def _kernel_applies(config: DecoderLike, kernel: str, length: int, compute: str, documents: bool, apart: bool) -> bool:
    refused = config.window is not None or config.attention_softcap is not None or documents
    if config.dropout or (config.sinks and not (apart and kernel == "splash")) or (kernel == "cudnn" and refused):
        return False
    shape = config.attention_shape
    return shape.query_size == shape.value_size and not any(
        shape_obstacles(kernel, compute, length, length, shape.query_size)
    )


def _cuts(config: DecoderLike, degrees: Mapping[str, Many]) -> tuple[Many, Many]:
    """Into how many parts what is inside a layer is split, and what is between them."""
    own = layer_degrees(config, degrees)
    if config.split == "grid":
        return own["row"], 1
    return own["tensor"], own["tensor"] if config.sequence_parallel else 1


def _vocabulary_cut(config: DecoderLike, degrees: Mapping[str, Many]) -> Many:
    own = layer_degrees(config, degrees)
    return own["col"] if config.split == "grid" else own["tensor"]


def compute_dtype(config: DecoderLike, compute: str | None) -> str:
    """Name of the activations' dtype, where a policy asks for `compute`."""
    return jnp.dtype(compute or config.dtype or config.param_dtype).name
