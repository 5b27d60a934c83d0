"""A model's variables as a flat dict of whole arrays by path name, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.sharding.place import to_host


def state_dict(model: Functional, variables: Variables) -> dict[str, Any]:
    """Whole NumPy arrays by path name, parameters first."""
    host = to_host(variables)
    return dict(_named(model, host))


def _named(model: Functional, variables: Variables) -> list[tuple[str, Any]]:
    prefix = model.param_prefix
    params = [(prefix + n, x) for tree in (variables.params, variables.frozen) for n, x in named_leaves(tree).items()]
    return params + list(named_leaves(variables.state).items())


def load_state_dict(
    model: Functional, variables: Variables, values: dict[str, Any], *, strict: bool
) -> tuple[Variables, list[str], list[str]]:
    """New whole variables from values by path name; nothing is changed in place.

    Returns:
      (variables, missing names, unexpected names).

    Raises:
      ValueError: listing every name whose shape differs and, when strict, every missing and unexpected one.
    """
    wanted = dict(_named(model, variables))
    missing = [name for name in wanted if name not in values]
    unexpected = [name for name in values if name not in wanted]
    shapes = {n: (np.shape(values[n]), np.shape(x)) for n, x in wanted.items() if n in values}
    wrong = [f"  {n}: shape {got}, needed {need}" for n, (got, need) in shapes.items() if got != need]
    problems = wrong + (
        [f"  {n}: missing" for n in missing] + [f"  {n}: unexpected" for n in unexpected] if strict else []
    )
    if problems:
        remedy = "; strict=False loads what matches" if strict and not wrong else ""
        raise ValueError(
            "load_state_dict: the given values do not fit the model" + remedy + ":\n" + "\n".join(problems)
        )
    return _replaced(model, variables, values), missing, unexpected


def _replaced(model: Functional, variables: Variables, values: dict[str, Any]) -> Variables:
    def swap(tree: PyTree, prefix: str) -> PyTree:
        leaves = [values.get(prefix + name, leaf) for name, leaf in named_leaves(tree).items()]
        old = jax.tree.leaves(tree)
        typed = [new if new is leaf else jnp.asarray(new, leaf.dtype) for new, leaf in zip(leaves, old, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), typed)

    prefix = model.param_prefix
    return Variables(swap(variables.params, prefix), swap(variables.frozen, prefix), swap(variables.state, ""))
