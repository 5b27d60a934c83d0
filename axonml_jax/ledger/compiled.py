"""Where a compiled program's collectives stand: kinds and loops of optimized HLO.

Placement only. XLA merges, splits and replaces collectives and may change their dtype, so bytes and launches are
counted on the trace and on StableHLO (`traced`, `lowered`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
      kind: one of `wire.KINDS`.
      in_loop: whether it runs inside a while loop's body or condition.
      asynchronous: whether it is the start of an asynchronous pair.
      result: the type of its result as HLO writes it; of a start without its operands.
      groups: its replica groups, or a permute's pairs, as HLO writes them.
      place: the operation of the traced program that it comes from, with its name scopes.
      in_branch: whether it stands in a conditional's branch, which not all ranks need take.
    """

    kind: str
    in_loop: bool
    asynchronous: bool
    result: str
    groups: str = ""
    place: str = ""
    in_branch: bool = False


def device_peak(compiled: Any) -> int:
    """Bytes on one device at the program's fullest moment, as XLA:TPU plans it.

    XLA counts what rests in host memory, before and after, as if it were on the device.
    """
    planned = compiled.memory_analysis()
    host = planned.host_argument_size_in_bytes + planned.host_output_size_in_bytes - planned.host_alias_size_in_bytes
    return planned.peak_memory_in_bytes - host


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
        for callee in callees(line):
            inside = in_loop or opcode == "while", in_branch or opcode == "conditional"
            yield from _walk(computations, callee, *inside)


def result_of_start(kind: str, result: str) -> str:
    """Of the type of an instruction that starts a collective the part that is its result.

    Operands stand before it, and behind it what the hardware needs. An all-reduce's start has results alone.

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
