"""One definition of the reference models serves one device and every plan: losses, updates, outputs, first values, dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.cli.tasks import loss_fn
from axonml_jax.layers.options import LatentConfig, RopeScaling
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import MLP, Transformer
from axonml_jax.testing.equality import assert_equals_single_device

LLAMA = TransformerConfig(
    vocab_size=16, num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, max_length=8, mlp_hidden_size=16,
    param_dtype="float64",
)  # fmt: skip
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=None,
    norm="layernorm",
    activation="gelu",
    position="learned",
    tie_embeddings=True,
    use_bias=True,
)

QWEN3 = dataclasses.replace(LLAMA, head_dim=6, qk_norm=True, window=3)
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True)
GPT_OSS = dataclasses.replace(
    LLAMA, num_layers=2, head_dim=4, window=3, full_every=2, sinks=True, use_bias=True,
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=4),
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, num_layers=2, head_dim=4, qk_norm=True, window=3, window_rope_theta=50.0, post_norms=True, zero_centered_norm=True,
    activation="geglu", tie_embeddings=True, scale_embeddings=True, query_scalar=6, attention_softcap=0.5, logit_softcap=0.3,
)  # fmt: skip


DEEPSEEK = dataclasses.replace(
    LLAMA, num_layers=2, num_kv_heads=None,
    latent=LatentConfig(kv_rank=6, query_rank=5, plain_size=4, rotary_size=2, value_size=3, mscale=1.0),
    rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=4, attention_factor=1.0),
    experts=ExpertsConfig(
        num_experts=4, inner_size=8, first_dense=1, router="sigmoid", groups=2, top_groups=1, scale=2.5, shared_size=8,
        bias_rate=0.05,
    ),
)  # fmt: skip


def batch_of(rows, length=8):
    ids = np.random.default_rng(0).integers(0, 16, (rows, length + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": np.where(ids[:, 1:] % 5 == 0, -1, ids[:, 1:])}


def plain_loss(model, batch):
    """Without what routers report: in how many rounds tokens travel depends on the mesh."""
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def make(config, seed=0):
    return Transformer(config, rngs=nnx.Rngs(seed))


SCAN = {"scan_layers": True, "num_layers": 2, "loss_chunk": 3}
NARROW = {"num_heads": 2, "hidden_size": 6, "mlp_hidden_size": 6}
AHEAD = {"prefetch": True, "overlap": True}

# (options, mesh, plan)
ROWS = {
    "tensor": (
        GPT2,
        {"loss_chunk": 3, "overlap": True},
        {"data": 2, "tensor": 4},
        {"accumulate": 2, "check_vma": True},
    ),
    "sequence": (LLAMA, {"sequence_parallel": True, "ring": True, **SCAN}, {"fsdp": 2, "tensor": 4}, {"remat": "full"}),
    "scan": (LLAMA, SCAN, {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "selective", "check_vma": True}),
    "grid": (LLAMA, {"split": "grid", **AHEAD}, {"data": 1, "row": 2, "col": 2, "depth": 2}, {"check_vma": True}),
    "vectors that do not divide": (GPT2, NARROW, {"fsdp": 4, "tensor": 2}, {"fsdp": ax.Shard(stage=2, scatter_hop=2)}),
    "head norms, window": (QWEN3, {}, {"fsdp": 2, "tensor": 4}, {"check_vma": True}),
    "head norms, grid": (QWEN3, {"split": "grid"}, {"data": 1, "row": 2, "col": 2, "depth": 2}, {"check_vma": True}),
    "head norms, scan": (QWEN3, {"sequence_parallel": True, **SCAN}, {"data": 2, "tensor": 2}, {"remat": "full"}),
    "biases of queries": (QWEN2, {"sequence_parallel": True}, {"data": 2, "tensor": 4}, {"accumulate": 2}),
    "sinks": (GPT_OSS, {"sequence_parallel": True}, {"fsdp": 2, "tensor": 4}, {"check_vma": True}),
    "sinks, blocks": (GPT_OSS, {"attention": "blocks"}, {"data": 2, "tensor": 2}, {}),
    "sinks, grid": (GPT_OSS, {"split": "grid"}, {"data": 1, "row": 2, "col": 2}, {}),
    "four norms, caps": (GEMMA, {"full_every": 2, "loss_chunk": 3}, {"fsdp": 2, "tensor": 2}, {"check_vma": True}),
    "four norms, scan": (GEMMA, {"sequence_parallel": True, **SCAN}, {"data": 2, "tensor": 4}, {"remat": "full"}),
    "four norms, grid": (
        GEMMA,
        {"split": "grid", "attention": "blocks"},
        {"data": 1, "row": 2, "col": 2, "depth": 2},
        {},
    ),
    "latents": (DEEPSEEK, {}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, {"check_vma": True}),
    "latents, sequence": (
        DEEPSEEK,
        {"sequence_parallel": True},
        {"data": 1, "expert": 2, "tensor": 4},
        {"remat": "full"},
    ),
    "latents, plain queries": (
        DEEPSEEK,
        {"latent": dataclasses.replace(DEEPSEEK.latent, query_rank=None), "attention": "blocks", "overlap": True},
        {"data": 2, "tensor": 2},
        {"accumulate": 2},
    ),
    "grid_tied": (GPT2, {"split": "grid"}, {"fsdp": 2, "row": 2, "col": 2}, {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_transformer_trains_as_on_one_device(name):
    config, options, degrees, plan = ROWS[name]
    model = make(dataclasses.replace(config, **options))
    shards = np.prod([degrees.get(axis, 1) for axis in ("data", "fsdp", "depth", "expert")])
    loss, batch = plain_loss if config.experts else loss_fn, batch_of(2 * shards * plan.get("accumulate", 1))
    assert_equals_single_device(
        model, loss, batch, ax.Plan(**plan), mesh=mesh_of(**degrees), tx=optax.adamw(1e-2), steps=2, max_grad_norm=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("split", ["tensor", "grid"])
def test_outputs_are_whole_outside_whatever_the_layers_leave_split(split):
    config = dataclasses.replace(GPT2, split=split)
    degrees = {"data": 2, "tensor": 2} if split == "tensor" else {"data": 1, "row": 2, "col": 2}
    model, tokens = make(config), batch_of(4)["tokens"]
    logits = ax.parallelize(model, mesh_of(**degrees))(tokens)
    assert logits.sharding.spec[2] == ("tensor" if split == "tensor" else "col")
    np.testing.assert_allclose(logits, model(tokens), atol=1e-12)


def test_parameters_and_first_values_do_not_depend_on_the_layers_chosen():
    one, other = (
        nnx.to_pure_dict(nnx.state(make(dataclasses.replace(LLAMA, split=s)), nnx.Param)) for s in ("tensor", "grid")
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    plain = nnx.Linear(8, 8, use_bias=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert one["blocks"][0]["attention"]["query"]["kernel"].shape == plain.kernel.shape


def test_dropout_masks_of_heads_and_positions_do_not_depend_on_the_degree():
    config = dataclasses.replace(LLAMA, dropout=0.5, sequence_parallel=True)
    runs = []
    for degrees in ({"data": 1, "tensor": 2}, {"data": 1}):
        model = ax.parallelize(make(config), mesh_of(**degrees), seed=3)
        runs.append(np.asarray(model(batch_of(2)["tokens"])))
    np.testing.assert_allclose(*runs, atol=1e-12)
    model.eval()
    assert np.abs(model(batch_of(2)["tokens"]) - runs[0]).max() > 1e-3


def test_the_perceptron_splits_its_layers_in_pairs():
    model = MLP([6, 8, 4, 3], activation=jnp.tanh, rngs=nnx.Rngs(0))
    specs = ax.tensor_specs(model, {"tensor": 2})["layers"]
    assert [tuple(specs[i]["kernel"]) for i in range(3)] == [(None, "tensor"), ("tensor", None), ()]
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    np.testing.assert_allclose(ax.parallelize(model, mesh_of(data=2, tensor=2))(x), model(x), atol=1e-6)


def test_a_split_that_does_not_exist_and_sequence_parallelism_of_a_grid_are_refused():
    with pytest.raises(ValueError, match=r"split='rows': must be one of tensor, grid"):
        dataclasses.replace(LLAMA, split="rows")
    with pytest.raises(ValueError, match="sequence_parallel=True belongs to split='tensor'"):
        dataclasses.replace(LLAMA, split="grid", sequence_parallel=True)
    with pytest.raises(ValueError, match=r"set sequence_parallel=True too\n.*choose one\n.*set split='grid'"):
        dataclasses.replace(LLAMA, ring=True, overlap=True, prefetch=True)
    with pytest.raises(ValueError, match=r"ParallelMLP: sequence_parallel and ring belong to one axis"):
        ax.ParallelMLP(4, 8, axis=("row", "col", "depth"), sequence_parallel=True, rngs=nnx.Rngs(0))
