"""What keeps large models small: layers in one loop, a loss without all logits, attention without scores."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plan_models import unstacked
from predicted_steps import step_of

import axonml_jax as ax
from axonml_jax.layers import fused as norms
from axonml_jax.layers import kernels as fused
from axonml_jax.layers.attention import attend
from axonml_jax.layers.losses import chunked_cross_entropy
from axonml_jax.models.config import TransformerConfig, even_chunk, preset
from axonml_jax.models.generate import generate
from axonml_jax.models.transformer import Transformer, cross_entropy, stacked

TINY = TransformerConfig(
    vocab_size=23, num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, max_length=6, param_dtype="float64"
)
IDS = np.random.default_rng(0).integers(0, 23, (2, 7)).astype(np.int32)
TOKENS, TARGETS = IDS[:, :-1], np.where(IDS[:, 1:] % 5 == 0, -1, IDS[:, 1:])


def gradients(model, loss):
    """(loss, gradients by name) of a function of the model."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    value, grads = jax.jit(jax.value_and_grad(lambda params: loss(nnx.merge(graph, params, others, copy=True))))(params)
    return value, {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(grads)}


@pytest.mark.parametrize(
    "options",
    [{"loss_chunk": 10, "scan_layers": True}, {"loss_chunk": 6, "tie_embeddings": True, "logit_softcap": 0.1}],
    ids=["scan", "tied and capped"],
)
def test_a_scan_and_a_chunked_loss_change_no_number(options):
    plain = Transformer(dataclasses.replace(TINY, **{**options, "scan_layers": False}), rngs=nnx.Rngs(0))
    whole, expected = gradients(plain, lambda model: cross_entropy(model(TOKENS), TARGETS)[0])
    model = Transformer(dataclasses.replace(TINY, **options), rngs=nnx.Rngs(1))
    values = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(plain))}
    values = stacked(values, 2) if model.config.scan_layers else values
    nnx.update(model, nnx.from_flat_state({tuple(_path(name)): nnx.Param(value) for name, value in values.items()}))
    chunked, found = gradients(model, lambda model: model.loss(TOKENS, TARGETS)[0])
    np.testing.assert_allclose(chunked, whole, rtol=1e-12)
    for name, grad in (unstacked(found) if model.config.scan_layers else found).items():
        np.testing.assert_allclose(grad, expected[name], atol=1e-12, err_msg=name)
    assert model.loss(TOKENS, TARGETS)[1] == np.sum(TARGETS != -1)
    if model.config.scan_layers:  # token by token, layer by layer
        texts = [generate(each, TOKENS[:, :2], 3, jax.random.key(0), temperature=0) for each in (plain, model)]
        np.testing.assert_array_equal(*texts)


def _path(name):
    return (int(part) if part.isdigit() else part for part in name.split("/"))


def test_no_array_of_the_loss_holds_all_words():
    words, make = 4096, lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    loss = partial(chunked_cross_entropy, chunk=512, words_dim=1)
    grad = jax.grad(lambda x, table, targets: loss(x, table, targets).sum(), argnums=(0, 1))
    text = str(jax.make_jaxpr(grad)(make(128, 16), make(16, words), jax.ShapeDtypeStruct((128,), "int32")))
    assert "[128,512]" in text and f"[128,{words}]" not in text


def test_vocabularies_are_cut_evenly_and_only_large_ones():
    assert [even_chunk(size, 16_384) for size in (128_256, 50_257, 32_000)] == [21_376, 12_672, 16_000]
    config = preset("llama3-8b")
    assert config.words_at_once == 21_376 and TINY.words_at_once == preset("gpt2-small").words_at_once == 0
    assert dataclasses.replace(config, loss_chunk=0).words_at_once == 0
    assert dataclasses.replace(config, split="grid").words_at_once == 0
    with pytest.raises(ValueError, match=r"loss_chunk=8 belongs to split='tensor'"):
        dataclasses.replace(config, loss_chunk=8, split="grid")
    with pytest.raises(ValueError, match=r"scan_layers=True draws no random masks"):
        dataclasses.replace(config, scan_layers=True, dropout=0.1)
    with pytest.raises(ValueError, match="chunk=0 must be a positive number"):
        chunked_cross_entropy(jnp.ones((2, 4)), jnp.ones((4, 8)), jnp.zeros(2, int), chunk=0, words_dim=1)


def test_a_chunked_loss_refuses_targets_of_other_positions_and_counts_dims_from_the_end():
    x, table, ids = jnp.ones((2, 3, 4)), jnp.ones((4, 8)), jnp.zeros((2, 3), int)
    loss = partial(chunked_cross_entropy, x, chunk=8)
    with pytest.raises(ValueError, match=r"targets int\d+\[3, 2\] must be integers of shape \(2, 3\)"):
        loss(table, ids.T, words_dim=1)
    with pytest.raises(ValueError, match="words_dim=2 must be a dim of the table"):
        loss(table, ids, words_dim=2)
    wanted = loss(table, ids, words_dim=1)
    assert (loss(table, ids, words_dim=-1) == wanted).all() and (loss(table.T, ids, words_dim=-2) == wanted).all()


@pytest.mark.parametrize(
    "kv_heads, window, own", [(1, None, {}), (2, None, {}), (1, 100, {"scale": 0.2, "softcap": 1.5})]
)
def test_the_splash_kernel_equals_the_einsums(kv_heads, window, own):
    """Interpreted: the kernel's own code, one block at a time, on CPU."""
    draw = np.random.default_rng(0).normal
    make = lambda heads: jnp.asarray(draw(size=(1, 256, heads, 128)), jnp.float32)
    query, key, value = make(2), make(kv_heads), make(kv_heads)
    kernel = partial(fused._splash, causal=True, window=window, interpret=True, **own)
    total = lambda attention: lambda *arrays: jnp.sum(jnp.sin(attention(*arrays)))
    with jax.enable_x64(False):
        found = jax.jit(jax.value_and_grad(total(kernel), argnums=(0, 1, 2)))(query, key, value)
        einsums = total(partial(attend, causal=True, window=window, **own))
        expected = jax.value_and_grad(einsums, argnums=(0, 1, 2))(query, key, value)
    for own, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_transformer_attends_block_by_block_as_by_einsums(dropout):
    """Masks of dropout too; grouped queries."""
    own, right = (
        gradients(Transformer(dataclasses.replace(TINY, attention=name, dropout=dropout), rngs=nnx.Rngs(0)), train_loss)
        for name in ("blocks", "xla")
    )
    np.testing.assert_allclose(own[0], right[0], rtol=1e-12)
    for name, grad in own[1].items():
        np.testing.assert_allclose(grad, right[1][name], atol=1e-12, err_msg=name)


def train_loss(model):
    model.train()
    return model.loss(TOKENS, TARGETS)[0]


def test_a_kernel_is_chosen_where_it_applies_and_refused_by_name_elsewhere(monkeypatch):
    make = lambda length, size, dtype="bfloat16": jax.ShapeDtypeStruct((2, length, 4, size), dtype)
    choose = lambda asked, x, drops=False, **rules: fused.attention_kernel(asked, x, x, x, drops=drops, **rules)
    assert choose("auto", make(256, 128)) == "blocks" and choose("auto", make(255, 128)) == "xla"  # this is a CPU
    assert choose("auto", make(256, 128), drops=True) == "xla" and choose("blocks", make(8, 4), drops=True) == "blocks"
    monkeypatch.setattr(fused, "varying_axes", lambda x: frozenset())
    monkeypatch.setattr(fused, "_alone", lambda: True)
    monkeypatch.setattr(fused, "target_platform", lambda: "tpu")
    with jax.enable_x64(True):
        assert choose("auto", make(256, 128)) == "xla"
        with pytest.raises(ValueError, match="it counts in 32 bits, and jax_enable_x64 is on"):
            choose("splash", make(256, 128))
    with jax.enable_x64(False):
        assert choose("auto", make(256, 128)) == choose("splash", make(256, 128), softcap=True) == "splash"
    assert choose("auto", make(256, 64)) == choose("auto", make(200, 128)) == choose("xla", make(256, 128)) == "xla"
    assert choose("auto", make(256, 128), drops=True) == "xla"
    assert (
        choose("auto", make(2047, 64)) == "xla" and choose("auto", make(2048, 64)) == "blocks"
    )  # where no kernel applies
    assert choose("auto", make(2048, 64), drops=True) == "xla"
    monkeypatch.setattr(fused, "target_platform", lambda: "cuda")
    assert choose("auto", make(256, 64)) == "cudnn" and choose("auto", make(256, 64, "float32")) == "xla"
    with pytest.raises(ValueError, match="head size 65 must be a multiple of 8, at most 128; 7 queries and 7 keys"):
        choose("cudnn", make(7, 65))
    with pytest.raises(ValueError, match=r"it caps no scores \(softcap must be None\)"):
        choose("cudnn", make(256, 64), softcap=True)
    with pytest.raises(
        ValueError, match="kernel for tpu, and this is compiled for cuda; it drops no attention weights"
    ):
        choose("splash", make(256, 128), drops=True)
    monkeypatch.setattr(fused, "_alone", lambda: False)
    assert choose("auto", make(256, 64)) == "xla"
    with pytest.raises(ValueError, match="attention='flash': must be one of auto, xla, blocks, splash, cudnn"):
        dataclasses.replace(TINY, attention="flash")


GPUS = {
    "7.0": (True, "cuda"),
    "7.5": (True, "cuda"),
    "8.0": (False, "cuda"),
    "12.0": (False, "cuda"),
    "gfx90a": (True, "rocm"),
}


@pytest.mark.parametrize("capability", GPUS)
def test_old_gpus_and_those_of_another_maker_get_no_kernels(capability, monkeypatch):
    """A stand-in device says what it is."""
    plain, platform = GPUS[capability]
    monkeypatch.setattr(fused, "varying_axes", lambda x: frozenset())
    monkeypatch.setattr(fused, "_alone", lambda: True)
    for room in (fused, norms):
        monkeypatch.setattr(room, "platform_around", lambda mesh=None: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), "float16")
    choose = lambda asked: fused.attention_kernel(asked, x, x, x, drops=False)
    assert fused.target_platform() == platform
    assert (choose("auto"), norms.chosen(x)) == (("xla", "xla") if plain else ("cudnn", "triton"))
    if plain:
        words = f"capability 8.0 or more, and these have {capability}" if platform == "cuda" else "compiled for rocm"
        with pytest.raises(ValueError, match=words):
            choose("cudnn")


@pytest.mark.parametrize("degrees", [{"fsdp": 4}, {"data": 2, "tensor": 2}], ids=["fsdp", "tensor"])
def test_a_step_lowered_for_gpus_has_cudnns_kernels_and_no_scores(degrees, monkeypatch):
    """Lowered, not run: what JAX asks of the GPU's libraries is answered here."""
    pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    place = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{place}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{place}.check_compute_capability", lambda capability: True)
    monkeypatch.setattr(f"{place}.is_cuda_compute_capability_equal", lambda capability: capability == "9.0")
    monkeypatch.setattr(fused, "target_platform", lambda mesh=None: "cuda")
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "max_length": 128, "param_dtype": "float32"}
    model = dataclasses.replace(TINY, vocab_size=24, **sizes)
    step, state, batch = step_of(model, ax.Plan(precision="bf16"), degrees, 4, length=128)
    text = step.trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @(__cudnn[\w$]+)", text)
    assert sorted(set(calls)) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"] and len(calls) == 4
    assert "x128x128x" not in text


def test_the_ledger_counts_no_scores_where_a_kernel_runs():
    model = dataclasses.replace(TINY, max_length=256, hidden_size=256, num_kv_heads=2, param_dtype="float32")
    sizes = {"model": model, "mesh": {"data": 1}, "global_batch": 4}
    held = {kind: ax.explain(ax.Plan(), **sizes, platform=kind).memory.activations for kind in (None, "tpu", "cuda")}
    scores = 2 * 4 * 256 * 2 * 256 * (4 + 4)
    assert held[None] == held["cuda"] and scores * 0.9 < held[None] - held["tpu"] < scores  # cuDNN takes no float32
