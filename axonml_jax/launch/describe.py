"""A run in words: what is trained on what, and what its step sends."""

from dataclasses import asdict
from typing import Any

import jax

from axonml_jax.facade.parallelize import make_train_step
from axonml_jax.launch.config import RunConfig
from axonml_jax.launch.ground import Ground
from axonml_jax.launch.optimizer import make_optimizer
from axonml_jax.launch.text_task import build_model, loss_fn
from axonml_jax.ledger.explain import explain
from axonml_jax.ledger.report import Report


def describe(config: RunConfig, ground: Ground) -> str:
    """Model, mesh, plan and batch, a line each."""
    model, train = config.model, config.train
    tokens = train.global_batch_size * config.data.length
    rows = {
        "model": f"{model.num_params:,} parameters: {model.num_layers} layers, width {model.hidden_size}, "
        f"{model.num_heads} heads, {model.norm}, {model.activation}, {model.position} positions",
        "mesh": f"{', '.join(f'{axis}={size}' for axis, size in ground.mesh.shape.items())} on {ground.device_words}",
        "plan": _settings(config.plan),
        "optimizer": _settings(config.optim),
        "batch": f"{train.global_batch_size} examples of {config.data.length} bytes, {tokens:,} tokens, per update; "
        f"{train.steps} updates",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in rows.items())


def price(config: RunConfig, ground: Ground) -> Report:
    """The ledger of the run's training step, from shapes alone: no array is made."""
    steps: list[Any] = []

    def build():
        model = build_model(config.model, config.train.seed)
        state, step = make_train_step(
            model,
            make_optimizer(config.optim, config.train.steps),
            loss_fn,
            ground.mesh,
            ground.plan,
            max_grad_norm=config.optim.max_grad_norm,
        )
        steps.append(step)
        return state

    state = jax.eval_shape(build)
    return explain(steps[0], state, ground.batch)


def _settings(section: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in asdict(section).items() if value is not None)
