"""Files that a command is going to write, looked at before it computes anything."""

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
