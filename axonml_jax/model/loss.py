"""What a user's `loss_fn` may return, and the one form the training step works with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax._types import named_leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedMean:
    """A mean given as its two sums, which stays exact over ranks and microbatches of unequal weight.

    Return one from a `loss_fn` when examples count unequally, for instance tokens of padded sequences:
    `WeightedMean((losses * mask).sum(), mask.sum())`. The gradient is that of all totals over all weights.

    Attributes:
      total: the weighted sum of the losses, a scalar.
      weight: the sum of the weights, a scalar; no gradient flows through it.
    """

    total: Any
    weight: Any

    @property
    def value(self):
        """total / weight."""
        return self.total / self.weight


class Loss(NamedTuple):
    """A loss and its metrics as sums: what is added up over ranks and microbatches before the one division.

    `weight` is None for a plain mean: every rank and microbatch then counts the same.
    """

    total: jax.Array
    weight: jax.Array | None
    metrics: dict[str, WeightedMean]


def parse_loss(returned: Any, positions: tuple[str, ...] = ()) -> Loss:
    """Read what a `loss_fn` returned.

    Args:
      returned: a scalar, a `WeightedMean`, or a pair of one of these and a dict of metrics, each an array (averaged
        over ranks and microbatches) or a `WeightedMean`.
      positions: the mesh axes that split positions. Along them a plain number may be a mean or a sum of a rank's positions,
        which nobody can tell: it must be a `WeightedMean` then.

    Raises:
      TypeError, ValueError: when it is none of these; names what was returned and the remedy.
    """
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if isinstance(metrics, WeightedMean) or not isinstance(metrics, dict):
        raise TypeError(
            f"loss_fn returned metrics of type {type(metrics).__name__}: return (loss, dict of named arrays)"
        )
    weighted = isinstance(loss, WeightedMean)
    if positions and (plain := _plain(loss, metrics)):
        raise ValueError(
            f"loss_fn returned {', '.join(plain)} as a plain number, but {', '.join(positions)} splits positions: whether it "
            "is a mean or a sum over those of one rank cannot be told. Return ax.WeightedMean(total, weight), both summed over "
            "the positions that loss_fn is given"
        )
    total = _scalar(loss.total if weighted else loss, "its loss")
    weight = jax.lax.stop_gradient(_scalar(loss.weight, "its weight").astype(total.dtype)) if weighted else None
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn returned a loss of dtype {total.dtype}: it must be a real floating scalar to have a gradient"
        )
    return Loss(total, weight, {name: _metric(name, value) for name, value in _flat(metrics).items()})


def _plain(loss: Any, metrics: dict) -> list[str]:
    """What is no `WeightedMean`."""
    named = {"its loss": loss} | {f"metric {name!r}": leaf.value for name, leaf in _flat(metrics).items()}
    return [name for name, value in named.items() if not isinstance(value, WeightedMean)]


def _flat(metrics: dict) -> dict[str, Any]:
    named = named_leaves(jax.tree.map(_Leaf, metrics, is_leaf=lambda x: isinstance(x, WeightedMean)))
    if taken := sorted({"loss", "grad_norm"} & set(named)):
        raise ValueError(f"loss_fn returned metrics named {taken}, which a step reports itself: give them other names")
    return named


class _Leaf:
    """Keeps a WeightedMean in one piece while a nest of metrics is flattened to names."""

    def __init__(self, value):
        self.value = value


def _metric(name: str, leaf: _Leaf) -> WeightedMean:
    value = leaf.value if isinstance(leaf.value, WeightedMean) else WeightedMean(leaf.value, 1.0)
    try:
        total = jax.lax.stop_gradient(jnp.asarray(value.total))
    except TypeError as error:
        kind = type(value.total).__name__
        raise TypeError(
            f"loss_fn returned a {kind} as metric {name!r}: metrics are arrays or ax.WeightedMean"
        ) from error
    total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
    return WeightedMean(total, jax.lax.stop_gradient(jnp.asarray(value.weight, total.dtype)))


def _scalar(value: Any, what: str) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"loss_fn returned {type(value).__name__} as {what}: return a scalar, an ax.WeightedMean, "
            "or a pair (one of these, dict of metrics)"
        ) from error
    if array.ndim:
        raise ValueError(
            f"loss_fn returned an array of shape {array.shape} as {what}, but a loss is one number: return its mean over "
            "the examples it is given, or ax.WeightedMean(total, weight)"
        )
    return array
