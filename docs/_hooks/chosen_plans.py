"""The table of chosen plans in which-plan.md, from the planner.

`python docs/_hooks/chosen_plans.py` writes it into the page; `tests/test_plan_table.py` fails while the page has another.
"""

import re
from dataclasses import replace
from pathlib import Path

import axonml_jax as ax
from axonml_jax.models.config import preset

PAGE = Path(__file__).resolve().parents[1] / "which-plan.md"
BLOCK = re.compile(r"(<!-- chosen: begin[^\n]*\n).*?(<!-- chosen: end -->)", re.DOTALL)

# preset, devices, hardware, sequences per update, tokens of a sequence
ASKED = (
    ("gpt2-small", 1, "a100", 64, 1024),
    ("gpt2-small", 8, "a100", 256, 1024),
    ("gpt2-xl", 8, "a100", 64, 1024),
    ("llama3-8b", 8, "h100", 16, 8192),
    ("llama3-8b", 64, "v5p", 128, 8192),
    ("llama3-8b", 64, "v5p", 1, 1_048_576),
    ("llama3-70b", 64, "h100", 64, 8192),
)
COLUMNS = ("Model", "Devices", "Batch", "Plan", "Memory of a device")


def table():
    """A row for each question."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(*asked) for asked in ASKED)]
    return "\n".join(f"| {' | '.join(each)} |" for each in rows) + "\n"


def row(name, devices, hardware, batch, length):
    """What the planner chooses."""
    model = replace(preset(name), max_length=length)
    answer = ax.plan(model, num_devices=devices, hardware=hardware, global_batch=batch, runners_up=0)
    held = f"{answer.prediction.memory.total / 2**30:.0f} GiB"
    return name, f"{devices} {hardware}", f"{batch:,} x {length:,}", str(answer.best.candidate), held


def page_with(text, made):
    """The page's text with this table in it."""
    return BLOCK.sub(lambda found: f"{found[1]}{made}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text("utf-8"), table()), "utf-8")
