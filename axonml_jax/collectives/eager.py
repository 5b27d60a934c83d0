"""Collectives for eager ranks only: point-to-point messages, Python objects, unequal numbers of batches."""

import json
import os
import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from axonml_jax.collectives.collectives import (
    Group,
    Scope,
    all_gather,
    all_reduce_max,
    all_reduce_sum,
    bound_scope,
    broadcast,
    broadcasted,
    reduced,
    require_eager,
    run_collective,
)
from axonml_jax.collectives.primitives import ReduceOp, shift
from axonml_jax.mesh.world import ProcessGroup

# --------------------------------------------------------------------------------------------------
# `join`: ranks with unequal numbers of batches; those that are done shadow the others, as in PyTorch's Join.
# --------------------------------------------------------------------------------------------------


class JoinStopped(RuntimeError):
    """Raised in every rank of `join(throw_on_early_termination=True)` when one has run out of batches before another."""


class join:
    """A context in which each rank averages gradients as often as it has batches.

    A rank that leaves the `with` block shadows the others' reductions with zeros until all have left. Eager only: the
    ranks of one compiled program have equally many steps.

    Args:
      group: the ranks that take part; each enters with its own batches.
      like: a pytree with the shapes and dtypes of the gradients, such as the parameters: what a finished rank shadows.
      divide_by_initial_world_size: True divides by the group's size, so that every example counts alike; False by the
        number of ranks that still have batches.
      throw_on_early_termination: True raises JoinStopped on every rank when the first one is done.

    Example:
      >>> with join(group, like=params) as joined:             # doctest: +SKIP
      ...     for batch in my_batches:
      ...         grads = joined.sync_gradients(grad_fn(params, batch))
      ...         params = update(params, grads)
      >>> params = joined.final(params)                        # doctest: +SKIP
    """

    def __init__(
        self,
        group: Group,
        *,
        like: Any,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ):
        if bound_scope(group) is not None:
            raise ValueError("join cannot be traced: the ranks of one compiled program take equally many steps")
        self.group = require_eager("join", group)
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.throw_on_early_termination = throw_on_early_termination
        self._shadow = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        self._num_steps = 0

    def __enter__(self) -> "join":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        if error_type is not None:
            return
        while self._num_active(here=False):
            self._sum(self._shadow)

    def sync_gradients(self, gradients):
        """The average over the ranks of a pytree like `like`; finished ranks count as zeros.

        Raises:
          ValueError: when the tree, a shape or a dtype differs from `like`.
          JoinStopped: when a rank is done and `throw_on_early_termination` is set.

        Communicates: one all-reduce of a counter, and one per leaf.
        """
        self._check_like(gradients)
        num_active = self._num_active(here=True)
        self._num_steps += 1
        divisor = self.group.size if self.divide_by_initial_world_size else num_active
        return jax.tree.map(lambda total: total / divisor, self._sum(gradients))

    def final(self, tree):
        """The tree of a rank that took the most steps, on every rank; called after the block.

        Args:
          tree: a pytree of arrays, such as the parameters; a rank that stopped early missed the last updates.

        Communicates: two all-reduces of a counter, and one broadcast per leaf.
        """
        most = int(all_reduce_max(jnp.int32(self._num_steps), self.group))
        last = self.group.rank if self._num_steps == most else -1
        src = int(all_reduce_max(jnp.int32(last), self.group))
        return run_collective(f"join, final from position {src}", _from_source, tree, self.group, src=src)

    def _num_active(self, here: bool) -> int:
        num_active = int(all_reduce_sum(jnp.int32(here), self.group))
        if self.throw_on_early_termination and 0 < num_active < self.group.size:
            raise JoinStopped(
                f"{self.group.size - num_active} of {self.group.size} ranks have no batch left while others go on "
                f"(after {self._num_steps} steps on this rank)"
            )
        return num_active

    def _sum(self, tree):
        return run_collective("join", _summed, tree, self.group)

    def _check_like(self, gradients) -> None:
        expected, given = (jax.tree.map(_described, tree) for tree in (self._shadow, gradients))
        if expected != given:
            raise ValueError(f"join expected gradients like {expected}, but got {given}: give join(like=...) that tree")


def _described(leaf) -> str:
    return f"{jnp.result_type(leaf).name}{list(jnp.shape(leaf))}"


def _from_source(tree, scope: Scope, name: str, src: int):
    return jax.tree.map(lambda leaf: broadcasted(leaf, scope, name, src), tree)


def _summed(tree, scope: Scope, name: str):
    return jax.tree.map(lambda leaf: reduced(leaf, scope, name, ReduceOp.SUM), tree)


# --------------------------------------------------------------------------------------------------
# A Python object as bytes: JSON where that holds all of it, else a pickle, unless pickles are forbidden here.
# --------------------------------------------------------------------------------------------------

NO_PICKLE = "AXONML_JAX_NO_PICKLE"
"""Set to 1, no process unpickles what another one sends: `*_object` collectives carry JSON values alone."""

_JSON, _PICKLE = b"J", b"P"
_SWITCH = {"": False, "0": False, "1": True}


class OnlyPickled(ValueError):
    """An object that only a pickle can carry, where pickles are forbidden."""


def encoded(obj: Any, environ: Mapping[str, str] = os.environ) -> bytes:
    """Encodes an object as bytes: JSON, or else a pickle.

    Args:
      obj: None, a boolean, number or text, or lists and dicts (with text as keys) of these; anything else is pickled.
      environ: where `NO_PICKLE` may stand.

    Raises:
      OnlyPickled: naming what of it is none of these, when pickles are forbidden.

    >>> encoded({"step": 1}), decoded(encoded({"step": (1, 2)}))
    (b'J{"step": 1}', {'step': (1, 2)})
    """
    try:
        strange = _strange(obj)
        if strange is None:
            return _JSON + json.dumps(obj).encode()
    except (RecursionError, ValueError):  # holds itself, is nested without end, or has a number of thousands of digits
        strange = "the object is nested too deep or has too long a number"
    if pickles_forbidden(environ):
        raise OnlyPickled(strange)
    return _PICKLE + pickle.dumps(obj)


def decoded(data: bytes, environ: Mapping[str, str] = os.environ) -> Any:
    """Decodes an object from bytes. A pickle may run code while it is read.

    Raises:
      OnlyPickled: for a pickle, when these are forbidden.
    """
    if data[:1] == _JSON:
        return json.loads(data[1:])
    if pickles_forbidden(environ):
        raise OnlyPickled("a pickle came, from a process in which they are not forbidden")
    return pickle.loads(data[1:])


def pickles_forbidden(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `NO_PICKLE` is set.

    Raises:
      ValueError: when it is set to something else than 0 or 1.

    >>> pickles_forbidden({}), pickles_forbidden({"AXONML_JAX_NO_PICKLE": "1"})
    (False, True)
    """
    given = environ.get(NO_PICKLE, "")
    if given not in _SWITCH:
        raise ValueError(f"{NO_PICKLE}={given!r}: must be 1 (no pickles), or 0")
    return _SWITCH[given]


def _strange(value: Any, place: str = "") -> str | None:
    """Describes the part of a value that JSON does not give back as it was; None where there is none."""
    kind = type(value)
    if value is None or kind in (bool, int, float):
        return None
    if kind is str:
        return None if _is_unicode(value) else f"{place or 'it'} is text with half a character"
    if kind is list:
        parts = ((f"{place}[{number}]", each) for number, each in enumerate(value))
    elif kind is dict:
        if keys := [key for key in value if type(key) is not str or not _is_unicode(key)]:
            return f"{place or 'it'} has the key {keys[0]!r:.60}"
        parts = ((f"{place}[{key!r}]", each) for key, each in value.items())
    else:
        return f"{place or 'it'} is a {kind.__name__}"
    return next((found for at, each in parts if (found := _strange(each, at))), None)


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


# --------------------------------------------------------------------------------------------------
# One rank to one other, eagerly: `send` and `recv` meet and block; and `barrier`, where all ranks of a group meet.
# --------------------------------------------------------------------------------------------------


def send(x: ArrayLike, dst: int, group: Group) -> None:
    """Give x to the rank at position `dst`, which calls `recv`; return once it has it.

    Messages between two ranks arrive in the order sent. Two ranks that both send first get an error: let one of them
    receive first, or exchange with `send_recv`.

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
        _refuse_traced_exchange(name)
    return require_eager(name, group, x)


def _refuse_traced_exchange(name: str) -> NoReturn:
    raise ValueError(
        f"{name} cannot be traced: inside shard_map all ranks run one program, so that no rank sends while another "
        "receives. Use send_recv(x, pairs=[(source, target)], group), which every rank calls"
    )


def _shift(x, source: int, target: int):
    return jax.tree.map(lambda leaf: shift(leaf, "data", [(source, target)]), x)


# --------------------------------------------------------------------------------------------------
# Python objects between ranks, eagerly: as JSON or pickled, padded to one length, sent as bytes.
# --------------------------------------------------------------------------------------------------

_MAX_BYTES = 2**31 - 1
_REMEDY = (
    f"{NO_PICKLE}=1 lets JSON values pass alone: None, booleans, numbers, text, lists, and dicts with text as keys. Turn it "
    "into these, or give arrays to ax.all_gather or ax.broadcast"
)


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Gathers every rank's object on every rank, in the group's order.

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
    _refuse_traced_objects(name, group)
    own, why = _encoded(name, obj)
    sizes = np.asarray(all_gather(np.array([own.size], np.int32), group))
    _refuse_empty(name, [rank for rank, size in enumerate(sizes) if not size], why)
    rows = np.asarray(all_gather(_padded(own, sizes.max())[None], group))
    return [_decoded(name, rank, row[:size]) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))]


def broadcast_object(obj: Any, group: Group, src: int = 0) -> Any:
    """Gives every rank the object of the rank at position `src`.

    Args:
      obj: see `all_gather_object`; only that of `src` is read.
      group: see `all_gather_object`.
      src: the source's position in the group.

    Raises:
      ValueError: see `all_gather_object`; or when the position does not exist.

    Communicates: one broadcast of the size, one of the object (rounded up to a power of two).
    """
    name = "broadcast_object"
    eager = _refuse_traced_objects(name, group)
    own, why = _encoded(name, obj) if eager.rank == src else (np.zeros(0, np.uint8), "")
    size = int(broadcast(np.int32(own.size), group, src))
    _refuse_empty(name, [] if size else [src], why)
    whole = np.asarray(broadcast(_padded(own, size), group, src))
    return _decoded(name, src, whole[:size])


def _refuse_traced_objects(name: str, group: Group):
    if bound_scope(group) is not None:
        raise ValueError(f"{name} cannot be traced: objects are not arrays; call it outside shard_map, once per rank")
    return require_eager(name, group)


def _encoded(name: str, obj: Any) -> tuple[np.ndarray, str]:
    """Encodes an object; where it cannot be sent, no bytes, and the reason: the other ranks, which wait, must hear of it."""
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
            f"{name}: what position(s) {ranks} of the group give cannot be sent: {why or 'their own errors say why'}"
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
