"""Rows that a model's own code mixes are those of the whole batch under every plan, or a warning names the line."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.layers.experts import RouterState
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.testing.equality import assert_equals_single_device

X = np.random.default_rng(0).normal(size=(16, 6))
BATCH = {"x": X, "y": X[:, :1] ** 2}
F64 = {"param_dtype": jnp.float64}


def scanned(h):
    return jax.lax.scan(lambda h, _: (h - h.mean(0), None), h, None, length=2)[0]


def constant_of_loop(h, mean):
    return jax.lax.scan(lambda h, _: (h - mean, None), h, None, length=2)[0]


def remembered(h):
    return jax.checkpoint(lambda h: h / jnp.sqrt(jnp.var(h) + 1e-3))(h)


def until_small(h):
    return jax.lax.while_loop(lambda h: jnp.abs(h).max() > 1, lambda h: 0.7 * h, jax.lax.stop_gradient(h))


MIXING = {
    "centred": lambda h: h - h.mean(0),
    "whitened": lambda h: (h - h.mean(0)) / (h.std(0) + 1e-3),
    "by the largest": lambda h: h / jnp.abs(h).max(),
    "a feature of all rows": lambda h: jnp.concatenate([h[:, 1:], jnp.broadcast_to(h.std(0).mean(), (len(h), 1))], 1),
    "in a loop": scanned,
    "recomputed": remembered,
    "softmax over rows": lambda h: jax.nn.softmax(h, axis=0),
    "behind a derivative of its own": lambda h: h - jax.nn.relu(h.mean(0)),
    "by a constant of a loop": lambda h: constant_of_loop(h, h.mean(0)),
    "merged with features": lambda h: (h.reshape(-1) - h.reshape(-1).mean()).reshape(h.shape),
    "by their covariance": lambda h: h @ jnp.linalg.inv(h.T @ h / 8 + jnp.eye(6)),
    "sorted": lambda h: jnp.sort(h, 0),
    "added up": lambda h: jnp.cumsum(h, 0),
    "the largest so far": lambda h: jax.lax.cummax(h, 0),
    "the largest two of each feature": lambda h: h - jax.lax.top_k(h.T, 2)[0][:, 1],
    "attention over rows": lambda h: jax.nn.softmax(h @ h.T) @ h,
    "by a matrix of rows": lambda h: jnp.tril(jnp.ones((len(h), len(h)), h.dtype)) @ h,
    "an orthogonal basis": lambda h: jnp.linalg.qr(h)[0],
    "the largest of neighbours": lambda h: jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (3, 1), (1, 1), "SAME"),
    "in a tree of sums": lambda h: jax.lax.associative_scan(jnp.add, h),
    "by their distances": lambda h: h * jnp.exp(-jnp.square(h[:, None] - h[None]).sum(-1)).mean(1, keepdims=True),
    "solved with all rows": lambda h: jnp.linalg.solve(2 * jnp.eye(len(h)) + h @ h.T, h),
}
DECIDED = {
    "by their number": lambda h: h * (h > 0).sum(0),
    "by whether any is": lambda h: h * jnp.where(jnp.any(h > 1.5, 0), 2.0, 1.0),
    "by a condition": lambda h: jnp.where((h > 0).sum(0) > 8, h, 2 * h),
    "by a branch": lambda h: jax.lax.cond(h[:, 0].max() > 0.9, lambda h: 2 * h, jnp.tanh, h),
    "by when a loop ends": lambda h: h + until_small(h),
}
TABLE = jnp.arange(192.0, dtype=jnp.float64).reshape(32, 6) / 96
NUMBERED = {
    "the mean of so many entries": lambda h: h * TABLE[: len(h)].mean(0),
    "the entry of their number": lambda h: h * TABLE[len(h)],
    "as many trips": lambda h: jax.lax.fori_loop(0, len(h), lambda i, h: jnp.tanh(h + 0.1), h),
    "until as many trips are made": lambda h: (
        h
        * jax.lax.while_loop(lambda c: c[0] < len(h), lambda c: (c[0] + 1, c[1] / 2), (0, jax.lax.stop_gradient(h)))[1]
    ),
    "the spread of a line": lambda h: h * jnp.linspace(0, 1, len(h)).std(),
    "the largest of so many": lambda h: h * (1 + jax.lax.top_k(TABLE[:, 0], len(h) // 4)[0].sum()),
    "repeated by their number": lambda h: h + jnp.repeat(TABLE[:2], len(h) // 2, axis=0),
    "resized to their number": lambda h: h + jax.image.resize(TABLE, (len(h), 6), "linear"),
    "a sum in Python": lambda h: h * sum(TABLE[i, 0] for i in range(len(h))),
    "less as many of a queue": lambda h: h - jnp.tanh(TABLE[: len(h)]).mean(0) * jnp.ones((len(h), 1)),
    "a number that as many trips make": lambda h: (
        h * jax.lax.while_loop(lambda c: c[0] < len(h), lambda c: (c[0] + 1, c[1] / 2), (0, 1.0))[1]
    ),
    "counted down": lambda h: (
        h * jax.lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, 0.9 * c[1]), (len(h), jnp.ones(6)))[1]
    ),
    "a scan over so many entries": lambda h: (
        h * jax.lax.scan(lambda c, row: (c * jnp.cos(row), row), 1.0, TABLE[: len(h), 0])[0]
    ),
    "a branch by their number": lambda h: jax.lax.cond(jnp.asarray(len(h)) > 8, jnp.sin, jnp.cos, h),
    "compared with so many entries": lambda h: jnp.where(h > TABLE[: len(h)].mean(), h, 2 * h),
    "the feature of their number": lambda h: h * h[:, len(h) // 4 - 1 :][:, :1],
    "as many features": lambda h: h * h[:, : len(h) // 4].mean(1, keepdims=True),
    "features rolled by their number": lambda h: h + 2 * jnp.roll(h, len(h) // 4, 1),
    "solved by so many entries": lambda h: (
        h * jnp.linalg.solve(jnp.eye(len(h)) * 2 + TABLE[: len(h), :1], TABLE[: len(h)]).mean(0)
    ),
    "by their number": lambda h: h * len(h),
    "over their number": lambda h: jnp.exp(h / len(h)),
    "beside their number": lambda h: h + 1 / len(h),
    "to a power": lambda h: jnp.abs(h) ** len(h),
    "by their numbers": lambda h: h + 0.1 * jnp.arange(len(h))[:, None],
    "by numbers of NumPy": lambda h: h + 0.1 * np.arange(len(h))[:, None],
    "chosen by their numbers": lambda h: jnp.where(jnp.arange(len(h))[:, None] < 3, h, 0),
    "beside a diagonal": lambda h: h + jnp.eye(*h.shape),
    "along a line": lambda h: h * jnp.linspace(0, 1, len(h))[:, None],
    "numbers as a feature": lambda h: jnp.concatenate([h[:, 1:], jnp.arange(len(h))[:, None] / 8], 1),
    "the first": lambda h: h - h[:1],
    "the last": lambda h: h - h[-1],
    "the mean of the first two": lambda h: h - h[:2].mean(0),
    "written to the first": lambda h: h.at[0].set(0.5),
    "added to the last": lambda h: h.at[-1].add(0.5),
    "backwards": lambda h: h + h[::-1],
    "backwards alone": lambda h: h[::-1],
    "rolled": lambda h: h + jnp.roll(h, 1, 0),
    "shifted": lambda h: h + jnp.pad(h[:-1], ((1, 0), (0, 0))),
    "differences": lambda h: jnp.concatenate([h[:1], h[1:] - h[:-1]]),
    "halves": lambda h: jnp.concatenate([sum(jnp.split(h, 2))] * 2),
    "in a loop": lambda h: jax.lax.scan(lambda h, _: (h - h[:1], None), h, None, length=2)[0],
    "recomputed": jax.checkpoint(lambda h: jnp.tanh(h * len(h))),
    "permuted": lambda h: h[np.random.default_rng(0).permutation(len(h))],
    "looked up": lambda h: h - jnp.take(h, jnp.array([0]), axis=0),
    "the row before, in Python": lambda h: jnp.concatenate(
        [h[:1], *(h[i : i + 1] - h[i - 1 : i] for i in range(1, len(h)))]
    ),
    "in Python": lambda h: jnp.stack([h[i] - h[i - 1] for i in range(len(h))]),
    "backwards, in Python": lambda h: jnp.concatenate([h[i : i + 1] for i in reversed(range(len(h)))]),
}
APART = {
    "beside a token for each": lambda h: h + jnp.tanh(jnp.tile(TABLE[:1], (len(h), 1)) @ TABLE[:6]),
    "beside a repeated token": lambda h: h * (1 + jnp.repeat(TABLE[1:2], len(h), axis=0)).mean(-1, keepdims=True),
    "learned queries": lambda h: attended(jnp.broadcast_to(TABLE[:3], (len(h), 3, 6)), h.reshape(-1, 1, 6)),
    "beside zeros for each": lambda h: h + jnp.cumsum(jnp.zeros((len(h), 6)) + TABLE[2], -1),
    "over features": lambda h: (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-3),
    "a barrier beside a weight": lambda h: jax.lax.optimization_barrier((h, jnp.ones(3)))[0],
    "a number beside": lambda h: h + 0 * jnp.float32(len(h)),
    "a mean of its parts": lambda h: ((h / len(h)).sum(0), h)[1],
    "by chunks": lambda h: jnp.concatenate([jnp.tanh(chunk) for chunk in jnp.split(h, 2)]),
    "padded": lambda h: h + jnp.tanh(jnp.pad(h, ((0, 3), (0, 0))))[: len(h)],
    "beside a row of zeros": lambda h: jnp.tanh(jnp.concatenate([h, jnp.zeros((1, 6), h.dtype)]))[:-1],
    "two views, one after the other": lambda h: sum(jnp.split(jnp.tanh(jnp.concatenate([h, h[:, ::-1]])), 2)),
    "the first of its features": lambda h: h - h[:, :1],
    "every row by itself": lambda h: jax.vmap(lambda row: row - row[0] + row[::-1])(h),
    "merged with features": lambda h: h + jnp.tanh(h.reshape(-1)).reshape(len(h), 3, 2)[:, ::-1].reshape(h.shape),
    "one of its features written": lambda h: h.at[jnp.arange(len(h)), 0].set(0.5),
    "one row after the other": lambda h: jax.lax.map(lambda row: row - row[:1], h),
    "the last of its features": lambda h: (
        h + h.reshape(-1, 3, 2)[jnp.arange(len(h)), (h[:, 0] > 0).astype(int)].repeat(3, 1)
    ),
    "views averaged": lambda h: jnp.tile(h, (3, 1)).reshape(3, -1, 6).mean(0),
    "in a tree of sums of features": lambda h: jax.lax.associative_scan(jnp.add, h, axis=1),
    "solved by itself": lambda h: jnp.linalg.solve(jnp.eye(6) + jnp.einsum("ni,nj->nij", h, h), h[..., None])[..., 0],
}
UNKNOWN = {
    "experts": lambda h: routed(h),
    "experts by a threshold": lambda h: routed(
        h, lambda scores: (scores >= scores.max(-1, keepdims=True)).astype(h.dtype)
    ),
    "experts by numbers": lambda h: routed(
        h, lambda scores: jnp.where(jnp.arange(2) == jnp.argmax(scores, -1)[:, None], 0.5 + jax.nn.sigmoid(scores), 0)
    ),
    "counts of experts": lambda h: counted(h),
    "capacities of experts": lambda h: within_capacity(h),
    "chunks in a loop": lambda h: chunks_in_a_loop(h),
    "ordered by a feature": lambda h: h[jnp.argsort(h[:, 0])],
    "the row of the largest": lambda h: h - h[jnp.argmax(h[:, 0])],
    "sums of groups": lambda h: jax.ops.segment_sum(h, jnp.arange(len(h)) % 3, 3)[jnp.arange(len(h)) % 3],
    "groups of rows": lambda h: h.reshape(2, -1, 6).mean(0).repeat(2, 0),
    "by NumPy": lambda h: (
        h * jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), jax.lax.stop_gradient(h))
    ),
}
"""What may be a row's own, or all rows', and which it is cannot be told without running it."""


def attended(queries, keys):
    """[n, q, d], [n, k, d] -> [n, d]."""
    return (jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", queries, keys + TABLE[:4])) @ (keys + TABLE[:4])).mean(1)


def one_hot(scores):
    return jax.nn.one_hot(jnp.argmax(scores, -1), 2, dtype=scores.dtype)


def routed(h, choose=one_hot):
    """Every row goes to one of two products through slots, as capacity routers send it: contractions over rows, no mixing."""
    mask = choose(h[:, :2])
    slots = jax.nn.one_hot((jnp.cumsum(mask > 0, 0) * (mask > 0)).max(-1) - 1, len(h), dtype=h.dtype)
    sent = jnp.einsum("te,tc,td->ecd", mask, slots, h)
    return jnp.einsum("te,tc,ecd->td", mask, slots, jnp.tanh(sent))


def within_capacity(h):
    """Slots in a buffer whose size grows with the rows; those beyond it are dropped."""
    capacity, chosen = len(h) * 3 // 4, jnp.argmax(h[:, :2], -1)
    mask = jax.nn.one_hot(chosen, 2, dtype=jnp.int32)
    place = (jnp.cumsum(mask, 0) * mask).max(-1) - 1
    kept, place = place < capacity, jnp.where(place < capacity, place, capacity)
    slots = jnp.zeros((2, capacity + 1, h.shape[1]), h.dtype).at[chosen, place].set(h)[:, :capacity]
    return jnp.where(kept[:, None], jnp.tanh(slots)[chosen, jnp.minimum(place, capacity - 1)], 0)


def chunks_in_a_loop(h):
    size = len(h) // 2

    def trip(k, made):
        chunk = jax.lax.dynamic_slice_in_dim(h, k * size, size)
        return jax.lax.dynamic_update_slice_in_dim(made, chunk + jnp.tanh(chunk), k * size, 0)

    return jax.lax.fori_loop(0, 2, trip, jnp.zeros_like(h))


def counted(h):
    """Rows in the order of their experts, as dropless routers sort them: counts of rows are read for places alone."""
    chosen = jnp.argmax(h[:, :3], -1)
    ends = jnp.cumsum((chosen[:, None] == jnp.arange(3)).sum(0))
    order = jnp.argsort(chosen)
    expert = (jnp.arange(len(h))[:, None] >= ends).sum(-1)
    return jnp.zeros_like(h).at[order].set(jnp.tanh(h[order] * (1.0 + expert)[:, None]))


def normalized():
    norm = nnx.BatchNorm(6, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    norm.mean, norm.var = nnx.BatchStat(jnp.zeros(6, jnp.float64)), nnx.BatchStat(jnp.ones(6, jnp.float64))
    return norm


class Net(nnx.Module):
    def __init__(self, mixes, norm=False):
        rngs = nnx.Rngs(0)
        self.first, self.last = (nnx.Linear(6, n, rngs=rngs, param_dtype=jnp.float64) for n in (6, 1))
        self.mixes, self.norm = mixes, normalized() if norm else None

    def __call__(self, x):
        h = self.first(x)
        return self.last(jnp.tanh(self.mixes(h if self.norm is None else self.norm(h))))


class LinenNet(linen.Module):
    mixes: Callable

    @linen.compact
    def __call__(self, x):
        h = linen.Dense(6, param_dtype=jnp.float64)(x)
        return linen.Dense(1, param_dtype=jnp.float64)(jnp.tanh(self.mixes(h)))


def mean(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def weighted(model, batch):
    errors = (model(batch["x"]) - batch["y"]) ** 2
    return ax.WeightedMean(errors.sum(), 1.0 * errors.size)


def root(model, batch):
    return jnp.sqrt(mean(model, batch)), {"largest": jnp.abs(model(batch["x"])).max()}


LOSSES = {"mean": mean, "weighted": weighted, "root": root}
PLANS = {
    "ddp": ({"data": 4}, ax.Plan()),
    "ddp, typed": ({"data": 4}, ax.Plan(check_vma=True)),
    "zero3": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard())),
    "zero2, hybrid": ({"data": 2, "fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=2))),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MIXING)
def test_rows_that_a_model_mixes_are_those_of_the_whole_batch(kind, plan, loss):
    degrees, settings = PLANS[plan]
    assert_equals_single_device(Net(MIXING[kind]), LOSSES[loss], BATCH, settings, mesh=mesh_of(degrees), steps=2)


def over_rows(join, x):
    """A collective over the axis of one's own `jax.vmap` of rows."""
    return jax.vmap(lambda row: join(row, "row"), axis_name="row", out_axes=None)(x)


def of_sums(model, batch):
    made = model(batch["x"])
    loss = (over_rows(jax.lax.psum, made) ** 2).mean() + jax.nn.logsumexp(over_rows(jax.lax.pmean, made))
    return loss + mean(model, batch), {"total": over_rows(jax.lax.psum, made).sum(), "largest": largest_of(made)}


def largest_of(x):
    return over_rows(jax.lax.pmax, jax.lax.stop_gradient(x)).sum()


def masked(model, batch):
    made, kept = model(batch["x"])[:, 0], (batch["y"][:, 0] > 1).astype(float)
    return over_rows(jax.lax.psum, jnp.square(made) * kept) / over_rows(jax.lax.psum, kept)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@pytest.mark.parametrize("loss", [of_sums, masked])
def test_losses_over_an_axis_of_vmap_mean_all_rows(loss, plan):
    degrees, settings = PLANS[plan]
    assert_equals_single_device(Net(jnp.tanh), loss, BATCH, settings, mesh=mesh_of(degrees), steps=2)


def test_typed_mode_refuses_collectives_over_an_axis_of_vmap_with_the_line():
    trainer = ax.DDP(Net(jnp.tanh), mesh_of(data=2), check_vma=True).trainer(optax.sgd(0.1), masked)
    with pytest.raises(ValueError, match=r"fails at .*test_mixing.py:\d+.*over an axis of jax.vmap.*check_vma=False"):
        trainer.step(BATCH)


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_collectives_over_an_axis_of_vmap_are_of_all_rows(plan):
    degrees, settings = PLANS[plan]
    largest = lambda row: jax.lax.pmax(jax.lax.stop_gradient(abs(row).sum()), "b")  # JAX does not differentiate it
    model = Net(jax.vmap(lambda row: row - jax.lax.pmean(row, "b") / largest(row), axis_name="b"))
    assert_equals_single_device(model, mean, BATCH, settings, mesh=mesh_of(degrees), steps=2)


class Embedded(nnx.Module):
    """Rows that are looked up, and decorrelated."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.last = nnx.Embed(9, 6, rngs=rngs, **F64), nnx.Linear(6, 1, rngs=rngs, **F64)

    def __call__(self, ids):
        h = self.embed(ids)
        return self.last(h @ jnp.linalg.inv(h.T @ h / 16 + jnp.eye(6)))


def test_rows_that_are_looked_up_are_no_mask():
    ids = np.arange(16) * 5 % 9
    loss = lambda model, ids: ((model(ids) - ids[:, None]) ** 2).mean()
    assert_equals_single_device(Embedded(), loss, ids, mesh=mesh_of(data=4), steps=2)


class WithExperts(nnx.Module):
    """Rows that are mixed behind experts, which send them through sorts and slots, and join their counts over ranks."""

    def __init__(self, mixes, **options):
        rngs = nnx.Rngs(0)
        self.experts = ax.ParallelMoE(6, 8, 4, rngs=rngs, **F64, **options)
        self.last, self.mixes = nnx.Linear(6, 1, rngs=rngs, **F64), mixes

    def __call__(self, x):
        h, router = self.experts(x[:, None])
        return self.last(jnp.tanh(self.mixes(h[:, 0]))), router.load_balance


def balanced(model, batch):
    made, balance = model(batch["x"])
    return ((made - batch["y"]) ** 2).mean() + 0.1 * balance


EXPERTS = {
    "softmax": {},
    "a bias that is learned": {"router": ax.SigmoidRouter(top_k=2)},
    "capacity": {"capacity_factor": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["centred", "by their number"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_rows_that_are_mixed_behind_experts_are_those_of_the_whole_batch(experts, kind, plan):
    degrees, settings = PLANS[plan]
    make = lambda: WithExperts((MIXING | NUMBERED)[kind], **EXPERTS[experts])
    parallel, plain = ax.parallelize(make(), mesh_of(degrees), settings), make()
    trainer, optimizer = parallel.trainer(optax.sgd(0.1), balanced), nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        loss, grads = nnx.value_and_grad(balanced)(plain, BATCH)
        optimizer.update(plain, grads)
        plain.experts.after_update()
        np.testing.assert_allclose(trainer.step(BATCH)["loss"], loss, rtol=1e-9)
    wanted = named_leaves(nnx.to_pure_dict(nnx.state(plain, (nnx.Param, RouterState))))
    for name, found in parallel.state_dict().items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("plan", [({"data": 2}, ax.Plan(accumulate=2)), ({"expert": 2}, ax.Plan())], ids=str)
def test_rows_that_are_mixed_behind_split_experts_are_named(plan):
    degrees, settings = plan
    for mixes, warns in ((MIXING["centred"], True), (jnp.sin, False)):
        trainer = ax.parallelize(WithExperts(mixes), mesh_of(degrees), settings).trainer(optax.sgd(0.1), balanced)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.step(BATCH)
        assert ["model's code mixes rows" in str(each.message) for each in said] == [True] * warns


class Stepped(WithExperts):
    """State that follows from no rows, beside experts that join their counts over ranks."""

    def __init__(self, mixes, **options):
        super().__init__(mixes, **options)
        self.steps, self.mean = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.zeros((), jnp.float64))

    def __call__(self, x):
        self.steps[...] += 1
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * jax.lax.stop_gradient(self.last.kernel[...].sum())
        return super().__call__(x)


@pytest.mark.slow
def test_state_that_follows_from_no_rows_moves_once_beside_experts():
    model = ax.parallelize(Stepped(jnp.sin), mesh_of(data=2), ax.Plan(accumulate=4))
    model.trainer(optax.sgd(0.1), balanced).step(BATCH)
    plain = Stepped(jnp.sin)
    plain(BATCH["x"])
    assert model.module.steps[...] == 1
    np.testing.assert_allclose(model.module.mean[...], plain.mean[...], rtol=1e-12)


def recomputed(model, batch):
    made, _ = nnx.remat(lambda model, x: model(x))(model, batch["x"])
    return ((made - batch["y"]) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["softmax", "a bias that is learned"])
def test_a_loss_that_transforms_a_model_with_experts_is_a_plain_mean_where_it_is_one(experts):
    make = lambda: WithExperts(jnp.sin, **EXPERTS[experts])
    wanted = recomputed(make(), BATCH)
    for degrees, plan in (({"data": 2}, ax.Plan(accumulate=2)), ({"data": 4}, ax.Plan()), ({"fsdp": 2}, ax.Plan())):
        trainer = ax.parallelize(make(), mesh_of(degrees), plan).trainer(optax.sgd(0.1), recomputed)
        assert "gather" not in str(ax.explain(trainer, BATCH)) or "fsdp" in degrees
        np.testing.assert_allclose(trainer.step(BATCH)["loss"], wanted, rtol=1e-9)


def test_a_loss_that_transforms_a_model_with_experts_is_of_all_rows_where_it_is_no_mean():
    loss = lambda model, batch: jnp.sqrt(recomputed(model, batch))
    model = lambda: WithExperts(jnp.sin)
    for degrees, plan in (({"data": 4}, ax.Plan()), ({"fsdp": 2}, ax.Plan())):
        trainer = ax.parallelize(model(), mesh_of(degrees), plan).trainer(optax.sgd(0.1), loss)
        np.testing.assert_allclose(trainer.step(BATCH)["loss"], loss(model(), BATCH), rtol=1e-9)
    trainer = ax.parallelize(model(), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(optax.sgd(0.1), loss)
    with pytest.raises(ValueError, match="cannot be derived"):
        trainer.step(BATCH)


class TimeMajor(WithExperts):
    """Experts under a `vmap` of another dim than the first, which puts rows in another one."""

    def __call__(self, x):
        steps = jnp.stack([x, x + 1, jnp.sin(x)])
        h = jax.vmap(lambda rows: self.experts(rows)[0], in_axes=1)(steps)
        return self.last(jnp.tanh(self.mixes(h)).sum(1)), 0.0


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_rows_behind_experts_under_vmap_are_where_they_are(mixed):
    of_rows = lambda h: h / (jnp.abs(h).max(0) + 0.1)
    model = lambda: TimeMajor(of_rows if mixed else lambda h: h - h.mean(1, keepdims=True))
    wanted = balanced(model(), BATCH)
    trainer = ax.DDP(model(), mesh_of(data=4)).trainer(optax.sgd(0.1), balanced)
    np.testing.assert_allclose(trainer.step(BATCH)["loss"], wanted, rtol=1e-9)
    if not mixed:
        parts = ax.parallelize(model(), mesh_of(data=2), ax.Plan(accumulate=2)).trainer(optax.sgd(0.1), balanced)
        np.testing.assert_allclose(parts.step(BATCH)["loss"], wanted, rtol=1e-9)


class FastWeights(nnx.Module):
    """Takes a step of gradient descent on all rows before it is applied to them, as in meta-learning."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inner, self.last = (nnx.Linear(6, n, rngs=rngs, param_dtype=jnp.float64) for n in (6, 1))

    def __call__(self, x):
        start = self.inner.kernel[...]
        step = jax.grad(lambda k: ((jax.nn.relu(x @ k) @ k - x[:, ::-1]) ** 2).mean())(start)
        return self.last(jnp.tanh(x @ (start - 0.5 * step)))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_that_a_model_takes_of_its_weights_is_that_of_all_rows(plan, loss):
    degrees, settings = PLANS[plan]
    assert_equals_single_device(FastWeights(), LOSSES[loss], BATCH, settings, mesh=mesh_of(degrees), steps=2)


@pytest.mark.parametrize("kind", DECIDED)
def test_what_all_rows_decide_together_is_decided_by_the_whole_batch(kind):
    degrees, settings = PLANS["zero3"]
    assert_equals_single_device(Net(DECIDED[kind]), mean, BATCH, settings, mesh=mesh_of(degrees), steps=2)


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("plan", ["ddp", "ddp, typed", "zero3"])
def test_the_number_of_rows_and_their_numbers_are_those_of_the_whole_batch(kind, plan):
    degrees, settings = PLANS[plan]
    assert_equals_single_device(Net(NUMBERED[kind]), mean, BATCH, settings, mesh=mesh_of(degrees), steps=2)


@pytest.mark.parametrize("loss", ["weighted", "root"])
@pytest.mark.parametrize("kind", ["by their number", "by their numbers", "the first", "halves"])
def test_their_number_is_that_of_the_whole_batch_under_any_loss(kind, loss):
    assert_equals_single_device(Net(NUMBERED[kind]), LOSSES[loss], BATCH, ax.Plan(), mesh=mesh_of({"data": 4}), steps=2)


@pytest.mark.parametrize("kind", ["by their number", "along a line", "the first", "rolled"])
def test_the_number_of_rows_is_known_where_a_rank_has_one(kind):
    batch = jax.tree.map(lambda x: x[:4], BATCH)
    assert_equals_single_device(Net(NUMBERED[kind]), mean, batch, ax.Plan(), mesh=mesh_of({"data": 4}), steps=2)


class Returning(nnx.Module):
    """Returns rows scaled, or taken, at its very end."""

    def __init__(self, last):
        self.first, self.last = nnx.Linear(6, 1, rngs=nnx.Rngs(0), param_dtype=jnp.float64), last

    def __call__(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("last", [lambda h: h * len(h), lambda h: h[::-1]], ids=["scaled", "backwards"])
def test_rows_are_returned_as_on_one_device(last):
    assert_equals_single_device(Returning(last), mean, BATCH, ax.Plan(), mesh=mesh_of({"data": 4}), steps=2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "mixes", [MIXING["centred"], NUMBERED["by their number"], NUMBERED["rolled"]], ids=["mean", "number", "roll"]
)
def test_of_a_linen_model_too(plan, mixes):
    degrees, settings = PLANS[plan]
    model = LinenNet(mixes)
    params = model.init(jax.random.key(0), X)
    assert_equals_single_device(model, mean, BATCH, settings, params=params, mesh=mesh_of(degrees), steps=2)


def test_an_evaluation_and_a_loop_of_gradients_mix_the_same_rows():
    model, plain = ax.DDP(Net(MIXING["whitened"], norm=True), mesh_of(data=4)), Net(MIXING["whitened"], norm=True)
    plain.eval()
    trainer = model.trainer(optax.sgd(0.1), mean)
    np.testing.assert_allclose(trainer.evaluate(BATCH)["loss"], mean(plain, BATCH), rtol=1e-12)
    plain.train()
    loss, grads = nnx.value_and_grad(mean)(plain, BATCH)
    got, own = model.value_and_grad(mean)(BATCH)
    np.testing.assert_allclose(got, loss, rtol=1e-12)
    np.testing.assert_allclose(own["first"]["kernel"], grads["first"]["kernel"], rtol=1e-9, atol=1e-12)


PARTS = {
    "by products": (
        lambda h: h @ jnp.tanh(h.T @ h),
        r"mixes rows of the batch: dot_general \(line \d+ of test_mixing.py",
    ),
    "mixed": (MIXING["centred"], r"mixes rows of the batch: sub \(line \d+ of test_mixing.py"),
    "in a function of JAX": (lambda h: h / jnp.std(h, 0), r"mixes rows of the batch: sub \(line \d+ of test_mixing.py"),
    "counted": (NUMBERED["beside their number"], r"reads the number of rows, .*: add \(line \d+ of test_mixing.py"),
    "taken": (NUMBERED["the first"], r"takes them by their numbers: sub \(line \d+ of test_mixing.py"),
}


@pytest.mark.parametrize("loss", ["mean", "weighted"])
@pytest.mark.parametrize("plan", ["accumulate", "pipeline"])
@pytest.mark.parametrize("kind", PARTS)
def test_where_a_part_of_the_rows_is_seen_alone_a_warning_names_the_line(kind, plan, loss):
    settings = {
        "accumulate": ({"data": 2}, ax.Plan(accumulate=2)),
        "pipeline": ({"pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=("last",)))),
    }
    degrees, chosen = settings[plan]
    mixes, said = PARTS[kind]
    trainer = ax.parallelize(Net(mixes), mesh_of(degrees), chosen).trainer(optax.sgd(0.1), LOSSES[loss])
    with pytest.warns(UserWarning, match=f"model's code {said}" if said.startswith("mixes") else said):
        trainer.step(BATCH)


@pytest.mark.parametrize("kind", ["centred", "sorted", "synchronized"])
def test_beside_collectives_of_the_models_own_a_warning_names_the_line(kind):
    """Such code was written for a rank's rows; what it joins itself over ranks is of all of them."""
    own = {"synchronized": lambda h: h - jax.lax.pmean(h.mean(0), "data"), "sorted": lambda h: jnp.sort(h, axis=0)}
    mixes = (MIXING | own)[kind]
    model = Net(lambda h: mixes(h / jax.lax.pmean(jnp.abs(h).mean(), "data")))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ax.DDP(model, mesh_of(data=4)).trainer(optax.sgd(0.1), mean).step(BATCH)
    assert ["beside collectives of its own" in str(each.message) for each in said] == [True] * (
        kind in MIXING | NUMBERED
    )


def of_rank(h):
    """What a rank's number makes its own is written for ranks."""
    number, rows = jax.lax.axis_index("data"), jnp.arange(len(h))
    drawn = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), h.shape, h.dtype)
    return (h + 0.1 * drawn + 0.1 * (number * len(h) + rows)[:, None]) / jax.lax.pmean(jnp.abs(h).mean(), "data")


def test_code_that_is_written_for_ranks_runs_on_them_without_a_word():
    model = ax.DDP(Net(of_rank), mesh_of(data=4))
    assert np.isfinite(model.trainer(optax.sgd(0.1), mean).step(BATCH)["loss"])
    assert model(BATCH["x"]).shape == (16, 1)


class OwnNorm(nnx.Module):
    """A norm that names the mesh's axis itself, as scripts for several devices write it."""

    def __init__(self, mixes):
        rngs = nnx.Rngs(0)
        self.norm, self.last = nnx.BatchNorm(6, axis_name="data", rngs=rngs), nnx.Linear(6, 1, rngs=rngs)
        self.mixes = mixes

    def __call__(self, x):
        return self.last(self.mixes(self.norm(x)))


def test_beside_a_norm_over_an_axis_of_its_own_mixed_rows_are_named():
    batch = {name: x.astype(np.float32) for name, x in BATCH.items()}
    apart, mixed = (ax.DDP(OwnNorm(mixes), mesh_of(data=4)) for mixes in (jnp.tanh, lambda h: jnp.sort(h, axis=0)))
    apart.trainer(optax.sgd(0.1), mean).step(batch)
    assert apart(batch["x"]).shape == (16, 1)
    with pytest.warns(UserWarning, match="mixes rows of the batch: sort"):
        mixed.trainer(optax.sgd(0.1), mean).step(batch)


class Grouped(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs, param_dtype=jnp.float64)
        self.norm = nnx.GroupNorm(4, 2, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.drop(self.norm(self.conv(x)))
        return x.reshape(len(x), 2, -1).mean(1)


ONE_ROW = {
    "images": (Grouped, np.random.default_rng(1).normal(size=(4, 5, 5, 2)), lambda model, x: (model(x) ** 2).mean()),
    "tokens": (
        lambda: Transformer(
            TransformerConfig(vocab_size=16, num_layers=2, hidden_size=8, num_heads=2, max_length=12), rngs=nnx.Rngs(0)
        ),
        np.random.default_rng(1).integers(0, 16, (4, 12)),
        lambda model, x: ax.WeightedMean(*model.loss(x, x)),
    ),
}


@pytest.mark.parametrize(
    "plan", [({"data": 4}, ax.Plan()), ({"data": 2}, ax.Plan(accumulate=2))], ids=["ranks", "parts"]
)
@pytest.mark.parametrize("kind", ONE_ROW)
def test_one_row_on_a_rank_is_not_taken_for_several(kind, plan):
    """A dim of one row stays where it is in a reshape: positions, groups and pixels are no rows."""
    make, batch, loss = ONE_ROW[kind]
    degrees, chosen = plan
    trainer = ax.parallelize(make(), mesh_of(degrees), chosen).trainer(optax.sgd(0.1), loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(batch)
    if kind == "images" and degrees == {"data": 4}:  # a model whose rows are mixed would draw the masks of all four
        assert "4,5,5,4" not in str(trainer.trace(batch).jaxpr)


@pytest.mark.parametrize("kind", [*APART, "batch norm", "rows of a rank"])
def test_what_mixes_no_rows_is_left_as_it_is(kind):
    """In microbatches nothing warns: a row's experts, a norm over features, BatchNorm, and what is meant of a rank's rows."""
    local = {"batch_stats": "local"} if kind == "rows of a rank" else {}
    mixes = MIXING["centred"] if local else APART.get(kind, lambda h: h)
    plan = ax.Plan(accumulate=2, **local)
    trainer = ax.parallelize(Net(mixes, norm=kind == "batch norm"), mesh_of(data=2), plan).trainer(optax.sgd(0.1), mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(BATCH)


@pytest.mark.parametrize(
    "plan", [({"data": 4}, ax.Plan()), ({"data": 1}, ax.Plan(accumulate=2))], ids=["ddp", "accumulate"]
)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_known_to_keep_rows_apart_is_named(kind, plan):
    degrees, chosen = plan
    trainer = ax.parallelize(Net(UNKNOWN[kind]), mesh_of(degrees), chosen).trainer(optax.sgd(0.1), mean)
    with pytest.warns(UserWarning, match="not known whether the model's code keeps rows .* of test_mixing.py"):
        trainer.step(BATCH)


@pytest.mark.parametrize("kind", ["centred", "attention over rows", "the last", "capacities of experts"])
def test_a_call_and_a_prediction_name_what_may_mix_rows(kind):
    """Each rank has its own rows there; the module has all of them."""
    mixes, x = (MIXING | NUMBERED | UNKNOWN)[kind], BATCH["x"]
    parallel = ax.parallelize(Net(mixes), mesh_of(data=4), ax.Plan())
    trainer = parallel.trainer(optax.sgd(0.1), mean)
    said = "mixes rows of the batch, or is not known to keep them apart: .* of test_mixing.py"
    with pytest.warns(UserWarning, match=said):
        parallel(x)
    with pytest.warns(UserWarning, match=said):
        trainer.predict([x])
    with pytest.warns(UserWarning, match=said):
        trainer.predict([x], lambda model, x: {"twice": 2 * model(x)})
    np.testing.assert_allclose(parallel.module(x), Net(mixes)(x), rtol=1e-9)


def test_predictions_by_a_function_that_mixes_rows_itself_are_named():
    trainer = ax.parallelize(Net(jnp.tanh), mesh_of(data=4), ax.Plan()).trainer(optax.sgd(0.1), mean)
    with pytest.warns(
        UserWarning, match="mixes rows of the batch, or is not known to keep them apart: reduce_sum .line"
    ):
        trainer.predict([BATCH["x"]], lambda model, x: model(x) - model(x).mean(0))


def row_by_row(model, batch):
    errors = [(model(batch["x"][i : i + 1]) - batch["y"][i : i + 1]) ** 2 for i in range(len(batch["x"]))]
    return jnp.concatenate(errors).mean()


def test_a_loss_that_calls_the_model_row_by_row_is_no_error_of_the_library():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*error of axonml_jax")
        assert_equals_single_device(Net(jnp.tanh), row_by_row, BATCH, ax.Plan(), mesh=mesh_of(data=4), steps=2)


@pytest.mark.parametrize("kind", [*APART, "batch norm", "rows of a rank"])
def test_a_call_that_mixes_no_rows_says_nothing(kind):
    local = {"batch_stats": "local"} if kind == "rows of a rank" else {}
    mixes = MIXING["centred"] if local else APART.get(kind, lambda h: h)
    model = ax.parallelize(Net(mixes, norm=kind == "batch norm"), mesh_of(data=2), ax.Plan(**local))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(BATCH["x"])


class WithNumber(nnx.Module):
    """Returns rows, and a number of them."""

    def __init__(self, number):
        self.layer, self.number = nnx.Linear(6, 3, rngs=nnx.Rngs(0), **F64), number

    def __call__(self, x):
        h = self.layer(x)
        return h, {"number": self.number(h)}


MEANS = {
    "a mean": jnp.mean,
    "a mean of squares": lambda h: (h**2).mean(0),
    "a constant": lambda h: jnp.full(2, 0.5),
    "a mean in a loop": lambda h: jax.lax.scan(lambda total, x: (total + x.mean(), None), 0.0, h.T)[0],
    "beside a sort": lambda h: jnp.sort(h, 0).shape[1] * h.mean(),
}
NO_MEANS = {
    "a sum": jnp.sum,
    "the largest": jnp.max,
    "a deviation": jnp.std,
    "a matrix": lambda h: h.T @ h,
    "a masked mean": lambda h: (h * (h > 0)).sum() / (h > 0).sum(),
    "the load of experts": lambda h: (one_hot(h).mean(0) * jax.nn.softmax(h[:, :2]).mean(0)).sum(),
    "of rows less their mean": lambda h: jnp.abs(h - h.mean(0)).mean(),
    "of a sort": lambda h: jnp.sort(h, 0)[:3].mean(),
}


@pytest.mark.parametrize("kind", MEANS)
def test_a_call_returns_means_over_rows_as_one_device_does(kind):
    model = ax.parallelize(WithNumber(MEANS[kind]), mesh_of(data=4), ax.Plan())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model(BATCH["x"])[1]["number"]
    np.testing.assert_allclose(found, WithNumber(MEANS[kind])(BATCH["x"])[1]["number"], rtol=1e-12)


@pytest.mark.parametrize("kind", NO_MEANS)
def test_a_call_names_numbers_that_may_be_no_means_over_rows(kind):
    model = ax.parallelize(WithNumber(NO_MEANS[kind]), mesh_of(data=4), ax.Plan())
    with pytest.warns(UserWarning, match=r"not known to be means over rows: \{'1/number': \("):
        found = model(BATCH["x"])[1]["number"]
    wanted = WithNumber(NO_MEANS[kind])(BATCH["x"])[1]["number"]
    assert np.abs(found - wanted).max() > 1e-6
    np.testing.assert_allclose(model.module(BATCH["x"])[1]["number"], wanted, rtol=1e-12)


def with_number(model, batch):
    made, own = model(batch["x"])
    return ((made - batch["y"]) ** 2).mean() + own["number"].sum(), {"number": own["number"]}


OF_ALL_ROWS = {
    "the smallest four": lambda h: jnp.sort(h, 0)[:4].mean(),
    "the largest three": lambda h: jax.lax.top_k(h[:, 0], 3)[0].mean(),
    "a median": jnp.median,
    "the last sum": lambda h: jnp.cumsum(h, 0)[-1].mean() ** 2,
    "less as many of a queue": lambda h: (h**2).mean() - (jnp.tanh(TABLE[: len(h), :3]) ** 2).mean(),
    "beside a repeated table": lambda h: (h * jnp.repeat(TABLE[:2, :3], len(h) // 2, axis=0)).mean(),
}
APART_BUT_UNPROVEN = {
    "loops of each row": lambda h: jax.vmap(until_half)(h).mean(),
    "a choice": lambda h: jax.vmap(lambda row: jax.lax.cond(row[0] > 0, jnp.sin, jnp.cos, row))(h).mean(),
    "sorted features": lambda h: jnp.sort(h, -1)[:, 0].mean(),
    "rows one after the other": lambda h: jax.lax.map(lambda row: jnp.sort(row)[0], h).mean(),
}
OF_UNKNOWN_ROWS = {
    "until all are small": lambda h: jax.lax.while_loop(lambda s: s < jnp.abs(h).max(), lambda s: s + 0.1, 0.0),
    "the row of the largest": lambda h: h[jnp.argmax(h[:, 0])].sum(),
    "a determinant": lambda h: jnp.linalg.slogdet(h.T @ h + jnp.eye(3))[1],
    "by NumPy": lambda h: jax.pure_callback(
        lambda a: np.median(a), jax.ShapeDtypeStruct((), h.dtype), jax.lax.stop_gradient(h)
    ),
}


def until_half(row):
    return jax.lax.while_loop(lambda r: jnp.abs(r).max() > 0.5, lambda r: 0.7 * r, jax.lax.stop_gradient(row))


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", OF_ALL_ROWS | APART_BUT_UNPROVEN)
def test_numbers_that_a_model_makes_of_rows_are_those_of_one_device(kind, plan):
    degrees, settings = PLANS[plan]
    model = WithNumber((OF_ALL_ROWS | APART_BUT_UNPROVEN)[kind])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="it is not known")
        assert_equals_single_device(model, with_number, BATCH, settings, mesh=mesh_of(degrees), steps=2)


@pytest.mark.parametrize("kind", OF_UNKNOWN_ROWS)
def test_numbers_of_which_it_is_not_known_are_named(kind):
    trainer = ax.DDP(WithNumber(OF_UNKNOWN_ROWS[kind]), mesh_of(data=4)).trainer(optax.sgd(0.1), with_number)
    with pytest.warns(
        UserWarning, match=r"not known whether the model's code keeps rows .*\(line \d+ of test_mixing.py"
    ):
        trainer.step(BATCH)


def test_numbers_that_the_loss_does_not_read_are_left_alone():
    trainer = ax.DDP(WithNumber(jnp.median), mesh_of(data=4)).trainer(
        optax.sgd(0.1), lambda model, batch: (model(batch["x"])[0] ** 2).mean()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(BATCH)


class Listing(nnx.Module):
    """Returns a list of rows, which has fewer entries of a rank's."""

    def __init__(self):
        self.layer = nnx.Linear(6, 6, rngs=nnx.Rngs(0), **F64)

    def __call__(self, x):
        return list(self.layer(x))


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_a_list_of_rows_has_those_of_the_whole_batch(plan):
    degrees, settings = PLANS[plan]
    loss = lambda model, batch: sum((row**2).mean() for row in model(batch["x"])) / 16
    assert_equals_single_device(Listing(), loss, BATCH, settings, mesh=mesh_of(degrees), steps=2)
