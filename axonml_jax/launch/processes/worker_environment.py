"""The variables of a launched worker: torchrun's names, and which devices it may use."""

import importlib.util
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonml_jax.checkpoint.memory.handed import MEMORY, Handed
from axonml_jax.launch.config.machines import MACHINES, Machines
from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.processes.leftovers import MARK

RESTART_COUNT = "AXONML_JAX_RESTART_COUNT"
"""How often all workers have been restarted; torchrun's name is set too."""

_FORCED = "xla_force_host_platform_device_count"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# PyTorch's torchrun leaves these where a launch runs inside of one of its workers.
# This launcher's own variables are foreign too: they name files that another launch has open, and its machines.
_FOREIGN = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", MEMORY, MACHINES)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the workers of one attempt have in common on one machine.

    Attributes:
      address: host of process 0.
      port: where its coordinator listens.
      world_size: processes in the job.
      first_rank: rank of this machine's first worker.
      local_size: workers on this machine.
      node_rank: which machine this is.
      num_nodes: number of machines.
      restarts: attempts before this one.
      max_restarts: how many there may be.
      run_id: the launch's mark.
      machines: how many there may be, where they come and go; None: always as many.
    """

    address: str
    port: int
    world_size: int
    first_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    restarts: int
    max_restarts: int
    run_id: str
    machines: Machines | None = None


def worker_environment(
    environ: Mapping[str, str], attempt: Attempt, local_rank: int, gpus: Sequence[str], handed: Handed | None = None
) -> dict:
    """All variables of one worker.

    Args:
      environ: the launcher's own.
      attempt: see `Attempt`.
      local_rank: which worker of this machine.
      gpus: this machine's GPUs to share out, as CUDA_VISIBLE_DEVICES has them; none: the workers compute on the CPU.
      handed: memory that outlives it; None: there is none.
    """
    kept = {name: value for name, value in environ.items() if name not in _FOREIGN}
    rank = str(attempt.first_rank + local_rank)
    job = {
        "MASTER_ADDR": attempt.address,
        "MASTER_PORT": str(attempt.port),
        "WORLD_SIZE": str(attempt.world_size),
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(attempt.local_size),
        "NODE_RANK": str(attempt.node_rank),
        "GROUP_RANK": str(attempt.node_rank),
        "GROUP_WORLD_SIZE": str(attempt.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(attempt.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.max_restarts),
        "TORCHELASTIC_RUN_ID": attempt.run_id,
        RESTART_COUNT: str(attempt.restarts),
        MARK: attempt.run_id,
        # Standard output is a pipe here: without this, what a killed worker had printed would be lost.
        "PYTHONUNBUFFERED": "1",
    }
    memory = {} if handed is None else {MEMORY: handed.text()}
    memory |= {} if attempt.machines is None else {MACHINES: attempt.machines.text()}
    return kept | job | memory | _devices(local_rank, attempt.local_size, gpus)


def _devices(local_rank: int, local_size: int, gpus: Sequence[str]) -> dict[str, str]:
    if not gpus:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    # A single worker drives all GPUs of its machine; several get one each.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if local_size == 1 else gpus[local_rank]}


def count_workers(wanted: str, environ: Mapping[str, str]) -> tuple[int, tuple[str, ...]]:
    """How many workers `--nproc-per-node` means here, and the GPUs they share.

    Args:
      wanted: a number, `cpu` (as many as cores), `gpu` (as many as GPUs) or `auto` (GPUs where there are any, else cores).
      environ: the launcher's variables; JAX_PLATFORMS=cpu leaves GPUs alone.

    Raises:
      ConfigError: when it is none of these, there are too few GPUs, or simulated devices are asked for.
    """
    _refuse_simulated(environ)
    gpus = () if wanted == "cpu" else visible_gpus(environ)
    if wanted == "auto":
        wanted = "gpu" if gpus else "cpu"
    if wanted == "gpu":
        if not gpus:
            raise ConfigError(
                "launch: --nproc-per-node gpu: no GPU that JAX could use here (it needs the jax[cuda] package, a visible "
                "device, and JAX_PLATFORMS unset or cuda); use cpu, or a number"
            )
        return len(gpus), gpus
    if wanted == "cpu":
        return os.cpu_count() or 1, ()
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ConfigError(f"launch: --nproc-per-node {wanted}: must be a positive number, auto, cpu or gpu")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and int(wanted) > files // 2:
        raise ConfigError(
            f"launch: --nproc-per-node {wanted}: the launcher reads two pipes of every process and may open {files} files "
            f"(ulimit -n): start {files // 2} or fewer"
        )
    if gpus and int(wanted) > len(gpus):
        raise ConfigError(
            f"launch: --nproc-per-node {wanted}: a process needs a GPU of its own, and {len(gpus)} are visible "
            f"({', '.join(gpus)}); start {len(gpus)} or fewer, or set JAX_PLATFORMS=cpu to compute on the CPU"
        )
    return int(wanted), gpus


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The NVIDIA GPUs that JAX would find, as CUDA_VISIBLE_DEVICES names them. Asking starts nothing."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    if not any(importlib.util.find_spec(plugin) for plugin in _PLUGINS):
        return ()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        # CUDA ignores everything after the first invalid entry; -1 and the empty string hide all.
        return tuple(names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))])
    found = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(str(number) for number in range(len(found)))


def _refuse_simulated(environ: Mapping[str, str]) -> None:
    found = []
    if _FORCED in environ.get("XLA_FLAGS", ""):
        found.append(f"XLA_FLAGS={environ['XLA_FLAGS']}")
    if environ.get("JAX_NUM_CPU_DEVICES", "1") not in ("", "0", "1", "-1"):
        found.append(f"JAX_NUM_CPU_DEVICES={environ['JAX_NUM_CPU_DEVICES']}")
    if found:
        raise ConfigError(
            f"launch: {' and '.join(found)} asks for simulated devices in every process; launched processes have one CPU "
            "device each. Unset it, and choose their number with --nproc-per-node"
        )
