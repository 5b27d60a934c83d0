"""Copies of a run's committed checkpoints in an object store, from which another machine goes on.

An object store renames nothing, so a copy is committed by one object that is written last: `step_00000100.commit` says under
which prefix its files are. Files that no such object names are no checkpoint.
"""

import json
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, damage, manifests_in, sync
from axonml_jax.checkpoint.names import SAVING, checkpoints_in, path_of
from axonml_jax.checkpoint.places.catch_up import is_whole, uncopied
from axonml_jax.checkpoint.places.copy_commit import COMMIT, PREFIX, Copy, commit_of, run_in, take_id
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.checkpoint.saving import put_in_place, remove
from axonml_jax.logging import logger

OWNER = "mirror.json"
"""The object that says whose copies these are: the last that has claimed them."""

_AT_ONCE = 4  # files under way; each is in memory meanwhile


class _Job(NamedTuple):
    folder: Path
    step: int
    late: bool = False  # it was there when the folder was claimed
    newest: bool = True


class Mirror:
    """The copies under one URL, for the main process of the run that owns the folder of the checkpoints.

    Two runs under one URL tear no copy: each writes under prefixes of its own. The last one to claim it owns it, and the other
    finds that out before it commits, or right after, and withdraws its copy then.

    Args:
      store: where.
      folder: of the checkpoints that are copied.
      rules: which copies stay when another is made.

    Raises:
      ValueError: when one of the two lies within the other.
    """

    def __init__(self, store: ObjectStore, folder: Path, rules: Retention):
        mine, there = folder.resolve(), store.folder
        if there is not None and (there.is_relative_to(mine) or mine.is_relative_to(there)):
            raise ValueError(
                f"mirror={store} and {folder}, the folder of the checkpoints, lie one within the other: copies need a place "
                "of their own, best on another disk; give another URL"
            )
        self.store, self._folder, self._rules, self._token = store, folder, rules, uuid.uuid4().hex
        self._claimed = self._lost = False
        self._begun: set[str] = set()  # prefixes that may be of no copy
        self._error: Exception | None = None
        self._lock, self._thread = threading.Lock(), None
        self._waiting: _Job | None = None
        self._under_way: _Job | None = None
        self._claimed_with: dict[int, Path] = {}  # the checkpoints of which some may have no copy
        self._late: list[_Job] = []

    @property
    def steps(self) -> list[int]:
        """Steps with a copy, in order."""
        return sorted(int(found[1]) for key in self.store.keys("step_") if (found := COMMIT.fullmatch(key)))

    @property
    def copying(self) -> list[int]:
        """The steps whose checkpoints are read, or will be: they must not be deleted."""
        with self._lock:
            return [job.step for job in (self._under_way, self._waiting) if job is not None]

    @property
    def newest(self) -> Copy | None:
        """The newest copy whose commit can be read."""
        for step in reversed(self.steps):
            with suppress(DamagedCheckpoint):
                return self._copy_of(step)
        return None

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
        copy = self._copy_of(step)
        self.refuse_others(copy)
        folder, prefix = path_of(self._folder, step), copy.prefix
        unfinished = folder.with_name(folder.name + SAVING)
        remove(unfinished)
        unfinished.mkdir(parents=True)
        try:
            self._write(prefix + NAME, unfinished / NAME)
            manifest = Manifest.read(unfinished)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda name: self._write(prefix + name, unfinished / name), manifest.files))
            if lines := damage(unfinished, manifest, manifest.files):
                said = f"{self.store}/{prefix} is damaged:"
                raise DamagedCheckpoint("\n".join([said, *(f"  {line}" for line in lines)]))
            take_id(self._folder, copy.run)
            put_in_place(unfinished, folder)
        except BaseException:
            remove(unfinished)
            raise
        return folder

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if not self._lost and not (job.late and not is_whole(job.folder)):
                    self._claim()
                    self._push(job.folder, job.step)
                    for old in () if self._lost else self._rules.deletes_of(self._copies, self.copying):
                        self._remove(old)
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
            self._late = self._without_copy(found)

    def _without_copy(self, found: dict[int, Path]) -> list[_Job]:
        try:
            self.refuse_others(self.newest)
            said = manifests_in(self._folder)
            here = {step: said[step] for step in found if step in said}
            steps = uncopied(here, self._copies(), self._rules)
            return [_Job(found[step], step, late=True, newest=step == max(found)) for step in steps]
        except ValueError:  # another run's: `restore` refuses them
            return []
        except Exception as error:
            logger.warning("which checkpoints of %s have no copy is not known: %s", self._folder, error)
            self._error = error
            return []

    def _claim(self) -> None:
        """Become the owner, and remove what killed processes have left: files that belong to no copy."""
        if self._claimed:
            return
        self.store.put(OWNER, json.dumps({"token": self._token, "pid": os.getpid()}).encode())
        named = {prefix for step in self.steps if (prefix := self._prefix_of(step))}
        for key in self.store.keys("step_"):
            if PREFIX.match(key) and not key.startswith(tuple(named)):
                self.store.remove(key)
        self._claimed = True

    def _push(self, folder: Path, step: int) -> None:
        """Copy a checkpoint; what is begun and not committed goes again, whatever the reason."""
        prefix = f"step_{step:08d}.{uuid.uuid4().hex}/"
        self._begun.add(prefix)
        try:
            self._put(folder, step, prefix)
        finally:
            with suppress(OSError):  # tried again after the next
                for each in list(self._begun):
                    if self._prefix_of(int(each[5 : each.index(".")])) != each:
                        self._remove_files(each)
                    self._begun.remove(each)

    def _put(self, folder: Path, step: int, prefix: str) -> None:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda path: self.store.put(f"{prefix}{path.relative_to(folder)}", path.read_bytes()), paths))
        if not self._owns():
            return
        before, replaced = self.store.get(commit_of(step)), self._prefix_of(step)
        said = Manifest.read(folder)
        run = run_in(self._folder) or take_id(self._folder, uuid.uuid4().hex)
        content = Copy(prefix, run, self._folder, said).text()
        self.store.put(commit_of(step), content)
        if self._owns():
            self._remove_files(replaced)
        elif self._prefix_of(step) == prefix:  # claimed between the two questions
            if before is None:
                self.store.remove(commit_of(step))
            else:
                self.store.put(commit_of(step), before)

    def _owns(self) -> bool:
        """Whether nobody else has claimed the URL meanwhile; from then on nothing is copied."""
        owner = self.store.get(OWNER)
        if owner is None or self._token.encode() not in owner:
            self._lost = True
            logger.warning(
                "%s belongs to another run by now, which has claimed it: nothing more is copied there", self.store
            )
        return not self._lost

    def _remove(self, step: int) -> None:
        """Delete a copy: first what commits it, then its files."""
        prefix = self._prefix_of(step)
        self.store.remove(commit_of(step))
        self._remove_files(prefix)

    def _remove_files(self, prefix: str | None) -> None:
        for key in self.store.keys(prefix) if prefix else ():
            self.store.remove(key)

    def _copies(self) -> dict[int, Manifest]:
        found = {}
        for step in self.steps:
            try:
                found[step] = self._copy_of(step).said
            except DamagedCheckpoint:
                found[step] = Manifest()
        return found

    def _prefix_of(self, step: int) -> str | None:
        try:
            return self._copy_of(step).prefix
        except DamagedCheckpoint:
            return None

    def _copy_of(self, step: int) -> Copy:
        key = commit_of(step)
        return Copy.parse(f"{self.store}/{key}", self.store.get(key))

    def _write(self, key: str, path: Path) -> None:
        content = self.store.get(key)
        if content is None:
            raise DamagedCheckpoint(f"{self.store}/{key} is missing")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sync(path)
