"""At which equation of a traced microbatch each stage begins: at a mark, or before the first use of a module's weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axonml_jax.parallel.pipeline.cutting.chain import marked
from axonml_jax.program.atoms import names_of
from axonml_jax.program.program import Program


@dataclass(frozen=True)
class CutWork:
    """What is divided.

    Attributes:
      program: the whole.
      positions: of the equations that are work.
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
    found, missing, sizes = [0], [], _crossing(work)
    for stage, weights in enumerate(begins, 1):
        wanted = set(weights)
        first = next((i for i, used in enumerate(work.weights) if used & wanted), None)
        if first is None:
            missing.append(f"stage {stage} ({', '.join(weight_names[i] for i in weights[:3])})")
            continue
        before = max((i for i in range(first) if work.weights[i]), default=-1)
        best = min(range(before + 1, first + 1), key=lambda i: (sizes[i], -i))
        found.append(max(work.positions[best], found[-1]))
    if missing:
        raise ValueError(
            f"nothing of what begins these stages is read by the loss: {'; '.join(missing)}; say where stages begin with split="
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
    """Bytes of values that cross from before each work equation to it or behind."""
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
