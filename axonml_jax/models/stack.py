"""`Stack`: equal layers whose parameters lie along a first dim, run in one loop."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.model.lora.sides import STACKED
from axonml_jax.parallel.tensor.specs import SPEC


class Stack(nnx.Module):
    """`layers` of one kind, one after the other, as a scan: traced and compiled once, however many they are.

    Its parameters are those of one layer with the layers along dim 0, under the names of a layer's own.

    Args:
      make: a function of `rngs` that makes a layer without random state.
      count: how many layers.
      rngs: stream `params`.
    """

    def __init__(self, make: Callable[..., nnx.Module], count: int, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), count)
        layer = nnx.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)
        for _, variable in nnx.iter_graph(layer):
            if not isinstance(variable, nnx.Param):
                continue
            written = variable.get_metadata()
            variable.set_metadata(**{STACKED: written.get(STACKED, 0) + 1})
            if (spec := written.get(SPEC)) is not None:
                variable.set_metadata(**{SPEC: PartitionSpec(None, *spec)})
        self.count, self.layer = count, layer

    def __call__(self, x: jax.Array, **same: Any) -> tuple[jax.Array, Any]:
        """x through all layers, which return it and something besides: (x, the layers' others along dim 0).

        Args:
          x: what goes through.
          **same: what every layer is given besides.
        """
        graph, params, state = nnx.split(self.layer, nnx.Param, ...)

        def step(x: jax.Array, own: Any):
            layer = nnx.merge(graph, *own)
            x, more = layer(x, **same)
            return x, (more, nnx.state(layer, nnx.Not(nnx.Param)))

        x, (more, state) = jax.lax.scan(step, x, (params, state))
        nnx.update(self.layer, state)
        return x, more

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        """The layers, each with its slice of the parameters."""
        graph, state = nnx.split(self.layer)
        for i in range(self.count):
            yield nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))


def stacked(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Arrays of numbered layers (`blocks/0/norm/scale`) as a stack of so many holds them (`blocks/layer/norm/scale`)."""
    found = {}
    for name, value in values.items():
        parts = re.fullmatch(r"blocks/(\d+)/(.*)", name)
        if parts is None:
            found[name] = value
        elif parts[1] == "0":
            found[f"blocks/layer/{parts[2]}"] = np.stack([values[f"blocks/{i}/{parts[2]}"] for i in range(count)])
    return found


def unstacked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `stacked`."""
    found = {}
    for name, value in values.items():
        if name.startswith("blocks/layer/"):
            found |= {name.replace("/layer/", f"/{i}/", 1): part for i, part in enumerate(np.asarray(value))}
        else:
            found[name] = value
    return found
