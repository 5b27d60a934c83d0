"""The object that makes a copy one, and the id of a run, which its copies bear and its folder of checkpoints keeps."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from axonml_jax.checkpoint.manifest import SAVED_AT, DamagedCheckpoint, Manifest, sync
from axonml_jax.checkpoint.names import SAVING, name_of

COMMIT = re.compile(r"step_(\d{8,})\.commit")
"""The object's name."""

PREFIX = re.compile(r"step_\d{8,}\.[0-9a-f]{32}/")
"""What the names of a step's files begin with."""

_ANY_PREFIX = re.compile(r"[^/]+\.[0-9a-f]{32}/")

RUN = "run_id.txt"
"""The file, in a folder of checkpoints, with the run's id."""


class Copy(NamedTuple):
    """What the object says that commits a copy.

    Attributes:
      prefix: of its files.
      run: the id of the run whose copy it is.
      folder: where that run keeps its checkpoints, for people.
      said: its metrics and time.
    """

    prefix: str
    run: str
    folder: str
    said: Manifest

    @staticmethod
    def parse(name: str, content: bytes | None) -> "Copy":
        """The copy that an object names.

        Raises:
          DamagedCheckpoint: when there is none, or it is not what was written.
        """
        try:
            found = json.loads(content or b"")
            if not _ANY_PREFIX.fullmatch(found["prefix"]):
                raise ValueError(found["prefix"])
            metrics = {name: float(value) for name, value in found["metrics"].items()}
            said = Manifest(metrics=metrics, about={SAVED_AT: found[SAVED_AT]})
            return Copy(found["prefix"], str(found["run"]), str(found["folder"]), said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{name} is {'missing' if content is None else 'damaged'}") from error

    def text(self) -> bytes:
        """The object."""
        content = {"prefix": self.prefix, "run": self.run, "folder": self.folder}
        return json.dumps(content | {"metrics": self.said.metrics, SAVED_AT: self.said.saved_at}).encode()


def commit_of(name: int | str) -> str:
    """The name of the object whose presence makes a copy of a checkpoint, which has a step or another name."""
    return f"{name if isinstance(name, str) else name_of(name)}.commit"


def run_in(folder: Path) -> str | None:
    """The id of the run whose checkpoints are in a folder; None before its first copy."""
    path = folder / RUN
    return path.read_text("utf-8").strip() if path.is_file() else None


def take_id(folder: Path, run: str) -> str:
    """Keep a run's id in its folder, before there is anything that is known by it."""
    new = folder / (RUN + SAVING)
    new.write_text(run, encoding="utf-8")
    sync(new)
    new.replace(folder / RUN)
    return run
