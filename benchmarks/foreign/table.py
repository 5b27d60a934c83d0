"""The committed table: a row per family and plan, a column per variant, and every refusal in its words."""

from collections.abc import Sequence
from typing import Any

import jax

from .cells import PLANS, VARIANTS
from .family import Family

HEAD = """# Other people's models

Models from packages that others publish, unmodified, with tiny random configurations: each trained for three AdamW steps
under every plan and held to plain `jax.jit` of the same model on one device, in which no line of this library runs.

```bash
pip install 'axonml-jax[foreign]'
python benchmarks/foreign_models.py --done done.jsonl --out docs/maintainers/foreign-models.md  # in pieces, if one likes
```
"""


def markdown(families: Sequence[Family], known: dict) -> str:
    """The whole page, from what `known` holds by (family, plan, variant)."""
    names = {family.name for family in families}
    known = {key: line for key, line in known.items() if key[0] in names}
    count = lambda result: sum(line["result"] == result for line in known.values())
    total = len(families) * len(PLANS) * len(VARIANTS)
    counted = ", ".join(f"{count(result)} {result}" for result in ("equal", "refused", "differs", "crash"))
    lines = [HEAD, f"{len(families)} families, {total} cells, {len(known)} run: {counted} (jax {jax.__version__}).", ""]
    lines += ["| family | plan | " + " | ".join(VARIANTS) + " |", "| --- " * (2 + len(VARIANTS)) + "|"]
    notes: dict[str, int] = {}
    for family in families:
        for plan in PLANS:
            row = [_cell(known.get((family.name, plan, variant)), notes) for variant in VARIANTS]
            lines.append(f"| {family.name} | {plan} | " + " | ".join(row) + " |")
    lines += ["", "What refusals, differences and crashes say:", ""] if notes else []
    return "\n".join([*lines, *(f"{number}. {_one_line(why)}" for why, number in notes.items()), ""])


def _cell(line: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if line is None:
        return ""
    if line["result"] == "equal":
        return f"equal ({line['why']})" if line["why"] else "equal"
    return f"{line['result']}: {notes.setdefault(line['why'], len(notes) + 1)}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("<", "\\<")
