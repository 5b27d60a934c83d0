"""The migration tables are complete and honest: names exist here, and where none does the reason is given."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from axonml_jax.mesh.axes import AXES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migration.md"
NAMES = Path(__file__).with_name("migration_names.txt")
NONE = "none"


class Row(NamedTuple):
    """One row of a table: every name on the left shares the counterpart on the right."""

    section: str
    names: tuple[str, ...]
    here: str
    note: str

    @property
    def references(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.here)


@functools.cache
def rows() -> tuple[Row, ...]:
    found, section, in_table = [], "", False
    for line in PAGE.read_text("utf-8").splitlines():
        if line.startswith("| There | Here | Note |"):
            in_table = True
        elif in_table and line.startswith("|") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
            assert len(cells) == 3, f"three cells wanted: {line}"
            if cells[0].startswith("**"):
                section = cells[0].strip("*").replace("`", "")
                continue
            names = tuple(re.findall(r"`([^`]+)`", cells[0])) or (cells[0],)
            found.append(Row(section, names, *cells[1:]))
        elif not line.startswith("|"):
            in_table = False
    return tuple(found)


def resolve(reference: str):
    """The object behind `ax.a.b` or `ax.f(option=)`; AttributeError when a part of it does not exist."""
    dotted, _, option = reference.removesuffix("=)").partition("(")
    value = importlib.import_module("axonml_jax")
    for part in dotted.split(".")[1:]:
        value = member(value, part)
    if option and option not in options(value):
        raise AttributeError(f"{dotted} takes no {option}=")
    return value


def options(function) -> set[str]:
    """Names of keyword arguments; `**degrees` are the mesh axes, the only open-ended keywords there are."""
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    return names | (set(AXES) if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters) else set())


def member(owner, name: str):
    """An attribute of a module or class; an instance's attribute counts where the class declares or assigns it."""
    if hasattr(owner, name):
        return getattr(owner, name)
    if inspect.isclass(owner):
        declared = {field for base in owner.__mro__ for field in vars(base).get("__annotations__", {})}
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        declared |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        if name in declared:
            return name
    raise AttributeError(f"{owner} has no {name}")


@functools.cache
def command_help(command: str) -> str | None:
    """The help of one subcommand of the command line, or None when there is no such command."""
    done = subprocess.run(
        [sys.executable, "-m", "axonml_jax", command, "--help"], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def exists(reference: str) -> bool:
    if reference.startswith("axonml-jax "):
        _, command, *flags = reference.split()
        text = command_help(command)
        return text is not None and all(flag in text for flag in flags)
    try:
        resolve(reference)
    except AttributeError:
        return False
    return True


def references() -> list[str]:
    """Every counterpart that a row names, once."""
    return sorted({ref for row in rows() for ref in row.references})


def required() -> list[tuple[str, str]]:
    """(section, name) of every name that must be on the page, from the frozen lists of the three systems."""
    wanted, section = [], ""
    for line in NAMES.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
        else:
            wanted += [(section, name) for name in line.split()]
    return wanted


def test_the_page_has_tables():
    assert len(rows()) > 300
    assert len(required()) > 700


@pytest.mark.parametrize("reference", references())
def test_every_name_that_is_said_to_exist_exists(reference):
    assert exists(reference), f"docs/migration.md names {reference}, which does not exist"


def test_every_row_has_a_counterpart_or_a_reason():
    wrong = []
    for row in rows():
        if row.here == NONE:
            ok = len(row.note.split()) >= 4
        else:
            shaped = all(re.match(r"ax\.[\w.]+(\(\w+=\))?$|axonml-jax \w+( --[\w-]+)*$", ref) for ref in row.references)
            ok = bool(row.references) and shaped and not re.sub(r"`[^`]+`(, )?", "", row.here)
        if not ok:
            wrong.append(row)
    assert not wrong, wrong


def test_no_name_stands_twice_in_a_section():
    seen = [(row.section, name) for row in rows() for name in row.names]
    assert sorted(seen) == sorted(set(seen)), [pair for pair in set(seen) if seen.count(pair) > 1]


@pytest.mark.parametrize("section", sorted({section for section, _ in required()}))
def test_every_public_name_of_the_other_systems_is_on_the_page(section):
    there = {name for row in rows() if row.section == section for name in row.names}
    missing = [name for where, name in required() if where == section and name not in there]
    assert not missing, f"docs/migration.md, section {section}: no row for {missing}"


def test_the_overview_names_only_what_exists():
    # The first table of the page is prose-like: every ax.NAME in its last column must be real.
    text = PAGE.read_text("utf-8").split("## The common ones")[1].split("Three differences")[0]
    cells = [line.split("|")[4] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"\bax\.[A-Za-z_]+", cell)}
    missing = sorted(name for name in named if not exists(name))
    assert not missing, missing
