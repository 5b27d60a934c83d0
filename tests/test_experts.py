"""Mixture-of-experts layers under plans train as on one device: outputs, router values, gradients, state, parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_models import EXPERTS, LENGTH, WIDTH, Net, batch_of, grad_of, loss_fn, mean_loss
from flax import nnx
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.testing.equality import assert_equals_single_device

PLANS = {
    "expert": ({"expert": 4}, {}),
    "expert and data": ({"expert": 2, "data": 2}, {"accumulate": 2}),
    "fsdp inside groups": ({"expert": 2, "fsdp": 2}, {"accumulate": 2, "remat": "full"}),
    "zero-2, offloaded": ({"expert": 2, "fsdp": 2}, {"fsdp": ax.Shard(stage=2), "offload": ax.CPUOffload("full")}),
    "tensor inside experts": ({"expert": 2, "tensor": 2}, {}),
    "context": ({"expert": 2, "context": 2}, {}),
}


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("name", PLANS)
def test_plans_train_as_one_device(name, check_vma):
    degrees, options = PLANS[name]
    rows = 2 * math.prod(size for axis, size in degrees.items() if axis not in ("tensor", "context"))
    plan = ax.Plan(check_vma=check_vma, **options)
    batches = [batch_of(rows * plan.microbatches, seed, masked=True) for seed in range(2)]
    assert_equals_single_device(Net(), loss_fn, batches, plan, mesh=mesh_of(degrees), max_grad_norm=0.5)


def assert_gradients_equal(model, degrees, batch, loss=loss_fn, plan=None):
    """Loss and gradients of the whole batch on one device."""
    wanted, grads = grad_of(model, loss, batch)
    found, ours = ax.parallelize(model, mesh_of(degrees), plan or ax.Plan()).value_and_grad(loss)(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    flat = lambda tree: dict(jax.tree_util.tree_flatten_with_path(tree)[0])
    ours, grads = flat(nnx.to_pure_dict(ours) if isinstance(ours, nnx.State) else ours), flat(nnx.to_pure_dict(grads))
    assert ours.keys() == grads.keys()
    for path, grad in grads.items():
        np.testing.assert_allclose(ours[path], grad, rtol=1e-8, atol=1e-11, err_msg=str(path))


def skewed(model, to=0):
    """A model whose tokens nearly all choose one expert first."""
    for layer in model.layers:
        kernel = np.array(layer.router.kernel[...])
        kernel[:, to] = 0
        layer.router.kernel[...] = jnp.asarray(kernel)
        layer.router.bias[...] = jnp.zeros(EXPERTS).at[to].set(9.0)
    return model


CELLS = {
    "rounds, softmax, 2": ("rounds", "softmax", {"expert": 2}),
    "rounds, switch, 8": ("rounds", "switch", {"expert": 8}),
    "rounds, sigmoid, 4 and data": ("rounds", "sigmoid", {"expert": 4, "data": 2}),
    "rounds, all, 4": ("rounds", "all", {"expert": 4}),
    "gather, softmax, 4": ("gather", "softmax", {"expert": 4}),
    "gather, sigmoid, 8": ("gather", "sigmoid", {"expert": 8}),
    "gather, all, 2 and tensor": ("gather", "all", {"expert": 2, "tensor": 2}),
    "rounds, sigmoid, 2, tensor, context": ("rounds", "sigmoid", {"expert": 2, "context": 2, "tensor": 2}),
    "rounds, softmax, 2, data, context": ("rounds", "softmax", {"expert": 2, "data": 2, "context": 2}),
}


@pytest.mark.parametrize("name", CELLS)
def test_dispatches_and_routers_have_one_devices_gradients(name):
    dispatch, router, degrees = CELLS[name]
    rows = 2 * math.prod(size for axis, size in degrees.items() if axis not in ("tensor", "context"))
    options = {"use_bias": True, "router_bias": True, "shared_size": 4}
    model = Net(router, layers=1, dispatch=dispatch, **options)
    assert_gradients_equal(model, degrees, batch_of(rows, masked=True))


@pytest.mark.parametrize("dispatch", ["rounds", "gather"])
@pytest.mark.slow
def test_all_tokens_to_one_expert_take_more_rounds_and_are_exact(dispatch):
    model = skewed(Net("switch", layers=1, dispatch=dispatch, router_bias=True))
    seen = []

    def loss(model, batch):
        out, routers = model(batch["x"])
        seen.append(routers[0])
        return jnp.square(out - batch["y"]).mean() + routers[0].load_balance, {"rounds": routers[0].rounds}

    batch = batch_of(8)
    parallel = ax.parallelize(model, mesh_of({"expert": 4}), ax.Plan())
    assert_gradients_equal(model, {"expert": 4}, batch, mean_loss)
    rounds = parallel.trainer(optax.sgd(0.1), loss).step(batch)["rounds"]
    # Slots for 1.25 times an even share: ceil(8/3) rounds of all; gathered, ceil(4/1.25) of the rank of that expert.
    assert rounds == ((4 + 1 + 1 + 1) / 4 if dispatch == "gather" else 3)


def ragged_by_gathering(x, out, starts, sent, places, coming, *, axis_name):
    """What `jax.lax.ragged_all_to_all` is documented to do, from all ranks' operands; NaN where sizes do not agree."""
    here, at = jax.lax.axis_index(axis_name), jnp.arange(x.shape[0])
    every = [jax.lax.all_gather(each, axis_name) for each in (x, starts, sent, places)]
    for rank in range(sent.size):
        rows, start, count, place = (each[rank] for each in every)
        rows = jnp.where(count[here] == coming[rank], rows[(start[here] + at) % x.shape[0]], jnp.nan)
        out = out.at[jnp.where(at < count[here], place[here] + at, x.shape[0])].set(rows, mode="drop")
    return out


@pytest.mark.parametrize("name", ["even", "all to one"])
@pytest.mark.slow
def test_filled_slots_alone_travel_and_are_exact(monkeypatch, name):
    """The ragged exchange that TPUs and GPUs have, in several rounds too, with its collective made of others."""
    monkeypatch.setattr("axonml_jax.layers.dispatch.RAGGED_PLATFORMS", ("cpu",))
    monkeypatch.setattr("jax.lax.ragged_all_to_all", ragged_by_gathering)
    model = Net("softmax", layers=1, dispatch="ragged", router_bias=True)
    model = skewed(model) if name == "all to one" else model
    assert_gradients_equal(model, {"expert": 4}, batch_of(8, masked=True))


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.slow
def test_blocks_of_products_run_in_rounds_too(monkeypatch, check_vma):
    monkeypatch.setattr("axonml_jax.layers.dispatch.LITTLE", 0)
    model = skewed(Net("softmax", layers=1, dispatch="rounds", router_bias=True))
    assert_gradients_equal(model, {"expert": 2}, batch_of(4), plan=ax.Plan(check_vma=check_vma))


@pytest.mark.parametrize("degrees", [{"expert": 2, "data": 2}, {"expert": 2, "context": 2}], ids=str)
@pytest.mark.slow
def test_calls_return_outputs_and_router_values(degrees):
    model, x = Net(layers=1), batch_of(4)["x"]
    out, [router] = ax.parallelize(model, mesh_of(degrees), ax.Plan())(x)
    wanted, [expected] = model(jnp.asarray(x))
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    for name in ("load_balance", "z", "counts", "dropped", "entropy"):
        np.testing.assert_allclose(getattr(router, name), getattr(expected, name), atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_one_token_a_rank_and_ranks_of_padding_alone():
    assert_gradients_equal(Net(layers=1), {"expert": 8}, batch_of(8, length=1))
    batch = batch_of(8, masked=True)
    batch["mask"][:4] = False
    assert_gradients_equal(Net(layers=1), {"expert": 4, "data": 2}, batch)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"expert": 4}, {"expert": 2, "data": 2}, {"expert": 2, "context": 2}], ids=str)
def test_capacity_drops_what_groups_on_one_device_drop(degrees):
    ranks, positions = math.prod(degrees.values()) // degrees.get("context", 1), degrees.get("context", 1)
    options = {"layers": 1, "capacity_factor": 0.8}
    grouped = Net(**options, groups=(ranks, positions))
    batch = batch_of(2 * ranks, length=4)
    wanted, grads = grad_of(grouped, loss_fn, batch)
    plan = ax.Plan(context=ax.Context(order="contiguous"))
    parallel = ax.parallelize(Net(**options), mesh_of(degrees), plan)
    found, ours = parallel.value_and_grad(loss_fn)(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11)
    assert grouped(batch["x"])[1][0].dropped > 0.05


@pytest.mark.slow
def test_the_selection_bias_is_that_of_one_device():
    trained = {}
    meshes = {"one": {"data": 1}, "some": {"expert": 2, "data": 2}, "many": {"expert": 2, "context": 4}}
    for name, degrees in meshes.items():
        plan = ax.Plan(accumulate=2, context=ax.Context(order="striped"))
        trainer = ax.parallelize(Net("sigmoid", layers=1), mesh_of(degrees), plan).trainer(optax.sgd(0.1), loss_fn)
        for seed in range(3):
            trainer.step(batch_of(8, seed))
            trainer.evaluate(batch_of(8, seed))
        state = trainer.model.whole().state
        trained[name] = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    for one, some, many in zip(*trained.values(), strict=True):
        np.testing.assert_array_equal(one, some)
        np.testing.assert_array_equal(one, many)  # a mean of eight equal floats may round
    assert any(np.abs(leaf).max() > 0.04 for leaf in trained["many"])


@pytest.mark.slow
def test_noise_does_not_depend_on_how_positions_are_split():
    batches = [batch_of(2, seed) for seed in range(2)]
    model = Net(ax.SoftmaxRouter(top_k=2, noise=2.0), layers=1)
    assert_equals_single_device(model, loss_fn, batches, ax.Plan(), mesh=mesh_of({"context": 2}), steps=2)


def rows_of(trainer, batch, label):
    report = ax.explain(trainer, batch)
    return [entry for entry in report.collectives if entry.label == label]


def test_a_dispatch_sends_what_the_formula_says_and_weights_stay_home():
    tokens, top_k, ranks = 2 * LENGTH, 2, 4
    batch = batch_of(2 * ranks)
    sent = {}
    for name, options in {
        "rounds": {"dispatch": "rounds"},
        "gather": {"dispatch": "gather"},
        "capacity": {"capacity_factor": 1.0},
    }.items():
        model = Net("softmax", layers=1, **options)
        trainer = ax.parallelize(model, mesh_of({"expert": ranks}), ax.Plan()).trainer(optax.sgd(0.1), mean_loss)
        sent[name] = rows_of(trainer, batch, "experts")
        report = ax.explain(trainer, batch)
        weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        experts = sum(each[...].size for each in (model.layers[0].gate, model.layers[0].up, model.layers[0].down))
        reduced = [e for e in report.collectives if e.label == "gradients" and "expert" in e.axes]
        assert sum(e.elements for e in reduced) == weights - experts
    share, wide = (ranks - 1) / ranks, 8
    once = lambda rows: sum(
        e.wire_bytes for e in rows if not e.loops and e.kind != "all_gather" and e.dtype == "float64"
    )
    slots = -(-int(1.25 * tokens * top_k) // ranks)
    assert once(sent["rounds"]) == 4 * ranks * slots * WIDTH * wide * share
    capacity = -(-tokens * top_k // EXPERTS)
    assert once(sent["capacity"]) == 4 * EXPERTS * capacity * WIDTH * wide * share
    gathered = sum(e.wire_bytes for e in sent["gather"] if e.dtype == "float64")
    assert gathered == (ranks - 1) * tokens * wide * (4 * WIDTH + 2 * top_k)  # with the gates, and their gradients


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"layers/0/up: dim 0 of \(8, 6, 8\) over expert \(8 % 3 = 2\)"):
        ax.parallelize(Net(), mesh_of({"expert": 3}), ax.Plan())
    with pytest.raises(ValueError, match="have no strategy in the plan"):
        ax.parallelize(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), mesh_of({"expert": 2}), ax.Plan())


EXPERTS_OF = ExpertsConfig(num_experts=4, top_k=2, router="sigmoid", shared_size=8, load_balance=0.1, z=0.01)
SMALL = TransformerConfig(
    vocab_size=14, num_layers=3, hidden_size=8, num_heads=2, max_length=8, mlp_hidden_size=16, param_dtype="float64",
    experts=EXPERTS_OF,
)  # fmt: skip
MODELS = {
    "expert": ({"expert": 4}, {}, {}),
    "one loop": ({"expert": 2, "fsdp": 2}, {"scan_layers": True}, {"remat": "full"}),
    "sequence parallel": ({"expert": 2, "tensor": 2}, {"sequence_parallel": True}, {}),
    "context, every second": ({"expert": 2, "context": 2}, {"experts": dataclasses.replace(EXPERTS_OF, every=2)}, {}),
    "pipeline, typed": (
        {"pipe": 3, "expert": 2},
        {"experts": dataclasses.replace(EXPERTS_OF, dispatch="rounds")},
        {"pipe": ax.Pipelined(schedule="1f1b", num_microbatches=2), "check_vma": True},
    ),
}


def language_loss(model, batch):
    return ax.WeightedMean(*model.loss(batch["tokens"], batch["targets"]))


def words(rows, seed):
    tokens = np.random.default_rng(seed).integers(0, 14, (rows, 9))
    targets = tokens[:, 1:].copy()
    targets[0, 4:] = -1
    return {"tokens": tokens[:, :-1], "targets": targets}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_transformer_takes_experts(name):
    degrees, changes, options = MODELS[name]
    config, plan = dataclasses.replace(SMALL, **changes), ax.Plan(**options)
    rows = math.prod(size for axis, size in degrees.items() if axis in ("expert", "fsdp", "data"))
    batches = [words(rows * plan.microbatches, seed) for seed in range(2)]
    model = Transformer(config, rngs=nnx.Rngs(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == config.num_params
    assert_equals_single_device(model, language_loss, batches, plan, mesh=mesh_of(degrees))


@pytest.mark.slow
def test_a_model_with_experts_generates_with_a_cache():
    model = Transformer(SMALL, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, 14, (4, 3))
    plain = np.asarray(prompt)
    for _ in range(4):
        plain = np.concatenate([plain, np.asarray(model(jnp.asarray(plain))[:, -1].argmax(-1))[:, None]], 1)
    parallel = ax.parallelize(model, mesh_of({"expert": 2, "data": 2}), ax.Plan())
    np.testing.assert_array_equal(ax.generate(parallel, prompt, 4, jax.random.key(0), temperature=0), plain)
