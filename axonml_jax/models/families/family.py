"""A published family of models as data: its configuration, array names and layouts, rotary positions, windows."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from axonml_jax.layers.options import RopeScaling
from axonml_jax.models.config import ExpertsConfig, TransformerConfig

# --------------------------------------------------------------------------------------------------
# Where an array of a model is among published ones, and how it lies there: read and written in parts.
# --------------------------------------------------------------------------------------------------

Index = tuple[slice, ...]
"""One slice per dim, without a step."""


class Sliced(Protocol):
    """Protocol of an array of which parts can be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    def __getitem__(self, index: Index) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an array of ours is in the published files: an array there, or a part of one.

    Attributes:
      name: of the array there.
      turned: whether its last two dims are exchanged there (`torch.nn.Linear`: [out, in]).
      part: which of `parts` equal parts of the last dim there this is.
      parts: how many arrays lie side by side there.
      mixed: whether these take turns element by element, instead of one after the other.
    """

    name: str
    turned: bool = False
    part: int = 0
    parts: int = 1
    mixed: bool = False

    def shape(self, there: Sequence[int]) -> tuple[int, ...]:
        """Our shape, from the published array's.

        >>> Place(name="c_attn", part=1, parts=3).shape((4, 12)), Place(name="up", turned=True).shape((8, 4))
        ((4, 4), (4, 8))
        """
        *first, last = there
        if last % self.parts:
            raise ValueError(
                f"{self.name} of shape {tuple(there)} holds {self.parts} arrays side by side: its last dim must divide"
            )
        own = (*first, last // self.parts)
        return (*own[:-2], own[-1], own[-2]) if self.turned else own

    def read(self, array: Sliced, index: Index) -> np.ndarray:
        """Read a part of our array from the published one, and no more than that.

        Args:
          array: the one there.
          index: of each dim here.
        """
        there = (*index[:-2], index[-1], index[-2]) if self.turned else index
        if self.parts > 1:
            size = array.shape[-1] // self.parts
            start, stop, _ = there[-1].indices(size)
            spread = (
                slice(start * self.parts, stop * self.parts)
                if self.mixed
                else slice(self.part * size + start, self.part * size + stop)
            )
            there = (*there[:-1], spread)
        found = array[there]
        if self.mixed:
            found = found[..., self.part :: self.parts]
        return np.swapaxes(found, -1, -2) if self.turned else found


def assembled(places: Sequence[Place], values: Sequence[Any]) -> np.ndarray:
    """Assemble a published array from all its parts here: the inverse of `Place.read`."""
    order = sorted(zip(places, values, strict=True), key=lambda pair: pair[0].part)
    arrays = [np.swapaxes(value, -1, -2) if place.turned else value for place, value in order]
    if len(arrays) == 1:
        return arrays[0]
    if places[0].mixed:
        return np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    return np.concatenate(arrays, axis=-1)


# --------------------------------------------------------------------------------------------------
# What reading and writing a family of published models needs.
# --------------------------------------------------------------------------------------------------

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
"""Options of `TransformerConfig` that only some families use, with the values that switch them off."""


@dataclass(frozen=True)
class Family:
    """A family of published models that `Transformer` can be.

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
    """Yield the settings of a `config.json` that the transformer here does not support.

    Args:
      described: the `config.json`.
      fine: setting -> its supported values; the first is its default.
    """
    for name, values in fine.items():
        if described.get(name, values[0]) not in values:
            yield f"{name}={described[name]!r}"


def quantized(described: Described) -> Iterator[str]:
    """Yield a problem if the weights are quantized, which is not read here."""
    method = (described.get("quantization_config") or {}).get("quant_method")
    if method:
        yield f"weights quantized by {method}: save them in bfloat16 first, without quantization_config"


def has_only(config: TransformerConfig, **options: Any) -> bool:
    """Whether a configuration has these options, and no other of the options that only some families have.

    Args:
      config: the configuration.
      options: `TransformerConfig`'s, and what they must be; those not given must be off.
    """
    return all(getattr(config, name) == value for name, value in (OFF | options).items())


# --------------------------------------------------------------------------------------------------
# Where every array of a model is among published ones: stacks of layers and of experts made of many there.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArraySource:
    """The places of one of our arrays in published files.

    Attributes:
      dims: sizes of its first dims, each index of which has a place of its own.
      places: of these, the last dim's index growing fastest.
    """

    dims: tuple[int, ...]
    places: tuple[Place, ...]

    def shape(self, arrays: Mapping[str, Sliced]) -> tuple[int, ...]:
        """The shape of our array."""
        return (*self.dims, *self.places[0].shape(arrays[self.places[0].name].shape))

    def read(self, arrays: Mapping[str, Sliced], index: Index, dtype: Any) -> np.ndarray:
        """Read a part of our array, and no more than that.

        Args:
          arrays: those there.
          index: one slice per dim of our array.
          dtype: of the result.
        """
        shape = self.shape(arrays)
        ranges = [range(*each.indices(size)) for each, size in zip(index, shape, strict=True)]
        rest = tuple(slice(each.start, each.stop) for each in ranges[len(self.dims) :])
        found = np.empty([len(each) for each in ranges], dtype)
        for at, indices in enumerate(itertools.product(*ranges[: len(self.dims)])):
            place = self.places[np.ravel_multi_index(indices, self.dims) if self.dims else 0]
            own = np.unravel_index(at, found.shape[: len(self.dims)]) if self.dims else ()
            found[own] = place.read(arrays[place.name], rest)
        return found


def sources(family: Family, config: TransformerConfig) -> dict[str, ArraySource]:
    """The source of every array of a model, by its name in a `state_dict`."""
    found = {name: ArraySource((), (place,)) for name, place in family.places(config).items()}
    found = _together(found, r"(.*)@(\d+)", lambda match: (match[1], int(match[2])))
    if config.scan_layers:
        found = _together(found, r"blocks/(\d+)/(.*)", lambda match: (f"blocks/layer/{match[2]}", int(match[1])))
    return found


def names_there(every: Mapping[str, ArraySource]) -> dict[str, list[tuple[str, tuple[int, ...], Place]]]:
    """For each published array, the parts of ours that it is made of: (our name, index of the first dims, place)."""
    found: dict[str, list[tuple[str, tuple[int, ...], Place]]] = {}
    for name, source in every.items():
        for place, index in zip(source.places, np.ndindex(*source.dims), strict=True):
            found.setdefault(place.name, []).append((name, index, place))
    return found


def shape_there(places: Sequence[Place], here: Sequence[int]) -> tuple[int, ...]:
    """The shape of a published array, whose parts here each have the shape `here`.

    >>> shape_there([Place(name="c_attn", part=i, parts=3) for i in range(3)], (4, 4))
    (4, 12)
    """
    own = tuple(here)
    if places[0].turned:
        own = (*own[:-2], own[-1], own[-2])
    return (*own[:-1], own[-1] * places[0].parts)


def _together(every: Mapping[str, ArraySource], pattern: str, named: Any) -> dict[str, ArraySource]:
    """Combine sources whose names match a pattern into one with another leading dim; others are unchanged."""
    found: dict[str, ArraySource] = {}
    parts: dict[str, dict[int, ArraySource]] = {}
    for name, source in every.items():
        if (match := re.fullmatch(pattern, name)) is None:
            found[name] = source
        else:
            whole, index = named(match)
            parts.setdefault(whole, {})[index] = source
    for whole, own in parts.items():
        inner = own[0].dims
        places = tuple(place for index in sorted(own) for place in own[index].places)
        assert len(places) == len(own) * math.prod(inner), whole
        found[whole] = ArraySource((len(own), *inner), places)
    return found


# --------------------------------------------------------------------------------------------------
# Rotary positions as a `config.json` says them, and back.
# --------------------------------------------------------------------------------------------------

_NAMES = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}


def rope_problems(described: Described) -> Iterator[str]:
    """Yield the rotary settings that the transformer here does not support."""
    rope = _rope(described)
    if _kind(rope) not in ("default", *_NAMES):
        yield f"rope scaling {rope}"
    if rope.get("partial_rotary_factor", described.get("partial_rotary_factor")) not in (None, 1, 1.0):
        yield "partial_rotary_factor: only whole heads are turned"
    if _kind(rope) in _NAMES and rope.get("factor") is None:
        yield f"rope scaling {rope} without a factor"


def rope_settings(described: Described, theta: float = 10_000.0) -> dict[str, Any]:
    """The arguments of `TransformerConfig` for rotary positions.

    Args:
      described: the `config.json`.
      theta: the base of the frequencies, where it gives none.
    """
    rope = _rope(described)
    found: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", described.get("rope_theta", theta)))}
    if (kind := _kind(rope)) != "default":
        longest = {"original_max_position_embeddings": described["max_position_embeddings"]} | dict(rope)
        own = {name: longest[there] for name, there in _NAMES[kind].items() if longest.get(there) is not None}
        if kind == "yarn" and "attention_factor" not in own and rope.get("mscale") and rope.get("mscale_all_dim"):
            plain = RopeScaling(kind="yarn", factor=rope["factor"], original_length=1).attention_scale - 1
            own["attention_factor"] = (1 + rope["mscale"] * plain) / (1 + rope["mscale_all_dim"] * plain)
        found["rope_scaling"] = RopeScaling(kind=kind, **own)
    return found


def rope_description(config: TransformerConfig) -> dict[str, Any]:
    """The rotary settings of a `config.json`, for readers old and new."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    found: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "none":
        values = {there: getattr(scaling, name) for name, there in _NAMES[scaling.kind].items()}
        rope |= {"rope_type": scaling.kind} | {name: value for name, value in values.items() if value is not None}
        found["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return found


def _rope(described: Described) -> dict[str, Any]:
    return described.get("rope_parameters") or described.get("rope_scaling") or {}


def _kind(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


# --------------------------------------------------------------------------------------------------
# Sliding windows as a `config.json` says them, block by block, and back.
# --------------------------------------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"


def window_problems(described: Described) -> Iterator[str]:
    """Yield the window settings that the transformer here does not support."""
    kinds, layers = _kinds(described), described["num_hidden_layers"]
    if strange := sorted({*kinds} - {SLIDING, FULL}):
        yield f"layer_types: {', '.join(strange)}, where {SLIDING} and {FULL} are known"
    elif len(kinds) != layers:
        yield f"layer_types of {len(kinds)} layers for num_hidden_layers={layers}"
    elif _period(kinds) == 0:
        yield f"layer_types={kinds}: all must slide, none, or all but every so many-th"


def window_settings(described: Described) -> dict[str, Any]:
    """The arguments of `TransformerConfig` for windows."""
    kinds = _kinds(described)
    if SLIDING not in kinds:
        return {}
    return {"window": described["sliding_window"], "full_every": _period(kinds)}


def window_description(config: TransformerConfig) -> dict[str, Any]:
    """The window settings of a `config.json`."""
    kinds = [FULL if config.window_of(block) is None else SLIDING for block in range(config.num_layers)]
    slides = config.window is not None
    return {
        "sliding_window": config.window,
        "use_sliding_window": slides,
        "max_window_layers": 0 if slides else config.num_layers,
        "layer_types": kinds,
    }


def _kinds(described: Described) -> list[str]:
    """The kind of attention of each block, `SLIDING` or `FULL`."""
    layers, window = described["num_hidden_layers"], described.get("sliding_window")
    if window is None or not described.get("use_sliding_window", True):
        return [FULL] * layers
    if given := described.get("layer_types"):
        return list(given)
    first = described.get("max_window_layers", 0)
    return [SLIDING if block >= first else FULL for block in range(layers)]


def _period(kinds: list[str]) -> int | None:
    """The period after which a block is full; None if all or none are, 0 if there is no period."""
    if len(set(kinds)) <= 1:
        return None
    every = kinds.index(FULL) + 1
    alike = all((kind == FULL) == ((block + 1) % every == 0) for block, kind in enumerate(kinds))
    return every if alike and every > 1 and set(kinds) == {FULL, SLIDING} else 0


def plain_softmax(experts: ExpertsConfig) -> bool:
    """Whether routers are softmax without bias or shared experts; training-only settings, as a capacity, may differ."""
    plain = (experts.router, experts.router_bias, experts.shared_size)
    return plain == ("softmax", False, 0) and experts.activation in (None, "swiglu")
