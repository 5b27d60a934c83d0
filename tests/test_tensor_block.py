"""Transformer blocks of parallel layers, with and without sequence parallelism, equal one device; collectives counted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ledger_steps import abstract_mesh, floats
from tensor_cases import EMBED, LINEAR, P, assert_equals_one_device, drawn, normal, on_one_device, step_on_mesh

from axonml_jax.layers.attention import TensorParallelAttention, attend
from axonml_jax.layers.latent import LatentAttention
from axonml_jax.layers.linear import (
    ColumnParallelLinear,
    ParallelLayerNorm,
    ParallelRMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    join_sequence,
    split_sequence,
)
from axonml_jax.layers.options import LatentConfig
from axonml_jax.layers.pairs import ParallelMLP
from axonml_jax.layers.products import Prefetch
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.ledger.count import collectives_in


class Block(nnx.Module):
    """A pre-norm transformer block, [..., s, 8] -> [..., s, 8]."""

    def __init__(
        self, *, kv_heads=None, llama=False, sequence=False, hidden=8, heads=4, inner=12, options=LINEAR, **switches
    ):
        shared = {"sequence_parallel": sequence, "rngs": nnx.Rngs(0)}
        norm = ParallelRMSNorm if llama else partial(ParallelLayerNorm, bias_init=options["bias_init"])
        norm = partial(norm, scale_init=options["bias_init"], param_dtype=options["param_dtype"], **shared)
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        linear = {"use_bias": not llama, **switches, **shared, **options}
        self.attention = TensorParallelAttention(
            hidden, heads, kv_heads, causal=not sequence, rope_theta=1e4 if llama else None, **linear
        )
        self.mlp = ParallelMLP(hidden, inner, activation="swiglu" if llama else "gelu", **linear)
        self.ends = sequence

    def __call__(self, x):
        x = split_sequence(x) if self.ends else x
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return join_sequence(x) if self.ends else x


# (ranks, kv heads, Llama options, sequence parallel, shape before the hidden size, check_vma); overlap where ranks are 2
CASES = [
    (1, 2, True, True, (4,), True), (2, None, True, False, (2, 1, 4), True), (2, 1, False, True, (2, 4), False),
    (4, 1, True, True, (2, 1, 4), True), (4, 2, False, False, (4,), False), (4, None, False, True, (2, 4), True),
]  # fmt: skip
IDS = [
    f"{n}ranks-{kv or 4}kv-{'llama' if ll else 'gpt'}-{'sequence' if sp else 'plain'}-{len(s)}d-{'vma' if v else 'novma'}"
    for n, kv, ll, sp, s, v in CASES
]


@pytest.mark.parametrize(("ranks", "kv_heads", "llama", "sequence", "shape", "check_vma"), CASES, ids=IDS)
def test_a_block_equals_one_device(ranks, kv_heads, llama, sequence, shape, check_vma):
    block = Block(kv_heads=kv_heads, llama=llama, sequence=sequence, overlap=ranks == 2)
    assert_equals_one_device(block, normal(*shape, 8), {"tensor": ranks}, check_vma=check_vma)


class SequenceModel(nnx.Module):
    """Embedding, one block and the tied head with the sequence split from the first layer to the last."""

    def __init__(self):
        options = {"sequence_parallel": True, "rngs": nnx.Rngs(0)}
        self.embed = VocabParallelEmbedding(8, 8, gather_output=True, **options, **EMBED)
        self.mlp = ParallelMLP(8, 8, **options, **LINEAR)
        self.row = RowParallelLinear(8, 8, input_is_parallel=False, **options, **LINEAR)
        self.norm = ParallelLayerNorm(8, param_dtype=jnp.float64, scale_init=drawn, bias_init=drawn, **options)
        self.head = ColumnParallelLinear(8, 4, gather_output=True, **options, **LINEAR)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.mlp(self.norm(x))
        # A row layer may also begin the region: its input is whole then, features and sequence.
        x = x + self.row(join_sequence(x))
        return {"tied": self.embed.attend(self.norm(x)), "own": self.head(self.norm(x))}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
def test_sequence_parallelism_runs_from_the_embedding_to_the_head(check_vma):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, (2, 4)))
    assert_equals_one_device(SequenceModel(), ids, {"tensor": 4}, check_vma=check_vma)


def counted(block, ranks, *shape, check_vma=False, dtype=jnp.float32):
    """The collectives of one forward and backward, without devices."""
    step = step_on_mesh(
        block, {"tensor": ranks}, floats(*shape, dtype=dtype), mesh=abstract_mesh(tensor=ranks), check_vma=check_vma
    )
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    x = floats(*shape, dtype=dtype)
    entries = collectives_in(step, params, x, [x])
    return [entry for entry in entries if entry.elements > 64 * 64]


B, S, H, RANKS = 4, 64, 256, 4
BIG = {"hidden": H, "heads": 8, "inner": 4 * H, "options": {**LINEAR, "param_dtype": jnp.float32}}


class Stack(nnx.Module):
    """Layers between two edges at which nothing is split, so that only the layers' own collectives are counted."""

    def __init__(self, num_layers, **options):
        self.blocks = nnx.List([Block(**BIG, **options) for _ in range(num_layers)])
        for block in self.blocks:
            block.ends = False

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
@pytest.mark.parametrize("llama", [True, False], ids=["llama", "gpt"])
def test_a_block_all_reduces_twice_forward_and_twice_backward(llama, check_vma):
    entries = counted(Stack(1, llama=llama), RANKS, B, S, H, check_vma=check_vma)
    assert [(e.kind, e.elements) for e in entries] == [("all_reduce", B * S * H)] * 4
    assert sum(e.wire_bytes for e in entries) == 4 * 2 * B * S * H * 4 * (RANKS - 1) // RANKS


class Split(nnx.Module):
    """A stack between the borders of sequence parallelism."""

    def __init__(self, stack):
        self.stack = stack

    def __call__(self, x):
        return join_sequence(self.stack(split_sequence(x)))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])
def test_sequence_parallelism_moves_the_same_bytes_and_gathers_twice_more_in_the_backward(check_vma):
    """Korthikanti et al.: 4 gathers and 4 reduce-scatters per layer; a gathered input is gathered again, not kept."""
    layers = 2
    entries = counted(Split(Stack(layers, sequence=True)), RANKS, B, S, H, check_vma=check_vma)
    kinds = [e.kind for e in entries]
    edges = 2  # the all-gather of join_sequence, and the one that split_sequence's gradient is
    assert kinds.count("reduce_scatter") == 4 * layers
    assert kinds.count("all_gather") == (4 + 2) * layers + edges
    assert {e.elements for e in entries} == {B * S * H} and len(kinds) == 10 * layers + edges
    per_layer = [e.wire_bytes for e in entries if e.kind == "reduce_scatter"][:4] * 2
    assert sum(per_layer) == 4 * 2 * B * S * H * 4 * (RANKS - 1) // RANKS


def test_with_sequence_parallelism_no_residual_is_a_whole_sequence():
    """What a layer keeps for its backward is split over the ranks: the paper's 34sbh/t, in its order of magnitude."""
    wide = ParallelMLP(H, H // 4, sequence_parallel=True, rngs=nnx.Rngs(0))
    graphdef, params, _ = nnx.split(wide, nnx.Param, ...)
    kept = []

    def per_rank(params, x):
        _, vjp = jax.vjp(lambda p, x: nnx.merge(graphdef, p, copy=True)(x), params, x)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.ndim == 3)
        return x

    specs = tensor_specs(wide, {"tensor": RANKS})
    mapped = jax.shard_map(
        per_rank,
        mesh=abstract_mesh(tensor=RANKS),
        in_specs=(specs, P(None, "tensor")),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    jax.eval_shape(mapped, nnx.to_pure_dict(params), floats(B, S, H))
    assert (B, S // RANKS, H) in kept and (B, S, H) not in kept


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.slow
def test_attention_is_that_of_jax_nn(causal):
    query, key, value = normal(2, 5, 6, 4), normal(2, 5, 2, 4, seed=1), normal(2, 5, 2, 4, seed=2)
    wanted = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    got = attend(query, key, value, causal=causal)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)  # its softmax is in float32
    last = attend(query[:, -2:], key, value, causal=causal)
    np.testing.assert_allclose(last, got[:, -2:], rtol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((8, 3), {}, "no multiple of num_heads 3: give head_size"),
        ((8, 4, 3), {}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ((8, 4, 0), {}, "num_heads 4 and num_kv_heads 0 must be at least 1"),
        ((8, 0), {}, "num_heads 0 and num_kv_heads 0 must be at least 1"),
        ((12, 4), {"rope_theta": 1e4}, "head size 3 is odd"),
        ((8, 4), {"softcap": 0.0}, "softcap=0.0 must be positive, or None"),
        ((8, 4), {"qk_centered": True}, "qk_centered=True is .* there are none: give qk_norm"),
    ],
)
def test_attention_refuses_sizes_that_do_not_fit(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelAttention(*sizes, rngs=nnx.Rngs(0), **options)


def test_latent_attention_refuses_a_prefetch():
    sizes = LatentConfig(kv_rank=8, plain_size=4, rotary_size=4, value_size=4)
    layer = LatentAttention(16, 4, latent=sizes, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gathers no weights, so there is nothing to prefetch"):
        layer(jnp.ones((1, 2, 16)), prefetch=Prefetch())


def test_heads_that_would_be_cut_are_refused():
    attention = TensorParallelAttention(24, 6, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="6 query heads over tensor") as error:
        tensor_specs(attention, {"tensor": 4})
    assert "key/kernel: 3 key and value heads over tensor (3 % 4 = 3)" in str(error.value)
    specs = tensor_specs(attention, {"tensor": 6})
    assert (specs["key"]["kernel"], specs["query"]["kernel"]) == (P(None, None), P(None, "tensor"))
    half = {name: jax.tree.map(lambda _: P(None, "tensor"), specs[name]) for name in specs}
    for name in ("query", "key", "value"):
        half[name]["bias"] = P("tensor")
    half["out"] = specs["out"]
    graphdef, params, _ = nnx.split(attention, nnx.Param, ...)
    mapped = jax.shard_map(
        lambda p, x: nnx.merge(graphdef, p, copy=True)(x),
        mesh=abstract_mesh(tensor=4), in_specs=(half, P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="6 query heads do not divide over the 4 ranks of 'tensor'"):
        jax.eval_shape(mapped, nnx.to_pure_dict(params), floats(2, 4, 24))


def test_sequence_parallelism_needs_a_sequence():
    with pytest.raises(ValueError, match=r"splits dim -2 .* shape \(8,\)"):
        counted(ParallelMLP(8, 8, sequence_parallel=True, rngs=nnx.Rngs(0)), 2, 8)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'relu' is not one of 'gelu', 'swiglu'"):
        ParallelMLP(8, 8, activation="relu", rngs=nnx.Rngs(0))
    assert on_one_device(ParallelMLP(8, 8, rngs=nnx.Rngs(0), **LINEAR), normal(2, 8)).outputs.shape == (2, 8)


@pytest.mark.parametrize(("ranks", "check_vma"), [(2, True), (4, False)], ids=["2ranks-vma", "4ranks-novma"])
def test_rings_change_the_schedule_and_not_the_result(ranks, check_vma):
    mlp = ParallelMLP(8, 12, activation="swiglu", sequence_parallel=True, ring=True, rngs=nnx.Rngs(0), **LINEAR)
    assert_equals_one_device(Split(mlp), normal(2, 4, 8), {"tensor": ranks}, check_vma=check_vma)


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_overlap_issues_an_inputs_gradient_and_its_reduction_before_the_weights_gradients(sequence):
    """In the lowered program, and kept there by a barrier: what sums the input's gradient does not wait for other products."""

    def order(overlap):
        mlp = ParallelMLP(
            8, 12, use_bias=False, sequence_parallel=sequence, overlap=overlap, rngs=nnx.Rngs(0), **LINEAR
        )
        model, x = (Split(mlp) if sequence else mlp), floats(2, 4, 8, dtype=jnp.float64)
        step = step_on_mesh(model, {"tensor": 2}, x, mesh=abstract_mesh(tensor=2))
        lowered = step.trace(nnx.to_pure_dict(nnx.state(model, nnx.Param)), x, [x]).lower(lowering_platforms=("tpu",))
        names = ("dot_general", "all_reduce", "reduce_scatter", "optimization_barrier")
        return [name for line in lowered.as_text().splitlines() for name in names if f"stablehlo.{name}" in line]

    reduction = "reduce_scatter" if sequence else "all_reduce"
    assert order(True)[-4:] == ["dot_general", "optimization_barrier", reduction, "dot_general"]
    assert order(False)[-2:] == ["dot_general", reduction]


def test_a_ring_sends_the_same_bytes_in_hops_between_the_products():
    plain, ring = (counted(Split(Stack(1, sequence=True, ring=ring)), RANKS, B, S, H) for ring in (False, True))
    hops = [entry for entry in ring if entry.kind == "permute"]
    assert len(hops) == 10 * (RANKS - 1) and {entry.elements for entry in hops} == {B * S * H // RANKS}
    assert sum(entry.wire_bytes for entry in ring) == sum(entry.wire_bytes for entry in plain)
    assert [entry.kind for entry in ring if entry.kind != "permute"] == ["all_gather"] * 2  # the edges


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ParallelMLP])
def test_a_ring_without_sequence_parallelism_is_refused(kind):
    with pytest.raises(ValueError, match="set sequence_parallel=True too"):
        kind(8, 8, ring=True, rngs=nnx.Rngs(0))
    if kind is not RowParallelLinear:
        with pytest.raises(ValueError, match="choose one"):
            kind(8, 8, ring=True, overlap=True, sequence_parallel=True, rngs=nnx.Rngs(0))
