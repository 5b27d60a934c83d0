"""The shape of a decoder-only transformer as a frozen value, with its parameter count and FLOPs."""

from dataclasses import dataclass, field
from functools import lru_cache

from axonml_jax.cost.decoder.attention_shape import AttentionShape, grouped_heads, latent_heads
from axonml_jax.models.config_problems import float_name, problems
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.models.parameter_counts import attention_params, experts_params, mlp_params, norm_params
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling

LARGE_VOCABULARY = 16_384
LITTLE_WORK = 0.03


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a `Transformer` is made of. The defaults are the Llama family's; `models.presets` names published models.

    Attributes:
      vocab_size: number of token ids (256 for bytes).
      num_layers: number of blocks.
      hidden_size: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads (grouped-query attention, Ainslie et al. 2023); None: num_heads.
      head_dim: size of a head; None: hidden_size / num_heads.
      qk_norm: RMS norms of each head's queries and keys (Qwen3).
      query_scalar: the number by whose square root scores are divided; None: the head size (Gemma 2).
      attention_softcap: holds these scores between -softcap and softcap by a hyperbolic tangent (Gemma 2); None: nothing does.
      qkv_bias: biases in the projections to queries, keys and values alone, without use_bias (Qwen2).
      window: how many positions one sees, itself among them (Mistral); None: all before it.
      full_every: only with a window: every so many-th block has none, the last of each so many (gpt-oss: 2); None: all have it.
      sinks: a trained score of each head that takes its part of the softmax and stands for no key (gpt-oss).
      latent: attention whose keys and values are made of a latent of each position (DeepSeek-V3), and its sizes; None: each
        head has its own projections of the block's input.
      mlp_hidden_size: inner width of the feed-forward part; None: 4 * hidden_size for "gelu", 8/3 * hidden_size rounded
        up to a multiple of 64 for gated ones (the same number of parameters).
      max_length: longest sequence; with "learned" positions also the number of position embeddings.
      norm: "rmsnorm" or "layernorm".
      zero_centered_norm: whether RMS norms multiply by 1 + their scales, which start at 0 (Gemma).
      post_norms: norms also of what attention and the feed-forward part add to the residual stream (Gemma 2).
      activation: "swiglu" (gated, Shazeer 2020), "geglu" (gated by gelu, Gemma) or "gelu" (tanh approximation, as GPT-2).
      experts: which feed-forward parts are mixtures of experts, and of what; None: all are dense.
      position: "rotary" (Su et al. 2021, half-split layout) or "learned".
      rope_theta: base of the rotary frequencies.
      rope_scaling: how these change for sequences longer than those of pretraining; None: they do not.
      window_rope_theta: base in blocks with a window, where frequencies are not scaled (Gemma 3); None: as in all others.
      tie_embeddings: whether the output head is the token embedding.
      scale_embeddings: whether embeddings are multiplied by the square root of hidden_size where they are looked up (Gemma).
      logit_softcap: holds logits between -softcap and softcap by a hyperbolic tangent (Gemma 2); None: nothing does.
      use_bias: biases in every linear layer except the head, and in "layernorm".
      dropout: rate on embeddings, attention weights and both residual branches, in train mode.
      norm_eps: epsilon of the norms.
      split: over which mesh axes the layers split where those are bound: "tensor" (Megatron's) or "grid" (AxoNN's: row, col
        and depth). The parameters and their first values are the same.
      sequence_parallel: with "tensor", split the activations between the blocks along the sequence.
      ring: with `sequence_parallel`, cut the blocks' gathers and scatters into hops between partial products.
      overlap: issue the reductions of inputs' gradients before the weights' gradients, to run behind them; not with `ring`, and
        not in a loss of chunks of words, whose loop makes both.
      prefetch: with "grid", gather each layer's weights over depth while the layer before it computes.
      attention: what computes attention: "xla" (einsums), "blocks" (block by block), "splash" (JAX's kernel on TPU), "cudnn"
        (on GPU), or "auto": the platform's kernel where it applies, on CPU blocks for long sequences, else einsums. A kernel
        named here is used or refused with the reason.
      scan_layers: stack the blocks' parameters and run the blocks in one loop, so that tracing and compiling take the same
        time for any number of them; without dropout. Parameters are then called blocks/layer/..., not blocks/0/...
      loss_chunk: words whose logits `Transformer.loss` holds at once, which are then computed twice; 0: all. None: parts of
        about 16,384 of a larger vocabulary, where computing them twice is at most 3% more work; else all.
      dtype: name of the compute dtype; None: that of the parameters.
      param_dtype: name of the parameters' dtype. Both take anything `jnp.dtype` takes and keep its name.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    max_length: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    query_scalar: float | None = None
    attention_softcap: float | None = None
    qkv_bias: bool = False
    window: int | None = None
    full_every: int | None = None
    sinks: bool = False
    latent: LatentConfig | None = field(default=None, metadata={"section": "latent"})
    mlp_hidden_size: int | None = None
    norm: str = "rmsnorm"
    zero_centered_norm: bool = False
    post_norms: bool = False
    activation: str = "swiglu"
    experts: ExpertsConfig | None = field(default=None, metadata={"section": "experts"})
    position: str = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = field(default=None, metadata={"section": "rope_scaling"})
    window_rope_theta: float | None = None
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    logit_softcap: float | None = None
    use_bias: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-5
    split: str = "tensor"
    sequence_parallel: bool = False
    ring: bool = False
    overlap: bool = False
    prefetch: bool = False
    attention: str = "auto"
    scan_layers: bool = False
    loss_chunk: int | None = None
    dtype: str | None = None
    param_dtype: str = "float32"

    def __post_init__(self):
        if offenders := list(problems(self)):
            raise ValueError("TransformerConfig:\n" + "\n".join(f"  - {line}" for line in offenders))
        for name in ("dtype", "param_dtype"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, float_name(value))

    @property
    def head_size(self) -> int:
        """Size of one attention head, of queries and keys."""
        if self.latent is not None:
            return self.latent.query_size
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def attention_shape(self) -> AttentionShape:
        """The matrices of a block's attention, and the sizes of its heads."""
        if self.latent is not None:
            return latent_heads(self.hidden_size, self.num_heads, self.latent)
        return grouped_heads(self.hidden_size, self.num_heads, self.kv_heads, self.head_size, qk_norm=self.qk_norm)

    @property
    def mlp_size(self) -> int:
        """Inner width of the feed-forward part."""
        if self.mlp_hidden_size:
            return self.mlp_hidden_size
        return 4 * self.hidden_size if self.activation == "gelu" else -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def words_at_once(self) -> int:
        """How many words' logits the loss holds at once; 0: those of all words."""
        if self.loss_chunk is not None:
            return 0 if self.loss_chunk >= self.vocab_size else self.loss_chunk
        again = 2 * self.hidden_size * self.vocab_size / self.flops_per_token(self.max_length)
        if self.vocab_size <= LARGE_VOCABULARY or again > LITTLE_WORK or self.split == "grid":
            return 0
        return even_chunk(self.vocab_size, LARGE_VOCABULARY)

    @property
    def num_params(self) -> int:
        """Number of parameters; tied embeddings count once."""
        tables = 1 if self.tie_embeddings else 2
        positions = self.max_length if self.position == "learned" else 0
        outside = (tables * self.vocab_size + positions) * self.hidden_size + norm_params(self)
        return outside + sum(self._block_params(i, active=False) for i in range(self.num_layers))

    @property
    def active_params(self) -> int:
        """Number of parameters that one token reads: of the experts those that it is sent to."""
        idle = lambda block: self._block_params(block, active=False) - self._block_params(block, active=True)
        return self.num_params - sum(idle(block) for block in range(self.num_layers))

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward part of a block, counted from 0, is a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(block)

    def window_of(self, block: int) -> int | None:
        """How many positions one sees in a block, counted from 0, itself among them; None: all before it."""
        return None if self.full_every is not None and (block + 1) % self.full_every == 0 else self.window

    def rope_of(self, block: int) -> tuple[float, RopeScaling | None]:
        """The base of a block's rotary frequencies, and how they are scaled."""
        if self.window_rope_theta is None or self.window_of(block) is None:
            return self.rope_theta, self.rope_scaling
        return self.window_rope_theta, None

    def _block_params(self, block: int, *, active: bool) -> int:
        own = experts_params(self, active=active) if self.has_experts(block) else mlp_params(self)
        return attention_params(self) + own + (4 if self.post_norms else 2) * norm_params(self)

    def flops_per_token(self, length: int) -> int:
        """FLOPs of one training token (forward and backward), by torchtitan's formula, the base of MFU.

        6 * (parameters that multiply; of experts a token's own) + 6 * layers * heads * (d_qk + d_v) * length. Embedding
        tables are looked up, not multiplied; a tied table counts once, as the head. Causality and windows are not credited.

        Args:
          length: sequence length the model is trained on.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size
        looked_up += self.max_length if self.position == "learned" else 0
        multiplied = self.active_params - looked_up * self.hidden_size
        return 6 * multiplied + 6 * self.num_layers * self.attention_shape.pair_products * length


@lru_cache(maxsize=256)
def even_chunk(size: int, about: int) -> int:
    """The chunk length nearest to `about` that cuts `size` evenly, in lanes of 128; where there is none, nearly evenly.

    >>> even_chunk(128_256, 16_384), even_chunk(50_257, 16_384)
    (21376, 12672)
    """
    if whole := [chunk for chunk in range(about // 2, 2 * about) if size % chunk == 0 and chunk % 128 == 0]:
        return min(whole, key=lambda chunk: abs(chunk - about))
    return -(-size // -(-size // about) // 128) * 128
