"""The launcher with real JAX processes: a DDP step, `train` as on one process, and a failure in the middle of a collective."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from workers.launch import QUICK
from workers.launched_steps import ROWS, TX, loss_fn, model

import axonml_jax as ax
from axonml_jax.cli.records import read_records
from axonml_jax.cli.run import start_devices
from axonml_jax.mesh import join

ROOT = Path(__file__).resolve().parents[1]
STEPS = str(ROOT / "tests" / "workers" / "launched_steps.py")
TIME_LIMIT = 240
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2", "--model.mlp_hidden_size=32"),
    *("--data.length=16", "--data.max_bytes=20_000", "--data.valid_fraction=0.1", "--train.steps=3"),
    *("--train.eval_every=null", "--train.log_every=1", "--output.plot=false"),
    *("--sample.count=3", "--sample.length=8", "--sample.temperature=0"),
)


def axonml(*argv, **options):
    """`axonml-jax ARGV` without what the tests' own process has set up for itself, compiling quickly what runs once."""
    unwanted = ("XLA_", "JAX_", "NPROC", "PET_", "SLURM", "OMPI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    quick = {"XLA_FLAGS": QUICK}
    return subprocess.run(
        [sys.executable, "-m", "axonml_jax", *argv],
        env=kept | quick | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
        **options,
    )


@pytest.mark.slow
def test_two_processes_train_as_one_device_does():
    done = axonml("launch", "--nproc-per-node=2", STEPS, "end")
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [json.loads(line.split("] ", 1)[1]) for line in done.stdout.splitlines()]
    seen.sort(key=lambda process: process["rank"])
    assert [(process["rank"], process["local"], process["size"], process["devices"]) for process in seen] == [
        (0, 0, 2, 1),
        (1, 1, 2, 1),
    ]
    alone = ax.DDP(model(), ax.make_mesh(data=1, devices=ax.World.mock(1).devices)).trainer(TX, loss_fn)
    wanted = [float(alone.step(batch)["loss"]) for batch in ROWS]
    for process in seen:
        np.testing.assert_allclose(process["losses"], wanted, rtol=1e-9)


@pytest.mark.slow
def test_a_script_that_forgets_to_join_trains_nowhere(tmp_path):
    script = tmp_path / "forgets.py"
    script.write_text("import axonml_jax as ax\nprint('mesh', ax.make_mesh(data=-1))\n")
    done = axonml("launch", "--nproc-per-node=2", str(script))
    assert done.returncode == 1 and "mesh" not in done.stdout, (done.stdout, done.stderr[-3000:])
    assert "of 2 that axonml-jax launch has started, and it has not joined the others" in done.stderr, done.stderr[
        -3000:
    ]


@pytest.mark.slow
def test_a_failure_between_collectives_stops_the_job_and_is_named():
    start = time.monotonic()
    done = axonml("launch", "--nproc-per-node=2", STEPS, "raise")
    last = done.stderr[done.stderr.index("axonml-jax launch: rank 1 failed first") :]
    assert done.returncode == 1 and last.rstrip().endswith("ValueError: boom"), done.stderr[-3000:]
    assert time.monotonic() - start < TIME_LIMIT / 2  # JAX alone would wait for minutes


@pytest.mark.slow
def test_train_on_two_processes_records_what_it_does_on_two_simulated_devices(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the cat sat on the mat. " * 400)
    (text / "b.txt").write_text("the dog sat on the log. " * 60)
    config = ["train", str(ROOT / "configs" / "quickstart.yaml"), *SMALL, f"--data.path={text}"]
    several = [*config, "--devices.simulated=null", f"--output.dir={tmp_path / 'several'}"]
    runs = {
        "several": axonml("launch", "--nproc-per-node=2", "--module", "axonml_jax", *several),
        "one": axonml(*config, "--devices.simulated=2", f"--output.dir={tmp_path / 'one'}"),
    }
    assert [done.returncode for done in runs.values()] == [0, 0], [done.stderr[-3000:] for done in runs.values()]
    lines = runs["several"].stdout.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines) and "in 2 processes" in "".join(lines)
    told = [[line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()] for done in runs.values()]
    samples = [[line for line in each[each.index("--- sample 1 " + "-" * 60) :] if line] for each in told]
    assert samples[0] == samples[1] and len(samples[0]) >= 6  # three headings and their texts
    records = {}
    for name in runs:
        (folder,) = (tmp_path / name).iterdir()  # the main process alone writes
        assert {path.name for path in folder.iterdir()} >= {"metrics.jsonl", "config.yaml", "checkpoints"}
        records[name] = read_records(folder / "metrics.jsonl")
    for several, one in zip(records["several"], records["one"], strict=True):
        names = {"loss", "grad_norm", "valid_loss"} & one.metrics.keys()
        assert len(names) == (3 if one.step == 3 else 2)
        values = [[record.metrics[name] for name in sorted(names)] for record in (several, one)]
        np.testing.assert_allclose(*values, rtol=1e-5)


DISAGREE = """
import sys
from axonml_jax.mesh.init import init
from axonml_jax.training.same_everywhere import check_same
world = init(timeout=120)
check_same("numbers", {"one": 1, "two": 2}, world)
try:
    check_same("seeds", {"one": 1, "seed": world.rank}, world)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_processes_that_differ_are_named_with_the_first_difference(tmp_path):
    (tmp_path / "work.py").write_text(DISAGREE)
    done = axonml("launch", "--nproc-per-node=2", "work.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "the processes do not agree on their seeds: seed is 0 in process(es) [0], 1 in process(es) [1]"
    assert len(done.stdout.splitlines()) == 2 and all(said in line for line in done.stdout.splitlines())


UNLIKE = {  # what a first step says of processes that differ in one thing; None: it is made
    "alike": None,
    "seeds": r"first values of down/kernel is \w+ \(checksum\) in process\(es\) \[0\], .*\[1\](.|\n)*up/kernel(.|\n)*sync_p",
    "seeds, split": r"first values of up/kernel is(.|\n)*already a mixture",
    "then loaded": None,
    "then synchronized": None,
    "split, then synchronized": "first values of up/kernel is",
    "seeds of the runs": r"value of key is \[0, 0\] in process\(es\) \[0\], \[0, 1\] in process\(es\) \[1\]",
    "rates": r"traced program is .* first in `.*mul -0\.0099.*` in process 0, `.*mul -0\.0199(.|\n)*the learning rate",
    "rates in the state": r"value of opt_state/hyperparams/learning_rate is 0\.00999\d* in process\(es\) \[0\], 0\.0199",
    "losses": r"traced program is .*`.*integer_pow.*` in process 0, `.*abs",
    "losses' arrays": r"traced program is .*`closed over: \w+` in process 0, `closed over",
    "widths": r"leaf variables/params/up/bias is float32\[6\] in process\(es\) \[0\], float32\[8\]",
    "plans": "the plan is .*Shard",
    "rows": r"batch's leaf x is float32\[4, 4\] in process\(es\) \[0\], float32\[8, 4\]",
    "values of rows": r"batch's values of x is(.|\n)*A step takes the whole batch",
    "values of later rows": r"give trainer.step the same batches:\n  the batch's values of x is(.|\n)*takes the whole batch",
    "values of last rows": r"give trainer.step the same batches:\n  the batch's values of x is(.|\n)*takes the whole batch",
    "later rows alike": None,
    "restored": "first values of variables/params/up/kernel is",
    "rounds": "first values of down/kernel is",
    "gradients alike": None,
    "gradients' seeds": r"start this training from the same program, values or batch:\n  the first values of down/kernel is",
    "gradients' synchronized seeds": None,
    "gradients' losses": r"the traced program is .* in process",
    "gradients' rows": r"batch's values of x is(.|\n)*A step takes the whole batch",
    "gradients' later rows": r"give value_and_grad the same batches:\n  the batch's values of x is",
    "gradients' keys": r"the value of key is \[",
    "gradients' rates": r"first update made the processes' parameters different:\n  device \d+ (.|\n)*A learning rate",
    "gradients, not synchronized": r"first update made the processes' parameters different",
    "gradients after a load": r"start this training from .*values or batch:\n  the first values of down/bias is",
    "evaluated alike": None,
    "evaluated loader": None,
    "evaluated rows": r"give trainer.evaluate the same batches:\n  the batch's leaf x is float32\[5, 4\] in process",
    "evaluated values": r"batch's values of x is(.|\n)*It takes the whole batch",
    "evaluated values, later": r"give trainer.evaluate the same batches:\n  the batch's values of x is",
    "validated rows": r"give trainer.validate the same batches:\n  the batch's leaf x is float32\[5, 4\]",
    "validated values": r"give trainer.validate the same batches:\n  the batch's values of x is",
    "validated numbers": r"\n  batch number 2 is not there in process\(es\) \[0\], there in process\(es\) \[1\]\nIt takes",
    "predicted values": r"give trainer.predict the same batches:\n  the batch's values of x is",
    "predicted numbers": r"batch number 2 is there in process\(es\) \[0\], not there in process\(es\) \[1\]",
    "loaders alike": None,
    "loaders' seeds": r"rows of the same batches: seed is 0 in process\(es\) \[0\], 1 in process\(es\) \[1\]. Give",
    "loaders' lengths": r"num_samples is 8 in process\(es\) \[0\], 4 in",
    "loaders' sizes": "batch size is 2 in",
    "loaders' epochs": "num_epochs is 1 in",
    "loaders' last batches": "drop_last is True in",
    "loaders' windows": "window is 1 in",
    "loaders' positions": r"epoch is 0 in process\(es\) \[0\], 1 in process\(es\) \[1\]; samples is 4 in",
    "independent": None,
}


@pytest.mark.slow
def test_a_first_step_names_what_differs_between_processes():
    done = axonml("launch", "--nproc-per-node=2", str(ROOT / "tests" / "workers" / "unlike_processes.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        found = json.loads(line.split("] ", 1)[1])
        assert found.keys() == UNLIKE.keys()
        wrong = {
            name: said
            for name, said in found.items()
            if not (said == "well" if UNLIKE[name] is None else re.search(UNLIKE[name], said))
        }
        assert not wrong


GOES_BACK = """
import sys
import jax, jax.numpy as jnp, optax
from flax import nnx
import axonml_jax as ax

world = ax.init()
model = ax.FSDP(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
trainer = model.trainer(optax.sgd(0.1), lambda model, batch: jnp.mean(model(batch) ** 2))

def save(manager, steps):
    for step in steps:
        trainer.step(jnp.ones((4, 4)))
        manager.save(step, trainer)

with ax.CheckpointManager(sys.argv[1], keep=4) as manager:
    save(manager, (1, 2, 3, 4))
with ax.CheckpointManager(sys.argv[1], keep=4) as manager:
    manager.restore(trainer, step=2)
    save(manager, (3, 5))
with ax.CheckpointManager(sys.argv[1]) as manager:
    print(manager.steps, manager.restore(trainer).step, int(trainer.state.step))
ax.shutdown()
"""


@pytest.mark.slow
def test_processes_that_go_back_put_what_they_left_aside_together(tmp_path):
    (tmp_path / "work.py").write_text(GOES_BACK)
    done = axonml("launch", "--nproc-per-node=2", "work.py", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split("] ", 1)[1] for line in done.stdout.splitlines()] == ["[1, 2, 3, 5] 5 4"] * 2
    aside = sorted(each.name for each in (tmp_path / "run").iterdir() if "." in each.name)
    assert aside == ["step_00000003.abandoned", "step_00000004.abandoned"]


class Meeting:
    """A coordinator of threads."""

    def __init__(self, count):
        self.values, self.said, self._barrier = {}, [], threading.Barrier(count)

    def key_value_set(self, key, value):
        self.values[key] = value
        self.said.append(value)

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def wait_at_barrier(self, name, timeout_in_ms, processes):
        self._barrier.wait(30)


def compared(monkeypatch, *programs, **said):
    """What each of several processes hears that say these things, and all that was said."""
    meeting = Meeting(len(programs))
    monkeypatch.setattr(join, "coordinator_client", lambda: meeting)
    everyone = range(len(programs))

    def one(me):
        own = {name: values[me] for name, values in said.items()} | {join.PROGRAM: str(hash(programs[me]))}
        return join.differences(own, programs[me].splitlines(), "here", everyone, me)

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(one, everyone)), meeting.said


def test_processes_that_are_alike_exchange_a_digest_and_of_others_one_speaks_for_its_side(monkeypatch):
    same = "a = 1\nb = a"
    found, said = compared(monkeypatch, same, same, same, leaf=["x", "x", "x"])
    assert found == [[], [], []] and len({each for each in said if each}) == 1
    found, said = compared(monkeypatch, same, "a = 1\nb = 2", same, same, leaf=["x", "x", "x", "x"])
    (told,) = {str(each) for each in found}
    assert "in process(es) [0, 2, 3]" in told and "first in `b = a` in process 0, `b = 2` in process 1" in told
    assert len({each for each in said if len(each) > 16}) == 2  # whole programs, in hashes: of two, not of four
    found, _ = compared(monkeypatch, same, same, leaf=["x", "y"])
    assert found == [["leaf is x in process(es) [0], y in process(es) [1]"]] * 2


@pytest.mark.slow
def test_processes_that_load_another_configuration_stop_before_the_first_step(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    config = [str(ROOT / "configs" / "quickstart.yaml"), *SMALL, "--data.path=text.txt", "--devices.simulated=null"]
    (tmp_path / "work.py").write_text(
        "import os, sys\nfrom axonml_jax.__main__ import main\n"
        f"sys.exit(main(['train', *{config!r}, '--optim.learning_rate=0.' + os.environ['RANK'] + '5']))"
    )
    done = axonml("launch", "--nproc-per-node=2", "work.py", cwd=tmp_path)
    said = "optim.learning_rate is 0.05 in process(es) [0], 0.15 in process(es) [1]"
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr[-3000:]
    assert not (tmp_path / "runs").exists()


def test_simulated_devices_under_a_launcher_are_refused(monkeypatch):
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"simulated=8: this is one of 2 .* --devices\.simulated null"):
        start_devices(8)
