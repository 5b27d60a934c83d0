"""Losses and metrics as people write them, each a function of the model and the batch: for `meaning.py` and tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import axonml_jax as ax

D, C, T, V = 6, 4, 8, 11
F64 = jnp.float64


def batch_of(rows):
    """A batch with everything that some loss reads."""
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(rows, D)), "x2": rng.normal(size=(rows, D)), "y": rng.integers(0, C, rows),
        "target": rng.normal(size=(rows, C)), "mask": (rng.random(rows) < 0.6).astype(float),
        "tokens": rng.integers(0, V, (rows, T)), "labels": rng.integers(0, V, (rows, T)),
        "lengths": rng.integers(1, T + 1, rows), "group": rng.integers(0, 5, rows),
        "adv": rng.normal(size=rows), "old": rng.normal(size=rows), "flags": rng.random(rows) < 0.5,
    }  # fmt: skip


SHAPES = {
    "w1": (D, 16), "b1": (16,), "w2": (16, C), "b2": (C,), "temp": (), "emb": (V, 8), "pos": (T, 8), "qkv": (8, 24),
    "o": (8, 8), "m1": (8, 16), "m2": (16, 8), "head": (8, V), "g": (8,),
}  # fmt: skip


def mlp(p, x):
    return jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def norm(x, g):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def transformer(p, tokens):
    b, t = tokens.shape
    x = p["emb"][tokens] + p["pos"][jnp.arange(t)]
    for _ in range(2):
        q, k, v = (a.reshape(b, t, 2, 4) for a in jnp.split(norm(x, p["g"]) @ p["qkv"], 3, -1))
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1e30)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, 8) @ p["o"]
        x = x + jax.nn.gelu(norm(x, p["g"]) @ p["m1"]) @ p["m2"]
    return norm(x, p["g"]) @ p["head"]


def called(p, x):
    return (mlp if jnp.issubdtype(x.dtype, jnp.floating) else transformer)(p, x)


def start(name):
    rng = np.random.default_rng(sorted(SHAPES).index(name))
    return jnp.asarray(0.3 * rng.normal(size=SHAPES[name]) + (name == "g"), F64)


class Net(nnx.Module):
    """Floating rows go through an MLP, tokens through a transformer."""

    def __init__(self, rngs):
        for name in SHAPES:
            setattr(self, name, nnx.Param(start(name)))

    def __call__(self, x):
        return called({name: getattr(self, name)[...] for name in SHAPES}, x)


class LinenNet(linen.Module):
    """The same."""

    @linen.compact
    def __call__(self, x):
        return called({name: self.param(name, lambda key, name=name: start(name)) for name in SHAPES}, x)


class Block(nnx.Module):
    """A residual block of a transformer whose heads see everything before them."""

    def __init__(self, rngs):
        linear = lambda *sizes: nnx.Linear(*sizes, use_bias=False, rngs=rngs, param_dtype=F64)
        self.qkv, self.o, self.m1, self.m2 = linear(8, 24), linear(8, 8), linear(8, 16), linear(16, 8)

    def __call__(self, x):
        b, t, _ = x.shape
        q, k, v = (a.reshape(b, t, 2, 4) for a in jnp.split(self.qkv(norm(x, 1)), 3, -1))
        x = x + self.o(ax.context_attention(q, k, v, causal=True).reshape(b, t, 8))
        return x + self.m2(jax.nn.gelu(self.m1(norm(x, 1))))


class Layered(nnx.Module):
    """The same kind of model in layers, which `tensor` may split, a pipeline put on stages, and `context` give positions of."""

    splits_positions = True

    def __init__(self, rngs):
        self.temp = nnx.Param(jnp.asarray(0.2, F64))
        self.emb = nnx.Embed(V, 8, rngs=rngs, param_dtype=F64)
        self.w1 = nnx.Linear(D, 16, rngs=rngs, param_dtype=F64)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.w2, self.head = nnx.Linear(16, C, rngs=rngs, param_dtype=F64), nnx.Linear(8, V, rngs=rngs, param_dtype=F64)

    def __call__(self, x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return self.w2(jax.nn.relu(self.w1(x)))
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x, 1))


def weight(net, name):
    """A parameter that a loss reads beside its calls of the model."""
    if isinstance(found := getattr(net, name, None), nnx.Linear):
        return found.kernel[...]
    return net.params[name] if isinstance(getattr(net, "params", None), dict) else getattr(net, name)[...]


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def nll(logits, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[..., 0]


CASES: dict[str, Callable] = {}


def case(name):
    def add(fun):
        CASES[name] = fun
        return fun

    return add


def simple(name, fun):
    CASES[name] = lambda net, b: fun(net(b["x"]), net, b)


simple("mean mse", lambda o, net, b: ((o - b["target"]) ** 2).mean())
simple("sum", lambda o, net, b: ((o - b["target"]) ** 2).sum())
simple("sum / constant", lambda o, net, b: nll(o, b["y"]).sum() / 8.0)
simple("sum / x.shape[0]", lambda o, net, b: nll(o, b["y"]).sum() / b["x"].shape[0])
simple("masked mean", lambda o, net, b: (nll(o, b["y"]) * b["mask"]).sum() / b["mask"].sum())
simple("mean(where=mask)", lambda o, net, b: jnp.mean(nll(o, b["y"]), where=b["mask"] > 0))
simple(
    "mean by boolean where/max(count,1)",
    lambda o, net, b: jnp.where(b["flags"], nll(o, b["y"]), 0).sum() / jnp.maximum(b["flags"].sum(), 1),
)
simple(
    "class weights normalised",
    lambda o, net, b: (w := jnp.array([1.0, 2.0, 0.5, 3.0])[b["y"]], (nll(o, b["y"]) * w).sum() / w.sum())[1],
)
simple(
    "class weights from batch counts",
    lambda o, net, b: (nll(o, b["y"]) * (o.shape[0] / (C * jnp.bincount(b["y"], length=C)))[b["y"]]).mean(),
)
simple("focal", lambda o, net, b: (nll(o, b["y"]) * (1 - jnp.exp(-nll(o, b["y"]))) ** 2).mean())
simple(
    "label smoothing (one_hot)",
    lambda o, net, b: -((0.9 * jax.nn.one_hot(b["y"], C) + 0.1 / C) * jax.nn.log_softmax(o)).sum(-1).mean(),
)
simple("logp[arange(n), y]", lambda o, net, b: -jax.nn.log_softmax(o)[jnp.arange(o.shape[0]), b["y"]].mean())
simple("rmse", lambda o, net, b: jnp.sqrt(((o - b["target"]) ** 2).mean()))
simple("perplexity", lambda o, net, b: jnp.exp(nll(o, b["y"]).mean()))
simple("log of mean", lambda o, net, b: jnp.log(jnp.mean(jnp.exp(nll(o, b["y"])))))
simple("logsumexp over rows", lambda o, net, b: jax.nn.logsumexp(nll(o, b["y"])))
simple(
    "softmax over rows (hard mining)", lambda o, net, b: (jax.nn.softmax(nll(o, b["y"]), axis=0) * nll(o, b["y"])).sum()
)
simple("max", lambda o, net, b: nll(o, b["y"]).max())
simple(
    "max with ties (straight-through rounding)", lambda o, net, b: (o + jax.lax.stop_gradient(jnp.round(o) - o)).max()
)
simple("relu at 0", lambda o, net, b: jax.nn.relu(o - jax.lax.stop_gradient(o)).sum() + 1e-3 * o.sum())
simple("min + argmax row", lambda o, net, b: nll(o, b["y"]).min() + o[jnp.argmax(b["adv"]), 0] ** 2)
simple("prod", lambda o, net, b: jnp.prod(1 + 0.01 * nll(o, b["y"])))
simple(
    "variance penalty", lambda o, net, b: nll(o, b["y"]).mean() + jnp.maximum(0, 1 - jnp.sqrt(o.var(0) + 1e-4)).mean()
)
simple(
    "covariance (VICReg)",
    lambda o, net, b: (z := o - o.mean(0), c := z.T @ z / (z.shape[0] - 1), ((c * (1 - jnp.eye(C))) ** 2).sum() / C)[2],
)
simple(
    "Barlow twins",
    lambda o, net, b: (
        n := lambda z: (z - z.mean(0)) / z.std(0),
        c := n(o).T @ n(net(b["x2"])) / o.shape[0],
        ((c - jnp.eye(C)) ** 2).sum(),
    )[2],
)
simple("entropy of batch average", lambda o, net, b: (q := jax.nn.softmax(o).mean(0), (q * jnp.log(q)).sum())[1])
simple(
    "KL with batch statistics",
    lambda o, net, b: (m := o.mean(0), v := o.var(0) + 1e-3, 0.5 * (v + m * m - 1 - jnp.log(v)).sum())[2],
)
simple(
    "Dice",
    lambda o, net, b: (
        q := jax.nn.sigmoid(o),
        t := (b["target"] > 0).astype(o.dtype),
        1 - (2 * (q * t).sum() + 1) / (q.sum() + t.sum() + 1),
    )[2],
)
simple(
    "IoU per class",
    lambda o, net, b: (
        q := jax.nn.sigmoid(o),
        t := (b["target"] > 0) * 1.0,
        i := (q * t).sum(0),
        1 - (i / (q.sum(0) + t.sum(0) - i)).mean(),
    )[3],
)
simple(
    "pearson correlation",
    lambda o, net, b: (
        x := o[:, 0] - o[:, 0].mean(),
        t := b["adv"] - b["adv"].mean(),
        1 - (x * t).sum() / jnp.sqrt((x**2).sum() * (t**2).sum()),
    )[2],
)
simple(
    "PPO, advantages normalised",
    lambda o, net, b: (
        a := (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8),
        r := jnp.exp(-nll(o, b["y"]) - b["old"]),
        -jnp.minimum(r * a, jnp.clip(r, 0.8, 1.2) * a).mean(),
    )[2],
)
simple("DPO", lambda o, net, b: -jax.nn.log_sigmoid(0.1 * (o[:, 0] - o[:, 1] - b["old"])).mean())
simple(
    "DPO, pairs in one batch (first half, second half)",
    lambda o, net, b: -jax.nn.log_sigmoid(o[: o.shape[0] // 2, 0] - o[o.shape[0] // 2 :, 0]).mean(),
)
simple(
    "z-loss + weight decay",
    lambda o, net, b: (
        nll(o, b["y"]).sum() + 1e-2 * (jax.nn.logsumexp(o, -1) ** 2).sum() + 0.1 * (weight(net, "w1") ** 2).sum()
    ),
)
simple("temperature parameter", lambda o, net, b: nll(o * jnp.exp(weight(net, "temp")), b["y"]).mean())
simple(
    "MoE balance",
    lambda o, net, b: (g := jax.nn.softmax(o), f := jax.nn.one_hot(g.argmax(-1), C).mean(0), C * (f * g.mean(0)).sum())[
        2
    ],
)
simple(
    "segment means",
    lambda o, net, b: (
        s := jax.ops.segment_sum(nll(o, b["y"]), b["group"], 5),
        n := jax.ops.segment_sum(jnp.ones(o.shape[0]), b["group"], 5),
        (s / jnp.maximum(n, 1)).mean(),
    )[2],
)
simple(
    "group-relative (GRPO) by segment",
    lambda o, net, b: (
        n := jnp.bincount(b["group"], length=5),
        m := jax.ops.segment_sum(b["adv"], b["group"], 5) / jnp.maximum(n, 1),
        (nll(o, b["y"]) * (b["adv"] - m[b["group"]])).mean(),
    )[2],
)
simple(
    "one_hot.T @ features (class centres)",
    lambda o, net, b: (
        h := jax.nn.one_hot(b["y"], C),
        c := (h.T @ o) / jnp.maximum(h.sum(0), 1)[:, None],
        ((o - c[b["y"]]) ** 2).mean(),
    )[2],
)
simple("sorted top half (CVaR)", lambda o, net, b: jnp.sort(nll(o, b["y"]))[o.shape[0] // 2 :].mean())
simple("top_k over rows", lambda o, net, b: jax.lax.top_k(nll(o, b["y"]), 5)[0].mean())
simple(
    "AUC-like (pairwise differences)",
    lambda o, net, b: (
        s := o[:, 0],
        t := b["flags"],
        pair := t[:, None] & ~t[None],
        (jax.nn.softplus(-(s[:, None] - s[None])) * pair).sum() / pair.sum(),
    )[3],
)
simple("listwise rank with cumsum", lambda o, net, b: -(o[:, 0] - jnp.log(jnp.cumsum(jnp.exp(o[:, 0])))).mean())
simple("mixup by roll", lambda o, net, b: ((o - jnp.roll(b["target"], 1, 0)) ** 2).mean())
simple(
    "fixed permutation", lambda o, net, b: ((o - o[jax.random.permutation(jax.random.key(3), o.shape[0])]) ** 2).mean()
)
simple("reversed rows", lambda o, net, b: (o * o[::-1]).mean())
simple(
    "noise drawn in the loss",
    lambda o, net, b: ((o + 0.1 * jax.random.normal(jax.random.key(5), o.shape) - b["target"]) ** 2).mean(),
)
simple(
    "R-drop (two passes, concatenated)",
    lambda o, net, b: (
        q := net(jnp.concatenate([b["x"], b["x2"]], 0)),
        a := q[: o.shape[0]],
        c := q[o.shape[0] :],
        (jax.nn.softmax(a) * (jax.nn.log_softmax(a) - jax.nn.log_softmax(c))).sum(-1).mean(),
    )[3],
)
simple(
    "triplet, in-batch hardest",
    lambda o, net, b: (
        d := jnp.sqrt(((o[:, None] - o[None]) ** 2).sum(-1) + 1e-9),
        s := b["y"][:, None] == b["y"][None],
        jnp.maximum(jnp.where(s, d, -jnp.inf).max(1) - jnp.where(s, jnp.inf, d).min(1) + 1, 0).mean(),
    )[2],
)
simple(
    "MMD (rbf kernel)",
    lambda o, net, b: (
        k := lambda u, v: jnp.exp(-((u[:, None] - v[None]) ** 2).sum(-1)),
        k(o, o).mean() + k(b["target"], b["target"]).mean() - 2 * k(o, b["target"]).mean(),
    )[1],
)
simple(
    "vmap of per-example loss",
    lambda o, net, b: jax.vmap(lambda x, y: nll(net(x), y))(b["x"], b["y"]).sum() / b["x"].shape[0],
)
simple(
    "lax.cond on a batch sum",
    lambda o, net, b: jax.lax.cond(b["mask"].sum() > 3, lambda x: x.sum(), lambda x: (x**2).mean(), nll(o, b["y"])),
)
simple(
    "while loop, normalised by batch",
    lambda o, net, b: (
        s := jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / b["mask"].sum()), (0, b["mask"]))[1],
        (nll(o, b["y"]) * s).sum(),
    )[1],
)
simple(
    "Sinkhorn (scan, both dims)",
    lambda o, net, b: (
        q := jax.lax.stop_gradient(
            jax.lax.scan(
                lambda q, _: ((q / q.sum(0)) / (q / q.sum(0)).sum(1, keepdims=True), None), jnp.exp(o), None, length=3
            )[0]
        ),
        -(q * jax.nn.log_softmax(o)).sum(-1).mean(),
    )[1],
)
simple("scan over rows", lambda o, net, b: jax.lax.scan(lambda c, x: (0.9 * c + (x**2).sum(), None), 0.0, o)[0])
simple(
    "stop_gradient of a batch mean",
    lambda o, net, b: (nll(o, b["y"]) / jax.lax.stop_gradient(nll(o, b["y"]).mean())).mean(),
)
simple(
    "gradient penalty (grad in the loss)",
    lambda o, net, b: (
        g := jax.grad(lambda x: net(x).sum())(b["x"]),
        ((jnp.sqrt((g**2).sum(-1) + 1e-6) - 1) ** 2).mean(),
    )[1],
)
simple(
    "einsum over batch (gram, style)", lambda o, net, b: (jnp.einsum("bi,bj->ij", o, o) ** 2).mean() / o.shape[0] ** 2
)
simple("log-det of batch covariance", lambda o, net, b: -jnp.linalg.slogdet(o.T @ o / o.shape[0] + jnp.eye(C))[1])
simple("quantile", lambda o, net, b: jnp.quantile(nll(o, b["y"]), 0.7))
simple(
    "boolean any/all",
    lambda o, net, b: jnp.where(jnp.any(b["flags"]) & ~jnp.all(b["flags"]), 1.0, 2.0) * nll(o, b["y"]).mean(),
)
simple("scatter set by rows, then mean", lambda o, net, b: (o.at[:, 0].set(0.0) ** 2).mean())
simple(
    "whiten by cholesky of batch covariance",
    lambda o, net, b: (
        L := jnp.linalg.cholesky(o.T @ o / o.shape[0] + jnp.eye(C)),
        ((jax.scipy.linalg.solve_triangular(L, o.T, lower=True) - 1) ** 2).mean(),
    )[1],
)
simple("reshape to groups of 4 rows", lambda o, net, b: jax.nn.logsumexp(nll(o, b["y"]).reshape(-1, 4), 1).mean())
simple("reshape to 4 groups of rows", lambda o, net, b: jax.nn.logsumexp(nll(o, b["y"]).reshape(4, -1), 1).mean())


@jax.custom_vjp
def clipped_mean(x):
    return x.mean()


clipped_mean.defvjp(lambda x: (x.mean(), x), lambda x, ct: (jnp.clip(ct * x / x.shape[0], -0.01, 0.01),))
simple("custom_vjp over rows", lambda o, net, b: clipped_mean(nll(o, b["y"])))


@case("CLIP (both directions)")
def _(net, b):
    u, v = unit(net(b["x"])), unit(net(b["x2"]))
    logits = u @ v.T * jnp.exp(weight(net, "temp"))
    labels = jnp.arange(logits.shape[0])
    return (nll(logits, labels).mean() + nll(logits.T, labels).mean()) / 2, {"acc": (logits.argmax(1) == labels).mean()}


@case("CLIP by diag")
def _(net, b):
    u, v = unit(net(b["x"])), unit(net(b["x2"]))
    logits = u @ v.T * 5
    return (jax.nn.logsumexp(logits, 1) + jax.nn.logsumexp(logits, 0) - 2 * jnp.diag(logits)).mean(), {}


@case("SigLIP")
def _(net, b):
    u, v = unit(net(b["x"])), unit(net(b["x2"]))
    n = u.shape[0]
    return -jax.nn.log_sigmoid((2 * jnp.eye(n) - 1) * (u @ v.T * 5 - 1)).sum() / n, {}


@case("SimCLR (2B views, self masked)")
def _(net, b):
    z = unit(jnp.concatenate([net(b["x"]), net(b["x2"])]))
    n = b["x"].shape[0]
    sim = jnp.where(jnp.eye(2 * n, dtype=bool), -1e9, z @ z.T / 0.5)
    labels = jnp.concatenate([jnp.arange(n) + n, jnp.arange(n)])
    return nll(sim, labels).mean(), {}


@case("supervised contrastive")
def _(net, b):
    z = unit(net(b["x"]))
    n = z.shape[0]
    same = (b["y"][:, None] == b["y"][None]) & ~jnp.eye(n, dtype=bool)
    logp = jax.nn.log_softmax(jnp.where(jnp.eye(n, dtype=bool), -1e9, z @ z.T * 2), 1)
    return -((logp * same).sum(1) / jnp.maximum(same.sum(1), 1)).mean(), {}


@case("metrics: count, histogram, max, confusion, mean")
def _(net, b):
    o = net(b["x"])
    pred = o.argmax(-1)
    return nll(o, b["y"]).mean(), {
        "correct": (pred == b["y"]).sum(),
        "hist": jnp.bincount(pred, length=C),
        "top": o.max(),
        "mean": o.mean(),
        "confusion": jnp.zeros((C, C), int).at[b["y"], pred].add(1),
        "histogram": jnp.histogram(o, 5, (-3, 3))[0],
        "any": (pred == 0).any(),
        "f1": 2 * ((pred == 1) & (b["y"] == 1)).sum() / jnp.maximum((pred == 1).sum() + (b["y"] == 1).sum(), 1),
        "unique": (jnp.bincount(pred, length=C) > 0).sum(),
        "median": jnp.median(o),
        "rows": o.shape[0],
        "std": o.std(),
    }


@case("LM: masked token mean")
def _(net, b):
    logits = net(b["tokens"])
    mask = jnp.arange(T)[None] < b["lengths"][:, None]
    loss = (nll(logits, b["labels"]) * mask).sum() / mask.sum()
    return loss, {"acc": ((logits.argmax(-1) == b["labels"]) * mask).sum() / mask.sum(), "tokens": mask.sum()}


@case("LM: per-sequence mean, ignore -100, perplexity")
def _(net, b):
    labels = jnp.where(jnp.arange(T) < b["lengths"][:, None], b["labels"], -100)
    mask = labels != -100
    losses = nll(net(b["tokens"]), jnp.where(mask, labels, 0))
    per = jnp.where(mask, losses, 0).sum(1) / mask.sum(1)
    return jnp.exp(per.mean()), {}


@case("LM: flattened (b t), shifted, z-loss, mean over valid")
def _(net, b):
    logits, labels = net(b["tokens"])[:, :-1].reshape(-1, V), b["labels"][:, 1:].reshape(-1)
    valid = (labels > 2).astype(logits.dtype)
    lse = jax.nn.logsumexp(logits, -1)
    return ((nll(logits, labels) + 1e-3 * lse**2) * valid).sum() / valid.sum(), {}


@case("LM: t-major flattening")
def _(net, b):
    logits = net(b["tokens"]).swapaxes(0, 1).reshape(-1, V)
    labels, mask = b["labels"].T.reshape(-1), jnp.repeat(b["mask"][None], T, 0).reshape(-1)
    return (nll(logits, labels) * mask).sum() / mask.sum(), {}


@case("LM: chunked loss (scan over positions, remat)")
def _(net, b):
    logits = net(b["tokens"]).swapaxes(0, 1).reshape(4, T // 4, -1, V)
    labels = b["labels"].T.reshape(4, T // 4, -1)

    @jax.checkpoint
    def chunk(c, xs):
        own, y = xs
        m = y > 1
        return (c[0] + (nll(own, y) * m).sum(), c[1] + m.sum()), None

    (s, n), _ = jax.lax.scan(chunk, (jnp.zeros(()), jnp.zeros((), int)), (logits, labels))
    return s / n, {}


@case("LM: sentence embeddings, contrastive")
def _(net, b):
    z = unit(net(b["tokens"]).mean(1))
    logits = z @ z.T
    return nll(logits * 3, jnp.arange(z.shape[0])).mean(), {}


simple(
    "optax xent + contrastive ntxent",
    lambda o, net, b: optax.softmax_cross_entropy_with_integer_labels(o, b["y"]).sum() + optax.losses.ntxent(o, b["y"]),
)
simple(
    "optax huber, cosine, hinge sums",
    lambda o, net, b: optax.huber_loss(o, b["target"]).sum() + optax.cosine_distance(o, b["target"]).sum(),
)
simple("optax ranking softmax over the batch", lambda o, net, b: optax.losses.ranking_softmax_loss(o[:, 0], b["mask"]))
