"""A checkpoint of any plan restores into any other, bit for bit: parameters, optimizer, randomness, data position."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import axonml_jax as ax
from axonml_jax.checkpoint.format import leaves_of
from axonml_jax.sharding.layout import to_host

ODD = 7  # of its dims none divides by 2, 3 or 8: everything is padded


def drawn(key, shape, dtype):
    """An initializer that compiles nothing."""
    return jnp.asarray(np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist()).normal(size=shape), dtype)


class Net(nnx.Module):
    """Layers that split over tensor, a scalar, an odd width, running averages and dropout."""

    def __init__(self, first=0):
        rngs = nnx.Rngs(first)
        make = {"rngs": rngs, "kernel_init": drawn, "bias_init": drawn}
        self.up = ax.ColumnParallelLinear(5, 8, **make)
        self.down = ax.RowParallelLinear(8, ODD, **make)
        self.norm = nnx.BatchNorm(ODD, rngs=rngs)
        self.scale = nnx.Param(jnp.float32(1.5))
        self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dropout(self.norm(self.down(jnp.tanh(self.up(x))))) * self.scale


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


BATCH = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
PLANS = {
    "one device": (dict(data=1), {}),
    "ddp 2": (dict(data=2), {}),
    "fsdp 8": (dict(fsdp=8), {}),
    "zero-1 of 3": (dict(fsdp=3), {"fsdp": ax.Shard(stage=1)}),
    "hybrid, offloaded": (dict(data=2, fsdp=2), {"offload": ax.CPUOffload("full")}),
    "tensor 2 x fsdp 3": (dict(fsdp=3, tensor=2), {}),
    "pipe 2 x fsdp 2": (dict(pipe=2, fsdp=2), {"pipe": ax.Pipelined(num_microbatches=2, split=("down",))}),
}


def trainer(name, first=0, tx=None, **options):
    degrees, plan = PLANS[name]
    mesh = ax.make_mesh(devices=jax.devices()[: int(np.prod(list(degrees.values())))], **degrees)
    model = ax.parallelize(Net(first), mesh, ax.Plan(**plan), seed=first, **options)
    return model.trainer(tx or optax.adamw(1e-2), loss_fn)


def wholes(thing):
    """Every array of something by name, whole, with keys as words."""
    leaves = {name: leaf.whole() for name, leaf in leaves_of(thing).items()}
    words = {
        n: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for n, x in leaves.items()
    }
    return to_host(words)


def equal_bits(a, b):
    assert a.keys() == b.keys()
    assert [
        n for n in a if np.shape(a[n]) != np.shape(b[n]) or np.asarray(a[n]).tobytes() != np.asarray(b[n]).tobytes()
    ] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of eight devices with padded leaves, after two steps, and all of its arrays."""
    source = trainer("fsdp 8")
    for _ in range(2):
        source.step(BATCH)
    path = tmp_path_factory.mktemp("checkpoints") / "first"
    ax.save(path, source)
    return path, wholes(source)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "fsdp 8"])
def test_a_checkpoint_restores_under_every_plan_and_saves_the_same_again(saved, name, tmp_path):
    path, arrays = saved
    assert arrays["optimizer/0/mu/down/kernel"].shape == (8, ODD) and np.abs(arrays["optimizer/0/mu/down/kernel"]).max()
    target = trainer(name, first=3)
    places = jax.tree.map(lambda x: (x.sharding, x.shape), target.state)
    assert ax.restore(path, target) is target
    equal_bits(wholes(target), arrays)
    assert target.state.step == 2
    assert jax.tree.map(lambda x: (x.sharding, x.shape), target.state) == places
    ax.save(tmp_path / "again", target)
    again = trainer("ddp 2", first=4)
    ax.restore(tmp_path / "again", again)
    equal_bits(wholes(again), arrays)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.sign_sgd(0.1))], ids=["sgd", "clip"])
def test_a_pipeline_whose_optimizer_has_no_arrays_is_saved_and_restored(tmp_path, tx):
    source, target = (trainer("pipe 2 x fsdp 2", first=first, tx=tx) for first in (0, 3))
    assert ax.restore(ax.save(tmp_path / "run", source), target) is target
    equal_bits(wholes(target), wholes(source))
    assert jax.tree.structure(target.state) == jax.tree.structure(source.state)
    assert target.opt_state == tx.init({"a": jnp.zeros(1)})


def test_no_device_holds_a_whole_leaf_while_a_padded_one_is_read(saved):
    target = trainer("zero-1 of 3", first=3)
    ax.restore(saved[0], target)
    mu = target.state.opt_state[0].mu["up"]["kernel"]  # 5 x 8 over 3: rests as 5 x 9 or 6 x 8
    assert mu.size > 40 and max(shard.data.size for shard in mu.addressable_shards) == mu.size // 3


def test_plain_flax_modules_take_the_model_for_inference(saved, tmp_path):
    path, arrays = saved
    module = Net(5)
    assert ax.restore(path, module) is module
    np.testing.assert_array_equal(module.down.kernel[...], arrays["model/down/kernel"])
    np.testing.assert_array_equal(module.norm.mean[...], arrays["model/norm/mean"])
    dense = linen.Dense(3)
    variables = dense.init(jax.random.key(0), BATCH)
    linen_loss = lambda model, batch: jnp.mean(model(batch) ** 2)
    ddp = ax.DDP(dense, ax.make_mesh(data=1, devices=jax.devices()[:1]), params=variables)
    ax.save(tmp_path / "linen", ddp.trainer(optax.sgd(0.1), linen_loss))
    empty = jax.tree.map(jnp.zeros_like, variables)
    restored = ax.restore(tmp_path / "linen", empty, part="model")
    equal_bits(wholes(restored), wholes(variables))


def test_a_train_state_is_saved_through_its_step(saved, tmp_path):
    mesh = ax.make_mesh(fsdp=3, devices=jax.devices()[:3])
    state, step = ax.make_train_step(Net(3), optax.adamw(1e-2), loss_fn, mesh, ax.Plan())
    state = ax.restore(saved[0], state, step=step)
    assert isinstance(state, ax.TrainState)
    ax.save(tmp_path / "state", state, step=step)
    again = trainer("one device", first=3)
    ax.restore(tmp_path / "state", again)
    equal_bits(wholes(again), saved[1])


def test_any_pytree_comes_back_as_it_was(tmp_path):
    key = jax.random.key(7, impl="rbg")
    tree = {
        "a": np.arange(3),
        "b": [jnp.ones((2, 0)), jnp.bfloat16(2.5)],
        "c": {"k": key, "n": 4, "on": True, "x": 0.5},
    }
    like = {"a": np.zeros(3, int), "b": [jnp.zeros((2, 0)), jnp.bfloat16(0)], "c": {"k": jax.random.key(0, impl="rbg")}}
    like["c"] |= {"n": 0, "on": False, "x": 0.0}
    got = ax.restore(ax.save(tmp_path / "tree", tree), like)
    assert jax.tree.structure(got) == jax.tree.structure(tree) and got["c"]["n"] == 4 and got["c"]["on"] is True
    assert got["b"][0].shape == (2, 0) and got["b"][1] == 2.5 and got["b"][1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got["a"], tree["a"])
    np.testing.assert_array_equal(jax.random.bits(got["c"]["k"]), jax.random.bits(key))
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros(3, jnp.float32)})
    with pytest.raises(ValueError, match=r"a: mismatched \(saved as int64, needed as float32\)"):
        ax.restore(tmp_path / "tree", shapes, accept=["unexpected"])


def test_everything_that_does_not_fit_is_told_at_once_and_can_be_accepted(saved, caplog):
    class Other(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(5, 9, rngs=nnx.Rngs(0), kernel_init=drawn)
            self.extra = nnx.Param(jnp.ones(2, jnp.float32))
            self.scale = nnx.Param(jnp.float32(0))

    with pytest.raises(ValueError, match="does not fit the object to restore into") as caught:
        ax.restore(saved[0], Other())
    lines = str(caught.value).splitlines()
    assert "  model/extra: missing float32[2]" in lines and "  model/down/kernel: unexpected float32[8, 7]" in lines
    assert "  model/up/kernel: mismatched (saved float32[5, 8], needed float32[5, 9])" in lines
    assert lines[-1].startswith("accept=('missing', 'unexpected', 'mismatched') restores what fits")
    assert "optimizer" not in lines
    other = Other()
    with caplog.at_level("WARNING", "axonml_jax"):
        ax.restore(saved[0], other, accept=("missing", "unexpected", "mismatched"))
    assert other.scale[...] == saved[1]["model/scale"] and (other.extra[...] == 1).all()
    assert "model/extra: missing" in caplog.text
    with pytest.raises(
        ValueError, match=r"accept='missin': give a collection of 'missing', 'unexpected', 'mismatched'"
    ):
        ax.restore(saved[0], other, accept=["missin"])


def test_a_run_with_frozen_parameters_starts_from_one_that_trained_all(saved):
    target = trainer("ddp 2", first=3, trainable="^down/")
    with pytest.raises(ValueError, match="optimizer/0/mu/up/kernel: unexpected"):
        ax.restore(saved[0], target)
    ax.restore(saved[0], target, accept=["unexpected"])
    np.testing.assert_array_equal(wholes(target)["model/up/kernel"], saved[1]["model/up/kernel"])
