"""A model's code with products by parameters in 8-bit floats: its program is traced and run with others in their place."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import named_leaves
from axonml_jax.logging import logger
from axonml_jax.model.functional import Variables
from axonml_jax.model.lora.adapters import is_adapter
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.float8.float8_product import ProductForm, float8_product
from axonml_jax.parallel.float8.weight_products import WeightProducts, weight_products
from axonml_jax.parallel.tensor.megatron.fused_attention import target_platform
from axonml_jax.program.program import Equation, Program
from axonml_jax.program.run import run_bodies, run_program, run_traced

_CAPABLE = 8.9
"""The compute capability from which NVIDIA's GPUs multiply floats of 8 bits (Ada, Hopper)."""


_recorded: ContextVar[dict[str, None] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_products() -> Iterator[dict[str, None]]:
    """Collects what is said of products by parameters in programs that are traced in the block, each text once."""
    token = _recorded.set(seen := {})
    try:
        yield seen
    finally:
        _recorded.reset(token)


def reading_float8(fun: Callable, precision: Precision, variables: Variables, *args: Any) -> Any:
    """`fun(variables, *args)`, with products by parameters computed as `precision` says.

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
            f"products='fp8': {', '.join(found.split)} multiply inside of layers whose ranks swap activations in a backward "
            "of their own (sequence_parallel, ring, overlap, 3-D layers), which would not be rounded as on one device: leave "
            "these options out, or name the parameters in products_kept"
        )
    if not found.rounding:
        raise ValueError(f"products='fp8': no product of the model may be rounded\n{found}\nuse another precision")


def _has_units(platform: str) -> bool:
    """Whether the devices of a platform multiply floats of 8 bits; of GPUs whether this process's do."""
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "")) if platform == "cuda" else ""
    return re.fullmatch(r"\d+\.\d+", capability) is not None and float(capability) >= _CAPABLE


@functools.lru_cache
def _say(found: str, platform: str, native: bool) -> None:
    """Once for each."""
    logger.info("products='fp8':\n%s", found)
    if not native:
        _warn(platform)


@functools.lru_cache
def _warn(platform: str) -> None:
    logger.warning(
        "products='fp8': these %s devices are not known to multiply floats of 8 bits: values are rounded to them and "
        "multiplied in the compute dtype, which gives the same products and is more work than precision='bf16'",
        platform,
    )
