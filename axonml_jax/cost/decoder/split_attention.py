"""`SplitAttention`: what a decoder's attention sends, and holds, of sequences whose positions are split over ranks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from axonml_jax.cost.amounts import Many, divided, either, least, most, varies
from axonml_jax.cost.decoder.configuration import DecoderLike, layer_degrees
from axonml_jax.parallel.context.context_split import ContextSplit
from axonml_jax.parallel.context.kernels.block_visits import BLOCK, LARGEST_PIECE
from axonml_jax.parallel.context.method import heads_and_gathers
from axonml_jax.parallel.context.pieces.tiles import block_for
from axonml_jax.parallel.plan import Plan
from axonml_jax.sharding.sequence_order import order_parts

SCORES = 5
"""Arrays as large as a tile's scores that its backward has at once: scores, weights, what comes into them, two to multiply."""


@dataclass(frozen=True, kw_only=True)
class SplitAttention:
    """How a block's attention reads positions of other ranks (see `context_attention`).

    Attributes:
      split: the mesh axis, the order of positions and the method.
      ranks: N, of the axis.
      among: U, neighbours that split heads; 1: none do.
      gathers: whether groups of them gather keys and values; else these go round.
      heads, kv_heads: of a rank's layers.
      query_size: of a head's query, and of a key.
      value_size: of a head's value.
      places: positions of a rank.
      windows: how many positions one sees, itself among them, and in how many blocks; None: all before it.
    """

    split: ContextSplit
    ranks: Many
    among: Many
    gathers: bool
    heads: Many
    kv_heads: Many
    query_size: int
    value_size: int
    places: Many
    windows: tuple[tuple[int | None, int], ...] = ((None, 1),)

    @classmethod
    def of(cls, plan: Plan, config: DecoderLike, degrees: Mapping[str, Many], length: int) -> "SplitAttention | None":
        """A plan's on a mesh, or on many at once: then the method must be named. None: ranks hold whole sequences.

        Raises:
          ValueError: for heads that the ranks cannot split; for a ring that a window cuts short, which is not priced.
        """
        every = (
            strategy.position_split(axis)
            for axis, strategy in plan.on(degrees).items()
            if not strategy.left_to_partitioner
        )
        split = next((each for each in every if each is not None), None)
        if split is None or (not varies(degrees[split.axis]) and degrees[split.axis] == 1):
            return None
        own = layer_degrees(config, degrees)
        ranks, cut = degrees[split.axis], own["row" if config.split == "grid" else "tensor"]
        heads, kv_heads = divided(config.num_heads, cut), most(1, divided(config.attention_shape.kv_heads, cut))
        if varies(ranks) or varies(cut):
            named: Any = {"gather": (1, True), "ring": (1, False), "ulysses": (ranks, True)}
            method = split.method
            among, gathers = named[method] if isinstance(method, str) else (method[0], method[1] == "gather")
        else:
            split_by = partial(
                heads_and_gathers, split.method, ranks=ranks, heads=heads, kv_heads=kv_heads, causal=True,
                places=length // ranks, order=split.order,
            )  # fmt: skip
            among, gathers = split_by(window=None)
            if gathers and config.window is not None:
                gathers = split_by(window=(config.window - 1, 0))[1]
        if config.window is not None and not gathers:
            raise ValueError(
                f"window={config.window} cuts the rounds of a ring short, which is not priced from a configuration yet: give "
                "context.method='gather' or 'ulysses', or trace the step: ax.explain(trainer, batch)"
            )
        return cls(
            split=split, ranks=ranks, among=among, gathers=gathers, heads=heads, kv_heads=kv_heads,
            query_size=config.attention_shape.query_size, value_size=config.attention_shape.value_size,
            places=divided(length, ranks),
            windows=tuple(Counter(map(config.window_of, range(config.num_layers))).items()),
        )  # fmt: skip

    @property
    def groups(self) -> Many:
        """R: of ranks that share heads, each of which holds other positions."""
        return divided(self.ranks, self.among)

    @property
    def queries(self) -> Many:
        """Elements of a position's queries and of what they read."""
        return self.heads * (self.query_size + self.value_size)

    @property
    def keys(self) -> Many:
        """Elements of a position's keys and values: Ulysses repeats heads of which there are too few."""
        return most(self.kv_heads, self.among) * (self.query_size + self.value_size)

    @property
    def gradient_hops(self) -> Many:
        """Permutes of the gradients of keys and values that go round, those that bring them home among them."""
        around = self.groups - 1
        # Contiguous, the last ranks' keys are done before the others': each come home in a round of its own.
        return either(self.groups > 1, 2 * around - 1, 0) if self.split.order == "contiguous" else around

    def computed_by(self, kernel: str) -> Many:
        """Whether a kernel that applies to whole sequences computes these: cuDNN only where ranks split heads alone."""
        if kernel != "splash":
            return self.groups == 1
        queries = self.places * self.among
        keys = self.places * self.ranks if self.gathers else queries
        return (queries % BLOCK == 0) & (queries * keys <= LARGEST_PIECE)

    def held(self, tokens: Many, itemsize: int, platform: str | None, kernel: Many = False) -> Many:
        """Bytes that a block needs beside what it keeps: keys and values of others, gradients, and a tile's scores.

        Args:
          tokens: of a rank's microbatch.
          itemsize: of activations.
          platform: as of `block_for`.
          kernel: whether one computes attention, and no scores are in memory.
        """
        wide = max(4, itemsize)
        parts = (itemsize + wide) * self.groups if self.gathers else 2 * itemsize + 3 * wide
        tile = self.tile(platform)
        scores = tokens / self.places * divided(self.heads, self.among) * tile * tile
        scores = either(kernel, 0, scores)
        # What a group exchanges is there before and after; the gradients of queries are added up wide.
        exchanged = either(self.among > 1, 2 * itemsize * (self.queries + self.keys), 0)
        reading = divided(self.queries * (wide + 2 * itemsize), 2) + exchanged
        return tokens * (self.keys * parts + reading) + SCORES * wide * scores

    def tile(self, platform: str | None) -> Many:
        """Positions of a tile of scores."""
        chunk = divided(self.places, order_parts(self.split.order, 1))
        return least(chunk, block_for(platform or ""))

    def span(self, platform: str | None) -> Many:
        """Positions from a tile's first to its last: striped, those of the other ranks lie between."""
        return self.tile(platform) * (self.ranks if self.split.order == "striped" else 1)

    @property
    def balance(self) -> Many:
        """What the busiest rank computes of causal attention, over the mean; ranks that split heads compute the same.

        The last of contiguous ones is the busiest, less so in windows. In other orders windows change next to nothing.
        """
        length = self.places * self.ranks
        if self.split.order == "striped":
            return (length + self.ranks - self.among + 1) / (length + 1)
        if self.split.order == "zigzag":
            return 1.0
        before = length - self.places * self.among
        pairs = lambda count: sum(blocks * _pairs(count, window) for window, blocks in self.windows)
        return self.groups * (1 - pairs(before) / pairs(length))


def _pairs(count: Many, window: int | None) -> Many:
    """Pairs of positions of which one sees the other, of the first so many positions of a sequence."""
    full = count if window is None else least(count, window)
    return full * (full + 1) / 2 + (count - full) * (window or 0)
