"""Freed host memory that a CPU process keeps for its next step.

XLA:CPU asks malloc for a step's temporaries and frees them at its end. glibc maps each large one anew and gives it back,
so that every step pays for its pages again: a sixth of a small model's step. What is kept is bounded by `bound_kept_memory`.
"""

import ctypes
import functools
import os
import pathlib
import time

SWITCH = "AXONML_JAX_KEEP_MEMORY"
"""The environment variable that turns it off, as `0`."""
SECONDS_BETWEEN = 10.0
"""How often the bound is looked at."""

# malloc.h: no mapping of its own for a large block; nothing given back below 2 GiB at the heap's end (the largest number
# that glibc takes); one heap, as the heaps of further threads cannot hold blocks above 64 MiB.
_SETTINGS = {-4: 0, -1: 2**31 - 1, -8: 1}
_OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
_kept, _looked = False, -SECONDS_BETWEEN


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def keep_memory() -> bool:
    """Let malloc keep what is freed. Call it before JAX starts its devices, whose threads else get heaps of their own.

    Does nothing where the C library is not glibc, where `AXONML_JAX_KEEP_MEMORY=0`, or where malloc has been set by the user
    (`MALLOC_*` variables, `GLIBC_TUNABLES`).

    Returns:
      whether memory is kept from now on.
    """
    global _kept
    libc, own = _glibc(), "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if libc is None or own or os.environ.get(SWITCH) == "0" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    if not _kept:
        taken = [libc.mallopt(name, value) for name, value in _SETTINGS.items()]
        _kept = all(taken)
    return _kept


def bound_kept_memory(most: int | None = None) -> bool:
    """Give kept memory back where free memory of the heap is above a bound; looked at once in ten seconds.

    Args:
      most: bytes; None: a quarter of the machine's memory, or of the container's.

    Returns:
      whether memory was given back.
    """
    global _looked
    libc = _glibc() if _kept else None
    if libc is None or time.monotonic() < _looked + SECONDS_BETWEEN:
        return False
    _looked = time.monotonic()
    if libc.mallinfo2().fordblks <= (machine_memory() // 4 if most is None else most):
        return False
    return bool(libc.malloc_trim(0))


@functools.cache
def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container where that allows less."""
    allowed = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in map(pathlib.Path, _CGROUP_LIMITS):
        if limit.exists() and (said := limit.read_text().strip()).isdigit():
            allowed.append(int(said))
    return min(allowed)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library where it is glibc 2.33 or newer, whose `mallinfo2` counts beyond 2 GiB."""
    try:
        libc = ctypes.CDLL(None)
        libc["gnu_get_libc_version"]  # raises where it is another
        libc.mallinfo2.restype = _Mallinfo
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle for None
        return None
    return libc
