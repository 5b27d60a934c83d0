"""What building a pipeline's step costs, in traces: the user's model and optimizer are each run once, however many stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plan_models import linear, mean_loss, regression

import axonml_jax as ax
from axonml_jax.training.divided import Divided


def counting(tx: optax.GradientTransformation, calls: list) -> optax.GradientTransformation:
    def update(*args, **more):
        calls.append("optimizer")
        return tx.update(*args, **more)

    return optax.GradientTransformation(tx.init, update)


CALLS: list[str] = []


class Counted(nnx.Module):
    """Blocks of one width; notes its calls in `CALLS`."""

    def __init__(self, num_blocks, rngs):
        self.blocks = nnx.List([linear(5, 5, rngs) for _ in range(num_blocks)])
        self.head = linear(5, 3, rngs)

    def __call__(self, x):
        CALLS.append("model")
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("ranks", [2, 4])
def test_model_and_optimizer_are_traced_once_however_many_stages(ranks):
    calls = CALLS
    mesh = ax.make_mesh(pipe=ranks, devices=jax.devices()[:ranks])
    pipe = ax.Pipeline(Counted(4, nnx.Rngs(0)), mesh, num_microbatches=2)
    trainer = pipe.trainer(counting(optax.adamw(1e-2), calls), mean_loss)
    calls.clear()
    trainer.train_step.trace(trainer.state, regression(4))
    assert sorted(calls) == ["model", "optimizer"]


def test_a_rank_runs_what_its_leaves_need_and_nothing_else():
    def fun(leaves, whole):
        count = whole["count"] + 1
        return [leaves[0] * count, jnp.sin(leaves[1]), leaves[0] + leaves[1], count, leaves[1]]

    buffers, whole = jnp.arange(4.0), {"count": jnp.ones((), jnp.int32)}
    program = Divided.of(fun, lambda buffer: [buffer[:2], buffer[2:]], buffers, whole)
    own = {0: jnp.ones(2)}
    jaxpr = jax.make_jaxpr(lambda leaf: program.run({0: leaf}, whole, [0, 3]))(own[0])
    assert {eqn.primitive.name for eqn in jaxpr.eqns} <= {"add", "mul", "convert_element_type"}
    first, count = program.run(own, whole, [0, 3])
    np.testing.assert_array_equal(first, [2.0, 2.0])
    assert int(count) == int(program.run({}, whole, [3])[0]) == 2
    (same,) = program.run({1: jnp.zeros(2)}, whole, [4])
    np.testing.assert_array_equal(same, [0.0, 0.0])
    with pytest.raises(ValueError, match=r'another(.|\n)*update="whole"'):
        program.run(own, whole, [2])
