"""Evaluation takes as many rows at a time as training does, and says the same as one device of all rows at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from test_training_loss import Net, losses

import axonml_jax as ax
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
        return of(collectives_in(step._whole, trainer.model.variables, placed)), of(
            collectives_in(trainer.trace(batch).jaxpr)
        )

    once, step = bytes_of(3, 1)
    assert 0 < once <= step  # the backward gathers again what it reads again
    assert bytes_of(3, 4) == (4 * once, 4 * step)
    assert bytes_of(2, 4)[0] == bytes_of(2, 1)[0] == bytes_of(2, 4)[1] == once
