"""Timetables are correct executions: inputs have arrived, values live in their slots until used, memory is the least."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_cases import PaperExecutor, accepted, interleaved_schedules, one_chunk_schedules

from axonml_jax.pipeline.schedules import GPipe, Interleaved, OneFOneB, ZeroBubble, make_table, make_timetable, turns
from axonml_jax.pipeline.timetable import Timetable, colour, draw_grid


def check_execution(timetable: Timetable) -> None:
    """Everything is done once, and every read finds the value that belongs there."""
    done = PaperExecutor(timetable, make_table(timetable)).run()
    works = ["F"] + ["B"] * (timetable.backward is not None) + ["W"] * (timetable.weight is not None)
    everything = [
        (w, p, m) for w in works for p in range(timetable.num_stages) for m in range(timetable.num_microbatches)
    ]
    assert sorted(done) == sorted(everything)


@pytest.mark.parametrize("rows", ["fused", "alternating"])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_timetable_is_a_correct_execution(ranks, rows):
    for schedule in accepted(ranks, 2 * ranks + 1, 3):
        check_execution(make_timetable(schedule, rows))


@pytest.mark.parametrize("schedule", [*one_chunk_schedules(16, 40), Interleaved(16, 32, 4), GPipe(8, 3, 4)], ids=str)
def test_large_timetables_too(schedule):
    check_execution(make_timetable(schedule))


@pytest.mark.parametrize("ranks", range(2, 6))
def test_interleaved_executes_groups_that_are_not_whole(ranks):
    for chunks in (2, 3):
        for m in range(1, 3 * ranks):
            timetable = make_timetable(Interleaved(ranks, m, chunks))
            check_execution(timetable)
            whole = make_timetable(Interleaved(ranks, -(-m // ranks) * ranks, chunks))
            assert timetable.num_ticks <= whole.num_ticks and timetable.residuals.size <= whole.residuals.size


@pytest.mark.parametrize("schedule", [OneFOneB(4, 6), Interleaved(3, 6, 2), GPipe(3, 2, 2)], ids=str)
def test_forwards_alone_keep_nothing(schedule):
    timetable = make_timetable(schedule).forward_only
    check_execution(timetable)
    assert timetable.residuals.size == timetable.cotangents.size == 0
    assert timetable.num_ticks == timetable.ticks.forward.max() + 1
    assert make_table(timetable).backward is make_table(timetable).cotangent_arrival is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_ticks_that_are_accepted_are_executed(data):
    """Timetables by chance: every action some ticks after what it needs, where its rank is free."""
    ranks, chunks, microbatches = (data.draw(st.integers(1, top)) for top in (4, 3, 4))
    stages = ranks * chunks
    taken: set[tuple[str, int, int]] = set()

    def place(work, stage, earliest):
        tick = earliest + data.draw(st.integers(0, 3))
        while (work, stage % ranks, tick) in taken:
            tick += 1
        taken.add((work, stage % ranks, tick))
        return tick

    forward, backward, weight = (np.zeros((stages, microbatches), np.int64) for _ in range(3))
    for m in range(microbatches):
        for p in range(stages):
            forward[p, m] = place("F", p, forward[p - 1, m] + 1 if p else 0)
        for p in reversed(range(stages)):
            backward[p, m] = place("B", p, max(forward[p, m], backward[p + 1, m] + 1 if p < stages - 1 else 0))
            weight[p, m] = place("W", p, backward[p, m])
    split = data.draw(st.booleans())
    grids = (
        tuple(map(tuple, grid.tolist())) for grid in ((forward, backward, weight) if split else (forward, backward))
    )
    check_execution(Timetable(ranks, *grids))


def test_the_paper_executor_notices_wrong_slots():
    timetable = make_timetable(Interleaved(2, 4, 2))
    table = make_table(timetable)
    wrong = [
        table._replace(forward=table.forward._replace(slot=table.forward.slot // 2)),
        table._replace(backward=table.backward._replace(source=np.roll(table.backward.source, 1, axis=0))),
        table._replace(activation_arrival=np.full_like(table.activation_arrival, timetable.activations.size)),
        table._replace(cotangent_arrival=np.roll(table.cotangent_arrival, 1, axis=1)),
    ]
    for broken in wrong:
        with pytest.raises(AssertionError):
            assert PaperExecutor(timetable, broken).run() == []


@pytest.mark.parametrize("ranks", range(1, 17))
def test_residual_slots_are_those_of_the_formulas(ranks):
    for m in (1, 2, ranks - 1, ranks, 2 * ranks - 1, 2 * ranks, 64):
        if m < 1:
            continue
        gpipe, fused, h1, _ = (make_timetable(s).residuals for s in one_chunk_schedules(ranks, m))
        assert gpipe.counts == (m,) * ranks
        assert fused.counts == tuple(min(m, 2 * (ranks - r) - 1) for r in range(ranks))
        assert h1.counts == tuple(min(m, 2 * ranks - 1 - r) for r in range(ranks))
        assert fused.size == h1.size == min(m, 2 * ranks - 1)
        assert make_timetable(GPipe(ranks, m, 3)).residuals.counts == (3 * m,) * ranks
    for schedule in interleaved_schedules(ranks, 4 * ranks, 4):
        warmups = [schedule.warmup(rank) for rank in range(ranks)]
        total = schedule.num_chunks * schedule.num_microbatches
        # Fused rows keep what Megatron's classic order keeps: the warm-up and one more.
        assert make_timetable(schedule).residuals.counts == tuple(min(w + 1, total) for w in warmups)


def test_memory_of_1f1b_does_not_grow_with_microbatches_and_gpipes_does():
    sizes = [make_timetable(OneFOneB(4, m)).residuals.size for m in (8, 16, 64)]
    assert sizes == [7, 7, 7]
    assert [make_timetable(GPipe(4, m)).residuals.size for m in (8, 16, 64)] == [8, 16, 64]
    received = [make_timetable(schedule) for schedule in (OneFOneB(4, 64), Interleaved(4, 64, 3))]
    assert [(t.activations.size, t.cotangents.size) for t in received] == [(1, 1), (1, 1)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=40))
@settings(deadline=None)
def test_colouring_overlaps_nothing_and_needs_no_more_than_live_at_once(drawn):
    intervals = [(first, first + length) for first, length in drawn]
    slots = colour(intervals)
    for i, (first, last) in enumerate(intervals):
        for j in range(i):
            apart = intervals[j][1] < first or intervals[j][0] > last
            assert apart or slots[i] != slots[j]
    live = [sum(first <= tick <= last for first, last in intervals) for tick in range(45)]
    assert max(slots, default=-1) + 1 == max(live)


@pytest.mark.parametrize(
    ("grids", "words"),
    [
        (([[0, 1], [0, 2]],), "1F0 at tick 0 needs 0F0 of an earlier tick, which is at tick 0"),
        (([[0, 1], [1, 2]], [[2, 3], [2, 3]]), "0B0 at tick 2 needs 1B0 of an earlier tick, which is at tick 2"),
        (([[0, 1], [1, 2]], [[3, 4], [0, 3]]), "1B0 at tick 0 needs 1F0 before, which is at tick 1"),
        (([[0, 1], [1, 2]], [[3, 4], [1, 3]], [[2, 4], [1, 3]]), "0W0 at tick 2 needs 0I0 before, which is at tick 3"),
        (([[0, 0], [1, 2]],), r"rank 0 cannot do 0F0, 0F1 in one tick \(0\)"),
        (([[0, 1], [1, 2]], [[3, 3], [1, 2]]), "rank 0 cannot do 0B0, 0B1"),
        (([[-1, 1], [1, 2]],), "F before tick 0"),
        (([[0, 1], [1, 2], [3, 4]],), "3 stages do not divide over 2 ranks"),
        (([[0, 1], [1, 2]], [[3, 4]]), "of one shape"),
        (([[0, 1], [1, 2]], None, [[3, 4], [3, 4]]), "need the ticks of input gradients"),
        (([list(range(20)), list(range(20))],), "and 12 more"),
    ],
)
def test_ticks_that_cannot_be_kept_are_refused_by_name(grids, words):
    with pytest.raises(ValueError, match=words):
        Timetable(2, *(None if grid is None else tuple(map(tuple, grid)) for grid in grids))


def test_timetables_are_values():
    first, second = make_timetable(OneFOneB(2, 3)), make_timetable(OneFOneB(2, 3))
    assert first == second and hash(first) == hash(second) and first != make_timetable(GPipe(2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.num_ranks = 3
    assert Timetable.of(2, first.ticks) == first


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="rows='single' must be 'fused' or 'alternating'"):
        make_timetable(OneFOneB(2, 3), "single")


def test_idle_work_goes_to_the_trash():
    timetable = make_timetable(OneFOneB(2, 3))
    table = make_table(timetable)
    assert [field[0, 1] for field in table.forward] == [2, 0, 1, 3]  # idle stage, microbatch 0, both trash slots
    assert table.forward.source[0, 0] == timetable.activations.size  # stage 0 reads the batch, not a slot
    assert {field.dtype.name for field in (*table.forward, *table.backward, table.activation_arrival)} == {"int32"}


def test_a_timetable_prints():
    assert str(make_timetable(OneFOneB(2, 3))).splitlines() == [
        "tick        0   1   2   3   4",
        "rank 0 F  0F0 0F1 0F2   .   .",
        "rank 0 B    .   . 0B0 0B1 0B2",
        "rank 1 F    . 1F0 1F1 1F2   .",
        "rank 1 B    . 1B0 1B1 1B2   .",
    ]
    assert "0I0" in str(make_timetable(ZeroBubble(2, 3))) and "0W0" in str(make_timetable(ZeroBubble(2, 3)))


def test_long_drawings_are_broken_into_blocks():
    text = draw_grid({"a": [f"x{i}" for i in range(30)], "b": ["y"]}, ruler="t", width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("\n\n") == 3 and "x29" in text


def test_a_rank_turns_to_each_of_its_stages_once_per_group_of_microbatches():
    """What `gather="chunk"` gathers: forward and backward alike, every turn is left before the next one begins."""
    schedule = Interleaved(3, 7, 2)
    table = make_table(make_timetable(schedule), with_turns=True)
    for begun in (table.turns.forward, table.turns.backward, table.turns.left):
        assert ((begun != 6).sum(0) == 2 * 3).all()  # chunks x groups of 3 microbatches, the last one of 1
    stage, (begins, ends) = table.backward.stage, turns(table.backward.stage, 6)
    for rank in range(3):
        busy = [(begins[t, rank], stage[t, rank], ends[t, rank]) for t in range(len(stage)) if stage[t, rank] != 6]
        now = None
        for begin, own, end in busy:
            now = begin if begin != 6 else now
            assert now == own
            now = None if end != 6 else now
