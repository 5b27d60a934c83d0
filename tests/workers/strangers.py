"""Callers that belong to no job: what they say, and one that says it and stays."""

import contextlib
import socket
import time

from axonml_jax.mesh.join import greet

GREETING = b"axonml-jax " + b"0" * 32 + b"\n"
STRANGERS = (
    b"",  # silent
    b'{"node": 1, "si',  # half a line
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\xff\xfe\n",
    b"[]\n",
    b'{"node": 1, "size": 9, "nnodes": 2, "max-restarts": 0}\n',
    b'{"process": 1, "count": 2}\n',
    b"[" * 4000 + b"\n",
    b"x" * 100_000,
    GREETING,
    GREETING + b"0" * 64 + b' {"process": 1, "count": 2}\n',
    GREETING + b'{"seal": "\\ud800"}\n',
    GREETING + b"\n" * 100,
    GREETING * 100,
    b"axonml-jax 12\n",
)
SPOKEN = (
    [],
    {},
    None,
    {"node": [1]},
    {"node": 7},
    {"node": 7, "size": 1, "nnodes": 2, "max-restarts": 0},
    {"node": 1, "size": -1, "nnodes": 2, "max-restarts": 0},
    {"node": 1, "size": "1", "nnodes": 2, "max-restarts": 0},
    {"node": True, "size": 1, "nnodes": 2, "max-restarts": 0},
    {"process": 7, "count": 2},
    {"process": [1], "count": {}},
    {"process": float("inf"), "count": 2},
    {"process": 10**400, "count": 2},
)
"""What strangers say that know how the processes of a job talk."""


@contextlib.contextmanager
def stranger(port: int, said, patience: float = 10.0, subject: str = "", token: bytes = b""):
    """Call as soon as somebody listens, speak, and stay on the line; with a subject as a process of a job would."""
    deadline = time.monotonic() + patience
    while True:
        try:
            caller = socket.create_connection(("127.0.0.1", port), timeout=patience)
            break
        except OSError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.02)
    with caller:
        line = greet(caller, token, subject).sealed(said) if subject else said
        with contextlib.suppress(OSError):  # hung up in the middle
            caller.sendall(line)
        yield
