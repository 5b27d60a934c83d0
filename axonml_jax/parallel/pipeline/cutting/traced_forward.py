"""A stage's forward with what it keeps for the backward, as a program that is traced once and run in every tick's branch."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.residuals import Saved
from axonml_jax.parallel.pipeline.cutting.traced_stage import Inputs, Results, TracedStage
from axonml_jax.parallel.units.body import Transform
from axonml_jax.program.atoms import aval_of
from axonml_jax.program.mapped_dims import mapped_dim
from axonml_jax.program.program import Equation, Program, read_program
from axonml_jax.program.run import run_program


@dataclass(frozen=True)
class TracedForward:
    """What a stage makes of its inputs, and keeps.

    Attributes:
      program: of the leaves of its inputs.
      out_tree: the structure of (results, residuals).
      saved: what a backward needs; its residuals are handed to it.
    """

    program: Program
    out_tree: Any
    saved: Saved

    @classmethod
    def of(cls, traced: TracedStage, inputs: Inputs, transform: Transform) -> "TracedForward":
        """Trace it, inside `shard_map`.

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
        """The abstract values of what it keeps."""
        return self.out_tree.unflatten([aval_of(atom, self.program.avals) for atom in self.program.outputs])[1]

    def split_dims(self, axis: str) -> list[int | None]:
        """The dim of each of them that comes out of a `shard_map` over an axis split; None: of the others."""
        kept = len(self.residuals)
        outputs = self.program.outputs[len(self.program.outputs) - kept :]
        return [mapped_dim(self.program, atom, axis) for atom in outputs]

    def apply(self, inputs: Inputs) -> tuple[Results, list[jax.Array]]:
        """The results, and what is kept."""
        same = lambda equation, operands: operands if _changes_nothing(equation) else None
        return self.out_tree.unflatten(run_program(self.program, [leaf for leaves in inputs for leaf in leaves], same))


def _changes_nothing(equation: Equation) -> bool:
    """Whether an equation rounds numbers to what they are.

    `jax.checkpoint` does so to what it keeps, because XLA may compute numbers of 16 bits with more; of wider ones it is a copy.
    """
    op = equation.op
    if op.name != "reduce_precision":
        return False
    info = jnp.finfo(op.given[0].dtype)
    given = op.options["exponent_bits"], op.options["mantissa_bits"]
    return info.bits >= 32 and given == (info.nexp, info.nmant)
