"""What is wrong with a transformer's configuration, all of it at once."""

from collections.abc import Iterator
from typing import Any

from axonml_jax.field_types import wrong_types
from axonml_jax.models.experts_config import ExpertsConfig
from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig
from axonml_jax.parallel.tensor.megatron.attentions import ATTENTIONS
from axonml_jax.parallel.tensor.megatron.rope_scaling import RopeScaling
from axonml_jax.synonyms import meant

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
    """A line for each; of values of wrong types, which nothing else can be asked about, these alone."""
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
    """The name of a floating-point dtype however it is given; None for anything else. The common names need no JAX."""
    if isinstance(value, str) and value in _FLOATS:
        return value
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(meant("dtype", value))
    except TypeError:
        return None
    return dtype.name if value is not None and jnp.issubdtype(dtype, jnp.floating) else None
