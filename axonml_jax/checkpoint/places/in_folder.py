"""The checkpoints of a run in a folder that all its processes share, with or without copies in an object store."""

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from axonml_jax.checkpoint.keeping.candidates import candidates
from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manifest import Manifest, manifests_in
from axonml_jax.checkpoint.names import checkpoints_in, path_of
from axonml_jax.checkpoint.ownership import OWNER, FolderInUse, in_use
from axonml_jax.checkpoint.places.bring_back import bring_back
from axonml_jax.checkpoint.places.long_work import decide_at_length
from axonml_jax.checkpoint.places.mirror import Mirror
from axonml_jax.checkpoint.saving import remove
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger


class InFolder:
    """A folder, and what happens there around saves and restores.

    Args:
      folder: of the checkpoints.
      rules: which stay.
      mirror: copies of them; None: there are none.
      team: the processes, which all make the calls that say so.
    """

    placed = None  # a checkpoint is one as soon as its folder has its name

    def __init__(self, folder: Path, rules: Retention, mirror: Mirror | None, team: Team):
        self.folder, self.mirror, self._rules, self._team = folder, mirror, rules, team

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        return list(checkpoints_in(self.folder))

    known_steps = steps

    def said(self) -> dict[int, Manifest]:
        """What every checkpoint says about itself, by step."""
        return manifests_in(self.folder)

    def name_of(self, step: int) -> Path:
        """The checkpoint of a step, for people."""
        return path_of(self.folder, step)

    def claimed(self) -> None:
        """In the main process, when the job has become the only writer: begin to copy what has no copy."""
        if self.mirror is not None:
            self.mirror.catch_up()

    def committed(self, newest: int) -> None:
        """In the main process, after a commit: delete what no rule keeps, and copy what is new."""
        spared = (newest, *(self.mirror.copying if self.mirror else ()))
        for step in self._rules.deletes_of(self.said, spared):
            remove(path_of(self.folder, step))
        if self.mirror is not None:
            self.mirror.copy(path_of(self.folder, newest), newest)

    def offers(
        self, step: int | str | None, metric: str | None, mode: str, claim: Callable[[], None]
    ) -> Generator[tuple[int, Path], None, None]:
        """The checkpoints that a restore may take, the best first, copies brought back; all processes get the same.

        Args:
          step: which one; `"best"`: by the metric; None: any.
          metric: what the best is chosen by; None: by nothing.
          mode: `"min"` or `"max"`.
          claim: called before anything is written.

        Raises:
          FileNotFoundError: when the one that is asked for is not there.
          DamagedCheckpoint, OSError, ValueError: see `bring_back`.
        """
        bring_back(self.mirror, self.folder, step, self._team, claim)
        tried: set[int] = set()
        choose = partial(candidates, self.folder, step, metric, mode)
        decide = partial(self._team.decide, f"restore from {self.folder}", choose)
        while left := [each for each in decide() if each not in tried]:
            tried.add(left[0])
            yield left[0], checkpoints_in(self.folder).get(left[0], path_of(self.folder, left[0]))

    def finish(self, *, together: bool, only_restored: bool, claim: Callable[[], None]) -> None:
        """Wait until the newest checkpoint is copied.

        Args:
          together: all processes wait for the main one; False: this one ends with an error, and the others may not come.
          only_restored: whether the job has restored and owns nothing: what has no copy is copied now, if nobody else will.
          claim: called before anything is written.

        Raises:
          OSError: when it could not be copied.
        """
        if self.mirror is None:
            return
        if not together:
            self.mirror.close()
            return
        copy = partial(decide_at_length, self._team, f"copy to {self.mirror.store}", self.mirror.close)
        if not only_restored:
            copy()
        elif decide_at_length(self._team, f"look at {self.mirror.store}", self._has_leftovers):
            try:
                claim()
                copy()
            except (FolderInUse, OSError) as error:
                if self._team.leads:
                    logger.warning("checkpoints of %s stay without a copy: %s", self.folder, error)

    def _has_leftovers(self) -> bool:
        """Whether something here has no copy, and nobody lives who will make it."""
        assert self.mirror is not None
        here = checkpoints_in(self.folder)
        if not here or in_use(self.folder / OWNER) or self.mirror.has_all(here):
            return False
        return bool(self.mirror.without_copy(here))
