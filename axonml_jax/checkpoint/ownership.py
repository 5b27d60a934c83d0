"""Ownership of a folder of checkpoints: one process may write at a time."""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from axonml_jax.base import logger
from axonml_jax.mesh.environment import RUN_ID
from axonml_jax.mesh.join import in_a_job

# --------------------------------------------------------------------------------------------------
# Who writes a folder, as a record on disk says it, and whether that process still lives.
# --------------------------------------------------------------------------------------------------

_ENDED = "ZX"  # a zombie waits for its parent, and does nothing any more


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that owns a folder, as its record describes it.

    Attributes:
      host: the name of its machine, for people.
      pid: its number there.
      since: when it took the folder, by its own clock, for people.
      machine: the boot and the namespace of processes within which `pid` and `started` mean something.
      started: when the process started, as its kernel counts; with `pid` it means one process for ever. None: unknown.
      token: of this claim; a process may make several.
      beats: heartbeats so far.
      launch: the id of the `axonml-jax launch` that started it; empty: none did. Older records lack this field.
    """

    host: str
    pid: int
    since: str
    machine: str
    started: str | None
    token: str
    beats: int = 0
    launch: str = ""

    @staticmethod
    def this_process() -> "Owner":
        """A new claim of this process."""
        since = datetime.now(UTC).astimezone().isoformat(" ", "seconds")
        return Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=since,
            machine=_machine(),
            started=_start_of(os.getpid()),
            token=uuid.uuid4().hex,
            launch=os.environ.get(RUN_ID, ""),
        )

    @staticmethod
    def parse(text: str) -> "Owner":
        """Parse an owner's record; an unreadable one gives an owner that is not known to have ended."""
        try:
            content = {"launch": "", **json.loads(text)}
            found = Owner(**{field.name: content[field.name] for field in fields(Owner)})
            return found if 0 < found.pid < 2**31 else _UNREADABLE
        except (ValueError, KeyError, TypeError, RecursionError):
            return _UNREADABLE

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def text(self) -> str:
        """The text of the record."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def lives(self) -> bool | None:
        """Whether the process is alive; None if that cannot be seen from this machine or container."""
        if self.machine != _machine():
            return None
        if self.pid == os.getpid():
            return True
        try:
            started = _start_of(self.pid)
        except ProcessLookupError:
            return False
        return None if None in (started, self.started) else started == self.started


_UNREADABLE = Owner(host="an unknown machine", pid=0, since="an unknown time", machine="", started=None, token="")


def _machine() -> str:
    """An id of this machine, container and boot: process ids are comparable only within one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc (macOS)
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _start_of(pid: int) -> str | None:
    """The start time of a process; None if the system does not tell it.

    Raises:
      ProcessLookupError: when it has ended.
    """
    try:
        # The command's name, in parentheses, may itself contain spaces and parentheses.
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        with suppress(PermissionError):
            os.kill(pid, 0)  # only asks; /proc may hide what other users run
        return None
    if status[0] in _ENDED:
        raise ProcessLookupError(pid)
    return status[19]


# --------------------------------------------------------------------------------------------------
# One folder has one writer: claimed before the first write, kept by a heartbeat, taken over from a process that is
# gone.
#
# Clocks of machines differ, so no time on disk is ever compared with one here. A process on this machine is looked up;
# one on another is watched: a heartbeat that does not change for `QUIET` seconds of this process's own clock has
# stopped.
# --------------------------------------------------------------------------------------------------

OWNER = "owner.json"
"""The record, in the folder that is owned; of a single checkpoint beside it, with its name in front."""

BEAT = 5.0
"""Seconds between two heartbeats."""

QUIET = 60.0
"""Seconds without a heartbeat after which an owner that cannot be looked up is taken for dead."""

_POLL = 0.5
_PATIENCE = 30.0  # a record is locked for as long as it takes to read and to write a few hundred bytes
_SETTLE = 1.0
_TRIES = 1000  # /proc has folders in which no file is ever found
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[str] = set()


class FolderInUse(ValueError):
    """Raised when another process writes the folder."""


class Ownership:
    """The sole right to write something, until `release`, the end of this object, or the end of the process.

    Args:
      record: the file that says so; its folder is made when it is not there.
      what: what is owned, for messages.

    Raises:
      FolderInUse: naming the owner, when that lives.
      OSError: when the record cannot be written.
    """

    def __init__(self, record: Path, what: Path):
        self.record, self._what, self._me = record, what, Owner.this_process()
        made = not record.parent.exists()
        _held.add(self._me.token)
        try:
            self._claim()
        except BaseException:
            _held.discard(self._me.token)
            raise
        stop = threading.Event()
        threading.Thread(
            target=_beat, args=(record, self._me.token, stop), name=f"owner of {what}", daemon=True
        ).start()
        self.release = weakref.finalize(self, _release, record, self._me, stop, made)

    def check(self) -> None:
        """Verify that this process is still the owner; call it before every change.

        Raises:
          FolderInUse: when another one has taken over meanwhile.
        """
        with _locked(self.record, make=True) as (handle, _):
            text = _read(handle)
            found = Owner.parse(text) if text else self._me
            if found.token == self._me.token and self._me.pid == os.getpid():
                if not text:  # somebody has removed the record
                    _write(handle, self._me.text())
                return
        raise FolderInUse(
            f"{self._what} belongs to {found} by now: this process has lost it and writes nothing more there"
        )

    def _claim(self) -> None:
        watched, deadline = None, 0.0
        while True:
            with _locked(self.record, make=True) as (handle, sure):
                text = _read(handle)
                if watched is not None and text not in ("", watched):
                    raise _refused(self._what, Owner.parse(text))
                why = _why_free(text, self._what, watched is not None and time.monotonic() >= deadline)
                if why is not None:
                    _write(handle, self._me.text())
            if why is not None and (sure or self._is_settled()):
                if why:
                    logger.warning("%s belonged to %s; %s: taken over", self._what, Owner.parse(text), why)
                return
            if why is None and watched is None:
                watched, deadline = text, time.monotonic() + QUIET
                logger.warning(
                    "%s belongs to %s, which cannot be looked up from here: its heartbeat is watched for up to %g s",
                    *(self._what, Owner.parse(text), QUIET),
                )
            time.sleep(_POLL)

    def _is_settled(self) -> bool:
        """Without file locks two processes may write the record at once: the one that is in it afterwards owns it."""
        time.sleep(_SETTLE)
        with _locked(self.record) as (handle, _):
            return Owner.parse(_read(handle)).token == self._me.token


def in_use(record: Path) -> bool:
    """Whether a record exists whose process may be alive, judged without waiting."""
    try:
        text = record.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    return bool(text) and Owner.parse(text).lives() is not False


def _why_free(text: str, what: Path, quiet: bool) -> str | None:
    """Why a folder may be taken over: empty if there was no owner, None if that is not certain yet.

    Raises:
      FolderInUse: when nobody may.
    """
    if not text:
        return ""
    owner = Owner.parse(text)
    lives = owner.lives()
    if lives and owner.pid == os.getpid() and owner.token not in _held:
        return "that process has ended"  # its number is this one's now; or os.exec has kept the number and forgotten the claim
    if lives:
        raise _refused(what, owner)
    if lives is False:
        return "that process has ended"
    return f"it has been quiet for {QUIET:g} s" if quiet else None


def _refused(what: Path, owner: Owner) -> FolderInUse:
    who = f"this process itself ({owner}), through another object" if owner.token in _held else f"{owner}"
    sibling = owner.launch and owner.launch == os.environ.get(RUN_ID) and owner.pid != os.getpid() and not in_a_job()
    alone = (
        ". Both are processes of one launch, and this one has not joined the others: call ax.init() in the script, so that "
        "they train and save together"
    )
    return FolderInUse(
        f"{what} is being written by {who}, and only one process may write there at a time: end that process, let it close "
        f"the folder, or write to another folder; reading is always possible{alone * bool(sibling)}"
    )


@contextmanager
def _locked(record: Path, make: bool = False) -> Iterator[tuple[int, bool]]:
    """Yield the open record, and whether the file system's lock keeps others out meanwhile.

    Raises:
      OSError: when it cannot be opened, or is always another one by the time it is open.
    """
    for attempt in range(_TRIES):
        if make:
            _make_parent(record.parent)
        try:
            handle = os.open(record, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * make, 0o666)
        except FileNotFoundError:
            if make and attempt < _TRIES - 1:
                continue  # an owner has just left, and taken the folder that it had made
            raise
        try:
            sure = _lock(handle, record)
            if _is_at(record, handle):
                yield handle, sure
                return
        finally:
            os.close(handle)  # and with it the lock
    raise OSError(f"{record} is replaced again and again by other processes")


def _make_parent(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        said = "a part of this path is a file, where a folder should be: choose another place"
        raise NotADirectoryError(errno.ENOTDIR, said, str(parent)) from error


def _lock(handle: int, record: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(f"{record} has been locked by another process for {_PATIENCE:g} s") from None
            time.sleep(0.01)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise


def _is_at(record: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(record), os.fstat(handle))
    except FileNotFoundError:
        return False


def _read(handle: int) -> str:
    return os.pread(handle, 1 << 16, 0).decode(errors="replace")


def _write(handle: int, text: str) -> None:
    content = text.encode()
    os.pwrite(handle, content, 0)
    os.ftruncate(handle, len(content))


def _beat(record: Path, token: str, stop: threading.Event) -> None:
    """Refresh the owner's heartbeat, until another process is the owner."""
    while not stop.wait(BEAT):
        # A record that somebody has removed is written anew by the next `check`.
        with suppress(OSError), _locked(record) as (handle, _):
            owner = Owner.parse(_read(handle))
            if owner.token != token:
                return
            _write(handle, replace(owner, beats=owner.beats + 1).text())


def _release(record: Path, me: Owner, stop: threading.Event, made: bool) -> None:
    """Remove the record, and its folder if it was made for it and is empty."""
    stop.set()
    if me.pid != os.getpid():
        return  # a fork of the owner, which goes on
    _held.discard(me.token)
    with suppress(OSError):
        # Without a lock: the garbage collector may call this anywhere, in the middle of a claim of the same record too.
        if Owner.parse(record.read_text(errors="replace")).token == me.token:
            record.unlink()
    if made:
        with suppress(OSError):
            record.parent.rmdir()
