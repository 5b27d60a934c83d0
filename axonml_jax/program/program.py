"""Traced programs as values: equations, one table of rules for primitives, dataflow, one interpreter."""

import itertools
import math
import typing
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree
from axonml_jax.compat.jaxpr import Literal, Operation, function_of, is_ours, opened, trace, written_in
from axonml_jax.compat.order import BARRIER, WAITING
from axonml_jax.compat.varying_types import CASTS

# --------------------------------------------------------------------------------------------------
# Atoms: what an equation reads and a program returns, each the name of a value or a constant written into the program.
#
# A program (`program.py`) names its values by numbers. A constant has no name and cannot be hashed, so it is never a
# key: every table and set of values is asked here, wherever an atom may be a constant.
# --------------------------------------------------------------------------------------------------

Atom = Any
"""A number, or a constant with a `val` and an `aval`."""

T = TypeVar("T")


def is_constant(atom: Atom) -> bool:
    """Whether an atom is a literal constant."""
    return isinstance(atom, Literal)


def names_of(atoms: Iterable[Atom]) -> tuple[Any, ...]:
    """The atoms that name values, in order."""
    return tuple([atom for atom in atoms if not isinstance(atom, Literal)])


def among(atom: Atom, some: Collection[Hashable]) -> bool:
    """Whether an atom names one of some values; a constant never does."""
    return not is_constant(atom) and atom in some


def entry_of(atom: Atom, table: Mapping[Any, T], otherwise: T) -> T:
    """Look up an atom's value in a table; `otherwise` for missing ones and constants."""
    return otherwise if is_constant(atom) else table.get(atom, otherwise)


def value_of(atom: Atom, env: Mapping[Any, Any]) -> Any:
    """The value of an atom: from the environment, or its constant."""
    return atom.val if is_constant(atom) else env[atom]


def values_of(atoms: Iterable[Atom], env: Mapping[Any, Any]) -> list[Any]:
    """The value of each atom."""
    return [value_of(atom, env) for atom in atoms]


def result_of(atom: Atom, env: Mapping[Any, Any]) -> Any:
    """The value of a program's output atom, always as an array of the traced dtype."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_constant(atom) else env[atom]


def results_of(atoms: Iterable[Atom], env: Mapping[Any, Any]) -> list[Any]:
    """The result of each atom."""
    return [result_of(atom, env) for atom in atoms]


def aval_of(atom: Atom, avals: Mapping[Any, Any]) -> Any:
    """The abstract value of an atom."""
    return atom.aval if is_constant(atom) else avals[atom]


# --------------------------------------------------------------------------------------------------
# How the dims of an operation's results follow those of its operands, primitive by primitive: for `meaning/places.py`.
#
# A rule `follow(op, k, dim, parts)` names the dim of every result of which part p (of `parts` equal parts behind each
# other) is made, of operand k, of part p of `dim` alone; None: there is none, or it is not known. All but a reshape's
# dims go on index by index, whatever the parts.
# --------------------------------------------------------------------------------------------------

Follow = Callable[[Operation, int, int, int], int | None]


def same(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Follow a dim through an elementwise operation: the same dim, unless the operand is broadcast or bits are regrouped."""
    given, made = op.given[k].shape, op.made[0].shape
    return dim if len(given) == len(made) and given[dim] == made[dim] else None


def _broadcast(op: Operation, k: int, dim: int, parts: int) -> int | None:
    to = op.options["broadcast_dimensions"][dim]
    return to if op.given[0].shape[dim] == op.options["shape"][to] else None


def _transpose(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return tuple(op.options["permutation"]).index(dim)


def _reshape(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Follow a dim through a reshape: to the dim of the new shape that begins at the same place, if it divides."""
    old, new = op.given[0].shape, op.made[0].shape
    before = math.prod(old[:dim])
    begins = [j for j, size in enumerate(new) if size > 1 and math.prod(new[:j]) == before]
    return begins[0] if begins and new[begins[0]] % parts == 0 and op.options["dimensions"] is None else None


def _without(name: str) -> Follow:
    """Follow dims through an operation that removes the dims in an option."""

    def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
        gone = op.options[name]
        gone = {d % op.given[0].ndim for d in (gone if isinstance(gone, (tuple, list)) else (gone,))}
        return None if dim in gone else dim - sum(d < dim for d in gone)

    return follow


def _beside(name: str) -> Follow:
    """Follow dims through an operation that acts along the dims in an option; all others are unchanged."""

    def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
        along = op.options[name]
        along = {d % op.given[0].ndim for d in (along if isinstance(along, (tuple, list)) else (along,))}
        return None if dim in along else dim

    return follow


def _whole(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Follow a dim of the operand if the operation takes it in full."""
    return dim if k == 0 and op.given[0].shape[dim] == op.made[0].shape[dim] else None


def _updated(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Follow a dim of an array and of its update, if the update covers it in full."""
    return dim if k < 2 and op.given[0].shape[dim] == op.given[1].shape[dim] else None


def _pad(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return dim if k == 0 and tuple(op.options["padding_config"][dim]) == (0, 0, 0) else None


def _tile(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return dim if op.options["reps"][dim] == 1 else None


def _before_last(count: int) -> Follow:
    """Follow dims through an operation on the last `count` dims, such as a factorization of matrices."""
    return lambda op, k, dim, parts: dim if dim < op.given[k].ndim - count else None


def _fft(op: Operation, k: int, dim: int, parts: int) -> int | None:
    return dim if dim < op.given[0].ndim - len(op.options["fft_lengths"]) else None


def _product(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """Follow a dim through a product: batch dims come first, then the left operand's own, then the right one's."""
    contracted, batched = op.contraction
    if k > 1 or dim in contracted[k]:
        return None
    if dim in batched[k]:
        return batched[k].index(dim)
    free = [[d for d in range(op.given[i].ndim) if d not in (*contracted[i], *batched[i])] for i in (0, 1)]
    return len(batched[k]) + (len(free[0]) if k else 0) + free[k].index(dim)


DIMS: Mapping[str, Follow] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _beside("dimension"),
    "dot_general": _product,
    "dynamic_slice": _whole,
    "dynamic_update_slice": _updated,
    "fft": _fft,
    "name": same,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _beside("dimensions"),
    "slice": _whole,
    "sort": _beside("dimension"),
    "split": _beside("axis"),
    "squeeze": _without("dimensions"),
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _without("axis"),
    **{name: _beside("axis") for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")},
    **{f"reduce_{name}": _without("axes") for name in ("and", "max", "min", "or", "prod", "sum", "xor")},
    **{name: _without("axes") for name in ("argmax", "argmin")},
    **{name: _before_last(2) for name in ("cholesky", "eigh", "lu", "qr", "svd", "triangular_solve")},
    "lu_pivots_to_permutation": _before_last(1),
}
"""The rules of primitives that are not elementwise, by name."""


# --------------------------------------------------------------------------------------------------
# `Program`: a traced function as a list of equations over numbered values, so that it can be analysed, cut and run in
# pieces.
#
# It is the library's only representation of a traced function. What `jit` wraps stands in the place of the call, unless
# whoever reads the program wants the call kept; bodies of loops, branches and other calls are programs of their own,
# read when asked for.
# --------------------------------------------------------------------------------------------------

Opens = Callable[[Operation, Sequence[Atom]], bool]
"""`opens(operation, inputs)`: whether the body of a call, or what JAX writes a primitive in, stands in its place."""


@dataclass(frozen=True, eq=False)
class Equation:
    """One operation of a program, with the numbers of the values that it reads and makes.

    Attributes:
      op: the operation.
      name: the primitive's.
      inputs: what it reads: numbers and constants.
      outputs: the numbers of what it makes.
      opens: which calls in its bodies are opened.
      fixed: which of its operands are made of no input of the program.
    """

    op: Operation
    name: str
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    opens: Opens
    fixed: tuple[int, ...] = ()

    @cached_property
    def read(self) -> tuple[int, ...]:
        """The numbers of the values that it reads."""
        return names_of(self.inputs)

    @property
    def called(self) -> "Program | None":
        """What it calls once, on its own operands."""
        return self._inner(self.op.call)

    @property
    def body(self) -> "Program | None":
        """One trip of a scan or of a while loop, or what is under `jax.checkpoint`."""
        view = self.op.scan or self.op.loop or self.op.checkpointed
        return None if view is None else self._inner(view.body)

    @property
    def condition(self) -> "Program | None":
        """The condition of a while loop."""
        return None if self.op.loop is None else self._inner(self.op.loop.condition)

    def part(self, jaxpr: Any) -> "Program":
        """The program of one of its jaxprs."""
        return self._inner(jaxpr)

    @cached_property
    def branches(self) -> "tuple[Program, ...]":
        """The branches of a conditional."""
        return tuple(map(self._inner, self.op.branches or ()))

    @cached_property
    def bodies(self) -> "tuple[Program, ...]":
        """All programs inside the equation, for any purpose."""
        return tuple(map(self._inner, self.op.bodies))

    def _inner(self, jaxpr: Any) -> Any:
        """The program of an inner jaxpr, read once, because equations are told apart by identity."""
        if jaxpr is not None and id(jaxpr) not in self._programs:
            self._programs[id(jaxpr)] = read_program(jaxpr, self.opens)
        return None if jaxpr is None else self._programs[id(jaxpr)]

    @cached_property
    def _programs(self) -> "dict[int, Program]":
        return {}


@dataclass(frozen=True, eq=False)
class Program:
    """A traced function as a list of equations over numbered values.

    Attributes:
      equations: in order.
      inputs: the numbers of its arguments: 0, 1, 2, ...
      outputs: what it returns: numbers and constants.
      constants: number -> value, of those known when it was traced.
      avals: the abstract value of every number.
    """

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[int, Any]
    avals: Mapping[int, Any]


def all_calls(op: Operation, inputs: Sequence[Atom]) -> bool:
    """The `opens` that inlines every `jit`."""
    return op.called is not None


def no_calls(op: Operation, inputs: Sequence[Atom]) -> bool:
    """The `opens` that inlines no `jit`."""
    return False


@dataclass(frozen=True)
class NamedCall:
    """A `jit` that is recognised by its name, and called again on operands of other sizes; its last two have the same rows.

    Attributes:
      call: the function to call instead.
      dims: how many dims each of its operands has.
    """

    call: Callable[..., Any]
    dims: tuple[int, ...]


NAMED_CALLS: dict[str, NamedCall] = {}
"""Named calls by the name of their `jit`; `layers/whole.py` adds losses of which each rank computes a part."""


def named_call(op: Operation) -> NamedCall | None:
    """The named call of an operation, if its operands have the ranks it was written for; None for others, as derivatives."""
    found = NAMED_CALLS.get(op.label)
    return found if found is not None and tuple(aval.ndim for aval in op.given) == found.dims else None


def is_row_by_row(op: Operation) -> bool:
    """Whether an operation says that rows of its first operand are made of those of its last (`layers/dispatch.py`)."""
    return function_of(op) == "row_by_row" and is_ours(op)


def all_but_named(op: Operation, inputs: Sequence[Atom]) -> bool:
    """The `opens` that inlines every `jit` except named calls, and what JAX writes in other primitives."""
    return named_call(op) is None


def read_program(jaxpr: Any, opens: Opens = all_calls) -> Program:
    """Read the program of a jaxpr.

    Args:
      jaxpr: what `trace` returns.
      opens: which equations are replaced by what they are written in (`written_in`). The numbers that it is given are
        those of the result, whose inputs come first.
    """
    reader = _Reader(opens)
    top = opened(jaxpr)
    inputs = tuple(map(reader.new, top.inputs))
    outputs = reader.inline(top, inputs, None)
    return Program(tuple(reader.equations), inputs, tuple(outputs), reader.constants, reader.avals)


class _Reader:
    def __init__(self, opens: Opens):
        self.opens, self._count = opens, itertools.count()
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}
        self.avals: dict[int, Any] = {}
        self._fixed = set[int]()

    def new(self, var: Any) -> int:
        number = next(self._count)
        self.avals[number] = var.aval
        return number

    def inline(self, parts: Any, arguments: Sequence[Atom], call: Operation | None) -> list[Atom]:
        """Add the equations of a jaxpr on these arguments; returns its results."""
        env: dict = dict(zip(parts.inputs, arguments, strict=True))
        for var, value in parts.constants:
            env[var] = self.new(var)
            self.constants[env[var]] = value
            self._fixed.add(env[var])
        for eqn in parts.equations:
            op = Operation(eqn, call)
            given = tuple([var if isinstance(var, Literal) else env[var] for var in op.operands])
            inner = written_in(op) if self.opens(op, given) else None
            if inner is not None:
                made = self.inline(opened(inner), given, op)
            else:
                made = tuple(map(self.new, op.results))
                fixed = tuple([k for k, atom in enumerate(given) if is_constant(atom) or atom in self._fixed])
                if len(fixed) == len(given):
                    self._fixed.update(made)
                self.equations.append(Equation(op, op.name, given, made, self.opens, fixed))
            env.update(zip(op.results, made, strict=True))
        return [var if isinstance(var, Literal) else env[var] for var in parts.outputs]


# --------------------------------------------------------------------------------------------------
# What is known of the values of a program, forward from its inputs; and which equations make some values, backward.
# --------------------------------------------------------------------------------------------------

M = TypeVar("M")

FlowRule = Callable[[Equation, list[M]], Sequence[M]]
"""`rule(equation, operands) -> results`: the facts of an equation's results, from those of its operands."""

Join = Callable[[M, M], M]
"""The fact of a value that is one or the other. Repeated joins must reach a fixed point."""


def forward(program: Program, given: Iterable[M], rule: FlowRule[M], nothing: M) -> dict[int, M]:
    """Propagate facts forwards through a program; returns the fact of every numbered value.

    Args:
      program: the program.
      given: of its inputs.
      rule: called with each equation in order.
      nothing: what is known of constants.
    """
    table = dict(zip(program.inputs, given, strict=True))
    for equation in program.equations:
        operands = [entry_of(atom, table, nothing) for atom in equation.inputs]
        table.update(zip(equation.outputs, rule(equation, operands), strict=True))
    return table


def results(program: Program, given: Iterable[M], rule: FlowRule[M], nothing: M) -> list[M]:
    """The facts of a program's results; see `forward`."""
    table = forward(program, given, rule, nothing)
    return [entry_of(atom, table, nothing) for atom in program.outputs]


def through(equation: Equation, operands: list[M], rule: FlowRule[M], join: Join[M], nothing: M) -> list[M] | None:
    """Propagate facts through an equation's inner programs: calls, branches, and loops until the carry's facts are stable.

    Args:
      equation: any.
      operands: what is known of what it reads.
      rule: for the equations inside, which may be called with each of them several times.
      join: of what branches or trips say.
      nothing: of constants.

    Returns:
      What is known of its results; None: it has no inner program, or one of which it is not known what it is for. What a
      condition or an index depends on is joined into everything that depends on it.
    """
    if equation.called is not None:
        return results(equation.called, operands, rule, nothing)
    if (scan := equation.op.scan) is not None:
        consts, rest = operands[: scan.num_consts], operands[scan.num_consts :]
        return _trips(equation.body, consts, rest, scan.num_carry, rule, join, nothing)
    if equation.op.loop is not None:
        return _while(equation, operands, rule, join, nothing)
    if equation.branches:
        index, *given = operands
        cases = [results(branch, given, rule, nothing) for branch in equation.branches]
        return [_all(join, [index, *each]) for each in zip(*cases, strict=True)]
    return None


def _trips(
    body: Any, consts: list[M], rest: list[M], num_carry: int, rule: FlowRule[M], join: Join[M], nothing: M
) -> list[M]:
    while True:
        made = results(body, [*consts, *rest], rule, nothing)
        carry = [join(old, new) for old, new in zip(rest[:num_carry], made[:num_carry], strict=True)]
        if carry == rest[:num_carry]:
            return [*carry, *made[num_carry:]]
        rest = [*carry, *rest[num_carry:]]


def _while(equation: Equation, operands: list[M], rule: FlowRule[M], join: Join[M], nothing: M) -> list[M]:
    loop = equation.op.loop
    assert loop is not None and equation.condition is not None
    split = loop.num_condition_consts, loop.num_condition_consts + loop.num_body_consts
    of_condition, consts, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
    while True:
        made = _trips(equation.body, consts, carry, len(carry), rule, join, nothing)
        (ends,) = results(equation.condition, [*of_condition, *made], rule, nothing)
        grown = [join(each, ends) for each in made]
        if grown == carry:
            return grown
        carry = grown


def _all(join: Join[M], known: Sequence[M]) -> M:
    first, *others = known
    for other in others:
        first = join(first, other)
    return first


def with_gradient(program: Program, start: Iterable[int]) -> frozenset[int]:
    """Returns the floating values that depend on the given inputs, and these inputs."""
    given = frozenset(start)
    floats = lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact)
    known = [number in given and floats(program.avals[number]) for number in program.inputs]
    rule = lambda equation, operands: [any(operands) and floats(aval) for aval in equation.op.made]
    return frozenset(number for number, does in forward(program, known, rule, False).items() if does)


def made_by(equations: Sequence[Equation], wanted: Iterable[Atom], given: Container[int] = ()) -> list[Equation]:
    """The equations, in order, needed to make the wanted values from the `given` ones."""
    needed, found = {number for number in names_of(wanted) if number not in given}, []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outputs):
            found.append(equation)
            needed.update(number for number in equation.read if number not in given)
    return found[::-1]


def reached(program: Program, wanted: Sequence[Atom]) -> set[int]:
    """The numbers of all values on which the wanted ones depend by a way without `stop_gradient`."""
    made = made_by([equation for equation in program.equations if equation.name != "stop_gradient"], wanted)
    return {number for equation in made for number in equation.read}.union(names_of(wanted))


def reads(program: Program) -> Mapping[int, int]:
    """Counts how often each value is read, by equations and as a result; results count once."""
    counts: dict[int, int] = dict.fromkeys(names_of(program.outputs), 1)
    for equation in program.equations:
        for number in equation.read:
            counts[number] = counts.get(number, 0) + 1
    return counts


# --------------------------------------------------------------------------------------------------
# What is known of JAX's primitives: the library's one table of them.
#
# A primitive without a rule is opaque: its results are kept for the backward, it is not done twice, no program is cut
# through it, and nothing is known of the dims of its results. That is always right; a rule makes programs smaller or
# proves more.
# --------------------------------------------------------------------------------------------------

Kind = typing.Literal[
    "elementwise", "placing", "selecting", "random", "heavy", "call", "branch", "loop", "collective", "opaque"
]


@dataclass(frozen=True)
class Rule:
    """The rule of a primitive: its kind, and how dims and values pass through it.

    Attributes:
      kind: "elementwise": every element of its result is made of the like elements of its operands; "placing": it copies or
        moves elements; "selecting": it goes over its operands once, as slices, lookups and sums do; "random": it makes random
        bits of keys; "heavy": products, sorts, factorizations; "call", "branch", "loop": what its inner programs do;
        "collective": ranks exchange values, or a rank learns its index; "opaque": nothing is known.
      compares: it is a comparison.
      costly: it is a long series for each element, and its results are kept.
      casts: it changes JAX's varying type of a value, names mesh axes, and sends nothing.
      total: how it joins the elements that it reduces: "sum", "max" or "min"; "" for all others.
      passes: each of its results is the operand in the same place.
      sends: of a collective, what it does (a kind of `ledger.Collective`) and how it reduces; None: it sends nothing.
      follow: how dims of results follow those of operands (`program/program.py`); None: not known.
    """

    kind: Kind
    compares: bool = False
    costly: bool = False
    casts: bool = False
    total: str = ""
    passes: bool = False
    sends: tuple[str, str] | None = None
    follow: Follow | None = None

    @property
    def joins(self) -> bool:
        """Whether the primitive is a collective whose result is the same on all ranks of its axes."""
        return self.sends is not None and self.sends[0] in ("all_reduce", "all_gather")


OPAQUE = Rule("opaque")

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz complex conj
convert_element_type copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma
log log1p log2 logistic max min mul mulhi neg nextafter not one_minus_square or population_count pow real
reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
square stop_gradient sub tan tanh xor
"""
_SERIES = "bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma polynomial regularized_incomplete_beta zeta"
_COMPARING = "eq eq_to ge gt le le_to lt lt_to ne"
_PLACING = "broadcast_in_dim concatenate iota name reshape rev split squeeze stack tile transpose unstack"
_SELECTING = """
argmax argmin cumlogsumexp cummax cummin cumprod cumsum device_put dynamic_slice dynamic_update_slice gather
layout_constraint pad reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
reduce_window_max reduce_window_min reduce_window_sum reduce_xor reshard scatter scatter-add scatter-max scatter-min
scatter-mul scatter-sub select_and_gather_add select_and_scatter select_and_scatter_add sharding_constraint slice
with_memory_space_constraint
"""
_RANDOM = """
iota_2x32_shape philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma random_seed random_split
random_unwrap random_wrap rng_bit_generator threefry2x32 threefry4x32
"""
_HEAVY = """
approx_top_k cholesky conv_general_dilated dot_general eig eigh fft geqrf hessenberg householder_product lu
lu_pivots_to_permutation qr ragged_dot_general scaled_dot schur sort svd top_k triangular_solve tridiagonal_solve
"""
_CALLS = "closed_call custom_jvp_call custom_vjp_call jit remat2"

_TOTALS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min"}

_SENDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), ("all_reduce", "sum")),
    **dict.fromkeys(("pmax", "unreduced_pmax"), ("all_reduce", "max")),
    **dict.fromkeys(("pmin", "unreduced_pmin"), ("all_reduce", "min")),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), ("all_gather", "")),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), ("reduce_scatter", "sum")),
    "all_to_all": ("all_to_all", ""),
    "ragged_all_to_all": ("ragged_all_to_all", ""),
    "ppermute": ("permute", ""),
    **dict.fromkeys(("pbroadcast", "pbroadcast_dynamic"), ("broadcast", "")),
}


def _table() -> Iterable[tuple[str, Rule]]:
    for name in _ELEMENTWISE.split():
        yield name, Rule("elementwise", follow=same)
    for name in _SERIES.split():
        yield name, Rule("elementwise", costly=True, follow=same)
    for name in _COMPARING.split():
        yield name, Rule("elementwise", compares=True, follow=same)
    for name in CASTS:
        yield name, Rule("elementwise", casts=True, follow=same)
    kinds: Mapping[Kind, str] = {
        "placing": _PLACING,
        "selecting": _SELECTING,
        "random": _RANDOM,
        "heavy": _HEAVY,
        "call": _CALLS,
        "branch": "cond",
        "loop": "scan while",
    }
    for kind, names in kinds.items():
        for name in names.split():
            yield name, Rule(kind, total=_TOTALS.get(name, ""), follow=DIMS.get(name))
    for name, sends in _SENDS.items():
        yield name, Rule("collective", sends=sends)
    yield "axis_index", Rule("collective")
    yield BARRIER, Rule("selecting", passes=True)
    yield WAITING, Rule("selecting")


RULES: Mapping[str, Rule] = dict(_table())
"""By the primitive's name; names of all supported versions of JAX stand beside each other."""

ELEMENTWISE = frozenset(name for name, rule in RULES.items() if rule.kind == "elementwise")
"""Primitives that treat every element alike."""


def rule_of(name: str) -> Rule:
    """The rule of a primitive; asynchronous collectives have that of the collective, and what waits for one passes it on."""
    if (found := RULES.get(name)) is not None:
        return found
    base, done = RULES.get(name.removesuffix("_start")), RULES.get(name.removesuffix("_done"))
    if done is not None and done.sends is not None:
        return replace(done, sends=None, passes=True)
    return base if base is not None and base.sends is not None else OPAQUE


def is_elementwise(name: str) -> bool:
    """Whether a primitive acts on every element alike."""
    return name in ELEMENTWISE


def is_redone(name: str) -> bool:
    """Whether a primitive is cheap enough to recompute rather than keep: elementwise or placing, and not costly."""
    rule = rule_of(name)
    return rule.kind in ("elementwise", "placing") and not rule.costly


def is_light(op: Operation) -> bool:
    """Whether repeating an operation costs next to nothing: one pass over its operands, no random bits, no effects."""
    return rule_of(op.name).kind in ("elementwise", "placing", "selecting") and not op.has_effects


def is_repeatable(equation: Equation) -> bool:
    """Whether each of several ranks may repeat an equation: it, and all that it calls, is light or makes random bits."""
    kind = rule_of(equation.name).kind
    if equation.op.has_effects:
        return False
    if kind in ("call", "branch"):
        return all(is_repeatable(inner) for body in equation.bodies for inner in body.equations)
    return kind == "random" or is_light(equation.op)


def follow(op: Operation, k: int, dim: int, parts: int) -> int | None:
    """The dim of every result that corresponds to `dim` of operand k, split into `parts`; None if there is none."""
    rule = rule_of(op.name)
    return None if rule.follow is None else rule.follow(op, k, dim, parts)


# --------------------------------------------------------------------------------------------------
# Running a program equation by equation; whoever runs it may do something else in the place of some equations.
# --------------------------------------------------------------------------------------------------

At = Callable[[Equation, list[Any]], Sequence[Any] | None]
"""`at(equation, operands) -> results`: what is done in an equation's place; None: the equation is run."""

RunBody = Callable[[Program, Sequence[Any]], Sequence[Any]]
"""`run_body(program, values) -> results`."""


def run_program(program: Program, values: Sequence[Any], at: At | None = None) -> list[Any]:
    """Run a program on `values`; returns its results.

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
    """Run equations in the environment `env`, adding their results to it."""
    for equation in equations:
        operands = values_of(equation.inputs, env)
        made = at(equation, operands) if at is not None else None
        if made is None:
            made = equation.op.bind(operands)
        env.update(zip(equation.outputs, made, strict=True))


def run_traced(
    fun: Callable[..., PyTree], run_body: RunBody, *args: PyTree, read: Callable[[Any], Program] = read_program
) -> PyTree:
    """Call `fun(*args)` by tracing it and running the traced program by `run_body`.

    Args:
      fun: returns a pytree; leaves that are no arrays are handed through.
      run_body: runs the program of `fun` on the leaves of `args`.
      *args: pytrees of arrays.
      read: the program of a traced function.
    """
    leaves, treedef = jax.tree.flatten(args)
    arrays_of = ArraysOf(lambda *leaves: fun(*treedef.unflatten(leaves)))
    return arrays_of.restored(run_body(read(trace(arrays_of, *leaves).jaxpr), leaves))


class ArraysOf:
    """Wraps a function for a trace: it returns the arrays among its results, and keeps the other leaves aside."""

    def __init__(self, fun: Callable[..., PyTree]):
        self._fun, self._treedef, self._others = fun, None, []

    def __call__(self, *args: Any) -> list[jax.Array]:
        """The arrays of `fun(*args)`, flat."""
        leaves, self._treedef = jax.tree.flatten(self._fun(*args))
        self._others = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def restored(self, arrays: Iterable[Any]) -> PyTree:
        """Rebuild what `fun` returned in its last call, with these arrays instead of its own."""
        assert self._treedef is not None, "the function was not traced"
        own = iter(arrays)
        return self._treedef.unflatten([next(own) if leaf is None else leaf for leaf in self._others])


def run_bodies(equation: Equation, values: Sequence[Any], run_body: RunBody) -> list[Any] | None:
    """Run a loop, conditional, plain call or checkpointed call with its bodies run by `run_body`.

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
            return while_loop(
                _known(equation.condition),
                lambda carry: run_body(_known(equation.condition), [*of_condition, *carry])[0],
                lambda carry: list(run_body(_known(equation.body), [*consts, *carry])),
                list(values[split[1] :]),
            )
    return None


def ends_by_rows(condition: Program) -> int:
    """How many dims the rows have of which each ends a while loop for itself, as under `jax.vmap`; 0: all end together."""
    return len(aval_of(condition.outputs[0], condition.avals).shape)


def while_loop(
    condition: Program,
    goes_on: Callable[[list[Any]], Any],
    trip: Callable[[list[Any]], list[Any]],
    carry: list[Any],
    together: Callable[[Any], Any] = lambda more: more,
) -> list[Any]:
    """Makes a traced while loop anew; rows of one that ends row by row stay as they are once they have ended.

    Args:
      condition: the traced condition.
      goes_on, trip: what is run in the place of condition and body.
      carry: the loop's first values.
      together: makes of whether the loop goes on here whether it does so everywhere.
    """
    if not ends_by_rows(condition):
        return list(jax.lax.while_loop(lambda carry: together(goes_on(carry)), trip, carry))

    def trip_of_some(carry: list[Any]) -> list[Any]:
        more = goes_on(carry)
        rows = lambda x: jnp.broadcast_to(more.reshape(more.shape + (1,) * (x.ndim - more.ndim)), x.shape)
        return [jax.lax.select(rows(old), new, old) for new, old in zip(trip(carry), carry, strict=True)]

    return list(jax.lax.while_loop(lambda carry: together(goes_on(carry).any()), trip_of_some, carry))


def _run_checkpointed(equation: Equation, values: Sequence[Any], run_body: RunBody) -> list[Any]:
    """Run a call under `jax.checkpoint` with another body; a backward's keeps its barrier."""
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
