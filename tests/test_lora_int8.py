"""LoRA on int8: the base rests and is sent as int8 and scales, and trains as one device does with the same base."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from test_lora import PLANS, SIZES, adapted, loss, tokens, transformer

import axonml_jax as ax
from axonml_jax.model.lora import dequantized, quantized
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import load_pretrained, write_pretrained
from axonml_jax.testing.equality import assert_equals_single_device


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_int8_is_off_by_half_a_scale_at_most(dtype):
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 5)), dtype).at[1, :, 2].set(0)
    whole, scales = quantized(matrix)
    assert whole.dtype == jnp.int8 and scales.shape == (3, 5) and scales.dtype == matrix.dtype
    assert (jnp.abs(whole).max(axis=-2) == 127).sum() == 14 and not whole[1, :, 2].any()
    wide = [np.asarray(x, np.float64) for x in (matrix, whole, scales)]
    off = np.abs(wide[0] - wide[1] * wide[2][:, None, :])
    most = wide[2] * (0.5 if dtype != "bfloat16" else 1.0)  # there the largest may be 127.5 of the rounded scale
    assert (off <= most[:, None, :] * (1 + 1e-6)).all()
    assert dequantized(whole, scales).dtype == matrix.dtype


@pytest.mark.parametrize(
    "name",
    ["zero-2, selective", "zero-3, typed", "tensor, sequence, zero-3, a stack", "3-D", "stages", "experts in a stack"],
)
@pytest.mark.slow
def test_adapters_of_an_int8_base_train_as_on_one_device(name):
    changes, degrees, plan = PLANS[name]
    assert_equals_single_device(
        adapted(transformer(**changes), base="int8"),
        loss,
        tokens(),
        ax.Plan(**plan),
        mesh=mesh_of(**degrees),
        tx=optax.adam(1e-2),
        steps=2,
    )


@pytest.mark.slow
def test_the_base_rests_and_is_gathered_as_int8_and_is_no_float_between_forward_and_backward(tmp_path):
    own, batch = transformer("float32"), tokens()
    model = ax.FSDP(adapted(own, base="int8"), mesh_of(fsdp=2))
    plain = ax.FSDP(adapted(own), mesh_of(fsdp=2))
    matrices = {name: x for name, x in plain.state_dict().items() if f"{name}_lora_a" in plain.state_dict()}
    size, columns = (sum(count(x) for x in matrices.values()) for count in (np.size, lambda x: x.shape[-1]))
    saved = plain.memory_estimate().param_bytes - model.memory_estimate().param_bytes
    assert saved == (3 * size - 4 * columns) // 2
    here = [shard.data.nbytes for x in jax.tree.leaves(model.variables) for shard in x.addressable_shards[:1]]
    assert sum(here) == model.memory_estimate().param_bytes
    trainer = model.trainer(optax.adam(1e-2), loss)
    gathers = [each for each in ax.explain(trainer, batch).collectives if each.kind == "all_gather"]
    sent = [n for each in gathers if each.dtype == "int8" for n in each.leaf_elements]
    # Once more in the backward, but for the first block's, before which nothing trains.
    again = {name: x for name, x in matrices.items() if not re.match("blocks/0/attention/(query|key|value)", name)}
    assert sorted(sent) == sorted(x.size for each in (matrices, again) for x in each.values())
    whole = ax.DDP(adapted(own, base="int8"), mesh_of(data=2)).trainer(optax.adam(1e-2), loss)
    text = whole.train_step.lower(whole.state, batch).as_text()
    floats = re.findall(r"convert %\S+ : \(tensor<(\w+)xi8>\) -> tensor<\w+xf32>", text)
    assert sorted(set(floats)) == ["12x8", "8x12", "8x8"] and len(floats) == len(matrices) + len(again)
    trainer.step(batch)
    ax.save(tmp_path / "saved", trainer)
    trainer.step(batch)
    after = model.state_dict()
    again = ax.FSDP(adapted(own, base="int8", seed=1), mesh_of(fsdp=2)).trainer(optax.adam(1e-2), loss)
    ax.restore(tmp_path / "saved", again)
    again.step(batch)
    for name, value in again.model.state_dict().items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(after[name], quantized(matrix)[0])
    np.testing.assert_allclose(model.module(batch["tokens"]), model(batch["tokens"]), atol=1e-5)
    with pytest.raises(ValueError, match="kernel_int8_scale"):
        ax.restore(tmp_path / "saved", plain)


PLACES = {
    "sharded with padding": (True, {"fsdp": 3}, {}),
    "split columns and rows": (True, {"fsdp": 2, "tensor": 2}, {}),
    "stages": (False, {"pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "on the host": (False, {"fsdp": 2}, {"offload": ax.CPUOffload.FULL}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_published_weights_are_quantized_where_they_will_rest_and_written_as_floats(name, tmp_path):
    pytest.importorskip("safetensors")
    scan, degrees, plan = PLACES[name]
    config = TransformerConfig(**SIZES)
    whole = ax.DDP(Transformer(config, rngs=nnx.Rngs(3)), mesh_of(data=1)).state_dict()
    write_pretrained(tmp_path / "published", config, whole)
    own = TransformerConfig(**SIZES, scan_layers=scan)
    given = adapted(lambda: Transformer(own, rngs=nnx.Rngs(0)), base="int8")
    model = ax.parallelize(given, mesh_of(**degrees), ax.Plan(**plan))
    load_pretrained(model, tmp_path / "published")
    found = model.state_dict()
    for path in (each.removesuffix("_int8_scale") for each in found if each.endswith("_int8_scale")):
        layers = range(SIZES["num_layers"]) if scan else [()]
        for layer in layers:
            right = quantized(whole[path.replace("/layer/", f"/{layer}/")])
            np.testing.assert_array_equal(found[path][layer], right[0])
            np.testing.assert_allclose(found[f"{path}_int8_scale"][layer], right[1], rtol=1e-6)
    write_pretrained(tmp_path / "written", own, model)
    before, written = ax.load_safetensors(tmp_path / "published"), ax.load_safetensors(tmp_path / "written")
    assert before.keys() == written.keys()
    for there, matrix in before.items():
        targets = any(each in there for each in ("self_attn", "mlp"))
        right = np.asarray(dequantized(*quantized(matrix.T))).T if targets else matrix
        assert written[there].dtype == matrix.dtype
        np.testing.assert_allclose(written[there], right, rtol=1e-6, err_msg=there)


def test_what_does_not_go_with_int8_is_refused():
    with pytest.raises(ValueError, match="base='int4' must be one of 'int8', or None"):
        adapted(transformer(), base="int4")
    with pytest.raises(
        ValueError, match=r"mlp/up/kernel, .*cannot both train and be stored as int8: leave them out of trainable"
    ):
        ax.DDP(adapted(transformer(), base="int8"), mesh_of(data=1), trainable="up/kernel")
    model = ax.DDP(adapted(transformer(), base="int8"), mesh_of(data=1))
    name = "blocks/0/mlp/up/kernel"
    with pytest.raises(ValueError, match=f"{name}: float64, needed int8"):
        model.load_state_dict({name: np.ones((8, 12))}, strict=False)
