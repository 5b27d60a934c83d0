"""The planner without devices: every legal plan, prices that follow theory, what fits, and what is said of the rest."""

import contextlib
import json
import math
import re
from dataclasses import replace

import jax
import pytest
from int8_strategy import Int8Shard
from predicted_steps import GPT, LLAMA, config
from ring_strategy import RingShard

import axonml_jax as ax
from axonml_jax.ledger.count import collectives_in
from axonml_jax.ledger.predict import REMATS, difference, memory_difference
from axonml_jax.models.config import preset
from axonml_jax.pipeline.schedules import PipelineSchedule
from axonml_jax.planner.hardware import HARDWARE, Assumptions, Hardware, hardware
from axonml_jax.planner.search import candidate, candidates, divisors, exactly, legal_meshes, meshes, quick, ways_on
from axonml_jax.planner.verify import abstract_step

SMALL = config(GPT, hidden_size=64, mlp_hidden_size=256, num_heads=4, num_layers=4, vocab_size=512, max_length=64)

TINY = Hardware(
    name="tiny",
    flops=1e12,
    memory=2**24,
    memory_bandwidth=1e11,
    link=1e9,
    island=4,
    cross=1e8,
    latency=0,
    cross_latency=0,
)


def test_every_mesh_multiplies_to_the_number_of_devices_once():
    found = [tuple(mesh.values()) for mesh in meshes(12, ("data", "pipe", "fsdp"))]
    assert len(found) == len(set(found)) == 18 and all(math.prod(each) == 12 for each in found)
    assert divisors(97) == (1, 97)


@pytest.mark.parametrize("num_devices", [1, 6, 8, 7])
def test_every_candidate_is_legal_for_the_ledger_or_refused_by_the_schedule(num_devices):
    model = config(LLAMA, num_layers=4)
    for each in list(candidates(model, num_devices, global_batch=24, length=16))[::7]:
        assert math.prod(each.mesh.values()) == num_devices
        try:
            found = ax.explain(each.plan(), model=each.model(model), mesh=each.mesh, global_batch=24, length=16)
        except ValueError as error:
            assert each.schedule is PipelineSchedule.INTERLEAVED_ONE_F_ONE_B, f"{each}: {error}"
        else:
            assert found.memory.total > 0


def test_the_enumeration_has_every_kind_of_plan():
    found = list(candidates(config(LLAMA, num_layers=4), 8, global_batch=16, length=16))
    assert len(found) == len(set(found)) > 500
    assert {each.stage for each in found} == {0, 1, 2, 3}
    assert {each.remat for each in found} == {None, "full", "selective"}
    assert {each.schedule for each in found} >= {None, *list(PipelineSchedule)[:3]}
    assert {axis for each in found for axis, _ in each.degrees} == {
        "data",
        "pipe",
        "fsdp",
        "depth",
        "row",
        "col",
        "tensor",
    }
    assert any(each.sequence_parallel for each in found) and any(each.chunks == 2 for each in found)


def test_small_models_are_replicated_or_sharded_and_never_split():
    answer = ax.plan(preset("gpt2-small"), num_devices=8, hardware="h100", global_batch=64)
    assert {axis for axis, _ in answer.best.candidate.degrees} <= {"data", "fsdp"}
    times = [one.price.time for one in (answer.best, *answer.runners_up)]
    masked = answer.prediction.masked_flops_per_token / answer.prediction.flops_per_token
    assert times == sorted(times) and answer.best.price.mfu * (1 - masked) < 0.5
    assert answer.plan.mesh.size == 8 and answer.prediction.memory.total == answer.best.price.memory


@pytest.mark.slow
def test_what_does_not_fit_is_dropped_and_nothing_at_all_says_why():
    model = preset("llama3-8b")
    answer = ax.plan(model, num_devices=64, hardware="v5e", global_batch=64)
    assert answer.best.price.memory <= 16 * 2**30 * 0.9
    assert sum(answer.dropped.values()) > 0 and answer.illegal
    tight = ax.plan(model, num_devices=64, hardware="v5e", global_batch=64, max_memory=6 * 2**30)
    assert tight.best.price.memory <= 6 * 2**30 and tight.best.price.time >= answer.best.price.time
    with pytest.raises(
        ValueError, match=r"no plan of 8,030,261,248 .* does not fit in a device's memory.*Use more devices"
    ):
        ax.plan(model, num_devices=8, hardware="v5e", global_batch=8)


@pytest.mark.parametrize(
    ("axes", "precision", "layer_overlap"),
    [
        (("data", "fsdp", "tensor"), "float32", 0.6),
        (("data", "fsdp", "pipe"), "bf16-reduce", 0.0),
        (("depth", "row", "col"), "bf16", 0.6),
    ],
)
def test_the_first_price_is_near_the_ledgers(axes, precision, layer_overlap):
    """Seconds and bytes of every way, so that what is best by the first price is best, or nearly."""
    given = {"num_devices": 8, "hardware": replace(TINY, memory=2**40), "global_batch": 16, "axes": axes}
    assumptions = Assumptions(layer_overlap=layer_overlap)
    asked = ax.plan(SMALL, assumptions=assumptions, precision=precision, **given).asked
    for degrees in legal_meshes(SMALL, 8, global_batch=16, length=64, axes=axes):
        ways = ways_on(SMALL, degrees, 16, 64)
        for way, seconds, held in zip(ways, *quick([(degrees, ways)], asked)[0], strict=True):
            with contextlib.suppress(ValueError):  # a schedule that refuses these sizes
                found = exactly(asked, candidate(degrees, way)).price
                assert 0.9 < seconds / found.time < 1.03 and 0.88 < held / found.memory < 1.01, (degrees, way)


@pytest.mark.parametrize("axes", [("fsdp", "tensor"), ("data", "pipe"), ("fsdp", "pipe")], ids="-".join)
def test_however_little_memory_the_best_of_all_plans_is_found(axes):
    """Against every legal plan priced exactly, from what the leanest needs upwards."""
    given = {"num_devices": 4, "hardware": replace(TINY, memory=2**40), "global_batch": 8, "axes": axes}
    asked, found = ax.plan(SMALL, **given).asked, []
    legal = list(candidates(SMALL, 4, global_batch=8, length=64, axes=axes))
    for each in legal:
        with contextlib.suppress(ValueError):  # a schedule that refuses these sizes
            found.append(exactly(asked, each))
    held = sorted(one.price.memory for one in found)
    assert len(found) > 40
    for limit in (held[0], held[1], held[5], held[len(held) // 50 + 1], held[len(held) // 10], held[len(held) // 3]):
        budgets = [
            replace(each, remat=None, memory=limit) for each in legal if each.remat == "full" and not each.schedule
        ]
        among = [*found, *(exactly(asked, each) for each in budgets)]
        best = min(one.price.time for one in among if one.price.memory <= limit)
        chosen = ax.plan(SMALL, max_memory=limit, **given).best.price
        assert chosen.memory <= limit and chosen.time <= 1.03 * best


@pytest.mark.parametrize("precision", ["bf16", "bf16-reduce", ax.Precision(param="bfloat16", reduce="bfloat16")])
def test_a_plan_that_just_fits_is_found_in_every_precision(precision):
    given = {"num_devices": 1, "hardware": replace(TINY, memory=2**40), "global_batch": 1, "precision": precision}
    needed = ax.plan(config(GPT), **given).best.price.memory
    least = min(needed, *(one.price.memory for one in ax.plan(config(GPT), **given).runners_up))
    assert ax.plan(config(GPT), max_memory=least, **given).best.price.memory == least


def test_slow_links_between_islands_make_plans_that_send_less_across():
    model = config(GPT, hidden_size=512, mlp_hidden_size=2048, num_heads=8, num_layers=4, vocab_size=512, max_length=64)
    roomy = replace(TINY, memory=2**40)
    given = {"num_devices": 16, "global_batch": 64, "precision": None}
    slow = ax.plan(model, hardware=roomy, **given).best
    fast = ax.plan(model, hardware=replace(roomy, cross=1e9), **given).best
    assert fast.price.time < slow.price.time
    assert slow.price.exposed <= ax.plan(model, hardware=roomy, axes=("fsdp",), **given).best.price.exposed


def test_a_users_strategy_is_found_where_it_is_the_best():
    """Over slow links a gather of int8 values beats one of float32; a ring of permutes sends what an all-gather sends."""
    slow = replace(TINY, link=2e7, cross=2e7, memory=2**22)
    asked = {
        "num_devices": 4,
        "hardware": slow,
        "global_batch": 4,
        "precision": None,
        "axes": ("fsdp",),
        "runners_up": 99,
    }
    usual, offered = ax.plan(SMALL, **asked), ax.plan(SMALL, **asked, strategies=[Int8Shard(), RingShard()])
    assert (
        isinstance(offered.best.candidate.strategy, Int8Shard) and offered.best.price.time < 0.9 * usual.best.price.time
    )
    assert isinstance(offered.best.candidate.plan().fsdp, Int8Shard) and "Int8Shard over fsdp" in str(offered)
    found = [offered.best, *offered.runners_up]
    assert {type(each.candidate.strategy) for each in found} == {type(None), Int8Shard, RingShard}
    rings = {replace(e.candidate, strategy=None): e for e in found if isinstance(e.candidate.strategy, RingShard)}
    same = [each for each in found if each.candidate in rings]
    assert same and all(e.prediction.total_bytes == rings[e.candidate].prediction.total_bytes for e in same)


def test_a_strategy_that_does_not_shard_is_no_choice_along_fsdp():
    with pytest.raises(ValueError, match=r"strategies: Replicate\(.*shard parameters at rest and split rows"):
        ax.plan(SMALL, num_devices=4, hardware=TINY, global_batch=4, strategies=[ax.Replicate()])


def test_bandwidth_across_nodes_is_shared():
    """AxoNN: the node's link over min(GPUs per node, product of inner groups)."""
    a100 = hardware("a100")
    assert a100.bandwidth(8, 1) == a100.link and a100.bandwidth(2, 4) == a100.link
    assert a100.bandwidth(2, 8) == a100.cross  # every GPU of a node talks to another node at once
    assert a100.bandwidth(16, 1) == min(a100.link, 8 * a100.cross)  # one ring through the node
    assert a100.bandwidth(8, 4) == 2 * a100.cross


def test_every_figure_of_the_table_has_a_source():
    assert set(HARDWARE) == {"v4", "v5e", "v5p", "v6e", "a100", "h100", "h200"}
    for each in HARDWARE.values():
        figures = {"flops", "memory", "memory_bandwidth", "link", "island", "cross", "host_link"}
        figures |= {"torus"} if each.platform == "tpu" else set()
        figures |= {"reached", "score_seconds", "passes_reached"} if each.reached else set()
        assert set(each.sources) == figures
    peaks = {"v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "a100": 312e12, "h100": 989e12, "h200": 989e12}
    assert {name: each.flops for name, each in HARDWARE.items()} == peaks
    with pytest.raises(ValueError, match="hardware 'v9' is not in the table: choose one of v4"):
        hardware("v9")


def test_a_platform_has_one_name_and_others_are_refused():
    assert replace(TINY, platform="gpu") == replace(TINY, platform="cuda")
    for name in ("rocm", "v5p", "CUDA"):
        with pytest.raises(ValueError, match=f"platform='{name}' must be 'tpu', 'cuda', 'cpu', or None"):
            replace(TINY, platform=name)


def test_assumptions_are_checked_and_change_the_price():
    with pytest.raises(ValueError, match="shares lie between 0 and 1"):
        Assumptions(overlap=1.5)
    model, given = preset("gpt2-small"), {"num_devices": 8, "hardware": "a100", "global_batch": 8}
    hidden = ax.plan(model, **given).best.price
    bare = ax.plan(model, assumptions=Assumptions(overlap=0.0), **given).best.price
    assert bare.time > hidden.time and bare.compute == hidden.compute


@pytest.mark.slow
def test_a_pod_is_planned():
    answer = ax.plan(preset("llama3-70b"), num_devices=256, hardware="v5p", global_batch=256)
    assert answer.best.price.mfu > 0.3


def test_an_answer_prints_and_goes_to_json():
    answer = ax.plan(preset("gpt2-small"), num_devices=6, hardware="v5e", global_batch=12)
    for words in ("best: ", "ms/step", "nothing overlaps", "tokens per second", "assumed: products reach"):
        assert words in str(answer)
    plain = json.loads(answer.to_json())
    assert plain["best"]["mesh"] == answer.best.candidate.mesh and len(plain["runners_up"]) == 5


WRONG_SIZES = (0, -1.0, 0.9, "16 apples", math.inf, [1])
MEMORY = "must be bytes of a device, as '16GiB' or 80e9"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_devices": 0}, "num_devices"),
        ({"global_batch": 0}, "global_batch"),
        ({"length": 9999}, r"length=9999: sequences are longer than the model's \d+ \(its max_length\)"),
        *(({"max_memory": size}, re.escape(f"max_memory={size!r} {MEMORY}")) for size in WRONG_SIZES),
        ({"remats": ()}, r"remats=\[\] must be a sequence of some of None, 'selective', 'full'"),
        ({"remats": "full"}, "remats='full' must be a sequence"),
        ({"remats": None}, "remats=None must be a sequence"),
        ({"remats": ["all"]}, r"remats=\['all'\]: 'all' is none of the remats that are searched"),
        ({"axes": "data"}, "axes='data' must be a sequence of some of 'data', 'pipe'"),
        ({"axes": ()}, r"axes=\[\] must be a sequence"),
        ({"runners_up": -1}, "runners_up=-1 must be how many of the next best to keep, 0 or more"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_search(given, message, monkeypatch):
    monkeypatch.setattr("axonml_jax.planner.search._search", None)
    with pytest.raises(ValueError, match=message):
        ax.plan(config(GPT), **{"num_devices": 2, "global_batch": 2, **given})
    with pytest.raises(TypeError, match="give a TransformerConfig"):
        ax.plan(object(), num_devices=2, global_batch=2)


def test_a_budget_is_bytes_in_words_or_a_number():
    given = {"num_devices": 2, "global_batch": 2, "axes": ("data",)}
    assert ax.plan(config(GPT), max_memory="16MiB", **given) == ax.plan(config(GPT), max_memory=2**24, **given)


LONG = config(LLAMA, num_layers=4, hidden_size=64, mlp_hidden_size=128, max_length=2**14, scan_layers=True)


CPU = replace(TINY, memory=2**40, platform="cpu")


def cheapest(asked, axes):
    """The bytes of the leanest plan on these axes, by method."""
    held = {}
    for each in candidates(asked.model, asked.num_devices, global_batch=asked.global_batch, length=2**14, axes=axes):
        held.setdefault(each.method, []).append(exactly(asked, each).price.memory)
    return {method: min(sizes) for method, sizes in held.items()}


@pytest.mark.slow
def test_sequences_are_split_where_they_do_not_fit_otherwise_and_that_compiles_and_sends_what_is_priced():
    given = {
        "num_devices": 4,
        "hardware": CPU,
        "global_batch": 4,
        "axes": ("data", "fsdp", "context"),
        "remats": ("full",),
    }
    roomy = ax.plan(LONG, **given)
    assert roomy.best.candidate.method is None
    found = ax.plan(LONG, max_memory=cheapest(roomy.asked, ("data", "fsdp"))[None] - 1, **given)
    best = found.best.candidate
    assert best.degree("context") > 1 and f"attention by {best.method}" in str(found)
    assert found.plan.context.method == best.method
    mesh = ax.make_mesh(devices=jax.devices()[:4], **best.mesh)
    step, state, batch = abstract_step(found.plan, found.model, mesh, 4, 2**14)
    traced = step.trace(state, batch)
    assert [
        each for each in difference(found.prediction, collectives_in(traced.jaxpr)) if each.label == "attention"
    ] == []
    resting = memory_difference(found.prediction, traced.lower().compile()).ratios[0]
    assert abs(resting - 1) < 0.02  # of temporaries see test_ledger_difference.py


def test_a_ring_is_chosen_where_gathered_keys_do_not_fit():
    given = {"num_devices": 16, "hardware": CPU, "global_batch": 1, "axes": ("context",)}
    model = replace(LONG, num_heads=1, num_kv_heads=1)  # no ranks split one head
    roomy = ax.plan(model, **given)
    held = cheapest(roomy.asked, given["axes"])
    assert held["ring"] < held["gather"] and roomy.best.candidate.method == "gather"
    assert ax.plan(model, max_memory=held["ring"], **given).best.candidate.method == "ring"


@pytest.mark.slow
def test_parts_of_sequences_that_are_too_short_or_do_not_divide_are_not_tried():
    answer = ax.plan(LONG, num_devices=32, hardware=replace(TINY, memory=2**40), global_batch=32)
    assert answer.illegal["fewer than 1,024 positions on a rank of context"]
    with pytest.raises(ValueError, match="times: positions do not divide over twice the ranks of context"):
        ax.plan(LONG, num_devices=4, hardware=TINY, global_batch=1, length=2**14 - 4, axes=("context",))


def test_between_two_words_of_recomputation_memory_is_filled_and_time_saved(tmp_path):
    given = {"num_devices": 4, "hardware": replace(TINY, memory=2**40), "global_batch": 8, "axes": ("fsdp",)}
    words = {remat: ax.plan(SMALL, remats=[remat], **given).best.price for remat in REMATS}
    assert words["full"].memory < words[None].memory and words[None].time < words["full"].time
    least = ax.plan(SMALL, remats=["full"], **given).best.candidate
    limit = int(exactly(ax.plan(SMALL, **given).asked, replace(least, remat="selective")).price.memory) - 1
    answer = ax.plan(SMALL, max_memory=limit, **given)
    inside = [one for one in (answer.best, *answer.runners_up) if one.candidate.memory is not None]
    assert inside and all(one.price.memory <= limit and one.candidate.plan().memory == limit for one in inside)
    assert "recomputation within" in str(inside[0].candidate) and "blocks" in inside[0].prediction.notes[-1]
    assert json.loads(answer.to_json())["best"]["memory"] <= limit
