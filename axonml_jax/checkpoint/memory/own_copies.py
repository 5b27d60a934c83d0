"""The copies of one process's own state: the newest that all processes have stays while the next is written over the other."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from axonml_jax.checkpoint.memory.generation import CopyIndex, DamagedCopy, Generation, holds, laid_out
from axonml_jax.checkpoint.memory.held_parts import assembled, parts_of, values_of
from axonml_jax.logging import logger


class OwnCopies:
    """Two generations of one process's state.

    Args:
      generations: where they are.

    Attributes:
      generations: the same.
      held: shard and step of what each holds, or is being given; None: nothing.
    """

    def __init__(self, generations: Sequence[Generation]):
        self.generations = generations
        self.held: list[tuple[str, int] | None] = [None] * len(generations)

    def look(self) -> list[CopyIndex]:
        """The whole copies; one that is damaged is said and forgotten."""
        whole = whole_copies(self.generations)
        self.held = [None if index is None else (index.shard, index.step) for index in whole]
        return [index for index in whole if index is not None]

    def for_refill(self, step: int, sent: Collection[str]) -> Generation:
        """The generation to receive this process's state of a step in, which this process does not have.

        Args:
          step: whatever is of another one goes first.
          sent: the shards that this process sends meanwhile.

        Raises:
          OSError: when all that there are hold what others lack.
        """
        free = [held is None or held[1] != step for held in self.held]
        free = free if any(free) else [held is None or held[0] not in sent for held in self.held]
        if not any(free):
            raise OSError(
                f"the copies of step {step} in this process's memory are all that others lack: it has no room"
            )
        return self.generations[free.index(True)]

    def forget(self) -> None:
        """Hold no copy any more."""
        for number in range(len(self.generations)):
            self._clear(number)

    def keep_only(self, shard: str, step: int) -> None:
        """Forget what is of later steps or of another shard, as of the place that this process had in another world."""
        self.held = [holds(generation) for generation in self.generations]
        for number, held in enumerate(self.held):
            if held is not None and (held[0] != shard or held[1] > step):
                self._clear(number)

    def _clear(self, number: int) -> None:
        self.generations[number].clear()
        self.held[number] = None

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
        free = [number for number, held in enumerate(self.held) if held != (shard, complete)]
        number = min(free, key=lambda each: -1 if (held := self.held[each]) is None else held[1])
        generation, parts = self.generations[number], parts_of(arrays)
        places, end = laid_out(parts)
        generation.clear()
        for part, values in values_of(arrays):
            generation.put(places[part], values)
        self.held[number] = (shard, step)

        def finish() -> Generation:
            sizes = [(places[part], math.prod(shape) * dtype.itemsize) for part, (dtype, shape) in parts.items()]
            sums = generation.checksums(sizes)
            table = {
                part: (str(dtype), shape, places[part], found)
                for (part, (dtype, shape)), found in zip(parts.items(), sums, strict=True)
            }
            generation.commit(CopyIndex(step, shard, dict(about), table, complete).text(), end)
            return generation

        return finish

    def read(self, shard: str, step: int, like: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """The arrays of a step on the devices of those given, and what else belongs to it; call `keep_only` before."""
        generation = self.generations[self.held.index((shard, step))]
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
