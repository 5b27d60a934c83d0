"""`Context`: the strategy that splits positions of sequences over an axis, and its checks of models."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import jax
from flax import linen, nnx

from axonml_jax.base import is_one_of
from axonml_jax.collectives.gradients import GradSyncStrategy
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.view import Functional
from axonml_jax.sharding.layout import ORDERS, Order
from axonml_jax.strategies.replicate import Replicate
from axonml_jax.strategies.shard import Shard
from axonml_jax.strategies.strategy import (
    AbstractStrategy,
    C,
    ContextSplit,
    Decides,
    LeftToXLA,
    Method,
    Role,
    SplitsPositions,
    current_split,
    method_problem,
    split_by,
)

# --------------------------------------------------------------------------------------------------
# Which models may run on the positions that one rank has: all others would compute something else without a word.
# --------------------------------------------------------------------------------------------------

DECLARED = "splits_positions"
"""The class attribute by which a module says that its code is written for a rank's own positions."""


def problems_of(model: Functional, axis: str, ranks: int) -> Iterator[str]:
    """Problems of a model on an axis whose ranks have positions of their own, with the remedies."""
    if not model.declares(DECLARED):
        yield (
            f"{axis}={ranks} splits sequences over ranks, but no module of the model declares that its code is written for "
            f"one rank's positions: attention, position numbers and shifts would silently see a part of a sequence only. If "
            f"the code works on every position alone, or across positions only by ax.context_attention with "
            f"ax.context_positions, declare it by the class attribute {DECLARED} = True; else use a mesh without {axis}"
        )
    if found := dict(_plain_dropouts(model.abstract_module)):
        yield (
            f"plain dropout would draw the same masks for the positions of every rank along {axis}: {found} (rates); use "
            "ax.ParallelDropout(..., dim=-2, positions=True), which draws them by global positions, or a rate of 0"
        )


def _plain_dropouts(module: nnx.Module | None) -> Iterator[tuple[str, float]]:
    """Paths and rates of dropout whose masks do not follow positions; that of attention's own weights does."""
    from axonml_jax.layers.attention import TensorParallelAttention
    from axonml_jax.layers.latent import LatentAttention
    from axonml_jax.layers.linear import ParallelDropout

    modules = {} if module is None else dict(nnx.iter_graph(module))
    for path, each in modules.items():
        if not isinstance(each, nnx.Dropout) or not each.rate or getattr(type(each), DECLARED, False):
            continue
        of_weights = isinstance(modules.get(path[:-1]), (TensorParallelAttention, LatentAttention))
        if not (isinstance(each, ParallelDropout) and (each.holds_positions or of_weights)):
            yield "/".join(map(str, path)), each.rate


def refusing_linen_dropout(axis: str) -> AbstractContextManager:
    """Context in which a Linen module's plain dropout is refused where it is called with positions split over an axis.

    The modules of a Linen model are known only in its calls.
    """

    def refuse(call: Any, args: tuple, kwargs: dict, context: Any) -> jax.Array:
        module = context.module
        plain = isinstance(module, linen.Dropout) and not getattr(type(module), DECLARED, False)
        if plain and context.method_name == "__call__" and module.rate and current_split(axis) is not None:
            given = kwargs.get("deterministic", args[1] if len(args) > 1 else None)
            if not (module.deterministic if given is None else given):
                raise ValueError(
                    f"{'/'.join(module.path)}: linen.Dropout of rate {module.rate} would draw the same masks for the positions "
                    f"of every rank along {axis}: use a rate of 0, or a model without it"
                )
        return call(*args, **kwargs)

    return linen.intercept_methods(refuse)


# --------------------------------------------------------------------------------------------------
# Context parallelism: ranks hold positions of the same sequences; parameters are whole, or sharded together with
# `fsdp`.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _AcrossPositions(SplitsPositions, Decides):
    """Base of strategies whose last axis splits positions for `context_attention`.

    Attributes:
      method: how attention reads the keys and values of other ranks: "auto", "gather", "ulysses", "ring", or (U, "ring") or
        (U, "gather"), Ulysses among U ranks (see `ax.context_attention`).
      order: in which order ranks hold positions (see `ax.sequence_order`); "auto" is "zigzag", which balances causal attention.
    """

    method: Method = "auto"
    order: Literal["auto", "contiguous", "zigzag", "striped"] = "auto"

    @property
    def position_order(self) -> Order:
        """The order, with "auto" decided."""
        return "zigzag" if self.order == "auto" else self.order

    @contextmanager
    def inside(self, axis: AxisNames) -> Iterator[None]:
        """Tells layers how positions are split, and refuses plain dropout."""
        split = self.position_split(axis)
        with split_by(split), refusing_linen_dropout(split.axis):
            yield

    def position_split(self, axis: AxisNames) -> ContextSplit:
        """The split of positions over the last axis."""
        return ContextSplit(as_axes(axis)[-1], self.position_order, self.method)

    def model_problems(self, model: Functional, axis: AxisNames, degrees: Mapping[str, int]) -> list[str]:
        """Problems of a model that is not written for its rank's positions, or draws masks that every rank would repeat."""
        own = as_axes(axis)[-1]
        ranks, shared = degrees[own], 1 if isinstance(self.method, str) else self.method[0]
        if ranks == 1:
            return []
        uneven = [f"method={self.method!r}: {shared} must divide the {ranks} ranks of {own}"] * (ranks % shared > 0)
        return [*uneven, *problems_of(model, own, ranks)]

    def _split_problems(self) -> Iterator[str]:
        if problem := method_problem(self.method):
            yield problem
        if not is_one_of(self.order, ("auto", *ORDERS)):
            yield f"order={self.order!r} must be one of auto, {', '.join(ORDERS)}"

    def _split_in_words(self) -> str:
        method = self.method if isinstance(self.method, str) else f"{self.method[1]} of {self.method[0]}"
        return f"{self.position_order}{'' if method == 'auto' else f', {method}'}"


@dataclass(frozen=True, kw_only=True)
class Context(_AcrossPositions, Replicate, LeftToXLA):
    """Every rank of the axis holds other positions of the same sequences, and the whole parameter.

    The model's code sees its rank's positions only: a module says that it is written for that by the class attribute
    `splits_positions = True`. Random keys are the same on all ranks, for layers that draw masks by global positions.

    A model that nobody wrote for this sees whole sequences: the axis is left to XLA's partitioner, and the attention that is
    recognised in its traced code becomes `context_attention`. Positions then lie in contiguous order.

    Communicates: one all-reduce per bucket and update; what goes across positions the model's attention sends.

    Attributes:
      sees: what positions the model's code sees: "own", those of its rank; "whole", those of all; "auto": its own where it says
        `splits_positions = True`.
      allow_communication: with `sees="whole"`, what the model's code may send across positions besides attention and sums:
        False, as many bytes as its attention sends; True, whatever the partitioner sees fit; or bytes per rank and step.
      shard: parameters rest sharded over `fsdp` and this axis together, as the plan's `fsdp` says, and are gathered over both
        at once.
      method: how attention reads the keys and values of other ranks: "auto", "gather", "ulysses", "ring", or (U, "ring") or
        (U, "gather"), Ulysses among U ranks (see `ax.context_attention`).
      order: in which order ranks hold positions (see `ax.sequence_order`); "auto" is "zigzag", which balances causal attention.
    """

    sees: Literal["auto", "own", "whole"] = "auto"
    allow_communication: bool | int = False
    shard: bool = False

    def __post_init__(self):
        if isinstance(self.method, list):
            object.__setattr__(self, "method", tuple(self.method))
        super().__post_init__()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from self._split_problems()
        if not is_one_of(self.sees, ("auto", "own", "whole")):
            yield f"sees={self.sees!r} must be 'auto', 'own' or 'whole'"
        elif self.sees == "whole" and self.order not in ("auto", "contiguous"):
            yield f"order={self.order!r} reorders positions, and with sees='whole' the model's code sees them as they are given"
        elif self.sees == "whole" and self.shard:
            yield "shard=True shards parameters over an axis that sees='whole' leaves to the partitioner: use fsdp alone"
        if not isinstance(self.allow_communication, int) or self.allow_communication < 0:
            yield f"allow_communication={self.allow_communication!r} must be True, False or a number of bytes"
        if not is_one_of(self.shard, (True, False)):
            yield f"shard={self.shard!r} must be True or False"
        if self.sync_strategy in (GradSyncStrategy.NO_SYNC, GradSyncStrategy.NO_SYNC.value):
            yield "sync_strategy=NO_SYNC: ranks along context have parts of the same sequences, and train one model"

    @property
    def position_order(self) -> Order:
        """The order, with "auto" decided."""
        return "contiguous" if self.sees == "whole" else super().position_order

    def having(self, kind: type[C]) -> C | None:
        """The strategy as this capability; it is `LeftToXLA` only where the model's code sees whole sequences."""
        return None if kind is LeftToXLA and self.sees != "whole" else super().having(kind)

    def for_model(self, model: Functional) -> "Context":
        """Decides which positions the model's code sees."""
        if self.sees != "auto":
            return self
        whole = not model.declares(DECLARED) and not self.shard and self.order in ("auto", "contiguous")
        return replace(self, sees="whole" if whole else "own")

    def model_problems(self, model: Functional, axis: AxisNames, degrees: Mapping[str, int]) -> list[str]:
        """Problems of a model that sees its rank's positions; none where it sees whole sequences."""
        return [] if self.sees == "whole" else super().model_problems(model, axis, degrees)

    def rewritten(self, fun: Callable[..., Any], axis: AxisNames, check_vma: bool) -> Callable[..., Any]:
        """The function with the attention that is recognised in it replaced by `context_attention`."""
        from axonml_jax.layers.found import attending_across

        return attending_across(fun, as_axes(axis)[-1], self.method, check_vma=check_vma)

    def partitioner_budget(self, attention: float) -> float:
        """Bytes that the partitioner may send, as `allow_communication` says."""
        if isinstance(self.allow_communication, bool):
            return math.inf if self.allow_communication else attention
        return self.allow_communication

    @property
    def role(self) -> Role:
        """Splits positions, holds parameters whole; gradients are reduced once a step."""
        return Role(batch="positions", keys="alike")

    def with_fsdp(self, fsdp: AbstractStrategy) -> "ShardedContext | None":
        """The joint strategy of `fsdp` and `context` with `shard`; None without."""
        if not self.shard:
            return None
        if not isinstance(fsdp, Shard):
            raise ValueError(
                f"context={self!r} shards parameters as the plan's fsdp does, which is {fsdp!r}: give "
                "fsdp=ax.Shard(stage=...), or shard=False"
            )
        return ShardedContext(**_fields(fsdp), method=self.method, order=self.order)

    def in_words(self, axis: AxisNames) -> str:
        """A description for tables."""
        return f"sequences over {'*'.join(as_axes(axis))} ({self._split_in_words()})"


@dataclass(frozen=True, kw_only=True)
class ShardedContext(_AcrossPositions, Shard):
    """Every rank of two axes holds a part of each parameter; the first splits rows, the second positions.

    `Context(shard=True)` makes it. Communicates: what `Shard` does, over both axes at once.
    """

    def __post_init__(self):
        if problems := list(self._split_problems()):
            raise ValueError("; ".join(problems))
        super().__post_init__()

    @property
    def role(self) -> Role:
        """The role of `Shard` over both rows and positions."""
        return replace(super().role, batch=("rows", "positions"), keys="alike")

    def in_words(self, axis: AxisNames) -> str:
        """A description for tables."""
        own = as_axes(axis)
        return f"{super().in_words(axis)} over {'*'.join(own)}, sequences over {own[-1]} ({self._split_in_words()})"


def _fields(shard: Shard) -> dict:
    return {field.name: getattr(shard, field.name) for field in fields(Shard)}
