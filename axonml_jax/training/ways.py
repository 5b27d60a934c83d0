"""The ways in which one microbatch is differentiated: parameters gathered at once, or unit by unit when they are used."""

import abc
from collections.abc import Callable, Collection
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import vary
from axonml_jax.mesh.axes import AxisNames, flat_axes
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.overlap import overlapped
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units.remat import recomputed
from axonml_jax.parallel.units.replayed import Replayed
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.memory import to_device_memory
from axonml_jax.training.objective import Objective, Parts


class Way(abc.ABC):
    """`way(state, key, batch, axes, accumulated) -> (gradients by leaf, loss, state)` of one microbatch on one rank.

    Gradients are in the reduce dtype and synchronized over `axes` (None: all). `accumulated`, or None, are gradients
    synchronized over the plan's inner axes that join before the rest of the reduction.
    """

    @abc.abstractmethod
    def __call__(
        self, state: PyTree, key: jax.Array, batch: PyTree, axes: Collection[AxisNames] | None, accumulated: Any
    ) -> tuple[list[jax.Array], Any, PyTree]:
        """Differentiate."""


class AtOnce(Way):
    """DDP and ZeRO-1 and 2: parameters are read once for all microbatches, gradients reduced during or after the backward."""

    def __init__(self, objective: Objective, placement: Placement, variables: Variables, parts: Parts, sync: bool):
        self.placement, self.params, self.sync = placement, variables.params, sync
        frozen = placement.read_tree(variables.frozen, placement.frozen)
        self.objective, self.whole_loss = objective, objective.differentiable(parts, frozen)
        self.layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)
        self.overlaps = sync and placement.plan.overlapped
        # With one microbatch each bucket is gathered where it is first used.
        once = self.overlaps and placement.plan.accumulate == 1
        self.read = None if once else placement.read_tree(variables.params, placement.params)

    def __call__(self, state, key, batch, axes, accumulated):
        """Differentiate."""
        if self.overlaps and axes != ():
            return self._overlapped(state, key, batch, axes, accumulated)
        loss = self._loss(self.read, (state, key, batch))
        (_, (loss, state)), grads = jax.value_and_grad(loss, has_aux=True)(self.read, state, key, batch)
        leaves = jax.tree.leaves(grads)
        if axes == ():
            layouts = zip(leaves, self.layouts, strict=True)
            return [self.placement.to_reduce(leaf, layout) for leaf, layout in layouts], loss, state
        return self.placement.sync_buckets(leaves, self.layouts, axes), loss, state

    def _overlapped(self, state, key, batch, axes, accumulated):
        args, placement = (state, key, batch), self.placement
        seen = placement.read_tree(self.params, placement.params) if self.read is None else self.read
        hooked = overlapped(self._loss(seen, args), placement, self.params, self.read, args, axes)
        leaves, treedef = jax.tree.flatten(to_device_memory(self.params, placement.plan.offload.params))
        unreduced = () if axes is None else flat_axes(axis for axis in placement.axes if axis not in axes)
        carriers = vary(treedef.unflatten(map(placement.to_reduce, leaves, self.layouts)), unreduced)
        more = None if accumulated is None else treedef.unflatten(accumulated)
        (_, (loss, state)), grads = jax.value_and_grad(hooked, has_aux=True)(carriers, more, *args)
        return jax.tree.leaves(grads), loss, state

    def _loss(self, read: PyTree, args: tuple) -> Callable:
        wrap, remat = self.placement.wrap, self.placement.plan.remat
        return recomputed(self.whole_loss, self.objective.model, wrap, remat, read, args)


class ByUnit(Way):
    """ZeRO-3: each unit's parameters are gathered when they are used, in the forward and again in the backward."""

    def __init__(self, objective: Objective, placement: Placement, variables: Variables, parts: Parts):
        self.loss = objective.differentiable_with_frozen(parts)
        self.variables, self.replayed = variables, Replayed(placement, objective.model)

    def __call__(self, state, key, batch, axes, accumulated):
        """Differentiate."""
        given = (self.variables.params, self.variables.frozen)
        (loss, state), grads = self.replayed.value_and_grad(self.loss, *given, (state, key, batch), axes, accumulated)
        return grads, loss, state
