"""The optimizer that a configuration describes."""

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree
from axonml_jax.launch.config.run_config import OptimConfig

_NAMED = {"adamw": optax.adamw, "lion": optax.lion}


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """AdamW or Lion with the configured learning rate; clipping is the trainer's (`max_grad_norm`).

    Args:
      config: the section `optim`.
      steps: length of the run, at whose end a cosine schedule reaches a tenth of the learning rate.
    """
    b1, b2 = config.betas
    schedule = learning_rate(config, steps)
    return _NAMED[config.name](schedule, b1=b1, b2=b2, weight_decay=config.weight_decay, mask=_matrices)


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate at every step: up from 0 along a line, then as the schedule says."""
    peak, warmup = config.learning_rate, config.warmup_steps
    after = {
        "cosine": optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=0.1),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # Counting from 1: a first step with a learning rate of 0 would be lost.
    rising = lambda count: peak * (count + 1) / (warmup + 1)
    return optax.join_schedules([rising, after], [warmup])


def _matrices(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)
