"""A decoder-only transformer covering the Llama family and GPT-2, the same definition for one device and for every plan."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.collectives.primitives import axis_size
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.layers import (
    VOCABULARY_AXES,
    make_attention,
    make_dropout,
    make_head,
    make_mlp,
    make_norm,
    make_positions,
    make_vocabulary,
)
from axonml_jax.models.lm_loss import counted, cross_entropy
from axonml_jax.models.stack import Stack
from axonml_jax.parallel.context.context_split import context_positions, current_split
from axonml_jax.parallel.experts.parallel_moe import ParallelMoE
from axonml_jax.parallel.experts.router_values import RouterValues
from axonml_jax.parallel.tensor.axonn.embedding3d import ParallelEmbedding
from axonml_jax.parallel.tensor.axonn.linear3d import ParallelLinear
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.latent.latent_cache import LatentCache
from axonml_jax.parallel.tensor.megatron.attend import WHOLE, KVCache, Packed, places_after
from axonml_jax.parallel.tensor.megatron.chunked_cross_entropy import chunked_cross_entropy
from axonml_jax.parallel.tensor.megatron.cross_entropy import is_word, padded_words
from axonml_jax.parallel.tensor.megatron.sequence import split_sequence
from axonml_jax.parallel.tensor.megatron.softcap import capped
from axonml_jax.parallel.tensor.products.ordered import Prefetch

Cache = KVCache | LatentCache
"""What a block keeps of the positions that it has seen."""


class Block(nnx.Module):
    """One pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x)), where the mlp may be a mixture of experts.

    With `config.post_norms` what is added is normed too: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    Args:
      config: what the block is made of.
      index: which block it is, from 0.
      rngs: streams `params` and, with dropout, `dropout`.
    """

    def __init__(self, config: TransformerConfig, index: int = 0, *, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs=rngs)
        self.attention = make_attention(config, index, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs=rngs)
        self.mlp = make_mlp(config, index, rngs=rngs)
        self.post_attention_norm = make_norm(config, rngs=rngs) if config.post_norms else None
        self.post_mlp_norm = make_norm(config, rngs=rngs) if config.post_norms else None
        self.dropout = make_dropout(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, *, prefetch: Prefetch | None = None, packed: Packed = WHOLE
    ) -> tuple[jax.Array, RouterValues | None]:
        """[b, s, h] -> [b, s, h] (b batch, s sequence or its part, h hidden size), and what a router did."""
        mixed = self.attention(self.attention_norm(x), prefetch=prefetch, packed=packed)
        return self._joined(x, mixed, prefetch)

    def extend(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """The same for positions after those in a cache."""
        attention: Any = self.attention
        mixed, cache = attention.extend(self.attention_norm(x), cache)
        return self._joined(x, mixed)[0], cache

    def _joined(
        self, x: jax.Array, mixed: jax.Array, prefetch: Prefetch | None = None
    ) -> tuple[jax.Array, RouterValues | None]:
        x = x + self.dropout(mixed if self.post_attention_norm is None else self.post_attention_norm(mixed))
        router = None
        if isinstance(self.mlp, ParallelMoE):
            y, router = self.mlp(self.mlp_norm(x))
        else:
            y = self.mlp(self.mlp_norm(x), prefetch=prefetch)
        return x + self.dropout(y if self.post_mlp_norm is None else self.post_mlp_norm(y)), router


class Transformer(nnx.Module):
    """A decoder-only language model: tokens in, logits of the next token out.

    Its layers are tensor-parallel ones: where `tensor`, or `row`, `col` and `depth`, are bound they split, elsewhere they are
    plain. Under `ax.Context` it sees its rank's positions, in the plan's order. Parameters and first values are the same
    everywhere.

    Args:
      config: sizes and options; `models.presets` names published ones.
      rngs: streams `params` and, with dropout, `dropout`.
    """

    splits_positions = True

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config, self.split_sequence, self.deterministic = config, config.sequence_parallel, False
        self.embed = make_vocabulary(config, rngs=rngs)
        self.positions = make_positions(config, rngs=rngs) if config.position == "learned" else None
        self.dropout = make_dropout(config, rngs=rngs)
        block = partial(Block, config)
        if config.scan_layers:
            self.blocks = Stack(block, config.num_layers, rngs=rngs)
        else:
            self.blocks = nnx.List([block(i, rngs=rngs) for i in range(config.num_layers)])
        self.norm = make_norm(config, rngs=rngs)
        self.head = None if config.tie_embeddings else make_head(config, rngs=rngs)

    @property
    def max_length(self) -> int:
        """The longest sequence that a call takes."""
        return self.config.max_length

    def __call__(
        self, tokens: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the token after each position, which sees itself and everything before it.

        Args:
          tokens: integer [b, s] (b batch, s sequence, at most `max_length`).
          segment_ids: integer [b, s], where rows hold several documents: a position sees those of its own number only.
          positions: integer [b, s]: where in its document each token is; None: where in its row.

        Returns:
          [b, s, v] (v vocabulary), in the compute dtype. Inside `shard_map` this rank's [b, s, v/n] where `tensor` or `col` is
          bound: `cross_entropy(..., axis=VOCABULARY_AXES)` takes them so. Where v leaves a remainder over `tensor` they are
          [b, s, ceil(v/n)], and those that stand for no word are -inf.

        Raises:
          ValueError: the sequence is longer than `max_length`.
        """
        prefetch = Prefetch() if self.config.prefetch else None
        logits = self._logits(self._hidden(tokens, Packed(segment_ids, positions), prefetch)[0], prefetch)
        axes = bound("tensor")
        if axes and (words := padded_words("Transformer", logits.shape[-1], axes, self.config.vocab_size)) is not None:
            logits = jnp.where(is_word(logits.shape[-1], axes, words), logits, -jnp.inf)
        return logits if prefetch is None else prefetch.last(logits)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        ignore: int = -1,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Summed cross entropy of the next tokens in nats, and the number of targets; their quotient is the mean.

        With experts the total holds in train mode, once for every target, their auxiliary losses by the weights in
        `config.experts`.

        The same as `cross_entropy` of the logits; with `config.loss_chunk`, and by default with a large vocabulary, the
        logits of all words are never there at once, which saves most of a step's memory there.

        Args:
          tokens: integer [b, s].
          targets: integer [b, s]: the token after each position. Positions of negative ones count for nothing.
          ignore: one more target that counts for nothing.
          segment_ids: integer [b, s], where rows hold several documents: a position sees those of its own number only.
          positions: integer [b, s]: where in its document each token is; None: where in its row.

        Returns:
          (total, weight): scalars in at least float32, as `ax.WeightedMean` takes them.

        Raises:
          ValueError: the sequence is longer than `max_length`.
        """
        return self.loss_and_routers(tokens, targets, ignore, segment_ids=segment_ids, positions=positions)[:2]

    def loss_and_routers(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        ignore: int = -1,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, RouterValues | None]:
        """`loss`, and the values of the blocks with experts, each stacked along dim 0; None where there are none."""
        chunk, experts = self.config.words_at_once, self.config.experts
        prefetch = Prefetch() if self.config.prefetch and not chunk else None
        x, routers = self._hidden(tokens, Packed(segment_ids, positions), prefetch)
        if chunk:
            total, weight = self._chunked_loss(x, targets, ignore)
        else:
            logits = self._logits(x, prefetch)
            logits = logits if prefetch is None else prefetch.last(logits)
            words = self.config.vocab_size
            total, weight = cross_entropy(logits, targets, ignore, axis=VOCABULARY_AXES, words=words)
        if experts is None or routers is None or self.deterministic:
            return total, weight, routers
        extra = experts.load_balance * routers.load_balance.mean() + experts.z * routers.z.mean()
        return total + weight * extra.astype(total.dtype), weight, routers

    def _chunked_loss(self, x: jax.Array, targets: jax.Array, ignore: int) -> tuple[jax.Array, jax.Array]:
        if self.head is None:
            output, table, dim = self.embed, self.embed.embedding, 0
        else:
            output, table, dim = self.head, self.head.kernel, 1
        x, table = output.promote_dtype((self.norm(x), table[...]), dtype=output.dtype)
        losses = chunked_cross_entropy(
            x,
            table,
            targets,
            chunk=self.config.words_at_once,
            words_dim=dim,
            sequence_parallel=self.split_sequence,
            ignore_label=ignore,
            softcap=self.config.logit_softcap,
            words=self.config.vocab_size,
        )
        return jnp.sum(losses), jnp.sum(counted(targets, ignore), dtype=losses.dtype)

    def extend(self, tokens: jax.Array, caches: list[Cache]) -> tuple[jax.Array, list[Cache]]:
        """Logits of positions after those in the caches, one cache per block; without sequence parallelism.

        Args:
          tokens: integer [b, s]; there is room for s more positions.
          caches: keys and values, or latents, of the positions before (see `empty_caches`).

        Returns:
          (logits as from a call, the caches with s more positions).
        """
        length, starts = caches[0].length, caches[0].starts
        x, kept = self._embedded(tokens, places_after(length, starts, context_positions(tokens.shape[1]))), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.extend(x, cache)
            kept.append(cache)
        return self._logits(x), kept

    def empty_caches(self, batch: int, room: int, starts: jax.Array | None = None) -> list[Cache]:
        """One cache per block with room for so many positions, of the heads that this rank computes.

        Args:
          batch: rows.
          room: positions.
          starts: integer [batch], how many positions of padding each row begins with; None: none.

        Raises:
          ValueError: for more room than `max_length`.
        """
        self._check_length(room)
        return [block.attention.empty_cache(batch, room, starts) for block in self.blocks]

    def cache_specs(self, rows: Any, heads: str | None, padded: bool = False) -> list[Cache]:
        """How the caches lie on a mesh.

        Args:
          rows: the axes that split sequences, as an entry of a spec.
          heads: the axis that splits heads.
          padded: whether they have `starts`.
        """
        one: Any = self.blocks.layer if isinstance(self.blocks, Stack) else self.blocks[0]
        return [one.attention.cache_specs(rows, heads, padded)] * len(self.blocks)

    def _hidden(
        self, tokens: jax.Array, packed: Packed, prefetch: Prefetch | None = None
    ) -> tuple[jax.Array, RouterValues | None]:
        split = current_split()
        self._check_length(tokens.shape[1] * (1 if split is None else axis_size(split.axis)))
        _check_packed(tokens, packed)
        x = self._embedded(tokens, packed.positions)
        if isinstance(self.blocks, Stack):
            return self.blocks(x, packed=packed)
        routers = []
        for block in self.blocks:
            x, router = block(x, prefetch=prefetch, packed=packed)
            routers += [] if router is None else [router]
        return x, jax.tree.map(lambda *each: jnp.stack(each), *routers) if routers else None

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_length={self.max_length}: "
                "shorten it or build the model with a larger max_length"
            )

    def _embedded(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = self.embed(tokens)
        if self.config.scale_embeddings:
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        if self.positions is not None:
            own = self.positions(context_positions(tokens.shape[1]) if positions is None else positions)
            x = x + (split_sequence(own) if self.split_sequence else own)
        return self.dropout(x)

    def _logits(self, x: jax.Array, prefetch: Prefetch | None = None) -> jax.Array:
        return capped(self._uncapped_logits(x, prefetch), self.config.logit_softcap)

    def _uncapped_logits(self, x: jax.Array, prefetch: Prefetch | None) -> jax.Array:
        x = self.norm(x)
        if isinstance(self.head, ParallelLinear):
            return self.head(x, prefetch=prefetch)
        if self.head is not None:
            return self.head(x)
        if isinstance(self.embed, ParallelEmbedding):
            return self.embed.attend(x, gather_output=False, prefetch=prefetch)
        return self.embed.attend(x)


def _check_packed(tokens: jax.Array, packed: Packed) -> None:
    wrong = [f"{name} {x.shape}" for name, x in packed._asdict().items() if x is not None and x.shape != tokens.shape]
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)} must have the shape of tokens, {tokens.shape}: one value for every token"
        )
