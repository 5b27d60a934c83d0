"""A file that is not there: what stands in its place, the configuration of the package by that name, or the one meant."""

import difflib
import os
import stat
from pathlib import Path

from axonml_jax.data.folder import KINDS

_PACKAGE = Path(__file__).resolve().parents[2]


def shipped_config(name: str) -> Path | None:
    """A configuration that comes with the package, by its name (`quickstart`, `plans/llama3_8b_v5p_512`), or by its path in the
    repository (`configs/quickstart.yaml`)."""
    tree = _PACKAGE.parent
    folders = [_PACKAGE / "configs", *([tree / "configs"] if (tree / "pyproject.toml").is_file() else [])]
    parts = Path(name).parts[name.startswith("configs/") :]
    if not parts or Path(name).is_absolute() or ".." in parts:
        return None
    found = (folder.joinpath(*parts[:-1], parts[-1].removesuffix(".yaml") + ".yaml") for folder in folders)
    return next((path for path in found if path.is_file()), None)


def not_a_file(path: Path) -> str | None:
    """What stands at a path in the place of a file, in words; None: a file, or nothing.

    Opening a FIFO would wait for a writer.
    """
    if not path.exists() or path.is_file():
        return None
    return "a folder" if path.is_dir() else KINDS.get(stat.S_IFMT(path.stat().st_mode), "no regular file")


def nearest_file(path: Path) -> Path | None:
    """The file of the same folder whose name is nearest; None when nothing is near."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None
