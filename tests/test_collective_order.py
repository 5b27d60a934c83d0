"""Collectives around loops: each waits for the loops before it, and loops for it: every device runs them in one order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import WAITING as PRIMITIVE
from axonml_jax.compat.order import waiting
from axonml_jax.compat.varying_types import cast_to_varying, varying_axes
from axonml_jax.program.on_cpu import collectives_in_order
from axonml_jax.program.program import read_program, rule_of
from axonml_jax.training.compile import Compiled

SPLIT, WHOLE = PartitionSpec("x"), PartitionSpec()


def looped(w, a, trips=3):
    def body(c, _):
        return jnp.tanh(jax.lax.psum(jnp.tanh(c @ w), "x") / 2 + c), None

    return jax.lax.scan(body, a, None, length=trips)[0]


def chain(b, count):
    sums = []
    for i in range(count):
        b = jax.lax.psum(jnp.sin(b + i), "x") / 2
        sums.append(b)
    return sums


def loop_then_chain(w, a, b):
    return looped(w, a), *chain(b, 3)


def chain_then_loop(w, a, b):
    sums = chain(b, 2)
    return looped(w, a), *sums


def two_loops_and_a_gather(w, a, b):
    return looped(w, a), looped(w, b, 2), jax.lax.all_gather(a[:1], "x", tiled=True), jax.lax.all_gather(b > 0, "x")


def branches(w, a, b):
    taken = jax.lax.cond(w[0, 0] > 0, lambda a: looped(w, a, 1), lambda a: jax.lax.psum(a, "x") / 2 + a, a)
    return taken, jax.lax.psum(b, "x")


def while_loop(w, a, b):
    def more(carry):
        return carry[0] < 3

    def body(carry):
        return carry[0] + 1, jax.lax.psum(carry[1] @ w, "x") + carry[1]

    return jax.lax.while_loop(more, body, (0, a))[1], jax.lax.psum(b, "x")


def recomputed(w, a, b):
    def loss(a, b):
        part = jax.checkpoint(lambda a, b: looped(w, a).sum() + jax.lax.psum(b, "x").sum() + chain(b, 2)[-1].sum())
        return part(a, b)

    return jax.lax.psum(a, "x"), *jax.grad(loss, (0, 1))(a, b)


def inside_a_scan(w, a, b):
    def trip(c, _):
        sums = chain(jnp.sin(c) + b, 2)
        return looped(w, c) + sums[0], sums[1]

    return jax.lax.scan(trip, a, None, length=2)


def inside_a_while_loop(w, a, b):
    def trip(carry):
        i, c, d = carry
        return i + 1, looped(w, c), jax.lax.psum(jnp.sin(d), "x") + d

    return jax.lax.while_loop(lambda carry: carry[0] < 2, trip, (0, a, b))[1:]


def inside_a_branch(w, a, b):
    taken = lambda a, b: (looped(w, a), jax.lax.psum(b, "x") + b)
    return jax.lax.cond(w[0, 0] > 9, lambda a, b: (a, b), taken, a, b)


def all_depend(w, a, b):
    return jax.lax.psum(looped(w, jax.lax.psum(a + b, "x")), "x")


def no_loop(w, a, b):
    return jax.lax.psum(a @ w, "x"), *chain(b, 2)


def loop_of_constants(w, a, b):
    """A loop that begins with a number, whose collectives read nothing from outside."""
    first = looped(w, b)
    return first, a + jax.lax.fori_loop(0, 3, lambda i, c: c + jax.lax.psum(jnp.float64(i), "x"), 0.0)


OVERLAPPING = [
    loop_then_chain, chain_then_loop, two_loops_and_a_gather, branches, while_loop, recomputed, inside_a_scan,
    inside_a_while_loop, inside_a_branch, loop_of_constants,
]  # fmt: skip


def mapped(fun, mesh, check_vma=False, specs=(WHOLE, SPLIT, SPLIT)):
    options = {"mesh": mesh, "in_specs": specs, "out_specs": SPLIT, "check_vma": check_vma}
    varying = lambda x: cast_to_varying(x, ("x",)) if check_vma and not varying_axes(x) else x
    return jax.shard_map(lambda *args: jax.tree.map(varying, fun(*args)), **options)


def in_order(fun):
    """A function with `shard_map`s whose collectives are in order."""

    def run(*args):
        traced = trace(fun, *args)
        return jax.tree.unflatten(traced.out_tree, collectives_in_order(traced.jaxpr, jax.tree.leaves(args)))

    return run


def program_of(fun, check_vma=False, change=lambda fun: fun):
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shapes = [jax.ShapeDtypeStruct(shape, "float64") for shape in ((4, 4), (8, 4), (8, 4))]
    (outer,) = read_program(trace(change(mapped(fun, mesh, check_vma)), *shapes).jaxpr).equations
    return read_program(outer.op.mapped.body)


def sends(equation):
    return rule_of(equation.name).sends is not None or any(sends(e) for body in equation.bodies for e in body.equations)


def is_loop(equation):
    return equation.name in ("scan", "while", "cond") or any(
        is_loop(inner) and sends(inner) for body in equation.bodies for inner in body.equations
    )


def overlaps(program):
    """Pairs of equations that send, one of them a loop, of which the second reads nothing of the first."""
    behind, found = {}, []
    sending = []
    for equation in program.equations:
        before = set().union(*(behind.get(number, set()) for number in equation.read))
        if sends(equation):
            found += [(e.name, equation.name) for e in sending if e not in before and (is_loop(e) or is_loop(equation))]
            sending.append(equation)
            before = before | {equation}
            found += [pair for body in equation.bodies for pair in overlaps(body)]
        behind.update(dict.fromkeys(equation.outputs, before))
    return found


def nothing_to_read(w, a, b):
    """A loop without operands."""
    trip = lambda c, _: (c, jax.lax.all_gather(jax.lax.axis_index("x") * jnp.ones(2), "x"))
    return looped(w, a), jax.lax.scan(trip, None, None, length=2)[1].sum() + b


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("fun", [*OVERLAPPING, nothing_to_read])
def test_no_collective_is_independent_of_a_loop_with_collectives(fun, check_vma):
    assert overlaps(program_of(fun, check_vma))
    assert not overlaps(program_of(fun, check_vma, in_order))


def nothing_made(w, a, b):
    """A loop without results, which stays because it prints."""

    def trip(c, _):
        jax.debug.print("{}", jax.lax.psum(c.sum(), "x"))
        return c, None

    jax.lax.scan(trip, a, None, length=2)
    return looped(w, b)


def nothing_to_read_and_prints(w, a, b):
    """A loop without operands whose trips are seen."""

    def trip(c, _):
        found = jax.lax.all_gather(jax.lax.axis_index("x") * jnp.ones(2), "x")
        jax.debug.print("{}", found)
        return c, found

    return looped(w, a), jax.lax.scan(trip, None, None, length=2)[1].sum() + b


@pytest.mark.parametrize("fun", [nothing_to_read_and_prints, nothing_made])
def test_a_loop_that_cannot_wait_is_refused_with_its_line(fun):
    with pytest.raises(ValueError, match=r"`scan` \(line \d+ of .*no array to wait by.*Give the loop .* to read"):
        program_of(fun, change=in_order)


def test_empty_arrays_need_no_order():
    def empty(w, a, b):
        return looped(w, a), jax.lax.all_gather(b[:0], "x", tiled=True)

    assert overlaps(program_of(empty, change=in_order))  # the two stay as they are, as XLA sends nothing of the second
    assert not any(equation.name == PRIMITIVE for equation in program_of(empty, change=in_order).equations)


def test_what_a_backward_computes_again_keeps_its_barrier():
    count = lambda change: str(jax.jit(change(mapped(recomputed, mesh))).lower(*given).as_text()).count("barrier")
    mesh, given = Mesh(np.array(jax.devices()[:2]), ("x",)), (np.ones((4, 4)), np.ones((8, 4)), np.ones((8, 4)))
    assert count(in_order) == count(lambda fun: fun) > 0


@pytest.mark.parametrize("fun", [all_depend, no_loop])
def test_nothing_is_added_where_nothing_could_overlap(fun):
    ordered, plain = (program_of(fun, change=change) for change in (in_order, lambda fun: fun))
    assert not any(equation.name == PRIMITIVE for equation in ordered.equations)
    assert [each.name for each in ordered.equations] == [each.name for each in plain.equations]


def test_what_no_result_needs_does_not_come_back():
    def dead(w, a, b):
        jax.lax.all_gather(b, "x")
        (_, a), _ = jax.lax.scan(
            lambda c, _: ((jax.lax.all_gather(c[1], "x", tiled=True), jax.lax.psum(c[1] @ w, "x")), c[1]),
            (jnp.tile(a, (2, 1)), a), None, length=2,
        )  # fmt: skip
        return a, jax.lax.psum(b, "x")

    names = str(
        jax.jit(in_order(mapped(dead, Mesh(np.array(jax.devices()[:2]), ("x",)))))
        .trace(np.ones((4, 4)), np.ones((8, 4)), np.ones((8, 4)))
        .jaxpr
    )
    assert "all_gather" not in names and PRIMITIVE in names


@pytest.mark.parametrize("fun", OVERLAPPING)
def test_results_are_those_of_one_device_bit_for_bit_of_the_same_program(fun):
    draw = np.random.default_rng(0)
    w, a, b = draw.normal(size=(4, 4)), draw.normal(size=(8, 4)), draw.normal(size=(8, 4))
    one = jax.vmap(fun, in_axes=(None, 0, 0), axis_name="x")(w, a.reshape(2, 4, 4), b.reshape(2, 4, 4))
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    for each, expected in zip(jax.jit(in_order(mapped(fun, mesh)))(w, a, b), one, strict=True):
        np.testing.assert_allclose(each, np.asarray(expected).reshape(each.shape), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"])
def test_waiting_changes_no_bit_and_has_a_derivative(dtype):
    value = jnp.asarray([0, -1, 1, 3]).astype(dtype) * jnp.asarray(-1).astype(dtype)
    for other in (value, jnp.full((2, 1), jnp.nan), jnp.arange(3) > 1, jnp.int8(-1)):
        made = jax.jit(lambda value, other: waiting(value, [other, other]))(value, other)
        assert made.dtype == value.dtype and made.tobytes() == value.tobytes()
    if jnp.issubdtype(dtype, jnp.floating):
        assert jax.grad(lambda x: waiting(x, [x]).astype("float32").sum())(value).tolist() == [1] * 4


def test_a_compiled_function_keeps_the_order_for_every_shape_of_its_first_argument():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    step = Compiled(mapped(lambda a, b, w: loop_then_chain(w, a, b), mesh, specs=(SPLIT, SPLIT, WHOLE)), mesh)
    w, b = np.eye(4), np.ones((8, 4))
    for rows in (8, 6, 8):
        assert PRIMITIVE in str(step.trace(np.ones((rows, 4)), b, w).jaxpr)
        assert step(np.ones((rows, 4)), b, w)[0].shape == (rows, 4)
    assert step.compilations == 2


def test_settings_of_a_later_call_are_those_of_its_program_and_one_settings_model_is_traced_once():
    mesh, traced = Mesh(np.array(jax.devices()[:2]), ("x",)), []

    def fun(a, b, w):
        traced.append(jax.config.jax_default_matmul_precision)
        return loop_then_chain(w, a, b)

    step = Compiled(mapped(fun, mesh, specs=(SPLIT, SPLIT, WHOLE)), mesh)
    given = np.ones((8, 4), "float32"), np.ones((8, 4), "float32"), np.eye(4, dtype="float32")
    for precision in (None, None, "highest", None, "highest"):
        with jax.default_matmul_precision(precision):
            step(*given)
            assert ("HIGHEST" in step.lower(*given).as_text()) == (precision is not None)
    assert traced == [None, "highest"] and step.compilations == 2
