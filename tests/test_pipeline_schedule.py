"""Schedules print the orders that papers and PyTorch print, read them back, and refuse what cannot be run."""

import ast
from pathlib import Path

import pytest
from pipeline_cases import accepted

import axonml_jax as ax
from axonml_jax.pipeline.schedules import SCHEDULES, Interleaved, OneFOneB, ZeroBubble, make_schedule, make_timetable
from axonml_jax.pipeline.simulate import choose
from axonml_jax.pipeline.timetable import Action, format_orders, parse_orders

PIPELINE = Path(__file__).resolve().parents[1] / "axonml_jax" / "pipeline"
FREE_OF_JAX = ("timetable", "schedules", "simulate")

# As numbers.md and PyTorch 2.13 have them; the stage is left out where a rank has one.
PUBLISHED = {
    ("1f1b", 4, 8, 1, 0): "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    ("1f1b", 4, 8, 1, 3): "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ("1f1b", 4, 2, 1, 0): "F0 F1 B0 B1",
    ("gpipe", 3, 4, 1, 1): "F0 F1 F2 F3 B0 B1 B2 B3",
    ("gpipe", 2, 2, 2, 0): "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    ("interleaved", 2, 4, 2, 0): "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    ("interleaved", 2, 4, 2, 1): "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    # Figure 2 of Qi et al.: the first rank does W at once, the last one defers three.
    ("zero-bubble", 4, 8, 1, 0): "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7",
    ("zero-bubble", 4, 8, 1, 3): "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
}

REFUSED = {
    ("interleaved", 4, 8, 1): "num_chunks=1 must be at least 2; with one chunk take ONE_F_ONE_B",
    ("interleaved", 1, 8, 2): "num_ranks=1 must be at least 2.*take GPIPE",
    ("interleaved", 1, 8, 1): "num_ranks=1 .*; num_chunks=1 ",
    ("1f1b", 4, 8, 2): "num_chunks=2 must be 1.*take INTERLEAVED_ONE_F_ONE_B",
    ("zero-bubble", 4, 8, 2): "num_chunks=2 must be 1",
    ("gpipe", 0, 8, 1): "num_ranks=0 must be a positive whole number",
    ("gpipe", 4, 0, -1): "num_microbatches=0 .*; num_chunks=-1 must be",
    ("1f1b", 4, 2.5, 1): "num_microbatches=2.5",
    ("1f1b", True, 2, 1): "num_ranks=True",
    ("1f2b", 4, 8, 1): "schedule='1f2b' is none of GPIPE \\('gpipe'\\), ONE_F_ONE_B",
    (None, 4, 8, 1): "schedule=None is none of",
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_classic_orders_are_the_published_ones(case):
    *size, rank = case
    words = [word if word[0].isdigit() else f"{rank}{word}" for word in PUBLISHED[case].split()]
    assert list(map(str, make_schedule(*size).order(rank))) == words


def test_warm_ups_are_megatrons():
    interleaved = Interleaved(4, 8, 2)
    assert [interleaved.warmup(rank) for rank in range(4)] == [10, 8, 6, 4]
    for rank, order in enumerate(interleaved.orders):
        assert [action.work for action in order].index("B") == interleaved.warmup(rank) + 1
    assert [interleaved.warmup(0) for interleaved in (Interleaved(4, 4, 2), Interleaved(4, 4, 4))] == [8, 16]
    for rank, order in enumerate(OneFOneB(4, 8).orders):
        assert [action.work for action in order].index("B") == 4 - rank


def test_zero_bubble_h2_warms_up_longer_and_defers_more():
    first = " ".join(map(str, ZeroBubble(4, 8, 1, "H2").order(0)))
    assert first.startswith("0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0W0 0F7 0I1 0W1 0I2")
    assert [a.work for a in ZeroBubble(4, 8, 1, "H2").order(3)].index("W") == 14


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_order_does_everything_once_on_the_right_rank(ranks):
    for schedule in accepted(ranks, 2 * ranks + 2, 3):
        works = "FIW" if isinstance(schedule, ZeroBubble) else "FB"
        for rank, order in enumerate(schedule.orders):
            wanted = {
                Action(stage, work, m)
                for stage in range(schedule.num_stages)
                if stage % ranks == rank
                for work in works
                for m in range(schedule.num_microbatches)
            }
            assert len(order) == len(wanted) and set(order) == wanted


def test_orders_print_and_parse():
    for schedule in accepted(3, 6, 3):
        assert parse_orders(format_orders(schedule.orders)) == schedule.orders
    assert parse_orders("0F0 0B0\n\n-\n") == ((Action(0, "F", 0), Action(0, "B", 0)), ())


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "-1F0", "0F0 ", "0f0", "0F1.5"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action: write stage, one of F, B, I, W"):
        Action.parse(text)


def test_the_line_of_a_wrong_action_is_named():
    with pytest.raises(ValueError, match="line 2: '1G0' is no action"):
        parse_orders("0F0\n1G0")


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_run_is_refused_with_rule_and_remedy(case):
    with pytest.raises(ValueError, match=REFUSED[case]):
        make_schedule(*case)


@pytest.mark.parametrize(("microbatches", "near"), [(6, "4 or 8"), (3, "4")])
def test_interleaved_has_a_classic_order_for_whole_groups_alone(microbatches, near):
    schedule = make_schedule("interleaved", 4, microbatches, 2)
    words = f"num_microbatches={microbatches} must be a multiple of num_ranks=4.*take {near}, or fused rows"
    with pytest.raises(ValueError, match=words):
        schedule.order(0)
    with pytest.raises(ValueError, match=words):
        make_timetable(schedule, "alternating")
    assert schedule.ideal_makespan(1, 1, 1) is None and make_timetable(schedule).num_microbatches == microbatches
    stats = ax.PipelineMemoryStats.of("interleaved", 4, microbatches, 2)
    assert stats.classic is None and stats.classic_bytes is None
    assert stats.allocated == make_timetable(schedule).residuals.size
    choice = choose(4, microbatches, 2, schedules=["interleaved"])
    assert [found.rows for found in choice.candidates] == [
        "fused"
    ] and "in alternating rows: num_micro" in choice.reason


def test_variants_are_of_zero_bubble_alone():
    assert make_schedule("zero-bubble", 4, 8, variant="H2") == ZeroBubble(4, 8, 1, "H2")
    with pytest.raises(ValueError, match="variant='H2' is for ZERO_BUBBLE; GPIPE has none"):
        make_schedule("gpipe", 4, 8, variant="H2")
    with pytest.raises(ValueError, match="variant='H3' must be 'H1' or 'H2'"):
        make_schedule("zero-bubble", 4, 8, variant="H3")


def test_every_schedule_has_a_room_and_its_names():
    assert set(SCHEDULES) == set(ax.PipelineSchedule)
    for schedule in ax.PipelineSchedule:
        for spelled in (schedule, schedule.value, schedule.name, schedule.name.lower()):
            assert ax.PipelineSchedule.of(spelled) is schedule


@pytest.mark.parametrize("name", FREE_OF_JAX)
def test_schedules_and_timetables_are_free_of_jax(name):
    imported = {
        module.split(".")[0] if not module.startswith("axonml_jax") else module
        for node in ast.walk(ast.parse((PIPELINE / f"{name}.py").read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    ours = {"axonml_jax.base", "axonml_jax.mesh.axes", *(f"axonml_jax.pipeline.{other}" for other in FREE_OF_JAX)}
    assert imported <= {
        "abc",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "html",
        "itertools",
        "math",
        "numbers",
    } | {
        "numpy",
        "re",
        "typing",
        *ours,
    }
