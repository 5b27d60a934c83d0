"""A primitive that the library has no rule for trains as on one device: it is kept, and not cut through."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.program.program import rule_of
from axonml_jax.testing.equality import assert_equals_single_device

WIDTH = 4

reversed_rows = Primitive("test_reversed_rows")
"""What nobody has a rule for: the rows of a matrix, the last one first."""
reversed_rows.def_impl(lambda x: x[::-1])
reversed_rows.def_abstract_eval(lambda x: x)
ad.deflinear2(reversed_rows, lambda ct, x: [reversed_rows.bind(ct)])
mlir.register_lowering(reversed_rows, mlir.lower_fun(lambda x: x[::-1], multiple_results=False))


class Block(nnx.Module):
    """It reads a parameter alone, and what became of the input."""

    def __init__(self, seed):
        self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)) / 2, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(WIDTH, jnp.float32))

    def __call__(self, x):
        return jnp.tanh(reversed_rows.bind(x @ reversed_rows.bind(self.kernel[...])) + self.bias[...])


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(i) for i in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - reversed_rows.bind(batch["y"])) ** 2)


PIPED = functools.partial(ax.Pipelined, num_microbatches=2)
PLANS = {
    "ddp": ({"data": 2}, {}),
    "selective": ({"data": 2}, {"remat": "selective"}),
    "full_shard": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3)}),
    "full_shard, full": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=3), "remat": "full"}),
    "1f1b": ({"pipe": 2}, {"pipe": PIPED()}),
    "gpipe, selective": ({"pipe": 2}, {"pipe": PIPED(schedule="gpipe"), "remat": "selective"}),
}


@pytest.mark.filterwarnings(
    "ignore:it is not known whether the model's code keeps rows:UserWarning"
)  # nothing is known of it
@pytest.mark.parametrize("plan", PLANS)
def test_a_primitive_without_a_rule_trains_as_on_one_device(plan):
    assert rule_of(reversed_rows.name).kind == "opaque"
    degrees, settings = PLANS[plan]
    generator = np.random.default_rng(0)
    batch = {key: jnp.asarray(generator.normal(size=(8, WIDTH)), jnp.float32) for key in "xy"}
    plan = ax.Plan(**settings)
    assert_equals_single_device(Net(), loss, batch, plan, mesh=mesh_of(**degrees), tx=optax.adam(1e-2), steps=2)
