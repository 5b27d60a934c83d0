"""`axonml-jax runs`: runs side by side, from what they have written. No device is started."""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.launch.config.plain_yaml import yaml_in
from axonml_jax.launch.config.run_checkpoints import CHECKPOINT_FOLDER
from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.config.stretches import NEWEST
from axonml_jax.launch.job.fit import Record
from axonml_jax.launch.job.plot import plot_runs
from axonml_jax.launch.job.records import read_records
from axonml_jax.ledger.table import aligned

RECORDS = "metrics.jsonl"
_WITHOUT_EFFECT = ("name", "profile", "resume", "output")


@dataclass(frozen=True)
class Found:
    """What a run has written.

    Attributes:
      folder: the run's.
      settings: every key of its configuration.
      records: what it measured.
      checkpoints: steps that it has kept.
    """

    folder: Path
    settings: Mapping[str, Any]
    records: Sequence[Record]
    checkpoints: Sequence[int]

    def last(self, metric: str) -> float | None:
        """The newest value of a metric."""
        return next((each.metrics[metric] for each in reversed(self.records) if metric in each.metrics), None)

    def best(self, metric: str, *, highest: bool = False) -> float | None:
        """Its lowest value, or its highest; of those that are finite."""
        values = [each.metrics[metric] for each in self.records if math.isfinite(each.metrics.get(metric, math.nan))]
        return (max if highest else min)(values, default=None)


def runs(given: argparse.Namespace) -> int:
    """Print a table of runs, sorted by a metric, and what else is asked for.

    Args:
      given: the arguments of `runs_parser`.

    Returns:
      0.

    Raises:
      ConfigError: where there is no run, or none has the metric that shall be drawn.
    """
    found = [run for given_path in given.runs or ["runs"] for run in _below(Path(given_path))]
    best = {id(run): run.best(given.metric, highest=given.highest) for run in found}
    sign = -1 if given.highest else 1
    found.sort(key=lambda run: (best[id(run)] is None, sign * (best[id(run)] or 0.0)))
    different = differences(found)
    if given.json:
        print(json.dumps({"runs": [_plain(run, given) for run in found], "differences": different}, indent=2))
    else:
        print(_table(found, given))
        if given.differences:
            print("", _settings(found, different), sep="\n")
    if given.plot is not None:
        if all(run.last(given.metric) is None for run in found):
            known = sorted({name for run in found for record in run.records for name in record.metrics})
            raise ConfigError(f"--metric {given.metric}: no run has it; there are {', '.join(known)}")
        series = dict(zip(_names(found), (run.records for run in found), strict=True))
        if note := plot_runs(series, given.plot, metric=given.metric):
            raise ConfigError(f"--plot {given.plot}: {note}")
        print(f"\nwritten   {given.plot}")
    return 0


def differences(found: Sequence[Found]) -> dict[str, list[Any]]:
    """Every setting that is not the same in all runs, with its value in each."""
    keys = dict.fromkeys(key for run in found for key in run.settings)
    values = {key: [run.settings.get(key) for run in found] for key in keys if key.split(".")[0] not in _WITHOUT_EFFECT}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def _below(path: Path) -> Iterator[Found]:
    """The run of a folder, or those in it."""
    if (path / NEWEST).is_file():
        yield _read(path)
        return
    inside = sorted(each for each in path.iterdir() if (each / NEWEST).is_file()) if path.is_dir() else []
    if not inside:
        raise ConfigError(f"{path}: no run has written there ({NEWEST} is missing)")
    yield from map(_read, inside)


def _read(folder: Path) -> Found:
    try:
        content = yaml_in(folder / NEWEST)
        records = read_records(folder / RECORDS) if (folder / RECORDS).is_file() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: cannot be read ({' '.join(str(error).split())})") from error
    settings = dict(_flat(content)) if isinstance(content, Mapping) else {}
    return Found(folder, settings, records, list(checkpoints_in(folder / CHECKPOINT_FOLDER)))


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _names(found: Sequence[Found]) -> list[str]:
    """The names of the runs' folders; the whole paths where several are called alike."""
    names = [run.folder.name for run in found]
    return names if len(set(names)) == len(names) else [run.folder.as_posix() for run in found]


def _table(found: Sequence[Found], given: argparse.Namespace) -> str:
    metric = given.metric
    columns = ["run", "steps", "loss", metric, f"best {metric}", "tokens/s", "minutes", "checkpoints"]
    rows = []
    for run in found:
        of = f"{run.records[-1].step if run.records else 0:,} of {run.settings.get('train.steps', 0):,}"
        seconds = run.last("wall_time")
        rows.append([
            run.folder.as_posix(), of, _number(run.last("loss")), _number(run.last(metric)),
            _number(run.best(metric, highest=given.highest)),
            _speed(run), "-" if seconds is None else f"{seconds / 60:.1f}",
            ", ".join(map(str, run.checkpoints[-3:])) or "-",
        ])  # fmt: skip
    return aligned(columns, rows, left=1)


def _speed(run: Found) -> str:
    """Of a run on data of one's own, where nothing is known of tokens, in examples."""
    tokens, examples = run.last("tokens_per_second"), run.last("examples_per_second")
    if tokens is None:
        return "-" if examples is None else f"{examples:,.0f} examples/s"
    return f"{tokens:,.0f}"


def _settings(found: Sequence[Found], different: Mapping[str, list[Any]]) -> str:
    if not different:
        return "the settings of all runs are the same"
    rows = [[key, *("-" if value is None else str(value) for value in values)] for key, values in different.items()]
    return aligned(["setting", *_names(found)], rows, left=1)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _plain(run: Found, given: argparse.Namespace) -> dict[str, Any]:
    """What JSON holds, which knows no values that are not finite."""
    metric = given.metric
    values = {
        "run": run.folder.as_posix(),
        "step": run.records[-1].step if run.records else 0,
        "loss": run.last("loss"),
        metric: run.last(metric),
        f"best_{metric}": run.best(metric, highest=given.highest),
        "checkpoints": list(run.checkpoints),
    }
    return {
        name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in values.items()
    }
