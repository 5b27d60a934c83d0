"""`assert_equals_single_device`: training under a plan, compared with one device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonml_jax.base import LossFn, PyTree, named_leaves, path_name
from axonml_jax.collectives.primitives import JOINS, joined_over, sum_over
from axonml_jax.facade.facades import parallelize
from axonml_jax.layers.float8 import reading_float8
from axonml_jax.model.loss import Loss, Precision, of_batch, parse_loss, per_weight
from axonml_jax.model.view import Functional, Mode, Trainable, Variables, functionalize
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.batch import check_batch
from axonml_jax.sharding.layout import to_host
from axonml_jax.testing.mapped_model import MappedModel
from axonml_jax.training.objective import begun_anew
from axonml_jax.training.single_device import FLOAT32 as FLOAT32
from axonml_jax.training.single_device import FLOAT64 as FLOAT64
from axonml_jax.training.single_device import LOW_PRECISION as LOW_PRECISION
from axonml_jax.training.single_device import InParts, called_on, drawn, draws, is_low
from axonml_jax.training.single_device import difference as difference
from axonml_jax.training.step import whole_batch

# --------------------------------------------------------------------------------------------------
# The oracle: the same model trained on one device, with no mesh and no collective.
#
# Where a loss means the whole batch, the user's function is called on it, and only the model runs each shard's rows by
# themselves, with the random keys of the shard. Elsewhere a plan with N batch shards and A microbatches is matched part
# by part: part (r, a) holds the rows that shard r sees in microbatch a. Parts are taken one after another, by one
# program that does not depend on how many there are; only where layers join the shards of a microbatch, as BatchNorm
# and routers do, are these mapped over together, under an axis name.
# --------------------------------------------------------------------------------------------------

AXIS = "oracle_shards"


@dataclass(frozen=True)
class OracleParts:
    """How a plan divides the global batch, and how it treats the model's state.

    Attributes:
      shards: number of batch shards whose gradients are averaged.
      microbatches: per shard.
      buffers: "joined": statistics are those of the whole microbatch; "first": each shard has its own, and the first
        shard's are kept.
      whole: whether the loss is that of the whole batch, not the mean of its parts' losses; with several microbatches only
        for a model without state.
    """

    shards: int
    microbatches: int = 1
    buffers: Literal["joined", "first"] = "joined"
    whole: bool = False


@dataclass(frozen=True)
class OracleRun:
    """The results of a run: losses, norms and metrics by step; the first step's clipped gradients; the last variables."""

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
        self._after = jax.jit(self._state_after)

    def run(self, variables: Variables, batches: Sequence[PyTree], key: jax.Array, first_shard: int = 0) -> OracleRun:
        """Train from full variables; `first_shard` is the index of the first shard, for a rank that trains alone."""
        cast = self.precision.cast_param
        variables = replace(variables, params=cast(variables.params), frozen=cast(variables.frozen))
        opt_state, steps = self.tx.init(variables.params), []
        drawn_of = self._drawn(variables, key, batches[0])
        for i, batch in enumerate(batches):
            once = set[str]()
            if self.parts.microbatches > 1 and jax.tree.leaves(variables.state):
                joined = self.model.state_joins()
                once = self._in_parts(variables, jax.random.fold_in(key, i), batch).once(joined)
            sums, states = self._parts(variables, jax.random.fold_in(key, i), batch, first_shard, once)
            parts = 1 if self.parts.whole else self.parts.shards * self.parts.microbatches
            whole = self._state_of_whole(variables, jax.random.fold_in(key, i), batch, drawn_of, once)
            variables, opt_state, *rest = self._finish(variables, opt_state, sums, states, whole, parts)
            steps.append(rest)
        grads, losses, norms, metrics = zip(*steps, strict=True)
        return OracleRun(list(losses), list(norms), list(metrics), grads[0], variables)

    def _in_parts(self, variables: Variables, key: jax.Array, batch: PyTree) -> InParts:
        called = lambda state, batch: self._after(variables, state, key, batch)
        return InParts(self.parts.shards, self.parts.microbatches, called, variables.state, batch)

    def _parts(
        self, variables: Variables, key: jax.Array, batch: PyTree, first_shard: int, once: set[str]
    ) -> tuple[Any, list[PyTree]]:
        """Gradients and losses summed over all parts, and the state after each shard's part."""
        shards, microbatches = self.parts.shards, self.parts.microbatches
        if self.parts.whole:
            pairs = [(shard, a) for shard in range(shards) for a in range(microbatches)]
            rows, states = [self._rows(batch, *pair) for pair in pairs], [variables.state] * len(pairs)
            numbers = [a for _, a in pairs], [first_shard + shard for shard, _ in pairs]
            made, ends = self._part(variables, states, key, *numbers, rows)
            return jax.tree.map(np.asarray, made), ends
        groups = [list(range(shards))] if self._together else [[shard] for shard in range(shards)]
        sums, ends = None, []
        for group in groups:
            states = [variables.state] * len(group)
            for a in range(microbatches):
                rows = [self._rows(batch, shard, a) for shard in group]
                numbers = [a] * len(group), [first_shard + shard for shard in group]
                states = [begun_anew(state, variables.state, once) for state in states]
                made, states = self._part(variables, states, key, *numbers, rows)
                made = jax.tree.map(np.asarray, made)
                sums = made if sums is None else jax.tree.map(np.add, sums, made)
            ends += states
        return sums, ends

    def _differentiated(
        self, variables: Variables, states: list, key: jax.Array, numbers: list, shards: list, rows: list
    ) -> tuple[Any, list[PyTree]]:
        """Gradients and losses of the given microbatches and shards, summed, and the states after them."""
        keys = [jax.random.fold_in(jax.random.fold_in(key, a), shard) for a, shard in zip(numbers, shards, strict=True)]

        def part(key: jax.Array, state: PyTree, rows: PyTree, params: PyTree) -> tuple[Loss, PyTree]:
            read = self.precision.cast_compute(params), self.precision.cast_compute(variables.frozen)
            return reading_float8(called, self.precision, Variables(*read, state), key, rows)

        def called(variables: Variables, key: jax.Array, rows: PyTree) -> tuple[Loss, PyTree]:
            with joined_over((AXIS,)):
                bound = self.model.bind(variables, key, self._mode)
                return parse_loss(self.loss_fn(bound, rows)), self.model.state_of(bound)

        whole = partial(self._of_whole, variables, states, keys, rows)

        def total(params: PyTree) -> tuple[jax.Array, tuple[Loss, list[PyTree]]]:
            if not self._together:
                loss, after = part(keys[0], states[0], rows[0], params)
                return loss.total, (loss, [after])
            each = jax.tree.map(lambda *x: jnp.stack(x), *zip(keys, states, rows, strict=True))
            own = lambda key, state, rows: part(key, state, rows, params)
            losses, after = jax.vmap(own, axis_name=AXIS)(*each)
            loss = jax.tree.map(lambda x: x.sum(0), losses)
            return loss.total, (loss, [jax.tree.map(lambda x, i=i: x[i], after) for i in range(len(shards))])

        (_, (loss, after)), grads = jax.value_and_grad(whole if self.parts.whole else total, has_aux=True)(
            variables.params
        )
        return (jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), grads), loss), after

    def _of_whole(
        self, variables: Variables, states: list, keys: list, rows: list, params: PyTree
    ) -> tuple[jax.Array, tuple[Loss, list[PyTree]]]:
        """The user's loss of all parts together, and the state after each part."""
        read = self.precision.cast_compute(params), self.precision.cast_compute(variables.frozen)
        state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        batch = jax.tree.map(lambda *x: jnp.concatenate(x) if jnp.ndim(x[0]) else x[0], *rows)

        def called(variables: Variables, keys: Any, batch: PyTree) -> tuple[Loss, PyTree]:
            size = max((x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=1)
            with joined_over((AXIS,)):
                if not self._together and (len(keys) == 1 or not self._draws(variables, keys[0], batch)):
                    model = self.model.bind(variables, keys[0], self._mode)
                    return parse_loss(self.loss_fn(model, batch)), variables.state
                model = MappedModel(
                    self.model, self._mode, variables, variables.state, keys, AXIS, size, self._together
                )
                return parse_loss(self.loss_fn(model, batch)), model.states

        loss, after = reading_float8(called, self.precision, Variables(*read, state), keys, batch)
        return loss.total, (loss, [jax.tree.map(lambda x, i=i: x[i], after) for i in range(len(keys))])

    def _draws(self, variables: Variables, key: jax.Array, batch: PyTree) -> bool:
        """Whether the model or loss draws random numbers; also true for a model with state."""
        return bool(jax.tree.leaves(variables.state)) or draws(
            self.model, self.loss_fn, self._mode, variables, key, batch
        )

    def _known(self, variables: Variables) -> set[str]:
        """The paths of state whose join the model itself says or does; all, where shards keep their own."""
        leaves = named_leaves(variables.state)
        joined = self.parts.buffers == "joined"
        return {*filter(self.model.synchronized(), leaves), *self.model.state_joins()} if joined else {*leaves}

    def _drawn(self, variables: Variables, key: jax.Array, batch: PyTree) -> set[str]:
        """The paths of other state that depends on random numbers."""
        if self._known(variables).issuperset(named_leaves(variables.state)):
            return set()
        return drawn(lambda key: self._state_after(variables, variables.state, key, batch), key)

    def _state_of_whole(
        self, variables: Variables, key: jax.Array, batch: PyTree, drawn_of: set[str], once: set[str]
    ) -> dict[str, jax.Array]:
        """What is undeclared of the state, by path, after all rows of every microbatch; without what is drawn."""
        wanted = named_leaves(variables.state).keys() - self._known(variables) - drawn_of
        if not wanted:
            return {}
        after = self._in_parts(variables, key, batch).after(once)
        return {name: leaf for name, leaf in named_leaves(after).items() if name in wanted}

    def _state_after(self, variables: Variables, state: PyTree, key: jax.Array, batch: PyTree) -> PyTree:
        """The state after the user's function was called on one device."""
        mode = Mode(training=self._mode.training, precision=self.precision)
        return called_on(self.model, self.loss_fn, mode, replace(variables, state=state), key, batch)[1]

    def _updated(
        self, variables: Variables, opt_state: Any, sums: Any, states: list[PyTree], whole: dict, parts: Any
    ) -> tuple:
        """Variables and optimizer state after the update, with gradients, loss, norm and metrics."""
        grads, total = sums
        count = parts if total.weight is None else total.weight
        grads = jax.tree.map(lambda g, p: per_weight(g, count).astype(p.dtype), grads, variables.params)
        loss, metrics = per_weight(total.total, count), {name: metric.value for name, metric in total.metrics.items()}
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(grads)))
        if self.max_grad_norm is not None:
            scale = jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        update = optax.with_extra_args_support(self.tx).update
        updates, opt_state = update(grads, opt_state, variables.params, value=loss)
        params = optax.apply_updates(variables.params, updates)
        state = self.model.after_update(self._joined_state(variables.state, states, whole))
        return Variables(params, variables.frozen, state), opt_state, grads, loss, norm, metrics

    def _joined_state(self, before: PyTree, states: list[PyTree], whole: dict[str, jax.Array]) -> PyTree:
        """Join the shards' final states: as a module declares; else that of all rows (`whole`), where it is known.

        Of what is drawn it is the mean of floats, and the first shard's others.
        """
        declared = self.model.state_joins()
        floats = "mean" if self.parts.buffers == "joined" else "first"

        def join(path: tuple, old: jax.Array, *ends: jax.Array) -> jax.Array:
            default = floats if jnp.issubdtype(old.dtype, jnp.floating) else "first"
            if (name := path_name(path)) in whole:
                return whole[name]
            how = declared.get(name, default)
            if how == "first":
                return ends[0]
            each = jnp.stack(ends)
            if how == "sum":
                return old + (each - old).sum(0, dtype=each.dtype)
            # Around the first: the mean of equal values is that value, bit for bit.
            return ends[0] + (each - ends[0]).mean(0) if how == "mean" else getattr(each, how)(0)

        return jax.tree_util.tree_map_with_path(join, before, *states)

    def _rows(self, batch: PyTree, shard: int, a: int) -> PyTree:
        """The rows of one part; scalars belong to every part."""
        shards, microbatches = self.parts.shards, self.parts.microbatches

        def rows(x: Any) -> Any:
            if not jnp.ndim(x):
                return x
            size = jnp.shape(x)[0] // (shards * microbatches)
            start = (shard * microbatches + a) * size
            key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return (x if key else np.asarray(x))[start : start + size]

        return jax.tree.map(rows, batch)


# --------------------------------------------------------------------------------------------------
# Comparing trees leaf by leaf, with one error that lists every leaf that differs.
# --------------------------------------------------------------------------------------------------


def assert_trees_close(got: PyTree, wanted: PyTree, what: str, *, low_precision: bool = False) -> None:
    """Assert that every leaf of `got` is as close to `wanted` as its dtype demands (`testing/equality.py`).

    Raises:
      AssertionError: listing every leaf that differs, by path, with the difference and the tolerance.
    """
    ours, theirs = named_leaves(got), named_leaves(wanted)
    assert list(ours) == list(theirs), f"{what}: leaves {list(ours)} are not {list(theirs)}"
    found = {name or what: difference(ours[name], theirs[name], low_precision) for name in ours}
    rows = [f"  {name}: {row}" for name, row in found.items() if row]
    assert not rows, "\n".join([f"{what} differs from the single-device run:", *rows])


# --------------------------------------------------------------------------------------------------
# `assert_equals_single_device`: a plan changes where work happens, never what is computed.
# --------------------------------------------------------------------------------------------------


def assert_equals_single_device(
    model: Any,
    loss_fn: LossFn,
    batch: PyTree | list[PyTree],
    plan: Plan | None = None,
    *,
    mesh: Any = None,
    params: PyTree | None = None,
    tx: optax.GradientTransformation | None = None,
    steps: int = 5,
    max_grad_norm: float | None = None,
    trainable: Trainable = None,
    seed: int = 0,
) -> None:
    """Assert that a model trains under a plan as it does on one device: loss, gradients, metrics, buffers, parameters.

    The single-device run uses the same rows, microbatches and dropout keys (see `testing/equality.py`). Models in float64
    are held to 1e-9; others per leaf to max|a-b| <= 1e-5 max|b|. Under NO_SYNC every rank is held to a run of its own. A
    float32 gradient that is truly zero, such as that of a bias before BatchNorm, is nothing but rounding and fails that rule:
    leave such a bias out (`use_bias=False`), or test in float64.

    Args:
      model: an NNX module, or a Linen module with `params=`.
      loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`.
      batch: a global batch, used in every step; or a list of one for each step. A tuple is a batch.
      plan: the plan; None is DDP on all devices.
      mesh: where; None: the plan's degrees, or all devices.
      params: a Linen module's variables.
      tx: the optimizer; None: SGD with momentum (Adam divides float32 rounding noise by itself).
      steps: number of updates, if one batch is given.
      max_grad_norm: clip to this norm.
      trainable: which parameters train.
      seed: of dropout.

    Raises:
      AssertionError: naming every leaf that differs.
      TypeError, ValueError: when model, plan, mesh and batch do not fit.

    Example::

        def test_my_model_under_ddp(fake_mesh):
            assert_equals_single_device(MyModel(rngs=nnx.Rngs(0)), loss_fn, batch, ax.Plan(), mesh=fake_mesh)
    """
    tx = tx or optax.sgd(0.05, momentum=0.9)
    batches = batch if isinstance(batch, list) else [batch] * steps
    parallel = parallelize(model, mesh, plan, params=params, trainable=trainable, seed=seed)
    plan = parallel.plan
    view, variables = functionalize(model, params, trainable)
    for each in batches:
        check_batch(parallel._placement.batch_layout, each, plan.microbatches)
    loss_fn = of_batch(loss_fn)
    wanted = _run_oracle(parallel, view, variables, loss_fn, batches, tx, max_grad_norm, seed)
    got = _run_parallel(parallel, loss_fn, batches, tx, max_grad_norm)
    if parallel._placement.axes.buffers is not None and not parallel._placement.axes.independent:
        got["state"] = jax.tree.map(lambda x: x[0], got["state"])
    low = is_low(parallel._placement)
    for what in wanted:
        assert_trees_close(as_computed(got[what], plan), as_computed(wanted[what], plan), what, low_precision=low)


def as_computed(values: PyTree, plan: Plan) -> PyTree:
    """Values in float32 where the plan's parameters are: a float64 loss of float32 parameters has no more digits than they."""
    if "float32" not in (plan.precision.param, plan.precision.compute):
        return values
    return jax.tree.map(lambda x: np.float32(x) if jnp.result_type(x) == jnp.float64 else x, values)


def _run_oracle(
    parallel: Any,
    view: Any,
    variables: Variables,
    loss_fn: LossFn,
    batches: list,
    tx: Any,
    max_grad_norm: Any,
    seed: int,
) -> dict[str, Any]:
    plan, placement = parallel.plan, parallel._placement
    degree = placement.ranks(placement.axes.rows)
    key, options = jax.random.key(seed), {"precision": plan.precision, "max_grad_norm": max_grad_norm}
    joined = plan.batch_stats == "global" and (degree > 1 or not placement.axes.independent)
    alone = plan.microbatches == 1 or not (jax.tree.leaves(view.shapes.state) or view.declares(JOINS))
    whole = whole_batch(placement, loss_fn) is not None and alone
    parts = OracleParts(degree, plan.microbatches, "joined" if joined else "first", whole)
    if whole and plan.draws == "rows" and (joined or not jax.tree.leaves(view.shapes.state)):
        parts = OracleParts(1, whole=True)  # nothing depends on parts
    oracle = Oracle(view, loss_fn, tx, parts, **options)
    if not placement.axes.independent:
        return _as_tree(oracle.run(variables, batches, key))
    models = placement.ranks(placement.axes.independent)
    own = placement.axes.independent
    if placement.axes.batch[: len(own)] != own:
        raise ValueError(
            f"the oracle of independent ranks takes rows side by side, but {own} are not the outermost of "
            f"the batch axes {placement.axes.batch}"
        )
    rows = [[_rows_of(b, model, models) for b in batches] for model in range(models)]
    runs = [_as_tree(oracle.run(variables, b, key, model * degree)) for model, b in enumerate(rows)]
    return jax.tree.map(lambda *x: np.stack(x), *runs) | {"frozen": runs[0]["frozen"]}


def _run_parallel(
    parallel: Any, loss_fn: LossFn, batches: list, tx: Any, max_grad_norm: float | None
) -> dict[str, Any]:
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    trainer = parallel.trainer(optax.chain(_remember(), tx), loss_fn, max_grad_norm=max_grad_norm)
    metrics, grads = [to_host(trainer.step(batches[0]))], trainer.opt_state[0]
    if parallel.plan.pipe is None:  # a pipeline's is the optimizer's own tree already
        grads = parallel._rest.outside(grads, parallel.mesh)
    grads = to_host(grads)
    metrics += [to_host(trainer.step(b)) for b in batches[1:]]
    losses = [m.pop("loss") for m in metrics]
    norms = [m.pop("grad_norm") for m in metrics]
    frozen = parallel._rest.outside_frozen(parallel.variables.frozen, parallel.mesh)
    held = Variables(parallel.parameters(), frozen, parallel.variables.state)
    return _as_tree(OracleRun(losses, norms, metrics, grads, held))


def _remember() -> optax.GradientTransformation:
    """An optimizer that passes gradients on, and keeps the last ones as its state for inspection."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
    )


def _as_tree(run: OracleRun) -> dict[str, Any]:
    v: Variables = run.variables
    tree = {
        "loss": run.losses,
        "gradient norm": run.norms,
        "metrics": run.metrics,
        "gradients": run.grads,
        "parameters": v.params,
        "frozen": v.frozen,
        "state": v.state,
    }
    return to_host(tree)


def _rows_of(batch: PyTree, rank: int, degree: int) -> PyTree:
    def rows(x):
        size = jnp.shape(x)[0] // degree if jnp.ndim(x) else 0
        return x[rank * size : (rank + 1) * size] if jnp.ndim(x) else x

    return jax.tree.map(rows, batch)
