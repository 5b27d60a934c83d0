"""Rows that hold several documents: each document has the logits and the loss that it has alone, under every plan."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.layers import kernels as fused
from axonml_jax.layers.attention import attend
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.testing.equality import assert_equals_single_device

WORDS, LENGTH = 24, 32
LLAMA = {"num_kv_heads": 2, "position": "rotary"}
GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "tie_embeddings": True, "use_bias": True}


def model_of(**options):
    config = {"vocab_size": WORDS, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_length": LENGTH}
    return Transformer(TransformerConfig(**config | {"param_dtype": "float64"} | options), rngs=nnx.Rngs(0))


def documents(sizes, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, WORDS, size + 1).astype(np.int32) for size in sizes]


def packed(rows):
    """Documents of n + 1 tokens, n places each, as rows: padding is segment 0, whose tokens are anything."""
    batch = {name: np.zeros((len(rows), LENGTH), np.int32) for name in ("segment_ids", "positions")}
    batch["tokens"], batch["targets"] = np.full((len(rows), LENGTH), 3, np.int32), np.full((len(rows), LENGTH), -1)
    for i, row in enumerate(rows):
        start = 0
        for number, ids in enumerate(row, start=1):
            place = slice(start, start := start + len(ids) - 1)
            batch["tokens"][i, place], batch["targets"][i, place] = ids[:-1], ids[1:]
            batch["segment_ids"][i, place], batch["positions"][i, place] = number, np.arange(len(ids) - 1)
    return batch | {"targets": batch["targets"].astype(np.int32)}


ROWS = [documents([7, 1, 20], 0), documents([32], 1), documents([15, 16], 2), documents([5, 4, 3, 2], 3)]
OPTIONS = {
    "rotary": LLAMA,
    "learned": GPT2,
    "rotary, by blocks": LLAMA | {"attention": "blocks"},
    "learned, scanned, in chunks of words": GPT2 | {"scan_layers": True, "loss_chunk": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_document_has_the_logits_and_the_loss_that_it_has_alone(name):
    model = model_of(**OPTIONS[name])
    batch = packed(ROWS)
    total, weight = jax.jit(lambda batch: model.loss(**batch))(batch)
    logits = jax.jit(lambda tokens, segment_ids, positions, targets: model(
        tokens, segment_ids=segment_ids, positions=positions))(**batch)  # fmt: skip
    alone = jax.jit(lambda tokens, targets: (model(tokens), *model.loss(tokens, targets)))
    expected, count = 0.0, 0
    for i, row in enumerate(ROWS):
        start = 0
        for ids in row:
            own, loss, number = alone(ids[None, :-1], ids[None, 1:])
            np.testing.assert_allclose(logits[i, start : start + len(ids) - 1], own[0], atol=1e-12)
            start, expected, count = start + len(ids) - 1, expected + loss, count + number
    np.testing.assert_allclose([total, weight], [expected, count], rtol=1e-12)


def loss(model, batch):
    return ax.WeightedMean(*model.loss(**batch))


PLANS = {
    "scanned": ({"data": 2}, {}, LLAMA | {"scan_layers": True}),
    "zero3, scanned": ({"fsdp": 2}, {}, LLAMA | {"scan_layers": True}),
    "zero3, remat, accumulated": ({"data": 2, "fsdp": 2}, {"remat": "full", "accumulate": 2}, GPT2),
    "sequence parallel": ({"tensor": 2}, {}, GPT2 | {"sequence_parallel": True}),
    "grid": ({"row": 2, "col": 2}, {}, LLAMA | {"split": "grid"}),
    "1f1b": ({"pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}, LLAMA),
    "zigzag": ({"data": 2, "context": 2}, {}, GPT2),
    "striped ring and tensor": (
        {"context": 2, "tensor": 2},
        {"context": ax.Context(method="ring", order="striped")},
        LLAMA,
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_packed_rows_train_as_on_one_device(plan):
    degrees, settings, options = PLANS[plan]
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    batches = [packed(ROWS * 2), packed([*ROWS[2:], *ROWS[:2]] * 2)]
    assert_equals_single_device(model_of(**options), loss, batches, ax.Plan(**settings), mesh=mesh)


def test_the_splash_kernel_keeps_segments_apart():
    """Interpreted: the kernel's own code, on CPU."""
    draw = np.random.default_rng(0).normal
    query, key, value = (jnp.asarray(draw(size=(2, 256, 2, 128)), jnp.float32) for _ in range(3))
    ids = jnp.asarray(np.stack([np.repeat([1, 2, 0], [100, 90, 66]), np.repeat([1, 2], [5, 251])]), jnp.int32)
    kernel = partial(fused._splash, causal=True, interpret=True)
    with jax.enable_x64(False):
        found = jax.jit(kernel)(query, key, value, ids)
        right = attend(query, key, value, causal=True, segment_ids=ids)
    np.testing.assert_allclose(found, right, rtol=2e-3, atol=2e-3)
    assert np.abs(right - attend(query, key, value, causal=True)).max() > 0.1


def test_what_does_not_fit_is_refused(monkeypatch):
    model, batch = model_of(), packed(ROWS)
    with pytest.raises(ValueError, match=r"segment_ids \(4, 31\) must have the shape of tokens, \(4, 32\)"):
        model.loss(**batch | {"segment_ids": batch["segment_ids"][:, 1:]})
    monkeypatch.setattr(fused, "varying_axes", lambda x: frozenset())
    monkeypatch.setattr(fused, "_alone", lambda: True)
    monkeypatch.setattr(fused, "target_platform", lambda: "cuda")
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    choose = partial(fused.attention_kernel, query=x, key=x, value=x, drops=False)
    assert choose("auto") == "cudnn" and choose("auto", segmented=True) == "xla"
    long = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16)
    assert fused.attention_kernel("auto", long, long, long, drops=False, segmented=True) == "blocks"
    with pytest.raises(ValueError, match="does not keep the documents of a row apart"):
        choose("cudnn", segmented=True)
    with pytest.raises(ValueError, match="heads are of one size, and queries have 64 numbers, values 32"):
        choose("cudnn", value=jax.ShapeDtypeStruct((2, 256, 4, 32), jnp.bfloat16))
