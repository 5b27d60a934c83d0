"""Running a program equation by equation; whoever runs it may do something else in the place of some equations."""

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.atoms import results_of, values_of
from axonml_jax.program.program import Equation, Program, read_program

At = Callable[[Equation, list[Any]], Sequence[Any] | None]
"""`at(equation, operands) -> results`: what is done in an equation's place; None: the equation is run."""

RunBody = Callable[[Program, Sequence[Any]], Sequence[Any]]
"""`run_body(program, values) -> results`."""


def run_program(program: Program, values: Sequence[Any], at: At | None = None) -> list[Any]:
    """The results of a program of `values`.

    Args:
      program: the program.
      values: of its inputs; anything that `at` understands.
      at: what is done at an equation.
    """
    env = dict(program.constants)
    env.update(zip(program.inputs, values, strict=True))
    run(program.equations, env, at)
    return results_of(program.outputs, env)


def run(equations: Iterable[Equation], env: MutableMapping[int, Any], at: At | None = None) -> None:
    """Run equations on the values in `env`, adding what they make."""
    for equation in equations:
        operands = values_of(equation.inputs, env)
        made = at(equation, operands) if at is not None else None
        if made is None:
            made = equation.op.bind(operands)
        env.update(zip(equation.outputs, made, strict=True))


def run_traced(
    fun: Callable[..., PyTree], run_body: RunBody, *args: PyTree, read: Callable[[Any], Program] = read_program
) -> PyTree:
    """`fun(*args)`, whose arrays are those that its program gives when somebody runs it in his own way.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      run_body: runs the program of `fun` on the leaves of `args`.
      *args: pytrees of arrays.
      read: the program of a traced function.
    """
    leaves, treedef = jax.tree.flatten(args)
    seen: dict[str, Any] = {}

    def arrays_of(*leaves: Any) -> list[jax.Array]:
        out, seen["treedef"] = jax.tree.flatten(fun(*treedef.unflatten(leaves)))
        seen["fixed"] = [None if isinstance(leaf, jax.Array) else leaf for leaf in out]
        return [leaf for leaf in out if isinstance(leaf, jax.Array)]

    arrays = iter(run_body(read(trace(arrays_of, *leaves).jaxpr), leaves))
    return seen["treedef"].unflatten([next(arrays) if leaf is None else leaf for leaf in seen["fixed"]])


def run_bodies(equation: Equation, values: Sequence[Any], run_body: RunBody) -> list[Any] | None:
    """Run a loop, conditional, plain call or checkpointed call with something else done in the place of its bodies.

    Args:
      equation: any.
      values: its operands.
      run_body: runs a body; loops and branches trace it anew.

    Returns:
      The results; None: it has no body, or one that must stay as it is (derivatives of its own, a `shard_map`, branches for
      platforms).
    """
    pairs = zip(values, equation.op.given, strict=True)
    values = [x if isinstance(x, jax.Array) else jax.numpy.asarray(x, aval.dtype) for x, aval in pairs]
    if equation.called is not None and not equation.name.startswith("custom_") and equation.op.checkpointed is None:
        return list(run_body(equation.called, values))
    if equation.op.checkpointed is not None:
        with equation.op.scope():
            return _run_checkpointed(equation, values, run_body)
    if equation.branches and not equation.op.chooses_by_platform:
        index, *given = values
        branches = [lambda branch=branch: list(run_body(branch, given)) for branch in equation.branches]
        with equation.op.scope():
            return list(jax.lax.switch(index, branches))
    if (scan := equation.op.scan) is not None:
        consts, carry = list(values[: scan.num_consts]), list(values[scan.num_consts : scan.first_scanned])

        def trip(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            made = list(run_body(_known(equation.body), [*consts, *carry, *sliced]))
            return made[: scan.num_carry], made[scan.num_carry :]

        with equation.op.scope():
            carry, ys = jax.lax.scan(trip, carry, list(values[scan.first_scanned :]), **scan.options)
        return [*carry, *ys]
    if (loop := equation.op.loop) is not None:
        split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
        of_condition, consts = values[: split[0]], values[split[0] : split[1]]
        with equation.op.scope():
            return list(
                jax.lax.while_loop(
                    lambda carry: run_body(_known(equation.condition), [*of_condition, *carry])[0],
                    lambda carry: list(run_body(_known(equation.body), [*consts, *carry])),
                    list(values[split[1] :]),
                )
            )
    return None


def _run_checkpointed(equation: Equation, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """A call under `jax.checkpoint` with another body; one of a backward keeps its barrier."""
    checkpointed = equation.op.checkpointed
    assert checkpointed is not None
    call = jax.checkpoint(lambda *given: run_body(_known(equation.body), given), **checkpointed.options)
    if not checkpointed.in_backward:
        return list(call(*values))
    again = lambda made, given: made.op.bind_in_backward(given) if made.op.checkpointed is not None else None
    return run_program(read_program(trace(call, *values).jaxpr), values, again)


def _known(program: Program | None) -> Program:
    assert program is not None
    return program
