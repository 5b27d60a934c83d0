"""Optimizers on the parts of parameters that devices hold: equal to one device, or refused by name; a wrong one never passes.

All setups x all plans: benchmarks/truth/optax_setups.py.
"""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import mesh_of
from optax_setups import CLIP, RATE, SETUPS, Net, batches, on_one_device, under
from plan_models import mean_loss

import axonml_jax as ax
from axonml_jax.model.view import Variables
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.placement import bind_plan
from axonml_jax.sharding.layout import from_stored, map_layouts, padded, specs
from axonml_jax.testing.equality import assert_equals_single_device, assert_trees_close
from axonml_jax.training import on_shards as on_shards_module
from axonml_jax.training.compose import rest_of
from axonml_jax.training.optimizer import owners, written

SETUPS["muon, if finite"] = lambda: optax.apply_if_finite(optax.contrib.muon(RATE), 5)

SHARE = [
    ("FSDP", "clipping in the chain, adamw", {"check_vma": True}),
    ("FSDP", "adagrad", {}),  # with a scalar parameter
    ("FSDP", "lamb", {}),
    ("FSDP", "muon", {}),
    ("FSDP", "muon, if finite", {}),
    ("Pipeline", "clipping in multi_transform", {}),
    ("Pipeline", "adafactor", {}),
    ("Pipeline, fsdp inside", "MultiSteps of a clipping chain", {"check_vma": True}),
    ("Pipeline, fsdp inside", "novograd", {}),
    ("Pipeline, fsdp inside", "muon", {"check_vma": True}),
    ("Pipeline, fsdp inside", "adaptive_grad_clip", {}),
    ("Pipeline", "adamw, decay masked", {}),
    ("Pipeline, fsdp inside", "multi_transform", {"check_vma": True}),
]


@pytest.mark.parametrize(("plan", "setup", "options"), SHARE, ids=lambda each: each if isinstance(each, str) else "")
def test_an_optimizer_trains_as_on_one_device(plan, setup, options):
    assert_trees_close(under(plan, SETUPS[setup], **options), on_one_device(SETUPS[setup]), "parameters")


@pytest.mark.parametrize("plan", ["DDP", "FSDP", "Pipeline, fsdp inside"])
def test_an_optimizer_that_takes_no_loss_is_not_given_one(plan):
    sam = optax.chain(optax.clip(0.1), optax.contrib.sam(optax.sgd(RATE), optax.sgd(0.05)))
    plain = optax.GradientTransformation(sam.init, lambda *given: sam.update(*given))
    assert_trees_close(under(plan, lambda: sam), on_one_device(lambda: plain), "parameters")


def test_no_average_is_taken_over_adversarial_steps():
    with pytest.raises(ValueError, match=r"optax.contrib.sam would average .* leave ema out"):
        ax.FSDP(Net(), mesh_of(fsdp=3)).trainer(optax.contrib.sam(optax.sgd(RATE), optax.sgd(0.05)), mean_loss, ema=0.9)


@pytest.mark.parametrize("plan", ["Pipeline", "Pipeline, fsdp inside"])
def test_a_branch_that_one_parameter_chooses_is_chosen_everywhere(plan):
    """As `optax.apply_if_finite` of 17 parameters does: `jnp.stack` joins 16 arrays, and the last belongs to one parameter."""

    def run(updates, state, params=None):
        first = jax.tree.leaves(updates)[0]
        halved = lambda updates: jax.tree.map(lambda g: g / 2, updates)
        return jax.lax.cond(first.ravel()[:1].sum() > 0, halved, lambda updates: updates, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), run)
    make = lambda: optax.chain(tx, optax.scale(-RATE))
    assert_trees_close(under(plan, make), on_one_device(make), "parameters")


# How many square roots a pipeline's update has on its two ranks, of five parameters each: of those that are alike, one.
ALIKE = {
    "inject_hyperparams": 2,
    "adamw, decay masked": 8,  # kernels and biases take turns
    "warmup and cosine": 3,  # and one of the norm that clips
    "clip_by_block_rms, adam": 20,  # each has a norm of its own
}


@pytest.mark.parametrize("setup", ALIKE)
def test_parameters_that_lie_together_and_are_updated_alike_are_updated_as_one(setup):
    own = {"clip_by_block_rms, adam": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.adam(RATE))}
    trainer = ax.Pipeline(Net(), mesh_of(pipe=2), num_microbatches=2).trainer((SETUPS | own)[setup](), mean_loss)
    of_the_metrics = 1
    assert str(trainer.trace(batches()[0]).jaxpr).count(" sqrt ") == ALIKE[setup] + of_the_metrics


SHAPES = {"blocks": {0: (5, 7), 1: (5, 7)}, "bias": (7,), "learning_rate": (), "one": (1,)}


def leaves(seed):
    shapes, keys = (
        jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple)),
        jax.random.split(jax.random.key(seed), 5),
    )
    made = [jax.random.normal(key, shape, jnp.float64) for key, shape in zip(keys, shapes[0], strict=True)]
    return shapes[1].unflatten(made)


def on_shards(make, **options):
    params, mesh = leaves(0), mesh_of(fsdp=3)
    placement = bind_plan(ax.Plan(**options), Variables(params, {}, {}), mesh)
    return params, mesh, placement, rest_of(placement).optimizer(make()).on_shards


def updates_twice(make, **options):
    """Parameters and state after two updates of shards, and what optax makes of them on one device."""
    params, mesh, placement, on = on_shards(make, **options)
    tx, grads = make(), [leaves(1), leaves(2)]
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    given = padded(params, placement.params)
    layouts, state = (placement.params, on.state), padded(tx.init(params), on.state)
    loss, wanted = jnp.ones((), jnp.float64), (params, tx.init(params))
    where = tuple(specs(each) for each in layouts)

    @jax.jit
    def update(params, state, grads):
        run = lambda params, state, grads: on.update(grads, state, params, loss)
        each = (*where, where[0])
        return jax.shard_map(run, mesh=mesh, in_specs=each, out_specs=where, check_vma=placement.plan.check_vma)(
            params, state, grads
        )

    got = (given, state)
    for each in grads:
        got = update(*got, padded(each, placement.params))
        updates, after = optax.with_extra_args_support(tx).update(each, wanted[1], wanted[0], value=loss)
        wanted = optax.apply_updates(wanted[0], updates), after
    return tuple(map_layouts(from_stored, *each) for each in zip(got, layouts, strict=True)), wanted


TAKEN = [
    "muon",
    "adafactor",
    "factored, in a chain",
    "adan",
    "rprop",
    "lars",
    "clipping, masked",
    "MultiSteps that skips",
    "apply_if_finite",
    "inject_hyperparams, sgd",  # and a parameter whose whole path is that of a hyperparameter
]


SETUPS["factored, in a chain"] = lambda: optax.chain(CLIP, optax.adafactor(RATE, min_dim_size_to_factor=4))


@pytest.mark.parametrize("setup", TAKEN)
def test_scalar_parameters_and_sums_over_all_elements_are_no_reason_to_refuse(setup):
    assert_trees_close(*updates_twice(SETUPS[setup], check_vma=True), setup)


def own(change):
    """A transformation of a leaf and its parameter, by hand."""
    run = lambda updates, state, params=None: (jax.tree.map(change, updates, params), state)
    return lambda: optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), run), optax.scale(-RATE))


def crossed(updates, state, params=None):
    """Two parameters of one shape take each other's updates."""
    blocks = updates["blocks"]
    return updates | {"blocks": {0: blocks[1], 1: blocks[0]}}, state


RIGHT = {
    "a mean over elements": lambda g, p: g - g.mean(),
    "the number of elements": lambda g, p: g / g.size,
    "a number counted in ones": lambda g, p: g / jnp.ones_like(p).sum(),
    "a number made of the shape": lambda g, p: g / jnp.prod(jnp.array((1, *p.shape))),
    "a known array of the shape": lambda g, p: g / jnp.asarray(np.array((1, *p.shape)))[-1],
    "a power by shape": lambda g, p: g * (1 + jnp.tanh(p) ** (*p.shape, 1)[0]),
    "a loop by shape": lambda g, p: g * jax.lax.fori_loop(0, (*p.shape, 1)[0], lambda i, x: x * 0.9, 1.0),
    "an order by shape": lambda g, p: g - p * 2 if p.shape and p.shape[0] > 2 else p * 2 - g,
    "a norm of what is flattened": lambda g, p: g / (1 + jnp.linalg.norm(g.ravel())),
    "a largest element of what is flattened": lambda g, p: g / jnp.max(jnp.abs(g).reshape(-1) + 1),
    "a decision by shape": lambda g, p: g * 2 if p.shape and p.shape[0] > 5 else g,
    "a largest element of what is nowhere zero": lambda g, p: g / jnp.max(jnp.abs(g) + 1),
    "a product of all elements with their like": lambda g, p: g * jnp.vdot(p, p),
    "one number spread out": lambda g, p: jnp.full_like(g, 0.1),
    "totals of totals": lambda g, p: g * jnp.sum((g - g.mean()) ** 2),
    # What ranks cannot do with their parts is done to whole arrays, each by the rank that owns it.
    "positions": lambda g, p: g * (jnp.arange(g.size) % 2).reshape(g.shape),
    "order": lambda g, p: jnp.sort(g.ravel()).reshape(g.shape),
    "sums along one dim": lambda g, p: g - g.sum(0) if g.ndim > 1 else g,
    "running sums": lambda g, p: jnp.cumsum(g.ravel()).reshape(g.shape),
    "whole work, a total of it, and its own again": lambda g, p: (
        jnp.cumsum(g - jnp.cumsum(g, -1).mean(), 0) + p if g.ndim else g
    ),
    "one number of whole work": lambda g, p: g * jnp.cumsum(g.ravel())[-1] if g.ndim else g,
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_sums_over_all_elements_counts_each_once_and_padding_never(what):
    assert_trees_close(*updates_twice(own(RIGHT[what])), what)


WRONG = {
    "other parameters": (
        lambda: optax.GradientTransformation(lambda params: optax.EmptyState(), crossed),
        r"\(add of several parameters\)",
    ),
    "noise": (
        lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
        r"add_noise \(of optax.noisy_sgd\).*random numbers",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_parts_cannot_do_is_refused_with_its_name_and_the_facades_remedy(what):
    make, words = WRONG[what]
    with pytest.raises(ValueError, match=words) as caught:
        on_shards(make)
    assert 'ax.FSDP(..., update="whole")' in str(caught.value)


def test_a_step_of_its_own_refuses_too():
    """A `TrainStep` that is built by hand is checked like a trainer's."""
    with pytest.raises(ValueError, match=r"add_noise .* does not act element by element"):
        ax.make_train_step(Net(), WRONG["noise"][0](), mean_loss, mesh_of(fsdp=3))


def test_matrices_of_one_shape_are_shared_out_in_one_exchange_each_way():
    """Of seven equal matrices on three ranks each owns three at most; only the momentum travels, and what is made of it."""
    mesh, rows = mesh_of(fsdp=3), 6
    params = {f"layer{i}": jnp.ones((rows, 4)) for i in range(7)} | {"bias": jnp.ones(4)}
    placement = bind_plan(ax.Plan(), Variables(params, {}, {}), mesh)
    on = rest_of(placement).optimizer(optax.contrib.muon(RATE)).on_shards
    layouts = placement.params, on.state
    state = padded(optax.contrib.muon(RATE).init(params), on.state)
    where, loss = tuple(specs(each) for each in layouts), jnp.ones((), jnp.float64)
    run = lambda params, state: on.update(params, state, params, loss)
    program = jax.make_jaxpr(jax.shard_map(run, mesh=mesh, in_specs=where, out_specs=where, check_vma=False))
    text = str(program(padded(params, placement.params), state))
    sent = re.findall(r":f64\[([\d,]+)\] = all_to_all", text)
    assert sent == [f"3,3,{rows // 3},4"] * 2  # ranks, slots, a rank's part of each
    assert "all_gather" not in text and "psum" not in text


SPLIT = [{"fsdp": 2, "tensor": 2}, {"tensor": 2, "fsdp": 3}, {"data": 2, "fsdp": 2}]


@pytest.mark.parametrize("degrees", SPLIT, ids=str)
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.slow
def test_matrices_that_several_axes_split_are_whole_at_their_owner(degrees, optimizer):
    config = TransformerConfig(
        vocab_size=12, num_layers=2, hidden_size=8, num_heads=4, max_length=6, param_dtype="float64", norm="layernorm",
    )  # fmt: skip
    draw = np.random.default_rng(0).integers(0, 12, (12, 7))
    assert_equals_single_device(
        Transformer(config, rngs=nnx.Rngs(0)), lambda model, batch: ax.WeightedMean(*model.loss(**batch)),
        {"tokens": draw[:, :-1], "targets": draw[:, 1:]}, ax.Plan(), mesh=mesh_of(**degrees), tx=SETUPS[optimizer](), steps=2,
    )  # fmt: skip


def test_all_norms_of_a_round_travel_in_one_small_all_reduce():
    def reductions(make):
        *_, on = on_shards(make)
        totals = [step for step in on.program(jnp.ones((), jnp.float64)).steps if step.total]
        return len(totals), len({step.level for step in totals})

    count = len(jax.tree.leaves(leaves(0)))
    assert reductions(lambda: optax.adamw(RATE)) == (0, 0)
    assert reductions(lambda: optax.chain(CLIP, optax.adamw(RATE))) == (count, 1)
    assert reductions(lambda: optax.chain(CLIP, CLIP, optax.adamw(RATE))) == (2 * count, 2)


OWNED = {"learning_rate": 0.0, "w": {"b": 0.0, "k": 1.0}}
STATES = {
    "hyperparameters": (({"learning_rate": 1.0},), [None]),
    "moments": ({"mu": OWNED, "count": 1}, [None, 0, 1, 2]),
    "a mask": ({"learning_rate": optax.MaskedNode(), "w": {"b": 1.0, "k": optax.MaskedNode()}}, [1]),
    "a mask of a branch": ({"learning_rate": 1.0, "w": optax.MaskedNode()}, [0]),
    "several leaves": (jax.tree.map(lambda x: (x, x), OWNED), [0, 0, 1, 1, 2, 2]),
    "more than parameters": ({**OWNED, "more": 1.0}, [None] * 4),
}


@pytest.mark.parametrize("what", STATES)
def test_state_belongs_to_parameters_by_structure(what):
    state, wanted = STATES[what]
    assert owners(state, OWNED) == wanted


def test_an_optimizer_is_called_by_what_it_is_made_of():
    assert (
        written(SETUPS["apply_if_finite"]())
        == "apply_if_finite(chain(clip_by_global_norm, chain(scale_by_adam, scale)))"
    )
    assert written(optax.masked(CLIP, True)) == "masked(clip_by_global_norm)"


def steps_of(monkeypatch, setup, *, asks_everything):
    """The update that is read of an optimizer's program, as plain values."""
    with monkeypatch.context() as patched:
        if asks_everything:
            patched.setattr(on_shards_module._Reader, "_plainly", lambda self, equation, given: None)
        tx = SETUPS[setup]()
        tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
        try:
            program = on_shards(lambda: tx)[-1].program(jax.ShapeDtypeStruct((), jnp.float64))
        except ValueError as refused:
            return str(refused)
    kind = lambda step: None if step.by_element is None else step.by_element.kind()
    steps = [(s.inputs, s.outputs, s.owner, s.level, s.total, str(s.dtype), kind(s)) for s in program.steps]
    return steps, program.inputs, program.outputs, program.owners, sorted(program.constants)


@pytest.mark.parametrize("setup", sorted(SETUPS.keys() - {"lookahead", "L-BFGS"}))
def test_what_most_operations_are_is_read_as_if_everything_had_been_asked(monkeypatch, setup):
    quick, asked = (steps_of(monkeypatch, setup, asks_everything=asks) for asks in (False, True))
    assert quick == asked


def test_an_optimizers_programs_live_as_long_as_its_trainer():
    _, _, placement, on = on_shards(lambda: optax.adam(0.1))
    program, known = weakref.ref(on.program(jnp.ones(()))), weakref.ref(on)
    del on, placement
    gc.collect()
    assert program() is None and known() is None
