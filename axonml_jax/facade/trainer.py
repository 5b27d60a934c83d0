"""`ParallelModel` and `Trainer`: they keep the state, take the steps, save and load."""

import abc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.core import Tracer
from jax.sharding import Mesh

from axonml_jax.base import (
    LossFn,
    PyTree,
    folded,
    host_arrays,
    logger,
    named_leaves,
    naming_options,
    no_attribute,
    some_of,
    warn,
)
from axonml_jax.compat.jaxpr import opened
from axonml_jax.compat.order import (
    handed_back,
    no_mesh_around,
    refuses_placement,
    taken_in,
    under_users_mesh,
    users_mesh_again,
)
from axonml_jax.mesh.axes import PARTITIONED
from axonml_jax.mesh.shape import make_mesh
from axonml_jax.mesh.world import ProcessGroup, as_mesh
from axonml_jax.model.loss import UNREAD, of_batch, one_batch
from axonml_jax.model.view import (
    Functional,
    Mode,
    ModelAround,
    Trainable,
    Variables,
    functionalize,
    named_variables,
    plain_tree,
)
from axonml_jax.parallel.placement import Placement, bind_plan, check_model
from axonml_jax.parallel.plan import Plan, in_words
from axonml_jax.sharding.batch import refuse_tracing, shapes_of
from axonml_jax.sharding.layout import MODEL, Leaf, cast, copies, is_deleted, on_device, place, to_host
from axonml_jax.training.callbacks import Callback, TrainingEvent, checked, tell
from axonml_jax.training.compile import folding
from axonml_jax.training.compose import Metrics, rest_of
from axonml_jax.training.objective import shard_key
from axonml_jax.training.optimizer import averaging
from axonml_jax.training.rest import Rest
from axonml_jax.training.run_state import (
    averaged_variables,
    first_variables,
    init_state,
    variable_leaves,
    variables_of,
    with_new_average,
)
from axonml_jax.training.state import TrainState, hyperparameters, injected_rate, refuse_changed, with_rate

if TYPE_CHECKING:  # what models and trainers are made of is imported when one is made, so that the classes cost little
    from axonml_jax.training.evaluate import Differentiate, Evaluated
    from axonml_jax.training.single_device import Check
    from axonml_jax.training.step import TrainStep

# --------------------------------------------------------------------------------------------------
# What trainers and checkpoints know of a parallel model, and the programs that it keeps.
# --------------------------------------------------------------------------------------------------


class Handed:
    """Watches an NNX module that a user keeps beside a parallel model, which trains copies of its arrays.

    Args:
      module: the NNX module, given to the parallel model or made by it.
      what: the module in words, as the warning names it.
    """

    def __init__(self, module: nnx.Module, what: str):
        self._module, self._what = weakref.ref(module), what
        self._known = {name: id(leaf) for name, leaf in _param_leaves(module).items()}

    def tell(self, variables: Variables) -> None:
        """Warn of parameters that were changed in the module, where this process can see that the model's values differ."""
        if (module := self._module()) is None:
            return
        own = named_leaves(variables.params) | named_leaves(variables.frozen)
        new = {name: leaf for name, leaf in _param_leaves(module).items() if id(leaf) != self._known.get(name)}
        if names := [name for name, leaf in new.items() if name in own and _differ(leaf, own[name])]:
            logger.warning(
                "%s was changed, which does not change the parallel model: it trains its own copies of %s. Change those "
                "by model.set_parameters(...) or model.load_state_dict(...), or change the module before the model is made",
                *(self._what, some_of(names)),
            )


def _param_leaves(module: nnx.Module) -> dict[str, Any]:
    return named_leaves(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def _differ(new: Any, own: Any) -> bool:
    """Whether `new` differs from this process's first shard of `own`; False if it cannot be read here."""
    if not isinstance(new, jax.Array) or not new.is_fully_addressable or new.shape != own.shape:
        return False
    part = own.addressable_shards[0]
    return np.asarray(new[part.index]).astype(own.dtype).tobytes() != np.asarray(part.data).tobytes()


_KEPT = 16


class Newest:
    """Programs by the functions that they compute; of more than 16 the one that was used longest ago is dropped.

    A program keeps its function alive, so that no other gets its `id` meanwhile: a callable need not be hashable.

    Args:
      call: what users give the functions to, as the warning of the first dropped program names it.
    """

    def __init__(self, call: str):
        self._call, self._programs, self._told = call, {}, False

    def program(self, fun: Callable, about: tuple, build: Callable[[], Any]) -> Any:
        """The program of a function in the settings `about`, built if there is none."""
        key = (id(fun), *about)
        self._programs[key] = found = self._programs.pop(key, None) or build()
        if len(self._programs) > _KEPT:
            del self._programs[next(iter(self._programs))]
            if not self._told:
                logger.warning(
                    "%s has compiled more than %d programs for the functions that it was given, and drops the one that was "
                    "used longest ago: a lambda in a loop is a new function every time; define it once, outside of the loop",
                    *(self._call, _KEPT),
                )
            self._told = True
        return found

    def drop_changed(self, fun: Callable) -> list[str]:
        """Drop a function's programs that read values from outside which were changed since; returns their names."""
        names: list[str] = []
        for key in [each for each in self._programs if each[0] == id(fun)]:
            if changed := self._programs[key].changed():
                names += [name for name in changed if name not in names]
                del self._programs[key]
        return names


class SavedModel(abc.ABC):
    """The part of a parallel model that lends its arrays to steps and checkpoints, and takes new ones.

    Attributes:
      loads: how often its parameters were loaded; a trainer's moving average then begins anew.
    """

    _functional: Functional
    _placement: Placement
    _rest: Rest
    _key: jax.Array
    _mode: bool | None
    mesh: Mesh
    variables: Variables

    def __init__(self):
        self._programs: dict[Any, Any] = {}
        self._gradients = Newest("model.value_and_grad")
        self._calls = 0
        self.loads = 0
        self._given: dict[str, str] = {}
        self._unset: set[str] = set()  # names of variables that are placeholders
        self._handed: list[Handed] = []
        self._held_outside: weakref.WeakValueDictionary[int, nnx.Module] = weakref.WeakValueDictionary()

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of leading dims of each parameter, by path, that count stacked layers or experts; the rest is one layer's own.

        A mask of matrices asks it: `np.ndim(leaf) - model.stacked_dims.get(path, 0) > 1`.
        """
        return self._functional.stacked_dims

    @property
    def hollow(self) -> bool:
        """Whether the model was given as shapes, and some of its variables are placeholders of zeros still."""
        return bool(self._unset)

    @property
    def values(self) -> Variables:
        """The variables, for computing; warns if the user's own module was changed since.

        Raises:
          ValueError: when the model was given as shapes and some variables have no values yet.
        """
        if self.hollow:
            names, every = sorted(self._unset), named_variables(self._functional, self._functional.shapes)
            some = f" for {some_of(names)}" if len(names) < len(every) else ""
            raise ValueError(
                f"the model was given as shapes and has no values yet{some}: load_state_dict, load_pretrained, or restore a "
                "checkpoint first"
            )
        while self._handed:  # until the next use of the model
            self._handed.pop().tell(self.variables)
        return self.variables

    def read_outside(self, constants: Iterable[Any]) -> set[str]:
        """Paths of the model's parameters that are among a program's constants, as arrays of a module that the user holds."""
        arrays = {id(value) for value in constants}
        if not arrays:
            return set()
        every = [_param_leaves(module) for module in self._held_outside.values()]
        return {name for leaves in every for name, leaf in leaves.items() if id(leaf) in arrays}

    @abc.abstractmethod
    def give_up(self) -> Variables:
        """Return the variables for a program that donates their buffers."""

    @no_mesh_around()
    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """The variables as checkpoint leaves, named as in `state_dict` behind the prefix `model/`."""
        return variable_leaves(self._functional, self.variables, self._rest)

    @no_mesh_around()
    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the variables by arrays that rest as those of `checkpoint_leaves` do."""
        self.variables = variables_of(self._functional, self.variables, arrays, self._rest)
        self.loads, self._given, self._unset = self.loads + 1, {}, set()

    def _program(self, key: tuple, build: Callable[[], Any]) -> Any:
        key = (*key, self._mode)
        if key not in self._programs:
            self._programs[key] = build()
        return self._programs[key]

    @cached_property
    def _accept(self) -> Callable[[Any], None] | None:
        """A check that may refuse a compiled program of the model (see `would_hang`), or None."""
        from axonml_jax.ledger.memory import would_hang

        return would_hang(self._placement, self.mesh)

    def _next_key(self) -> jax.Array:
        key = place(jax.random.fold_in(self._key, self._calls), jax.sharding.PartitionSpec(), self.mesh)
        self._calls += 1
        return key


class AveragedParams:
    """A model's trained parameters alone, by the names of a checkpoint's moving average below `ema/`: restore it with `part=`.

    Args:
      model: the model that takes the average as its parameters.
    """

    def __init__(self, model: SavedModel):
        self._model, view = model, model._functional
        self._names = {name: MODEL + view.param_prefix + name for name in named_leaves(view.shapes.params)}

    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """The trained parameters as checkpoint leaves."""
        leaves = self._model.checkpoint_leaves()
        return {name: leaves[whole] for name, whole in self._names.items()}

    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the parameters; all else stays."""
        kept = {name: leaf.array for name, leaf in self._model.checkpoint_leaves().items()}
        unset = self._model._unset - {whole.removeprefix(MODEL) for whole in self._names.values()}
        self._model.take_leaves(kept | {whole: arrays[name] for name, whole in self._names.items()})
        self._model._unset = unset


# --------------------------------------------------------------------------------------------------
# A model's variables as a flat dict of whole arrays by path name, and back; fitting given trees to those we hold.
# --------------------------------------------------------------------------------------------------


def state_dict(model: Functional, variables: Variables) -> dict[str, Any]:
    """Return all variables, unsharded, as NumPy arrays by path name, parameters first."""
    host = to_host(variables)
    return named_variables(model, host)


def load_state_dict(
    model: Functional, variables: Variables, values: dict[str, Any], *, strict: bool
) -> tuple[Variables, list[str], list[str]]:
    """Build new variables from unsharded values by path name; nothing is changed in place.

    Returns:
      (variables, missing names, unexpected names).

    Raises:
      TypeError: when values are no mapping.
      ValueError: listing every name whose shape differs, floats for integers such as a base in int8, complex numbers for
        real ones, and, when strict or where nothing matches, every missing and unexpected one.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"load_state_dict takes arrays by path name, as state_dict() returns them, not a {type(values).__name__}"
        )
    wanted = named_variables(model, variables)
    missing = [name for name in wanted if name not in values]
    unexpected = [name for name in values if name not in wanted]
    wrong = _wrong_shapes(values, wanted) + _lossy(values, wanted)
    foreign = bool(values) and len(unexpected) == len(values)
    problems = wrong + (_unmatched(missing, unexpected) if strict or foreign else [])
    if problems:
        remedy = "; strict=False loads what matches" if strict and not wrong else ""
        if foreign:
            remedy = (
                f": none of the names is a name of the model. Its names are paths such as {next(iter(wanted), '')!r} "
                "(model.state_dict()); PyTorch's 'a.weight' of a linear layer is 'a/kernel', transposed. Nested dicts of "
                "parameters go to model.set_parameters"
            )
        raise ValueError(
            "load_state_dict: the given values do not fit the model" + remedy + ":\n" + "\n".join(problems)
        )
    return _replaced(model, variables, values), missing, unexpected


def _replaced(model: Functional, variables: Variables, values: dict[str, Any]) -> Variables:
    def swap(tree: PyTree, prefix: str) -> PyTree:
        leaves = [values.get(prefix + name, leaf) for name, leaf in named_leaves(tree).items()]
        old = jax.tree.leaves(tree)
        typed = [new if new is leaf else cast(new, leaf.dtype) for new, leaf in zip(leaves, old, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), typed)

    prefix = model.param_prefix
    return Variables(swap(variables.params, prefix), swap(variables.frozen, prefix), swap(variables.state, ""))


def fitted(given: PyTree, held: PyTree, rule: str) -> PyTree:
    """Convert a given tree to the structure and dtypes of the tree `held`; leaves are matched by path name.

    Raises:
      ValueError: the rule, and every leaf that is missing, unexpected, of another shape or dtype, or deleted.
    """
    values, wanted = named_leaves(given), named_leaves(held)
    missing, unexpected = [n for n in wanted if n not in values], [n for n in values if n not in wanted]
    gone = [f"  {n}: its memory was reused by a later step (keep a copy)" for n, x in values.items() if is_deleted(x)]
    if problems := _wrong_shapes(values, wanted) + _unmatched(missing, unexpected) + gone or _lossy(values, wanted):
        raise ValueError(rule + "; this one does not fit:\n" + "\n".join(problems))
    return jax.tree.unflatten(jax.tree.structure(held), [cast(values[n], leaf.dtype) for n, leaf in wanted.items()])


def _wrong_shapes(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    none = {n: values[n] for n in wanted if n in values and _is_none(values[n])}
    shapes = {n: (np.shape(values[n]), np.shape(x)) for n, x in wanted.items() if n in values and n not in none}
    lines = [f"  {n}: {got!r:.40} is no array, needed shape {np.shape(wanted[n])}" for n, got in none.items()]
    return lines + [f"  {n}: shape {got}, needed {need}" for n, (got, need) in shapes.items() if got != need]


def _is_none(value: Any) -> bool:
    return value is None or isinstance(value, (str, bytes))


def _lossy(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    dtypes = {n: (Leaf(values[n]).dtype, x.dtype) for n, x in wanted.items() if n in values and not _is_none(values[n])}
    pairs = ((jnp.floating, jnp.integer), (jnp.complexfloating, jnp.floating), (jnp.complexfloating, jnp.integer))
    wrong = lambda got, need: any(jnp.issubdtype(got, a) and jnp.issubdtype(need, b) for a, b in pairs)
    return [f"  {n}: {got.name}, needed {need.name}" for n, (got, need) in dtypes.items() if wrong(got, need)]


def _unmatched(missing: list[str], unexpected: list[str]) -> list[str]:
    return [f"  {n}: missing" for n in missing] + [f"  {n}: unexpected" for n in unexpected]


# --------------------------------------------------------------------------------------------------
# A model, an optimizer and a loss as one object to call `step` on.
# --------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=SavedModel)


class Trainer(Generic[M]):
    """The fused, donated training step of a parallel model; the pure form is `make_train_step`.

    Attributes:
      model: the parallel model; its variables are replaced after every step.
      hollow: whether the model was given as shapes and had no values yet, and no state was restored since: it takes no step.
    """

    @no_mesh_around()
    def __init__(
        self,
        model: M,
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
        eval_fn: LossFn | None = None,
    ):
        from axonml_jax.training.evaluate import EvalStep

        placement, loss_fn = model._placement, of_batch(loss_fn)
        eval_fn = None if eval_fn is None else of_batch(eval_fn)
        if accumulate is not None:
            placement = replace(placement, plan=replace(placement.plan, accumulate=accumulate))
        tx = averaging(tx, placement, ema)
        self._ema, self._averaged, self._loads = ema is not None, False, model.loads
        self._shown: list[tuple[dict, dict]] = []  # the mappings that `opt_state` gave, and what they held
        self.model, self._tx, self._loss_fn, self._placement = model, tx, loss_fn, placement
        self._max_grad_norm, self._norm_type, self._max_nonfinite = max_grad_norm, norm_type, max_nonfinite
        self._layer_norms, self._seen = layer_norms, None
        self._in_a_row: jax.Array | None = None  # of the last step, where a limit may halt the training
        self._callbacks, self._made, self._ended = checked(callbacks), 0, False
        self._compared: int | None = None  # the model's loads when the processes compared what they begin with
        self._same_evaluated: Callable[[PyTree], None] | None = None
        self._same_trained: Callable[[PyTree], None] | None = None
        self._saves: list[Callable[[], None]] = []
        self._steps: dict[bool | None, TrainStep] = {}
        self._predictions = Newest("trainer.predict")
        self._eval = EvalStep(model._functional, placement, model.mesh, eval_fn or loss_fn, model._accept)
        at_rest = self.train_step.at_rest  # refuses options that cannot work before anything is allocated
        self._state = init_state(model.variables, at_rest, model.mesh, model._key)
        self.hollow = model.hollow

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "a trainer is not copied with all that it has, which is compiled programs and arrays of devices: make another with "
            "the same arguments and give it a copy of the state, again.state = jax.tree.map(jnp.copy, trainer.state), or save "
            "it (ax.save)"
        )

    def __repr__(self) -> str:
        accumulate, clips = self._placement.plan.accumulate, self._max_grad_norm
        return f"{type(self).__name__}({self.model!r}, accumulate={accumulate}, max_grad_norm={clips})"

    def __str__(self) -> str:
        return f"{folded(repr(self))}{str(self.model).removeprefix(folded(repr(self.model)))}"

    @property
    @no_mesh_around()
    def state(self) -> TrainState:
        """Everything that the run is between two steps; the next step donates it, `jax.tree.map(jnp.copy, ...)` keeps a copy.

        Assigning one (of this trainer or of another like it, on the devices or on the host) continues from a copy of it.

        Raises:
          RuntimeError: within `averaged()`.
          TypeError: when something else than a TrainState is assigned.
          ValueError: listing every leaf of an assigned state that does not fit.
        """
        if self._averaged:
            raise RuntimeError(
                "within trainer.averaged() the model holds averaged parameters, not those that train: leave the block first"
            )
        state = replace(self._state, variables=self.model.variables)
        if self._ema and self._loads != self.model.loads:
            logger.warning("the model's parameters were loaded: the moving average restarts from them")
            step = self.train_step
            state = with_new_average(step.model, state, step.at_rest)
            self._continue(state)
        if state.rounds is not None and state.params is not self._state.params:
            logger.warning(
                "the model's parameters were changed: replicas continue from them and drop this round's updates"
            )
            state = _replicas_anew(self, state)
            self._continue(state)
        return state

    @state.setter
    @no_mesh_around()
    def state(self, state: TrainState) -> None:
        rule = "trainer.state takes a TrainState of the same model, optimizer and plan"
        if not isinstance(state, TrainState):
            raise TypeError(f"{rule}, but a {type(state).__name__} was given")
        fitting, self._shown = fitted(state, self.state, rule), []
        specs = self.train_step.state_specs(fitting)
        self._continue(place(fitting, specs, self.model.mesh), restored=True)
        from axonml_jax.training.same_everywhere import checksums

        self.model._given = checksums(named_leaves(fitting))

    @property
    @no_mesh_around()
    def opt_state(self) -> PyTree:
        """The optimizer's state as the tree that optax made, in the shapes of one device: for `optax.tree.get` and its like.

        So `optax.contrib.schedule_free_eval_params(trainer.opt_state, trainer.model.parameters())` works under every plan.
        Arrays stay split; under a pipeline, and where a split pads, they are copies. Replicas with optimizers of their own
        (NO_SYNC, DiLoCo) have entries along dim 0. The average of `ema` is left out; `trainer.state.opt_state` is the whole
        state as it rests. Its arrays are gone after the next step, which takes their memory: `jax.tree.map(jnp.copy, ...)`
        keeps them. Its containers are copies: a step after a hyperparameter was changed in one raises a ValueError; set the
        learning rate by `lr`.
        """
        refuse_changed(self._shown)
        tree = self.train_step.optimizer.tree(self.state.opt_state)
        tree = on_device(tree.inner if self._ema else tree)
        self._shown = [(each, dict(each)) for each in hyperparameters(tree)]
        return tree

    @property
    def recompute(self) -> Any:
        """What the backward recomputes: the plan's `remat`, or the choice made within its `memory` for the last step.

        What was chosen prints as a table by unit, and `ax.Plan(remat=...)` and configurations take it (`to_dict()`).
        """
        return self.train_step.recompute

    @property
    @no_mesh_around()
    def lr(self) -> float:
        """The learning rate of the last update (before any: of the first), where the optimizer's state says it.

        That is with `optax.inject_hyperparams(...)`; every process must ask. Setting it counts from the next step on.

        Raises:
          ValueError: when the state has no learning rate, or several that differ; to set, also when a schedule makes it.
          RuntimeError: to set, within `averaged()`.
        """
        return injected_rate(self._state.opt_state)

    @lr.setter
    @no_mesh_around()
    def lr(self, rate: float) -> None:
        state, self._shown = self.state, []
        self._continue(replace(state, opt_state=with_rate(state.opt_state, rate)))

    def _continue(self, state: TrainState, *, restored: bool = False) -> None:
        self._state, self._loads, self.hollow = state, self.model.loads, self.hollow and not restored
        self.model.variables = state.variables
        self._made = None  # read when somebody asks
        if restored:
            self._compared, self.model._given, self.model._unset = None, {}, set()

    # Callbacks

    @property
    @no_mesh_around()
    def step_number(self) -> int:
        """Number of updates made so far; the first time after a restore every process must ask."""
        if self._made is None:
            self._made = int(np.ravel(to_host(self._state.step))[0])
        return self._made

    def _tell(self, method: str, **more: Any) -> None:
        if self._callbacks:
            event = TrainingEvent(**{"trainer": self, "step": self.step_number, **more})
            with users_mesh_again():
                tell(self._callbacks, method, event)

    def checkpoint_committed(self, step: int, folder: Path | str) -> None:
        """Report a committed checkpoint to the callbacks; a `CheckpointManager` calls it."""
        self._tell("on_save", step=step, path=folder)

    def checkpoint_begun(self, wait: Callable[[], None]) -> None:
        """Register a save under way, for whose end `finish` waits; a `CheckpointManager` calls it."""
        if wait not in self._saves:
            self._saves.append(wait)

    def finish(self, reason: str = "finished") -> None:
        """Tell callbacks once that the training is over, after any save under way; leaving `with trainer:` does it too."""
        if self._ended:
            return
        self._ended = True
        try:
            for wait in self._saves:
                wait()
        except BaseException:
            reason = "failed"
            raise
        finally:
            self._tell("on_end", reason=reason)

    def __enter__(self) -> "Trainer[M]":
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self.finish("finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed")

    # Checkpoints

    @no_mesh_around()
    def checkpoint_leaves(self) -> dict[str, Leaf]:
        """All arrays of the state by names that are the same under every plan: what checkpoints hold."""
        return self.train_step.state_leaves(self.state)

    @no_mesh_around()
    def take_leaves(self, arrays: Mapping[str, Any]) -> None:
        """Replace the state by arrays that are placed as those of `checkpoint_leaves` are."""
        before = self.state
        state = self.train_step.state_of_leaves(before, arrays)
        if state.rounds is not None and before.rounds is not None:
            pairs = zip(jax.tree.leaves(state.rounds.own), jax.tree.leaves(before.rounds.own), strict=True)
            if any(new is old for new, old in pairs):
                logger.warning(
                    "the checkpoint has no parameters of these replicas: they start from the outer parameters"
                )
                state = _replicas_anew(self, state)
        self._continue(state, restored=True)

    @no_mesh_around()
    def resting_arrays(self) -> dict[str, jax.Array]:
        """All arrays of the state by path, as they are sharded on the devices under this plan."""
        return named_leaves(self.state)

    @no_mesh_around()
    def take_resting(self, arrays: Mapping[str, jax.Array]) -> None:
        """Replace the state by arrays that are sharded as those of `resting_arrays` are."""
        state, leaves = self.state, [arrays[name] for name in named_leaves(self.state)]
        self._continue(jax.tree.unflatten(jax.tree.structure(state), leaves), restored=True)

    def step(self, *parts: PyTree) -> Metrics:
        """One update from the global batch.

        Args:
          parts: the batch; or several, of a `loss_fn(model, x, y)`.

        Returns:
          `loss` and `grad_norm` (before clipping) of this batch, and the loss function's own metrics; with `layer_norms` the
          2-norms `grad_norm/LAYER` and `param_norm/LAYER` (before the update). Under NO_SYNC each is stacked by rank.

        Raises:
          ValueError: when the batch does not divide; when arrays that the loss reads outside of model and batch were changed
            since it was compiled; at the first step and the first after a load or restore, naming what is not the same in all
            processes: leaves, plan, program, first values, batch; and where batches of a new shape, or of steps 2, 3, 5, 9 and
            so on, differ.
        """
        batch = one_batch(parts)
        if self.hollow:
            raise ValueError(
                "the model was created from shapes and has no weights: load weights before creating the trainer, or restore a "
                "checkpoint"
            )
        refuse_tracing("trainer.step")
        refuse_changed(self._shown)
        if self._compared != self.model.loads:
            with folding:
                self._compare(batch)
        elif self._same_trained is not None:
            self._same_trained(batch)
        made, state = self._made, self.state
        with folding:
            state, metrics = self.train_step(replace(state, variables=self.model.give_up()), batch)
        self._continue(state)
        self._made = None if made is None else made + 1
        if self._seen is None:
            _look_at(self, metrics["grad_norm"], batch)
        self._seen = shapes_of(batch)
        self._in_a_row = _tell_halted(self._in_a_row, metrics.get("skipped_in_a_row"), self._max_nonfinite)
        self._tell("on_step", metrics=metrics)
        return metrics

    @no_mesh_around()
    def _compare(self, batch: PyTree) -> None:
        """Before the first step, and the first after a load or restore: check that all processes start from the same state."""
        if jax.process_count() > 1:
            from axonml_jax.training.same_everywhere import SameBatches, check_first_step

            check_first_step(self.train_step, self.state, batch, self.model._given)
            self._same_trained = self._same_trained or SameBatches(self.model.mesh, "trainer.step").sometimes
        self._compared = self.model.loads

    def evaluate(self, *parts: PyTree) -> Metrics:
        """The loss and metrics of a global batch of any number of rows in evaluation mode, in the microbatches of `accumulate`.

        Of `eval_fn`, where the trainer has one. Nothing is changed.

        Raises:
          ValueError: naming what is not the same in all processes.
        """
        with no_mesh_around(), folding:
            batch = one_batch(parts)
            if jax.process_count() > 1:
                from axonml_jax.training.same_everywhere import SameBatches

                self._same_evaluated = self._same_evaluated or SameBatches(self.model.mesh, "trainer.evaluate")
                self._same_evaluated(batch)
            return handed_back(self._eval(self.model.values, batch).values)

    def validate(self, batches: Iterable[PyTree], weights: Sequence[float] | None = None) -> dict[str, Any]:
        """The mean over all rows of the batches of everything `evaluate` returns, floats and arrays; callbacks hear of it.

        With `ema` the same of the averaged parameters too: `ema_loss` and so on. Within `averaged` it is of these alone.

        Args:
          batches: each of any number of rows.
          weights: what each batch counts for; None: a `WeightedMean` by its weight, anything else by the batch's rows.

        Raises:
          TypeError: for one batch in the place of several.
          ValueError: when there are no batches, not a weight for each, or naming a metric whose shape is not that of other
            batches, one by the name of an average's, or what is not the same in all processes.
        """
        with no_mesh_around(), folding:
            from axonml_jax.training.evaluate import mean_of

            both = self._ema and not self._averaged
            models = {"": self.model.values} | ({"ema_": self._average()} if both else {})
            if isinstance(batches, Mapping) or hasattr(batches, "dtype"):
                raise TypeError(
                    "trainer.validate takes batches, one after another: [batch], or a loader; trainer.evaluate takes one"
                )
            seen: dict[str, list[Evaluated]] = {before: [] for before in models}
            for batch in _walked(self, "validate", batches):
                for before, variables in models.items():
                    seen[before].append(to_host(self._eval(variables, batch)))
                    if len(seen[before]) == 1:
                        self._eval.refuse_rows(variables, batch, first := seen[before][0])
                        _refuse_clash(first.values, [each for each in models if each])
            stacked = bool(self._placement.axes.independent)
            each = {before: mean_of(results, weights, stacked=stacked) for before, results in seen.items()}
            found = {f"{before}{name}": value for before, means in each.items() for name, value in means.items()}
            self._tell("on_eval", metrics=found)
            return found

    def check(self, batch: PyTree, *, strict: bool = False) -> "Check":
        """The loss, metrics, gradients and the model's state of a batch under the plan, and of `loss_fn` plainly on one device.

        Nothing of the run is changed. One device of every process must hold the whole model and what the whole batch needs;
        every process must call it, with whole batches.

        Args:
          batch: a global batch, as `step` takes it.
          strict: raise where leaves differ, or nothing can be compared.

        Returns:
          What differs, leaf by leaf, and what could not be compared and why; print it.

        Raises:
          ValueError: with `strict`, where a leaf differs or nothing can be compared; always where no trained parameter reaches
            the loss.
        """
        with no_mesh_around(), folding:
            from axonml_jax.training.evaluate import Differentiate
            from axonml_jax.training.single_device import Check, compared_with, draws, not_comparable

            refuse_tracing("trainer.check")
            batch = host_arrays(batch)
            model, training = self.model, self.model._mode
            view, variables, placement = model._functional, model.values, self.train_step.placement
            # What is recomputed changes no number, and `memory` needs a step's compiled program.
            placement = replace(placement, plan=replace(placement.plan, memory=None))
            given, whole = jax.tree.map(jnp.asarray, to_host((batch, model._rest.whole(variables, model.mesh))))
            key = jax.random.key(0)
            mode = Mode(training=training, precision=placement.plan.precision)
            drawing = draws(view, self._loss_fn, mode, whole, key, given)
            left_out = dict(not_comparable(view, placement, mode, drawing))
            if left_out and strict:
                raise ValueError(str(Check(left_out=left_out)))
            if left_out:
                return Check(left_out=left_out)
            program = Differentiate(view, placement, model.mesh, self._loss_fn, training=training, sync=True)
            placed = place(key, jax.sharding.PartitionSpec(), model.mesh)
            loss, metrics, grads, state = program(variables, placed, batch)
            zero = not any(map(np.any, jax.tree.leaves(to_host(grads))))
            _tell_unread(self, program.trace(variables, placed, batch), shapes_of(batch), zero=zero)
            state = model._rest.whole(replace(variables, state=state), model.mesh).state
            grads = program.rest.outside(grads, model.mesh)
            got = {"loss": loss, "metrics": metrics, "gradients": grads, "state": state}
            found = compared_with(got, placement, (view, self._loss_fn, mode), whole, shard_key(key, 0, 0), given)
            if strict and found.differs:
                raise ValueError(str(found))
            return found

    def predict(self, batches: Iterable[PyTree], predict_fn: Callable[[Any, PyTree], PyTree] | None = None) -> PyTree:
        """Run the model on every row of the batches, once, in order; returns unsharded NumPy arrays with rows in dim 0.

        In evaluation mode; nothing is changed. Every process must call it, and each gets all rows.

        Args:
          batches: each of any number of rows.
          predict_fn: `predict_fn(model, batch)` -> arrays with a row for every row of the batch; None: `model(batch)`, of
            batches that are arrays.

        Raises:
          TypeError: for one batch in the place of several; without `predict_fn`, for batches that are no arrays.
          ValueError: when there are no batches, or naming what has no rows in dim 0, or is not the same in all processes.
        """
        with no_mesh_around(), folding:
            if isinstance(batches, Mapping) or hasattr(batches, "dtype"):
                raise TypeError("trainer.predict takes batches, one after another: [batch], or a loader")
            from axonml_jax.training.evaluate import Predict, joined_rows

            variables, given = self.model.values, (self.model._functional, self._placement, self.model.mesh)
            fun = predict_fn or _of_arrays
            build = lambda: Predict(*given, fun, self.model._accept)
            program = self._predictions.program(fun, (), build)
            return joined_rows([program(variables, batch) for batch in _walked(self, "predict", batches)])

    @contextmanager
    def averaged(self) -> Iterator[M]:
        """Within this context the model holds the moving average instead of its parameters: evaluate, generate, export.

        A step in it raises a RuntimeError; parameters that are loaded in it are dropped at its end.

        Raises:
          ValueError: when no moving average is kept (`ema`).
        """
        own, self.model.variables, self._averaged = self.model.variables, self._average(), True
        try:
            yield self.model
        finally:
            self.model.variables, self._averaged = own, False
            self._loads = self.model.loads  # what was loaded meanwhile is gone

    @no_mesh_around()
    def _average(self) -> Variables:
        if not self._ema:
            raise ValueError("no moving average is kept: make the trainer with ema=0.999 or another decay")
        step = self.train_step
        return averaged_variables(step.model, self.state, step.at_rest)

    @property
    def train_step(self) -> "TrainStep":
        """The pure step `(state, batch) -> (state, metrics)` in the model's current mode."""
        mode = self.model._mode
        if mode not in self._steps:
            from axonml_jax.ledger.memory import accepting
            from axonml_jax.training.step import TrainStep

            self._steps[mode] = TrainStep(
                self.model._functional,
                self._placement,
                self.model.mesh,
                self._loss_fn,
                self._tx,
                max_grad_norm=self._max_grad_norm,
                norm_type=self._norm_type,
                max_nonfinite=self._max_nonfinite,
                training=mode,
                accept=accepting(self._placement, self.model.mesh),
                layer_norms=self._layer_norms,
            )
        return self._steps[mode]

    def trace(self, batch: PyTree) -> Any:
        """The step traced for batches like this one (arrays or shapes); nothing runs. `ax.explain(trainer, batch)` reads it.

        Raises:
          TypeError, ValueError: for a batch that `step` would not take.
        """
        with no_mesh_around(), folding:
            self.train_step.check(batch := host_arrays(batch))
            return self.train_step.trace(self.state, shapes_of(batch))

    @no_mesh_around()
    def compiled_memory(self) -> int | None:
        """Bytes per device that the compiled step plans: arguments, results beyond them, temporaries. None before a step."""
        from axonml_jax.training.budget import peak_of

        return None if self._seen is None else peak_of(self.trace(self._seen).lower().compile())

    def minimum_traffic(self) -> Fraction:
        """Bytes per rank and step that the published algorithm sends for this plan's gradients and parameters."""
        return self.train_step.minimum_traffic()


def _walked(trainer: Trainer, call: str, batches: Iterable[PyTree]) -> Iterable[PyTree]:
    """Iterate over batches under the user's mesh; with several processes, check that all give the same batches.

    Raises:
      ValueError: for a loader without end.
    """
    if getattr(batches, "num_epochs", 1) is None:  # a loader's
        raise ValueError(
            f"trainer.{call} reads a loader to its end, and this one is endless (num_epochs=None): make it with num_epochs=1"
        )
    batches = map(host_arrays, under_users_mesh(batches))
    if jax.process_count() == 1:
        return batches
    from axonml_jax.training.same_everywhere import SameBatches

    return SameBatches(trainer.model.mesh, f"trainer.{call}").walk(batches)


def _replicas_anew(trainer: Trainer, state: TrainState) -> TrainState:
    """Return the state with every replica's parameters reset to the outer parameters; all else stays."""
    first = trainer.train_step.at_rest.kept["rounds"].first(state.params, trainer.model.mesh)
    return state.keeping(rounds=replace(state.rounds, own=first.own))


@no_mesh_around()
def _look_at(trainer: Trainer, norm: jax.Array, batch: PyTree) -> None:
    """Run `_tell_unread` for the first step, with its gradient norm; this waits for that step to finish."""
    zero, shapes = not any(np.any(np.asarray(shard.data)) for shard in norm.addressable_shards), shapes_of(batch)
    traced = trainer.train_step.as_written(trainer.state, shapes) if trainer.model._held_outside else None
    _tell_unread(trainer, traced, shapes, zero=zero)


def _tell_halted(before: jax.Array | None, now: jax.Array | None, limit: int | None) -> jax.Array | None:
    """Warn when the step before halted the training; returns what to give the next time. It waits for no step."""
    ready = before is not None and before.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
    if now is None or limit is None or before is None or not ready:
        return now
    in_a_row = max(int(np.max(shard.data)) for shard in before.addressable_shards)
    if in_a_row >= limit:
        warn(
            f"{in_a_row} updates in a row were not finite, and max_nonfinite={limit} halts the training there: no step changes "
            'anything from now on. End the loop when metrics["skipped_in_a_row"] reaches the limit; to go on restore a '
            "checkpoint, or make a new trainer"
        )
    return now


def _tell_unread(trainer: Trainer, traced: Any, shapes: PyTree, *, zero: bool) -> None:
    """Warn when all gradients are zero, and when the loss reads trained parameters only from outside of the model it is given.

    Args:
      trainer: whose loss it is.
      traced: the program that was traced of the loss; None: it has no constants.
      shapes: of its batch.
      zero: whether its gradients are.

    Raises:
      ValueError: where nothing that is trained reaches the loss.
    """
    constants = [] if traced is None else [value for _, value in opened(traced.jaxpr).constants]
    outside = trainer.model.read_outside(constants).intersection(named_leaves(trainer.model._functional.shapes.params))
    if not zero and not outside:
        return
    from axonml_jax.training.evaluate import trained_read

    with folding:
        read = trained_read(trainer.train_step, trainer.model.variables, shapes)
    if zero and not read:
        raise ValueError(UNREAD)
    if zero:
        logger.warning(
            "the gradients of the first step are zero everywhere, though parameters reach the loss: possible causes: every "
            "example is masked out, or every activation is dead"
        )
    if names := sorted(outside - read):
        logger.warning(
            "the loss reads %s from a module outside of it, not from the model that it is given: they are constants and do "
            "not train. Use the model in the loss: loss_fn = lambda model, batch: ... model(batch) ...",
            some_of(names),
        )


def _refuse_clash(values: Iterable[str], prefixes: Iterable[str]) -> None:
    """Refuse metrics by the names that those of the averaged parameters have beside them."""
    if taken := sorted({before + name for before in prefixes for name in values} & set(values)):
        raise ValueError(
            f"the loss, or eval_fn, returned metrics named {taken}, by which trainer.validate returns the averaged parameters' "
            "own (ema): give them other names"
        )


def _positive(value: Any) -> float | None:
    """A positive number, or a concrete scalar, as a float; None for anything else."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer) and not value.ndim:
        value = value.item()
    number = float(value) if isinstance(value, Real) else 0.0
    return number if number > 0 else None


def _of_arrays(model: Any, batch: PyTree) -> PyTree:
    """The default `predict_fn`: call the model on a batch that is a single array."""
    if isinstance(batch, Mapping | tuple | list):
        raise TypeError(
            "trainer.predict cannot tell which part of a batch the model takes: give "
            'predict_fn=lambda model, batch: model(batch["x"])'
        )
    return model(batch)


def _plan_of(model: Any, view: Functional, given: Any, params: PyTree | None, split: PyTree) -> Plan:
    """The default plan of a model: the one that its annotations imply, if they name axes of the mesh.

    It is `Plan()` for a model whose layers split their parameters themselves, and, on a mesh that splits nothing but batches,
    for annotations whose names only rules could map to axes.
    """
    if any(any(spec) for spec in named_leaves(split).values()):
        return Plan()
    from axonml_jax.parallel.annotations import Annotations

    made = isinstance(model, (nnx.Module, linen.Module, ModelAround))
    found = Annotations.read(model if made else view.abstract_module, given, params=params)
    splits = any(found.degrees.get(axis, 1) > 1 for axis in PARTITIONED)
    if not any(each.said for each in found.of.values()) or (found.problems and not splits):
        return Plan()
    return Plan.annotated(found)


# --------------------------------------------------------------------------------------------------
# A model on a mesh under a plan: what `parallelize` returns and every facade is.
# --------------------------------------------------------------------------------------------------


def _no_tree(model: Any, *_: Any) -> Any:
    """Raise a TypeError when JAX or Flax transforms and optimizers treat a parallel model as a Flax module."""
    raise TypeError(
        f"an ax.{type(model).__name__} is not a Flax module, so JAX and nnx (jit, value_and_grad, Optimizer, state, split) "
        "find no arrays in it: train it by trainer = model.trainer(optax.adamw(1e-3), loss_fn) and trainer.step(batch), or "
        "keep your own loop, with module = ax.place(module, mesh, plan) instead of your module"
    )


def _functionalized(
    model: Any, params: PyTree | None, trainable: Trainable, given: Any
) -> tuple[Functional, Variables]:
    """The pure view of a model, and its arrays; a function makes it under the user's own mesh, where it asks for one."""
    try:
        view, whole = functionalize(model, params, trainable)
    except ValueError as error:
        if not refuses_placement(error):
            raise
        from axonml_jax.parallel.users_mesh import made_on_one_device

        view, whole = made_on_one_device(lambda made: functionalize(model, params, trainable, made), given)
    view.given_on(given)
    return view, whole


def _mesh_of(mesh: Any, plan: Plan | None) -> tuple[Any, Mesh]:
    """A mesh as it was given, or made as a plan says, and the same as a JAX mesh with the names that plans know.

    Raises:
      TypeError: for a mesh without devices.
    """
    if mesh is None and plan is not None and plan.mesh is not None:
        mesh = make_mesh(devices=None, **plan.mesh.degrees)
    known = as_mesh(mesh, own=plan.axes if plan is not None else ())
    if not isinstance(known, Mesh):
        raise TypeError(f"a model lives on devices, but {known} has none: give a jax.sharding.Mesh")
    return mesh, known


class ParallelModel(SavedModel):
    """A Flax model whose parameters live on a mesh as a plan says.

    Its variables are the only state it holds; trainers read and replace them.

    Attributes:
      plan: the plan.
      mesh: the `jax.sharding.Mesh`.
      variables: the model's arrays as they rest (see `Variables`); a trainer's next step donates them, after which an array
        that was kept can be neither read nor stepped from; `jax.tree.map(jnp.copy, ...)` makes one that can.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        jax.tree_util.register_pytree_node(cls, _no_tree, _no_tree)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, "the Flax module, with its parameters as they are now, is model.module")

    @no_mesh_around()
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
        # What is made of a model is imported when one is made, so that the class itself costs little.
        from axonml_jax.layers.adapters import layer_specs
        from axonml_jax.parallel.units import check_units
        from axonml_jax.training.same_everywhere import checksums

        super().__init__()
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(
                f"plan={plan!r} must be an ax.Plan, or None: as the model's annotations say, else data parallelism"
            )
        if not isinstance(seed, Integral):
            raise TypeError(f"seed={seed!r} must be a whole number")
        given, mesh = _mesh_of(mesh, plan)
        self.mesh = mesh
        view, whole = _functionalized(model, host_arrays(params), trainable, given)
        split, stages = layer_specs(view, self.mesh.shape), None
        plan = plan if plan is not None else _plan_of(model, view, given, params, split)
        if plan.pipe is not None:
            from axonml_jax.pipeline.assign import stage_assigner

            stages = stage_assigner(model, view, plan.pipe)
        self._asked = plan.for_model(view)
        placement = bind_plan(self._asked, whole, mesh, split, stages, view.stacked_dims)
        self._functional, self._placement, self._rest = view, placement, rest_of(placement)
        check_units(self._placement, self._functional)
        self._functional.state_joins()  # refused before anything is allocated
        check_model(self._placement, self._functional)
        self.variables: Variables = first_variables(self._functional, whole, self._rest, self.mesh)
        adapters = {view.param_prefix + name for each in view.adapters.values() for name in (each.a, each.b)}
        self._unset = set(named_variables(view, view.shapes)) - adapters if view.hollow else set()
        # Of a model without values there is nothing to compare, and what is loaded into it is compared then.
        self._given = {} if self._functional.hollow else checksums(named_variables(view, whole))
        self._remembered(model, f"the {type(model).__name__} that was given to the model")
        self._key = jax.random.key(int(seed))
        self._mode: bool | None = None
        self._syncing, self._lent = True, False
        self._compared: int | None = None  # the loads when processes compared what a loop of gradients begins with
        self._same: Callable[[PyTree], None] | None = None
        self._updated: bool | None = False  # whether that loop's first update is still to be compared; None: to be made
        self._newest_trainer: Callable[[], Trainer | None] = lambda: None

    def __repr__(self) -> str:
        read = "" if (found := self.plan.annotations) is None else f", read from {found!r}"
        return (
            f"{type(self).__name__}(mesh={dict(self.mesh.shape)}, plan={in_words(self._asked, self.mesh.shape)}{read})"
        )

    def __str__(self) -> str:
        from axonml_jax.ledger.report import resting

        rests = resting(self._placement.resting.params, in_stages=self._placement.stages is not None)
        split = {axes: each for axes, each in self._placement.strategies.items() if self._placement.ranks(axes) > 1}
        plainly = ", ".join(each.in_words(axes) for axes, each in split.items())
        return "\n".join([folded(repr(self)), *[plainly] * bool(plainly), str(rests)])

    def _repr_html_(self) -> str:
        return self.plan._repr_html_(f"ax.{type(self).__name__}", self.mesh.shape)

    @property
    def plan(self) -> Plan:
        """The plan, with every automatic choice made."""
        return self._placement.plan

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks among which the batch is split."""
        return ProcessGroup(self.mesh, axes=self._placement.axes.batch)

    # Reading and writing the model

    @property
    @no_mesh_around()
    def module(self) -> Any:
        """A new Flax module with the current, unsharded parameters in device memory; changing it does not change this model.

        Where ranks keep parameters of their own, the first rank's.
        """
        self._lent = True
        return self._remembered(
            self._functional.module(self._rest.whole(on_device(self.values), self.mesh)),
            "a module that model.module returned",
        )

    def _remembered(self, module: Any, what: str) -> Any:
        """Return the module, and watch it, to warn if it is changed before the model's next use (see `Handed`)."""
        if isinstance(module, nnx.Module):
            self._handed.append(Handed(module, what))
            self._held_outside[id(module)] = module
        return module

    @no_mesh_around()
    def parameters(self) -> PyTree:
        """The trained parameters as a nested dict, sharded as they are stored, in device memory.

        Under NO_SYNC they are stacked by model along dim 0.
        """
        self._lent = True
        return handed_back(self._outside(on_device(self.values.params)))

    @no_mesh_around()
    def set_parameters(self, params: PyTree) -> None:
        """Replace the trained parameters, for instance by `optax.apply_updates(model.parameters(), updates)`.

        Args:
          params: a nest of dicts, or an `nnx.State` or Linen's boxes with the same names.

        Raises:
          ValueError: listing every missing, unexpected and mismatched parameter, before anything is changed.
        """
        now = self._outside(self.variables.params)
        fitting = fitted(
            taken_in(host_arrays(plain_tree(params))), now, "set_parameters takes a tree like parameters() returns"
        )
        self._updated = True if self._updated is None else self._updated
        view = self._functional
        self._unset -= {view.param_prefix + name for name in named_leaves(view.shapes.params)}
        self._lent = True  # an array that is where it belongs already stays the caller's own
        self.variables = replace(self.variables, params=self._rest.inside(fitting, self.mesh))

    @no_mesh_around()
    def state_dict(self) -> dict[str, Any]:
        """All variables, unsharded, as NumPy arrays by path name (every process must call it)."""
        return state_dict(self._functional, self.whole())

    @no_mesh_around()
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
        now, values = self._rest.whole(self.variables, self.mesh), host_arrays(values)
        whole, missing, unexpected = load_state_dict(self._functional, now, values, strict=strict)
        self.variables, self.loads = self._rest.place(whole, self.mesh), self.loads + 1
        self._unset -= values.keys()
        from axonml_jax.training.same_everywhere import checksums

        taken = {name: value for name, value in values.items() if name not in unexpected}
        self._given = {**self._given, **checksums(taken)}
        return missing, unexpected

    @no_mesh_around()
    def sync_parameters(self) -> None:
        """Give every rank the first rank's parameters and buffers, bit for bit.

        A trainer's first step refuses processes that began with other values unless this was called before. Parameters that are
        split over processes are a mixture of theirs, which this leaves as it is: load whole values (`load_state_dict`).
        """
        from axonml_jax.training.evaluate import equalize
        from axonml_jax.training.same_everywhere import still_own

        self.variables = equalize(self.variables, self._placement, self.mesh)
        self._given = still_own(self._given, named_variables(self._functional, self.variables)) if self._given else {}

    @no_mesh_around()
    def after_update(self) -> None:
        """Run every module's own `after_update` once, where you update parameters yourself; a trainer's step does it."""
        from axonml_jax.training.evaluate import hooks_program

        program = self._program(("hooks",), lambda: hooks_program(self._functional, self._placement, self.mesh))
        self.variables = replace(self.variables, state=program(self.variables.state))

    @no_mesh_around()
    def give_up(self) -> Variables:
        """Return the variables for a program that donates their buffers: copies, if the user may hold the arrays."""
        if self._lent:
            self.variables = copies(self.values)
            self._lent = False
        return self.values

    @no_mesh_around()
    def whole(self) -> Variables:
        """The variables without padding; where ranks train their own parameters, the first rank's."""
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
        with no_mesh_around(), folding:
            from axonml_jax.training.evaluate import Forward

            if args and isinstance(args[0], Mapping) and isinstance(args[0].get("params"), Mapping):
                raise TypeError(
                    "the model was called with variables, as module.apply is: it has its own, model(x). In a loop of yours use "
                    "the module, TrainState.create(apply_fn=module.apply, params=ax.place(module, mesh, plan, "
                    "params=variables)['params'])"
                )
            self._refuse_tracing("the model")
            given = self._functional, self._placement, self.mesh, self._mode, self._accept
            program = self._program(("forward",), lambda: Forward(*given))
            out, state = program(self.values, self._next_key(), *host_arrays((args, kwargs)))
            self.variables = replace(self.variables, state=state)
            return handed_back(out)

    def value_and_grad(self, loss_fn: LossFn) -> Callable[[PyTree], Any]:
        """A function of the global batch that returns the loss and synchronized gradients.

        Args:
          loss_fn: `loss_fn(model, batch) -> loss` or `(loss, metrics)`; a number that is meant as on one device, of
            the whole batch, or an `ax.WeightedMean`. Arrays that it reads outside of these are constants, as they were when it
            was compiled; a call after one was changed is refused, and asking for the function again compiles anew.

        Returns:
          `f(batch) -> (loss, grads)`, or `((loss, metrics), grads)` when `loss_fn` returns metrics. Within `no_sync()`
          every value is each rank's own, stacked by rank along dim 0. The first call, and the first after a load, refuses
          processes that do not begin alike, as a trainer's first step does, and the next one after `set_parameters` those that
          this left with unlike parameters.
        """

        from axonml_jax.training.evaluate import Differentiate

        given, loss_fn = loss_fn, of_batch(loss_fn)
        if names := self._gradients.drop_changed(given):
            logger.warning(
                "value_and_grad is compiled again, because values that the loss reads were changed: %s",
                ", ".join(names),
            )

        def f(*parts: PyTree) -> Any:
            with no_mesh_around(), folding:
                batch = one_batch(parts)
                self._refuse_tracing("value_and_grad")
                sync = self._syncing
                options: dict[str, Any] = {"training": self._mode, "sync": sync, "accept": self._accept}
                build = lambda: Differentiate(self._functional, self._placement, self.mesh, loss_fn, **options)
                program = self._gradients.program(given, (sync, self._mode), build)
                variables, key = self.values, self._next_key()
                if jax.process_count() > 1:
                    self._compare(program, variables, key, batch)
                loss, metrics, grads, state = program(variables, key, batch)
                self.variables = replace(self.variables, state=state)
                return handed_back((((loss, metrics) if metrics else loss), self._outside(grads) if sync else grads))

        return f

    def _compare(self, program: "Differentiate", variables: Variables, key: jax.Array, batch: PyTree) -> None:
        """Check that processes agree: before a loop's first gradients, after a load, and after its first update."""
        from axonml_jax.training.same_everywhere import SameBatches, check_first_gradients, check_first_update

        self._same = self._same or SameBatches(self.mesh, "value_and_grad").sometimes
        if self._compared != self.loads:
            check_first_gradients(program, variables, key, batch, self._given)
            self._compared, self._updated = self.loads, None
        else:
            self._same(batch)
        if self._updated:
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

    @no_mesh_around()
    def sync_gradients(self, grads: PyTree) -> PyTree:
        """The mean over ranks of gradients that `value_and_grad` returned within `no_sync()`.

        Raises:
          ValueError: listing every leaf that is no stacked gradient of this model.
        """
        from axonml_jax.training.evaluate import SyncStacked

        program = self._program(("sync",), lambda: SyncStacked(self._placement, self.mesh))
        return handed_back(self._outside(program(taken_in(grads))))

    @no_mesh_around()
    def clip_grad_norm(
        self, grads: PyTree, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> tuple[PyTree, jax.Array]:
        """Scale gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
          grads: what `value_and_grad` or `sync_gradients` returned.
          max_norm, norm_type: positive numbers, or concrete scalars; the type may be `math.inf`.
          error_if_nonfinite: raise when the norm is not finite.

        Returns:
          (clipped gradients, norm before clipping).

        Raises:
          ValueError: for numbers that are not positive, or a norm that is not finite.
        """
        from axonml_jax.training.update import Clip

        most, power = map(_positive, (max_norm, norm_type))
        if most is None or power is None:
            raise ValueError(f"{max_norm=} and {norm_type=} must be positive numbers")
        program = self._program(("clip", power), lambda: Clip(self._rest, self.mesh, power))
        clipped, norm = program(taken_in(grads), most)
        if error_if_nonfinite and not bool(jax.numpy.all(jax.numpy.isfinite(norm))):
            raise ValueError(f"the {power}-norm of the gradients is {norm}: they are left as they were")
        return handed_back((clipped if self.plan.pipe else self._outside(clipped), norm))

    def _outside(self, params: PyTree) -> PyTree:
        """Convert parameters or gradients to the user's view: without padding."""
        return self._rest.outside(params, self.mesh)

    @naming_options
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
        eval_fn: LossFn | None = None,
    ) -> Trainer[Self]:
        """A fused, donated training step around this model.

        Args:
          tx: the optimizer.
          loss_fn: see `value_and_grad`.
          accumulate: microbatches per update and rank; None takes the plan's.
          max_grad_norm, norm_type: clip gradients to this global norm; its type is 1, 2 or `math.inf`.
          max_nonfinite: skip updates whose loss or gradients are not finite, and after that many in a row every update, which a
            warning says; None: skip none.
          callbacks: called after steps, validations and checkpoints and at the end (see `ax.Callback`).
          layer_norms: measure the norms of gradients and parameters layer by layer too.
          eval_fn: what `evaluate` and `validate` compute, a loss and metrics as `loss_fn` returns them; None: `loss_fn`.
          ema: keep an exponential moving average of the parameters with this decay (see `Trainer.averaged`).

        Raises:
          TypeError, ValueError: when the optimizer cannot run under the plan.
        """
        options = {"accumulate": accumulate, "max_grad_norm": max_grad_norm, "norm_type": norm_type}
        options |= {"layer_norms": layer_norms, "eval_fn": eval_fn}
        trainer = Trainer(self, tx, loss_fn, max_nonfinite=max_nonfinite, callbacks=callbacks, ema=ema, **options)
        self._newest_trainer = weakref.ref(trainer)
        return trainer


jax.tree_util.register_pytree_node(ParallelModel, _no_tree, _no_tree)
