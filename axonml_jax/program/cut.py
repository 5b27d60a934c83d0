"""Cuts a program into a prelude, segments, hooks that collect gradients, and what is recomputed."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from axonml_jax.base import PyTree
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import Saveable
from axonml_jax.program.program import (
    Equation,
    Program,
    among,
    entry_of,
    is_light,
    is_redone,
    made_by,
    names_of,
    read_program,
    reads,
    results_of,
    rule_of,
    run,
    with_gradient,
)

# --------------------------------------------------------------------------------------------------
# Which equations of a program only prepare weights (casts, reshapes, masks): they are run again where they are needed.
#
# A cast weight that lay among the residuals of a backward pass would be a whole copy of it, kept for nothing.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """A program's equations sorted into weights, what is derived from them, and work.

    Attributes:
      weights: number -> weight, for the weights themselves.
      made_of: for weights, and for what light equations make of weights and literals alone, the weights in it.
      work: positions of all other equations.
      used: for each of these the weights in what it reads.
    """

    weights: Mapping[int, int]
    made_of: Mapping[int, frozenset[int]]
    work: tuple[int, ...]
    used: Mapping[int, frozenset[int]]


def mark(program: Program, weights: Mapping[int, int]) -> Marks:
    """Separate the work of a program from the preparation of its weights (given as number -> weight)."""
    made_of = {number: frozenset((weight,)) for number, weight in weights.items()}
    results, work = set(names_of(program.outputs)), []
    for position, equation in enumerate(program.equations):
        prepares = is_light(equation.op) and all(number in made_of for number in equation.read)
        if prepares and not results.intersection(equation.outputs):
            made = frozenset().union(*(made_of[number] for number in equation.read))
            made_of |= dict.fromkeys(equation.outputs, made)
        else:
            work.append(position)
    used = {p: frozenset().union(*(made_of[n] for n in program.equations[p].read if n in made_of)) for p in work}
    return Marks(dict(weights), made_of, tuple(work), used)


def prelude_of(program: Program, derived: Iterable[int], marks: Marks) -> tuple[Equation, ...]:
    """The light equations that make `derived` from the weights, in order."""
    return tuple(made_by(program.equations, derived, marks.weights))


# --------------------------------------------------------------------------------------------------
# What a recomputing backward keeps of a forward: whatever is not elementwise or merely placed; it makes the rest again.
# --------------------------------------------------------------------------------------------------

PRODUCTS = "axonml.products"
"""The name by which a checkpoint policy knows results of weight multiplications."""

PARTS, PRODUCT_PARTS = "axonml.parts", "axonml.products.parts"
"""The names by which a checkpoint policy knows the real and imaginary parts of complex results, and of products among them."""

KEPT = "axonml.kept"
"""The name of what is kept whatever made it: a loop's results, of which JAX would else keep every trip's products instead."""

LITTLE = 16
"""A slice that takes at most one in so many of an array's elements is kept in the array's place."""


def all_but_elementwise(result: Saveable) -> bool:
    """The policy (see `SaveWhere`) that keeps every result for the backward except elementwise ones and moved data.

    Products, sums, random bits, lookups and collectives are never done twice. Comparisons of floats are kept, a byte each:
    dropout's mask instead of the bits it is made of. So is a small slice of a large array (`LITTLE`): the one column that
    counts of the 128 that an attention kernel writes. Of complex results the parts are kept, where they are named. A call is
    kept for what it calls: that which only marks how its operand is differentiated is made again.
    """
    if result.body is not None:
        return any(map(all_but_elementwise, result.body))
    name, avals, params = result.primitive, result.operands, result.params
    if result.given_name is not None:
        return result.given_name in (PARTS, PRODUCT_PARTS, KEPT)
    if name in ("slice", "dynamic_slice"):
        taken = params.get("slice_sizes") or np.subtract(params["limit_indices"], params["start_indices"])
        return math.prod(map(int, taken)) * LITTLE <= avals[0].size
    if rule_of(name).compares:
        return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)
    return not is_redone(name) and name != "axis_index" and not _complex(result)


def sums(result: Saveable) -> bool:
    """The policy that keeps sums over ranks, as every policy does: no backward should repeat the forward's communication.

    A sum is as large as one activation. A gathered value is as many times its shard as there are ranks, and is gathered again.
    """
    return any(map(is_sum, result.made_by))


def is_sum(name: str) -> bool:
    """Whether an operation sums over ranks."""
    sends = rule_of(name).sends
    return sends is not None and sends[0] in ("all_reduce", "reduce_scatter")


def products_and_sums(result: Saveable) -> bool:
    """The policy that recomputes all but the results of weight products, which `run_named` names, and sums over ranks."""
    return sums(result) or result.given_name in (PRODUCTS, PRODUCT_PARTS)


def run_named(
    equations: Iterable[Equation], env: MutableMapping[int, Any], names: Mapping[int, str] = MappingProxyType({})
) -> None:
    """Run equations, naming results that a checkpoint policy may keep: those in `names`; if it is empty, weight products.

    Without `names` all complex results that are not elementwise are named too, by their real and imaginary parts:
    `jax.checkpoint` passes what it keeps through `reduce_precision`, which complex numbers do not have.
    """
    run(equations, env, partial(_named_results, names))


def _named_results(names: Mapping[int, str], equation: Equation, operands: Sequence[Any]) -> Sequence[Any] | None:
    op = equation.op
    if names:
        own = [names.get(number) for number in equation.outputs]
        made = op.bind(operands) if any(own) else None
        return made and [named(value, name) if name else value for value, name in zip(made, own, strict=True)]
    weighs = op.name == "conv_general_dilated" or (op.name == "dot_general" and not any(op.contraction.batched))
    if not is_redone(op.name) and any(
        jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in (*op.given, *op.made)
    ):
        name = PRODUCT_PARTS if weighs else PARTS
    elif weighs:
        name = PRODUCTS
    else:
        return None
    return [named(value, name) for value in op.bind(operands)]


def named(value: Any, name: str) -> Any:
    """Name a value for checkpoint policies; of a complex one its real and imaginary parts."""
    if not jnp.iscomplexobj(value):
        return checkpoint_name(value, name)
    return jax.lax.complex(checkpoint_name(value.real, name), checkpoint_name(value.imag, name))


def _complex(result: Saveable) -> bool:
    """Whether an operation may have complex results."""
    if result.primitive == "fft":
        return result.fft_type != jax.lax.FftType.IRFFT
    return result.primitive == "eig" or any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in result.operands)


# --------------------------------------------------------------------------------------------------
# Put hooks on a function's inputs where they are first used, instead of at its top.
#
# A hook is an identity with a gradient rule. JAX runs the backward in the reverse order of the forward, so a hook at
# the top of a loss runs after the whole backward; one sunk to the first use of its inputs runs as soon as their
# gradients are complete. An input that is only scanned over is hooked in the scan's body, slice by slice.
# --------------------------------------------------------------------------------------------------

Grouping = Callable[[Sequence[int], Sequence[Any]], Sequence[Sequence[int]]]
"""`group(indices, values)`: which of some inputs, given in the order in which their gradients become ready, share a hook:
groups of positions in what was given. `values` have the shapes read at this level (slices in a scan's body)."""

Sliceable = Callable[[int, int], bool]

Hook = Callable[[Sequence[int], Sequence[Any], Sequence[Any]], Sequence[Any]]
"""`hook(indices, inputs, extras) -> values`: what the function reads in the place of these inputs."""


@dataclass
class _Level:
    """One level at which inputs are hooked: the program itself, or the body of a scan.

    Attributes:
      program: the program or body; calls that read hooked inputs are opened.
      hooked: number -> the input that it is.
      first_use: input -> the equation that reads it first; None: only the end does.
      scans: those with inputs that are hooked in their bodies.
    """

    program: Program
    hooked: Mapping[int, int]
    first_use: dict[int, Equation | None] = field(default_factory=dict)
    scans: dict[Equation, "_Scanned"] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scanned:
    """The inputs that are hooked in a scan's body, by their positions among its operands; and the body."""

    inputs: Mapping[int, int]
    body: _Level


def sink(
    fun: Callable[..., PyTree],
    read: PyTree,
    args: tuple,
    *,
    group: Grouping,
    hook: Hook,
    sliceable: Sliceable = lambda leaf, depth: True,
) -> Callable[..., PyTree]:
    """Trace `fun(read, *args)`; returns a function of (inputs, extras, *args) that hooks each input at its first use.

    Args:
      fun: a function of a pytree of arrays and anything else.
      read: the arrays `fun` reads, as the hooks will give them (dtypes and varying types count, values do not); inputs and
        extras are lists in their order.
      args: the other arguments.
      group: which inputs share a hook, decided at each level separately.
      hook: called once per group while the returned function is traced. `inputs` may differ from `read` in shape, dtype
        and in what they vary over; `extras` (a tree per input, None allowed) are handed through, sliced where inputs are.
      sliceable: `sliceable(input, depth)`: whether slices of an input (along its first `depth` dims) may be hooked in the
        body of a scan; others are hooked whole, before it.

    Returns:
      The function; an input that is never used is never hooked.
    """
    traced, leaves = trace(fun, read, *args), jax.tree.leaves(read)
    level = _level(traced.jaxpr, {i: i for i in range(len(leaves))}, sliceable, 0)

    def hooked(inputs, extras, *args):
        pending = _Pending(level, list(inputs), list(extras), leaves, group, hook)
        values = [*map(_Input, range(len(leaves))), *jax.tree.leaves(args)]
        return traced.out_tree.unflatten(_run(level, values, pending))

    return hooked


def _level(jaxpr: Any, hooked: Mapping[int, int], sliceable: Sliceable, depth: int) -> _Level:
    program = read_program(
        jaxpr, lambda op, inputs: op.called is not None and any(among(atom, hooked) for atom in inputs)
    )
    level, counts = _Level(program, hooked), reads(program)
    for equation in program.equations:
        used = {k: hooked[atom] for k, atom in enumerate(equation.inputs) if among(atom, hooked)}
        if (scan := equation.op.scan) is not None and used:
            alone = {k: i for k, i in used.items() if k >= scan.first_scanned and counts[equation.inputs[k]] == 1}
            scanned = {k: i for k, i in alone.items() if sliceable(i, depth + 1)}
            if scanned:
                level.scans[equation] = _Scanned(scanned, _level(scan.body, scanned, sliceable, depth + 1))
            used = {k: i for k, i in used.items() if k not in scanned}
        for i in used.values():
            level.first_use.setdefault(i, equation)
    for number in names_of(program.outputs):
        if number in hooked:
            level.first_use.setdefault(hooked[number], None)
    return level


@dataclass(frozen=True)
class _Input:
    """Stands for a hooked input in the environment until it is read."""

    index: int


class _Pending:
    """The inputs of one level: unchanged up to the place of their group's hook, then what the hook returned."""

    def __init__(self, level: _Level, inputs, extras, read, group: Grouping, hook: Hook):
        self.inputs, self.extras, self.group, self.hook = inputs, extras, group, hook
        self.values: dict[int, Any] = {}
        self.due: dict[Equation | None, list[list[int]]] = {}
        order = list(level.first_use)
        ready = order[::-1]
        for positions in group(ready, [read[i] for i in ready]) if ready else ():
            members = sorted((ready[k] for k in positions), key=order.index)
            self.due.setdefault(level.first_use[members[0]], []).append(members)

    def reach(self, place: Equation | None) -> None:
        for members in self.due.pop(place, ()):
            values = self.hook(members, [self.inputs[i] for i in members], [self.extras[i] for i in members])
            self.values.update(zip(members, values, strict=True))

    def read(self, value):
        return self.values[value.index] if isinstance(value, _Input) else value


def _run(level: _Level, values: Sequence[Any], pending: _Pending) -> list[Any]:
    def at(equation: Equation, operands: list[Any]) -> Sequence[Any]:
        if equation in pending.due:
            with equation.op.scope():
                pending.reach(equation)
        if equation in level.scans:
            return _run_scan(equation, level.scans[equation], operands, pending)
        return equation.op.bind([pending.read(value) for value in operands])

    program = level.program
    env = dict(program.constants)
    env.update(zip(program.inputs, values, strict=True))
    run(program.equations, env, at)
    pending.reach(None)
    return [pending.read(value) for value in results_of(program.outputs, env)]


def _run_scan(equation: Equation, scanned: _Scanned, operands: list[Any], outer: _Pending) -> list[Any]:
    scan, level, own = equation.op.scan, scanned.body, scanned.inputs
    assert scan is not None
    operands = [outer.inputs[own[k]] if k in own else outer.read(value) for k, value in enumerate(operands)]
    consts, carry = operands[: scan.num_consts], operands[scan.num_consts : scan.first_scanned]
    xs = operands[scan.first_scanned :]
    read = {i: level.program.avals[k] for k, i in own.items()}

    def step(carry, slices):
        xs, extras = slices
        values = [*consts, *carry, *xs]
        pending = _Pending(level, {i: values[k] for k, i in own.items()}, extras, read, outer.group, outer.hook)
        for k, i in own.items():
            values[k] = _Input(i)
        results = _run(level, values, pending)
        return results[: scan.num_carry], results[scan.num_carry :]

    extras = {i: outer.extras[i] for i in own.values()}
    with equation.op.scope():
        carry, ys = jax.lax.scan(step, carry, (xs, extras), **scan.options)
    return [*carry, *ys]


# --------------------------------------------------------------------------------------------------
# Cutting a traced loss into consecutive segments, so that each reads the weights of one unit (a block of the model).
#
# Flax modules are never touched: units are groups of weights, and where a unit begins and ends is seen in the traced
# program. A weight belongs to the segment between its unit's first and last use; a scan over stacked weights is a
# segment of its own whose unit is one slice. Weights used far apart (a tied embedding) span segments and stay whole in
# between.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """Consecutive equations and what flows in and out of them.

    Attributes:
      equations: the work.
      prelude: equations that see only weights (casts, reshapes): run again wherever their results are read.
      weights: positions of the weights it reads whole.
      derived: numbers of weights, and of what the prelude makes of them, that the equations read.
      inputs, outputs: numbers of the other values it reads, and of what later segments or the program's end read.
      scanned: for a scan over stacked weights: operand position -> position of the weight; else empty.
    """

    equations: tuple[Equation, ...]
    prelude: tuple[Equation, ...]
    weights: tuple[int, ...]
    derived: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scanned: Mapping[int, int]


@dataclass(frozen=True)
class Cut:
    """A program of weights and arguments as segments.

    Attributes:
      program: the whole; its first inputs are the weights.
      num_weights: how many.
      segments: in order; together all the work.
      first, last: for every weight that is read whole the first and the last segment that reads it.
      varied: numbers of floating values that depend on a trained weight: those with a gradient.
      out_tree: the structure of the results.
    """

    program: Program
    num_weights: int
    segments: tuple[Segment, ...]
    first: Mapping[int, int]
    last: Mapping[int, int]
    varied: frozenset[int]
    out_tree: Any


def cut(
    fun: Callable,
    weights: Sequence[jax.Array],
    args: tuple,
    *,
    units: Callable[[], Iterable[Sequence[int]]],
    trained: int,
    sliceable: Collection[int],
    narrow: bool = False,
) -> Cut:
    """Trace `fun(weights, *args)` and cut it.

    Args:
      fun: a function of a list of weights and anything else.
      weights: arrays or tracers as `fun` reads them.
      args: its other arguments.
      units: gives, after the trace, groups of weights (positions) that are used together, such as a block's; the others
        find their own place.
      trained: how many of the first weights are differentiated; the rest are frozen.
      sliceable: the weights of which a scan may read one slice at a time.
      narrow: end a unit where least is handed on, as recomputation wants it; else where the next one reads weights.
    """

    def results(weights: Sequence[jax.Array], *args):
        # A weight that is returned is read by a last equation like any other.
        given = {id(weight) for weight in weights}
        return jax.tree.map(lambda x: jnp.copy(x) if id(x) in given else x, fun(weights, *args))

    traced = trace(results, list(weights), *args)
    program = read_program(traced.jaxpr)
    marks = mark(program, {number: i for i, number in enumerate(program.inputs[: len(weights)])})
    scanned = _scanned(program, marks, sliceable)
    pieces = _pieces(marks, scanned, units())
    if narrow:
        _narrow(program, marks, scanned, pieces)
    segments = _segments(program, marks, scanned, pieces)
    first, last = {}, {}
    for i, segment in enumerate(segments):
        for weight in segment.weights:
            first.setdefault(weight, i)
            last[weight] = i
    varied = with_gradient(program, program.inputs[:trained])
    return Cut(program, len(weights), tuple(segments), first, last, varied, traced.out_tree)


def segments_of(program: Program, marks: Marks, units: Iterable[Sequence[int]]) -> list[Segment]:
    """Split the work of a program into segments that hand on few bytes (see `cut`); all weights are read unsliced."""
    pieces = _pieces(marks, {}, units)
    _narrow(program, marks, {}, pieces)
    if len(pieces) > 1 and not any(marks.used[position] for position in pieces[0]):
        pieces[:2] = [pieces[0] + pieces[1]]  # a norm of what is received, up to its weight
    return _segments(program, marks, {}, pieces)


def _scanned(program: Program, marks: Marks, sliceable: Collection[int]) -> dict[int, dict[int, int]]:
    """Map every scan to the weights that are scanned over in it and read nowhere else: operand position -> weight."""
    counts, found = reads(program), {}
    for position in marks.work:
        equation = program.equations[position]
        if (scan := equation.op.scan) is None:
            continue
        alone = {k: n for k, n in enumerate(equation.inputs) if k >= scan.first_scanned and entry_of(n, counts, 0) == 1}
        weights = {k: marks.weights[number] for k, number in alone.items() if number in marks.weights}
        own = {k: weight for k, weight in weights.items() if weight in sliceable}
        if own:
            found[position] = own
    return found


def _pieces(marks: Marks, scanned: Mapping, units: Iterable[Sequence[int]]) -> list[list[int]]:
    """Split the work into runs of equations: one per scan over weights, one per unit that overlaps no other, and the rest."""
    span: dict[int, list[int]] = {}
    for position in marks.work:
        for weight in marks.used[position] - set(scanned.get(position, {}).values()):
            span.setdefault(weight, [position, position])[1] = position
    chosen = {position: position for position in scanned}
    wanted = [[span[weight] for weight in unit if weight in span] for unit in units]
    intervals = [(min(a for a, _ in spans), max(b for _, b in spans)) for spans in wanted if spans]
    for a, b in sorted(intervals, key=lambda interval: interval[1] - interval[0]):
        if all(b < start or end < a for start, end in chosen.items()):
            chosen[a] = b
    pieces: list[list[int]] = []
    end, between = -1, True
    for position in marks.work:
        # Work without weights after a unit stays with it: a segment of its own would only add a boundary.
        leaves = position > end and not between and (marks.used[position] or end in scanned)
        if position in chosen:
            end, between = chosen[position], False
            pieces.append([])
        elif leaves or not pieces:
            between = True
            pieces.append([])
        pieces[-1].append(position)
    return pieces


def _narrow(program: Program, marks: Marks, scanned: Mapping, pieces: list[list[int]]) -> None:
    """Move the ends of pieces, in place, to where the fewest bytes are handed on, among places after their last weight.

    What follows a block's last weight may be the beginning of the next block: a norm up to its weight. With the block it would
    have to be made again from the block's last product.
    """
    order = {position: i for i, position in enumerate(marks.work)}
    last_read = dict.fromkeys(names_of(program.outputs), len(order))
    for position, i in order.items():
        for number in program.equations[position].read:
            last_read[number] = max(last_read.get(number, -1), i)

    def handed(piece: Sequence[int]) -> list[int]:
        """Bytes that are made in a piece and read later, if it ends after each of its equations."""
        live, ends, sizes = 0, {}, []
        for position in piece:
            for number in program.equations[position].outputs:
                size, end = program.avals[number], last_read.get(number, -1)
                size = size.size * size.dtype.itemsize
                if end > order[position]:
                    live, ends[end] = live + size, ends.get(end, 0) + size
            live -= ends.pop(order[position], 0)
            sizes.append(live)
        return sizes

    for piece, after in pairwise(pieces):
        weighs = [i for i, position in enumerate(piece) if marks.used[position]]
        if piece[0] in scanned or after[0] in scanned or not weighs:
            continue
        sizes = handed(piece)
        end = min(range(weighs[-1], len(piece)), key=sizes.__getitem__) + 1
        after[:0], piece[end:] = piece[end:], []


def _segments(program: Program, marks: Marks, scanned: Mapping, pieces: Sequence[Sequence[int]]) -> list[Segment]:
    equations, last_read = program.equations, dict.fromkeys(names_of(program.outputs), len(pieces))
    for i, piece in enumerate(pieces):
        for number in (number for position in piece for number in equations[position].read):
            last_read[number] = max(last_read.get(number, -1), i)
    segments = []
    for i, piece in enumerate(pieces):
        own = scanned.get(piece[0], {})
        stacked = {equations[piece[0]].inputs[k] for k in own}
        work = tuple(equations[position] for position in piece)
        made = dict.fromkeys(number for equation in work for number in equation.outputs)
        read = dict.fromkeys(number for equation in work for number in equation.read if number not in stacked)
        derived = tuple(number for number in read if number in marks.made_of)
        inputs = tuple(number for number in read if number not in marks.made_of and number not in made)
        weights = frozenset().union(*(marks.made_of[number] for number in derived))
        outputs = tuple(number for number in made if last_read.get(number, -1) > i)
        prelude = prelude_of(program, derived, marks)
        segments.append(Segment(work, prelude, tuple(sorted(weights)), derived, inputs, outputs, own))
    return segments
