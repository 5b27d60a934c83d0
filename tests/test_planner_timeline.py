"""The timeline is the price on a line of time: it ends when the price says, and nothing is lost or shown twice."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from predicted_steps import GPT, config

import axonml_jax as ax
from axonml_jax.base import CLOSED_PIPE
from axonml_jax.pipeline.schedules import PipelineSchedule
from axonml_jax.planner.hardware import Assumptions, Hardware
from axonml_jax.planner.price import phases, price, timeline
from axonml_jax.planner.search import COLOURS, draw

FAST = Hardware(
    name="fast", flops=1e12, memory=2**34, memory_bandwidth=1e11, link=1e11, island=64, cross=1e11, latency=1e-7
)
SLOW = replace(FAST, link=1e8, latency=1e-4)
MODEL = config(GPT, num_layers=4)
PIPE = ax.Pipelined(schedule=PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, num_microbatches=4, chunks=2)
PLANS = {
    "ddp": ({"data": 4}, {}),
    "ddp, accumulation": ({"data": 4}, {"accumulate": 2}),
    "zero-1": ({"fsdp": 4}, {"fsdp": ax.Shard(stage=1), "accumulate": 2}),
    "zero-3": ({"data": 2, "fsdp": 2}, {"accumulate": 2, "remat": "full"}),
    "offload": ({"fsdp": 4}, {"offload": ax.CPUOffload.OPTIMIZER_STATES}),
    "tensor": ({"data": 2, "tensor": 2}, {}),
    "grid": ({"row": 2, "col": 2, "depth": 2}, {}),
    "pipeline": ({"data": 2, "pipe": 2}, {"pipe": PIPE}),
    "pipeline, sharded": ({"fsdp": 2, "pipe": 2}, {"pipe": PIPE}),
}


def predicted(name):
    degrees, options = PLANS[name]
    model = replace(MODEL, split="grid") if "row" in degrees else MODEL
    return ax.explain(ax.Plan(**options), model=model, mesh=degrees, global_batch=16)


@pytest.mark.parametrize("kind", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(
    "given", [Assumptions(), Assumptions(overlap=0.3, layer_overlap=0.2)], ids=["default", "other"]
)
@pytest.mark.parametrize("name", PLANS)
def test_lanes_add_up_to_the_price_and_end_with_it(name, given, kind):
    found = predicted(name)
    cost, line = price(found, kind, given), timeline(found, kind, given)
    assert line.seconds == cost.time
    assert max(lane.spans[-1].end for lane in line.lanes) == pytest.approx(cost.time)
    for lane in line.lanes:
        assert all(a.start <= a.end <= b.start + 1e-12 for a, b in zip(lane.spans, lane.spans[1:], strict=False))
        assert lane.spans[0].start >= 0
    busy = {lane.name: lane.busy for lane in line.lanes}
    for axes, seconds in cost.network.items():
        assert busy.pop(axes) == pytest.approx(seconds)
    rest = cost.update + cost.host
    work = [seconds - rest for seconds in busy.values()]
    assert len(work) == (2 if "pipe" in name else 1)
    assert sum(work) / len(work) == pytest.approx(cost.compute)
    assert json.loads(json.dumps(line.to_dict())).keys() == {lane.name for lane in line.lanes}


def test_what_is_sent_once_hides_behind_one_microbatch():
    """Gradients of 4 microbatches are reduced in the last backward: behind 0.7 of two thirds of a quarter of the compute."""
    exposed = {}
    for count in (1, 4):
        plan = ax.Plan(accumulate=count)
        found = ax.explain(plan, model=MODEL, mesh={"data": 2}, global_batch=8)
        kind = replace(SLOW, link=1e9, latency=0, cross_latency=0)
        _, backward, _ = phases(found, kind, Assumptions())
        assert backward.times == count and len(backward.every + backward.once) == 1
        [sending] = backward.every + backward.once
        least = sending.seconds - 0.7 * price(found, kind).compute * 2 / 3 / count
        exposed[count] = price(found, kind).exposed
        assert exposed[count] == pytest.approx(max(0.0, least), abs=1e-7)
    assert exposed[4] > exposed[1]


def test_a_pipeline_is_idle_where_its_timetable_is():
    found = predicted("pipeline")
    free = replace(FAST, link=1e30, cross=1e30, latency=0, cross_latency=0)
    ranks = [lane for lane in timeline(found, free).lanes if lane.name.startswith("rank")]
    assert [span.name for span in ranks[0].spans].count("forward") == 4 * 2
    end = max(lane.spans[-2].end for lane in ranks)  # the last of all is the update
    useful = sum(span.end - span.start for lane in ranks for span in lane.spans[:-1])
    assert found.bubble > 0 and (2 * end - useful) / useful == pytest.approx(found.bubble)


def test_a_timeline_prints_and_is_drawn(tmp_path):
    found = predicted("pipeline, sharded")
    line = timeline(found, FAST)
    rows = str(line).splitlines()
    assert [row.split()[0] for row in rows[2:4]] == ["rank", "rank"] and "F forward" in rows[-1]
    strips = {row.split()[-1] for row in rows[2:-1]}
    assert {len(strip) for strip in strips} == {64} and any("F" in strip for strip in strips)
    draw(found, line, tmp_path / "step.svg", model="tiny", budget=float(found.memory.total))
    text = (tmp_path / "step.svg").read_text("utf-8")
    assert "tiny: " in text and "may be used" in text
    assert all(colour in text for colour in (COLOURS["forward"], COLOURS["backward"], COLOURS["update"]))


@pytest.mark.parametrize("command", ["schedule --stages 2 --microbatches 2", "train nothing.yaml"])
def test_a_reader_that_stops_reading_is_no_fault(command):
    """As in `axonml-jax schedule ... | head`: what is printed is still in the buffer when the reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    unbuffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "axonml_jax", *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=unbuffered,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert done.returncode == (CLOSED_PIPE if command.startswith("schedule") else 2)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
