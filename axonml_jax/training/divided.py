"""A function of all leaves, traced once, of which every rank runs only what its own leaves need.

Ranks of a pipeline hold different leaves of one tree. Tracing the whole function for each of them, as `lax.switch` would,
costs ranks x leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.model.atoms import Atom, names_of, results_of
from axonml_jax.model.program import Program, flatten, run
from axonml_jax.model.trace import acts, trace


@dataclass(frozen=True)
class Divided:
    """`fun(leaves, whole) -> results` as a program.

    Attributes:
      program: the whole.
      leaves: numbers of the leaves that are divided over ranks.
      whole: numbers of what every rank has, in tree order.
      results: numbers or constants of the results.
    """

    program: Program
    leaves: tuple[Atom, ...]
    whole: tuple[int, ...]
    results: tuple[Atom, ...]

    @classmethod
    def of(
        cls,
        fun: Callable[[list, PyTree], Sequence[Any]],
        unpack: Callable[[PyTree], list],
        buffers: PyTree,
        whole: PyTree,
    ) -> "Divided":
        """Trace.

        Args:
          fun: returns a list of arrays.
          unpack: makes all leaves of a rank's buffers, of which only shapes, dtypes and varying axes are read.
          buffers: the rank's.
          whole: what is the same on all ranks.
        """

        def traced(whole: PyTree, buffers: PyTree):
            leaves = unpack(buffers)
            return leaves, list(fun(leaves, whole))

        found = trace(traced, whole, buffers)
        program, (leaves, _) = flatten(found.jaxpr), found.out_tree.children()
        outputs, count = program.outputs, leaves.num_leaves
        return cls(program, outputs[:count], program.inputs[: len(jax.tree.leaves(whole))], outputs[count:])

    def run(self, leaves: Mapping[int, Any], whole: PyTree, wanted: Sequence[int]) -> list[Any]:
        """Some of the results.

        Args:
          leaves: by position, those that the wanted results are made of.
          whole: what every rank has.
          wanted: positions among the results.

        Raises:
          ValueError: when a wanted result is made of another leaf.
        """
        env = dict(self.program.constants) | dict(zip(self.whole, jax.tree.leaves(whole), strict=True))
        env |= {self.leaves[i]: value for i, value in leaves.items()}
        results = [self.results[i] for i in wanted]
        needed, open_ = [], set(names_of(results)) - set(env)
        for equation in reversed(self.program.equations):
            if open_.intersection(equation.outputs) or (acts(equation.eqn) and not leaves):
                needed.append(equation)
                open_ = (open_ - set(equation.outputs)) | (set(equation.read) - set(env))
        if open_:
            raise ValueError(
                "the optimizer makes of one leaf's parameters or state what depends on another's, which may live on another "
                'stage: give the plan update="whole", or choose an element-wise optimizer (adam, sgd, lion)'
            )
        run(reversed(needed), env)
        return results_of(results, env)
