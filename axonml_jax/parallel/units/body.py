"""A piece of a program run forward keeping no weights, and backward with weights read again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.compat.residuals import Saved, vjp_without
from axonml_jax.program.program import Equation
from axonml_jax.program.recomputed import run_named
from axonml_jax.program.run import run

Values = dict[int, Any]
"""Arrays by their number in a program."""

Transform = Callable[[Callable], Callable]
"""What recomputation makes of a function: itself, or a checkpointed form of it."""


@dataclass(frozen=True)
class Prelude:
    """What is made of weights alone before the work reads it.

    Attributes:
      weights: numbers of the weights.
      equations: casts, reshapes and the like.
      derived: numbers of weights and prepared weights that the work reads.
      varied: numbers of values with a gradient.
    """

    weights: Sequence[int]
    equations: Sequence[Equation]
    derived: Sequence[int]
    varied: frozenset[int]

    def apply(self, weights: Values) -> Values:
        """Everything the work reads."""
        moving, fixed = self._split(weights)
        return moving | fixed

    def vjp(self, weights: Values) -> tuple[Values, Callable[[Values], Values]]:
        """`apply`, and a function from gradients of what has one to gradients of the trained weights."""
        trained = {number: value for number, value in weights.items() if number in self.varied}
        moving, pull, fixed = jax.vjp(lambda moving: self._split(weights | moving), trained, has_aux=True)
        return moving | fixed, lambda grads: pull({number: grads[number] for number in moving})[0]

    def _split(self, weights: Values) -> tuple[Values, Values]:
        env = dict(weights)
        run(self.equations, env)
        moving = {number: env[number] for number in self.derived if number in self.varied}
        return moving, {number: env[number] for number in self.derived if number not in self.varied}


@dataclass(frozen=True)
class Body:
    """Equations as a function of weights and inputs.

    Attributes:
      prelude: what prepares the weights.
      equations: the work.
      inputs: numbers of everything else it reads.
      outputs: numbers of what is read elsewhere.
      avals: the abstract value of every number.
    """

    prelude: Prelude
    equations: Sequence[Equation]
    inputs: Sequence[int]
    outputs: Sequence[int]
    avals: Mapping[int, Any]

    def apply(self, weights: Values, inputs: Values) -> Values:
        """The outputs."""
        env = {number: inputs[number] for number in self.inputs} | self.prelude.apply(weights)
        run_named(self.equations, env)
        return {number: env[number] for number in self.outputs}

    def forward(
        self, weights: Values, inputs: Values, again: Iterable[int], transform: Transform
    ) -> tuple[Values, Saved]:
        """The outputs, and what the backward needs beside weights and the inputs numbered `again`."""
        env = {number: inputs[number] for number in self.inputs} | self.prelude.apply(weights)
        moving = {number: env[number] for number in self._moving}

        def work(*values):
            inner = env | dict(zip(moving, values, strict=True))
            run_named(self.equations, inner)
            outputs = {number: inner[number] for number in self.outputs}
            varied = [outputs[number] for number in self._varied_outputs]
            return varied, {number: value for number, value in outputs.items() if number not in self._varied}

        provided = [env[number] for number in (*self.prelude.derived, *again)]
        out, rest, saved = vjp_without(transform(work), list(moving.values()), provided)
        return dict(zip(self._varied_outputs, out, strict=True)) | rest, saved

    def backward(
        self, saved: Saved, weights: Values, again: Sequence[Any], cotangents: Values
    ) -> tuple[Values, Values]:
        """Gradients of the inputs and of the weights, from those of the outputs.

        Args:
          saved: what the forward left.
          weights: the weights, read again.
          again: the inputs that the forward was told would be there again.
          cotangents: of the outputs; a missing one is zero.
        """
        prepared, pull = self.prelude.vjp(weights)
        vjp = saved.restore([*(prepared[number] for number in self.prelude.derived), *again])
        grads = vjp([self.cotangent(number, cotangents.get(number)) for number in self._varied_outputs])
        found = dict(zip(self._moving, grads, strict=True))
        return {number: found[number] for number in self.inputs if number in found}, pull(found)

    def cotangent(self, number: int, value: Any = None) -> Any:
        """A cotangent of a value, zero when None, typed as varying like the value itself."""
        aval = self.avals[number]
        return vary(jnp.zeros(aval.shape, aval.dtype) if value is None else value, tuple(varying_axes(aval)))

    @property
    def _varied(self) -> frozenset[int]:
        return self.prelude.varied

    @property
    def _varied_outputs(self) -> list[int]:
        return [number for number in self.outputs if number in self._varied]

    @property
    def _moving(self) -> list[int]:
        return [number for number in (*self.inputs, *self.prelude.derived) if number in self._varied]


def add(grads: Values, number: int, grad: Any) -> None:
    """Add a gradient to those that `number` has already."""
    grads[number] = grads[number] + grad if number in grads else grad
