"""Every collective with a gradient: its value and its backward are those of a dense function of all ranks' values."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import axonml_jax.collectives.collectives as exchange
import axonml_jax.collectives.collectives as gather
import axonml_jax.collectives.collectives as reduce
import axonml_jax.collectives.collectives as reduce_scatter
import axonml_jax.collectives.collectives as scatter
import axonml_jax.collectives.gradients as sync
from axonml_jax.collectives.primitives import ReduceOp
from axonml_jax.mesh.world import ProcessGroup

TOLERANCE = 1e-9
OPS = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.AVERAGE: lambda rows: rows.mean(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.min(0),
    ReduceOp.MAX: lambda rows: rows.max(0),
}


@dataclasses.dataclass(frozen=True)
class Law:
    """One collective: traced on a rank's value, dense on the n members' values [n, ...]; shape(n) of a value.

    Ranks outside the group keep their value, or get zeros.
    """

    traced: object
    dense: object
    shape: object = lambda n: (2, 3)
    outsiders_keep: bool = False


def _parts(rows, dim):
    """[n, n, ...]: the slices of every member's value along `dim`, by receiver, then sender."""
    return jnp.stack([jnp.stack(jnp.split(row, len(rows), dim)) for row in rows]).swapaxes(0, 1)


def _same(value, n):
    return jnp.stack([value] * n)


def _only(value, n, position):
    return jnp.stack([value if i == position else jnp.zeros_like(value) for i in range(n)])


def _shifted(rows, pairs):
    received = {target: source for source, target in pairs}
    return jnp.stack([rows[received[i]] if i in received else jnp.zeros_like(rows[0]) for i in range(len(rows))])


def _ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


def laws():
    table = {}
    for op, dense in OPS.items():
        for shape in ((2, 3), ()) if op in (ReduceOp.SUM, ReduceOp.PRODUCT) else ((2, 3),):
            table[f"all_reduce {op.value} {shape}"] = Law(
                functools.partial(reduce.all_reduce, op=op),
                lambda rows, dense=dense: _same(dense(rows), len(rows)),
                lambda n, shape=shape: shape,
                outsiders_keep=True,
            )
        for dim in (0, -1) if op in (ReduceOp.SUM, ReduceOp.MIN) else (0,):
            table[f"reduce_scatter {op.value} dim {dim}"] = Law(
                functools.partial(reduce_scatter.reduce_scatter, op=op, dim=dim),
                lambda rows, dense=dense, dim=dim: jnp.stack([dense(part) for part in _parts(rows, dim)]),
                lambda n, dim=dim: (2 * n, 3) if dim == 0 else (2, 3, n),
            )
    for dim in (0, -1):
        table[f"all_gather dim {dim}"] = Law(
            functools.partial(gather.all_gather, dim=dim),
            lambda rows, dim=dim: _same(jnp.concatenate(list(rows), dim), len(rows)),
        )
        table[f"scatter dim {dim}"] = Law(
            functools.partial(scatter.scatter, src=1, dim=dim),
            lambda rows, dim=dim: jnp.stack(jnp.split(rows[1], len(rows), dim)),
            lambda n: (n, n),
        )
    table["gather"] = Law(
        functools.partial(gather.gather, dst=1, dim=1),
        lambda rows: _only(jnp.concatenate(list(rows), 1), len(rows), 1),
    )
    table["all_gather scalar"] = Law(gather.all_gather, lambda rows: _same(rows, len(rows)), lambda n: ())
    table["broadcast"] = Law(
        functools.partial(scatter.broadcast, src=1), lambda rows: _same(rows[1], len(rows)), outsiders_keep=True
    )
    for split, concat in ((0, 0), (0, 1), (-1, -2)):
        table[f"all_to_all {split} {concat}"] = Law(
            functools.partial(exchange.all_to_all, split_dim=split, concat_dim=concat),
            lambda rows, split=split, concat=concat: jnp.stack(
                [jnp.concatenate(list(parts), concat) for parts in _parts(rows, split)]
            ),
            lambda n: (n, n),
        )
    for name, pairs in (("ring", _ring), ("one pair", lambda n: [(0, 1)])):
        table[f"send_recv {name}"] = Law(
            lambda x, group, pairs=pairs: exchange.send_recv(x, pairs(_size(group)), group),
            lambda rows, pairs=pairs: _shifted(rows, pairs(len(rows))),
            outsiders_keep=True,
        )
    table["sync_gradients"] = Law(
        lambda x, group: sync.sync_gradients({"w": x, "frozen": None}, group)["w"],
        lambda rows: _same(rows.mean(0), len(rows)),
        outsiders_keep=True,
    )
    return table


LAWS = laws()


def _size(group):
    return group.size if isinstance(group, ProcessGroup) else math.prod(_MESH.shape[a] for a in np.atleast_1d(group))


def mesh(shape, names):
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


_MESH = mesh((3, 2), ("data", "tensor"))
_LINE = mesh((6,), ("data",))
GROUPS = {
    "one axis of two": (_MESH, "data"),
    "two axes": (_MESH, ("data", "tensor")),
    "two axes, swapped": (_MESH, ["tensor", "data"]),
    "a group of the other axis": (_MESH, ProcessGroup(_MESH, ("tensor",))),
    "all ranks": (_LINE, ProcessGroup(_LINE)),
    "half of the ranks": (_LINE, ProcessGroup(_LINE, ranks=(1, 2, 5))),
    "a third of the ranks, reversed": (_LINE, ProcessGroup(_LINE, ranks=(4, 1))),
    "unequal: four of six": (_LINE, ProcessGroup(_LINE, ranks=(0, 2, 3, 5))),
    "all ranks in another order": (_LINE, ProcessGroup(_LINE, ranks=(3, 1, 0, 5, 4, 2))),
    "four of the six along two axes": (_MESH, ProcessGroup(_MESH, ("data", "tensor"), ranks=(5, 1, 2, 0))),
}


def lines(group):
    """Flat positions on the mesh, per group that the collective forms: one, or one for each place on the other axes."""
    if isinstance(group, ProcessGroup) and group.members:
        return [list(group.ranks)]
    here, axes = (group.mesh, group.axes) if isinstance(group, ProcessGroup) else (_MESH, tuple(np.atleast_1d(group)))
    if isinstance(group, ProcessGroup) and group.size == here.size:
        return [list(group.ranks)]
    names = here.axis_names
    grid = np.arange(here.size).reshape(here.devices.shape)
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return grid.transpose(order).reshape(-1, math.prod(here.shape[axis] for axis in axes)).tolist()


@functools.cache
def dense_programs(n):
    """{law: compiled (rows [n, ...], cotangents) -> (values, backward)}, shared by all groups of n ranks."""
    programs = {}
    for name, law in LAWS.items():

        def both(rows, cts, law=law):
            value, backward = jax.vjp(law.dense, rows)
            return value, backward(cts)[0]

        programs[name] = both
    return quickly_compiled(
        lambda rows, cts: {name: both(rows[name], cts[name]) for name, both in programs.items()},
        {name: np.zeros((n, *law.shape(n))) for name, law in LAWS.items()},
        {name: np.zeros((n, *out_shape(law, n))) for name, law in LAWS.items()},
    )


def out_shape(law, n):
    return jax.eval_shape(law.dense, np.zeros((n, *law.shape(n)))).shape[1:]


def quickly_compiled(fn, *args):
    """Programs that run once: half of the compile time saved."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn).lower(*args).compile(compiler_options=options)


@functools.cache
def dense_results(group_name):
    """{law: (value, backward)} stacked over all ranks of the mesh, by dense functions on each group's rows."""
    group = GROUPS[group_name][1]
    inputs, cotangents = arguments(group_name)
    results = {}
    for name, law in LAWS.items():
        kept = np.array(inputs[name]), np.array(cotangents[name])
        results[name] = kept if law.outsiders_keep else (np.zeros_like(kept[1]), np.zeros_like(kept[0]))
    for members in lines(group):
        rows, cts = jax.tree.map(lambda leaf, members=members: leaf[members], (inputs, cotangents))
        for name, both in jax.device_get(dense_programs(len(members))(rows, cts)).items():
            for whole, part in zip(results[name], both, strict=True):
                whole[members] = part
    return results


@functools.cache
def arguments(group_name):
    """Values of every rank of the mesh, and cotangents of the results.

    Values are small integers: MIN and MAX meet ties, products meet zeros and signs.
    """
    here, group = GROUPS[group_name]
    n = len(lines(group)[0])
    random = np.random.default_rng(7)
    inputs = {name: random.integers(-2, 3, (here.size, *law.shape(n))).astype(float) for name, law in LAWS.items()}
    return inputs, {name: random.normal(size=(here.size, *out_shape(law, n))) for name, law in LAWS.items()}


def in_a_checkpointed_scan(f):
    return lambda x: jax.lax.scan(jax.checkpoint(lambda carry, _: (carry, f(x))), None, length=2)[1][1]


def traced_results(group_name, check_vma, wrapper):
    """{law: (value, backward)} of all laws on one group, in one compiled program."""
    here, group = GROUPS[group_name]
    spec = PartitionSpec(here.axis_names)

    def per_rank(xs, cts):
        both = {}
        for name, law in LAWS.items():
            wrapped = wrapper(functools.partial(law.traced, group=group))
            value, backward = jax.vjp(wrapped, xs[name][0])
            both[name] = jax.tree.map(lambda a: a[None], (value, backward(cts[name][0])[0]))
        return both

    step = jax.shard_map(per_rank, mesh=here, in_specs=spec, out_specs=spec, check_vma=check_vma)
    placed = jax.device_put(arguments(group_name), NamedSharding(here, spec))
    return jax.device_get(quickly_compiled(step, *placed)(*placed))


def assert_laws_hold(group_name, check_vma, wrapper, subtests):
    results = traced_results(group_name, check_vma, wrapper)
    for name, expected in dense_results(group_name).items():
        with subtests.test(name):
            for what, mine, reference in zip(("value", "backward"), results[name], expected, strict=True):
                np.testing.assert_allclose(mine, reference, rtol=0, atol=TOLERANCE, err_msg=what)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("group_name", GROUPS)
def test_value_and_backward_equal_the_dense_reference(group_name, check_vma, subtests):
    assert_laws_hold(group_name, check_vma, lambda f: f, subtests)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("group_name", ["one axis of two", "unequal: four of six"])
def test_the_law_holds_in_a_checkpointed_scan(group_name, check_vma, subtests):
    assert_laws_hold(group_name, check_vma, in_a_checkpointed_scan, subtests)
