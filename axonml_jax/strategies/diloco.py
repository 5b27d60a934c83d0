"""`DiLoCo`: the strategy of replicas that train by themselves for rounds, and then join (Douillard et al. 2023)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axonml_jax.base import is_one_of
from axonml_jax.collectives.gradients import all_reduce_leaves
from axonml_jax.collectives.primitives import axis_size, gather_whole
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.view import Functional
from axonml_jax.sharding.layout import Layout
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import (
    packed,
    packed_sizes,
    scatter_sum_packed,
    travels_packed,
    unpacked,
    wide,
    wire_dtype,
)
from axonml_jax.strategies.strategy import AbstractStrategy, Bucketed, Decides, LocalRounds, Role, Transfer

_WHOLE = Replicate()
_ALONE = Replicate(sync_strategy="no_sync")  # pyright: ignore[reportArgumentType]  # Replicate converts names


@dataclass(frozen=True, kw_only=True)
class DiLoCo(AbstractStrategy, LocalRounds, Bucketed, Decides):
    """Every rank of the axis trains a replica of its own, and they join once in H steps (Douillard et al. 2023).

    The inner optimizer is the trainer's, with a state for every replica. After H steps the mean over replicas of (outer
    parameters - the replica's) is the gradient of an outer step by SGD with Nesterov momentum, and every replica begins again
    from the new outer parameters. With `every=1`, `lr=1`, `momentum=0` and SGD inside this is data parallelism.

    Communicates: nothing in a step; once in `every` steps one all-reduce of what parameters changed by. With `wire="int8"`
    matrices travel in one byte an element and a float32 scale per block of at most 256, rounded half to even: one all-to-all,
    after which every rank adds up its part in float32, and one all-gather of the sums, which are rounded once more.

    Attributes:
      every: H, the steps of a round.
      lr: the outer learning rate.
      momentum: the outer momentum; 0 is plain SGD.
      wire: the dtype in which changes of parameters travel: None as float32 (or wider, where parameters are), "bf16" or "int8".
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    wire: Literal["bf16", "int8"] | None = None

    def __post_init__(self):
        if problems := list(self._problems()):
            raise ValueError(f"DiLoCo: {'; '.join(problems)}")

    def _problems(self) -> Iterator[str]:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or not 1 <= self.every < 2**31:
            yield f"every={self.every!r} must be a positive whole number of steps below 2**31"
        if not (_is_number(self.lr) and self.lr > 0):
            yield f"lr={self.lr!r}, the outer learning rate, must be a positive number (the paper's is 0.7)"
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            yield f"momentum={self.momentum!r} must be a number of at least 0 and below 1 (the paper's is 0.9)"
        if not is_one_of(self.wire, (None, "bf16", "int8")):
            yield f"wire={self.wire!r} must be None, 'bf16' or 'int8'"

    @property
    def role(self) -> Role:
        """The role of the outer parameters: rows are split, parameters whole; gradients of `value_and_grad` are summed."""
        return _WHOLE.role

    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """The leaf as it is: whole on every rank."""
        return layout

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The outer leaf as it is, typed as varying."""
        return _WHOLE.gather(shard, layout, axis)

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Sums gradients of the outer parameters (`value_and_grad`); a training step does not call it."""
        return _WHOLE.sync(grad, layout, axis)

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Sums the bucket by one all-reduce."""
        return _WHOLE.sync_bucket(grads, layouts, axis)

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """No transfers: every rank has the leaf."""
        return ()

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """The transfers of a gradient: one all-reduce."""
        return _WHOLE.sync_flows(elements, layout, axis, ranks, dtype)

    def within_round(self) -> Replicate:
        """The strategy of a step within a round: every rank trains a model of its own."""
        return _ALONE

    def model_problems(self, model: Functional, axis: AxisNames, degrees: Mapping[str, int]) -> list[str]:
        """Problems of models with state that steps change, which replicas cannot join, and of complex ones under a `wire`."""
        problems = []
        if jax.tree.leaves(model.shapes.state):
            problems.append(
                "DiLoCo: this model has state that a step changes (BatchNorm's averages, a router's bias). Replicas would "
                "change it each for itself, and there is no rule to join it by: use norms without state (LayerNorm, RMSNorm), "
                "or ax.Replicate()"
            )
        leaves = jax.tree.leaves(model.shapes.params)
        if self.wire is not None and any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
            problems.append(
                f"DiLoCo: wire={self.wire!r} has no complex numbers, and this model has some: use wire=None"
            )
        return problems

    def in_words(self, axis: AxisNames) -> str:
        """A description for tables."""
        wire = f" as {self.wire}" if self.wire else ""
        return (
            f"DiLoCo over {'*'.join(as_axes(axis))}: {self.every} steps alone, then one outer step{wire} "
            f"(lr {self.lr:g}, momentum {self.momentum:g})"
        )

    # Rounds

    @property
    def round_copies(self) -> float:
        """Copies at the peak of a round's end; fewer in int8, where leaves are summed one by one, so that few sums are there.

        In int8, compiled programs had 2.0 to 2.7 copies, by the size of the largest leaf and the number of ranks.
        """
        return 2.5 if self.wire == "int8" else 3

    def first_kept(self, param: jax.Array) -> jax.Array:
        """Zeros: the outer momentum."""
        return jnp.zeros_like(param)

    def end_round(
        self,
        outer: Sequence[jax.Array],
        own: Sequence[jax.Array],
        kept: Sequence[jax.Array],
        layouts: Sequence[Layout],
        axis: AxisNames,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Updates the outer parameters by SGD with Nesterov momentum; its gradient is the mean over ranks of outer - own."""
        ranks, wide = axis_size(axis), [_widened(leaf) for leaf in outer]
        sums = self._summed([_widened(x) - _widened(y) for x, y in zip(outer, own, strict=True)], layouts, axis)
        grads = [total / ranks for total in sums]
        momenta = [self.momentum * _widened(old) + grad for old, grad in zip(kept, grads, strict=True)]
        steps = [grad + self.momentum * momentum for grad, momentum in zip(grads, momenta, strict=True)]
        new = [(x - self.lr * step).astype(old.dtype) for x, step, old in zip(wide, steps, outer, strict=True)]
        return new, [momentum.astype(old.dtype) for momentum, old in zip(momenta, kept, strict=True)]

    def round_dtype(self, dtype: Any) -> Any:
        """The dtype that `wire` names; that of the sums without one."""
        return jnp.dtype({"bf16": "bfloat16", "int8": "int8", None: wide(dtype)}[self.wire])

    def round_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One all-reduce; for a matrix in int8 an all-to-all and an all-gather of its values, and as many of its scales."""
        if not self._packs(layout):
            sent = wide(dtype) if self.wire == "int8" else self.round_dtype(dtype)
            return (Transfer(kind="all_reduce", elements=elements, ranks=ranks, dtype=sent),)
        values, scales = packed_sizes(-(-elements // ranks))
        return tuple(
            Transfer(kind=kind, elements=ranks * size, ranks=ranks, dtype=sent)
            for kind in ("all_to_all", "all_gather")
            for size, sent in ((values, wire_dtype("int8")), (scales, jnp.dtype("float32")))
        )

    def _packs(self, layout: Layout) -> bool:
        return self.wire == "int8" and layout.size > 0 and travels_packed(layout, layout.dtype)

    def _summed(self, leaves: list[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Sums every leaf over replicas, in the dtype in which it travels."""
        packs = [self._packs(layout) for layout in layouts]
        plain = [leaf for leaf, packed in zip(leaves, packs, strict=True) if not packed]
        dtype = "bfloat16" if self.wire == "bf16" else None
        sums = iter(all_reduce_leaves(plain, axis, flat=False, comm_dtype=dtype))
        return [_packed_sum(leaf, axis) if packed else next(sums) for leaf, packed in zip(leaves, packs, strict=True)]


def _packed_sum(leaf: jax.Array, axis: AxisNames) -> jax.Array:
    """Sums a leaf over an axis in int8: every rank adds up its part of what all have sent, and sends the sum likewise."""
    ranks = axis_size(axis)
    part = -(-leaf.size // ranks)
    padded = jnp.pad(leaf.ravel(), (0, ranks * part - leaf.size))
    mine = scatter_sum_packed([padded], axis, [0], "int8", flat=False)[0]
    whole = [gather_whole(sent, axis, 0, invarying=True) for sent in packed(mine, "int8")]
    sums = unpacked(whole[0], whole[1], (part,), leaf.dtype, "int8")
    return sums.ravel()[: leaf.size].reshape(leaf.shape)


def _widened(leaf: jax.Array) -> jax.Array:
    return leaf.astype(wide(leaf.dtype))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
