"""Two processes of real launchers, where `.ci/engines` has installed them: Open MPI joins, MPICH does with an address."""

import json
import os
import re
import subprocess
import sys

import pytest
from test_launchers_processes import JOB

pytestmark = pytest.mark.slow


def mpirun(which, *flags):
    program = os.environ.get(f"AXONML_{which}") or pytest.skip(f"AXONML_{which}, the path of its mpirun, is not set")
    more = {"JAX_PLATFORMS": "cpu", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Wheels of mpirun find their parts by the PATH.
    more["PATH"] = os.pathsep.join([os.path.dirname(program), os.environ["PATH"]])
    command = [program, "-n", "2", *flags, sys.executable, "-c", JOB]
    return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=200)


def found(done):
    return sorted(json.loads(line) for line in done.stdout.splitlines() if re.match(r"\[\d", line))


def test_processes_of_open_mpi_join():
    done = mpirun("OPENMPI", "--oversubscribe")
    assert found(done) == [[n, 2, n, "openmpi", 3.0] for n in (0, 1)], done.stderr


def test_processes_of_mpich_are_never_alone_and_join_with_an_address():
    done = mpirun("MPICH")
    assert done.returncode != 0
    assert "mpich: MASTER_ADDR, MASTER_PORT missing beside PMI_SIZE=2" in done.stderr
    address = ["-genv", "MASTER_ADDR", f"127.{os.getpid() % 251}.10.1", "-genv", "MASTER_PORT", "29500"]
    done = mpirun("MPICH", *address)
    assert found(done) == [[n, 2, n, "mpich", 3.0] for n in (0, 1)], done.stderr
