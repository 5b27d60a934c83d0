"""Models that nobody wrote for split sequences train under `ax.Context` as on one device: their attention is recognised."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.ledger.count import collectives_in
from axonml_jax.testing.equality import assert_equals_single_device

WORDS, WIDTH, ROWS, LENGTH = 11, 16, 4, 16
FLAX = {"param_dtype": jnp.float32, "dtype": jnp.float32}  # its softmax is in float32, whatever the model's dtype


class Flax(nnx.Module):
    """Flax's own attention under its own causal mask, and a table of positions."""

    def __init__(self, rate=0.0):
        rngs = nnx.Rngs(0, dropout=1)
        self.table, self.places = (nnx.Embed(count, WIDTH, rngs=rngs, **FLAX) for count in (WORDS, LENGTH))
        self.attention = nnx.MultiHeadAttention(
            4, WIDTH, decode=False, dropout_rate=rate, deterministic=not rate, use_bias=False, rngs=rngs, **FLAX
        )
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **FLAX)
        self.dropout = nnx.Dropout(rate, deterministic=not rate, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.table.attend(x + self.dropout(jnp.tanh(self.inner(x))))


class Written(nnx.Module):
    """Grouped queries, a sliding window, layers in a scan that are recomputed, all written by hand."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        draw = lambda *shape: nnx.Param(0.3 * jax.random.normal(rngs.params(), shape, jnp.float64))
        self.table, self.q, self.kv = draw(WORDS, WIDTH), draw(2, WIDTH, 4, 4), draw(2, 2, WIDTH, 2, 4)

    def __call__(self, tokens):
        at = jnp.arange(tokens.shape[1])
        seen = (at[:, None] >= at) & (at[:, None] - at < 5)

        @jax.checkpoint
        def layer(x, weights):
            q = jnp.einsum("bsw,whd->bhsd", x, weights[0])
            k, v = (jnp.repeat(jnp.einsum("bsw,whd->bhsd", x, each), 2, axis=1) for each in weights[1])
            scores = jnp.where(seen, jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2, -1e9)
            mixed = jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(scores, -1), v)
            return x + mixed.reshape(x.shape), None

        x = jax.lax.scan(layer, self.table[...][tokens], (self.q[...], self.kv[...]))[0]
        return x @ self.table[...].T


class Between(nnx.Module):
    """Queries of some positions read keys of others, of which some are padding; a row of padding alone sees all alike."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (WORDS, WIDTH), jnp.float64))

    def __call__(self, tokens):
        x, y = self.table[...][tokens], self.table[...][tokens[:, 5:]]
        real = (tokens[:, None, 5:] > 6) & (jnp.arange(len(tokens)) > 0)[:, None, None]
        scores = jnp.einsum("bqd,bkd->bqk", x, y) / 4 + jnp.sin(jnp.arange(y.shape[1]))
        weights = jax.nn.softmax(jnp.where(real, scores, -1e9), -1)
        return (x + jnp.einsum("bqk,bkd->bqd", weights, y)) @ self.table[...].T


class Zeroed(nnx.Module):
    """Causal attention whose weights are set to zero for queries of padding, after the softmax."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (WORDS, WIDTH), jnp.float64))

    def __call__(self, tokens):
        x, at = self.table[...][tokens], jnp.arange(tokens.shape[1])
        scores = jnp.where(at[:, None] >= at, jnp.einsum("bqd,bkd->bqk", x, x) / 4, -jnp.inf)
        weights = jnp.where((tokens > 2)[:, :, None], jax.nn.softmax(scores, -1), 0)
        return (x + jnp.einsum("bqk,bkd->bqd", weights, x)) @ self.table[...].T


class Given(nnx.Module):
    """As Tunix writes Llama: positions and a mask of every row come with the batch, queries are grouped by a reshape."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        draw = lambda *shape: nnx.Param(0.3 * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.table, self.q, self.kv = draw(WORDS, WIDTH), draw(WIDTH, 4, 4), draw(2, WIDTH, 2, 4)

    def __call__(self, tokens, places, seen):
        x = self.table[...][tokens]
        q = rotated(jnp.einsum("BTD,DNH->BTNH", x, self.q[...]), places)
        k, v = (jnp.einsum("BSD,DKH->BSKH", x, each) for each in self.kv[...])
        b, t, _, d = q.shape
        scores = jnp.einsum("BTHGD,BSHD->BHGTS", q.reshape(b, t, 2, 2, d), rotated(k, places)) * d**-0.5
        scores = jnp.where(jnp.expand_dims(seen, -3), scores.reshape(b, 4, t, t), -2.3819763e38)
        weights = jax.nn.softmax(scores.astype(jnp.float32), -1).reshape(b, 2, 2, t, t)
        mixed = jnp.einsum("BHGTS,BSHD->BTHGD", weights, v)
        return (x + mixed.reshape(x.shape)) @ self.table[...].T


def rotated(x, places):
    """Rotary embeddings of [b, s, n, d] by positions [b, s]."""
    half = x.shape[-1] // 2
    angles = (places[..., None] / 10.0 ** jnp.arange(half, dtype=jnp.float32))[:, :, None]
    a, b = jnp.split(x, 2, -1)
    turned = jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)
    return turned.astype(x.dtype)


class Padded(nn.Module):
    """Linen's attention with a padding mask, pooled over positions; and a convolution over them."""

    @nn.compact
    def __call__(self, tokens):
        real = tokens > 2
        x = nn.Embed(WORDS, WIDTH, **FLAX)(tokens)
        x = x + nn.Conv(WIDTH, (3,), **FLAX)(x)
        mask = nn.make_attention_mask(jnp.ones_like(tokens), real)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False, **FLAX)(x, mask=mask)
        return nn.Dense(WORDS, **FLAX)((x * real[..., None]).mean(1))


def shifted(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:]).mean()


def without_last(model, tokens):
    """The usual loss of a language model: on all tokens but the last, which do not divide over the ranks."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def pooled(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens[:, 0]).mean()


def labelled(model, batch):
    logits = model(batch["tokens"], batch["places"], batch["seen"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def batch_given(seed):
    """Causal within each row's first positions; the rest of it is seen by none of these."""
    tokens = np.random.default_rng(seed).integers(0, WORDS, (ROWS, LENGTH + 1))
    ends = np.array([LENGTH, 9, 12, 5])[:, None, None]
    seen = np.tril(np.ones((LENGTH, LENGTH), bool)) & (np.arange(LENGTH) < ends)
    places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "places": places, "seen": seen}


def batch_of(seed):
    return np.random.default_rng(seed).integers(0, WORDS, (ROWS, LENGTH))


ULYSSES, ALLOWED = ax.Context(method="ulysses"), ax.Context(allow_communication=True)
# mesh, plan, model, loss
PLANS = {
    "flax, gather": ({"context": 4}, {"context": ax.Context(method="gather")}, Flax, shifted),
    "flax, data": ({"data": 2, "context": 2}, {"accumulate": 2}, Flax, shifted),
    "flax, zero3": ({"fsdp": 2, "context": 2}, {"remat": "full"}, Flax, shifted),
    "written, ring": ({"context": 4}, {"context": ax.Context(method="ring")}, Written, shifted),
    "written, ulysses": ({"data": 2, "context": 2}, {"context": ULYSSES}, Written, shifted),
    "linen": ({"context": 2}, {}, Padded, pooled),
    "without the last, gather": ({"context": 4}, {"context": ax.Context(method="gather")}, Written, without_last),
    "without the last, ring": ({"context": 4}, {"context": ax.Context(method="ring")}, Written, without_last),
    "without the last, ulysses": ({"data": 2, "context": 2}, {"context": ULYSSES}, Written, without_last),
    "without the last, zero3": (
        {"fsdp": 2, "context": 4},
        {"remat": "full", "context": ALLOWED},
        Written,
        without_last,
    ),
    "between, ring": ({"context": 4}, {"context": ax.Context(method="ring")}, Between, without_last),
    "between, gather": ({"context": 4}, {"context": ax.Context(method="gather")}, Between, without_last),
    "data in bf16": ({"data": 2, "context": 2}, {"precision": "bf16"}, Flax, shifted),
    "zero3 in bf16": ({"fsdp": 2, "context": 2}, {"precision": "bf16"}, Flax, shifted),
    "zeroed": ({"context": 2}, {"context": ALLOWED}, Zeroed, shifted),
}


@pytest.mark.parametrize("plan", PLANS)
def test_models_train_as_on_one_device(plan):
    degrees, settings, make, loss = PLANS[plan]
    model, batches = make(), [batch_of(seed) for seed in range(2)]
    params = model.init(jax.random.key(0), batches[0]) if isinstance(model, nn.Module) else None
    assert_equals_single_device(
        model, loss, batches, ax.Plan(**settings), mesh=mesh_of(degrees), params=params, max_grad_norm=0.5
    )


@pytest.mark.parametrize(("method", "ranks"), [("gather", 2), ("ulysses", 4), ("ring", 4), ((2, "ring"), 4)])
def test_positions_and_masks_that_come_with_the_batch_are_split(method, ranks):
    """Without leave to communicate: all that is sent along the axis is attention's."""
    plan = ax.Plan(context=ax.Context(method=method, allow_communication=False))
    batches = [batch_given(seed) for seed in range(2)]
    mesh = mesh_of({"context": ranks})
    assert_equals_single_device(Given(), labelled, batches, plan, mesh=mesh, max_grad_norm=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "method"), [(Flax, "gather"), (Flax, "ring"), (Padded, "ring")])
def test_positions_that_do_not_divide_over_the_ranks_are_split_and_padded(make, method):
    """In 32 bits, as XLA's partitioner ends the process over 64-bit indices in uneven parts."""
    with jax.enable_x64(False):
        model, tokens = make(), batch_of(0).astype(np.int32)
        params = model.init(jax.random.key(0), tokens) if isinstance(model, nn.Module) else None
        loss = without_last if make is Flax else lambda model, tokens: pooled(lambda x: model(x[:, :-3]), tokens)
        plainly = loss if params is None else lambda params: loss(lambda x: model.apply(params, x), tokens)
        want, grads = jax.value_and_grad(plainly)(params) if params else nnx.value_and_grad(loss)(make(), tokens)
        given = {"params": params} if params else {}
        whole = ax.ContextParallel(model, mesh_of({"context": 4}), method=method, **given)
        trainer = whole.trainer(optax.sgd(0.1), loss)
        metrics = trainer.step(tokens)
        assert metrics["loss"] == pytest.approx(float(want), rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
        traffic = whole.context_traffic(trainer, tokens)
        assert traffic.bytes(traffic.attention) > traffic.bytes(traffic.others)


@pytest.mark.slow
def test_masks_of_dropout_are_those_of_one_device():
    """Those of the weights and of activations; one rank of rows, so that one device draws the same keys."""
    runs = []
    for degrees in ({"context": 4}, {"data": 1}):
        trainer = ax.parallelize(Flax(rate=0.3), mesh_of(degrees), ax.Plan()).trainer(optax.sgd(0.1), shifted)
        runs.append([float(trainer.step(batch_of(seed))["loss"]) for seed in range(3)])
    np.testing.assert_allclose(*runs, rtol=1e-6)


@pytest.mark.parametrize(("method", "kind"), [("gather", "all_gather"), ("ring", "permute"), ("ulysses", "all_to_all")])
def test_attention_is_sent_by_the_method_of_the_plan(method, kind):
    model = ax.parallelize(Written(), mesh_of({"context": 2}), ax.Plan(context=ax.Context(method=method)))
    trainer = model.trainer(optax.sgd(0.1), shifted)
    found = [entry for entry in collectives_in(trainer.trace(batch_of(0)).jaxpr) if entry.axes == ("context",)]
    assert kind in {entry.kind for entry in found} and all(entry.in_loop for entry in found)


def test_what_a_step_sends_along_the_axis_is_listed():
    model = ax.ContextParallel(Flax(), mesh_of({"context": 4}), method="gather")
    traffic = model.context_traffic(model.trainer(optax.sgd(0.1), shifted), batch_of(0))
    kv = 2 * ROWS * LENGTH * WIDTH * 4  # bytes of all keys and values; gathered twice, their gradients scattered once
    gathered = [each for each in traffic.attention if each.kind == "all_gather"]
    assert traffic.bytes(gathered) in (kv * 3 / 4, 2 * kv * 3 / 4)  # XLA may keep what the forward gathered
    assert 0 < traffic.bytes(traffic.others) < traffic.bytes(traffic.attention)
    assert "attention" in str(traffic) and "jvp" in str(traffic)
    with pytest.raises(ValueError, match="allow_communication=-1 must be"):
        ax.Context(allow_communication=-1)


@pytest.mark.slow
def test_calls_and_evaluation_are_those_of_one_device():
    results = []
    for degrees in ({"data": 2, "context": 2}, {"data": 1}):
        model = ax.parallelize(Written(), mesh_of(degrees), ax.Plan())
        trainer = model.trainer(optax.sgd(0.1), shifted)
        trainer.step(batch_of(1))
        results.append((model(batch_of(0)), trainer.evaluate(batch_of(0))["loss"]))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


class Convolved(nnx.Module):
    """A convolution over time and no attention."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs, **FLAX)
        self.over_time = nnx.Conv(WIDTH, WIDTH, (5,), padding="CAUSAL", rngs=rngs, **FLAX)

    def __call__(self, tokens):
        return self.table.attend(jnp.tanh(self.over_time(self.table(tokens))))


class Mixed(Convolved):
    """Token mixing: a weight over positions."""

    def __init__(self):
        super().__init__()
        self.over_time = nnx.Linear(LENGTH, LENGTH, rngs=nnx.Rngs(1), **FLAX)

    def __call__(self, tokens):
        x = self.table(tokens)
        return self.table.attend(x + self.over_time(x.swapaxes(1, 2)).swapaxes(1, 2))


class Scanned(Convolved):
    """A scan over positions, as of Mamba."""

    def __call__(self, tokens):
        step = lambda h, x: (0.9 * h + x,) * 2
        x = self.table(tokens)
        return self.table.attend(x + jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1))


@pytest.mark.parametrize("make", [Convolved, Mixed, Scanned])
def test_what_else_goes_across_positions_is_refused_by_name_and_right_when_allowed(make):
    mesh = mesh_of({"context": 4})
    trainer = ax.parallelize(make(), mesh, ax.Plan()).trainer(optax.sgd(0.1), shifted)
    place = "conv_general_dilated" if make is Convolved else "bytes, by"
    with pytest.raises(
        ValueError, match=rf"(?s)across positions, more than the 0 that are allowed.*{place}.*allow_communication=True"
    ):
        trainer.step(batch_of(0))
    plan = ax.Plan(context=ax.Context(allow_communication=True))
    assert_equals_single_device(make(), shifted, [batch_of(0)], plan, mesh=mesh, steps=2)


def test_what_does_not_go_together_is_refused():
    tokens = batch_of(0)
    odd = ax.parallelize(Written(), mesh_of({"context": 3}), ax.Plan()).trainer(optax.sgd(0.1), shifted)
    with pytest.raises(ValueError, match=r"no leaf's positions divide over \['context'\] \(3 ranks\)"):
        odd.step(tokens)
    for context in ({"sees": "own"}, {"order": "zigzag"}, {"shard": True}):
        degrees = {"fsdp": 2, "context": 2}
        with pytest.raises(ValueError, match="splits_positions = True"):
            ax.parallelize(Written(), mesh_of(degrees), ax.Plan(context=ax.Context(**context)))
    with pytest.raises(ValueError, match=r"context is left to XLA's partitioner.*with check_vma=True: leave that out"):
        ax.parallelize(Written(), mesh_of({"context": 2}), ax.Plan(check_vma=True))
    with pytest.raises(ValueError, match="order='striped' reorders positions"):
        ax.Context(sees="whole", order="striped")


@pytest.mark.parametrize("degrees", [{"context": 4}, {"data": 2, "context": 2}, {"context": 2, "tensor": 1}], ids=str)
def test_metrics_by_position_are_those_of_one_device_on_any_number_of_batch_shards(degrees):
    def loss_fn(model, tokens):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:])
        return losses.mean(), {"by_position": losses.mean(0), "tokens": tokens.mean(0)}

    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH))
    trainer = ax.ContextParallel(Flax(), mesh_of(**degrees)).trainer(optax.sgd(0.1), loss_fn)
    _, plain = loss_fn(Flax(), tokens)
    for found in (trainer.evaluate(tokens), trainer.step(tokens)):
        for name, want in plain.items():
            np.testing.assert_allclose(found[name], want, rtol=1e-5)
