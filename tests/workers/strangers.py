"""Callers that belong to no job: what they say, and one that says it and stays."""

import contextlib
import socket
import time

STRANGERS = (
    b"",  # silent
    b'{"node": 1, "si',  # half a line
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\xff\xfe\n",
    b"[]\n",
    b"{}\n",
    b'{"node": [1]}\n',
    b'{"node": 7}\n',
    b'{"node": 7, "size": 1, "nnodes": 2, "max-restarts": 0}\n',
    b'{"node": 1, "size": -1, "nnodes": 2, "max-restarts": 0}\n',
    b'{"node": 1, "size": "1", "nnodes": 2, "max-restarts": 0}\n',
    b'{"node": true, "size": 1, "nnodes": 2, "max-restarts": 0}\n',
    b'{"process": 7, "count": 2}\n',
    b'{"process": [1], "count": {}}\n',
    b'{"process": 1e999, "count": 2}\n',
    b"[" * 4000 + b"\n",
    b'{"seal": "\\ud800"}\n',
    b"x" * 100_000,
)


@contextlib.contextmanager
def stranger(port: int, said: bytes, patience: float = 10.0):
    """Call as soon as somebody listens, speak, and stay on the line."""
    deadline = time.monotonic() + patience
    while True:
        try:
            caller = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.02)
    with caller:
        with contextlib.suppress(OSError):  # hung up in the middle
            caller.sendall(said)
        yield
