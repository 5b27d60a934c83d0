"""Detects the launcher of this process: a table of launchers, with the variables that each sets and what they mean.

It is read without touching JAX. Variables of several processes that fit no launcher of the table, or are incomplete, are an
error that names them: a process never trains alone by mistake.
"""

import itertools
import json
import os
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonml_jax.compat.processes import sees_others
from axonml_jax.mesh.environment import RUN_ID
from axonml_jax.mesh.join import host_port, in_a_job, outward_address

ALONE = "AXONML_JAX_ALONE"
"""The variable that, set to 1, makes this process no part of any job, whatever others say: for array jobs that sweep."""

PORT = 29500
"""torchrun's default port, for launchers that give the address of process 0 but no port."""

Variables = Mapping[str, str]
Said = str | Callable[[Variables], int | None]
"""A variable's name, or how a number follows from several."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of one process in a launched job.

    Attributes:
      launcher: what described the job: a name of `LAUNCHERS`, or another value of `World.launcher`.
      coordinator: `host:port` of process 0.
      num_processes: processes in the job.
      process_id: which this is.
      local_rank: which this is on its host; None when the launcher does not say.
      local_size: processes on this host; None when the launcher does not say.
    """

    launcher: str
    coordinator: str
    num_processes: int
    process_id: int
    local_rank: int | None = None
    local_size: int | None = None


# --------------------------------------------------------------------------------------------------
# Where process 0 is: a variable with a host or with a list of them, and a port.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """How to find the address of process 0 in a launcher's variables.

    Attributes:
      host: the variable with a host, with `host:port`, or with a list of hosts.
      port: the variable with the port, the port itself, or how it follows.
      first: extracts the host from the variable's value.
      default: the port where that variable is not set.
    """

    host: str
    port: "str | int | Callable[[Variables], int | None]"
    first: Callable[[str], str] = str.strip
    default: int | None = None

    def __call__(self, environ: Variables) -> str | None:
        """The address as `host:port`; None if the variables do not give it."""
        if not environ.get(self.host):
            return None
        host = self.first(environ[self.host])
        if re.fullmatch(r"[^:]+:\d+|\[.*\]:\d+", host):
            return host
        port = self.port(environ) if callable(self.port) else self.port
        if isinstance(port, str):
            port = _port(environ, port) if environ.get(port) else self.default
        return None if port is None else host_port(host.strip("[]"), port)


def lines(text: str) -> list[str]:
    """The entries of a list with one entry per line.

    >>> lines("10.0.0.1\\n10.0.0.2\\n")
    ['10.0.0.1', '10.0.0.2']
    """
    return text.split()


def commas(text: str) -> list[str]:
    """The entries of a comma-separated list.

    >>> commas("a.b, c.d,")
    ['a.b', 'c.d']
    """
    return [each.strip() for each in text.split(",") if each.strip()]


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-010,12],cpu1"), first_host("a1,a2"), first_host("rack[1-2]n[3,4]x")
    ('gpu007', 'a1', 'rack1n3x')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())


def tasks_on_node(tasks_per_node: str, node: str) -> int | None:
    """The number of a Slurm step's tasks on one of its nodes, from variables; None if they do not tell.

    >>> tasks_on_node("4(x2),3", "1"), tasks_on_node("4(x2),3", "2"), tasks_on_node("", "0")
    (4, 3, None)
    """
    node_tasks = re.findall(r"(\d{1,9})(?:\(x(\d{1,6})\))?", tasks_per_node)
    counts = [int(count) for count, times in node_tasks for _ in range(int(times or 1))]
    return counts[int(node)] if _is_number(node) and int(node) < len(counts) else None


def _port_of(job: int) -> int:
    # The upper dynamic ports, as JAX's own cluster detection derives them from a job id.
    return job % 4096 + 61440


def _after_the_store(environ: Variables) -> int | None:
    # PyTorch's torchrun keeps its own store on MASTER_PORT for as long as the job runs.
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _number(environ, "MASTER_PORT", 0) + taken if "MASTER_PORT" in environ else None


def _one_host_of_mpi(environ: Variables) -> str | None:
    if environ["OMPI_COMM_WORLD_SIZE"] != environ["OMPI_COMM_WORLD_LOCAL_SIZE"]:
        return None
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    return f"127.0.0.1:{_port_of(zlib.crc32(job.encode()))}"


def _main_node_of_aws(environ: Variables) -> str | None:
    # Its address is told to the other nodes only: it is this machine.
    return host_port(outward_address() or socket.gethostname(), PORT) if _rank_of_aws(environ) == 0 else None


def _rank_of_aws(environ: Variables) -> int:
    # Counted from the main node, which may be any.
    count, names = int(environ["AWS_BATCH_JOB_NUM_NODES"]), ("NODE_INDEX", "MAIN_NODE_INDEX")
    here, main = (_index(environ, f"AWS_BATCH_JOB_{name}", "AWS_BATCH_JOB_NUM_NODES", count) for name in names)
    return (here - main) % count


def _rank_of_xpk(environ: Variables) -> int:
    per_job = int(environ["PROCESSES_IN_JOB"])
    return int(environ["JOB_INDEX"]) * per_job + _index(environ, "JOB_COMPLETION_INDEX", "PROCESSES_IN_JOB", per_job)


def _hosts_of_tpu(environ: Variables) -> list[str]:
    """The hosts of a TPU slice, in the order of their processes."""
    if path := environ.get("TPU_PROCESS_ADDRESSES_PATH"):
        try:
            return commas(Path(path).read_text("utf-8"))
        except (OSError, UnicodeError) as error:
            raise ValueError(f"tpu: TPU_PROCESS_ADDRESSES_PATH={path}: {error}") from error
    return commas(environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", "")))


def _first_of_tpu(environ: Variables) -> str | None:
    # The coordinator of slices is the machine of process 0, on a port of its own; 8482 is JAX's.
    hosts = commas(environ.get("MEGASCALE_COORDINATOR_ADDRESS", "")) or _hosts_of_tpu(environ)
    return f"{hosts[0].split(':')[0]}:{_port(environ, 'JAX_COORDINATOR_PORT', 8482)}" if hosts else None


def _size_of_tpu(environ: Variables) -> int:
    return _number(environ, "MEGASCALE_NUM_SLICES", 1) * len(_hosts_of_tpu(environ))


def _rank_of_tpu(environ: Variables) -> int:
    hosts, slices = len(_hosts_of_tpu(environ)), _number(environ, "MEGASCALE_NUM_SLICES", 1)
    if slices > 1 and not environ.get("MEGASCALE_SLICE_ID"):
        raise ValueError(f"tpu: MEGASCALE_SLICE_ID missing beside MEGASCALE_NUM_SLICES={slices}")
    number = _index(environ, "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES", slices)
    return number * hosts + _index(environ, "TPU_WORKER_ID", "the hosts of its slice", hosts)


def _hosts_of_sagemaker(environ: Variables) -> list[str]:
    try:
        hosts = json.loads(environ["SM_HOSTS"])
    except ValueError:
        hosts = None
    if not hosts or not isinstance(hosts, list):
        raise ValueError(f"sagemaker: SM_HOSTS={environ['SM_HOSTS']!r} is no JSON list of hosts")
    return [str(host) for host in hosts]


def _rank_of_sagemaker(environ: Variables) -> int:
    hosts, here = _hosts_of_sagemaker(environ), environ["SM_CURRENT_HOST"]
    if here not in hosts:
        raise ValueError(f"sagemaker: SM_CURRENT_HOST={here!r} is none of SM_HOSTS={environ['SM_HOSTS']}")
    return hosts.index(here)


def _number(environ: Variables, name: str, default: int) -> int:
    said = environ.get(name) or str(default)
    if not _is_number(said):
        raise ValueError(f"{name}={said!r}: must be a non-negative integer")
    return int(said)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20  # of what has more digits Python makes no integer by default


def _index(environ: Variables, name: str, of: str, count: int) -> int:
    """Read an index from a variable and check that it is below a count."""
    if (number := _number(environ, name, 0)) >= count:
        raise ValueError(f"{name}={number} is impossible: {of} are {count}, and it counts from 0")
    return number


def _port(environ: Variables, name: str, default: int = 0) -> int:
    if not 0 < (port := _number(environ, name, default)) < 2**16:
        raise ValueError(f"{name}={environ.get(name)!r}: a port must be a number from 1 to 65535")
    return port


MASTER = Address("MASTER_ADDR", "MASTER_PORT")
TORCH = Address("MASTER_ADDR", _after_the_store)
JAX = Address("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", default=1234)  # MaxText's port
MAXTEXT = Address("JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT", default=1234)


# --------------------------------------------------------------------------------------------------
# The table. Whoever stands above is asked first: a launcher inside another one is the one that counts.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables of one launcher and what they mean.

    Attributes:
      name: as `World.launcher` says it.
      marks: sets of variables; where all of one set are there, this launcher is asked.
      unless: variables that mean another one; where one of them is there, this one is not asked.
      size: how many processes there are.
      rank: which of them this is.
      needs: further variables without which nothing can be said.
      addresses: where process 0 is; the first that says it.
      asks: the variables to name where none says it.
      local_rank, local_size: the same as `rank` and `size`, on this host.
      innermost: whether it has started this process itself: with a size of 1 the process is alone. A size of 1 of any other
        launcher may be one allocation, in which a launcher further down has started several processes.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    unless: tuple[str, ...] = ()
    size: Said
    rank: Said
    needs: tuple[str, ...] = ()
    addresses: tuple[Callable[[Variables], str | None], ...] = (MASTER, JAX)
    asks: tuple[str, ...] = ("MASTER_ADDR", "MASTER_PORT")
    local_rank: str | None = None
    local_size: Said | None = None
    innermost: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The variables that are read."""
        said = (self.size, self.rank, *self.needs, self.local_rank, self.local_size)
        return tuple(dict.fromkeys(each for each in said if isinstance(each, str)))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The variables that hold numbers."""
        return tuple(name for name in self.names if name not in _TEXTS)

    def speaks(self, environ: Variables) -> bool:
        """Whether this launcher's variables are set."""
        told = any(all(name in environ for name in each) for each in self.marks)
        return told and not any(name in environ for name in self.unless)


def _torchrun(*marks: tuple[str, ...], unless: tuple[str, ...] = ()) -> Launcher:
    return Launcher(
        name="torchrun", marks=marks, unless=unless, size="WORLD_SIZE", rank="RANK", addresses=(TORCH,),
        local_rank="LOCAL_RANK", local_size="LOCAL_WORLD_SIZE", innermost=True,
    )  # fmt: skip


def _jax(*marks: tuple[str, ...]) -> Launcher:
    return Launcher(
        name="jax", marks=marks, size="JAX_NUM_PROCESSES", rank="JAX_PROCESS_ID", addresses=(JAX, MAXTEXT, MASTER),
        asks=("JAX_COORDINATOR_ADDRESS",), innermost=True,
    )  # fmt: skip


def _of_mpi(name: str, size: str, rank: str, local_rank: str, local_size: str | None = None) -> Launcher:
    marks = ((size,), (rank,))
    return Launcher(name=name, marks=marks, size=size, rank=rank, local_rank=local_rank, local_size=local_size)


_TEXTS = ("SM_HOSTS", "SM_CURRENT_HOST")
_MPI = tuple(f"OMPI_COMM_WORLD_{word}" for word in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
_NODES = ("NNODES", "NODE_RANK", JAX.host, MAXTEXT.host)
_TPU = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH")

LAUNCHERS: tuple[Launcher, ...] = (
    _torchrun(("RANK",)),
    # Kubeflow Trainer's runtime for JAX, and scripts that say the same.
    _jax(("JAX_NUM_PROCESSES",), ("JAX_PROCESS_ID",)),
    Launcher(
        name="xpk", marks=(("JAX_PROCESS_COUNT",), ("JOB_INDEX", "PROCESSES_IN_JOB")), size="JAX_PROCESS_COUNT",
        rank=_rank_of_xpk,
        needs=("JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX"), addresses=(JAX, MASTER), asks=(JAX.host,),
    ),
    # Its WORLD_SIZE counts GPUs, and nobody says RANK.
    Launcher(
        name="runpod",
        marks=(("PRIMARY_ADDR", "NUM_NODES"), ("PRIMARY_ADDR", "NODE_RANK"), ("NUM_TRAINERS", "NODE_RANK")),
        size="NUM_NODES", rank="NODE_RANK", addresses=(Address("PRIMARY_ADDR", "PRIMARY_PORT"), MASTER),
        asks=("PRIMARY_ADDR", "PRIMARY_PORT"),
    ),
    # A forgotten RANK would make every process train alone.
    _torchrun(("WORLD_SIZE",), unless=("JOB_COMPLETION_INDEX", "PRIMARY_ADDR")),
    Launcher(
        name="openmpi", marks=((_MPI[0],), (_MPI[1],)), size=_MPI[0], rank=_MPI[1], local_rank=_MPI[2],
        local_size=_MPI[3], needs=_MPI[2:],
        addresses=(MASTER, JAX, Address("AZ_BATCH_MASTER_NODE", PORT), _one_host_of_mpi), innermost=True,
    ),
    # SLURM_NTASKS alone only says what sbatch reserved; a step's variables come from srun.
    Launcher(
        name="slurm", marks=(("SLURM_STEP_NUM_TASKS",), ("SLURM_STEP_NODELIST",)), size="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        needs=("SLURM_LOCALID", "SLURM_JOB_ID"), asks=("SLURM_STEP_NODELIST",), local_rank="SLURM_LOCALID",
        addresses=(MASTER, JAX, Address("SLURM_STEP_NODELIST", lambda env: _port_of(int(env["SLURM_JOB_ID"])), first_host)),
        local_size=lambda env: tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", "")),
    ),
    # They say everything but where process 0 is, which their -genv and --env can add.
    _of_mpi("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    _of_mpi("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    _of_mpi("mvapich", *(f"MV2_COMM_WORLD_{word}" for word in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    _of_mpi("mpich", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # xpk on GPUs, MaxText's scripts.
    Launcher(
        name="xpk", marks=tuple(itertools.combinations(_NODES, 2)), size="NNODES", rank="NODE_RANK",
        addresses=(JAX, MAXTEXT, MASTER), asks=(JAX.host,),
    ),
    # A TPU slice on Kubernetes, and slices beside it, as JAX's own detection counts them.
    Launcher(
        name="tpu", marks=tuple((name,) for name in _TPU), size=_size_of_tpu, rank=_rank_of_tpu,
        needs=("TPU_WORKER_ID",), addresses=(JAX, MASTER, _first_of_tpu), asks=_TPU[:1],
    ),
    Launcher(
        name="skypilot", marks=(("SKYPILOT_NUM_NODES",), ("SKYPILOT_NODE_RANK",)), size="SKYPILOT_NUM_NODES",
        rank="SKYPILOT_NODE_RANK", asks=("SKYPILOT_NODE_IPS",),
        addresses=(MASTER, JAX, Address("SKYPILOT_NODE_IPS", PORT, lambda text: next(iter(lines(text)), ""))),
    ),
    Launcher(
        name="dstack", marks=(("DSTACK_NODES_NUM",), ("DSTACK_NODE_RANK",)), size="DSTACK_NODES_NUM",
        rank="DSTACK_NODE_RANK", asks=("DSTACK_MASTER_NODE_IP",),
        addresses=(MASTER, JAX, Address("DSTACK_MASTER_NODE_IP", PORT)),
    ),
    Launcher(
        name="aws_batch", marks=(("AWS_BATCH_JOB_NUM_NODES",), ("AWS_BATCH_JOB_NODE_INDEX",)),
        size="AWS_BATCH_JOB_NUM_NODES", needs=("AWS_BATCH_JOB_NODE_INDEX",), rank=_rank_of_aws,
        addresses=(MASTER, JAX, Address("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", PORT), _main_node_of_aws),
        asks=("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",),
    ),
    Launcher(
        name="sagemaker", marks=(("SM_HOSTS",), ("SM_CURRENT_HOST",)),
        size=lambda env: len(_hosts_of_sagemaker(env)), rank=_rank_of_sagemaker, needs=("SM_HOSTS", "SM_CURRENT_HOST"),
        addresses=(MASTER, JAX, lambda env: f"{_hosts_of_sagemaker(env)[0]}:{PORT}"),
    ),
    Launcher(
        name="leaderworkerset", marks=(("LWS_GROUP_SIZE",), ("LWS_WORKER_INDEX",)), size="LWS_GROUP_SIZE",
        rank="LWS_WORKER_INDEX", asks=("LWS_LEADER_ADDRESS",),
        addresses=(MASTER, JAX, Address("LWS_LEADER_ADDRESS", PORT)),
    ),
    Launcher(name="kubernetes", marks=(("JOB_COMPLETION_INDEX",),), size="WORLD_SIZE", rank="JOB_COMPLETION_INDEX"),
    # An address without any launcher.
    _torchrun(("MASTER_ADDR",), ("MASTER_PORT",), unless=("PRIMARY_ADDR",)),
    _jax((JAX.host,), (MAXTEXT.host,)),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Counts of processes and machines that no launcher of the table has: a process that is alone beside one is so by mistake.
# --------------------------------------------------------------------------------------------------

_COUNTS = ("PET_NNODES", "NNODES", "NUM_NODES", "MEGASCALE_NUM_SLICES", "PALS_LOCAL_SIZE", "AZUREML_NODE_COUNT")
_RANKS = ("NODE_RANK", "PET_NODE_RANK", "MEGASCALE_SLICE_ID", "TPU_WORKER_ID", "PALS_RANKID", "PMIX_RANK")
_PROCESSES = ("PMI_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_SIZE")
_HINTS = {"PET_NNODES": "`axonml-jax launch` reads the PET_ variables: start the program with it"}


def signs(environ: Variables) -> list[str]:
    """Variables, with values, that tell of several processes but not enough for any of `LAUNCHERS`.

    >>> signs({"PET_NNODES": "2", "NNODES": "1", "VC_WORKER_NUM": "3"})
    ['PET_NNODES=2', 'VC_WORKER_NUM=3']
    """
    found = [name for name in _COUNTS if environ.get(name, "") not in ("", "0", "1", "1:1")]
    found += [name for name in _RANKS if environ.get(name, "0").strip("0")]
    volcano = [name for name in environ if re.fullmatch(r"VC_\w+_NUM", name) and _is_number(environ[name])]
    found += volcano if sum(int(environ[name]) for name in volcano) > 1 else []
    of_tensorflow = {name: _hosts_of_tensorflow(environ.get(name, "")) for name in ("CLUSTER_SPEC", "TF_CONFIG")}
    more = [f"{name} with {count} processes" for name, count in of_tensorflow.items() if count > 1]
    return [*(f"{name}={environ[name]}" for name in found), *more]


def _hosts_of_tensorflow(text: str) -> int:
    """The number of processes in TensorFlow's cluster variables; 0 if they hold something else."""
    try:
        return sum(len(hosts) for hosts in json.loads(text)["cluster"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0


def reserved(environ: Variables) -> str:
    """Describe reserved Slurm tasks that this process does not use; empty if it uses them or has none."""
    tasks, used = environ.get("SLURM_NTASKS", ""), environ.keys() & {"SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"}
    if used or not _is_number(tasks) or int(tasks) < 2 or alone_asked(environ):
        return ""
    return (
        f"SLURM_NTASKS={tasks}: the job has reserved {tasks} tasks, but this process is no step of srun and runs alone; "
        f"start the program with srun to use them, or set {ALONE}=1 if one process is meant"
    )


def ray_context() -> Any:
    """The Ray Train context of this process, if it is such a worker; else None. Does not import Ray."""
    ray = sys.modules.get("ray")
    if ray is None or "ray.train" not in sys.modules or not ray.is_initialized():
        return None
    try:
        context = ray.train.get_context()
        return context if isinstance(context.get_world_size(), int) else None
    except (RuntimeError, AttributeError):  # a driver, or an actor or a task that is no worker of Ray Train
        return None


def alone_asked(environ: Variables) -> bool:
    """Whether `AXONML_JAX_ALONE` asks this process to run alone.

    Raises:
      ValueError: where it says neither yes nor no.
    """
    said = environ.get(ALONE, "0")
    if said not in ("", "0", "1"):
        raise ValueError(f"{ALONE}={said!r}: 1 runs this process alone, 0 does not")
    return said == "1"


# --------------------------------------------------------------------------------------------------
# One of several processes that never called `ax.init` would train alone, each on its own copy, and nobody would notice.
# --------------------------------------------------------------------------------------------------

_placed = threading.Event()


def mark_placed() -> None:
    """Record that this process knows its place: `ax.init` was called, or it simulates a world of its own."""
    _placed.set()


def refuse_unjoined() -> None:
    """Refuse to continue in one of several launched processes that has not joined the others nor simulates a world.

    Raises:
      RuntimeError: saying which process this is, who has started it, and how it joins.
      ValueError: see `launch_environment`.
    """
    if _placed.is_set() or in_a_job():
        return
    if not alone_asked(os.environ) and (context := ray_context()) is not None:
        who, process, count = "ray", context.get_world_rank(), context.get_world_size()
    elif (launch := launch_environment(os.environ)) is not None:
        who, process, count = launch.launcher, launch.process_id, launch.num_processes
    else:
        return
    if count > 1 and not sees_others():
        who = "axonml-jax launch" if who == "torchrun" and RUN_ID in os.environ else who
        raise RuntimeError(
            f"this is process {process} of {count} that {who} has started, and it has not joined the others: every process "
            f"would train alone. Call ax.init() before the first JAX operation, or set {ALONE}=1 to run each process alone"
        )


# --------------------------------------------------------------------------------------------------
# Reading the table.
# --------------------------------------------------------------------------------------------------


def launch_environment(
    environ: Variables, coordinator: str | None = None, num_processes: int | None = None
) -> LaunchEnvironment | None:
    """The launched job that `environ` describes, or None for a process alone.

    Args:
      environ: environment variables.
      coordinator: `host:port` where the launcher's variables do not say it (Kubernetes, Open MPI on several hosts).
      num_processes: number of processes where they do not say it (Kubernetes without WORLD_SIZE).

    Raises:
      ValueError: naming every variable that is missing, malformed or contradicts another, or that counts several processes
        without saying the rest.

    >>> launch_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}).process_id
    1
    """
    if alone_asked(environ):
        return None
    for launcher in LAUNCHERS:
        if launcher.speaks(environ):
            launch = _read(launcher, environ, coordinator, num_processes)
            if launch is not None:
                _check_ranges(launcher, launch, environ)
                return launch
    if coordinator is None and (found := signs(environ)):
        raise ValueError(
            f"{', '.join(found)}: this is one of several processes, but no variable that is known says which, or where "
            f"process 0 is; {_remedy(environ)}"
        )
    return None


def _read(
    launcher: Launcher, environ: Variables, coordinator: str | None, num_processes: int | None
) -> LaunchEnvironment | None:
    """The job as a launcher's variables describe it; None for a job of one process, unless the launcher is `innermost`."""
    wrong = [f"{name}={environ[name]!r}" for name in launcher.numbers if not _is_number(environ.get(name, "0"))]
    if wrong:
        raise ValueError(f"{launcher.name}: {', '.join(wrong)}: must be non-negative integers")
    size = _value(launcher.size, environ)
    if size == 1 and not launcher.innermost:
        _require_first(launcher, environ)
        return None
    size = num_processes if size is None else size
    needed = dict.fromkeys([*([] if size else [launcher.size]), launcher.rank, *launcher.needs])
    missing = [name for name in needed if isinstance(name, str) and name not in environ]
    try:
        where = coordinator or next(filter(None, (each(environ) for each in launcher.addresses)), None)
        missing += [] if where else launcher.asks
    except KeyError:  # it follows from what is missing
        where = None
    if missing or where is None:
        raise ValueError(_incomplete(launcher, environ, missing))
    rank, *local = (_value(each, environ) for each in (launcher.rank, launcher.local_rank, launcher.local_size))
    assert size is not None and rank is not None
    return LaunchEnvironment(launcher.name, where, size, rank, *local)


def _require_first(launcher: Launcher, environ: Variables) -> None:
    """Refuse a rank above 0 of a single process; the index of a Kubernetes array job may be any."""
    if launcher.name != "kubernetes" and (rank := _value(launcher.rank, environ)):
        raise ValueError(
            f"{launcher.name}: process {rank} of 1 is impossible ({_listed(environ, launcher.names)}); set {ALONE}=1 to run "
            "each process alone"
        )


def _value(said: Said | None, environ: Variables) -> int | None:
    """A number from variables; None if they do not give it."""
    try:
        return None if said is None else said(environ) if callable(said) else int(environ[said])
    except KeyError:
        return None


def _incomplete(launcher: Launcher, environ: Variables, missing: Sequence[str]) -> str:
    names = dict.fromkeys([*launcher.names, *itertools.chain.from_iterable(launcher.marks)])
    present = dict.fromkeys([*(f"{name}={environ[name]}" for name in names if name in environ), *signs(environ)])
    return f"{launcher.name}: {', '.join(missing)} missing beside {', '.join(present)}; {_remedy(environ, missing)}"


def _remedy(environ: Variables, names: Sequence[str] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")) -> str:
    hints = [f"{hint}, or " for name, hint in _HINTS.items() if name in environ]
    return (
        f"{''.join(hints)}set {', '.join(names)} (they count processes), or pass coordinator='host:port', num_processes= and "
        f"process_id= to ax.init; to run each process alone, pass num_processes=1 or set {ALONE}=1"
    )


def _check_ranges(launcher: Launcher, launch: LaunchEnvironment, environ: Variables) -> None:
    """Refuse impossible ranks, and contradictions with other launchers' variables."""
    wrong = []
    if launch.process_id >= launch.num_processes:
        wrong.append(f"process {launch.process_id} of {launch.num_processes}")
    here = launch.num_processes if launch.local_size is None else launch.local_size
    if launch.local_rank is not None and launch.local_rank >= here:
        wrong.append(f"local process {launch.local_rank} of {here}")
    if launch.local_size is not None and launch.local_size > launch.num_processes:
        wrong.append(f"{launch.local_size} processes on this host out of {launch.num_processes}")
    if wrong:
        said = _listed(environ, launcher.names)
        raise ValueError(f"{launcher.name}: {' and '.join(wrong)} is impossible ({said}); ranks count processes from 0")
    # torchrun may itself run under mpirun (one per host); then the numbers differ rightly.
    if launcher.name == "torchrun" and _MPI[1] in environ and "TORCHELASTIC_RUN_ID" not in environ:
        _require_equal(environ, ("RANK", _MPI[1]), ("WORLD_SIZE", _MPI[0]))
    others = [name for name in _PROCESSES if environ.get(name, "1") not in ("1", str(launch.num_processes))]
    if others and not launcher.innermost:
        raise ValueError(
            f"{_listed(environ, others)} contradicts {launcher.name}, which counts {launch.num_processes} "
            f"({_listed(environ, launcher.names)}): one has started the other; {_remedy(environ)}"
        )


def _listed(environ: Variables, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _require_equal(environ: Variables, *pairs: tuple[str, str]) -> None:
    if any(environ[name] != environ.get(other) for name, other in pairs):
        said = ", ".join(f"{name}={environ.get(name)}" for pair in pairs for name in pair)
        raise ValueError(f"the launch variables contradict each other: {said}; unset the pair that is not meant")
