"""One training step: gather -> differentiate -> sync -> update, in one compiled program with donated state."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from axonml_jax.base import LossFn, PyTree, host_arrays, named_leaves, some_of
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.compat.order import handed_back, is_traced_around, no_mesh_around
from axonml_jax.layers.context import NO_ELEMENTS
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.mesh.simulate import bound_run_ahead
from axonml_jax.model.view import Functional, Mode, Variables
from axonml_jax.parallel.placement import Placement, in_round, reading, reading_users
from axonml_jax.sharding.batch import check_batch, shapes_of
from axonml_jax.sharding.layout import Leaf, is_deleted, is_layout, shardings
from axonml_jax.training.compile import Compiled, compiler_options, explain_types, folding
from axonml_jax.training.compose import Gradients, Metrics, Reading, composed, rest_of
from axonml_jax.training.gradients import gradients
from axonml_jax.training.objective import Objective
from axonml_jax.training.run_state import RestingState, state_leaves, state_of_leaves, state_specs
from axonml_jax.training.state import TrainState
from axonml_jax.training.transforms import StepOptions, kept_of, transforms_of

if TYPE_CHECKING:
    from axonml_jax.meaning.whole_batch import WholeBatch


class TrainStep:
    """`step(state, batch) -> (state, metrics)`, compiled once per batch shape; the given state is donated.

    On simulated devices a call waits for the step before it (docs/adr/0003).

    Attributes:
      placement: the plan on its mesh; where replicas train by themselves for rounds of steps, that of a step within one.
      mesh: the mesh.
      transforms: what the plan, the trainer and the model ask for around gradients and update.
      at_rest: how a state rests: its variables, the optimizer's state, what transforms keep in `TrainState.extras`.
    """

    def __init__(
        self,
        model: Functional,
        placement: Placement,
        mesh: Mesh,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        *,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        max_nonfinite: int | None = None,
        training: bool | None = None,
        accept: Callable[[Any], None] | None = None,
        layer_norms: bool = False,
    ):
        options = StepOptions(max_grad_norm, norm_type, max_nonfinite, layer_norms)
        placement = in_round(placement)
        self.rest = rest_of(placement)
        self.model, self.placement, self.mesh = model, placement, mesh
        self.transforms = transforms_of(self.rest, options, model)
        self.optimizer = self.rest.optimizer(tx)
        self.optimizer.check()
        self.at_rest = RestingState(self.rest, self.optimizer, kept_of(self.transforms))
        self.objective = objective_of(model, loss_fn, placement, training, trains=True)
        self._returned: tuple[int, ...] = ()  # parts of the last state, which are not looked through again
        on_cpu = compiler_options(placement, mesh)
        options = {"donate_argnums": 0, "compiler_options": on_cpu, "reads": loss_fn}
        if placement.plan.memory is None:
            self._compiled: Any = Compiled(self._mapped, mesh, accept, **options)
        else:
            from axonml_jax.training.budget import Budgeted

            self._compiled = Budgeted(self, mesh, accept, **options)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Make one update. It may be called inside of `jax.jit` and `jax.lax.scan`, whose program it then is a part of.

        Args:
          state: the run's state; its buffers are given up.
          batch: the global batch, [B, ...] on every leaf that is not a scalar; B divides by shards x microbatches.

        Returns:
          The new state, and metrics: `loss`, `grad_norm` (before clipping), and the loss function's own.

        Raises:
          ValueError: when the batch does not divide, or when the state, or a part of it, was given to an earlier step.
        """
        if is_traced_around():
            self.check(shapes_of(batch))
            with folding, explain_types(self.placement.plan.check_vma):
                return self._compiled.inlined(state, self.placement.batch_layout.place(batch, self.mesh))
        if is_deleted(state.step) or _parts(state) != self._returned:
            _refuse_given_up(state)
        self.check(batch := host_arrays(batch))
        with no_mesh_around(), folding, explain_types(self.placement.plan.check_vma), _telling_lost(state):
            bound_run_ahead(state.step)
            state, metrics = self._compiled(state, self.placement.batch_layout.place(batch, self.mesh))
            metrics = handed_back(metrics)
        self._returned = _parts(state)
        return state, metrics

    @property
    def recompute(self) -> Any:
        """The recomputation of units: what the plan says, or what was chosen for the last step within its `memory`."""
        plan = self.placement.plan
        return plan.remat if plan.memory is None else self._compiled.found

    def check(self, batch: PyTree) -> None:
        """Refuse a batch, of arrays or shapes, that a step cannot take (see `check_batch`)."""
        check_batch(self.placement.batch_layout, batch, self.placement.plan.microbatches)

    def trace(self, state: TrainState, batch: PyTree):
        """The step traced on arrays or shapes (`.jaxpr`, `.lower()`): what the ledger reads."""
        with no_mesh_around(), folding:
            self.check(batch)
            return self._compiled.trace(state, self.placement.batch_layout.placed(batch, self.mesh))

    def as_written(self, state: TrainState, batch: PyTree):
        """The trace of the step without the passes for XLA:CPU; after a step on arrays like these, that of this step."""
        with no_mesh_around(), folding:
            return self._compiled.as_written(state, self.placement.batch_layout.placed(batch, self.mesh))

    def lower(self, state: TrainState, batch: PyTree):
        """The step lowered on arrays or shapes (`.as_text()`, `.compile()`)."""
        with no_mesh_around(), folding:
            self.check(batch)
            return self._compiled.lower(state, self.placement.batch_layout.placed(batch, self.mesh))

    @no_mesh_around()
    def state_leaves(self, state: TrainState) -> dict[str, Leaf]:
        """All arrays of a state by names that are the same under every plan: what checkpoints hold."""
        return state_leaves(self.model, state, self.at_rest)

    @no_mesh_around()
    def state_of_leaves(self, like: TrainState, arrays: Mapping[str, Any]) -> TrainState:
        """Rebuilds a state like `like` from arrays by name; the inverse of `state_leaves`."""
        return state_of_leaves(self.model, like, arrays, self.at_rest)

    def minimum_traffic(self) -> Fraction:
        """Bytes per rank and update that the published algorithm sends for the plan's gradients and parameters on a ring."""
        from axonml_jax.cost.published import minimum_traffic

        return minimum_traffic(self.placement.agreed or self.placement)

    def state_specs(self, state: TrainState) -> TrainState:
        """The PartitionSpec of every array of a state between steps."""
        return state_specs(state, self.at_rest)

    def _mapped(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        batch = self.placement.batch_layout.opened(batch)
        specs = state_specs(state, self.at_rest, between=False)
        new, metrics = jax.shard_map(
            composed(self._step, "around_step", self.transforms),
            mesh=self.mesh,
            in_specs=(specs, self.placement.batch_layout.specs(batch)),
            out_specs=(specs, self.rest.means),
            axis_names=self.placement.axes.manual,
            check_vma=self.placement.plan.check_vma,
        )(state, batch)
        if self.placement.automatic:  # the partitioner is told what it would be free to choose
            new = jax.lax.with_sharding_constraint(new, shardings(self.state_specs(new), self.mesh))
        return new, metrics

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step inside all `around_step` transforms, on one rank: gradients, then an update."""
        own = self._own(state, inwards=True)
        made = composed(self._gradients, "around_gradients", self.transforms)(Reading(own, batch))
        after, more = composed(self._update, "around_update", self.transforms)(made, own)
        metrics = {"loss": made.loss, "grad_norm": made.norm, **more}
        if taken := sorted(metrics.keys() & made.metrics.keys()):
            raise ValueError(
                f"loss_fn returned metrics named {taken}, which a step reports itself: give them other names"
            )
        metrics = {**made.metrics, **metrics}
        return self._own(replace(after, step=state.step + 1), inwards=False), self.rest.stored(metrics)

    def _gradients(self, reading: Reading) -> Gradients:
        state, batch, options = reading
        return gradients(self.objective, self.placement, state.variables, step_key(state), batch, **options)

    def _update(self, made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
        new = self.optimizer.update(made.grads, before.opt_state, before.params, made.loss)
        variables = Variables(new[0], before.variables.frozen, made.state)
        return replace(before, variables=variables, opt_state=new[1]), {}

    def _own(self, state: TrainState, *, inwards: bool) -> TrainState:
        """A rank's part of a resting state, inside `shard_map`; with `inwards=False` the inverse."""
        rest, kept = self.rest, self.at_rest.kept
        extras = {
            name: kept[name].enter(value) if inwards else kept[name].leave(value)
            for name, value in state.extras.items()
        }
        opt_state = (rest.local if inwards else rest.stored)(state.opt_state)
        variables = (rest.enter if inwards else rest.leave)(state.variables)
        return replace(state, variables=variables, opt_state=opt_state, extras=extras)


def forward_mode(placement: Placement, training: bool | None) -> Mode:
    """The mode in which the model runs under a plan."""
    plan = placement.plan
    joined = placement.axes.synced if plan.batch_stats == "global" else ()
    return Mode(training=training, batch_norm_axes=joined, sum_over_ranks=sum_over, precision=plan.precision)


def objective_of(
    model: Functional,
    loss_fn: LossFn,
    placement: Placement,
    training: bool | None,
    *,
    sync: bool = True,
    trains: bool = False,
    gradients: bool = True,
) -> Objective:
    """Builds the objective of a loss function on a model under a plan; without `sync`, that of every rank's own rows.

    With `trains` it is refused where nothing that is trained reaches it, with `gradients` where layers give it wrong ones, or
    trained parameters have none.
    """
    if gradients:
        _refuse_whole_numbers(model.shapes.params)
    mode, whole = forward_mode(placement, training), whole_batch(placement, loss_fn, sync)
    whole = whole and replace(whole, trains=trains)
    if placement.plan.draws == "rows":
        refuse_draws_by_rows(placement, whole, model, mode)
    read = partial(reading, model=model, placement=placement, precision=mode.precision, trains=gradients)
    placed = partial(reading_users, model=model, placement=placement)
    return Objective(model, loss_fn, mode, placement.axes.positions, placement.inside, read, whole, trains, placed)


def _refuse_whole_numbers(params: PyTree) -> None:
    if {leaf.dtype.kind for leaf in jax.tree.leaves(params)} <= {"f", "c"}:
        return
    if wrong := {name: x.dtype for name, x in named_leaves(params).items() if not jnp.issubdtype(x.dtype, jnp.inexact)}:
        named = ", ".join(f"{name}: {dtype}" for name, dtype in wrong.items())
        raise TypeError(
            f"parameters of dtypes without gradients cannot be trained: {named}. Keep them as another kind of "
            "variable (nnx.Variable, a collection of a Linen module besides params), or leave them out when "
            f"the model is wrapped: trainable=lambda name: name not in {list(wrong)}"
        )


def whole_batch(placement: Placement, loss_fn: LossFn, sync: bool = True) -> "WholeBatch | None":
    """Builds the evaluator of a loss over the global batch (or a replica's); None if a rank already has all rows.

    Without `sync` every rank counts as a replica. None too where several axes split positions, which it does not support.
    """
    axes = placement.axes
    apart, synced = (axes.independent, axes.synced) if sync else (axes.batch, ())
    if len(axes.positions) > 1 or placement.ranks(synced) * placement.plan.microbatches == 1:
        return None
    from axonml_jax.meaning.places import Group
    from axonml_jax.meaning.whole_batch import MixingRows, WholeBatch

    split = {axis for axis, size in placement.degrees.items() if size > 1}
    in_layers = not split.isdisjoint(set(LAYER_AXES).difference(placement.automatic))
    together = lambda names: tuple(axis for axis in names if axis not in apart)
    layout, rows = placement.batch_layout, together(placement.batch_layout.rows)
    trained = jax.tree.leaves(placement.params, is_leaf=is_layout)
    most = max(2**24, sum(layout.size * layout.dtype.itemsize for layout in trained))
    most, sweeps = (loss_fn.most_bytes, loss_fn.two_sweeps) if isinstance(loss_fn, MixingRows) else (most, False)
    of_leaf = lambda path, shape: {**({0: rows} if shape else {}), **layout.split(path, shape)}
    dims = lambda path, shape: {dim: together(names) for dim, names in of_leaf(path, shape).items()}
    group = Group(rows, placement.ranks(rows))
    return WholeBatch(group, dims, most, sweeps, in_layers, *_positions(placement), apart=apart)


def refuse_draws_by_rows(placement: Placement, whole: "WholeBatch | None", model: Functional, mode: Mode) -> None:
    """Refuse `draws="rows"` where a loss is not known to be of the whole batch's rows, or attention draws single elements.

    Raises:
      ValueError: saying why.
    """
    if placement.axes.positions:
        why = (
            f"positions are split over {', '.join(placement.axes.positions)}, where rows are not all that is drawn for"
        )
    elif placement.axes.independent or (whole is None and placement.ranks(placement.axes.batch) > 1):
        why = "ranks train by themselves, and a loss is of a rank's rows"
    elif placement.ranks(placement.batch_layout.rows) * placement.plan.microbatches > 1 and (
        drawing := list(_drawing_elements(model.abstract_module, mode.training))
    ):
        raise ValueError(f"{', '.join(drawing)}: {NO_ELEMENTS}")
    else:
        return
    raise ValueError(f'draws="rows": {why}: take draws="shards"')


def _drawing_elements(module: nnx.Module | None, training: bool | None) -> Iterator[str]:
    """The paths of attention that draws its dropout element by element."""
    from axonml_jax.layers.attention import TensorParallelAttention
    from axonml_jax.layers.latent import LatentAttention

    for path, each in () if module is None else nnx.iter_graph(module):
        if isinstance(each, (TensorParallelAttention, LatentAttention)) and each.kernel == "blocks":
            off = each.dropout.deterministic if training is None else not training
            if each.dropout.rate and not off:
                yield "/".join(map(str, path))


def _positions(placement: Placement) -> tuple:
    """The group of ranks that splits positions, and the context in which code sees whole sequences; empty where none does."""
    if not (along := placement.axes.positions):
        return ()
    from axonml_jax.meaning.places import Group

    order = dict(placement.batch_layout.orders).get(along[0], "contiguous")
    group = Group(along, placement.ranks(along), order, positions=True)
    return group, partial(placement.inside, whole=along)


def step_key(state: TrainState) -> jax.Array:
    """The random key of the step that starts from `state`."""
    return jax.random.fold_in(state.key, state.step)


def _parts(state: TrainState) -> tuple[int, ...]:
    """Identities of a state's parts; a trainer puts the model's own variables into its state for every step."""
    return id(state.variables), id(state.opt_state)


def _refuse_given_up(state: TrainState) -> None:
    """Refuse a donated state before XLA does: jax 0.10 ends the process where it is donated again on several CPU devices."""
    leaves = named_leaves(state)
    if gone := [name for name, leaf in leaves.items() if is_deleted(leaf)]:
        what = "this state was" if len(gone) == len(leaves) else f"these arrays of the state were ({some_of(gone)})"
        raise ValueError(
            f"{what} given to an earlier step, which reused their memory: continue from the state that step returned (for a "
            "trainer: its current trainer.state and trainer.model.variables), or keep a copy, jax.tree.map(jnp.copy, state). "
            f"If that step failed, {_ANEW}"
        )


_ANEW = "read a checkpoint (ax.restore(path, trainer)), or make the model and the trainer anew"


@contextmanager
def _telling_lost(state: TrainState) -> Iterator[None]:
    """Context of a step that says so where it fails because an earlier one, which made its state, has failed while it ran."""
    try:
        yield
    except RuntimeError as error:
        if not is_deleted(state.step) and _has_failed(state.step):
            error.add_note(f"An earlier step failed while it ran, and the state that it was to make is lost: {_ANEW}.")
        raise


def _has_failed(x: jax.Array) -> bool:
    try:
        x.block_until_ready()
    except RuntimeError:
        return True
    return False
