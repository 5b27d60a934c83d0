"""Which products of a traced program multiply by parameters, which of them may round to 8 bits, and why the others may not.

A product is by a parameter where one operand is made of parameters alone (casts, transposes, slices, sums of them) and the
other is not. What lies between two such products is followed through loops, conditionals and checkpoints.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.parallel.tensor.products.ordered import SCOPE
from axonml_jax.program.dataflow import results, through
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.rules import rule_of

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
    """What is known of a value.

    Attributes:
      data: whether it depends on anything but parameters and constants.
      weights: of what does not, the parameters that it is made of.
      last: the products by parameters that it is made of by way of no other such product.
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
    """The products by parameters in a program.

    Attributes:
      rounding: those that may round their operands.
      rounded: the parameters that these multiply by, sorted.
      left: why other products do not, by the parameters that they multiply by.
      split: of these, parameters that multiply where ranks swap activations in an operation with a backward of its own.
    """

    rounding: frozenset[Equation]
    rounded: tuple[str, ...]
    left: Mapping[str, str]
    split: tuple[str, ...]

    def within(self, equation: Equation) -> bool:
        """Whether there are some of the first in an equation's bodies."""
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
    """The products by parameters in a program.

    Args:
      program: of a loss, or of a model's call.
      names: of every input the path of the parameter that it is; None: it is none.
      stay: why products by something made of these parameters are left as they are, or None.
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
    """Names, those together that differ in numbers only.

    >>> _in_groups(["blocks/0/up", "blocks/1/up", "head"])
    'blocks/*/up (2), head'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<![^/])\d+(?![^/])", "*", name), []).append(name)
    return ", ".join(f"{group} ({len(own)})" if len(own) > 1 else own[0] for group, own in groups.items())


class _Finder:
    """Follows values through a program.

    Attributes:
      products: every product by parameters, and those parameters.
    """

    def __init__(self) -> None:
        self.products: dict[Equation, frozenset[str]] = {}
        self._followed: set[Equation] = set()  # by another product by a parameter
        self._choosing: set[Equation] = set()

    def rule(self, equation: Equation, operands: list[_Known]) -> list[_Known]:
        """What is known of an equation's results."""
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
        """Whether a product's results are multiplied by parameters again."""
        return equation in self._followed

    def obstacle(self, equation: Equation) -> str | None:
        """Why a product stays as it is, or None."""
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
    """Whether its bodies must stay what they are."""
    return bool(equation.bodies) and (equation.name.startswith("custom_") or equation.op.chooses_by_platform)


def _multiplies(equation: Equation) -> bool:
    """Whether it is a product, or has one in bodies that stay closed."""
    if equation.name in _PRODUCTS:
        return True
    return _closed(equation) and any(_has_product(body) for body in equation.bodies)


def _has_product(program: Program) -> bool:
    inside = lambda equation: any(map(_has_product, equation.bodies))
    return any(each.name in _PRODUCTS or inside(each) for each in program.equations)


def _is_a_layers(equation: Equation) -> bool:
    """Whether it is of a parallel layer, which has a plain product there on one device."""
    return _closed(equation) and (SCOPE in str(equation.op.scopes) or any(map(_swaps, equation.bodies)))


def _swaps(program: Program) -> bool:
    """Whether ranks along which layers split features swap values in it."""
    swaps = lambda each: rule_of(each.name).sends is not None and _FEATURES.intersection(each.op.mesh_axes)
    return any(swaps(each) or any(map(_swaps, each.bodies)) for each in program.equations)


def _exact(precision: Any) -> bool:
    """Whether a product asks for more than the platform's usual precision."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return any(each not in (None, jax.lax.Precision.DEFAULT) for each in asked)
