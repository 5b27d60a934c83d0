"""How the dims of an operation's results follow those of its operands, primitive by primitive: for `rules.py`.

A rule `follow(op, k, dim, parts)` names the dim of every result of which part p (of `parts` equal parts behind each other)
is made, of operand k, of part p of `dim` alone; None: there is none, or it is not known. All but a reshape's dims go on index
by index, whatever the parts.
"""

import math
from collections.abc import Callable, Mapping

from axonml_jax.compat.operation import Operation

Follow = Callable[[Operation, int, int, int], int | None]


def same(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Elementwise: the same dim, where the operand is not spread over it. Bits cast to another width have other dims."""
    given, made = op.given[k].shape, op.made[0].shape
    return dim if len(given) == len(made) and given[dim] == made[dim] else None


def _broadcast(op: Operation, k: int, dim: int, parts: int) -> int | None:
    to = op.options["broadcast_dimensions"][dim]
    return to if op.given[0].shape[dim] == op.options["shape"][to] else None


def _transpose(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return tuple(op.options["permutation"]).index(dim)


def _reshape(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """A dim goes on where one of the new shape begins with it, and divides too."""
    old, new = op.given[0].shape, op.made[0].shape
    before = math.prod(old[:dim])
    begins = [j for j, size in enumerate(new) if size > 1 and math.prod(new[:j]) == before]
    return begins[0] if begins and new[begins[0]] % parts == 0 and op.options["dimensions"] is None else None


def _without(name: str) -> Follow:
    """Dims named by an option go."""

    def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
        gone = op.options[name]
        gone = {d % op.given[0].ndim for d in (gone if isinstance(gone, (tuple, list)) else (gone,))}
        return None if dim in gone else dim - sum(d < dim for d in gone)

    return follow


def _beside(name: str) -> Follow:
    """Something happens along the dims named by an option; all others go on."""

    def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
        along = op.options[name]
        along = {d % op.given[0].ndim for d in (along if isinstance(along, (tuple, list)) else (along,))}
        return None if dim in along else dim

    return follow


def _whole(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """What is taken whole goes on."""
    return dim if k == 0 and op.given[0].shape[dim] == op.made[0].shape[dim] else None


def _updated(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """What is written whole goes on, of the array and of what is written into it."""
    return dim if k < 2 and op.given[0].shape[dim] == op.given[1].shape[dim] else None


def _pad(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return dim if k == 0 and tuple(op.options["padding_config"][dim]) == (0, 0, 0) else None


def _product(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Paired dims come first, then the left operand's own, then the right one's."""
    contracted, batched = op.contraction
    if k > 1 or dim in contracted[k]:
        return None
    if dim in batched[k]:
        return batched[k].index(dim)
    free = [[d for d in range(op.given[i].ndim) if d not in (*contracted[i], *batched[i])] for i in (0, 1)]
    return len(batched[k]) + (len(free[0]) if k else 0) + free[k].index(dim)


DIMS: Mapping[str, Follow] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _beside("dimension"),
    "dot_general": _product,
    "dynamic_slice": _whole,
    "dynamic_update_slice": _updated,
    "name": same,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _beside("dimensions"),
    "slice": _whole,
    "sort": _beside("dimension"),
    "split": _beside("axis"),
    "squeeze": _without("dimensions"),
    "transpose": _transpose,
    "unstack": _without("axis"),
    **{name: _beside("axis") for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")},
    **{f"reduce_{name}": _without("axes") for name in ("and", "max", "min", "or", "prod", "sum", "xor")},
    **{name: _without("axes") for name in ("argmax", "argmin")},
}
"""Of primitives that are not elementwise."""
