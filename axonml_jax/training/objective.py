"""The objective of a step: the user's loss as a pure function, and the interface of the engines that differentiate it."""

import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import flax
import flax.errors
import jax
import jax.numpy as jnp

from axonml_jax.base import LossFn, PyTree, named_leaves, path_name
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.compat.jaxpr import trace, traced_with
from axonml_jax.model.loss import TRACED, UNREAD, Loss, of_arrays, parse_loss
from axonml_jax.model.view import Functional, Mode, Variables, merge, noting_written
from axonml_jax.parallel.placement import Placement
from axonml_jax.sharding.batch import several_batches
from axonml_jax.strategies.shard import Feedback

if TYPE_CHECKING:
    from axonml_jax.meaning.whole_batch import WholeBatch

# --------------------------------------------------------------------------------------------------
# The user's loss as a pure function of what one rank reads, for one microbatch.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Number and loss scale of the (rank, microbatch) parts of a step, each of which is differentiated by itself.

    Attributes:
      count: number of (rank, microbatch) parts over which a plain mean is taken; each part's loss is divided by it. A
        WeightedMean is divided by its total weight after the sum.
      scale: the loss scale, or None.
    """

    count: int
    scale: jax.Array | None = None


@dataclass(frozen=True)
class Objective:
    """The user's loss of a model, as a pure function of variables, key and batch.

    Attributes:
      model: the model.
      loss_fn: the user's.
      mode: how the model runs.
      positions: the mesh axes that split positions: a loss must then say over which it is a mean.
      inside: entered around the model's code while it is traced (see `Placement.inside`).
      reading: what is traced in its place (see `reading` of `parallel/placement.py`).
      whole: what the loss means on the whole batch, of which ranks have parts; None: it is that of a rank's rows.
      trains: it is refused where nothing that is trained reaches it.
      placed: what is traced in the place of functions that trace the user's code by themselves (`reading_users`).
    """

    model: Functional
    loss_fn: LossFn
    mode: Mode
    positions: tuple[str, ...] = ()
    inside: Callable[[], AbstractContextManager] = nullcontext
    reading: Callable[..., Callable] = lambda fun, **_: fun
    whole: "WholeBatch | None" = None
    trains: bool = False
    placed: Callable[[Callable], Callable] = lambda fun: fun

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn={self.loss_fn!r} cannot be called: give a function loss_fn(model, batch) -> loss")

    def __call__(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        """The loss of one microbatch on one rank, and the model's state after it."""
        return self.reading(self._evaluated if self.mode.training is False else self._of)(variables, key, batch)

    def _evaluated(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        loss, state = self._of(variables, key, batch)
        again = lambda state: self._of(replace(variables, state=state), key, batch)[1]
        refuse_moved(self.model, variables.state, state, again)
        return loss, state

    def _of(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        on_rows = partial(self._on_rows, variables, key)
        with noting_written() as written:
            if self.whole is None:
                made = on_rows(batch)
            else:
                with self.inside():
                    made = self.whole(self.model, self._explained, self.mode, variables, key, batch, on_rows)
        if written.found and self.mode.training is not False:
            runs = (self._on_rows, getattr(batch, "rows", batch)), (self._on_whole, batch)
            refuse_written(list(written.found), runs, variables, key)
        loss, state = made
        return loss, jax.tree.map(_in_its_dtype, state, variables.state)

    def _on_whole(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        assert self.whole is not None
        on_rows = partial(self._on_rows, variables, key)
        with self.inside():
            return self.whole(self.model, self._explained, self.mode, variables, key, batch, on_rows)

    def microbatches(
        self, variables: Variables, key: jax.Array, rows: PyTree, batches: PyTree
    ) -> tuple[PyTree, frozenset[str]]:
        """Splits a rank's rows into microbatches, stacked along dim 0, in the form in which the loss takes them.

        Args:
          variables: their shapes, as read.
          key: the key of one of them; its shape counts.
          rows: all rows of this rank.
          batches: the same as microbatches.

        Returns:
          The microbatches, and the names of the model's state with which each of them begins as the step does.
        """
        if self.whole is None:
            return batches, frozenset()
        from axonml_jax.layers.whole import whole_allowed

        whole, shape = self.whole, jax.ShapeDtypeStruct(key.shape, key.dtype)
        once: list[frozenset[str]] = []

        def split(variables: Variables, rows: PyTree, batches: PyTree) -> PyTree:
            asked = self.model, self._explained, self.mode, self._as_read(variables, shape, rows), shape
            with self.inside(), whole_allowed():
                made, names = whole.microbatches(asked, rows, batches)
            once.append(names)
            return made

        return self.placed(split)(variables, rows, batches), once[-1]

    def _as_read(self, variables: Variables, key: Any, rows: PyTree) -> Variables:
        """The shapes of variables that the loss's own code sees: without adapters, and with what layers split whole."""
        seen: list[Variables] = []

        def note(variables: Variables, key: jax.Array, rows: PyTree) -> jax.Array:
            seen.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), variables))
            return jnp.zeros(())

        without_products = replace(self.mode.precision, products=None)  # `note` has none that could be rounded
        trace(self.reading(note, precision=without_products), variables, key, rows)
        return seen[-1]

    def swept(
        self,
        each: Callable[[Callable, PyTree], list[jax.Array]],
        variables: Variables,
        key: jax.Array,
        rows: PyTree,
        batches: PyTree,
    ) -> tuple[PyTree, dict[str, jax.Array]]:
        """Runs the first sweep over the microbatches, where the loss needs one, and adds its results (`meaning/two_sweeps.py`).

        Args:
          each: `each(fun, batches)` calls `fun(variables, key, batch) -> (arrays, state)` on every microbatch and returns the
            arrays, stacked along dim 0.
          variables: their shapes.
          key: what the loss itself draws with.
          rows: all rows of this rank.
          batches: what `microbatches` returned.

        Returns:
          The microbatches; and leaves of the model's state after the step, by their names, that the loss makes of all rows.
        """
        if self.whole is None or not self.sweeps(batches):
            return batches, {}
        whole, asked = self.whole, (self.model, self._explained, self.mode)

        def results(variables: Variables, key: jax.Array, batch: PyTree) -> tuple[list[jax.Array], PyTree]:
            with self.inside():
                return whole.results(*asked, variables, key, batch)

        def joined(variables: Variables, key: jax.Array, rows: PyTree, stacks: list, batches: PyTree) -> tuple:
            return whole.of_all_rows((*asked, self._as_read(variables, key, rows), key), rows, stacks, batches)

        stacks = each(self.reading(results), batches)
        return self.placed(joined)(variables, key, rows, stacks, batches)

    def sweeps(self, batches: PyTree) -> bool:
        """Whether the loss needs two sweeps over the microbatches."""
        if self.whole is None:
            return False
        from axonml_jax.meaning.microbatches import Microbatch

        return isinstance(batches, Microbatch) and batches.plan.sweeps

    def swept_loss(self, batches: PyTree) -> Loss:
        """The loss of this rank's rows after a first sweep, as sums that ranks add up."""
        assert self.whole is not None
        return self.whole.loss_of(batches)

    def finish(self, batches: PyTree) -> Callable | None:
        """The function of loss and metrics after all microbatches and ranks (`WholeBatch.finish`); None: there is none."""
        return None if self.whole is None else self.whole.finish(batches)

    def _on_rows(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        with self.inside():
            bound = self.model.bind(variables, key, self.mode)
            loss = parse_loss(self._explained(bound, batch), self.positions)
            return loss, self.model.state_of(bound)

    def _explained(self, bound: Any, batch: PyTree) -> Any:
        try:
            return self.loss_fn(bound, batch)
        except flax.errors.ApplyScopeInvalidVariablesTypeError as error:
            said = TypeError(
                "the loss gave module.apply something other than variables. A loss is given the model with its variables in "
                "it: call model(x) instead of module.apply(variables, x)"
            )
            raise said.with_traceback(error.__traceback__) from None
        except flax.errors.TraceContextError as error:
            said = TypeError(
                f"the loss changes an object of the script, outside of the model ({error}). Random streams and "
                "metrics that a step changes belong in the model: self.rngs = nnx.Rngs(0), self.metrics = "
                "nnx.MultiMetric(...), both used as attributes of the model that the loss gets; or return what is measured, "
                'loss, {"logits": logits}'
            )
            raise said.with_traceback(error.__traceback__) from None
        except Exception as error:
            if "should match the mesh passed to shard_map" in str(error):
                said = ValueError(
                    "the code of the model or of the loss calls jax.shard_map, but it already runs inside this plan's own "
                    "shard_map, on one rank's rows: call the mapped function directly where no such mesh is set, or train "
                    "this model by XLA's partitioner alone, in your own loop (ax.place). JAX "
                    f"says: {error}"
                )
                raise said.with_traceback(error.__traceback__) from None
            if note := several_batches(batch):
                error.add_note(note)
            if note := of_arrays(self.loss_fn):
                error.add_note(note)
            if isinstance(error, jax.errors.JAXTypeError):
                error.add_note(TRACED)
            raise

    def trained_read(self, read: Variables, key: jax.Array, batch: PyTree) -> set[str]:
        """Paths of trained parameters, as read, on which the loss depends in its trace, but through `stop_gradient`."""
        of = lambda params: self(replace(read, params=params), key, batch)[0].total
        from axonml_jax.program.program import reached, read_program

        program = read_program(trace(of, read.params).jaxpr)
        reaching = reached(program, program.outputs)
        return {
            name for name, number in zip(named_leaves(read.params), program.inputs, strict=True) if number in reaching
        }

    def refuse_unread(self, total: jax.Array, by: PyTree, read: Variables, key: jax.Array, batch: PyTree) -> None:
        """Refuse to train by a loss that nothing trained reaches, while it is traced.

        Args:
          total: the loss.
          by: what it is differentiated by.
          read: the variables as read.

        Raises:
          ValueError: where the traced program shows it.
        """
        if self.trains and not traced_with(total, by) and not self.trained_read(read, key, batch):
            raise ValueError(UNREAD)

    def differentiable(self, parts: Parts, frozen: PyTree) -> Callable:
        """The loss as a function of the parameters that JAX differentiates.

        Args:
          parts: how each part's loss is made smaller or larger, so that gradients need only be summed.
          frozen: the frozen parameters as read.

        Returns:
          `f(params, state, key, batch) -> (scalar, (Loss, state))`.
        """

        return partial(self._part, frozen=frozen, parts=parts)

    def differentiable_with_frozen(self, parts: Parts) -> Callable:
        """`differentiable` with the read frozen parameters as an argument: `f(params, frozen, state, key, batch)`."""
        return lambda params, frozen, *args: self._part(params, *args, frozen=frozen, parts=parts)

    def _part(self, params: PyTree, state: PyTree, key: jax.Array, batch: PyTree, *, frozen: PyTree, parts: Parts):
        before = Variables(params, frozen, state)
        loss, state = self(before, key, batch)
        self.refuse_unread(loss.total, params, before, key, batch)
        total = loss.total / parts.count if loss.weight is None else loss.total
        return (total if parts.scale is None else total * parts.scale), (loss, state)


NO_SCALE = (
    "a loss that takes two sweeps over the microbatches cannot be combined with float16 loss scaling: use "
    'precision="bf16", or take all rows at once (accumulate=1, num_microbatches=1)'
)


def shard_key(key: jax.Array, microbatch: int | jax.Array, shard: int | jax.Array) -> jax.Array:
    """The random key of one microbatch on one batch shard: masks differ per shard, so they depend on its degree."""
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), shard)


def part_keys(placement: Placement, key: jax.Array, rows: PyTree, count: int) -> list[jax.Array]:
    """The random keys of this rank's microbatches under `draws="rows"`: rows draw what they would draw on one device.

    Args:
      placement: the plan on its mesh.
      key: the step's.
      rows: all of this rank's rows.
      count: the number of microbatches.
    """
    from axonml_jax.compat.row_keys import row_key

    axes, whole = placement.batch_layout.rows, shard_key(key, 0, 0)
    if (parts := placement.ranks(axes) * count) == 1:
        return [whole]
    rank = axis_index(axes) if axes else 0
    own = next(jnp.shape(x)[0] for x in jax.tree.leaves(rows) if jnp.ndim(x)) // count
    return [row_key(whole, rank * count + number, own, parts) for number in range(count)]


def _in_its_dtype(after: Any, before: Any) -> Any:
    """A leaf of the model's state, not in fewer bits than it had: code may write what it computes in 16 bits."""
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (after, before))
    return after.astype(before.dtype) if floats and after.dtype.itemsize < before.dtype.itemsize else after


def with_leaves(state: PyTree, changed: Mapping[str, Any]) -> PyTree:
    """The model's state with other values for some of its leaves, by their names."""
    if not changed:
        return state
    return jax.tree_util.tree_map_with_path(lambda path, x: changed.get(path_name(path), x), state)


def begun_anew(state: PyTree, start: PyTree, once: Collection[str]) -> PyTree:
    """The model's state before a microbatch: what moves once a step (`once`, by name) is as it was at the step's start."""
    if not once:
        return state
    return jax.tree_util.tree_map_with_path(
        lambda path, x, first: first if path_name(path) in once else x, state, start
    )


def refuse_written(
    names: list[str], runs: Iterable[tuple[Callable, PyTree]], variables: Variables, key: jax.Array
) -> None:
    """Refuse a loss whose code, or the model's, writes into parameters: a step would drop that.

    Args:
      names: parameters that are other arrays after the call.
      runs: `run(variables, key, batch)`, with its batch: the trace of the first that can be traced tells what is really
        written, as loops and `jax.checkpoint` hand unchanged values on as new arrays.

    Raises:
      ValueError: naming every parameter, and the remedy.
    """
    params = named_leaves(merge(variables.params, variables.frozen))

    def after(run: Callable, batch: PyTree, leaves: list[Any]) -> list[Any]:
        given = jax.tree.unflatten(jax.tree.structure(merge(variables.params, variables.frozen)), leaves)
        with noting_written() as written:
            run(replace(variables, params=given, frozen={}), key, batch)
        return [written.found.get(name, leaf) for name, leaf in zip(params, leaves, strict=True)]

    really = names
    for run, batch in runs:
        try:
            ends = _handed_on(partial(after, run, batch), list(params.values()))
        except Exception:  # such as the five largest of four rows
            continue
        really = [name for k, (name, end) in enumerate(zip(params, ends, strict=True)) if end != k and name in names]
        break
    if not really:
        return
    raise ValueError(
        f"the model or the loss writes into parameters, and a step would drop what it writes: {', '.join(really)}. Only the "
        "optimizer changes parameters. Make what follows other parameters, such as a target network, state by "
        "ax.as_state(model.target) before the model is wrapped. For weights that are normalized (nnx.WeightNorm, "
        "nnx.SpectralNorm) or limited, compute with the new array without writing it back, or limit them in the optimizer"
    )


def _handed_on(fun: Callable[[Any], Any], given: PyTree) -> list[int | None]:
    """For each result of a function the argument leaf that it is, unchanged; None where it is computed."""
    from axonml_jax.program.program import is_constant, read_program
    from axonml_jax.program.values import nested

    program = read_program(trace(fun, given).jaxpr)
    whole = nested(program)
    places = {value: k for k, value in enumerate(whole.top.of(program.inputs))}

    def origin(atom: Any) -> Any:
        order: tuple[int, ...] | None = None
        while (node := whole.maker(atom := whole.handed_on(atom))) is not None and node.name == "transpose":
            swapped = tuple(node.equation.op.options["permutation"])
            order = swapped if order is None else tuple(swapped[k] for k in order if k < len(swapped))
            (atom,) = node.inputs
        return atom if order is None or order == tuple(range(len(order))) else None

    ends = [origin(atom) for atom in whole.results]
    return [None if end is None or is_constant(end) else places.get(end) for end in ends]


def refuse_moved(model: Functional, before: PyTree, after: PyTree, again: Callable[[PyTree], PyTree]) -> None:
    """Refuse an evaluation that changes statistics of batches: its figures would depend on what else is in the batch.

    Args:
      model: whose state it is.
      before, after: its state, while the evaluation is traced.
      again: maps the state before to the state after; it is traced where arrays differ, as loops and `jax.checkpoint` hand
        unchanged values on as new arrays.

    Raises:
      ValueError: naming every statistic that changes, and the remedy.
    """
    statistic, old, new = model.batch_statistics(), named_leaves(before), named_leaves(after)
    moved = [name for name, leaf in new.items() if statistic(name) and leaf is not old[name]]
    if moved:
        ends = dict(zip(old, enumerate(_handed_on(again, before)), strict=True))
        moved = [name for name in moved if ends[name][0] != ends[name][1]]
    if moved:
        raise ValueError(
            "evaluation changes these batch statistics, so a module runs in training mode in it: "
            f"{', '.join(moved)}. For a Linen module whose call takes `train`, let the loss call "
            "model(x, train=model.is_training); an NNX module's eval() takes effect where no call gives "
            "use_running_average=False"
        )


# --------------------------------------------------------------------------------------------------
# The interface of every gradient engine.
# --------------------------------------------------------------------------------------------------


class Differentiated(NamedTuple):
    """The result of an engine's differentiation on one rank, before anything is divided.

    Attributes:
      grads: gradients of the resting parameters, summed over ranks and microbatches, in the dtype in which they accumulate.
      losses: this rank's, with a dim 0 of microbatches, or of one that is their sum.
      state: the model's state after the last microbatch.
      left_out: the residual: what rounding left out of this rank's gradients in the sums, where the plan feeds it back.
      finish: what is done with the losses' sums over ranks (`Objective.finish`); None: nothing.
    """

    grads: PyTree
    losses: Loss
    state: PyTree
    left_out: PyTree = None
    finish: Callable | None = None


@dataclass(frozen=True, eq=False)
class GradientEngine(abc.ABC):
    """An engine that differentiates the loss of all microbatches of a step, inside `shard_map`.

    Attributes:
      objective: the loss of one microbatch.
      placement: how parameters are read and gradients reduced.
      parts: what a microbatch's loss is divided by, and the loss scale.
      sync: False leaves gradients each rank's own.
      left_out: the residual of the last step's sums, which is added to this rank's gradients; None: nothing is fed back.
    """

    objective: Objective
    placement: Placement
    parts: Parts
    sync: bool
    left_out: PyTree = None

    @property
    def feedback(self) -> Feedback | None:
        """The lossy sums whose rounding error is fed back; None where there is no residual to start from."""
        precision = self.placement.plan.precision
        return None if self.left_out is None else Feedback.of(self.placement.strategies, precision)

    @abc.abstractmethod
    def differentiate(self, variables: Variables, key: jax.Array, batch: PyTree) -> Differentiated:
        """Differentiates the loss of this rank's rows; takes resting variables and the step's randomness."""
