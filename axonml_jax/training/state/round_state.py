"""What a run whose ranks train parameters of their own for rounds of steps (`LocalRounds`) keeps beside the outer ones."""

from dataclasses import dataclass

import jax

from axonml_jax._types import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundState:
    """Beside the outer parameters, which are the model's variables.

    Attributes:
      own: the trained parameters of every replica, stacked along dim 0.
      kept: what replicas keep together of each outer parameter, such as its momentum.
    """

    own: PyTree
    kept: PyTree
