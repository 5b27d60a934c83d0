"""The dims of parameters without those that number layers or experts: what is a matrix, for masks and for Muon."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax

from axonml_jax._types import PyTree, path_name

Stacks = Mapping[str, int]
"""How many first dims of a parameter number layers or experts, by path (`Functional.stacked_dims`)."""

NO_STACKS: Stacks = MappingProxyType({})
"""Of a model that has none, or does not say it."""

MUON = "muon_weight_dimension_numbers"
"""Under which name Muon takes which dims of a parameter are a matrix (`optax.contrib.muon`)."""


def own_dims(params: PyTree, stacks: Stacks) -> PyTree:
    """How many dims each parameter of one layer, of one expert, has.

    >>> own_dims({"blocks": {"scale": jnp.ones((2, 8))}, "scale": jnp.ones(8)}, {"blocks/scale": 1})
    {'blocks': {'scale': 1}, 'scale': 1}
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.ndim(leaf) - stacks.get(path_name(path), 0), params)


def muon_dims(stacks: Stacks) -> Callable[[PyTree], PyTree]:
    """What Muon orthogonalizes: the last two dims of every matrix, layer by layer and expert by expert; None: no matrix."""

    def numbers(params: PyTree) -> PyTree:
        last_two = optax.contrib.MuonDimensionNumbers(-2, -1)
        return jax.tree.map(lambda dims: last_two if dims == 2 else None, own_dims(params, stacks))

    return numbers
