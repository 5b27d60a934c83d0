"""MkDocs hook: one reference page per room of the package, made from its folder so that none is forgotten."""

from pathlib import Path

from mkdocs.structure.files import File

PACKAGE = Path(__file__).resolve().parents[2] / "axonml_jax"
ORDER = (
    "facade",
    "mesh",
    "collectives",
    "sharding",
    "model",
    "parallel",
    "training",
    "data",
    "models",
    "ledger",
    "cost",
)


def rooms():
    """Names of the public folders and modules of the package, the facades first."""
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    return sorted(found, key=lambda room: (ORDER.index(room) if room in ORDER else len(ORDER), room))


def page(room):
    """Markdown of one room: its docstring and everything public in it, by file."""
    return f"---\ntitle: {room}\n---\n\n# `axonml_jax.{room}`\n\n::: axonml_jax.{room}\n"


def on_config(config):
    """Put the generated pages under the navigation's Reference entry."""
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [entry["Reference"], *({room: f"reference/{room}.md"} for room in rooms())]
    return config


def on_files(files, config):
    """Add the generated pages to the build."""
    for room in rooms():
        files.append(File.generated(config, f"reference/{room}.md", content=page(room)))
    return files
