"""AxoNN's communication formulas counted on the traced program, byte for byte, without devices."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import Literal
from ledger_steps import abstract_mesh, floats
from tensor_cases import P

from axonml_jax.compat.jaxpr import Operation
from axonml_jax.layers.grid import ParallelLinear
from axonml_jax.layers.products import Prefetch
from axonml_jax.layers.whole import tensor_specs
from axonml_jax.ledger.count import collectives_in

BF16 = jnp.bfloat16
MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "novma"])


def counted(sizes, check_vma, *, tokens, k, n, x_axis, y_axis, **options):
    """Collectives of one layer's forward and backward on abstract arrays, by axis."""
    layer = nnx.eval_shape(
        lambda: ParallelLinear(k, n, use_bias=False, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0), **options)
    )
    graphdef, params = nnx.split(layer)
    specs = tensor_specs(layer, sizes)

    def per_rank(params, x, dy):
        y, vjp = jax.vjp(lambda params, x: nnx.merge(graphdef, params, copy=True)(x), params, x)
        return y, *vjp(dy)

    x_spec, y_spec = P("depth", x_axis), P("depth", y_axis)
    mapped = jax.shard_map(
        per_rank,
        mesh=abstract_mesh(**sizes),
        in_specs=(specs, x_spec, y_spec),
        out_specs=(y_spec, specs, x_spec),
        check_vma=check_vma,
    )
    pure = nnx.to_pure_dict(params)
    return collectives_in(mapped, pure, floats(tokens, k, dtype=BF16), floats(tokens, n, dtype=BF16))


def volume(entries, axis):
    return sum(entry.wire_bytes for entry in entries if entry.axes == (axis,))


@MODES
@pytest.mark.parametrize("transpose", [False, True], ids=["straight", "transposed"])
def test_the_volumes_of_the_published_example(transpose, check_vma):
    """B=16, S=2048, K=4096, N=16384 on (depth, row, col) = (2, 2, 2): 50,331,648; 67,108,864; 268,435,456 bytes."""
    into, out = ("row", "col") if transpose else ("col", "row")
    entries = counted(
        dict(depth=2, row=2, col=2), check_vma, tokens=16 * 2048, k=4096, n=16384, x_axis=into, y_axis=out,
        transpose=transpose, scatter_input=False, gather_output=False,
    )  # fmt: skip
    assert volume(entries, "depth") == 50_331_648
    assert volume(entries, out) == 67_108_864
    assert volume(entries, into) == 268_435_456
    assert [(entry.kind, entry.axes) for entry in entries] == [
        ("all_gather", ("depth",)),  # the weight's block, for the forward
        ("all_reduce", (into,)),  # y
        ("all_gather", ("depth",)),  # the block again, for the backward
        ("reduce_scatter", ("depth",)),  # its gradient
        ("all_reduce", (out,)),  # the gradient of x
    ]
    assert [entry.label for entry in entries if entry.axes == ("depth",)] == ["parameters", "parameters", "gradients"]


@MODES
@pytest.mark.parametrize("transpose", [False, True], ids=["straight", "transposed"])
def test_the_formulas_hold_on_an_uneven_grid(transpose, check_vma):
    gd, gr, gc, tokens, k, n = 4, 3, 2, 96, 48, 24
    into, out, g_into, g_out = ("row", "col", gr, gc) if transpose else ("col", "row", gc, gr)
    entries = counted(
        dict(depth=gd, row=gr, col=gc), check_vma, tokens=tokens, k=k, n=n, x_axis=into, y_axis=out,
        transpose=transpose, scatter_input=False, gather_output=False,
    )  # fmt: skip
    assert volume(entries, "depth") * gd == 3 * (gd - 1) * (k * n // (gr * gc)) * 2
    assert volume(entries, out) * g_out == 2 * (g_out - 1) * (tokens // gd) * (k // g_into) * 2
    assert volume(entries, into) * g_into == 2 * (g_into - 1) * (tokens // gd) * (n // g_out) * 2


@MODES
def test_easy_mode_adds_one_gather_at_each_end(check_vma):
    sizes, tokens, k, n = dict(depth=2, row=2, col=2), 8, 16, 32
    laid = dict(x_axis="col", y_axis="row", scatter_input=False, gather_output=False)
    easy = counted(sizes, check_vma, tokens=tokens, k=k, n=n, x_axis=None, y_axis=None)
    names = [(e.kind, e.axes, e.elements) for e in easy]
    for entry in counted(sizes, check_vma, tokens=tokens, k=k, n=n, **laid):
        names.remove((entry.kind, entry.axes, entry.elements))
    assert sorted(names) == [("all_gather", ("col",), tokens * k // 2), ("all_gather", ("row",), tokens * n // 2)]


def test_the_gathered_weight_is_not_kept_for_the_backward():
    sizes = dict(depth=4, row=1, col=1)
    layer = ParallelLinear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    kept = []

    def per_rank(params, x):
        _, vjp = jax.vjp(lambda params, x: nnx.merge(graphdef, params, copy=True)(x), params, x)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(vjp))
        return x

    specs, x = tensor_specs(layer, sizes), floats(8, 64)
    mapped = jax.shard_map(
        per_rank, mesh=abstract_mesh(**sizes), in_specs=(specs, P("depth")), out_specs=P("depth"), check_vma=False
    )
    jax.eval_shape(mapped, nnx.to_pure_dict(params), x)
    assert (16, 64) in kept and (64, 64) not in kept


@MODES
def test_overlap_sends_the_same_and_reduces_the_inputs_gradient_before_the_weights(check_vma):
    sizes, laid = (
        dict(depth=2, row=2, col=2),
        dict(x_axis="col", y_axis="row", scatter_input=False, gather_output=False),
    )
    plain, overlapped = (
        counted(sizes, check_vma, tokens=8, k=16, n=32, overlap=overlap, **laid) for overlap in (False, True)
    )
    order = [(entry.kind, entry.axes) for entry in overlapped]
    assert order[-2:] == [("all_reduce", ("row",)), ("reduce_scatter", ("depth",))]
    assert sorted(order) == sorted((entry.kind, entry.axes) for entry in plain)


class Chain(nnx.Module):
    """Three products, with or without an order in which their weights are gathered."""

    def __init__(self, prefetch):
        self.layers = nnx.List([ParallelLinear(8, 8, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(3)])
        self.prefetch = prefetch

    def __call__(self, x):
        order = Prefetch() if self.prefetch else None
        for layer in self.layers:
            x = layer(x, prefetch=order)
        return order.last(x) if order else x


def products_before_gathers(jaxpr, known, found):
    """How many products each gather of a program waits for, in order; `known` are those that each variable waits for."""
    waited = lambda v: frozenset() if isinstance(v, Literal) else known.get(v, frozenset())
    for eqn in jaxpr.eqns:
        before = frozenset().union(*(waited(v) for v in eqn.invars))
        inner = eqn.params["jaxpr"] if eqn.primitive.name == "shard_map" else Operation(eqn).call
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            known.update({var: waited(v) for var, v in zip(inner.invars, eqn.invars, strict=True)})
            products_before_gathers(inner, known, found)
            known.update({out: waited(v) for out, v in zip(eqn.outvars, inner.outvars, strict=True)})
            continue
        if eqn.primitive.name == "dot_general":
            before |= {id(eqn)}
        if eqn.primitive.name.startswith("all_gather"):
            found.append(len(before))
        known.update(dict.fromkeys(eqn.outvars, before))
    return found


@MODES
def test_prefetch_lets_a_gather_wait_for_the_neighbours_start_and_no_longer(check_vma):
    def waits(prefetch):
        model = Chain(prefetch)
        graphdef, params = nnx.split(model)

        def per_rank(params, x, dy):
            y, vjp = jax.vjp(lambda params, x: nnx.merge(graphdef, params, copy=True)(x), params, x)
            return y, *vjp(dy)

        specs, x = tensor_specs(model, dict(depth=2)), P("depth")
        mapped = jax.shard_map(
            per_rank,
            mesh=abstract_mesh(depth=2),
            in_specs=(specs, x, x),
            out_specs=(x, specs, x),
            check_vma=check_vma,
        )
        traced = jax.make_jaxpr(mapped)(nnx.to_pure_dict(params), floats(4, 8), floats(4, 8))
        return products_before_gathers(traced.jaxpr, {}, [])

    # Forward first to third, then backward third to first. Unordered, a gather of the backward waits for all before it,
    # and nothing holds those of the forward back: they may all be whole at once.
    assert waits(False) == [0, 0, 0, 0, 1, 2]
    assert waits(True) == [0, 0, 1, 0, 0, 1]
