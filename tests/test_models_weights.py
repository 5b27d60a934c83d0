"""Published weights go into models on meshes and back array by array: a process holds its own part and one array more."""

import dataclasses
import functools
import gc
import json
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from meshes import mesh_of
from workers.launch import launch

import axonml_jax as ax
from axonml_jax.models.config import GEMMA, GPT2, ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import load_pretrained, pretrained_config, read_pretrained, write_pretrained

pytest.importorskip("safetensors")

SIZES = {"vocab_size": 20, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "max_length": 8, "mlp_hidden_size": 12}
CONFIGS = {
    "gpt2": TransformerConfig(**GPT2 | SIZES),
    "qwen3": TransformerConfig(**SIZES, num_kv_heads=2, head_dim=6, qk_norm=True),
    "gemma2": TransformerConfig(
        **SIZES, **GEMMA, head_dim=6, window=3, full_every=2, query_scalar=5, attention_softcap=2.0, logit_softcap=3.0
    ),
    "mixtral": TransformerConfig(**SIZES, experts=ExpertsConfig(num_experts=4)),
    "gpt_oss": TransformerConfig(
        **SIZES, sinks=True, use_bias=True, window=3, full_every=2,
        experts=ExpertsConfig(num_experts=4, router_bias=True, activation="clamped_swiglu"),
    ),
}  # fmt: skip
# (model, changes, mesh, plan)
ROWS = {
    "one device": ("gpt2", {}, {"data": 1}, {}),
    "padded shards": ("gpt2", {}, {"fsdp": 3}, {}),
    "shards of padding alone": ("gpt2", {}, {"fsdp": 7}, {}),
    "tensor and fsdp, bfloat16": ("qwen3", {"param_dtype": "bfloat16"}, {"fsdp": 2, "tensor": 2}, {}),
    "a stack": ("qwen3", {"scan_layers": True}, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
    "stages": ("qwen3", {}, {"pipe": 2, "fsdp": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "on the host": ("gpt2", {}, {"fsdp": 2}, {"offload": ax.CPUOffload.FULL}),
    "stages with a tied table": ("gemma2", {}, {"pipe": 2, "tensor": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "3-D": ("gpt2", {"split": "grid"}, {"data": 1, "row": 2, "col": 2, "depth": 2}, {}),
    "experts in a stack": ("mixtral", {"scan_layers": True}, {"fsdp": 2, "expert": 2}, {}),
    "experts side by side": ("gpt_oss", {}, {"expert": 4, "tensor": 2}, {}),
}


@functools.cache
def written(kind, place):
    config, folder = CONFIGS[kind], place / kind
    model = Transformer(config, rngs=nnx.Rngs(5))
    draw = iter(jax.random.split(jax.random.key(1), 200))  # biases and norms too
    nnx.update(
        model, jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(draw), x.shape), nnx.state(model, nnx.Param))
    )
    write_pretrained(folder, config, ax.DDP(model, mesh_of(data=1)).state_dict(), shard_bytes=4000)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plain_module_is_written_as_its_state_dict_is(kind, tmp_path):
    config = CONFIGS[kind]
    module = Transformer(config, rngs=nnx.Rngs(5))
    model = ax.DDP(module, mesh_of(data=1))
    for name, values in {"state_dict": model.state_dict(), "plain": module, "module": model.module}.items():
        write_pretrained(tmp_path / name, config, values)
    files = [{each.name: each.read_bytes() for each in folder.iterdir()} for folder in tmp_path.iterdir()]
    assert files[0] == files[1] == files[2] and len(files[0]) == 2


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.slow
def test_weights_go_into_every_layout_and_back(name, place, tmp_path):
    kind, changes, degrees, plan = ROWS[name]
    folder = written(kind, place)
    config = pretrained_config(folder, **changes)
    model = ax.parallelize(lambda: Transformer(config, rngs=nnx.Rngs(0)), mesh_of(**degrees), ax.Plan(**plan))
    load_pretrained(model, folder)
    _, wanted = read_pretrained(folder, **changes)
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value, wanted[key].astype(value.dtype), err_msg=key)
    write_pretrained(tmp_path, config, model, shard_bytes=3100)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(names) > 1 and set(index["weight_map"].values()) == set(names)
    arrays = ax.load_safetensors(tmp_path)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in arrays.values())
    sizes = [
        sum(ax.load_safetensors(tmp_path / each)[key].nbytes for key in keys) for each, keys in by_file(index).items()
    ]
    assert max(sizes) <= 3100 and sum(sizes) == index["metadata"]["total_size"]
    for key, value in ax.load_safetensors(folder).items():
        np.testing.assert_array_equal(arrays[key], value.astype(arrays[key].dtype), err_msg=key)


def by_file(index):
    found = {}
    for key, name in index["weight_map"].items():
        found.setdefault(name, []).append(key)
    return found


def peak_of(action):
    """Traced bytes at the peak beyond those before: the least of three, as caches and other threads take some too."""
    peaks, thresholds = [], gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own: the test run collects more rarely
    for _ in range(3):
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    gc.set_threshold(*thresholds)
    return min(peaks)


def off_the_line(shape, dtype=float, empty=np.empty):
    """`np.empty` that never begins at a multiple of 64 bytes: a CPU device takes such an array over instead of copying it."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = empty(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + dtype.itemsize
    return raw[start : start + size].view(dtype).reshape(shape)


@pytest.mark.slow
def test_devices_read_their_own_parts_and_no_more_than_an_array_is_held(tmp_path, monkeypatch):
    """Every byte is read once for four devices, and never more than a few arrays are in host memory."""
    config = TransformerConfig(vocab_size=1024, num_layers=10, hidden_size=256, num_heads=4, max_length=8)
    write_pretrained(tmp_path, config, ax.DDP(Transformer(config, rngs=nnx.Rngs(0)), mesh_of(data=1)).state_dict())
    whole = 4 * config.num_params
    largest = 4 * max(config.vocab_size, config.mlp_size) * config.hidden_size
    config = dataclasses.replace(config, scan_layers=False)
    model = ax.FSDP(lambda: Transformer(config, rngs=nnx.Rngs(1)), mesh_of(fsdp=4))
    load_pretrained(model, tmp_path)
    monkeypatch.setattr(np, "empty", off_the_line)
    tracemalloc.start()
    try:
        assert whole <= load_pretrained(model, tmp_path) <= 1.01 * whole
        reading = peak_of(lambda: load_pretrained(model, tmp_path))
        writing = peak_of(lambda: write_pretrained(tmp_path / "back", config, model))
    finally:
        tracemalloc.stop()
    assert max(reading, writing) < 3 * largest + 2**20 < whole / 4, (
        reading,
        writing,
        largest,
        whole,
    )  # MiB: names, headers


@pytest.mark.slow
def test_each_of_two_processes_reads_its_half(place, tmp_path):
    folder = written("mixtral", place)
    script = Path(__file__).parent / "workers" / "weights_rank.py"
    ends = launch(str(script), 2, 240, str(folder), str(tmp_path))
    assert [code for code, _, _ in ends] == [0, 0], "\n".join(error[-3000:] for _, _, error in ends)
    whole = sum(value.nbytes for value in ax.load_safetensors(folder).values())
    shares = [json.loads(out.splitlines()[-1]) / whole for _, out, _ in ends]
    assert all(0.5 <= share < 0.55 for share in shares), shares  # norms and routers are padded to divide
    for key, value in ax.load_safetensors(tmp_path).items():
        np.testing.assert_array_equal(value, ax.load_safetensors(folder)[key].astype(value.dtype), err_msg=key)


def test_weights_of_another_model_and_folders_with_other_arrays_are_refused(place, tmp_path):
    folder = written("qwen3", place)
    model = ax.DDP(Transformer(dataclasses.replace(CONFIGS["qwen3"], vocab_size=24), rngs=nnx.Rngs(0)), mesh_of(data=1))
    with pytest.raises(ValueError, match=r"embed/embedding: shape \(24, 8\), there \(20, 8\)"):
        load_pretrained(model, folder)
    other = ax.DDP(Transformer(CONFIGS["gpt2"], rngs=nnx.Rngs(0)), mesh_of(data=1))
    with pytest.raises(ValueError, match=r"attention/query_norm/scale: the model has none"):
        load_pretrained(other, folder)
    untied = ax.DDP(
        Transformer(dataclasses.replace(CONFIGS["gpt2"], tie_embeddings=False), rngs=nnx.Rngs(0)), mesh_of(data=1)
    )
    with pytest.raises(ValueError, match=r"head/kernel: the folder has none"):
        load_pretrained(untied, written("gpt2", place))
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: give a folder that save_pretrained wrote"):
        load_pretrained(other, tmp_path)
    ax.save_safetensors(tmp_path / "other.safetensors", {"a": np.ones(2)})
    small = dataclasses.replace(CONFIGS["gpt2"], mlp_hidden_size=16)
    with pytest.raises(
        ValueError, match=r"(?s)not of the configuration given:.*up/kernel: shape \(8, 12\), not \(8, 16\)"
    ):
        write_pretrained(tmp_path / "small", small, other)
    with pytest.raises(ValueError, match=r"(?s)not of the configuration given:.*query_norm/scale: missing"):
        write_pretrained(tmp_path / "qwen", CONFIGS["qwen3"], other.module)
    with pytest.raises(TypeError, match=r"write_pretrained: give a flax\.nnx\.Module or arrays by name, not a int"):
        write_pretrained(tmp_path / "number", CONFIGS["gpt2"], 3)
    assert not list(tmp_path.glob("*/"))
    with pytest.raises(ValueError, match=r"has other arrays, which readers would take too: remove other\.safetensors"):
        write_pretrained(tmp_path, CONFIGS["gpt2"], other)
    assert not (tmp_path / "config.json").exists()
