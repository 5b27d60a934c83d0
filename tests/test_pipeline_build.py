"""What building a pipeline's step costs, in traces: the user's model and optimizer are each run once, however many stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plan_models import linear, mean_loss, regression

import axonml_jax as ax
from axonml_jax.parallel.pipeline.cutting.assign import assign
from axonml_jax.sharding.layout import Layout
from axonml_jax.training.optimizer.sharded.mixing import Mixing
from axonml_jax.training.optimizer.sharded.read_update import read_update


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
    fun = lambda a, b, count: (a * (count + 1), jnp.sin(b), count + 1)
    leaves = [jax.ShapeDtypeStruct((2,), jnp.float64)] * 2
    args, owners = [*leaves, jax.ShapeDtypeStruct((), jnp.int32)], ((0, 1, None), (0, 1, None))
    program = read_update(fun, args, owners, [Layout.whole(leaf) for leaf in leaves], ("pipe",))

    def own(leaf, count):
        return program.run({2: count}, lambda work: work({0: leaf}), lambda made: made[0])

    given = jnp.ones(2), jnp.ones((), jnp.int32)
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(own)(*given).eqns}
    assert names <= {
        "add",
        "mul",
        "convert_element_type",
        "broadcast_in_dim",
    }  # a number may be spread over the leaf it meets
    first, loose = own(*given)
    np.testing.assert_array_equal(first, [2.0, 2.0])
    assert int(loose[2]) == 2
    with pytest.raises(Mixing, match="several parameters"):
        read_update(lambda a, b, count: (a + b, b, count), args, owners, program.layouts, ("pipe",))


def test_a_norm_behind_a_layer_is_no_table_of_positions():
    names = ("blocks/0/post_norm/w", "blocks/1/post_norm/w", "pos_embed/w", "positions/w")
    assert assign({name: np.ones((4, 4)) for name in names}, 2).stages == (0, 1, 0, 0)
