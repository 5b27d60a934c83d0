"""LoRA (Hu et al. 2022): which matrices of a model get adapters of low rank, and how each begins."""

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.model.lora.int8_base import END, KINDS

STACKED = "stacked_dims"
"""Metadata of a parameter: so many of its first dims number matrices, as layers of a stack or experts do."""

ENDS = ("_lora_a", "_lora_b")
"""How the names of adapters end, behind that of their matrix."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters of some matrices of a model; make it by `ax.lora`.

    Attributes:
      rank: r, columns of A and rows of B.
      alpha: the product counts alpha / rank times.
      targets: regular expressions, searched in path names, of the matrices that get adapters.
      stacked: of parameters of which the last two dims are a matrix and the others number them.
      seed: of the first values of A.
      base: "int8": matrices with adapters rest as int8 (`int8_base.py`); None: as they are.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    stacked: tuple[str, ...] = ()
    seed: int = 0
    base: str | None = None

    def __post_init__(self):
        problems = []
        if self.base is not None and self.base not in KINDS:
            problems.append(f"base={self.base!r} must be one of {', '.join(map(repr, KINDS))}, or None")
        if not isinstance(self.rank, Integral) or self.rank < 1:
            problems.append(f"rank={self.rank!r} must be a positive whole number")
        if not isinstance(self.alpha, Real) or not 0 < self.alpha < math.inf:
            problems.append(f"alpha={self.alpha!r} must be a positive number")
        if not self.targets:
            problems.append("targets is empty: give regular expressions of the matrices' path names")
        problems += [why for name in ("targets", "stacked") for why in _broken(name, getattr(self, name))]
        if problems:
            raise ValueError(f"lora: {'; '.join(problems)}")

    @property
    def scale(self) -> float:
        """How often the product of the adapters counts."""
        return self.alpha / self.rank

    def chosen(self, shapes: Mapping[str, Any], stacks: Mapping[str, int]) -> dict[str, int]:
        """The matrices that get adapters.

        Args:
          shapes: anything with a shape for every parameter, by path.
          stacks: how many first dims number matrices, where a layer says it.

        Returns:
          How many first dims number matrices, by path.

        Raises:
          ValueError: listing every pattern that matches nothing, and every match that is no matrix or too small.
        """
        hits = {pattern: [n for n in shapes if re.search(pattern, n)] for pattern in (*self.targets, *self.stacked)}
        problems = [f"  {pattern!r} matches no parameter" for pattern, names in hits.items() if not names]
        listed = {name for pattern in self.stacked for name in hits[pattern]}
        found = {}
        for name in dict.fromkeys(name for pattern in self.targets for name in hits[pattern]):
            shape = tuple(shapes[name].shape)
            found[name] = max(len(shape) - 2, 0) if name in listed else stacks.get(name, 0)
            if why := self._unfit(shape, found[name]):
                problems.append(f"  {name} {shape}: {why}")
        if problems:
            some = [name for name, leaf in shapes.items() if len(leaf.shape) == 2 + stacks.get(name, 0)]
            raise ValueError(
                f"lora: rank={self.rank}, targets={list(self.targets)} do not fit the model:\n"
                + "\n".join(problems)
                + "\n"
                "a target is a matrix, or a stack of them that its layer or `stacked` names; matrices here are "
                f"{', '.join(some[:8])}{', ...' if len(some) > 8 else ''}"
            )
        return found

    def _unfit(self, shape: tuple[int, ...], stacked: int) -> str | None:
        if len(shape) - stacked != 2:
            return "is no matrix" + f", as its first {stacked} number some" * bool(stacked)
        return f"rank {self.rank} is above its smaller side" if self.rank > min(shape[-2:]) else None


@dataclass(frozen=True)
class LoraModel:
    """A model and its adapters: what `ax.lora` returns, and every facade takes in the place of a model."""

    model: Any
    lora: Lora

    def __post_init__(self):
        if isinstance(self.model, LoraModel):
            raise ValueError(
                f"lora: the model has adapters already, of targets={list(self.model.lora.targets)}: give one ax.lora all of "
                "them"
            )


def lora(
    model: Any,
    *,
    rank: int,
    targets: str | Sequence[str],
    alpha: float | None = None,
    stacked: str | Sequence[str] = (),
    seed: int = 0,
    base: str | None = None,
) -> LoraModel:
    """A model whose chosen matrices W are read as W + alpha / rank A B, of which only A and B train (Hu et al. 2022).

    Give it to any facade in the place of the model. All other parameters are frozen: they have no gradients and no optimizer
    state. B begins with zeros, so that the first forward is the model's own, bit for bit; A is uniform within 1 / sqrt(i) of
    0. A matrix [i, o] at `path` gets `path_lora_a` [i, r] and `path_lora_b` [r, o], of at least float32. `module` of the
    parallel model is merged.

    Args:
      model: an NNX module, a function without arguments that makes one, or a Linen module.
      rank: r, at most the smaller side of every target.
      targets: regular expressions, searched in path names such as `blocks/0/mlp/up/kernel`.
      alpha: see above; None: `rank`, so that A B counts once.
      stacked: of targets whose last two dims are a matrix and whose other dims number them, as Linen's `scan` and
        `nnx.vmap` make them. Stacks and experts of this library say so themselves.
      seed: of A.
      base: "int8": W rests and is sent as int8 with a scale for every column, `path_int8_scale` [o], and is a float where it
        is read; None: as it is.

    Raises:
      ValueError: for numbers or patterns that are none, and a model with adapters already; in the facade for targets that do
        not fit the model, all of them.

    >>> lora(None, rank=8, alpha=16, targets="attention/.*kernel").lora.scale
    2.0
    """
    patterns = [(each,) if isinstance(each, str) else tuple(each) for each in (targets, stacked)]
    return LoraModel(
        model,
        Lora(
            rank=rank,
            alpha=rank if alpha is None else alpha,
            targets=patterns[0],
            stacked=patterns[1],
            seed=seed,
            base=base,
        ),
    )


def is_adapter(name: str) -> bool:
    """Whether a path names an adapter, or the scales of a matrix that rests as int8.

    >>> is_adapter("mlp/up/kernel_lora_a"), is_adapter("mlp/up/kernel")
    (True, False)
    """
    return name.endswith((*ENDS, END))


def first_adapters(lora: Lora, name: str, matrix: Any, stacked: int) -> dict[str, Any]:
    """A and B of a matrix, or their shapes of a shape, by path."""
    *stack, i, o = matrix.shape
    dtype = jnp.promote_types(matrix.dtype, jnp.float32)
    assert len(stack) == stacked, (name, matrix.shape, stacked)

    def make() -> list[jax.Array]:
        key = jax.random.fold_in(jax.random.key(lora.seed), zlib.crc32(name.encode()) & 0x7FFFFFFF)
        a = jax.random.uniform(key, (*stack, i, lora.rank), dtype, -1 / math.sqrt(i), 1 / math.sqrt(i))
        return [a, jnp.zeros((*stack, lora.rank, o), dtype)]

    made = jax.eval_shape(make) if isinstance(matrix, jax.ShapeDtypeStruct) else make()
    return dict(zip(adapter_names(name), made, strict=True))


def adapter_names(name: str) -> tuple[str, str]:
    """The paths of a matrix's adapters."""
    return f"{name}{ENDS[0]}", f"{name}{ENDS[1]}"


def merged(matrix: Any, a: Any, b: Any, scale: float) -> Any:
    """W + scale A B in the dtype of W, summed in that of the adapters; of a shape the shape."""
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return matrix
    return (matrix.astype(a.dtype) + scale * (a @ b)).astype(matrix.dtype)


def _broken(what: str, patterns: Iterable[Any]) -> list[str]:
    found = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (TypeError, re.error) as error:
            found.append(f"{what}: {pattern!r} is no regular expression ({error})")
    return found
