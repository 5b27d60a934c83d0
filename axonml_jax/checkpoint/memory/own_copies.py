"""The copies of one process's own state: the newest that all processes have stays while the next is written over the other."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from axonml_jax.checkpoint.memory.generation import CopyIndex, DamagedCopy, Generation, laid_out
from axonml_jax.checkpoint.memory.held_parts import assembled, parts_of, values_of
from axonml_jax.logging import logger


class OwnCopies:
    """Two generations of one process's state.

    Args:
      generations: where they are.

    Attributes:
      generations: the same.
      steps: what each holds, or is being given; None: nothing.
    """

    def __init__(self, generations: Sequence[Generation]):
        self.generations = generations
        self.steps: list[int | None] = [None] * len(generations)

    def look(self) -> dict[str, list[int]]:
        """The steps of the whole copies, by the shard that they hold; one that is damaged is said and forgotten."""
        found = {}
        for number, index in enumerate(whole_copies(self.generations)):
            self.steps[number] = None if index is None else index.step
            if index is not None:
                found.setdefault(index.shard, []).append(index.step)
        return found

    def forget(self) -> None:
        """Hold no copy any more."""
        for number, generation in enumerate(self.generations):
            generation.clear()
            self.steps[number] = None

    def drop_after(self, step: int) -> None:
        """Forget copies of later steps; call `look` before."""
        for number, held in enumerate(self.steps):
            if held is not None and held > step:
                self.generations[number].clear()
                self.steps[number] = None

    def holding(self, step: int) -> Generation:
        """The generation that holds a step."""
        return self.generations[self.steps.index(step)]

    def begin(
        self, step: int, arrays: Mapping[str, jax.Array], shard: str, about: Mapping[str, Any], complete: int | None
    ) -> Callable[[], Generation]:
        """Copy arrays to the host.

        Args:
          step: updates made.
          arrays: they may be donated as soon as this returns.
          shard: their `shard_name`.
          about: what else belongs to the copy, as JSON has it.
          complete: the step to keep.

        Returns:
          What makes it a copy: checksums, which need nobody to wait. It returns the generation.
        """
        free = [number for number, held in enumerate(self.steps) if held is None or held != complete]
        number = min(free, key=lambda each: -1 if (held := self.steps[each]) is None else held)
        generation, parts = self.generations[number], parts_of(arrays)
        places, end = laid_out(parts)
        generation.clear()
        for part, values in values_of(arrays):
            generation.put(places[part], values)
        self.steps[number] = step

        def finish() -> Generation:
            sizes = [(places[part], math.prod(shape) * dtype.itemsize) for part, (dtype, shape) in parts.items()]
            sums = generation.checksums(sizes)
            table = {
                part: (str(dtype), shape, places[part], found)
                for (part, (dtype, shape)), found in zip(parts.items(), sums, strict=True)
            }
            generation.commit(CopyIndex(step, shard, dict(about), table).text(), end)
            return generation

        return finish

    def read(self, step: int, like: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays of a step on the devices of those given, and what else belongs to it."""
        generation = self.holding(step)
        found = generation.index()
        assert found is not None
        return assembled(like, lambda part: generation.part(found[0], part)), found[0].about


def whole_copies(generations: Sequence[Generation]) -> list[CopyIndex | None]:
    """What each holds, checked; None: nothing, or what was damaged, which is said and forgotten."""
    return [_whole(generation) for generation in generations]


def _whole(generation: Generation) -> CopyIndex | None:
    try:
        found = generation.checked()
    except DamagedCopy as error:
        logger.warning("a copy of the state in memory is damaged and not used: %s", error)
        generation.clear()
        return None
    return None if found is None else found[0]
