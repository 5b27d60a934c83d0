"""`check_strategy`: tests a strategy against its contract and against training on one device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from axonml_jax.facade.facades import parallelize
from axonml_jax.ledger.count import collectives_in
from axonml_jax.model.loss import WeightedMean
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.layout import Layout, from_stored, to_stored
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    LocalRounds,
    Lossy,
    Role,
    Stateful,
    feeds_back,
    gather_bucket,
    reads_exactly,
    sync_bucket,
)
from axonml_jax.testing.equality import FLOAT64
from axonml_jax.training.between_steps import stateful

# --------------------------------------------------------------------------------------------------
# A small model trained under one strategy, and on one device with what the strategy does to values.
# --------------------------------------------------------------------------------------------------

STEPS, RATE = 3, 0.1


class _Small(nnx.Module):
    """A model with sizes that divide nothing, a scalar, and a parameter that nothing reads; it acts on each position alone."""

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
    """Assert that three steps of momentum under `Plan(axes={"checked": strategy})` equal one device's.

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
    """Losses and parameters, by name, of training on one device; shards are rows over which `vmap` names the axis."""
    graph, state = nnx.split(_Small())
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    values = [np.asarray(leaf[...]) for _, leaf in nnx.to_flat_state(state)]
    layouts = [strategy.spec(Layout.replicated(jax.ShapeDtypeStruct(x.shape, x.dtype)), AXIS, ranks) for x in values]
    tx, kept = optax.sgd(RATE, momentum=0.9), bool(stateful(placement))
    own = [_state_of(strategy).init_state(jnp.asarray(x)) for x in values]

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
    """The mean loss, its gradients (the sums of what ranks send, over the weight), and the residual of each rank."""
    dim, weight = int(strategy.role.splits((AXIS,))[AXIS] == "positions"), batch["y"].size
    parts = [{name: np.split(x, ranks, dim)[rank] for name, x in batch.items()} for rank in range(ranks)]
    totals, of_ranks = zip(*(jax.value_and_grad(total)(read, part) for part in parts), strict=True)
    same = zip(zip(*of_ranks, strict=True), left, layouts, strict=True)
    made = [_summed(strategy, jnp.stack(grads) + own, layout, ranks) for grads, own, layout in same]
    sums, lacks = zip(*made, strict=True)
    fed = [own if feeds_back(strategy) else 0 * own for own in lacks]
    return sum(totals) / weight, [each / weight for each in sums], fed


def _state_of(strategy: AbstractStrategy) -> Stateful:
    """The strategy's `Stateful` methods; the defaults, which keep nothing, if it has none."""
    return strategy.having(Stateful) or Stateful()


def _sums_of(strategy: AbstractStrategy) -> Lossy:
    """The strategy's `Lossy` methods; the defaults, which round nothing, if it has none."""
    return strategy.having(Lossy) or Lossy()


def _mapped(strategy: AbstractStrategy, ranks: int, layout: Layout, what: str, *rows: Any) -> Any:
    """Apply a method of the strategy to every rank's rows."""

    def read(shard: Any, own: Any) -> Any:
        return strategy.round_trip(_state_of(strategy).to_read(shard, own, layout, AXIS), layout, AXIS)

    def after(shard: Any, own: Any, before: Any) -> Any:
        return _state_of(strategy).after_update(shard, own, layout, AXIS, before=before)

    return jax.vmap(read if what == "read" else after, axis_name=AXIS, axis_size=ranks)(*rows)


def _summed(strategy: AbstractStrategy, grads: jax.Array, layout: Layout, ranks: int) -> tuple[jax.Array, jax.Array]:
    """The sum of the gradients that ranks send, [ranks, ...], and the residual of each."""
    trip = jax.vmap(lambda part: _sums_of(strategy).sum_round_trip(part, layout, AXIS))
    sent = jnp.stack([_joined(trip(_split(grad, layout, ranks)), layout) for grad in grads])
    return sent.sum(0), grads - sent


def _split(tree: Any, layout: Layout, ranks: int) -> Any:
    """Split arrays into rows of the ranks' shards; arrays of another shape than the leaf's are repeated."""

    def split(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        dim = layout.dim_of(AXIS)
        if x.shape != layout.shape or dim is None:
            return jnp.broadcast_to(x, (ranks, *x.shape))
        return jnp.stack(jnp.split(to_stored(x, layout), ranks, axis=dim))

    return jax.tree.map(split, tree)


def _joined(rows: jax.Array, layout: Layout) -> jax.Array:
    """Concatenate one leaf's shards: the inverse of `_split`."""
    dim = layout.dim_of(AXIS)
    return rows[0] if dim is None else from_stored(jnp.concatenate(list(rows), axis=dim), layout)


# --------------------------------------------------------------------------------------------------
# `check_strategy`: what a plan relies on in a strategy, ours or yours: a value, a law, flows, a training run.
# --------------------------------------------------------------------------------------------------

SHAPES = ((), (1,), (5,), (7, 3), (2, 3, 5), (8, 6), (0, 4))
"""Shapes of the leaves that are tried: a scalar, sizes that divide and that do not, an empty one."""


def check_strategy(strategy: AbstractStrategy, *, ranks: int = 3, tolerance: float = FLOAT64) -> None:
    """Check a strategy on a simulated mesh: that it is a value, its law, its declared traffic, and a training run.

    The law: what `gather` gives is the parameter (of a lossy strategy: of every shard its `round_trip`), the same on every
    rank, and `sync` is the transpose of gathering: it sums (of a lossy strategy every part's `sum_round_trip`). Both are tried
    leaf by leaf and as a bucket, with `check_vma` on and off, on scalars, sizes that do not divide and empty arrays.
    `gather_flows` and `sync_flows` are compared with the
    collectives of the traced programs. Then a small model, which works on every position alone, trains three steps under
    `Plan(axes={"checked": strategy})` and is compared with one device (with the round trip, for a lossy strategy); what
    `inside` gives is entered around its code.

    Args:
      strategy: of any role but one that leaves parameters to layers or never reduces.
      ranks: R, of the axis; so many devices are needed (`ax.fake_devices`).
      tolerance: relative to the largest value, for float64; a strategy that reduces in a lower precision needs more.

    Raises:
      AssertionError: naming what does not hold, and for which leaf.
      ValueError: when there are fewer than R devices, for a role that cannot be checked alone, or for one with `rounds`.

    Example::

        ax.fake_devices(4)
        ax.testing.check_strategy(ax.Shard(stage=2), ranks=4)
    """
    if len(jax.devices()) < ranks:
        raise ValueError(
            f"{ranks} ranks need as many devices, but there are {len(jax.devices())}: ax.fake_devices({ranks})"
        )
    _check_value(strategy)
    if strategy.role.parameters == "layers" or strategy.role.reduces == "never" or strategy.role.batch is None:
        raise ValueError(f"{strategy.role}: only what splits the batch and reduces its gradients can be checked alone")
    if strategy.having(LocalRounds):
        raise ValueError(
            f"{strategy!r} trains replicas, which no run on one device equals: it has nothing to be compared with"
        )
    with jax.enable_x64(True):
        for check_vma in (True, False):
            for bucketed in (False, True):
                _Law(strategy, ranks, check_vma, bucketed, tolerance).hold()
        assert_trains_like_one_device(strategy, ranks, tolerance)


def _check_value(strategy: Any) -> None:
    assert isinstance(strategy, AbstractStrategy), f"{strategy!r} is no ax.AbstractStrategy"
    assert isinstance(strategy.role, Role), f"role={strategy.role!r} must be an ax.Role"
    assert is_dataclass(strategy) and type(strategy).__hash__, (
        f"{type(strategy).__name__} must be a frozen dataclass: plans are compared and hashed"
    )
    again = type(strategy)(**{field.name: getattr(strategy, field.name) for field in fields(strategy) if field.init})
    assert again == strategy and hash(again) == hash(strategy), f"{strategy!r} is not equal to another one made alike"


@dataclass(frozen=True)
class _Law:
    """One case of the law that `sync` is the transpose of `gather`, and sums."""

    strategy: AbstractStrategy
    ranks: int
    check_vma: bool
    bucketed: bool
    tolerance: float

    def hold(self) -> None:
        layouts = [self.strategy.spec(_whole(shape), AXIS, self.ranks) for shape in SHAPES]
        random = np.random.default_rng(3)
        wholes = [random.normal(size=layout.shape) for layout in layouts]
        stored = [np.asarray(to_stored(x, layout)) for x, layout in zip(wholes, layouts, strict=True)]
        cotangents = [random.normal(size=(self.ranks, *layout.shape)) for layout in layouts]
        given = self._place(stored, layouts), self._place(cotangents, [PartitionSpec(AXIS)] * len(layouts))
        read, synced = self._programs(layouts)
        values, sums = jax.device_get((jax.jit(read)(given[0]), jax.jit(synced)(given[1])))
        for i, layout in enumerate(layouts):
            seen = self._seen(stored[i], layout)
            for rank in range(self.ranks):
                self._same(values[i][rank], seen, f"what rank {rank} reads of a leaf", layout)
            total = self._summed(cotangents[i], layout)
            self._same(sums[i], total, "sync, which must sum what gather's transpose sums,", layout)
        self._hold_flows(layouts, given, read, synced)

    def _programs(self, layouts: Sequence[Layout]) -> tuple[Any, Any]:
        strategy, specs = self.strategy, [layout.spec for layout in layouts]
        each = [PartitionSpec(AXIS)] * len(layouts)

        def read(shards: list) -> list:
            if self.bucketed:
                wholes = gather_bucket(strategy, shards, layouts, AXIS)
            else:
                wholes = [strategy.gather(x, layout, AXIS) for x, layout in zip(shards, layouts, strict=True)]
            return [whole[None] for whole in wholes]

        def synced(cotangents: list) -> list:
            own = [ct[0] for ct in cotangents]
            if self.bucketed:
                return list(sync_bucket(strategy, own, layouts, AXIS))
            return [strategy.sync(x, layout, AXIS) for x, layout in zip(own, layouts, strict=True)]

        options = {"mesh": _mesh(self.ranks), "check_vma": self.check_vma}
        return (
            jax.shard_map(read, in_specs=(specs,), out_specs=each, **options),
            jax.shard_map(synced, in_specs=(each,), out_specs=specs, **options),
        )

    def _seen(self, stored: np.ndarray, layout: Layout) -> np.ndarray:
        """The array that every rank must read: the shards' round trips, concatenated, without padding."""
        dim = layout.dim_of(AXIS)
        shards = [stored] if dim is None else np.split(stored, self.ranks, axis=dim)
        there = [np.asarray(self.strategy.round_trip(jnp.asarray(shard), layout, AXIS)) for shard in shards]
        lossless = all(map(np.array_equal, shards, there))
        assert lossless or not reads_exactly(self.strategy), (
            f"round_trip changes a shard, so exact must be False, and reads_exactly ({layout})"
        )
        return there[0] if dim is None else np.asarray(from_stored(np.concatenate(there, axis=dim), layout))

    def _same(self, got: Any, wanted: np.ndarray, what: str, layout: Layout) -> None:
        how = f"{'in a bucket' if self.bucketed else 'alone'}, check_vma={self.check_vma}"
        assert got.shape == wanted.shape, f"{what} has shape {got.shape}, not {wanted.shape} ({layout}; {how})"
        apart = float(np.max(np.abs(got - wanted), initial=0.0))
        allowed = self.tolerance * max(1.0, float(np.max(np.abs(wanted), initial=0.0)))
        assert apart <= allowed, f"{what} is {apart:.3g} off, allowed {allowed:.3g} ({layout}; {how})"

    def _summed(self, cotangents: np.ndarray, layout: Layout) -> np.ndarray:
        """The expected sum of the ranks' gradients: the round trips of their parts, added."""
        dim, total = layout.dim_of(AXIS), np.zeros(layout.stored)
        for own in cotangents:
            stored = np.asarray(to_stored(own, layout))
            parts = [stored] if dim is None else np.split(stored, self.ranks, axis=dim)
            there = [
                np.asarray(_sums_of(self.strategy).sum_round_trip(jnp.asarray(part), layout, AXIS)) for part in parts
            ]
            lossless = all(map(np.array_equal, parts, there))
            assert lossless or not self.strategy.exact, (
                f"sum_round_trip changes a part, so exact must be False ({layout})"
            )
            total = total + (there[0] if dim is None else np.concatenate(there, axis=dim))
        return total

    def _hold_flows(self, layouts: Sequence[Layout], given: tuple, read: Any, synced: Any) -> None:
        strategy, dtype = self.strategy, np.dtype("float64")
        sizes = [(math.prod(layout.shard), math.prod(layout.shape)) for layout in layouts]
        gathered = [
            sent
            for (shard, _), layout in zip(sizes, layouts, strict=True)
            for sent in strategy.gather_flows(shard, layout, AXIS, self.ranks, dtype)
        ]
        reduced = [
            sent
            for (shard, whole), layout in zip(sizes, layouts, strict=True)
            for sent in strategy.sync_flows(
                whole if layout.dim_of(AXIS) is None else shard * self.ranks, layout, AXIS, self.ranks, dtype
            )
        ]
        for name, said, program, arguments in (
            ("gather_flows", gathered, read, given[0]),
            ("sync_flows", reduced, synced, given[1]),
        ):
            counted = _by_kind(_counted(program, arguments))
            expected = _by_kind((sent.kind, np.dtype(sent.dtype).name, sent.elements, sent.ranks) for sent in said)
            assert counted == expected, (
                f"{name} says that {strategy!r} sends {expected} (elements by kind, dtype and ranks), the traced program "
                f"sends {counted} ({'in a bucket' if self.bucketed else 'leaf by leaf'}, check_vma={self.check_vma})"
            )

        self._hold_arrays(layouts[-2])

    def _hold_arrays(self, layout: Layout) -> None:
        """Check that flows accept an array of sizes, as the planner asks."""
        strategy, sizes = self.strategy, [self.ranks * math.prod(layout.shard) * k for k in (1, 2)]
        for flows in (strategy.gather_flows, strategy.sync_flows):
            ask = lambda elements, flows=flows: flows(elements, layout, AXIS, self.ranks, np.dtype("float64"))
            alone = [ask(size) for size in sizes]
            try:
                together = ask(np.array(sizes))
            except (TypeError, ValueError) as error:
                raise AssertionError(
                    f"{flows.__name__} of {strategy!r} cannot be asked for many sizes at once"
                ) from error
            said = [list(np.broadcast_to(sent.elements, len(sizes))) for sent in together]
            wanted = [[sent.elements for sent in same] for same in zip(*alone, strict=True)]
            assert said == wanted, (
                f"{flows.__name__} of {strategy!r} says {said} elements when asked for an array of sizes, {wanted} when asked "
                "for one at a time: use arithmetic that takes both"
            )

    def _place(self, values: Sequence[np.ndarray], layouts: Sequence[Any]) -> list[jax.Array]:
        mesh = _mesh(self.ranks)
        specs = [layout.spec if isinstance(layout, Layout) else layout for layout in layouts]
        return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(values, specs, strict=True)]


AXIS = "checked"


def _counted(program: Any, arguments: Any) -> Iterator[tuple[str, str, int, int]]:
    for each in collectives_in(program, arguments):
        yield each.kind, each.dtype, each.elements * each.executions, each.group_size


def _by_kind(sent: Any) -> dict[tuple[str, str, int], int]:
    """Sum the elements by kind, dtype and ranks; entries without elements are left out."""
    found: dict[tuple[str, str, int], int] = {}
    for kind, dtype, elements, ranks in sent:
        if elements:
            found[kind, dtype, ranks] = found.get((kind, dtype, ranks), 0) + elements
    return found


def _whole(shape: tuple[int, ...]) -> Layout:
    return Layout.replicated(jax.ShapeDtypeStruct(shape, np.float64))


def _mesh(ranks: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), (AXIS,), axis_types=(AxisType.Auto,))
