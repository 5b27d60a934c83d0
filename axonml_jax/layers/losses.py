"""Cross entropy of logits whose vocabulary is split over ranks, at once or in chunks."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from axonml_jax.collectives.gradients import copy_to, split_to
from axonml_jax.collectives.primitives import (
    axis_index,
    axis_size,
    bound,
    gather_whole,
    max_over,
    scatter_sum,
    sum_over,
    vary_alike,
    vary_like,
)
from axonml_jax.compat.order import together
from axonml_jax.layers.fused import chosen, softmax_gradient, softmax_stats
from axonml_jax.layers.linear import capped
from axonml_jax.layers.products import SEQUENCE_DIM
from axonml_jax.layers.whole import Form, split_loss
from axonml_jax.mesh.axes import AxisNames

# --------------------------------------------------------------------------------------------------
# `vocab_parallel_cross_entropy`: per-token losses of logits whose vocabulary is split, without ever joining them.
# --------------------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(
    logits_shard: jax.Array,
    targets: jax.Array,
    axis: AxisNames = "tensor",
    *,
    label_smoothing: float = 0.0,
    ignore_label: int | None = None,
    words: int | None = None,
) -> jax.Array:
    """Cross entropy of every position in nats (Shoeybi et al. 2019).

    Args:
      logits_shard: [..., v/n], this rank's block of the vocabulary; [..., v] where the axis is not bound.
      targets: integers [...], the same on every rank. Positions of negative ones have loss 0 and no gradient (they still count
        as positions: divide by how many remain).
      axis: the mesh axis of n ranks that splits the vocabulary; of several those that are bound count.
      label_smoothing: e in [0, 1): the target distribution is 1 - e on the target plus e spread evenly over all v.
      ignore_label: one more target to ignore so, such as a class.
      words: v where it leaves a remainder: the ranks' blocks have ceil(v/n) logits each, and those behind the last word are
        padding, which counts for nothing; None: all are words.

    Returns:
      [...], the same on every rank, in at least float32. A target of v or more has no loss: it is NaN, and so is its gradient.

    Raises:
      ValueError: when shapes do not fit, words do not fit into the ranks' blocks, label_smoothing is outside [0, 1), a target
        is v or more (where values are known: they are not while a program is traced), or the logits are whole on every rank
        although the axis is bound. In a model whose layers `auto_parallelize` swapped they may be whole. In a `shard_map` of
        your own with `check_vma=False` nothing can tell.

    Communicates: forward a maximum and a sum of two (with smoothing three) numbers per token; nothing backward. What is
    kept for the backward is the logits shard as given and one number per token.
    """
    if logits_shard.shape[:-1] != targets.shape or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"vocab_parallel_cross_entropy: logits of shape {logits_shard.shape} want integer targets of shape "
            f"{logits_shard.shape[:-1]}, not {targets.dtype.name} of shape {targets.shape}"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} is outside [0, 1)")
    axes = bound(axis)
    if not axes:
        refuse_beyond("vocab_parallel_cross_entropy", targets, logits_shard.shape[-1], ignore_label)
    targets = as_counted(targets, ignore_label)
    words = padded_words("vocab_parallel_cross_entropy", logits_shard.shape[-1], axes, words)
    plain = label_smoothing or words is not None
    form = "xla" if plain else chosen(logits_shard, features=logits_shard.shape[-1])
    return split_loss(_form(axes, float(label_smoothing), targets.ndim, words, form), logits_shard, targets)


def padded_words(name: str, block: int, axes: tuple[str, ...], words: int | None) -> int | None:
    """The number of words if the ranks' blocks contain padding behind the last one; else None.

    Args:
      name: of the loss, for the message.
      block: the words and the padding that one rank has.
      axes: bound ones of the ranks.
      words: the user's number of words, or None.

    Raises:
      ValueError: when so many words would not be split into such blocks.
    """
    ranks = axis_size(axes) if axes else 1
    if words is None or words in (block, block * ranks):  # whole on every rank, or without padding
        return None
    if -(-words // ranks) != block:
        raise ValueError(f"{name}: words={words} over {ranks} ranks are blocks of {-(-words // ranks)}, not of {block}")
    return words


def is_word(block: int, axes: tuple[str, ...], words: int) -> jax.Array:
    """Which entries of this rank's block of the vocabulary are words rather than padding: booleans [block]."""
    return axis_index(axes) * block + jnp.arange(block) < words


def as_counted(targets: jax.Array, ignore_label: int | None) -> jax.Array:
    """Convert targets to a signed type that holds the vocabulary (they may be uint8); ignored ones become negative."""
    if jnp.issubdtype(targets.dtype, jnp.unsignedinteger):  # large ones would turn negative
        targets = jnp.minimum(targets, min(jnp.iinfo(targets.dtype).max, jnp.iinfo(jnp.int32).max))
    targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    return targets if ignore_label is None or ignore_label < 0 else jnp.where(targets == ignore_label, -1, targets)


def refuse_beyond(name: str, targets: jax.Array, vocabulary: int, ignore_label: int | None) -> None:
    """Refuse targets beyond the vocabulary, if their values are known.

    Args:
      name: of the loss, for the message.
      targets: integers.
      vocabulary: v.
      ignore_label: one that may lie beyond it.

    Raises:
      ValueError: with the largest.
    """
    if isinstance(targets, Tracer) or (isinstance(targets, jax.Array) and not targets.is_fully_addressable):
        return
    known = np.asarray(targets)
    beyond = (known >= vocabulary) & (True if ignore_label is None else known != ignore_label)
    if beyond.any():
        raise ValueError(
            f"{name}: {beyond.sum()} of {known.size} targets lie beyond the vocabulary of {vocabulary}, the largest is "
            f"{known[beyond].max()}. Targets are token ids or classes from 0 to {vocabulary - 1}; negative ones are ignored"
        )


@cache
def _form(axes: tuple[str, ...], smoothing: float, ndim: int, words: int | None, form: str) -> Form:
    more = (() if words is None else (words,)) + (() if form == "xla" else (form,))
    return Form(
        name="vocab_parallel_cross_entropy",
        options=(smoothing, *more),
        subject="logits",
        remedy="let the layer that makes them leave its output split (gather_output=False), or take an ordinary cross entropy "
        "of whole logits, such as this one with axis=()",
        axes=axes,
        part=lambda logits, targets: _cross_entropy(logits, targets, axes, smoothing, words, form),
        whole=lambda logits, targets: _cross_entropy(logits, targets, (), smoothing, None, form),
        dims=(ndim + 1, ndim),
    )


def cross_entropy_of_rows(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of logits that are not split: [..., v] and integers [...] -> float32 [...].

    Args:
      logits: of a row's words.
      targets: negative ones have loss 0, and those of v or more NaN.
    """
    from axonml_jax.compat.triton import varying_together

    form = chosen(logits, features=logits.shape[-1])
    return _cross_entropy(*varying_together([logits, targets]), (), 0.0, None, form)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _cross_entropy(logits, targets, axes, smoothing, words, form):
    return _forward(logits, targets, axes, smoothing, words, form)[0]


def _forward(logits, targets, axes, smoothing, words, form):
    """The losses, and the residuals: softmax = exp(logits - normalizer), NaN if the target is not a word."""
    summed = _summed if form == "xla" else partial(_summed_in_one_pass, form=form)
    highest, sums = summed(logits, targets, axes, smoothing, words)
    count = words or _vocabulary(logits, axes)
    log_sum = jnp.where(targets < count, jnp.log(sums[0]), jnp.nan)
    losses = log_sum - sums[1]
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[2] / count)
    return jnp.where(targets < 0, 0, losses), (logits, targets, highest + log_sum)


def _summed(logits, targets, axes, smoothing, words):
    """Per row the maximal logit, and relative to it the ranks' sums of exponentials, target logit and (smoothing) logits."""
    wide = _without_padding(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axes, words, -jnp.inf)
    highest = jnp.max(wide, axis=-1)
    highest = max_over(highest, axes, nan=False) if axes else highest
    shifted = wide - highest[..., None]
    # A masked sum instead of indexing: the target's logit is on one rank, and the others add zero.
    at_target = jnp.sum(jnp.where(_is_target(logits, targets, axes), shifted, 0), axis=-1)
    even = _without_padding(shifted, axes, words, 0)
    parts = [jnp.sum(jnp.exp(shifted), axis=-1), at_target, *([jnp.sum(even, axis=-1)] if smoothing else [])]
    return highest, sum_over(jnp.stack(parts), axes) if axes else jnp.stack(parts)


def _summed_in_one_pass(logits, targets, axes, smoothing, words, form):
    """The same by a kernel that reads the logits once; the number is the largest of the ranks' logsumexps."""
    local = _on_this_rank(logits, targets, axes)
    normalizer, logit = softmax_stats(logits, local, form=form)
    highest = max_over(normalizer, axes, nan=False) if axes else normalizer
    mine = (local >= 0) & (local < logits.shape[-1])
    parts = jnp.stack([jnp.exp(normalizer - highest), jnp.where(mine, logit - highest, 0)])
    return highest, sum_over(parts, axes) if axes else parts


def _backward(axes, smoothing, words, form, saved, ct):
    logits, targets, normalizer = saved
    weights = jnp.where(targets < 0, 0, ct)
    if form != "xla":
        grad = softmax_gradient(logits, _on_this_rank(logits, targets, axes), normalizer, weights, form=form)
        return grad, None
    wide = logits.astype(normalizer.dtype)
    softmax = jnp.exp(wide - normalizer[..., None])
    even = smoothing / (words or _vocabulary(logits, axes))
    grad = softmax - jnp.where(_is_target(logits, targets, axes), 1 - smoothing + even, even)
    grad = _without_padding(grad * weights[..., None], axes, words, 0)
    return grad.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _without_padding(values, axes, words, instead):
    return values if words is None else jnp.where(is_word(values.shape[-1], axes, words), values, instead)


def _is_target(logits, targets, axes):
    return jnp.arange(logits.shape[-1]) == _on_this_rank(logits, targets, axes)[..., None]


def _on_this_rank(logits, targets, axes):
    """Targets relative to this rank's first word."""
    return targets - (axis_index(axes) * logits.shape[-1] if axes else 0)


def _vocabulary(logits, axes) -> int:
    return logits.shape[-1] * (axis_size(axes) if axes else 1)


# --------------------------------------------------------------------------------------------------
# `chunked_cross_entropy`: per-token losses of an output layer whose logits are never all there at once.
#
# For each chunk of the vocabulary the logits are computed, used and dropped, forward and again backward. Memory for
# logits is then tokens x chunk instead of tokens x vocabulary; the price is one more product with the output layer.
# --------------------------------------------------------------------------------------------------


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
    """Cross entropy in nats of the logits `x @ table`, as by `vocab_parallel_cross_entropy`; only one chunk's exist at once.

    Args:
      x: [..., s, h] (s sequence, h hidden size), the same on every rank; with `sequence_parallel` [..., s/n, h].
      table: [h, v/n] or [v/n, h] (v vocabulary), this rank's words; all of them where the axis is not bound, or where the table
        is the parameter of a layer that `auto_parallelize` swapped, which code sees gathered.
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
    sequence_parallel = bool(axes) and sequence_parallel
    _check(x, table, targets, chunk, words_dim, softcap, axis_size(axes) if sequence_parallel else 1)
    if not axes:
        refuse_beyond("chunked_cross_entropy", targets, table.shape[words_dim], ignore_label)
    targets = as_counted(targets, ignore_label)
    words = padded_words("chunked_cross_entropy", table.shape[words_dim], axes, words)
    form = _chunked_form(axes, chunk, words_dim % 2, sequence_parallel, targets.ndim, softcap, words)
    return split_loss(form, table, x, targets)


@cache
def _chunked_form(
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
    x: jax.Array, table: jax.Array, targets: jax.Array, chunk: int, words_dim: int, softcap: float | None, parts: int
) -> None:
    """Refuse operands that do not fit; `parts` is the number of ranks that split x's positions."""
    problems = []
    if words_dim not in (-2, -1, 0, 1):
        problems.append(f"words_dim={words_dim} must be a dim of the table, 0 or 1")
    elif table.ndim != 2 or table.shape[1 - words_dim % 2] != x.shape[-1]:
        problems.append(f"a table of shape {table.shape} with words along dim {words_dim} does not multiply {x.shape}")
    positions = (*x.shape[:-2], x.shape[-2] * parts) if parts > 1 else x.shape[:-1]
    if not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != positions:
        problems.append(
            f"targets {targets.dtype.name}{list(targets.shape)} must be integers of shape {positions}, one per position of "
            f"x {x.shape}"
        )
    if softcap is not None and softcap <= 0:
        problems.append(f"softcap={softcap} must be positive, or None")
    if chunk < 1:
        problems.append(f"chunk={chunk} must be a positive number of words")
    if problems:
        raise ValueError(f"chunked_cross_entropy: {'; '.join(problems)}")


class _Chunks:
    """How a rank goes through its words in chunks. Compares by value, so that equal calls share a trace."""

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

    def all_rows(self, x: jax.Array) -> jax.Array:
        """All positions, gathered if the sequence is split, as rows."""
        x = gather_whole(x, self.axes, SEQUENCE_DIM, invarying=False) if self.sequence else x
        return x.reshape(-1, x.shape[-1])

    def fold(self, step: Callable[[Any, jax.Array, Any], Any], start: Any, table: jax.Array) -> Any:
        """Run `state = step(state, words of a chunk, its first word)` for each chunk."""
        total = table.shape[self.dim]
        cut = lambda first, size: jax.lax.dynamic_slice_in_dim(table, first, size, self.dim)
        trip = lambda state, i: (step(state, cut(i * self.size, self.size), i * self.size), None)
        full = total // self.size
        state, _ = jax.lax.scan(trip, start, jnp.arange(full, dtype=jnp.int32))
        rest = total - full * self.size
        return step(state, cut(full * self.size, rest), full * self.size) if rest else state

    def logits(self, x: jax.Array, words: jax.Array) -> jax.Array:
        """The logits [m, c] of rows [m, h] and a chunk of the table, in at least float32."""
        numbers = (((1,), (1 - self.dim,)), ((), ()))
        return capped(jax.lax.dot_general(x, words, numbers, preferred_element_type=_wide(x)), self.softcap)

    def without_padding(self, values: jax.Array, table: jax.Array, first: Any, instead: float) -> jax.Array:
        """A chunk's values [m, c] with `instead` in the columns that stand for no word."""
        if self.words is None:
            return values
        own = axis_index(self.axes) * table.shape[self.dim] + first
        return jnp.where(own + jnp.arange(values.shape[1]) < self.words, values, instead)

    def uncapped(self, grad: jax.Array, logits: jax.Array) -> jax.Array:
        """The gradient of logits before the softcap, from that of the capped ones [m, c]."""
        return grad if self.softcap is None else grad * (1 - (logits / self.softcap) ** 2)

    def is_target(self, targets: jax.Array, table: jax.Array, words: jax.Array, first: Any) -> jax.Array:
        """Which of a chunk's words [c] is the target of each row [m]: booleans [m, c]."""
        own = axis_index(self.axes) * table.shape[self.dim] if self.axes else 0
        return jnp.arange(words.shape[self.dim]) == (targets.reshape(-1) - own - first)[:, None]


def _wide(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(chunks, x, table, targets):
    return _chunked_forward(chunks, x, table, targets)[0]


def _chunked_forward(chunks: _Chunks, x, table, targets):
    """The losses, and the residuals: softmax = exp(logits - normalizer), NaN if the target is not a word."""
    rows = chunks.all_rows(x)
    # Not -inf: a chunk may be padding alone, and its highest be subtracted from itself.
    least = float(jnp.finfo(_wide(x)).min)

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
        own, highest = highest, max_over(highest, chunks.axes, nan=False)
        total, chosen = sum_over(jnp.stack([total * jnp.exp(own - highest), chosen]), chunks.axes)
    words = chunks.words or table.shape[chunks.dim] * (axis_size(chunks.axes) if chunks.axes else 1)
    normalizer = jnp.where(targets.reshape(-1) < words, highest + jnp.log(total), jnp.nan)
    losses = (normalizer - chosen).reshape(targets.shape)
    return jnp.where(targets < 0, 0, losses), (x, table, targets, normalizer)


def _chunked_backward(chunks: _Chunks, saved, ct):
    x, table, targets, normalizer = saved
    if chunks.sequence:  # the barrier keeps XLA from finding the forward's gather, and keeping its result
        x, ct = together((x, ct))
    rows, scale = chunks.all_rows(x), jnp.where(targets < 0, 0, ct).reshape(-1, 1)

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


_losses.defvjp(_chunked_forward, _chunked_backward)
