"""What attention costs in the planner: kernels, blocks, scores that a mask hides, several documents in a row, and links."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from predicted_steps import LLAMA, config

import axonml_jax as ax
from axonml_jax.cost.flows import SCORES, computed_pairs
from axonml_jax.ledger.predict import memory_difference
from axonml_jax.planner import verify as steps
from axonml_jax.planner.hardware import HARDWARE, Assumptions
from axonml_jax.planner.price import flow_seconds, inner_product, phases, price
from axonml_jax.planner.search import candidate, quick, ways_on
from axonml_jax.planner.verify import abstract_step, measure


@pytest.mark.parametrize(
    ("length", "tile", "window"), [(1024, 256, None), (512, 512, None), (4096, 256, 512), (4096, 512, 64)]
)
def test_the_pairs_that_tiles_compute_are_those_of_tiles_in_which_something_is_seen(length, tile, window):
    model = config(LLAMA, max_length=length, window=window)
    at = np.arange(length)
    seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (window or length))
    tiles = seen.reshape(length // tile, tile, length // tile, tile).any(axis=(1, 3))
    assert computed_pairs(model, length, tile) == pytest.approx(tiles.mean(), rel=0.1)


@pytest.mark.slow
def test_rows_of_several_documents_are_planned_priced_and_compiled_as_such():
    """Without the kernel that would mix them: scores are held, by the first price and by the ledger's."""
    model = config(LLAMA, head_dim=64, max_length=1024, dtype="bfloat16")
    given = {
        "num_devices": 4,
        "hardware": "h100",
        "global_batch": 8,
        "axes": ("data",),
        "remats": (None,),
        "runners_up": 0,
    }
    plain, packed = ax.plan(model, **given), ax.plan(model, **given, documents=True)
    assert packed.best.price.memory - plain.best.price.memory > 2 * 2 * 1024**2 * 4
    ways = tuple(
        way for way in ways_on(model, {"data": 4}, 8, 1024) if candidate({"data": 4}, way) == packed.best.candidate
    )
    ((_, held),) = quick([({"data": 4}, ways)], packed.asked)
    assert held[0] / packed.best.price.memory == pytest.approx(1, abs=0.05)
    with pytest.raises(ValueError, match="does not fit in a device's memory"):
        ax.plan(model, **given, documents=True, max_memory=plain.best.price.memory)

    mesh = ax.make_mesh(devices=jax.devices()[:4], data=4)
    step, state, batch = abstract_step(packed.plan, packed.model, mesh, 8, 1024, documents=True)
    assert set(batch) == {"tokens", "targets", "segment_ids", "positions"}
    difference_ = memory_difference(packed.prediction, step.trace(state, batch).lower().compile())
    assert difference_.ratios[0] == pytest.approx(1, abs=2e-4)


def priced(hardware="v5p", length=2**17, **options):
    """A model of two blocks under full recomputation, on eight devices that share its sequences."""
    model = config(
        LLAMA, head_dim=128, max_length=length, dtype="bfloat16", **{"num_kv_heads": 8, "num_heads": 8} | options
    )
    plan = ax.Plan(context=ax.Context(method="ulysses", shard=True), precision="bf16", remat="full")
    platform = HARDWARE[hardware].platform
    found = ax.explain(
        plan, model=model, mesh={"fsdp": 1, "context": 8}, global_batch=1, length=length, platform=platform
    )
    return found, phases(found, HARDWARE[hardware], Assumptions())


def test_what_masks_hide_is_left_out_of_the_pass_in_which_it_would_be_computed():
    found, (forward, backward, _) = priced(window=64)
    assert found.masked_flops_per_token > 0.9 * found.flops_per_token  # of so long a sequence scores are nearly all
    assert 0 < forward.compute < backward.compute < 4 * forward.compute
    whole, _ = priced(window=None)
    assert whole.masked_flops_per_token == pytest.approx(found.masked_flops_per_token / 2, rel=0.02)


def test_blocks_cost_the_same_on_one_rank_and_on_many():
    kernel, capped = priced()[0], priced(attention_softcap=30.0)[0]
    assert kernel.blockwise_flops_per_token == capped.blockwise_flops_per_token == 0  # splash caps scores
    assert priced("h100", attention_softcap=30.0)[0].blockwise_flops_per_token > 0  # cuDNN does not
    model = config(LLAMA, head_dim=128, max_length=2**13, dtype="bfloat16")
    given = {"model": model, "mesh": {"data": 1}, "global_batch": 1, "platform": "cuda"}
    alone, packed = ax.explain(ax.Plan(), **given), ax.explain(ax.Plan(), **given, documents=True)
    assert alone.blockwise_flops_per_token == 0 < packed.blockwise_flops_per_token


def test_a_group_over_two_axes_that_lie_in_one_island_sends_over_its_links():
    found, _ = priced("h100")
    gathered = next(flow for flow in found.traffic if flow.axes == ("fsdp", "context") and flow.label == "parameters")
    seconds = flow_seconds(gathered, {"fsdp": 1, "context": 8}, HARDWARE["h100"])
    assert seconds < 2 * gathered.wire_bytes / HARDWARE["h100"].link + 1e-3
    assert inner_product({"data": 2, "fsdp": 4, "context": 2, "tensor": 2}, ("fsdp", "context")) == 2


@pytest.mark.parametrize(
    ("attention", "context", "platform", "why"),
    [
        ("xla", "gather", None, "reads keys of a rank's own positions"),
        ("cudnn", "ring", "cuda", "wants whole sequences of some heads"),
        ("splash", "ulysses", "cuda", "is a kernel for tpu, and this is for cuda"),
        ("cudnn", "ulysses", "cuda", "does not apply to this model"),
    ],
)
def test_attention_that_a_model_names_and_that_cannot_run_is_refused(attention, context, platform, why):
    model = config(LLAMA, head_dim=128, num_kv_heads=4, max_length=1024, dtype="bfloat16", attention=attention)
    given = {"model": model, "mesh": {"context": 4}, "global_batch": 1, "platform": platform, "documents": True}
    with pytest.raises(ValueError, match=f"this plan cannot run: attention='{attention}' {why}"):
        ax.explain(ax.Plan(context=ax.Context(method=context)), **given)
    methods = {way.method for way in ways_on(model, {"context": 4}, 1, 1024)}
    assert attention == "xla" or (methods == {"ulysses"}) == (attention == "cudnn")


@pytest.mark.parametrize("method", ["gather", "ring", (2, "ring"), (2, "gather")], ids=str)
def test_splash_is_priced_for_every_method_and_its_scores_take_no_memory(method):
    """On TPUs; on GPUs, and where a rank's positions are no multiple of 128, blocks are."""

    def found(length, platform="tpu", **options):
        model = config(LLAMA, head_dim=128, max_length=length, dtype="bfloat16", num_kv_heads=8, num_heads=8, **options)
        plan = ax.Plan(context=ax.Context(method=method), precision="bf16", remat="full")
        return ax.explain(plan, model=model, mesh={"context": 4}, global_batch=1, length=length, platform=platform)

    kernel, blocks = found(2**15), found(2**15, "cuda")
    assert kernel.blockwise_flops_per_token == 0 < blocks.blockwise_flops_per_token
    assert found(2**15, attention="splash").blockwise_flops_per_token == 0
    heads, tile = 8 // (method[0] if isinstance(method, tuple) else 1), 512
    in_blocks = found(2**15, attention="blocks")
    assert in_blocks.memory.temporaries - kernel.memory.temporaries == SCORES * 4 * heads * tile**2
    assert found(2**7).blockwise_flops_per_token > 0
    with pytest.raises(ValueError, match="attention='splash' does not apply to this model and these sequences"):
        found(2**7, attention="splash")
    assert found(2**15, sinks=True).blockwise_flops_per_token == 0  # they are merged with what it reads


def test_what_a_block_takes_however_few_tokens_comes_with_every_microbatch_and_again_where_it_is_computed_again():
    model = config(LLAMA, num_layers=4, max_length=256)
    slow = dataclasses.replace(HARDWARE["v5p"], block_seconds=1e-3)
    given = {"num_devices": 4, "global_batch": 32, "runners_up": 0}

    def compute(hardware, **options):
        answer = ax.plan(model, hardware=hardware, **given, **options)
        return answer, answer.best.price.compute

    for axes, remats in ((("data",), (None,)), (("pipe",), (None,)), (("data",), ("full",))):
        answer, _ = compute(slow, axes=axes, remats=remats)
        found = answer.prediction
        before, after = (price(found, each).compute for each in (HARDWARE["v5p"], slow))
        again = 1 + found.recomputed_flops_per_token / found.flops_per_token
        blocks = 4 / found.degrees.get("pipe", 1)
        assert after - before == pytest.approx(1e-3 * blocks * found.microbatches * again)
    assert compute(slow, axes=("data",), remats=(None,))[0].prediction.microbatches == 1  # few large ones are cheaper
    whole = price(found, dataclasses.replace(slow, reached=0.25))
    assert (
        whole.compute == price(found, slow, Assumptions(efficiency=0.25, passes=0.0)).compute
    )  # what was measured, unless it is given
    assert price(found, dataclasses.replace(slow, reached=0.25), Assumptions()).compute == price(found, slow).compute


@pytest.mark.parametrize(
    ("mesh", "fsdp", "parts"), [({"data": 2}, None, 1), ({"fsdp": 4}, ax.Shard(stage=3), 4)], ids=["ddp", "zero-3"]
)
def test_an_update_reads_state_and_gradients_and_writes_state(mesh, fsdp, parts):
    model = config(LLAMA, num_layers=4, max_length=64)
    plan = ax.Plan() if fsdp is None else ax.Plan(fsdp=fsdp)
    costs = lambda plan, hardware: price(ax.explain(plan, model=model, mesh=mesh, global_batch=8), hardware)
    machine = dataclasses.replace(HARDWARE["v5p"], memory_bandwidth=1e9, step_seconds=0.0)
    # Adam in float32: a parameter, two moments and a gradient are read, a parameter and two moments are written.
    elements = model.num_params / parts
    assert costs(plan, machine).update == pytest.approx(4 * elements * (4 + 3) / 1e9, rel=1e-3)
    assert costs(plan, machine).host == 0
    away = dataclasses.replace(plan, offload=ax.CPUOffload.OPTIMIZER_STATES)
    offloaded = costs(away, machine)
    # Both moments come from the host and go back there.
    assert offloaded.host == pytest.approx(4 * elements * (2 + 2) / Assumptions.on(machine).host_bandwidth, rel=1e-3)


def test_what_a_step_takes_however_few_tokens_comes_once():
    model = config(LLAMA, num_layers=4, max_length=256)
    answer = ax.plan(model, hardware="v5p", num_devices=4, global_batch=32, runners_up=0)
    slow = dataclasses.replace(HARDWARE["v5p"], step_seconds=1e-3)
    before, after = (price(answer.prediction, each) for each in (HARDWARE["v5p"], slow))
    assert after.update - before.update == pytest.approx(1e-3) == pytest.approx(after.time - before.time)


def test_on_cpus_collectives_are_launched_one_by_one_and_nothing_hides_them():
    sizes = {"mesh": {"fsdp": 8}, "global_batch": 8}
    found = ax.explain(ax.Plan(fsdp=ax.Shard(stage=3)), model=config(LLAMA, num_layers=4, max_length=64), **sizes)
    there, here = (dataclasses.replace(HARDWARE["v5p"], platform=platform) for platform in ("tpu", "cpu"))
    assert Assumptions.on(here).overlap == 0 < Assumptions.on(there).overlap
    assert Assumptions.on(here, overlap=0.5).overlap == 0.5
    costs = price(found, here)
    launches = sum(
        flow.times * flow.launches for flow in found.traffic if flow.group_size > 1 and flow.where != "later"
    )
    network = sum(costs.network.values())
    assert costs.exposed == pytest.approx(network)
    slower = price(found, dataclasses.replace(here, latency=2 * here.latency))
    assert sum(slower.network.values()) - network == pytest.approx(launches * math.log2(8) * here.latency)


def seconds_of(true):
    """What a machine whose figures are `true` would take for the steps that are measured."""
    return lambda steps: [step.seconds(true) for step in steps]


@pytest.mark.parametrize("heads", [4, 3])
def test_steps_say_what_a_machine_has(heads, monkeypatch):
    # The steps do not run: their times are prices of a machine whose figures must be found.
    model = config(LLAMA, num_layers=8, num_heads=heads, num_kv_heads=heads, head_dim=16, max_length=64)
    rough = dataclasses.replace(HARDWARE["v5p"], platform="cpu", link=1e9, cross=1e9)
    true = dataclasses.replace(rough, block_seconds=1e-3, step_seconds=5e-3, reached=0.25, layer_link=3e8)
    monkeypatch.setattr(steps._Probe, "prepared", lambda probe: probe)
    monkeypatch.setattr(steps, "_in_turns", seconds_of(true))
    devices = [None] * 4
    found = steps.from_steps(devices, model, rough, None)
    # Twice as many blocks as are measured have twice the rest of a step.
    assert found.step_seconds == pytest.approx(2 * true.step_seconds, rel=1e-3)
    assert found.reached == pytest.approx(0.25, rel=1e-3) and found.block_seconds == pytest.approx(1e-3, rel=1e-3)
    assert found.link == 1e9 and found.layer_link == (pytest.approx(3e8, rel=1e-3) if heads == 4 else None)


@pytest.mark.slow
def test_a_few_steps_of_the_model_are_measured_where_that_is_quick(monkeypatch):
    monkeypatch.setattr(steps, "ROUNDS", 3)
    model = config(LLAMA, num_layers=1, max_length=64)
    rough = measure(2, size=64, elements=1024)
    found = measure(2, model=model, size=64, elements=1024)
    assert found.alone >= 1
    assert found.reached is not None and 0 < found.reached <= 1
    assert found.block_seconds >= 0 and found.step_seconds >= 0 and found.layer_link <= found.link
    assert Assumptions.on(found).efficiency == found.reached and Assumptions.on(found, 0.3).efficiency == 0.3
    monkeypatch.setattr(steps, "WITHIN", 0.0)
    assert steps.from_steps(jax.devices()[:2], model, rough, None) is rough
