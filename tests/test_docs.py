"""The documentation is true: its code runs, its names and files exist, its doctests pass."""

import ast
import doctest
import importlib
import os
import re
from pathlib import Path

import pytest
import yaml
from workers.forked_programs import ForkedPrograms
from workers.launch import EMITTERS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MODULES = sorted((ROOT / "axonml_jax").rglob("*.py"))
# Blocks that show the shape of something rather than a program start with this comment and are only parsed.
SKETCH = "# sketch"
# Blocks that start with this comment and a file's name are quoted from that file, which a test of its own runs.
QUOTED = "# from "


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def programs(path: Path) -> list[str]:
    return [block for block in python_blocks(path) if not block.startswith((SKETCH, QUOTED))]


def with_code() -> list[Path]:
    return [path for path in PAGES if python_blocks(path)]


@pytest.mark.parametrize("path", with_code(), ids=label)
def test_python_blocks_parse_or_are_quoted_from_a_file(path):
    for block in python_blocks(path):
        if block.startswith(QUOTED):
            file, _, code = block.removeprefix(QUOTED).partition("\n")
            assert code in (ROOT / file).read_text("utf-8"), f"{label(path)} quotes what {file} does not have:\n{code}"
        else:
            ast.parse(block, filename=label(path))


@pytest.fixture(scope="module")
def forked():
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    with ForkedPrograms(
        environment
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": EMITTERS}
        | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}  # as all other tests do (conftest.py): half of the time
    ) as programs:
        yield programs


@pytest.mark.parametrize("path", [path for path in with_code() if programs(path)], ids=label)
def test_the_code_of_a_page_runs_from_top_to_bottom(path, tmp_path, forked):
    status, said = forked.run("\n".join(programs(path)), tmp_path)
    assert status == 0, f"{label(path)}:\n{said}"


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_names_after_ax_exist(path):
    """In code and in prose, `ax.x` is real; only rows and paragraphs that say *planned* may name what is to come."""
    if path.name == "migration.md":
        pytest.skip("test_migration.py holds this page, row by row")
    package = importlib.import_module("axonml_jax")
    paragraphs = re.split(r"\n\s*\n|\n(?=\|)", path.read_text("utf-8"))
    text = "\n".join(part for part in paragraphs if "planned" not in part)
    missing = sorted({name for name in re.findall(r"\bax\.([A-Za-z]\w*)", text) if not hasattr(package, name)})
    assert not missing, f"{label(path)} names what axonml_jax does not have: {missing}"


def test_the_reference_lists_every_public_name():
    package = importlib.import_module("axonml_jax")
    text = (DOCS / "reference" / "index.md").read_text("utf-8")
    public = package.__all__
    missing = sorted(name for name in public if f"`ax.{name}`" not in text)
    assert not missing, f"docs/reference/index.md does not list {missing}"


def nav_files(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [file for child in children for file in nav_files(child)]


def test_every_page_is_in_the_navigation_and_exists():
    listed = nav_files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    present = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(present)


def test_a_guide_shows_one_way_that_works_before_its_reference():
    guides = {path.name: path.read_text("utf-8") for path in (DOCS / "guides").glob("*.md")}
    split = {name: text.split("\n## Reference\n")[0] for name, text in guides.items() if "\n## Reference\n" in text}
    assert len(split) > 10
    wanting = [name for name, start in split.items() if "```" not in start.partition("\n## Tutorial: ")[2]]
    assert not wanting, f"a section '## Tutorial: ...' with code should come before '## Reference' in {wanting}"


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=label)
def test_links_to_files_exist(path):
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", path.read_text("utf-8"))]
    missing = [target for target in targets if "://" not in target and target and not (ROOT / target).exists()]
    assert not missing, missing


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_files_that_a_page_or_its_pictures_name_exist(path):
    text = path.read_text("utf-8")
    named = set(re.findall(r"(?<![\w./{-])((?:[\w-]+/)+[\w-]+\.py)\b", text))
    named |= set(
        re.findall(r"(?<![\w./{-])((?:configs|examples|benchmarks|tests)/[\w/-]+\.(?:yaml|ipynb|txt))\b", text)
    )
    missing = [file for file in named if not any((ROOT / top / file).exists() for top in ("", "axonml_jax", "tests"))]
    assert not missing, f"{label(path)} names files that do not exist: {missing}"


def test_the_folders_in_the_architecture_are_those_of_the_package():
    table = (DOCS / "architecture.md").read_text("utf-8").split("## The contract")[0]
    named = {found.rstrip("/") for found in re.findall(r"`([\w/]+/)`", table)}
    folders = {path.parent.relative_to(ROOT / "axonml_jax").as_posix() for path in MODULES} - {"."}
    known = folders | {folder.rsplit("/")[-1] for folder in folders}
    assert named <= known, f"docs/architecture.md names no folders of the package: {named - known}"
    silent = {folder for folder in folders if folder not in named and folder.rsplit("/")[-1] not in named}
    assert not silent, f"docs/architecture.md does not say what these hold: {silent}"


def test_the_contract_in_the_architecture_is_the_strategys():
    from axonml_jax.strategies.strategy import AbstractStrategy

    text = (DOCS / "architecture.md").read_text("utf-8")
    table = re.search(r"\| Member \| Says \|(.*?)\n\n", text, re.DOTALL).group(1)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert listed == {name for name in vars(AbstractStrategy) if not name.startswith("_")}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900


def test_the_list_of_benchmarks_has_every_script():
    text = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    begin, *parts = re.split(r"^## .*`(\w+)/`.*$", text, flags=re.MULTILINE)
    listed = {
        folder: set(re.findall(r"`(\w+\.py)`", part))
        for folder, part in [("", begin), *zip(parts[::2], parts[1::2], strict=True)]
    }
    folders = {path.name for path in (ROOT / "benchmarks").iterdir() if list(path.glob("*.py"))}
    assert listed == {
        each: {path.name for path in (ROOT / "benchmarks" / each).glob("*.py")} for each in {"", *folders}
    }


def test_decision_notes_are_numbered_and_have_the_same_parts():
    notes = sorted((DOCS / "adr").glob("0*.md"))
    assert [int(note.name[:4]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        text = note.read_text("utf-8")
        assert text.startswith(f"# {note.name[:4]} "), label(note)
        for part in ("**Context.**", "**Decision.**", "**Why not", "**Consequences.**"):
            assert part in text, f"{label(note)} has no {part}"


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [path for path in MODULES if ">>>" in path.read_text("utf-8")], ids=label)
def test_examples_in_docstrings(path):
    module = importlib.import_module(dotted(path))
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert not found.failed, f"{found.failed} of {found.attempted} examples fail in {label(path)}"
