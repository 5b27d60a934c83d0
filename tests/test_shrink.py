"""A real training that takes in a machine, loses it and goes on equals one device that has the same batches."""

import importlib
import itertools
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from workers.launch import QUICK, free_port

from axonml_jax.__main__ import main
from axonml_jax.cli.records import read_records

ROOT = Path(__file__).resolve().parents[1]
STEPS, LIMIT = 60, 200


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "faults")
    elastic = importlib.import_module("elastic_machines")
    monkeypatch.setattr(elastic, "QUICK", QUICK)
    options = [
        *("--checkpoint.every=null", "--checkpoint.memory_every=1", f"--train.steps={STEPS}"),
        *("--train.global_batch_size=16", "--train.on_shrink=shrink_batch"),
    ]
    with elastic.Machines(tmp_path, free_port(), "1:2", options) as machines:
        yield machines
    del sys.modules["elastic_machines"]


@pytest.mark.slow
def test_a_run_takes_in_a_machine_and_goes_on_when_it_is_lost_with_the_losses_of_one_device(machines, tmp_path, capfd):
    machines.pace(1)  # time for what shall happen
    head = machines.start(0)
    head.wait_for("attempt=0 step=2 ")
    other = machines.start(1)
    grown = int(other.wait_for(r"attempt=1 step=(\d+)")[1]) - 1
    machines.pace(0.1)
    os.kill(int(other.wait_for(rf"attempt=1 step={grown + 4} pid=(\d+)")[1]), signal.SIGKILL)
    other.process.kill()
    machines.pace(0)
    assert head.process.wait(LIMIT) == 0, head.said[-4000:]
    first, shrunk = (int(step) for step in re.findall(r"resumed after step (\d+), from memory", head.said))
    assert 2 <= first == grown < shrunk <= grown + 6
    assert f"stopped by SIGTERM after step {grown}" in head.said
    assert f"state of step {grown} sent: process 1 from process 0" in head.said
    assert "attempt 1 runs on node(s) 0, 1 with 2 process(es), with node(s) [1]" in head.said
    assert "attempt 2 runs on node(s) 0 with 1 process(es), without node(s) [1]" in head.said
    assert [step for attempt, step, _ in head.steps if attempt == 0] == list(range(1, grown + 1))  # none twice
    assert [step for attempt, step, _ in head.steps if attempt == 2] == list(range(shrunk + 1, STEPS + 1))

    elastic = sys.modules["elastic_machines"]
    config = [
        elastic.QUICKSTART,
        *elastic.SMALL,
        f"--data.path={tmp_path / 'text'}",
        f"--output.dir={tmp_path / 'oracle'}",
    ]
    for (_, until), size in zip(itertools.pairwise([0, grown, shrunk, STEPS]), (8, 16, 8), strict=True):
        more = [f"--train.steps={until}", f"--train.global_batch_size={size}", "--resume=auto"]
        assert main(["train", *config, *more]) == 0
    found, wanted = (read_records(next((tmp_path / name).iterdir()) / "metrics.jsonl") for name in ("runs", "oracle"))
    assert [record.step for record in found] == [record.step for record in wanted] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "tokens"):
        losses = [[record.metrics[name] for record in records] for records in (found, wanted)]
        np.testing.assert_allclose(*losses, rtol=1e-5, err_msg=name)
