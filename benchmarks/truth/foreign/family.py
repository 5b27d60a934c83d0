"""A family of models that others publish: how one is made, what it is trained on, and how its parameters may be split."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

ROWS = 8
"""Of every global batch: 2 or 4 shards of 2 microbatches (under a pipeline twice 2) of one row or more."""


@dataclass(frozen=True)
class Made:
    """A model as a user would hold it, and what its training needs.

    Attributes:
      model: an NNX module, or a Linen module.
      params: a Linen module's variables; None for NNX.
      loss_fn: `loss_fn(model, batch)`, a mean over the rows.
      batch: `batch(generator)` draws a global batch.
      rules: for `ax.TensorParallel`.
      example: what `ax.auto_parallelize` is given to trace a call.
      draws: the model draws random numbers while it trains: its parts are run shard by shard with the documented keys.
      double: all of it computes in the dtype it is given; else some of it is float32 whatever one says.
    """

    model: Any
    params: Any
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[np.random.Generator], Any]
    rules: Mapping[str, PartitionSpec]
    example: Any = None
    draws: bool = False
    double: bool = True


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
      name: of the model, as its package calls it.
      kind: what it stands for.
      package: which one must be installed.
      make: `make(dtype)`: the model computing in `dtype` (float64 or bfloat16), where it lets itself be told.
    """

    name: str
    kind: str
    package: str
    make: Callable[[Any], Made]

    def made(self, dtype: Any) -> Made:
        """The model with every parameter off its first value: zeros and ones hide mistakes."""
        made, generator = self.make(dtype), np.random.default_rng(7)
        rest = jnp.float32 if dtype == jnp.bfloat16 else jnp.float64

        def moved(w: Any) -> Any:
            if not jnp.issubdtype(w.dtype, jnp.floating):
                return w
            return jnp.asarray(np.asarray(w, np.float64) + generator.normal(size=w.shape) / 10, rest)

        if made.params is not None:
            trained = jax.tree.map(moved, dict(made.params["params"]))
            others = {name: jax.tree.map(lambda w: w.astype(rest), tree) for name, tree in made.params.items()}
            return replace(made, params={**others, "params": trained})
        graphdef, params, others = nnx.split(made.model, nnx.Param, ...)
        return replace(made, model=nnx.merge(graphdef, jax.tree.map(moved, params), others))


def without_its_init(package: str) -> None:
    """Lets modules of a package be imported without running its `__init__`, which imports trainers, samplers and the like."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    bare = types.ModuleType(package)
    bare.__path__ = list(spec.submodule_search_locations or ())
    bare.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
    sys.modules[package] = bare


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over all positions, at least in float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(chosen)


def squares(x: Any) -> Any:
    """The mean square, at least in float32."""
    return jnp.mean(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
