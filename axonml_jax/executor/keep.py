"""Recomputation in a pipeline: what stages keep for their backward, block by block, by a word, a policy, names or bytes."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from axonml_jax.compat.order import TellsHost, platform_around, require_policies
from axonml_jax.executor.cut import Form, Stage, TracedStage
from axonml_jax.parallel.plan import Remat
from axonml_jax.parallel.recompute import NOT_IN_SLOTS, ByNames, UnitChoice, size_of, transform, unit_of
from axonml_jax.parallel.units import Body, Transform, Values, transform_of
from axonml_jax.program.cut import mark, segments_of


class Keeping(NamedTuple):
    """The policy of what stages keep, and the figures that it is asked with.

    Attributes:
      remat: that of a plan; not None.
      slots: of how many microbatches a rank keeps residuals at once.
      trips: how many times the backward of a stage makes something again in a step.
      fixed: bytes of a rank that are there whatever is kept.
    """

    remat: Remat
    slots: int
    trips: int
    fixed: int


def forms(keeping: Keeping, stages: Sequence[tuple[Stage, TracedStage]]) -> list[Form]:
    """The forms of the stages' forwards: in parts, one for each block, which also keep what enters them.

    Args:
      keeping: what is to be kept.
      stages: every stage in order, with the names of what it reads and its blocks; those that do the same may have one program.

    Raises:
      ValueError: for what this program lacks, or a pipeline has no place for.
    """
    divided = [(traced, _parts(stage, traced)) for stage, traced in stages]
    remat: Any = keeping.remat
    if isinstance(remat, str):
        return [
            _in_parts(traced, parts, [transform_of(remat, apart=_ordered())] * len(parts)) for traced, parts in divided
        ]
    require_policies()
    if callable(remat):
        again = partial(jax.checkpoint, policy=TellsHost(remat, _refuse), prevent_cse=not _ordered())
        return [_in_parts(traced, parts, [again] * len(parts)) for traced, parts in divided]
    asked, taken = [], set[str]()
    for number, ((stage, traced), (_, parts)) in enumerate(zip(stages, divided, strict=True)):
        asked.append(list(_asked(keeping, number, stage, traced, parts, taken)))
    chooser = ByNames(remat) if isinstance(remat, tuple) else remat
    choices = iter(chooser.choice([unit for own in asked for _, unit in own]).units)
    return [
        _form(traced, [(part, next(choices)) for part, _ in own])
        for (_, traced), own in zip(stages, asked, strict=True)
    ]


def _ordered() -> bool:
    """Whether XLA recomputes a block only when its gradient is there; for CPUs barriers have to say it."""
    return platform_around() != "cpu"


def _refuse(name: str) -> None:
    raise ValueError(f"remat's policy sends {name!r} to the host: {NOT_IN_SLOTS}")


def _asked(
    keeping: Keeping, number: int, stage: Stage, traced: TracedStage, parts: Sequence[Body], taken: set[str]
) -> Any:
    """Names the values of a stage's parts, and describes each as a unit to ask a policy about."""
    places, seen = dict(zip(traced.numbers.weights, range(len(stage.names)), strict=False)), set[int]()
    for i, part in enumerate(parts):
        fresh = set(part.inputs) - seen
        seen |= fresh
        entering = keeping.slots * sum(size_of(part.avals[n]) for n in fresh) + (0 if i else keeping.fixed)
        read = {n: places[n] for n in part.prelude.weights if n in places}
        block = next((path for path, leaves in stage.blocks.items() if {*leaves} & {*read.values()}), "")
        paths = {n: stage.names[place] for n, place in read.items()}
        own: dict[str, Any] = {"trips": keeping.trips, "entering": entering, "stage": number, "slots": keeping.slots}
        yield unit_of(part, paths, block or f"stage {number} part {i}", taken, plain=False, grads=0, **own)


def _form(traced: TracedStage, parts: Sequence[tuple[Body, UnitChoice]]) -> Form:
    everything = transform_of(None, apart=True)
    if all(choice.keep is None for _, choice in parts):  # as a whole: then what enters its blocks is not kept either
        return Form(traced, everything)
    made = [everything if choice.keep is None else transform(choice, apart=_ordered()) for _, choice in parts]
    return _in_parts(traced, [part for part, _ in parts], made, tuple(choice.keep for _, choice in parts))


# --------------------------------------------------------------------------------------------------
# A stage in parts, one for each of its blocks, of which each has its own recomputation.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Divided(Body):
    """A body whose work is done part by part, each with its own recomputation.

    Attributes:
      parts: each with what recomputation makes of it; what prepares weights was done before all.
    """

    parts: Sequence[tuple[Body, Transform]] = ()

    def run(self, env: Values) -> None:
        """Runs the parts in order, on values to which they add theirs."""
        for part, again in self.parts:
            env |= again(partial(_worked, part))({n: env[n] for n in (*part.prelude.derived, *part.inputs)})


def _worked(part: Body, env: Values) -> Values:
    part.run(env := dict(env))
    return {number: env[number] for number in part.outputs}


def _in_parts(
    traced: TracedStage, parts: Sequence[Body], transforms: Sequence[Transform], kept: Hashable = None
) -> Form:
    body, own = traced.body, tuple(zip(parts, transforms, strict=True))
    divided = _Divided(body.prelude, body.equations, body.inputs, body.outputs, body.avals, parts=own)
    return Form(replace(traced, body=divided), lambda work: work, kept)


def _parts(stage: Stage, traced: TracedStage) -> list[Body]:
    """Divides a stage's work into parts, one for each block."""
    program, prelude, found = traced.program, traced.body.prelude, []
    marks = mark(program, {number: i for i, number in enumerate(prelude.weights)})
    # Where a block ends is seen in weights alone: what is made of the microbatch may be read everywhere.
    count = len(traced.numbers.weights)
    marks = replace(marks, used={p: frozenset(w for w in used if w < count) for p, used in marks.used.items()})
    for segment in segments_of(program, marks, stage.blocks.values()):
        weights = [prelude.weights[w] for w in segment.weights]
        own = replace(prelude, weights=weights, equations=segment.prelude, derived=segment.derived)
        found.append(Body(own, segment.equations, segment.inputs, segment.outputs, program.avals))
    return found
