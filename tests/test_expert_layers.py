"""A mixture-of-experts layer on one device is what its router's definition says; what cannot be is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_models import EXPERTS, F64, INNER, ROUTERS, WIDTH, make_moe
from flax import nnx

import axonml_jax as ax
from axonml_jax.layers.dispatch import (
    Dispatch,
    ExpertWeights,
    Sorted,
    activated,
    block_products,
    capacity_of,
    little_products,
    ragged_products,
)
from axonml_jax.models.config import preset


def tokens(rows=3, length=4, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, length, WIDTH)))


def chosen_by_hand(router, scores, bias):
    """Experts and gates of one token, by loops."""
    if isinstance(router, ax.SoftmaxRouter):
        weights = np.exp(scores - scores.max())
        weights = by = weights / weights.sum()
    else:
        weights = 1 / (1 + np.exp(-scores))
        by = weights + bias
        size = len(by) // router.groups
        best = [np.sort(by[g * size : (g + 1) * size])[::-1][:2].sum() for g in range(router.groups)]
        kept = sorted(range(router.groups), key=lambda g: -best[g])[: router.top_groups]
        by = np.array([by[e] if e // size in kept else -np.inf for e in range(len(by))])
    order = sorted(range(len(by)), key=lambda e: (-by[e], e))[: router.top_k]
    gates = weights[order] / (weights[order].sum() if router.renormalize else 1)
    return order, gates * getattr(router, "scale", 1.0)


def layer_by_hand(layer, x, mask):
    """Outputs, counts and both auxiliary values, token by token."""
    kernel, bias = np.asarray(layer.router.kernel[...]), layer.router.bias
    scores = np.asarray(x) @ kernel + (0 if bias is None else np.asarray(bias[...]))
    learned = 0 if layer.bias is None else np.asarray(layer.bias[...])
    y, counts, total, tops, z = np.zeros(x.shape), np.zeros(EXPERTS), np.zeros(EXPERTS), 0, 0.0
    of = lambda name, e: None if getattr(layer, name) is None else getattr(layer, name)[e]
    plus = lambda name, e, value: value if getattr(layer, name) is None else value + of(name, e)
    for at in zip(*np.nonzero(np.asarray(mask)), strict=True):
        experts, gates = chosen_by_hand(layer.choose, scores[at], learned)
        soft = isinstance(layer.choose, ax.SoftmaxRouter)
        p = np.exp(scores[at]) if soft else 1 / (1 + np.exp(-scores[at]))
        total, tops, z = total + p / p.sum(), tops + 1, z + np.log(np.exp(scores[at]).sum()) ** 2
        for e, g in zip(experts, gates, strict=True):
            counts[e] += 1
            gate = None if layer.gate is None else plus("gate_bias", e, x[at] @ of("gate", e))
            inner = activated(layer.activation, gate, plus("up_bias", e, x[at] @ of("up", e)))
            y[at] += g * np.asarray(plus("down_bias", e, inner @ of("down", e)))
    balance = EXPERTS / layer.choose.top_k * (counts * total).sum() / tops**2
    return y, counts, balance, z / tops


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu"])
def test_a_layer_is_its_definition(name, activation):
    biased = activation != "swiglu"
    layer = make_moe(
        nnx.Rngs(3),
        name,
        activation=activation,
        use_bias=biased,
        router_bias=biased,
        bias_init=nnx.initializers.normal(),
    )
    if layer.bias is not None:
        layer.bias[...] = jnp.linspace(-0.5, 0.5, EXPERTS, dtype=jnp.float32)
    x, mask = tokens(), np.random.default_rng(1).random((3, 4)) > 0.3
    y, router = jax.jit(lambda m, x: m(x, mask))(layer, x)
    wanted, counts, balance, z = layer_by_hand(layer, x, mask)
    np.testing.assert_allclose(y, wanted, atol=1e-12)
    np.testing.assert_array_equal(router.counts, counts)
    np.testing.assert_allclose([router.load_balance, router.z], [balance, z], rtol=1e-12)
    assert router.dropped == 0 and router.rounds == 1


def dense(layer, x):
    """A layer's definition, every expert of every token: JAX differentiates it, with no rule of the library's."""
    x = x.reshape(-1, WIDTH)
    bias = None if layer.bias is None else layer.bias[...]
    chosen = layer.choose.choose(x @ layer.router.kernel[...], bias)
    share = (jax.nn.one_hot(chosen.experts, EXPERTS) * chosen.gates[:, :, None]).sum(1)
    gate, up = (jnp.einsum("tw,ewi->tei", x, getattr(layer, name)[...]) for name in ("gate", "up"))
    return jnp.einsum("te,tei,eiw->tw", share, jax.nn.silu(gate) * up, layer.down[...])


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_a_layers_gradients_are_those_of_its_definition(name):
    layer = make_moe(nnx.Rngs(3), name)
    graph, params, others = nnx.split(layer, nnx.Param, ...)
    loss = lambda way: (
        lambda params, x: jnp.sin(way(nnx.merge(graph, params, others, copy=True), x).reshape(-1, WIDTH)).sum()
    )
    both = [jax.grad(loss(way), argnums=(0, 1)) for way in (lambda layer, x: layer(x)[0], dense)]
    found, wanted = jax.jit(lambda params, x: [grads(params, x) for grads in both])(params, tokens())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, wanted)


def test_equal_scores_go_to_the_lowest_index():
    for router in (ax.SoftmaxRouter(top_k=3), ax.SigmoidRouter(top_k=3)):
        choice = router.choose(jnp.zeros((2, 6)))
        assert choice.experts.tolist() == [[0, 1, 2]] * 2
        np.testing.assert_allclose(choice.gates, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("router", [ax.SoftmaxRouter, ax.SigmoidRouter])
def test_noise_counts_for_the_choice_by_its_factor_and_not_for_gates(router):
    scores, draw = (np.random.default_rng(seed).normal(size=(64, 6)) for seed in range(2))
    choice = router(top_k=2, noise=0.3, renormalize=False).choose(jnp.asarray(scores), None, jnp.asarray(draw))
    own = 1 / (1 + np.exp(-scores)) if router is ax.SigmoidRouter else scores
    wanted = np.argsort(-(own + 0.3 * draw), axis=1)[:, :2]
    np.testing.assert_array_equal(choice.experts, wanted)
    for factor in (0, 1):
        assert (np.argsort(-(own + factor * draw), axis=1)[:, :2] != wanted).any()
    if router is ax.SoftmaxRouter:
        own = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(choice.gates, np.take_along_axis(own, wanted, 1), rtol=1e-12)


@pytest.mark.slow
def test_balanced_routing_has_a_load_balance_of_one():
    layer = make_moe(nnx.Rngs(0), "switch")
    layer.router.kernel[...] = jnp.eye(WIDTH, EXPERTS, dtype=F64) * 50
    x = jnp.eye(WIDTH, dtype=F64)[None]  # six tokens, each to its own expert, of eight
    assert layer(x)[1].load_balance == pytest.approx(EXPERTS / WIDTH)


@pytest.mark.slow
def test_noise_is_drawn_in_train_mode_alone():
    layer = make_moe(nnx.Rngs(0, routing=1), ax.SoftmaxRouter(top_k=1, noise=5.0))
    x = tokens(8, 8)
    first, again = layer(x)[1].counts, layer(x)[1].counts
    assert first.tolist() != again.tolist()
    layer.eval()
    assert layer(x)[1].counts.tolist() == layer(x)[1].counts.tolist()


@pytest.mark.slow
def test_the_selection_bias_follows_the_counts_of_train_mode():
    layer = make_moe(nnx.Rngs(0), "sigmoid")
    x = tokens(4, 8)
    counts = sum(np.asarray(layer(x * (i + 1))[1].counts) for i in range(2))
    layer.eval()
    layer(x)
    assert layer.counts[...].tolist() == counts.tolist()
    layer.after_update()
    np.testing.assert_allclose(layer.bias[...], 0.05 * np.sign(counts.mean() - counts), rtol=1e-6)
    assert not layer.counts[...].any()


def kept_by_hand(layer, x, groups):
    """Which tokens find a slot: of each group and expert the first ones."""
    (rows, length, _), kept = x.shape, {}
    scores = np.asarray(x) @ np.asarray(layer.router.kernel[...])
    capacity = capacity_of(rows * length // (groups[0] * groups[1]), layer.choose.top_k, EXPERTS, layer.capacity_factor)
    used = {}
    for b in range(rows):
        for s in range(length):
            experts, _ = chosen_by_hand(layer.choose, scores[b, s], 0)
            group = b // (rows // groups[0]), s // (length // groups[1])
            for e in experts:
                used[group, e] = used.get((group, e), 0) + 1
                kept[b, s, e] = used[group, e] <= capacity
    return kept


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (2, 2)])
def test_capacity_drops_the_latest_tokens_of_each_group(groups):
    layer = make_moe(nnx.Rngs(0), "softmax", capacity_factor=0.7, groups=groups)
    whole = make_moe(nnx.Rngs(0), "softmax")
    x = tokens(4, 6)
    y, router = layer(x)
    kept = kept_by_hand(layer, x, groups)
    share = 1 - sum(kept.values()) / len(kept)
    assert 0 < share < 0.6 and router.dropped == pytest.approx(share)
    scores = np.asarray(x) @ np.asarray(layer.router.kernel[...])
    for b, s in np.ndindex(4, 6):
        experts, gates = chosen_by_hand(layer.choose, scores[b, s], 0)
        out = sum(
            g * activated("swiglu", x[b, s] @ whole.gate[e], x[b, s] @ whole.up[e]) @ whole.down[e]
            for e, g in zip(experts, gates, strict=True)
            if kept[b, s, e]
        )
        np.testing.assert_allclose(y[b, s], out, atol=1e-12)


def test_evaluation_drops_no_token():
    layer, whole = make_moe(nnx.Rngs(0), "softmax", capacity_factor=0.3), make_moe(nnx.Rngs(0), "softmax")
    layer.eval()
    y, router = layer(tokens(4, 6))
    np.testing.assert_array_equal(y, whole(tokens(4, 6))[0])
    assert router.dropped == 0


@pytest.mark.slow
@pytest.mark.parametrize("shared_size", [0, 8])
def test_what_stands_where_padding_is_does_not_matter(shared_size):
    layer = make_moe(nnx.Rngs(0), "sigmoid", shared_size=shared_size)
    mask = np.random.default_rng(0).random((3, 4)) > 0.4
    loss = lambda layer, x: (lambda y, r: jnp.where(mask[..., None], y, 0).sum() + r.load_balance + r.z)(
        *layer(x, mask)
    )
    found = [
        nnx.value_and_grad(loss)(layer, jnp.where(mask[..., None], tokens(), other))
        for other in (0.0, 7.0, jnp.inf, jnp.nan)
    ]
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])


LOADS = ([10, 0, 37, 3], [50, 0, 0, 0], [0, 0, 0, 0], [12, 13, 12, 13], [20, 3, 25, 1])


@pytest.mark.parametrize("biased", [False, True])
def test_all_products_agree_at_every_load(biased):
    rng, count, rows = np.random.default_rng(0), 4, 50
    r = lambda *shape: jnp.asarray(rng.normal(size=shape))
    biases = (r(count, INNER), r(count, INNER), r(count, WIDTH)) if biased else ()
    weights = ExpertWeights(r(count, WIDTH, INNER), r(count, WIDTH, INNER), r(count, INNER, WIDTH), *biases)
    x, shuffled = r(rows, WIDTH), rng.permutation(rows)
    back = np.argsort(shuffled)

    @jax.jit
    def results(counts):
        real = (jnp.arange(rows) < counts.sum())[:, None]
        order = Sorted(
            jnp.asarray(shuffled, jnp.int32), jnp.where(back < counts.sum(), back, 99).astype(jnp.int32), counts
        )
        ways = [
            lambda x, w: ragged_products("swiglu", x, counts, w),
            lambda x, w: little_products("swiglu", x[back], order, w)[shuffled],
            lambda x, w: block_products("swiglu", (16,), x[back], order, w)[shuffled],
            lambda x, w: block_products("swiglu", (4, 8, 12, 16), x[back], order, w)[shuffled],
        ]
        loss = lambda way: lambda x, w: jnp.where(real, jnp.sin(way(x, w)), 0).sum()
        return [jax.value_and_grad(loss(way), argnums=(0, 1))(x, weights) for way in ways]

    for load in LOADS:
        first, *others = results(jnp.asarray(load, jnp.int32))
        for other in others:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-12), first, other)


def test_on_gpus_experts_multiply_in_few_shapes(monkeypatch):
    """XLA:GPU tries kernels for every shape of a product: a layer and its gradient are built once per shape there."""
    x, products = jax.ShapeDtypeStruct((2, 512, 64), jnp.float32), {}
    for platform in ("cpu", "cuda"):
        monkeypatch.setattr("axonml_jax.layers.dispatch.target_platform", lambda platform=platform: platform)
        layer = nnx.eval_shape(lambda: ax.ParallelMoE(64, 128, 8, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(layer)
        loss = lambda state, x, graph=graph: nnx.merge(graph, state, copy=True)(x)[0].sum()
        program = str(jax.make_jaxpr(jax.grad(loss))(state, x))
        products[platform] = re.findall(r"(\w+\[[\d,]*\]) = dot_general\[", program)
    assert len(products["cuda"]) <= 12 < 60 < len(products["cpu"])  # 3 and 6 products of a block; the router's
    assert len(set(products["cuda"])) <= 8


REFUSED = {
    "too many of too few": ({"router": ax.SoftmaxRouter(top_k=9)}, "top_k=9 of 8 experts"),
    "groups": ({"router": ax.SigmoidRouter(top_k=2, groups=3)}, "8 experts do not divide into groups=3"),
    "too many of a group": ({"router": ax.SigmoidRouter(top_k=3, groups=4)}, "top_k=3 of 2 experts"),
    "activation": ({"activation": "relu"}, "activation='relu' must be one of swiglu"),
    "dispatch": ({"dispatch": "mail"}, "dispatch='mail' must be one of auto"),
    "capacity": ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be positive"),
    "endless capacity": ({"capacity_factor": float("inf")}, "capacity_factor=inf must be positive and finite, or None"),
    "groups without capacity": ({"groups": 2}, "parts with a capacity of their own: give capacity_factor"),
    "clamped, shared": ({"activation": "clamped_swiglu", "shared_size": 4}, "has no shared expert"),
    "capacity, gathered": ({"capacity_factor": 1.0, "dispatch": "gather"}, "layers that drop no token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    options, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        make_moe(nnx.Rngs(0), options.pop("router", "softmax"), **options)


def test_a_router_by_name_is_refused():
    with pytest.raises(ValueError, match=r"router='sigmoid' must be an ax.SoftmaxRouter"):
        ax.ParallelMoE(4, 8, 4, router="sigmoid", rngs=nnx.Rngs(0))


def test_routers_refuse_what_cannot_be():
    for make, said in (
        (lambda: ax.SoftmaxRouter(top_k=0), "top_k=0 must be at least 1"),
        (lambda: ax.SoftmaxRouter(noise=-1.0), "noise=-1.0"),
        (lambda: ax.SigmoidRouter(groups=2, top_groups=3), "top_groups=3 must be between 1 and groups=2"),
        (lambda: ax.SigmoidRouter(scale=0.0), "scale=0.0 must be positive"),
    ):
        with pytest.raises(ValueError, match=said):
            make()


@pytest.mark.slow
def test_what_the_platform_lacks_is_refused_by_name_where_anything_travels():
    sizes = {"experts": 4, "tokens": 8, "top_k": 2, "width": 4, "capacity": None}
    with pytest.raises(ValueError, match="no ragged all-to-all for cpu: use 'rounds'"):
        Dispatch.of("ragged", ranks=2, **sizes)
    outputs = [make_moe(nnx.Rngs(0), dispatch=name)(tokens())[0] for name in ("ragged", "rounds", "gather")]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_allclose(outputs[0], outputs[2], atol=1e-12)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide into groups"):
        make_moe(nnx.Rngs(0), capacity_factor=1.0, groups=5)(tokens())


def test_mixtral_has_its_published_numbers_of_parameters():
    assert preset("mixtral-8x7b").num_params == 46_702_792_704
    assert preset("mixtral-8x7b").active_params == 12_879_925_248
