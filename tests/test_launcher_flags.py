"""The launcher before it starts anything: flags, variables, devices, addresses, and which failure explains the others."""

import os
import re
import socket
import sys
from importlib.machinery import ModuleSpec

import pytest

from axonml_jax.config.config import ConfigError
from axonml_jax.launch import launcher
from axonml_jax.launch import workers as environment
from axonml_jax.launch.options import read_options, streams_of
from axonml_jax.launch.workers import Failure, report, root_cause, traceback_of
from axonml_jax.mesh import init as joining
from axonml_jax.mesh import join as coordinator
from axonml_jax.mesh.launchers import LaunchEnvironment, launch_environment


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


GIVEN = {
    "nothing": ([], dict(nproc_per_node="1", nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=None, tee=0)),
    "hyphens": (["--nproc-per-node", "2", "--max-restarts=3"], dict(nproc_per_node="2", max_restarts=3)),
    "underscores": (["--nproc_per_node=2", "--max_restarts", "3"], dict(nproc_per_node="2", max_restarts=3)),
    "standalone": (["--standalone"], dict(nnodes=1, master_port=None)),
    "two machines": (
        ["--nnodes", "2:2", "--node-rank", "1", "--master-addr", "node0"],
        dict(nnodes=2, min_nodes=2, elastic=False, node_rank=1, master_addr="node0", master_port=29500),
    ),
    "a range": (
        ["--nnodes=2:6", "--node-unit=2", "--node-rank=0", "--master-addr=a", "--standby=1"],
        dict(nnodes=6, min_nodes=2, node_unit=2, last_call=30.0, elastic=True, max_restarts=0),
    ),
    "an endpoint": (["--rdzv_endpoint", "node0:1234"], dict(master_addr="node0", master_port=1234)),
    "any free port": (["--master-port", "0"], dict(master_port=None)),
    "any free port of an endpoint": (
        ["--rdzv-endpoint", "localhost:0"],
        dict(master_addr="localhost", master_port=None),
    ),
    "an endpoint without port": (
        ["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=node0"],
        dict(master_addr="node0", master_port=29500),
    ),
    "streams": (["--log-dir", "logs", "-t", "0:3,1:1", "-r", "2"], dict(tee={0: 3, 1: 1}, redirects=2)),
    "a folder for logs keeps both streams": (["--log-dir", "logs"], dict(tee=3, redirects=0)),
}


@pytest.mark.parametrize("case", GIVEN)
def test_flags_mean_what_they_mean_to_torchrun(case, script):
    flags, wanted = GIVEN[case]
    options = read_options([*flags, script, "--lr", "1", "--nnodes"], {})
    assert {name: getattr(options, name) for name in wanted} == wanted
    assert options.command == [sys.executable, script, "--lr", "1", "--nnodes"]


def test_a_module_is_started_as_python_does(script):
    assert read_options(["-m", "axonml_jax", "train"], {}).command == [sys.executable, "-m", "axonml_jax", "train"]


def test_a_module_may_have_a_finder_of_its_own_as_editable_installs_do(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, None) if name == "installed_editably" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert read_options(["-m", "installed_editably.train"], {}).target == "installed_editably.train"


def test_a_script_may_be_given_its_own_name(script):
    assert read_options([script, script], {}).command == [sys.executable, script, script]


def test_variables_of_the_training_operator_are_defaults(script):
    environ = {"PET_NPROC_PER_NODE": "4", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}
    options = read_options(["--nproc-per-node=3", script], environ)
    assert (options.nproc_per_node, options.nnodes, options.node_rank, options.master_addr) == ("3", 2, 1, "job-0")


def test_a_port_is_tried_at_the_address_of_its_kind(script):
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        at = lambda host: read_options(["--master-addr", host, "--master-port", str(port), script], {})
        for host in ("::1", "[::1]"):
            with pytest.raises(ConfigError, match=r"cannot listen on .*: Address already in use"):
                launcher._check_port(at(host))
    launcher._check_port(at("[::1]"))
    with pytest.raises(ConfigError, match="--master-addr must be an address of this machine"):
        launcher._check_port(at("192.0.2.1"))


def test_streams_are_chosen_by_local_rank():
    assert [streams_of(which, 1) for which in (3, {0: 3}, {1: 2})] == [3, 0, 2]


REFUSED = {
    "no script": ([], "give a script"),
    "a missing script": (["trian.py"], "no such script: trian.py; did you mean train.py?"),
    "a configuration": (
        ["job.yaml", "--train.steps", "2"],
        "job.yaml is no script: say --module axonml_jax train job.yaml",
    ),
    "a command": (["train", "job.yaml"], "train is no script: say --module axonml_jax train job.yaml"),
    "a command on a run": (["eval", "runs/it"], "eval is no script: say --module axonml_jax eval runs/it"),
    "a missing module": (["-m", "nowhere.at.all"], "no module named 'nowhere'"),
    "an unknown flag": (
        ["--nproc-per-nod", "2", "train.py"],
        "unknown flag --nproc-per-nod: did you mean --nproc-per-node?",
    ),
    "a flag of torchrun's without work": (["--rdzv_backend=c10d", "train.py"], "--rdzv-backend has no work here"),
    "a range the wrong way round": (
        ["--nnodes", "4:1", "train.py"],
        "--nnodes 4:1: must be a positive number, or MIN:MAX",
    ),
    "half a range": (["--nnodes", ":4", "train.py"], "--nnodes :4: must be"),
    "which of a range": (["--nnodes", "1:4", "--master-addr=a", "train.py"], "--nnodes 4 needs --node-rank"),
    "groups that do not fill a range": (
        ["--nnodes=2:5", "--node-unit=2", "train.py"],
        "--node-unit 2: .* divides both",
    ),
    "groups of a fixed number": (
        ["--nnodes=2", "--node-unit=2", "--last-call=1", "train.py"],
        "--node-unit 2 and --last-call 1.0 have no effect while --nnodes 2 is no range",
    ),
    "a last call of no time": (
        ["--nnodes=1:2", "--last-call=-1", "train.py"],
        "--last-call -1.0: must not be negative",
    ),
    "no machines": (["--nnodes", "0", "train.py"], "--nnodes 0"),
    "which machine": (["--nnodes", "2", "--master-addr", "a", "train.py"], "needs --node-rank"),
    "where is machine 0": (["--nnodes", "2", "--node-rank", "0", "train.py"], "needs --master-addr"),
    "a machine too many": (["--nnodes=2", "--node-rank=2", "--master-addr=a", "train.py"], "--node-rank 2 .* 0 to 1"),
    "a second machine of one": (["--node-rank", "1", "train.py"], "--node-rank 1 with --nnodes 1"),
    "standalone with a port": (["--standalone", "--master-port", "1", "train.py"], "--master-port contradicts"),
    "two addresses": (
        ["--rdzv-endpoint=a:1", "--master-addr=b", "train.py"],
        "--rdzv-endpoint says what --master-addr",
    ),
    "any port of several machines": (
        ["--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=0", "train.py"],
        "port 0 with --nnodes 2: 0 means any free one, and the machines must know it before: leave it out for 29500",
    ),
    "any port of an endpoint of several machines": (
        ["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=a:0", "train.py"],
        "port 0 with --nnodes 2",
    ),
    "a port below the range": (["--master-port", "-1", "train.py"], "port -1"),
    "a port out of range": (["--master-port", "70000", "train.py"], "port 70000"),
    "a port with too few after it": (
        ["--nnodes=2", "--node-rank=0", "--master-addr=a", "--master-port=65520", "train.py"],
        "port 65520: must be 1 to 65519, as several machines use the 16 ports after it too",
    ),
    "a host that cannot be": (
        ["--nnodes=2", "--node-rank=1", "--master-addr=a..b", "train.py"],
        "host a..b: 'a..b' cannot be the name of a machine",
    ),
    "machines without number": (
        ["--nnodes=1000000000", "--node-rank=0", "--master-addr=a", "train.py"],
        "--nnodes 1000000000: node 0 keeps a connection to every machine, to 16384 at most",
    ),
    "no port": (["--rdzv-endpoint", "a:b", "train.py"], "must be HOST or HOST:PORT"),
    "nothing to stand by for": (
        ["--standby", "30", "train.py"],
        "--standby 30 with --max-restarts 0: nothing is started again",
    ),
    "negative standby": (["--standby", "-1", "--max-restarts=1", "train.py"], "--standby -1.0: must not be negative"),
    "negative restarts": (["--max-restarts", "-1", "train.py"], "--max-restarts -1"),
    "everything at once": (
        ["--node-rank=1", "--max-restarts=-1", "trian.py"],
        r"--node-rank(.|\n)*--max-restarts(.|\n)*trian",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_remedy(case, script):
    flags, words = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        read_options(flags, {})
    assert re.search(words, str(error.value)), error.value


def place(**changed):
    known = dict(address="node0", port=5, world_size=6, first_rank=4, local_size=2, node_rank=2, num_nodes=3)
    return environment.Attempt(**(known | dict(restarts=1, max_restarts=2, run_id="x") | changed))


def test_workers_get_torchruns_variables_which_init_reads():
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "h", "RANK": "77"}
    environ = environment.worker_environment(given, place(), 1, ())
    wanted = dict(MASTER_ADDR="node0", MASTER_PORT="5", WORLD_SIZE="6", RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    wanted |= dict(NODE_RANK="2", GROUP_RANK="2", GROUP_WORLD_SIZE="3", TORCHELASTIC_RESTART_COUNT="1", HOME="h")
    wanted |= dict(AXONML_JAX_RESTART_COUNT="1", JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    assert wanted.items() <= environ.items()
    launch = launch_environment(environ)
    # The store of PyTorch's torchrun would move the port by one.
    assert (launch.coordinator, launch.num_processes, launch.process_id, launch.local_rank) == ("node0:5", 6, 5, 1)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name == "jax_cuda12_plugin")
    return {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,7"}


@pytest.mark.parametrize(
    ("wanted", "more", "workers", "devices"),
    [
        ("gpu", {}, 4, "5"),
        ("auto", {}, 4, "5"),
        ("2", {}, 2, "5"),
        ("1", {}, 1, "4,5,GPU-a,7"),
        ("3", {"JAX_PLATFORMS": "cpu"}, 3, None),
        ("2", {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": ""}, 2, None),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1, "1"),
        ("2", {"CUDA_VISIBLE_DEVICES": ""}, 2, None),
    ],
)
def test_several_workers_get_a_gpu_each_and_a_single_one_gets_all(four_gpus, wanted, more, workers, devices):
    count, gpus = environment.count_workers(wanted, four_gpus | more)
    environ = environment.worker_environment({}, place(local_size=count), min(1, count - 1), gpus)
    assert (count, environ.get("CUDA_VISIBLE_DEVICES")) == (workers, devices)
    assert ("JAX_NUM_CPU_DEVICES" in environ) == (devices is None)


@pytest.mark.parametrize(
    ("wanted", "environ", "words"),
    [
        ("5", {}, "4 are visible .* JAX_PLATFORMS=cpu"),
        ("gpu", {"JAX_PLATFORMS": "cpu"}, "no GPU that JAX could use"),
        (
            "2",
            {"JAX_PLATFORMS": "tpu"},
            "JAX_PLATFORMS=tpu: .* NVIDIA GPUs, of which .* without axonml-jax launch",
        ),
        ("auto", {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}, "JAX_PLATFORMS=cuda: .* set JAX_PLATFORMS=cpu"),
        ("two", {}, "positive number, auto, cpu or gpu"),
        ("0", {}, "positive number"),
        ("1000000000", {"JAX_PLATFORMS": "cpu"}, "1000000000: the launcher reads two pipes of every process"),
        ("2", {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, "simulated devices .* --nproc-per-node"),
        ("2", {"JAX_NUM_CPU_DEVICES": "2"}, "JAX_NUM_CPU_DEVICES=2"),
    ],
)
def test_devices_that_are_not_there_are_refused(four_gpus, wanted, environ, words):
    with pytest.raises(ConfigError, match=words):
        environment.count_workers(wanted, four_gpus | environ)


def test_cpu_means_the_cores_that_this_process_may_run_on_if_so_many_files_may_be_open(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert (
        environment.count_workers("cpu", {}) == environment.count_workers("auto", {"JAX_PLATFORMS": "cpu"}) == (3, ())
    )
    monkeypatch.setattr(environment.resource, "getrlimit", lambda which: (4, 4))
    with pytest.raises(ConfigError, match=r"--nproc-per-node cpu means 3: .* may open 4 files .* start 2 or fewer"):
        environment.count_workers("cpu", {})


@pytest.mark.parametrize("device", ["accel0", "vfio/0", "kfd", "vfio/vfio"])
def test_workers_that_leave_an_accelerator_idle_are_said_to(device, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "_DEVICES", tmp_path, raising=False)
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert environment.count_workers("2", {}) == (2, ())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (device != "vfio/vfio") and all(f"there is {tmp_path / device}: " in line for line in said)
    for wanted, environ in (("2", {"JAX_PLATFORMS": "cpu"}), ("cpu", {})):  # the CPU is meant
        environment.count_workers(wanted, environ)
    assert capsys.readouterr().err == ""


ADDRESSES = {
    "loopback": ("127.0.0.1:80", True, "127.0.0.1"),
    "an address": ("10.1.2.3:80", False, "10.1.2.3"),
    "IPv6": ("[::1]:80", False, "::1"),
    "a name of one host": ("self:80", True, "127.0.1.1"),
    "a name that means loopback at home only": ("self:80", False, "10.9.9.9"),
    "a name that nobody knows yet": ("pod-0:80", False, "10.9.9.9"),
    "localhost": ("localhost:80", False, "127.0.0.1"),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_the_coordinator_listens_on_one_address_only(case, monkeypatch):
    def resolve(host, port, **options):
        if host == "pod-0":
            raise socket.gaierror("unknown")
        return [(None, None, None, "", ({"self": "127.0.1.1", "localhost": "127.0.0.1"}.get(host, host), port))]

    monkeypatch.delenv(coordinator.ASKED, raising=False)
    monkeypatch.setattr(coordinator.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(coordinator, "outward_address", lambda: "10.9.9.9")
    given, one_host, wanted = ADDRESSES[case]
    assert coordinator.bind_address(given, one_host) == (wanted, 80)
    # Another process of that machine, to which the name means the same, looks there.
    reached = coordinator.reached_at(given, one_host)
    assert coordinator.split_address(reached, "it") in ((wanted, 80), coordinator.split_address(given, "it"))
    assert (reached != given) == (given == "self:80" and not one_host)


def test_processes_of_the_coordinators_machine_call_where_it_listens(monkeypatch):
    class Called(Exception):
        """With the address."""

    def roll_call(address, *rest, **more):
        raise Called(address)

    loopback = lambda host, port, **options: [(None, None, None, "", ("127.0.1.1", port))]
    monkeypatch.delenv(coordinator.ASKED, raising=False)
    monkeypatch.setattr(coordinator.socket, "getaddrinfo", loopback)
    monkeypatch.setattr(coordinator, "outward_address", lambda: "10.9.9.9")
    for name, instead in {
        "backend_started": False,
        "_prepare_cpu_devices": None,
        "keep_in_every_process": None,
    }.items():
        monkeypatch.setattr(joining, name, lambda instead=instead: instead)
    monkeypatch.setattr(joining, "roll_call", roll_call)
    for process in (0, 1):  # of two on this machine, and two on another
        with pytest.raises(Called, match=r"^10\.9\.9\.9:80$"):
            joining._join(LaunchEnvironment("slurm", "self:80", 4, process, process, 2), None, 5)


def test_all_interfaces_only_when_asked(monkeypatch):
    monkeypatch.setenv(coordinator.ASKED, "0.0.0.0:81")
    assert coordinator.bind_address("node0:80") == ("0.0.0.0", 81)


def test_an_address_of_another_machine_is_an_error_with_the_remedy():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:80.*JAX_COORDINATOR_BIND_ADDRESS"):
        coordinator.listen("192.0.2.1", 80, 1)


def failure(rank, returncode=1, *lines):
    return Failure(rank, "host", 10 + rank, returncode, 1.0, lines)


LOST = ("Traceback (most recent call last):", "ValueError: Gloo all-reduce failed: Connection closed by peer [::1]")
RAISED = ("Traceback (most recent call last):", "ValueError: boom")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failure(0, 1, *LOST), failure(1, 1, *RAISED)], 1),
        ([failure(1, 1, *RAISED), failure(0, 1, *LOST)], 1),
        ([failure(0, 1, *LOST), failure(2, -9)], 2),
        ([failure(2, -9, *LOST), failure(1, 1, *RAISED)], 2),
        ([failure(3, 1, *LOST), failure(0, 1, *LOST)], 3),
    ],
)
def test_the_root_cause_is_the_first_that_does_not_blame_another(failures, cause):
    assert root_cause(failures).rank == cause


def test_the_report_names_rank_and_signal_and_ends_with_the_traceback():
    text = report(failure(3, -11, "noise", *RAISED))
    assert "rank 3" in text and "SIGSEGV" in text and text.endswith("ValueError: boom") and "noise" not in text
    assert "wrote nothing" in report(failure(0, -9))


def test_chained_tracebacks_stay_together():
    first, last = ["Traceback (most recent call last):", "KeyError: 1"], ["Traceback (most recent call last):", "E: 2"]
    chained = [*first, "", "During handling of the above exception, another exception occurred:", "", *last]
    assert traceback_of(["noise", *chained]) == chained
    assert traceback_of([*first, "unrelated", *last]) == last
