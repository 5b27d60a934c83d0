"""Axes and strategies of a user's own: each plan equals one device, and says what it does where it is wrong."""

import dataclasses
import math

import optax
import pytest
from meshes import plain_mesh_of
from plan_models import CASES
from predicted_steps import LLAMA, config
from ring_strategy import RingShard

import axonml_jax as ax
from axonml_jax.ledger import predict
from axonml_jax.testing.equality import assert_equals_single_device

PLANS = {
    "replicated over an own axis": ({"data": 2, "island": 2}, {"axes": {"island": ax.Replicate()}}),
    "sharded over an own axis": ({"island": 3}, {"axes": {"island": ax.Shard()}}),
    "an own axis outside data": ({"island": 2, "data": 2}, {"axes": {"island": ax.Shard(stage=2)}, "accumulate": 2}),
    "two axes gathered together": ({"data": 1, "fsdp": 2, "island": 2}, {"axes": {("fsdp", "island"): ax.Shard()}}),
    "two axes, ZeRO-1": ({"fsdp": 2, "island": 3}, {"axes": {("fsdp", "island"): ax.Shard(stage=1)}}),
    "two axes with remat": ({"fsdp": 2, "island": 2}, {"axes": {("fsdp", "island"): ax.Shard()}, "remat": "full"}),
    "independent models, each sharded": ({"data": 2, "fsdp": 2}, {"data": ax.Replicate(sync_strategy="no_sync")}),
    "sharded beside fsdp": ({"fsdp": 2, "island": 2}, {"axes": {"island": ax.Shard()}, "fsdp": ax.Replicate()}),
    "sharded over data": ({"data": 3}, {"data": ax.Shard()}),
    "a user's strategy": ({"fsdp": 3}, {"fsdp": RingShard()}),
    "a user's strategy, accumulated": ({"data": 2, "fsdp": 2}, {"fsdp": RingShard(prefetch=1), "accumulate": 2}),
    "a user's strategy on an own axis": ({"island": 2, "data": 2}, {"axes": {"island": RingShard()}}),
}


ROWS = [(name, check_vma, "dropout") for name in PLANS for check_vma in (True, False)]
ROWS += [(name, True, "linen_dropout") for name in list(PLANS)[::3]]


@pytest.mark.parametrize(("name", "check_vma", "kind"), ROWS)
def test_an_own_axis_equals_one_device(name, check_vma, kind):
    degrees, options = PLANS[name]
    case = CASES[kind]
    rows = 2 * math.prod(degrees.values()) * options.get("accumulate", 1)
    assert_equals_single_device(
        case.model(),
        case.loss,
        case.batch(rows),
        ax.Plan(**options, check_vma=check_vma and case.typed),
        mesh=plain_mesh_of(**degrees),
        params=case.params(),
        tx=optax.adamw(1e-2),
        steps=2,
    )


REFUSED = {
    "two strategies shard": (
        {"fsdp": 2, "island": 2},
        lambda: ax.Plan(axes={"island": ax.Shard()}),
        r"the axes fsdp, island each shard parameters.*axes=\{\('fsdp', 'island'\): \.\.\.\}",
    ),
    "a mesh without one of two": (
        {"fsdp": 2},
        lambda: ax.Plan(axes={("fsdp", "island"): ax.Shard()}),
        r"owns the axes \('fsdp', 'island'\) together, but the mesh \('fsdp',\) lacks \['island'\]",
    ),
    "an axis nobody knows": (
        {"data": 2, "island": 2},
        ax.Plan,
        r"axes \['island'\] are unknown.*ax.Plan\(axes=\{'island': ax.Replicate\(\)\}\)",
    ),
    "two strategies for one name": (
        {"fsdp": 2},
        lambda: ax.Plan(fsdp=ax.Shard(stage=1), axes={"fsdp": ax.Shard(stage=2)}),
        "are two strategies of one axis",
    ),
    "one name twice": (
        {"fsdp": 2},
        lambda: ax.Plan(axes={"island": ax.Shard(), ("island", "fsdp"): ax.Shard()}),
        "'island' has two strategies: give it one",
    ),
    "an axis of the layers": (
        {"data": 2},
        lambda: ax.Plan(axes={"tensor": ax.Shard()}),
        "'tensor' is split by the model's own",
    ),
    "no strategy": (
        {"data": 2},
        lambda: ax.Plan(axes={"island": 3}),
        "'island' has 3, which must be an ax.AbstractStrategy",
    ),
    "buckets that do not count": (
        {"data": 2, "island": 2},
        lambda: ax.Plan(axes={"island": ax.Replicate(bucket_size_mb=1)}),
        r"these settings of other strategies have no effect: \{'island'",
    ),
    "no mapping": ({"data": 2}, lambda: ax.Plan(axes=[ax.Shard()]), "must be a mapping of axis names"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_allocated(name):
    degrees, plan, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ax.parallelize(CASES["dropout"].model(), plain_mesh_of(**degrees), plan())


def test_a_plan_with_own_axes_is_a_value():
    plan = ax.Plan(axes={"fsdp": ax.Shard(stage=2), "island": ax.Replicate(), "far": ax.Replicate()})
    other = ax.Plan(fsdp=ax.Shard(stage=2), axes={"far": ax.Replicate(), "island": ax.Replicate()})
    assert plan == other and hash(plan) == hash(other)
    assert dict(plan.axes) == {"island": ax.Replicate(), "far": ax.Replicate()} and plan.fsdp == ax.Shard(stage=2)
    together = ax.Plan(axes={("fsdp", "island"): ax.Shard(stage=1)})
    assert together.fsdp == ax.Shard(stage=1) and list(together.strategies)[:3] == [
        "data",
        "context",
        ("fsdp", "island"),
    ]
    assert dataclasses.replace(together, accumulate=2).axes == together.axes
    assert list(ax.Plan(axes={"island": ax.Shard()}).on(("pipe", "island", "fsdp", "data"))) == [
        "data",
        "island",
        "fsdp",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": "columns"}, "batch='columns' must be one of"),
        ({"batch": None}, "share the batch have the same gradients"),
        ({"parameters": "layers"}, "give all three or none"),
        ({"reads": "use", "reduces": "microbatch"}, "parameters='sharded'"),
        ({"parameters": "sharded", "reads": "use"}, "is reduced after every microbatch"),
        ({"parameters": "sharded", "reduces": "never"}, "goes with parameters='whole'"),
    ],
)
def test_a_role_that_would_be_wrong_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ax.Role(**options)


@pytest.mark.parametrize("name", ["sharded over an own axis", "two axes gathered together", "sharded over data"])
def test_predictions_know_own_axes(name):
    """They hold and send what FSDP over as many ranks does."""
    degrees, options = PLANS[name]
    model, ranks = config(LLAMA), math.prod(degrees.values())
    given = {"global_batch": 2 * ranks, "length": 16}
    got = predict(ax.Plan(**options), model, degrees, **given)
    wanted = predict(ax.Plan(), model, {"data": 1, "fsdp": ranks}, **given)
    assert got.memory == wanted.memory and got.total_bytes == wanted.total_bytes and "ZeRO-3" in got.plan
