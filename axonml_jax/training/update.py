"""Transforms around the update: the norm of gradients, clipping by it, and the model's own state made equal over ranks."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from axonml_jax.base import PyTree, named_leaves, path_name
from axonml_jax.collectives.gradients import all_reduce_leaves
from axonml_jax.collectives.primitives import axis_index, max_over, min_over, sum_over
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.mesh.simulate import bound_run_ahead
from axonml_jax.model.buffers import Join
from axonml_jax.model.view import Functional
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.layout import to_device_memory
from axonml_jax.training.compose import Differentiate, Gradients, Metrics, Reading, StepTransform, Update
from axonml_jax.training.rest import Rest, clipped, layer_norms, norm
from axonml_jax.training.state import TrainState

# --------------------------------------------------------------------------------------------------
# The norm of a step's gradients, layer by layer too, and clipping by it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm(StepTransform):
    """Measures the global norm of a step's gradients, before clipping."""

    rest: Rest
    p: float

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Measures the norm after differentiating."""

        def measured(reading: Reading) -> Gradients:
            made = run(reading)
            return made._replace(norm=norm(self.rest.parts(made.grads), self.p))

        return measured


@dataclass(frozen=True)
class LayerNorms(StepTransform):
    """Adds metrics: the norms of gradients, before clipping, and of parameters, layer by layer."""

    rest: Rest

    def around_gradients(self, run: Differentiate) -> Differentiate:
        """Measures the norms after differentiating."""

        def measured(reading: Reading) -> Gradients:
            made = run(reading)
            params = to_device_memory(reading.state.params, self.rest.placement.plan.offload.params)
            trees = {"grad_norm": made.grads, "param_norm": params}
            norms = {name: layer_norms(self.rest.squares(tree)) for name, tree in trees.items()}
            more = {f"{name}/{layer}": value for name, found in norms.items() for layer, value in found.items()}
            return made._replace(metrics={**made.metrics, **more})

        return measured


@dataclass(frozen=True)
class ClipByNorm(StepTransform):
    """Scales gradients down where their norm is over a limit."""

    max_norm: float

    def around_update(self, run: Update) -> Update:
        """Clips before the update."""
        return lambda made, before: run(made._replace(grads=clipped(made.grads, made.norm, self.max_norm)), before)


# --------------------------------------------------------------------------------------------------
# Making the model's own state (BatchNorm averages, counters) equal on all ranks after a step.
# --------------------------------------------------------------------------------------------------


def sync_buffers(before: PyTree, state: PyTree, placement: Placement, model: Functional) -> PyTree:
    """Joins the model's own state over ranks after a step, so that all go on with the same.

    A leaf that a module class declares (`Functional.state_joins`) joins over all ranks that train one model as declared. Of
    the others, with `batch_stats="global"` floating and complex leaves become the mean over ranks (exact for averages of
    per-example values) and the rest the first rank's; leaves that the forward pass joined itself are left alone. With "local"
    and `broadcast_buffers` all become the first rank's; without, each rank keeps its own.

    Args:
      before: this rank's state at the start, the same on all ranks that train one model.
      state: this rank's after all its microbatches.
      placement: the plan on its mesh.
      model: whose state it is.

    Raises:
      ValueError: where calls have left state of other names or shapes, naming all.

    Communicates: at most one all-reduce of the leaves that need it.
    """
    _refuse_other_shapes(before, state)
    plan, apart = placement.plan, placement.axes.buffers or ()
    axes = tuple(axis for axis in placement.axes.batch if axis not in apart)
    declared, synchronized = model.state_joins(), model.synchronized()
    if not axes and not (declared and placement.axes.synced):
        return state

    def finish(path, old, leaf):
        if (join := declared.get(path_name(path))) is not None:
            return _joined(join, old, leaf, placement)
        joined = plan.batch_stats == "global" and synchronized(path_name(path))
        if joined or not axes or (plan.check_vma and not varying_axes(leaf) & set(axes)):
            return leaf
        if plan.batch_stats == "global" and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return _mean(leaf, axes, placement)
        return first_ranks(leaf, axes)

    with jax.named_scope("axonml.buffers"):
        return jax.tree_util.tree_map_with_path(finish, before, state)


def _refuse_other_shapes(before: PyTree, after: PyTree) -> None:
    old, new = ({name: jnp.shape(x) for name, x in named_leaves(tree).items()} for tree in (before, after))
    if old == new:
        return
    said = [
        f"  {name}: {old.get(name, 'none')}, now {new.get(name, 'none')}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
    ]
    raise ValueError(
        "a call of the model changes the shape of its state (a rank's rows are fewer than the batch's):\n"
        + "\n".join(said)
        + "\nA model's state may not have rows: give such arrays with the batch, and return them as metrics"
    )


def _joined(join: Join, before: jax.Array, leaf: jax.Array, placement: Placement) -> jax.Array:
    """Joins a leaf as it is declared. A sum is joined even where the leaf is typed as invariant: every rank has added to it."""
    axes = placement.axes.synced
    if not axes:
        return leaf
    if join == "sum":
        return before + sum_over(leaf - before, axes)
    if placement.plan.check_vma and not varying_axes(leaf) & set(axes):
        return leaf
    if join == "mean":
        return _mean(leaf, axes, placement)
    extreme = {"max": max_over, "min": min_over}.get(join)
    return first_ranks(leaf, axes) if extreme is None else extreme(leaf, axes)


def _mean(leaf: jax.Array, axes: tuple[str, ...], placement: Placement) -> jax.Array:
    return all_reduce_leaves([leaf], axes, flat=False)[0] / placement.ranks(axes)


def first_ranks(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value of x on the first rank of `axes`, bit for bit, typed as the same everywhere. Communicates: one all-reduce."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(first_ranks(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
        return first_ranks(x.astype(jnp.int8), axes).astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.floating):  # a sum of floats may flush denormals and loses the sign of a zero
        bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        wire = jnp.promote_types(bits, jnp.uint32)  # NCCL cannot add 16-bit integers
        sent = jax.lax.bitcast_convert_type(x, bits).astype(wire)
        return jax.lax.bitcast_convert_type(first_ranks(sent, axes).astype(bits), x.dtype)
    return sum_over(jnp.where(axis_index(axes) == 0, x, jnp.zeros_like(x)), axes)


@dataclass(frozen=True)
class JoinedBuffers(StepTransform):
    """Joins the model's own state over ranks after an update, and then runs its modules' `after_update` hooks."""

    placement: Placement
    model: Functional

    def around_update(self, run: Update) -> Update:
        """Joins buffers after the update."""

        def joined(made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
            after, metrics = run(made, before)
            state = made.state
            if jax.tree.leaves(state):
                state = sync_buffers(before.variables.state, state, self.placement, self.model)
            variables = replace(after.variables, state=self.model.after_update(state))
            return replace(after, variables=variables), metrics

        return joined


# --------------------------------------------------------------------------------------------------
# Clipping gradients outside a step, as a program of its own.
# --------------------------------------------------------------------------------------------------


class Clip:
    """`clip(grads, max_norm) -> (clipped, norm)` of gradients in the model's own tree, compiled once."""

    def __init__(self, rest: Rest, mesh: Mesh, norm_type: float):
        self._compiled = jax.jit(lambda grads, max_norm: rest.clip(grads, max_norm, norm_type, mesh))

    def __call__(self, grads: PyTree, max_norm: float) -> tuple[PyTree, jax.Array]:
        """`grads` clipped by their global norm; under NO_SYNC each rank's by its own norm."""
        return bound_run_ahead(self._compiled(grads, max_norm))
