"""A model's variables by path name: those of a pure view, and those of whatever a user may hold a model's arrays in."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from flax.core import unfreeze

from axonml_jax._types import named_leaves, path_name
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.nnx import nnx_functional


def named_variables(model: Functional, variables: Variables) -> dict[str, Any]:
    """Every variable by its name in a `state_dict`, parameters first."""
    prefix = model.param_prefix
    params = {prefix + n: x for tree in (variables.params, variables.frozen) for n, x in named_leaves(tree).items()}
    return params | named_leaves(variables.state)


def named_arrays(given: Any) -> dict[str, Any]:
    """Arrays by path name, of an NNX module, Linen variables, a nested state, or a flat mapping as it is.

    Random streams and what a call has sown are no variables and are left out of a module and of an `nnx.State`.

    Raises:
      TypeError: for anything else, with what to give in its place, and for leaves that are no arrays, all by path.
      ValueError: listing paths that are written the same.

    >>> named_arrays({"params": {"dense": {"kernel": 1.0}}, "a/b": 2.0})
    {'a/b': 2.0, 'params/dense/kernel': 1.0}
    """
    if isinstance(given, nnx.Module):
        return _checked(list(named_variables(*nnx_functional(given)).items()))
    if isinstance(given, nnx.State):
        given = nnx.to_pure_dict(nnx.filter_state(given, nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate))))
    if not isinstance(given, Mapping):
        raise TypeError(f"give a flax.nnx.Module or arrays by name, not {_words(given)}")
    leaves = jax.tree_util.tree_flatten_with_path(unfreeze(linen.meta.unbox(dict(given))), is_leaf=_whole)[0]
    return _checked([(path_name(p), x.get_value() if isinstance(x, nnx.Variable) else x) for p, x in leaves])


def _checked(leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    foreign = [f"{name}: {_words(leaf)}" for name, leaf in leaves if np.asarray(leaf).dtype.kind in "OUSMm"]
    if foreign:
        raise TypeError(f"these values are no arrays: {'; '.join(foreign)}. Leave them out")
    names = [name for name, _ in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several values have the same path: {', '.join(twice)}. Rename one of each")
    return dict(leaves)


def _whole(value: Any) -> bool:
    return value is None or isinstance(value, nnx.Variable)


def _words(given: Any) -> str:
    kind = type(given).__name__
    if isinstance(given, linen.Module):
        return f"the Linen module {kind}, which holds no arrays: give its variables"
    if hasattr(given, "state_dict"):
        return f"a {kind}: call its state_dict() in every process and give what that returns"
    return f"a {kind}"
