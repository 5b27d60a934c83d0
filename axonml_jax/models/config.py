"""The shape of a decoder-only transformer as a frozen value, with its parameter count and FLOPs."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.parallel.tensor.megatron.attentions import ATTENTIONS
from axonml_jax.synonyms import meant

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "gelu")
POSITIONS = ("rotary", "learned")
SPLITS = ("tensor", "grid")
_FLOATS = ("float32", "bfloat16", "float16")
LARGE_VOCABULARY = 16_384
LITTLE_WORK = 0.03
_POSITIVE = ("vocab_size", "num_layers", "hidden_size", "num_heads", "max_length", "rope_theta", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a `Transformer` is made of. The defaults are the Llama family's; `models.presets` names published models.

    Attributes:
      vocab_size: number of token ids (256 for bytes).
      num_layers: number of blocks.
      hidden_size: width of the residual stream.
      num_heads: query heads; the head size is hidden_size / num_heads.
      num_kv_heads: key and value heads (grouped-query attention, Ainslie et al. 2023); None: num_heads.
      mlp_hidden_size: inner width of the feed-forward part; None: 4 * hidden_size for "gelu", 8/3 * hidden_size rounded
        up to a multiple of 64 for "swiglu" (the same number of parameters).
      max_length: longest sequence; with "learned" positions also the number of position embeddings.
      norm: "rmsnorm" or "layernorm".
      activation: "swiglu" (gated, Shazeer 2020) or "gelu" (tanh approximation, as GPT-2).
      experts: which feed-forward parts are mixtures of experts, and of what; None: all are dense.
      position: "rotary" (Su et al. 2021, half-split layout) or "learned".
      rope_theta: base of the rotary frequencies.
      tie_embeddings: whether the output head is the token embedding.
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
    mlp_hidden_size: int | None = None
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    experts: ExpertsConfig | None = field(default=None, metadata={"section": "experts"})
    position: str = "rotary"
    rope_theta: float = 10_000.0
    tie_embeddings: bool = False
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
        offenders = [*_bad_sizes(self), *_bad_heads(self), *_bad_choices(self), *_bad_dtypes(self), *_bad_experts(self)]
        if offenders:
            raise ValueError("TransformerConfig:\n" + "\n".join(f"  - {line}" for line in offenders))
        for name in ("dtype", "param_dtype"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _float_name(value))

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

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
        outside = (tables * self.vocab_size + positions) * self.hidden_size + _norm_params(self)
        return outside + sum(self._block_params(i, active=False) for i in range(self.num_layers))

    @property
    def active_params(self) -> int:
        """Number of parameters that one token reads: of the experts those that it is sent to."""
        idle = lambda block: self._block_params(block, active=False) - self._block_params(block, active=True)
        return self.num_params - sum(idle(block) for block in range(self.num_layers))

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward part of a block, counted from 0, is a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(block)

    def _block_params(self, block: int, *, active: bool) -> int:
        own = _experts_params(self, active=active) if self.has_experts(block) else _mlp_params(self)
        return _attention_params(self) + own + 2 * _norm_params(self)

    def flops_per_token(self, length: int) -> int:
        """FLOPs of one training token (forward and backward), by torchtitan's formula, the base of MFU.

        6 * (parameters that multiply; of experts a token's own) + 6 * layers * heads * (d_qk + d_v) * length. Embedding
        tables are looked up, not multiplied; a tied table counts once, as the head. Causality is not credited.

        Args:
          length: sequence length the model is trained on.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size
        looked_up += self.max_length if self.position == "learned" else 0
        multiplied = self.active_params - looked_up * self.hidden_size
        return 6 * multiplied + 6 * self.num_layers * self.num_heads * 2 * self.head_size * length


@lru_cache(maxsize=256)
def even_chunk(size: int, about: int) -> int:
    """The chunk length nearest to `about` that cuts `size` evenly, in lanes of 128; where there is none, nearly evenly.

    >>> even_chunk(128_256, 16_384), even_chunk(50_257, 16_384)
    (21376, 12672)
    """
    if whole := [chunk for chunk in range(about // 2, 2 * about) if size % chunk == 0 and chunk % 128 == 0]:
        return min(whole, key=lambda chunk: abs(chunk - about))
    return -(-size // -(-size // about) // 128) * 128


def _attention_params(config: TransformerConfig) -> int:
    key_value = 2 * config.kv_heads * config.head_size
    biases = 2 * config.hidden_size + key_value if config.use_bias else 0
    return config.hidden_size * (2 * config.hidden_size + key_value) + biases


def _mlp_params(config: TransformerConfig) -> int:
    inward = 2 if config.activation == "swiglu" else 1
    biases = inward * config.mlp_size + config.hidden_size if config.use_bias else 0
    return (inward + 1) * config.hidden_size * config.mlp_size + biases


def _experts_params(config: TransformerConfig, *, active: bool) -> int:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    kind = experts.activation or config.activation
    inward = 1 if kind == "gelu" else 2
    size = experts.inner_size or config.mlp_size
    biases = lambda inner: inward * inner + hidden if config.use_bias else 0
    one = (inward + 1) * hidden * size + biases(size)
    shared = (inward + 1) * hidden * experts.shared_size + biases(experts.shared_size) if experts.shared_size else 0
    router = (hidden + (1 if experts.router_bias else 0)) * experts.num_experts
    return router + shared + one * (experts.top_k if active else experts.num_experts)


def _norm_params(config: TransformerConfig) -> int:
    return config.hidden_size * (2 if config.norm == "layernorm" and config.use_bias else 1)


def _bad_sizes(config: TransformerConfig):
    for name in _POSITIVE:
        if getattr(config, name) <= 0:
            yield f"{name}={getattr(config, name)}: must be positive"
    for name in ("num_kv_heads", "mlp_hidden_size"):
        if (value := getattr(config, name)) is not None and value <= 0:
            yield f"{name}={value}: must be positive, or None for the default"
    if config.loss_chunk is not None and config.loss_chunk < 0:
        yield f"loss_chunk={config.loss_chunk}: must be a number of words, 0 for all, or None for the default"
    if config.loss_chunk and config.split == "grid":
        yield f"loss_chunk={config.loss_chunk} belongs to split='tensor': 3-D layers sum all logits over row; leave it out"
    if config.scan_layers and config.dropout:
        yield f"scan_layers=True draws no random masks, and dropout={config.dropout}: set dropout=0 or scan_layers=False"
    if not 0 <= config.dropout < 1:
        yield f"dropout={config.dropout}: must be at least 0 and below 1"


def _bad_heads(config: TransformerConfig):
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    if heads <= 0 or hidden <= 0:
        return
    if hidden % heads:
        yield f"hidden_size={hidden} does not divide into num_heads={heads}: make it a multiple of {heads}"
    elif config.position == "rotary" and hidden // heads % 2:
        yield f"position='rotary' turns pairs: the head size {hidden // heads} (hidden_size / num_heads) must be even"
    if kv_heads is not None and kv_heads > 0 and heads % kv_heads:
        yield f"num_heads={heads} does not divide into num_kv_heads={kv_heads} groups"


def _bad_experts(config: TransformerConfig):
    experts = config.experts
    if experts is None:
        return
    if not isinstance(experts, ExpertsConfig) or not experts.num_experts:
        yield f"experts={experts!r}: must be an ExpertsConfig with num_experts, or None"
        return
    if not any(config.has_experts(block) for block in range(config.num_layers)):
        given = f"every={experts.every}, first_dense={experts.first_dense}"
        yield f"experts: none of the {config.num_layers} blocks has any with {given}"
    if config.split == "grid":
        yield "experts are split over expert and tensor: set split='tensor'"
    if config.scan_layers and not experts.alike:
        yield "scan_layers=True runs blocks of one kind: set experts.every=1 and first_dense=0, or scan_layers=False"
    if config.scan_layers and experts.noise:
        yield f"scan_layers=True draws no random numbers, and experts.noise={experts.noise}: set one of them off"


def _bad_choices(config: TransformerConfig):
    choices = {
        "norm": NORMS,
        "activation": ACTIVATIONS,
        "position": POSITIONS,
        "split": SPLITS,
        "attention": ATTENTIONS,
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            yield f"{name}={getattr(config, name)!r}: must be one of {', '.join(allowed)}"
    if config.sequence_parallel and config.split == "grid":
        yield "sequence_parallel=True belongs to split='tensor': the 3-D layers of split='grid' do without"
    if config.ring and not config.sequence_parallel:
        yield "ring=True cuts the gathers and scatters of sequence parallelism into hops: set sequence_parallel=True too"
    if config.ring and config.overlap:
        yield "ring=True and overlap=True hide the same reductions: choose one"
    if config.prefetch and (config.split != "grid" or config.scan_layers):
        yield "prefetch=True gathers ahead what depth splits, from block to block: set split='grid' and scan_layers=False"


def _bad_dtypes(config: TransformerConfig):
    for name in ("dtype", "param_dtype"):
        value = getattr(config, name)
        if not (value is None and name == "dtype") and _float_name(value) is None:
            yield f"{name}={value!r}: must name a floating-point dtype such as float32 or bfloat16"


def _float_name(value: Any) -> str | None:
    """The name of a floating-point dtype however it is given; None for anything else. The common names need no JAX."""
    if isinstance(value, str) and value in _FLOATS:
        return value
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(meant("dtype", value))
    except TypeError:
        return None
    return dtype.name if value is not None and jnp.issubdtype(dtype, jnp.floating) else None
