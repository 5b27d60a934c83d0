"""Attention in other people's models, recognised in their programs, computed across the ranks of `context`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axonml_jax.attention.found import (
    Added,
    Band,
    Cast,
    Chunks,
    Compared,
    Digit,
    FoundAttention,
    KeyMask,
    MaskArray,
    Masked,
    Operand,
    Prefix,
    QueryMask,
    Recognised,
    Scaled,
    Tanh,
    sees,
)
from axonml_jax.attention.recognise import find_attention
from axonml_jax.attention.rewrite import Reads, replaced
from axonml_jax.base import is_array
from axonml_jax.collectives.primitives import axis_size
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.order import mesh_around
from axonml_jax.layers.context import context_attention
from axonml_jax.layers.pieces import Where
from axonml_jax.program.program import read_program
from axonml_jax.strategies.strategy import Method

# --------------------------------------------------------------------------------------------------
# What a found attention does to its scores, block by block: the options by which `context_attention` computes it.
# --------------------------------------------------------------------------------------------------


def across_problem(found: FoundAttention, ranks: int) -> str | None:
    """Why `context_attention` cannot compute a recognised attention; None if it can."""
    sizes = found.sizes
    if min(sizes["query"], sizes["key"]) < ranks:
        return f"{sizes['query']} queries or {sizes['key']} keys are fewer than {ranks} ranks"
    if found.gates:
        return "its weights are multiplied with arrays, or those of some queries set to 0"
    if found.zero and not all(isinstance(term, Band) for term in found.mask):
        return "queries that see no key get 0"
    if found.dropout is not None and not _draws_alike(found):
        return "its dropout draws bits in an order of its own"
    return None


def options_of(
    found: FoundAttention, given: Reads, padded: bool = False
) -> tuple[dict[str, Any], tuple[jax.Array, ...], Any]:
    """The options of `context_attention`, the arrays that they read, and the dropout's key.

    Blocks are left out where positions alone hide them. Where other rules hide keys too, a query might see none, and its
    softmax then depends on all keys' scores: then no block is left out.
    """
    operands = list(dict.fromkeys(_operands(found)))
    arrays = tuple(given(operand) for operand in operands)
    bands = [term for term in found.mask if isinstance(term, Band)]
    rules: dict[str, Any] = {}
    if len(bands) == len(found.mask) and found.sizes["query"] == found.sizes["key"] and all(map(_sees_itself, bands)):
        rules = _rules(bands, found.sizes["query"])
    modify = _modify(found, operands, padded)
    options = {"scale": 1.0, "score_mod": modify, **rules}
    if found.dropout is None:
        return options, arrays, None
    return (
        options | {"dropout_rate": found.dropout.rate, "dropout_dims": _dropout_dims(found)},
        arrays,
        given.value(found.dropout.key),
    )


def _rules(bands: list[Band], length: int) -> dict[str, Any]:
    before = min([band.before for band in bands if band.before is not None], default=None)
    after = min([band.after for band in bands if band.after is not None], default=None)
    if before is None:
        return {"causal": True} if after == 0 else {}
    return {"window": (before, length if after is None else after)}


def _sees_itself(band: Band) -> bool:
    return (band.before is None or band.before >= 0) and (band.after is None or band.after >= 0)


def _operands(found: FoundAttention):
    for change in found.changes:
        match change:
            case Scaled(by) | Added(by):
                if isinstance(by, Operand):
                    yield by
            case Masked(terms):
                for term in terms:
                    match term:
                        case KeyMask(mask) | QueryMask(mask) | MaskArray(mask):
                            yield mask
                        case Compared(_, queries, keys):
                            yield from (queries, keys)
                        case Band() | Prefix() | Chunks():
                            pass


def _modify(found: FoundAttention, operands: list[Operand], padded: bool) -> Callable[..., jax.Array]:
    """A function that changes a block's scores [b, h, x, y] as the model does; with `padded` it hides keys behind the last."""

    def modify(scores: jax.Array, where: Where, *arrays: jax.Array) -> jax.Array:
        held = dict(zip(operands, arrays, strict=True))
        read = lambda operand: _of_block(held[operand], operand, where)
        number = lambda by: read(by) if isinstance(by, Operand) else jnp.asarray(by, scores.dtype)
        wide, scores, whole = scores.dtype, scores.astype(found.scores_dtype), found.sizes["key"]
        for change in found.changes:
            match change:
                case Scaled(by, divides):
                    scores = scores / number(by) if divides else scores * number(by)
                case Added(by, subtracts):
                    scores = scores - number(by) if subtracts else scores + number(by)
                case Tanh():
                    scores = jnp.tanh(scores)
                case Cast(dtype):
                    scores = scores.astype(dtype)
                case Masked(terms, fill, adds):
                    shown, hidden = (scores, scores + number(fill)) if adds else (scores, number(fill))
                    seen = jnp.ones((1, 1, 1, 1), bool)
                    for term in terms:
                        seen = seen & sees(term, where.queries, where.keys, read)
                    scores = jnp.where(seen, shown, hidden)
        return jnp.where(where.keys < whole, scores.astype(wide), -jnp.inf) if padded else scores.astype(wide)

    return modify


def _of_block(x: jax.Array, operand: Operand, where: Where) -> jax.Array:
    """An operand's part for a block: dims over heads, queries and keys are indexed unless their size is 1."""
    places = {"head": where.heads, "member": where.heads, "query": where.queries, "key": where.keys}
    for dim, labels in enumerate(operand.layout):
        if labels and labels[0] in places and x.shape[dim] > 1:
            x = jnp.take(x, places[labels[0]], axis=dim, mode="clip")
    return x


def _draws_alike(found: FoundAttention) -> bool:
    """Whether its dropout is a `bernoulli` that `WeightsDropout` can draw, with the usual scaling."""
    drop = found.dropout
    if drop is None or drop.rate is None or drop.rate >= 1 or _dropout_dims(found) is None:
        return False
    return (
        drop.bit_width == 8 * jnp.dtype(jnp.result_type(float)).itemsize
        and abs(drop.scale * (1 - drop.rate) - 1) < 1e-6
    )


def _dropout_dims(found: FoundAttention) -> tuple[tuple[str, int], ...] | None:
    """The dims of the drawn mask as `WeightsDropout` names them; None if it cannot."""
    assert found.dropout is not None
    names, dims = {"batch": "row", "query": "query", "key": "key", "head": "head"}, []
    for index, size in zip(found.dropout.bit_dims, found.dropout.bits, strict=True):
        parts = tuple(digit for digit in index if isinstance(digit, Digit))
        labels = tuple(digit.label for digit in parts)
        total = {"head": found.heads}.get(labels[0] if labels else "", found.sizes.get(labels[0], 1) if labels else 1)
        whole = (
            labels in (("batch",), ("query",), ("key",), ("head",), ("head", "member"), ("member",)) and size == total
        )
        if size == 1 and not labels:
            dims.append(("", 1))
        elif whole and labels[0] in names:
            dims.append((names[labels[0]], size))
        else:
            return None
    return tuple(dims)


# --------------------------------------------------------------------------------------------------
# Attention that is recognised in the traced code of a model, computed across the ranks that share its sequences.
# --------------------------------------------------------------------------------------------------


def attending_across(fun: Callable[..., Any], axis: str, method: Method, *, check_vma: bool) -> Callable[..., Any]:
    """Wrap `fun` so that attention recognised in it is computed by `context_attention` over a mesh axis.

    Args:
      fun: takes pytrees of arrays and returns one. It is traced on whole sequences, inside `shard_map` over other axes than
        this one, which is left to XLA's partitioner.
      axis: the mesh axis that splits its sequences.
      method: see `context_attention`.
      check_vma: as of the `shard_map` around.

    Returns:
      The same function. All else that it computes across positions is left to the partitioner.
    """

    def call(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        arrays = [leaf for leaf in leaves if is_array(leaf)]

        def flat(*arrays: Any) -> Any:
            given = iter(arrays)
            return fun(*treedef.unflatten([next(given) if is_array(leaf) else leaf for leaf in leaves]))

        traced = trace(flat, *arrays)
        found = find_attention(read_program(traced.jaxpr))
        chosen = splittable(found, mesh_around().shape[axis])
        if not chosen:
            return fun(*args)

        def instead(each: FoundAttention, q: jax.Array, k: jax.Array, v: jax.Array, given: Reads) -> jax.Array:
            return _attend(each, q, k, v, given, axis, method, check_vma)

        return traced.out_tree.unflatten(replaced(found, instead, chosen)(arrays))

    return call


def splittable(found: Recognised, ranks: int) -> list[FoundAttention]:
    """The recognised attentions that `context_attention` can compute."""
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
    """Attention of full sequences, [batch, query, heads, size] -> [batch, query, heads, value], split over the axis inside.

    Positions that do not divide over the ranks, as where a loss calls the model on all tokens but the last, are padded.
    """
    ranks = mesh_around().shape[axis]
    q, k, v = (_padded(x, ranks) for x in (q, k, v))
    options, arrays, key = options_of(found, given, padded=k.shape[1] > found.sizes["key"])
    split, whole = PartitionSpec(None, axis), PartitionSpec()

    def across(q: jax.Array, k: jax.Array, v: jax.Array, arrays: tuple, key: Any) -> jax.Array:
        assert axis_size(axis) > 1
        masks = {} if key is None else {"dropout_key": key}
        return context_attention(
            q, k, v, axis=axis, method=method, order="contiguous", arrays=arrays, **masks, **options
        )

    attend = jax.shard_map(
        across,
        in_specs=(split, split, split, whole, whole),
        out_specs=split,
        axis_names={axis},
        check_vma=check_vma,
    )
    return attend(q, k, v, arrays, key)[:, : found.sizes["query"]]


def _padded(x: jax.Array, ranks: int) -> jax.Array:
    """Pad x [b, s, ...] with zeros until its positions divide over the ranks."""
    missing = -x.shape[1] % ranks
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x
