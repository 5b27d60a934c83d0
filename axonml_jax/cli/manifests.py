"""`axonml-jax launch --write KIND`: the manifest with which a cluster engine runs a configuration, after checking its plan.

Every engine starts one process a machine, which sees all its GPUs; `ax.init()` reads the job from that engine's variables.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from axonml_jax.base import TERMINATED, USAGE_ERROR, size_in_words
from axonml_jax.cli.flags import importable, in_flags
from axonml_jax.cli.plan import predicted_on
from axonml_jax.cli.run import batch_of_tokens
from axonml_jax.cli.train import DIFFERS, DIVERGED
from axonml_jax.config.config import (
    Budget,
    ConfigError,
    RunConfig,
    against_split,
    budget_parser,
    imports_parser,
    read_config,
    split_flags,
)
from axonml_jax.config.sections import OwnModel
from axonml_jax.mesh.launchers import PORT
from axonml_jax.mesh.shape import MeshShape
from axonml_jax.planner.hardware import HARDWARE, Assumptions, Hardware
from axonml_jax.sharding.batch import check_batch

GRACE = 120
"""Seconds from SIGTERM to SIGKILL: for the step under way, and a checkpoint of it."""

RESTARTS = 3
"""How often an engine starts all processes again after a failure."""

_HOPELESS = (USAGE_ERROR, DIVERGED, DIFFERS)
_GPU = "nvidia.com/gpu"
_OF_SKY = {"a100": "A100-80GB", "h100": "H100", "h200": "H200"}
_GPUS = {name: kind for name, kind in HARDWARE.items() if kind.platform == "cuda"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the manifests state of a job.

    Attributes:
      name: the run's, made valid for machines (see `_machine_name`).
      nnodes: number of machines.
      gpus: number of GPUs of each.
      kind: the GPU.
      image: the container's; empty without one.
      folder: a folder that all machines share.
      claim: the volume of that folder: a claim on Kubernetes, a bucket for SkyPilot.
      arguments: what follows `axonml-jax train`.
    """

    name: str
    nnodes: int
    gpus: int
    kind: Hardware
    image: str
    folder: str
    claim: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The command that each process runs."""
        return ["axonml-jax", "train", *self.arguments]


# --------------------------------------------------------------------------------------------------
# Kubernetes: JobSet, Kubeflow Trainer and KubeRay.
# --------------------------------------------------------------------------------------------------


def _container(job: Job, name: str, **more: Any) -> dict[str, Any]:
    mounts = [{"name": "shared", "mountPath": job.folder}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {"name": name, "image": job.image, **more, "volumeMounts": mounts}


def _volumes(job: Job) -> list[dict[str, Any]]:
    claim = {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}}
    return [claim, {"name": "shm", "emptyDir": {"medium": "Memory"}}]


def _jobset(job: Job) -> tuple[str, dict[str, Any]]:
    environ = {"MASTER_ADDR": f"{job.name}-node-0-0.{job.name}", "MASTER_PORT": PORT, "WORLD_SIZE": job.nnodes}
    container = _container(
        job,
        "train",
        command=job.command,
        env=[{"name": name, "value": str(value)} for name, value in environ.items()],
        ports=[{"containerPort": PORT}],
        resources={"limits": {_GPU: job.gpus}},
    )
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        "volumes": _volumes(job),
    }
    hopeless = {"containerName": "train", "operator": "In", "values": list(_HOPELESS)}
    of_job = {
        "parallelism": job.nnodes,
        "completions": job.nnodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": hopeless}]},
        "template": {"spec": pod},
    }
    rules = [{"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    spec = {
        "failurePolicy": {"maxRestarts": RESTARTS, "rules": rules},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": of_job}}],
    }
    said = f"""\
kubectl apply -f FILE; the cluster needs JobSet and the claim {job.claim}; the image must hold the configuration.
If one pod is lost all start again, {RESTARTS} times, and the run goes on from its checkpoint. A run that cannot start, or
diverges (exit codes {", ".join(map(str, _HOPELESS))}), ends the set. SIGTERM saves first, within {GRACE} s."""
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return said, {**kind, "metadata": {"name": job.name}, "spec": spec}


def _trainjob(job: Job) -> tuple[str, dict[str, Any]]:
    mounts = _container(job, "node")["volumeMounts"]
    pod = {
        "terminationGracePeriodSeconds": GRACE,
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": _volumes(job),
    }
    template = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    spec = {
        "runtimeRef": {"name": "jax-distributed"},
        "trainer": {
            "image": job.image,
            "numNodes": job.nnodes,
            "command": job.command,
            "resourcesPerNode": {"limits": {_GPU: job.gpus}},
        },
        "runtimePatches": [{"manager": "axonml-jax/launch", "trainingRuntimeSpec": {"template": template}}],
    }
    said = f"""\
kubectl apply -f FILE; the cluster needs Kubeflow Trainer v2 with its runtime jax-distributed, and the claim {job.claim}; the
image must hold the configuration. The runtime says how often a job starts again; the run goes on from its checkpoint."""
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return said, {**kind, "metadata": {"name": job.name}, "spec": spec}


def _rayjob(job: Job) -> tuple[str, dict[str, Any]]:
    command = [
        *("python", "-m", "axonml_jax.ray", *job.arguments, "--num-workers", str(job.nnodes)),
        *("--gpus-per-worker", str(job.gpus), "--storage", job.folder, "--max-failures", str(RESTARTS)),
    ]

    def pod(name: str, **more: Any) -> dict[str, Any]:
        spec = {"terminationGracePeriodSeconds": GRACE, "containers": [_container(job, name, **more)]}
        return {"spec": {**spec, "volumes": _volumes(job)}}

    workers = {
        "groupName": "gpu",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nnodes),
        "rayStartParams": {},
        "template": pod("ray-worker", resources={"limits": {_GPU: job.gpus}}),
    }
    cluster = {
        "headGroupSpec": {"rayStartParams": {"num-gpus": "0"}, "template": pod("ray-head")},
        "workerGroupSpecs": [workers],
    }
    spec = {
        "entrypoint": shlex.join(command),
        "backoffLimit": RESTARTS,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    said = f"""\
kubectl apply -f FILE; the cluster needs KubeRay and the claim {job.claim}; the image must hold the configuration and
axonml-jax[ray].
A worker that is lost costs one of {RESTARTS} restarts, the head one of {RESTARTS} clusters; both go on from the checkpoint."""
    return said, {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": job.name}, "spec": spec}


# --------------------------------------------------------------------------------------------------
# Slurm and SkyPilot.
# --------------------------------------------------------------------------------------------------


def _slurm(job: Job) -> str:
    container = f" --container-image={shlex.quote(job.image)}" if job.image else ""
    return f"""\
#!/bin/bash
# sbatch FILE; {job.folder} is a folder that all machines share, and so is where the configuration lies.
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --exclusive
#SBATCH --time=24:00:00
# {GRACE} s before the time is over the run is asked to save and stop.
#SBATCH --signal=TERM@{GRACE}
#SBATCH --requeue
#SBATCH --open-mode=append
srun --kill-on-bad-exit=1{container} {_shell(job)}
status=$?
# Stopped by a signal and saved: the job waits for its next turn, and goes on from there.
if [ "$status" -eq {TERMINATED} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def _skypilot(job: Job) -> tuple[str, dict[str, Any]]:
    resources: dict[str, Any] = {"accelerators": f"{_OF_SKY[job.kind.name]}:{job.gpus}"}
    resources |= {"image_id": f"docker:{job.image}"} if job.image else {}
    recovery = {"strategy": "FAILOVER", "max_restarts_on_errors": RESTARTS}
    setup = {} if job.image else {"setup": 'pip install . "jax[cuda13]"'}
    said = f"""\
sky jobs launch FILE; it brings the working directory along{"" if job.image else ", a clone of axonml_jax that setup installs"},
and the bucket {job.claim} as {job.folder}.
Machines that are taken away are replaced, a failure starts again {RESTARTS} times; both go on from the checkpoint."""
    return said, {
        "name": job.name,
        "num_nodes": job.nnodes,
        "resources": {**resources, "job_recovery": recovery},
        "workdir": ".",
        "file_mounts": {job.folder: {"name": job.claim, "mode": "MOUNT"}},
        **setup,
        "run": _shell(job),
    }


def _shell(job: Job) -> str:
    """The command in shell syntax; variables such as $HOME are left for the shell to expand."""
    kept = lambda word: '"' + re.sub(r'(["`\\])', r"\\\1", word) + '"'
    return " ".join(kept(word) if "$" in word else shlex.quote(word) for word in job.command)


KINDS: dict[str, Callable[[Job], Any]] = {
    "jobset": _jobset,
    "trainjob": _trainjob,
    "rayjob": _rayjob,
    "slurm": _slurm,
    "skypilot": _skypilot,
}
"""The engines by name."""

_NEED_IMAGE = ("jobset", "trainjob", "rayjob")


def manifest(kind: str, job: Job) -> str:
    """The manifest's text for an engine."""
    made = KINDS[kind](job)
    if isinstance(made, str):
        return made
    said, content = made
    comment = "".join(f"# {line}\n" for line in said.splitlines())
    return comment + yaml.safe_dump(content, sort_keys=False, width=120)


# --------------------------------------------------------------------------------------------------
# The command line, and the plan on the machines that are asked for, checked on paper.
# --------------------------------------------------------------------------------------------------


def write_manifest(argv: Sequence[str]) -> int:
    """Check a configuration on paper, and print its manifest.

    Args:
      argv: what follows `axonml-jax launch`: `--write KIND`, its flags, `train`, a configuration and flags that change it.

    Returns:
      0.

    Raises:
      ConfigError: for flags that are missing or wrong, and what cannot run on these machines, before anything is printed.
    """
    given = _parser().parse_args(argv)
    if given.command != "train":
        page = {"rayjob": "ray", "jobset": "kubernetes", "trainjob": "kubernetes"}.get(given.kind, given.kind)
        raise ConfigError(
            f"launch --write {given.kind}: only `train CONFIG` can be written, not {given.command!r}; how a script of your "
            f"own is started stands in docs/guides/engines/{page}.md"
        )
    if not given.image and given.kind in _NEED_IMAGE:
        raise ConfigError(f"launch --write {given.kind}: --image IMAGE is missing, the container that every pod runs")
    kind = _GPUS[given.hardware]
    folder = given.folder or ("$HOME/runs" if given.kind == "slurm" else "/shared")
    if given.kind != "slurm" and not folder.startswith("/"):
        raise ConfigError(f"launch --write {given.kind}: --folder {folder}: give it from the root, as in /shared")
    gpus = kind.island if given.gpus_per_node is None else given.gpus_per_node
    if given.nnodes < 1 or gpus < 1:
        raise ConfigError(f"launch --write: --nnodes {given.nnodes}, --gpus-per-node {gpus}: must be at least 1")
    arguments, config, budget = _arguments(given.kind, given.arguments, folder)
    said = check_on(config, given.nnodes * gpus, kind, budget)
    name = _machine_name(config.name)
    job = Job(
        name=name, nnodes=given.nnodes, gpus=gpus, kind=kind, image=given.image or "", folder=folder,
        claim=given.claim or f"{name}-shared", arguments=tuple(arguments),
    )  # fmt: skip
    text = manifest(given.kind, job)
    first, _, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    print(f"{first}\n" * bool(first) + f"# {said}\n{rest}", end="")
    return 0


def _machine_name(name: str) -> str:
    """Returns a run's name made valid for machines and services: it begins with a letter, and has at most 40 characters."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")


def _arguments(kind: str, given: Sequence[str], folder: str) -> tuple[list[str], RunConfig, Budget]:
    """The arguments of `train` on the cluster, and the configuration and limits that they mean."""
    if not given:
        raise ConfigError(f"launch --write {kind}: give a configuration after train")
    [allowed, budget], rest = split_flags([imports_parser("train"), budget_parser("train")], given)
    imports = importable(allowed["allow_imports"])
    if kind == "rayjob" and any(budget.values()):
        raise ConfigError(
            "launch --write rayjob: --max-memory and --force are flags of axonml-jax train, which Ray's driver lacks"
        )
    config = read_config("train", rest, imports=imports)
    added = ["--devices.simulated", "null"] * (config.devices.simulated is not None)
    own = {word.partition("=")[0] for word in given if word.startswith("--")}
    wanted = {"--output.compiled": f"{folder}/compiled"}
    if kind == "rayjob":  # Ray's own folder and restarts; its driver gives Ray's run this name too
        wanted |= {"--name": config.name}
    else:
        wanted = {"--output.dir": folder} | wanted | ({"--resume": "auto"} if config.resume is None else {})
    added += [word for flag, value in wanted.items() if flag not in own for word in (flag, value)]
    return [*given, *added], read_config("train", [*rest, *added], imports=imports), Budget(**budget)


def check_on(config: RunConfig, devices: int, kind: Hardware, budget: Budget) -> str:
    """Check a configuration for a number of devices of a kind, without having them.

    Args:
      config: the run's.
      devices: how many there will be.
      kind: of hardware.
      budget: `max_memory` is the limit in the place of the hardware's; with `force` there is none.

    Returns:
      The mesh and the predicted memory in words; no memory of a model of the user's own or with adapters.

    Raises:
      ConfigError: for degrees, sizes, a batch or memory that do not fit, or a run that saves nothing.
    """
    if config.checkpoint.every is None:
        raise ConfigError(
            "checkpoint.every=null saves nothing, and every restart would begin anew: set checkpoint.every"
        )
    try:
        shape = MeshShape(**config.degrees).resolve(devices)
        plan, model = config.build_plan(), None if isinstance(config.model, OwnModel) else config.model
        if model is not None and (
            wrong := list(against_split(replace(config.mesh, **shape.degrees), model, config.data.length))
        ):
            raise ValueError("; ".join(wrong))
        if config.data.class_path is None:
            check_batch(plan.batch_layout(shape.degrees), batch_of_tokens(config), plan.microbatches)
    except (TypeError, ValueError) as error:
        said = in_flags(str(error), "write for {} (--nnodes times --gpus-per-node)")
        raise ConfigError(f"on {devices} devices: {said}") from error
    on = f"{', '.join(f'{axis}={size}' for axis, size in shape.degrees.items())} on {devices} {kind.name}"
    if model is None or config.finetune.lora.rank is not None:
        return f"{on}; memory is not predicted for a model of your own, nor for adapters: axonml-jax explain says what rests"
    found = predicted_on(config, plan, shape.degrees, kind.platform, kind.torus)
    limit = budget.max_memory or kind.memory * Assumptions().memory_margin
    if found.memory.total > limit and not budget.force:
        raise ConfigError(
            f"on {devices} {kind.name}: this plan needs {found.memory.total / 2**30:,.1f} GiB on each device, and "
            f"{limit / 2**30:,.1f} GiB may be filled: let axonml-jax plan find one that fits, or take more of mesh.fsdp, "
            "plan.remat or plan.accumulate"
        )
    return f"{on}; {size_in_words(found.memory.total)} of each are needed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axonml-jax launch",
        usage="axonml-jax launch --write KIND --nnodes N [flags] train CONFIG [--section.key value ...]",
        description="Check a configuration on N machines, and print what a cluster's engine is given to run it there.",
        allow_abbrev=False,
    )
    parser.add_argument("--write", dest="kind", choices=list(KINDS), required=True, help="for which engine")
    parser.add_argument("--nnodes", type=int, required=True, metavar="N", help="machines, a process on each")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of each (as many as the hardware has)")
    parser.add_argument("--hardware", choices=list(_GPUS), default="h100", help="their kind (default: h100)")
    parser.add_argument("--image", metavar="IMAGE", help="the container, with the package and the configuration")
    parser.add_argument("--folder", metavar="DIR", help="a folder that all machines share (/shared; Slurm: $HOME/runs)")
    parser.add_argument("--claim", metavar="NAME", help="the volume's claim or the bucket that it is (NAME-shared)")
    parser.add_argument("command", help="train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="CONFIG ...", help="what follows it")
    return parser
