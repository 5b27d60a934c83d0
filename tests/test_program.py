"""Traced programs as values: what is read, how a dim goes through an operation, what depends on what, and what is run."""

import gc

import jax
import jax.numpy as jnp
import jax.scipy  # its primitives have rules
import numpy as np
import pytest
from jax.extend.core import Primitive

from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import CASTS
from axonml_jax.program.program import (
    DIMS,
    RULES,
    all_calls,
    follow,
    is_elementwise,
    is_light,
    is_redone,
    is_repeatable,
    made_by,
    no_calls,
    read_program,
    rule_of,
    run,
    run_program,
    through,
    values_of,
    with_gradient,
)

lax = jax.lax


def program_of(fun, *args, opens=all_calls):
    return read_program(trace(fun, *args).jaxpr, opens)


def names(program):
    return [equation.name for equation in program.equations]


def arange(*shape):
    return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def along(name):
    return lambda x: getattr(lax, name)(x, axis=1)


def over(name):
    return lambda x: getattr(lax, name)(x, axes=(1,))


X = arange(4, 6, 8)
MATRICES = arange(4, 3, 3) @ arange(4, 3, 3).transpose(0, 2, 1) + 3 * jnp.eye(3, dtype=jnp.float32)

# What is done, on which operands. Each primitive of DIMS is here.
OPERATIONS = {
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (3, 4, 5, 8), (1, 3)), arange(4, 8)),
    "broadcast_in_dim of 1": (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), arange(4, 1)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), X, arange(4, 2, 8)),
    "dot_general": (lambda x, y: lax.dot_general(x, y, (([2], [1]), ([0], [2]))), X, arange(2, 8, 4)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, [*jnp.int32([0, 1, 0])], (4, 2, 8)), X),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, [*jnp.int32([0, 1, 0])]), X, arange(4, 2, 8),
    ),
    "name": (lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"), X),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 1, 0), (0, 0, 0))), X),
    "reshape joining": (lambda x: lax.reshape(x, (24, 8)), X),
    "reshape dividing": (lambda x: lax.reshape(x, (4, 2, 3, 8)), X),
    "reshape to indivisible": (lambda x: lax.reshape(x, (3, 8, 8)), X),
    "reshape with ones": (lambda x: lax.reshape(x, (1, 4, 1, 48)), X),
    "rev": (lambda x: lax.rev(x, (1,)), X),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (4, 3, 8)), X),
    "slice in strides": (lambda x: lax.slice(x, (0, 0, 0), (4, 6, 8), (1, 2, 1)), X),
    "sort": (lambda x, y: lax.sort((x, y), dimension=1), X, -X),
    "split": (lambda x: lax.split(x, (2, 4), axis=1), X),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), arange(4, 1, 8)),
    "tile": (lambda x: jnp.tile(x, (1, 3, 1)), X),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), X),
    "unstack": (lambda x: [*x], arange(2, 4, 6)),
    **{name: (along(name), X) for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")},
    **{name: (over(name), X) for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")},
    **{name: (over(name), X > 0) for name in ("reduce_and", "reduce_or")},
    "reduce_xor": (over("reduce_xor"), (9 * X).astype(jnp.int32)),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), X),
    "argmin": (lambda x: lax.argmin(x, 1, jnp.int32), X),
    "fft": (lambda x: jnp.fft.fft2(x), X),
    "cholesky": (jnp.linalg.cholesky, MATRICES),
    "eigh": (lambda x: jnp.linalg.eigh(x), MATRICES),
    "lu": (lambda x: lax.linalg.lu(x), MATRICES),
    "lu_pivots_to_permutation": (
        lambda x: lax.linalg.lu_pivots_to_permutation(x, 5),
        jnp.int32([[0, 2, 2], [1, 1, 4], [2, 4, 3], [0, 1, 2]]),
    ),
    "qr": (lambda x: jnp.linalg.qr(x), MATRICES),
    "svd": (lambda x: jnp.linalg.svd(x), MATRICES),
    "triangular_solve": (lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True), MATRICES, arange(4, 3, 2)),
    "elementwise": (lambda x, y: lax.select(x > y, x, y), X, -X),
    "elementwise with a number": (lambda x: lax.clamp(np.float32(0), x, np.float32(1)), X),
}  # fmt: skip


def changed(x, dim, part, parts):
    """x, other than it was everywhere but in one part."""
    size = x.shape[dim] // parts
    inside = (jnp.arange(x.shape[dim]) // size == part).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(inside, x, ~x if x.dtype == bool else x * 3 + 1)


def parts_of(x, dim):
    assert x.shape[dim] % 2 == 0
    return jnp.split(x, 2, axis=dim)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_part_of_a_result_is_made_of_the_part_that_it_follows_alone(name):
    fun, *given = OPERATIONS[name]
    program, followed = program_of(fun, *given), 0
    env = {**program.constants, **dict(zip(program.inputs, given, strict=True))}
    for equation in program.equations:
        operands = values_of(equation.inputs, env)
        run([equation], env)
        before = equation.op.bind(operands)
        for k, x in enumerate(operands):
            for dim in range(jnp.ndim(x)):
                goes = follow(equation.op, k, dim, 2) if x.shape[dim] % 2 == 0 else None
                followed += goes is not None
                for part in range(2) if goes is not None else ():
                    now = equation.op.bind([changed(x, dim, part, 2) if i == k else y for i, y in enumerate(operands)])
                    for new, old in zip(now, before, strict=True):
                        np.testing.assert_array_equal(parts_of(new, goes)[part], parts_of(old, goes)[part])
    assert followed or name == "broadcast_in_dim of 1"


def test_every_rule_of_dims_was_tried():
    tried = {equation.name for fun, *args in OPERATIONS.values() for equation in program_of(fun, *args).equations}
    assert set(DIMS) - tried <= {"unstack"}  # before jax 0.12 a list of an array's rows is slices
    assert all(RULES[name].follow is DIMS[name] for name in DIMS)


def test_what_jit_wraps_stands_in_its_place_unless_the_reader_wants_the_call():
    inner = jax.jit(lambda x: (x, jnp.sin(x)))

    def fun(x):
        with jax.named_scope("outside"):
            same, made = inner(x)
        return same + made

    program = program_of(fun, X)
    assert names(program) == ["sin", "add"]
    assert program.equations[1].inputs == (
        0,
        program.equations[0].outputs[0],
    )  # what is handed through keeps its number
    assert "outside" in str(program.equations[0].op.scopes)
    kept = program_of(fun, X, opens=no_calls)
    assert [len(each.bodies) for each in kept.equations] == [1, 0]
    assert names(kept.equations[0].called) == ["sin"]


def test_a_body_is_read_once_whatever_it_is_asked_for():
    program = program_of(jax.checkpoint(lambda x: jnp.sin(x)), X)
    (equation,) = program.equations
    assert equation.body is equation.called is equation.bodies[0]
    (scan,) = [e for e in program_of(lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x), X).equations if e.op.scan]
    assert scan.body is scan.bodies[0] and scan.called is None


def test_a_program_gives_what_its_function_gives_with_constants_written_into_it():
    table = np.arange(6.0, dtype=np.float32)

    def fun(x):
        y = jax.jit(lambda x: jnp.where(x > 0, x, 0.0) * table[:, None])(x)
        return y, 3.0, lax.cond(y.sum() > 0, lambda: y, lambda: -y)

    traced = trace(fun, X)
    program = read_program(traced.jaxpr)
    for a, b in zip(run_program(program, [X]), jax.tree.leaves(fun(X)), strict=True):
        np.testing.assert_array_equal(a, b)
    twice = lambda equation, operands: [2 * operands[0]] if equation.name == "mul" else None
    assert not np.allclose(run_program(program, [X], twice)[0], fun(X)[0])


def test_what_is_known_goes_through_loops_branches_and_calls():
    def fun(x, y, n):
        carried, _ = lax.scan(lambda c, row: ((c[1], c[1] + row.sum()), None), (jnp.float32(0), jnp.float32(0)), x)
        looped = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2.0), (0, 1.0))
        chosen = lax.cond(n > 3, lambda: y, lambda: 2 * y)
        return carried[0], looped[1], jax.nn.relu(chosen), 1.0

    program = program_of(fun, X, 2.0, 5)
    rule = lambda equation, operands: (
        through(equation, operands, rule, frozenset.union, frozenset())
        or [frozenset().union(*operands)] * len(equation.outputs)
    )
    table = dict(zip(program.inputs, map(frozenset, ("x", "y", "n")), strict=True))
    for equation in program.equations:
        known = [frozenset() if not isinstance(atom, int) else table[atom] for atom in equation.inputs]
        table.update(zip(equation.outputs, rule(equation, known), strict=True))
    found = ["".join(sorted(table[atom])) if isinstance(atom, int) else "" for atom in program.outputs]
    assert found == ["x", "n", "ny", ""]


def test_what_has_a_gradient_and_what_makes_a_value():
    program = program_of(lambda x, i, y: (x * 2 + y, i + 1, lax.stop_gradient(x) > 0), X, 3, X)
    moving = with_gradient(program, [0, 1])
    made = {equation.name: equation.outputs[0] in moving for equation in program.equations}
    assert {0} <= moving and 1 not in moving and 2 not in moving
    assert made["mul"] and not made["gt"]
    assert [e.name for e in made_by(program.equations, program.outputs[:1])] == ["mul", "add"]
    assert [e.name for e in made_by(program.equations, program.outputs[:1], {program.equations[0].outputs[0]})] == [
        "add"
    ]


def test_a_primitive_without_a_rule_is_opaque():
    assert rule_of("made up").kind == "opaque" and rule_of("made up_done").kind == "opaque"
    assert rule_of("psum_start").sends == ("all_reduce", "sum") and rule_of("psum_done").sends is None
    program = program_of(lambda x: (jnp.linalg.qr(x[0])[0], jax.nn.relu(x), jnp.cumsum(x), x @ x[0].T), X)
    said = {equation.name: (is_light(equation.op), is_repeatable(equation)) for equation in program.equations}
    assert said["cumsum"] == (True, True) and said["dot_general"] == (False, False)
    assert said["custom_jvp_call"] == (False, True)


OTHER_VERSIONS = set(
    """closed_call log2 one_minus_square pbroadcast_dynamic pcast polynomial reduced_vary_cast reduced_vary_cast_p
    unreduced_pmax unreduced_pmin vary_unreduced_cast vary_unreduced_cast_p""".split()  # noqa: SIM905
)
"""Primitives with a rule that one end of the supported range of JAX lacks."""


def test_every_name_with_a_rule_is_a_primitive_of_some_supported_jax():
    gc.unfreeze()  # what conftest.py put aside is looked at too
    here = {each.name for each in gc.get_objects() if isinstance(each, Primitive)}
    assert set(RULES) - here <= OTHER_VERSIONS


def test_bits_of_another_width_have_other_dims():
    (equation,) = program_of(lambda x: lax.bitcast_convert_type(x, jnp.float32), jnp.zeros((3, 4), jnp.uint8)).equations
    assert [follow(equation.op, 0, dim, 1) for dim in range(2)] == [None, None]


def test_long_series_are_elementwise_and_kept():
    assert is_elementwise("igamma") and not is_redone("igamma") and is_redone("exp")


def test_what_is_placed_is_light_and_what_has_no_key_is_not_repeated():
    placed = program_of(lambda x: jax.device_put(x, jax.devices()[0]), X).equations
    assert [(each.name, is_light(each.op)) for each in placed] == [("device_put", True)]
    assert rule_of("rng_uniform").kind == "opaque"


def test_casts_are_those_that_the_canaries_watch_and_a_waiting_half_passes_its_operand_on():
    assert {name for name, rule in RULES.items() if rule.casts} == CASTS
    assert rule_of("psum_done").passes and not rule_of("psum_start").passes
