"""Annotations as users of JAX and Flax write them are a plan: losses equal one device's, or a name is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.base import named_leaves

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.tanh(X.sum(1, keepdims=True))}
INIT = nnx.initializers.lecun_normal()
FLOAT32 = 3e-6  # of losses about one


def mesh(kind=AxisType.Auto, **degrees):
    """A mesh as users of JAX make it, with names of their own."""
    devices = np.array(jax.devices()[: int(np.prod(list(degrees.values())))]).reshape(tuple(degrees.values()))
    return Mesh(devices, tuple(degrees), axis_types=(kind,) * len(degrees))


def mse(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class Guide(nnx.Module):
    """The model of Flax's scale-up guide: one layer is annotated by its initializer, one parameter by itself."""

    def __init__(self, rngs, up=(None, "model"), down=("model", None), spelled="out_sharding", **more):
        self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, up, **more))
        self.down = nnx.Param(INIT(rngs.params(), (16, 8)), **{spelled: down}, **more)

    def __call__(self, x):
        return jax.nn.relu(self.up(x)) @ self.down[...]


class Names(linen.Module):
    """Linen's boxes, by axes or by logical names."""

    logical: bool = False
    rules: tuple | None = None

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        if self.logical:
            boxed = functools.partial(linen.with_logical_partitioning, init, rules=self.rules)
            up, down = boxed(("embed", "mlp")), boxed(("mlp", "embed"))
        else:
            up, down = linen.with_partitioning(init, (None, "model")), linen.with_partitioning(init, ("model", None))
        x = linen.gelu(linen.Dense(16, use_bias=False, kernel_init=up)(x))
        return linen.Dense(8, kernel_init=down)(x)


def bare(*args, **kwargs):
    with nnx.use_eager_sharding(False):
        return Guide(nnx.Rngs(0), *args, **kwargs)


@functools.cache
def wanted(kind="nnx"):
    """The losses of the user's own loop on one device."""
    tx, losses = optax.adamw(5e-2), []
    if kind == "linen":
        params = linen.meta.unbox(Names().init(jax.random.key(0), X))["params"]
        apply = lambda params: ((Names().apply({"params": params}, X) - BATCH["y"]) ** 2).mean()
    else:
        graph, params = nnx.split(bare())
        params = nnx.to_pure_dict(params)
        apply = lambda params: mse(nnx.merge(graph, params, copy=True), BATCH)
    state = tx.init(params)
    for _ in range(3):
        loss, grads = jax.value_and_grad(apply)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def trained(model, kind="nnx"):
    trainer = model.trainer(optax.adamw(5e-2), mse)
    np.testing.assert_allclose([float(trainer.step(BATCH)["loss"]) for _ in range(3)], wanted(kind), atol=FLOAT32)
    return {name: leaf.sharding.spec for name, leaf in named_leaves(model.variables.params).items()}


def made(mesh, *args, **kwargs):
    """The user makes his model under his mesh."""
    with jax.set_mesh(mesh):
        return Guide(nnx.Rngs(0), *args, **kwargs)


RULES = (("embed", None), ("mlp", "model"))
LOGICAL = (("embed", "mlp"), ("mlp", "embed"))
BOTH = (("fsdp", "tp"), ("tp", "fsdp"))
COLUMN, ROW = P(None, "tensor"), P("tensor")


def rules_in_context():
    own = mesh(data=2, model=4)
    with jax.set_mesh(own), nnx.logical_axis_rules(RULES):
        model = Guide(nnx.Rngs(0), *LOGICAL)
    with nnx.logical_axis_rules(RULES):
        return ax.parallelize(model, own)


def a_function_of_names():
    own = mesh(data=2, model=4)
    plan = ax.Plan.from_annotations(bare, own)
    return ax.parallelize(bare, own, plan)


def named_shardings():
    own = mesh(AxisType.Explicit, data=2, model=4)
    sharding = lambda *spec: NamedSharding(own, P(*spec))
    with jax.set_mesh(own):
        model = Guide(nnx.Rngs(0), P(None, "model"), P("model"))
        model.down = nnx.Param(
            jax.device_put(bare().down[...], sharding("model", None))
        )  # no metadata: the array says it
    return ax.parallelize(model, own)


NNX = {
    "by axes": (lambda: ax.parallelize(made(own := mesh(data=2, model=4)), own), COLUMN, ROW),
    "Explicit axes": (lambda: ax.parallelize(made(own := mesh(AxisType.Explicit, data=2, model=4)), own), COLUMN, ROW),
    "sharding=": (lambda: ax.parallelize(bare(spelled="sharding"), mesh(data=2, model=4)), COLUMN, ROW),
    "sharding_names=": (lambda: ax.parallelize(bare(spelled="sharding_names"), mesh(data=2, model=4)), COLUMN, ROW),
    "PartitionSpecs": (lambda: ax.parallelize(bare(P(None, "model"), P("model")), mesh(dp=2, model=4)), COLUMN, ROW),
    "arrays alone": (named_shardings, COLUMN, ROW),
    "a function": (a_function_of_names, COLUMN, ROW),
    "rules on variables": (
        lambda: ax.parallelize(made(own := mesh(data=2, model=4), *LOGICAL, sharding_rules=RULES), own), COLUMN, ROW,
    ),
    "rules in context": (rules_in_context, COLUMN, ROW),
    "rules given": (
        lambda: ax.parallelize(
            bare(*LOGICAL), own := mesh(data=2, model=4), ax.Plan.from_annotations(bare(*LOGICAL), own, rules=dict(RULES))
        ), COLUMN, ROW,
    ),
    "fsdp and tp": (
        lambda: ax.parallelize(made(own := mesh(fsdp=2, tp=4), *BOTH), own), P("fsdp", "tensor"), P("tensor", "fsdp"),
    ),
    "three axes": (
        lambda: ax.parallelize(made(own := mesh(data=2, fsdp=2, tp=2), *BOTH), own),
        P("fsdp", "tensor"), P("tensor", "fsdp"),
    ),
    "one dim over both": (
        lambda: ax.parallelize(bare((None, ("fsdp", "tp")), (("fsdp", "tp"), None)), mesh(fsdp=2, tp=4)),
        P("fsdp", "tensor"), P("tensor", "fsdp"),
    ),
    "fsdp": (lambda: ax.parallelize(bare(("fsdp", None), (None, "fsdp")), mesh(fsdp=8)), P("fsdp"), P("fsdp")),
    "data": (lambda: ax.parallelize(bare(("data", None), (None, "data")), mesh(data=8)), P("data"), P("data")),
    "data and fsdp": (
        lambda: ax.parallelize(bare((("data", "fsdp"), None), (None, "fsdp")), mesh(data=2, fsdp=4)),
        P(("data", "fsdp")), P(("data", "fsdp")),
    ),
    "the optimizer's state": (
        lambda: ax.parallelize(bare((None, None), None, optimizer_sharding=("data", None)), mesh(data=8)), P("data"), P("data"),
    ),
    "layers of ours": (
        lambda: (ax.auto_parallelize(model := bare(), own := mesh_of(data=2, tensor=4)), ax.parallelize(model, own))[1],
        COLUMN, P(),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:'sharding:DeprecationWarning")
@pytest.mark.parametrize("name", NNX)
def test_what_nnx_annotates_is_the_plan(name):
    make, up, down = NNX[name]
    specs = trained(make())
    assert (specs["up/kernel"], specs["down"]) == (up, down)


def linen_in_context():
    own = mesh(data=2, model=4)
    variables = Names(True).init(jax.random.key(0), X)
    with linen.logical_axis_rules(RULES):
        return ax.parallelize(Names(True), own, params=variables)


def linen_made_there(logical, rules=None):
    own, module = mesh(data=2, model=4), Names(logical, rules)
    init = lambda: module.init(jax.random.key(0), X)
    return ax.parallelize(module, own, ax.Plan.from_annotations(module, own, params=init), params=init)


LINEN = {
    "by axes": lambda: ax.parallelize(
        Names(), mesh(data=2, model=4), params=Names().init(jax.random.key(0), X)
    ),
    "rules in boxes": lambda: linen_made_there(True, RULES),
    "a function": lambda: linen_made_there(False),
    "rules in context": linen_in_context,
}  # fmt: skip


@pytest.mark.parametrize("name", LINEN)
def test_what_linen_boxes_say_is_the_plan(name):
    specs = trained(LINEN[name](), "linen")
    assert (specs["Dense_0/kernel"], specs["Dense_1/kernel"]) == (COLUMN, ROW)


def test_a_rule_whose_axes_are_taken_gives_way_to_the_next():
    rules = (("embed", "model"), ("mlp", "model"), ("mlp", "data"))
    params = Names(True).init(jax.random.key(0), X)
    plan = ax.Plan.from_annotations(Names(True), mesh(data=2, model=4), params=params, rules=rules)
    assert dict(plan.partition.rules)["Dense_0/kernel"] == P("tensor", "data") and plan.data == ax.Shard()


def test_a_linen_module_without_its_variables_has_no_annotations_to_read():
    with pytest.raises(ValueError, match="give params=, what module"):
        ax.Plan.from_annotations(Names(True), mesh(data=2, model=4))


def test_all_names_without_a_rule_are_refused_at_once():
    own = mesh(data=2, model=4)
    with pytest.raises(ValueError) as caught:
        ax.parallelize(bare(*LOGICAL), own)
    for line in ("up/kernel (8, 16): 'embed' has no rule", "down (16, 8): 'mlp' has no rule", 'rules=(("embed", None)'):
        assert line in str(caught.value)
    assert (
        ax.parallelize(bare(*LOGICAL), mesh(data=2)).plan.annotations is None
    )  # where nothing is split, nothing is asked
    with pytest.raises(ValueError, match=r"rule of 'mlp' names \['models'\], no axis of the mesh"):
        ax.Plan.from_annotations(bare(*LOGICAL), own, rules=(("embed", None), ("mlp", "models")))


@pytest.mark.parametrize(
    ("up", "degrees", "said"),
    [
        (("layers", "model"), {"pipe": 2, "model": 2}, r"ax.Pipelined.*\('layers', None\)"),
        (("cp", None), {"cp": 2, "model": 2}, "ax.Context.shard=True"),
        ((None, "row"), {"row": 2, "model": 2}, "ax.auto_parallelize"),
        (("model", "model"), {"data": 2, "model": 2}, "'model' splits two of its dims"),
        ((None, ("model", "ep")), {"ep": 8, "model": 4}, "dim 1 does not divide over tensor=4 and expert=8"),
    ],
    ids=["stages", "positions", "the grid", "twice", "too many"],
)
def test_what_annotations_cannot_ask_for_is_refused_with_the_remedy(up, degrees, said):
    size = int(np.prod(list(degrees.values())))
    own = mesh(**degrees) if size <= 8 else jax.sharding.AbstractMesh(tuple(degrees.values()), tuple(degrees))
    with pytest.raises(ValueError, match=said):
        ax.Plan.from_annotations(bare(up), own, rules=(("layers", "pipe"),))


def test_what_was_read_prints_as_a_table():
    class Blocks(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([bare(*BOTH) for _ in range(3)])

    plan = ax.Plan.from_annotations(Blocks(), mesh(fsdp=2, tp=4))
    lines = str(plan.annotations).splitlines()
    assert lines[0].split() == ["parameter", "shape", "annotated", "by", "becomes"] and len(lines) == 5
    row = next(line for line in lines if line.startswith("blocks/*/up/kernel (3)"))
    assert "('fsdp', 'tp')" in row and "metadata" in row and row.endswith("fsdp on dim 0, tensor on dim 1")
    assert any("up/bias" in line and line.endswith("fsdp on a dim that the plan chooses") for line in lines)
    assert "<table" in plan.annotations._repr_html_() and repr(plan.annotations) == "Annotations(6 of 9 parameters)"
    assert "read from Annotations(2 of 3" in repr(ax.parallelize(bare(*BOTH), mesh(fsdp=2, tp=4)))


def test_an_option_that_is_given_holds():
    own = mesh(fsdp=2, tp=4)
    plan = ax.Plan.from_annotations(bare(*BOTH), own, fsdp=ax.Shard(stage=2), accumulate=2)
    assert plan.fsdp == ax.Shard(stage=2) and plan.accumulate == 2 and plan.partition is not None


def test_rules_take_the_names_of_the_users_axes_and_name_the_dim_that_rests_sharded():
    rules = {"up/kernel": P("fsdp", "model"), "up/bias": P("model"), "down": P("model", "fsdp")}
    specs = trained(ax.TensorParallel(bare(), mesh(fsdp=2, model=4), rules=rules))
    assert specs == {"up/kernel": P("fsdp", "tensor"), "up/bias": P("tensor"), "down": P("tensor", "fsdp")}
    with pytest.raises(ValueError, match=r"rules name data, along which the plan replicates parameters"):
        ax.TensorParallel(bare(), mesh(data=2, model=4), rules={"up/kernel": P("data", "model"), ".*": P()})
    with pytest.raises(ValueError, match=r"what rests sharded needs a dim of its own"):
        ax.TensorParallel(bare(), mesh(fsdp=2, model=4), rules={"up/kernel": P(("fsdp", "model")), ".*": P()})


def test_boxes_are_opened_as_they_lie_whatever_is_around():
    params = Names(True).init(jax.random.key(0), X)
    own = mesh(AxisType.Explicit, data=2, model=4)
    with jax.set_mesh(own), linen.logical_axis_rules(RULES):
        from axonml_jax.model.view import functionalize

        _, variables = functionalize(Names(True), params)
    assert variables.params["Dense_0"]["kernel"] is params["params"]["Dense_0"]["kernel"].value
    assert jnp.shape(variables.params["Dense_1"]["kernel"]) == (16, 8)


def test_a_placed_module_lies_on_the_users_mesh_by_its_names_and_trains_there():
    own = mesh(fsdp=2, tp=4)
    model = ax.place(made(own, *BOTH), own)
    assert (model.up.kernel.sharding.spec, model.down.sharding.spec) == (P("fsdp", "tp"), P("tp", "fsdp"))
    with jax.set_mesh(own):
        optimizer = nnx.Optimizer(model, optax.adamw(5e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(mse)(model, BATCH)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer)) for _ in range(3)]
    np.testing.assert_allclose(losses, wanted(), atol=FLOAT32)
    assert model.down.sharding.spec == P("tp", "fsdp")
