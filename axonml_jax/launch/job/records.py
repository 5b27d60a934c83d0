"""Where records go: a file of JSON lines, and TensorBoard if wanted."""

import json
from pathlib import Path
from typing import Any, Protocol

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.fit import Record


class Recorder(Protocol):
    """Takes records until it is closed."""

    def write(self, record: Record) -> None:
        """Take a record."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


class JsonLines:
    """One JSON object a line: `{"step": 10, "loss": 2.5, ...}`. A line has left this process when `write` returns.

    Args:
      path: the file.
      start: keep the records up to this step, drop the others (a killed run's, after its last checkpoint).
    """

    def __init__(self, path: Path, start: int = 0):
        kept = [record for record in read_records(path) if record.step <= start] if path.exists() else []
        new = path.with_name(path.name + ".new")
        new.write_text("".join(map(_line, kept)), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard.

    Args:
      folder: where they go.
      start: hide what was written there for later steps.
    """

    def __init__(self, folder: Path, start: int = 0):
        self._writer = tensorboard_writer()(str(folder), purge_step=start + 1)

    def write(self, record: Record) -> None:
        """Add every metric as a scalar."""
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def read_records(path: Path) -> list[Record]:
    """The records of a file that `JsonLines` wrote; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Record(row.pop("step"), row) for row in rows]


def _line(record: Record) -> str:
    return json.dumps({"step": record.step, **record.metrics}) + "\n"


def tensorboard_writer() -> Any:
    """The class that writes event files.

    Raises:
      ConfigError: where it is not installed, saying what to do.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "output.tensorboard: tensorboardX is not installed; pip install 'axonml-jax[tensorboard]', or leave it off"
        ) from error
    return SummaryWriter
