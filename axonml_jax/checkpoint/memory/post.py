"""Copies on their way between processes, over TCP: announced in a sealed line, checked when they have come, then acknowledged.

A copy of a process that is not expected, or of another size, is refused before it is sent. The SHA-256 of all that was sent is
sealed too. The seal's key is the job's token and a secret of this run, which the processes have from the coordinator.
"""

import hashlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from axonml_jax.checkpoint.memory.generation import LONGEST_INDEX, START, DamagedCopy, Generation, holds
from axonml_jax.logging import logger
from axonml_jax.mesh.job.callers import Callers, readable
from axonml_jax.mesh.job.coordinator import ASKED, bind_address, host_port, listen
from axonml_jax.mesh.job.gloo import address_towards
from axonml_jax.mesh.job.sealed import Talk, greet, is_count

TIMEOUT = 60.0
"""Seconds without a byte after which a copy on its way is given up."""

_TICK = 0.2
_CHUNK = 1 << 22
_LINE = 1 << 12
_MOST = 1 << 62
_SUBJECT = "copies of the state"


@dataclass(frozen=True)
class Box:
    """Where the copies of one process go.

    Attributes:
      generations: where they go; the one that holds the step to keep stays.
      size: bytes of the parts of a copy.
      shard: what the copies hold.
    """

    generations: Sequence[Generation]
    size: int
    shard: str


class Post:
    """Receives copies behind the program's back, until it is closed.

    Args:
      address: of this machine, to listen on.
      token: what a sender must know.
      reached_at: by which address or name the others reach it; None: by the same.

    Attributes:
      boxes: what is expected, by purpose and the sender's rank.
      address: `host:port` for the others.
    """

    def __init__(self, address: str, token: bytes, reached_at: str | None = None):
        self.boxes: dict[tuple[str, int], Box] = {}
        self._token, self._server = token, listen(address, 0, 64)
        self.address = host_port(reached_at or address, self._server.getsockname()[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="copies of other processes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        with self._server, closing(self._callers()) as callers:
            while not self._stop.is_set():
                readable(callers.sources(), _TICK)
                for caller, talk, said in callers.pump():
                    with caller:
                        try:
                            self._take(caller, talk, said)
                        except (OSError, DamagedCopy) as error:
                            logger.warning("a copy of the state of process %d did not come: %s", said["rank"], error)

    def _callers(self) -> Callers:
        return Callers(self._server, self._token, _SUBJECT, _is_announced)

    def _take(self, caller: socket.socket, talk: Talk, said: dict) -> None:
        caller.settimeout(TIMEOUT)
        box, keep = self.boxes.get((said["purpose"], said["rank"])), said["keep"]
        fits = box is not None and said["size"] == box.size
        caller.sendall(talk.sealed({"go": fits}))
        if box is None or not fits:
            raise DamagedCopy("it is not expected here, or has another size")
        generation = next(each for each in box.generations if keep is None or holds(each) != (box.shard, keep))
        generation.clear()
        digest, place, end = hashlib.sha256(), START, START + said["size"] + said["index"]
        while place < end:
            chunk = caller.recv(min(end - place, _CHUNK))
            if not chunk:
                raise ConnectionError("its sender has gone")
            digest.update(chunk)
            generation.put(place, chunk)
            place += len(chunk)
        if talk.opened(_line(caller)) != {"sha256": digest.hexdigest()}:
            raise DamagedCopy("what came is not what its sender has sealed")
        generation.commit_received(START + said["size"], said["index"])
        try:
            found = generation.checked()
            if found is None or found[0].step != said["step"]:
                raise DamagedCopy("it is of another step than was announced")
        except DamagedCopy:
            generation.clear()
            raise
        caller.sendall(talk.sealed({"kept": said["step"]}))


def send(place: str, token: bytes, purpose: str, rank: int, generation: Generation, keep: int | None) -> None:
    """Send a copy, and return when it is kept there.

    Args:
      place: `host:port` of the receiver's `Post`.
      token: see `Post`.
      purpose: what it is for there.
      rank: of this process.
      generation: has the copy.
      keep: the step that the receiver must keep meanwhile.

    Raises:
      OSError: when it did not come to that.
    """
    found = generation.index()
    assert found is not None, "there is no copy"
    (index, end), whole = found, generation.size()
    host, _, port = place.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT) as line:
        talk = greet(line, token, _SUBJECT)
        hello = {"purpose": purpose, "rank": rank, "step": index.step, "keep": keep}
        line.sendall(talk.sealed(hello | {"size": end - START, "index": whole - end}))
        if talk.opened(_line(line)) != {"go": True}:
            raise ConnectionError(f"{place} does not take it")
        digest, at = hashlib.sha256(), START
        while at < whole:
            chunk = bytearray(min(_CHUNK, whole - at))
            generation.read_into(memoryview(chunk), at)
            digest.update(chunk)
            line.sendall(chunk)
            at += len(chunk)
        line.sendall(talk.sealed({"sha256": digest.hexdigest()}))
        if talk.opened(_line(line)) != {"kept": index.step}:
            raise ConnectionError(f"{place} has not kept it")


def _is_announced(said: dict) -> bool:
    """Whether a message announces a copy."""
    return (
        said.keys() == {"purpose", "rank", "step", "keep", "size", "index"}
        and isinstance(said["purpose"], str)
        and all(is_count(said[name], 0, _MOST) for name in ("rank", "step", "size"))
        and is_count(said["index"], 1, LONGEST_INDEX)
        and (said["keep"] is None or is_count(said["keep"], 0, _MOST))
    )


def _line(line: socket.socket) -> bytes:
    """A line, and no byte of what comes after it."""
    said = b""
    while not said.endswith(b"\n") and len(said) < _LINE and (byte := line.recv(1)):
        said += byte
    return said


def own_addresses(environ: Mapping[str, str]) -> tuple[str, str]:
    """The address of this machine to listen on, and the one by which the job's others reach it, by the launcher's variables.

    They differ where `JAX_COORDINATOR_BIND_ADDRESS` says on what process 0's machine listens, as `0.0.0.0`, which is nobody's.
    """
    host = environ["MASTER_ADDR"].strip("[]")
    if environ["NODE_RANK"] == "0":
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        address, _ = bind_address(place, environ["LOCAL_WORLD_SIZE"] == environ["WORLD_SIZE"])
        return address, host if os.environ.get(ASKED) else address
    address = address_towards(host, int(environ["MASTER_PORT"]))
    return address, address
