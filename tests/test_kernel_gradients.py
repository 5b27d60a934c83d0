"""Gradients of kernels from a transposed operand: which products are written anew, and that plans train as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec
from meshes import mesh_of

import axonml_jax as ax
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import cast_to_varying
from axonml_jax.layers.losses import vocab_parallel_cross_entropy
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer
from axonml_jax.program import on_cpu as kernel_gradients
from axonml_jax.program.on_cpu import with_transposed_operands
from axonml_jax.program.program import read_program, run_program
from axonml_jax.testing.equality import assert_equals_single_device

WHOLE, SPLIT = PartitionSpec(), PartitionSpec("x")


def layer(w, x):
    return jnp.tanh(x @ w)


def plain(w, x):
    return layer(w, x)


def of_rows(w, x):
    """A kernel [o, i], as a table that gives logits: nothing transposes its gradient."""
    return jnp.tanh(jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))


def called(w, x):
    return jax.jit(layer)(w, jax.jit(layer)(w, x))


def in_a_scan(w, x):
    return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=3)[0]


def in_a_branch(w, x):
    return jax.lax.cond(x.sum() > 0, lambda: layer(w, x), lambda: layer(2 * w, x))


def computed_again(w, x):
    return jax.checkpoint(layer)(w, x)


def gradients(fun, check_vma=False, manual=None, size=256, dtype="float32"):
    """The jaxpr of a kernel's gradient on two devices, and its arguments."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def local(w, x):
        w = cast_to_varying(w, ("x",)) if check_vma else w
        return jax.lax.psum(jax.grad(lambda w: jnp.square(fun(w, x)).mean())(w), "x")

    names = {} if manual is None else {"axis_names": manual}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=WHOLE, check_vma=check_vma, **names)
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape) / 16, dtype) for shape in ((size, size), (2 * size, size)))
    return trace(mapped, w, x).jaxpr, (w, x)


def products(program):
    """Of every product in a program the dims that it sums over, and whether a barrier made its first operand."""
    behind = {number for each in program.equations if each.name == "optimization_barrier" for number in each.outputs}
    found = []
    for equation in program.equations:
        if equation.name == "dot_general":
            found.append((equation.op.contraction.contracted, equation.inputs[0] in behind))
        bodies = {id(body): body for body in equation.bodies}.values()
        found += [each for body in bodies for each in products(body)]
    return found


def slow(jaxpr):
    return sum(contracted == ((0,), (0,)) for contracted, _ in products(read_program(jaxpr)))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("fun", [plain, of_rows, called, in_a_scan, in_a_branch, computed_again])
def test_gradients_of_kernels_are_made_of_a_transposed_operand(fun, check_vma):
    jaxpr, given = gradients(fun, check_vma)
    new = with_transposed_operands(jaxpr)
    assert slow(jaxpr) and not slow(new)
    turned = [contracted for contracted, behind in products(read_program(new)) if behind]
    assert turned and set(turned) == {((1,), (0,))}
    (before,), (after,) = (jax.jit(lambda *x, of=of: run_program(read_program(of), x))(*given) for of in (jaxpr, new))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


UNCHANGED = {
    "narrow": {"size": kernel_gradients.FEWEST - 1},
    "float64": {"dtype": "float64"},
    "left to the partitioner": {"manual": {"x"}},
}


@pytest.mark.parametrize("options", UNCHANGED.values(), ids=UNCHANGED)
def test_other_products_stay(options):
    jaxpr, _ = gradients(plain, **options)
    assert slow(jaxpr) and with_transposed_operands(jaxpr) is jaxpr


def test_operands_too_large_to_transpose_stay(monkeypatch):
    monkeypatch.setattr(kernel_gradients, "MOST_BYTES", 256 * 256 * 4 - 1)
    jaxpr, _ = gradients(plain)
    assert with_transposed_operands(jaxpr) is jaxpr


def test_the_body_of_a_function_called_twice_stays_one():
    gradient = jax.jit(lambda x, dy: jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ()))))
    x = jnp.ones((256, 128), "float32")
    new = with_transposed_operands(trace(lambda x: gradient(x, 2 * x) + gradient(x, x), x).jaxpr)
    calls = [each for each in read_program(new, lambda *_: False).equations if each.name == "jit"]
    assert len(calls) == 2 and calls[0].op.called is calls[1].op.called and not slow(new)


SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "max_length": 8}


def loss_fn(model, batch):
    return vocab_parallel_cross_entropy(model(batch["x"]), batch["y"]).mean()


def batch(rows):
    drawn = np.random.default_rng(0).integers(0, 32, (rows, 9))
    return {"x": drawn[:, :-1], "y": drawn[:, 1:]}


PLANS = {
    "ddp": (ax.Plan(), {"data": 2}),
    "accumulated, typed": (ax.Plan(accumulate=3, check_vma=True), {"data": 2}),
    "zero-3, recomputed": (ax.Plan(fsdp=ax.Shard(stage=3), remat="full"), {"fsdp": 4}),
    "zero-3, accumulated": (ax.Plan(fsdp=ax.Shard(stage=3), accumulate=2), {"fsdp": 2}),
    "tensor": (ax.Plan(), {"data": 2, "tensor": 2}),
    "pipeline": (ax.Plan(pipe=ax.Pipelined(num_microbatches=4)), {"pipe": 2}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_train_as_one_device_does(monkeypatch, plan):
    monkeypatch.setattr(kernel_gradients, "FEWEST", 2)
    plan, degrees = PLANS[plan]
    scanned = "fsdp" in degrees
    model = Transformer(TransformerConfig(**SIZES, scan_layers=scanned), rngs=nnx.Rngs(0))
    assert_equals_single_device(model, loss_fn, batch(24), plan, mesh=mesh_of(**degrees), steps=3)


def test_the_compiled_step_of_the_librarys_transformer_has_no_slow_product():
    shape = {**SIZES, "hidden_size": 128, "num_heads": 4, "vocab_size": 128, "max_length": 64}
    model = Transformer(TransformerConfig(**shape), rngs=nnx.Rngs(0))
    trainer = ax.parallelize(model, mesh_of(data=2), ax.Plan()).trainer(optax.sgd(0.1), loss_fn)
    rows = np.zeros((4, 64), "int32")
    text = trainer.train_step.lower(trainer.state, {"x": rows, "y": rows}).compile().as_text()
    sums = [line for line in text.splitlines() if " dot(" in line and "lhs_batch_dims" not in line]
    assert sums and not [line for line in sums if "lhs_contracting_dims={0}, rhs_contracting_dims={0}" in line]
