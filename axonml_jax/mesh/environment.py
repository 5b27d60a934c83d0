"""What a launcher tells its processes by environment variables: ranks, addresses, folders, whose copies they keep."""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# --------------------------------------------------------------------------------------------------
# What launchers write into the environment, read without touching JAX: torchrun, Open MPI, Slurm, Kubernetes.
#
# All of them count processes. A launcher inside another (torchrun inside srun) is the one that counts.
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
    """One process's place in a launched job.

    Attributes:
      launcher: `torchrun`, `openmpi`, `slurm` or `kubernetes`.
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


def launch_environment(
    environ: Mapping[str, str], coordinator: str | None = None, num_processes: int | None = None
) -> LaunchEnvironment | None:
    """The launched job that `environ` describes, or None outside of one.

    Args:
      environ: environment variables.
      coordinator: `host:port` where the launcher's variables do not say it (Kubernetes, Open MPI on several hosts).
      num_processes: number of processes where they do not say it (Kubernetes without WORLD_SIZE).

    Raises:
      ValueError: naming every variable that is missing, malformed or contradicts another.

    >>> launch_environment({"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}).process_id
    1
    """
    for is_present, read in _LAUNCHERS:
        if is_present(environ):
            launch = read(environ, coordinator, num_processes)
            _check_ranges(launch, environ)
            return launch
    return None


def _torchrun(environ, coordinator, num_processes):
    needed = ["WORLD_SIZE", "RANK"] + ([] if coordinator else ["MASTER_ADDR", "MASTER_PORT"])
    _require("torchrun", environ, needed)
    values = _integers("torchrun", environ, ["WORLD_SIZE", "RANK", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    # torchrun may itself run under mpirun (one per host); then the numbers differ rightly.
    if "OMPI_COMM_WORLD_RANK" in environ and "TORCHELASTIC_RUN_ID" not in environ:
        _require_equal(environ, ("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if not coordinator:
        # PyTorch's torchrun keeps its own store on MASTER_PORT for as long as the job runs.
        taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        coordinator = f"{environ['MASTER_ADDR']}:{values['MASTER_PORT'] + taken}"
    return LaunchEnvironment(
        "torchrun",
        coordinator,
        values["WORLD_SIZE"],
        values["RANK"],
        values.get("LOCAL_RANK"),
        values.get("LOCAL_WORLD_SIZE"),
    )


def _openmpi(environ, coordinator, num_processes):
    names = [f"OMPI_COMM_WORLD_{word}" for word in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")]
    _require("mpirun", environ, names)
    values = _integers("mpirun", environ, names)
    size, rank, local_rank, local_size = (values[name] for name in names)
    coordinator = coordinator or _given_coordinator(environ)
    if coordinator is None and size != local_size:
        raise ValueError(
            f"mpirun with {size} processes, {local_size} of them on this host: the variables do not say where process "
            "0 is; add `-x MASTER_ADDR=<host of process 0> -x MASTER_PORT=<free port>`, or pass coordinator='host:port'"
        )
    job = environ.get("PMIX_NAMESPACE", environ.get("OMPI_MCA_ess_base_jobid", ""))
    coordinator = coordinator or f"127.0.0.1:{_port(zlib.crc32(job.encode()))}"
    return LaunchEnvironment("openmpi", coordinator, size, rank, local_rank, local_size)


def _slurm(environ, coordinator, num_processes):
    names = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"]
    coordinator = coordinator or _given_coordinator(environ)
    _require("srun", environ, names + ([] if coordinator else ["SLURM_STEP_NODELIST"]))
    values = _integers("srun", environ, names)
    host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    return LaunchEnvironment(
        "slurm",
        coordinator or f"{host}:{_port(values['SLURM_JOB_ID'])}",
        values["SLURM_STEP_NUM_TASKS"],
        values["SLURM_PROCID"],
        values["SLURM_LOCALID"],
        tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), environ.get("SLURM_NODEID", "")),
    )


def _kubernetes(environ, coordinator, num_processes):
    values = _integers("a Kubernetes indexed job", environ, ["JOB_COMPLETION_INDEX", "WORLD_SIZE"])
    coordinator = coordinator or _given_coordinator(environ)
    num_processes = num_processes or values.get("WORLD_SIZE")
    if coordinator is None or num_processes is None:
        missing = [] if coordinator else ["coordinator='<host of index 0>:<port>' (or MASTER_ADDR and MASTER_PORT)"]
        missing += [] if num_processes else ["num_processes=<completions of the job> (or WORLD_SIZE)"]
        raise ValueError(
            f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']}: a Kubernetes indexed job does not tell its "
            f"processes the rest; pass {' and '.join(missing)}, or num_processes=1 to run each alone"
        )
    return LaunchEnvironment("kubernetes", coordinator, num_processes, values["JOB_COMPLETION_INDEX"])


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-010,12],cpu1"), first_host("a1,a2"), first_host("rack[1-2]n[3,4]x")
    ('gpu007', 'a1', 'rack1n3x')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first is not None
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first.group())


def tasks_on_node(tasks_per_node: str, node: str) -> int | None:
    """A Slurm step's tasks on one of its nodes, as its variables say; None where they do not.

    >>> tasks_on_node("4(x2),3", "1"), tasks_on_node("4(x2),3", "2"), tasks_on_node("", "0")
    (4, 3, None)
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node)
    counts = [int(count) for count, times in found for _ in range(int(times or 1))]
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


_LAUNCHERS: tuple[tuple[Callable, Callable], ...] = (
    # A forgotten RANK would make every process train alone: MASTER_ADDR without any launcher is refused too.
    (lambda env: "RANK" in env or ("WORLD_SIZE" in env and "JOB_COMPLETION_INDEX" not in env), _torchrun),
    (lambda env: "OMPI_COMM_WORLD_SIZE" in env, _openmpi),
    # SLURM_NTASKS alone only says what sbatch reserved; a step's variables come from srun.
    (lambda env: "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env, _slurm),
    (lambda env: "JOB_COMPLETION_INDEX" in env, _kubernetes),
    (lambda env: "MASTER_ADDR" in env or "MASTER_PORT" in env, _torchrun),
)


def _given_coordinator(environ):
    return (
        f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}" if {"MASTER_ADDR", "MASTER_PORT"} <= set(environ) else None
    )


def _port(number):
    # The upper dynamic ports, as JAX's own cluster detection derives them from a job id.
    return number % 4096 + 61440


def _require(launcher, environ, names):
    missing = [name for name in names if name not in environ]
    if missing:
        present = [f"{name}={environ[name]}" for name in names if name in environ]
        raise ValueError(
            f"{launcher}: {', '.join(missing)} missing beside {', '.join(present) or 'MASTER_ADDR or MASTER_PORT'}; "
            "set all of them (they count processes), or unset them to run alone"
        )


def _integers(launcher, environ, names):
    wrong = [f"{name}={environ[name]!r}" for name in names if name in environ and not environ[name].isdecimal()]
    if wrong:
        raise ValueError(f"{launcher}: {', '.join(wrong)}: must be non-negative integers")
    return {name: int(environ[name]) for name in names if name in environ}


def _require_equal(environ, *pairs):
    if any(environ[name] != environ.get(other) for name, other in pairs):
        said = ", ".join(f"{name}={environ.get(name)}" for pair in pairs for name in pair)
        raise ValueError(f"the launch variables contradict each other: {said}; unset the pair that is not meant")


def _check_ranges(launch, environ):
    wrong = []
    if launch.process_id >= launch.num_processes:
        wrong.append(f"process {launch.process_id} of {launch.num_processes}")
    if None not in (launch.local_rank, launch.local_size) and launch.local_rank >= launch.local_size:
        wrong.append(f"local process {launch.local_rank} of {launch.local_size}")
    if launch.local_size is not None and launch.local_size > launch.num_processes:
        wrong.append(f"{launch.local_size} processes on this host out of {launch.num_processes}")
    if wrong:
        names = _NAMES[launch.launcher]
        said = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise ValueError(
            f"{launch.launcher}: {' and '.join(wrong)} is impossible ({said}); ranks count processes from 0"
        )


_NAMES = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": tuple(f"OMPI_COMM_WORLD_{word}" for word in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")),
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "kubernetes": ("WORLD_SIZE", "JOB_COMPLETION_INDEX"),
}


# --------------------------------------------------------------------------------------------------
# What the launcher hands to a process: memory that stays when the process has ended, as open files without a name.
#
# Nobody else can open them, and the kernel frees them when the launcher and all its processes have ended, however they
# ended.
# --------------------------------------------------------------------------------------------------

MEMORY = "AXONML_JAX_MEMORY"
"""The variable that says which file is whose."""

NAME = "axonml_jax state"
"""How the names begin that the kernel shows for these files."""

GENERATIONS = 2
"""Copies of one process's state: the newest whole one stays while another is written."""


@dataclass(frozen=True)
class Handed:
    """The files of one process, each `GENERATIONS` descriptors.

    Attributes:
      own: for its own state.
      others: for the states of processes on other machines, by their rank.
    """

    own: tuple[int, ...]
    others: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def all(self) -> tuple[int, ...]:
        """Every descriptor."""
        return (*self.own, *(each for files in self.others.values() for each in files))

    def text(self) -> str:
        """As the variable says it.

        >>> Handed((5, 6), {3: (7, 8)}).text()
        'own=5,6 3=7,8'
        """
        files = {"own": self.own, **self.others}
        return " ".join(f"{whose}={','.join(map(str, each))}" for whose, each in files.items())

    @staticmethod
    def parse(text: str) -> "Handed":
        """The inverse of `text`.

        >>> Handed.parse('own=5,6 3=7,8')
        Handed(own=(5, 6), others={3: (7, 8)})
        """
        files = {whose: tuple(map(int, each.split(","))) for whose, _, each in (p.partition("=") for p in text.split())}
        return Handed(files.pop("own"), {int(rank): each for rank, each in files.items()})


def handed(environ: Mapping[str, str] = os.environ) -> Handed | None:
    """What this process was handed; None without a launcher that restarts it, and in a child that has the variable only."""
    text = environ.get(MEMORY)
    found = Handed.parse(text) if text else None
    return found if found is not None and all(map(_is_handed, found.all)) else None


def _is_handed(handle: int) -> bool:
    """Whether an open file is such memory: under its number a child may have any other file."""
    try:
        return os.readlink(f"/proc/self/fd/{handle}").startswith(f"/memfd:{NAME}")
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------
# Who keeps whose copy: a process of the next machine, so that the loss of one machine loses no state.
# --------------------------------------------------------------------------------------------------


def keepers(sizes: Sequence[int]) -> tuple[int | None, ...]:
    """By rank, the process that keeps a copy of its state; None on a single machine, which would lose both together.

    Args:
      sizes: processes of every machine, in the order of ranks.

    >>> keepers([2, 2]), keepers([2, 1]), keepers([4])
    ((2, 3, 0, 1), (2, 2, 0), (None, None, None, None))
    """
    if len(sizes) < 2:
        return (None,) * sum(sizes)
    first = [sum(sizes[:node]) for node in range(len(sizes))]
    found = []
    for node, size in enumerate(sizes):
        following = (node + 1) % len(sizes)
        found += [first[following] + local % sizes[following] for local in range(size)]
    return tuple(found)


def kept_by(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The processes whose copies one process keeps.

    >>> kept_by(2, [2, 1]), kept_by(0, [2, 2])
    ((0, 1), (2,))
    """
    return tuple(other for other, keeper in enumerate(keepers(sizes)) if keeper == rank)


def to_send(sizes: Sequence[int], shards: Sequence[str]) -> tuple[int | None, ...]:
    """By rank, the keeper that it sends its state to; None where a process of another machine has the same shards anyway.

    Args:
      sizes: processes of every machine.
      shards: what every process holds, by rank; the same text means the same parts of the same arrays.

    >>> to_send([1, 1], ["a", "a"]), to_send([2, 2], ["a", "b", "a", "c"])
    ((None, None), (None, 3, None, 1))
    """
    node = [node for node, size in enumerate(sizes) for _ in range(size)]
    elsewhere = [
        any(shards[other] == shards[rank] and node[other] != node[rank] for other in range(len(node)))
        for rank in range(len(node))
    ]
    return tuple(None if elsewhere[rank] else keeper for rank, keeper in enumerate(keepers(sizes)))
