"""A loss that differentiates the model, such as a gradient penalty, has one device's gradients where layers are split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.collectives.gradients import gather_from, split_to
from axonml_jax.collectives.primitives import bound

STEPS, LR = 3, 0.1
BATCH = {
    name: np.random.default_rng(seed).normal(size=(8, 4, size)).astype("f")
    for seed, (name, size) in enumerate({"x": 6, "y": 4}.items())
}


class Net(nnx.Module):
    """Three linear layers; the last two may be split."""

    def __init__(self, up=nnx.Linear, down=nnx.Linear, sequence=False):
        rngs = nnx.Rngs(0)
        self.first, self.up, self.down = nnx.Linear(6, 8, rngs=rngs), up(8, 16, rngs=rngs), down(16, 4, rngs=rngs)
        self.sequence = sequence

    def __call__(self, x):
        axes = bound("tensor") if self.sequence else ()
        x = jnp.tanh(self.first(x))
        y = self.down(jnp.tanh(self.up(split_to(x, axes, -2) if axes else x)))
        return gather_from(y, axes, -2) if axes else y


def errors(model, batch):
    """Of every row: the squared error, and the square of the outputs' gradient by the inputs."""
    slopes = jax.grad(lambda x: model(x).sum())(batch["x"])
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, (1, 2)) + jnp.mean(slopes**2, (1, 2))


def penalized(model, batch):
    rows = errors(model, batch)
    return ax.WeightedMean(rows.sum(), jnp.float32(len(rows)))


@pytest.fixture(scope="module")
def one_device():
    graph, params = nnx.split(Net())
    step = jax.jit(jax.value_and_grad(lambda params: errors(nnx.merge(graph, params), BATCH).mean()))
    losses = []
    for _ in range(STEPS):
        loss, grads = step(params)
        params = jax.tree.map(lambda p, g: p - LR * g, params, grads)
        losses.append(float(loss))
    return losses


def pair(sequence=False, overlap=False, **options):
    def make():
        column = lambda *sizes, rngs: ax.ColumnParallelLinear(
            *sizes, gather_output=False, sequence_parallel=sequence, overlap=overlap, rngs=rngs, **options
        )
        row = lambda *sizes, rngs: ax.RowParallelLinear(
            *sizes, input_is_parallel=True, sequence_parallel=sequence, rngs=rngs, **options
        )
        return Net(column, row, sequence)

    return make


def alone():
    column = lambda *sizes, rngs: ax.ColumnParallelLinear(*sizes, gather_output=True, rngs=rngs)
    return Net(column, lambda *sizes, rngs: ax.RowParallelLinear(*sizes, input_is_parallel=False, rngs=rngs))


def swapped(**options):
    def make():
        model = Net()
        ax.auto_parallelize(model, ax.make_mesh(data=2, tensor=2, devices=jax.devices()[:4]), **options)
        return model

    return make


TENSOR, GRID = {"data": 2, "tensor": 2}, {"row": 2, "col": 2, "depth": 2}
CASES = {
    "pair": (pair(), TENSOR),
    "pair that overlaps": (pair(overlap=True), TENSOR),
    "sequence": (pair(sequence=True), TENSOR),
    "sequence in a ring": (pair(sequence=True, ring=True), TENSOR),
    "layers alone": (alone, TENSOR),
    "swapped": (swapped(), TENSOR),
    "swapped in a pair": (swapped(example=BATCH["x"][:4]), TENSOR),
    "grid without depth": (lambda: Net(ax.ParallelLinear, ax.ParallelLinear), {"data": 2, "row": 2, "col": 2}),
    "grid": (lambda: Net(ax.ParallelLinear, ax.ParallelLinear), GRID),
    "DDP": (Net, {"data": 4}),
    "FSDP": (Net, {"fsdp": 4}),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_penalty_is_that_of_one_device(case, check_vma, one_device):
    make, sizes = CASES[case]
    mesh = ax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **{"data": 1, **sizes})
    split = {"data": {"data": ax.Replicate()}, "fsdp": {"fsdp": ax.Shard()}}.get(next(iter(sizes)), {})
    trainer = ax.parallelize(make(), mesh, ax.Plan(check_vma=check_vma, **split)).trainer(optax.sgd(LR), penalized)
    losses = [float(trainer.step(BATCH)["loss"]) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, one_device, rtol=2e-5)
