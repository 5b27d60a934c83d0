"""Column- and row-parallel linear layers equal `nnx.Linear`, in outputs and in every gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensor_cases import LINEAR, P, assert_equals_one_device, make_mesh, normal, on_one_device

from axonml_jax.layers.grid import ParallelLinear
from axonml_jax.layers.latent import WholeLinear
from axonml_jax.layers.linear import ColumnParallelLinear, RowParallelLinear
from axonml_jax.layers.products import LinearOptions, ring_scattered
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.program.program import read_program

LEADS = {1: (6,), 2: (2, 3), 3: (2, 1, 3)}
# (ranks, bias, leading dims, check_vma): every pair of values occurs.
CASES = [
    (1, True, 1, True), (1, False, 2, False), (1, True, 3, False),
    (2, True, 2, True), (2, False, 3, True), (2, True, 1, False),
    (4, False, 1, True), (4, True, 2, False), (4, True, 3, True),
]  # fmt: skip
IDS = [f"{n}ranks-{'bias' if b else 'nobias'}-{lead}d-{'vma' if vma else 'novma'}" for n, b, lead, vma in CASES]


class Pairs(nnx.Module):
    """Every kind of column and row layer in one module, so that one program serves all of them."""

    def __init__(self, use_bias):
        options = {"use_bias": use_bias, **LINEAR}
        keys = nnx.Rngs(0)
        self.column = ColumnParallelLinear(5, 8, rngs=keys, **options)
        self.gathered = ColumnParallelLinear(5, 4, gather_output=True, rngs=keys, **options)
        self.row = RowParallelLinear(8, 3, rngs=keys, **options)
        self.row_of_whole = RowParallelLinear(4, 3, input_is_parallel=False, rngs=keys, **options)

    def __call__(self, x):
        inner = jnp.tanh(self.column(x))
        whole = self.gathered(x)
        return {"column": inner, "gathered": whole, "row": self.row(inner), "row of whole": self.row_of_whole(whole)}


def y_specs(lead):
    return {"column": P(*[None] * lead, "tensor"), "gathered": P(), "row": P(), "row of whole": P()}


@pytest.mark.parametrize(("ranks", "use_bias", "lead", "check_vma"), CASES, ids=IDS)
def test_linear_layers_equal_one_device(ranks, use_bias, lead, check_vma):
    x = normal(*LEADS[lead], 5)
    assert_equals_one_device(Pairs(use_bias), x, {"tensor": ranks}, y_spec=y_specs(lead), check_vma=check_vma)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, ParallelLinear])
def test_outside_a_mesh_they_are_nnx_linear(kind):
    options = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32, precision="highest", use_bias=True)
    ours, flax = kind(4, 8, rngs=nnx.Rngs(1), **options), nnx.Linear(4, 8, rngs=nnx.Rngs(1), **options)
    for a, b in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(flax)), strict=True):
        np.testing.assert_array_equal(a, b)
    x = normal(2, 3, 4)
    assert ours(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours(x), flax(x))
    named = set(inspect.signature(kind).parameters) | set(LinearOptions.__annotations__)
    assert set(inspect.signature(nnx.Linear).parameters) <= named


def run(layer, x, ranks=4, specs=None):
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    specs = tensor_specs(layer, {"tensor": ranks}) if specs is None else specs
    per_rank = lambda params, x: nnx.merge(graphdef, params, rest, copy=True)(x)
    mesh = make_mesh(tensor=ranks)
    return jax.shard_map(per_rank, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)(
        nnx.to_pure_dict(params), x
    )


def test_dtypes_and_promotion_are_those_of_flax():
    keys = nnx.Rngs(0)
    for dtype, wanted in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        layer = ColumnParallelLinear(4, 8, dtype=dtype, gather_output=True, rngs=keys)
        x = jnp.ones((2, 4), jnp.bfloat16)
        assert run(layer, x).dtype == layer(x).dtype == wanted
    row = RowParallelLinear(
        8, 4, dtype=jnp.bfloat16, input_is_parallel=False, preferred_element_type=jnp.float32, rngs=keys
    )
    x = jnp.ones((2, 8), jnp.bfloat16)
    assert run(row, x).dtype == row(x).dtype == jnp.float32


def test_specs_are_metadata_that_outlives_split_and_merge():
    layer = ColumnParallelLinear(4, 8, kernel_metadata={"mine": 1}, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    for again in (nnx.merge(graphdef, params, rest), nnx.merge(graphdef, nnx.to_pure_dict(params), rest, copy=True)):
        assert again.kernel.get_metadata()["tensor_spec"] == P(None, "tensor")
        assert again.kernel.get_metadata()["mine"] == 1
        assert again.bias.get_metadata()["tensor_spec"] == P("tensor")
    shapes = nnx.eval_shape(lambda: ColumnParallelLinear(4, 8, rngs=nnx.Rngs(0)))
    assert tensor_specs(shapes, {"tensor": 2}) == {"kernel": P(None, "tensor"), "bias": P("tensor")}
    assert tensor_specs(shapes, {"data": 2}) == {"kernel": P(None, None), "bias": P(None)}


class Misfits(nnx.Module):
    def __init__(self):
        keys = nnx.Rngs(0)
        self.layers = nnx.List([ColumnParallelLinear(4, 6, rngs=keys), nnx.Linear(6, 7, rngs=keys)])
        self.row = RowParallelLinear(7, 4, rngs=keys)


def test_every_parameter_that_does_not_divide_is_listed_by_path():
    with pytest.raises(ValueError, match="do not divide") as error:
        tensor_specs(Misfits(), {"tensor": 4})
    for part in (
        r"layers/0/kernel: dim 1 of (4, 6) over tensor (6 % 4 = 2)",
        "layers/0/bias",
        "row/kernel: dim 0 of (7, 4)",
    ):
        assert part in str(error.value)
    assert "layers/1" not in str(error.value)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_refuses_what_is_not_its_shard(kind):
    with pytest.raises(ValueError, match=r"Linear\(6, 6\) kernel of shape \(6, 6\) does not divide"):
        run(kind(6, 6, rngs=nnx.Rngs(0)), normal(2, 6), specs=P())
    with pytest.raises(ValueError, match=r"but its full shape \(8, 8\) split by .* gives .*tensor_specs"):
        run(kind(8, 8, rngs=nnx.Rngs(0)), normal(2, 8), specs=P())


def test_initial_values_do_not_depend_on_the_mesh():
    with jax.set_mesh(make_mesh(tensor=4)):
        inside = ColumnParallelLinear(4, 8, rngs=nnx.Rngs(3))
    np.testing.assert_array_equal(inside.kernel[...], nnx.Linear(4, 8, rngs=nnx.Rngs(3)).kernel[...])
    assert on_one_device(inside, jnp.ones((2, 4))).outputs.shape == (2, 8)


def test_products_and_their_gradients_take_all_positions_at_once():
    for kind in (ColumnParallelLinear, RowParallelLinear, ParallelLinear, WholeLinear):
        layer = kind(4, 8, rngs=nnx.Rngs(0))
        traced = jax.make_jaxpr(jax.grad(lambda x, layer=layer: layer(x).sum()))(normal(2, 3, 4))
        products = [each for each in read_program(traced, lambda *_: True).equations if each.name == "dot_general"]
        assert products and all(len(given.shape) == 2 for each in products for given in each.op.given), kind


def test_positions_that_do_not_divide_over_a_ring_are_refused():
    scattered = lambda x, w: ring_scattered(jnp.matmul, x, w, ("tensor",), -2)
    mapped = jax.shard_map(
        scattered, mesh=make_mesh(tensor=2), in_specs=(P(None, "tensor"), P("tensor")), out_specs=P("tensor")
    )
    with pytest.raises(ValueError, match=r"ring over \('tensor',\)"):
        mapped(normal(3, 4), normal(4, 5))
