"""A model's variables as a flat dict of whole arrays by path name, and back; fitting given trees to those we hold."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.model.named import named_variables
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.place import cast, is_deleted, to_host


def state_dict(model: Functional, variables: Variables) -> dict[str, Any]:
    """Whole NumPy arrays by path name, parameters first."""
    host = to_host(variables)
    return named_variables(model, host)


def load_state_dict(
    model: Functional, variables: Variables, values: dict[str, Any], *, strict: bool
) -> tuple[Variables, list[str], list[str]]:
    """New whole variables from values by path name; nothing is changed in place.

    Returns:
      (variables, missing names, unexpected names).

    Raises:
      TypeError: when values are no mapping.
      ValueError: listing every name whose shape differs, floats for integers such as a base in int8, and, when strict, every
        missing and unexpected one.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"load_state_dict takes arrays by path name, as state_dict() returns them, not a {type(values).__name__}"
        )
    wanted = named_variables(model, variables)
    missing = [name for name in wanted if name not in values]
    unexpected = [name for name in values if name not in wanted]
    wrong = _wrong_shapes(values, wanted) + _floats_for_integers(values, wanted)
    problems = wrong + (_unmatched(missing, unexpected) if strict else [])
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
        typed = [new if new is leaf else cast(new, leaf.dtype) for new, leaf in zip(leaves, old, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), typed)

    prefix = model.param_prefix
    return Variables(swap(variables.params, prefix), swap(variables.frozen, prefix), swap(variables.state, ""))


def fitted(given: PyTree, held: PyTree, rule: str) -> PyTree:
    """A given tree in the structure and dtypes of the one we hold; leaves are matched by path name.

    Raises:
      ValueError: the rule, and every leaf that is missing, unexpected, of another shape or deleted.
    """
    values, wanted = named_leaves(given), named_leaves(held)
    missing, unexpected = [n for n in wanted if n not in values], [n for n in values if n not in wanted]
    gone = [f"  {n}: given up by a later step (keep a copy)" for n, x in values.items() if is_deleted(x)]
    if problems := _wrong_shapes(values, wanted) + _unmatched(missing, unexpected) + gone:
        raise ValueError(rule + "; this one does not fit:\n" + "\n".join(problems))
    return jax.tree.unflatten(jax.tree.structure(held), [cast(values[n], leaf.dtype) for n, leaf in wanted.items()])


def _wrong_shapes(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    none = {n: values[n] for n in wanted if n in values and _is_none(values[n])}
    shapes = {n: (np.shape(values[n]), np.shape(x)) for n, x in wanted.items() if n in values and n not in none}
    lines = [f"  {n}: {got!r:.40} is no array, needed shape {np.shape(wanted[n])}" for n, got in none.items()]
    return lines + [f"  {n}: shape {got}, needed {need}" for n, (got, need) in shapes.items() if got != need]


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes))


def _floats_for_integers(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    dtypes = {n: (Leaf(values[n]).dtype, x.dtype) for n, x in wanted.items() if n in values and not _is_none(values[n])}
    wrong = lambda got, need: jnp.issubdtype(got, jnp.floating) and jnp.issubdtype(need, jnp.integer)
    return [f"  {n}: {got.name}, needed {need.name}" for n, (got, need) in dtypes.items() if wrong(got, need)]


def _unmatched(missing: list[str], unexpected: list[str]) -> list[str]:
    return [f"  {n}: missing" for n in missing] + [f"  {n}: unexpected" for n in unexpected]
