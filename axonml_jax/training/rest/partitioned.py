"""One axis is left to XLA's partitioner: a step's `shard_map` sees leaves whole along it, between steps they are split."""

import jax
import optax
from jax.sharding import Mesh

from axonml_jax.sharding.layout import shardings
from axonml_jax.training.rest.plain import Plain
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.rest.stacked import Stacked
from axonml_jax.training.state.train_state import TrainState


class Partitioned(Plain):
    """`Plain`, but for where arrays are between steps."""

    def between(self) -> Rest:
        """As the plan's rules split them."""
        return Plain(self.placement.resting)

    def settled(self, state: TrainState, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
        """The partitioner is told what it would be free to choose."""
        return jax.lax.with_sharding_constraint(state, shardings(self.between().state_specs(tx, state), mesh))

    @property
    def updates_in_slices(self) -> bool:
        """Not here: slices of a leaf may be on different devices."""
        return False


class PartitionedStacked(Partitioned, Stacked):
    """Ranks of some axes train models of their own, each split by the partitioner."""

    def between(self) -> Rest:
        """As the plan's rules split them, stacked."""
        return Stacked(self.placement.resting)
