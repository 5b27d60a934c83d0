"""A loss run unit by unit: weights gathered for the forward, dropped, gathered again for the backward (ZeRO-3)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree, named_leaves
from axonml_jax.collectives.varying import varying_axes
from axonml_jax.compat.barrier import together
from axonml_jax.mesh.axes import AxisNames
from axonml_jax.model.functional import Functional
from axonml_jax.parallel.loading import load, moment
from axonml_jax.parallel.placement import Placement
from axonml_jax.parallel.units.body import Values, add
from axonml_jax.parallel.units.gathered import Slices
from axonml_jax.parallel.units.loop import UnitLoop
from axonml_jax.parallel.units.parts import part_of
from axonml_jax.parallel.units.remat import transform_of
from axonml_jax.parallel.units.wrap import units
from axonml_jax.program.atoms import among, results_of
from axonml_jax.program.segments import Cut, Segment, cut
from axonml_jax.sharding.layout import Layout, is_layout


@dataclass(frozen=True)
class Replayed:
    """How a model's loss is run unit by unit, inside `shard_map`.

    Attributes:
      placement: how weights are read and gradients reduced.
      model: names its modules.
    """

    placement: Placement
    model: Functional

    def value_and_grad(
        self,
        loss: Callable,
        params: PyTree,
        frozen: PyTree,
        args: tuple,
        axes: Collection[AxisNames] | None,
        accumulated: Any,
    ) -> tuple[Any, list[jax.Array]]:
        """Differentiate `loss(read_params, read_frozen, *args) -> (scalar, aux)`.

        Returns:
          aux, and a gradient per leaf of `params`, in the dtype in which it accumulates, synchronized over `axes` (None: all);
          `accumulated` gradients, synchronized over the plan's inner axes, join before the rest of the reduction.
        """
        run = _Run.of(self, loss, params, frozen, args)
        (_, aux), saved = run.forward(keep=True)
        return aux, run.backward(saved, axes, accumulated)

    def apply(self, fun: Callable, params: PyTree, frozen: PyTree, args: tuple) -> Any:
        """`fun(read_params, read_frozen, *args)`, without gradients."""
        return _Run.of(self, fun, params, frozen, args).forward(keep=False)[0]


def check_units(placement: Placement, model: Functional) -> None:
    """Refuse a wrap policy that matches nothing, as far as module types are known before a call (Linen's are not).

    Raises:
      ValueError: naming the modules there are.
    """
    if placement.gathers_when_used:
        wrap, types = placement.by_unit.wrap, model.module_types()
        known = types or not (isinstance(wrap, tuple) and any(isinstance(rule, type) for rule in wrap))
        if known:
            units([*named_leaves(placement.params), *named_leaves(placement.frozen)], wrap, types)


class _Run:
    """One loss cut into segments, on one rank's shards."""

    def __init__(self, placement: Placement, shards: list, layouts: list[Layout], trained: int, cut: Cut, args: list):
        self.placement, self.shards, self.layouts, self.trained, self.cut = placement, shards, layouts, trained, cut
        self.prefetch = placement.by_unit.prefetch
        self.inputs = dict(cut.program.constants) | dict(zip(cut.program.inputs[len(shards) :], args, strict=True))
        self.parts = [part_of(segment, cut) for segment in cut.segments]
        self.slices = Slices(self._read_slices, self._sync_slices, self.prefetch)

    @staticmethod
    def of(replayed: Replayed, fun: Callable, params: PyTree, frozen: PyTree, args: tuple) -> "_Run":
        placement = replayed.placement
        trained, treedef = jax.tree.flatten(params)
        rest, frozen_treedef = jax.tree.flatten(frozen)
        layouts = [*_layouts(placement.params), *_layouts(placement.frozen)]
        shards = [*trained, *rest]
        names = [*named_leaves(params), *named_leaves(frozen)]

        def flat(weights: Sequence[jax.Array], *args):
            return fun(
                treedef.unflatten(weights[: len(trained)]), frozen_treedef.unflatten(weights[len(trained) :]), *args
            )

        def groups() -> list[list[int]]:
            return list(units(names, placement.by_unit.wrap, replayed.model.module_types()).values())

        sliceable = [i for i, layout in enumerate(layouts) if layout.shape and layout.parts[0] == 1]
        read = placement.read(shards, layouts)  # for its shapes and types; nothing depends on the values
        pieces = cut(flat, read, args, units=groups, trained=len(trained), sliceable=sliceable)
        return _Run(placement, shards, layouts, len(trained), pieces, jax.tree.leaves(args))

    def forward(self, keep: bool) -> tuple[Any, list[Any]]:
        """The results, and per segment what its backward needs."""
        env, held, saved = dict(self.inputs), {}, []
        remat = self.placement.plan.remat
        for i, (segment, part) in enumerate(zip(self.cut.segments, self.parts, strict=True)):
            entering = {number: env[number] for number in segment.inputs}
            due = [w for w in self._ahead(i, 1) if w not in held]
            read, entering = self._read(due, entering)
            held |= read
            weights = self._weights(segment, held)
            transform = transform_of(remat, apart=isinstance(part, UnitLoop))
            if isinstance(part, UnitLoop):
                own = {w: self.shards[w] for w in segment.scanned.values()}
                if keep:
                    out, kept = part.forward(weights, entering, own, self.slices, transform)
                else:
                    out, kept = part.apply(weights, entering, own, self.slices), None
            elif keep:
                out, residuals = part.forward(weights, entering, (), transform)
                kept = residuals
            else:
                out, kept = part.apply(weights, entering), None
            env |= out
            saved.append(kept)
            held = {w: value for w, value in held.items() if self.cut.last[w] > i}
        results = results_of(self.cut.program.outputs, env)
        return self.cut.out_tree.unflatten(results), saved

    def backward(self, saved: list[Any], axes: Collection[AxisNames] | None, accumulated: Any) -> list[jax.Array]:
        """Synchronized gradients of the trained weights, from a seed of one for the first result."""
        (loss, *_), held, done = self.cut.program.outputs, {}, {}
        # Synchronized gradients of a segment are there before the next but one starts: while one unit is differentiated, the
        # reduction of the one before may run, and no compiler gathers the reductions of many units, whole, into one.
        before: dict[int, Any] = {}
        now: dict[int, Any] = {}
        grads: Values = {}
        whole: Values = {}
        if among(loss, self.cut.varied):
            grads[loss] = jnp.ones((), self.cut.program.avals[loss].dtype)
        for i in reversed(range(len(self.parts))):
            segment, part = self.cut.segments[i], self.parts[i]
            leaving = {number: grads.pop(number) for number in segment.outputs if number in grads}
            if not leaving:
                continue  # nothing of it reaches the loss
            settled, leaving = self._settled(list(before.values()), leaving)
            done |= zip(before, settled, strict=True)
            before, now = now, {}
            due = [w for w in self._ahead(i, -1) if w not in held]
            read, leaving = self._read(due, leaving)
            held |= read
            weights = self._weights(segment, held)
            if isinstance(part, UnitLoop):
                own = {w: self.shards[w] for w in segment.scanned.values()}
                of_inputs, of_weights, of_shards = part.backward(saved[i], weights, own, self.slices, leaving)
                now |= self._finish(of_shards, axes, accumulated)
            else:
                of_inputs, of_weights = part.backward(saved[i], weights, (), leaving)
            for number, grad in of_inputs.items():
                add(grads, number, grad)
            for number, grad in of_weights.items():
                add(whole, number, grad)
            complete = {w: whole.pop(self._number(w), None) for w in segment.weights if self.cut.first[w] == i}
            now |= self._sync({w: grad for w, grad in complete.items() if grad is not None}, axes, accumulated)
            held = {w: value for w, value in held.items() if self.cut.first[w] < i}
        done |= before | now
        return [done[w] if w in done else self._no_gradient(w) for w in range(self.trained)]

    def _ahead(self, i: int, step: int) -> list[int]:
        """The weights of a segment and of the next ones in this direction, as far as weights are prefetched."""
        near = range(i, i + step * (self.prefetch + 1), step)
        return [w for j in near if 0 <= j < len(self.parts) for w in self.cut.segments[j].weights]

    def _read(self, due: Sequence[int], tie: Values) -> tuple[dict[int, Any], Values]:
        """Gather weights, but not before the values `tie` are there."""
        if not (due := list(dict.fromkeys(due))):
            return {}, tie
        shards, tie = self._tied([self.shards[w] for w in due], tie)
        if self.placement.plan.offload.params:
            at = moment(tie)
            shards = [load(shard, at) for shard in shards]
        return dict(zip(due, self.placement.read(shards, [self.layouts[w] for w in due]), strict=True)), tie

    def _read_slices(self, weights: Sequence[int], shards: Sequence[Any], tie: Any) -> tuple[list[Any], Any]:
        shards, tie = self._tied(list(shards), tie)
        return self.placement.read(shards, self._sliced(weights, shards)), tie

    def _sync_slices(self, weights: Sequence[int], grads: Sequence[Any]) -> list[Any]:
        layouts = [self.layouts[w].sliced(len(self.layouts[w].stored) - 1) for w in weights]
        return self.placement.sync(grads, layouts, min(weights, default=0), axes=self.placement.inner_axes)

    def _sliced(self, weights: Sequence[int], shards: Sequence[Any]) -> list[Layout]:
        return [self.layouts[w].sliced(shard.ndim) for w, shard in zip(weights, shards, strict=True)]

    def _sync(self, grads: dict[int, Any], axes: Collection[AxisNames] | None, accumulated: Any) -> dict[int, Any]:
        if not grads:
            return {}
        more = None if accumulated is None else [accumulated[w] for w in grads]
        layouts = [self.layouts[w] for w in grads]
        synced = self.placement.sync(list(grads.values()), layouts, min(grads), axes=axes, accumulated=more)
        return dict(zip(grads, synced, strict=True))

    def _finish(self, shards: dict[int, Any], axes: Collection[AxisNames] | None, accumulated: Any) -> dict[int, Any]:
        """What is left to do for gradients that a loop has synchronized over the inner axes."""
        wanted = self.placement.axes if axes is None else axes
        return self._sync(shards, [axis for axis in wanted if axis not in self.placement.inner_axes], accumulated)

    def _no_gradient(self, weight: int) -> jax.Array:
        layout = self.layouts[weight]
        return jnp.zeros(layout.shard, self.placement.plan.precision.accumulate_dtype(layout.dtype))

    def _settled(self, grads: list[Any], tie: Any) -> tuple[list[Any], Any]:
        """Both behind a barrier: nothing is done with `tie` before the gradients are there.

        Not in jax 0.10's typed mode, whose barrier would type reduced gradients as varying over what `tie` varies over.
        """
        tied, after = self._tied(list(grads), tie)
        same = all(varying_axes(new) == varying_axes(old) for new, old in zip(tied, grads, strict=True))
        return (tied, after) if same else (grads, tie)

    def _tied(self, shards: list[Any], tie: Any) -> tuple[list[Any], Any]:
        """Both behind a barrier: nothing is done with the shards before `tie` is there, and no two reads are merged."""
        leaves, treedef = jax.tree.flatten(tie)
        arrays = [i for i, x in enumerate(leaves) if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)]
        # jax 0.10 types all results of a barrier as varying over what any operand varies over. Along batch axes that is what
        # gathered weights are anyway; what varies over other axes gets a barrier of its own.
        apart = lambda x: varying_axes(x) - set(self.placement.batch_axes)
        arrays = [i for i in arrays if not apart(leaves[i])]
        widest = frozenset().union(*(varying_axes(leaves[i]) for i in arrays))
        arrays = [i for i in arrays if varying_axes(leaves[i]) == widest]
        alike = [i for i, shard in enumerate(shards) if not apart(shard)]
        for others in {apart(shard) for shard in shards} - {frozenset()}:
            own = [i for i, shard in enumerate(shards) if apart(shard) == others]
            for i, shard in zip(own, together([shards[i] for i in own]), strict=True):
                shards[i] = shard
        tied, after = together(([shards[i] for i in alike], [leaves[i] for i in arrays]))
        for i, shard in zip(alike, tied, strict=True):
            shards[i] = shard
        for i, leaf in zip(arrays, after, strict=True):
            leaves[i] = leaf
        return shards, treedef.unflatten(leaves)

    def _weights(self, segment: Segment, held: dict[int, Any]) -> Values:
        return {self._number(w): held[w] for w in segment.weights}

    def _number(self, weight: int) -> int:
        return self.cut.program.inputs[weight]


def _layouts(tree: PyTree) -> list[Layout]:
    return jax.tree.leaves(tree, is_leaf=is_layout)
