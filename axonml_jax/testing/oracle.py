"""The oracle: the same model trained on one device, with no mesh and no collective.

A plan with N batch shards and A microbatches is matched part by part: part (r, a) holds the rows that shard r sees in
microbatch a and draws the same random keys. Parts are looped over; only where BatchNorm joins a microbatch's parts are
they mapped over together, joined by Flax's own axis name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import LossFn, PyTree
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.model.loss import Loss, parse_loss
from axonml_jax.model.precision import Precision

AXIS = "oracle_shards"


@dataclass(frozen=True)
class Parts:
    """How a plan divides the global batch.

    Attributes:
      shards: number of batch shards whose gradients are averaged.
      microbatches: per shard.
      first_shard: the index of the first shard, for runs of a single rank.
      join_statistics: whether BatchNorm joins the shards of a microbatch.
    """

    shards: int
    microbatches: int = 1
    first_shard: int = 0
    join_statistics: bool = True


@dataclass(frozen=True)
class Run:
    """What a run produced: per step losses, norms and metrics; the first step's gradients; the last variables."""

    losses: list[Any]
    norms: list[Any]
    metrics: list[dict[str, Any]]
    grads: PyTree
    variables: Variables


def run_on_one_device(
    model: Functional,
    variables: Variables,
    loss_fn: LossFn,
    batches: Sequence[PyTree],
    tx: optax.GradientTransformation,
    parts: Parts,
    *,
    key: jax.Array,
    precision: Precision,
    max_grad_norm: float | None = None,
    training: bool | None = None,
) -> Run:
    """Train on one device, one update per batch."""
    variables = replace(
        variables, params=precision.cast_param(variables.params), frozen=precision.cast_param(variables.frozen)
    )
    opt_state = tx.init(variables.params)
    step = jax.jit(_step(model, loss_fn, tx, parts, precision, max_grad_norm, training))
    run = Run([], [], [], None, variables)
    for i, batch in enumerate(batches):
        variables, opt_state, grads, loss, norm, metrics = step(variables, opt_state, jax.random.fold_in(key, i), batch)
        run.losses.append(loss)
        run.norms.append(norm)
        run.metrics.append(metrics)
        run = replace(run, variables=variables, grads=grads if run.grads is None else run.grads)
    return run


def _step(model, loss_fn, tx, parts: Parts, precision: Precision, max_grad_norm, training) -> Callable:
    join = parts.join_statistics and bool(jax.tree.leaves(model.shapes.state))
    mode = Mode(training=training, batch_norm_axes=(AXIS,) if join else (), precision=precision)

    def one(params, variables: Variables, state, key, batch) -> tuple[Loss, PyTree]:
        read = Variables(precision.cast_compute(params), precision.cast_compute(variables.frozen), state)
        bound = model.bind(read, key, mode)
        return parse_loss(loss_fn(bound, batch)), model.state_of(bound)

    def microbatch(params, variables, state, a, key, batch):
        shards = [parts.first_shard + r for r in range(parts.shards)]
        keys = [jax.random.fold_in(jax.random.fold_in(key, a), r) for r in shards]
        rows = [_part(batch, r, a, parts) for r in range(parts.shards)]
        if join:
            together = lambda k, b: one(params, variables, state, k, b)
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
            loss, states = jax.vmap(together, axis_name=AXIS)(jnp.stack(keys), stacked)
            return jax.tree.map(lambda x: x.sum(0), loss), _mean_state(states)
        results = [one(params, variables, state, k, b) for k, b in zip(keys, rows, strict=True)]
        return jax.tree.map(lambda *x: sum(x), *[r[0] for r in results]), results[0][1]

    def objective(params, variables, key, batch):
        state, losses = variables.state, []
        for a in range(parts.microbatches):
            loss, state = microbatch(params, variables, state, a, key, batch)
            losses.append(loss)
        total: Loss = jax.tree.map(lambda *x: sum(x), *losses)
        count = parts.shards * parts.microbatches
        mean = total.total / (count if total.weight is None else total.weight)
        return mean, (state, {name: metric.value for name, metric in total.metrics.items()})

    def step(variables: Variables, opt_state, key, batch):
        value_and_grad = jax.value_and_grad(objective, has_aux=True)
        (loss, (state, metrics)), grads = value_and_grad(variables.params, variables, key, batch)
        norm = optax.global_norm(grads)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            grads_used = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        else:
            grads_used = grads
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(grads_used, opt_state, variables.params, value=loss)
        params = optax.apply_updates(variables.params, updates)
        return Variables(params, variables.frozen, state), opt_state, grads, loss, norm, metrics

    return step


def _part(batch: PyTree, shard: int, microbatch: int, parts: Parts) -> PyTree:
    def rows(x):
        x = jnp.asarray(x)
        if not x.ndim:
            return x
        size = x.shape[0] // (parts.shards * parts.microbatches)
        start = (shard * parts.microbatches + microbatch) * size
        return x[start : start + size]

    return jax.tree.map(rows, batch)


def _mean_state(states: PyTree) -> PyTree:
    """Floating leaves averaged over shards, others the first shard's."""
    return jax.tree.map(lambda x: x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0], states)
