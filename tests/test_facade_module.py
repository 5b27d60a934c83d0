"""What the facade hands out and takes in: the module, parameters, the group; nothing of the user's is ever invalidated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from plan_models import CASES, BatchNormNet, DropoutMLP, mean_loss, regression

import axonml_jax as ax
from axonml_jax.sharding.layout import to_host
from axonml_jax.testing.equality import assert_trees_close

RANKS, BATCH = 4, regression(8)
KINDS = {"nnx": "batch_norm", "linen": "linen_batch_norm"}


@pytest.fixture(scope="module")
def mesh():
    return ax.make_mesh(data=RANKS, devices=jax.devices()[:RANKS])


@pytest.fixture(scope="module", params=KINDS)
def trained(request, mesh):
    """A user's model and variables, what they held before, and the model trained for two steps."""
    case = CASES[KINDS[request.param]]
    model, variables = case.model(), case.params()
    before = to_host(arrays(model, variables))
    ddp = ax.DDP(model, mesh, params=variables)
    trainer = ddp.trainer(optax.adam(1e-2), case.loss)
    for _ in range(2):
        trainer.step(BATCH)
    return model, variables, before, ddp, trainer


def arrays(model, variables):
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))) if variables is None else variables


def test_the_users_model_is_as_it_was(trained):
    model, variables, before, _, _ = trained
    now = to_host(arrays(model, variables))
    assert jax.tree.all(jax.tree.map(np.array_equal, now, before))


def test_a_model_whose_arrays_are_in_place_already_is_copied_too(mesh):
    model = ax.DDP(BatchNormNet(nnx.Rngs(0)), mesh).module
    before = to_host(arrays(model, None))
    ax.DDP(model, mesh).trainer(optax.sgd(0.1), mean_loss).step(BATCH)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays(model, None)))
    assert jax.tree.all(jax.tree.map(np.array_equal, to_host(arrays(model, None)), before))


def test_a_second_facade_starts_from_the_same_values(trained, mesh):
    model, variables, _, ddp, _ = trained
    fresh = [ax.DDP(model, mesh, params=variables) for _ in range(2)]
    fresh[0].trainer(optax.sgd(0.1), mean_loss).step(BATCH)  # one that trains takes nothing from another
    assert_trees_close(fresh[1].state_dict(), ax.DDP(model, params=variables).state_dict(), "variables on other meshes")
    assert any(not np.array_equal(x, ddp.state_dict()[name]) for name, x in fresh[1].state_dict().items())


def test_the_module_is_a_flax_module_with_the_current_values(trained):
    model, variables, _, ddp, _ = trained
    module = ddp.module
    assert type(module) is type(model) and module is not model
    if variables is None:
        assert_trees_close(nnx.to_pure_dict(nnx.state(module, nnx.Param)), ddp.parameters(), "parameters")
        assert_trees_close(module.norm.mean[...], ddp.variables.state["norm"]["mean"], "running means")
        assert_trees_close(module(BATCH["x"]), ddp(BATCH["x"]), "outputs")
        module.last.bias[...] += 1.0
        assert not np.array_equal(module.last.bias[...], ddp.parameters()["last"]["bias"]), (
            "changing it changes nothing"
        )
    else:
        assert isinstance(module, linen.Module)
        assert_trees_close(module.variables["params"], ddp.parameters(), "parameters")
        outputs, _ = model.apply(module.variables, BATCH["x"], mutable=["batch_stats"])
        assert_trees_close(outputs, ddp(BATCH["x"]), "outputs")


def test_what_was_handed_out_survives_later_steps(trained):
    _, variables, _, ddp, trainer = trained
    module, parameters, named = ddp.module, ddp.parameters(), ddp.state_dict()
    held = [arrays(module, variables and module.variables), parameters, named]
    before = jax.tree.map(np.array, to_host(held))
    mine = jax.tree.map(jnp.copy, parameters)
    ddp.set_parameters(mine)
    for _ in range(2):
        trainer.step(BATCH)
    now = [arrays(module, variables and module.variables), parameters, named]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((now, mine)) if isinstance(leaf, jax.Array))
    assert jax.tree.all(jax.tree.map(np.array_equal, to_host(now), before))
    assert jax.tree.all(jax.tree.map(np.array_equal, to_host(mine), before[1]))
    assert not np.array_equal(jax.tree.leaves(ddp.parameters())[0], jax.tree.leaves(before[1])[0])


def test_steps_are_donated_unless_something_was_handed_out(mesh):
    ddp = ax.DDP(DropoutMLP(nnx.Rngs(0)), mesh)
    trainer = ddp.trainer(optax.sgd(0.1), mean_loss)
    for read, survives in (
        (lambda: ddp.variables.params, False),
        (ddp.parameters, True),
        (lambda: ddp.variables.params, False),
    ):
        leaf = jax.tree.leaves(read())[0]
        trainer.step(BATCH)
        assert leaf.is_deleted() is not survives


def test_set_parameters_takes_what_parameters_returns(trained):
    ddp = trained[3]
    wanted = jax.tree.map(lambda x: np.asarray(x) + 1, ddp.parameters())
    ddp.set_parameters(jax.tree.map(lambda x: x.astype(np.float32), wanted))
    for leaf, want in zip(jax.tree.leaves(ddp.parameters()), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == np.float64 and leaf.sharding.is_fully_replicated
        assert [np.allclose(shard.data, want, atol=1e-6) for shard in leaf.addressable_shards] == [True] * RANKS


def test_set_parameters_lists_every_leaf_that_does_not_fit(mesh):
    ddp = ax.DDP(BatchNormNet(nnx.Rngs(0)), mesh)
    before = ddp.state_dict()
    wrong = {"first": {"kernel": np.zeros((5, 5))}, "last": {"bias": np.zeros(3)}, "head": np.zeros(2)}
    with pytest.raises(ValueError, match="parameters\\(\\) returns") as caught:
        ddp.set_parameters(wrong)
    for line in (
        "first/kernel: shape (5, 5), needed (5, 6)",
        "last/kernel: missing",
        "norm/scale: missing",
        "head: unexpected",
    ):
        assert line in str(caught.value)
    assert_trees_close(ddp.state_dict(), before, "variables after a refusal")


def test_a_model_names_its_mesh_its_plan_and_its_group(mesh):
    ddp = ax.DDP(DropoutMLP(nnx.Rngs(0)), mesh)
    assert ddp.mesh is mesh and ddp.process_group.size == RANKS and list(ddp.process_group.ranks) == list(range(RANKS))
    trainer = ddp.trainer(optax.sgd(0.1), lambda model, batch: model(batch).mean(), max_grad_norm=2.0)
    assert repr(trainer) == f"Trainer({ddp!r}, accumulate=1, max_grad_norm=2.0)"
    assert repr(ddp).startswith("DDP(mesh={'data': 4}, plan=Plan(") and ddp.plan.data.bucket_size_mb == 25
    assert jax.tree.structure(ddp.parameters()) == jax.tree.structure(ddp.value_and_grad(mean_loss)(BATCH)[1])


TARGETS = {
    "nothing": lambda: None,
    "a world": lambda: ax.World.mock(8),
    "a group": lambda: ax.ProcessGroup(ax.make_mesh(data=8)),
    "foreign axis names": lambda: jax.make_mesh((8,), ("dp",)),
    "axes of size 1": lambda: ax.make_mesh(data=8, tensor=1, fsdp=1),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_facade_takes_a_mesh_in_any_form(target):
    ddp = ax.DDP(DropoutMLP(nnx.Rngs(0)), TARGETS[target]())
    assert ddp.process_group.size == 8 and ddp.mesh.shape["data"] == 8


def test_the_plans_own_degrees_make_the_mesh():
    model = ax.parallelize(DropoutMLP(nnx.Rngs(0)), plan=ax.Plan(mesh=ax.MeshShape(data=-1)))
    assert dict(model.mesh.shape) == {"data": 8}


def test_a_module_that_was_handed_out_survives_the_next_step(mesh):
    ddp = ax.DDP(DropoutMLP(nnx.Rngs(0)), mesh)
    trainer = ddp.trainer(optax.sgd(0.1), mean_loss)
    trainer.step(BATCH)
    module = ddp.module
    before = to_host(arrays(module, None))
    trainer.step(BATCH)
    assert jax.tree.all(jax.tree.map(np.array_equal, to_host(arrays(module, None)), before))


def test_a_name_that_is_not_there_is_answered_with_one_that_is():
    with pytest.raises(AttributeError) as caught:
        ax.FSDPP  # noqa: B018
    assert caught.value.obj is ax and caught.value.name == "FSDPP"  # from which Python makes "Did you mean: 'FSDP'?"
    with pytest.raises(TypeError, match=r"give rules=\{(.|\n)*ax.auto_parallelize\(model, mesh\), then ax.FSDP"):
        ax.TensorParallel(DropoutMLP(nnx.Rngs(0)), ax.make_mesh(tensor=8))


def test_a_model_and_its_trainer_print_what_was_chosen_and_how_arrays_rest():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = ax.FSDP(Deep(nnx.Rngs(0)), ax.make_mesh(data=2, fsdp=4), remat="full")
    trainer = model.trainer(optax.sgd(0.1), lambda model, batch: model(batch).mean(), max_grad_norm=1.0)
    assert repr(model) == "FSDP(mesh={'data': 2, 'fsdp': 4}, plan=Plan(remat='full'))"  # as it was asked for
    assert model.plan.fsdp.flat is False and model.plan.fsdp.gather_hop == 1  # and as it was decided
    first, split, held, _, head, _, *rows = str(trainer).splitlines()
    assert split == "replicated over data, ZeRO-3"
    assert first.startswith("Trainer(FSDP(mesh=") and first.endswith("accumulate=1, max_grad_norm=1.0)")
    assert held == "216 elements in 6 arrays, of which a device holds 54"
    assert head.split() == ["array", "shape", "dtype", "spec", "of", "a", "device", "count"]
    assert [row.split() for row in rows] == [
        ["blocks/*/bias", "(8,)", "float32", "P('fsdp')", "(2,)", "3"],
        ["blocks/*/kernel", "(8,", "8)", "float32", "P('fsdp')", "(2,", "8)", "3"],
    ]
    assert str(model).splitlines()[1:] == str(trainer).splitlines()[1:]


class Patches(nnx.Module):
    """Cuts images into patches by a convolution as wide as its window, whose outputs are fewer than the window is long."""

    def __init__(self, window):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Conv(3, 8, window, strides=window, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return x


@pytest.mark.parametrize(
    ("window", "facade", "degrees"),
    [
        ((16, 16), lambda model, mesh: ax.FSDP(model, mesh), {"data": 2, "fsdp": 2}),
        ((4, 4, 4), lambda model, mesh: ax.Pipeline(model, mesh, num_microbatches=2), {"data": 2, "pipe": 2}),
    ],
    ids=["fsdp", "pipeline"],
)
def test_the_module_of_a_model_with_wide_convolutions_computes_what_the_model_does(window, facade, degrees):
    """XLA computes wrong convolutions where it partitions a kernel's window over one of two axes: it is given none."""
    x = np.random.default_rng(0).normal(size=(8, *(2 * n for n in window), 3)).astype(np.float32)
    parallel = facade(Patches(window), ax.make_mesh(**degrees, devices=jax.devices()[:4]))
    np.testing.assert_allclose(parallel.module(x), Patches(window)(x), atol=1e-4)
    np.testing.assert_allclose(parallel(x), Patches(window)(x), atol=1e-4)
    assert all(entry is None for entry in parallel.module.embed.kernel[...].sharding.spec[:-2])


class Cache(nnx.Module):
    def __init__(self, rows):
        self.sum, self.calls = nnx.Cache(jnp.zeros((rows, 4))), nnx.Variable(jnp.int32(0))


class Cached(nnx.Module):
    def __init__(self):
        self.linear, self.dropout = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)

    def __call__(self, x, cache, *, writes=True, rngs=None):
        made = cache.sum[...] + self.linear(x)
        if writes:
            cache.sum[...], cache.calls[...] = made, cache.calls[...] + 1
        return made if rngs is None else self.dropout(made, rngs=rngs)


def test_a_call_may_not_write_into_what_it_is_given(mesh):
    """What it writes would be lost: a cache would stay empty, and a stream would draw the same again."""
    ddp, x = ax.DDP(Cached(), mesh), np.ones((8, 4), np.float32)
    with pytest.raises(ValueError, match=r"writes into what it is given: cache, of class Cache \(calls, sum\)"):
        ddp(x, Cache(8))
    with pytest.raises(ValueError, match=r"given: rngs/default/count, of class RngCount \(its value\)"):
        ddp(x, Cache(8), writes=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(ddp(x, Cache(8), writes=False), Cached()(x, Cache(8)), atol=1e-6)
    trainer = ddp.trainer(optax.sgd(0.1), lambda model, x: model(x, Cache(len(x))).mean())
    trainer.predict([x], lambda model, x: model(x, Cache(len(x))))  # a cache of its own
    with pytest.raises(ValueError, match="writes into what it is given: x/cache"):
        trainer.predict([{"x": x, "cache": Cache(8)}], lambda model, batch: model(batch["x"], batch["cache"]))
