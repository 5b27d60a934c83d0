"""Models that nobody wrote for split sequences, cut into stages whose code sees whole ones: they train as on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.compat.jaxpr import trace
from axonml_jax.executor.pieces import ReplicatedBatch
from axonml_jax.ledger.compiled import collectives_in_compiled
from axonml_jax.program.program import read_program, run
from axonml_jax.program.values import mapped_dim
from axonml_jax.testing.equality import assert_equals_single_device

WORDS, WIDTH, HEADS, ROWS, LENGTH = 11, 8, 2, 8, 16
F64 = {"param_dtype": jnp.float64, "dtype": jnp.float64}


def attended(x, qkv, rate=0.0, key=None):
    """Causal attention as people write it: x [b, s, w], qkv [w, 3 w]."""
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(x @ qkv, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9), -1)
    if rate:
        weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, width, rate, rngs):
        draw = lambda *shape: nnx.Param(0.3 * jax.random.normal(rngs.params(), shape, jnp.float64))
        self.qkv, self.inner = draw(width, 3 * width), draw(width, width)
        self.rate, self.dropout = rate, nnx.Dropout(rate, deterministic=not rate, rngs=rngs)
        self.rngs = rngs.fork() if rate else None

    def __call__(self, x):
        x = x + attended(x, self.qkv[...], self.rate, self.rngs.dropout() if self.rate else None)
        return x + self.dropout(jnp.tanh(x @ self.inner[...]))


class Tied(nnx.Module):
    """A table of positions, and one of words that is the head too: the first and the last stage read it."""

    def __init__(self, rate=0.0, width=WIDTH, length=LENGTH):
        rngs = nnx.Rngs(0, dropout=1)
        draw = lambda *shape: nnx.Param(0.5 * jax.random.normal(rngs.params(), shape, jnp.float64))
        self.table, self.places = draw(WORDS, width), draw(length, width)
        self.blocks = nnx.List([Block(width, rate, rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.table[...][tokens] + self.places[...][jnp.arange(tokens.shape[1])]
        for block in self.blocks:
            x = block(x)
        return x @ self.table[...].T


class Gpt2Block(nn.Module):
    """As Hugging Face's: a causal buffer that is sliced, combined with a padding mask and added."""

    @nn.compact
    def __call__(self, x, real):
        qkv = nn.Dense(3 * WIDTH, **F64)(nn.LayerNorm(**F64)(x))
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(qkv, 3, axis=2))
        causal = nn.make_causal_mask(jnp.ones((1, 2 * LENGTH), bool), dtype=bool)[:, :, : x.shape[1], : x.shape[1]]
        causal = jnp.broadcast_to(causal, (x.shape[0], *causal.shape[1:]))
        mask = nn.combine_masks(jnp.broadcast_to(real[:, None, None], causal.shape), causal)
        bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, jnp.finfo(x.dtype).min))
        x = x + nn.Dense(WIDTH, **F64)(nn.dot_product_attention(q, k, v, bias=bias).reshape(x.shape))
        return x + nn.Dense(WIDTH, **F64)(jnp.tanh(nn.Dense(WIDTH, **F64)(nn.LayerNorm(**F64)(x))))


class Gpt2(nn.Module):
    @nn.compact
    def __call__(self, tokens, real):
        x = nn.Embed(WORDS, WIDTH, **F64)(tokens) + nn.Embed(LENGTH, WIDTH, **F64)(jnp.arange(tokens.shape[1])[None])
        for _ in range(2):
            x = Gpt2Block()(x, real)
        return nn.Dense(WORDS, use_bias=False, **F64)(nn.LayerNorm(**F64)(x))


def shifted(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:]).mean()


def padded(model, batch):
    logits, weights = model(**batch), batch["real"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
    return (losses * weights).sum() / weights.sum(), {"mean": logits.mean()}


def tokens_of(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, WORDS, (ROWS, length))


def padded_of(seed):
    lengths = np.random.default_rng(seed).integers(3, LENGTH, (ROWS, 1))
    return {"tokens": tokens_of(seed), "real": np.arange(LENGTH) < lengths}


def pipe_of(schedule="1f1b", **options):
    return ax.Pipelined(schedule=schedule, num_microbatches=2, **options)


BOTH, WITH_DATA = {"pipe": 2, "context": 2}, {"data": 2, "pipe": 2, "context": 2}
FOUR = ("Gpt2Block_0", "Gpt2Block_1", "LayerNorm_0")
RING = ax.Context(method="ring")  # its permutes are no permutes on CPU, where they would wait for all devices
# mesh, plan, model
PLANS = {
    "gpipe, dropout": (BOTH, {"pipe": pipe_of("gpipe")}, lambda: Tied(rate=0.3)),
    "1f1b, ring, full remat": (WITH_DATA, {"pipe": pipe_of(), "context": RING, "remat": "full"}, Tied),
    "interleaved, linen, remat": (
        BOTH,
        {"pipe": pipe_of("interleaved", chunks=2, split=FOUR), "remat": "selective"},
        Gpt2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_models_train_as_on_one_device(plan):
    degrees, settings, make = PLANS[plan]
    model, linen = make(), "linen" in plan
    batches = [(padded_of if linen else tokens_of)(seed) for seed in range(2)]
    params = model.init(jax.random.key(0), **batches[0]) if linen else None
    loss = padded if linen else shifted
    assert_equals_single_device(
        model, loss, batches, ax.Plan(**settings), mesh=mesh_of(degrees), params=params, max_grad_norm=0.5
    )


@pytest.mark.slow
def test_calls_and_evaluation_are_those_of_one_device():
    plain, tokens = Tied(), tokens_of(0)
    model = ax.parallelize(Tied(), mesh_of(BOTH), ax.Plan(pipe=pipe_of()))
    np.testing.assert_allclose(model(tokens), nnx.jit(plain)(tokens), rtol=1e-9)
    loss = model.trainer(optax.sgd(0.1), shifted).evaluate(tokens)["loss"]
    np.testing.assert_allclose(loss, nnx.jit(shifted)(plain, tokens), rtol=1e-9)


@pytest.mark.slow
def test_a_rank_holds_its_part_of_what_stages_send_and_keep():
    """Buffers with slots, [slots, 3, n], and what is sent, [3, n], are [.., 1, n] on each of three ranks."""
    model = ax.parallelize(Tied(length=48), mesh_of({"pipe": 2, "context": 3}), ax.Plan(pipe=pipe_of()))
    traced = model.trainer(optax.sgd(0.1), shifted).trace(tokens_of(0, 48))
    compiled = traced.lower().compile()
    part = ROWS // 2 * 48 // 3 * WIDTH
    text, shapes = compiled.as_text(), set(re.findall(r"f64\[(\d+),3,(\d+)\]", str(traced.jaxpr)))
    kept = [(slots, size) for slots, size in shapes if int(size) >= part]
    assert len(kept) >= 2  # of activations, as of their gradients, and of what forwards keep
    for slots, size in kept:
        assert f"f64[{slots},1,{size}]" in text and f"f64[{slots},3,{size}]" not in text
    found = collectives_in_compiled(compiled)
    sent = [each for each in found if each.kind == "permute"]
    assert [each.result.split("{")[0] for each in sent] == [f"f64[1,{part}]"] * 2
    assert not any(each.in_branch for each in sent) and any(each.in_branch for each in found)


class Convolved(Tied):
    """What goes across positions besides attention."""

    def __init__(self):
        super().__init__()
        self.over_time = nnx.Conv(WIDTH, WIDTH, (5,), padding="CAUSAL", rngs=nnx.Rngs(2), **F64)

    def __call__(self, tokens):
        x = self.table[...][tokens]
        for block in self.blocks:
            x = block(x)
        return self.over_time(x) @ self.table[...].T


def test_types_are_not_checked():
    with pytest.raises(
        ValueError, match=r"cannot differentiate attention across ranks with check_vma=True: leave that out"
    ):
        ax.parallelize(Tied(), mesh_of(BOTH), ax.Plan(pipe=pipe_of(), check_vma=True))


def test_what_would_wait_for_the_devices_of_other_stages_is_refused():
    plan = ax.Plan(pipe=pipe_of(), context=ax.Context(allow_communication=True))
    model = ax.parallelize(Convolved(), mesh_of(BOTH), plan)
    with pytest.raises(
        ValueError, match=r"(?s)between neighbours in the branch of one stage.*permute of.*without pipe"
    ):
        model(tokens_of(0))


def test_the_dim_that_attention_leaves_split_is_read_from_its_program():
    split = jax.sharding.PartitionSpec(None, "context")
    mesh = jax.sharding.AbstractMesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    twice = jax.shard_map(lambda y: 2 * y, mesh=mesh, in_specs=split, out_specs=split)
    layers = lambda y: jax.lax.scan(
        lambda y, _: (twice(y), checkpoint_name(jnp.sin(twice(y)), "kept")), y, None, length=3
    )
    program = read_program(trace(lambda y: (*layers(y), y, y.T), jnp.ones((3, 4))).jaxpr)
    assert [mapped_dim(program, atom, "context") for atom in program.outputs] == [1, 2, None, None]


def test_an_equation_that_returns_nothing_is_run_as_it_is():
    printing = lambda x: jax.debug.print("{}", x)
    program = read_program(trace(printing, jnp.ones(3)).jaxpr)
    run(program.equations, dict(zip(program.inputs, [jnp.ones(3)], strict=True)), ReplicatedBatch(program.inputs, ()))
