"""What attention sends along an axis that splits positions (see docs/guides/context-parallelism.md): its methods' formulas."""

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp

from axonml_jax.cost.amounts import Many
from axonml_jax.cost.decoder.layer_flows import GATHER, SCATTER, Layers
from axonml_jax.cost.decoder.split_attention import SplitAttention
from axonml_jax.cost.flow import ATTENTION, Flow


def attention_flows(layers: Layers, attention: SplitAttention, documents: bool = False) -> Iterator[Flow]:
    """Of all blocks that the rank runs; the backward reads what the forward read once more, and recomputing repeats that.

    Args:
      layers: the rank's.
      attention: how it reads other ranks' positions.
      documents: whether rows hold several, whose numbers every rank then gathers.
    """
    if documents:
        yield from _segments(layers, attention)
    yield from _read(layers, attention, "forward", 1)
    yield from _read(layers, attention, "backward", 1 + layers.run.recomputes)
    if attention.gathers:
        yield _across(layers, attention, SCATTER, "backward", 1)
    else:
        wide = jnp.promote_types(layers.dtype, jnp.float32).name
        yield _across(layers, attention, "permute", "backward", attention.gradient_hops, wide)


def _read(layers: Layers, attention: SplitAttention, work: str, times: Many) -> Iterator[Flow]:
    """Heads for positions and back among neighbours, and keys and values of other groups."""
    exchanged = (attention.queries + attention.keys) * layers.tokens
    yield replace(
        layers.flow(
            "all_to_all",
            attention.split.axis,
            exchanged,
            work,
            calls=times * layers.parts.blocks,
            arrays=4,
            label=ATTENTION,
        ),
        group_size=attention.among,
    )
    if attention.gathers:
        yield _across(layers, attention, GATHER, work, times)
    else:
        yield _across(layers, attention, "permute", work, times * (attention.groups - 1))


def _segments(layers: Layers, attention: SplitAttention) -> Iterator[Flow]:
    """The documents of all positions, which the backward keeps."""
    axis, calls, whole = attention.split.axis, layers.parts.blocks, layers.tokens * attention.ranks
    yield layers.flow(GATHER, axis, whole, "forward", calls=calls, label=ATTENTION, dtype="int32")
    again = calls * layers.run.recomputes
    yield layers.flow(GATHER, axis, whole, "backward", calls=again, label=ATTENTION, dtype="int32")


def _across(layers: Layers, attention: SplitAttention, kind: str, work: str, times: Many, dtype: str = "") -> Flow:
    """Keys and values together, of one group or of all."""
    parts = attention.groups if attention.gathers else 1
    calls, elements = times * layers.parts.blocks, attention.keys * layers.tokens * parts
    flow = layers.flow(kind, attention.split.axis, elements, work, calls=calls, label=ATTENTION, dtype=dtype)
    return replace(flow, group_size=attention.groups, apart=attention.among)
