"""Checkpoints at a URL as processes and the command line keep them: killed ones, two of one job, a run and its evaluation."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from s3_stand_in import killed_while_it_puts
from test_checkpoint_manager import Weights, names, value
from test_checkpoints_at_url import URL, cache, committed, left, s3  # noqa: F401
from test_train_resume import QUICKSTART, SMALL

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.checkpoint.places import staging_of
from axonml_jax.cli.train import train as run
from axonml_jax.config.config import ConfigError, read_config

KILLED = """
import sys
from test_checkpoints_at_url import save
save(1, 2)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_sends_leaves_the_checkpoint_before(s3, cache):  # noqa: F811
    killed_while_it_puts(s3, "step_00000002.commit", KILLED)
    assert committed(s3) == [1] and names(staging_of(URL, None)) == ["step_00000002"]
    with ax.CheckpointManager(URL, every=1, asynchronous=False) as manager:
        module = Weights()
        assert manager.restore(module).step == 2 and value(module) == 2  # made, and not sent
        manager.save(3, Weights(3))
    assert committed(s3) == [1, 2, 3] and names(staging_of(URL, None)) == []


@pytest.mark.slow
def test_a_run_keeps_its_checkpoints_at_a_url_goes_on_from_there_and_is_evaluated(tmp_path, s3, capsys):  # noqa: F811
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat. " * 60)
    given = [f"--data.path={tmp_path / 'text'}", "--name=mine"]

    def train(out, *flags):
        return main(["train", QUICKSTART, *SMALL, *given, f"--output.dir={tmp_path / out}", *flags])

    at = "--checkpoint.url=s3://bucket/mine"
    assert train("one", at, "--train.steps=6") == 0
    assert committed(s3) == [3, 6] and not (tmp_path / "one" / "mine" / "checkpoints").exists()
    with pytest.raises(ConfigError, match=r"checkpoint\.url=s3://bucket/mine has a run's checkpoints, .*resume=auto"):
        run(read_config("train", [QUICKSTART, *SMALL, *given, at, f"--output.dir={tmp_path / 'one'}"]))
    with pytest.raises(
        ConfigError, match=r"are at s3://bucket/mine, and checkpoint\.url=null looks there: set checkpoint\.url"
    ):
        run(read_config("train", [QUICKSTART, *SMALL, *given, "--resume=auto", f"--output.dir={tmp_path / 'one'}"]))
    capsys.readouterr()
    assert train("one", at, "--resume=auto") == 0
    assert "resumed after step 6, from s3://bucket/mine" in capsys.readouterr().out and committed(s3) == [3, 6, 9]
    assert train("two", at, "--resume=auto", "--train.steps=12") == 0  # on a machine that has nothing of it
    assert "resumed after step 9, from s3://bucket/mine" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "one" / "mine"), "--step", "6"]) == 0
    assert "step 6" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"output\.dir=s3://bucket/runs is a URL.*checkpoint\.url"):
        read_config("train", [QUICKSTART, *SMALL, "--output.dir=s3://bucket/runs"])
    assert main(["eval", str(tmp_path / "one" / "mine"), "--step", "7"]) == 2
    assert "has no such checkpoint; there are 3, 6, 9, 12" in capsys.readouterr().err


RANK = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
import axonml_jax as ax
from axonml_jax.checkpoint import object_store

object_store._FIRST = 0.01
place = NamedSharding(ax.make_mesh(data=2), PartitionSpec("data"))

class Split(nnx.Module):
    def __init__(self, number):
        whole = np.arange(4.0) * number
        self.w = nnx.Param(jax.make_array_from_callback((4,), place, lambda index: whole[index]))

def own(module):
    [shard] = module.w[...].addressable_shards
    np.testing.assert_array_equal(shard.data, (np.arange(4.0) * number)[shard.index])

with ax.CheckpointManager("s3://bucket/run", every=1, keep=1, max_failures=2) as manager:
    manager.save(1, Split(1))
    manager.save(2, Split(2))  # the store is away
    manager.settle()
    assert manager.failed_saves == 1
    manager.save(3, Split(3))
for number, url in ((3, "s3://bucket/run/step_00000003"), (4, "s3://bucket/run/final")):
    if number == 4:
        ax.save(url, Split(4))
    ax.restore(url, module := Split(0))
    own(module)
with ax.CheckpointManager("s3://bucket/run") as manager:
    number = 3
    assert manager.restore(module).step == 3
    own(module)
"""


@pytest.mark.slow
def test_two_processes_save_to_and_restore_from_a_url_and_count_the_same_failures(s3, cache):  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    s3.refuse = lambda method, path: 503 if method == "PUT" and "step_00000002." in path else None
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), address], env=environ) for rank in range(2)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert committed(s3) == [3] and "/bucket/run/final.commit" in s3.objects and left(cache) == []
