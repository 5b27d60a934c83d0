"""Saving a checkpoint: staged, sealed, read back; which ones are kept, and how failed saves are handled."""

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonml_jax.base import logger
from axonml_jax.checkpoint import format as arrays
from axonml_jax.checkpoint.format import (
    ABANDONED,
    ARRAYS,
    DAMAGED,
    NAME,
    REPLACED,
    SAVING,
    DamagedCheckpoint,
    Manifest,
    Team,
    checkpoints_in,
    checksums,
    damage,
    describe,
    is_own_name,
    lost_in_save,
    manifests_in,
    rebuilt,
    sync,
)
from axonml_jax.checkpoint.ownership import OWNER, FolderInUse, Ownership, in_use
from axonml_jax.checkpoint.retention import best_of, require_count
from axonml_jax.compat.processes import coordinator_client
from axonml_jax.sharding.layout import Leaf

# --------------------------------------------------------------------------------------------------
# The checkpoints that a restore may take, in the order in which they are tried.
# --------------------------------------------------------------------------------------------------


def candidates(folder: Path, step: int | str | None, metric: str | None, mode: str) -> list[int]:
    """The steps to try: the one that is asked for, or all of a folder, newest first.

    Args:
      folder: the checkpoints'.
      step: which one; `"best"`: by the metric; None: any.
      metric: what the best is chosen by; None: by nothing.
      mode: `"min"` or `"max"`.

    Raises:
      FileNotFoundError: when the one that is asked for is not there.
      ValueError: when the best is asked for and there is no metric.
    """
    if step == "best":
        if metric is None:
            raise ValueError('step="best" needs a metric: CheckpointManager(..., best="valid_loss")')
        step = best_of(manifests_in(folder), metric, mode)
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {folder} has the metric {metric}")
    steps = list(checkpoints_in(folder))
    if step is None:
        return steps[::-1]
    if step not in steps:
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}; it has {steps}")
    return [int(step)]


# --------------------------------------------------------------------------------------------------
# Saves that fail while a run goes on: which causes may pass, how many in a row, and what is said of them.
# --------------------------------------------------------------------------------------------------

REMEDIES = {
    errno.ENOSPC: "delete something there, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: delete something of yours there, keep fewer checkpoints, or ask for more",
    errno.EROFS: "it is mounted read-only, often by the system after an error of the disk: read its log (dmesg), mount it anew",
    errno.EHOSTDOWN: "the object store is busy or cannot be reached: look at its state and at the network; until it answers, "
    "checkpoints wait in that folder",
    errno.EIO: "the disk, or the server that it is on, fails: read the system's log (dmesg), and save to another",
}
"""Causes that another try may find gone, and what to do against each."""


class Failures:
    """The saves that have failed, in all and since the last good one. All processes hear of the same ones.

    Args:
      folder: the checkpoints'.
      steps: those that are good, in order.
      most: that many in a row end the run; 1: the first does.

    Attributes:
      total: saves that failed and were passed over.
      in_a_row: of them those since the last good one.
    """

    def __init__(self, folder: Path, steps: Callable[[], Sequence[int]], most: int):
        require_count("max_failures", most, ": the first failure ends the run")
        self.total = self.in_a_row = 0
        self._folder, self._steps, self._most = folder, steps, most
        self._last: OSError | None = None
        self._said: set[int] = set()

    def fatal(self, error: BaseException | None) -> bool:
        """Whether there is an error that ends the run at once."""
        return error is not None and (self._most == 1 or cause_of(error) is None)

    def take(self, error: OSError, tell: bool) -> None:
        """Count a save that failed.

        Args:
          error: why.
          tell: whether this process warns, once for each cause until a save is good again.

        Raises:
          OSError: the error itself if its cause may not pass; if it is the last that is allowed in a row, one that adds the
            last good checkpoint, the free space and the remedy.
        """
        cause = cause_of(error)
        if cause is None:
            raise error
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if self.in_a_row >= self._most:
            self._last = None
            said = f"{self.in_a_row} saves in a row failed, the last: " * (self._most > 1)
            last = OSError(f"{said}{error}\n{self._state(cause)}")
            last.errno = cause
            raise last from error
        self._last = error
        if tell and cause not in self._said:
            logger.warning(
                "%s\n%s. The run goes on and saves at the next step that is due; %d failures in a row end it",
                *(error, self._state(cause), self._most),
            )
        self._said.add(cause)

    def passed(self, tell: bool) -> None:
        """Reset the count after a good save."""
        if self.in_a_row and tell:
            logger.warning("%s: saved again, after %d that failed", self._folder, self.in_a_row)
        self._last, self.in_a_row = None, 0
        self._said.clear()

    def tell(self) -> None:
        """Raise the error of the newest save if it failed: no later save could make up for it."""
        last, self._last = self._last, None
        if last is not None:
            raise last

    def _state(self, cause: int) -> str:
        """Describe the last good checkpoint, the free space and the remedy."""
        steps = self._steps()
        kept = f"the last good checkpoint is that of step {steps[-1]}" if steps else "there is no good checkpoint yet"
        return f"{kept}; {_room(self._folder)}: {REMEDIES[cause]}"


def cause_of(error: BaseException) -> int | None:
    """The errno of the error that made a save fail, if another try may succeed; else None.

    It is read from the text, which is the same in every process, and which TensorStore's errors have too.

    >>> cause_of(OSError(errno.ENOSPC, "No space left on device")) == errno.ENOSPC
    True
    >>> cause_of(ValueError("NOT_FOUND: Read-only file system [OS error 30: EROFS]")) == errno.EROFS
    True
    >>> cause_of(PermissionError(errno.EACCES, "Permission denied"))
    """
    text = str(error)
    return next((n for n in REMEDIES if os.strerror(n) in text or f"[Errno {n}]" in text), None)


def _room(folder: Path) -> str:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        usage = shutil.disk_usage(there)
    except OSError as error:
        return f"the file system of {folder} does not answer ({error.strerror})"
    return f"{usage.free:,} of {usage.total:,} bytes are free for {folder}"


# --------------------------------------------------------------------------------------------------
# A checkpoint that was just written is read again from its disk before it counts.
#
# Checksums are made of what the system gives back right after the write, which is its page cache. So they find what
# happens to files later, and not what the disk made of the write itself. That is what reading back finds.
# --------------------------------------------------------------------------------------------------

PAST_THE_CACHE = hasattr(os, "posix_fadvise")
"""Whether this system can be asked to forget what it keeps of a file (Linux; not macOS)."""


def read_back(folder: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint, read from disk, with its manifest.

    What it cannot find: what a disk's own cache, or a server behind a network's file system, answers without asking the
    medium, and what was wrong before it was written. A file system in memory (tmpfs) has no disk to ask.

    Args:
      folder: the checkpoint, under whatever name.
      manifest: what was written as its manifest.

    Raises:
      OSError: EIO, naming every file that is not what was written.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _forget(path)
    try:
        Manifest.read(folder)
        lines = [f"  {line}" for line in damage(folder, manifest, manifest.files)]
    except DamagedCheckpoint as error:
        lines = str(error).splitlines()[1:]
    if lines:
        said = f"{folder} was written, and its disk gives something else back: try another disk"
        raise OSError(errno.EIO, "\n".join([said, *lines]))


def _forget(path: Path) -> None:
    """Flush a file to disk, and drop it from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not on disk are not dropped
        if PAST_THE_CACHE:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------------
# One save: arrays copied to the host at once, written and committed behind the training's back.
# --------------------------------------------------------------------------------------------------

_numbers = itertools.count()
# The main process reads the whole checkpoint once or twice, and may send it to an object store, each request of which has a
# limit; its death ends the wait.
_AS_LONG_AS_IT_TAKES = 86_400.0
_ROOM_FILE, _ROOM = "room", 1 << 16  # bytes that must be free: less than the smallest checkpoint takes


class Saving:
    """A save under way; the folder gets its name by one rename, after everything else is on disk.

    Args:
      folder: the checkpoint to be.
      leaves: its arrays; they may be donated as soon as this returns.
      manifest: its manifest but for `files`, which are known when they are written.
      team: the processes that save it, all of them.
      saver: Orbax's checkpointer.
      replace: whether an existing checkpoint may be replaced.
      verify: read the files again, past the system's cache, before the checkpoint counts.
      owner: in the main process, the ownership of the folder of checkpoints; None: this save claims its own path alone.
      begun: runs in the main process before anything is written.
      placed: runs in the main process when the folder has its name, however long it takes; only then the checkpoint counts.
      committed: runs in the main process after that.

    Raises:
      FileExistsError: when there is one already and it may not be replaced, or what is there is no checkpoint.
      FolderInUse: when another process writes it.
      OSError: in every process, when the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        leaves: Mapping[str, Leaf],
        manifest: Manifest,
        team: Team,
        saver: Any,
        *,
        replace: bool = False,
        verify: bool = False,
        owner: Ownership | None = None,
        begun: Callable[[], None] | None = None,
        placed: Callable[[], None] | None = None,
        committed: Callable[[], None] | None = None,
    ):
        self.folder, self._team, self._saver, self._placed, self._committed = folder, team, saver, placed, committed
        self._manifest, self._key = manifest, f"axonml_jax/saved/{next(_numbers)}"
        self._unfinished = folder.with_name(folder.name + SAVING)
        self._owner, self._shared, self._verify = owner, owner is not None, verify
        self._error: BaseException | None = None
        self._told = False
        try:
            team.decide(f"save {folder}", lambda: self._make_room(replace, begun))
        except FileExistsError:
            raise
        except OSError as error:
            raise OSError(f"saving {folder} failed: {error}") from error
        seen = team.tell_all(f"save {folder}", self._unfinished.is_dir())
        if blind := [process for process, sees in enumerate(seen) if not sees]:
            self._abandon()
            raise OSError(
                f"cannot save {folder}: process(es) {blind} do not see the folder that process 0 has made; checkpoints need a "
                "file system that all processes share"
            )
        self._unstarted: Exception | None = None
        self._links, self._written_at = contextlib.ExitStack(), self._unfinished
        try:
            self._written_at = self._links.enter_context(arrays.plain_name(self._unfinished))
            arrays.start_writing(saver, self._written_at / ARRAYS, leaves)
        except (OSError, ValueError) as error:
            self._unstarted = error  # told in `wait`, by all processes alike
        except BaseException as error:
            self._links.close()
            self._abandon()
            if isinstance(error, Exception) and (known := lost_in_save(error)) is not error:
                raise OSError(f"saving {folder} failed: {known}") from error
            raise
        self._thread = threading.Thread(target=self._finish, name=f"checkpoint {folder.name}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this process has finished its part of the save."""
        return not self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """The error that made the save fail, once it is done; else None."""
        return self._error if self.done else None

    def wait(self) -> None:
        """Wait until the save is committed.

        Raises:
          OSError: when it could not be written; nothing of it is left then.
        """
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise OSError(f"saving {self.folder} failed: {error}") from error

    def _make_room(self, replace: bool, begun: Callable[[], None] | None) -> None:
        """In the main process, before anything is written: take ownership and check that the folder may be replaced."""
        if self._owner is None:
            self._owner = Ownership(record_of(self.folder), self.folder)
        try:
            self._owner.check()
            if os.path.lexists(self.folder) and not replace:
                raise FileExistsError(
                    f"{self.folder} exists already: choose another name, or replace it with replace=True"
                )
            for path in (self.folder, self.folder.with_name(self.folder.name + REPLACED)):
                if not _may_be_replaced(path):
                    raise FileExistsError(
                        f"{path} is no checkpoint (it has no {NAME}), and is not replaced: choose another name, or remove it"
                    )
            if begun is not None:
                begun()
            _make_empty(self._unfinished)
        except BaseException:
            self._let_go()
            raise

    def _finish(self) -> None:
        try:
            self._write()
            if self._team.leads:
                self._commit()
            self._hear_outcome()
        except BaseException as error:
            self._error = error
            self._abandon()
            with contextlib.suppress(Exception):  # the coordinator may be what has failed
                self._tell_outcome(error)
        else:
            self._let_go()
        finally:
            self._links.close()

    def _write(self) -> None:
        """Write this process's arrays and wait for all; if one process cannot, all raise the same error."""
        try:
            if self._unstarted is not None:
                raise self._unstarted
            self._saver.wait_until_finished()
        except Exception as raised:
            error = arrays.by_its_name(raised, self._written_at, self._unfinished)
            whole = self._team.not_written(error)
            if whole is raised:
                raise
            raise whole from raised

    def _commit(self) -> None:
        """In the main process, when all arrays of all processes are on disk: write the manifest and rename the folder."""
        error = None
        try:
            if lost := arrays.lacking(self._unfinished / ARRAYS, self._manifest.entries):
                raise OSError(f"what was written there lacks {', '.join(lost)}: save to another folder")
            manifest = dataclasses.replace(self._manifest, files=checksums(self._unfinished))
            manifest.write(self._unfinished)
            sync(self._unfinished)
            if self._verify:
                read_back(self._unfinished, manifest)
            self._check_owner()
            put_in_place(self._unfinished, self.folder)
            if self._placed is not None:
                self._placed()
        except Exception as raised:
            error = raised
        self._tell_outcome(error)
        if error:
            raise error
        # Let go of the manager, which holds this.
        committed, self._committed, self._placed = self._committed, None, None
        if committed:
            try:
                committed()
            except OSError as error:
                logger.warning(
                    "%s is saved, but older ones could not be deleted: %s; it is tried after the next",
                    self.folder,
                    error,
                )

    def _tell_outcome(self, error: BaseException | None) -> None:
        """In the main process: tell the others, who wait for it, how the save ended; once."""
        if self._team.leads and self._team.size > 1 and not self._told:
            self._told = True
            coordinator_client().key_value_set(self._key, ":".join(describe(error)) if error else "")

    def _hear_outcome(self) -> None:
        if not self._team.leads:
            try:
                said = coordinator_client().blocking_key_value_get(self._key, int(1000 * _AS_LONG_AS_IT_TAKES))
            except Exception as error:
                raise lost_in_save(error) from error
            if said:
                raise OSError(f"on process 0: {rebuilt(said.split(':', 1))}")

    def _check_owner(self) -> None:
        assert self._owner is not None
        self._owner.check()

    def _let_go(self) -> None:
        """Release the owner's record, unless a manager owns it."""
        if self._owner is not None and not self._shared:
            self._owner.release()

    def _abandon(self) -> None:
        """Remove the unfinished save, unless another process has taken the folder over."""
        if self._team.leads:
            with contextlib.suppress(FolderInUse, OSError):
                self._check_owner()
                shutil.rmtree(self._unfinished, ignore_errors=True)
        self._let_go()


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a finished checkpoint its name; a former one is kept until then, and found by `tidy` after a crash."""
    old = folder.with_name(folder.name + REPLACED)
    if os.path.lexists(folder):
        _delete(old)
        folder.rename(old)
    unfinished.rename(folder)
    sync(folder.parent)
    _delete(old)


def tidy(parent: Path) -> None:
    """Remove leftovers of killed processes from a folder of checkpoints, and undo an interrupted replacement.

    Only the folder's owner may; what another process is saving there by itself (`ax.save`) stays.
    """
    for path in _left_in(parent, REPLACED):
        whole = path.with_name(path.name.removesuffix(REPLACED))
        if whole.exists():
            remove(path)
        else:
            path.rename(whole)
    for path in _left_in(parent, SAVING):
        remove(path)
    for record in parent.glob("*." + OWNER):
        if not in_use(record):
            record.unlink()


def _left_in(parent: Path, ending: str) -> list[Path]:
    """Leftovers with this name ending, of a manager or a recorded `ax.save` whose process has ended."""
    found = []
    for path in parent.glob("*" + ending):
        whole = path.with_name(path.name.removesuffix(ending))
        own = is_own_name(whole.name) or (record_of(whole).exists() and _is_leftover(path))
        found += [path] * (own and not in_use(record_of(whole)))
    return found


def _may_be_replaced(path: Path) -> bool:
    """Whether a path can be replaced without loss: a checkpoint, a link (only it is removed), an empty folder or nothing."""
    if path.is_symlink() or not path.exists():
        return True
    return path.is_dir() and ((path / NAME).is_file() or not any(path.iterdir()))


def _is_leftover(folder: Path) -> bool:
    """Whether a folder contains nothing but what a save creates."""
    own = lambda name: name in (NAME, _ROOM_FILE) or name.startswith(ARRAYS)
    return _may_be_replaced(folder) or (folder.is_dir() and all(own(path.name) for path in folder.iterdir()))


def remove(folder: Path) -> None:
    """Delete a checkpoint; one that is half deleted when the process dies no longer counts as one."""
    doomed = folder if folder.name.endswith(SAVING) else folder.with_name(folder.name + SAVING)
    if doomed != folder:
        _delete(doomed)
        folder.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder with its contents; of a link only the link."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def take_over(parent: Path, damaged: list[Path]) -> Ownership:
    """Become the only writer of a folder of checkpoints, tidy it, and put damaged ones aside."""
    owner = Ownership(parent / OWNER, parent)
    try:
        tidy(parent)
        put_aside(damaged)
    except BaseException:
        owner.release()
        raise
    return owner


def put_aside(folders: list[Path], ending: str = DAMAGED) -> None:
    """Rename checkpoints that no longer count, to keep them for inspection; empties the list."""
    while folders:
        aside = folders[0].with_name(folders[0].name.removesuffix(REPLACED) + ending)
        if aside.exists():
            remove(aside)
        if folders[0].exists():
            folders[0].rename(aside)
        del folders[0]


def abandon_from(parent: Path, step: int) -> None:
    """Before a save at a step, set aside the checkpoints of this and later steps, from which the run went back.

    So the highest step of a folder is the one that was written last, whatever clocks say.
    """
    left = {each: path for each, path in checkpoints_in(parent).items() if each >= step}
    if left:
        logger.warning(WENT_BACK, parent, step, list(left), ABANDONED)
        put_aside(list(left.values()), ABANDONED)


WENT_BACK = (
    "%s: step %d is saved after the run went back, so the earlier checkpoints of this or later steps, %s, no longer count: "
    "they are kept with %s after their names"
)


def _make_empty(folder: Path) -> None:
    """Make a folder and write a little into it, so that a full disk fails before any process starts to write."""
    own = is_own_name(folder.name.removesuffix(SAVING)) or _is_leftover(folder)
    if folder.is_symlink() or folder.is_file() or not own:
        kind = "link" if folder.is_symlink() else "file" if folder.is_file() else "folder"
        raise OSError(f"{folder}, where it is made, is a {kind} of someone else: remove it, or choose another name")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with (folder / _ROOM_FILE).open("wb") as file:
            file.write(bytes(_ROOM))
            file.flush()
            os.fsync(file.fileno())
        (folder / _ROOM_FILE).unlink()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def record_of(folder: Path) -> Path:
    """The path of a checkpoint's owner record, beside it, because the folder itself is renamed in a save."""
    return folder.with_name(f"{folder.name}.{OWNER}")
