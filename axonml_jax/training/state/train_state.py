"""Everything a training run is between two steps, as one value."""

from dataclasses import dataclass
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.training.finite.guard import NonFinite
from axonml_jax.training.finite.loss_scale import LossScale
from axonml_jax.training.state.round_state import RoundState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run: save it and the run can go on as if it had never stopped.

    Attributes:
      step: int32 scalar, the number of updates made.
      variables: the model's arrays.
      opt_state: the optimizer's state.
      key: the run's randomness; step i draws from `fold_in(key, i)`.
      loss_scale: of float16 training, else None.
      strategies: what strategies keep between steps, by axis (see `AbstractStrategy.init_state`); None: nothing.
      guard: counts of skipped updates where non-finite ones are skipped (`max_nonfinite`), else None.
      rounds: replicas' own parameters where they train by themselves for rounds of steps (`ax.DiLoCo`), and what they keep
        together; `variables` are then the outer ones. Else None.
      left_out: what the sums of the last step lacked of every rank's gradients, [ranks, *shape] for every trained parameter,
        where a strategy feeds it back (`AbstractStrategy.feeds_back`), else None.
    """

    step: jax.Array
    variables: Variables
    opt_state: Any
    key: jax.Array
    loss_scale: LossScale | None = None
    guard: NonFinite | None = None
    strategies: Any = None
    rounds: RoundState | None = None
    left_out: Any = None

    @property
    def params(self) -> PyTree:
        """The trained parameters."""
        return self.variables.params
