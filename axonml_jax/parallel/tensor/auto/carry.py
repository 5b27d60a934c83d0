"""How a dim that is split over ranks goes through one equation of a traced program, where it may."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.model.atoms import is_constant

ELEMENTWISE = frozenset(
    """abs add and cbrt ceil clamp convert_element_type copy copy_p cos div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow reduce_precision rem round rsqrt select_n
    sign sin sqrt square stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
"""Primitives that treat every element alike."""


@dataclass(frozen=True)
class Split:
    """A value of which every rank may hold a part.

    Attributes:
      dim: the dim that is split.
      sources: the layers whose outputs it is made of.
      blocks: of how many equal parts behind each other the dim consists, each of them split.
    """

    dim: int
    sources: frozenset
    blocks: int = 1


@dataclass(frozen=True)
class Uniform:
    """A value that is the same along some dims, whatever their sizes."""

    dims: frozenset[int]


Mark = Split | Uniform | None
"""What is known of a value; None: it is whole, and differs along every dim."""


def carried(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    """The mark of an equation's results; False where a split value would not come out right.

    Args:
      eqn: the equation.
      marks: those of its operands.
      ranks: into how many parts a split dim is cut.
    """
    name = eqn.primitive.name
    splits = [mark for mark in marks if isinstance(mark, Split)]
    if name in ELEMENTWISE:
        return _elementwise(eqn, marks)
    found = RULES[name](eqn, marks, ranks) if name in RULES else None
    return False if splits and not isinstance(found, Split) else found


def _alike(dim: int, mark: Mark, operand: Any) -> bool:
    """Whether an operand's part is the same on all ranks that split `dim`."""
    shape = operand.aval.shape
    if is_constant(operand) or not shape or shape[dim] == 1:  # a size of 1 is broadcast
        return True
    return isinstance(mark, Uniform) and dim in mark.dims


def _joined(eqn: Any, marks: Sequence[Mark]) -> Mark | bool:
    """One split dim for all operands, each split there or uniform."""
    splits = [mark for mark in marks if isinstance(mark, Split)]
    dim = splits[0].dim
    if any((mark.dim, mark.blocks) != (dim, splits[0].blocks) for mark in splits):
        return False
    others = [(mark, v) for mark, v in zip(marks, eqn.invars, strict=True) if not isinstance(mark, Split)]
    if not all(_alike(dim, mark, v) for mark, v in others):
        return False
    return Split(dim, frozenset().union(*(mark.sources for mark in splits)), splits[0].blocks)


def _elementwise(eqn: Any, marks: Sequence[Mark]) -> Mark | bool:
    if any(isinstance(mark, Split) for mark in marks):
        return _joined(eqn, marks)
    every = range(len(eqn.outvars[0].aval.shape))
    dims = frozenset(d for d in every if all(_alike(d, mark, v) for mark, v in zip(marks, eqn.invars, strict=True)))
    return Uniform(dims) if dims else None


def _moved(mark: Mark, where: Mapping[int, int]) -> Mark:
    """A mark whose dims are elsewhere now; those that `where` lacks are gone."""
    if isinstance(mark, Split):
        return Split(where[mark.dim], mark.sources, mark.blocks) if mark.dim in where else None
    if isinstance(mark, Uniform) and (dims := frozenset(where[d] for d in mark.dims if d in where)):
        return Uniform(dims)
    return None


def _broadcast(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    given = eqn.invars[0].aval.shape
    kept = {i: d for i, d in enumerate(dims) if given[i] == shape[d]}
    moved = _moved(marks[0], kept)
    if isinstance(marks[0], Split):
        return moved
    spread = set(range(len(shape))) - set(kept.values())
    dims = frozenset(spread | (set(moved.dims) if isinstance(moved, Uniform) else set()))
    return Uniform(dims) if dims else None


def _transpose(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    return _moved(marks[0], {old: new for new, old in enumerate(eqn.params["permutation"])})


def _reshape(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    """A split dim stays what it is where it begins a dim of the new shape that divides too; blocks may become a dim before."""
    old, new, mark = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, marks[0]
    if isinstance(mark, Uniform) and len(mark.dims) == len(old):
        return Uniform(frozenset(range(len(new))))
    if not isinstance(mark, Split):
        return None
    before = math.prod(old[: mark.dim])
    found = [j for j, size in enumerate(new) if size > 1 and math.prod(new[:j]) == before]
    if mark.blocks > 1 and found:
        if new[found[0]] == old[mark.dim]:
            return Split(found[0], mark.sources, mark.blocks)
        found = [found[0] + 1] if new[found[0]] == mark.blocks and found[0] + 1 < len(new) else []
    return Split(found[0], mark.sources) if found and new[found[0]] % ranks == 0 else None


def _without(name: str) -> Callable:
    """Dims named by a parameter go."""

    def rule(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
        gone = {d % len(eqn.invars[0].aval.shape) for d in eqn.params[name]}
        kept = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in gone]
        return _moved(marks[0], {old: new for new, old in enumerate(kept)})

    return rule


def _unstack(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    """One dim goes, into as many results."""
    gone = eqn.params["axis"] % len(eqn.invars[0].aval.shape)
    return _moved(marks[0], {d: d - (d > gone) for d in range(len(eqn.invars[0].aval.shape)) if d != gone})


def _along(name: str) -> Callable:
    """Something is done along one dim, which must not be the split one."""

    def rule(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark | bool:
        mark = marks[0]
        return mark if isinstance(mark, Split) and mark.dim != eqn.params[name] else None

    return rule


def _concatenate(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    if not any(isinstance(mark, Split) for mark in marks):
        return None
    found = _joined(eqn, marks)
    return found if isinstance(found, Split) and found.dim != eqn.params["dimension"] else False


def _split(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    """Along another dim than the split one, or into its blocks."""
    mark = marks[0]
    if isinstance(mark, Split) and mark.dim == eqn.params["axis"]:
        return Split(mark.dim, mark.sources) if mark.blocks > 1 and blocks_wanted(eqn, mark) == mark.blocks else None
    return mark if isinstance(mark, Split) else None


def _slice(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    shape, mark = eqn.invars[0].aval.shape, marks[0]
    if isinstance(mark, Split) and mark.blocks > 1 and blocks_wanted(eqn, mark) == mark.blocks:
        return Split(mark.dim, mark.sources)
    same = [d for d, size in enumerate(shape) if eqn.outvars[0].aval.shape[d] == size]
    return _moved(marks[0], {d: d for d in same})


def _dot(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    """A product of every part with its own counterpart, or of one side's free dim."""
    (contracted, batched) = eqn.params["dimension_numbers"]
    at = []
    for side, mark in enumerate(marks):
        if not isinstance(mark, Split):
            continue
        if mark.blocks > 1:
            return False
        batch = list(batched[side])
        if mark.dim in contracted[side]:
            return False
        if mark.dim in batch:
            at.append((batch.index(mark.dim), mark.dim in batch))
            continue
        free = [[d for d in range(len(v.aval.shape)) if d not in (*contracted[i], *batched[i])] for i, v in _sides(eqn)]
        place = len(batch) + (len(free[0]) if side else 0) + free[side].index(mark.dim)
        at.append((place, False))
    both = all(isinstance(mark, Split) for mark in marks)
    if not at or len(set(at)) > 1 or at[0][1] is not both:
        return False
    return Split(at[0][0], frozenset().union(*(mark.sources for mark in marks if isinstance(mark, Split))))


def _sides(eqn: Any) -> list[tuple[int, Any]]:
    return list(enumerate(eqn.invars[:2]))


def blocks_wanted(eqn: Any, mark: Split) -> int:
    """Into how many equal parts behind each other an equation cuts a split dim; 1: it does not."""
    name, shape, out = eqn.primitive.name, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    size = shape[mark.dim]
    if name == "split" and eqn.params["axis"] == mark.dim:
        sizes = set(eqn.params["sizes"])
        return len(eqn.params["sizes"]) if len(sizes) == 1 else 1
    if name == "slice" and out[mark.dim] and size % out[mark.dim] == 0 and eqn.params["strides"] is None:
        return size // out[mark.dim] if eqn.params["start_indices"][mark.dim] % out[mark.dim] == 0 else 1
    if name == "reshape":
        before = math.prod(shape[: mark.dim])
        return next((new for j, new in enumerate(out) if 1 < new < size and math.prod(out[:j]) == before), 1)
    return 1


def _iota(eqn: Any, marks: Sequence[Mark], ranks: int) -> Mark:
    dims = frozenset(range(len(eqn.params["shape"]))) - {eqn.params["dimension"]}
    return Uniform(dims) if dims else None


RULES: Mapping[str, Callable[[Any, Sequence[Mark], int], Mark | bool]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _dot,
    "iota": _iota,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "squeeze": _without("dimensions"),
    "transpose": _transpose,
    **{name: _along("axis") for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")},
    **{f"reduce_{name}": _without("axes") for name in ("and", "max", "min", "or", "prod", "sum")},
    **{name: _without("axes") for name in ("argmax", "argmin")},
}
"""Primitives that may have split operands besides element-wise ones. The program on a rank's sizes is compared besides."""
