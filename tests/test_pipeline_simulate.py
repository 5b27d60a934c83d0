"""The simulator agrees with the published formulas, names deadlocks, and picks what is really faster."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import accepted, interleaved_schedules, one_chunk_schedules

import axonml_jax as ax
from axonml_jax.pipeline.schedules import GPipe, Interleaved, OneFOneB, ZeroBubble, make_timetable
from axonml_jax.pipeline.simulate import choose, simulate
from axonml_jax.pipeline.timetable import (
    Action,
    DeadlockError,
    StageCosts,
    Timetable,
    parse_orders,
    trace_orders,
    trace_ticks,
)

UNEVEN = StageCosts(2, 3, 1)  # F = 2, I = 3, W = 1: whole numbers, so that times are exact
PAIRS = [ax.PipelineSchedule.GPIPE, ax.PipelineSchedule.ONE_F_ONE_B]


def published(schedule, forward, given, weight):
    """Time by numbers.md, written apart from the package; None where the paper's condition does not hold."""
    s, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks
    if not isinstance(schedule, ZeroBubble):
        return (v * m + s - 1) * (forward + given + weight)
    deferred = {"H1": 1, "H2": 2}[schedule.variant]
    bubble = (s - 1) * (forward + given - deferred * weight)
    return m * (forward + given + weight) + bubble if m > deferred * (s - 1) else None


@pytest.mark.parametrize("ranks", range(1, 17))
def test_classic_orders_take_the_published_time_and_memory(ranks):
    """All S <= 16, M <= 64, V <= 4 (zero-bubble: until its bubble is constant, then every sixth M)."""
    for m in range(1, 65):
        for schedule in one_chunk_schedules(ranks, m)[: 2 if m > 2 * ranks and m % 6 else 4]:
            found = simulate(schedule.orders, UNEVEN)
            ideal = published(schedule, 2, 3, 1)
            assert schedule.ideal_makespan(2, 3, 1) == ideal and found.makespan == (ideal or found.makespan)
            assert found.bubble_fraction == (ranks * found.makespan - ranks * m * 6) / (ranks * m * 6)
            if isinstance(schedule, ZeroBubble):
                limit = ranks if schedule.variant == "H1" else 2 * ranks - 1
                assert found.peak_activations == (min(m, limit),) * ranks
            elif isinstance(schedule, OneFOneB):
                assert found.bubble_fraction == (ranks - 1) / m
                assert found.peak_activations == tuple(min(m, ranks - r) for r in range(ranks))
            else:
                assert found.bubble_fraction == (ranks - 1) / m and found.peak_activations == (m,) * ranks
    for schedule in interleaved_schedules(ranks, 64, 4):
        found = simulate(schedule.orders, UNEVEN)
        passes = schedule.num_chunks * schedule.num_microbatches
        assert found.makespan == schedule.ideal_makespan(2, 3, 1) == published(schedule, 2, 3, 1)
        assert found.bubble_fraction == (ranks - 1) / passes
        assert found.peak_activations == tuple(min(schedule.warmup(r) + 1, passes) for r in range(ranks))


@pytest.mark.parametrize("ranks", range(1, 17))
def test_fused_rows_lose_nothing_against_the_classic_order(ranks):
    for m in range(1, 65):
        gpipe, fused, h1, _ = (simulate(make_timetable(s), UNEVEN) for s in one_chunk_schedules(ranks, m))
        assert gpipe.makespan == fused.makespan == (m + ranks - 1) * 6
        assert gpipe.bubble_fraction == fused.bubble_fraction == (ranks - 1) / m
        # W stands in M ticks of all ranks, so that ticks that fill and drain the pipeline are without it.
        assert h1.makespan == (m + ranks - 1) * 5 + m
    for schedule in interleaved_schedules(ranks, 64, 4):
        found = simulate(make_timetable(schedule), UNEVEN)
        passes = schedule.num_chunks * schedule.num_microbatches
        assert found.makespan == (passes + ranks - 1) * 6 and found.bubble_fraction == (ranks - 1) / passes


@pytest.mark.parametrize("ranks", range(2, 9))
def test_gpipe_with_chunks_has_the_interleaved_bubble(ranks):
    for m in (ranks, 2 * ranks + 1, 40):
        for chunks in (2, 4):
            schedule = GPipe(ranks, m, chunks)
            for work in (schedule.orders, make_timetable(schedule)):
                assert simulate(work, UNEVEN).makespan == schedule.ideal_makespan(2, 3, 1)
    few = GPipe(ranks, ranks - 1, 2)
    assert few.ideal_makespan(2, 3, 1) is None and simulate(few.orders).makespan > 0


@pytest.mark.parametrize(("variant", "late"), [("H1", 1), ("H2", 2)])
@pytest.mark.parametrize(
    "times", [(1, 1, 1), (1, 2, 1), (3, 2, 2), (2, 3, 2), (5, 5, 1), (1, 1, 2), (4, 1, 3)], ids=str
)
def test_zero_bubbles_formula_holds_for_any_times_that_it_claims(variant, late, times):
    for ranks in range(1, 7):
        for m in range(1, 3 * ranks):
            schedule = ZeroBubble(ranks, m, 1, variant)
            ideal = schedule.ideal_makespan(*times)
            found = simulate(schedule.orders, StageCosts(*times)).makespan
            assert found >= m * sum(times) + (ranks - 1) * (times[0] + times[1] - late * times[2])
            assert found == (found if ideal is None else ideal)
            assert (ideal is None) == (m <= late * (ranks - 1) or times[2] > min(times[:2]))


def test_published_figures_of_four_stages_and_eight_microbatches():
    orders = {"1F1B": OneFOneB(4, 8), "ZB-H1": ZeroBubble(4, 8), "ZB-H2": ZeroBubble(4, 8, 1, "H2")}
    found = {name: simulate(schedule.orders) for name, schedule in orders.items()}
    assert {name: run.makespan for name, run in found.items()} == {"1F1B": 33, "ZB-H1": 27, "ZB-H2": 24}
    assert {name: max(run.peak_activations) for name, run in found.items()} == {"1F1B": 4, "ZB-H1": 4, "ZB-H2": 7}
    # ZB-H2 has no bubble on any rank, but the ranks end one after another.
    assert (found["ZB-H2"].bubble_fraction, found["ZB-H2"].finish, found["ZB-H1"].finish) == (0, 27, 27)


def test_alternating_rows_are_slower_where_a_backward_is_longer():
    classic = simulate(OneFOneB(4, 32).orders).makespan
    alternating = simulate(make_timetable(OneFOneB(4, 32), "alternating"))
    assert 1.25 < alternating.makespan / classic < 1.4 and alternating.peak_activations == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0 0B1 0F1 0B0\n1F0 1B0 1F1 1B1",
            "rank 0 stands at 0B1 and waits for 0F1, which rank 0 does after 0B1; "
            "rank 0 stands at 0B1 and waits for 1B1, which rank 1 does after 1F1; "
            "rank 1 stands at 1F1 and waits for 0F1, which rank 0 does after 0B1",
        ),
        ("0F0 0B0\n1B0", "rank 1 stands at 1B0 and waits for 1F0, which nobody does"),
        ("0F0 0I0\n1W0 1F0 1I0", "rank 0 stands at 0I0 and waits for 1I0, which rank 1 does after 1W0"),
        ("1F0 0F0", "rank 0 stands at 1F0 and waits for 0F0, which rank 0 does after 1F0"),
        ("0B0\n0F0 1F0 1W0", "rank 0 stands at 0B0 and waits for 1B0, which nobody does"),
    ],
)
def test_deadlocks_name_who_waits_for_whom(text, words):
    with pytest.raises(DeadlockError) as caught:
        simulate(parse_orders(text))
    assert words in str(caught.value) and isinstance(caught.value, ValueError)


def test_two_ranks_that_wait_for_each_other_are_named_both():
    swapped = "0F0 2F0 0F1\n1F1 1F0"
    with pytest.raises(DeadlockError, match=r"rank 0 stands at 2F0 .* 1F0.*; rank 1 stands at 1F1 .* 0F1"):
        simulate(parse_orders(swapped))


@given(st.permutations([Action(p, w, m) for p in (0, 1) for w in "FB" for m in (0, 1)]), st.integers(0, 8))
@settings(max_examples=150, deadline=None)
def test_any_order_is_run_or_refused(actions, cut):
    """An order by chance: it runs exactly when no circle of waiting actions exists."""
    orders = (actions[:cut], actions[cut:])
    before = {a: set(a.needs(2)) for a in actions}
    for order in orders:
        for earlier, later in pairwise(order):
            before[later].add(earlier)
    done: set[Action] = set()
    while ready := {a for a, needs in before.items() if a not in done and needs <= done}:
        done |= ready
    if len(done) == len(actions):
        events = [event for here in trace_orders(orders, StageCosts(1, 1, 1, 0.5)) for event in here]
        ends = {event.action: event.end for event in events}
        assert all(event.start >= ends[need] for event in events for need in before[event.action])
    else:
        with pytest.raises(DeadlockError, match="stands at"):
            simulate(orders)


def test_an_action_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match=r"done twice \(I is a part of B\): 0B0"):
        simulate(parse_orders("0F0 0B0 0I0"))


def test_sending_costs_what_it_costs():
    orders = OneFOneB(2, 1).orders
    assert simulate(orders, StageCosts(communication=5)).makespan == 6 + 2 * 5  # there and back, once each
    assert simulate(make_timetable(OneFOneB(2, 1)), StageCosts(communication=5)).makespan == 6 + 3 * 5  # every tick
    assert simulate(GPipe(1, 4).orders, StageCosts(communication=5)).makespan == 12  # nothing leaves the rank


def test_stages_of_different_cost_set_the_pace():
    costs = StageCosts((1, 4, 1), (1, 4, 1), (1, 4, 1))
    for work in (OneFOneB(3, 40).orders, make_timetable(OneFOneB(3, 40))):
        found = simulate(work, costs)
        assert found.busy == (120, 480, 120) and 480 < found.makespan < 500
    assert StageCosts(np.arange(1, 4), np.float32(2)) == StageCosts((1, 2, 3), 2.0)
    assert StageCosts((1, 2, 3, 4), 5, (6, 7, 8, 9), 1).merged(4, 2) == StageCosts((3, 7), (10, 10), (13, 17), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StageCosts(-1), "forward=-1: a time is a finite number, 0 or more"),
        (lambda: StageCosts(1, (1, -2)), "input_gradient"),
        (lambda: StageCosts(np.array([1.0, -2.0])), r"forward=\(1.0, -2.0\): a time is a finite number, 0 or more"),
        (lambda: StageCosts(np.ones((2, 2))), r"forward=\(\[1.0, 1.0\], \[1.0, 1.0\]\): a time is a finite number"),
        (lambda: Timetable(0, ((0, 1),)), "no timetable: num_ranks=0 must be at least 1"),
        (lambda: StageCosts((1, 2), (1, 2, 3)), "must have one time per stage each"),
        (lambda: simulate(OneFOneB(2, 2).orders, StageCosts((1, 2, 3))), "times for 3 stages, the pipeline has 2"),
        (
            lambda: simulate(make_timetable(GPipe(2, 2)), StageCosts((1, 2, 3))),
            "times for 3 stages, the pipeline has 2",
        ),
    ],
)
def test_wrong_costs_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("ranks", range(1, 5))
def test_events_agree_with_the_figures(ranks):
    for schedule in accepted(ranks, ranks + 2, 2):
        for rows in ("fused", "alternating"):
            timetable = make_timetable(schedule, rows)
            found, events = simulate(timetable, UNEVEN), trace_ticks(timetable, UNEVEN)
            assert max(event.end for here in events for event in here) == found.makespan
            assert tuple(sum(event.end - event.start for event in here) for here in events) == found.busy
            for here in events:
                assert all(one.end <= other.start for one, other in pairwise(here))


def test_the_choice_is_what_is_really_faster_and_says_why():
    plain = choose(4, 8)
    assert str(plain.best) == "ONE_F_ONE_B in fused rows" and plain.best.timetable == make_timetable(OneFOneB(4, 8))
    assert "ZERO_BUBBLE in fused rows: 15.2% slower" in plain.reason  # W alone computes I again
    assert "GPIPE in fused rows: as fast, but keeps more" in plain.reason
    assert "INTERLEAVED_ONE_F_ONE_B: num_chunks=1 must be at least 2" in plain.reason
    chunked = choose(4, 8, 2)
    assert chunked.best.timetable == make_timetable(Interleaved(4, 8, 2))
    assert chunked.best.makespan == 57 and "ONE_F_ONE_B in fused rows: 15.8% slower, time 66" in chunked.reason
    assert choose(4, 8, split_overhead=0).best.schedule is ax.PipelineSchedule.ZERO_BUBBLE
    assert choose(4, 8, split_overhead=0, schedules=PAIRS).best.schedule is ax.PipelineSchedule.ONE_F_ONE_B


def test_a_choice_keeps_within_its_memory():
    tight = choose(4, 16, max_activations=4)
    assert str(tight.best) == "ONE_F_ONE_B in alternating rows" and tight.best.activations == 4
    assert "ONE_F_ONE_B in fused rows: allocates 7 activations, 4 are allowed" in tight.reason
    with pytest.raises(ValueError, match="no schedule is possible: GPIPE in fused rows: allocates 16"):
        choose(4, 16, max_activations=3)


def test_a_choice_reads_costs_per_stage():
    slow_first = StageCosts((4, 1, 1, 1), (4, 1, 1, 1), (4, 1, 1, 1))
    found = choose(2, 4, 2, costs=slow_first)
    times = {str(candidate): candidate.makespan for candidate in found.candidates}
    # Joined, stages cost (5, 2); in chunks, rank 0 holds costs 4 and 1, rank 1 twice 1.
    assert (
        times["ONE_F_ONE_B in fused rows"]
        == simulate(make_timetable(OneFOneB(2, 4)), StageCosts((5, 2), (5, 2), (5, 2))).makespan
    )
    assert found.best.makespan == min(times.values())
    split = {str(c): c.makespan for c in choose(2, 4, 2, costs=slow_first, split_overhead=0).candidates}
    assert split["ZERO_BUBBLE in fused rows"] < times["ZERO_BUBBLE in fused rows"]
    assert {
        str(c): c.makespan for c in choose(2, 4, 2, costs=slow_first, split_overhead=(4, 1, 1, 1)).candidates
    } == times
    with pytest.raises(ValueError, match="times for 2 stages, the pipeline has 4"):
        choose(2, 4, 2, split_overhead=(1, 1))
    with pytest.raises(ValueError, match="num_chunks=0 must be a positive whole number"):
        choose(2, 4, 0)


def test_memory_stats_have_three_figures_of_one_unit():
    stats = ax.PipelineMemoryStats.of("1f1b", 4, 8, bytes_per_activation=10)
    assert (stats.classic, stats.executed, stats.allocated) == ((4, 3, 2, 1), (7, 5, 3, 1), 7)
    figures = (stats.classic_bytes, stats.executed_bytes, stats.allocated_bytes_per_rank, stats.allocated_bytes)
    assert figures == (100, 160, 70, 280)
    assert ax.PipelineMemoryStats.gpipe_peak_activations(3, 5) == (5, 5, 5)
    assert ax.PipelineMemoryStats.one_f_one_b_peak_activations(4, 2) == (2, 2, 2, 1)
    assert ax.PipelineMemoryStats.of("zero-bubble", 4, 8, variant="H2", rows="alternating").classic == (7, 7, 7, 7)
    with pytest.raises(ValueError, match="num_ranks=0 must be a positive"):
        ax.PipelineMemoryStats.gpipe_peak_activations(0, 4)


@pytest.mark.parametrize("stages", range(1, 17))
def test_allocated_is_at_most_what_the_features_promise(stages):
    for m in (1, stages, 2 * stages, 64):
        assert ax.PipelineMemoryStats.of("1f1b", stages, m).allocated == min(m, 2 * stages - 1)
