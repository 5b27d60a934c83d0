"""What a job's processes listen on, and where its token is not: real processes under the launcher, looked at from inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORK = """
import os, pathlib, sys
import numpy as np

def listening():
    \"\"\"The addresses on which this process listens, as the kernel writes them.\"\"\"
    own = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{each}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue  # the folder's own
    rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/self/net/{kind}").readlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in own]

found = []
sys.addaudithook(lambda event, arguments: found.append(event) if event == "pickle.find_class" else None)
import axonml_jax as ax

world = ax.init()
rank, group = world.rank, world.default_group()
assert float(ax.all_reduce_sum(np.float32(rank), group)) == sum(range(world.world_size))
assert ax.all_gather_object({"rank": rank}, group) == [{"rank": each} for each in range(world.world_size)]
print("listens", *listening(), flush=True)
ax.save("saved", {"w": np.arange(3.0)}, about={"who": "a test"})
found.clear()
assert ax.restore("saved", {"w": np.zeros(3)})["w"].tolist() == [0, 1, 2]
assert not found, found
said = b"".join(pathlib.Path(f"/proc/{each}/cmdline").read_bytes() for each in ("self", os.getppid()))
pathlib.Path(f"commands-{rank}").write_bytes(said)
ax.shutdown()
"""


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="asks Linux's /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_of_one_machine_listens_on_loopback_alone_and_shows_its_token_nowhere(processes, tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    secret = "a-token-that-nobody-shall-see"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "NPROC"))}
    command = [
        sys.executable,
        "-m",
        "axonml_jax",
        "launch",
        f"--nproc-per-node={processes}",
        "--log-dir=logs",
        "work.py",
    ]
    environment = kept | {"AXONML_JAX_TOKEN": secret, "JAX_PLATFORMS": "cpu", "AXONML_JAX_NO_PICKLE": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    ports = [word for line in run.stdout.splitlines() if "listens" in line for word in line.split("listens")[1].split()]
    assert {word.split(":")[0][-8:] for word in ports} == ({"0100007F"} if processes > 1 else set()), run.stdout
    assert len(ports) >= (processes + 1 if processes > 1 else 0)  # gloo in each, the coordinator in one
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"checkpoint.json", "stdout.log", "stderr.log", "commands-0"} <= names
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    assert secret not in run.stdout + run.stderr
