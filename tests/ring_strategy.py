"""A strategy as a user writes one: FSDP whose gather is a ring of permutes, and whose sync is the ring backwards."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import axonml_jax as ax


@dataclass(frozen=True, kw_only=True)
class RingShard(ax.AbstractStrategy):
    """Communicates: N-1 permutes of a shard per gather and per sync."""

    prefetch: int = 0

    @property
    def role(self):
        return ax.Role(parameters="sharded", reads="use", reduces="microbatch")

    def spec(self, layout, axis, axis_size):
        return ax.Shard().spec(layout, axis, axis_size)

    def gather(self, shard, layout, axis):
        if (dim := layout.dim_of(axis)) is None:
            return jax.lax.pcast(shard, axis, to="varying") if not jax.typeof(shard).mat.varying else shard
        ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        parts = [shard]
        for _ in range(ranks - 1):  # the next part comes from the rank behind
            parts.append(jax.lax.ppermute(parts[-1], axis, [(i, (i + 1) % ranks) for i in range(ranks)]))
        order = jnp.mod(rank - jnp.arange(ranks), ranks)  # parts[order[j]] is rank j's
        whole = jnp.concatenate(list(jnp.take(jnp.stack(parts), order, axis=0)), axis=dim)
        size = layout.shape[dim] * ranks // layout.parts[dim] if layout.shape else 1
        whole = jax.lax.slice_in_dim(whole, 0, size, axis=dim)
        return whole if layout.shape else whole[0]

    def sync(self, grad, layout, axis):
        if (dim := layout.dim_of(axis)) is None:
            return jax.lax.psum(grad, axis)
        ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        grad = grad if layout.shape else grad[None]
        more = layout.shard[dim] * ranks - grad.shape[dim]
        grad = jnp.pad(grad, [(0, more if d == dim else 0) for d in range(grad.ndim)])
        parts = jnp.stack(jnp.split(grad, ranks, axis=dim))
        total = parts[jnp.mod(rank - 1, ranks)]
        for step in range(2, ranks + 1):  # the sum of one part travels on, and every rank adds its own
            total = jax.lax.ppermute(total, axis, [(i, (i + 1) % ranks) for i in range(ranks)])
            total = total + parts[jnp.mod(rank - step, ranks)]
        return total

    def gather_flows(self, elements, layout, axis, ranks, dtype):
        sent = ax.Transfer(kind="permute", elements=elements, ranks=ranks, dtype=dtype)
        return () if layout.dim_of(axis) is None else (sent,) * (ranks - 1)

    def sync_flows(self, elements, layout, axis, ranks, dtype):
        sent = ax.Transfer(kind="permute", elements=elements // ranks, ranks=ranks, dtype=dtype)
        return () if layout.dim_of(axis) is None else (sent,) * (ranks - 1)
