"""Whole JSON messages between two launchers over one TCP connection."""

import selectors
import socket
import time

from axonml_jax.mesh.job.callers import readable
from axonml_jax.mesh.job.sealed import Talk, greet

SILENCE = 30.0
"""Seconds without a byte after which the launcher at the other end stands still: it says something every second."""

_BEAT = 1.0
_CALL_TIMEOUT = 5.0
_SEND_TIMEOUT = 5.0
# The last lines of a failed worker's output are the longest message.
_LONGEST = 2**26
# A machine that loses its power or its network says nothing: found out in about ten seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Connection:
    """One end of a connection.

    Args:
      connection: a connected socket; closed with the line.
      talk: with the other end, after the greetings; what does not carry its seal cuts the line.

    Attributes:
      cut: whether the other end has gone.
    """

    def __init__(self, connection: socket.socket, talk: Talk):
        self.cut = False
        self._connection = connection
        self._talk = talk
        self._part = bytearray()
        self._unread: list[dict] = []
        self._said = self._heard = time.monotonic()
        connection.settimeout(_SEND_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """The descriptor to select on."""
        return self._connection.fileno()

    def send(self, message: dict) -> None:
        """Send a message; a cut line loses it."""
        self._said = time.monotonic()
        try:
            self._connection.sendall(self._talk.sealed(message))
        except OSError:
            self.cut = True

    def beat(self) -> None:
        """Show once a second that this launcher does not stand still, and make room for what the other end says."""
        self._receive()
        if not self.cut and time.monotonic() - self._said > _BEAT and self._has_room():
            self.send({})

    @property
    def silent(self) -> bool:
        """Whether the other end stands still, as far as has been heard."""
        return time.monotonic() - self._heard > SILENCE

    def messages(self) -> list[dict]:
        """What has come since the last call, without waiting."""
        self._receive()
        *whole, rest = self._part.split(b"\n")
        self._part = bytearray(rest)
        messages = [self._talk.opened(bytes(text)) for text in whole]
        self.cut = self.cut or None in messages  # a stranger
        unread, self._unread = self._unread, []
        return unread + [message for message in messages if message]

    def put_back(self, messages: list[dict]) -> None:
        """Let the next call of `messages` begin with these."""
        self._unread = messages

    def _receive(self) -> None:
        while not self.cut and readable([self._connection], 0):
            try:
                chunk = self._connection.recv(2**16)
            except OSError:
                chunk = b""
            self.cut = not chunk
            self._part += chunk
            self.cut = self.cut or len(self._part) > _LONGEST
            self._heard = time.monotonic()

    def _has_room(self) -> bool:
        """Whether the line takes a word without waiting; that of one who has stood still for long does not."""
        with selectors.PollSelector() as selector:
            selector.register(self._connection, selectors.EVENT_WRITE)
            return bool(selector.select(0))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self.cut = True


def called(place: tuple[str, int], token: bytes, subject: str) -> Connection:
    """A connection to whoever listens there, who has greeted.

    Raises:
      OSError: when nobody does, or something else.
    """
    connection = socket.create_connection(place, timeout=_CALL_TIMEOUT)
    try:
        return Connection(connection, greet(connection, token, subject))
    except BaseException:
        connection.close()
        raise
