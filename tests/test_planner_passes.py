"""What passes over memory and attention's scores cost in the planner, and two steps that one H200 took."""

import dataclasses

import pytest
from predicted_steps import GPT, LLAMA, config

import axonml_jax as ax
from axonml_jax.models.config import preset
from axonml_jax.planner.hardware import HARDWARE, Assumptions
from axonml_jax.planner.price import price

H200 = HARDWARE["h200"]


@pytest.mark.parametrize(
    ("model", "plan", "sizes", "seconds", "within"),
    [
        # The figures in the table of hardware are of this step, which was measured at 30.2 and 30.6 ms.
        (dataclasses.replace(preset("gpt2-small"), vocab_size=50304), {}, (16, 1024), 0.0304, 0.01),
        (dataclasses.replace(preset("llama3-8b"), num_layers=8), {"remat": "selective"}, (2, 8192), 0.460, 0.15),
    ],
    ids=["gpt2-small", "eight layers of llama3-8b"],
)
def test_steps_of_one_h200_take_what_is_predicted(model, plan, sizes, seconds, within):
    rows, length = sizes
    given = {"mesh": {"data": 1}, "global_batch": rows, "length": length, "platform": "cuda"}
    found = ax.explain(ax.Plan(precision="bf16", **plan), model=model, **given)
    assert price(found, H200).time == pytest.approx(seconds, rel=within)


def explained(style=LLAMA, plan=None, mesh=None, platform="cuda", **options):
    model = config(style, num_layers=4, max_length=64, dtype="bfloat16", **options)
    given = {"mesh": mesh or {"data": 1}, "global_batch": 8, "length": 64, "platform": platform}
    return model, ax.explain(plan or ax.Plan(precision="bf16"), model=model, **given)


def by_hand(model, again=1):
    """Numbers that are read and written for one token, array by array."""
    hidden, inner, words = model.hidden_size, model.mlp_size, model.vocab_size
    forward = backward = (
        2 * 4 * hidden
    )  # two norms: what was added and the stream in, their sum and its norm out; and back
    gated = model.activation == "swiglu"
    forward += (3 if gated else 2) * inner
    backward += (5 if gated else 3) * inner
    heads = (model.num_heads + 2 * (model.num_kv_heads or model.num_heads)) * (hidden // model.num_heads)
    forward, backward = forward + 2 * heads, backward + 2 * heads
    scores = model.num_heads * 64
    forward, backward = forward + 2 * scores, backward + 3 * scores
    return model.num_layers * (again * forward + backward) + 3 * words


@pytest.mark.parametrize("style", [LLAMA, GPT], ids=["gated", "gelu"])
@pytest.mark.parametrize("remat", [None, "selective", "full"])
def test_passes_are_those_of_a_block_written_out(style, remat):
    model, found = explained(style, ax.Plan(precision="bf16", remat=remat), attention="xla")
    assert found.passes == 2 * 8 * 64 * by_hand(model, again=1 if remat is None else 2)


def test_ranks_share_passes_as_they_share_tokens_and_layers():
    model, whole = explained(attention="xla")
    _, shared = explained(attention="xla", mesh={"data": 4})
    assert shared.passes == whole.passes / 4
    _, split = explained(attention="xla", mesh={"tensor": 2})
    _, parts = explained(attention="xla", mesh={"tensor": 2}, sequence_parallel=True)
    assert parts.passes == whole.passes / 2 < split.passes < whole.passes  # norms are computed alike, or in parts
    stages = ax.Plan(precision="bf16", pipe=ax.Pipelined(num_microbatches=4))
    _, piped = explained(attention="xla", mesh={"pipe": 2}, plan=stages)
    assert piped.passes == 2 * 8 * 64 * by_hand(model, again=2) / 2  # stages make again what is elementwise


def test_experts_rows_are_passed_over_on_their_way_and_there():
    from axonml_jax.models.config import ExpertsConfig

    _, dense = explained(attention="xla")
    own = {"experts": ExpertsConfig(num_experts=8, top_k=2)}
    model, found = explained(attention="xla", **own)
    more = 4 * (
        8 * model.mlp_size + 2 * 4 * 2 * model.hidden_size
    )  # one inner width more, and two copies there and back
    assert found.passes - dense.passes == 2 * 8 * 64 * more


def test_what_is_between_products_adds_to_them_where_the_hardware_knows_it():
    _, found = explained(attention="xla")
    products = dataclasses.replace(H200, passes_reached=0.0, score_seconds=0.0)
    more = price(found, H200).compute - price(found, products).compute
    assert more == pytest.approx(found.passes / H200.memory_bandwidth / 0.42) and found.pairs_per_token == 0
    model, kernel = explained(head_dim=64)
    assert (
        kernel.pairs_per_token == 4 * model.num_heads * 64
        and kernel.passes < explained(head_dim=64, attention="xla")[1].passes
    )
    scores = dataclasses.replace(products, score_seconds=H200.score_seconds)
    more = price(kernel, scores).compute - price(kernel, products).compute
    assert more == pytest.approx(8 * 64 * kernel.pairs_per_token * 1.42e-12)
    again = explained(plan=ax.Plan(precision="bf16", remat="full"), head_dim=64)[1]
    assert price(again, scores).compute - price(again, products).compute == pytest.approx(more * 4 / 3)


def test_an_efficiency_is_of_products_and_what_was_measured_of_whole_blocks_has_the_rest_in_it():
    assert (Assumptions.on(H200).efficiency, Assumptions.on(H200).passes) == (0.79, 0.42)
    assert (Assumptions.on(H200, 0.5).efficiency, Assumptions.on(H200, 0.5).passes) == (0.5, 0.42)
    here = dataclasses.replace(
        H200, reached=0.3, passes_reached=0.0, score_seconds=0.0
    )  # as `--hardware measure` has it
    _, found = explained()
    products = 8 * 64 * (found.flops_per_token - found.masked_flops_per_token) / (0.3 * H200.flops)
    assert price(found, here).compute == pytest.approx(products)
    nobody = dataclasses.replace(here, reached=None)
    passes = found.passes / (H200.memory_bandwidth * Assumptions.passes)
    assert price(found, nobody).compute == pytest.approx(products * 0.3 / Assumptions.efficiency + passes)
