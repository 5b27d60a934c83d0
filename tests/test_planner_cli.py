"""`axonml-jax plan` writes what `train` reads; `explain --check` and `train` keep to a budget of memory and traffic."""

import json
import math
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.cli.plan import config_text
from axonml_jax.cli.run import set_up_run
from axonml_jax.config.config import read_config
from axonml_jax.config.sections import memory_size
from axonml_jax.models.config import PRESETS, TransformerConfig, preset
from axonml_jax.planner.hardware import HARDWARE
from axonml_jax.planner.search import candidates, exactly

PLANS = Path(__file__).resolve().parents[1] / "configs" / "plans"
TINY = """
name: tiny
devices: {simulated: 8}
mesh: {data: 2, fsdp: 4}
plan: {remat: full}
model: {vocab_size: 256, num_layers: 2, hidden_size: 32, num_heads: 4, max_length: 32}
data: {length: 32}
train: {global_batch_size: 16}
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, "utf-8")
    return path


@pytest.mark.parametrize(
    "axes", [["data", "fsdp"], ["fsdp", "tensor"], ["pipe", "data"], ["row", "col", "depth"]], ids="-".join
)
def test_a_plan_is_written_as_a_configuration_that_trains_it(axes, tiny, tmp_path, capsys):
    tiny.write_text(TINY.replace("simulated: 8", "simulated: 4"), "utf-8")  # planned for another number of devices
    written, picture = tmp_path / "planned.yaml", tmp_path / "planned.svg"
    flags = ["--hardware", "h100", "--axes", *axes, "--write", str(written), "--json"]
    devices = "2" if "pipe" in axes else "8"
    assert (
        main(["plan", str(tiny), "--devices", devices, *flags, *["--picture", str(picture)][: 2 * (devices == "2")]])
        == 0
    )
    best = json.loads(capsys.readouterr().out)["best"]
    config = read_config("train", [str(written)])
    assert {axis: ranks for axis, ranks in config.mesh.degrees.items() if ranks > 1} == {
        axis: ranks for axis, ranks in best["mesh"].items() if ranks > 1
    }
    assert config.model.split == ("grid" if "row" in axes else "tensor")
    assert config.train.global_batch_size == 16 and config.devices.simulated == int(devices)


def test_every_preset_is_written_so_that_it_is_read_again_as_it_is(tmp_path):
    asked = {"num_devices": 8, "hardware": "v5e", "global_batch": 8, "length": 128, "axes": ("data", "fsdp")}
    answer = ax.plan(preset("gpt2-small"), **asked)
    for name in PRESETS:
        file = tmp_path / f"{name}.yaml"
        file.write_text(config_text(replace(answer, asked=replace(answer.asked, model=preset(name)))), "utf-8")
        assert read_config("train", [str(file)]).model == preset(name), name


def test_outer_steps_are_not_searched_as_if_they_were_none(tmp_path, capsys):
    subject = tmp_path / "outer.yaml"
    subject.write_text(TINY.replace("remat: full", "diloco: {every: 10}"), "utf-8")
    assert main(["plan", str(subject), "--devices", "8"]) == 2
    assert "plan.diloco.every=10: the search prices no outer steps" in capsys.readouterr().err


def test_a_plan_that_splits_sequences_is_written_with_its_method(tmp_path, capsys):
    written, subject = tmp_path / "planned.yaml", tmp_path / "long.yaml"
    subject.write_text(TINY.replace(": 32}", ": 8192}").replace("max_length: 32", "max_length: 8192"), "utf-8")
    flags = ["--axes", "fsdp", "context", "--batch", "1", "--write", str(written), "--json"]
    assert main(["plan", str(subject), "--devices", "4", *flags]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    config = read_config("train", [str(written)])
    assert (
        config.mesh.context == best["mesh"]["context"] == 4 and f"attention by {config.context.method}" in best["plan"]
    )
    assert config.context.shard == ("fsdp*context" in best["plan"])


def test_json_stands_alone_on_standard_output(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("axonml_jax.planner.verify.measure", lambda devices, model: HARDWARE["h100"])
    monkeypatch.setattr("axonml_jax.cli.plan.verify", lambda answer, topology, slices: f"compiled for {topology}")
    outputs = {"--write": tmp_path / "planned.yaml", "--picture": tmp_path / "planned.svg"}
    flags = [*(word for flag, path in outputs.items() for word in (flag, str(path))), "--ledger", "--verify", "cpu"]
    assert main(["plan", str(tiny), "--devices", "8", "--hardware", "measure", "--json", *flags]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["best"]["mesh"]
    for words in ("measured  ", "bytes/rank", "picture   ", "written   ", "compiled for cpu"):
        assert words in said, words


def test_published_models_are_planned_for_longer_sequences(capsys):
    flags = ["--devices", "64", "--batch", "1", "--length", "1048576", "--hardware", "v5e", "--json"]
    assert main(["plan", "llama3-8b", *flags]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["mesh"]["context"] > 1 and "attention by" in best["plan"]
    assert main(["plan", "gpt2-small", *flags]) == 2  # its positions are a table
    assert "longer than the model's 1024" in capsys.readouterr().err


def test_published_models_are_planned_by_name(capsys):
    assert main(["plan", "gpt2-small", "--devices", "8", "--hardware", "a100", "--batch", "64", "--ledger"]) == 0
    out = capsys.readouterr().out
    assert "124,439,808 parameters" in out and "memory per device" in out and "if\n" in out


def test_what_crosses_slices_has_the_price_of_the_network(capsys):
    flags = ["plan", "llama3-8b", "--devices", "64", "--batch", "64", "--length", "1024", "--axes", "data", "fsdp"]
    found = []
    for slices in (1, 16):
        assert main([*flags, "--slices", str(slices)]) == 0
        out = capsys.readouterr().out
        assert ("in 16 slices" in out) == (slices == 16)
        found.append(float(re.search(r"network not hidden ([\d.,]+) ms", out)[1].replace(",", "")))
    assert found[1] > 2 * found[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2-small", "--devices", "8"], "give --batch"),
        (["configs/quickstart.yaml", "--devices", "8", "--batch", "0"], "global_batch=0: each must be at least 1"),
        (["configs/quickstart.yaml", "--devices", "8", "--length", "0"], "length=0: each must be at least 1"),
        (["gpt9", "--devices", "8"], "neither a configuration file nor one of gpt2-small"),
        (["llama3-8b", "--devices", "2", "--batch", "2", "--hardware", "v5e"], "no plan of 8,030,261,248 parameters"),
        (["gpt2-small", "--devices", "2", "--batch", "2", "--hardware", "v9"], "not in the table"),
        (["gpt2-small", "--devices", "8", "--batch", "8", "--hardware", "h100", "--slices", "2"], "TPUs form slices"),
        (["gpt2-small", "--devices", "8", "--batch", "8", "--slices", "3"], "8 devices do not form so many"),
    ],
)
def test_what_cannot_be_planned_exits_with_two(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_read_as_people_write_them():
    assert [memory_size(text) for text in ("16GiB", "80 GB", "1.5MiB")] == [16 * 2**30, 80e9, 1.5 * 2**20]
    with pytest.raises(Exception, match="must be a size such as 16GiB"):
        memory_size("lots")


def test_a_scanned_model_is_described_by_what_a_step_gathers(tiny, capsys):
    """A layer of the stack at a time, as the ledger predicts it: two numbers of one step on one screen must not differ."""
    scanned = ["explain", str(tiny), "--mesh.data", "1", "--mesh.fsdp", "8", "--model.scan_layers=true"]
    assert main([*scanned, "--max-memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("memory "))
    gathered = re.search(r"gathered ([\d.]+)\)", line)[1]
    assert re.search(rf"^gathered +{gathered}$", out, re.MULTILINE), out


@pytest.mark.slow
def test_a_budget_fails_the_check_and_names_what_grew(tiny, tmp_path, capsys):
    baseline = tmp_path / "baseline.json"
    assert main(["explain", str(tiny), "--write-baseline", str(baseline)]) == 0
    assert set(json.loads(baseline.read_text("utf-8"))) == {"memory", "traffic"}
    assert main(["explain", str(tiny), "--check", str(baseline), "--max-memory", "1GiB"]) == 0
    capsys.readouterr()
    assert main(["explain", str(tiny), "--check", str(baseline), "--plan.accumulate", "2", "--max-memory", "1KiB"]) == 4
    out = capsys.readouterr().out
    assert "over budget: memory" in out and "at most 1,024 are allowed" in out and "over budget: traffic" in out
    both = ["--check", str(baseline), "--write-baseline", str(baseline)]
    assert main(["explain", str(tiny), *both, "--plan.accumulate", "2"]) == 4  # checked before it is written anew
    assert main(["explain", str(tiny), "--check", str(baseline), "--plan.accumulate", "2"]) == 0
    assert main(["explain", str(tiny), "--write-baseline", str(baseline)]) == 0
    assert main(["explain", str(tiny), "--check", str(tmp_path / "none.json")]) == 2
    assert "--write-baseline" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "allowed"), [(["--max-memory", "100KiB"], "102,400"), ([], "180,000")])
def test_a_plan_as_written_that_does_not_fit_is_said_and_fails(flags, allowed, tiny, capsys, monkeypatch):
    """Without a limit, a device's memory is it, but for the share that the search leaves free."""
    monkeypatch.setitem(HARDWARE, "v5e", replace(HARDWARE["v5e"], memory=200_000))
    asked = ["plan", str(tiny), "--as-written", "--devices", "8"]
    assert main([*asked, "--hardware", "v5e", *flags]) == 4
    assert re.search(rf"^over budget: memory .* at most {allowed} are allowed$", capsys.readouterr().out, re.MULTILINE)
    assert main(asked) == 0
    assert "over budget" not in capsys.readouterr().out


def test_training_refuses_what_cannot_fit(tiny, capsys):
    assert main(["train", str(tiny), "--max-memory", "100KiB"]) == 2
    error = capsys.readouterr().err
    assert "this plan needs" in error and "activations" in error and "add --force" in error


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_plans_are_what_the_planner_says(path, tmp_path, capsys):
    text, written = path.read_text("utf-8"), tmp_path / path.name
    (asked,) = [line for line in text.splitlines() if line.startswith("#   axonml-jax plan ")]
    assert main([*shlex.split(asked)[2:], "--write", str(written)]) == 0
    assert written.read_text("utf-8") == text
    config = read_config("train", [str(path)])
    assert config.model.scan_layers and config.model.words_at_once in (21_376, 15_232)  # Llama 3's words, and Qwen3's
    devices = config.mesh.fsdp * config.mesh.tensor * config.mesh.context
    assert main(["plan", str(path), "--as-written", "--devices", str(devices)]) == 0
    assert "ms/step" in capsys.readouterr().out


def test_explain_prices_a_configuration_and_draws_it(tiny, tmp_path, capsys):
    picture, flags = tmp_path / "run.svg", ["explain", str(tiny)]
    assert main([*flags, "--hardware", "v5e", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "ms/step, MFU" in out and f"picture   {picture}" in out and picture.stat().st_size > 1000
    assert main(["explain", "--help"]) == 0
    assert "--hardware NAME: price a step" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("memory", ["1KiB", "0.9"])
def test_explain_refuses_no_budget_of_a_device_that_is_not_there(memory, tiny, capsys):
    """Nothing is compiled: how much XLA for CPUs holds says nothing of the device, nor does a share of this machine."""
    assert main(["explain", str(tiny), "--plan.remat=null", f"--plan.memory={memory}"]) == 0
    out = capsys.readouterr().out
    assert "all_reduce" in out and "kept for the backward" not in out


@pytest.mark.slow
def test_train_refuses_a_budget_that_nothing_fits_before_a_trainer_is_made(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("axonml_jax.cli.train._trainer", lambda *_, **__: pytest.fail("arrays were allocated"))
    flags = ["--plan.remat=null", "--plan.memory=1KiB", f"--output.dir={tmp_path / 'run'}"]
    assert main(["train", str(tiny), *flags]) == 2
    assert "this step needs at least" in capsys.readouterr().err


MISSING = {
    "a picture's folder": (["explain", "--picture", "no/x.svg"], "--picture no/x.svg: there is no folder no; make it"),
    "a picture's format": (["explain", "--picture", "x.bmp"], "--picture x.bmp: the ending chooses the format"),
    "a baseline": (["explain", "--check", "none.json"], "--check none.json: no baseline"),
    "a baseline's folder": (
        ["explain", "--write-baseline", "no/x.json"],
        "--write-baseline no/x.json: there is no folder",
    ),
    "a run to explain": (["explain", "--resume", "no"], "resume=no: no/checkpoints has no checkpoints"),
    "a run to go on with": (["train", "--resume", "no"], "resume=no: no/checkpoints has no checkpoints"),
    "a text": (["train", "--data.path", "no"], "no such"),
    "a plan's folder": (["plan", "--devices", "8", "--write", "no/x.yaml"], "--write no/x.yaml: there is no folder no"),
    "a plan's picture": (["plan", "--devices", "8", "--picture", "."], "--picture .: is a folder; give a file in it"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_said_before_anything_is_printed(case, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command, *flags), message = MISSING[case]
    assert main([command, str(tiny), *flags]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


@pytest.mark.parametrize("there", [False, True])
def test_a_file_that_may_not_be_written_is_refused_before_a_plan_is_searched(
    there, tiny, tmp_path, capsys, monkeypatch
):
    written = tmp_path / "planned.yaml"
    closed = written if there else tmp_path
    if there:
        written.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *mode: Path(path) != closed and access(path, *mode))
    monkeypatch.setattr("axonml_jax.cli.plan.find_plan", lambda *_, **__: pytest.fail("a plan was searched"))
    assert main(["plan", str(tiny), "--devices", "8", "--write", str(written)]) == 2
    assert f"--write {written}: may not be written; give another place" in capsys.readouterr().err


KINDS = {
    "shards": ("data", "fsdp"),
    "positions": ("fsdp", "context"),
    "layers": ("fsdp", "tensor"),
    "grid": ("fsdp", "depth", "row", "col"),
    "stages": ("data", "fsdp", "pipe"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_planner_chooses_is_built_from_what_it_writes(kind, tmp_path):
    model = TransformerConfig(
        vocab_size=256, num_layers=4, hidden_size=32, num_heads=8, max_length=2048, scan_layers=False
    )
    answer = ax.plan(model, num_devices=8, hardware="h100", global_batch=16, axes=KINDS[kind])
    ways = {}
    for each in candidates(model, 8, global_batch=16, length=2048, axes=KINDS[kind]):
        degrees = [axis for axis, ranks in each.degrees if ranks > 1]
        ways.setdefault((*degrees, each.stage, each.shared, each.method, each.schedule, each.chunks > 1), each)
    written = tmp_path / "planned.yaml"
    for way in ways.values():
        try:
            found = replace(answer, best=exactly(answer.asked, way))
        except ValueError:  # a schedule that refuses these sizes
            continue
        written.write_text(config_text(found), "utf-8")
        ground = set_up_run(read_config("train", [str(written), "--devices.simulated", "8"]))
        apart = [ranks for axis, ranks in way.degrees if axis in ("tensor", "pipe", "row", "col")]
        assert ground.plan.batch_layout(ground.mesh.shape).degree == 8 // math.prod(apart), way
    assert len(ways) > 3
