"""Predictions of models with experts: traffic of the traced program, memory that is compiled, and how a dispatch is sized."""

import collections
import dataclasses
import re

import numpy as np
import pytest
from flax import nnx
from predicted_steps import GPT, LATENT, LENGTH, LLAMA, config, step_of

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.cost.base import LATER
from axonml_jax.cost.decoder import decoder_weights
from axonml_jax.cost.flows import RoutedExperts, stages_of
from axonml_jax.layers.dispatch import Dispatch, capacity_of
from axonml_jax.ledger import predict
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import difference, memory_difference
from axonml_jax.models.config import ExpertsConfig, preset
from axonml_jax.models.transformer import Transformer
from axonml_jax.pipeline.assign import assign

SCAN, SEQUENCE, FULL = {"scan_layers": True}, {"sequence_parallel": True}, {"remat": "full"}
PIPE = ax.Pipelined(num_microbatches=4)
CHUNKS = ax.Pipelined(schedule="interleaved_1f1b", num_microbatches=4, chunks=2)
ROUNDS, GATHER, CAPACITY = {"dispatch": "rounds"}, {"dispatch": "gather"}, {"capacity_factor": 1.5}
SIGMOID, BIASED = {"router": "sigmoid"}, {"router_bias": True, "shared_size": 16}
FOUR = {"num_layers": 4}
PLAIN_QUERIES = dataclasses.replace(LATENT["latent"], query_rank=None)

# (style, experts, model options, degrees, plan options); batches are 8 sequences per microbatch.
ROWS = [
    (GPT, ROUNDS, {}, {"data": 2, "expert": 4}, {**FULL, "accumulate": 2}),
    (GPT, GATHER | BIASED, {}, {"data": 1, "expert": 4}, FULL),
    (GPT, CAPACITY | BIASED, {}, {"data": 2, "expert": 4}, {"remat": "selective"}),
    (LLAMA, {"top_k": 1, "num_experts": 16}, {}, {"data": 1, "expert": 8}, {"accumulate": 2}),
    (LLAMA, ROUNDS, {}, {"data": 1, "fsdp": 2, "expert": 4}, {"precision": "bf16"}),
    (LLAMA, GATHER | SIGMOID, {}, {"data": 2, "fsdp": 2, "expert": 2}, {"accumulate": 2}),
    (LLAMA, ROUNDS, SCAN, {"data": 1, "fsdp": 2, "expert": 4}, FULL),
    (GPT, ROUNDS | BIASED, SCAN, {"data": 1, "fsdp": 2, "expert": 4}, {}),
    (GPT, CAPACITY | BIASED, SCAN, {"data": 1, "fsdp": 2, "expert": 4}, {}),
    (GPT, CAPACITY, {}, {"data": 1, "fsdp": 2, "expert": 4}, {}),
    (LLAMA, {"every": 2}, FOUR, {"data": 1, "fsdp": 2, "expert": 4}, {"fsdp": ax.Shard(stage=2), "accumulate": 2}),
    (LLAMA, ROUNDS, {}, {"data": 1, "expert": 2, "tensor": 4}, FULL),
    (GPT, GATHER | BIASED, SCAN, {"data": 1, "expert": 2, "tensor": 4}, {**FULL, "precision": "bf16"}),
    (GPT, ROUNDS | BIASED, SEQUENCE, {"data": 1, "expert": 2, "tensor": 4}, FULL),
    (GPT, GATHER | {"every": 2}, SEQUENCE | FOUR, {"data": 1, "expert": 2, "tensor": 4}, {}),
    (GPT, BIASED | {"every": 2}, SEQUENCE | FOUR | {"ring": True}, {"data": 1, "expert": 2, "tensor": 4}, FULL),
    (LLAMA, GATHER | {"shared_size": 16}, {}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, {"remat": "selective"}),
    (LLAMA, ROUNDS | {"every": 2}, {}, {"data": 1, "expert": 2, "context": 4}, {}),
    (LLAMA, GATHER | SIGMOID, SCAN, {"data": 1, "expert": 2, "context": 2}, {}),
    (LLAMA, {"first_dense": 1}, {"num_layers": 3}, {"data": 1, "fsdp": 2, "expert": 2, "context": 2}, FULL),
    (LLAMA, {"shared_size": 16}, SEQUENCE | {"post_norms": True}, {"data": 1, "expert": 2, "tensor": 2}, FULL),
    (GPT, BIASED, {}, {"data": 1, "fsdp": 4}, {}),  # all experts on every rank
    (LATENT, SIGMOID | {"first_dense": 1}, {"num_layers": 3}, {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, FULL),
    (LATENT, SIGMOID | {"shared_size": 16}, SEQUENCE, {"data": 1, "expert": 2, "tensor": 4}, FULL),
    (LATENT, SIGMOID, SEQUENCE | SCAN, {"data": 1, "fsdp": 2, "tensor": 2}, {}),
    (LATENT | {"latent": PLAIN_QUERIES}, SIGMOID, {}, {"data": 1, "expert": 2, "context": 2, "tensor": 2}, {}),
]  # fmt: skip

PIPED = [
    (LLAMA, ROUNDS, FOUR, {"data": 1, "pipe": 2, "expert": 2}, {"pipe": PIPE}),
    (LLAMA, {"every": 2}, FOUR, {"data": 1, "pipe": 2, "expert": 2}, {"pipe": PIPE, **FULL}),
    (LLAMA, {"first_dense": 1}, {"num_layers": 5}, {"data": 1, "pipe": 2, "expert": 2}, {"pipe": PIPE}),
    (LLAMA, ROUNDS, FOUR | SEQUENCE, {"data": 1, "pipe": 2, "expert": 2, "tensor": 2}, {"pipe": PIPE}),
    (LATENT, SIGMOID | {"first_dense": 2}, FOUR, {"data": 1, "pipe": 2, "expert": 2}, {"pipe": PIPE}),
    (LLAMA, SIGMOID, FOUR, {"data": 2, "pipe": 4}, {"pipe": PIPE, "precision": "bf16"}),
    (LLAMA, SIGMOID, FOUR, {"data": 1, "pipe": 2, "fsdp": 2, "expert": 2}, {"pipe": CHUNKS, "remat": "selective"}),
]  # fmt: skip


RAGGED = [
    (LLAMA, {"dispatch": "ragged"}, {}, {"data": 2, "expert": 4}, {**FULL, "accumulate": 2}),
    (GPT, {"dispatch": "ragged"} | BIASED, SCAN, {"data": 1, "fsdp": 2, "expert": 4}, {"precision": "bf16"}),
    (LLAMA, {"dispatch": "ragged", "every": 2}, SEQUENCE | FOUR, {"data": 1, "expert": 2, "tensor": 4}, FULL),
]  # fmt: skip


def name(row):
    style, experts, options, degrees, plan = row
    kind = "gpt" if style is GPT else "latent" if "latent" in style else "llama"
    return "-".join([kind, *experts, *options, *(f"{a}{n}" for a, n in degrees.items()), *plan])


def model_of(style, experts, **options):
    return config(style, experts=ExpertsConfig(**{"num_experts": 8, "top_k": 2, **experts}), **options)


def both(row):
    """What is predicted, and what the traced program sends otherwise."""
    style, experts, options, degrees, plan_options = row
    model, plan = model_of(style, experts, **options), ax.Plan(**plan_options)
    batch = 8 * plan.microbatches
    step, state, rows = step_of(model, plan, degrees, batch)
    prediction = predict(plan, model, degrees, global_batch=batch, length=LENGTH)
    assert prediction.minimum["gradients+parameters"] == step.minimum_traffic()
    return prediction, difference(prediction, collectives_in(step, state, rows))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_predicted_traffic_is_that_of_the_traced_program(row):
    prediction, wrong = both(row)
    assert wrong == []
    assert prediction.params == sum(weight.size for weight in decoder_weights(model_of(row[0], row[1], **row[2])))


@pytest.mark.slow
@pytest.mark.parametrize("row", RAGGED, ids=name)
def test_of_a_ragged_exchange_the_trace_has_the_bounds_that_are_predicted(monkeypatch, row):
    """CPUs lower it and compile it not; which rows are filled is data, so both count all of them."""
    monkeypatch.setattr("axonml_jax.layers.dispatch.RAGGED_PLATFORMS", ("cpu",))
    prediction, wrong = both(row)
    assert wrong == []
    kinds = {each.kind for each in prediction.traffic if each.label == "experts"}
    assert "ragged_all_to_all" in kinds and "all_to_all" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("row", PIPED, ids=name)
def test_in_a_pipeline_a_trace_counts_idle_ticks_and_nothing_else_differs(row):
    """A trace counts the dearest branch of every tick; stages work in as many of them as there are microbatches of chunks."""
    prediction, wrong = both(row)
    chunks, labels = row[4]["pipe"].chunks, {"", "experts", "router"}
    assert {each.label for each in wrong} <= labels and any(each.label == "router" for each in wrong)
    for each in wrong:
        ratios = {b / a for a, b in zip(each.predicted, each.found, strict=True)}
        assert ratios == {prediction.ticks / (prediction.microbatches * chunks)}, str(each)


def test_a_loop_over_experts_keeps_what_a_scan_would_redo(monkeypatch):
    monkeypatch.setattr("axonml_jax.layers.dispatch.LITTLE", 0)
    assert both((GPT, BIASED, SCAN, {"data": 1, "fsdp": 4}, {}))[1] == []


def explained(experts, degrees, **options):
    return ax.explain(ax.Plan(), model=model_of(LLAMA, experts), mesh=degrees, global_batch=8, length=LENGTH, **options)


@pytest.mark.parametrize("experts", [ROUNDS, CAPACITY], ids=["rounds", "capacity"])
def test_slots_that_carry_no_token_are_a_row_of_padding_and_later_rounds_in_no_sum(experts):
    found = explained(experts, {"data": 1, "expert": 4})
    tokens, k, n, h = 8 * LENGTH // 4, 2, 4, 32
    slots = 8 * capacity_of(tokens, k, 8, 1.5) if "capacity_factor" in experts else 4 * -(-int(1.25 * tokens * k) // n)
    even = [
        flow for flow in found.traffic if flow.label == "experts" and flow.kind == "all_to_all" and flow.where != LATER
    ]
    once = 2 * 4 * h * 4 * (n - 1) // n  # layers, times there and back in both directions, elements, bytes, to others
    assert sum(flow.wire_bytes for flow in even) == slots * once
    assert sum(flow.padding_bytes for flow in even) == (slots - k * tokens) * once
    assert found.minimum["experts"] == k * tokens * once
    later = [flow for flow in found.traffic if flow.where == LATER]
    assert bool(later) == (experts is ROUNDS) and ("a later round" in str(found)) == bool(later)
    assert found.total_bytes == sum(flow.wire_bytes for flow in found.traffic) - sum(f.wire_bytes for f in later)
    assert re.search(r"^padding +all_to_all", str(found), re.MULTILINE)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_dispatch_is_sized_as_the_layer_does(monkeypatch, platform):
    monkeypatch.setattr("axonml_jax.layers.dispatch.target_platform", lambda: platform)
    names = {"auto": None, "rounds": None, "gather": None, "capacity": 1.1}
    for asked, factor in names.items():
        for k, tokens in ((1, 1), (2, 7), (3, 640)):
            model = model_of(LLAMA, {"dispatch": "auto" if factor else asked, "capacity_factor": factor, "top_k": k})
            of = lambda ranks, tokens, model=model: RoutedExperts.of(model, {"expert": ranks}, tokens, platform)
            many = of(np.array([1.0, 2, 4, 8]), np.full(4, float(tokens)))
            for i, ranks in enumerate((1, 2, 4, 8)):
                capacity = None if factor is None else capacity_of(tokens, k, 8, factor)
                how = Dispatch.of(
                    model.experts.dispatch, ranks=ranks, experts=8, tokens=tokens, top_k=k, width=32, capacity=capacity
                )
                found = of(ranks, tokens)
                assert found.gathers == (how.name == "gather" and ranks > 1)
                assert ranks == 1 or how.name == "gather" or found.ragged == (how.name == "ragged")
                rows = how.slots * (1 if how.name == "gather" else ranks)
                assert found.rows == rows and (how.name == "gather" or ranks == 1 or found.slots == rows)
                for own in ("gathers", "rows", "padded", "block", "slots"):
                    assert np.broadcast_to(getattr(many, own), 4)[i] == getattr(found, own), (
                        own,
                        asked,
                        k,
                        tokens,
                        ranks,
                    )


@pytest.mark.parametrize("experts", [BIASED, {"every": 2, "inner_size": 24}, {"first_dense": 1, "activation": "gelu"}])
@pytest.mark.parametrize("style", [GPT, LLAMA], ids=["gpt", "llama"])
def test_weights_are_those_of_the_model(style, experts):
    model = model_of(style, experts, num_layers=3)
    module = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    leaves = named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    real = collections.Counter((re.sub(r"/\d+/", "/", name), leaf.shape) for name, leaf in leaves.items())
    ours = collections.Counter()
    for each in decoder_weights(model):
        ours[each.name, each.shape] += each.count
    assert real == ours


@pytest.mark.parametrize(
    ("experts", "layers", "stages"),
    [({}, 5, 2), ({"every": 2}, 7, 3), ({"first_dense": 1}, 6, 3), ({"every": 3}, 5, 2)],
)
def test_a_pipeline_is_cut_where_it_will_be(experts, layers, stages):
    model = model_of(GPT, experts, num_layers=layers, tie_embeddings=False)
    module = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    shapes = named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    real = dict(zip(shapes, assign(shapes, stages).stages, strict=True))
    found = stages_of(model, ax.Plan(pipe=PIPE), {"pipe": stages})
    blocks = [real[f"blocks/{i}/attention_norm/scale"] for i in range(layers)]
    assert found.blocks == tuple(map(blocks.count, range(stages)))
    with_experts = [stage for i, stage in enumerate(blocks) if model.has_experts(i)]
    assert found.experts == tuple(map(with_experts.count, range(stages)))


@pytest.mark.parametrize(
    ("style", "experts", "options", "degrees", "plan_options"),
    [
        (GPT, ROUNDS, {}, {"data": 1, "expert": 4}, {}),
        (GPT, {"capacity_factor": 1.25}, {}, {"data": 1, "expert": 4}, {}),
        (LLAMA, GATHER, SCAN | FOUR, {"data": 1, "fsdp": 2, "expert": 2}, FULL),
    ],
    ids=["rounds", "capacity", "gathered and recomputed, zero3"],
)
@pytest.mark.slow
def test_predicted_memory_is_near_what_the_compiler_plans(style, experts, options, degrees, plan_options):
    """Arguments within 2%, temporaries within 25% (XLA:CPU, float32): experts' weights, states and rounds."""
    plan, sizes = (
        ax.Plan(**plan_options),
        {"hidden_size": 64, "mlp_hidden_size": 256, "vocab_size": 256, "max_length": 64},
    )
    model = model_of(style, experts, **sizes, **options)
    step, state, rows = step_of(model, plan, degrees, 64, length=64)
    prediction = predict(plan, model, degrees, global_batch=64, length=64, platform="cpu")
    found = memory_difference(prediction, step.lower(state, rows).compile())
    arguments, temporaries = found.ratios
    assert abs(arguments - 1) < 0.02 and abs(temporaries - 1) < 0.25, str(found)


def test_what_cannot_run_with_experts_is_refused_with_every_reason():
    with pytest.raises(
        ValueError, match=r"8 experts do not divide over expert=3.*8 sequences do not divide into 3 shards"
    ):
        explained({}, {"data": 1, "expert": 3})
    with pytest.raises(ValueError, match="18 inner features of a shared expert do not divide over tensor=4"):
        explained({"shared_size": 18}, {"data": 1, "tensor": 4})
    with pytest.raises(ValueError, match=r"5 blocks \(1 of another kind alone\) cannot be cut into 5 stages"):
        model = model_of(LLAMA, {"first_dense": 1}, num_layers=5)
        ax.explain(ax.Plan(pipe=PIPE), model=model, mesh={"pipe": 5}, global_batch=8, length=LENGTH)


def test_mixtral_is_predicted_as_published():
    model, mesh = preset("mixtral-8x7b"), {"data": 1, "fsdp": 8, "expert": 8}
    found = ax.explain(ax.Plan(precision="bf16"), model=model, mesh=mesh, global_batch=64, length=4096)
    assert found.params == 46_702_792_704
    experts = 32 * 8 * 3 * 4096 * 14_336  # rest over all ranks, all else over those of fsdp
    assert found.memory.parameters + found.memory.optimizer == 12 * (experts // 64 + (found.params - experts) // 8)
    tokens = 4096  # of a rank
    assert found.minimum["experts"] == 32 * 4 * 2 * tokens * 4096 * 2 * 7 // 8
