"""Two hosts as network namespaces (root on Linux only): two nodes of two processes train and agree, and share a failure."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = str(ROOT / "tests" / "workers" / "launched_steps.py")
TIME_LIMIT = 240


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two network namespaces with an address each, joined by a cable; the names of the namespaces."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    names = [f"axn{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"ax{os.getpid()}-{number}"[-15:] for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    else:
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def launch(hosts, outcome):
    """(status, output, error output) of each host's launcher."""
    unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = []
    try:
        for node, host in enumerate(hosts):
            inside = ["ip", "netns", "exec", host, sys.executable, "-m", "axonml_jax", "launch", "--nnodes=2"]
            where = [f"--node-rank={node}", "--nproc-per-node=2", "--master-addr=10.77.0.1"]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.append(subprocess.Popen([*inside, *where, STEPS, outcome], env=kept | quick, **pipes))
        outputs = [launcher.communicate(timeout=TIME_LIMIT) for launcher in started]
    finally:
        for launcher in started:
            launcher.kill()
            launcher.communicate()
    return [(launcher.returncode, *output) for launcher, output in zip(started, outputs, strict=True)]


def test_two_hosts_train_and_agree_though_their_names_mean_loopback(hosts):
    ends = launch(hosts, "end")
    assert [status for status, *_ in ends] == [0, 0], ends
    lines = [line.split("] ", 1)[1] for _, out, _ in ends for line in out.splitlines() if "[Gloo]" not in line]
    seen = sorted((json.loads(line) for line in lines), key=lambda process: process["rank"])
    assert [(process["rank"], process["local"], process["size"]) for process in seen] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert all(process["losses"] == seen[0]["losses"] for process in seen)


def test_a_failure_on_one_host_ends_the_other_with_the_same_report(hosts):
    for status, _, error in launch(hosts, "raise"):
        assert status == 1 and "rank 1 failed first" in error and error.rstrip().endswith("ValueError: boom")
