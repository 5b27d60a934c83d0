"""Messages between the processes of a job: one JSON object per line, sealed with the job's token where there is one.

The token itself is never sent: a line carries the HMAC of its message (RFC 2104), compared in constant time. A seal says that
the sender belongs to the job; it hides nothing.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path

TOKEN = "AXONML_JAX_TOKEN"
"""The secret that all launchers and processes of a job share."""

TOKEN_FILE = "AXONML_JAX_TOKEN_FILE"
"""A file that holds it, in the place of the variable."""

_SEAL = "seal"


def job_token(environ: Mapping[str, str] = os.environ) -> bytes:
    """The job's token; empty where there is none.

    Raises:
      ValueError: for a file that cannot be read or is empty, or for both variables at once. The token is in no message.
    """
    given, path = environ.get(TOKEN, ""), environ.get(TOKEN_FILE, "")
    if given and path:
        raise ValueError(f"{TOKEN} and {TOKEN_FILE} both name the job's token: give one of them")
    if not path:
        return given.encode()
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{TOKEN_FILE}={path}: {error.strerror}") from error
    if not token:
        raise ValueError(f"{TOKEN_FILE}={path}: the file is empty; write a token into it, or leave the variable out")
    return token


def sealed(message: dict, token: bytes) -> bytes:
    """A message as a line.

    >>> opened(sealed({"node": 1}, b"secret"), b"secret"), opened(sealed({"node": 1}, b"another"), b"secret")
    ({'node': 1}, None)
    """
    return json.dumps(message | ({_SEAL: _seal(message, token)} if token else {})).encode() + b"\n"


def opened(line: bytes, token: bytes) -> dict | None:
    """The message of a line; None when it is no JSON object, or does not carry the token's seal."""
    try:
        message = json.loads(line)
        if not isinstance(message, dict):
            return None
        seal = str(message.pop(_SEAL, "")).encode()
        return message if not token or hmac.compare_digest(seal, _seal(message, token).encode()) else None
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested without end
        return None


def is_count(value: object, low: int = 0, high: int = 2**31) -> bool:
    """Whether a received value is a whole number in a range; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _seal(message: dict, token: bytes) -> str:
    return hmac.new(token, json.dumps(message, sort_keys=True).encode(), hashlib.sha256).hexdigest()
