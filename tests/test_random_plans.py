"""Random plans and bad inputs: each equals the single-device run, or is refused by an error that names the offender.

20 of them in CI; AXONML_RANDOM_PLANS=200 runs the full campaign. What is drawn is the same in every run.
"""

import os
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from plan_models import F64, linear, mean_loss, regression, weighted_loss

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

COUNT = int(os.environ.get("AXONML_RANDOM_PLANS", "20"))
SETTINGS = dict(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # every example compiles: shrinking would take longer than reading the one that failed
    suppress_health_check=list(HealthCheck),
)


class Net(nnx.Module):
    """Small, with everything that a plan can get wrong: dropout, BatchNorm, a scalar, an unused and a tied parameter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer = linear(5, 3, rngs)
        self.norm = nnx.BatchNorm(3, param_dtype=F64, rngs=rngs)
        self.norm.mean, self.norm.var = nnx.BatchStat(np.zeros(3)), nnx.BatchStat(np.ones(3))
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.unused = nnx.Param(np.ones(2))

    def __call__(self, x):
        return self.dropout(self.norm(self.layer(x))) + self.layer(2 * x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(3, use_bias=False, param_dtype=F64)(
            x
        )  # a bias before BatchNorm has a gradient of rounding noise
        x = linen.BatchNorm(use_running_average=False, param_dtype=F64, force_float32_reductions=False)(x)
        return linen.Dropout(0.3, deterministic=False)(x)


LINEN = LinenNet()
VARIABLES = LINEN.init(jax.random.key(0), np.zeros((2, 5)))
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lamb": optax.lamb(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}

REPLICATE = {
    "sync_strategy": st.sampled_from(["overlapped", "synchronous", "no_sync"]),
    "bucket_size_mb": st.sampled_from([25.0, 0.00005, 1e-9, 1, float("inf")]),
    "gradient_as_bucket_view": st.sampled_from([None, True, False]),
    "comm_hook": st.sampled_from([None, None, ax.all_reduce_sum, jax.lax.psum]),
}
PLAN = {
    "accumulate": st.integers(1, 3),
    "batch_stats": st.sampled_from(["global", "local"]),
    "broadcast_buffers": st.booleans(),
    "check_vma": st.booleans(),
}
REST = {
    "ranks": st.sampled_from([1, 2, 2, 3, 8]),
    "rows": st.integers(
        3, 4
    ),  # BatchNorm makes of two rows the same outputs whatever its input: Adam would divide noise
    "linen": st.booleans(),
    "loss": st.sampled_from([mean_loss, weighted_loss]),
    "optimizer": st.sampled_from(list(OPTIMIZERS)),
    "max_grad_norm": st.sampled_from([None, 0.3]),
    "trainable": st.sampled_from([None, None, "kernel", "^(layer|Dense)"]),
}
FLAWS = {  # option: (values that cannot work, what the error must say)
    "sync_strategy": ([None, "async", 3], "sync_strategy="),
    "bucket_size_mb": ([0, -1.0, float("nan"), "25", None], "bucket_size_mb="),
    "gradient_as_bucket_view": (["no", 2], "gradient_as_bucket_view="),
    "comm_hook": ([3, "sum"], "comm_hook="),
    "comm_dtype": (["int32", "bfloat61", "bool", 7], "comm_dtype="),
    "accumulate": ([0, -2, 1.5, "2", None, True], "accumulate="),
    "batch_stats": (["Global", None, 1], "batch_stats="),
    "broadcast_buffers": (["yes", None], "broadcast_buffers="),
    "check_vma": (["off", None], "check_vma="),
    "precision": (["bf61", 16, ax.Plan], "precision"),
    "max_grad_norm": ([0, -0.5, float("nan"), "1"], "max_grad_norm="),
    "trainable": (["^nothing$", ["("], []], "trainable="),
    "extra_rows": ([1, -1], "does not split evenly"),
    "axis": (["tensor", "row"], "no strategy"),
    "stages": ([2], "but the plan has no pipe="),
    "degrees": ([{"data": 5}, {"tensor": 2}], "MeshShape"),
}
SEEN = Counter()


@st.composite
def cases(draw):
    """Options of a plan and a run, and what the refusal must say: nothing for options that work."""
    options = {name: draw(values) for name, values in (REPLICATE | PLAN | REST).items()}
    if options["comm_hook"] is not None:
        options["gradient_as_bucket_view"] = draw(st.sampled_from([None, False]))
    flaws = draw(st.sets(st.sampled_from(sorted(FLAWS)), min_size=1, max_size=2)) if draw(st.booleans()) else set()
    options |= {name: draw(st.sampled_from(FLAWS[name][0])) for name in sorted(flaws)}
    if "extra_rows" in flaws and options["ranks"] == 1:
        options["ranks"] = 2  # one rank takes any number of rows
    said = [FLAWS[name][1] for name in flaws]
    if options["comm_hook"] is ax.all_reduce_sum and options["check_vma"] and options["sync_strategy"] != "no_sync":
        said.append("comm_hook=")  # typed mode cannot tell that its result is the same on every rank
    return options, said


def train(options):
    """Hold these options to the single-device run."""
    ranks, taken = options["ranks"], {name: options[name] for name in (*REPLICATE, "comm_dtype") if name in options}
    more = {options["axis"]: 2} if "axis" in options else {}
    more |= {"pipe": options["stages"]} if "stages" in options else {}
    axes = {"data": 1, **more} if more else {"data": ranks}
    size = int(np.prod(list(axes.values())))
    mesh = ax.make_mesh(devices=jax.devices()[:size], **axes)
    plan = ax.Plan(
        data=ax.Replicate(**taken),
        mesh=ax.MeshShape(**options["degrees"]) if "degrees" in options else None,
        **{name: options[name] for name in (*PLAN, "precision") if name in options},
    )
    rows = options["rows"] * ranks * plan.accumulate + options.get("extra_rows", 0)
    model, params = (LINEN, VARIABLES) if options["linen"] else (Net(), None)
    keys = {name: options[name] for name in ("max_grad_norm", "trainable")}
    batches = [regression(rows, seed) for seed in range(2)]
    tx = OPTIMIZERS[options["optimizer"]]
    assert_equals_single_device(model, options["loss"], batches, plan, mesh=mesh, params=params, tx=tx, **keys)


@settings(max_examples=COUNT, **SETTINGS)
@given(cases())
def check_plans(case):
    options, said = case
    if not said:
        SEEN["equal to one device"] += 1
        train(options)
        return
    SEEN["refused"] += 1
    with pytest.raises(ValueError) as caught:
        train(options)
    assert any(text in str(caught.value) for text in said), f"none of {said} in: {caught.value}"


@pytest.mark.slow
def test_random_plans_equal_one_device_or_are_refused_by_name():
    check_plans()
    assert sum(SEEN.values()) >= COUNT and min(SEEN.values()) >= COUNT // 5, SEEN
    print(dict(SEEN))


@settings(max_examples=300, **SETTINGS)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, (values, _) in FLAWS.items()}))
def check_options(options):
    """Without devices: every wrong option of a plan is named, and all of one strategy's at once."""
    names = {f.name for f in ax.Replicate.__dataclass_fields__.values()} & set(options)
    if names:
        with pytest.raises(ValueError) as caught:
            ax.Replicate(**{name: options[name] for name in names})
        assert all(FLAWS[name][1] in str(caught.value) for name in names)
    names = (set(PLAN) | {"precision"}) & set(options)
    if names:
        with pytest.raises(ValueError) as caught:
            ax.Plan(**{name: options[name] for name in names})
        assert "precision" in names or all(FLAWS[name][1] in str(caught.value) for name in names)


def test_every_wrong_option_of_a_plan_is_named():
    check_options()
