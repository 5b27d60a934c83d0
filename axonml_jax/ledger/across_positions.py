"""What a compiled step sends along an axis that splits positions and is left to the partitioner: attention, sums, the rest."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from axonml_jax.cost.wire import Amount, exact, wire_elements
from axonml_jax.ledger.compiled import CompiledCollective, collectives_in_compiled
from axonml_jax.ledger.partitioner import axes_of, result_bytes
from axonml_jax.ledger.table import aligned, number

_DIMS = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class PositionTraffic:
    """The collectives of one compiled step along such an axis.

    Attributes:
      axis: the mesh axis.
      ranks: its size.
      attention: those of the attention that was recognised.
      sums: those that add up gradients, losses and statistics.
      others: the rest: what the model's code does across positions besides.
    """

    axis: str
    ranks: int
    attention: tuple[CompiledCollective, ...]
    sums: tuple[CompiledCollective, ...]
    others: tuple[CompiledCollective, ...]

    def bytes(self, some: Collection[CompiledCollective]) -> Amount:
        """Bytes that one rank sends for some of them on a ring per step, what is in loops counted once."""
        return exact(sum(map(self._sent, some)))

    def _sent(self, each: CompiledCollective) -> Amount:
        # A reduce-scatter's result is one part of what it takes.
        factor = self.ranks if each.kind == "reduce_scatter" else 1
        return wire_elements(each.kind, factor * result_bytes(each.result), self.ranks)

    def __str__(self) -> str:
        header, rows = ["what", "collective", "where", "place", "bytes/rank"], []
        for what in ("attention", "sums", "others"):
            for each in sorted(getattr(self, what), key=self._sent, reverse=True):
                where = "in a loop" if each.in_loop else "once"
                rows.append([what, each.kind, where, place(each), number(exact(self._sent(each)))])
        return aligned(header, rows, left=4)


def place(collective: CompiledCollective) -> str:
    """The operation that a collective comes from, and the scopes in which the model's code has it."""
    parts = [
        part for part in re.split(r"[/:]", collective.place) if part and not part.startswith(("jit(", "shard_map"))
    ]
    return "/".join(parts[-3:]) or "unknown"


def position_traffic(
    compiled: Any, degrees: Mapping[str, int], axis: str, *, scope: str, parameters: Collection[int]
) -> PositionTraffic:
    """The collectives of a compiled step along one axis.

    Args:
      compiled: optimized HLO, or what gives it.
      degrees: size of every mesh axis, in the mesh's order.
      axis: which one.
      scope: the name scope of the attention that was recognised.
      parameters: elements of each parameter as a rank reads it: sums of so many are those of gradients.
    """
    found: dict[str, list[CompiledCollective]] = {"attention": [], "sums": [], "others": []}
    for each in collectives_in_compiled(compiled):
        if axis in axes_of(each, degrees):
            kind = (
                "attention" if scope in each.place else "sums" if _is_sum(each, parameters, degrees[axis]) else "others"
            )
            found[kind].append(each)
    return PositionTraffic(axis, degrees[axis], *(tuple(some) for some in found.values()))


def _is_sum(collective: CompiledCollective, parameters: Collection[int], ranks: int) -> bool:
    """Whether everything that a reduction adds up has as many elements as a parameter, or is at most a vector."""
    if collective.kind not in ("all_reduce", "reduce_scatter"):
        return False
    factor = ranks if collective.kind == "reduce_scatter" else 1
    shapes = [[int(n) for n in dims.split(",") if n] for dims in _DIMS.findall(collective.result)]
    return all(len(shape) <= 1 or factor * math.prod(shape) in parameters for shape in shapes)
