"""The register of a training step's transforms, and their order."""

from dataclasses import dataclass
from numbers import Real

from axonml_jax.model.view import Functional
from axonml_jax.parallel.plan import CPUOffload
from axonml_jax.strategies.strategy import Stateful, feeds_back
from axonml_jax.training.compose import Kept, StepTransform
from axonml_jax.training.rest import Rest
from axonml_jax.training.update import ClipByNorm, JoinedBuffers, LayerNorms, Norm


@dataclass(frozen=True)
class StepOptions:
    """The options of a step that a trainer has beside the plan.

    Attributes:
      max_grad_norm: clip gradients to this global norm; None does not clip.
      norm_type: the order of that norm.
      max_nonfinite: how many skipped updates in a row end the training; None skips nothing.
      layer_norms: measure norms layer by layer.
    """

    max_grad_norm: float | None = None
    norm_type: float = 2.0
    max_nonfinite: int | None = None
    layer_norms: bool = False

    def __post_init__(self):
        most, limit = self.max_grad_norm, self.max_nonfinite
        if most is not None and not (isinstance(most, Real) and most > 0):
            raise ValueError(f"max_grad_norm={most!r} must be a positive number; None does not clip")
        if not (isinstance(self.norm_type, Real) and self.norm_type > 0):
            raise ValueError(f"norm_type={self.norm_type!r} must be a positive number: 1, 2 or math.inf")
        if not isinstance(self.layer_norms, bool):
            raise ValueError(f"layer_norms={self.layer_norms!r} must be True or False")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"max_nonfinite={limit!r} must be a whole number from 1, or None to skip nothing")


def transforms_of(
    rest: Rest, options: StepOptions = StepOptions(), model: Functional | None = None
) -> tuple[StepTransform, ...]:
    """The transforms that a plan on its mesh, a trainer and a model ask for, the outermost first.

    Nothing is imported for what nobody asks for. A comment behind each names the function that it wraps.

    Args:
      rest: how a step's state rests, with the placement of a step (`in_round`).
      options: what the trainer asks for.
      model: the model; None where transforms are only asked for what they keep (`kept_of`) and are not run.
    """
    placement, plan = rest.placement, rest.placement.plan
    found: list[StepTransform] = []
    if placement.agreed is not None:
        from axonml_jax.training.rounds import Rounds

        found.append(Rounds(placement, rest))  # the step
    if options.layer_norms:
        found.append(LayerNorms(rest))  # gradients
    found.append(Norm(rest, float(options.norm_type)))  # gradients
    if plan.offload is not CPUOffload.NONE:
        from axonml_jax.training.streamed import Streamed

        # Slices of a leaf that the partitioner splits may be on different devices; a pipeline's leaves lie in buffers.
        sliced = plan.update == "shards" and placement.at_rest is None and placement.stages is None
        found.append(Streamed(plan.offload, sliced))  # the update
    if plan.precision.scales_loss or options.max_nonfinite is not None:
        from axonml_jax.training.nonfinite import SkipNonFinite

        found.append(SkipNonFinite(rest, plan.precision.scales_loss, options.max_nonfinite))  # both
    if any(feeds_back(strategy) for strategy in placement.strategies.values()):
        from axonml_jax.training.between_steps import FedBack

        found.append(FedBack(placement))  # both
    if any(strategy.having(Stateful) for strategy in placement.strategies.values()):
        from axonml_jax.training.between_steps import BetweenSteps

        found.append(BetweenSteps(placement, rest))  # both
    if model is not None:
        found.append(JoinedBuffers(placement, model))  # the update
    if options.max_grad_norm is not None:
        found.append(ClipByNorm(options.max_grad_norm))  # the update
    return tuple(found)


def kept_of(transforms: tuple[StepTransform, ...]) -> dict[str, Kept]:
    """The state that transforms keep from one step to the next, by name in `TrainState.extras`."""
    return {name: kept for transform in transforms for name, kept in transform.kept().items()}
