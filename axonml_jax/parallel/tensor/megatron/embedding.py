"""`VocabParallelEmbedding`: a table whose rows are split over the ranks of an axis (Shoeybi et al. 2019)."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients.pairs import gather_from
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.flat import logits_of
from axonml_jax.parallel.tensor.products.lookup import own_rows, require_integers
from axonml_jax.parallel.tensor.products.options import EmbedOptions
from axonml_jax.parallel.tensor.products.region import entered, left
from axonml_jax.parallel.tensor.specs import check_shard, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import own_part


class VocabParallelEmbedding(nnx.Embed):
    """Rows of a [v, f] table, of which each rank of `axis` holds v/n; also the output layer that shares the table.

    Where `axis` is not bound it is `nnx.Embed`.

    Args:
      num_embeddings: v, the vocabulary; it must divide by the axis's n ranks, or `pads`.
      features: f.
      sequence_parallel: the result is this rank's part [..., s/n, f] of the sequence, and so is `attend`'s query.
      gather_output: `attend` returns all logits on every rank instead of this rank's.
      pads: v may leave a remainder: of ceil(v/n) rows on each rank those behind the last word are zeros, which no id means. The
        logits that `attend` leaves split then end with such that stand for no word: give the loss `words=v`.
      overlap: `attend` issues the reduction of the query's gradient before the product of the table's, to run behind it.
      axis: the mesh axis.
      rngs: stream `params`.
      **options: those of `nnx.Embed`.

    Raises:
      ValueError: in the call, when v does not divide or ids are no integers.

    Communicates: one all-reduce of the result forward (a reduce-scatter with sequence parallelism), nothing backward.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        pads: bool = False,
        overlap: bool = False,
        axis: str = "tensor",
        rngs: nnx.Rngs,
        **options: Unpack[EmbedOptions],
    ):
        given = options.get("embedding_metadata")
        options["embedding_metadata"] = metadata(PartitionSpec(axis, None), given, pads=pads)
        super().__init__(num_embeddings, features, rngs=rngs, **options)
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output
        self.overlap, self.axis, self.pads = overlap, axis, pads

    def __call__(self, ids: jax.Array, out_sharding=None) -> jax.Array:
        """Look rows up.

        Args:
          ids: integers [...], the same on every rank.
          out_sharding: as `nnx.Embed`; only where the axis is not bound.

        Returns:
          [..., f], the same on every rank; [..., s/n, f] of ids [..., s] with `sequence_parallel`.
        """
        axes = bound(self.axis)
        if not axes:
            return super().__call__(ids, out_sharding)
        require_integers("VocabParallelEmbedding", ids)
        (table,) = self.promote_dtype((self._shard(),), dtype=self.dtype, inexact=False)
        if self.num_embeddings == 1:  # as nnx.Embed: every id means the one row
            ids = jnp.zeros_like(ids)
        return left(
            own_rows(table, ids, axes, self.num_embeddings if self.pads else None),
            axes,
            sequence=self.sequence_parallel,
        )

    def attend(self, query: jax.Array, out_sharding=None) -> jax.Array:
        """Logits of every row by its product with the query: the tied output layer.

        Args:
          query: [..., f], the same on every rank; [..., s/n, f] with `sequence_parallel`.
          out_sharding: as `nnx.Embed.attend`; only where the axis is not bound.

        Returns:
          [..., v/n], this rank's logits, as `vocab_parallel_cross_entropy` takes them; [..., v] with `gather_output`.

        Communicates: one all-reduce of the query backward, or what sequence parallelism makes of it.
        """
        axes = bound(self.axis)
        if out_sharding is not None and not axes:
            return super().attend(query, out_sharding)
        table = self._shard() if axes else self.embedding[...]
        query, table = self.promote_dtype((query, table), dtype=self.dtype)
        if not axes:
            return logits_of(query, table)
        split = {"sequence": self.sequence_parallel, "overlap": self.overlap}
        logits = entered(logits_of, query, table, axes, **split)
        if not self.gather_output:
            return logits
        return gather_from(logits, axes)[..., : self.num_embeddings] if self.pads else gather_from(logits, axes)

    def _shard(self) -> jax.Array:
        table = own_part(self.embedding)
        name = f"VocabParallelEmbedding({self.num_embeddings}, {self.features}) embedding"
        whole = (self.num_embeddings, self.features)
        check_shard(name, table, whole, PartitionSpec(self.axis, None), pads=self.pads)
        return table
