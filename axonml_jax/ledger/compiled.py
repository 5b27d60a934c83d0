"""Reads collectives from lowered or compiled programs, and compares them with those counted on the trace."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from axonml_jax.base import aligned
from axonml_jax.compat.jaxpr import parsed
from axonml_jax.cost.decoder import KINDS as WIRE_KINDS
from axonml_jax.cost.decoder import Amount, exact, wire_elements
from axonml_jax.ledger.count import Branch, Collective, Loop, number

# --------------------------------------------------------------------------------------------------
# Where a compiled program's collectives stand: kinds and loops of optimized HLO.
#
# Placement only. XLA merges, splits and replaces collectives and may change their dtype, so bytes and launches are
# counted on the trace (`ledger/count.py`) and on StableHLO (`collectives_in_lowered`).
# --------------------------------------------------------------------------------------------------

KINDS: dict[str, str] = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
    "ragged-all-to-all": "ragged_all_to_all",
}
"""HLO's names of collectives -> the ledger's."""

BETWEEN_SLICES = " between slices"
"""Suffix of the kind of a transfer over the data-center network, which XLA:TPU splits off a collective over several slices."""

_TRANSFERS = {"one_to_one": "permute"}
_TRANSFER = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_OPCODE = re.compile(r"^(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(")
_CALLEES = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)")
_PLACE = re.compile(r'\bop_name="([^"]*)"')
_CALLEE_LISTS = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class CompiledCollective:
    """One collective instruction of an optimized program.

    Attributes:
      kind: one of `cost.decoder.KINDS`, or one with `BETWEEN_SLICES`.
      in_loop: whether it runs inside a while loop's body or condition.
      asynchronous: whether it is the start of an asynchronous pair.
      result: the type of its result as HLO writes it; of a start without its operands.
      groups: its replica groups, or a permute's pairs, as HLO writes them.
      place: the operation of the traced program that it comes from, with its name scopes.
      in_branch: whether it stands in a conditional's branch, which some ranks may not take.
    """

    kind: str
    in_loop: bool
    asynchronous: bool
    result: str
    groups: str = ""
    place: str = ""
    in_branch: bool = False


def device_peak(compiled: Any) -> int:
    """Peak bytes on one device, as XLA:TPU plans the program.

    XLA's peak includes arguments and results in host memory, which are subtracted. Where the host's temporaries are larger than
    the device's, XLA reports theirs; the sum of arguments, results and temporaries, an upper bound, is then taken.
    """
    found = compiled.memory_analysis()
    host = found.host_argument_size_in_bytes + found.host_output_size_in_bytes - found.host_alias_size_in_bytes
    new = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    return min(found.peak_memory_in_bytes - host, found.argument_size_in_bytes + new)


def collectives_in_compiled(program: Any) -> tuple[CompiledCollective, ...]:
    """Every collective instruction that a compiled program reaches from its entry.

    Args:
      program: optimized HLO as text, or anything whose `as_text()` gives it (`jax.jit(f).lower(...).compile()`).

    Raises:
      ValueError: when the text holds no entry computation, as StableHLO does not.
    """
    computations, entry = computations_of(program if isinstance(program, str) else program.as_text())
    return tuple(_walk(computations, entry, in_loop=False, in_branch=False))


def computations_of(text: str) -> tuple[dict[str, list[str]], str]:
    """Instruction lines of an optimized program by computation, and the entry's name.

    Raises:
      ValueError: when the text holds no entry computation.
    """
    computations: dict[str, list[str]] = {}
    entry, current = None, None
    for raw in text.splitlines():
        line = raw.strip()
        header = _HEADER.match(line)
        if header and " = " not in line.split("->")[0]:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif current is not None and " = " in line:
            computations[current].append(re.sub(r"/\*.*?\*/", "", line))
    if entry is None:
        raise ValueError(
            "no ENTRY computation: give optimized HLO (compiled.as_text()), not StableHLO (lowered.as_text())"
        )
    return computations, entry


def _walk(
    computations: dict[str, list[str]], name: str, in_loop: bool, in_branch: bool
) -> Iterator[CompiledCollective]:
    for line in computations.get(name, ()):
        match = _OPCODE.match(line)
        if match is None:
            continue
        result, opcode = match.groups()
        base = opcode.removesuffix("-start")
        if base in KINDS:
            groups, place = (found.group(1) if (found := part.search(line)) else "" for part in (_GROUPS, _PLACE))
            result = result_of_start(KINDS[base], result) if opcode != base else result
            yield CompiledCollective(KINDS[base], in_loop, opcode != base, result, groups, place, in_branch)
            continue
        if opcode == "send" and (transfer := _between_slices(line)) is not None:
            sent, groups = result[1:].partition(", u32[]")[0], _TRANSFER.search(line)[1]  # pyright: ignore
            yield CompiledCollective(transfer[0], in_loop, True, sent, groups, in_branch=in_branch)
            continue
        for callee in callees(line):
            inside = in_loop or opcode == "while", in_branch or opcode == "conditional"
            yield from _walk(computations, callee, *inside)


def _between_slices(send: str) -> tuple[str, int] | None:
    """The kind of a collective that sends this slice's part to other slices, and the number of slices; None for others."""
    if (found := _TRANSFER.search(send)) is None:
        return None
    kind, slices = found[2].lower(), 0
    for part in found[1].split(","):
        first, _, last = part.partition(":")
        slices += int(last or first) - int(first) + 1
    return _TRANSFERS.get(kind, kind) + BETWEEN_SLICES, slices


def result_of_start(kind: str, result: str) -> str:
    """The type of the result, from the type of an instruction that starts a collective.

    The tuple has the operands first, then the result, then buffers of the hardware. An all-reduce's start has results alone.

    >>> result_of_start("permute", "(f32[8,2]{1,0}, f32[8,2]{1,0}, u32[], u32[])")
    'f32[8,2]{1,0}'
    >>> result_of_start("all_gather", "((f32[2]{0}, s8[4]{0}), (f32[4]{0}, s8[8]{0}))")
    '(f32[4]{0}, s8[8]{0})'
    """
    if kind == "all_reduce" or not result.startswith("("):
        return result
    parts, depth = [""], 0
    for letter in result[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts[1].strip() if len(parts) > 1 else result


def callees(line: str) -> list[str]:
    """The computations that an instruction calls."""
    lists = [name.strip().lstrip("%") for group in _CALLEE_LISTS.findall(line) for name in group.split(",")]
    return [*_CALLEES.findall(line), *lists]


# --------------------------------------------------------------------------------------------------
# Compares a traced count with a lowered one, launch by launch.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One kind of launch of which the traced and the lowered program have different numbers."""

    kind: str
    dtype: str
    elements: int
    group_size: int
    in_loop: bool
    traced: int
    lowered: int

    def __str__(self) -> str:
        where = "in a loop" if self.in_loop else "outside loops"
        group = f" over {self.group_size} ranks" if self.group_size else ""
        what = f"{self.kind} of {self.dtype}[{self.elements}]{group}, {where}"
        return f"{what}: traced {self.traced}, lowered {self.lowered}"


def agreement(traced: Iterable[Collective], lowered: Iterable[Collective]) -> list[Difference]:
    """Lists the differences between a traced program's collectives and its lowered program's; empty when they agree.

    Launches are compared as the program text has them: a call on a tree is one launch per leaf, a loop's body is one
    text (or as many as `unroll` makes), every branch counts.

    Args:
      traced: from `collectives_in`.
      lowered: from `collectives_in_lowered`, of the same step and arguments.

    Returns:
      A sorted list of `Difference`.
    """
    ours, theirs = Counter(_launches(traced)), Counter(_launches(lowered))
    return sorted(
        Difference(*launch, traced=ours[launch], lowered=theirs[launch])
        for launch in ours.keys() | theirs.keys()
        if ours[launch] != theirs[launch]
    )


def _launches(entries: Iterable[Collective]) -> Iterator[tuple[str, str, int, int, bool]]:
    for entry in entries:
        group = 0 if entry.kind == "permute" else entry.group_size
        for in_loop, copies in _copies(entry.loops).items():
            for elements in entry.leaf_elements:
                for _ in range(copies):
                    yield entry.kind, entry.dtype, elements, group, in_loop


def _copies(loops: Iterable[Loop]) -> Counter[bool]:
    """How often a collective's text appears inside (True) and outside (False) of loops once its loops are lowered."""
    copies: Counter[bool] = Counter({False: 1})
    for loop in loops:
        inside, outside = _loop_copies(loop)
        total = copies[True] + copies[False]
        copies = Counter({True: total * inside + copies[True] * outside, False: copies[False] * outside})
    return copies


def _loop_copies(loop: Loop) -> tuple[int, int]:
    """Copies of a loop's body inside the lowered while loop, and beside it (the remainder of `lax.scan(unroll=)`)."""
    if loop.trips is None:
        return 1, 0
    if loop.unroll == 1:
        return min(1, loop.trips), 0
    trips, rest = divmod(loop.trips, loop.unroll) if loop.unroll else (0, loop.trips)
    if trips == 1 and rest == 0:
        return 0, loop.trips
    return (loop.unroll if trips else 0), rest


# --------------------------------------------------------------------------------------------------
# Counts the collectives of a lowered program (StableHLO), which JAX gives to the compiler.
# --------------------------------------------------------------------------------------------------

_KINDS: dict[str, str] = {
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.all_gather": "all_gather",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "permute",
    "stablehlo.collective_broadcast": "broadcast",
}
_Path = tuple[Loop | Branch, ...]
_REDUCTIONS = {"stablehlo.add": "sum", "stablehlo.maximum": "max", "stablehlo.minimum": "min"}
_DTYPES = {"i1": "bool", "bf16": "bfloat16", "complex<f32>": "complex64", "complex<f64>": "complex128"}


def collectives_in_lowered(program: Any) -> tuple[Collective, ...]:
    """Every collective of a lowered program, in program order.

    A function called from two places counts at both. Trip counts are not read, so every loop is a `Loop(trips=None)`;
    names of axes are not either, because older JAX does not write them.

    Args:
      program: StableHLO as text, or anything whose `as_text()` gives it (`jax.jit(f).lower(...)`).

    Returns:
      A tuple of `Collective`; a permute's group size is 0, which its text does not tell.
    """
    text = program if isinstance(program, str) else program.as_text()
    module = parsed(text)  # alive while it is read
    return tuple(_LoweredReader(module).read())


class _LoweredReader:
    """One module with its functions and meshes by name."""

    def __init__(self, module: Any) -> None:
        operations = [operation.operation for operation in module.body]
        self.functions = {_symbol(op): op for op in operations if op.name == "func.func"}
        self.meshes = {
            _symbol(op): _mesh_sizes(str(op.attributes["mesh"])) for op in operations if op.name == "sdy.mesh"
        }

    def read(self) -> Iterator[Collective]:
        yield from self._regions(self.functions["main"], ())

    def _regions(self, op: Any, path: _Path) -> Iterator[Collective]:
        """Yield the collectives inside an operation; loops and conditionals add a step to the path."""
        for index, region in enumerate(op.regions):
            inside = path
            if op.name == "stablehlo.while":
                inside = (*path, Loop())
            elif op.name in ("stablehlo.case", "stablehlo.if"):
                inside = (*path, Branch(index, len(op.regions)))
            for block in region:
                for inner in block:
                    yield from self._operation(inner.operation, inside)

    def _operation(self, op: Any, path: _Path) -> Iterator[Collective]:
        kind = _kind(op)
        if kind:
            yield self._collective(op, kind, path)
        elif op.name == "func.call":
            yield from self._regions(self.functions[str(op.attributes["callee"]).removeprefix("@").strip('"')], path)
        else:
            yield from self._regions(op, path)

    def _collective(self, op: Any, kind: str, path: _Path) -> Collective:
        arrays = op.results if kind == "all_gather" else op.operands
        arrays = list(arrays)[:1] if kind == "ragged_all_to_all" else list(arrays)
        types = [_tensor(str(value.type)) for value in arrays]
        return Collective(
            kind=kind,
            op=_reduction(op) if kind in ("all_reduce", "reduce_scatter") else "",
            group_size=self._group_size(op, kind),
            dtype=types[0][0],
            itemsize=np.dtype(types[0][0]).itemsize,
            leaf_elements=tuple(elements for _, elements in types),
            path=path,
        )

    def _group_size(self, op: Any, kind: str) -> int:
        """Ranks per group, from explicit groups (one row each, short rows padded) or from mesh axes."""
        if kind == "permute":
            return 0
        text = str(op.attributes["backend_config" if kind == "ragged_all_to_all" else "replica_groups"])
        axes = re.search(r"mesh = @(\w+), axes = \[(.*)\]", text)
        if axes:
            sizes = self.meshes[axes.group(1)]
            return math.prod(sizes[name] for name in re.findall(r'name = "([^"]+)"', axes.group(2)))
        return int(re.findall(r"tensor<\d+x(\d+)xi64>", text)[-1])


def _symbol(op: Any) -> str:
    return str(op.attributes["sym_name"]).strip('"')


def _mesh_sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', text)}


def _kind(op: Any) -> str:
    if op.name == "stablehlo.custom_call" and "ragged_all_to_all" in str(op.attributes["call_target_name"]):
        return "ragged_all_to_all"
    return _KINDS.get(op.name, "")


def _reduction(op: Any) -> str:
    """What a reduction's region computes: a sum, maximum or minimum; else an empty string."""
    names = [inner.operation.name for inner in op.regions[0].blocks[0]]
    return next((_REDUCTIONS[name] for name in names if name in _REDUCTIONS), "")


def _tensor(text: str) -> tuple[str, int]:
    """NumPy's dtype name and the number of elements of a `tensor<2x8xf32>`."""
    body = text.removeprefix("tensor<").removesuffix(">")
    dims = re.match(r"(?:\d+x)*", body)
    assert dims is not None
    return _dtype_name(body[dims.end() :]), math.prod(int(dim) for dim in dims.group().split("x") if dim)


def _dtype_name(text: str) -> str:
    if text in _DTYPES:
        return _DTYPES[text]
    if text.startswith("f8"):
        return "float8_" + text[2:].lower()
    return re.sub(r"^(ui|i|f)(\d+)$", lambda m: {"ui": "uint", "i": "int", "f": "float"}[m[1]] + m[2], text)


# --------------------------------------------------------------------------------------------------
# What a compiled program's schedule moves, times the trips of its loops, and how much of it runs behind compute.
#
# `collectives_in_compiled` says which collectives there are; this part reads the order of instructions, which XLA:TPU and
# XLA:GPU fix when they compile. XLA:TPU hides a collective as a fusion that starts it, others that carry it beside their
# own work, and one that ends it.
# --------------------------------------------------------------------------------------------------

_LINE = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
_IOTA_SIZE = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_WORK = ("convolution", "dot")
_STARTS, _ENDS = "async-collective-start", "async-collective-done"


@dataclass(frozen=True, slots=True)
class Moved:
    """The collectives of one kind in a step, with their bytes.

    Attributes:
      kind: one of `cost.decoder.KINDS`, or one with `BETWEEN_SLICES`, or "all".
      count: executions, those in loops times their trips.
      size: bytes that one rank sends for them, by the formulas of rings.
      hidden: bytes of the asynchronous ones with a matrix product, or a kernel, scheduled between their start and end.
    """

    kind: str
    count: int
    size: float
    hidden: float

    @property
    def share(self) -> float:
        """The share of the bytes that is sent while the device computes."""
        return self.hidden / self.size if self.size else 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.count:,} executions, {self.size:,.0f} bytes, {self.share:.0%} behind compute"


class _Instruction(NamedTuple):
    name: str
    result: str
    op: str
    rest: str


def moved(program: Any, kinds: Sequence[str] = WIRE_KINDS) -> dict[str, Moved]:
    """Sums what a scheduled program sends by kind, and over all kinds under "all".

    A loop whose number of trips cannot be read counts once; every branch of a conditional counts.

    Args:
      program: optimized HLO as text, or anything whose `as_text()` gives it.
      kinds: which kinds, within a slice and between slices.

    Raises:
      ValueError: when the text holds no entry computation.
    """
    text = program if isinstance(program, str) else program.as_text()
    bodies, entry = computations_of(text)
    found: dict[str, list[float]] = {}
    for kind, trips, size, hidden in _ScheduleReader(bodies).walk(entry, 1):
        if kind.removesuffix(BETWEEN_SLICES) in kinds:
            for name in (kind, "all"):
                total = found.setdefault(name, [0, 0.0, 0.0])
                total[0] += trips
                total[1] += trips * size
                total[2] += trips * size * hidden
    return {name: Moved(name, int(count), size, hidden) for name, (count, size, hidden) in sorted(found.items())}


def moved_table(found: Mapping[str, Moved]) -> str:
    """The result of `moved` as a text table."""
    rows = [[each.kind, f"{each.count:,}", f"{each.size / 2**20:,.1f}", f"{each.share:.0%}"] for each in found.values()]
    return aligned(["moved by the schedule", "executions", "MiB per chip", "behind compute"], rows, left=1)


class _ScheduleReader:
    """Walks computations in the order of the schedule."""

    def __init__(self, bodies: Mapping[str, list[str]]):
        self.lines = bodies
        self.bodies: dict[str, list[_Instruction]] = {}
        self.works: dict[str, bool] = {}

    def walk(self, name: str, trips: int) -> Iterator[tuple[str, int, float, bool]]:
        """Yield (kind, trips, bytes, whether hidden) of every collective that runs."""
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
            elif each.op == "send" and (transfer := _between_slices(each.rest)) is not None:
                yield transfer[0], trips, _transferred(each, *transfer), self._covered(body, _received(body, i))
            elif each.op in ("conditional", "call", "async-start"):
                for callee in callees(each.rest):
                    yield from self.walk(callee, trips)

    def _trips(self, loop: _Instruction) -> int:
        """The number of a loop's trips: as the program tells it, or from its condition `i < n` with i from 0."""
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
        """The (kind, bytes) of collectives that a fusion starts or runs; copies in fusions that only carry one are left out."""
        inner = [each for callee in callees(fusion.rest) for each in self._body(callee)]
        found = [(KINDS[each.op], each) for each in inner if each.op in KINDS]
        carried = lambda each: "chain_id=" in each.rest and not fusion.name.startswith(_STARTS)
        # An all-reduce of which a fusion keeps a slice is a reduce-scatter.
        scattered = "all-reduce-scatter" in fusion.name or "all-reduce-scatter" in fusion.rest.split("metadata")[0]
        named = lambda kind: "reduce_scatter" if scattered and kind == "all_reduce" else kind
        return [(named(kind), _bytes(kind, each, named(kind))) for kind, each in found if not carried(each)]

    def _covered(self, body: Sequence[_Instruction], start: int) -> bool:
        """Whether there is compute between the instruction that starts something and the one that ends it."""
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
    """Whether an instruction ends what another started: it has the start's number in its name, or reads it."""
    if not (each.op.endswith("-done") or each.name.startswith(_ENDS)):
        return False
    same_number = each.name.startswith(_ENDS) and each.name.removeprefix(_ENDS) == start.removeprefix(_STARTS)
    return same_number or bool(re.search(rf"%?{re.escape(start)}(?![\w.])", each.rest))


def _received(body: Sequence[_Instruction], send: int) -> int:
    """The index of the recv that belongs to a send between slices, which may come first; without one that of the send."""
    rendezvous = _RENDEZVOUS.search(body[send].rest)
    for i, each in enumerate(body):
        other = _RENDEZVOUS.search(each.rest) if each.op == "recv" else None
        if other and rendezvous and other[1] == rendezvous[1]:
            return i
    return send


def _transferred(send: _Instruction, kind: str, slices: int) -> float:
    """Bytes that one rank sends to the ranks at its place in the other slices."""
    size, kind = _array_bytes(*_ARRAY.findall(send.result)[0]), kind.removesuffix(BETWEEN_SLICES)
    return float(wire_elements(kind, size * slices if kind == "all_gather" else size, slices))


def _bytes(kind: str, each: _Instruction, sent: str = "") -> float:
    """Bytes that one rank sends in one execution."""
    result = result_of_start(kind, each.result) if each.op.endswith("-start") else each.result
    size, ranks = result_bytes(result), _group_size(each.rest)
    whole = size * ranks if kind == "reduce_scatter" else size
    return float(wire_elements(sent or kind, whole, ranks))


def _group_size(rest: str) -> int:
    """The number of ranks in a group; 2 if the program does not say, as for a permute, whose bytes do not depend on it."""
    if match := _MESH.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        product = 1
        for axis in re.findall(r"'(\w+)'", match[2]):
            product *= int(sizes[axis])
        return product
    if match := _IOTA_SIZE.search(rest):
        return int(match[1])
    match = _LISTED.search(rest)
    return match[1].count(",") + 1 if match else 2


# --------------------------------------------------------------------------------------------------
# What XLA's partitioner sends along an axis that was left to it, counted in the compiled program: nothing else shows it.
# --------------------------------------------------------------------------------------------------

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_IOTA_GROUPS = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"mesh\[(.*?)\]\s*\{(.*?)\}")


@dataclass(frozen=True)
class PartitionedTraffic:
    """The collectives of one compiled step along the axis that XLA's partitioner splits.

    Attributes:
      axis: the mesh axis.
      ranks: its size.
      entries: (kind, result type, whether in a loop) -> number of instructions; those in a loop run once per trip.
    """

    axis: str
    ranks: int
    entries: Mapping[tuple[str, str, bool], int]

    @property
    def bytes(self) -> Amount:
        """Bytes that one rank sends on a ring per step, with loop bodies counted once."""
        sent = (_sent(kind, result, self.ranks) * count for (kind, result, _), count in self.entries.items())
        return exact(sum(sent))

    def __str__(self) -> str:
        header = ["label", "collective", "axes", "result", "where", "count", "bytes/rank"]
        rows = []
        for (kind, result, loop), count in self.entries.items():
            where, sent = "in a loop" if loop else "once", number(exact(_sent(kind, result, self.ranks) * count))
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
    if iota := _IOTA_GROUPS.search(text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(math.prod(dims or ())).reshape(dims or ())
        return list((ids.transpose(order) if order else ids).reshape(shape or ()))
    return [np.array([int(n) for n in group.split(",")]) for group in re.findall(r"\{([\d,]+)\}", text)]


def _sent(kind: str, result: str, ranks: int) -> Amount:
    """Bytes that one rank sends for a collective on a ring, from its result; a reduce-scatter's is one part of its operand."""
    return wire_elements(kind, (ranks if kind == "reduce_scatter" else 1) * result_bytes(result), ranks)


def result_bytes(result: str) -> int:
    """Bytes of a result type in HLO text."""
    return sum(_array_bytes(kind, dims) for kind, dims in _ARRAY.findall(result))


def _array_bytes(kind: str, dims: str) -> int:
    """Bytes of `kind[dims]`; elements smaller than a byte count as one."""
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return max(1, bits // 8) * math.prod(int(n) for n in dims.split(",") if n)


# --------------------------------------------------------------------------------------------------
# What a compiled step sends along an axis that splits positions and is left to the partitioner: attention, sums, others.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionTraffic:
    """The collectives of one compiled step along an axis that splits positions.

    Attributes:
      axis: the mesh axis.
      ranks: its size.
      attention: those of recognised attention.
      sums: those that add up gradients, losses and statistics.
      others: all others: what the model's code sends across positions besides.
    """

    axis: str
    ranks: int
    attention: tuple[CompiledCollective, ...]
    sums: tuple[CompiledCollective, ...]
    others: tuple[CompiledCollective, ...]

    def bytes(self, some: Collection[CompiledCollective]) -> Amount:
        """Bytes that one rank sends on a ring per step for some of the collectives, loop bodies counted once."""
        return exact(sum(_sent(each.kind, each.result, self.ranks) for each in some))

    def __str__(self) -> str:
        sent = lambda each: self.bytes([each])
        header, rows = ["what", "collective", "where", "place", "bytes/rank"], []
        for what in ("attention", "sums", "others"):
            for each in sorted(getattr(self, what), key=sent, reverse=True):
                where = "in a loop" if each.in_loop else "once"
                rows.append([what, each.kind, where, place(each), number(sent(each))])
        return aligned(header, rows, left=4)


def place(collective: CompiledCollective) -> str:
    """The operation that a collective comes from, with its innermost scopes in the model's code."""
    parts = [
        part for part in re.split(r"[/:]", collective.place) if part and not part.startswith(("jit(", "shard_map"))
    ]
    return "/".join(parts[-3:]) or "unknown"


def position_traffic(
    compiled: Any, degrees: Mapping[str, int], axis: str, *, scope: str, parameters: Collection[int]
) -> PositionTraffic:
    """Sort the collectives of a compiled step along one axis into attention, sums over parameters, and others.

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
    """Whether a reduction only adds up arrays with as many elements as a parameter, or vectors at most."""
    if collective.kind not in ("all_reduce", "reduce_scatter"):
        return False
    factor = ranks if collective.kind == "reduce_scatter" else 1
    shapes = [[int(n) for n in dims.split(",") if n] for _, dims in _ARRAY.findall(collective.result)]
    return all(len(shape) <= 1 or factor * math.prod(shape) in parameters for shape in shapes)
