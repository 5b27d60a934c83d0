"""Records in MLflow: against the part of its interface that is used, and against the package where it is installed."""

import sys
import types

import pytest

from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.fit import Record
from axonml_jax.launch.job.mlflow_run import MlflowRun, mlflow_module

SETTINGS = {"name": "run", "train": {"steps": 3}, "optim": {"groups": [{"paths": ["a"] * 300}]}}


class FakeMlflow:
    """What MlflowRun uses of the package; it is its own client."""

    def __init__(self):
        self.calls, self.experiments = [], {}
        pair = lambda *values: values
        self.entities = types.SimpleNamespace(Param=pair, Metric=pair)

    def MlflowClient(self):
        return self

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = types.SimpleNamespace(experiment_id="7")
        return "7"

    def create_run(self, experiment, run_name):
        self.calls.append(("create", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    def update_run(self, run, status):
        self.calls.append(("update", run, status))

    def log_batch(self, run, **values):
        self.calls.append((run, {kind: list(each) for kind, each in values.items()}))

    def set_terminated(self, run):
        self.calls.append(("end", run))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMlflow())
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    return fake


def test_it_gets_the_configuration_and_every_record(fake, tmp_path):
    sink = MlflowRun(tmp_path, SETTINGS, "mine")
    sink.write(Record(3, {"loss": 2.5, "top@5": 0.5}))
    sink.close()
    created, (_, given), (_, logged), ended = fake.calls
    assert created == ("create", "7", tmp_path.name) and ended == ("end", "abc")
    params = dict(given["params"])
    assert params["name"] == "run" and params["train.steps"] == "3" and len(params["optim.groups"]) == 500
    assert [(name, value, step) for name, value, _, step in logged["metrics"]] == [("loss", 2.5, 3), ("top_5", 0.5, 3)]


def test_a_resumed_run_goes_on_and_another_takes_the_same_experiment(fake, tmp_path):
    MlflowRun(tmp_path, SETTINGS, "mine").close()
    MlflowRun(tmp_path, SETTINGS | {"name": "other"}, "mine")
    assert fake.calls[-1] == ("update", "abc", "RUNNING")
    (tmp_path / "next").mkdir()
    MlflowRun(tmp_path / "next", SETTINGS, "mine")
    assert [call for call in fake.calls if call[0] == "create"][1] == ("create", "7", "next")


def test_many_values_go_in_as_many_requests_as_it_takes(fake, tmp_path):
    sink = MlflowRun(tmp_path, {f"key{n}": n for n in range(250)}, "mine")
    sink.write(Record(1, {f"grad_norm/{n}": 0.0 for n in range(1001)}))
    sizes = [len(each) for _, values in fake.calls[1:] for each in values.values()]
    assert sizes == [100, 100, 50, 1000, 1]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        ConfigError, match=r"output.mlflow: mlflow is not installed; pip install 'axonml-jax\[mlflow\]'"
    ):
        mlflow_module()


@pytest.mark.filterwarnings("ignore")
def test_the_package_keeps_a_run_on_this_machine(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    for name, value in {"TRACKING_URI": f"file:{tmp_path}/kept", "ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    for steps in ((1, 2), (3,)):  # the second time goes on
        sink = MlflowRun(tmp_path, SETTINGS, "mine")
        for step in steps:
            sink.write(Record(step, {"loss": 3.0 / step, "grad_norm/blocks/0": float("nan")}))
        sink.close()
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.steps"] == "3"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 1.5), (3, 1.0)]
