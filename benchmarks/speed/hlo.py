"""Comparing optimized programs: HLO text without names, metadata and numbers, and what one has that the other has not.

Imported by `overhead.py`.
"""

import re
from collections import Counter

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\([^=]*?\)|\S+) ([\w\-]+)\(", re.M)
_DROPPED = [
    re.compile(pattern)
    for pattern in (
        r",? ?metadata=\{(?:[^{}]|\{[^{}]*\})*\}",  # operation names, source lines, stack frames
        r",? ?channel_id=\d+",
        r"(?s)\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n.*?(?=\n\n)",  # tables that metadata points into
        r"^HloModule [^,]*",
    )
]
_NAME = re.compile(r"%[\w.\-]+")


def stripped(text: str) -> str:
    """HLO text without metadata, with names replaced by numbers in order of appearance.

    What decides how the program runs stays: instructions and their order, layouts, aliased (donated) buffers, shardings,
    fusions, backend options.
    """
    for pattern in _DROPPED:
        text = pattern.sub("", text)
    names: dict[str, str] = {}
    text = _NAME.sub(lambda match: names.setdefault(match[0], f"%{len(names)}"), text)
    text = re.sub(r"(?m)^((?:ENTRY )?%\d+ \().*?\)(?= ->)", r"\1", text)  # parameter names of computations
    return re.sub(r"\n{2,}", "\n\n", text)


def instructions(text: str) -> Counter:
    """How often each "opcode shape" occurs in the program, fused computations included (layouts dropped)."""
    body = re.sub(r"/\*index=\d+\*/", "", text)
    pairs = _INSTRUCTION.findall(body)
    return Counter(f"{opcode} {re.sub(r'{[^}]*}', '', shape)}" for shape, opcode in pairs)


def differences(ours: str, theirs: str) -> tuple[Counter, Counter]:
    """Instructions that only ours has, and that only theirs has."""
    first, second = instructions(ours), instructions(theirs)
    return first - second, second - first


def by_opcode(counter: Counter) -> str:
    """`3 copy, 1 convert`: a difference summed over shapes."""
    total: Counter = Counter()
    for key, count in counter.items():
        total[key.split(" ", 1)[0]] += count
    return ", ".join(f"{count} {opcode}" for opcode, count in total.most_common()) or "nothing"
