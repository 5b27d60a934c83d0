"""Files and folders that a command is going to write, looked at before it computes anything."""

import os
from collections.abc import Mapping
from pathlib import Path

_PICTURES = (".svg", ".png", ".pdf")


def require_writable(files: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written where they shall go.

    Args:
      files: by the flag that names them; None is not written. A `--picture` must have the ending of one.

    Raises:
      ValueError: with everything that is wrong.
    """
    problems = []
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            problems.append(f"{flag} {path}: is a folder; give a file in it")
        elif not path.parent.is_dir():
            problems.append(f"{flag} {path}: there is no folder {path.parent}; make it, or give another place")
        elif flag == "--picture" and path.suffix.lower() not in _PICTURES:
            problems.append(f"{flag} {path}: the ending chooses the format; give one of {', '.join(_PICTURES)}")
    if problems:
        raise ValueError("\n".join(problems))


def require_folder(setting: str, folder: Path) -> None:
    """Refuse a folder that can be neither used nor made.

    Args:
      setting: that names it.
      folder: the whole path will be made.

    Raises:
      ValueError: when something else is there, or the folder that it would be in is not the user's to write.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{setting}={folder}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}={folder}: {there} may not be written to; give another folder")
