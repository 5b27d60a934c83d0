"""Files that somebody else has written: what would read outside of a folder, unfold without end or be half taken is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import axonml_jax as ax
from axonml_jax.cli.records import read_records
from axonml_jax.config.config import NEWEST, NotYaml, plain_yaml, settings_at, yaml_in
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.families.known import config_of, described_in, family_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_few_hundred_changed_documents_end_in_a_named_error_or_are_read():
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    pytest.importorskip("pyarrow")
    command = [sys.executable, str(ROOT / "benchmarks" / "faults" / "fuzz_inputs.py"), "--cases", "500", "--seed", "1"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert re.search(r"\| all \| 5\d\d \|", run.stdout)


LAUGHS = "a: &a [x, x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "many laughs": (LAUGHS, "holds more than 20,000 values, aliases unfolded"),
    "laughs that merge": (
        LAUGHS.replace("[x, x, x, x]", "{x: 1}").replace(" [*", " {<<: [*").replace("]\n", "]}\n"),
        "20,000",
    ),
    "an anchor that holds itself": ("a: &a [*a]", "line 1: an anchor that holds itself"),
    "a nest": ("[" * 60 + "]" * 60, "nested deeper than 50 levels"),
    "a nest that no parser can follow": ("[" * 100_000, "nested deeper"),
    "a section that stands twice": (
        "data:\n  length: 8\ndata:\n  path: x",
        "the key 'data' stands twice: join both under one `data:`",
    ),
    "a key that stands twice": ("train:\n  steps: 1\n  steps: 2", "line 3: the key 'steps' stands twice"),
    "a long number": ("a: " + "9" * 500, "a number of 500 digits"),
    "a date that is none": ("a: 2026-99-99", "month must be in 1..12"),
    "an object": ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "control characters": ("a: \x01", "unacceptable character"),
    "too much": ("a: " + "x" * 300_000, "longer than 262,144 bytes"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml_that_is_made_to_hurt_is_refused(case):
    text, why = YAML[case]
    with pytest.raises(NotYaml) as caught:
        plain_yaml(text)
    assert why in str(caught.value)


def test_the_configuration_of_a_run_that_is_resumed_is_read_as_carefully(tmp_path):
    path = tmp_path / NEWEST
    path.write_text("train: {steps: 10}")
    assert settings_at(tmp_path, 5) == {"train": {"steps": 10}}
    path.write_text(f"train: {'[' * 10_000}")
    assert settings_at(tmp_path, 5) is None
    path.unlink()
    os.mkfifo(path)  # whoever opens it waits for a writer
    assert settings_at(tmp_path, 5) is None
    with pytest.raises(NotYaml, match="it is a FIFO, not a file"):
        yaml_in(path)


def test_no_more_is_read_of_a_file_than_a_configuration_has(tmp_path):
    path = tmp_path / NEWEST
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: reading it whole takes a terabyte
    with pytest.raises(NotYaml, match="it is longer than 262,144 bytes"):
        yaml_in(path)


def test_anchors_that_repeat_little_are_taken():
    assert plain_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]")["b"] == {"x": 1, "y": 2}
    assert plain_yaml("") is None


@pytest.fixture
def folder(tmp_path):
    """Two files of arrays with an index, and one outside."""
    pytest.importorskip("safetensors")
    inside = tmp_path / "in"
    inside.mkdir()
    for name, place in (
        ("a", inside / "model-1.safetensors"),
        ("b", inside / "model-2.safetensors"),
        ("c", tmp_path / "out"),
    ):
        ax.save_safetensors(place, {name: np.ones(3)})
    indexed(inside, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return inside


def indexed(folder, content):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": content}))


def test_an_index_names_files_of_its_folder(folder):
    assert sorted(ax.load_safetensors(folder)) == ["a", "b"]
    for name in ("../out", str(folder.parent / "out"), "x/../../out", "a\0b"):
        indexed(folder, {"a": name})
        with pytest.raises(ValueError, match=r"index.json names files that are not in its folder: "):
            ax.load_safetensors(folder)
    for name in ("model-9.safetensors", "m" * 5000):
        indexed(folder, {"a": "model-1.safetensors", "d": name})
        with pytest.raises(FileNotFoundError, match=f"names files that are not there: {name:.100}"):
            ax.load_safetensors(folder)
    for wrong in ([], {"a": 1}, {"a": ""}):
        indexed(folder, wrong)
        with pytest.raises(ValueError, match="is no index of safetensors files"):
            ax.load_safetensors(folder)


def test_an_array_that_stands_in_two_files_is_refused(folder):
    ax.save_safetensors(folder / "model-2.safetensors", {"a": np.zeros(3)})
    with pytest.raises(ValueError, match=r"model-2.safetensors has a, as has another file"):
        ax.load_safetensors(folder)


def test_a_file_that_is_none_is_named_and_a_pipe_is_not_waited_for(folder):
    (folder / "model-2.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model-2.safetensors is no safetensors file that can be read here: .*header"):
        ax.load_safetensors(folder)
    (folder / "model-2.safetensors").unlink()
    os.mkfifo(folder / "model-2.safetensors")
    with pytest.raises(FileNotFoundError, match="not there: model-2"):
        ax.load_safetensors(folder)


TINY = TransformerConfig(vocab_size=11, num_layers=2, hidden_size=8, num_heads=2, max_length=6)
PUBLISHED = family_of(TINY).describe(TINY)
WRONG = {
    "a key that is not there": ({"vocab_size": ...}, "config.json lacks 'vocab_size', which a llama needs"),
    "text for a number": ({"hidden_size": "8"}, "config.json is not what a llama writes"),
    "half a head": ({"vocab_size": 11.5}, "vocab_size=11.5: must be a whole number below 2,147,483,648"),
    "a flag for a number": ({"max_position_embeddings": True}, "max_length=True: must be a whole number"),
    "text for a flag": ({"tie_word_embeddings": "no"}, "tie_embeddings='no': must be true or false"),
    "no number": ({"rms_norm_eps": float("nan")}, "norm_eps=nan: must be a finite number"),
    "a vocabulary without end": ({"vocab_size": 10**30}, "vocab_size=1000000000000000000000000000000: must be"),
    "layers without end": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: these must be whole numbers, at most"),
    "experts without end": ({"model_type": "mixtral", "num_local_experts": 10**6}, "200,000 experts in all layers"),
    "layers that are text": ({"num_hidden_layers": "2"}, "num_hidden_layers='2': these must be"),
    "a kind that is none": ({"model_type": ["llama"]}, "model_type=['llama'] is not known here"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_published_configuration_is_not_believed(case):
    changes, why = WRONG[case]
    described = {name: value for name, value in (PUBLISHED | changes).items() if value is not ...}
    with pytest.raises(ValueError) as caught:
        config_of(described)
    assert why in str(caught.value)


PARTS = {
    "half an expert": (ExpertsConfig, {"num_experts": 2.5}, "num_experts=2.5: must be a whole number below"),
    "text for a rate": (ExpertsConfig, {"num_experts": 4, "noise": "a little"}, "noise='a little': must be a finite number"),
    "no such router": (ExpertsConfig, {"num_experts": 4, "router": "hash"}, "router='hash': must be one of softmax, sigmoid"),
    "no such activation": (ExpertsConfig, {"num_experts": 4, "activation": "relu"}, "swiglu, clamped_swiglu, gelu, or None"),
    "text for a rank": (LatentConfig, {"kv_rank": "512"}, "kv_rank='512': must be a whole number below"),
    "a rate without end": (LatentConfig, {"kv_rank": 8, "norm_eps": float("inf")}, "norm_eps=inf: must be a finite number"),
    "text for a factor": (RopeScaling, {"kind": "linear", "factor": "2"}, "factor='2': must be a finite number"),
    "no such rule": (RopeScaling, {"kind": "ntk"}, "kind='ntk': must be one of none, linear, llama3, yarn"),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_a_configuration_is_not_believed_either(case):
    kind, given, why = PARTS[case]
    with pytest.raises(ValueError) as caught:
        kind(**given)
    assert str(caught.value).startswith(f"{kind.__name__}:") and why in str(caught.value)


def test_a_description_that_is_none_is_named(tmp_path):
    for text, why in (
        ("[1]", "holds no object"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\udc80", "is no JSON"),
    ):
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=f"config.json {why}"):
            described_in(tmp_path)


def test_records_that_are_none_are_named_with_their_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2')
    assert [(record.step, record.metrics) for record in read_records(path)] == [(1, {"loss": 2.5})]
    for line in ("[]", "{}", '{"step": "1"}', '{"step": 1, "loss": []}', '{"step": null}', "x", "[" * 100_000):
        path.write_text('{"step": 1, "loss": 2.5}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no record"):
            read_records(path)
