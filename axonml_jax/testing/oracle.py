"""The oracle: the same model trained on one device, with no mesh and no collective.

A plan with N batch shards and A microbatches is matched part by part: part (r, a) holds the rows that shard r sees in
microbatch a and draws the same random keys. OracleParts are taken one after another; only where BatchNorm joins the shards of
a microbatch are these mapped over together, joined by Flax's own axis name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import LossFn, PyTree, path_name
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.model.loss import Loss, parse_loss
from axonml_jax.model.precision import Precision

AXIS = "oracle_shards"


@dataclass(frozen=True)
class OracleParts:
    """How a plan divides the global batch, and what becomes of the model's own state.

    Attributes:
      shards: number of batch shards whose gradients are averaged.
      microbatches: per shard.
      buffers: "joined": statistics are those of the whole microbatch; "first": each shard has its own, and the first
        shard's are kept.
    """

    shards: int
    microbatches: int = 1
    buffers: Literal["joined", "first"] = "joined"


@dataclass(frozen=True)
class OracleRun:
    """What a run produced: per step losses, norms and metrics; the first step's gradients, clipped; the last variables."""

    losses: list[Any]
    norms: list[Any]
    metrics: list[dict[str, Any]]
    grads: PyTree
    variables: Variables


class Oracle:
    """Single-device training of a model, one update per batch, compiled once for all runs."""

    def __init__(
        self,
        model: Functional,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        parts: OracleParts,
        *,
        precision: Precision,
        max_grad_norm: float | None = None,
        training: bool | None = None,
    ):
        self.model, self.loss_fn, self.parts = model, loss_fn, parts
        self.tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
        self.precision, self.max_grad_norm = precision, max_grad_norm
        self._together = parts.buffers == "joined" and bool(jax.tree.leaves(model.shapes.state))
        axes = (AXIS,) if self._together else ()
        self._mode = Mode(training=training, batch_norm_axes=axes, sum_over_ranks=sum_over, precision=precision)
        self._step = jax.jit(self._update)

    def run(self, variables: Variables, batches: Sequence[PyTree], key: jax.Array, first_shard: int = 0) -> OracleRun:
        """Train from whole variables; `first_shard` is the index of the first shard, for a rank that trains alone."""
        cast = self.precision.cast_param
        variables = replace(variables, params=cast(variables.params), frozen=cast(variables.frozen))
        opt_state, steps = self.tx.init(variables.params), []
        for i, batch in enumerate(batches):
            step_key = jax.random.fold_in(key, i)
            variables, opt_state, *rest = self._step(variables, opt_state, step_key, batch, first_shard)
            steps.append(rest)
        grads, losses, norms, metrics = zip(*steps, strict=True)
        return OracleRun(list(losses), list(norms), list(metrics), grads[0], variables)

    def _update(self, variables: Variables, opt_state: Any, key: jax.Array, batch: PyTree, first_shard: int):
        value_and_grad = jax.value_and_grad(self._mean_loss, has_aux=True)
        (loss, (state, metrics)), grads = value_and_grad(variables.params, variables, key, batch, first_shard)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)))
        used = grads
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            used = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        update = optax.with_extra_args_support(self.tx).update
        updates, opt_state = update(used, opt_state, variables.params, value=loss)
        params = optax.apply_updates(variables.params, updates)
        state = self.model.after_update(state)
        return Variables(params, variables.frozen, state), opt_state, used, loss, norm, metrics

    def _mean_loss(self, params: PyTree, variables: Variables, key: jax.Array, batch: PyTree, first_shard: int):
        shards, microbatches = self.parts.shards, self.parts.microbatches
        read = self.precision.cast_compute(params), self.precision.cast_compute(variables.frozen)
        map_shards = self._map_together if self._together else jax.lax.map

        def part(args):
            key, state, rows = args
            bound = self.model.bind(Variables(*read, state), key, self._mode)
            return parse_loss(self.loss_fn(bound, rows)), self.model.state_of(bound)

        def microbatch(states: PyTree, xs: tuple):
            a, rows = xs
            keys = jax.vmap(lambda r: jax.random.fold_in(jax.random.fold_in(key, a), r))(
                first_shard + jnp.arange(shards)
            )
            losses, states = map_shards(part, (keys, states, rows))
            return states, jax.tree.map(lambda x: x.sum(0), losses)

        states = jax.tree.map(lambda x: jnp.broadcast_to(x, (shards, *x.shape)), variables.state)
        states, losses = jax.lax.scan(microbatch, states, (jnp.arange(microbatches), self._rows(batch)))
        total: Loss = jax.tree.map(lambda x: x.sum(0), losses)
        mean = total.total / (shards * microbatches if total.weight is None else total.weight)
        state = self._joined_state(variables.state, states)
        return mean, (state, {name: metric.value for name, metric in total.metrics.items()})

    def _joined_state(self, before: PyTree, states: PyTree) -> PyTree:
        """Of what every shard ended with: what a module declares, else the mean of floats and the first of others."""
        declared = self.model.state_joins()
        floats = "mean" if self.parts.buffers == "joined" else "first"

        def join(path: tuple, old: jax.Array, each: jax.Array) -> jax.Array:
            default = floats if jnp.issubdtype(each.dtype, jnp.floating) else "first"
            how = declared.get(path_name(path), default)
            if how == "sum":
                return old + (each - old).sum(0, dtype=each.dtype)
            return each.mean(0) if how == "mean" else each.max(0) if how == "max" else each[0]

        return jax.tree_util.tree_map_with_path(join, before, states)

    @staticmethod
    def _map_together(part: Callable, args: tuple):
        return jax.vmap(part, axis_name=AXIS)(args)

    def _rows(self, batch: PyTree) -> PyTree:
        """[B, ...] -> [microbatches, shards, b, ...]; scalars are repeated."""
        shards, microbatches = self.parts.shards, self.parts.microbatches

        def rows(x):
            x = jnp.asarray(x)
            if not x.ndim:
                return jnp.broadcast_to(x, (microbatches, shards))
            size = x.shape[0] // (shards * microbatches)
            return x.reshape(shards, microbatches, size, *x.shape[1:]).swapaxes(0, 1)

        return jax.tree.map(rows, batch)
