"""The section `spikes` of a configuration."""

from collections.abc import Iterator
from dataclasses import dataclass

from axonml_jax.launch.config.lowest import at_least
from axonml_jax.launch.config.sections.checkpoint_config import CheckpointConfig


@dataclass(frozen=True, kw_only=True)
class SpikesConfig:
    """What happens when the loss rises at once: the run goes back to the checkpoint before, and past the batches since.

    Attributes:
      factor: a loss above this many times the median of the last ones, or one that is not finite, is a spike; null looks for
        none.
      window: steps of which the median is taken; there is no spike before as many are made.
      skip: batches to leave out beyond the one that made the spike.
      limit: how often a run goes back; at the next spike it stops.
    """

    factor: float | None = None
    window: int = 50
    skip: int = 0
    limit: int = 3

    def __post_init__(self):
        problems = [f"factor={self.factor}: must be above 1"] if self.factor is not None and not self.factor > 1 else []
        if self.factor is None and (self.window, self.skip, self.limit) != (50, 0, 3):
            problems.append("window, skip and limit have no effect while spikes.factor is null")
        at_least("spikes", self, problems, window=2, skip=0, limit=1)

    def against_checkpoints(self, checkpoint: CheckpointConfig) -> Iterator[str]:
        """What is wrong beside the section `checkpoint`."""
        if self.factor is None:
            return
        if checkpoint.every is None:
            yield f"spikes.factor={self.factor} goes back to a checkpoint, but checkpoint.every=null saves none"
        elif checkpoint.keep == 1:
            yield (
                f"spikes.factor={self.factor} goes back to the last checkpoint of checkpoint.every={checkpoint.every}, which "
                "checkpoint.keep=1 deletes when a run is stopped in between: keep 2 or more"
            )
