"""Callbacks: what they are told, when, and what an error of theirs does; from Python and from a configuration."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from own_parts import Misspelt, Net, Notes, columns, squares

import axonml_jax as ax
from axonml_jax import ray as axr
from axonml_jax.__main__ import main
from axonml_jax.training.callbacks import TrainingEvent


@pytest.fixture
def heard():
    Notes.heard.clear()
    return Notes.heard


def model(**degrees):
    return ax.parallelize(Net(8, rngs=nnx.Rngs(0)), ax.make_mesh(**degrees), ax.Plan())


BATCH = {name: jnp.asarray(array) for name, array in columns(16).items()}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_they_hear_of_steps_validations_saves_and_then_the_end(heard, tmp_path, asynchronous):
    trainer = model(data=2, fsdp=4).trainer(optax.sgd(0.01), squares, callbacks=[Notes()])
    options = {"every": 2, "asynchronous": asynchronous}
    with ax.CheckpointManager(tmp_path / "saved", **options) as manager, trainer:
        losses = []
        for step in (1, 2, 3):
            losses.append(float(trainer.step(BATCH)["loss"]))
            manager.save(step, trainer)
        valid = trainer.validate([BATCH, BATCH])
    steps = [each for each in heard if each[0] == "on_step"]
    assert [each[1] for each in steps] == [1, 2, 3] and [each[2]["loss"] for each in steps] == losses
    [saved] = [each for each in heard if each[0] == "on_save"]
    assert saved[1] == 2 and saved[3] == manager.folder / "step_00000002" and saved[3].is_dir()
    assert [each[:3] for each in heard if each[0] == "on_eval"] == [("on_eval", 3, valid)]
    assert [each[0] for each in heard][-1] == "on_end" and heard[-1][4] == "finished"
    again = model(data=8).trainer(optax.sgd(0.01), squares, callbacks=[Notes()])
    with ax.CheckpointManager(tmp_path / "saved") as manager:
        manager.restore(again)
    again.step(BATCH)
    assert heard[-1][:2] == ("on_step", 3)


def test_ctrl_c_stops_a_training_and_does_not_fail_it(heard):
    trainer = model(data=8).trainer(optax.sgd(0.01), squares, callbacks=[Notes()])
    with pytest.raises(KeyboardInterrupt), trainer:
        raise KeyboardInterrupt
    assert heard[-1][0] == "on_end" and heard[-1][4] == "stopped"


def test_an_error_ends_the_training_after_the_checkpoint_under_way(heard, tmp_path):
    trainer = model(data=8).trainer(optax.sgd(0.01), squares, callbacks=[Notes("on_eval")])
    said = r"callback Notes.on_eval failed after step 1: ValueError: enough \(.*own_parts.py:\d+\)"
    with (
        pytest.raises(ax.CallbackError, match=said) as caught,
        ax.CheckpointManager(tmp_path, every=1) as manager,
        trainer,
    ):
        trainer.step(BATCH)
        manager.save(1, trainer)
        trainer.validate([BATCH])
    assert isinstance(caught.value.__cause__, ValueError) and manager.steps == [1]
    assert [each[0] for each in heard] == ["on_step", "on_eval", "on_save", "on_end"] and heard[-1][4] == "failed"


class Stored:
    """A save that this process finds done, or not yet."""

    def __init__(self, folder, *_, **__):
        self.folder, self.failure, self.ended = folder, None, False

    @property
    def done(self):
        return self.fast or self.ended

    def wait(self):
        self.ended = True


def test_processes_of_other_speeds_hear_of_a_save_at_the_same_point(heard, tmp_path, monkeypatch):
    monkeypatch.setattr("axonml_jax.checkpoint.manager.Saving", Stored)
    told = []
    for Stored.fast in (True, False):
        trainer = model(data=8).trainer(optax.sgd(0.01), squares, callbacks=[Notes()])
        manager = ax.CheckpointManager(tmp_path, every=2)
        manager.claim()
        manager._team.size = 2
        heard.clear()
        for step in range(1, 7):
            manager.save(step, trainer)
            manager.check()
            told.append((step, [each[1] for each in heard]))
        trainer.finish()
        told.append(("end", [each[:2] for each in heard][-2:]))
        manager.close()
    half = len(told) // 2
    assert told[:half] == told[half:]
    assert told[3] == (4, [2]) and told[half - 1] == ("end", [("on_save", 6), ("on_end", 0)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (print, r"callbacks\[0\] is a builtin_function_or_method: derive it from ax.Callback"),
        (Notes, r"callbacks\[0\] is the class Notes: give an object of it"),
        (Misspelt(), r"callbacks\[0\]: Misspelt.on_evaluation is never called; did you mean on_eval\?"),
    ],
)
def test_what_is_none_is_refused(given, said):
    with pytest.raises(TypeError, match=said):
        model(data=8).trainer(optax.sgd(0.01), squares, callbacks=[given])


def test_a_configuration_names_them(heard, tmp_path, capsys):
    content = {
        "devices": {"simulated": 8}, "mesh": {"data": 8}, "loss": {"class_path": "own_parts.squares"},
        "model": {"class_path": "own_parts.Net", "init_args": {"width": 8}}, "data": {"class_path": "own_parts.columns"},
        "train": {"steps": 4, "global_batch_size": 16, "eval_every": 2, "eval_batches": 1},
        "checkpoint": {"every": 2}, "output": {"dir": str(tmp_path / "runs"), "plot": False},
        "callbacks": [{"class_path": "own_parts.Notes"}],
    }  # fmt: skip
    content["data"]["valid"] = {"class_path": "own_parts.columns"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    flags = ("--allow-imports", "own_parts")
    assert main(["train", str(path), *flags]) == 0, capsys.readouterr().err
    found = [each[:2] for each in heard]
    assert [each for each in found if each[0] == "on_step"] == [("on_step", step) for step in (1, 2, 3, 4)]
    assert [each for each in found if each[0] == "on_eval"] == [("on_eval", 2), ("on_eval", 4)]
    assert [each for each in found if each[0] == "on_save"] == [("on_save", 2), ("on_save", 4)]
    assert found[-1] == ("on_end", 4) and heard[-1][4] == "finished"
    last = json.loads((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    np.testing.assert_allclose([each[2] for each in heard if each[0] == "on_eval"][-1]["loss"], last["valid_loss"])

    path.write_text(
        yaml.safe_dump(content | {"callbacks": [{"class_path": "own_parts.Notes", "init_args": {"fail": "on_step"}}]})
    )
    assert main(["train", str(path), *flags]) == 2
    assert "callback Notes.on_step failed after step 1: ValueError: enough" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(content | {"callbacks": [{"class_path": "own_parts.Misspelt"}]}))
    assert main(["train", str(path), *flags]) == 2
    assert "Misspelt.on_evaluation is never called; did you mean on_eval?" in capsys.readouterr().err


def test_metrics_for_ray_are_read_once_and_of_so_many_steps_alone(monkeypatch):
    """Every 256 steps those of all steps were read again, and without a save all were kept."""
    read = []
    monkeypatch.setattr(
        axr, "as_floats", lambda metrics: read.append(metrics["loss"]) or {"loss": float(metrics["loss"])}
    )
    monkeypatch.setattr(axr, "_MOST_STEPS", 600, raising=False)
    callback = axr.RayReport()
    for step in range(1, 1201):
        callback.on_step(TrainingEvent(trainer=None, step=step, metrics={"loss": step}))
    assert read == list(range(1, len(read) + 1)) and 1200 - 256 <= len(read) < 1200
    assert list(callback._seen) == list(range(601, 1201))
    callback.on_eval(TrainingEvent(trainer=None, step=1200, metrics={"loss": 3.0}))
    assert callback._seen[1200] == {"loss": 1200, "valid_loss": 3.0}
    read.clear()
    callback.on_save(TrainingEvent(trainer=None, step=700, path="gs://saved/step_700"))
    assert read == [700.0] and list(callback._seen) == list(range(701, 1201))
