"""Attention that others wrote, found in their programs: what is told of it, and that putting it back changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import (
    FEW,
    FILL,
    GROUPED,
    HEADS,
    LENGTH,
    LENGTHS,
    OTHERS,
    ROWS,
    SEEN,
    SEGMENTS,
    SOME,
    STACKED,
    WEIGHTS,
    K,
    Q,
    Spelling,
    V,
    X,
    alibi,
    bucketed,
    by_log_sum,
    by_log_sum_spread_late,
    cast_after,
    divided_late,
    dpa,
    dropped,
    either,
    gemma,
    gpt,
    gpt2,
    heads_in_rows,
    in_linen,
    linen_stack,
    llama,
    looped,
    low_precision,
    masked_late,
    mha,
    mixed,
    module,
    nnx_stack,
    normal,
    plain,
    repeats,
    run_stack,
    scanned,
    scores,
    self_attention,
    spread_by_hand,
    spreads,
    tiles,
    told,
    tunix,
    where,
    without_nan,
)  # fmt: skip
from flax import linen, nnx

from axonml_jax.attention.recognise import find_attention
from axonml_jax.attention.rewrite import plain_attention, replaced
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.program import read_program
from axonml_jax.testing.equality import assert_trees_close

KEY = jax.random.key(3)
IDS = "int64[2, 8] (batch, query) and int64[2, 8] (batch, key)"
train = dict(deterministic=False)

SPELLINGS = {
    "jax.nn, every key": Spelling(dpa, (Q, K, V), told("every key; scale 0.577")),
    "jax.nn, cross-attention": Spelling(
        dpa, (Q, *OTHERS), told("every key; scale 0.577", "8 queries, 5 keys, 4 heads, size 3")
    ),
    "jax.nn, grouped, window": Spelling(
        lambda q, k, v: dpa(q, k, v, is_causal=True, local_window_size=(3, 0)), (Q, *FEW),
        told("causal window 3; scale 0.577", GROUPED),
    ),
    "jax.nn, bias and lengths": Spelling(
        lambda q, k, v, bias, n: dpa(q, k, v, bias, query_seq_lengths=n, key_value_seq_lengths=n),
        (Q, *FEW, normal(1, HEADS, LENGTH, LENGTH), LENGTHS),
        told(
            "queries where bool[2, 8, 1] (batch, query, 1), keys where bool[2, 1, 8] (batch, 1, key); scale 0.577; "
            "bias float64[1, 4, 8, 8] (1, head*member, query, key)", GROUPED,
        ),
    ),
    "jax.nn, a mask given": Spelling(
        lambda q, k, v, mask: dpa(q, k, v, mask=mask), (Q, K, V, SOME),
        told("the mask bool[2, 1, 8, 8] (batch, 1, query, key); scale 0.577"),
    ),
    "jax.nn, low precision": Spelling(low_precision, (Q, K, V), told("causal; scale 0.577")),
    "nnx": Spelling(module(mha), (X,), told("every key; scale 0.577")),
    "nnx, causal, dropout": Spelling(
        module(
            lambda rngs: mha(rngs, dropout_rate=0.25),
            lambda m, x, key: m(x, mask=nnx.make_causal_mask(x[..., 0]), rngs=nnx.Rngs(key), **train),
        ), (X, KEY), told("causal; dropout 0.25 of bits (1, 1, query, key)"),
    ),
    "nnx.scan of nnx.remat": Spelling(module(nnx_stack, run_stack), (X,), told("causal; scale 0.577")),
    "linen, padding mask": Spelling(
        in_linen(
            lambda: linen.MultiHeadDotProductAttention(HEADS),
            lambda m, v, x, seen: m.apply(v, x, mask=linen.make_attention_mask(seen, seen)),
        ), (X, SEEN), told("queries where bool[2, 8] (batch, query), keys where bool[2, 8] (batch, key)"),
    ),
    "linen, dropout of each head": Spelling(
        in_linen(
            lambda: linen.SelfAttention(HEADS, dropout_rate=0.25, broadcast_dropout=False, deterministic=False),
            self_attention,
        ), (X, KEY), told("every key; dropout 0.25 of bits (batch, head, query, key)"),
    ),
    "linen.scan of linen.remat": Spelling(
        in_linen(linen_stack, lambda m, v, x: m.apply(v, x, None)[0], more=(None,)), (X,), told("causal")
    ),
    "nanoGPT": Spelling(gpt, (X, *WEIGHTS), told("causal; scale 0.577")),
    "nanoGPT, checkpointed": Spelling(jax.checkpoint(gpt), (X, *WEIGHTS), told("causal; scale 0.577")),
    "nanoGPT, a table as mask": Spelling(
        lambda x, w, out: gpt(x, w, out, np.tril(np.ones((LENGTH, LENGTH)))), (X, *WEIGHTS), told("causal; scale 0.577")
    ),
    "nanoGPT, a mask among its inputs": Spelling(
        gpt, (X, *WEIGHTS, jnp.tril(jnp.ones((LENGTH, LENGTH), int))),
        told("not the mask bool[8, 8] (query, key); scale 0.577"),
    ),
    "nanoGPT, layers scanned": Spelling(scanned, (X, *STACKED), told("causal; scale 0.577")),
    "Llama, repeated": Spelling(llama(repeats), (Q, *FEW), told("causal; scale 0.577", GROUPED)),
    "Llama, spread, heads first": Spelling(llama(spreads, 2), (Q, *FEW), told("causal; scale 0.577", GROUPED)),
    "Llama, cast after the repeat, low precision": Spelling(
        lambda q, k, v: llama(cast_after)(q.astype(jnp.float32), k, v).astype(jnp.float64), (Q, *FEW),
        told("causal; scale 0.577", GROUPED),
    ),
    "Llama, tiled": Spelling(llama(tiles), (Q, *FEW), told("causal; scale 0.577", GROUPED)),
    "Gemma 2": Spelling(gemma, (Q, *FEW), told("causal window 3; soft cap 50", GROUPED)),
    "Tunix's Llama": Spelling(
        tunix, (Q, *FEW, SOME[:, 0]), told("the mask bool[2, 8, 8] (batch, query, key); scale 0.577", GROUPED)
    ),
    "one head of keys": Spelling(
        lambda q, k, v: jnp.einsum("bhij,bjd->bihd", jax.nn.softmax(jnp.einsum("bihd,bjd->bhij", q, k)), v),
        (Q, FEW[0][:, :, 0], FEW[1][:, :, 0]), told("every key", "8 queries, 8 keys, 4 heads (1 of keys), size 3"),
    ),
    "heads in rows": Spelling(heads_in_rows, (Q, K, V), told("every key; scale 0.5")),
    "one row, by vmap": Spelling(
        jax.vmap(lambda q, k, v: jnp.einsum(
            "hij,jhd->ihd", jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k)), v)), (Q, K, V), told("every key"),
    ),
    "GPT-2 of Hugging Face": Spelling(
        gpt2, (Q, K, V, SEEN.astype(jnp.int32)), told("causal, keys where int32[2, 8] (batch, key)")
    ),
    "DistilBERT": Spelling(
        plain(lambda s, seen: s - 1e30 * (1.0 - seen[:, None, None])), (Q, K, V, SEEN.astype(jnp.int32)),
        told(
            "every key; bias float64[2, 1, 1, 8] (batch, 1, 1, key), of zeros and ones a mask of keys where int32[2, 8] "
            "(batch, key)"
        ),
    ),
    "T5": Spelling(bucketed, (Q, K, V, normal(6, HEADS)), told("every key; bias float64[8, 8, 4] (query, key, head)")),
    "ALiBi": Spelling(plain(alibi), (Q, K, V), told("every key; bias float64[4, 8, 8] (head, query, key)")),
    "Bloom, a mask in the bias": Spelling(
        plain(lambda s, t: s + (jnp.where(jnp.tri(LENGTH, dtype=bool), 0.0, FILL) + t[:, None, None])),
        (Q, K, V, normal(ROWS, LENGTH)), told("causal; bias float64[2, 8] (batch, key)"),
    ),
    "temperatures of heads": Spelling(
        plain(lambda s, t: s * jnp.exp(t)[:, None, None] + 1.0), (Q, K, V, normal(HEADS)),
        told("every key; scores times float64[4] (head)"),
    ),
    "segments and causal": Spelling(
        where(lambda i, j, ids: (i >= j) & (ids[:, None, :, None] == ids[:, None, None, :])), (Q, K, V, SEGMENTS),
        told(f"causal, segments of {IDS}"),
    ),
    "positions given": Spelling(
        where(lambda i, j, ids: ~(ids[:, None, None, :] > ids[:, None, :, None])), (Q, K, V, SEGMENTS),
        told(f"ge of {IDS}"),
    ),
    "a window both ways": Spelling(where(lambda i, j: abs(i - j) <= 2), (Q, K, V), told("window 2 2")),
    "a prefix": Spelling(where(lambda i, j: (j < 3) | (j <= i)), (Q, K, V), told("prefix 3")),
    "chunks": Spelling(where(lambda i, j: (i // 3 == j // 3) & (j <= i)), (Q, K, V), told("chunks of 3, causal")),
    "every other key": Spelling(
        where(lambda i, j: (i - j) % 2 == 0), (Q, K, V), told("the mask bool[8, 8] (query, key)")
    ),
    "where= of softmax": Spelling(
        lambda q, k, v, m: mixed(jax.nn.softmax(scores(q, k), where=m), v), (Q, K, V, SOME.at[0, 0, 2].set(False)),
        told("the mask bool[2, 1, 8, 8] (batch, 1, query, key)"),
    ),
    "logsumexp, spread late": Spelling(plain(softmax=by_log_sum_spread_late), (Q, K, V), told("every key")),
    "logsumexp": Spelling(plain(softmax=by_log_sum), (Q, K, V), told("every key")),
    "log_softmax": Spelling(plain(softmax=lambda s: jnp.exp(jax.nn.log_softmax(s))), (Q, K, V), told("every key")),
    "divided at the end": Spelling(divided_late, (Q, K, V), told("every key")),
    "masked after exp": Spelling(plain(softmax=masked_late), (Q, K, V), told("causal")),
    "no numbers replaced": Spelling(
        plain(lambda s, m: jnp.where(m, s, -jnp.inf), without_nan), (Q, K, V, SOME),
        told("the mask bool[2, 1, 8, 8] (batch, 1, query, key)"),
    ),
    "queries of padding zeroed": Spelling(
        lambda q, k, v, n: mixed(jnp.where(n[:, None, :, None], jax.nn.softmax(scores(q, k)), 0), v), (Q, K, V, SEEN),
        told("every key; weights of queries where bool[2, 8] (batch, query)"),
    ),
    "a maximum spread by hand": Spelling(
        plain(softmax=spread_by_hand), (Q, K, V), told("every key")
    ),
    "masks of heads": Spelling(
        lambda q, k, v, g: mixed(jnp.einsum("bhij,h->bhij", jax.nn.softmax(scores(q, k)), g), v),
        (Q, K, V, normal(HEADS)), told("every key; weights times float64[4] (head)"),
    ),
    "dropout by where": Spelling(
        dropped, (Q, K, V, KEY), told("every key; dropout 0.25 of bits (batch, head, query, key)")
    ),
    "a conditional": Spelling(either, (Q, K, V, normal(1)[0]), [*told("causal"), *told("every key")]),
    "a while loop": Spelling(looped, (Q, K, V), told("every key")),
}  # fmt: skip


def read(fun, args, weights=None, opens=None):
    traced = trace(fun, *args)
    program = read_program(traced.jaxpr, opens) if opens else read_program(traced.jaxpr)
    return find_attention(program, weights), traced


def said(attention):
    """Without its place, and what it replaces."""
    return str(attention).split(": ", 1)[1].rsplit("; ", 1)[0]


def outcome(fun, args):
    """The results, and the gradients of a sum of them in which each element counts otherwise."""
    floats = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(some):
        out = fun(*[some[floats.index(i)] if i in floats else x for i, x in enumerate(args)])
        flat = [x.ravel() for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sin(x) * jnp.linspace(1, 2, x.size)).sum() for x in flat), out

    return jax.jit(jax.grad(loss, has_aux=True))([args[i] for i in floats])


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_found_told_and_put_back(name):
    fun, args, wanted = SPELLINGS[name]
    found, traced = read(fun, args)
    assert [said(each) for each in found.attentions] == wanted
    assert not found.missed and found.replaceable == found.attentions
    called = []

    def instead(attention, *operands):
        called.append(attention.out.value)
        return plain_attention(attention, *operands)

    again = lambda *args: traced.out_tree.unflatten(replaced(found, instead)(args))
    assert_trees_close(outcome(again, args), outcome(fun, args), name, low_precision="low precision" in name)
    assert set(called) == {each.out.value for each in found.attentions}
