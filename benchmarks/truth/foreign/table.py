"""The committed table: a row per family, a column per plan, and every refusal in its words."""

import collections
from collections.abc import Sequence
from typing import Any

from .cells import PLANS, VARIANTS
from .family import Family

RESULTS = {"equal": "equal", "refused": "refused", "differs": "different", "crash": "crashed"}
HEAD = """# Other people's models

Models from packages that others publish, unmodified, with tiny random configurations: each trained for three AdamW
steps under every plan on four simulated devices, and held to plain `jax.jit` of the same model, in which no line of
this library runs.

| Plan | Mesh |
| --- | --- |
| DDP, FSDP (FULL_SHARD), HYBRID | 4, 4, 2 x 2 |
| Pipeline | 2 stages with 2 microbatches x 2 data ranks |
| tensor, automatic (`auto_parallelize`) and by rules (`TensorParallel`) | 2 x 2 data ranks |
| context (`ContextParallel(allow_communication=True)`) | 2 x 2 data ranks |

Each is run plain, with `remat="full"`, with two microbatches, and in bf16; where no variant is named, the cell speaks
of all four. *Equal*: losses, gradient norms, every parameter and buffer after three steps agree, in float64 to 1e-9,
where the model casts to float32 itself to 1e-5 of the leaf's largest value, in bf16 to 5e-2 (with
`--xla_allow_excess_precision=false`, since XLA otherwise leaves out other roundings in each program).
`tests/test_foreign_models.py` runs a share of it.

```bash
pip install 'axonml-jax[foreign]'
python benchmarks/truth/foreign_models.py --done benchmarks/records/foreign_models.jsonl \\
    --out docs/maintainers/foreign-models.md
```
"""


def markdown(families: Sequence[Family], found: dict[str, dict]) -> str:
    """The whole page, from what `found` holds per Python by (family, plan, variant): the newest Python's table."""
    names = {family.name for family in families}
    found = {python: {key: line for key, line in known.items() if key[0] in names} for python, known in found.items()}
    newest, *older = sorted(found, key=lambda python: tuple(map(int, python.split("."))), reverse=True)
    known = found[newest]
    total = len(families) * len(PLANS) * len(VARIANTS)
    lines = [
        HEAD,
        f"{len(families)} families, {total} cells, {len(known)} of them run: {_counted(known)} (Python {newest}).",
    ]
    lines += [f"On Python {python} {_share(found[python])}: {_counted(found[python])}." for python in older] + [""]
    cell_of = lambda family, plan: {v: known[key] for v in VARIANTS if (key := (family.name, plan, v)) in known}
    alike = [plan for plan in PLANS if {_cell(cell_of(family, plan), {}) for family in families} == {"equal"}]
    rest = [plan for plan in PLANS if plan not in alike]
    lines += [f"All families are equal under {', '.join(alike)}; under the others:", ""] if alike else []
    lines += ["| family | what it stands for | " + " | ".join(rest) + " |", "| --- " * (2 + len(rest)) + "|"]
    notes: dict[str, int] = {}
    for family in families:
        row = [_cell(cell_of(family, plan), notes) for plan in rest]
        lines.append(f"| {family.name} | {family.kind} ({family.package}) | " + " | ".join(row) + " |")
    lines += ["", "What refusals, differences and crashes say:", ""] if notes else []
    return "\n".join([*lines, *(f"{number}. {_one_line(why)}" for why, number in notes.items()), ""])


def _share(known: dict) -> str:
    """Which of all cells these are among: how many families, which plans and variants."""
    families, plans, variants = (set(part) for part in zip(*known, strict=True))
    plans, variants = [p for p in PLANS if p in plans], [v for v in VARIANTS if v in variants]
    return f"{len(families)} families under {', '.join(plans)} ({', '.join(variants)})"


def _counted(known: dict) -> str:
    """How many cells had which result."""
    counts = collections.Counter(line["result"] for line in known.values())
    return ", ".join(f"{counts[result]} {what}" for result, what in RESULTS.items())


def _cell(found: dict[str, dict[str, Any]], notes: dict[str, int]) -> str:
    """The variants by their result; the result alone where all that there are were run and share it."""
    if not found:
        return "not run"
    groups: dict[str, list[str]] = {}
    for variant, line in found.items():
        if line["result"] == "equal":
            note = f" ({line['why']})" if line["why"] else ""
        else:
            note = f" [{notes.setdefault(line['why'], len(notes) + 1)}]"
        groups.setdefault(line["result"] + note, []).append(variant)
    if len(found) == len(VARIANTS) and len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{result}: {', '.join(variants)}" for result, variants in groups.items())


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("<", "\\<")
