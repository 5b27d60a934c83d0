"""PyTorch-style pieces of a step: gradients alone, and their synchronization alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonml_jax._types import LossFn, PyTree, named_leaves, path_name
from axonml_jax.mesh.axes import as_axes
from axonml_jax.mesh.fake_devices import bound_run_ahead
from axonml_jax.model.functional import Functional, Variables
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.check_batch import check_batch
from axonml_jax.sharding.layout import is_layout
from axonml_jax.sharding.memory import to_device_memory, to_host_memory
from axonml_jax.training.buffers import first_ranks, sync_buffers
from axonml_jax.training.compiler import Compiled, compiler_options
from axonml_jax.training.each_rank import each_ranks_specs
from axonml_jax.training.gradients import gradients
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.rest.rest import stacked
from axonml_jax.training.step import objective_of
from axonml_jax.training.typed_errors import explain_typed_scan


class Differentiate:
    """`differentiate(variables, key, batch) -> (loss, metrics, grads, state)` of the global batch, compiled once per shape.

    With `sync=False` loss, metrics and gradients are each rank's own, stacked by rank along dim 0. `accept` may refuse a
    program (see `Compiled`).
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        loss_fn: LossFn,
        *,
        training: bool | None,
        sync: bool,
        accept: Callable[[Any], None] | None = None,
    ):
        self.model, self.placement, self.rest, self.mesh, self.sync = model, placement, rest_of(placement), mesh, sync
        if not sync:
            _refuse_unstackable(placement)
        self.objective = objective_of(model, loss_fn, placement, training)
        self._compiled = Compiled(self._whole, mesh, accept, compiler_options=compiler_options(placement, mesh))

    def __call__(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[jax.Array, dict, PyTree, PyTree]:
        """Differentiate; `key` is the step's randomness."""
        self._check(batch)
        with explain_typed_scan(self.placement.plan.check_vma):
            return bound_run_ahead(self._compiled(variables, key, self.placement.batch_layout.place(batch, self.mesh)))

    def _check(self, batch: PyTree) -> None:
        check_batch(self.placement.batch_layout, batch, self.placement.plan.microbatches)

    def trace(self, variables: Variables, key: jax.Array, batch: PyTree):
        """The program traced on arrays or shapes: what the ledger reads."""
        self._check(batch)
        return self._compiled.trace(variables, key, self.placement.batch_layout.marked(batch))

    def _whole(self, variables: Variables, key: jax.Array, batch: PyTree):
        placement, rest = self.placement, self.rest
        batch = placement.batch_layout.opened(batch)
        specs, own = rest.specs(variables), lambda: (placement.batch_layout.by_rank, each_ranks_specs(placement))
        means, grads = (rest.means, specs.params) if self.sync else own()
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(), placement.batch_layout.specs(batch)),
            out_specs=(means, means, grads, specs.state),
            axis_names=placement.manual_axes,
            check_vma=placement.plan.check_vma,
        )(variables, key, batch)

    def _local(self, variables: Variables, key: jax.Array, batch: PyTree):
        placement, rest = self.placement, self.rest
        variables = rest.enter(variables)
        result = gradients(self.objective, placement, variables, key, batch, sync=self.sync)
        state = sync_buffers(variables.state, result.state, placement, self.model)
        state = rest.leave(Variables(variables.params, variables.frozen, state)).state
        grads = to_host_memory(result.grads, placement.plan.offload.gradients)
        own = (result.loss, result.metrics, grads)
        return (*(rest.kept(own) if self.sync else stacked(own, placement.batch_axes)), state)


def _refuse_unstackable(placement: Placement) -> None:
    if placement.stages is not None:
        raise ValueError(
            "no_sync() gives every rank's own whole gradients, but along a pipeline ranks share one model: accumulate inside "
            "the step instead (accumulate=, or more microbatches)"
        )
    if placement.position_axes:
        raise ValueError(
            f"no_sync() gives the gradients of every rank's own loss, but along {', '.join(placement.position_axes)} ranks "
            "have parts of the same sequences, whose losses are one: accumulate inside the step instead (accumulate=)"
        )
    each_ranks_specs(placement)


class SyncStacked:
    """`sync(grads) -> grads`: the mean over ranks of gradients stacked by rank, as the plan's strategies reduce them.

    The result is as parameters rest: without the leading dim, or, where ranks keep parameters of their own, with equal
    entries along it.
    """

    def __init__(self, placement: Placement, mesh: Mesh):
        self.placement, self._compiled = placement, _sync_program(placement, mesh)

    def __call__(self, grads: PyTree) -> PyTree:
        """Synchronize.

        Raises:
          ValueError: listing every leaf that is missing, unexpected, or not stacked by rank.
        """
        layouts, degree = self.placement.params, self.placement.batch_degree
        wanted = {
            path_name(path): (degree, *layout.shape)
            for path, layout in jax.tree_util.tree_leaves_with_path(layouts, is_leaf=is_layout)
        }
        given = {name: jnp.shape(leaf) for name, leaf in named_leaves(grads).items()}
        names = [*wanted, *(name for name in given if name not in wanted)]
        wrong = [
            f"  {name}: {given.get(name, 'missing')}, needed {wanted.get(name, 'nothing')}"
            for name in names
            if given.get(name) != wanted.get(name)
        ]
        if wrong:
            raise ValueError(
                f"sync_gradients takes each rank's own gradients, stacked along dim 0 of size {degree}, as value_and_grad "
                "returns them within no_sync(); these are not:\n" + "\n".join(wrong)
            )
        return bound_run_ahead(self._compiled(grads))


def _sync_program(placement: Placement, mesh: Mesh) -> Any:
    syncing = replace(placement, plan=placement.plan.reducing())
    if syncing.own_axes:
        raise ValueError(
            f"along {', '.join(syncing.own_axes)} the plan's strategies never reduce gradients, and their `reducing()` gives "
            "none that does: sync_gradients has nothing to join them by"
        )
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)

    def local(grads):
        leaves, treedef = jax.tree.flatten(grads)
        means = [leaf[0] / placement.batch_degree for leaf in leaves]
        return rest.kept(treedef.unflatten(syncing.sync_buckets(means, layouts)))

    given, rest = each_ranks_specs(placement), rest_of(placement)
    specs = rest.specs(Variables(placement.params, {}, {})).params
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(given,),
            out_specs=specs,
            axis_names=placement.manual_axes,
            check_vma=placement.plan.check_vma,
        )
    )


def hooks_program(model: Functional, placement: Placement, mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """`run(state) -> state`: every module's `after_update` runs once, for those who update parameters themselves."""

    def local(state: PyTree) -> PyTree:
        rest = rest_of(placement)
        own = rest.enter(Variables({}, {}, state))
        return rest.leave(replace(own, state=model.after_update(own.state))).state

    def run(state: PyTree) -> PyTree:
        specs = rest_of(placement).buffer_specs(state)
        manual = placement.manual_axes
        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, axis_names=manual)(state)

    return jax.jit(run)


def equalize(variables: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """The first rank's variables on every rank that holds the same part of them, bit for bit (`sync_parameters`)."""
    rest = rest_of(placement)
    specs = rest.specs(variables)
    state = jax.tree.map(lambda _: PartitionSpec(), variables.state)
    resting = replace(specs, state=state)

    def first(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        split = {axis for entry in spec for axis in as_axes(entry or ())} - set(placement.own_axes)
        axes = tuple(axis for axis in placement.batch_axes if axis not in split)
        return first_ranks(x, axes) if axes else x

    def local(variables: Variables) -> Variables:
        own = to_device_memory(rest.enter(variables), placement.plan.offload.params)
        return rest.leave(jax.tree.map(first, own, resting))

    manual = placement.manual_axes
    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, axis_names=manual, check_vma=False)
    synced = jax.jit(call)(variables)
    where = jax.tree.map(lambda leaf: leaf.sharding, variables)
    return jax.device_put(synced, where)  # what rests on the host goes back there
