"""`ParallelEmbedding`: an embedding table over a row x col x depth grid of ranks (AxoNN)."""

from dataclasses import replace
from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from axonml_jax.collectives.gradients.pairs import gather_from, reduce_from, split_to
from axonml_jax.collectives.primitives import gather_whole
from axonml_jax.parallel.tensor.axonn.grid import Grid
from axonml_jax.parallel.tensor.axonn.linear3d import ROW_COL_DEPTH
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.products.flat import logits_of
from axonml_jax.parallel.tensor.products.lookup import own_rows, require_integers
from axonml_jax.parallel.tensor.products.options import EmbedOptions
from axonml_jax.parallel.tensor.products.ordered import Prefetch
from axonml_jax.parallel.tensor.specs import check_shard, metadata
from axonml_jax.parallel.tensor.whole.whole_reads import own_part


class ParallelEmbedding(nnx.Embed):
    """Rows of a [v, f] table split over three axes: v over col and depth, f over row. Ids are split over depth.

    Where none of the axes is bound it is `nnx.Embed`.

    Args:
      num_embeddings: v; it must divide by col x depth (by row x depth when transposed).
      features: f; they must divide by row (by col when transposed).
      transpose: swaps row and col; a `ParallelLinear` after it has the other value.
      scatter_input: `attend`'s query is whole over row and col; False: it is this rank's features [..., f/row].
      gather_output: results are whole over row and col; False: this rank's part.
      overlap: `attend` issues the all-reduce of the query's gradient before the product of the table's, to run behind it.
      axes: the names of row, col and depth; those that are not bound do not split anything.
      rngs: stream `params`.
      **options: those of `nnx.Embed`.

    Raises:
      ValueError: in the call, when sizes do not divide or ids are no integers.

    Communicates: forward an all-gather of the table's block over depth and an all-reduce of the result over col; backward
    a reduce-scatter of the block over depth. `gather_output`: an all-gather of the result over row.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        transpose: bool = False,
        scatter_input: bool = True,
        gather_output: bool = True,
        overlap: bool = False,
        axes: tuple[str, str, str] = ROW_COL_DEPTH,
        rngs: nnx.Rngs,
        **options: Unpack[EmbedOptions],
    ):
        self.grid = Grid.of(axes, transpose)
        options["embedding_metadata"] = metadata(self.grid.weight(), options.get("embedding_metadata"))
        super().__init__(num_embeddings, features, rngs=rngs, **options)
        self.scatter_input, self.gather_output, self.overlap = scatter_input, gather_output, overlap

    def __call__(self, ids: jax.Array, out_sharding=None) -> jax.Array:
        """Look rows up.

        Args:
          ids: integers [...], the same over row and col.
          out_sharding: as `nnx.Embed`; only where no axis is bound.

        Returns:
          [..., f], the same over row and col; [..., f/row] without `gather_output`.
        """
        grid = self.grid
        if not grid.is_bound:
            return super().__call__(ids, out_sharding)
        require_integers("ParallelEmbedding", ids)
        (table,) = self.promote_dtype((self._shard(),), dtype=self.dtype, inexact=False)
        if depth := bound(grid.depth):
            # The backward of a lookup does not read the table, so nothing is gathered again.
            with jax.named_scope("axonml.parameters"):
                table = gather_whole(table, depth, 0, invarying=False)
        if self.num_embeddings == 1:  # as nnx.Embed: every id means the one row
            ids = jnp.zeros_like(ids)
        into = bound(grid.into)
        rows = own_rows(table, ids, into)
        rows = reduce_from(rows, into) if into else rows
        return grid.gather_output(rows) if self.gather_output else rows

    def attend(
        self,
        query: jax.Array,
        out_sharding=None,
        *,
        gather_output: bool | None = None,
        prefetch: Prefetch | None = None,
    ) -> jax.Array:
        """Logits of every row by its product with the query: the tied output layer.

        Args:
          query: [..., f], the same over row and col; [..., f/row] without `scatter_input`.
          out_sharding: as `nnx.Embed.attend`; only where no axis is bound.
          gather_output: whether these logits are whole; None: as all results of the layer.
          prefetch: the order in which weights are gathered over depth, each while the layer before computes.

        Returns:
          [..., v], the same over row and col; [..., v/col] without `gather_output`.

        Communicates: as a transposed `ParallelLinear`.
        """
        grid = self.grid
        if not grid.is_bound:
            return super().attend(query, out_sharding)
        query, table = self.promote_dtype((query, self._shard()), dtype=self.dtype)
        out, into = bound(grid.out), bound(grid.into)
        query = split_to(query, out) if out and self.scatter_input else query
        swapped = replace(grid, into=grid.out, out=grid.into)
        products = lambda x, rows: (logits_of(x, rows[0]),)
        (logits,) = swapped.products(products, query, [table], overlap=self.overlap, prefetch=prefetch)
        gathered = self.gather_output if gather_output is None else gather_output
        return gather_from(logits, into) if into and gathered else logits

    def _shard(self) -> jax.Array:
        table = own_part(self.embedding)
        name = f"ParallelEmbedding({self.num_embeddings}, {self.features}) embedding"
        check_shard(name, table, (self.num_embeddings, self.features), self.grid.weight())
        return table
