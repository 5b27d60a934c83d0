"""A small model trained under one strategy, and on one device with what the strategy does to values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from axonml_jax.facade.parallelize import parallelize
from axonml_jax.model.loss import WeightedMean
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.strategy import AbstractStrategy
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.stored import from_stored, to_stored
from axonml_jax.training.state.strategy_state import keeping

AXIS = "checked"
STEPS, RATE = 3, 0.1


class _Small(nnx.Module):
    """Sizes that divide nothing, a scalar, and a parameter that nothing reads; every position is worked on alone."""

    splits_positions = True

    def __init__(self):
        rngs = nnx.Rngs(0)
        make = lambda fan_in, fan_out: nnx.Linear(fan_in, fan_out, param_dtype=jnp.float64, rngs=rngs)
        self.first, self.last = make(5, 7), make(7, 3)
        self.scale, self.unused = nnx.Param(jnp.float64(0.7)), nnx.Param(jnp.ones(2, jnp.float64))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scale[...] * self.last(jnp.tanh(self.first(x)))


def _loss(model: Any, batch: Any) -> WeightedMean:
    squares = jnp.square(model(batch["x"]) - batch["y"])
    return WeightedMean(squares.sum(), jnp.asarray(squares.size, squares.dtype))


def assert_trains_like_one_device(strategy: AbstractStrategy, ranks: int, tolerance: float) -> None:
    """Three steps of momentum under `Plan(axes={"checked": strategy})` equal one device's.

    Raises:
      AssertionError: naming the step's loss or the parameter that differs.
    """
    random = np.random.default_rng(0)
    make = lambda *shape: random.normal(size=shape)
    sizes = (2 * ranks, 2 * ranks) if strategy.role.splits((AXIS,))[AXIS] == "positions" else (2 * ranks,)
    batches = [{"x": make(*sizes, 5), "y": make(*sizes, 3)} for _ in range(STEPS)]
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,), axis_types=(AxisType.Auto,))
    for check_vma in (True, False):
        parallel = parallelize(_Small(), mesh, Plan(axes={AXIS: strategy}, check_vma=check_vma))
        trainer = parallel.trainer(optax.sgd(RATE, momentum=0.9), _loss)
        losses = [float(trainer.step(batch)["loss"]) for batch in batches]
        wanted, params = _one_device(strategy, ranks, parallel._placement, batches)
        for i, (got, want) in enumerate(zip(losses, wanted, strict=True)):
            assert abs(got - want) <= tolerance * max(1.0, abs(want)), f"step {i}: loss {got}, one device's {want}"
        for name, value in parallel.state_dict().items():
            apart = float(np.max(np.abs(value - params[name]), initial=0.0))
            assert apart <= tolerance * max(1.0, float(np.max(np.abs(params[name])))), (
                f"{name} is {apart:.3g} off after {STEPS} steps (check_vma={check_vma})"
            )


def _one_device(strategy: AbstractStrategy, ranks: int, placement: Any, batches: list) -> tuple[list[float], dict]:
    """Losses and parameters by name; shards are rows of one array, over which `vmap` names the axis."""
    graph, state = nnx.split(_Small())
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    values = [np.asarray(leaf[...]) for _, leaf in nnx.to_flat_state(state)]
    layouts = [strategy.spec(Layout.whole(jax.ShapeDtypeStruct(x.shape, x.dtype)), AXIS, ranks) for x in values]
    tx, kept = optax.sgd(RATE, momentum=0.9), keeping(placement) is not None
    own = [strategy.init_state(jnp.asarray(x)) for x in values]

    def total(params: list, batch: Any) -> jax.Array:
        return _loss(nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), params)), batch).total

    opt_state, losses = tx.init([jnp.asarray(x) for x in values]), []
    params = [jnp.asarray(x) for x in values]
    own = [_split(each, layout, ranks) for each, layout in zip(own, layouts, strict=True)]
    left = [np.zeros((ranks, *x.shape)) for x in values]  # of every rank's gradients by its last sum
    for batch in batches:
        shards = [_split(x, layout, ranks) for x, layout in zip(params, layouts, strict=True)]
        read = [
            _joined(_mapped(strategy, ranks, layout, "read", shard, each), layout)
            for shard, each, layout in zip(shards, own, layouts, strict=True)
        ]
        value, grads, left = _mean_and_grads(strategy, ranks, layouts, total, read, batch, left)
        updates, opt_state = tx.update(grads, opt_state, params)
        new: Any = optax.apply_updates(params, updates)
        params, before = new, shards
        losses.append(float(value))
        if kept:
            after = [_split(x, layout, ranks) for x, layout in zip(params, layouts, strict=True)]
            made = [
                _mapped(strategy, ranks, layout, "after", *each)
                for layout, *each in zip(layouts, after, own, before, strict=True)
            ]
            params = [_joined(shard, layout) for (shard, _), layout in zip(made, layouts, strict=True)]
            own = [each for _, each in made]
    return losses, dict(zip(names, map(np.asarray, params), strict=True))


def _mean_and_grads(
    strategy: AbstractStrategy,
    ranks: int,
    layouts: Sequence[Layout],
    total: Any,
    read: list,
    batch: dict[str, Any],
    left: list,
) -> tuple[jax.Array, list, list]:
    """The mean loss, its gradients, sums of what each rank sends of its part of the batch, and what these lack of each."""
    dim, weight = int(strategy.role.splits((AXIS,))[AXIS] == "positions"), batch["y"].size
    parts = [{name: np.split(x, ranks, dim)[rank] for name, x in batch.items()} for rank in range(ranks)]
    totals, of_ranks = zip(*(jax.value_and_grad(total)(read, part) for part in parts), strict=True)
    same = zip(zip(*of_ranks, strict=True), left, layouts, strict=True)
    made = [_summed(strategy, jnp.stack(grads) + own, layout, ranks) for grads, own, layout in same]
    sums, lacks = zip(*made, strict=True)
    fed = [own if strategy.feeds_back else 0 * own for own in lacks]
    return sum(totals) / weight, [each / weight for each in sums], fed


def _mapped(strategy: AbstractStrategy, ranks: int, layout: Layout, what: str, *rows: Any) -> Any:
    """A method of the strategy on every rank's rows."""

    def read(shard: Any, own: Any) -> Any:
        return strategy.round_trip(strategy.to_read(shard, own, layout, AXIS), layout, AXIS)

    def after(shard: Any, own: Any, before: Any) -> Any:
        return strategy.after_update(shard, own, layout, AXIS, before=before)

    return jax.vmap(read if what == "read" else after, axis_name=AXIS, axis_size=ranks)(*rows)


def _summed(strategy: AbstractStrategy, grads: jax.Array, layout: Layout, ranks: int) -> tuple[jax.Array, jax.Array]:
    """The sum of what ranks send of their gradients, [ranks, ...], and what it lacks of each."""
    trip = jax.vmap(lambda part: strategy.sum_round_trip(part, layout, AXIS))
    sent = jnp.stack([_joined(trip(_split(grad, layout, ranks)), layout) for grad in grads])
    return sent.sum(0), grads - sent


def _split(tree: Any, layout: Layout, ranks: int) -> Any:
    """Whole arrays as rows of the ranks' shards; those of another shape than the leaf's repeated."""

    def split(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        dim = layout.dim_of(AXIS)
        if x.shape != layout.shape or dim is None:
            return jnp.broadcast_to(x, (ranks, *x.shape))
        return jnp.stack(jnp.split(to_stored(x, layout), ranks, axis=dim))

    return jax.tree.map(split, tree)


def _joined(rows: jax.Array, layout: Layout) -> jax.Array:
    """The inverse for one leaf."""
    dim = layout.dim_of(AXIS)
    return rows[0] if dim is None else from_stored(jnp.concatenate(list(rows), axis=dim), layout)
