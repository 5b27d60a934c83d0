"""Attention as other people write it: functions, arguments, and what is to be found in them."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

ROWS, LENGTH, HEADS, SIZE = 2, 8, 4, 3
WIDTH = HEADS * SIZE
FILL = jnp.finfo(jnp.float64).min


class Spelling(NamedTuple):
    """A function, its arguments, and what `str` says of each attention in it (without its place)."""

    fun: object
    args: tuple
    found: list


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


X = normal(ROWS, LENGTH, WIDTH)
Q, K, V = (normal(ROWS, LENGTH, HEADS, SIZE, seed=seed) for seed in (1, 2, 3))
FEW = tuple(normal(ROWS, LENGTH, 2, SIZE, seed=seed) for seed in (4, 5))
OTHERS = tuple(normal(ROWS, 5, HEADS, SIZE, seed=seed) for seed in (6, 7))
WEIGHTS = (normal(WIDTH, 3 * WIDTH) / 3, normal(WIDTH, WIDTH) / 3)
STACKED = (normal(3, WIDTH, 3 * WIDTH) / 3, normal(3, WIDTH, WIDTH) / 3)
SEEN = jnp.asarray(np.arange(LENGTH) < [[5], [8]])
SEGMENTS = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1, 1]])
LENGTHS = jnp.asarray([5, 8], jnp.int32)
SOME = jnp.asarray(np.random.default_rng(0).random((ROWS, 1, LENGTH, LENGTH)) > 0.3).at[..., 0].set(True)


def told(rest="", sizes="8 queries, 8 keys, 4 heads, size 3"):
    return [f"{sizes}; {rest}"]


GROUPED = "8 queries, 8 keys, 4 heads (2 of keys), size 3"
dpa = jax.nn.dot_product_attention


def scores(q, k):
    return jnp.einsum("bihd,bjhd->bhij", q, k)


def mixed(weights, v):
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def plain(change=lambda s: s, softmax=jax.nn.softmax):
    """Attention with something done to its scores."""
    return lambda q, k, v, *rest: mixed(softmax(change(scores(q, k), *rest)), v)


def where(seen):
    return plain(lambda s, *rest: jnp.where(seen(jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH), *rest), s, FILL))


def gpt(x, w, out, mask=None):
    """As nanoGPT's ports have it."""
    b, s, d = x.shape
    apart = lambda y: y.reshape(b, s, HEADS, d // HEADS).transpose(0, 2, 1, 3)
    q, k, v = map(apart, jnp.split(x @ w, 3, axis=-1))
    att = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(d // HEADS)
    mask = jnp.tril(jnp.ones((s, s))) if mask is None else mask
    att = jax.nn.softmax(jnp.where(mask == 0, -jnp.inf, att), axis=-1)
    return (att @ v).transpose(0, 2, 1, 3).reshape(b, s, d) @ out


def rotated(x, axis):
    """Rotary embeddings."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[axis])[:, None] / 10.0 ** jnp.arange(half)
    angles = jnp.expand_dims(angles, axis + 1 if axis == 1 else ()).reshape(
        (LENGTH, 1, half) if axis == 1 else angles.shape
    )
    a, b = x[..., :half], x[..., half : 2 * half]
    turned = [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)]
    return jnp.concatenate([*turned, x[..., 2 * half :]], -1)


def llama(repeat, axis=1):
    """Llama's ports: rotary embeddings, grouped heads repeated, softmax in float32, a causal mask added."""

    def fun(q, k, v):
        if axis == 2:
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        q, k = rotated(q, axis), rotated(k, axis)
        k, v = repeat(k, 3 - axis), repeat(v, 3 - axis)
        spell = ("bihd,bjhd->bhij", "bhij,bjhd->bihd") if axis == 1 else ("bhid,bhjd->bhij", "bhij,bhjd->bihd")
        att = jnp.einsum(spell[0], q, k) * SIZE**-0.5
        att = att + jnp.triu(jnp.full((LENGTH, LENGTH), -1e30), k=1)[None, None]
        att = jax.nn.softmax(att.astype(jnp.float64), axis=-1).astype(q.dtype)
        return jnp.einsum(spell[1], att, v)

    return fun


def cast_after(x, axis):
    """The repeat comes before the cast to what the scores are computed in."""
    return jnp.repeat(x, 2, axis=axis).astype(jnp.float32)


def repeats(x, axis):
    return jnp.repeat(x, 2, axis=axis)


def tiles(x, axis):
    return jnp.tile(x, [2 if dim == axis else 1 for dim in range(4)])


def spreads(x, axis):
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], 2, *x.shape[axis + 1 :]))
    return wide.reshape(*x.shape[:axis], HEADS, *x.shape[axis + 1 :])


def gemma(q, k, v):
    """Queries grouped by a reshape, a soft cap, a sliding window."""
    b, s, h, d = q.shape
    att = jnp.einsum("bigmd,bjgd->bgmij", q.reshape(b, s, 2, h // 2, d), k)
    att = jnp.tanh(att / 50.0) * 50.0
    i, j = jnp.arange(s)[:, None], jnp.arange(s)[None, :]
    att = jnp.where((j <= i) & (j > i - 4), att, -2.3819763e38)
    return jnp.einsum("bgmij,bjgd->bigmd", jax.nn.softmax(att), v).reshape(b, s, h, d)


def tunix(q, k, v, seen):
    """Tunix's Llama and Qwen: queries grouped by a reshape, scores with all heads in one dim, a mask given for every row."""
    b, s, h, d = q.shape
    att = jnp.einsum("BTHGD,BSHD->BHGTS", q.reshape(b, s, 2, h // 2, d), k) * SIZE**-0.5
    att = jnp.where(jnp.expand_dims(seen, -3), att.reshape(b, h, s, s), -2.3819763e38)
    att = jax.nn.softmax(att.astype(jnp.float64), axis=-1).astype(k.dtype)
    return jnp.einsum("BHGTS,BSHD->BTHGD", att.reshape(b, 2, h // 2, s, s), v).reshape(b, s, h, d)


def heads_in_rows(q, k, v):
    """Rows and heads in one dim, as diffusers and BART have it."""
    one = lambda x: x.transpose(0, 2, 1, 3).reshape(ROWS * HEADS, LENGTH, SIZE)
    q, k, v = map(one, (q, k, v))
    out = jax.nn.softmax(jnp.einsum("bid,bjd->bij", q, k) * 0.5) @ v
    return out.reshape(ROWS, HEADS, LENGTH, SIZE).transpose(0, 2, 1, 3)


def gpt2(q, k, v, given):
    """Hugging Face's FlaxGPT2: a causal buffer, sliced; combined with a padding mask, and added."""
    buffer = linen.make_causal_mask(jnp.ones((1, 16), dtype="bool"), dtype="bool")
    causal = jnp.broadcast_to(buffer[:, :, :LENGTH, :LENGTH], (ROWS, 1, LENGTH, LENGTH))
    padding = jnp.broadcast_to(jnp.expand_dims(given, (-3, -2)), causal.shape)
    mask = linen.combine_masks(padding, causal)
    bias = jax.lax.select(mask > 0, jnp.full(mask.shape, 0.0), jnp.full(mask.shape, FILL))
    return linen.dot_product_attention(q, k, v, bias=bias)


def bucketed(q, k, v, table):
    """T5: a table looked up by distance, no scale."""
    distance = jnp.clip(jnp.arange(LENGTH)[None] - jnp.arange(LENGTH)[:, None] + 3, 0, 5)
    return mixed(jax.nn.softmax(scores(q, k) + table[distance].transpose(2, 0, 1)[None]), v)


def alibi(s):
    return s + (0.5 ** jnp.arange(1.0, 5))[:, None, None] * (jnp.arange(LENGTH)[None] - jnp.arange(LENGTH)[:, None])


def by_log_sum(s):
    return jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True))


def by_log_sum_spread_late(s):
    most = s.max(-1)
    logs = jnp.log(jnp.exp(s - most[..., None]).sum(-1))
    return jnp.exp(s - (logs + most)[..., None])


def divided_late(q, k, v):
    exps = jnp.exp(scores(q, k))
    return mixed(exps, v) / exps.sum(-1).transpose(0, 2, 1)[..., None]


def masked_late(s):
    exps = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))) * jnp.tril(jnp.ones((LENGTH, LENGTH)))
    return exps * (1 / exps.sum(-1, keepdims=True))


def without_nan(s):
    weights = jax.nn.softmax(s)
    return jnp.where(jnp.isnan(weights), 0.0, weights)


def spread_by_hand(s):
    spread = lambda x: jax.lax.broadcast_in_dim(x, s.shape, (0, 1, 2))
    exps = jnp.exp(s - spread(s.max(-1)))
    return exps / spread(exps.sum(-1))


def dropped(q, k, v, key):
    weights = jax.nn.softmax(scores(q, k))
    keep = jax.random.bernoulli(key, 0.75, weights.shape)
    return mixed(jnp.where(keep, weights / 0.75, 0.0), v)


def scanned(x, w, out, wrap=jax.checkpoint):
    """Layers in a scan, the mask made outside; it returns its weights, which nobody reads."""
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def layer(carry, weights):
        x, mask = carry
        return (x + gpt(x, *weights, mask), mask), x.sum()

    return jax.lax.scan(wrap(layer), (x, mask), (w, out))[0][0]


def either(q, k, v, flag):
    return jax.lax.cond(flag > 0, lambda: plain()(q, k, v), lambda: where(lambda i, j: j <= i)(q, k, v))


def looped(q, k, v):
    """Forward only: JAX differentiates no such loop."""
    step = lambda carry: (carry[0] + 1, plain()(carry[1], jax.lax.stop_gradient(k), v))
    return jax.lax.stop_gradient(jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, q))[1])


def low_precision(q, k, v):
    """bfloat16, with scores and softmax in float32."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return dpa(q, k, v, is_causal=True).astype(jnp.float64)


def module(make, call=lambda m, x, *rest: m(x)):
    """An NNX module's call."""
    made = []

    def fun(x, *rest):
        if not made:
            with jax.ensure_compile_time_eval():
                made.append(make(nnx.Rngs(0)))
        return call(nnx.clone(made[0]), x, *rest)

    return fun


def mha(rngs, **options):
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, param_dtype=jnp.float64, rngs=rngs, **options)


def in_linen(make, call=lambda m, v, x, *rest: m.apply(v, x), more=()):
    """A Linen module's call."""

    def fun(x, *rest):
        made = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            shapes = jax.eval_shape(lambda key: made.init(key, x, *more), jax.random.key(0))
        return call(made, jax.tree.map(lambda a: normal(*a.shape) / 3, shapes), x, *rest)

    return fun


class ScannedBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        mask = linen.make_causal_mask(x[..., 0])
        return x + linen.MultiHeadDotProductAttention(HEADS)(x, mask=mask), None


def linen_stack():
    """Layers in `nn.scan` of `nn.remat`."""
    return linen.scan(linen.remat(ScannedBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()


def self_attention(m, variables, x, key):
    """Which warns that it will be deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return m.apply(variables, x, rngs={"dropout": key})


def nnx_stack(rngs):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return mha(rngs)

    return make(rngs)


def run_stack(stack, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return x + nnx.remat(lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[..., 0])))(layer, x)

    return run(stack, x)
