"""One stage as a program: forward keeping no weights and no batch, backward with both given again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.residuals import Saved
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.parallel.pipeline.cutting.stage import Stage, StageOutput
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.units.body import Body, Prelude, Transform, Values, add
from axonml_jax.program.atoms import Atom, among, aval_of, names_of, result_of, results_of
from axonml_jax.program.dataflow import with_gradient
from axonml_jax.program.prelude import mark, prelude_of
from axonml_jax.program.program import Program, read_program


class Inputs(NamedTuple):
    """Everything a stage reads, as lists of leaves; also used for their numbers in its program.

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
    """What a stage makes of one microbatch, as lists of leaves; also used for their places in its program."""

    y: Sequence[Any]
    loss: Any
    aux: Sequence[Any]
    state: Sequence[Any]


@dataclass(frozen=True)
class TracedStage:
    """A stage's program.

    Attributes:
      body: its work, and the light work that only prepares weights and batch.
      program: both.
      numbers: of its inputs.
      places: of its results, numbers or constants.
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
        """The results."""
        return self._results(self.body.apply(self._sources(inputs), self._moving(inputs)))

    def forward(self, inputs: Inputs, transform: Transform) -> tuple[Results, Saved]:
        """The results, and what the backward needs beside weights and batch."""
        out, saved = self.body.forward(self._sources(inputs), self._moving(inputs), (), transform)
        return self._results(out), saved

    def backward(self, saved: Saved, inputs: Inputs, dy: Sequence[Any], seed: Any) -> tuple[list[Any], list[Any]]:
        """Gradients of what `varied_x` lists, and of the weights (None for those without).

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
    """Trace a stage, inside `shard_map`.

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
    """The program as work between what prepares weights and batch, and the results."""
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
