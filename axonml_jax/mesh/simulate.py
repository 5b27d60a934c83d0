"""Simulated CPU devices: requested before JAX starts, with the threads and the memory that they need."""

import ctypes
import functools
import os
import pathlib
import re
import time
from typing import TYPE_CHECKING, TypeVar

import jax
from jax.core import Tracer

from axonml_jax.base import cores, logger
from axonml_jax.compat.processes import backend_started
from axonml_jax.compat.versions import COLLECTIVES_HOLD_THREADS

if TYPE_CHECKING:
    from axonml_jax.mesh.launchers import LaunchEnvironment

# --------------------------------------------------------------------------------------------------
# Freed host memory that a CPU process keeps for its next step.
#
# XLA:CPU asks malloc for a step's temporaries and frees them at its end. glibc maps each large one anew and gives it
# back, so that every step pays for its pages again: a sixth of a small model's step. What is kept is bounded by
# `bound_kept_memory`.
# --------------------------------------------------------------------------------------------------

SWITCH = "AXONML_JAX_KEEP_MEMORY"
"""The environment variable that turns keeping off, as `0`."""
SECONDS_BETWEEN = 10.0
"""Seconds between two checks of the bound on kept memory."""

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
    """Make malloc keep freed memory. Call it before JAX starts its devices, whose threads would get heaps of their own.

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
    """Return kept memory to the system if the heap's free part exceeds a bound; checks at most once in ten seconds.

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
    """The C library if it is glibc 2.33 or newer, whose `mallinfo2` counts beyond 2 GiB; else None."""
    try:
        libc = ctypes.CDLL(None)
        libc["gnu_get_libc_version"]  # raises where it is another
        libc.mallinfo2.restype = _Mallinfo
    except (AttributeError, OSError, TypeError):  # another C library; Windows has no handle for None
        return None
    return libc


# --------------------------------------------------------------------------------------------------
# How many threads XLA:CPU splits its products among, which the environment variable NPROC says when the backend starts.
# --------------------------------------------------------------------------------------------------


def pool_threads(devices: int, processes: int = 1) -> dict[str, str]:
    """The environment variable that sets XLA's number of threads, if one must be set (docs/adr/0003).

    XLA has a thread per core. Processes that share a machine get their part of the cores each, as torchrun sets
    OMP_NUM_THREADS; whoever set NPROC keeps it. But before jax 0.12 collectives wait in these threads, and with fewer than
    two per device a program hangs until it is aborted: there NPROC becomes at least two per device.

    Args:
      devices: of this process.
      processes: of this machine that share its cores.
    """
    asked = os.environ.get("NPROC", "")
    given = asked.isdigit()
    wanted = int(asked) if given else max(1, cores() // processes)
    if COLLECTIVES_HOLD_THREADS:
        return {"NPROC": str(max(wanted, 2 * devices))}
    return {} if given or processes == 1 else {"NPROC": str(wanted)}


# --------------------------------------------------------------------------------------------------
# Simulated CPU devices that are safe by themselves: enough threads for their collectives, bounded run-ahead.
# --------------------------------------------------------------------------------------------------

T = TypeVar("T")

# Slow machines (CI with a few busy cores) take longer than XLA's default 40 s to bring all simulated devices together.
# jaxlib 0.10 to 0.12 know these flags; an unknown --xla_cpu_* flag would abort the process.
_TIMEOUT_FLAGS = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    "--xla_cpu_collective_timeout_seconds": 600,
}


_MOST = 8192


def fake_devices(n: int) -> None:
    """Make this process see `n` simulated CPU devices. Call it before anything touches a JAX device.

    XLA splits each product among a thread per core, or as many as the environment variable NPROC says when the backend
    starts: before jax 0.12 it becomes at least 2n (see `pool_threads`). Memory that a step frees is kept for the next one
    (`AXONML_JAX_KEEP_MEMORY=0` switches that off). Does nothing when JAX already runs with exactly n CPU devices. In one of
    several launched processes every process gets n of its own, and the first says so.

    Args:
      n: number of devices, 1 to 8,192.

    Raises:
      ValueError: for any other n: XLA starts three threads for each device, and ends the process where Linux gives no more.
      RuntimeError: when JAX has already started with other devices.
    """
    if not 1 <= n <= _MOST:
        raise ValueError(
            f"fake_devices({n}): the number of simulated devices must be 1 to {_MOST:,}; a plan for more is made, priced and "
            "proven without devices (axonml-jax plan, ax.plan)"
        )
    launch = _launch()
    threads = pool_threads(n, 1 if launch is None else launch.local_size or 1)
    if not backend_started():
        os.environ |= threads
        os.environ["XLA_FLAGS"] = _with_timeouts(os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
        keep_memory()
        _tell_of_processes(n, launch)
        return
    devices = jax.local_devices()
    if devices[0].platform != "cpu" or len(devices) != n:
        raise RuntimeError(
            f"fake_devices({n}): JAX has already started with {len(devices)} {devices[0].platform} device(s); call "
            f"fake_devices before the first JAX operation, or start Python with JAX_PLATFORMS=cpu "
            f"JAX_NUM_CPU_DEVICES={n}{''.join(f' {name}={value}' for name, value in threads.items())}"
        )


def bound_run_ahead(tree: T) -> T:
    """Wait for `tree` if it lives on several CPU devices of this process; bound the memory kept. Call it once a step.

    Args:
      tree: what the step returned. Only the first array's sharding is looked at.

    Returns:
      `tree`.
    """
    bound_kept_memory()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, Tracer):
            return tree
        if isinstance(leaf, jax.Array):
            return jax.block_until_ready(tree) if _simulated(leaf.sharding.addressable_devices) else tree
    return tree


def requested_devices() -> int:
    """The number of CPU devices that JAX will start with, by its options or XLA_FLAGS."""
    requested = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return requested if requested >= 0 else int(forced[-1]) if forced else 1


def _launch() -> "LaunchEnvironment | None":
    try:
        from axonml_jax.mesh.launchers import launch_environment

        return launch_environment(os.environ)
    except ValueError:  # what is wrong with the variables is for `init` to say, which needs them
        return None


def _tell_of_processes(n: int, launch: "LaunchEnvironment | None") -> None:
    if launch is not None and launch.num_processes > 1 and launch.process_id == 0:
        logger.warning(
            "fake_devices(%d): this is one of %d processes that %s has launched, and each gets %d simulated devices of its "
            "own, %d in all after ax.init(). Leave fake_devices out for one device per process, or start the script without "
            "a launcher for %d in one process",
            *(n, launch.num_processes, launch.launcher, n, n * launch.num_processes, n),
        )


def _simulated(devices):
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _with_timeouts(flags):
    missing = [f"{flag}={seconds}" for flag, seconds in _TIMEOUT_FLAGS.items() if flag not in flags]
    return " ".join([*flags.split(), *missing])
