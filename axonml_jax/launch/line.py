"""Whole JSON messages between two launchers over one TCP connection."""

import json
import select
import socket

_SEND_TIMEOUT = 5.0
# A machine that loses its power or its network says nothing: found out in about ten seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class Line:
    """One end of a connection.

    Args:
      connection: a connected socket; closed with the line.

    Attributes:
      cut: whether the other end has gone.
    """

    def __init__(self, connection: socket.socket):
        self.cut = False
        self._connection = connection
        self._part = b""
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
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.cut = True

    def messages(self) -> list[dict]:
        """What has come since the last call, without waiting."""
        while not self.cut and select.select([self._connection], [], [], 0)[0]:
            try:
                chunk = self._connection.recv(2**16)
            except OSError:
                chunk = b""
            self.cut = not chunk
            self._part += chunk
        *whole, self._part = self._part.split(b"\n")
        messages = [_parsed(text) for text in whole]
        self.cut = self.cut or None in messages  # a stranger
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self.cut = True


def _parsed(text: bytes) -> dict | None:
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
