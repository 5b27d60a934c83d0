"""What a process of a dying job leaves: how far it was, where everybody stood, what the step sends, on what it ran."""

import json
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from axonml_jax.compat.versions import PACKAGES, installed
from axonml_jax.logging import logger
from axonml_jax.mesh.watch.where import stack_of

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "AXONML_JAX_RESTART_COUNT"),
    *("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)
"""The environment variables that are written; all others may be secrets."""

_LINES = 100
_LIMIT = 30.0


class FlightRecord:
    """Writes `flight-rank{r}.json` into a folder when its job dies.

    Args:
      folder: of the run.
      about: plain values to write beside.
      collectives: those of the step's program, in order, as plain values; called when the record is written, and only then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        about: Mapping[str, Any] | None = None,
        collectives: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ):
        self._folder, self._about, self._collectives = folder, dict(about or {}), collectives
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._handler = _Keeping(self._lines)
        self._writing = threading.Lock()

    def __enter__(self) -> "FlightRecord":
        """From now on the last messages of the library's logger are kept."""
        logger.addHandler(self._handler)
        return self

    def __exit__(self, *exception):
        logger.removeHandler(self._handler)

    def path(self, rank: int) -> Path:
        """Where a rank's record is."""
        return self._folder / f"flight-rank{rank}.json"

    def write(self, rank: int, size: int, why: str, error: BaseException | None = None, **parts: Any) -> bool:
        """Write it, and say where; first without the collectives, which take longest. That it fails is a line, no error.

        The folder may be on a disk that hangs: after half a minute the record is waited for no longer.

        Args:
          rank, size: of this process.
          why: it dies.
          error: what was raised, if anything.
          parts: what else is known, as plain values.

        Returns:
          Whether it came to an end in time.
        """
        found = {"rank": rank, "size": size, "why": why, **parts}
        writing = threading.Thread(target=self._write, args=(rank, found, error), name="flight record", daemon=True)
        writing.start()
        writing.join(_LIMIT)
        if hangs := writing.is_alive():
            _say(f"no whole flight record after {_LIMIT:g} s: {self.path(rank)} is waited for no longer")
        return not hangs

    def _write(self, rank: int, found: Mapping[str, Any], error: BaseException | None) -> None:
        with self._writing:
            try:
                whole = {
                    **found,
                    "error": _lines_of(error),
                    "threads": _threads(),
                    "memory": _memory(),
                    "log": list(self._lines),
                    **_surroundings(),
                    **self._about,
                }
                self._put(rank, whole)
                if self._collectives is not None:
                    self._put(rank, whole | {"collectives": list(self._collectives())})
            except Exception as failed:  # a job that dies must not change its reason here
                _say(f"no whole flight record: {type(failed).__name__}: {failed}")
                return
        _say(f"flight record: {self.path(rank)}")

    def _put(self, rank: int, found: Mapping[str, Any]) -> None:
        new = self.path(rank).with_name(self.path(rank).name + ".new")
        new.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
        new.replace(self.path(rank))


class _Keeping(logging.Handler):
    def __init__(self, lines: deque[str]):
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


def _say(text: str) -> None:
    print(f"axonml_jax: {text}", file=sys.stderr, flush=True)


def _lines_of(error: BaseException | None) -> list[str]:
    text = "" if error is None else "".join(traceback.format_exception(error))
    return text.splitlines()[-_LINES:]


def _threads() -> dict[str, list[str]]:
    """Of every thread of Python's its calls, the innermost last; the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = dict.fromkeys((threading.main_thread().ident, *sys._current_frames()))
    return {f"{names.get(ident, 'unknown')} {ident}": stack_of(ident) for ident in idents if ident is not None}


def _memory() -> dict[str, Any]:
    """Of the process, as Linux tells, and of its devices, where they tell; in bytes."""
    status, found = Path("/proc/self/status"), {}
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = 1024 * int(value.split()[0])
    for device in jax.local_devices():
        if stats := device.memory_stats():
            found[str(device)] = {name: stats[name] for name in ("bytes_in_use", "peak_bytes_in_use") if name in stats}
    return found


def _surroundings() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": [f"{device} ({device.device_kind})" for device in jax.local_devices()],
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
