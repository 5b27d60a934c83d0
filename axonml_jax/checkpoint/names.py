"""What the names in a folder of checkpoints mean."""

import re
from pathlib import Path

SAVING = ".saving"
"""What the name of an unfinished checkpoint ends with, and of one that is being deleted."""

REPLACED = ".replaced"
"""What the name of a checkpoint ends with while another takes its place."""

DAMAGED = ".damaged"
"""What the name of a checkpoint that was passed over ends with; it is kept for inspection."""

_NAME = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step_{step:08d}"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step goes."""
    return folder / name_of(step)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Every checkpoint of a folder by step, in order.

    One that is being replaced, or whose replacement was cut off, is there under the name that it was given for that.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    names.sort(key=lambda name: not name.endswith(REPLACED))  # of two the one without wins
    found = ((_NAME.fullmatch(name.removesuffix(REPLACED)), name) for name in names)
    return dict(sorted({int(match[1]): folder / name for match, name in found if match}.items()))


def newest_below(folder: Path) -> Path | None:
    """The newest checkpoint of a folder of checkpoints, or of a run's folder that has one; None for any other."""
    places = (folder, *sorted(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    found = (checkpoints_in(place) for place in places)
    return next((list(steps.values())[-1] for steps in found if steps), None)
