"""One model of cost: what is added up for many candidates in arrays is what is predicted for each of them alone."""

import contextlib
import random
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from int8_strategy import Int8Shard
from predicted_steps import GPT, LLAMA, config, step_of
from ring_strategy import RingShard

import axonml_jax as ax
from axonml_jax.cost.base import Run, TickCounts
from axonml_jax.cost.decoder import KINDS, wire_elements
from axonml_jax.cost.flows import stage_costs
from axonml_jax.cost.memory import block_activations
from axonml_jax.ledger.memory import estimate
from axonml_jax.ledger.predict import predict
from axonml_jax.pipeline.schedules import Pipelined
from axonml_jax.planner.hardware import FAMILIES, Hardware
from axonml_jax.planner.search import alike, candidate, candidates_of, exactly, legal_meshes, ways_on

ROOMY = Hardware(name="roomy", flops=1e12, memory=2**40, memory_bandwidth=1e11, link=1e9, island=4, cross=1e8, torus=3)
SCAN = {"scan_layers": True, "loss_chunk": 24}
WITHOUT_CONTEXT = tuple(dict.fromkeys(axis for family in FAMILIES for axis in family if axis != "context"))
NORMS = 64
"""Bytes of the norm's numbers that may differ: what is split over the same axes along other dims is summed apart."""

# (style, model options, devices, precision, strategy along fsdp); 1 sequence or more per rank.
ROWS = [
    (GPT, {}, 8, None, None),
    (GPT, {}, 15, "bf16", None),  # nothing divides: padding everywhere
    (LLAMA, {}, 8, "bf16", None),
    (LLAMA, SCAN, 24, "bf16-reduce", None),
    (GPT, {**SCAN, "use_bias": False}, 8, ax.Precision(param="bfloat16", reduce="bfloat16"), None),
    (LLAMA, {}, 6, None, RingShard()),
    (LLAMA, {}, 8, None, Int8Shard()),
]


# The same, with sequences split; on the axes fsdp, context and another.
SPLIT = [(LLAMA, {}, 8, "bf16", "tensor"), (GPT, SCAN, 8, None, "data"), (LLAMA, {}, 8, None, "pipe")]


def together(style, options, devices, precision, strategy, axes=WITHOUT_CONTEXT):
    """Everything that is legal as the planner prices it: the candidates of a list, and their arrays."""
    model, batch = config(style, num_layers=6, **options), 2 * devices
    asked = ax.plan(
        model, num_devices=devices, hardware=ROOMY, global_batch=batch, precision=precision, length=16
    ).asked
    asked, sizes = replace(asked, strategy=strategy), {"global_batch": batch, "length": 16}
    meshes = []
    for degrees in legal_meshes(model, devices, axes=axes, shortest=1 if "context" in axes else 1024, **sizes):
        ways = ways_on(model, degrees, **sizes)
        if ways := tuple(way for way in ways if strategy is None or way.stage == 3):
            meshes.append((degrees, ways))
    for choices in alike(meshes, asked):
        named = []
        for each in choices:
            degrees, ways = meshes[each.number]
            named += [candidate(degrees, ways[i], strategy=strategy) for i in each.columns.at]
        yield asked, named, candidates_of(choices, asked)


def entry(amount, k):
    return float(amount[k]) if isinstance(amount, np.ndarray) else float(amount)


def sent(traffic, amount):
    found = Counter()
    for flow in traffic:
        found["norm" if flow.label == "norm" else (flow.axes, flow.label, flow.kind, flow.work)] += amount(flow)
    return found


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{'gpt' if row[0] is GPT else 'llama'}-{'-'.join(row[1])}-{row[2]}"
)
def test_arrays_of_candidates_are_what_each_is_predicted_to_send_and_hold(row):
    """Exactly, but for a pipeline's slots, which are bounded where chunks get uneven numbers of microbatches."""
    assert as_each_alone(together(*row)) > 40


@pytest.mark.parametrize("row", SPLIT, ids=lambda row: row[-1])
def test_arrays_of_candidates_that_split_sequences_are_what_each_is_predicted_to_send_and_hold(row):
    assert as_each_alone(together(*row[:-1], None, axes=("fsdp", "context", row[-1]))) > 40


def as_each_alone(lists):
    """How many candidates of all lists were predicted alone, and found to be what the list says."""
    rng, tried = random.Random(0), 0
    for asked, named, many in lists:
        for k in rng.sample(range(len(named)), min(len(named), 6)):
            with contextlib.suppress(ValueError):  # a schedule that refuses these sizes
                alone = exactly(asked, named[k]).prediction
                tried += 1
                array, number = sent(many.traffic, lambda f, k=k: entry(f.wire_bytes, k)), sent(alone.traffic, bytes_of)
                assert abs(array.pop("norm", 0) - number.pop("norm", 0)) <= NORMS, named[k]
                array = {key: size for key, size in array.items() if size}
                assert array == pytest.approx(number, rel=1e-12), named[k]
                for field in fields(alone.memory):
                    held, exact = entry(getattr(many.memory, field.name), k), getattr(alone.memory, field.name)
                    slots = field.name == "activations" and uneven(named[k])
                    assert exact * (1 - 1e-12) <= held <= exact * (1.25 if slots else 1 + 1e-12), (named[k], field.name)
    return tried


def bytes_of(flow):
    return float(flow.wire_bytes)


def uneven(found):
    return found.chunks > 1 and found.microbatches % found.degree("pipe") > 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_ticks_by_formula_are_the_timetables(schedule, chunks, ranks):
    for count in (2, 3, 4, 5, 8, 12, 16, 24):
        policy = Pipelined(schedule=schedule, num_microbatches=count, chunks=chunks)
        try:
            timetable = TickCounts.of(policy.timetable(ranks, count))
        except ValueError:
            continue
        foreseen = TickCounts.foreseen(schedule == "gpipe", ranks, count, chunks)
        assert (foreseen.number, foreseen.arriving) == (timetable.number, timetable.arriving)
        even = chunks == 1 or count <= ranks or count % ranks == 0
        assert (
            foreseen.slots == timetable.slots if even else timetable.slots <= foreseen.slots <= 1.25 * timetable.slots
        )
        arrays = TickCounts.foreseen(
            np.array([schedule == "gpipe"]), np.array([ranks]), np.array([count]), np.array([chunks])
        )
        assert (arrays.number[0], arrays.slots[0]) == (foreseen.number, foreseen.slots)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rings_formulas_take_arrays(kind):
    elements, ranks = np.array([0, 1000, 7]), np.array([4, 1, 3])
    alone = [float(wire_elements(kind, int(n), int(r))) for n, r in zip(elements, ranks, strict=True)]
    assert wire_elements(kind, elements, ranks) == pytest.approx(alone)
    assert wire_elements(kind, elements, 3) == pytest.approx([float(wire_elements(kind, int(n), 3)) for n in elements])


@pytest.mark.parametrize("degrees", [{"data": 2, "fsdp": 3}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fsdp", [ax.Replicate(), *(ax.Shard(stage=stage) for stage in (1, 2, 3))], ids=repr)
def test_what_rests_is_the_same_by_configuration_and_by_the_layouts_of_a_model(fsdp, accumulate, degrees):
    """Padding too: 3 ranks divide nothing here."""
    model, plan = config(GPT, num_layers=4), ax.Plan(fsdp=fsdp, accumulate=accumulate, precision="bf16")
    step, *_ = step_of(model, plan, degrees, 24)
    found, held = estimate(step.placement, 2, step.model), predict(plan, model, degrees, global_batch=24).memory
    assert found.param_bytes + found.optim_bytes == held.parameters + held.optimizer + held.padding
    assert found.grad_bytes == held.gradients
    assert fsdp.role.reads == "use" or found.gathered_bytes == held.gathered


def run(**recomputes):
    return Run(roles={}, microbatches=1, **recomputes)


def test_a_stages_backward_costs_its_forward_and_what_it_computes_again():
    """By hand: a block multiplies 2 x 32 x 32 + 2 x 32 x 8 + 3 x 32 x 48, its attention 16 x 2 x 32, the head 32 x 64."""
    forward = (8192, 8192 + 2048)
    for how, again in (({}, (0, 0)), ({"full": 1}, forward), ({"selective": 1}, (1024, 1024))):
        costs = stage_costs(config(LLAMA), (1, 1), (0, 0), run(**how), 16)
        assert costs.forward == costs.weight_gradient == forward
        assert costs.input_gradient == tuple(a + b for a, b in zip(forward, again, strict=True)), how


def test_where_the_backward_is_in_a_loop_of_its_own_scores_and_mixed_heads_are_kept_beside_the_products():
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        kept = [
            block_activations(config(LLAMA), {}, 16, 16, dtype, how, apart=True).kept
            for how in (run(), run(selective=1))
        ]
        assert kept[0] - kept[1] == 16 * (8 * 16 * 4 + 8 * 4 * itemsize), dtype
