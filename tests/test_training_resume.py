"""A trainer's state restores a run bit for bit, and evaluation changes nothing."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plan_models import CASES, BatchNormNet, DropoutMLP, mean_loss, regression, weighted_loss

import axonml_jax as ax
from axonml_jax.sharding.layout import to_host
from axonml_jax.testing.equality import assert_trees_close
from axonml_jax.training import step as step_module

RANKS, BATCHES = 2, [regression(8, seed) for seed in range(3)]
WAYS = {
    "replicated": {},
    "independent": {"sync_strategy": "no_sync"},
    "local buffers": {"batch_stats": "local", "broadcast_buffers": False},
}


class Net(BatchNormNet):
    """Dropout and BatchNorm: everything a state must hold."""

    def __init__(self):
        super().__init__(nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


def run(trainer, batches):
    return to_host([trainer.step(batch) for batch in batches])


def equal_bits(a, b):
    assert jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


KEEPERS = {"copied": lambda state: jax.tree.map(jnp.copy, state), "on the host": to_host}


@pytest.mark.parametrize("way", WAYS)
def test_an_assigned_state_continues_bit_for_bit_as_often_as_wanted(mesh, way):
    ddp = ax.DDP(Net(), mesh, **WAYS[way])
    trainer = ddp.trainer(optax.adamw(optax.linear_schedule(0.1, 0.01, 5)), mean_loss)
    run(trainer, BATCHES[:1])
    kept = {name: keep(trainer.state) for name, keep in KEEPERS.items()}
    wanted, variables = run(trainer, BATCHES), to_host(ddp.variables)
    for state in (kept["copied"], kept["copied"], kept["on the host"]):
        trainer.state = state
        assert trainer.state.step == 1
        equal_bits(run(trainer, BATCHES), wanted)
        equal_bits(to_host(ddp.variables), variables)
    other = ax.DDP(Net(), mesh, seed=7, **WAYS[way]).trainer(
        optax.adamw(optax.linear_schedule(0.1, 0.01, 5)), mean_loss
    )
    other.state = kept["copied"]  # randomness is part of the state
    equal_bits(run(other, BATCHES), wanted)


def test_a_state_that_does_not_fit_is_refused_by_name(mesh):
    trainer = ax.DDP(Net(), mesh).trainer(optax.adam(0.1), mean_loss)
    before = to_host(trainer.state)
    with pytest.raises(TypeError, match=r"takes a TrainState .*dict was given"):
        trainer.state = {}
    for other, line in (
        (ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), mean_loss), "opt_state/0/mu/last/bias: missing"),
        (
            ax.DDP(DropoutMLP(nnx.Rngs(0)), mesh).trainer(optax.adam(0.1), mean_loss),
            "variables/params/scale: unexpected",
        ),
        (
            ax.DDP(Net(), mesh, sync_strategy="no_sync").trainer(optax.adam(0.1), mean_loss),
            "shape (2, 5, 6), needed (5, 6)",
        ),
    ):
        with pytest.raises(ValueError, match=r"trainer.state takes a TrainState of the same") as caught:
            trainer.state = other.state
        assert line in str(caught.value)
    equal_bits(to_host(trainer.state.variables), before.variables)


def test_a_state_that_a_step_gave_up_is_refused(mesh):
    trainer = ax.DDP(Net(), mesh).trainer(optax.adam(0.1), mean_loss)
    old, step = trainer.state, trainer.train_step
    trainer.step(BATCHES[0])
    with pytest.raises(ValueError, match=r"step: its memory was reused by a later step \(keep a copy\)"):
        trainer.state = old
    with pytest.raises(ValueError, match=r"this state was given to an earlier step.*jax.tree.map\(jnp.copy, state\)"):
        step(old, BATCHES[0])


def test_parts_that_a_step_gave_up_are_named_where_they_are_given_again(mesh, monkeypatch):
    """jax 0.10 ended the process; later it said which shape was deleted."""
    trainer = ax.DDP(Net(), mesh).trainer(optax.adam(0.1), mean_loss)
    held = trainer.state
    trainer.step(BATCHES[0])
    now = trainer.state
    named = (
        r"these arrays of the state were \({}.*\) given to an earlier step, which reused .*its current trainer.state"
    )
    for part, name in (("variables", "variables/params/"), ("opt_state", "opt_state/0/")):
        with pytest.raises(ValueError, match=named.format(name)):
            trainer.train_step(replace(now, **{part: getattr(held, part)}), BATCHES[0])
    trainer.model.variables = held.variables
    with pytest.raises(ValueError, match=named.format("variables/params/")):
        trainer.step(BATCHES[0])
    trainer.model.variables = now.variables
    copies = jax.tree.map(jnp.copy, trainer.model.variables)
    looked, look = [], step_module._refuse_given_up
    monkeypatch.setattr(step_module, "_refuse_given_up", lambda state: looked.append(look(state)))
    trainer.step(BATCHES[0])
    trainer.model.variables = copies
    for batch in BATCHES[:3]:
        trainer.step(batch)
    assert len(looked) == 1  # not at every step


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_runs_without_dropout_on_running_averages_and_changes_nothing(mesh, way):
    ddp = ax.DDP(Net(), mesh, **WAYS[way])
    trainer = ddp.trainer(optax.sgd(0.1), mean_loss)
    run(trainer, BATCHES[:2])
    before = to_host(trainer.state)
    got = trainer.evaluate(BATCHES[2])
    equal_bits(to_host(trainer.state.variables), before.variables)
    assert set(got) == {"loss", "mae"} and ddp.is_training
    if way == "replicated":
        one = ddp.module
        one.eval()
        loss, metrics = mean_loss(one, BATCHES[2])
        assert_trees_close(got, {"loss": loss, **metrics}, "evaluation")
    if way == "independent":
        assert got["loss"].shape == (RANKS,)
    assert_trees_close(trainer.evaluate(BATCHES[2]), got, "a second evaluation")


def test_a_linen_loss_may_ask_whether_it_trains(mesh):
    case, seen = CASES["linen_dropout"], []

    def loss_fn(model, batch):
        seen.append(model.is_training)
        return weighted_loss(model, batch)

    trainer = ax.DDP(case.model(), mesh, params=case.params()).trainer(optax.sgd(0.1), loss_fn)
    trainer.evaluate(BATCHES[0])
    assert set(seen) == {False}
    seen.clear()
    trainer.step(BATCHES[0])
    assert set(seen) == {True}


class LinenNet(linen.Module):
    """Flax's own idiom: the call trains unless it is told not to. `how` says who tells its parts."""

    how: str = "argument"
    deterministic: bool | None = None

    @linen.compact
    def __call__(self, x, train=True, deterministic=None):
        if self.how == "merged":
            train = not linen.merge_param("deterministic", self.deterministic, deterministic)
        block = linen.remat(LinenBlock, static_argnums=(2,)) if self.how == "recomputed" else LinenBlock
        x = block(param_dtype=jnp.float64)(linen.Dense(6, param_dtype=jnp.float64)(x), train)
        if self.how == "hard":
            x = linen.BatchNorm(use_running_average=False, param_dtype=jnp.float64, name="hard")(x)
        return linen.Dense(3, param_dtype=jnp.float64)(x)


class LinenBlock(linen.Module):
    param_dtype: Any

    @linen.compact
    def __call__(self, x, train):
        x = linen.BatchNorm(not train, param_dtype=self.param_dtype, force_float32_reductions=False)(x)
        return linen.Dropout(0.3)(x, deterministic=not train)


def linen_trainer(mesh, module, loss=mean_loss):
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCHES[0]["x"])
    ddp = ax.DDP(module, mesh, params=variables)
    return ddp, ddp.trainer(optax.sgd(0.1), loss)


EVALUATES = {
    "argument": (LinenNet(), {"train": False}, "LinenNet.__call__(train=False"),
    "recomputed": (LinenNet("recomputed"), {"train": False}, "LinenNet.__call__(train=False"),
    "merged": (LinenNet("merged", False), {}, "LinenNet(deterministic=True)"),
}


@pytest.mark.parametrize("way", EVALUATES)
def test_a_linen_model_evaluates_though_its_call_trains_by_default(mesh, way, caplog):
    module, flags, words = EVALUATES[way]
    ddp, trainer = linen_trainer(mesh, module)
    run(trainer, BATCHES[:1])
    assert not caplog.records
    before = ddp.state_dict()
    got = [trainer.evaluate(BATCHES[2]), trainer.validate([BATCHES[2]])]
    one = module.clone(deterministic=True) if way == "merged" else module
    loss, metrics = mean_loss(lambda x: one.apply(ddp.module.variables, x, **flags), BATCHES[2])
    for each in got:
        assert_trees_close(each, {"loss": loss, **metrics}, "evaluation")
    x = BATCHES[2]["x"]
    assert_trees_close(ddp.eval()(x), one.apply(ddp.module.variables, x, **flags), "the model's own call")
    equal_bits(ddp.state_dict(), before)
    said = [record.message for record in caplog.records if words in record.message]
    assert len(said) == 1, caplog.messages


def test_a_linen_loss_that_says_whether_it_trains_is_left_alone(mesh, caplog):
    _, trainer = linen_trainer(
        mesh, LinenNet(), lambda model, batch: mean_loss(lambda x: model(x, model.is_training), batch)
    )
    trainer.evaluate(BATCHES[0])
    assert not caplog.records


@pytest.mark.parametrize("drops", [True, False])
def test_dropout_that_is_told_by_its_place_in_an_evaluation_is_heard(mesh, drops, caplog):
    class Told(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1)(linen.Dropout(0.5)(linen.Dense(4)(x), not drops))

    linen_trainer(mesh, Told(), lambda model, batch: model(batch["x"]).mean())[1].evaluate(BATCHES[0])
    assert ("Dropout_0 drops units in evaluation too" in caplog.text) == drops


def test_statistics_that_move_in_an_evaluation_are_refused_by_name(mesh, caplog):
    ddp, trainer = linen_trainer(mesh, LinenNet("hard"))
    run(trainer, BATCHES[:1])
    with pytest.raises(ValueError, match=r"batch_stats/hard/mean, batch_stats/hard/var\. For a Linen module"):
        trainer.evaluate(BATCHES[1])
    with pytest.raises(ValueError, match="batch_stats/hard/mean"):
        ddp.eval()(BATCHES[1]["x"])
    told = lambda model, batch: mean_loss(lambda x: model(x, train=True), batch)
    with pytest.raises(ValueError, match=r"batch_stats/LinenBlock_0/BatchNorm_0/mean"):
        linen_trainer(mesh, LinenNet(), told)[1].evaluate(BATCHES[1])
    assert "LinenBlock_0/Dropout_0 drops units in evaluation too" in caplog.text


def test_an_nnx_module_that_moves_its_averages_in_an_evaluation_is_refused(mesh):
    class Hard(BatchNormNet):
        def __call__(self, x):
            return self.last(self.norm(self.first(x), use_running_average=False))

    trainer = ax.DDP(Hard(nnx.Rngs(0)), mesh).trainer(optax.sgd(0.1), mean_loss)
    with pytest.raises(ValueError, match=r"norm/mean, norm/var\. For a Linen module"):
        trainer.evaluate(BATCHES[0])


def test_a_step_that_is_refused_loses_nothing(mesh):
    trainer = ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), mean_loss)
    with pytest.raises(ValueError, match="multiple of 2"):
        trainer.step(regression(7))
    with pytest.raises(ValueError, match=r"2 microbatches = 4 parts(.|\n)*multiple of 4"):
        ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), mean_loss, accumulate=2).step(regression(6))
    assert trainer.step(BATCHES[0])["loss"].shape == () and trainer.state.step == 1


def test_the_functional_way_makes_the_same_steps(mesh):
    trainer = ax.DDP(Net(), mesh).trainer(optax.adam(0.1), mean_loss, max_grad_norm=0.5)
    state, step = ax.make_train_step(Net(), optax.adam(0.1), mean_loss, mesh, max_grad_norm=0.5)
    for batch in BATCHES:
        state, metrics = step(state, batch)
        equal_bits(to_host(metrics), to_host(trainer.step(batch)))
    equal_bits(to_host(state.params), to_host(trainer.state.params))


WRONG = {
    "rows": (lambda: regression(6), ValueError, r"2 microbatches = 4 parts(.|\n)*multiple of 4"),
    "words": (lambda: {**regression(8), "names": np.array(["a"] * 8)}, TypeError, r"cannot hold(.|\n)*names: <U1"),
    "a scalar": (lambda: {"x": np.float32(1)}, ValueError, "no array with a batch dim"),
    "shapes": (lambda: jax.eval_shape(lambda: regression(6)), ValueError, "multiple of 4"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tracing_and_explaining_check_the_batch_as_a_step_does(mesh, what):
    make, kind, words = WRONG[what]
    trainer = ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), mean_loss, accumulate=2)
    step, batch = trainer.train_step, make()
    for call in (trainer.step, trainer.trace, lambda batch: ax.explain(trainer, batch)):
        with pytest.raises(kind, match=words):
            call(batch)
    for call in (step.trace, step.lower):
        with pytest.raises(kind, match=words):
            call(trainer.state, batch)
