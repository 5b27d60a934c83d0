"""What a DDP step sends, and where in its program: counted by the ledger, never on faith."""

import itertools
from fractions import Fraction

import jax
import numpy as np
import optax
import pytest
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.ledger.compiled import agreement, collectives_in_lowered
from axonml_jax.ledger.count import Loop, collectives_in

SMALL = 0.0003


def step_of(name, ranks, **options):
    case = CASES[name]
    plan = {key: options.pop(key) for key in ("accumulate", "check_vma") if key in options}
    mesh = ax.make_mesh(data=ranks, devices=jax.devices()[:ranks])
    model = ax.parallelize(case.model(), mesh, ax.Plan(data=ax.Replicate(**options), **plan), params=case.params())
    trainer = model.trainer(optax.adamw(1e-2), case.loss)
    return trainer, case.batch(2 * ranks * plan.get("accumulate", 1))


def gradients(report):
    return [c for c in report.collectives if c.label == "gradients"]


TABLE = list(
    itertools.product(["dropout", "tied", "scanned", "linen_dropout"], [2, 3, 8], ["overlapped", "synchronous"], [1, 3])
)


@pytest.mark.parametrize(("name", "ranks", "strategy", "accumulate"), TABLE)
def test_gradients_cost_two_p_times_n_minus_one_over_n_and_nothing_in_the_accumulation_loop(
    name, ranks, strategy, accumulate
):
    trainer, batch = step_of(name, ranks, sync_strategy=strategy, bucket_size_mb=SMALL, accumulate=accumulate)
    report = ax.explain(trainer, batch)
    params = sum(leaf.size for leaf in jax.tree.leaves(trainer.model.parameters()))
    unused = (
        3 if name == "dropout" and strategy == "overlapped" else 0
    )  # a parameter nobody reads has no gradient to send
    assert report.bytes_by_label["gradients"] == Fraction(2 * (params - unused) * 8 * (ranks - 1), ranks)
    assert all(Loop(accumulate - 1) not in c.path and Loop(accumulate) not in c.path for c in gradients(report))


@pytest.mark.parametrize("strategy", ["overlapped", "synchronous"])
@pytest.mark.parametrize("check_vma", [False, True])
def test_there_is_one_reduction_per_bucket(strategy, check_vma):
    small, batch = step_of("tied", 8, sync_strategy=strategy, bucket_size_mb=SMALL, check_vma=check_vma)
    sizes = sorted(c.elements * 8 for c in gradients(ax.explain(small, batch)))
    assert len(sizes) > 2 and all(size <= SMALL * 2**20 or size in (6 * 6 * 8, 11 * 6 * 8) for size in sizes)
    whole, batch = step_of("tied", 8, sync_strategy=strategy, bucket_size_mb=25, check_vma=check_vma)
    assert len(gradients(ax.explain(whole, batch))) == 1


def test_a_flat_bucket_is_one_launch_and_a_view_one_per_leaf():
    launches = {}
    for view in (True, False):
        trainer, batch = step_of("tied", 2, gradient_as_bucket_view=view)
        (entry,) = gradients(ax.explain(trainer, batch))
        launches[view] = entry.leaves
    assert launches == {True: len(jax.tree.leaves(trainer.model.parameters())), False: 1}


@pytest.mark.parametrize("given", [0, np.False_, False])
def test_a_bucket_view_that_equals_false_is_false(given):
    assert ax.Replicate(gradient_as_bucket_view=given).gradient_as_bucket_view is False


def test_reduced_precision_communication_halves_the_bytes():
    full, batch = step_of("tied", 4)
    half, _ = step_of("tied", 4, comm_dtype="bfloat16")
    (before, after) = (ax.explain(t, batch).bytes_by_label["gradients"] for t in (full, half))
    assert before == 4 * after  # float64 to bfloat16
    assert half.minimum_traffic() == after


@pytest.mark.parametrize("name", ["scanned", "batch_norm"])
@pytest.mark.parametrize("strategy", ["overlapped", "synchronous"])
def test_the_ledger_agrees_with_the_lowered_program(name, strategy):
    trainer, batch = step_of(name, 4, sync_strategy=strategy, accumulate=3)
    traced = trainer.trace(batch)
    assert agreement(collectives_in(traced.jaxpr), collectives_in_lowered(traced.lower())) == []


def test_independent_training_sends_nothing():
    trainer, batch = step_of("dropout", 4, sync_strategy="no_sync", accumulate=2)
    assert ax.explain(trainer, batch).collectives == ()
    assert trainer.minimum_traffic() == 0


def inner_equations(trainer, batch):
    """The equations of the step inside its shard_map, and the indices of gradient reductions and matrix products."""
    (mapped,) = [e for e in trainer.trace(batch).jaxpr.eqns if e.primitive.name == "shard_map"]
    eqns = mapped.params["jaxpr"].eqns
    reduces = [
        i
        for i, e in enumerate(eqns)
        if e.primitive.name.startswith("psum") and "axonml.gradients" in str(e.source_info.name_stack)
    ]
    products = [i for i, e in enumerate(eqns) if e.primitive.name == "dot_general"]
    return eqns, reduces, products


def ancestors(eqns, index):
    """Indices of all equations that equation `index` depends on."""
    made = {id(v): i for i, e in enumerate(eqns) for v in e.outvars}
    found, todo = set(), [index]
    while todo:
        for v in eqns[todo.pop()].invars:
            i = made.get(id(v))
            if i is not None and i not in found:
                found.add(i)
                todo.append(i)
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_overlapped_reductions_stand_inside_the_backward_and_wait_for_no_other_bucket(accumulate):
    eqns, reduces, products = inner_equations(
        *step_of("tied", 8, sync_strategy="overlapped", bucket_size_mb=SMALL, accumulate=accumulate)
    )
    assert len(reduces) > 2
    assert min(reduces) < max(products)  # the backward goes on after the first reduction
    first = ancestors(eqns, min(reduces))
    assert any(p not in first for p in products if p > min(reduces))  # and that work does not need to come before it
    assert all(not ancestors(eqns, r) & set(reduces) for r in reduces)


def test_synchronous_reductions_stand_after_the_backward():
    _, reduces, products = inner_equations(*step_of("tied", 8, sync_strategy="synchronous", bucket_size_mb=SMALL))
    assert len(reduces) > 2 and min(reduces) > max(products)


def test_scanned_blocks_are_reduced_in_the_backwards_own_loop():
    trainer, batch = step_of("scanned", 8, bucket_size_mb=25)
    inside = [c for c in gradients(ax.explain(trainer, batch)) if c.path == (Loop(4),)]
    assert [c.elements for c in inside] == [6 * 6 + 6]  # one block's kernel and bias, as one bucket
    outside = [c for c in gradients(ax.explain(trainer, batch)) if not c.path]
    assert np.sum([c.elements for c in outside]) == (5 * 6 + 6) + (6 * 3 + 3)
