"""Two real processes in each recorded environment that can be joined: they find each other and add a number up."""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from test_launchers import JOINABLE, RECORDED, processes

from axonml_jax.mesh.join import outward_address

JOB = """
import json, os, sys
import jax
import numpy as np
if "cluster" in sys.argv:
    os.environ.pop("TPU_SKIP_MDS_QUERY", None)  # which JAX has set, as there is no chip
if "joined" in sys.argv:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["ADDRESS"], 2, int(os.environ["NUMBER"]))
import axonml_jax as ax

def total(x):
    return jax.lax.psum(x, "data")

world = ax.init(timeout=120)
assert ax.init() == world
found = float(world.default_group().run(total, np.float32(world.rank + 1), name="total"))
print(json.dumps([world.process_index, world.num_processes, world.local_rank, world.launcher, found]), flush=True)
ax.shutdown()
"""


def run(environs, *arguments):
    """What both processes print, and what they say on stderr where they fail."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-c", JOB, *arguments]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    command, env=kept | environ | {"JAX_PLATFORMS": "cpu"}, stdout=-1, stderr=-1, text=True
                )
            )
            for environ in environs
        ]
        try:
            outputs = [process.communicate(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def here(name):
    """A recorded environment on this machine: the machines' names become an address that no other row has."""
    row, address = RECORDED[name]["expected"], f"127.{os.getpid() % 251}.7.{JOINABLE.index(name) + 1}"
    host = row["coordinator"].rpartition(":")[0]
    address = outward_address() or address if name == "aws_batch_mnp" else address
    found = [{key: value.replace(host, address) for key, value in each.items()} for each in processes(name)]
    more = {"SLURM_STEP_NODELIST": address} if row["launcher"] == "slurm" else {}
    more |= {"PMIX_NAMESPACE": f"{os.getpid()}@{name}"} if name.startswith("openmpi") else {}
    return [each | more for each in found]


@pytest.mark.slow
def test_a_job_that_somebody_else_joined_is_taken_as_it_is():
    address = f"127.{os.getpid() % 251}.8.1:29500"
    # Variables that say too little of a job that is joined already are nobody's business.
    environs = [{"ADDRESS": address, "NUMBER": str(n), "JOB_COMPLETION_INDEX": str(n)} for n in (0, 1)]
    assert run(environs, "joined") == [[n, 2, n, "jax.distributed.initialize", 3.0] for n in (0, 1)]


class Metadata(http.server.BaseHTTPRequestHandler):
    """Google's metadata server, as one machine of a slice sees it."""

    def do_GET(self):
        said = self.server.said.get(self.path.rsplit("/", 1)[1])
        self.send_response(404 if said is None else 200)
        self.end_headers()
        self.wfile.write((said or "").encode())

    def log_message(self, *arguments):
        """Nothing."""


@contextlib.contextmanager
def metadata(said):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.said = said
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


REQUESTS = """
import urllib.error, urllib.request

class get:
    def __init__(self, url, headers, timeout):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
                self.text, self.status_code = answer.read().decode(), answer.status
        except urllib.error.HTTPError as error:
            self.text, self.status_code = "", error.code
"""
"""What JAX uses of the package `requests`, which comes with jax[tpu] only."""


@contextlib.contextmanager
def cloud(folder):
    """What two virtual machines with TPUs have: no variables, and a metadata server that JAX knows how to ask."""
    (folder / "requests.py").write_text(REQUESTS)
    said = {"worker-network-endpoints": f"127.{os.getpid() % 251}.9.1,127.0.0.2", "tpu-env": ""}
    with metadata(said | {"agent-worker-number": "0"}) as one, metadata(said | {"agent-worker-number": "1"}) as other:
        more = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
        yield [{"JAX_FORCE_TPU_INIT": "1", "GCE_METADATA_IP": each} | more for each in (one, other)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*JOINABLE, "gce_tpu_vm"])
def test_two_processes_join_and_add_up(name, tmp_path):
    if name == "gce_tpu_vm":
        with cloud(tmp_path) as environs:
            assert run(environs, "cluster") == [[p, 2, p, "tpu", 3.0] for p in (0, 1)]
        return
    expected = RECORDED[name]["expected"]
    ranks = [0, 1] if expected["local_ranks"][0] is None else expected["local_ranks"]
    assert run(here(name)) == [[p, 2, ranks[p], expected["launcher"], 3.0] for p in (0, 1)]
