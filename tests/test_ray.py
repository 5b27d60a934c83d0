"""Ray Train with two CPU workers: joined, killed and resumed with the losses of an undisturbed run; refusals reach the driver.

Ray is no dependency of the tests: `.ci/engines` installs it and runs these.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from axonml_jax.config.config import ConfigError

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, and of the sockets and processes that it leaves to the system
]

SMALL = [f"--model.{name}={size}" for name, size in {"hidden_size": 32, "num_heads": 2, "mlp_hidden_size": 64}.items()]
SMALL += ["--data.max_bytes=2000000", "--train.steps=8", "--train.eval_every=null", "--checkpoint.every=2"]
SMALL += ["--train.log_every=1", "--sample.count=0", "--optim.warmup_steps=0", "--checkpoint.keep=2"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One machine of Ray's, whose controller looks often; workers have one CPU device each."""
    os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "JAX_PLATFORMS": "cpu", "RAY_TRAIN_V2_ENABLED": "1"}
    more = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": more})
    yield
    ray.shutdown()


def losses(folder):
    """The loss by step, of a run's records."""
    [path] = Path(folder).rglob("metrics.jsonl")
    return {record["step"]: record["loss"] for record in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    import axonml_jax.ray as axr

    storage = tmp_path_factory.mktemp("undisturbed")
    result = axr.train("quickstart", 2, SMALL, storage_path=str(storage), max_failures=0).fit()
    return result, losses(storage)


def test_a_configuration_trains_in_one_world_and_its_checkpoints_are_listed(undisturbed):
    result, found = undisturbed
    assert sorted(found) == list(range(1, 9))
    assert Path(result.checkpoint.path).name == "step_00000008"
    assert result.metrics["step"] == 8
    assert result.metrics["loss"] == found[8]
    # Ray keeps as many as the configuration, and all that it lists are there.
    listed = {Path(each.path).name: (each.path, metrics) for each, metrics in result.best_checkpoints}
    assert sorted(listed) == ["step_00000006", "step_00000008"]
    assert all(Path(path).is_dir() for path, _ in listed.values())
    assert {name: metrics["loss"] for name, (_, metrics) in listed.items()} == {
        "step_00000006": found[6],  # of its own step, though it was told of later
        "step_00000008": found[8],
    }
    assert sorted(path.name for path in Path(result.checkpoint.path).parent.iterdir() if path.is_dir()) == sorted(
        listed
    )


def killed_once(config):
    """A worker's loop that is killed at step 5 of the first attempt."""
    import jax

    import axonml_jax as ax
    import axonml_jax.ray as axr
    from axonml_jax.cli.train import train
    from axonml_jax.config.config import read_config

    class Killed(ax.Callback):
        def on_step(self, event):
            once = Path(config["once"])
            if event.step == 5 and jax.process_index() == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    flags = [*config["flags"], "--devices.simulated=null", "--checkpoint.keep=null", "--resume=auto"]
    run = read_config("train", ["quickstart", *flags, f"--output.dir={axr.folder('runs')}"])
    assert train(run, more=[axr.RayReport(), Killed()]) == 0
    world = ax.init()
    assert (world.launcher, world.num_processes) == ("ray", 2)
    assert world.local_rank == world.process_index


def test_a_killed_worker_costs_a_restart_and_no_loss_differs(undisturbed, tmp_path):
    import axonml_jax.ray as axr

    settings = {"once": str(tmp_path / "killed"), "flags": SMALL}
    made = axr.trainer(killed_once, 2, config=settings, max_failures=1, num_to_keep=2, storage_path=str(tmp_path))
    result = made.fit()
    assert (tmp_path / "killed").exists()
    assert losses(tmp_path) == undisturbed[1]
    assert Path(result.checkpoint.path).name == "step_00000008"
    assert result.metrics["loss"] == undisturbed[1][8]


def refused(config):
    """A worker that runs the command line with what cannot work."""
    from axonml_jax.__main__ import main

    main(["train", "quickstart", *config["flags"]])


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--train.global_batch_size=3", "--devices.simulated=null"], "global_batch_size=3"), ([], "devices.simulated=8")],
    ids=["a batch", "simulated devices"],
)
def test_a_refusal_reaches_the_driver_with_its_text(flags, words, tmp_path):
    import axonml_jax.ray as axr

    with pytest.raises(ray.train.TrainingFailedError) as error:
        axr.trainer(refused, 2, config={"flags": [*SMALL, *flags]}, max_failures=0, storage_path=str(tmp_path)).fit()
    assert words in str(error.value)


def test_a_configuration_is_checked_before_any_worker_starts():
    import axonml_jax.ray as axr

    with pytest.raises(ConfigError, match=r"train\.stepz"):
        axr.train("quickstart", 2, ["--train.stepz=1"])
    with pytest.raises(ConfigError, match=r"checkpoint.keep_every=500: Ray deletes"):
        axr.train("quickstart", 2, ["--checkpoint.keep_every=500"])
