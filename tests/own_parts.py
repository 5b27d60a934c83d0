"""Models, losses and data that a configuration of a test names: what is right, and what is refused."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import axonml_jax as ax


class Net(nnx.Module):
    """Two layers and two more."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(3, width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.down = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.up(x))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.down(x)


class Stacked(nnx.Module):
    """Blocks as one stack, which a scan reads a slice at a time."""

    def __init__(self, width: int, depth: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(3, width, rngs=rngs)
        make = nnx.vmap(lambda rngs: nnx.Linear(width, width, rngs=rngs), in_axes=0)
        self.blocks = make(rngs.split(depth))
        self.down = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        step = lambda x, block: (jnp.tanh(block(x)), None)
        x, _ = nnx.scan(step, in_axes=(nnx.Carry, 0))(jnp.tanh(self.up(x)), self.blocks)
        return self.down(x)


class Split(nnx.Module):
    """Two layers whose middle is split over `tensor`."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = ax.ColumnParallelLinear(3, width, rngs=rngs)
        self.down = ax.RowParallelLinear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class LinenNet(linen.Module):
    """As Net in Linen, called with the mode."""

    width: int

    @linen.compact
    def __call__(self, x, train):
        del train
        for _ in range(3):
            x = jnp.tanh(linen.Dense(self.width)(x))
        return linen.Dense(1)(x)


class Heads(linen.Module):
    """Kernels of three dims without a bias, of which nothing else tells what they are multiplied as."""

    @linen.compact
    def __call__(self, x):
        x = linen.DenseGeneral((2, 4), use_bias=False, name="query")(x)
        return linen.DenseGeneral(1, axis=(-2, -1), use_bias=False, name="out")(jnp.tanh(x))


class Words(nnx.Module):
    """Logits of bytes."""

    def __init__(self, rngs):
        self.table = nnx.Embed(256, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.table.attend(self.table(tokens))


class WordByWord(Words):
    """The same, which says that it may see one rank's positions."""

    splits_positions = True


def squares(model, batch, scale=1.0):
    return scale * jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


class Squares:
    """The same as an object, which tells a Linen module its mode."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, model, batch):
        return self.scale * jnp.mean((model(batch["x"], model.is_training)[:, 0] - batch["y"]) ** 2)


def columns(n=64, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


def mixture(n=64):
    """Two sources, the first with nine of ten rows."""
    return ax.mix({"a": columns(n), "b": columns(n, 1)}, {"a": 0.9, "b": 0.1})


def spoiled(n, bad):
    """Columns in which some rows have targets that are far off."""
    found = columns(n)
    found["y"][bad] = 1e3
    return found


def rows(n=64):
    """A generator: samples that can only be iterated over."""
    found = columns(n)
    for x, y in zip(found["x"], found["y"], strict=True):
        yield {"x": x, "y": y}


def texts():
    return ["a", "b"]


def once():
    return iter([{"x": 1.0}])


def nothing():
    return 3


class Notes(ax.Callback):
    """Keeps what it hears, for all objects together."""

    heard: ClassVar[list] = []

    def __init__(self, fail=None):
        self.fail = fail

    def hear(self, name, event):
        values = {key: float(np.mean(value)) for key, value in event.metrics.items()}
        self.heard.append((name, event.step, values, event.path, event.reason))
        if name == self.fail:
            raise ValueError("enough")

    def on_step(self, event):
        self.hear("on_step", event)

    def on_eval(self, event):
        self.hear("on_eval", event)

    def on_save(self, event):
        self.hear("on_save", event)

    def on_end(self, event):
        self.hear("on_end", event)


class Misspelt(ax.Callback):
    def on_evaluation(self, event):
        """Nobody calls it."""


def ids(n=64, beyond=0):
    """Rows of token ids below 32, some targets ignored as Hugging Face does, some beyond where asked for."""
    tokens = np.random.default_rng(0).integers(0, 32, (n, 8)).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[:, -1] = -100
    targets[-1, 0] += beyond
    return {"tokens": tokens, "targets": targets}
