"""What a run trains, and by which loss: the library's transformer, or what its configuration names."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from flax import nnx

from axonml_jax._types import LossFn, PyTree
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.launch.config.sections.own_config import OwnModel
from axonml_jax.launch.job.text_task import build_model, loss_fn
from axonml_jax.launch.own.own_loss import logits_loss, own_loss
from axonml_jax.launch.own.own_model import Buildable, own_model
from axonml_jax.model.lora.adapters import LoraModel
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer


def loss_of(config: RunConfig) -> LossFn:
    """The run's loss: the section's own, else the cross entropy of the next token.

    Raises:
      ValueError, TypeError: for a loss that cannot be made.
    """
    if config.loss.class_path is not None:
        return own_loss(config.loss)
    return logits_loss if isinstance(config.model, OwnModel) else loss_fn


def model_of(config: RunConfig, batch: PyTree) -> Buildable:
    """The run's model, to be made where it will rest.

    Args:
      config: the run's.
      batch: shapes of a global batch.

    Raises:
      ValueError, TypeError: for a model that cannot be made.
    """
    if isinstance(config.model, OwnModel):
        made = own_model(config.model, loss_of(config), batch, config.train.seed)
    else:
        made = Buildable(partial(build_model, config.model, config.train.seed))
    return replace(made, model=adapted(config, made.model))


def shapes_of(config: RunConfig, batch: PyTree = None) -> Buildable:
    """The run's model, to look at or to be loaded: the transformer as shapes, one's own to be made where it will rest.

    Args:
      config: the run's.
      batch: shapes of a global batch; only a model of one's own needs them.

    Raises:
      ValueError, TypeError: for a model that cannot be made.
    """
    if isinstance(config.model, OwnModel):
        return model_of(config, batch)
    return Buildable(adapted(config, _transformer_shapes(config.model, config.train.seed)))


@lru_cache(maxsize=4)
def _transformer_shapes(config: TransformerConfig, seed: int) -> Transformer:
    return nnx.eval_shape(lambda: build_model(config, seed))


def adapted(config: RunConfig, model: Any) -> Any:
    """A model, or what makes one, with the run's adapters where it has some."""
    lora = config.finetune.lora
    return model if lora.rank is None else LoraModel(model, lora.build(config.train.seed))
