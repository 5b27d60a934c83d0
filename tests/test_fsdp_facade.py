"""The FSDP facade: strategies, offload, float16, clipping, whole parameters, memory by formula, refusals."""

import dataclasses
import gc
import math
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import CASES, DropoutMLP, TiedNet, mean_loss, regression, tokens

import axonml_jax as ax
from axonml_jax.facade import trainer as trainer_module
from axonml_jax.strategies.strategy import units
from axonml_jax.testing.equality import assert_trees_close
from axonml_jax.training.nonfinite import LossScale

RANKS = 3


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(fsdp=RANKS)


def trained(model, loss, batches, **options):
    trainer = model.trainer(optax.adamw(1e-2), loss, **options)
    metrics = [trainer.step(batch) for batch in batches]
    return model.state_dict(), metrics, trainer


@pytest.fixture(scope="module")
def without_offload(mesh):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh)
    return trained(model, mean_loss, [regression(12, seed) for seed in range(3)], max_grad_norm=0.1)[0]


@pytest.mark.parametrize("offload", [each for each in ax.CPUOffload if each is not ax.CPUOffload.NONE])
def test_offload_moves_what_it_says_and_changes_no_bit(mesh, offload, without_offload):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh, cpu_offload=offload)
    batches = [regression(12, seed) for seed in range(3)]
    values, _, trainer = trained(model, mean_loss, batches, max_grad_norm=0.1)
    assert all(np.array_equal(values[name], without_offload[name]) for name in without_offload)
    assert kinds(model.variables.params) == {"pinned_host" if offload.params else "device"}
    assert kinds(trainer.state.opt_state) == {"pinned_host" if offload.optimizer else "device"}
    # Moved arrays do not force a recompile; jax 0.10 keeps two entries for one compilation of a program with host arrays.
    assert trainer.train_step._compiled.compilations <= (2 if jax.__version__.startswith("0.10") else 1)
    estimate = model.memory_estimate()
    rests = estimate.param_bytes * offload.params + estimate.optim_bytes * offload.optimizer
    assert estimate.host_bytes == rests + estimate.grad_bytes * offload.gradients


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


PLACES = {"fsdp": ({"fsdp": RANKS}, {}), "pipe": ({"pipe": 2}, {"pipe": ax.Pipelined(num_microbatches=2)})}


def offloading(place, offload):
    degrees, options = PLACES[place]
    layers = [nnx.Linear(5, size, rngs=nnx.Rngs(size), param_dtype=jnp.float64) for size in (5, 5, 3)]
    return ax.parallelize(nnx.Sequential(*layers), mesh_of(degrees), ax.Plan(offload=offload, **options))


def by_hand(model):
    """Values after two steps of AdamW, then one of SGD, in loops of one's own, and where parameters rested after each."""
    tx, rests = optax.adamw(1e-2), []
    opt_state, differentiated = tx.init(model.parameters()), model.value_and_grad(mean_loss)
    for seed in range(2):
        grads, _ = model.clip_grad_norm(differentiated(regression(12, seed))[1], 0.1)
        updates, opt_state = tx.update(grads, opt_state, model.parameters())
        model.set_parameters(optax.apply_updates(model.parameters(), updates))
        rests.append(kinds(model.variables.params))
    _, grads = differentiated(regression(12, 2))
    model.set_parameters(jax.tree.map(lambda p, g: np.asarray(p - 0.1 * g), model.parameters(), grads))
    return model.state_dict(), [*rests, kinds(model.variables.params)]


@pytest.mark.parametrize("offload", [each for each in ax.CPUOffload if each is not ax.CPUOffload.NONE])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_handed_out_is_on_the_device_and_goes_back_to_where_it_rests(place, offload):
    values, rests = by_hand(model := offloading(place, offload))
    assert_trees_close(values, by_hand(offloading(place, ax.CPUOffload.NONE))[0], "parameters")
    assert rests == [{"pinned_host" if offload.params else "device"}] * 3
    x = regression(12)["x"]
    assert_trees_close(nnx.jit(lambda module, x: module(x))(model.module, x), model.eval()(x), "outputs of the module")
    trainer = model.trainer(optax.contrib.schedule_free_adamw(1e-2), mean_loss)
    trainer.step(regression(12))
    averaged = optax.contrib.schedule_free_eval_params(trainer.opt_state, model.parameters())
    assert kinds(averaged) == kinds(model.module) == {"device"}
    assert kinds(trainer.state.opt_state) == {"pinned_host" if offload.optimizer else "device"}


def test_changed_whole_parameters_go_back_to_host_memory(mesh):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh, cpu_offload="params")
    with model.whole_parameters() as params:
        params["unused"] = params["unused"] + 1
    assert kinds(model.variables.params) == {"pinned_host"} and model.state_dict()["unused"].tolist() == [2.0] * 3


@pytest.mark.parametrize("offload", [ax.CPUOffload.NONE, ax.CPUOffload.PARAMS])
def test_sync_parameters_joins_copies_and_leaves_shards_alone(offload):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), ax.make_mesh(data=2, fsdp=4), cpu_offload=offload)
    before = model.state_dict()
    kinds = [leaf.sharding for leaf in jax.tree.leaves(model.variables)]
    model.sync_parameters()
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    assert [leaf.sharding for leaf in jax.tree.leaves(model.variables)] == kinds


def test_float16_skips_an_overflow_halves_the_scale_and_then_learns(mesh, float16):
    batch = jax.tree.map(np.float32, regression(12))
    model = ax.FSDP(
        CASES["linen_dropout"].model(), mesh, params=CASES["linen_dropout"].params(), mixed_precision="fp16"
    )
    before = model.state_dict()
    trainer = model.trainer(optax.sgd(0.05), lambda model, batch: 3e3 * jnp.mean(model(batch["x"]) ** 2), accumulate=2)
    first = trainer.step(batch)
    assert not np.isfinite(first["grad_norm"]) and first["loss_scale"] == 2.0**16
    assert first["skipped"] == 1, "of this step, and once an update, not once a microbatch"
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    steps = 1
    while not np.isfinite((metrics := trainer.step(batch))["grad_norm"]):
        steps += 1
        assert metrics["skipped"] == steps
    assert metrics["skipped"] == steps
    scale = trainer.state.loss_scale
    assert scale.scale == 2.0 ** (16 - steps) and scale.skipped == steps and scale.clean == 1
    assert not all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())


def scaled_by_hand(model, loss, batches, rate):
    """Parameters of float16 after steps of SGD on one device, the loss times 2^16 while it is differentiated."""
    view, params = nnx.split(model)
    scaled = jax.grad(lambda params, batch: loss(nnx.merge(view, params), batch) * 2.0**16)
    small = lambda g: (g.astype(jnp.float32) / 2**16).astype(jnp.float16)
    for batch in batches:
        params = jax.tree.map(lambda p, g: p - jnp.float16(rate) * small(g), params, scaled(params, batch))
    return nnx.to_pure_dict(params)


@pytest.mark.parametrize("precision", [ax.Precision(param="float16"), ax.Precision(reduce="float16")], ids=["", "sent"])
@pytest.mark.parametrize("degrees", [{"data": 2}, {"fsdp": 2}, {"pipe": 2}], ids=str)
def test_gradients_of_float16_are_unscaled_as_in_a_loop_that_scales_its_loss(degrees, precision, float16):
    """The scale itself, 2^16, is no number of float16."""
    precision = dataclasses.replace(precision, compute="float16")
    plan = ax.Plan(precision=precision, pipe=ax.Pipelined(num_microbatches=1) if "pipe" in degrees else None)
    make = lambda: nnx.Sequential(*(nnx.Linear(5, 5, rngs=nnx.Rngs(i), param_dtype=jnp.float16) for i in range(2)))
    loss = lambda model, batch: 1e-2 * jnp.mean(model(batch["x"].astype(jnp.float16)).astype(jnp.float32) ** 2)
    batches = [{"x": np.float32(0.3 * regression(8, seed)["x"])} for seed in range(3)]
    model = ax.parallelize(make(), mesh_of(degrees), plan)
    trainer = model.trainer(optax.sgd(30.0), loss)
    assert [int(trainer.step(batch)["skipped"]) for batch in batches] == [0, 0, 0]
    assert_trees_close(
        model.state_dict(), scaled_by_hand(make(), loss, batches, 30.0), "parameters", low_precision=True
    )


def test_the_loss_scale_doubles_after_200_clean_steps():
    scale = LossScale.first()
    for _ in range(199):
        scale = scale.after(jnp.bool_(True))
    assert (scale.scale, scale.clean) == (2.0**16, 199)
    grown = scale.after(jnp.bool_(True))
    assert (grown.scale, grown.clean) == (2.0**17, 0)
    halved = scale.after(jnp.bool_(False))
    assert (halved.scale, halved.clean, halved.skipped) == (2.0**15, 0, 1)


def test_the_loss_scale_never_falls_below_one():
    """Below it gradients would be scaled down, and a run of overflows would end at a scale of zero, which divides them."""
    scale, found = LossScale(jnp.float32(4), jnp.int32(5), jnp.int32(0)), []
    for _ in range(4):
        scale = scale.after(jnp.bool_(False))
        found.append(float(scale.scale))
    assert found == [2.0, 1.0, 1.0, 1.0] and scale.skipped == 4


@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
def test_clip_grad_norm_is_the_norm_over_everything(mesh, p, strategy):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh, sharding_strategy=strategy)
    _, grads = model.value_and_grad(mean_loss)(regression(12))
    clipped, norm = model.clip_grad_norm(grads, 0.01, p)
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])
    wanted = np.linalg.norm(flat(grads), p)
    np.testing.assert_allclose(norm, wanted, rtol=1e-12)
    np.testing.assert_allclose(flat(clipped), flat(grads) * (0.01 / (wanted + 1e-6)), rtol=1e-9)
    trainer = model.trainer(optax.sgd(0.1), mean_loss, norm_type=p)
    assert trainer.step(regression(12))["grad_norm"].shape == ()


def test_norms_that_are_not_finite_are_named(mesh):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh)
    grads = jax.tree.map(lambda x: x * np.nan, model.parameters())
    assert np.isnan(model.clip_grad_norm(grads, 1.0)[1])
    with pytest.raises(ValueError, match=r"2\.0-norm of the gradients is nan"):
        model.clip_grad_norm(grads, 1.0, error_if_nonfinite=True)
    for wrong in (0, jnp.float32(0), "1", jnp.ones(1), math.nan):
        with pytest.raises(ValueError, match=r"max_norm=.* must be positive numbers"):
            model.clip_grad_norm(grads, wrong)


@pytest.mark.parametrize("scalar", [jnp.float32, np.float32, np.array])
def test_norms_may_be_concrete_scalars(mesh, scalar):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh)
    grads = jax.tree.map(jnp.ones_like, model.parameters())
    found, wanted = model.clip_grad_norm(grads, scalar(0.5), scalar(2.0)), model.clip_grad_norm(grads, 0.5)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


USES = {
    "value_and_grad": (
        lambda trainer, fun: trainer.model.value_and_grad(fun)(regression(12))[0],
        lambda *given: mean_loss(*given)[0],
    ),
    "predict": (lambda trainer, fun: trainer.predict([regression(12)], fun), lambda model, batch: model(batch["x"])),
}


@pytest.mark.parametrize("call", USES)
def test_programs_of_functions_are_dropped_but_for_those_used_last(call, mesh, monkeypatch, caplog):
    monkeypatch.setattr(trainer_module, "_KEPT", 2, raising=False)
    model, (use, fun) = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh), USES[call]
    model.eval()
    trainer = model.trainer(optax.sgd(0.1), mean_loss)
    functions = [lambda *given, by=by: (by + 1) * fun(*given) for by in range(4)]
    known, wanted = list(map(weakref.ref, functions)), use(trainer, functions[0])
    while functions:
        np.testing.assert_allclose(use(trainer, functions[0]), (5 - len(functions)) * wanted, rtol=1e-6)
        del functions[0]
    gc.collect()
    assert [function() is not None for function in known] == [False, False, True, True]
    [told] = [each for each in caplog.messages if "define it once" in each]
    assert call in told


def test_whole_parameters_are_given_and_changes_written_back(mesh):
    model = ax.FSDP(DropoutMLP(nnx.Rngs(0)), mesh)
    before = model.state_dict()
    whole = model.gather_parameters()
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(whole))
    assert_trees_close(whole["first"]["kernel"], before["first/kernel"], "gathered")
    with model.whole_parameters() as params:
        params["scale"] = params["scale"] + 1
    after = model.state_dict()
    assert {name for name in after if not np.array_equal(after[name], before[name])} == {"scale"}
    with pytest.raises(KeyError), model.whole_parameters() as params:
        params["scale"] = params["scale"] + 1
        raise KeyError
    assert np.array_equal(model.state_dict()["scale"], after["scale"])
    model.reshard_parameters(whole)
    assert np.array_equal(model.state_dict()["scale"], before["scale"])
    rests = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(model.variables.params)]
    assert sum(rests) == model.memory_estimate().param_bytes


def test_gradients_and_optax_by_hand_equal_the_fused_step(mesh):
    tx = optax.adamw(1e-2)
    fused, by_hand = (ax.FSDP(TiedNet(nnx.Rngs(0)), mesh) for _ in range(2))
    trainer, loss = fused.trainer(tx, CASES["tied"].loss), CASES["tied"].loss
    opt_state = tx.init(by_hand.parameters())
    for seed in range(2):
        trainer.step(tokens(12, seed))
        _, grads = by_hand.value_and_grad(loss)(tokens(12, seed))
        updates, opt_state = tx.update(grads, opt_state, by_hand.parameters())
        by_hand.set_parameters(optax.apply_updates(by_hand.parameters(), updates))
    assert_trees_close(by_hand.state_dict(), fused.state_dict(), "parameters")


def test_no_sync_gives_each_ranks_own_gradients_and_syncing_them_the_mean(mesh):
    model, loss, batch = (
        ax.FSDP(TiedNet(nnx.Rngs(0)), mesh),
        CASES["tied"].loss,
        tokens(12) | {"keep": np.ones((12, 4), bool)},
    )
    _, wanted = model.value_and_grad(loss)(batch)
    with model.no_sync():
        _, own = model.value_and_grad(loss)(batch)
    assert jax.tree.leaves(own)[0].shape[0] == RANKS
    assert_trees_close(model.sync_gradients(own), wanted, "synchronized gradients")


def test_forward_evaluation_and_state_dicts_equal_ddps(mesh):
    case, batch = CASES["tied"], tokens(12)
    fsdp = ax.FSDP(case.model(), mesh).eval()
    ddp = ax.DDP(case.model(), mesh_of(data=RANKS)).eval()
    assert_trees_close(fsdp(batch["x"]), ddp(batch["x"]), "outputs")
    metrics = [model.trainer(optax.sgd(0.1), case.loss).evaluate(batch) for model in (fsdp, ddp)]
    assert_trees_close(*metrics, "metrics")
    assert_trees_close(fsdp.state_dict(), ddp.state_dict(), "state_dict")
    assert_trees_close(fsdp.module(batch["x"]), ddp(batch["x"]), "the module's outputs")
    fsdp.load_state_dict({name: value + 1 for name, value in ddp.state_dict().items()})
    assert_trees_close(fsdp.state_dict(), {n: v + 1 for n, v in ddp.state_dict().items()}, "loaded")


def test_a_linen_models_variables_may_be_made_by_a_function(mesh):
    model = linen.Dense(5)
    init = lambda: model.init(jax.random.key(0), jnp.ones((2, 7)))
    made, given = ax.FSDP(model, mesh, params=init), ax.FSDP(model, mesh, params=init())
    assert_trees_close(made.state_dict(), given.state_dict(), "variables")


def test_memory_estimates_are_the_papers():
    model = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    size = {
        name: ax.FSDP(model, mesh_of(fsdp=8), sharding_strategy=name).memory_estimate() for name in ax.ShardingStrategy
    }
    whole = 4 * 64 * 64
    for name, stats in size.items():
        shard = 1 if name is ax.ShardingStrategy.NO_SHARD else 8
        assert (stats.param_bytes, stats.optim_bytes) == (whole // shard, 2 * whole // shard)
        assert stats.total_params == 64 * 64 and stats.replicated_bytes == 4 * whole
    assert size[ax.ShardingStrategy.NO_SHARD].memory_savings == 0
    assert 0.3 < size[ax.ShardingStrategy.FULL_SHARD].memory_savings < 1


def test_the_mesh_is_named_for_what_it_lacks():
    with pytest.raises(ValueError, match=r"axis 'fsdp', which \{'data': 2.*\} lacks: use ax.make_mesh\(fsdp=-1\)"):
        ax.FSDP(TiedNet(nnx.Rngs(0)), jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    hybrid = ax.FSDP(TiedNet(nnx.Rngs(0)), sharding_strategy=ax.ShardingStrategy.HYBRID_SHARD)
    assert dict(hybrid.mesh.shape)["fsdp"] == 8 and hybrid.strategy is ax.ShardingStrategy.HYBRID_SHARD


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sharding_strategy": "zero4"}, "sharding_strategy='zero4'"),
        ({"cpu_offload": "gpu"}, "offload='gpu'"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": 1, "sharding_strategy": "shard_grad_op"}, "prefetch=1 acts with stage=3"),
        ({"prefetch": 1, "sharding_strategy": "no_shard"}, "has no effect with sharding_strategy=no_shard"),
        ({"wrap": "^nothing$"}, r"matches no module.*blocks/1"),
        ({"wrap": linen.Dense}, r"matches no module"),
        ({"update": "slices"}, "update='slices'"),
        ({"remat": "all"}, "remat='all'"),
        ({"mixed_precision": "bf16", "precision": "bf16"}, "two names"),
    ],
)
def test_wrong_options_are_refused_by_name(mesh, options, said):
    with pytest.raises(ValueError, match=said):
        ax.FSDP(TiedNet(nnx.Rngs(0)), mesh, **options)


def test_the_time_to_find_units_grows_as_the_number_of_leaves_does():
    def seconds(experts):
        names = [
            f"blocks/{i}/experts/{j}/{k}/w" for i in range(32) for j in range(experts) for k in ("up", "down", "gate")
        ]
        start = time.process_time()
        assert len(units(names, None, {})) == 32
        return time.process_time() - start

    few, many = (min(seconds(experts) for _ in range(3)) for experts in (16, 64))
    assert many < 8 * few  # four times the leaves: 4; with a pass over all leaves for every module 16


def test_module_types_and_patterns_name_units(mesh):
    for wrap in (nnx.Linear, "blocks/.*", [nnx.Embed, "blocks/1"]):
        model = ax.FSDP(TiedNet(nnx.Rngs(0)), mesh, wrap=wrap)
        assert jnp.isfinite(model.value_and_grad(CASES["tied"].loss)(tokens(12))[0][0])


class Scaled(nnx.Module):
    def __init__(self):
        self.layer, self.scale = nnx.Linear(5, 3, rngs=nnx.Rngs(0)), nnx.Param(jnp.float32(0.5))

    def __call__(self, x):
        return self.scale[...] * self.layer(x)


def test_own_gradients_of_scalars_under_fsdp(mesh):
    """A scalar rests as one element per rank, and its gradient is a number of each rank."""
    model, batch = ax.FSDP(Scaled(), mesh), regression(12)
    _, synced = model.value_and_grad(mean_loss)(batch)
    with model.no_sync():
        _, own = model.value_and_grad(mean_loss)(batch)
    assert own["scale"].shape == (RANKS,) and own["layer"]["kernel"].shape == (RANKS, 5, 3)
    assert_trees_close(model.sync_gradients(own), synced, "gradients")
