"""A linear layer that is several side by side, such as queries, keys and values, each split over one mesh axis."""

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index, swap_parts
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.bound_axes import bound, degree
from axonml_jax.parallel.tensor.megatron.column import ColumnParallelLinear


class FusedColumnLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose output is `blocks` equal parts behind each other, each of them split over the ranks.

    The kernel rests by plain columns, as every other; where it is multiplied with, ranks have swapped columns, so that each
    has its own of every block. Made by `auto_parallelize`.

    Attributes:
      blocks: how many.

    Communicates: besides, an all-to-all of the kernel's and the bias's shard forward, and of their gradients' backward.
    """

    blocks: int

    def columns(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel and the bias that this rank multiplies with."""
        kernel, bias = super().columns()
        own = lambda shard: own_of_blocks(shard, self.blocks, bound(self.axis))
        return own(kernel), None if bias is None else own(bias)


def own_of_blocks(shard: jax.Array, blocks: int, axes: AxisNames) -> jax.Array:
    """This rank's part of every block.

    Args:
      shard: [..., d/n], this rank's part of a dim that is cut plainly.
      blocks: k equal parts of that dim; k n divides d.
      axes: mesh axes of total size n.

    Returns:
      [..., d/n]: the rank's d/(k n) of the first block, then of the second, and so on.

    Communicates: one all-to-all of shard, filled up to a multiple of n of its k chunks; backward the same of its gradient.
    """
    count, rank = degree(axes), axis_index(axes)
    chunks = jnp.moveaxis(shard.reshape(*shard.shape[:-1], blocks, -1), -2, 0)  # [k, ..., d/(k n)]
    # Chunk g of all k n goes to rank g mod n; this rank has those from rank k on, and sends up to k/n of them to each.
    to, slot = jnp.arange(count), jnp.arange(-(-blocks // count))
    sent = (to[:, None] - rank * blocks) % count + count * slot
    valid = (sent < blocks).reshape(*sent.shape, *[1] * (chunks.ndim - 1))
    got = swap_parts(jnp.where(valid, chunks[jnp.minimum(sent, blocks - 1)], 0), axes)
    wanted = jnp.arange(blocks) * count + rank
    source = wanted // blocks
    place = (wanted - source * blocks) // count
    return jnp.moveaxis(got[source, place], 0, -2).reshape(shard.shape)
