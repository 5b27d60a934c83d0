"""What a compiled program's schedule moves, times the trips of its loops, and how much of it runs behind compute.

`compiled` says which collectives there are; this room reads the order of instructions, which XLA:TPU and XLA:GPU fix when
they compile. XLA:TPU hides a collective as a fusion that starts it, others that carry it beside their own work, and one that
ends it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from axonml_jax.cost.wire import KINDS as WIRE_KINDS
from axonml_jax.cost.wire import wire_elements
from axonml_jax.ledger.compiled import KINDS, callees, computations_of, result_of_start
from axonml_jax.ledger.table import aligned

_LINE = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+)\[([\d,]*)\]")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_WORK = ("convolution", "dot")
_STARTS, _ENDS = "async-collective-start", "async-collective-done"


@dataclass(frozen=True, slots=True)
class Moved:
    """Collectives of one kind in a step.

    Attributes:
      kind: one of `wire.KINDS`, or "all".
      count: executions, those in loops times their trips.
      size: bytes that one rank sends for them, by the formulas of rings.
      hidden: bytes of those with a matrix product, or a kernel, scheduled between their start and their end.
    """

    kind: str
    count: int
    size: float
    hidden: float

    @property
    def share(self) -> float:
        """The part of the bytes that runs behind compute."""
        return self.hidden / self.size if self.size else 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,} executions, {self.size:,.0f} bytes, {self.share:.0%} behind compute"


class _Instruction(NamedTuple):
    name: str
    result: str
    op: str
    rest: str


def moved(program: Any, kinds: Sequence[str] = WIRE_KINDS) -> dict[str, Moved]:
    """What a scheduled program moves, by kind, and under "all" the sum.

    A loop whose number of trips cannot be read counts once.

    Args:
      program: optimized HLO as text, or anything whose `as_text()` gives it.
      kinds: which kinds.

    Raises:
      ValueError: when the text holds no entry computation.
    """
    text = program if isinstance(program, str) else program.as_text()
    bodies, entry = computations_of(text)
    found: dict[str, list[float]] = {}
    for kind, trips, size, hidden in _Reader(bodies).walk(entry, 1):
        if kind in kinds:
            for name in (kind, "all"):
                total = found.setdefault(name, [0, 0.0, 0.0])
                total[0] += trips
                total[1] += trips * size
                total[2] += trips * size * hidden
    return {name: Moved(name, int(count), size, hidden) for name, (count, size, hidden) in sorted(found.items())}


def moved_table(found: Mapping[str, Moved]) -> str:
    """The same as lines of text."""
    rows = [[each.kind, f"{each.count:,}", f"{each.size / 2**20:,.1f}", f"{each.share:.0%}"] for each in found.values()]
    return aligned(["moved by the schedule", "executions", "MiB per chip", "behind compute"], rows, left=1)


class _Reader:
    """Walks computations in the order of the schedule."""

    def __init__(self, bodies: Mapping[str, list[str]]):
        self.lines = bodies
        self.bodies: dict[str, list[_Instruction]] = {}
        self.works: dict[str, bool] = {}

    def walk(self, name: str, trips: int) -> Iterator[tuple[str, int, float, bool]]:
        """(kind, trips, bytes, whether it is hidden) of every collective that runs."""
        body = self._body(name)
        for i, each in enumerate(body):
            if each.op == "while":
                more = trips * self._trips(each)
                for callee in callees(each.rest):
                    yield from self.walk(callee, more)
            elif each.op == "fusion":
                inside = self._in_fusion(each)
                starts = each.name.startswith(_STARTS)
                yield from ((kind, trips, size, starts and self._covered(body, i)) for kind, size in inside)
            elif (kind := KINDS.get(each.op.removesuffix("-start"))) is not None:
                hidden = each.op.endswith("-start") and self._covered(body, i)
                yield kind, trips, _bytes(kind, each), hidden
            elif each.op in ("conditional", "call", "async-start"):
                for callee in callees(each.rest):
                    yield from self.walk(callee, trips)

    def _trips(self, loop: _Instruction) -> int:
        """How often a loop runs: as the program says, or as its condition `i < n` does, of a scan's i from 0."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = _CONDITION.search(loop.rest)
        body = self._body(condition[1]) if condition else []
        bounds = {each.name: each.rest.split(")")[0] for each in body if each.op == "constant"}
        compares = [each.rest for each in body if each.op == "compare" and "direction=LT" in each.rest]
        read = [
            bounds[name]
            for rest in compares
            for name in re.findall(r"%([\w.\-]+)", rest.split(")")[0])
            if name in bounds
        ]
        return int(read[0]) if len(read) == 1 and read[0].isdigit() else 1

    def _in_fusion(self, fusion: _Instruction) -> list[tuple[str, float]]:
        """The collectives that a fusion starts or runs. Every carrier of a hidden one holds a copy, which does not count."""
        inner = [each for callee in callees(fusion.rest) for each in self._body(callee)]
        found = [(KINDS[each.op], each) for each in inner if each.op in KINDS]
        carried = lambda each: "chain_id=" in each.rest and not fusion.name.startswith(_STARTS)
        # An all-reduce of which a fusion keeps a slice is a reduce-scatter.
        scattered = "all-reduce-scatter" in fusion.name or "all-reduce-scatter" in fusion.rest.split("metadata")[0]
        named = lambda kind: "reduce_scatter" if scattered and kind == "all_reduce" else kind
        return [(named(kind), _bytes(kind, each, named(kind))) for kind, each in found if not carried(each)]

    def _covered(self, body: Sequence[_Instruction], start: int) -> bool:
        """Whether there is work between an instruction that starts something and the one that ends it."""
        name = body[start].name
        for each in body[start + 1 :]:
            if _ends(each, name):
                return False
            if self._computes(each):
                return True
        return False

    def _computes(self, each: _Instruction) -> bool:
        if each.op in _WORK or (each.op == "custom-call" and "tpu_custom_call" in each.rest):
            return True
        return any(self._works(callee) for callee in callees(each.rest))

    def _works(self, name: str) -> bool:
        if name not in self.works:
            self.works[name] = False
            self.works[name] = any(self._computes(each) for each in self._body(name))
        return self.works[name]

    def _body(self, name: str) -> list[_Instruction]:
        if name not in self.bodies:
            matches = (_LINE.match(line) for line in self.lines.get(name, ()))
            self.bodies[name] = [_Instruction(*match.groups()) for match in matches if match]
        return self.bodies[name]


def _ends(each: _Instruction, start: str) -> bool:
    """A done has the start's number in its own name, or reads it."""
    if not (each.op.endswith("-done") or each.name.startswith(_ENDS)):
        return False
    same_number = each.name.startswith(_ENDS) and each.name.removeprefix(_ENDS) == start.removeprefix(_STARTS)
    return same_number or bool(re.search(rf"%?{re.escape(start)}(?![\w.])", each.rest))


def _bytes(kind: str, each: _Instruction, sent: str = "") -> float:
    """What one rank sends in one execution."""
    result = result_of_start(kind, each.result) if each.op.endswith("-start") else each.result
    size = sum(_itemsize(name) * _elements(dims) for name, dims in _SHAPE.findall(result))
    ranks = _group_size(each.rest)
    whole = size * ranks if kind == "reduce_scatter" else size
    return float(wire_elements(sent or kind, whole, ranks))


def _group_size(rest: str) -> int:
    """How many ranks take part; two where the program does not say, as of a permute."""
    if match := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        product = 1
        for axis in re.findall(r"'(\w+)'", match[2]):
            product *= int(sizes[axis])
        return product
    if match := _IOTA.search(rest):
        return int(match[1])
    match = _LISTED.search(rest)
    return match[1].count(",") + 1 if match else 2


def _itemsize(name: str) -> int:
    return 1 if name == "pred" or name.startswith("f8") else int(re.sub(r"\D", "", name)) // 8


def _elements(dims: str) -> int:
    product = 1
    for dim in filter(None, dims.split(",")):
        product *= int(dim)
    return product
