"""The checkpoints of a run in an object store: each is made in a folder beside the run, and counts when it is at the URL."""

import errno
import uuid
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import Retention, best_of
from axonml_jax.checkpoint.manifest import DamagedCheckpoint, Manifest, manifests_in
from axonml_jax.checkpoint.names import checkpoints_in, name_of, path_of
from axonml_jax.checkpoint.ownership import OWNER, FolderInUse, in_use
from axonml_jax.checkpoint.places.catch_up import is_whole, uncopied
from axonml_jax.checkpoint.places.copies import Copies
from axonml_jax.checkpoint.places.copy_commit import run_in, take_id
from axonml_jax.checkpoint.places.long_work import decide_at_length
from axonml_jax.checkpoint.places.object_store import ObjectStore, may_pass
from axonml_jax.checkpoint.places.staging_folder import fetched, require_shared, tidy_fetched
from axonml_jax.checkpoint.plain_files import step_number
from axonml_jax.checkpoint.saving import remove
from axonml_jax.checkpoint.team import Team
from axonml_jax.logging import logger


class AtUrl:
    """A URL, and what happens there around saves and restores. The folder beside the run has what is not there yet.

    Args:
      store: the URL.
      folder: where checkpoints are made before they are sent; all processes see it.
      rules: which stay.
      verify: read every file back from the store before a checkpoint counts.
      team: the processes, which all make the calls that say so.
    """

    mirror = None

    def __init__(self, store: ObjectStore, folder: Path, rules: Retention, *, verify: bool, team: Team):
        self.folder, self._rules, self._team = folder, rules, team
        self.copies = Copies(store, rules, verify=verify)
        self._known: list[int] = []

    def __str__(self) -> str:
        return str(self.copies.store)

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint at the URL, in order."""
        self._known = self.copies.steps
        return self._known

    @property
    def known_steps(self) -> list[int]:
        """`steps` as they were last seen: a store that is away is not asked."""
        return self._known

    def said(self) -> dict[int, Manifest]:
        """What every checkpoint says of its metrics and time, by step."""
        return self.copies.said()

    def name_of(self, step: int) -> str:
        """The checkpoint of a step, for people."""
        return f"{self}/{name_of(step)}"

    def claimed(self) -> None:
        """In the main process, when the job has become the only writer of the folder."""
        tidy_fetched(self.folder)

    def placed(self, step: int) -> None:
        """In the main process: send a checkpoint that is made; then what else waits, and the rules keep.

        Raises:
          OSError: when it is not at the URL. It stays in the folder, and goes with the next one.
        """
        try:
            self._send(step)
        except OSError as error:
            for old in self._rules.deletes_of(partial(manifests_in, self.folder), [step]):
                remove(path_of(self.folder, old))
            if isinstance(error.__cause__, Exception) and may_pass(error.__cause__):
                raise OSError(errno.EHOSTDOWN, str(error)) from error
            raise
        try:
            self._send_others(step)
        except OSError as error:
            logger.warning("older checkpoints in %s wait on: %s", self.folder, error)

    def committed(self, newest: int) -> None:
        """In the main process, after that: delete what no rule keeps."""
        self.copies.prune([newest])
        self._known = self.copies.steps

    def offers(
        self, step: int | str | None, metric: str | None, mode: str, claim: Callable[[], None]
    ) -> Generator[tuple[int, Path], None, None]:
        """The checkpoints that a restore may take, the best first, each in a folder until the next; all processes get the same.

        Args:
          step: which one; `"best"`: by the metric; None: any.
          metric: what the best is chosen by; None: by nothing.
          mode: `"min"` or `"max"`.
          claim: not called, as nothing is changed.

        Raises:
          FileNotFoundError: when the one that is asked for is not there.
          DamagedCheckpoint: when it is damaged, or when all are.
          OSError: in every process, when the store does not answer, after all tries.
        """
        del claim
        choose = partial(self._candidates, step, metric, mode)
        failed = None
        for each, waits in decide_at_length(self._team, f"look at {self}", choose):
            if waits:
                require_shared(folder := path_of(self.folder, each), self._team)
                if self._team.leads:
                    logger.warning("the checkpoint of step %d is in %s, and not yet at %s", each, self.folder, self)
                yield each, folder
                continue
            try:
                with fetched(self.copies, name_of(each), self.folder, self._team) as folder:
                    yield each, folder
            except DamagedCheckpoint as error:
                if step is not None:
                    raise
                failed = error
                if self._team.leads:
                    logger.warning("%s", error)
        if failed is not None:
            raise DamagedCheckpoint(f"no checkpoint at {self} is whole; the last: {failed}")

    def finish(self, *, together: bool, only_restored: bool, claim: Callable[[], None]) -> None:
        """Send what waits in the folder.

        Args:
          together: all processes wait for the main one; False: this one ends with an error, and nothing is sent.
          only_restored: whether the job has restored and owns nothing.
          claim: called before anything is written.
        """
        if not (together and only_restored and self._team.decide(f"look into {self.folder}", self._has_leftovers)):
            return
        try:
            claim()
            decide_at_length(self._team, f"send to {self}", partial(self._send_others, None))
        except (FolderInUse, OSError) as error:
            if self._team.leads:
                logger.warning("checkpoints in %s wait on: %s", self.folder, error)

    def _has_leftovers(self) -> bool:
        """Whether something waits, and nobody lives who will send it."""
        return not in_use(self.folder / OWNER) and bool(checkpoints_in(self.folder))

    def _candidates(self, step: int | str | None, metric: str | None, mode: str) -> list[tuple[int, bool]]:
        """Steps to try, in their order, and whether each waits in the folder."""
        waiting, there = manifests_in(self.folder), self.said()
        self._known = list(there)
        if step == "best":
            if metric is None:
                raise ValueError('step="best" needs a metric: CheckpointManager(..., best="valid_loss")')
            step = best_of({**there, **waiting}, metric, mode)
            if step is None:
                raise FileNotFoundError(f"no checkpoint at {self} has the metric {metric}")
        steps = sorted({*there, *waiting}, reverse=True)
        if step is not None:
            if step_number(step) not in steps:
                raise FileNotFoundError(f"{self} has no checkpoint of step {step}; it has {steps[::-1]}")
            steps = [step_number(step)]
        return [(each, each in waiting) for each in steps]

    def _send(self, step: int) -> None:
        self.copies.claim()
        newest = self.copies.newest
        run = run_in(self.folder) or take_id(self.folder, newest.run if newest else uuid.uuid4().hex)
        if not self.copies.put(path_of(self.folder, step), name_of(step), run, str(self)):
            raise OSError(
                f"{self} belongs to another run by now, which has claimed it: this one writes nothing more there"
            )
        remove(path_of(self.folder, step))

    def _send_others(self, sent: int | None) -> None:
        """Send what has waited since a save that failed, and forget what is there already or no rule keeps."""
        for step, folder in reversed(checkpoints_in(self.folder).items()):
            if step == sent:
                continue
            if step in uncopied(manifests_in(self.folder), self.said(), self._rules) and is_whole(folder):
                self._send(step)
            elif folder.exists():
                remove(folder)
