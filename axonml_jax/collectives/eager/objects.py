"""Python objects between ranks, eagerly: as JSON or pickled, padded to one length, sent as bytes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.eager.object_bytes import NO_PICKLE, OnlyPickled, decoded, encoded
from axonml_jax.collectives.gather import all_gather
from axonml_jax.collectives.scatter import broadcast
from axonml_jax.collectives.scope import Group, bound_scope, require_eager

_MAX_BYTES = 2**31 - 1
_REMEDY = (
    f"{NO_PICKLE}=1 lets JSON values pass alone: None, booleans, numbers, text, lists, and dicts with text as keys. Turn it "
    "into these, or give arrays to ax.all_gather or ax.broadcast"
)


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every rank's object, in the group's order, on every rank.

    Args:
      obj: sent as JSON where that holds all of it (None, booleans, numbers, text, lists, dicts with text as keys), else
        pickled; its size may differ from rank to rank.
      group: a process group, called eagerly by each of its ranks. Unpickling runs code: use it among ranks you trust, or set
        `AXONML_JAX_NO_PICKLE=1` in all processes.

    Raises:
      ValueError: inside `shard_map`; or, in all ranks, when the object of one cannot be sent: nothing can pickle it, it takes
        2 GiB or more, or it can only be pickled and that is forbidden.

    Communicates: one all-gather of the sizes, one of n times the largest object (rounded up to a power of two).
    """
    name = "all_gather_object"
    _refuse_traced(name, group)
    own, why = _encoded(name, obj)
    sizes = np.asarray(all_gather(np.array([own.size], np.int32), group))
    _refuse_empty(name, [rank for rank, size in enumerate(sizes) if not size], why)
    rows = np.asarray(all_gather(_padded(own, sizes.max())[None], group))
    return [_decoded(name, rank, row[:size]) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))]


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """The object of the rank at position `src`, on every rank.

    Args:
      obj: see `all_gather_object`; only that of `src` is read.
      group: see `all_gather_object`.
      src: the source's position in the group.

    Raises:
      ValueError: see `all_gather_object`; or when the position does not exist.

    Communicates: one broadcast of the size, one of the object (rounded up to a power of two).
    """
    name = "broadcast_object"
    eager = _refuse_traced(name, group)
    own, why = _encoded(name, obj) if eager.rank == src else (np.zeros(0, np.uint8), "")
    size = int(broadcast(np.int32(own.size), group, src))
    _refuse_empty(name, [] if size else [src], why)
    whole = np.asarray(broadcast(_padded(own, size), group, src))
    return _decoded(name, src, whole[:size])


def _refuse_traced(name: str, group: Group):
    if bound_scope(group) is not None:
        raise ValueError(f"{name} cannot be traced: objects are not arrays; call it outside shard_map, once per rank")
    return require_eager(name, group)


def _encoded(name: str, obj: Any) -> tuple[np.ndarray, str]:
    """The object's bytes; none, and why, where it cannot be sent: the others, who wait for it, must hear of that."""
    nothing = np.zeros(0, np.uint8)
    try:
        data = np.frombuffer(encoded(obj), np.uint8)
    except OnlyPickled as error:
        return nothing, f"only a pickle could carry it ({error}), and {_REMEDY}"
    except Exception as error:  # what pickling raises is the object's own choice
        return nothing, f"{type(error).__name__}: {error}"
    if data.size > _MAX_BYTES:
        return nothing, f"it takes {data.size} bytes, at most {_MAX_BYTES} can be sent: split it"
    return data, ""


def _refuse_empty(name: str, ranks: list[int], why: str) -> None:
    if ranks:
        raise ValueError(
            f"{name}: what position(s) {ranks} of the group give cannot be sent: {why or 'there it is said why'}"
        )


def _decoded(name: str, rank: int, data: np.ndarray) -> Any:
    try:
        return decoded(data.tobytes())
    except OnlyPickled as error:
        raise ValueError(
            f"{name}: {error}: position {rank} of the group. Set {NO_PICKLE}=1 in all processes"
        ) from error


def _padded(data: np.ndarray, size: int):
    # A power of two, so that objects of similar size share one compiled program.
    length = 1 << max(int(size) - 1, 0).bit_length()
    return jnp.asarray(np.pad(data, (0, length - data.size)))
