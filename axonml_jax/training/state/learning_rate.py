"""The learning rate of a run, where its optimizer's state says it."""

from typing import Any

import numpy as np

from axonml_jax._types import named_leaves
from axonml_jax.sharding.place import to_host

_INJECTED = "hyperparams/learning_rate"


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
            "the optimizer's state does not say its learning rate: a schedule or number given to optax stays inside of its "
            "functions. Make the optimizer as optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
        )
    rates = sorted({float(rate) for value in found.values() for rate in value})
    if len(rates) > 1:
        said = ", ".join(f"{name}={value.tolist()}" for name, value in found.items())
        raise ValueError(
            f"the optimizer has several learning rates: {said}. Read the one you mean from the trainer's state"
        )
    return rates[0]
