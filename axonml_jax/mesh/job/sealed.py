"""What the processes of a job say to each other: one JSON object per line, sealed with the job's token where there is one.

The token itself is never sent: a line carries an HMAC of its message (RFC 2104), compared in constant time. A seal says that
the sender belongs to the job, and that it says this here and now; it hides nothing.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

TOKEN = "AXONML_JAX_TOKEN"
"""The secret that all launchers and processes of a job share."""

TOKEN_FILE = "AXONML_JAX_TOKEN_FILE"
"""A file that holds it, in the place of the variable."""

_GREETING = re.compile(rb"axonml-jax ([0-9a-f]{32})\n?")
_GREETING_BYTES = 44
_TOKEN_BYTES = 2**12


def job_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """The job's token; empty where there is none.

    Raises:
      ValueError: for a file that cannot be read, is empty, or that others may read or write, or for both variables at once.
        The token is in no message.
    """
    given, path = environ.get(TOKEN, ""), environ.get(TOKEN_FILE, "")
    if given and path:
        raise ValueError(f"{TOKEN} and {TOKEN_FILE} both name the job's token: give one of them")
    if not path:
        return given.encode()
    try:
        token = _own_file(Path(path)).strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error}") from error
    if not token:
        raise ValueError(f"{TOKEN_FILE}={path}: the file is empty; write a token into it, or leave the variable out")
    return token


class Talk:
    """One end of a conversation over one connection.

    Both sides begin with a greeting: a random number. Every line after that carries an HMAC of its message, of the side that
    says it and of how many lines that side has said, under a key made of the token, the subject and both numbers. So a line
    counts once, in its place: recorded, it means nothing in another conversation, later in this one, or to who has said it.

    Args:
      token: the job's; an empty one seals nothing off, as everybody knows it.
      subject: what is talked about; lines about another one do not count.
      calls: whether this side has called, and the other listens.
    """

    def __init__(self, token: bytes, subject: str, *, calls: bool):
        self._token, self._subject, self._calls = token, subject, calls
        self._number = secrets.token_hex(16).encode()
        self._key = b""
        self._said = self._heard = 0

    @property
    def greeting(self) -> bytes:
        """The first line of this side."""
        return b"axonml-jax " + self._number + b"\n"

    def greeted(self, line: bytes) -> bool:
        """Take the other side's greeting; False when it is none."""
        found = _GREETING.fullmatch(line)
        if found is None or found[1] == self._number:  # our own, sent back
            return False
        numbers = (found[1], self._number) if self._calls else (self._number, found[1])
        self._key = _hmac(self._token, b" ".join([b"axonml-jax", self._subject.encode(), *numbers])).digest()
        return True

    def sealed(self, message: dict) -> bytes:
        """The next line of this side.

        >>> one, other = Talk(b"secret", "weather", calls=True), Talk(b"secret", "weather", calls=False)
        >>> one.greeted(other.greeting), other.greeted(one.greeting)
        (True, True)
        >>> line = one.sealed({"sun": 1})
        >>> other.opened(line), other.opened(line)
        ({'sun': 1}, None)
        """
        body = json.dumps(message).encode()
        self._said += 1
        return self._seal(self._calls, self._said, body) + b" " + body + b"\n"

    def opened(self, line: bytes) -> dict | None:
        """The message of the other side's next line; None when it has another seal, or is no JSON object."""
        seal, _, body = line.removesuffix(b"\n").partition(b" ")
        self._heard += 1
        if not self._key or not hmac.compare_digest(seal, self._seal(not self._calls, self._heard, body)):
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested without end
            return None
        return message if isinstance(message, dict) else None

    def _seal(self, caller: bool, count: int, body: bytes) -> bytes:
        return _hmac(self._key, b"%s %d " % (b"caller" if caller else b"listener", count) + body).hexdigest().encode()


def greet(connection: socket.socket, token: bytes, subject: str) -> Talk:
    """Exchange greetings with whoever listens at the other end; not a byte after the other's greeting is read.

    Args:
      connection: connected, with a timeout.
      token, subject: see `Talk`.

    Raises:
      OSError: when the other end does not answer in time, or as a listener of ours does.
    """
    talk, heard = Talk(token, subject, calls=True), b""
    connection.sendall(talk.greeting)
    while len(heard) < _GREETING_BYTES and (part := connection.recv(_GREETING_BYTES - len(heard))):
        heard += part
    if not talk.greeted(heard):
        raise ConnectionError("something else answers there")
    return talk


def is_count(value: object, low: int = 0, high: int = 2**31) -> bool:
    """Whether a received value is a whole number in a range; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _hmac(key: bytes, message: bytes) -> hmac.HMAC:
    return hmac.new(key, message, hashlib.sha256)


def _own_file(path: Path) -> bytes:
    """What a file says that its owner alone may read; one of root's its group may too, which is PostgreSQL's rule for keys."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("is no ordinary file")
        if about.st_mode & (0o037 if about.st_uid == 0 else 0o077):
            mode = f"mode {stat.S_IMODE(about.st_mode):04o}"
            raise ValueError(f"others may read or write it ({mode}); chmod 600 it (Kubernetes: defaultMode: 0400)")
        if len(content := file.read(_TOKEN_BYTES + 1)) > _TOKEN_BYTES:
            raise ValueError(f"is longer than {_TOKEN_BYTES} bytes, which is no token")
        return content
