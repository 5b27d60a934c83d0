"""The tables of plans on the page of the training step, and the picture of context parallelism, are what the code says."""

import importlib.util
from pathlib import Path

HOOKS = Path(__file__).resolve().parents[1] / "docs" / "_hooks"


def hook(name):
    spec = importlib.util.spec_from_file_location(name, HOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_that_the_code_makes():
    made = hook("plan_table")
    text = made.PAGE.read_text("utf-8")
    assert made.page_with(text, made.tables()) == text, "run python docs/_hooks/plan_table.py"


def test_the_tables_say_when_zero_gathers_and_reduces():
    made = hook("plan_table")
    rows = {name: made.travels(*each) for name, each in made.PLANS.items()}
    gathered, reduced = "parameters: all-gather over `fsdp`", "gradients: reduce-scatter over `fsdp` (backward)"
    assert rows["ZeRO-1"] == (f"{gathered} (forward)<br>{reduced}", "nothing")
    assert rows["ZeRO-2"] == (f"{gathered} (forward)", reduced)
    assert rows["ZeRO-3"] == ("nothing", f"{gathered} (forward, backward)<br>{reduced}")
    assert rows["DDP, `NO_SYNC`"] == ("nothing", "nothing")


def test_the_picture_of_split_sequences_is_what_the_code_draws():
    made = hook("context_picture")
    assert made.drawing() == made.FILE.read_text("utf-8"), "run python docs/_hooks/context_picture.py"
