"""Layers of one's own that split parameters: right gradients are one device's, wrong ones are refused with the line."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.collectives.gradients import copy_to, gather_from, reduce_from, split_to
from axonml_jax.collectives.primitives import bound

F64 = jnp.float64


def on(fn, *more, **options):
    """A collective over `tensor`; nothing on one device."""
    return lambda x: fn(x, bound("tensor"), *more, **options) if bound("tensor") else x


class Layer(nnx.Module):
    """x + up(scale * tanh(down(x))), its inner features split, as `call(layer, x)` has it."""

    def __init__(self, call, seed=0, residual=True):
        self.residual = residual
        init, rngs = nnx.initializers.lecun_normal(dtype=F64), nnx.Rngs(seed)
        self.down = nnx.Param(init(rngs.params(), (6, 8)), tensor_spec=PartitionSpec(None, "tensor"))
        self.up = nnx.Param(init(rngs.params(), (8, 6)), tensor_spec=PartitionSpec("tensor", None))
        self.scale, self.call = nnx.Param(jnp.full((), 0.7, F64)), call

    def __call__(self, x):
        return x + self.call(self, x) if self.residual else self.call(self, x)


class Net(nnx.Module):
    def __init__(self, call, residual=True):
        self.first = nnx.Linear(6, 6, rngs=nnx.Rngs(1), param_dtype=F64)
        self.blocks = nnx.List([Layer(call, seed, residual) for seed in range(2)])

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


ENTER = on(copy_to)


def inner(enter=ENTER, scaled=ENTER):
    return lambda m, x: scaled(m.scale[...]) * jnp.tanh(enter(x) @ m.down[...])


def scanned(leave):
    def call(m, x):
        step = lambda carry, _: (leave(inner()(m, carry) @ m.up[...]), None)
        return jax.lax.scan(step, x, None, length=2)[0]

    return call


def attended(m, x):
    """A softmax over the inner features: its sum is bare, and right, as it goes on with what differs."""
    h = inner()(m, x)
    h = jnp.exp(h) / on(jax.lax.psum)(jnp.exp(h).sum(-1, keepdims=True))
    return on(reduce_from)(h @ m.up[...])


def gathered_within(m, x):
    """All inner features, gathered bare, each rank's part of the outputs of them."""
    h, up = on(jax.lax.all_gather, axis=1, tiled=True)(inner()(m, x)), on(gather_from, 0)(m.up[...])
    return on(gather_from, 1)(h @ on(split_to, 1)(up))


def scattered(m, x):
    part = inner()(m, x) @ m.up[...]
    return on(gather_from, 1)(on(jax.lax.psum_scatter, scatter_dimension=1, tiled=True)(part))


@jax.custom_vjp
def cast_copy(x):
    return x.astype(jnp.float32)


def _cast_back(_, ct):
    return (on(jax.lax.psum)(ct).astype(F64),)


cast_copy.defvjp(lambda x: (cast_copy(x), None), _cast_back)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, ct: (-ct,))

END = on(reduce_from)
RIGHT = {
    "pairs": lambda m, x: END(inner()(m, x) @ m.up[...]),
    "gathered and split": lambda m, x: on(gather_from)(inner()(m, x)) @ on(gather_from, 0)(m.up[...]),
    "a sum of no gradient": lambda m, x: (
        END(inner()(m, x) @ m.up[...]) * (1 + jax.lax.stop_gradient(on(jax.lax.psum)((m.up[...] ** 2).sum())))
    ),
    "a sum of data": lambda m, x: (
        END(inner()(m, x) @ m.up[...]) * on(jax.lax.psum)(jnp.ones((4 // len(bound("tensor") * 2 or [0]),))).sum()
    ),
    "a gradient of its own": lambda m, x: END(reversed_gradient(inner()(m, x)) @ m.up[...]) + reversed_gradient(x),
    "a softmax over parts": attended,
    "gathered within": gathered_within,
    "scattered": scattered,
    "in a loop": scanned(END),
    "rematerialised": jax.checkpoint(lambda m, x: END(inner()(m, x) @ m.up[...])),
}
ENTERS, PSUM, GATHER = "pass copy_to", "transpose of psum", "transpose of all_gather"
bare = on(jax.lax.psum)
WRONG = {
    "a bare sum": (lambda m, x: bare(inner()(m, x) @ m.up[...]), PSUM),
    "a bare mean": (
        lambda m, x: 2 * on(jax.lax.pmean)(inner()(m, x) @ m.up[...]) if bound("tensor") else inner()(m, x) @ m.up[...],
        PSUM,
    ),
    "a bare sum in a loop": (scanned(bare), PSUM),
    "a bare sum, rematerialised": (jax.checkpoint(lambda m, x: bare(inner()(m, x) @ m.up[...])), PSUM),
    "a bare sum in a branch": (
        lambda m, x: jax.lax.cond(
            jnp.ones(()) > 0, lambda y: bare(y), lambda y: bare(2 * y), inner()(m, x) @ m.up[...]
        ),
        PSUM,
    ),
    "a bare gather": (
        lambda m, x: on(jax.lax.all_gather, axis=1, tiled=True)(inner()(m, x)) @ on(gather_from, 0)(m.up[...]),
        GATHER,
    ),
    "an input that does not enter": (lambda m, x: END(inner(enter=lambda x: x)(m, x) @ m.up[...]), ENTERS),
    "a scale that does not enter": (lambda m, x: END(inner(scaled=lambda x: x)(m, x) @ m.up[...]), ENTERS),
}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


BATCH = {name: np.random.default_rng(seed).normal(size=(8, 6)) for seed, name in enumerate("xy")}


def one_device(call):
    model, losses = Net(call), []
    for _ in range(3):
        value, grads = nnx.value_and_grad(loss)(model, BATCH)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        losses.append(float(value))
    return losses


PLANS = {
    "ddp": (ax.DDP, {"data": 2, "tensor": 2}, {}),
    "fsdp": (ax.FSDP, {"fsdp": 2, "tensor": 2}, {}),
    "pipeline": (ax.Pipeline, {"pipe": 2, "tensor": 2}, {"num_microbatches": 2}),
}


EACH = pytest.mark.parametrize(
    ("plan", "check_vma"), [("ddp", False), ("ddp", True), ("fsdp", False), ("pipeline", False), ("pipeline", True)]
)


def trainer_of(call, plan, check_vma):
    facade, degrees, options = PLANS[plan]
    return facade(Net(call), mesh_of(**degrees), check_vma=check_vma, **options).trainer(optax.sgd(0.1), loss)


@EACH
@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_are_those_of_one_device(name, plan, check_vma):
    trainer = trainer_of(RIGHT[name], plan, check_vma)
    np.testing.assert_allclose(
        [float(trainer.step(BATCH)["loss"]) for _ in range(3)], one_device(RIGHT[name]), rtol=1e-9
    )


@EACH
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_refused_with_the_line_where_types_do_not_mend_them(name, plan, check_vma):
    call, said = WRONG[name]
    trainer = trainer_of(call, plan, check_vma)
    if check_vma and said != GATHER:
        np.testing.assert_allclose([float(trainer.step(BATCH)["loss"]) for _ in range(3)], one_device(call), rtol=1e-9)
        return
    with pytest.raises(ValueError, match=re.escape("take gather_from" if check_vma else said)) as refused:
        trainer.step(BATCH)
    assert check_vma or re.search(r"line \d+ of test_layer_gradients.py", str(refused.value))


def test_a_loss_that_is_only_evaluated_is_not_asked_for_gradients():
    call, _ = WRONG["a bare sum"]
    trainer = trainer_of(call, "ddp", False)
    np.testing.assert_allclose(trainer.evaluate(BATCH)["loss"], loss(Net(call), BATCH), rtol=1e-9)
    spread = ax.DDP(Net(call), mesh_of(data=2, tensor=2))
    with pytest.raises(ValueError, match=PSUM):
        spread.value_and_grad(loss)(BATCH)


def test_a_bare_sum_that_a_split_layer_reads_is_refused():
    """The next layer's `copy_to` gives it a whole gradient, which its transpose sums again."""

    model = Net(RIGHT["pairs"], residual=False)
    model.blocks[0].call = WRONG["a bare sum"][0]
    trainer = ax.DDP(model, mesh_of(data=2, tensor=2)).trainer(optax.sgd(0.1), loss)
    with pytest.raises(ValueError, match=PSUM):
        trainer.step(BATCH)


def test_beside_swapped_layers_wrong_gradients_are_refused_too():
    mesh, (wrong, said) = mesh_of(data=2, tensor=2), WRONG["a bare sum"]
    for call in (RIGHT["pairs"], wrong):
        model = Net(call)
        assert ax.auto_parallelize(model, mesh).swapped.keys() == {"first"}
        trainer = ax.parallelize(model, mesh).trainer(optax.sgd(0.1), loss)
        if call is wrong:
            with pytest.raises(ValueError, match=said):
                trainer.step(BATCH)
            continue
        np.testing.assert_allclose([float(trainer.step(BATCH)["loss"]) for _ in range(3)], one_device(call), rtol=1e-9)


def test_an_entrance_of_its_own_is_taken_as_right():
    """A cast whose own gradient sums over ranks, as `copy_to` does."""

    def call(m, x):
        h = jnp.tanh(cast_copy(x) @ m.down[...].astype(jnp.float32))
        return END((ENTER(m.scale[...]) * h).astype(F64) @ m.up[...])

    trainer = trainer_of(call, "ddp", False)
    np.testing.assert_allclose([float(trainer.step(BATCH)["loss"]) for _ in range(3)], one_device(call), rtol=1e-6)
