"""Who keeps whose copy: a process of the next machine, so that the loss of one machine loses no state."""

from collections.abc import Sequence


def keepers(sizes: Sequence[int]) -> tuple[int | None, ...]:
    """By rank, the process that keeps a copy of its state; None on a single machine, which would lose both together.

    Args:
      sizes: processes of every machine, in the order of ranks.

    >>> keepers([2, 2]), keepers([2, 1]), keepers([4])
    ((2, 3, 0, 1), (2, 2, 0), (None, None, None, None))
    """
    if len(sizes) < 2:
        return (None,) * sum(sizes)
    first = [sum(sizes[:node]) for node in range(len(sizes))]
    found = []
    for node, size in enumerate(sizes):
        following = (node + 1) % len(sizes)
        found += [first[following] + local % sizes[following] for local in range(size)]
    return tuple(found)


def kept_by(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The processes whose copies one process keeps.

    >>> kept_by(2, [2, 1]), kept_by(0, [2, 2])
    ((0, 1), (2,))
    """
    return tuple(other for other, keeper in enumerate(keepers(sizes)) if keeper == rank)


def to_send(sizes: Sequence[int], shards: Sequence[str]) -> tuple[int | None, ...]:
    """By rank, the keeper that it sends its state to; None where a process of another machine has the same shards anyway.

    Args:
      sizes: processes of every machine.
      shards: what every process holds, by rank; the same text means the same parts of the same arrays.

    >>> to_send([1, 1], ["a", "a"]), to_send([2, 2], ["a", "b", "a", "c"])
    ((None, None), (None, 3, None, 1))
    """
    node = [node for node, size in enumerate(sizes) for _ in range(size)]
    elsewhere = [
        any(shards[other] == shards[rank] and node[other] != node[rank] for other in range(len(node)))
        for rank in range(len(node))
    ]
    return tuple(None if elsewhere[rank] else keeper for rank, keeper in enumerate(keepers(sizes)))
