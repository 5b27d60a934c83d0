"""An update of arrays that rest in host memory, piece by piece, so that the device holds two pieces at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from axonml_jax.base import PyTree
from axonml_jax.collectives.primitives import vary_like
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.parallel.placement import load, moment, slices
from axonml_jax.parallel.plan import CPUOffload
from axonml_jax.program.program import (
    Equation,
    Program,
    aval_of,
    entry_of,
    is_constant,
    is_elementwise,
    names_of,
    read_program,
    result_of,
    run,
)
from axonml_jax.sharding.layout import movable, to_device_memory, to_host_memory
from axonml_jax.training.compose import Gradients, Metrics, StepTransform, Update
from axonml_jax.training.state import TrainState

# --------------------------------------------------------------------------------------------------
# Whether an update of slices is the slices of an update, seen in the two traced programs.
#
# Stricter than what lets an optimizer see shards (`training/on_shards.py`): a wrong answer there is refused, here it would be
# silent.
# --------------------------------------------------------------------------------------------------


def alike(whole: Program, sliced: Program) -> bool:
    """Tells whether the program `sliced`, traced on slices of some arguments, does to each slice what `whole` does to all.

    Equation by equation: the same operations with the same constants; what meets a slice is another of the same shape or one
    number for all elements; and nothing made without a slice has its shape but one number spread out.
    """
    known, own = list(whole.constants.values()), list(sliced.constants.values())
    if len(whole.equations) != len(sliced.equations) or len(known) != len(own):
        return False
    if not all(one is other or np.array_equal(one, other) for one, other in zip(known, own, strict=True)):
        return False
    marked = {
        n for n, m in zip(sliced.inputs, whole.inputs, strict=True) if sliced.avals[n].shape != whole.avals[m].shape
    }
    uniform: set[int] = set()  # of one number
    for ours, theirs in zip(whole.equations, sliced.equations, strict=True):
        if not _same(ours, theirs):
            return False
        name, shapes = theirs.name, [sliced.avals[number].shape for number in theirs.outputs]
        spread = name == "broadcast_in_dim" and all(not sliced.avals[n].shape or n in uniform for n in theirs.read)
        if not marked.intersection(theirs.read):
            if (is_elementwise(name) and all(n in uniform or not sliced.avals[n].shape for n in theirs.read)) or spread:
                uniform.update(theirs.outputs)
            elif shapes != [whole.avals[number].shape for number in ours.outputs]:
                return False
            continue
        own = [sliced.avals[n].shape for n in theirs.read if n in marked]
        others = [n for n in theirs.read if n not in marked and n not in uniform and sliced.avals[n].shape]
        kept = name == "broadcast_in_dim" and shapes == own
        if not (is_elementwise(name) or kept) or others or {*own, *shapes} != {own[0]}:
            return False
        marked.update(theirs.outputs)
    return True


def _same(ours: Equation, theirs: Equation) -> bool:
    """Whether two equations are the same operation with the same constants, shapes aside."""
    if not ours.op.is_alike(theirs.op) or theirs.op.acts:
        return False
    constants = [[str(atom.val) if is_constant(atom) else None for atom in each.inputs] for each in (ours, theirs)]
    if constants[0] != constants[1]:
        return False
    return ours.name == "broadcast_in_dim" or ours.op.does_the_same(theirs.op) or ours.inputs == theirs.inputs == ()


# --------------------------------------------------------------------------------------------------
# An update of what rests in host memory, piece by piece, so that the device holds two pieces of it at a time.
#
# A piece is a parameter with its gradient and its optimizer state, or several small ones. It is loaded once the piece
# before the last has been stored. A large one is updated slice by slice in a loop where the optimizer treats every
# element alike.
# --------------------------------------------------------------------------------------------------

PIECE = 2**22
"""Bytes up to which leaves are loaded together, and above which a leaf is updated slice by slice."""

AHEAD = 2
"""The number of pieces in flight: a piece is loaded once the piece this many before it has been stored."""

UpdateOfTrees = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
"""(gradients, parameters, optimizer's state) -> (parameters, optimizer's state, anything else), all in device memory."""


@dataclass(frozen=True)
class Streamed(StepTransform):
    """Streams an update: arrays that rest in host memory are loaded, updated and stored piece by piece.

    Attributes:
      offload: what rests there.
      sliced: whether large leaves may be updated slice by slice.
    """

    offload: CPUOffload
    sliced: bool

    def around_update(self, run: Update) -> Update:
        """Runs the update piece by piece."""

        def in_pieces(made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
            def update(grads: PyTree, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree, PyTree]:
                own = replace(before, variables=replace(before.variables, params=params), opt_state=opt_state)
                after, metrics = run(made._replace(grads=grads), own)
                return after.params, after.opt_state, (after.variables.state, after.extras, metrics)

            held = to_host_memory(made.grads, self.offload.gradients), before.params, before.opt_state
            params, opt_state, others = streamed(update, held, self.offload, made.norm, sliced=self.sliced)
            buffers, extras, metrics = others
            variables = replace(before.variables, params=params, state=buffers)
            return replace(before, variables=variables, opt_state=opt_state, extras=extras), metrics

        return in_pieces


class StreamedPiece(NamedTuple):
    """Results that need the same arguments, and are therefore updated together.

    Attributes:
      needed: numbers of these arguments.
      results: positions of the results.
    """

    needed: frozenset[int]
    results: tuple[int, ...]


def streamed(
    update: UpdateOfTrees,
    held: tuple[PyTree, PyTree, PyTree],
    offload: CPUOffload,
    after: jax.Array,
    *,
    sliced: bool = True,
) -> tuple:
    """Runs `update(*held)` piece by piece, inside a compiled program; some of the arguments rest in host memory.

    Which results need which arguments is seen in the traced program. An optimizer that mixes leaves on the host (a norm over
    all gradients that rest there) makes a single piece of everything.

    Args:
      update: what to do.
      held: its arguments, where the plan keeps them.
      offload: which of them rest in host memory; parameters and optimizer's state go back there.
      after: nothing is loaded before this is there.
      sliced: large leaves may be updated slice by slice, where that is the same.
    """
    on_host = offload.gradients, offload.params, offload.optimizer
    leaves, treedef = jax.tree.flatten(held)
    rests = [flag and movable(x) for tree, flag in zip(held, on_host, strict=True) for x in jax.tree.leaves(tree)]
    grads, whole = len(jax.tree.leaves(held[0])), [1] * len(leaves)
    stream, out_tree = _traced(update, leaves, treedef, rests, grads, whole)
    if sliced and (trips := _trips(leaves, rests)) != whole:
        try:
            other, _ = _traced(update, leaves, treedef, rests, grads, trips)
        except Exception:  # the optimizer's own Python code, on shapes that do not fit each other any more
            other = stream
        if alike(stream.program, other.program) and other.is_sound():
            stream = other
    return out_tree.unflatten(stream.run(after))


def _traced(
    update: UpdateOfTrees, leaves: Sequence[jax.Array], treedef: Any, rests: Any, grads: int, trips: Sequence[int]
):
    """The update as a stream, and the structure of its results; it is traced with the first slices, which nobody reads."""
    first = [leaf if n == 1 else leaf[: len(leaf) // n] for leaf, n in zip(leaves, trips, strict=True)]
    traced = trace(update, *treedef.unflatten(to_device_memory(first)))
    program = read_program(traced.jaxpr)
    stream = _Stream(
        program=program,
        leaves=dict(zip(program.inputs, leaves, strict=True)),
        rests=frozenset(number for number, flag in zip(program.inputs, rests, strict=True) if flag),
        trips=dict(zip(program.inputs, trips, strict=True)),
        replaced=dict(enumerate(program.inputs[grads:])),
    )
    return stream, traced.out_tree


def _trips(leaves: Sequence[jax.Array], rests: Sequence[bool]) -> list[int]:
    """Chooses the number of slices in which each leaf is updated; leaves of one shape have one number."""
    widest: dict[tuple[int, ...], int] = {}
    for leaf, host in zip(leaves, rests, strict=True):
        if host:
            widest[leaf.shape] = max(widest.get(leaf.shape, 1), leaf.dtype.itemsize)
    sliced = lambda leaf: movable(leaf) and leaf.shape in widest
    return [slices(leaf.shape, widest[leaf.shape], PIECE) if sliced(leaf) else 1 for leaf in leaves]


@dataclass(frozen=True)
class _Stream:
    """An update as the program of one slice, and the arrays that it runs on.

    Attributes:
      program: the update.
      leaves: number of an argument -> the whole of it, where it rests.
      rests: numbers of those in host memory.
      trips: number -> in how many slices it is updated.
      replaced: position of a result -> number of the argument that it takes the place of.
    """

    program: Program
    leaves: Mapping[int, jax.Array]
    rests: frozenset[int]
    trips: Mapping[int, int]
    replaced: Mapping[int, int]

    def run(self, after: jax.Array) -> list[jax.Array]:
        """Runs the update, and returns its results, each where it rests."""
        needs = self._needs()
        pieces = self._joined(self._pieces(needs))
        shared, own = self._work(needs, pieces)
        env: dict[int, Any] = dict(self.leaves) | dict(self.program.constants)
        run(shared, env)
        done: dict[int, jax.Array] = {}
        past: list[PyTree] = [after] * AHEAD
        for piece, equations in zip(pieces, own, strict=True):
            at = moment(past[-AHEAD])
            made = (self._at_once if self._count(piece) == 1 else self._by_slices)(piece, equations, env, at)
            done |= made
            past.append(list(made.values()))
        left = [i for i in range(len(self.program.outputs)) if i not in done]
        done |= self._results(left, env)
        return [done[i] for i in sorted(done)]

    def is_sound(self) -> bool:
        """Whether every result that replaces a sliced argument is computed, from arguments that are sliced like it alone."""
        made: dict[int, StreamedPiece] = {i: piece for piece in self._pieces(self._needs()) for i in piece.results}
        for i, number in self.replaced.items():
            piece = made.get(i)
            kinds = {(self.leaves[n].shape, self.trips[n]) for n in (*(piece.needed if piece else ()), number)}
            if self.trips[number] > 1 and (piece is None or len(kinds) > 1):
                return False
        return all(i in self.replaced for i, piece in made.items() if self._count(piece) > 1)

    def _at_once(
        self, piece: StreamedPiece, equations: list[Equation], env: Mapping[int, Any], at: Any
    ) -> dict[int, jax.Array]:
        loaded = {n: load(self.leaves[n], at) for n in sorted(piece.needed & self.rests)}
        run(equations, inner := {**env, **loaded})
        return self._results(piece.results, inner)

    def _by_slices(
        self, piece: StreamedPiece, equations: list[Equation], env: Mapping[int, Any], at: Any
    ) -> dict[int, jax.Array]:
        """Updates slice by slice in a loop that carries the arrays that results replace: each slice is read, then written."""
        targets = {i: self.replaced[i] for i in piece.results}
        like = {n: aval_of(self.program.outputs[i], self.program.avals) for i, n in targets.items()}
        carry = {n: vary_like(self.leaves[n], like[n]) for n in sorted(like)}
        count, some = self._count(piece), self.leaves[min(piece.needed)]
        rows, begin = len(some) // count, 0 if varying_axes(at) - varying_axes(some) else at

        def trip(k: jax.Array, carry: dict[int, jax.Array]) -> dict[int, jax.Array]:
            start = begin + k * rows
            arrays = {n: carry.get(n, self.leaves[n]) for n in sorted(piece.needed)}
            own = {n: jax.lax.dynamic_slice_in_dim(x, start, rows) for n, x in arrays.items()}
            run(equations, inner := {**env, **to_device_memory(own)})
            new = self._results(piece.results, inner)
            put = lambda i, n: jax.lax.dynamic_update_slice_in_dim(carry[n], new[i], start, 0)
            return {n: put(i, n) for i, n in targets.items()}

        carry = jax.lax.fori_loop(0, count, trip, carry)
        return {i: carry[n] for i, n in targets.items()}

    def _results(self, which: Sequence[int], env: Mapping[int, Any]) -> dict[int, jax.Array]:
        made = {i: result_of(self.program.outputs[i], env) for i in which}
        return {i: to_host_memory(x, self.replaced.get(i) in self.rests) for i, x in made.items()}

    def _count(self, piece: StreamedPiece) -> int:
        return max(self.trips[number] for number in piece.needed)

    def _needs(self) -> dict[int, frozenset[int]]:
        """Finds for every value which loaded or sliced arguments it is computed from."""
        apart = (number for number in self.program.inputs if number in self.rests or self.trips[number] > 1)
        needs = {number: frozenset((number,)) for number in apart}
        for each in self.program.equations:
            found = frozenset().union(*(needs.get(number, frozenset()) for number in each.read))
            needs |= dict.fromkeys(each.outputs, found) if found else {}
        return needs

    def _pieces(self, needs: Mapping[int, frozenset[int]]) -> list[StreamedPiece]:
        """Splits the update into the smallest pieces that share no value, in the order of the results."""
        nothing: frozenset[int] = frozenset()
        results: list[tuple[int, ...]] = [(i,) for i in range(len(self.program.outputs))]
        wanted = [entry_of(atom, needs, nothing) for atom in self.program.outputs]
        for each in self.program.equations:
            if each.op.acts:
                results.append(())
                wanted.append(nothing.union(*(needs.get(number, nothing) for number in each.read)))
        pieces: dict[int, StreamedPiece] = {}
        owner: dict[int, int] = {}
        for i, (made, needed) in enumerate(zip(results, wanted, strict=True)):
            if needed:
                touched = sorted({owner[n] for n in needed if n in owner})
                parts = [pieces.pop(k) for k in touched] + [StreamedPiece(needed, made)]
                first = min([*touched, i])
                together = nothing.union(*(part.needed for part in parts))
                pieces[first] = StreamedPiece(together, tuple(sorted(sum((part.results for part in parts), ()))))
                owner |= dict.fromkeys(together, first)
        return [pieces[first] for first in sorted(pieces)]

    def _joined(self, pieces: Sequence[StreamedPiece]) -> list[StreamedPiece]:
        """Merges neighbouring pieces while they stay below `PIECE` bytes."""
        joined, held = [], 0
        for piece in pieces:
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in map(self.leaves.__getitem__, piece.needed))
            if not joined or held + size > PIECE or self._count(piece) > 1:
                joined.append(piece)
                held = size
            else:
                joined[-1] = StreamedPiece(joined[-1].needed | piece.needed, joined[-1].results + piece.results)
                held += size
        return joined

    def _work(
        self, needs: Mapping[int, frozenset[int]], pieces: Sequence[StreamedPiece]
    ) -> tuple[list[Equation], list[list[Equation]]]:
        """Splits the equations: those that need no piece, and those of each piece. What no result needs is dropped."""
        owner = {number: k for k, piece in enumerate(pieces) for number in piece.needed}
        shared, own, wanted = [], [[] for _ in pieces], set(names_of(self.program.outputs))
        for each in reversed(self.program.equations):
            if wanted.intersection(each.outputs) or each.op.acts:
                wanted.update(each.read)
                found = next((needs[number] for number in each.read if number in needs), None)
                (own[owner[next(iter(found))]] if found else shared).append(each)
        return shared[::-1], [equations[::-1] for equations in own]
