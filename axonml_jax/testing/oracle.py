"""The oracle: the same model trained on one device, with no mesh and no collective.

A plan with N batch shards and A microbatches is matched part by part: part (r, a) holds the rows that shard r sees in
microbatch a and draws the same random keys. Parts are taken one after another, by one program that does not depend on how many
there are; only where layers join the shards of a microbatch, as BatchNorm and routers do, are these mapped over together, under
an axis name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonml_jax._types import LossFn, PyTree, path_name
from axonml_jax.collectives.joined_ranks import JOINS, joined_over
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.model.loss import Loss, parse_loss
from axonml_jax.model.precision import Precision
from axonml_jax.parallel.float8.reading_float8 import reading_float8

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
        joins = parts.buffers == "joined" and bool(jax.tree.leaves(model.shapes.state))
        self._together = joins or model.declares(JOINS)
        axes = (AXIS,) if joins else ()
        self._mode = Mode(training=training, batch_norm_axes=axes, sum_over_ranks=sum_over, precision=precision)
        self._part, self._finish = jax.jit(self._differentiated), jax.jit(self._updated)

    def run(self, variables: Variables, batches: Sequence[PyTree], key: jax.Array, first_shard: int = 0) -> OracleRun:
        """Train from whole variables; `first_shard` is the index of the first shard, for a rank that trains alone."""
        cast = self.precision.cast_param
        variables = replace(variables, params=cast(variables.params), frozen=cast(variables.frozen))
        opt_state, steps = self.tx.init(variables.params), []
        for i, batch in enumerate(batches):
            sums, states = self._parts(variables, jax.random.fold_in(key, i), batch, first_shard)
            parts = self.parts.shards * self.parts.microbatches
            variables, opt_state, *rest = self._finish(variables, opt_state, sums, states, parts)
            steps.append(rest)
        grads, losses, norms, metrics = zip(*steps, strict=True)
        return OracleRun(list(losses), list(norms), list(metrics), grads[0], variables)

    def _parts(self, variables: Variables, key: jax.Array, batch: PyTree, first_shard: int) -> tuple[Any, list[PyTree]]:
        """Gradients and losses summed over all parts, and every shard's state after its own."""
        shards, microbatches = self.parts.shards, self.parts.microbatches
        groups = [list(range(shards))] if self._together else [[shard] for shard in range(shards)]
        sums, ends = None, []
        for group in groups:
            states = [variables.state] * len(group)
            for a in range(microbatches):
                rows = [self._rows(batch, shard, a) for shard in group]
                made, states = self._part(variables, states, key, a, [first_shard + shard for shard in group], rows)
                made = jax.tree.map(np.asarray, made)
                sums = made if sums is None else jax.tree.map(np.add, sums, made)
            ends += states
        return sums, ends

    def _differentiated(
        self, variables: Variables, states: list, key: jax.Array, a: Any, shards: list, rows: list
    ) -> tuple[Any, list[PyTree]]:
        """Gradients and losses of the parts of some shards in one microbatch, summed, and these shards' states after it."""
        keys = [jax.random.fold_in(jax.random.fold_in(key, a), shard) for shard in shards]

        def part(key: jax.Array, state: PyTree, rows: PyTree, params: PyTree) -> tuple[Loss, PyTree]:
            read = self.precision.cast_compute(params), self.precision.cast_compute(variables.frozen)
            return reading_float8(called, self.precision, Variables(*read, state), key, rows)

        def called(variables: Variables, key: jax.Array, rows: PyTree) -> tuple[Loss, PyTree]:
            with joined_over((AXIS,)):
                bound = self.model.bind(variables, key, self._mode)
                return parse_loss(self.loss_fn(bound, rows)), self.model.state_of(bound)

        def total(params: PyTree) -> tuple[jax.Array, tuple[Loss, list[PyTree]]]:
            if not self._together:
                loss, after = part(keys[0], states[0], rows[0], params)
                return loss.total, (loss, [after])
            each = jax.tree.map(lambda *x: jnp.stack(x), *zip(keys, states, rows, strict=True))
            own = lambda key, state, rows: part(key, state, rows, params)
            losses, after = jax.vmap(own, axis_name=AXIS)(*each)
            loss = jax.tree.map(lambda x: x.sum(0), losses)
            return loss.total, (loss, [jax.tree.map(lambda x, i=i: x[i], after) for i in range(len(shards))])

        (_, (loss, after)), grads = jax.value_and_grad(total, has_aux=True)(variables.params)
        return (jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), grads), loss), after

    def _updated(self, variables: Variables, opt_state: Any, sums: Any, states: list[PyTree], parts: Any) -> tuple:
        """Variables and optimizer state after the update, the gradients, loss, norm and metrics."""
        grads, total = sums
        count = parts if total.weight is None else total.weight
        grads = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, variables.params)
        loss, metrics = total.total / count, {name: metric.value for name, metric in total.metrics.items()}
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)))
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        update = optax.with_extra_args_support(self.tx).update
        updates, opt_state = update(grads, opt_state, variables.params, value=loss)
        params = optax.apply_updates(variables.params, updates)
        state = self.model.after_update(self._joined_state(variables.state, states))
        return Variables(params, variables.frozen, state), opt_state, grads, loss, norm, metrics

    def _joined_state(self, before: PyTree, states: list[PyTree]) -> PyTree:
        """Of what every shard ended with: what a module declares, else the mean of floats and the first of others."""
        declared = self.model.state_joins()
        floats = "mean" if self.parts.buffers == "joined" else "first"

        def join(path: tuple, old: jax.Array, *ends: jax.Array) -> jax.Array:
            default = floats if jnp.issubdtype(old.dtype, jnp.floating) else "first"
            how = declared.get(path_name(path), default)
            if how == "first":
                return ends[0]
            each = jnp.stack(ends)
            if how == "sum":
                return old + (each - old).sum(0, dtype=each.dtype)
            # Around the first: the mean of equal values is that value, bit for bit.
            return ends[0] + (each - ends[0]).mean(0) if how == "mean" else each.max(0)

        return jax.tree_util.tree_map_with_path(join, before, *states)

    def _rows(self, batch: PyTree, shard: int, a: int) -> PyTree:
        """A part's rows; scalars are every part's."""
        shards, microbatches = self.parts.shards, self.parts.microbatches

        def rows(x: Any) -> Any:
            if not jnp.ndim(x):
                return x
            size = jnp.shape(x)[0] // (shards * microbatches)
            start = (shard * microbatches + a) * size
            key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return (x if key else np.asarray(x))[start : start + size]

        return jax.tree.map(rows, batch)
