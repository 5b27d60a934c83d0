"""Copies of a run's committed checkpoints in an object store, made behind its back, from which another machine goes on."""

import threading
import uuid
from pathlib import Path
from typing import NamedTuple

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manifest import Manifest, manifests_in
from axonml_jax.checkpoint.names import checkpoints_in, name_of, path_of
from axonml_jax.checkpoint.places.catch_up import is_whole, uncopied
from axonml_jax.checkpoint.places.copies import Copies
from axonml_jax.checkpoint.places.copy_commit import Copy, commit_of, run_in, take_id
from axonml_jax.checkpoint.places.object_store import ObjectStore, lie_apart
from axonml_jax.logging import logger


class _Job(NamedTuple):
    folder: Path
    step: int
    late: bool = False  # it was there when the folder was claimed
    newest: bool = True


class Mirror:
    """The copies under one URL, for the main process of the run that owns the folder of the checkpoints.

    Args:
      store: where.
      folder: of the checkpoints that are copied.
      rules: which copies stay when another is made.
      verify: read every file back before a copy is committed.

    Raises:
      ValueError: when one of the two lies within the other.
    """

    def __init__(self, store: ObjectStore, folder: Path, rules: Retention, *, verify: bool = False):
        lie_apart(store, folder, f"mirror={store} and {folder}, the folder of the checkpoints", "give another URL")
        self.store, self._folder, self._rules = store, folder, rules
        self.copies = Copies(store, rules, verify=verify)
        self._error: Exception | None = None
        self._lock, self._thread = threading.Lock(), None
        self._waiting: _Job | None = None
        self._under_way: _Job | None = None
        self._claimed_with: dict[int, Path] = {}  # the checkpoints of which some may have no copy
        self._late: list[_Job] = []

    @property
    def copying(self) -> list[int]:
        """The steps whose checkpoints are read, or will be: they must not be deleted."""
        with self._lock:
            return [job.step for job in (self._under_way, self._waiting) if job is not None]

    def refuse_others(self, copy: Copy | None) -> None:
        """See that a copy is of the run whose checkpoints are in the folder, if that has any: only then is it known.

        Raises:
          ValueError: when it is another run's.
        """
        mine = run_in(self._folder)
        if copy is not None and copy.run != mine and (mine or checkpoints_in(self._folder)):
            raise ValueError(
                f"{self.store} has copies of another run, which is in {copy.folder}, not of that in {self._folder}: give the "
                "run's own URL, or one without copies"
            )

    def copy(self, folder: Path, step: int) -> None:
        """Begin to copy a committed checkpoint, and then delete the copies that no rule keeps.

        Where the store is slower than the saves, the newest is copied next. What fails is said, and the next one is tried.

        Args:
          folder: the checkpoint.
          step: its step.
        """
        with self._lock:
            self._waiting = _Job(folder, step)
            self._begin()

    def catch_up(self) -> None:
        """Begin to copy what is here, has no copy and would stay: the newest first, and what is committed meanwhile before."""
        if found := checkpoints_in(self._folder):
            with self._lock:
                self._claimed_with = found
                self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"copies to {self.store}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until nothing more is to be copied.

        Raises:
          OSError: when the newest checkpoint could not be.
        """
        if (thread := self._thread) is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"the newest checkpoint is not copied to {self.store}: {error}") from error

    def fetch(self, step: int) -> Path:
        """Bring a copy back into the folder of checkpoints, where it appears whole or not at all.

        Raises:
          ValueError: when it is another run's.
          DamagedCheckpoint: naming every file that is not what was written.
          OSError: when the store does not give it, after all tries, or the folder cannot be written.
        """
        self.refuse_others(self.copies.copy_of(commit_of(step)))
        folder = path_of(self._folder, step)
        self.copies.fetch(folder.name, folder, keep_id=True)
        return folder

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if not self.copies.lost and not (job.late and not is_whole(job.folder)):
                    self.copies.claim()
                    run = run_in(self._folder) or take_id(self._folder, uuid.uuid4().hex)
                    self.copies.put(job.folder, name_of(job.step), run, str(self._folder))
                    self.copies.prune(self.copying)
            except Exception as error:
                if self._error is None:
                    logger.warning("%s stays where it is, and the next one is copied: %s", job.folder, error)
                self._error = error if job.newest else self._error
            else:
                self._error = None if job.newest else self._error

    def _next(self) -> _Job | None:
        """What is copied now: what was committed last, or else what was there and has no copy."""
        while True:
            with self._lock:
                found, self._claimed_with = self._claimed_with, {}
                if not found:
                    self._under_way, self._waiting = self._waiting, None
                    if self._under_way is None and self._late:
                        self._under_way = self._late.pop(0)
                    if self._under_way is None:
                        self._thread = None
                    return self._under_way
            steps = self.without_copy(found)
            self._late = [_Job(found[step], step, late=True, newest=step == max(found)) for step in steps]

    def has_all(self, found: dict[int, Path]) -> bool:
        """Whether each of these checkpoints has a copy, and the newest one of the same save; asked with two requests."""
        newest, there = max(found), self.copies.steps
        if not set(found) <= set(there):
            return False
        try:
            return self.copies.copy_of(commit_of(newest)).said.saved_at == Manifest.read(found[newest]).saved_at
        except (OSError, ValueError):  # damaged, or removed meanwhile
            return False

    def without_copy(self, found: dict[int, Path]) -> list[int]:
        """Which of these checkpoints are to be copied, the newest first; what hinders to know it is said."""
        try:
            self.refuse_others(self.copies.newest)
            said = manifests_in(self._folder)
            here = {step: said[step] for step in found if step in said}
            return uncopied(here, self.copies.said(), self._rules)
        except ValueError:  # another run's: `restore` refuses them
            return []
        except Exception as error:
            logger.warning("which checkpoints of %s have no copy is not known: %s", self._folder, error)
            self._error = error
            return []
