"""Products of weights in 8-bit floats: finds them in a program, and computes each with scaled 8-bit operands."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.base import logger, named_leaves
from axonml_jax.layers.fused import products_apart
from axonml_jax.layers.kernels import gpu_capability, target_platform
from axonml_jax.layers.products import SCOPE
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.model.lora import is_adapter
from axonml_jax.model.loss import Precision
from axonml_jax.model.view import Variables
from axonml_jax.program.cut import PRODUCTS
from axonml_jax.program.program import Equation, Program, results, rule_of, run_bodies, run_program, run_traced, through

# --------------------------------------------------------------------------------------------------
# A product of two arrays that are rounded to 8-bit floats, as are the operands of both products of its backward.
#
# Values are rounded to float8_e4m3fn, gradients to float8_e5m2 (Micikevicius et al. 2022), each array by one scale, of
# the largest element that it has at the moment ("current scaling" of Transformer Engine, "tensorwise" of torchao). A
# scale is a power of two: what an element rounds to does then not depend on its neighbours, unless it is small beside
# the largest of them. So ranks that hold parts of an array need not agree on a scale, and nothing is sent.
# --------------------------------------------------------------------------------------------------

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2

_LEAST = 2.0**-110
"""What counts as the largest element of an array of smaller ones: scales, their inverses and zeros stay finite."""

_EXPONENT = 0x7F800000
"""The bits of a float32's exponent."""


class Rounded(NamedTuple):
    """An 8-bit array, and the power of two that scales its elements."""

    values: jax.Array
    factor: jax.Array


@dataclass(frozen=True)
class ProductForm:
    """The parameters of a product, without its operands.

    Attributes:
      contracted: which dims of the left operand are summed over with which dims of the right one.
      dtype: of the result.
      native: whether the device multiplies floats of 8 bits; else they are cast to `dtype` first, which holds them exactly.
    """

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any
    native: bool


def float8_product(form: ProductForm, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply two arrays rounded to 8 bits; the result's dims are ordered as by `jax.lax.dot_general`.

    Sums are in float32, or in float64 for a result in it; a GPU that multiplies 8-bit floats adds up fewer bits in the forward.
    The backward rounds both operands anew, so that only they are kept for it, as for a plain product; the result has the name
    by which recomputation keeps products.
    """
    return checkpoint_name(_product(form, left, right), PRODUCTS)


def rounded(x: jax.Array, dtype: Any) -> Rounded:
    """Round an array to 8 bits; if an element is not finite, all elements times the factor are NaN.

    Args:
      x: floating, of any shape.
      dtype: `VALUES` or `GRADIENTS`.
    """
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), initial=0)
    bits = jax.lax.bitcast_convert_type(float(jnp.finfo(dtype).max) / jnp.maximum(most, _LEAST), jnp.uint32)
    scale = jax.lax.bitcast_convert_type(bits & jnp.uint32(_EXPONENT), jnp.float32)
    return Rounded((wide * scale).astype(dtype), 1 / scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form, left, right):
    return _multiplied(form, rounded(left, VALUES), rounded(right, VALUES))


def _forward(form, left, right):
    return _product(form, left, right), (left, right)


def _backward(form, saved, grad):
    left, right = saved
    of_left, of_right = form.contracted
    free_left = tuple(dim for dim in range(left.ndim) if dim not in of_left)
    free_right = tuple(dim for dim in range(right.ndim) if dim not in of_right)
    outer, inner = tuple(range(len(free_left))), tuple(range(len(free_left), grad.ndim))
    given = rounded(grad, GRADIENTS)
    to_left = ProductForm((inner, free_right), left.dtype, form.native)
    to_right = ProductForm((free_left, outer), right.dtype, form.native)
    # Free dims of left, then summed ones as right has them; summed dims as left has them, then free ones of right.
    made_left = _multiplied(to_left, given, rounded(right, VALUES), backward=True)
    made_right = _multiplied(to_right, rounded(left, VALUES), given, backward=True)
    places_left = dict(zip((*free_left, *_partners(of_right, of_left)), range(left.ndim), strict=True))
    places_right = dict(zip((*_partners(of_left, of_right), *free_right), range(right.ndim), strict=True))
    return (
        jnp.transpose(made_left, [places_left[dim] for dim in range(left.ndim)]),
        jnp.transpose(made_right, [places_right[dim] for dim in range(right.ndim)]),
    )


def _partners(own: tuple[int, ...], others: tuple[int, ...]) -> list[int]:
    """The dims that are contracted with the given dims, in the order of the latter."""
    return [other for _, other in sorted(zip(own, others, strict=True))]


_product.defvjp(_forward, _backward)


def _multiplied(form: ProductForm, left: Rounded, right: Rounded, *, backward: bool = False) -> jax.Array:
    dtype = jnp.dtype(form.dtype)
    # Factors are powers of two: results in bfloat16 may be rounded before they are multiplied by them. float16 has no room.
    summed = jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype
    a, b = (each.values if form.native else each.values.astype(summed) for each in (left, right))
    # XLA:GPU adds up fewer bits of 8-bit operands' products by default; of gradients all, as Flax's own operations ask for.
    precision = jax.lax.Precision.HIGHEST if form.native and backward else None
    numbers = form.contracted, ((), ())
    y = jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=summed)
    return (y * left.factor.astype(summed) * right.factor.astype(summed)).astype(dtype)


# --------------------------------------------------------------------------------------------------
# Which products of a traced program multiply by parameters, which of them may round to 8 bits, and why the others may
# not.
#
# A product is by a parameter where one operand depends on parameters alone (casts, transposes, slices, sums of them)
# and the other is not. What lies between two such products is followed through loops, conditionals and checkpoints.
# --------------------------------------------------------------------------------------------------

_PRODUCTS = {
    "dot_general": "a product of stacks",
    "ragged_dot_general": "a product of experts",
    "conv_general_dilated": "a convolution",
    "scaled_dot": "a product with scales of its own",
}
"""The primitives that multiply by parameters, and why one of them stays as it is unless it is plain."""

_CHOOSING = ("top_k", "approx_top_k", "sort", "argmax", "argmin")
"""The primitives whose first operand decides which of other values count."""


_FEATURES = frozenset(LAYER_AXES) - {"expert"}
"""The mesh axes along which layers split features."""


@dataclass(frozen=True)
class _Known:
    """What is known of a value about the parameters in it.

    Attributes:
      data: whether it depends on anything but parameters and constants.
      weights: the parameters from which a value is computed that depends on no data; else none.
      last: the products by parameters that it depends on directly, not through another such product.
    """

    data: bool = False
    weights: frozenset[str] = frozenset()
    last: frozenset[Equation] = frozenset()

    def __or__(self, other: "_Known") -> "_Known":
        data = self.data or other.data
        weights = frozenset() if data else self.weights | other.weights
        return _Known(data, weights, self.last | other.last)


_NOTHING = _Known()


@dataclass(frozen=True, eq=False)
class WeightProducts:
    """The products of a program that multiply by parameters.

    Attributes:
      rounding: the products that may round their operands.
      rounded: the parameters that these multiply by, sorted.
      left: why the other products do not, by the parameters that they multiply by.
      split: those of the latter parameters that multiply inside a parallel layer's operation with a custom backward.
    """

    rounding: frozenset[Equation]
    rounded: tuple[str, ...]
    left: Mapping[str, str]
    split: tuple[str, ...]

    def within(self, equation: Equation) -> bool:
        """Whether an equation's bodies contain products that are to be rounded."""
        return any(each in self.rounding or self.within(each) for body in equation.bodies for each in body.equations)

    def __str__(self) -> str:
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left.items():
            by_reason.setdefault(why, []).append(name)
        lines = [f"  rounded: {_in_groups(self.rounded) or 'none'}"]
        return "\n".join(lines + [f"  as they were, {why}: {_in_groups(names)}" for why, names in by_reason.items()])


def weight_products(
    program: Program, names: Sequence[str | None], stay: Callable[[frozenset[str]], str | None]
) -> WeightProducts:
    """Find the products of a program that multiply by parameters.

    Args:
      program: of a loss, or of a model's call.
      names: of every input the path of the parameter that it is; None: it is none.
      stay: `stay(parameters)`: why products by a value computed from these stay as they are; None: they need not.
    """
    finder = _Finder()
    given = [_Known(True) if name is None else _Known(weights=frozenset([name])) for name in names]
    results(program, given, finder.rule, _NOTHING)
    rounding: set[Equation] = set()
    rounded: set[str] = set()
    split: set[str] = set()
    left: dict[str, str] = {}
    for equation, weights in finder.products.items():
        named = stay(weights)
        why = named or finder.obstacle(equation)
        if why is None:
            rounding.add(equation)
            rounded |= weights
        else:
            left |= dict.fromkeys(sorted(weights), why)
        if named is None and finder.is_followed(equation) and _is_a_layers(equation):
            split |= weights
    return WeightProducts(frozenset(rounding), tuple(sorted(rounded)), left, tuple(sorted(split)))


def _in_groups(names: Sequence[str]) -> str:
    """Format names, with those that differ only in numbers grouped.

    >>> _in_groups(["blocks/0/up", "blocks/1/up", "head"])
    'blocks/*/up (2), head'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^/])\d+(?![^/])", "*", name), []).append(name)
    return ", ".join(f"{group} ({len(own)})" if len(own) > 1 else own[0] for group, own in groups.items())


class _Finder:
    """Finds products by parameters by following values through a program.

    Attributes:
      products: every product by parameters, and those parameters.
    """

    def __init__(self) -> None:
        self.products: dict[Equation, frozenset[str]] = {}
        self._followed: set[Equation] = set()  # by another product by a parameter
        self._choosing: set[Equation] = set()

    def rule(self, equation: Equation, operands: list[_Known]) -> list[_Known]:
        """The facts about an equation's results."""
        joined = _joined(operands)
        if equation.name in _CHOOSING:
            self._choosing |= operands[0].last
        weights = frozenset().union(*(each.weights for each in operands))
        if weights and joined.data and _multiplies(equation):
            self.products[equation] = self.products.get(equation, frozenset()) | weights
            self._followed |= joined.last
            return [_Known(True, last=frozenset([equation]))] * len(equation.outputs)
        if equation.name == "dynamic_slice" and not operands[0].data:
            return [operands[0]]  # a parameter's slice, whichever it is
        inner = None if _closed(equation) else through(equation, operands, self.rule, _Known.__or__, _NOTHING)
        return [joined] * len(equation.outputs) if inner is None else inner

    def is_followed(self, equation: Equation) -> bool:
        """Whether a product's result is later multiplied by parameters again."""
        return equation in self._followed

    def obstacle(self, equation: Equation) -> str | None:
        """Why a product is not rounded; None if it is."""
        if _closed(equation):
            return "inside of an operation with a backward of its own"
        if equation.name != "dot_general" or any(equation.op.contraction.batched):
            return _PRODUCTS[equation.name]
        if any(aval.ndim < 2 for aval in equation.op.given):
            return "a product of a vector"
        if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (*equation.op.given, *equation.op.made)):
            return "not of real floats"
        if _exact(equation.op.options["precision"]):
            return "of a precision that the model asks for"
        if equation in self._choosing:
            return "what top-k, sort or argmax read"
        return None if self.is_followed(equation) else "the last products"


def _joined(operands: Sequence[_Known]) -> _Known:
    found = _NOTHING
    for each in operands:
        found = found | each
    return found


def _closed(equation: Equation) -> bool:
    """Whether an equation's bodies must not be changed."""
    return bool(equation.bodies) and (equation.name.startswith("custom_") or equation.op.chooses_by_platform)


def _multiplies(equation: Equation) -> bool:
    """Whether an equation is a product, or has one in bodies that must not be changed."""
    if equation.name in _PRODUCTS:
        return True
    return _closed(equation) and any(_has_product(body) for body in equation.bodies)


def _has_product(program: Program) -> bool:
    inside = lambda equation: any(map(_has_product, equation.bodies))
    return any(each.name in _PRODUCTS or inside(each) for each in program.equations)


def _is_a_layers(equation: Equation) -> bool:
    """Whether an equation belongs to a parallel layer, which has a plain product in its place on one device."""
    return _closed(equation) and (SCOPE in str(equation.op.scopes) or any(map(_swaps, equation.bodies)))


def _swaps(program: Program) -> bool:
    """Whether a program communicates along axes that split features."""
    swaps = lambda each: rule_of(each.name).sends is not None and _FEATURES.intersection(each.op.mesh_axes)
    return any(swaps(each) or any(map(_swaps, each.bodies)) for each in program.equations)


def _exact(precision: Any) -> bool:
    """Whether a product asks for more than the platform's default precision."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(each not in (None, jax.lax.Precision.DEFAULT) for each in asked)


# --------------------------------------------------------------------------------------------------
# A model's code with products by parameters in 8-bit floats: its program is traced and run with others in their place.
# --------------------------------------------------------------------------------------------------

_CAPABLE = 8.9
"""The compute capability from which NVIDIA's GPUs multiply floats of 8 bits (Ada, Hopper)."""


_recorded: ContextVar[dict[str, None] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_products() -> Iterator[dict[str, None]]:
    """Collect the descriptions of weight products in programs traced in the block, each once."""
    token = _recorded.set(seen := {})
    try:
        yield seen
    finally:
        _recorded.reset(token)


def reading_float8(fun: Callable, precision: Precision, variables: Variables, *args: Any) -> Any:
    """Call `fun(variables, *args)` with products by parameters rounded as `precision` says.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      precision: `products` None calls `fun` as it is.
      variables: as one rank reads them.
      *args: pytrees of arrays.

    Raises:
      ValueError: where no product is by a parameter and may be rounded, or where one is out of reach, with every parameter.
    """
    if precision.products is None:
        return fun(variables, *args)
    names = [*named_leaves(variables.params), *named_leaves(variables.frozen)]
    stay = functools.partial(_stay, precision.products_kept)

    def in_8_bits(program: Program, values: Sequence[Any]) -> list[Any]:
        named = [*names, *[None] * (len(values) - len(names))]
        found = weight_products(program, named, stay)
        _check(found)
        platform = target_platform()
        _say(said := str(found), platform, native := _has_units(platform))
        if (seen := _recorded.get()) is not None:
            seen[said] = None
        return _Replacing(found, native).run(program, values)

    def read(params: Any, frozen: Any, state: Any, *args: Any) -> Any:
        with products_apart():
            return fun(Variables(params, frozen, state), *args)

    return run_traced(read, in_8_bits, variables.params, variables.frozen, variables.state, *args)


class _Replacing:
    """Runs a program with some of its products in 8 bits."""

    def __init__(self, found: WeightProducts, native: bool):
        self.found, self.native = found, native

    def run(self, program: Program, values: Sequence[Any]) -> list[Any]:
        return run_program(program, values, self._at)

    def _at(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        if equation in self.found.rounding:
            op = equation.op
            left, right = (jnp.asarray(x) for x in operands)
            form = ProductForm(op.contraction.contracted, op.made[0].dtype, self.native)
            with op.scope():
                return [float8_product(form, left, right)]
        return run_bodies(equation, operands, self.run) if self.found.within(equation) else None


def _stay(kept: Sequence[str], weights: frozenset[str]) -> str | None:
    if all(map(is_adapter, weights)):
        return "adapters"
    return "named in products_kept" if any(re.search(each, name) for each in kept for name in weights) else None


def _check(found: WeightProducts) -> None:
    if found.split:
        raise ValueError(
            f"products='fp8': {', '.join(found.split)} are multiplied inside layers that exchange activations in a custom "
            "backward (sequence_parallel, ring, overlap, 3-D layers), where products would not be rounded as on one device: "
            "leave these options out, or name the parameters in products_kept"
        )
    if not found.rounding:
        raise ValueError(f"products='fp8': no product of the model may be rounded\n{found}\nuse another precision")


def _has_units(platform: str) -> bool:
    """Whether a platform's devices multiply 8-bit floats; for GPUs, whether this process's do."""
    return platform == "cuda" and (gpu_capability() or 0.0) >= _CAPABLE


@functools.lru_cache
def _say(found: str, platform: str, native: bool) -> None:
    """Log the products that were found, once for each text."""
    logger.info("products='fp8':\n%s", found)
    if not native:
        _warn(platform)


@functools.lru_cache
def _warn(platform: str) -> None:
    logger.warning(
        "products='fp8': these %s devices are not known to have 8-bit float products: values are rounded to 8 bits and "
        "multiplied in the compute dtype, which gives the same results and is slower than precision='bf16'",
        platform,
    )
