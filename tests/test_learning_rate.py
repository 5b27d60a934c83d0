"""`trainer.lr`: the rate of the last update under every kind of plan, or what to do where the optimizer does not say it."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax

SCHEDULE = optax.linear_schedule(1.0, 0.0, 4)


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLANS = {
    "data": lambda: ax.DDP(Stack(), mesh_of(data=2)),
    "each its own": lambda: ax.DDP(Stack(), mesh_of(data=2), sync_strategy="no_sync"),
    "fsdp": lambda: ax.FSDP(Stack(), mesh_of(fsdp=2)),
    "pipeline": lambda: ax.Pipeline(Stack(), mesh_of(pipe=2), num_microbatches=1),
}


def trainer_of(tx, plan="data"):
    return PLANS[plan]().trainer(tx, lambda model, batch: (model(batch) ** 2).mean())


@pytest.mark.parametrize("plan", PLANS)
def test_the_trainer_says_the_rate_of_the_last_update(plan):
    tx = optax.chain(optax.scale(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE))
    trainer = trainer_of(tx, plan)
    assert trainer.lr == 1.0
    for count in range(2):
        trainer.step(np.ones((2, 2), np.float32))
        assert trainer.lr == float(SCHEDULE(count))


def test_a_rate_that_cannot_be_known_is_an_error_that_says_what_to_do():
    with pytest.raises(
        ValueError, match=r"does not hold its learning rate.* optax\.inject_hyperparams\(optax\.adamw\)"
    ):
        assert trainer_of(optax.adamw(SCHEDULE)).lr


def test_several_rates_are_listed():
    slow, fast = (optax.inject_hyperparams(optax.sgd)(learning_rate=rate) for rate in (0.5, 1.0))
    labels = lambda params: jax.tree.map_with_path(lambda path, _: str(path[1].key), params)
    tx = optax.multi_transform({"0": slow, "1": fast}, labels)
    with pytest.raises(ValueError, match=r"several learning rates: .*/0/.*=\[0\.5\], .*/1/.*=\[1\.0\]"):
        assert trainer_of(tx).lr
    same = optax.multi_transform({"0": slow, "1": slow}, labels)
    assert trainer_of(same).lr == 0.5


@pytest.mark.parametrize("plan", PLANS)
def test_a_rate_that_is_set_is_that_of_the_next_steps(plan):
    trainer, batch = (
        trainer_of(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), plan),
        np.ones((2, 2), np.float32),
    )
    values = lambda: jax.tree.map(np.array, trainer.model.state_dict())
    trainer.step(batch)
    trainer.lr = 0.0
    before = values()
    trainer.step(batch)
    assert trainer.lr == 0.0
    jax.tree.map(np.testing.assert_array_equal, values(), before)
    trainer.lr = 0.1
    trainer.step(batch)
    assert any(np.any(a != b) for a, b in zip(values().values(), before.values(), strict=True))
    trainer.opt_state.hyperparams["learning_rate"] = 0.0
    with pytest.raises(ValueError, match=r"learning_rate was changed.*is a copy.*trainer\.lr = "):
        trainer.step(batch)
    with pytest.raises(ValueError, match="learning_rate was changed"):
        assert trainer.opt_state
    trainer.lr = 0.1
    trainer.step(batch)


def test_a_rate_that_a_schedule_makes_is_not_set():
    trainer = trainer_of(optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE))
    with pytest.raises(ValueError, match="follows a schedule"):
        trainer.lr = 0.1


@pytest.mark.parametrize("plan", PLANS)
def test_setting_the_rate_leaves_the_models_parameters_as_they_are(plan):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    trainer = trainer_of(tx, plan)
    loaded = {name: np.full_like(value, 7.0) for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(loaded)
    trainer.lr = 0.5
    assert trainer.lr == 0.5
    assert all(np.all(value == 7.0) for value in trainer.model.state_dict().values())


def test_the_rate_is_not_set_where_the_model_holds_averaged_parameters():
    loss = lambda model, batch: (model(batch) ** 2).mean()
    trainer = PLANS["data"]().trainer(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), loss, ema=0.5)
    with trainer.averaged(), pytest.raises(RuntimeError, match=r"leave the block first"):
        trainer.lr = 0.5
