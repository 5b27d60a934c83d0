"""Evaluation takes as many rows at a time as training does, and says the same as one device of all rows at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from test_training_loss import Deep, LinenDeep, Net, losses

import axonml_jax as ax
from axonml_jax.cli.flags import in_flags
from axonml_jax.ledger.count import collectives_in

pytestmark = pytest.mark.usefixtures("compiled_for_users")

SEEN = set()
PLANS = {
    "replicas": ({"data": 4}, ax.Plan()),
    "ZeRO-2": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(stage=2))),
    "ZeRO-3, typed": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(stage=3), check_vma=True)),
}


def batch_of(rows):
    rng = np.random.default_rng(rows)
    mask = (np.arange(6) < rng.integers(0, 6, (rows, 1))).astype(float)
    return {"x": rng.normal(size=(rows, 6, 5)), "y": rng.normal(size=(rows, 6, 3)), "mask": mask}


def weighted(model, batch):
    SEEN.add(batch["x"].shape[0])
    each, mask = losses(model, batch), batch["mask"]
    return ax.WeightedMean((each * mask).sum(), mask.sum()), {"plain": each.mean()}


def plain(model, batch):
    return losses(model, batch).mean()


@pytest.mark.parametrize("name", PLANS)
def test_as_many_rows_at_a_time_as_in_training(name):
    degrees, plan = PLANS[name]
    parallel = ax.parallelize(Net(), mesh_of(**degrees), plan)
    trainer = parallel.trainer(optax.sgd(0.1), weighted, accumulate=4)
    for rows, at_once in ((32, 2), (24, 3), (12, 3)):  # 8, 6 and 3 of a device; 4 microbatches, 2 and 1
        SEEN.clear()
        batch = batch_of(rows)
        found, each = trainer.evaluate(batch), losses(Net(), batch)
        assert min(SEEN) == at_once  # it is traced at the whole batch's shape besides
        np.testing.assert_allclose(found["loss"], (each * batch["mask"]).sum() / batch["mask"].sum(), rtol=1e-12)
        np.testing.assert_allclose(found["plain"], each.mean(), rtol=1e-12)
    mean = parallel.trainer(optax.sgd(0.1), plain, accumulate=4).evaluate(batch_of(32))["loss"]
    np.testing.assert_allclose(mean, losses(Net(), batch_of(32)).mean(), rtol=1e-12)


class Moody(nnx.Module):
    """What training and evaluation compute differently."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layer = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.dropout(self.norm(x)))


@pytest.mark.parametrize("name", ["replicas", "ZeRO-2"])
def test_running_averages_are_read_and_kept_and_nothing_is_dropped(name):
    degrees, plan = PLANS[name]
    parallel = ax.parallelize(Moody(), mesh_of(**degrees), plan)
    trainer, batch = parallel.trainer(optax.sgd(0.1), plain), batch_of(8)
    batch = jax.tree.map(np.float32, batch)  # as Flax keeps running averages
    trainer.step(batch)
    before, trained = parallel.state_dict(), parallel.module
    trained.eval()
    found = trainer.evaluate(batch)["loss"]
    np.testing.assert_allclose(found, losses(trained, batch).mean(), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, parallel.state_dict())


def test_memory_of_an_evaluation_is_that_of_a_microbatch():
    """Of 32 rows of a device at once, or of 4."""

    def wide(model, batch):
        products = jnp.einsum("bki,bkj->bij", batch["x"], batch["x"])
        return jnp.tanh(products).mean() * model.layer.bias[...].sum()

    rows = {"x": np.ones((64, 8, 64))}

    def temporaries(accumulate):
        trainer = ax.parallelize(Net(), mesh_of(data=2)).trainer(optax.sgd(0.1), wide, accumulate=accumulate)
        step, layout = trainer._eval, trainer._eval.placement.batch_layout
        program = step._compiled.lower(trainer.model.variables, layout.place(rows, step.mesh)).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(1) / 4


def test_under_zero3_an_evaluation_gathers_in_every_microbatch_as_the_forward_of_a_step_does():
    """So its memory is that of a microbatch and one unit; ZeRO-2, whose parameters a step gathers once, gathers once here."""

    def bytes_of(stage, accumulate):
        parallel = ax.parallelize(Net(), mesh_of(fsdp=4), ax.Plan(fsdp=ax.Shard(stage=stage)))
        trainer = parallel.trainer(optax.sgd(0.1), plain, accumulate=accumulate)
        trainer.evaluate(batch := batch_of(32))
        step = trainer._eval
        of = lambda found: sum(entry.step_wire_bytes for entry in found if entry.kind == "all_gather")
        placed = step.placement.batch_layout.place(batch, step.mesh)
        return of(collectives_in(step._mapped, trainer.model.variables, placed)), of(
            collectives_in(trainer.trace(batch).jaxpr)
        )

    once, step = bytes_of(3, 1)
    assert 0 < once <= step  # the backward gathers again what it reads again
    assert bytes_of(3, 4) == (4 * once, 4 * step)
    assert bytes_of(2, 4)[0] == bytes_of(2, 1)[0] == bytes_of(2, 4)[1] == once


# Any number of rows

ROWS_PLANS = {
    "ddp, accumulated": ({"data": 4}, ax.Plan(accumulate=2)),
    "zero-2, typed": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(stage=2), check_vma=True)),
    "fsdp, typed": ({"fsdp": 4}, ax.Plan(fsdp=ax.Shard(stage=3), check_vma=True)),
    "hybrid, accumulated": ({"data": 2, "fsdp": 2}, ax.Plan(fsdp=ax.Shard(stage=3), accumulate=2)),
    "tensor": ({"data": 4, "tensor": 2}, ax.Plan()),
    "pipeline": ({"data": 4, "pipe": 2}, ax.Plan(pipe=ax.Pipelined(num_microbatches=2))),
    "context": ({"data": 4, "context": 2}, ax.Plan()),
}


def right(each):
    return each < 1.5


def all_weighted(model, batch):
    each, mask = losses(model, batch), batch["mask"]
    return ax.WeightedMean((each * mask).sum(), mask.sum()), {
        "right": ax.WeightedMean((right(each) * mask).sum(), mask.sum())
    }


def plain_too(model, batch):
    each = losses(model, batch)
    return each.mean(), {"mae": jnp.abs(each).mean(), **all_weighted(model, batch)[1]}


def of_whole(batches, names):
    """Of NumPy's: all rows of all batches as one batch, on one device."""
    batch = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    each, mask = np.asarray(losses(Deep(), batch)), batch["mask"]
    masked = {"loss": (each * mask).sum() / mask.sum(), "right": (right(each) * mask).sum() / mask.sum()}
    return masked if names is all_weighted else masked | {"loss": each.mean(), "mae": np.abs(each).mean()}


def case(plan, kind):
    degrees, settings = ROWS_PLANS[plan]
    model, params = (Deep(), None) if kind == "nnx" else linen_of_deep()
    if "tensor" in degrees:
        ax.auto_parallelize(model, mesh_of(degrees))
    return ax.parallelize(model, mesh_of(degrees), settings, params=params)


def linen_of_deep():
    values = nnx.to_pure_dict(nnx.state(Deep(), nnx.Param))["blocks"]
    return LinenDeep(), {"params": {f"Dense_{1 - i}": values[i] for i in (0, 1)}}


def cases():
    for plan in ROWS_PLANS:
        for kind in ("nnx", "linen"):
            quick = (plan, kind) in {("fsdp, typed", "nnx"), ("ddp, accumulated", "linen")}
            if (plan, kind) != ("tensor", "linen"):
                yield pytest.param(plan, kind, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("plan", "kind"), list(cases()))
def test_any_number_of_rows_is_evaluated_as_on_one_device_and_batches_count_by_what_they_hold(plan, kind):
    parallel, batches = case(plan, kind), [batch_of(rows) for rows in (8, 7, 3)]
    batches[1]["mask"][:, 2:] = 0
    for loss_fn in (all_weighted, plain_too):
        trainer = parallel.trainer(optax.sgd(0.1), plain if loss_fn is all_weighted else all_weighted, eval_fn=loss_fn)
        for batch in batches:
            found, wanted = trainer.evaluate(batch), of_whole([batch], loss_fn)
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=f"{name} of {len(batch['x'])} rows")
        found, wanted = trainer.validate(batches), of_whole(batches, loss_fn)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


def test_in_a_validation_a_batch_without_weight_counts_for_nothing_and_weights_that_are_given_count():
    trainer = case("ddp, accumulated", "nnx").trainer(optax.sgd(0.1), all_weighted)
    batches = [batch_of(8), batch_of(8) | {"mask": np.zeros((8, 6))}]
    one = trainer.validate(batches[:1])
    assert trainer.validate(batches) == pytest.approx(one, rel=1e-12)
    assert trainer.validate(batches[1:]) == {"loss": 0.0, "right": 0.0}
    given = trainer.validate([batch_of(8), batch_of(7)], weights=[3, 1])
    other = trainer.validate([batch_of(7)])
    assert given == pytest.approx({name: (3 * one[name] + other[name]) / 4 for name in one}, rel=1e-12)


def test_arrays_among_the_metrics_are_whole_in_an_evaluation_and_those_with_rows_are_refused_in_a_validation():
    rows = lambda model, batch: (losses(model, batch).mean(), {"rows": losses(model, batch).mean(-1)})
    trainer = case("ddp, accumulated", "nnx").trainer(optax.sgd(0.1), rows)
    for batch in (batch_of(8), batch_of(7)):
        wanted = losses(Deep(), batch).mean(-1)
        np.testing.assert_allclose(trainer.evaluate(batch)["rows"], wanted, rtol=1e-12)
    for batches in ([batch_of(8), batch_of(7)], [batch_of(8), batch_of(8)], [batch_of(7)]):
        with pytest.raises(
            ValueError, match=r"a number for every row, so they have no mean over batches: rows\. .*predict"
        ):
            trainer.validate(batches)
    table = lambda model, batch: (losses(model, batch).mean(), {"table": losses(model, batch).mean() * np.eye(8)})
    trainer = case("ddp, accumulated", "nnx").trainer(optax.sgd(0.1), table)
    pairs = lambda model, batch: (losses(model, batch).reshape(4, 2, -1).mean(), {"eight": jnp.ones(8)})
    assert ax.DDP(Deep(), mesh_of({"data": 4})).trainer(optax.sgd(0.1), pairs).validate([batch_of(8)] * 2)[
        "eight"
    ].shape == (8,)
    wanted = losses(Deep(), batch_of(8)).mean() * np.eye(8)
    np.testing.assert_allclose(trainer.validate([batch_of(8)] * 2)["table"], wanted, rtol=1e-12)


# Predictions


def outputs(model, batch):
    out = model(batch["x"])
    return {"out": out, "best": {"class": out.argmax(-1)}}


@pytest.mark.parametrize(("plan", "kind"), list(cases()))
def test_predictions_are_one_for_every_row_in_order_of_whole_numpy_arrays(plan, kind):
    parallel, batches = case(plan, kind), [batch_of(rows) for rows in (8, 7, 3)]
    trainer = parallel.trainer(optax.sgd(0.1), all_weighted)
    found, x = trainer.predict(iter(batches), outputs), np.concatenate([batch["x"] for batch in batches])
    wanted = np.asarray(Deep()(x))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
    np.testing.assert_allclose(found["out"], wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found["best"]["class"], wanted.argmax(-1))
    np.testing.assert_allclose(trainer.predict([batches[1]["x"]]), wanted[8:15], rtol=1e-12, atol=1e-12)


def test_predictions_without_rows_and_batches_that_do_not_say_what_the_model_gets_are_refused():
    trainer = case("ddp, accumulated", "nnx").trainer(optax.sgd(0.1), all_weighted)
    with pytest.raises(ValueError, match=r"but these do not: .*mean.*trainer.evaluate"):
        trainer.predict([batch_of(8)], lambda model, batch: {"mean": model(batch["x"]).mean(0)})
    with pytest.raises(ValueError, match=r"but these do not: .*turned"):
        trainer.predict([batch_of(8)], lambda model, batch: {"turned": model(batch["x"]).swapaxes(0, 1)})
    with pytest.raises(ValueError, match=r"but these do not: \{'output': \(\d+,\)\}"):
        trainer.predict([batch_of(8)], lambda model, batch: model(batch["x"]).reshape(-1))
    with pytest.raises(TypeError, match=r"predict_fn=lambda model, batch: model\(batch"):
        trainer.predict([batch_of(8)])
    with pytest.raises(ValueError, match="no batches to predict on"):
        trainer.predict([], outputs)
    with pytest.raises(TypeError, match=r"takes batches, one after another"):
        trainer.predict(batch_of(8), outputs)


# A check of one batch


class Centred(Deep):
    def __call__(self, x):
        return super().__call__(x - x[jnp.argmin(x[:, 0])])  # of the rows that the model is called with


@pytest.mark.parametrize(("plan", "kind"), list(cases()))
def test_a_check_of_a_batch_finds_a_plan_equal_to_the_plain_function_and_changes_nothing(plan, kind):
    parallel, batch = case(plan, kind), batch_of(16)
    trainer = parallel.trainer(optax.adam(0.1), plain_too, max_grad_norm=0.01)
    trainer.step(batch)
    held = lambda: {name: leaf.array for name, leaf in trainer.checkpoint_leaves().items() if "key" not in name}
    before, calls = {name: np.array(x) for name, x in held().items()}, parallel._calls
    found = trainer.check(batch)
    assert found.equal and not found.left_out and found.compared >= 1 + 1 + 4, str(found)
    assert str(found) == f"plan against one device: {found.compared} leaves are equal"
    for name, x in held().items():
        np.testing.assert_array_equal(before[name], x, err_msg=name)
    assert parallel._calls == calls


@pytest.mark.parametrize("name", ["ddp, accumulated", "fsdp, typed", "pipeline"])
def test_a_check_names_every_leaf_that_differs_with_the_difference_and_the_tolerance(name):
    degrees, settings = ROWS_PLANS[name]
    trainer = ax.parallelize(Centred(), mesh_of(degrees), settings).trainer(optax.sgd(0.1), plain)
    with pytest.warns(UserWarning, match=r"not known whether the model's code keeps rows .* apart: argmin"):
        found = trainer.check(batch_of(16))
    leaves = {f"gradients/blocks/{i}/{leaf}" for i in (0, 1) for leaf in ("kernel", "bias")}
    assert not found.equal and {"loss", "gradients/blocks/0/kernel"} <= set(found.differs) <= leaves | {"loss"}
    row = r"^  gradients/blocks/0/kernel: max\|a-b\| = \S+ > 1e-09 \(max"
    assert re.search(row, str(found), re.MULTILINE), str(found)
    assert str(found).endswith("such as a router of experts with capacities: the model is called with a rank's rows")
    with (
        pytest.warns(UserWarning, match="not known whether"),
        pytest.raises(ValueError, match=r"leaves differ(.|\n)*gradients/blocks/0/kernel: max"),
    ):
        trainer.check(batch_of(16), strict=True)


def test_a_check_says_by_name_what_it_cannot_compare_and_why():
    moody = ax.parallelize(Moody(), mesh_of(data=4), ax.Plan(accumulate=2)).trainer(optax.sgd(0.1), plain)
    batch = jax.tree.map(np.float32, batch_of(16))
    found = moody.check(batch)
    assert not found.equal and not found.differs and not found.compared
    assert str(found).startswith("plan against one device: nothing was compared\n")
    with pytest.raises(ValueError, match=r"nothing was compared\n(.|\n)*not compared: norm/mean"):
        moody.check(batch, strict=True)
    assert "norm/mean, norm/var: each of 2 microbatches has its own statistics" in str(found)
    assert "gradients: dropout draws random numbers, of which every shard has its own; model.eval()" in str(found)
    assert "mixes rows" not in str(found)
    assert "--plan.draws rows" in in_flags(str(found)) and "ax.Plan" not in in_flags(str(found))
    moody.model.eval()
    assert moody.check(batch).equal, str(moody.check(batch))
    own = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"))
    alone = ax.parallelize(Deep(), mesh_of(data=4), own).trainer(optax.sgd(0.1), plain).check(batch_of(16))
    assert "everything: along data every rank trains a model of its own" in str(alone)


ROUNDED = {"wire": "int8"}, {"reduce_wire": "bf16"}, {"reduce_wire": "int8"}


@pytest.mark.parametrize("options", [*ROUNDED, {"memory": "1GiB"}], ids=str)
def test_a_check_takes_plans_that_round_what_they_send_or_have_a_budget(options):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    trainer = ax.FSDP(model, mesh_of(fsdp=4), **options).trainer(
        optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2)
    )
    found = trainer.check(np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32))
    assert found.equal, str(found)


def by_class(model, batch):
    """A table of classes, a vector, a masked mean and a count."""
    best, wanted = losses(model, batch).mean(1) > 1.0, batch["x"][:, 0, 0] > 0
    table = jnp.zeros((2, 2)).at[wanted.astype(int), best.astype(int)].add(1.0)
    mask = batch["mask"]
    metrics = {"table": table, "shares": jnp.stack([best.mean(), wanted.mean()]), "count": wanted.sum()}
    masked = ax.WeightedMean((losses(model, batch) * mask).sum(), mask.sum())
    return losses(model, batch).mean(), metrics | {"masked": masked}


def test_validation_keeps_the_shape_of_metrics_that_are_arrays():
    trainer = ax.DDP(Net(), mesh_of(data=4)).trainer(optax.sgd(0.1), by_class)
    batches = [batch_of(16), batch_of(8)]
    found, each = trainer.validate(batches), [by_class(Net(), batch)[1] for batch in batches]
    for name in ("table", "shares", "count"):  # as `evaluate` gives them, and by rows over batches
        wanted = np.average([metrics[name] for metrics in each], axis=0, weights=[16, 8])
        assert np.shape(found[name]) == wanted.shape
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
    assert type(found["count"]) is type(found["loss"]) is float
    assert sum(float(metrics["masked"].weight) for metrics in each) > 0
    twice = trainer.validate(batches, weights=[3, 1])
    np.testing.assert_allclose(twice["table"], (3 * each[0]["table"] + each[1]["table"]) / 4, rtol=1e-6)


def test_validation_averages_over_models_and_not_over_an_array():
    own = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"))
    trainer = ax.parallelize(Net(), mesh_of(data=4), own).trainer(optax.sgd(0.1), by_class)
    batches = [batch_of(16), batch_of(8)]
    found, each = trainer.validate(batches), [trainer.evaluate(batch) for batch in batches]
    assert each[0]["table"].shape == (4, 2, 2)
    wanted = np.average([np.mean(metrics["table"], 0) for metrics in each], axis=0, weights=[16, 8])
    np.testing.assert_allclose(found["table"], wanted, rtol=1e-6)
    assert found["shares"].shape == (2,) and type(found["masked"]) is float


def test_validation_refuses_weights_that_are_not_one_for_each_batch():
    trainer = ax.DDP(Net(), mesh_of(data=4)).trainer(optax.sgd(0.1), plain)
    with pytest.raises(ValueError, match="1 batch, but 2 weights: give one for each"):
        trainer.validate([batch_of(8)], weights=[1, 1])


def test_a_loader_without_end_is_refused_where_it_would_be_walked_to_its_end():
    trainer, mesh = ax.DDP(Net(), mesh_of(data=4)).trainer(optax.sgd(0.1), plain), mesh_of(data=4)
    batch = batch_of(16)
    for call, walk in (
        ("validate", trainer.validate),
        ("predict", lambda it: trainer.predict(it, lambda m, b: m(b["x"]))),
    ):
        with pytest.raises(ValueError, match=f"trainer.{call} reads a loader to its end.*make it with num_epochs=1"):
            walk(ax.create_dataloader(batch, 8, mesh))
    found = trainer.validate(ax.create_dataloader(batch, 8, mesh, num_epochs=1))
    np.testing.assert_allclose(found["loss"], plain(Net(), batch), rtol=1e-12)
