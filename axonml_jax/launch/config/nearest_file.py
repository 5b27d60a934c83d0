"""A file that is not there: the configuration of the package by that name, or the one beside it that was most likely meant."""

import difflib
import os
from pathlib import Path

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


def nearest_file(path: Path) -> Path | None:
    """The file of the same folder whose name is nearest; None when nothing is near."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None
