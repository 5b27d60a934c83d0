"""Records of a run: files, curves, progress, profiles, MLflow and Weights & Biases."""

import csv
import importlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from axonml_jax.base import PyTree, folded, logger, print0
from axonml_jax.checkpoint.saving import cause_of
from axonml_jax.cli.loop import Record
from axonml_jax.cli.run import CHECKPOINT_FOLDER, RunSetup
from axonml_jax.cli.tasks import TextData, write_samples
from axonml_jax.config.config import ConfigError, RunConfig, as_dict, examples_until, not_a_file
from axonml_jax.config.sections import OwnModel
from axonml_jax.facade.trainer import ParallelModel
from axonml_jax.training.callbacks import OneLine, Throughput, rewrites

# --------------------------------------------------------------------------------------------------
# Records in a run of MLflow.
# --------------------------------------------------------------------------------------------------

AT_ONCE = {"metrics": 1000, "params": 100}
"""How many items MLflow takes in one request."""
LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""

_ID = "mlflow.id"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}


class MlflowRun:
    """Logs to the MLflow run that `begin_mlflow` began, and ends it with the training. A context.

    If MLflow fails to take a record, one warning is logged and the training goes on without it; the end is sent to MLflow all
    the same, so that the run does not stay RUNNING there for ever.

    Args:
      folder: the run's, which holds the id of the MLflow run.
      reason: how a training that raises nothing has ended: "finished", "stopped" or "diverged".
    """

    def __init__(self, folder: Path, reason: Callable[[], str]):
        self._mlflow = mlflow_module()
        self._client, self._id = self._mlflow.MlflowClient(), _kept(folder)
        self._reason, self._lost = reason, False

    def __enter__(self) -> "MlflowRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception):
        killed = kind is not None and issubclass(kind, KeyboardInterrupt)
        status = _STATUS["stopped" if killed else "diverged"] if kind is not None else _STATUS[self._reason()]
        try:
            self._client.set_terminated(self._id, status=status)
        except self._mlflow.MlflowException as error:
            logger.warning(
                "output.mlflow: MLflow did not take the end of run %s, which stays RUNNING there though it is %s: %s. Say it "
                "there by mlflow.MlflowClient().set_terminated(%r, status=%r)",
                self._id,
                status,
                _said(error),
                self._id,
                status,
            )

    def write(self, record: Record) -> None:
        """Log every metric at its step, until MLflow fails once, after which each try would take minutes."""
        if self._lost:
            return
        now, metric = round(1000 * time.time()), self._mlflow.entities.Metric
        values = [metric(_name(name), value, now, record.step) for name, value in record.metrics.items()]
        try:
            _log(self._client, self._id, "metrics", values)
        except self._mlflow.MlflowException as error:
            self._lost = True
            logger.warning(
                "output.mlflow: MLflow took a record no more, and gets none but the end of run %s: %s. The training goes on, "
                "and all records are in metrics.jsonl",
                self._id,
                _said(error),
            )


def check_mlflow(experiment: str, folder: Path | None) -> None:
    """Check that MLflow answers, and knows the run to continue. Writes nothing.

    Args:
      experiment: where the run is listed.
      folder: of the run to go on with; None for a new one.

    Raises:
      ConfigError: when MLflow is not installed, does not answer, or does not know the run.
    """
    mlflow = mlflow_module()
    try:
        client = mlflow.MlflowClient()
        if known := folder and _kept(folder):
            client.get_run(known)
        else:
            client.get_experiment_by_name(experiment)
    except mlflow.MlflowException as error:
        raise _refused(experiment, folder, error) from error


def begin_mlflow(experiment: str, folder: Path, settings: Mapping[str, Any]) -> None:
    """Begin an MLflow run with the run's name and configuration; a resumed run continues its own.

    Args:
      experiment: where the run is listed; made when there is none of this name. The server, or the place on this machine, is
        that of `MLFLOW_TRACKING_URI`.
      folder: the run's, in which the id of the MLflow run is kept.
      settings: the configuration.

    Raises:
      ConfigError: when MLflow fails.
    """
    mlflow = mlflow_module()
    try:
        client = mlflow.MlflowClient()
        if known := _kept(folder):
            client.update_run(known, status="RUNNING")
            return
        found = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if found is None else found.experiment_id
        made = client.create_run(number, run_name=folder.name).info.run_id
        (folder / _ID).write_text(made, encoding="utf-8")
        _log(
            client,
            made,
            "params",
            [mlflow.entities.Param(_name(key), str(value)[:LONGEST]) for key, value in flat(settings)],
        )
    except mlflow.MlflowException as error:
        raise _refused(experiment, folder, error) from error


def mlflow_module() -> Any:
    """Import the package, or say how to install it.

    Raises:
      ConfigError: where it is not installed, saying what to do.
    """
    _imported("mlflow.entities", "output.mlflow", "'axonml-jax[mlflow]'")
    return importlib.import_module("mlflow")


def _imported(module: str, setting: str, install: str) -> Any:
    """Import a module that a setting needs, or say how to install it.

    Raises:
      ConfigError: where it is not installed, saying what to do.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ConfigError(f"{setting}: {name} is not installed; pip install {install}, or leave it off") from error


def _kept(folder: Path) -> str:
    """The MLflow run id stored in a folder; empty if there is none."""
    return (folder / _ID).read_text("utf-8").strip() if (folder / _ID).exists() else ""


def _refused(experiment: str, folder: Path | None, error: Exception) -> ConfigError:
    known = f", whose run {id_} is kept in {folder / _ID}" if folder and (id_ := _kept(folder)) else ""
    return ConfigError(
        f"output.mlflow={experiment}{known}: MLflow fails: {_said(error)}. Look at MLFLOW_TRACKING_URI"
        + (", delete that file to begin another run," if known else "")
        + " or leave output.mlflow off"
    )


def _said(error: Exception) -> str:
    """An MLflow error's text without the name and password that an address may contain.

    >>> _said(ValueError("no answer from http://me:hush@host:5000/api"))
    'no answer from http://***@host:5000/api'
    """
    return re.sub(r"://[^/\s@]+@", "://***@", str(error))


def _log(client: Any, run: str, kind: str, values: list[Any]) -> None:
    for start in range(0, len(values), AT_ONCE[kind]):
        client.log_batch(run, **{kind: values[start : start + AT_ONCE[kind]]})


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; an empty section is a value.

    >>> list(flat({"train": {"steps": 3, "seed": None}, "name": "a", "loss": {}}))
    [('train.steps', 3), ('train.seed', None), ('name', 'a'), ('loss', {})]
    """
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _name(name: str) -> str:
    """A metric's name with characters that MLflow accepts.

    >>> _name("grad_norm/blocks/0"), _name("top@5")
    ('grad_norm/blocks/0', 'top_5')
    """
    return re.sub(r"[^\w\-. /]", "_", name)


# --------------------------------------------------------------------------------------------------
# The loss curve, and the loads of experts, as pictures.
# --------------------------------------------------------------------------------------------------


def plot_losses(
    records: Sequence[Record],
    path: Path,
    *,
    title: str,
    unit: str = "loss (nats per byte)",
    baseline: float | None = None,
) -> str | None:
    """Draw training and validation loss against the step.

    Args:
      records: what a run recorded.
      path: the PNG to write.
      title: above the curves.
      unit: the label of the vertical axis.
      baseline: the loss of a bigram model, drawn as a line; None: no line.

    Returns:
      None, or why there is no picture.
    """
    if (figure := _figure()) is None:
        return f"no loss curve: {_MISSING}"
    axes = figure.add_subplot()
    axes.plot(*_series(records, "loss"), color="#9db8d9", linewidth=1.2, label="training batch")
    axes.plot(*_series(records, "valid_loss"), "o-", color="#1f4e8c", markersize=4, label="validation")
    if baseline is not None:
        axes.axhline(baseline, color="#b5482a", linestyle="--", linewidth=1, label=f"bigram model ({baseline:.2f})")
    axes.set(title=title, xlabel="step", ylabel=unit)
    _finish(figure, axes, path)
    return None


def plot_expert_loads(records: Sequence[Record], path: Path, *, title: str) -> str | None:
    """Draw each expert's share of all choices against the step.

    Args:
      records: what a run recorded.
      path: the PNG to write.
      title: above the curves.

    Returns:
      None, or why there is no picture.
    """
    names = [name for name in (records[0].metrics if records else ()) if name.startswith("experts/load/")]
    if not names:
        return "no picture of the experts' loads: with so many experts they are not recorded one by one"
    if (figure := _figure()) is None:
        return f"no picture of the experts' loads: {_MISSING}"
    axes = figure.add_subplot()
    for name in names:
        axes.plot(*_series(records, name), linewidth=1, label=name.rpartition("/")[2])
    axes.axhline(1 / len(names), color="#444444", linestyle="--", linewidth=1, label="even")
    axes.set(title=title, xlabel="step", ylabel="share of all choices", ylim=(0, None))
    _finish(figure, axes, path, columns=-(-len(names) // 16) + 1)
    return None


def plot_runs(runs: Mapping[str, Sequence[Record]], path: Path, *, metric: str) -> str | None:
    """Draw a metric of several runs against the step.

    Args:
      runs: what each recorded, by its name.
      path: the picture to write; its suffix chooses the format.
      metric: its name.

    Returns:
      None, or why there is no picture.
    """
    if (figure := _figure()) is None:
        return _MISSING
    axes = figure.add_subplot()
    for name, records in runs.items():
        steps, values = _series(records, metric)
        if steps:
            axes.plot(steps, values, "o-" if len(steps) < 50 else "-", markersize=3, linewidth=1.2, label=name)
    axes.set(xlabel="step", ylabel=metric)
    _finish(figure, axes, path)
    return None


_MISSING = "matplotlib is not installed (pip install 'axonml-jax[plots]')"


def _figure() -> Any:
    """An empty figure, or None without matplotlib."""
    from axonml_jax.ledger.pictures import new_figure

    try:
        return new_figure(7, 4.2)
    except ModuleNotFoundError:
        return None


def _finish(figure: Any, axes: Any, path: Path, columns: int = 1) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, ncols=columns)
    figure.savefig(path, dpi=150)


def _series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    found = [(record.step, record.metrics[name]) for record in records if name in record.metrics]
    return [step for step, _ in found], [value for _, value in found]


# --------------------------------------------------------------------------------------------------
# A run's speeds, and the peak FLOP/s of accelerators, for MFU.
# --------------------------------------------------------------------------------------------------


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of one device, or None where it is not known (every CPU).

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    from axonml_jax.planner.hardware import hardware_of

    return None if (found := hardware_of(device_kind)) is None else found.flops


def throughput(config: RunConfig, ground: RunSetup, folder: Path | None = None, start: int = 0) -> Throughput:
    """Returns what turns step durations into speeds, and counts the tokens or examples seen.

    Args:
      config: the run's.
      ground: its devices, mesh and data.
      folder: the run's, whose earlier configurations say the batch sizes of the steps before `start`; None: the same as now.
      start: updates made already.
    """
    rows, model, length = config.train.global_batch_size, config.model, config.data.length
    kind, own = ground.mesh.devices.flat[0].device_kind, ground.own is not None
    adapters = config.finetune.lora.rank is not None  # fewer, as no gradient of the base is made
    drawn = examples_until(folder, start) if folder is not None and start else None
    return Throughput(
        tokens_per_step=rows if own else rows * length,
        flops_per_token=None if own or adapters or isinstance(model, OwnModel) else model.flops_per_token(length),
        num_devices=ground.mesh.size,
        peak_flops=peak_flops(kind),
        unit="examples" if own else "tokens",
        before=0 if drawn is None else (drawn - start * rows) * (1 if own else length),
    )


# --------------------------------------------------------------------------------------------------
# A profiler trace of a few steps.
# --------------------------------------------------------------------------------------------------

FIRST, COUNT = 3, 5
"""The steps traced: past compilation, and few enough to open in a browser."""


def traced(batches: Iterator[PyTree], folder: Path, wait: Callable[[], object]) -> Iterator[PyTree]:
    """Pass batches through; during the third to seventh, `jax.profiler` writes a trace with each as a `step`.

    Args:
      batches: what a training loop draws from.
      folder: where the trace goes (docs/guides/profiling.md says how to read it).
      wait: returns when the steps so far are done.
    """
    running = False
    try:
        for number, batch in enumerate(batches, start=1):
            if number == FIRST + COUNT:
                running = _stop(wait)
            if number == FIRST:
                wait()
                jax.profiler.start_trace(folder)
                running = True
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                yield batch
    finally:
        if running:
            _stop(wait)


def _stop(wait: Callable[[], object]) -> bool:
    wait()
    jax.profiler.stop_trace()
    return False


# --------------------------------------------------------------------------------------------------
# What a run shows while it trains: a live bar on a terminal, one line in a notebook, plain lines anywhere else.
# --------------------------------------------------------------------------------------------------


@contextmanager
def progress(steps: int, console: Console | None = None) -> Iterator[Callable[[Record], None]]:
    """Yield a function that displays each record of a run: in a bar on a terminal, else as lines.

    Args:
      steps: updates of the whole run.
      console: where records are shown; None: standard output.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        if rewrites(console.file):  # pyright: ignore[reportArgumentType]  # rich's IO[str] is a text stream
            yield from _in_notebook(steps, OneLine(console.file))  # pyright: ignore[reportArgumentType]
        else:
            yield lambda record: print(line(record, steps), file=console.file, flush=True)
        return
    size = 24 if console.width >= 120 else 10
    room = console.width - size - 2 * len(str(steps)) - len("  /  0:00:00 0:00:00 ")
    columns = [BarColumn(bar_width=size), MofNCompleteColumn(), TextColumn("{task.fields[shown]}")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=steps, shown="compiling ...")

        def show(record: Record) -> None:
            bar.update(task, completed=record.step, shown=_within(room, cells(record)))
            if "valid_loss" in record.metrics:
                said = [line(record, steps), line(_losses(record), steps)]
                console.print(said[len(said[0]) > console.width], soft_wrap=True, highlight=False)

        yield show


def _within(room: int, said: list[str]) -> str:
    """As many leading measurements as fit."""
    while len(said) > 1 and len("  ".join(said)) > room:
        said = said[:-1]
    return "  ".join(said)


def _losses(record: Record) -> Record:
    return Record(record.step, {name: n for name, n in record.metrics.items() if name in ("loss", "valid_loss")})


def _in_notebook(steps: int, shown: OneLine) -> Iterator[Callable[[Record], None]]:
    """Display one line that is overwritten; validations stay."""

    def show(record: Record) -> None:
        if "valid_loss" in record.metrics:
            shown.keep(line(record, steps))
        else:
            shown.show(line(record, steps))

    yield show
    shown.end()


def line(record: Record, steps: int) -> str:
    """Format a record as one line of text.

    >>> line(Record(10, {"loss": 2.5, "learning_rate": 3e-4, "step_time": 0.2, "tokens_per_second": 40_960.0}), 300)
    'step  10/300  loss 2.5000  lr 3.00e-04  40,960 tokens/s  200 ms/step  ETA 0:00:58'
    """
    left = round((steps - record.step) * record.metrics.get("step_time", 0))
    more = [f"ETA {timedelta(seconds=left)}"] if left else []
    more += [f"validation loss {record.metrics['valid_loss']:.4f}"] if "valid_loss" in record.metrics else []
    return "  ".join([f"step {record.step:>{len(str(steps))}}/{steps}", *cells(record), *more])


def cells(record: Record) -> list[str]:
    """Returns the measurements of a record in words, without those that it lacks."""
    texts = {
        "loss": lambda value: f"loss {value:.4f}",
        "grad_norm": lambda value: f"norm {value:.2f}",
        "learning_rate": lambda value: f"lr {value:.2e}",
        "experts/busiest": lambda value: f"busiest expert {value:.2f}x",
        "experts/dropped": lambda value: f"dropped {value:.1%}" if value else "",
        "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
        "examples_per_second": lambda value: f"{value:,.0f} examples/s",
        "step_time": lambda value: f"{1000 * value:,.0f} ms/step",
        "mfu": lambda value: f"MFU {value:.1%}",
        "compile_time": lambda value: f"compiled in {value:.1f} s",
    }
    return [said for name, text in texts.items() if name in record.metrics and (said := text(record.metrics[name]))]


# --------------------------------------------------------------------------------------------------
# Where records go: a file of JSON lines, and a table, TensorBoard or Weights & Biases if wanted.
# --------------------------------------------------------------------------------------------------


class JsonLines:
    """Writes JSON lines: `{"step": 10, "loss": 2.5, ...}`; a number that is not finite is null.

    A line has left this process when `write` returns.

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
        """Append a record completely, or not at all."""
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
    """Writes event files for TensorBoard.

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
    """Writes a table with a column for every metric; a new metric adds a column.

    Args:
      path: the file, written anew.
      records: its first rows: all records of `metrics.jsonl`, also those made before there was a table.
    """

    def __init__(self, path: Path, records: Sequence[Record] = ()):
        self._path, self._torn = path, False
        self._rows: list[dict[str, Any]] = [{"step": record.step, **record.metrics} for record in records]
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
        """Do nothing: everything is already written."""

    def _write_all(self) -> None:
        new = self._path.with_name(self._path.name + ".new")
        with new.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        new.replace(self._path)
        self._torn = False


class Patient:
    """Keeps records that a full, read-only or failing disk does not take, and retries, with one warning.

    Args:
      recorder: writes a record fully, or raises OSError and leaves it out.
    """

    def __init__(self, recorder: "JsonLines | Csv"):
        self._recorder = recorder
        self._kept: list[Record] = []

    def write(self, record: Record) -> None:
        """Take a record, and write everything that is kept."""
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
        """Close the file; warn of records that could never be written."""
        if self._kept:
            logger.warning("%d records could not be written, from step %d on", len(self._kept), self._kept[0].step)
        self._recorder.close()


class Wandb:
    """Logs to a Weights & Biases run with the run's name and configuration; a resumed run continues its own.

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
        # A step of one's own: W&B's counter drops what comes at an earlier one, as after a rollback or a resumed checkpoint.
        self._run.define_metric("*", step_metric="step")
        kept.write_text(self._run.id, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Log every metric at its step."""
        self._run.log({**record.metrics, "step": record.step})

    def close(self) -> None:
        """Finish the run and send what is left."""
        self._run.finish()


def files(config: RunConfig, folder: Path | None, start: int) -> Iterator[JsonLines | Csv | Patient | TensorBoard]:
    """Yield the recorders of files in the run's folder, from a step on; none without a folder."""
    goes_on = config.checkpoint.max_failures > 1  # a run may go on after failures
    waits = Patient if goes_on else lambda recorder: recorder
    if folder is not None:
        yield waits(JsonLines(folder / "metrics.jsonl", start))
    if folder is not None and config.output.tensorboard:
        yield TensorBoard(folder / "tensorboard", start)
    if folder is not None and config.output.csv:
        kept = read_records(folder / "metrics.jsonl")
        yield waits(Csv(folder / "metrics.csv", kept))


def services(
    config: RunConfig, folder: Path | None, reason: Callable[[], str]
) -> Iterator[AbstractContextManager[Wandb | MlflowRun]]:
    """Yield the recorders of external services, each ended once with the training; a rollback does not end it.

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
    """Read the records that `JsonLines` wrote; a truncated last line is left out, and null is nan.

    Raises:
      ValueError: for a line that is no record, with its number, or for a path that is no file.
    """
    if kind := not_a_file(path):
        raise ConfigError(f"{path} is {kind}, and records are kept in a file: remove it")
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            row |= {name: math.nan for name, value in row.items() if value is None and name != "step"}
            if not all(isinstance(value, int | float) for value in (row["step"], *row.values())):
                raise TypeError("a value is no number")
            found.append(Record(row.pop("step"), row))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no record: {line[:60]!r}") from error
    return found


def wandb_module() -> Any:
    """Import the package; refuse if it is missing or not logged in.

    Raises:
      ConfigError: when it is not installed, or when nobody is logged in and `WANDB_MODE` is not offline.
    """
    wandb = _imported("wandb", "output.wandb", "wandb")
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not offline and wandb.api.api_key is None:
        raise ConfigError("output.wandb: nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
    return wandb


def _line(record: Record) -> str:
    return json.dumps(json_values({"step": record.step, **record.metrics})) + "\n"


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for JSON, which cannot hold nan and inf: they become None.

    >>> json_values({"step": 3, "loss": float("nan")})
    {'step': 3, 'loss': None}
    """
    return {
        name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in values.items()
    }


def tensorboard_writer() -> Any:
    """Import the class that writes event files.

    Raises:
      ConfigError: where it is not installed, saying what to do.
    """
    return _imported("tensorboardX", "output.tensorboard", "'axonml-jax[tensorboard]'").SummaryWriter


# --------------------------------------------------------------------------------------------------
# What a run prints of its data before it begins, and of its result at the end.
# --------------------------------------------------------------------------------------------------


def about(config: RunConfig, data: TextData) -> str:
    """Describe the data that is trained and validated on."""
    if data.unit == "sample":
        trained, valid = (f"{size:,} samples" if size else "unknown" for size in data.sizes)
        seen = "nothing" if data.valid is None else valid
        used = f", of which {data.valid_used:,} are used" if data.valid_used not in (None, data.sizes[1]) else ""
        return f"{'data':<10} {config.data.class_path}: {trained} to train on, {seen} to validate on{used}"
    assert data.valid_targets is not None
    source = config.data.path or ", ".join(config.data.mixture or ()) or "the standard library of this Python"
    trained, valid = data.sizes
    epochs = config.train.steps / len(data.train)
    return (
        f"{'data':<10} {source}: {trained:,} {data.unit}s to train on ({epochs:.2g} epochs), {valid:,} to validate on, "
        f"of which {sum(data.valid_targets):,} are used"
    )


def report(config: RunConfig, data: TextData, records: list[Record], folder: Path | None) -> None:
    """Print the last validation loss beside the bigram model's, and where the files are."""
    last = next((record for record in reversed(records) if "valid_loss" in record.metrics), None)
    if last is not None:
        loss = last.metrics["valid_loss"]
        over = f", over {sum(data.valid_targets):,} {data.unit}s" if data.valid_targets else ""
        print0(f"\nvalidation loss {loss:.4f}{data.loss_unit} after step {last.step}{over}")
        if data.bigram is not None:
            below = f"{abs(data.bigram - loss):.4f} {'below' if loss < data.bigram else 'above'}"
            print0(f"bigram model    {data.bigram:.4f} on the same bytes: the transformer is {below} it")
    if folder is None or not records:
        return
    files = "metrics.jsonl, config.yaml"
    if config.output.plot:
        unit = f"loss ({data.loss_unit[1:]})" if data.loss_unit else "loss"
        note = plot_losses(records, folder / "loss.png", title=config.name, unit=unit, baseline=data.bigram)
        files += ", loss.png" if note is None else f" ({note})"
        if config.experts.num_experts:
            note = plot_expert_loads(records, folder / "experts.png", title=f"{config.name}: load of each expert")
            files += ", experts.png" if note is None else f" ({note})"
    files += ", checkpoints" * any((folder / CHECKPOINT_FOLDER).glob("step_*"))
    files += ", metrics.csv" * config.output.csv + ", wandb" * (config.output.wandb is not None)
    files += ", mlflow.id" * (config.output.mlflow is not None)
    files += ", tensorboard" * config.output.tensorboard + ", trace" * (folder / "trace").exists()
    print0(folded(f"files           {folder}: {files}"))


def print_samples(config: RunConfig, data: TextData, model: ParallelModel) -> None:
    """Print texts that the transformer writes, if it was trained on text; every process must call this."""
    if not config.sample.count or config.own:
        return
    words = config.sample.prompt or data.opening
    whose = "of the validation text; --sample.prompt takes yours" if config.sample.prompt is None else "sample.prompt"
    section, read = replace(config.sample, prompt=words), config.data
    texts = write_samples(model, section, read.length, config.train.seed, read.tokenizer, read.end)
    print0(folded(f"\nthe model goes on from {words[:40]!r} ({whose})"))
    for number, text in enumerate(texts, start=1):
        print0(f"\n--- sample {number} " + "-" * 60)
        print0(text)
