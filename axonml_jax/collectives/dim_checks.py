"""Checks of dims and positions that several collectives share, with the errors they raise."""

from collections.abc import Sequence


def checked_dim(name: str, dim: int, shape: Sequence[int]) -> int:
    """`dim` counted from the front.

    Raises:
      ValueError: when the array has no such dim.
    """
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        rule = f"it must be in {-ndim}..{ndim - 1}" if ndim else "a scalar has none: give it one with x[None]"
        raise ValueError(f"{name}: dim {dim} of shape {tuple(shape)} does not exist: {rule}")
    return dim % ndim


def require_divisible(name: str, shape: Sequence[int], dim: int, parts: int) -> None:
    """Refuse a shape whose `dim` does not split into `parts` equal parts.

    Raises:
      ValueError: naming the shape, the dim, the remainder and the remedy.
    """
    if shape[dim] % parts:
        padded = -(-shape[dim] // parts) * parts
        raise ValueError(
            f"{name}: dim {dim} of shape {tuple(shape)} does not split evenly over {parts} ranks "
            f"({shape[dim]} % {parts} = {shape[dim] % parts}): pad it to {padded} (jnp.pad) and cut the result, "
            "or choose a dim that divides"
        )


def checked_position(name: str, word: str, position: int, size: int) -> int:
    """`position` if the group has it.

    Raises:
      ValueError: when it is outside 0..size-1.
    """
    if not 0 <= position < size:
        raise ValueError(
            f"{name}: {word}={position}, but the group has {size} ranks: {word} is a position in the group, "
            f"0..{size - 1}, not a rank of the world"
        )
    return position
