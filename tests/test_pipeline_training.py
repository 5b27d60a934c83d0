"""Pipelined training equals one device: loss, gradients, metrics, buffers and parameters after several steps."""

import math

import jax
import pytest
from pipeline_models import MODELS
from plan_tables import name, pairwise, this_end

import axonml_jax as ax
from axonml_jax.testing import assert_equals_single_device

pytestmark = pytest.mark.usefixtures("compiled_fast")

TABLE = {
    "model": ["chain", "linen", "language"],
    "schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble"],
    "ranks": [2, 3, 4],
    "microbatches": ["S-1", "S", "2S+1"],
    "mesh": ["", "data", "fsdp", "data fsdp"],
    "gather": ["step", "tick"],
    "accumulate": [1, 2],
    "remat": [None, "full", "selective"],
    "check_vma": [False, True],
    "max_grad_norm": [None, 0.3],
}


def possible(row):
    degree = 2 ** len(row["mesh"].split())
    return row["ranks"] * degree <= 8 and not (row["schedule"] == "interleaved" and row["ranks"] == 4)


def check(row, steps=5):
    ranks, interleaved = row["ranks"], row["schedule"] == "interleaved"
    chunks = 2 if interleaved else 1
    model, params, loss_fn, batch = MODELS[row["model"]](ranks * chunks)
    degrees = {"pipe": ranks, **dict.fromkeys(row["mesh"].split(), 2)}
    count = {"S-1": ranks - 1, "S": ranks, "2S+1": 2 * ranks + 1}[row["microbatches"]]
    plan = ax.Plan(
        pipe=ax.Pipelined(schedule=row["schedule"], num_microbatches=count, chunks=chunks, gather=row["gather"]),
        accumulate=row["accumulate"],
        remat=row["remat"],
        check_vma=row["check_vma"],
    )
    mesh = ax.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    rows = 2 * mesh.size // ranks * plan.microbatches
    batches = [batch(rows, seed) for seed in range(steps)]
    options = {"mesh": mesh, "params": params, "max_grad_norm": row["max_grad_norm"]}
    assert_equals_single_device(model, loss_fn, batches, plan, **options)


ROWS = [row for row in pairwise(TABLE) if possible(row)]


@pytest.mark.parametrize("row", this_end(ROWS), ids=name)
def test_a_pipeline_equals_one_device(row):
    check(row)
