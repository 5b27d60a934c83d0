"""Attention kernels: which one fits a shape and a platform, and how to call it."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from axonml_jax.compat.order import manual_axes, mesh_around, platform_around
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.layers.pieces import BLOCK, largest_block

PLATFORMS = {"splash": "tpu", "cudnn": "cuda"}
"""Which platform each kernel is for."""

_WORTH_BLOCKS = {"cpu": 256, "tpu": 2048, "cuda": 2048, "rocm": 2048}
_LEAST_CAPABLE = 8.0


def attention_kernel(
    asked: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    drops: bool,
    segmented: bool = False,
    window: bool = False,
    sinks: bool = False,
    softcap: bool = False,
) -> str:
    """The form of attention to run: "xla", "blocks", "splash" or "cudnn".

    Args:
      asked: one of `ATTENTIONS`. "auto" takes the kernel of the platform that is compiled for where it applies.
        Else it takes blocks where they are worth it (`worth_blocks`), and the einsums for few queries or keys.
      query: [..., s, n, d] (s sequence, n heads, d head size).
      key: [..., t, k, d].
      value: [..., t, k, e].
      drops: whether attention weights are dropped out.
      segmented: whether rows hold several documents, none of which sees another.
      window: whether positions see only so many before them.
      sinks: whether heads have a score that stands for no key.
      softcap: whether scores are capped.

    Raises:
      ValueError: where a kernel was asked for by name and does not apply, with every reason.
    """
    rules = {"drops": drops, "segmented": segmented, "window": window, "sinks": sinks, "softcap": softcap}
    if asked == "auto":
        name = kernel_of(platform := target_platform())
        if name is not None and not any(obstacles(name, query, key, value, **rules)):
            return name
        return "blocks" if not drops and worth_blocks(platform, query.shape[-3], key.shape[-3]) else "xla"
    if asked in PLATFORMS and (reasons := list(obstacles(asked, query, key, value, **rules))):
        raise ValueError(
            f"attention={asked!r} does not apply here: {'; '.join(reasons)}. Leave attention='auto' to use the kernel where it "
            "applies and the einsum form elsewhere"
        )
    return asked


def in_context(asked: str) -> str:
    """The form of attention for `context_attention`, where positions are split over ranks.

    Raises:
      ValueError: where the einsums were asked for by name.
    """
    if asked == "xla":
        raise ValueError(
            f"attention={asked!r} reads keys of this rank's positions alone, and the plan's context axis splits them over "
            "ranks: leave attention='auto'"
        )
    return asked


def worth_blocks(platform: str | None, length: int, positions: int) -> bool:
    """Whether attention of these sizes runs block by block on a platform where no kernel applies.

    From 256 on CPU, where they are faster than the einsums as measured; from 2,048 on TPU and GPU, for memory's sake: scores of
    2,048 positions are larger than all else that a block of heads of 128 keeps.
    """
    return platform in _WORTH_BLOCKS and min(length, positions) >= _WORTH_BLOCKS[platform]


def kernel_of(platform: str | None) -> str | None:
    """The kernel for a platform, if there is one."""
    return next((name for name, own in PLATFORMS.items() if own == platform), None)


def shape_obstacles(name: str, dtype: Any, length: int, positions: int, size: int) -> Iterator[str]:
    """Yield why a kernel does not accept the dtype, the numbers of queries and keys, or the head size."""
    yield from (_splash_shapes if name == "splash" else _cudnn_shapes)(dtype, length, positions, size)


def target_platform(mesh: Mesh | None = None) -> str:
    """The platform to compile for: of a mesh, or the mesh around this code, else the default backend's.

    JAX's "gpu" reads "cuda" here, or "rocm" where this process's GPUs are AMD's.
    """
    platform = platform_around(mesh)
    return ("rocm" if _capability().startswith("gfx") else "cuda") if platform == "gpu" else platform


def gpu_capability() -> float | None:
    """The compute capability of this process's GPUs; None where it has none, or those of another maker."""
    return float(found) if re.fullmatch(r"\d+\.\d+", found := _capability()) else None


def too_old() -> str | None:
    """Why this process's GPUs run none of the kernels of GPUs; None if they do, or there are none."""
    capability = gpu_capability()
    if capability is None or capability >= _LEAST_CAPABLE:
        return None
    return f"it is a kernel for GPUs of compute capability {_LEAST_CAPABLE} or more, and these have {capability}"


def _capability() -> str:
    return str(getattr(jax.local_devices()[0], "compute_capability", ""))


def fused_attention(
    kernel: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention by "splash" or "cudnn"; the residuals grow with s, not with s * t.

    Args:
      kernel: see `attention_kernel`, which has to be asked first.
      query: [..., s, n, d].
      key: [..., t, k, d]; n is a multiple of k.
      value: [..., t, k, d].
      causal: a position sees none after it; the last query is at the last key.
      segment_ids: integer [..., s], of "splash": a query sees the keys of its own segment only.
      window: of causal attention by "splash": how many positions one sees, itself among them.
      scale: of the scores; None: d ** -0.5.
      softcap: of "splash": holds the scaled scores between -softcap and softcap.

    Returns:
      [..., s, n, d].
    """
    ids = None if segment_ids is None else segment_ids.reshape(-1, segment_ids.shape[-1])
    joined: list[Any] = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    if kernel == "cudnn":
        out = _cudnn(*joined, causal=causal, scale=scale)
    else:
        out = _splash(*joined, segment_ids=ids, causal=causal, window=window, scale=scale, softcap=softcap)
    return out.reshape(query.shape)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool, scale: float | None = None
) -> jax.Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, scale=scale, implementation="cudnn")


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[b, s, n, d] -> [b, s, n, d] by splash, which does not scale scores, so that the query is scaled before."""
    query = (query * (query.shape[-1] ** -0.5 if scale is None else scale)).astype(query.dtype)
    heads_first: list[Any] = [x.swapaxes(1, 2) for x in (query, key, value)]
    sizes = query.shape[2], query.shape[1], key.shape[1]
    kernel: Any = jax.vmap(_splash_kernel(*sizes, causal, window, softcap, interpret))
    if segment_ids is not None:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        heads_first.append(splash.SegmentIds(segment_ids, segment_ids))
    return kernel(*heads_first).swapaxes(1, 2).astype(query.dtype)


@lru_cache(maxsize=8)
def _splash_kernel(
    heads: int, length: int, positions: int, causal: bool, window: int | None, softcap: float | None, interpret: bool
) -> Any:
    """The splash kernel for one shape. Its block tables are made once, as NumPy arrays: no trace may keep them."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, positions)
    one = masks.CausalMask(shape, offset=positions - length) if causal else masks.FullMask(shape)
    one = one if window is None else masks.LocalMask(shape, (window - 1, 0), offset=positions - length)
    rows, columns = largest_block(length), largest_block(positions)
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=columns, block_kv_compute=columns, block_q_dkv=rows, block_kv_dkv=columns,
        block_kv_dkv_compute=columns, block_q_dq=rows, block_kv_dq=columns,
    )  # fmt: skip
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([one] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1,
            attn_logits_soft_cap=softcap, interpret=interpret,
        )  # fmt: skip
    return jax.tree.map(np.asarray, kernel)


def obstacles(
    name: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    drops: bool,
    segmented: bool,
    window: bool,
    sinks: bool,
    softcap: bool,
    positions: int | None = None,
) -> Iterator[str]:
    """Yield why a kernel does not apply; its arguments are those of `attention_kernel`.

    `positions` are how many keys are read at once, where it is another number than there are in `key`.
    """
    platform, wanted = target_platform(), PLATFORMS[name]
    if platform != wanted:
        yield f"it is a kernel for {wanted}, and this is compiled for {platform}"
    elif platform == "cuda" and (reason := too_old()):
        yield reason
    if drops:
        yield "it drops no attention weights (dropout must be 0 in train mode)"
    if segmented and name == "cudnn":
        yield "it does not keep the documents of a row apart (segment_ids)"
    if window and name == "cudnn":
        yield "it is used without sliding windows (window must be None)"
    if softcap and name == "cudnn":
        yield "it caps no scores (softcap must be None)"
    if name == "splash" and jax.config.jax_enable_x64:
        yield "it counts in 32 bits, and jax_enable_x64 is on"
    if sinks:
        yield "it has no sinks (sinks must be False)"
    if varying_axes(query):
        yield "it has no varying types (check_vma must be False)"
    if not _alone():
        yield "the partitioner would have to split it (every mesh axis of size above 1 must be bound by shard_map)"
    if value.shape[-1] != query.shape[-1]:
        yield f"its heads are of one size, and queries have {query.shape[-1]} numbers, values {value.shape[-1]}"
    yield from shape_obstacles(name, query.dtype, query.shape[-3], positions or key.shape[-3], query.shape[-1])


def _splash_shapes(dtype: Any, length: int, positions: int, size: int) -> Iterator[str]:
    if length % BLOCK or positions % BLOCK:
        yield f"{length} queries and {positions} keys must be multiples of {BLOCK}"
    if size % BLOCK:
        yield f"the head size {size} must be a multiple of {BLOCK}"
    if jnp.dtype(dtype).itemsize > 4:
        yield f"{jnp.dtype(dtype).name} is wider than 32 bits"


def _cudnn_shapes(dtype: Any, length: int, positions: int, size: int) -> Iterator[str]:
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        yield f"it computes in bfloat16 or float16, not in {jnp.dtype(dtype).name}"
    if size % 8 or size > 128:
        yield f"the head size {size} must be a multiple of 8, at most 128"
    if length % 2 or positions % 2:
        yield f"{length} queries and {positions} keys must be even"


def _alone() -> bool:
    """Whether every axis of more than one rank is manual, so that this code sees one device's part of every array."""
    mesh = mesh_around()
    if mesh.empty:
        return jax.device_count() == 1
    return all(size == 1 or axis in manual_axes() for axis, size in mesh.shape.items())
