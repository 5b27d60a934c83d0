"""Going on from the newest step that is good, in memory or on disk; copies are given up when the run has gone on from disk."""

from typing import Any

from axonml_jax.checkpoint.manager import CheckpointManager
from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest
from axonml_jax.checkpoint.memory.memory_copies import MemoryCopies
from axonml_jax.checkpoint.store import Positioned
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger


def restore_newest(
    memory: MemoryCopies, manager: CheckpointManager, run: Any, *, of: str = "", data: Positioned | None = None
) -> tuple[Manifest | None, bool]:
    """Go on from memory, unless a newer step on disk is good. All processes make the same calls.

    Args:
      memory: the copies in memory.
      manager: of the checkpoints on disk.
      run: a trainer, which takes the arrays.
      of: the run's name (see `MemoryCopies.look`).
      data: the data loader, which goes on from where it was.

    Returns:
      What the step says about itself, and whether it was in memory; None: there is nothing, and never was.

    Raises:
      DamagedCheckpoint: when all on disk are damaged and there is no step in memory, and when all processes had a step in
        memory, no longer have, and there is nothing on disk: nothing begins anew unasked.
      OSError, ValueError: see `MemoryCopies.look` and `restore`, and `CheckpointManager.restore`.
    """
    team, step = Team(), memory.look(run, of=of)
    newest = max(team.decide("look for checkpoints", lambda: manager.steps), default=-1)
    if step is not None and newest <= step:
        return memory.restore(run, data=data), True
    if step is None:
        found = manager.restore(run, data=data)
        if found is None and memory.lost is not None:
            raise DamagedCheckpoint(
                f"all processes had a copy of step {memory.lost} in memory, and by now there is no step that all can have; "
                f"{manager.place} has no checkpoint: there is nothing to go on from, and nothing begins anew unasked. Start a "
                "new run; checkpoint.every keeps steps on disk too"
            )
    elif (found := _good(manager, run, data, step, team)) is None:
        return memory.restore(run, data=data), True
    memory.forget()
    return found, False


def _good(manager: CheckpointManager, run: Any, data: Positioned | None, step: int, team: Team) -> Manifest | None:
    """What all processes have restored from disk; None where that is older than a step, or is not good in all of them."""
    try:
        found, said = manager.restore(run, data=data), ""
    except DamagedCheckpoint as error:
        found, said = None, str(error)
    heard = team.tell_all("restore from disk", [-1 if found is None else found.step, said])
    if all(each > step for each, _ in heard):
        return found
    if team.leads:
        why = next((text for _, text in heard if text), "the newest checkpoint on disk is damaged")
        logger.warning("the run goes on from step %d in memory: %s", step, why)
    return None
