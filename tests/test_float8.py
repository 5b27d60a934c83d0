"""Products of 8-bit floats: the same under every plan, wherever they stand, and only those that may."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from meshes import mesh_of
from plan_models import CASES, Case
from test_lora import SIZES, Plain

import axonml_jax as ax
from axonml_jax.base import named_leaves
from axonml_jax.config.sections import PlanConfig
from axonml_jax.layers.float8 import ProductForm, float8_product, reading_float8, recorded_products
from axonml_jax.model.view import Mode, Variables, functionalize
from axonml_jax.models.config import TransformerConfig
from axonml_jax.testing.equality import assert_equals_single_device, assert_trees_close

FP8 = ax.Precision(products="fp8")
ROWS = np.random.default_rng(1).normal(size=(16, 4))


def test_products_in_loops_conditionals_and_checkpoints_round_too():
    draw = np.random.default_rng(2).normal
    w = {"a": draw(size=(4, 4)), "b": draw(size=(2, 4, 4)), "c": draw(size=(4, 4)), "d": draw(size=(4, 4))}
    w |= {"last": draw(size=(4, 2))}

    def run(variables, x, dot=jnp.matmul):
        w = variables.params
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(dot(x, w["a"])), None), x, None, length=2)
        x = jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(dot(x, w["b"][i])), x)
        x = jax.lax.cond(x.sum() > 0, lambda x: dot(x, w["c"]), lambda x: dot(x, w["c"].T), x)
        return jax.checkpoint(dot)(x, w["d"]) @ w["last"]

    form, variables = ProductForm(((1,), (0,)), jnp.dtype("float64"), native=False), Variables(w, {}, {})
    got = reading_float8(run, FP8, variables, jnp.asarray(ROWS))
    wanted = run(jax.tree.map(jnp.asarray, variables), jnp.asarray(ROWS), lambda x, w: float8_product(form, x, w))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


class Pair(nnx.Module):
    """Layers that split features over tensor, and a head that is left whole."""

    def __init__(self, overlap=False):
        options = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        self.up = ax.ColumnParallelLinear(4, 8, overlap=overlap, **options)
        self.down = ax.RowParallelLinear(8, 4, **options)
        self.head = nnx.Linear(4, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(x + self.down(jnp.tanh(self.up(x))))


def squares(model, x):
    return jnp.mean(jnp.square(model(x) - 1))


PAIR = Case(Pair, squares, lambda rows: ROWS[:rows])
# (model, mesh, plan); each rank and microbatch of the pair has two rows, so that there is one program of the oracle
PLANS = {
    "ddp, accumulating": (PAIR, {"data": 4}, {"accumulate": 2}),
    "a loop, zero-2, selective": (CASES["recurrent"], {"fsdp": 2}, {"fsdp": ax.Shard(stage=2), "remat": "selective"}),
    "a stack, zero-3, all recomputed": (CASES["scanned"], {"fsdp": 2}, {"remat": "full", "check_vma": True}),
    "tensor, typed": (PAIR, {"data": 2, "tensor": 2}, {"check_vma": True, "accumulate": 4}),
    "stages": (PAIR, {"pipe": 2, "data": 2}, {"pipe": ax.Pipelined(num_microbatches=4, split=("down",))}),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_device_that_rounds_too(name):
    case, degrees, plan = PLANS[name]
    given = {"mesh": mesh_of(**degrees), "params": case.params(), "steps": 2}
    assert_equals_single_device(case.model(), case.loss, case.batch(16), ax.Plan(**plan, precision=FP8), **given)


def test_swapped_layers_and_loops_of_linen_train_as_on_one_device():
    class Scanned(linen.Module):
        @linen.compact
        def __call__(self, x):
            def layer(cell, x, _):
                return jnp.tanh(cell(x)), None

            scan = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            x, _ = scan(linen.Dense(4, param_dtype=jnp.float64, name="dense"), x, None)
            return linen.Dense(2, param_dtype=jnp.float64, name="last")(x)

    plan, params = ax.Plan(precision=FP8), Scanned().init(jax.random.key(0), ROWS)
    assert_equals_single_device(Scanned(), squares, ROWS, plan, mesh=mesh_of(fsdp=2), params=params, steps=2)
    ax.auto_parallelize(swapped := Plain(), mesh := mesh_of(data=2, tensor=2))
    assert_equals_single_device(swapped, squares, ROWS, plan, mesh=mesh, steps=2)


def test_matrices_with_adapters_round_and_adapters_do_not():
    def trained(mesh, accumulate):
        model = ax.parallelize(
            ax.lora(Pair(), rank=2, targets="up/kernel"), mesh, ax.Plan(precision=FP8, accumulate=accumulate)
        )
        trainer = model.trainer(optax.sgd(0.5), squares)
        for _ in range(2):
            trainer.step(ROWS)
        return model.parameters()

    with recorded_products() as said:
        assert_trees_close(trained(mesh_of(fsdp=2), 1), trained(mesh_of(data=1), 2), "adapters")
    assert [*said] == [
        "  rounded: down/kernel, up/kernel\n"
        "  as they were, adapters: up/kernel_lora_a, up/kernel_lora_b\n"
        "  as they were, the last products: head/kernel"
    ]


def gradients(precision, **degrees):
    parallel = ax.parallelize(Pair(), mesh_of(**degrees), ax.Plan(precision=precision))
    value, grads = parallel.value_and_grad(squares)(ROWS)
    return float(value), {name: np.asarray(leaf) for name, leaf in named_leaves(grads).items()}


def test_how_rows_and_weights_are_split_changes_little_and_rounding_changes_more():
    """Each rank rounds by the scales of what it holds; they are powers of two, so that only small elements round otherwise."""
    (one, whole), (plain, exact) = gradients(FP8, data=1), gradients(None, data=1)
    far = lambda a, b: max(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max() for name in b)
    assert 2.0**-8 < far(whole, exact) < 0.25 and 2.0**-16 * one < abs(one - plain) < 0.05 * one
    for degrees in ({"data": 8}, {"tensor": 4}):
        many, split = gradients(FP8, **degrees)
        assert abs(one - many) <= 2.0**-16 * one and far(split, whole) <= 2.0**-12, degrees


class Chooser(nnx.Module):
    """A router of somebody's own, a convolution, a tied table and a vector, between products."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3,), rngs=rngs)
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.gate, self.vector = nnx.Linear(4, 2, rngs=rngs), nnx.Param(jnp.ones((4,)))
        self.sure = nnx.Linear(4, 4, precision="highest", rngs=rngs)

    def __call__(self, x):
        x = self.conv(self.embed(x))
        best, which = jax.lax.top_k(self.gate(x), 1)
        x = self.sure(x) * (x @ self.vector[...])[..., None]
        x = x + self.down(jax.nn.gelu(self.up(x))) * best * which
        return self.embed.attend(x)


def called(model, precision, x):
    """A model's call, traced only."""
    view, variables = functionalize(model)
    call = lambda variables, x: view.bind(variables, jax.random.key(0), Mode())(x)
    return jax.eval_shape(lambda *args: reading_float8(call, precision, *args), variables, x)


def test_what_stays_is_said_once_with_the_reason(caplog):
    with caplog.at_level("INFO", "axonml_jax"):
        for kept in ((), (), ("up",)):
            called(Chooser(), replace(FP8, products_kept=kept), np.zeros((2, 5), np.int32))
    said = [record.getMessage() for record in caplog.records if "rounded:" in record.getMessage()]
    assert said[0].splitlines()[1:] == [
        "  rounded: down/kernel, up/kernel",
        "  as they were, a convolution: conv/kernel",
        "  as they were, what top-k, sort or argmax read: gate/kernel",
        "  as they were, of a precision that the model asks for: sure/kernel",
        "  as they were, a product of a vector: vector",
        "  as they were, the last products: embed/embedding",
    ]
    assert len(said) == 2 and "named in products_kept: up/kernel" in said[1]


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match=r"products='int4' must be 'fp8' or None; products_kept: '\(' is no regular"):
        ax.Precision(products="int4", products_kept=("(",))
    with pytest.raises(ValueError, match="products_kept: 'nowhere' match no parameter; there are down/bias, "):
        ax.DDP(Pair(), precision=ax.Precision(products="fp8", products_kept="nowhere"))
    with pytest.raises(
        ValueError, match=r"no product of the model may be rounded\n  rounded: none\n  as they were, named in"
    ):
        called(Pair(), replace(FP8, products_kept=("up", "down")), ROWS)
    inside = ax.parallelize(Pair(overlap=True), mesh_of(tensor=2), ax.Plan(precision=FP8))
    with pytest.raises(ValueError, match=r"up/kernel are multiplied inside layers that exchange activations"):
        inside(ROWS)
    config = TransformerConfig(**SIZES, sequence_parallel=True)
    with pytest.raises(ValueError, match="search with precision='bf16'"):
        ax.plan(config, num_devices=4, global_batch=8, precision="fp8")
    with pytest.raises(ValueError, match="reaches no products under sequence_parallel"):
        ax.explain(ax.Plan(precision="fp8"), model=config, mesh={"tensor": 2}, global_batch=8)


def test_configurations_name_what_stays_and_predictions_say_how_products_are_priced():
    kept = PlanConfig(precision="fp8", products_kept=("up",)).build().precision
    assert kept == replace(ax.Precision.of("fp8"), products_kept=("up",))
    with pytest.raises(
        ValueError, match=r"plan: Precision: products_kept=\['up'\] has no effect without products='fp8'"
    ):
        PlanConfig(precision="bf16", products_kept=("up",))
    model, sizes = TransformerConfig(**SIZES), {"mesh": {"fsdp": 4}, "global_batch": 8}
    found, plain = (ax.explain(ax.Plan(precision=each), model=model, **sizes) for each in ("fp8", "bf16"))
    assert found.memory == plain.memory and found.traffic == plain.traffic and "products of fp8" in found.plan
    assert [note for note in found.notes if note not in plain.notes] == [
        "products of fp8 are as long as those of bfloat16 here: where devices have units for them, they take less time"
    ]
