"""Random keys of a rank's rows: a draw with one is this rank's part of what one device draws for the whole batch.

Such a key holds the words of a plain one and the number of the part. If a dim of a draw's shape has the size of the part's rows
(the first such dim counts), the draw is that part of the whole draw; every other draw is the same on all ranks. JAX's default
generator, threefry, computes each number from its place alone, so that a part costs a part; with
`jax_threefry_partitionable=False` the whole is drawn and sliced.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import random as extended

from axonml_jax.compat.jaxpr import Operation, jaxprs_among, opened

Words = tuple[jax.Array, jax.Array]
"""Numbers below 2**64, as their high and low 32 bits."""

THREEFRY, TAG = "threefry2x32", "rows"

KNOWN = ("random_bits", "random_split", "random_fold_in", "random_seed", "random_wrap", "random_clone")
"""The primitives of keys whose results are known to be a part of the whole draw, or the same on all ranks."""


class Drawn(NamedTuple):
    """A random draw in a traced program.

    Attributes:
      name: the name of its primitive.
      shape: the shape of what is drawn by each key; for `random_fold_in` that of its numbers.
      by_rows: whether its key, or what it makes, is a key of rows.
      line: the user's line.
    """

    name: str
    shape: tuple[int, ...]
    by_rows: bool
    line: str


def row_key(key: jax.Array, part: Any, rows: int, parts: int) -> jax.Array:
    """Makes the key of one part's rows.

    Args:
      key: the typed key of the whole batch.
      part: the number of the part.
      rows: number of rows of a part.
      parts: number of parts.

    Raises:
      ValueError: for keys of another generator than threefry.
    """
    if (kind := str(jax.random.key_impl(key))) != THREEFRY:
        raise ValueError(
            f'draws="rows" takes keys of {THREEFRY}, whose numbers depend on their places alone, not of {kind}: leave '
            'jax_default_prng_impl as it is, or take draws="shards"'
        )
    data = jnp.concatenate([jax.random.key_data(key), jnp.asarray(part, jnp.uint32)[None]])
    return jax.random.wrap_key_data(data, impl=_impl(rows, parts))


def is_row_key(x: Any) -> bool:
    """Whether an array, or its abstract value, holds keys of parts' rows."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and TAG in str(x.dtype)


def rows_of(key: Any) -> int:
    """The number of rows of a part, from a key of rows or its shape."""
    found = re.search(rf"{TAG}(\d+)of", str(key.dtype))
    assert found is not None
    return int(found[1])


@functools.cache
def _impl(rows: int, parts: int) -> Any:
    """The random generator of keys of rows, whose data are threefry's two words and the part's number."""
    whole = lambda shape, dim: (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])
    words = lambda key: jax.random.wrap_key_data(key[:2], impl=THREEFRY)

    def with_part(key: jax.Array, keys: jax.Array) -> jax.Array:
        data = jax.random.key_data(keys)
        return jnp.concatenate([data, jnp.broadcast_to(key[2:], (*data.shape[:-1], 1))], axis=-1)

    def own(array: jax.Array, key: jax.Array, dim: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, key[2].astype(jnp.int32) * rows, rows, dim)

    def bits(key: jax.Array, width: int, shape: Sequence[int]) -> jax.Array:
        shape, dtype = tuple(shape), jnp.dtype(f"uint{width}")
        if rows not in shape:
            return jax.random.bits(words(key), shape, dtype)
        dim = shape.index(rows)
        if _by_place():
            return _joined(_at_places(key, shape, dim, parts), dtype)
        return own(jax.random.bits(words(key), whole(shape, dim), dtype), key, dim)

    def split(key: jax.Array, shape: Sequence[int]) -> jax.Array:
        shape = tuple(shape)
        if rows not in shape:
            return with_part(key, jax.random.split(words(key), shape))
        dim = shape.index(rows)
        if _by_place():
            made = _at_places(key, shape, dim, parts)
            return jnp.stack([*made, jnp.broadcast_to(key[2], shape)], axis=-1)
        return with_part(key, own(jax.random.split(words(key), whole(shape, dim)), key, dim))

    return extended.define_prng_impl(
        key_shape=(3,),
        seed=lambda seed: with_part(jnp.zeros(3, jnp.uint32), jax.random.key(seed, impl=THREEFRY)),
        split=split,
        random_bits=bits,
        fold_in=lambda key, data: with_part(key, jax.random.fold_in(words(key), data)),
        name=f"{THREEFRY} of {rows} rows in {parts} parts",
        tag=f"{TAG}{rows}of{parts}",
    )


def _by_place() -> bool:
    """Whether the generator computes each number from its place in the whole draw alone."""
    return bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]


def _at_places(key: jax.Array, shape: Sequence[int], dim: int, parts: int) -> Words:
    """The words of threefry at a part's places in the whole draw, whose `dim` has all parts."""
    sizes = [size * parts if d == dim else size for d, size in enumerate(shape)]
    high, low = jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32)
    for d, size in enumerate(shape):
        index = jax.lax.iota(jnp.uint32, size)
        if d == dim:
            index = index + key[2] * jnp.uint32(size)
        spread = tuple(-1 if k == d else 1 for k in range(len(shape)))
        more = times(index.reshape(spread), math.prod(sizes[d + 1 :]))
        total = low + more[1]
        high, low = high + more[0] + (total < low).astype(jnp.uint32), total
    high, low = (jnp.broadcast_to(x, shape) for x in (high, low))
    first, second = (jnp.broadcast_to(key[k], shape) for k in (0, 1))
    made = extended.threefry2x32_p.bind(first, second, high, low)
    return made[0], made[1]


def times(x: jax.Array, factor: int) -> Words:
    """The low 64 bits of the product of numbers below 2**32 and one below 2**64, in 32-bit integers."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a, b = x >> half, x & mask
    c, d = (jnp.uint32(factor >> 16 & 0xFFFF), jnp.uint32(factor & 0xFFFF))
    middle = (b * d >> half) + (a * d & mask) + (b * c & mask)
    high = a * c + (a * d >> half) + (b * c >> half) + (middle >> half) + x * jnp.uint32(factor >> 32 & 0xFFFFFFFF)
    return high, middle << half | (b * d & mask)


def _joined(words: Words, dtype: Any) -> jax.Array:
    """Joins both words to random bits, as threefry does."""
    first, second = words
    if dtype.itemsize == 8:
        return first.astype(dtype) << jnp.asarray(32, dtype) | second.astype(dtype)
    return (first ^ second).astype(dtype)


# What a traced program draws.


def drawn_by_rows(key: Any, jaxpr: Any) -> tuple[Drawn, ...]:
    """The draws of a program if the key is one of rows; else none."""
    return tuple(draws(jaxpr)) if is_row_key(key) else ()


def draws(jaxpr: Any, line: str = "") -> list[Drawn]:
    """All draws of a program, in order; those in its inner programs once, with the line of the call around them."""
    found: list[Drawn] = []
    for eqn in opened(jaxpr).equations:
        op = Operation(eqn)
        if op.name.startswith("random_"):
            found.append(_drawn(op, line or op.line))
        for body in jaxprs_among(op.options):
            found += draws(body, line or op.line)
    return found


def _drawn(op: Operation, line: str) -> Drawn:
    if op.name == "random_fold_in":
        shape = op.given[1].shape
    elif "shape" in op.options:
        shape = op.options["shape"]
    else:
        shape = op.made[0].shape
    return Drawn(op.name, tuple(shape), any(map(is_row_key, [*op.given, *op.made])), line)
