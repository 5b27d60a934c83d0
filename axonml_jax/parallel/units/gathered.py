"""Slices of stacked weights inside a scan: gathered when their trip begins, or some trips before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.collectives.varying import vary_like
from axonml_jax.parallel.units.body import Values


class Slices(NamedTuple):
    """How slices of stacked weights are read and their gradients reduced.

    Attributes:
      read: `(weights, shards, tie) -> (whole slices, tie)`: gathers nothing before `tie` is there.
      sync: `(weights, gradients of whole slices) -> gradients of the shards`.
      ahead: how many trips before its own a slice is read.
    """

    read: Callable[[Sequence[int], Sequence[Any], Any], tuple[list[Any], Any]]
    sync: Callable[[Sequence[int], Sequence[Any]], list[Any]]
    ahead: int = 0


@dataclass(frozen=True)
class Gathered:
    """A scan whose trips find the slices of their weights gathered.

    A trip gathers its own slices when it begins; or, to run `ahead` trips before them, those of a later trip, which the loop
    carries until then. The first are gathered before the loop. The last trips have no later one: they gather the first slices
    again, in vain, as every trip is the same program.

    Attributes:
      slices: how they are read.
      scanned: operand -> weight, where a trip reads its own slice.
      shards: this rank's part of every weight's stack.
      scope: a context with the scan's name and source line.
    """

    slices: Slices
    scanned: Mapping[int, int]
    shards: Values
    scope: Callable[[], Any]

    def scan(self, trip: Callable, carry: Any, xs: Any, params: Mapping[str, Any]) -> tuple[Any, Any]:
        """`jax.lax.scan` of `trip(carry, x, slices by operand) -> (carry, y)`.

        Args:
          trip: one trip.
          carry: to begin with.
          xs: what the trips read besides, stacked.
          params: of the scan: length, reverse, unroll.
        """
        if not self.scanned or not self.slices.ahead:
            own = {k: self.shards[weight] for k, weight in self.scanned.items()}

            def at_once(carry, x):
                own, x = x
                read, carry = self._read(own, carry)
                return trip(carry, x, read)

            with self.scope():
                return jax.lax.scan(at_once, carry, (own, xs), **params)
        length, reverse = params["length"], params["reverse"]
        ahead = min(self.slices.ahead, length)
        places = jnp.arange(length, dtype=jnp.int32)
        queue = []
        for place in range(ahead):
            read, carry = self._read(self._at(length - 1 - place if reverse else place), carry)
            queue.append(read)

        def later(state, x):
            (carry, queue), (place, x) = state, x
            read, carry = self._read(self._at((place + (-ahead if reverse else ahead)) % length), carry)
            carry, y = trip(carry, x, queue[0])
            return (carry, [*queue[1:], jax.tree.map(vary_like, read, queue[0])]), y

        with self.scope():
            (carry, _), ys = jax.lax.scan(later, (carry, queue), (places, xs), **params)
        return carry, ys

    def _at(self, place: Any) -> dict[int, Any]:
        """The shards' slices of one trip."""
        return {
            k: jax.lax.dynamic_index_in_dim(self.shards[weight], place, keepdims=False)
            for k, weight in self.scanned.items()
        }

    def _read(self, own: dict[int, Any], tie: Any) -> tuple[dict[int, Any], Any]:
        read, tie = self.slices.read([self.scanned[k] for k in own], list(own.values()), tie)
        return dict(zip(own, read, strict=True)), tie
