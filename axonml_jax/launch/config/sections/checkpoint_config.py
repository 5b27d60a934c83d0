"""The section `checkpoint` of a configuration."""

from dataclasses import dataclass

from axonml_jax.launch.config.lowest import at_least


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run keeps of itself, in the folder `checkpoints` of its own folder.

    Attributes:
      every: save every this many steps, after the last, and when SIGTERM asks the run to stop; null saves nothing.
      keep: how many of the newest checkpoints to keep; null keeps all.
      best: keep the one with the lowest validation loss too; every must then be a multiple of train.eval_every.
      asynchronous: write to disk while the training goes on.
    """

    every: int | None = 500
    keep: int | None = 3
    best: bool = False
    asynchronous: bool = True

    def __post_init__(self):
        problems = ["best=True keeps nothing while checkpoint.every=null saves nothing"]
        at_least("checkpoint", self, problems * (self.best and self.every is None), every=1, keep=1)

    def against_validation(self, eval_every: int | None) -> list[str]:
        """What is wrong beside `train.eval_every`."""
        if not self.best or self.every is None or (eval_every and self.every % eval_every == 0):
            return []
        return [
            f"checkpoint.best=True compares validation losses, but checkpoint.every={self.every} is no multiple of "
            f"train.eval_every={eval_every}"
        ]
