"""The progress bar: one line where a carriage return works, a few elsewhere, and no waiting for devices."""

import io
import sys
import types
from itertools import pairwise

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from own_parts import Net, columns, squares
from rich.console import Console

import axonml_jax as ax
from axonml_jax.cli.loop import Record
from axonml_jax.cli.records import progress
from axonml_jax.training import callbacks as progress_bar
from axonml_jax.training.callbacks import TrainingEvent


class Terminal(io.StringIO):
    def isatty(self):
        return True


Cell = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})


@pytest.fixture
def slow(monkeypatch):
    """Every look at the clock is a second later."""
    seconds = iter(range(1, 10_000))
    monkeypatch.setattr(progress_bar, "time", types.SimpleNamespace(perf_counter=lambda: float(next(seconds))))


class Loss:
    """A metric of a step that the devices are still making."""

    def __init__(self, value, finished):
        self.value, self.finished = value, finished

    def is_ready(self):
        return self.finished

    @property
    def addressable_shards(self):
        return [types.SimpleNamespace(data=self.value)]


def told(bar, *steps, finished=True):
    for step in steps:
        metrics = {"loss": Loss(1 / step, finished)}
        bar.on_step(TrainingEvent(trainer=None, step=step, metrics=metrics))


def seen(text):
    """What stands on the lines of a terminal in the end."""
    return [line.split("\r")[-1].rstrip() for line in text.split("\n")]


@pytest.mark.parametrize("kind", [Terminal, Cell])
def test_it_stays_on_one_line_and_leaves_the_last_state(kind, slow):
    file = kind()
    told(bar := ax.ProgressBar(4, file=file), 1, 2)
    bar.on_eval(TrainingEvent(trainer=None, step=2, metrics={"loss": 0.5}))
    told(bar, 3, 4)
    bar.on_end(TrainingEvent(trainer=None, step=4, reason="finished"))
    above, last, rest = seen(file.getvalue())
    assert above == "step 2: validation loss 0.5000" and rest == ""
    assert last.startswith("#" * 24 + "  4/4  loss 0.2500  ") and "left" not in last


def test_what_is_written_over_leaves_nothing_behind(slow):
    file = Terminal()
    told(ax.ProgressBar(100, file=file), 1, 2, 100)
    states = file.getvalue().strip("\n").split("\r")[1:]
    assert len(states) == 3 and all(len(later) >= len(earlier.rstrip()) for earlier, later in pairwise(states))


def test_a_terminal_shows_what_fits_on_its_line(slow, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for kind, cut in ((Terminal, True), (Cell, False)):
        told(ax.ProgressBar(100, file=(file := kind())), 1, 2)
        widest = max(len(state) for state in file.getvalue().split("\r"))
        assert widest == 39 if cut else widest > 40


def test_steps_after_the_last_wait_for_nothing(slow):
    bar = ax.ProgressBar(2, file=(file := Terminal()))
    told(bar, 1, 2)
    told(bar, 3, 4, 5, finished=False)
    assert file.getvalue().count("\n") == 1 and "5/2  loss 0.5000" in file.getvalue()


def test_it_is_not_written_more_often_than_one_can_see():
    file = Terminal()
    told(ax.ProgressBar(10_000, file=file), *range(1, 1001))
    assert file.getvalue().count("\r") < 50


def test_elsewhere_it_is_ten_lines_or_as_many_as_one_asks_for(slow):
    for options, count in (({}, 10), ({"every": 50}, 2), ({"every": 60}, 2)):
        file = io.StringIO()
        told(ax.ProgressBar(100, file=file, **options), *range(1, 101))
        lines = file.getvalue().splitlines()
        assert len(lines) == count and "\r" not in file.getvalue() and lines[-1].startswith("#" * 24 + "  100/100")


def test_the_loss_is_that_of_the_newest_step_that_is_finished(slow):
    file = io.StringIO()
    bar = ax.ProgressBar(10, file=file)
    told(bar, 1, 2)
    told(bar, 3, 4, finished=False)
    assert [line.split("loss ")[1][:6] for line in file.getvalue().splitlines()] == ["1.0000", *["0.5000"] * 3]
    told(bar, 10, finished=False)  # the last one is waited for
    assert "loss 0.1000" in file.getvalue()


def test_an_end_before_the_end_is_said(slow):
    file = Terminal()
    told(bar := ax.ProgressBar(9, file=file), 1)
    bar.on_end(TrainingEvent(trainer=None, step=1, reason="diverged"))
    assert seen(file.getvalue())[-2:] == ["diverged after step 1", ""]
    with pytest.raises(ValueError, match=r"ProgressBar\(steps=0\): must be at least 1"):
        ax.ProgressBar(0)


def test_a_trainer_tells_it_of_its_steps(monkeypatch):
    monkeypatch.setattr(sys, "stdout", file := Cell())
    model = ax.parallelize(Net(8, rngs=nnx.Rngs(0)), ax.make_mesh(data=8))
    batch = {name: jnp.asarray(array) for name, array in columns(16).items()}
    with model.trainer(optax.sgd(0.01), squares, callbacks=[ax.ProgressBar(3)]) as trainer:
        losses = [float(trainer.step(batch)["loss"]) for _ in range(3)]
    [last, rest] = seen(file.getvalue())
    assert last.startswith("#" * 24 + f"  3/3  loss {losses[-1]:.4f}") and rest == ""


def test_a_run_in_a_notebook_stays_on_one_line_too():
    with progress(300, Console(file=(file := Cell()), force_terminal=False)) as show:
        for step in (10, 20, 30):
            show(Record(step, {"loss": 2.5} | ({"valid_loss": 2.0} if step == 20 else {})))
    first, last, rest = seen(file.getvalue())
    assert "validation loss 2.0000" in first and last == "step  30/300  loss 2.5000" and rest == ""
