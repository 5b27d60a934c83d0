"""The stages of a pipeline traced one after the other: what each sends, keeps and returns, and how all of it is packed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from axonml_jax.collectives.varying import vary, varying_axes
from axonml_jax.parallel.pipeline.cutting.stage import Stage
from axonml_jax.parallel.pipeline.cutting.traced_forward import TracedForward
from axonml_jax.parallel.pipeline.cutting.traced_stage import Inputs, TracedStage, trace_stage
from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing, Sizes, largest
from axonml_jax.parallel.pipeline.resting.position_parts import PositionParts, on_every_rank
from axonml_jax.parallel.pipeline.resting.stage_buffers import StageBuffers
from axonml_jax.parallel.pipeline.running.one_of import alike
from axonml_jax.parallel.pipeline.running.rings import nothing
from axonml_jax.parallel.units.body import Transform


@dataclass(frozen=True)
class Member:
    """One stage in its place.

    Attributes:
      stage: the stage as given.
      traced: its program.
      weights, state: where its leaves lie on its rank.
      read: how the weights that it reads are packed.
      x: how the activations it receives are packed; empty on the first stage.
      y: how those that it sends are packed.
      residuals: how what it keeps for its backward is packed; None when nothing is differentiated.
      forward: makes that, and the results; None likewise.
      places: offsets as values of the running program, by offset; those not in it are constants (`places.py`).
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
        """What stages that run the same program have in common."""
        arrays = tuple(tuple((slot.group, slot.shape) for slot in packing.slots) for packing in self._packings)
        return len(self.traced.body.equations), arrays

    @property
    def runs(self) -> tuple:
        """What it runs: equal only where two stages were traced as one, read alike, and lie at the same places."""
        placed = lambda slot: slot._replace(place=None, offset=slot.offset if slot.place is None else id(slot.place))
        arrays = tuple(tuple(map(placed, packing.slots)) for packing in (*self._packings, self.dy))
        return id(self.traced), id(self.stage.read), id(self.stage.sync), arrays

    @property
    def _packings(self) -> tuple[Packing, ...]:
        return self.weights, self.state, self.read, self.x, self.y, self.residuals or Packing(())

    @property
    def dx(self) -> Packing:
        """How the gradients of what it receives are packed."""
        return _part(self.x, self.traced.varied_x)

    @property
    def dy(self) -> Packing:
        """How the gradients of what it sends are packed."""
        return _part(self.y, self.traced.varied_y).at(self.places)


@dataclass(frozen=True)
class TracedLine:
    """All stages, and the sizes that every rank's buffers need.

    Attributes:
      members: the stages in order.
      loss_like, aux_like: zeros, typed like the loss and the last stage's metrics.
    """

    members: tuple[Member, ...]
    loss_like: jax.Array
    aux_like: tuple[jax.Array, ...]

    @property
    def activations(self) -> Sizes:
        """Of what is sent forward."""
        return largest(member.x.sizes for member in self.members)

    @property
    def cotangents(self) -> Sizes:
        """Of what is sent backward."""
        return largest(member.dx.sizes for member in self.members)

    @property
    def residuals(self) -> Sizes:
        """Of what is kept."""
        return largest(member.residuals.sizes for member in self.members if member.residuals is not None)

    @property
    def read(self) -> Sizes:
        """Of the weights that a stage reads."""
        return largest(member.read.sizes for member in self.members)

    @property
    def outputs(self) -> Sizes:
        """Of what the last stage returns."""
        return self.members[-1].y.sizes


@dataclass(frozen=True)
class Held:
    """What a rank has when stages are traced or run, inside `shard_map`.

    Attributes:
      layout, states_layout: where parameters and states lie.
      weights, states: this rank's buffers.
      given: leaves of the microbatches and their keys, each [M, ...].
      given_tree: of (batch, keys).
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
        """Of what a stage sends or keeps, `known` dims of which are split."""
        if self.positions is None:
            return Packing.of(arrays, self.axis)
        dims = [self.positions.dim_of(array.shape) for array in arrays]
        for i, dim in enumerate(known):
            dims[i] = dims[i] if dim is None else dim
        return Packing.of(arrays, self.axis, (self.positions.parts, dims))


def trace_line(stages: Sequence[Stage], held: Held, transform: Transform | None) -> TracedLine:
    """Trace every stage on what the one before sends.

    Args:
      stages: in order.
      held: what this rank has.
      transform: what recomputation makes of a stage; None: nothing is differentiated.

    Raises:
      ValueError: when a loss is no floating scalar, or a state comes back otherwise than it was given.
    """
    members: list[Member] = []
    for stage in stages:
        members.append(_member(stage, held, members, transform))
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
        tuple(vary(jnp.zeros(x.shape, _summed(x.dtype)), (held.axis, *varying_axes(x))) for x in metrics),
    )


def _member(stage: Stage, held: Held, members: Sequence[Member], transform: Transform | None) -> Member:
    """The next member, which shares what was traced for an earlier one that does the same."""
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
    member = Member(stage, traced, weights, state, Packing.of(read, held.axis), x, y)
    if transform is None:
        return member
    if twin is not None:
        return replace(member, residuals=twin.residuals, forward=twin.forward)
    forward = TracedForward.of(traced, inputs, transform)
    known = () if held.positions is None else forward.split_dims(held.positions.parts.axis)
    return replace(member, residuals=held.packing(forward.residuals, known), forward=forward)


def _does_the_same(one: TracedStage, other: TracedStage) -> bool:
    """Whether two stages compute the same of the same, and have gradients of the same."""
    trees = [(each.y_tree, each.aux_tree, each.state_tree) for each in (one, other)]
    read = [(each.numbers, each.body.prelude.varied) for each in (one, other)]
    return trees[0] == trees[1] and read[0] == read[1] and alike(one.program, other.program)


def _arguments(number: int, held: Held, before: Member | None) -> Callable[[Inputs], tuple]:
    """What a stage is called with, out of the leaves of its inputs."""

    def arguments(leaves: Inputs) -> tuple:
        batch, key = held.given_tree.unflatten(leaves.given)
        x = None if before is None else before.traced.y_tree.unflatten(leaves.x)
        state = held.states_layout.treedefs[number].unflatten(leaves.state)
        return held.layout.treedefs[number].unflatten(leaves.weights), x, batch, key, state

    return arguments


def _check_state(number: int, traced: TracedStage, given: Sequence[jax.Array]) -> None:
    """A rank's states lie in one buffer all the time: they may change in value only."""
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
    """A packing of some of the arrays alone."""
    ends: dict = {}
    slots = []
    for slot in (packing.slots[i] for i in places):
        slots.append(slot._replace(offset=ends.get(slot.group, 0), place=None))
        ends[slot.group] = slots[-1].offset + slot.size
    return Packing(tuple(slots))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _summed(dtype: Any) -> Any:
    """Metrics are summed: of booleans that is a count."""
    return jnp.int32 if dtype == jnp.bool_ else dtype
