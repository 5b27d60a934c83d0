"""The transformer's configuration: sizes, options, presets, counts of parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, Literal

from axonml_jax.base import meant, wrong_types
from axonml_jax.cost.decoder import AttentionShape, grouped_heads, latent_heads
from axonml_jax.layers.options import ATTENTIONS, LatentConfig, RopeScaling

# --------------------------------------------------------------------------------------------------
# The mixture-of-experts layers of a transformer as a frozen value. Nothing here imports JAX.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Which feed-forward parts are mixtures of experts, and of what kind (see `ax.ParallelMoE`).

    Attributes:
      num_experts: experts of a layer; 0: all feed-forward parts are dense.
      top_k: experts per token.
      inner_size: inner width of an expert; null: that of the dense feed-forward part.
      every: only every so many-th block has experts, the last of each so many.
      first_dense: so many first blocks have none.
      router: softmax, or sigmoid with a bias for the choice that follows the load (DeepSeek-V3).
      renormalize: whether the gates of a token are divided by their sum.
      groups: sigmoid: experts lie in so many groups, of which a token uses top_groups.
      top_groups: sigmoid: see groups.
      scale: sigmoid: a factor of the gates.
      bias_rate: sigmoid: by how much the bias changes in an update; 0: there is none.
      noise: standard deviation of what is added to scores for the choice, in training.
      router_bias: whether scores have a bias that is trained.
      activation: of an expert, swiglu, clamped_swiglu or gelu; null: the model's.
      shared_size: inner width of an expert through which all tokens go; 0: there is none.
      capacity_factor: slots of an expert over its even share of a device's choices; further choices are dropped in training;
        null: none is dropped.
      dispatch: how tokens travel to their experts: rounds, ragged, gather, or auto.
      load_balance: weight of the load-balancing loss, a mean over layers, in the loss.
      z: weight of the router's z loss, likewise.
    """

    num_experts: int = 0
    top_k: int = 2
    inner_size: int | None = None
    every: int = 1
    first_dense: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    bias_rate: float = 0.001
    noise: float = 0.0
    router_bias: bool = False
    activation: Literal["swiglu", "clamped_swiglu", "gelu"] | None = None
    shared_size: int = 0
    capacity_factor: float | None = None
    dispatch: Literal["auto", "rounds", "ragged", "gather"] = "auto"
    load_balance: float = 0.01
    z: float = 0.0

    def __post_init__(self):
        if problems := list(wrong_types(self)) or list(self._problems()):
            raise ValueError("ExpertsConfig:\n" + "\n".join(f"  - {line}" for line in problems))

    def _problems(self) -> Iterator[str]:
        lowest = {
            "num_experts": 0,
            "top_k": 1,
            "every": 1,
            "first_dense": 0,
            "shared_size": 0,
            "load_balance": 0,
            "z": 0,
        }
        for name, least in (lowest | {"groups": 1, "top_groups": 1, "bias_rate": 0, "noise": 0}).items():
            if getattr(self, name) < least:
                yield f"{name}={getattr(self, name)}: must be at least {least}"
        for name in ("inner_size", "capacity_factor", "scale"):
            if (value := getattr(self, name)) is not None and value <= 0:
                yield f"{name}={value}: must be positive"
        if self.num_experts and self.top_k > self.num_experts:
            yield f"top_k={self.top_k}: there are num_experts={self.num_experts}"
        if self.router == "softmax":
            defaults = {"groups": 1, "top_groups": 1, "scale": 1.0, "bias_rate": 0.001}
            given = [
                f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value
            ]
            if given:
                yield f"{', '.join(given)}: belong to router='sigmoid'"
        elif self.num_experts:
            yield from self._group_problems()
        if self.capacity_factor is not None and self.dispatch in ("ragged", "gather"):
            yield f"dispatch={self.dispatch}: is for layers that drop no token; with capacity_factor leave it out"
        if self.shared_size and self.activation == "clamped_swiglu":
            yield f"shared_size={self.shared_size}: activation clamped_swiglu has no shared expert"
        if not self.num_experts:
            defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
            given = [
                f"{name}={getattr(self, name)}" for name, value in defaults.items() if getattr(self, name) != value
            ]
            if given:
                yield f"{', '.join(given)}: without effect while num_experts=0"

    def _group_problems(self) -> Iterator[str]:
        if self.num_experts % self.groups:
            yield f"groups={self.groups}: do not divide num_experts={self.num_experts}"
        elif self.top_groups > self.groups:
            yield f"top_groups={self.top_groups}: there are groups={self.groups}"
        elif self.top_k > (least := self.num_experts * self.top_groups // self.groups):
            yield f"top_k={self.top_k}: a token's top_groups={self.top_groups} groups have {least} experts"

    def has_experts(self, block: int) -> bool:
        """Whether a block, counted from 0, has experts."""
        return bool(self.num_experts) and block >= self.first_dense and (block + 1) % self.every == 0

    @property
    def alike(self) -> bool:
        """Whether all blocks are of the same kind."""
        return not self.num_experts or (self.every == 1 and self.first_dense == 0)

    def make_router(self) -> Any:
        """Make the router (imports JAX)."""
        from axonml_jax.layers.experts import SigmoidRouter, SoftmaxRouter

        shared: dict[str, Any] = {"top_k": self.top_k, "renormalize": self.renormalize, "noise": self.noise}
        if self.router == "softmax":
            return SoftmaxRouter(**shared)
        grouped: dict[str, Any] = {"groups": self.groups, "top_groups": self.top_groups}
        return SigmoidRouter(**shared, **grouped, scale=self.scale, bias_rate=self.bias_rate)


# --------------------------------------------------------------------------------------------------
# How many parameters the parts of a transformer have.
# --------------------------------------------------------------------------------------------------


def attention_params(config: Any) -> int:
    """Number of parameters of a block's attention."""
    shape = config.attention_shape
    biases = shape.opened if config.use_bias or config.qkv_bias else 0
    biases += config.hidden_size if config.use_bias else 0
    own = sum(scale.size for scale in shape.scales) + (config.num_heads if config.sinks else 0)
    return shape.products + biases + own


def mlp_params(config: Any) -> int:
    """Number of parameters of a dense feed-forward part."""
    inward = 1 if config.activation == "gelu" else 2
    biases = inward * config.mlp_size + config.hidden_size if config.use_bias else 0
    return (inward + 1) * config.hidden_size * config.mlp_size + biases


def experts_params(config: Any, *, active: bool) -> int:
    """Number of parameters of a mixture of experts: those that a token reads, or all."""
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


def norm_params(config: Any) -> int:
    """Number of parameters of a norm over the hidden features."""
    return config.hidden_size * (2 if config.norm == "layernorm" and config.use_bias else 1)


# --------------------------------------------------------------------------------------------------
# What is wrong with a transformer's configuration, all of it at once.
# --------------------------------------------------------------------------------------------------

NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "geglu", "gelu")
POSITIONS = ("rotary", "learned")
SPLITS = ("tensor", "grid")
_FLOATS = ("float32", "bfloat16", "float16")
_POSITIVE = ("vocab_size", "num_layers", "hidden_size", "num_heads", "max_length", "rope_theta", "norm_eps")
_OFF_BESIDE_LATENT: dict[str, Any] = {
    "num_kv_heads": None, "head_dim": None, "qk_norm": False, "query_scalar": None, "attention_softcap": None,
    "qkv_bias": False, "use_bias": False, "window": None, "sinks": False, "zero_centered_norm": False, "position": "rotary",
    "split": "tensor", "ring": False,
}  # fmt: skip
_POSITIVE_OR_NONE = ("query_scalar", "attention_softcap", "logit_softcap", "window_rope_theta")


def problems(config: Any) -> Iterator[str]:
    """Yield a line for each problem; if values have wrong types, only those."""
    if wrong := list(wrong_types(config)):
        yield from wrong
        return
    for found in (_bad_sizes, _bad_heads, _bad_attention, _bad_choices, _bad_dtypes, _bad_experts, _bad_latent):
        yield from found(config)


def _bad_sizes(config: Any):
    for name in _POSITIVE:
        if getattr(config, name) <= 0:
            yield f"{name}={getattr(config, name)}: must be positive"
    for name in ("num_kv_heads", "mlp_hidden_size", "head_dim", "window", *_POSITIVE_OR_NONE):
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


def _bad_heads(config: Any):
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    if heads <= 0 or hidden <= 0:
        return
    if config.latent is not None:
        return
    if config.head_dim is None and hidden % heads:
        yield f"hidden_size={hidden} does not divide into num_heads={heads}: make it a multiple of {heads}, or give head_dim"
    elif config.position == "rotary" and config.head_size % 2:
        said = "hidden_size / num_heads" if config.head_dim is None else "head_dim"
        yield f"position='rotary' turns pairs: the head size {config.head_size} ({said}) must be even"
    if kv_heads is not None and kv_heads > 0 and heads % kv_heads:
        yield f"num_heads={heads} does not divide into num_kv_heads={kv_heads} groups"


def _bad_attention(config: Any):
    if config.qkv_bias and config.use_bias:
        yield "qkv_bias=True is without effect where all linear layers have biases (use_bias=True): set one of them"
    every = config.full_every
    if every is not None and config.window is None:
        yield f"full_every={every} is without effect where no block has a window: set window, or leave it out"
    if every is not None and not 2 <= every <= config.num_layers:
        yield f"full_every={every}: must be at least 2, and at most num_layers={config.num_layers}"
    if every is not None and config.scan_layers:
        yield f"scan_layers=True runs blocks of one kind, and full_every={every} makes two: set scan_layers=False"
    if (theta := config.window_rope_theta) is not None and (config.window is None or config.position != "rotary"):
        given = f"window={config.window}, position={config.position!r}"
        yield f"window_rope_theta={theta}: turns positions in blocks with a window, and with {given} there are none"
    scaling = config.rope_scaling
    if scaling is not None and not isinstance(scaling, RopeScaling):
        yield f"rope_scaling={scaling!r}: must be a RopeScaling, or None"
    elif scaling is not None and scaling.kind != "none" and config.position != "rotary":
        yield f"rope_scaling.kind={scaling.kind} is without effect for position={config.position!r}: set position='rotary'"


def _bad_experts(config: Any):
    experts = config.experts
    if experts is None:
        return
    if not isinstance(experts, ExpertsConfig) or not experts.num_experts:
        yield f"experts={experts!r}: must be an ExpertsConfig with num_experts, or None"
        return
    if not any(config.has_experts(block) for block in range(config.num_layers)):
        given = f"every={experts.every}, first_dense={experts.first_dense}"
        yield f"experts: none of the {config.num_layers} blocks has any with {given}"
    if (experts.activation or config.activation) == "geglu":
        yield "activation='geglu' is for dense parts: set experts.activation to swiglu, clamped_swiglu or gelu"
    if config.split == "grid":
        yield "experts are split over expert and tensor: set split='tensor'"
    if config.scan_layers and not experts.alike:
        yield "scan_layers=True runs blocks of one kind: set experts.every=1 and first_dense=0, or scan_layers=False"
    if config.scan_layers and experts.noise:
        yield f"scan_layers=True draws no random numbers, and experts.noise={experts.noise}: set one of them off"


def _bad_latent(config: Any):
    latent, scaling = config.latent, config.rope_scaling
    if latent is None:
        return
    if not isinstance(latent, LatentConfig) or not latent.kv_rank:
        yield f"latent={latent!r}: must be a LatentConfig with kv_rank, or None"
        return
    given = [
        f"{name}={getattr(config, name)!r}" for name, off in _OFF_BESIDE_LATENT.items() if getattr(config, name) != off
    ]
    if given:
        yield f"{', '.join(given)}: attention of latents has none of these: leave them out"
    if latent.mscale and (scaling is None or scaling.kind != "yarn"):
        yield f"latent.mscale={latent.mscale} is without effect where rope_scaling is not of kind yarn: leave it out"


def _bad_choices(config: Any):
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
    if config.zero_centered_norm and config.norm != "rmsnorm":
        yield f"zero_centered_norm=True belongs to norm='rmsnorm', and norm={config.norm!r}: leave it out"
    if config.sequence_parallel and config.split == "grid":
        yield "sequence_parallel=True belongs to split='tensor': the 3-D layers of split='grid' do without"
    if config.ring and not config.sequence_parallel:
        yield "ring=True cuts the gathers and scatters of sequence parallelism into hops: set sequence_parallel=True too"
    if config.ring and config.overlap:
        yield "ring=True and overlap=True hide the same reductions: choose one"
    if config.prefetch and (config.split != "grid" or config.scan_layers):
        yield "prefetch=True gathers ahead what depth splits, from block to block: set split='grid' and scan_layers=False"


def _bad_dtypes(config: Any):
    for name in ("dtype", "param_dtype"):
        value = getattr(config, name)
        if not (value is None and name == "dtype") and float_name(value) is None:
            yield f"{name}={value!r}: must name a floating-point dtype such as float32 or bfloat16"


def float_name(value: Any) -> str | None:
    """The name of a floating-point dtype given in any way; None for anything else. Common names need no JAX."""
    if isinstance(value, str) and value in _FLOATS:
        return value
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(meant("dtype", value))
    except TypeError:
        return None
    return dtype.name if value is not None and jnp.issubdtype(dtype, jnp.floating) else None


# --------------------------------------------------------------------------------------------------
# The shape of a decoder-only transformer as a frozen value, with its parameter count and FLOPs.
# --------------------------------------------------------------------------------------------------

LARGE_VOCABULARY = 16_384
LITTLE_WORK = 0.03


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The configuration of a `Transformer`. The defaults are the Llama family's; `preset` has published models'.

    Attributes:
      vocab_size: number of token ids (256 for bytes).
      num_layers: number of blocks.
      hidden_size: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads (grouped-query attention, Ainslie et al. 2023); None: num_heads.
      head_dim: size of a head; None: hidden_size / num_heads.
      qk_norm: RMS norms of each head's queries and keys (Qwen3).
      query_scalar: the number by whose square root scores are divided; None: the head size (Gemma 2).
      attention_softcap: holds attention scores between -softcap and softcap by a tanh (Gemma 2); None: nothing does.
      qkv_bias: biases in the projections to queries, keys and values alone, without use_bias (Qwen2).
      window: how many positions each position sees, itself included (Mistral); None: all before it.
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
      rope_scaling: how rotary frequencies change for sequences longer than in pretraining; None: they do not.
      window_rope_theta: rotary base in blocks with a window, where frequencies are unscaled (Gemma 3); None: as in others.
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

    @cached_property
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

    @cached_property
    def words_at_once(self) -> int:
        """The number of words whose logits the loss holds at once; 0 for all."""
        if self.loss_chunk is not None:
            return 0 if self.loss_chunk >= self.vocab_size else self.loss_chunk
        again = 2 * self.hidden_size * self.vocab_size / self.flops_per_token(self.max_length)
        if self.vocab_size <= LARGE_VOCABULARY or again > LITTLE_WORK or self.split == "grid":
            return 0
        return even_chunk(self.vocab_size, LARGE_VOCABULARY)

    @cached_property
    def num_params(self) -> int:
        """Number of parameters; tied embeddings count once."""
        tables = 1 if self.tie_embeddings else 2
        positions = self.max_length if self.position == "learned" else 0
        outside = (tables * self.vocab_size + positions) * self.hidden_size + norm_params(self)
        return outside + sum(self._block_params(i, active=False) for i in range(self.num_layers))

    @cached_property
    def active_params(self) -> int:
        """Number of parameters that one token reads: of experts, only those that it is sent to."""
        idle = lambda block: self._block_params(block, active=False) - self._block_params(block, active=True)
        return self.num_params - sum(idle(block) for block in range(self.num_layers))

    def has_experts(self, block: int) -> bool:
        """Whether the feed-forward part of a block, counted from 0, is a mixture of experts."""
        return self.experts is not None and self.experts.has_experts(block)

    def window_of(self, block: int) -> int | None:
        """The number of positions visible in a block (counted from 0), the position itself included; None for all before it."""
        return None if self.full_every is not None and (block + 1) % self.full_every == 0 else self.window

    def rope_of(self, block: int) -> tuple[float, RopeScaling | None]:
        """The rotary base of a block, and the scaling of its frequencies."""
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
    """The chunk size nearest to `about` that divides `size` in multiples of 128; if there is none, nearly even chunks.

    >>> even_chunk(128_256, 16_384), even_chunk(50_257, 16_384)
    (21376, 12672)
    """
    if whole := [chunk for chunk in range(about // 2, 2 * about) if size % chunk == 0 and chunk % 128 == 0]:
        return min(whole, key=lambda chunk: abs(chunk - about))
    return -(-size // -(-size // about) // 128) * 128


# --------------------------------------------------------------------------------------------------
# Whether two configurations describe models that compute the same from the same weights.
# --------------------------------------------------------------------------------------------------

_FREE = {
    "dropout", "split", "sequence_parallel", "ring", "overlap", "prefetch", "attention", "scan_layers", "loss_chunk", "dtype",
    "param_dtype", "max_length", "num_kv_heads", "mlp_hidden_size", "head_dim", "experts", "rope_scaling",
    "query_scalar",
}  # fmt: skip
_TRAINING = {"noise", "capacity_factor", "dispatch", "load_balance", "z", "bias_rate", "inner_size"}


def unlike(config: TransformerConfig, other: TransformerConfig) -> list[str]:
    """Lines that say in what a configuration's model differs from another one's."""
    own, theirs = _computed(config), _computed(other)
    return [f"{name}={own[name]}, there {theirs[name]}" for name in own if own[name] != theirs.get(name)]


def _computed(config: TransformerConfig) -> dict[str, Any]:
    """The settings that decide a model's results, with defaults filled in."""
    plain = {f"model.{each.name}": getattr(config, each.name) for each in fields(config) if each.name not in _FREE}
    plain |= {
        "model.num_kv_heads": config.kv_heads,
        "model.mlp_hidden_size": config.mlp_size,
        "model.head_dim": config.head_size,
        "model.query_scalar": config.query_scalar or config.head_size,
        "rope_scaling": None
        if config.rope_scaling is None or config.rope_scaling.kind == "none"
        else config.rope_scaling,
    }
    experts = config.experts
    if experts is None:
        return plain | {"experts.num_experts": 0}
    own = {
        f"experts.{each.name}": getattr(experts, each.name) for each in fields(experts) if each.name not in _TRAINING
    }
    own["experts.activation"] = experts.activation or config.activation
    own["experts.inner_size"] = experts.inner_size or config.mlp_size
    if experts.alike:
        plain.pop("model.mlp_hidden_size")  # no block has a dense one
    return plain | own


# --------------------------------------------------------------------------------------------------
# Published models by name, with their published sizes.
# --------------------------------------------------------------------------------------------------

GPT2 = {
    "vocab_size": 50_257,
    "max_length": 1024,
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "tie_embeddings": True,
    "use_bias": True,
}
LLAMA3 = {"vocab_size": 128_256, "max_length": 8192, "num_kv_heads": 8, "rope_theta": 500_000.0, "scan_layers": True}

MIXTRAL = {
    "vocab_size": 32_000,
    "max_length": 32_768,
    "num_kv_heads": 8,
    "rope_theta": 1_000_000.0,
    "scan_layers": True,
}

LLAMA2 = {"vocab_size": 32_000, "max_length": 4096, "scan_layers": True}

LLAMA3_2 = {
    **LLAMA3,
    "max_length": 131_072,
    "tie_embeddings": True,
    "rope_scaling": RopeScaling(kind="llama3", factor=32.0, original_length=8192),
}

MISTRAL = {"vocab_size": 32_000, "max_length": 32_768, "num_kv_heads": 8, "window": 4096, "scan_layers": True}

QWEN3 = {
    "vocab_size": 151_936,
    "max_length": 40_960,
    "head_dim": 128,
    "qk_norm": True,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "scan_layers": True,
}
QWEN3_EXPERTS = {"num_experts": 128, "top_k": 8, "load_balance": 0.008}

GEMMA = {
    "activation": "geglu",
    "zero_centered_norm": True,
    "post_norms": True,
    "scale_embeddings": True,
    "tie_embeddings": True,
    "norm_eps": 1e-6,
}
GEMMA2 = {
    **GEMMA,
    "vocab_size": 256_000,
    "max_length": 8192,
    "window": 4096,
    "full_every": 2,
    "attention_softcap": 50.0,
    "logit_softcap": 30.0,
}
GEMMA3 = {**GEMMA, "qk_norm": True, "full_every": 6, "rope_theta": 1_000_000.0, "window_rope_theta": 10_000.0}
# The language models in Gemma 3's larger sizes, without what reads images.
GEMMA3_LARGE = {
    **GEMMA3,
    "vocab_size": 262_208,
    "max_length": 131_072,
    "window": 1024,
    "rope_scaling": RopeScaling(kind="linear", factor=8.0),
}

PRESETS: dict[str, TransformerConfig] = {
    "gpt2-small": TransformerConfig(num_layers=12, hidden_size=768, num_heads=12, **GPT2),
    "gpt2-medium": TransformerConfig(num_layers=24, hidden_size=1024, num_heads=16, **GPT2),
    "gpt2-large": TransformerConfig(num_layers=36, hidden_size=1280, num_heads=20, **GPT2),
    "gpt2-xl": TransformerConfig(num_layers=48, hidden_size=1600, num_heads=25, **GPT2),
    "llama3-8b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=14_336, **LLAMA3),
    "llama3-70b": TransformerConfig(num_layers=80, hidden_size=8192, num_heads=64, mlp_hidden_size=28_672, **LLAMA3),
    # 405B as pretrained at 8192 tokens; the frequency scaling of its later long-context stage is not included.
    "llama3-405b": TransformerConfig(
        num_layers=126, hidden_size=16_384, num_heads=128, mlp_hidden_size=53_248, **LLAMA3
    ),
    "mixtral-8x7b": TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        mlp_hidden_size=14_336,
        experts=ExpertsConfig(num_experts=8, top_k=2, load_balance=0.04),
        **MIXTRAL,
    ),
    "llama2-7b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=11_008, **LLAMA2),
    "llama3.2-1b": TransformerConfig(num_layers=16, hidden_size=2048, num_heads=32, mlp_hidden_size=8192, **LLAMA3_2),
    "mistral-7b": TransformerConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_hidden_size=14_336, **MISTRAL),
    "qwen3-0.6b": TransformerConfig(
        num_layers=28,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        mlp_hidden_size=3072,
        tie_embeddings=True,
        **QWEN3,
    ),
    "qwen3-8b": TransformerConfig(
        num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, mlp_hidden_size=12_288, **QWEN3
    ),
    "qwen3-30b-a3b": TransformerConfig(
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        mlp_hidden_size=6144,
        experts=ExpertsConfig(inner_size=768, **QWEN3_EXPERTS),
        **QWEN3,
    ),
    "qwen3-235b-a22b": TransformerConfig(
        num_layers=94,
        hidden_size=4096,
        num_heads=64,
        num_kv_heads=4,
        mlp_hidden_size=12_288,
        experts=ExpertsConfig(inner_size=1536, **QWEN3_EXPERTS),
        **QWEN3,
    ),
    "gpt-oss-20b": TransformerConfig(
        vocab_size=201_088,
        num_layers=24,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        mlp_hidden_size=2880,
        max_length=131_072,
        use_bias=True,
        sinks=True,
        window=128,
        full_every=2,
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False),
        experts=ExpertsConfig(
            num_experts=32, top_k=4, router_bias=True, activation="clamped_swiglu", load_balance=0.004
        ),
    ),
    "gemma2-2b": TransformerConfig(
        num_layers=26, hidden_size=2304, num_heads=8, num_kv_heads=4, head_dim=256, mlp_hidden_size=9216,
        query_scalar=256, **GEMMA2,
    ),
    "gemma2-9b": TransformerConfig(
        num_layers=42, hidden_size=3584, num_heads=16, num_kv_heads=8, head_dim=256, mlp_hidden_size=14_336,
        query_scalar=256, **GEMMA2,
    ),
    "gemma2-27b": TransformerConfig(
        num_layers=46, hidden_size=4608, num_heads=32, num_kv_heads=16, head_dim=128, mlp_hidden_size=36_864,
        query_scalar=144, **GEMMA2,
    ),
    "gemma3-1b": TransformerConfig(
        vocab_size=262_144, max_length=32_768, num_layers=26, hidden_size=1152, num_heads=4, num_kv_heads=1, head_dim=256,
        mlp_hidden_size=6912, window=512, query_scalar=256, **GEMMA3,
    ),
    "gemma3-4b": TransformerConfig(
        num_layers=34, hidden_size=2560, num_heads=8, num_kv_heads=4, head_dim=256, mlp_hidden_size=10_240,
        query_scalar=256, **GEMMA3_LARGE,
    ),
    "gemma3-12b": TransformerConfig(
        num_layers=48, hidden_size=3840, num_heads=16, num_kv_heads=8, head_dim=256, mlp_hidden_size=15_360,
        query_scalar=256, **GEMMA3_LARGE,
    ),
    "gemma3-27b": TransformerConfig(
        num_layers=62, hidden_size=5376, num_heads=32, num_kv_heads=16, head_dim=128, mlp_hidden_size=21_504,
        query_scalar=168, **GEMMA3_LARGE,
    ),
    # Of its two losses that balance experts the bias alone: the one of each sequence is not here.
    "deepseek-v3": TransformerConfig(
        vocab_size=129_280, max_length=163_840, num_layers=61, hidden_size=7168, num_heads=128, mlp_hidden_size=18_432,
        norm_eps=1e-6, latent=LatentConfig(kv_rank=512, query_rank=1536, mscale=1.0),
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_length=4096, attention_factor=1.0),
        experts=ExpertsConfig(
            num_experts=256, top_k=8, inner_size=2048, first_dense=3, router="sigmoid", groups=8, top_groups=4, scale=2.5,
            shared_size=2048, load_balance=0.0,
        ),
    ),
}  # fmt: skip
"""Name -> configuration: GPT-2 (Radford et al. 2019), without dropout, Llama 2 and 3 (Touvron et al. 2023; Grattafiori et al.
2024), Mistral and Mixtral (Jiang et al. 2023, 2024), Qwen3 (Yang et al. 2025), gpt-oss (OpenAI 2025), Gemma 2 and the language
models of Gemma 3 (Gemma Team 2024, 2025), and DeepSeek-V3 (DeepSeek-AI 2024) without what predicts a second token."""


def preset(name: str) -> TransformerConfig:
    """The configuration called `name`.

    >>> preset("gpt2-small").num_params
    124439808

    Raises:
      ValueError: no preset has that name.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
