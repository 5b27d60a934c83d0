"""What a decoder multiplies: its stages' work, and what recomputation adds to a token's FLOPs."""

from collections import Counter
from collections.abc import Sequence

from axonml_jax.cost.amounts import Many, least
from axonml_jax.cost.decoder.configuration import DecoderLike, expert_blocks, gated, inward_products
from axonml_jax.cost.rounds import Run
from axonml_jax.parallel.pipeline.estimates.costs import StageCosts


def stage_costs(
    config: DecoderLike, blocks: Sequence[int], experts: Sequence[int], run: Run, length: int
) -> StageCosts:
    """What the stages' work costs, in multiplications per token: of their blocks, and of the head on the last one.

    The embedding is looked up and costs nothing; a tied one multiplies as the head, though it lives on the first stage.

    Args:
      config: the model.
      blocks: by stage.
      experts: those of them that have experts.
      run: says what the backward recomputes.
      length: of a sequence.
    """
    attention = 1.0 * config.attention_shape.pair_products * length
    more = block_products(config, experts=True) - block_products(config) if config.experts is not None else 0.0
    forward = [
        count * (block_products(config) + attention) + own * more for count, own in zip(blocks, experts, strict=True)
    ]
    routed = expert_products(config) / max(1, sum(expert_blocks(config)))
    redone = [count * attention + own * routed for count, own in zip(blocks, experts, strict=True)]
    again = [run.full * own + run.selective * more for own, more in zip(forward, redone, strict=True)]
    forward[-1] += head_products(config)
    again[-1] += run.full * head_products(config)
    back = tuple(own + more for own, more in zip(forward, again, strict=True))
    return StageCosts(tuple(forward), back, tuple(forward))


def pair_flops(config: DecoderLike, length: int) -> int:
    """Of a token, forward and backward: those of attention's scores and of what they weigh, hidden ones too.

    Args:
      config: the model.
      length: of a sequence.
    """
    return 6 * config.num_layers * config.attention_shape.pair_products * length


def computed_pairs(config: DecoderLike, length: int, tile: Many) -> Many:
    """Share of all pairs of a sequence's positions that attention computes in tiles, where it leaves out what masks hide.

    Args:
      config: says how far each block sees.
      length: of a sequence.
      tile: positions of a tile; a tile with one pair that is seen is computed.
    """
    count, windows = length / least(tile, length), Counter(map(config.window_of, range(config.num_layers)))

    def seen(window: int | None) -> Many:
        """Tiles of all rows of tiles: so many each, its own and those before it, but for the first rows."""
        each = count if window is None else least(count, 1 - (1 - window) * count // length)
        return each * (count - (each - 1) / 2)

    return sum(blocks * seen(window) for window, blocks in windows.items()) / (config.num_layers * count**2)


def block_products(config: DecoderLike, *, experts: bool = False, resting: bool = False) -> float:
    """Multiplications of a block's matrices per token.

    Args:
      config: the model.
      experts: whether it has experts; else its feed-forward part is dense.
      resting: of all experts, as which a pipeline weighs a block where it cuts; else of a token's own.
    """
    size, attention = config.hidden_size, float(config.attention_shape.products)
    own = config.experts
    if not experts or own is None:
        return attention + (inward_products(config) + 1.0) * size * config.mlp_size
    inward = 2 if gated(config, own) else 1
    inner, number = own.inner_size or config.mlp_size, own.num_experts
    each = (inward + 1.0) * size * inner
    # A cut sees the experts' biases as matrices too.
    biases = float(number * (inward * inner + size)) if resting and config.use_bias else 0.0
    shared = (inward + 1.0) * size * own.shared_size
    return attention + size * number + shared + each * (number if resting else own.top_k) + biases


def head_products(config: DecoderLike) -> float:
    """The same of the head."""
    return float(config.hidden_size * config.vocab_size)


def recomputed_flops(config: DecoderLike, run: Run, length: int) -> Many:
    """Of a token: a third of forward and backward again; only those of attention and of experts where weight products are kept.

    A loss that holds some words' logits at a time computes them once more.
    """
    logits = 2 * config.hidden_size * config.vocab_size if config.words_at_once else 0
    parts = pair_flops(config, length) + expert_products(config) * 6
    return run.full * (config.flops_per_token(length) // 3) + run.selective * (parts // 3) + logits


def expert_products(config: DecoderLike) -> int:
    """Multiplications per token of the experts that it is sent to, in all blocks."""
    if (own := config.experts) is None:
        return 0
    inward, inner = 2 if gated(config, own) else 1, own.inner_size or config.mlp_size
    return sum(expert_blocks(config)) * own.top_k * (inward + 1) * config.hidden_size * inner


def expert_flops(config: DecoderLike, run: Run) -> Many:
    """FLOPs of them per token, forward and backward and recomputed."""
    return 2 * expert_products(config) * (3 + run.recomputes)
