"""One training step: gather -> differentiate -> sync -> update, in one compiled program with donated state."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from numbers import Real
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from axonml_jax.base import LossFn, PyTree, named_leaves
from axonml_jax.collectives.primitives import sum_over
from axonml_jax.cost.published import minimum_traffic
from axonml_jax.meaning.places import Group
from axonml_jax.meaning.whole_batch import MixingRows, WholeBatch
from axonml_jax.mesh.axes import LAYER_AXES
from axonml_jax.mesh.simulate import bound_run_ahead
from axonml_jax.model.view import Functional, Mode, Variables
from axonml_jax.parallel.placement import Placement, in_round
from axonml_jax.sharding.batch import check_batch
from axonml_jax.sharding.layout import Leaf, is_deleted, is_layout, shardings, to_host_memory
from axonml_jax.training.between_steps import after_update, to_read
from axonml_jax.training.compile import Compiled, Objective, compiler_options, explain_typed_scan, folding
from axonml_jax.training.compose import Gradients, Metrics, Reading, composed
from axonml_jax.training.gradients import gradients
from axonml_jax.training.nonfinite import check_limit, skip_nonfinite
from axonml_jax.training.on_shards import OnShards
from axonml_jax.training.rounds import end_of_round, in_place_of_outer
from axonml_jax.training.run_state import kept_of, state_leaves, state_of_leaves, state_specs
from axonml_jax.training.staged import rest_of
from axonml_jax.training.state import TrainState
from axonml_jax.training.streamed import streamed
from axonml_jax.training.transforms import StepOptions, transforms_of


class TrainStep:
    """`step(state, batch) -> (state, metrics)`, compiled once per batch shape; the given state is donated.

    On simulated devices a call waits for the step before it (docs/adr/0003).

    Attributes:
      placement: the plan on its mesh; where replicas train by themselves for rounds of steps, that of a step within one.
      mesh: the mesh.
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
        if max_grad_norm is not None and not (isinstance(max_grad_norm, Real) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm={max_grad_norm!r} must be a positive number; None does not clip")
        if not (isinstance(norm_type, Real) and norm_type > 0):
            raise ValueError(f"norm_type={norm_type!r} must be a positive number: 1, 2 or math.inf")
        if not isinstance(layer_norms, bool):
            raise ValueError(f"layer_norms={layer_norms!r} must be True or False")
        placement = in_round(placement)
        self.rest = rest_of(placement)
        check_limit(max_nonfinite)
        self.max_nonfinite, self.kept = max_nonfinite, kept_of(self.rest, max_nonfinite)
        self.model, self.placement, self.mesh, self.tx = model, placement, mesh, tx
        options = StepOptions(max_grad_norm, float(norm_type), max_nonfinite, layer_norms)
        self.transforms = transforms_of(self.rest, options, model)
        self._on_shards = OnShards.of(tx, placement)
        self.objective = objective_of(model, loss_fn, placement, training)
        self._returned: tuple[int, ...] = ()  # parts of the last state, which are not looked through again
        options = compiler_options(placement, mesh)
        self._compiled = Compiled(self._whole, mesh, accept, donate_argnums=0, compiler_options=options)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Make one update.

        Args:
          state: the run's state; its buffers are given up.
          batch: the global batch, [B, ...] on every leaf that is not a scalar; B divides by shards x microbatches.

        Returns:
          The new state, and metrics: `loss`, `grad_norm` (before clipping), and the loss function's own.

        Raises:
          ValueError: when the batch does not divide, or when the state, or a part of it, was given to an earlier step.
        """
        if is_deleted(state.step) or _parts(state) != self._returned:
            _refuse_given_up(state)
        self.check(batch)
        bound_run_ahead(state.step)
        with folding, explain_typed_scan(self.placement.plan.check_vma):
            state, metrics = self._compiled(state, self.placement.batch_layout.place(batch, self.mesh))
        self._returned = _parts(state)
        return state, metrics

    def check(self, batch: PyTree) -> None:
        """Refuse a batch, of arrays or shapes, that a step cannot take (see `check_batch`)."""
        check_batch(self.placement.batch_layout, batch, self.placement.plan.microbatches)

    def trace(self, state: TrainState, batch: PyTree):
        """The step traced on arrays or shapes (`.jaxpr`, `.lower()`): what the ledger reads."""
        self.check(batch)
        with folding:
            return self._compiled.trace(state, self.placement.batch_layout.marked(batch))

    def lower(self, state: TrainState, batch: PyTree):
        """The step lowered on arrays or shapes (`.as_text()`, `.compile()`)."""
        self.check(batch)
        with folding:
            return self._compiled.lower(state, self.placement.batch_layout.marked(batch))

    def state_leaves(self, state: TrainState) -> dict[str, Leaf]:
        """Everything in a state by a name that is the same under every plan; what checkpoints hold."""
        return state_leaves(self.model, state, self.rest, self.tx, self.kept)

    def state_of_leaves(self, like: TrainState, arrays: Mapping[str, Any]) -> TrainState:
        """The inverse of `state_leaves`, in the structure of a state."""
        return state_of_leaves(self.model, like, arrays, self.rest, self.tx, self.kept)

    def minimum_traffic(self) -> Fraction:
        """Bytes per rank and update that theory allows for the plan's gradients and parameters on a ring."""
        return minimum_traffic(self.placement.agreed or self.placement)

    def state_specs(self, state: TrainState) -> TrainState:
        """The PartitionSpec of every array of a state between steps."""
        return state_specs(state, self.rest.between(), self.tx, self.kept)

    def _whole(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        batch = self.placement.batch_layout.opened(batch)
        specs = state_specs(state, self.rest, self.tx, self.kept)
        new, metrics = jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(specs, self.placement.batch_layout.specs(batch)),
            out_specs=(specs, self.rest.means),
            axis_names=self.placement.manual_axes,
            check_vma=self.placement.plan.check_vma,
        )(state, batch)
        if self.placement.left:  # the partitioner is told what it would be free to choose
            new = jax.lax.with_sharding_constraint(new, shardings(self.state_specs(new), self.mesh))
        return new, metrics

    def _local(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        new, metrics = self._updated(in_place_of_outer(state), batch)
        return end_of_round(self.placement, state, new), metrics

    def _updated(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        rest, offload, state = self.rest, self.placement.plan.offload, self._own(state, inwards=True)
        made = composed(self._gradients, "around_gradients", self.transforms)(Reading(state, batch))
        assert made.norm is not None
        update = composed(self._update, "around_update", self.transforms)

        def updated(grads: PyTree, params: PyTree, opt_state: PyTree):
            before = replace(state, variables=replace(state.variables, params=params), opt_state=opt_state)
            after, _ = update(made._replace(grads=grads), before)
            changed, kept = after.params, state.strategies
            if kept is not None:
                changed, kept = after_update(self.placement, changed, params, kept)
            old = (params, opt_state), state.variables.state, state.strategies, state.left_out
            new = (changed, after.opt_state), after.variables.state, kept, made.left_out
            chosen, *counts = skip_nonfinite(state, new, old, made.loss, made.norm, self.max_nonfinite)
            return *chosen[0], (*chosen[1:], *counts)

        held = to_host_memory(made.grads, offload.gradients), state.params, state.opt_state
        params, opt_state, others = streamed(updated, held, offload, made.norm, sliced=rest.updates_in_slices)
        buffers, strategies, left_out, scale, guard, counts = others
        metrics = {**made.metrics, "loss": made.loss, "grad_norm": made.norm, **counts}
        new = TrainState(state.step + 1, Variables(params, state.variables.frozen, buffers), opt_state, state.key)
        new = new.keeping(loss_scale=scale, guard=guard, strategies=strategies, left_out=left_out)
        return self._own(new, inwards=False), rest.kept(metrics)

    def _gradients(self, reading: Reading) -> Gradients:
        state, variables = reading.state, reading.state.variables
        if state.strategies is not None:
            variables = replace(variables, params=to_read(self.placement, state.params, state.strategies))
        scale = None if state.loss_scale is None else state.loss_scale.scale
        options = {"scale": scale, "left_out": state.left_out}
        return gradients(self.objective, self.placement, variables, step_key(state), reading.batch, **options)

    def _update(self, made: Gradients, before: TrainState) -> tuple[TrainState, Metrics]:
        new = self.rest.update(self.tx, self._on_shards, made.grads, before.opt_state, before.params, made.loss)
        variables = Variables(new[0], before.variables.frozen, made.state)
        return replace(before, variables=variables, opt_state=new[1]), {}

    def _own(self, state: TrainState, *, inwards: bool) -> TrainState:
        """A rank's own of a state as it rests, inside `shard_map`, or the inverse."""
        rest, kept = self.rest, self.kept
        extras = {
            name: kept[name].enter(value) if inwards else kept[name].leave(value)
            for name, value in state.extras.items()
        }
        opt_state = (rest.own if inwards else rest.kept)(state.opt_state)
        variables = (rest.enter if inwards else rest.leave)(state.variables)
        return replace(state, variables=variables, opt_state=opt_state, extras=extras)


def forward_mode(placement: Placement, training: bool | None) -> Mode:
    """How the model runs under a plan."""
    plan = placement.plan
    joined = placement.joined_axes if plan.batch_stats == "global" else ()
    return Mode(training=training, batch_norm_axes=joined, sum_over_ranks=sum_over, precision=plan.precision)


def objective_of(
    model: Functional, loss_fn: LossFn, placement: Placement, training: bool | None, *, sync: bool = True
) -> Objective:
    """A loss function on a model, as it runs under a plan; of every rank's own rows without `sync`."""
    mode, whole = forward_mode(placement, training), whole_batch(placement, loss_fn) if sync else None
    return Objective(model, loss_fn, mode, placement.position_axes, placement.inside, placement.rewritten, whole)


def whole_batch(placement: Placement, loss_fn: LossFn) -> WholeBatch | None:
    """What a loss means on the whole batch; None where ranks have no parts of it, or it is not known under the plan.

    It is not yet known in pipelines, along positions, in rounds of replicas, beside XLA's partitioner, and where layers split
    their own parameters.
    """
    axes = placement.batch_axes
    in_layers = any(placement.degrees.get(axis, 1) > 1 for axis in LAYER_AXES)
    unknown = placement.stages is not None or placement.own_axes or placement.left or in_layers
    if unknown or placement.position_axes or placement.ranks(axes) == 1:
        return None
    rows, trained = placement.batch_layout.rows, jax.tree.leaves(placement.params, is_leaf=is_layout)
    most = max(2**24, sum(layout.size * layout.dtype.itemsize for layout in trained))
    most = loss_fn.most_bytes if isinstance(loss_fn, MixingRows) else most
    return WholeBatch(Group(rows, placement.ranks(rows)), placement.batch_layout.split, most)


def step_key(state: TrainState) -> jax.Array:
    """The randomness of the step that starts from `state`."""
    return jax.random.fold_in(state.key, state.step)


def _parts(state: TrainState) -> tuple[int, ...]:
    """Which objects a state is made of; a trainer puts the model's own variables into its state for every step."""
    return id(state.variables), id(state.opt_state)


def _refuse_given_up(state: TrainState) -> None:
    """Before XLA gets it: jax 0.10 ends the process where a donated array is donated again on several CPU devices."""
    leaves = named_leaves(state)
    if gone := [name for name, leaf in leaves.items() if is_deleted(leaf)]:
        shown = ", ".join(gone[:5]) + f" and {len(gone) - 5} more" * (len(gone) > 5)
        what = "this state was" if len(gone) == len(leaves) else f"these arrays of the state were ({shown})"
        raise ValueError(
            f"{what} given to an earlier step, which reused their memory: go on from the state that step returned (of a "
            "trainer, trainer.state and trainer.model.variables as they are now), or keep a copy, jax.tree.map(jnp.copy, state)"
        )
