"""The planner splits heads among some ranks of `context` and positions among the rest, at what that sends."""

import re
from dataclasses import replace

import jax
import pytest
from test_planner_search import CPU, LONG, TINY, cheapest

import axonml_jax as ax
from axonml_jax.__main__ import main
from axonml_jax.cli.plan import config_text
from axonml_jax.config.config import read_config
from axonml_jax.cost.base import ATTENTION
from axonml_jax.ledger.compiled import agreement, collectives_in_lowered
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import difference
from axonml_jax.planner.price import flow_seconds
from axonml_jax.planner.search import ways_on
from axonml_jax.planner.verify import abstract_step

FEW = replace(LONG, vocab_size=256, num_heads=4, num_kv_heads=4)  # heads, fewer than the ranks
ASKED = {"num_devices": 8, "hardware": CPU, "global_batch": 1, "axes": ("context",), "remats": ("full",)}


def test_every_split_of_heads_and_positions_is_tried():
    methods = lambda model, **degrees: {way.method for way in ways_on(model, degrees, 8, 2**14)}
    split = {(count, rest) for count in (2, 4) for rest in ("gather", "ring")}
    assert methods(FEW, context=8) == {"gather", "ring"} | split
    assert methods(FEW, context=4) == {"gather", "ring", "ulysses"} | {each for each in split if each[0] == 2}
    assert methods(FEW, context=8, tensor=4) == {"gather", "ring"}  # one head of a rank
    assert methods(replace(FEW, window=64), context=8) == {"gather", (2, "gather"), (4, "gather")}


@pytest.mark.parametrize(("heads", "rest"), [(4, "gather"), (2, "ring")])
def test_the_split_that_is_chosen_sends_what_is_predicted_in_the_traced_and_the_lowered_step(heads, rest, tmp_path):
    model = replace(FEW, num_heads=heads, num_kv_heads=heads)
    answer = ax.plan(model, **ASKED)
    if rest == "ring":  # of two heads gathered keys and values hold more
        answer = ax.plan(model, **ASKED, max_memory=cheapest(answer.asked, ASKED["axes"])[heads, "ring"])
    best = answer.best.candidate
    assert best.method == answer.plan.context.method == (heads, rest)
    assert f"attention by ulysses of {heads} x {rest}" in str(answer)

    mesh = ax.make_mesh(devices=jax.devices()[:8], **best.mesh)
    step, state, batch = abstract_step(answer.plan, answer.model, mesh, 1, 2**14)
    traced = step.trace(state, batch)
    counted = collectives_in(traced.jaxpr)
    assert [each for each in difference(answer.prediction, counted) if each.label == ATTENTION] == []
    predicted = sum(flow.wire_bytes for flow in answer.prediction.traffic if flow.label == ATTENTION)
    assert predicted == sum(entry.step_wire_bytes for entry in counted if entry.label == ATTENTION) > 0
    assert agreement(counted, collectives_in_lowered(traced.lower(lowering_platforms=("cpu",)))) == []

    path = tmp_path / "planned.yaml"
    path.write_text(config_text(answer), "utf-8")
    assert read_config("train", [str(path)]).build_plan().context == answer.plan.context


def test_groups_that_lie_apart_are_priced_by_the_links_between_them():
    found = ax.explain(
        ax.Plan(context=ax.Context(method=(4, "gather"))), model=FEW, mesh={"context": 8}, global_batch=1
    )
    exchanged, across, *_ = (flow for flow in found.traffic if flow.label == ATTENTION and flow.work == "forward")
    assert (exchanged.group_size, exchanged.apart, across.group_size, across.apart) == (4, 1, 2, 4)
    seconds = lambda flow: flow_seconds(flow, {"context": 8}, TINY)  # islands of 4: the exchange stays inside
    assert seconds(exchanged) == pytest.approx(float(exchanged.wire_bytes) / TINY.link)
    assert seconds(across) == pytest.approx(float(across.wire_bytes) / TINY.cross)


@pytest.mark.slow
def test_a_plan_with_context_is_verified_on_simulated_devices(tmp_path, capsys):
    subject = tmp_path / "long.yaml"
    subject.write_text(
        "name: long\nmesh: {fsdp: 2, context: 4}\ncontext: {method: ring, shard: true}\n"
        "model: {vocab_size: 256, num_layers: 2, hidden_size: 32, num_heads: 4, max_length: 64, scan_layers: true}\n"
        "data: {length: 64}\ntrain: {global_batch_size: 4}\n",
        "utf-8",
    )
    flags = ["--devices", "8", "--hardware", "v5p", "--as-written", "--verify", "cpu"]
    assert main(["plan", str(subject), *flags]) == 0
    out = capsys.readouterr().out
    assert "compiled for cpu" in out and re.search(r"^permute +.* in a loop", out, re.MULTILINE)
    assert "traffic of the traced step is what was predicted" in out
