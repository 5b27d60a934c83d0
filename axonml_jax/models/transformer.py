"""A decoder-only transformer, its stack of layers, and an MLP."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.primitives import axis_size, bound
from axonml_jax.layers.attention import WHOLE, KVCache, Packed, TensorParallelAttention, places_after
from axonml_jax.layers.experts import MOST_LOADS, ParallelMoE, RouterValues
from axonml_jax.layers.grid import ROW_COL_DEPTH, ParallelEmbedding, ParallelLinear
from axonml_jax.layers.latent import LatentAttention, LatentCache
from axonml_jax.layers.linear import (
    ColumnParallelLinear,
    ParallelDropout,
    ParallelLayerNorm,
    ParallelRMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    capped,
    split_sequence,
)
from axonml_jax.layers.losses import chunked_cross_entropy, is_word, padded_words, vocab_parallel_cross_entropy
from axonml_jax.layers.options import LatentConfig
from axonml_jax.layers.pairs import PairAxes, ParallelMLP
from axonml_jax.layers.products import Prefetch
from axonml_jax.layers.whole import SPEC
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.loss import WeightedMean
from axonml_jax.model.view import STACKED
from axonml_jax.models.config import TransformerConfig
from axonml_jax.strategies.strategy import context_positions, current_split

# --------------------------------------------------------------------------------------------------
# The layers every part of the transformer is built from, made as its configuration says.
# --------------------------------------------------------------------------------------------------

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
    """The table of token embeddings, split by rows."""
    options: dict[str, Any] = {"embedding_init": nnx.initializers.normal(INIT_STD), "overlap": config.overlap}
    options |= _dtypes(config)
    if config.split == "grid":
        return _as_read(ParallelEmbedding(config.vocab_size, config.hidden_size, rngs=rngs, **options), config)
    sequence = {"sequence_parallel": config.sequence_parallel, "pads": True}
    table = VocabParallelEmbedding(config.vocab_size, config.hidden_size, rngs=rngs, **sequence, **options)
    return _as_read(table, config)


def make_positions(config: TransformerConfig, *, rngs) -> nnx.Embed:
    """The table of positions, replicated on every rank."""
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
    """Options of both halves of a block; output layers start smaller by sqrt(2 * num_layers) (GPT-2)."""
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
    """Make a table compute in the dtype in which it is read; nnx.Embed would keep its parameters' dtype.

    With parameters in float32 read in bfloat16 all activations would be float32 otherwise, and every product after them.
    """
    table.dtype = config.dtype
    return table


# --------------------------------------------------------------------------------------------------
# The language-model loss as a sum and a weight, so that it stays exact over ranks and microbatches of unequal size.
# --------------------------------------------------------------------------------------------------


def cross_entropy(
    logits: jax.Array, targets: jax.Array, ignore: int = -1, *, axis: AxisNames = (), words: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Summed cross entropy in nats, and the number of targets it covers; their quotient is the mean.

    Args:
      logits: [..., v] (v vocabulary), or this rank's [..., v/n].
      targets: integer [...], token ids below v. Positions of negative ones count for nothing.
      ignore: one more target that counts for nothing.
      axis: the mesh axes that split the logits where they are bound (`VOCABULARY_AXES` for the transformer); none: whole.
      words: v where it leaves a remainder over `axis`, and the last ranks' logits end with padding; None: it leaves none.

    Returns:
      (total, weight): scalars in at least float32; the total is NaN where a target is v or more.

    Raises:
      ValueError: a target is v or more, where values are known.
    """
    losses = vocab_parallel_cross_entropy(logits, targets, axis, ignore_label=ignore, words=words)
    return jnp.sum(losses), jnp.sum(counted(targets, ignore), dtype=losses.dtype)


def counted(targets: jax.Array, ignore: int = -1) -> jax.Array:
    """Which targets count: those that are neither negative nor `ignore`; booleans of their shape."""
    known = targets >= 0
    return known if ignore < 0 else known & (targets != ignore)


# --------------------------------------------------------------------------------------------------
# A plain multi-layer perceptron, the same definition for one device and for every plan.
# --------------------------------------------------------------------------------------------------


class MLP(nnx.Module):
    """A multi-layer perceptron: linear layers with an activation between them (none after the last).

    Layers are column- and row-parallel in pairs over `tensor`, where that is bound; one that is left over is whole on every
    rank.

    >>> MLP([784, 128, 10], rngs=nnx.Rngs(0))(jax.numpy.ones((32, 784))).shape
    (32, 10)

    Args:
      sizes: width of the input, of every hidden layer and of the output.
      activation: element-wise function.
      rngs: stream `params`.

    Raises:
      ValueError: fewer than two sizes, or a size below 1.
    """

    def __init__(self, sizes: Sequence[int], *, activation: Callable = jax.nn.relu, rngs: nnx.Rngs):
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"MLP sizes {list(sizes)}: give at least an input and an output width, each at least 1")
        self.activation = activation
        widths = list(pairwise(sizes))
        kinds: list[type[nnx.Linear]] = [ColumnParallelLinear, RowParallelLinear] * (len(widths) // 2)
        kinds += [nnx.Linear] * (len(widths) % 2)
        self.layers = nnx.List([kind(*width, rngs=rngs) for kind, width in zip(kinds, widths, strict=True)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers, [..., sizes[0]] -> [..., sizes[-1]]."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)


# --------------------------------------------------------------------------------------------------
# What routers did, as metrics of a step.
# --------------------------------------------------------------------------------------------------


def router_metrics(routers: RouterValues) -> dict[str, WeightedMean]:
    """Metrics for `loss_fn` to return, means over the layers with experts.

    Args:
      routers: of L layers, stacked along dim 0 (`Transformer.loss_and_routers`).

    Returns:
      By name: `experts/load_balance`, `experts/z`, `experts/entropy` (nats), `experts/dropped` (a share), `experts/rounds`,
      `experts/busiest` (the fullest expert's tokens over the mean), and for up to 64 experts `experts/load/0`, ..., each one's
      share of all choices.
    """
    counts = routers.counts.astype(routers.entropy.dtype)
    loads = counts / jnp.maximum(counts.sum(1, keepdims=True), 1)
    experts = loads.shape[1]
    found = {name: getattr(routers, name).mean() for name in ("load_balance", "z", "entropy", "dropped", "rounds")}
    found["busiest"] = experts * loads.max(1).mean()
    if experts <= MOST_LOADS:
        found |= {f"load/{e}": loads[:, e].mean() for e in range(experts)}
    return {f"experts/{name}": WeightedMean(value, 1.0) for name, value in found.items()}


# --------------------------------------------------------------------------------------------------
# `Stack`: equal layers whose parameters lie along a first dim, run in one loop.
# --------------------------------------------------------------------------------------------------


class Stack(nnx.Module):
    """`count` equal layers applied by a scan, traced and compiled once.

    Its parameters are those of one layer with the layers along dim 0, under the names of a layer's own.

    Args:
      make: a function of `rngs` that makes a layer without random state.
      count: how many layers.
      rngs: stream `params`.
    """

    def __init__(self, make: Callable[..., nnx.Module], count: int, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), count)
        layer = nnx.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)
        for _, variable in nnx.iter_graph(layer):
            if not isinstance(variable, nnx.Param):
                continue
            written = variable.get_metadata()
            variable.set_metadata(**{STACKED: written.get(STACKED, 0) + 1})
            if (spec := written.get(SPEC)) is not None:
                variable.set_metadata(**{SPEC: PartitionSpec(None, *spec)})
        self.count, self.layer = count, layer

    def __call__(self, x: jax.Array, **same: Any) -> tuple[jax.Array, Any]:
        """Apply all layers to x; returns (x, the layers' other results stacked along dim 0).

        Args:
          x: the first layer's input; each layer's output is the next one's.
          **same: further arguments, the same for every layer.
        """
        graph, params, state = nnx.split(self.layer, nnx.Param, ...)

        def step(x: jax.Array, own: Any):
            layer = nnx.merge(graph, *own)
            x, more = layer(x, **same)
            return x, (more, nnx.state(layer, nnx.Not(nnx.Param)))

        x, (more, state) = jax.lax.scan(step, x, (params, state))
        nnx.update(self.layer, state)
        return x, more

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """The layers, each with its slice of the parameters."""
        graph, state = nnx.split(self.layer)
        for i in range(self.count):
            yield nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))


def stacked(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Stack the arrays of numbered layers (`blocks/0/norm/scale`) as a `Stack` holds them (`blocks/layer/norm/scale`)."""
    found = {}
    for name, value in values.items():
        parts = re.fullmatch(r"blocks/(\d+)/(.*)", name)
        if parts is None:
            found[name] = value
        elif parts[1] == "0":
            found[f"blocks/layer/{parts[2]}"] = np.stack([values[f"blocks/{i}/{parts[2]}"] for i in range(count)])
    return found


# --------------------------------------------------------------------------------------------------
# A decoder-only transformer covering the Llama family and GPT-2, the same definition for one device and for every plan.
# --------------------------------------------------------------------------------------------------

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
        normed, x = self.attention_norm.beside(x)
        mixed = self.attention(normed, prefetch=prefetch, packed=packed)
        return self._joined(x, mixed, prefetch)

    def extend(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Apply the block to positions after those in a cache."""
        attention: Any = self.attention
        mixed, cache = attention.extend(self.attention_norm(x), cache)
        return self._joined(x, mixed)[0], cache

    def _joined(
        self, x: jax.Array, mixed: jax.Array, prefetch: Prefetch | None = None
    ) -> tuple[jax.Array, RouterValues | None]:
        x = x + self.dropout(mixed if self.post_attention_norm is None else self.post_attention_norm(mixed))
        normed, x = self.mlp_norm.beside(x)
        router = None
        if isinstance(self.mlp, ParallelMoE):
            y, router = self.mlp(normed)
        else:
            y = self.mlp(normed, prefetch=prefetch)
        return x + self.dropout(y if self.post_mlp_norm is None else self.post_mlp_norm(y)), router


class Transformer(nnx.Module):
    """A decoder-only language model: tokens in, logits of the next token out.

    Its layers are tensor-parallel ones: where `tensor`, or `row`, `col` and `depth`, are bound they split, elsewhere they are
    plain. Under `ax.Context` it sees its rank's positions, in the plan's order. Parameters and first values are the same
    everywhere.

    Args:
      config: sizes and options; `models.config.preset` has those of published models.
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
        """The longest sequence that a call accepts."""
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

        In train mode the total of a model with experts includes their auxiliary losses, weighted by `config.experts`, once for
        every target.

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
          tokens: integer [b, s]; the caches must have room for s more positions, which is not checked.
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
        """One empty cache per block with room for `room` positions, of this rank's heads.

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
        """The PartitionSpecs of the caches on a mesh.

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
