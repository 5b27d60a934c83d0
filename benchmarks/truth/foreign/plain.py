"""The oracle: a model trained by `jax.jit` on one device, without a line of the library.

What a plan promises is written out here: the loss is the mean over the global batch, one AdamW update per batch; BatchNorm
sees a whole microbatch at a time; keys of dropout are folded from step, microbatch, shard and call; bf16 casts parameters and
the call's floats.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def adamw(dtype: Any = None) -> optax.GradientTransformation:
    """The optimizer of every run; its epsilon keeps rounding noise, such as a key bias's gradient, from being scaled up.

    In bf16 a gradient is rounded by up to 2e-3 of itself on every shard before it is reduced, so that its elements near zero
    carry an error of 1e-3 or so.
    """
    return optax.adamw(1e-2, eps=1e-3 if dtype is None else 1e-2, weight_decay=1e-2)


def cast(tree: Any, dtype: Any) -> Any:
    """Floating leaves in `dtype`; None leaves all as they are."""
    if dtype is None:
        return tree
    floats = lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if floats(x) else x, tree)


class LinenCall:
    """A Linen module applied to given variables, called as the library's is."""

    is_training = True

    def __init__(self, module: Any, params: Any, state: Any, key: Any, dtype: Any):
        self.module, self.params, self.state, self.key, self.dtype, self.calls = module, params, state, key, dtype, 0

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), self.dtype)
        key = jax.random.fold_in(self.key, self.calls)
        self.calls += 1
        rngs = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
        variables = {"params": cast(self.params, self.dtype), **self.state}
        out, self.state = self.module.apply(
            variables, *args, rngs=rngs, mutable=list(self.state), method=method, **kwargs
        )
        return cast(out, self.dtype and jnp.float32)


class Linen:
    """A Linen module's arrays, and its call."""

    def __init__(self, made: Any):
        self.module = made.model
        self.params = made.params["params"]
        self.state = {name: tree for name, tree in made.params.items() if name != "params"}

    def call(self, params: Any, state: Any, key: Any, dtype: Any) -> LinenCall:
        """What the loss function gets."""
        return LinenCall(self.module, params, state, key, dtype)

    def state_of(self, called: LinenCall) -> Any:
        """The other collections after the call."""
        return {name: called.state[name] for name in self.state}

    def named(self, params: Any, state: Any) -> dict[str, Any]:
        """All arrays by path name."""
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves({"params": params, **state})}


class NNX:
    """An NNX module's arrays, and its call."""

    def __init__(self, made: Any):
        self.graphdef, self.params, self.streams, self.state = nnx.split(made.model, nnx.Param, nnx.RngState, ...)

    def call(self, params: Any, state: Any, key: Any, dtype: Any) -> Any:
        """What the loss function gets."""
        model = nnx.merge(self.graphdef, cast(params, dtype), self.streams, state, copy=True)
        if dtype is None:
            return model
        return lambda *args, **kwargs: cast(model(*cast(args, dtype), **cast(kwargs, dtype)), jnp.float32)

    def state_of(self, called: Any) -> Any:
        """None of the models here changes any."""
        return self.state

    def named(self, params: Any, state: Any) -> dict[str, Any]:
        """All arrays by path name."""
        pure = {**nnx.to_pure_dict(params)}, nnx.to_pure_dict(state)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for tree in pure for p, x in leaves(tree)}


def leaves(tree: Any) -> list:
    """Paths and leaves."""
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def train(made: Any, batches: list, shards: int, microbatches: int, dtype: Any, seed: int = 0) -> dict[str, Any]:
    """Losses, gradient norms, and all arrays by name before and after one update per batch.

    Args:
      made: the model (see `family.py`).
      batches: global batches.
      shards, microbatches: into which parts a batch is cut; 1 where nothing depends on them.
      dtype: of parameters and floats as the model reads them; None: as they are.
      seed: of random numbers drawn in training.
    """
    view = NNX(made) if made.params is None else Linen(made)
    tx = adamw(dtype)

    def loss(params: Any, state: Any, key: Any, batch: Any) -> Any:
        rows = jax.tree.map(lambda x: x.reshape(shards, microbatches, -1, *x.shape[1:]), batch)
        total = 0.0
        for a in range(microbatches):
            for r in range(shards):
                part = jax.random.fold_in(jax.random.fold_in(key, a), r)
                called = view.call(params, state, part, dtype)
                total += made.loss_fn(called, jax.tree.map(lambda x, r=r, a=a: x[r, a], rows))
                state = view.state_of(called)
        return total / (shards * microbatches), state

    @jax.jit
    def step(params: Any, state: Any, moments: Any, key: Any, batch: Any) -> Any:
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, key, batch)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments, value, optax.global_norm(grads)

    params, state, key = view.params, view.state, jax.random.key(seed)
    before, moments, seen = view.named(params, state), tx.init(params), []
    for i, batch in enumerate(batches):
        params, state, moments, *numbers = step(params, state, moments, jax.random.fold_in(key, i), batch)
        seen.append([float(n) for n in numbers])
    to_host = lambda named: {name: np.asarray(x, np.float64) for name, x in named.items()}
    losses, norms = map(list, zip(*seen, strict=True))
    return {"losses": losses, "norms": norms, "before": to_host(before), "after": to_host(view.named(params, state))}
