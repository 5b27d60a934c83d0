"""`axonml-jax import`, `train` from what it made, `export` of what that trained."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.config.config import read_config
from axonml_jax.layers.options import RopeScaling
from axonml_jax.models.config import GEMMA, ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import read_pretrained, write_pretrained

pytest.importorskip("safetensors")

SIZES = {"vocab_size": 256, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_length": 64, "mlp_hidden_size": 24}
LLAMA = TransformerConfig(
    **SIZES, num_kv_heads=1, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_length=16)
)
MODELS = {
    "llama": LLAMA,
    "gpt_oss": TransformerConfig(
        **SIZES, sinks=True, use_bias=True, window=5, full_every=2,
        experts=ExpertsConfig(num_experts=4, router_bias=True, activation="clamped_swiglu"),
    ),
    "gemma3": TransformerConfig(
        **SIZES, **GEMMA, num_kv_heads=1, qk_norm=True, window=5, full_every=2, query_scalar=8, rope_theta=1e6,
        window_rope_theta=1e4,
    ),
}  # fmt: skip


@pytest.fixture
def published(tmp_path):
    """A function that writes a random model of a kind, with a tokenizer; its folder."""

    def write(kind):
        model = Transformer(MODELS[kind], rngs=nnx.Rngs(3))
        values = ax.DDP(model, ax.make_mesh(data=1, devices=jax.devices()[:1])).state_dict()
        write_pretrained(tmp_path / kind, MODELS[kind], values, shard_bytes=20_000)
        (tmp_path / kind / "tokenizer.json").write_text("{}")
        return tmp_path / kind

    return write


def train(run, tmp_path, *more):
    text = tmp_path / "text"
    text.mkdir(exist_ok=True)
    (text / "a.txt").write_text("the cat sat on the mat. " * 400)
    settings = {
        "data.path": text, "data.length": 16, "data.valid_fraction": 0.2, "train.steps": 2, "train.global_batch_size": 8,
        "train.eval_batches": 1, "sample.count": 0, "output.dir": tmp_path / "runs", "output.plot": "false",
        "optim.weight_decay": 0, "optim.learning_rate": 1e-9, "checkpoint.every": 2,
    }  # fmt: skip
    return main(["train", str(run / "config.yaml"), *(f"--{key}={value}" for key, value in settings.items()), *more])


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("llama", ["--mesh.fsdp=4", "--mesh.tensor=2"]), ("gpt_oss", ["--mesh.expert=4", "--mesh.tensor=2"])],
)
@pytest.mark.slow
def test_what_is_imported_is_trained_from_and_exported_again(kind, mesh, published, tmp_path, capsys):
    """With a learning rate of next to nothing the same weights come out; in between they are trained on eight devices."""
    folder, run = published(kind), tmp_path / "imported"
    assert main(["import", str(folder), str(run)]) == 0
    said = capsys.readouterr().out
    assert f"{MODELS[kind].num_params:,} parameters" in said and f"axonml-jax train {run / 'config.yaml'}" in said
    content = yaml.safe_load((run / "config.yaml").read_text())
    assert content["train"]["weights"] == str(run / "weights") and "norm" not in content["model"]
    assert "text is read as bytes: " in said and "tokenizer" not in content.get("data", {})  # "{}" is none
    assert content["model"].get("scan_layers", False) == (kind == "llama")
    assert train(run, tmp_path, "--mesh.data=1", *mesh) == 0
    capsys.readouterr()
    trained = tmp_path / "runs" / "imported"
    assert main(["export", str(trained), str(tmp_path / "out"), "--shard-size", "20KB"]) == 0
    said = capsys.readouterr().out
    assert "step_00000002" in said and "tokenizer.json" in said and "model.safetensors.index.json" in said
    before, after = ax.load_safetensors(folder), ax.load_safetensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=0, atol=1e-7, err_msg=name)
    described = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out")]
    assert described[0] == described[1]
    newest = trained / "checkpoints" / "step_00000002"
    assert main(["export", str(newest), str(tmp_path / "half"), "--dtype=bfloat16"]) == 0
    config, values = read_pretrained(tmp_path / "half")
    assert {value.dtype.name for value in values.values()} == {"bfloat16"} and config.num_params == MODELS[
        kind
    ].num_params
    assert train(run, tmp_path, "--mesh.data=-1", "--resume=auto", "--train.steps=3") == 0
    assert "resumed after step 2" in capsys.readouterr().out


def refusal(capsys, *argv):
    assert main([str(each) for each in argv]) == 2
    _, err = capsys.readouterr()
    assert "Traceback" not in err
    return err


def test_the_tokenizer_that_is_imported_is_the_datas(published, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    folder, run = published("llama"), tmp_path / "imported"
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1}, unk_token="the"))
    words.save(str(folder / "tokenizer.json"))
    assert main(["import", str(folder), str(run)]) == 0
    file = str(run / "weights" / "tokenizer.json")
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["tokenizer"] == file
    said = capsys.readouterr().out
    assert f"tokens     {file}" in said and "--data.path TEXT" in said
    config = read_config("train", [str(run / "config.yaml"), "--data.path", str(folder)])
    assert config.data.tokenizer == file and config.data.documents


def test_what_cannot_be_imported_or_exported_is_refused_with_the_remedy(published, tmp_path, capsys):
    folder, run = published("llama"), tmp_path / "imported"
    assert "has no config.json: give a folder that save_pretrained wrote" in refusal(capsys, "import", tmp_path, run)
    assert main(["import", str(folder), str(run)]) == 0
    assert f"{run} has files already: give a new folder" in refusal(capsys, "import", folder, run)
    said = refusal(capsys, "train", run / "config.yaml", "--model.rope_theta=5", "--model.window=3")
    assert "train.weights: " in said and "model.window=3, there None; model.rope_theta=5.0, there 10000.0" in said
    said = refusal(capsys, "train", run / "config.yaml", "--train.weights=none")
    assert "train.weights: none has no config.json" in said
    assert "holds no checkpoint: give one of a run" in refusal(capsys, "export", tmp_path, tmp_path / "out")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "config.yaml").write_text("checkpoint: {url: s3://bucket/run}")
    said = refusal(capsys, "export", tmp_path / "far", tmp_path / "out")
    assert "holds no checkpoint (ax.restore reads those at s3://bucket/run in Python): give" in said
    assert "has files already: give a new folder" in refusal(capsys, "export", checkpoint(tmp_path / "lone"), folder)
    said = refusal(capsys, "export", tmp_path / "lone", tmp_path / "out")
    assert "is in no run's folder: its config.yaml, which describes the model" in said
    small = dataclasses.replace(LLAMA, vocab_size=20)
    model = ax.DDP(Transformer(small, rngs=nnx.Rngs(0)), ax.make_mesh(data=1, devices=jax.devices()[:1]))
    write_pretrained(tmp_path / "small", small, model)
    assert "model.vocab_size=20: bytes need at least 256" in refusal(
        capsys, "import", tmp_path / "small", tmp_path / "no"
    )
    assert not (tmp_path / "no").exists()
    described = json.loads((folder / "config.json").read_text()) | {"hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(described))
    assert "cannot be this llama: hidden_act='relu'" in refusal(capsys, "import", folder, tmp_path / "no")


def checkpoint(path):
    return ax.save(path, {"a": np.ones(2)})


def test_an_imported_configuration_reads_back(published, tmp_path):
    assert main(["import", str(published("gpt_oss")), str(tmp_path / "imported")]) == 0
    config = read_config("train", [str(tmp_path / "imported" / "config.yaml")])
    wanted = MODELS["gpt_oss"]
    assert config.name == "imported" and config.data.length == 64
    gemma = MODELS["gemma3"]
    assert main(["import", str(published("gemma3")), str(tmp_path / "gemma")]) == 0
    assert read_config("train", [str(tmp_path / "gemma" / "config.yaml")]).model == gemma
    assert config.model == dataclasses.replace(wanted, num_kv_heads=2, experts=config.experts)
    assert config.experts == dataclasses.replace(wanted.experts, load_balance=config.experts.load_balance)
