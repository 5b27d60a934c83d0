"""The documentation has no dead ends: links and anchors lead somewhere, attributes exist, every name has an example."""

import importlib
import re
import shlex
import unicodedata
from contextlib import suppress
from pathlib import Path

import pytest
import test_docs
import test_migration

from axonml_jax.__main__ import main

ROOT, DOCS = test_docs.ROOT, test_docs.DOCS
PAGES = [*test_docs.PAGES, ROOT / "CHANGELOG.md", ROOT / "changes" / "0.1.md", ROOT / "benchmarks" / "README.md"]
CODE = re.compile(r"^(```+)[^\n]*\n.*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")

LEFT = ("lm_eval_model",)  # needs a package that no extra of the tests brings; its own test runs where that is


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return CODE.sub("", text)


def slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    plain = unicodedata.normalize("NFKD", said).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(text: str) -> set[str]:
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        found[slug(heading)] = found.get(slug(heading), 0) + 1
    return {f"{name}_{number}" if number else name for name, count in found.items() for number in range(count)}


def dead_links(path: Path) -> list[str]:
    dead = []
    for target in LINK.findall(prose(path.read_text("utf-8"))):
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        inside = not file or place.suffix == ".md"
        if "://" not in target and not (
            place.exists() and (not anchor or not inside or anchor in anchors(place.read_text("utf-8")))
        ):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", PAGES, ids=test_docs.label)
def test_links_lead_to_files_and_headings_that_exist(path):
    assert not dead_links(path), f"{test_docs.label(path)} links to what does not exist"


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "# One `two`\n\n[x](a.md#one-two) [y](a.md#three) [z](b.md) [w](#four)\n\n```text\n[v](c.md)\n```\n"
    )
    assert dead_links(page) == ["a.md#three", "b.md", "#four"]


@pytest.mark.parametrize("path", test_docs.PAGES, ids=test_docs.label)
def test_attributes_of_public_names_exist(path):
    """`ax.DDP.no_sync` in prose and in code: what stands behind the second dot is there."""
    missing = set()
    for reference in re.findall(r"\bax\.[A-Za-z]\w*(?:\.[A-Za-z]\w*)+", path.read_text("utf-8")):
        try:
            test_migration.resolve(reference)
        except AttributeError:
            missing.add(reference)
    assert not missing, f"{test_docs.label(path)} names what does not exist"


KEYS = (Path(__file__).parent / "config_keys.txt").read_text("utf-8").split()
ALSO_TAKEN = (
    "plan.gather",
    "plan.reduce",
    "plan.cpu_offload",
    "plan.mixed_precision",
    "checkpoint.json",
)  # other names, and a file's
SECTIONS = (
    "train",
    "checkpoint",
    "data",
    "optim",
    "output",
    "spikes",
    "ema",
    "finetune",
    "devices",
    "sample",
    "mesh",
    "plan",
)


def unknown_keys(text: str) -> set[str]:
    """Keys of configurations that a page names, as a flag or in its prose, and that are none."""
    named = set(re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", text))
    named |= set(re.findall(rf"`((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)(?:[:= ][^`]*)?`", prose(text)))
    return {key for key in named - {*ALSO_TAKEN} if not any(f"{each}.".startswith(f"{key}.") for each in KEYS)}


@pytest.mark.parametrize("path", PAGES[:-3], ids=test_docs.label)
def test_keys_of_configurations_exist(path):
    assert not unknown_keys(path.read_text("utf-8")), f"{test_docs.label(path)} names keys that are none"


def test_unknown_keys_are_found():
    text = "`train.steps: 3`, `train.stepz`, `mesh.fsdp`\n\n```bash\naxonml-jax train a.yaml --optim.chain --plan.oops 1\n```\n"
    assert unknown_keys(text) == {"train.stepz", "plan.oops"}


CODE_BLOCKS = re.compile(r"^```(?:bash|text|yaml|)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(text: str) -> set[tuple[str, str]]:
    """(command, flag) of the lines of a page that call `axonml-jax`; what a launched script is given is its own."""
    found = set()
    for line in re.findall(r"^(?:.* )?axonml-jax (.*(?:\\\n.*)*)$", "\n".join(CODE_BLOCKS.findall(text)), re.MULTILINE):
        command, *rest = shlex.split(line.replace("\\\n", " ").partition(" > ")[0].partition("`")[0], comments=True)
        for word in rest:
            if command == "launch" and (word in ("train", "python") or word.endswith(".py")):
                break
            flag = word.partition("=")[0]
            found |= {(command, flag)} if flag.startswith("--") and "." not in flag else set()
    return found


def test_flags_of_commands_on_pages_exist(capsys):
    named = {found: path for path in test_docs.PAGES for found in commands(path.read_text("utf-8"))}
    assert {command for command, _ in named} > {"train", "launch", "plan", "explain", "generate"}
    known = {command: "" for command, _ in named}
    for asked in ("launch --write jobset", *known):
        with suppress(SystemExit):
            main([*asked.split(), "--help"])
        known[asked.split()[0]] += capsys.readouterr().out
    wrong = [f"{test_docs.label(path)}: axonml-jax {command} {flag}" for (command, flag), path in named.items()
             if flag.replace("_", "-") not in re.findall(r"--[a-z][\w-]*", known[command].replace("_", "-"))]  # fmt: skip
    assert not wrong, wrong


def groups() -> dict[str, list[str]]:
    """Page of the reference -> its names, from the table of `reference/index.md`."""
    text = (DOCS / "reference" / "index.md").read_text("utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)[^|]*\| ([^|]+) \|$", text, re.MULTILINE)
    return {file: re.findall(r"`ax\.(\w+)`", names) for file, names in rows}


def test_every_public_name_is_in_one_group_of_the_reference():
    public = importlib.import_module("axonml_jax").__all__
    assert sorted(name for names in groups().values() for name in names) == sorted(public)
    pages = {path.name for path in (DOCS / "reference").glob("*.md")} - {"index.md"}
    assert pages == set(groups())
    for page in pages:
        text = (DOCS / "reference" / page).read_text("utf-8")
        assert text.endswith("<!-- names -->\n") and "```python" in text


def test_every_public_name_is_used_in_a_program_that_runs():
    """On a page, whose programs `test_docs.py` runs, or in the examples of a docstring, or in a file of examples/."""
    package = importlib.import_module("axonml_jax")
    blocks = [block for path in test_docs.PAGES for block in test_docs.python_blocks(path) if "# sketch" not in block]
    blocks += [path.read_text("utf-8") for path in (ROOT / "examples").rglob("*.py")]
    used = {name for block in blocks for name in re.findall(r"\bax\.(\w+)", block)}
    lacking = [
        name
        for name in package.__all__
        if name not in (*used, *LEFT) and ">>>" not in (getattr(package, name).__doc__ or "")
    ]
    assert not lacking, f"no example that runs uses {lacking}"
