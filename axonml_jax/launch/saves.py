"""What happens between two steps of `train`: checkpoints, and stopping when asked to."""

from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.data.loader import DataLoader
from axonml_jax.facade.trainer import Trainer
from axonml_jax.launch.preemption import Preemption


class Saves:
    """Called after every step by `fit`.

    Args:
      manager: None saves nothing.
      trainer: the run.
      loader: its training data, whose position is saved too.
      steps: where the run ends; that step is saved in any case.
      preemption: asked after every step.

    Attributes:
      terminated: the step after which SIGTERM has stopped the run, else None.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        trainer: Trainer,
        loader: DataLoader,
        steps: int,
        preemption: Preemption,
    ):
        self._manager, self._trainer, self._loader = manager, trainer, loader
        self._steps, self._preemption = steps, preemption
        self.terminated: int | None = None

    def __call__(self, step: int, metrics: dict[str, float]) -> bool:
        """Save if it is time.

        Args:
          step: updates made.
          metrics: of the step's record, empty where it has none.

        Returns:
          Whether to stop.
        """
        if self._preemption.stop_after(step):
            self.terminated = step
        last = step == self._steps or self.terminated is not None
        if self._manager is not None:
            self._manager.save(step, self._trainer, data=self._loader, metrics=metrics, force=last)
        return self.terminated is not None
