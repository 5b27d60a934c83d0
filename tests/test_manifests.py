"""What `axonml-jax launch --write` prints is valid by the engines' own schemas, joins, and is printed for what can run only."""

import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from axonml_jax.__main__ import main
from axonml_jax.cli import manifests
from axonml_jax.config.config import read_config
from axonml_jax.mesh.launchers import LaunchEnvironment, launch_environment

SCHEMAS = json.loads((Path(__file__).parent / "fixtures" / "manifest_schemas.json").read_text("utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
COMMAND = ["--nnodes=2", "--image=example.org/train:1", "train", "configs/gpt_fsdp.yaml"]


def problems(schema, value, where=""):
    """Every place where a value is not as a schema has it; what this knows of JSON Schema is what the schemas here use."""
    kinds = schema.get("type", [])
    if kinds and not isinstance(value, tuple(TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))):
        yield f"{where}: {value!r} is no {kinds}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{where}: {value!r} does not match"
    if not schema.get("minimum", value if isinstance(value, int) else 0) <= (value if isinstance(value, int) else 0):
        yield f"{where}: {value!r} is too small"
    if isinstance(value, dict):
        yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            if inner is False:
                yield f"{where}.{name} is unknown"
            else:
                yield from problems(inner, each, f"{where}.{name}")
    for number, each in enumerate(value if isinstance(value, list) else ()):
        yield from problems(schema.get("items", {}), each, f"{where}[{number}]")


def written(kind, capsys, command=COMMAND):
    assert main(["launch", f"--write={kind}", *command]) == 0
    return capsys.readouterr().out


def objects(value):
    """Every object in a manifest whose keys the engine names."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)


FREE = ("limits", "rayStartParams", "file_mounts")
"""Objects whose keys are the user's."""


@pytest.mark.parametrize("kind", SCHEMAS)
def test_manifests_are_valid_and_a_misspelt_key_is_found(kind, capsys):
    content = yaml.safe_load(written(kind, capsys))
    assert list(problems(SCHEMAS[kind], content)) == []
    free = [each[name] for each in objects(content) for name in FREE if name in each]
    named = [each for each in objects(content) if each and not any(each is other for other in free)]
    for each in named:
        name = next(reversed(each))
        each[f"{name}x"] = each.pop(name)
        assert any(f".{name}x is unknown" in found for found in problems(SCHEMAS[kind], content)), name
        each[name] = each.pop(f"{name}x")
    assert list(problems(SCHEMAS[kind], content)) == []


def test_pods_of_a_jobset_join(capsys):
    content = yaml.safe_load(written("jobset", capsys))
    [replicated] = content["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "1"}
    assert launch_environment(environ) == LaunchEnvironment(
        "kubernetes",
        f"{content['metadata']['name']}-{replicated['name']}-0-0.{content['metadata']['name']}:29500",
        2,
        1,
    )
    assert job["parallelism"] == job["completions"] == 2
    # The program's own exit codes: a refusal must not be tried again.
    assert set(job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]) == {2, 3, 5}
    assert [word for word in container["command"] if word in ("auto", "/shared", "/shared/compiled")] == [
        *("/shared", "/shared/compiled", "auto")
    ]


@pytest.mark.parametrize(("more", "name"), [([], "gpt-fsdp"), (["--name", "Foo_2"], "Foo_2"), (["--name=x"], "x")])
def test_the_entry_point_of_a_ray_job_is_read_by_the_driver(more, name, capsys, monkeypatch):
    from axonml_jax import ray as axr

    entry = shlex.split(yaml.safe_load(written("rayjob", capsys, [*COMMAND, *more]))["spec"]["entrypoint"])
    assert entry[:3] == ["python", "-m", "axonml_jax.ray"]
    seen = {}

    def train(config, num_workers, overrides, **options):
        seen.update(options, config=config, num_workers=num_workers, overrides=overrides)
        return types.SimpleNamespace(fit=lambda: types.SimpleNamespace(checkpoint=None))

    monkeypatch.setattr(axr, "train", train)
    assert axr.main(entry[3:]) == 0
    assert (seen["config"], seen["num_workers"], seen["overrides"][:4]) == ("configs/gpt_fsdp.yaml", 2, OVERRIDES)
    assert read_config("train", [seen["config"], *seen["overrides"]]).name == name
    assert seen["resources_per_worker"] == {"GPU": 8}
    assert (seen["storage_path"], seen["name"], seen["max_failures"]) == ("/shared", name, 3)


OVERRIDES = ["--devices.simulated", "null", "--output.compiled", "/shared/compiled"]


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (143, True), (2, False)])
def test_a_batch_script_asks_for_its_next_turn_when_it_was_stopped_and_saved(status, requeued, capsys, tmp_path):
    (tmp_path / "job").write_text(written("slurm", capsys))
    tools = {"srun": f'echo "$@" > {tmp_path}/ran; exit {status}', "scontrol": f'echo "$@" > {tmp_path}/asked'}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", tmp_path / "job"], env=environ).returncode == status
    assert (tmp_path / "asked").exists() == requeued
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 7\n"
    ran = (tmp_path / "ran").read_text().split()
    assert ran[:3] == ["--kill-on-bad-exit=1", "--container-image=example.org/train:1", "axonml-jax"]
    assert ran[ran.index("--output.dir") + 1] == f"{tmp_path}/runs"


def test_what_the_user_says_is_not_said_again(capsys):
    text = written(
        "slurm", capsys, ["--nnodes=1", "train", "configs/gpt_fsdp.yaml", "--output.dir=/mine", "--resume", "x"]
    )
    assert text.count("--output.dir") == text.count("--resume") == 1


def test_words_with_variables_are_the_shells_and_stay_one_word(capsys, tmp_path):
    text = written("slurm", capsys, ["--nnodes=1", "train", "configs/gpt_fsdp.yaml", '--name=$HOME "a b" `c`'])
    (tmp_path / "srun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/ran\n')
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/x"}
    assert subprocess.run(["bash", "-c", text], env=environ).returncode == 0
    assert '--name=/x "a b" `c`' in (tmp_path / "ran").read_text().splitlines()


@pytest.mark.parametrize(("name", "machine"), [("7B run", "run-7b-run"), ("a" * 39 + "_b", "a" * 39), ("_", "run")])
def test_a_run_is_called_as_a_machine_may_be(name, machine, capsys):
    text = written("jobset", capsys, [*COMMAND, f"--name={name}"])
    assert yaml.safe_load(text)["metadata"]["name"] == machine


REFUSED = {
    "a folder from nowhere": ("jobset", ["--folder=runs", *COMMAND], "--folder runs: give it from the root"),
    "a budget of Ray's": ("rayjob", [*COMMAND, "--max-memory=70GiB"], "--max-memory and --force are flags of"),
    "no image": ("jobset", ["--nnodes=2", "train", "configs/gpt_fsdp.yaml"], "--image IMAGE is missing"),
    "no machine": ("slurm", ["--nnodes=0", "train", "configs/gpt_fsdp.yaml"], "--nnodes 0"),
    "another command": (
        "slurm",
        ["--nnodes=1", "eval", "x"],
        "only `train CONFIG` can be written, not 'eval'; .*engines/slurm.md",
    ),
    "no configuration": ("slurm", ["--nnodes=1", "train"], "give a configuration after train"),
    "a key": ("slurm", ["--nnodes=1", "train", "configs/gpt_fsdp.yaml", "--train.stepz=1"], "train.stepz"),
    "a batch": ("slurm", ["--nnodes=3", "train", "configs/gpt_fsdp.yaml"], "on 24 devices: .*24"),
    "degrees": (
        "slurm",
        ["--nnodes=1", "train", "configs/gpt_fsdp.yaml", "--mesh.data=3"],
        "on 8 devices: .*must divide.*or write for 6 \\(--nnodes times --gpus-per-node\\)",
    ),
    "heads": (
        "slurm",
        ["--nnodes=2", "train", "configs/gpt_tensor.yaml", "--mesh.tensor=-1", "--mesh.data=1"],
        "on 16 devices: .*heads",
    ),
    "nothing saved": (
        "slurm",
        ["--nnodes=1", "train", "configs/gpt_fsdp.yaml", "--checkpoint.every=null"],
        "every restart would begin anew",
    ),
    "memory": (
        "slurm",
        [
            *("--nnodes=1", "--gpus-per-node=1", "train", "configs/gpt_fsdp.yaml"),
            *("--model.hidden_size=16384", "--model.num_layers=64", "--model.num_heads=128"),
        ],
        "needs .* GiB on each device, and 67.1 GiB may be filled",
    ),
    "not first": (None, ["--nnodes=1", "--write=slurm", "train", "x"], "--write comes first"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_and_nothing_is_printed(case, capsys):
    kind, command, words = REFUSED[case]
    assert main(["launch", *([f"--write={kind}"] if kind else []), *command]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.search(words, err, re.DOTALL), err


@pytest.mark.slow
def test_the_flags_of_train_count_as_they_do_there(capsys, tmp_path, monkeypatch):
    large = ["--nnodes=1", "--gpus-per-node=1", "train", "configs/gpt_fsdp.yaml", "--model.hidden_size=16384"]
    large += ["--model.num_layers=64", "--model.num_heads=128"]
    assert "--force" in written("slurm", capsys, [*large, "--force"])
    assert "--max-memory 9TB" in written("slurm", capsys, [*large, "--max-memory", "9TB"])
    assert main(["launch", "--write=slurm", *COMMAND[:1], *COMMAND[2:], "--max-memory=1KiB"]) == 2
    assert "needs" in capsys.readouterr().err
    configuration = (Path.cwd() / COMMAND[-1]).resolve()
    (tmp_path / "of_the_working_directory.py").write_text(
        "import optax\n\ndef mine(learning_rate):\n    return optax.adam(learning_rate)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    own = ["--optim.class_path=of_the_working_directory.mine"]
    written(
        "slurm", capsys, ["--nnodes=1", "train", str(configuration), *own, "--allow-imports=of_the_working_directory"]
    )


def test_every_kind_has_a_schema_or_a_script():
    assert set(manifests.KINDS) == {*SCHEMAS, "slurm"}


def found(content, name):
    """Every value of a key, however deep."""
    return [each[name] for each in objects(content) if name in each]


def test_every_kind_gives_time_to_save_starts_again_and_goes_on(capsys):
    text = {kind: written(kind, capsys) for kind in manifests.KINDS}
    content = {kind: yaml.safe_load(text[kind]) for kind in SCHEMAS}
    assert {kind: found(content[kind], "terminationGracePeriodSeconds") for kind in SCHEMAS} == {
        "jobset": [120],
        "trainjob": [120],
        "rayjob": [120, 120],
        "skypilot": [],
    }
    assert found(content["jobset"], "maxRestarts") == [3]
    assert found(content["jobset"], "ports") == [[{"containerPort": 29500}]]
    assert found(content["rayjob"], "backoffLimit") == [3]
    assert found(content["skypilot"], "job_recovery") == [{"strategy": "FAILOVER", "max_restarts_on_errors": 3}]
    asked = [line for line in text["slurm"].splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=TERM@120", "#SBATCH --open-mode=append"} <= {*asked}
    # Ray's driver goes on by the run's name.
    going_on = {kind: bool(re.search(r"--resume\s+(- )?auto", each)) for kind, each in text.items()}
    assert going_on == {kind: kind != "rayjob" for kind in manifests.KINDS}
