"""An update of what rests in host memory goes through device memory in pieces and slices, and changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import mesh_of
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.parallel.placement import slices
from axonml_jax.parallel.plan import CPUOffload
from axonml_jax.sharding.layout import to_host_memory
from axonml_jax.training import streamed as room
from axonml_jax.training.optimizer import apply

ADAMW = optax.adamw(1e-2, weight_decay=0.1)
MIXING = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def trained(name, update, check_vma, offload="none", steps=3):
    case, tx = CASES[name], ADAMW if update == "shards" else MIXING
    plan = ax.Plan(fsdp=ax.Shard(), update=update, check_vma=check_vma, offload=offload)
    trainer = ax.parallelize(case.model(), mesh_of(data=2, fsdp=3), plan).trainer(tx, case.loss, max_nonfinite=2)
    metrics = [trainer.step(case.batch(12, seed)) for seed in range(steps)]
    return trainer, jax.tree.map(np.asarray, (trainer.model.state_dict(), trainer.state.opt_state, metrics))


@functools.cache
def on_the_device(*case):
    return trained(*case)[1]


@pytest.mark.parametrize(
    ("name", "update", "offload", "check_vma"),
    [
        ("scanned", "shards", "params", False),
        ("scanned", "shards", "optimizer_states", True),
        ("scanned", "shards", "full", False),
        ("scanned", "shards", "full", True),
        ("tied", "whole", "optimizer_states", False),
        ("tied", "whole", "full", True),
    ],
)
def test_no_bit_changes_where_every_leaf_and_slice_goes_apart(monkeypatch, name, update, offload, check_vma):
    monkeypatch.setattr(room, "PIECE", 16)
    trainer, found = trained(name, update, check_vma, offload)
    jax.tree.map(np.testing.assert_array_equal, found, on_the_device(name, update, check_vma))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(trainer.state.opt_state) if leaf.ndim}
    assert kinds == {"pinned_host" if CPUOffload(offload).optimizer else "device"}
    program = str(trainer.train_step.trace(trainer.state, CASES[name].batch(12)).jaxpr)
    assert ("dynamic_update_slice" in program) == (name == "scanned")


def program_of(tx, shape, offload="optimizer_states", leaves=5):
    """An update of so many leaves of a shape as a traced program."""
    params = {f"w{i}": jnp.ones(shape) for i in range(leaves)}

    def run(params, state):
        kept = CPUOffload(offload)
        held = to_host_memory(params, kept.gradients), to_host_memory(params, kept.params), to_host_memory(state)
        update = lambda grads, params, state: (*apply(tx, grads, state, params, jnp.zeros(())), ())
        return room.streamed(update, held, kept, jnp.zeros(()))

    return jax.make_jaxpr(run)(params, tx.init(params)).jaxpr


def waits(jaxpr):
    """How many arrays in host memory each piece waits for."""
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    return [sum("<host>" in str(var.aval) for var in eqn.invars) for eqn in barriers]


def test_a_piece_waits_until_the_piece_before_the_last_is_stored(monkeypatch):
    assert waits(program_of(ADAMW, (16, 128))) == [0]  # small leaves go together
    monkeypatch.setattr(room, "PIECE", 2**13)
    assert waits(program_of(ADAMW, (16, 128))) == [0, 0, 2, 2, 2]  # mu and nu of one leaf
    assert waits(program_of(ADAMW, (16, 128), "full")) == [0, 0, 3, 3, 3]  # the parameter too
    assert waits(program_of(MIXING, (16, 128))) == [0, 0, 2, 2, 2]  # a norm of gradients, which are not on the host
    assert waits(program_of(MIXING, (16, 128), "full")) == [0]


def by_layer(u):
    return u * (0.5 ** jnp.arange(u.shape[0], dtype=u.dtype)).reshape(-1, *[1] * (u.ndim - 1))


TABLE = np.linspace(0, 1, 4 * 16 * 128).reshape(4, 16, 128)
SLICED = {
    "adamw": (lambda: ADAMW, 5),
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9), 5),
    "nothing on the host": (lambda: optax.sgd(0.1), 0),
    "two dtypes": (lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16), 5),
    "clipped": (lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 0),
    "lamb": (lambda: optax.lamb(1e-2), 0),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), 0),
    "noisy": (lambda: optax.noisy_sgd(1e-2, key=7), 0),
    "several steps": (lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), 0),
    "rates by layer": (
        lambda: optax.chain(optax.adam(1e-2), optax.stateless_with_tree_map(lambda u, p: by_layer(u))),
        0,
    ),
    "rates by shape": (
        lambda: optax.chain(optax.adam(1e-2), optax.stateless_with_tree_map(lambda u, p: u / u.shape[0])),
        0,
    ),
    "rates by the product of sizes": (
        lambda: optax.chain(
            optax.adam(1e-2), optax.stateless_with_tree_map(lambda u, p: u / jnp.prod(jnp.array(u.shape)))
        ),
        0,
    ),
    "a table": (lambda: optax.chain(optax.adam(1e-2), optax.stateless_with_tree_map(lambda u, p: u * TABLE)), 0),
    "set to zero": (
        lambda: optax.GradientTransformation(
            lambda params: jax.tree.map(jnp.zeros_like, params),
            lambda u, state, params=None: (
                jax.tree.map(lambda a, b: a + b, u, state),
                jax.tree.map(jnp.zeros_like, u),
            ),
        ),
        0,
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_slices_are_updated_alone_only_where_that_is_the_same(monkeypatch, name):
    monkeypatch.setattr(room, "PIECE", 2**12)
    tx, loops = SLICED[name][0](), SLICED[name][1]
    params = {f"w{i}": jnp.linspace(-1, 1, 4 * 16 * 128).reshape(4, 16, 128) * (i + 1) for i in range(5)}
    state, kept = tx.init(params), CPUOffload.OPTIMIZER_STATES
    update = lambda grads, params, state: (*apply(tx, grads, state, params, jnp.zeros(())), ())

    def run(params, state):
        return room.streamed(update, (params, params, to_host_memory(state)), kept, jnp.zeros(()))

    found = [eqn.primitive.name for eqn in jax.make_jaxpr(run)(params, state).jaxpr.eqns]
    assert found.count("scan") + found.count("while") == loops
    wanted = jax.jit(update)(params, params, state)
    numbers = lambda tree: [np.asarray(x, float) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.number)]
    for ours, theirs in zip(numbers(jax.jit(run)(params, state)), numbers(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def test_what_an_update_prints_is_printed(capfd):
    def update(grads, params, state):
        jax.debug.print("norm {}", state["m"][0, 0])
        return params, jax.tree.map(lambda m, g: m + g, state, grads), ()

    params = {"m": jnp.ones((8, 4))}
    run = lambda p: room.streamed(update, (p, p, to_host_memory(p)), CPUOffload.OPTIMIZER_STATES, jnp.zeros(()))
    jax.block_until_ready(jax.jit(run)(params))
    jax.effects_barrier()
    assert "norm 1.0" in capfd.readouterr().out


@pytest.mark.parametrize("offload", ["params", "full"])
@pytest.mark.parametrize("sync", ["overlapped", "synchronous"])
def test_copies_of_a_model_are_offloaded_too(offload, sync):
    def losses(**plan):
        case, plan = CASES["dropout"], ax.Plan(data=ax.Replicate(sync_strategy=sync), **plan)
        trainer = ax.parallelize(case.model(), mesh_of(data=2), plan).trainer(ADAMW, case.loss)
        return [float(trainer.step(case.batch(8, seed))["loss"]) for seed in range(3)]

    np.testing.assert_allclose(losses(offload=offload), losses(), rtol=1e-9)


def test_slices_begin_with_a_tile_and_are_no_larger_than_asked():
    count = lambda shape, size: slices(shape, 4, size)
    assert count((), 1) == count((64, 128), 4 * 64 * 128) == 1
    assert (count((32, 5, 3), 4 * 15), count((32, 5, 3), 4 * 40), count((7, 5, 3), 4 * 30)) == (32, 16, 7)
    assert (count((64, 128), 1), count((60, 128), 1), count((4096,), 1), count((4000,), 1)) == (8, 1, 4, 1)
    assert count((128256 * 512,), 2**22) == 64  # at once, however long
