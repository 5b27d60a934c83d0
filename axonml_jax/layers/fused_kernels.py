"""The Pallas kernels of `layers/fused.py`: memory-bound operations in one pass each way.

r rows, n features, v words. A program of a kernel takes tiles of whole rows; a tile's width is the power of two at or above
theirs. Sums over rows (gradients of scales and biases) are written program by program and added by XLA: the same in every run.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from axonml_jax.compat.triton import exp, kernel_call, load, store, tanh

F32 = jnp.float32
PROGRAMS = 528
"""Programs of a kernel that loops over rows: four for each of the 132 multiprocessors of an H100 or H200."""

TILE = 4096
"""Elements of a tile of rows; one row where rows are longer."""

SCALE, CUBIC = 0.7978845608028654, 0.044715
"""Constants of the tanh form of GELU: 0.5 u (1 + tanh(SCALE (u + CUBIC u^3)))."""


def width_of(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _steps(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)


def _trips(total: int, first: Any, programs: int) -> Any:
    """How many of `total` items a program handles that takes every `programs`th from its `first`."""
    return jax.lax.div(jnp.int32(total + programs - 1) - first, jnp.int32(programs))


def _loop(trips: Any, body: Any, start: Any) -> Any:
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(trips), body, start)


def _rows_of(n: int) -> int:
    return max(1, TILE // width_of(n))


def _tile(first: Any, rows: int, n: int, total: int) -> tuple[Any, Any, Any]:
    """The row and column indices of a tile, and the mask of its elements that exist."""
    r, c = first * rows + _steps(rows), _steps(width_of(n))
    return r, c, (r < total)[:, None] & (c < n)[None, :]


def _at(r: Any, c: Any) -> Any:
    return r[:, None], c[None, :]


def _wide(ref: Any, r: Any, c: Any, inside: Any) -> jax.Array:
    return load(ref, _at(r, c), inside).astype(F32)


def _row(ref: Any, c: Any, n: int) -> jax.Array:
    """Load one row of features, broadcastable against a tile."""
    return load(ref, c, c < n).astype(F32)[None, :]


# --------------------------------------------------------------------------------------------------
# Norms over the features.
# --------------------------------------------------------------------------------------------------


def _norm_kernel(*refs, rows, n, total, epsilon, centers, shifts):
    x, scale, *refs = refs
    shift = refs.pop(0) if shifts else None
    y, inverse, *means = refs
    r, c, inside = _tile(pl.program_id(0), rows, n, total)
    t = _wide(x, r, c, inside)
    if centers:
        mean = jnp.sum(t, axis=1) / n
        store(means[0], r, mean, r < total)
        t = jnp.where(inside, t - mean[:, None], 0.0)
    one = jax.lax.rsqrt(jnp.sum(t * t, axis=1) / n + epsilon)
    store(inverse, r, one, r < total)
    t = t * one[:, None] * _row(scale, c, n)
    store(y, _at(r, c), t if shift is None else t + _row(shift, c, n), inside)


def norm(x, scale, shift, *, epsilon: float, centers: bool, interpret: bool) -> Sequence[jax.Array]:
    """[r, n] -> ([r, n], 1 / deviations [r], means [r] if it centers)."""
    total, n = x.shape
    rows, shifts = _rows_of(n), shift is not None
    kernel = functools.partial(
        _norm_kernel, rows=rows, n=n, total=total, epsilon=epsilon, centers=centers, shifts=shifts
    )
    results = [((total, n), x.dtype), *[((total,), F32)] * (1 + centers)]
    operands = [x, scale, *([shift] if shifts else [])]
    return kernel_call(kernel, results, (pl.cdiv(total, rows),), operands, name="norm", warps=4, interpret=interpret)


def _norm_back_kernel(*refs, rows, n, total, programs, centers, beside):
    dy, x, inverse, scale, *refs = refs
    means = refs.pop(0) if centers else None
    more = refs.pop(0) if beside else None
    dx, sums = refs
    first, c = pl.program_id(0), _steps(width_of(n))
    g = _row(scale, c, n)

    def body(k, found):
        r, _, inside = _tile(first + k * programs, rows, n, total)
        one = load(inverse, r, r < total)[:, None]
        t, normed = _wide(dy, r, c, inside), _wide(x, r, c, inside)
        if means is not None:
            normed = jnp.where(inside, normed - load(means, r, r < total)[:, None], 0.0)
        normed = normed * one
        s = t * g
        out = s - normed * (jnp.sum(s * normed, axis=1, keepdims=True) / n)
        if means is not None:
            out = out - jnp.sum(s, axis=1, keepdims=True) / n
        out = out * one
        store(dx, _at(r, c), out if more is None else out + _wide(more, r, c, inside), inside)
        return found[0] + t * normed, found[1] + t

    zero = jnp.zeros((rows, width_of(n)), F32)
    tiles = pl.cdiv(total, rows)
    found = _loop(_trips(tiles, first, programs), body, (zero, zero))
    for k, each in enumerate(found):
        store(sums, (first, k, c), jnp.sum(each, axis=0), c < n)


def norm_back(dy, more, x, inverse, means, scale, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """([r, n] of x, with `more` added; [2, n] of the scale and the shift)."""
    total, n = x.shape
    rows = _rows_of(n)
    programs, wide = min(PROGRAMS, pl.cdiv(total, rows)), width_of(n) * rows > TILE
    flags = {"centers": means is not None, "beside": more is not None}
    kernel = functools.partial(_norm_back_kernel, rows=rows, n=n, total=total, programs=programs, **flags)
    operands = [dy, x, inverse, scale, *(each for each in (means, more) if each is not None)]
    results, warps = [((total, n), x.dtype), ((programs, 2, n), F32)], 16 if wide else 8
    dx, sums = kernel_call(kernel, results, (programs,), operands, name="norm_back", warps=warps, interpret=interpret)
    return dx, jnp.sum(sums, axis=0)


# --------------------------------------------------------------------------------------------------
# GELU of a sum.
# --------------------------------------------------------------------------------------------------

_GELU_ROWS, _GELU_WIDTH, _GELU_TILES = 2, 1024, 32


def _gelu_place(u: Any, i: Any, j: Any, rows: int, width: int) -> tuple[Any, Any, Any]:
    r, c = i * rows + _steps(rows), j * width + _steps(width)
    return r, c, (r < u.shape[0])[:, None] & (c < u.shape[1])[None, :]


def _gelu_kernel(u, bias, y, *, rows, width, interpret):
    r, c, inside = _gelu_place(u, pl.program_id(0), pl.program_id(1), rows, width)
    t = _wide(u, r, c, inside) + _row(bias, c, u.shape[1])
    store(y, _at(r, c), 0.5 * t * (1 + tanh(SCALE * (t + CUBIC * t * t * t), interpret)), inside)


def _gelu_back_kernel(dy, u, bias, du, sums, *, rows, width, tiles, interpret):
    first, column = pl.program_id(0), pl.program_id(1)
    c = column * width + _steps(width)
    add = _row(bias, c, u.shape[1])

    def body(k, found):
        r, _, inside = _gelu_place(u, first * tiles + k, column, rows, width)
        t = _wide(u, r, c, inside) + add
        th = tanh(SCALE * (t + CUBIC * t * t * t), interpret)
        slope = 0.5 * (1 + th) + 0.5 * t * (1 - th * th) * SCALE * (1 + 3 * CUBIC * t * t)
        out = (_wide(dy, r, c, inside) * slope).astype(du.dtype)
        store(du, _at(r, c), out, inside)
        return found + out.astype(F32)

    found = _loop(tiles, body, jnp.zeros((rows, width), F32))
    store(sums, (first, c), jnp.sum(found, axis=0), c < u.shape[1])


def gelu(u, bias, *, interpret: bool) -> jax.Array:
    """gelu(u + bias), the tanh form: [r, n] and [n] -> [r, n]."""
    rows, width = _GELU_ROWS, min(_GELU_WIDTH, width_of(u.shape[1]))
    kernel = functools.partial(_gelu_kernel, rows=rows, width=width, interpret=interpret)
    grid = pl.cdiv(u.shape[0], rows), pl.cdiv(u.shape[1], width)
    return kernel_call(kernel, [(u.shape, u.dtype)], grid, [u, bias], name="gelu", warps=4, interpret=interpret)[0]


def gelu_back(dy, u, bias, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """([r, n] of u, [n] of the bias)."""
    rows, width = _GELU_ROWS, min(_GELU_WIDTH, width_of(u.shape[1]))
    tiles = min(_GELU_TILES, pl.cdiv(u.shape[0], rows))
    grid = pl.cdiv(u.shape[0], rows * tiles), pl.cdiv(u.shape[1], width)
    kernel = functools.partial(_gelu_back_kernel, rows=rows, width=width, tiles=tiles, interpret=interpret)
    results = [(u.shape, u.dtype), ((grid[0], u.shape[1]), F32)]
    du, sums = kernel_call(kernel, results, grid, [dy, u, bias], name="gelu_back", warps=4, interpret=interpret)
    return du, jnp.sum(sums, axis=0)


# --------------------------------------------------------------------------------------------------
# Parts of one product's result, each plus its bias, and their gradients back into one.
# --------------------------------------------------------------------------------------------------


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _split_kernel(z, bias, *parts, rows, sizes, total):
    for part, (start, n) in zip(parts, _starts(sizes), strict=True):
        r, c, inside = _tile(pl.program_id(0), rows, n, total)
        add = load(bias, start + c, c < n).astype(F32)[None, :]
        store(part, _at(r, c), _wide(z, r, start + c, inside) + add, inside)


def split(z, bias, sizes: tuple[int, ...], *, interpret: bool) -> Sequence[jax.Array]:
    """z + bias cut along its features: [r, sum of sizes] -> [r, each size]."""
    total, rows = z.shape[0], _rows_of(max(sizes))
    kernel = functools.partial(_split_kernel, rows=rows, sizes=sizes, total=total)
    results, grid = [((total, n), z.dtype) for n in sizes], (pl.cdiv(total, rows),)
    return kernel_call(kernel, results, grid, [z, bias], name="split", warps=4, interpret=interpret)


def _join_kernel(*refs, rows, sizes, total, tiles):
    *parts, dz, sums = refs
    first = pl.program_id(0)
    for part, (start, n) in zip(parts, _starts(sizes), strict=True):

        def body(k, found, part=part, start=start, n=n):
            r, c, inside = _tile(first * tiles + k, rows, n, total)
            t = _wide(part, r, c, inside)
            store(dz, _at(r, start + c), t, inside)
            return found + t

        found = _loop(tiles, body, jnp.zeros((rows, width_of(n)), F32))
        c = _steps(width_of(n))
        store(sums, (first, start + c), jnp.sum(found, axis=0), c < n)


def join(parts, sizes: tuple[int, ...], *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """([r, sum of sizes], its sums over rows)."""
    total = parts[0].shape[0]
    rows = max(1, _rows_of(max(sizes)) // 2)
    tiles = min(8, pl.cdiv(total, rows))
    programs = pl.cdiv(total, rows * tiles)
    kernel = functools.partial(_join_kernel, rows=rows, sizes=sizes, total=total, tiles=tiles)
    results = [((total, sum(sizes)), parts[0].dtype), ((programs, sum(sizes)), F32)]
    dz, sums = kernel_call(kernel, results, (programs,), parts, name="join", warps=4, interpret=interpret)
    return dz, jnp.sum(sums, axis=0)


# --------------------------------------------------------------------------------------------------
# Cross entropy: the largest logit and the sum of exponentials in one pass, the gradient in the memory of the logits.
# --------------------------------------------------------------------------------------------------

_BLOCK, _CE_PROGRAMS = 4096, 1056


def _each_row(total: int, programs: int, body: Any) -> None:
    first = pl.program_id(0)
    _loop(_trips(total, first, programs), lambda k, s: (body(first + k * programs), s)[1], jnp.int32(0))


def _stats_kernel(logits, targets, normalizers, chosen, *, block, programs, interpret):
    words = logits.shape[1]

    def of_row(row):
        target = load(targets, row)
        inside = (target >= 0) & (target < words)
        value = load(logits, (row, jnp.where(inside, target, 0))).astype(F32)
        store(chosen, row, jnp.where(inside, value, 0.0))

        def of_block(k, state):
            top, total = state
            c = k * block + _steps(block)
            t = load(logits, (row, c), c < words, -jnp.inf).astype(F32)
            new = jnp.maximum(top, jnp.max(t))
            return new, total * jnp.exp(top - new) + jnp.sum(exp(t, new, interpret))

        top, total = _loop(pl.cdiv(words, block), of_block, (F32(-1e30), F32(0)))
        store(normalizers, row, top + jnp.log(total))

    _each_row(logits.shape[0], programs, of_row)


def stats(logits, targets, *, interpret: bool) -> Sequence[jax.Array]:
    """(log of the sum of exponentials [r], the target's logit [r]: 0 where it is none of these words)."""
    rows, words = logits.shape
    block, programs = min(_BLOCK, width_of(words)), min(_CE_PROGRAMS, rows)
    kernel = functools.partial(_stats_kernel, block=block, programs=programs, interpret=interpret)
    results = [((rows,), F32), ((rows,), F32)]
    return kernel_call(
        kernel, results, (programs,), [logits, targets], name="cross_entropy", warps=4, interpret=interpret
    )


def _softmax_back_kernel(logits, targets, normalizers, scales, out, *, block, programs, interpret):
    words = logits.shape[1]

    def of_row(row):
        target, normalizer, scale = (load(ref, row) for ref in (targets, normalizers, scales))

        def of_block(k, nothing):
            c = k * block + _steps(block)
            p = exp(load(logits, (row, c), c < words, -jnp.inf).astype(F32), normalizer, interpret)
            store(out, (row, c), jnp.where(c == target, p - 1, p) * scale, c < words)
            return nothing

        _loop(pl.cdiv(words, block), of_block, jnp.int32(0))

    _each_row(logits.shape[0], programs, of_row)


def softmax_back(logits, targets, normalizers, scales, *, interpret: bool) -> jax.Array:
    """(softmax - one at the target) * scales, in the memory of the logits."""
    rows, words = logits.shape
    block, programs = min(_BLOCK, width_of(words)), min(_CE_PROGRAMS, rows)
    kernel = functools.partial(_softmax_back_kernel, block=block, programs=programs, interpret=interpret)
    operands, results = [logits, targets, normalizers, scales], [(logits.shape, logits.dtype)]
    return kernel_call(
        kernel,
        results,
        (programs,),
        operands,
        name="cross_entropy_back",
        warps=4,
        interpret=interpret,
        in_place={0: 0},
    )[0]
