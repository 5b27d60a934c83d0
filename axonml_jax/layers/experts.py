"""Mixture-of-experts layers: routers, their losses, and the layer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from axonml_jax.collectives.gradients import copy_to, gather_from
from axonml_jax.collectives.primitives import axis_index, bound, degree, gather_whole, joined_ranks, sum_over
from axonml_jax.layers.dispatch import (
    ACTIVATIONS,
    DISPATCHES,
    Activation,
    Dispatch,
    DispatchName,
    ExpertWeights,
    capacity_of,
    row_by_row,
    through_experts,
    within_capacity,
)
from axonml_jax.layers.pairs import ParallelMLP
from axonml_jax.layers.products import SEQUENCE_DIM, left
from axonml_jax.layers.whole import check_shard, metadata
from axonml_jax.model.view import STACKED
from axonml_jax.strategies.strategy import context_positions

# --------------------------------------------------------------------------------------------------
# Routers as values: how the scores of a token choose its experts and weigh their outputs.
# --------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """A router's choice for T tokens among E experts.

    Attributes:
      experts: int32 [T, k], by falling score; equal scores go to the lower index.
      gates: [T, k], the weights of their outputs.
      probabilities: [T, E], each row with the sum 1; the load-balance loss and the entropy are computed from them.
    """

    experts: jax.Array
    gates: jax.Array
    probabilities: jax.Array


@dataclass(frozen=True, kw_only=True)
class SoftmaxRouter:
    """Chooses the k experts with the largest probabilities (Shazeer et al. 2017; Mixtral, Qwen3-MoE, gpt-oss).

    Attributes:
      top_k: k, experts per token.
      renormalize: whether the k gates are divided by their sum (Mixtral); else they are the probabilities (Switch).
      noise: standard deviation of the noise that is added, in train mode, to the scores by which experts are chosen; gates are
        computed without it.
    """

    top_k: int = 2
    renormalize: bool = True
    noise: float = 0.0

    def __post_init__(self):
        _refuse_router(self, _top_k_problems(self.top_k, self.noise))

    @property
    def learns_bias(self) -> bool:
        """Whether the layer keeps a selection bias for this router: never."""
        return False

    def problems(self, experts: int) -> list[str]:
        """Problems with choosing among so many experts."""
        return _too_few(self.top_k, experts)

    def choose(self, scores: jax.Array, bias: jax.Array | None = None, noise: jax.Array | None = None) -> Chosen:
        """Choose for every token.

        Args:
          scores: [T, E], at least float32.
          bias: ignored: this router learns none.
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
    """Chooses the k largest sigmoids plus a bias that no gradient trains (DeepSeek-V3, Wang et al. 2024).

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
        _refuse_router(self, problems)

    @property
    def learns_bias(self) -> bool:
        """Whether the layer keeps a selection bias for this router."""
        return self.bias_rate > 0

    def problems(self, experts: int) -> list[str]:
        """Problems with choosing among so many experts."""
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


def _refuse_router(router: Router, problems) -> None:
    if found := list(problems):
        raise ValueError(f"{type(router).__name__}: {'; '.join(found)}")


# --------------------------------------------------------------------------------------------------
# What a router says of its choices, the same on every rank: values to be added to a loss, and counts to look at.
# --------------------------------------------------------------------------------------------------

MOST_LOADS = 64
"""Experts up to which each one's load is a metric of a step."""


class RouterValues(NamedTuple):
    """A router's statistics and losses of one microbatch, over all ranks with a part of it, without padding.

    T unmasked tokens chose k of E experts each; n_e of these choices are expert e, and P_e is the mean of its probability.

    Attributes:
      load_balance: E / (k * T) * sum_e(n_e * P_e), 1 where all experts get as many tokens (Fedus et al. 2022). Its
        gradient is one device's.
      z: the mean of logsumexp(scores) squared (Zoph et al. 2022), with a gradient likewise.
      counts: [E], n_e before any was dropped, as floats. A metric of a step in microbatches is their mean, not the batch's sum:
        shares, `counts / counts.sum()`, are alike.
      dropped: the share of choices that found no slot, from 0 to 1.
      rounds: in how many rounds tokens travelled, the mean of all ranks.
      entropy: the mean entropy of the probabilities of a token, in nats.
    """

    load_balance: jax.Array
    z: jax.Array
    counts: jax.Array
    dropped: jax.Array
    rounds: jax.Array
    entropy: jax.Array


def router_values(
    choice: Chosen, scores: jax.Array, mask: jax.Array, kept: jax.Array, rounds: jax.Array
) -> RouterValues:
    """The router's values of this rank's tokens together with all other ranks'.

    Args:
      choice: of this rank's T tokens.
      scores: [T, E], from which the router chose.
      mask: [T], True for a token that counts.
      kept: [T, k], whether a choice found a slot.
      rounds: int32 (), of this rank.

    Communicates: one all-reduce of 2E + 6 elements over the ranks that have a part of the microbatch.
    """
    count, top_k = scores.shape[1], choice.experts.shape[1]
    some = mask[:, None].astype(scores.dtype)
    probabilities = choice.probabilities
    chosen = jnp.zeros(count, scores.dtype).at[choice.experts].add(jnp.broadcast_to(some, choice.experts.shape))
    logs = jnp.log(jnp.maximum(probabilities, jnp.finfo(scores.dtype).tiny))
    others = (
        jnp.square(jax.nn.logsumexp(scores, axis=1, keepdims=True)),
        jnp.ones_like(some),
        kept.sum(1, keepdims=True, dtype=scores.dtype),
        -jax.lax.stop_gradient((probabilities * logs).sum(1, keepdims=True)),
    )
    of_rank = jnp.stack([rounds.astype(scores.dtype), jnp.ones((), scores.dtype)])
    sums = [(probabilities * some).sum(0), chosen, (jnp.concatenate(others, 1) * some).sum(0), of_rank]
    sums = jnp.concatenate(sums)
    if axes := joined_ranks():
        with jax.named_scope("axonml.router"):
            sums = sum_over(sums, axes)
    means, chosen, rest = sums[:count], jax.lax.stop_gradient(sums[count : 2 * count]), sums[2 * count :]
    tokens = jnp.maximum(rest[1], 1)
    dropped = 1 - jax.lax.stop_gradient(rest[2]) / (tokens * top_k)
    return RouterValues(
        load_balance=count / top_k * (chosen * means).sum() / jnp.square(tokens),
        z=rest[0] / tokens,
        counts=chosen,
        dropped=jnp.where(rest[1] > 0, dropped, 0),
        rounds=jax.lax.stop_gradient(rest[4] / rest[5]),
        entropy=jax.lax.stop_gradient(rest[3]) / tokens,
    )


# --------------------------------------------------------------------------------------------------
# `ParallelMoE`: a mixture-of-experts layer whose experts are split over the ranks of an axis.
# --------------------------------------------------------------------------------------------------

LECUN, ZEROS = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class RouterState(nnx.Variable):
    """A variable that a router keeps between updates."""


class ParallelMoE(nnx.Module):
    """Sends every token through the k experts that its router chooses, and sums their outputs weighted by its gates.

    Experts lie over `axis`, which splits rows of the batch too; where it is not bound, one device computes all. Inside an
    expert features are split over `tensor_axis` as a `ParallelMLP`'s are.

    Args:
      hidden_size: h.
      inner_size: f, the width inside an expert; it must divide by the tensor axis's ranks.
      num_experts: E; it must divide by the axis's N ranks.
      router: how experts are chosen, `ax.SoftmaxRouter(...)` or `ax.SigmoidRouter(...)`.
      activation: "swiglu", "clamped_swiglu" (gpt-oss's; both gated) or "gelu".
      use_bias: whether the experts have biases.
      router_bias: whether the router's scores have one that is trained.
      shared_size: inner width of an expert through which all tokens go; 0: there is none.
      capacity_factor: in train mode an expert takes ceil(factor * k * T / E) of the T tokens of a rank's microbatch, row by row
        and in a row by position, and drops the others' choice; None, and in evaluation: no token is dropped.
      groups: with a capacity, into how many parts rows (and positions, as a second number) are cut, each with a capacity of
        its own: on one device what as many ranks would drop.
      dispatch: how tokens travel: "rounds" of a fixed number of slots by all-to-all; "ragged", by the collective that TPUs and
        GPUs have; "gather", all tokens to all ranks; or "auto".
      sequence_parallel: input and output are this rank's part of the sequence along `tensor_axis`.
      kernel_init: initializer of kernels, called for every expert's.
      bias_init: that of biases.
      out_init: that of the last kernels; None: that of the others.
      dtype: in which the experts compute; None: that of x and the parameters. The router computes in at least float32.
      param_dtype: of the parameters.
      axis: the mesh axis of the experts.
      tensor_axis: the mesh axis that splits features inside them.
      rngs: streams `params` and, with a router's noise, `routing`.

    Raises:
      ValueError: from the constructor, with everything that is wrong with these; in the call, when experts or features do not
        divide, or for a dispatch that the platform does not have.

    Communicates: one all-reduce of 2E + 6 numbers over all ranks that have a part of the microbatch; over `axis` what the
    dispatch sends, forward and backward (docs/guides/experts.md); over `tensor_axis` what a `ParallelMLP` does.
    """

    # Biases are the same on all ranks: their largest is exact, and a mean of several equal floats may round.
    state_joins: ClassVar = {"counts": "sum", "bias": "max"}
    joins_ranks = True

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        *,
        router: Router | None = None,
        activation: Activation = "swiglu",
        use_bias: bool = False,
        router_bias: bool = False,
        shared_size: int = 0,
        capacity_factor: float | None = None,
        groups: int | tuple[int, int] = 1,
        dispatch: DispatchName = "auto",
        sequence_parallel: bool = False,
        kernel_init: nnx.Initializer = LECUN,
        bias_init: nnx.Initializer = ZEROS,
        out_init: nnx.Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        axis: str = "expert",
        tensor_axis: str = "tensor",
        rngs: nnx.Rngs,
    ):
        self.choose = SoftmaxRouter() if router is None else router
        self.hidden_size, self.inner_size, self.num_experts = hidden_size, inner_size, num_experts
        self.activation, self.capacity_factor, self.dispatch = activation, capacity_factor, dispatch
        self.groups = (groups,) if isinstance(groups, int) else tuple(groups)
        self.sequence_parallel, self.axis, self.tensor_axis = sequence_parallel, axis, tensor_axis
        _refuse_layer(self, shared_size)
        self.dtype, e, h, f = dtype, num_experts, hidden_size, inner_size

        def experts(init, spec, *shape):
            keys = jax.random.split(rngs.params(), e)
            value = jax.vmap(lambda key: init(key, shape, param_dtype))(keys)
            return nnx.Param(value, **metadata(PartitionSpec(axis, *spec), {STACKED: 1}))

        columns, gated = (None, tensor_axis), activation != "gelu"
        kinds = {"param_dtype": param_dtype, "kernel_init": kernel_init, "bias_init": bias_init, "rngs": rngs}
        self.router = nnx.Linear(h, e, use_bias=router_bias, **kinds)
        self.gate = experts(kernel_init, columns, h, f) if gated else None
        self.up = experts(kernel_init, columns, h, f)
        self.down = experts(out_init or kernel_init, (tensor_axis, None), f, h)
        self.gate_bias = experts(bias_init, (tensor_axis,), f) if use_bias and gated else None
        self.up_bias = experts(bias_init, (tensor_axis,), f) if use_bias else None
        self.down_bias = experts(bias_init, (None,), h) if use_bias else None
        flags = {
            "use_bias": use_bias,
            "sequence_parallel": sequence_parallel,
            "axis": tensor_axis,
            "out_init": out_init,
        }
        plain: Any = "swiglu" if gated else "gelu"
        make = lambda: ParallelMLP(h, shared_size, activation=plain, dtype=dtype, **flags, **kinds)
        self.shared = make() if shared_size else None
        learns = self.choose.learns_bias
        self.bias = RouterState(jnp.zeros(e, jnp.float32)) if learns else None
        self.counts = RouterState(jnp.zeros(e, jnp.int32)) if learns else None
        self.rngs = rngs.routing.fork() if self.choose.noise else None
        self.deterministic = False

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, RouterValues]:
        """Apply the layer.

        Args:
          x: [..., s, h], this rank's tokens ([..., s/n, h] with `sequence_parallel`).
          mask: [..., s] ([..., s/n] with `sequence_parallel`), False for padding, which no expert gets; None: all tokens count.

        Returns:
          (y, shaped as x: zeros, or the shared expert's output for zeros, where there is padding; what the router did, the same
          on every rank).
        """
        tensor = bound(self.tensor_axis)
        sequence = tensor if self.sequence_parallel else ()
        if mask is not None:
            x = jnp.where(mask[..., None], x, 0)  # whatever stands where padding is: it must not reach a gradient
        scores = self._scores(x, sequence)
        if sequence and mask is not None:
            mask = gather_from(mask, sequence, -1)
        mask = jnp.ones(scores.shape[:-1], bool) if mask is None else jnp.broadcast_to(mask, scores.shape[:-1])
        choice = self._chosen(scores)
        experts, capacity = self._kept(choice, mask)
        y, rounds = self._experts(x, choice.gates, experts, capacity, tensor, sequence)
        y = row_by_row(y, x)
        flat = scores.reshape(-1, self.num_experts)
        kept = experts < self.num_experts
        values = router_values(choice, flat, mask.reshape(-1), kept, rounds)
        self._count(choice, mask)
        return (y if self.shared is None else y + self.shared(x)), values

    def after_update(self) -> None:
        """Update the selection bias from the counts of all ranks and microbatches (Wang et al. 2024)."""
        if self.bias is None or self.counts is None:
            return
        counts = self.counts[...].astype(jnp.float32)
        mean = counts.mean(-1, keepdims=True)  # layers that are stacked have each their own
        self.bias[...] += getattr(self.choose, "bias_rate", 0.0) * jnp.sign(mean - counts)
        self.counts[...] = jnp.zeros_like(self.counts[...])

    def _scores(self, x: jax.Array, sequence: tuple[str, ...]) -> jax.Array:
        """The router's scores [..., s, E], in at least float32, for the tokens of all ranks of the tensor axis."""
        kernel, bias = self.router.kernel[...], None if self.router.bias is None else self.router.bias[...]
        wide = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
        if sequence:
            kernel, bias = copy_to(kernel, sequence), None if bias is None else copy_to(bias, sequence)
        scores = jnp.matmul(x.astype(wide), kernel.astype(wide), precision="highest")
        scores = scores if bias is None else scores + bias.astype(wide)
        return gather_from(scores, sequence, SEQUENCE_DIM) if sequence else scores

    def _chosen(self, scores: jax.Array) -> Chosen:
        bias = None if self.bias is None else self.bias[...].astype(scores.dtype)
        noise = None
        if self.rngs is not None and not self.deterministic:
            noise = _noise(self.rngs(), scores).reshape(-1, self.num_experts)
        return self.choose.choose(scores.reshape(-1, self.num_experts), bias, noise)

    def _kept(self, choice: Chosen, mask: jax.Array) -> tuple[jax.Array, int | None]:
        """The experts of all pairs, E for dropped ones, [T, k]; and the slots per expert, or None."""
        experts = jnp.where(mask.reshape(-1)[:, None], choice.experts, self.num_experts)
        if self.capacity_factor is None or self.deterministic or not mask.size:
            return experts, None
        for dim, parts in enumerate(self.groups):
            if dim >= mask.ndim or mask.shape[dim] % parts:
                raise ValueError(
                    f"ParallelMoE: tokens of shape {mask.shape} do not divide into groups={self.groups}: rows by the first "
                    "number, positions by the second"
                )
        total = 1
        for parts in self.groups:
            total *= parts
        capacity = capacity_of(mask.size // total, self.choose.top_k, self.num_experts, self.capacity_factor)
        shaped = experts.reshape(*mask.shape, -1)
        return within_capacity(shaped, self.num_experts, capacity, self.groups).reshape(experts.shape), capacity * total

    def _experts(self, x, gates, experts, capacity, tensor, sequence) -> tuple[jax.Array, jax.Array]:
        given = self._weights(tensor)
        x, *leaves = self.router.promote_dtype((x, *jax.tree.leaves(given)), dtype=self.dtype)
        weights = jax.tree.unflatten(jax.tree.structure(given), leaves)
        if not x.size:  # no tokens, on any rank of the layer's axes
            return x, jnp.zeros((), jnp.int32)
        if sequence:
            x = gather_whole(x, sequence, SEQUENCE_DIM, invarying=False)
        elif tensor:
            x = copy_to(x, tensor)
        gates = copy_to(gates, tensor) if tensor else gates
        axes = bound(self.axis) if degree(self.axis) > 1 else ()
        tokens = x.reshape(-1, self.hidden_size)
        how = Dispatch.of(
            self.dispatch,
            ranks=degree(axes),
            experts=self.num_experts,
            tokens=tokens.shape[0],
            top_k=self.choose.top_k,
            width=self.hidden_size,
            capacity=capacity,
        )
        sent = through_experts(how, self.activation, axes, tokens, gates, experts, weights)
        return left(sent.y.reshape(x.shape), tensor, sequence=bool(sequence)), sent.rounds

    def _weights(self, tensor: tuple[str, ...]) -> ExpertWeights:
        h, f, e, t = self.hidden_size, self.inner_size, self.axis, self.tensor_axis
        whole = {
            "gate": ((h, f), (None, t)),
            "up": ((h, f), (None, t)),
            "down": ((f, h), (t, None)),
            "gate_bias": ((f,), (t,)),
            "up_bias": ((f,), (t,)),
            "down_bias": ((h,), (None,)),
        }
        own = {}
        for name, (shape, spec) in whole.items():
            parameter = getattr(self, name)
            own[name] = None if parameter is None else parameter[...]
            if parameter is not None:
                check_shard(f"ParallelMoE {name}", own[name], (self.num_experts, *shape), PartitionSpec(e, *spec))
        if tensor and own["down_bias"] is not None:  # outputs are summed over the axis: one rank adds it
            own["down_bias"] = jnp.where(axis_index(tensor) == 0, copy_to(own["down_bias"], tensor), 0)
        return ExpertWeights(**own)

    def _count(self, choice: Chosen, mask: jax.Array) -> None:
        if self.counts is None or self.deterministic:
            return
        some = jnp.broadcast_to(mask.reshape(-1)[:, None], choice.experts.shape)
        self.counts[...] += jnp.zeros(self.num_experts, jnp.int32).at[choice.experts].add(some.astype(jnp.int32))


def _noise(key: jax.Array, scores: jax.Array) -> jax.Array:
    """Noise [..., s, E] that is the same at a position however positions are split."""
    if scores.ndim < 3:
        return jax.random.normal(key, scores.shape, scores.dtype)
    shape = (*scores.shape[:-2], scores.shape[-1])
    draw = lambda position: jax.random.normal(jax.random.fold_in(key, position), shape, scores.dtype)
    return jax.vmap(draw, out_axes=-2)(context_positions(scores.shape[-2]))


def _refuse_layer(layer: ParallelMoE, shared: int) -> None:
    sizes = {"hidden_size": layer.hidden_size, "inner_size": layer.inner_size, "num_experts": layer.num_experts}
    problems = [f"{name}={size} must be positive" for name, size in sizes.items() if size < 1]
    if not hasattr(layer.choose, "problems"):
        problems.append(f"router={layer.choose!r} must be an ax.SoftmaxRouter(...) or an ax.SigmoidRouter(...)")
    problems += [] if problems else layer.choose.problems(layer.num_experts)
    if layer.activation not in ACTIVATIONS:
        problems.append(f"activation={layer.activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if layer.dispatch not in DISPATCHES:
        problems.append(f"dispatch={layer.dispatch!r} must be one of {', '.join(DISPATCHES)}")
    factor = layer.capacity_factor
    if factor is not None and not 0 < factor < math.inf:
        problems.append(f"capacity_factor={factor} must be positive and finite, or None to drop no token")
    if any(parts < 1 for parts in layer.groups) or len(layer.groups) > 2:
        problems.append(f"groups={layer.groups} must be one positive number, or two")
    if layer.groups != (1,) and factor is None:
        problems.append(
            f"groups={layer.groups} are parts with a capacity of their own: give capacity_factor, or leave them out"
        )
    if factor is not None and layer.dispatch not in ("auto", "rounds"):
        problems.append(
            f"dispatch={layer.dispatch!r} is for layers that drop no token: with capacity_factor leave it out"
        )
    if layer.activation == "clamped_swiglu" and shared:
        problems.append("activation='clamped_swiglu' has no shared expert: leave shared_size out")
    if problems:
        raise ValueError(f"ParallelMoE: {'; '.join(problems)}")
