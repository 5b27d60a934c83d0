"""Whether ticks can be kept: inputs have arrived, and no rank does two things of a kind in one tick."""

import numpy as np

from axonml_jax.parallel.pipeline.schedules.action import Action, Work
from axonml_jax.parallel.pipeline.schedules.ticks import Ticks


def violations(num_ranks: int, ticks: Ticks) -> list[str]:
    """Every reason why an executor cannot keep these ticks; empty when it can.

    Args:
      num_ranks: S; stage p lives on rank p mod S.
      ticks: when every action happens.
    """
    shapes = {np.shape(grid) for grid in ticks if grid is not None}
    if len(shapes) > 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        return [f"ticks of F, B and W must be [stage, microbatch] of one shape, not {sorted(shapes)}"]
    if len(ticks.forward) % num_ranks:
        return [f"{len(ticks.forward)} stages do not divide over {num_ranks} ranks"]
    if ticks.weight is not None and ticks.backward is None:
        return ["weight gradients need the ticks of input gradients"]
    before = [f"{work} before tick 0" for work, grid in _kinds(ticks).items() if grid.min() < 0]
    return before + _too_early(ticks) + _at_once(num_ranks, ticks)


def _kinds(ticks: Ticks) -> dict[Work, np.ndarray]:
    given: Work = "B" if ticks.weight is None else "I"
    found: dict[Work, np.ndarray | None] = {"F": ticks.forward, given: ticks.backward, "W": ticks.weight}
    return {work: grid for work, grid in found.items() if grid is not None}


def _too_early(ticks: Ticks) -> list[str]:
    kinds = _kinds(ticks)
    forward, found = ticks.forward, _waits("F", ticks.forward[1:], "F", ticks.forward[:-1], stage=1, step=-1)
    if ticks.backward is not None:
        given: Work = "B" if "B" in kinds else "I"
        found += _waits(given, ticks.backward, "F", forward, sent=0)
        found += _waits(given, ticks.backward[:-1], given, ticks.backward[1:], step=1)
    if ticks.weight is not None and ticks.backward is not None:
        found += _waits("W", ticks.weight, "I", ticks.backward, sent=0)
    return found


def _waits(
    work: Work, at: np.ndarray, needs: Work, done: np.ndarray, *, stage: int = 0, step: int = 0, sent: int = 1
) -> list[str]:
    """Actions that stand before what they need, or in its tick where that must still be `sent`."""
    return [
        f"{Action(row + stage, work, m)} at tick {at[row, m]} needs {Action(row + stage + step, needs, m)} "
        f"{'of an earlier tick' if sent else 'before'}, which is at tick {done[row, m]}"
        for row, m in np.argwhere(at < done + sent).tolist()
    ]


def _at_once(num_ranks: int, ticks: Ticks) -> list[str]:
    found = []
    for work, grid in _kinds(ticks).items():
        for rank in range(num_ranks):
            mine = grid[rank::num_ranks].ravel()
            values, counts = np.unique(mine, return_counts=True)
            for tick in values[counts > 1].tolist():
                chunk, m = np.nonzero(grid[rank::num_ranks] == tick)
                both = ", ".join(
                    str(Action(c * num_ranks + rank, work, i)) for c, i in zip(chunk.tolist(), m.tolist(), strict=True)
                )
                found.append(f"rank {rank} cannot do {both} in one tick ({tick})")
    return found
