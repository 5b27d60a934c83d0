"""Cutting a traced microbatch into consecutive pieces, one per stage: any model's, with one loss (docs/adr/0009).

The whole program is cut, not the model: what a piece needs of earlier work is sent to it, what it needs of weights, of the
microbatch and of constants alone it makes itself. So a tied weight, a skip connection over several stages, a second call
of the model or a parameter read by the loss need no rules of their own.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.compat.jaxpr import trace
from axonml_jax.parallel.pipeline.cutting.boundaries import CutWork, boundaries
from axonml_jax.program.atoms import among, entry_of, names_of
from axonml_jax.program.program import Equation, Program, read_program
from axonml_jax.program.rules import is_light, is_repeatable


@dataclass(frozen=True)
class Piece:
    """What one stage does.

    Attributes:
      equations: its work, and what it makes again of weights, microbatch and constants, in order.
      weights: the weights it reads (positions).
      states: the states it reads and changes (positions).
      received, sent: numbers of what the piece before sends, and of what it sends itself.
    """

    equations: tuple[Equation, ...]
    weights: tuple[int, ...]
    states: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Pieces:
    """A program of one microbatch, `fun(weights, given, states) -> (results, new states)`, in pieces.

    Attributes:
      program: the whole.
      weights, given, states: numbers of its inputs.
      results: its first results, numbers or constants: what the last piece returns.
      new_states: numbers or constants of the states after it.
      results_tree: the structure of the first results.
      pieces: in order.
    """

    program: Program
    weights: tuple[int, ...]
    given: tuple[int, ...]
    states: tuple[int, ...]
    results: tuple[Any, ...]
    new_states: tuple[Any, ...]
    results_tree: Any
    pieces: tuple[Piece, ...]

    @property
    def unchanged(self) -> list[int]:
        """The states that come back as they were given (positions)."""
        pairs = zip(self.states, self.new_states, strict=True)
        return [i for i, (number, atom) in enumerate(pairs) if among(atom, (number,))]


@dataclass(frozen=True)
class _Tags:
    """What a value is made of: constants alone, the microbatch, weights, or work."""

    kinds: dict[int, str]

    def of(self, equation: Equation) -> str:
        read = {self.kinds.get(number, "work") for number in equation.read} - {"constant"}
        if len(read) > 1 or "work" in read or not is_repeatable(equation):
            return "work"
        kind = read.pop() if read else "constant"
        return "work" if kind == "weight" and not is_light(equation.op) else kind


def cut_pieces(
    fun: Callable,
    weights: Sequence[Any],
    given: Sequence[Any],
    states: Sequence[Any],
    *,
    num_stages: int,
    begins: Sequence[Sequence[int]] | None,
    state_names: Sequence[str],
    weight_names: Sequence[str],
) -> Pieces:
    """Trace `fun` and cut it.

    Args:
      fun: `fun(weights, given, states) -> (results, new states)` of lists of arrays; results any tree, states a list.
      weights, given, states: examples, of which only shapes, dtypes and varying axes are read.
      num_stages: how many pieces.
      begins: for every piece but the first the weights whose first use begins it; None: marks in the program (`chain.py`).
      state_names, weight_names: paths, for messages.

    Raises:
      ValueError: when a stage reads nothing of what begins it, or a state is read on another stage than the one that
        changes it.
    """
    traced = trace(fun, list(weights), list(given), list(states))
    program = read_program(traced.jaxpr)
    ends = len(weights), len(weights) + len(given)
    numbers = program.inputs
    w, g, s = numbers[: ends[0]], numbers[ends[0] : ends[1]], numbers[ends[1] :]
    results_tree, _ = traced.out_tree.children()
    results, new = program.outputs[: results_tree.num_leaves], program.outputs[results_tree.num_leaves :]
    kept = {number for number, atom in zip(s, new, strict=True) if among(atom, (number,))}
    kinds = dict.fromkeys(program.constants, "constant") | dict.fromkeys(w, "weight")
    kinds |= dict.fromkeys((*g, *kept), "given") | dict.fromkeys(set(s) - kept, "work")
    tags, work, made_by = _Tags(kinds), [], {}
    for position, equation in enumerate(program.equations):
        kind = tags.of(equation)
        kinds |= dict.fromkeys(equation.outputs, kind)
        made_by |= dict.fromkeys(equation.outputs, position)
        if kind == "work":
            work.append(position)
    again = _Again(program, kinds, made_by, {number: i for i, number in enumerate(w)})
    uses = [again.weights(program.equations[position].read) for position in work]
    starts = boundaries(CutWork(program, work, uses, results), num_stages, begins, weight_names)
    pieces = _Cutter(program, work, starts, again, s, new, results, kept).pieces(state_names)
    return Pieces(program, w, g, s, results, new, results_tree, pieces)


@dataclass(frozen=True)
class _Again:
    """What every piece makes itself, out of weights, microbatch and constants."""

    program: Program
    kinds: dict[int, str]
    made_by: dict[int, int]
    position: dict[int, int]

    def closure(self, wanted: Iterable[int]) -> tuple[set[int], set[int]]:
        """Positions of the equations that make the wanted numbers again, and the weights (positions) that these read."""
        equations, weights, left, seen = set(), set(), list(wanted), set()
        while left:
            number = left.pop()
            if number in seen or self.kinds.get(number, "work") == "work":
                continue
            seen.add(number)
            if number in self.position:
                weights.add(self.position[number])
            elif number in self.made_by:
                equations.add(self.made_by[number])
                left += self.program.equations[self.made_by[number]].read
        return equations, weights

    def weights(self, wanted: Iterable[int]) -> set[int]:
        """The weights in what an equation reads."""
        return self.closure(wanted)[1]


@dataclass(frozen=True)
class _Cutter:
    program: Program
    work: Sequence[int]
    starts: Sequence[int]
    again: _Again
    states: Sequence[int]
    new: Sequence[Any]
    results: Sequence[Any]
    kept: set[int]

    def pieces(self, state_names: Sequence[str]) -> tuple[Piece, ...]:
        """One piece per start."""
        equations, last = self.program.equations, len(self.starts) - 1
        bounds = [*self.starts, len(equations)]
        of_piece = [[p for p in self.work if a <= p < b] for a, b in itertools.pairwise(bounds)]
        stage_of = {n: i for i, piece in enumerate(of_piece) for p in piece for n in equations[p].outputs}
        read = [{n for p in piece for n in equations[p].read} for piece in of_piece]
        owners = self._owners(stage_of, read, state_names)
        for i, state in owners.items():
            read[state] |= set(names_of([self.new[i]]))
        read[last] |= set(names_of(self.results))
        pieces = []
        for i, own in enumerate(of_piece):
            later = set().union(*read[i:]) if i else set()
            received = sorted(n for n in later if stage_of.get(n, i) < i)
            after = set().union(*read[i + 1 :]) if i < last else set()
            sent = sorted(n for n in after if stage_of.get(n, last + 1) <= i)
            made, weights = self.again.closure(read[i])
            run = tuple(equations[p] for p in sorted(made.union(own)))
            mine = tuple(k for k, stage in owners.items() if stage == i)
            pieces.append(Piece(run, tuple(sorted(weights)), mine, tuple(received), tuple(sent)))
        return tuple(pieces)

    def _owners(self, stage_of: dict[int, int], read: Sequence[set[int]], names: Sequence[str]) -> dict[int, int]:
        """The stage of every state that changes."""
        owners, wrong = {}, []
        for i, (number, atom) in enumerate(zip(self.states, self.new, strict=True)):
            if number in self.kept:
                continue
            readers = [stage for stage, numbers in enumerate(read) if number in numbers]
            owners[i] = entry_of(atom, stage_of, min(readers, default=0))
            if set(readers) - {owners[i]}:
                wrong.append(f"{names[i]} (read on {readers}, changed on {owners[i]})")
        if wrong:
            raise ValueError(
                "these states of the model are read on another stage than the one that changes them, where a later "
                f"microbatch would see an older value: {'; '.join(wrong)}. Let a stage hold both, by other beginnings (split=)"
            )
        return owners
