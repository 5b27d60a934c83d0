"""Low-rank adapters (LoRA) for a model's kernels, kernels stored as int8, and the functional view of both."""

import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from axonml_jax.base import PyTree, named_leaves
from axonml_jax.model.buffers import Join
from axonml_jax.model.view import (
    Functional,
    Made,
    Mode,
    ModelAround,
    Sides,
    Trainable,
    Variables,
    abstract,
    bias_sides,
    functionalize,
    merge,
    partition,
    said_sides,
)

# --------------------------------------------------------------------------------------------------
# Frozen matrices that rest as int8 with scales of their columns (Dettmers et al. 2022), and are floats where they are
# read.
# --------------------------------------------------------------------------------------------------

MATRIX = Sides()
"""The sides of a plain matrix: its last two dims, input and output."""

KINDS = ("int8",)
"""The forms in which the matrices with adapters may rest, besides their own."""

END = "_int8_scale"
"""How the name of a matrix's scales ends, behind that of the matrix."""

_MOST = 127


def scales_name(name: str) -> str:
    """The path of a matrix's scales.

    >>> scales_name("mlp/up/kernel")
    'mlp/up/kernel_int8_scale'
    """
    return name + END


def quantized(matrix: Any, sides: Sides = MATRIX) -> tuple[Any, Any]:
    """A matrix, or a stack of them, as int8 and scales; of a shape the shapes.

    A column's largest absolute value becomes 127, all others the nearest whole number: each is off by half a scale at most.

    Args:
      matrix: W [..., i, o], floating.
      sides: its dims, where it has other ones than these; scales are then [*stack, *out].

    Returns:
      int8 [..., i, o], and scales [..., o] in the dtype of W, which is the dtype that `dequantized` gives back.
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda matrix: quantized(matrix, sides), matrix)
    wide = jnp.asarray(matrix).astype(jnp.promote_types(matrix.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=_inputs(sides))
    scales = jnp.where(largest > 0, largest / _MOST, 1).astype(matrix.dtype)
    # Scales as they are kept, rounded to the dtype of W.
    steps = wide / jnp.expand_dims(scales, _inputs(sides)).astype(wide.dtype)
    return jnp.clip(jnp.round(steps), -_MOST, _MOST).astype(jnp.int8), scales


def dequantized(matrix: Any, scales: Any, sides: Sides = MATRIX) -> Any:
    """The floats [..., i, o] that an int8 matrix stands for, in the dtype of its scales [..., o]; of shapes the shape.

    >>> dequantized(*quantized(jnp.array([[1.0, 0.0], [-0.5, 0.0]]))).tolist()[0]
    [1.0, 0.0]
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda matrix, scales: dequantized(matrix, scales, sides), matrix, scales)
    return matrix.astype(scales.dtype) * jnp.expand_dims(scales, _inputs(sides))


def _inputs(sides: Sides) -> tuple[int, ...]:
    """Negative indices of a matrix's input dims, which hold for any number of stacked matrices."""
    return sides.dims("i", behind=-len(sides.roles))


# --------------------------------------------------------------------------------------------------
# LoRA (Hu et al. 2022): which matrices of a model get adapters of low rank, and how each begins.
# --------------------------------------------------------------------------------------------------

ENDS = ("_lora_a", "_lora_b")
"""How the names of adapters end, behind that of their matrix."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of some matrices of a model; make it by `ax.lora`.

    Attributes:
      rank: r, columns of A and rows of B.
      alpha: the product A B is multiplied by alpha / rank.
      targets: regular expressions, searched in path names, of the matrices that get adapters.
      stacked: regular expressions of parameters whose last two dims are a matrix and whose other dims number them.
      dims: (regular expression, words) of parameters, with one of `stack`, `in` and `out` for each dim.
      seed: of the first values of A.
      base: "int8": matrices with adapters rest as int8 with a scale for every column; None: as they are.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    stacked: tuple[str, ...] = ()
    dims: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    base: str | None = None

    def __post_init__(self):
        problems = []
        if self.base is not None and self.base not in KINDS:
            problems.append(f"base={self.base!r} must be one of {', '.join(map(repr, KINDS))}, or None")
        if not isinstance(self.rank, Integral) or self.rank < 1:
            problems.append(f"rank={self.rank!r} must be a positive whole number")
        if not isinstance(self.alpha, Real) or not 0 < self.alpha < math.inf:
            problems.append(f"alpha={self.alpha!r} must be a positive number")
        if not self.targets:
            problems.append("targets is empty: give regular expressions of the matrices' path names")
        patterns = {"targets": self.targets, "stacked": self.stacked, "dims": [pattern for pattern, _ in self.dims]}
        problems += [why for name, given in patterns.items() for why in _broken(name, given)]
        problems += [f"dims: {why}" for _, words in self.dims if isinstance(why := said_sides(words), str)]
        if problems:
            raise ValueError(f"lora: {'; '.join(problems)}")

    @property
    def scale(self) -> float:
        """The factor of the adapters' product, alpha / rank."""
        return self.alpha / self.rank

    def chosen(
        self, shapes: Mapping[str, Any], stacks: Mapping[str, int], layers: Mapping[str, Sides]
    ) -> dict[str, Sides]:
        """The matrices that get adapters. A pattern that matches a layer's matrix and its bias means the matrix.

        Args:
          shapes: anything with a shape for every parameter, by path.
          stacks: how many first dims number matrices, where a layer says it.
          layers: by which sides layers multiply, where they say it (`layer_sides`).

        Returns:
          The dims of each, by path.

        Raises:
          ValueError: listing every pattern that matches nothing, and every match that is no matrix or too small.
        """
        patterns = (*self.targets, *self.stacked, *(pattern for pattern, _ in self.dims))
        hits = {pattern: [n for n in shapes if re.search(pattern, n)] for pattern in patterns}
        problems = [f"  {pattern!r} matches no parameter" for pattern, names in hits.items() if not names]
        listed = {name for pattern in self.stacked for name in hits[pattern]}
        said = {name: said_sides(words) for pattern, words in self.dims for name in hits[pattern]}
        found: dict[str, Sides] = {}
        unfit: dict[str, str] = {}
        for name in dict.fromkeys(name for pattern in self.targets for name in hits[pattern]):
            shape, sides = tuple(shapes[name].shape), said.get(name)
            if not isinstance(sides, Sides):
                sides = _sides(name, shapes, stacks.get(name, 0), layers.get(name), name in listed)
            if why := sides if isinstance(sides, str) else self._unfit(shape, sides):
                unfit[name] = f"  {name} {shape}: {why}"
            elif isinstance(sides, Sides):
                found[name] = sides
        matched = {name: {pattern for pattern in self.targets if name in hits[pattern]} for name in (*found, *unfit)}
        beside = {name for name, matrix in _biases(found, shapes).items() if matched.get(name, {0}) <= matched[matrix]}
        found = {name: sides for name, sides in found.items() if name not in beside}
        problems += [why for name, why in unfit.items() if name not in beside]
        if problems:
            every = {n: _sides(n, shapes, stacks.get(n, 0), layers.get(n), False) for n in shapes}
            fits = lambda n, sides: len(shapes[n].shape) == sides.stacked + len(sides.roles)
            some = [n for n, sides in every.items() if isinstance(sides, Sides) and fits(n, sides)]
            raise ValueError(
                f"lora: rank={self.rank}, targets={list(self.targets)} do not fit the model:\n"
                + "\n".join(problems)
                + "\n"
                "a target is a matrix, or a stack of matrices that its layer or `stacked` declares; for a kernel with more "
                "dims `dims` says which are its input and output, as in dims={'query/kernel': 'in out out'}; matrices here are "
                f"{', '.join(some[:8])}{', ...' if len(some) > 8 else ''}"
            )
        return found

    def _unfit(self, shape: tuple[int, ...], sides: Sides) -> str | None:
        if len(shape) != sides.stacked + len(sides.roles):
            stacked = f", as its first {sides.stacked} number some" * bool(sides.stacked)
            return "is no matrix" + stacked if sides.roles == "io" else f"has not the dims {sides.words()!r}"
        smaller = min(math.prod(sides.sizes(role, shape)) for role in "io")
        return f"rank {self.rank} is above its smaller side" if self.rank > smaller else None


def _biases(matrices: Mapping[str, Sides], shapes: Mapping[str, Any]) -> dict[str, str]:
    """The biases (and scales) beside matrices in their layers, vectors, or called so, as large as the output: by whose."""
    found = {}
    for name, sides in matrices.items():
        layer, shape = name.rpartition("/")[0], tuple(shapes[name].shape)
        size = (*shape[: sides.stacked], *sides.sizes("o", shape))
        beside = {n for n, x in shapes.items() if n.rpartition("/")[0] == layer and tuple(x.shape) == size}
        found |= {n: name for n in beside if n not in matrices or n.endswith("bias") if n != name}
    return found


def _sides(name: str, shapes: Mapping[str, Any], stacked: int, layer: Sides | None, listed: bool) -> Sides | str:
    """Find a target's stacked, input and output dims from its layer, metadata, `stacked` or bias; or say why that fails."""
    count = len(shapes[name].shape)
    if layer is None or (not layer.stacked and layer.roles == "io"):
        if listed:
            by_bias = bias_sides(shapes, name)
            if by_bias is not None and len(by_bias.roles) > 2:
                return (
                    f"`stacked` names it, but by its bias it is multiplied by as {by_bias.words()!r}: say it by `dims`"
                )
            return Sides(max(count - 2, 0))
        if stacked == 0 and count > 2 and (by_bias := bias_sides(shapes, name)) is not None:
            return by_bias if by_bias.stacked == 0 else Sides()  # a stack must be named
        return Sides(stacked)
    more = count - layer.stacked - len(layer.roles)
    if listed and more == 0:
        return f"`stacked` names it, but its layer multiplies by it as {layer.words()!r}: leave it out of `stacked`"
    return Sides(layer.stacked + (more if listed else stacked), layer.roles)


@dataclass(frozen=True)
class LoraModel(ModelAround):
    """A model and its adapters: what `ax.lora` returns, and every facade accepts as a model."""

    model: Any
    lora: Lora

    def __post_init__(self):
        if isinstance(self.model, LoraModel):
            raise ValueError(
                f"lora: the model has adapters already, of targets={list(self.model.lora.targets)}: give one ax.lora all of "
                "them"
            )

    def view(self, params: PyTree | None, trainable: Trainable, made: Made) -> tuple[Functional, Variables]:
        """The model's functional view, with adapters."""
        return lora_functional(*functionalize(self.model, params, made=made), self.lora, trainable)


def lora(
    model: Any,
    *,
    rank: int,
    targets: str | Sequence[str],
    alpha: float | None = None,
    stacked: str | Sequence[str] = (),
    dims: Mapping[str, str] | None = None,
    seed: int = 0,
    base: str | None = None,
) -> LoraModel:
    """A model whose chosen matrices W are read as W + alpha / rank A B, of which only A and B train (Hu et al. 2022).

    Give it to any facade in the place of the model. All other parameters are frozen: they have no gradients and no optimizer
    state. B begins with zeros, so that the first forward is the model's own, bit for bit; A is uniform within 1 / sqrt(i) of
    0. A matrix [i, o] at `path` gets `path_lora_a` [i, r] and `path_lora_b` [r, o], of at least float32. `module` of the
    parallel model is merged.

    Args:
      model: an NNX module, a function without arguments that makes one, or a Linen module.
      rank: r, at most the smaller side of every target.
      targets: regular expressions, searched in path names such as `blocks/0/mlp/up/kernel`; one that matches a layer's matrix
        and its bias, such as "mlp/up", means the matrix.
      alpha: see above; None: `rank`, so that A B counts once.
      stacked: of targets whose last two dims are a matrix and whose other dims number them, as Linen's `scan` and
        `nnx.vmap` make them. Stacks and experts of this library say so themselves.
      dims: of targets of more than two dims, by regular expressions, what each dim is: `stack` (in front) numbers matrices,
        `in` is summed over by the product, `out` is one of its results. A kernel [h, n, d] of attention is "in out out": the
        matrix [h, n * d], with adapters [h, r] and [r, n, d]. NNX's `LinearGeneral` and `MultiHeadAttention` and layers with
        an `einsum_str` say so themselves, as do kernels of Linen beside a bias.
      seed: of the first values of A.
      base: "int8": W rests and is sent as int8 with a scale for every column, `path_int8_scale` [o], and is a float where it
        is read; None: as it is.

    Raises:
      ValueError: for an invalid rank, alpha, pattern or base, and a model with adapters already; in the facade for targets that
        do not fit the model, naming all of them.

    >>> lora(None, rank=8, alpha=16, targets="attention/.*kernel").lora.scale
    2.0
    """
    patterns = [(each,) if isinstance(each, str) else tuple(each) for each in (targets, stacked)]
    return LoraModel(
        model,
        Lora(
            rank=rank,
            alpha=rank if alpha is None else alpha,
            targets=patterns[0],
            stacked=patterns[1],
            dims=tuple((dims or {}).items()),
            seed=seed,
            base=base,
        ),
    )


def is_adapter(name: str) -> bool:
    """Whether a path names an adapter, or the scales of a matrix that rests as int8.

    >>> is_adapter("mlp/up/kernel_lora_a"), is_adapter("mlp/up/kernel")
    (True, False)
    """
    return name.endswith((*ENDS, END))


def first_adapters(lora: Lora, name: str, matrix: Any, sides: Sides) -> dict[str, Any]:
    """A [*stack, *in, r] and B [*stack, r, *out] of a matrix, or their shapes of a shape, by path."""
    stack, inputs, outputs = (
        matrix.shape[: sides.stacked],
        sides.sizes("i", matrix.shape),
        sides.sizes("o", matrix.shape),
    )
    dtype = jnp.promote_types(matrix.dtype, jnp.float32)
    bound = 1 / math.sqrt(math.prod(inputs))

    def make() -> list[jax.Array]:
        key = jax.random.fold_in(jax.random.key(lora.seed), zlib.crc32(name.encode()) & 0x7FFFFFFF)
        a = jax.random.uniform(key, (*stack, *inputs, lora.rank), dtype, -bound, bound)
        return [a, jnp.zeros((*stack, lora.rank, *outputs), dtype)]

    made = jax.eval_shape(make) if isinstance(matrix, jax.ShapeDtypeStruct) else make()
    return dict(zip(adapter_names(name), made, strict=True))


def adapter_names(name: str) -> tuple[str, str]:
    """The paths of a matrix's adapters."""
    return f"{name}{ENDS[0]}", f"{name}{ENDS[1]}"


def merged(matrix: Any, a: Any, b: Any, scale: float, sides: Sides | None = None) -> Any:
    """W + scale A B in the dtype of W, summed in that of the adapters; of a shape the shape.

    Args:
      matrix: W.
      a, b: its adapters.
      scale: the factor of their product.
      sides: the dims of W; None: the last two are the matrix.
    """
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return matrix
    product = a @ b if sides is None else sides.joined(a, b)
    return (matrix.astype(a.dtype) + scale * product).astype(matrix.dtype)


def _broken(what: str, patterns: Iterable[Any]) -> list[str]:
    found = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (TypeError, re.error) as error:
            found.append(f"{what}: {pattern!r} is no regular expression ({error})")
    return found


# --------------------------------------------------------------------------------------------------
# The pure view of a model with adapters: they train, the model's own parameters are frozen.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapter:
    """The adapters of one matrix.

    Attributes:
      a, b: their paths.
      scale: the factor of their product.
      sides: the dims of the matrix; the stacked ones come first in its adapters too.
      column_scales: the path of the scales of a matrix that rests as int8; None: it rests as it is.
    """

    a: str
    b: str
    scale: float
    sides: Sides
    column_scales: str | None = None

    @property
    def added(self) -> tuple[str, ...]:
        """The paths of all leaves that this adapter adds to the model's parameters."""
        return (self.a, self.b) if self.column_scales is None else (self.a, self.b, self.column_scales)


def lora_functional(
    base: Functional, variables: Variables, lora: Lora, trainable: Trainable = None
) -> tuple["LoraFunctional", Variables]:
    """The view of a model with adapters, and its variables, or their shapes where these are still to be made.

    Args:
      base: the model's own view, of which every parameter trains.
      variables: its variables.
      lora: which adapters.
      trainable: which of the model's own parameters train besides; None: none.

    Raises:
      ValueError: for targets that do not fit the model, parameters that have the names of adapters, a `trainable` that matches
        nothing, or a matrix that would both train and rest as int8.
    """
    shapes = named_leaves(base.shapes.params)
    chosen = lora.chosen(shapes, base.stacked_dims, base.sides)
    adapters = {name: _adapter(lora, name, sides) for name, sides in chosen.items()}
    if taken := [each for adapter in adapters.values() for each in adapter.added if each in shapes]:
        raise ValueError(
            f"lora: adapters would have the names of existing parameters of the model: {', '.join(taken)}; rename these, or "
            "leave their neighbours out of targets"
        )

    def with_adapters(variables: Variables) -> Variables:
        own = ({}, variables.params) if trainable is None else partition(variables.params, trainable)
        made = {}
        for path, leaf in flatten_dict(variables.params).items():
            if (name := _name(path)) in chosen:
                adapters_of = first_adapters(lora, name, leaf, chosen[name])
                made |= {_beside(path, each): array for each, array in adapters_of.items()}
        frozen = own[1] if lora.base is None else _int8(own[1], chosen)
        return Variables(merge(unflatten_dict(made), own[0]), frozen, variables.state)

    given = with_adapters(variables)
    view = LoraFunctional(base, abstract(given), adapters)
    if (create := base.create) is not None:
        view.create, view.hollow = (lambda: with_adapters(create())), base.hollow
    return view, given


def _adapter(lora: Lora, name: str, sides: Sides) -> Adapter:
    return Adapter(*adapter_names(name), lora.scale, sides, None if lora.base is None else scales_name(name))


def _int8(frozen: PyTree, chosen: Mapping[str, Sides]) -> PyTree:
    """Store the chosen frozen parameters as int8, with their scales beside them.

    Raises:
      ValueError: naming those that train, and therefore are no frozen ones.
    """
    leaves = flatten_dict(frozen)
    paths = {_name(path): path for path in leaves}
    if training := [name for name in chosen if name not in paths]:
        raise ValueError(
            f"lora: {', '.join(training)} cannot both train and be stored as int8: leave them out of trainable, or of targets"
        )
    for name, sides in chosen.items():
        path = paths[name]
        leaves[path], leaves[_beside(path, scales_name(name))] = quantized(leaves[path], sides)
    return unflatten_dict(leaves)


class LoraFunctional(Functional):
    """A model as pure functions of its parameters and of adapters; `bind` takes both, or parameters that are merged already."""

    def __init__(self, base: Functional, shapes: Variables, adapters: Mapping[str, Adapter]):
        self._base, self._shapes, self._adapters = base, shapes, adapters
        self.param_prefix, self.order, self.users_meshes = base.param_prefix, base.order, base.users_meshes
        if self.order is not None:
            known = {n: own for n, own in adapters.items() if n in self.order}
            places = {path: (*self.order[n], 0) for n, own in known.items() for path in own.added}
            self.order = {**self.order, **places}

    @property
    def shapes(self) -> Variables:
        """The shapes and dtypes of the variables: adapters train."""
        return self._shapes

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters of every matrix that has some, by its path."""
        return self._adapters

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """The wrapped model's stacked dims, and those of the leaves beside its stacks: adapters, and scales of an int8 base."""
        beside = {
            path: own.sides.stacked for name, own in self._adapters.items() for path in (*own.added, scales_name(name))
        }
        return {**self._base.stacked_dims, **beside}

    def bind(self, variables: Variables, key: jax.Array, mode: Mode) -> Any:
        """The model on these arrays, merged where there are adapters among them."""
        return self._base.bind(self.merged(variables), key, mode)

    def merged(self, variables: Variables) -> Variables:
        """The model's own variables, as floats, each matrix with its adapters in it."""
        leaves = flatten_dict(merge(variables.params, variables.frozen))
        there = {_name(path): leaf for path, leaf in leaves.items()}
        added = {each for adapter in self._adapters.values() for each in adapter.added}
        own = {path: leaf for path, leaf in leaves.items() if _name(path) not in added}
        for path in own if len(own) < len(leaves) else ():
            if (adapter := self._adapters.get(_name(path))) is not None:
                scales = adapter.column_scales
                matrix = own[path] if scales is None else dequantized(own[path], there[scales], adapter.sides)
                own[path] = merged(matrix, there[adapter.a], there[adapter.b], adapter.scale, adapter.sides)
        return Variables(unflatten_dict(own), {}, variables.state)

    def module(self, variables: Variables) -> Any:
        """The user's module with these arrays in it, adapters merged."""
        return self._base.module(self.merged(variables))

    def state_of(self, bound: Any) -> PyTree:
        """The state after calls of a bound model."""
        return self._base.state_of(bound)

    @property
    def abstract_module(self) -> Any:
        """The model itself on shapes, without adapters; None for Linen."""
        return self._base.abstract_module

    def module_types(self) -> Mapping[str, type]:
        """Delegate to the wrapped model."""
        return self._base.module_types()

    def declares(self, attribute: str) -> bool:
        """Delegate to the wrapped model."""
        return self._base.declares(attribute)

    def synchronized(self) -> Callable[[str], bool]:
        """Delegate to the wrapped model."""
        return self._base.synchronized()

    def batch_statistics(self) -> Callable[[str], bool]:
        """Delegate to the wrapped model."""
        return self._base.batch_statistics()

    def state_joins(self) -> Mapping[str, Join]:
        """Delegate to the wrapped model."""
        return self._base.state_joins()

    def after_update(self, state: PyTree) -> PyTree:
        """Delegate to the wrapped model."""
        return self._base.after_update(state)


def _name(path: tuple) -> str:
    return "/".join(map(str, path))


def _beside(path: tuple, name: str) -> tuple:
    """The path of a leaf with another name in the same module as the leaf at `path`."""
    return (*path[:-1], name.rpartition("/")[2])
