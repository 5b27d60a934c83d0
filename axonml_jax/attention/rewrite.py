"""Runs a program with its attentions replaced by a function, such as the library's own attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.attention.found import (
    Added,
    Cast,
    Change,
    FoundAttention,
    Masked,
    Operand,
    PositionReader,
    Recognised,
    Scaled,
    Tanh,
    sees,
)
from axonml_jax.attention.recognise import Remains, remaining
from axonml_jax.program.program import (
    Equation,
    is_constant,
    made_by,
    results_of,
    run,
    run_program,
    value_of,
    values_of,
    while_loop,
)
from axonml_jax.program.values import Level, Nested, stays

# --------------------------------------------------------------------------------------------------
# Running a program with its attentions replaced.
# --------------------------------------------------------------------------------------------------

Instead = Callable[[FoundAttention, jax.Array, jax.Array, jax.Array, "Reads"], jax.Array]
"""`instead(found, q, k, v, given) -> [batch, query, heads, value]`: q, k and v are in the layouts of `attention/found.py`, and
`given(operand)` is any other array that the attention reads."""


def replaced(
    found: Recognised, instead: Instead, attentions: Sequence[FoundAttention] | None = None
) -> Callable[[Sequence[Any]], list[Any]]:
    """Builds a function that runs a program with its attentions computed by `instead`.

    Args:
      found: the program's attentions.
      instead: called for each of them, every time that the program is traced.
      attentions: which of them; None: all that may be replaced.

    Returns:
      A function of the program's inputs that returns its results. It is differentiated, checkpointed and scanned as the
      program is; what only the replaced attentions read is not computed.

    Raises:
      ValueError: naming the attentions that are left as they are, each with the reason.
    """
    chosen = found.replaceable if attentions is None else tuple(attentions)
    if left := [each for each in chosen if each.left]:
        raise ValueError("these attentions cannot be replaced:\n" + "\n".join(map(str, left)))
    plan = _Plan(found.values, {each.out.value: each for each in chosen}, remaining(found.values, chosen), instead)

    def call(values: Sequence[Any]) -> list[Any]:
        return plan.run(found.values.top, values, {})

    return call


Envs = Mapping[Level, Mapping[int, Any]]
"""The values of the levels that are being run, by number."""


@dataclass(frozen=True)
class Reads:
    """The values that code at an attention's place may read."""

    values: Nested
    level: Level
    envs: Envs
    sizes: Mapping[str, int]

    def __call__(self, operand: Operand, *, spread: bool = False) -> Any:
        """An operand in its layout; along dims where it does not change it has size 1, or with `spread` their size."""
        return operand.given(self.value(operand.value), self.sizes, spread=spread)

    def at(self, operand: Operand, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Reads an operand in its layout, at positions int [x] of queries and [y] of keys alone."""
        return PositionReader(self.values, self.level, self.value).operand(operand, self.sizes, queries, keys)

    def value(self, value: int) -> Any:
        """Any value by its number, such as a random key; one that has not been computed is computed here."""
        place = self.values.at(value, self.level)
        assert place is not None, value
        level, number = place
        env = dict(self.envs[level])
        if number not in env or env[number] is None:
            there = {each for each, known in env.items() if known is not None}
            run(made_by(level.program.equations, [number], there), env)
        return env[number]


@dataclass(frozen=True, eq=False)
class _Plan:
    values: Nested
    attentions: Mapping[int, FoundAttention]
    remains: Remains
    instead: Instead

    @cached_property
    def opened(self) -> frozenset[Equation]:
        return self.remains.opened

    def run(self, level: Level, inputs: Sequence[Any], around: Envs) -> list[Any]:
        """Runs a level, and returns its results; None for those that nothing reads."""
        program = level.program
        env: dict[int, Any] = dict(program.constants)
        env.update(zip(program.inputs, inputs, strict=True))
        envs = {**around, level: env}
        for equation in program.equations:
            made = self._made(level, equation, envs)
            if made is not None:
                env.update(zip(equation.outputs, made, strict=True))
        live = [self.remains.is_live(value) for value in level.of(program.outputs)]
        wanted = [atom for atom, is_live in zip(program.outputs, live, strict=True) if is_live]
        results = iter(results_of(wanted, env))
        return [next(results) if is_live else None for is_live in live]

    def _made(self, level: Level, equation: Equation, envs: Envs) -> Sequence[Any] | None:
        """The results of an equation; None if nothing reads them and it has no effect."""
        made = level.of(equation.outputs)
        if equation in self.opened:
            with equation.op.scope():
                return self._inside(level, equation, envs)
        if len(made) == 1 and made[0] in self.attentions:
            with equation.op.scope():
                return [self._attention(self.attentions[made[0]], level, envs)]
        if not equation.op.acts and not any(map(self.remains.is_live, made)):
            return None
        return equation.op.bind(values_of(equation.inputs, envs[level]))

    def _attention(self, found: FoundAttention, level: Level, envs: Envs) -> Any:
        reads = Reads(self.values, level, envs, found.sizes)
        q, k, v = [reads(operand, spread=True) for operand in (found.q, found.k, found.v)]
        return found.out.taken(self.instead(found, q, k, v, reads), found.sizes).astype(found.out.dtype)

    def _inside(self, level: Level, equation: Equation, envs: Envs) -> Sequence[Any]:
        """Runs an equation whose bodies have attentions: a scan, while loop, conditional or call."""
        env, bodies = envs[level], self.values.levels[equation]
        given = [atom.val if is_constant(atom) else env.get(atom) for atom in equation.inputs]
        if equation.op.scan is not None:
            return self._scan(equation, bodies[0], given, envs)
        if equation.op.loop is not None:
            return self._while(equation, bodies[0], given, envs)
        if equation.op.branches:
            live = [self.remains.is_live(value) for value in level.of(equation.outputs)]
            cases = [lambda *values, body=body: self._live(self.run(body, values, envs), live) for body in bodies]
            return jax.lax.switch(value_of(equation.inputs[0], env), cases, *given[1:])
        call = lambda *values: self.run(bodies[0], values, envs)
        if (view := equation.op.checkpointed) is not None:
            call = jax.checkpoint(call, **view.options)
        return call(*given)

    def _live(self, results: Sequence[Any], live: Sequence[bool]) -> list[Any]:
        """A branch's results, None for what nobody reads: of these a branch that returns a number would still have it."""
        return [result if is_live else None for result, is_live in zip(results, live, strict=True)]

    def _scan(self, equation: Equation, body: Level, given: Sequence[Any], envs: Envs) -> list[Any]:
        scan, program = equation.op.scan, body.program
        assert scan is not None
        first, own = scan.num_consts, range(scan.num_carry)
        same = [stays(program, first + k, k) for k in own]
        made = self._results(equation, body)
        carried = [k for k in own if not same[k] and (self._reads(body, first + k) or self.remains.is_live(made[k]))]

        def step(carry: list[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = [*given[: scan.first_scanned], *slices]
            for k in own:
                values[first + k] = given[first + k] if same[k] else None
            for k, value in zip(carried, carry, strict=True):
                values[first + k] = value
            results = self.run(body, values, envs)
            return [results[k] for k in carried], results[scan.num_carry :]

        slices = [
            x if self._reads(body, scan.first_scanned + k) else None for k, x in enumerate(given[scan.first_scanned :])
        ]
        carry, stacked = jax.lax.scan(step, [given[first + k] for k in carried], slices, **scan.options)
        table = dict(zip(carried, carry, strict=True))
        return [*(given[first + k] if same[k] else table.get(k) for k in own), *stacked]

    def _reads(self, body: Level, k: int) -> bool:
        """Whether a body's input is read."""
        return self.remains.is_live(body.values[body.program.inputs[k]])

    def _results(self, equation: Equation, body: Level) -> tuple[Any, ...]:
        assert body.parent is not None
        return body.parent.of(equation.outputs)

    def _while(self, equation: Equation, body: Level, given: Sequence[Any], envs: Envs) -> list[Any]:
        loop, condition = equation.op.loop, equation.condition
        assert loop is not None and condition is not None
        asked = given[: loop.num_condition_consts]
        consts, carry = given[len(asked) :][: loop.num_body_consts], given[len(asked) + loop.num_body_consts :]
        goes_on = lambda carry: run_program(condition, [*asked, *carry])[0]
        return while_loop(condition, goes_on, lambda carry: self.run(body, [*consts, *carry], envs), list(carry))


# --------------------------------------------------------------------------------------------------
# `plain_attention`: a found attention computed as written, with all scores at once, as a reference for the others.
# --------------------------------------------------------------------------------------------------


def plain_attention(found: FoundAttention, q: Any, k: Any, v: Any, given: Reads) -> jax.Array:
    """Computes a found attention with all scores at once: softmax(changes(q · k)) · v.

    Args:
      found: the attention.
      q: [batch, query, heads, size].
      k: [batch, key, kv heads, size].
      v: [batch, key, kv heads, value].
      given: its other operands.

    Returns:
      [batch, query, heads, value].
    """
    sizes, (first, second) = found.sizes, found.precisions
    rows = (sizes["batch"], found.heads, sizes["query"], sizes["key"])
    grouped = q.reshape(*q.shape[:2], sizes["head"], sizes["member"], q.shape[3])
    scores = jnp.einsum("bigmd,bjgd->bgmij", grouped, k, precision=first, preferred_element_type=found.scores_dtype)
    scores = scores.reshape(rows)
    for change in found.changes:
        scores = _changed(scores, change, found, given)
    weights = jax.nn.softmax(scores, axis=-1)
    if found.zero:
        weights = jnp.where(_seen(found, found.zero, given), weights, 0)
    for gate in found.gates:
        is_array = isinstance(gate, Operand)
        weights = weights * given(gate) if is_array else jnp.where(_seen(found, (gate,), given), weights, 0)
    weights = weights.astype(found.weights_dtype)
    if found.dropout is not None:
        kept = jnp.asarray(found.dropout.scale, weights.dtype)
        weights = jnp.where(given(found.dropout.keep), weights * kept, 0)
    weights = weights.reshape(rows[0], sizes["head"], sizes["member"], *rows[2:])
    out = jnp.einsum("bgmij,bjgd->bigmd", weights, v, precision=second, preferred_element_type=found.out.dtype)
    return out.reshape(*q.shape[:3], v.shape[3])


def _changed(scores: Any, change: Change, found: FoundAttention, given: Reads) -> Any:
    match change:
        case Scaled(by, divides):
            return scores / _array(by, scores, given) if divides else scores * _array(by, scores, given)
        case Added(by, subtracts):
            return scores - _array(by, scores, given) if subtracts else scores + _array(by, scores, given)
        case Tanh():
            return jnp.tanh(scores)
        case Cast(dtype):
            return scores.astype(dtype)
        case Masked(terms, fill, adds):
            hidden = jnp.asarray(fill, scores.dtype)
            return jnp.where(_seen(found, terms, given), scores, scores + hidden if adds else hidden)


def _array(by: float | Operand, scores: Any, given: Reads) -> Any:
    return given(by) if isinstance(by, Operand) else jnp.asarray(by, scores.dtype)


def _seen(found: FoundAttention, terms: Any, given: Reads) -> Any:
    queries, keys = jnp.arange(found.sizes["query"]), jnp.arange(found.sizes["key"])
    seen = jnp.ones((1, 1, 1, 1), bool)
    for term in terms:
        seen = seen & sees(term, queries, keys, given)
    return seen
