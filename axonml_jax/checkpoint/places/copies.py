"""Checkpoints under a URL, each whole or not there, which other machines read.

An object store renames nothing, so a checkpoint there is committed by one object that is written last: `step_00000100.commit`
says under which prefix its files are. Files that no such object names are no checkpoint.
"""

import json
import os
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from axonml_jax.checkpoint.keeping.retention import Retention
from axonml_jax.checkpoint.manifest import NAME, DamagedCheckpoint, Manifest, damage, sync
from axonml_jax.checkpoint.names import SAVING
from axonml_jax.checkpoint.places.copy_commit import COMMIT, PREFIX, Copy, commit_of, take_id
from axonml_jax.checkpoint.places.object_store import ObjectStore
from axonml_jax.checkpoint.saving import put_in_place, remove
from axonml_jax.logging import logger

OWNER = "mirror.json"
"""The object that says whose checkpoints these are: the last run's that has claimed them."""

_AT_ONCE = 4  # files under way; each is in memory meanwhile


class Copies:
    """The checkpoints under one URL, for the main process of the run that writes them.

    Two runs under one URL tear none: each writes under prefixes of its own. The last one to claim it owns it, and the other
    finds that out before it commits, or right after, and withdraws what it has committed then.

    Args:
      store: where.
      rules: which stay when another is put there.
      verify: read every file back before it is committed.

    Attributes:
      lost: whether another run has claimed the URL; from then on nothing is written.
    """

    def __init__(self, store: ObjectStore, rules: Retention, *, verify: bool = False):
        self.store, self._rules, self._verify, self._token = store, rules, verify, uuid.uuid4().hex
        self.lost, self._claimed = False, False
        self._begun: set[str] = set()  # prefixes that may be of no copy

    @property
    def steps(self) -> list[int]:
        """Steps with a copy, in order."""
        return sorted(int(found[1]) for key in self.store.keys("step_") if (found := COMMIT.fullmatch(key)))

    @property
    def newest(self) -> Copy | None:
        """The newest copy whose commit can be read."""
        for step in reversed(self.steps):
            with suppress(DamagedCheckpoint):
                return self.copy_of(commit_of(step))
        return None

    def said(self) -> dict[int, Manifest]:
        """What every copy says of its metrics and time, by step; one whose commit cannot be read says nothing."""
        found = {}
        for step in self.steps:
            try:
                found[step] = self.copy_of(commit_of(step)).said
            except DamagedCheckpoint:
                found[step] = Manifest()
        return found

    def copy_of(self, commit: str) -> Copy:
        """The copy that an object commits.

        Raises:
          DamagedCheckpoint: when there is none, or it is not what was written.
        """
        return Copy.parse(f"{self.store}/{commit}", self.store.get(commit))

    def claim(self) -> None:
        """Become the owner, and remove what killed processes have left: files that belong to no copy."""
        if self._claimed:
            return
        self.store.put(OWNER, json.dumps({"token": self._token, "pid": os.getpid()}).encode())
        named = {prefix for step in self.steps if (prefix := self._prefix_of(commit_of(step)))}
        for key in self.store.keys("step_"):
            if PREFIX.match(key) and not key.startswith(tuple(named)):
                self.store.remove(key)
        self._claimed = True

    def put(self, folder: Path, name: str, run: str, origin: str) -> bool:
        """Copy a checkpoint; what is begun and not committed goes again, whatever the reason.

        Args:
          folder: the checkpoint.
          name: its own, under the URL.
          run: the id of its run.
          origin: where that keeps its checkpoints, for people.

        Returns:
          Whether it is there now; False: the URL is another run's.

        Raises:
          OSError: when the store does not take it, after all tries, or gives something else back.
        """
        if self.lost:
            return False
        prefix = f"{name}.{uuid.uuid4().hex}/"
        self._begun.add(prefix)
        try:
            return self._put(folder, prefix, commit_of(name), run, origin)
        finally:
            with suppress(OSError):  # tried again after the next
                for each in list(self._begun):
                    if self._prefix_of(commit_of(each.rpartition(".")[0])) != each:
                        self._remove_files(each)
                    self._begun.remove(each)

    def prune(self, spared: list[int]) -> None:
        """Delete the copies that no rule keeps: of each first what commits it, then its files."""
        for step in () if self.lost else self._rules.deletes_of(self.said, spared):
            prefix = self._prefix_of(commit_of(step))
            self.store.remove(commit_of(step))
            self._remove_files(prefix)

    def fetch(self, name: str, folder: Path, *, keep_id: bool = False) -> Copy:
        """Bring a checkpoint back as a folder, which appears whole or not at all.

        Args:
          name: its own, under the URL.
          folder: it.
          keep_id: keep the run's id beside it.

        Raises:
          DamagedCheckpoint: naming every file that is not what was written.
          OSError: when the store does not give it, after all tries, or the folder cannot be written.
        """
        copy = self.copy_of(commit_of(name))
        prefix, unfinished = copy.prefix, folder.with_name(folder.name + SAVING)
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
            if keep_id:
                take_id(folder.parent, copy.run)
            put_in_place(unfinished, folder)
        except BaseException:
            remove(unfinished)
            raise
        return copy

    def _put(self, folder: Path, prefix: str, commit: str, run: str, origin: str) -> bool:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda path: self._put_file(path, f"{prefix}{path.relative_to(folder).as_posix()}"), paths))
        if not self._owns():
            return False
        before = self.store.get(commit)
        replaced = self._prefix_of(commit)
        self.store.put(commit, Copy(prefix, run, origin, Manifest.read(folder)).text())
        if self._owns():
            self._remove_files(replaced)
        elif self._prefix_of(commit) == prefix:  # claimed between the two questions
            if before is None:
                self.store.remove(commit)
            else:
                self.store.put(commit, before)
        return not self.lost

    def _put_file(self, path: Path, key: str) -> None:
        content = path.read_bytes()
        self.store.put(key, content)
        if self._verify:
            back = self.store.get(key)
            if back is None or (len(back), zlib.crc32(back)) != (len(content), zlib.crc32(content)):
                found = "nothing" if back is None else f"{len(back)} other bytes"
                raise OSError(f"{self.store}/{key} was written, and the store gives {found} back: try another store")

    def _owns(self) -> bool:
        """Whether nobody else has claimed the URL meanwhile; from then on nothing is copied."""
        if not self._claimed:
            return True  # one checkpoint by itself, which no run owns
        owner = self.store.get(OWNER)
        if owner is None or self._token.encode() not in owner:
            self.lost = True
            logger.warning(
                "%s belongs to another run by now, which has claimed it: nothing more is copied there", self.store
            )
        return not self.lost

    def _remove_files(self, prefix: str | None) -> None:
        for key in self.store.keys(prefix) if prefix else ():
            self.store.remove(key)

    def _prefix_of(self, commit: str) -> str | None:
        try:
            return self.copy_of(commit).prefix
        except DamagedCheckpoint:
            return None

    def _write(self, key: str, path: Path) -> None:
        content = self.store.get(key)
        if content is None:
            raise DamagedCheckpoint(f"{self.store}/{key} is missing")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sync(path)
