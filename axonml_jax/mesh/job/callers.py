"""Whoever calls at a listening socket: those who say one line of this job's are heard, all others ignored and told of.

Nothing here waits: a caller that is silent, sends half a line, or sends without end holds up nobody else.
"""

import errno
import logging
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from axonml_jax.mesh.job.sealed import TOKEN, Talk

PATIENCE = 30.0
"""Seconds that a caller has for its line."""

_LONGEST = 2**12
_MOST = 256
_TOLD = 5
_logger = logging.getLogger("axonml_jax")


@dataclass
class _Visit:
    """A caller that has not said its line yet."""

    talk: Talk
    part: bytes = b""
    greeted: bool = False
    since: float = field(default_factory=time.monotonic)


class Callers:
    """The callers of a listening socket; close it when enough were heard.

    Args:
      server: the socket; it becomes non-blocking.
      token: the job's.
      subject: what is talked about.
      expected: whether a message is one of this job's.
    """

    def __init__(self, server: socket.socket, token: bytes, subject: str, expected: Callable[[dict], bool]):
        server.setblocking(False)
        self._server = server
        self._token = token
        self._subject = subject
        self._expected = expected
        self._visits: dict[socket.socket, _Visit] = {}
        self._ignored = 0

    def sources(self) -> list[socket.socket]:
        """What to select on."""
        return [self._server, *self._visits]

    def pump(self) -> list[tuple[socket.socket, Talk, dict]]:
        """Who has said its line since the last call, how to go on talking to it, and what it said; the caller hangs up."""
        self._accept()
        heard = []
        for caller in readable(self._visits, 0):
            visit = self._visits[caller]
            try:
                chunk = caller.recv(_LONGEST)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            visit.part += chunk
            if (line := _line(visit)) is not None:
                message = visit.talk.opened(line) if visit.greeted else None
                if message is not None and self._expected(message):
                    del self._visits[caller]
                    heard.append((caller, visit.talk, message))
                    continue
            if line is not None or not chunk or len(visit.part) > _LONGEST:
                self._ignore(caller)
        for caller in [each for each, visit in self._visits.items() if time.monotonic() - visit.since > PATIENCE]:
            self._ignore(caller)
        return heard

    def close(self) -> None:
        """Hang up on everybody who was not heard."""
        for caller in self._visits:
            caller.close()
        self._visits.clear()

    def _accept(self) -> None:
        most = _room()
        for _ in range(_MOST):  # a flood must not keep this from anything else
            try:
                caller, _ = self._server.accept()
            except OSError as error:  # nobody more, one that has gone already, or this process can open no more files
                full = error.errno in (
                    errno.EMFILE,
                    errno.ENFILE,
                )  # found out before it is seen whether anybody has called
                if full and self._visits and readable([self._server], 0):
                    self._ignore(next(iter(self._visits)))
                    continue
                return
            caller.setblocking(False)
            if len(self._visits) >= most:
                self._ignore(next(iter(self._visits)))
            self._visits[caller] = visit = _Visit(Talk(self._token, self._subject, calls=False))
            try:
                caller.send(visit.talk.greeting)  # a new connection has room for it
            except OSError:
                self._ignore(caller)

    def _ignore(self, caller: socket.socket) -> None:
        visit = self._visits.pop(caller)
        self._ignored += 1
        if self._ignored <= _TOLD:
            why = (
                f"what it said does not carry the seal of {TOKEN}"
                if (visit.part or visit.greeted) and self._token
                else "it is none of this job's"
            )
            _logger.warning("ignored a caller at %s: %s%s", _peer(caller), why, _last(self._ignored))
        caller.close()


def readable(sources: Iterable[Any], timeout: float) -> list[Any]:
    """Those of some sockets that have something to read, once one has; of a thousand machines too, unlike `select.select`."""
    with selectors.PollSelector() as selector:  # opens no file, which must work when no more can be opened
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


def _room() -> int:
    """How many callers may be on the line at once: a quarter of the files that this process may open at most."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else max(1, min(_MOST, limit // 4))


def _line(visit: _Visit) -> bytes | None:
    """The caller's line after its greeting, or in the place of it, when it is there."""
    while b"\n" in visit.part:
        line, _, visit.part = visit.part.partition(b"\n")
        if visit.greeted or not visit.talk.greeted(line):
            return line
        visit.greeted = True
    return None


def _peer(caller: socket.socket) -> str:
    try:
        host, port, *_ = caller.getpeername()
    except OSError:
        return "an address that is gone"
    return f"{host}:{port}"


def _last(ignored: int) -> str:
    return "; further ones are ignored without a word" if ignored == _TOLD else ""
