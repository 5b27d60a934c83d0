"""Gathers and reduce-scatters in two hops, neighbours and then across: what keeps XLA:TPU from all-reducing (docs/adr/0010)."""

Groups = list[list[int]]
"""Positions along an axis, by group."""

NEIGHBOURS, ACROSS = 8, 128
"""Ranks of the near hop at least, and of the far hop at most: over 256 of 2,048 chips some shapes became all-reduces again."""


def groups(ranks: int, hop: int | None) -> tuple[Groups, Groups] | None:
    """Groups of `hop` neighbours, and groups of the ranks that have one place among their neighbours; None: one hop is all.

    >>> groups(4, 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    if hop is None or hop in (1, ranks):
        return None
    near = [list(range(start, start + hop)) for start in range(0, ranks, hop)]
    return near, [list(group) for group in zip(*near, strict=True)]


def best_hops(torus: int, ranks: int, devices: int) -> tuple[int, int]:
    """Ranks of the near hop of a gather and of a reduce-scatter along an axis; 1: in one hop.

    XLA:TPU makes an all-reduce, of twice the bytes, of every reduce-scatter over all chips of a slice of more than eight,
    and where the torus has three dims of every gather too. Over a part of the chips it does not
    (docs/maintainers/jax-facts.md).

    Args:
      torus: dims of the torus that the chips form; 0 for other devices.
      ranks: of the axis.
      devices: of the mesh.

    >>> best_hops(3, 512, 512), best_hops(3, 2048, 2048), best_hops(2, 256, 256), best_hops(3, 256, 512), best_hops(0, 64, 64)
    ((8, 8), (16, 16), (1, 8), (1, 1), (1, 1))
    """
    if torus < 2 or ranks < devices or ranks <= NEIGHBOURS or ranks % NEIGHBOURS:
        return 1, 1
    near = NEIGHBOURS
    while ranks // near > ACROSS and ranks % (2 * near) == 0:
        near *= 2
    return (near if torus > 2 else 1), near
