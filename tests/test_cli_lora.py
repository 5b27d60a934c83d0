"""A run with adapters on the command line: trained from imported weights, evaluated, generated from, exported merged."""

import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.base import named_leaves
from axonml_jax.config.sections import LoraConfig
from axonml_jax.model.lora import lora_functional
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import pretrained, pretrained_config, write_pretrained

pytest.importorskip("safetensors")

CONFIG = TransformerConfig(vocab_size=256, num_layers=2, hidden_size=16, num_heads=2, max_length=32, mlp_hidden_size=24)
LORA = {"rank": 2, "alpha": 8.0, "targets": ["attention/(query|value)/kernel$", "mlp/up/kernel$"], "base": "int8"}


@pytest.mark.slow
def test_a_run_with_adapters_is_trained_evaluated_generated_from_and_exported_merged(tmp_path, capsys):
    model = Transformer(CONFIG, rngs=nnx.Rngs(3))
    write_pretrained(tmp_path / "published", CONFIG, ax.DDP(model, mesh_of(data=1)).state_dict())
    run = tmp_path / "imported"
    assert main(["import", str(tmp_path / "published"), str(run)]) == 0
    lines = [json.dumps({"prompt": f"{i}+1=", "completion": f"{i + 1}."}) + "\n" for i in range(80)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))
    content = yaml.safe_load((run / "config.yaml").read_text()) | {
        "finetune": {"lora": LORA},
        "mesh": {"fsdp": 4, "data": 2},
        "data": {
            "path": str(tmp_path / "sums.jsonl"),
            "prompt_field": "prompt",
            "completion_field": "completion",
            "length": 16,
        },
        "optim": {"learning_rate": 0.01},
        "sample": {"count": 0},
        "output": {"dir": str(tmp_path / "runs"), "plot": False},
        "checkpoint": {"every": 2},
        "ema": {"decay": 0.5},
    }
    content["train"] |= {"steps": 2, "global_batch_size": 8}
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", str(run / "config.yaml")]) == 0
    said = capsys.readouterr().out
    assert "parameters train: rank 2, alpha 8.0, attention/(query|value)/kernel$" in said
    assert "the base of these rests as int8" in said
    trained = tmp_path / "runs" / "imported"
    assert main(["eval", str(trained), "--mesh.data=1", "--mesh.fsdp=8", "--json"]) == 0
    valid = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert valid == pytest.approx(records[-1]["valid_loss"], rel=1e-5)
    assert main(["generate", str(trained), "--prompt", "1+1=", "--length", "2", "--temperature", "0"]) == 0
    assert main(["export", str(trained), str(tmp_path / "out")]) == 0
    written, before = ax.load_safetensors(tmp_path / "out"), ax.load_safetensors(tmp_path / "published")
    changed = {name for name in before if not np.array_equal(before[name], written[name])}
    ends = ("q_proj.weight", "v_proj.weight", "up_proj.weight")
    assert written.keys() == before.keys() and changed == {name for name in before if name.endswith(ends)}
    assert main(["export", str(trained), str(tmp_path / "average"), "--ema"]) == 0
    average = ax.load_safetensors(tmp_path / "average")
    assert {name for name in before if not np.array_equal(average[name], written[name])} == changed
    config = pretrained_config(tmp_path / "published", scan_layers=True)
    ours = ax.FSDP(ax.lora(Transformer(config, rngs=nnx.Rngs(0)), **LORA), mesh_of(fsdp=4))
    ax.restore(trained / "checkpoints" / "step_00000002", ours)
    tokens = np.arange(32, dtype=np.int32).reshape(4, 8)
    np.testing.assert_allclose(pretrained(tmp_path / "out")(tokens), ours(tokens), atol=1e-5)


def test_without_targets_every_matrix_of_attention_and_of_all_experts_gets_adapters():
    experts = ExpertsConfig(num_experts=4, inner_size=8, shared_size=8, first_dense=1)
    config = replace(CONFIG, experts=experts, scan_layers=False)
    view, given = functionalize(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    adapters, _ = lora_functional(view, given, LoraConfig(rank=2).build(0))
    others = {name for name in named_leaves(given.params) if name not in adapters.adapters}
    assert all(re.search("norm/|router/|embed|position|head/|bias$", name) for name in others), sorted(others)
    assert sum("mlp/shared/" in name for name in adapters.adapters) == 3


def test_what_does_not_go_with_adapters_is_refused(tmp_path, capsys):
    sizes = {"vocab_size": 256, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "max_length": 128}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": sizes, "devices": {"simulated": jax.device_count()}}))

    def refused(command, *flags):
        assert main([command, str(path), *flags]) == 2
        return capsys.readouterr().err

    said = refused("train", "--finetune.lora.rank=9", '--finetune.lora.targets=["nowhere", "up/kernel", "norm"]')
    assert "'nowhere' matches no parameter" in said and "rank 9 is above its smaller side" in said
    assert "blocks/0/attention_norm/scale (8,): is no matrix" in said
    assert "finetune.lora.alpha has no effect without rank" in refused("train", "--finetune.lora.alpha=2")
    assert "finetune.lora.base has no effect without rank" in refused("train", "--finetune.lora.base=int8")
    assert "base='int4' must be one of 'int8'" in refused(
        "train", "--finetune.lora.rank=2", "--finetune.lora.base=int4"
    )
    assert "finetune.lora.stacked has no effect" in refused("train", '--finetune.lora.stacked=["up"]')
    assert "finetune.lora.dims has no effect without rank" in refused("train", "--finetune.lora.dims={a: in out}")
    wrong = refused("train", "--finetune.lora.rank=2", "--finetune.lora.dims={kernel: row out}")
    assert "dims: 'row out' must be made of the words stack, in, out" in wrong
    wrong = refused("train", "--finetune.lora.rank=2", "--finetune.lora.dims=[in]")
    assert "must be a mapping such as {query/kernel: in out out}, or null" in wrong
    (tmp_path / "text.txt").write_text("a short text. " * 900)
    own = (f"--data.path={tmp_path / 'text.txt'}", f"--output.dir={tmp_path / 'runs'}", "--train.global_batch_size=8")
    said = refused("train", "--finetune.lora.rank=2", *own)
    assert "without train.weights the transformer that they adapt is random" in said and "--resume FOLDER" in said
    assert not (tmp_path / "runs").exists()
    assert "cannot predict what a step with adapters keeps for its backward" in refused(
        "explain", "--finetune.lora.rank=2", "--max-memory=1GB"
    )
