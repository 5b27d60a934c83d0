"""How a dim that is split over ranks goes through one equation of a traced program, where it may (`program/dims.py`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axonml_jax.program.atoms import is_constant
from axonml_jax.program.program import Equation
from axonml_jax.program.rules import follow


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


def carried(equation: Equation, marks: Sequence[Mark], ranks: int) -> Mark | bool:
    """The mark of an equation's results; False where a split value would not come out right.

    Args:
      equation: the equation.
      marks: those of its operands.
      ranks: into how many parts a split dim is cut.
    """
    splits = {k: mark for k, mark in enumerate(marks) if isinstance(mark, Split)}
    if not splits:
        return _uniform(equation, marks)
    found = {(_followed(equation, k, mark, ranks), mark.blocks) for k, mark in splits.items()}
    goes = found.pop()[0]
    if found or goes is None:
        return False
    others = [k for k in range(len(marks)) if k not in splits]
    if not all(_is_uniform(equation, k, dim, marks[k]) for k in others for dim in _into(equation, k, goes.dim, ranks)):
        return False
    return replace(goes, sources=frozenset().union(*(mark.sources for mark in splits.values())))


def _followed(equation: Equation, k: int, mark: Split, ranks: int) -> Split | None:
    """Where operand k's split dim goes; its blocks stay, become a dim of their own, or are taken apart."""
    op = equation.op
    if mark.blocks == 1:
        dim = follow(op, k, mark.dim, ranks)
        return None if dim is None else Split(dim, frozenset())
    dim, shape = follow(op, k, mark.dim, 1), op.made[0].shape if op.made else ()
    if blocks_wanted(equation, mark) == mark.blocks:
        if op.name != "reshape":
            return Split(mark.dim, frozenset())
        fits = dim is not None and dim + 1 < len(shape) and shape[dim] == mark.blocks and shape[dim + 1] % ranks == 0
        return Split(dim + 1, frozenset()) if fits and dim is not None else None
    stays = dim is not None and op.name != "dot_general" and shape[dim] == op.given[k].shape[mark.dim]
    return Split(dim, frozenset(), mark.blocks) if stays and dim is not None else None


def blocks_wanted(equation: Equation, mark: Split) -> int:
    """Into how many equal parts behind each other an equation cuts a split dim; 1: it does not."""
    op = equation.op
    if op.name not in ("split", "slice", "reshape"):
        return 1
    shape, out = op.given[0].shape, op.made[0].shape
    size = shape[mark.dim]
    if op.name == "split" and op.options["axis"] == mark.dim:
        sizes = set(op.options["sizes"])
        return len(op.options["sizes"]) if len(sizes) == 1 else 1
    if op.name == "slice" and out[mark.dim] and size % out[mark.dim] == 0 and op.options["strides"] is None:
        return size // out[mark.dim] if op.options["start_indices"][mark.dim] % out[mark.dim] == 0 else 1
    if op.name == "reshape":
        before = math.prod(shape[: mark.dim])
        return next((new for j, new in enumerate(out) if 1 < new < size and math.prod(out[:j]) == before), 1)
    return 1


def _into(equation: Equation, k: int, dim: int, ranks: int) -> list[int]:
    """The dims of operand k that go into a dim of the results."""
    return [d for d in range(equation.op.given[k].ndim) if follow(equation.op, k, d, ranks) == dim]


def _is_uniform(equation: Equation, k: int, dim: int, mark: Mark) -> bool:
    """Whether operand k is the same along one of its dims."""
    if is_constant(equation.inputs[k]) or equation.op.given[k].shape[dim] == 1:
        return True
    return isinstance(mark, Uniform) and dim in mark.dims


def _uniform(equation: Equation, marks: Sequence[Mark]) -> Uniform | None:
    """Along which dims a result is the same, of operands of which none is split."""
    op, shape = equation.op, equation.op.made[0].shape if equation.outputs else ()
    if op.name == "iota":
        dims = set(range(len(shape))) - {op.options["dimension"]}
    elif op.name == "reshape":
        every = all(_is_uniform(equation, 0, d, marks[0]) for d in range(op.given[0].ndim))
        dims = set(range(len(shape))) if every else set()
    else:
        into = [[(k, d) for k in range(len(marks)) for d in _into(equation, k, dim, 1)] for dim in range(len(shape))]
        alike = lambda found: all(_is_uniform(equation, k, d, marks[k]) for k, d in found)
        dims = {dim for dim, found in enumerate(into) if (found or op.name == "broadcast_in_dim") and alike(found)}
    return Uniform(frozenset(dims)) if dims else None
