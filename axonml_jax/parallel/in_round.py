"""What a training step sees of a plan whose ranks train parameters of their own for rounds of steps."""

from dataclasses import replace

from axonml_jax.parallel.placement import Placement


def in_round(placement: Placement) -> Placement:
    """The placement of a step within a round, in which nothing is reduced along the axis of the replicas.

    Its `agreed` is the one given, by which the outer parameters rest and the model is evaluated. Without rounds, or of a
    placement that is in one already: itself.
    """
    within = placement.plan.within_round()
    return placement if within is placement.plan else replace(placement, plan=within, agreed=placement)
