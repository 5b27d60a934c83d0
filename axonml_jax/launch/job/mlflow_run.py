"""Records in a run of MLflow."""

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.fit import Record

AT_ONCE = {"metrics": 1000, "params": 100}
"""What MLflow takes in one request."""
LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""


class MlflowRun:
    """A run of MLflow, of this run's name, with its configuration as parameters; a resumed run goes on with it.

    Args:
      folder: the run's, in which its id is kept.
      settings: the configuration.
      experiment: where the run is listed; made when there is none of this name. The server, or the place on this machine, is
        that of `MLFLOW_TRACKING_URI`.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], experiment: str):
        self._mlflow = mlflow_module()
        self._client = self._mlflow.MlflowClient()
        kept = folder / "mlflow.id"
        if kept.exists():
            self._id = kept.read_text("utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(number, run_name=folder.name).info.run_id
        kept.write_text(self._id, encoding="utf-8")
        self._log("params", [self._mlflow.entities.Param(*pair) for pair in _flat(settings)])

    def write(self, record: Record) -> None:
        """Log every metric at its step."""
        now, metric = round(1000 * time.time()), self._mlflow.entities.Metric
        self._log("metrics", [metric(_name(name), value, now, record.step) for name, value in record.metrics.items()])

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._id)

    def _log(self, kind: str, values: list[Any]) -> None:
        for start in range(0, len(values), AT_ONCE[kind]):
            self._client.log_batch(self._id, **{kind: values[start : start + AT_ONCE[kind]]})


def mlflow_module() -> Any:
    """The package.

    Raises:
      ConfigError: where it is not installed, saying what to do.
    """
    try:
        import mlflow  # pyright: ignore[reportMissingImports]
        import mlflow.entities  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "output.mlflow: mlflow is not installed; pip install 'axonml-jax[mlflow]', or leave it off"
        ) from error
    return mlflow


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values in words.

    >>> list(_flat({"train": {"steps": 3, "seed": None}, "name": "a"}))
    [('train.steps', '3'), ('train.seed', 'None'), ('name', 'a')]
    """
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield _name(f"{before}{key}"), str(value)[:LONGEST]


def _name(name: str) -> str:
    """A name that MLflow takes.

    >>> _name("grad_norm/blocks/0"), _name("top@5")
    ('grad_norm/blocks/0', 'top_5')
    """
    return re.sub(r"[^\w\-. /]", "_", name)
