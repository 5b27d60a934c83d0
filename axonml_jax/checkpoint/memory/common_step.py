"""The newest step of which every process's state can be had, and who sends whose to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def agree(shards: Sequence[str], found: Sequence[Found]) -> Agreed | None:
    """The newest step that every process can have; None when there is none. All processes come to the same.

    Args:
      shards: what every process needs, by rank.
      found: what every process has, by rank.

    >>> agree(["a", "b"], [{"a": [4, 6]}, {"b": [4], "a": [2]}])
    Agreed(step=4, sources=(0, 1))
    >>> agree(["a", "b"], [{"a": [4], "b": [4]}, {}])  # the second machine is new
    Agreed(step=4, sources=(0, 0))
    """
    steps = {step for each in found for kept in each.values() for step in kept}
    for step in sorted(steps, reverse=True):
        sources = tuple(_source(rank, shard, step, found) for rank, shard in enumerate(shards))
        if None not in sources:
            return Agreed(step, tuple(each for each in sources if each is not None))
    return None


def missing(shards: Sequence[str], found: Sequence[Found]) -> tuple[int, ...]:
    """The processes whose state nobody has, of no step.

    >>> missing(["a", "b"], [{"a": [4]}, {}])
    (1,)
    """
    return tuple(rank for rank, shard in enumerate(shards) if not any(each.get(shard) for each in found))


def _source(rank: int, shard: str, step: int, found: Sequence[Found]) -> int | None:
    having = [other for other, each in enumerate(found) if step in each.get(shard, ())]
    return rank if rank in having else next(iter(having), None)
