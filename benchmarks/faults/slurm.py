"""A Slurm of one node, started and stopped by whoever needs one: Debian's munge and slurm-wlm, run as root in a folder."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

START_LIMIT = 60

CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={daemon}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def one_node_slurm(folder: Path, cpus: int) -> Iterator[dict[str, str]]:
    """A running Slurm; nothing of it is left afterwards.

    Args:
      folder: where its configuration, key, sockets, state and logs go.
      cpus: how many tasks the node takes; more than it has cores is fine.

    Yields:
      The variables that `srun` needs.

    Raises:
      RuntimeError: when the node does not become idle, with the end of the logs.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key, conf, wanted = folder / "munge.key", folder / "slurm.conf", socket.gethostname().split(".")[0]
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    conf.write_text(
        CONF.format(host=wanted, folder=folder, cpus=cpus, controller=_free_port(), daemon=_free_port()).lstrip()
    )
    environ = {"SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            child = subprocess.Popen([name, *words], env=os.environ | environ, stdout=log, stderr=log)
            stack.callback(_stop, child)

        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        own = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in names]
        start("munged", "--foreground", "--force", *own)
        _wait(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-c")
        idle = lambda: _says(["sinfo", "--noheader", "--format=%t"], environ) == "idle"
        _wait(idle, folder)
        try:
            yield environ
        finally:
            subprocess.run(["scancel", "--user=root"], env=os.environ | environ, capture_output=True, check=False)
            _wait(idle, folder)  # slurmd leaves the processes of a step alone when it ends


def _says(command: Sequence[str], environ: dict[str, str]) -> str:
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _wait(ready, folder: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while not ready():
        if time.monotonic() > deadline:
            said = "\n".join(f"{log.name}: {log.read_text()[-1000:]}" for log in sorted(folder.glob("*.[ol]*")))
            raise RuntimeError(f"Slurm has not started within {START_LIMIT} s:\n{said}")
        time.sleep(0.2)


def _stop(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
