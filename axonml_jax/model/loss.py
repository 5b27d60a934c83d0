"""What a loss function may return, and the precision that it is computed in."""

import functools
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axonml_jax.base import PyTree, host_arrays, is_one_of, meant, named_leaves

# --------------------------------------------------------------------------------------------------
# What a user's `loss_fn` may return, and the one form the training step works with.
# --------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedMean:
    """A mean given as its two sums, which stays exact over ranks and microbatches of unequal weight.

    Return one from a `loss_fn` when examples count unequally, for instance tokens of padded sequences:
    `WeightedMean((losses * mask).sum(), mask.sum())`. The gradient is that of all totals over all weights. Where a
    whole batch weighs 0 there is nothing to learn: its mean and its gradient are 0, and among other batches it does not count.

    Attributes:
      total: the weighted sum of the losses, a scalar.
      weight: the sum of the weights, a scalar; no gradient flows through it.
    """

    total: Any
    weight: Any

    @property
    def value(self):
        """The mean, `total / weight`; 0 where the weight is 0."""
        return per_weight(self.total, self.weight)


def per_weight(total: Any, weight: Any) -> Any:
    """`total / weight`, and 0 for a weight of 0, unless the total is not finite: that is not hidden."""
    if not isinstance(weight, jax.Array):
        return total / np.where(np.asarray(weight) == 0, np.inf, weight)
    if jnp.iscomplexobj(total):  # a complex number over infinity is NaN
        return jnp.where(weight == 0, total * 0, total / jnp.where(weight == 0, 1, weight).astype(total.dtype))
    return total / jnp.where(weight == 0, jnp.inf, weight)


UNREAD = (
    "no trained parameter reaches the loss, so all gradients are zero: the loss must call the model that it is given, "
    "model(x). A module or module.apply(params, x) with variables from outside of the loss is a constant. Nor may "
    "jax.lax.stop_gradient stop all gradients"
)

TRACED = (
    "a loss and its model are traced once for all batches, when arrays have no values yet: return metrics as arrays, and "
    "call .item() or float() on what a step returns; write jnp instead of np, jnp.where instead of if, and "
    "jax.debug.print instead of print"
)


class Loss(NamedTuple):
    """A loss and its metrics as sums, which are added up over ranks and microbatches before the one division.

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
      positions: the mesh axes that split positions, where the loss is computed of a rank's own positions. The loss and all
        metrics must then be `WeightedMean`s: a plain number could be a mean or a sum over positions.

    Raises:
      TypeError, ValueError: when it is none of these, or a metric has the name of one that a step reports; with what was
        returned and the remedy.
    """
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if isinstance(metrics, WeightedMean) or not isinstance(metrics, Mapping):
        raise TypeError(
            f"loss_fn returned metrics of type {type(metrics).__name__}: return (loss, dict of named arrays), such as "
            'loss, {"logits": logits}, which a step returns whole'
        )
    weighted = isinstance(loss, WeightedMean)
    if positions and (plain := _plain(loss, metrics)):
        raise ValueError(
            f"loss_fn returned {', '.join(plain)} as a plain number, but {', '.join(positions)} splits positions. If a loss "
            "has collectives of its own, or several axes split them, it cannot be told whether a number is a mean or a sum: "
            "return ax.WeightedMean(total, weight), both summed over the positions that loss_fn is given"
        )
    total = _scalar(loss.total if weighted else loss, "its loss")
    weight = None
    if weighted:  # in at least float32: float16 ends at 65504, and bfloat16 counts to 256
        wide = jnp.promote_types(total.dtype, jnp.float32)
        weight = jax.lax.stop_gradient(_scalar(loss.weight, "its weight").astype(wide))
        total = total.astype(wide)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn returned a loss of dtype {total.dtype}: it must be a real floating scalar to have a gradient"
        )
    return Loss(total, weight, {name: _metric(name, value) for name, value in _flat(metrics).items()})


def of_batch(loss_fn: Any) -> Any:
    """A loss of `(model, batch)`: the function itself; for a `loss_fn(model, x, y)` one that takes the batch `(x, y)`.

    Raises:
      TypeError: for one that wants more than a model and a batch give.
    """
    try:
        wants = inspect.signature(loss_fn).parameters.values() if callable(loss_fn) else ()
    except ValueError:  # a builtin that does not say
        return loss_fn
    given = [each for each in wants if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each.name for each in given if each.default is each.empty]
    needed += [each.name for each in wants if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if len(needed) <= 2:
        return loss_fn

    @functools.wraps(loss_fn)
    def on_parts(model: Any, batch: Any) -> Any:
        if not isinstance(batch, tuple) or len(batch) != len(needed) - 1:
            raise TypeError(
                f"loss_fn takes ({', '.join(needed)}), but a step gives it only the model and the batch: call "
                f"step({', '.join(needed[1:])}) with all of them as arrays of rows, or write loss_fn(model, batch). Random "
                "streams belong in the model (self.rngs = nnx.Rngs(0); every step draws anew), metrics in what the loss "
                "returns"
            )
        return loss_fn(model, *batch)

    # What it takes itself, not what it wraps: asked again, it is a loss of one batch.
    on_parts.__signature__ = inspect.signature(on_parts, follow_wrapped=False)  # pyright: ignore[reportAttributeAccessIssue]
    return on_parts


def of_arrays(loss_fn: Any) -> str | None:
    """An explanation for a failed loss whose first argument is named like parameters, not a model; None for any other."""
    try:
        first = next(iter(inspect.signature(loss_fn).parameters), "")
    except (TypeError, ValueError):
        return None
    if first not in ("params", "variables", "state", "weights"):
        return None
    return (
        f"loss_fn({first}, batch): the first argument of a loss is the model with its parameters in it, not {first}: write "
        "loss_fn(model, batch) and call model(x) instead of module.apply or nnx.merge"
    )


def one_batch(parts: tuple) -> Any:
    """Combine a step's arguments into one batch, `step(batch)` or `step(x, y)`; tensors of other frameworks become arrays."""
    return host_arrays(parts[0] if len(parts) == 1 else parts)


def is_weighted(returned: Any) -> bool:
    """Whether a `loss_fn` returned only `WeightedMean`s: sums that are exact for any subset of the rows."""
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    return isinstance(metrics, Mapping) and not _plain(loss, metrics)


def weighted_names(returned: Any) -> dict[str, bool]:
    """Map the loss and each metric by name to whether the `loss_fn` returned it as a `WeightedMean`."""
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    named = {name: leaf.value for name, leaf in _flat(metrics).items()} if isinstance(metrics, Mapping) else {}
    return {name: isinstance(value, WeightedMean) for name, value in {"loss": loss, **named}.items()}


def _plain(loss: Any, metrics: Mapping) -> list[str]:
    """Names of the loss and metrics that are not a `WeightedMean`."""
    named = {"its loss": loss} | {f"metric {name!r}": leaf.value for name, leaf in _flat(metrics).items()}
    return [name for name, value in named.items() if not isinstance(value, WeightedMean)]


def _flat(metrics: Mapping) -> dict[str, Any]:
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
    kind = type(value.total).__name__
    try:
        total = jax.lax.stop_gradient(jnp.asarray(value.total))
    except OverflowError:
        raise ValueError(f"loss_fn returned {value.total} as metric {name!r}: it is too large for an int32") from None
    except TypeError as error:
        raise TypeError(
            f"loss_fn returned a {kind} as metric {name!r}: metrics are arrays or ax.WeightedMean"
        ) from error
    if jnp.issubdtype(total.dtype, jax.dtypes.extended):
        raise TypeError(f"loss_fn returned random keys as metric {name!r}: metrics are numbers")
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
            f"loss_fn returned an array of shape {array.shape} as {what}, but a loss is one number: reduce it, for "
            "instance by .mean(), or return ax.WeightedMean(total, weight)"
        )
    return array


# --------------------------------------------------------------------------------------------------
# In which dtype parameters rest, the model computes, gradients travel, and outputs return.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A mixed-precision policy; None leaves that dtype as it is. Complex numbers stay as they are.

    Attributes:
      param: parameters and optimizer state between steps.
      compute: parameters as the model reads them, and the floating arguments of the model's call.
      reduce: gradients while they are reduced over ranks, and accumulated where `accumulate` does not say otherwise.
      accumulate: gradients while they are summed over microbatches and from one reduction to the next; None: as `reduce`.
      output: floating results of the model's call (and so the loss).
      products: "fp8": operands of products by parameters are rounded to 8-bit floats, by scales of the moment, forward and
        backward (`layers/float8.py`); sums and results stay in the compute dtype. None: they are not.
      products_kept: regular expressions, searched in path names, of parameters whose products are not rounded. Those of the
        last layer, of what chooses (routers), of experts and of convolutions are not in any case.

    The same idea as PyTorch FSDP's `MixedPrecision` and jmp's `Policy`.

    >>> Precision.of("bf16").compute
    'bfloat16'
    """

    param: str | None = None
    compute: str | None = None
    reduce: str | None = None
    accumulate: str | None = None
    output: str | None = None
    products: Literal["fp8"] | None = None
    products_kept: tuple[str, ...] = ()

    def __post_init__(self):
        problems = list(self._products_problems())
        for field in ("param", "compute", "reduce", "accumulate", "output"):
            value = getattr(self, field)
            if value is None:
                continue
            try:
                name = jnp.dtype(meant("dtype", value)).name
            except (TypeError, ValueError):
                problems.append(f"{field}={value!r} is not a dtype")
                continue
            if not jnp.issubdtype(jnp.dtype(name), jnp.floating):
                problems.append(f"{field}={name} is not a floating dtype")
            object.__setattr__(self, field, name)
        if problems:
            raise ValueError(f"Precision: {'; '.join(problems)}; give names such as 'float32' or 'bfloat16', or None")

    def _products_problems(self) -> Iterator[str]:
        """Yield problems with `products` and `products_kept`; sets `products_kept` to a tuple."""
        given = (self.products_kept,) if isinstance(self.products_kept, str) else self.products_kept
        if not isinstance(given, list | tuple):
            yield f"products_kept={given!r} must be regular expressions, in a tuple"
            return
        kept = tuple(given)
        object.__setattr__(self, "products_kept", kept)
        if not is_one_of(self.products, (None, "fp8")):
            yield f"products={self.products!r} must be 'fp8' or None"
        if kept and self.products is None:
            yield f"products_kept={list(kept)} has no effect without products='fp8'"
        for pattern in kept:
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                yield f"products_kept: {pattern!r} is no regular expression ({error})"

    def check_parameters(self, names: Collection[str]) -> None:
        """Refuse patterns that match no parameter.

        Args:
          names: the path names of a model's parameters.

        Raises:
          ValueError: naming every such pattern.
        """
        idle = [each for each in self.products_kept if not any(re.search(each, name) for name in names)]
        if idle:
            some = sorted(names)
            raise ValueError(
                f"products_kept: {', '.join(map(repr, idle))} match no parameter; there are {', '.join(some[:8])}"
                f"{', ...' if len(some) > 8 else ''}"
            )

    @staticmethod
    def of(policy: "Precision | str | None") -> "Precision":
        """A policy from itself, from None (change nothing), or from the name of a common one.

        `"float32"`: everything in float32. `"bf16"`: compute in bfloat16, in which gradients travel too; they accumulate in
        float32, and the rest is in float32 (docs/adr/0022), as PyTorch's FSDP2 does with `param_dtype=bfloat16` and no
        `reduce_dtype`. `"bf16-reduce-float32"`: as "bf16", with gradients reduced in float32. `"bf16-reduce"`: they accumulate
        in bfloat16 too: sums of 8 bits of precision, as MaxText's. `"fp16"`: compute in float16, the rest in float32; a
        trainer's step then scales its loss (see `training/nonfinite.py`), which `value_and_grad` does not. `"fp8"`:
        as "bf16", with products by parameters of operands that are rounded to 8 bits.

        Raises:
          ValueError: for any other name.
        """
        if isinstance(policy, Precision):
            return policy
        if policy is None:
            return Precision()
        if not is_one_of(name := meant("precision", policy, _NAMED), _NAMED):
            raise ValueError(f"precision {policy!r} is not known: give one of {sorted(_NAMED)} or an ax.Precision(...)")
        return _NAMED[name]

    @property
    def scales_loss(self) -> bool:
        """Whether the compute dtype is float16, whose small range makes a training step scale its loss."""
        return self.compute == "float16"

    def cast_param(self, tree: PyTree) -> PyTree:
        """Floating leaves of `tree` in the `param` dtype."""
        return cast_floating(tree, self.param)

    def cast_compute(self, tree: PyTree) -> PyTree:
        """Floating leaves of `tree` in the `compute` dtype."""
        return cast_floating(tree, self.compute)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Floating leaves of `tree` in the `output` dtype."""
        return cast_floating(tree, self.output)

    def read_dtype(self, param_dtype) -> Any:
        """The dtype in which the model reads a parameter of `param_dtype`, and in which it is gathered."""
        floating = jnp.issubdtype(param_dtype, jnp.floating)
        return jnp.dtype(self.compute if self.compute and floating else param_dtype)

    def reduce_dtype(self, param_dtype) -> Any:
        """The dtype in which the gradient of a parameter of `param_dtype` is reduced over ranks: a complex one as it is."""
        own = jnp.issubdtype(param_dtype, jnp.complexfloating) or not self.reduce
        return jnp.dtype(param_dtype if own else self.reduce)

    def accumulate_dtype(self, param_dtype) -> Any:
        """The dtype in which the gradient of a parameter of `param_dtype` is accumulated over microbatches."""
        own = jnp.issubdtype(param_dtype, jnp.complexfloating) or not self.accumulate
        return self.reduce_dtype(param_dtype) if own else jnp.dtype(self.accumulate)


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Every floating leaf of `tree` in `dtype`; other leaves, and everything when dtype is None, as they are."""
    if dtype is None:
        return tree

    def cast(x):
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(dtype)
        return x

    return jax.tree.map(cast, tree)


_BF16 = Precision(param="float32", compute="bfloat16", reduce="bfloat16", accumulate="float32", output="float32")
_NAMED = {
    "float32": Precision(param="float32", compute="float32", reduce="float32", output="float32"),
    "bf16": _BF16,
    "bf16-reduce": replace(_BF16, accumulate=None),
    "bf16-reduce-float32": replace(_BF16, reduce="float32", accumulate=None),
    "fp8": replace(_BF16, products="fp8"),
    "fp16": Precision(param="float32", compute="float16", reduce="float32", output="float32"),
}
