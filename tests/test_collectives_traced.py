"""Traced collectives: contexts and groups, dtypes, refusals, and what each puts into the program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import axonml_jax as ax
from axonml_jax.collectives.primitives import (
    axis_index,
    axis_size,
    gather_whole,
    max_over,
    min_over,
    scatter_sum,
    shift,
    sum_over,
)

MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
SPEC = PartitionSpec("data")


def mesh(n=4):
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def on_mesh(fn, *, check_vma=False, here=None):
    """`fn` on every rank's value; values and results are stacked by rank."""

    def per_rank(x):
        return jax.tree.map(lambda leaf: leaf[None], fn(x[0]))

    return jax.shard_map(per_rank, mesh=here or mesh(), in_specs=SPEC, out_specs=SPEC, check_vma=check_vma)


def jitted(fn, **options):
    return jax.jit(on_mesh(fn, **options))


def refused(error, match, fn, x=None):
    with pytest.raises(error, match=match):
        on_mesh(fn)(jnp.zeros((4, 5, 2)) if x is None else x)


GROUP = functools.partial(ax.ProcessGroup, axes=("data",))


@MODES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.int32, jnp.complex64, jnp.bool_])
def test_every_collective_keeps_the_dtype(dtype, check_vma, request):
    if dtype == jnp.float16:
        request.getfixturevalue("float16")

    def per_rank(x):
        moved = [
            ax.all_gather(x, "data"),
            ax.gather(x, "data", dst=2),
            ax.scatter(x, "data", src=1),
            ax.broadcast(x, "data", src=3),
            ax.all_to_all(x, "data"),
            ax.send_recv(x, [(0, 1)], "data"),
        ]
        ops = [ax.ReduceOp.MIN, ax.ReduceOp.MAX]
        ops = ops if dtype == jnp.bool_ else [ax.ReduceOp.SUM, ax.ReduceOp.PRODUCT, *ops]
        ops = ops[:2] if dtype == jnp.complex64 else ops
        return moved, [[ax.all_reduce(x, "data", op), ax.reduce_scatter(x, "data", op)] for op in ops]

    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 4, 2)), dtype)
    moved, reduced = jax.jit(on_mesh(per_rank, check_vma=check_vma))(x)
    assert {leaf.dtype for leaf in jax.tree.leaves((moved, reduced))} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(moved[3][0], x[3])
    if dtype == jnp.bool_:
        np.testing.assert_array_equal(reduced[0][0][1], x.all(0))
        np.testing.assert_array_equal(reduced[1][0][1], x.any(0))


@MODES
def test_broadcast_is_bit_identical_and_so_is_a_negative_zero(check_vma):
    for dtype, bits in ((jnp.float32, np.uint32), (jnp.bfloat16, np.uint16), (jnp.float64, np.uint64)):
        sent = jnp.tile(jnp.array([-0.0, jnp.nan, -jnp.inf, 1e-45, 3], dtype), (4, 1)).at[1:].set(1)
        got = np.asarray(jitted(lambda x: ax.broadcast(x, "data"), check_vma=check_vma)(sent))
        for row in got:
            np.testing.assert_array_equal(row.view(bits), np.asarray(sent[0]).view(bits))


@MODES
def test_groups_at_once_leave_the_other_ranks_value_alone(check_vma):
    even, odd = GROUP(mesh(), ranks=(0, 2)), GROUP(mesh(), ranks=(1, 3))
    x = jnp.arange(4.0) + 1
    first = jitted(lambda v: ax.all_reduce_sum(v, even), check_vma=check_vma)(x)
    assert first.tolist() == [4, 2, 4, 4]
    both = jitted(lambda v: ax.all_reduce_sum(ax.all_reduce_sum(v, even), odd), check_vma=check_vma)(x)
    assert both.tolist() == [4, 6, 4, 6]


@MODES
def test_an_outsiders_infinity_or_nan_never_leaks_into_the_group(check_vma):
    group = GROUP(mesh(), ranks=(0, 1, 2))
    x = jnp.array([1.0, 2.0, -3.0, jnp.nan])
    for op, expected in zip(ax.ReduceOp, (0, -6, -3, 2, 0), strict=True):
        got = jitted(lambda v, op=op: ax.all_reduce(v, group, op), check_vma=check_vma)(x)
        assert got[:3].tolist() == [expected] * 3 and np.isnan(got[3]), op


@MODES
def test_ranks_and_sizes_can_be_asked_for_inside(check_vma):
    group = GROUP(mesh(), ranks=(1, 3))

    def per_rank(x):
        assert ax.get_world_size("data") == 4 and ax.get_world_size(group) == 2
        return [ax.get_rank("data"), ax.get_rank(group), ax.is_main_process(group)]

    along, inside, main = jitted(per_rank, check_vma=check_vma)(jnp.zeros(4))
    assert along.tolist() == [0, 1, 2, 3]
    assert inside.tolist() == [-1, 0, -1, 1]
    assert main.tolist() == [False, True, False, False]


def test_barrier_costs_nothing_inside():
    assert on_mesh(lambda x: (ax.barrier("data"), x)[1])(jnp.arange(4)).tolist() == [0, 1, 2, 3]


def test_what_cannot_be_is_refused_by_name_with_the_remedy():
    refused(
        ValueError,
        r"reduce_scatter.*dim 0 of shape \(5, 2\).*4 ranks.*5 % 4 = 1.*pad it to 8",
        lambda x: ax.reduce_scatter_sum(x, "data"),
    )
    refused(ValueError, r"all_to_all.*\(5, 2\).*pad", lambda x: ax.all_to_all(x, "data"))
    refused(ValueError, r"scatter.*dim -3 of shape \(5, 2\).*-2..1", lambda x: ax.scatter(x, "data", dim=-3))
    refused(ValueError, r"reduce_scatter.*scalar", lambda x: ax.reduce_scatter_sum(x[0, 0], "data"))
    refused(ValueError, r"dst=4.*0..3", lambda x: ax.gather(x, "data", dst=4))
    refused(ValueError, r"target=9", lambda x: ax.send_recv(x, [(0, 9)], "data"))
    refused(ValueError, r"\[1\] is the target of more than one", lambda x: ax.send_recv(x, [(0, 1), (2, 1)], "data"))
    refused(TypeError, r"SUM of booleans.*MAX.*int32", lambda x: ax.all_reduce_sum(x > 0, "data"))
    refused(TypeError, r"PRODUCT of booleans", lambda x: ax.all_reduce_product(x > 0, "data"))
    refused(TypeError, r"AVERAGE of int32.*cast", lambda x: ax.reduce_scatter_mean(x.astype(jnp.int32), "data"))
    refused(TypeError, r"op is 'sum'.*ReduceOp.SUM", lambda x: ax.all_reduce(x, "data", "sum"))
    refused(
        TypeError,
        r"(?s)\['count'\]: int32.*\['flag'\]: bool.*buffers are no gradients",
        lambda x: ax.sync_gradients({"w": x, "count": jnp.int32(1), "flag": x > 0}, "data"),
    )


def test_send_and_recv_and_objects_cannot_be_traced_and_say_what_can():
    group = GROUP(mesh())
    refused(ValueError, r"send cannot be traced.*send_recv", lambda x: ax.send(x, 1, group))
    refused(ValueError, r"recv cannot be traced.*send_recv", lambda x: ax.recv(0, "data", like=x))
    refused(ValueError, r"all_gather_object cannot be traced", lambda x: ax.all_gather_object(1, group))
    refused(ValueError, r"join cannot be traced", lambda x: ax.join(group, like=x))


def test_traced_code_without_the_groups_axes_is_refused_with_the_remedy():
    group = GROUP(mesh())
    with pytest.raises(ValueError, match=r"all_reduce.*not bound.*spmd"):
        jax.jit(lambda x: ax.all_reduce_sum(x, group))(jnp.ones(3))
    with pytest.raises(ValueError, match=r"'data'.*shard_map.*ProcessGroup"):
        ax.all_reduce_sum(jnp.ones(3), "data")
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    refused(ValueError, "not bound", lambda x: ax.all_reduce_sum(x, ax.ProcessGroup(other, ("tensor",))))
    with pytest.raises(ValueError, match="not bound"):
        on_mesh(lambda x: ax.all_reduce_sum(jnp.ones(3), ax.ProcessGroup(other, ("tensor",))))(jnp.ones(4))


@MODES
def test_the_gradient_of_a_replicated_loss_counts_once_per_rank_in_both_modes(check_vma):
    """Without a varying type the loss would count once with check_vma on, and once per rank with it off."""
    grad = jitted(jax.grad(lambda x: ax.all_reduce_sum(x**2, "data")), check_vma=check_vma)
    assert grad(jnp.arange(4.0)).tolist() == [0, 8, 16, 24]


@MODES
def test_forward_mode_and_second_derivatives_work_too(check_vma):
    def loss(x):
        return ax.all_reduce_max(x**3, "data") * ax.all_reduce_mean(x, "data")

    def per_rank(x):
        return [jax.jvp(loss, (x,), (x,))[1], jax.grad(jax.grad(loss))(x)]

    forward, second = jitted(per_rank, check_vma=check_vma)(jnp.array([1.0, 2.0, 0.0, -1.0]))
    # 8 * 0.5 with both factors' tangents: 24 * 0.5 + 8 * 0.5; every rank's loss counts.
    np.testing.assert_allclose(forward, [16.0] * 4)
    # Of the sum over ranks of the first derivatives 4 (3 x1^2 mean [x1] + max / 4), x1 = 2 being the maximum's x.
    np.testing.assert_allclose(second, [12, 84, 12, 12])


def primitives(fn, x, *, check_vma=False, here=None):
    """Communicating primitives of the traced program, in order."""
    (body,) = jax.make_jaxpr(on_mesh(fn, check_vma=check_vma, here=here))(x).eqns
    kinds = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
    return [eqn for eqn in nested(body.params["jaxpr"]) if eqn.primitive.name in kinds]


def nested(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from nested(inner)


def inner_jaxprs(eqn):
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


@pytest.mark.parametrize(
    ("fn", "kinds"),
    {
        "sum": (lambda x: ax.all_reduce_sum(x, "data"), ["psum"]),
        "mean": (lambda x: ax.all_reduce_mean(x, "data"), ["psum"]),
        "max": (lambda x: ax.all_reduce_max(x, "data"), ["pmax"]),
        "product": (lambda x: ax.all_reduce_product(x, "data"), ["all_to_all", "all_gather"]),
        "reduce_scatter": (lambda x: ax.reduce_scatter_sum(x, "data"), ["reduce_scatter"]),
        "reduce_scatter max": (lambda x: ax.reduce_scatter(x, "data", ax.ReduceOp.MAX), ["all_to_all"]),
        "all_gather": (lambda x: ax.all_gather(x, "data"), ["all_gather"]),
        "gather": (lambda x: ax.gather(x, "data"), ["all_gather"]),
        "scatter": (lambda x: ax.scatter(x, "data"), ["reduce_scatter"]),
        "broadcast": (lambda x: ax.broadcast(x, "data"), ["psum"]),
        "all_to_all": (lambda x: ax.all_to_all(x, "data"), ["all_to_all"]),
        "send_recv": (lambda x: ax.send_recv(x, [(0, 1)], "data"), ["ppermute"]),
        "sync_gradients": (lambda x: ax.sync_gradients([x, x], "data")[1], ["psum", "psum"]),
    }.values(),
)
def test_a_collective_communicates_what_its_docstring_says(fn, kinds):
    assert [eqn.primitive.name for eqn in primitives(fn, jnp.zeros((4, 8)))] == kinds


def test_only_the_group_communicates_where_jax_can_express_it():
    group = GROUP(mesh(), ranks=(1, 3))
    for fn in (ax.all_reduce_sum, ax.all_reduce_max, ax.all_gather, ax.reduce_scatter_sum, ax.all_to_all):
        for eqn in primitives(lambda x, fn=fn: fn(x, group), jnp.zeros((4, 8))):
            assert [list(ranks) for ranks in eqn.params["axis_index_groups"]] == [[1, 3], [0, 2]]


def test_product_moves_what_a_ring_all_reduce_moves():
    exchange, gather = primitives(lambda x: ax.all_reduce_product(x, "data"), jnp.zeros((4, 10)))
    assert exchange.invars[0].aval.size == 12 and gather.outvars[0].aval.size == 12  # 10 padded to a multiple of 4


@MODES
def test_primitives_are_the_same_in_both_modes_and_follow_the_axes_as_given(check_vma):
    here = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("data", "tensor"))
    spec = PartitionSpec(("data", "tensor"))
    axes = ("tensor", "data")

    def per_rank(x):
        assert axis_size(axes) == 6 and axis_size("data") == 3
        whole = gather_whole(x, axes, -1, invarying=False)
        parts = [axis_index(axes)[None], scatter_sum(whole, axes, 0), shift(x + 1, axes, [(5, 0), (0, 1)])]
        same = [sum_over(x, axes), max_over(x, axes), min_over(x, axes), gather_whole(x, axes, 0, invarying=True)]
        return parts, [whole[0][None], *same]

    run = jax.shard_map(
        per_rank, mesh=here, in_specs=spec, out_specs=([spec] * 3, [spec] + [PartitionSpec()] * 4), check_vma=check_vma
    )
    x = jnp.arange(6.0)
    (index, scattered, shifted), (whole, total, most, least, joined) = jax.jit(run)(x)
    order = [0, 2, 4, 1, 3, 5]  # mesh positions, the tensor axis slowest
    assert index.tolist() == [order.index(i) for i in range(6)]
    assert joined.tolist() == x[jnp.array(order)].tolist()
    assert (total.item(), most.item(), least.item()) == (15, 5, 0)
    assert whole.tolist() == [0] * 6
    assert [scattered[order[i]].item() for i in range(6)] == [6 * order[i] for i in range(6)]
    assert shifted.tolist() == [6, 0, 1, 0, 0, 0]  # order[5] to order[0], order[0] to order[1]


@MODES
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "int32"])
def test_extremes_are_numpys_with_nan_infinities_and_zeros_of_both_signs(check_vma, dtype):
    here = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec, inf, nan = PartitionSpec("data"), np.inf, np.nan
    rows = [
        [nan] * 4,
        [1, nan, 3, -1],
        [-nan, 1, 2, 3],
        [-inf, -1, -2, -0.0],
        [inf, 0, -0.0, 1],
        [-3, -2, -1, -5],
        [0] * 4,
    ]
    given = np.array([row for row in rows if dtype != "int32" or np.isfinite(row).all()]).T
    both = lambda x: (
        max_over(x, "data"),
        min_over(x, "data"),
        ax.all_reduce_max(x, "data"),
        ax.all_reduce_min(x, "data"),
    )
    out = (PartitionSpec(), PartitionSpec(), spec, spec)
    run = jax.jit(jax.shard_map(both, mesh=here, in_specs=spec, out_specs=out, check_vma=check_vma))
    for made, wanted in zip(run(jnp.asarray(given).astype(dtype)), (given.max(0), given.min(0)) * 2, strict=True):
        np.testing.assert_array_equal(np.asarray(made, np.float64), np.broadcast_to(wanted, made.shape))
        assert made.dtype == dtype


def test_a_primitive_refuses_what_does_not_divide():
    refused(ValueError, r"scatter_sum.*\(5, 2\).*pad", lambda x: scatter_sum(x, "data"))
