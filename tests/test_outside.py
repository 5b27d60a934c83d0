"""What a loss reads besides the model and the batch is a constant of its program: when it changes, no step goes on with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import linear, regression

import axonml_jax as ax
from axonml_jax.training.outside import Outside

BATCH = regression(8)


def critic(seed=1):
    return linear(3, 1, nnx.Rngs(seed))


def cell(reduce):
    held = critic()

    def change():
        nonlocal held
        held = critic(2)

    return (
        lambda model, batch: reduce(held(model(batch["x"]))),
        change,
        "held.kernel (a variable of the enclosing function)",
    )


def inner_function(reduce):
    held = critic()

    def score(x):
        return held(x)

    def change():
        nonlocal held
        held = critic(2)

    return lambda model, batch: reduce(score(model(batch["x"]))), change, "held.kernel (a variable of"


def list_element(reduce):
    held = [critic()]
    change = lambda: held.__setitem__(0, critic(2))
    return lambda model, batch: reduce(held[0](model(batch["x"]))), change, "held[0].kernel (a variable of"


def updated_module(reduce):
    held = critic()
    change = lambda: nnx.update(held, nnx.state(critic(2)))
    return lambda model, batch: reduce(held(model(batch["x"]))), change, "held.kernel (a variable of"


def replaced_variable(reduce):
    held = {"critic": critic()}

    def change():
        held["critic"].kernel = nnx.Param(2 * held["critic"].kernel[...])

    return lambda model, batch: reduce(held["critic"](model(batch["x"]))), change, "held['critic'].kernel"


GLOBAL = critic()


def global_name(reduce):
    globals()["GLOBAL"] = critic()
    change = lambda: globals().__setitem__("GLOBAL", critic(2))
    return lambda model, batch: reduce(GLOBAL(model(batch["x"]))), change, "GLOBAL.kernel (a global)"


def partial(reduce):
    held = critic()
    change = lambda: nnx.update(held, nnx.state(critic(2)))
    fun = lambda critic, model, batch: reduce(critic(model(batch["x"])))
    return functools.partial(fun, held), change, "args[0].kernel (of a functools.partial)"


def default(reduce):
    held = critic()
    change = lambda: nnx.update(held, nnx.state(critic(2)))

    def loss(model, batch, critic=held):
        return reduce(critic(model(batch["x"])))

    return loss, change, "loss[0].kernel (a default of the function)"


def bound_method(reduce):
    class Script:
        def __init__(self):
            self.critic, self.unread = critic(), critic(3)

        def score(self, x):
            return self.critic(x)

        def loss(self, model, batch):
            return reduce(self.score(model(batch["x"])))

    script = Script()

    def change():
        script.critic = critic(2)

    return script.loss, change, "self.critic.kernel (of a bound method)"


def called_object(reduce):
    class Loss:
        def __init__(self):
            self.held = critic()

        def __call__(self, model, batch):
            return reduce(self.held(model(batch["x"])))

    loss = Loss()
    return loss, lambda: setattr(loss, "held", critic(2)), "held.kernel"


def linen_params(reduce):
    module = linen.Dense(1)
    params = module.init(jax.random.key(0), np.ones((1, 3), np.float32))

    def change():
        nonlocal params
        params = jax.tree.map(lambda x: 2 * x, params)

    fun = lambda model, batch: reduce(module.apply(params, model(batch["x"])))
    return fun, change, "params['params']['kernel']"


def bound_linen(reduce):
    module = linen.Dense(1)
    params = module.init(jax.random.key(0), np.ones((1, 3), np.float32))
    bound = module.bind(params)

    def change():
        nonlocal bound
        bound = module.bind(jax.tree.map(lambda x: 2 * x, params))

    return lambda model, batch: reduce(bound(model(batch["x"]))), change, "bound"


def nnx_state(reduce):
    graph, state = nnx.split(critic())

    def change():
        nonlocal state
        state = nnx.state(critic(2))

    return lambda model, batch: reduce(nnx.merge(graph, state)(model(batch["x"]))), change, "state"


def array_in_jit(reduce):
    held = jnp.ones((3, 1))
    score = jax.jit(lambda x: x @ held)

    def change():
        nonlocal held
        held = held * 2

    return lambda model, batch: reduce(score(model(batch["x"]))), change, "held (a variable of"


def array_changed_in_place(mean):
    held = {"weights": np.ones(3)}
    loss = lambda model, batch: mean(model(batch["x"]) * held["weights"])
    return loss, lambda: held["weights"].fill(5.0), "held['weights']"


def array_of_numpy(reduce):
    held = np.array([[1.0], [2.0], [3.0]])

    def change():
        nonlocal held
        held = held * 2

    return lambda model, batch: reduce(model(batch["x"]) @ held), change, "held (a variable of"


def array_read_by_numpy(reduce):
    held = {"weights": jnp.arange(3.0)}
    change = lambda: held.update(weights=jnp.ones(3))
    return lambda model, batch: reduce(model(batch["x"]) * np.asarray(held["weights"])), change, "held['weights']"


class Scanned(nnx.Module):
    def __init__(self, seed):
        self.layers, self.last = nnx.Param(jax.random.normal(jax.random.key(seed), (2, 3, 3))), critic(seed)

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, self.layers[...])
        return jax.checkpoint(lambda x: self.last(x))(x)


def module_in_loops(reduce):
    held = Scanned(1)
    change = lambda: nnx.update(held, nnx.state(Scanned(2)))
    score = jax.jit(lambda x: held(x))
    return lambda model, batch: reduce(score(model(batch["x"]))), change, "held.layers (a variable of"


def key(reduce):
    held = jax.random.key(0)

    def change():
        nonlocal held
        held = jax.random.key(1)

    fun = lambda model, batch: reduce(model(batch["x"]) * jax.random.normal(held, (3,)))
    return fun, change, "held (a variable of"


def parallel_model(reduce):
    other = ax.DDP(critic(), mesh_of(data=2))
    trainer = other.trainer(optax.sgd(0.1), lambda model, batch: (model(batch["y"]) ** 2).mean())
    change = lambda: trainer.step(BATCH)
    return lambda model, batch: reduce(other.module(model(batch["x"]))), change, "other.variables.params['kernel']"


HELD = {
    each.__name__: each
    for each in (
        *(cell, inner_function, list_element, updated_module, replaced_variable, global_name, partial, default),
        *(bound_method, called_object, linen_params, bound_linen, nnx_state, array_in_jit, array_of_numpy, key),
        array_changed_in_place,
        *(parallel_model, array_read_by_numpy, module_in_loops),
    )
}


def nnx_model(facade=ax.DDP, **degrees):
    return facade(linear(5, 3, nnx.Rngs(0)), mesh_of(degrees or {"data": 2}))


def linen_model():
    module = linen.Dense(3)
    return ax.DDP(module, mesh_of(data=2), params=module.init(jax.random.key(0), BATCH["x"]))


def refused(call, named):
    with pytest.raises(ValueError, match="reads values from outside that changed since it was compiled") as error:
        call()
    assert named in str(error.value)


@pytest.mark.parametrize("model", [nnx_model, linen_model])
@pytest.mark.parametrize("held", HELD)
def test_a_step_whose_loss_reads_what_was_changed_is_refused_by_name(held, model):
    loss, change, named = HELD[held](jnp.mean)
    trainer = model().trainer(optax.sgd(0.1), loss)
    trainer.step(BATCH), trainer.step(BATCH)
    before = trainer.model.state_dict()
    change()
    refused(lambda: trainer.step(BATCH), named)
    assert all(np.array_equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def step_of_two_parts(model, loss):
    trainer = model.trainer(optax.sgd(0.1), loss, accumulate=2)
    return lambda: trainer.step(BATCH)


def pure_step(model, loss):
    state, step = ax.make_train_step(linear(5, 3, nnx.Rngs(0)), optax.sgd(0.1), loss, model.mesh)

    def call():
        nonlocal state
        state, metrics = step(state, BATCH)
        return metrics

    return call


ENTRIES = {
    "step": step_of_two_parts,
    "value_and_grad": lambda model, loss: functools.partial(model.value_and_grad(loss), BATCH),
    "evaluate": lambda model, loss: functools.partial(model.trainer(optax.sgd(0.1), loss).evaluate, BATCH),
    "validate": lambda model, loss: functools.partial(model.trainer(optax.sgd(0.1), loss).validate, [BATCH]),
    "make_train_step": pure_step,
    "eval_fn": lambda model, loss: functools.partial(
        model.trainer(optax.sgd(0.1), lambda model, batch: model(batch["x"]).mean(), eval_fn=loss).evaluate, BATCH
    ),
    "mixing_rows": lambda model, loss: functools.partial(
        model.trainer(optax.sgd(0.1), ax.mixing_rows(loss)).step, BATCH
    ),
    "an evaluation of rows that do not divide": lambda model, loss: functools.partial(
        model.trainer(optax.sgd(0.1), loss).evaluate, regression(7)
    ),
}


@pytest.mark.parametrize("held", ["cell", "bound_method"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_compiled_entry_refuses_it(entry, held):
    loss, change, named = HELD[held](jnp.mean)
    call = ENTRIES[entry](nnx_model(), loss)
    call(), call()
    change()
    refused(call, named)


def test_predictions_refuse_it():
    fun, change, named = cell(lambda rows: rows)
    trainer = nnx_model().trainer(optax.sgd(0.1), lambda model, batch: model(batch["x"]).mean())
    trainer.predict([BATCH], fun), trainer.predict([BATCH], fun)
    change()
    refused(lambda: trainer.predict([BATCH], fun), named)


PLANS = {
    "fsdp": (ax.Plan(fsdp=ax.Shard()), {"fsdp": 2}),
    "fsdp, checked, recomputed": (ax.Plan(fsdp=ax.Shard(), check_vma=True, remat="full"), {"fsdp": 2}),
    "microbatches": (ax.Plan(accumulate=2), {"data": 2}),
    "one device": (ax.Plan(), {"data": 1}),
    "replicas": (ax.Plan(fsdp=ax.Shard()), {"data": 2, "fsdp": 2}),
    "draws": (ax.Plan(draws="rows"), {"data": 2}),
    "within a budget": (ax.Plan(memory="1GiB"), {"data": 2}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_it_is_refused_under_every_plan(plan):
    loss, change, named = updated_module(lambda scores: jnp.log(1 + (scores**2).sum()))
    settings, degrees = PLANS[plan]
    trainer = ax.parallelize(linear(5, 3, nnx.Rngs(0)), mesh_of(degrees), settings).trainer(optax.sgd(0.1), loss)
    trainer.step(BATCH)
    change()
    refused(lambda: trainer.step(BATCH), named)


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_stays_as_it_was_is_neither_told_nor_traced_again(entry, caplog):
    held, traced = {"critic": critic(), "other": critic(4), "table": np.arange(3.0)}, []

    def loss(model, batch):
        traced.append(1)
        return held["critic"](model(batch["x"]) * held["table"]).mean()

    call = ENTRIES[entry](nnx_model(), loss)
    call()
    made = len(traced)
    held["other"], held["new"] = critic(5), jnp.ones(3)  # which it does not read
    call()
    nnx.jit(lambda module: module(jnp.ones(3)))(held["critic"])  # other arrays of the same values
    call()
    held = {**held, "critic": nnx.clone(held["critic"]), "table": held["table"] + 0}
    call(), call()
    assert len(traced) == made and not caplog.messages


def test_a_step_that_reads_nothing_outside_asks_for_nothing():
    trainer = nnx_model().trainer(optax.sgd(0.1), lambda model, batch: model(batch["x"]).mean())
    trainer.step(BATCH)
    assert trainer.train_step._compiled._outside is None


def test_of_numpys_arrays_the_smallest_are_compared_up_to_a_mebibyte_together():
    held = {"small": np.zeros(8), "half": np.zeros(2**16), "second half": np.zeros(2**16), "large": np.zeros(2**18)}
    outside = Outside(lambda: held)
    outside.note(held.values())
    for x in held.values():
        x[-1] = 1.0
    outside.note(())  # another program was traced
    assert [name.split(" (")[0] for name in outside.changed()] == ["held['small']", "held['half']"]


def test_an_array_that_is_read_by_one_name_may_change_under_another():
    class Script:
        def __init__(self):
            self.target = critic()
            self.student = nnx.clone(self.target)

        def loss(self, model, batch):
            return self.target(model(batch["x"])).mean()

    script = Script()
    trainer = nnx_model().trainer(optax.sgd(0.1), script.loss)
    trainer.step(BATCH)
    nnx.update(script.student, nnx.state(critic(2)))
    trainer.step(BATCH)


def test_programs_of_other_devices_know_what_they_read(monkeypatch):
    # Without the passes for XLA:CPU a step is `jax.jit` alone, as on GPUs and TPUs.
    monkeypatch.setattr("axonml_jax.training.compile.is_on_cpu", lambda mesh: False)
    step, evaluate = (lambda trainer: trainer.step(BATCH)), (lambda trainer: trainer.evaluate(BATCH))
    for first, then in ((step, step), (evaluate, evaluate), (lambda trainer: trainer.trace(BATCH), step)):
        loss, change, named = cell(jnp.mean)
        trainer = nnx_model(data=1).trainer(optax.sgd(0.1), loss)
        first(trainer), first(trainer)
        change()
        refused(lambda then=then, trainer=trainer: then(trainer), named)


def test_a_new_trainer_and_a_new_function_of_gradients_read_what_there_is_now(caplog):
    loss, change, named = cell(jnp.mean)
    model = nnx_model()
    trainer, grads = model.trainer(optax.adam(0.1), loss), model.value_and_grad(loss)
    grads(BATCH), trainer.step(BATCH)
    change()
    refused(lambda: grads(BATCH), named), refused(lambda: trainer.step(BATCH), named)
    again = model.trainer(optax.adam(0.1), loss)
    again.state = trainer.state
    assert not caplog.messages
    expected = float(loss(model.module, BATCH))
    assert int(optax.tree.get(again.opt_state, "count")) == 1
    np.testing.assert_allclose(model.value_and_grad(loss)(BATCH)[0], expected, rtol=1e-6)
    assert ["compiled again" in each and named in each for each in caplog.messages] == [True]
    np.testing.assert_allclose(grads(BATCH)[0], expected, rtol=1e-6)
    np.testing.assert_allclose(again.step(BATCH)["loss"], expected, rtol=1e-6)


class Both(nnx.Module):
    def __init__(self):
        self.generator, self.critic = linear(5, 3, nnx.Rngs(0)), linear(3, 1, nnx.Rngs(1))


def fools(model, batch):
    return optax.sigmoid_binary_cross_entropy(model.critic(model.generator(batch["x"])), 1.0).mean()


def tells(model, batch):
    made = jax.lax.stop_gradient(model.generator(batch["x"]))
    real, fake = model.critic(batch["y"]), model.critic(made)
    return optax.sigmoid_binary_cross_entropy(real, 1.0).mean() + optax.sigmoid_binary_cross_entropy(fake, 0.0).mean()


def of_one(network):
    """Adam for one of the networks; the other stays."""
    labels = lambda params: {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}
    others = {name: optax.set_to_zero() for name in ("generator", "critic")}
    return optax.multi_transform(others | {network: optax.adam(0.1, eps=1e-3)}, labels)


def in_turn_with_flax():
    model, losses = Both(), []
    graph, params = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(params)
    turns = [(of_one("critic"), tells), (of_one("generator"), fools)]
    states = [tx.init(params) for tx, _ in turns]

    def value(params, loss, batch):
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        return loss(nnx.merge(graph, state), batch)

    for seed in range(3):
        for i, (tx, loss) in enumerate(turns):
            found, grads = jax.value_and_grad(value)(params, loss, regression(8, seed))
            updates, states[i] = tx.update(grads, states[i], params)
            params = optax.apply_updates(params, updates)
            losses.append(float(found))
    return losses, params


@pytest.mark.parametrize("plan", PLANS)
def test_two_networks_in_one_model_train_in_turn_as_in_a_plain_loop(plan):
    settings, degrees = PLANS[plan]
    model, losses = ax.parallelize(Both(), mesh_of(degrees), settings), []
    turns = [model.trainer(of_one("critic"), tells), model.trainer(of_one("generator"), fools)]
    for seed in range(3):
        losses += [float(trainer.step(regression(8, seed))["loss"]) for trainer in turns]
    expected, params = in_turn_with_flax()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for network, arrays in params.items():
        for name, array in arrays.items():
            np.testing.assert_allclose(model.state_dict()[f"{network}/{name}"], array, atol=1e-6)
