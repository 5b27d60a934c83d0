"""A folder of checkpoints that lacks what an object store has a copy of gets it from there."""

from collections.abc import Callable
from pathlib import Path

from axonml_jax.checkpoint.manifest import DamagedCheckpoint
from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.checkpoint.places.mirror import Mirror
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger


def bring_back(mirror: Mirror, folder: Path, step: int | str | None, team: Team, claim: Callable[[], None]) -> None:
    """Fetch the newest good copy that is newer than all checkpoints here, or that of a step which is not here.

    Args:
      mirror: the copies; the main process reads them.
      folder: of the checkpoints.
      step: which one is asked for; None or `"best"`: the newest.
      team: the processes, which all call this.
      claim: called before anything is written.

    Raises:
      OSError: in every process, when the store does not answer, after all tries.
    """
    for missing in team.decide(f"look at {mirror.store}", lambda: _missing(mirror, folder, step)):
        claim()
        try:
            team.decide(f"fetch a copy from {mirror.store}", lambda step=missing: str(mirror.fetch(step, folder)))
        except DamagedCheckpoint as error:
            if team.leads:
                logger.warning("%s", error)
            continue
        if team.leads:
            logger.warning("the checkpoint of step %d comes from its copy in %s", missing, mirror.store)
        return


def _missing(mirror: Mirror, folder: Path, step: int | str | None) -> list[int]:
    """Steps to fetch, the best first."""
    here, there = checkpoints_in(folder), mirror.steps
    if isinstance(step, int):
        return [step] if step in there and step not in here else []
    return [each for each in reversed(there) if each > max(here, default=-1)]
