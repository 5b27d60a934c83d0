"""A plan's step beside the user's own function, plainly called on one device: how close they must be, and what differs."""

from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axonml_jax.base import LossFn, PyTree, named_leaves, some_of
from axonml_jax.collectives.primitives import JOINS
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import meshes_around, refuses_placement
from axonml_jax.layers.float8 import reading_float8
from axonml_jax.model.loss import Loss, parse_loss, per_weight
from axonml_jax.model.view import Functional, Mode, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.program.program import made_by, read_program
from axonml_jax.sharding.layout import is_layout, to_host
from axonml_jax.strategies.strategy import Lossy, reducer_of
from axonml_jax.training.objective import begun_anew

# --------------------------------------------------------------------------------------------------
# How close a parallel run must be to the single-device run: constants, never relaxed in a test.
# --------------------------------------------------------------------------------------------------

FLOAT64 = 1e-9
"""Tables of plans compare in float64: max|a - b| <= FLOAT64 * max(1, max|b|) per leaf."""

FLOAT32 = 1e-5
"""Float32 compares per leaf: max|a - b| <= FLOAT32 * max|b|, for loss, gradients and parameters trained by SGD."""

LOW_PRECISION = 5e-2
"""With a 16-bit dtype in the policy, or rounded sends (`is_low`): max|a - b| <= LOW_PRECISION * max|b| per leaf."""

ROUNDING = 1e-6
"""In a check of one batch, differences of float32 gradients below this share of the largest gradient do not count, nor those of
the model's state below it."""


def difference(got: Any, wanted: Any, low_precision: bool, floor: float = 0.0) -> str | None:
    """What is wrong with one leaf; None where it is near enough, or less than `floor` away."""
    if jnp.shape(got) != jnp.shape(wanted):
        return f"shape {jnp.shape(got)}, wanted {jnp.shape(wanted)}"
    double = jnp.result_type(wanted) in (jnp.float64, jnp.complex128)
    wide = np.complex128 if jnp.iscomplexobj(got) or jnp.iscomplexobj(wanted) else np.float64
    a, b = np.asarray(got, wide), np.asarray(wanted, wide)
    if not a.size:
        return None
    there = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), there):
        return "finite in one and not in the other"
    if not np.array_equal(a[~there], b[~there], equal_nan=True):
        return "infinite or NaN in both, and not the same"
    a, b = a[there], b[there]
    scale = np.max(np.abs(b), initial=0.0)
    allowed = LOW_PRECISION * scale if low_precision else FLOAT64 * max(1.0, scale) if double else FLOAT32 * scale
    worst, allowed = np.max(np.abs(a - b), initial=0.0), max(allowed, floor)
    return None if worst <= allowed else f"max|a-b| = {worst:.3g} > {allowed:.3g} (max|b| = {scale:.3g})"


def is_low(placement: Placement) -> bool:
    """Whether a plan computes or sends anything in 16 bits, or a strategy rounds what it sends (`Lossy`).

    So does a plan without a policy for parameters that are given in 16 bits.
    """
    plan = placement.plan
    given = {jnp.dtype(layout.dtype).name for layout in jax.tree.leaves(placement.params, is_leaf=is_layout)}
    kinds = (*vars(plan.precision).values(), reducer_of(plan.data).wire_dtype("float32").name)
    kinds = kinds if plan.precision.param else (*kinds, *given)
    rounds = any(each.having(Lossy) is not None and not each.exact for each in placement.strategies.values())
    return rounds or any(kind in ("bfloat16", "float16") for kind in kinds)


# --------------------------------------------------------------------------------------------------
# The user's function on one device.
# --------------------------------------------------------------------------------------------------


def plainly(
    model: Functional, loss_fn: LossFn, mode: Mode, variables: Variables, key: jax.Array, batch: PyTree
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], PyTree, PyTree]:
    """((loss, metrics), gradients, state) of the user's function, called on the whole batch on one device.

    Args:
      model, loss_fn: the user's.
      mode: how the model runs.
      variables: whole.
      key: what the model may draw with.
      batch: all rows.
    """

    def total(params: PyTree) -> tuple[jax.Array, tuple[Loss, PyTree]]:
        loss, state = called_on(model, loss_fn, mode, replace(variables, params=params), key, batch)
        return loss.total if loss.weight is None else per_weight(loss.total, loss.weight), (loss, state)

    (value, (loss, state)), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(variables.params)
    return (value, {name: metric.value for name, metric in loss.metrics.items()}), grads, state


def called_on(
    model: Functional, loss_fn: LossFn, mode: Mode, variables: Variables, key: jax.Array, batch: PyTree
) -> tuple[Loss, PyTree]:
    """The loss, and the model's state after it; where code places arrays over the user's axes, on a mesh of one device."""

    def called(variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        bound = model.bind(variables, key, mode)
        return parse_loss(loss_fn(bound, batch)), model.state_of(bound)

    cast = mode.precision.cast_compute
    read = Variables(cast(variables.params), cast(variables.frozen), variables.state)
    fun = partial(reading_float8, called, mode.precision)
    try:
        return fun(read, key, batch)
    except Exception as error:
        if not refuses_placement(error):
            raise
    from axonml_jax.parallel.users_mesh import reading_placed

    return reading_placed(fun, model, meshes_around(), frozenset(), False, read, key, batch)


@dataclass(frozen=True)
class InParts:
    """The model's state as one device has it that takes a plan's microbatches, each of all ranks' rows, one after another.

    Attributes:
      ranks, count: the number of ranks that share the rows, and of microbatches.
      called: `called(state, batch)` is the state after a call, compiled.
      state: the state before.
      batch: all rows.
    """

    ranks: int
    count: int
    called: Callable[[PyTree, PyTree], PyTree]
    state: PyTree
    batch: PyTree

    def once(self, joined: Container[str]) -> set[str]:
        """The leaves that all microbatches and the whole batch change alike, but `joined` ones: a step moves them once."""
        wanted = named_leaves(self.called(self.state, self.batch))
        each = [named_leaves(self.called(self.state, rows)) for rows in self._microbatches()]
        alike = {name for name, leaf in wanted.items() if all(_same(leaf, other[name]) for other in each)}
        return {name for name in alike if name not in joined}

    def after(self, once: Collection[str]) -> PyTree:
        """The state in the end; before each microbatch the leaves of these names are as they were before the first."""
        state = self.state
        for rows in self._microbatches():
            state = self.called(begun_anew(state, self.state, once), rows)
        return state

    def _microbatches(self) -> Iterator[PyTree]:
        ranks, count = self.ranks, self.count

        def rows(x: Any, number: int) -> Any:
            if not jnp.ndim(x):
                return x
            size = x.shape[0] // (ranks * count)
            return x.reshape(ranks, count, size, *x.shape[1:])[:, number].reshape(ranks * size, *x.shape[1:])

        return (jax.tree.map(partial(rows, number=number), self.batch) for number in range(count))


def states_beside(
    placement: Placement,
    of: tuple[Functional, LossFn, Mode],
    variables: Variables,
    key: jax.Array,
    batch: PyTree,
    states: tuple[PyTree, PyTree],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The state under the plan and on one device, by path, without leaves that it draws otherwise; and which go with others.

    The last are those, with the reason, that follow statistics which a plan's microbatches change one after another.

    Args:
      placement: the plan on its mesh.
      of, variables, key, batch: as of `plainly`.
      states: the state under the plan, and the one that `plainly` returned.
    """
    called = lambda state, batch, key: called_on(*of, replace(variables, state=state), key, batch)[1]
    plan, (got, wanted) = placement.plan, states
    ranks = placement.ranks(placement.axes.rows)
    if not named_leaves(wanted):
        return {}, {}, {}
    left_out: dict[str, str] = {}
    if plan.microbatches > 1:
        compiled = jax.jit(lambda state, batch: called(state, batch, key))
        parts = InParts(ranks, plan.microbatches, compiled, variables.state, batch)
        wanted = parts.after(once := parts.once(of[0].state_joins()))
        apart = _unlike(got, wanted, is_low(placement))
        following = apart - (_unlike(got, parts.after(once | apart), is_low(placement)) if apart else apart)
        left_out = dict.fromkeys(sorted(following), FOLLOWS)
    exact = ranks * plan.microbatches == 1 or (plan.draws == "rows" and plan.microbatches == 1)
    random = set() if exact else drawn(lambda key: called(variables.state, batch, key), key)
    random |= set(left_out)
    kept = lambda tree: {name: leaf for name, leaf in named_leaves(tree).items() if name not in random}
    return kept(got), kept(wanted), left_out


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays are the same up to rounding."""
    a, b = map(_numbers, (a, b))
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(jnp.array_equal(a, b))
    rounding = 16 * float(jnp.finfo(a.dtype).eps) * float(jnp.max(jnp.abs(a), initial=0))
    return bool(jnp.allclose(a, b, rtol=0, atol=rounding, equal_nan=True))


FOLLOWS = "it follows statistics of batches once a step, and microbatches change these one after another"


def _unlike(got: PyTree, wanted: PyTree, low_precision: bool) -> set[str]:
    """The names of leaves that differ."""
    pairs = named_leaves(to_host(jax.tree.map(_numbers, got))), named_leaves(to_host(jax.tree.map(_numbers, wanted)))
    ours, theirs = pairs
    return {name for name in theirs if difference(ours[name], theirs[name], low_precision, ROUNDING)}


def draws(model: Functional, loss_fn: LossFn, mode: Mode, variables: Variables, key: jax.Array, batch: PyTree) -> bool:
    """Whether a loss depends on random numbers that the model draws."""
    return bool(drawn(lambda key: called_on(model, loss_fn, mode, variables, key, batch)[0], key))


def drawn(fun: Callable[[jax.Array], PyTree], key: jax.Array) -> set[str]:
    """Paths of a function's results that depend on its random key."""
    traced = trace(fun, key)
    program = read_program(traced.jaxpr)
    by_key = lambda atom: any(program.inputs[0] in each.read for each in made_by(program.equations, [atom]))
    leaves = named_leaves(traced.out_tree.unflatten(program.outputs))
    return {name for name, atom in leaves.items() if by_key(atom)}


# --------------------------------------------------------------------------------------------------
# What a check of one batch says.
# --------------------------------------------------------------------------------------------------


MIXED = (
    "a difference mostly comes from code inside the model that mixes rows, such as a router of experts with capacities: the "
    "model is called with a rank's rows"
)

OWN_STATE = (
    "the model's own state (state/...) is the mean of the ranks' (floats) or the first rank's: its class may declare another "
    'join, such as state_joins = {"count": "sum"}, and batch_stats="local" says that a rank\'s own is meant'
)


@dataclass(frozen=True)
class Check:
    """A plan's loss, metrics, gradients and state of one batch beside those of the user's function on one device; print it.

    Attributes:
      differs: by the path of a leaf, the largest difference and the tolerance.
      left_out: by name what was not compared, and why.
      compared: the number of leaves that were.
    """

    differs: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    compared: int = 0

    @property
    def equal(self) -> bool:
        """Whether leaves were compared, and none differs."""
        return bool(self.compared) and not self.differs

    def __str__(self) -> str:
        found = f"{self.compared} leaves are equal" if self.compared else "nothing was compared"
        found = f"{len(self.differs)} of {self.compared} leaves differ" if self.differs else found
        lines = [f"plan against one device: {found}"]
        lines += [f"  {name}: {row}" for name, row in self.differs.items()]
        of_state = [name.startswith("state/") for name in self.differs]
        lines += [MIXED] * (not all(of_state)) + [OWN_STATE] * any(of_state)
        return "\n".join(lines + [f"  not compared: {name}: {why}" for name, why in self.left_out.items()])


def compared(got: PyTree, wanted: PyTree, low_precision: bool) -> Check:
    """Compares trees of `loss`, `metrics`, `gradients` and `state` leaf by leaf (`difference`)."""
    got, wanted = (named_leaves(to_host(jax.tree.map(_numbers, tree))) for tree in (got, wanted))
    largest = [np.max(np.abs(x), initial=0) for name, x in wanted.items() if name.startswith("gradients/")]
    floor = ROUNDING * float(max((x for x in largest if np.isfinite(x)), default=0.0))
    differs = {}
    for name in sorted({*got, *wanted}):
        if name not in got or name not in wanted:
            differs[name] = "only under the plan" if name in got else "only on one device"
            continue
        x64 = jnp.result_type(wanted[name]) in (jnp.float64, jnp.complex128)
        near = (
            0.0 if x64 else floor if name.startswith("gradients/") else ROUNDING if name.startswith("state/") else 0.0
        )
        if row := difference(got[name], wanted[name], low_precision, near):
            differs[name] = row
    return Check(differs, {}, len({*got, *wanted}))


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def compared_with(
    got: dict[str, Any],
    placement: Placement,
    of: tuple[Functional, LossFn, Mode],
    variables: Variables,
    key: jax.Array,
    batch: PyTree,
) -> Check:
    """Compares what a plan makes of a batch (`loss`, `metrics`, `gradients`, `state`) with one device.

    Args:
      got: what the plan makes.
      placement: the plan on its mesh.
      of: the model, the user's loss, and how the model runs.
      variables, key, batch: as of `plainly`.
    """
    (loss, metrics), grads, state = plainly(*of, variables, key, batch)
    own, wanted, following = states_beside(placement, of, variables, key, batch, (got["state"], state))
    made = {"loss": loss, "metrics": metrics, "gradients": grads, "state": wanted}
    found = left_to_ranks(compared({**got, "state": own}, made, is_low(placement)), of[0], placement)
    return replace(found, left_out=found.left_out | {f"state/{name}": why for name, why in following.items()})


def left_to_ranks(found: Check, model: Functional, placement: Placement) -> Check:
    """The check without state that differs because the user says so: joined as declared, or each rank's own.

    Args:
      found: what was compared.
      model: the model.
      placement: the plan on its mesh.
    """
    joins, own = model.state_joins(), placement.plan.batch_stats == "local"
    differs, left_out = dict(found.differs), dict(found.left_out)
    for path in [name.removeprefix("state/") for name in differs if name.startswith("state/")]:
        if (join := joins.get(path)) is not None:
            left_out[f"state/{path}"] = f"its class declares {join!r} in state_joins; {differs.pop(f'state/{path}')}"
        elif own:
            differs.pop(f"state/{path}")
            left_out[f"state/{path}"] = "each shard has its own (batch_stats)"
    return replace(found, differs=differs, left_out=left_out, compared=found.compared - len(left_out))


def not_comparable(model: Functional, placement: Placement, mode: Mode, drawing: bool) -> Iterator[tuple[str, str]]:
    """By name why a plan's step is another computation than one device's, by choice.

    Args:
      model: the model.
      placement: the plan on its mesh.
      mode: how the model runs.
      drawing: whether the loss depends on random numbers.
    """
    plan, eval_mode = placement.plan, "model.eval() compares the evaluation mode"
    if placement.axes.independent:
        yield "everything", f"along {', '.join(placement.axes.independent)} every rank trains a model of its own"
    parts = placement.ranks(placement.axes.rows) * plan.microbatches
    if drawing and parts > 1 and plan.draws == "shards":
        named = ", ".join(_dropouts(model.abstract_module)) or "the model"
        yield (
            "loss, metrics and gradients",
            f"{named} draws random numbers, of which every shard has its own; {eval_mode}, ax.Plan(draws='rows') draws "
            "those of one device under every plan",
        )
    if mode.training is False or parts == 1:
        return
    statistic = model.batch_statistics()
    names = [name for name in named_leaves(model.shapes.state) if statistic(name)]
    own = "each shard has its own statistics (batch_stats)" if plan.batch_stats != "global" else None
    own = f"each of {plan.microbatches} microbatches has its own statistics" if plan.microbatches > 1 else own
    if names and own:
        yield some_of(names), f"{own}; {eval_mode}"
    if model.declares(JOINS) and plan.microbatches > 1:
        yield (
            "what modules join over the batch",
            f"each of {plan.microbatches} microbatches is joined by itself; {eval_mode}",
        )


def _dropouts(module: Any) -> list[str]:
    if not isinstance(module, nnx.Module):
        return []
    return [
        "/".join(map(str, path)) or "the model"
        for path, each in nnx.iter_graph(module)
        if isinstance(each, nnx.Dropout)
    ]
