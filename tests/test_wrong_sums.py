"""A gradient that is summed over an axis twice, or not at all, or too early, is an error while a step is traced."""

import optax
import pytest
from meshes import mesh_of
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.collectives.gradients import SumError
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units import _Run

SYNC, BUCKETS = Placement.sync, Placement.sync_buckets
DDP, HYBRID = {"data": ax.Replicate(sync_strategy="synchronous")}, {"fsdp": ax.Shard(), "data": ax.Replicate()}
PIPELINE = {"pipe": ax.Pipelined(num_microbatches=2), "fsdp": ax.Shard(), "data": ax.Replicate()}


def not_at_all(self, grads, layouts, axes=None):
    return list(grads)


def twice(self, grads, layouts, axes=None):
    return BUCKETS(self, BUCKETS(self, grads, layouts, axes), layouts, axes)


def as_the_loop_left_them(self, shards, axes, accumulated):
    return shards


def accumulated_last(self, grads, layouts, bucket, *, axes=None, accumulated=None):
    summed = SYNC(self, grads, layouts, bucket, axes=axes)
    return summed if accumulated is None else [a + b for a, b in zip(summed, accumulated, strict=True)]


def none_of_a_bucket(self, grads, layouts, bucket, *, axes=None, accumulated=None):
    return list(grads)


FAULTS = {
    "accumulated gradients are not summed": (
        {"data": 2},
        DDP,
        "tied",
        Placement,
        "sync_buckets",
        not_at_all,
        r"lacks sums over \['data'\], where .* none",
    ),
    "they are summed twice": ({"data": 2}, DDP, "tied", Placement, "sync_buckets", twice, "summed over 'data' already"),
    "the shards of a scanned block are not summed over replicas": (
        {"data": 2, "fsdp": 2},
        HYBRID,
        "scanned",
        _Run,
        "_finish",
        as_the_loop_left_them,
        r"lacks sums over \['data'\]",
    ),
    "what has accumulated is added behind the sum over replicas": (
        {"data": 2, "fsdp": 2},
        HYBRID,
        "scanned",
        Placement,
        "sync",
        accumulated_last,
        "lacks sums over none cannot be added",
    ),
    "a stage's gradients are not summed over its shards": (
        {"data": 2, "pipe": 2, "fsdp": 2},
        PIPELINE,
        "tied",
        Placement,
        "sync",
        none_of_a_bucket,
        r"lacks sums over .*'fsdp'",
    ),
}


def step_of(degrees, plan, name):
    case = CASES[name]
    accumulate = {} if "pipe" in plan else {"accumulate": 2}
    trainer = ax.parallelize(case.model(), mesh_of(**degrees), ax.Plan(**plan)).trainer(
        optax.sgd(0.1), case.loss, **accumulate
    )
    return lambda: trainer.trace(case.batch(8))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_sum_is_an_error_by_the_axis(fault, monkeypatch):
    degrees, plan, name, owner, method, wrong, message = FAULTS[fault]
    step_of(degrees, plan, name)()
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(SumError, match=message):
        step_of(degrees, plan, name)()
