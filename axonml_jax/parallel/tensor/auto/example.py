"""The call that `auto_parallelize` traces to see which layers feed which."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from axonml_jax._types import PyTree


@dataclass(frozen=True)
class Example:
    """The arguments of a call of the model.

    Attributes:
      arrays: those leaves that are arrays or shapes; None in the place of the others.
      rest: the others, such as flags; None in the place of arrays.
      treedef: the structure of (args, kwargs).
    """

    arrays: list[Any]
    rest: list[Any]
    treedef: Any

    @staticmethod
    def of(model: nnx.Module, example: Any, kwargs: Mapping[str, Any] | None) -> "Example":
        """From what the user gave: one argument or a tuple of several, and keyword arguments.

        Raises:
          TypeError: when the model cannot be called so.
        """
        args = example if isinstance(example, tuple) else (() if example is None else (example,))
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise TypeError(f"example_kwargs={kwargs!r} must map names of keyword arguments to their values")
        signature = inspect.signature(type(model).__call__)
        try:
            signature.bind(model, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(model).__name__}.__call__{signature} cannot be called with {len(args)} positional arguments "
                f"(example=) and the keyword arguments {sorted(kwargs)} (example_kwargs=): {error}"
            ) from None
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)), is_leaf=lambda x: isinstance(x, nnx.Pytree))
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        return Example(arrays, [None if _is_array(leaf) else leaf for leaf in leaves], treedef)

    def call(self, model: Any, arrays: list[Any]) -> PyTree:
        """What the model makes of it, with these arrays; NNX objects, such as `nnx.Rngs`, are copied."""
        rest = [nnx.clone(leaf) if isinstance(leaf, nnx.Pytree) else leaf for leaf in self.rest]
        args, kwargs = self.treedef.unflatten(
            [value if array is None else array for array, value in zip(arrays, rest, strict=True)]
        )
        return model(*args, **kwargs)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, nnx.Pytree | nnx.Variable)
