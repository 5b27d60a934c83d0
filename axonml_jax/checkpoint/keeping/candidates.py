"""The checkpoints that a restore may take, in the order in which they are tried."""

from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import best_of
from axonml_jax.checkpoint.manifest import manifests_in
from axonml_jax.checkpoint.names import checkpoints_in


def candidates(folder: Path, step: int | str | None, metric: str | None, mode: str) -> list[int]:
    """Their steps: the one that is asked for, or all of a folder, the newest first.

    Args:
      folder: the checkpoints'.
      step: which one; `"best"`: by the metric; None: any.
      metric: what the best is chosen by; None: by nothing.
      mode: `"min"` or `"max"`.

    Raises:
      FileNotFoundError: when the one that is asked for is not there.
      ValueError: when the best is asked for and there is no metric.
    """
    if step == "best":
        if metric is None:
            raise ValueError('step="best" needs a metric: CheckpointManager(..., best="valid_loss")')
        step = best_of(manifests_in(folder), metric, mode)
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {folder} has the metric {metric}")
    steps = list(checkpoints_in(folder))
    if step is None:
        return steps[::-1]
    if step not in steps:
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}; it has {steps}")
    return [int(step)]
