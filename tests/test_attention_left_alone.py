"""What looks like attention and is left as it is: softmax of something else, weights that are read, sums that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_spellings import HEADS, LENGTH, SIZE, WIDTH, K, Q, V, X, dropped, gpt, mixed, normal, plain, scores

from axonml_jax.attention.recognise import find_attention
from axonml_jax.attention.rewrite import plain_attention, replaced
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.program import no_calls, read_program
from axonml_jax.testing.equality import assert_trees_close

EXPERTS = normal(WIDTH, 5), normal(5, WIDTH, 7)


def found_in(fun, args, weights=()):
    return find_attention(read_program(trace(fun, *args).jaxpr), weights)


def router(x, w, experts):
    """A mixture of experts: every expert computes, weighted by a softmax."""
    each = jnp.einsum("bsd,edf->bsef", x, experts)
    return jnp.einsum("bse,bsef->bsf", jax.nn.softmax(x @ w), each)


def best_router(x, w, experts):
    """The two best experts of each token alone."""
    gates, which = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
    return jnp.einsum("bsk,bskf->bsf", gates, jnp.einsum("bsd,bskdf->bskf", x, experts[which]))


def linear_attention(q, k, v):
    """Katharopoulos et al. 2020: no softmax."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    summed = jnp.einsum("bjhd,bjhe->bhde", k, v)
    return jnp.einsum("bihd,bhde->bihe", q, summed) / jnp.einsum("bihd,bhd->bih", q, k.sum(1))[..., None]


def efficient_attention(q, k, v, w):
    """Shen et al. 2021: a softmax of queries, another of keys."""
    summed = jnp.einsum("bjhd,bjhe->bhde", jax.nn.softmax(k @ w, axis=1), v)
    return jnp.einsum("bihd,bhde->bihe", jax.nn.softmax(q @ w), summed)


def classifier(x, w):
    return -jax.nn.log_softmax(jnp.tanh(x) @ w)[..., 0].mean()


def pooled(x, w):
    """Positions weighed by a learned vector."""
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(x @ w), x)


NO_ATTENTION = {
    "a classifier": (classifier, (X, EXPERTS[0]), (1,)),
    "a router": (router, (X, *EXPERTS), (1, 2)),
    "a router of the best": (best_router, (X, normal(WIDTH, 5), normal(5, WIDTH, 7)), (1, 2)),
    "linear attention": (linear_attention, (Q, K, V), ()),
    "efficient attention": (efficient_attention, (Q, K, V, normal(SIZE, SIZE)), (3,)),
    "pooling": (pooled, (X, normal(WIDTH)), (1,)),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_other_softmaxes_are_no_attention(name):
    found = found_in(*NO_ATTENTION[name])
    assert str(found) == "no attention"


@jax.custom_vjp
def of_its_own(q, k, v):
    return plain()(q, k, v)


of_its_own.defvjp(lambda q, k, v: (of_its_own(q, k, v), (q, k, v)), lambda kept, g: (g, g, g))


def weights_too(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return mixed(weights, v), weights


def entropy_too(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return mixed(weights, v), (weights * jnp.log(weights)).sum()


def lowest_too(q, k, v):
    s = scores(q, k)
    return mixed(jax.nn.softmax(s), v), s.min()


def printed(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    jax.debug.callback(lambda w: None, weights)
    return mixed(weights, v)


LEFT = {
    "its weights are returned": (weights_too, (Q, K, V), ()),
    "its weights are read by log": (entropy_too, (Q, K, V), ()),
    "its weights are read by debug_callback": (printed, (Q, K, V), ()),
    "its scores are read by reduce_min": (lowest_too, (Q, K, V), ()),
    "it has one query": (plain(), (Q[:, :1], K, V), ()),
    "it is inside a function with derivatives of its own": (of_its_own, (Q, K, V), ()),
    "its keys are weights": (lambda x, k, v: jax.nn.softmax(x @ k) @ v, (X, normal(WIDTH, 5), normal(5, 7)), (1, 2)),
    "nothing reads its result": (lambda q, k, v: (plain()(q, k, v), q)[1], (Q, K, V), ()),
}


@pytest.mark.parametrize("why", LEFT)
def test_attention_that_cannot_be_replaced_says_why(why):
    fun, args, weights = LEFT[why]
    (attention,) = found_in(fun, args, weights).attentions
    assert attention.left.startswith(why) and f"left as it is: {why}" in str(attention)


def test_only_what_can_be_replaced_is():
    found = found_in(weights_too, (Q, K, V))
    assert found.replaceable == ()
    with pytest.raises(ValueError, match=r"cannot be replaced:\nattention at line .* its weights are returned"):
        replaced(found, plain_attention, found.attentions)
    _, weights = replaced(found, plain_attention)([Q, K, V])
    np.testing.assert_array_equal(weights, weights_too(Q, K, V)[1])


def with_a_sink(q, k, v, sink):
    """A learned score beside those of the keys, as gpt-oss has it."""
    beside = jnp.broadcast_to(sink[:, None, None], (*scores(q, k).shape[:3], 1))
    return mixed(jax.nn.softmax(jnp.concatenate([scores(q, k), beside], axis=-1))[..., :-1], v)


def talking_heads(q, k, v, w):
    """Shazeer et al. 2020: scores of several heads mixed."""
    return mixed(jax.nn.softmax(jnp.einsum("bhij,hg->bgij", scores(q, k), w)), v)


def in_blocks(q, k, v):
    """Keys block by block, in the manner of flash attention."""

    def step(carry, block):
        out, total = carry
        exps = jnp.exp(scores(q, block[0]))
        return (out + mixed(exps, block[1]), total + exps.sum(-1)), None

    blocks = [jnp.moveaxis(x.reshape(x.shape[0], 4, 2, *x.shape[2:]), 1, 0) for x in (k, v)]
    (out, total), _ = jax.lax.scan(step, (jnp.zeros_like(q), jnp.zeros(scores(q, k).shape[:3])), blocks)
    return out / total.transpose(0, 2, 1)[..., None]


def one_more(q, k, v):
    """Softmax with one added to its sum."""
    exps = jnp.exp(scores(q, k))
    return mixed(exps / (1 + exps.sum(-1, keepdims=True)), v)


TRI = jnp.tril(jnp.ones((LENGTH, LENGTH)))
MISSED = {
    "its scores go through concatenate at line": (with_a_sink, (Q, K, V, normal(HEADS)), (3,)),
    "its softmax does not go over all keys": (talking_heads, (Q, K, V, normal(HEADS, HEADS)), (3,)),
    "its exponentials meet values and are not divided by their sum": (in_blocks, (Q, K, V), ()),
    "its sums of exponentials go through add at line": (one_more, (Q, K, V), ()),
    "its scores go through sort": (plain(lambda s: jnp.sort(s)), (Q, K, V), ()),
    "its weights are masked after the softmax": (plain(softmax=lambda s: jax.nn.softmax(s) * (TRI > 0)), (Q, K, V), ()),
    "its weights are multiplied with an array": (plain(softmax=lambda s: jax.nn.softmax(s) * TRI), (Q, K, V), ()),
    "its weights are scaled after the softmax": (plain(softmax=lambda s: jax.nn.softmax(s) * 2.0), (Q, K, V), ()),
    "its weights go through cumsum": (plain(softmax=lambda s: jax.nn.softmax(s).cumsum(-1)), (Q, K, V), ()),
    "its weights are multiplied, and not summed over all keys": (plain(softmax=lambda s: jax.nn.softmax(s, 2)), (Q, K, V), ()),
    "its scores are replaced by -5": (plain(lambda s: jnp.where(TRI > 0, s, -5.0)), (Q, K, V), ()),
}  # fmt: skip


@pytest.mark.parametrize("why", MISSED)
def test_what_looks_like_attention_is_named_with_the_reason(why):
    found = found_in(*MISSED[why])
    assert not found.attentions
    (missed,) = found.missed
    assert missed.why.startswith(why) and missed.line.startswith("line ")
    assert str(missed).startswith(f"not recognised at {missed.line}: {why}")


def test_calls_that_are_kept_are_searched_too():
    fun = jax.jit(lambda x, w, out: jax.checkpoint(jax.jit(gpt))(x, w, out))
    args = X, normal(WIDTH, 3 * WIDTH), normal(WIDTH, WIDTH)
    found = find_attention(read_program(trace(fun, *args).jaxpr, no_calls))
    assert found.attentions[0].causal and found.replaceable == found.attentions
    assert_trees_close(replaced(found, plain_attention)(args), [fun(*args)], "kept calls")


def test_what_only_replaced_attention_reads_is_not_computed():
    run = replaced(found_in(plain(lambda s: s * 0.5), (Q, K, V)), lambda found, q, k, v, given: q + v)
    names = {str(each.primitive) for each in jax.make_jaxpr(lambda *args: run(args))(Q, K, V).eqns}
    assert not names & {"dot_general", "exp", "reduce_max"}


def test_dropout_tells_how_its_mask_is_drawn():
    found = found_in(dropped, (Q, K, V, jax.random.key(3)))
    drawn = []

    def instead(attention, q, k, v, given):
        drop = attention.dropout
        drawn.append(jax.random.bernoulli(given.value(drop.key), 1 - drop.rate, drop.bits) == given(drop.keep))
        return q

    replaced(found, instead)([Q, K, V, jax.random.key(3)])
    assert drawn[0].shape == (2, HEADS, LENGTH, LENGTH) and drawn[0].all()


def test_rules_that_zero_weights_are_rules_of_the_mask():
    hidden = lambda q, k, v: mixed(jax.nn.softmax(scores(q, k), where=TRI > 0), v)
    (attention,) = found_in(hidden, (Q, K, V)).attentions
    assert attention.zero == attention.mask and not attention.gates


@pytest.mark.parametrize("fill", [-1e9, -jnp.inf])
@pytest.mark.parametrize("where", ["weights", "sum", "weights, sum"])
def test_masked_exponentials_leave_zeros_or_nan_to_a_query_that_sees_no_key(where, fill):
    seen = jnp.asarray(TRI > 0).at[2].set(False)

    def fun(q, k, v):
        hidden = jnp.where(seen, scores(q, k), fill)
        exps = jnp.exp(hidden - hidden.max(-1, keepdims=True))
        shown = jnp.where(seen, exps, 0)
        weights, total = shown if "weights" in where else exps, shown if "sum" in where else exps
        return mixed(weights / total.sum(-1, keepdims=True), v)

    wanted = fun(Q, K, V)
    assert np.isnan(wanted[:, 2]).all() == (where != "weights" or fill == -jnp.inf)
    (found,) = replaced(found_in(fun, (Q, K, V)), plain_attention)([Q, K, V])
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_a_branch_may_return_a_number_that_nothing_reads():
    def attends(q, k, v):
        return mixed(jax.nn.softmax(scores(q, k)), v), jnp.zeros((), v.dtype)

    fun = lambda on, q, k, v: jax.lax.cond(on, attends, lambda q, k, v: (q, v.sum()), q, k, v)[0]
    args = jnp.asarray(True), Q, K, V
    (found,) = replaced(found_in(fun, args), plain_attention)(args)
    assert_trees_close(found, fun(*args), "a branch")


def test_two_that_share_their_weights_are_replaced_together():
    def fun(q, k, v):
        weights = jax.nn.softmax(scores(q, k))
        return mixed(weights, v), mixed(weights, k)

    found = found_in(fun, (Q, K, V))
    assert [each.left for each in found.attentions] == ["", ""]
    assert_trees_close(tuple(replaced(found, plain_attention)([Q, K, V])), fun(Q, K, V), "shared weights")
    (first,) = found.attentions[:1]
    assert_trees_close(tuple(replaced(found, plain_attention, [first])([Q, K, V])), fun(Q, K, V), "one of two")


@pytest.mark.parametrize("check", [True, False], ids=["varying types", "no types"])
def test_a_program_traced_on_a_shard_is_read_and_run_there(check):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    fun = plain(lambda s: jnp.where(TRI > 0, s * 0.5, -jnp.inf))

    def on_shard(q, k, v):
        found = found_in(fun, (q, k, v))
        assert [str(term) for term in found.attentions[0].mask] == ["causal"] and not found.attentions[0].left
        return replaced(found, plain_attention)([q, k, v])[0]

    spec = jax.sharding.PartitionSpec("data")
    shards = jax.shard_map(on_shard, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check)
    assert_trees_close(jax.jit(shards)(Q, K, V), fun(Q, K, V), "shards")
