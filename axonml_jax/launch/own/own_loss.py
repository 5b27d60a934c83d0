"""The loss of a run: one's own, the transformer's, or the cross entropy of a model's logits."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.launch.config.sections.own_config import LossConfig
from axonml_jax.launch.objects.named_object import find, made_by
from axonml_jax.model.loss import WeightedMean
from axonml_jax.models.lm_loss import cross_entropy


def logits_loss(model: Any, batch: PyTree) -> WeightedMean:
    """Mean cross entropy in nats of the next token, of a model that is called with tokens and returns logits [..., vocabulary].

    What else the batch has beside `tokens` and `targets` (`segment_ids`, `positions`) is given by name.
    """
    more = {name: value for name, value in batch.items() if name not in ("tokens", "targets")}
    logits = model(batch["tokens"], **more)
    return WeightedMean(*cross_entropy(logits.astype(jnp.float32), batch["targets"]))


def own_loss(config: LossConfig) -> Callable[[Any, PyTree], Any]:
    """The function (model, batch) that a configuration names.

    Raises:
      ValueError: for a path or arguments that do not fit (see `named_object`).
      TypeError: when it cannot be called with a model and a batch.
    """
    path = config.class_path
    assert path is not None
    value = {"class_path": path, "init_args": config.init_args or {}}
    found = find(path, "loss.class_path")
    loss = made_by(value, "loss")() if inspect.isclass(found) else made_by(value, "loss", leaving=2)
    try:
        inspect.signature(loss).bind(object(), object())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss.class_path={path}: must be a function (model, batch), or a class whose objects are called so, but {error}"
        ) from None
    return loss
