"""Small models under DiLoCo, and DiLoCo on one device: a loop over replicas with an outer optimizer of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from meshes import mesh_of

import axonml_jax as ax

F64 = jnp.float64
INNER = optax.sgd(0.1, momentum=0.9)
STEPS = 7


class Net(nnx.Module):
    """Two layers that split over `tensor`."""

    def __init__(self):
        self.up = ax.ColumnParallelLinear(6, 16, rngs=nnx.Rngs(0), param_dtype=F64)
        self.down = ax.RowParallelLinear(16, 2, rngs=nnx.Rngs(1), param_dtype=F64)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class LinenNet(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(16, name="up", param_dtype=F64)(x))
        return linen.Dense(2, name="down", param_dtype=F64)(x)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batches(count=STEPS):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(16, 6)), "y": rng.normal(size=(16, 2))} for _ in range(count)]


def model_of(kind, degrees, **plan):
    plan, mesh = ax.Plan(**plan), mesh_of(**degrees)
    if kind == "nnx":
        return ax.parallelize(Net(), mesh, plan)
    return ax.parallelize(LinenNet(), mesh, plan, params=LinenNet().init(jax.random.key(0), jnp.zeros((1, 6))))


def by_hand(params, batch):
    up, down = params["up"], params["down"]
    out = jnp.tanh(batch["x"] @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


DIFFERENTIATED = jax.jit(jax.value_and_grad(by_hand))


def reference(params, batches, strategy, replicas, tx=INNER, max_norm=None):
    """DiLoCo on one device: (outer parameters, outer momentum, replicas' own parameters, losses of steps by replica)."""
    outer_tx = optax.sgd(strategy.lr, strategy.momentum, nesterov=True)
    outer, outer_state = params, outer_tx.init(params)
    own, states, losses = [outer] * replicas, [tx.init(outer)] * replicas, []
    for step, batch in enumerate(batches, 1):
        size, losses = len(batch["x"]) // replicas, [*losses, []]
        for r in range(replicas):
            rows = {name: leaf[r * size : (r + 1) * size] for name, leaf in batch.items()}
            loss, grads = DIFFERENTIATED(own[r], rows)
            losses[-1].append(float(loss))
            if not np.isfinite(loss):
                continue
            if max_norm is not None:
                norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
                scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
                grads = jax.tree.map(lambda g, scale=scale: g * scale, grads)
            updates, states[r] = tx.update(grads, states[r], own[r])
            own[r] = optax.apply_updates(own[r], updates)
        if step % strategy.every == 0:
            mean_change = jax.tree.map(lambda x, *each: x - sum(each) / replicas, outer, *own)
            updates, outer_state = outer_tx.update(mean_change, outer_state)
            outer = optax.apply_updates(outer, updates)
            own = [outer] * replicas
    return outer, outer_state[0].trace, jax.tree.map(lambda *each: jnp.stack(each), *own), np.array(losses)
