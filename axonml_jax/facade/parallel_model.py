"""A model on a mesh under a plan: what `parallelize` returns and every facade is."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Self

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from axonml_jax._types import LossFn, PyTree
from axonml_jax.facade.saved_model import Handed, SavedModel
from axonml_jax.facade.stages import stage_assigner
from axonml_jax.facade.state_dict import fitted, load_state_dict, state_dict
from axonml_jax.facade.trainer import Trainer
from axonml_jax.mesh.as_mesh import as_mesh
from axonml_jax.mesh.group import ProcessGroup
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.model.functional import Trainable, Variables
from axonml_jax.model.functionalize import functionalize
from axonml_jax.model.named import named_variables
from axonml_jax.parallel.bind import bind_plan
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.tensor.adapter_specs import layer_specs
from axonml_jax.parallel.units.replayed import check_units
from axonml_jax.sharding.check_batch import refuse_tracing
from axonml_jax.sharding.place import copies
from axonml_jax.training.callbacks import Callback
from axonml_jax.training.differentiate import Differentiate, SyncStacked, equalize, hooks_program
from axonml_jax.training.forward import Forward
from axonml_jax.training.optimizer.clip import Clip
from axonml_jax.training.rest.choose import rest_of
from axonml_jax.training.same_everywhere import check_first_gradients, check_first_update, checksums, still_own
from axonml_jax.training.state.first_state import first_variables
from axonml_jax.training.typed_errors import folding


class ParallelModel(SavedModel):
    """A Flax model whose parameters live on a mesh as a plan says.

    Its variables are the only state it holds; trainers read and replace them.

    Attributes:
      plan: the plan.
      mesh: the `jax.sharding.Mesh`.
      variables: the model's arrays as they rest (see `Variables`); a trainer's next step gives these very arrays up,
        and one that is held over it can be neither read nor stepped from; `jax.tree.map(jnp.copy, ...)` keeps one.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        plan: Plan | None = None,
        *,
        params: PyTree | None = None,
        trainable: Trainable = None,
        seed: int = 0,
    ):
        super().__init__()
        if not isinstance(plan := plan or Plan(), Plan):
            raise TypeError(f"plan={plan!r} must be an ax.Plan, or None for data parallelism")
        if not isinstance(seed, Integral):
            raise TypeError(f"seed={seed!r} must be a whole number")
        if mesh is None and plan.mesh is not None:
            mesh = make_mesh(devices=None, **plan.mesh.degrees)
        mesh = as_mesh(mesh, own=plan.axes)
        if not isinstance(mesh, Mesh):
            raise TypeError(f"a model lives on devices, but {mesh} has none: give a jax.sharding.Mesh")
        self.mesh = mesh
        view, whole = functionalize(model, params, trainable)
        split, stacks = layer_specs(view, self.mesh.shape), view.stacked_dims
        stages = None if plan.pipe is None else stage_assigner(model, view, plan.pipe)
        self._functional, self._placement = view, bind_plan(plan.for_model(view), whole, mesh, split, stages, stacks)
        self._rest = rest_of(self._placement)
        check_units(self._placement, self._functional)
        self._functional.state_joins()  # refused before anything is allocated
        self._placement.check_model(self._functional)
        self.variables: Variables = first_variables(self._functional, whole, self._rest, self.mesh)
        self._hollow = self.variables if self._functional.hollow else None
        # Of a model without values there is nothing to compare, and what is loaded into it is compared then.
        self._given = {} if self._functional.hollow else checksums(named_variables(view, whole))
        self._remembered(model, f"the {type(model).__name__} that was given to the model")
        self._key = jax.random.key(int(seed))
        self._mode: bool | None = None
        self._syncing, self._lent = True, False
        self._compared: int | None = None  # the loads when processes compared what a loop of gradients begins with
        self._updated: bool | None = False  # whether that loop's first update is still to be compared; None: to be made
        self._newest_trainer: Callable[[], Trainer | None] = lambda: None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mesh={dict(self.mesh.shape)}, plan={self.plan})"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_(f"ax.{type(self).__name__}", self.mesh.shape)

    @property
    def plan(self) -> Plan:
        """The plan, with every default decided."""
        return self._placement.plan

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks among which the batch is split."""
        return ProcessGroup(self.mesh, axes=self._placement.batch_axes)

    # Reading and writing the model

    @property
    def module(self) -> Any:
        """The Flax module with the current, whole parameters (a new one; changing it changes nothing here).

        Where ranks keep parameters of their own, the first rank's.
        """
        self._lent = True
        return self._remembered(self._functional.module(self.whole()), "a module that model.module returned")

    def _remembered(self, module: Any, what: str) -> Any:
        """The module; if it is changed before the model is used again, that is said (see `Handed`)."""
        if isinstance(module, nnx.Module):
            self._handed.append(Handed(module, what))
        return module

    def parameters(self) -> PyTree:
        """The trained parameters as a nest of dicts, sharded as they rest; under NO_SYNC stacked by model along dim 0."""
        self._lent = True
        return self._outside(self.values.params)

    def set_parameters(self, params: PyTree) -> None:
        """Replace the trained parameters, for instance by `optax.apply_updates(model.parameters(), updates)`.

        Raises:
          ValueError: listing every missing, unexpected and mismatched parameter, before anything is changed.
        """
        now = self._outside(self.variables.params)
        fitting = fitted(params, now, "set_parameters takes a tree like parameters() returns")
        self._updated = True if self._updated is None else self._updated
        self._lent = True  # an array that is where it belongs already stays the caller's own
        self.variables = replace(self.variables, params=self._rest.inside(fitting, self.mesh))

    def state_dict(self) -> dict[str, Any]:
        """All variables, whole, as NumPy arrays by path name (every process must call it)."""
        return state_dict(self._functional, self.whole())

    def load_state_dict(self, values: dict[str, Any], *, strict: bool = True) -> tuple[list[str], list[str]]:
        """Replace variables by path name, on every rank alike.

        Args:
          values: whole arrays by path name, as `state_dict` returns them.
          strict: refuse missing and unexpected names.

        Returns:
          (missing, unexpected) names; both empty with `strict`.

        Raises:
          ValueError: listing every missing, unexpected and mismatched name, before anything is changed.
        """
        now = self._rest.whole(self.variables, self.mesh)
        whole, missing, unexpected = load_state_dict(self._functional, now, values, strict=strict)
        self.variables, self.loads = self._rest.place(whole, self.mesh), self.loads + 1
        taken = {name: value for name, value in values.items() if name not in unexpected}
        self._given = {**self._given, **checksums(taken)}
        return missing, unexpected

    def sync_parameters(self) -> None:
        """Give every rank the first rank's parameters and buffers, bit for bit.

        A trainer's first step refuses processes that began with other values unless this was called before. Of parameters that
        are split over processes each has had its own part from the beginning: load whole values in their place
        (`load_state_dict`).
        """
        self.variables = equalize(self.variables, self._placement, self.mesh)
        self._given = still_own(self._given, named_variables(self._functional, self.variables)) if self._given else {}

    def after_update(self) -> None:
        """Run every module's own `after_update` once, where you update parameters yourself; a trainer's step does it."""
        program = self._program(("hooks",), lambda: hooks_program(self._functional, self._placement, self.mesh))
        self.variables = replace(self.variables, state=program(self.variables.state))

    def give_up(self) -> Variables:
        """The variables, to be donated: copies where the user may hold the arrays themselves."""
        if self._lent:
            self.variables = copies(self.values)
            self._lent = False
        return self.values

    def whole(self) -> Variables:
        """The variables without padding; where ranks keep their own, the first rank's."""
        return self._rest.whole(self.values, self.mesh)

    # Mode

    @property
    def is_training(self) -> bool:
        """False after `eval()`, True otherwise."""
        return self._mode is not False

    def train(self, mode: bool = True) -> "ParallelModel":
        """Switch the model to training, as its own `train()` does; returns itself."""
        self._mode = mode
        return self

    def eval(self) -> "ParallelModel":
        """Switch the model to evaluation; returns itself."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs on the global batch: dim 0 of every array argument is split over the batch axes.

        In training mode dropout is active and running averages are updated, as in PyTorch.

        Raises:
          ValueError: when the batch does not divide.
        """
        self._refuse_tracing("the model")
        given = self._functional, self._placement, self.mesh, self._mode, self._accept
        program = self._program(("forward",), lambda: Forward(*given))
        with folding:
            out, state = program(self.values, self._next_key(), args, kwargs)
        self.variables = replace(self.variables, state=state)
        return out

    def value_and_grad(self, loss_fn: LossFn) -> Callable[[PyTree], Any]:
        """A function of the global batch that returns the loss and synchronized gradients.

        Args:
          loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`; the loss a mean over the examples it is given or
            an `ax.WeightedMean`.

        Returns:
          `f(batch) -> (loss, grads)`, or `((loss, metrics), grads)` when `loss_fn` returns metrics. Within `no_sync()`
          every value is each rank's own, stacked by rank along dim 0. The first call, and the first after a load, refuses
          processes that do not begin alike, as a trainer's first step does, and the next one after `set_parameters` those that
          this left with unlike parameters.
        """

        def f(batch: PyTree) -> Any:
            self._refuse_tracing("value_and_grad")
            sync = self._syncing
            options: dict[str, Any] = {"training": self._mode, "sync": sync, "accept": self._accept}
            build = lambda: Differentiate(self._functional, self._placement, self.mesh, loss_fn, **options)
            # By identity: a callable need not be hashable, and the program keeps it alive.
            program = self._program(("grad", id(loss_fn), sync), build)
            variables, key = self.values, self._next_key()
            with folding:
                if jax.process_count() > 1:
                    self._compare(program, variables, key, batch)
                loss, metrics, grads, state = program(variables, key, batch)
            self.variables = replace(self.variables, state=state)
            return ((loss, metrics) if metrics else loss), self._outside(grads) if sync else grads

        return f

    def _compare(self, program: Differentiate, variables: Variables, key: jax.Array, batch: PyTree) -> None:
        """Do all processes begin alike, before a loop's first gradients and the first after a load? After its first update?"""
        if self._compared != self.loads:
            check_first_gradients(program, variables, key, batch, self._given)
            self._compared, self._updated = self.loads, None
        elif self._updated:
            check_first_update(variables)
            self._updated = False

    def _refuse_tracing(self, call: str) -> None:
        if jax.tree.leaves(self.variables.state):  # which the call would replace
            refuse_tracing(call)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context `value_and_grad` returns each rank's own gradients and communicates none of them."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def sync_gradients(self, grads: PyTree) -> PyTree:
        """The mean over ranks of gradients that `value_and_grad` returned within `no_sync()`.

        Raises:
          ValueError: listing every leaf that is no stacked gradient of this model.
        """
        return self._outside(self._program(("sync",), lambda: SyncStacked(self._placement, self.mesh))(grads))

    def clip_grad_norm(
        self, grads: PyTree, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> tuple[PyTree, jax.Array]:
        """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
          grads: what `value_and_grad` or `sync_gradients` returned.
          max_norm, norm_type: positive numbers; the type may be `math.inf`.
          error_if_nonfinite: raise when the norm is not finite.

        Returns:
          (clipped gradients, norm before clipping).

        Raises:
          ValueError: for numbers that are not positive, or a norm that is not finite.
        """
        if not (isinstance(max_norm, Real) and max_norm > 0 and isinstance(norm_type, Real) and norm_type > 0):
            raise ValueError(f"{max_norm=} and {norm_type=} must be positive numbers")
        program = self._program(("clip", norm_type), lambda: Clip(self._rest, self.mesh, float(norm_type)))
        clipped, norm = program(grads, max_norm)
        if error_if_nonfinite and not bool(jax.numpy.all(jax.numpy.isfinite(norm))):
            raise ValueError(f"the {norm_type}-norm of the gradients is {norm}: they are left as they were")
        return clipped if self.plan.pipe else self._outside(clipped), norm

    def _outside(self, params: PyTree) -> PyTree:
        """Parameters or gradients as users see them: without padding."""
        return self._rest.outside(params, self.mesh)

    def trainer(
        self,
        tx: optax.GradientTransformation,
        loss_fn: LossFn,
        *,
        accumulate: int | None = None,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        max_nonfinite: int | None = None,
        callbacks: Sequence[Callback] = (),
        ema: float | None = None,
        layer_norms: bool = False,
    ) -> Trainer[Self]:
        """A fused, donated training step around this model.

        Args:
          tx: the optimizer.
          loss_fn: see `value_and_grad`.
          accumulate: microbatches per update and rank; None takes the plan's.
          max_grad_norm, norm_type: clip gradients to this global norm; its type is 1, 2 or `math.inf`.
          max_nonfinite: skip updates whose loss or gradients are not finite; after that many in a row, all. None: never.
          callbacks: told of steps, validations, checkpoints and the end (see `ax.Callback`).
          layer_norms: measure the norms of gradients and parameters layer by layer too.
          ema: keep an exponential moving average of the parameters with this decay (see `Trainer.averaged`).

        Raises:
          TypeError, ValueError: when the optimizer cannot run under the plan.
        """
        options = {"accumulate": accumulate, "max_grad_norm": max_grad_norm, "norm_type": norm_type}
        options |= {"layer_norms": layer_norms}
        trainer = Trainer(self, tx, loss_fn, max_nonfinite=max_nonfinite, callbacks=callbacks, ema=ema, **options)
        self._newest_trainer = weakref.ref(trainer)
        return trainer
