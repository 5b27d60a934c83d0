"""`ax.Context`: the step, evaluation and calls are those of one device in every order; what it cannot run is refused."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import plain_mesh_of
from position_models import WIDTH, WORDS, LinenWords, Words, batch_of, loss

import axonml_jax as ax
from axonml_jax.strategies.strategy import current_split
from axonml_jax.testing import check_strategy
from axonml_jax.testing.equality import assert_equals_single_device

LENGTH = 12


class Sequences(Words):
    """Adds to every token what stands in a table for its position, and drops by global positions."""

    splits_positions = True

    def __init__(self, rate=0.0):
        super().__init__()
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=nnx.Rngs(1))
        self.rate, self.rngs = rate, nnx.Rngs(dropout=2) if rate else None

    def __call__(self, tokens):
        own = ax.context_positions(count := tokens.shape[1])
        if (whole := count if current_split() is None else count * jax.lax.axis_size("context")) != LENGTH:
            raise ValueError(f"a sequence of {whole}")
        x = self.table(tokens) + self.positions(own)
        if self.rate:
            key = self.rngs.dropout()
            draw = lambda place: jax.random.bernoulli(jax.random.fold_in(key, place), 1 - self.rate, x.shape[::2])
            x = x * jax.vmap(draw, out_axes=1)(own)
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return self.head(x)


class LinenSequences(LinenWords):
    splits_positions = True

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH)(tokens) + nn.Embed(LENGTH, WIDTH)(ax.context_positions(tokens.shape[1]))
        return nn.Dense(WORDS)(x + jnp.tanh(nn.Dense(WIDTH)(x)))


class Split(nnx.Module):
    """Layers split over `tensor`."""

    splits_positions = True

    def __init__(self):
        self.table = nnx.Embed(WORDS, WIDTH, rngs=nnx.Rngs(0))
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=nnx.Rngs(1))
        self.up = ax.ColumnParallelLinear(WIDTH, 8, rngs=nnx.Rngs(2))
        self.down = ax.RowParallelLinear(8, WORDS, rngs=nnx.Rngs(3))

    def __call__(self, tokens):
        x = self.table(tokens) + self.positions(ax.context_positions(tokens.shape[1]))
        return self.down(jnp.tanh(self.up(x)))


def by_position(model, batch):
    """The loss of a position counts as often as its number says."""
    (mean, metrics), places = loss(model, batch), 1.0 + ax.context_positions(batch["tokens"].shape[1])
    each = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["labels"]) * places
    return ax.WeightedMean(mean.total + each.sum(), mean.weight + batch["mask"].sum()), metrics


def plan_of(order="auto", shard=False, **settings):
    return ax.Plan(context=ax.Context(order=order, shard=shard), **settings)


def batches(count=2):
    return [batch_of(seed, LENGTH) for seed in range(count)]


ONE_F_ONE_B = ax.Pipelined(num_microbatches=2)
PLANS = {
    "zigzag": ({"context": 3}, plan_of()),
    "striped, with data": ({"data": 2, "context": 2}, plan_of("striped")),
    "contiguous, with data": ({"data": 2, "context": 2}, plan_of("contiguous", accumulate=2)),
    "typed": ({"data": 2, "context": 2}, plan_of(check_vma=True)),
    "models of their own": ({"data": 2, "context": 2}, plan_of(data=ax.Replicate(sync_strategy="no_sync"))),
    "zero1": ({"fsdp": 2, "context": 2}, plan_of(fsdp=ax.Shard(stage=1))),
    "zero2": ({"data": 2, "fsdp": 2, "context": 2}, plan_of("striped", fsdp=ax.Shard(stage=2), accumulate=2)),
    "zero3, typed": ({"fsdp": 2, "context": 2}, plan_of(fsdp=ax.Shard(stage=3), check_vma=True)),
    "sharded, zero1": ({"fsdp": 1, "context": 3}, plan_of("striped", True, fsdp=ax.Shard(stage=1))),
    "sharded, zero2": ({"data": 2, "fsdp": 2, "context": 2}, plan_of(shard=True, fsdp=ax.Shard(stage=2), accumulate=2)),
    "sharded, zero3": ({"fsdp": 2, "context": 2}, plan_of("striped", True, check_vma=True)),
    "sharded, whole updates": ({"fsdp": 2, "context": 2}, plan_of(shard=True, fsdp=ax.Shard(stage=2), update="whole")),
    "1f1b": ({"pipe": 2, "context": 2}, plan_of(pipe=ONE_F_ONE_B)),
    "1f1b, sharded": ({"pipe": 2, "fsdp": 2, "context": 2}, plan_of("striped", True, pipe=ONE_F_ONE_B)),
    "remat, bf16": ({"data": 2, "context": 2}, plan_of(remat="full", precision="bf16")),
    "offload": ({"fsdp": 2, "context": 2}, plan_of(shard=True, offload=ax.CPUOffload.FULL)),
}


@pytest.mark.parametrize("name", PLANS)
def test_sequences_split_over_ranks_train_as_on_one_device(name):
    degrees, plan = PLANS[name]
    assert_equals_single_device(
        Sequences(), by_position, batches(), plan, mesh=plain_mesh_of(degrees), max_grad_norm=0.5
    )


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"data": 2, "context": 2}, {"pipe": 2, "context": 2}])
def test_masks_follow_global_positions_as_all_ranks_have_the_same_keys(degrees):
    plan = plan_of(pipe=ONE_F_ONE_B) if "pipe" in degrees else plan_of("striped", accumulate=2)
    assert_equals_single_device(Sequences(rate=0.4), by_position, batches(), plan, mesh=plain_mesh_of(degrees))


@pytest.mark.slow
def test_layers_split_over_tensor_and_linen_models_do_too():
    mesh = plain_mesh_of({"data": 2, "context": 2, "tensor": 2})
    assert_equals_single_device(Split(), by_position, batches(), plan_of("striped"), mesh=mesh)
    model, mesh = LinenSequences(), plain_mesh_of({"fsdp": 2, "context": 2})
    params = model.init(jax.random.key(0), batch_of(0, LENGTH)["tokens"])
    for plan in (plan_of(), plan_of("striped", True)):
        assert_equals_single_device(model, by_position, batches(), plan, mesh=mesh, params=params)


@pytest.mark.parametrize("name", ["zigzag", "striped, with data", "zero3, typed", "sharded, zero3", "1f1b"])
def test_a_call_and_an_evaluation_are_those_of_one_device(name):
    degrees, plan = PLANS[name]
    model, batch = Sequences(), batch_of(0, LENGTH)
    parallel = ax.parallelize(model, plain_mesh_of(degrees), plan)
    np.testing.assert_allclose(parallel(batch["tokens"]), model(batch["tokens"]), rtol=1e-5, atol=1e-5)
    wanted, metrics = by_position(model, batch)
    got = parallel.trainer(optax.sgd(0.1), by_position).evaluate(batch)
    np.testing.assert_allclose(got["loss"], wanted.value, rtol=1e-5)
    np.testing.assert_allclose(got["accuracy"], metrics["accuracy"].value, rtol=1e-5)


class Normed(Sequences):
    """Its statistics are of all positions of all rows."""

    def __init__(self):
        super().__init__()
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(3))

    def __call__(self, tokens):
        return self.head(self.norm(self.table(tokens) + self.positions(ax.context_positions(tokens.shape[1]))))


def test_statistics_join_over_positions_and_frozen_parameters_stay():
    mesh = plain_mesh_of({"data": 2, "context": 2})
    assert_equals_single_device(
        Normed(), by_position, batches(), plan_of(), mesh=mesh, trainable="^(norm|head|positions)/"
    )


def test_generation_of_any_model_sees_windows_that_divide():
    model, prompts = Sequences(), batch_of(0, 5)["tokens"]
    given = {"length": 4, "key": jax.random.key(0), "temperature": 0, "window": LENGTH - 1}
    parallel = ax.parallelize(model, plain_mesh_of({"data": 3, "context": 2}), plan_of())
    wanted = ax.generate(lambda tokens: model(np.pad(tokens, ((0, 0), (0, 1)))), prompts, **given)
    np.testing.assert_array_equal(ax.generate(parallel, prompts, **given), wanted)


def test_a_loaders_batches_are_reordered_once_however_often_they_are_given():
    mesh, batch = plain_mesh_of({"data": 2, "context": 2}), batch_of(0, LENGTH)
    (loaded,) = ax.create_dataloader(batch, len(batch["rows"]), mesh, shuffle=False, num_epochs=1)
    trainer = ax.parallelize(Sequences(), mesh, plan_of()).trainer(optax.sgd(0.0), by_position)
    wanted = by_position(Sequences(), batch)[0].value
    for given in (loaded, loaded, batch, jax.tree.map(jnp.asarray, batch)):
        np.testing.assert_allclose(trainer.step(given)["loss"], wanted, rtol=1e-5)


def test_one_rank_changes_nothing_and_asks_nothing():
    model, batch = Words(), batch_of()
    parallel = ax.parallelize(model, plain_mesh_of({"data": 2, "context": 1}), plan_of())
    np.testing.assert_allclose(parallel(batch["tokens"]), model(batch["tokens"]), rtol=1e-5, atol=1e-6)
    assert parallel._placement.batch_layout.orders == ()


class Dropping(Sequences):
    def __init__(self, kind=nnx.Dropout, **options):
        super().__init__()
        self.blocks[0].drop = kind(0.5, rngs=nnx.Rngs(3), **options)


class LinenDropping(LinenSequences):
    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Dropout(0.5, name="drop")(nn.Embed(WORDS, WIDTH)(tokens), deterministic=not train)
        return nn.Dense(WORDS)(x)


def test_what_would_silently_be_wrong_is_refused_before_anything_is_allocated():
    mesh, own = plain_mesh_of({"data": 2, "context": 2}), ax.Plan(context=ax.Context(sees="own"))
    with pytest.raises(
        ValueError, match=r"context=2 splits sequences.*no module of the model declares.*splits_positions = True"
    ):
        ax.parallelize(lambda: Words(), mesh, own)
    with pytest.raises(ValueError, match="no module of the model declares"):
        params = LinenWords().init(jax.random.key(0), batch_of()["tokens"])
        ax.parallelize(LinenWords(), mesh, own, params=params)
    with pytest.raises(
        ValueError, match=r"same masks.*\{'blocks/0/drop': 0.5\} \(rates\); use ax.ParallelDropout\(.*positions=True"
    ):
        ax.parallelize(lambda: Dropping(), mesh, plan_of())
    with pytest.raises(ValueError, match=r"\{'blocks/0/drop': 0.5\}"):
        ax.parallelize(Dropping(ax.ParallelDropout, dim=-2), mesh, plan_of())
    ax.parallelize(Dropping(ax.ParallelDropout, dim=-2, positions=True), mesh, plan_of())
    with pytest.raises(ValueError, match=r"method=\(3, 'ring'\): 3 must divide the 2 ranks of context"):
        ax.parallelize(Sequences(), mesh, ax.Plan(context=ax.Context(method=(3, "ring"))))


def test_a_linen_models_plain_dropout_is_refused_in_its_first_call_and_evaluated():
    mesh, model, batch = plain_mesh_of({"context": 2}), LinenDropping(), batch_of(0, LENGTH)
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["tokens"])
    parallel = ax.parallelize(model, mesh, plan_of(), params=params)
    with pytest.raises(ValueError, match=r"drop: linen.Dropout of rate 0.5 would draw the same masks"):
        parallel(batch["tokens"])
    wanted = model.apply(params, batch["tokens"], train=False)
    np.testing.assert_allclose(parallel(batch["tokens"], train=False), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"method": "rings", "order": "dual"},
            r"method='rings' must be one of auto, .*; order='dual' must be one of auto, ",
        ),
        ({"method": (0, "ring")}, r"method=\(0, 'ring'\)"),
        ({"shard": "yes"}, "shard='yes' must be True or False"),
        ({"sync_strategy": "no_sync"}, "NO_SYNC: ranks along context have parts of the same sequences"),
    ],
)
def test_wrong_options_are_refused_with_all_that_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        ax.Context(**options)


def test_sharding_over_both_axes_is_one_strategy_made_of_the_plans_fsdp():
    plan = ax.Plan(context=ax.Context(shard=True, method=[2, "ring"]), fsdp=ax.Shard(stage=2, prefetch=0))
    assert list(plan.on(("data", "fsdp", "context"))) == ["data", ("fsdp", "context")]
    assert plan == dataclasses.replace(plan, accumulate=1) and hash(plan) == hash(dataclasses.replace(plan))
    assert plan.context.role.splits(("fsdp", "context")) == {"fsdp": "rows", "context": "positions"}
    assert (
        plan.context.in_words(("fsdp", "context"))
        == "ZeRO-2 over fsdp*context, sequences over context (zigzag, ring of 2)"
    )
    assert ax.Plan(axes={"context": ax.Context(order="striped")}).context.position_order == "striped"
    with pytest.raises(
        ValueError, match=r"shards parameters as the plan's fsdp does, which is Replicate\(.*fsdp=ax.Shard"
    ):
        ax.Plan(context=ax.Context(shard=True), fsdp=ax.Replicate())
    with pytest.raises(ValueError, match=r"which axes= gives to the strategy of \[\('fsdp', 'island'\)\]"):
        ax.Plan(context=ax.Context(shard=True), axes={("fsdp", "island"): ax.Shard()})
    with pytest.raises(ValueError, match=r"lacks \['fsdp'\]: give the mesh these axes"):
        ax.parallelize(Sequences(), plain_mesh_of({"context": 2}), ax.Plan(context=ax.Context(shard=True)))


@pytest.mark.slow
def test_the_strategy_keeps_the_contract():
    check_strategy(ax.Context(order="striped"), ranks=2)
