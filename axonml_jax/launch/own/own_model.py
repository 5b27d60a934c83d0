"""A Flax model of one's own, as a configuration names it: checked from shapes, its parameters made where they will rest."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from axonml_jax._types import LossFn, PyTree
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.objects.named_object import made_by, takes

_KEY = "model"


@dataclass(frozen=True)
class Buildable:
    """What `ax.parallelize` takes: a model, or a function that makes one, and of Linen a function that makes its variables."""

    model: Any
    params: Callable[[], PyTree] | None = None


def own_model(config: OwnModel, loss_fn: LossFn, batch: PyTree, seed: int) -> Buildable:
    """The model that a configuration names. Nothing is allocated.

    An NNX class is called with `rngs` beside its arguments, if it takes them. A Linen module gets its variables from the loss
    of one example: whatever modules that calls are initialized.

    Args:
      config: its path and arguments.
      loss_fn: `loss_fn(model, batch)`.
      batch: shapes of a global batch.
      seed: of the first weights.

    Raises:
      ValueError: for a path or arguments that do not fit (see `named_object`).
      TypeError: when it makes no Flax model.
    """
    make = made_by({"class_path": config.class_path, "init_args": config.init_args or {}}, _KEY)
    own_rngs = "rngs" in (config.init_args or {}) or not takes(make.func, "rngs")
    build = make if own_rngs else lambda: make(rngs=nnx.Rngs(seed))
    found: list[Any] = []
    jax.eval_shape(lambda: found.append(build()))
    if isinstance(found[0], nnx.Module):
        return Buildable(build)
    if isinstance(found[0], linen.Module):
        return Buildable(module := build(), partial(_variables, module, loss_fn, batch, seed))
    raise TypeError(
        f"{_KEY}.class_path={config.class_path}: makes a {type(found[0]).__name__}, which is no Flax model: give a "
        "flax.nnx.Module, a flax.linen.Module, or a function that makes one"
    )


class Initializing:
    """A Linen module within `init`, called by a loss as the bound model of a step is.

    Attributes:
      is_training: as in a step.
    """

    is_training = True

    def __init__(self, module: linen.Module):
        self._module = module

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Call the module, or one of its methods."""
        if method is None:
            return self._module(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if isinstance(method, str):
            return getattr(self._module, method)(*args, **kwargs)
        return method(self._module, *args, **kwargs)


def _variables(module: linen.Module, loss_fn: LossFn, batch: PyTree, seed: int) -> PyTree:
    """A Linen module's first variables, from the loss of one example of zeros."""
    example = jax.tree.map(lambda x: jnp.zeros(x.shape[:0] if not x.shape else (1, *x.shape[1:]), x.dtype), batch)

    def call(inner: linen.Module, batch: PyTree) -> None:
        loss_fn(Initializing(inner), batch)

    params, dropout = jax.random.split(jax.random.key(seed))
    return linen.init(call, module)({"params": params, "dropout": dropout}, example)
