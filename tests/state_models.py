"""Models whose state joins over ranks, and a loop over all parts of a batch on one device that says what it must become."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from plan_models import F64, linear

import axonml_jax as ax

WIDTH, EXPERTS, LENGTH = 4, 3, 4
TX = optax.sgd(0.1, momentum=0.9)


class Router(nnx.Module):
    """Tokens choose an expert by score and bias; the bias follows how many chose each, once per update."""

    state_joins: ClassVar = {"counts": "sum", "calls": "sum", "largest": "max", "sign": "first", "average": "mean"}

    def __init__(self, rngs):
        self.score = linear(WIDTH, EXPERTS, rngs)
        self.gain = nnx.Param(jnp.linspace(0.5, 1.5, EXPERTS, dtype=F64))
        self.bias = nnx.Variable(jnp.zeros(EXPERTS, F64))
        self.counts = nnx.Variable(jnp.zeros(EXPERTS, jnp.int32))
        self.total = nnx.Variable(jnp.zeros(EXPERTS, jnp.int32))
        self.calls, self.updates = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.int32(0))
        self.largest, self.sign = nnx.Variable(jnp.full((), -9.0, F64)), nnx.Variable(jnp.int8(0))
        self.average, self.plain = nnx.Variable(jnp.zeros(WIDTH, F64)), nnx.Variable(jnp.zeros(WIDTH, F64))

    def __call__(self, x):
        score = self.score(x)
        chosen = jax.nn.one_hot(jnp.argmax(score + self.bias[...], -1), EXPERTS, dtype=F64)
        self.counts[...] += chosen.sum(range(x.ndim - 1)).astype(jnp.int32)
        self.calls[...] += 1
        self.largest[...] = jnp.maximum(self.largest[...], jax.lax.stop_gradient(x).max())
        self.sign[...] = jnp.sign(x[0].mean()).astype(jnp.int8)
        for each in (self.average, self.plain):
            each[...] = 0.9 * each[...] + 0.1 * jax.lax.stop_gradient(x).mean(range(x.ndim - 1))
        return x * (chosen * jax.nn.softmax(score) * self.gain[...]).sum(-1, keepdims=True)

    def after_update(self):
        counts = self.counts[...]
        self.bias[...] += 0.05 * jnp.sign(counts.mean(dtype=F64) - counts)
        self.total[...] += counts
        self.counts[...] = jnp.zeros_like(counts)
        self.updates[...] += 1


class Block(nnx.Module):
    def __init__(self, rngs):
        kinds = {"param_dtype": F64, "rngs": rngs}
        self.up, self.down = ax.ColumnParallelLinear(WIDTH, 6, **kinds), ax.RowParallelLinear(6, WIDTH, **kinds)
        self.router = Router(rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x))) + self.router(x)


class Net(nnx.Module):
    """The second router is used at two places of the model's tree."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = linear(5, WIDTH, rngs), linear(WIDTH, 2, rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.again = self.blocks[1].router

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_fn(model, batch):
    squares = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
    return ax.WeightedMean(squares.sum(), jnp.asarray(squares.size, F64))


def batch_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, LENGTH, 5)), "y": rng.normal(size=(rows, LENGTH, 2))}


class LinenRouter(linen.Module):
    state_joins: ClassVar = {"counts": "sum", "largest": "max"}

    @linen.compact
    def __call__(self, x):
        counts = self.variable("routing", "counts", jnp.zeros, EXPERTS, jnp.int32)
        largest = self.variable("routing", "largest", jnp.zeros, (), F64)
        score = linen.Dense(EXPERTS, param_dtype=F64)(x)
        if not self.is_initializing():
            chosen = jax.nn.one_hot(jnp.argmax(score, -1), EXPERTS, dtype=jnp.int32)
            counts.value += chosen.sum(range(x.ndim - 1), dtype=jnp.int32)
            largest.value = jnp.maximum(largest.value, jax.lax.stop_gradient(x).max())
        return x * score.max(-1, keepdims=True)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH, param_dtype=F64)(x)
        for i in range(2):
            x = x + linen.remat(LinenRouter)(name=f"router_{i}")(x)
        return linen.Dense(2, param_dtype=F64)(x)


def named(tree):
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}


class OneDevice:
    """A loop over all parts of every batch, in Flax and optax alone; no code of the library's runs."""

    def __init__(self, ranks, microbatches, positions=1):
        self.parts = ranks, microbatches, positions
        self.graph, self.params, state = nnx.split(Net(), nnx.Param, ...)
        self.state = state
        self.opt_state = TX.init(self.params)
        self.grad = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    def _loss(self, params, state, rows):
        model = nnx.merge(self.graph, params, state, copy=True)
        loss = loss_fn(model, rows)
        return loss.total, nnx.state(model, nnx.Not(nnx.Param))

    def step(self, batch):
        ranks, microbatches, positions = self.parts
        rows = batch["x"].shape[0] // (ranks * microbatches)
        length, grads, ends, sums, most = LENGTH // positions, [], [], named(self.state), None
        for rank in range(ranks):
            for part in range(positions):
                state = self.state
                for m in range(microbatches):
                    at = (rank * microbatches + m) * rows
                    own = {k: v[at : at + rows, part * length : (part + 1) * length] for k, v in batch.items()}
                    before = named(state)
                    (_, state), grad = self.grad(self.params, state, own)
                    after = named(state)
                    sums = {name: sums[name] + after[name] - before[name] for name in sums}
                    grads.append(grad)
                ends.append(named(state))
                most = ends[-1] if most is None else {n: np.maximum(most[n], x) for n, x in ends[-1].items()}
        kinds = {"counts": sums, "calls": sums, "largest": most, "sign": ends[0]}
        means = {name: np.mean([end[name] for end in ends], 0) for name in sums}
        joined = lambda path: kinds.get(path.split("/")[-2 if path.endswith("value") else -1], means)[path]
        self._finish(grads, batch["x"].shape[0] * LENGTH, joined)

    def _finish(self, grads, weight, joined):
        grads = jax.tree.map(lambda *each: sum(each) / weight, *grads)
        updates, self.opt_state = TX.update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        state = jax.tree_util.tree_map_with_path(
            lambda path, old: jnp.asarray(joined(jax.tree_util.keystr(path, simple=True, separator="/")), old.dtype),
            self.state,
        )
        model = nnx.merge(self.graph, self.params, state, copy=True)
        for block in model.blocks:
            block.router.after_update()
        self.state = nnx.state(model, nnx.Not(nnx.Param))

    @property
    def values(self):
        return named(nnx.to_pure_dict(self.state)), named(nnx.to_pure_dict(self.params))
