"""`TensorParallel`: models written by others split by path rules equal themselves on one device; their traffic is counted."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from meshes import mesh_of, plain_mesh_of

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.ledger.compiled import CompiledCollective, axes_of, partitioned_traffic, result_bytes
from axonml_jax.parallel.plan import Partition
from axonml_jax.testing.equality import FLOAT64, LOW_PRECISION, assert_equals_single_device

F64 = {"param_dtype": jnp.float64}
X = np.random.default_rng(0).normal(size=(8, 8))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.LayerNorm(**F64)(linen.gelu(linen.Dense(16, **F64)(x)))
        return linen.Dense(4, **F64)(x)


class Nnx(nnx.Module):
    def __init__(self):
        self.up, self.down = (nnx.Linear(*s, rngs=nnx.Rngs(0), **F64) for s in ((8, 16), (16, 4)))
        self.norm = nnx.LayerNorm(16, rngs=nnx.Rngs(0), **F64)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


LINEN_RULES = [
    ("Dense_0/kernel", P(None, "tensor")),
    ("Dense_0/bias", P("tensor")),
    ("Dense_1/kernel", P("tensor")),
    (".*", P()),
]
NNX_RULES = {
    "up/kernel": P(None, "tensor"),
    "(up|norm)/(bias|scale)": P("tensor"),
    "down/kernel": P("tensor"),
    ".*": P(),
}


def squares(model, batch):
    return jnp.mean(jnp.square(model(batch)))


@pytest.mark.parametrize("check_vma", [False, True])
def test_models_of_both_kinds_train_as_on_one_device(check_vma):
    mesh = mesh_of(data=2, tensor=4)
    shared = {"mesh": mesh, "tx": optax.adamw(1e-2), "steps": 2, "max_grad_norm": 0.1}
    if check_vma:
        plan = ax.Plan(partition=Partition.of(LINEN_RULES), accumulate=2, check_vma=True)
        assert_equals_single_device(Linen(), squares, X, plan, params=Linen().init(jax.random.key(0), X), **shared)
    else:
        assert_equals_single_device(Nnx(), squares, X, ax.Plan(partition=dict(NNX_RULES)), **shared)


def test_axes_of_one_device_are_no_axes_that_rules_have_to_know():
    mesh = plain_mesh_of(data=1, tensor=2, expert=1, pipe=1)
    model = ax.parallelize(Nnx(), mesh, ax.Plan(partition=Partition.of(NNX_RULES)))
    np.testing.assert_allclose(model(X), Nnx()(X), atol=1e-12)


@pytest.mark.parametrize("kind", ["bf16", "bf16, typed", "fp8", "bf16 parameters"])
def test_sums_in_bfloat16_beside_the_axis_that_xla_partitions(kind):
    """What data ranks sum travels in bfloat16, which XLA:CPU of JAX's own lowering answers by ending the process."""
    module, precision = Nnx(), None if kind == "bf16 parameters" else kind[:4].rstrip(",")
    if precision is None:
        nnx.update(module, jax.tree.map(lambda w: w.astype(jnp.bfloat16), nnx.state(module)))
    plan = {"precision": precision, "check_vma": "typed" in kind}
    runs = []
    for degrees, rules in (({"data": 2, "tensor": 2}, Partition.of(NNX_RULES)), ({"data": 2}, None)):
        parallel = ax.parallelize(nnx.clone(module), mesh_of(**degrees), ax.Plan(partition=rules, **plan))
        trainer = parallel.trainer(optax.sgd(0.1), squares, max_grad_norm=0.5)
        runs.append([float(trainer.step(X.astype(np.float32))["loss"]) for _ in range(2)])
    np.testing.assert_allclose(*runs, rtol=LOW_PRECISION)


def test_ranks_that_do_not_synchronize_train_models_of_their_own_split_by_rules():
    plan = ax.Plan(data=ax.Replicate(sync_strategy="no_sync"), partition=Partition.of(NNX_RULES))
    mesh = mesh_of(data=2, tensor=2)
    assert_equals_single_device(Nnx(), squares, X, plan, mesh=mesh, tx=optax.adamw(1e-2), steps=2)
    model = ax.parallelize(Nnx(), mesh, plan)
    model.trainer(optax.adamw(1e-2), squares).step(X)
    kernel = model.variables.params["up"]["kernel"]
    assert kernel.shape == (2, 8, 16) and kernel.sharding.shard_shape(kernel.shape) == (1, 8, 8)


@pytest.mark.slow
def test_parameters_and_optimizer_state_rest_split_and_everything_of_a_facade_works():
    model = ax.TensorParallel(
        Linen(), mesh_of(data=2, tensor=4), rules=LINEN_RULES, params=Linen().init(jax.random.key(0), X)
    )
    kernel = lambda tree: tree["Dense_0"]["kernel"].sharding.spec
    assert kernel(model.variables.params) == P(None, "tensor")
    whole = model.module
    np.testing.assert_allclose(model(X), whole(X), atol=1e-12)
    trainer = model.trainer(optax.adamw(1e-2), squares)
    loss, grads = model.value_and_grad(squares)(X)
    wanted = jax.grad(lambda v: jnp.mean(jnp.square(Linen().apply(v, X))))(whole.variables)["params"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), grads, wanted)
    with model.no_sync():
        _, own = model.value_and_grad(squares)(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), model.sync_gradients(own), grads)
    np.testing.assert_allclose(trainer.evaluate(X)["loss"], loss)
    saved = model.state_dict()
    for _ in range(2):
        trainer.step(X)
    assert kernel(model.variables.params) == kernel(trainer.state.opt_state[0].mu) == P(None, "tensor")
    model.load_state_dict(saved)
    assert kernel(model.variables.params) == P(None, "tensor")
    np.testing.assert_allclose(trainer.step(X)["loss"], loss)
    # What the partitioner sends: at least the sum of the second product's parts, [4, 4] in float64 over 4 ranks.
    traffic = model.tensor_traffic(trainer, X)
    assert traffic.entries["all_reduce", "f64[4,4]", False] == 1 and traffic.bytes >= 2 * 3 / 4 * 128
    assert "partitioner" in str(traffic)
    report = ax.explain(trainer, X, minimum=trainer.minimum_traffic())
    assert {row.axes for row in report.traffic} == {("data",)}
    assert "total without tensor" in str(report) and "against published" not in str(report)


def test_groups_are_told_apart_however_hlo_writes_them():
    degrees = {"data": 2, "tensor": 4}
    written = {
        "[2,4]<=[8]": {"tensor"},
        "[4,2]<=[2,4]T(1,0)": {"data"},
        "{{0,1,2,3},{4,5,6,7}}": {"tensor"},
        "{{0,4},{4,0}}": {"data"},
        "mesh['data'=2,'tensor'=4] {'data'}": {"data"},
        "": {"data", "tensor"},
    }
    for groups, axes in written.items():
        assert axes_of(CompiledCollective("all_reduce", False, False, "f32[4]", groups), degrees) == axes


def test_a_rule_for_each_of_many_parameters_is_compiled_once(monkeypatch):
    names, compiled, compile_one = [f"layer_{i}" for i in range(600)], [], re._compile
    monkeypatch.setattr(re, "_compile", lambda *args: compiled.append(args) or compile_one(*args))
    rules = Partition(tuple((name, P()) for name in names))
    assert len(rules.specs(dict.fromkeys(names, jax.ShapeDtypeStruct((4,), float)), {})) == 600
    assert len(compiled) == 600


def test_rules_that_do_not_fit_are_refused_with_every_offender():
    params = Linen().init(jax.random.key(0), X)
    make = lambda rules, mesh=None: ax.TensorParallel(
        Linen(), mesh or mesh_of(data=1, tensor=4), rules=rules, params=params
    )
    rules = [(".*/kernel", P("tensor")), ("Dense_0/kernel", P()), ("Conv_.*", P()), ("Dense_1/bias", P(None, "tensor"))]
    with pytest.raises(ValueError) as caught:
        make(rules)
    for line in (
        "Dense_0/bias (16,): no rule matches it",
        "LayerNorm_0/scale (16,): no rule matches it",
        "every parameter it matches (Dense_0/kernel) is taken by an earlier rule, '.*/kernel'",
        "rule 'Conv_.*': matches no parameter",
        "has more entries than its shape (4,) has dims",
    ):
        assert line in str(caught.value)
    with pytest.raises(ValueError, match=r"Dense_1/bias: dims \[0\] of \(4,\) do not divide over tensor=8"):
        make([("Dense_1/bias", P("tensor")), (".*", P())], mesh_of(tensor=8))
    with pytest.raises(ValueError, match=r"names the axes \['pipe'\].*'\(' is no regular expression"):
        make([(".*", P("pipe")), ("(", P())])
    with pytest.raises(ValueError, match="leaves a dim UNCONSTRAINED: name an axis, or None"):
        make([(".*/kernel", P(P.UNCONSTRAINED, "tensor")), (".*", P())])
    with pytest.raises(ValueError, match="axis 'tensor' or 'expert', and the mesh has"):
        make([(".*", P())], mesh_of(data=2))
    with pytest.raises(ValueError, match=r"the mesh has \{'expert': 2\}, and no rule names expert"):
        make([("Dense_0/kernel", P("tensor")), (".*", P())], mesh_of(expert=2, tensor=2))
    with pytest.raises(
        ValueError, match=r"Dense_1/bias: dims \[0\] of \(4,\) do not divide over expert=2 and tensor=4"
    ):
        make([("Dense_1/bias", P(("expert", "tensor"))), (".*", P())], mesh_of(expert=2, tensor=4))
    with pytest.raises(
        ValueError, match=r"rejects the program that check_vma=True makes.*leave out check_vma=True, or give data"
    ):
        ax.TensorParallel(Linen(), mesh_of(tensor=4), rules=[(".*", P())], params=params, check_vma=True)
    with pytest.raises(ValueError, match=r"data, fsdp, tensor and expert, but this one has \{'context': 2\} too"):
        make([(".*", P())], mesh_of(context=2, tensor=2))
    with pytest.raises(ValueError, match=r"check_vma=True with partition= and fsdp: data of .* has one rank"):
        ax.TensorParallel(Linen(), mesh_of(fsdp=2, tensor=2), rules=LINEN_RULES, params=params, check_vma=True)


class Blocks(nnx.Module):
    """Two blocks of an odd width, which fsdp pads; what rules split of `up/bias` is all that it has."""

    def __init__(self, rngs):
        self.first = nnx.Linear(8, 6, rngs=rngs, **F64)
        make = lambda: nnx.Dict(up=nnx.Linear(6, 16, rngs=rngs, **F64), down=nnx.Linear(16, 6, rngs=rngs, **F64))
        self.blocks = nnx.List([make() for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block.down(nnx.gelu(block.up(x)))
        return x


OVER_TENSOR = Partition.of(
    {".*up/kernel": P(None, "tensor"), ".*up/bias": P("tensor"), ".*down/kernel": P("tensor"), ".*": P()}
)
BOTH = {
    "zero-3": ({"fsdp": 4, "tensor": 2}, {}),
    "hybrid": ({"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}),
    "zero-2": ({"fsdp": 2, "tensor": 4}, {"fsdp": ax.Shard(stage=2), "accumulate": 2}),
    "zero-1, typed": ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": ax.Shard(stage=1), "check_vma": True}),
    "offloaded": ({"fsdp": 2, "tensor": 2}, {"offload": "full"}),
    "flat, whole": ({"fsdp": 2, "tensor": 2}, {"fsdp": ax.Shard(flat=True, prefetch=1), "update": "whole"}),
}


@pytest.mark.parametrize("name", BOTH)
def test_what_rules_split_rests_sharded_too_and_trains_as_on_one_device(name):
    degrees, options = BOTH[name]
    plan = ax.Plan(partition=OVER_TENSOR, **options)
    shared = {"mesh": mesh_of(**degrees), "tx": optax.adamw(1e-2), "steps": 2, "max_grad_norm": 0.1}
    assert_equals_single_device(Blocks(nnx.Rngs(0)), squares, X, plan, **shared)


@pytest.mark.parametrize("left", ["tensor", "context"])
def test_the_older_partitioner_is_refused_where_it_ends_the_process(left):
    context = ax.Context(sees="whole", allow_communication=True)
    plan = ax.Plan(partition=OVER_TENSOR) if left == "tensor" else ax.Plan(context=context)
    make = lambda axis: ax.parallelize(Blocks(nnx.Rngs(0)), mesh_of(**{axis: 2, left: 2}), plan)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(
            ValueError, match=f"to which {left} would be left, .* sharded over fsdp.*these devices to data"
        ):
            make("fsdp")
        trainer, batch = make("data").trainer(optax.sgd(0.1), squares), X.reshape(2, 4, 8)
        np.testing.assert_allclose(trainer.step(batch)["loss"], squares(Blocks(nnx.Rngs(0)), batch), rtol=FLOAT64)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.slow
def test_each_rank_gathers_its_own_part_of_what_rules_split(compiled_for_users):
    """Neither axis splits a dim of the other's; along tensor nothing but activations travels, along fsdp a rank's own parts."""
    mesh = mesh_of(fsdp=4, tensor=2)
    model = ax.parallelize(Blocks(nnx.Rngs(0)), mesh, ax.Plan(partition=OVER_TENSOR))
    trainer = model.trainer(optax.adamw(1e-2), squares)
    trainer.step(X)
    for tree in (model.variables.params, trainer.state.opt_state[0].mu):
        specs = {name: leaf.sharding.spec for name, leaf in named_leaves(tree["blocks"][0]).items()}
        assert specs == {
            "up/kernel": P("fsdp", "tensor"), "up/bias": P("tensor"),
            "down/kernel": P("tensor", "fsdp"), "down/bias": P("fsdp"),
        }  # fmt: skip
    rows = ax.explain(trainer, X).collectives
    # Of both kernels of both blocks a rank has half; width 6 is stored as 8.
    scattered = sum(row.elements for row in rows if row.kind == "reduce_scatter" and row.axes == ("fsdp",))
    assert scattered == 2 * 2 * 8 * 8 + 8 * 6 + 3 * 8
    along = partitioned_traffic(trainer.trace(X).lower().compile(), dict(mesh.shape), "tensor")
    assert {kind for kind, *_ in along.entries} == {"all_reduce"}
    assert all(result_bytes(result) <= 8 * 2 * 6 for _, result, _ in along.entries), str(along)


@pytest.mark.slow
def test_checkpoints_go_on_between_rules_beside_fsdp_and_other_layouts(tmp_path):
    trainer = lambda degrees, rules: ax.parallelize(
        Blocks(nnx.Rngs(0)), mesh_of(**degrees), ax.Plan(partition=rules)
    ).trainer(optax.adamw(1e-2), squares)
    first = trainer({"fsdp": 4, "tensor": 2}, OVER_TENSOR)
    first.step(X)
    path, wanted = ax.save(tmp_path / "run", first), float(first.step(X)["loss"])
    for name, degrees, rules in (("8", {"fsdp": 8}, None), ("3", {"data": 2, "fsdp": 2, "tensor": 2}, OVER_TENSOR)):
        other = trainer(degrees, rules)
        ax.restore(path, other)
        np.testing.assert_allclose(other.step(X)["loss"], wanted, rtol=1e-9)
        ax.restore(ax.save(tmp_path / name, other), back := trainer({"fsdp": 4, "tensor": 2}, OVER_TENSOR))
        np.testing.assert_allclose(back.step(X)["loss"], other.step(X)["loss"], rtol=1e-9)


EXPERTS, WIDTH, INNER = 8, 8, 16


def routed(x, router, up, down):
    """Tokens to their expert's slots and back by einsums over all experts, as Switch Transformer writes it; none is dropped."""
    probabilities = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(probabilities.argmax(-1), EXPERTS, dtype=x.dtype)
    place = ((jnp.cumsum(chosen, 0) * chosen).sum(-1) - 1).astype(int)
    slots = jax.nn.one_hot(place, len(x), dtype=x.dtype)
    dispatch = chosen[:, :, None] * slots[:, None]
    inner = jax.nn.gelu(jnp.einsum("ech,ehf->ecf", jnp.einsum("tec,th->ech", dispatch, x), up))
    combine = dispatch * probabilities[:, :, None]
    return x + jnp.einsum("tec,ech->th", combine, jnp.einsum("ecf,efh->ech", inner, down))


SHAPES = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, INNER), "down": (EXPERTS, INNER, WIDTH)}


class NnxExperts(nnx.Module):
    def __init__(self):
        draw = np.random.default_rng(0).normal
        self.router, self.up, self.down = (nnx.Param(jnp.asarray(draw(size=shape))) for shape in SHAPES.values())

    def __call__(self, x):
        return routed(x, self.router[...], self.up[...], self.down[...])


class LinenExperts(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal(1.0)
        return routed(x, *(self.param(name, init, shape, jnp.float64) for name, shape in SHAPES.items()))


OVER_EXPERTS = {"up|down": P("expert"), ".*": P()}
OVER_BOTH = {"up": P("expert", None, "tensor"), "down": P("expert", "tensor"), ".*": P()}
TOKENS = np.random.default_rng(1).normal(size=(32, WIDTH))
ROUTED = pytest.mark.filterwarnings("ignore:.* not known .*keep.* apart. cumsum:UserWarning")
"""Slots may be of all rows or of a rank's: here none is dropped."""


@pytest.mark.slow
@ROUTED
@pytest.mark.parametrize(
    ("degrees", "rules", "plan"),
    [
        ({"data": 2, "expert": 4}, OVER_EXPERTS, {"check_vma": True}),
        ({"data": 2, "expert": 2, "tensor": 2}, OVER_BOTH, {"accumulate": 2}),
    ],
    ids=["experts", "experts and tensor"],
)
def test_stacked_experts_of_other_peoples_models_train_as_on_one_device(degrees, rules, plan):
    plan = ax.Plan(partition=Partition.of(rules), **plan)
    shared = {"mesh": mesh_of(**degrees), "tx": optax.adamw(1e-2), "steps": 2, "max_grad_norm": 0.1}
    if "tensor" in degrees:
        params = LinenExperts().init(jax.random.key(0), TOKENS)
        assert_equals_single_device(LinenExperts(), squares, TOKENS, plan, params=params, **shared)
    else:
        assert_equals_single_device(NnxExperts(), squares, TOKENS, plan, **shared)


@ROUTED
def test_stacked_experts_rest_on_their_ranks_and_none_of_their_weights_travels():
    model = ax.TensorParallel(NnxExperts(), mesh_of(data=2, expert=4), rules=OVER_EXPERTS)
    up = model.variables.params["up"]
    assert up.sharding.spec == P("expert") and up.sharding.shard_shape(up.shape) == (2, WIDTH, INNER)
    np.testing.assert_allclose(model(TOKENS), NnxExperts()(TOKENS), atol=1e-12)
    trainer = model.trainer(optax.adamw(1e-2), squares)
    traffic = model.tensor_traffic(trainer, TOKENS, axis="expert")
    weights = 8 * WIDTH * INNER * EXPERTS
    assert traffic.bytes > 0 and "partitioner" in str(traffic) and "expert (4)" in str(traffic)
    assert all(result_bytes(result) < weights / 4 for _, result, _ in traffic.entries), str(traffic)
    assert not any("expert" in row.axes and row.label == "" for row in ax.explain(trainer, TOKENS).traffic)
    with pytest.raises(ValueError, match="axis='tensor' must be one that rules split over: expert"):
        model.tensor_traffic(trainer, TOKENS)


# Models from other people's packages: transformer-in-transformer-flax, bottleneck-transformer-flax, einops.
def transformer_in_transformer():
    package = pytest.importorskip(
        "transformer_in_transformer_flax", reason="needs transformer-in-transformer-flax, einops"
    )
    config = package.TNTConfig(
        num_classes=8, depth=1, image_size=8, patch_size=4, transformed_patch_size=2, inner_dim=4, inner_heads=2,
        inner_dim_head=2, outer_dim=8, outer_heads=2, outer_dim_head=4,
    )  # fmt: skip
    rules = {
        ".*MlpBlock_./Dense_0/kernel": P(None, "tensor"),
        ".*MlpBlock_./Dense_1/kernel": P("tensor"),
        ".*SelfAttention_./(query|key|value)/kernel": P(None, "tensor"),
        ".*SelfAttention_./out/kernel": P("tensor"),
        ".*": P(),
    }
    return package.TransformerInTransformer(config=config), (4, 8, 8, 3), rules


def bottleneck_transformer():
    package = pytest.importorskip(
        "bottleneck_transformer_flax.botnet", reason="needs bottleneck-transformer-flax, einops"
    )
    config = package.BoTNetConfig(stage_sizes=[1, 1], num_classes=8, initial_filters=8, num_heads=2, head_dim=4)
    return package.BoTNet(config=config), (4, 16, 16, 3), {".*Conv.*/kernel": P(None, None, None, "tensor"), ".*": P()}


@pytest.mark.parametrize("make", [transformer_in_transformer, bottleneck_transformer])
@pytest.mark.slow
def test_other_peoples_models_equal_themselves_on_one_device(make):
    module, shape, rules = make()
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variables = jax.jit(module.init)(jax.random.key(0), x)
        noise = np.random.default_rng(1)  # some begin with a head of zeros
        params = jax.tree.map(lambda w: w + noise.normal(size=w.shape).astype(w.dtype) / 10, variables["params"])
        rest = {name: value for name, value in variables.items() if name != "params"}

        def loss(params):
            out, _ = module.apply({"params": params, **rest}, x, mutable=list(rest))
            return jnp.mean(jnp.square(out)), out

        (_, wanted), own = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        model = ax.TensorParallel(module, mesh_of(data=2, tensor=2), rules=rules, params={"params": params, **rest})
        np.testing.assert_allclose(model(x), wanted, rtol=1e-3, atol=1e-4)
        grads = model.value_and_grad(squares)(x)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * max(1, np.abs(b).max())), grads, own)
    assert any("tensor" in leaf.sharding.spec for leaf in jax.tree.leaves(model.variables.params))


def test_rules_are_a_mapping_or_pairs():
    rules = {r".*/up/kernel": P(None, "tensor"), r".*/down/kernel": P("tensor")}
    assert ax.Plan(partition=[*rules.items()]) == ax.Plan(partition=rules)
    with pytest.raises(ValueError, match=r"rules are pairs of a regular expression .* 3\) is no such pair"):
        ax.Plan(partition=[("kernel", 3)])
