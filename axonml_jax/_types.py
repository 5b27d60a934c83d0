"""Names for the trees that travel through the library, and how a place in one is written."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

PyTree = Any
"""A nest of dicts, lists, tuples and registered dataclasses with arrays as leaves."""

LossFn = Callable[[Any, Any], Any]
"""`loss_fn(model, batch) -> loss` or `(loss, metrics)`."""


def is_array(x: Any) -> bool:
    """Whether a leaf has a shape and a dtype: numbers, flags and strings have not."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def is_one_of(given: Any, choices: Iterable[Any]) -> bool:
    """Whether a value is one of some plain ones, whatever it is: an array, compared, is neither true nor false.

    >>> import jax.numpy as jnp
    >>> is_one_of("full", (None, "full")), is_one_of(["full"], (None, "full")), is_one_of(jnp.ones(3), (True, False))
    (True, False, False)
    """
    return isinstance(given, Hashable) and given in tuple(choices)


def path_name(path: tuple) -> str:
    """A key path as users write it: `blocks/0/attention/kernel`.

    >>> from jax.tree_util import DictKey, SequenceKey
    >>> path_name((DictKey("blocks"), SequenceKey(0)))
    'blocks/0'
    """
    import jax  # what parses a command line is here before JAX is

    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Every leaf of `tree` by its path, in tree order.

    >>> named_leaves({"b": 2, "a": {"c": 1}})
    {'a/c': 1, 'b': 2}

    Raises:
      ValueError: when two leaves would have one name, as those of `{"a": {"b": x}, "a/b": y}`.
    """
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {path_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError(_twins([path for path, _ in leaves]))
    return named


def _twins(paths: list[tuple]) -> str:
    import jax

    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path_name(path), []).append(jax.tree_util.keystr(path))
    lines = [f"  {name}: {' and '.join(found)}" for name, found in by_name.items() if len(found) > 1]
    return (
        "\n".join(["leaves of a tree share a name, by which they cannot be told apart:", *lines])
        + "\nrename one of them"
    )
