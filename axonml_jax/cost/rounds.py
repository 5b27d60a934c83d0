"""`Rounds` and `Run`: how often a step does what it does; `ShardCounts`: which parts of a model a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from axonml_jax.cost.amounts import Many, divided, either
from axonml_jax.mesh.axes import AxisNames, as_axes
from axonml_jax.parallel.pipeline.policy import AXIS
from axonml_jax.parallel.plan import Plan
from axonml_jax.parallel.strategies.role import Role


class Rounds(NamedTuple):
    """How often one update moves all parameters of a rank along a mesh axis; numbers, or arrays of them.

    Attributes:
      at_start: gathers that are kept for the backward.
      at_use: gathers in forwards, and as many in backwards.
      at_end: reductions of gradients that all microbatches have accumulated.
      between: reductions of one microbatch's gradients, or of those that a pipeline's turn accumulates.
    """

    at_start: Many
    at_use: Many
    at_end: Many
    between: Many

    @property
    def gathers(self) -> Many:
        """In forwards and backwards."""
        return self.at_start + 2 * self.at_use

    @property
    def reductions(self) -> Many:
        """Of gradients."""
        return self.at_end + self.between


def rounds(role: Role, microbatches: Many) -> Rounds:
    """What the role of an axis says.

    >>> rounds(Role(parameters="sharded", reads="use", reduces="microbatch"), 4)
    Rounds(at_start=0, at_use=4, at_end=0, between=4)
    >>> rounds(Role(), 4)
    Rounds(at_start=1, at_use=0, at_end=1, between=0)
    """
    used, between = int(role.reads == "use"), int(role.reduces == "microbatch")
    return Rounds(1 - used, used * microbatches, 1 - between, between * microbatches)


def rounds_of_ticks(gathers: Many | None) -> Rounds:
    """What a pipeline says of what its stages read: see `Pipelined.gathers`; None: once for the whole step."""
    return Rounds(1, 0, 1, 0) if gathers is None else Rounds(0, gathers, 0, gathers)


def splitting(roles: Mapping[AxisNames, Role], *what: str) -> tuple[str, ...]:
    """The mesh axes that split rows, or positions, of the batch.

    >>> splitting({("fsdp", "context"): Role(batch=("rows", "positions")), "tensor": Role(batch="rows")}, "rows")
    ('fsdp', 'tensor')
    """
    every = ((name, split) for axis, role in roles.items() for name, split in role.splits(as_axes(axis)).items())
    return tuple(name for name, split in every if split in what)


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a step runs. What is a `Many` may be an array with an entry for every candidate.

    Attributes:
      roles: of the mesh's axes, or of several that one strategy owns.
      microbatches: per update and rank.
      full, selective: 1 where the backward recomputes that much, else 0.
      pipelined: whether stages lie along `pipe`.
      gathers: how often a pipeline gathers its stages in its ticks; None: once per step.
      copies: of trained parameters that rest beside them and the optimizer's state: a replica's own, and the outer momentum.
      joining: copies of them that the end of a round holds beside what rests.
    """

    roles: Mapping[AxisNames, Role]
    microbatches: Many
    full: Many = 0
    selective: Many = 0
    pipelined: bool = False
    gathers: Many | None = None
    copies: Many = 0
    joining: Many = 0

    @classmethod
    def of(cls, plan: Plan, degrees: Mapping[str, int]) -> "Run":
        """What a plan says on a mesh."""
        pipelined = plan.pipe is not None and degrees.get(AXIS, 1) > 1
        gathers = plan.pipe.gathers(degrees[AXIS], plan.microbatches) if plan.pipe is not None and pipelined else None
        return cls(
            roles={axis: strategy.role for axis, strategy in plan.within_round().on(degrees).items()},
            microbatches=plan.microbatches,
            full=int(plan.remat == "full"),
            selective=int(plan.remat == "selective"),
            pipelined=pipelined,
            gathers=gathers,
            copies=2 * len(plan.rounds),
            joining=max((rounds.round_copies for rounds in plan.rounds.values()), default=0),
        )

    @property
    def recomputes(self) -> Many:
        """1 where the backward recomputes anything."""
        return self.full + self.selective

    def rounds(self, axis: AxisNames | None, sharded: bool = True) -> Rounds:
        """How often leaves move along an axis over which they rest sharded, or not; None: of leaves that no axis shards."""
        if sharded and self.pipelined and axis is not None:
            return rounds_of_ticks(self.gathers)
        return rounds(Role() if axis is None else self.roles[axis], self.microbatches)


@dataclass(frozen=True)
class ShardCounts:
    """What a rank has of a model; the one rank, without a pipeline.

    Attributes:
      blocks: repeated blocks.
      first, last: 1 where it has what stands before the blocks, and behind them; else 0.
      total: blocks of the whole model.
      experts: those of its blocks that have experts.
    """

    blocks: Many
    first: Many
    last: Many
    total: int
    experts: Many = 0

    def number(self, place: str, count: int) -> Many:
        """How many a rank reads of weights of which the model has `count`, or of their groups."""
        if place == "block":
            return self.blocks if count == self.total else divided(self.blocks * count, self.total)
        if place.endswith(" block"):
            return self.experts if place == "expert block" else self.blocks - self.experts
        ends = {"first": self.first, "last": self.last, "both ends": either(self.first > 0, 1, self.last)}
        return ends[place]

    def instead(self, holds: Many, other: "ShardCounts") -> "ShardCounts":
        """Those of another rank where something holds."""
        choose = lambda name: either(holds, getattr(other, name), getattr(self, name))
        return ShardCounts(choose("blocks"), choose("first"), choose("last"), self.total, choose("experts"))
