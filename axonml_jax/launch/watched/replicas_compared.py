"""Replicas compared every so many steps of a run, before anything is saved."""

from collections.abc import Callable

import jax

from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.config.run_config import RunConfig
from axonml_jax.logging import logger
from axonml_jax.training.state.replicas import CompareReplicas, ReplicasDiffer, in_words


class ReplicasCompared:
    """Called after every step by `fit`: compares if it is time, then does what comes after a step.

    Args:
      config: `train.compare_replicas` says how often, `train.replicas_differ` what happens then.
      trainer: the run.
      after: what comes then; not after a step whose replicas differ, if they stop the run.
      last: whether the run is saved after a step as it ends there, which is compared too; None: not.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        after: Callable[[int, dict[str, float]], bool],
        last: Callable[[int], bool] | None = None,
    ):
        self._every, self._stops = config.train.compare_replicas, config.train.replicas_differ == "stop"
        self._trainer, self._after, self._compare = trainer, after, CompareReplicas()
        self._told, self._last = set[int](), last

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Compare if it is time.

        Returns:
          Whether to stop, as `after` says.

        Raises:
          ReplicasDiffer: in every process, naming the devices and the arrays.
        """
        if self._every is not None and (step % self._every == 0 or (self._last is not None and self._last(step))):
            found = self._compare(self._trainer.state)
            if found and self._stops:
                raise ReplicasDiffer(in_words(found, step))
            if jax.process_index() == 0 and {each.device for each in found} - self._told:
                logger.warning("%s", in_words(found, step))
            self._told |= {each.device for each in found}
        return self._after(step, metrics)
