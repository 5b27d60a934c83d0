"""`chunked_cross_entropy`: per-token losses of an output layer whose logits are never all there at once.

For each chunk of the vocabulary the logits are computed, used and dropped, forward and again backward. Memory for logits is
then tokens x chunk instead of tokens x vocabulary; the price is one more product with the output layer.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.gradients.pairs import copy_to, split_to
from axonml_jax.collectives.primitives import axis_index, axis_size, gather_whole, max_over, scatter_sum, sum_over
from axonml_jax.collectives.varying import vary_like
from axonml_jax.compat.barrier import together
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.bound_axes import bound, vary_alike
from axonml_jax.parallel.tensor.megatron.cross_entropy import as_counted, padded_words, refuse_beyond
from axonml_jax.parallel.tensor.megatron.softcap import capped
from axonml_jax.parallel.tensor.products.region import SEQUENCE_DIM
from axonml_jax.parallel.tensor.whole.split_loss import Form, split_loss


def chunked_cross_entropy(
    x: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    axis: AxisNames = "tensor",
    *,
    chunk: int,
    words_dim: int,
    sequence_parallel: bool = False,
    ignore_label: int | None = None,
    softcap: float | None = None,
    words: int | None = None,
) -> jax.Array:
    """Cross entropy in nats of the logits `x @ table`: what `vocab_parallel_cross_entropy` makes of them, chunk by chunk.

    Args:
      x: [..., s, h] (s sequence, h hidden size), the same on every rank; with `sequence_parallel` [..., s/n, h].
      table: [h, v/n] or [v/n, h] (v vocabulary), this rank's words; all of them where the axis is not bound, and what is
        made of the parameter of a layer that `auto_parallelize` swapped.
      targets: integers [..., s], the same on every rank. Positions of negative ones have loss 0 and no gradient.
      axis: the mesh axis of n ranks that splits the vocabulary.
      chunk: words whose logits are there at once; the last chunk may be shorter.
      words_dim: which dim of the table is v.
      sequence_parallel: x is this rank's part of the sequence.
      ignore_label: one more target to ignore so.
      softcap: holds the logits between -softcap and softcap by a hyperbolic tangent; None: nothing does.
      words: v where it leaves a remainder, as of `vocab_parallel_cross_entropy`.

    Returns:
      [..., s], the same on every rank, in at least float32; logits are computed in it from x and table as they are. A target
      of v or more has no loss: it is NaN, and so is its gradient.

    Raises:
      ValueError: when shapes do not fit, chunk is below 1, a target is v or more (where values are known), or the table is
        whole on every rank although the axis is bound and no layer was swapped. In a `shard_map` of your own with
        `check_vma=False` nothing can tell.

    Communicates: as `vocab_parallel_cross_entropy` and the layer that makes its logits.
    """
    axes = bound(axis)
    _check(x, table, targets, chunk, words_dim, softcap)
    if not axes:
        refuse_beyond("chunked_cross_entropy", targets, table.shape[words_dim], ignore_label)
    targets = as_counted(targets, ignore_label)
    words = padded_words("chunked_cross_entropy", table.shape[words_dim], axes, words)
    form = _form(axes, chunk, words_dim % 2, bool(axes) and sequence_parallel, targets.ndim, softcap, words)
    return split_loss(form, table, x, targets)


@cache
def _form(
    axes: tuple[str, ...],
    chunk: int,
    words_dim: int,
    sequence: bool,
    ndim: int,
    softcap: float | None,
    words: int | None,
) -> Form:
    def part(table: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
        if axes and not sequence:
            x = copy_to(x, axes)
        layout = _Chunks(axes, min(chunk, table.shape[words_dim]), words_dim, sequence, softcap, words)
        return _losses(layout, *vary_alike((x, table)), targets)

    return Form(
        name="chunked_cross_entropy",
        options=(chunk, words_dim, sequence, softcap, *(() if words is None else (words,))),
        subject="table",
        remedy="give the parameter of a layer that is split, or axis=()",
        axes=axes,
        part=part,
        whole=lambda table, x, targets: part(split_to(table, axes, words_dim), x, targets),
        dims=(2, ndim + 1, ndim),
        places=tuple((words_dim, axis) for axis in axes),
    )


def _check(
    x: jax.Array, table: jax.Array, targets: jax.Array, chunk: int, words_dim: int, softcap: float | None
) -> None:
    problems = []
    if table.ndim != 2 or table.shape[1 - words_dim] != x.shape[-1]:
        problems.append(f"a table of shape {table.shape} with words along dim {words_dim} does not multiply {x.shape}")
    if not jnp.issubdtype(targets.dtype, jnp.integer) or targets.ndim != x.ndim - 1:
        problems.append(
            f"targets {targets.dtype.name}{list(targets.shape)} must be integers, one per position of {x.shape}"
        )
    if softcap is not None and softcap <= 0:
        problems.append(f"softcap={softcap} must be positive, or None")
    if chunk < 1:
        problems.append(f"chunk={chunk} must be a positive number of words")
    if problems:
        raise ValueError(f"chunked_cross_entropy: {'; '.join(problems)}")


class _Chunks:
    """How a rank walks through its words. Compares by value, so that equal calls share a trace."""

    def __init__(
        self,
        axes: tuple[str, ...],
        size: int,
        dim: int,
        sequence: bool,
        softcap: float | None,
        words: int | None = None,
    ):
        self.axes, self.size, self.dim, self.sequence, self.softcap = axes, size, dim, sequence, softcap
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chunks) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.axes, self.size, self.dim, self.sequence, self.softcap, self.words))

    def whole(self, x: jax.Array) -> jax.Array:
        """All positions, as rows."""
        x = gather_whole(x, self.axes, SEQUENCE_DIM, invarying=False) if self.sequence else x
        return x.reshape(-1, x.shape[-1])

    def fold(self, step: Callable[[Any, jax.Array, Any], Any], start: Any, table: jax.Array) -> Any:
        """`state = step(state, words of a chunk, its first word)` for one chunk after the other."""
        total = table.shape[self.dim]
        cut = lambda first, size: jax.lax.dynamic_slice_in_dim(table, first, size, self.dim)
        trip = lambda state, i: (step(state, cut(i * self.size, self.size), i * self.size), None)
        full = total // self.size
        state, _ = jax.lax.scan(trip, start, jnp.arange(full, dtype=jnp.int32))
        rest = total - full * self.size
        return step(state, cut(full * self.size, rest), full * self.size) if rest else state

    def logits(self, x: jax.Array, words: jax.Array) -> jax.Array:
        """[m, h] and a chunk of the table -> [m, c], in at least float32."""
        numbers = (((1,), (1 - self.dim,)), ((), ()))
        return capped(jax.lax.dot_general(x, words, numbers, preferred_element_type=_wide(x)), self.softcap)

    def without_padding(self, values: jax.Array, table: jax.Array, first: Any, instead: float) -> jax.Array:
        """[m, c] of a chunk from its first word on, with something else in the place of what stands for no word."""
        if self.words is None:
            return values
        own = axis_index(self.axes) * table.shape[self.dim] + first
        return jnp.where(own + jnp.arange(values.shape[1]) < self.words, values, instead)

    def uncapped(self, grad: jax.Array, logits: jax.Array) -> jax.Array:
        """The gradient of capped logits [m, c] as that of those before."""
        return grad if self.softcap is None else grad * (1 - (logits / self.softcap) ** 2)

    def is_target(self, targets: jax.Array, table: jax.Array, words: jax.Array, first: Any) -> jax.Array:
        """Which of a chunk's words [c] are the targets [m]: booleans [m, c]."""
        own = axis_index(self.axes) * table.shape[self.dim] if self.axes else 0
        return jnp.arange(words.shape[self.dim]) == (targets.reshape(-1) - own - first)[:, None]


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(chunks, x, table, targets):
    return _forward(chunks, x, table, targets)[0]


def _forward(chunks: _Chunks, x, table, targets):
    """The losses, and what the backward needs: softmax = exp(logits - normalizer), NaN where no word is the target."""
    rows = chunks.whole(x)
    least = float(
        jnp.finfo(_wide(x)).min
    )  # not -inf: a chunk may be padding alone, and its highest be subtracted from itself

    def step(state, words, first):
        highest, total, chosen = state
        logits = chunks.without_padding(chunks.logits(rows, words), table, first, least)
        new = jnp.maximum(highest, jnp.max(logits, axis=-1))
        total = total * jnp.exp(highest - new) + jnp.sum(jnp.exp(logits - new[:, None]), axis=-1)
        mine = chunks.is_target(targets, table, words, first)
        return new, total, chosen + jnp.sum(jnp.where(mine, logits, 0), axis=-1)

    zeros = vary_like(jnp.zeros(rows.shape[0], _wide(x)), rows)
    highest, total, chosen = chunks.fold(step, (zeros - jnp.inf, zeros, zeros), table)
    if chunks.axes:
        own, highest = highest, max_over(highest, chunks.axes)
        total, chosen = sum_over(jnp.stack([total * jnp.exp(own - highest), chosen]), chunks.axes)
    words = chunks.words or table.shape[chunks.dim] * (axis_size(chunks.axes) if chunks.axes else 1)
    normalizer = jnp.where(targets.reshape(-1) < words, highest + jnp.log(total), jnp.nan)
    losses = (normalizer - chosen).reshape(targets.shape)
    return jnp.where(targets < 0, 0, losses), (x, table, targets, normalizer)


def _backward(chunks: _Chunks, saved, ct):
    x, table, targets, normalizer = saved
    if chunks.sequence:  # the barrier keeps XLA from finding the forward's gather, and keeping its result
        x, ct = together((x, ct))
    rows, scale = chunks.whole(x), jnp.where(targets < 0, 0, ct).reshape(-1, 1)

    def step(state, words, first):
        of_rows, of_table = state
        logits = chunks.logits(rows, words)
        softmax = jnp.exp(logits - normalizer[:, None])
        grad = (softmax - chunks.is_target(targets, table, words, first)) * scale
        grad = chunks.without_padding(chunks.uncapped(grad, logits), table, first, 0).astype(rows.dtype)
        back = jax.lax.dot_general(grad, words, (((1,), (chunks.dim,)), ((), ())), preferred_element_type=of_rows.dtype)
        pair = (rows, grad) if chunks.dim == 1 else (grad, rows)
        own = jax.lax.dot_general(*pair, (((0,), (0,)), ((), ()))).astype(of_table.dtype)
        return of_rows + back, jax.lax.dynamic_update_slice_in_dim(of_table, own, first, chunks.dim)

    start = vary_like(jnp.zeros(rows.shape, _wide(x)), rows), vary_like(jnp.zeros_like(table), table)
    of_rows, of_table = chunks.fold(step, start, table)
    of_rows = of_rows.reshape(*targets.shape, -1).astype(x.dtype)
    return scatter_sum(of_rows, chunks.axes, SEQUENCE_DIM) if chunks.sequence else of_rows, of_table, None


_losses.defvjp(_forward, _backward)
