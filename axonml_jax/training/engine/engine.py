"""The interface of every gradient engine."""

import abc
from dataclasses import dataclass
from typing import NamedTuple

import jax

from axonml_jax._types import PyTree
from axonml_jax.model.functional import Variables
from axonml_jax.model.loss import Loss
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.strategies.feedback import Feedback
from axonml_jax.training.objective import Objective, Parts


class Differentiated(NamedTuple):
    """What an engine gives on one rank, before anything is divided.

    Attributes:
      grads: gradients of the resting parameters, summed over ranks and microbatches, in the dtype in which they accumulate.
      losses: this rank's, with a dim 0 of microbatches, or of one that is their sum.
      state: the model's state after the last microbatch.
      left_out: what the sums lack of this rank's gradients, where the plan feeds it back.
    """

    grads: PyTree
    losses: Loss
    state: PyTree
    left_out: PyTree = None


@dataclass(frozen=True, eq=False)
class GradientEngine(abc.ABC):
    """How the loss of all microbatches of a step is differentiated, inside `shard_map`.

    Attributes:
      objective: the loss of one microbatch.
      placement: how parameters are read and gradients reduced.
      parts: what a microbatch's loss is divided by, and the loss scale.
      sync: False leaves gradients each rank's own.
      left_out: what the last step's sums lacked of this rank's gradients, which joins them; None: nothing is fed back.
    """

    objective: Objective
    placement: Placement
    parts: Parts
    sync: bool
    left_out: PyTree = None

    @property
    def feedback(self) -> Feedback | None:
        """Of the plan's sums, where there is something to begin with."""
        precision = self.placement.plan.precision
        return None if self.left_out is None else Feedback.of(self.placement.strategies, precision)

    @abc.abstractmethod
    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Of resting variables, the step's randomness and this rank's rows."""
