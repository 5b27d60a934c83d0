"""Whoever calls at a listening socket: those who say one line of this job's are heard, all others ignored and told of.

Nothing here waits: a caller that is silent, sends half a line, or sends without end holds up nobody else.
"""

import logging
import select
import socket
import time
from collections.abc import Callable

from axonml_jax.mesh.job.sealed import TOKEN, opened

PATIENCE = 30.0
"""Seconds that a caller has for its line."""

_LONGEST = 2**12
_MOST = 256
_TOLD = 5
_logger = logging.getLogger("axonml_jax")


class Callers:
    """The callers of a listening socket; close it when enough were heard.

    Args:
      server: the socket; it becomes non-blocking.
      token: the job's.
      expected: whether a message is one of this job's.
    """

    def __init__(self, server: socket.socket, token: bytes, expected: Callable[[dict], bool]):
        server.setblocking(False)
        self._server = server
        self._token = token
        self._expected = expected
        self._parts: dict[socket.socket, bytes] = {}
        self._since: dict[socket.socket, float] = {}
        self._ignored = 0

    def sources(self) -> list[socket.socket]:
        """What to select on."""
        return [self._server, *self._parts]

    def pump(self) -> list[tuple[socket.socket, dict]]:
        """Who has said its line since the last call, and what; the connections are the caller's to close."""
        self._accept()
        heard = []
        for caller in select.select(list(self._parts), [], [], 0)[0] if self._parts else ():
            try:
                chunk = caller.recv(_LONGEST)
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            self._parts[caller] += chunk
            line, end, _ = self._parts[caller].partition(b"\n")
            message = opened(line, self._token) if end else None
            if message is not None and self._expected(message):
                del self._parts[caller], self._since[caller]
                heard.append((caller, message))
            elif end or not chunk or len(self._parts[caller]) > _LONGEST:
                self._ignore(caller)
        for caller in [each for each, since in self._since.items() if time.monotonic() - since > PATIENCE]:
            self._ignore(caller)
        return heard

    def close(self) -> None:
        """Hang up on everybody who was not heard."""
        for caller in self._parts:
            caller.close()
        self._parts.clear()
        self._since.clear()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:  # nobody more, or one that has gone already
                return
            caller.setblocking(False)
            if len(self._parts) >= _MOST:
                self._ignore(next(iter(self._parts)))
            self._parts[caller], self._since[caller] = b"", time.monotonic()

    def _ignore(self, caller: socket.socket) -> None:
        said = self._parts.pop(caller)
        del self._since[caller]
        self._ignored += 1
        if self._ignored <= _TOLD:
            why = (
                f"what it said does not carry the seal of {TOKEN}"
                if said and self._token
                else "it is none of this job's"
            )
            _logger.warning("ignored a caller at %s: %s%s", _peer(caller), why, _last(self._ignored))
        caller.close()


def _peer(caller: socket.socket) -> str:
    try:
        host, port, *_ = caller.getpeername()
    except OSError:
        return "an address that is gone"
    return f"{host}:{port}"


def _last(ignored: int) -> str:
    return "; further ones are ignored without a word" if ignored == _TOLD else ""
