"""An update of what rests in host memory goes through device memory in pieces and slices, and changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fsdp_plans import mesh_of
from plan_models import CASES

import axonml_jax as ax
from axonml_jax.parallel.loading import slices
from axonml_jax.parallel.offload import CPUOffload
from axonml_jax.sharding.memory import to_host_memory
from axonml_jax.training import streamed as room
from axonml_jax.training.update import apply

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


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("offload", ["params", "optimizer_states", "full"])
@pytest.mark.parametrize(("name", "update"), [("scanned", "shards"), ("tied", "whole")])
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


@pytest.mark.parametrize(
    ("tx", "loops"),
    [
        (ADAMW, 5),
        (optax.sgd(0.1, momentum=0.9), 5),
        (MIXING, 0),
        (optax.lamb(1e-2), 0),
        (optax.noisy_sgd(1e-2, key=7), 0),
    ],
    ids=["adamw", "momentum", "clipped", "lamb", "noisy"],
)
def test_slices_are_updated_alone_only_where_that_is_the_same(monkeypatch, tx, loops):
    monkeypatch.setattr(room, "PIECE", 2**12)
    found = [eqn.primitive.name for eqn in program_of(tx, (4, 16, 128)).eqns]
    assert found.count("scan") + found.count("while") == loops


def test_slices_begin_with_a_tile_and_are_no_larger_than_asked():
    count = lambda shape, size: slices(jax.ShapeDtypeStruct(shape, jnp.float32), size)
    assert count((), 1) == count((64, 128), 4 * 64 * 128) == 1
    assert (count((32, 5, 3), 4 * 15), count((32, 5, 3), 4 * 40), count((7, 5, 3), 4 * 30)) == (32, 16, 7)
    assert (count((64, 128), 1), count((60, 128), 1), count((4096,), 1), count((4000,), 1)) == (8, 1, 4, 1)
