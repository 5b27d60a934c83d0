"""`RoutedExperts`: how a decoder's tokens travel to experts on other ranks, and what travels where all get as many."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from axonml_jax.cost.amounts import Many, divided, either, least, most, varies
from axonml_jax.cost.decoder.configuration import DecoderLike, gated
from axonml_jax.parallel.experts.dispatch import RAGGED_PRODUCTS, SLACK, capacity_of

RANKS = "expert"
"""The mesh axis over which experts lie."""


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """What `ParallelMoE` decides about a rank's microbatch (see `Dispatch`).

    Attributes:
      ranks: N, of the axis.
      experts: E.
      top_k: k.
      tokens: T, of a rank's microbatch.
      width, inner: h, and f of one expert on a rank.
      gates: whether experts multiply two inner products.
      gathers: 1 where all ranks get all tokens, else 0.
      ragged: whether only filled slots travel.
      kernel: whether one kernel multiplies all experts' rows.
      capacity: slots of an expert for a rank's tokens; None: no choice is dropped.
    """

    ranks: Many
    experts: int
    top_k: int
    tokens: Many
    width: int
    inner: Many
    gates: bool
    gathers: Many
    ragged: bool
    kernel: bool
    capacity: Many | None

    @classmethod
    def of(
        cls, config: DecoderLike, degrees: Mapping[str, Many], tokens: Many, platform: str | None
    ) -> "RoutedExperts | None":
        """A configuration's on a mesh, or on many at once. None: it has no experts.

        Args:
          config: the model.
          degrees: of the mesh.
          tokens: of a rank's microbatch.
          platform: what is compiled for, which decides for `dispatch="auto"`.
        """
        if (own := config.experts) is None:
            return None
        ranks, factor = degrees.get(RANKS, 1), own.capacity_factor
        dropless = factor is None
        gathers = {"auto": (ranks > 1) & (ranks <= own.top_k), "gather": ranks > 1}.get(own.dispatch, False)
        return cls(
            ranks=ranks, experts=own.num_experts, top_k=own.top_k, tokens=tokens, width=config.hidden_size,
            inner=divided(own.inner_size or config.mlp_size, degrees.get("tensor", 1)), gates=gated(config, own),
            gathers=either(dropless & gathers, 1, 0),
            ragged=dropless and (own.dispatch == "ragged" or (own.dispatch == "auto" and platform in RAGGED_PRODUCTS)),
            kernel=platform in RAGGED_PRODUCTS,
            capacity=None if factor is None else _capacity(tokens, own.top_k, own.num_experts, factor),
        )  # fmt: skip

    @property
    def pairs(self) -> Many:
        """Choices of a rank's tokens."""
        return self.tokens * self.top_k

    @property
    def slots(self) -> Many:
        """Rows that a rank sends in a round, for all ranks together, filled or not."""
        if self.capacity is not None:
            return self.experts * self.capacity
        even = -divided(-_floor(SLACK * self.pairs), self.ranks)
        most_of_rank = self.tokens * least(self.top_k, divided(self.experts, self.ranks))
        return self.ranks * most(1, least(even, most_of_rank))

    @property
    def rows(self) -> Many:
        """Rows for which a rank's experts have room: of a round, or of gathered tokens in a round."""
        local = divided(self.experts, self.ranks)
        gathered = least(_floor(SLACK * self.pairs), self.ranks * self.tokens * least(self.top_k, local))
        alone = either(self.ranks > 1, self.slots, self.pairs) if self.capacity is None else self.slots
        return either(self.gathers > 0, most(1, gathered), alone)

    @property
    def empty(self) -> Many:
        """Rows of a round that carry no token where all experts get as many."""
        return most(0, self.slots - self.pairs)

    @property
    def padded(self) -> Many:
        """Rows that a rank's experts multiply, over those of its share of tokens; 0: as many as other ranks send."""
        return either(self.ranks > 1, 0.0, 1.0) if self.capacity is None else self.slots / self.pairs

    def kept(self, itemsize: int, *, redone: bool = False) -> Many:
        """Bytes that one layer keeps for its backward: rows as they came and as they went back, and inner products.

        Args:
          itemsize: of activations.
          redone: whether the backward redoes elementwise work.
        """
        everyone = either(self.gathers > 0, self.ranks * self.tokens * self.width * itemsize, 0)
        wide = max(4, itemsize)  # what comes back is weighed in at least float32
        if self.capacity is None:
            inner = (2 if self.gates else 1) * (self.rows + self.block)
        else:  # as of a dense layer
            inner = ((2 if redone else 5) if self.gates else (1 if redone else 3)) * self.rows
        return everyone + self.rows * self.width * (2 * itemsize + wide) + inner * self.inner * itemsize

    def held(self, itemsize: int) -> Many:
        """Bytes that a layer needs beside that while it computes: gradients of rows, and of a later round all it keeps."""
        if self.capacity is not None:
            return 0
        grads = 3 * (self.rows + self.block) * self.width + self.block * self.inner
        return grads * itemsize + either(self.ranks > 1, self.kept(itemsize), 0)

    @property
    def block(self) -> Many:
        """Rows of the largest block in which a loop over experts multiplies; 0 where a kernel does."""
        local = divided(self.experts, self.ranks)
        return either(self.kernel, 0, 2 * -divided(-self.pairs, local))


def _floor(amount: Many) -> Many:
    return divided(amount, 1) if varies(amount) else int(amount)


def _capacity(tokens: Many, top_k: int, experts: int, factor: float) -> Many:
    """`capacity_of` many numbers of tokens at once too."""
    if not varies(tokens):
        return capacity_of(tokens, top_k, experts, factor)
    share = Fraction(str(factor)) * top_k / experts
    return most(1, least(tokens, -divided(-tokens * share.numerator, share.denominator)))
