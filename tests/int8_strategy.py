"""A lossy strategy with a state, as a user writes one: shards travel as int8, and what is lost is added to the next step's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import axonml_jax as ax


def quantized(x):
    scale = jnp.maximum(jnp.max(jnp.abs(x), initial=0), 1e-30) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


@dataclass(frozen=True)
class Int8Shard(ax.AbstractStrategy, ax.Stateful):
    """Communicates: per step one all-gather of int8 values and of a scale per leaf, one reduce-scatter of gradients."""

    exact = False

    @property
    def role(self):
        return ax.Role(parameters="sharded", reads="start", reduces="step")

    def spec(self, layout, axis, axis_size):
        return ax.Shard().spec(layout, axis, axis_size)

    def gather(self, shard, layout, axis):
        if layout.dim_of(axis) is None:
            return ax.Shard().gather(shard, layout, axis)
        parts, scales = (jax.lax.all_gather(x, axis) for x in quantized(shard))
        values = parts * scales.reshape(-1, *[1] * shard.ndim)
        whole = jnp.concatenate(list(values.astype(shard.dtype)), axis=layout.dim_of(axis))
        return whole[tuple(slice(n) for n in layout.shape or (1,))].reshape(layout.shape)

    def sync(self, grad, layout, axis):
        return ax.Shard().sync(grad, layout, axis)

    def gather_flows(self, elements, layout, axis, ranks, dtype):
        sent = lambda n, kind: ax.Transfer(kind="all_gather", elements=n * ranks, ranks=ranks, dtype=kind)
        return () if layout.dim_of(axis) is None else (sent(elements, "int8"), sent(1, dtype))

    def sync_flows(self, elements, layout, axis, ranks, dtype):
        return ax.Shard().sync_flows(elements, layout, axis, ranks, dtype)

    def round_trip(self, shard, layout, axis):
        values, scale = quantized(shard)
        return shard if layout.dim_of(axis) is None else (values * scale).astype(shard.dtype)

    def init_state(self, param):
        return {"error": jnp.zeros_like(param)}

    def to_read(self, shard, state, layout, axis):
        return shard + state["error"]

    def after_update(self, shard, state, layout, axis, *, before):
        sent = self.to_read(before, state, layout, axis)
        return shard, {"error": sent - self.round_trip(sent, layout, axis)}
