"""The command line: what it prints, what it refuses, what it leaves behind."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml
from jax.profiler import ProfileData
from workers.launch import hearing_ctrl_c

from axonml_jax.__main__ import main
from axonml_jax.cli import run as cli_run
from axonml_jax.cli.run import new_folder
from axonml_jax.config.config import read_config
from axonml_jax.facade.trainer import Trainer
from axonml_jax.training.single_device import Check

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--model.mlp_hidden_size=32"),
    *("--data.length=16", "--data.max_bytes=20_000", "--data.valid_fraction=0.1"),
    *("--train.steps=2", "--train.eval_every=null", "--sample.length=3", "--sample.count=1"),
)


@pytest.fixture
def text(tmp_path):
    """A folder with two texts, so that the two parts are of different files."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat. " * 400)
    (folder / "b.txt").write_text("the dog sat on the log. " * 60)
    return str(folder)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a command in this process; returns its status, output and error output."""

    def run(*argv):
        status = main([*argv, *([f"--output.dir={tmp_path / 'runs'}"] if argv[:1] == ("train",) else [])])
        return status, *capsys.readouterr()

    return run


def records(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def in_process(*argv: str, **options) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "axonml_jax", *argv]
    return subprocess.Popen(command, env=inherited | {"JAX_PLATFORMS": "cpu"}, **pipes, **options)


AT_ONCE = {
    "--help": 0,
    "--version": 0,
    "": 2,
    "train --help": 0,
    "explain --help": 0,
    "plan --help": 0,
    "launch --help": 0,
    "eval --help": 0,
    "generate --help": 0,
    "runs --help": 0,
    "devices --help": 0,
    "schedule --help": 0,
    "schedule --stages 2 --microbatches 2": 0,
    "schedule --schedule fastest --stages 2 --microbatches 4 --chunks 2": 0,
    "train": 2,
    "train none.yaml": 2,
    f"train {QUICKSTART} --train.stpes 3": 2,
    f"explain {QUICKSTART} --train.steps few": 2,
    "plan": 2,
    "launch none.py": 2,
    "devices --simulated few": 2,
    "import --help": 0,
    "export --help": 0,
    "export one": 2,
}


def test_help_schedules_and_wrong_arguments_do_not_wait_for_jax():
    program = (
        "import sys\n"
        "from axonml_jax.__main__ import main\n"
        f"for line, status in {AT_ONCE!r}.items():\n"
        "    assert main(line.split()) == status, line\n"
        "    assert not {'jax', 'flax', 'optax', 'orbax', 'grain'} & set(sys.modules), line\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    words = (
        "train",
        "explain",
        "devices",
        "--train.global_batch_size",
        "--hardware NAME: price a step",
        "1F1",
        "--svg",
    )
    assert all(word in " ".join(done.stdout.split()) for word in words)


@pytest.mark.slow
def test_training_prints_plan_and_ledger_first_and_leaves_everything_in_its_folder(run, text, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = run("train", QUICKSTART, *SMALL, "--data.path", text)
    assert status == 0
    order = ["parameters", "data=8 on 8 simulated", "gradients  all_reduce", "step 1/2", "step 2/2"]
    order += ["validation loss", "bigram model", "files", "sample 1"]
    assert [out.index(words) for words in order] == sorted(out.index(words) for words in order)
    folder = tmp_path / "runs" / "quickstart"
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "config.yaml", "loss.png", "checkpoints"}
    first, last = records(folder)
    assert first["step"] == 1 and {"loss", "grad_norm", "compile_time"} <= first.keys()
    assert {"loss", "grad_norm", "step_time", "tokens_per_second", "valid_loss", "valid_bigram"} <= last.keys()
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == 2


def test_a_second_run_of_the_same_name_gets_a_folder_of_its_own(tmp_path):
    config = read_config("train", [QUICKSTART, f"--output.dir={tmp_path}"])
    made = [Path(new_folder(config)).name for _ in range(3)]
    assert made == ["quickstart", "quickstart-2", "quickstart-3"]


@pytest.mark.parametrize(
    "name",
    ["ddp_bf16", "ddp_accumulate", "fsdp_zero1", "fsdp_zero2", "fsdp_hybrid", "fsdp_offload", "gpt_context", "gpt_moe"],
)
@pytest.mark.slow
def test_the_other_configurations_train(run, name):
    small = (
        "--devices.simulated=8",
        "--model.num_layers=2",
        "--train.steps=2",
        "--train.eval_batches=1",
        "--model.hidden_size=32",
        "--model.num_heads=2",
        "--model.mlp_hidden_size=64",
        "--data.max_bytes=200_000",
        "--sample.count=0",
        "--output.plot=false",
    )
    status, out, err = run("train", str(CONFIGS / f"{name}.yaml"), *small)
    assert status == 0, err
    assert "validation loss" in out


@pytest.mark.slow
def test_every_rank_may_train_a_model_of_its_own(run, text):
    status, out, _ = run("train", QUICKSTART, *SMALL, "--data.path", text, "--plan.sync_strategy=no_sync")
    assert status == 0 and "validation loss" in out


@pytest.mark.slow
def test_a_check_before_the_first_step_compares_its_batch_with_one_device_and_ends_a_run_that_differs(
    run, text, tmp_path, monkeypatch
):
    options = ("train", QUICKSTART, *SMALL, "--data.path", text, "--train.log_every=1")
    losses = lambda name: [each["loss"] for each in records(tmp_path / "runs" / name)]
    assert run(*options, "--name=plain")[0] == 0
    status, said, err = run(*options, "--name=checked", "--train.check=true")
    assert status == 0, err
    assert re.search(r"check +plan against one device: \d+ leaves are equal", said)
    assert losses("plain") == losses("checked")  # no batch was left out
    different = Check({"gradients/embed/embedding": "max|a-b| = 1 > 1e-05"}, {}, 9)
    monkeypatch.setattr(Trainer, "check", lambda self, batch: different)
    status, said, _ = run(*options, "--name=differs", "--train.check=true")
    assert status == 5 and "1 of 9 leaves differ\n  gradients/embed/embedding: max|a-b|" in said
    assert not (tmp_path / "runs" / "differs" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_replicas_train_by_themselves_and_join_once_a_round(run, text):
    more = ("--plan.diloco.every=2", "--plan.diloco.wire=int8", "--train.steps=4", "--train.max_nonfinite=3")
    status, out, err = run("train", QUICKSTART, *SMALL, "--data.path", text, *more)
    assert status == 0, err
    assert "DiLoCo over data: 2 steps alone, then one outer step as int8" in out and "every 2 steps" in out
    assert "validation loss" in out


def test_explain_prints_plan_and_ledger_and_allocates_nothing(run):
    gc.collect()
    before = len(jax.live_arrays())
    status, out, _ = run("explain", QUICKSTART, "--train.eval_every=null")
    assert status == 0
    assert "1,057,728 parameters" in out and "all_reduce" in out and "1.0000" in out
    assert len(jax.live_arrays()) <= before  # others' garbage may go meanwhile


@pytest.mark.slow
def test_explain_simulates_the_devices_that_a_machine_lacks_where_nobody_says_a_number(tmp_path):
    config = yaml.safe_load(Path(QUICKSTART).read_text()) | {"mesh": {"fsdp": 8, "data": -1}}
    del config["devices"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    out, err = (explaining := in_process("explain", str(tmp_path / "config.yaml"))).communicate()
    assert explaining.returncode == 0, err
    assert "this machine has 1 device: 8 are simulated, on which nothing runs" in out and "fsdp=8 on 8 simulated" in out
    out, err = (training := in_process("train", str(tmp_path / "config.yaml"), "--mesh.data=1")).communicate()
    assert training.returncode == 2 and err.rstrip().endswith("or 8 simulated: --devices.simulated 8"), err


def test_explain_leaves_devices_alone_that_suffice_or_were_asked_for(monkeypatch):
    config = read_config("explain", [QUICKSTART, "--mesh.fsdp=4", "--devices.simulated=null"])
    monkeypatch.setattr(cli_run, "requested_devices", lambda: 4)
    assert cli_run.simulated_where_few(config, {}) is config
    monkeypatch.setattr(cli_run, "requested_devices", lambda: 2)
    assert cli_run.simulated_where_few(config, {}).devices.simulated == 4
    asked = read_config("explain", [QUICKSTART, "--mesh.fsdp=4", "--devices.simulated=2"])
    assert cli_run.simulated_where_few(asked, {}) is asked
    monkeypatch.setattr(cli_run, "num_launched", lambda: 2)
    assert cli_run.simulated_where_few(config, {}) is config


@pytest.mark.slow
def test_the_sharded_quickstart_trains(run, text):
    status, out, err = run("train", str(CONFIGS / "gpt_fsdp.yaml"), *SMALL, "--data.path", text, "--output.plot=false")
    assert status == 0, err
    assert "fsdp=8 on 8 simulated" in out and "validation loss" in out


MEGABYTES = {"gpt_fsdp": 1_057_728, "fsdp_zero1": 246_336, "fsdp_zero2": 246_336, "fsdp_hybrid": 246_336}


@pytest.mark.parametrize("name", MEGABYTES)
def test_explain_prints_what_a_device_holds_and_sends(run, name):
    """Twelve bytes per parameter over the ranks that share them, beside what is gathered."""
    ranks = 4 if name == "fsdp_hybrid" else 8
    status, out, _ = run("explain", str(CONFIGS / f"{name}.yaml"))
    share = MEGABYTES[name] * 4 / ranks / 2**20
    assert status == 0
    assert f"parameters {share:.1f}, gradients {share:.1f}, optimizer {2 * share:.1f}" in out
    assert "reduce_scatter" in out and "all_gather" in out and "published" in out
    assert {"gpt_fsdp": "full_shard (ZeRO-3), ", "fsdp_zero1": "shard_optimizer (ZeRO-1), "}.get(name, "") in out


def test_devices_prints_what_there_is(run):
    status, out, _ = run("devices", "--simulated", "8")
    assert status == 0
    assert f"jax {jax.__version__}" in out and "8 device(s)" in out and out.count("\n7 ") == 1
    assert "messages by memory of this process" in out


def test_a_command_alone_lists_the_commands(run):
    status, out, err = run()
    assert status == 2 and out == "" and "train on text as a configuration file says" in err


def refusals(text, empty, tmp_path):
    return {
        "mesh degrees": (["--mesh.data=3"], ["data=3", "8 devices", "nearest legal degrees"]),
        "batch": (["--train.global_batch_size=12"], ["train.global_batch_size=12", "8 batch shards", "use 8 or 16"]),
        "microbatches": (["--plan.accumulate=3"], ["8 batch shards", "3 microbatches", "multiple of 24"]),
        "missing folder": ([f"--data.path={tmp_path / 'none'}"], ["no such folder", "none"]),
        "empty folder": ([f"--data.path={empty}"], ["no text in", "empty"]),
        "too little text": ([f"--data.path={text}", "--train.global_batch_size=800"], ["fewer than", "800"]),
        "several at once": (["--mesh.data=3", f"--data.path={empty}"], ["data=3", "no text in"]),
        "wrong flag": (["--train.stpes=3"], ["--train.stpes", "did you mean --train.steps?"]),
        "wrong type": (["--train.steps=few"], ["train.steps=few: must be a whole number"]),
    }


@pytest.mark.parametrize("case", list(refusals("", "", Path())))
def test_what_cannot_work_is_refused_in_one_message_before_anything_is_allocated(run, text, tmp_path, case):
    empty = tmp_path / "empty"
    empty.mkdir()
    flags, words = refusals(text, empty, tmp_path)[case]
    before = len(jax.live_arrays())
    status, out, err = run("train", QUICKSTART, *SMALL, *flags)
    assert status == 2 and out == "" and err.startswith("axonml-jax: error: ")
    assert all(word in err for word in words), err
    assert len(jax.live_arrays()) <= before and not (tmp_path / "runs").exists()  # tests before this one may leave some


@pytest.mark.parametrize(
    "flag,package,extra",
    [("--output.tensorboard", "tensorboardX", "tensorboard"), ("--output.mlflow=mine", "mlflow", "mlflow")],
)
def test_records_without_their_package_are_refused_before_anything_else(flag, package, extra, run, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run("train", QUICKSTART, *SMALL, flag)
    assert status == 2 and f"axonml-jax[{extra}]" in err


def test_errors_of_a_real_process_have_no_traceback():
    process = in_process("train", QUICKSTART, "--mesh.data=3")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == ""
    assert err.startswith("axonml-jax: error: mesh: ") and "Traceback" not in err


def test_a_broken_pipe_of_a_training_is_no_reader_that_has_enough(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError(f"{arguments}: a pipe of its own")

    monkeypatch.setattr("axonml_jax.__main__._dispatch", broken)
    for command in ("train", "launch"):
        with pytest.raises(BrokenPipeError, match="a pipe of its own"):
            main([command, "it.yaml"])


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_full_disk_under_its_output_ends_no_run(command):
    says = "print('a step', flush=True), print('a warning', file=sys.stderr, flush=True)"
    code = f"import sys, axonml_jax.__main__ as m; m._dispatch = lambda a: len([{says}]) - 2; sys.exit(m.main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code, command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr.splitlines() == [
        "axonml-jax: cannot write to standard output (No space left on device): lines are lost from here on",
        "a warning",
    ]


def test_a_training_whose_reader_has_gone_is_asked_to_stop_once_and_not_ended():
    code = """if True:
        import signal, sys, axonml_jax.__main__ as m
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        m._dispatch = lambda a: [print("a step", flush=True) for _ in range(3)] and 40 + len(asked)
        sys.exit(m.main())"""
    gone, stdout = os.pipe()
    os.close(gone)
    done = subprocess.run([sys.executable, "-c", code, "train"], stdout=stdout, stderr=subprocess.PIPE, text=True)
    os.close(stdout)
    assert done.returncode == 41 and done.stderr.count("cannot write to standard output (Broken pipe)") == 1


def test_unknown_commands_are_refused(run, capsys):
    assert main(["tarin"]) == 2 and "unknown command 'tarin'" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.slow
def test_ctrl_c_saves_ends_cleanly_and_keeps_what_was_recorded(text, tmp_path):
    runs = tmp_path / "runs"
    endless = ("--train.steps=1_000_000", "--train.log_every=1", f"--output.dir={runs}", f"--data.path={text}")
    with hearing_ctrl_c():
        process = in_process("train", QUICKSTART, *SMALL, *endless, cwd=tmp_path)
    metrics = runs / "quickstart" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    (step,) = re.findall(r"stopped by Ctrl-C after step (\d+); saved", out)
    assert "Ctrl-C again ends it at once" in err and "Traceback" not in err
    assert records(metrics.parent)[-1]["step"] == int(step) and (metrics.parent / "loss.png").exists()
    assert (metrics.parent / "checkpoints" / f"step_{int(step):08d}" / "checkpoint.json").exists()


@pytest.mark.slow
def test_profile_writes_a_trace(text, tmp_path):
    flags = ("--train.steps=9", "--profile", f"--output.dir={tmp_path}", f"--data.path={text}", "--sample.count=0")
    process = in_process("train", QUICKSTART, *SMALL, *flags)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    [trace] = (tmp_path / "quickstart" / "trace").rglob("*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(trace)).planes for line in plane.lines]
    assert [event.name for line in lines for event in line.events].count("step") == 5 and "trace" in out
