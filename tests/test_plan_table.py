"""The tables of plans on the page of the training step, and the pictures that scripts draw, are what the scripts make."""

import importlib.util
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_page_on_plans_has_what_the_planner_chooses():
    made = hook("chosen_plans")
    text = made.PAGE.read_text("utf-8")
    assert made.page_with(text, made.table()) == text, "run python docs/_hooks/chosen_plans.py"


def test_the_picture_of_split_sequences_is_what_the_code_draws():
    made = hook("context_picture")
    assert made.drawing() == made.FILE.read_text("utf-8"), "run python docs/_hooks/context_picture.py"


def test_the_pictures_of_plans_are_what_the_script_draws():
    made = hook("split_pictures")
    stale = [name for name, picture in made.pictures().items() if (made.FOLDER / name).read_text("utf-8") != picture]
    assert not stale, "run python docs/_hooks/split_pictures.py"


def test_the_page_on_scripts_counts_the_lines_that_there_are():
    made = hook("code_lines")
    page, root = made.PAGE.read_text("utf-8"), HOOKS.parents[1]
    rows = {
        name: next(line for line in page.splitlines() if line.startswith("|") and f"`{name}` |" in line)
        for name in made.OWN
    }
    assert {name: int(row.split("|")[2]) for name, row in rows.items()} == {
        name: made.code_lines(root / name) for name in made.OWN
    }


def test_comments_and_docstrings_are_no_lines_of_code(tmp_path):
    file = tmp_path / "it.py"
    file.write_text(
        '"""Said.\n\nMore.\n"""\n\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Said."""\n    # why\n    return """a\n\nb"""\n'
    )
    assert hook("code_lines").code_lines(file) == 3 + 1 + 3


def test_fsdp_beside_tensor_in_the_picture_is_as_placed():
    """Columns held by each rank of fsdp=2, tensor=2: those of its device under the spec (tensor, then fsdp)."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import axonml_jax as ax

    made, mesh = hook("split_pictures"), ax.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    placed = NamedSharding(mesh, PartitionSpec(None, ("tensor", "fsdp"))).devices_indices_map((4, 4))
    columns = [tuple(range(4))[placed[device][1]] for device in mesh.devices.flat]
    assert columns == [made.TOGETHER[3](rank) for rank in range(4)]
    rows = NamedSharding(mesh, PartitionSpec("fsdp")).devices_indices_map((4, 4))
    assert [tuple(range(4))[rows[device][0]] for device in mesh.devices.flat] == [
        made.TOGETHER[6](rank) for rank in range(4)
    ]
