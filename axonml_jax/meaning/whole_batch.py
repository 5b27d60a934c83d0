"""`WholeBatch`: computes the user's loss of the whole batch from one rank's rows, all at once or in microbatches."""

# What a rule says of places holds types apart, which the checker does not see.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax.base import LossFn, PyTree, path_name
from axonml_jax.collectives.primitives import axis_index
from axonml_jax.meaning.asked import Asked, SplitOf, Traced
from axonml_jax.meaning.deciding import (
    MIXED,
    ROWS,
    UNPLACED,
    Decided,
    decided,
    in_microbatches,
    mixes,
    refuse_draws,
    unknown,
)
from axonml_jax.meaning.interpreter import Interpreter
from axonml_jax.meaning.microbatches import OF_PARTS, Microbatch, MicroRanks, OfParts
from axonml_jax.meaning.model_call import Path, RealCalls, Unclear, put_variables
from axonml_jax.meaning.places import Group, Places
from axonml_jax.meaning.plain_mean import talks
from axonml_jax.meaning.two_sweeps import (
    Recording,
    calls_of,
    finished,
    first_only,
    of_all_rows,
    of_variables,
    read_beside,
    second,
)
from axonml_jax.meaning.values import Ranks, Value
from axonml_jax.model.loss import Loss, WeightedMean, of_batch, per_weight
from axonml_jax.model.view import Functional, Mode, Variables
from axonml_jax.program.program import Atom


@dataclass(frozen=True)
class MixingRows:
    """A loss with the bytes that it may gather, and whether it may take two sweeps (`mixing_rows`)."""

    loss_fn: LossFn
    most_bytes: int | None
    two_sweeps: bool = False

    def __call__(self, model: Any, batch: PyTree) -> Any:
        """Calls the loss."""
        return self.loss_fn(model, batch)


def mixing_rows(loss_fn: LossFn, *, most_bytes: int | None = None, two_sweeps: bool = False) -> LossFn:
    """Allows a loss to gather more of other ranks' rows than a step allows by itself, or all rows out of microbatches.

    A loss means the whole batch. What its code mixes without reducing it, such as `z @ z.T` or a sort over the batch, needs
    rows that other ranks have: they are gathered, and the ledger says what that sends. A step refuses a loss that gathers more
    than the bytes of the model's trained parameters (or 16 MiB, where these are fewer), as that is mostly not meant.

    Args:
      loss_fn: the loss.
      most_bytes: what a rank may receive in one step; None: any number.
      two_sweeps: in microbatches (`accumulate`, pipelines) a loss that is no function of sums over rows, such as a contrastive
        one, is refused without it. With it the model runs once more: a first sweep keeps what its calls return in all
        microbatches, the loss is taken of all rows, and a second sweep hands each microbatch the gradients of its results
        (GradCache, Gao et al. 2021). It costs one more forward, and memory for these results; a loss of sums takes one sweep.

    Raises:
      ValueError: for a number that is none or negative, or a `two_sweeps` that is no bool.
    """
    if not isinstance(two_sweeps, bool):
        raise ValueError(f"two_sweeps={two_sweeps!r} must be True or False")
    if most_bytes is not None and (isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 0):
        raise ValueError(f"most_bytes={most_bytes!r} must be a number of bytes, or None for any number")
    return MixingRows(of_batch(loss_fn), most_bytes, two_sweeps)


Finish = Callable[[jax.Array, dict[str, jax.Array]], tuple]
"""`finish(loss, metrics) -> (loss, metrics, slope)` of what microbatches and ranks summed."""


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """Computes a user's loss of the whole batch on each rank, from this rank's rows.

    Attributes:
      group: the ranks among which the batch's rows are split.
      split: the mesh axes that split each dim of a leaf of the batch.
      most_gathered: how many bytes a rank may receive of rows that operations mix; None: any number.
      two_sweeps: whether a loss may take two sweeps over microbatches.
      in_layers: the model's layers split their own parameters: its code is not followed, only called.
      positions: the ranks among which positions are split, or None.
      seeing_whole: entered where the loss's code sees whole sequences.
      apart: the mesh axes along which ranks have batches of their own.
      trains: the loss is refused where nothing that is trained reaches it.
    """

    group: Group
    split: SplitOf
    most_gathered: int | None = None
    two_sweeps: bool = False
    in_layers: bool = False
    positions: Group | None = None
    seeing_whole: Callable[[], AbstractContextManager] = nullcontext
    apart: tuple[str, ...] = ()
    trains: bool = False
    _decided: dict[Any, Decided | str] = field(default_factory=dict)
    _once: dict[Any, frozenset[str]] = field(default_factory=dict)

    def __call__(
        self,
        model: Functional,
        loss_fn: LossFn,
        mode: Mode,
        variables: Variables,
        key: jax.Array,
        batch: PyTree,
        on_rows: Callable[[PyTree], tuple[Loss, PyTree]],
    ) -> tuple[Loss, PyTree]:
        """Computes the loss, as summands whose sum over ranks is the whole batch's, and the model's state after it.

        Args:
          model, loss_fn, mode: the user's model and loss, and how the model is bound.
          variables, key: the model's variables as a rank reads them, and its random key.
          batch: this rank's rows, or a `Microbatch`.
          on_rows: the loss of some rows alone, whose mean is the loss where that is proven, or where the loss has collectives
            of its own.

        Raises:
          ValueError: where the loss mixes too many rows, naming the operations and lines.
        """
        if isinstance(batch, Microbatch):
            return self._of_microbatch(
                self._asked(batch.count, model, loss_fn, mode, variables, key, batch.rows), batch
            )
        there = [group for group in (self.group, self.positions) if group is not None]
        groups = tuple(group for group in there if group.ranks > 1)
        if not groups:
            return on_rows(batch)
        alone = self.apart + tuple(axis for group in there if group.ranks == 1 for axis in group.axes)
        asked = Asked(groups, self.split, model, loss_fn, mode, variables, key, batch, self.seeing_whole, alone)
        decided = self._decide(asked)
        if decided == ROWS:
            return on_rows(batch)
        ranks = Ranks(groups, self.most_gathered, alone)
        why = UNPLACED if isinstance(decided, Decided) else decided
        if isinstance(decided, Decided):
            try:
                return self._run(asked, decided, ranks)
            except Unclear:
                pass
        return self._inlined(asked, ranks, on_rows, why)

    def _group(self, count: int) -> Group:
        """The group of all microbatches of all ranks."""
        return Group(self.group.axes, self.group.ranks * count)

    @property
    def _among_positions(self) -> tuple[Group, ...]:
        return () if self.positions is None or self.positions.ranks == 1 else (self.positions,)

    @property
    def _alone(self) -> tuple[str, ...]:
        """The mesh axes that split nothing of this loss: ranks with batches of their own, and positions of one rank."""
        return self.apart + (() if self.positions is None or self._among_positions else self.positions.axes)

    def _asked(self, count: int, *of: Any) -> Asked:
        """The `Asked` of a loss in microbatches, `count` of them on each rank."""
        return Asked((self._group(count), *self._among_positions), self.split, *of, self.seeing_whole, self._alone)

    def _decide(self, asked: Asked, *, inlines: bool = True) -> Decided | str:
        """Decides how the loss is run, once for each set of shapes."""
        if (key := (asked.groups, asked.signature)) not in self._decided:
            traced = cache(asked.traced)
            found = decided(asked, traced, in_layers=self.in_layers, trains=self.trains, inlines=inlines)
            if found == MIXED and talks(asked.inlined((), run=True).program, asked.axes):
                mixes(asked, traced, inlines=False)  # which says so
                found = ROWS
            refuse_draws(asked, found)
            if jax.tree.leaves(asked.variables.state) and (found == ROWS or isinstance(found, Decided)):
                from axonml_jax.meaning.own_state import moved_once, warn_of_state

                warn_of_state(asked, traced, in_loss=found == ROWS)
                if not inlines:
                    by_loss = found.whole.changed if isinstance(found, Decided) else ()
                    self._once[key] = moved_once(asked, traced, by_loss)
            if isinstance(found, Decided) and any(
                isinstance(x, jax.core.Tracer) for x in found.whole.program.constants.values()
            ):
                return found  # of the trace around it
            self._decided[key] = found
        return self._decided[key]

    def _run(self, asked: Asked, decided: Decided, ranks: Ranks) -> tuple[Loss, PyTree]:
        bound, whole = asked.model.bind(asked.variables, asked.key, asked.mode), decided.whole
        calls = RealCalls(bound, whole.noted, decided.noted, ranks.groups)
        values = _values(ranks, asked, whole)
        loss, changed = whole.out_tree.unflatten(Interpreter(ranks, calls).run(whole.program, values))
        settled = [ranks.settled(x, ranks.none) for x in changed]
        put_variables(bound, dict(zip(whole.changed, settled, strict=True)))
        return _as_sums(loss, ranks), _added_once(asked, asked.model.state_of(bound), settled)

    def _inlined(self, asked: Asked, ranks: Ranks, on_rows: Callable, why: str) -> tuple[Loss, PyTree]:
        """Runs the loss with the model's own code in its program, where the loss differentiates or maps the model."""
        if self.in_layers or self.positions is not None:
            raise unknown(why)
        whole = asked.inlined((), run=True)
        if talks(whole.program, asked.axes):
            return on_rows(asked.batch)
        values = _values(ranks, asked, whole)
        loss, state = whole.out_tree.unflatten(Interpreter(ranks).run(whole.program, values))
        treedef = jax.tree.structure(asked.variables.state)
        settled = [ranks.settled(x, ranks.none) for x in state]
        return _as_sums(loss, ranks), _added_once(asked, treedef.unflatten(settled), settled)

    # Microbatches

    def microbatches(self, asked_of: tuple, rows: PyTree, batches: PyTree) -> tuple[PyTree, frozenset[str]]:
        """Stacks a rank's microbatches, with the values of the whole batch that they need beforehand.

        Args:
          asked_of: the model, the loss, the mode, and shapes of the variables as read and of a key.
          rows: all of this rank's rows.
          batches: the same as microbatches, stacked.

        Returns:
          A `Microbatch` of stacked leaves; or `batches` itself, where the loss of each microbatch's rows alone is right. And
          the names of the model's state that all of them begin with as the step does (`own_state.moved_once`).

        Raises:
          ValueError: where the loss needs more than sums of what depends on the model, naming the operation and the line.
        """
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        count = jax.tree.leaves(batches)[0].shape[0]
        asked = self._asked(count, *asked_of, own)
        decided = self._decide(asked, inlines=False)
        once = self._once.get((asked.groups, asked.signature), frozenset())
        if decided == ROWS:
            return batches, once
        if not isinstance(decided, Decided):
            raise unknown(decided)
        try:
            decided = in_microbatches(asked, decided, two_sweeps=self.two_sweeps)
        except Unclear:
            why = " (the error above says why)" if decided.failed is not None else ""
            raise ValueError(
                f"it is not known what the loss's calls of the model return for a microbatch's rows alone{why}, as the loss "
                "gives them other rows, or other sizes, than it is given: take all rows at once (accumulate=1, "
                "num_microbatches=1)"
            ) from decided.failed
        groups = (self.group, *self._among_positions)
        ranks, known = Ranks(groups, self.most_gathered, self._alone), []
        if early := decided.division.early:
            values = _values(ranks, self._on_rank(replace(asked, batch=rows, groups=groups)), decided.whole)
            made = Interpreter(ranks).run(decided.whole.program, values, wanted=early)
            known = [ranks.settled(value, ranks.none) for value in made]
        repeated = [jnp.broadcast_to(x, (count, *x.shape)) for x in known]
        return Microbatch(batches, repeated, jnp.arange(count), decided, count), once

    def _of_microbatch(self, asked: Asked, batch: Microbatch) -> tuple[Loss, PyTree]:
        """The summands of one microbatch; late sums are among the metrics."""
        if batch.swept is not None:
            return self._second(asked, batch)
        decided, bound = batch.plan, asked.model.bind(asked.variables, asked.key, asked.mode)
        ranks, whole = MicroRanks(asked.groups, batch.count, batch.number, self._alone), decided.whole
        known = {number: ranks.known(x) for number, x in zip(decided.division.early, batch.known, strict=True)}
        calls = RealCalls(bound, whole.noted, decided.noted, ranks.groups)
        values, extremes = _values(ranks, asked, whole), decided.extremes
        made = iter(OfParts(ranks, calls, extremes).run(whole.program, values, known, wanted=decided.outputs))
        found = [None if decided.is_after(atom) else next(made) for atom in whole.program.outputs]
        loss, changed = whole.out_tree.unflatten(found)
        late = dict(zip(decided.division.late, made, strict=True))
        one = ranks.known(jnp.ones((), jnp.float32))
        metrics = {
            name: each for name, each in loss.metrics.items() if each.total is not None and each.weight is not None
        }
        metrics |= {f"{LATE}{number}": WeightedMean(value, one) for number, value in late.items()}
        total = loss.total if decided.slope is None else late[decided.slope]
        if of_rows := [path for path, x in zip(whole.changed, changed, strict=True) if x.places[0] is not None]:
            raise state_of_rows(of_rows)
        settled = [ranks.settled(x, ranks.none) for x in changed]
        put_variables(bound, dict(zip(whole.changed, settled, strict=True)))
        state = _added_once(asked, asked.model.state_of(bound), settled)
        return _as_sums(Loss(total, loss.weight, metrics), ranks), state

    # Two sweeps

    def results(
        self, model: Functional, loss_fn: LossFn, mode: Mode, variables: Variables, key: jax.Array, batch: Microbatch
    ) -> tuple[list[jax.Array], PyTree]:
        """The first sweep on one microbatch: results of the model's calls, other values that the loss reads, and the state."""
        asked = self._asked(batch.count, model, loss_fn, mode, variables, key, batch.rows)
        arrays, state, _ = self._results(asked, batch)
        return [*arrays, *self._beside(asked, batch).values()], state

    def _beside(self, asked: Asked, batch: Microbatch) -> dict[int, jax.Array]:
        leaves, whole = asked.leaves, batch.plan.whole
        loss, _ = whole.out_tree.unflatten(list(whole.program.outputs))
        wanted = [*jax.tree.leaves(loss), *self._changes(asked, batch.plan)[1].values()]
        return {k: leaves[k] for k in read_beside(whole.program, wanted, len(jax.tree.leaves(asked.variables)))}

    @staticmethod
    def _changes(asked: Asked, decided: Decided) -> tuple[dict[Path, Atom], dict[Path, Atom]]:
        """What the loss itself changes of the state: what it makes of variables alone, and what it makes of rows too."""
        whole = decided.whole
        fixed = len(jax.tree.leaves(asked.variables))
        found = zip(whole.changed, whole.out_tree.unflatten(list(whole.program.outputs))[1], strict=True)
        parts: tuple[dict[Path, Atom], dict[Path, Atom]] = {}, {}
        for path, atom in found:
            parts[not of_variables(whole.program, atom, fixed)][path] = atom
        return parts

    def _results(self, asked: Asked, batch: Microbatch) -> tuple[list[jax.Array], PyTree, MicroRanks]:
        decided, bound = batch.plan, asked.model.bind(asked.variables, asked.key, asked.mode)
        ranks, whole = MicroRanks(asked.groups, batch.count, batch.number, self._alone), decided.whole
        known = {number: ranks.known(x) for number, x in zip(decided.division.early, batch.known, strict=True)}
        calls = Recording(bound, whole.noted, decided.noted, ranks.groups)
        values, (own, _) = _values(ranks, asked, whole), self._changes(asked, decided)
        wanted = calls_of(whole.program)
        made = Interpreter(ranks, calls).run(whole.program, values, known, wanted=[*wanted, *own.values()])
        settled = [ranks.settled(x, ranks.none) for x in made[len(wanted) :]]
        put_variables(bound, dict(zip(own, settled, strict=True)))
        return calls.arrays, asked.model.state_of(bound), ranks

    def of_all_rows(
        self, asked_of: tuple, rows: PyTree, results: list[jax.Array], batches: Microbatch
    ) -> tuple[Microbatch, dict[str, jax.Array]]:
        """Computes the loss of all rows, and adds its gradients to the microbatches for the second sweep.

        Args:
          asked_of: the model, the loss, the mode, the variables' shapes and a key.
          rows: all of this rank's rows.
          results: the results of the first sweep, stacked.
          batches: what `microbatches` returned.

        Returns:
          The microbatches; and what the loss makes of all rows for the model's own state, by its names.
        """
        groups, decided = (self.group, *self._among_positions), batches.plan
        asked = self._on_rank(Asked(groups, self.split, *asked_of, rows, self.seeing_whole, self._alone))
        ranks, program = Ranks(groups, self.most_gathered, self._alone), decided.whole.program
        calls = RealCalls(None, decided.whole.noted, decided.noted, (self._group(batches.count), *groups[1:]))
        places = [each for k in range(len(calls.whole)) for each in calls.places(k)]
        shares = [each for k in range(len(calls.whole)) for each in calls.shares(k)]
        number = len(places)
        beside = {k: x[0] for k, x in zip(self._beside(asked, batches), results[number:], strict=True)}
        _, changes = self._changes(asked, decided)
        wanted = decided.whole.out_tree.unflatten(list(program.outputs))[0], list(changes.values())
        values = _values(ranks, asked, decided.whole)
        swept, made = of_all_rows(program, wanted, values, beside, results[:number], places, shares, ranks)
        each = lambda x: jnp.broadcast_to(x, (batches.count, *x.shape))
        stacked = replace(swept, read=list(map(each, swept.read)), loss=jax.tree.map(each, swept.loss))
        names = ["/".join(map(str, path)) for path in changes]
        return replace(batches, swept=stacked), dict(zip(names, made, strict=True))

    def _on_rank(self, asked: Asked) -> Asked:
        """The same on a rank's rows, which are not split by rows where there is one rank."""
        if self.group.ranks > 1:
            return asked
        along = {group.axes for group in self._among_positions}
        split = lambda path, shape: {dim: axes for dim, axes in self.split(path, shape).items() if axes in along}
        return replace(asked, split=split)

    def _second(self, asked: Asked, batch: Microbatch) -> tuple[Loss, PyTree]:
        """The second sweep on one microbatch: the scalar to differentiate; the loss itself is among the first one's metrics."""
        arrays, state, ranks = self._results(asked, batch)
        total = second(batch.swept, batch.number, arrays, list(self._beside(asked, batch).values()))
        one = ranks.rows_as_sum(ranks.known(jnp.ones((), jnp.float32)))
        metrics = first_only(batch.swept.loss, batch.number, one, LATE, LATE_WEIGHT)
        return Loss(total * ranks.groups[0].ranks, None, metrics), state

    def loss_of(self, batches: Microbatch) -> Loss:
        """The loss of all rows after a first sweep, as a summand of the sum over ranks."""
        loss = jax.tree.map(lambda x: x[0], batches.swept.loss)
        return loss if loss.weight is not None else loss._replace(total=loss.total * self.group.ranks)

    def finish(self, batches: Any) -> Finish | None:
        """The function of loss and metrics after all microbatches and ranks; None: there is none.

        Args:
          batches: what `microbatches` returned.
        """
        decided = batches.plan if isinstance(batches, Microbatch) else ROWS
        if decided != ROWS and decided.sweeps:
            return lambda loss, metrics: finished(metrics, LATE, LATE_WEIGHT)
        return partial(self._finished, decided, batches.known) if decided != ROWS and decided.division.late else None

    def _finished(
        self, decided: Decided, early: list[jax.Array], loss: jax.Array, metrics: dict, weights: dict | None = None
    ) -> tuple:
        """The loss, all metrics, and the factor of gradients; None: they are the loss's own.

        Weights of metrics that are made here are put into `weights`.
        """
        ranks, program = Ranks((self.group,)), decided.whole.program
        sums = {number: metrics[f"{LATE}{number}"] for number in decided.division.late}
        sums |= {each.outputs[0]: OF_PARTS[each.name](sums[each.outputs[0]], axis=0) for each in decided.extremes}
        sums = {number: x.astype(program.avals[number].dtype) for number, x in sums.items()}
        fixed = {n: ranks.known(x[0]) for n, x in zip(decided.division.early, early, strict=True)}
        values = [Value(aval.shape, aval.dtype, ranks.none, unread) for aval in map(program.avals.get, program.inputs)]

        def of(atoms: Sequence[Atom], sums: dict[int, jax.Array]) -> list[jax.Array]:
            known = fixed | {number: ranks.known(x) for number, x in sums.items()}
            return [value.array for value in Interpreter(ranks).run(program, values, known, wanted=atoms)]

        later, _ = decided.whole.out_tree.unflatten(list(program.outputs))
        kept = {name: value for name, value in metrics.items() if not name.startswith(LATE)}
        for name in later.metrics.keys() - kept.keys():
            metric = later.metrics[name]
            total, weight = of((metric.total, metric.weight), sums)
            kept[name] = ranks.unvaried(per_weight(total, weight))
            if weights is not None:
                weights[name] = ranks.unvaried(weight)
        if decided.slope is None:
            return loss, kept, None
        of_sum = lambda x: of((later.total,), sums | {decided.slope: x})[0]
        value, slope = jax.value_and_grad(of_sum)(ranks.vary(loss))
        return ranks.unvaried(value), kept, ranks.unvaried(slope)


def _added_once(asked: Asked, state: PyTree, whole: Sequence[jax.Array]) -> PyTree:
    """The state in which the first rank alone adds to a declared sum what is the whole batch's already (`whole`).

    Ranks add up what each of them has added to such a leaf.
    """
    joins, done = asked.model.state_joins(), {id(x) for x in whole}

    def own(path: Any, before: Any, leaf: jax.Array) -> jax.Array:
        if joins.get(path_name(path)) != "sum" or id(leaf) not in done:
            return leaf
        return jnp.where(axis_index(asked.axes) == 0, leaf, before)

    return jax.tree_util.tree_map_with_path(own, asked.variables.state, state)


def state_of_rows(paths: Sequence[Path]) -> ValueError:
    """The error for a loss that changes the model's state, in microbatches, by what it makes of rows."""
    names = ", ".join("/".join(map(str, path)) for path in paths)
    return ValueError(
        f"the loss itself changes the model's state by rows of the batch, of which a microbatch has a part: {names}. Return "
        'it as a metric (loss, {"accuracy": correct.mean()}), change it in the model\'s own code, take all rows at once '
        "(accumulate=1, num_microbatches=1), or allow one more forward pass that keeps the model's results "
        "(ax.mixing_rows(loss_fn, two_sweeps=True))"
    )


LATE, LATE_WEIGHT = "axonml late sum ", "axonml late sum weight"


def _values(ranks: Ranks, asked: Asked, traced: Traced) -> list[Value]:
    """This rank's parts of a program's inputs."""
    numbers = zip(asked.leaves, asked.places(), traced.program.inputs, strict=True)
    return [_held(ranks, x, places, traced.program.avals[number].shape) for x, places, number in numbers]


def _held(ranks: Ranks, x: Any, places: Places, shape: tuple[int, ...]) -> Value:
    if isinstance(x, jax.ShapeDtypeStruct):  # of the model, before it is there
        return Value(shape, x.dtype, places, unread)
    return ranks.held(jnp.asarray(x), places, shape)


def unread(places: Places) -> Any:
    """Refuse to read the model or rows before or after all microbatches, where they are not there."""
    raise AssertionError("a value of the model or of rows was read where it is not there")


def _as_sums(loss: Loss, ranks: Ranks) -> Loss:
    """A loss of values as summands that a step sums over ranks and divides once."""
    total = ranks.rows_as_sum(loss.total)
    parts = math.prod(group.ranks for group in ranks.groups if not group.positions)
    metrics = {
        name: WeightedMean(ranks.rows_as_sum(metric.total), ranks.rows_as_sum(metric.weight))
        for name, metric in loss.metrics.items()
    }
    if loss.weight is None:
        return Loss(total * parts, None, metrics)
    return Loss(total, ranks.rows_as_sum(loss.weight), metrics)
