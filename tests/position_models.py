"""Models of which every position is worked on alone, their loss and batches, and a strategy that splits positions."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonml_jax as ax

WORDS, WIDTH, ROWS, LENGTH = 11, 6, 8, 6


@dataclasses.dataclass(frozen=True)
class Positions(ax.Replicate, ax.SplitsPositions):
    """Parameters are whole, and an axis splits positions."""

    @property
    def role(self):
        return ax.Role(batch="positions")


class Words(nnx.Module):
    """A model of which every position is worked on alone."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


class LinenWords(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH)(tokens)
        for _ in range(2):
            x = x + jnp.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(WORDS)(x)


def loss(model, batch):
    """Labels of weight 0 fill the end of most rows, so that the last rank may have nothing else; rows have a weight too."""
    each = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"])
    weight = batch["mask"] * batch["rows"][:, None]
    right = (jnp.argmax(model(batch["tokens"]), -1) == batch["labels"]) * weight
    mean = lambda x: ax.WeightedMean(x.sum(), weight.sum())
    return mean(each * weight), {"accuracy": mean(right)}


def batch_of(seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, WORDS, (2, ROWS, length))
    ends = np.array([1, 2, 3, 3, 2, 1, 3, 2])
    mask = (np.arange(length) < ends[:, None]).astype(np.float32)
    return {"tokens": tokens[0], "labels": tokens[1], "mask": mask, "rows": rng.uniform(size=ROWS).astype(np.float32)}
