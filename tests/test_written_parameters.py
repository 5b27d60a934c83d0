"""What model code writes into parameters is state (`ax.as_state`), or refused: a step never drops it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax

ROWS, STEPS = 8, 4


def batches():
    drawn = np.random.default_rng(0)
    return [{"x": drawn.normal(size=(ROWS, 6)).astype(np.float32)} for _ in range(STEPS)]


class Follows(nnx.Module):
    """A target network that follows the online one, as in BYOL, MoCo and DINO."""

    def __init__(self, rngs, wrap=lambda module: module):
        self.online = nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)])
        self.target = wrap(nnx.List([nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)]))

    def __call__(self, x):
        online = target = x
        for own, other in zip(self.online, self.target, strict=True):
            online, target = jnp.tanh(own(online)), jnp.tanh(other(target))
        for own, other in zip(self.online, self.target, strict=True):
            for name in ("kernel", "bias"):
                new = 0.5 * getattr(other, name)[...] + 0.5 * jax.lax.stop_gradient(getattr(own, name)[...])
                getattr(other, name)[...] = new
        return online, jax.lax.stop_gradient(target)


def loss_fn(model, batch):
    online, target = model(batch["x"])
    return ((online - target) ** 2).mean()


ONLINE = nnx.All(nnx.Param, nnx.PathContains("online"))


def plainly():
    """Flax's own loop on one device."""
    model = Follows(nnx.Rngs(0))
    optimizer, losses = nnx.Optimizer(model, optax.sgd(0.3), wrt=ONLINE), []
    for batch in batches():
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, ONLINE))(model, batch)
        optimizer.update(model, grads)
        losses.append(float(loss))
    return losses, np.asarray(model.target[0].kernel[...])


def mesh_of(**degrees):
    return ax.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])


PLANS = {
    "DDP": lambda model, **more: ax.DDP(model, mesh_of(data=4), **more),
    "FSDP": lambda model, **more: ax.FSDP(model, mesh_of(fsdp=4), **more),
    "FSDP, recomputed": lambda model, **more: ax.FSDP(model, mesh_of(fsdp=2), remat="full", **more),
    "typed": lambda model, **more: ax.DDP(model, mesh_of(data=2), check_vma=True, **more),
    "one device": lambda model, **more: ax.DDP(model, mesh_of(data=1), **more),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_target_network_that_is_state_follows_as_on_one_device(plan):
    wrapped = PLANS[plan](Follows(nnx.Rngs(0), ax.as_state))
    trainer = wrapped.trainer(optax.sgd(0.3), loss_fn)
    losses, target = plainly()
    np.testing.assert_allclose([float(trainer.step(batch)["loss"]) for batch in batches()], losses, rtol=1e-5)
    np.testing.assert_allclose(wrapped.module.target[0].kernel[...], target, rtol=1e-5, atol=1e-6)


class Normed(nnx.Module):
    def __init__(self, rngs):
        norm = lambda: nnx.WeightNorm(nnx.Linear(6, 6, rngs=rngs), rngs=rngs)
        self.blocks, self.head = nnx.List([norm() for _ in range(2)]), nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class Plain(Normed):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(6, 1, rngs=rngs)


def squared(model, batch):
    return (model(batch["x"]) ** 2).mean()


def clipped(model, batch):
    loss = squared(model, batch)
    model.head.kernel[...] = jnp.clip(model.head.kernel[...], -0.1, 0.1)
    return loss


WRITERS = {
    "target without as_state": (Follows, loss_fn, ONLINE, "target/0/bias, target/0/kernel, target/1/bias"),
    "weight norm": (Normed, squared, None, "blocks/0/layer_instance/kernel, blocks/1"),
    "written by the loss": (Plain, clipped, None, "head/kernel"),
}
MORE = {
    "accumulated": lambda model, **more: ax.parallelize(model, mesh_of(data=2), ax.Plan(accumulate=2), **more),
    "pipeline": lambda model, **more: ax.Pipeline(model, mesh_of(pipe=2), num_microbatches=2, **more),
}


@pytest.mark.parametrize("plan", [*PLANS, *MORE])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_into_parameters_is_refused_by_path(name, plan):
    make, loss, trainable, paths = WRITERS[name]
    wrapped = (PLANS | MORE)[plan](make(nnx.Rngs(0)), trainable=trainable)
    with pytest.raises(ValueError, match=f"writes into parameters.*{paths}.*as_state"):
        wrapped.trainer(optax.sgd(0.3), loss).step(batches()[0])


class Handed(nnx.Module):
    """Transforms hand parameters on as new arrays."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs)))(rngs)
        self.last = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        step = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x = nnx.remat(lambda model, x: model.last(x))(self, step(x, self.layers))
        self.last.kernel[...] = self.last.kernel[...]
        return x


STACKED = nnx.StateAxes({nnx.Param: 1, ...: 0})


class StackedSecond(nnx.Module):
    """Stacked along the second dim: a scan moves it to the front, and back."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs), out_axes=STACKED)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        step = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, STACKED), out_axes=nnx.Carry)
        return step(x, self.layers)


def largest(model, batch):
    """Of more rows than a rank has."""
    return jax.lax.top_k((model(batch["x"]) ** 2).mean(-1), 5)[0].mean()


@pytest.mark.parametrize("make, loss", [(StackedSecond, squared), (Handed, largest)], ids=["transposed", "of all rows"])
def test_what_is_handed_on_in_other_ways_is_not_written(make, loss):
    trainer = ax.DDP(make(nnx.Rngs(0)), mesh_of(data=2)).trainer(optax.sgd(0.3), loss)
    found, wanted = trainer.step(batches()[0])["loss"], loss(make(nnx.Rngs(0)), batches()[0])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("plan", ["DDP", "FSDP", "one device", "accumulated"])
def test_what_is_only_handed_on_is_not_written(plan):
    trainer = (PLANS | MORE)[plan](Handed(nnx.Rngs(0))).trainer(optax.sgd(0.3), squared)
    model = Handed(nnx.Rngs(0))
    np.testing.assert_allclose(
        float(trainer.step(batches()[0])["loss"]), float(squared(model, batches()[0])), rtol=1e-5
    )


def test_shared_parameters_stay_shared_and_what_has_none_is_refused():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    held = ax.as_state(nnx.Dict(a=nnx.List([layer, nnx.Param(jnp.ones(2))]), b=layer))
    assert held.a[0] is held.b and not nnx.state(held, nnx.Param)
    assert isinstance(held.a[1], nnx.Variable) and held.b(jnp.ones((1, 2))).shape == (1, 2)
    with pytest.raises(ValueError, match="as_state: Dropout has no parameters"):
        ax.as_state(nnx.Dropout(0.5))
