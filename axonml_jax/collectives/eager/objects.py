"""Python objects between ranks, eagerly: pickled, padded to one length, sent as bytes."""

import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np

from axonml_jax.collectives.gather import all_gather
from axonml_jax.collectives.scatter import broadcast
from axonml_jax.collectives.scope import Group, bound_scope, require_eager

_MAX_BYTES = 2**31 - 1


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every rank's object, in the group's order, on every rank.

    Args:
      obj: anything that pickles; its size may differ from rank to rank.
      group: a process group, called eagerly by each of its ranks. Unpickling runs code: use it among ranks you trust.

    Raises:
      ValueError: inside `shard_map`, or when an object pickles to 2 GiB or more.

    Communicates: one all-gather of the sizes, one of n times the largest object (rounded up to a power of two).
    """
    _refuse_traced("all_gather_object", group)
    own = _pickled("all_gather_object", obj)
    sizes = np.asarray(all_gather(np.array([own.size], np.int32), group))
    rows = np.asarray(all_gather(_padded(own, sizes.max())[None], group))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """The object of the rank at position `src`, on every rank.

    Args:
      obj: anything that pickles; only that of `src` is read.
      group: a process group, called eagerly by each of its ranks. Unpickling runs code: use it among ranks you trust.
      src: the source's position in the group.

    Raises:
      ValueError: inside `shard_map`, when the position does not exist, or when the object pickles to 2 GiB or more.

    Communicates: one broadcast of the size, one of the object (rounded up to a power of two).
    """
    eager = _refuse_traced("broadcast_object", group)
    own = _pickled("broadcast_object", obj) if eager.rank == src else np.zeros(0, np.uint8)
    size = int(broadcast(np.int32(own.size), group, src))
    whole = np.asarray(broadcast(_padded(own, size), group, src))
    return pickle.loads(whole[:size].tobytes())


def _refuse_traced(name: str, group: Group):
    if bound_scope(group) is not None:
        raise ValueError(f"{name} cannot be traced: objects are not arrays; call it outside shard_map, once per rank")
    return require_eager(name, group)


def _pickled(name: str, obj: Any) -> np.ndarray:
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    if data.size > _MAX_BYTES:
        raise ValueError(f"{name}: the object pickles to {data.size} bytes, at most {_MAX_BYTES} can be sent: split it")
    return data


def _padded(data: np.ndarray, size: int):
    # A power of two, so that objects of similar size share one compiled program.
    length = 1 << max(int(size) - 1, 0).bit_length()
    return jnp.asarray(np.pad(data, (0, length - data.size)))
