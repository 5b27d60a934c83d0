"""Loops that people have: theirs with our arrays, ours inside of their jit, and one sentence for what does not go together."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.base import METHODS
from axonml_jax.parallel.plan import Partition

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.tanh(X.sum(1, keepdims=True))}
FLOAT32 = 3e-6  # of losses about one


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body, self.head = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.nn.gelu(self.body(x)))


class Lin(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, None))
        return linen.Dense(1, kernel_init=init)(linen.gelu(linen.Dense(16)(x)))


def mse(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def users_loop(model, batch=BATCH, wrt=nnx.Param):
    """The loop of nearly every NNX script."""
    optimizer = nnx.Optimizer(model, optax.adamw(5e-2), wrt=wrt)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(mse, argnums=nnx.DiffState(0, wrt))(model, batch)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, batch)) for _ in range(3)]


def linens_loop(params, batch=BATCH):
    """The loop of Linen's examples."""
    state = TrainState.create(apply_fn=Lin().apply, params=params, tx=optax.adamw(5e-2))

    @jax.jit
    def step(state, batch):
        loss = lambda params: mse(lambda x: state.apply_fn({"params": params}, x), batch)
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


@pytest.fixture(scope="module")
def wanted():
    return users_loop(Net())


def variables():
    return Lin().init(jax.random.key(0), X)


# Theirs, with arrays that lie as a plan says.


def rules():
    return ax.Plan(partition=Partition.of({"body/kernel": P(None, "tensor"), ".*": P()}))


@pytest.mark.parametrize(
    ("degrees", "plan", "spec"),
    [
        ({"fsdp": 8}, None, P("fsdp")),
        ({"data": 8}, None, P()),
        ({"data": 2, "fsdp": 2, "tensor": 2}, rules, P("fsdp", "tensor")),
    ],
    ids=["fsdp", "ddp", "rules"],
)
def test_a_placed_module_trains_in_the_users_own_loop_and_stays_split(wanted, degrees, plan, spec):
    mesh = mesh_of(**degrees)
    model = ax.place(Net(), mesh, plan and plan())
    rows = tuple(axis for axis in ("data", "fsdp") if axis in degrees)
    batch = jax.device_put(BATCH, NamedSharding(mesh, P(rows)))
    np.testing.assert_allclose(users_loop(model, batch), wanted, atol=FLOAT32)
    assert model.body.kernel.sharding.spec == spec


def test_placed_variables_train_in_linens_own_loop_and_stay_split():
    single, _ = linens_loop(linen.meta.unbox(variables())["params"])
    placed = ax.place(Lin(), mesh_of(fsdp=8), params=variables())
    losses, state = linens_loop(placed["params"])
    np.testing.assert_allclose(losses, single, atol=FLOAT32)
    assert state.opt_state[0].mu["Dense_0"]["kernel"].sharding.spec == P("fsdp")


def test_what_a_placed_module_would_ignore_is_refused():
    with pytest.raises(ValueError, match=r"ax.place says where arrays lie, and accumulate=2, remat='full' of the plan"):
        ax.place(Net(), mesh_of(data=2), ax.Plan(accumulate=2, remat="full"))
    with pytest.raises(ValueError, match=r"arrays lie, and update='whole', fsdp=Shard\(wire='int8'\) of the plan"):
        ax.place(Net(), mesh_of(fsdp=2), ax.Plan(fsdp=ax.Shard(wire="int8"), update="whole"))
    with pytest.raises(ValueError, match=r"arrays lie, and data=Replicate\(comm_dtype='bfloat16'\) of the plan"):
        ax.place(Net(), mesh_of(data=2), ax.Plan(data=ax.Replicate(comm_dtype="bfloat16")))
    with pytest.raises(ValueError, match="precision=Precision"):
        ax.place(Net(), mesh_of(data=2), ax.Plan(precision="bf16"))
    with pytest.raises(ValueError, match=r"memory='1GiB', draws='rows', kernels='xla', check_vma=True of the plan"):
        ax.place(Net(), mesh_of(data=2), ax.Plan(memory="1GiB", draws="rows", kernels="xla", check_vma=True))


# Ours, inside of their transforms.


@pytest.mark.parametrize("way", ["jit", "scan"])
@pytest.mark.parametrize(
    ("degrees", "plan"),
    [
        ({"fsdp": 8}, ax.Plan),
        ({"data": 4}, lambda: ax.Plan(accumulate=2)),
        ({"fsdp": 2, "tensor": 4}, rules),
    ],
    ids=["fsdp", "ddp", "rules"],
)
def test_jax_may_transform_the_pure_step(wanted, degrees, plan, way):
    state, step = ax.make_train_step(Net(), optax.adamw(5e-2), mse, mesh_of(**degrees), plan())
    if way == "jit":
        step, losses = jax.jit(step), []
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(metrics["loss"])
    else:
        batches = jax.tree.map(lambda x: np.stack([x] * 3), BATCH)
        state, metrics = jax.lax.scan(step, state, batches)
        losses = metrics["loss"]
    np.testing.assert_allclose(losses, wanted, atol=FLOAT32)
    assert int(state.step) == 3


def test_a_step_that_jax_transforms_refuses_a_batch_that_does_not_divide():
    state, step = ax.make_train_step(Net(), optax.sgd(0.1), mse, mesh_of(data=8))
    with pytest.raises(ValueError, match="does not split evenly into 8 batch shards"):
        jax.jit(step)(state, jax.tree.map(lambda x: x[:12], BATCH))


# Losses and metrics as scripts have them.


def test_a_loss_of_several_arguments_gets_what_the_step_is_called_with(wanted):
    loss = lambda model, x, y: ((model(x) - y) ** 2).mean()
    trainer = ax.FSDP(Net(), mesh_of(fsdp=4)).trainer(optax.adamw(5e-2), loss)
    np.testing.assert_allclose(trainer.evaluate(BATCH["x"], BATCH["y"])["loss"], wanted[0], atol=FLOAT32)
    found = [float(trainer.step(BATCH["x"], BATCH["y"])["loss"]), float(trainer.step((BATCH["x"], BATCH["y"]))["loss"])]
    np.testing.assert_allclose(found, wanted[:2], atol=FLOAT32)
    value, _ = ax.DDP(Net(), mesh_of(data=2)).value_and_grad(loss)(BATCH["x"], BATCH["y"])
    np.testing.assert_allclose(value, wanted[0], atol=FLOAT32)
    ax.testing.assert_equals_single_device(Net(), loss, [(X, BATCH["y"])], ax.Plan(), mesh=mesh_of(data=2))
    ax.testing.assert_equals_single_device(Net(), loss, (X, BATCH["y"]), ax.Plan(), mesh=mesh_of(data=2), steps=2)
    allowed = ax.mixing_rows(loss, two_sweeps=True)
    plan = ax.Plan(accumulate=2)
    found = ax.parallelize(Net(), mesh_of(data=2), plan).trainer(optax.sgd(0.1), allowed).step(X, BATCH["y"])["loss"]
    np.testing.assert_allclose(found, wanted[0], atol=FLOAT32)


def test_logits_that_a_loss_returns_come_back_whole_for_the_scripts_own_metrics():
    labels = (np.abs(X.sum(1)) * 3).astype(np.int32) % 2

    def loss(model, batch):
        logits = jnp.concatenate([model(batch["x"]), -model(batch["x"])], 1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {"logits": logits}

    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    made = ax.FSDP(Net(), mesh_of(fsdp=8)).trainer(optax.sgd(0.0), loss).step({"x": X, "y": labels})
    metrics.update(loss=made["loss"], logits=made["logits"], labels=labels)
    value, more = loss(Net(), {"x": X, "y": labels})
    accuracy = (np.asarray(more["logits"]).argmax(1) == labels).mean()
    np.testing.assert_allclose(
        [float(metrics.compute()[name]) for name in ("loss", "accuracy")], [value, accuracy], rtol=1e-5
    )


STREAMS, MEASURED = nnx.Rngs(0), nnx.metrics.Average("loss")


def own_streams(model, batch):
    STREAMS.params()
    return mse(model, batch)


def own_metrics(model, batch):
    MEASURED.update(loss=mse(model, batch))
    return mse(model, batch)


def mapped(model, batch):
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",), axis_types=(AxisType.Auto,))
    double = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    return ((double(model(batch["x"])) - batch["y"]) ** 2).mean()


GRAPH = nnx.graphdef(Net())
LOSSES = {
    "streams": (own_streams, "RngCount.*self.rngs = nnx.Rngs"),
    "metrics": (own_metrics, "MetricState.*self.metrics = nnx.MultiMetric"),
    "shard_map": (mapped, "calls jax.shard_map, but it already runs inside.*ax.place"),
    "a third argument": (lambda model, batch, rngs: mse(model, batch), r"\(model, batch, rngs\).*step\(batch, rngs\)"),
    "logits": (lambda model, batch: (mse(model, batch), model(batch["x"])), '"logits": logits'),
    "params": (lambda params, batch: mse(nnx.merge(GRAPH, params), batch), r"write loss_fn\(model, batch\)"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_is_refused_with_what_to_write(name):
    loss, said = LOSSES[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        ax.DDP(Net(), mesh_of(data=4)).trainer(optax.sgd(0.1), loss).step(BATCH)
    assert caught.match(said)


# A parallel model where a Flax module is asked for.

ASKED = {
    "nnx.Optimizer": lambda model: nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
    "nnx.state": nnx.state,
    "nnx.split": nnx.split,
    "nnx.jit": lambda model: nnx.jit(lambda model: model)(model),
    "nnx.value_and_grad": lambda model: nnx.value_and_grad(mse)(model, BATCH),
    "jax.jit": lambda model: jax.jit(lambda model: 1)(model),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_cannot_see_into_a_parallel_model_says_the_lines_that_work(name):
    with pytest.raises(TypeError, match=r"trainer = model.trainer.*module = ax.place\(module, mesh, plan\)"):
        ASKED[name](ax.FSDP(Net(), mesh_of(fsdp=2)))


def test_attributes_and_variables_of_a_module_are_pointed_to():
    with pytest.raises(AttributeError, match=r"no attribute 'body': the Flax module.*is model.module"):
        _ = ax.DDP(Net(), mesh_of(data=2)).body
    model = ax.DDP(Lin(), mesh_of(data=2), params=variables())
    state = TrainState.create(apply_fn=model, params=model.parameters(), tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"model\(x\).*apply_fn=module.apply, params=ax.place"):
        state.apply_fn({"params": state.params}, X)


def test_attributes_that_others_have_are_answered_with_ours():
    model = ax.DDP(Lin(), mesh_of(data=2), params=variables())
    trainer = model.trainer(optax.sgd(0.1), lambda model, batch: model(batch).mean())
    for of, name, said in (
        (trainer, "zero_grad", r"'Trainer' object has no attribute 'zero_grad': no gradients are kept: trainer\.step"),
        (trainer, "state_dict", r"trainer\.model\.state_dict\(\)"),
        (model, "to", "'DDP' object has no attribute 'to': the mesh and the plan say"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(of, name)
    assert not [name for name in METHODS if hasattr(trainer, name)]  # a row that nobody reads

    class Own(type(trainer)):
        speed = property(lambda self: self.state.no_such_thing)

    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'no_such_thing'"):
        _ = Own(model, optax.sgd(0.1), lambda model, batch: model(batch).mean()).speed
    assert not hasattr(trainer, "__array__") and copy.copy(trainer).model is model


# What else is handed over: filters, states, boxes, Grain's iterators.

FILTERS = {
    "All": nnx.All(nnx.Param, nnx.PathContains("head")),
    "PathContains": nnx.PathContains("head"),
    "a function": lambda path, value: "head" in path,
    "several": [nnx.LoRAParam, nnx.PathContains("head")],
}


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_of_nnx_says_what_trains(name):
    given = FILTERS[name]
    trainer = ax.FSDP(Net(), mesh_of(fsdp=2), trainable=given).trainer(optax.adamw(5e-2), mse)
    losses = [float(trainer.step(BATCH)["loss"]) for _ in range(3)]
    own = nnx.Any(*given) if isinstance(given, list) else given
    np.testing.assert_allclose(losses, users_loop(Net(), wrt=own), atol=FLOAT32)


def test_states_and_boxes_are_taken_as_parameters():
    module, model = Net(), ax.FSDP(Net(), mesh_of(fsdp=2))
    module.head.kernel[...] += 1
    model.set_parameters(nnx.state(module))
    np.testing.assert_array_equal(model.parameters()["head"]["kernel"], module.head.kernel[...])
    boxed = jax.tree.map(lambda x: x + 1, variables()["params"])
    other = ax.DDP(Lin(), mesh_of(data=2), params=variables())
    other.set_parameters(boxed)
    np.testing.assert_array_equal(other.parameters()["Dense_0"]["kernel"], linen.meta.unbox(boxed)["Dense_0"]["kernel"])


class Bytes:
    """An iterator whose state is bytes, as that of Grain's DataLoader."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.at

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state.decode())


@pytest.mark.parametrize("kind", ["grain", "bytes"])
def test_a_checkpoint_takes_the_scripts_own_iterator(tmp_path, kind):
    def make():
        if kind == "bytes":
            return Bytes()
        grain = pytest.importorskip("grain")
        return iter(grain.MapDataset.range(20).shuffle(seed=1).to_iter_dataset())

    data, trainer = make(), ax.DDP(Net(), mesh_of(data=2)).trainer(optax.sgd(0.1), mse)
    with ax.CheckpointManager(tmp_path / "run") as checkpoints:
        for _ in range(3):
            next(data)
        checkpoints.save(3, trainer, data=data)
        again = make()
        checkpoints.restore(trainer, data=again)
        assert next(again) == next(data)
        with pytest.raises(
            TypeError, match=r"data= is a list, which has neither state_dict\(\) nor get_state\(\): give its iterator"
        ):
            checkpoints.save(4, trainer, data=[1, 2])


class Squares:
    """A source for Grain, which knows it again by its name."""

    def __repr__(self):
        return "squares"

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": np.float32([index])}


def test_a_loader_over_a_loader_of_grain_is_checkpointed(tmp_path):
    """Its position is bytes, within that of the loader, and no checkpoint took it."""
    grain, model, mesh = pytest.importorskip("grain"), Net(), mesh_of(data=2)

    def make():
        sampler = grain.samplers.IndexSampler(24, shuffle=True, seed=1, num_epochs=1)
        source = grain.DataLoader(data_source=Squares(), sampler=sampler)
        return ax.create_dataloader(source, 4, mesh, shuffle=False, num_epochs=1)

    rows = lambda batches: [batch["x"].ravel().tolist() for batch in batches]
    whole, first, again = rows(make()), make(), make()
    head = rows(itertools.islice(first, 2))
    ax.restore(ax.save(tmp_path / "run", model, data=first), model, data=again)
    assert head + rows(again) == whole
