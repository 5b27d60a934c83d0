"""Losses of split logits tell parts from wholes: in models with swapped layers both are right, elsewhere wholes are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.collectives.gradients import gather_from, reduce_from
from axonml_jax.collectives.primitives import bound
from axonml_jax.compat.jaxpr import trace
from axonml_jax.layers.grid import ParallelLinear
from axonml_jax.layers.whole import marked_program
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program.values import differing
from axonml_jax.testing.equality import assert_equals_single_device

F64 = {"param_dtype": jnp.float64}
IDS = np.arange(8).reshape(2, 4) % 12
BOTH = pytest.mark.parametrize("check_vma", [False, True])
BOTH_RANKS = pytest.mark.parametrize(("check_vma", "ranks"), [(False, 2), (True, 4)])


class Words(nnx.Module):
    """A table, a norm and a head."""

    def __init__(self, head=nnx.Linear, embed=nnx.Embed, **options):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = embed(12, 8, rngs=rngs, **F64), nnx.LayerNorm(8, rngs=rngs, **F64)
        self.head = head(8, 12, rngs=rngs, use_bias=False, **options, **F64)

    def hidden(self, ids):
        return jnp.tanh(self.norm(self.embed(ids)))

    def __call__(self, ids):
        return self.head(self.hidden(ids))


def following(ids):
    return (ids * 5 + 1) % 12


def of_logits(read):
    return lambda model, ids: ax.vocab_parallel_cross_entropy(read(model, ids), following(ids)).mean()


def of_table(read, words_dim, chunk=2, **options):
    def loss(model, ids):
        table = read(model)
        x = model.hidden(ids).astype(table.dtype)
        losses = ax.chunked_cross_entropy(x, table, following(ids), words_dim=words_dim, chunk=chunk, **options)
        return losses.mean()

    return loss


@nnx.remat
def rerun(model, ids):
    return of_table(lambda model: model.head.kernel[...], 1)(model, ids)


def rows(model, ids):
    step = lambda _, row: (None, of_logits(lambda model, ids: model(ids))(model, row))
    return jax.lax.scan(step, None, ids)[1].mean()


LOSSES = {
    "the head's logits": of_logits(lambda model, ids: model(ids)),
    "the tied head's": of_logits(lambda model, ids: model.embed.attend(model.hidden(ids))),
    "a product of the table": of_logits(lambda model, ids: model.hidden(ids) @ model.embed.embedding[...].T),
    "cast and scaled": of_logits(lambda model, ids: model(ids).astype(jnp.float32) / 3),
    "smoothed, with ignored labels": lambda model, ids: ax.vocab_parallel_cross_entropy(
        model(ids), following(ids), label_smoothing=0.1, ignore_label=6
    ).mean(),
    "in a jit": lambda model, ids: jax.jit(lambda x: ax.vocab_parallel_cross_entropy(x, following(ids)))(
        model(ids)
    ).sum(),
    "row by row": rows,
    "a head's kernel": of_table(lambda model: model.head.kernel[...], 1),
    "a head's kernel, cast": of_table(lambda model: model.head.kernel[...].astype(jnp.float32), 1, 5),
    "a head's kernel, transposed": of_table(lambda model: model.head.kernel[...].T, 0),
    "a head's kernel, rematerialised": rerun,
    "a table": of_table(lambda model: model.embed.embedding[...], 0, ignore_label=6),
    "a table, transposed and cast": of_table(lambda model: model.embed.embedding[...].T.astype(jnp.float32), 1),
}


@pytest.mark.parametrize("name", LOSSES)
@BOTH_RANKS
def test_a_loss_of_a_swapped_model_is_that_of_one_device(name, check_vma, ranks):
    model, mesh = Words(), mesh_of(data=1, tensor=ranks)
    wanted, own = nnx.jit(nnx.value_and_grad(LOSSES[name]))(model, IDS)
    assert {"embed", "head"} <= ax.auto_parallelize(model, mesh).swapped.keys()
    loss, grads = ax.parallelize(model, mesh, ax.Plan(check_vma=check_vma)).value_and_grad(LOSSES[name])(IDS)
    loose = "cast" in name
    np.testing.assert_allclose(loss, wanted, rtol=1e-6 if loose else 1e-9)
    same = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 if loose else 1e-9)
    jax.tree.map(same, grads, nnx.to_pure_dict(own))


def test_a_table_that_nobody_else_reads_is_not_gathered():
    model, mesh = Words(), mesh_of(data=1, tensor=2)
    ax.auto_parallelize(model, mesh, exclude="embed")
    trainer = ax.parallelize(model, mesh).trainer(optax.sgd(0.1), LOSSES["a head's kernel"])
    assert "all_gather" not in str(trainer.trace(IDS).jaxpr)


GATHERING = {
    "a column": lambda: Words(ax.ColumnParallelLinear, ax.VocabParallelEmbedding, gather_output=True),
    "a plain head": lambda: Words(embed=ax.VocabParallelEmbedding),
}


@pytest.mark.parametrize("name", GATHERING)
@pytest.mark.parametrize("loss", ["the head's logits", "cast and scaled", "in a jit", "row by row"])
@BOTH_RANKS
def test_whole_logits_of_layers_written_by_hand_are_refused(name, loss, check_vma, ranks):
    spread = ax.parallelize(GATHERING[name](), mesh_of(data=1, tensor=ranks), ax.Plan(check_vma=check_vma))
    with pytest.raises(
        ValueError, match=r"own part of the logits, but this float\d\d\[.*12\] is the same.*gather_output"
    ):
        spread.value_and_grad(LOSSES[loss])(IDS)


@BOTH
def test_a_whole_table_of_a_plain_head_is_refused(check_vma):
    spread = ax.parallelize(GATHERING["a plain head"](), mesh_of(data=1, tensor=2), ax.Plan(check_vma=check_vma))
    for name in ("a head's kernel", "a head's kernel, transposed", "a head's kernel, cast"):
        with pytest.raises(ValueError, match="own part of the table"):
            spread.value_and_grad(LOSSES[name])(IDS)


SPLIT = [name for name in LOSSES if "product" not in name]


@pytest.mark.parametrize("name", SPLIT)
@BOTH
def test_parts_of_layers_written_by_hand_are_taken_as_before(name, check_vma):
    model = Words(ax.ColumnParallelLinear, ax.VocabParallelEmbedding)
    wanted = nnx.jit(LOSSES[name])(model, IDS)
    spread = ax.parallelize(model, mesh_of(data=1, tensor=2), ax.Plan(check_vma=check_vma))
    np.testing.assert_allclose(spread.value_and_grad(LOSSES[name])(IDS)[0], wanted, rtol=1e-6)


@BOTH
def test_whole_logits_under_vmap_or_in_a_branch_of_a_swapped_model_are_refused(check_vma):
    one = lambda logits, ids: ax.vocab_parallel_cross_entropy(logits, following(ids))
    mapped = lambda model, ids: jax.vmap(one, in_axes=1)(model(ids), ids).mean()
    branch = lambda model, ids: jax.lax.cond(ids[0, 0] > 0, one, lambda x, y: one(2 * x, y), model(ids), ids).mean()
    model, mesh = Words(), mesh_of(data=1, tensor=2)
    ax.auto_parallelize(model, mesh)
    for loss in (mapped, branch):
        with pytest.raises(ValueError, match="own part of the logits"):
            ax.parallelize(model, mesh, ax.Plan(check_vma=check_vma)).value_and_grad(loss)(IDS)


def test_in_typed_mode_whole_logits_are_refused_in_a_shard_map_of_ones_own():
    fn = lambda logits: ax.vocab_parallel_cross_entropy(logits, jnp.zeros(2, int))
    mapped = lambda spec: jax.shard_map(fn, mesh=mesh_of(tensor=2), in_specs=spec, out_specs=P())
    assert mapped(P(None, "tensor"))(jnp.zeros((2, 8))).shape == (2,)
    with pytest.raises(ValueError, match="is the same on every rank of"):
        mapped(P())(jnp.zeros((2, 8)))


PROGRAMS = {
    "a sum": (lambda own, whole: jax.lax.psum(own, "tensor"), False),
    "a maximum": (lambda own, whole: jax.lax.pmax(own, "tensor"), False),
    "a gather": (lambda own, whole: jax.lax.all_gather(own, "tensor"), False),
    "a scattered sum": (lambda own, whole: jax.lax.psum_scatter(whole, "tensor", tiled=True), True),
    "a part": (lambda own, whole: own * whole, True),
    "a whole": (lambda own, whole: jnp.sin(whole), False),
    "an index": (lambda own, whole: whole + jax.lax.axis_index("tensor"), True),
    "a barrier": (lambda own, whole: jax.lax.optimization_barrier((own, whole))[1], False),
    "a scan": (lambda own, whole: jax.lax.scan(lambda c, _: ((c[1], c[2], own), 0), (whole,) * 3, None, 5)[0][0], True),
    "a scan's whole": (lambda own, whole: jax.lax.scan(lambda c, x: (c * x, own), whole, whole)[0], False),
    "a while's end": (
        lambda own, whole: jax.lax.while_loop(lambda x: x.sum() < own.sum(), lambda x: x + 1, whole),
        True,
    ),
    "a while": (lambda own, whole: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, whole), False),
    "a branch": (lambda own, whole: jax.lax.cond(whole[0] > 0, lambda: own, lambda: whole), True),
    "a choice": (lambda own, whole: jax.lax.cond(own[0] > 0, lambda: whole, lambda: 2 * whole), True),
    "remat": (lambda own, whole: jax.checkpoint(lambda x: jax.lax.psum(x * own, "tensor"))(whole), False),
    "a rule": (lambda own, whole: jax.nn.relu(jax.nn.logsumexp(whole) + own), True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_differs_from_rank_to_rank_is_told_from_what_is_whole(name):
    program, differs = PROGRAMS[name]
    seen = []

    def local(own, whole):
        traced = marked_program(trace(program, own, whole).jaxpr)
        seen.append(differing(traced, [frozenset(["tensor"]), frozenset()], lambda *_: None))
        return own

    mapped = jax.shard_map(
        local, mesh=mesh_of(tensor=2), in_specs=(P("tensor"), P()), out_specs=P("tensor"), check_vma=False
    )
    jax.eval_shape(mapped, jnp.ones(4), jnp.ones(4) if "scattered" in name else jnp.ones(2))
    assert seen == [[frozenset(["tensor"] if differs else [])]]


class Split(nnx.Module):
    """Two blocks and a head that leaves its output split; `whole`: or gathers it."""

    def __init__(self, *, whole=False):
        rngs, options = nnx.Rngs(0), {"use_bias": False, **F64}
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs, **options) for _ in range(2)])
        self.head = ax.ColumnParallelLinear(8, 12, rngs=rngs, gather_output=whole, **options)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


SPLIT_PLANS = {
    "ddp": (ax.DDP, {"data": 2, "tensor": 2}, {}),
    "fsdp": (ax.FSDP, {"fsdp": 2, "tensor": 2}, {}),
    "pipeline": (ax.Pipeline, {"pipe": 2, "tensor": 2}, {"num_microbatches": 2}),
}
WORDS = np.arange(8) % 12


def joined(logits):
    axes = bound("tensor")
    return gather_from(logits, axes) if axes else logits


@BOTH
@pytest.mark.parametrize("plan", SPLIT_PLANS)
def test_a_loss_of_a_part_of_the_logits_is_refused_and_one_of_all_is_that_of_one_device(plan, check_vma):
    facade, degrees, options = SPLIT_PLANS[plan]
    x = np.random.default_rng(0).normal(size=(8, 8))
    plain = lambda logits, words: optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()
    losses = {
        "the loss (over tensor)": lambda m, b: plain(m(b["x"]), b["words"]),
        "the weight of the loss (over tensor)": lambda m, b: ax.WeightedMean(
            (joined(m(b["x"])) ** 2).sum(), jnp.where(m(b["x"]).sum(-1) > 0, 1.0, 2.0).sum()
        ),
        "metric 'right' (over tensor)": lambda m, b: (
            plain(joined(y := m(b["x"])), b["words"]),
            {"right": (y.argmax(-1) == b["words"]).mean()},
        ),
    }
    batch = {"x": x, "words": WORDS}
    trainer = lambda loss, **model: facade(Split(**model), mesh_of(**degrees), check_vma=check_vma, **options).trainer(
        optax.sgd(0.1), loss
    )
    decayed = lambda m, b: plain(m(b["x"]), b["words"]) + 0.1 * (m.head.kernel[...] ** 2).sum()
    with pytest.raises(ValueError, match=r"the loss \(over tensor\).*split parameter.*weight decay to the optimizer"):
        trainer(decayed, whole=True).step(batch)
    for said, loss in losses.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            trainer(loss).step(batch)
        with pytest.raises(ValueError, match=re.escape(said)):
            trainer(loss).evaluate(batch)
    right = losses["the loss (over tensor)"], lambda m, b: plain(joined(m(b["x"])), b["words"])
    for loss, whole in zip(right, (True, False), strict=True):
        alone, several = Split(whole=whole), trainer(loss, whole=whole)
        for _ in range(2):
            expected, grads = nnx.value_and_grad(loss)(alone, batch)
            nnx.update(alone, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(alone, nnx.Param), grads))
            np.testing.assert_allclose(several.step(batch)["loss"], expected, rtol=1e-9)


@BOTH
def test_targets_that_the_loss_makes_are_those_of_a_ranks_rows(check_vma):
    x = np.random.default_rng(0).normal(size=(8, 8))
    targets = lambda logits: jnp.arange(len(logits)) % 12

    def loss(model, x):
        return ax.vocab_parallel_cross_entropy(logits := model(x), targets(logits)).mean()

    expected = optax.softmax_cross_entropy_with_integer_labels(logits := Split()(x), targets(logits)).mean()
    trainer = ax.DDP(Split(), mesh_of(data=2, tensor=2), check_vma=check_vma).trainer(optax.sgd(0.1), loss)
    np.testing.assert_allclose(trainer.step(x)["loss"], expected, rtol=1e-9)


def test_a_part_is_refused_beside_layers_that_were_swapped():
    mesh, loss, x = (
        mesh_of(data=2, tensor=2),
        lambda m, x: (m(x) ** 2).mean(),
        np.random.default_rng(0).normal(size=(8, 8)),
    )
    for whole in (True, False):
        ax.auto_parallelize(model := Split(whole=whole), mesh)
        trainer = ax.parallelize(model, mesh).trainer(optax.sgd(0.1), loss)
        if whole:
            np.testing.assert_allclose(trainer.step(x)["loss"], loss(Split(), x), rtol=1e-9)
            continue
        with pytest.raises(ValueError, match=r"the loss \(over tensor\)"):
            trainer.step(x)


class SplitWithRows(nnx.Module):
    """Layers that split their parameters over an axis that splits rows too."""

    def __init__(self, axis):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(4, 6, rngs=rngs, **F64)
        if axis == "expert":
            self.layer = ax.ParallelMoE(6, 8, 4, router=ax.SoftmaxRouter(top_k=2), rngs=rngs, **F64)
        else:
            self.layer = ParallelLinear(6, 6, rngs=rngs, **F64)

    def __call__(self, x):
        made = self.layer(jnp.tanh(self.first(x)))
        return made[0] if isinstance(made, tuple) else made

    @property
    def own(self):
        return (self.layer.up if hasattr(self.layer, "up") else self.layer.kernel)[...]


def with_penalty(penalty):
    return lambda model, x: jnp.mean(jnp.square(model(x))) + 0.1 * penalty(model.own)


def as_a_metric(model, x):
    return jnp.mean(jnp.square(model(x))), {"norm": jnp.linalg.norm(model.own)}


def square_joined(axis, join):
    """`join` over the axis where it is bound, so that the loss runs on one device too."""
    return lambda part: join(jnp.sum(part**2), axis) if bound((axis,)) else jnp.sum(part**2)


@BOTH
@pytest.mark.parametrize("axis", ["expert", "depth"])
def test_a_part_alone_is_refused_and_joined_parts_are_right_where_ranks_have_rows_of_their_own(axis, check_vma):
    x = np.random.default_rng(0).normal(size=(8, 3, 4))
    plan = ax.Plan(check_vma=check_vma)
    of = lambda: ax.parallelize(SplitWithRows(axis), mesh_of(**{axis: 2, "data": 2}), plan)
    wrong = {
        "the loss": [with_penalty(lambda part: jnp.sum(part**2)), with_penalty(square_joined(axis, reduce_from))],
        "metric 'norm'": [as_a_metric],
    }
    for name, losses in wrong.items():
        for loss in losses:
            with pytest.raises(ValueError, match=rf"{name} \(over {axis}\).*all_reduce_sum"):
                of().trainer(optax.sgd(1.0), loss).step(x)
            with pytest.raises(ValueError, match=rf"{name} \(over {axis}\)"):
                of().trainer(optax.sgd(1.0), loss).evaluate(x)
    loss = with_penalty(square_joined(axis, ax.all_reduce_sum))
    value, grads = nnx.value_and_grad(loss)(SplitWithRows(axis), x)
    got, made = of().value_and_grad(loss)(x)
    assert float(got) == pytest.approx(float(value), abs=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), made, nnx.to_pure_dict(grads))


@BOTH
def test_weights_that_are_gathered_ahead_are_no_parts_alone(check_vma):
    config = TransformerConfig(
        vocab_size=8, num_layers=2, num_heads=2, hidden_size=4, mlp_hidden_size=8, max_length=4, split="grid", prefetch=True
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 8, (4, 5))
    loss = lambda model, batch: ax.WeightedMean(*model.loss(batch[:, :-1], batch[:, 1:]))
    plan = ax.Plan(check_vma=check_vma)
    assert_equals_single_device(
        Transformer(config, rngs=nnx.Rngs(0)), loss, tokens, mesh=mesh_of(data=2, depth=2), plan=plan, tx=optax.sgd(0.1)
    )
