"""The transforms of a training step: all there are, and their order."""

from dataclasses import dataclass

from axonml_jax.model.view import Functional
from axonml_jax.training.compose import StepTransform
from axonml_jax.training.rest import Rest
from axonml_jax.training.update import ClipByNorm, JoinedBuffers, LayerNorms, Norm


@dataclass(frozen=True)
class StepOptions:
    """What a trainer asks for beside the plan.

    Attributes:
      max_grad_norm: clip gradients to this global norm; None does not clip.
      norm_type: of that norm.
      max_nonfinite: how many skipped updates in a row end the training; None skips nothing.
      layer_norms: measure norms layer by layer.
    """

    max_grad_norm: float | None = None
    norm_type: float = 2.0
    max_nonfinite: int | None = None
    layer_norms: bool = False


def transforms_of(
    rest: Rest, options: StepOptions = StepOptions(), model: Functional | None = None
) -> tuple[StepTransform, ...]:
    """What a plan on its mesh, a trainer and a model ask for, the outermost first.

    Args:
      rest: how a step's state rests, with the placement of a step (`in_round`).
      options: what the trainer asks for.
      model: None: nobody runs them, and what they keep is asked for alone.
    """
    found: list[StepTransform] = []
    if options.layer_norms:
        found.append(LayerNorms(rest))
    found.append(Norm(rest, float(options.norm_type)))
    if model is not None:
        found.append(JoinedBuffers(rest.placement, model))
    if options.max_grad_norm is not None:
        found.append(ClipByNorm(options.max_grad_norm))
    return tuple(found)
