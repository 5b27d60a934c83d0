"""Which parallel layer a Flax layer becomes, and the change of its class that makes it one (its parameters stay)."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.parallel.tensor.auto.fused import FusedColumnLinear
from axonml_jax.parallel.tensor.auto.general import (
    SplitEinsum,
    SplitHeadsAttention,
    SplitLinearGeneral,
    letters_of,
)
from axonml_jax.parallel.tensor.auto.split_axes import SplitAxes
from axonml_jax.parallel.tensor.axonn.conv3d import ParallelConv
from axonml_jax.parallel.tensor.axonn.embedding3d import ParallelEmbedding
from axonml_jax.parallel.tensor.axonn.grid import Grid
from axonml_jax.parallel.tensor.axonn.linear3d import ParallelLinear
from axonml_jax.parallel.tensor.megatron.column import ColumnParallelLinear
from axonml_jax.parallel.tensor.megatron.embedding import VocabParallelEmbedding
from axonml_jax.parallel.tensor.megatron.row import RowParallelLinear
from axonml_jax.parallel.tensor.specs import SPEC, UNITS, WHOLE, Units

Change = tuple[type, dict[str, Any], dict[str, PartitionSpec], str]
"""The new class, its attributes, the specs of its parameters, and how it communicates."""

GATHERS = "columns, gathers its output"
EASY = {"scatter_input": True, "gather_output": True, "overlap": False}
"""Of every 3-D layer: activations are whole between layers."""


class Left(Exception):  # not an error: the answer "no", with its reason
    """Why a layer stays as it is."""


def linear(layer: nnx.Linear, ground: SplitAxes) -> Change:
    """A linear layer alone: by columns where they divide, else by rows."""
    if ground.is_grid:
        grid = Grid.of(ground.axes, False)
        sizes = {"in_features": (layer.in_features, ground.into), "out_features": (layer.out_features, ground.ranks)}
        _divide(sizes)
        attributes = {**EASY, "grid": grid, "units": None}
        return ParallelLinear, attributes, {"kernel": grid.weight(), "bias": grid.bias}, "3-D, whole input and output"
    if layer.out_features % ground.ranks == 0:
        return column(ground.axis, gather_output=True)
    if layer.in_features % ground.ranks == 0:
        return row(ground.axis, input_is_parallel=False)
    raise Left(
        f"neither {layer.in_features} input nor {layer.out_features} output features divide over {ground.ranks} ranks"
    )


def column(axis: str, *, gather_output: bool) -> Change:
    """Output features split."""
    attributes = {
        "axis": axis,
        "gather_output": gather_output,
        "sequence_parallel": False,
        "ring": False,
        "overlap": False,
        "units": None,
        "pads": False,
    }
    how = GATHERS if gather_output else "columns, output stays split"
    return ColumnParallelLinear, attributes, {"kernel": PartitionSpec(None, axis), "bias": PartitionSpec(axis)}, how


def fused(axis: str, blocks: int) -> Change:
    """Output features in blocks, each split."""
    _, attributes, specs, _ = column(axis, gather_output=False)
    how = f"columns of {blocks} layers in one, output stays split; swaps columns"
    return FusedColumnLinear, {**attributes, "blocks": blocks}, specs, how


def row(axis: str, *, input_is_parallel: bool) -> Change:
    """Input features split."""
    attributes = {"axis": axis, "input_is_parallel": input_is_parallel, "sequence_parallel": False, "ring": False}
    how = "rows, takes a split input" if input_is_parallel else "rows, splits its input"
    return RowParallelLinear, attributes, {"kernel": PartitionSpec(axis, None)}, how


def embed(layer: nnx.Embed, ground: SplitAxes) -> Change:
    """A table, by its rows."""
    if ground.is_grid:
        grid = Grid.of(ground.axes, False)
        _divide({"num_embeddings": (layer.num_embeddings, ground.into), "features": (layer.features, ground.ranks)})
        attributes: dict[str, Any] = {**EASY, "grid": grid}
        return ParallelEmbedding, attributes, {"embedding": grid.weight()}, "3-D, whole output"
    _divide({"num_embeddings": (layer.num_embeddings, ground.ranks)})
    attributes = {
        "axis": ground.axis,
        "sequence_parallel": False,
        "gather_output": True,
        "overlap": False,
        "pads": False,
    }
    return VocabParallelEmbedding, attributes, {"embedding": PartitionSpec(ground.axis, None)}, "rows of the table"


def conv(layer: nnx.Conv, ground: SplitAxes) -> Change:
    """A convolution, by its channels."""
    grid, groups = Grid.of(ground.axes, False), layer.feature_group_count
    _divide(
        {
            "input channels per group": (layer.in_features // groups, ground.into),
            "output channels": (layer.out_features, ground.ranks),
        }
    )
    if groups > 1:
        _divide({"groups": (groups, ground.ranks)})
    attributes = {**EASY, "grid": grid}
    specs = {"kernel": grid.weight(len(layer.kernel_shape)), "bias": grid.bias}
    return ParallelConv, attributes, specs, "channels, gathers its output"


def linear_general(layer: nnx.LinearGeneral, ground: SplitAxes) -> Change:
    """By the first output dim."""
    if layer.batch_axis:
        raise Left("it has batch axes")
    _divide({"in the first output dim, the only one that is split,": (layer.out_features[0], ground.ranks)})
    return heads(layer, ground.axis, gather_output=True)


def heads(layer: nnx.LinearGeneral, axis: str, *, gather_output: bool) -> Change:
    """The first output dim split, such as heads."""
    attributes = {"mesh_axis": axis, "part": "column", "gather_output": gather_output}
    ins, rest = [None] * len(layer.in_features), [None] * (len(layer.out_features) - 1)
    specs = {"kernel": PartitionSpec(*ins, axis, *rest), "bias": PartitionSpec(axis, *rest)}
    return SplitLinearGeneral, attributes, specs, GATHERS if gather_output else "columns, output stays split"


def of_heads(layer: nnx.LinearGeneral, axis: str) -> Change:
    """The first input dim split, as `heads` leaves it."""
    attributes = {"mesh_axis": axis, "part": "row", "gather_output": False}
    rest = [None] * (len(layer.in_features) - 1 + len(layer.out_features))
    return SplitLinearGeneral, attributes, {"kernel": PartitionSpec(axis, *rest)}, "rows, takes a split input"


def einsum(layer: nnx.Einsum, ground: SplitAxes) -> Change:
    """By the first letter of the kernel that the result keeps and that divides."""
    if layer.einsum_str is None:
        raise Left("its equation is given with every call")
    free = free_letters(layer, ground.ranks)
    if not free:
        raise Left(
            f"no letter of the kernel in {layer.einsum_str!r} that only the result has divides over {ground.ranks}"
        )
    return einsum_column(layer, ground.axis, free[0], gather_output=True)


def free_letters(layer: nnx.Einsum, ranks: int) -> list[str]:
    """The letters of the kernel that only the result has besides, and that divide."""
    given, kernel, result = letters_of(layer.einsum_str or ",->")
    if "..." in kernel:
        return []
    free = [c for c in result if c.isalpha() and c in kernel and c not in given]
    return [c for c in free if layer.kernel_shape[kernel.index(c)] % ranks == 0]


def einsum_column(layer: nnx.Einsum, axis: str, letter: str, *, gather_output: bool) -> Change:
    """A letter of the result split."""
    attributes = {"mesh_axis": axis, "letter": letter, "part": "column", "gather_output": gather_output}
    how = f"letter {letter}, " + ("gathers its output" if gather_output else "output stays split")
    return SplitEinsum, attributes, _letter_specs(layer, axis, letter), how


def einsum_row(layer: nnx.Einsum, axis: str, letter: str) -> Change:
    """A letter that is summed over split, as the input is."""
    attributes = {"mesh_axis": axis, "letter": letter, "part": "row", "gather_output": False}
    return SplitEinsum, attributes, _letter_specs(layer, axis, letter), f"letter {letter}, takes a split input"


def _letter_specs(layer: nnx.Einsum, axis: str, letter: str) -> dict[str, PartitionSpec]:
    _, kernel, result = letters_of(layer.einsum_str or "")
    split = lambda letters: PartitionSpec(*(axis if c == letter else None for c in letters))
    specs = {"kernel": split(kernel)}
    if layer.bias_shape is not None:
        letters = [c for c in result if c.isalpha() and c in kernel]
        if len(layer.bias_shape) != len(letters):
            raise Left(f"the dims of its bias {tuple(layer.bias_shape)} are not the letters {letters} of its result")
        specs["bias"] = split(letters)
    return specs


def attention(layer: nnx.MultiHeadAttention, ground: SplitAxes) -> dict[str, Change]:
    """By heads: the changes of the layer itself ("") and of its projections.

    Raises:
      Left: with the reason why heads cannot be split; the projections may still be, one by one.
    """
    kv_heads = getattr(layer, "num_kv_heads", layer.num_heads)
    if layer.attention_fn is not nnx.dot_product_attention:
        raise Left("its attention_fn is not Flax's own, and may mix heads")
    if layer.dropout_rate > 0:
        raise Left("its dropout draws one mask for all heads")
    if layer.normalize_qk:
        raise Left("it normalizes queries and keys with parameters that all heads share")
    if layer.decode:
        raise Left("its cache holds all heads")
    _divide({"heads": (layer.num_heads, ground.ranks), "key and value heads": (kv_heads, ground.ranks)})
    changes = {
        name: heads(getattr(layer, name), ground.axis, gather_output=False) for name in ("query", "key", "value")
    }
    changes["out"] = of_heads(layer.out, ground.axis)
    return {"": (SplitHeadsAttention, {"mesh_axis": ground.axis}, {}, "heads, pairs its own projections"), **changes}


RULES: Mapping[type, Callable[[Any, SplitAxes], Change]] = {
    nnx.Linear: linear,
    nnx.Embed: embed,
    nnx.Conv: conv,
    nnx.LinearGeneral: linear_general,
    nnx.Einsum: einsum,
}


def apply(layer: Any, change: Change) -> None:
    """Make the layer what a change says, in place."""
    kind, attributes, specs, _ = change
    layer.__class__ = kind
    for name, value in attributes.items():
        setattr(layer, name, value)
    units = Units(layer.feature_group_count, "groups") if isinstance(layer, ParallelConv) else None
    grouped = units is not None and units.count > 1
    for name in ("kernel", "bias", "embedding"):
        if (parameter := getattr(layer, name, None)) is not None:
            spec = specs.get(name, PartitionSpec())
            shape = parameter.shape[len(parameter.shape) - len(spec) :] if len(spec) else parameter.shape
            written = {SPEC: spec, WHOLE: tuple(shape), **({UNITS: units} if grouped else {})}
            parameter.set_metadata(**written)


def _divide(sizes: dict[str, tuple[int, int]]) -> None:
    wrong = [f"{size} {what}" for what, (size, parts) in sizes.items() if size % parts]
    if wrong:
        parts = max(parts for size, parts in sizes.values() if size % parts)
        raise Left(f"{' and '.join(wrong)} do not divide over {parts} ranks")
