"""The newest step of which every process's state can be had, and who sends whose to whom."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axonml_jax.checkpoint.memory.generation import CopyIndex

Found = Mapping[str, Sequence[int]]
"""What one process has: the steps of its whole copies, by the shards that they hold."""


@dataclass(frozen=True)
class Agreed:
    """What all processes go on from.

    Attributes:
      step: updates made.
      sources: by rank, who has its state; itself where it has.
    """

    step: int
    sources: tuple[int, ...]

    def moves(self) -> dict[int, int]:
        """By the rank of each process that has lost its state, who sends it.

        >>> Agreed(4, (0, 0)).moves()
        {1: 0}
        """
        return {rank: source for rank, source in enumerate(self.sources) if source != rank}


def agree(shards: Sequence[str], found: Sequence[Found], nodes: Sequence[int] | None = None) -> Agreed | None:
    """The newest step that every process can have; None when there is none. All processes come to the same.

    Whoever has lost its state gets it from a process of its own machine, or else of that machine which sends the least.

    Args:
      shards: what every process needs, by rank.
      found: what every process has, by rank.
      nodes: the machine of every process; None: all are on one.

    >>> agree(["a", "b"], [{"a": [4, 6]}, {"b": [4], "a": [2]}])
    Agreed(step=4, sources=(0, 1))
    >>> agree(["a", "b"], [{"a": [4], "b": [4]}, {}])  # the second machine is new
    Agreed(step=4, sources=(0, 0))
    >>> agree(["a"] * 6, [{"a": [4]}] * 4 + [{}] * 2, nodes=(0, 0, 1, 1, 2, 2)).sources
    (0, 1, 2, 3, 0, 2)
    """
    nodes = nodes or [0] * len(shards)
    steps = {step for each in found for kept in each.values() for step in kept}
    for step in sorted(steps, reverse=True):
        if (sources := _sources(shards, step, found, nodes)) is not None:
            return Agreed(step, sources)
    return None


def missing(shards: Sequence[str], found: Sequence[Found]) -> tuple[int, ...]:
    """The processes whose state nobody has, of no step.

    >>> missing(["a", "b"], [{"a": [4]}, {}])
    (1,)
    """
    return tuple(rank for rank, shard in enumerate(shards) if not any(each.get(shard) for each in found))


def steps_of(copies: Iterable[CopyIndex]) -> dict[str, list[int]]:
    """The steps of some copies, by the shards that they hold."""
    found = {}
    for each in copies:
        found.setdefault(each.shard, []).append(each.step)
    return found


def _sources(shards: Sequence[str], step: int, found: Sequence[Found], nodes: Sequence[int]) -> tuple[int, ...] | None:
    of_node, of_process, sources = Counter(), Counter(), []
    for rank, shard in enumerate(shards):
        having = [other for other, each in enumerate(found) if step in each.get(shard, ())]
        if not having:
            return None
        if rank in having:
            sources.append(rank)
            continue
        cost = lambda other, rank=rank: (nodes[other] != nodes[rank], of_node[nodes[other]], of_process[other], other)
        sources.append(source := min(having, key=cost))
        of_node[nodes[source]] += 1
        of_process[source] += 1
    return tuple(sources)
