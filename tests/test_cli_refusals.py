"""No refusal leaves the command line as a traceback, whatever raised it; a bug leaves it as nothing else."""

import os
from pathlib import Path

import pytest

from axonml_jax import __main__ as command_line
from axonml_jax.__main__ import main
from axonml_jax.cli.flags import TRACEBACK, in_flags, refusal
from axonml_jax.mesh.shape import MeshShape

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
FILES = {
    "binary.yaml": b"\xff\xfe\x00",
    "list.yaml": b"- 1\n",
    "empty.yaml": b"",
    "section.yaml": b"optimizer: {learning_rate: 1.0}",
    "half.yaml": b"name: [a",
    "it.py": b"",
    "zero.yaml": b'name: "a\\0b"\nmodel: {vocab_size: 256, num_layers: 1, hidden_size: 8, num_heads: 1, max_length: 64}',
}
PIPES = ("pipe", "run/config.yaml")
"""FIFOs, which whoever opens waits for a writer."""
SMALL = ("gpt2-small", "--devices", "8", "--batch", "8")

SHORT = ("--data.max_bytes", "20_000")

WRONG = {
    "train": [
        ((), "give a configuration file first"),
        (("none.yaml",), "no such configuration file: none.yaml"),
        (("quikstart",), "no such configuration file: quikstart; did you mean quickstart?"),
        (("binry.yaml",), "no such configuration file: binry.yaml; did you mean binary.yaml?"),
        ((QUICKSTART, "--mesh.tp", "2"), "unknown flag --mesh.tp: did you mean --mesh.tensor?"),
        ((QUICKSTART, "--lr", "1"), "unknown flag --lr: did you mean --optim.learning_rate?"),
        ((QUICKSTART, "--optim.wd", "1"), "unknown flag --optim.wd: did you mean --optim.weight_decay?"),
        ((QUICKSTART, "--bs", "8"), "unknown flag --bs: did you mean --train.global_batch_size?"),
        ((QUICKSTART, "--mesh.cp", "8"), "unknown flag --mesh.cp: did you mean --mesh.context?"),
        ((QUICKSTART, "--mesh.ep", "8"), "did you mean --mesh.expert?"),
        ((QUICKSTART, "--plan.precision", "bf61"), "plan.precision=bf61: must be one of float32, bf16, bf16-reduce,"),
        ((QUICKSTART, "--plan.sync_strategy", "overlaped"), "overlaped: must be one of overlapped, synchronous, no_sync"),
        ((QUICKSTART, "--optim.schedule", "linear"), "constant; any other goes under optim.learning_rate as a class_path"),
        ((QUICKSTART, "--optim.name", "adafactor"), "adamw, lion; any other optimizer goes under optim.class_path"),
        ((QUICKSTART, "--plan", "fsdp"), "over which devices a model is split stands in mesh, such as mesh.fsdp"),
        ((QUICKSTART, "--optim.learning_rate.class_path", "optax.linear_schedule"), "as a mapping, '{class_path: ...}'"),
        ((QUICKSTART, "--optim.learning_rate", "{class_path: optax.linear_schedule}"), "schedule: give 0, or leave it out"),
        (("section.yaml",), "unknown key 'optimizer' in section.yaml: did you mean the section optim?"),
        (("binary.yaml",), "binary.yaml is not YAML"),
        (("list.yaml",), "list.yaml holds no keys"),
        (("empty.yaml",), "empty.yaml holds no keys"),
        (("half.yaml",), "half.yaml is not YAML"),
        (("pipe",), "pipe is a FIFO: give a configuration file"),
        (("/dev/zero",), "/dev/zero is a device: give a configuration file"),
        (("run",), "run is a folder: give a configuration file"),
        (("zero.yaml",), "name='a\\x00b': holds '\\x00', which no name or path can"),
        ((QUICKSTART, "--data.path", "a\0b"), "data.path='a\\x00b': holds"),
        ((QUICKSTART, "--data.mixture", '{"a\\0b": 1.0}'), "data.mixture's keys='a\\x00b': holds"),
        ((QUICKSTART, "--output.dir", "a\udc00b"), "output.dir='a\\udc00b': holds '\\udc00'"),
        ((QUICKSTART, "--resume", "run"), "run/checkpoints has no checkpoints"),
        ((QUICKSTART, "--mesh.tensor", "2"), "mesh.tensor=2: 3 query heads do not divide over tensor=2"),
        ((QUICKSTART, "--mesh.tensor", "2"), "use mesh.tensor 1 or 3, or other values of model.num_heads"),
        ((QUICKSTART, "--mesh.tensor", "0"), "tensor=0: a degree is an int >= 1"),
        ((QUICKSTART, "--plan.comm_dtype", "foo"), "comm_dtype='foo' must be a floating dtype"),
        ((QUICKSTART, "--data.path", "none"), "no such folder: 'none'"),
        ((QUICKSTART, *SHORT, "--output.dir", "it.py"), "output.dir=it.py: it.py is a file; give a folder"),
        ((QUICKSTART, *SHORT, "--output.dir", "it.py/runs"), "it.py is a file; give a folder"),
    ],
    "explain": [
        ((QUICKSTART, "--mesh.tensor", "2"), "use mesh.tensor 1 or 3, or other values of model.num_heads"),
        ((QUICKSTART, "--model.split", "grid", "--mesh.row", "2"), "use mesh.row 1 or 3, or other values of model.num_heads"),
        ((QUICKSTART, "--model.attention", "splash"), "attention='splash' does not apply here"),
        ((QUICKSTART, "--write-baseline", "none/baseline.json"), "none/baseline.json"),
        ((QUICKSTART, "--hardware", "v9"), "invalid choice: 'v9'"),
    ],
    "plan": [
        ((), "required"),
        (("pipe", "--devices", "8"), "pipe is a FIFO: give a configuration file"),
        (("half.yaml", "--devices", "8"), "half.yaml is not YAML"),
        (("gpt2-smal", "--devices", "8"), "did you mean gpt2-small?"),
        (("it.py", "--devices", "8"), "For a model of your own, print(ax.explain(trainer, batch))"),
        ((*SMALL, "--hardware", "rtx4090"), "on the command line: measure"),
        ((*SMALL, "--length", "0"), "length=0: each must be at least 1"),
        ((*SMALL, "--devices", "0"), "num_devices=0: each must be at least 1"),
        ((*SMALL, "--axes", "data", "--max-memory", "2"), "another batch (a multiple of the devices), --offload, or"),
        ((*SMALL, "--efficiency", "2"), "shares lie between 0 and 1"),
        ((*SMALL, "--axes", "data", "--write", "none/x.yaml"), "none/x.yaml"),
    ],
    "generate": [(("run", "--lenght", "3"), "unknown flag --lenght: did you mean --length?")],
    "eval": [(("run", "--batch", "3"), "unknown flag --batch: did you mean --batches?")],
    "schedule": [
        (("--stages", "2", "--microbatches", "2", "--times", "nan,1,1"), "forward=nan: a time is a finite number"),
        (("--stages", "2", "--microbatches", "2", "--communication", "inf"), "communication=inf: a time is a finite"),
        (("--stages", "2", "--microbatches", "2", "--svg", "none/x.svg"), "--svg none/x.svg: there is no folder none"),
        (("--stages", "2", "--microbatches", "2", "--width", "0"), "--width 0: a line has at least 20 characters"),
    ],
    "devices": [(("--simulated", "0"), "must be 1 to 8,192"), (("--simulated", "few"), "invalid int value: 'few'")],
    "launch": [
        (("none.py",), "no such script: none.py"),
        (("pipe",), "pipe is a FIFO, which every process would read: give a script"),
        (("--nnodes", "two", "it.py"), "--nnodes two: must be a positive number"),
        (("--log-dir", "it.py", "it.py"), "--log-dir it.py"),
        (("--master-addr", "nowhere.invalid", "--master-port", "3333", "it.py"), "cannot listen on nowhere.invalid:3333"),
    ],
    "import": [(("only",), "the following arguments are required: RUN_FOLDER"), (("none", "out"), "none has no config.json")],
    "export": [(("none", "out"), "none holds no checkpoint"), (("a", "b", "--dtype", "int8"), "invalid choice: 'int8'")],
    "tarin": [((), "unknown command 'tarin': did you mean axonml-jax train?")],
    "torchrun": [((), "did you mean axonml-jax launch?")],
    "it.py": [((), "did you mean axonml-jax launch it.py?")],
    "none.yaml": [((), "did you mean axonml-jax train none.yaml?")],
    "xyz": [((), "the commands are train, eval, generate, runs, explain, plan, launch, schedule, devices, import, export")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "flags", "words"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_a_wrong_command_line_is_refused_in_one_message(command, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for name in PIPES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    assert main([command, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err  # nothing is printed before what is cheap to check


def test_remedies_of_the_memory_that_a_step_takes_are_keys_of_a_configuration():
    kept = "memory='5': give that much, smaller microbatches (accumulate=), or a plan that splits more (ax.FSDP, more devices)"
    assert in_flags(kept).endswith(
        "smaller microbatches (plan.accumulate), or a plan that splits more (mesh.fsdp, more devices)"
    )
    assert in_flags("say: give bytes, as memory='16GiB'") == "say: give bytes, as --plan.memory 16GiB"


def ours():
    return MeshShape(data=0)


def other_code():
    return int("two")


def an_assertion():
    raise AssertionError("ours alone to mend")


def a_missing_file():
    return Path("none.txt").read_text()


def error_of(wrong) -> BaseException:
    with pytest.raises(BaseException) as caught:
        wrong()
    return caught.value


def test_what_the_library_raises_is_a_refusal_and_what_it_trips_over_is_a_bug():
    assert "data=0: a degree is an int" in (refusal(error_of(ours)) or "")
    assert refusal(error_of(a_missing_file)) == "none.txt: No such file or directory"
    assert refusal(error_of(other_code)) is None and refusal(error_of(an_assertion)) is None


@pytest.mark.parametrize("wrong", [ours, other_code], ids=["refusal", "bug"])
def test_a_bug_keeps_its_traceback_and_a_refusal_shows_one_when_asked(wrong, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_dispatch", lambda arguments: wrong())
    monkeypatch.setenv(TRACEBACK, "1")
    if wrong is other_code:
        with pytest.raises(ValueError, match="invalid literal"):
            main(["devices"])
        return
    assert main(["devices"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.rstrip().splitlines()[-1].startswith("axonml-jax: error: mesh degrees data=0")
