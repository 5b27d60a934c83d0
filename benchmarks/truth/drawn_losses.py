"""Losses drawn from a grammar of what people write, under plans, against one plain `jax.value_and_grad` of the whole batch.

    python benchmarks/truth/drawn_losses.py [--seconds 600] [--first 0] [--plans "ddp; fsdp; ..."] [--each 2] [--terms 5]

A loss is a few operations of `TERMS` drawn one after another, each of values that are there already (the batch's arrays, what
the model makes of them, parameters, earlier results), and a few reductions of those. `meaning.py` tells whether two steps of
SGD are those of one device. Prints every loss that is different or crashed as the calls it is made of, with the number that
draws it once more (`--first N --count 1`), and at the end how often each operation was in a loss and in one that was refused.
"""

import argparse
import collections
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import axonml_jax as ax

if __name__ == "__main__":
    ax.fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent))
from meaning import LIMIT, PLANS, cell, plain
from meaning_losses import Net, batch_of, nll, weight

lax = jax.lax
Drawn = tuple[list[tuple], list[tuple], list[tuple]]
"""The terms, the reductions that are added to be the loss, and those that are metrics: each a name, operands and a number."""

TERMS: dict[str, tuple] = {}
"""By name the kinds of the operands and a function of them, and of a number that tells variants."""


LEN = [0]
"""The batch's rows of the loss that runs."""


def rows():
    """How many rows the batch has, as a loss reads it of a shape."""
    return LEN[0]


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


KINDS = {
    "any": lambda x, n: is_float(x),
    "rows": lambda x, n: is_float(x) and x.ndim >= 1 and x.shape[0] == n,
    "matrix": lambda x, n: is_float(x) and x.ndim == 2 and x.shape[0] == n and x.shape[1] != n,
    "vector": lambda x, n: is_float(x) and x.shape == (n,),
    "square": lambda x, n: is_float(x) and x.shape == (n, n),
    "scalar": lambda x, n: is_float(x) and x.ndim == 0,
    "wide": lambda x, n: is_float(x) and x.ndim >= 2,
    "numbers": lambda x, n: x.dtype == jnp.int64 and x.shape == (n,),
    "flags": lambda x, n: x.dtype == bool and x.ndim >= 1 and x.shape[0] == n,
}
"""By name which values of a batch of n rows may be an operand."""

# ---- of each number


def named(name, *kinds):
    return lambda fun: TERMS.__setitem__(name, (kinds, fun))


named("each", "any")(
    lambda x, k: [jnp.tanh, jnp.sin, jnp.square, jax.nn.softplus, jnp.abs, jax.nn.relu, jnp.floor][k % 7](x)
)
named("scaled", "any")(lambda x, k: x * [0.5, -2.0, 3][k % 3])
named("shifted", "any")(lambda x, k: x + [1.0, -0.5][k % 2])
named("combined", "any", "any")(lambda x, y, k: [jnp.add, jnp.multiply, jnp.subtract, jnp.maximum][k % 4](x, y))
named("ratio", "any", "any")(lambda x, y, k: x / (1 + jnp.square(y)))
named("chosen", "flags", "rows", "rows")(lambda f, x, y, k: jnp.where(along(f, x), x, y))
named("masked", "flags", "rows")(lambda f, x, k: jnp.where(along(f, x), x, [0.0, -1e3, 1.0][k % 3]))
named("compared", "any", "any")(lambda x, y, k: x > y)
named("above", "rows")(lambda x, k: x > [0.0, 0.3][k % 2])
named("numbered", "flags")(lambda f, k: f.astype(jnp.float64))
named("still", "any")(lambda x, k: lax.stop_gradient(x))
named("clipped", "any")(lambda x, k: jnp.clip(x, -0.7, 0.7))
named("checkpointed", "any")(lambda x, k: jax.checkpoint(lambda a: jnp.sin(a) * a)(x))
named("jitted", "any")(lambda x, k: jax.jit(lambda a: jnp.sin(a) + a)(x))
# ---- over classes
named("softmax", "wide")(lambda x, k: [jax.nn.softmax, jax.nn.log_softmax][k % 2](x, -1))
named("over last", "wide")(
    lambda x, k: [jnp.sum, jnp.mean, jnp.max, jax.nn.logsumexp, jnp.std, jnp.min, jnp.linalg.norm][k % 7](x, axis=-1)
)
named("unit", "wide")(lambda x, k: x / jnp.linalg.norm(x, axis=-1, keepdims=True))
named("sorted classes", "wide")(lambda x, k: jnp.sort(x, -1))
named("top classes", "wide")(lambda x, k: lax.top_k(x, 2)[k % 2].astype(jnp.float64))
named("argmax", "matrix")(lambda x, k: x.argmax(-1))
named("cumulated classes", "wide")(lambda x, k: jnp.cumsum(x, -1))
named("one class", "matrix")(lambda x, k: x[:, k % 2])
named("picked", "matrix", "numbers")(
    lambda x, y, k: (
        jnp.take_along_axis(x, y[:, None] % x.shape[1], 1)[:, 0] if k % 2 else x[jnp.arange(x.shape[0]), y % x.shape[1]]
    )
)
named("nll", "matrix", "numbers")(lambda x, y, k: nll(x, y % x.shape[1]))
named("hot", "numbers")(lambda y, k: jax.nn.one_hot(y % 5, 5, dtype=jnp.float64))
named("vmapped", "matrix")(
    lambda x, k: jax.vmap(
        [lambda r: r[0] * r, lambda r: jnp.outer(r, r).sum(0), lambda r: jnp.sort(r)[:2], jax.nn.softmax][k % 4]
    )(x)
)
named("scanned classes", "matrix")(lambda x, k: lax.scan(lambda c, r: (0.5 * c + r, c * r), x[:, 0], x.T)[k % 2 - 1].T)
named("outer", "matrix")(lambda x, k: jnp.einsum("ni,nj->nij", x, x))
named("flat", "wide")(lambda x, k: x.reshape(x.shape[0], -1))
named("all flat", "rows")(lambda x, k: x.reshape(-1))
# ---- over rows
named("over rows", "rows")(
    lambda x, k: [jnp.mean, jnp.sum, jnp.max, jnp.min, jnp.var, jax.nn.logsumexp, jnp.median, jnp.linalg.norm][k % 8](
        x, axis=0
    )
)
named("kept mean", "rows")(lambda x, k: x - x.mean(0, keepdims=True))
named("standardized", "rows")(lambda x, k: (x - x.mean()) / (x.std() + 1e-3))
named("share", "rows", "rows")(lambda x, y, k: x.sum() / (1 + jnp.square(y).sum()))
named("by count", "any")(lambda x, k: x / [rows(), rows() - 1][k % 2])
named("masked mean", "flags", "vector")(lambda f, x, k: jnp.where(f, x, 0).sum() / jnp.maximum(f.sum(), 1))
named("mean where", "flags", "vector")(lambda f, x, k: jnp.mean(x, where=f.reshape(f.shape[0], -1)[:, 0]))
named("alike", "matrix", "matrix")(lambda x, y, k: x @ jnp.resize(y, (y.shape[0], x.shape[1])).T)
named("crossed", "matrix", "matrix")(lambda x, y, k: x.T @ y)
named("distances", "vector", "vector")(lambda x, y, k: x[:, None] - y[None])
named("diagonal", "square")(lambda x, k: [jnp.diag, jnp.diagonal][k % 2](x))
named("off diagonal", "square")(lambda x, k: jnp.where(jnp.eye(x.shape[0], dtype=bool), [-1e3, 0.0][k % 2], x))
named("triangle", "square")(lambda x, k: jnp.tril(x, -1))
named("turned", "wide")(lambda x, k: jnp.swapaxes(x, 0, -1))
named("sorted rows", "rows")(lambda x, k: jnp.sort(x, 0))
named("ordered", "vector", "rows")(lambda x, y, k: y[jnp.argsort(x)])
named("best rows", "vector")(lambda x, k: lax.top_k(x, 3)[0])
named("cumulated rows", "rows")(lambda x, k: jnp.cumsum(x, 0))
named("rolled", "rows")(lambda x, k: jnp.roll(x, 1, 0))
named("flipped", "rows")(lambda x, k: x[::-1])
named("halves", "rows")(lambda x, k: x[: x.shape[0] // 2] * x[x.shape[0] // 2 :])
named("every other", "rows")(lambda x, k: x[k % 2 :: 2])
named("one row", "rows")(lambda x, k: x[[0, -1, 1][k % 3]])
named("pairs", "rows")(lambda x, k: x.reshape(-1, 2, *x.shape[1:]))
named("joined", "matrix", "matrix")(lambda x, y, k: jnp.concatenate([x, jnp.resize(y, x.shape)], 0))
named("stacked", "vector", "vector")(lambda x, y, k: jnp.stack([x, y], k % 2))
named("neighbours", "rows")(lambda x, k: x[1:] - x[:-1])
named("grouped", "rows", "numbers")(lambda x, y, k: jax.ops.segment_sum(x, y, 11))
named("group of each", "rows", "numbers")(lambda x, y, k: jax.ops.segment_sum(x, y, 11)[y])
named("added at", "vector", "numbers")(lambda x, y, k: jnp.zeros(11).at[y].add(x))
named("counted", "numbers")(lambda y, k: jnp.bincount(y, length=11).astype(jnp.float64))
named("looked up", "rows", "numbers")(lambda x, y, k: x[y % x.shape[0]])
named("scanned rows", "rows")(
    lambda x, k: lax.scan(lambda c, r: (0.5 * c + r, c * r), jnp.zeros(x.shape[1:]), x)[k % 2]
)
named("mapped rows", "rows")(lambda x, k: lax.map(lambda r: jnp.sin(r) * r, x))
named("any row", "flags")(lambda f, k: jnp.any(f, 0) if k % 2 else jnp.all(f, 0))
named("how many", "flags")(lambda f, k: jnp.sum(f, 0).astype(jnp.float64))
named("branch", "scalar", "any")(lambda c, x, k: lax.cond(c > 0.1, jnp.sin, lambda a: a * 2, x))
named("branch on any", "flags", "any")(lambda f, x, k: lax.cond(f.any(), jnp.sin, lambda a: a * 2, x))
named("loop", "any")(lambda x, k: lax.fori_loop(0, 3, lambda i, a: jnp.sin(a) + i * x, x))
named("positions", "rows")(lambda x, k: x * along(jnp.arange(x.shape[0]), x))
named("slope", "rows")(lambda x, k: jax.grad(lambda a: [jnp.sum, jnp.mean][k % 2](jnp.sin(a) * a))(x))
named("quantile", "vector")(lambda x, k: jnp.quantile(x, 0.3))
named("middle", "vector")(lambda x, k: lax.dynamic_slice(x, (1,), (2,)))
named("windows", "matrix")(
    lambda x, k: lax.reduce_window(x, 0.0, lax.add, (2, 1) if k % 2 else (1, 2), (1, 1), "VALID")
)
named("converged", "matrix")(lambda x, k: sinkhorn(x))
named("whitened", "matrix")(lambda x, k: x @ jnp.linalg.inv(x.T @ x + jnp.eye(x.shape[1])))
named("solved", "matrix")(
    lambda x, k: jnp.linalg.solve(jnp.einsum("ni,nj->nij", x, x) + jnp.eye(x.shape[1]), x[..., None])[..., 0]
)

ENDS: dict[str, Any] = {
    "mean": lambda x: x.mean(),
    "mean of squares": lambda x: jnp.square(x).mean(),
    "sum": lambda x: x.sum() / 50,
    "sum by rows": lambda x: x.sum() / rows(),
    "mean of row sums": lambda x: x.reshape(x.shape[0] if x.ndim else 1, -1).sum(-1).mean(),
    "largest": lambda x: x.max(),
    "logsumexp": lambda x: jax.nn.logsumexp(x),
    "variance": lambda x: x.var(),
    "norm": lambda x: jnp.sqrt(1 + jnp.square(x).sum()),
    "first": lambda x: x.reshape(-1)[0],
    "mean over nonzero": lambda x: x.sum() / (1 + (x != 0).sum()),
    "average": lambda x: jnp.average(x, weights=jnp.abs(x) + 1),
}
"""By name what makes a loss or a metric of values."""
USUAL = ("mean", "mean of squares", "mean of row sums", "mean", "mean of squares", "sum by rows")


def along(f, x):
    """A value of rows with dims added, to be beside another of rows."""
    f = f.reshape(f.shape[0], -1)[:, 0]
    return f.reshape(f.shape + (1,) * (x.ndim - 1))


def sinkhorn(x):
    """A matrix whose rows and columns are made to add up in turns, as of SwAV."""
    q = jnp.exp(x)
    for _ in range(2):
        q = q / q.sum(0, keepdims=True) / q.shape[1]
        q = q / q.sum(1, keepdims=True) / q.shape[0]
    return q


def sources(net, batch):
    """What a loss begins with, by the order in which terms count values."""
    out = net(batch["x"])
    found = [
        out,
        out,
        out,
        batch["x"],
        batch["target"],
        batch["adv"],
        batch["mask"],
        batch["flags"],
        batch["y"],
        batch["group"],
    ]
    return [*found, weight(net, "temp"), weight(net, "w2"), net(batch["x2"])]


def run(drawn: Drawn, net, batch):
    """The loss and its metrics."""
    terms, loss, metrics = drawn
    LEN[0] = batch["x"].shape[0]
    values = sources(net, batch)
    for name, operands, k in terms:
        values.append(TERMS[name][1](*(values[i] for i in operands), k))
    ended = lambda end: ENDS[end[0]](values[end[1][0]].astype(jnp.float64))
    total = sum(0.7**i * ended(end) for i, end in enumerate(loss))
    return (total, {f"m{i}": ended(end) for i, end in enumerate(metrics)}) if metrics else total


def draw_loss(seed: int, most: int) -> tuple[Drawn, Any]:
    """A loss that is finite on one device, drawn by a number; and that function."""
    draw = random.Random(seed)
    net = Net(nnx.Rngs(0))
    batch = jax.tree.map(jnp.asarray, batch_of(ROWS))
    while True:
        LEN[0] = ROWS
        values, terms = sources(net, batch), []
        count = len(values)
        made = [0, 1, 2]  # what follows from the model
        while len(terms) < draw.randint(1, most):
            name = draw.choice(list(TERMS))
            kinds, fun = TERMS[name]
            fits = [[i for i, x in enumerate(values) if KINDS[kind](x, ROWS)] for kind in kinds]
            if not all(fits):
                continue
            late = [[i for i in own if i >= count or i < 3] or own for own in fits]
            operands = tuple(
                draw.choice(own if draw.random() < 0.3 else new) for own, new in zip(fits, late, strict=True)
            )
            k = draw.randrange(100)
            try:
                value = fun(*(values[i] for i in operands), k)
            except (TypeError, ValueError, IndexError):
                continue
            if value.size == 0 or value.size > 40_000 or not bool(jnp.isfinite(value).all()):
                continue
            terms.append((name, operands, k))
            values.append(value)
            if set(operands) & set(made):
                made.append(len(values) - 1)
        may = [i for i in made if is_float(values[i])]
        new = [i for i in may if i >= count] or may
        any_end = lambda: draw.choice(USUAL if draw.random() < 0.6 else list(ENDS))
        loss = [
            (any_end(), (draw.choice(new if draw.random() < 0.8 else may),), 0)
            for _ in range(draw.choice([1, 1, 1, 2]))
        ]
        metrics = [(any_end(), (draw.choice(range(3, len(values))),), 0) for _ in range(draw.choice([0, 0, 1, 2]))]
        drawn = _needed((terms, loss, metrics), count)
        found = jax.tree.leaves(run(drawn, net, batch))
        if drawn[0] and all(bool(jnp.isfinite(x)) and abs(float(x)) < 1e6 for x in found):
            return drawn, partial(run, drawn)


def _needed(drawn: Drawn, count: int) -> Drawn:
    """A loss without the terms that nothing reads."""
    terms, loss, metrics = drawn
    kept = {i for _, operands, _ in (*loss, *metrics) for i in operands}
    for at in range(len(terms) - 1, -1, -1):
        if count + at in kept:
            kept.update(terms[at][1])
    new = {i: i for i in range(count)}
    for at in range(len(terms)):
        if count + at in kept:
            new[count + at] = len(new)
    moved = lambda steps: [(name, tuple(new[i] for i in operands), k) for name, operands, k in steps]
    return moved([step for at, step in enumerate(terms) if count + at in kept]), moved(loss), moved(metrics)


ROWS = 32


def moved(params):
    """The largest change of an element of the parameters since the start."""
    start = nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, start)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument(
        "--plans", default="ddp; fsdp; ddp, accumulate; fsdp, accumulate; one device, accumulate; pipeline"
    )
    parser.add_argument("--each", type=int, default=2, help="how many of the plans a loss is tried under")
    parser.add_argument("--terms", type=int, default=5)
    parser.add_argument("--sweeps", action="store_true", help="take what is refused in microbatches with two sweeps")
    parser.add_argument("--refused", action="store_true", help="print what is refused, too")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    plans = [name for name in PLANS if name in given.plans.split("; ")]
    tried, refused, outcomes, start = collections.Counter(), collections.Counter(), collections.Counter(), time.time()
    for seed in range(given.first, given.first + given.count):
        if time.time() - start > given.seconds:
            break
        drawn, fun = draw_loss(seed, given.terms)
        draw = random.Random(seed + 1)
        wanted = plain(fun, ROWS)
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(wanted)) or moved(wanted[1]) < 1e-7:
            continue
        for plan in draw.sample(plans, given.each):
            linen, check_vma = draw.random() < 0.3, draw.random() < 0.3
            try:
                found = cell(fun, wanted, ROWS, plan, linen=linen, check_vma=check_vma, sweeps=given.sweeps)
            except Exception as error:
                found = f"CRASHED {type(error).__name__}: {str(error)[:600]}"
            kind = "equal" if not isinstance(found, str) and found < LIMIT else str(found).split(":")[0].split(" ")[0]
            kind = kind if isinstance(found, str) or kind == "equal" else "DIFFERENT"
            outcomes[plan, kind] += 1
            names = {name for name, *_ in drawn[0]} | {f"end {name}" for name, *_ in (*drawn[1], *drawn[2])}
            tried.update((plan, name) for name in names)
            if kind == "refused":
                refused.update((plan, name) for name in names)
            if kind not in (("equal",) if given.refused else ("equal", "refused")):
                text = found if isinstance(found, str) else f"{found:.1e}"
                print(f"{seed} {plan}{' linen' * linen}{' vma' * check_vma} {kind} {text}\n    {drawn}", flush=True)
        jax.clear_caches()
    for plan in plans:
        print(plan, {kind: count for (own, kind), count in outcomes.items() if own == plan})
        often = [(refused[key] / tried[key], key[1], tried[key]) for key in tried if key[0] == plan and refused[key]]
        print(
            "   refused:",
            "; ".join(f"{name} {share:.0%} of {count}" for share, name, count in sorted(often)[::-1][:30]),
        )
    return any(kind not in ("equal", "refused") for _, kind in outcomes)


if __name__ == "__main__":
    sys.exit(main())
