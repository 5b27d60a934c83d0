"""A real training that takes in a machine, loses it and goes on equals one device that has the same batches."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from workers.launch import free_port

from axonml_jax.__main__ import main
from axonml_jax.launch.job.records import read_records

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
STEPS, LIMIT = 60, 200
SMALL = (
    *("--model.num_layers=1", "--model.hidden_size=8", "--model.num_heads=1", "--model.mlp_hidden_size=8"),
    *("--model.max_length=8", "--data.length=8", "--data.max_bytes=6_000", "--data.valid_fraction=0.1"),
    *("--train.eval_every=null", "--train.eval_batches=1", "--train.log_every=1", "--sample.count=0"),
    *("--output.plot=false", "--optim.schedule=constant", "--optim.warmup_steps=0"),
)
CALLBACK = """
import os, time
import axonml_jax as ax

class Told(ax.Callback):
    def on_step(self, event):
        attempt = os.environ["AXONML_JAX_RESTART_COUNT"]
        print(f"attempt={attempt} step={event.step} pid={os.getpid()}", flush=True)
        time.sleep({"0": 1.0 if event.step > 2 else 0.0, "1": 0.1, "2": 0.0}[attempt])  # time for what shall happen
"""


class Machine:
    """One launcher of the job, as if it were a machine of its own."""

    def __init__(self, folder, node, port):
        self.lines, self.changed = [], threading.Condition()
        launch = ["launch", "--nnodes=1:2", "--last-call=0", f"--node-rank={node}", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command = [
            *(sys.executable, "-m", "axonml_jax", *launch, "--module", "axonml_jax", "train", QUICKSTART, *SMALL),
            *("--devices.simulated=null", f"--data.path={folder / 'text'}", f"--output.dir={folder / 'runs'}"),
            *("--checkpoint.every=null", "--checkpoint.memory_every=1", f"--train.steps={STEPS}"),
            *("--train.global_batch_size=16", "--train.on_shrink=shrink_batch", "--output.compiled=null"),
            *("--allow-imports=told", "--callbacks=[{class_path: told.Told}]"),
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_", "NPROC"))}
        quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
        own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{folder}:{ROOT}"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=kept | quick | own, **pipes)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    @property
    def said(self):
        return "".join(self.lines)

    def wait_for(self, words):
        """What it says, as soon as it does."""
        with self.changed:
            there = self.changed.wait_for(lambda: re.search(words, self.said), LIMIT)
        assert there, self.said[-4000:]
        return there


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "told.py").write_text(CALLBACK)
    (tmp_path / "text").mkdir()
    for name, words in (("a.txt", "the cat sat on the mat. "), ("b.txt", "the dog sat on the log. ")):
        (tmp_path / "text" / name).write_text(words * 60)
    started, port = [], free_port()

    def machine(node):
        started.append(Machine(tmp_path, node, port))
        return started[-1]

    yield machine
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdout.close()


@pytest.mark.slow
def test_a_run_takes_in_a_machine_and_goes_on_when_it_is_lost_with_the_losses_of_one_device(machine, tmp_path, capfd):
    head = machine(0)
    head.wait_for("attempt=0 step=3 ")
    other = machine(1)
    grown = int(other.wait_for(r"attempt=1 step=(\d+)")[1]) - 1
    os.kill(int(other.wait_for(rf"attempt=1 step={grown + 4} pid=(\d+)")[1]), signal.SIGKILL)
    other.process.kill()
    assert head.process.wait(LIMIT) == 0, head.said[-4000:]
    first, shrunk = (int(step) for step in re.findall(r"resumed after step (\d+), from memory", head.said))
    assert 3 <= first == grown < shrunk <= grown + 6
    assert f"stopped by SIGTERM after step {grown}" in head.said
    assert f"state of step {grown} sent: process 1 from process 0" in head.said
    assert "attempt 1 runs on node(s) 0, 1 with 2 process(es), with node(s) [1]" in head.said
    assert "attempt 2 runs on node(s) 0 with 1 process(es), without node(s) [1]" in head.said
    made = [(int(a), int(s)) for a, s in re.findall(r"attempt=(\d) step=(\d+)", head.said)]
    assert [step for attempt, step in made if attempt == 0] == list(range(1, grown + 1))  # none twice
    assert [step for attempt, step in made if attempt == 2] == list(range(shrunk + 1, STEPS + 1))

    config = [QUICKSTART, *SMALL, f"--data.path={tmp_path / 'text'}", f"--output.dir={tmp_path / 'oracle'}"]
    for (_, until), size in zip(itertools.pairwise([0, grown, shrunk, STEPS]), (8, 16, 8), strict=True):
        more = [f"--train.steps={until}", f"--train.global_batch_size={size}", "--resume=auto"]
        assert main(["train", *config, *more]) == 0
    found, wanted = (read_records(next((tmp_path / name).iterdir()) / "metrics.jsonl") for name in ("runs", "oracle"))
    assert [record.step for record in found] == [record.step for record in wanted] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "tokens"):
        losses = [[record.metrics[name] for record in records] for records in (found, wanted)]
        np.testing.assert_allclose(*losses, rtol=1e-5, err_msg=name)
