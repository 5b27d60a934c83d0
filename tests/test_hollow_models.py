"""Models given as shapes (`nnx.eval_shape`, `jax.eval_shape`): zeros at rest until they are loaded; none trains before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
BATCH = {"x": X, "y": X[:, :3]}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 6, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(self.dropout(self.norm(x)))


class Plain(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(jnp.tanh(linen.Dense(6)(x)))


def net():
    return Net(nnx.Rngs(0))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def whole(plan, **degrees):
    return ax.parallelize(net(), mesh_of(**degrees), plan)


def hollow(plan, **degrees):
    return ax.parallelize(nnx.eval_shape(net), mesh_of(**degrees), plan)


PLANS = {
    "ddp": (ax.Plan(batch_stats="local"), {"data": 2}),
    "fsdp": (ax.Plan(fsdp=ax.Shard(), batch_stats="local"), {"fsdp": 2}),
    "pipe": (ax.Plan(pipe=ax.Pipelined(num_microbatches=2), batch_stats="local"), {"data": 2, "pipe": 2}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_loaded_model_of_shapes_trains_as_the_model_does(name):
    plan, degrees = PLANS[name]
    given, loaded = whole(plan, **degrees), hollow(plan, **degrees)
    assert loaded.hollow and not given.hollow
    loaded.load_state_dict(given.state_dict())
    assert not loaded.hollow
    trainers = [each.trainer(optax.adam(0.01), loss_fn) for each in (given, loaded)]
    for _ in range(2):
        losses = [float(trainer.step(BATCH)["loss"]) for trainer in trainers]
        assert losses[0] == losses[1]
    jax.tree.map(np.testing.assert_array_equal, given.state_dict(), loaded.state_dict())
    assert isinstance(loaded.module.dropout.rngs.key[...], jax.Array)


@pytest.mark.parametrize("name", PLANS)
def test_a_trainer_of_shapes_goes_on_from_a_checkpoint(name, tmp_path):
    plan, degrees = PLANS[name]
    trainer = whole(plan, **degrees).trainer(optax.adam(0.01), loss_fn, ema=0.9)
    trainer.step(BATCH)
    ax.save(tmp_path / "saved", trainer)
    loaded = hollow(plan, **degrees).trainer(optax.adam(0.01), loss_fn, ema=0.9)
    with pytest.raises(ValueError, match="the model was created from shapes and has no weights: load weights before"):
        loaded.step(BATCH)
    ax.restore(tmp_path / "saved", loaded)
    trainer.step(BATCH), loaded.step(BATCH)
    jax.tree.map(np.testing.assert_array_equal, trainer.model.state_dict(), loaded.model.state_dict())


def test_linen():
    model = Plain()
    variables = model.init(jax.random.key(0), X)
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    loaded = ax.FSDP(model, mesh_of(fsdp=2), params=shapes)
    loaded.load_state_dict(ax.DDP(model, mesh_of(data=2), params=variables).state_dict())
    np.testing.assert_allclose(loaded(X), model.apply(variables, X), rtol=1e-6)


def test_of_adapters_the_base_is_loaded():
    lora = lambda model: ax.lora(model, rank=2, targets="blocks/0/kernel", alpha=4)
    given, loaded = (ax.FSDP(lora(each), mesh_of(fsdp=2)) for each in (net(), nnx.eval_shape(net)))
    with pytest.raises(ValueError, match="no values yet"):
        loaded(X)
    missing, _ = loaded.load_state_dict(ax.DDP(net(), mesh_of(data=2)).state_dict(), strict=False)
    assert len(missing) == 2  # the adapters, which begin as they do on any model
    np.testing.assert_array_equal(loaded.eval()(X), given.eval()(X))


@pytest.mark.slow
def test_the_transformers_stages_are_the_same():
    config = TransformerConfig(vocab_size=8, max_length=4, hidden_size=8, num_heads=2, num_layers=4, position="learned")
    make = lambda: Transformer(config, rngs=nnx.Rngs(0))
    plan = ax.Plan(pipe=ax.Pipelined(num_microbatches=2))
    models = [ax.parallelize(each, mesh_of(pipe=2), plan) for each in (make(), make, nnx.eval_shape(make))]
    first, *others = [jax.tree.map(lambda x: (x.shape, x.sharding), model.variables) for model in models]
    assert all(each == first for each in others)
    assert len({str(model._placement.stages.params.slots) for model in models}) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(X),
        lambda model: model.value_and_grad(loss_fn)(BATCH),
        lambda model: model.state_dict(),
        lambda model: model.parameters(),
        lambda model: model.module,
        lambda model: model.trainer(optax.sgd(0.1), loss_fn).evaluate(BATCH),
    ],
)
def test_nothing_is_computed_with_zeros(use):
    with pytest.raises(ValueError, match="given as shapes and has no values yet: load_state_dict"):
        use(hollow(ax.Plan(batch_stats="local"), data=2))


def test_nothing_is_computed_while_some_values_are_not_loaded():
    plan = ax.Plan(batch_stats="local")
    given, loaded = whole(plan, data=2), hollow(plan, data=2)
    loaded.set_parameters(jax.tree.map(np.asarray, given.parameters()))
    for use in (lambda: loaded(X), lambda: loaded.trainer(optax.sgd(0.1), loss_fn).step(BATCH)):
        with pytest.raises(ValueError, match=r"no values yet for .*norm/mean, .*norm/var: load_state|has no weights"):
            use()
    loaded.load_state_dict({name: x for name, x in given.state_dict().items() if "norm" in name}, strict=False)
    np.testing.assert_array_equal(loaded.eval()(X), given.eval()(X))
    placeholders = hollow(plan, data=2)
    placeholders.sync_parameters()
    assert placeholders.hollow


def test_nothing_is_saved(tmp_path):
    model = hollow(ax.Plan(batch_stats="local"), data=2)
    for run in (model, model.trainer(optax.sgd(0.1), loss_fn)):
        with pytest.raises(ValueError, match="no values yet: there is nothing to save"):
            ax.save(tmp_path / "saved", run)
    assert not (tmp_path / "saved").exists()


def test_an_optimizer_must_know_the_parameters():
    model = hollow(ax.Plan(batch_stats="local"), data=2)
    trainer = model.trainer(optax.sgd(0.1), loss_fn)
    model.load_state_dict(whole(ax.Plan(batch_stats="local"), data=2).state_dict())
    with pytest.raises(ValueError, match="or restore a checkpoint"):
        trainer.step(BATCH)


def test_some_shapes_among_arrays_are_refused():
    model = net()
    model.head.kernel = nnx.Param(jax.ShapeDtypeStruct((6, 3), jnp.float32))
    with pytest.raises(ValueError, match=r"of \d+ arrays these are shapes: params/head/kernel"):
        ax.DDP(model, mesh_of(data=2))
