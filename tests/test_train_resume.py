"""`train` stopped by SIGTERM, Ctrl-C or a kill, and resumed, ends as if it had never stopped."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.cli.loop import Preemption, Record, fit
from axonml_jax.cli.records import JsonLines, read_records
from axonml_jax.cli.run import RunFolder, earlier_folder, new_folder
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.launch.leftovers import MARK
from axonml_jax.launch.workers import RESTART_COUNT
from axonml_jax.training.callbacks import Throughput

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=8", "--model.num_heads=1", "--model.mlp_hidden_size=8"),
    *("--model.max_length=8", "--data.length=8", "--data.max_bytes=6_000"),
    *("--data.valid_fraction=0.1", "--train.steps=9", "--train.eval_every=3", "--train.eval_batches=1"),
    *(
        "--train.log_every=2",
        "--sample.count=0",
        "--output.plot=false",
        "--checkpoint.every=3",
        "--checkpoint.keep=null",
    ),
)
SPEED = Throughput(tokens_per_step=100, flops_per_token=10.0, num_devices=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text; runs go beside it."""
    folder = tmp_path_factory.mktemp("resume[1]")  # Orbax globs its folder
    (folder / "text").mkdir()
    for name, words in (("a.txt", "the cat sat on the mat. "), ("b.txt", "the dog sat on the log. ")):
        (folder / "text" / name).write_text(words * 60)
    return folder


def train(place, *argv):
    return main(["train", QUICKSTART, *SMALL, f"--data.path={place / 'text'}", f"--output.dir={place / 'runs'}", *argv])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def losses(folder):
    return [(r.step, r.metrics["loss"], r.metrics.get("valid_loss")) for r in read_records(folder / "metrics.jsonl")]


def arrays(folder, step):
    """The bytes of every array that a checkpoint holds, by name."""
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / f"step_{step:08d}"
    names = json.loads((path / "checkpoint.json").read_text())["entries"]
    with ocp.PyTreeCheckpointer() as plain:
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        found = plain.restore(path / "arrays", args=ocp.args.PyTreeRestore(restore_args=kinds))
    return {name: found[name].tobytes() for name in names}


@pytest.fixture(scope="module")
def uninterrupted(place):
    assert train(place, "--name=whole") == 0
    return place / "runs" / "whole"


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_and_resumed_ends_bit_for_bit_like_an_uninterrupted_one(
    place, uninterrupted, monkeypatch, capsys
):
    write = JsonLines.write

    def write_and_stop(self, record):
        write(self, record)
        if record.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "write", write_and_stop)
        assert train(place, "--name=cut", "--resume=auto") == 143
    assert "stopped by SIGTERM after step 4; saved" in capsys.readouterr().out
    folder = place / "runs" / "cut"
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step_00000003", "step_00000004"]
    # What a killed run leaves: records after its last checkpoint, the last one cut off.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"step": 6, "lo')
    assert train(place, "--name=cut", "--resume=auto", "--train.log_every=2") == 0
    assert "resumed after step 4" in capsys.readouterr().out
    assert losses(folder) == losses(uninterrupted)
    assert [step for step, *_ in losses(folder)] == [1, 2, 3, 4, 6, 8, 9]
    assert arrays(folder, 9) == arrays(uninterrupted, 9)
    # The run's own clock goes on.
    times = {record.step: record.metrics["wall_time"] for record in read_records(folder / "metrics.jsonl")}
    assert list(times.values()) == sorted(times.values())
    assert train(place, f"--resume={folder}") == 0  # it is at its end: nothing happens
    assert losses(folder) == losses(uninterrupted)


@pytest.mark.slow
def test_a_run_that_is_being_written_is_not_resumed(place, uninterrupted, capsys):
    left = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    with ax.CheckpointManager(uninterrupted / "checkpoints") as manager:
        manager.claim()
        left |= {path: path.stat().st_mtime_ns for path in uninterrupted.glob("checkpoints/owner.json")}
        for resume in (uninterrupted, "auto"):
            assert train(place, "--name=whole", f"--resume={resume}", "--train.steps=99") == 2
            out, error = capsys.readouterr()
            assert (
                not out and f"checkpoints is being written by this process itself (process {os.getpid()} on " in error
            )
        left[uninterrupted / "checkpoints"] = (uninterrupted / "checkpoints").stat().st_mtime_ns
        assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == left


@pytest.mark.slow
def test_a_resumed_run_says_what_is_other_and_keeps_every_configuration(place, uninterrupted, capsys):
    folder = place / "runs" / "other-settings"
    shutil.copytree(uninterrupted, folder)
    kept = lambda: {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("config*.yaml")}
    first = kept()["config.yaml"]
    assert train(place, f"--resume={folder}", "--train.steps=5") == 0
    out = capsys.readouterr().out
    assert "train.steps=5 asks for fewer steps than the 9 that are done: nothing is trained" in out
    assert kept() == {"config.yaml": first}
    longer = ("--train.steps=12", "--optim.learning_rate=1e-4", "--mesh.data=4", "--mesh.fsdp=2")
    assert train(place, f"--resume={folder}", *longer, "--checkpoint.every=null") == 0
    out = capsys.readouterr().out
    for line in (
        "mesh: data=8, now data=4 fsdp=2",
        f"optim.learning_rate: {first['optim']['learning_rate']}, now 0.0001",
        "train.steps: 9, now 12",
        "the learning rate falls to its lowest at step 12 now",
    ):
        assert f"\n  {line}\n" in out
    assert "config.until_00000009.yaml" in kept() and kept()["config.until_00000009.yaml"] == first
    assert kept()["config.yaml"]["optim"]["learning_rate"] == 1e-4
    assert [step for step, *_ in losses(folder)][-3:] == [9, 10, 12]
    assert names(folder / "checkpoints") == names(uninterrupted / "checkpoints")  # resumed, though it saves nothing
    shutil.rmtree(folder / "checkpoints" / "step_00000009")
    assert train(place, f"--resume={folder}", "--train.steps=9") == 0  # from step 6: what came after is made again
    assert "other settings" not in capsys.readouterr().out
    assert list(kept()) == ["config.yaml"] and kept()["config.yaml"]["train"]["steps"] == 9


def test_a_run_of_another_model_is_not_resumed(place, uninterrupted, capsys):
    assert train(place, "--name=other", f"--resume={uninterrupted}", "--model.num_layers=2") == 2
    error = capsys.readouterr().err
    assert "resume: " in error and "model/blocks/1/" in error and ": missing float32[" in error


def test_a_run_of_another_text_is_not_resumed(place, uninterrupted, capsys):
    other = place / "other"
    shutil.copytree(place / "text", other)
    text = (other / "b.txt").read_text()
    (other / "b.txt").write_text(text.replace("dog", "fox"))
    assert train(place, "--name=other", f"--resume={uninterrupted}", f"--data.path={other}") == 2
    error = capsys.readouterr().err
    assert "resume: " in error and "other data" in error and "fingerprint: saved " in error


def test_the_first_ctrl_c_asks_and_the_second_ends_the_process():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Preemption() as preemption:
            assert not preemption.stop_after(1)
            signal.raise_signal(signal.SIGINT)
            assert preemption.interrupted and preemption.stop_after(2)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # the kernel's, which waits for no device
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_which_folder_a_run_gets(tmp_path):
    config = lambda *argv: read_config("train", [QUICKSTART, f"--output.dir={tmp_path}", "--name=it", *argv])

    def made(environ):
        with RunFolder(config(), environ) as folder:
            folder.make()
            return folder.path, folder.resumed

    assert earlier_folder(config("--resume=auto"), {}) is None and made({MARK: "first"}) == (tmp_path / "it", False)
    for name in ("it-3", "it-12", "item", "it-x"):
        shutil.copytree(tmp_path / "it", tmp_path / name)
    (tmp_path / "it-3" / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert earlier_folder(config("--resume=auto"), {}) == str(tmp_path / "it-3")
    # A restarted worker goes on with its own launch's run, checkpoint or not.
    assert earlier_folder(config(), {}) is None and made({MARK: "second"}) == (tmp_path / "it-13", False)
    assert made({MARK: "second", RESTART_COUNT: "1"}) == (tmp_path / "it-13", True)
    assert made({MARK: "third", RESTART_COUNT: "1"}) == (tmp_path / "it-14", False)
    with RunFolder(config(), {MARK: "second", RESTART_COUNT: "1"}) as folder:
        assert folder.resumed and folder.begins()  # nothing to go on from: weights are read, or made, anew
    with RunFolder(config("--resume=auto"), {}) as folder:
        assert not folder.begins()
    with pytest.raises(ConfigError, match=r"it-x/checkpoints has no checkpoints; give the folder of a run, or auto"):
        earlier_folder(config(f"--resume={tmp_path / 'it-x'}"), {})


def test_resuming_by_name_leaves_the_run_alone_whose_own_name_ends_in_a_number(tmp_path):
    config = lambda name: read_config(
        "train", [QUICKSTART, f"--output.dir={tmp_path}", f"--name={name}", "--resume=auto"]
    )
    for folder, name, step in (("lr", "lr", 4), ("lr-1", "lr-1", 8), ("lr-2", "lr", 12), ("lr-3", "lr-3", 16)):
        (tmp_path / folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(f"name: {name}\n")
    assert earlier_folder(config("lr"), {}) == str(tmp_path / "lr-2")
    assert earlier_folder(config("lr-3"), {}) == str(tmp_path / "lr-3")
    assert earlier_folder(config("lr-2"), {}) == str(tmp_path / "lr-2")  # who names a folder means it
    shutil.rmtree(tmp_path / "lr")
    shutil.rmtree(tmp_path / "lr-2")
    assert earlier_folder(config("lr"), {}) is None
    assert Path(new_folder(config("lr"))).name == "lr-4"


@pytest.mark.parametrize("name", ["lr[3e-4]", "best?", "all*", "[", "a-[b]-2"])
def test_names_that_mean_something_to_a_shell_are_names(tmp_path, name):
    config = read_config("train", [QUICKSTART, f"--output.dir={tmp_path}", f"--name={name}", "--resume=auto"])
    (tmp_path / "all of them").mkdir()
    made = [Path(new_folder(config)) for _ in range(2)]
    assert [folder.name for folder in made] == [name, f"{name}-2"]
    (made[0] / "checkpoints" / "step_00000004").mkdir(parents=True)
    assert earlier_folder(config, {}) == str(made[0])
    (made[1] / "launch.txt").write_text("this one")
    assert earlier_folder(config, {MARK: "this one", RESTART_COUNT: "1"}) == str(made[1])


class Counting:
    """A trainer whose loss is the number of its steps."""

    def __init__(self, start):
        self.steps = start

    def step(self, batch):
        self.steps += 1
        return {"loss": np.float32(self.steps)}


def test_a_resumed_loop_records_the_steps_it_would_have_recorded():
    options = {"steps": 11, "throughput": SPEED, "log_every": 4}
    seen = []
    after = lambda step, metrics: seen.append((step, metrics.get("loss"))) or step == 6
    first = list(fit(Counting(0), iter(range(11)), after=after, **options))
    second = list(fit(Counting(6), iter(range(6, 11)), start=6, **options))
    assert [record.step for record in first + second] == [1, 4, 8, 11]
    assert seen == [(1, 1), (2, None), (3, None), (4, 4), (5, None), (6, None)]
    assert "step_time" in second[0].metrics and second[0].metrics["loss"] == 8


def test_records_after_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        sink = JsonLines(path, start)
        for step in steps:
            sink.write(Record(step, {"loss": float(start)}))
        sink.close()
    assert [(r.step, r.metrics["loss"]) for r in read_records(path)] == [(1, 0), (2, 0), (3, 2), (4, 2)]


NOTHING, MIRROR = ["--checkpoint.every=null"], "--checkpoint.mirror=s3://bucket/run"


def test_what_a_checkpoint_section_may_not_say():
    for argv, message in (
        (["--checkpoint.every=0"], "checkpoint.every=0: must be at least 1"),
        (["--checkpoint.keep_for=0d"], "checkpoint.keep_for=0.0 must be more than 0 seconds"),
        (["--checkpoint.keep_for=soon"], "checkpoint.keep_for='soon' must be seconds, or a text such as"),
        (["--checkpoint.keep=null", "--checkpoint.keep_for=3600"], "checkpoint.keep=None keeps all, and keep_for adds"),
        (
            ["--checkpoint.keep_every=30", "--checkpoint.every=20"],
            "keep_every=30 is no multiple of checkpoint.every=20",
        ),
        (
            [*NOTHING, "--checkpoint.best=true", "--checkpoint.verify=true", "--checkpoint.max_failures=3", MIRROR],
            "checkpoint.best=True, checkpoint.verify=True, checkpoint.max_failures=3, checkpoint.mirror=s3://bucket/run: no "
            "effect while checkpoint.every=null saves nothing",
        ),
        ([*NOTHING, MIRROR, "--resume=auto", "--checkpoint.verify=true"], "checkpoint.verify=True: no effect while"),
        (
            [*NOTHING, "--checkpoint.keep_every=2", "--checkpoint.keep_for=7d", "--resume=auto"],
            "checkpoint.keep_every=2, checkpoint.keep_for=7d: no effect",
        ),
        (
            ["--checkpoint.best=true", "--checkpoint.every=30"],
            "checkpoint.every=30 is no multiple of train.eval_every=200",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config("train", [QUICKSTART, *argv])
    # A run that is gone on with may be brought back from its copies, though nothing more is saved of it.
    read_config("train", [QUICKSTART, *NOTHING, MIRROR, "--resume=auto", "--checkpoint.keep_every=2"])
