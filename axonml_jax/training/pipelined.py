"""The loss of a pipeline's step, its gradients, and calls of a pipelined model."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import PyTree, is_array
from axonml_jax.executor.pieces import run_pieces
from axonml_jax.model.loss import Loss
from axonml_jax.model.view import Variables
from axonml_jax.parallel.placement import Placement, key_number, read_shapes
from axonml_jax.strategies.strategy import units
from axonml_jax.training.objective import (
    NO_SCALE,
    Differentiated,
    GradientEngine,
    Objective,
    part_keys,
    shard_key,
    with_leaves,
)


class ByStage(GradientEngine):
    """Runs all microbatches through the stages at once, as the timetable says."""

    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Differentiates the loss of all microbatches; losses come summed over this rank's microbatches."""
        placement = self.placement

        def fun(params: PyTree, frozen: PyTree, state: PyTree, key: jax.Array, batch: PyTree):
            loss_of = self.objective.differentiable_with_frozen(self.parts)
            scalar, (loss, state) = loss_of(params, frozen, state, key, batch)
            return scalar, loss, None, state

        count = placement.plan.microbatches
        keys = _keys_of_loss(placement, key, batch, count)
        batches, once, changed = _batches(self.objective, placement, variables, keys, batch, count)
        if self.objective.sweeps(batches) and self.parts.scale is not None:
            raise ValueError(NO_SCALE)
        summed, loss, state, _ = _run(
            fun, placement, variables, keys, batches, count, backward=True, once=once, blocks=self._blocks()
        )
        return Differentiated(
            summed,
            jax.tree.map(lambda x: x[None], loss),
            with_leaves(state, changed),
            None,
            self.objective.finish(batches),
        )

    def _blocks(self) -> dict[str, list[int]]:
        """The parameters of every block of the model by its path, where stages choose block by block what they keep."""
        remat, staging = self.placement.plan.remat, self.placement.stages
        if staging is None or remat is None:
            return {}
        wrap = next((each.wrap for each in self.placement.strategies.values() if each.wrap is not None), None)
        types = self.objective.model.module_types()
        types = types if staging.stack is None else staging.stack.row_types(types)
        return units([weight.name for weight in staging.weights], wrap, types)


def pipelined_loss(
    objective: Objective, placement: Placement, variables: Variables, key: jax.Array, batch: PyTree
) -> tuple[Loss, Callable | None]:
    """The loss of this rank's rows: a plain mean over its microbatches, or the sums of a weighted one.

    There are as many microbatches as the plan's number and the rows have in common. Also returns what is to be done with the
    loss's sum over ranks (`Objective.finish`).
    """

    def fun(params: PyTree, frozen: PyTree, state: PyTree, key: jax.Array, batch: PyTree):
        loss, state = objective(Variables(params, frozen, state), key, batch)
        return jnp.zeros(()), loss, None, state

    count = placement.batch_layout.common_count(batch, placement.plan.microbatches)
    keys = _keys_of_loss(placement, key, batch, count)
    batches, once, _ = _batches(objective, placement, variables, keys, batch, count)
    if objective.sweeps(batches):
        return objective.swept_loss(batches), None
    _, loss, _, _ = _run(fun, placement, variables, keys, batches, count, backward=False, once=once)
    loss = loss if loss.weight is not None else loss._replace(total=loss.total / count)
    return loss, objective.finish(batches)


def _batches(
    objective: Objective, placement: Placement, variables: Variables, keys: jax.Array, batch: PyTree, count: int
) -> tuple[PyTree, frozenset[str], dict[str, jax.Array]]:
    """This rank's microbatches in the form in which the loss takes them, after a first sweep where it needs one.

    And the names of the model's state with which all of them begin as the step does, and what that sweep makes of state.
    """
    read, parts = read_shapes(placement, variables.state), placement.batch_layout.microbatches(batch, count)
    batches, once = objective.microbatches(read, keys[0], batch, parts)

    def each(fun: Callable, batches: PyTree) -> list[jax.Array]:
        def stage(params: PyTree, frozen: PyTree, state: PyTree, key: jax.Array, batch: PyTree):
            made, state = fun(Variables(params, frozen, state), key, batch)
            return jnp.zeros(()), None, made, state

        return _run(stage, placement, variables, keys, batches, count, backward=False, once=once)[3]

    batches, changed = objective.swept(each, read, keys[0], batch, batches)
    return batches, once, changed


def _keys(placement: Placement, key: jax.Array, count: int) -> jax.Array:
    """The random keys of this rank's microbatches."""
    shard = key_number(placement)
    return jax.vmap(lambda m: shard_key(key, m, shard))(jnp.arange(count))


def _keys_of_loss(placement: Placement, key: jax.Array, rows: PyTree, count: int) -> jax.Array:
    by_rows = placement.plan.draws == "rows"
    return jnp.stack(part_keys(placement, key, rows, count)) if by_rows else _keys(placement, key, count)


def pipelined_call(
    call: Callable, placement: Placement, variables: Variables, key: jax.Array, arrays: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs `call(variables, key, arrays) -> (outputs, state)` through the stages, microbatch by microbatch.

    Outputs keep the dim that grows with the rows; floating ones without such a dim are averaged over microbatches. Numbers
    that are no arrays are the same in every microbatch and stay what they are.
    """
    count = placement.batch_layout.common_count(arrays, placement.plan.microbatches)
    dims, whole = [], (jax.tree.structure(None), [])

    def fun(params: PyTree, frozen: PyTree, state: PyTree, key: jax.Array, arrays: PyTree):
        nonlocal dims, whole
        own = Variables(params, frozen, state)
        dims = _growing_dims(lambda rows: _arrays_of(call(own, key, rows)[0]), arrays)
        out, state = call(own, key, arrays)
        leaves, treedef = jax.tree.flatten(out)
        whole = treedef, [None if is_array(x) else x for x in leaves]
        return jnp.zeros(()), None, _arrays_of(out), state

    arrays = placement.batch_layout.microbatches(arrays, count)
    _, _, state, stacked = _run(fun, placement, variables, _keys(placement, key, count), arrays, count, backward=False)
    merged, (treedef, numbers) = iter(map(_merged, stacked, dims)), whole
    return treedef.unflatten(next(merged) if x is None else x for x in numbers), state


def _run(
    fun: Callable,
    placement: Placement,
    variables: Variables,
    keys: jax.Array,
    batches: PyTree,
    count: int,
    *,
    backward: bool,
    once: frozenset[str] = frozenset(),
    blocks: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> tuple[PyTree, Any, PyTree, PyTree]:
    staging = placement.stages
    assert staging is not None
    timetable = staging.policy.timetable(staging.num_ranks, count)
    piped = run_pieces(
        fun, placement, variables, keys, batches, timetable if backward else timetable.forward_only, once, blocks
    )
    return piped.grads, piped.aux, piped.state, piped.outputs


def _arrays_of(outputs: PyTree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(outputs) if is_array(x)]


def _growing_dims(outputs: Callable, arrays: PyTree) -> list[int]:
    """The dim of every output that grows with the rows, or -1."""

    def shapes(factor: int) -> PyTree:
        longer = lambda x: jnp.concatenate([x] * factor) if jnp.ndim(x) else x
        return jax.eval_shape(lambda rows: outputs(jax.tree.map(longer, rows)), arrays)

    def growing(small: Any, large: Any) -> int:
        return next((i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b), -1)

    return jax.tree.map(growing, shapes(1), shapes(2))


def _merged(x: jax.Array, dim: int) -> jax.Array:
    """Merges outputs of microbatches, [count, ...], along their dim of rows; those without one are averaged, or the first."""
    if dim < 0:
        return x.mean(0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
