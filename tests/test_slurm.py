"""A Slurm of two nodes on this machine: processes join; the job that `launch --write slurm` prints stops, waits and goes on.

Slurm is no dependency of the tests: they run where `slurmctld` and `slurmd` are installed (Debian's `slurm-wlm`).
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_engines import found as joined
from test_launchers_processes import JOB

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason="Slurm is not installed"),
    pytest.mark.skipif(os.getuid() != 0, reason="its daemons are started as root"),
]

HOST = socket.gethostname().partition(".")[0]
NODES = f"{HOST},{HOST}-second"
CONFIGURED = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SMALL = [f"--model.{name}={size}" for name, size in {"hidden_size": 32, "num_heads": 2, "mlp_hidden_size": 64}.items()]
SMALL += ["--data.max_bytes=2000000", "--train.steps=300", "--train.eval_every=null", "--train.log_every=1"]
SMALL += ["--sample.count=0", "--checkpoint.every=20"]


def until(found, what, seconds=240):
    """What a function returns, once it is true."""
    for _ in range(seconds * 5):
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Runs one of Slurm's programs on a cluster of two nodes, each with what it takes for a GPU."""
    folder = tmp_path_factory.mktemp("slurm")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = sorted(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    config = folder / "slurm.conf"
    config.write_text(CONFIGURED.format(host=HOST, nodes=NODES, ports=ports, folder=folder))
    (folder / "gres.conf").write_text(f"NodeName={NODES} Name=gpu File=/dev/null\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "axonml-jax").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m axonml_jax "$@"\n')
    (folder / "bin" / "axonml-jax").chmod(0o755)
    for name in NODES.split(","):
        (folder / f"spool-{name}").mkdir()
    root = str(Path(__file__).resolve().parents[1])
    environ = os.environ | {"SLURM_CONF": str(config), "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    environ["PATH"] = os.pathsep.join([str(folder / "bin"), environ["PATH"]])
    daemons = [["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in NODES.split(","))]
    logs = [(folder / f"{'-'.join(each)}.log").open("w") for each in daemons]
    started = [
        subprocess.Popen(each, env=environ, stdout=log, stderr=log) for each, log in zip(daemons, logs, strict=True)
    ]

    def run(*command):
        return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=200)

    def idle():
        assert all(process.poll() is None for process in started), [Path(log.name).read_text() for log in logs]
        return run("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"]

    try:
        time.sleep(1)
        until(idle, "idle nodes", 40)
        yield run
    finally:
        run("scancel", "--full", "--signal=KILL", "--user=root")
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(timeout=60)
        for log in logs:
            log.close()


def test_the_tasks_of_a_step_join(cluster):
    each = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    done = cluster("srun", *each, sys.executable, "-c", JOB)
    assert joined(done) == [[n, 2, 0, "slurm", 3.0] for n in (0, 1)], done.stderr
    two = cluster("srun", "--nodes=1", "--ntasks=2", sys.executable, "-c", JOB)
    assert joined(two) == [[n, 2, n, "slurm", 3.0] for n in (0, 1)], two.stderr


def submitted(cluster, folder):
    """The job's number, of what is printed for these machines."""
    flags = ["--nnodes=2", "--gpus-per-node=1", f"--folder={folder}", "train", "quickstart", *SMALL]
    written = cluster("axonml-jax", "launch", "--write", "slurm", *flags)
    assert written.returncode == 0, written.stderr
    (folder / "job.sh").write_text(written.stdout.replace("--exclusive", f"--output={folder}/said.txt"))
    done = cluster("sbatch", "--parsable", str(folder / "job.sh"))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def losses(folder):
    """The loss by step, of a run's records; the last where a step was taken twice."""
    paths = list(folder.rglob("metrics.jsonl"))
    lines = paths[0].read_text().splitlines() if paths else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


def state(cluster, job):
    words = dict(word.partition("=")[::2] for word in cluster("scontrol", "show", "job", job).stdout.split())
    assert words["JobState"] != "FAILED", words
    return words["JobState"], int(words["Restarts"])


def test_a_job_that_is_stopped_or_requeued_ends_with_the_loss_of_an_undisturbed_one(cluster, tmp_path):
    calm, tossed = tmp_path / "calm", tmp_path / "tossed"
    calm.mkdir()
    tossed.mkdir()
    job = submitted(cluster, calm)
    until(lambda: state(cluster, job)[0] == "COMPLETED", "the undisturbed run")
    wanted = losses(calm)
    assert max(wanted) == 300

    job = submitted(cluster, tossed)
    said = tossed / "said.txt"
    tell = lambda: said.read_text() if said.exists() else ""
    until(lambda: max(losses(tossed), default=0) >= 25, "step 25")
    cluster("scancel", "--signal=TERM", job)  # as --signal=TERM@120 does before the time is over
    until(lambda: state(cluster, job)[1] == 1, "the job's next turn, by its own script")
    assert "stopped by SIGTERM after step" in tell()
    until(lambda: "resumed" in tell(), "the resumed run")
    step = max(losses(tossed))
    until(lambda: max(losses(tossed)) >= step + 25, "25 steps more")
    cluster("scontrol", "requeue", job)  # as for a job of higher priority
    until(lambda: state(cluster, job) == ("COMPLETED", 2), "the end")
    assert tell().count("resumed") >= 2
    found = losses(tossed)
    assert sorted(found) == sorted(wanted) == list(range(1, 301))
    assert found[300] == pytest.approx(wanted[300], rel=1e-6), (found[300], wanted[300])
