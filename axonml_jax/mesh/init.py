"""`ax.init`: a process joins its job and JAX starts; who describes the job, and which devices belong to this process."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from axonml_jax.base import logger
from axonml_jax.compat.processes import (
    backend_started,
    cloud_tpu_place,
    coordinator_client,
    joined_as,
    keep_in_every_process,
    only_cpu,
)
from axonml_jax.mesh.join import (
    bind_address,
    host_port,
    leave_on_error,
    reached_at,
    roll_call,
    say_goodbye,
    split_address,
    use_route_to,
)
from axonml_jax.mesh.launchers import (
    ALONE,
    LAUNCHERS,
    LaunchEnvironment,
    alone_asked,
    launch_environment,
    mark_placed,
    ray_context,
    reserved,
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
_SAID = "axonml_jax/launched/"
_MOST_PROCESSES = 2**31


def init(
    backend: Backend | str | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> World:
    """Join the launched job, or make a world of this process's devices if there is none.

    The job is described by the arguments or, where they are None, by Ray Train, by the launch variables of any launcher of
    `axonml_jax.mesh.launchers`, or on a cloud TPU by JAX; `World.launcher` says by which. A job that somebody else has
    joined (`jax.distributed.initialize`) is taken as it is. On CPU each process has one device unless `jax_num_cpu_devices`
    says otherwise, and talks over gloo.

    Args:
      backend: `"mock"`, `"gloo"`, `"nccl"`, `"tpu"`, or a `Backend` of yours; None takes what fits the devices.
      coordinator: `host:port` of process 0.
      num_processes: number of processes; 1: this one alone, whatever variables say (so does `AXONML_JAX_ALONE=1`).
      process_id: which this is, from 0.
      local_device_ids: the GPUs of this process; None: the one with its local rank where several processes of a host see the
        same GPUs, else all that it sees.
      timeout: seconds to wait for the other processes, here and at later eager group calls.

    Returns:
      the `World`; a second call returns an equal one.

    Raises:
      ValueError: for incomplete or contradictory arguments and variables, variables that count several processes and say no
        more, processes that disagree, or a backend that does not fit the devices.
      RuntimeError: when JAX has already started its devices.
      TimeoutError: naming the processes that did not arrive.
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: choose one of {', '.join(BACKENDS)}, or pass a Backend of yours")
    launch = _launch((coordinator, num_processes, process_id), timeout)
    if not backend_started() and only_cpu():
        keep_memory()
        if launch is not None and launch.local_size is not None and launch.local_size > 1:
            os.environ |= pool_threads(requested_devices(), launch.local_size)
    if launch is not None and launch.num_processes > 1 and not jax.distributed.is_initialized():
        _join(launch, local_device_ids, timeout)
    found = _adopted(launch, num_processes, timeout)
    chosen = BACKENDS[backend]() if isinstance(backend, str) else backend or _default_backend()
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ValueError(
            f"init: JAX's devices are those of {jax.process_count()} processes, and no launch variable says how they find each "
            "other; pass coordinator='host:port', num_processes= and process_id=, or call jax.distributed.initialize() before"
        )
    if found is None and num_processes is None and (said := reserved(os.environ)):
        logger.warning("%s", said)
    mark_placed()
    name = found.launcher if found is not None else "alone"
    return replace(local_world(chosen, _local_rank(found), timeout), launcher=name)


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
    if present and alone_asked(environ):
        raise ValueError(
            f"init: {ALONE}=1 contradicts {', '.join(f'{k}={v!r}' for k, v in present.items())}: unset one"
        )
    if coordinator is not None and num_processes is not None and process_id is not None:
        job = LaunchEnvironment("arguments", coordinator, num_processes, process_id)
    elif (launch := launch_environment(environ, coordinator, num_processes)) is not None:
        job = replace(launch, **present)  # pyright: ignore[reportArgumentType]
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


def num_launched() -> int:
    """The number of processes that were launched together, this one included; does not wait for the others.

    Raises:
      ValueError: see `launch_environment`.
    """
    if jax.distributed.is_initialized():
        return joined_as()[1]
    if not alone_asked(os.environ) and (context := ray_context()) is not None:
        return context.get_world_size()
    launch = launch_environment(os.environ)
    return 1 if launch is None else launch.num_processes


def _launch(given: tuple[str | None, int | None, int | None], timeout: float) -> LaunchEnvironment | None:
    """The job, from arguments, Ray, variables, or a cloud TPU's metadata; None if this process has joined one already."""
    if given == (None, None, None) and not alone_asked(os.environ):
        if jax.distributed.is_initialized():
            return None
        # What a worker of Ray inherits, such as the variables of the srun that has started Ray, is of another job.
        if (context := ray_context()) is not None:
            return _ray_launch(context)
        simulated = only_cpu() and requested_devices() > 1
        asked = not simulated and not any(each.speaks(os.environ) for each in LAUNCHERS)
        if asked and (place := cloud_tpu_place(os.environ, timeout)) is not None:
            return LaunchEnvironment("tpu", *place)
    return describe_launch(os.environ, *given)


def _ray_launch(context: Any) -> LaunchEnvironment | None:
    """The job of a Ray Train run, where worker 0 tells the others its address; None for a single worker."""
    import ray.util  # pyright: ignore[reportMissingImports]
    from ray.train.collective import broadcast_from_rank_zero  # pyright: ignore[reportMissingImports]

    size, rank, address = context.get_world_size(), context.get_world_rank(), None
    if size == 1:
        return None
    if rank == 0:
        with socket.create_server(("", 0)) as server:
            address = host_port(ray.util.get_node_ip_address(), server.getsockname()[1])
    local = context.get_local_rank(), context.get_local_world_size()
    return LaunchEnvironment("ray", broadcast_from_rank_zero(address), size, rank, *local)


def _default_backend():
    platform = jax.default_backend()
    if platform == "cpu":
        return GlooBackend() if jax.process_count() > 1 else MockBackend()
    known = {"gpu": NCCLBackend, "tpu": TPUBackend}
    if platform not in known:
        raise ValueError(
            f"init: JAX computes on {platform!r}, and there are backends for cpu, gpu and tpu: choose one by JAX_PLATFORMS, or "
            "give init(backend=) a Backend of your own"
        )
    return known[platform]()


def _join(launch, local_device_ids, timeout):
    if backend_started():
        raise RuntimeError(
            f"init: JAX has already started its devices, so this process can no longer join the {launch.num_processes} "
            "processes of its job; call ax.init() before the first JAX operation"
        )
    _prepare_cpu_devices()
    keep_in_every_process()
    deadline = time.monotonic() + timeout
    coordinator, one_host = launch.coordinator, launch.local_size == launch.num_processes
    if launch.process_id == 0:
        # It is sure to reach itself where it listens; its own name may mean another address to it.
        coordinator = host_port(*bind_address(coordinator, one_host))
    else:
        coordinator = reached_at(coordinator, one_host)
    roll_call(coordinator, launch.num_processes, launch.process_id, timeout, named=launch.coordinator)
    left = max(10, round(deadline - time.monotonic()))
    host, _, port = coordinator.rpartition(":")
    use_route_to(host.strip("[]"), int(port))
    jax.distributed.initialize(
        coordinator,
        launch.num_processes,
        launch.process_id,
        local_device_ids if local_device_ids is not None else own_gpu(launch, os.environ),
        # Everything is known; JAX would take a GPU's index from Slurm's variables even where only that GPU is visible.
        cluster_detection_method="deactivate",
        initialization_timeout=left,
        coordinator_bind_address=coordinator,
    )


def own_gpu(launch: LaunchEnvironment, environ: Mapping[str, str]) -> list[int] | None:
    """The index of the GPU that belongs to this process alone; None if it uses all that it sees.

    Several processes of a host that see the same GPUs take one each, by local rank. A process keeps all the GPUs that Ray,
    Slurm (per task), `JAX_LOCAL_DEVICE_IDS` or a `CUDA_VISIBLE_DEVICES` with one GPU have assigned to it.

    >>> own_gpu(LaunchEnvironment("torchrun", "a:1", 4, 3, 1, 2), {"CUDA_VISIBLE_DEVICES": "4,5"})
    [1]
    >>> own_gpu(LaunchEnvironment("ray", "a:1", 4, 3, 1, 2), {"CUDA_VISIBLE_DEVICES": "2,3"}) is None
    True
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",")
    # Slurm with --gpus-per-task, which newer versions call a TRES of the task.
    per_task = launch.launcher == "slurm" and (
        "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    )
    given = launch.launcher == "ray" or per_task or "JAX_LOCAL_DEVICE_IDS" in environ or "," not in visible
    if given or (launch.local_size or 1) == 1 or launch.local_rank is None:
        return None
    return [launch.local_rank]


def _prepare_cpu_devices():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_num_cpu_devices > 1 or forced:  # pyright: ignore[reportAttributeAccessIssue]
        # Several devices per process with asynchronous dispatch fail now and then in gloo: "Connection closed by peer".
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    else:
        jax.config.update("jax_num_cpu_devices", 1)


def _adopted(launch: LaunchEnvironment | None, num_processes: int | None, timeout: float) -> LaunchEnvironment | None:
    """The job that this process is in, however it was joined, once all its processes know each other's hosts."""
    if not jax.distributed.is_initialized():
        return launch
    process, count = joined_as()
    if (count > 1 and (num_processes == 1 or alone_asked(os.environ))) or (
        launch and (launch.process_id, launch.num_processes) != (process, count)
    ):
        wanted = f"{launch.process_id} of {launch.num_processes}" if launch else "alone"
        raise ValueError(
            f"init: this process is already {process} of {count}, not {wanted}; call ax.shutdown() in every process before "
            "joining another job"
        )
    if count == 1:
        return launch
    client = coordinator_client()
    if said := dict(client.key_value_dir_get(_SAID)).get(f"{_SAID}{process}"):
        name, _, local_rank = said.partition(" ")
        return LaunchEnvironment(name, "", count, process, int(local_rank) if local_rank else None)
    found = launch or LaunchEnvironment("jax.distributed.initialize", "", count, process)
    if ray_context() is None:  # Ray ends its workers itself
        leave_on_error()
        say_goodbye(client, process, count)
    client.key_value_set(f"{_HOSTS}{process}", socket.gethostname())
    known = "" if found.local_rank is None else str(found.local_rank)
    client.key_value_set(f"{_SAID}{process}", f"{found.launcher} {known}")
    client.wait_at_barrier("axonml_jax/init", max(10, round(timeout)) * 1000)
    return found


def _local_rank(launch):
    """The index of this process on its host: the launcher's, or by the host names that all processes published."""
    if launch is None or launch.num_processes == 1:
        return 0
    if launch.local_rank is not None:
        return launch.local_rank
    hosts = {int(key.rsplit("/", 1)[1]): host for key, host in coordinator_client().key_value_dir_get(_HOSTS)}
    here = sorted(process for process, host in hosts.items() if host == hosts[launch.process_id])
    return here.index(launch.process_id)
