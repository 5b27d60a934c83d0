"""Pallas's Triton backend: calls a kernel over whole arrays, on NVIDIA GPUs or interpreted anywhere.

JAX has deprecated the backend since 0.11; only this file uses it, so that moving to another one (Mosaic GPU, jax-triton)
changes this file alone. A canary fails when it is gone (`python -m axonml_jax.compat`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from axonml_jax.compat.order import manual_axes
from axonml_jax.compat.varying_types import cast_to_varying, varying_axes

_LOG2E = 1.4426950408889634


def varying_together(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Types the arrays as varying over the same manual axes (`check_vma=True`), as a kernel requires of its operands.

    The casts' transposes sum the gradients of parameters: call a function with a custom gradient on the arrays returned.
    """
    every = frozenset[str]().union(*map(varying_axes, arrays))
    missing = [tuple(sorted(every - varying_axes(x))) for x in arrays]
    return [cast_to_varying(x, axes) if axes else x for x, axes in zip(arrays, missing, strict=True)]


def kernel_call(
    kernel: Callable[..., None],
    results: Sequence[tuple[tuple[int, ...], Any]],
    grid: tuple[int, ...],
    operands: Sequence[jax.Array],
    *,
    name: str,
    warps: int,
    interpret: bool,
    in_place: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Runs a kernel that indexes whole arrays itself, and returns its results.

    Args:
      kernel: a function of references to the operands and to the results.
      results: the shape and the dtype of each.
      grid: the number of programs along each dim.
      operands: arrays that vary over the same manual axes; so do the results.
      name: the kernel's name, in profiles.
      warps: the number of warps, of 32 threads, of each program.
      interpret: run it by plain operations, on any platform.
      in_place: number of an operand -> number of the result that takes its memory.
    """
    kinds: dict[str, Any] = {}
    if manual_axes():
        kinds["manual_axis_type"] = jax.sharding.ManualAxisType(varying=varying_axes(operands[0]))  # pyright: ignore
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, **kinds) for shape, dtype in results],
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(results),
        interpret=interpret,
        compiler_params=backend.CompilerParams(num_warps=warps, num_stages=1),
        input_output_aliases=dict(in_place or {}),
        name=name,
    )(*operands)


def load(ref: Any, places: Any, inside: Any = None, otherwise: float = 0.0) -> jax.Array:
    """Loads elements of an operand; `otherwise` where `inside` is False."""
    at = ref.at[places]
    return backend.load(at) if inside is None else backend.load(at, mask=inside, other=otherwise)


def store(ref: Any, places: Any, value: jax.Array, inside: Any = None) -> None:
    """Writes elements of a result, in its dtype, where `inside` is True; None: everywhere."""
    backend.store(ref.at[places], value.astype(ref.dtype), mask=inside)


def tanh(x: jax.Array, interpret: bool) -> jax.Array:
    """The hardware's hyperbolic tangent, with an error of at most 2^-11, below bfloat16's rounding; exact if interpreted."""
    return jnp.tanh(x) if interpret else backend.approx_tanh(x)


def exp(x: jax.Array, shift: jax.Array, interpret: bool) -> jax.Array:
    """exp(x - shift) by the hardware's power of two, whose error is at most 2^-22.

    `jnp.exp` takes five more instructions for every element: more time than reading it.
    """
    powers = x * _LOG2E - shift * _LOG2E
    if interpret:
        return jnp.exp2(powers)
    like = [jax.ShapeDtypeStruct(x.shape, jnp.float32)]
    one: Any = backend.elementwise_inline_asm
    return one("ex2.approx.ftz.f32 $0, $1;", args=[powers], constraints="=f,f", pack=1, result_shape_dtypes=like)[0]
