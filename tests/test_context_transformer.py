"""The library's transformer under `ax.Context`: it trains, evaluates and generates as on one device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.testing.equality import assert_equals_single_device

WORDS, ROWS = 24, 8


def model_of(**options):
    config = {"vocab_size": WORDS, "num_layers": 1, "hidden_size": 16, "num_heads": 4, "max_length": 32} | options
    return Transformer(TransformerConfig(**config), rngs=nnx.Rngs(0, dropout=1))


LLAMA = {"num_kv_heads": 2, "position": "rotary"}
GPT_OSS = {
    "num_layers": 2, "num_kv_heads": 2, "head_dim": 6, "qk_norm": True, "window": 6, "full_every": 2, "sinks": True,
    "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=8),
}  # fmt: skip
GEMMA = {
    "num_layers": 2, "num_kv_heads": 2, "window": 6, "full_every": 2, "window_rope_theta": 50.0, "query_scalar": 6,
    "attention_softcap": 0.05, "logit_softcap": 0.3, "post_norms": True, "zero_centered_norm": True, "activation": "geglu",
    "tie_embeddings": True, "scale_embeddings": True,
}  # fmt: skip
LATENT = {
    "num_layers": 2, "latent": LatentConfig(kv_rank=6, query_rank=5, plain_size=4, rotary_size=2, value_size=3),
}  # fmt: skip
GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "tie_embeddings": True, "use_bias": True}


def loss(model, batch):
    """The next token of most positions; the last rank may have nothing but padding."""
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def batch_of(seed, length=16):
    ids = np.random.default_rng(seed).integers(0, WORDS, (ROWS, length + 1)).astype(np.int32)
    ends = np.array([3, 5, 2, 7, 4, 6, 8, 1])
    targets = np.where(np.arange(length) < ends[:, None], ids[:, 1:], -1)
    return {"tokens": ids[:, :-1], "targets": targets}


# mesh, plan, model
PLANS = {
    "ring": ({"context": 4}, {"context": ax.Context(method="ring")}, LLAMA),
    "gather, contiguous": ({"context": 2}, {"context": ax.Context(method="gather", order="contiguous")}, GPT2),
    "ulysses, striped": ({"context": 4}, {"context": ax.Context(method="ulysses", order="striped")}, GPT2),
    "2 x ring, typed": ({"context": 4}, {"context": ax.Context(method=(2, "ring")), "check_vma": True}, LLAMA),
    "data, accumulated": ({"data": 2, "context": 2}, {"accumulate": 2}, LLAMA),
    "zero3": ({"fsdp": 2, "context": 2}, {}, LLAMA | {"scan_layers": True, "num_layers": 2}),
    "zero3 over both": ({"fsdp": 2, "context": 2}, {"context": ax.Context(shard=True)}, GPT2),
    "zero2 over both, typed": (
        {"fsdp": 2, "context": 2},
        {"context": ax.Context(shard=True), "fsdp": ax.Shard(stage=2), "check_vma": True},
        LLAMA,
    ),
    "tensor": ({"context": 2, "tensor": 2}, {}, LLAMA),
    "sequence parallel": (
        {"context": 2, "tensor": 2},
        {"context": ax.Context(method="ring")},
        LLAMA | {"sequence_parallel": True},
    ),
    "grid": ({"context": 2, "row": 2, "col": 2}, {}, LLAMA | {"split": "grid"}),
    "1f1b": ({"pipe": 2, "context": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}, LLAMA | {"num_layers": 2}),
    "zero bubble, typed": (
        {"pipe": 2, "context": 2},
        {"pipe": ax.Pipelined(schedule="zero-bubble", num_microbatches=2), "check_vma": True},
        GPT2 | {"num_layers": 2},
    ),
    "remat": ({"data": 2, "context": 2}, {"remat": "full"}, LLAMA),
    "offload": ({"data": 2, "context": 2}, {"offload": ax.CPUOffload.FULL}, LLAMA),
    "windows and sinks, ring": ({"context": 4}, {"context": ax.Context(method="ring"), "check_vma": True}, GPT_OSS),
    "windows and sinks, ulysses": (
        {"context": 2, "tensor": 2},
        {"context": ax.Context(method="ulysses", order="contiguous")},
        GPT_OSS,
    ),
    "windows and sinks, 1f1b, ring": (
        {"pipe": 2, "context": 2},
        {"pipe": ax.Pipelined(num_microbatches=2), "context": ax.Context(method="ring")},
        GPT_OSS,
    ),
    "capped scores, ring": ({"context": 4}, {"context": ax.Context(method="ring"), "check_vma": True}, GEMMA),
    "capped scores, 1f1b": (
        {"pipe": 2, "context": 2},
        {"pipe": ax.Pipelined(num_microbatches=2), "context": ax.Context(method="ulysses")},
        GEMMA,
    ),
    "latents, ring": ({"context": 4}, {"context": ax.Context(method="ring"), "check_vma": True}, LATENT),
    "latents, ulysses": (
        {"context": 2, "tensor": 2},
        {"context": ax.Context(method="ulysses")},
        LATENT | {"sequence_parallel": True},
    ),
    "latents, 1f1b": (
        {"pipe": 2, "context": 2},
        {"pipe": ax.Pipelined(num_microbatches=2), "context": ax.Context(method="gather")},
        LATENT,
    ),
    "chunks of words": ({"context": 2, "tensor": 2}, {}, LLAMA | {"loss_chunk": 7}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_it_trains_as_on_one_device(plan):
    degrees, settings, options = PLANS[plan]
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    batches = [batch_of(seed) for seed in range(2)]
    assert_equals_single_device(
        model_of(param_dtype="float64", **options), loss, batches, ax.Plan(**settings), mesh=mesh, max_grad_norm=0.5
    )


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"context": 4}, LLAMA),
        ({"context": 2, "tensor": 2}, LLAMA | {"sequence_parallel": True}),
        ({"fsdp": 1, "context": 2}, GPT2),
        ({"context": 2}, LATENT),
    ],
)
@pytest.mark.slow
def test_masks_of_dropout_are_those_of_one_device(degrees, options):
    """One rank of rows, so that one device draws the same keys."""
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    make = lambda: model_of(dropout=0.3, param_dtype="float64", **options)
    batches = [batch_of(seed) for seed in range(2)]
    runs = []
    for where in (mesh, ax.make_mesh(data=1, devices=jax.devices()[:1])):
        trainer = ax.parallelize(make(), where, ax.Plan()).trainer(optax.sgd(0.1), loss)
        runs.append([float(trainer.step(batch)["loss"]) for batch in batches])
    np.testing.assert_allclose(*runs, rtol=1e-9)
    plain = ax.parallelize(model_of(param_dtype="float64", **options), mesh, ax.Plan()).trainer(optax.sgd(0.1), loss)
    assert abs(float(plain.step(batches[0])["loss"]) - runs[0][0]) > 1e-6


@pytest.mark.parametrize("degrees", [{"context": 4}, {"data": 2, "context": 2}, {"fsdp": 2, "context": 2, "tensor": 2}])
@pytest.mark.slow
def test_calls_evaluation_and_generation_after_training_are_those_of_one_device(degrees):
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    batch, results = batch_of(0), []
    for where in (mesh, ax.make_mesh(data=1, devices=jax.devices()[:1])):
        model = ax.parallelize(model_of(param_dtype="float64", **LLAMA), where, ax.Plan())
        trainer = model.trainer(optax.adam(0.01), loss)
        trainer.step(batch)
        texts = ax.generate(model, batch["tokens"][:3, :5], 6, jax.random.key(0), temperature=0)
        results.append((model(batch["tokens"]), trainer.evaluate(batch)["loss"], texts))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_what_does_not_fit_is_refused():
    mesh = ax.make_mesh(context=4, devices=jax.devices()[:4])
    long = ax.parallelize(model_of(**LLAMA), mesh, ax.Plan()).trainer(optax.sgd(0.1), loss)
    with pytest.raises(ValueError, match="a sequence of 64 tokens is longer than max_length=32"):
        long.step(batch_of(0, length=64))
    named = ax.parallelize(model_of(**LLAMA, attention="xla"), mesh, ax.Plan()).trainer(optax.sgd(0.1), loss)
    with pytest.raises(ValueError, match="attention='xla' reads keys of this rank's positions alone"):
        named.step(batch_of(0))
    heads = ax.parallelize(model_of(num_heads=2), mesh, ax.Plan(context=ax.Context(method="ulysses")))
    with pytest.raises(ValueError, match="splits heads over 4 ranks: 2 query heads do not divide"):
        heads.trainer(optax.sgd(0.1), loss).step(batch_of(0))
