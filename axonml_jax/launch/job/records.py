"""Where records go: a file of JSON lines, and a table, TensorBoard or Weights & Biases if wanted (MLflow: mlflow_run.py)."""

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import Any, Protocol

from axonml_jax.checkpoint.keeping.failures import cause_of
from axonml_jax.launch.config.nearest_file import not_a_file
from axonml_jax.launch.config.read_config import as_dict
from axonml_jax.launch.config.run_config import ConfigError, RunConfig
from axonml_jax.launch.job.fit import Record
from axonml_jax.launch.job.mlflow_run import MlflowRun
from axonml_jax.logging import logger


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
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append a record: all of it, or nothing."""
        rest, end = _line(record).encode(), os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

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


class Csv:
    """A table with a column for every metric, for spreadsheets; a metric that comes later gets a column then.

    Args:
      path: the file.
      start: keep the rows up to this step, drop the others.
    """

    def __init__(self, path: Path, start: int = 0):
        self._path, self._torn = path, False
        self._rows: list[dict[str, Any]] = []
        if start and path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                lines = file.readlines()
            whole = (
                lines if lines and lines[-1].endswith("\n") else lines[:-1]
            )  # a killed run's last row may be cut off
            self._rows = [row for row in csv.DictReader(whole) if int(row["step"]) <= start]
        self._columns = list(dict.fromkeys(["step", *(name for row in self._rows for name in row)]))
        self._write_all()

    def write(self, record: Record) -> None:
        """Append a row."""
        row = {"step": record.step, **record.metrics}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        try:
            if new or self._torn:
                self._columns += new
                self._write_all()
            else:
                with self._path.open("a", encoding="utf-8", newline="") as file:
                    csv.DictWriter(file, self._columns).writerow(row)
        except OSError:
            self._rows.pop()
            self._torn = True  # its last row may be cut off
            raise

    def close(self) -> None:
        """Everything is written already."""

    def _write_all(self) -> None:
        new = self._path.with_name(self._path.name + ".new")
        with new.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        new.replace(self._path)
        self._torn = False


class Patient:
    """Records that a full, read-only or failing disk does not take are kept until it does, with one warning.

    Args:
      recorder: writes them; it takes a record whole, or not at all.
    """

    def __init__(self, recorder: "JsonLines | Csv"):
        self._recorder = recorder
        self._kept: list[Record] = []

    def write(self, record: Record) -> None:
        """Take a record, and write what is kept."""
        self._kept.append(record)
        try:
            while self._kept:
                self._recorder.write(self._kept[0])
                del self._kept[0]
        except OSError as error:
            if cause_of(error) is None:
                raise
            if len(self._kept) == 1:
                logger.warning("a record could not be written, and is kept until it can: %s", error)

    def close(self) -> None:
        """Close the file; what the disk has never taken is lost, and said."""
        if self._kept:
            logger.warning("%d records could not be written, from step %d on", len(self._kept), self._kept[0].step)
        self._recorder.close()


def patient(recorder: JsonLines | Csv, failures: int) -> Recorder:
    """A recorder that waits for its disk, in a run that may go on after failures (`checkpoint.max_failures`)."""
    return Patient(recorder) if failures > 1 else recorder


class Wandb:
    """A run of Weights & Biases, of this run's name and configuration; a resumed run goes on with it.

    Args:
      folder: the run's, in which its files and its id are kept.
      settings: the configuration.
      project: where the run is listed; the mode is that of `WANDB_MODE`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], project: str):
        kept = folder / "wandb.id"
        known = kept.read_text("utf-8").strip() if kept.exists() else None
        self._run = wandb_module().init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=settings,
            id=known,
            resume="allow" if known else None,
        )
        kept.write_text(self._run.id, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Log every metric at its step."""
        self._run.log(record.metrics, step=record.step)

    def close(self) -> None:
        """Finish the run and send what is left."""
        self._run.finish()


def files(config: RunConfig, folder: Path | None, start: int) -> Iterator[Recorder]:
    """Those in the run's folder, from a step on; none without a folder."""
    if folder is not None:
        yield patient(JsonLines(folder / "metrics.jsonl", start), config.checkpoint.max_failures)
    if folder is not None and config.output.tensorboard:
        yield TensorBoard(folder / "tensorboard", start)
    if folder is not None and config.output.csv:
        yield patient(Csv(folder / "metrics.csv", start), config.checkpoint.max_failures)


def services(
    config: RunConfig, folder: Path | None, reason: Callable[[], str]
) -> Iterator[AbstractContextManager[Wandb | MlflowRun]]:
    """Runs elsewhere, each ended once, as the training ends: one that goes back before a spike has not ended.

    Args:
      config: the run's.
      folder: the run's; None: this process writes nothing.
      reason: how the training has ended, when it has.
    """
    if folder is not None and config.output.wandb:
        yield closing(Wandb(folder, as_dict(config), config.output.wandb))
    if folder is not None and config.output.mlflow:
        yield MlflowRun(folder, reason)


def read_records(path: Path) -> list[Record]:
    """The records of a file that `JsonLines` wrote; a last line that was cut off is left out.

    Raises:
      ValueError: naming the first line that is none of a record, or what stands there and is no file.
    """
    if kind := not_a_file(path):
        raise ConfigError(f"{path} is {kind}, and records are kept in a file: remove it")
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not all(isinstance(value, int | float) for value in (row["step"], *row.values())):
                raise TypeError("a value is no number")
            found.append(Record(row.pop("step"), row))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no record: {line[:60]!r}") from error
    return found


def wandb_module() -> Any:
    """The package.

    Raises:
      ConfigError: where it is not installed, or nobody is logged in and it is not offline, saying what to do.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("output.wandb: wandb is not installed; pip install wandb, or leave it off") from error
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not offline and wandb.api.api_key is None:
        raise ConfigError("output.wandb: nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
    return wandb


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
