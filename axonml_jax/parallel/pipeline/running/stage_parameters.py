"""From parameters as they rest to what the stages of one program read, once per step, and their gradients back.

A parameter lives on one rank. Stages on other ranks that read it too (a tied embedding) get a copy for the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from axonml_jax.collectives.primitives import axis_index
from axonml_jax.collectives.varying import vary
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.model.precision import cast_floating
from axonml_jax.parallel.pipeline.cutting.pieces import Piece
from axonml_jax.parallel.pipeline.cutting.stage import Stage, StageFunction
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing, Slot
from axonml_jax.parallel.pipeline.resting.shared import sum_shared
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers, Stored
from axonml_jax.parallel.pipeline.resting.stage_store import Named, on_own_rank
from axonml_jax.parallel.pipeline.resting.staging import Staging
from axonml_jax.sharding.layout import Layout
from axonml_jax.sharding.memory import to_device_memory

if TYPE_CHECKING:
    from axonml_jax.parallel.placement import Placement


@dataclass(frozen=True)
class Running:
    """The parameters of one program on one rank, inside `shard_map`.

    Attributes:
      placement: how parameters are read and gradients reduced.
      pieces: what the stages do.
    """

    placement: "Placement"
    pieces: Sequence[Piece]

    @property
    def staging(self) -> Staging:
        """Where parameters rest."""
        assert self.placement.stages is not None
        return self.placement.stages

    @property
    def in_ticks(self) -> bool:
        """Whether parameters are gathered in ticks, not once before all."""
        return self.staging.policy.in_ticks

    @cached_property
    def held(self) -> list[list[int]]:
        """The parameters of every stage: those that live on it and those that it reads."""
        own = [{i for i, p in enumerate(self.staging.stages) if p == stage} for stage in range(len(self.pieces))]
        return [sorted(leaves.union(piece.weights)) for leaves, piece in zip(own, self.pieces, strict=True)]

    @cached_property
    def layout(self) -> StageBuffers:
        """Where they lie during the step."""
        counts = {i: sum(i in leaves for leaves in self.held) for i in range(len(self.staging.names))}
        shared = {i: self.staging.names[i] for i, count in counts.items() if count > 1}
        trees = [[self._stored(i, shared.get(i)) for i in leaves] for leaves in self.held]
        return StageBuffers.of(trees, self.staging.num_ranks)

    def read(self, params: Named, frozen: Named) -> Buffers:
        """What the stages read, from this rank's resting buffers.

        Communicates: what the plan's strategies do to gather, and one all-reduce over `pipe` per copied parameter.
        """
        params, frozen = to_device_memory((params, frozen), self.placement.plan.offload.params)
        resting = self.staging.resting(params, frozen)
        if self._as_they_rest:
            return self._varied(resting)

        def own(rank: int) -> Buffers:
            values = self._resting_leaves(resting, rank)
            if not self.in_ticks and values:
                layouts = [self.staging.layouts[i] for i in values]
                values = dict(zip(values, self.placement.read(list(values.values()), layouts), strict=True))
            slots = self._slots(rank)
            packing = Packing(tuple(slots[i] for i in values))
            return self._varied(packing.pack(list(values.values()), self.layout.sizes))

        buffers = on_own_rank(axis_index(AXIS), self.staging.num_ranks, own)
        with jax.named_scope("axonml.parameters"):
            return self._varied(sum_shared(self.layout, buffers, AXIS))

    def stage(self, number: int, apply: StageFunction) -> Stage:
        """A stage of the program, with its gathers where they belong in its ticks."""
        if not self.in_ticks:
            return Stage(apply)
        layouts = [self.staging.layouts[i] for i in self.held[number]]

        def read(leaves: Sequence[jax.Array]) -> list[jax.Array]:
            return self.placement.read(leaves, layouts)

        def sync(grads: Sequence[Any]) -> list[Any]:
            there = [i for i, grad in enumerate(grads) if grad is not None]
            given = [grads[i] for i in there], [layouts[i] for i in there]
            synced = dict(zip(there, self.placement.sync(*given, number, axes=self._inner_axes), strict=True))
            return [synced.get(i) for i in range(len(grads))]

        return Stage(apply, read, sync)

    def grad_dtype(self, dtype: str) -> Any:
        """In which dtype the gradients of what is read in `dtype` accumulate."""
        accumulate = self.placement.plan.precision.accumulate_dtype
        kinds = [layout.dtype for i, layout in enumerate(self.staging.layouts) if self._read_dtype(i) == dtype]
        return jnp.result_type(*(accumulate(kind) for kind in kinds)) if kinds else jnp.dtype(dtype)

    def grads_at_rest(self, grads: Buffers) -> Named:
        """Gradients of the resting parameters from those of what the stages read, summed over all ranks, as they accumulate.

        Communicates: what the plan's strategies do to synchronize; over `data` one all-reduce per group and bucket.
        """
        store = self.staging.params
        done = self.in_ticks or all(self.placement.ranks(axis) == 1 for axis in self._inner_axes)
        if self._as_they_rest and done:
            own = self._accumulated({group: grads[group] for group in store.buffers.sizes})
        else:
            own = on_own_rank(axis_index(AXIS), self.staging.num_ranks, lambda rank: self._own_grads(grads, rank))
        return store.named(self._over_outermost(own))

    def _own_grads(self, grads: Buffers, rank: int) -> Buffers:
        store, slots = self.staging.params, self._slots(rank)
        leaves = store.leaves_of_rank(rank)
        values = Packing(tuple(slots[i] for i in leaves)).unpack(grads)
        if not self.in_ticks and leaves:
            layouts = [store.layouts[i] for i in leaves]
            values = self.placement.sync(values, layouts, rank, axes=self._inner_axes)
        packed = self._accumulated(store.pack(dict(zip(leaves, values, strict=True))))
        outermost = as_axes(self._outermost or ())
        return {group: vary(buffer, (AXIS, *outermost, *group.axes)) for group, buffer in packed.items()}

    def _accumulated(self, grads: Buffers) -> Buffers:
        accumulate = self.placement.plan.precision.accumulate_dtype
        return {group: buffer.astype(accumulate(group.dtype)) for group, buffer in grads.items()}

    def _over_outermost(self, grads: Buffers) -> Buffers:
        if self._outermost is None or not grads:
            return grads
        layouts = [Layout.whole(jax.ShapeDtypeStruct(buffer.shape, group.dtype)) for group, buffer in grads.items()]
        with jax.named_scope("axonml.gradients"):
            synced = self.placement.reduced(list(grads.values()), layouts, self._outermost)
        return self._accumulated(dict(zip(grads, synced, strict=True)))

    @cached_property
    def _outermost(self) -> AxisNames | None:
        """The outermost axis, where it holds parameters whole: over it a rank's buffers are reduced as they are."""
        axis = next(iter(self.placement.axes), None)
        whole = axis is not None and self.placement.strategies[axis].role.parameters == "whole"
        return axis if whole else None

    @cached_property
    def _inner_axes(self) -> list[AxisNames]:
        """The axes over which gradients are synchronized leaf by leaf."""
        split = [axis for axis, each in self.placement.strategies.items() if each.role.batch is not None]
        return [axis for axis in split if axis != self._outermost]

    @cached_property
    def _as_they_rest(self) -> bool:
        """Whether what rests is what is read: nothing is cast, gathered or copied."""
        resting = {**self.staging.params.buffers.sizes, **self.staging.frozen.buffers.sizes}
        if dict(self.layout.sizes) != resting:
            return False
        return all(self._slots(rank) == self._resting_slots(rank) for rank in range(self.staging.num_ranks))

    def _slots(self, rank: int) -> dict[int, Slot]:
        """Where the leaves that a rank holds during the step lie."""
        found: dict[int, Slot] = {}
        for stage in self.layout.stages(rank):
            found |= zip(self.held[stage], self.layout.packings[stage].slots, strict=True)
        return found

    def _resting_slots(self, rank: int) -> dict[int, Slot]:
        staging, count = self.staging, len(self.staging.params.layouts)
        found = {i: staging.params.slots[i] for i in staging.params.leaves_of_rank(rank)}
        return found | {count + i: staging.frozen.slots[i] for i in staging.frozen.leaves_of_rank(rank)}

    def _resting_leaves(self, resting: Buffers, rank: int) -> dict[int, jax.Array]:
        slots = self._resting_slots(rank)
        return dict(zip(slots, Packing(tuple(slots.values())).unpack(resting), strict=True))

    def _stored(self, leaf: int, shared: str | None) -> Stored:
        layout, frozen = self.staging.layouts[leaf], leaf >= len(self.staging.params.layouts)
        if self.in_ticks:
            return Stored(layout.shard, layout.dtype, layout.axes, frozen, shared)
        axes = tuple(axis for axis in layout.axes if axis in self.placement.layer_axes)
        return Stored(self.placement.read_shape(layout), self._read_dtype(leaf), axes, frozen, shared)

    def _read_dtype(self, leaf: int) -> Any:
        layout = self.staging.layouts[leaf]
        compute = None if self.in_ticks else self.placement.plan.precision.compute
        return cast_floating(jnp.zeros((), layout.dtype), compute).dtype

    def _varied(self, buffers: Buffers) -> Buffers:
        axes = (AXIS, *self.placement.batch_axes)
        return {group: vary(buffer, (*axes, *group.axes)) for group, buffer in buffers.items()}
