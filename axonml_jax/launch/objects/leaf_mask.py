"""Which parameters an option applies to, as a configuration says it: by their paths, or matrices only."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from axonml_jax._types import PyTree, path_name
from axonml_jax.launch.objects.own_dims import NO_STACKS, Stacks, own_dims

KINDS = ("paths", "not_paths", "matrices")
"""`{paths: [...]}`: leaves whose path one of the expressions finds; `{not_paths: [...]}`: the others; `{matrices: true}`:
leaves of two dims or more, of one layer of a stack and one expert."""


def is_mask(value: Any) -> bool:
    """Whether a value of a configuration describes a mask.

    >>> is_mask({"paths": ["kernel$"]}), is_mask({"learning_rate": 1.0})
    (True, False)
    """
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in KINDS


def leaf_mask(value: Mapping[str, Any], key: str, stacks: Stacks = NO_STACKS) -> Callable[[PyTree], PyTree]:
    """A function from parameters to a tree of True and False, as optax takes masks.

    >>> leaf_mask({"not_paths": ["bias$"]}, "mask")({"up": {"kernel": 1.0, "bias": 1.0}})
    {'up': {'bias': False, 'kernel': True}}

    Args:
      value: one of `KINDS` and its argument.
      key: for messages.
      stacks: of the model.

    Raises:
      ValueError: for expressions that are none.
    """
    [(kind, given)] = value.items()
    if kind == "matrices":
        if not isinstance(given, bool):
            raise ValueError(f"{key}.matrices={given}: must be true or false")
        return lambda params: jax.tree.map(lambda dims: (dims > 1) is given, own_dims(params, stacks))
    found = path_finder(given, f"{key}.{kind}")
    wanted = kind == "paths"
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: found(path_name(path)) is wanted, params)


def path_finder(expressions: Any, key: str) -> Callable[[str], bool]:
    """Whether a path has a place that one of the regular expressions matches.

    Raises:
      ValueError: naming every one that is no regular expression.
    """
    listed = [expressions] if isinstance(expressions, str) else expressions
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(each, str) for each in listed):
        raise ValueError(f"{key}={expressions}: must be a list of regular expressions, such as ['bias$', 'norm']")
    problems, compiled = [], []
    for each in listed:
        try:
            compiled.append(re.compile(each))
        except re.error as error:
            problems.append(f"{each!r} ({error})")
    if problems:
        raise ValueError(f"{key}: no regular expression: {', '.join(problems)}")
    return lambda path: any(each.search(path) for each in compiled)
