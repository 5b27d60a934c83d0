"""Canaries about jaxprs and their equations (`jaxpr.py`, `operation.py`), which are read, cut and run again."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat import jaxpr
from axonml_jax.compat.barrier import after
from axonml_jax.compat.canaries.canary import Canary, expect
from axonml_jax.compat.canaries.on_two import AXIS, SPLIT, body_of, floats, names, on_two, operations
from axonml_jax.compat.jaxpr import live, opened
from axonml_jax.compat.operation import Operation


@jax.custom_jvp
def _with_jvp(x: Any) -> Any:
    return jnp.sin(x)


_with_jvp.defjvp(lambda primals, tangents: (_with_jvp(primals[0]), tangents[0]))


@jax.custom_vjp
def _with_vjp(x: Any) -> Any:
    return jnp.sin(x)


_with_vjp.defvjp(lambda x: (_with_vjp(x), x), lambda x, ct: (ct,))


def _program(x: Any) -> Any:
    with jax.named_scope("canary"):
        x = jnp.sin(x) + 1.0
    x = _with_vjp(_with_jvp(jax.jit(lambda x: x * 2)(x)))
    x = jax.checkpoint(jnp.cos)(x)
    total, _ = jax.lax.scan(lambda c, each: (c * each + x[0], None), jnp.float32(1), x)
    x = jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * total, c[1] + 1), (x, 0))[0]
    jnp.tan(x)
    return jax.lax.cond(total > 0, jnp.sin, jnp.cos, x)


_VIEWS: dict[str, tuple[Callable[[Operation], Any], int]] = {
    "mere calls": (lambda operation: operation.called, 1),
    "calls": (lambda operation: operation.call, 4),
    "calls under jax.checkpoint": (lambda operation: operation.checkpointed, 1),
    "scans": (lambda operation: operation.scan, 1),
    "while loops": (lambda operation: operation.loop, 1),
    "conditionals": (lambda operation: operation.branches, 1),
}
"""What an operation may be read as, and how many of `_program` are."""


def _inner() -> None:
    found = operations(_program, floats(4))
    for what, (view, count) in _VIEWS.items():
        read = [operation.name for operation in found if view(operation) is not None]
        expect(
            len(read) == count, f"of the operations {names(found)} these are read as {what}: {read}, expected {count}"
        )
    held = {operation.name: len(operation.bodies) for operation in found if operation.bodies}
    expect(sorted(held.values()) == [1, 1, 1, 1, 1, 2, 2], f"programs inside operations: {held}")
    mapped = operations(on_two(jnp.sin, SPLIT, check_vma=False), floats(2))[0].mapped
    said = mapped and (dict(mapped.axis_sizes), mapped.manual)
    expect(said == ({AXIS: 2}, frozenset({AXIS})), f"a shard_map over two ranks says {said}")


def _scans() -> None:
    found = [operation.scan for operation in operations(_program, floats(4)) if operation.scan]
    sizes = [(scan.num_consts, scan.num_carry, scan.first_scanned) for scan in found]
    expect(sizes == [(1, 1, 2)], f"scans with one constant and one carry say that they have {sizes}")
    expect(found[0].options["length"] == 4, f"a scan of four trips says {dict(found[0].options)}")


def _bound_again() -> None:
    def run(x: Any) -> Any:
        program = opened(jax.make_jaxpr(_program)(floats(4)))
        values = dict(zip(program.inputs, [x], strict=True))
        for operation in map(Operation, program.equations):
            read = [atom.val if isinstance(atom, jaxpr.Literal) else values[atom] for atom in operation.operands]
            values |= zip(operation.results, operation.bind(read), strict=True)
        return values[program.outputs[0]]

    first, again = operations(_program, floats(4)), operations(run, floats(4))
    expect(names(again) == names(first), f"operations that are run again make {names(again)}, not {names(first)}")
    scopes = [(str(a.scopes), str(b.scopes)) for a, b in zip(first, again, strict=True)]
    expect(all(a == b for a, b in scopes), f"name scopes before and after operations were run again: {scopes}")


def _literals() -> None:
    atoms = [atom for operation in operations(lambda x: x + 1.0, floats(4)) for atom in operation.operands]
    found = [isinstance(atom, jaxpr.Literal) for atom in atoms]
    expect(found == [False, True], f"of x + 1.0 these operands are literals: {found}")
    expect(float(atoms[1].val) == 1.0 and atoms[1].aval.shape == (), f"the literal 1.0 reads {atoms[1]}")


def _sources() -> None:
    first = operations(_program, floats(4))[0]
    expect(
        str(first.scopes) == "canary", f"an operation under named_scope('canary') stands under {str(first.scopes)!r}"
    )
    called = [name.rsplit(".", 1)[-1] for name in first.functions]
    expect("_program" in called, f"an operation that _program calls was called by {called}")
    expect("_program" in first.line, f"its line is {first.line!r}")


def _dead_code() -> None:
    traced = jax.make_jaxpr(lambda x: (jnp.tan(x), after(x, jnp.sin(x)))[1])(floats(4))
    left = [Operation(eqn).name for eqn in opened(live(traced)).equations]
    expect(left == ["sin", "optimization_barrier"], f"of tan, sin and a barrier that waits for sin are left {left}")


def _effects() -> None:
    printing = operations(lambda x: jax.debug.print("{}", x) or x, floats(1))
    expect(any(operation.acts for operation in printing), f"nothing of {names(printing)} acts, which prints")
    sums = body_of(on_two(lambda x: x + jax.lax.psum(x, AXIS), SPLIT, check_vma=False), floats(2))
    acting = {operation.name: list(operation.eqn.effects) for operation in sums if operation.acts}
    expect(not acting, f"a sum over the ranks acts: {acting}")


def _printed() -> None:
    def text(number: float) -> str:
        deep = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(200), x) * number
        return str(jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (deep(c), None), x, length=2)[0])(floats(1)))

    expect(text(2.0) == text(2.0), "the same program traced twice is printed in two ways")
    expect(text(2.0) != text(3.0), "programs that differ in a number inside a loop are printed alike")


CANARIES = (
    Canary(
        "programs inside equations",
        "Calls, loops and branches hold their bodies under the names we read.",
        "Units, stages and optimizers on shards do not see what a loop or a call does.",
        _inner,
    ),
    Canary(
        "parts of a scan",
        "A scan says how many of its operands are constants and how many are carried.",
        "Weights that a loop reads are taken for its carry: units and cuts go wrong.",
        _scans,
    ),
    Canary(
        "equations bound again",
        "get_bind_params gives what a primitive is bound with, so that an equation can be run again on other values.",
        "What runs under a plan is not what the model traced.",
        _bound_again,
    ),
    Canary(
        "literals",
        "A number written into a program is a Literal with a value.",
        "Numbers are taken for results of other equations, and looked for in vain.",
        _literals,
    ),
    Canary(
        "where equations come from",
        "An equation knows its name scopes and the functions that called it.",
        "Traffic loses its labels, messages name no line of the user's.",
        _sources,
    ),
    Canary(
        "dead code",
        "dce_jaxpr removes what no result needs, as lowering does, and leaves what a barrier waits for.",
        "The ledger counts collectives that are never sent, or misses some that are.",
        _dead_code,
    ),
    Canary(
        "effects",
        "Only what acts has an effect, besides NamedAxisEffect of collectives.",
        "Printing disappears from loops that are cut, or everything that communicates is kept from being cut.",
        _effects,
    ),
    Canary(
        "printed programs",
        "A traced program prints whole, and the same each time but for addresses.",
        "Processes that traced different programs are not found out, or equal ones are refused.",
        _printed,
    ),
)
