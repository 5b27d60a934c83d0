"""An attention in pieces: queries read some keys after others, and what they read of each is merged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from axonml_jax.parallel.context.pieces.attention_dropout import WeightsDropout
from axonml_jax.parallel.context.pieces.tiles import Side, TileCut
from axonml_jax.parallel.context.visible import Visible


class PieceWork(Protocol):
    """What computes pieces of an attention: a frozen value, equal where it computes the same."""

    @property
    def sorts(self) -> bool:
        """Whether the positions of a piece's keys must grow."""
        ...

    @property
    def forward(self) -> Callable[..., "ReadPiece"]:
        """As `tile_attention.forward`."""
        ...

    @property
    def backward(self) -> Callable[..., tuple]:
        """As `tile_attention.backward`."""
        ...


@dataclass(frozen=True)
class Attention:
    """What is the same for all pieces of one attention.

    Letters of all shapes here: b rows, g key and value heads, r query heads of each, x places of a tile of queries, y of keys,
    d head size, e that of values, t tiles of queries, u tiles of keys.

    Attributes:
      visible: what positions see.
      segmented: whether queries see the keys of their own segment only.
      scale: of the scores.
      queries, keys: how places are cut into tiles.
      modify: `modify(scores [b, heads, x, y], where, *arrays) -> scores`: what is done to the scaled scores before what is not
        seen is left out; or None.
      dropout: of the weights, or None.
      axes: the mesh axes over which everything here is typed as varying.
      work: what computes its pieces.
    """

    visible: Visible
    segmented: bool
    scale: float
    queries: TileCut
    keys: TileCut
    modify: Callable[..., jax.Array] | None
    dropout: WeightsDropout | None
    axes: tuple[str, ...]
    work: PieceWork

    @property
    def skips(self) -> bool:
        """Whether a pair of tiles may have nothing to do."""
        return self.segmented or not self.visible.everything


class Given(NamedTuple):
    """What besides queries, keys and values an attention reads.

    Attributes:
      arrays: what `modify` reads.
      key: the dropout's key data; None without.
      first_head: the first of these query heads among all that `modify` and the dropout speak of.
    """

    arrays: tuple[jax.Array, ...] = ()
    key: jax.Array | None = None
    first_head: int | jax.Array = 0


class Where(NamedTuple):
    """Where a tile of scores is in the whole: its heads [h], and the positions of its queries [x] and keys [y]."""

    heads: jax.Array
    queries: jax.Array
    keys: jax.Array


class ReadPiece(NamedTuple):
    """What queries read of some keys.

    Attributes:
      out: [t, b, g, r, x, e]; 0 for a query that sees none of them.
      top: the highest score, [t, b, g, r, x]; -inf for such a query.
      total: the logarithm of the sum of exp(score - top), as top. Their sum would lose it where all scores are a very low
        number, which stands for keys that are not seen.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


def merged(one: ReadPiece, other: ReadPiece) -> ReadPiece:
    """What queries read of the keys of both."""
    top = jnp.maximum(one.top, other.top)
    shown = jnp.where(jnp.isneginf(top), 0, top)
    first, second = (jnp.exp(each.top - shown + each.total) for each in (one, other))
    total = jnp.where(first + second > 0, first + second, 1)
    out = (one.out * first[..., None] + other.out * second[..., None]) / total[..., None]
    return ReadPiece(out, top, jnp.log(total))


class KeptQueries(NamedTuple):
    """What the backward reads of the queries: q and out's gradient [t, b, g, r, x, d or e], `ReadPiece`'s top and total of all
    keys, and `out * gradient` summed over the head [t, b, g, r, x]."""

    q: jax.Array
    grad: jax.Array
    top: jax.Array
    total: jax.Array
    inner: jax.Array


def may_see(how: Attention, here: Side, there: Side) -> jax.Array:
    """Whether a query of a tile may see a key of another, as bounds of positions and segments tell; False is certain."""
    may = how.visible.may_see(here.first, here.last, there.first, there.last)
    if here.least is not None and here.most is not None and there.least is not None and there.most is not None:
        may = may & (here.least <= there.most) & (there.least <= here.most)
    return may
