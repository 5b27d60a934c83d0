"""Where split parameters and split activations begin and end in a traced program: equations known by name."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from axonml_jax.collectives.gradients.pairs import gather_from, own_slice, split_to
from axonml_jax.collectives.primitives import gather_whole
from axonml_jax.mesh.axes import BATCH_AXES
from axonml_jax.program.program import Program, read_program

MARK = "axonml_"
"""How the names of all calls begin that mean something to the library."""

GATHERED, OWN = f"{MARK}gathered_parameter", f"{MARK}own_part"
OPENED, CLOSED = f"{MARK}split_over_", f"{MARK}was_split_over_"
"""The names of the equations, each a `jit`; the last two are followed by the axis."""

Places = tuple[tuple[int, str], ...]
"""Which dims an array is split along, over which axis each: the outermost axis of a dim first."""


def marked_program(jaxpr: Any) -> Program:
    """A program with its marked calls kept and all others opened."""
    return read_program(jaxpr, lambda op, inputs: not op.label.startswith(MARK))


@dataclass(frozen=True, eq=False)
class SplitValue:
    """A gathered parameter that nobody has read yet."""

    value: Any
    places: Places

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The parameter, gathered once."""
        return _gather(self.value, self.places)

    def sliced(self) -> "SplitValue | None":
        """What a scan over its first dim reads, before it has the slices; None: they are no shards."""
        if any(dim == 0 for dim, _ in self.places):
            return None
        return SplitValue(self.value, tuple((dim - 1, axis) for dim, axis in self.places))


@dataclass(frozen=True, eq=False)
class Part:
    """What ranks of an axis have between two paired layers: every one a part, along a dim that is split."""

    value: Any
    axis: str


def gathered(shard: jax.Array, places: Places) -> jax.Array:
    """The whole of a parameter.

    Communicates: an all-gather; nothing backward, but over depth, where every rank has a batch of its own, a reduce-scatter.
    """
    return _named(GATHERED, _gather, places)(shard)


def part_of(whole: jax.Array, places: Places) -> jax.Array:
    """This rank's part of a whole parameter. Communicates: an all-gather of its gradient, but nothing over depth."""
    return _named(OWN, _part, places)(whole)


def opened(y: jax.Array, axis: str) -> jax.Array:
    """A layer's output of which every rank of an axis keeps a part."""
    return _named(OPENED + axis, _same, ())(y)


def closed(x: jax.Array, axis: str) -> jax.Array:
    """What another layer takes so."""
    return _named(CLOSED + axis, _same, ())(x)


def _gather(shard: jax.Array, places: Places) -> jax.Array:
    for dim, axis in reversed(places):
        if axis in BATCH_AXES:
            shard = gather_whole(shard, axis, dim, invarying=False)
        else:
            shard = gather_from(shard, axis, dim)
    return shard


def _part(whole: jax.Array, places: Places) -> jax.Array:
    for dim, axis in places:
        whole = own_slice(whole, axis, dim) if axis in BATCH_AXES else split_to(whole, axis, dim)
    return whole


def _same(x: jax.Array, places: Places) -> jax.Array:
    return x


@functools.cache
def _named(name: str, fn: Callable, places: Places) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array) -> jax.Array:
        return fn(x, places)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)
