"""Predictions from shapes: parameters, memory by kind and theory's traffic, without devices or a trace."""

import collections
import json
import re
from dataclasses import replace
from functools import partial

import pytest
from flax import nnx
from predicted_steps import GEMMA, GPT, LLAMA, QWEN, config

import axonml_jax as ax
from axonml_jax.base import named_leaves, size_in_words
from axonml_jax.cost.decoder import decoder_weights, problems
from axonml_jax.cost.memory import SENDS, fuses_attention
from axonml_jax.cost.published import FLOAT32_ADAM, GridDegrees, layer_volumes, zero
from axonml_jax.ledger.pictures import sent_by_axes
from axonml_jax.ledger.predict import predict
from axonml_jax.models.config import PRESETS, TransformerConfig, preset
from axonml_jax.models.transformer import Transformer
from axonml_jax.pipeline.schedules import Pipelined
from axonml_jax.planner.hardware import HARDWARE, Assumptions

PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616, "llama3.2-1b": 1_235_814_400, "mistral-7b": 7_241_732_096, "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360, "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952, "gemma3-4b": 3_880_263_168, "gemma3-12b": 11_766_034_176, "gemma3-27b": 27_009_346_304,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if config.experts is None])
def test_weights_add_up_to_the_published_numbers_of_parameters(name):
    assert sum(weight.size for weight in decoder_weights(preset(name))) == PUBLISHED[name]


@pytest.mark.parametrize(
    "style", [GPT, LLAMA, QWEN | {"sinks": True}, GEMMA], ids=["gpt", "llama", "qwen with sinks", "gemma"]
)
def test_weights_are_those_of_the_model(style):
    model = config(style)
    module = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    leaves = named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    real = collections.Counter((re.sub(r"/\d+/", "/", name), leaf.shape) for name, leaf in leaves.items())
    assert real == collections.Counter({(each.name, each.shape): each.count for each in decoder_weights(model)})


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-405b"])
def test_the_parameters_of_llama_come_out_of_the_model_by_eval_shape(name):
    shrunk = replace(preset(name), num_layers=1)
    module = nnx.eval_shape(lambda: Transformer(shrunk, rngs=nnx.Rngs(0)))
    leaves = named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    block = sum(leaf.size for path, leaf in leaves.items() if path.startswith("blocks/"))
    outside = sum(leaf.size for path, leaf in leaves.items() if not path.startswith("blocks/"))
    assert outside + preset(name).num_layers * block == PUBLISHED[name]


def predicted(model, degrees, global_batch=512, **plan):
    return ax.explain(ax.Plan(**plan), model=model, mesh=degrees, global_batch=global_batch)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_resting_and_reduced_states_are_zeros_formulas(ranks):
    """Parameters and moments rest in shards in every stage; gradients are shards from the moment they are reduced."""
    model = config(LLAMA, hidden_size=128, mlp_hidden_size=256, vocab_size=256)
    params = model.num_params
    held = predicted(model, {"fsdp": ranks}).memory
    states = held.parameters + held.optimizer + held.gradients
    assert states == zero(params, ranks, 3, FLOAT32_ADAM) and held.padding == 0
    replicated = predicted(model, {"data": ranks}).memory
    assert replicated.parameters + replicated.optimizer + replicated.gradients == zero(params, ranks, 0, FLOAT32_ADAM)
    whole = predicted(model, {"fsdp": ranks}, fsdp=ax.Shard(stage=1), accumulate=2).memory
    # Stage 1 of the paper keeps parameters whole all the time; here they are gathered while a step runs.
    assert whole.gathered + whole.gradients + whole.optimizer == zero(params, ranks, 1, FLOAT32_ADAM)
    second = predicted(model, {"fsdp": ranks}, fsdp=ax.Shard(stage=2), accumulate=2).memory
    assert second.gathered + second.gradients + second.optimizer == zero(params, ranks, 2, FLOAT32_ADAM)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_traffic_is_the_papers(accumulate):
    model, ranks = config(LLAMA, hidden_size=128, mlp_hidden_size=256, vocab_size=256), 8
    moved = model.num_params * 4 * (ranks - 1) // ranks
    for stage, times in ((1, 2), (2, 1 + accumulate), (3, 3 * accumulate)):
        found = predicted(model, {"fsdp": ranks}, fsdp=ax.Shard(stage=stage), accumulate=accumulate)
        sent, least, ratio = found.ratios["gradients+parameters"]
        assert least == times * moved
        assert ratio == 1 if stage < 3 else sent == least - accumulate * 256 * 128 * 4 * 7 // 8  # the embedding, once
    ddp = predicted(model, {"data": ranks}, accumulate=accumulate)
    assert ddp.ratios["gradients+parameters"][0] == 2 * moved


def test_padding_is_counted_apart():
    model = config(GPT)  # 5 ranks divide nothing here
    held = predicted(model, {"fsdp": 5}, 40).memory
    assert held.padding > 0
    assert held.parameters + held.optimizer >= zero(model.num_params, 5, 3, replace(FLOAT32_ADAM, gradients=0))


def test_tensor_parallel_traffic_is_megatrons_and_korthikantis():
    model = replace(preset("llama3-8b"), vocab_size=128_000)
    plain = predicted(model, {"tensor": 8}, 8, precision="bf16")
    blocks = 8 * 8192 * 4096 * 2  # b s h in bfloat16
    sums = [flow for flow in plain.traffic if flow.dtype == "bfloat16"]  # the loss sends float32
    assert sum(flow.count for flow in sums) == 4 * 32 + 2  # four a block, the embedding's and the head's
    assert sum(flow.wire_bytes for flow in sums) == (4 * 32 + 2) * 2 * blocks * 7 // 8
    assert plain.minimum["layers"] == 4 * 32 * 2 * blocks * 7 // 8
    split = predicted(replace(model, sequence_parallel=True), {"tensor": 8}, 8, precision="bf16")
    scattered = [flow for flow in split.traffic if flow.kind == "reduce_scatter" and flow.dtype == "bfloat16"]
    assert sum(flow.count for flow in scattered) == 4 * 32 + 2
    assert split.memory.activations < 0.75 * plain.memory.activations


def test_the_grids_traffic_is_axonns():
    """Every layer's weight, input and output volumes; activations are joined over col at the end of each pair beside them."""
    model = config(LLAMA, num_kv_heads=8, hidden_size=64, mlp_hidden_size=128, split="grid", num_layers=1)
    degrees = {"data": 1, "depth": 2, "row": 2, "col": 2}
    found = predicted(model, degrees, 16, precision="bf16")
    h, f = 64, 128
    layers = [(h, h, False), (h, h, False), (h, h, False), (h, h, True), (h, f, False), (h, f, False), (f, h, True)]
    volumes = [layer_volumes(GridDegrees(depth=2, row=2, col=2), 16, 32, k, n, t) for k, n, t in layers]
    table = (
        2 * 64 * 64 // 4 * 1 // 2
    )  # of the embedding, which is gathered once and scattered once; the head is a layer
    head = layer_volumes(GridDegrees(depth=2, row=2, col=2), 16, 32, h, 64, True)
    depth = sum(
        float(flow.wire_bytes) for flow in found.traffic if flow.axes == ("depth",) and flow.label != "gradients"
    )
    assert depth == sum(each["depth"] for each in [*volumes, head]) * 2 / 3 + table
    # q, k and v share one input, and so do gate and up: two and one sums of its gradient fewer.
    row = sum(flow.wire_bytes for flow in found.traffic if flow.axes == ("row",) and flow.kind == "all_reduce")
    assert row == sum(each["row"] for each in [*volumes, head]) - 3 * volumes[0]["row"]


def test_a_pipeline_has_its_bubble_and_its_slots():
    model = config(LLAMA, num_layers=8)
    pipe = Pipelined(num_microbatches=8)
    found = predicted(model, {"data": 2, "pipe": 4}, 64, pipe=pipe)
    head = 32 * 64 / (2 * (2 * 32 * (32 + 8) + 3 * 32 * 48 + 2 * 32 * 32))  # over the blocks of a stage
    assert found.ticks == 8 + 2 * 3
    # Of 33 units of equal stages 24 fall into the 8 ticks in which the last rank, with the head, is at work.
    assert found.bubble == pytest.approx(4 * (33 + 24 * head) / (24 * (4 + head)) - 1)
    passing = [flow for flow in found.traffic if flow.kind == "permute"]
    assert {flow.label for flow in passing} == {"activations", "cotangents"}
    assert all(flow.count == 14 and flow.elements == 4 * 32 * 32 for flow in passing)
    assert found.ratios["activations+cotangents"][2] == 14 / 8
    deeper = predicted(model, {"data": 2, "pipe": 4}, 256, pipe=replace(pipe, num_microbatches=32))
    assert deeper.memory.activations == found.memory.activations  # 1F1B's memory does not grow with microbatches
    gpipe = predicted(model, {"data": 2, "pipe": 4}, 256, pipe=Pipelined(schedule="gpipe", num_microbatches=32))
    assert gpipe.memory.activations > 3 * deeper.memory.activations


def test_what_cannot_run_is_refused_with_every_reason():
    with pytest.raises(ValueError, match=r"do not divide over tensor=3.*sequences do not divide into 2 shards"):
        predicted(config(GPT), {"data": 2, "tensor": 3}, 7)
    with pytest.raises(ValueError, match=r"without a pipeline in the plan: give it pipe=ax\.Pipelined"):
        predicted(config(GPT), {"pipe": 2}, 8)
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 4 stages"):
        predicted(config(GPT), {"pipe": 4}, 8, pipe=Pipelined(num_microbatches=8))
    with pytest.raises(
        ValueError, match=r"3 blocks in one loop do not divide into 2 stages \(pipe=2\): set scan_layers=False"
    ):
        model = config(LLAMA, num_layers=3, scan_layers=True)
        predicted(model, {"data": 2, "pipe": 2}, 8, pipe=Pipelined(num_microbatches=2))
    assert predicted(config(LLAMA, scan_layers=True), {"data": 2, "pipe": 1}, 8).params
    with pytest.raises(TypeError, match="trace its step"):
        ax.explain(ax.Plan(), model=object(), mesh={"data": 2}, global_batch=8)
    with pytest.raises(ValueError, match="give every one"):
        ax.explain(ax.Plan(), model=config(GPT), global_batch=8)
    explain = lambda **given: ax.explain(
        ax.Plan(), model=config(GPT), **{"mesh": {"data": 2}, "global_batch": 8, **given}
    )
    with pytest.raises(ValueError, match=r"unknown mesh axes 'fdsp' \(did you mean 'fsdp'\?\)"):
        explain(mesh={"data": 2, "fdsp": 4})
    assert explain(mesh={"dp": 2}).degrees == {"data": 2}
    with pytest.raises(ValueError, match=r"platform='v5p' must be 'tpu', 'cuda', 'cpu', or None"):
        explain(platform="v5p")
    assert explain(platform="gpu") == explain(platform="cuda")
    with pytest.raises(
        ValueError, match="cannot run: global_batch=0 is less than 1; length=0 is less than 1; moments=-1 is"
    ):
        explain(global_batch=0, length=0, moments=-1)
    assert problems(config(GPT, split="grid"), {"tensor": 2}, 16)[0].startswith("tensor=2 splits nothing")


def test_a_ring_that_a_window_cuts_short_is_not_priced():
    given = {"degrees": {"context": 4}, "global_batch": 8}
    with pytest.raises(ValueError, match=r"window=4 cuts the rounds of a ring short.*context.method='gather'"):
        predicted(config(LLAMA, window=4), **given, context=ax.Context(method="ring"))
    with pytest.raises(ValueError, match="window=4 cuts the rounds of a ring short"):  # which "auto" takes for it
        predicted(config(LLAMA, window=4), **given, context=ax.Context(order="contiguous"))
    every, near = (predicted(config(LLAMA, window=w), **given, context=ax.Context(method="gather")) for w in (None, 4))
    assert (near.traffic, near.memory) == (every.traffic, every.memory)
    assert near.masked_flops_per_token > every.masked_flops_per_token > 0


def test_a_prediction_prints_and_goes_to_json():
    found = predicted(config(GPT), {"data": 2, "fsdp": 4}, 16, remat="full", precision="bf16")
    text = str(found)
    for words in ("ZeRO-3", "full recomputation", "at the fullest moment", "reduce_scatter", "against published"):
        assert words in text
    plain = json.loads(found.to_json())
    assert plain["memory"]["total"] == found.memory.total and plain["traffic"][0]["wire_bytes"] > 0


def drawn(found, path, **options):
    """The words in a prediction's picture."""
    pytest.importorskip("matplotlib")
    found.save_picture(path, **options)
    return re.findall(r"<!-- (.*?) -->", path.read_text("utf-8"))


def test_a_picture_names_model_and_plan_and_draws_the_budget(tmp_path):
    found = predicted(config(GPT), {"data": 2, "fsdp": 4}, 16, remat="full", precision="bf16")
    words = drawn(found, tmp_path / "ledger.svg", model="tiny", budget=2 * found.memory.total)
    assert f"tiny: {found.headline}" in " ".join(words)
    assert f"may be used {size_in_words(2 * found.memory.total)}" in words
    far = drawn(found, tmp_path / "far.svg", budget=1000 * found.memory.total)
    assert f"may be used {size_in_words(1000 * found.memory.total)} (far above)" in far
    assert not any(word.startswith("may be used") for word in drawn(found, tmp_path / "none.svg"))


@pytest.mark.parametrize("scanned", [False, True])
def test_the_curve_of_what_may_be_kept_goes_through_the_words_that_are_predicted_one_by_one(scanned, tmp_path):
    model, degrees = config(LLAMA, num_layers=4, scan_layers=scanned), {"data": 2, "fsdp": 4}
    found = predicted(model, degrees, 16, remat="full")
    words = {str(remat): predicted(model, degrees, 16, remat=remat) for remat in (None, "selective", "full")}
    named = {point.words: (point.memory, point.again) for point in found.curve if point.words}
    assert named.keys() == words.keys()
    for word, (memory, again) in named.items():
        assert (memory, again) == (words[word].memory.total, words[word].again)
    assert named["None"][1] == 0 and found.again == named["full"][1] > 0
    memories, work = [point.memory for point in found.curve], [point.again for point in found.curve]
    assert memories == sorted(set(memories), reverse=True) and work == sorted(set(work))
    assert (2 * 3 if scanned else 2 * 4) <= len(memories)  # and one more where no point is beaten by another
    budget = (words["None"].memory.total + words["selective"].memory.total) // 2
    within = predicted(model, degrees, 16, memory=budget)
    assert (within.memory.total, within.again) in {(point.memory, point.again) for point in within.curve}
    drawing = drawn(found, tmp_path / "curve.svg", budget=budget)
    assert "what may be kept: memory against work done twice" in drawing
    assert (
        f"this plan: {size_in_words(found.memory.total)}, {100 * found.again:.3g} % of a step's FLOPs twice" in drawing
    )


def test_stages_keep_block_by_block():
    model, degrees = config(GPT, num_layers=4), {"data": 1, "pipe": 2}
    one = predicted(model, degrees, 16, pipe=Pipelined(num_microbatches=4))
    assert {"None", "", "full"} <= {point.words for point in one.curve}
    between = sorted(point.memory for point in one.curve if not point.words)[0]
    within = predicted(model, degrees, 16, pipe=Pipelined(num_microbatches=4), memory=int(between))
    assert within.memory.total == between and "in 1 of 2 blocks" in " ".join(within.notes)


def test_a_picture_has_no_row_without_traffic_and_every_row_says_its_bytes(tmp_path):
    found = predicted(config(GPT), {"data": 1, "fsdp": 4}, 16)
    words, sent = drawn(found, tmp_path / "ledger.svg"), sent_by_axes(found)
    assert "data" not in words and {"fsdp", size_in_words(sum(sent["fsdp"].values()))} <= {
        word.strip() for word in words
    }
    alone = predicted(config(GPT), {"data": 1}, 16)
    assert "sent per rank and step, by mesh axis" not in drawn(alone, tmp_path / "alone.svg")


def test_kernels_hold_no_scores_only_where_they_take_windows_and_sinks():
    sizes = {"vocab_size": 64, "num_layers": 1, "hidden_size": 256, "num_heads": 2, "max_length": 4096}
    held = {
        (platform, name): fuses_attention(TransformerConfig(**sizes, **more), 1024, "bfloat16", platform)
        for platform in ("cuda", "tpu")
        for name, more in {"plain": {}, "window": {"window": 128}, "sinks": {"sinks": True}}.items()
    }
    fused = {each for each, fuses in held.items() if fuses}
    assert fused == {("cuda", "plain"), ("tpu", "plain"), ("tpu", "window")}
    sinks = TransformerConfig(**sizes, sinks=True)
    longer = [fuses_attention(sinks, 2048, "bfloat16", platform) for platform in ("cuda", "tpu", None)]
    assert longer == [True, True, False]  # blocks take the kernels' place, where a platform is known


SLICE = TransformerConfig(
    vocab_size=256, num_layers=8, hidden_size=1024, num_heads=8, num_kv_heads=4, mlp_hidden_size=2816, max_length=512,
    scan_layers=True,
)  # fmt: skip
LOOSE, LOOPED = replace(SLICE, num_layers=4, scan_layers=False), replace(SLICE, num_layers=4)
POD = {"model": replace(preset("llama3-8b"), scan_layers=True), "length": 8192, "remat": "full"}
LARGER = replace(preset("llama3-70b"), scan_layers=True)
MILLION = {
    "model": replace(preset("qwen3-8b"), scan_layers=True, loss_chunk=4096), "length": 2**20, "rows": 1,
    "degrees": {"fsdp": 1, "context": 8}, "context": ax.Context(method="ulysses", shard=True),
}  # fmt: skip
COMPILED_FOR_TPUS = {
    "loop, full": (488, {"remat": "full"}),
    "loop, selective": (1_499, {"remat": "selective"}),
    "loop, none": (1_636, {}),
    "blocks, full": (355, {"model": LOOSE, "remat": "full"}),
    "blocks, none": (1_017, {"model": LOOSE}),
    "ddp's loop, full": (853, {"model": LOOPED, "degrees": {"data": 8}, "rows": 512, "accumulate": 4, "remat": "full"}),
    "ddp's loop, none": (2_849, {"model": LOOPED, "degrees": {"data": 8}, "rows": 512, "accumulate": 4}),
    "8B on 512": (8_707, {**POD, "degrees": {"fsdp": 512}, "rows": 1024}),
    "70B on 2,048": (17_996, {**POD, "model": LARGER, "degrees": {"fsdp": 2048}, "rows": 2048}),
    "8B on 256": (5_608, {**POD, "degrees": {"fsdp": 256}, "rows": 256}),
    "a million positions, full": (67_400, {**MILLION, "remat": "full"}),
    "a million positions, on the host": (35_349, {**MILLION, "memory": "56.2GB"}),
}  # fmt: skip
"""MiB of a chip's temporaries as XLA plans them for v5e and v5p, where a step's values do not fit the chip's own scratch
memory (benchmarks/memory/host_memory.py, docs/performance.md)."""


@pytest.mark.parametrize("case", COMPILED_FOR_TPUS)
def test_what_a_chip_of_a_tpu_is_predicted_to_hold_is_near_what_the_compiler_plans(case):
    planned, plan = COMPILED_FOR_TPUS[case]
    given = {"model": SLICE, "degrees": {"data": 1, "fsdp": 8}, "rows": 128, "length": 512} | plan
    model, degrees, rows, length = (given.pop(name) for name in ("model", "degrees", "rows", "length"))
    model = replace(model, max_length=length)
    plan = ax.Plan(precision="bf16", **given)
    found = predict(plan, model, degrees, global_batch=rows, length=length, platform="tpu").memory
    assert -0.07 < found.temporaries / 2**20 / planned - 1 < 0.15


def test_gpt2_on_one_gpu_is_predicted_near_what_it_took():
    """Measured on an H200, 16 x 1,024 tokens in bfloat16: 7.9 GiB with kernels of this library's, 10.4 without."""
    for kernels, measured in (("auto", 7.9), ("xla", 10.4)):
        plan = ax.Plan(precision="bf16", kernels=kernels)
        given = {"global_batch": 16, "length": 1024, "platform": "cuda"}
        found = predict(plan, preset("gpt2-small"), {"data": 1}, **given).memory.total / 2**30
        assert measured < found < 1.2 * measured


def test_a_plan_with_a_budget_is_predicted_as_the_first_word_that_fits():
    given = {"global_batch": 16, "length": 1024, "platform": "cuda"}
    of = lambda **plan: predict(ax.Plan(precision="bf16", **plan), preset("gpt2-small"), {"data": 1}, **given)
    selective, full = of(remat="selective"), of(remat="full")
    assert of(memory="40GiB").memory == of().memory and "remat=None" in of(memory="40GiB").notes[-1]
    assert of(memory=selective.memory.total).recomputed_flops_per_token == selective.recomputed_flops_per_token
    assert of(memory="1GiB").memory == full.memory and "not to fit" in of(memory="1GiB").notes[-1]


def test_a_loop_that_does_not_fit_is_predicted_to_send_what_its_link_takes():
    """Qwen3-8B, one sequence of 1,048,576: TRL publishes 56.2 GB a device on 8 H100s."""
    model = replace(preset("qwen3-8b"), max_length=2**20)
    given = {"global_batch": 1, "platform": "cuda"}
    plan = partial(ax.Plan, precision="bf16", context=ax.Context(method="ulysses", shard=True))
    of = lambda model=model, **own: predict(plan(**own), model, {"fsdp": 1, "context": 8}, **given)
    full, found = of(remat="full").memory, of(memory="56.2GB")
    boundaries = 36 * (2**20 // 8) * 4096 * 2
    assert full.total > 80e9 and found.memory.total <= 56.2e9
    assert (
        found.memory.kept_on_host == boundaries and "36.0 GiB of what is kept in the host's memory" in found.notes[-1]
    )
    assert full.total - found.memory.total == boundaries - 2 * boundaries // 36  # two blocks' are back at once
    assert of(memory="100GB").memory.kept_on_host == 0 == of(remat="full").memory.kept_on_host
    unrolled = of(replace(model, scan_layers=False), memory="56.2GB")
    assert unrolled.memory.kept_on_host == 0 and "not to fit" in unrolled.notes[-1]


def test_what_is_sent_fits_the_links_of_the_table():
    for each in HARDWARE.values():
        assert SENDS[each.platform] <= each.host_link / (0.5 * each.flops) and "host_link" in each.sources
        assert Assumptions.on(each).host_bandwidth == each.host_link


def test_between_two_words_as_few_blocks_as_fit_recompute():
    given = {"global_batch": 16, "length": 1024, "platform": "cuda"}
    of = lambda **plan: predict(ax.Plan(precision="bf16", **plan), preset("gpt2-small"), {"data": 1}, **given)
    plain, selective = of(), of(remat="selective")
    block = (plain.memory.total - selective.memory.total) // 12
    for blocks in (1, 5, 11):
        found = of(memory=plain.memory.total - blocks * block)
        assert f"remat='selective' in {blocks} of 12 blocks" in found.notes[-1]
        assert 0 <= plain.memory.total - blocks * block - found.memory.total < block
        assert found.recomputed_flops_per_token == blocks * selective.recomputed_flops_per_token // 12
    json.dumps(found.to_dict())
    model = replace(preset("gpt2-small"), scan_layers=True)
    of = lambda **plan: predict(ax.Plan(precision="bf16", **plan), model, {"data": 1}, **given)
    looped = of(memory=of().memory.total - block)
    assert "in 1 of 3 thirds of the loop's block" in looped.notes[-1]
