"""Buckets: nothing dropped, full ones say so; the synchronizer's strategies, traced and in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import axonml_jax as ax
from axonml_jax.collectives.gradients import all_reduce_leaves, assign_buckets

STRATEGIES = list(ax.GradSyncStrategy)


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_every_leaf_is_in_one_bucket_in_order_and_only_lone_leaves_exceed_the_capacity(sizes, capacity):
    buckets = assign_buckets(sizes, capacity)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in bucket) for bucket in buckets]
    assert all(total <= capacity or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    for total, following in zip(totals, buckets[1:], strict=False):
        assert total + sizes[following[0]] > capacity


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_that_is_not_positive_is_refused(capacity):
    with pytest.raises(ValueError, match="positive"):
        assign_buckets([1], capacity)
    with pytest.raises(ValueError, match="positive"):
        ax.GradientBucket(capacity)


def test_a_bucket_says_when_it_is_full_and_drops_nothing():
    bucket = ax.GradientBucket(5)
    assert bucket.add(jnp.ones((2, 2))) and not bucket.full
    assert not bucket.add(jnp.ones(2)) and bucket.size == 4 and len(bucket) == 1
    assert bucket.add(jnp.float64(7)) and bucket.full
    assert [gradient.shape for gradient in bucket.extract()] == [(2, 2), ()]
    bucket.clear()
    assert bucket.size == 0 and bucket.capacity == 5 and bucket.add(jnp.ones(9)) and bucket.full


def test_a_bucket_travels_as_one_flat_array_per_dtype_and_comes_back_in_shape():
    bucket = ax.GradientBucket(100)
    given_ = [jnp.arange(4.0).reshape(2, 2), jnp.ones(3, jnp.bfloat16), jnp.float64(9)]
    assert all(bucket.add(gradient) for gradient in given_)
    flat = bucket.flat()
    assert [(array.shape, array.dtype) for array in flat] == [((5,), jnp.float64), ((3,), jnp.bfloat16)]
    for back, gradient in zip(bucket.extract([2 * array for array in flat]), given_, strict=True):
        np.testing.assert_array_equal(back, 2 * gradient)
    with pytest.raises(ValueError, match=r"\(5,\)"):
        bucket.extract([flat[0][:-1], flat[1]])


def test_a_synchronizer_refuses_what_would_desynchronize_ranks():
    synchronizer = ax.GradientSynchronizer("data")
    assert synchronizer.strategy is ax.GradSyncStrategy.SYNCHRONOUS and synchronizer.bucket_size == 25_000_000
    with pytest.raises(ValueError, match="not prepared"):
        synchronizer.add_gradient(0, jnp.ones(1))
    synchronizer.prepare(2)
    synchronizer.add_gradient(1, jnp.ones(1))
    with pytest.raises(ValueError, match="twice"):
        synchronizer.add_gradient(1, jnp.ones(1))
    with pytest.raises(ValueError, match=r"\[0\]"):
        synchronizer.sync_all()
    with pytest.raises(ValueError, match="after sync_all"):
        synchronizer.results()


def mesh():
    return Mesh(np.array(jax.devices()[:4]), ("data",))


def on_mesh(fn, *, check_vma=True):
    spec = PartitionSpec("data")
    return jax.shard_map(fn, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=check_vma)


SHAPES = [(3,), (), (9,), (2, 2), (1,)]


def synchronized(strategy, log=None):
    def per_rank(stacked):
        synchronizer = ax.GradientSynchronizer("data", strategy, bucket_size=4)
        synchronizer.prepare(len(SHAPES))
        for i in reversed(range(len(SHAPES))):
            synchronizer.add_gradient(i, stacked[i][0] * 3)
        synchronizer.sync_all()
        assert synchronizer.num_buckets == 4  # reversed sizes 1, 4, 9, 1, 3
        return [result[None] for result in synchronizer.results()]

    return per_rank


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_synchronizer_averages_inside_shard_map(strategy, check_vma):
    stacked = [np.random.default_rng(i).normal(size=(4, *shape)) for i, shape in enumerate(SHAPES)]
    results = jax.jit(on_mesh(synchronized(strategy), check_vma=check_vma))(stacked)
    for result, whole in zip(results, stacked, strict=True):
        whole = 3 * whole
        mean = np.broadcast_to(whole.mean(0), whole.shape)
        np.testing.assert_allclose(result, whole if strategy is ax.GradSyncStrategy.NO_SYNC else mean, atol=1e-12)


def steps_of(strategy):
    """The order of products (a gradient computed) and all-reduces in the traced program."""
    stacked = [np.zeros((4, *shape)) for shape in SHAPES]
    (body,) = jax.make_jaxpr(on_mesh(synchronized(strategy), check_vma=False))(stacked).eqns
    names = [eqn.primitive.name for eqn in body.params["jaxpr"].eqns]
    return [name for name in names if name in ("mul", "psum")]


def test_each_bucket_is_one_reduction_and_overlapped_ones_start_when_full():
    assert steps_of(ax.GradSyncStrategy.SYNCHRONOUS) == ["mul"] * 5 + ["psum"] * 4
    assert steps_of(ax.GradSyncStrategy.OVERLAPPED) == [
        *("mul", "mul", "psum", "psum"),  # 1; then 4 closes it and is full itself
        *("mul", "psum"),  # 9 is larger than a bucket
        *("mul", "mul", "psum"),  # 1 and 3 together are full
    ]
    assert steps_of(ax.GradSyncStrategy.NO_SYNC) == ["mul"] * 5


LEAVES = {
    "one dtype": [np.ones((2, 3)), np.arange(4.0), np.float64(2)],
    "mixed": [np.ones((2, 3), np.float32), np.arange(4), np.float64(2)],
    "one": [np.ones(5)],
    "none": [],
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"flat": False}, {"flat": True}, {"flat": False, "comm_hook": jax.lax.psum}],
    ids=["view", "flat", "hook"],
)
@pytest.mark.parametrize("name", LEAVES)
def test_leaves_are_summed_together(name, options, check_vma):
    leaves = LEAVES[name]

    def per_rank(index):
        scaled = [leaf * (1 + index[0]).astype(leaf.dtype) for leaf in leaves]
        return all_reduce_leaves(scaled, ("data",), **options)

    run = jax.shard_map(
        per_rank, mesh=mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=check_vma
    )
    results = jax.jit(run)(jnp.arange(4))
    assert [(r.shape, r.dtype) for r in results] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    for result, leaf in zip(results, leaves, strict=True):
        np.testing.assert_array_equal(result, 10 * leaf)


def reductions(fn, *args):
    (body,) = jax.make_jaxpr(on_mesh(fn, check_vma=False))(*args).eqns
    return [eqn.invars[0].aval for eqn in body.params["jaxpr"].eqns if eqn.primitive.name == "psum"]


def test_flat_leaves_are_one_reduction_per_dtype_in_the_wire_dtype():
    leaves = [np.zeros((4, 2)), np.zeros((4, 3)), np.zeros((4, 5), np.float32), np.zeros((4, 1), np.int32)]

    def shapes(**options):
        return [
            (aval.size, aval.dtype.name)
            for aval in reductions(lambda x: all_reduce_leaves(x, "data", **options), leaves)
        ]

    assert shapes(flat=True) == [(5, "float64"), (5, "float32"), (1, "int32")]
    assert shapes(flat=True, comm_dtype=jnp.bfloat16) == [(10, "bfloat16"), (1, "int32")]
    assert shapes(flat=False) == [(2, "float64"), (3, "float64"), (5, "float32"), (1, "int32")]


def test_leaves_that_vary_over_other_axes_are_not_joined():
    here = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    specs = [PartitionSpec("data"), PartitionSpec(("data", "tensor"))]

    def per_rank(leaves):
        return all_reduce_leaves(leaves, "data", flat=True)

    run = jax.shard_map(per_rank, mesh=here, in_specs=(specs,), out_specs=[PartitionSpec(), PartitionSpec("tensor")])
    replicated, sharded = jax.jit(run)([jnp.arange(4.0), jnp.arange(8.0)])
    np.testing.assert_array_equal(replicated, [2, 4])
    np.testing.assert_array_equal(sharded, [4, 6, 8, 10])


def test_a_hook_that_returns_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"comm_hook.*\(2,\).*\(3,\)"):
        reductions(
            lambda x: all_reduce_leaves([x[0]], "data", flat=True, comm_hook=lambda a, _: a[1:]), np.zeros((4, 3))
        )
    with pytest.raises(ValueError, match=r"comm_hook returned None for a flat bucket of shape \(3,\)"):
        reductions(
            lambda x: all_reduce_leaves([x[0]], "data", flat=True, comm_hook=lambda a, _: None), np.zeros((4, 3))
        )
