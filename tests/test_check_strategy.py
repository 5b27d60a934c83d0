"""`ax.testing.check_strategy` passes every strategy that keeps the contract, and names what a broken one does wrong."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
import pytest
from int8_strategy import Int8Shard
from plan_models import CASES
from ring_strategy import RingShard

import axonml_jax as ax
from axonml_jax.strategies.strategy import InLayers
from axonml_jax.testing import check_strategy

GOOD = {
    "replicate": ax.Replicate(gradient_as_bucket_view=False),
    "ZeRO-2": ax.Shard(stage=2),
    "ZeRO-3": ax.Shard(flat=True),
    "ZeRO-2, gathered as int8": ax.Shard(stage=2, wire="int8"),
    "ZeRO-3, gathered as fp8": ax.Shard(wire="fp8", flat=True),
    "ZeRO-2, reduced as bf16": ax.Shard(stage=2, reduce_wire="bf16"),
    "ZeRO-3, gathered and reduced as int8": ax.Shard(wire="int8", reduce_wire="int8", flat=True),
    "ZeRO-1, reduced as int8, fed back": ax.Shard(stage=1, reduce_wire="int8-feedback"),
    "a ring": RingShard(),
    "int8 with error feedback": Int8Shard(),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_keeps_the_contract_passes(name):
    check_strategy(GOOD[name])


@pytest.mark.slow
def test_hops_pass():
    check_strategy(ax.Shard(gather_hop=2, scatter_hop=2), ranks=4)
    check_strategy(ax.Shard(gather_hop=2, stage=1, wire="int8"), ranks=4)


@dataclass(frozen=True, kw_only=True)
class Averages(RingShard):
    def sync(self, grad, layout, axis):
        return super().sync(grad, layout, axis) / jax.lax.axis_size(axis)


@dataclass(frozen=True, kw_only=True)
class Forgets(RingShard):
    def gather(self, shard, layout, axis):
        return super().gather(shard * (jax.lax.axis_index(axis) > 0), layout, axis)


@dataclass(frozen=True, kw_only=True)
class SaysLess(RingShard):
    def gather_flows(self, elements, layout, axis, ranks, dtype):
        return super().gather_flows(elements, layout, axis, ranks, dtype)[1:]


@dataclass(frozen=True, kw_only=True)
class SaysNothingOfSums(RingShard):
    def sync_flows(self, elements, layout, axis, ranks, dtype):
        return ()


@dataclass(frozen=True, kw_only=True)
class PricesOneSizeOnly(RingShard):
    def sync_flows(self, elements, layout, axis, ranks, dtype):
        return super().sync_flows(int(elements), layout, axis, ranks, dtype)


class NoValue(RingShard):
    def __init__(self, **options):
        super().__init__(**options)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


BROKEN = {
    "a mean in the place of a sum": (Averages(), "sync, which must sum"),
    "a shard that is not sent": (Forgets(), "what rank 0 reads of a leaf is"),
    "a gather priced too low": (SaysLess(), "gather_flows says that"),
    "a sync priced at nothing": (SaysNothingOfSums(), "sync_flows says that"),
    "no arrays of sizes": (PricesOneSizeOnly(), "cannot be asked for many sizes at once"),
    "no value": (NoValue(), "is not equal to another one made alike"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_named(name):
    strategy, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_strategy(strategy)


@dataclass(frozen=True)
class NeverUpdatesItsError(Int8Shard):
    """What one device does, `after_update` says; a step that forgets to call it is seen."""

    def after_update(self, shard, state, layout, axis, *, before):
        return shard + 1e-3, state


@pytest.mark.slow
def test_a_training_step_calls_what_acts_between_steps(monkeypatch):
    check = NeverUpdatesItsError()
    monkeypatch.setattr(
        "axonml_jax.training.between_steps.after_update", lambda placement, params, before, state: (params, state)
    )
    with pytest.raises(AssertionError, match="step 1: loss"):
        check_strategy(check)


@pytest.mark.parametrize("strategy", [InLayers(), ax.Replicate(sync_strategy="no_sync")], ids=["layers", "never"])
def test_roles_that_cannot_be_checked_alone_are_refused(strategy):
    with pytest.raises(ValueError, match="only what splits the batch and reduces its gradients can be checked alone"):
        check_strategy(strategy)


def test_too_few_devices_are_said():
    with pytest.raises(ValueError, match="99 ranks need as many devices"):
        check_strategy(ax.Shard(), ranks=99)


def test_a_strategys_state_is_kept_with_the_run(tmp_path):
    """What is kept between steps goes into checkpoints, and a run goes on as if it had never stopped."""
    case = CASES["dropout"]
    mesh = ax.make_mesh(fsdp=2, devices=jax.devices()[:2])

    def trainer():
        return ax.parallelize(case.model(), mesh, ax.Plan(fsdp=Int8Shard())).trainer(optax.adamw(1e-2), case.loss)

    first, again = trainer(), trainer()
    batch = case.batch(4)
    first.step(batch)
    with ax.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, first)
        manager.wait()
        manager.restore(again)
    errors = [x for name, x in first.checkpoint_leaves().items() if name.startswith("strategies/fsdp/")]
    assert errors and any(np.any(np.asarray(leaf.whole())) for leaf in errors)
    losses = [float(each.step(batch)["loss"]) for each in (first, again)]
    assert losses[0] == losses[1]
    states = ((each.state.variables, each.state.strategies) for each in (first, again))
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))


def test_a_checkpoint_without_a_strategys_state_is_not_taken_in_silence(tmp_path):
    case, mesh = CASES["dropout"], ax.make_mesh(fsdp=2, devices=jax.devices()[:2])
    make = lambda plan: ax.parallelize(case.model(), mesh, plan).trainer(optax.adamw(1e-2), case.loss)
    with ax.CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, make(ax.Plan()))
        manager.wait()
        with pytest.raises(ValueError, match=r"strategies/fsdp/.*missing"):
            manager.restore(make(ax.Plan(fsdp=Int8Shard())))
        assert manager.restore(make(ax.Plan(fsdp=Int8Shard())), accept=("missing",)).step == 1


@dataclass(frozen=True, kw_only=True)
class SaysExact(RingShard):
    def round_trip(self, shard, layout, axis):
        return shard * 0.5


def test_a_lossy_strategy_must_say_so():
    with pytest.raises(AssertionError, match="round_trip changes a shard, so exact must be False"):
        check_strategy(SaysExact())


def test_what_acts_between_steps_is_refused_where_it_cannot():
    model, mesh = CASES["dropout"].model(), ax.make_mesh(fsdp=2, devices=jax.devices()[:2])
    plan = ax.Plan(fsdp=Int8Shard(), offload="optimizer_states")
    with pytest.raises(ValueError, match=r"Int8Shard.*use a plan without pipe and without offload"):
        ax.parallelize(model, mesh, plan)


UNSAID = {
    "Stateful": {"init_state": lambda self, param: param},
    "Lossy": {"feeds_back": True},
    "Bucketed": {"sync_bucket": lambda self, grads, layouts, axis: grads},
    "Reducer": {"bucket_bytes": 1},
    "SplitsPositions": {"position_dim": lambda self, path, shape: 2},
    "LeftToXLA": {"rewritten": lambda self, fun, axis, check_vma: fun},
    "Decides": {"model_problems": lambda self, model, axis, degrees: []},
    "LocalRounds": {"end_round": lambda self, *given: given},
}


@pytest.mark.parametrize("kind", UNSAID)
def test_what_nobody_would_ask_of_a_strategy_is_refused_where_its_class_is_defined(kind):
    with pytest.raises(TypeError, match=rf"Mine defines .*: inherit from it too, class Mine\(RingShard, ax\.{kind}\)"):
        type("Mine", (RingShard,), UNSAID[kind])
    mixin = type("Mixin", (), UNSAID[kind])  # nor by way of a class that is no strategy
    with pytest.raises(TypeError, match=f"ax.{kind}"):
        type("Mine", (mixin, RingShard), {})
    own = type("Mine", (RingShard, getattr(ax, kind)), UNSAID[kind])
    assert issubclass(own, ax.AbstractStrategy)


def test_a_capability_is_of_some_values_where_a_class_says_so():
    own, whole = ax.Context(sees="own"), ax.Context(sees="whole")
    assert own.having(ax.LeftToXLA) is None and whole.having(ax.LeftToXLA) is whole
    assert own.having(ax.SplitsPositions) is own and own.having(ax.Stateful) is None
