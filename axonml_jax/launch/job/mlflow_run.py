"""Records in a run of MLflow."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.fit import Record
from axonml_jax.logging import logger

AT_ONCE = {"metrics": 1000, "params": 100}
"""What MLflow takes in one request."""
LONGEST = 500
"""Characters of a parameter's value that every version of MLflow takes."""

_ID = "mlflow.id"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}


class MlflowRun:
    """Logs to the run of MLflow that `begin_mlflow` has begun, and ends it as the training ends. A context.

    What MLflow does not take is told once, in a warning, and the training goes on without it; at its end MLflow is asked once
    more, so that a run does not stay RUNNING there for ever.

    Args:
      folder: the run's, in which its id is kept.
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
        """Log every metric at its step, until MLflow fails once: it has tried for minutes by then, and would every time."""
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
    """Look whether MLflow answers, and knows the run to go on with. Nothing is written.

    Args:
      experiment: where the run is listed.
      folder: of the run to go on with; None for a new one.

    Raises:
      ConfigError: where it does not.
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
    """Begin a run of MLflow, of this run's name, with its configuration as parameters; a resumed run goes on with its own.

    Args:
      experiment: where the run is listed; made when there is none of this name. The server, or the place on this machine, is
        that of `MLFLOW_TRACKING_URI`.
      folder: the run's, in which its id is kept.
      settings: the configuration.

    Raises:
      ConfigError: where MLflow does not do it.
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
        _log(client, made, "params", [mlflow.entities.Param(*pair) for pair in _flat(settings)])
    except mlflow.MlflowException as error:
        raise _refused(experiment, folder, error) from error


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


def _kept(folder: Path) -> str:
    """The id of a folder's run of MLflow; empty where it has none."""
    return (folder / _ID).read_text("utf-8").strip() if (folder / _ID).exists() else ""


def _refused(experiment: str, folder: Path | None, error: Exception) -> ConfigError:
    known = f", whose run {id_} is kept in {folder / _ID}" if folder and (id_ := _kept(folder)) else ""
    return ConfigError(
        f"output.mlflow={experiment}{known}: MLflow fails: {_said(error)}. Look at MLFLOW_TRACKING_URI"
        + (", delete that file to begin another run," if known else "")
        + " or leave output.mlflow off"
    )


def _said(error: Exception) -> str:
    """What MLflow says, without the name and password that an address may hold.

    >>> _said(ValueError("no answer from http://me:hush@host:5000/api"))
    'no answer from http://***@host:5000/api'
    """
    return re.sub(r"://[^/\s@]+@", "://***@", str(error))


def _log(client: Any, run: str, kind: str, values: list[Any]) -> None:
    for start in range(0, len(values), AT_ONCE[kind]):
        client.log_batch(run, **{kind: values[start : start + AT_ONCE[kind]]})


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
