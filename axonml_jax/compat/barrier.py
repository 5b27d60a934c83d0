"""Order without data flow: values that are there only when others are, and that no compiler pass may merge or hoist across.

A barrier changes no value. XLA's schedulers and its search for common subexpressions respect it, on CPU with
`versions.CPU_BARRIER_OPTIONS`.

Types. Since jax 0.11 a barrier leaves varying types as they are (`check_vma=True`). Before, it types every result as varying
over whatever any operand varies over (`versions.BARRIERS_JOIN_TYPES`): type operands alike first, or compare `varying_axes` of
what comes back.
"""

from typing import Any, TypeVar

import jax

T = TypeVar("T")

PRIMITIVE = "optimization_barrier"
"""The name of its equations."""


def together(values: T) -> T:
    """The same values, none of which is there before all are.

    Args:
      values: a pytree of arrays without typed random keys, which have no barrier.
    """
    return jax.lax.optimization_barrier(values)


def after(value: T, others: Any) -> T:
    """`value`, not there before `others` are; these stay in the program for it, even if nothing else reads them.

    Args:
      value: a pytree of arrays without typed random keys.
      others: another one.
    """
    return jax.lax.optimization_barrier((value, others))[0]
