"""The section `data`: documents, prompts, mixtures and tokenizers from a configuration, and what is refused."""

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.cli import tasks as document_task
from axonml_jax.cli import tasks as text_task
from axonml_jax.cli.files import _with_tokenizer
from axonml_jax.cli.tasks import FilledUp, load_data, read_data, read_documents, read_text, valid_batches
from axonml_jax.config.config import read_config
from axonml_jax.config.sections import DataConfig, LossConfig
from axonml_jax.data.documents import DocumentEncoder, load_tokenizer
from axonml_jax.training.evaluate import mean_of

QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--model.mlp_hidden_size=32"),
    *("--data.length=16", "--data.valid_fraction=0.1", "--train.steps=2", "--train.eval_every=null"),
    *("--train.global_batch_size=8", "--sample.length=3", "--sample.count=1", "--output.plot=false"),
)


@pytest.fixture
def pairs(tmp_path):
    """Sixty questions and answers."""
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"what is {i}?", "completion": f" it is {i * i}"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


PROMPTS = {"prompt_field": "prompt", "completion_field": "completion"}


@pytest.mark.slow
def test_completions_are_trained_on_and_validation_counts_every_target_once(tmp_path, pairs, capsys):
    flags = [f"--data.path={pairs}", *(f"--data.{name}={field}" for name, field in PROMPTS.items())]
    assert main(["train", QUICKSTART, *SMALL, *flags, f"--output.dir={tmp_path / 'runs'}"]) == 0
    said = capsys.readouterr().out
    split = read_documents(DataConfig(path=pairs, length=16, valid_fraction=0.1, **PROMPTS))
    counted = sum(each.num_targets for each in split.valid)
    assert f"{split.sizes[0]:,} tokens to train on" in said and f"of which {counted:,} are used" in said
    assert "nats per token after step 2" in said and "bigram" not in said and "--- sample 1" in said
    [metrics] = (tmp_path / "runs").glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert math.isfinite(last["valid_loss"]) and "valid_bigram" not in last


def test_validation_is_the_mean_over_all_targets():
    """As if it were one batch: rows are filled up with empty ones, and batches count by their targets."""
    from axonml_jax.data.documents import pack

    rows = FilledUp([pack(["ab" * n for n in range(1, 9)], 8)], 3)
    assert len(rows) == 9 and rows._ends.tolist() == [8]
    counts = [(rows[i]["targets"] >= 0).sum() for i in range(9)]
    assert rows.targets(3) == np.reshape(counts, (3, 3)).sum(axis=1).tolist()
    assert (rows[len(rows) - 1]["targets"] == -1).all()
    with pytest.raises(ValueError, match="there are no batches to evaluate on"):
        mean_of([])


def test_documents_of_a_dataset_that_gives_many_are_asked_for_together():
    class Many(list):
        asked: ClassVar[list] = []

        def __getitems__(self, indices):
            self.asked.append(len(indices))
            return [self[i] for i in indices]

    samples = [{"text": f"{i}"} for i in range(1030)]
    encoder = DocumentEncoder(tokenizer=load_tokenizer("bytes"), fields=("text",))
    together, alone = document_task._texts(Many(samples), encoder, None), document_task._texts(samples, encoder, None)
    assert together == alone != samples and Many.asked == [1024, 6]


def test_a_mixture_draws_from_every_file_in_its_share(tmp_path, pairs):
    (tmp_path / "notes").mkdir()
    for i in range(40):
        (tmp_path / "notes" / f"{i}.txt").write_text("x" * 17)
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps({"text": "y" * 17}) for _ in range(40)))
    shares = {str(tmp_path / "notes"): 3.0, str(tmp_path / "more.jsonl"): 1.0}
    split = read_documents(DataConfig(mixture=shares, length=16))
    letters = [split.train[int(i)]["tokens"][0] for i in split.train.order_of(0, np.arange(72), shuffle=True, seed=0)]
    drawn = [letters.count(ord(letter)) for letter in "xy"]
    assert sum(drawn) == 72 and drawn[0] > 1.8 * drawn[1]
    assert [len(each) for each in split.valid] == [4, 4]


def test_reading_stops_at_the_limit(pairs):
    whole, some = (
        read_documents(DataConfig(path=pairs, length=16, max_bytes=limit, **PROMPTS)) for limit in (None, 400)
    )
    assert sum(some.sizes) < 400 < sum(whole.sizes)


@pytest.mark.parametrize(("flags", "said"), [
    (["--data.prompt_field=a"], "data.prompt_field=a and completion_field=None: give both or none"),
    (["--data.pack=documents"], "data.path: documents, which pack=documents asks for, are read from a path or a mixture"),
    (["--data.tokenizer=1.5"], "data.path: documents, which tokenizer asks for, are read from a path or a mixture"),
    (["--data.path=x.jsonl", "--data.pack=windows"], "pack=windows cuts text as one stream, without path"),
    (["--data.path=x.jsonl", '--data.mixture={"a": 1}'], "path and mixture both say what to read"),
    (["--data.path=x.jsonl", "--data.valid_fraction=-0.5"], "data.valid_fraction=-0.5: must be between 0 and 1"),
    (["--data.path=x.jsonl", "--data.valid_fraction=1.5"], "data.valid_fraction=1.5: must be between 0 and 1"),
    (["--data.path=x.jsonl", "--data.max_bytes=0"], "data.max_bytes=0: must be at least 2"),
    (['--data.mixture={"a": -1}'], "the share of a is -1.0: must be positive and finite"),
    (["--data.path=none.jsonl"], "no such file or folder: 'none.jsonl'"),
    (["--data.path=none.jsonl", "--data.tokenizer=none.json"], "no tokenizer at 'none.json'"),
    (["--data.format=csv"], "data.format=csv: must be one of text, jsonl, parquet, or null"),
    (['--data.mixture=3'], "data.mixture=3: must be a mapping such as {path: 0.5}, or null"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, capsys, flags, said):
    assert main(["train", QUICKSTART, *SMALL, *flags, f"--output.dir={tmp_path / 'runs'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "runs").exists()


WORDS = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3}


def write_words(path):
    pytest.importorskip("tokenizers")
    rules = {"version": "1.0", "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"}}
    path.write_text(json.dumps(rules | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    return str(path)


def test_one_text_and_a_tokenizer_are_windows_of_tokens(tmp_path, monkeypatch):
    words, text = write_words(tmp_path / "words.json"), tmp_path / "my.txt"
    text.write_text("the cat sat\n" * 1000)
    flags = [*SMALL, f"--data.path={text}", f"--data.tokenizer={words}"]
    config = read_config("train", [QUICKSTART, *flags])
    assert not config.data.documents and DataConfig(path=str(tmp_path), tokenizer=words).documents
    assert DataConfig(path=str(text), tokenizer=words, end="the").documents
    found = read_data(config.data)
    assert found.train.tolist() == [1, 2, 3] * 900 and found.valid.tolist() == [1, 2, 3] * 100
    again = read_text(
        DataConfig(path=str(tmp_path), tokenizer=words, pack="windows", length=16)
    )  # of a folder, when asked for
    assert again.train.tolist() == [1, 2, 3] * 900 and again.fingerprint == found.fingerprint
    monkeypatch.setattr(text_task, "_WINDOW_BYTES", 50)
    assert read_data(config.data).fingerprint == found.fingerprint
    data = load_data(config, found, ax.make_mesh(data=8))
    assert (data.unit, data.bigram, data.sizes) == ("token", None, (2700, 300)) and data.valid_targets == [
        16 * 8,
        16 * 8,
        16 * 2,
    ]
    seen = list(valid_batches(data))
    targets = np.concatenate([np.asarray(batch["targets"]).ravel() for batch in seen])
    assert (
        targets[targets >= 0].tolist() == found.valid[1 : 18 * 16 + 1].tolist()
        and len({len(b["tokens"]) for b in seen}) == 1
    )
    own = load_data(replace(config, loss=LossConfig(class_path="own_parts.squares")), found, ax.make_mesh(data=8))
    parts = list(valid_batches(own))
    assert [len(batch["tokens"]) for batch in parts] == [8, 8, 1, 1] and own.valid_targets == data.valid_targets
    assert np.concatenate([np.asarray(batch["targets"]).ravel() for batch in parts]).min() > 0
    batch = next(iter(data.train))
    assert batch["targets"][0, :-1].tolist() == batch["tokens"][0, 1:].tolist() and int(batch["tokens"].max()) == 3
    text.write_text("the cat sat\n")
    with pytest.raises(ValueError, match="the text leaves 3 tokens to train and 0 tokens to valid, too few"):
        read_data(config.data)
    with pytest.raises(
        ValueError, match=r"holds 1 documents, too few to train and to validate on.*pack=windows, which takes"
    ):
        read_documents(DataConfig(path=str(text), tokenizer=words, pack="documents"))


def test_too_few_examples_of_a_folders_text_say_that_files_are_not_cut(tmp_path):
    for name, size in {"a.txt": 40, "b.txt": 5000, "c.txt": 5000}.items():
        (tmp_path / name).write_text("x" * size)
    config = read_config("train", [QUICKSTART, *SMALL, f"--data.path={tmp_path}", "--train.global_batch_size=8"])
    whole = (
        r"another valid_fraction; several files are split as whole files: .* that share of the bytes at most, or the sm"
    )
    with pytest.raises(ValueError, match=rf"leaves 2 examples to valid, fewer than .*=8: give .*{whole}"):
        load_data(config, read_text(config.data), ax.make_mesh(data=8))
    with pytest.raises(ValueError, match=rf"leaves 40 bytes to valid, too few .*length=64: give .*{whole}"):
        read_text(replace(config.data, length=64))


def test_records_beside_text_and_in_files_of_any_kind_are_never_left_out_or_read_as_text_unasked(tmp_path, pairs):
    text = "the cat sat on the mat. " * 40
    (tmp_path / "README.md").write_text(text)
    given = lambda path, **more: DataConfig(path=str(path), length=16, **more)
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl: train on those by data\.format=jsonl or parquet, or on the files of"
    ):
        read_data(given(tmp_path))
    assert sum(map(len, read_data(given(tmp_path, pack="windows")))) == len(text)
    assert len(read_data(given(tmp_path, format="jsonl", **PROMPTS)).train) > 0
    (tmp_path / "runs" / "it").mkdir(parents=True)
    (tmp_path / "runs" / "it" / "metrics.jsonl").write_text("{}")
    Path(pairs).rename(tmp_path / "pairs.json")
    assert sum(map(len, read_data(given(tmp_path), str(tmp_path / "runs")))) == len(text)
    (tmp_path / "runs" / "it" / "config.yaml").write_text("")  # a run's, whose folder this command is not told
    assert sum(map(len, read_data(given(tmp_path)))) == len(text)
    for more in ({}, PROMPTS):
        with pytest.raises(
            ValueError, match=r"pairs\.json holds records more often than text: give format=jsonl where every"
        ):
            read_data(given(tmp_path / "pairs.json", **more))
    assert len(read_data(given(tmp_path / "pairs.json", format="jsonl", **PROMPTS)).train) > 0
    assert len(read_data(given(tmp_path / "pairs.json", pack="windows")).train) > 0


def test_export_takes_the_tokenizer_of_a_runs_data_along(tmp_path):
    words, target = write_words(tmp_path / "words.json"), tmp_path / "weights"
    target.mkdir()
    make = lambda path: read_config("train", [QUICKSTART, f"--data.path={tmp_path}", f"--data.tokenizer={path}"])
    assert _with_tokenizer(make(words), target) == f"as in {words}"
    assert (target / "tokenizer.json").read_bytes() == Path(words).read_bytes()
    folder, target = tmp_path / "tokenizer", tmp_path / "more"
    for each in (folder, target):
        each.mkdir()
    write_words(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text("{}")
    assert _with_tokenizer(make(folder), target) == f"as in {folder}"
    assert sorted(path.name for path in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert "left out, as there is no tokenizer at" in _with_tokenizer(make(tmp_path / "gone"), target)
    assert _with_tokenizer(read_config("train", [QUICKSTART]), target) == ""


def test_a_vocabulary_that_lacks_tokens_is_refused_before_anything_is_made(tmp_path, pairs, capsys):
    pytest.importorskip("tokenizers")
    rules = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "what": 300}, "unk_token": "<unk>"}}
    rules["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    flags = [f"--data.path={pairs}", "--data.fields=[prompt]", f"--data.tokenizer={tmp_path}"]
    gc.collect()  # arrays of tests before this one
    before = len(jax.live_arrays())
    for command in ("train", "explain"):
        assert main([command, QUICKSTART, *SMALL, *flags]) == 2
        assert "model.vocab_size=256: the tokenizer has 301 token ids" in capsys.readouterr().err
    assert len(jax.live_arrays()) <= before
