"""Ranks that have all positions of some heads compute attention by the platform's kernel, here interpreted on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import axonml_jax as ax
from axonml_jax.parallel.context.kernels import by_kernel
from axonml_jax.parallel.tensor.megatron import fused_attention as fused
from axonml_jax.parallel.tensor.megatron.softcap import Softcap
from axonml_jax.sharding.sequence_order import sequence_order

LENGTH, SIZE = 256, 128


@pytest.fixture
def on_tpu(monkeypatch):
    """A trace for a TPU, whose kernel is interpreted; what was asked of it."""
    asked = []

    def interpreted(kernel, *arrays, **options):
        asked.append((kernel, arrays[0].shape, sorted(name for name, value in options.items() if value is not None)))
        return fused._splash(*arrays, interpret=True, **options)

    for room in (fused, by_kernel):
        monkeypatch.setattr(room, "target_platform", lambda: "tpu")
    monkeypatch.setattr(by_kernel, "fused_attention", interpreted)
    return asked


def drawn(heads=2, length=LENGTH):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(1, length, heads, SIZE)), jnp.float32) for _ in range(3))


def split(order, ids, ranks=2, **options):
    """Attention of `ranks` ranks, of whole sequences in their order."""
    mesh = jax.make_mesh((ranks,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    parts, places = PartitionSpec(None, "context"), sequence_order(order, LENGTH, ranks)

    def attend(q, k, v, ids):
        return ax.context_attention(q, k, v, order=order, segment_ids=ids if "segments" in options else None, **rules)

    rules = {name: value for name, value in options.items() if name != "segments"}
    call = jax.shard_map(attend, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    return lambda q, k, v: call(q[:, places], k[:, places], v[:, places], ids[:, places])[:, np.argsort(places)]


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("zigzag", {"causal": True, "segments": True}),
        ("contiguous", {"causal": True, "window": (99, 0), "score_mod": Softcap(1.5)}),
        ("striped", {"causal": True}),
        ("zigzag", {}),
    ],
    ids=["zigzag, documents", "contiguous, window, capped", "striped", "full"],
)
def test_it_is_the_attention_of_blocks(order, options, on_tpu):
    q, k, v = drawn()
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (1, LENGTH)), axis=1), jnp.int32)
    total = lambda attention: lambda *arrays: jnp.sum(jnp.sin(attention(*arrays)))
    found = {}
    with jax.enable_x64(False):
        for kernel in ("auto", "blocks"):
            called = split(order, ids, method="ulysses", kernel=kernel, **options)
            found[kernel] = jax.jit(jax.value_and_grad(total(called), argnums=(0, 1, 2)))(q, k, v)
    (kernel, shape, _), *_ = on_tpu
    assert kernel == "splash" and shape == (1, LENGTH, 1, SIZE)  # all positions of one head
    for own, right in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(own, right, rtol=2e-3, atol=2e-3)


def test_where_no_kernel_computes_it_blocks_do_or_a_kernels_name_is_refused_with_all_reasons(on_tpu):
    q, k, v = drawn()
    ids = jnp.zeros((1, LENGTH), jnp.int32)
    for options in (
        {"method": "gather"},
        {"method": "ulysses", "block_size": 64},
        {"method": "ulysses", "score_mod": lambda scores, where: scores},
        {"method": "ulysses", "window": (4, 4)},
        {"method": "ulysses", "bias": lambda queries, keys: jnp.zeros((1, len(queries), len(keys)))},
    ):
        assert jax.eval_shape(split("contiguous", ids, **options), q, k, v).shape == q.shape
    assert on_tpu == []
    wrong = {"method": "ring", "block_size": 8, "score_mod": lambda scores, where: scores, "window": (4, 4)}
    call = split("contiguous", ids, kernel="cudnn", **wrong)
    reasons = (
        "kernel='cudnn' does not apply here: a rank has .* of 2 groups .*; block_size=8 .*; it changes no .*; its "
    )
    reasons += "windows are causal; it is a kernel for cuda, .*; it is used without sliding windows .*; it computes in bfloat16"
    with pytest.raises(ValueError, match=reasons):
        jax.eval_shape(call, q, k, v)
    with pytest.raises(ValueError, match="kernel='flash' must be one of auto, blocks, splash, cudnn"):
        ax.context_attention(q, k, v, kernel="flash")
    with pytest.raises(ValueError, match="causal attention is of as many queries as keys, and there are 128 and 256"):
        ax.context_attention(q[:, :128], k, v, kernel="splash", causal=True)
    alone = split("contiguous", ids, ranks=1, causal=True)
    assert jax.eval_shape(alone, q, k, v).shape == q.shape and on_tpu[-1][:2] == ("splash", q.shape)  # one rank has all
