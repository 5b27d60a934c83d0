"""Error feedback: what sums of gradients leave out stays on its rank, joins the next step's, and rests in checkpoints."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from fsdp_plans import mesh_of
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.config.sections import PlanConfig

FED_BACK = ax.Shard(stage=1, reduce_wire="int8-feedback")
ROUNDED = ax.Shard(stage=1, reduce_wire="int8")
LATER = ax.Replicate(sync_strategy="synchronous")


def trainer_of(name, plan, degrees, tx=None):
    case = CASES[name]
    model = ax.parallelize(case.model(), mesh_of(**degrees), plan, params=case.params())
    return model.trainer(tx or optax.sgd(0.1), case.loss)


def left_out(trainer):
    """By name, summed over ranks."""
    return {name: np.asarray(x).sum(0) for name, x in named_leaves(trainer.state.left_out).items()}


PLANS = {
    "one bucket a step": ({"fsdp": 4}, {}),
    "types checked": ({"fsdp": 4}, {"check_vma": True}),
    "after the backward": ({"data": 2, "fsdp": 2}, {"data": LATER}),
    "replicated outside": ({"data": 2, "fsdp": 2}, {}),
    "accumulated, the last microbatch overlapped": ({"data": 1, "fsdp": 4}, {"accumulate": 3}),
    "accumulated, after the backward": ({"data": 2, "fsdp": 2}, {"accumulate": 2, "data": LATER}),
    "recomputed": ({"fsdp": 3}, {"remat": "full"}),
}


@pytest.mark.parametrize("kind", ["tied", "scanned"])
@pytest.mark.parametrize("name", PLANS)
def test_what_ranks_keep_is_what_the_sum_lacks_step_by_step(name, kind):
    """After each of two steps: updates so far and what is left out add up to the exact gradients at the same parameters."""
    degrees, options = PLANS[name]
    rows, case = 2 * int(np.prod(list(degrees.values()))) * options.get("accumulate", 1), CASES[kind]
    own = trainer_of(kind, ax.Plan(fsdp=FED_BACK, **options), degrees)
    exact = ax.parallelize(
        case.model(), mesh_of(**degrees), ax.Plan(fsdp=ax.Shard(stage=1), **options), params=case.params()
    )
    wanted, first = {}, own.model.state_dict()
    for _ in range(2):
        batch = case.batch(rows)
        exact.load_state_dict(own.model.state_dict())
        for each, grad in named_leaves(exact.value_and_grad(case.loss)(batch)[1]).items():
            wanted[each] = wanted.get(each, 0) + np.asarray(grad)
        own.step(batch)
        after, lacks = own.model.state_dict(), left_out(own)
        assert any(np.abs(lack).max() > 0 for lack in lacks.values())
        for each, grad in wanted.items():
            made = (first[each] - after[each]) / 0.1 + lacks[each] / batch["keep" if kind == "tied" else "w"].sum()
            np.testing.assert_allclose(made, grad, rtol=0, atol=1e-9 * max(1, np.abs(grad).max()), err_msg=each)


class Slope(nnx.Module):
    def __init__(self):
        self.at = nnx.Param(jnp.zeros((4, 64)))


def slope(model, batch):
    """Its gradient is the mean of the rows, whatever the parameters."""
    return (model.at[...] * batch["x"]).sum((1, 2)).mean()


def test_gradients_that_are_too_small_for_int8_arrive_with_feedback_and_are_lost_without():
    rows = np.full((8, 4, 64), 1e-3)
    rows[:, :, 0] = 1.0  # of the block's largest element no more than half a step of int8
    moved = {}
    for strategy in (FED_BACK, ROUNDED):
        model = ax.parallelize(Slope(), mesh_of(fsdp=2), ax.Plan(fsdp=strategy))
        trainer = model.trainer(optax.sgd(1.0), slope)
        for _ in range(40):
            trainer.step({"x": rows})
        moved[strategy] = -np.asarray(model.state_dict()["at"])
    np.testing.assert_array_equal(moved[ROUNDED][:, 1:], 0)
    assert np.abs(moved[FED_BACK] - 40 * rows[0]).max() <= 1 / 254 + 1e-12  # what one step leaves out, after any number


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_is_saved_and_restored_goes_on_bit_for_bit(accumulate, tmp_path):
    plan, degrees, case = ax.Plan(fsdp=FED_BACK, accumulate=accumulate), {"data": 2, "fsdp": 2}, CASES["tied"]
    batch = case.batch(8 * accumulate)
    run, again = (trainer_of("tied", plan, degrees, optax.adam(1e-2)) for _ in range(2))
    run.step(batch)
    ax.save(tmp_path / "one", run)
    again.step(case.batch(8 * accumulate))
    ax.restore(tmp_path / "one", again)
    for _ in range(2):
        losses = [float(each.step(batch)["loss"]) for each in (run, again)]
        assert losses[0] == losses[1]
    for own, other in zip(
        *(jax.tree.leaves((each.state.params, each.state.left_out)) for each in (run, again)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))


@pytest.mark.slow
def test_other_ranks_begin_with_nothing_and_as_many_on_another_mesh_take_what_there_is(tmp_path, caplog):
    run, case = trainer_of("tied", ax.Plan(fsdp=FED_BACK), {"data": 2, "fsdp": 2}), CASES["tied"]
    run.step(case.batch(8))
    ax.save(tmp_path / "four", run)
    for degrees, kept in (({"fsdp": 4}, True), ({"fsdp": 2}, False)):
        caplog.clear()
        other = trainer_of("tied", ax.Plan(fsdp=FED_BACK), degrees)
        other.step(case.batch(8))
        with caplog.at_level(logging.WARNING):
            ax.restore(tmp_path / "four", other)
        for name, lack in left_out(other).items():
            np.testing.assert_array_equal(lack, left_out(run)[name] if kept else 0)
        assert ("is reset to zero" in caplog.text) != kept
        other.step(case.batch(8))
    without = trainer_of("tied", ax.Plan(fsdp=ROUNDED), {"fsdp": 4})
    ax.restore(tmp_path / "four", without)
    assert without.state.left_out is None and int(without.state.step) == 1


def test_a_skipped_update_leaves_what_is_kept_as_it_was():
    model = ax.parallelize(Slope(), mesh_of(fsdp=2), ax.Plan(fsdp=FED_BACK))
    trainer = model.trainer(optax.sgd(0.1), slope, max_nonfinite=3)
    rows = np.random.default_rng(0).normal(size=(8, 4, 64))
    trainer.step({"x": rows})
    before = left_out(trainer)["at"]
    trainer.step({"x": np.where(rows > 1, np.nan, rows)})
    np.testing.assert_array_equal(left_out(trainer)["at"], before)
    assert np.abs(before).max() > 0


def test_it_costs_a_gradient_of_the_whole_model_on_every_device():
    sharded = {
        name: ax.FSDP(CASES["tied"].model(), mesh_of(fsdp=4), sharding_strategy="shard_optimizer", reduce_wire=name)
        for name in ("int8", "int8-feedback")
    }
    held = {name: each.memory_estimate().optim_bytes for name, each in sharded.items()}
    trainer = sharded["int8-feedback"].trainer(optax.adam(1e-3), CASES["tied"].loss)
    resting = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trainer.state.left_out)]
    assert held["int8-feedback"] - held["int8"] == sum(resting) > 0


REFUSED = {
    r"stage=3 is there to avoid: use stage=1 \(shard_optimizer\)": lambda: ax.Shard(reduce_wire="int8-feedback"),
    "stage=2 is there to avoid": lambda: replace(FED_BACK, stage=2),
    "full_shard|stage=3": lambda: PlanConfig(reduce_wire="int8-feedback"),
    "what rests in host memory": lambda: trainer_of("tied", ax.Plan(fsdp=FED_BACK, offload="full"), {"fsdp": 2}),
    "a pipeline": lambda: trainer_of(
        "tied", ax.Plan(fsdp=FED_BACK, pipe=ax.Pipelined(num_microbatches=2)), {"pipe": 2, "fsdp": 2}
    ),
    "float16, whose loss scale": lambda: trainer_of("tied", ax.Plan(fsdp=FED_BACK, precision="fp16"), {"fsdp": 2}),
    "ranks that train models of their own": lambda: trainer_of(
        "tied", ax.Plan(fsdp=FED_BACK, data=ax.Replicate(sync_strategy="no_sync")), {"data": 2, "fsdp": 2}
    ),
    "rounds, and": lambda: trainer_of("tied", ax.Plan(fsdp=FED_BACK, data=ax.DiLoCo(every=2)), {"data": 2, "fsdp": 2}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_whole_gradient_of_a_rank_once_a_step_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
