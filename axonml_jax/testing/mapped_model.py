"""A model for the oracle: called on the whole batch, it runs each shard's rows with the shard's own random keys."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.base import PyTree, is_array
from axonml_jax.model.view import BoundLinen, Functional, Mode, Variables


class MappedModel:
    """A model called on the rows of all shards, which are mapped over together under an axis name.

    Attributes:
      states: the model's state of every shard, after the calls made so far, stacked.
    """

    def __init__(
        self,
        model: Functional,
        mode: Mode,
        variables: Variables,
        states: PyTree,
        keys: Sequence[Any],
        axis: str,
        rows: int,
        together: bool,
    ):
        self._model, self._mode, self._variables, self._axis, self._rows = model, mode, variables, axis, rows
        self._together = together
        self.states, self._keys, self._calls = states, jnp.stack(keys), 0
        self._streams: PyTree = None
        self._plain = model.bind(variables, keys[0], mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run every shard's rows; results are joined along the dim that grows with the batch, else averaged."""
        return self._mapped("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._plain, name)
        if not _is_method(found):
            return found
        return lambda *args, **kwargs: self._mapped(name, args, kwargs)

    def _mapped(self, name: str, args: tuple, kwargs: dict) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        count = len(self._keys)
        split = [is_array(x) and jnp.ndim(x) > 0 and jnp.shape(x)[0] % self._rows == 0 for x in leaves]
        if not any(split):
            return getattr(self._plain, name)(*args, **kwargs)
        parts = [jnp.reshape(x, (count, -1, *jnp.shape(x)[1:])) for x, own in zip(leaves, split, strict=True) if own]
        number, seen = self._calls, {}

        def call(key: Any, kept: tuple[PyTree, PyTree], parts: list) -> tuple[list, tuple[PyTree, PyTree]]:
            state, streams = kept
            bound = self._model.bind(Variables(self._variables.params, self._variables.frozen, state), key, self._mode)
            if isinstance(bound, BoundLinen):
                bound._calls = number
            elif streams is not None:  # random streams go on where the call before has left them
                nnx.update(bound, streams)
            given = iter(parts)
            args, kwargs = treedef.unflatten([next(given) if own else x for x, own in zip(leaves, split, strict=True)])
            out = getattr(bound, name)(*args, **kwargs)
            seen["treedef"] = jax.tree.structure(out)
            seen["rest"] = [None if is_array(x) else x for x in jax.tree.leaves(out)]
            after = None if isinstance(bound, BoundLinen) else nnx.to_pure_dict(nnx.state(bound, nnx.RngState))
            return [x for x in jax.tree.leaves(out) if is_array(x)], (self._model.state_of(bound), after)

        made, (self.states, self._streams) = self._each(call, parts)
        self._calls += 1
        joined = iter([self._joined(x, call, parts, k) for k, x in enumerate(made)])
        return seen["treedef"].unflatten([next(joined) if x is None else x for x in seen["rest"]])

    def _each(self, call: Callable, parts: list) -> tuple[list, PyTree]:
        """The stacked results of every shard's call, one after another, or by `vmap` if layers communicate between shards."""
        if self._together:
            return jax.vmap(call, axis_name=self._axis)(self._keys, (self.states, self._streams), parts)
        one = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
        kept = (self.states, self._streams)
        each = [call(key, one(kept, i), one(parts, i)) for i, key in enumerate(self._keys)]
        return jax.tree.map(lambda *x: jnp.stack(x), *each)

    def _joined(self, x: jax.Array, call: Callable, parts: list, k: int) -> jax.Array:
        """Join [shards, ...] to the whole batch's result: the dim of rows is the one that grows with more rows."""
        count = x.shape[0]
        longer = [jax.ShapeDtypeStruct((count, 2 * x.shape[1], *x.shape[2:]), x.dtype) for x in parts]
        large = jax.eval_shape(lambda parts: self._each(call, parts)[0][k], longer)
        dims = [dim for dim, (a, b) in enumerate(zip(x.shape[1:], large.shape[1:], strict=True)) if a != b]
        if not dims:
            return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
        (dim,) = dims
        x = jnp.moveaxis(x, 0, dim)
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _is_method(found: Any) -> bool:
    """Whether an attribute is a bound method."""
    return callable(found) and hasattr(found, "__self__")
