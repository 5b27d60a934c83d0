"""A file that is not there: the one beside it that was most likely meant."""

import difflib
import os
from pathlib import Path


def nearest_file(path: Path) -> Path | None:
    """The file of the same folder whose name is nearest; None when nothing is near."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None
