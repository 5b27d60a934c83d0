"""The section `checkpoint` of a configuration."""

from dataclasses import dataclass


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
        problems = []
        for name in ("every", "keep"):
            if (value := getattr(self, name)) is not None and value < 1:
                problems.append(f"checkpoint.{name}={value}: must be at least 1")
        if self.best and self.every is None:
            problems.append("checkpoint.best=True keeps nothing while checkpoint.every=null saves nothing")
        if problems:
            raise ValueError("; ".join(problems))

    def against_validation(self, eval_every: int | None) -> list[str]:
        """What is wrong beside `train.eval_every`."""
        if not self.best or self.every is None or (eval_every and self.every % eval_every == 0):
            return []
        return [
            f"checkpoint.best=True compares validation losses, but checkpoint.every={self.every} is no multiple of "
            f"train.eval_every={eval_every}"
        ]
