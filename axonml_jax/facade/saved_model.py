"""What trainers and checkpoints know of a parallel model, and the programs that it keeps."""

import abc
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from axonml_jax._types import named_leaves
from axonml_jax.checkpoint.contents import MODEL
from axonml_jax.facade.accepting import would_hang
from axonml_jax.logging import logger
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.leaf import Leaf
from axonml_jax.sharding.place import place
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.state.named_state import variable_leaves, variables_of


class Handed:
    """An NNX module that a user holds beside a parallel model, which has copies of its arrays and does not see it change.

    Args:
      module: given to the model, or made by it.
      what: it is, in words.
    """

    def __init__(self, module: nnx.Module, what: str):
        self._module, self._what = weakref.ref(module), what
        self._known = {name: id(leaf) for name, leaf in _param_leaves(module).items()}

    def tell(self, variables: Variables) -> None:
        """Warn of parameters that were changed in the module, where this process sees that the model has other values."""
        if (module := self._module()) is None:
            return
        own = named_leaves(variables.params) | named_leaves(variables.frozen)
        new = {name: leaf for name, leaf in _param_leaves(module).items() if id(leaf) != self._known.get(name)}
        if names := [name for name, leaf in new.items() if name in own and _differ(leaf, own[name])]:
            logger.warning(
                "%s was changed, but what trains are the parallel model's own copies, which stay as they are: %s. Change them "
                "by model.set_parameters(...) or model.load_state_dict(...), or the module before it is given to the model",
                *(self._what, ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")),
            )


def _param_leaves(module: nnx.Module) -> dict[str, Any]:
    return named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def _differ(new: Any, own: Any) -> bool:
    """Whether a whole array has other values than the first part here of one of its shape; False where that is not seen."""
    if not isinstance(new, jax.Array) or not new.is_fully_addressable or new.shape != own.shape:
        return False
    part = own.addressable_shards[0]
    return np.asarray(new[part.index]).astype(own.dtype).tobytes() != np.asarray(part.data).tobytes()


class SavedModel(abc.ABC):
    """The part of a parallel model that gives its arrays away and takes them back.

    Attributes:
      loads: how often its parameters were loaded; a trainer's moving average then begins anew.
    """

    _functional: Functional
    _placement: Placement
    _rest: Rest
    _key: jax.Array
    _mode: bool | None
    mesh: Mesh
    variables: Variables

    def __init__(self):
        self._programs: dict[Any, Any] = {}
        self._calls = 0
        self.loads = 0
        self._given: dict[str, str] = {}
        self._hollow: Variables | None = None
        self._handed: list[Handed] = []

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """How many first dims of a parameter number layers (of a stack) or experts, by path: what is left is one layer's own.

        A mask of matrices asks it: `np.ndim(leaf) - model.stacked_dims.get(path, 0) > 1`.
        """
        return self._functional.stacked_dims

    @property
    def hollow(self) -> bool:
        """Whether the model was given as shapes and nothing was loaded yet: its arrays are zeros."""
        return self.variables is self._hollow

    @property
    def values(self) -> Variables:
        """The variables, to be computed with.

        Raises:
          ValueError: when the model was given as shapes and has none yet.
        """
        if self.hollow:
            raise ValueError(
                "the model was given as shapes and has no values yet: load_state_dict, load_pretrained, or restore a "
                "checkpoint first"
            )
        while self._handed:  # until the next use of the model
            self._handed.pop().tell(self.variables)
        return self.variables

    @abc.abstractmethod
    def give_up(self) -> Variables:
        """The variables, to be donated."""

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """The variables, named as in `state_dict` behind `model/`."""
        return variable_leaves(self._functional, self.variables, self._rest)

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the variables by arrays that rest as those of `checkpoint_leaves` do."""
        self.variables = variables_of(self._functional, self.variables, arrays, self._rest)
        self.loads, self._given = self.loads + 1, {}

    def _program(self, key: tuple, build: Callable[[], Any]) -> Any:
        key = (*key, self._mode)
        if key not in self._programs:
            self._programs[key] = build()
        return self._programs[key]

    @cached_property
    def _accept(self) -> Callable[[Any], None] | None:
        """What may refuse a compiled program of the model."""
        return would_hang(self._placement, self.mesh)

    def _next_key(self) -> jax.Array:
        key = place(jax.random.fold_in(self._key, self._calls), jax.sharding.PartitionSpec(), self.mesh)
        self._calls += 1
        return key


class AveragedParams:
    """A model's trained parameters alone, by the names that a checkpoint has below `AVERAGE`: restore them with `part=`.

    Args:
      model: takes them.
    """

    def __init__(self, model: SavedModel):
        self._model, view = model, model._functional
        self._names = {name: MODEL + view.param_prefix + name for name in named_leaves(view.shapes.params)}

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """The parameters."""
        leaves = self._model.checkpoint_leaves()
        return {name: leaves[whole] for name, whole in self._names.items()}

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the parameters; all else stays."""
        kept = {name: leaf.array for name, leaf in self._model.checkpoint_leaves().items()}
        self._model.take_leaves(kept | {whole: arrays[name] for name, whole in self._names.items()})
