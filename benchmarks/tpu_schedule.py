"""Reading XLA:TPU's schedule: which gathers run behind compute. Imported by `fsdp_memory.py` and its test."""

import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(f32|bf16|f16|f64)\[([\d,]*)\]")
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}


@dataclass(frozen=True)
class Gathers:
    """All-gathers of a scheduled program, by count and bytes of their results.

    Attributes:
      count, size: all.
      hidden, hidden_size: those with a matrix product scheduled between their start and their done.
    """

    count: int
    size: int
    hidden: int
    hidden_size: int

    def __str__(self) -> str:
        share = self.hidden_size / self.size if self.size else 0.0
        return f"{self.hidden} of {self.count} gathers, {share:.0%} of their bytes, behind matrix products"


def gathers(text: str) -> Gathers:
    """Read the entry computation of a program compiled for TPU."""
    bodies = {match[1]: match[0] for match in re.finditer(r"(?ms)^(?:%|ENTRY %?)([\w.\-]+) \(.*?^\}", text)}
    entry = text[text.index("\nENTRY ") :].splitlines()
    lines = [match for line in entry if (match := _LINE.match(line))]
    body_of = lambda rest: bodies.get(m[1], "") if (m := re.search(r"calls=%?([\w.\-]+)", rest)) else ""
    computes = [" convolution(" in match[4] + body_of(match[4]) or match[3] == "convolution" for match in lines]
    found = []
    for i, (name, shapes, op, rest) in enumerate(match.groups() for match in lines):
        starts = op == "all-gather-start" or (
            name.startswith("async-collective-start") and "all-gather" in body_of(rest)
        )
        if op == "all-gather":
            found.append((_largest(shapes), False))
        elif starts:
            ends = (j for j in range(i + 1, len(lines)) if _finishes(lines[j], name))
            end = next(ends, i)
            found.append((_largest(shapes), any(computes[i + 1 : end])))
    return Gathers(len(found), sum(n for n, _ in found), sum(h for _, h in found), sum(n for n, h in found if h))


def _finishes(match: re.Match, start: str) -> bool:
    """Whether a line is the done of a start: a done has the start's number in its own name, or reads it."""
    name, _, op, rest = match.groups()
    if not (op == "all-gather-done" or name.startswith("async-collective-done")):
        return False
    same_number = name.rpartition("done")[2] == start.rpartition("start")[2]
    return same_number or bool(re.search(rf"%{re.escape(start)}\b", rest))


def _largest(shapes: str) -> int:
    sizes = [_BYTES[kind] * _product(dims) for kind, dims in _SHAPE.findall(shapes)]
    return max(sizes, default=0)


def _product(dims: str) -> int:
    total = 1
    for dim in dims.split(","):
        total *= int(dim or 1)
    return total
