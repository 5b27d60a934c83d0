"""`TrainState`: the state of a training run between two steps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from axonml_jax.base import PyTree, named_leaves, path_name
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import Layout, as_spec, is_layout, to_host

_FIELDS = ("step", "variables", "opt_state", "key")

EXTRAS = ("loss_scale", "guard", "strategies", "rounds", "left_out")
"""Names of the extras that a state may have, in the order in which a step takes them."""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """The state of a run: save it and the run can go on as if it had never stopped.

    Attributes:
      step: int32 scalar, the number of updates made.
      variables: the model's arrays.
      opt_state: the optimizer's state.
      key: the run's randomness; step i draws from `fold_in(key, i)`.
      extras: what the transforms of the step keep from one to the next, by name; each is an attribute too, and None where
        nobody keeps it:

        - `loss_scale`: of float16 training.
        - `guard`: counts of skipped updates, where non-finite ones are skipped (`max_nonfinite`).
        - `strategies`: what strategies keep between steps, by axis (see `ax.Stateful`).
        - `rounds`: replicas' own parameters where they train by themselves for rounds of steps (`ax.DiLoCo`), and the state
          that they share; `variables` are then the outer parameters.
        - `left_out`: the residual of the last step's sums: what rounding left out of every rank's gradients, [ranks, *shape]
          for every trained parameter, where a strategy feeds it back (`ax.Lossy`).
    """

    step: jax.Array
    variables: Variables
    opt_state: Any
    key: jax.Array
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if unknown := sorted(set(self.extras) - set(EXTRAS)):
            raise ValueError(f"a TrainState keeps {', '.join(EXTRAS)} beside its fields, not {', '.join(unknown)}")

    @property
    def params(self) -> PyTree:
        """The trained parameters."""
        return self.variables.params

    def __getattr__(self, name: str) -> Any:
        """Looks up an extra by its name; None where nobody keeps it."""
        if name not in EXTRAS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return self.extras.get(name)

    def keeping(self, **extras: Any) -> Self:
        """Returns the state with these extras set; None removes one."""
        held = {**self.extras, **extras}
        return replace(self, extras={name: value for name, value in held.items() if value is not None})

    def tree_flatten_with_keys(self) -> tuple:
        """Flattens extras beside the fields, so that the path of a leaf is `.guard.skipped`."""
        names = (*_FIELDS, *(name for name in EXTRAS if name in self.extras))
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: tuple) -> Self:
        """The inverse of `tree_flatten_with_keys`."""
        step, variables, opt_state, key, *extras = children
        return cls(step, variables, opt_state, key, dict(zip(names[len(_FIELDS) :], extras, strict=True)))


# --------------------------------------------------------------------------------------------------
# Gradients of every batch shard by itself (`no_sync`): stacked by rank along dim 0, whole but for what layers split.
# --------------------------------------------------------------------------------------------------


def each_ranks_specs(placement: Placement) -> PyTree:
    """The specs of gradients stacked by rank: dim 0 over the batch axes, the others as the model's layers split them.

    Raises:
      ValueError: listing parameters that are split over an axis that splits the batch too (`depth`, `expert`), whose ranks
        share one.
    """
    both = set(placement.axes.batch) & set(placement.axes.layers)
    shared = [
        path_name(path)
        for path, layout in jax.tree_util.tree_leaves_with_path(placement.params, is_leaf=is_layout)
        if both.intersection(layout.axes)
    ]
    if shared:
        more = ", ..." if len(shared) > 8 else ""
        raise ValueError(
            "each rank's own values are stacked along the batch axes, but layers split these parameters along "
            f"{', '.join(sorted(both))} as well as the batch, so that several ranks share one: {', '.join(shared[:8])}{more}. "
            "Accumulate inside the step (accumulate=) instead"
        )

    def spec(layout: Layout) -> PartitionSpec:
        axes = [
            tuple(axis for axis in layout.axes_of(dim) if axis in placement.axes.layers)
            for dim in range(min(len(layout.spec), len(layout.shape)))
        ]
        return PartitionSpec(placement.axes.batch, *as_spec(axes))

    return jax.tree.map(spec, placement.params, is_leaf=is_layout)


# --------------------------------------------------------------------------------------------------
# The learning rate of a run, where its optimizer's state says it.
# --------------------------------------------------------------------------------------------------

_INJECTED, _SCHEDULED = "hyperparams/learning_rate", "hyperparams_states/learning_rate"


def injected_rate(opt_state: Any) -> float:
    """The learning rate that `optax.inject_hyperparams` keeps in an optimizer's state. Every process must call it.

    Args:
      opt_state: the state as it rests, under any plan.

    Raises:
      ValueError: when the state has none, or several that differ.

    >>> import optax
    >>> injected_rate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init({"w": 1.0}))
    0.5
    """
    names = {name: leaf for name, leaf in named_leaves(opt_state).items() if f"/{name}".endswith(f"/{_INJECTED}")}
    found = {name: np.asarray(value).ravel() for name, value in to_host(names).items()}
    if not found:
        raise ValueError(
            "the optimizer's state does not hold its learning rate, because optax keeps a schedule or number inside its "
            "functions: make the optimizer by optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
        )
    rates = sorted({float(rate) for value in found.values() for rate in value})
    if len(rates) > 1:
        said = ", ".join(f"{name}={value.tolist()}" for name, value in found.items())
        raise ValueError(
            f"the optimizer has several learning rates: {said}. Read the one you mean from the trainer's state"
        )
    return rates[0]


def with_rate(opt_state: Any, rate: float) -> Any:
    """Sets the learning rate that `optax.inject_hyperparams` keeps in an optimizer's state. Every process must call it.

    Args:
      opt_state: the state as it rests, under any plan.
      rate: what the next updates take.

    Raises:
      ValueError: when the state has none, several that differ, or one that a schedule makes anew in every update; and when
        processes give other rates.
    """
    injected_rate(opt_state)
    if any(f"/{_SCHEDULED}" in f"/{name}" for name in named_leaves(opt_state)):
        raise ValueError(
            "the optimizer's learning rate follows a schedule, which computes it in every update: to set it by hand, give "
            "optax.inject_hyperparams(...) a number"
        )

    def changed(path: Any, leaf: Any) -> Any:
        if not f"/{path_name(path)}".endswith(f"/{_INJECTED}"):
            return leaf
        try:
            return jax.device_put(np.full(leaf.shape, rate, leaf.dtype), leaf.sharding)
        except AssertionError:  # JAX compares it over processes
            raise ValueError(
                f"the learning rate {rate!r} of this process is not that of every other: set the same in all, such as one that "
                "is computed from metrics, which all have"
            ) from None

    return jax.tree_util.tree_map_with_path(changed, opt_state)


def hyperparameters(opt_state: Any) -> list[dict]:
    """The mappings in which `optax.inject_hyperparams` keeps numbers, in a state as optax made it."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda node: hasattr(node, "hyperparams"))
    return [state.hyperparams for state in states if hasattr(state, "hyperparams")]


def refuse_changed(shown: Iterable[tuple[dict, dict]]) -> None:
    """Refuse to go on where somebody changed the copies that `Trainer.opt_state` gave.

    Args:
      shown: mappings, and what they held.

    Raises:
      ValueError: with the remedy.
    """
    if changed := sorted({name for now, was in shown for name in now if now[name] is not was.get(name)}):
        raise ValueError(
            f"{', '.join(changed)} was changed in trainer.opt_state, which is a copy, so the change would have no effect: set "
            "the learning rate by trainer.lr = ..., other values by trainer.state = replace(trainer.state, opt_state=...)"
        )
