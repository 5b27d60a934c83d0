"""Scripts as users of JAX and Flax have them, under their own meshes, with one changed line: equal to one device."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from user_scripts import (
    BATCH,
    IDIOMS,
    PLANS,
    Net,
    compared,
    constrained,
    explicit,
    guide,
    loss,
    on_one_device,
)

import axonml_jax as ax
from axonml_jax.mesh.world import as_mesh
from axonml_jax.testing.equality import assert_trees_close


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_users_script_trains_as_its_own_loop_does(idiom, plan):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # `with mesh:`
        assert re.match(REFUSED.get((idiom, plan), "equal"), compared(idiom, plan))


REFUSED = {
    ("BatchNorm, remat, constraints", "pipeline"): r"refused: the model has no repeated blocks.*say where stages begin"
}


@pytest.mark.parametrize("name", ["FSDP", "pipeline"])
def test_an_axis_that_no_mesh_has_is_refused_by_name_with_the_line(name):
    nowhere = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("data", None, "modle"))
    trainer = PLANS[name](Net(nnx.Rngs(0), nowhere, named=False)).trainer(optax.sgd(0.1), loss)
    with jax.set_mesh(guide()), pytest.raises(ValueError, match=r"'modle' at .*test_idioms_mesh\.py:\d+ .*set_mesh"):
        trainer.step(BATCH)


def test_types_of_what_varies_are_refused_beside_placements_and_not_without():
    with jax.set_mesh(guide()):
        placing = PLANS["DDP"](Net(nnx.Rngs(0), constrained), check_vma=True).trainer(optax.sgd(0.1), loss)
        with pytest.raises(ValueError, match="leave out check_vma=True"):
            placing.step(BATCH)
    assert compared("set_mesh, Explicit", "DDP", check_vma=True) == "equal"


def test_layers_that_split_themselves_keep_their_ranks_beside_placements():
    with jax.set_mesh(guide()):
        mesh = ax.make_mesh(data=2, tensor=4)
        ax.auto_parallelize(model := Net(nnx.Rngs(0), constrained, named=False), mesh)
        trainer = ax.parallelize(model, mesh, ax.Plan()).trainer(optax.adamw(5e-2), loss)
        got = [float(trainer.step(BATCH)["loss"]) for _ in range(3)]
        sums = str(ax.explain(trainer, BATCH))
    assert "tensor" in sums  # ranks along it do talk
    wanted = on_one_device(IDIOMS["constraint, set_mesh"], attends=False)
    assert_trees_close(np.float32(got), np.float32(wanted), "losses")


@pytest.mark.slow
def test_what_entries_hand_back_can_be_computed_with_under_explicit_axes():
    mesh = explicit((8,), ("shards",))
    with jax.set_mesh(mesh):
        model = ax.FSDP(Net(nnx.Rngs(0), named=False), as_mesh(mesh, {"shards": "fsdp"}))
        mine = jax.device_put(np.float32(2), NamedSharding(mesh, PartitionSpec()))
        metrics, out = model.trainer(optax.sgd(0.1), loss).step(BATCH), model(BATCH["x"])
        value, grads = model.value_and_grad(loss)(BATCH)
        model.set_parameters(jax.tree.map(lambda p, g: p - 0.01 * g, model.parameters(), grads))
        again, _ = model.value_and_grad(loss)(BATCH)
        assert float(metrics["loss"] * mine) == 2 * float(metrics["loss"])
        assert float(((out - jnp.asarray(BATCH["y"])) ** 2).mean()) == pytest.approx(float(value), rel=1e-5)
        assert float(again) < float(value)
        clipped, norm = model.clip_grad_norm(grads, 1e-3)
        assert float(norm * mine) > 0 and jax.typeof(jax.tree.leaves(clipped)[0]).sharding.mesh.axis_names == (
            "shards",
        )
        assert jax.sharding.get_mesh() == mesh


def test_callbacks_and_batches_see_the_mesh_that_was_set():
    seen, mesh = [], guide(explicit)

    class Look(ax.Callback):
        def on_step(self, event):
            seen.append(jax.sharding.get_mesh())

    def batches():
        for _ in range(2):
            yield {name: jax.device_put(x, PartitionSpec("data")) for name, x in BATCH.items()}

    with jax.set_mesh(mesh):
        trainer = PLANS["DDP"](Net(nnx.Rngs(0))).trainer(optax.sgd(0.1), loss, callbacks=[Look()])
        trainer.step(BATCH)
        found = trainer.validate(batches())
        assert trainer.predict(batch["x"] for batch in batches()).shape == (32, 8, 1)
    assert seen == [mesh] and found["loss"] > 0


def test_the_step_of_a_model_that_places_sends_what_that_of_a_plain_one_does():
    def traffic(place):
        trainer = PLANS["FSDP"](Net(nnx.Rngs(0), place, named=False)).trainer(optax.sgd(0.1), loss)
        with jax.set_mesh(guide()):
            return str(ax.explain(trainer, BATCH))

    assert traffic(constrained) == traffic(lambda x: x)


def test_a_function_that_makes_a_model_may_place_values_under_adapters_too():
    adapted = lambda model: PLANS["DDP"](ax.lora(model, rank=2, targets="up/kernel")).trainer(optax.sgd(0.1), loss)
    with jax.set_mesh(guide()):
        trainer = adapted(lambda: Net(nnx.Rngs(0), constrained))
        losses = [float(trainer.step(BATCH)["loss"]) for _ in range(3)]
    plain = adapted(Net(nnx.Rngs(0), named=False))
    np.testing.assert_allclose(losses, [float(plain.step(BATCH)["loss"]) for _ in range(3)], rtol=1e-6)


class OfOneAxis(nnx.Module):
    """Placement over the user's axis `fsdp`, which the plan's mesh has too."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, kernel_metadata={"out_sharding": PartitionSpec(None, "fsdp")}, rngs=rngs)
        self.down = nnx.Linear(16, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + jnp.zeros(x.shape, out_sharding=PartitionSpec("fsdp"))
        up = jax.nn.relu(jax.sharding.reshard(self.up(x, out_sharding=PartitionSpec("fsdp")), PartitionSpec("fsdp")))
        return self.down(up, out_sharding=PartitionSpec("fsdp"))


@pytest.mark.parametrize("plan", [ax.FSDP, ax.DDP, ax.parallelize], ids=["FSDP", "DDP", "parallelize"])
def test_an_explicit_axis_that_the_plans_mesh_names_too(plan):
    def losses(mesh, wrap):
        with jax.set_mesh(mesh):
            trainer = wrap(OfOneAxis(nnx.Rngs(0))).trainer(optax.adamw(5e-2), loss)
            return np.float32([trainer.step(BATCH)["loss"] for _ in range(3)])

    mesh = explicit((8,), ("fsdp",))
    wrap = (lambda model: plan(model, mesh)) if plan is ax.parallelize else plan
    with jax.set_mesh(explicit((1,), ("fsdp",))):
        model = OfOneAxis(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(5e-2), wrt=nnx.Param)
        wanted = []
        for _ in range(3):
            value, grads = nnx.value_and_grad(loss)(model, BATCH)
            optimizer.update(model, grads)
            wanted.append(float(value))
    assert_trees_close(losses(mesh, wrap), np.float32(wanted), "losses")


class Placed(nnx.Module):
    """A block whose layers place what they make, as those of jax-ml/bonsai's models do."""

    def __init__(self):
        self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))

    def __call__(self, x):
        rows = PartitionSpec("fsdp", None)
        return self.down(nnx.gelu(self.up(x, out_sharding=rows)), out_sharding=rows)


def test_a_check_reads_placements_on_one_device():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    with jax.set_mesh(explicit((4,), ("fsdp",))):
        trainer = ax.FSDP(Placed(), ax.make_mesh(fsdp=4, devices=jax.devices()[:4])).trainer(
            optax.sgd(0.1), lambda model, x: jnp.square(model(x)).mean()
        )
        assert trainer.check(x).equal
        trainer.step(x)
        assert trainer.check(x, strict=True).equal
