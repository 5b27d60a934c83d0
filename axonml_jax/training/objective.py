"""The user's loss as a pure function of what one rank reads, for one microbatch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import flax.errors
import jax

from axonml_jax._types import LossFn, PyTree, named_leaves
from axonml_jax.compat.jaxpr import trace
from axonml_jax.model.functional import Functional, Mode, Variables
from axonml_jax.model.loss import Loss, parse_loss
from axonml_jax.parallel.adapted import reading_adapted
from axonml_jax.parallel.float8.reading_float8 import reading_float8
from axonml_jax.program.nested import nested
from axonml_jax.program.program import read_program
from axonml_jax.sharding.check_batch import several_batches


@dataclass(frozen=True)
class Parts:
    """The parts of a step that are differentiated one by one.

    Attributes:
      count: number of (rank, microbatch) parts over which a plain mean is taken; each part's loss is divided by it. A
        WeightedMean is divided by its total weight after the sum.
      scale: the loss scale, or None.
    """

    count: int
    scale: jax.Array | None = None


@dataclass(frozen=True)
class Objective:
    """`loss_fn` on a model, without side effects.

    Attributes:
      model: the model.
      loss_fn: the user's.
      mode: how the model runs.
      positions: the mesh axes that split positions: a loss must then say over which it is a mean.
      inside: entered around the model's code while it is traced (see `Placement.inside`).
      rewritten: what is traced in its place (see `Placement.rewritten`).
    """

    model: Functional
    loss_fn: LossFn
    mode: Mode
    positions: tuple[str, ...] = ()
    inside: Callable[[], AbstractContextManager] = nullcontext
    rewritten: Callable[[Callable], Callable] = lambda fun: fun

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn={self.loss_fn!r} cannot be called: give a function loss_fn(model, batch) -> loss")

    def __call__(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        """The loss of one microbatch on one rank, and the model's state after it."""
        adapted = partial(reading_adapted, self.rewritten(self._of), self.model)
        return reading_float8(adapted, self.mode.precision, variables, key, batch)

    def _of(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        loss, state = self._called(variables, key, batch)
        if self.mode.training is False:
            again = lambda state: self._called(replace(variables, state=state), key, batch)[1]
            refuse_moved(self.model, variables.state, state, again)
        return loss, state

    def _called(self, variables: Variables, key: jax.Array, batch: PyTree) -> tuple[Loss, PyTree]:
        with self.inside():
            bound = self.model.bind(variables, key, self.mode)
            try:
                found = self.loss_fn(bound, batch)
            except flax.errors.ApplyScopeInvalidVariablesTypeError as error:
                said = TypeError(
                    "the loss gave module.apply something else than variables. A loss gets the model with its variables in it: "
                    "call it, model(x), in the place of module.apply(variables, x)"
                )
                raise said.with_traceback(error.__traceback__) from None
            except Exception as error:
                if note := several_batches(batch):
                    error.add_note(note)
                raise
            loss = parse_loss(found, self.positions)
            return loss, self.model.state_of(bound)

    def differentiable(self, parts: Parts, frozen: PyTree) -> Callable:
        """The loss as JAX differentiates it.

        Args:
          parts: how each part's loss is made smaller or larger, so that gradients need only be summed.
          frozen: the frozen parameters as read.

        Returns:
          `f(params, state, key, batch) -> (scalar, (Loss, state))`.
        """

        return lambda params, *args: self._part(params, frozen, *args, parts=parts)

    def differentiable_with_frozen(self, parts: Parts) -> Callable:
        """`differentiable` of read frozen parameters too: `f(params, frozen, state, key, batch)`."""
        return lambda *args: self._part(*args, parts=parts)

    def _part(self, params: PyTree, frozen: PyTree, state: PyTree, key: jax.Array, batch: PyTree, *, parts: Parts):
        loss, state = self(Variables(params, frozen, state), key, batch)
        total = loss.total / parts.count if loss.weight is None else loss.total
        return (total if parts.scale is None else total * parts.scale), (loss, state)


def shard_key(key: jax.Array, microbatch: int | jax.Array, shard: int | jax.Array) -> jax.Array:
    """The randomness of one microbatch on one batch shard: masks differ per shard, so they depend on its degree."""
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), shard)


def refuse_moved(model: Functional, before: PyTree, after: PyTree, again: Callable[[PyTree], PyTree]) -> None:
    """Refuse an evaluation that changes statistics of batches: its figures would depend on what else is in the batch.

    Args:
      model: whose state it is.
      before, after: its state, while the evaluation is traced.
      again: the state after, of a state before: traced where loops and `jax.checkpoint` hand values on as new ones.

    Raises:
      ValueError: naming every statistic that changes, and the remedy.
    """
    statistic, old, new = model.batch_statistics(), named_leaves(before), named_leaves(after)
    moved = [name for name, leaf in new.items() if statistic(name) and leaf is not old[name]]
    if moved:
        program = read_program(trace(again, before).jaxpr)
        whole = nested(program)
        ends = dict(zip(old, zip(whole.top.of(program.inputs), whole.results, strict=True), strict=True))
        moved = [name for name in moved if whole.handed_on(ends[name][1]) != ends[name][0]]
    if moved:
        raise ValueError(
            "evaluation changes these statistics of batches, so a module in it runs in training mode: "
            f"{', '.join(moved)}. Let the loss say which it is, model(x, train=model.is_training) of a Linen module whose call "
            "takes `train`; an NNX module's eval() sees to it where no call gives use_running_average=False"
        )
