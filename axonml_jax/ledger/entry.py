"""`Collective`: one communicating call of a program, and the loops and branches it sits in."""

import math
from dataclasses import dataclass
from fractions import Fraction

from axonml_jax.cost.flow import every
from axonml_jax.cost.wire import Amount, exact, wire_elements


@dataclass(frozen=True, slots=True)
class Loop:
    """One enclosing loop. `trips` is None when only the data decide (a while loop); `unroll` is `lax.scan`'s."""

    trips: int | None = None
    unroll: int = 1

    def __str__(self) -> str:
        return "while[?]" if self.trips is None else f"scan[{self.trips}]"


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of an enclosing `lax.cond` or `lax.switch`: number `index` of `of`, counted from 0 (prints from 1).

    JAX stores a `lax.cond` as a switch on its condition, so the false branch comes first.
    """

    index: int
    of: int

    def __str__(self) -> str:
        return f"branch {self.index + 1}/{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One communicating call: what, over which axes, how much, how often.

    Attributes:
      kind: one of `wire.KINDS`.
      op: what a reduction computes (`sum`, `max`, `min`), else empty.
      axes: the mesh axes it runs over (empty when read from a lowered program, which may not name them).
      group_size: how many ranks take part. 0 for a permute read from a lowered program, which does not say.
      dtype: numpy's name of the element type on the wire.
      itemsize: bytes per element.
      leaf_elements: elements of the full array, one number per leaf. Several leaves are one call on a tree: one
        reduction for whoever wrote it, one launch per leaf in StableHLO.
      path: enclosing loops and branches, outermost first.
      label: what it moves: the last `axonml.<label>` among its name scopes, `scalars` for unlabelled scalars, or empty.
      scope: its whole name stack.
      padding: how many of the elements are padding, as its scope says (`label.label_of`).
      counted: False in a branch of a conditional that another branch outweighs: a rank runs only one of them.
      every: it runs in one of so many steps, as its scope says (`label.period_of`).
      automatic: mesh axes left to the partitioner here. Shapes are global over these and the partitioner may add
        collectives that no trace shows.
    """

    kind: str
    axes: tuple[str, ...] = ()
    group_size: int
    dtype: str
    itemsize: int
    leaf_elements: tuple[int, ...]
    op: str = ""
    path: tuple[Loop | Branch, ...] = ()
    label: str = ""
    scope: str = ""
    padding: int = 0
    counted: bool = True
    every: int = 1
    automatic: tuple[str, ...] = ()

    @property
    def leaves(self) -> int:
        """Arrays communicated by one call: its launches in StableHLO."""
        return len(self.leaf_elements)

    @property
    def elements(self) -> int:
        """Elements of the full arrays, one execution."""
        return sum(self.leaf_elements)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The enclosing loops, outermost first."""
        return tuple(step for step in self.path if isinstance(step, Loop))

    @property
    def in_loop(self) -> bool:
        """Whether any loop encloses it."""
        return bool(self.loops)

    @property
    def unbounded(self) -> bool:
        """Whether it sits in a while loop, whose trip count no program text tells."""
        return any(loop.trips is None for loop in self.loops)

    @property
    def executions(self) -> int:
        """How often it runs in one step, if its branch is taken; an unknown trip count counts as one."""
        return math.prod(1 if loop.trips is None else loop.trips for loop in self.loops)

    @property
    def count(self) -> int | None:
        """How often it runs in one step, or None when a while loop decides."""
        return None if self.unbounded else self.executions

    @property
    def where(self) -> str:
        """The enclosing loops and branches as text, or in which steps alone it runs.

        >>> path = (Loop(3), Branch(0, 2))
        >>> Collective(kind="permute", group_size=2, dtype="int8", itemsize=1, leaf_elements=(8,), path=path).where
        'scan[3] > branch 1/2'
        """
        return every(self.every) if self.every > 1 else " > ".join(map(str, self.path)) or "once"

    @property
    def wire_bytes(self) -> Amount:
        """Bytes one rank sends for one execution (ring), padding included."""
        return exact(self.itemsize * wire_elements(self.kind, self.elements, self.group_size))

    @property
    def padding_wire_bytes(self) -> Amount:
        """The part of `wire_bytes` that is padding."""
        return exact(self.itemsize * wire_elements(self.kind, self.padding, self.group_size))

    @property
    def step_wire_bytes(self) -> Amount:
        """Bytes one rank sends for it in one step (one trip of every while loop), on average over `every` steps."""
        return exact(Fraction(self.wire_bytes * self.executions, self.every))

    def __str__(self) -> str:
        leaves = f" in {self.leaves} leaves" if self.leaves > 1 else ""
        axes = ",".join(self.axes) or f"{self.group_size} ranks"
        return f"{self.kind}({axes}) {self.dtype}[{self.elements}]{leaves}, {self.where}"
