"""The choice of how to run a loss, from shapes alone: on a rank's rows, by its program, or with the model's code in it."""

# What a rule says of places holds types apart, which the checker does not see.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonml_jax.base import named_leaves, warn
from axonml_jax.compat.jaxpr import has_users_derivatives, solve_of, trace
from axonml_jax.compat.model_call import PRIMITIVE as MODEL_CALL
from axonml_jax.compat.model_call import Transformed
from axonml_jax.compat.order import CALLS_WITH_GRADIENTS, callers_line
from axonml_jax.compat.row_keys import KNOWN, Drawn, is_row_key, rows_of
from axonml_jax.meaning.asked import Asked, Traced, WholeAlone, calls_alone, following
from axonml_jax.meaning.following import Following, calls_model
from axonml_jax.meaning.microbatches import Division, Mixing, divided
from axonml_jax.meaning.mixing import UNLIKE, Lost, Numbering, drawn_alike, mixing_inside, not_apart, numbering_inside
from axonml_jax.meaning.model_call import Call, RealCalls, no_share
from axonml_jax.meaning.places import Group, Places
from axonml_jax.meaning.plain_mean import is_plain_mean, talks
from axonml_jax.model.loss import UNREAD
from axonml_jax.program.program import (
    Atom,
    Equation,
    among,
    made_by,
    names_of,
)

ROWS = "rows"

NUMBERS = "has the model return a number computed from many rows that is not a mean over them"
MIXED = "calls a model whose code mixes rows of the batch"
WHOLE = "calls a model whose code takes the whole batch's rows, and no part of them"
UNPLACED = "calls the model in a way whose shapes do not show how its results are split"


def unknown(why: str) -> ValueError:
    """The error for a loss whose program would have to hold the model's own code where that is not possible.

    Args:
      why: the reason, in words that follow "the loss".
    """
    own = next((remedy for start, remedy in _REMEDIES.items() if why.startswith(start)), "")
    return ValueError(
        f"the loss {why}: with microbatches, a `context` axis or tensor layers its value over the global batch cannot be "
        f"derived. {own}Return per-row values from the model, take sizes from the batch (x.shape), or return "
        "ax.WeightedMean(total, weight), two sums over the rows (and positions) that the loss is given"
    )


_REMEDIES = {
    "differentiates": "Where it differentiates by the rows, do so one by one, "
    "jax.vmap(jax.grad(lambda row: model(row[None])[0, 0]))(x). ",
    "changes the model's variables before": "Change them after the last call of the model. ",
}
"""What helps in the way of a loss that begins so, before what helps any."""


def whole_alone(error: Exception) -> ValueError:
    """The error for a model that does not take a part of the rows, where it must be called with one."""
    said = str(error).partition("\n")[0]
    return ValueError(
        "the model's code takes the whole batch's rows, and no part of them, as where its state has an entry for every row "
        f"({type(error).__name__}: {said}): with microbatches, a `context` axis or tensor layers give what belongs to rows "
        'in the batch, and return what is to be kept of them as a metric, such as (loss, {"carry": carry})'
    )


@dataclass(frozen=True, eq=False)
class Decided:
    """The program of a loss that is run by it, and how its values are made in microbatches.

    Attributes:
      whole: the loss traced at the whole batch's shapes.
      noted: the calls of the model at a part of the batch, for each group; None where they are not known.
      division: which of its values are made before, in and after microbatches.
      failed: the error of its trace at a rank's shapes; None: it has such a trace.
      sweeps: whether it takes two sweeps over the microbatches.
      slope: the one late number that the loss is a function of; None: the loss itself is a sum.
    """

    whole: Traced
    noted: tuple[list[Call] | None, ...]
    division: Division = Division()
    slope: int | None = None
    failed: Exception | None = None
    sweeps: bool = False

    @property
    def outputs(self) -> tuple[Atom, ...]:
        """The program's outputs that a microbatch adds to, then the late sums."""
        return (*(atom for atom in self.whole.program.outputs if not self.is_after(atom)), *self.division.late)

    @property
    def extremes(self) -> list[Equation]:
        """The equations of whose results a microbatch makes its own rows' (`Division.extremes`)."""
        found = self.division.extremes
        return [each for each in self.whole.program.equations if not found.isdisjoint(each.outputs)]

    def is_after(self, atom: Atom) -> bool:
        """Whether an atom is made after all microbatches."""
        return among(atom, self.division.after)


TracedAt = Callable[[Sequence[int]], Traced]
"""`traced(parts)`: the loss traced as `Asked.traced` does, once for the same parts."""


def decided(asked: Asked, traced: TracedAt, *, in_layers: bool, trains: bool, inlines: bool) -> Decided | str:
    """Decides how a loss is run.

    Args:
      asked: the loss.
      traced: its traces.
      in_layers: the model's layers split their own parameters.
      trains: the loss is refused where nothing that is trained reaches it.
      inlines: all rows are there at once, so that the model's own code can be in the loss's program.

    Returns:
      A `Decided`: the loss runs by its program. `ROWS`: it runs on each rank's rows alone. Any other text is the reason, in
      words that follow "the loss", why its program must hold the model's own code.

    Raises:
      ValueError: with `trains`, for a loss that reads neither the model nor its variables; for a model that draws for rows by a
        key that all ranks share. What tracing the loss raises is raised too.
    """
    local, failed = None, None
    try:
        local = traced(asked.everywhere)
    except Transformed as error:
        return _inlined_decision(asked, in_layers, f"{error} at {callers_line(error)}")
    except Exception as error:  # such as the five largest of four rows
        failed = error
    for_parts = local is not None and talks(local.program, asked.axes)
    if local is not None and (for_parts or local.weighted):
        if trains:
            _refuse_unread(asked, local)
        if for_parts or not _pools(asked, traced, local):
            return ROWS if for_parts or not mixes(asked, traced, inlines and not in_layers) else MIXED
    try:
        found = _by_whole(asked, traced, local, failed, in_layers=in_layers, trains=trains)
    except WholeAlone as error:
        if inlines and not in_layers and not _has_positions(asked):
            return WHOLE
        raise whole_alone(error.args[0]) from error
    if local is None or (isinstance(found, str) and found != ROWS):
        return found
    return MIXED if mixes(asked, traced, inlines and not in_layers) else found


def _by_whole(
    asked: Asked, traced: TracedAt, local: Traced | None, failed: Exception | None, *, in_layers: bool, trains: bool
) -> Decided | str:
    """Decides (see `decided`) by the trace at the whole batch's shapes, and the one at a rank's where there is one."""
    try:
        whole = traced(())
    except Transformed as error:
        return _inlined_decision(asked, in_layers, f"{error} ({callers_line(error)})")
    except Exception:
        if failed is None:
            raise
        raise failed from None
    if trains:
        _refuse_unread(asked, whole)
    if (line := _called_behind(whole.program.equations)) is not None:
        return _inlined_decision(
            asked, in_layers, f"calls the model in a function with a derivative of its own ({line})"
        )
    if _has_positions(asked):
        return ROWS if talks(whole.program, asked.axes) else _by_positions(asked, traced, whole, in_layers)
    if local is not None and _makes_numbers(asked, whole, local):
        return _inlined_decision(asked, in_layers, NUMBERS)
    if talks(whole.program, asked.axes):
        return ROWS
    if local is not None and is_plain_mean(local, whole, asked.places(), asked.groups):
        return ROWS
    return Decided(whole, (local.noted if local is not None else calls_alone(asked, whole, 0),), failed=failed)


def _called_behind(equations: Sequence[Equation]) -> str | None:
    """The line of a function with a derivative of its own that calls the model, as a solver's: it knows no parameters.

    None: there is none.
    """
    for each in equations:
        if calls_model(each) and each.name != MODEL_CALL:
            if each.name in CALLS_WITH_GRADIENTS or solve_of(each.op) is not None:
                return each.op.line or "no line known"
            for body in each.bodies:
                if (line := _called_behind(body.equations)) is not None:
                    return line
    return None


def _by_positions(asked: Asked, traced: TracedAt, whole: Traced, in_layers: bool) -> Decided | str:
    """Decides where positions are split.

    Raises:
      ValueError: where the loss reads results without positions of which it is not known how they are made of the ranks'.
    """
    from axonml_jax.meaning.numbers import mixes_rows
    from axonml_jax.meaning.pooled import shares

    noted = [_noted(asked, traced, whole, k) for k in asked.everywhere]
    for k, group in enumerate(asked.groups):
        own = noted[k]
        pairs = [] if own is None else [(a, b) for a, b in zip(whole.noted, own, strict=False) if a.alike(b)]
        if group.positions:
            noted[k] = None if own is None else [replace(b, shares=shares(a, b, group)) for a, b in pairs]
            _refuse_unshared(whole, noted[k] or (), group)
        elif asked.mode.batch_norm_axes and any(mixes_rows(a, b, (group,)) for a, b in pairs if a.returns_numbers(b)):
            return _inlined_decision(asked, in_layers, NUMBERS)
    return Decided(whole, tuple(noted))


def _refuse_unshared(whole: Traced, noted: Sequence[Call], group: Group) -> None:
    wrong = {}
    for number, call in enumerate(noted):
        paths = named_leaves(call.out_treedef.unflatten(range(len(call.out_rest))))
        names = [name for name, k in paths.items() if call.out_rest[k] is None]
        floating = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in call.made]
        for k in _read_of(whole, number, len(call.shares)):
            if call.shares[k] is None and floating[k]:
                wrong[names[k] or "output"] = call.made[k]
    if wrong:
        raise no_share(wrong, group)


def _read_of(whole: Traced, number: int, count: int) -> list[int]:
    """Which of the first results of a call of the model the loss reads."""
    made = made_by(whole.program.equations, whole.program.outputs)
    read = {n for each in made for n in each.read} | set(names_of(whole.program.outputs))
    top = [each for each in made if each.name == MODEL_CALL and each.op.options["number"] == number]
    inside = any(calls_model(each) for each in made if each.name != MODEL_CALL)
    return [k for k in range(count) if any(each.outputs[k] in read for each in top) or (not top and inside)]


def _pools(asked: Asked, traced: TracedAt, local: Traced) -> bool:
    """Whether a loss reads arrays of the model without positions that each rank makes of its own positions.

    A number that a rank makes of its positions is the loss's own sum over them, unless it is known to be one position's.
    """
    if not _has_positions(asked) or not local.noted:
        return False
    from axonml_jax.meaning.pooled import pooled, shares

    try:
        whole = traced(())
    except Exception:  # the model's code takes a rank's part alone
        return False
    for k, group in enumerate(asked.groups):
        own = (_noted(asked, traced, whole, k) or ()) if group.positions else ()
        for number, (a, b) in enumerate(zip(whole.noted, own, strict=False)):
            found = {n for n in pooled(a, b, group) if a.made[n].shape}
            found |= {n for n, share in enumerate(shares(a, b, group)) if isinstance(share, int)}
            if not found.isdisjoint(_read_of(whole, number, len(a.made))):
                return True
    return False


def mixes(asked: Asked, traced: TracedAt, inlines: bool) -> bool:
    """Whether the model's own code mixes rows and can be in the loss's program; warns where it mixes them and cannot, or may.

    Code that reads how many rows there are, or which, counts as such, and what draws for them by a key that ranks share.

    Args:
      asked: the loss.
      traced: its traces.
      inlines: whether the model's code can be there.

    Raises:
      ValueError: naming these draws, where its code cannot be there.
    """
    if same := _same_draws(asked, traced):
        if inlines and not _has_positions(asked):
            return True
        raise ValueError(
            f"the model draws random numbers for rows from a key that is the same on all ranks: {'; '.join(same)}. Rows of "
            "different ranks, or microbatches, would get the same numbers: draw from random streams of the model's own "
            "(nnx.Rngs in it, or in a module around it that calls it with self.rngs(); self.make_rng), draw in the loss and "
            "pass the numbers, or take all rows at once, without microbatches, split layers or collectives of the model's own"
        )
    numbering = _numbering(asked, traced)
    lost, numbering = numbering.unseen(_lost(asked, traced)), numbering.found
    mixing = [*mixing_inside(asked, traced(asked.everywhere)), *(each.note for each in lost if each.mixes)]
    bent = _own_gradients(asked, traced)
    said = [f"mixes rows of the batch: {'; '.join(list(dict.fromkeys(mixing))[:5])}"] if mixing else []
    said += (
        [f"reads the number of rows, or takes them by their numbers: {'; '.join(numbering[:5])}"] if numbering else []
    )
    said += [f"has derivatives of its own that are no sum over rows: {'; '.join(bent[:5])}"] if bent else []
    if said and not (inlines and not _has_positions(asked)):
        warn(
            f"the model's code {', and '.join(said)}. In microbatches, where positions or layers are split, and beside "
            "collectives of its own, it sees a part of them and may compute something else than on one device: mix rows in "
            "the loss function, which has the whole batch, bend gradients in the optimizer, use a plan without these, or say "
            "by batch_stats='local' that a part's own are meant"
        )
        return False
    if lost and not said:
        named = "; ".join(each.note for each in lost[:5])
        warn(
            f"it is not known whether the model's code keeps rows of the batch apart: {named}. A rank, and a microbatch, "
            "computes with its own rows alone, which may be something else than on one device: trainer.check(batch) tells. Mix "
            "rows in the loss function, which has the whole batch, or say by batch_stats='local' that a part's own are meant"
        )
    return bool(said)


def _lost(asked: Asked, traced: TracedAt) -> list[Lost]:
    """Where the model's own code is not known to keep rows apart; none where its traces do not say."""
    axes, found = asked.typed_axes, set[Lost]()
    pairs = _pairs(asked, traced)
    for whole, own, count in pairs:
        with following("rows that are kept apart"):
            for a, b in zip(whole, own, strict=True):
                found.update(not_apart(a, b, count, axes, {}))
            if any(a.alike(b) and a.returns_numbers(b) for a, b in zip(whole, own, strict=True)):
                whole, own, count = next(pairs, (whole, own, count))  # of one row a mean may be traced otherwise
                found.update(_lost_in_numbers(traced(()), whole, own, count, axes))
        return sorted(found)
    return []


def _lost_in_numbers(
    loss: Traced, whole: Sequence[Call], own: Sequence[Call], count: int, axes: Container[str]
) -> set[Lost]:
    """What loses rows on the way to the numbers that a loss reads and that are not known to be means over rows."""
    from axonml_jax.meaning.numbers import unproven

    found = set[Lost]()
    for number, (a, b) in enumerate(zip(whole, own, strict=True)):
        numbers = unproven(a, b, (Group((), count),), axes) if a.alike(b) else {}
        read = _read_of(loss, number, len(a.made)) if numbers else ()
        if unclear := {k: numbers[k] for k in read if k in numbers}:
            found.update(not_apart(a, b, count, axes, unclear))
    return found


def _numbering(asked: Asked, traced: TracedAt) -> Numbering:
    """Where the model's own code reads the number of rows, or their numbers, at a rank's part or at half the batch."""
    found, known = list[str](), False
    for whole, own, count in _pairs(asked, traced):
        with following("rows by their numbers"):
            each = numbering_inside(whole, own, count, asked.model.state_joins())
            before = [note for note in found if note != UNLIKE]  # of one row code may be traced otherwise
            found, known = [*before, *each.found], each.known
        if known:
            break
    return Numbering(list(dict.fromkeys(found)), known)


def _own_gradients(asked: Asked, traced: TracedAt) -> list[str]:
    """Where derivatives of the user's own in the model are no sums over rows; none where its traces do not say."""
    for whole, own, _ in _pairs(asked, traced):
        if any(each.traced is not None and has_users_derivatives(each.traced) for each in own):
            from axonml_jax.meaning.own_gradients import own_gradients

            with following("derivatives of the model's own"):
                return own_gradients(whole, own)
    return []


def _pairs(asked: Asked, traced: TracedAt) -> Iterator[tuple[list[Call], list[Call], int]]:
    """The model's calls at the whole batch's shapes and at a rank's, of how many; then those of half the batch."""
    rows = [k for k, group in enumerate(asked.groups) if not group.positions]
    if len(rows) != 1 or not asked.mode.batch_norm_axes:
        return
    (number,), ranks = rows, asked.groups[rows[0]].ranks
    for part, count in ((asked, ranks), (asked.in_halves(), 2)):
        if part is None:
            continue
        try:
            whole, own = traced(()).noted, (traced if part is asked else part.traced)((number,)).noted
        except Exception:
            return  # the user's code takes only some shapes
        if len(whole) == len(own):  # a loss that calls the model row by row makes more calls of more rows
            yield whole, own, count


def _makes_numbers(asked: Asked, whole: Traced, local: Traced) -> bool:
    """Whether the model itself returns a number that is known to be no mean of the ranks' numbers."""
    pairs = lambda part: (
        (a, b) for a, b in zip(whole.noted, part.noted, strict=False) if a.alike(b) and a.returns_numbers(b)
    )
    if not any(pairs(local)) or not asked.mode.batch_norm_axes:
        return False  # statistics of a rank's rows say so themselves
    from axonml_jax.meaning.numbers import mixes_rows

    if (halves := asked.in_halves()) is not None:
        try:
            asked, local = halves, halves.traced(halves.everywhere)
        except Exception:
            return False  # the loss goes with these numbers of rows alone
    return any(mixes_rows(a, b, asked.groups) for a, b in pairs(local))


def _inlined_decision(asked: Asked, in_layers: bool, why: str) -> str:
    """Decides for a loss that differentiates or maps the model: `ROWS` where it is a plain mean, else `why`."""
    try:
        local, whole = asked.inlined(asked.everywhere), asked.inlined(())
    except Exception:
        return why
    if _has_positions(asked):
        return ROWS if local.weighted else why
    undeclared = [_undeclared(asked, each) for each in (local, whole)]
    if local.weighted or is_plain_mean(*undeclared, asked.places(), asked.groups, asked.typed_axes):
        return ROWS
    talking = not in_layers and talks(asked.inlined((), run=True).program, asked.axes)  # the user's code does
    return ROWS if talking else why


def _undeclared(asked: Asked, traced: Traced) -> Traced:
    """A loss with the model's code, without what it makes of state whose class says how ranks join it."""
    program, names, joins = traced.program, list(named_leaves(asked.variables.state)), asked.model.state_joins()
    before = program.inputs[len(jax.tree.leaves(asked.variables)) - len(names) :]
    first = len(program.outputs) - len(names)
    kept = [
        old if name in joins else new for name, old, new in zip(names, before, program.outputs[first:], strict=False)
    ]
    return replace(traced, program=replace(program, outputs=(*program.outputs[:first], *kept)))


def _refuse_unread(asked: Asked, traced: Traced) -> None:
    if not traced.reads(len(jax.tree.leaves(asked.variables))):
        raise ValueError(UNREAD)


def _has_positions(asked: Asked) -> bool:
    return any(group.positions for group in asked.groups)


def in_microbatches(asked: Asked, decided: Decided, *, two_sweeps: bool) -> Decided:
    """Decides when the values of a loss's program can be made in microbatches; `two_sweeps` allows to go over them twice.

    Raises:
      ValueError: naming the operation and the line that need what the model makes of other microbatches.
    """
    fixed = len(jax.tree.leaves((asked.variables, asked.key)))
    places, whole = asked.places(), decided.whole
    dependent = [k < fixed for k in range(len(places))]
    try:
        calls = RealCalls(None, whole.noted, decided.noted, asked.groups)
        division = divided(whole.program, places, dependent, asked.groups, calls)
        found = finishing(replace(decided, division=division))
        if two_sweeps and _keeps_rows(whole, places, asked.groups, calls):
            return _swept_twice(decided, places, dependent, asked.groups, calls)
        return found
    except Mixing as mixing:
        if two_sweeps:
            return _swept_twice(decided, places, dependent, asked.groups, calls)
        metrics = _mixing_metrics(whole, places, dependent, asked.groups, calls)
        what = f"the metric{'s' * (len(metrics) > 1)} {', '.join(metrics)}" if metrics else "the loss"
        instead = "compute that of what trainer.predict returns" if metrics else "return ax.WeightedMean(total, weight)"
        sweeps = ""
        with suppress(ValueError):
            _swept_twice(decided, places, dependent, asked.groups, calls)
            sweeps = "allow one more forward pass that keeps the model's results (ax.mixing_rows(loss_fn, two_sweeps=True)), "
        raise ValueError(
            f"{what} need{'s' * (len(metrics) < 2)} the model's results of other microbatches: {_named(mixing)} "
            f"is not a sum over rows. Take all rows at once (accumulate=1, num_microbatches=1), {sweeps}or {instead}"
        ) from None


def _named(mixing: Mixing) -> str:
    name, line = mixing.args
    return f"{'a call of the model' if name == MODEL_CALL else name} ({line or 'no line known'})"


def _mixing_metrics(
    whole: Traced, places: Sequence[Places], dependent: Sequence[bool], groups: Sequence[Group], calls: RealCalls
) -> list[str]:
    """The metrics without which the loss could be taken in microbatches; none where it is the loss itself."""

    def goes(wanted: Sequence[Atom]) -> bool:
        try:
            divided(replace(whole.program, outputs=tuple(wanted)), places, dependent, groups, calls)
        except Mixing:
            return False
        return True

    loss, changed = whole.out_tree.unflatten(list(whole.program.outputs))
    own = [*jax.tree.leaves((loss.total, loss.weight)), *changed]
    apart = lambda metric: not goes([*own, *jax.tree.leaves(metric)])
    return [repr(name) for name, metric in loss.metrics.items() if apart(metric)] if goes(own) else []


def _keeps_rows(whole: Traced, places: Sequence[Places], groups: Sequence[Group], calls: RealCalls) -> bool:
    """Whether a loss changes the model's state itself by what it makes of rows."""
    found = Following(groups, calls).program(whole.program, places) if whole.changed else []
    return any(own[0] is not None for own in found[len(found) - len(whole.changed) :])


def _swept_twice(
    decided: Decided, places: Sequence[Places], dependent: Sequence[bool], groups: Sequence[Group], calls: RealCalls
) -> Decided:
    """Decides for two sweeps, where the model's operands do not need all rows."""
    if any(calls_model(each) and each.name != MODEL_CALL for each in decided.whole.program.equations):
        raise ValueError(
            "the loss calls the model inside a loop, a branch or a checkpoint, where two_sweeps=True cannot keep its results: "
            "call it outside of them, or take all rows at once (accumulate=1, num_microbatches=1)"
        )
    try:
        division = divided(decided.whole.program, places, dependent, groups, calls, only_calls=True)
    except Mixing as mixing:
        raise ValueError(
            f"the model's input depends on its results of other microbatches: {_named(mixing)}. Take all rows at once "
            "(accumulate=1, num_microbatches=1)"
        ) from None
    if division.late:
        raise ValueError(
            "the model's input depends on sums of its results over all rows, which are not known yet in one sweep over "
            "microbatches: take all rows at once (accumulate=1, num_microbatches=1)"
        )
    return replace(decided, division=division, sweeps=True)


def finishing(decided: Decided) -> Decided:
    """Finds the one number that the loss is a function of, where it is made after all microbatches.

    Raises:
      Mixing: where there are several, or weights, counts or the model's state are made so late.
    """
    whole = decided.whole
    loss, changed = whole.out_tree.unflatten(list(whole.program.outputs))
    late = [each.weight for each in loss.metrics.values() if decided.is_after(each.total)]
    made = made_by(whole.program.equations, late)
    read = {number for equation in made for number in equation.read}
    weights = [each.weight for each in loss.metrics.values()] + ([] if loss.weight is None else [loss.weight])
    if read.intersection(whole.program.inputs) or any(map(decided.is_after, [*weights, *changed])):
        raise Mixing("a weight, or a change of the model's state,", "")
    if not decided.is_after(loss.total):
        return decided
    for each in decided.extremes:
        if among(loss.total, each.outputs):
            raise Mixing(each.name, each.op.line)
    made = made_by(whole.program.equations, [loss.total], decided.division.late)
    read = {number for equation in made for number in equation.read} & set(decided.division.late)
    shapes = [whole.program.avals[number] for number in read]
    if (
        len(read) > 1
        or loss.weight is not None
        or read & decided.division.extremes
        or any(x.shape or not jnp.issubdtype(x.dtype, jnp.floating) for x in shapes)
    ):
        raise Mixing(made[-1].name, made[-1].op.line)
    return replace(decided, slope=next(iter(read)))


def _noted(asked: Asked, traced: TracedAt, whole: Traced, number: int) -> list[Call] | None:
    """The calls of the model at a part of the batch for one group; None: they are not known."""
    try:
        return traced((number,)).noted
    except Exception:
        with suppress(WholeAlone):
            return calls_alone(asked, whole, number)
        return None


# Draws for a rank's rows by a key that is the same on all ranks; the model's own keys differ from shard to shard.


def _same_draws(asked: Asked, traced: TracedAt) -> list[str]:
    """Where the model draws for its rows by a key that is the same on all ranks; none where its traces do not say."""
    if is_row_key(asked.key):
        return []  # `refuse_draws` says it
    try:
        whole, local = traced(()), traced(asked.everywhere)
    except Exception:
        return []
    pairs = zip(whole.noted, local.noted, strict=False)
    return list(dict.fromkeys(each for a, b in pairs if a.alike(b) for each in drawn_alike(a, b)))


# A call outside of a loss, in which every rank has its own rows alone.


def called_with(
    fun: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]], variables: Any, key: Any, arrays: list
) -> tuple[Call, list[str]]:
    """The call of a function, noted as one of the model is, and the names of its results.

    Args:
      fun: `fun(variables, key, arrays) -> (results, state)`, both by name.
      variables, key, arrays: shapes.
    """
    returned, changed = list[str](), list[str]()

    def flat(variables: Any, key: Any, arrays: list) -> list:
        results, state = fun(variables, key, arrays)
        returned[:], changed[:] = results, state
        return [*results.values(), *state.values()]

    traced = trace(flat, variables, key, arrays)
    made, given = tuple(traced.made), tuple(jax.tree.leaves(arrays))
    rest, paths = (None,) * len(returned), tuple(tuple(name.split("/")) for name in changed)
    return Call((), "__call__", None, (), given, made, None, rest, paths, traced=traced.jaxpr), returned


class Alone(NamedTuple):
    """A call outside of a loss, in which every rank has its own rows alone.

    Attributes:
      whole: it at the whole batch's shapes.
      names: of its results.
      part: it at a part's.
      parts: how many there are.
      axes: the mesh axes of ranks that have them.
      made_of: the axes over which ranks make each result of their own rows: experts may join numbers themselves.
      state: the model's state that it may change, by name.
      joined: the names of state of which it is said how ranks join it.
      normed: whether BatchNorm joins over ranks what it, and what is made of it, mixes of rows.
    """

    whole: Call
    names: Sequence[str]
    part: Call
    parts: int
    axes: tuple[str, ...]
    made_of: Callable[[], Mapping[str, frozenset[str]]]
    state: Mapping[str, Any]
    joined: Collection[str]
    normed: bool


def look_at_call(call: Alone, *, meant: bool) -> None:
    """Warns where a call on a rank's rows alone may make something else of them than one device does.

    Args:
      call: the call.
      meant: whether a rank's own are meant.

    Raises:
      ValueError: naming draws that would be the same for the rows of all ranks.
    """
    instead = "call model.module(x), whose rows are not divided, or"
    if same := drawn_alike(call.whole, call.part):
        raise ValueError(
            f"this call draws random numbers for rows from a key that is the same on all ranks: {'; '.join(same)}. Rows of "
            "different ranks would get the same numbers: draw them before, and give them to the call as arrays of rows; "
            f"{instead} draw from random streams of the model's own (nnx.Rngs in it, self.make_rng)"
        )
    if meant:
        return
    if call.state:
        from axonml_jax.meaning.own_state import warn_of_calls_state

        floats = {name for name, x in call.state.items() if call.normed and jnp.issubdtype(x.dtype, jnp.inexact)}
        warn_of_calls_state(call.whole, call.part, Group(call.axes, call.parts), floats.union(call.joined))
    if call.normed:
        return
    if found := _not_apart_in(call):
        warn(
            "the code of this call mixes rows of the batch, or is not known to keep them apart: "
            f"{'; '.join(found[:5])}. Every rank has its own rows alone in this call, which may be something else than on one "
            f"device: {instead} mix rows in the loss function, which has the whole batch"
        )
    if numbers := _no_means(call):
        warn(
            f"these results have no rows, and are not known to be means over rows: {numbers} (result: shape). Each is the "
            f"mean of what ranks make of their own rows, which may be something else than on one device: {instead} return "
            "rows"
        )


def _not_apart_in(call: Alone) -> list[str]:
    """The operations of a call that are not known to keep rows apart, or that read their number, with the user's lines."""
    with following("rows that are kept apart"):
        lost = not_apart(call.whole, call.part, call.parts, (), {})
        numbering = numbering_inside([call.whole], [call.part], call.parts, call.joined)
        return list(dict.fromkeys([*(each.note for each in numbering.unseen(lost)), *numbering.found]))
    return []


def _no_means(call: Alone) -> dict[str, tuple[int, ...]]:
    """The results of a call that have no rows, and are not known to be means over rows, with their shapes."""
    from axonml_jax.meaning.numbers import unproven

    if not (found := unproven(call.whole, call.part, (Group((), call.parts),))):
        return {}
    made_of = call.made_of()
    own = [k for k in found if not made_of[call.names[k]].isdisjoint(call.axes)]
    return {call.names[k] or "the result": call.whole.made[k].shape for k in own}


# Random draws by the whole batch's rows (`ax.Plan(draws="rows")`): keys of rows (`compat/row_keys.py`) take a dim as long as a
# rank has rows for rows. Traces at the whole batch's shape and at a rank's must both say so of every draw.


def refuse_draws(asked: Asked, found: Decided | str) -> None:
    """Refuse a loss whose draws, under keys of rows, are not known to be its rows of the whole batch's draw.

    Args:
      asked: the loss; without a key of rows nothing is refused.
      found: how it is run (see `decided`).

    Raises:
      ValueError: naming the draw, the user's line and the remedy; and the streams from which both the loss and the model draw.
    """
    if not is_row_key(asked.key):
        return
    rows, pairs = rows_of(asked.key), []
    if isinstance(found, Decided):
        whole, noted = found.whole, found.noted[0]
        if whole.shared:
            raise ValueError(
                f'draws="rows": the loss and the model draw from the same random stream ({", ".join(whole.shared)}), in an '
                "order that ranks cannot keep: give the loss a stream of its own, as in nnx.Rngs(params=0, noise=1, "
                'loss_noise=2), or take draws="shards"'
            )
    else:
        try:
            whole, local = asked.traced(()), asked.traced(asked.everywhere)
        except Transformed:
            whole, local = asked.inlined(()), asked.inlined(asked.everywhere)
        noted, pairs = local.noted, [(whole.draws, local.draws)] if found == ROWS else []
    problems = [] if pairs else [why for each in whole.draws if (why := _whole_problem(each, rows))]
    if noted is None or len(noted) != len(whole.noted):
        problems, noted = ["it cannot be derived what the model draws for a rank's rows"], whole.noted
    pairs += [(a.draws, b.draws) for a, b in zip(whole.noted, noted, strict=True)]
    problems += [why for of_all, of_rank in pairs for why in _problems(of_all, of_rank, rows)]
    if problems:
        raise ValueError(
            f'draws="rows": {"; ".join(dict.fromkeys(problems))}. Draw with the model\'s own keys, in a shape with rows as a '
            'dim of its own, or take draws="shards"'
        )


def _problems(of_all: Sequence[Drawn], of_rank: Sequence[Drawn], rows: int) -> Iterator[str]:
    if [(each.name, len(each.shape)) for each in of_all] != [(each.name, len(each.shape)) for each in of_rank]:
        yield "a rank's rows are drawn by other operations than the whole batch"
        return
    for whole, own in zip(of_all, of_rank, strict=True):
        if why := _problem(whole, own, rows):
            yield f"{own.name} of shape {own.shape} ({own.line or 'no line known'}) {why}"


def _problem(whole: Drawn, own: Drawn, rows: int) -> str | None:
    grown = [dim for dim, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    if own.name not in KNOWN:
        return "is not known to draw row by row"
    if not grown and _seems_rows(own, rows):
        return f"has a dim of {rows}, which equals a rank's number of rows but is not the rows: take another batch size"
    if not grown:
        return None
    if not own.by_rows:
        return "comes from a key that the code makes itself, which is the same on every rank"
    if own.name == "random_fold_in":
        return "makes keys of numbers that restart on each rank: use jax.random.split(key, rows), one key for each row"
    fits = rows in own.shape and grown == [own.shape.index(rows)]
    return None if fits else f"has more rows in the whole batch, but no dim of its own for the {rows} rows of a rank"


def _seems_rows(each: Drawn, rows: int) -> bool:
    return each.by_rows and each.name in ("random_bits", "random_split") and rows in each.shape


def _whole_problem(each: Drawn, rows: int) -> str | None:
    """The problem of a draw that the loss makes at the whole batch's shape, of which a rank takes its part."""
    if each.name in KNOWN and not _seems_rows(each, rows):
        return None
    where = f"{each.name} of shape {each.shape} ({each.line or 'no line known'})"
    if each.name not in KNOWN:
        return f"{where} of the loss is not known to draw the same on any number of ranks: make it of uniform or normal draws"
    return f"{where} of the loss has a dim of {rows}, as many as a rank has rows: take another batch size"
