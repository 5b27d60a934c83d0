"""DDP and ZeRO-1 and 2: parameters are read once for all microbatches, gradients reduced during or after the backward."""

from collections.abc import Callable, Collection
from typing import Any

import jax

from axonml_jax._types import PyTree
from axonml_jax.collectives.varying import vary
from axonml_jax.mesh.axes import AxisNames, flat_axes
from axonml_jax.model.functional import Variables
from axonml_jax.parallel.overlap import overlapped
from axonml_jax.parallel.units.remat import recomputed
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.memory import to_device_memory
from axonml_jax.training.engine.accumulate import OneByOne, OneMicrobatch


class AtOnce(OneByOne):
    """All parameters are read at the start of the step, or each bucket where it is first used."""

    def one(self, variables: Variables) -> OneMicrobatch:
        """See `OneMicrobatch`."""
        placement = self.placement
        frozen = placement.read_tree(variables.frozen, placement.frozen)
        overlaps = self.sync and placement.reducer.overlaps
        # With one microbatch each bucket is gathered where it is first used.
        once = overlaps and placement.plan.accumulate == 1
        read = None if once else placement.read_tree(variables.params, placement.params)
        return _Once(self, variables.params, frozen, read, overlaps)


class _Once:
    def __init__(self, engine: AtOnce, params: PyTree, frozen: PyTree, read: PyTree | None, overlaps: bool):
        self.placement, self.params, self.read, self.overlaps = engine.placement, params, read, overlaps
        self.model, self.whole_loss = engine.objective.model, engine.objective.differentiable(engine.parts, frozen)
        self.layouts = jax.tree.leaves(self.placement.params, is_leaf=is_layout)
        self.feedback = engine.feedback

    def __call__(
        self, state: PyTree, key: jax.Array, batch: PyTree, axes: Collection[AxisNames] | None, accumulated: Any
    ) -> tuple[list[jax.Array], Any, PyTree, list[jax.Array] | None]:
        if self.overlaps and axes != ():
            return self._overlapped(state, key, batch, axes, accumulated)
        loss = self._loss(self.read, (state, key, batch))
        (_, (loss, state)), grads = jax.value_and_grad(loss, has_aux=True)(self.read, state, key, batch)
        leaves, left = jax.tree.leaves(grads), None
        if axes == ():
            return list(map(self.placement.to_accumulate, leaves, self.layouts)), loss, state, None
        if self.feedback is not None:
            wholes = zip(map(self.placement.to_accumulate, leaves, self.layouts), accumulated, strict=True)
            leaves = [grad + more for grad, more in wholes]
            left = self.feedback.left_out(leaves, self.layouts)
        return self.placement.sync_buckets(leaves, self.layouts, axes), loss, state, left

    def _overlapped(self, state, key, batch, axes, accumulated):
        args, placement = (state, key, batch), self.placement
        seen = placement.read_tree(self.params, placement.params) if self.read is None else self.read
        hooked = overlapped(self._loss(seen, args), placement, self.params, self.read, args, axes, self.feedback)
        leaves, treedef = jax.tree.flatten(to_device_memory(self.params, placement.plan.offload.params))
        reduced = placement.axes if axes is None else axes
        unreduced = [axis for axis in placement.batch_axes if axis not in flat_axes(reduced)]
        carriers = vary(treedef.unflatten(map(placement.to_accumulate, leaves, self.layouts)), unreduced)
        more = None if accumulated is None else treedef.unflatten(accumulated)
        if self.feedback is None:
            (_, (loss, state)), grads = jax.value_and_grad(hooked, has_aux=True)(carriers, more, *args)
            return jax.tree.leaves(grads), loss, state, None
        both = jax.value_and_grad(hooked, argnums=(0, 1), has_aux=True)
        (_, (loss, state)), (grads, left) = both(carriers, more, *args)
        return jax.tree.leaves(grads), loss, state, jax.tree.leaves(left)

    def _loss(self, read: PyTree, args: tuple) -> Callable:
        wrap, remat = self.placement.wrap, self.placement.plan.remat
        return recomputed(self.whole_loss, self.model, wrap, remat, read, args)
