"""The models, losses and batches that plans are tested on: small, in float64, one for each trap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import axonml_jax as ax

F64 = jnp.float64


@dataclass(frozen=True)
class Case:
    """A model with its loss and how to make a batch of n rows."""

    model: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], Any]
    typed: bool = True  # whether it passes check_vma=True
    linen: bool = False

    def params(self):
        """A Linen module's variables; None for NNX."""
        model = self.model()
        return model.init(jax.random.key(0), self.batch(2)["x"]) if self.linen else None


def linear(fan_in, fan_out, rngs, use_bias=True):
    return nnx.Linear(fan_in, fan_out, use_bias=use_bias, param_dtype=F64, rngs=rngs)


class DropoutMLP(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = linear(5, 7, rngs), linear(7, 3, rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.unused = nnx.Param(jnp.ones((3,), F64))
        self.scale = nnx.Param(jnp.array(1.5, F64))

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.first(x)))) * self.scale[...]


class BatchNormNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = linear(5, 6, rngs, use_bias=False), linear(6, 3, rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, param_dtype=F64, rngs=rngs)
        self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(6, F64)), nnx.BatchStat(jnp.ones(6, F64))

    def __call__(self, x, mask=None):
        return self.last(jnp.tanh(self.norm(self.first(x), mask=mask)))


class TiedNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 6, param_dtype=F64, rngs=rngs)
        self.blocks = nnx.List([linear(6, 6, rngs) for _ in range(3)])
        self.again = self.blocks[0]

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.embed.attend(self.again(x))


class RecurrentNet(nnx.Module):
    """Its scan starts from plain zeros, as users' recurrent models do."""

    def __init__(self, rngs):
        self.inner, self.outer, self.last = linear(6, 6, rngs), linear(5, 6, rngs), linear(6, 3, rngs)

    def __call__(self, x):
        def cell(h, x):
            return jnp.tanh(self.inner(h) + self.outer(x)), None

        h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], 6), F64), jnp.stack([x, x + 1, x * 2]))
        return self.last(h)


class ScannedNet(nnx.Module):
    """Stacked blocks under lax.scan: their gradients are ready block by block, inside the backward's loop."""

    def __init__(self, rngs):
        key = rngs.params()
        self.stack = nnx.Param(jax.random.normal(key, (4, 6, 6), F64) / 3)
        self.bias = nnx.Param(jnp.zeros((4, 6), F64))
        self.first, self.last = linear(5, 6, rngs), linear(6, 3, rngs)

    def __call__(self, x):
        def block(x, weights):
            kernel, bias = weights
            return x + jnp.tanh(x @ kernel + bias), None

        x, _ = jax.lax.scan(block, self.first(x), (self.stack[...], self.bias[...]))
        return self.last(x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, mask=None):
        x = linen.Dense(6, use_bias=False, param_dtype=F64)(x)
        stats = linen.BatchNorm(
            use_running_average=False, momentum=0.9, param_dtype=F64, force_float32_reductions=False
        )
        return linen.Dense(3, param_dtype=F64)(jnp.tanh(stats(x, mask=mask)))


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dropout(0.3, deterministic=False)(jnp.tanh(linen.Dense(7, param_dtype=F64)(x)))
        return linen.Dense(3, param_dtype=F64)(x)


def regression(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 5)), "y": rng.normal(size=(n, 3)), "w": rng.random(n), "scale": np.float64(1.3)}


def tokens(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 11, (n, 4)), "y": rng.integers(0, 11, (n, 4)), "keep": rng.random((n, 4)) < 0.7}


def mean_loss(model, batch):
    error = model(batch["x"]) - batch["y"]
    return batch["scale"] * jnp.mean(jnp.square(error)), {"mae": jnp.mean(jnp.abs(error))}


def weighted_loss(model, batch):
    losses = jnp.mean(jnp.square(model(batch["x"]) - batch["y"]), -1)
    return ax.WeightedMean(jnp.sum(losses * batch["w"]), jnp.sum(batch["w"]))


def token_loss(model, batch):
    losses = -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][..., None], -1)[..., 0]
    kept = batch["keep"].astype(losses.dtype)
    return ax.WeightedMean(jnp.sum(losses * kept), jnp.sum(kept)), {"tokens": jnp.sum(kept)}


def masked_loss(model, batch):
    rows = len(
        batch["w"]
    )  # of every four rows three or four are kept, so that ranks differ and none has a variance of 0
    mask = jnp.broadcast_to(((batch["w"] > 0.5) | (jnp.arange(rows) % 4 != 3))[:, None], (rows, 6))
    return jnp.mean(jnp.square(model(batch["x"], mask=mask) - batch["y"]))


CASES: dict[str, Case] = {
    "dropout": Case(lambda: DropoutMLP(nnx.Rngs(0)), mean_loss, regression),
    "weighted": Case(lambda: DropoutMLP(nnx.Rngs(1)), weighted_loss, regression),
    "batch_norm": Case(lambda: BatchNormNet(nnx.Rngs(0)), mean_loss, regression),
    "masked_batch_norm": Case(lambda: BatchNormNet(nnx.Rngs(0)), masked_loss, regression),
    "tied": Case(lambda: TiedNet(nnx.Rngs(0)), token_loss, tokens),
    "recurrent": Case(lambda: RecurrentNet(nnx.Rngs(0)), mean_loss, regression, typed=False),
    "scanned": Case(lambda: ScannedNet(nnx.Rngs(0)), weighted_loss, regression),
    "linen_batch_norm": Case(LinenNet, mean_loss, regression, linen=True),
    "linen_masked": Case(LinenNet, masked_loss, regression, linen=True),
    "linen_dropout": Case(LinenDropout, weighted_loss, regression, linen=True),
}


def unstacked(values):
    """The inverse of `axonml_jax.models.transformer.stacked`."""
    found = {}
    for name, value in values.items():
        if name.startswith("blocks/layer/"):
            found |= {name.replace("/layer/", f"/{i}/", 1): part for i, part in enumerate(np.asarray(value))}
        else:
            found[name] = value
    return found
