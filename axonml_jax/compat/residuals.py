"""`jax.vjp` split in two: a forward that keeps activations but no weights, and a backward that is handed weights again.

This is the trick under ZeRO-3 and the pipeline (docs/adr/0006): the backward re-reads weights without recomputing the
forward. `jax.vjp` returns a pytree whose leaves are its residuals; those that *are* a value the caller can provide again
are dropped by identity and put back by position. JAX promises neither that pytree nor the identity. Where a weight came back as
another object it would be kept, whole, from forward to backward: right results, and ZeRO-3's memory lost. With
`check_vma=True` identity holds only for weights that are cast to varying first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward.

    Attributes:
      residuals: the arrays kept.
      treedef: the structure of the vjp function, over all its residuals.
      places: for every residual where it is: (True, index among the values provided again) or (False, index among the kept).
    """

    residuals: list[jax.Array]
    treedef: Any
    places: tuple[tuple[bool, int], ...]

    def restore(self, provided: Sequence[Any]) -> Callable:
        """The vjp function, with `provided` (in the order of the forward's) in the place of what was dropped."""
        return self.treedef.unflatten([(provided if again else self.residuals)[i] for again, i in self.places])


def vjp_without(fun: Callable, args: Sequence[Any], provided: Sequence[Any]) -> tuple[Any, Any, Saved]:
    """`jax.vjp(fun, *args, has_aux=True)`, keeping no residual that is one of `provided`, and no array twice.

    Args:
      fun: a function of `args` that returns (outputs, what has no gradient).
      args: what to differentiate for.
      provided: values used by `fun` (arguments or closed over) that the backward will have again, such as gathered weights.

    Returns:
      Both results of `fun`, and what to keep; `saved.restore(provided_again)(cotangents)` gives the cotangents of `args`.
    """
    out, vjp, aux = jax.vjp(fun, *args, has_aux=True)
    leaves, treedef = jax.tree.flatten(vjp)
    place = {id(value): (True, i) for i, value in enumerate(provided)}
    kept: list[Any] = []
    for leaf in leaves:
        if id(leaf) not in place:
            place[id(leaf)] = (False, len(kept))
            kept.append(leaf)
    return out, aux, Saved(kept, treedef, tuple(place[id(leaf)] for leaf in leaves))
