"""Who writes a folder, as a record on disk says it, and whether that process still lives."""

import json
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

_ENDED = "ZX"  # a zombie waits for its parent, and does nothing any more


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that writes a folder.

    Attributes:
      host: the name of its machine, for people.
      pid: its number there.
      since: when it took the folder, by its own clock, for people.
      machine: the boot and the namespace of processes within which `pid` and `started` mean something.
      started: when the process started, as its kernel counts; with `pid` it means one process for ever. None: unknown.
      token: of this claim; a process may make several.
      beats: heartbeats so far.
    """

    host: str
    pid: int
    since: str
    machine: str
    started: str | None
    token: str
    beats: int = 0

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
        )

    @staticmethod
    def parse(text: str) -> "Owner":
        """The owner that a record names; of one that cannot be read nothing is known, also not that its process has ended."""
        try:
            content = json.loads(text)
            found = Owner(**{field.name: content[field.name] for field in fields(Owner)})
            return found if 0 < found.pid < 2**31 else _UNREADABLE
        except (ValueError, KeyError, TypeError, RecursionError):
            return _UNREADABLE

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def text(self) -> str:
        """The record."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def lives(self) -> bool | None:
        """Whether its process lives; None where that cannot be seen from here: on another machine, in another container."""
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
    """A container has processes of its own, on a machine of the same name maybe; a machine that starts again has others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc (macOS)
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _start_of(pid: int) -> str | None:
    """When a process started; None where the system does not say.

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
