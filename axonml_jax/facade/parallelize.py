"""`parallelize`: any plan on any mesh; what every facade is made of. `make_train_step`: the same without objects."""

from typing import Any

import optax

from axonml_jax._types import LossFn, PyTree
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.model.functional import Trainable
from axonml_jax.parallel.plan import Plan
from axonml_jax.training.state.train_state import TrainState
from axonml_jax.training.step import TrainStep


def parallelize(
    model: Any,
    mesh: Any = None,
    plan: Plan | None = None,
    *,
    params: PyTree | None = None,
    trainable: Trainable = None,
    seed: int = 0,
) -> ParallelModel:
    """A model on a mesh under a plan.

    Args:
      model: an NNX module or a function without arguments that makes one (then parameters are made where they will
        rest), or a Linen module with `params=`.
      mesh: a Mesh, a World, a ProcessGroup, or None: the plan's own degrees, or all devices on `data`.
      plan: how the model is spread and stepped; None is data parallelism.
      params: a Linen module's variables, or a function without arguments that makes them.
      trainable: which parameters train.
      seed: of dropout and other random streams.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """
    return ParallelModel(model, mesh, plan, params=params, trainable=trainable, seed=seed)


def make_train_step(
    model: Any,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    mesh: Any = None,
    plan: Plan | None = None,
    *,
    params: PyTree | None = None,
    trainable: Trainable = None,
    max_grad_norm: float | None = None,
    norm_type: float = 2.0,
    max_nonfinite: int | None = None,
    seed: int = 0,
) -> tuple[TrainState, TrainStep]:
    """The pure, functional way: a first state and a compiled step.

    Args:
      model, mesh, plan, params, trainable, seed: see `parallelize`.
      tx: the optimizer.
      loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`.
      max_grad_norm: clip gradients to this global norm.
      norm_type: of that norm: 1, 2 or `math.inf`.
      max_nonfinite: see `ParallelModel.trainer`.

    Returns:
      `(state, step)` with `state, metrics = step(state, batch)`; the state given to `step` is donated.

    Raises:
      TypeError, ValueError: for anything that cannot work, before anything is allocated.
    """
    parallel = parallelize(model, mesh, plan, params=params, trainable=trainable, seed=seed)
    trainer = parallel.trainer(
        tx, loss_fn, max_grad_norm=max_grad_norm, norm_type=norm_type, max_nonfinite=max_nonfinite
    )
    return trainer.state, trainer.train_step
