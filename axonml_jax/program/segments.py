"""Cutting a traced loss into consecutive segments, so that each reads the weights of one unit (a block of the model).

Flax modules are never touched: units are groups of weights, and where a unit begins and ends is seen in the traced
program. A weight belongs to the segment between its unit's first and last use; a scan over stacked weights is a segment
of its own whose unit is one slice. Weights used far apart (a tied embedding) span segments and stay whole in between.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.jaxpr import trace
from axonml_jax.program.atoms import entry_of, names_of
from axonml_jax.program.dataflow import reads, with_gradient
from axonml_jax.program.prelude import Marks, mark, prelude_of
from axonml_jax.program.program import Equation, Program, read_program


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

    @property
    def spanning(self) -> frozenset[int]:
        """The weights that stay whole from their first segment to their last, because other units lie between."""
        return frozenset(weight for weight in self.first if self.first[weight] != self.last[weight])


def cut(
    fun: Callable,
    weights: Sequence[jax.Array],
    args: tuple,
    *,
    units: Callable[[], Iterable[Sequence[int]]],
    trained: int,
    sliceable: Collection[int],
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
    """

    def results(weights: Sequence[jax.Array], *args):
        given = {
            id(weight) for weight in weights
        }  # a weight that is returned is read by a last equation like any other
        return jax.tree.map(lambda x: jnp.copy(x) if id(x) in given else x, fun(weights, *args))

    traced = trace(results, list(weights), *args)
    program = read_program(traced.jaxpr)
    marks = mark(program, {number: i for i, number in enumerate(program.inputs[: len(weights)])})
    scanned = _scanned(program, marks, sliceable)
    pieces = _pieces(marks, scanned, units())
    segments = _segments(program, marks, scanned, pieces)
    first, last = {}, {}
    for i, segment in enumerate(segments):
        for weight in segment.weights:
            first.setdefault(weight, i)
            last[weight] = i
    varied = with_gradient(program, program.inputs[:trained])
    return Cut(program, len(weights), tuple(segments), first, last, varied, traced.out_tree)


def _scanned(program: Program, marks: Marks, sliceable: Collection[int]) -> dict[int, dict[int, int]]:
    """For every scan the weights that are scanned over there and read nowhere else: operand position -> weight."""
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
    """The work in runs of equations: one per scan over weights, one per unit that overlaps no other, and the rest."""
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
