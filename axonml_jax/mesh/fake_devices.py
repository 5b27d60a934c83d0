"""Simulated CPU devices that are safe by themselves: enough threads for their collectives, bounded run-ahead."""

import os
import re
from typing import TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from axonml_jax.compat.processes.platform import backend_started
from axonml_jax.logging import logger
from axonml_jax.mesh.job.environment import LaunchEnvironment, launch_environment
from axonml_jax.mesh.kept_memory import bound_kept_memory, keep_memory
from axonml_jax.mesh.pool_threads import pool_threads

T = TypeVar("T")

# Slow machines (CI with a few busy cores) take longer than XLA's default 40 s to bring all simulated devices together.
# jaxlib 0.10 to 0.12 know these flags; an unknown --xla_cpu_* flag would abort the process.
_TIMEOUT_FLAGS = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
    "--xla_cpu_collective_timeout_seconds": 600,
}


def fake_devices(n: int) -> None:
    """Make this process see `n` simulated CPU devices. Call it before anything touches a JAX device.

    XLA splits each product among a thread per core, or as many as the environment variable NPROC says when the backend
    starts: before jax 0.12 it becomes at least 2n (see `pool_threads`). Memory that a step frees is kept for the next one
    (`AXONML_JAX_KEEP_MEMORY=0` switches that off). Does nothing when JAX already runs with exactly n CPU devices. In one of
    several launched processes every process gets n of its own, and the first says so.

    Args:
      n: number of devices, at least 1.

    Raises:
      ValueError: when n is not positive.
      RuntimeError: when JAX has already started with other devices.
    """
    if n < 1:
        raise ValueError(f"fake_devices({n}): the number of simulated devices must be at least 1")
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


def is_simulated(mesh: Mesh) -> bool:
    """Whether the mesh has several CPU devices of this process: devices that share its cores and its thread pool."""
    return _simulated(mesh.local_devices)


def requested_devices() -> int:
    """The number of CPU devices JAX will start with, as its options or XLA_FLAGS say now."""
    requested = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return requested if requested >= 0 else int(forced[-1]) if forced else 1


def _launch() -> LaunchEnvironment | None:
    try:
        return launch_environment(os.environ)
    except ValueError:  # what is wrong with the variables is for `init` to say, which needs them
        return None


def _tell_of_processes(n: int, launch: LaunchEnvironment | None) -> None:
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
