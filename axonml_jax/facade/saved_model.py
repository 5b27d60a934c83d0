"""What trainers and checkpoints know of a parallel model."""

import abc
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.state.named_state import variable_leaves, variables_of


class SavedModel(abc.ABC):
    """The part of a parallel model that gives its arrays away and takes them back."""

    _functional: Functional
    _placement: Placement
    _rest: Rest
    _key: jax.Array
    _mode: bool | None
    mesh: Mesh
    variables: Variables

    @abc.abstractmethod
    def give_up(self) -> Variables:
        """The variables, to be donated."""

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """The variables, named as in `state_dict` behind `model/`."""
        return variable_leaves(self._functional, self.variables, self._rest)

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the variables by arrays that rest as those of `checkpoint_leaves` do."""
        self.variables = variables_of(self._functional, self.variables, arrays, self._rest)
