"""Two nodes of two processes train in every way as one device does, and share a failure.

The nodes are hosts of their own, as network namespaces, where that can be had (root on Linux).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workers.equal_rank import KINDS
from workers.hosts import ADDRESS, NoHosts, two_hosts
from workers.launch import free_port

ROOT = Path(__file__).resolve().parents[1]
WORKER = str(ROOT / "tests" / "workers" / "equal_rank.py")
TIME_LIMIT = 240


@pytest.fixture
def hosts():
    """What to put before a command to run it on either host, and the first one's address."""
    try:
        with two_hosts() as names:
            yield [["ip", "netns", "exec", name] for name in names], ADDRESS
    except NoHosts:
        yield [[], []], "127.0.0.1"


def launch(hosts, *argv):
    """(status, output, error output) of each node's launcher."""
    unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    (places, address), port, started = hosts, free_port(), []
    try:
        for node, place in enumerate(places):
            command = [*place, sys.executable, "-m", "axonml_jax", "launch", "--nnodes=2", f"--node-rank={node}"]
            where = ["--nproc-per-node=2", f"--master-addr={address}", f"--master-port={port}"]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started.append(subprocess.Popen([*command, *where, WORKER, *argv], env=kept | own, **pipes))
        outputs = [launcher.communicate(timeout=TIME_LIMIT) for launcher in started]
    finally:
        for launcher in started:
            launcher.kill()
            launcher.communicate()
    return [(launcher.returncode, *output) for launcher, output in zip(started, outputs, strict=True)]


@pytest.mark.slow
def test_two_nodes_train_in_every_way_as_one_device_and_share_a_failure(hosts):
    ends = launch(hosts, "--model=net", "--raise-on=1")
    seen = [json.loads(found) for _, out, _ in ends for found in re.findall(r'\{"equal".*?\}', out)]
    places = [(rank, rank % 2, 4) for rank in range(4)]
    for kind in KINDS:
        assert sorted((p["rank"], p["local"], p["size"]) for p in seen if p["equal"] == kind) == places, ends
    for status, _, error in ends:
        assert status == 1 and "rank 1 failed first" in error and error.rstrip().endswith("ValueError: boom"), ends
