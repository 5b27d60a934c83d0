"""Model state that says how it joins over ranks and changes once per update equals a loop over all parts on one device."""

import dataclasses
import math
import re
import warnings
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import plain_mesh_of
from plan_models import F64, linear
from state_models import LENGTH, TX, WIDTH, LinenNet, LinenRouter, Net, OneDevice, batch_of, loss_fn, named

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Positions(ax.Replicate):
    @property
    def role(self):
        return ax.Role(batch="positions")


def pipe(schedule, count, **options):
    return ax.Pipelined(schedule=schedule, num_microbatches=count, **{"split": ("blocks/1",), **options})


SPLIT = ("blocks/0", "blocks/1", "last")
PLANS = {
    "ddp": ({"data": 2}, {}),
    "ddp, accumulated": ({"data": 2}, {"accumulate": 3}),
    "ddp, accumulated, unchecked": ({"data": 3}, {"accumulate": 2, "check_vma": False}),
    "ddp, buckets in turn": ({"data": 2}, {"data": ax.Replicate(sync_strategy="synchronous"), "accumulate": 2}),
    "buffers of ranks": ({"data": 2}, {"batch_stats": "local"}),
    "buffers of ranks, kept apart": ({"data": 2}, {"batch_stats": "local", "broadcast_buffers": False}),
    "zero-1, remat": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=1), "remat": "full"}),
    "zero-2, accumulated": ({"fsdp": 2}, {"fsdp": ax.Shard(stage=2), "accumulate": 2}),
    "zero-3, accumulated, remat": ({"fsdp": 2}, {"accumulate": 2, "remat": "full"}),
    "hybrid, offloaded": ({"data": 2, "fsdp": 2}, {"offload": ax.CPUOffload("full")}),
    "tensor": ({"data": 2, "tensor": 2}, {"accumulate": 2}),
    "positions": ({"data": 2, "long": 2}, {"axes": {"long": Positions()}, "accumulate": 2}),
    "1f1b": ({"pipe": 2, "data": 2}, {"pipe": pipe("1f1b", 3), "accumulate": 2}),
    "interleaved, gathered by chunk": (
        {"pipe": 2, "fsdp": 2},
        {"pipe": pipe("interleaved", 2, chunks=2, gather="chunk", split=SPLIT), "remat": "full"},
    ),
    "zero-bubble, tensor": ({"pipe": 2, "tensor": 2}, {"pipe": pipe("zero-bubble", 3)}),
}


def parallel(degrees, options, model=None):
    return ax.parallelize(model or Net(), plain_mesh_of(degrees), ax.Plan(**options))


def held(model):
    """A model's state and parameters by name."""
    whole = model.whole()
    return named(whole.state), named(whole.params)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_joined_state_is_that_of_a_loop_over_all_parts(name):
    degrees, options = PLANS[name]
    model = parallel(degrees, options)
    split = [axis for axis in ("data", "fsdp") if axis in degrees]
    ranks, count = math.prod(degrees[axis] for axis in split), model.plan.microbatches
    one, trainer = OneDevice(ranks, count, degrees.get("long", 1)), model.trainer(TX, loss_fn)
    for seed in range(STEPS):
        batch = batch_of(2 * ranks * count, seed)
        one.step(batch)
        trainer.step(batch)
        trainer.evaluate(batch)
    (state, params), (wanted, weights) = held(model), one.values
    local = options.get("batch_stats") == "local"
    not_declared = [name for name in state if name.endswith("plain")]
    for name in not_declared:  # as before: see test_facade_buffers.py
        given, expected = state.pop(name), wanted.pop(name)
        assert np.allclose(given, expected) is not local
    assert_same(state, wanted)
    assert_same(params, weights)
    tokens = 2 * ranks * count * LENGTH
    router = lambda name: state[f"again/{name}"]
    assert router("total").sum() == tokens * STEPS and not router("counts").any() and router("bias").any()
    assert router("updates") == STEPS and router("calls") == ranks * degrees.get("long", 1) * count * STEPS


def test_independent_models_join_along_the_other_axes_alone():
    model = parallel({"data": 2, "fsdp": 2}, {"data": ax.Replicate(sync_strategy="no_sync")})
    batch, ones = batch_of(8), [OneDevice(2, 1) for _ in range(2)]
    model.trainer(TX, loss_fn).step(batch)
    for rank, one in enumerate(ones):
        one.step({name: x[4 * rank : 4 * rank + 4] for name, x in batch.items()})
        state = {name: x[rank] for name, x in named(model.variables.state).items()}
        assert_same(state, one.values[0])


@pytest.mark.parametrize("precision", [None, pytest.param("fp16", id="float16")])
def test_a_skipped_update_leaves_the_state_bit_for_bit(precision, request):
    options = {"pipe": pipe("gpipe", 2)}
    if precision:
        request.getfixturevalue("float16")
        options = {"precision": "fp16"}
    model = parallel({"pipe": 2, "data": 2} if precision is None else {"data": 2}, options)
    trainer = model.trainer(TX, loss_fn, **({} if precision else {"max_nonfinite": 3}))
    good, bad = batch_of(8), batch_of(8)
    bad["x"] = bad["x"] * np.inf
    for batch in (good, bad, *[good] * (14 if precision else 1)):  # float16 looks for its scale first
        before = held(model)[0]
        trainer.step(batch)
        after = held(model)[0]
        if batch is bad:
            assert {n: x.tobytes() for n, x in after.items()} == {n: x.tobytes() for n, x in before.items()}
    assert after["again/updates"] > 1


@pytest.mark.slow
def test_a_loop_of_ones_own_calls_the_hooks_itself():
    batch, one = batch_of(8), parallel({"data": 2}, {})
    one.trainer(optax.sgd(0.1), loss_fn).step(batch)
    for options in ({}, {"batch_stats": "local", "broadcast_buffers": False}):
        model = parallel({"data": 2}, options)
        _, grads = model.value_and_grad(loss_fn)(batch)
        counts = held(model)[0]["again/counts"]
        assert counts.sum() == 8 * LENGTH
        model.set_parameters(jax.tree.map(lambda p, g: p - 0.1 * g, model.parameters(), grads))
        model.after_update()
        state, wanted = held(model)[0], held(one)[0]
        if options:
            state, wanted = ({n: x for n, x in each.items() if "plain" not in n} for each in (state, wanted))
        assert_same(state, wanted)
    model.eval()
    model(batch["x"])  # this router counts in every mode; a call is no update
    assert held(model)[0]["again/updates"] == 1


@pytest.mark.slow
def test_a_checkpoint_holds_what_is_between_two_updates(tmp_path):
    batches = [batch_of(12, seed) for seed in range(2)]
    source = parallel({"data": 2}, {}).trainer(TX, loss_fn)
    source.step(batches[0])
    ax.save(tmp_path / "saved", source)
    source.step(batches[1])
    other = parallel({"pipe": 2, "data": 2}, {"pipe": pipe("1f1b", 1)}).trainer(TX, loss_fn)
    ax.restore(tmp_path / "saved", other)
    other.step(batches[1])
    assert_same(held(other.model)[0], held(source.model)[0])


ROWS = {
    "nnx ddp": (Net, {"data": 2}, {"accumulate": 2}),
    "nnx local": (Net, {"data": 2}, {"batch_stats": "local"}),
    "linen ddp": (LinenNet, {"data": 2}, {"accumulate": 2}),
    "linen zero-3": (LinenNet, {"fsdp": 2}, {"remat": "full"}),
    "linen pipeline": (LinenNet, {"pipe": 2, "data": 2}, {"pipe": pipe("gpipe", 2, split=("router_1",))}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_librarys_own_oracle_joins_and_updates_too(name):
    make, degrees, options = ROWS[name]
    params = make().init(jax.random.key(0), batch_of(1)["x"]) if make is LinenNet else None
    plan = ax.Plan(**options)
    rows = 2 * math.prod(degrees.values()) // degrees.get("pipe", 1) * plan.microbatches
    batches = [batch_of(rows, seed) for seed in range(2)]
    assert_equals_single_device(make(), loss_fn, batches, plan, mesh=plain_mesh_of(degrees), params=params)


class Counting(nnx.Module):
    """Counts rows by itself, and centres them, or lets the loss count."""

    state_joins: ClassVar = {"rows": "sum"}

    def __init__(self, by_loss=False):
        self.layer, self.rows, self.by_loss = linear(5, 2, nnx.Rngs(0)), nnx.Variable(jnp.int32(7)), by_loss

    def count(self, x):
        self.rows[...] += jnp.int32(x.shape[0])

    def __call__(self, x):
        if not self.by_loss:
            self.count(x)
            x = x - x.mean(0)
        return self.layer(x)


def counting_loss(model, batch):
    loss = jnp.sqrt(jnp.square(model(batch["x"])).mean())
    if model.by_loss:
        model.rows[...] += jnp.int32(batch["x"].shape[0])
    return loss


@pytest.mark.parametrize(("by_loss", "count"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("typed", [False, True])
def test_a_sum_that_every_rank_has_of_the_whole_batch_is_added_once(by_loss, count, typed):
    options = {"check_vma": typed, "accumulate": count}
    trainer = parallel({"data": 4}, options, Counting(by_loss)).trainer(TX, counting_loss)
    for _ in range(2):
        trainer.step(batch_of(8))
    assert trainer.model.module.rows[...] == 7 + 2 * 8


def changed(**attributes):
    """A small model whose class says other things."""

    def __init__(self):
        self.layer, self.counts = linear(5, 2, nnx.Rngs(0)), nnx.Variable(jnp.zeros(2, jnp.int32))
        self.flag, self.off = nnx.Variable(jnp.array(True)), None

    body = {"__init__": __init__, "__call__": lambda self, x: self.layer(x), **attributes}
    return type("Small", (nnx.Module,), body)()


def grow(self):
    self.counts.set_value(jnp.zeros(3, jnp.int32))


def train(self):
    self.layer.kernel[...] = jnp.zeros((5, 2))


WRONG = {
    "an unknown join": ({"state_joins": {"counts": "total"}}, r"Small at the root: 'counts': 'total' is no join"),
    "an unknown name": ({"state_joins": {"count": "sum"}}, "Small at the root: 'count' is no state of it"),
    "a parameter": ({"state_joins": {"layer": "sum"}}, "'layer' is no state of it: give a variable that is neither"),
    "a mean of integers": ({"state_joins": {"counts": "mean"}}, "counts is int32, of which there is no mean"),
    "a sum of flags": ({"state_joins": {"flag": "sum"}}, "flag is bool, of which there is no sum"),
    "no mapping": ({"state_joins": ["counts"]}, "must be a mapping of names to joins"),
    "a hook that changes a shape": ({"after_update": grow}, r"counts: int32\[2\], now int32\[3\]"),
    "a hook that trains": ({"after_update": train}, "shapes|layer/kernel"),
    "a hook that reads a parameter": ({"after_update": lambda self: self.layer.kernel[...] + 1}, "shapes there"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_join_is_refused_by_name(name):
    attributes, message = WRONG[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        parallel({"data": 2}, {}, changed(**attributes)).trainer(TX, loss_fn).step(batch_of(4))


def test_what_is_switched_off_joins_nothing():
    model = parallel({"data": 2}, {}, changed(state_joins={"off": "sum", "flag": "first"}))
    model.trainer(TX, loss_fn).step(batch_of(4))


def test_a_linen_module_with_a_hook_is_refused_by_name():
    class Hooked(LinenRouter):
        def after_update(self):
            pass

    class Around(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2, param_dtype=F64)(Hooked(name="router")(x))

    params = Around().init(jax.random.key(0), batch_of(1)["x"])
    trainer = ax.parallelize(Around(), plain_mesh_of({"data": 2}), ax.Plan(), params=params).trainer(TX, loss_fn)
    with pytest.raises(ValueError, match=r"Hooked at router.*NNX"):
        trainer.step(batch_of(4))


# Sums, counts and extremes that the calls of a model make of rows: joined where its classes say how, else named in a warning.


class Tells(nnx.Module):
    """Sums, counts and extremes of rows, beside what is right as a mean, or as any rank's."""

    state_joins: ClassVar = {
        "rows": "sum",
        "positive": "sum",
        "chosen": "sum",
        "total": "sum",
        "largest": "max",
        "smallest": "min",
    }

    def __init__(self, rngs):
        self.layer = linear(WIDTH, WIDTH, rngs)
        count, values = (lambda *shape, kind=kind: nnx.Variable(jnp.zeros(shape, kind)) for kind in (jnp.int32, F64))
        self.rows, self.steps, self.positive, self.chosen = count(), count(), count(), count(WIDTH)
        self.total, self.mean, self.spread = values(WIDTH), values(WIDTH), values()
        self.largest, self.smallest = nnx.Variable(jnp.full((), -9.0, F64)), nnx.Variable(jnp.full((), 9.0, F64))

    def __call__(self, x):
        self.rows[...] += jnp.int32(x.shape[0] * x.shape[1])
        self.steps[...] += jnp.int32(1)
        self.positive[...] += (x > 0).sum(dtype=jnp.int32)
        self.chosen[...] = self.chosen[...].at[jnp.argmax(x, -1)].add(1)
        own = jax.lax.stop_gradient(x)
        self.total[...] += own.sum((0, 1))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * own.mean((0, 1))
        self.spread[...] = 0.9 * self.spread[...] + 0.1 * jnp.square(own).mean()
        self.largest[...] = jnp.maximum(self.largest[...], own.max())
        self.smallest[...] = jnp.minimum(own.min((0, 1)).min(), self.smallest[...])
        return jnp.tanh(self.layer(x))


class TellsNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.blocks = linear(5, WIDTH, rngs), nnx.List([Tells(rngs) for _ in range(2)])
        self.last = linear(WIDTH, 2, rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class TellsScanned(TellsNet):
    """The same, as one stack that is scanned."""

    def __init__(self):
        super().__init__()
        self.blocks = nnx.vmap(lambda key: Tells(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        call = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(call(self.first(x), self.blocks))


class LinenTells(linen.Module):
    state_joins: ClassVar = {"rows": "sum", "largest": "max"}

    @linen.compact
    def __call__(self, x):
        rows = self.variable("counts", "rows", lambda: jnp.zeros((), jnp.int32))
        largest = self.variable("counts", "largest", lambda: jnp.full((), -9.0, F64))
        steps = self.variable("counts", "steps", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            rows.value += jnp.int32(x.shape[0] * x.shape[1])
            largest.value = jnp.maximum(largest.value, x.max())
            steps.value += jnp.int32(1)
        return linen.Dense(2, param_dtype=F64)(x)


def root_loss(model, batch):
    return jnp.sqrt(jnp.square(model(batch["x"]) - batch["y"]).mean())


TOLD = {
    name: PLANS[name] for name in PLANS if not name.startswith(("buffers", "positions", "tensor", "zero-bubble"))
} | {
    "ddp, typed": ({"data": 2}, {"check_vma": True}),
    "one row": ({"data": 4}, {"check_vma": True}),
}
TOLD_LINEN = "ddp, typed", "ddp, accumulated, unchecked", "zero-3, accumulated, remat"
ROOT_LOSSES = "ddp", "ddp, typed", "one row"


@pytest.mark.parametrize(
    ("name", "kind", "loss"),
    [(name, TellsNet, loss_fn) for name in TOLD]
    + [(name, LinenTells, loss_fn) for name in TOLD_LINEN]
    + [(name, TellsNet, root_loss) for name in ROOT_LOSSES]
    + [(name, TellsScanned, root_loss) for name in ("ddp, typed", "zero-3, accumulated, remat")],
)
def test_sums_and_extremes_over_rows_are_those_of_one_device(name, kind, loss):
    degrees, options = TOLD[name]
    batch = batch_of(4 if name == "one row" else 24)
    params = LinenTells().init(jax.random.key(0), batch["x"]) if kind is LinenTells else None
    model = ax.parallelize(kind(), plain_mesh_of(degrees), ax.Plan(**options), params=params)
    trainer = model.trainer(TX, loss)
    for _ in range(2):
        found = trainer.check(batch)
        assert found.equal and not found.left_out, str(found)
        trainer.step(batch)


class Untold(Tells):
    state_joins: ClassVar = {}


class Net1(nnx.Module):
    """A layer of a kind, alone, as one of a scanned stack, or called in a checkpoint."""

    def __init__(self, kind, way="alone"):
        make = lambda key: kind(nnx.Rngs(key))
        self.first, self.last, self.way = linear(5, WIDTH, nnx.Rngs(0)), linear(WIDTH, 2, nnx.Rngs(0)), way
        keys = jax.random.split(jax.random.key(0), 3)
        self.layer = nnx.vmap(make)(keys) if way == "scanned" else make(keys[0])

    def __call__(self, x):
        call = lambda x, layer: layer(x)
        if self.way == "scanned":
            call = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        if self.way == "checkpoint":
            call = nnx.remat(call)
        return self.last(call(self.first(x), self.layer))


class Right(nnx.Module):
    """State that a step joins rightly by itself, or of which nothing is known."""

    def __init__(self, rngs):
        self.layer, values = linear(WIDTH, WIDTH, rngs), lambda *shape: nnx.Variable(jnp.zeros(shape, F64))
        self.steps, self.mean, self.scaled, self.key = (
            nnx.Variable(jnp.int32(0)),
            values(WIDTH),
            values(WIDTH),
            values(2),
        )
        self.of_some, self.after_norm = values(WIDTH), values(WIDTH)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, param_dtype=F64)

    def __call__(self, x):
        own = jax.lax.stop_gradient(x)
        self.steps[...] += jnp.int32(1)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.tanh(own).mean((0, 1))
        self.scaled[...] += (own / (own.shape[0] * own.shape[1])).sum((0, 1))
        self.key[...] = jax.random.normal(jax.random.key(self.steps[...]), (2,), F64)
        self.of_some[...] = jnp.where(self.steps[...] > 1, self.of_some[...], own.mean((0, 1)))
        self.after_norm[...] = 0.9 * self.after_norm[...] + 0.1 * jax.lax.stop_gradient(self.norm(x)).mean((0, 1))
        return jnp.tanh(self.layer(x))


class Wrong(nnx.Module):
    """State that depends on rows, or on how many there are, in more ways."""

    def __init__(self, rngs):
        self.layer, values = linear(WIDTH, WIDTH, rngs), lambda *shape: nnx.Variable(jnp.zeros(shape, F64))
        counts = lambda *shape: nnx.Variable(jnp.zeros(shape, jnp.int32))
        self.ones, self.twice, self.slot, self.above, self.flag = counts(), counts(), counts(2), counts(), counts()
        self.decayed, self.largest, self.size = values(WIDTH), values(), values()

    def __call__(self, x):
        own, rows = jax.lax.stop_gradient(x), x.shape[0]
        self.ones[...] += jnp.ones(rows, jnp.int32).sum(dtype=jnp.int32)
        self.twice[...] += jnp.int32(rows) * 2
        self.slot[...] = self.slot[...].at[0].add(jnp.int32(rows))
        self.above[...] += (own[..., 0] >= jax.lax.top_k(own[:, 0, 0], 1)[0][-1]).sum(dtype=jnp.int32)
        self.flag[...] = jnp.int32(own.sum() > 3)
        self.decayed[...] = 0.9 * self.decayed[...] + own.sum((0, 1))
        self.largest[...] = jnp.maximum(0.99 * self.largest[...], jnp.abs(own).max())
        self.size[...] = self.size[...] + 1.0 * rows
        return jnp.tanh(self.layer(x))


HIDDEN = {
    "the largest of groups": lambda a, z, groups: a.at[groups].max(z),
    "the smallest of groups": lambda a, z, groups: a.at[groups].min(z),
    "products of groups": lambda a, z, groups: a.at[groups].mul(1 + z**2),
    "largest of segments": lambda a, z, groups: jnp.maximum(a, jax.ops.segment_max(z, groups, 5)),
    "seen": lambda a, z, groups: a.at[groups].set(1.0),
    "ages": lambda a, z, groups: (a + 1).at[groups].set(0.0),
    "the largest few": lambda a, z, groups: jax.lax.top_k(jnp.concatenate([a, z]), 5)[0],
    "sorted": lambda a, z, groups: jnp.sort(jnp.concatenate([a, z]))[-5:],
    "the largest so far": lambda a, z, groups: jnp.maximum(a, jax.lax.cummax(z)[-1]),
    "the row of the largest": lambda a, z, groups: a.at[z.argmax() % 5].add(1.0),
    "row after row": lambda a, z, groups: jax.lax.scan(lambda a, row: (0.9 * a + 0.1 * row, None), a, z)[0],
    "a singular value": lambda a, z, groups: a + jnp.linalg.svd(z[:, None], compute_uv=False)[0],
    "the sign of a mean": lambda a, z, groups: a + jnp.sign(z.mean()),
    "found in a sort": lambda a, z, groups: a + jnp.searchsorted(jnp.sort(z), 0.0),
}
PLAIN = {
    "a mean": lambda a, z, groups: 0.9 * a + 0.1 * jnp.tanh(z).mean(),
    "a mean of sorted features": lambda a, z, groups: (
        0.9 * a + 0.1 * jnp.sort(z[:, None] * jnp.arange(5.0), -1).mean(0)
    ),
    "means of matrices": lambda a, z, groups: (
        0.9 * a + jnp.linalg.inv(z[:, None, None] ** 2 + 3 * jnp.eye(5)).mean((0, 1))
    ),
    "no rows": lambda a, z, groups: jnp.sort(a)[::-1] + 1,
}


class Keeping(nnx.Module):
    """Keeps something of its rows, [n], in five floats."""

    def __init__(self, how):
        self.layer, self.kept, self.how = linear(4, 1, nnx.Rngs(0)), nnx.Variable(jnp.ones(5, F64)), how

    def __call__(self, x, groups):
        rows = self.layer(x)[:, 0]
        self.kept[...] = self.how(self.kept[...], jax.lax.stop_gradient(rows), groups)
        return rows


@pytest.mark.parametrize(
    "degrees, options",
    [({"data": 4}, {}), ({"fsdp": 4}, {"remat": "full"}), ({"data": 2}, {"accumulate": 2})],
    ids=str,
)
@pytest.mark.parametrize("how", HIDDEN | PLAIN)
def test_state_of_rows_of_which_it_is_not_known_is_named_with_what_hides_it(how, degrees, options):
    draws = np.random.default_rng(0)
    batch = {"x": draws.normal(size=(16, 4)), "groups": draws.integers(0, 5, 16)}
    loss = lambda model, batch: (model(batch["x"], batch["groups"]) ** 2).mean()
    trainer = parallel(degrees, options, Keeping((HIDDEN | PLAIN)[how])).trainer(TX, loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.step(batch)
    said = [str(each.message) for each in found if "own state depends" in str(each.message)]
    assert bool(said) == (how in HIDDEN), found
    assert all(
        re.search(
            r"others\): kept( \(not known behind [\w-]+ \(line \d+ of test_state_joins.py, \S+\)|\. Declare)", each
        )
        for each in said
    ), said


def named_in(model, degrees, options, rows=12):
    """The leaves that a step's warnings name as no means."""
    return said_by(lambda: parallel(degrees, options, model).trainer(TX, loss_fn).step(batch_of(rows)))


def said_by(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    said = [
        m for each in found if (m := re.search(r"own state depends.*\(others\): (.*?)\. Declare", str(each.message)))
    ]
    return {name.removeprefix("layer/") for match in said for name in match[1].split(", ")}


SAID = {
    "typed": ({"data": 2}, {"check_vma": True}),
    "accumulated": ({"data": 2}, {"accumulate": 3}),
    "sharded": ({"fsdp": 3}, {"remat": "full"}),
    "one row": ({"data": 4}, {}),
    "local": ({"data": 2}, {"batch_stats": "local"}),
}


@pytest.mark.parametrize("under", SAID)
@pytest.mark.parametrize("way", ["alone", "scanned", "checkpoint"])
@pytest.mark.parametrize("kind", [Tells, Untold, Right, Wrong])
def test_state_that_is_known_to_be_no_mean_is_named_in_a_warning(kind, way, under):
    wrong = {Untold: set(Tells.state_joins), Wrong: set(nnx.state(Wrong(nnx.Rngs(0)))) - {"layer"}}.get(kind, set())
    rows = 4 if under == "one row" else 12
    assert named_in(Net1(kind, way), *SAID[under], rows=rows) == (set() if under == "local" else wrong)


@pytest.mark.parametrize("degrees, options", [({"data": 4}, {}), ({"fsdp": 2}, {"check_vma": True})], ids=str)
@pytest.mark.parametrize("kind", [Tells, Untold, Right, Wrong])
def test_a_call_outside_of_a_loss_names_it_too(kind, degrees, options):
    wrong = {Untold: set(Tells.state_joins), Wrong: set(nnx.state(Wrong(nnx.Rngs(0)))) - {"layer"}}.get(kind, set())
    model, x = parallel(degrees, options, Net1(kind)), batch_of(12)["x"]
    assert said_by(lambda: model(x)) == wrong
    if wrong:  # the suite makes warnings errors
        with pytest.raises(UserWarning, match=r"^the model's own state depends"):
            parallel(degrees, options, Net1(kind))(x)
    model.eval()
    assert said_by(lambda: model(x)) == set()


@pytest.mark.filterwarnings("ignore:the model's own state depends on the batch's rows")
def test_the_librarys_own_oracle_sees_the_whole_batchs_state():
    (degrees, options), batches = PLANS["ddp, accumulated"], [batch_of(24, seed) for seed in range(2)]
    given = Net1(Wrong), loss_fn, batches, ax.Plan(**options)
    with pytest.raises(AssertionError, match=r"state differs(.|\n)*layer/decayed: max"):
        assert_equals_single_device(*given, mesh=plain_mesh_of(degrees))


class Measures(Counting):
    """A model that holds the metrics which its loss updates."""

    def __init__(self):
        super().__init__(by_loss=True)
        self.metrics = nnx.MultiMetric(error=nnx.metrics.Average("error"))


def measured_loss(model, batch):
    error = jnp.abs(model(batch["x"]) - batch["y"])
    model.metrics.update(error=error.astype(jnp.float32))
    return jnp.sqrt(jnp.square(error).mean())


@pytest.mark.parametrize("typed", [False, True])
def test_metrics_within_the_model_that_its_loss_updates_are_those_of_the_whole_batch(typed):
    trainer = parallel({"data": 2}, {"check_vma": typed}, Measures()).trainer(TX, measured_loss)
    for seed in range(2):
        batch = batch_of(8, seed)
        found = trainer.check(batch)
        assert found.equal and not found.left_out, str(found)
        trainer.step(batch)
    assert trainer.model.module.metrics.error.count[...] == 2 * batch["y"].size


@pytest.mark.filterwarnings("ignore:the model's own state depends on the batch's rows")
def test_metrics_within_the_model_are_refused_by_name_in_microbatches():
    trainer = parallel({"data": 2}, {"accumulate": 2}, Measures()).trainer(TX, measured_loss)
    with pytest.raises(
        ValueError, match=r"changes the model's state by rows.*metrics/error/total\. Return it as a metric"
    ):
        trainer.step(batch_of(8))
