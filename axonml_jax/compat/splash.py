"""JAX's splash attention for TPUs on a piece of a larger attention: positions, blocks and the log-sum-exp are arrays.

The public kernel takes masks that are NumPy arrays, and its backward takes no log-sum-exp of other pieces. The kernels inside
it (forward, gradient of queries, gradients of keys and values) take both as arrays, and are called here:
`_splash_attention_forward`, `_splash_attention_bwd_dq` and `_splash_attention_bwd_dkv`, with the same arguments in all
supported versions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class SplashCall:
    """The options that all pieces share.

    Attributes:
      rows, columns: the size of a block: number of queries and of keys, multiples of 128 that divide those of the piece.
      stride: positions per key: key i is compared as position i * stride.
      before, after: a query at place p sees key i where p - before <= i * stride <= p + after; None: no bound.
      softcap: holds scores between -softcap and softcap.
      interpret: whether Pallas interprets the kernel, on any platform.
    """

    rows: int
    columns: int
    stride: int = 1
    before: int | None = None
    after: int | None = None
    softcap: float | None = None
    interpret: bool = False

    @property
    def bounded(self) -> bool:
        """Whether positions bound which keys a query sees, before or after it."""
        return self.before is not None or self.after is not None


class Visits(NamedTuple):
    """The pairs of blocks that are computed (i blocks of queries, j of keys).

    Attributes:
      keys: for every block of queries the blocks of keys that it visits, int [i, at most j], and whether each counts.
      queries: for every block of keys the blocks of queries, int [at most i, j], likewise.
    """

    keys: tuple[jax.Array, jax.Array]
    queries: tuple[jax.Array, jax.Array]


class SplashPiece(NamedTuple):
    """Queries and the keys that they read (b rows, n query heads, g key heads, s queries, t keys).

    Attributes:
      q: [b, n, s, d], scaled.
      k, v: [b, g, t, d].
      places: the positions of the queries, int32 [s], where the call is bounded; else None.
      segments: int32 [b, s] and [b, t]: a query sees the keys of its own; or None.
      visits: None: every block of queries visits every block of keys.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    places: jax.Array | None
    segments: tuple[jax.Array, jax.Array] | None
    visits: Visits | None


def splash_forward(call: SplashCall, piece: SplashPiece) -> tuple[jax.Array, jax.Array]:
    """Computes the attention of a piece.

    Returns:
      The attention, [b, n, s, d] in the dtype of q, and the log-sum-exp of its scores, float32 [b, n, s]; 0 and -inf for a
      query that sees no key.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    sizes = splash.BlockSizes(block_q=call.rows, block_kv=call.columns, block_kv_compute=call.columns)

    def read(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return splash._splash_attention_forward(
            _mask_info(piece, "keys"), q, k, v, segments, None, mask_value=_HIDDEN, is_mqa=False, block_sizes=sizes,
            residual_checkpoint_name=None, save_residuals=True, mask_function=_mask_function(call),
            attn_logits_soft_cap=call.softcap, interpret=call.interpret,
        )  # fmt: skip

    out, (lse,) = _by_row(read, piece, piece.q, piece.k, piece.v)
    seen = lse > _HIDDEN / 2  # else no block was visited (and out is NaN), or all its scores were hidden
    return jnp.where(seen[..., None], out, 0), jnp.where(seen, lse, -jnp.inf)


def splash_backward(
    call: SplashCall, piece: SplashPiece, lse: jax.Array, inner: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the piece's contribution to the gradients of q, k and v, in their dtypes, in an attention of several pieces.

    Args:
      call, piece: those of `splash_forward`.
      lse: float32 [b, n, s], the log-sum-exp over all pieces together.
      inner: float32 [b, n, s], the attention of all pieces times its gradient, summed over d.
      grad: [b, n, s, d], the gradient of the attention of all pieces.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    layout = splash.QKVLayout.HEAD_DIM_MINOR
    shared: dict[str, Any] = {
        "is_mqa": False, "mask_value": _HIDDEN, "attn_logits_soft_cap": call.softcap, "q_layout": layout, "k_layout": layout,
        "v_layout": layout, "mask_function": _mask_function(call), "interpret": call.interpret,
    }  # fmt: skip

    def undo(q: Any, k: Any, v: Any, lse: Any, grad: Any, inner: Any, segments: Any) -> Any:
        given = q, k, v, segments, None, lse, grad, inner
        blocks = {"bq": call.rows, "bkv": call.columns}
        dq = splash._splash_attention_bwd_dq(*given, **blocks, mask_info=_mask_info(piece, "keys"), **shared)
        _, dk, dv = splash._splash_attention_bwd_dkv(
            *given, **blocks, bkv_compute=call.columns, use_fused_bwd_kernel=False, mask_info=_mask_info(piece, "queries"),
            **shared,
        )  # fmt: skip
        return dq, dk, dv

    lse = jnp.where(jnp.isneginf(lse), 0, lse)  # a query without keys: then exp(hidden - lse) is 0
    return _by_row(undo, piece, piece.q, piece.k, piece.v, lse, grad, inner)


def _by_row(fun: Callable[..., Any], piece: SplashPiece, *arrays: jax.Array) -> Any:
    """Maps the kernel's programs, which have no batch dim, over rows."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    segments = None if piece.segments is None else splash.SegmentIds(*piece.segments)
    return jax.vmap(fun)(*arrays, segments)


def _mask_function(call: SplashCall) -> Callable[[Any, Any], Any] | None:
    if not call.bounded:
        return None

    def seen(queries: Any, keys: Any) -> Any:
        keys, seen = keys if call.stride == 1 else keys * call.stride, None
        if call.after is not None:
            seen = keys <= (queries + call.after if call.after else queries)
        if call.before is not None:
            near = keys >= queries - call.before
            seen = near if seen is None else seen & near
        return seen

    return seen


def _mask_info(piece: SplashPiece, side: str) -> Any:
    """`MaskInfo` as the kernel reads it: scalars in small memory, of the smallest type that holds them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as infos

    places: Any = piece.places
    if piece.visits is None:
        return infos.MaskInfo(None, None, None, None, places)
    blocks, counts = piece.visits.keys if side == "keys" else piece.visits.queries
    most = max(piece.visits.keys[0].shape[0], piece.visits.queries[0].shape[1])
    small = jnp.int8 if most <= 128 else jnp.int16
    return infos.MaskInfo(blocks[None].astype(small), None, counts[None].astype(jnp.int8), None, places)
