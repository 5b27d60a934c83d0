"""Which parallel layer replaces which layer, and which layers form a pair: found by tracing the model's code."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.base import PyTree, aligned, is_array
from axonml_jax.collectives.gradients import copy_to, gather_from, own_slice, reduce_from
from axonml_jax.collectives.primitives import axis_index, bound, degree, swap_parts
from axonml_jax.compat.jaxpr import trace
from axonml_jax.layers.grid import Grid, ParallelConv, ParallelEmbedding, ParallelLinear
from axonml_jax.layers.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from axonml_jax.layers.products import substitute
from axonml_jax.layers.whole import MARK, SPEC, UNITS, WHOLE, Units, left_split, marked_program, own_part, taken_split
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.program.program import Equation, Program, entry_of, follow, is_constant, names_of, results

# --------------------------------------------------------------------------------------------------
# A linear layer that is several side by side, such as queries, keys and values, each split over one mesh axis.
# --------------------------------------------------------------------------------------------------


class FusedColumnLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose output consists of `blocks` equal parts, each split over the ranks.

    The kernel rests split by contiguous columns, as any other; before the product ranks exchange columns, so that each has its
    part of every block. Made by `auto_parallelize`.

    Attributes:
      blocks: the number of equal parts, such as 3 for queries, keys and values.

    Communicates: besides, an all-to-all of the kernel's and the bias's shard forward, and of their gradients' backward.
    """

    blocks: int

    def columns(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and the bias that this rank multiplies with: its part of every block."""
        kernel, bias = super().columns()
        own = lambda shard: own_of_blocks(shard, self.blocks, bound(self.axis))
        return own(kernel), None if bias is None else own(bias)


def own_of_blocks(shard: jax.Array, blocks: int, axes: AxisNames) -> jax.Array:
    """This rank's part of every block of a shard.

    Args:
      shard: [..., d/n], this rank's contiguous part of the dim.
      blocks: k equal parts of that dim; k n divides d.
      axes: mesh axes of total size n.

    Returns:
      [..., d/n]: the rank's d/(k n) of the first block, then of the second, and so on.

    Communicates: one all-to-all of shard, filled up to a multiple of n of its k chunks; backward the same of its gradient.
    """
    count, rank = degree(axes), axis_index(axes)
    chunks = jnp.moveaxis(shard.reshape(*shard.shape[:-1], blocks, -1), -2, 0)  # [k, ..., d/(k n)]
    # Chunk g of all k n goes to rank g mod n; this rank has those from rank k on, and sends up to k/n of them to each.
    to, slot = jnp.arange(count), jnp.arange(-(-blocks // count))
    sent = (to[:, None] - rank * blocks) % count + count * slot
    valid = (sent < blocks).reshape(*sent.shape, *[1] * (chunks.ndim - 1))
    got = swap_parts(jnp.where(valid, chunks[jnp.minimum(sent, blocks - 1)], 0), axes)
    wanted = jnp.arange(blocks) * count + rank
    source = wanted // blocks
    place = (wanted - source * blocks) // count
    return jnp.moveaxis(got[source, place], 0, -2).reshape(shard.shape)


# --------------------------------------------------------------------------------------------------
# Flax's `LinearGeneral`, `Einsum` and `MultiHeadAttention` with their weights split over one mesh axis.
# --------------------------------------------------------------------------------------------------


class SplitLinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` whose first output dim ("column") or first input dim ("row") is split; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.
      part: "column" or "row"; a row takes this rank's part of its input and returns the whole.
      gather_output: whether a column returns the whole.

    Communicates: a column an all-reduce of x backward and, gathering, an all-gather of y; a row an all-reduce of y.
    """

    mesh_axis: str
    part: str
    gather_output: bool

    def __call__(self, inputs: jax.Array, out_sharding=None) -> jax.Array:
        """Apply the layer; arguments as for `nnx.LinearGeneral`."""
        axes = bound(self.mesh_axis)
        if not axes:
            return super().__call__(inputs, out_sharding)
        count = degree(axes)
        if self.part == "row":
            ours = (self.in_features[0] // count, *self.in_features[1:])
            own = {"kernel": own_part(self.kernel), "bias": None}
            y = nnx.LinearGeneral.__call__(
                substitute(self, in_features=ours, **own), taken_split(self, inputs, self.mesh_axis)
            )
            y = reduce_from(y, axes)
            return y if self.bias is None else y + self.bias[...].astype(y.dtype)
        ours = (self.out_features[0] // count, *self.out_features[1:])
        own = {"kernel": own_part(self.kernel), "bias": None if self.bias is None else own_part(self.bias)}
        y = nnx.LinearGeneral.__call__(substitute(self, out_features=ours, **own), copy_to(inputs, axes))
        return gather_from(y, axes, -len(ours)) if self.gather_output else left_split(self, y, self.mesh_axis)


class SplitEinsum(nnx.Einsum):
    """`nnx.Einsum` with one of the kernel's letters split; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.
      letter: the letter.
      part: "column": only the kernel and the result have it; "row": it is summed over, and the input is this rank's part.
      gather_output: whether a column returns the whole.

    Communicates: a column an all-reduce of x backward and, gathering, an all-gather of y; a row an all-reduce of y.
    """

    mesh_axis: str
    letter: str
    part: str
    gather_output: bool

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding=None) -> jax.Array:
        """Apply the layer; arguments as for `nnx.Einsum`."""
        axes = bound(self.mesh_axis)
        if not axes:
            return super().__call__(inputs, einsum_str, out_sharding)
        if self.einsum_str is None or (einsum_str is not None and _spelled(einsum_str) != _spelled(self.einsum_str)):
            raise ValueError(
                f"auto_parallelize split this Einsum by the letter {self.letter!r} of its equation {self.einsum_str!r}, and "
                f"this call computes {einsum_str!r}: leave the layer out, auto_parallelize(..., exclude=its path in the report)"
            )
        kernel = own_part(self.kernel)
        ours = {"kernel": kernel, "kernel_shape": kernel.shape}
        if self.part == "row":
            inputs = taken_split(self, inputs, self.mesh_axis)
            y = nnx.Einsum.__call__(substitute(self, bias=None, **ours), inputs, einsum_str)
            return self._with_bias(reduce_from(y, axes))
        bias = None if self.bias is None else own_part(self.bias)
        y = nnx.Einsum.__call__(substitute(self, bias=bias, **ours), copy_to(inputs, axes), einsum_str)
        if not self.gather_output:
            return left_split(self, y, self.mesh_axis)
        return gather_from(y, axes, result_dim(self.einsum_str, self.letter))

    def _with_bias(self, y: jax.Array) -> jax.Array:
        if self.bias is None or self.einsum_str is None:
            return y
        _, kernel, result = letters_of(self.einsum_str)
        before, _, after = result.partition("...")
        sizes = dict(zip([c for c in before + after if c in kernel], self.bias.shape, strict=True))
        dots = [1] * (y.ndim - len(before) - len(after))
        shape = [*(sizes.get(c, 1) for c in before), *dots, *(sizes.get(c, 1) for c in after)]
        return y + self.bias[...].astype(y.dtype).reshape(shape)


class SplitHeadsAttention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` whose projections are split by heads; made by `auto_parallelize`.

    Attributes:
      mesh_axis: the mesh axis.

    Communicates: an all-reduce of its output forward and of its inputs backward.
    """

    mesh_axis: str

    def __call__(self, inputs_q, inputs_k=None, inputs_v=None, *, mask=None, **options):
        """Apply the layer; arguments as for `nnx.MultiHeadAttention`; a mask may differ between heads."""
        axes = bound(self.mesh_axis)
        if axes and mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = own_slice(mask, axes, mask.ndim - 3)
        return super().__call__(inputs_q, inputs_k, inputs_v, mask=mask, **options)


def _spelled(equation: str) -> str:
    return equation.replace(" ", "")


def result_dim(equation: str, letter: str) -> int:
    """The dim of an einsum's result that a letter names, counted from the side without an ellipsis.

    >>> result_dim("...a,ab->...b", "b"), result_dim("ab,bc->c...", "c")
    (-1, 0)
    """
    _, _, result = letters_of(equation)
    before, dots, after = result.partition("...")
    if dots and letter in before:
        return before.index(letter)
    tail = after if dots else result
    return tail.index(letter) - len(tail)


def letters_of(equation: str) -> tuple[str, str, str]:
    """The letters of an einsum's input, kernel and result.

    >>> letters_of("bsh, hnd -> bsnd")
    ('bsh', 'hnd', 'bsnd')
    """
    operands, _, result = _spelled(equation).partition("->")
    given, kernel = operands.split(",")
    return given, kernel, result


# --------------------------------------------------------------------------------------------------
# The call that `auto_parallelize` traces to see which layers feed which.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Arguments for a call of the model.

    Attributes:
      arrays: those leaves that are arrays or shapes; None in the place of the others.
      rest: the others, such as flags; None in the place of arrays.
      treedef: the structure of (args, kwargs).
    """

    arrays: list[Any]
    rest: list[Any]
    treedef: Any

    @staticmethod
    def of(model: nnx.Module, example: Any, kwargs: Mapping[str, Any] | None) -> "Example":
        """Make an example from the user's arguments: one argument or a tuple of several, and keyword arguments.

        Raises:
          TypeError: when the model cannot be called so.
        """
        args = example if isinstance(example, tuple) else (() if example is None else (example,))
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise TypeError(f"example_kwargs={kwargs!r} must map names of keyword arguments to their values")
        signature = inspect.signature(type(model).__call__)
        try:
            signature.bind(model, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.__call__{signature} cannot be called with {len(args)} positional arguments "
                f"(example=) and the keyword arguments {sorted(kwargs)} (example_kwargs=): {error}"
            ) from None
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)), is_leaf=lambda x: isinstance(x, nnx.Pytree))
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        return Example(arrays, [None if _is_array(leaf) else leaf for leaf in leaves], treedef)

    def call(self, model: Any, arrays: list[Any]) -> PyTree:
        """Call the model with these arrays in the example; NNX objects, such as `nnx.Rngs`, are copied."""
        rest = [nnx.clone(leaf) if isinstance(leaf, nnx.Pytree) else leaf for leaf in self.rest]
        args, kwargs = self.treedef.unflatten(
            [value if array is None else array for array, value in zip(arrays, rest, strict=True)]
        )
        return model(*args, **kwargs)


def _is_array(x: Any) -> bool:
    return is_array(x) and not isinstance(x, nnx.Pytree | nnx.Variable)


# --------------------------------------------------------------------------------------------------
# The mesh axes that `auto_parallelize` splits layers over.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitAxes:
    """The mesh axes over which layers are split.

    Attributes:
      axis: the axis that splits output features: `tensor`, or `row` where there is no `tensor`.
      ranks: its degree.
      into: into how many parts input features are split besides: col x depth.
      is_grid: whether `into` is above 1: then layers are AxoNN's 3-D ones.
    """

    axis: str
    ranks: int
    into: int
    is_grid: bool

    @property
    def axes(self) -> tuple[str, str, str]:
        """The axes that a 3-D layer calls row, col and depth."""
        return self.axis, "col", "depth"

    @staticmethod
    def of(mesh: Any) -> "SplitAxes":
        """The axes of a mesh that split layers.

        Raises:
          ValueError: when no axis of the mesh splits layers.
        """
        degrees: Mapping[str, int] = dict(mesh.shape)
        axis = "tensor" if degrees.get("tensor", 1) > 1 else "row"
        into = degrees.get("col", 1) * degrees.get("depth", 1)
        if degrees.get("tensor", 1) > 1 and degrees.get("row", 1) > 1:
            raise ValueError(
                f"the mesh {dict(degrees)} has both tensor and row: auto_parallelize splits output features over one of them"
            )
        if degrees.get(axis, 1) == 1 and into == 1:
            raise ValueError(
                f"the mesh {dict(degrees)} has no axis that splits layers: give it tensor (Megatron's layers), or row, col and "
                "depth (AxoNN's)"
            )
        return SplitAxes(axis, degrees.get(axis, 1), into, into > 1)


# --------------------------------------------------------------------------------------------------
# What `auto_parallelize` did with every layer, as a value that prints.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwappedLayer:
    """What `auto_parallelize` did with one layer, and why.

    Attributes:
      path: where it is in the model.
      kind: its Flax type.
      became: the layer it is now; None: left as it was.
      why: how it communicates, or why it was left.
    """

    path: str
    kind: str
    became: str | None
    why: str


@dataclass
class AutoReport:
    """What `auto_parallelize` did with every layer with parameters.

    Attributes:
      axes: the mesh axes that split layers, with their degrees.
      entries: one per layer, in the model's order; in a `with` block in the order in which layers were made.
    """

    axes: dict[str, int]
    entries: list[SwappedLayer] = field(default_factory=list)

    def nothing_swapped(self) -> str | None:
        """A warning if the call had no effect; else None."""
        if self.swapped:
            return None
        why = [f"  {path}: {entry.why}" for path, entry in self._folded()]
        split = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        found = "there was no layer" if not why else "it left every layer:\n" + "\n".join(why[:10])
        return f"auto_parallelize over {split} has no effect: {found}" + (
            f"\n  and {len(why) - 10} more" if why[10:] else ""
        )

    @property
    def swapped(self) -> dict[str, str]:
        """The layers that became parallel ones: path to the name of the new layer."""
        return {entry.path: entry.became for entry in self.entries if entry.became is not None}

    @property
    def left(self) -> dict[str, str]:
        """The layers that every rank still computes in full: path to the reason."""
        return {entry.path: entry.why for entry in self.entries if entry.became is None}

    def __str__(self) -> str:
        rows = [(path, each.kind, each.became or "as it was", each.why) for path, each in self._folded()]
        table = aligned(["layer", "was", "is now", "how, or why not"], rows, left=4)
        split = ", ".join(f"{axis}={size}" for axis, size in self.axes.items())
        return "\n".join([f"auto_parallelize over {split}: {len(self.swapped)} of {len(self.entries)} layers", table])

    def _folded(self) -> list[tuple[str, SwappedLayer]]:
        """The entries, with repeated blocks that were treated alike as one: differing numbers in the path become `*`."""
        alike: dict[tuple, list[SwappedLayer]] = {}
        for each in self.entries:
            name = "/".join("*" if part.isdigit() else part for part in each.path.split("/"))
            alike.setdefault((name, each.kind, each.became, each.why), []).append(each)
        return [(_common(group), group[0]) for group in alike.values()]


def _common(group: list[SwappedLayer]) -> str:
    paths = zip(*(each.path.split("/") for each in group), strict=True)
    name = "/".join(parts[0] if len(set(parts)) == 1 else "*" for parts in paths)
    return name if len(group) == 1 else f"{name} ({len(group)} times)"


# --------------------------------------------------------------------------------------------------
# How a dim that is split over ranks passes through one equation of a traced program (`follow` in `program/program.py`).
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Mark of a value of which every rank may hold a part.

    Attributes:
      dim: the dim that is split.
      sources: the layers from whose split outputs it is computed.
      blocks: the number of equal consecutive parts of the dim, each of which is split.
    """

    dim: int
    sources: frozenset
    blocks: int = 1


@dataclass(frozen=True)
class Uniform:
    """Mark of a value that is constant along some dims, whatever their sizes."""

    dims: frozenset[int]


Mark = Split | Uniform | None
"""What is known of a value; None: it is whole, and differs along every dim."""


def carried(equation: Equation, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    """The mark of an equation's results; False if a split operand would give a wrong result.

    Args:
      equation: the equation.
      marks: those of its operands.
      ranks: into how many parts a split dim is cut.
    """
    splits = {k: mark for k, mark in enumerate(marks) if isinstance(mark, Split)}
    if not splits:
        return _uniform(equation, marks)
    found = {(_followed(equation, k, mark, ranks), mark.blocks) for k, mark in splits.items()}
    goes = found.pop()[0]
    if found or goes is None:
        return False
    others = [k for k in range(len(marks)) if k not in splits]
    if not all(_is_uniform(equation, k, dim, marks[k]) for k in others for dim in _into(equation, k, goes.dim, ranks)):
        return False
    return replace(goes, sources=frozenset().union(*(mark.sources for mark in splits.values())))


def _followed(equation: Equation, k: int, mark: Split, ranks: int) -> Split | None:
    """The split dim of the result that operand k's split dim becomes, and its blocks; None if the operation mixes it."""
    op = equation.op
    if mark.blocks == 1:
        dim = follow(op, k, mark.dim, ranks)
        return None if dim is None else Split(dim, frozenset())
    dim, shape = follow(op, k, mark.dim, 1), op.made[0].shape if op.made else ()
    if blocks_wanted(equation, mark) == mark.blocks:
        if op.name != "reshape":
            return Split(mark.dim, frozenset())
        fits = dim is not None and dim + 1 < len(shape) and shape[dim] == mark.blocks and shape[dim + 1] % ranks == 0
        return Split(dim + 1, frozenset()) if fits and dim is not None else None
    stays = dim is not None and op.name != "dot_general" and shape[dim] == op.given[k].shape[mark.dim]
    return Split(dim, frozenset(), mark.blocks) if stays and dim is not None else None


def blocks_wanted(equation: Equation, mark: Split) -> int:
    """The number of equal consecutive parts into which an equation cuts a split dim; 1 if it does not."""
    op = equation.op
    if op.name not in ("split", "slice", "reshape"):
        return 1
    shape, out = op.given[0].shape, op.made[0].shape
    size = shape[mark.dim]
    if op.name == "split" and op.options["axis"] == mark.dim:
        sizes = set(op.options["sizes"])
        return len(op.options["sizes"]) if len(sizes) == 1 else 1
    if op.name == "slice" and out[mark.dim] and size % out[mark.dim] == 0 and op.options["strides"] is None:
        return size // out[mark.dim] if op.options["start_indices"][mark.dim] % out[mark.dim] == 0 else 1
    if op.name == "reshape":
        before = math.prod(shape[: mark.dim])
        return next((new for j, new in enumerate(out) if 1 < new < size and math.prod(out[:j]) == before), 1)
    return 1


def _into(equation: Equation, k: int, dim: int, ranks: int) -> list[int]:
    """The dims of operand k that map to a dim of the result."""
    return [d for d in range(equation.op.given[k].ndim) if follow(equation.op, k, d, ranks) == dim]


def _is_uniform(equation: Equation, k: int, dim: int, mark: Mark) -> bool:
    """Whether operand k is constant along one of its dims."""
    if is_constant(equation.inputs[k]) or equation.op.given[k].shape[dim] == 1:
        return True
    return isinstance(mark, Uniform) and dim in mark.dims


def _uniform(equation: Equation, marks: Sequence[Mark]) -> Uniform | None:
    """The dims along which a result is constant, if no operand is split."""
    op, shape = equation.op, equation.op.made[0].shape if equation.outputs else ()
    if op.name == "iota":
        dims = set(range(len(shape))) - {op.options["dimension"]}
    elif op.name == "reshape":
        every = all(_is_uniform(equation, 0, d, marks[0]) for d in range(op.given[0].ndim))
        dims = set(range(len(shape))) if every else set()
    else:
        into = [[(k, d) for k in range(len(marks)) for d in _into(equation, k, dim, 1)] for dim in range(len(shape))]
        alike = lambda found: all(_is_uniform(equation, k, d, marks[k]) for k, d in found)
        dims = {dim for dim, found in enumerate(into) if (found or op.name == "broadcast_in_dim") and alike(found)}
    return Uniform(frozenset(dims)) if dims else None


# --------------------------------------------------------------------------------------------------
# A model's forward traced with every layer of interest as one named call, on whole activations or on a rank's.
# --------------------------------------------------------------------------------------------------

PREFIX = f"{MARK}layer_"


class LayerPart(NamedTuple):
    """Which part of a layer a rank has: the output of a "column", or the input of a "row", along `dim`."""

    kind: str
    dim: int


def modes_of(model: nnx.Module) -> list[bool | None]:
    """The modes to trace: None (as it is), and True (training) and False (evaluation) if layers have such a switch."""
    modules = [module for _, module in nnx.iter_graph(model) if isinstance(module, nnx.Module)]
    switches = any(hasattr(each, name) for each in modules for name in ("deterministic", "use_running_average"))
    return [None, True, False] if switches else [None]


def traced(
    model: nnx.Module,
    paths: Mapping[tuple, LayerPart | None],
    example: Example,
    ranks: int,
    training: bool | None = None,
) -> tuple[Program, dict]:
    """The program of a call of the model, and the parameters of which its first inputs are.

    Args:
      model: the model; a copy of it is traced.
      paths: the layers of interest, with the part that a rank has of each; None: the layer is whole.
      example: the call.
      ranks: into how many parts features are split.
      training: True or False switch the model as `model.train()` and `model.eval()` do.

    Returns:
      (program, number of an input -> path of the layer that owns it); a layer's calls are `jit` equations named `PREFIX` and
      the layer's position in `paths`.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    names = {path: i for i, path in enumerate(paths)}

    def call(params: Any, rest: Any, arrays: list) -> Any:
        copy: Any = nnx.merge(graphdef, params, rest, copy=True)
        layers = {path: module for path, module in nnx.iter_graph(copy) if path in names}
        for path, layer in layers.items():
            layer.__class__ = _probe(type(layer), f"{PREFIX}{names[path]}", paths[path], ranks)
        if training is not None:
            copy.train() if training else copy.eval()
        return [leaf for leaf in jax.tree.leaves(example.call(copy, arrays)) if isinstance(leaf, jax.Array)]

    program = marked_program(trace(call, params, rest, example.arrays).jaxpr)
    owners, leaves = {}, jax.tree_util.tree_leaves_with_path(params)
    for number, (where, _) in enumerate(leaves):
        keys = tuple(getattr(key, "key", getattr(key, "idx", getattr(key, "name", None))) for key in where)
        owner = next((path for path in names if keys[: len(path)] == path), None)
        if owner is not None:
            owners[number] = owner
    return program, owners


def _probe(kind: type, name: str, part: LayerPart | None, ranks: int) -> type:
    """A subclass of a layer whose calls can be found in a program by name."""

    def named(fn: Callable) -> Callable:
        def run(x: jax.Array) -> jax.Array:
            return fn(x)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def whole(x: jax.Array) -> jax.Array:
            if part is not None and part.kind == "row":  # the values do not matter here, only what is done with them
                x = jnp.concatenate([x] * ranks, axis=part.dim)
            y = kind.__call__(self, x, *args[1:], **kwargs)
            if part is not None and part.kind == "column":
                return jax.lax.slice_in_dim(y, 0, y.shape[part.dim] // ranks, axis=part.dim)
            return y

        return named(whole)(args[0])

    attributes: dict[str, Any] = {"__call__": __call__}
    if hasattr(kind, "attend"):

        def attend(self: Any, query: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            return named(lambda x: kind.attend(self, x, *args, **kwargs))(query)  # pyright: ignore

        attributes["attend"] = attend
    return type(kind.__name__, (kind,), attributes)


# --------------------------------------------------------------------------------------------------
# Which parallel layer a Flax layer becomes, and the change of its class that makes it one (its parameters stay).
# --------------------------------------------------------------------------------------------------

Change = tuple[type, dict[str, Any], dict[str, PartitionSpec], str]
"""The new class, its attributes, the specs of its parameters, and how it communicates."""

GATHERS = "columns, gathers its output"
EASY = {"scatter_input": True, "gather_output": True, "overlap": False}
"""The attributes of every 3-D layer: activations are whole between layers."""


class Left(Exception):  # not an error: the answer "no", with its reason
    """Raised with the reason why a layer is not swapped."""


def linear(layer: nnx.Linear, split_axes: SplitAxes) -> Change:
    """The change of a linear layer: by columns if they divide, else by rows."""
    if split_axes.is_grid:
        grid = Grid.of(split_axes.axes, False)
        sizes = {
            "in_features": (layer.in_features, split_axes.into),
            "out_features": (layer.out_features, split_axes.ranks),
        }
        _divide(sizes)
        attributes = {**EASY, "grid": grid, "units": None}
        return ParallelLinear, attributes, {"kernel": grid.weight(), "bias": grid.bias}, "3-D, whole input and output"
    if layer.out_features % split_axes.ranks == 0:
        return column(split_axes.axis, gather_output=True)
    if layer.in_features % split_axes.ranks == 0:
        return row(split_axes.axis, input_is_parallel=False)
    raise Left(
        f"neither {layer.in_features} input nor {layer.out_features} output features divide over {split_axes.ranks} ranks"
    )


def column(axis: str, *, gather_output: bool) -> Change:
    """The change to a layer that splits output features."""
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
    """The change to a layer whose output consists of blocks, each split."""
    _, attributes, specs, _ = column(axis, gather_output=False)
    how = f"columns of {blocks} layers in one, output stays split; swaps columns"
    return FusedColumnLinear, {**attributes, "blocks": blocks}, specs, how


def row(axis: str, *, input_is_parallel: bool) -> Change:
    """The change to a layer that splits input features."""
    attributes = {"axis": axis, "input_is_parallel": input_is_parallel, "sequence_parallel": False, "ring": False}
    how = "rows, takes a split input" if input_is_parallel else "rows, splits its input"
    return RowParallelLinear, attributes, {"kernel": PartitionSpec(axis, None)}, how


def embed(layer: nnx.Embed, split_axes: SplitAxes) -> Change:
    """The change of a table: split by rows."""
    if split_axes.is_grid:
        grid = Grid.of(split_axes.axes, False)
        _divide(
            {"num_embeddings": (layer.num_embeddings, split_axes.into), "features": (layer.features, split_axes.ranks)}
        )
        attributes: dict[str, Any] = {**EASY, "grid": grid}
        return ParallelEmbedding, attributes, {"embedding": grid.weight()}, "3-D, whole output"
    _divide({"num_embeddings": (layer.num_embeddings, split_axes.ranks)})
    attributes = {
        "axis": split_axes.axis,
        "sequence_parallel": False,
        "gather_output": True,
        "overlap": False,
        "pads": False,
    }
    return VocabParallelEmbedding, attributes, {"embedding": PartitionSpec(split_axes.axis, None)}, "rows of the table"


def conv(layer: nnx.Conv, split_axes: SplitAxes) -> Change:
    """The change of a convolution: split by channels."""
    grid, groups = Grid.of(split_axes.axes, False), layer.feature_group_count
    _divide(
        {
            "input channels per group": (layer.in_features // groups, split_axes.into),
            "output channels": (layer.out_features, split_axes.ranks),
        }
    )
    if groups > 1:
        _divide({"groups": (groups, split_axes.ranks)})
    attributes = {**EASY, "grid": grid}
    specs = {"kernel": grid.weight(len(layer.kernel_shape)), "bias": grid.bias}
    return ParallelConv, attributes, specs, "channels, gathers its output"


def linear_general(layer: nnx.LinearGeneral, split_axes: SplitAxes) -> Change:
    """The change of an `nnx.LinearGeneral`: split by its first output dim."""
    if layer.batch_axis:
        raise Left("it has batch axes")
    _divide({"in the first output dim, the only one that is split,": (layer.out_features[0], split_axes.ranks)})
    return heads(layer, split_axes.axis, gather_output=True)


def heads(layer: nnx.LinearGeneral, axis: str, *, gather_output: bool) -> Change:
    """The change to a layer that splits its first output dim, such as heads."""
    attributes = {"mesh_axis": axis, "part": "column", "gather_output": gather_output}
    ins, rest = [None] * len(layer.in_features), [None] * (len(layer.out_features) - 1)
    specs = {"kernel": PartitionSpec(*ins, axis, *rest), "bias": PartitionSpec(axis, *rest)}
    return SplitLinearGeneral, attributes, specs, GATHERS if gather_output else "columns, output stays split"


def of_heads(layer: nnx.LinearGeneral, axis: str) -> Change:
    """The change to a layer that takes a split first input dim, as `heads` leaves it."""
    attributes = {"mesh_axis": axis, "part": "row", "gather_output": False}
    rest = [None] * (len(layer.in_features) - 1 + len(layer.out_features))
    return SplitLinearGeneral, attributes, {"kernel": PartitionSpec(axis, *rest)}, "rows, takes a split input"


def einsum(layer: nnx.Einsum, split_axes: SplitAxes) -> Change:
    """The change of an einsum: split by the first kernel letter that the result keeps and that divides."""
    if layer.einsum_str is None:
        raise Left("its equation is given with every call")
    free = free_letters(layer, split_axes.ranks)
    if not free:
        raise Left(
            f"no letter of the kernel in {layer.einsum_str!r} that only the result has divides over {split_axes.ranks}"
        )
    return einsum_column(layer, split_axes.axis, free[0], gather_output=True)


def free_letters(layer: nnx.Einsum, ranks: int) -> list[str]:
    """The kernel letters that only the result shares, and that divide."""
    given, kernel, result = letters_of(layer.einsum_str or ",->")
    if "..." in kernel:
        return []
    free = [c for c in result if c.isalpha() and c in kernel and c not in given]
    return [c for c in free if layer.kernel_shape[kernel.index(c)] % ranks == 0]


def einsum_column(layer: nnx.Einsum, axis: str, letter: str, *, gather_output: bool) -> Change:
    """The change to an einsum with a letter of the result split."""
    attributes = {"mesh_axis": axis, "letter": letter, "part": "column", "gather_output": gather_output}
    how = f"letter {letter}, " + ("gathers its output" if gather_output else "output stays split")
    return SplitEinsum, attributes, _letter_specs(layer, axis, letter), how


def einsum_row(layer: nnx.Einsum, axis: str, letter: str) -> Change:
    """The change to an einsum with a contracted letter split, as its input is."""
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


def attention(layer: nnx.MultiHeadAttention, split_axes: SplitAxes) -> dict[str, Change]:
    """The changes of an attention layer ("") and its projections: split by heads.

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
    _divide({"heads": (layer.num_heads, split_axes.ranks), "key and value heads": (kv_heads, split_axes.ranks)})
    changes = {
        name: heads(getattr(layer, name), split_axes.axis, gather_output=False) for name in ("query", "key", "value")
    }
    changes["out"] = of_heads(layer.out, split_axes.axis)
    return {
        "": (SplitHeadsAttention, {"mesh_axis": split_axes.axis}, {}, "heads, pairs its own projections"),
        **changes,
    }


RULES: Mapping[type, Callable[[Any, SplitAxes], Change]] = {
    nnx.Linear: linear,
    nnx.Embed: embed,
    nnx.Conv: conv,
    nnx.LinearGeneral: linear_general,
    nnx.Einsum: einsum,
}


def apply(layer: Any, change: Change) -> None:
    """Turn a layer in place into what a change describes."""
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


# --------------------------------------------------------------------------------------------------
# Where a linear layer of any kind may leave its output split, and where it may take a split input.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Port:
    """How a layer can open or close a pair.

    Attributes:
      out_size: size of the output dim that would be split.
      out_dim: `out_dim(ndim)`: that dim of an output of ndim dims.
      takes: `takes(dim, ndim)`: the change by which the layer takes an input of ndim dims that is split along dim; None: it
        cannot.
      opens: `opens(blocks)`: the change that leaves the output split, in so many blocks.
      fuses: whether there may be more than one block.
    """

    out_size: int
    out_dim: Callable[[int], int]
    takes: Callable[[int, int], Change | None]
    opens: Callable[[int], Change]
    fuses: bool = False


def port(layer: Any, axis: str, ranks: int) -> Port | None:
    """The port of a layer; None for layers that cannot be paired."""
    if type(layer) is nnx.Linear:
        closing = row(axis, input_is_parallel=True)
        return Port(
            layer.out_features,
            lambda ndim: ndim - 1,
            lambda dim, ndim: closing if dim == ndim - 1 else None,
            lambda blocks: fused(axis, blocks) if blocks > 1 else column(axis, gather_output=False),
            fuses=True,
        )
    if type(layer) is nnx.LinearGeneral:
        return _general(layer, axis)
    return _einsum(layer, axis, ranks) if type(layer) is nnx.Einsum else None


def _general(layer: nnx.LinearGeneral, axis: str) -> Port:
    first = layer.axis[0] if isinstance(layer.axis, tuple) else layer.axis

    def takes(dim: int, ndim: int) -> Change | None:
        return of_heads(layer, axis) if dim == first % ndim and not layer.batch_axis else None

    out = len(layer.out_features)
    return Port(
        layer.out_features[0], lambda ndim: ndim - out, takes, lambda _: heads(layer, axis, gather_output=False)
    )


def _einsum(layer: nnx.Einsum, axis: str, ranks: int) -> Port | None:
    equation = layer.einsum_str
    if equation is None:
        return None
    given, kernel, result = letters_of(equation)
    if "..." in kernel:
        return None
    free = free_letters(layer, ranks)

    def takes(dim: int, ndim: int) -> Change | None:
        """The change of the einsum if its input is split along a dim: possible if that letter is contracted."""
        before, dots, after = given.partition("...")
        names = [*before, *("." for _ in range(ndim - len(before) - len(after))), *after] if dots else [*given]
        letter = names[dim]
        summed = letter in kernel and letter not in result and names.count(letter) == kernel.count(letter) == 1
        divides = summed and layer.kernel_shape[kernel.index(letter)] % ranks == 0
        return einsum_row(layer, axis, letter) if divides else None

    return Port(
        layer.kernel_shape[kernel.index(free[0])] if free else 1,
        lambda ndim: result_dim(equation, free[0]) % ndim,
        takes,
        lambda _: einsum_column(layer, axis, free[0], gather_output=False),
    )


# --------------------------------------------------------------------------------------------------
# One walk through a model's program: which layers' outputs may stay split until other layers take them.
# --------------------------------------------------------------------------------------------------

Path = tuple


class Walk:
    """A pass over a program with a guess of which layers leave their output split, and in how many blocks.

    Attributes:
      broken: layers whose output must be whole, each with the reason.
      fused: those of them that may stay split in blocks, with the number of blocks.
      rows: layers that take a split input, with (the split dim, the input's number of dims).
      opened: layers whose output is split, with the split dim.
      whole: layers that take a whole input.
      steps: one for each equation: what it does (see `doing`), the equation, and the sizes that a rank may see in each dim of
        each result.
    """

    def __init__(self, names: list[Path], ports: Mapping[Path, Port], columns: Mapping[Path, int], ranks: int):
        self.names, self.ports, self.columns, self.ranks = names, ports, columns, ranks
        self.broken: dict[Path, str] = {}
        self.fused: dict[Path, int] = {}
        self.rows: dict[Path, tuple[int, int]] = {}
        self.opened: dict[Path, int] = {}
        self.steps: list[tuple] = []
        self.taken: list[tuple[Path, frozenset[Path]]] = []
        self.whole: set[Path] = set()

    def run(self, program: Program) -> None:
        """Follow a program, and break wrong guesses: a split output leaves the program, or reaches no row or another layer."""
        self._refuse(results(program, [None] * len(program.inputs), self._rule, None), "it is a result of the model")
        for path, sources in self.taken:
            if path in self.whole:
                self._break(sources, f"{path[-1]} takes a whole input elsewhere")
        used = self.used()
        self._break({p for p in self.columns if p not in used and p not in self.rows}, "no layer takes it as it is")
        # A row's own output is whole.
        self._break(self.rows.keys() & used & self.columns.keys(), "it takes a split input")

    def used(self) -> set[Path]:
        """The layers whose split output a row takes."""
        return {source for _, sources in self.taken for source in sources}

    def _rule(self, equation: Equation, marks: list[Mark]) -> Sequence[Mark]:
        number = len(self.steps)
        if (path := self._layer(equation)) is not None:
            made = [self._at_layer(path, equation, marks), *[None] * (len(equation.outputs) - 1)]
        elif equation.called is not None:
            made = results(equation.called, marks, self._rule, None)
        else:
            made = [self._at(equation, marks)] * len(equation.outputs)
        sizes = [self._sizes(mark, aval.shape) for mark, aval in zip(made, equation.op.made, strict=True)]
        self.steps.insert(number, (*doing(equation), equation, sizes))
        return made

    def _layer(self, equation: Equation) -> Path | None:
        label = equation.op.label
        return self.names[int(label[len(PREFIX) :])] if label.startswith(PREFIX) else None

    def _at_layer(self, path: Path, equation: Equation, marks: list[Mark]) -> Mark:
        """The mark of a layer's output."""
        op = equation.op
        split = [(mark, aval.ndim) for mark, aval in zip(marks, op.given, strict=True) if isinstance(mark, Split)]
        if not split:
            self.whole.add(path)
            if path not in self.columns:
                return None
            dim = self.opened[path] = self.ports[path].out_dim(op.made[0].ndim)
            return Split(dim, frozenset([path]), self.columns[path])
        mark, ndim = split[0]
        where = mark.dim, ndim
        able = (
            mark.blocks == 1
            and path in self.ports
            and path not in self.used()
            and self.ports[path].takes(*where) is not None
        )
        if able and self.rows.setdefault(path, where) == where:
            self.taken.append((path, mark.sources))
        else:
            self._break(mark.sources, f"{path[-1]} needs it whole")
        return None

    def _at(self, equation: Equation, marks: list[Mark]) -> Mark:
        found = carried(equation, marks, self.ranks)
        if not isinstance(found, bool):
            return found
        for mark in marks:
            if isinstance(mark, Split) and mark.blocks == 1 and (blocks := blocks_wanted(equation, mark)) > 1:
                self.fused |= dict.fromkeys(mark.sources, blocks)
        self._refuse(marks, f"`{equation.name}` mixes or counts its parts{line_of(equation)}")
        return None

    def _sizes(self, mark: Mark, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        sizes: list[tuple[int, ...]] = [(size,) for size in shape]
        if isinstance(mark, Split):
            sizes[mark.dim] = (shape[mark.dim] // self.ranks,)
        if isinstance(mark, Uniform):
            sizes = [(size, size // self.ranks) if d in mark.dims else (size,) for d, size in enumerate(shape)]
        return sizes

    def differs_on_a_rank(self, program: Program) -> str | None:
        """Where a program traced with a rank's parts first differs from this one; None if nowhere."""
        theirs = list(_steps(program))
        for mine, other in zip(self.steps, theirs, strict=False):
            if mine[:-2] != other[:-1] or not _fit(mine[-1], other[-1]):
                return f"`{mine[0]}` depends on how many features there are{line_of(mine[-2])}"
        return None if len(theirs) == len(self.steps) else "what the model does depends on how many features there are"

    def _refuse(self, marks: Sequence[Mark], why: str) -> None:
        self._break({source for mark in marks if isinstance(mark, Split) for source in mark.sources}, why)

    def _break(self, paths: Iterable[Path], why: str) -> None:
        self.broken = dict.fromkeys(paths, why) | self.broken  # the first reason stays


def doing(equation: Equation) -> tuple:
    """What an equation does, apart from sizes: its primitive, its name and the constants in it."""
    return equation.name, equation.op.label, tuple(str(atom.val) for atom in equation.inputs if is_constant(atom))


def line_of(equation: Equation) -> str:
    """The user's line that an equation comes from, for messages."""
    return f" ({line})" if (line := equation.op.line) else ""


def _steps(program: Program) -> Iterator[tuple]:
    """Yield what a program does, with the shapes of results; bodies follow their calls, layers are not opened."""
    for equation in program.equations:
        yield (*doing(equation), [aval.shape for aval in equation.op.made])
        if not equation.op.label.startswith(PREFIX) and equation.called is not None:
            yield from _steps(equation.called)


def _fit(allowed: list[list[tuple[int, ...]]], shapes: list[tuple[int, ...]]) -> bool:
    """Whether results have allowed sizes in all dims."""
    if [len(sizes) for sizes in allowed] != [len(shape) for shape in shapes]:
        return False
    pairs = (pair for sizes, shape in zip(allowed, shapes, strict=True) for pair in zip(sizes, shape, strict=True))
    return all(size in may for may, size in pairs)


# --------------------------------------------------------------------------------------------------
# Which linear layers feed which: features may stay split between two layers where what is done to them treats parts
# alike.
# --------------------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """The pairs that a trace of the model shows.

    Attributes:
      columns: layers whose output may stay split.
      rows: layers that take it, with (the split dim, the input's number of dims).
      read: layers whose parameters are read outside their own calls.
      why: of other layers, why their output may not stay split.
      blocks: the number of layers in columns that are several layers side by side.
    """

    columns: set[Path] = field(default_factory=set)
    rows: dict[Path, tuple[int, int]] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    why: dict[Path, str] = field(default_factory=dict)
    blocks: dict[Path, int] = field(default_factory=dict)


def find_pairs(
    model: nnx.Module, candidates: Mapping[Path, Port], others: set[Path], example: Example, ranks: int
) -> Pairs:
    """Find linear layers to pair; never where the result would differ, in training or evaluation.

    Args:
      model: the model, unchanged.
      candidates: layers that may be paired.
      others: other layers of interest, of which only reads of their parameters are sought.
      example: a call.
      ranks: into how many parts features would be split.
    """
    search = _Search(model, [*candidates, *others], example, ranks)
    ports = {path: each for path, each in candidates.items() if path not in search.read}
    able = {path for path, each in ports.items() if each.out_size > 1 and each.out_size % ranks == 0}
    kept = search.settled(ports, able)
    if not search.same_code(kept):
        # Code that reads sizes off the configuration is found kind by kind: layers of one name in all blocks.
        fine = set()
        for kind in _kinds(kept):
            alone = search.settled(ports, kind)
            fine |= kind if search.same_code(alone) else set()
        kept = search.settled(ports, fine)
        if not search.same_code(kept):
            return Pairs(read=search.read, why=search.why)
    rows = {path: where for flow in kept for path, where in flow.rows.items()}
    return Pairs(_used(kept), rows, search.read, search.why, search.blocks)


class _Search:
    """Searches the model's programs, in all its modes, for pairs.

    Attributes:
      read: layers whose parameters are read outside their own calls.
      why: why outputs of layers may not stay split.
    """

    def __init__(self, model: nnx.Module, names: list[Path], example: Example, ranks: int):
        self.model, self.names, self.example, self.ranks = model, names, example, ranks
        self.programs: dict[bool | None, Program] = {}
        self.read: set[Path] = set()
        self.why: dict[Path, str] = {}
        self.blocks: dict[Path, int] = {}
        for mode in modes_of(model):
            try:
                program, owners = traced(model, dict.fromkeys(names), example, ranks, mode)
            except Exception:
                if mode is None:
                    raise
                continue  # a mode in which the model cannot be called, such as dropout without a stream
            self.programs[mode] = program
            self.read |= {owners[i] for i in _read_outside(program, set(owners))}

    def settled(self, ports: Mapping[Path, Port], able: set[Path]) -> list[Walk]:
        """Walks without wrong guesses: repeated with fewer and fewer of `able` leaving their output split."""
        while True:
            flows = []
            for program in self.programs.values():
                flows.append(Walk(self.names, ports, {p: self.blocks.get(p, 1) for p in able}, self.ranks))
                flows[-1].run(program)
            broken = _torn(flows) | {path: why for flow in flows for path, why in flow.broken.items()}
            if fused := self._fused(flows, ports, able & broken.keys()):
                self.blocks |= fused
                continue
            self.why = {path: why for path, why in broken.items() if path in able} | self.why
            if not broken.keys() & able:
                return flows
            able = able - broken.keys()

    def _fused(self, flows: list[Walk], ports: Mapping[Path, Port], broken: set[Path]) -> dict[Path, int]:
        """Layers to try again as several side by side, because the program cuts their output."""
        found = {path: blocks for flow in flows for path, blocks in flow.fused.items() if path in broken}
        fits = lambda path, blocks: ports[path].fuses and ports[path].out_size % (blocks * self.ranks) == 0
        return {p: blocks for p, blocks in found.items() if p not in self.blocks and fits(p, blocks)}

    def same_code(self, flows: list[Walk]) -> bool:
        """Whether the model does the same with a rank's features, which code that reads sizes off shapes does not."""
        parts: dict[Path, LayerPart | None] = dict.fromkeys(self.names)
        for flow in flows:
            parts |= {path: LayerPart("column", flow.opened[path]) for path in flow.used()}
            parts |= {path: LayerPart("row", dim) for path, (dim, _) in flow.rows.items()}
        if not any(flow.rows for flow in flows):
            return True
        for mode, flow in zip(self.programs, flows, strict=True):
            try:
                split, _ = traced(self.model, parts, self.example, self.ranks, mode)
                differs = flow.differs_on_a_rank(split)
            except (TypeError, ValueError) as error:
                differs = f"on a rank's features the model's code fails: {str(error).splitlines()[0]}"
            if differs is not None:
                self.why = dict.fromkeys(_used(flows), differs) | self.why
                return False
        return True


def _torn(flows: list[Walk]) -> dict[Path, str]:
    """Columns whose row in one mode takes something else in another."""
    torn: dict[Path, str] = {}
    for flow in flows:
        for path, sources in flow.taken:
            if any(path in other.whole or other.rows.get(path, flow.rows[path]) != flow.rows[path] for other in flows):
                torn |= dict.fromkeys(sources, f"{path[-1]} takes a whole input elsewhere")
    return torn


def _used(flows: list[Walk]) -> set[Path]:
    return set().union(*(flow.used() for flow in flows))


def _kinds(flows: list[Walk]) -> list[set[Path]]:
    """Groups of layers that must agree: those that feed one row, or have one name in several blocks."""
    kinds: list[set] = []
    for _, sources in (taken for flow in flows for taken in flow.taken):
        names = {tuple(part for part in path if not isinstance(part, int)) for path in sources}
        touching = [kind for kind in kinds if kind & names]
        kinds = [kind for kind in kinds if not kind & names] + [names.union(*touching)]
    of = lambda path: tuple(part for part in path if not isinstance(part, int))
    return [{path for path in _used(flows) if of(path) in kind} for kind in kinds]


def _read_outside(program: Program, positions: set[int]) -> Iterator[int]:
    """Yield the inputs that are read by more than their layer's own calls."""
    alias = {program.inputs[i]: i for i in positions}
    yield from _reads(program, alias)
    yield from (alias[number] for number in names_of(program.outputs) if number in alias)


def _reads(program: Program, alias: dict[int, int]) -> Iterator[int]:
    """Yield every read of an input; `alias` also learns values that calls pass inputs on to."""
    for equation in program.equations:
        mine = [entry_of(atom, alias, None) for atom in equation.inputs]
        if all(i is None for i in mine) or equation.op.label.startswith(PREFIX):
            continue
        if (inner := equation.called) is not None:
            inside = {number: i for number, i in zip(inner.inputs, mine, strict=True) if i is not None}
            yield from _reads(inner, inside)
            through = ((n, entry_of(own, inside, None)) for n, own in zip(equation.outputs, inner.outputs, strict=True))
            alias |= {number: i for number, i in through if i is not None}
        else:
            yield from (i for i in mine if i is not None)
