"""Routers as values: how the scores of a token choose its experts and weigh their outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Chosen(NamedTuple):
    """What a router chose for T tokens among E experts.

    Attributes:
      experts: int32 [T, k], by falling score; equal scores go to the lower index.
      gates: [T, k], the weights of their outputs.
      probabilities: [T, E], each row with the sum 1: what balances the load is made of them.
    """

    experts: jax.Array
    gates: jax.Array
    probabilities: jax.Array


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """The k experts of the largest probabilities (Shazeer et al. 2017; Mixtral, Qwen3-MoE, gpt-oss).

    Attributes:
      top_k: k, experts per token.
      renormalize: whether the k gates are divided by their sum (Mixtral); else they are the probabilities (Switch).
      noise: standard deviation of what is added to the scores by which experts are chosen, in train mode; gates stay without.
    """

    top_k: int = 2
    renormalize: bool = True
    noise: float = 0.0

    def __post_init__(self):
        _refuse(self, _top_k_problems(self.top_k, self.noise))

    @property
    def learns_bias(self) -> bool:
        """Whether the layer keeps a bias for it."""
        return False

    def problems(self, experts: int) -> list[str]:
        """Why it cannot choose among so many experts."""
        return _too_few(self.top_k, experts)

    def choose(self, scores: jax.Array, bias: jax.Array | None = None, noise: jax.Array | None = None) -> Chosen:
        """Choose for every token.

        Args:
          scores: [T, E], at least float32.
          bias: None.
          noise: [T, E] of standard deviation 1, or None.
        """
        probabilities = jax.nn.softmax(scores)
        by = scores if noise is None else scores + self.noise * noise
        experts = jax.lax.top_k(jax.lax.stop_gradient(by), self.top_k)[1]
        gates = jnp.take_along_axis(probabilities, experts, 1)
        if self.renormalize:
            gates = gates / gates.sum(1, keepdims=True)
        return Chosen(experts, gates, probabilities)


@dataclass(frozen=True, kw_only=True)
class SigmoidRouter:
    """The k experts of the largest sigmoids plus a bias that no gradient trains (DeepSeek-V3, Wang et al. 2024).

    The bias counts for the choice alone. After every update it grows for experts that got fewer tokens than the mean, and
    falls for the others: bias += bias_rate * sign(mean(counts) - counts).

    Attributes:
      top_k: k, experts per token.
      bias_rate: by how much the bias changes in an update; 0: there is none.
      groups: the experts lie in so many equal groups, of which a token uses `top_groups`: those of the largest sum of their
        two best scores.
      top_groups: see `groups`.
      renormalize: whether the k gates are divided by their sum.
      scale: by which the gates are multiplied at last (2.5 in DeepSeek-V3).
      noise: as for `SoftmaxRouter`.
    """

    top_k: int = 8
    bias_rate: float = 0.001
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    noise: float = 0.0

    def __post_init__(self):
        problems = [*_top_k_problems(self.top_k, self.noise)]
        if not 1 <= self.top_groups <= self.groups:
            problems.append(f"top_groups={self.top_groups} must be between 1 and groups={self.groups}")
        problems += [
            f"{name}={value} must be {rule}"
            for name, value, rule, fine in (
                ("bias_rate", self.bias_rate, "at least 0", self.bias_rate >= 0),
                ("scale", self.scale, "positive", self.scale > 0),
            )
            if not fine
        ]
        _refuse(self, problems)

    @property
    def learns_bias(self) -> bool:
        """Whether the layer keeps a bias for it."""
        return self.bias_rate > 0

    def problems(self, experts: int) -> list[str]:
        """Why it cannot choose among so many experts."""
        if experts % self.groups:
            return [f"{experts} experts do not divide into groups={self.groups}"]
        return _too_few(self.top_k, experts * self.top_groups // self.groups)

    def choose(self, scores: jax.Array, bias: jax.Array | None = None, noise: jax.Array | None = None) -> Chosen:
        """Choose for every token.

        Args:
          scores: [T, E], at least float32.
          bias: [E], or None.
          noise: [T, E] of standard deviation 1, or None.
        """
        sigmoids = jax.nn.sigmoid(scores)
        by = jax.lax.stop_gradient(sigmoids if bias is None else sigmoids + bias)
        by = by if noise is None else by + self.noise * noise
        experts = jax.lax.top_k(self._of_best_groups(by), self.top_k)[1]
        gates = jnp.take_along_axis(sigmoids, experts, 1)
        if self.renormalize:
            gates = gates / (gates.sum(1, keepdims=True) + 1e-20)
        return Chosen(experts, gates * self.scale, sigmoids / sigmoids.sum(1, keepdims=True))

    def _of_best_groups(self, by: jax.Array) -> jax.Array:
        if self.groups == self.top_groups:
            return by
        grouped = by.reshape(by.shape[0], self.groups, -1)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[2]))[0].sum(2)
        chosen = jax.lax.top_k(best, self.top_groups)[1]
        kept = (chosen[:, :, None] == jnp.arange(self.groups)).any(1)
        return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(by.shape)


Router = SoftmaxRouter | SigmoidRouter


def _top_k_problems(top_k: int, noise: float) -> Iterator[str]:
    if top_k < 1:
        yield f"top_k={top_k} must be at least 1"
    if noise < 0:
        yield f"noise={noise} must be at least 0"


def _too_few(top_k: int, experts: int) -> list[str]:
    return [f"top_k={top_k} of {experts} experts: choose no more than there are"] if top_k > experts else []


def _refuse(router: Router, problems) -> None:
    if found := list(problems):
        raise ValueError(f"{type(router).__name__}: {'; '.join(found)}")
