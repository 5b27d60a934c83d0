"""A step whose loss or gradients are not finite is skipped on every rank alike, counted, and too many in a row halt the run."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonml_jax as ax
from axonml_jax.cli.loop import Saves
from axonml_jax.config.config import read_config
from axonml_jax.sharding.layout import to_host
from axonml_jax.training.nonfinite import LossScale, NonFinite, skip_nonfinite
from axonml_jax.training.single_device import difference
from axonml_jax.training.state import TrainState

GOOD = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
BAD = GOOD.copy()
BAD[-1] = np.inf  # only the last rank's rows
LIMIT = 2
QUICKSTART = str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml")


class Net(nnx.Module):
    """A layer and running averages, which a bad batch would spoil too."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(self.norm(x))


def loss_fn(model, batch):
    return jnp.mean(model(batch) ** 2)


def equal_bits(a, b):
    assert jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


@pytest.mark.parametrize("facade", [ax.DDP, ax.FSDP])
def test_bad_steps_change_nothing_are_counted_and_halt_the_run(facade):
    axis = "data" if facade is ax.DDP else "fsdp"
    mesh = ax.make_mesh(devices=jax.devices()[:4], **{axis: 4})
    trainer = facade(Net(), mesh).trainer(optax.adam(0.1), loss_fn, max_nonfinite=LIMIT)
    kept = lambda: to_host((trainer.state.variables, trainer.state.opt_state))
    counts = lambda metrics: (int(metrics["skipped"]), int(metrics["skipped_in_a_row"]))
    assert counts(trainer.step(GOOD)) == (0, 0)
    before = kept()
    assert counts(trainer.step(BAD)) == (1, 1)
    equal_bits(kept(), before)
    assert trainer.state.step == 2  # randomness and schedules by step go on
    assert counts(trainer.step(GOOD)) == (1, 0)
    with pytest.raises(AssertionError):
        equal_bits(kept(), before)
    before = kept()
    assert [counts(trainer.step(batch)) for batch in (BAD, BAD)] == [(2, 1), (3, 2)]
    with pytest.warns(
        UserWarning, match=r"2 updates in a row were not finite, and max_nonfinite=2 halts the training there"
    ):
        assert [counts(trainer.step(batch)) for batch in (GOOD, BAD)] == [(3, 2), (3, 2)]
    equal_bits(kept(), before)  # halted: not even a good batch is taken
    assert int(trainer.state.guard.since) == 3


def state_of(scale=None, in_a_row=0):
    guard = NonFinite(jnp.int32(0), jnp.int32(in_a_row), jnp.int32(0))
    return TrainState(jnp.int32(7), None, None, None).keeping(loss_scale=scale, guard=guard)


@pytest.mark.parametrize(
    "loss, norm, scale, counted, kept",
    [
        (1.0, 1.0, None, 0, True),
        (np.nan, 1.0, None, 1, False),
        (1.0, np.inf, None, 1, False),
        (1.0, np.inf, 8.0, 0, False),  # float16 is looking for its scale
        (1.0, np.inf, 1.0, 1, False),
        (np.inf, np.inf, 8.0, 1, False),
    ],
)
def test_what_is_skipped_and_what_counts(loss, norm, scale, counted, kept):
    scale = scale and LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(0))
    new, after, guard, metrics = skip_nonfinite(state_of(scale), 2.0, 1.0, jnp.float32(loss), jnp.float32(norm), LIMIT)
    assert (float(new) == 2.0) is kept and int(guard.in_a_row) == counted
    assert int(metrics["skipped"]) == int(not kept) and (not counted or int(guard.since) == 7)
    assert scale is None or float(after.scale) == max(1.0, float(scale.scale) / 2)


@pytest.mark.parametrize("norm", [1.0, np.inf])
def test_without_a_limit_too_the_metrics_count_the_step_that_they_are_of(norm):
    scale, told = LossScale(jnp.float32(8), jnp.int32(0), jnp.int32(3)), TrainState(jnp.int32(7), None, None, None)
    _, after, _, metrics = skip_nonfinite(
        told.keeping(loss_scale=scale), 2.0, 1.0, jnp.float32(1), jnp.float32(norm), None
    )
    assert int(metrics["skipped"]) == int(after.skipped) == (3 if norm == 1.0 else 4) and metrics["loss_scale"] == 8


def test_the_option_is_checked_before_anything_is_allocated():
    model = ax.DDP(Net(), ax.make_mesh(data=2, devices=jax.devices()[:2]))
    for limit in (0, True, 1.5):
        with pytest.raises(ValueError, match="must be a whole number from 1"):
            model.trainer(optax.sgd(0.1), loss_fn, max_nonfinite=limit)


def test_a_checkpoint_with_counts_restores_without_and_the_other_way_round(tmp_path):
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    trainers = [ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), loss_fn, max_nonfinite=limit) for limit in (LIMIT, None)]
    for number, (source, target) in enumerate((trainers, trainers[::-1])):
        ax.restore(ax.save(tmp_path / str(number), source), target)
    assert trainers[1].state.guard is None and int(trainers[0].state.guard.skipped) == 0


class NoSignal:
    """Nobody asks to stop."""

    def stop_after(self, step):
        """Never."""
        return False


def test_a_diverged_run_stops_and_its_first_bad_step_is_saved_and_repeats(tmp_path):
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    rows = np.concatenate([GOOD, GOOD, BAD, BAD, BAD, GOOD])
    config = read_config("train", [QUICKSTART, "--train.max_nonfinite=2", "--train.log_every=3", "--train.steps=99"])

    def start():
        loader = ax.create_dataloader(rows, 8, mesh, shuffle=False)
        return ax.DDP(Net(), mesh).trainer(optax.sgd(0.1), loss_fn, max_nonfinite=2), loader

    trainer, loader = start()
    with ax.CheckpointManager(tmp_path / "checkpoints", every=1) as manager:
        saves = Saves(manager, trainer, loader, config, NoSignal(), tmp_path / "nonfinite")
        saves._positions.append((2, {"of": "this step before a rollback"}))
        for step, batch in enumerate(loader, 1):
            metrics = trainer.step(batch)
            if saves(step, {"loss": 1.0} if step % 3 == 0 else {}):
                break
    assert step == 4 and "2 updates in a row were not finite, the first after step 2" in saves.diverged
    assert manager.steps == [1, 2]  # nothing of the row is a checkpoint to resume from
    again, loader = start()
    ax.restore(tmp_path / "nonfinite", again, data=loader)
    assert int(again.state.step) == 2
    metrics = again.step(next(iter(loader)))
    assert not np.isfinite(metrics["loss"]) and int(metrics["skipped_in_a_row"]) == 1


def test_ranks_that_train_by_themselves_skip_and_halt_by_themselves(tmp_path):
    mesh = ax.make_mesh(data=2, devices=jax.devices()[:2])
    rows = np.concatenate([GOOD, BAD, BAD, BAD, GOOD])  # only the second rank's
    config = read_config("train", [QUICKSTART, "--train.max_nonfinite=2", "--train.log_every=1", "--train.steps=99"])
    model = ax.DDP(Net(), mesh, sync_strategy="no_sync")
    trainer, loader = (
        model.trainer(optax.sgd(0.1), loss_fn, max_nonfinite=2),
        ax.create_dataloader(rows, 8, mesh, shuffle=False),
    )
    saves, kept, counts = Saves(None, trainer, loader, config, NoSignal(), tmp_path / "nonfinite"), [], []
    for step, batch in enumerate(loader, 1):
        metrics = trainer.step(batch)
        kept.append(to_host(model.parameters()))
        counts.append(to_host(metrics["skipped"]).tolist())
        if saves(step, {"loss": 1.0}):
            break
    assert counts == [[0, 0], [0, 1], [0, 2]] and step == 3
    assert "2 updates in a row of replica 1 were not finite, the first after step 1" in saves.diverged
    equal_bits(*(jax.tree.map(lambda x: x[1], tree) for tree in (kept[0], kept[2])))
    with pytest.raises(AssertionError):
        equal_bits(*(jax.tree.map(lambda x: x[0], tree) for tree in (kept[0], kept[2])))
    ax.restore(tmp_path / "nonfinite", trainer, data=loader)
    assert int(trainer.state.step) == 3 and to_host(trainer.state.guard.in_a_row).tolist() == [0, 0]


def test_a_run_is_asked_once_after_every_step_whether_it_ends():
    asked = []
    preemption = SimpleNamespace(stop_after=lambda step: asked.append(step) or step == 3)
    config = read_config("train", [QUICKSTART, "--train.steps=9"])
    saves = Saves(None, None, SimpleNamespace(state_dict=dict), config, preemption, None)
    ends = [(saves.ends_after(step), saves(step, {})) for step in (1, 2, 3)]
    assert asked == [1, 2, 3] and ends == [(False, False), (False, False), (True, True)] and saves.stopped == 3
    assert saves.ends_after(9)


@pytest.mark.parametrize("norm_type", [2.0, np.inf])
def test_one_nan_in_the_gradient_of_one_rank_is_skipped_whatever_the_norm(norm_type):
    """The loss is finite. XLA's maximum over CPU devices leaves NaN out."""

    def loss(model, batch):
        zero = jnp.where(batch["bad"], 0 * model.layer.kernel[0, 0], 1.0)  # the square root of 0 has no derivative
        return loss_fn(model, batch["x"]) + jnp.sqrt(zero)

    mesh = ax.make_mesh(devices=jax.devices()[:4], fsdp=4)
    trainer = ax.FSDP(Net(), mesh).trainer(optax.sgd(0.1), loss, max_nonfinite=LIMIT, norm_type=norm_type)
    before = to_host(trainer.state.variables)
    metrics = trainer.step({"x": GOOD, "bad": np.array(True)})
    assert np.isfinite(metrics["loss"]) and np.isnan(metrics["grad_norm"]) and int(metrics["skipped"]) == 1
    equal_bits(to_host(trainer.state.variables), before)


def test_extremes_over_rows_are_nan_where_a_row_is():
    def loss(model, batch):
        made = model.layer(batch)
        return jnp.mean(jnp.nan_to_num(made) ** 2), {
            "most": jnp.max(made),
            "least": jnp.min(made, 0),
            "span": jnp.ptp(made),
        }

    bad = np.where(np.arange(8)[:, None] == 5, np.float32(np.nan), GOOD)
    model = ax.DDP(Net(), ax.make_mesh(data=4, devices=jax.devices()[:4]))
    trainer = model.trainer(optax.sgd(0.1), loss)
    for made in (trainer.evaluate(bad), trainer.step(bad)):
        assert np.isfinite(made["loss"]) and all(np.isnan(made[name]).all() for name in ("most", "least", "span"))


@pytest.mark.parametrize(
    ("got", "wanted", "said"),
    [
        (np.inf, np.inf, None),
        ([np.nan, 1.0], [np.nan, 1.0], None),
        (np.inf, -np.inf, "infinite or NaN in both, and not the same"),
        (np.nan, np.inf, "infinite or NaN in both, and not the same"),
        ([-np.inf, 1.0], [-np.inf, 5.0], "max|a-b| = 4 > 5e-09 (max|b| = 5)"),
        ([np.inf, 1.0], [1.0, np.inf], "finite in one and not in the other"),
    ],
)
def test_values_that_are_not_finite_are_compared_as_they_are(got, wanted, said):
    assert difference(np.asarray(got), np.asarray(wanted), False) == said
