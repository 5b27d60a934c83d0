"""The examples run, are short, and open with how to run them; notebooks show what is kept in them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_cells import code_cells, kept, source
from workers.launch import EMITTERS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-W", "error::UserWarning", *map(str, argv)]
    environment = inherited | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": EMITTERS}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    pytest_itself = ("-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--fake-devices", "4")
    done = run(*(pytest_itself if path.stem.startswith("test_") else ()), path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_says_how_to_run_it_and_ends_with_a_check(path):
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) < 80
    assert f"examples/{path.name}" in ast.get_docstring(tree) and "Shows" in ast.get_docstring(tree)
    assert any("assert" in ast.unparse(node) for node in tree.body[-2:])


@pytest.mark.slow
def test_the_training_script_goes_on_and_runs_as_two_processes(tmp_path):
    script = ROOT / "examples" / "training_script.py"
    once = run(script, "--steps", "10", cwd=tmp_path)
    again = run(script, "--steps", "20", cwd=tmp_path)
    assert "starting after step 0" in once.stdout and "starting after step 10" in again.stdout, again.stderr[-3000:]
    together = run(
        "-m", "axonml_jax", "launch", "--nproc-per-node", "2", script, "--steps", "10", "--out", "two", cwd=tmp_path
    )
    assert together.returncode == 0, together.stderr[-3000:]
    [loss] = [line for line in once.stdout.splitlines() if line.startswith("step 10")]
    assert f"[rank 0] {loss}" in together.stdout and "[rank 0] 2 ranks" in together.stdout
    assert (tmp_path / "two" / "exported" / "model.safetensors").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_notebook_runs_and_shows_what_is_kept_in_it(path, tmp_path):
    done = run(ROOT / "tests" / "notebook_cells.py", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for cell, shown in zip(code_cells(path), json.loads(done.stdout), strict=True):
        there = kept(cell)
        assert bool(there["stream"]) == bool(shown["stream"]) and set(there["result"]) == set(shown["result"])
        assert there["result"].get("text/html") == shown["result"].get("text/html"), source(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_short_outputs_of_one_run_and_ends_with_a_check(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert source(cells[-1]).startswith("assert")
    for cell in cells:
        assert {out["output_type"] for out in cell["outputs"]} <= {"stream", "execute_result"}
        assert "\r" not in kept(cell)["stream"] and len(kept(cell)["stream"].splitlines()) < 12
    assert not re.search(r"/(home|root|Users)/", path.read_text("utf-8"))
