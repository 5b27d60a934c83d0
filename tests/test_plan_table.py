"""The tables of plans on the page of the training step are what roles and the cost model's flows say."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "_hooks" / "plan_table.py"


def plan_table():
    spec = importlib.util.spec_from_file_location("plan_table", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_that_the_code_makes():
    made = plan_table()
    text = made.PAGE.read_text("utf-8")
    assert made.page_with(text, made.tables()) == text, "run python docs/_hooks/plan_table.py"


def test_the_tables_say_when_zero_gathers_and_reduces():
    made = plan_table()
    rows = {name: made.travels(*each) for name, each in made.PLANS.items()}
    gathered, reduced = "parameters: all-gather over `fsdp`", "gradients: reduce-scatter over `fsdp` (backward)"
    assert rows["ZeRO-1"] == (f"{gathered} (forward)<br>{reduced}", "nothing")
    assert rows["ZeRO-2"] == (f"{gathered} (forward)", reduced)
    assert rows["ZeRO-3"] == ("nothing", f"{gathered} (forward, backward)<br>{reduced}")
    assert rows["DDP, `NO_SYNC`"] == ("nothing", "nothing")
