"""`ax.init`: a process joins its job, and JAX starts."""

import dataclasses
import os
import socket
import time
from collections.abc import Mapping, Sequence

import jax

from axonml_jax.compat.processes import backend_started, coordinator_client, keep_in_every_process, only_cpu
from axonml_jax.mesh.environment import LaunchEnvironment, launch_environment
from axonml_jax.mesh.join import (
    bind_address,
    host_port,
    leave_on_error,
    roll_call,
    say_goodbye,
    split_address,
    use_route_to,
)
from axonml_jax.mesh.simulate import keep_memory, pool_threads, requested_devices
from axonml_jax.mesh.world import (
    DEFAULT_TIMEOUT,
    Backend,
    GlooBackend,
    MockBackend,
    NCCLBackend,
    TPUBackend,
    World,
    local_world,
)

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (MockBackend, GlooBackend, NCCLBackend, TPUBackend)
}
"""The backends by name."""

_HOSTS = "axonml_jax/hosts/"
_MOST_PROCESSES = 2**31


def init(
    backend: Backend | str | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> World:
    """Join the launched job, or be a world of this process's devices when there is none.

    The job is described by the arguments or, where they are None, by the launch variables of torchrun, Open MPI, Slurm
    or Kubernetes. On CPU each process has one device unless `jax_num_cpu_devices` says otherwise, and talks over gloo.

    Args:
      backend: `"mock"`, `"gloo"`, `"nccl"`, `"tpu"`, or a `Backend` of yours; None takes what fits the devices.
      coordinator: `host:port` of process 0.
      num_processes: number of processes.
      process_id: which this is, from 0.
      local_device_ids: the GPUs of this process; None: the one with its local rank where several share a host.
      timeout: seconds to wait for the other processes, here and at later eager group calls.

    Returns:
      the `World`; a second call returns an equal one.

    Raises:
      ValueError: for incomplete or contradictory arguments and variables, processes that disagree, or a backend that
        does not fit the devices.
      RuntimeError: when JAX has already started its devices.
      TimeoutError: naming the processes that did not arrive.
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: choose one of {', '.join(BACKENDS)}, or pass a Backend of yours")
    launch = describe_launch(os.environ, coordinator, num_processes, process_id)
    if not backend_started() and only_cpu():
        keep_memory()
        if launch is not None and launch.local_size is not None and launch.local_size > 1:
            os.environ |= pool_threads(requested_devices(), launch.local_size)
    if launch is not None and launch.num_processes > 1:
        _check_unchanged(launch) if jax.distributed.is_initialized() else _join(launch, local_device_ids, timeout)
    chosen = BACKENDS[backend]() if isinstance(backend, str) else backend or _default_backend()
    return local_world(chosen, _local_rank(launch), timeout)


def shutdown() -> None:
    """Leave the job; every process should call it at the end. Does nothing in a process that runs alone."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def describe_launch(
    environ: Mapping[str, str], coordinator: str | None, num_processes: int | None, process_id: int | None
) -> LaunchEnvironment | None:
    """The job that `init`'s arguments and the environment describe together; arguments win.

    Raises:
      ValueError: when they do not describe one job.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    present = {name: value for name, value in given.items() if value is not None}
    if num_processes == 1:
        return None
    if coordinator is not None and num_processes is not None and process_id is not None:
        job = LaunchEnvironment("arguments", coordinator, num_processes, process_id)
    elif (launch := launch_environment(environ, coordinator, num_processes)) is not None:
        job = dataclasses.replace(launch, **present)  # pyright: ignore[reportArgumentType]
    elif not present:
        return None
    else:
        missing = [name for name in given if name not in present]
        raise ValueError(
            f"init: {', '.join(missing)} missing beside {', '.join(present)}, and no launch variables say them; give "
            "all three, or none to run alone"
        )
    if not 0 <= job.process_id < job.num_processes:
        raise ValueError(
            f"init: process_id={job.process_id} of num_processes={job.num_processes} at coordinator={job.coordinator!r}"
            ": process ids count from 0"
        )
    if job.num_processes >= _MOST_PROCESSES:
        raise ValueError(f"init: num_processes={job.num_processes}: JAX counts fewer than {_MOST_PROCESSES} processes")
    said = "" if coordinator or job.launcher == "arguments" else f" that the variables of {job.launcher} name"
    split_address(job.coordinator, f"init: the coordinator{said}")
    return job


def _default_backend():
    platform = jax.default_backend()
    if platform == "cpu":
        return GlooBackend() if jax.process_count() > 1 else MockBackend()
    return {"gpu": NCCLBackend, "tpu": TPUBackend}[platform]()


def _join(launch, local_device_ids, timeout):
    if backend_started():
        raise RuntimeError(
            f"init: JAX has already started its devices, so this process can no longer join the {launch.num_processes} "
            "processes of its job; call ax.init() before the first JAX operation"
        )
    _prepare_cpu_devices()
    keep_in_every_process()
    ids = local_device_ids
    # CUDA_VISIBLE_DEVICES with one entry: the launcher has already chosen this process's GPU.
    if ids is None and (launch.local_size or 1) > 1 and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
        ids = [launch.local_rank]
    deadline = time.monotonic() + timeout
    coordinator = launch.coordinator
    if launch.process_id == 0:
        # It is sure to reach itself where it listens; its own name may mean another address to it.
        coordinator = host_port(*bind_address(coordinator, launch.local_size == launch.num_processes))
    roll_call(coordinator, launch.num_processes, launch.process_id, timeout, named=launch.coordinator)
    left = max(10, round(deadline - time.monotonic()))
    host, _, port = coordinator.rpartition(":")
    use_route_to(host.strip("[]"), int(port))
    jax.distributed.initialize(
        coordinator,
        launch.num_processes,
        launch.process_id,
        ids,
        # Everything is known; JAX would take a GPU's index from Slurm's variables even where only that GPU is visible.
        cluster_detection_method="deactivate",
        initialization_timeout=left,
        coordinator_bind_address=coordinator,
    )
    leave_on_error()
    client = coordinator_client()
    say_goodbye(client, launch.process_id, launch.num_processes)
    client.key_value_set(f"{_HOSTS}{launch.process_id}", socket.gethostname())
    client.wait_at_barrier("axonml_jax/init", left * 1000)


def _prepare_cpu_devices():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices > 1 or forced:  # pyright: ignore[reportAttributeAccessIssue]
        # Several devices per process with asynchronous dispatch fail now and then in gloo: "Connection closed by peer".
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    else:
        jax.config.update("jax_num_cpu_devices", 1)


def _local_rank(launch):
    """Which process of its host this is, as the launcher says, or else by the host names that all have left."""
    if launch is None or launch.num_processes == 1:
        return 0
    if launch.local_rank is not None:
        return launch.local_rank
    hosts = {int(key.rsplit("/", 1)[1]): host for key, host in coordinator_client().key_value_dir_get(_HOSTS)}
    here = sorted(process for process, host in hosts.items() if host == hosts[launch.process_id])
    return here.index(launch.process_id)


def _check_unchanged(launch):
    if (jax.process_count(), jax.process_index()) != (launch.num_processes, launch.process_id):
        raise ValueError(
            f"init: this process is already {jax.process_index()} of {jax.process_count()}, not {launch.process_id} of "
            f"{launch.num_processes}; call ax.shutdown() in every process before joining another job"
        )
