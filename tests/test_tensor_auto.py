"""`auto_parallelize`: a Flax model's own layers are swapped in place, paired where that is right; results stay."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from ledger_steps import abstract_mesh
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.testing.equality import assert_equals_single_device

F64 = {"param_dtype": jnp.float64}


class Gated(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.up = nnx.Linear(8, 16, rngs=rngs, **F64), nnx.Linear(8, 16, rngs=rngs, **F64)
        self.down = nnx.Linear(16, 8, rngs=rngs, **F64)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Everything(nnx.Module):
    """One of every layer that is swapped, and some that are not."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(12, 8, rngs=rngs, **F64)
        self.norm = nnx.LayerNorm(8, rngs=rngs, **F64)
        self.mlp = Gated(rngs)
        self.einsum = nnx.Einsum("bsh,hnd->bsnd", (8, 4, 2), (4, 2), rngs=rngs, **F64)
        self.general = nnx.LinearGeneral((4, 2), 8, axis=(-2, -1), rngs=rngs, **F64)
        self.out = nnx.Einsum("bsnd,ndh->bsh", (4, 2, 8), (8,), rngs=rngs, **F64)
        self.conv = nnx.Conv(8, 4, (3,), rngs=rngs, **F64)
        self.head = nnx.Linear(4, 3, rngs=rngs, **F64)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.mlp(self.norm(x))
        heads = nnx.gelu(self.einsum(x))
        return self.head(self.conv(x + self.general(heads) + self.out(heads)))


def squares(model, batch):
    return jnp.mean(jnp.square(model(batch)))


IDS = np.arange(32).reshape(8, 4) % 12


@pytest.mark.parametrize("degrees", [{"data": 2, "tensor": 2}, {"data": 1, "row": 2, "col": 2, "depth": 2}])
@pytest.mark.slow
def test_every_layer_is_swapped_in_place_and_trains_as_on_one_device(degrees):
    model, mesh = Everything(nnx.Rngs(0)), mesh_of(**degrees)
    layers, wanted = {name: getattr(model, name) for name in ("embed", "einsum", "head")}, model(IDS)
    report = ax.auto_parallelize(model, mesh, example=IDS)
    assert all(getattr(model, name) is layer for name, layer in layers.items())
    assert isinstance(model.embed, nnx.Embed) and type(model.embed) is not nnx.Embed
    assert {"embed", "einsum", "general", "out", "conv", "mlp/up"} <= set(report.swapped)
    assert report.left["norm"] == "no layer that is split"
    np.testing.assert_array_equal(model(IDS), wanted)
    assert_equals_single_device(model, squares, IDS, mesh=mesh, tx=optax.adamw(1e-2), steps=1)


def test_the_report_says_what_was_paired_and_why_a_layer_was_left():
    report = ax.auto_parallelize(Everything(nnx.Rngs(0)), abstract_mesh(tensor=2), example=IDS)
    assert report.swapped["mlp/gate"] == report.swapped["mlp/up"] == "ColumnParallelLinear"
    assert report.swapped["mlp/down"] == report.swapped["head"] == "RowParallelLinear"
    text = str(report)
    assert "auto_parallelize over tensor=2: 9 of 10 layers" in text and "rows, takes a split input" in text
    how = {entry.path: entry.why for entry in report.entries}
    assert how["einsum"] == "letter n, output stays split" and how["out"] == "letter n, takes a split input"
    assert how["general"] == "rows, takes a split input"
    with pytest.warns(UserWarning, match="over tensor=5 has no effect: it left every layer:\n  conv: "):
        left = ax.auto_parallelize(Everything(nnx.Rngs(0)), abstract_mesh(tensor=5)).left
    assert left["head"] == "neither 4 input nor 3 output features divide over 5 ranks"
    assert left["embed"] == "12 num_embeddings do not divide over 5 ranks"
    assert "'bsh,hnd->bsnd'" in left["einsum"]


class Between(nnx.Module):
    """Two linear layers and a function between them."""

    def __init__(self, between, **layers):
        self.first, self.second = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
        self.between = between

    def __call__(self, x):
        return self.between(self, x)


# What a model does, and whether its layers may be paired.
DONE = {
    "gelu": (lambda m, x: m.second(jax.nn.gelu(m.first(x))), True),
    "where": (lambda m, x: m.second(jnp.where(m.first(x) > 0, 1.0, 0.5) * x[..., :1]), True),
    "jitted": (lambda m, x: m.second(jax.jit(lambda y: jax.checkpoint(jnp.tanh)(y) * 2)(m.first(x))), True),
    "norm": (lambda m, x: m.second(nnx.softmax(m.first(x))), False),
    "used twice": (lambda m, x: (m.second(m.first(x)), m.first(x).sum()), False),
    "per feature": (lambda m, x: m.second(m.first(x) * jnp.arange(8.0)), False),
    "a size off the shape": (lambda m, x: m.second((y := m.first(x)) / y.shape[-1]), False),
    "reshaped": (lambda m, x: m.second(m.first(x).reshape(-1, 8)), False),
    "two inputs": (lambda m, x: m.second(m.first(x)) + m.second(jnp.ones((2, 8))), False),
    "scanned": (lambda m, x: m.second(jax.lax.scan(lambda c, _: (c, c), m.first(x), None, 2)[1][0]), False),
}


@pytest.mark.parametrize("name", DONE)
def test_layers_are_paired_only_where_it_changes_nothing(name):
    between, paired = DONE[name]
    model = Between(between)
    report = ax.auto_parallelize(model, abstract_mesh(tensor=2), example=np.ones((2, 4), np.float32))
    assert set(report.swapped) == {"first", "second"}
    assert (report.swapped["second"] == "RowParallelLinear") is paired
    assert model.first.gather_output is not paired


def test_a_layer_whose_parameters_others_read_is_left():
    tied = Between(lambda m, x: m.second(m.first(x)) @ m.second.kernel[...].T)
    report = ax.auto_parallelize(tied, abstract_mesh(tensor=2), example=np.ones((2, 4), np.float32))
    assert report.left == {"second": "its parameters are read outside its own call"}
    shared = Between(lambda m, x: m.second(m.first(x)))
    shared.third = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    shared.third.kernel = shared.first.kernel
    assert set(ax.auto_parallelize(shared, abstract_mesh(tensor=2)).left) >= {"first", "third"}


class Attention(nnx.Module):
    """Heads by `LinearGeneral` and `Einsum`; how they are mixed is given."""

    def __init__(self, mix):
        rngs, self.mix = nnx.Rngs(0), mix
        self.query, self.key = (nnx.LinearGeneral(8, (4, 2), rngs=rngs) for _ in range(2))
        self.value, self.flat = nnx.Einsum("bsh,hnd->bsnd", (8, 4, 2), (4, 2), rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.out = nnx.LinearGeneral((4, 2), 8, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        x = self.mix(self, x)
        return self.down(nnx.relu(self.up(x)))


def flax_attention(m, x):
    mask = nnx.make_causal_mask(x[..., 0])
    return m.out(nnx.dot_product_attention(m.query(x), m.key(x), m.value(x), mask=mask))


def rotated(m, x):
    turn = lambda y: jnp.concatenate([-y[..., 1:], y[..., :1]], axis=-1) * jnp.cos(jnp.arange(4.0))[:, None, None]
    scores = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", turn(m.query(x)), turn(m.key(x))))
    return m.flat(jnp.einsum("bnqk,bknd->bqnd", scores, m.value(x)).reshape(*x.shape[:2], -1))


def by_configuration(m, x):
    return m.flat(nnx.dot_product_attention(m.query(x), m.key(x), m.value(x)).reshape(*x.shape[:2], 8))


def over_heads(m, x):
    return m.out(m.value(x) - m.value(x).mean(axis=2, keepdims=True))


# What mixes heads, and which of the projections stay split; besides, one of the last layers does.
MIXES = {
    flax_attention: {"query", "key", "value"},
    rotated: {"query", "key", "value"},
    by_configuration: set(),
    over_heads: set(),
}


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.__name__)
def test_attention_of_general_layers_stays_split_between_them(mix):
    model, x = Attention(mix), np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
    wanted = model(x)
    report = ax.auto_parallelize(model, abstract_mesh(tensor=2), example=x)
    stay = {entry.path for entry in report.entries if "output stays split" in entry.why}
    assert stay & {"query", "key", "value"} == MIXES[mix] and len(stay) == len(MIXES[mix]) + 1
    if mix is flax_attention:
        np.testing.assert_allclose(ax.parallelize(model, mesh_of(data=1, tensor=2))(x), wanted, atol=1e-5)


class Heads(nnx.Module):
    def __init__(self, **options):
        self.attention = nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[0], 4, x.shape[1], x.shape[1]), bool))
        return self.attention(x, mask=mask)


def test_attention_is_split_by_heads_and_otherwise_one_projection_at_a_time():
    model, mesh = Heads(), mesh_of(data=1, tensor=4)
    report = ax.auto_parallelize(model, mesh)
    assert report.swapped["attention"] == "SplitHeadsAttention"
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    np.testing.assert_allclose(ax.parallelize(model, mesh)(x), model(x), atol=1e-6)
    dropped = ax.auto_parallelize(Heads(dropout_rate=0.1), abstract_mesh(tensor=4))
    assert "one mask for all heads" in dropped.left["attention"] and "attention/query" in dropped.swapped


def test_the_context_swaps_what_its_own_thread_makes_and_is_gone_after_an_exception():
    seen = []
    with pytest.raises(RuntimeError, match="on purpose"), ax.auto_parallelize(abstract_mesh(tensor=2)) as report:
        inside = Heads()
        thread = threading.Thread(target=lambda: seen.append(type(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))))
        thread.start()
        thread.join()
        with (
            pytest.warns(UserWarning, match="tensor=4 has no effect: there was no layer"),
            ax.auto_parallelize(abstract_mesh(tensor=4)),
        ):
            pass
        linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        raise RuntimeError("on purpose")
    assert seen == [nnx.Linear] and type(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) is nnx.Linear
    assert isinstance(linear, ax.ColumnParallelLinear) and linear.gather_output
    assert list(report.swapped.values()) == ["SplitHeadsAttention", "ColumnParallelLinear"]
    assert ax.tensor_specs(inside, {"tensor": 2})["attention"]["out"]["kernel"][0] == "tensor"


@pytest.mark.slow
def test_a_model_of_another_package_equals_itself_on_one_device():
    """Mamba-2 of mamba2-jax: products of states between its layers, parameters of its convolution read elsewhere."""
    package = pytest.importorskip("mamba2_jax", reason="needs mamba2-jax (the extra `test`)")
    sizes = {"vocab_size": 12, "hidden_size": 8, "state_size": 4, "head_dim": 8, "num_hidden_layers": 1}
    config = package.Mamba2Config(**sizes, chunk_size=4, tie_word_embeddings=False)
    model, mesh = package.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), mesh_of(data=2, tensor=2)
    loss_fn = lambda model, ids: jnp.mean(jnp.square(model(ids)["logits"]))
    wanted, own = nnx.jit(nnx.value_and_grad(loss_fn))(model, IDS)
    report = ax.auto_parallelize(model, mesh, example=IDS)
    assert "read outside its own call" in report.left["backbone/layers/0/mixer/conv1d/conv"]
    split = ("backbone/embedder", "backbone/layers/0/mixer/in_proj", "backbone/layers/0/mixer/out_proj", "lm_head")
    assert set(report.swapped) == set(split)
    loss, grads = ax.parallelize(model, mesh).value_and_grad(loss_fn)(IDS)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, grads, nnx.to_pure_dict(own))


def test_what_cannot_be_split_over_is_refused():
    with pytest.raises(ValueError, match="no axis that splits layers"):
        ax.auto_parallelize(Heads(), abstract_mesh(data=2))
    with pytest.raises(TypeError, match=r"a Dense was given: a Linen module makes .* by rules, ax\.TensorParallel"):
        ax.auto_parallelize(linen.Dense(4), abstract_mesh(tensor=2))
    with pytest.raises(TypeError, match=r"an nnx\.Module, but a dict was given$"):
        ax.auto_parallelize({}, abstract_mesh(tensor=2))
    with pytest.raises(TypeError, match=r"give auto_parallelize\(model, mesh\)"):
        ax.auto_parallelize()
    with pytest.raises(TypeError, match="in a block there is no model yet"):
        ax.auto_parallelize(abstract_mesh(tensor=2), example=IDS)
