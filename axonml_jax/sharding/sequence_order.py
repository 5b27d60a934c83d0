"""In which order ranks hold the positions of a sequence."""

from typing import Literal, get_args

import numpy as np

Order = Literal["contiguous", "zigzag", "striped"]

ORDERS: tuple[Order, ...] = get_args(Order)


def sequence_order(order: Order, length: int, ranks: int) -> np.ndarray:
    """The global positions of a sequence in rank-major order: rank r holds those from r * length / ranks on.

    "contiguous" gives every rank one part. Under causal attention the last rank then has the most work: 2 - 1/ranks times the
    mean. "zigzag" cuts the sequence into 2 * ranks chunks and gives rank r the chunks r and 2 * ranks - 1 - r, which balances
    causal attention exactly (the head-and-tail order of ring-flash-attention and of PyTorch's `context_parallel`). "striped"
    gives rank r the positions r, r + ranks, r + 2 * ranks, ... (Brandon et al. 2023).

    Args:
      order: one of these.
      length: positions of the whole sequence.
      ranks: how many ranks share it.

    Returns:
      int32 [length], a permutation: entry i is the position that stands at place i.

    Raises:
      ValueError: for an unknown order, or a length that does not divide into the order's parts.

    >>> sequence_order("zigzag", 8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    >>> sequence_order("striped", 6, 2)
    array([0, 2, 4, 1, 3, 5], dtype=int32)
    """
    parts = order_parts(order, ranks)
    if length % parts:
        raise ValueError(
            f"{length} positions do not divide into the {parts} parts of order={order!r} over {ranks} ranks: pad the sequence "
            f"to {-(-length // parts) * parts} with positions of weight 0"
        )
    positions = np.arange(length, dtype=np.int32)
    if order == "striped":
        return positions.reshape(-1, ranks).T.reshape(-1)
    if order == "zigzag":
        chunks = positions.reshape(2 * ranks, -1)
        return np.stack([chunks[:ranks], chunks[ranks:][::-1]], axis=1).reshape(-1)
    return positions


def causal_balance(order: Order, length: int, ranks: int) -> float:
    """How uneven causal attention is: pairs of positions that the busiest rank computes, over the mean of all ranks.

    Contiguous it grows to 2 - 1/ranks, striped it is just above 1, and zigzag exactly 1.

    Args:
      order, length, ranks: as of `sequence_order`.

    >>> [round(causal_balance(order, 4096, 4), 3) for order in ORDERS]
    [1.75, 1.0, 1.001]
    """
    own = length / ranks
    if order == "contiguous":
        return (2 * length - own + 1) / (length + 1)
    return ranks * (own + 1) / (length + 1) if order == "striped" else 1.0


def order_parts(order: Order, ranks: int) -> int:
    """What the length of a sequence must be a multiple of.

    Raises:
      ValueError: for an unknown order.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
    return 2 * ranks if order == "zigzag" else ranks
