"""Which resting form a plan has: asked here and nowhere else."""

from axonml_jax.parallel.placement import Placement
from axonml_jax.training.rest.in_rounds import InRounds
from axonml_jax.training.rest.partitioned import Partitioned, PartitionedStacked
from axonml_jax.training.rest.plain import Plain
from axonml_jax.training.rest.rest import Rest
from axonml_jax.training.rest.stacked import Stacked
from axonml_jax.training.rest.staged import Staged


def rest_of(placement: Placement) -> Rest:
    """The resting form of a plan on its mesh."""
    if placement.stages is not None:
        return Staged(placement)
    if placement.at_rest is not None:
        return PartitionedStacked(placement) if placement.own_axes else Partitioned(placement)
    if placement.agreed is not None:
        return InRounds(placement)
    return Stacked(placement) if placement.own_axes else Plain(placement)
