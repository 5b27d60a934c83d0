"""Attention that is recognised in the traced code of a model, computed across the ranks that share its sequences."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axonml_jax._types import is_array
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.compat.jaxpr import trace
from axonml_jax.parallel.context.context_attention import context_attention
from axonml_jax.parallel.context.found_scores import across_problem, options_of
from axonml_jax.parallel.context.method import Method
from axonml_jax.program.attention.found_attention import FoundAttention, Recognised
from axonml_jax.program.attention.recognise import find_attention
from axonml_jax.program.attention.rewrite import Reads, replaced
from axonml_jax.program.program import read_program


def attending_across(fun: Callable[..., Any], axis: str, method: Method, *, check_vma: bool) -> Callable[..., Any]:
    """`fun` with the attention that is recognised in it computed by `context_attention` over a mesh axis.

    Args:
      fun: takes pytrees of arrays and returns one. It is traced on whole sequences, inside `shard_map` over other axes than
        this one, which is left to XLA's partitioner.
      axis: the mesh axis that splits its sequences.
      method: see `context_attention`.
      check_vma: as of the `shard_map` around.

    Returns:
      The same function. What it does across positions besides, the partitioner computes as it sees fit.
    """

    def call(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        arrays = [leaf for leaf in leaves if is_array(leaf)]

        def flat(*arrays: Any) -> Any:
            given = iter(arrays)
            return fun(*treedef.unflatten([next(given) if is_array(leaf) else leaf for leaf in leaves]))

        traced = trace(flat, *arrays)
        found = find_attention(read_program(traced.jaxpr))
        chosen = splittable(found, jax.sharding.get_abstract_mesh().shape[axis])
        if not chosen:
            return fun(*args)

        def instead(each: FoundAttention, q: jax.Array, k: jax.Array, v: jax.Array, given: Reads) -> jax.Array:
            return _attend(each, q, k, v, given, axis, method, check_vma)

        return traced.out_tree.unflatten(replaced(found, instead, chosen)(arrays))

    return call


def splittable(found: Recognised, ranks: int) -> list[FoundAttention]:
    """Those attentions that `context_attention` computes as they are told."""
    return [each for each in found.replaceable if across_problem(each, ranks) is None]


def _attend(
    found: FoundAttention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    given: Reads,
    axis: str,
    method: Method,
    check_vma: bool,
) -> jax.Array:
    """[batch, query, heads, size] and so on of whole sequences -> [batch, query, heads, value]."""
    options, arrays, key = options_of(found, given)
    split, whole = PartitionSpec(None, axis), PartitionSpec()

    def across(q: jax.Array, k: jax.Array, v: jax.Array, arrays: tuple, key: Any) -> jax.Array:
        assert axis_size(axis) > 1
        masks = {} if key is None else {"dropout_key": key}
        return context_attention(
            q, k, v, axis=axis, method=method, order="contiguous", arrays=arrays, **masks, **options
        )

    return jax.shard_map(
        across,
        in_specs=(split, split, split, whole, whole),
        out_specs=split,
        axis_names={axis},
        check_vma=check_vma,
    )(q, k, v, arrays, key)
