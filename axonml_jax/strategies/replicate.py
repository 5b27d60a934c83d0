"""`Replicate`: parameters whole on every rank of an axis, gradients summed (DDP)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import is_choice, is_one_of, meant
from axonml_jax.collectives.gradients import GradSyncStrategy, all_reduce_leaves
from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.sharding.layout import Layout
from axonml_jax.strategies.strategy import MIB, AbstractStrategy, Bucketed, Decides, Fabric, Reducer, Role, Transfer

_ENDLESS_MB = 2**40


@dataclass(frozen=True, kw_only=True)
class Replicate(AbstractStrategy, Bucketed, Reducer, Decides):
    """Every rank of the axis holds the whole parameter (DDP; Li et al. 2020).

    Communicates: one all-reduce per bucket and update.

    Attributes:
      sync_strategy: OVERLAPPED reduces a bucket where its gradients are ready, inside the backward; SYNCHRONOUS after
        the backward; NO_SYNC never: every rank then trains a model of its own.
      bucket_size_mb: capacity of a bucket in MiB of what travels; buckets fill in the order in which gradients are ready.
      gradient_as_bucket_view: True reduces a bucket's leaves side by side without a flat copy; False copies them into one
        flat buffer and launches once; None takes what is fastest on the backend (flat on gloo).
      comm_dtype: the dtype in which gradients travel; None sends them as they are.
      comm_hook: `hook(flat_bucket, axes) -> summed flat bucket` in the place of the all-reduce; it implies a flat buffer.
    """

    sync_strategy: GradSyncStrategy = GradSyncStrategy.OVERLAPPED
    bucket_size_mb: float = 25.0
    gradient_as_bucket_view: bool | None = None
    comm_dtype: str | None = None
    comm_hook: Callable[[jax.Array, tuple[str, ...]], jax.Array] | None = None

    def __post_init__(self):
        if problems := list(self._problems()):
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "sync_strategy", GradSyncStrategy(self.sync_strategy))
        if self.gradient_as_bucket_view is not None:  # 0 and NumPy's False are accepted, but are not `False`
            object.__setattr__(self, "gradient_as_bucket_view", bool(self.gradient_as_bucket_view))
        if self.comm_dtype is not None:
            object.__setattr__(self, "comm_dtype", jnp.dtype(meant("dtype", self.comm_dtype)).name)

    def _problems(self) -> Iterator[str]:
        names = [strategy.value for strategy in GradSyncStrategy]
        if not is_choice(GradSyncStrategy, self.sync_strategy):
            yield f"sync_strategy={self.sync_strategy!r} must be an ax.GradSyncStrategy or one of {names}"
        if not _is_positive(self.bucket_size_mb):
            yield f"bucket_size_mb={self.bucket_size_mb!r} must be a positive number (PyTorch's default is 25)"
        if not is_one_of(self.gradient_as_bucket_view, (None, True, False)):
            yield f"gradient_as_bucket_view={self.gradient_as_bucket_view!r} must be True, False or None"
        if self.comm_dtype is not None and not _is_floating(self.comm_dtype):
            yield f"comm_dtype={self.comm_dtype!r} must be a floating dtype such as 'bfloat16' or 'float16'"
        if self.comm_hook is not None and not callable(self.comm_hook):
            yield f"comm_hook={self.comm_hook!r} must be a function hook(flat_bucket, axes) -> summed flat bucket"
        if self.comm_hook is not None and self.gradient_as_bucket_view:
            yield "comm_hook= takes a flat bucket, so gradient_as_bucket_view=True cannot hold: leave it out"

    @property
    def role(self) -> Role:
        """Splits rows, holds parameters whole; gradients are reduced once a step, or never."""
        alone = self.sync_strategy is GradSyncStrategy.NO_SYNC
        return Role(reduces="never" if alone else "step")

    def spec(self, layout: Layout, axis: AxisNames, axis_size: int) -> Layout:
        """The leaf as it is: whole on every rank."""
        return layout

    def gather(self, shard: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """The leaf as it is, typed as varying: each rank's use of it has a gradient of its own."""
        return vary(shard, axis)

    def sync(self, grad: jax.Array, layout: Layout, axis: AxisNames) -> jax.Array:
        """Sums the ranks' gradients; with NO_SYNC returns this rank's own."""
        return self.sync_bucket([grad], [layout], axis)[0]

    def sync_bucket(self, grads: Sequence[jax.Array], layouts: Sequence[Layout], axis: AxisNames) -> list[jax.Array]:
        """Sums the bucket by one reduction."""
        if self.sync_strategy is GradSyncStrategy.NO_SYNC:
            return list(grads)
        flat = self.gradient_as_bucket_view is False
        sums = all_reduce_leaves(grads, axis, flat=flat, comm_dtype=self.comm_dtype, comm_hook=self.comm_hook)
        if self.comm_hook is not None and any(varying_axes(total) & set(as_axes(axis)) for total in sums):
            raise ValueError(
                f"check_vma=True: the type of the result of comm_hook={self.comm_hook!r} says that it differs along {axis!r} "
                "(as results of `ax` collectives do), so JAX cannot tell that every rank gets the same gradient: end the hook "
                "in jax.lax.psum, or use check_vma=False (the default; the result is the same)"
            )
        return sums

    def gather_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """No transfers: every rank has the leaf."""
        return ()

    def sync_flows(
        self, elements: int, layout: Layout, axis: AxisNames, ranks: int, dtype: Any
    ) -> tuple[Transfer, ...]:
        """One all-reduce; no transfers with NO_SYNC."""
        if self.sync_strategy is GradSyncStrategy.NO_SYNC:
            return ()
        return (Transfer(kind="all_reduce", elements=elements, ranks=ranks, dtype=self.wire_dtype(dtype)),)

    @property
    def exact(self) -> bool:
        """Whether gradients travel in their own dtype, and not through a hook."""
        return self.comm_dtype is None and self.comm_hook is None

    def reducing(self) -> "Replicate":
        """The strategy as it is; in the place of NO_SYNC one that is SYNCHRONOUS."""
        alone = self.sync_strategy is GradSyncStrategy.NO_SYNC
        return replace(self, sync_strategy=GradSyncStrategy.SYNCHRONOUS) if alone else self

    def decided(self, fabric: Fabric, ranks: int) -> "Replicate":
        """Chooses flat buffers on gloo; elsewhere XLA's combiner needs no copy."""
        if self.gradient_as_bucket_view is not None or self.comm_hook is not None:
            return self
        return replace(self, gradient_as_bucket_view=not fabric.gloo)

    def in_words(self, axis: AxisNames) -> str:
        """A description for tables."""
        return f"replicated over {'*'.join(as_axes(axis))}"

    def wire_dtype(self, dtype: Any) -> Any:
        """The dtype in which a gradient of `dtype` travels: complex ones as they are."""
        return jnp.dtype(self.comm_dtype if self.comm_dtype and jnp.issubdtype(dtype, jnp.floating) else dtype)

    @property
    def bucket_bytes(self) -> int:
        """Capacity of a bucket in bytes."""
        return max(1, int(min(self.bucket_size_mb, _ENDLESS_MB) * MIB))

    @property
    def overlaps(self) -> bool:
        """Whether `sync_strategy` is OVERLAPPED."""
        return self.sync_strategy is GradSyncStrategy.OVERLAPPED


def _is_positive(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and float(number) > 0


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(meant("dtype", dtype)), jnp.floating))
    except (TypeError, ValueError):
        return False
