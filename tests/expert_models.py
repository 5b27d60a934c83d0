"""Models with mixture-of-experts layers, their loss and batches, for tests: small, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import axonml_jax as ax

F64 = jnp.float64
IN, WIDTH, INNER, EXPERTS, LENGTH = 5, 6, 8, 8, 4
SIGMOID = ax.SigmoidRouter(top_k=3, groups=4, top_groups=2, scale=1.5, bias_rate=0.05)
ROUTERS = {
    "softmax": ax.SoftmaxRouter(top_k=2),
    "switch": ax.SoftmaxRouter(top_k=1, renormalize=False),
    "sigmoid": SIGMOID,
    "all": ax.SoftmaxRouter(top_k=EXPERTS),
}


def make_moe(rngs, router="softmax", experts=EXPERTS, **options):
    """A layer of `WIDTH` features."""
    chosen = ROUTERS[router] if isinstance(router, str) else router
    return ax.ParallelMoE(WIDTH, INNER, experts, router=chosen, param_dtype=F64, rngs=rngs, **options)


class Net(nnx.Module):
    """Dense layers around residual blocks of experts."""

    splits_positions = True

    def __init__(self, router="softmax", layers=2, seed=0, **options):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(IN, WIDTH, param_dtype=F64, rngs=rngs)
        self.layers = nnx.List([make_moe(rngs, router, **options) for _ in range(layers)])
        self.last = nnx.Linear(WIDTH, 3, param_dtype=F64, rngs=rngs)

    def __call__(self, x, mask=None):
        x, routers = self.first(x), []
        for layer in self.layers:
            y, router = layer(jnp.tanh(x), mask)
            x = x + y
            routers.append(router)
        return self.last(x), routers


def loss_fn(model, batch):
    """A weighted mean over unmasked tokens, with both auxiliary losses; metrics that every rank has alike."""
    mask = batch.get("mask")
    out, routers = model(batch["x"], mask)
    some = jnp.ones(out.shape[:-1]) if mask is None else mask
    squares = (jnp.square(out - batch["y"]).sum(-1) * some).sum()
    weight = jnp.asarray(some.sum(), F64)
    extra = sum(0.3 * r.load_balance + 0.01 * r.z for r in routers)
    return ax.WeightedMean(squares + weight * extra, weight)


def mean_loss(model, batch):
    """A plain mean."""
    out, routers = model(batch["x"])
    return jnp.square(out - batch["y"]).mean() + sum(0.3 * r.load_balance + 0.01 * r.z for r in routers)


def batch_of(rows, seed=0, length=LENGTH, masked=False):
    """x [rows, length, IN], y [rows, length, 3]; a mask, in which the first row is all padding."""
    rng = np.random.default_rng(seed)
    batch = {"x": rng.normal(size=(rows, length, IN)), "y": rng.normal(size=(rows, length, 3))}
    if masked:
        batch["mask"] = rng.random((rows, length)) > 0.3
        batch["mask"][0] = False
        batch["mask"][1] = True
    return batch


def grad_of(model, loss, batch):
    """Loss and gradients on one device, without the library's training."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    fun = lambda params: (lambda v: v.total / v.weight if isinstance(v, ax.WeightedMean) else v)(
        loss(nnx.merge(graph, params, rest, copy=True), batch)
    )
    return jax.jit(jax.value_and_grad(fun))(params)
