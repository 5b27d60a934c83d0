"""Programs beside the train step: gradients alone, the model's forward pass, evaluation and prediction."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from axonml_jax.base import LossFn, PyTree, is_array, named_leaves, path_name
from axonml_jax.collectives.primitives import max_over, sum_over
from axonml_jax.compat.canaries import require_types
from axonml_jax.compat.jaxpr import trace
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.layers.context import put_back
from axonml_jax.layers.whole import padded_sizes
from axonml_jax.mesh.axes import as_axes
from axonml_jax.mesh.simulate import bound_run_ahead
from axonml_jax.model.loss import per_weight, weighted_names
from axonml_jax.model.view import Functional, Mode, Variables, refuse_hidden, unwritten
from axonml_jax.parallel.placement import Placement, key_number, parts_of, reading
from axonml_jax.program.program import all_but_named, read_program
from axonml_jax.program.values import SAME, differing
from axonml_jax.sharding.batch import BatchLayout, check_batch, filled_up, number_of_rows, rows_of
from axonml_jax.sharding.layout import is_layout, place, to_device_memory, to_host
from axonml_jax.training.compile import Compiled, compiler_options, explain_types
from axonml_jax.training.compose import rest_of
from axonml_jax.training.gradients import gradients, means_of, summed
from axonml_jax.training.objective import refuse_moved, shard_key
from axonml_jax.training.rest import stacked
from axonml_jax.training.state import each_ranks_specs
from axonml_jax.training.step import TrainStep, forward_mode, objective_of
from axonml_jax.training.update import first_ranks, sync_buffers

# --------------------------------------------------------------------------------------------------
# PyTorch-style pieces of a step: gradients alone, and their synchronization alone.
# --------------------------------------------------------------------------------------------------


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
        self.model = model
        self.placement = placement
        self.rest = rest_of(placement)
        self.mesh = mesh
        self.sync = sync
        if not sync:
            _refuse_unstackable(placement)
        self.objective = objective_of(model, loss_fn, placement, training, sync=sync)
        options = compiler_options(placement, mesh)
        self._compiled = Compiled(self._mapped, mesh, accept, reads=loss_fn, compiler_options=options)

    def __call__(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[jax.Array, dict, PyTree, PyTree]:
        """Differentiate; `key` is the step's randomness."""
        self._check(batch)
        with explain_types(self.placement.plan.check_vma):
            return bound_run_ahead(self._compiled(variables, key, self.placement.batch_layout.place(batch, self.mesh)))

    def changed(self) -> list[str]:
        """Names of what the loss reads from outside and was changed since it was compiled."""
        return self._compiled.changed()

    def _check(self, batch: PyTree) -> None:
        check_batch(self.placement.batch_layout, batch, self.placement.plan.microbatches)

    def trace(self, variables: Variables, key: jax.Array, batch: PyTree):
        """The program traced on arrays or shapes: what the ledger reads."""
        self._check(batch)
        return self._compiled.trace(variables, key, self.placement.batch_layout.marked(batch))

    def _mapped(self, variables: Variables, key: jax.Array, batch: PyTree):
        placement, rest = self.placement, self.rest
        batch = placement.batch_layout.opened(batch)
        specs, own = rest.specs(variables), lambda: (placement.batch_layout.by_rank, each_ranks_specs(placement))
        means, grads = (rest.means, specs.params) if self.sync else own()
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(), placement.batch_layout.specs(batch)),
            out_specs=(means, means, grads, specs.state),
            axis_names=placement.axes.manual,
            check_vma=placement.plan.check_vma,
        )(variables, key, batch)

    def _local(self, variables: Variables, key: jax.Array, batch: PyTree):
        placement, rest = self.placement, self.rest
        variables = rest.enter(variables)
        result = gradients(self.objective, placement, variables, key, batch, sync=self.sync)
        state = sync_buffers(variables.state, result.state, placement, self.model)
        state = rest.leave(Variables(variables.params, variables.frozen, state)).state
        own = (result.loss, result.metrics, result.grads)
        return (*(rest.stored(own) if self.sync else stacked(own, placement.axes.batch)), state)


def _refuse_unstackable(placement: Placement) -> None:
    if placement.stages is not None:
        raise ValueError(
            "no_sync() gives each rank gradients of all parameters, but the ranks of a pipeline each hold a part of one model: "
            "accumulate inside the step instead (accumulate=, or more microbatches)"
        )
    if placement.axes.positions:
        raise ValueError(
            f"no_sync() gives the gradients of each rank's own loss, but along {', '.join(placement.axes.positions)} ranks "
            "hold parts of the same sequences and share one loss: accumulate inside the step instead (accumulate=)"
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
        """Synchronizes the gradients.

        Raises:
          ValueError: listing every leaf that is missing, unexpected, or not stacked by rank.
        """
        layouts, degree = self.placement.params, self.placement.batch_layout.degree
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
    if own := syncing.axes.independent:
        raise ValueError(
            f"along {', '.join(own)} the plan's strategies never reduce gradients, and their `reducing()` returns no strategy "
            "that does, so sync_gradients cannot reduce them"
        )
    layouts = jax.tree.leaves(placement.params, is_leaf=is_layout)

    def local(grads):
        leaves, treedef = jax.tree.flatten(grads)
        means = [leaf[0] / placement.batch_layout.degree for leaf in leaves]
        synced = syncing.sync_buckets(parts_of(syncing, means), layouts)
        return rest.stored(treedef.unflatten([grad.taken() for grad in synced]))

    given, rest = each_ranks_specs(placement), rest_of(placement)
    specs = rest.specs(Variables(placement.params, {}, {})).params
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(given,),
            out_specs=specs,
            axis_names=placement.axes.manual,
            check_vma=placement.plan.check_vma,
        )
    )


def hooks_program(model: Functional, placement: Placement, mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """Compiles `run(state) -> state`, which calls every module's `after_update` once, for users with their own updates."""

    def local(state: PyTree) -> PyTree:
        rest = rest_of(placement)
        own = rest.enter(Variables({}, {}, state))
        return rest.leave(replace(own, state=model.after_update(own.state))).state

    def run(state: PyTree) -> PyTree:
        specs = rest_of(placement).buffer_specs(state)
        options = {"axis_names": placement.axes.manual, "check_vma": placement.plan.check_vma}
        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, **options)(state)

    return jax.jit(run)


def equalize(variables: Variables, placement: Placement, mesh: Mesh) -> Variables:
    """Copies the first rank's variables to every rank that holds the same part of them, bit for bit (`sync_parameters`)."""
    rest = rest_of(placement)
    specs = rest.specs(variables)
    state = jax.tree.map(lambda _: PartitionSpec(), variables.state)
    resting = replace(specs, state=state)

    def first(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        split = {axis for entry in spec for axis in as_axes(entry or ())} - set(placement.axes.independent)
        axes = tuple(axis for axis in placement.axes.batch if axis not in split)
        return first_ranks(x, axes) if axes else x

    def local(variables: Variables) -> Variables:
        own = to_device_memory(rest.enter(variables), placement.plan.offload.params)
        return rest.leave(jax.tree.map(first, own, resting))

    manual = placement.axes.manual
    call = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, axis_names=manual, check_vma=False)
    synced = jax.jit(call)(variables)
    where = jax.tree.map(lambda leaf: leaf.sharding, variables)
    return jax.device_put(synced, where)  # what rests on the host goes back there


# --------------------------------------------------------------------------------------------------
# Evaluation: the loss and metrics of a global batch, without gradients or changes.
# --------------------------------------------------------------------------------------------------


class Evaluated(NamedTuple):
    """The loss and metrics of a batch, and what counts of it.

    Attributes:
      values: by name, the loss as `loss`.
      weights: of those that are `WeightedMean`s, their weight over the whole batch; the others count by rows.
      rows: the number of the batch's rows.
    """

    values: dict[str, Any]
    weights: dict[str, Any]
    rows: int

    def weight(self, name: str) -> Any:
        """The weight of one of the values in a mean over batches."""
        return self.weights.get(name, self.rows)

    def merged(self, other: "Evaluated") -> "Evaluated":
        """The results of two batches as of one; every value must have a weight."""
        weights = {name: weight + other.weights[name] for name, weight in self.weights.items()}
        total = lambda each, name: each.values[name] * each.weights[name].astype(each.values[name].dtype)
        values = {name: per_weight(total(self, name) + total(other, name), weights[name]) for name in self.values}
        return Evaluated(values, weights, self.rows + other.rows)


def mean_of(
    results: Sequence[Evaluated], weights: Sequence[float] | None = None, *, stacked: bool = False
) -> dict[str, Any]:
    """The mean of everything over batches, as if they were one: a number, or an array of the metric's shape.

    Every process must call it.

    Args:
      results: the results of the batches.
      weights: what each counts for; None: a `WeightedMean` by its weight, all else by rows.
      stacked: whether values are of several models (NO_SYNC), stacked along dim 0, over which they are averaged too.

    Raises:
      ValueError: when there are no batches, not a weight for each, or naming a metric that has another shape in another batch.
    """
    if not results:
        raise ValueError("there are no batches to evaluate on: a mean needs at least one")
    if weights is not None and len(weights) != len(results):
        raise ValueError(
            f"{_counted(results, 'batch', 'es')}, but {_counted(weights, 'weight', 's')}: give one for each"
        )
    found = {name: _mean(name, results, weights, stacked) for name in results[0].values}
    return {name: mean if np.ndim(mean) else np.asarray(mean).item() for name, mean in found.items()}


def _counted(many: Sequence[Any], one: str, ending: str) -> str:
    return f"{len(many)} {one}{ending if len(many) != 1 else ''}"


def _mean(name: str, results: Sequence[Evaluated], weights: Sequence[float] | None, stacked: bool) -> Any:
    own = [each.weight(name) for each in results] if weights is None else weights
    own = [np.asarray(each, np.float64) for each in own]
    values = [np.asarray(each.values[name]) for each in results]
    values = [x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in values]
    if len(shapes := sorted({x.shape for x in values})) > 1:
        raise ValueError(
            f"the metric {name!r} has different shapes in different batches, {shapes}, so it has no mean over them: for "
            "values per row use trainer.predict(batches, predict_fn)"
        )
    by_model = stacked and bool(own[0].ndim)
    values = [x.mean(0) if stacked and not by_model else x for x in values]
    mean = per_weight(sum(x * each for x, each in zip(values, own, strict=True)), sum(own))
    return np.mean(mean, 0) if by_model else mean


class EvalStep:
    """`step(variables, batch) -> Evaluated`, compiled once per batch shape; nothing is donated or changed.

    The model runs in evaluation mode: dropout off, running averages used. Rows are taken in as many microbatches as in
    training, or in as many as the two numbers have in common. Any number of rows is exact. Where loss and metrics are
    `WeightedMean`s, whose sums can be added, those that divide are split over the batch shards, and every shard takes all of
    the rest; else every shard takes all rows. `accept` may refuse a program (see `Compiled`).
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        loss_fn: LossFn,
        accept: Callable[[Any], None] | None = None,
        *,
        alike: tuple[str, ...] = (),
    ):
        """`alike`: the axes along which all ranks have the same rows."""
        self.placement = placement
        self.rest = rest_of(placement)
        self.mesh = mesh
        self._alike = alike
        self._given, self._weighted = (model, loss_fn, accept), {}
        objective = objective_of(model, loss_fn, placement, training=False, gradients=False)
        self.objective = replace(objective, loss_fn=self._noting)
        options = compiler_options(placement, mesh)
        self._compiled = Compiled(self._mapped, mesh, accept, reads=loss_fn, compiler_options=options)

    def __call__(self, variables: Variables, batch: PyTree) -> Evaluated:
        """The loss and the loss function's metrics over the global batch [B, ...].

        Raises:
          ValueError: where ranks have models or buffers of their own, for a B that does not divide by the batch shards.
        """
        placement = self.placement
        layout = placement.batch_layout
        if placement.axes.independent or placement.axes.buffers is not None:
            check_batch(layout, batch)
        rows = number_of_rows(layout, batch)
        if not (rest := rows % layout.row_degree):
            return self._run(variables, batch, rows)
        apart = all(self._weighted.values()) and rows > rest
        if apart:
            first = self._run(variables, rows_of(batch, 0, rows - rest), rows - rest)
            apart = all(self._weighted.values())  # known now
        if apart:
            return first.merged(self._everywhere._run(variables, rows_of(batch, rows - rest, rows), rest))
        return self._everywhere._run(variables, batch, rows)

    def refuse_rows(self, variables: Variables, batch: PyTree, found: Evaluated) -> None:
        """Refuse metrics with a number for every row, of which there is no mean: with twice the rows they are twice as long.

        Raises:
          ValueError: naming them.
        """
        if not any(found.rows in np.shape(value) for value in found.values.values()):
            return
        step = self._everywhere if found.rows % self.placement.batch_layout.row_degree else self
        placed = step.placement.batch_layout.place(filled_up(batch, found.rows), self.mesh)
        try:
            more, _ = step._compiled.trace(variables, placed).out_info
        except Exception:  # a loss of so many rows alone: it says nothing of others
            return
        pairs = [(name, np.shape(value), more[name].shape) for name, value in found.values.items()]
        if grown := [name for name, own, other in pairs if own != other and 2 * found.rows in other]:
            raise ValueError(
                f"these metrics have a number for every row, so they have no mean over batches: {', '.join(grown)}. For values "
                "per row use trainer.predict(batches, predict_fn)"
            )

    def _run(self, variables: Variables, batch: PyTree, rows: int) -> Evaluated:
        with explain_types(self.placement.plan.check_vma):
            found = self._compiled(variables, self.placement.batch_layout.place(batch, self.mesh))
        values, weights = bound_run_ahead(found)
        return Evaluated(values, weights, rows)

    @functools.cached_property
    def _everywhere(self) -> "EvalStep":
        """The same evaluation with all rows on every batch shard, in one microbatch."""
        placement, (model, loss_fn, accept) = self.placement, self._given
        alone = replace(placement, plan=replace(placement.plan, accumulate=1), splits_rows=False)
        return EvalStep(model, alone, self.mesh, loss_fn, accept, alike=placement.batch_layout.rows)

    def _noting(self, model: Any, batch: PyTree) -> Any:
        """Calls the user's loss, and notes which of the values that it returns are weighted means."""
        returned = self._given[1](model, batch)
        self._weighted = weighted_names(returned)
        return returned

    def _mapped(self, variables: Variables, batch: PyTree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        batch = self.placement.batch_layout.opened(batch)
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(self.rest.specs(variables), self.placement.batch_layout.specs(batch)),
            out_specs=self.rest.means,
            axis_names=self.placement.axes.manual,
            check_vma=self.placement.plan.check_vma,
        )(variables, batch)

    def _local(self, variables: Variables, batch: PyTree) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        placement, variables = self.placement, self.rest.enter(variables)
        key = jax.random.key(0)
        if placement.plan.draws == "shards":
            key = shard_key(key, 0, key_number(placement))
        count = placement.batch_layout.common_count(batch, placement.plan.microbatches)
        one = count == placement.ranks(placement.axes.rows) == 1 and not placement.axes.positions
        # All rows at once are the whole batch.
        objective = replace(self.objective, whole=None) if one else self.objective
        loss, finish = self.rest.loss(objective, variables, key, batch)
        sums = summed(jax.tree.map(lambda x: x[None], loss), placement, True)
        mean, metrics, weight = means_of(sums, placement.ranks(placement.axes.rows))
        weights = {"loss": weight} | {name: metric.weight for name, metric in sums.metrics.items()}
        mean, metrics, _ = (mean, metrics, None) if finish is None else finish(mean, metrics, weights)
        weights = {name: weights[name] for name, weighted in self._weighted.items() if weighted}
        return self.rest.stored(jax.tree.map(self._same, ({**metrics, "loss": mean}, weights)))

    def _same(self, x: jax.Array) -> jax.Array:
        """Types a value that is equal along the axes `alike` as invariant over them."""
        axes = tuple(axis for axis in self._alike if axis in varying_axes(x))
        return max_over(x, axes) if axes else x


# --------------------------------------------------------------------------------------------------
# Outputs that are split on a rank: positions, or what a model's own layers leave split; along which dims and mesh axes.
# --------------------------------------------------------------------------------------------------

SPLITTING = ("row", "col", "tensor")
"""The axes along which layers may leave outputs split; `depth` splits the batch."""


def split_dims(
    whole: PyTree,
    parts: PyTree,
    batch_dims: PyTree,
    known: PyTree,
    splitting: Mapping[str, int],
    typed: Callable[[], PyTree],
    padded: Collection[int] = (),
) -> PyTree:
    """Tells for every output which dims besides rows are split on a rank: `{dim: mesh axes}`.

    Args:
      whole: the outputs' shapes on one device.
      parts: the outputs' shapes on one rank.
      batch_dims: the dim of each that grows with the batch, or -1.
      known: `{dim: mesh axes}` of what is known already.
      splitting: the mesh axes that may split other dims, and their sizes.
      typed: the axes each output varies over; called only where sizes leave a choice.
      padded: sizes of dims that ranks may share unevenly, with padding behind.

    Raises:
      ValueError: naming the outputs whose axis cannot be told.
    """
    splitting = {axis: degree for axis, degree in splitting.items() if degree > 1}
    unclear: list[str] = []

    def of(path: tuple, full: Any, part: Any, batch_dim: int, own: dict) -> dict[int, tuple[str, ...]]:
        found = dict(own)
        for dim, (size, left) in enumerate(zip(getattr(full, "shape", ()), getattr(part, "shape", ()), strict=True)):
            if dim == batch_dim or dim in own or size == left:
                continue
            fits = lambda degree, size=size, left=left: (
                left * degree == size or (size in padded and left == -(-size // degree))
            )
            axes = [axis for axis, degree in splitting.items() if fits(degree)]
            if len(axes) != 1:
                axes = [axis for axis in axes if axis in _at(typed(), path)]
            if len(axes) != 1:
                unclear.append(f"  {path_name(path) or 'output'}: {left} of {size} along dim {dim}")
            found[dim] = tuple(axes)
        return found

    dims = jax.tree_util.tree_map_with_path(of, whole, parts, batch_dims, known)
    if unclear:
        raise ValueError(
            "a rank has only a part of these outputs, and it cannot be told over which mesh axis they are split "
            f"({splitting}):\n"
            + "\n".join(unclear)
            + "\ngather them in the model (for features: gather_output=True of its last layer)"
        )
    return dims


def longer_dims(known: dict, small: Any, large: Any, axis: str) -> dict[int, tuple[str, ...]]:
    """The dims of an output that are longer where ranks have all positions of an axis: `{dim: (*known axes, axis)}`."""
    sizes = zip(getattr(small, "shape", ()), getattr(large, "shape", ()), strict=True)
    return {dim: (*known.get(dim, ()), axis) for dim, (a, b) in enumerate(sizes) if a != b}


def refuse_partial(differs: Mapping[str, frozenset[str]], split: PyTree, along: Collection[str]) -> None:
    """Refuse outputs without a dim of positions that differ between ranks with different positions, such as a mean over them.

    Args:
      differs: over which axes each output may differ, by its path.
      split: `{dim: mesh axes}` of each output.
      along: the axes that split positions.

    Raises:
      ValueError: naming them.
    """
    taken = {name: set(sum(dims.values(), ())) for name, dims in _named(split).items()}
    wrong = {name: sorted(axes & set(along) - taken.get(name, set())) for name, axes in differs.items()}
    if wrong := {name or "output": axes for name, axes in wrong.items() if axes}:
        raise ValueError(
            f"these outputs have no dim of positions, but each rank computes them from its own positions: {wrong} (output: "
            "axes). Reduce them over the axis in the model (jax.lax.psum), or return one per position"
        )


def _named(split: PyTree) -> dict[str, dict[int, tuple[str, ...]]]:
    is_dims = lambda x: isinstance(x, dict) and all(isinstance(key, int) for key in x)
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(split, is_leaf=is_dims)}


def varying(outputs: PyTree) -> PyTree:
    """The axes that each output is typed as varying over (inside `shard_map` with `check_vma=True`)."""
    return jax.tree.map(lambda x: varying_axes(x) if isinstance(x, jax.Array) else frozenset(), outputs)


def _at(tree: PyTree, path: tuple) -> frozenset[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, frozenset))
    return next(leaf for where, leaf in leaves if where == path)


# --------------------------------------------------------------------------------------------------
# The model's own call on a global batch, under any plan.
# --------------------------------------------------------------------------------------------------

Arrays = Mapping[str, Any]
"""A call's arrays by their paths: an argument's number or name, then the path in it."""


def parameter_names(model: Any) -> list[str]:
    """Names of the positional parameters of a model's `__call__`; empty where there is no signature."""
    try:
        parameters = inspect.signature(type(model).__call__).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in plain][1:]


def unique(names: list[str]) -> list[str]:
    """Makes names unique, in place: a repeated one gets its index behind it."""
    taken: set[str] = set()
    for i, name in enumerate(names):
        names[i] = f"{name}#{i}" if name in taken else name
        taken.add(name)
    return names


class Forward:
    """`forward(variables, key, args, kwargs) -> (outputs, state)`: dim 0 of every array argument is the global batch.

    Outputs keep the batch dim that grows with the batch, wherever it is. Dims that are split on a rank are whole outside:
    positions, where an axis splits them, in the sequence's order, and what layers leave split, such as logits over the
    vocabulary. Floating outputs without a batch dim are averaged over ranks. `accept` may refuse a program (see `Compiled`).
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        training: bool | None,
        accept: Callable[[Any], None] | None = None,
        fun: Callable[..., PyTree] | None = None,
    ):
        """Builds it.

        Args:
          model: the model.
          placement: how the plan places it.
          mesh: the mesh.
          training: see `Mode`.
          accept: see above.
          fun: `fun(model, *args, **kwargs)` in the place of the model's own call.
        """
        self.model = model
        self.placement = placement
        self.rest = rest_of(placement)
        self.mesh = mesh
        self.fun, self.row_dims = fun or (lambda model, *args, **kwargs: model(*args, **kwargs)), None
        self.mode = forward_mode(placement, training)
        options = {"static_argnames": "static", "compiler_options": compiler_options(placement, mesh)}
        self._compiled = Compiled(self._mapped, mesh, accept, reads=fun, **options)
        self._parameters = parameter_names(model.module(model.shapes))

    def __call__(self, variables: Variables, key: jax.Array, args: tuple, kwargs: dict) -> tuple[PyTree, PyTree]:
        """Run the model; arguments that are no arrays (flags, strings) are passed as they are."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
        names = unique([self._name(path) for path, _ in leaves])
        arrays = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if is_array(leaf)}
        check_batch(self.placement.batch_layout, arrays)
        rest = [(name, None if name in arrays else leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]
        static = (treedef, tuple(rest))
        with explain_types(self.placement.plan.check_vma):
            return bound_run_ahead(
                self._compiled(variables, key, self.placement.batch_layout.place(arrays, self.mesh), static=static)
            )

    def _name(self, path: tuple) -> str:
        """The path of an argument's leaf; a positional one has the name that the model's `__call__` gives it."""
        own = path[1:]
        if path[0].idx == 0 and own[0].idx < len(self._parameters):
            return path_name((jax.tree_util.DictKey(self._parameters[own[0].idx]), *own[1:]))
        return path_name(own)

    def _mapped(self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        placement, specs = self.placement, self.rest.specs(variables)
        arrays = placement.batch_layout.opened(arrays)
        dims, inner, sizes = self._dims(variables, arrays, static)
        self._look_at_rows(variables, arrays, static)
        self.row_dims = dims  # the same for any number of rows

        def local(variables, key, arrays):
            key = shard_key(key, 0, key_number(placement))
            variables = self.rest.enter(variables)
            out, state = self._read_and_call(variables, key, arrays, static)
            out = jax.tree.map(self._finish, out, dims, inner)
            state = sync_buffers(variables.state, state, placement, self.model)
            return out, self.rest.leave(Variables(variables.params, variables.frozen, state)).state

        def out_spec(dim: int, split: dict):
            axes = split | ({dim: placement.batch_layout.rows} if dim >= 0 else {})
            return PartitionSpec(*(axes.get(i) for i in range(max(axes, default=-1) + 1)))

        out, state = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(), placement.batch_layout.specs(arrays)),
            out_specs=(jax.tree.map(out_spec, dims, inner), specs.state),
            axis_names=placement.axes.manual,
            check_vma=placement.plan.check_vma,
        )(variables, key, arrays)
        return jax.tree.map(unpadded_dims, out, inner, sizes), state

    def _read_and_call(
        self, variables: Variables, key: jax.Array, arrays: Arrays, static: tuple, whole: tuple[str, ...] = ()
    ) -> tuple[Any, PyTree]:
        def call(read: Variables, key: jax.Array, arrays: Arrays):
            return self._call(read, key, arrays, static, whole=whole)

        return self.rest.read(call, self.model, variables, key, arrays)

    def _call(
        self,
        variables: Variables,
        key: jax.Array,
        arrays: Arrays,
        static: tuple,
        mode: Mode | None = None,
        whole: tuple[str, ...] = (),
        alone: bool = False,
    ) -> tuple[Any, PyTree]:
        treedef, rest = static

        def call(variables: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            leaves = [arrays.get(name, value) for name, value in rest]
            args, kwargs = treedef.unflatten(leaves)
            with self.placement.inside(whole), unwritten((args, kwargs), self._name):
                bound = self.model.bind(variables, key, mode or self.mode)
                out = self.fun(bound, *args, **kwargs)
                refuse_hidden(out)
                return out, self.model.state_of(bound)

        def checked(variables: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            out, state = call(variables, key, arrays)
            again = lambda state: call(replace(variables, state=state), key, arrays)[1]
            refuse_moved(self.model, variables.state, state, again)
            return out, state

        seen = checked if (mode or self.mode).training is False else call
        read = reading(seen, self.model, self.placement, self.mode.precision, rewrites=not alone)
        return read(variables, key, arrays)

    def _dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree, PyTree]:
        """The layout of every output: `(batch dims, other split dims, shapes on one device)`, each a tree like the outputs.

        A batch dim is -1 where none grows with the batch; split dims are `{dim: mesh axes}`, and may be padded. Shapes
        are () unless split dims may be padded.
        """
        placement, key = self.placement, jax.random.key(0)
        parts, dims = self._batch_dims(variables, arrays, static)
        split = self._position_dims(parts, dims, variables, arrays, static)
        self._refuse_merged(parts, dims, split, arrays, static)
        splitting = {axis: placement.degrees.get(axis, 1) for axis in SPLITTING if axis not in placement.automatic}
        if all(degree == 1 for degree in splitting.values()):
            return dims, split, jax.tree.map(lambda _: (), dims)

        def alone(variables: Variables, arrays: Arrays):
            own = replace(self.mode, batch_norm_axes=())
            return self._call(variables, key, arrays, static, own, alone=True)[0]

        @functools.cache
        def typed() -> PyTree:
            seen = []
            require_types(True)

            def local(variables: Variables, arrays: Arrays):
                own = self.rest.enter(variables)
                seen.append(varying(self._read_and_call(own, key, arrays, static)[0]))

            specs = (self.rest.specs(variables), placement.batch_layout.specs(arrays))
            call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=None, check_vma=True)
            jax.eval_shape(call, variables, arrays)
            return seen[-1]

        whole = jax.eval_shape(alone, self.model.shapes, arrays)
        padded = padded_sizes(self.model.abstract_module)
        found = split_dims(whole, parts, dims, split, splitting, typed, padded)
        return dims, found, jax.tree.map(lambda x: tuple(getattr(x, "shape", ())) if padded else (), whole)

    def _position_dims(
        self, parts: PyTree, dims: PyTree, variables: Variables, arrays: Arrays, static: tuple
    ) -> PyTree:
        """The dims of positions, `{dim: axes}` for every output: those that are longer where ranks have all positions."""
        placement, layout = self.placement, self.placement.batch_layout
        split = jax.tree.map(lambda _: {}, dims)
        for axis in placement.axes.positions:
            others = tuple(each for each in layout.positions if each[0] != axis)
            longer = self._outputs(variables, arrays, static, replace(layout, positions=others))
            split = jax.tree.map(
                lambda own, small, large, axis=axis: own | longer_dims(own, small, large, axis),
                split,
                parts,
                longer,
                is_leaf=lambda x: isinstance(x, dict) and all(isinstance(key, int) for key in x),
            )
        if placement.axes.positions:
            refuse_partial(self._made_of_parts(variables, arrays, static), split, placement.axes.positions)
        return split

    def _made_of_parts(self, variables: Variables, arrays: Arrays, static: tuple) -> dict[str, frozenset[str]]:
        """The axes over which each output may differ, by its path, where the variables are the same on all ranks."""
        layout, found = self.placement.batch_layout, {}
        axes = {name: frozenset(sum(layout.split(name, x.shape).values(), ())) for name, x in arrays.items()}

        def probed(read: Variables, key: jax.Array, arrays: Arrays) -> tuple[Any, PyTree]:
            out, state = self._call(read, key, arrays, static)
            named = named_leaves(out)
            flat = lambda read, key, arrays: jax.tree.leaves(self._call(read, key, arrays, static)[0])
            program = read_program(trace(flat, read, key, arrays).jaxpr)
            given = [SAME] * len(jax.tree.leaves((read, key))) + jax.tree.leaves(
                {name: axes[name] for name in arrays}, is_leaf=lambda x: isinstance(x, frozenset)
            )
            found.update(zip(named, differing(program, given, lambda *_: None), strict=True))
            return out, state

        def local(variables: Variables, arrays: Arrays) -> PyTree:
            return self.rest.read(probed, self.model, self.rest.enter(variables), jax.random.key(0), arrays)[0]

        self._shapes(local, variables, arrays, layout)
        return found

    def _batch_dims(self, variables: Variables, arrays: Arrays, static: tuple) -> tuple[PyTree, PyTree]:
        """One rank's output shapes, and of each the dim that grows with the batch, or -1: seen by tracing two batch sizes."""
        more = lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if x.ndim else x
        layout = self.placement.batch_layout
        small = self._outputs(variables, arrays, static, layout)
        large = self._outputs(variables, {name: more(x) for name, x in arrays.items()}, static, layout)
        return small, jax.tree.map(_growing_dim, small, large)

    def _refuse_merged(self, parts: PyTree, dims: PyTree, split: PyTree, arrays: Arrays, static: tuple) -> None:
        """Refuse outputs that merge the dim of rows with another one, unless each rank's part is contiguous."""
        from axonml_jax.meaning.places import Group, Split

        rows, along = self.placement.batch_layout.rows, _named(split)
        shapes = {name: x.shape for name, x in named_leaves(parts).items()}
        at = {name: dim for name, dim in named_leaves(dims).items() if dim >= 0}
        wrong = {name: dim for name, dim in at.items() if dim in along.get(name, {})}
        ranks = self.placement.ranks(rows)
        own = next((x.shape[0] // ranks for x in arrays.values() if x.ndim), 1)
        merged = {name: dim for name, dim in at.items() if shapes[name][dim] > own and ranks > 1}
        if merged and not wrong:
            followed = self._followed(Group(rows, ranks), Split(0), arrays, static)
            wrong = {name: dim for name, dim in merged.items() if followed[name] != (Split(dim),)}
        if wrong := {name or "output": f"dim {dim} of {shapes[name]} on a rank" for name, dim in wrong.items()}:
            raise ValueError(
                f"these outputs have rows merged with other dims: {wrong}, so it cannot be told in which order ranks hold "
                "them. Return rows (and positions) as dims of their own"
            )

    def _followed(self, group: Any, place: Any, arrays: Arrays, static: tuple) -> dict[str, Any]:
        """Follows how ranks hold values, from arrays split at `place` through the model's operations to every output."""
        from axonml_jax.meaning.following import Following

        names, own = [], replace(self.mode, batch_norm_axes=())

        def alone(variables: Variables, key: jax.Array, arrays: Arrays) -> list[Any]:
            out = named_leaves(self._call(variables, key, arrays, static, own, alone=True)[0])
            names[:] = out
            return list(out.values())

        program = read_program(trace(alone, self.model.shapes, jax.random.key(0), arrays).jaxpr, all_but_named)
        given = [(place,) if np.ndim(x) else (None,) for x in jax.tree.leaves(arrays)]
        fixed = [(None,)] * (len(program.inputs) - len(given))
        return dict(zip(names, Following((group,)).program(program, [*fixed, *given]), strict=True))

    def _look_at_rows(self, variables: Variables, arrays: Arrays, static: tuple) -> None:
        """Refuse draws that would be the same for the rows of all ranks; warns where the model's code may mix rows.

        Here every rank has its own rows alone.

        Raises:
          ValueError: naming these draws.
        """
        from axonml_jax.meaning.deciding import Alone, called_with, look_at_call

        axes = self.placement.batch_layout.rows
        ranks, sizes = self.placement.ranks(axes), {x.shape[0] for x in arrays.values() if x.ndim}
        if ranks == 1 or not sizes or min(sizes) < ranks:
            return
        parts = 2 if min(sizes) == ranks and ranks % 2 == 0 else ranks  # of one row code may trace otherwise
        own, trains = replace(self.mode, batch_norm_axes=()), self.mode.training is not False

        def alone(variables: Variables, key: jax.Array, given: list) -> tuple[dict[str, Any], dict[str, Any]]:
            named = dict(zip(arrays, given, strict=True))
            out, state = self._call(variables, key, named, static, own, alone=True)
            return {name: x for name, x in named_leaves(out).items() if is_array(x)}, named_leaves(state)

        def called(parts: int) -> tuple[Any, list[str]]:
            part = lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]) if x.ndim else (), x.dtype)
            return called_with(alone, self.model.shapes, jax.random.key(0), list(map(part, arrays.values())))

        try:
            (whole, names), (part, _), state = called(1), called(parts), named_leaves(self.model.shapes.state)
        except NameError as error:  # code with collectives of its own is written for a rank's rows
            if "unbound axis" not in str(error):
                raise
            return
        look_at_call(
            Alone(
                whole,
                names,
                part,
                parts,
                axes,
                made_of=lambda: self._made_of_parts(variables, arrays, static),
                state=state if trains else {},
                joined=self.model.state_joins(),
                normed=trains and any(map(self.model.synchronized(), state)),
            ),
            meant=not self.mode.batch_norm_axes,
        )

    def _outputs(self, variables: Variables, arrays: Arrays, static: tuple, layout: BatchLayout) -> PyTree:
        """The shapes of one rank's outputs for a batch that is split by `layout`."""
        along = {axis for axis, _ in layout.positions}
        whole = tuple(axis for axis in self.placement.axes.positions if axis not in along)

        def local(variables: Variables, arrays: Arrays) -> PyTree:
            return self._read_and_call(self.rest.enter(variables), jax.random.key(0), arrays, static, whole)[0]

        return self._shapes(local, variables, arrays, layout)

    def _shapes(self, local: Callable, variables: Variables, arrays: Arrays, layout: BatchLayout) -> PyTree:
        # Unchecked and said to be replicated, so that the shapes seen are those of one rank.
        options = {"axis_names": self.placement.axes.manual, "check_vma": False}
        specs = (self.rest.specs(variables), layout.specs(arrays))
        call = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(), **options)
        return jax.eval_shape(call, variables, arrays)

    def _finish(self, out: Any, dim: int, split: dict) -> Any:
        taken, orders = {axis for axes in split.values() for axis in axes}, dict(self.placement.batch_layout.orders)
        for along, axes in split.items():
            for axis in orders.keys() & set(axes):
                out = put_back(out, along, axis, orders[axis])
        axes = tuple(axis for axis in self.placement.axes.batch if axis not in taken)
        if dim >= 0 or not axes or not isinstance(out, jax.Array):  # a number that is no array is the same everywhere
            return out
        if jnp.issubdtype(out.dtype, jnp.floating):
            return sum_over(out, axes) / self.placement.ranks(axes)
        raise ValueError(
            f"the model returned an array of shape {out.shape} and dtype {out.dtype} without a batch dim: it may differ from "
            "rank to rank and has no mean. Return it as a float, or call the model through a loss_fn"
        )


def unpadded_dims(out: Any, split: Mapping[int, Any], shape: tuple[int, ...]) -> Any:
    """Slices off the padding of dims that ranks share unevenly.

    Args:
      out: as ranks' parts join.
      split: its dims that are split, besides rows.
      shape: its shape on one device; () where nothing is padded.
    """
    for dim in split if shape else ():
        if out.shape[dim] > shape[dim]:
            out = jax.lax.slice_in_dim(out, 0, shape[dim], axis=dim)
    return out


def _growing_dim(small: Any, large: Any) -> int:
    dims = [i for i, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    if len(dims) > 1:
        raise ValueError(
            f"the model returned an array with several batch dims (shape {small.shape}): return one per batch dim"
        )
    return dims[0] if dims else -1


# --------------------------------------------------------------------------------------------------
# Whether a loss reads what is trained.
# --------------------------------------------------------------------------------------------------


def trained_read(step: TrainStep, variables: Variables, batch: PyTree) -> set[str]:
    """Paths of trained parameters on which a step's loss depends in its traced program, but through `stop_gradient`.

    Args:
      step: the step.
      variables: as they rest; arrays or shapes.
      batch: a global batch; arrays or shapes.
    """
    placement, rest = step.placement, step.rest
    found: set[str] = set()

    def probed(read: Variables, key: jax.Array, batch: PyTree) -> tuple[jax.Array, PyTree]:
        found.update(step.objective.trained_read(read, key, batch))
        loss, state = step.objective(read, key, batch)  # a pipeline cuts its stages out of this program
        return loss.total, state

    def local(variables: Variables, batch: PyTree) -> jax.Array:
        return rest.read(probed, step.model, rest.enter(variables), jax.random.key(0), batch)[0]

    specs = (rest.specs(variables), placement.batch_layout.specs(batch))
    options = {"axis_names": placement.axes.manual, "check_vma": False}
    jax.eval_shape(
        jax.shard_map(local, mesh=step.mesh, in_specs=specs, out_specs=PartitionSpec(), **options), variables, batch
    )
    return found


# --------------------------------------------------------------------------------------------------
# Predictions: what is made of every row, once, in order.
# --------------------------------------------------------------------------------------------------


class Predict:
    """`predict(variables, batch) -> outputs`: the outputs of every row, in order, as full NumPy arrays with rows as dim 0.

    Rows that do not divide over the shards are filled up, and what is made of the filling is left out. Every process must
    call it.
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        fun: Callable[[Any, PyTree], PyTree],
        accept: Callable[[Any], None] | None = None,
    ):
        self.placement, self._forward = placement, Forward(model, placement, mesh, False, accept, fun)
        self._key = place(jax.random.key(0), PartitionSpec(), mesh)

    def __call__(self, variables: Variables, batch: PyTree) -> PyTree:
        """Runs the function on every row.

        Raises:
          ValueError: naming outputs whose dim 0 is not the batch's rows.
        """
        layout = self.placement.batch_layout
        rows = number_of_rows(replace(layout, positions=()), batch)
        more = -rows % layout.row_degree
        out, _ = self._forward(variables, self._key, (filled_up(batch, more),), {})
        dims = named_leaves(self._forward.row_dims)
        shapes = {name: np.shape(x) for name, x in named_leaves(out).items()}
        has_rows = lambda name, shape: dims[name] == 0 and shape[0] == rows + more
        if wrong := {name or "output": shape for name, shape in shapes.items() if not has_rows(name, shape)}:
            raise ValueError(
                f"predictions have one entry for each row of the batch, in dim 0, but these do not: {wrong}. Leave "
                "them out of what predict_fn returns, or move the dim of rows to the front; trainer.evaluate returns numbers "
                "for a whole batch"
            )
        return jax.tree.map(lambda x: x[:rows], to_host(out))


def joined_rows(outputs: Sequence[PyTree]) -> PyTree:
    """Concatenates the outputs of several batches along dim 0.

    Raises:
      ValueError: when there are no batches.
    """
    if not outputs:
        raise ValueError("there are no batches to predict on")
    return jax.tree.map(lambda *each: np.concatenate(each), *outputs)
