"""From published weights to published weights: a Llama checkpoint finetuned by LoRA under FSDP, evaluated, sampled, exported.

    python examples/finetune_llama.py [FOLDER]

The commands are those of `axonml-jax`, run in one process on four simulated devices. The checkpoint is a small random one in
Hugging Face's format, made without PyTorch; of the JSON-lines file only completions are learned. Shows that the exported model
has the logits of the sharded one with its adapters apart, and, where torch and transformers are installed (or
AXONML_TRANSFORMERS_PYTHON names a Python that has them), that theirs are the same.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from flax import nnx

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import pretrained, pretrained_config, write_pretrained

ax.fake_devices(4)
here = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
LORA = {"rank": 8, "alpha": 32, "targets": ["attention/.*kernel$", "mlp/.*kernel$", "head/kernel$"]}
TORCH = """
import sys, numpy, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
numpy.save(sys.argv[2], model(torch.tensor(numpy.load(sys.argv[2]))).logits.detach().numpy())
"""


def run(*command):
    print("\n$ axonml-jax", *command, flush=True)
    assert main([*map(str, command)]) == 0


# A checkpoint as `save_pretrained` of a Llama writes it, and text to finetune it on.
config = TransformerConfig(vocab_size=256, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, max_length=64)
write_pretrained(here / "llama", config, ax.DDP(Transformer(config, rngs=nnx.Rngs(0))))
pairs = [{"prompt": f"{a} plus {b} is ", "completion": f"{a + b}."} for a in range(30) for b in range(20)]
(here / "sums.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
run("import", here / "llama", here / "imported")
file, trained = here / "imported" / "config.yaml", here / "runs" / "imported"
settings = yaml.safe_load(file.read_text()) | {
    "mesh": {"fsdp": 4, "data": 1},
    "data": {"path": f"{here}/sums.jsonl", "prompt_field": "prompt", "completion_field": "completion", "length": 64},
    "finetune": {"lora": LORA},
    "optim": {"learning_rate": 0.01},
    "sample": {"count": 0},
    "output": {"dir": str(here / "runs"), "plot": False},
}
settings["train"].update(steps=60, global_batch_size=16)
file.write_text(yaml.safe_dump(settings))
run("train", file)
run("eval", trained)
run("generate", trained, "--prompt", "3 plus 4 is ", "--length", 3, "--temperature", 0)
run("export", trained, here / "exported")
tokens = np.arange(32, 96, dtype=np.int32).reshape(4, 16)
own = pretrained_config(here / "llama", scan_layers=True)  # as import writes it
adapted = ax.FSDP(ax.lora(lambda: Transformer(own, rngs=nnx.Rngs(0)), **LORA), ax.make_mesh(fsdp=4))
ax.restore(max((trained / "checkpoints").glob("step_*")), adapted)
logits = {"the sharded model with its adapters": adapted(tokens)}
python = os.environ.get("AXONML_TRANSFORMERS_PYTHON") or (importlib.util.find_spec("torch") and sys.executable)
if python:
    np.save(here / "logits.npy", tokens)
    subprocess.run([python, "-c", TORCH, here / "exported", here / "logits.npy"], check=True)
    logits["transformers"] = np.load(here / "logits.npy")
records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
assert records[-1]["valid_loss"] < records[0]["loss"] - 1
for whose, each in logits.items():
    np.testing.assert_allclose(pretrained(here / "exported")(tokens), each, atol=1e-4, err_msg=whose)
    print("the exported model has the logits of", whose)
