"""`value_and_grad`, `no_sync`, `sync_gradients`, NO_SYNC and `sync_parameters`: the PyTorch-style half of the face."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plan_models import CASES, F64, TiedNet, mean_loss, regression, token_loss, tokens

import axonml_jax as ax
from axonml_jax.testing.equality import assert_trees_close

RANKS = 2


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, param_dtype=F64)(jnp.tanh(linen.Dense(4, param_dtype=F64)(x)))


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


def wrap(case, mesh, plan=None, **options):
    return ax.parallelize(CASES[case].model(), mesh, plan, params=CASES[case].params(), **options)


@pytest.mark.parametrize(
    "case, accumulate", [("dropout", 2), ("linen_dropout", 1), ("linen_dropout", 2), ("batch_norm", 1)]
)
def test_gradients_and_optax_by_hand_equal_the_fused_step(mesh, case, accumulate):
    loss_fn, tx = CASES[case].loss, optax.adamw(1e-2)
    fused = wrap(case, mesh).trainer(tx, loss_fn, accumulate=accumulate)
    by_hand = wrap(case, mesh, ax.Plan(accumulate=accumulate))
    gradients, opt_state = by_hand.value_and_grad(loss_fn), jax.jit(tx.init)(by_hand.parameters())

    @jax.jit
    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

    for seed in range(3):
        batch = CASES[case].batch(8, seed)
        returned, grads = gradients(batch)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        params, opt_state, norm = update(grads, opt_state, by_hand.parameters())
        by_hand.set_parameters(params)
        assert_trees_close({"loss": loss, "grad_norm": norm, **metrics}, fused.step(batch), f"step {seed}")
    assert_trees_close(by_hand.state_dict(), fused.model.state_dict(), "variables")
    assert_trees_close(opt_state, fused.state.opt_state, "optimizer state")


NNX, LINEN = TiedNet(nnx.Rngs(0)), LinenNet()
LINEN_VARIABLES = LINEN.init(jax.random.key(0), np.zeros((1, 5)))


def plain_loss(model, batch):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def plain_token_loss(model, batch):
    every = np.ones(np.shape(batch["keep"]))  # ranks that are not synchronized weigh alike, whatever they keep
    return token_loss(model, {**batch, "keep": jnp.asarray(every)})[0].value


def kind(name, mesh, **options):
    """A parallel model, its loss, a batch of n rows, and the gradient of one device as a function of rows."""
    if name == "linen":
        one = jax.grad(lambda p, rows: plain_loss(functools.partial(LINEN.apply, {"params": p}), rows))
        ddp = ax.DDP(LINEN, mesh, params=LINEN_VARIABLES, **options)
        return ddp, plain_loss, regression, functools.partial(one, LINEN_VARIABLES["params"])
    graph, params = nnx.split(NNX)
    one = jax.grad(lambda p, rows: plain_token_loss(nnx.merge(graph, p), rows))
    return ax.DDP(NNX, mesh, **options), plain_token_loss, tokens, lambda rows: nnx.to_pure_dict(one(params, rows))


def rows_of(batch, rank, ranks=RANKS):
    def rows(x):
        each = len(x) // ranks if np.ndim(x) else 0
        return x[rank * each : (rank + 1) * each] if np.ndim(x) else x

    return jax.tree.map(rows, batch)


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_no_sync_returns_each_ranks_own_gradients_and_sync_gradients_their_mean(mesh, name):
    ddp, loss_fn, make, one_device = kind(name, mesh)
    batch, gradients = make(6), ddp.value_and_grad(loss_fn)
    with ddp.no_sync():
        losses, own = gradients(batch)
    assert losses.shape == (RANKS,) and {g.shape[0] for g in jax.tree.leaves(own)} == {RANKS}
    for rank in range(RANKS):
        assert_trees_close(jax.tree.map(lambda g, r=rank: g[r], own), one_device(rows_of(batch, rank)), f"rank {rank}")
    loss, synced = gradients(batch)  # outside the context they are synchronized again
    assert_trees_close(ddp.sync_gradients(own), synced, "gradients synchronized afterwards")
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-12)


LOSSES_OF_ROWS = {
    "masked mean": lambda each, w: (each * w).sum() / w.sum(),
    "sum": lambda each, w: each.sum(),
    "logarithm": lambda each, w: jnp.log(1 + each.sum()),
}


@pytest.mark.parametrize("name", LOSSES_OF_ROWS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_microbatches_within_no_sync_take_the_loss_of_all_rows_of_a_rank(name, axis, check_vma):
    def loss_fn(model, batch):
        each = ((model(batch["x"]) - batch["y"]) ** 2)[:, 0]
        return LOSSES_OF_ROWS[name](each, batch["w"])

    drawn = np.random.default_rng(0)
    batch = {"x": drawn.normal(size=(8, 4)), "y": drawn.normal(size=(8, 1)), "w": np.array([1.0, 1, 1, 0, 1, 0, 0, 0])}
    make = lambda: nnx.Linear(4, 1, param_dtype=F64, rngs=nnx.Rngs(0))
    model = ax.parallelize(
        make(), ax.make_mesh(**{axis: 2}, devices=jax.devices()[:2]), ax.Plan(accumulate=2, check_vma=check_vma)
    )
    with model.no_sync():
        losses, grads = model.value_and_grad(loss_fn)(batch)
    for rank in range(2):
        rows = jax.tree.map(lambda x, at=4 * rank: x[at : at + 4], batch)
        loss, own = nnx.value_and_grad(loss_fn)(make(), rows)
        np.testing.assert_allclose(losses[rank], loss, rtol=1e-12)
        assert_trees_close(jax.tree.map(lambda g, r=rank: g[r], grads), nnx.to_pure_dict(own), f"rank {rank}")


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_two_microbatches_within_no_sync_equal_accumulation(mesh, name):
    ddp, loss_fn, make, _ = kind(name, mesh)
    halves, gradients = [make(4, seed) for seed in (0, 1)], ddp.value_and_grad(loss_fn)
    with ddp.no_sync():
        parts = [gradients(half)[1] for half in halves]
    synced = ddp.sync_gradients(jax.tree.map(lambda a, b: (a + b) / 2, *parts))
    accumulating = ax.parallelize(
        NNX if name == "nnx" else LINEN,
        mesh,
        ax.Plan(accumulate=2),
        params=None if name == "nnx" else LINEN_VARIABLES,
    )

    def joined(*halves):  # each rank's rows of the first half, then its rows of the second
        parts = [rows_of(half, rank) for rank in range(RANKS) for half in halves]
        return jax.tree.map(lambda *x: np.concatenate(x) if np.ndim(x[0]) else x[0], *parts)

    assert_trees_close(synced, accumulating.value_and_grad(loss_fn)(joined(*halves))[1], "gradients")


def test_no_sync_ends_with_its_context_even_after_an_error(mesh):
    ddp, loss_fn, make, _ = kind("linen", mesh)
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.value_and_grad(loss_fn)(make(4))[0].shape == ()


def test_sync_gradients_compiles_once_and_lists_every_leaf_that_does_not_fit(mesh):
    ddp, loss_fn, make, _ = kind("linen", mesh)
    with ddp.no_sync():
        own = ddp.value_and_grad(loss_fn)(make(4))[1]
    ddp.sync_gradients(own)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    ddp.sync_gradients(own)
    assert not [event for event in compiled if "compile" in event]
    own["Dense_0"]["bias"] = own["Dense_0"]["bias"][0]
    own["Dense_2"] = own.pop("Dense_1")
    with pytest.raises(ValueError, match="dim 0 of size 2") as caught:
        ddp.sync_gradients(own)
    for line in (
        "Dense_0/bias: (3,), needed (2, 3)",
        "Dense_1/bias: missing",
        "Dense_2/kernel: (2, 5, 4), needed nothing",
    ):
        assert line in str(caught.value)


def test_a_loss_function_need_not_be_hashable(mesh):
    class Loss:
        __hash__ = None

        def __call__(self, model, batch):
            return plain_loss(model, batch)

    ddp, loss_fn, make, _ = kind("linen", mesh)
    assert ddp.value_and_grad(Loss())(make(4))[0] == ddp.value_and_grad(loss_fn)(make(4))[0]


def bits(shard):
    return np.asarray(shard.data)[0].tobytes()


@pytest.mark.parametrize("case", ["batch_norm", "linen_batch_norm"])
def test_independent_models_differ_until_sync_parameters_makes_every_copy_bit_identical(mesh, case):
    ddp = wrap(case, mesh, ax.Plan(data=ax.Replicate(sync_strategy="no_sync")))
    trainer = ddp.trainer(optax.sgd(0.1), CASES[case].loss)
    metrics = trainer.step(CASES[case].batch(8))
    assert metrics["loss"].shape == metrics["grad_norm"].shape == (RANKS,)
    ddp.set_parameters(jax.tree.map(lambda x: x.at[:, ..., 0].set(-0.0), ddp.parameters()))
    before = [
        [bits(shard) for shard in leaf.addressable_shards]
        for leaf in jax.tree.leaves((ddp.variables.params, ddp.variables.state))
    ]
    assert any(len(set(copies)) > 1 for copies in before)
    ddp.sync_parameters()
    for leaf, copies in zip(jax.tree.leaves((ddp.variables.params, ddp.variables.state)), before, strict=True):
        assert [bits(shard) for shard in leaf.addressable_shards] == [copies[0]] * RANKS
    with ddp.no_sync():
        own = ddp.value_and_grad(CASES[case].loss)(CASES[case].batch(8, 1))[1]
    synced = ddp.sync_gradients(own)
    assert_trees_close(synced, jax.tree.map(lambda g: jnp.broadcast_to(g.mean(0), g.shape), own), "gradients")
    trainer.step(CASES[case].batch(8, 2))
    assert any(len({bits(s) for s in leaf.addressable_shards}) > 1 for leaf in jax.tree.leaves(ddp.parameters()))


def test_replicated_parameters_stay_bit_identical_on_every_device(mesh):
    ddp = wrap("dropout", mesh)
    ddp.trainer(optax.adam(1e-2), mean_loss).step(regression(8))
    ddp.sync_parameters()
    for leaf in jax.tree.leaves(ddp.parameters()):
        assert len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}) == 1
