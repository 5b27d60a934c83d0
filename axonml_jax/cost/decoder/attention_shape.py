"""`AttentionShape`: the matrices of a kind of attention and the sizes of its heads, which all counts and prices read."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from axonml_jax.parallel.tensor.latent.latent_config import LatentConfig

Split = Literal["column", "keys", "row", "whole"]


class Matrix(NamedTuple):
    """A linear layer of attention.

    Attributes:
      name: of the layer.
      fan_in, fan_out: its sizes.
      split: what the ranks that share heads have of it: "column", the outputs of their heads; "keys", likewise, but all of it
        where there are fewer heads of keys than ranks; "row", the inputs of their heads; "whole", all, outside of the layers
        that are split.
    """

    name: str
    fan_in: int
    fan_out: int
    split: Split

    @property
    def opens(self) -> bool:
        """Whether its outputs are heads."""
        return self.split in ("column", "keys")


class Scale(NamedTuple):
    """A norm inside attention.

    Attributes:
      name: of the norm.
      size: of what it norms.
      of_heads: whether that is a head, so that a rank norms those that it has; else it is whole on every rank.
    """

    name: str
    size: int
    of_heads: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Of one block.

    Attributes:
      matrices: all of them, in the order of their making.
      scales: norms inside.
      heads: of queries.
      kv_heads: of keys and values.
      query_size: numbers of a head's query, and of a key.
      value_size: numbers of a head's value.
      entering: numbers of each array of a position that opening layers read.
      shared: numbers of a position's key that heads share.
    """

    matrices: tuple[Matrix, ...]
    scales: tuple[Scale, ...]
    heads: int
    kv_heads: int
    query_size: int
    value_size: int
    entering: tuple[int, ...]
    shared: int = 0

    @property
    def queries(self) -> int:
        """Numbers of a position's queries."""
        return self.heads * self.query_size

    @property
    def mixed(self) -> int:
        """Numbers of what its heads return."""
        return self.heads * self.value_size

    @property
    def keys_and_values(self) -> int:
        """Numbers of its keys and values."""
        return self.kv_heads * (self.query_size + self.value_size)

    @property
    def opened(self) -> int:
        """Numbers that the layers make which a rank has its heads of."""
        return sum(matrix.fan_out for matrix in self.matrices if matrix.opens)

    @property
    def pressed(self) -> int:
        """Numbers that the layers make which every rank has whole: latents, and a key that heads share."""
        return sum(matrix.fan_out for matrix in self.matrices if matrix.split == "whole")

    @property
    def products(self) -> int:
        """Multiplications of the matrices per position: as many as they have elements."""
        return sum(matrix.fan_in * matrix.fan_out for matrix in self.matrices)

    @property
    def pair_products(self) -> int:
        """Multiplications for a position and one that it may see: of scores, and of weights with values."""
        return self.heads * (self.query_size + self.value_size)


def grouped_heads(
    hidden_size: int, heads: int, kv_heads: int, head_size: int, *, qk_norm: bool = False
) -> AttentionShape:
    """Multi-head attention, or of queries in groups that share a head of keys and values.

    >>> grouped_heads(8, 4, 2, 2).products == 2 * 8 * 8 + 2 * 8 * 4
    True
    """
    queries, keys = heads * head_size, kv_heads * head_size
    return AttentionShape(
        matrices=(
            Matrix("query", hidden_size, queries, "column"),
            Matrix("key", hidden_size, keys, "keys"),
            Matrix("value", hidden_size, keys, "keys"),
            Matrix("out", queries, hidden_size, "row"),
        ),
        scales=(Scale("query_norm", head_size), Scale("key_norm", head_size)) if qk_norm else (),
        heads=heads,
        kv_heads=kv_heads,
        query_size=head_size,
        value_size=head_size,
        entering=(hidden_size,),
    )


def latent_heads(hidden_size: int, heads: int, latent: LatentConfig) -> AttentionShape:
    """Attention whose keys and values are made of latents.

    >>> latent_heads(8, 2, LatentConfig(kv_rank=4, plain_size=3, rotary_size=2, value_size=3)).entering
    (8, 4)
    >>> latent_heads(8, 2, LatentConfig(kv_rank=4, plain_size=3, rotary_size=2, value_size=3, query_rank=5)).scales
    (Scale(name='query_norm', size=5, of_heads=False), Scale(name='key_value_norm', size=4, of_heads=False))
    """
    queries, made = heads * latent.query_size, heads * (latent.plain_size + latent.value_size)
    whole, scales, rank = [], [], latent.query_rank
    if rank is not None:
        whole, scales = [Matrix("query_down", hidden_size, rank, "whole")], [Scale("query_norm", rank, of_heads=False)]
    return AttentionShape(
        matrices=(
            *whole,
            Matrix("query", rank or hidden_size, queries, "column"),
            Matrix("key_value_down", hidden_size, latent.kv_rank + latent.rotary_size, "whole"),
            Matrix("key_value", latent.kv_rank, made, "column"),
            Matrix("out", heads * latent.value_size, hidden_size, "row"),
        ),
        scales=(*scales, Scale("key_value_norm", latent.kv_rank, of_heads=False)),
        heads=heads,
        kv_heads=heads,
        query_size=latent.query_size,
        value_size=latent.value_size,
        entering=(rank or hidden_size, latent.kv_rank),
        shared=latent.rotary_size,
    )
