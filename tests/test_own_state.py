"""A model's own state: what follows from no rows moves once a step, and what is kept of rows is the whole batch's.

The oracle is the user's own function, called plainly on one device with the whole batch.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import F64, linear

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close

LEARNING_RATE = 0.1


def layers(first):
    return nnx.List([linear(4, 4, nnx.Rngs(first + i)) for i in range(2)])


class Net(nnx.Module):
    """A teacher that a loss moves; a counter and the vector of a power iteration that a call moves."""

    def __init__(self):
        self.online, self.teacher = layers(0), ax.as_state(layers(5))
        self.steps, self.vector = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.ones(4, F64))
        self.queue, self.seen = (
            nnx.Variable(jax.random.normal(jax.random.key(9), (24, 4), F64)),
            nnx.Variable(jnp.int32(3)),
        )

    def run(self, layers, x):
        for layer in layers:
            x = jnp.tanh(layer(x))
        return x

    def __call__(self, x):
        self.steps[...] += 1
        kernel = self.online[0].kernel[...]
        made = kernel @ (right := kernel.T @ self.vector[...])
        self.vector[...] = jax.lax.stop_gradient(made / jnp.linalg.norm(made))
        return self.run(self.online, x) * (1 + self.steps[...]) / jnp.linalg.norm(right)


def follow(model):
    for teacher, online in zip(model.teacher, model.online, strict=True):
        teacher.kernel[...] = 0.9 * teacher.kernel[...] + 0.1 * jax.lax.stop_gradient(online.kernel[...])


def taught(model, x):
    loss = jnp.square(model(x) - jax.lax.stop_gradient(model.run(model.teacher, x))).mean()
    follow(model)
    return loss


def weighted(model, x):
    return ax.WeightedMean(taught(model, x) * len(x), len(x))


def before(model, x):
    """The teacher moves before it is called, so that the model's own code is in the program of the loss."""
    follow(model)
    return jnp.square(model(x) - jax.lax.stop_gradient(model.run(model.teacher, x))).mean()


def contrastive(model, x):
    """Rows against all others and a queue, which keeps what the teacher makes of the newest rows."""
    keys = jax.lax.stop_gradient(model.run(model.teacher, x))
    scores = model(x) @ jnp.concatenate([keys, model.queue[...]]).T
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(x))).mean() * (1 + model.seen[...])
    follow(model)
    model.queue[...], model.seen[...] = jnp.concatenate([keys, model.queue[: -len(x)]]), model.seen[...] + len(x)
    return loss


def queued(model, x):
    """A sum over rows; the queue alone needs all of them."""
    keys = jax.lax.stop_gradient(model.run(model.teacher, x))
    loss = jnp.square(model(x) @ model.queue[...].T).mean()
    model.queue[...] = jnp.concatenate([keys, model.queue[: -len(x)]])
    return loss


def batches():
    return np.random.default_rng(0).normal(size=(2, 16, 4))


def plainly(loss):
    """Losses, parameters and state of plain gradient descent on one device."""
    graph, params, state = nnx.split(Net(), nnx.Param, ...)
    losses = []

    def of(params, state, x):
        made = loss(model := nnx.merge(graph, params, state, copy=True), x)
        return made.value if isinstance(made, ax.WeightedMean) else made, nnx.split(model, nnx.Param, ...)[2]

    for x in batches():
        (value, state), grads = jax.value_and_grad(of, has_aux=True)(params, state, x)
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
        losses.append(float(value))
    return losses, nnx.to_pure_dict(params), nnx.to_pure_dict(state)


PLANS = {
    "one device, accumulate": lambda typed: ax.parallelize(
        Net(), mesh_of(data=1), ax.Plan(accumulate=4, check_vma=typed)
    ),
    "ddp, accumulate": lambda typed: ax.parallelize(Net(), mesh_of(data=2), ax.Plan(accumulate=2, check_vma=typed)),
    "zero-1, accumulate": lambda typed: ax.parallelize(
        Net(), mesh_of(fsdp=2), ax.Plan(fsdp=ax.Shard(stage=1), accumulate=2, check_vma=typed)
    ),
    "zero-3, accumulate": lambda typed: ax.parallelize(
        Net(), mesh_of(data=2, fsdp=2), ax.Plan(accumulate=2, remat="full", check_vma=typed)
    ),
    "pipeline": lambda typed: ax.Pipeline(
        Net(), mesh_of(pipe=2), num_microbatches=4, split=("online/1",), check_vma=typed
    ),
    "zero-bubble, fsdp": lambda typed: ax.Pipeline(
        Net(),
        mesh_of(pipe=2, fsdp=2),
        num_microbatches=4,
        split=("online/1",),
        schedule="zero-bubble",
        gather="tick",
        check_vma=typed,
    ),
}
QUICK = {("pipeline", taught), ("ddp, accumulate", weighted), ("zero-3, accumulate", contrastive), ("pipeline", queued)}


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        pytest.param(plan, loss, marks=() if (plan, loss) in QUICK else pytest.mark.slow)
        for plan in PLANS
        for loss in (taught, weighted, before, contrastive, queued)
    ],
)
def test_what_follows_from_no_rows_moves_once_and_what_is_kept_of_rows_is_of_all(plan, loss):
    losses, params, state = plainly(loss)
    asked = ax.mixing_rows(loss, two_sweeps=True) if loss in (contrastive, queued) else loss
    for typed in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = PLANS[plan](typed)
            trainer = model.trainer(optax.sgd(LEARNING_RATE), asked)
            found = [float(trainer.step(x)["loss"]) for x in batches()]
        np.testing.assert_allclose(found, losses, rtol=1e-9)
        assert_trees_close(model.parameters(), params, "parameters")
        _, _, after = nnx.split(model.module, nnx.Param, ...)
        assert_trees_close(nnx.to_pure_dict(after), state, "state")


def test_a_check_says_so_and_a_loss_that_keeps_rows_is_refused_without_a_second_sweep():
    model = PLANS["ddp, accumulate"](False)
    found = model.trainer(optax.sgd(LEARNING_RATE), taught).check(batches()[0])
    assert found.equal and not found.left_out, str(found)
    with pytest.raises(ValueError, match=r"two_sweeps=True"):
        model.trainer(optax.sgd(LEARNING_RATE), queued).step(batches()[0])


class Averages(nnx.Module):
    """An average over rows, which every microbatch moves, and one that follows it."""

    def __init__(self):
        self.layer = linear(4, 4, nnx.Rngs(0))
        self.mean, self.own = nnx.Variable(jnp.zeros(4, F64)), nnx.Variable(jnp.zeros(4, F64))

    def __call__(self, x):
        x = self.layer(x)
        self.own[...] = 0.9 * self.own[...] + 0.1 * jax.lax.stop_gradient(x.mean(0))
        return x


def following(model, x):
    loss = jnp.square(model(x)).sum()
    model.mean[...] = 0.5 * model.mean[...] + 0.5 * model.own[...]
    return ax.WeightedMean(loss, len(x))


def test_what_follows_running_statistics_moves_once_with_the_last_of_them():
    trainer = ax.parallelize(Averages(), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(optax.sgd(0.0), following)
    [x, _], one = batches(), Averages()
    found = trainer.check(x)
    assert found.equal and "follows statistics" in found.left_out["state/mean"], str(found)
    trainer.step(x)
    for rows in np.moveaxis(x.reshape(2, 2, 4, 4), 1, 0).reshape(2, 8, 4):  # a microbatch is of all ranks' rows
        one(rows)
    module = trainer.model.module
    np.testing.assert_allclose(module.own[...], one.own[...], rtol=1e-9)
    np.testing.assert_allclose(module.mean[...], 0.5 * np.asarray(one.own[...]), rtol=1e-9)


def test_state_keeps_its_dtype_where_a_step_computes_in_sixteen_bits():
    class Mean(nnx.Module):
        def __init__(self):
            self.layer, self.mean = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(4, jnp.float32))

        def __call__(self, x):
            made = self.layer(x)
            self.mean[...] = jax.lax.stop_gradient(made.mean(0))
            return made

    for count in (1, 2):
        model = ax.parallelize(Mean(), mesh_of(data=2), ax.Plan(accumulate=count, precision="bf16"))
        model.trainer(optax.sgd(0.1), lambda model, x: jnp.square(model(x)).mean()).step(np.float32(batches()[0]))
        assert model.module.mean[...].dtype == jnp.float32


class Spectral(linen.Module):
    """A Linen layer whose vectors a call moves, as `linen.SpectralNorm` does."""

    @linen.compact
    def __call__(self, x):
        return linen.SpectralNorm(linen.Dense(3, param_dtype=F64))(x, update_stats=not self.is_initializing())


def test_the_vectors_of_a_linen_spectral_norm_move_once():
    [x, other] = batches()
    params = jax.tree.map(lambda x: x.astype(F64), Spectral().init(jax.random.key(0), x))
    loss = lambda model, x: jnp.square(model(x)).mean()
    found = {}
    for count in (1, 4):
        model = ax.parallelize(Spectral(), mesh_of(data=1), ax.Plan(accumulate=count), params=params)
        trainer = model.trainer(optax.sgd(LEARNING_RATE), loss)
        found[count] = [float(trainer.step(rows)["loss"]) for rows in (x, other)]
    np.testing.assert_allclose(found[4], found[1], rtol=1e-9)


class Keeps(nnx.Module):
    """A model whose own code keeps rows: in a queue, at a place, or one of them."""

    def __init__(self, how):
        self.layer, self.how = linear(4, 4, nnx.Rngs(0)), how
        self.queue, self.place = (
            nnx.Variable(jax.random.normal(jax.random.key(0), (32, 4), F64)),
            nnx.Variable(jnp.int32(5)),
        )

    def __call__(self, x):
        made, old = self.layer(x), self.queue[...]
        rows, place = jax.lax.stop_gradient(made), self.place[...]
        self.queue[...] = {
            "first": lambda: jnp.concatenate([rows, old[: -len(x)]]),
            "placed": lambda: jax.lax.dynamic_update_slice(old, rows, (place, jnp.int32(0))),
            "set": lambda: old.at[jnp.arange(len(x))].set(rows),
            "one": lambda: old.at[0].set(rows[0]),
        }[self.how]()
        return made @ old.T


@pytest.mark.filterwarnings("ignore:the model's own state depends on the batch's rows")
@pytest.mark.parametrize("how", ["first", "placed", "set", "one"])
@pytest.mark.parametrize("kind", ["data", "fsdp"])
def test_rows_that_a_model_keeps_in_its_state_are_those_of_the_whole_batch(how, kind):
    loss = lambda model, x: jnp.square(model(x)).mean()
    one = Keeps(how)
    wanted = [float(loss(one, x)) for x in batches()]
    model = ax.parallelize(Keeps(how), mesh_of(**{kind: 4}), ax.Plan())
    trainer = model.trainer(optax.sgd(0.0), loss)
    np.testing.assert_allclose([float(trainer.step(x)["loss"]) for x in batches()], wanted, rtol=1e-9)
    np.testing.assert_allclose(model.module.queue[...], one.queue[...], rtol=1e-9)
    with pytest.warns(UserWarning, match=r"takes them by their numbers: .*line"):
        ax.parallelize(Keeps(how), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(optax.sgd(0.0), loss).step(
            batches()[0]
        )


class Recurrent(nnx.Module):
    """Keeps an entry for every row of the batch, as truncated backpropagation through time does."""

    def __init__(self):
        self.layer, self.carry = linear(4, 4, nnx.Rngs(0)), nnx.Variable(jnp.zeros((16, 4), F64))

    def __call__(self, x):
        made = jnp.tanh(self.layer(x) + 0.5 * self.carry[...])
        self.carry[...] = jax.lax.stop_gradient(made)
        return made


def test_state_with_an_entry_for_every_row_is_of_the_whole_batch_or_refused_in_words():
    loss = lambda model, x: jnp.square(model(x)).mean()
    one = Recurrent()
    wanted = [float(loss(one, x)) for x in batches()]
    for degrees, plan in (({"data": 4}, ax.Plan()), ({"fsdp": 4}, ax.Plan(check_vma=True))):
        model = ax.parallelize(Recurrent(), mesh_of(**degrees), plan)
        trainer = model.trainer(optax.sgd(0.0), loss)
        np.testing.assert_allclose([float(trainer.step(x)["loss"]) for x in batches()], wanted, rtol=1e-9)
        np.testing.assert_allclose(model.module.carry[...], one.carry[...], rtol=1e-9)
    with pytest.raises(ValueError, match=r"an entry for every row .*\(4, 4\), \(16, 4\).*as a metric"):
        ax.parallelize(Recurrent(), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(optax.sgd(0.0), loss).step(
            batches()[0]
        )


def test_a_recurrence_over_rows_in_a_model_goes_through_all_of_them():
    class Net(nnx.Module):
        def __init__(self):
            self.layer = linear(4, 4, nnx.Rngs(0))

        def __call__(self, x):
            step = lambda carry, row: (new := jnp.tanh(0.5 * carry + row), new)
            return jax.lax.scan(step, jnp.zeros(4, F64), self.layer(x))[1]

    loss, [x, _] = lambda model, x: jnp.square(model(x)).mean(), batches()
    value, grads = nnx.value_and_grad(loss)(Net(), x)
    for degrees in ({"data": 4}, {"fsdp": 2}):
        got, made = ax.parallelize(Net(), mesh_of(**degrees), ax.Plan()).value_and_grad(loss)(x)
        np.testing.assert_allclose(got, value, rtol=1e-9)
        assert_trees_close(made, nnx.to_pure_dict(grads), "gradients")
    with pytest.warns(UserWarning, match=r"mixes rows of the batch: scan \(line"):
        ax.parallelize(Net(), mesh_of(data=2), ax.Plan(accumulate=2)).value_and_grad(loss)(x)


def test_a_matrix_of_rows_by_rows_that_a_model_returns_is_that_of_the_whole_batch():
    class Pairs(nnx.Module):
        def __init__(self):
            self.left, self.right = linear(4, 4, nnx.Rngs(0)), linear(4, 4, nnx.Rngs(1))

        def __call__(self, x):
            return self.left(x) @ self.right(x).T

    loss = lambda model, x: optax.softmax_cross_entropy_with_integer_labels(model(x), jnp.arange(len(x))).mean()
    [x, _] = batches()
    value, grads = nnx.value_and_grad(loss)(Pairs(), x)
    for degrees, plan in (({"data": 4}, ax.Plan()), ({"fsdp": 4}, ax.Plan(check_vma=True))):
        got, made = ax.parallelize(Pairs(), mesh_of(**degrees), plan).value_and_grad(loss)(x)
        np.testing.assert_allclose(got, value, rtol=1e-9)
        assert_trees_close(made, nnx.to_pure_dict(grads), "gradients")
    with pytest.raises(
        ValueError, match=r"not known what the loss's calls of the model return .* take all rows at once"
    ):
        ax.parallelize(Pairs(), mesh_of(data=2), ax.Plan(accumulate=2)).value_and_grad(loss)(x)
