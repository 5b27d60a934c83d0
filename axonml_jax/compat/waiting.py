"""Order that XLA:CPU keeps when it runs a program: a value that is computed from others, although they do not change it.

XLA:CPU runs what is independent at the same time, and what it compiled knows barriers no more: only reading another operation's
result makes an operation wait for it. Collectives start in the program's order, but a loop with collectives inside counts as
started with its first one. So a collective that is independent of an earlier loop meets the loop's own ones on other devices:
wrong numbers, a hang, or an abort, in jax 0.10 to 0.12 (`program/on_cpu/collective_order.py` is the remedy).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

PRIMITIVE = "wait_for"
"""The name of its equations."""


def can_wait(value: Any) -> bool:
    """Whether `waiting` takes an array: it has elements, which are numbers or truth values (typed random keys are not)."""
    return value.size > 0 and not jnp.issubdtype(value.dtype, jax.dtypes.extended)


def waiting(value: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """`value`, bit for bit and of the same type, which XLA:CPU makes when it has made `others`, for one more pass over it.

    Args:
      value: any array that `can_wait`.
      others: arrays that can; one element of each is read.
    """
    return _wait_for.bind(value, *others)


def _selected(value: jax.Array, *others: jax.Array) -> jax.Array:
    """`value`, chosen by a condition that always holds, which no compiler pass knows."""
    total = sum((_bits(other) for other in others), jnp.uint32(0))
    even = (total * (total + 1)) & 1 == 0  # one of two neighbours is
    return jnp.where(even, value, ~value if value.dtype == bool else value + jnp.ones((), value.dtype))


def _bits(value: jax.Array) -> jax.Array:
    """The first element of an array as some integer."""
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if jnp.iscomplexobj(first):
        first = first.real
    if jnp.issubdtype(first.dtype, jnp.inexact):
        first = jax.lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    return first.astype(jnp.uint32)


_wait_for = Primitive(PRIMITIVE)
_wait_for.def_impl(_selected)
_wait_for.def_abstract_eval(lambda value, *others: value)
ad.primitive_jvps[_wait_for] = lambda primals, tangents: (_wait_for.bind(*primals), tangents[0])
mlir.register_lowering(_wait_for, mlir.lower_fun(_selected, multiple_results=False))
