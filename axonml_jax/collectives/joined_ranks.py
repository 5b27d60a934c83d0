"""Over which ranks one microbatch is split, as the code around a model says it: for layers that join values of all tokens."""

import contextlib
from collections.abc import Iterator

import jax

from axonml_jax.compat.around import manual_axes
from axonml_jax.mesh.axes import BATCH_AXES

JOINS = "joins_ranks"
"""The class attribute, True, of a module that asks for `joined_ranks`."""

# Known to JAX: a function under an inner `jax.jit` that was traced over some axes is traced anew over others.
_JOINED = jax.make_user_context(None)


@contextlib.contextmanager
def joined_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Within it `joined_ranks` are those along `axes`, of which some may not be bound."""
    with _JOINED(axes):
        yield


def joined_ranks() -> tuple[str, ...]:
    """The axes over which this code's microbatch is split among ranks that train one model; none outside `shard_map`.

    Inside `shard_map`, but under no plan that says which, those of the library's axes that split rows or positions.
    """
    if (axes := _JOINED.value) is None:
        there = manual_axes()
        return tuple(axis for axis in (*BATCH_AXES, "context") if axis in there)
    return tuple(axis for axis in axes if _is_bound(axis))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True
