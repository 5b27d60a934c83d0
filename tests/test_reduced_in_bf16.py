"""Gradients of bf16 models travel in two bytes an element under every kind of plan, and accumulate in float32 between."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fsdp_plans import mesh_of
from predicted_steps import LLAMA, config, step_of

import axonml_jax as ax
from axonml_jax.ledger.count import collectives_in

PIPE = ax.Pipelined(num_microbatches=4)
SCAN = {"scan_layers": True}
PLANS = {
    "DDP, overlapped": ({"data": 4}, {}, {}),
    "DDP, after the backward": ({"data": 4}, {"data": ax.Replicate(sync_strategy="synchronous")}, {}),
    "DDP, flat, accumulated": (
        {"data": 4},
        {"data": ax.Replicate(gradient_as_bucket_view=False), "accumulate": 2},
        {},
    ),
    "ZeRO-1, accumulated": ({"data": 1, "fsdp": 4}, {"fsdp": ax.Shard(stage=1), "accumulate": 2}, {}),
    "ZeRO-2, accumulated": ({"data": 1, "fsdp": 4}, {"fsdp": ax.Shard(stage=2), "accumulate": 2}, {}),
    "ZeRO-3": ({"data": 1, "fsdp": 4}, {}, {}),
    "ZeRO-3 of a scan, two hops": ({"data": 1, "fsdp": 4}, {"fsdp": ax.Shard(scatter_hop=2)}, SCAN),
    "hybrid, accumulated": ({"data": 2, "fsdp": 2}, {"accumulate": 2}, {}),
    "hybrid with context": ({"data": 2, "fsdp": 2, "context": 2}, {"context": ax.Context(method="ring")}, {}),
    "pipeline": ({"data": 2, "pipe": 2}, {"pipe": PIPE}, {}),
    "pipeline of sharded stages": ({"data": 1, "pipe": 2, "fsdp": 2}, {"pipe": PIPE}, {}),
    "pipeline that gathers in ticks": (
        {"data": 2, "pipe": 2, "fsdp": 2},
        {"pipe": replace(PIPE, gather="tick")},
        {},
    ),
}


def sent(name, precision):
    """Dtypes in which a step's gradients travel between ranks."""
    degrees, options, model = PLANS[name]
    step, *given = step_of(config(LLAMA, **model), ax.Plan(precision=precision, **options), degrees, 32)
    found = [each for each in collectives_in(step, *given) if each.label == "gradients" and each.group_size > 1]
    assert found
    return {each.dtype for each in found}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_travel_in_two_bytes_an_element_by_default_and_in_four_where_that_is_asked_for(name):
    assert sent(name, "bf16") == {"bfloat16"} and sent(name, "bf16-reduce-float32") == {"float32"}


class Factor(nnx.Module):
    def __init__(self):
        self.value = nnx.Param(jnp.ones((4, 8)))

    def __call__(self, x):
        return x * self.value[...]


class Chain(nnx.Module):
    """Two factors of one: the gradient of each is the sum of the rows."""

    def __init__(self):
        self.blocks = nnx.List([Factor(), Factor()])

    def __call__(self, x):
        for factor in self.blocks:
            x = factor(x)
        return x


def total(model, batch):
    return ax.WeightedMean(model(batch["x"]).sum(), jnp.float32(len(batch["x"])))


@pytest.mark.filterwarnings("ignore:gradients of 512 microbatches are summed in bfloat16")
@pytest.mark.parametrize("name", ["ddp", "after the backward", "zero1", "zero2", "zero3", "hybrid", "pipeline"])
@pytest.mark.parametrize(("precision", "wanted"), [("bf16", 1.0), ("bf16-reduce", 0.5)])
def test_what_accumulates_is_not_rounded_by_the_number_of_microbatches(name, precision, wanted):
    """Five hundred and twelve equal gradients: in bfloat16 the sum stays at 256 of them."""
    count = 512
    degrees, options = {
        "ddp": ({"data": 2}, {}),
        "after the backward": ({"data": 2}, {"data": ax.Replicate(sync_strategy="synchronous")}),
        "zero1": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=1)}),
        "zero2": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=2)}),
        "zero3": ({"fsdp": 2}, {}),
        "hybrid": ({"data": 2, "fsdp": 2}, {}),
        "pipeline": ({"data": 2, "pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=count)}),
    }[name]
    options |= {} if "pipe" in options else {"accumulate": count}
    model = ax.parallelize(Chain(), mesh_of(**degrees), ax.Plan(precision=precision, **options))
    rows = count * degrees.get("data", 1) * degrees.get("fsdp", 1)
    grads = model.value_and_grad(total)({"x": np.ones((rows, 4, 8), np.float32)})[1]
    for grad in jax.tree.leaves(grads):
        np.testing.assert_array_equal(np.asarray(grad), np.float32(wanted))
