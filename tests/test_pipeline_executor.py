"""Every timetable computes what the unsplit model computes: loss, metrics, gradients, states, outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pipeline_runs import VOCABULARY, Case, Outcome, batch_of, layouts, run, unsplit, width

from axonml_jax.collectives.primitives import vary
from axonml_jax.executor import run as executor
from axonml_jax.executor import tick
from axonml_jax.executor.cut import Stage, StageOutput
from axonml_jax.pipeline.pack import StageBuffers, Stored
from axonml_jax.pipeline.schedules import make_schedule
from axonml_jax.testing.equality import assert_trees_close

# Fewer microbatches than ranks up to four times as many; every schedule in both kinds of types.
CASES = [
    Case("1f1b", 2, 1, data=2),
    Case("1f1b", 3, 3, check_vma=True),
    Case("1f1b", 4, 16, data=2, check_vma=True),
    Case("1f1b", 3, 7, remat="full", data=2),
    Case("1f1b", 3, 4, remat="full", check_vma=True),
    Case("1f1b", 3, 5, rows="alternating"),
    Case("gpipe", 3, 12, check_vma=True),
    Case("gpipe", 2, 3, chunks=2),
    Case("gpipe", 1, 3, chunks=3),
    Case("zero-bubble", 2, 2, data=2, check_vma=True),
    Case("zero-bubble", 4, 9),
    Case("zero-bubble", 3, 5, rows="alternating", check_vma=True),
    Case("interleaved", 2, 1, 2, data=2, check_vma=True),
    Case("interleaved", 3, 12, 2),
    Case("interleaved", 2, 4, 3, remat="full"),
    Case("1f1b", 4, 6, forward_only=True, data=2, check_vma=True),
    Case("interleaved", 2, 5, 2, forward_only=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipeline_computes_what_the_unsplit_model_computes(case):
    got, wanted = run(case), unsplit(case.ranks * case.chunks, case.microbatches, case.data)
    assert_trees_close(got.loss, wanted.loss, "loss")
    assert_trees_close(got.aux, wanted.aux, "metrics")
    assert_trees_close(got.states, wanted.states, "states")
    assert_trees_close(got.outputs, wanted.outputs, "outputs")
    if not case.forward_only:
        assert_trees_close(got.grads, wanted.grads, "gradients")


@pytest.mark.parametrize("check_vma", [False, True])
def test_what_idle_ticks_write_and_send_reaches_nothing(check_vma, monkeypatch):
    poison = lambda sizes: {
        group: vary(jnp.full(size, jnp.nan if "float" in group.dtype else 1, group.dtype), group.axes)
        for group, size in sizes.items()
    }
    monkeypatch.setattr(tick, "nothing", poison)
    case = Case("1f1b", 3, 2) if not check_vma else Case("interleaved", 2, 3, 2, check_vma=True)
    got, wanted = run(case), unsplit(case.ranks * case.chunks, case.microbatches, case.data)
    for name in Outcome._fields:
        assert_trees_close(getattr(got, name), getattr(wanted, name), name)


def test_a_table_with_wrong_slots_would_be_noticed(monkeypatch):
    real = executor.make_table

    def wrong(timetable, with_turns):
        table = real(timetable, with_turns)
        return table._replace(backward=table.backward._replace(slot=np.minimum(table.backward.slot + 1, 2)))

    monkeypatch.setattr(executor, "make_table", wrong)
    with pytest.raises(AssertionError, match="gradients"):
        assert_trees_close(run(Case("1f1b", 3, 2)).grads, unsplit(3, 2, 1).grads, "gradients")


def test_a_rank_holds_its_own_stages_and_a_shared_leaf_once():
    case = Case("gpipe", 1, 3, chunks=3)
    layout, _ = layouts(case)
    (size,) = layout.sizes.values()
    embedding, scale, w, b, head = VOCABULARY * width(0), 1, width(0) * width(1), width(1), width(1) * width(0)
    assert size == embedding + scale + w + b + head
    (split,) = layouts(Case("1f1b", 3, 3))[0].sizes.values()
    assert split == max(embedding + scale, w + b, head + embedding)


def test_everything_that_does_not_agree_is_named():
    case = Case("1f1b", 2, 4)
    layout, _ = layouts(case)
    timetable = executor.Timetable.of(3, make_schedule("1f1b", 3, 5).ticks())
    buffers = {group: jnp.zeros(size + 1) for group, size in layout.sizes.items()}

    def local(batch):
        return executor.run_pipeline([], timetable, layout, buffers, batch, keys=jnp.zeros(5)).loss

    mesh = Mesh(np.array(jax.devices()[:2]), "pipe")
    with pytest.raises(ValueError) as error:
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()), batch_of(4, 1))
    words = ("0 stages were given, and the timetable has 3", "the axis has 2 ranks, and the timetable 3", "pack_rank")
    for word in (*words, "batch tokens of shape (4, 2, 3) must begin with M = 5", "the layout of weights is of"):
        assert word in str(error.value)


def traced_with(stage, state=None, **options):
    """Trace one stage that is the whole model."""
    weights = {"w": Stored((2,), jnp.float64)}
    layout = StageBuffers.of([weights], 1)
    states_layout = StageBuffers.of([state], 1)
    timetable = executor.Timetable.of(1, make_schedule("1f1b", 1, 2).ticks())

    def local(buffers, states, batch):
        return executor.run_pipeline(
            [Stage(stage)], timetable, layout, buffers, batch, states_layout=states_layout, states=states, **options
        ).loss

    mesh = Mesh(np.array(jax.devices()[:1]), "pipe")
    buffers = [{group: jnp.zeros(size) for group, size in each.sizes.items()} for each in (layout, states_layout)]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.eval_shape(mapped, *buffers, jnp.zeros((2, 3)))


@pytest.mark.parametrize(
    ("stage", "error", "words"),
    [
        (lambda w, x, batch, key, state: batch, TypeError, "return StageOutput"),
        (lambda w, x, batch, key, state: StageOutput(None, batch, state=state), ValueError, "stage 0: float64.3."),
        (lambda w, x, batch, key, state: StageOutput(None, 0.0, None, w["w"][:1]), ValueError, "was given a state of"),
    ],
)
def test_stages_that_return_something_else_are_refused(stage, error, words):
    with pytest.raises(error, match=words):
        traced_with(stage, {"s": Stored((2,), jnp.float64)})


def test_a_shared_leaf_must_be_the_same_everywhere():
    tied = [{"e": Stored((2, n), jnp.float64, shared="e")} for n in (3, 4)]
    with pytest.raises(ValueError, match=r"'e' is .* in stage 0 and .* in stage 1"):
        StageBuffers.of(tied, 2)
    with pytest.raises(ValueError, match="3 stages do not divide over 2 ranks"):
        StageBuffers.of([{}] * 3, 2)
