"""Of which steps copies are made, the same in all processes: none is begun while some process is at the one before."""

from axonml_jax.checkpoint.memory.complete_step import Outcome, outcome, tell
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger

_COPIES = "axonml_jax/memory/"
_PATIENCE = 10
"""Copies left out in a row after which that is said."""


class CopyRounds:
    """What one process knows of the copies of all. All processes make the same calls.

    Args:
      team: the processes.

    Attributes:
      team: the same.
      complete: the newest step of which every process has a copy; None: there is none.
      begun: of which a copy was begun last, and may be under way in some process; None: none is.
      skipped: how many copies were left out.
    """

    def __init__(self, team: Team):
        self.team, self.skipped = team, 0
        self.complete: int | None = None
        self.begun: int | None = None
        self._made: bool | None = None  # whether this process has made its own; None: it is at it
        self._waited, self._number = 0, 0

    def go_on_from(self, step: int | None) -> None:
        """Know that all processes have a copy of this step, or of none, and that none is under way."""
        self.complete, self.begun, self._number = step, None, self._number + 1

    def may_begin(self, step: int) -> bool:
        """Whether the copy before is over in all processes; if so, whether it is now the one to keep."""
        if self.begun is None:
            return True
        found = self._outcome(self.begun, step)
        if found is Outcome.COMPLETE:
            self.complete = self.begun
        if found is not Outcome.UNDER_WAY:
            self.begun = None
        return self.begun is None

    def begin(self, step: int) -> None:
        """Know that all processes begin a copy of this step."""
        self.begun, self._made, self._waited = step, None, 0

    def skip(self) -> None:
        """Know that all processes leave a copy out, and say so when that happens again and again."""
        self.skipped, self._waited = self.skipped + 1, self._waited + 1
        if self._waited == _PATIENCE and self.team.leads:
            logger.warning(
                "%d copies of the state in memory were left out in a row: that of step %s is not ready in all processes yet; "
                "a restart goes back to step %s. A larger checkpoint.memory_every asks for fewer",
                *(_PATIENCE, self.begun, self.complete),
            )

    def end(self, step: int, made: bool) -> None:
        """Tell the others that this process is ready with its copy, and whether it has it; from another thread too.

        Raises:
          jax.errors.JaxRuntimeError: when the coordinator has gone.
        """
        self._made = made
        if self.team.size > 1:
            tell(self._name(step), made)

    def _outcome(self, begun: int, step: int) -> Outcome:
        if self.team.size > 1:
            return outcome(self._name(begun), self.team.size, step)
        return Outcome.UNDER_WAY if self._made is None else Outcome.COMPLETE if self._made else Outcome.FAILED

    def _name(self, step: int) -> str:
        return f"{_COPIES}{self._number}/{step}"
