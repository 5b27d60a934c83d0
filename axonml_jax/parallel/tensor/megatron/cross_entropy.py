"""`vocab_parallel_cross_entropy`: per-token losses of logits whose vocabulary is split, without ever joining them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from axonml_jax.collectives.primitives import axis_index, axis_size, max_over, sum_over
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.parallel.tensor.bound_axes import bound
from axonml_jax.parallel.tensor.whole.split_loss import Form, split_loss


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
    return split_loss(_form(axes, float(label_smoothing), targets.ndim, words), logits_shard, targets)


def padded_words(name: str, block: int, axes: tuple[str, ...], words: int | None) -> int | None:
    """How many words there are in the ranks' blocks together, where they have padding behind the last one; else None.

    Args:
      name: of the loss, for the message.
      block: the words and the padding that one rank has.
      axes: bound ones of the ranks.
      words: as given.

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
    """Which of this rank's block are words, and which padding: booleans [block]."""
    return axis_index(axes) * block + jnp.arange(block) < words


def as_counted(targets: jax.Array, ignore_label: int | None) -> jax.Array:
    """Targets in a signed type that holds the vocabulary (they may be uint8), those that do not count negative."""
    if jnp.issubdtype(targets.dtype, jnp.unsignedinteger):  # large ones would turn negative
        targets = jnp.minimum(targets, min(jnp.iinfo(targets.dtype).max, jnp.iinfo(jnp.int32).max))
    targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    return targets if ignore_label is None or ignore_label < 0 else jnp.where(targets == ignore_label, -1, targets)


def refuse_beyond(name: str, targets: jax.Array, vocabulary: int, ignore_label: int | None) -> None:
    """Refuse targets beyond the vocabulary where their values are known.

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
def _form(axes: tuple[str, ...], smoothing: float, ndim: int, words: int | None) -> Form:
    return Form(
        name="vocab_parallel_cross_entropy",
        options=(smoothing,) if words is None else (smoothing, words),
        subject="logits",
        remedy="let the layer that makes them leave its output split (gather_output=False), or take an ordinary cross entropy "
        "of whole logits, such as this one with axis=()",
        axes=axes,
        part=lambda logits, targets: _cross_entropy(logits, targets, axes, smoothing, words),
        whole=lambda logits, targets: _cross_entropy(logits, targets, (), smoothing, None),
        dims=(ndim + 1, ndim),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _cross_entropy(logits, targets, axes, smoothing, words):
    return _forward(logits, targets, axes, smoothing, words)[0]


def _forward(logits, targets, axes, smoothing, words):
    """The losses, and what the backward needs: softmax = exp(logits - normalizer), NaN where no word is the target."""
    wide = _without_padding(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axes, words, -jnp.inf)
    highest = jnp.max(wide, axis=-1)
    highest = max_over(highest, axes) if axes else highest
    shifted = wide - highest[..., None]
    # A masked sum instead of indexing: the target's logit is on one rank, and the others add zero.
    chosen = jnp.sum(jnp.where(_is_target(logits, targets, axes), shifted, 0), axis=-1)
    even = _without_padding(shifted, axes, words, 0)
    parts = [jnp.sum(jnp.exp(shifted), axis=-1), chosen, *([jnp.sum(even, axis=-1)] if smoothing else [])]
    sums = sum_over(jnp.stack(parts), axes) if axes else jnp.stack(parts)
    count = words or _vocabulary(logits, axes)
    log_sum = jnp.where(targets < count, jnp.log(sums[0]), jnp.nan)
    losses = log_sum - sums[1]
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (log_sum - sums[2] / count)
    return jnp.where(targets < 0, 0, losses), (logits, targets, highest + log_sum)


def _backward(axes, smoothing, words, saved, ct):
    logits, targets, normalizer = saved
    wide = logits.astype(normalizer.dtype)
    softmax = jnp.exp(wide - normalizer[..., None])
    even = smoothing / (words or _vocabulary(logits, axes))
    grad = softmax - jnp.where(_is_target(logits, targets, axes), 1 - smoothing + even, even)
    grad = _without_padding(grad * jnp.where(targets < 0, 0, ct)[..., None], axes, words, 0)
    return grad.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _without_padding(values, axes, words, instead):
    return values if words is None else jnp.where(is_word(values.shape[-1], axes, words), values, instead)


def _is_target(logits, targets, axes):
    size = logits.shape[-1]
    first = axis_index(axes) * size if axes else 0
    return jnp.arange(size) == (targets - first)[..., None]


def _vocabulary(logits, axes) -> int:
    return logits.shape[-1] * (axis_size(axes) if axes else 1)
