"""Parameters that travel packed: a block bounds what is lost, bytes are what is sent, and who cannot use it is told."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.config.sections import PlanConfig
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.sharding.layout import Layout
from axonml_jax.strategies.shard import BLOCK, packed, packed_sizes, round_trip, travels_packed

DRAWN = np.random.default_rng(0).normal(size=(3, 7, 41)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (16, 16), (3, 7, 41), (2, BLOCK), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_an_element_is_off_by_no_more_than_its_block_allows(shape, dtype):
    x = jnp.asarray(np.resize(DRAWN, shape), dtype)
    values, scales = packed(x, "int8")
    assert (values.size, scales.size) == packed_sizes(x.size) and values.dtype == jnp.int8
    assert values.size - x.size < max(scales.size, 2)
    for wire, most in (("int8", 1 / 254), ("fp8", 1 / 16)):  # e4m3 has three bits behind the first
        back = round_trip(x, wire)
        assert back.shape == x.shape and back.dtype == x.dtype
        flat, found = (np.asarray(each, np.float64).ravel() for each in (x, back))
        blocks = np.arange(x.size) // max(values.size // scales.size, 1)
        largest = np.asarray([np.abs(flat[blocks == b]).max() for b in blocks])
        own = largest if wire == "int8" else np.maximum(np.abs(flat), largest / 448 / 8)
        assert np.all(np.abs(found - flat) <= own * (most + jnp.finfo(dtype).eps))


def test_an_outlier_costs_its_block_alone_and_what_is_not_finite_shows():
    x = jnp.asarray(np.resize(DRAWN, (4, BLOCK))).at[1, 3].set(1e6).at[2, 5].set(jnp.nan)
    for wire in ("int8", "fp8"):
        back = round_trip(x, wire)
        assert np.abs(back[0] - x[0]).max() < 0.3 and np.isclose(back[1, 3], 1e6, rtol=1e-6)
        assert np.isnan(back[2]).all() and np.isfinite(back[3]).all()
    assert round_trip(jnp.zeros((2, BLOCK)), "int8").tobytes() == bytes(8 * 2 * BLOCK)


SMALL = TransformerConfig(vocab_size=16, num_layers=2, hidden_size=16, num_heads=2, max_length=8)


def loss_of(model, batch):
    return ax.WeightedMean(*model.loss(**batch))


def lowered(**options):
    """The text of a step of FSDP over four devices."""
    model = ax.FSDP(Transformer(SMALL, rngs=nnx.Rngs(0)), mesh_of(fsdp=4), **options)
    tokens = np.zeros((4, 8), np.int32)
    return model.trainer(optax.sgd(0.1), loss_of).trace({"tokens": tokens, "targets": tokens}).lower().as_text()


@pytest.mark.parametrize(("wire", "sent"), [("int8", "i8"), ("fp8", "ui8")])
def test_matrices_travel_as_bytes_and_gradients_as_they_are(wire, sent):
    text = lowered(wire=wire)
    gathered = re.findall(r"all_gather\"?\(.*?-> tensor<([^>]*)>", text)
    kinds = {tuple(each.split("x")) for each in gathered}
    assert any(kind[-1] == sent for kind in kinds)
    assert all(len(kind) == 2 for kind in kinds)  # rows of bytes, of scales, and leaves of one dim: no matrix of floats
    assert not re.search(rf"reduce_scatter.*tensor<[^>]*x{sent}>", text)
    assert ax.Shard(wire=wire).in_words("fsdp") == f"ZeRO-3, gathered as {wire}"


@pytest.mark.parametrize(("wire", "sent"), [("int8", "i8"), ("bf16", "bf16")])
def test_gradients_travel_in_few_bits_to_the_rank_that_sums_them(wire, sent):
    text = lowered(reduce_wire=wire)
    swapped = re.findall(r"all_to_all\"?\(.*?-> tensor<([^>]*)>", text)
    assert {each.split("x")[-1] for each in swapped} == ({sent, "f32"} if wire == "int8" else {sent})
    reduced = re.findall(r"reduce_scatter.*?-> tensor<([^>]*)>", text, re.DOTALL)
    assert len(reduced) == 0 if wire == "bf16" else all(each.count("x") == 1 for each in reduced)  # biases and norms
    assert f", reduced as {wire}" in ax.Shard(reduce_wire=wire).in_words("fsdp")


def test_gradients_that_are_reduced_in_bf16_are_summed_in_float32_too():
    text = lowered(precision="bf16-reduce", reduce_wire="bf16")
    assert "all_to_all" in text and "reduce_scatter" not in text


@pytest.mark.slow
def test_what_a_bf16_models_gradients_lose_on_their_way_as_bf16_is_nothing():
    """They are made in bf16: sums are those of float32 to its last digits, also where reductions in bf16 would round them."""
    config = TransformerConfig(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, max_length=16)
    tokens = np.random.default_rng(0).integers(0, 64, (8, 16), np.int32)
    found = []
    for policy, reduce in (("bf16-reduce-float32", None), ("bf16-reduce-float32", "bf16"), ("bf16", "bf16")):
        model = ax.FSDP(
            Transformer(config, rngs=nnx.Rngs(0)), mesh_of(data=1, fsdp=4), precision=policy, reduce_wire=reduce
        )
        found.append(model.value_and_grad(loss_of)({"tokens": tokens, "targets": tokens})[1])
    for plain, *packed_ in zip(*map(jax.tree.leaves, found), strict=True):
        for each in packed_:
            np.testing.assert_allclose(each, plain, rtol=0, atol=1e-6 * float(np.abs(plain).max()))


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1.2e-38, 1e-37, 1e-36, 5e-36, 1e-30, 1e37])
def test_small_and_large_blocks_stay_finite(wire, scale):
    x = jnp.asarray(np.resize(DRAWN, (2, BLOCK)) * np.float32(scale))
    off = np.abs(np.asarray(round_trip(x, wire), np.float64) - np.asarray(x, np.float64))
    assert off.max() <= float(jnp.abs(x).max()) / 14 + 2.5e-38  # what is not a normal number is flushed to zero


STACK = TransformerConfig(vocab_size=16, num_layers=4, hidden_size=16, num_heads=2, max_length=8, scan_layers=True)


@pytest.mark.parametrize(("stage", "layers"), [(2, 4), (2, 3), (3, 4)])
@pytest.mark.slow
def test_training_and_evaluation_of_a_stack_read_the_same_weights_however_many_microbatches(stage, layers):
    found = set()
    for accumulate in (1, 2):
        config = replace(STACK, num_layers=layers)
        plan = ax.Plan(fsdp=ax.Shard(stage=stage, wire="int8"), accumulate=accumulate)
        model = ax.parallelize(Transformer(config, rngs=nnx.Rngs(0)), mesh_of(fsdp=4), plan)
        trainer = model.trainer(optax.sgd(0.0), loss_of)
        tokens = np.arange(64, dtype=np.int32).reshape(8, 8) * 7 % 16
        batch = {"tokens": tokens, "targets": tokens}
        found |= {round(float(each["loss"]), 5) for each in (trainer.evaluate(batch), trainer.step(batch))}
    assert len(found) == 1


def test_scales_of_norms_in_a_stack_travel_as_they_are():
    model = ax.FSDP(Transformer(STACK, rngs=nnx.Rngs(0)), mesh_of(fsdp=4), wire="int8")
    layouts = jax.tree_util.tree_leaves_with_path(model._placement.params, is_leaf=lambda x: isinstance(x, Layout))
    for path, layout in layouts:
        assert travels_packed(layout, np.float32) == ("kernel" in str(path) or "embed" in str(path)), path


def test_who_cannot_use_it_is_told():
    with pytest.raises(ValueError, match=r"wire='int4' must be one of int8, fp8, or None"):
        ax.Shard(wire="int4")
    with pytest.raises(ValueError, match=r"reduce_wire='fp8' must be one of bf16, int8, int8-feedback, or None"):
        ax.FSDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), mesh_of(fsdp=4), reduce_wire="fp8")
    with pytest.raises(ValueError, match=r"\{'reduce_wire': 'bf16'\} acts on sharded parameters and has no effect"):
        ax.FSDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), mesh_of(fsdp=4), sharding_strategy="no_shard", reduce_wire="bf16")
    with pytest.raises(ValueError, match=r"\{'wire': 'int8'\} acts on sharded parameters and has no effect"):
        PlanConfig(sharding_strategy="no_shard", wire="int8")
    with pytest.raises(
        ValueError, match=r"FSDP\(wire='int8', reduce_wire='bf16'\) .* one rank, to which nothing travels"
    ):
        alone = ax.make_mesh(devices=jax.devices()[:2], data=2, fsdp=1)
        ax.FSDP(Transformer(STACK, rngs=nnx.Rngs(0)), alone, wire="int8", reduce_wire="bf16")
    assert PlanConfig(sharding_strategy="shard_grad_op", wire="fp8").build().fsdp == ax.Shard(stage=2, wire="fp8")
    assert PlanConfig(reduce_wire="int8").build().fsdp == ax.Shard(reduce_wire="int8")
    assert not ax.Shard(wire="int8").exact and not ax.Shard(reduce_wire="bf16").exact and ax.Shard().exact
