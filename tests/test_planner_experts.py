"""The planner of models with experts: degrees of `expert` and dispatches, prices, and what it writes for `train`."""

import contextlib
import json
from dataclasses import replace

import jax
import pytest
from predicted_steps import LLAMA, config

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.config.config import read_config
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import difference
from axonml_jax.models.config import ExpertsConfig, preset
from axonml_jax.planner.hardware import Assumptions, Hardware
from axonml_jax.planner.price import flow_seconds
from axonml_jax.planner.search import candidate, candidates, exactly, legal_meshes, quick, ways_on
from axonml_jax.planner.verify import abstract_step

EXPERTS = ExpertsConfig(num_experts=8, top_k=2)
SMALL = config(
    LLAMA,
    hidden_size=64,
    mlp_hidden_size=128,
    num_heads=4,
    num_layers=4,
    vocab_size=512,
    max_length=64,
    experts=EXPERTS,
)
ROOMY = Hardware(
    name="roomy", flops=1e12, memory=2**40, memory_bandwidth=1e11, link=1e9, island=4, cross=1e8, latency=0, cross_latency=0
)  # fmt: skip
KINDS = [EXPERTS, replace(EXPERTS, every=2, router="sigmoid"), replace(EXPERTS, capacity_factor=1.0)]


@pytest.mark.parametrize("axes", [("fsdp", "expert"), ("expert", "tensor"), ("pipe", "expert")], ids="-".join)
@pytest.mark.parametrize(
    "experts", [EXPERTS, replace(EXPERTS, every=2, router="sigmoid"), replace(EXPERTS, capacity_factor=1.0)]
)
def test_the_first_price_is_near_the_ledgers(axes, experts):
    model, given = (
        replace(SMALL, experts=experts),
        {"num_devices": 8, "hardware": ROOMY, "global_batch": 16, "axes": axes},
    )
    asked = ax.plan(model, **given).asked
    for degrees in legal_meshes(model, 8, global_batch=16, length=64, axes=axes):
        ways = ways_on(model, degrees, 16, 64)
        for way, seconds, held in zip(ways, *quick([(degrees, ways)], asked)[0], strict=True):
            with contextlib.suppress(ValueError):  # a schedule that refuses these sizes
                found = exactly(asked, candidate(degrees, way)).price
                assert 0.9 < seconds / found.time < 1.03 and 0.85 < held / found.memory < 1.03, (degrees, way)


def test_degrees_and_dispatches_are_tried_and_the_best_of_all_is_found():
    given = {"num_devices": 8, "hardware": ROOMY, "global_batch": 16, "axes": ("data", "expert")}
    asked, found = ax.plan(SMALL, **given).asked, []
    for each in candidates(SMALL, 8, global_batch=16, length=64, axes=("data", "expert")):
        found.append(exactly(asked, each))
    tried = {(each.candidate.degree("expert"), each.candidate.dispatch) for each in found}
    assert tried == {(1, None), (2, None), (2, "rounds"), (4, None), (4, "gather"), (8, None), (8, "gather")}
    held = sorted(one.price.memory for one in found)
    for limit in (held[0], held[len(held) // 4], held[-1]):
        best = min(one.price.time for one in found if one.price.memory <= limit)
        assert ax.plan(SMALL, max_memory=limit, **given).best.price.time <= 1.03 * best
    lean = ax.plan(SMALL, max_memory=held[0], **given)
    assert lean.best.candidate.degree("expert") == 8 and "experts twice as uneven" in lean.sensitivity


def test_meshes_that_do_not_go_with_a_model_are_not_tried():
    axes = lambda model: {axis for each in candidates(model, 8, global_batch=16, length=64) for axis, _ in each.degrees}
    assert "expert" not in axes(replace(SMALL, experts=None)) and not axes(SMALL) & {"depth", "row", "col"}
    answer = ax.plan(SMALL, num_devices=12, hardware=ROOMY, global_batch=24)
    assert answer.illegal["experts do not divide over their ranks"] > 0
    capacity = replace(SMALL, experts=replace(EXPERTS, capacity_factor=1.25))
    assert {each.dispatch for each in candidates(capacity, 8, global_batch=16, length=64)} == {None}


def test_uneven_loads_and_padding_are_in_the_price():
    given = {"num_devices": 4, "hardware": ROOMY, "global_batch": 16, "axes": ("expert",)}
    assumed = lambda imbalance: Assumptions(imbalance=imbalance, passes=0.0)
    times = lambda model, imbalance: ax.plan(model, assumptions=assumed(imbalance), **given).best
    even, uneven = times(SMALL, 1.0), times(SMALL, 2.0)
    share = even.prediction.expert_flops_per_token / even.prediction.flops_per_token
    assert 0.3 < share < 0.9
    assert uneven.price.compute / even.price.compute == pytest.approx(1 + share)
    padded = times(replace(SMALL, experts=replace(EXPERTS, capacity_factor=1.5)), 2.0)
    assert padded.price.compute / even.price.compute == pytest.approx(1 + 0.5 * share)
    alone = ax.plan(
        SMALL, num_devices=4, hardware=ROOMY, global_batch=16, axes=("data",), assumptions=assumed(2.0)
    ).best
    assert alone.price.compute == pytest.approx(even.price.compute)  # a rank with all experts computes its own tokens
    with pytest.raises(ValueError, match="imbalance is at least 1"):
        Assumptions(imbalance=0.9)


def test_filled_slots_alone_are_priced_of_a_ragged_exchange():
    model = replace(SMALL, experts=replace(EXPERTS, dispatch="ragged"))
    found = ax.explain(ax.Plan(), model=model, mesh={"expert": 4}, global_batch=16, length=64, platform="tpu")
    ragged = [flow for flow in found.traffic if flow.kind == "ragged_all_to_all" and flow.where != "a later round"]
    seconds = sum(flow_seconds(flow, {"expert": 4}, replace(ROOMY, latency=0)) for flow in ragged)
    tokens, k, h = 256, 2, 64
    assert seconds == pytest.approx(4 * 4 * k * tokens * h * 4 * 3 / 4 / ROOMY.link)


@pytest.mark.slow
def test_a_planned_step_sends_what_is_priced_and_compiles():
    given = {"num_devices": 4, "hardware": replace(ROOMY, platform="cpu"), "global_batch": 8, "precision": None}
    found = ax.plan(SMALL, axes=("fsdp", "expert"), max_memory=2**24, **given)
    assert found.best.candidate.degree("expert") > 1
    mesh = ax.make_mesh(devices=jax.devices()[:4], **found.best.candidate.mesh)
    step, state, batch = abstract_step(found.plan, found.model, mesh, 8, 64)
    traced = step.trace(state, batch)
    assert difference(found.prediction, collectives_in(traced.jaxpr)) == []
    assert traced.lower().compile().memory_analysis().argument_size_in_bytes > 0


def test_mixtral_is_planned_by_name_and_written_as_a_configuration_that_trains_it(tmp_path, capsys):
    written = tmp_path / "mixtral.yaml"
    flags = ["--hardware", "v5p", "--batch", "128", "--length", "4096", "--axes", "expert", "tensor"]
    assert main(["plan", "mixtral-8x7b", "--devices", "64", *flags, "--write", str(written), "--ledger"]) == 0
    out = capsys.readouterr().out
    assert "46,702,792,704 parameters" in out and "experts twice as uneven" in out and "E experts" in out
    read = read_config("train", [str(written)])
    assert read.mesh.expert > 1 and read.mesh.expert * read.mesh.tensor == 64
    assert read.model.experts == replace(preset("mixtral-8x7b").experts, dispatch=read.experts.dispatch)
    again = ["plan", str(written), "--devices", "64", "--hardware", "v5p", "--as-written"]
    assert main(again) == 0 and "ms/step" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_with_experts_is_verified_on_simulated_devices(tmp_path, capsys):
    subject = tmp_path / "moe.yaml"
    subject.write_text(
        "name: moe\nmesh: {fsdp: 2, expert: 4}\nexperts: {num_experts: 8}\n"
        "model: {vocab_size: 256, num_layers: 2, hidden_size: 32, num_heads: 4, max_length: 32, scan_layers: true}\n"
        "data: {length: 32}\ntrain: {global_batch_size: 16}\n",
        "utf-8",
    )
    flags = ["--devices", "8", "--hardware", "v5e", "--as-written", "--verify", "cpu"]
    assert main(["plan", str(subject), *flags]) == 0
    out = capsys.readouterr().out
    assert "ragged_all_to_all" in out  # as TPUs would exchange tokens
    assert "compiled for cpu" in out and "traffic of the traced step is what was predicted" in out


@pytest.mark.slow
def test_experts_of_a_configuration_are_explained_and_kept_within_a_budget(tmp_path, capsys):
    subject, baseline = tmp_path / "moe.yaml", tmp_path / "base.json"
    subject.write_text(
        "name: moe\ndevices: {simulated: 8}\nmesh: {data: 2, expert: 4}\nexperts: {num_experts: 8}\n"
        "model: {vocab_size: 256, num_layers: 2, hidden_size: 32, num_heads: 4, max_length: 32}\n"
        "data: {length: 32}\ntrain: {global_batch_size: 16}\n",
        "utf-8",
    )
    assert main(["explain", str(subject), "--write-baseline", str(baseline)]) == 0
    assert json.loads(baseline.read_text("utf-8"))["traffic"] > 0
    capsys.readouterr()
    assert main(["explain", str(subject), "--check", str(baseline)]) == 0
    assert main(["explain", str(subject), "--max-memory", "1KiB"]) == 4
