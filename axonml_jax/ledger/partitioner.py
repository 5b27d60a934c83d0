"""What XLA's partitioner sends along an axis that was left to it: counted in the compiled program, the only place it shows."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.cost.wire import Amount, exact, wire_elements
from axonml_jax.ledger.compiled import CompiledCollective, collectives_in_compiled
from axonml_jax.ledger.table import aligned, number

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"mesh\[(.*?)\]\s*\{(.*?)\}")


@dataclass(frozen=True)
class PartitionedTraffic:
    """The collectives of one compiled step along the partitioner's axis.

    Attributes:
      axis: the mesh axis.
      ranks: its size.
      entries: (kind, result type, whether in a loop) -> how many there are. What a loop holds runs once per trip.
    """

    axis: str
    ranks: int
    entries: Mapping[tuple[str, str, bool], int]

    @property
    def bytes(self) -> Amount:
        """Bytes that one rank sends on a ring per step, what is in loops counted once."""
        sent = (self._sent(kind, result) * count for (kind, result, _), count in self.entries.items())
        return exact(sum(sent))

    def _sent(self, kind: str, result: str) -> Amount:
        # A reduce-scatter's result is one part of what it takes.
        factor = self.ranks if kind == "reduce_scatter" else 1
        return wire_elements(kind, factor * result_bytes(result), self.ranks)

    def __str__(self) -> str:
        header = ["label", "collective", "axes", "result", "where", "count", "bytes/rank"]
        rows = []
        for (kind, result, loop), count in self.entries.items():
            where, sent = "in a loop" if loop else "once", number(exact(self._sent(kind, result) * count))
            rows.append(["partitioner", kind, f"{self.axis} ({self.ranks})", result, where, str(count), sent])
        note = "chosen by XLA's partitioner, read from the compiled program"
        return f"{aligned(header, rows, left=5)}\n{self.axis}: {number(self.bytes)} bytes per rank, {note}"


def partitioned_traffic(compiled: Any, degrees: Mapping[str, int], axis: str) -> PartitionedTraffic:
    """The collectives of a compiled program that move data along one axis.

    Args:
      compiled: optimized HLO, or what gives it (`jax.jit(f).lower(...).compile()`).
      degrees: size of every mesh axis, in the mesh's order.
      axis: which one.
    """
    found = Counter(
        (each.kind, re.sub(r"\{.*?\}", "", each.result), each.in_loop)
        for each in collectives_in_compiled(compiled)
        if axis in axes_of(each, degrees)
    )
    return PartitionedTraffic(
        axis, degrees[axis], dict(sorted(found.items(), key=lambda item: -result_bytes(item[0][1])))
    )


def axes_of(collective: CompiledCollective, degrees: Mapping[str, int]) -> set[str]:
    """The mesh axes along which the members of a group differ."""
    if named := _NAMED.search(collective.groups):
        return set(re.findall(r"\w+", named.group(2)))
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(degrees.values())), tuple(degrees.values())), axis=1)
    moved = set()
    for group in _groups(collective.groups) or [np.arange(len(coordinates))]:
        members = coordinates[group]
        moved |= {name for i, name in enumerate(degrees) if len(set(members[:, i])) > 1}
    return moved


def _groups(text: str) -> list[np.ndarray]:
    if iota := _IOTA.search(text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(math.prod(dims or ())).reshape(dims or ())
        return list((ids.transpose(order) if order else ids).reshape(shape or ()))
    return [np.array([int(n) for n in group.split(",")]) for group in re.findall(r"\{([\d,]+)\}", text)]


def result_bytes(result: str) -> int:
    """Bytes of a result type as HLO writes it."""
    return sum(
        _itemsize(kind) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in _ARRAY.findall(result)
    )


def _itemsize(kind: str) -> int:
    if kind == "pred":
        return 1
    bits = re.search(r"\d+", kind)
    return max(1, int(bits.group()) // 8) if bits else jnp.dtype(jnp.float32).itemsize
