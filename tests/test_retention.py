"""Which checkpoints are deleted: rules as tables and laws, clocks that jump, and a folder that a manager keeps."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import axonml_jax as ax
from axonml_jax.checkpoint import manager as store
from axonml_jax.checkpoint.format import Manifest
from axonml_jax.checkpoint.retention import Retention, best_of, seconds_of

DAY = 86_400.0
YEAR = 365 * DAY


def daily(*steps, shift=None):
    """A checkpoint a day; from a step on the clock is shifted."""
    since, by = shift or (0, 0.0)
    return {step: step * DAY + by * (step >= since) for step in steps}


TEN = range(1, 11)
ROWS = {
    "all stay without a number": (Retention(keep=None), daily(*TEN), (), []),
    "the newest": (Retention(keep=3), daily(*TEN), (), [*range(1, 8)]),
    "what is spared stays": (Retention(keep=3), daily(*TEN), (None, 2), [1, *range(3, 8)]),
    "every fourth stays for ever": (Retention(keep=1, every=4), daily(*TEN), (), [1, 2, 3, 5, 6, 7, 9]),
    "the young stay": (Retention(keep=1, seconds=2.5 * DAY), daily(*TEN), (), [*range(1, 8)]),
    "any rule keeps": (Retention(keep=2, every=4, seconds=3 * DAY), daily(*TEN), (1,), [2, 3, 5, 6, 7]),
    "step 0 is a multiple": (Retention(keep=1, every=5), daily(0, 1, 5, 6), (), [1]),
    "a clock set forward makes nothing old": (
        Retention(keep=1, seconds=9 * DAY), daily(*range(6, 11), shift=(9, YEAR)), (), [],
    ),
    "nor does one set back": (Retention(keep=1, seconds=5 * DAY), daily(*TEN, shift=(8, -YEAR)), (), [1, 2, 3, 4]),
    "nor one that was wrong for one save": (
        Retention(keep=1, seconds=20 * DAY), daily(*TEN) | {7: 7 * DAY + YEAR}, (), [],
    ),
    "two jumps make what was before them old": (
        Retention(keep=1, seconds=9 * DAY), {1: 0.0, 2: DAY, 3: YEAR, 4: YEAR + DAY, 5: 2 * YEAR}, (), [1, 2],
    ),
    "what says no time is as old as the next that does": (
        Retention(keep=1, seconds=2 * DAY), {1: None, 2: DAY, 3: None, 4: 2 * DAY, 5: 3 * DAY, 6: None}, (), [1, 2],
    ),
    "no times, no ages": (Retention(keep=1, seconds=1), dict.fromkeys(TEN), (), []),
    "nothing there": (Retention(keep=1, every=2, seconds=1), {}, (7,), []),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_is_deleted(row):
    rules, times, spared, gone = ROWS[row]
    assert rules.deletes(times, spared) == gone


times = st.dictionaries(st.integers(0, 400), st.none() | st.floats(-1e10, 1e10), max_size=30)
rules = st.builds(
    Retention,
    keep=st.integers(1, 5),
    every=st.none() | st.integers(1, 50),
    seconds=st.none() | st.floats(1e-3, 1e10),
)


@given(times, rules, st.sets(st.integers(0, 400), max_size=3))
def test_whatever_clocks_say_the_newest_the_spared_and_the_multiples_stay(saved, given_rules, spared):
    gone = given_rules.deletes(saved, spared)
    assert gone == sorted(set(gone) & set(saved))
    assert not {*sorted(saved)[-given_rules.keep :], *spared} & set(gone)
    assert given_rules.every is None or all(step % given_rules.every for step in gone)
    rest = {step: time for step, time in saved.items() if step not in gone}
    assert given_rules.seconds is not None or not given_rules.deletes(rest, spared)  # it is done at once


@given(times, rules, st.integers(0, 5), st.floats(-1e9, 1e9))
def test_more_rules_delete_less_and_a_shift_of_all_times_deletes_the_same(saved, given_rules, more, shift):
    alone = Retention(keep=given_rules.keep)
    assert set(given_rules.deletes(saved)) <= set(alone.deletes(saved))
    longer = Retention(keep=given_rules.keep + more, every=given_rules.every, seconds=given_rules.seconds)
    assert set(longer.deletes(saved)) <= set(given_rules.deletes(saved))
    whole = {step: None if time is None else float(round(time)) for step, time in saved.items()}
    moved = {step: None if time is None else time + round(shift) for step, time in whole.items()}
    assert given_rules.deletes(moved) == given_rules.deletes(whole)


@given(st.lists(st.floats(1, 1e5), min_size=2, max_size=20), st.integers(1, 19), st.floats(-1e9, 1e9))
def test_one_jump_of_the_clock_deletes_nothing_that_is_younger_than_half_the_time(gaps, at, jump):
    saved, time = {}, 0.0
    for step, gap in enumerate(gaps):
        time += gap + jump * (step == at)
        saved[step] = time
    seconds = 2 * sum(gaps) + 1
    assert not Retention(keep=1, seconds=seconds).deletes(saved)


def test_durations_and_rules_that_are_none_are_refused():
    assert [seconds_of(each) for each in ("2w", "7d", " 12 h", "90m", "45s", 0.5)] == [
        1209600,
        604800,
        43200,
        5400,
        45,
        0.5,
    ]
    for wrong in ("", "7 days", "-1d", "d", True, float("nan"), "1e3"):
        with pytest.raises(ValueError, match="must be seconds, or a text such as"):
            seconds_of(wrong)
    for options, message in (
        ({"keep": 0}, "keep=0 must be at least 1"),
        ({"every": 0}, "keep_every=0 must be at least 1"),
        ({"seconds": 0.0}, "keep_for=0.0 must be more than 0"),
        ({"keep": None, "every": 2}, "keep=None keeps all, and keep_every adds nothing"),
        ({"keep": None, "seconds": 2.0}, "keep=None keeps all, and keep_for adds nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            Retention(**options)


NO_SETTINGS = [
    {name: wrong}
    for name in ("every", "keep", "keep_every", "max_failures")
    for wrong in (1.5, True, "3", np.float32(2), [1])
] + [{"best": 3}, {"best": True}, {"best": ""}, {"verify": "no"}, {"asynchronous": 1}]


@pytest.mark.parametrize("wrong", NO_SETTINGS, ids=str)
def test_settings_that_are_no_numbers_names_or_flags_are_refused(tmp_path, wrong):
    """`keep=1.5` failed at the first deletion, `every=True` saved every step."""
    (name,) = wrong
    with pytest.raises(TypeError, match=rf"^{name}=.* must be "):
        ax.CheckpointManager(tmp_path / "run", **wrong)
    ax.CheckpointManager(tmp_path / "run", every=np.int64(2), keep=np.uint8(3), max_failures=2).close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "metric", ["accuracy", "valid/f1", "val_auc", "BLEU", "topk_acc@5", "r2", "evalAccuracy", "mAP"]
)
def test_a_metric_of_which_more_is_better_needs_a_mode(tmp_path, metric):
    """`best="accuracy"` kept the worst."""
    with pytest.raises(ValueError, match=rf"best='{metric}' without mode would keep the lowest.*mode='max'"):
        ax.CheckpointManager(tmp_path, best=metric)
    for mode in ("min", "max"):
        ax.CheckpointManager(tmp_path, best=metric, mode=mode).close()
    for other in ("loss", "valid_loss", "perplexity", "error_rate", "score_error", "step"):
        ax.CheckpointManager(tmp_path, best=other).close()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_checkpoints_that_are_as_good_the_last_is_the_best(mode):
    other = {"min": 2.0, "max": 0.0}[mode]
    values = {5: other, 2: 1.0, 4: 1.0, 3: 1.0, 1: math.inf, 6: math.nan}
    found = {step: Manifest(metrics={"loss": value}) for step, value in values.items()}
    assert best_of(found, "loss", mode) == 4
    assert best_of({1: Manifest(metrics={"loss": math.nan}), 2: Manifest()}, "loss", mode) is None


def test_a_best_that_no_save_has_the_metric_of_is_said_once_before_a_checkpoint_goes(tmp_path, caplog):
    def said(*saves, **options):
        caplog.clear()
        with ax.CheckpointManager(tmp_path / str(len(list(tmp_path.iterdir()))), **options) as manager:
            for step, metrics in enumerate(saves, 1):
                manager.save(step, Weights(), metrics=metrics)
            manager.wait()
            before_the_end = len(caplog.messages)
        return before_the_end, caplog.messages

    early, messages = said({"val_loss": 1.0}, {}, best="valid_loss", keep=1)
    assert early == len(messages) == 1
    assert (
        "best='valid_loss' keeps no checkpoint: no save was given metrics={'valid_loss': ...}; given: val_loss"
        in messages[0]
    )
    assert said({}, best="valid_loss")[0] == 0 and len(caplog.messages) == 1
    assert said({}, {"valid_loss": 1.0}, {}, {}, best="valid_loss", keep=2) == (0, [])
    assert said({}) == (0, []) and said(best="valid_loss") == (0, [])
    assert "mode='max' has no effect without best" in said(mode="max")[1][0]


class Weights(nnx.Module):
    """Little to save."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(3))


def test_a_manager_deletes_by_the_times_of_manifests(tmp_path, monkeypatch):
    clock = iter(DAY * day + 1e9 for day in (0, 1, 2, 3, 365, 366, 367))
    monkeypatch.setattr(store, "time", SimpleNamespace(time=lambda: next(clock)))
    seen = []
    options = {"every": 1, "keep": 1, "keep_every": 4, "keep_for": "3d", "best": "loss"}
    with ax.CheckpointManager(tmp_path, asynchronous=False, **options) as manager:
        for step in range(1, 8):
            manager.save(step, Weights(), metrics={"loss": abs(step - 2)})
            seen.append(manager.steps)
    assert seen[3] == [2, 3, 4] and seen[4] == [2, 3, 4, 5]  # a year passes: the clock may have jumped
    assert seen[6] == [2, 4, 5, 6, 7]
