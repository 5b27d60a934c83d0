"""Optimizers that cannot run inside a step are refused by name when the trainer is built."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from plan_models import linear, regression

import axonml_jax as ax
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.testing.equality import assert_trees_close
from axonml_jax.training.optimizer import checked_optimizer


class Net(nnx.Module):
    def __init__(self):
        self.layer = linear(5, 3, nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)


def loss_fn(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


@pytest.fixture(scope="module")
def ddp():
    return ax.DDP(Net(), ax.make_mesh(data=2, devices=jax.devices()[:2]))


def needs(**extra):
    """A transformation whose update asks for more keyword arguments than optax's own."""

    def update(updates, state, params=None, *, temperature, value):
        return jax.tree.map(lambda u: u * temperature * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


MASK = jax.tree.map(lambda x: x.ndim > 1, nnx.state(Net(), nnx.Param))


def growing():
    return optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, (*state, 1)))


def wrong_dtype():
    return optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32), lambda updates, state, params=None: (updates, state + 0.5)
    )


REFUSED = {
    "L-BFGS": (
        optax.lbfgs,
        ValueError,
        r"scale_by_zoom_linesearch.*'grad' and 'value_fn'.*line searches.*choose another",
    ),
    "a backtracking line search": (
        lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(5)),
        ValueError,
        r"scale_by_backtracking_linesearch.*line searches",
    ),
    "an argument nobody can give": (needs, ValueError, r"optimizer needs.*'temperature'"),
    "a state that grows": (growing, ValueError, r"optimizer growing changes.*another structure"),
    "a state that changes dtype": (wrong_dtype, ValueError, r"optimizer wrong_dtype changes.*int32.*becomes"),
    "an nnx.Optimizer": (
        lambda: nnx.Optimizer(Net(), optax.sgd(0.1), wrt=nnx.Param),
        TypeError,
        r"must be an optax.GradientTransformation.*not an nnx.Optimizer around it",
    ),
    "a mask of an nnx.State": (
        lambda: optax.adamw(0.1, mask=MASK),
        ValueError,
        r"(?s)masked\(add_decayed_weights\).*give nnx.to_pure_dict\(mask\), or give a function",
    ),
    "a factory that was not called": (lambda: optax.adam, TypeError, r"a function was given"),
    "nothing": (lambda: None, TypeError, r"a NoneType was given"),
    "a learning rate": (lambda: 3e-4, TypeError, r"optax.adamw\(3e-4\).*a float was given"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_optimizer_that_cannot_run_is_refused_before_its_state_is_made(ddp, what):
    make, error, match = REFUSED[what]
    with pytest.raises(error, match=match):
        ddp.trainer(make(), loss_fn)
    with pytest.raises(error, match=match):
        ax.make_train_step(Net(), make(), loss_fn, ddp.mesh)


def test_a_mask_of_an_nnx_state_is_taken_as_the_refusal_says():
    made, batch = [], regression(8, 0)
    for mask in (nnx.to_pure_dict(MASK), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)):
        trainer = ax.FSDP(Net(), ax.make_mesh(fsdp=2, devices=jax.devices()[:2])).trainer(
            optax.adamw(0.1, weight_decay=0.5, mask=mask), loss_fn
        )
        trainer.step(batch)
        made.append(trainer.model.state_dict())
    assert_trees_close(*made, "parameters")


def test_the_check_needs_shapes_alone(ddp):
    shapes = Variables({"w": jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)}, {}, {})
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert checked_optimizer(tx, bind_plan(ax.Plan(), shapes, ddp.mesh)) is tx


def test_multi_steps_is_taken_with_or_without_its_transformation(ddp):
    batches, model = [regression(8, seed) for seed in range(2)], Net()
    results = []
    for tx in (optax.MultiSteps(optax.sgd(0.1), 2), optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()):
        trainer = ax.DDP(model, ddp.mesh).trainer(tx, loss_fn)
        before = trainer.model.state_dict()
        trainer.step(batches[0])
        assert_trees_close(trainer.model.state_dict(), before, "parameters after half an update")
        trainer.step(batches[1])
        results.append(trainer.model.state_dict())
    assert_trees_close(*results, "parameters")
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]) if a.ndim else a, *batches)
    single = ax.DDP(model, ddp.mesh).trainer(optax.sgd(0.1), loss_fn)
    single.step(both)
    assert_trees_close(results[0], single.model.state_dict(), "one update of the joined batch")


def test_a_state_that_starts_as_the_parameters_themselves_can_be_donated(ddp):
    keeps_start = optax.GradientTransformation(
        lambda params: params, lambda updates, start, params=None: (updates, start)
    )
    trainer = ax.DDP(Net(), ddp.mesh).trainer(optax.chain(keeps_start, optax.sgd(0.1)), loss_fn)
    start = trainer.model.state_dict()
    for _ in range(2):
        trainer.step(regression(8))
    kept = trainer.state.opt_state[0]["layer"]
    assert_trees_close(kept, {"kernel": start["layer/kernel"], "bias": start["layer/bias"]}, "the optimizer's own copy")


SPLIT = {
    "shards with padding": (ax.Plan(fsdp=ax.Shard()), {"fsdp": 3}, {}),
    "an average beside it": (ax.Plan(fsdp=ax.Shard()), {"fsdp": 3}, {"ema": 0.9}),
    "optimizer shards": (ax.Plan(fsdp=ax.Shard(stage=1)), {"fsdp": 3}, {}),
    "stages": (ax.Plan(pipe=ax.Pipelined(num_microbatches=2)), {"pipe": 2}, {}),
}


@pytest.mark.parametrize("way", SPLIT)
def test_opt_state_has_the_shapes_of_one_device_for_what_optax_reads_from_it(way):
    tx = optax.contrib.schedule_free(optax.inject_hyperparams(optax.adam)(0.01), 0.01)
    plan, degrees, options = SPLIT[way]

    def read(plan, degrees, options):
        count = math.prod(degrees.values())
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(linear(5, 7, rngs), jnp.tanh, linear(7, 3, rngs))
        parallel = ax.parallelize(model, ax.make_mesh(**degrees, devices=jax.devices()[:count]), plan)
        trainer = parallel.trainer(tx, loss_fn, **options)
        trainer.step(regression(12)), trainer.step(regression(12, 1))
        state = trainer.opt_state
        averaged = optax.contrib.schedule_free_eval_params(state, parallel.parameters())
        return averaged, optax.tree.get(state, "nu"), optax.tree.get(state, "learning_rate"), state

    got, wanted = read(plan, degrees, options), read(ax.Plan(), {"data": 1}, {})
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    assert_trees_close(got, wanted, "what optax reads")
