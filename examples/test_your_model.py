"""A test that your model trains in parallel as it does on one device; this is what to put into your own test suite.

    python -m pytest examples/test_your_model.py --fake-devices 4

Shows `assert_equals_single_device` and the fixture `fake_mesh`: loss, gradients, statistics and parameters are compared.
"""

import numpy as np
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device


class YourModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(6, 16, use_bias=False, rngs=rngs)  # BatchNorm has one
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def loss_fn(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def new_batch():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(16, 6)).astype(np.float32), "y": rng.normal(size=(16, 2)).astype(np.float32)}


PLANS = {"ddp": ax.Plan(), "accumulating": ax.Plan(accumulate=2)}


@pytest.mark.parametrize("fake_mesh", [{"data": 4}], indirect=True)  # a mesh of four of the simulated devices
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_your_model_trains_in_parallel_as_on_one_device(fake_mesh, plan):
    assert_equals_single_device(YourModel(nnx.Rngs(0)), loss_fn, new_batch(), plan, mesh=fake_mesh, steps=2)
