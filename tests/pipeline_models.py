"""Models for pipelines: stages that differ in everything, in float64, as NNX modules, as Linen modules, and as one model."""

import jax
import jax.numpy as jnp
from flax import linen, nnx
from plan_models import F64, linear, mean_loss, regression, token_loss, tokens

from axonml_jax.pipeline.assign import Chain, LinenChain, join_variables


class Hidden(nnx.Module):
    """Sends a pytree: what it computed, and a number, the mean of its weights."""

    def __init__(self, fan_in, fan_out, rngs):
        self.layer, self.dropout = linear(fan_in, fan_out, rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        x = x["h"] + x["mean"] if isinstance(x, dict) else x
        h = self.dropout(jnp.tanh(self.layer(x)))
        return {"h": h, "mean": self.layer.kernel[...].mean()}


class Head(nnx.Module):
    """Normalizes with mutable averages."""

    def __init__(self, width, rngs):
        self.norm = nnx.BatchNorm(width, momentum=0.9, param_dtype=F64, rngs=rngs)
        self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(width, F64)), nnx.BatchStat(jnp.ones(width, F64))
        self.last = linear(width, 3, rngs)
        self.unused = nnx.Param(jnp.ones((3,), F64))

    def __call__(self, x):
        return self.last(self.norm(x["h"])) + x["mean"]


def chain(num_stages):
    """Stages of widths 5 -> 7 -> 4 -> 7 -> ... -> 3 with dropout and BatchNorm."""
    rngs, widths = nnx.Rngs(1), [5, 7, 4] * num_stages
    modules = [Hidden(widths[i], widths[i + 1], rngs) for i in range(num_stages - 1)]
    return Chain([*modules, Head(widths[num_stages - 1], rngs)], [1] * num_stages)


class LinenStage(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.3, deterministic=False)(jnp.tanh(linen.Dense(self.width, param_dtype=F64)(x)))


def linen_chain(num_stages):
    """The same for Linen, without state: (model, variables)."""
    modules = [LinenStage(width) for width in [7, 4, 6, 5, 7, 4, 6][: num_stages - 1]] + [LinenStage(3)]
    x, variables = jnp.zeros((2, 5), F64), []
    for i, module in enumerate(modules):
        variables.append(module.init({"params": jax.random.key(i), "dropout": jax.random.key(0)}, x))
        x = module.apply(variables[-1], x, rngs={"dropout": jax.random.key(0)})
    return LinenChain(tuple(modules), (1,) * num_stages), join_variables(variables)


class Language(nnx.Module):
    """Repeated blocks between an embedding that is tied to the head, a skip from the first to the last, a shared scale."""

    def __init__(self, num_blocks, rngs):
        self.embed = nnx.Embed(11, 6, param_dtype=F64, rngs=rngs)
        self.scale = nnx.Param(jnp.array(1.5, F64))
        self.blocks = nnx.List([linear(6, 6, rngs) for _ in range(num_blocks)])
        self.norm = nnx.LayerNorm(6, param_dtype=F64, rngs=rngs)

    def __call__(self, tokens):
        first = x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.scale[...] * jnp.tanh(block(x))
        return self.embed.attend(self.norm(x + first))


class StackedBlock(nnx.Module):
    """One of the blocks that a loop runs over: dropout, mutable averages, a number of its own."""

    def __init__(self, width, rngs):
        self.layer, self.dropout = linear(width, width, rngs), nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, param_dtype=F64, rngs=rngs)
        self.norm.mean, self.norm.var = nnx.BatchStat(jnp.zeros(width, F64)), nnx.BatchStat(jnp.ones(width, F64))
        self.gain = nnx.Param(jnp.array(0.7, F64))

    def __call__(self, x):
        return x + self.gain[...] * self.dropout(jnp.tanh(self.layer(self.norm(x))))


class Stacked(nnx.Module):
    """`Language` with blocks whose parameters are stacked for one loop, in which each row adds to a penalty."""

    def __init__(self, num_blocks, rngs):
        self.embed = nnx.Embed(11, 6, param_dtype=F64, rngs=rngs)
        make = nnx.vmap(lambda rngs: StackedBlock(6, rngs), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=num_blocks)(make)(rngs)
        self.norm = nnx.LayerNorm(6, param_dtype=F64, rngs=rngs)

    def __call__(self, tokens):
        def run(x, block):
            return (y := block(x)), jnp.mean(jnp.square(y), -1)

        first = self.embed(tokens)
        x, squares = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(first, self.blocks)
        return self.embed.attend(self.norm(x + first)) + jnp.mean(squares, 0)[..., None]


class LinenRow(linen.Module):
    """One of the blocks of a Linen loop."""

    @linen.compact
    def __call__(self, x, _):
        norm = linen.BatchNorm(use_running_average=False, momentum=0.9, dtype=F64, param_dtype=F64)
        h = linen.Dropout(0.3, deterministic=False)(jnp.tanh(linen.Dense(7, param_dtype=F64)(norm(x))))
        return x + linen.Dense(6, param_dtype=F64)(h), None


class LinenStacked(linen.Module):
    """A Linen model with a loop over stacked blocks, recomputed one by one."""

    num_blocks: int

    @linen.compact
    def __call__(self, x):
        collections, streams = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
        rows = linen.scan(linen.remat(LinenRow), variable_axes=collections, split_rngs=streams, length=self.num_blocks)
        x, _ = rows()(linen.Dense(6, param_dtype=F64)(x), None)
        return linen.Dense(3, param_dtype=F64)(x)


def linen_stacked(num_blocks):
    """The Linen loop: (model, variables)."""
    model = LinenStacked(num_blocks)
    made = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((2, 5), F64))
    return model, wide(made)


def wide(tree):
    """Flax makes averages in float32. Dicts keep their order, from which stages are known."""
    return {name: wide(x) if isinstance(x, dict) else x.astype(F64) for name, x in tree.items()}


MODELS = {
    "chain": lambda stages: (chain(stages), None, mean_loss, regression),
    "linen": lambda stages: (*linen_chain(stages), mean_loss, regression),
    "language": lambda stages: (Language(stages + 1, nnx.Rngs(0)), None, token_loss, tokens),
    "stacked": lambda stages: (Stacked(2 * stages, nnx.Rngs(0)), None, lambda *given: token_loss(*given)[0], tokens),
    "linen-stacked": lambda stages: (*linen_stacked(2 * stages), mean_loss, regression),
}
"""By name `f(number of stages) -> (model, params, loss_fn, batch of n rows)`."""
