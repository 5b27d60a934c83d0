"""Random draws by the whole batch's rows (`ax.Plan(draws="rows")`): one device's masks under every plan."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.compat.row_keys import row_key, times
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.plan import Partition
from axonml_jax.testing.equality import assert_equals_single_device

ROWS = 16
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(ROWS, 6)), "y": RNG.integers(0, 3, ROWS), "mask": (RNG.random(ROWS) < 0.5).astype(float)}


class Noisy(nnx.Module):
    """Dropout of several kinds, and keys of rows."""

    def __init__(self, *, rngs):
        make = lambda *sizes: nnx.Linear(*sizes, rngs=rngs, param_dtype=jnp.float64)
        self.first, self.second, self.last = make(6, 10), make(10, 10), make(10, 3)
        self.drop, self.alike = nnx.Dropout(0.4, rngs=rngs), nnx.Dropout(0.3, broadcast_dims=(0,), rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        x = self.drop(jnp.tanh(self.first(x)))
        x = self.alike(jnp.tanh(self.second(x)))
        keys = jax.random.split(self.rngs.dropout(), len(x))
        x = x + 0.1 * jax.vmap(lambda key: jax.random.normal(key, (10,), jnp.float64))(keys)
        return self.last(self.drop(x))


class NoisyLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        dense = lambda size: linen.Dense(size, param_dtype=jnp.float64)
        x = linen.Dropout(0.4, deterministic=False)(jnp.tanh(dense(10)(x)))
        x = jnp.tanh(linen.remat(linen.Dense)(10, param_dtype=jnp.float64)(x))
        return dense(3)(linen.Dropout(0.3, deterministic=False)(x))


def losses(model, b):
    return optax.softmax_cross_entropy_with_integer_labels(model(b["x"]), b["y"])


def masked(model, b):
    """No mean over its rows; and R-Drop: the model called twice draws other masks."""
    once, again = losses(model, b), losses(model, b)
    return (once * b["mask"]).sum() / b["mask"].sum() + ((once - again) ** 2).mean(), {"once": once.sum()}


def mean(model, b):
    return losses(model, b).mean()


class Step(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        noise = jax.random.normal(self.make_rng("noise"), x.shape, jnp.float64)
        return jnp.tanh(linen.Dense(6, param_dtype=jnp.float64)(x)) + 0.1 * noise, noise[:, 0]


class OwnStreams(linen.Module):
    """Draws of streams by names of its own: in a scan that splits one, and where one is there."""

    @linen.compact
    def __call__(self, x):
        split = {"params": False, "noise": True}
        scan = linen.scan(linen.remat(Step), variable_broadcast="params", split_rngs=split, length=3, out_axes=1)
        x, noise = scan()(x, None)
        x, there = linen.jit(Shaken)()(x)
        return linen.Dense(3, param_dtype=jnp.float64, name="last")(x), noise, there


class Shaken(linen.Module):
    @linen.compact
    def __call__(self, x):
        there = self.has_rng("shake")
        return x + jax.random.normal(self.make_rng("shake"), x.shape, jnp.float64) * there, jnp.float32(there)


RULES = Partition([("(first|Dense_0)/kernel", PartitionSpec(None, "tensor")), (".*", PartitionSpec())])
PLANS = {
    "ddp": ({"data": 4}, ax.Plan),
    "synchronous": ({"data": 4}, lambda **o: ax.Plan(data=ax.Replicate(sync_strategy="synchronous"), **o)),
    "fsdp": ({"fsdp": 4}, lambda **o: ax.Plan(fsdp=ax.Shard(), **o)),
    "zero-1": ({"fsdp": 4}, lambda **o: ax.Plan(fsdp=ax.Shard(stage=1), **o)),
    "hybrid, remat": ({"data": 2, "fsdp": 2}, lambda **o: ax.Plan(fsdp=ax.Shard(), remat="full", **o)),
    "accumulate": ({"data": 2}, lambda **o: ax.Plan(accumulate=4, **o)),
    "fsdp, accumulate": ({"fsdp": 2}, lambda **o: ax.Plan(fsdp=ax.Shard(), accumulate=2, **o)),
    "one device, accumulate": ({"data": 1}, lambda **o: ax.Plan(accumulate=2, **o)),
    "pipeline": (
        {"data": 2, "pipe": 2},
        lambda **o: ax.Plan(pipe=ax.Pipelined(num_microbatches=2, split=["last"]), **o),
    ),
    "rules": ({"data": 2, "tensor": 2}, lambda **o: ax.Plan(partition=RULES, **o)),
    "rules, accumulate": ({"data": 2, "tensor": 2}, lambda **o: ax.Plan(partition=RULES, accumulate=2, **o)),
}


def plainly(make, loss):
    """Two steps of the user's function on one device, under no plan: JAX's own keys."""
    trainer = make({"data": 1}, ax.Plan()).trainer(optax.sgd(0.1), loss)
    return [jax.tree.map(np.asarray, trainer.step(BATCH)) for _ in range(2)], trainer.model.parameters()


def nnx_model(degrees, plan):
    return ax.parallelize(Noisy(rngs=nnx.Rngs(0)), mesh_of(degrees), plan)


def linen_model(degrees, plan):
    module = NoisyLinen()
    params = module.init(jax.random.key(0), jnp.zeros((2, 6)))
    return ax.parallelize(module, mesh_of(degrees), plan, params=params)


def rows():
    """Every plan with one kind of model, loss and mode."""
    for i, plan in enumerate(PLANS):
        make, loss = (nnx_model, linen_model)[i % 2], (masked, mean)[i // 2 % 2]
        slow = [] if plan in ("ddp", "fsdp", "one device, accumulate") else [pytest.mark.slow]
        yield pytest.param(plan, make, loss, bool(i // 3 % 2), id=plan, marks=slow)


@pytest.mark.parametrize(("plan", "make", "loss", "check_vma"), list(rows()))
def test_masks_are_those_of_one_device(plan, make, loss, check_vma):
    degrees, plan_of = PLANS[plan]
    wanted, params = plainly(make, loss)
    trainer = make(degrees, plan_of(draws="rows", check_vma=check_vma)).trainer(optax.sgd(0.1), loss)
    for step in wanted:
        found = trainer.step(BATCH)
        for name, value in step.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    jax.tree.map(same, trainer.model.parameters(), params)


def of_streams(model, batch):
    out, noise, there = model(batch["x"])
    return ((out - 1) ** 2).mean(), {"noise": noise, "there": there}


@pytest.mark.parametrize(
    "plan", ["ddp", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("fsdp", "pipeline"))]
)
def test_a_linen_model_has_a_stream_for_every_name_in_training_and_none_of_its_own_in_evaluation(plan):
    degrees, plan_of = PLANS[plan]
    module = OwnStreams()
    params = module.init(jax.random.key(0), jnp.zeros((2, 6)))
    found = []
    for mesh, each in ((mesh_of(data=1), ax.Plan()), (mesh_of(degrees), plan_of(draws="rows"))):
        trainer = ax.parallelize(module, mesh, each, params=params).trainer(optax.sgd(0.1), of_streams)
        assert trainer.evaluate(BATCH)["there"] == 0
        found.append([jax.tree.map(np.asarray, trainer.step(BATCH)) for _ in range(2)])
    for wanted, own in zip(*found, strict=True):
        assert own["there"] == 1 and np.unique(own["noise"]).size == own["noise"].size
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), own, wanted)


@pytest.mark.slow
def test_a_check_and_a_test_of_a_model_compare_dropout():
    plan = ax.Plan(fsdp=ax.Shard(), accumulate=2, draws="rows")
    trainer = nnx_model({"fsdp": 2}, plan).trainer(optax.sgd(0.1), masked)
    found = trainer.check(BATCH)
    assert found.equal and not found.left_out and found.compared == 8, str(found)
    ax.testing.assert_equals_single_device(Noisy(rngs=nnx.Rngs(0)), masked, BATCH, plan, mesh=mesh_of(fsdp=2), steps=2)


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer, self.drop = nnx.Linear(6, 3, rngs=rngs, param_dtype=jnp.float64), nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.layer(x))


def test_by_shards_a_second_call_of_a_loss_draws_further_in_a_plan_and_in_the_oracle():
    plan = ax.Plan(accumulate=2)
    ax.testing.assert_equals_single_device(Dropping(), masked, [BATCH, BATCH], plan, mesh=mesh_of(data=2))


class Noise(nnx.Module):
    """Adds what a function draws."""

    def __init__(self, draw):
        self.layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        self.rngs, self.draw = nnx.Rngs(0), draw

    def __call__(self, x):
        x = self.layer(x)
        return x + self.draw(self.rngs.noise(), x)


REFUSED = {
    "a key of its own": (
        lambda key, x: jax.random.normal(jax.random.key(0), x.shape),
        r"random_bits of shape \(4, 3\) \(line \d+ of test_draws.py.*a key that the code makes itself",
    ),
    "merged rows": (
        lambda key, x: jax.random.normal(key, (x.size,)).reshape(x.shape),
        r"random_bits of shape \(12,\).*no dim of its own for the 4 rows",
    ),
    "keys of numbers": (
        lambda key, x: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(len(x)))[:, None],
        r"random_fold_in of shape \(4,\).*restart on each rank: use jax.random.split\(key, rows\)",
    ),
    "another dim of as many": (
        lambda key, x: jax.random.normal(key, (4, 3)).mean(0),
        r"random_bits of shape \(4, 3\).*has a dim of 4, which equals a rank's number of rows but is not the rows",
    ),
    "inside of a primitive": (
        lambda key, x: jax.random.gamma(key, jnp.ones(x.shape)),
        r"random_gamma .*not known to draw row by row",
    ),
    "the key's words": (
        lambda key, x: jax.random.normal(jax.random.wrap_key_data(jax.random.key_data(key)[:2]), ()),
        r"random_unwrap .*not known to draw row by row",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_drawn_row_by_row_is_refused_with_its_line(what):
    draw, words = REFUSED[what]
    model = ax.parallelize(Noise(draw), mesh_of(data=4), ax.Plan(draws="rows"))
    with pytest.raises(ValueError, match=rf'draws="rows": {words}.*take draws="shards"'):
        model.value_and_grad(mean)(BATCH)


class Quiet(Noise):
    def __call__(self, x):
        return self.layer(x)


def test_a_draw_of_the_loss_that_is_not_known_row_by_row_is_refused_and_no_number_of_rows_is_blamed():
    mixup = lambda model, b: jax.random.beta(model.rngs(), 0.4, 0.4) * masked(model, b)[0]
    model = ax.parallelize(Quiet(None), mesh_of(data=4), ax.Plan(draws="rows"))
    with pytest.raises(ValueError, match=r"random_gamma of shape \(\) \(line \d+ of test_draws.py.*not known to draw"):
        model.value_and_grad(mixup)(BATCH)


def both_draw(model, batch):
    """As in diffusion: noise in the model, and noise in the loss."""
    noise = jax.random.normal(model.rngs.noise(), (ROWS, 3))[: len(batch["x"])]
    made = model(batch["x"]) - model.layer(batch["x"])
    alike = jnp.isclose(made[:, None], noise[None], atol=1e-12).all(-1).sum()
    return jnp.mean((model(batch["x"]) - noise) ** 2), {"alike": alike}


@pytest.mark.parametrize("plan", ["one device", "microbatches", "ddp", "zero3"])
def test_the_loss_and_the_model_draw_other_numbers_from_one_stream(plan):
    settings = {
        "one device": ({"data": 1}, ax.Plan()),
        "microbatches": ({"data": 1}, ax.Plan(accumulate=2)),
        "ddp": ({"data": 4}, ax.Plan()),
        "zero3": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard())),
    }
    degrees, chosen = settings[plan]
    model = ax.parallelize(Noise(lambda key, x: jax.random.normal(key, x.shape)), mesh_of(degrees), chosen)
    trainer = model.trainer(optax.sgd(0.0), both_draw)
    assert all(int(trainer.step(BATCH)["alike"]) == 0 for _ in range(2))
    if degrees == {"data": 4}:
        by_rows = ax.parallelize(
            Noise(lambda key, x: jax.random.normal(key, x.shape)), mesh_of(data=4), ax.Plan(draws="rows")
        )
        with pytest.raises(ValueError, match=r"the same random stream \(rngs/default\).*a stream of its own"):
            by_rows.trainer(optax.sgd(0.0), both_draw).step(BATCH)


class StackedDropout(nnx.Module):
    """As many layers in a loop as a rank has rows, each with streams of its own."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0)
        self.first, self.last = (nnx.Linear(6, n, rngs=rngs, param_dtype=jnp.float64) for n in (6, 3))
        self.drops = nnx.split_rngs(splits=4)(make)(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, drop: drop(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.last(run(jnp.tanh(self.first(x)), self.drops))


def centred(key, x):
    noise = jax.random.normal(key, x.shape, x.dtype)
    return jnp.tanh(noise - noise.mean(0)) * x


@pytest.mark.parametrize("plan", [{"data": 4}, {"fsdp": 4}], ids=str)
def test_noise_that_the_model_centres_over_rows_is_centred_over_all(plan):
    settings = ax.Plan(draws="rows") if "data" in plan else ax.Plan(draws="rows", fsdp=ax.Shard())
    (one, own), (all_, got) = (
        ax.parallelize(Noise(centred), mesh_of(degrees), chosen).value_and_grad(mean)(BATCH)
        for degrees, chosen in (({"data": 1}, ax.Plan(draws="rows")), (plan, settings))
    )
    np.testing.assert_allclose(all_, one, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, own)


def test_a_stack_of_as_many_layers_as_a_rank_has_rows_is_not_taken_for_rows():
    step = lambda degrees: ax.parallelize(StackedDropout(), mesh_of(degrees), ax.Plan(draws="rows")).value_and_grad(
        mean
    )
    (one, own), (four, got) = step({"data": 1})(BATCH), step({"data": 4})(BATCH)
    np.testing.assert_allclose(four, one, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), got, own)


class OwnAttention(nnx.Module):
    """Attention in blocks that no layer of the library calls."""

    def __init__(self, *, rngs):
        self.layer, self.rngs = nnx.Linear(6, 6, rngs=rngs), rngs

    def __call__(self, x):
        q = self.layer(x)[:, None, None].repeat(2, 1)
        return ax.context_attention(q, q, q, dropout_rate=0.5, dropout_key=self.rngs.dropout())[:, 0, 0]


SINGLE = r'keys of draws="rows" cannot draw single elements.*take draws="shards", or attention="xla"'


def test_attention_in_blocks_cannot_draw_row_by_row():
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "max_length": 8, "vocab_size": 16}
    model = lambda **o: Transformer(TransformerConfig(**sizes, **o), rngs=nnx.Rngs(0))
    train = lambda model, plan: ax.parallelize(model, mesh_of(data=2), plan).trainer(optax.sgd(0.1), mean)
    with pytest.raises(ValueError, match=f"blocks/0/attention, blocks/1/attention: {SINGLE}"):
        train(model(attention="blocks", dropout=0.5), ax.Plan(draws="rows"))
    for others in (model(attention="blocks"), model(attention="xla", dropout=0.5)):
        train(others, ax.Plan(draws="rows"))
    train(model(attention="blocks", dropout=0.5), ax.Plan())
    trainer = train(OwnAttention(rngs=nnx.Rngs(0)), ax.Plan(draws="rows"))
    with pytest.raises(ValueError, match=SINGLE):
        trainer.step(BATCH)


def test_where_a_loss_is_of_a_ranks_rows_draws_by_rows_are_refused():
    quiet = lambda: nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    for degrees, plan, words in (
        ({"data": 2}, ax.Plan(data=ax.Replicate(sync_strategy="no_sync"), draws="rows"), "train by themselves"),
        ({"context": 2}, ax.Plan(context=ax.Context(), draws="rows"), "positions are split over context"),
    ):
        kind = Positions if "context" in degrees else quiet
        with pytest.raises(ValueError, match=f'draws="rows": .*{words}'):
            ax.parallelize(kind(), mesh_of(degrees), plan).trainer(optax.sgd(0.1), mean)
    with pytest.raises(ValueError, match="draws='row' must be 'shards' or 'rows'"):
        ax.Plan(draws="row")
    model = ax.parallelize(quiet(), mesh_of(data=2), ax.Plan(draws="rows"), seed=0)
    with jax.default_prng_impl("rbg"), pytest.raises(ValueError, match=r"takes keys of threefry2x32.*not of rbg"):
        ax.parallelize(quiet(), mesh_of(data=2), model.plan).trainer(optax.sgd(0.1), mean).step(BATCH)


class Positions(nnx.Module):
    splits_positions = True

    def __call__(self, x):
        return x


# The keys themselves

DRAWN = {
    "uniform": (lambda key, shape: jax.random.uniform(key, shape), (12, 5), 0),
    "normal, float64": (lambda key, shape: jax.random.normal(key, shape, jnp.float64), (3, 12, 7), 1),
    "mask": (lambda key, shape: jax.random.bernoulli(key, 0.3, shape), (12,), 0),
    "bytes": (lambda key, shape: jax.random.bits(key, shape, "uint8"), (5, 12), 1),
    "integers": (lambda key, shape: jax.random.randint(key, shape, 0, 9), (12, 2), 0),
    "keys": (
        lambda key, shape: jax.vmap(lambda k: jax.random.uniform(k, (5,)))(jax.random.split(key, shape)),
        (12,),
        0,
    ),
    "of several keys": (
        lambda key, shape: jax.vmap(lambda k: jax.random.uniform(k, shape))(jax.random.split(key, 2)).sum(0),
        (12, 3),
        0,
    ),
}


@pytest.mark.parametrize("partitionable", [True, False], ids=["by place", "whole"])
@pytest.mark.parametrize("drawn", DRAWN)
def test_draws_of_parts_are_the_parts_of_the_whole_draw(drawn, partitionable):
    (fun, shape, dim), key = DRAWN[drawn], jax.random.key(7)
    local = tuple(size // 3 if d == dim else size for d, size in enumerate(shape))
    with jax.threefry_partitionable(partitionable):
        parts = [jax.jit(fun, static_argnums=1)(row_key(key, part, local[dim], 3), local) for part in range(3)]
        np.testing.assert_array_equal(np.concatenate(parts, dim), fun(key, shape))
        same = jax.random.uniform(row_key(key, 1, 4, 3), (7,))
        np.testing.assert_array_equal(same, jax.random.uniform(key, (7,)))


@pytest.mark.parametrize("factor", [1, 2**16 + 5, 2**31 + 9, 2**33 + 7, 2**40 + 12345])
def test_places_above_32_bits_are_those_of_whole_numbers(factor):
    numbers = [0, 1, 5, 2**16, 2**31 + 3, 2**32 - 1]
    high, low = times(jnp.asarray(numbers, jnp.uint32), factor)
    assert [int(a) * 2**32 + int(b) for a, b in zip(high, low, strict=True)] == [x * factor % 2**64 for x in numbers]


class GivenNoise(nnx.Module):
    """Noise by a key that the call gives, by one that the model makes, of no row, or as it comes."""

    def __init__(self):
        self.dense = nnx.Linear(6, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64)

    def __call__(self, x, noise=0.0):
        return self.dense(x + noise)

    def by_key(self, x, key):
        return self.dense(x + jax.random.normal(key, x.shape))

    def by_own(self, x):
        keys = jax.random.split(jax.random.key(3), len(x))
        return self.dense(x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys))

    def alike(self, x, key):
        return self.dense(x + jax.random.normal(key, x.shape[1:]))


GIVEN = {
    "a key of the batch": (lambda m, b: m.by_key(b["x"], b["key"]), "random_bits of shape (16, 6)"),
    "a key made in the model": (lambda m, b: m.by_own(b["x"]), "random_split of shape (16"),
    "noise made in the loss": (lambda m, b: m(b["x"], jax.random.normal(b["key"], b["x"].shape)), None),
    "of no row": (lambda m, b: m.alike(b["x"], b["key"]), None),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_key_that_all_ranks_have_alike_draws_rows_of_one_device_or_is_refused_in_microbatches(name):
    call, refused = GIVEN[name]
    batch = BATCH | {"key": jax.random.key(5)}
    loss = lambda m, b: optax.softmax_cross_entropy_with_integer_labels(call(m, b), b["y"]).mean()
    step = lambda **plan: (
        ax.DDP(GivenNoise(), mesh_of(data=2)).trainer(optax.sgd(0.1), loss, **plan).step(batch)["loss"]
    )
    for plan in ({}, {"accumulate": 2}):
        if refused is None or not plan:
            np.testing.assert_allclose(step(**plan), loss(GivenNoise(), batch), rtol=1e-9)
            continue
        with pytest.raises(ValueError, match=re.escape(refused)) as said:
            step(**plan)
        assert "line " in str(said.value) and "test_draws.py" in str(said.value)


# Keys that a model is given, or makes itself


class Keyed(nnx.Module):
    def __init__(self):
        self.layer, self.drop = nnx.Linear(6, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64), nnx.Dropout(0.4)

    def __call__(self, x, key):
        return self.layer(self.drop(x, rngs=key))


class KeyedLinen(linen.Module):
    @linen.compact
    def __call__(self, x, key):
        return linen.Dense(3, param_dtype=jnp.float64)(x + jax.random.normal(key, x.shape))


class OwnKey(Keyed):
    def __call__(self, x):
        return super().__call__(x, jax.random.key(3))


class OfStreams(nnx.Module):
    """Gives a model that asks for a key those of its own stream."""

    def __init__(self):
        self.inner, self.rngs = Keyed(), nnx.Rngs(4)

    def __call__(self, x):
        return self.inner(x, self.rngs())


class KeysOfRows(Keyed):
    def __call__(self, x, keys):
        return self.layer(x + jax.vmap(lambda key: jax.random.normal(key, (6,), jnp.float64))(keys))


class Numbered(Keyed):
    """Draws by a number of each row."""

    def __call__(self, x, key):
        keys = jax.vmap(lambda n: jax.random.fold_in(key, n))((1000 * jnp.abs(x[:, 0])).astype(int))
        return KeysOfRows.__call__(self, x, keys)


KEY = jax.random.key(3)
KEYED = {
    "a key": (Keyed, lambda model, x: model(x, KEY)),
    "a raw key": (Keyed, lambda model, x: model(x, jax.random.wrap_key_data(jnp.array([0, 7], jnp.uint32)))),
    "streams": (Keyed, lambda model, x: model(x, nnx.Rngs(3))),
    "one of its own making": (OwnKey, lambda model, x: model(x)),
    "of a Linen model": (KeyedLinen, lambda model, x: model(x, KEY)),
}
APART = {
    "keys of rows": (KeysOfRows, lambda model, x: model(x, jax.random.split(KEY, len(x)))),
    "numbers of rows": (Numbered, lambda model, x: model(x, KEY)),
}


def weighted(model, call):
    def loss(model, batch):
        own = optax.softmax_cross_entropy_with_integer_labels(call(model, batch["x"]), batch["y"])
        return ax.WeightedMean(own.sum(), 1.0 * own.size)

    return loss


def squares(model, call):
    return lambda model, batch: (call(model, batch["x"]) ** 2).mean()


def variables_of(model):
    return {"params": model.init(jax.random.key(0), BATCH["x"], KEY)} if isinstance(model, linen.Module) else {}


@pytest.mark.parametrize("loss", [weighted, squares])
@pytest.mark.parametrize(
    "plan",
    [({"data": 4}, {}), ({"data": 2}, {"check_vma": True}), ({"fsdp": 4}, {"fsdp": ax.Shard()})],
    ids=["ddp", "ddp, typed", "zero3"],
)
@pytest.mark.parametrize("kind", KEYED)
def test_draws_by_a_key_that_is_given_are_those_of_one_device(kind, plan, loss):
    make, call = KEYED[kind]
    degrees, settings = plan
    loss, given = loss(model := make(), call), variables_of(model)
    assert_equals_single_device(model, loss, BATCH, ax.Plan(**settings), mesh=mesh_of(degrees), steps=2, **given)


@pytest.mark.parametrize("loss", [weighted, squares])
@pytest.mark.parametrize("kind", KEYED)
def test_in_microbatches_they_are_refused_with_the_line(kind, loss):
    make, call = KEYED[kind]
    model = make()
    parallel = ax.parallelize(model, mesh_of(data=2), ax.Plan(accumulate=2), **variables_of(model))
    with pytest.raises(ValueError, match=r"draws random numbers for rows from a key .*\(line \d+.*self\.rngs\(\)"):
        parallel.trainer(optax.sgd(0.1), loss(model, call)).step(BATCH)


@pytest.mark.parametrize("kind", KEYED)
def test_a_call_and_a_prediction_refuse_them(kind):
    make, call = KEYED[kind]
    model = make()
    parallel = ax.parallelize(model, mesh_of(data=2), ax.Plan(), **variables_of(model))
    trainer, x = parallel.trainer(optax.sgd(0.1), squares(model, call)), BATCH["x"]
    said = "this call draws random numbers for rows from a key that is the same on all ranks: random_bits of shape"
    with pytest.raises(ValueError, match=said):
        trainer.predict([x], lambda model, x: call(model, x) + jax.random.normal(KEY, (len(x), 1)))
    if kind != "streams":
        given = () if kind == "one of its own making" else (KEY,)
        parallel.train()
        with pytest.raises(ValueError, match=said):
            parallel(x, *given)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["ddp", "accumulate"])
@pytest.mark.parametrize("kind", APART)
def test_draws_by_keys_of_rows_are_a_rows_own(kind, settings):
    make, call = APART[kind]
    parallel = ax.parallelize(model := make(), mesh_of(data=2), ax.Plan(**settings))
    trainer, loss = parallel.trainer(optax.sgd(0.1), squares(model, call)), squares(model, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = call(model, jnp.asarray(BATCH["x"]))
        given = (jax.random.split(KEY, ROWS),) if kind == "keys of rows" else (KEY,)
        np.testing.assert_allclose(parallel(BATCH["x"], *given), wanted, rtol=1e-12)
        np.testing.assert_allclose(trainer.step(BATCH)["loss"], loss(make(), BATCH), rtol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=["ddp", "accumulate"])
def test_a_call_of_the_module_itself_draws_by_the_key_that_the_loss_gives(settings):
    module = NoisyLinen()
    variables = module.init({"params": jax.random.key(0), "dropout": KEY}, BATCH["x"])
    drawn = lambda params, b: (module.apply({"params": params}, b["x"], rngs={"dropout": KEY}) ** 2).mean()
    parallel = ax.parallelize(module, mesh_of(data=2), ax.Plan(**settings), params=variables)
    found = parallel.trainer(optax.sgd(0.1), lambda model, b: drawn(model.params, b)).step(BATCH)["loss"]
    np.testing.assert_allclose(found, drawn(variables["params"], BATCH), rtol=1e-9)


def test_a_model_that_asks_for_a_key_gets_those_of_a_module_around_it():
    trainer = ax.DDP(OfStreams(), mesh_of(data=2)).trainer(
        optax.sgd(0.1), squares(None, lambda m, x: m(x)), accumulate=2
    )
    assert np.isfinite(trainer.step(BATCH)["loss"])
