"""Vocabulary-parallel embedding, its tied output layer and the loss on split logits equal the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from tensor_cases import EMBED, LINEAR, WHOLE, P, assert_equals_one_device, make_mesh, normal

from axonml_jax.collectives.primitives import degree
from axonml_jax.layers.linear import VocabParallelEmbedding
from axonml_jax.layers.losses import chunked_cross_entropy, vocab_parallel_cross_entropy
from axonml_jax.ledger.count import collectives_in
from axonml_jax.models.transformer import cross_entropy

# (ranks, leading dims of the ids, label smoothing, check_vma)
CASES = [(1, 1, 0.0, True), (2, 2, 0.1, True), (2, 1, 0.0, False), (4, 3, 0.0, True), (4, 2, 0.1, False)]
IDS = [f"{n}ranks-{lead}d-smooth{e}-{'vma' if vma else 'novma'}" for n, lead, e, vma in CASES]
SHAPES = {1: (6,), 2: (2, 3), 3: (2, 1, 3)}


class Tied(nnx.Module):
    """Embedding, a layer of its own width, the tied head and the loss."""

    def __init__(self, smoothing):
        self.embed = VocabParallelEmbedding(8, 4, **EMBED, rngs=nnx.Rngs(0))
        self.mix = nnx.Linear(4, 4, **LINEAR, rngs=nnx.Rngs(1))
        self.smoothing = smoothing

    def __call__(self, ids):
        embedded = self.embed(ids)
        logits = self.embed.attend(jnp.tanh(self.mix(embedded)))
        loss = vocab_parallel_cross_entropy(
            logits, jnp.roll(ids, 1) % 8, label_smoothing=self.smoothing, ignore_label=0
        )
        return {"embedded": embedded, "logits": logits, "loss": loss}


@pytest.mark.parametrize(("ranks", "lead", "smoothing", "check_vma"), CASES, ids=IDS)
def test_a_tied_model_and_its_loss_equal_one_device(ranks, lead, smoothing, check_vma):
    ids = np.random.default_rng(2).integers(-8, 8, SHAPES[lead])  # negative ids count from the end
    specs = {"embedded": P(), "logits": P(*[None] * lead, "tensor"), "loss": P()}
    assert_equals_one_device(Tied(smoothing), jnp.asarray(ids), {"tensor": ranks}, y_spec=specs, check_vma=check_vma)


def on_mesh(fn, ranks, in_specs, out_specs=WHOLE, check_vma=True):
    mesh = make_mesh(tensor=ranks)
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def test_outside_a_mesh_they_are_flax_and_the_reference_loss():
    ours, flax = (kind(8, 4, **EMBED, rngs=nnx.Rngs(0)) for kind in (VocabParallelEmbedding, nnx.Embed))
    ids, query = jnp.array([[0, 7, -1]]), jnp.ones((2, 4))
    np.testing.assert_array_equal(ours(ids), flax(ids))
    # Flax multiplies by the transposed table: the same sum, whose last bit depends on the processor.
    np.testing.assert_allclose(ours.attend(query), flax.attend(query), rtol=1e-12)
    logits, targets = normal(5, 8) * 30, jnp.array([0, 7, 3, -100, 2])
    losses = vocab_parallel_cross_entropy(logits, targets, ignore_label=-100)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None] % 8, axis=1)[:, 0]
    np.testing.assert_allclose(losses, jnp.where(targets == -100, 0, -chosen), rtol=1e-12)
    smooth = vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.2)
    log_p = jax.nn.log_softmax(logits)
    soft = 0.8 * jax.nn.one_hot(targets, 8) + 0.2 / 8
    np.testing.assert_allclose(smooth[:3], -(soft * log_p).sum(-1)[:3], rtol=1e-12)


def test_ids_of_padding_give_nan_and_negative_ones_count_from_the_last_word():
    layer = VocabParallelEmbedding(7, 4, pads=True, rngs=nnx.Rngs(0))
    ids, table = jnp.array([0, 6, 7, -1, -7, -8]), layer.embedding[...]
    padded = jnp.pad(table, [(0, 1), (0, 0)])
    got = on_mesh(lambda table, ids: layer_with(layer, table)(ids), 4, (P("tensor"), P()))(padded, ids)
    np.testing.assert_array_equal(got, layer(ids))
    assert np.isnan(got[2]).all() and np.isnan(got[5]).all()
    joined = VocabParallelEmbedding(7, 4, pads=True, gather_output=True, rngs=nnx.Rngs(0))
    logits = on_mesh(lambda table, x: layer_with(joined, table).attend(x), 4, (P("tensor"), P()))(padded, table)
    np.testing.assert_allclose(logits, layer.attend(table), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"\(7, 4\) does not divide into \(4, 1\) parts .*pads=True"):
        plain = VocabParallelEmbedding(7, 4, rngs=nnx.Rngs(0))
        on_mesh(lambda table, ids: layer_with(plain, table)(ids), 4, (P("tensor"), P()))(padded, ids)


@pytest.mark.parametrize("vocabulary", [8, 1])
def test_ids_that_no_rank_holds_give_nan_as_in_flax(vocabulary):
    layer = VocabParallelEmbedding(vocabulary, 4, rngs=nnx.Rngs(0))
    ids = jnp.array([0, 7, 8, -9, -8], jnp.int8)
    got = on_mesh(lambda table, ids: layer_with(layer, table)(ids), 4 if vocabulary == 8 else 1, (P("tensor"), P()))(
        layer.embedding[...], ids
    )
    np.testing.assert_array_equal(got, layer(ids))
    with pytest.raises(ValueError, match="integers, not float"):
        on_mesh(lambda table: layer_with(layer, table)(jnp.zeros(3)), 1, (P("tensor"),))(layer.embedding[...])


VOCABULARY = 12
TARGETS = np.array([0, 11, -1, 5, -100, 3, 7, 3])


def plain_losses(logits, targets, smoothing=0.0, ignore=None):
    """By `log_softmax` alone, which JAX differentiates."""
    soft = (1 - smoothing) * jax.nn.one_hot(targets, VOCABULARY) + smoothing / VOCABULARY
    counted = (targets >= 0) & (targets != ignore)
    return jnp.where(counted, -jnp.sum(soft * jax.nn.log_softmax(logits), axis=-1), 0)


def losses_of(form, logits, targets, ignore=None, smoothing=0.0, words=None):
    """Of logits as they are (this rank's), or as a chunked loss makes them of a table that is the identity."""
    given = {"ignore_label": ignore, "words": words}
    if form == "whole":
        return vocab_parallel_cross_entropy(logits, targets, label_smoothing=smoothing, **given)
    table, ranks = jnp.eye(VOCABULARY), degree("tensor")
    if ranks > 1:
        own = VOCABULARY // ranks
        table = jax.lax.dynamic_slice_in_dim(table, jax.lax.axis_index("tensor") * own, own, 1)
    return chunked_cross_entropy(logits, table, targets, chunk=2, words_dim=1, **given)


def values_and_gradients(cases, ranks, logits):
    """Of every case (form, targets, options) the losses, and the gradient of a weighted sum of them by the logits."""

    def both(whole, split):
        found = []
        for form, targets, options in cases:
            fn = lambda x, form=form, targets=targets, options=options: losses_of(form, x, targets, **options)
            weighted = lambda x, fn=fn: jnp.sum(fn(x) * jnp.linspace(0.5, 2.0, len(x)))
            logits = split if form == "whole" else whole
            found.append((fn(logits), jax.grad(weighted)(logits)))
        return found

    if ranks == 1:
        return jax.jit(both)(logits, logits)
    split = P(None, "tensor")
    specs = [(P(), split if form == "whole" else P()) for form, _, _ in cases]
    return on_mesh(both, ranks, (P(), split), specs)(logits, logits)


@pytest.mark.parametrize("ranks", [1, 4])
def test_losses_and_gradients_are_those_of_log_softmax_and_negative_targets_are_ignored(ranks):
    large = np.where(np.arange(8) == 0, 200, TARGETS)  # what is ignored may lie beyond the vocabulary
    cases = [
        ("whole", TARGETS, {}), ("whole", TARGETS, {"smoothing": 0.3}), ("whole", large, {"smoothing": 0.1, "ignore": 200}),
        ("chunked", TARGETS, {"ignore": 3}), ("chunked", large, {"ignore": 200}),
    ]  # fmt: skip
    logits = normal(len(TARGETS), VOCABULARY) * 5
    for found, (_, targets, options) in zip(values_and_gradients(cases, ranks, logits), cases, strict=True):
        losses, vjp = jax.vjp(lambda x, t=targets, o=options: plain_losses(x, t, **o), logits)
        np.testing.assert_allclose(found[0], losses, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found[1], vjp(jnp.linspace(0.5, 2.0, len(targets)))[0], rtol=1e-12, atol=1e-14)
        total, weight = cross_entropy(logits, targets, options.get("ignore", -1))
        if "smoothing" not in options:
            np.testing.assert_allclose(total, losses.sum(), rtol=1e-12)
        assert weight == np.sum((targets >= 0) & (targets != options.get("ignore")))


def test_what_stands_for_no_word_counts_for_nothing():
    words, targets = 10, np.array([0, 9, -1, 5, 10, 3, 7, 11])  # of 12 places over 4 ranks the last two are padding
    logits = jnp.where(jnp.arange(VOCABULARY) < words, normal(len(targets), VOCABULARY) * 5, 1e3)
    cases = [("whole", targets, {"words": words, "smoothing": s}) for s in (0.0, 0.3)] + [
        ("chunked", targets, {"words": words})
    ]
    for found, (_, _, options) in zip(values_and_gradients(cases, 4, logits), cases, strict=True):
        smoothing, beyond = options.get("smoothing", 0.0), targets >= words

        def plain(x, smoothing=smoothing):
            soft = (1 - smoothing) * jax.nn.one_hot(targets, words) + smoothing / words
            return jnp.where(targets >= 0, -jnp.sum(soft * jax.nn.log_softmax(x[:, :words]), axis=-1), 0)

        losses, vjp = jax.vjp(plain, logits)
        np.testing.assert_array_equal(np.isnan(found[0]), beyond)
        np.testing.assert_allclose(found[0][~beyond], losses[~beyond], rtol=1e-12, atol=1e-14)
        gradients = vjp(jnp.linspace(0.5, 2.0, len(targets)))[0]
        np.testing.assert_allclose(found[1][~beyond], gradients[~beyond], rtol=1e-12, atol=1e-14)
        assert not np.any(found[1][~beyond, words:])
    with pytest.raises(ValueError, match=r"words=5 over 4 ranks are blocks of 2, not of 3"):
        values_and_gradients([("whole", targets, {"words": 5})], 4, logits)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_target_beyond_the_vocabulary_is_nan_and_refused_where_it_is_known(ranks):
    logits = normal(4, VOCABULARY)
    ids = [np.array([3, 12, 0, 200], np.uint8), np.array([3, 12, -1, 2**31 - 1])]
    cases = [(form, each, {}) for form in ("whole", "chunked") for each in ids]
    traced = lambda logits, given: values_and_gradients(
        [(form, each, {}) for (form, _, _), each in zip(cases, given, strict=True)], ranks, logits
    )
    found = jax.jit(traced)(logits, [each for _, each, _ in cases])
    for (losses, grads), (form, each, _) in zip(found, cases, strict=True):
        lost = np.asarray(each >= VOCABULARY)
        np.testing.assert_array_equal(np.isnan(losses), lost)
        np.testing.assert_array_equal(np.isnan(grads).all(1), lost)
        np.testing.assert_array_equal(np.isnan(grads).any(1), lost)
        said = rf"2 of 4 targets lie beyond the vocabulary of 12, the largest is {each.max()}"
        with pytest.raises(ValueError, match=said):
            losses_of(form, logits, each)
        with pytest.raises(ValueError, match=said):
            cross_entropy(logits, each)


def test_large_targets_of_an_unsigned_type_do_not_turn_negative():
    with jax.enable_x64(False):
        losses = jax.jit(vocab_parallel_cross_entropy)(jnp.zeros((2, 4)), jnp.array([2**32 - 1, 1], jnp.uint32))
    assert np.isnan(losses[0]) and np.isfinite(losses[1])


def layer_with(layer, table):
    graphdef, _, rest = nnx.split(layer, nnx.Param, ...)
    return nnx.merge(graphdef, {"embedding": table}, rest, copy=True)


def test_logits_of_the_whole_vocabulary_exist_on_no_rank():
    """Nothing in the traced program, forward and backward, has a dim of the vocabulary's size."""
    vocabulary, ranks = 1024, 4
    layer = VocabParallelEmbedding(vocabulary, 8, rngs=nnx.Rngs(0))

    def per_rank(table, query, targets):
        def loss(table, query):
            logits = layer_with(layer, table).attend(query)
            return vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.1, ignore_label=3).sum()

        return jax.grad(loss, (0, 1))(table, query)

    mapped = on_mesh(per_rank, ranks, (P("tensor"), P(), P()), (P("tensor"), P()), check_vma=False)
    traced = mapped.trace(layer.embedding[...], jnp.ones((2, 6, 8)), jnp.ones((2, 6), int))
    (body,) = [eqn.params["jaxpr"] for eqn in traced.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    sizes = [max(shape) for shape in shapes_in(body) if shape]
    assert max(sizes) == vocabulary // ranks
    loss = [c for c in collectives_in(traced.jaxpr) if c.elements != 2 * 6 * 8]
    assert [(c.kind, c.op, c.elements) for c in loss] == [("all_reduce", "max", 12), ("all_reduce", "sum", 36)]


def shapes_in(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (var.aval.shape for var in eqn.outvars)
        for inner in jaxprs_in_params(eqn.params):
            yield from shapes_in(inner)


def test_what_is_kept_for_the_backward_is_the_logits_as_given_and_one_number_per_token():
    logits, targets = jnp.ones((64, 1000), jnp.bfloat16), jnp.zeros(64, int)
    _, vjp = jax.vjp(lambda x: vocab_parallel_cross_entropy(x, targets), logits)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert kept <= logits.nbytes + 64 * 16


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (jnp.zeros((3,), int), {}, r"logits of shape \(2, 8\) want integer targets of shape \(2,\)"),
        (jnp.zeros((2,)), {}, "not float64"),
        (jnp.zeros((2,), int), {"label_smoothing": 1.0}, "outside"),
    ],
)
def test_the_loss_refuses_what_does_not_fit(targets, options, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(jnp.zeros((2, 8)), targets, **options)
