"""Names for the arrays of whatever can be saved: trainers, models, plain Flax modules, any pytree."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
from flax import nnx

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.sharding.leaf import Checkpointable, Leaf

MODEL = "model/"
"""What the names of a model's arrays start with; the rest is their name in its `state_dict`."""

AVERAGE = "ema/"
"""What the names of a trainer's moving averages start with; the rest is their parameter's name."""


LEFT_OUT = "left_out/"
"""What the names start with of what sums of gradients lacked; it is of so many ranks, and others begin with nothing."""


def leaves_of(thing: Any) -> dict[str, Leaf]:
    """Every array of something by name.

    Raises:
      ValueError: when there is none.
    """
    if isinstance(thing, Checkpointable):
        return thing.checkpoint_leaves()
    named = _module_leaves(thing) if isinstance(thing, nnx.Module) else named_leaves(thing)
    if not named:
        raise ValueError(f"a {type(thing).__name__} without arrays cannot be saved or restored")
    return {name: Leaf(leaf) for name, leaf in named.items()}


def filled(thing: Any, arrays: Mapping[str, Any]) -> Any:
    """The thing with these arrays: a new pytree, or the very object, which has taken them."""
    if isinstance(thing, Checkpointable):
        thing.take_leaves(arrays)
        return thing
    if isinstance(thing, nnx.Module):
        state = _state(thing)
        names = list(named_leaves(nnx.to_pure_dict(state)))
        leaves = [arrays[MODEL + name] for name in names]
        pure = jax.tree.unflatten(jax.tree.structure(nnx.to_pure_dict(state)), leaves)
        nnx.replace_by_pure_dict(state, pure)
        nnx.update(thing, state)
        return thing
    return jax.tree.unflatten(jax.tree.structure(thing), [arrays[name] for name in named_leaves(thing)])


def scope_of(thing: Any, wanted: Collection[str]) -> str:
    """The part of a checkpoint that a thing is about: of a whole run's a model takes the model's, all else takes everything.

    Args:
      thing: what is restored.
      wanted: its arrays' names.
    """
    is_model = isinstance(thing, Checkpointable | nnx.Module) and all(name.startswith(MODEL) for name in wanted)
    return MODEL if is_model else ""


def _module_leaves(module: nnx.Module) -> dict[str, Any]:
    return {MODEL + name: leaf for name, leaf in named_leaves(nnx.to_pure_dict(_state(module))).items()}


def _state(module: nnx.Module) -> PyTree:
    """Parameters and running averages; random streams start anew, as in a trainer."""
    return nnx.filter_state(nnx.state(module), nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate)))
