"""`eval`, `generate` and `runs`: they say of a run what its training said, under other plans too, and change nothing."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import yaml

from axonml_jax.__main__ import main
from axonml_jax.cli import saved
from axonml_jax.cli.run import checkpoints_of
from axonml_jax.cli.saved import Shown, _print, differences
from axonml_jax.config.config import ConfigError
from axonml_jax.data.documents import load_tokenizer

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
SMALL = (
    *("--model.num_layers=2", "--model.hidden_size=16", "--model.num_heads=2", "--model.mlp_hidden_size=16"),
    *("--model.max_length=8", "--data.length=8", "--data.max_bytes=6_000", "--data.valid_fraction=0.1"),
    *("--train.steps=6", "--train.eval_every=3", "--train.log_every=2", "--sample.count=0", "--output.plot=false"),
    *("--checkpoint.every=3", "--train.global_batch_size=8"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text").mkdir()
    for name, words in (("a.txt", "the cat sat on the mat. "), ("b.txt", "the dog sat on the log. ")):
        (folder / "text" / name).write_text(words * 60)
    given = [f"--data.path={folder / 'text'}", f"--output.dir={folder / 'runs'}", "--optim.learning_rate=0.03"]
    assert main(["train", QUICKSTART, *SMALL, *given, "--name=quick"]) == 0
    return folder


@pytest.fixture(scope="module")
def both(place):
    """The folder with another run, whose learning rate is smaller and whose losses are larger."""
    quick, slow = place / "runs" / "quick", place / "runs" / "slow"
    shutil.copytree(quick, slow)
    settings = yaml.safe_load((slow / "config.yaml").read_text())
    settings["optim"]["learning_rate"] = 0.0003
    (slow / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [json.loads(line) for line in (slow / "metrics.jsonl").read_text().splitlines()]
    larger = [{name: value + ("loss" in name) for name, value in line.items()} for line in lines]
    (slow / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in larger))


@pytest.fixture
def said(place, capsys, monkeypatch):
    """What a command prints, in the folder of the runs."""
    monkeypatch.chdir(place)
    before = files(place)

    def said(*argv):
        status = main(list(argv))
        printed = capsys.readouterr()
        assert status == 0, printed.err
        assert files(place) == before or "--plot" in argv
        return printed.out

    return said


def files(place):
    return {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}


def recorded(place, run, step):
    lines = [json.loads(line) for line in (place / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        ((), 6),
        (("--step", "3"), 3),
        (("--mesh.data", "1", "--mesh.fsdp", "8"), 6),
        (("--step", "3", "--mesh.data", "4", "--mesh.tensor", "2"), 3),
        (("--mesh.data", "4", "--mesh.pipe", "2", "--pipeline.microbatches", "2"), 6),
    ],
)
@pytest.mark.slow
def test_eval_finds_the_loss_that_training_found(place, said, flags, step):
    found = json.loads(said("eval", "runs/quick", "--json", *flags))
    expected = recorded(place, "quick", step)["valid_loss"]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["perplexity"], np.exp(expected), rtol=1e-5)
    assert found["step"] == step and found["tokens_per_second"] > 0
    assert (found["batches"], found["tokens"]) == (23, 22 * 64 + 24)  # the last batch is three windows of 8


@pytest.mark.slow
def test_eval_takes_other_text_and_parts(said):
    text = said("eval", "runs/quick/checkpoints/step_00000003", "--split", "train", "--batches", "2")
    assert "runs/quick, step 3" in text and "train        2 batches, 128 tokens" in text and "nats per token" in text
    with_best = json.loads(said("eval", "runs/quick", "--step", "best", "--json"))
    assert with_best["step"] in (3, 6)


def test_eval_writes_a_loss_that_is_not_finite_as_json_does(capsys):
    more = {"step": 3, "batches": 1, "tokens": 8, "tokens_per_second": 1.0, "perplexity": math.nan}
    _print(argparse.Namespace(json=True, split="valid"), {"loss": math.nan}, more, "", "tokens")
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == more | {"loss": None, "perplexity": None}


@pytest.mark.slow
def test_generate_writes_the_same_text_under_every_plan(said):
    argv = (
        "generate",
        "runs/quick",
        "--prompt",
        "the",
        "--length",
        "12",
        "--temperature",
        "0.9",
        "--top-k",
        "40",
        "--count",
        "2",
    )
    alone = said(*argv)
    assert alone.startswith("the") and len(alone.splitlines()) >= 2
    assert said(*argv, "--mesh.data", "1", "--mesh.fsdp", "4", "--mesh.tensor", "2") == alone


def test_generate_reads_a_pipe_and_a_file(said, monkeypatch, tmp_path):
    class Piped:
        def isatty(self):
            return False

        def read(self):
            return "the "

    monkeypatch.setattr("sys.stdin", Piped())
    argv = ("generate", "runs/quick", "--length", "4", "--temperature", "0")
    piped = said(*argv)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the ")
    assert piped.startswith("the ") and said(*argv, "--prompt-file", str(prompt)) == piped


class Led:
    """One of several processes, of which another one decides."""

    said: ClassVar[list] = []

    def __init__(self, timeout=None):
        pass

    def decide(self, what, act):
        return self.said.pop(0)


@pytest.mark.slow
def test_the_main_process_chooses_the_checkpoint_and_reads_the_prompts(place, said, monkeypatch):
    monkeypatch.setattr("axonml_jax.cli.saved.Team", Led)
    kept = str(place / "runs" / "quick" / "checkpoints" / "step_00000003")
    Led.said[:] = [kept]
    found = json.loads(said("eval", "runs/quick", "--json"))  # by itself it would take that of step 6
    np.testing.assert_allclose(found["loss"], recorded(place, "quick", 3)["valid_loss"], rtol=1e-5)
    monkeypatch.setattr("sys.stdin", None)
    Led.said[:] = [kept, None, "the ", "", "a", None]
    lines = said("generate", "runs/quick", "--length", "4", "--temperature", "0").splitlines()
    assert len(Led.said) == 0 and lines[0].startswith("the ") and any(line.startswith("a") for line in lines[1:])
    Led.said[:] = ["the ", kept]  # of a file that only the main process has
    assert (
        said("generate", "runs/quick", "--length", "4", "--temperature", "0", "--prompt-file", "no.txt")
        == f"{lines[0]}\n"
    )


REFUSED = {
    "is no run's folder; did you mean runs/quick?": ("eval", "runs/quik"),
    "--step 4: runs/quick has no such checkpoint; there are 3, 6": ("eval", "runs/quick", "--step", "4"),
    "--batches 0: must be at least 1": ("eval", "runs/quick", "--batches", "0"),
    "--optim.learning_rate, --train.steps, --resume: eval trains nothing, so this would change nothing: leave it out": (
        "eval",
        "runs/quick",
        "--optim.learning_rate",
        "1",
        "--train.steps=5",
        "--resume",
        "auto",
        "--train.eval_batches",
        "3",
    ),
    "--sample.temperature: generate trains nothing": ("generate", "runs/quick", "--sample.temperature", "0.5"),
    "unknown flag --bathces": ("eval", "runs/quick", "--bathces", "3"),
    "temperature=-1.0 is negative, or no finite number; top_p=3.0": (
        "generate",
        "runs/quick",
        "--temperature",
        "-1",
        "--top-p",
        "3",
    ),
    "temperature=nan is negative, or no finite number": ("generate", "runs/quick", "--temperature", "nan"),
    "--count 0: is below 1": ("generate", "runs/quick", "--count", "0", "--prompt", "a"),
    "--seed 9223372036854775808: does not fit 64 bits": (
        "generate",
        "runs/quick",
        "--seed",
        str(2**63),
        "--prompt",
        "a",
    ),
    "--stop '': every text ends with it at once": ("generate", "runs/quick", "--stop", "", "--prompt", "a"),
    "give the model and the optimizer that made it, or begin a new run": (
        "eval",
        "runs/quick",
        "--model.num_layers",
        "3",
    ),
    "--step 3: runs/quick/checkpoints/step_00000006 is the checkpoint of step 6: leave --step out": (
        "eval",
        "runs/quick/checkpoints/step_00000006",
        "--step",
        "3",
    ),
    "length=0 is below 1": ("generate", "runs/quick", "--prompt", "a", "--length", "0"),
    "--prompt and --prompt-file both say": ("generate", "runs/quick", "--prompt", "a", "--prompt-file", "b"),
    "the prompt is empty": ("generate", "runs/quick", "--prompt", ""),
    "nowhere: no run has written there": ("runs", "nowhere"),
    "--metric nothing: no run has it; there are compile_time, grad_norm": ("runs", "--metric", "nothing"),
    "--plot none/x.png: there is no folder none": ("runs", "--plot", "none/x.png"),
    "--plot x.foo: Format 'foo' is not supported": ("runs", "--metric", "loss", "--plot", "x.foo"),
    "unknown command 'evaluate': did you mean axonml-jax eval?": ("evaluate", "runs/quick"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(place, message, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert main(list(REFUSED[message])) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_is_found_in_one_look_at_its_folder(place, monkeypatch):
    looks = []
    monkeypatch.setattr(saved, "checkpoints_of", lambda folder: looks.append(folder) or checkpoints_of(folder))
    folder = place / "runs" / "quick"
    for run, step in ((folder, "3"), (folder / "checkpoints" / "step_00000003", None)):
        given = argparse.Namespace(run=run, step=step, ema=False, allow_imports=[])
        assert saved.saved_run("eval", given, []).step == 3
    assert looks == [folder, folder]


@pytest.mark.usefixtures("both")
def test_runs_are_listed_best_first_with_what_differs(place, said):
    table = said("runs", "--differences").splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["runs/quick", "runs/slow"]
    assert "optim.learning_rate" in table[-1] and table[-1].split()[1:] == ["0.03", "0.0003"]
    found = json.loads(said("runs", "runs/slow", "runs/quick", "--json", "--metric", "loss"))
    assert [run["run"] for run in found["runs"]] == ["runs/quick", "runs/slow"]
    assert found["runs"][0]["loss"] == recorded(place, "quick", 6)["loss"] and found["runs"][0]["checkpoints"] == [3, 6]
    assert found["differences"] == {"optim.learning_rate": [0.03, 0.0003]}
    pytest.importorskip("matplotlib")
    assert "written   both.png" in said("runs", "--plot", "both.png") and (place / "both.png").stat().st_size > 5_000
    assert len(json.loads(said("runs", "--plot", "both.png", "--json"))["runs"]) == 2


def test_settings_that_only_some_runs_have_differ():
    from axonml_jax.cli.saved import Found

    runs = [Found(Path(), {"name": "a", "x.y": 1}, [], []), Found(Path(), {"name": "b", "x.y": 1, "z": 2}, [], [])]
    assert differences(runs) == {"z": [None, 2]}


def test_the_speed_of_a_run_on_data_of_ones_own_is_in_examples(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: {steps: 2}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0, "examples_per_second": 1234.5}\n')
    assert "1,234 examples/s" in printed(["runs", str(tmp_path)], capsys)


def test_the_checkpoints_of_a_run_at_a_url_are_said_to_be_there(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("checkpoint: {url: s3://b/run}")
    assert "s3://b/run" in printed(["runs", str(tmp_path)], capsys)


def test_runs_that_diverged_come_last_and_names_that_are_alike_are_paths(tmp_path, capsys):
    losses = {"a/run": ["NaN", "2.0"], "b/run": ["3.0", "1.0"], "b/lost": ["null"], "b/one": ["5.0"]}
    for name, values in losses.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(f"train: {{steps: {len(name)}{len(values)}}}")
        lines = [f'{{"step": {step}, "valid_loss": {value}}}' for step, value in enumerate(values)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    folders = [str(tmp_path / part) for part in "ab"]
    ordered = lambda flags: [
        (Path(run["run"]).relative_to(tmp_path).as_posix(), run["best_valid_loss"])
        for run in json.loads(printed(["runs", *folders, "--json", *flags], capsys), parse_constant=pytest.fail)["runs"]
    ]
    assert ordered([]) == [("b/run", 1.0), ("a/run", 2.0), ("b/one", 5.0), ("b/lost", None)]
    assert ordered(["--highest"]) == [("b/one", 5.0), ("b/run", 3.0), ("a/run", 2.0), ("b/lost", None)]
    header = printed(["runs", *folders, "--differences"], capsys).split("setting")[1].splitlines()[0]
    assert f"{tmp_path}/a/run" in header and f"{tmp_path}/b/run" in header


def printed(argv, capsys):
    assert main(argv) == 0
    return capsys.readouterr().out


def tokens(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)[None]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abc def", (), "abc def"),
        ("abc END def", ("END",), "abc "),
        ("abc EN def", ("END",), "abc EN def"),  # held back, then no stop word
        ("abcEN", ("END",), "abcEN"),
        ("a, b; c", ("; ", ", "), "a"),
        ("tête-à-tête", ("zz",), "tête-à-tête"),  # characters of two bytes
    ],
)
def test_text_is_written_as_it_comes_until_a_stop_word(text, stop, expected):
    written = []
    show, every = Shown(2, stop, written.append), tokens("<>" + text)
    for end in range(3, every.shape[1] + 1):
        if show(every[:, :end]):
            break
    show.finish()
    assert "".join(written) == expected
    assert len(written) > 2 or len(expected) < 3


def test_text_ends_at_the_end_token_and_keeps_the_space_before_its_first_word(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁the": 0, "▁cat": 1, "</s>": 2}, unk_token="</s>"))
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    written, tokenizer = [], load_tokenizer(tmp_path)
    show = Shown(1, (), written.append, tokenizer, end=2)
    assert not show(np.array([[0, 1]])) and show(np.array([[0, 1, 2]]))
    show.finish()
    assert "".join(written) == " cat"


def test_a_cut_off_character_at_the_end_is_written_as_such():
    written = []
    show = Shown(0, (), written.append)
    show(tokens("é")[:, :1])
    show.finish()
    assert "".join(written) == "\N{REPLACEMENT CHARACTER}"


def test_a_config_error_names_the_folder_whose_configuration_is_damaged(tmp_path):
    from axonml_jax.cli.saved import _read

    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        _read(tmp_path)
