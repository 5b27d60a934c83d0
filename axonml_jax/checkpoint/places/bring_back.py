"""What processes do together to bring back the copies that their folder of checkpoints lacks."""

from collections.abc import Callable
from pathlib import Path

from axonml_jax.checkpoint.manifest import DamagedCheckpoint
from axonml_jax.checkpoint.names import checkpoints_in
from axonml_jax.checkpoint.places.long_work import decide_at_length
from axonml_jax.checkpoint.places.mirror import Mirror
from axonml_jax.checkpoint.plain_files import step_number
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger


def bring_back(
    mirror: Mirror | None, folder: Path, step: int | str | None, team: Team, claim: Callable[[], None]
) -> None:
    """Fetch the newest good copy that is newer than all checkpoints here, or that of a step which is not here.

    Args:
      mirror: the copies, which the main process reads; None: there are none.
      folder: of the checkpoints.
      step: which one is asked for; None or `"best"`: the newest.
      team: the processes, which all call this.
      claim: called before anything is written.

    Raises:
      OSError: in every process, when the store does not answer, after all tries.
      DamagedCheckpoint: when no copy is whole, and there is nothing here to go on from.
      ValueError: when the copies are another run's than the checkpoints here.
    """
    if mirror is None:
        return
    step = step if step is None or step == "best" else step_number(step)
    missing, empty = decide_at_length(team, f"look at {mirror.store}", lambda: _missing(mirror, folder, step))
    failed = None
    for each in missing:
        claim()
        try:
            decide_at_length(team, f"fetch a copy from {mirror.store}", lambda step=each: str(mirror.fetch(step)))
        except DamagedCheckpoint as error:
            failed = error
            if team.leads:
                logger.warning("%s", error)
            continue
        if team.leads:
            logger.warning("the checkpoint of step %d comes from its copy in %s", each, mirror.store)
        return
    if failed is not None and empty:
        raise DamagedCheckpoint(f"no copy in {mirror.store} is whole, and {folder} has none; the last: {failed}")


def _missing(mirror: Mirror, folder: Path, step: int | str | None) -> tuple[list[int], bool]:
    """Steps to fetch, the best first, and whether there is nothing here that would do."""
    mirror.refuse_others(mirror.copies.newest)
    here, there = checkpoints_in(folder), mirror.copies.steps
    if isinstance(step, int):
        return [step] if step in there and step not in here else [], step not in here
    return [each for each in reversed(there) if each > max(here, default=-1)], not here
