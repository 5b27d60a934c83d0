"""`rounds`: how often an update gathers what rests sharded, and reduces its gradients."""

from collections.abc import Mapping
from typing import NamedTuple

from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.role import Role


class Rounds(NamedTuple):
    """How often one update moves all parameters of a rank along an axis over which they rest sharded.

    Attributes:
      forward, backward: gathers; where they are kept for the backward, it has none.
      scatters: reductions of their gradients.
    """

    forward: int
    backward: int
    scatters: int


def rounds(plan: Plan, degrees: Mapping[str, int], role: Role) -> Rounds:
    """How often a plan gathers and scatters what rests sharded: as the pipeline's `gather` says, else as its role does.

    >>> rounds(Plan(accumulate=4), {"fsdp": 8}, Plan().fsdp.role)
    Rounds(forward=4, backward=4, scatters=4)
    """
    if plan.pipe is not None and degrees.get(AXIS, 1) > 1:
        often = plan.pipe.gathers(degrees[AXIS], plan.microbatches)
        return Rounds(1, 0, 1) if often is None else Rounds(often, often, often)
    many, when_used = plan.microbatches, role.reads == "use"
    return Rounds(many if when_used else 1, many if when_used else 0, many if role.reduces == "microbatch" else 1)
