"""The loop and what it leaves behind: records, speeds, pictures, lines, traces."""

import io
import itertools
import json
import math
import re
import sys
import time
import types
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from axonml_jax import base
from axonml_jax.cli import records as trace
from axonml_jax.cli.loop import Record, fit
from axonml_jax.cli.records import (
    Csv,
    JsonLines,
    TensorBoard,
    Wandb,
    files,
    line,
    peak_flops,
    plot_losses,
    progress,
    read_records,
    report,
)
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.config.objects import learning_rate, make_optimizer
from axonml_jax.config.sections import OptimConfig
from axonml_jax.training.callbacks import Throughput

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
SPEED = Throughput(tokens_per_step=100, flops_per_token=10.0, num_devices=1, peak_flops=1e6)


class CountingTrainer:
    """Steps take a while, and its loss is the number of steps made."""

    def __init__(self):
        self.steps = 0

    def step(self, batch):
        self.steps += 1
        time.sleep(0.002)
        return {"loss": np.float32(self.steps), "grad_norm": np.array([1.0, 3.0])}


def records_of(trainer=None, **options):
    return list(fit(trainer or CountingTrainer(), repeat(None), throughput=SPEED, **options))


def test_records_come_after_the_first_the_logged_the_validated_and_the_last_step():
    records = records_of(steps=11, log_every=4, validate=lambda: {"loss": 0.5}, validate_every=5)
    assert [record.step for record in records] == [1, 4, 5, 8, 10, 11]
    assert [record.step for record in records if "valid_loss" in record.metrics] == [5, 10, 11]
    assert [record.metrics["loss"] for record in records] == [1, 4, 5, 8, 10, 11]


def test_without_an_interval_only_the_last_step_is_validated():
    records = records_of(steps=4, log_every=1, validate=lambda: {"loss": 0.5})
    assert ["valid_loss" in record.metrics for record in records] == [False, False, False, True]


def test_the_first_step_gives_the_compile_time_and_no_speed():
    first, second = records_of(steps=2, log_every=1)
    assert "compile_time" in first.metrics and "step_time" not in first.metrics
    assert second.metrics["tokens_per_second"] == pytest.approx(100 / second.metrics["step_time"])


def test_records_have_the_learning_rate_the_tokens_seen_and_the_time():
    rates = {"learning_rate": lambda count: np.float32(0.5) ** count}
    records = records_of(steps=4, log_every=2, start=1, elapsed=60.0, **rates)
    assert [record.metrics["learning_rate"] for record in records] == [0.5, 0.125]
    assert [record.metrics["tokens"] for record in records] == [200, 400]
    first, last = (record.metrics["wall_time"] for record in records)
    assert 60 < first < last < 90
    assert "learning_rate" not in records_of(steps=1)[0].metrics


def test_skipped_steps_leave_the_learning_rate_where_it_was():
    class Skipping(CountingTrainer):
        def step(self, batch):
            return {**super().step(batch), "skipped": np.int32(min(self.steps, 2))}

    records = records_of(Skipping(), steps=5, log_every=1, learning_rate=float)
    assert [record.metrics["learning_rate"] for record in records] == [0, 0, 0, 1, 2]


def test_values_that_differ_between_ranks_are_averaged():
    assert records_of(steps=1)[0].metrics["grad_norm"] == 2.0


@pytest.mark.slow
def test_the_time_of_validating_of_the_caller_and_of_saving_counts_in_no_speed():
    def slow(*_):
        time.sleep(0.5)
        return {"loss": 0.0}

    after = lambda *_: not slow()
    options = {"validate": slow, "validate_every": 2, "log_every": 2, "after": after}
    for record in fit(CountingTrainer(), repeat(None), steps=6, throughput=SPEED, **options):
        time.sleep(0.2)
        assert record.metrics.get("step_time", 0) < 0.1


def test_it_draws_no_batch_more_than_it_uses_and_stops_when_there_is_none():
    batches = iter(range(10))
    list(fit(CountingTrainer(), batches, steps=4, throughput=SPEED))
    assert next(batches) == 4
    assert records_of(CountingTrainer(), steps=3)[-1].step == 3


def test_mfu_is_the_share_of_the_peak_and_absent_where_it_is_unknown():
    assert SPEED.of(num_steps=10, seconds=0.5)["mfu"] == pytest.approx(10.0 * 2000 / 1e6)
    unknown = Throughput(tokens_per_step=1, flops_per_token=1.0, num_devices=1)
    assert "mfu" not in unknown.of(num_steps=1, seconds=1.0)


KINDS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": None,
    "NVIDIA H200": 989e12,
    "cpu": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_known_by_the_kind_of_device(kind):
    assert peak_flops(kind) == KINDS[kind]


def test_json_lines_are_on_disk_at_once_and_read_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    recorder = JsonLines(path)
    records = [Record(1, {"loss": 2.5}), Record(2, {"loss": 2.25, "valid_loss": 3.0})]
    for record in records:
        recorder.write(record)
    assert read_records(path) == records
    recorder.close()


def test_numbers_that_are_not_finite_are_null_in_json_and_read_back_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "grad_norm": Infinity}\n')  # as earlier versions wrote it
    recorder = JsonLines(path, start=1)
    recorder.write(Record(2, {"loss": math.nan, "grad_norm": -math.inf}))
    recorder.close()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert rows == [{"step": step, "loss": None, "grad_norm": None} for step in (1, 2)]
    assert all(math.isnan(value) for record in read_records(path) for value in record.metrics.values())


def test_tensorboard_writes_events_or_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"axonml-jax\[tensorboard\]"):
        TensorBoard(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboardX")
    board = TensorBoard(tmp_path)
    board.write(Record(3, {"loss": 2.5}))
    board.close()
    [events] = tmp_path.iterdir()
    assert b"loss" in events.read_bytes()


def test_a_table_has_a_column_for_every_metric_and_after_a_resumption_the_rows_of_all_records(tmp_path):
    records = [Record(step, {"loss": step / 4} | more) for step, more in ((1, {}), (2, {"valid_loss": 3.0}), (3, {}))]
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for record in records:
        lines.write(record)
    lines.close()
    path = tmp_path / "metrics.csv"  # which the run before has not written, or left with a row cut off
    both = list(files(read_config("train", [QUICKSTART, "--output.csv=true"]), tmp_path, start=2))
    for recorder in both:
        recorder.write(Record(3, {"loss": 9.0, "grad_norm": 1.0}))
        recorder.close()
    assert path.read_text().splitlines() == ["step,loss,valid_loss,grad_norm", "1,0.25,,", "2,0.5,3.0,", "3,9.0,,1.0"]
    assert Csv(path)._rows == [] and path.read_text().split() == ["step"]


class FakeWandb:
    """What Wandb uses of the package, whose own step only goes on."""

    def __init__(self, key=None):
        self.api, self.calls, self.id, self.axes = types.SimpleNamespace(api_key=key), [], "abc", {}
        self.steps = itertools.count()

    def init(self, **settings):
        self.calls.append(settings)
        return self

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, metrics, step=None):
        at = next(self.steps)
        if step is None or step >= at:
            self.calls.append((metrics[self.axes["*"]] if step is None else step, metrics))

    def finish(self):
        self.calls.append("finished")


def test_weights_and_biases_gets_every_record_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    fake = FakeWandb(key="some")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for known in (None, "abc"):
        sink = Wandb(tmp_path, {"train": {"steps": 3}}, "mine")
        sink.write(Record(3, {"loss": 2.5}))
        sink.write(Record(2, {"loss": 2.0}))
        sink.close()
        settings, *rest = fake.calls[-4:]
        assert (settings["project"], settings["name"], settings["id"]) == ("mine", tmp_path.name, known)
        assert settings["resume"] == ("allow" if known else None) and rest == [
            (3, {"loss": 2.5, "step": 3}),
            (2, {"loss": 2.0, "step": 2}),  # the run went back
            "finished",
        ]


def test_weights_and_biases_is_refused_where_it_cannot_log(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ConfigError, match="nobody is logged in; run `wandb login`, or set WANDB_MODE=offline"):
        Wandb(tmp_path, {}, "mine")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Wandb(tmp_path, {}, "mine")


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keeps_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = Wandb(tmp_path, {"train": {"steps": 3}}, "mine")
    sink.write(Record(3, {"loss": 2.5}))
    sink.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_the_picture_is_drawn_or_the_note_says_what_to_install(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    records = [Record(step, {"loss": 3.0 / step, "valid_loss": 2.0}) for step in (1, 2, 3)]
    assert plot_losses(records, tmp_path / "a.png", title="a", baseline=2.4) is None
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "axonml-jax[plots]" in (plot_losses(records, tmp_path / "b.png", title="b") or "")
    assert not (tmp_path / "b.png").exists()


def test_the_loss_curve_counts_in_whole_steps(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plot_losses([Record(step, {"loss": 3.0 / step}) for step in (1, 2, 3)], tmp_path / "a.png", title="a")
    assert all(tick == round(tick) for tick in drawn[0].axes[0].get_xticks())


FULL = Record(
    20,
    {
        "learning_rate": 3e-4,
        "loss": 2.5,
        "grad_norm": 0.7,
        "step_time": 0.2,
        "tokens_per_second": 4e4,
        "mfu": 0.41,
        "valid_loss": 2.0,
    },
)


def test_off_a_terminal_every_record_is_a_plain_line():
    console = Console(file=io.StringIO(), force_terminal=False)
    with progress(300, console) as show:
        show(FULL)
    words = (
        "step  20/300  loss 2.5000  norm 0.70  lr 3.00e-04  40,000 tokens/s  200 ms/step  MFU 41.0%  ETA 0:00:56  "
        "validation loss 2.0000\n"
    )
    assert console.file.getvalue() == words == line(FULL, 300) + "\n"


def test_on_a_terminal_a_bar_moves_and_validations_stay():
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with progress(300, console) as show:
        show(FULL)
    shown = console.file.getvalue()
    assert "\x1b[" in shown and "20/300" in shown and "loss 2.5000" in shown and "validation loss 2.0000" in shown


def test_on_a_narrow_terminal_no_line_of_a_run_wraps():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress(30_000, console) as show:
        show(FULL)
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, shown)) <= 80 and any("20/30000 loss 2.5000  norm 0.70" in each for each in shown)
    assert any("loss 2.5000  validation loss 2.0000" in each for each in shown)


def test_a_narrow_terminal_gets_folded_lines_and_tables_without_spare_columns(monkeypatch):
    row = [["gradients", "float32", "1,000", "4,000"]]
    table = partial(base.aligned, ["label", "dtype", "elements", "bytes"], row, left=2, spare=("elements", "dtype"))
    text = "plan       one=1, two=2, three=3, four=4\n  a note that is longer than that\n\n" + table()
    assert base.folded(text) == text and "elements" in table()
    monkeypatch.setattr(base, "columns_of_terminal", lambda: 28)
    assert table().splitlines()[0].split() == ["label", "dtype", "bytes"] and "(not shown" in table().splitlines()[-1]
    folded = base.folded(text).split("\n\n")
    assert folded[0].splitlines() == [
        "plan       one=1, two=2,",
        "           three=3, four=4",
        "  a note that is longer than",
        "  that",
    ]
    assert folded[1] == text.split("\n\n")[1]


def test_a_trace_covers_a_few_steps_and_ends_even_when_the_loop_does_not(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(trace.jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(trace.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    for number in trace.traced(iter(range(1, 11)), tmp_path, lambda: calls.append("wait")):
        calls.append(number)
    assert calls == [1, 2, "wait", "start", 3, 4, 5, 6, 7, "wait", "stop", 8, 9, 10]
    calls.clear()
    stopped = trace.traced(iter(range(1, 11)), tmp_path, lambda: None)
    assert [next(stopped) for _ in range(4)] == [1, 2, 3, 4]
    stopped.close()
    assert calls == ["start", "stop"]


def test_the_learning_rate_rises_along_a_line_and_falls_to_a_tenth():
    rate = learning_rate(OptimConfig(learning_rate=1.0, warmup_steps=3), steps=103)
    assert [float(rate(step)) for step in (0, 1, 2, 3)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert float(rate(53)) == pytest.approx(0.55) and float(rate(103)) == pytest.approx(0.1)
    constant = learning_rate(OptimConfig(learning_rate=1.0, schedule="constant"), steps=100)
    assert float(constant(0)) == float(constant(99)) == 1.0


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_matrices_decay_and_vectors_do_not(name):
    params = {"matrix": np.ones((2, 2)), "vector": np.ones(2)}
    tx = make_optimizer(OptimConfig(name=name, learning_rate=1.0, weight_decay=0.5, schedule="constant"), steps=10)
    updates, _ = tx.update({key: np.zeros_like(value) for key, value in params.items()}, tx.init(params), params)
    assert np.allclose(updates["matrix"], -0.5) and np.allclose(updates["vector"], 0)


@pytest.mark.parametrize("saved", [False, True])
def test_checkpoints_are_among_the_files_that_a_run_names_when_there_are_some(saved, tmp_path, capsys):
    (tmp_path / "checkpoints" / ("step_00000002" if saved else "")).mkdir(parents=True)
    (tmp_path / "checkpoints" / "owner.json").write_text("{}")
    config = read_config("train", [QUICKSTART, "--output.plot=false"])
    report(config, types.SimpleNamespace(), [Record(2, {"loss": 1.0})], tmp_path)
    assert ("checkpoints" in capsys.readouterr().out.replace("\n", " ").split(":")[-1]) == saved
