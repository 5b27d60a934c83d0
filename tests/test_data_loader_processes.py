"""Two real processes share a loader: each reads only the rows that its devices hold."""

import socket
import subprocess
import sys

import pytest

PROCESS = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
from jax.sharding import Mesh
from axonml_jax.data.loader import create_dataloader

class Dataset:
    read = []
    def __len__(self): return 8
    def __getitem__(self, index):
        self.read.append(index)
        return index

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
batch = next(iter(create_dataloader(Dataset(), 4, mesh, shuffle=False, prefetch=0)))
print("RESULT", batch.shape, Dataset.read, [shard.data.tolist() for shard in batch.addressable_shards])
"""


@pytest.mark.slow
def test_a_process_reads_only_the_rows_its_devices_hold(free_port):
    address = f"127.0.0.1:{free_port}"
    command = [sys.executable, "-c", PROCESS, address]
    workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    results = [next(line for line in output.splitlines() if line.startswith("RESULT")) for output in outputs]
    assert results == ["RESULT (4,) [0, 1] [[0, 1], [0, 1]]", "RESULT (4,) [2, 3] [[2, 3], [2, 3]]"]


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
