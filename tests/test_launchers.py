"""42 recorded environments of launchers: who joins, who is refused by name, who is alone on purpose, and nobody by mistake."""

import json
import re
import socket
import threading
import types
from pathlib import Path

import jax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.launch.leftovers import MARK
from axonml_jax.mesh import init as initialize
from axonml_jax.mesh import launchers
from axonml_jax.mesh.environment import RUN_ID
from axonml_jax.mesh.init import describe_launch, own_gpu
from axonml_jax.mesh.launchers import ALONE, LAUNCHERS, LaunchEnvironment, launch_environment, reserved

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "launchers.json").read_text("utf-8"))
JOINABLE = [name for name, row in RECORDED.items() if isinstance(row["expected"], dict)]


def processes(name):
    return [{**RECORDED[name]["all"], **each} for each in RECORDED[name]["each"]]


def is_right(launch, expected, process):
    """Whether a process is what is expected; a coordinator's port may be any (`host:*`)."""
    fields = ("process_ids", "process_id"), ("local_ranks", "local_rank"), ("local_sizes", "local_size")
    host, _, port = launch.coordinator.rpartition(":")
    return (
        all(expected[every][process] == getattr(launch, one) for every, one in fields)
        and (launch.launcher, launch.num_processes) == (expected["launcher"], expected["num_processes"])
        and expected["coordinator"] in (launch.coordinator, f"{host}:*")
        and port.isdecimal()
    )


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_environment_has_its_right_answer(name):
    expected = RECORDED[name]["expected"]
    for process, environ in enumerate(processes(name)):
        if isinstance(expected, dict):
            launch = describe_launch(environ, None, None, None)
            here = (name, process) == ("aws_batch_mnp", 0)  # the main node is told no address: it takes its own
            assert is_right(launch, expected | ({"coordinator": launch.coordinator} if here else {}), process), launch
        elif expected == "refuse":
            with pytest.raises(ValueError, match=rf"=|processes.*{ALONE}=1"):
                describe_launch(environ, None, None, None)
        else:
            assert describe_launch(environ, None, None, None) is None
            assert bool(reserved(environ)) == (expected == "warn")


@pytest.mark.parametrize("name", RECORDED)
def test_whoever_asks_to_be_alone_is(name):
    for environ in processes(name):
        assert describe_launch(environ, None, 1, None) is None
        assert describe_launch(environ | {ALONE: "1"}, None, None, None) is None
        assert not reserved(environ | {ALONE: "1"})


def told(name):
    """The variables of a joinable environment that its launcher's row reads, or that a launcher's address stands in."""
    [launcher, *_] = [each for each in LAUNCHERS if each.speaks(processes(name)[1])]
    return [each for each in (*launcher.names, *launcher.asks) if each in processes(name)[1]]


MISSING = [(name, variable) for name in JOINABLE for variable in told(name)]


SAID_OTHERWISE = {
    ("indexed_job_with_service", "JOB_COMPLETION_INDEX"): "RANK missing beside WORLD_SIZE=2",
    ("gke_tpu_slice", "TPU_WORKER_HOSTNAMES"): "WORLD_SIZE, .*missing beside JOB_COMPLETION_INDEX",
    ("gke_tpu_multislice", "TPU_WORKER_HOSTNAMES"): "missing beside JOB_COMPLETION_INDEX=0, MEGASCALE_NUM_SLICES=2",
}
"""What is missing without that variable by the launcher whose variables are left."""


@pytest.mark.parametrize(("name", "variable"), MISSING)
def test_one_variable_missing_is_named_or_said_by_others_and_nobody_is_alone(name, variable):
    for process, environ in enumerate(processes(name)):
        left = {each: value for each, value in environ.items() if each != variable}
        try:
            launch = describe_launch(left, None, None, None)
        except ValueError as error:
            words = SAID_OTHERWISE.get((name, variable), variable)
            assert re.search(words, str(error)) or variable in str(error), error
        else:
            assert launch is not None, f"process {process} alone without {variable}"
            assert launch.num_processes == 2
            assert launch.process_id == process


@pytest.mark.parametrize("name", JOINABLE)
def test_variables_that_contradict_are_refused_by_name(name):
    expected, environ = RECORDED[name]["expected"], processes(name)[1]
    [launcher, *_] = [each for each in LAUNCHERS if each.speaks(environ)]
    for variable in (
        each for each in (launcher.rank, launcher.local_rank) if isinstance(each, str) and each in environ
    ):
        if variable == launcher.local_rank and expected["local_sizes"][1] is None:
            continue
        with pytest.raises(ValueError, match=f"impossible.*{variable}=7"):
            launch_environment(environ | {variable: "7"})
    for variable in set(launcher.numbers) & set(environ):
        with pytest.raises(ValueError, match=f"{variable}='x'"):
            launch_environment(environ | {variable: "x"})
    if not launcher.innermost:
        with pytest.raises(ValueError, match="PMI_SIZE=16"):
            launch_environment(environ | {"PMI_SIZE": "16"})


WORDS = ("", "abc", "-1", " 2 ", "1.5", "[", "a[", ",", ":", "0", "9" * 5000)


@pytest.mark.parametrize("name", RECORDED)
def test_no_variable_that_says_nonsense_ends_in_an_error_of_pythons_or_in_a_process_alone(name):
    for environ in processes(name):
        for changed in ({**environ, variable: word} for variable in environ for word in WORDS):
            try:
                launch = describe_launch(changed, None, None, None)
            except ValueError as error:
                assert type(error) is ValueError  # not a kind of it, of a codec or of JSON
                assert not re.match("invalid literal|Exceeds", str(error)), (changed, error)
            else:
                assert launch is not None or name not in JOINABLE, changed


ELSEWHERE = {
    "the second node of one": ("skypilot", {"SKYPILOT_NUM_NODES": "1"}, "process 1 of 1 .*SKYPILOT_NUM_NODES=1"),
    "the second task of one": ("slurm_srun", {"SLURM_STEP_NUM_TASKS": "1"}, "process 1 of 1 .*SLURM_PROCID=1"),
    "the eighth node of two": (
        "aws_batch_mnp",
        {"AWS_BATCH_JOB_NODE_INDEX": "7"},
        "AWS_BATCH_JOB_NODE_INDEX=7 .*are 2",
    ),
    "a main node that is none": ("aws_batch_mnp", {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "7"}, "MAIN_NODE_INDEX=7 .*are 2"),
    "another job's process": ("xpk_cpu_two_jobs", {"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1 .*are 1"),
    "another slice's worker": (
        "gke_tpu_multislice",
        {"TPU_WORKER_ID": "1", "MEGASCALE_SLICE_ID": "0"},
        "TPU_WORKER_ID=1",
    ),
    "a slice without number": ("gke_tpu_multislice", {"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID missing beside"),
    "a slice too many": ("gke_tpu_multislice", {"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID=2 .*are 2"),
    "more here than anywhere": ("azureml_pytorch", {"LOCAL_RANK": "2"}, "local process 2 of 2"),
    "a port by a word": ("runpod_cluster", {"PRIMARY_PORT": "abc"}, "PRIMARY_PORT='abc'"),
    "port 0": ("xpk_gpu", {"JAX_COORDINATOR_PORT": "0"}, "JAX_COORDINATOR_PORT='0'.*from 1 to 65535"),
    "a port of TPUs": ("gke_tpu_slice", {"JAX_COORDINATOR_PORT": "65536"}, "JAX_COORDINATOR_PORT='65536'"),
    "hosts that are no list": ("sagemaker", {"SM_HOSTS": "algo-1"}, "SM_HOSTS='algo-1'"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_place_that_no_process_or_another_one_has_is_refused_by_name(case):
    name, changed, words = ELSEWHERE[case]
    with pytest.raises(ValueError, match=words):
        describe_launch(processes(name)[1] | changed, None, None, None)


SIGNED = {
    "Kubeflow's torch runtime without a launcher": ({"PET_NNODES": "2"}, "axonml-jax launch.*PET_"),
    "elastic machines": ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
    "machines of a script": ({"NNODES": "4"}, "NNODES=4"),
    "a number above 0 without a count": ({"NODE_RANK": "2"}, "NODE_RANK=2"),
    "a worker above 0 without hosts": ({"TPU_WORKER_ID": "1"}, "TPU_WORKER_ID=1"),
    "a process above 0 of PMIx": ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
    "slices without hosts": ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_NUM_SLICES=2"),
    "Volcano's tasks": ({"VC_PS_NUM": "1", "VC_WORKER_NUM": "1"}, "VC_PS_NUM=1, VC_WORKER_NUM=1"),
    "MPICH with an address": ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpich: MASTER_ADDR, MASTER_PORT missing"),
    "an address without a count": (
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        "jax: JAX_NUM_PROCESSES, JAX_PROCESS_ID missing",
    ),
    "a word": ({ALONE: "yes"}, f"{ALONE}='yes'"),
    "a TPU's file of addresses": (
        {"TPU_PROCESS_ADDRESSES_PATH": "/nowhere/a"},
        "TPU_PROCESS_ADDRESSES_PATH=/nowhere/a",
    ),
}


@pytest.mark.parametrize("case", SIGNED)
def test_a_count_that_no_reader_takes_is_an_error_that_names_it(case):
    environ, words = SIGNED[case]
    with pytest.raises(ValueError, match=words):
        launch_environment(environ)


ONE = {
    "one machine": {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "a"},
    "one slice of one host": {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "1"},
    "an array job that says so": {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "1"},
    "one of MPICH": {"PMI_SIZE": "1", "PMI_RANK": "0"},
    "TensorFlow's variable of one": {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
    "TensorFlow's variable of something else": {"TF_CONFIG": "nothing"},
    "one of RunPod's": {"PRIMARY_ADDR": "a", "NUM_NODES": "1", "NODE_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"},
    "a reserved task that is used": {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
}


@pytest.mark.parametrize("case", ONE)
def test_one_process_is_alone(case):
    assert launch_environment(ONE[case]) is None
    assert not reserved(ONE[case])


def test_one_task_of_an_outer_launcher_says_nothing_of_an_inner_one():
    outer = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    inner = {"PMI_SIZE": "2", "PMI_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert launch_environment(outer | inner) == LaunchEnvironment("mpich", "a:5", 2, 1)


INNERMOST = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
    "jax": {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "1", "JAX_COORDINATOR_ADDRESS": "a:5"},
    "openmpi": {
        f"OMPI_COMM_WORLD_{word}": "01"["SIZE" in word] for word in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    }
    | {"MASTER_ADDR": "a", "MASTER_PORT": "5"},
}
"""What has started a single process, such as an elastic job of which one machine is left."""


@pytest.mark.parametrize("name", INNERMOST)
def test_who_has_started_this_process_counts_and_not_who_has_started_him(name):
    outer = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "PMI_SIZE": "16", "PMI_RANK": "9"}
    launch = launch_environment(outer | INNERMOST[name])
    assert (launch.launcher, launch.coordinator, launch.num_processes, launch.process_id) == (name, "a:5", 1, 0)


def test_hosts_of_a_tpu_may_stand_in_a_file(tmp_path):
    (tmp_path / "hosts").write_text("a.t:8471,b.t:8471\n")
    environ = {"TPU_PROCESS_ADDRESSES_PATH": str(tmp_path / "hosts"), "TPU_WORKER_ID": "1"}
    assert launch_environment(environ) == LaunchEnvironment("tpu", "a.t:8482", 2, 1)


def test_a_job_that_is_joined_and_the_wish_to_be_alone_contradict(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize, "joined_as", lambda: (1, 2))
    monkeypatch.setenv(ALONE, "1")
    with pytest.raises(ValueError, match="already 1 of 2, not alone"):
        initialize.init()


class Coordinator:
    """What the coordination service knows once process 0 of another host, and 2 of this one, have left their names."""

    def __init__(self):
        self.said = {"axonml_jax/hosts/0": "elsewhere", "axonml_jax/hosts/2": socket.gethostname()}

    def key_value_set(self, key, value):
        self.said[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.said.items() if key.startswith(folder)]

    def wait_at_barrier(self, name, milliseconds):
        """Nobody is waited for."""


def test_a_job_that_is_joined_is_adopted_with_its_place_on_the_host(monkeypatch):
    coordinator = Coordinator()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for name, value in {
        "joined_as": lambda: (3, 4),
        "coordinator_client": lambda: coordinator,
        "leave_on_error": lambda: None,
        "say_goodbye": lambda *whom: None,
    }.items():
        monkeypatch.setattr(initialize, name, value)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")  # says too little, of a job that is joined already
    first, again = initialize.init(), initialize.init()
    assert (first.launcher, first.local_rank) == ("jax.distributed.initialize", 1)
    assert first == again
    assert initialize.num_launched() == 4
    with pytest.raises(ValueError, match="already 3 of 4, not 0 of 2"):
        initialize.init("gloo", "a:1", 2, 0)


def test_what_is_reserved_and_not_used_is_said_once_this_process_is_alone(monkeypatch):
    said = []
    monkeypatch.setattr(initialize.logger, "warning", lambda form, *words: said.append(form % words))
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert initialize.init().launcher == "alone"
    assert len(said) == 1
    assert "SLURM_NTASKS=8" in said[0]
    initialize.init(num_processes=1)
    assert len(said) == 1


def test_a_worker_of_rays_may_be_alone(monkeypatch):
    context = types.SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setattr(initialize, "ray_context", lambda: context)
    assert initialize.num_launched() == 2
    monkeypatch.setenv(ALONE, "1")
    assert initialize.num_launched() == 1
    assert initialize.init().launcher == "alone"


def test_devices_of_several_processes_that_nobody_has_joined_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="devices are those of 2 processes"):
        initialize.init("mock")


def test_arguments_and_the_wish_to_be_alone_contradict():
    with pytest.raises(ValueError, match=f"{ALONE}=1 contradicts num_processes=2"):
        describe_launch({ALONE: "1"}, None, 2, None)


GPUS = {
    "each takes its own of four": ("torchrun", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [1]),
    "each takes its own of all": ("slurm", {}, [1]),
    "one was given": ("torchrun", {"CUDA_VISIBLE_DEVICES": "5"}, None),
    "Ray gave two": ("ray", {"CUDA_VISIBLE_DEVICES": "2,3"}, None),
    "Slurm gave two": ("slurm", {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"}, None),
    "newer Slurm gave two": ("slurm", {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, None),
    "the user chose": ("torchrun", {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
}


@pytest.mark.parametrize("case", GPUS)
def test_gpus_that_an_engine_gave_are_kept(case):
    launcher, environ, ids = GPUS[case]
    assert own_gpu(LaunchEnvironment(launcher, "a:1", 4, 3, 1, 2), environ) == ids
    assert own_gpu(LaunchEnvironment(launcher, "a:1", 4, 3), environ) is None


OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MAKERS = {
    "a mesh": lambda: ax.make_mesh(data=-1),
    "a model without a mesh": lambda: ax.DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    "a model on a mesh of JAX's": lambda: ax.DDP(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    ),
}


@pytest.fixture
def unplaced(monkeypatch):
    """A process that has not called `ax.init`, as JAX and the environment stand."""
    monkeypatch.setattr(launchers, "_placed", threading.Event())
    return monkeypatch


@pytest.mark.parametrize("make", MAKERS)
def test_one_of_several_processes_that_has_joined_nobody_trains_nothing(make, unplaced):
    for name, value in OF_TWO.items():
        unplaced.setenv(name, value)
    with pytest.raises(RuntimeError, match=rf"process 1 of 2 that torchrun has started.*ax\.init\(\).*{ALONE}=1"):
        MAKERS[make]()
    unplaced.setenv(RUN_ID, "a-run")
    with pytest.raises(RuntimeError, match="process 1 of 2 that axonml-jax launch has started"):
        MAKERS[make]()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "alone", ["nobody else", "asked by the environment", "asked by an argument", "sbatch's body", "joined"]
)
def test_who_is_alone_on_purpose_or_has_joined_makes_meshes_and_models(alone, make, unplaced):
    for name, value in ({} if alone in ("nobody else", "sbatch's body") else OF_TWO).items():
        unplaced.setenv(name, value)
    if alone == "asked by the environment":
        unplaced.setenv(ALONE, "1")
    elif alone == "asked by an argument":
        initialize.init(num_processes=1)
    elif alone == "sbatch's body":
        unplaced.setenv("SLURM_NTASKS", "8")
    elif alone == "joined":
        unplaced.setattr(launchers, "in_a_job", lambda: True)
    assert MAKERS[make]() is not None


def test_ranks_of_spawn_and_simulated_worlds_need_join_nobody(unplaced):
    for name, value in OF_TWO.items():
        unplaced.setenv(name, value)
    assert ax.DDP(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ax.World.mock(2)).mesh.size == 2
    unplaced.setattr(launchers, "_placed", threading.Event())
    assert ax.spawn(lambda world: ax.make_mesh(data=-1).size, 2) == [jax.device_count()] * 2


def test_variables_that_say_too_little_are_named_by_a_mesh_too(unplaced):
    unplaced.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match=f"PMI_SIZE=4.*{ALONE}=1"):
        ax.make_mesh(data=-1)


def test_a_worker_of_rays_that_has_joined_nobody_is_refused(unplaced):
    context = types.SimpleNamespace(get_world_size=lambda: 3, get_world_rank=lambda: 2)
    unplaced.setattr(launchers, "ray_context", lambda: context)
    with pytest.raises(RuntimeError, match="process 2 of 3 that ray has started"):
        ax.make_mesh(data=-1)


def test_a_launch_is_known_by_one_variable():
    assert MARK == RUN_ID
