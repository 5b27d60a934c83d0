"""What every rank checks eagerly, one value per rank: the same table under `spawn` (threads) and in real processes.

Each case is `case(world)`, called on every rank at once; it raises when this rank sees something wrong.
"""

import jax
import jax.numpy as jnp
import numpy as np

import axonml_jax as ax
from axonml_jax.collectives.eager import JoinStopped

CASES = {}
REDUCTIONS = {
    ax.ReduceOp.SUM: np.sum,
    ax.ReduceOp.PRODUCT: np.prod,
    ax.ReduceOp.MIN: np.min,
    ax.ReduceOp.MAX: np.max,
    ax.ReduceOp.AVERAGE: np.mean,
}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def value(rank, shape=(2, 3), dtype=np.float32):
    """What a rank holds: small integers, negative ones and zeros among them, different on every rank."""
    return np.random.default_rng(rank).integers(-2, 3, shape).astype(dtype)


def rows(world, shape=(2, 3), dtype=np.float32):
    return np.stack([value(rank, shape, dtype) for rank in range(world.world_size)])


def equal(got, expected):
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def refused(error, words, call):
    """The message names every one of the words."""
    try:
        call()
    except error as caught:
        missing = [word for word in words if word not in str(caught)]
        assert not missing, f"{missing} not in: {caught}"
        return
    raise AssertionError(f"nothing was raised; expected {error.__name__} with {words}")


@case
def all_reduce_has_five_ops(world):
    group = world.default_group()
    for op, reference in REDUCTIONS.items():
        expected = reference(rows(world).astype(np.float64), axis=0).astype(np.float32)
        np.testing.assert_allclose(ax.all_reduce(value(world.rank), group, op), expected, rtol=1e-6)


@case
def all_reduce_keeps_every_dtype(world):
    group = world.default_group()
    for dtype in (jnp.bfloat16, np.int8, np.complex64):
        expected = rows(world, dtype=np.float64).sum(0).astype(dtype)
        equal(ax.all_reduce_sum(value(world.rank, dtype=np.float64).astype(dtype), group), expected)
    booleans = rows(world) > 0
    equal(ax.all_reduce_max(booleans[world.rank], group), booleans.any(0))
    equal(ax.all_reduce_min(booleans[world.rank], group), booleans.all(0))


@case
def products_are_products_of_negatives_and_zeros_of_any_rank(world):
    group = world.default_group()
    for shape in ((), (1, 5)):
        expected = rows(world, shape, np.int32).prod(axis=0, dtype=np.int32)
        equal(ax.all_reduce_product(value(world.rank, shape, np.int32), group), expected)


@case
def all_gather_concatenates_along_any_dim(world):
    group = world.default_group()
    for dim in (0, -1):
        shape = (2, 3, 2)
        equal(ax.all_gather(value(world.rank, shape), group, dim), np.concatenate(list(rows(world, shape)), dim))
    equal(ax.all_gather(value(world.rank, ()), group), rows(world, ()))


@case
def gather_and_scatter_have_any_root(world):
    group, n = world.default_group(), world.world_size
    for root in (0, n - 1):
        whole = np.concatenate(list(rows(world)), 1)
        expected = whole if world.rank == root else np.zeros_like(whole)
        equal(ax.gather(value(world.rank), group, dst=root, dim=1), expected)
        shape = (2, 3 * n)
        expected = np.split(value(root, shape), n, -1)[world.rank]
        equal(ax.scatter(value(world.rank, shape), group, src=root, dim=-1), expected)


@case
def broadcast_is_bit_identical_from_any_rank(world):
    group = world.default_group()
    for src in (0, world.world_size - 1):
        sent = np.array([-0.0, np.inf, -np.inf, np.nan, 1e-45, src], np.float32)
        got = np.asarray(ax.broadcast(sent if world.rank == src else np.zeros(6, np.float32), group, src))
        np.testing.assert_array_equal(got.view(np.uint32), sent.view(np.uint32))
    equal(ax.broadcast(np.array([world.rank == src]), group, src), np.array([True]))


@case
def reduce_scatter_keeps_the_own_slice(world):
    group, n = world.default_group(), world.world_size
    for op, dim in ((ax.ReduceOp.SUM, 0), (ax.ReduceOp.MAX, -1), (ax.ReduceOp.PRODUCT, 0)):
        shape = (2 * n, 3) if dim == 0 else (3, 2 * n)
        whole = REDUCTIONS[op](rows(world, shape, np.int32), axis=0).astype(np.int32)
        expected = np.split(whole, n, dim)[world.rank]
        equal(ax.reduce_scatter(value(world.rank, shape, np.int32), group, op, dim), expected)
    equal(
        ax.reduce_scatter_mean(value(world.rank, (n,)), group), rows(world, (n,)).mean(0)[world.rank : world.rank + 1]
    )


@case
def all_to_all_swaps_parts(world):
    group, n = world.default_group(), world.world_size
    parts = [np.split(row, n, 0)[world.rank] for row in rows(world, (n, 2))]
    equal(ax.all_to_all(value(world.rank, (n, 2)), group), np.concatenate(parts, 0))
    equal(ax.all_to_all(value(world.rank, (n, 2)), group, split_dim=0, concat_dim=1), np.concatenate(parts, 1))


@case
def send_recv_moves_along_pairs(world):
    group, n = world.default_group(), world.world_size
    ring = [(i, (i + 1) % n) for i in range(n)]
    equal(ax.send_recv(value(world.rank), ring, group), value((world.rank - 1) % n))
    got = ax.send_recv(value(world.rank), [(0, n - 1)], group)
    equal(got, value(0) if world.rank == n - 1 else np.zeros_like(value(0)))


@case
def send_and_recv_arrive_in_order(world):
    group, last = world.default_group(), world.world_size - 1
    if world.rank == 0:
        for i in range(3):
            ax.send(value(10 + i), last, group)
        equal(ax.recv(last, group, like=jax.ShapeDtypeStruct((4,), jnp.bfloat16)), jnp.ones((4,), jnp.bfloat16))
    elif world.rank == last:
        for i in range(3):
            equal(ax.recv(0, group, like=value(0)), value(10 + i))
        ax.send(jnp.ones((4,), jnp.bfloat16), 0, group)


@case
def recv_of_another_shape_is_an_error_on_both_sides(world):
    group, last = world.default_group(), world.world_size - 1
    if world.rank == 0:
        refused(ValueError, ["float32[2,3]", "float32[3]"], lambda: ax.send(value(0), last, group))
    elif world.rank == last:
        refused(ValueError, ["float32[2,3]", "float32[3]"], lambda: ax.recv(0, group, like=value(0, (3,))))


@case
def groups_of_even_and_odd_ranks_reduce_apart_and_at_once(world):
    mine = [rank for rank in range(world.world_size) if rank % 2 == world.rank % 2]
    group = world.new_group(mine)
    assert group.size == len(mine) and ax.get_rank(group) == mine.index(world.rank)
    assert ax.get_world_size(group) == len(mine) and ax.is_main_process(group) == (world.rank == mine[0])
    for _ in range(3):
        equal(ax.all_reduce_sum(value(world.rank), group), np.sum([value(rank) for rank in mine], 0))


@case
def unequal_groups_reduce_apart(world):
    mine = [0] if world.rank == 0 else list(range(1, world.world_size))
    group = world.new_group(mine)
    equal(ax.all_gather(value(world.rank), group), np.concatenate([value(rank) for rank in mine]))
    equal(ax.broadcast(value(world.rank), group, src=len(mine) - 1), value(mine[-1]))


@case
def a_rank_outside_the_group_is_refused(world):
    group = world.new_group([0])
    if world.rank:
        refused(ValueError, [f"rank {world.rank}"], lambda: ax.get_rank(group))
    if world.rank == 0:
        equal(ax.all_reduce_mean(value(0), group), value(0))


@case
def shapes_that_differ_are_an_error_on_every_rank(world):
    group = world.default_group()
    shape = (3,) if world.rank == 0 else (2,)
    words = ["float32[3]", "float32[2]", "pad"]
    refused(ValueError, words, lambda: ax.all_gather(value(world.rank, shape), group))
    equal(ax.all_reduce_sum(value(world.rank), group), rows(world).sum(0))


@case
def what_has_no_meaning_is_refused_with_the_remedy(world):
    group, n = world.default_group(), world.world_size
    uneven = value(world.rank, (n + 1, 2))
    for call in (ax.reduce_scatter, ax.scatter, ax.all_to_all):
        refused(
            ValueError, [call.__name__, f"({n + 1}, 2)", f"pad it to {2 * n}"], lambda call=call: call(uneven, group)
        )
        refused(ValueError, [call.__name__, "scalar"], lambda call=call: call(np.float32(1), group))
    refused(TypeError, ["booleans", "MAX", "int32"], lambda: ax.all_reduce_sum(uneven > 0, group))
    refused(TypeError, ["int32", "SUM", "cast"], lambda: ax.all_reduce_mean(uneven.astype(np.int32), group))
    refused(TypeError, ["complex64"], lambda: ax.all_reduce_max(uneven.astype(np.complex64), group))
    refused(ValueError, [f"src={n}", f"0..{n - 1}"], lambda: ax.broadcast(uneven, group, src=n))
    refused(ValueError, ["dim 2", "-2..1"], lambda: ax.all_gather(uneven, group, dim=2))
    refused(ValueError, ["source of more", "[0]"], lambda: ax.send_recv(uneven, [(0, 0), (0, 1)], group))


@case
def gradients_are_averaged_leaf_by_leaf_and_in_buckets(world):
    group = world.default_group()
    shapes = {"a": (3,), "b": (), "c": (2, 2), "d": (9,)}
    mine = {name: value(world.rank, shape) for name, shape in shapes.items()}
    expected = {name: rows(world, shape).mean(0) for name, shape in shapes.items()}
    synced = ax.sync_gradients({**mine, "frozen": None}, group)
    assert synced["frozen"] is None
    for name in shapes:
        equal(synced[name], expected[name])
    equal(ax.sync_gradient(mine["c"], group), expected["c"])
    for strategy in ax.GradSyncStrategy:
        synchronizer = ax.GradientSynchronizer(group, strategy, bucket_size=4)
        synchronizer.prepare(4)
        for index, name in reversed(list(enumerate(shapes))):
            synchronizer.add_gradient(index, mine[name])
        synchronizer.sync_all()
        for name, result in zip(shapes, synchronizer.results(), strict=True):
            equal(result, mine[name] if strategy is ax.GradSyncStrategy.NO_SYNC else expected[name])


@case
def objects_of_any_size_travel(world):
    group, n = world.default_group(), world.world_size
    objects = [{"rank": rank, "text": "x" * 10 ** min(rank, 4), "none": None} for rank in range(n)]
    assert ax.all_gather_object(objects[world.rank], group) == objects
    assert ax.broadcast_object(objects[world.rank], group, src=n - 1) == objects[n - 1]


@case
def ranks_with_fewer_batches_shadow_the_others(world):
    group, n = world.default_group(), world.world_size
    for by_world_size in (True, False):
        steps = 0
        with ax.join(group, like={"w": value(0)}, divide_by_initial_world_size=by_world_size) as joined:
            for step in range(world.rank):  # rank 0 has no batch at all
                synced = joined.sync_gradients({"w": value(world.rank)})["w"]
                active = [rank for rank in range(n) if rank > step]
                expected = np.sum([value(rank) for rank in active], 0) / (n if by_world_size else len(active))
                np.testing.assert_allclose(synced, expected, rtol=1e-6)
                steps += 1
        assert steps == world.rank
        equal(joined.final({"w": value(world.rank)})["w"], value(n - 1))


@case
def join_can_stop_every_rank_with_the_first(world):
    def train():
        with ax.join(world.default_group(), like=value(0), throw_on_early_termination=True) as joined:
            for _ in range(1 + world.rank):
                joined.sync_gradients(value(world.rank))

    refused(JoinStopped, [f"1 of {world.world_size} ranks"], train)


@case
def barrier_holds_until_all_have_come(world):
    for _ in range(3):
        ax.barrier(world.default_group())


@case
def spmd_runs_on_the_groups_devices(world):
    if world.num_processes > 1 and world.board is not None:
        return  # threads of one process: one of them alone writes all ranks as one program (test_collectives_spmd.py)
    group = world.default_group()
    total = ax.spmd(lambda x: ax.all_reduce_sum(x, group), group)(rows(world))
    (shard,) = total.addressable_shards
    equal(shard.data[0], rows(world).sum(0))
