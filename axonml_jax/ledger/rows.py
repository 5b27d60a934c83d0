"""The rows of a traffic table: collectives joined by what they move, over which axes, and where they stand."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from axonml_jax.cost.wire import Amount, exact
from axonml_jax.ledger.entry import Collective
from axonml_jax.ledger.label import PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Collectives of one label, kind, axes, dtype and place, over one step.

    Attributes:
      label: what they move (`label.label_of`); `padding` for the padded part of buffers that say so.
      kind: one of `wire.KINDS`.
      axes: the mesh axes.
      group_size: ranks that take part.
      dtype: the element type on the wire.
      where: enclosing loops and branches, or `once`.
      counted: whether totals include it (no branch that another one outweighs).
      count: calls in one step, or in the one that has them; a call on a tree is one. A while loop counts one trip.
      launches: the same leaf by leaf, as StableHLO launches them.
      elements: elements of the full arrays in one step.
      wire_bytes: bytes one rank sends in one step; of what runs in one of several steps the mean over these.
      unbounded: whether a while loop makes count, elements and bytes those of one trip.
    """

    label: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    where: str
    counted: bool
    count: int
    launches: int
    elements: int
    wire_bytes: Amount
    unbounded: bool


def traffic_rows(entries: Iterable[Collective]) -> tuple[TrafficRow, ...]:
    """Join collectives into rows; the labels that send most come first."""
    joined: dict[tuple, TrafficRow] = {}
    for row in (row for entry in entries for row in _rows_of(entry)):
        key = (row.label, row.kind, row.axes, row.group_size, row.dtype, row.where, row.counted)
        joined[key] = _add(joined[key], row) if key in joined else row
    weight: dict[str, Amount] = {}
    for row in joined.values():
        weight[row.label] = weight.get(row.label, 0) + row.wire_bytes
    return tuple(sorted(joined.values(), key=lambda row: (-weight[row.label], row.label, -row.wire_bytes)))


def _rows_of(entry: Collective) -> list[TrafficRow]:
    """One row, or two when part of the buffer is padding; the padding has no launch of its own."""
    times = entry.executions
    row = TrafficRow(
        label=entry.label,
        kind=entry.kind,
        axes=entry.axes,
        group_size=entry.group_size,
        dtype=entry.dtype,
        where=entry.where,
        counted=entry.counted,
        count=times,
        launches=times * entry.leaves,
        elements=times * (entry.elements - entry.padding),
        wire_bytes=exact(times * (entry.wire_bytes - entry.padding_wire_bytes) / Fraction(entry.every)),
        unbounded=entry.unbounded,
    )
    if not entry.padding:
        return [row]
    sent = exact(times * entry.padding_wire_bytes / Fraction(entry.every))
    padding = replace(row, label=PADDING, count=0, launches=0, elements=times * entry.padding, wire_bytes=sent)
    return [row, padding]


def _add(a: TrafficRow, b: TrafficRow) -> TrafficRow:
    return replace(
        a,
        count=a.count + b.count,
        launches=a.launches + b.launches,
        elements=a.elements + b.elements,
        wire_bytes=exact(a.wire_bytes + b.wire_bytes),
    )
