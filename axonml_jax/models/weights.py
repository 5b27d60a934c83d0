"""Reads and writes a model's arrays in Hugging Face files, part by part."""

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.base import named_leaves
from axonml_jax.collectives.primitives import axis_index, sum_over
from axonml_jax.compat.order import no_mesh_around
from axonml_jax.layers.experts import RouterState
from axonml_jax.mesh.axes import as_axes
from axonml_jax.model.lora import dequantized, is_adapter, merged, quantized, scales_name
from axonml_jax.model.safetensors import Pending, StoredArrays, write_shards
from axonml_jax.model.view import named_arrays
from axonml_jax.models.config import TransformerConfig, unlike
from axonml_jax.models.families.family import ArraySource, Family, Place, assembled, names_there, shape_there, sources
from axonml_jax.models.families.known import config_of, described_in, family_named, family_of
from axonml_jax.models.transformer import Transformer
from axonml_jax.sharding.layout import MODEL, Checkpointable, Layout, Leaf, from_stored, to_stored

# --------------------------------------------------------------------------------------------------
# Weights from files into matrices that rest as int8: read as floats where they will rest, and quantized there.
# --------------------------------------------------------------------------------------------------


def filled_int8(leaf: Leaf, fill: Callable[[Leaf], Any]) -> tuple[Any, Any]:
    """int8 values and scales for a leaf and its scales; each device briefly holds its part of one matrix or stack as floats.

    Args:
      leaf: with scales.
      fill: reads a leaf from the files, in its dtype, layout and place.
    """
    scales = leaf.column_scales
    assert scales is not None
    like = jax.ShapeDtypeStruct(np.shape(leaf.array), scales.dtype, sharding=getattr(leaf.array, "sharding", None))
    floats = fill(replace(leaf, array=like))
    places = getattr(leaf.array, "sharding", None), getattr(scales.array, "sharding", None)
    if not isinstance(places[0], NamedSharding) or not isinstance(places[1], NamedSharding):
        return _stored_int8(floats, leaf.layout, scales.layout)
    on_device = places[0].with_memory_kind("device"), places[1].with_memory_kind("device")
    make: Any = jax.jit(_stored_int8, static_argnums=(1, 2), out_shardings=on_device)
    made = make(jax.device_put(floats, on_device[0]), leaf.layout, scales.layout)
    return tuple(jax.block_until_ready(jax.device_put(made, places)))


def _stored_int8(floats: Any, layout: Layout | None, scales_layout: Layout | None) -> tuple[Any, Any]:
    matrix, scales = quantized(floats if layout is None else from_stored(floats, layout))
    layouts = (matrix, layout), (scales, scales_layout)
    stored = [array if own is None else to_stored(array, own) for array, own in layouts]
    return stored[0], stored[1]


# --------------------------------------------------------------------------------------------------
# One element of an array that is split over devices, such as one expert's or one layer's weights out of a stack.
# --------------------------------------------------------------------------------------------------


def element_on_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """Fetch `array[index]` to this process's host memory; devices send only that element, not its stack.

    Args:
      array: [..., *rest], anything that has elements; every process of its mesh calls alike.
      index: one number per leading dim; () is the whole array.
    """
    if not isinstance(array, jax.Array) or not isinstance(sharding := array.sharding, NamedSharding):
        return np.asarray(array[index] if index else array)
    spec = (*sharding.spec, *(None,) * (array.ndim - len(sharding.spec)))
    if any(as_axes(each or ()) for each in spec[: len(index)]) and sharding.memory_kind not in (None, "device"):
        array = jax.device_put(array, sharding.with_memory_kind("device"))
    found = _program(sharding.mesh, spec, len(index))(array, np.asarray(index, np.int32))
    return np.asarray(found.addressable_data(0))


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh, spec: tuple[Any, ...], count: int) -> Any:
    """The program that reads `array[index]`, with `count` indices, for arrays sharded alike."""
    axes = tuple(as_axes(each or ()) for each in spec[:count])
    if not any(axes):
        read = lambda array, index: array[tuple(index)] if count else array.copy()
    else:
        read = jax.shard_map(
            lambda block, index: _from_owner(block, index, axes),
            mesh=mesh,
            in_specs=(PartitionSpec(*spec), PartitionSpec()),
            out_specs=PartitionSpec(*spec[count:]),
        )
    return jax.jit(read, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _from_owner(block: jax.Array, index: jax.Array, axes: tuple[tuple[str, ...], ...]) -> jax.Array:
    """Broadcast an element's part from the rank that has it, as bits, by a sum with zeros."""
    mine = jnp.asarray(True)
    for at, over in zip(index, axes, strict=True):
        size = block.shape[0]
        place = at - size * (axis_index(over) if over else 0)
        mine &= (place >= 0) & (place < size)
        block = jax.lax.dynamic_index_in_dim(block, jnp.clip(place, 0, size - 1), 0, keepdims=False)
    bits = jax.lax.bitcast_convert_type(block, jnp.dtype(f"uint{8 * block.dtype.itemsize}"))
    names = tuple(axis for over in axes for axis in over)
    return jax.lax.bitcast_convert_type(sum_over(jnp.where(mine, bits, 0), names), block.dtype)


# --------------------------------------------------------------------------------------------------
# A leaf of a model on a mesh from the arrays of files, of which each device reads its part, and back.
# --------------------------------------------------------------------------------------------------


def filled(leaf: Leaf, source: ArraySource, stored: StoredArrays) -> Any:
    """Read an array from the files in the shape, dtype and sharding of a leaf, each device's part by itself.

    Args:
      leaf: says where it will rest, and how.
      source: where it is among the arrays of the files.
      stored: these.
    """
    sharding = getattr(leaf.array, "sharding", None)
    whole, shape = leaf.shape, tuple(np.shape(leaf.array))
    if sharding is None:
        return source.read(stored, (slice(None),) * len(whole), leaf.dtype)
    on_device = sharding.with_memory_kind("device") if sharding.memory_kind not in (None, "device") else sharding
    parts: dict[tuple, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        bounds = tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
        if bounds not in parts:
            parts[bounds] = _padded_part(source, stored, whole, bounds, leaf.dtype)
        return parts[bounds]

    if len(shape) == len(whole):
        array = jax.make_array_from_callback(shape, on_device, part)
    else:
        assert leaf.layout is not None
        value = to_stored(source.read(stored, (slice(None),) * len(whole), leaf.dtype), leaf.layout)
        array = jax.make_array_from_callback(shape, on_device, lambda index: np.asarray(value)[index])
    array = jax.block_until_ready(array if on_device is sharding else jax.device_put(array, sharding))
    parts.clear()  # the host's copies go before the next array is read, not when cycles are collected
    return array


def _padded_part(
    source: ArraySource, stored: StoredArrays, whole: tuple[int, ...], bounds: tuple, dtype: Any
) -> np.ndarray:
    """A part of an array as it is stored, with zeros beyond the last element of every dim."""
    inside = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in zip(bounds, whole, strict=True))
    if any(each.start >= each.stop for each in inside):  # padding alone
        return np.zeros([stop - start for start, stop in bounds], dtype)
    found = source.read(stored, inside, dtype)
    more = [(0, stop - start - size) for (start, stop), size in zip(bounds, found.shape, strict=True)]
    return np.pad(found, more) if any(end for _, end in more) else found


def pending(name: str, parts: list[tuple[Leaf, tuple[int, ...], Place]]) -> Pending:
    """A published array to write, made of parts of leaves here.

    Args:
      name: of the array there.
      parts: of each the leaf, the index of its first dims, and its place in the array there.
    """
    leaf, index, _ = parts[0]
    places = [place for _, _, place in parts]
    shape = shape_there(places, leaf.shape[len(index) :])
    fetch: Callable[[], np.ndarray] = lambda: assembled(places, [_on_host(own, at) for own, at, _ in parts])
    return Pending(name, shape, jax.numpy.dtype((leaf.column_scales or leaf).dtype).name, fetch)


def _on_host(leaf: Leaf, index: tuple[int, ...]) -> np.ndarray:
    """Fetch `whole[index]` of a leaf to this process's host memory, as floats, merged with its adapters."""
    if leaf.low_rank is not None:
        first, second, scale = leaf.low_rank
        own, a, b = (_on_host(each, index) for each in (replace(leaf, low_rank=None), first, second))
        return merged(own, a, b, scale)
    if leaf.column_scales is not None:
        own = replace(leaf, column_scales=None)
        return dequantized(_on_host(own, index), _on_host(leaf.column_scales, index))
    return element_on_host(leaf.whole(), index)


# --------------------------------------------------------------------------------------------------
# Weights and configurations of Hugging Face's models (`families/`), to and from `Transformer`. Nothing is downloaded.
# --------------------------------------------------------------------------------------------------

Values = dict[str, np.ndarray]

SHARD_BYTES = 5 * 10**9
"""Bytes of arrays in a file, where nothing else is said."""

_HEAD = "lm_head.weight"
_COMPARED_BYTES = 64 * 2**20
_SHOWN = 100
_BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


@no_mesh_around()
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
    """The configuration of a folder that `save_pretrained` wrote.

    Args:
      folder, changes: see `pretrained`.

    Raises:
      ValueError: see `pretrained`.
    """
    return config_of(described_in(folder), **changes)


def read_pretrained(folder: str | os.PathLike, **changes: Any) -> tuple[TransformerConfig, Values]:
    """Read the configuration and full arrays by `state_dict` names, for `load_state_dict` of a model on any mesh.

    `load_pretrained` reads in each process no more than what is its own.

    Args:
      folder, changes: see `pretrained`.

    Raises:
      ValueError: see `pretrained`; or listing what the files lack.
    """
    described = described_in(folder)
    config, family = config_of(described, **changes), family_named(described["model_type"])
    stored = _stored_arrays(folder)
    every = _checked(sources(family, config), stored, family, config)
    _refuse_shapes(folder, _shapes(config, every), every, stored)
    dtypes = {name: _part(stored[source.places[0].name]).dtype for name, source in every.items()}
    whole = lambda source: (slice(None),) * len(source.shape(stored))
    values = {name: source.read(stored, whole(source), dtypes[name]) for name, source in every.items()}
    return config, values | _uncounted(config, values)


@no_mesh_around()
def load_pretrained(model: Checkpointable, folder: str | os.PathLike) -> int:
    """Load published weights into a model on a mesh, array by array; each process reads what its devices hold.

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
    stacked = any(name.startswith(f"{MODEL}blocks/layer/") for name in leaves)
    stored = _stored_arrays(folder)
    own_head = {"tie_embeddings": False} if f"{MODEL}head/kernel" in leaves and _HEAD in stored else {}
    config = config_of(described, scan_layers=stacked, **own_head)
    every = {MODEL + name: own for name, own in _checked(sources(family, config), stored, family, config).items()}
    others = {MODEL + name for name in _others(config)} - every.keys() | set(filter(is_adapter, leaves))
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
    """Check that a folder holds the weights of a model with this configuration.

    No array is read, but for a tied embedding and the head that files hold beside it, which must be the same.

    Raises:
      ValueError: saying what of the configuration is another model's, or listing every array that does not fit.
    """
    described = described_in(folder)
    stored, family = _stored_arrays(folder), family_named(described.get("model_type"))
    own_head = {"tie_embeddings": False} if not config.tie_embeddings and _HEAD in stored else {}
    if lines := unlike(config, config_of(described, **own_head)):
        raise ValueError(f"{folder} holds another model: " + "; ".join(lines))
    every = _checked(sources(family, config), stored, family, config)
    _refuse_shapes(folder, _shapes(config, every), every, stored)


@no_mesh_around()
def write_pretrained(
    folder: str | os.PathLike,
    config: TransformerConfig,
    values: nnx.Module | Mapping[str, Any] | Checkpointable,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write files that `from_pretrained` reads, with an index if there are several: the inverse of `load_pretrained`.

    Args:
      folder: made where it is not there.
      config: of the model.
      values: a parallel model: every process must call, the first one writes, and no more than one array is whole at a time;
        adapters (`ax.lora`) are merged into their matrices. Or a `state_dict()` or a plain `Transformer`, such as the parallel
        model's `module`, which one process alone writes.
      shard_bytes: bytes of arrays in a file at most.

    Raises:
      TypeError: for anything else.
      ValueError: when the model is of none of the families or of another configuration, the folder holds other arrays, or a
        `state_dict` adapters.
    """
    family, folder = family_of(config), Path(folder)
    many = isinstance(values, Checkpointable)
    leads = not many or jax.process_index() == 0
    leaves = values.checkpoint_leaves() if many else _leaves_of(values)
    every = sources(family, config)
    _refuse_other_model(config, every, leaves)
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
    arrays = []
    for there, parts in names_there(every).items():
        own = [(leaves[MODEL + name], index, place) for name, index, place in parts]
        arrays.append(pending(there if there.startswith("lm_head") else family.prefix + there, own))
    write_shards(folder, arrays, most=shard_bytes, metadata={"format": "pt"}, writes=leads)
    if leads:  # after what may be refused, and as a new file: the old one may be a link to another folder's
        new = folder / "config.json.new"
        new.write_text(json.dumps(family.describe(config), indent=2) + "\n", encoding="utf-8")
        new.replace(folder / "config.json")


def _leaves_of(values: nnx.Module | Mapping[str, Any]) -> dict[str, Leaf]:
    """The arrays of a plain module or of a `state_dict`, without adapters."""
    try:
        named = named_arrays(values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"write_pretrained: {error}") from error
    if adapters := list(filter(is_adapter, named)):
        raise ValueError(f"values has adapters, {', '.join(adapters)}: give the parallel model itself, which is merged")
    return {MODEL + name: Leaf(value) for name, value in named.items()}


def _refuse_other_model(
    config: TransformerConfig, every: Mapping[str, ArraySource], leaves: Mapping[str, Leaf]
) -> None:
    """Refuse arrays that do not belong to a configuration."""
    wanted = {name: shape for name, shape in _shapes(config, every).items() if name in every}
    here = {name: leaf.shape for name in wanted if (leaf := leaves.get(MODEL + name)) is not None}
    problems = [f"  {name}: missing" for name in wanted if name not in here]
    problems += [f"  {name}: shape {own}, not {wanted[name]}" for name, own in here.items() if own != wanted[name]]
    if problems:
        raise ValueError("write_pretrained: the model is not of the configuration given:\n" + _listed(problems))


def _stored_arrays(folder: str | os.PathLike) -> StoredArrays:
    return StoredArrays(folder, prefixes=("transformer.", "model."))


def _checked(
    every: dict[str, ArraySource], stored: StoredArrays, family: Family, config: TransformerConfig
) -> dict[str, ArraySource]:
    """Check that all sources exist in the files, and nothing else does."""
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
    """Refuse a head that differs from the embedding it is tied to: the model here would drop it."""
    head, embedding = stored[_HEAD], stored[table]
    if head.shape == embedding.shape and len(head.shape) == 2:
        rows = max(1, _COMPARED_BYTES // (8 * head.shape[1]))
        starts = range(0, head.shape[0], rows)
        parts = [(slice(start, min(start + rows, head.shape[0])), slice(None)) for start in starts]
        if all(np.array_equal(head[part], embedding[part], equal_nan=True) for part in parts):
            return
    raise ValueError(
        f"{head.file} has a head, {head.name} {head.shape}, that differs from {embedding.name} {embedding.shape}, to which the "
        'configuration ties it ("tie_word_embeddings" in config.json, tie_embeddings here), so the head would be ignored. To '
        "use it, set tie_word_embeddings to false (`pretrained(folder, tie_embeddings=False)`); else remove it from the files"
    )


@functools.lru_cache(maxsize=1)
def _abstract(config: TransformerConfig) -> Transformer:
    """A model of a configuration as shapes; cached, as tracing a deep one is slow."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def _shapes(config: TransformerConfig, every: Mapping[str, ArraySource]) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that files hold: a model's, except non-weights without a source."""
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
    """Names of a model's arrays that are not weights: routers' biases and counts, random streams."""
    return {*named_leaves(nnx.to_pure_dict(nnx.state(_abstract(config), nnx.Not(nnx.Param))))}


def _uncounted(config: TransformerConfig, values: Values) -> Values:
    """Zeros for the counts that routers keep, which files do not hold."""
    kept = named_leaves(nnx.to_pure_dict(nnx.state(_abstract(config), RouterState)))
    return {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in kept.items() if name not in values}


def _part(array: Any) -> np.ndarray:
    """An array's first element in every dim, to learn its dtype."""
    return array[tuple(slice(0, 1) for _ in array.shape)]
