"""What reading and writing a family of published models needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.array_place import Place

Places = dict[str, Place]
"""For every name of an array here, where it is there. One expert's part of a stack is `NAME@EXPERT`."""

Described = Mapping[str, Any]
"""What a `config.json` says."""


OFF: dict[str, Any] = {
    "latent": None,
    "qkv_bias": False,
    "qk_norm": False,
    "sinks": False,
    "window": None,
    "full_every": None,
    "use_bias": False,
    "query_scalar": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "window_rope_theta": None,
    "zero_centered_norm": False,
    "post_norms": False,
    "scale_embeddings": False,
}
"""Options of `TransformerConfig` that some families have, where they are off."""


@dataclass(frozen=True)
class Family:
    """A family of models that `Transformer` can be.

    Attributes:
      name: `model_type` in a `config.json`.
      prefix: what names of arrays begin with there, but for the head's.
      problems: a line for every part of a model that the transformer here does not have.
      settings: the arguments of `TransformerConfig`.
      describe: the `config.json` of a configuration.
      is_this: whether a configuration is of this family.
      places: where each array is.
      unread: how names of arrays begin that are there and no part of the transformer here.
    """

    name: str
    prefix: str
    problems: Callable[[Described], Iterator[str]]
    settings: Callable[[Described], dict[str, Any]]
    describe: Callable[[TransformerConfig], dict[str, Any]]
    is_this: Callable[[TransformerConfig], bool]
    places: Callable[[TransformerConfig], Places]
    unread: Callable[[TransformerConfig], tuple[str, ...]] = lambda config: ()


def other_than(described: Described, fine: Mapping[str, tuple]) -> Iterator[str]:
    """What a `config.json` says that the transformer here does not do.

    Args:
      described: the `config.json`.
      fine: setting -> the values of it that are; the first is its default.
    """
    for name, values in fine.items():
        if described.get(name, values[0]) not in values:
            yield f"{name}={described[name]!r}"


def quantized(described: Described) -> Iterator[str]:
    """That the weights are in a dtype which is not read here."""
    method = (described.get("quantization_config") or {}).get("quant_method")
    if method:
        yield f"weights quantized by {method}: save them in bfloat16 first, without quantization_config"


def has_only(config: TransformerConfig, **options: Any) -> bool:
    """Whether a configuration has these options, and none other of those that only some families have.

    Args:
      config: the configuration.
      options: `TransformerConfig`'s, and what they must be; those not given must be off.
    """
    return all(getattr(config, name) == value for name, value in (OFF | options).items())
