"""Every strategy of `parallel/`: what it gathers is the parameter, and its `sync` is the vjp of its `gather`.

The vjp is taken of the whole program from stored arrays to what every rank reads, from outside of `shard_map`: JAX's own
transpose, which knows nothing of `sync`. NO_SYNC is no row: it never sums, and every rank trains a model of its own.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_laws import mesh, quickly_compiled

from axonml_jax.collectives.gradients import GradSyncStrategy
from axonml_jax.sharding.layout import Layout, to_stored
from axonml_jax.strategies.diloco import DiLoCo
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import Shard
from axonml_jax.strategies.strategy import AbstractStrategy, InLayers, gather_bucket, sync_bucket

TOLERANCE = 1e-9
# shape, and the dim that a layer splits over `tensor`. Few of the sizes divide.
LEAVES = [((), None), ((1,), None), ((5,), None), ((7, 3), None), ((2, 3, 5), None), ((8, 6), 0), ((3, 10), 1)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy on an axis; `split`: leaves that its layers split over that axis; `read_alike`: all ranks use one value."""

    strategy: AbstractStrategy
    axis: str = "fsdp"
    split: bool = False
    read_alike: bool = False


CASES = {
    **{
        f"replicate {way.value} {'flat' if flat else 'side by side'}": Case(
            Replicate(sync_strategy=way, gradient_as_bucket_view=not flat), "data"
        )
        for way, flat in (
            (GradSyncStrategy.OVERLAPPED, False),
            (GradSyncStrategy.OVERLAPPED, True),
            (GradSyncStrategy.SYNCHRONOUS, False),
        )
    },
    **{
        f"shard stage {stage} {'flat' if flat else 'side by side'}": Case(Shard(stage=stage, flat=flat))
        for stage, flat in ((1, False), (2, False), (3, False), (3, True))
    },
    "shard in two hops": Case(Shard(gather_hop=2, scatter_hop=2)),
    "shard in unlike hops": Case(Shard(gather_hop=2, scatter_hop=1, flat=True)),
    "diloco": Case(DiLoCo(every=2), "data"),
    "layers, split batch": Case(InLayers("rows"), "depth"),
    "layers, split leaf and batch": Case(InLayers("rows"), "depth", split=True, read_alike=True),
    "layers, split leaf": Case(InLayers(), "row", split=True, read_alike=True),
    "layers, whole leaf": Case(InLayers(), "row", read_alike=True),
}
RANKS = {name: 4 if "hops" in name else 3 for name in CASES}


def layouts_of(case, ranks):
    """Of every leaf: its layout before the strategy, its layout under it, and the spec of what all ranks read."""
    for shape, dim in LEAVES:
        before = Layout.replicated(jax.ShapeDtypeStruct(shape, np.float64))
        before = before if dim is None else before.on("tensor", dim, 2)
        if case.split:
            before = before.on(case.axis, 0, ranks)
        layout = case.strategy.spec(before, case.axis, ranks)
        yield layout, layout.spec if case.read_alike else PartitionSpec(case.axis, *before.spec)


def programs(case, ranks, bucketed, check_vma):
    """(stored arrays -> what the ranks read), (cotangents of that -> `sync` of each rank's own), on global arrays."""
    layouts, read_specs = zip(*layouts_of(case, ranks), strict=True)
    stored_specs = tuple(layout.spec for layout in layouts)
    strategy = case.strategy
    one_by_one = lambda run: (
        lambda leaves, layouts, axis: [run(x, layout, axis) for x, layout in zip(leaves, layouts, strict=True)]
    )
    gather, sync = (
        (functools.partial(gather_bucket, strategy), functools.partial(sync_bucket, strategy))
        if bucketed
        else (one_by_one(strategy.gather), one_by_one(strategy.sync))
    )

    def read(shards):
        wholes = gather(shards, layouts, case.axis)
        return tuple(wholes) if case.read_alike else tuple(whole[None] for whole in wholes)

    def synced(cotangents):
        own = cotangents if case.read_alike else [ct[0] for ct in cotangents]
        return tuple(sync(own, layouts, case.axis))

    here = mesh((ranks, 2), (case.axis, "tensor"))
    mapped = functools.partial(jax.shard_map, mesh=here, check_vma=check_vma)
    place = lambda values, specs: jax.device_put(values, tuple(NamedSharding(here, spec) for spec in specs))
    return (
        mapped(read, in_specs=(stored_specs,), out_specs=read_specs),
        mapped(synced, in_specs=(read_specs,), out_specs=stored_specs),
        lambda values: place(values, stored_specs),
        lambda values: place(values, read_specs),
    )


def assert_law(case, ranks, bucketed, check_vma):
    read, synced, place_stored, place_read = programs(case, ranks, bucketed, check_vma)
    random, layouts = np.random.default_rng(3), [layout for layout, _ in layouts_of(case, ranks)]
    wholes = [random.normal(size=layout.shape) for layout in layouts]
    stored = tuple(np.asarray(to_stored(x, layout)) for x, layout in zip(wholes, layouts, strict=True))
    shapes = [x.shape for x in jax.eval_shape(read, stored)]
    cotangents = tuple(random.normal(size=shape) for shape in shapes)

    def both(stored, cotangents):
        values, backward = jax.vjp(read, stored)
        return values, backward(cotangents)[0], synced(cotangents)

    arguments = place_stored(stored), place_read(cotangents)
    values, wanted, got = jax.device_get(quickly_compiled(both, *arguments)(*arguments))
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE)
    for i, (layout, whole) in enumerate(zip(layouts, wholes, strict=True)):
        expected = stored[i] if case.read_alike else np.broadcast_to(whole, (ranks, *whole.shape))
        same(values[i], expected, err_msg=f"what is gathered of {layout}")
        same(got[i], wanted[i], err_msg=f"sync of {layout}")
        if not case.read_alike:
            total = np.asarray(to_stored(cotangents[i].sum(0), layout))
            same(got[i], total, err_msg=f"the sum over the ranks of {layout}")


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("name", CASES)
def test_sync_is_the_vjp_of_gather_and_sums(name, check_vma, subtests):
    for bucketed in (True, False):
        with subtests.test("in a bucket" if bucketed else "one by one"):
            assert_law(CASES[name], RANKS[name], bucketed, check_vma)


def test_the_law_is_checked_for_every_strategy():
    ours = {each for each in AbstractStrategy.__subclasses__() if each.__module__.startswith("axonml_jax.")}
    assert {type(case.strategy) for case in CASES.values()} == ours
