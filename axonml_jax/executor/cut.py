"""Cuts a model's traced microbatch into the stages of a pipeline, and traces each stage's forward and backward."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, warn
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import Saved
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.parallel.units import Body, Prelude, Transform, Values, add
from axonml_jax.pipeline.assign import marked
from axonml_jax.pipeline.schedules import AXIS
from axonml_jax.program.cut import mark, prelude_of
from axonml_jax.program.program import (
    Atom,
    Equation,
    Program,
    among,
    aval_of,
    entry_of,
    is_light,
    is_repeatable,
    names_of,
    read_program,
    result_of,
    results_of,
    run_program,
    with_gradient,
)
from axonml_jax.program.values import mapped_dim

# --------------------------------------------------------------------------------------------------
# At which equation of a traced microbatch each stage begins: at a mark, or before the first use of a module's weights.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutWork:
    """The program that is cut, and what of it is work.

    Attributes:
      program: the whole.
      positions: the positions of the equations that are work.
      weights: for each of them the weights it reads.
      results: numbers or constants that are read after the end.
    """

    program: Program
    positions: Sequence[int]
    weights: Sequence[set[int]]
    results: Sequence[Any]


def boundaries(
    work: CutWork, num_stages: int, begins: Sequence[Sequence[int]] | None, weight_names: Sequence[str]
) -> list[int]:
    """The position of the first equation of every stage, in order.

    Between the last use of weights before a stage and the first of its own the cut is where the fewest bytes cross.

    Raises:
      ValueError: when a stage's beginning is not in the program.
    """
    if begins is None:
        return _marks(work.program, num_stages)
    found, missing, sizes, last = [0], [], _crossing(work), None
    for stage, weights in enumerate(begins, 1):
        wanted = set(weights)
        first = next((i for i, used in enumerate(work.weights) if used & wanted), None)
        if first is None:
            missing.append(f"stage {stage} ({', '.join(weight_names[i] for i in weights[:3])})")
            continue
        equation = work.program.equations[work.positions[first]]
        if first == last and equation.op.scan is not None:
            warn(
                f"several stages begin in one loop ({equation.op.line or 'no line known'}), which is not cut, so that stages "
                "are empty: if it runs over blocks whose parameters are stacked, name their module (split='path/of/module')"
            )
        last = first
        before = max((i for i in range(first) if work.weights[i]), default=-1)
        best = min(range(before + 1, first + 1), key=lambda i: (sizes[i], -i))
        found.append(max(work.positions[best], found[-1]))
    if missing:
        raise ValueError(
            f"the loss reads no parameter with which these stages begin: {'; '.join(missing)}; say where stages begin with "
            "split=, and let the loss call the model that it is given, model(x)"
        )
    return found


def _marks(program: Program, num_stages: int) -> list[int]:
    places = [0] * num_stages
    for position, equation in reversed(list(enumerate(program.equations))):
        if (stage := marked(equation.op)) is not None:
            places[stage] = position
    for stage in range(1, num_stages):  # a stage that receives no arrays has no mark: it is empty
        places[stage] = max(places[stage], places[stage - 1])
    return places


def _crossing(work: CutWork) -> list[int]:
    """Bytes of the values that cross a cut before each work equation."""
    program, count = work.program, len(work.positions)
    last = dict.fromkeys(names_of(work.results), count)
    for i, position in enumerate(work.positions):
        for number in program.equations[position].read:
            last[number] = max(i, last.get(number, -1))
    changes = [0] * (count + 2)
    for i, position in enumerate(work.positions):
        for number in program.equations[position].outputs:
            if last.get(number, -1) > i:
                size = _bytes(program.avals[number])
                changes[i + 1] += size
                changes[min(last[number], count) + 1] -= size
    sizes = [0]
    for change in changes[1:]:
        sizes.append(sizes[-1] + change)
    return sizes


def _bytes(aval: Any) -> int:
    return aval.size * getattr(aval.dtype, "itemsize", 8)


# --------------------------------------------------------------------------------------------------
# A pipeline's stage: any function of its parameters, what the stage before sent, and a microbatch.
# --------------------------------------------------------------------------------------------------


class StageOutput(NamedTuple):
    """The outputs of a stage for one microbatch.

    Attributes:
      y: what the next stage receives, of any structure; floating leaves have a gradient, others only travel forward. The
        last stage's comes back, stacked by microbatch.
      loss: its share of the microbatch's loss, a scalar; usually 0 except on the last stage.
      aux: metrics, summed over microbatches; only the last stage's are kept.
      state: its state after this microbatch, of the structure, shapes and dtypes of the one it was given.
    """

    y: PyTree = None
    loss: Any = 0.0
    aux: PyTree = None
    state: PyTree = None


StageFunction = Callable[[PyTree, PyTree, PyTree, Any, PyTree], StageOutput]
"""`stage(weights, x, batch, key, state) -> StageOutput`: x is None on the first stage, which reads the microbatch; key is
the microbatch's, the same on all stages; key and state are None where there are none."""


def _as_it_is(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return list(leaves)


@dataclass(frozen=True)
class Stage:
    """A stage, and how its parameters are gathered and its gradients reduced in a tick.

    Attributes:
      apply: the stage. It may communicate over other axes than the pipeline's.
      read: makes of the stored leaves, in tree order, those that `apply` is given, outside the differentiation: a gather
        per tick.
      sync: makes of their gradients those of the stored leaves; the transpose of `read`. It gets None for a frozen leaf.
      names: paths of the leaves; none: they have none.
      blocks: by the path of a block of the model its leaves (positions).
    """

    apply: StageFunction
    read: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] = _as_it_is
    sync: Callable[[Sequence[Any]], Sequence[Any]] = _as_it_is
    names: Sequence[str] = ()
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------
# Cutting a traced microbatch into consecutive pieces, one per stage: any model's, with one loss (docs/adr/0009).
#
# The whole program is cut, not the model: what a piece needs of earlier work is sent to it, what it needs of weights,
# of the microbatch and of constants alone it makes itself. So a tied weight, a skip connection over several stages, a
# second call of the model or a parameter read by the loss need no rules of their own.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """The equations of one stage, and the values it reads, receives and sends.

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
    """A program of one microbatch, `fun(weights, given, states) -> (results, new states)`, cut into pieces.

    Attributes:
      program: the whole.
      weights, given, states: numbers of its inputs.
      results: its first results, numbers or constants: what the last piece returns.
      new_states: numbers or constants of the states after it.
      results_tree: the structure of the first results.
      pieces: the pieces, in order.
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
    """Classifies values by what they are made of: constants alone, the microbatch, weights, or work."""

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
    fixed: Sequence[bool],
    state_names: Sequence[str],
    weight_names: Sequence[str],
) -> Pieces:
    """Traces `fun` and cuts it.

    Args:
      fun: `fun(weights, given, states) -> (results, new states)` of lists of arrays; results any tree, states a list.
      weights, given, states: examples, of which only shapes, dtypes and varying axes are read.
      num_stages: how many pieces.
      begins: for every piece but the first the weights whose first use begins it; None: marks in the program (`pack.py`).
      fixed: for every state whether all microbatches, and so all stages, read it as it was before the first.
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
    same = {number for number, own in zip(s, fixed, strict=True) if own} | kept
    kinds |= dict.fromkeys((*g, *same), "given") | dict.fromkeys(set(s) - same, "work")
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
    pieces = _Cutter(program, work, starts, again, s, new, results, kept, same).pieces(state_names)
    return Pieces(program, w, g, s, results, new, results_tree, pieces)


@dataclass(frozen=True)
class _Again:
    """Finds the equations that a piece repeats, which read weights, microbatch and constants alone."""

    program: Program
    kinds: dict[int, str]
    made_by: dict[int, int]
    position: dict[int, int]

    def closure(self, wanted: Iterable[int]) -> tuple[set[int], set[int]]:
        """Finds the equations that recompute the wanted numbers, and the weights that these read, both by position."""
        equations, weights, pending, seen = set(), set(), list(wanted), set()
        while pending:
            number = pending.pop()
            if number in seen or self.kinds.get(number, "work") == "work":
                continue
            seen.add(number)
            if number in self.position:
                weights.add(self.position[number])
            elif number in self.made_by:
                equations.add(self.made_by[number])
                pending += self.program.equations[self.made_by[number]].read
        return equations, weights

    def weights(self, wanted: Iterable[int]) -> set[int]:
        """The weights that are read to make these values."""
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
    same: set[int]

    def pieces(self, state_names: Sequence[str]) -> tuple[Piece, ...]:
        """Cuts one piece per start."""
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
            if number not in self.same and set(readers) - {owners[i]}:
                wrong.append(f"{names[i]} (read on {readers}, changed on {owners[i]})")
        if wrong:
            raise ValueError(
                "one stage changes these states of the model and another reads them, so a later microbatch would read an "
                f"older value: {'; '.join(wrong)}. Put both on one stage by other beginnings (split=)"
            )
        return owners


# --------------------------------------------------------------------------------------------------
# One stage as a program: forward keeping no weights and no batch, backward with both given again.
# --------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The arguments of a stage as lists of leaves; also their numbers in its program.

    Attributes:
      weights: the parameters as read.
      given: the microbatch's leaves and its key, which the backward has again.
      x: what the stage before sent.
      state: the stage's state.
    """

    weights: Sequence[Any]
    given: Sequence[Any]
    x: Sequence[Any]
    state: Sequence[Any]


class Results(NamedTuple):
    """The outputs of a stage as lists of leaves; also their places in its program."""

    y: Sequence[Any]
    loss: Any
    aux: Sequence[Any]
    state: Sequence[Any]


@dataclass(frozen=True)
class TracedStage:
    """The program of a stage, split into its work and the preparation of weights and batch.

    Attributes:
      body: its work, and the light work that only prepares weights and batch.
      program: both.
      numbers: the numbers of its inputs.
      places: the places of its results, numbers or constants.
      y_tree, aux_tree, state_tree: their structures.
    """

    body: Body
    program: Program
    numbers: Inputs
    places: Results
    y_tree: Any
    aux_tree: Any
    state_tree: Any

    def apply(self, inputs: Inputs) -> Results:
        """Runs the stage, and returns its results."""
        return self._results(self.body.apply(self._sources(inputs), self._moving(inputs)))

    def forward(self, inputs: Inputs, transform: Transform) -> tuple[Results, Saved]:
        """Runs the stage; returns its results, and the residuals without weights and batch."""
        out, saved = self.body.forward(self._sources(inputs), self._moving(inputs), (), transform)
        return self._results(out), saved

    def backward(self, saved: Saved, inputs: Inputs, dy: Sequence[Any], seed: Any) -> tuple[list[Any], list[Any]]:
        """The gradients of the leaves in `varied_x`, and of the weights (None for those without).

        Args:
          saved: what the forward left.
          inputs: weights and batch again; x and state are not read.
          dy: gradients of what `varied_y` lists.
          seed: the gradient of the loss.
        """
        cotangents: Values = {}
        for i, grad in zip(self.varied_y, dy, strict=True):
            add(cotangents, self.places.y[i], grad)
        if self._varies(self.places.loss):
            loss = self.body.cotangent(self.places.loss, jnp.asarray(seed, self.aval(self.places.loss).dtype))
            add(cotangents, self.places.loss, loss)
        of_x, of_weights = self.body.backward(saved, self._sources(inputs), (), cotangents)
        of_x = [of_x[self.numbers.x[i]] for i in self.varied_x]
        return of_x, [of_weights.get(number) for number in self.numbers.weights]

    @property
    def varied_x(self) -> list[int]:
        """The leaves of x that have a gradient."""
        return [i for i, number in enumerate(self.numbers.x) if self._varies(number)]

    @property
    def varied_y(self) -> list[int]:
        """The leaves of y that have a gradient; a loop's constant result, typed as the same along the pipeline, has none."""
        typed = any(
            AXIS in varying_axes(self.body.avals[number]) for number in (*self.numbers.x, *self.numbers.weights)
        )
        same = lambda atom: typed and AXIS not in varying_axes(self.aval(atom))
        return [i for i, atom in enumerate(self.places.y) if self._varies(atom) and not same(atom)]

    def aval(self, atom: Atom) -> Any:
        """The abstract value of a result."""
        return aval_of(atom, self.body.avals)

    def _varies(self, atom: Atom) -> bool:
        return among(atom, self.body.prelude.varied)

    def _sources(self, inputs: Inputs) -> Values:
        values = zip((*self.numbers.weights, *self.numbers.given), (*inputs.weights, *inputs.given), strict=True)
        return dict(self.program.constants) | dict(values)

    def _moving(self, inputs: Inputs) -> Values:
        return dict(zip((*self.numbers.x, *self.numbers.state), (*inputs.x, *inputs.state), strict=True))

    def _results(self, out: Values) -> Results:
        y, loss, aux, state = self.places
        return Results(results_of(y, out), result_of(loss, out), results_of(aux, out), results_of(state, out))


def trace_stage(
    stage: Stage, inputs: Inputs, unflatten: Callable[[Inputs], tuple], trained: Sequence[bool], varied_x: Sequence[int]
) -> TracedStage:
    """Traces a stage, inside `shard_map`.

    Args:
      stage: the stage.
      inputs: examples of its inputs, of which only shapes, dtypes and varying axes are read.
      unflatten: makes the arguments of `stage.apply` of them.
      trained: for every weight whether it has a gradient.
      varied_x: the leaves of x that have one.
    """

    def flat(*leaves: Sequence[Any]) -> StageOutput:
        out = stage.apply(*unflatten(Inputs(*leaves)))
        if not isinstance(out, StageOutput):
            raise TypeError(f"a stage returned {type(out).__name__}: return StageOutput(y, loss, aux, state)")
        # Metrics and states have no gradient: without this they would keep residuals for one that is zero.
        return out._replace(aux=jax.lax.stop_gradient(out.aux), state=jax.lax.stop_gradient(out.state))

    traced = trace(flat, *(list(leaves) for leaves in inputs))
    program = read_program(traced.jaxpr)
    numbers = _regroup(program.inputs, inputs)
    output = traced.out_tree.unflatten(program.outputs)
    places = Results(*(leaf if name == "loss" else jax.tree.leaves(leaf) for name, leaf in output._asdict().items()))
    start = [number for number, has in zip(numbers.weights, trained, strict=True) if has]
    start += [numbers.x[i] for i in varied_x]
    trees = (jax.tree.structure(tree) for tree in (output.y, output.aux, output.state))
    return TracedStage(_body(program, numbers, places, start), program, numbers, places, *trees)


def _regroup(numbers: Sequence[int], inputs: Inputs) -> Inputs:
    groups, rest = [], list(numbers)
    for leaves in inputs:
        groups.append(tuple(rest[: len(leaves)]))
        rest = rest[len(leaves) :]
    return Inputs(*groups)


def _body(program: Program, numbers: Inputs, places: Results, start: Sequence[int]) -> Body:
    """Divides the program into the preparation of weights and batch, and the work from it to the results."""
    sources = (*numbers.weights, *numbers.given, *program.constants)
    marks = mark(program, {number: i for i, number in enumerate(sources)})
    work = [program.equations[position] for position in marks.work]
    results = names_of(program.outputs)
    read = dict.fromkeys(number for equation in work for number in equation.read)
    derived = [number for number in dict.fromkeys((*read, *results)) if number in marks.made_of]
    varied = with_gradient(program, start)
    plain = set(names_of((*places.aux, *places.state))) - set(names_of((*places.y, places.loss)))
    varied -= plain - {number for equation in program.equations for number in equation.read} - set(program.inputs)
    prelude = Prelude(sources, prelude_of(program, derived, marks), derived, varied)
    outputs = tuple(dict.fromkeys(results))
    return Body(prelude, work, (*numbers.x, *numbers.state), outputs, program.avals)


# --------------------------------------------------------------------------------------------------
# A stage's forward with what it keeps for the backward, as a program that is traced once and run in every tick's
# branch.
# --------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """The form in which a stage's forward is traced, if a backward follows it.

    Attributes:
      traced: the stage, perhaps in parts.
      transform: what recomputation makes of it as a whole.
      kept: equal for stages of one program that keep alike.
    """

    traced: TracedStage
    transform: Transform
    kept: Hashable = None


@dataclass(frozen=True)
class TracedForward:
    """A stage's forward, traced with the residuals that it keeps.

    Attributes:
      program: a program of the leaves of its inputs.
      out_tree: the structure of (results, residuals).
      saved: what a backward needs; its residuals are handed to it.
    """

    program: Program
    out_tree: Any
    saved: Saved

    @classmethod
    def of(cls, traced: TracedStage, inputs: Inputs, transform: Transform) -> "TracedForward":
        """Traces a stage's forward, inside `shard_map`.

        Args:
          traced: the stage.
          inputs: examples of its inputs, of which only shapes, dtypes and varying axes are read.
          transform: what recomputation makes of the stage.
        """
        kept: list[Saved] = []

        def forward(*leaves: Any) -> tuple[Results, list[jax.Array]]:
            results, saved = traced.forward(Inputs(*leaves), transform)
            kept.append(saved)
            return results, saved.residuals

        made = trace(forward, *inputs)
        return cls(read_program(made.jaxpr), made.out_tree, replace(kept[-1], residuals=[]))

    @property
    def residuals(self) -> list[Any]:
        """The abstract values of the residuals."""
        return self.out_tree.unflatten([aval_of(atom, self.program.avals) for atom in self.program.outputs])[1]

    def split_dims(self, axis: str) -> list[int | None]:
        """The dim of each residual that comes out of a `shard_map` over an axis split along it; None: of the others."""
        kept = len(self.residuals)
        outputs = self.program.outputs[len(self.program.outputs) - kept :]
        return [mapped_dim(self.program, atom, axis) for atom in outputs]

    def apply(self, inputs: Inputs) -> tuple[Results, list[jax.Array]]:
        """Runs the forward; returns its results, and the residuals."""
        same = lambda equation, operands: operands if _changes_nothing(equation) else None
        return self.out_tree.unflatten(run_program(self.program, [leaf for leaves in inputs for leaf in leaves], same))


def _changes_nothing(equation: Equation) -> bool:
    """Whether an equation rounds numbers to the precision that they have.

    `jax.checkpoint` does so to what it keeps, because XLA may compute numbers of 16 bits with more; of wider ones it is a copy.
    """
    op = equation.op
    if op.name != "reduce_precision":
        return False
    info = jnp.finfo(op.given[0].dtype)
    given = op.options["exponent_bits"], op.options["mantissa_bits"]
    return info.bits >= 32 and given == (info.nexp, info.nmant)
