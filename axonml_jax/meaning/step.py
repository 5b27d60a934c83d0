"""`Step`: what one group of ranks does for an operation."""

from collections.abc import Sequence
from typing import NamedTuple

from axonml_jax.meaning.places import SUM, Place


class Step(NamedTuple):
    """What one group of ranks does for an operation.

    Attributes:
      wanted: the places that its operands must have.
      made: those of its results.
      act: how ranks join what each of them makes of its part (`acts.py`); "": there is nothing to join.
    """

    wanted: tuple[Place, ...]
    made: tuple[Place, ...]
    act: str = ""


def settled_sums(places: Sequence[Place]) -> list[Place]:
    """The places with every sum completed."""
    return [None if place == SUM else place for place in places]
