"""By which method attention reads the keys and values of other ranks."""

from typing import Literal, get_args

from axonml_jax.sharding.sequence_order import Order

MethodName = Literal["auto", "gather", "ulysses", "ring"]

METHODS: tuple[MethodName, ...] = get_args(MethodName)

Method = MethodName | tuple[int, Literal["gather", "ring"]]
"""A name, or (U, "ring" or "gather"): Ulysses among U neighbours, a ring or an all-gather among their groups."""


def method_problem(method: object) -> str | None:
    """What is wrong with a method; nothing where it is one."""
    if isinstance(method, str) and method in METHODS:
        return None
    if isinstance(method, (tuple, list)) and len(method) == 2:
        count, rest = method
        if isinstance(count, int) and not isinstance(count, bool) and count >= 1 and rest in ("gather", "ring"):
            return None
    return f"method={method!r} must be one of {', '.join(METHODS)}, or (U, 'ring') or (U, 'gather') for Ulysses among U ranks"


def heads_and_gathers(
    method: Method,
    *,
    ranks: int,
    heads: int,
    kv_heads: int,
    window: tuple[int, int] | None,
    causal: bool,
    places: int,
    order: Order,
) -> tuple[int, bool]:
    """How many ranks split heads, and whether keys and values are gathered among the rest.

    "auto" takes a ring where a window reaches no further than the neighbours' positions in contiguous order, else the cheaper
    in bytes of Ulysses and gathering: forward and backward send 4 (N-1)/N (h + g) and 6 (N-1) g elements per position (h, g:
    the widths of all query heads and of all key heads, which Ulysses repeats where there are fewer than ranks).

    Args:
      method: the user's.
      ranks: N.
      heads, kv_heads: of this rank, all of which Ulysses splits.
      window, causal: what positions see.
      places: positions of a rank.
      order: in which ranks hold them.

    Raises:
      ValueError: for heads that the ranks cannot split, with what can.
    """
    if problem := method_problem(method):
        raise ValueError(problem)
    if method == "auto":
        near = window is not None and window[0] <= places and (causal or window[1] <= places)
        if near and order == "contiguous":
            return 1, False
        cheaper = 4 * (heads + max(kv_heads, ranks)) < 6 * ranks * kv_heads
        return (ranks, True) if cheaper and not unsplittable(ranks, heads, kv_heads) else (1, True)
    if isinstance(method, str):
        count, gathers = (ranks, True) if method == "ulysses" else (1, method == "gather")
    else:
        count, gathers = method[0], method[1] == "gather"
    if ranks % count:
        raise ValueError(f"method={method!r}: {count} must divide the {ranks} ranks that split positions")
    if problem := unsplittable(count, heads, kv_heads):
        able = [n for n in range(1, ranks + 1) if ranks % n == 0 and not unsplittable(n, heads, kv_heads)]
        raise ValueError(
            f"method={method!r} splits heads over {count} ranks: {problem}. Use method='gather' or 'ring', or "
            f"(U, 'ring') with U one of {able}"
        )
    return count, gathers


def unsplittable(count: int, heads: int, kv_heads: int) -> str | None:
    """Why so many ranks cannot split heads; nothing where they can."""
    if heads % count:
        return f"{heads} query heads do not divide over them"
    if kv_heads % count and count % kv_heads:
        return f"{kv_heads} key and value heads neither divide over them nor they by these"
    return None
