"""Weights and configurations of Hugging Face's models (`families/`), to and from `Transformer`. Nothing is downloaded."""

import functools
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from axonml_jax._types import named_leaves
from axonml_jax.model.lora.adapters import is_adapter
from axonml_jax.model.lora.int8_base import scales_name
from axonml_jax.model.stored_arrays import StoredArrays
from axonml_jax.model.stored_shards import write_shards
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.families.family import Family
from axonml_jax.models.families.known import config_of, described_in, family_named, family_of
from axonml_jax.models.families.source import ArraySource, names_there, sources
from axonml_jax.models.likeness import unlike
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights.filled_leaf import filled, pending
from axonml_jax.models.weights.int8_leaf import filled_int8
from axonml_jax.parallel.experts.parallel_moe import RouterState
from axonml_jax.sharding.leaf import Checkpointable, Leaf

Values = dict[str, np.ndarray]

SHARD_BYTES = 5 * 10**9
"""Bytes of arrays in a file, where nothing else is said."""

_MODEL = "model/"
_HEAD = "lm_head.weight"
_COMPARED_BYTES = 64 * 2**20
_SHOWN = 100
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


def pretrained(folder: str | os.PathLike, **changes: Any) -> Transformer:
    """A transformer on one device with the weights that `save_pretrained` of a model of one of the families wrote.

    Args:
      folder: with `config.json` and safetensors files.
      changes: to the configuration, such as `param_dtype="bfloat16"` or `split="grid"`.

    Raises:
      ValueError: naming every part of the model that the transformer here does not have; or for a head in the files that is not
        the embedding of a tied configuration: `tie_embeddings=False` uses it.
    """
    config, values = read_pretrained(folder, **changes)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    others = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))  # random streams, routers' biases: arrays too
    made = Transformer(config, rngs=nnx.Rngs(0)) if others else model
    state = nnx.state(made)
    pure = nnx.to_pure_dict(state)
    read = lambda name, leaf: jax.numpy.asarray(np.asarray(values[name]).astype(leaf.dtype))
    leaves = [read(name, leaf) if name in values else leaf for name, leaf in named_leaves(pure).items()]
    nnx.replace_by_pure_dict(state, jax.tree.unflatten(jax.tree.structure(pure), leaves))
    nnx.update(made, state)
    return made


def pretrained_config(folder: str | os.PathLike, **changes: Any) -> TransformerConfig:
    """The configuration of such a folder.

    Args:
      folder, changes: see `pretrained`.

    Raises:
      ValueError: see `pretrained`.
    """
    return config_of(described_in(folder), **changes)


def read_pretrained(folder: str | os.PathLike, **changes: Any) -> tuple[TransformerConfig, Values]:
    """The configuration, and whole arrays by the names of a `state_dict`: for `load_state_dict` of a model on any mesh.

    `load_pretrained` reads in each process no more than what is its own.

    Args:
      folder, changes: see `pretrained`.

    Raises:
      ValueError: see `pretrained`; or listing what the files lack.
    """
    described = described_in(folder)
    config, family = config_of(described, **changes), family_named(described["model_type"])
    stored = _stored(folder)
    every = _checked(sources(family, config), stored, family, config)
    _refuse_shapes(folder, _shapes(config, every), every, stored)
    dtypes = {name: _part(stored[source.places[0].name]).dtype for name, source in every.items()}
    whole = lambda source: (slice(None),) * len(source.shape(stored))
    values = {name: source.read(stored, whole(source), dtypes[name]) for name, source in every.items()}
    return config, values | _uncounted(config, values)


def load_pretrained(model: Checkpointable, folder: str | os.PathLike) -> int:
    """Put such weights into a model on a mesh, array by array; of each a process reads what its devices hold.

    Make the model by a function (`ax.FSDP(lambda: Transformer(config, rngs=nnx.Rngs(0)), mesh)`) and no process ever holds more
    than its part of it, and of one array more. Every process must call this, and read the same files.

    Args:
      model: a parallel model of a `Transformer` with `pretrained_config(folder)`, in any layout and dtype.
      folder: see `pretrained`.

    Returns:
      Bytes of arrays that this process has read.

    Raises:
      ValueError: listing every array that is missing, has no place, or is of another shape.
    """
    described = described_in(folder)
    leaves, family = model.checkpoint_leaves(), family_named(described["model_type"])
    stacked = any(name.startswith(f"{_MODEL}blocks/layer/") for name in leaves)
    stored = _stored(folder)
    own_head = {"tie_embeddings": False} if f"{_MODEL}head/kernel" in leaves and _HEAD in stored else {}
    config = config_of(described, scan_layers=stacked, **own_head)
    every = {_MODEL + name: own for name, own in _checked(sources(family, config), stored, family, config).items()}
    others = {_MODEL + name for name in _others(config)} - every.keys() | set(filter(is_adapter, leaves))
    weights = {name: leaf.shape for name, leaf in leaves.items() if name not in others}
    _refuse_shapes(folder, weights, every, stored)
    arrays = {name: leaf.array for name, leaf in leaves.items() if name not in every}
    for name, source in every.items():
        leaf, fill = leaves[name], partial(filled, source=source, stored=stored)
        if leaf.column_scales is None:
            arrays[name] = fill(leaf)
        else:
            arrays[name], arrays[scales_name(name)] = filled_int8(leaf, fill)
    model.take_leaves(arrays)
    return stored.bytes_read


def check_pretrained(config: TransformerConfig, folder: str | os.PathLike) -> None:
    """Look whether a folder holds the weights of a model with this configuration.

    No array is read, but for a tied embedding and the head that files hold beside it, which must be the same.

    Raises:
      ValueError: saying what of the configuration is another model's, or listing every array that does not fit.
    """
    described = described_in(folder)
    stored, family = _stored(folder), family_named(described.get("model_type"))
    own_head = {"tie_embeddings": False} if not config.tie_embeddings and _HEAD in stored else {}
    if lines := unlike(config, config_of(described, **own_head)):
        raise ValueError(f"{folder} holds another model: " + "; ".join(lines))
    every = _checked(sources(family, config), stored, family, config)
    _refuse_shapes(folder, _shapes(config, every), every, stored)


def write_pretrained(
    folder: str | os.PathLike,
    config: TransformerConfig,
    values: Mapping[str, Any] | Checkpointable,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """The inverse: files that `from_pretrained` reads, with an index where they are several.

    Args:
      folder: made where it is not there.
      config: of the model.
      values: a parallel model, which every process must give and the first one writes, with no more than one array whole at
        a time, matrices with their adapters (`ax.lora`) in them; or its `state_dict()`, which one process writes.
      shard_bytes: bytes of arrays in a file at most.

    Raises:
      ValueError: when the model is of none of the families, the folder holds other arrays, or a `state_dict` adapters.
    """
    family, folder = family_of(config), Path(folder)
    many = isinstance(values, Checkpointable)
    leads = not many or jax.process_index() == 0
    if not many and (adapters := list(filter(is_adapter, values))):
        raise ValueError(f"values has adapters, {', '.join(adapters)}: give the parallel model itself, which is merged")
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
    leaves = values.checkpoint_leaves() if many else {_MODEL + name: Leaf(value) for name, value in values.items()}
    arrays = []
    for there, parts in names_there(sources(family, config)).items():
        own = [(leaves[_MODEL + name], index, place) for name, index, place in parts]
        arrays.append(pending(there if there.startswith("lm_head") else family.prefix + there, own))
    write_shards(folder, arrays, most=shard_bytes, metadata={"format": "pt"}, writes=leads)
    if leads:  # after what may be refused, and as a new file: the old one may be a link to another folder's
        new = folder / "config.json.new"
        new.write_text(json.dumps(family.describe(config), indent=2) + "\n", encoding="utf-8")
        new.replace(folder / "config.json")


def _stored(folder: str | os.PathLike) -> StoredArrays:
    return StoredArrays(folder, prefixes=("transformer.", "model."))


def _checked(
    every: dict[str, ArraySource], stored: StoredArrays, family: Family, config: TransformerConfig
) -> dict[str, ArraySource]:
    """The sources, all of which are there, and nothing else is."""
    wanted = dict.fromkeys(place.name for source in every.values() for place in source.places)
    missing = [name for name in wanted if name not in stored]
    spare = {_HEAD} if config.tie_embeddings else set()
    unread = lambda name: name in spare or name.endswith(_BUFFERS) or name.startswith(family.unread(config))
    left = [name for name in stored if name not in wanted and not unread(name)]
    if missing or left:
        lines = [f"  {name}: missing" for name in missing] + [f"  {name}: has no place here" for name in left]
        raise ValueError(
            f"these are not the arrays of the {family.name} that config.json describes:\n" + _listed(lines)
        )
    if config.tie_embeddings and _HEAD in stored:
        _refuse_other_head(stored, every["embed/embedding"].places[0].name)
    return every


def _refuse_other_head(stored: StoredArrays, table: str) -> None:
    """Refuse a head that is not the embedding it is tied to: the model here would be without it."""
    head, embedding = stored[_HEAD], stored[table]
    if head.shape == embedding.shape and len(head.shape) == 2:
        rows = max(1, _COMPARED_BYTES // (8 * head.shape[1]))
        starts = range(0, head.shape[0], rows)
        parts = [(slice(start, min(start + rows, head.shape[0])), slice(None)) for start in starts]
        if all(np.array_equal(head[part], embedding[part], equal_nan=True) for part in parts):
            return
    raise ValueError(
        f"{head.file} has a head of its own, {head.name} {head.shape}, other than {embedding.name} {embedding.shape}, to which "
        'the configuration ties it ("tie_word_embeddings" in config.json, tie_embeddings here): it would be left out. Use it '
        "with tie_word_embeddings false (`pretrained(folder, tie_embeddings=False)`), or take it out of the files"
    )


@functools.lru_cache(maxsize=1)
def _abstract(config: TransformerConfig) -> Transformer:
    """A model of that configuration, without values: tracing a deep one takes long."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def _shapes(config: TransformerConfig, every: Mapping[str, ArraySource]) -> dict[str, tuple[int, ...]]:
    """Of the arrays that files hold: those of a model, but for what is no weight and has no source."""
    leaves, others = named_leaves(nnx.to_pure_dict(nnx.state(_abstract(config)))), _others(config) - every.keys()
    return {name: tuple(leaf.shape) for name, leaf in leaves.items() if name not in others}


def _refuse_shapes(
    folder: str | os.PathLike,
    here: Mapping[str, tuple[int, ...]],
    every: Mapping[str, ArraySource],
    stored: StoredArrays,
) -> None:
    problems = [f"  {name}: the model has none" for name in every if name not in here]
    problems += [f"  {name}: the folder has none" for name in here if name not in every]
    shapes = {name: (own, every[name].shape(stored)) for name, own in here.items() if name in every}
    problems += [f"  {name}: shape {own}, there {there}" for name, (own, there) in shapes.items() if own != there]
    if problems:
        raise ValueError(f"{folder} holds weights of another model:\n" + _listed(problems))


def _listed(lines: list[str]) -> str:
    return "\n".join(lines[:_SHOWN] + [f"  ... and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN))


def _others(config: TransformerConfig) -> set[str]:
    """Arrays of a model that are no weights: routers' biases and counts, random streams."""
    return {*named_leaves(nnx.to_pure_dict(nnx.state(_abstract(config), nnx.Not(nnx.Param))))}


def _uncounted(config: TransformerConfig, values: Values) -> Values:
    """What routers have counted since the last update, of which files say nothing: no token."""
    kept = named_leaves(nnx.to_pure_dict(nnx.state(_abstract(config), RouterState)))
    return {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in kept.items() if name not in values}


def _part(array: Any) -> np.ndarray:
    """The least part of an array: of its dtype."""
    return array[tuple(slice(0, 1) for _ in array.shape)]
