"""The stages of a pipeline traced one after the other, with what each sends, keeps and returns packed in buffers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.primitives import vary
from axonml_jax.compat.order import platform_around
from axonml_jax.compat.varying_types import varying_axes
from axonml_jax.executor.cut import Form, Inputs, Stage, TracedForward, TracedStage, trace_stage
from axonml_jax.pipeline.branches import alike, on_own_rank
from axonml_jax.pipeline.pack import (
    Buffers,
    Packing,
    PositionParts,
    Sizes,
    Slot,
    StageBuffers,
    largest,
    nothing,
    on_every_rank,
)

# --------------------------------------------------------------------------------------------------
# The stages of a pipeline traced one after the other: what each sends, keeps and returns, and how all of it is packed.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One stage with its program, and how its arrays are packed.

    Attributes:
      stage: the stage as given.
      traced: its program.
      weights, state: where its leaves lie on its rank.
      read: how the weights that it reads are packed.
      x: how the activations it receives are packed; empty on the first stage.
      y: how those that it sends are packed.
      residuals: how what it keeps for its backward is packed; None when nothing is differentiated.
      forward: makes that, and the results; None likewise.
      places: offsets as values of the running program, by offset; those not in it are constants.
    """

    stage: Stage
    traced: TracedStage
    weights: Packing
    state: Packing
    read: Packing
    x: Packing
    y: Packing
    residuals: Packing | None = None
    forward: TracedForward | None = None
    places: Mapping[int, jax.Array] = field(default_factory=dict)

    @property
    def looks(self) -> tuple:
        """A key of what stages that run the same program have in common: equations and shapes."""
        arrays = tuple(tuple((slot.group, slot.shape) for slot in packing.slots) for packing in self._packings)
        return len(self.traced.body.equations), arrays

    @property
    def runs(self) -> tuple:
        """A key that is equal only for stages that were traced as one, read alike, and lie at the same places."""
        placed = lambda slot: slot._replace(place=None, offset=slot.offset if slot.place is None else id(slot.place))
        arrays = tuple(tuple(map(placed, packing.slots)) for packing in (*self._packings, self.dy))
        return id(self.forward or self.traced), id(self.stage.read), id(self.stage.sync), arrays

    @property
    def _packings(self) -> tuple[Packing, ...]:
        return self.weights, self.state, self.read, self.x, self.y, self.residuals or Packing(())

    @property
    def dx(self) -> Packing:
        """The packing of the gradients of what it receives."""
        return _part(self.x, self.traced.varied_x)

    @property
    def dy(self) -> Packing:
        """The packing of the gradients of what it sends."""
        return _part(self.y, self.traced.varied_y).at(self.places)


@dataclass(frozen=True)
class TracedLine:
    """All stages as traced, and the sizes of the buffers that every rank needs.

    Attributes:
      members: the stages in order.
      loss_like, aux_like: zeros, typed like the loss and the last stage's metrics.
    """

    members: tuple[Member, ...]
    loss_like: jax.Array
    aux_like: tuple[jax.Array, ...]

    @property
    def activations(self) -> Sizes:
        """The buffer sizes that hold any stage's input activations."""
        return largest(member.x.sizes for member in self.members)

    @property
    def cotangents(self) -> Sizes:
        """The buffer sizes that hold the gradients of any stage's input activations."""
        return largest(member.dx.sizes for member in self.members)

    @property
    def residuals(self) -> Sizes:
        """The buffer sizes that hold the residuals that any stage keeps for its backward."""
        return largest(member.residuals.sizes for member in self.members if member.residuals is not None)

    @property
    def read(self) -> Sizes:
        """The buffer sizes that hold the weights that any stage reads."""
        return largest(member.read.sizes for member in self.members)

    @property
    def outputs(self) -> Sizes:
        """The buffer sizes that hold the last stage's outputs."""
        return self.members[-1].y.sizes


@dataclass(frozen=True)
class Held:
    """The weights, states and microbatches that a rank has when stages are traced or run, inside `shard_map`.

    Attributes:
      layout, states_layout: where parameters and states lie.
      weights, states: this rank's buffers.
      given: leaves of the microbatches and their keys, each [M, ...].
      given_tree: the structure of (batch, keys).
      axis: the pipeline's mesh axis.
      positions: which of what stages send and keep XLA's partitioner splits; None: none of it.
    """

    layout: StageBuffers
    states_layout: StageBuffers
    weights: Buffers
    states: Buffers
    given: Sequence[jax.Array]
    given_tree: Any
    axis: str
    positions: PositionParts | None = None

    def microbatch(self, index: ArrayLike) -> list[jax.Array]:
        """One microbatch and its key, typed as varying over the pipeline too: a cast inside a stage would be kept.

        Where positions are split, every rank has the whole microbatch: of a shift of split labels the partitioner would make a
        permute in one stage's branch.
        """
        row = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False, allow_negative_indices=False)
        rows = [vary(row(x), self.axis) for x in self.given]
        return rows if self.positions is None else [on_every_rank(x) for x in rows]

    def packing(self, arrays: Sequence[Any], known: Sequence[int | None] = ()) -> Packing:
        """The packing of arrays that a stage sends or keeps; `known` are dims of them that are split."""
        if self.positions is None:
            return Packing.of(arrays, self.axis)
        dims = [self.positions.dim_of(array.shape) for array in arrays]
        for i, dim in enumerate(known):
            dims[i] = dims[i] if dim is None else dim
        return Packing.of(arrays, self.axis, (self.positions.parts, dims))


Forms = Callable[[TracedLine], Sequence[Form]]
"""The form of every stage's forward, from the line without residuals."""


def trace_line(stages: Sequence[Stage], held: Held, forms: Forms | None) -> TracedLine:
    """Traces every stage on the outputs of the one before.

    Args:
      stages: the stages, in order.
      held: what this rank has.
      forms: how forwards are traced; None: nothing is differentiated.

    Raises:
      ValueError: when a loss is no floating scalar, or a state comes back otherwise than it was given.
    """
    members: list[Member] = []
    given: list[Inputs] = []
    for stage in stages:
        member, inputs = _member(stage, held, members)
        members.append(member)
        given.append(inputs)
    line = _line(members, held)
    return line if forms is None else replace(line, members=_differentiated(forms(line), members, given, held))


def _line(members: Sequence[Member], held: Held) -> TracedLine:
    losses = [member.traced.aval(member.traced.places.loss) for member in members]
    wrong = [f"stage {i}: {loss.str_short()}" for i, loss in enumerate(losses) if loss.shape or not _is_float(loss)]
    if wrong:
        raise ValueError(f"the loss of a stage must be a floating scalar, not {'; '.join(wrong)}")
    axes = frozenset({held.axis}).union(*map(varying_axes, losses))
    last = members[-1].traced
    metrics = [last.aval(atom) for atom in last.places.aux]
    return TracedLine(
        tuple(members),
        vary(jnp.zeros((), losses[-1].dtype), tuple(axes)),
        tuple(vary(jnp.zeros(x.shape, _summed_losses(x.dtype)), (held.axis, *varying_axes(x))) for x in metrics),
    )


def _differentiated(
    forms: Sequence[Form], members: Sequence[Member], given: Sequence[Inputs], held: Held
) -> tuple[Member, ...]:
    """The members with their forwards; stages that run the same program and keep alike share one."""
    known: dict[tuple, tuple[TracedForward, Packing]] = {}
    found: list[Member] = []
    for member, inputs, form in zip(members, given, forms, strict=True):
        look = id(member.traced), form.kept
        if look not in known:
            forward = TracedForward.of(form.traced, inputs, form.transform)
            split = () if held.positions is None else forward.split_dims(held.positions.parts.axis)
            known[look] = forward, held.packing(forward.residuals, split)
        found.append(replace(member, forward=known[look][0], residuals=known[look][1]))
    return tuple(found)


def _member(stage: Stage, held: Held, members: Sequence[Member]) -> tuple[Member, Inputs]:
    """The next member and its inputs; it shares the program of an earlier stage that does the same."""
    number, before = len(members), members[-1] if members else None
    weights, state = held.layout.packings[number], held.states_layout.packings[number]
    x = Packing(()) if before is None else before.y
    read = list(stage.read(weights.unpack(held.weights)))
    inputs = Inputs(read, held.microbatch(0), x.unpack(nothing(x.sizes)), state.unpack(held.states))
    trained = [not slot.group.frozen for slot in weights.slots]
    varied = [] if before is None else before.traced.varied_y
    traced = trace_stage(stage, inputs, _arguments(number, held, before), trained, varied)
    _check_state(number, traced, inputs.state)
    twin = next((each for each in members if _does_the_same(each.traced, traced)), None)
    traced = traced if twin is None else twin.traced
    y = held.packing([traced.aval(atom) for atom in traced.places.y])
    return Member(stage, traced, weights, state, Packing.of(read, held.axis), x, y), inputs


def _does_the_same(one: TracedStage, other: TracedStage) -> bool:
    """Whether two stages run equal programs on equally packed inputs and outputs."""
    trees = [(each.y_tree, each.aux_tree, each.state_tree) for each in (one, other)]
    read = [(each.numbers, each.body.prelude.varied) for each in (one, other)]
    return trees[0] == trees[1] and read[0] == read[1] and alike(one.program, other.program)


def _arguments(number: int, held: Held, before: Member | None) -> Callable[[Inputs], tuple]:
    """A function from the leaves of a stage's inputs to the arguments of its `apply`."""

    def arguments(leaves: Inputs) -> tuple:
        batch, key = held.given_tree.unflatten(leaves.given)
        x = None if before is None else before.traced.y_tree.unflatten(leaves.x)
        state = held.states_layout.treedefs[number].unflatten(leaves.state)
        return held.layout.treedefs[number].unflatten(leaves.weights), x, batch, key, state

    return arguments


def _check_state(number: int, traced: TracedStage, given: Sequence[jax.Array]) -> None:
    """Refuse a stage that changes more of its state than values: a rank's states lie in one buffer all the time."""
    avals = [traced.aval(atom) for atom in traced.places.state]
    before = [f"{x.dtype}{list(x.shape)}" for x in given]
    after = [f"{x.dtype}{list(x.shape)}" for x in avals]
    if before != after:
        raise ValueError(f"stage {number} was given a state of leaves {before} and returned {after}: return them alike")
    for new, old in zip(avals, given, strict=True):
        if more := varying_axes(new) - varying_axes(old):
            raise ValueError(
                f"stage {number}: a state of shape {old.shape} comes back varying over {sorted(more)}, over which it was the "
                "same on all ranks: average it there, or give states that vary over these axes"
            )


def _part(packing: Packing, places: Sequence[int]) -> Packing:
    """The packing of some of the arrays alone, from offset 0."""
    ends: dict = {}
    slots = []
    for slot in (packing.slots[i] for i in places):
        slots.append(slot._replace(offset=ends.get(slot.group, 0), place=None))
        ends[slot.group] = slots[-1].offset + slot.size
    return Packing(tuple(slots))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _summed_losses(dtype: Any) -> Any:
    """The dtype of the sum of a metric over microbatches: of booleans a count."""
    return jnp.int32 if dtype == jnp.bool_ else dtype


# --------------------------------------------------------------------------------------------------
# Where a stage's arrays begin in their buffers, as values of the running program instead of constants.
#
# XLA:CPU compiles a kernel for every operation that differs, and a constant is part of one: blocks of one kind that
# read, write and add at places of their own share no kernel. The places are those of the rank's own stages. Each of
# them comes out of a conditional between ranks: an array of places would be read at constant indices.
# --------------------------------------------------------------------------------------------------

LIMIT = 2**31
"""Buffer elements from which on an index of 32 bits does not reach."""


def with_places(line: TracedLine, rank: jax.Array, num_ranks: int, axis: str) -> TracedLine:
    """The line with the offsets of its members' arrays as values of the running program, on CPUs.

    Args:
      line: the stages; stage p is one of rank p mod S.
      rank: this rank, inside `shard_map`.
      num_ranks: S.
      axis: the pipeline's mesh axis.
    """
    slots = [_slots(member) for member in line.members]
    if platform_around() != "cpu" or any(slot.offset + slot.size >= LIMIT for found in slots for slot in found):
        return line
    offsets, members = [sorted({slot.offset for slot in found}) for found in slots], []
    for first in range(0, len(offsets), num_ranks):
        chunk = offsets[first : first + num_ranks]
        values = _values(chunk, rank, axis)
        for member, found in zip(line.members[first:], chunk, strict=False):
            members.append(_placed(member, dict(zip(found, values, strict=False))))
    return replace(line, members=tuple(members))


def _values(chunk: Sequence[Sequence[int]], rank: jax.Array, axis: str) -> list[jax.Array]:
    """The offsets of this rank's own stage, among one stage per rank; padded to the stage with most of them."""
    count = max(map(len, chunk))

    def own(rank: int) -> list[jax.Array]:
        return [vary(jnp.asarray(offset, jnp.int32), axis) for offset in (*chunk[rank], *[0] * count)[:count]]

    return on_own_rank(rank, len(chunk), own)


def _slots(member: Member) -> list[Slot]:
    packings = [member.weights, member.state, member.read, member.x, member.dy, member.residuals]
    return [slot for packing in packings if packing is not None for slot in packing.slots]


def _placed(member: Member, places: dict[int, jax.Array]) -> Member:
    return replace(
        member,
        weights=member.weights.at(places),
        state=member.state.at(places),
        read=member.read.at(places),
        x=member.x.at(places),
        residuals=None if member.residuals is None else member.residuals.at(places),
        places=places,
    )
