"""Put hooks on a function's inputs where they are first used, instead of at its top.

A hook is an identity with a gradient rule. JAX runs the backward in the reverse order of the forward, so a hook at the
top of a loss runs after the whole backward; one sunk to the first use of its inputs runs as soon as their gradients are
complete. An input that is only scanned over is hooked in the scan's body, slice by slice.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.model.atoms import among, names_of, values_of
from axonml_jax.model.trace import called_jaxpr, run_equation, scan_parts, scope_of, trace

Place = tuple[int, ...]
"""Where an equation stands: its index, after the indices of the calls around it; () is the end of the program."""

Grouping = Callable[[Sequence[int], Sequence[Any]], Sequence[Sequence[int]]]
"""`group(indices, values)`: which of some inputs, given in the order in which their gradients become ready, share a hook:
groups of positions in what was given. `values` have the shapes read at this level (slices in a scan's body)."""

Sliceable = Callable[[int, int], bool]

Hook = Callable[[Sequence[int], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""`hook(indices, inputs, extras) -> values`: what the function reads in the place of these inputs."""


@dataclass
class _Scope:
    """One level at which inputs are hooked: the program itself, or the body of a scan."""

    first_use: dict[int, Place] = field(default_factory=dict)
    scans: dict[Place, dict[int, int]] = field(default_factory=dict)
    bodies: dict[Place, "_Scope"] = field(default_factory=dict)


def sink(
    fun: Callable[..., PyTree],
    read: Sequence[jax.Array],
    args: tuple,
    *,
    group: Grouping,
    hook: Hook,
    sliceable: Sliceable = lambda leaf, depth: True,
) -> Callable[..., PyTree]:
    """Trace `fun(read, *args)` and return a function of (inputs, extras, *args) that hooks each input at its first use.

    Args:
      fun: a function of a list of arrays and anything else.
      read: the arrays `fun` reads, as the hooks will give them (dtypes and varying types count, values do not).
      args: the other arguments.
      group: which inputs share a hook, decided at each level separately.
      hook: called once per group while the returned function is traced. `inputs` may differ from `read` in shape, dtype
        and in what they vary over; `extras` (a tree per input, None allowed) are handed through, sliced where inputs are.
      sliceable: `sliceable(input, depth)`: whether slices of an input (along its first `depth` dims) may be hooked in the
        body of a scan; others are hooked whole, before it.

    Returns:
      The function; an input that is never used is never hooked.
    """
    traced = trace(fun, list(read), *args)
    count = len(read)
    scope = _find_uses(traced.jaxpr, dict(zip(traced.jaxpr.invars[:count], range(count), strict=True)), sliceable, 0)

    def hooked(inputs, extras, *args):
        pending = _Pending(scope, list(inputs), list(extras), list(read), group, hook)
        values = [*map(_Input, range(count)), *jax.tree.leaves(args)]
        return traced.out_tree.unflatten(_run(traced.jaxpr, values, (), pending))

    return hooked


def _find_uses(jaxpr, inputs: dict, sliceable: Sliceable, depth: int) -> _Scope:
    scope, uses = _Scope(), Counter()
    aliases = _count(jaxpr, inputs, uses)
    uses.update(aliases[var] for var in jaxpr.outvars if among(var, aliases))
    slices = lambda leaf: uses[leaf] == 1 and sliceable(leaf, depth + 1)
    find = lambda jaxpr, inputs: _find_uses(jaxpr, inputs, sliceable, depth + 1)
    _walk(jaxpr, inputs, (), scope, slices, find)
    for var in names_of(jaxpr.outvars):
        if var in aliases:
            scope.first_use.setdefault(aliases[var], ())
    return scope


def _inputs_of(eqn, inputs: dict) -> dict[int, int]:
    return {k: inputs[v] for k, v in enumerate(eqn.invars) if among(v, inputs)}


def _handed_through(eqn, inner, inside: dict) -> dict:
    """The results of a call that are inputs, by their variables outside; `inside` has them by those in its body."""
    return {var: inside[own] for var, own in zip(eqn.outvars, inner.outvars, strict=True) if among(own, inside)}


def _count(jaxpr, inputs: dict, uses: Counter) -> dict:
    """Add how often each input is used, and return all variables that stand for inputs."""
    inputs = dict(inputs)
    for eqn in jaxpr.eqns:
        used = _inputs_of(eqn, inputs)
        if (inner := called_jaxpr(eqn)) is not None:
            inside = _count(inner, {inner.invars[k]: leaf for k, leaf in used.items()}, uses)
            inputs |= _handed_through(eqn, inner, inside)
        else:
            uses.update(used.values())
    return inputs


def _walk(jaxpr, inputs: dict, path: Place, scope: _Scope, slices: Callable, find: Callable) -> dict:
    inputs = dict(inputs)
    for i, eqn in enumerate(jaxpr.eqns):
        used, place = _inputs_of(eqn, inputs), (*path, i)
        if not used:
            continue
        if (inner := called_jaxpr(eqn)) is not None:
            inside = {inner.invars[k]: leaf for k, leaf in used.items()}
            inputs |= _handed_through(eqn, inner, _walk(inner, inside, place, scope, slices, find))
            continue
        if (parts := scan_parts(eqn)) is not None:
            first_scanned = parts.num_consts + parts.num_carry
            scanned = {k: leaf for k, leaf in used.items() if k >= first_scanned and slices(leaf)}
            if scanned:
                body = eqn.params["jaxpr"]
                scope.scans[place] = scanned
                scope.bodies[place] = find(body, {body.invars[k]: leaf for k, leaf in scanned.items()})
            used = {k: leaf for k, leaf in used.items() if k not in scanned}
        for leaf in used.values():
            scope.first_use.setdefault(leaf, place)
    return inputs


@dataclass(frozen=True)
class _Input:
    """Stands for a hooked input in the environment until it is read."""

    index: int


class _Pending:
    """The inputs of one scope: raw until the place of their group's hook is reached, then what the hook returned."""

    def __init__(self, scope: _Scope, inputs, extras, read, group: Grouping, hook: Hook):
        self.scope, self.inputs, self.extras, self.read_as, self.group, self.hook = (
            scope,
            inputs,
            extras,
            read,
            group,
            hook,
        )
        self.values: dict[int, Any] = {}
        self.due: dict[Place, list[list[int]]] = {}
        order = list(scope.first_use)
        ready = order[::-1]
        for positions in group(ready, [read[leaf] for leaf in ready]) if ready else ():
            leaves = sorted((ready[k] for k in positions), key=order.index)
            self.due.setdefault(scope.first_use[leaves[0]], []).append(leaves)

    def reach(self, place: Place) -> None:
        for leaves in self.due.pop(place, ()):
            values = self.hook(leaves, [self.inputs[i] for i in leaves], [self.extras[i] for i in leaves])
            self.values.update(zip(leaves, values, strict=True))

    def read(self, value):
        return self.values[value.index] if isinstance(value, _Input) else value


def _run(jaxpr, values, path: Place, pending: _Pending) -> list[Any]:
    env: dict = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    for i, eqn in enumerate(jaxpr.eqns):
        place = (*path, i)
        operands = values_of(eqn.invars, env)
        with scope_of(eqn):
            pending.reach(place)
        if place in pending.scope.scans:
            results = _run_scan(eqn, operands, place, pending)
        elif (inner := called_jaxpr(eqn)) is not None and any(isinstance(v, _Input) for v in operands):
            with scope_of(eqn):
                results = _run(inner, operands, place, pending)
        else:
            results = run_equation(eqn, [pending.read(v) for v in operands])
        env.update(zip(eqn.outvars, results, strict=True))
    if not path:
        pending.reach(())
    return [pending.read(v) if not path else v for v in values_of(jaxpr.outvars, env)]


def _run_scan(eqn, operands, place: Place, outer: _Pending) -> list[Any]:
    parts, body, scanned = scan_parts(eqn), eqn.params["jaxpr"], outer.scope.scans[place]
    assert parts is not None
    leaves = list(scanned.values())
    operands = [outer.inputs[scanned[k]] if k in scanned else outer.read(v) for k, v in enumerate(operands)]
    first_scanned = parts.num_consts + parts.num_carry
    consts, carry, xs = (
        operands[: parts.num_consts],
        operands[parts.num_consts : first_scanned],
        operands[first_scanned:],
    )

    def step(carry, slices):
        xs, extras = slices
        values = [*consts, *carry, *xs]
        inputs = dict(zip(leaves, (values[k] for k in scanned), strict=True))
        read = {leaf: body.invars[k].aval for k, leaf in scanned.items()}
        pending = _Pending(outer.scope.bodies[place], inputs, extras, read, outer.group, outer.hook)
        for k, leaf in scanned.items():
            values[k] = _Input(leaf)
        results = _run(body, values, (), pending)
        return results[: parts.num_carry], results[parts.num_carry :]

    extras = {leaf: outer.extras[leaf] for leaf in leaves}
    params = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    with scope_of(eqn):
        carry, ys = jax.lax.scan(step, carry, (xs, extras), **params)
    return [*carry, *ys]
