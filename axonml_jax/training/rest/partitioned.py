"""One axis is left to XLA's partitioner: a step's `shard_map` sees leaves whole along it, between steps they are split."""

from axonml_jax.training.rest.plain import Plain
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.rest.stacked import Stacked


class Partitioned(Plain):
    """`Plain`, but for where arrays are between steps."""

    def between(self) -> Rest:
        """As the plan's rules split them."""
        return Plain(self.placement.resting)

    @property
    def updates_in_slices(self) -> bool:
        """Not here: slices of a leaf may be on different devices."""
        return False


class PartitionedStacked(Partitioned, Stacked):
    """Ranks of some axes train models of their own, each split by the partitioner."""

    def between(self) -> Rest:
        """As the plan's rules split them, stacked."""
        return Stacked(self.placement.resting)
