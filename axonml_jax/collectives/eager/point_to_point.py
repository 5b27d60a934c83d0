"""One rank to one other, eagerly: `send` and `recv` meet and block; and `barrier`, where all ranks of a group meet."""

from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.primitives import shift
from axonml_jax.collectives.scope import Group, bound_scope, require_eager
from axonml_jax.mesh.group import ProcessGroup


def send(x: ArrayLike, dst: int, group: Group) -> None:
    """Give x to the rank at position `dst`, which calls `recv`; return once it has it.

    Messages between two ranks arrive in the order sent. Two ranks that both send first are told so by an error: let one
    of them receive first, or exchange with `send_recv`.

    Args:
      x: an array, of any shape and dtype.
      dst: the receiver's position in the group.
      group: a process group with both ranks.

    Raises:
      ValueError: inside `shard_map` (every rank runs the same program: use `send_recv`), when `dst` is this rank or no
        position of the group, or when the receiver expects another shape or dtype.
      TimeoutError: when the receiver does not call in time.
    """
    _eager("send", group, x).send(jnp.asarray(x), dst, shift=_shift)


def recv(src: int, group: Group, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """Take what the rank at position `src` sends; wait until it does.

    Args:
      src: the sender's position in the group.
      group: a process group with both ranks.
      like: an array or a `jax.ShapeDtypeStruct` with the shape and dtype of what will come; no value is read.

    Returns:
      The received array, on this rank's device.

    Raises:
      ValueError: inside `shard_map` (use `send_recv`), when `src` is this rank or no position of the group, or when
        another shape or dtype comes than `like` has; the sender gets the same error.
      TimeoutError: when the sender does not call in time.
    """
    return _eager("recv", group).recv(src, like, shift=_shift)


def barrier(group: Group) -> None:
    """Return once every rank of the group has called it.

    Traced it does nothing: the ranks of one compiled program meet at its collectives, and have no other effects that a
    barrier could order.

    Raises:
      TimeoutError: naming the ranks that did not call in time.
    """
    if bound_scope(group) is None:
        require_eager("barrier", group).barrier()


def _eager(name: str, group: Group, x=None) -> ProcessGroup:
    if bound_scope(group) is not None:
        _refuse_traced(name)
    return require_eager(name, group, x)


def _refuse_traced(name: str) -> NoReturn:
    raise ValueError(
        f"{name} cannot be traced: inside shard_map all ranks run one program, so that no rank sends while another "
        "receives. Use send_recv(x, pairs=[(source, target)], group), which every rank calls"
    )


def _shift(x, source: int, target: int):
    return jax.tree.map(lambda leaf: shift(leaf, "data", [(source, target)]), x)
