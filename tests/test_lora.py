"""LoRA: adapters train as on one device under every plan, the base stays bit for bit, and no gradient of it is made."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.model.view import functionalize
from axonml_jax.models.config import ExpertsConfig, TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.parallel.plan import Partition
from axonml_jax.testing.equality import assert_equals_single_device

SIZES = {"vocab_size": 16, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "mlp_hidden_size": 12, "max_length": 8}
PRODUCT = r"dot_general %\S+, %\S+.*?-> tensor<(\S+?)x(?:f32|f64)>"
TARGETS = ["attention/.*kernel$", "mlp/(gate|up|down)(/kernel)?$"]


def transformer(dtype="float64", **changes):
    return Transformer(TransformerConfig(**SIZES, param_dtype=dtype, **changes), rngs=nnx.Rngs(0))


def tokens(rows=8, length=8):
    drawn = np.random.default_rng(0).integers(0, 16, (rows, length + 1)).astype(np.int32)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def loss(model, batch):
    return ax.WeightedMean(*model.loss(**batch))


def adapted(model, **options):
    return ax.lora(model, **{"rank": 2, "alpha": 6, "targets": TARGETS} | options)


EXPERTS = {"experts": ExpertsConfig(num_experts=4, load_balance=0.0)}
# (changes to the transformer, mesh, plan)
PLANS = {
    "ddp": ({}, {"data": 4}, {}),
    "zero-1, accumulating": ({}, {"fsdp": 2}, {"fsdp": ax.Shard(stage=1), "accumulate": 2}),
    "zero-2, selective": ({}, {"fsdp": 2}, {"fsdp": ax.Shard(stage=2), "remat": "selective"}),
    "zero-3, typed": ({}, {"data": 2, "fsdp": 2}, {"check_vma": True}),
    "a stack under zero-3": ({"scan_layers": True}, {"fsdp": 2}, {"remat": "full"}),
    "tensor": ({"num_kv_heads": 1}, {"data": 2, "tensor": 2}, {"check_vma": True}),
    "tensor, sequence, zero-3, a stack": (
        {"scan_layers": True, "sequence_parallel": True},
        {"fsdp": 2, "tensor": 2},
        {},
    ),
    "overlapped": ({"overlap": True}, {"tensor": 4}, {}),
    "3-D": ({"split": "grid"}, {"row": 2, "col": 2, "depth": 2}, {}),
    "experts": (EXPERTS, {"expert": 2, "tensor": 2}, {}),
    "experts in a stack": (EXPERTS | {"scan_layers": True}, {"fsdp": 2, "expert": 2}, {}),
    "stages": ({}, {"pipe": 2, "fsdp": 2}, {"pipe": ax.Pipelined(num_microbatches=2)}),
    "positions": ({}, {"context": 2, "fsdp": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_adapters_train_as_on_one_device(name):
    changes, degrees, plan = PLANS[name]
    assert_equals_single_device(
        adapted(transformer(**changes)),
        loss,
        tokens(),
        ax.Plan(**plan),
        mesh=mesh_of(**degrees),
        tx=optax.adam(1e-2),
        steps=3,
    )


class Plain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, param_dtype=jnp.float64, rngs=rngs)
        self.down = nnx.Linear(8, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@pytest.mark.parametrize("base", [None, "int8"])
def test_swapped_layers_and_linen_train_as_on_one_device(base):
    class Scanned(linen.Module):
        @linen.compact
        def __call__(self, x):
            def layer(cell, x, _):
                return jnp.tanh(cell(x)), None

            scan = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return scan(linen.Dense(4, param_dtype=jnp.float64, name="dense"), x, None)[0]

    x = np.random.default_rng(1).normal(size=(8, 4))
    squares = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    ax.auto_parallelize(swapped := Plain(), mesh := mesh_of(data=2, tensor=2))
    assert_equals_single_device(adapted(swapped, targets="kernel", base=base), squares, x, mesh=mesh)
    module = Scanned()
    params = module.init(jax.random.key(0), x)
    given = adapted(module, targets="kernel", stacked="kernel", base=base)
    assert_equals_single_device(given, squares, x, mesh=mesh_of(fsdp=2), params=params)


RULES = {"up/kernel": P(None, "tensor"), "up/bias": P("tensor"), "down/kernel": P("tensor"), "down/bias": P()}


@pytest.mark.parametrize("base", [None, "int8"])
def test_path_rules_name_the_models_parameters_and_split_adapters_as_the_sides_of_their_matrices(base):
    x = np.random.default_rng(1).normal(size=(8, 4))
    squares, mesh = lambda model, x: jnp.mean(jnp.square(model(x) - 1)), mesh_of(data=2, tensor=2)
    given = adapted(Plain(), targets="kernel", base=base)
    assert_equals_single_device(given, squares, x, ax.Plan(partition=Partition.of(RULES)), mesh=mesh, steps=2)
    model = ax.TensorParallel(given, mesh, rules=RULES)
    split = {name: dict(enumerate(leaf.sharding.spec)) for name, leaf in named_leaves(model.variables.params).items()}
    on = {name: [dim for dim, axis in dims.items() if axis == "tensor"] for name, dims in split.items()}
    wanted = {"up/kernel_lora_a": [], "up/kernel_lora_b": [1], "down/kernel_lora_a": [0], "down/kernel_lora_b": []}
    assert on == wanted
    with pytest.raises(ValueError, match=r"rule 'up/kernel_lora_a': matches no parameter"):
        ax.TensorParallel(given, mesh, rules=RULES | {"up/kernel_lora_a": P()})


@pytest.mark.slow
def test_adapters_rest_in_float32_and_join_products_of_bfloat16():
    plan, rate = ax.Plan(precision=ax.Precision.of("bf16")), optax.sgd(0.5)  # Adam would divide noise by noise
    given, batch = adapted(transformer("float32")), tokens()
    assert_equals_single_device(given, loss, batch, plan, mesh=mesh_of(fsdp=2), tx=rate, steps=3)

    def products(model):
        """The shapes of those in float32, as the attention's scores are."""
        trainer = ax.parallelize(model, mesh_of(data=1), plan).trainer(rate, loss)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trainer.model.parameters()))
        text = trainer.trace(batch).lower().as_text()
        return {shape for shape, kind in re.findall(r"dot_general .*?-> tensor<(\S+)x(\w+)>", text) if kind == "f32"}

    assert products(given) <= products(transformer("float32"))


@pytest.mark.slow
def test_training_begins_at_the_model_itself_leaves_it_bit_for_bit_resumes_and_merges(tmp_path):
    own = transformer("float32", scan_layers=True)
    batch = tokens()
    plain = ax.FSDP(own, mesh_of(fsdp=2))
    model = ax.FSDP(adapted(own), mesh_of(fsdp=2))
    np.testing.assert_array_equal(model(batch["tokens"]), plain(batch["tokens"]))
    before = {name: value for name, value in model.state_dict().items() if "_lora_" not in name}
    trainer = model.trainer(optax.adam(1e-2), loss)
    for _ in range(2):
        trainer.step(batch)
    ax.save(tmp_path / "saved", trainer)
    trainer.step(batch)
    after = model.state_dict()
    other = ax.FSDP(adapted(own, seed=1), mesh_of(fsdp=2))
    again = other.trainer(optax.adam(1e-2), loss)
    ax.restore(tmp_path / "saved", again)
    again.step(batch)
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    ours = named_leaves(nnx.to_pure_dict(nnx.state(model.module, nnx.Param)))
    assert set(ours) == set(before)
    name = "blocks/layer/mlp/up/kernel"
    first, second = (after[f"{name}_lora_{factor}"] for factor in "ab")
    summed = np.abs(before[name]) + 3 * np.abs(first) @ np.abs(
        second
    )  # what rounding is relative to, where terms cancel
    assert np.max(np.abs(ours[name] - (before[name] + 3 * first @ second)) / summed) < 1e-6
    assert np.abs(ours[name] - before[name]).max() > 1e-3
    np.testing.assert_allclose(model.module(batch["tokens"]), model(batch["tokens"]), atol=1e-5)
    prompts = batch["tokens"][:, :3]
    texts = [ax.generate(each, prompts, 4, jax.random.key(0), temperature=0) for each in (model, model.module)]
    np.testing.assert_array_equal(*texts)


def test_parameters_of_the_model_may_train_besides():
    model = ax.DDP(adapted(transformer(), targets="up/kernel"), mesh_of(data=1), trainable="^norm/")
    up = "mlp/up/kernel_lora"
    names = {"norm/scale", *(f"blocks/{i}/{up}_{each}" for i in range(2) for each in "ab")}
    assert set(named_leaves(model.parameters())) == names


def test_targets_that_do_not_fit_are_all_named():
    with pytest.raises(ValueError, match=r"rank=0 must .*alpha=-1 must .*'\*' is no regular expression"):
        ax.lora(None, rank=0, alpha=-1, targets="*")
    with pytest.raises(
        ValueError, match=r"(?s)'nowhere' matches no parameter.*norm/scale.*is no matrix.*up/kernel.*rank 9 is"
    ):
        ax.DDP(adapted(transformer(), rank=9, targets=["nowhere", "mlp_norm", "up/kernel"]), mesh_of(data=1))
    with pytest.raises(ValueError, match=r"attention_norm/scale \(2, 8\): is no matrix"):
        stack = transformer(scan_layers=True)
        ax.DDP(adapted(stack, targets="blocks/layer/.*norm/scale"), mesh_of(data=1))


def test_a_pattern_that_names_a_layer_means_its_matrices():
    given = adapted(Projections(), targets=["attention/(query|out)", "^key"])
    state = ax.DDP(given, mesh_of(data=1)).state_dict()
    names = ["attention/out/kernel", "attention/query/kernel", "key_value/w"]
    assert sorted(name for name in state if "_lora_" in name) == [f"{each}_lora_{ab}" for each in names for ab in "ab"]
    beside = adapted(Projections(), targets="attention/query/bias")  # [n, d], named by itself
    assert ax.DDP(beside, mesh_of(data=1)).state_dict()["attention/query/bias_lora_a"].shape == (2, 2)


def test_a_bias_that_a_pattern_names_for_itself_is_refused():
    with pytest.raises(ValueError, match=r"up/bias \(\d+,\): is no matrix"):
        ax.DDP(adapted(transformer(use_bias=True), targets=["mlp/up/kernel", "mlp/up/bias"]), mesh_of(data=1))


class Named(nnx.Module):
    """Parameters of its own that are called as adapters are."""

    def __init__(self):
        self.up = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.w_lora_a, self.w_lora_b = nnx.Param(jnp.eye(4, 2)), nnx.Param(jnp.ones((2, 1)))

    def __call__(self, x):
        return jnp.tanh(self.up(x)) @ self.w_lora_a[...] @ self.w_lora_b[...]


def test_names_of_ones_own_that_end_as_those_of_adapters_do_are_no_adapters():
    x = np.random.default_rng(1).normal(size=(4, 4))
    squares = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    given = ax.lora(Named(), rank=1, targets="up/kernel")
    assert_equals_single_device(given, squares, x, mesh=mesh_of(data=2), steps=2)
    assert set(ax.DDP(given, mesh_of(data=1)).state_dict()) >= {"w_lora_a", "up/kernel_lora_a"}


def test_adapters_of_adapters_and_names_that_are_taken_are_refused():
    with pytest.raises(ValueError, match=r"has adapters already, of targets=\['kernel'\]"):
        ax.lora(ax.lora(transformer(), rank=1, targets="kernel"), rank=1, targets="up/kernel")
    model = Named()
    model.w = nnx.Param(jnp.ones((4, 4)))
    with pytest.raises(
        ValueError, match=r"the names of existing parameters of the model: w_lora_a, w_lora_b; rename these"
    ):
        ax.DDP(ax.lora(model, rank=1, targets="w$"), mesh_of(data=1))


def attend(query, key, value, **_):
    weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", query, key))
    return jnp.einsum("BNTS,BSNH->BTNH", weights, value)


class Einsum(nnx.Module):
    """As Tunix writes its projections."""

    def __init__(self, einsum_str, shape, rngs):
        self.einsum_str, self.w = einsum_str, nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float64) / 3)

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Projections(nnx.Module):
    """Kernels of three and four dims: of NNX's attention, and of einsums that sum over any of them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        options = {"attention_fn": attend, "param_dtype": jnp.float64, "decode": False}  # NNX's own computes in float32
        self.attention = nnx.MultiHeadAttention(2, 6, 8, rngs=rngs, **options)
        self.key_value = Einsum("BSD,CKDH->CBSKH", (2, 2, 6, 3), rngs)
        self.query, self.out = Einsum("BTD,NDH->BTNH", (2, 6, 3), rngs), Einsum("BTNH,NHD->BTD", (2, 3, 6), rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.out(attend(self.query(x), *self.key_value(x)))


# Of each kernel the shapes of A and B, and the einsum that makes their product.
SIDES = {
    "attention/query/kernel": ((6, 2), (2, 2, 4), "ir,rnd->ind"),
    "attention/out/kernel": ((2, 4, 2), (2, 6), "ndr,ro->ndo"),
    "key_value/w": ((6, 2), (2, 2, 2, 3), "dr,rckh->ckdh"),
    "query/w": ((6, 2), (2, 2, 3), "dr,rnh->ndh"),
    "out/w": ((2, 3, 2), (2, 6), "nhr,rd->nhd"),
}


@pytest.mark.parametrize("base", [None, "int8"])
def test_kernels_of_more_dims_get_the_adapters_of_the_matrix_that_the_product_uses(base):
    x = np.random.default_rng(1).normal(size=(4, 5, 6))
    given = adapted(Projections(), targets=["kernel", "w$"], base=base)
    squares = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    tx = optax.sgd(0.1)  # Adam divides gradients of keys, which are nearly 0, by themselves
    assert_equals_single_device(given, squares, x, mesh=mesh_of(data=2, fsdp=2), tx=tx, steps=2)
    if base is not None:
        return
    rules = {"key_value/w": P(None, "tensor"), "(query|out)/w": P("tensor"), ".*": P()}  # by heads
    split = ax.TensorParallel(given, mesh_of(data=1, tensor=2), rules=rules)
    dims = {name: tuple(leaf.sharding.spec) for name, leaf in named_leaves(split.variables.params).items()}
    assert [dims[f"key_value/w_lora_{each}"].count("tensor") for each in "ab"] == [0, 1]
    assert [dims[f"out/w_lora_{each}"].count("tensor") for each in "ab"] == [1, 0]
    np.testing.assert_allclose(split(x), Projections()(x), rtol=1e-9)
    model = ax.FSDP(given, mesh_of(fsdp=2))
    trainer = model.trainer(optax.adam(1e-1), squares)
    products = re.findall(PRODUCT, trainer.train_step.lower(trainer.state, x).as_text())
    of_kernels = {"6x8", "8x6", "6x12", "6x6", "6x2x4", "2x4x6", "2x2x6x3", "2x6x3", "2x3x6"}  # A B, or gradients of W
    assert products and not of_kernels & set(products)
    for _ in range(2):
        trainer.step(x)
    before, after = (
        named_leaves(nnx.to_pure_dict(nnx.state(each, nnx.Param))) for each in (Projections(), model.module)
    )
    state = model.state_dict()
    for name, (a, b, product) in SIDES.items():
        first, second = state[f"{name}_lora_a"], state[f"{name}_lora_b"]
        assert (first.shape, second.shape) == (a, b), name
        wanted = before[name] + 3 * np.einsum(product, first, second)
        np.testing.assert_allclose(after[name], wanted, rtol=1e-9, atol=1e-12, err_msg=name)


def test_kernels_whose_sides_nothing_tells_are_refused_and_dims_says_them():
    class Heads(linen.Module):
        bias: bool = True

        @linen.compact
        def __call__(self, x):
            options = {"use_bias": self.bias, "param_dtype": jnp.float64}
            y = linen.MultiHeadDotProductAttention(2, qkv_features=8, name="attention", **options)(x, x)
            return linen.DenseGeneral(6, axis=(-1,), name="last", **options)(y)

    x = np.random.default_rng(1).normal(size=(4, 5, 6))
    squares, mesh = lambda model, x: jnp.mean(jnp.square(model(x) - 1)), mesh_of(fsdp=2)
    dims = {"(query|key|value)/kernel": "in out out", "out/kernel": "in in out"}
    for bias, said in ((True, None), (False, dims)):
        module = Heads(bias)
        params = module.init(jax.random.key(0), x)
        given = adapted(module, targets="kernel", dims=said)
        assert_equals_single_device(given, squares, x, mesh=mesh, params=params, tx=optax.sgd(0.1), steps=2)
        state = ax.FSDP(given, mesh, params=params).state_dict()
        assert state["params/attention/query/kernel_lora_b"].shape == (2, 2, 4)
        assert state["params/attention/out/kernel_lora_a"].shape == (2, 4, 2)
    make = lambda given: ax.FSDP(given, mesh, params=params)
    with pytest.raises(
        ValueError, match=r"query/kernel \(6, 2, 4\): is no matrix\n(?s:.*)dims={'query/kernel': 'in out out'}"
    ):
        make(adapted(module, targets="kernel"))
    with pytest.raises(ValueError, match=r"last/kernel \(6, 6\): has not the dims 'in in out'"):
        make(adapted(module, targets="last/kernel", dims={"last": "in in out"}))
    with pytest.raises(
        ValueError, match=r"'in in' needs at least one in and one out.*'row out' must be made of the words stack"
    ):
        adapted(module, targets="kernel", dims={"a": "in in", "b": "row out"})
    with pytest.raises(
        ValueError, match=r"query/kernel \(6, 2, 4\): `stacked` names it, .* as 'in out out': leave it out"
    ):
        ax.FSDP(adapted(Projections(), targets="attention/query/kernel", stacked="kernel"), mesh)
    biased = Heads()
    with pytest.raises(
        ValueError, match=r"query/kernel \(6, 2, 4\): `stacked` names it, but by its bias .*'in out out'"
    ):
        ax.FSDP(
            adapted(biased, targets="query/kernel", stacked="kernel"), mesh, params=biased.init(jax.random.key(0), x)
        )


def test_no_gradient_of_the_base_is_made_sent_or_kept_and_the_optimizer_holds_adapters_alone():
    mesh = mesh_of(data=2, fsdp=2)
    model = ax.FSDP(adapted(transformer("float32")), mesh)
    trainer = model.trainer(optax.adam(1e-2), loss)
    moments = [named_leaves(each) for each in (trainer.opt_state[0].mu, trainer.opt_state[0].nu)]
    assert all(set(each) == set(named_leaves(model.parameters())) for each in moments)
    assert all("_lora_" in name for each in moments for name in each)
    text = trainer.train_step.lower(trainer.state, tokens()).as_text()
    assert not any(x in re.findall(PRODUCT, text) for x in ("8x12", "12x8"))  # as gradients of mlp kernels would be
    everything = ax.FSDP(transformer("float32"), mesh)
    whole = everything.trainer(optax.adam(1e-2), loss)
    plain = whole.train_step.lower(whole.state, tokens()).as_text()
    assert any(x in re.findall(PRODUCT, plain) for x in ("8x12", "12x8"))
    scattered = [_scattered(trainer), _scattered(whole)]
    assert scattered[0] == sorted(leaf.size for leaf in jax.tree.leaves(model.parameters()))
    assert scattered[1] == sorted(leaf.size for leaf in jax.tree.leaves(everything.parameters()))


def _scattered(trainer):
    """Elements of every gradient that is reduce-scattered."""
    sent = [each for each in ax.explain(trainer, tokens()).collectives if each.kind == "reduce_scatter"]
    return sorted(size for each in sent for size in each.leaf_elements)


class Readings(nnx.Module):
    """A matrix and a stack of them, read in every way that code reads one."""

    def __init__(self):
        key = jax.random.key(0)
        self.w, self.stack = nnx.Param(jax.random.normal(key, (4, 4))), nnx.Param(jax.random.normal(key, (3, 4, 4)))

    def __call__(self, x):
        w, stack = self.w[...], self.stack[...]
        x = jnp.tanh(x @ w)
        x = jnp.tanh(jnp.einsum("oi,bi->bo", w, x))  # over the other side
        x = jnp.tanh(jax.lax.dot_general(w, x, (((0,), (1,)), ((), ()))).T)  # from the left
        x = jnp.tanh(jax.lax.ragged_dot(x, stack, jnp.array([0, 0, x.shape[0]])))  # a row means the same in any batch
        x = jnp.tanh(jnp.einsum("ebi,eio->ebo", jnp.stack([x] * 3), stack).sum(0))
        x = jnp.tanh(jnp.einsum("eio,bi->bo", stack, x) + w[1] + w.T.sum())  # whole
        x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        x = jax.lax.cond(w.sum() != 0, lambda: x @ w, lambda: x)
        return jax.lax.scan(lambda x, own: (jnp.tanh(x @ own @ w), None), x, stack)[0]


@pytest.mark.filterwarnings("ignore:it is not known whether the model's code keeps rows:UserWarning")  # of ragged_dot
@pytest.mark.parametrize("base", [None, "int8"])
def test_a_matrix_is_read_with_its_adapters_however_it_is_read(base):
    given = ax.lora(Readings(), rank=2, alpha=3, targets=["w$", "stack"], stacked="stack", base=base)
    x = np.random.default_rng(2).normal(size=(4, 4))
    squares = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    assert_equals_single_device(given, squares, x, ax.Plan(), mesh=mesh_of(data=2), steps=2)


def test_matrices_that_are_named_for_no_match_are_those_that_can_be_adapted():
    class Convolved(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.head = nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    with pytest.raises(ValueError, match=r"matrices here are conv/kernel, head/kernel$"):
        ax.DDP(ax.lora(Convolved(nnx.Rngs(0)), rank=2, targets="nowhere"))
    adapted = ax.DDP(ax.lora(Convolved(nnx.Rngs(0)), rank=2, targets=r"conv/kernel|head/kernel"))
    assert {"conv/kernel_lora_a", "head/kernel_lora_a"} <= adapted.state_dict().keys()


class Holder(nnx.Pytree):
    """Holds a layer without being a module."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, use_bias=False, param_dtype=jnp.float64, rngs=rngs)


class SharedAndHeld(nnx.Module):
    """A layer that is named last and read first, and one in a pytree that is no module."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.later = nnx.Linear(4, 4, use_bias=False, param_dtype=jnp.float64, rngs=rngs)
        self.holder = Holder(rngs)
        self.again = self.later

    def __call__(self, x):
        return self.again(self.holder.inner(self.later(x)))


def test_layers_that_are_shared_or_held_outside_of_modules_get_adapters():
    given = ax.lora(SharedAndHeld(), rank=2, targets="kernel")
    _, variables = functionalize(given)
    assert set(named_leaves(variables.params)) == {
        f"{path}/kernel_lora_{factor}" for path in ("again", "holder/inner") for factor in "ab"
    }
    x = np.random.default_rng(3).normal(size=(4, 4))
    squares = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    assert_equals_single_device(given, squares, x, ax.Plan(), mesh=mesh_of(data=2), steps=2)


def test_a_model_with_adapters_places_arrays_over_the_mesh_on_which_it_was_given():
    class Places(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.lax.with_sharding_constraint(self.inner(x), P("rows", None))

    users = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    model = Places()
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(users, P())))
    squares = lambda model, x: jnp.mean(jnp.square(model(x)))
    losses = [
        ax.DDP(given, mesh_of(data=2)).trainer(optax.sgd(0.1), squares).step(np.ones((4, 4), np.float32))["loss"]
        for given in (model, ax.lora(model, rank=2, targets="kernel"))
    ]
    assert losses[0] == losses[1]
