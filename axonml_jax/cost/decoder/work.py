"""What a decoder multiplies: its stages' work, and what recomputation adds to a token's FLOPs."""

from collections.abc import Sequence

from axonml_jax.cost.amounts import Many
from axonml_jax.cost.decoder.configuration import DecoderLike
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.rounds import Run
from axonml_jax.parallel.pipeline.estimates.costs import StageCosts


def stage_costs(config: DecoderLike, blocks: Sequence[int], run: Run, length: int) -> StageCosts:
    """What the stages' work costs, in multiplications per token: of their blocks, and of the head on the last one.

    The embedding is looked up and costs nothing; a tied one multiplies as the head, though it lives on the first stage.

    Args:
      config: the model.
      blocks: by stage.
      run: says what the backward recomputes.
      length: of a sequence.
    """
    attention = 2.0 * config.num_heads * config.head_size * length
    forward = [count * (block_products(config) + attention) for count in blocks]
    again = [run.full * own + run.selective * count * attention for own, count in zip(forward, blocks, strict=True)]
    forward[-1] += head_products(config)
    again[-1] += run.full * head_products(config)
    back = tuple(own + more for own, more in zip(forward, again, strict=True))
    return StageCosts(tuple(forward), back, tuple(forward))


def blockwise_flops(config: DecoderLike, run: Run, length: int, attention: SplitAttention | None) -> Many:
    """Of a token, forward and backward and recomputed: those of attention that reads positions of other ranks.

    Args:
      config: the model.
      run: says what the backward recomputes.
      length: of a sequence.
      attention: says how ranks share its positions; None: they have whole sequences.
    """
    if attention is None:
        return 0.0
    return 2 * config.num_layers * config.num_heads * 2 * config.head_size * length * (3 + run.recomputes)


def block_products(config: DecoderLike) -> float:
    """Multiplications of a block's matrices per token."""
    size, kv = config.hidden_size, config.kv_heads * config.head_size
    inward = 2 if config.activation == "swiglu" else 1
    return 2.0 * size * (size + kv) + (inward + 1.0) * size * config.mlp_size


def head_products(config: DecoderLike) -> float:
    """The same of the head."""
    return float(config.hidden_size * config.vocab_size)


def recomputed_flops(config: DecoderLike, run: Run, length: int) -> Many:
    """Of a token: a third of forward and backward again; only attention's own products where weight products are kept.

    A loss that holds some words' logits at a time computes them once more.
    """
    logits = 2 * config.hidden_size * config.vocab_size if config.words_at_once else 0
    attention = 6 * config.num_layers * config.num_heads * 2 * config.head_size * length
    return run.full * (config.flops_per_token(length) // 3) + run.selective * (attention // 3) + logits
