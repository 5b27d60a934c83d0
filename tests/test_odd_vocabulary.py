"""Vocabularies that leave a remainder over `tensor`: padded inside, whole outside, and equal to one device."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from predicted_steps import GPT, LENGTH, LLAMA, config, step_of

import axonml_jax as ax
from axonml_jax.cost.base import Run
from axonml_jax.cost.memory import block_activations
from axonml_jax.ledger import predict
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import difference
from axonml_jax.models.config import TransformerConfig, preset
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import load_pretrained, write_pretrained
from axonml_jax.testing.equality import assert_equals_single_device

SMALL = TransformerConfig(
    vocab_size=13, num_layers=1, hidden_size=8, num_heads=4, mlp_hidden_size=16, max_length=8, param_dtype="float64"
)
TIED = {"tie_embeddings": True}
STAGES = {"pipe": ax.Pipelined(num_microbatches=2)}
# (changes, mesh, plan): 13 words over 2 and 4 ranks leave one and three rows of padding, 9 over 4 a rank that has no word.
ROWS = {
    "tied": (TIED, {"data": 2, "tensor": 4}, {"check_vma": True}),
    "a rank without a word": ({"vocab_size": 9}, {"data": 1, "tensor": 4}, {}),
    "sequence, a stack, zero-3": (
        {"sequence_parallel": True, "scan_layers": True, **TIED},
        {"fsdp": 2, "tensor": 2},
        {"remat": "full"},
    ),
    "words split twice": ({"hidden_size": 12, "num_heads": 2, "vocab_size": 15}, {"fsdp": 4, "tensor": 2}, {}),
    "chunks, one of padding alone": (
        {"vocab_size": 9, "loss_chunk": 2, "logit_softcap": 2.0, **TIED},
        {"fsdp": 2, "tensor": 4},
        {"check_vma": True},
    ),
    "zero-1, accumulating": ({}, {"fsdp": 2, "tensor": 2}, {"fsdp": ax.Shard(stage=1), "accumulate": 2}),
    "stages": ({"num_layers": 2, **TIED}, {"pipe": 2, "tensor": 2}, STAGES),
    "positions": ({}, {"context": 2, "tensor": 2}, {}),
}


def made(**changes):
    return Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def batch_of(words):
    drawn = np.random.default_rng(0).integers(0, words, (8, 9)).astype(np.int32)
    drawn[0, :2] = words - 1  # the last one, beside the padding
    return {"tokens": drawn[:, :-1], "targets": np.where(drawn[:, 1:] % 5 == 0, -1, drawn[:, 1:])}


def loss(model, batch):
    return ax.WeightedMean(*model.loss(**batch))


@pytest.mark.parametrize("name", ROWS)
def test_a_vocabulary_that_leaves_a_remainder_trains_as_on_one_device(name):
    changes, degrees, plan = ROWS[name]
    model = made(**changes)
    batch, tx = batch_of(model.config.vocab_size), optax.adamw(1e-2)
    assert_equals_single_device(model, loss, batch, ax.Plan(**plan), mesh=mesh_of(**degrees), tx=tx, steps=2)


@pytest.mark.parametrize("name", ["tied", "a rank without a word", "words split twice", "stages"])
def test_logits_texts_and_arrays_are_whole_outside(name):
    changes, degrees, plan = ROWS[name]
    model, words = made(**changes), changes.get("vocab_size", 13)
    parallel = ax.parallelize(model, mesh_of(**degrees), ax.Plan(**plan))
    tokens, key = batch_of(words)["tokens"], jax.random.key(0)
    state, whole = parallel.state_dict(), ax.DDP(model, mesh_of(data=1)).state_dict()
    for path, value in whole.items():
        np.testing.assert_array_equal(state[path], value, err_msg=path)
    model.eval()
    logits = parallel.eval()(tokens)
    assert logits.shape == (8, 8, words)
    np.testing.assert_allclose(logits, model(tokens), rtol=1e-9, atol=1e-12)
    text = ax.generate(model, tokens[:3, :3], 4, key)  # drawn among words alone
    np.testing.assert_array_equal(ax.generate(parallel, tokens[:3, :3], 4, key), text)
    with pytest.raises(ValueError, match=f"the model has {words}, 0 to {words - 1}"):
        ax.generate(parallel, [[words]], 1, key)


@pytest.mark.slow
def test_checkpoints_and_published_files_have_no_padding_and_go_to_any_other_mesh(tmp_path):
    pytest.importorskip("safetensors")
    model, batch = made(), batch_of(13)
    parallel = ax.parallelize(model, mesh_of(data=1, fsdp=2, tensor=4))
    trainer = parallel.trainer(optax.adam(1e-2), loss)
    trainer.step(batch)
    ax.save(tmp_path / "checkpoint", trainer)
    write_pretrained(tmp_path / "files", SMALL, parallel)
    shapes = {name: each.shape for name, each in ax.load_safetensors(tmp_path / "files").items()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (13, 8)
    wanted = trainer.step(batch)["loss"]
    for degrees in ({"data": 1}, {"data": 1, "tensor": 2}, {"fsdp": 3}):
        other = ax.parallelize(made(), mesh_of(**degrees), ax.Plan())
        again = other.trainer(optax.adam(1e-2), loss)
        ax.restore(tmp_path / "checkpoint", again)
        moments = jax.tree.leaves(again.opt_state[0].mu)
        assert len(moments) == len(jax.tree.leaves(other.parameters()))
        if degrees != {"fsdp": 3}:  # 8 rows do not divide over 3
            np.testing.assert_allclose(again.step(batch)["loss"], wanted, rtol=1e-9)
        load_pretrained(other, tmp_path / "files")
        back = other.state_dict()
        table = ax.load_safetensors(tmp_path / "files")["model.embed_tokens.weight"]
        np.testing.assert_array_equal(back["embed/embedding"], table)


@pytest.mark.parametrize(
    ("style", "options", "degrees", "plan"),
    [
        (GPT, {"vocab_size": 61}, {"data": 2, "tensor": 4}, {"remat": "full"}),
        (LLAMA, {"vocab_size": 61, "sequence_parallel": True}, {"data": 1, "fsdp": 2, "tensor": 4}, {}),
        (GPT, {"vocab_size": 63}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": ax.Shard(stage=2)}),
    ],
    ids=["tied", "sequence, zero-3", "zero-2"],
)
def test_what_is_sent_is_predicted_with_the_padding(style, options, degrees, plan):
    model, plan = config(style, **options), ax.Plan(**plan)
    prediction = predict(plan, model, degrees, global_batch=8, length=LENGTH)
    assert difference(prediction, collectives_in(*step_of(model, plan, degrees, 8))) == []


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_logits_hold_is_predicted_with_the_padding(ranks):
    held = {
        words: predict(
            ax.Plan(), config(GPT, vocab_size=words), {"tensor": ranks}, global_batch=8, length=LENGTH
        ).memory
        for words in (61, 64)
    }
    assert (held[61].activations == held[64].activations) == (ranks == 4)  # 16 words of every rank
    many, run = {"tensor": np.array([1.0, 4.0])}, Run(roles={}, microbatches=1)
    heads = block_activations(config(GPT, vocab_size=61), many, 8, LENGTH, "float32", run, apart=False).head
    np.testing.assert_array_equal(heads, [8 * 61 * 12, 8 * 16 * 12])


def test_a_plan_is_found_for_gpt2s_own_vocabulary():
    found = ax.plan(
        preset("gpt2-small"), hardware="h100", num_devices=4, axes=("tensor",), global_batch=8, runners_up=0
    )
    assert found.prediction.degrees["tensor"] == 4
