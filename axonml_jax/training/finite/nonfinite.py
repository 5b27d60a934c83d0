"""Updates whose loss or gradients are not finite are skipped, on every rank alike and without asking the host."""

from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.training.finite.guard import NonFinite
from axonml_jax.training.finite.loss_scale import LossScale, chosen
from axonml_jax.training.state.train_state import TrainState


def skip_nonfinite(
    state: TrainState, new: Any, old: Any, loss: jax.Array, norm: jax.Array, limit: int | None
) -> tuple[Any, LossScale | None, NonFinite | None, dict[str, jax.Array]]:
    """What a step's update becomes where it may have to be skipped: under float16, and with a limit.

    Overflow while float16 looks for its scale is no fault: it counts towards the limit only once the scale is at 1.

    Args:
      state: before the step.
      new, old: what the update changes, after it and before it.
      loss, norm: of the step, unscaled; the same on all ranks that train one model.
      limit: how many skipped updates in a row end the training; None: there is no guard.

    Returns:
      What is kept, the next loss scale, the next counts, metrics: counts with this step in them, and the scale that it used.
    """
    scale, guard = state.loss_scale, state.guard
    if scale is None and guard is None:
        return new, None, None, {}
    finite, metrics = jnp.isfinite(norm), {}
    good = finite
    if guard is not None:
        assert limit is not None
        good = finite & jnp.isfinite(loss)
        kept = chosen(good & (guard.in_a_row < limit), new, old)
        bad = ~good if scale is None else ~jnp.isfinite(loss) | (~finite & (scale.scale <= 1))
        guard = guard.after(bad, ~good, state.step, limit)
        metrics = {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
    else:
        kept = chosen(finite, new, old)
    if scale is not None:
        used, scale = scale.scale, scale.after(finite)
        metrics = {"skipped": scale.skipped, **metrics, "loss_scale": used}
    return kept, scale, guard, metrics


def check_limit(limit: Any) -> None:
    """Refuse a limit that is no positive number.

    Raises:
      ValueError: saying so.
    """
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"max_nonfinite={limit!r} must be a whole number from 1, or None to skip nothing")
