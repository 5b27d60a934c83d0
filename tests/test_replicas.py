"""Replicas that are no longer equal are found, with the device and the first arrays, and equal ones are not."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_launcher_training import ROOT, SMALL, axonml

import axonml_jax as ax
from axonml_jax.cli.loop import ReplicasCompared
from axonml_jax.config.config import ConfigError, read_config
from axonml_jax.training.run_state import CompareReplicas, ReplicasDiffer, UnequalReplica, checksum, in_words

DTYPES = ("float32", "bfloat16", "float64", "int8", "uint32", "bool", "complex64")


def flipped(array, device, bit=0):
    """The same array, but for one bit of what one device holds."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[data.nbytes // 2 + bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_changes_with_every_bit(dtype):
    values = np.random.default_rng(0).normal(size=6).astype(jnp.dtype(dtype))
    whole = np.asarray(checksum(jnp.asarray(values)))
    bits = range(8 * values.nbytes) if dtype != "bool" else range(0, 8 * values.nbytes, 8)  # a truth value has one
    for bit in bits:
        other = values.copy()
        other.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert np.any(np.asarray(checksum(jnp.asarray(other))) != whole), bit


def test_a_checksum_changes_with_signs_and_with_places():
    values = np.random.default_rng(0).normal(size=1024).astype(np.float32)
    values[0], values[256] = 1.0, 2.0
    exchanged = values.copy()
    exchanged[0], exchanged[256] = 2.0, 1.0
    found = {tuple(checksum(jnp.asarray(each)).tolist()) for each in (values, -values, exchanged)}
    assert len(found) == 3


def trained(**mesh):
    """A state after two steps, and its mesh."""
    devices = jax.devices()[:4]
    model = ax.parallelize(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), ax.make_mesh(devices=devices, **mesh))
    trainer = model.trainer(optax.adam(0.1), lambda model, batch: jnp.mean(model(batch) ** 2))
    for _ in range(2):
        trainer.step(np.ones((8, 8), np.float32))
    return trainer.state, model.mesh.devices.flat


def with_moment(state, change):
    """A state in which an array of the optimizer is another."""
    adam, *others = state.opt_state
    return replace(state, opt_state=(adam._replace(mu=change(adam.mu)), *others))


def test_a_flipped_bit_is_named_by_device_and_path_and_equal_replicas_are_not():
    state, devices = trained(data=4)
    compare = CompareReplicas()
    assert compare(state) == []
    first = lambda tree: jax.tree.map(lambda leaf: flipped(leaf, devices[2], bit=3), tree)
    changed = with_moment(replace(state, variables=replace(state.variables, params=first(state.params))), first)
    (found,) = compare(changed)
    assert (found.device, found.certain) == (devices[2].id, True)
    assert [name.split("/")[0] for name in found.names] == ["params"] * 2 + ["optimizer"] * 2
    one = with_moment(state, lambda mu: {**mu, "bias": flipped(mu["bias"], devices[0])})
    (found,) = compare(one)
    assert found.device == devices[0].id and re.fullmatch("optimizer/.*mu.*bias", found.names[0])
    assert compare(state) == []
    assert compare._compiled._cache_size() == 1


def test_which_devices_hold_the_same_is_asked_once_of_every_sharding_and_shape(monkeypatch):
    state, _ = trained(data=2, fsdp=2)
    compare, asked = CompareReplicas(), []
    real = jax.sharding.NamedSharding.devices_indices_map
    compare(state)
    monkeypatch.setattr(
        jax.sharding.NamedSharding, "devices_indices_map", lambda self, shape: asked.append(shape) or real(self, shape)
    )
    assert compare(state) == [] and not asked


def test_only_what_is_held_more_than_once_is_compared():
    state, devices = trained(data=2, fsdp=2)
    kernel = flipped(state.params["kernel"], devices[3])
    changed = replace(state, variables=replace(state.variables, params={**state.params, "kernel": kernel}))
    assert CompareReplicas()(state) == []
    (found,) = CompareReplicas()(changed)  # of two replicas nobody knows which is right
    assert found == UnequalReplica(devices[3].id, 0, ("params/kernel",), certain=False)
    state, devices = trained(data=1, fsdp=4)
    changed = with_moment(state, lambda mu: {**mu, "kernel": flipped(mu["kernel"], devices[1])})
    assert CompareReplicas()(changed) == []


def test_it_is_said_in_words():
    found = [UnequalReplica(5, 1, tuple("abcdefg"), True), UnequalReplica(6, 1, ("a",), False)]
    said = in_words(found, 40)
    assert said.startswith(
        "after step 40 the replicas are not equal: device 5 (process 1) differs in a, b, c, d, e and 2 more; device 6 "
        "(process 1) differs in a, though which side is wrong is not known. "
    )


WORK = """
import os, sys
import jax, numpy as np
from axonml_jax.__main__ import main
from axonml_jax.facade.trainer import Trainer

real = Trainer.step

def step(self, batch):
    metrics = real(self, batch)
    if self.step_number == 3 and os.environ["RANK"] == "1":
        leaves, tree = jax.tree.flatten(self.model.variables)
        data = np.array(leaves[0].addressable_data(0))
        data.reshape(-1).view(np.uint32)[0] ^= 1
        leaves[0] = jax.make_array_from_single_device_arrays(
            leaves[0].shape, leaves[0].sharding, [jax.device_put(data, jax.local_devices()[0])]
        )
        self.model.variables = jax.tree.unflatten(tree, leaves)
    return metrics

Trainer.step = step
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_run_stops_before_it_saves_what_differs(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    (tmp_path / "work.py").write_text(WORK)
    config = [str(ROOT / "configs" / "quickstart.yaml"), *SMALL, "--data.path=text.txt", "--devices.simulated=null"]
    config += ["--mesh.data=2", "--mesh.fsdp=1", "--train.steps=8", "--checkpoint.every=2", "--sample.count=0"]
    done = axonml("launch", "--nproc-per-node=2", "work.py", *config, "--train.compare_replicas=2", cwd=tmp_path)
    kept = sorted(path.name for path in (tmp_path / "runs").glob("*/checkpoints/step_*"))
    said = r"after step 4 the replicas are not equal: device \d+ \(process 1\) differs in params/\S+, .* which side is wrong"
    assert re.search(said, done.stderr), done.stderr[-3000:]
    assert done.returncode and kept == ["step_00000002"]


def test_a_run_may_be_warned_of_a_device_once_instead(caplog):
    state, devices = trained(data=4)
    changed = with_moment(state, lambda mu: jax.tree.map(lambda leaf: flipped(leaf, devices[2]), mu))
    config = SimpleNamespace(train=SimpleNamespace(compare_replicas=2, replicas_differ="warn"))
    trainer, made = SimpleNamespace(state=state), []
    compared = ReplicasCompared(config, trainer, lambda step, metrics: made.append(step))
    for step in range(1, 9):
        trainer.state = changed if step > 2 else state
        compared(step, {})
    assert made == [*range(1, 9)]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        f"after step 4 the replicas are not equal: device {devices[2].id} (process 0) differs in "
    )
    config.train.replicas_differ = "stop"
    with pytest.raises(ReplicasDiffer, match="after step 8 the replicas are not equal"):
        ReplicasCompared(config, trainer, made.append)(8, {})


def test_what_ends_a_run_is_compared_too_and_every_copy_in_memory():
    state, devices = trained(data=4)
    changed = with_moment(state, lambda mu: jax.tree.map(lambda leaf: flipped(leaf, devices[2]), mu))
    config = SimpleNamespace(train=SimpleNamespace(compare_replicas=10, replicas_differ="stop"))
    made = []
    compared = ReplicasCompared(
        config, SimpleNamespace(state=changed), lambda *more: made.append(more), [7].__contains__
    )
    compared(6, {})
    with pytest.raises(ReplicasDiffer, match="after step 7 the replicas are not equal"):
        compared(7, {})  # SIGTERM has ended the run here, and all would be saved
    assert made == [(6, {})]
    flags = [str(ROOT / "configs" / "quickstart.yaml"), "--train.compare_replicas=10", "--checkpoint.memory_every=15"]
    with pytest.raises(
        ConfigError, match=r"memory_every=15 is no multiple of train.compare_replicas=10: .*compare before"
    ):
        read_config("train", flags)
    assert read_config("train", [*flags, "--train.replicas_differ=warn"]).checkpoint.memory_every == 15
    assert read_config("train", [*flags[:-1], "--checkpoint.memory_every=20"]).checkpoint.memory_every == 20
