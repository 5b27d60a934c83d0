"""The locations of checkpoints: a folder, a URL, or a folder with copies at a URL."""

import errno
import hashlib
import json
import os
import re
import threading
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from axonml_jax.base import logger
from axonml_jax.checkpoint.format import (
    ABANDONED,
    NAME,
    SAVED_AT,
    SAVING,
    DamagedCheckpoint,
    Manifest,
    Team,
    checkpoints_in,
    damage,
    decide_at_length,
    manifests_in,
    name_of,
    path_of,
    require_plain,
    step_number,
    sync,
)
from axonml_jax.checkpoint.object_store import ObjectStore, lie_apart, may_pass
from axonml_jax.checkpoint.ownership import OWNER, FolderInUse, Ownership, in_use
from axonml_jax.checkpoint.retention import Retention, best_of
from axonml_jax.checkpoint.saving import WENT_BACK, candidates, put_in_place, record_of, remove

# --------------------------------------------------------------------------------------------------
# Checkpoints without a copy, because a process was killed or the store did not answer: which of them are copied.
# --------------------------------------------------------------------------------------------------


def uncopied(here: Mapping[int, Manifest], there: Mapping[int, Manifest], rules: Retention) -> list[int]:
    """The steps to copy, newest first: those that the rules keep and that have no copy of the same save.

    >>> saved = lambda *steps: {step: Manifest(about={"saved_at": float(step)}) for step in steps}
    >>> uncopied(saved(2, 4, 5, 6), saved(1, 3, 5), Retention(keep=2, every=2))
    [6, 4, 2]

    Args:
      here: what the checkpoints say, by step.
      there: what their copies say.
      rules: for both.
    """
    gone = rules.deletes_of(lambda: {**there, **here})
    alike = {step for step in here if step in there and here[step].saved_at == there[step].saved_at}
    return [step for step in sorted(here, reverse=True) if step not in gone and step not in alike]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint exists and all its files match its manifest; logs what is wrong."""
    try:
        manifest = Manifest.read(folder)
        lines = damage(folder, manifest, manifest.files)
    except (OSError, ValueError) as error:
        lines = [str(error)]
    if lines:
        logger.warning("%s has no copy, and is not copied: %s", folder, "; ".join(lines))
    return not lines


# --------------------------------------------------------------------------------------------------
# The object that makes a copy one, and the id of a run, which its copies bear and its folder of checkpoints keeps.
# --------------------------------------------------------------------------------------------------

COMMIT = re.compile(r"step_(\d{8,})\.commit")
"""The object's name."""

PREFIX = re.compile(r"step_\d{8,}\.[0-9a-f]{32}/")
"""What the names of a step's files begin with."""

_ANY_PREFIX = re.compile(r"[^/]+\.[0-9a-f]{32}/")

RUN = "run_id.txt"
"""The file, in a folder of checkpoints, with the run's id."""


class Copy(NamedTuple):
    """The content of the object that commits a copy of a checkpoint.

    Attributes:
      prefix: of its files.
      run: the id of the run whose copy it is.
      folder: where that run keeps its checkpoints, for people.
      said: its metrics and time.
    """

    prefix: str
    run: str
    folder: str
    said: Manifest

    @staticmethod
    def parse(name: str, content: bytes | None) -> "Copy":
        """Parse the content of a committing object.

        Raises:
          DamagedCheckpoint: when there is none, or it is not what was written.
        """
        try:
            found = json.loads(content or b"")
            if not _ANY_PREFIX.fullmatch(found["prefix"]):
                raise ValueError(found["prefix"])
            metrics = {name: float(value) for name, value in found["metrics"].items()}
            said = Manifest(metrics=metrics, about={SAVED_AT: found[SAVED_AT]})
            return Copy(found["prefix"], str(found["run"]), str(found["folder"]), said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{name} is {'missing' if content is None else 'damaged'}") from error

    def text(self) -> bytes:
        """The content of the committing object."""
        content = {"prefix": self.prefix, "run": self.run, "folder": self.folder}
        return json.dumps(content | {"metrics": self.said.metrics, SAVED_AT: self.said.saved_at}).encode()


def commit_of(name: int | str) -> str:
    """The name of the object that commits a copy, from its step or another name."""
    return f"{name if isinstance(name, str) else name_of(name)}.commit"


def run_in(folder: Path) -> str | None:
    """The id of the run whose checkpoints are in a folder; None before its first copy."""
    path = folder / RUN
    return path.read_text("utf-8").strip() if path.is_file() else None


def take_id(folder: Path, run: str) -> str:
    """Store a run's id in its folder, before anything is known by it."""
    new = folder / (RUN + SAVING)
    new.write_text(run, encoding="utf-8")
    sync(new)
    new.replace(folder / RUN)
    return run


# --------------------------------------------------------------------------------------------------
# Checkpoints under a URL, each whole or not there, which other machines read.
#
# An object store renames nothing, so a checkpoint there is committed by one object that is written last:
# `step_00000100.commit` says under which prefix its files are. Files that no such object names are no checkpoint.
# --------------------------------------------------------------------------------------------------

CLAIM = "mirror.json"
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
        """The metrics and time of every copy, by step; an empty manifest where its commit cannot be read."""
        found = {}
        for step in self.steps:
            try:
                found[step] = self.copy_of(commit_of(step)).said
            except DamagedCheckpoint:
                found[step] = Manifest()
        return found

    def copy_of(self, commit: str) -> Copy:
        """Read the copy that an object commits.

        Raises:
          DamagedCheckpoint: when there is none, or it is not what was written.
        """
        return Copy.parse(f"{self.store}/{commit}", self.store.get(commit))

    def claim(self) -> None:
        """Become the owner of the URL, and remove leftovers of killed processes: files that belong to no copy."""
        if self._claimed:
            return
        self.store.put(CLAIM, json.dumps({"token": self._token, "pid": os.getpid()}).encode())
        keys = self.store.keys("step_")
        named = {prefix for key in keys if key.endswith(commit_of("")) and (prefix := self._prefix_of(key))}
        for key in keys:
            if PREFIX.match(key) and not key.startswith(tuple(named)):
                self.store.remove(key)
        self._claimed = True

    def put(self, folder: Path, name: str, run: str, origin: str) -> bool:
        """Upload a checkpoint; on any failure, uploaded files that are not committed are removed.

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

    def abandon_from(self, step: int) -> None:
        """Set copies of this and later steps aside, as `saving.abandon_from` does: other objects commit them from now on."""
        left = [each for each in self.steps if each >= step]
        if not left or not self._owns():
            return
        logger.warning(WENT_BACK, self.store, step, left, ABANDONED)
        for each in left:
            commit, aside = commit_of(each), commit_of(name_of(each) + ABANDONED)
            replaced = self._prefix_of(aside)
            if not self._committed(aside, self.store.get(commit) or b""):
                return
            self.store.remove(commit)
            if replaced != self._prefix_of(aside):  # the same where it was cut off before
                self._remove_files(replaced)

    def prune(self, spared: list[int]) -> None:
        """Delete the copies that no rule keeps: first the committing object, then the files."""
        for step in () if self.lost else self._rules.deletes_of(self.said, spared):
            prefix = self._prefix_of(commit_of(step))
            self.store.remove(commit_of(step))
            self._remove_files(prefix)

    def fetch(self, name: str, folder: Path, *, keep_id: bool = False) -> Copy:
        """Download a checkpoint to a folder, which appears atomically.

        Args:
          name: its own, under the URL.
          folder: the folder to be.
          keep_id: write the run's id beside it.

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
        replaced = self._prefix_of(commit)
        if self._committed(commit, Copy(prefix, run, origin, Manifest.read(folder)).text()):
            self._remove_files(replaced)
        return not self.lost

    def _committed(self, commit: str, said: bytes) -> bool:
        """Write the committing object; undone if another run has claimed the URL meanwhile."""
        before = self.store.get(commit)
        self.store.put(commit, said)
        if self._owns():
            return True
        if self.store.get(commit) == said:
            if before is None:
                self.store.remove(commit)
            else:
                self.store.put(commit, before)
        return False

    def _put_file(self, path: Path, key: str) -> None:
        content = path.read_bytes()
        self.store.put(key, content)
        if self._verify:
            back = self.store.get(key)
            if back is None or (len(back), zlib.crc32(back)) != (len(content), zlib.crc32(content)):
                found = "nothing" if back is None else f"{len(back)} other bytes"
                raise OSError(f"{self.store}/{key} was written, and the store gives {found} back: try another store")

    def _owns(self) -> bool:
        """Whether no other run has claimed the URL; once one has, nothing more is copied."""
        if not self._claimed:
            return True  # one checkpoint by itself, which no run owns
        owner = self.store.get(CLAIM)
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


# --------------------------------------------------------------------------------------------------
# The folder in which a checkpoint is made before it goes to an object store, or comes to when it is read from there.
# --------------------------------------------------------------------------------------------------

_FETCHED = "fetched_"


def staging_of(url: str, given: str | os.PathLike | None) -> Path:
    """The staging folder for a URL: the given one, or one in the user's cache folder, always the same.

    Args:
      url: of the checkpoints.
      given: a folder; None: `$XDG_CACHE_HOME/axonml_jax`, or `~/.cache/axonml_jax`.
    """
    if given is not None:
        return Path(given).absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    readable = re.sub(r"\W+", "-", url)[-40:].strip("-")
    return cache / "axonml_jax" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextmanager
def fetched(copies: Copies, name: str, staging: Path, team: Team) -> Iterator[Path]:
    """Context in which a store's checkpoint is available as a folder; all processes enter it.

    Raises:
      DamagedCheckpoint: naming every file that is not what was written.
      OSError: when the store does not give it, or a process does not see the folder.
    """
    folder = staging / team.decide("name a folder", lambda: f"{_FETCHED}{uuid4().hex}")
    owner = None
    try:
        if team.leads:
            owner = Ownership(record_of(folder), folder)  # kept from whoever tidies meanwhile
        decide_at_length(team, f"fetch from {copies.store}", lambda: copies.fetch(name, folder) and None)
        require_shared(folder, team)
        yield folder
    finally:
        if team.leads:
            remove_if_there(folder)
        if owner is not None:
            owner.release()


def require_shared(folder: Path, team: Team) -> None:
    """Check that all processes see a folder.

    Raises:
      OSError: naming those that do not.
    """
    seen = team.tell_all(f"look for {folder}", folder.is_dir())
    if blind := [process for process, sees in enumerate(seen) if not sees]:
        raise OSError(
            f"process(es) {blind} do not see {folder}, which process 0 has made: checkpoints pass through a folder that all "
            "processes share; name one with staging="
        )


def tidy_fetched(staging: Path) -> None:
    """Remove leftovers of readers that were killed."""
    for path in staging.glob(f"{_FETCHED}*"):
        if path.is_dir() and not in_use(record_of(path)):
            remove(path)


def remove_if_there(folder: Path) -> None:
    """Delete a folder, if it exists."""
    if folder.exists():
        remove(folder)


# --------------------------------------------------------------------------------------------------
# Copies of a run's committed checkpoints in an object store, made behind its back, from which another machine goes on.
# --------------------------------------------------------------------------------------------------


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
        """Steps whose checkpoints are being copied or will be: they must not be deleted."""
        with self._lock:
            return [job.step for job in (self._under_way, self._waiting) if job is not None]

    def refuse_others(self, copy: Copy | None) -> None:
        """Check that a copy is of the run whose checkpoints are in the folder; that is known only if it has any.

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
        """Start to copy a committed checkpoint, then delete the copies that no rule keeps.

        If the store is slower than the saves, the newest is copied next. A failure is logged, and the next one is tried.

        Args:
          folder: the checkpoint.
          step: its step.
        """
        with self._lock:
            self._waiting = _Job(folder, step)
            self._begin()

    def catch_up(self) -> None:
        """Start to copy the checkpoints that lack a copy and would be kept: newest first, and new ones before them."""
        if found := checkpoints_in(self._folder):
            with self._lock:
                self._claimed_with = found
                self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"copies to {self.store}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait until nothing is left to copy.

        Raises:
          OSError: when the newest checkpoint could not be copied.
        """
        if (thread := self._thread) is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise OSError(f"the newest checkpoint is not copied to {self.store}: {error}") from error

    def fetch(self, step: int) -> Path:
        """Download a copy into the folder of checkpoints, where it appears atomically.

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
                    if not job.late:
                        self.copies.abandon_from(job.step)
                    self.copies.put(job.folder, name_of(job.step), run, str(self._folder))
                    self.copies.prune(self.copying)
            except Exception as error:
                if self._error is None:
                    logger.warning("%s stays where it is, and the next one is copied: %s", job.folder, error)
                self._error = error if job.newest else self._error
            else:
                self._error = None if job.newest else self._error

    def _next(self) -> _Job | None:
        """The next copy to make: of the checkpoint committed last, else of an older one without a copy."""
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
        """Whether each of these checkpoints has a copy, and the newest one of the same save; needs two requests."""
        newest, there = max(found), self.copies.steps
        if not set(found) <= set(there):
            return False
        try:
            return self.copies.copy_of(commit_of(newest)).said.saved_at == Manifest.read(found[newest]).saved_at
        except (OSError, ValueError):  # damaged, or removed meanwhile
            return False

    def without_copy(self, found: dict[int, Path]) -> list[int]:
        """The checkpoints to copy, newest first; logs why, if that cannot be found out."""
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


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run in an object store: each is made in a folder beside the run, and counts when it is at the
# URL.
# --------------------------------------------------------------------------------------------------


class AtUrl:
    """Checkpoints at a URL, and the actions around saves and restores; a local folder holds what is not uploaded yet.

    Args:
      store: the URL.
      folder: where checkpoints are made before they are sent; all processes see it.
      rules: which stay.
      verify: read every file back from the store before a checkpoint counts.
      team: the processes; all of them call `offers` and `finish`.
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
        """`steps` as last seen, without asking a store that may not answer."""
        return self._known

    def said(self) -> dict[int, Manifest]:
        """The metrics and time of every checkpoint, by step."""
        return self.copies.said()

    def name_of(self, step: int) -> str:
        """The name of a step's checkpoint, for messages."""
        return f"{self}/{name_of(step)}"

    def claimed(self) -> None:
        """In the main process, when the job has become the only writer: remove leftovers of readers."""
        tidy_fetched(self.folder)

    def placed(self, step: int) -> None:
        """In the main process: upload a new checkpoint, then older ones that wait and that the rules keep.

        Raises:
          OSError: when it is not at the URL. It stays in the folder, and goes with the next one.
        """
        try:
            self.copies.claim()
            self.copies.abandon_from(step)
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
        """In the main process, after `placed`: delete what no rule keeps."""
        self.copies.prune([newest])
        self._known = self.copies.steps

    def offers(
        self, step: int | str | None, metric: str | None, mode: str, claim: Callable[[], None]
    ) -> Generator[tuple[int, Path], None, None]:
        """Yield checkpoints to restore, best first, each as a folder until the next; all processes get the same.

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
            raise DamagedCheckpoint(f"no checkpoint at {self} is intact; the last one tried: {failed}")

    def finish(self, *, together: bool, only_restored: bool, claim: Callable[[], None]) -> None:
        """Upload what waits in the folder.

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
        """Whether checkpoints wait for their upload, and no living process will do it."""
        return not in_use(self.folder / OWNER) and bool(checkpoints_in(self.folder))

    def _candidates(self, step: int | str | None, metric: str | None, mode: str) -> list[tuple[int, bool]]:
        """Steps to try, in order, each with whether it waits in the folder."""
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
        """Upload checkpoints that wait since a failed save, and delete those already uploaded or kept by no rule."""
        for step, folder in reversed(checkpoints_in(self.folder).items()):
            if step == sent:
                continue
            if step in uncopied(manifests_in(self.folder), self.said(), self._rules) and is_whole(folder):
                self._send(step)
            elif folder.exists():
                remove(folder)


# --------------------------------------------------------------------------------------------------
# One checkpoint at a URL, by its own name: what `save` and `restore` do with a URL.
# --------------------------------------------------------------------------------------------------


@contextmanager
def read_from(url: str, team: Team) -> Iterator[Path]:
    """Context in which a URL's checkpoint is available as a folder; all processes enter it.

    Raises:
      FileNotFoundError: when there is none.
      DamagedCheckpoint: naming every file that is not what was written.
      OSError: when the store does not answer, after all tries.
    """
    copies, name = _split(url)
    team.decide(f"look at {url}", lambda: _require(copies, name, url))
    with fetched(copies, name, staging_of(str(copies.store), None), team) as folder:
        yield folder


def write_to(url: str, team: Team, write: Callable[[Path], None], *, replace: bool, verify: bool) -> None:
    """Make a checkpoint in a folder, and upload it; all processes call this.

    Args:
      url: its name is the last part.
      team: the processes.
      write: makes it, in all processes.
      replace: whether it may take the place of another.
      verify: read it back before it counts.

    Raises:
      FileExistsError: when there is one already and it may not be replaced.
      OSError: when the store does not take it, after all tries; nothing is left then.
    """
    copies, name = _split(url, verify=verify)
    if not replace:
        team.decide(f"look at {url}", lambda: _refuse(copies, name, url))
    folder = staging_of(str(copies.store), None) / team.decide("name a folder", lambda: f"sent_{uuid4().hex}")
    try:
        write(folder)
        decide_at_length(team, f"send to {url}", lambda: copies.put(folder, name, uuid4().hex, str(copies.store)))
    finally:
        if team.leads:
            remove_if_there(folder)


def _split(url: str, *, verify: bool = False) -> tuple[Copies, str]:
    parent, _, name = url.rstrip("/").rpartition("/")
    if not name or name.endswith(SAVING) or parent.endswith(":/"):
        raise ValueError(f"{url!r} names no checkpoint: give s3://bucket/path/name")
    return Copies(ObjectStore(parent, whole=True), Retention(keep=None), verify=verify), name


def _require(copies: Copies, name: str, url: str) -> None:
    if copies.store.get(commit_of(name)) is None:
        steps = copies.steps
        near = f"; there are steps {steps}" if steps else ""
        inside = Copies(ObjectStore(url), Retention(keep=None)).steps
        near = f"; the newest that is in it is {url.rstrip('/')}/step_{inside[-1]:08d}: give that" if inside else near
        raise FileNotFoundError(f"{url} is no checkpoint: {copies.store} has no object {commit_of(name)}{near}")


def _refuse(copies: Copies, name: str, url: str) -> None:
    if copies.store.get(commit_of(name)) is not None:
        raise FileExistsError(f"{url} exists already: choose another name, or replace it with replace=True")


# --------------------------------------------------------------------------------------------------
# What processes do together to bring back the copies that their folder of checkpoints lacks.
# --------------------------------------------------------------------------------------------------


def bring_back(
    mirror: Mirror | None,
    folder: Path,
    step: int | str | None,
    metric: str | None,
    mode: str,
    team: Team,
    claim: Callable[[], None],
) -> None:
    """Download the newest intact copy that is newer than all checkpoints here, or that of a step that is missing here.

    Args:
      mirror: the copies, which the main process reads; None: there are none.
      folder: of the checkpoints.
      step: which one is asked for; `"best"`: by the metric, among checkpoints and copies; None: the newest.
      metric: what the best is chosen by; None: by nothing.
      mode: `"min"` or `"max"`.
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
    missing, empty = decide_at_length(
        team, f"look at {mirror.store}", lambda: _missing(mirror, folder, step, metric, mode)
    )
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
        raise DamagedCheckpoint(
            f"no copy in {mirror.store} is intact, and {folder} has none; the last one tried: {failed}"
        )


def _missing(
    mirror: Mirror, folder: Path, step: int | str | None, metric: str | None, mode: str
) -> tuple[list[int], bool]:
    """Steps to fetch, best first, and whether no checkpoint here would serve."""
    mirror.refuse_others(mirror.copies.newest)
    here, there = checkpoints_in(folder), mirror.copies.steps
    if isinstance(step, int):
        return [step] if step in there and step not in here else [], step not in here
    # Where a process was killed between both, the folder has put aside what is still there.
    left = lambda each: path_of(folder, each).with_suffix(ABANDONED).exists()
    if step == "best" and metric is not None:
        copied = {each: said for each, said in mirror.copies.said().items() if not left(each)}
        best = best_of({**copied, **manifests_in(folder)}, metric, mode)
        return [best] if best is not None and best not in here else [], not here
    return [each for each in reversed(there) if each > max(here, default=-1) and not left(each)], not here


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run in a folder that all its processes share, with or without copies in an object store.
# --------------------------------------------------------------------------------------------------


class InFolder:
    """Checkpoints in a folder, and the actions around saves and restores.

    Args:
      folder: of the checkpoints.
      rules: which stay.
      mirror: copies of them; None: there are none.
      team: the processes; all of them call `offers` and `finish`.
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
        """The manifest of every checkpoint, by step."""
        return manifests_in(self.folder)

    def name_of(self, step: int) -> Path:
        """The name of a step's checkpoint, for messages."""
        return path_of(self.folder, step)

    def claimed(self) -> None:
        """In the main process, when the job has become the only writer: start to copy what has no copy."""
        if self.mirror is not None:
            self.mirror.catch_up()

    def committed(self, newest: int) -> None:
        """In the main process, after a commit: delete what no rule keeps, and copy the new checkpoint."""
        spared = (newest, *(self.mirror.copying if self.mirror else ()))
        for step in self._rules.deletes_of(self.said, spared):
            remove(path_of(self.folder, step))
        if self.mirror is not None:
            self.mirror.copy(path_of(self.folder, newest), newest)

    def offers(
        self, step: int | str | None, metric: str | None, mode: str, claim: Callable[[], None]
    ) -> Generator[tuple[int, Path], None, None]:
        """Yield checkpoints to restore, best first, including copies brought back; all processes get the same.

        Args:
          step: which one; `"best"`: by the metric; None: any.
          metric: what the best is chosen by; None: by nothing.
          mode: `"min"` or `"max"`.
          claim: called before anything is written.

        Raises:
          FileNotFoundError: when the one that is asked for is not there.
          DamagedCheckpoint, OSError, ValueError: see `bring_back`.
        """
        bring_back(self.mirror, self.folder, step, metric, mode, self._team, claim)
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
        """Whether a checkpoint here has no copy, and no living process will make one."""
        assert self.mirror is not None
        here = checkpoints_in(self.folder)
        if not here or in_use(self.folder / OWNER) or self.mirror.has_all(here):
            return False
        return bool(self.mirror.without_copy(here))


# --------------------------------------------------------------------------------------------------
# Where the checkpoints of a run are kept: in a folder, there and as copies at a URL, or at a URL.
# --------------------------------------------------------------------------------------------------

Place = InFolder | AtUrl


def place_of(
    given: str | os.PathLike,
    rules: Retention,
    team: Team,
    *,
    mirror: str | None,
    staging: str | os.PathLike | None,
    verify: bool,
) -> Place:
    """The place for a folder or a URL.

    Args:
      given: the folder, or the URL.
      rules: which checkpoints stay there.
      team: the processes.
      mirror: a URL for copies of a folder's.
      staging: of a URL: the folder in which checkpoints are made.
      verify: read back what is sent.

    Raises:
      ValueError: for a folder that is a file, an option that the place does not have, and one place within the other.
    """
    if is_url(given):
        url = os.fspath(given)
        if mirror is not None:
            raise ValueError(f"mirror={mirror!r} copies a folder of checkpoints, and {url} is a URL: leave mirror out")
        store, folder = ObjectStore(url), staging_of(url, staging)
        require_plain(folder)
        lie_apart(store, folder, f"{url} and {folder}, where checkpoints are made", "give another staging=")
        return AtUrl(store, folder, rules, verify=verify, team=team)
    folder = Path(given)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={os.fspath(folder)!r} is no folder: give one, or a name that is free")
    if staging is not None:
        raise ValueError(
            f"staging={os.fspath(staging)!r} is for checkpoints at a URL, and {folder} is a folder: leave it out"
        )
    folder = folder.absolute()
    require_plain(folder)
    copies = None if mirror is None else Mirror(ObjectStore(mirror), folder, rules, verify=verify)
    return InFolder(folder, rules, copies, team)


def is_url(given: str | os.PathLike) -> bool:
    """Whether a path is a URL.

    >>> is_url("s3://bucket/run"), is_url("run/checkpoints")
    (True, False)

    Raises:
      ValueError: for a URL that was made a `pathlib.Path`, which keeps one of its two slashes and would be a folder here.
    """
    text = os.fspath(given)
    if not isinstance(given, str) and re.match(r"(s3|gs|file):/", text):
        raise ValueError(f"{given!r} has lost a slash of its URL, as every Path does: give the URL as text")
    return "://" in text
