"""Order without data flow: values that are there only when others are, and that no compiler pass may merge or hoist across.

A barrier changes no value. XLA's schedulers and its search for common subexpressions respect it, on CPU with
`versions.CPU_BARRIER_OPTIONS`.

Types. Since jax 0.11 a barrier leaves varying types as they are (`check_vma=True`). Before, it types every result as varying
over whatever any operand varies over (`versions.BARRIERS_JOIN_TYPES`): type operands alike first, or compare `varying_axes` of
what comes back.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.compat.versions import BARRIERS_JOIN_TYPES

T = TypeVar("T")

PRIMITIVE = "optimization_barrier"
"""The name of its equations."""


def together(values: T) -> T:
    """The same values, none of which is there before all are.

    Args:
      values: a pytree of arrays without typed random keys, which have no barrier.
    """
    return jax.lax.optimization_barrier(values)


def together_as_typed(values: Sequence[Any]) -> list[Any]:
    """`together` of arrays that may vary over different axes, each of which keeps its type.

    Where a barrier types all of its results alike (before jax 0.11) there is one for each type.
    """
    if not BARRIERS_JOIN_TYPES:
        return list(together(list(values)))
    found: list[Any] = list(values)
    for axes in {varying_axes(value): None for value in values}:
        own = [i for i, value in enumerate(values) if varying_axes(value) == axes]
        for i, value in zip(own, together([values[i] for i in own]), strict=True):
            found[i] = value
    return found


def after(value: T, others: Any) -> T:
    """`value`, not there before `others` are; these stay in the program for it, even if nothing else reads them.

    Args:
      value: a pytree of arrays without typed random keys.
      others: another one.
    """
    return jax.lax.optimization_barrier((value, others))[0]
