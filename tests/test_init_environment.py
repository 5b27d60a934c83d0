"""Launch variables: every launcher's table, and what is refused (no JAX involved)."""

import pytest

from axonml_jax.mesh.init import describe_launch
from axonml_jax.mesh.launchers import LaunchEnvironment, first_host, launch_environment

TORCHRUN = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3"}
MPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in (("SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}
ONE_HOST_MPI = MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
ADDRESS = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}

READ = {
    "alone": ({}, {}, None),
    "sbatch without srun": ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, {}, None),
    "torchrun": (TORCHRUN, {}, ("torchrun", "node0:29500", 4, 3, None, None)),
    "torchrun, all variables": (
        TORCHRUN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {},
        ("torchrun", "node0:29500", 4, 3, 1, 2),
    ),
    "torchrun keeps its store on MASTER_PORT": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
        {},
        ("torchrun", "node0:29501", 4, 3, None, None),
    ),
    "torchrun with a coordinator": (
        {"WORLD_SIZE": "4", "RANK": "3"},
        {"coordinator": "c:1"},
        ("torchrun", "c:1", 4, 3, None, None),
    ),
    "torchrun inside srun": (TORCHRUN | SLURM, {}, ("torchrun", "node0:29500", 4, 3, None, None)),
    "torchrun inside mpirun": (
        TORCHRUN | MPI | {"TORCHELASTIC_RUN_ID": "x", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {},
        ("torchrun", "node0:29500", 4, 3, None, None),
    ),
    "mpirun on one host": (
        ONE_HOST_MPI | {"PMIX_NAMESPACE": "prterun-h-1@1"},
        {},
        ("openmpi", "127.0.0.1:62760", 4, 3, 3, 4),
    ),
    "mpirun on two hosts": (MPI | ADDRESS, {}, ("openmpi", "node0:29500", 4, 3, 1, 2)),
    "mpirun with a coordinator": (MPI, {"coordinator": "c:1"}, ("openmpi", "c:1", 4, 3, 1, 2)),
    "mpirun inside Slurm": (SLURM | MPI | ADDRESS, {}, ("openmpi", "node0:29500", 4, 3, 1, 2)),
    "srun": (SLURM, {}, ("slurm", "gpu007:61441", 8, 5, 1, None)),
    "srun, with the tasks of every node": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "6,2", "SLURM_NODEID": "1"},
        {},
        ("slurm", "gpu007:61441", 8, 5, 1, 2),
    ),
    "srun with an address": (SLURM | ADDRESS, {}, ("slurm", "node0:29500", 8, 5, 1, None)),
    "kubernetes": (
        {"JOB_COMPLETION_INDEX": "2"},
        {"coordinator": "job-0.svc:1234", "num_processes": 3},
        ("kubernetes", "job-0.svc:1234", 3, 2, None, None),
    ),
    "kubernetes with an address": (
        {"JOB_COMPLETION_INDEX": "2"} | ADDRESS,
        {"num_processes": 3},
        ("kubernetes", "node0:29500", 3, 2, None, None),
    ),
    "kubernetes, all by variables": (
        {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"} | ADDRESS,
        {},
        ("kubernetes", "node0:29500", 3, 2, None, None),
    ),
}

REFUSED = {
    "RANK forgotten": ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, {}, ["RANK missing", "WORLD_SIZE=4"]),
    "address forgotten": ({"RANK": "0", "WORLD_SIZE": "2"}, {}, ["MASTER_ADDR, MASTER_PORT missing"]),
    "only an address": (ADDRESS, {}, ["WORLD_SIZE, RANK missing", "MASTER_ADDR=node0"]),
    "not numbers": (TORCHRUN | {"RANK": "x", "WORLD_SIZE": "-1"}, {}, ["WORLD_SIZE='-1'", "RANK='x'"]),
    "rank too large": (TORCHRUN | {"RANK": "4"}, {}, ["process 4 of 4", "RANK=4", "WORLD_SIZE=4"]),
    "local rank too large": (
        TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        {},
        ["local process 2 of 2", "LOCAL_RANK=2"],
    ),
    "more here than anywhere": (
        TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"},
        {},
        ["8 processes on this host out of 4"],
    ),
    "RANK against mpirun": (
        TORCHRUN | ONE_HOST_MPI | {"RANK": "0"},
        {},
        ["RANK=0", "OMPI_COMM_WORLD_RANK=3", "contradict"],
    ),
    "mpirun on two hosts without an address": (MPI, {}, ["MASTER_ADDR", "coordinator="]),
    "half of mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
    "half of srun": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        {},
        ["SLURM_LOCALID, SLURM_JOB_ID, SLURM_STEP_NODELIST missing"],
    ),
    "kubernetes alone": ({"JOB_COMPLETION_INDEX": "0"}, {}, ["coordinator=", "num_processes=", "num_processes=1"]),
    "kubernetes index too large": (
        {"JOB_COMPLETION_INDEX": "3"},
        {"coordinator": "c:1", "num_processes": 3},
        ["process 3 of 3", "JOB_COMPLETION_INDEX=3"],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_launch_variables_are_read(case):
    environ, given, expected = READ[case]
    assert launch_environment(environ, **given) == (expected and LaunchEnvironment(*expected))


@pytest.mark.parametrize("case", REFUSED)
def test_incomplete_or_contradictory_variables_are_refused_by_name(case):
    environ, given, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        launch_environment(environ, **given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5,9],m", "n3"), ("n[03,05]", "n03"), ("r[1-2]n[3,4]x", "r1n3x")],
)
def test_the_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


DESCRIBED = {
    "nothing": ({}, (None, None, None), None),
    "alone by argument": (TORCHRUN, (None, 1, None), None),
    "arguments only": ({}, ("c:1", 2, 1), ("arguments", "c:1", 2, 1)),
    "arguments win": (TORCHRUN, ("c:1", 2, 1), ("arguments", "c:1", 2, 1)),
    "one argument wins": (TORCHRUN, (None, None, 1), ("torchrun", "node0:29500", 4, 1)),
    "process 0 is an argument too": (TORCHRUN, (None, None, 0), ("torchrun", "node0:29500", 4, 0)),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_arguments_of_init_and_variables_describe_one_job(case):
    environ, arguments, expected = DESCRIBED[case]
    assert describe_launch(environ, *arguments) == (expected and LaunchEnvironment(*expected))


@pytest.mark.parametrize(
    ("environ", "arguments", "word"),
    [
        ({}, ("c:1", None, None), "num_processes, process_id missing beside coordinator"),
        ({}, ("c:1", 2, None), "process_id missing"),
        ({}, ("c:1", 2, 2), "process_id=2 of num_processes=2"),
        ({}, ("c", 2, 1), "host:port"),
        (TORCHRUN, (None, 2, None), "process_id=3 of num_processes=2"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, (None,) * 3, "variables of torchrun name is 'node0:99999'.* 1 to 65535"),
        (TORCHRUN | {"MASTER_PORT": "65535", "TORCHELASTIC_USE_AGENT_STORE": "True"}, (None,) * 3, "port 65536"),
        ({}, ("c:0", 2, 1), "the coordinator is 'c:0'.* port 0 must be"),
        ({}, ("c:", 2, 1), "port '' must be"),
        ({}, (":1", 2, 1), "host:port"),
        ({}, ("a..b:1", 2, 1), "'a..b' cannot be the name of a machine"),
        (TORCHRUN | {"WORLD_SIZE": str(2**31)}, (None,) * 3, "fewer than 2147483648 processes"),
    ],
)
def test_arguments_of_init_that_describe_no_job_are_refused(environ, arguments, word):
    with pytest.raises(ValueError, match=word):
        describe_launch(environ, *arguments)
