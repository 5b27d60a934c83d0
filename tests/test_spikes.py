"""A batch that spoils the run: it goes back, past that batch, and on; interrupted anywhere it ends bit for bit the same."""

import errno
import os
import re
import signal
import sys

import jax
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from own_parts import Net, spoiled, squares
from test_mlflow import FakeMlflow
from test_train_resume import arrays

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.checkpoint import saving
from axonml_jax.cli.records import read_records
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.data.sampler import epoch_order
from axonml_jax.facade.trainer import Trainer

SAMPLES, ROWS, STEPS = 128, 8, 12
ORDER = epoch_order(SAMPLES, shuffle=True, seed=0, epoch=0).tolist()
BAD, WORSE = ORDER[7 * ROWS + 2], ORDER[10 * ROWS]  # in the batches 8 and 11
SPIKES = {"factor": 10.0, "window": 4, "skip": 1, "limit": 2}


@pytest.fixture
def train(tmp_path):
    """Trains, and gives the status and the run's folder."""

    def train(name, *argv, bad=(BAD,), **spikes):
        content = {
            "devices": {"simulated": 8}, "mesh": {"data": 8},
            "model": {"class_path": "own_parts.Net", "init_args": {"width": 8}},
            "loss": {"class_path": "own_parts.squares"},
            "data": {
                "class_path": "own_parts.spoiled", "init_args": {"n": SAMPLES, "bad": [*bad]},
                "valid": {"class_path": "own_parts.columns", "init_args": {"n": 16}},
            },
            "optim": {"class_path": "optax.sgd", "learning_rate": 0.05, "schedule": "constant"},
            "train": {"steps": STEPS, "global_batch_size": ROWS, "log_every": 5}, "checkpoint": {"every": 3},
            "output": {"dir": str(tmp_path / "runs"), "plot": False, "compiled": None}, "spikes": {**SPIKES, **spikes},
        }  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        status = main(["train", str(path), f"--name={name}", "--allow-imports", "own_parts", *argv])
        return status, tmp_path / "runs" / name

    return train


def losses(folder):
    return [
        (r.step, r.metrics["loss"], r.metrics["rollbacks"], r.metrics["skipped_batches"]) for r in read_records(folder)
    ]


def by_hand(batches_of_steps):
    """The losses of one device that makes its steps from these batches."""
    loader = ax.create_dataloader(
        spoiled(SAMPLES, [BAD]), ROWS, ax.make_mesh(devices=jax.devices()[:1], data=1), seed=0
    )
    batches = [batch for batch, _ in zip(loader, range(16), strict=False)]
    graph, params = nnx.split(Net(8, rngs=nnx.Rngs(0)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05))
    state, found = tx.init(params), []
    loss = jax.jit(jax.value_and_grad(lambda params, batch: squares(nnx.merge(graph, params), batch)))
    for number in batches_of_steps:
        value, grads = loss(params, batches[number - 1])
        change, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, change)
        found.append(float(value))
    return found


def interrupted(monkeypatch, call, how):
    """From now on one call of `Trainer.step` fails, or has SIGTERM come."""
    real, calls = Trainer.step, []

    def step(self, batch):
        calls.append(None)
        if len(calls) == call and how == "error":
            raise RuntimeError("interrupted")
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch)

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.slow
def test_a_run_goes_back_and_past_the_spike_and_ends_the_same_wherever_it_is_interrupted(train, monkeypatch, capsys):
    status, whole = train("whole")
    said = capsys.readouterr().out
    assert status == 0
    # Batch 8 makes the spike; 7 had been trained on after the checkpoint of step 6, and one more is left out.
    assert re.search(
        r"the loss of step 8 was \S+e\+\d+, the median before it \S+: back to step 6, and on with other data: 3 batches are "
        r"left out \(rollback 1 of 2\)",
        said,
    ), said
    records = losses(whole / "metrics.jsonl")
    assert [step for step, *_ in records] == [1, 5, 10, 12]
    assert [counts for _, _, *counts in records] == [[0, 0], [0, 0], [1, 3], [1, 3]]
    wanted = by_hand([1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15])
    np.testing.assert_allclose([loss for _, loss, *_ in records], [wanted[step - 1] for step, *_ in records], rtol=1e-5)
    cases = {  # calls of Trainer.step: 1 to 9 until the spike is found, then 7 to 12 again
        "after the rollback": (11, "error"),
        "stopped after the spike": (8, "stop"),
        "stopped between a checkpoint and the spike": (7, "stop"),
    }
    for name, (call, how) in cases.items():
        name = name.replace(" ", "-")
        with monkeypatch.context() as patched:
            interrupted(patched, call, how)
            if how == "error":
                with pytest.raises(RuntimeError, match="interrupted"):
                    train(name)
            else:
                assert train(name)[0] == 143
        if name == "stopped-after-the-spike":
            assert "stopped by SIGTERM after step 8; not saved, as the loss of step 8 was" in capsys.readouterr().out
        status, folder = train(name, "--resume=auto")
        assert status == 0 and losses(folder / "metrics.jsonl") == records, name
        assert arrays(folder, STEPS) == arrays(whole, STEPS), name


def test_a_save_that_was_passed_over_does_not_keep_a_run_from_going_back(train, monkeypatch, capsys):
    real = saving._make_empty

    def full_at_step_6(folder):
        if "step_00000006" in folder.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(folder)

    monkeypatch.setattr(saving, "_make_empty", full_at_step_6)
    assert train("full", "--checkpoint.max_failures=3", "--train.steps=8")[0] == 0
    assert "back to step 3" in capsys.readouterr().out


def test_a_run_that_goes_back_too_often_stops_and_mlflow_hears_of_its_end_alone(train, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", mlflow := FakeMlflow())
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    status, folder = train("twice", "--output.mlflow=mine", bad=(BAD, WORSE), skip=0, limit=1)
    assert status == 3
    assert [call for call in mlflow.calls if call[0] in ("create", "update", "end")] == [
        ("create", "7", "twice"),
        ("end", "abc", "FAILED"),
    ]
    assert re.search(
        r"stopped: the loss of step 9 was .* has gone back 1 times \(spikes\.limit\)", capsys.readouterr().out
    )
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*"))[-1] == "step_00000006"


def test_what_cannot_work_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump({"model": {"class_path": "own_parts.Net"}, "data": {"class_path": "own_parts.columns"}})
    )
    for flags, said in (
        (("--spikes.factor=1",), "spikes.factor=1.0: must be above 1"),
        (("--spikes.window=9",), "spikes.window, skip and limit have no effect while spikes.factor is null"),
        (("--spikes.factor=3", "--spikes.window=1"), "spikes.window=1: must be at least 2"),
        (("--spikes.factor=3", "--checkpoint.every=null"), "but checkpoint.every=null saves none"),
        (("--spikes.factor=3", "--checkpoint.keep=1"), "keep 2 or more"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_config("train", [str(path), *flags], imports=["own_parts"])
