"""Which machines make up the next world, when some have gone and others have come: pure rules, without a socket."""

from collections.abc import Collection, Sequence


def regrouped(before: Sequence[int], present: Collection[int], unit: int = 1) -> tuple[int, ...]:
    """The machines of the next world, in the order of their ranks.

    Machines stand in groups of `unit`, each of which holds whole replicas of the model. A machine keeps its place within a
    group, because the parts of the state that it has in memory belong there; others fill the places of those that have gone.
    What is left when no further group can be filled waits.

    >>> regrouped([0, 1, 2], [0, 2])  # 1 has gone
    (0, 2)
    >>> regrouped([0, 2], [0, 1, 2, 3])  # 1 and 3 have come
    (0, 2, 1, 3)
    >>> regrouped([0, 1, 2, 3], [0, 2, 3], 2)  # 3 has what 1 had: 2 waits
    (0, 3)
    >>> regrouped([0, 3], [0, 1, 2, 3], 2)
    (0, 3, 1, 2)

    Args:
      before: the machines of the world before, in its order; none at the beginning.
      present: the machines that are there.
      unit: how many make up a group.
    """
    groups = len(present) // unit
    columns = [[node for node in before[place::unit] if node in present] for place in range(unit)]
    kept = [column[:groups] for column in columns]
    placed = {node for column in kept for node in column}
    others = iter([*(node for node in before if node in present and node not in placed), *_new(before, present)])
    return tuple(
        kept[place][group] if group < len(kept[place]) else next(others)
        for group in range(groups)
        for place in range(unit)
    )


def changes(before: Sequence[int], now: Sequence[int]) -> str:
    """What is other than it was, in words.

    >>> changes([0, 1, 2], [0, 2]), changes([0, 2], [0, 2, 1])
    ('without node(s) [1]', 'with node(s) [1]')
    """
    gone, come = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    words = [f"{how} node(s) {nodes}" for how, nodes in (("without", gone), ("with", come)) if nodes]
    return " and ".join(words) or "with the same machines"


def _new(before: Sequence[int], present: Collection[int]) -> list[int]:
    return sorted(set(present) - set(before))
