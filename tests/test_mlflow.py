"""Records in MLflow: against the part of its interface that is used, and against the package where it is installed."""

import contextlib
import sys
import types
from pathlib import Path

import pytest

from axonml_jax.__main__ import main
from axonml_jax.base import logger
from axonml_jax.cli.loop import Record
from axonml_jax.cli.records import MlflowRun, begin_mlflow, check_mlflow, mlflow_module
from axonml_jax.config.config import ConfigError

SETTINGS = {"name": "run", "train": {"steps": 3}, "optim": {"groups": [{"paths": ["a"] * 300}]}}


def begun(folder, settings=SETTINGS, reason="finished"):
    begin_mlflow("mine", folder, settings)
    return MlflowRun(folder, lambda: reason)


class FakeMlflow:
    """What is used of the package; it is its own client."""

    class MlflowException(Exception):
        pass

    def __init__(self):
        self.down = False
        self.calls, self.experiments = [], {}
        pair = lambda *values: values
        self.entities = types.SimpleNamespace(Param=pair, Metric=pair)

    def MlflowClient(self):
        return self

    def get_run(self, run):
        raise self.MlflowException(f"Run {run} not found")

    def get_experiment_by_name(self, name):
        if self.down:
            raise self.MlflowException("no answer")
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
        if self.down:
            self.calls.append("refused")
            raise self.MlflowException("no answer")
        self.calls.append((run, {kind: list(each) for kind, each in values.items()}))

    def set_terminated(self, run, status):
        if self.down:
            raise self.MlflowException("no answer")
        self.calls.append(("end", run, status))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", fake := FakeMlflow())
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    return fake


def test_it_gets_the_configuration_and_every_record(fake, tmp_path):
    with begun(tmp_path) as sink:
        sink.write(Record(3, {"loss": 2.5, "top@5": 0.5}))
    created, (_, given), (_, logged), ended = fake.calls
    assert created == ("create", "7", tmp_path.name) and ended == ("end", "abc", "FINISHED")
    params = dict(given["params"])
    assert params["name"] == "run" and params["train.steps"] == "3" and len(params["optim.groups"]) == 500
    assert [(name, value, step) for name, value, _, step in logged["metrics"]] == [("loss", 2.5, 3), ("top_5", 0.5, 3)]


def test_a_resumed_run_goes_on_and_another_takes_the_same_experiment(fake, tmp_path):
    with begun(tmp_path):
        pass
    begun(tmp_path, SETTINGS | {"name": "other"})
    assert fake.calls[-1] == ("update", "abc", "RUNNING")
    (tmp_path / "next").mkdir()
    begun(tmp_path / "next")
    assert [call for call in fake.calls if call[0] == "create"][1] == ("create", "7", "next")


def test_many_values_go_in_as_many_requests_as_it_takes(fake, tmp_path):
    sink = begun(tmp_path, {f"key{n}": n for n in range(250)})
    sink.write(Record(1, {f"grad_norm/{n}": 0.0 for n in range(1001)}))
    sizes = [len(each) for _, values in fake.calls[1:] for each in values.values()]
    assert sizes == [100, 100, 50, 1000, 1]


def test_a_run_ends_there_as_it_ends_here(fake, tmp_path):
    for reason, raised, status in (
        ("stopped", None, "KILLED"),
        ("diverged", None, "FAILED"),
        ("finished", KeyboardInterrupt, "KILLED"),
        ("finished", RuntimeError, "FAILED"),
    ):
        with contextlib.suppress(KeyboardInterrupt, RuntimeError), begun(tmp_path, reason=reason):
            if raised is not None:
                raise raised
        assert fake.calls[-1] == ("end", "abc", status)


def test_a_server_that_is_gone_ends_no_training_and_is_told_once(fake, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with begun(tmp_path) as sink:
        fake.down = True
        for step in range(3):
            sink.write(Record(step, {"loss": 1.0}))
    assert fake.calls.count("refused") == 1 and fake.calls[-1] == "refused"
    said, at_the_end = caplog.messages
    assert "no answer" in said and "all records are in metrics.jsonl" in said
    assert "run abc, which stays RUNNING there though it is FINISHED: no answer" in at_the_end
    assert "set_terminated('abc', status='FINISHED')" in at_the_end


def test_a_server_that_is_back_at_the_end_is_told_how_the_run_ended(fake, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with begun(tmp_path, reason="diverged") as sink:
        fake.down = True
        sink.write(Record(1, {"loss": 1.0}))
        fake.down = False
        sink.write(Record(2, {"loss": 1.0}))
    assert fake.calls[-2:] == ["refused", ("end", "abc", "FAILED")] and len(caplog.messages) == 1


def test_a_server_that_does_not_answer_is_refused_before_anything_is_trained(fake, tmp_path):
    fake.down = True
    for start in (lambda: check_mlflow("mine", None), lambda: begin_mlflow("mine", tmp_path, SETTINGS)):
        with pytest.raises(
            ConfigError, match=r"output.mlflow=mine: MLflow fails: no answer. Look at MLFLOW_TRACKING_URI"
        ):
            start()
    (tmp_path / "mlflow.id").write_text("gone")
    with pytest.raises(
        ConfigError, match=r"run gone is kept in .*Run gone not found.*delete that file to begin another"
    ):
        check_mlflow("mine", tmp_path)


def test_a_command_refuses_it_before_there_is_a_folder(fake, tmp_path, capsys):
    fake.down = True
    (tmp_path / "text.txt").write_text("abc " * 5000)
    given = {"data.path": tmp_path / "text.txt", "output.dir": tmp_path / "runs", "output.mlflow": "mine"}
    quickstart = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    assert main(["train", str(quickstart), *(f"--{key}={value}" for key, value in given.items())]) == 2
    assert "output.mlflow=mine: MLflow fails: no answer" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*"))


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
        check_mlflow("mine", tmp_path)
        with begun(tmp_path) as sink:
            for step in steps:
                sink.write(Record(step, {"loss": 3.0 / step, "grad_norm/blocks/0": float("nan")}))
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["train.steps"] == "3"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 1.5), (3, 1.0)]
    client.delete_run(run.info.run_id)
    with pytest.raises(ConfigError, match=r"whose run \w+ is kept in .*mlflow\.id: MLflow fails"):
        begun(tmp_path)
