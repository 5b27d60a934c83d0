"""What a stage makes of its microbatch alone stays whole on every rank of an axis that is left to XLA's partitioner.

Of split labels that are shifted the partitioner would make a permute inside one stage's branch.
"""

from collections.abc import Collection, Sequence
from typing import Any

from axonml_jax.parallel.pipeline.resting.position_parts import on_every_rank
from axonml_jax.program.program import Equation


class WholeBatch:
    """Runs the equations of one stage (see `run`): results that are no larger than what they are made of stay whole.

    Args:
      batch: numbers of the microbatch's leaves.
      constants: numbers of the program's constants.
    """

    def __init__(self, batch: Collection[int], constants: Collection[int]):
        self._whole, self._constants = set(batch), set(constants)

    def __call__(self, equation: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """The results of an equation that reads the microbatch and constants alone; None for all others."""
        read = set(equation.read) - self._constants
        if not read:
            self._constants.update(equation.outputs)
        if not read or not read <= self._whole:
            return None
        made = equation.op.bind(operands)
        if max(x.size for x in made) > max(given.size for given in equation.op.given):
            return made
        self._whole.update(equation.outputs)
        return [on_every_rank(x) for x in made]
