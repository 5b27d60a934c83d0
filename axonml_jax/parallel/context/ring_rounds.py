"""In which rounds which ranks of a ring compute, and what they send: device-free, known before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axonml_jax.parallel.context.visible import Visible

Pairs = tuple[tuple[int, int], ...]
"""(source, target) ranks of one permute."""

Spans = Sequence[tuple[int, int]]
"""The first and the last position of each chunk that a rank holds."""


@dataclass(frozen=True)
class RingRounds:
    """The rounds of a ring: in round r rank i has the keys and values of rank i - r, if it or one behind it needs them.

    Attributes:
      needed: `needed[i][j]`: whether queries of rank i may see keys of rank j.

    >>> rounds = RingRounds.of(Visible(causal=True), [[(0, 1)], [(2, 3)], [(4, 5)]])
    >>> rounds.count, rounds.keys(1), rounds.keys(2)
    (3, ((0, 1), (1, 2)), ((1, 2),))
    """

    needed: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, visible: Visible, queries: Sequence[Spans], keys: Sequence[Spans] | None = None) -> "RingRounds":
        """Of ranks whose queries, and whose keys where they are others, lie in these spans."""
        may = lambda own, other: any(bool(visible.may_see(*a, *b)) for a in own for b in other)
        sources = list(enumerate(queries if keys is None else keys))
        return cls(tuple(tuple(i == j or may(own, other) for j, other in sources) for i, own in enumerate(queries)))

    @property
    def ranks(self) -> int:
        """How many ranks."""
        return len(self.needed)

    def computing(self, round: int) -> tuple[int, ...]:
        """The ranks that compute in a round."""
        return tuple(i for i in range(self.ranks) if self.needed[i][(i - round) % self.ranks])

    def _rounds_of(self, source: int) -> list[int]:
        """The rounds after the first in which a rank's keys are needed."""
        return [r for r in range(1, self.ranks) if self.needed[(source + r) % self.ranks][source]]

    @property
    def count(self) -> int:
        """How many rounds there are."""
        return 1 + max((r for source in range(self.ranks) for r in self._rounds_of(source)), default=0)

    def keys(self, round: int) -> Pairs:
        """Who sends keys and values on before a round."""
        return self._step(round, lambda rounds: 1 <= round <= max(rounds))

    def gradients(self, round: int) -> Pairs:
        """Who sends the gradients of keys and values on, together with these, before a round."""
        return self._step(round, lambda rounds: min(rounds) < round <= max(rounds))

    def home(self, round: int) -> Pairs:
        """Who sends them to the rank whose keys they are, after a round, which is the last that needs them."""
        ends = {source: rounds for source in range(self.ranks) if (rounds := self._rounds_of(source))}
        return tuple(((source + round) % self.ranks, source) for source, at in ends.items() if max(at) == round)

    def _step(self, round: int, moves: Callable[[list[int]], bool]) -> Pairs:
        sources = [source for source in range(self.ranks) if (rounds := self._rounds_of(source)) and moves(rounds)]
        return tuple(((source + round - 1) % self.ranks, (source + round) % self.ranks) for source in sources)
