"""An axis that splits positions: the step, evaluation and a call are those of one device; what cannot be told is refused."""

import contextlib
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from meshes import plain_mesh_of
from position_models import ROWS, WIDTH, LinenWords, Positions, Words, batch_of, loss

import axonml_jax as ax
from axonml_jax.parallel.plan import Partition
from axonml_jax.sharding.batch import BatchLayout, check_batch
from axonml_jax.testing.equality import assert_equals_single_device


@dataclasses.dataclass(frozen=True)
class Both(ax.Shard):
    """Parameters rest sharded over two axes, of which one splits rows and one positions."""

    @property
    def role(self):
        return dataclasses.replace(super().role, batch=("rows", "positions"))


SEQ = {"seq": Positions()}
RULES = [("blocks/0/kernel", PartitionSpec(None, "tensor")), (".*", PartitionSpec())]
PLANS = {
    "alone": ({"seq": 3}, {"axes": SEQ}),
    "with data": ({"data": 2, "seq": 2}, {"axes": SEQ}),
    "typed": ({"data": 2, "seq": 2}, {"axes": SEQ, "check_vma": True}),
    "outside data": ({"seq": 2, "data": 2}, {"axes": SEQ, "accumulate": 2}),
    "zero1": ({"fsdp": 2, "seq": 2}, {"axes": SEQ, "fsdp": ax.Shard(stage=1)}),
    "zero3": ({"fsdp": 2, "seq": 2}, {"axes": SEQ, "fsdp": ax.Shard(stage=3), "accumulate": 2}),
    "zero3 typed": ({"fsdp": 2, "seq": 2}, {"axes": SEQ, "fsdp": ax.Shard(stage=3), "check_vma": True}),
    "sharded over both": ({"fsdp": 2, "seq": 2}, {"axes": {("fsdp", "seq"): Both(stage=3)}}),
    "sharded over both, zero2": ({"data": 2, "fsdp": 2, "seq": 2}, {"axes": {("fsdp", "seq"): Both(stage=2)}}),
    "remat, bf16": ({"data": 2, "seq": 2}, {"axes": SEQ, "remat": "full", "precision": "bf16"}),
    "1f1b": ({"pipe": 2, "seq": 2}, {"axes": SEQ, "pipe": ax.Pipelined(num_microbatches=2)}),
    "1f1b typed": ({"pipe": 2, "seq": 2}, {"axes": SEQ, "pipe": ax.Pipelined(num_microbatches=2), "check_vma": True}),
    "offload": ({"data": 2, "seq": 2}, {"axes": SEQ, "offload": ax.CPUOffload.FULL}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_positions_split_over_ranks_train_as_on_one_device(plan):
    degrees, settings = PLANS[plan]
    batches = [batch_of(seed) for seed in range(3)]
    assert_equals_single_device(
        Words(), loss, batches, ax.Plan(**settings), mesh=plain_mesh_of(degrees), max_grad_norm=0.5
    )


@pytest.mark.parametrize("plan", ["with data", "sharded over both", "zero3 typed"])
def test_a_linen_model_does_too(plan):
    degrees, settings = PLANS[plan]
    model = LinenWords()
    params = model.init(jax.random.key(0), batch_of()["tokens"])
    assert_equals_single_device(
        model, loss, [batch_of(1), batch_of(2)], ax.Plan(**settings), mesh=plain_mesh_of(degrees), params=params
    )


@pytest.mark.parametrize("plan", ["alone", "with data", "typed", "zero3", "1f1b"])
def test_a_call_and_an_evaluation_are_those_of_one_device(plan):
    degrees, settings = PLANS[plan]
    model, batch = Words(), batch_of()
    parallel = ax.parallelize(model, plain_mesh_of(degrees), ax.Plan(**settings))
    np.testing.assert_allclose(parallel(batch["tokens"]), model(batch["tokens"]), rtol=1e-5, atol=1e-5)
    wanted, metrics = loss(model, batch)
    got = ax.Trainer(parallel, optax.sgd(0.1), loss).evaluate(batch)
    np.testing.assert_allclose(got["loss"], wanted.value, rtol=1e-5)
    np.testing.assert_allclose(got["accuracy"], metrics["accuracy"].value, rtol=1e-5)


def sequences(mesh_degrees=None, **settings):
    return ax.parallelize(Words(), plain_mesh_of(mesh_degrees or {"data": 2, "seq": 2}), ax.Plan(axes=SEQ, **settings))


def plain_loss(model, batch):
    out = model(batch["tokens"])
    return (out**2).mean() ** 0.5, {"most": out.max(), "sum": out.sum()}


def test_a_plain_number_means_the_whole_batch_and_all_positions():
    found = ax.Trainer(sequences(), optax.sgd(0.1), plain_loss).step(batch_of())
    wanted, metrics = plain_loss(Words(), batch_of())
    for name, value in {"loss": wanted, **metrics}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def accumulated_loss(model, batch):
    """A function of one sum, with a metric of the batch alone, and metrics of sums."""
    out, mask = model(batch["tokens"]), batch["mask"].astype(float)
    each = (out**2).mean(-1) * (mask - mask.mean())
    return (1 + each.sum() / mask.sum()) ** 0.5, {"sum": out.sum(), "count": (mask > 0).sum(), "last": out[:, -1].sum()}


PIPE = {"pipe": ax.Pipelined(num_microbatches=2)}
MICRO = {
    "accumulated": ({"data": 2, "seq": 2}, {"accumulate": 2}),
    "pipeline": ({"pipe": 2, "seq": 2}, PIPE),
    "seq alone": ({"seq": 2}, {"accumulate": 4}),
    "one rank": ({"seq": 1}, {"accumulate": 2}),
    "all at once": ({"seq": 2}, {}),
}


@pytest.mark.parametrize("plan", MICRO)
def test_a_plain_number_in_microbatches_means_the_whole_batch_and_all_positions(plan):
    degrees, settings = MICRO[plan]
    trainer = ax.Trainer(sequences(degrees, **settings), optax.sgd(0.1), accumulated_loss)
    wanted, metrics = accumulated_loss(Words(), batch_of())
    grads = nnx.grad(lambda model: accumulated_loss(model, batch_of())[0])(Words())
    for found in (trainer.evaluate(batch_of()), trainer.step(batch_of())):
        for name, value in {"loss": wanted, **metrics}.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found["grad_norm"], optax.tree.norm(nnx.to_pure_dict(grads)), rtol=1e-5)


def test_what_needs_other_microbatches_is_refused_unless_it_may_take_two_sweeps():
    trainer = ax.Trainer(sequences(accumulate=2), optax.sgd(0.1), plain_loss)
    with pytest.raises(ValueError, match=r"reduce_max \(line \d+ of .*, plain_loss\).*two_sweeps=True"):
        trainer.step(batch_of())
    wanted, metrics = plain_loss(Words(), batch_of())
    grads = nnx.grad(lambda model: plain_loss(model, batch_of())[0])(Words())
    for degrees, settings in (MICRO["accumulated"], MICRO["pipeline"]):
        twice = ax.mixing_rows(plain_loss, two_sweeps=True)
        found = ax.Trainer(sequences(degrees, **settings), optax.sgd(0.1), twice).step(batch_of())
        for name, value in {"loss": wanted, **metrics}.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["grad_norm"], optax.tree.norm(nnx.to_pure_dict(grads)), rtol=1e-5)


def test_outputs_with_rows_merged_with_positions_are_refused_by_a_call():
    class Merged(Words):
        def __call__(self, tokens):
            return super().__call__(tokens).reshape(-1, WIDTH)

    model = ax.parallelize(Merged(), plain_mesh_of({"data": 2, "seq": 2}), ax.Plan(axes=SEQ))
    with pytest.raises(
        ValueError, match=r"rows merged with other dims: \{'output': 'dim 0 of \(\d+, \d+\) on a rank'\}.*own"
    ):
        model(batch_of()["tokens"])


def test_a_plain_number_of_a_replica_means_all_its_rows_and_positions():
    found = ax.Trainer(sequences(data=ax.DiLoCo(every=2)), optax.sgd(0.1), plain_loss).step(batch_of())
    halves = [jax.tree.map(lambda x, i=i: x[i : i + ROWS // 2], batch_of()) for i in (0, ROWS // 2)]
    wanted = [float(plain_loss(Words(), half)[0]) for half in halves]
    np.testing.assert_allclose(found["loss"], wanted, rtol=1e-5)


def test_a_plain_number_of_a_loss_that_talks_itself_is_refused_as_nobody_can_tell_a_mean_from_a_sum():
    def talking(model, batch):
        return jax.lax.pmean(plain_loss(model, batch)[0], "seq")

    with pytest.raises(ValueError, match=r"as a plain number, but seq splits positions.*WeightedMean\(total"):
        ax.Trainer(sequences(), optax.sgd(0.1), talking).step(batch_of())
    both = lambda model, batch: (loss(model, batch)[0], {"mean": talking(model, batch)})
    with pytest.raises(ValueError, match="metric 'mean' as a plain number"):
        ax.Trainer(sequences(), optax.sgd(0.1), both).step(batch_of())


def test_positions_that_do_not_divide_are_refused_by_name_before_anything_runs():
    trainer = ax.Trainer(sequences({"seq": 4}), optax.sgd(0.1), loss)
    with pytest.raises(ValueError) as error:
        trainer.step(batch_of())
    for name in ("tokens", "labels", "mask"):
        assert f"{name}: shape (8, 6), 6 positions (dim 1) over ('seq',) (4 ranks)" in str(error.value)
    assert "rows:" not in str(error.value)
    with pytest.raises(ValueError, match=r"\['seq'\] split positions, but no leaf of the batch has any"):
        trainer.step({"rows": np.zeros(8)})


def test_an_output_that_is_made_of_a_ranks_own_positions_is_refused():
    class Pooled(Words):
        def __call__(self, tokens):
            return {"each": super().__call__(tokens), "pooled": super().__call__(tokens).mean(1)}

    class Joined(Words):
        def __call__(self, tokens):
            each = super().__call__(tokens)
            joined = each.mean(1)
            with contextlib.suppress(NameError):  # one device has no such axis
                joined = jax.lax.pmean(joined, "seq")
            return {"each": each, "pooled": joined}

    mesh, plan, tokens = plain_mesh_of({"data": 2, "seq": 2}), ax.Plan(axes=SEQ), batch_of()["tokens"]
    with pytest.raises(
        ValueError, match=r"no dim of positions, but each rank computes them from its own.*\{'pooled': \['seq'\]\}"
    ):
        ax.parallelize(Pooled(), mesh, plan)(tokens)
    model = Joined()
    got = ax.parallelize(model, mesh, plan)(tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, model(tokens))


# Results of the model without positions, of its logits and a mask, whose rows count differently many positions.
RIGHT = {
    "first": lambda x, mask: x[:, 0],
    "last, in a head": lambda x, mask: jnp.tanh(x[:, -1]) + 1,
    "mean": lambda x, mask: x.mean(1),
    "sum": lambda x, mask: x.sum(1),
    "masked sum": lambda x, mask: jnp.einsum("blc,bl->bc", nnx.relu(x), mask),
    "number": lambda x, mask: (x[:, 0] ** 2).mean(),
}
REFUSED = {
    "most": lambda x, mask: x.max(1),
    "masked mean": lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1)[:, None],
    "by a softmax": lambda x, mask: (jax.nn.softmax(x[..., 0], 1)[..., None] * x).sum(1),
    "a function of the mean": lambda x, mask: jnp.tanh(x.mean(1)),
    "centred": lambda x, mask: (x - x.mean(1, keepdims=True))[:, 0],
}
UNDER = {
    "alone": ({"seq": 3}, {"axes": SEQ}),
    "typed": ({"data": 2, "seq": 2}, {"axes": SEQ, "check_vma": True}),
    "zigzag": ({"data": 2, "context": 2}, {"context": ax.Context(order="zigzag"), "accumulate": 2}),
    "contiguous": ({"context": 2}, {"context": ax.Context(order="contiguous", sees="own")}),
}


class Pooled(Words):
    splits_positions = True

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def __call__(self, tokens, mask):
        return self.pool(super().__call__(tokens), mask)


class LinenPooled(nn.Module):
    splits_positions = True

    @nn.compact
    def __call__(self, tokens, mask):
        return LinenWords()(tokens)[:, 0]


def pooled_loss(weighted):
    def loss(model, batch):
        out = model(batch["tokens"], batch["mask"])
        each = (out**2).sum(-1) if out.ndim else out
        if weighted:
            return ax.WeightedMean((each * batch["rows"]).sum(), batch["rows"].sum())
        return (each * batch["rows"]).mean(), {"most": each.max()}

    return loss


def pooled_batch(seed=0):
    return batch_of(seed, 12) | {"mask": np.tri(ROWS, 12, 3).astype(np.float32)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("pool", "under"), [(pool, ["alone", "zigzag"][k % 2]) for k, pool in enumerate(RIGHT)])
def test_what_the_model_returns_without_positions_is_that_of_whole_sequences(pool, under, weighted):
    degrees, settings = UNDER[under]
    loss, batches, plan = pooled_loss(weighted), [pooled_batch(0), pooled_batch(1)], ax.Plan(**settings)
    if "accumulate" in settings and not weighted:  # the largest of all rows would need other microbatches
        loss = lambda model, batch: pooled_loss(False)(model, batch)[0]
    assert_equals_single_device(Pooled(RIGHT[pool]), loss, batches, plan, mesh=plain_mesh_of(degrees))


@pytest.mark.parametrize("under", ["typed", "contiguous"])
def test_one_position_is_that_of_whole_sequences_in_evaluation_and_of_a_linen_model(under):
    degrees, settings = UNDER[under]
    loss, batch, model, mesh = pooled_loss(False), pooled_batch(), LinenPooled(), plain_mesh_of(degrees)
    params = model.init(jax.random.key(0), batch["tokens"], batch["mask"])
    assert_equals_single_device(model, loss, [batch], ax.Plan(**settings), mesh=mesh, params=params)
    found = (
        ax.parallelize(Pooled(RIGHT["first"]), mesh, ax.Plan(**settings)).trainer(optax.sgd(0.1), loss).evaluate(batch)
    )
    wanted, metrics = loss(Pooled(RIGHT["first"]), batch)
    np.testing.assert_allclose([found["loss"], found["most"]], [wanted, metrics["most"]], rtol=1e-5)


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_no_mean_or_sum_over_positions_and_none_of_them_is_refused_with_the_remedy(under, weighted):
    degrees, settings = UNDER[under]
    for what, pool in REFUSED.items():
        model = ax.parallelize(Pooled(pool), plain_mesh_of(degrees), ax.Plan(**settings))
        with pytest.raises(ValueError) as error:
            model.trainer(optax.sgd(0.1), pooled_loss(weighted)).step(pooled_batch())
        for words in ("no dim of positions", "'output': (", "Return one per position", "jax.lax.psum"):
            assert words in str(error.value), (what, error.value)


def test_what_the_loss_does_not_read_may_have_no_positions():
    class Beside(Words):
        def __call__(self, tokens):
            return {"each": super().__call__(tokens), "most": super().__call__(tokens).max(1)}

    own = lambda model, batch: loss(lambda tokens: model(tokens)["each"], batch)
    trainer = ax.parallelize(Beside(), plain_mesh_of({"data": 2, "seq": 2}), ax.Plan(axes=SEQ)).trainer(
        optax.sgd(0.1), own
    )
    np.testing.assert_allclose(trainer.step(batch_of())["loss"], loss(Words(), batch_of())[0].value, rtol=1e-5)


def test_a_strategy_says_which_dim_holds_positions():
    class Second(Positions):
        def position_dim(self, path, shape):
            return {"frames": 2, "tokens": 1}.get(path.split("/")[-1])

    layout = ax.Plan(axes={"seq": Second()}).batch_layout({"data": 2, "seq": 2})
    shapes = {
        "in": {"frames": np.zeros((4, 3, 8)), "tokens": np.zeros((4, 6))},
        "mask": np.zeros((4, 5)),
        "step": np.zeros(()),
    }
    assert layout.specs(shapes) == {
        "in": {"frames": PartitionSpec("data", None, "seq"), "tokens": PartitionSpec("data", "seq")},
        "mask": PartitionSpec("data"),
        "step": PartitionSpec(),
    }
    check_batch(layout, shapes)
    assert (layout.row_degree, layout.degree, layout.axes) == (2, 4, ("data", "seq"))
    wrong = BatchLayout.of({"data": 2, "seq": 2}, positions={"seq": lambda path, shape: 0})
    with pytest.raises(ValueError, match=r"position_dim\(\) returned .* for the batch's leaf 'x'.*dim 0 holds rows"):
        check_batch(wrong, {"x": np.zeros((4, 4))})


def test_a_role_of_several_axes_names_what_each_splits():
    assert ax.Role(batch=("rows", "positions")).splits(("a", "b")) == {"a": "rows", "b": "positions"}
    with pytest.raises(ValueError, match="says what 2 axes split, but the strategy has 1"):
        ax.Role(batch=("rows", "positions")).splits(("a",))
    with pytest.raises(ValueError, match="batch="):
        ax.Role(batch=("rows", "columns"))


def test_a_loader_splits_rows_as_the_plan_says_and_a_step_takes_them():
    class Rows(ax.Replicate):
        pass

    plan = ax.Plan(axes={"island": Rows(), "seq": Positions()})
    mesh, batch = plain_mesh_of({"island": 2, "seq": 2}), batch_of()
    (loaded,) = ax.create_dataloader(batch, ROWS, mesh, shuffle=False, num_epochs=1, plan=plan)
    assert loaded["tokens"].sharding.spec == PartitionSpec(("island",))
    trainer = ax.parallelize(Words(), mesh, plan).trainer(optax.sgd(0.1), loss)
    np.testing.assert_allclose(trainer.step(loaded)["loss"], loss(Words(), batch)[0].value, rtol=1e-5)
    with pytest.raises(ValueError, match="global_batch_size=7 does not divide over the batch axes island=2"):
        ax.create_dataloader(batch, 7, mesh, plan=plan)


def test_gradients_of_ranks_alone_and_partitioned_axes_are_refused_beside_positions():
    model = sequences()
    with model.no_sync(), pytest.raises(ValueError, match="along seq ranks hold parts of the same sequences"):
        model.value_and_grad(loss)(batch_of())
    mesh = plain_mesh_of({"data": 2, "tensor": 2})
    with pytest.raises(ValueError, match=r"data splits positions, and partition= leaves an axis"):
        ax.parallelize(Words(), mesh, ax.Plan(data=Positions(), partition=Partition.of(RULES)))


def test_leaves_of_other_sizes_are_not_taken_for_positions():
    trainer = ax.Trainer(sequences(), optax.sgd(0.1), loss)
    with pytest.raises(
        ValueError, match=r"different sizes there:[^?]*classes: shape \(8, 10\)[^?]*None for those without"
    ):
        trainer.step(batch_of() | {"classes": np.zeros((8, 10))})


def test_an_axis_of_one_rank_changes_nothing():
    model = ax.parallelize(Words(), plain_mesh_of({"data": 2, "seq": 1}), ax.Plan(axes=SEQ))
    plain = lambda model, batch: model(batch["tokens"]).mean()
    assert np.isfinite(ax.Trainer(model, optax.sgd(0.1), plain).step(batch_of())["loss"])


def test_logits_that_layers_leave_split_are_told_from_positions_of_as_many_ranks():
    class Split(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(12, WIDTH, rngs=nnx.Rngs(0))
            self.head = ax.ColumnParallelLinear(WIDTH, 12, rngs=nnx.Rngs(1))

        def __call__(self, tokens):
            return self.head(self.table(tokens))

    model, tokens = Split(), batch_of()["tokens"]
    mesh = plain_mesh_of({"data": 2, "seq": 2, "tensor": 2})
    np.testing.assert_allclose(
        ax.parallelize(model, mesh, ax.Plan(axes=SEQ))(tokens), model(tokens), rtol=1e-5, atol=1e-6
    )


def test_a_call_knows_its_arguments_by_the_models_names_and_apart():
    class Named(Positions):
        def position_dim(self, path, shape):
            return 1 if path.split("/")[0] == "tokens" else None

    class Nested(Words):
        def __call__(self, tokens, more=None):
            first, second = (tokens["a/b"], tokens["a"]["b"]) if isinstance(tokens, dict) else (tokens, tokens)
            return super().__call__(first) - 2 * super().__call__(second)

    model, tokens = Nested(), batch_of()["tokens"]
    parallel = ax.parallelize(model, plain_mesh_of({"data": 2, "seq": 2}), ax.Plan(axes={"seq": Named()}))
    np.testing.assert_allclose(parallel(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    both = {"a/b": tokens, "a": {"b": tokens[:, ::-1].copy()}}
    np.testing.assert_allclose(parallel(both), model(both), rtol=1e-5, atol=1e-5)
