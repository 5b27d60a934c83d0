"""How the stages' parameters (or states) lie on the ranks: one padded buffer per group, a rank's chunks behind each other.

The executor reads buffers; optimizers and users see trees, by `pack_rank` and `unpack_rank`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from axonml_jax._types import PyTree
from axonml_jax.parallel.pipeline.resting.packing import BufferGroup, Buffers, Packing, Slot, data_of, largest


@dataclass(frozen=True)
class Stored:
    """One leaf of a stage as this rank holds it.

    Attributes:
      shape: of the rank's own part, without the axes that split it.
      dtype: between its reads.
      axes: other mesh axes over which its parts differ ("fsdp", "tensor", ...), in any order.
      frozen: whether it has no gradient.
      shared: a name that the same leaf has in other stages too (a tied embedding); None: it is in one stage alone.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...] = ()
    frozen: bool = False
    shared: str | None = None

    @property
    def group(self) -> BufferGroup:
        """In which buffer it lies."""
        data, _ = data_of(self.dtype, self.shape)
        return BufferGroup(jnp.dtype(data.dtype).name, tuple(sorted(self.axes)), self.frozen)


@dataclass(frozen=True)
class StageBuffers:
    """Where every leaf of every stage lies. Stage p lives on rank p mod S; a shared leaf lies once on each of its ranks.

    >>> stages = [{"w": Stored((2, 3), "float32")}, {"w": Stored((4,), "float32")}]
    >>> StageBuffers.of(stages, num_ranks=2).sizes[BufferGroup("float32")]
    6

    Attributes:
      num_ranks: S.
      packings: of every stage.
      treedefs: the tree of every stage.
      shared: for every shared leaf its slot on each rank that holds it, by name.
    """

    num_ranks: int
    packings: tuple[Packing, ...]
    treedefs: tuple[Any, ...]
    shared: dict[str, dict[int, Slot]] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Sequence[PyTree], num_ranks: int) -> "StageBuffers":
        """Lay out every stage's tree.

        Args:
          stages: per stage a tree of `Stored`, or of anything with shape and dtype: leaves of one stage and rank alone.
          num_ranks: S.

        Raises:
          ValueError: when the stages do not divide over the ranks, or a shared leaf differs between stages; all are named.
        """
        if len(stages) % num_ranks:
            raise ValueError(f"{len(stages)} stages do not divide over {num_ranks} ranks: give every rank as many")
        trees = [jax.tree.map(_stored, stage, is_leaf=_is_stored) for stage in stages]
        flat = [jax.tree.flatten(tree, is_leaf=_is_stored) for tree in trees]
        _check_shared([leaves for leaves, _ in flat])
        ends: list[dict[BufferGroup, int]] = [{} for _ in range(num_ranks)]
        shared: dict[str, dict[int, Slot]] = {}
        packings = []
        for stage, (leaves, _) in enumerate(flat):
            rank = stage % num_ranks
            slots = [_place(leaf, ends[rank], shared, rank) for leaf in leaves]
            packings.append(Packing(tuple(slots)))
        return cls(num_ranks, tuple(packings), tuple(treedef for _, treedef in flat), shared)

    @cached_property
    def sizes(self) -> dict[BufferGroup, int]:
        """Elements per group, on every rank."""
        return largest(packing.sizes for packing in self.packings)

    def stages(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, len(self.packings), self.num_ranks)

    def pack_rank(self, rank: int, trees: Sequence[PyTree]) -> Buffers:
        """A rank's buffers, each [n], from the trees of its stages, in order."""
        placed: dict[Slot, Any] = {}
        for stage, tree in zip(self.stages(rank), trees, strict=True):
            placed |= dict(zip(self.packings[stage].slots, self.treedefs[stage].flatten_up_to(tree), strict=True))
        return Packing(tuple(placed)).pack(list(placed.values()), self.sizes)

    def unpack_rank(self, rank: int, buffers: Buffers) -> list[PyTree]:
        """The trees of a rank's stages, in order."""
        return [self.unpack(stage, buffers) for stage in self.stages(rank)]

    def unpack(self, stage: int, buffers: Buffers) -> PyTree:
        """The tree of one stage, out of its rank's buffers."""
        return self.treedefs[stage].unflatten(self.packings[stage].unpack(buffers))


def _place(leaf: Stored, ends: dict[BufferGroup, int], shared: dict[str, dict[int, Slot]], rank: int) -> Slot:
    """The leaf's slot on a rank: the one it has there already, or the next free one."""
    holders = {} if leaf.shared is None else shared.setdefault(leaf.shared, {})
    if rank not in holders:
        data, key_impl = data_of(leaf.dtype, leaf.shape)
        holders[rank] = Slot(leaf.group, ends.get(leaf.group, 0), data.shape, key_impl)
        ends[leaf.group] = holders[rank].offset + holders[rank].size
    return holders[rank]


def _check_shared(stages: Sequence[Sequence[Stored]]) -> None:
    seen: dict[str, tuple[int, Stored]] = {}
    wrong = []
    for stage, leaves in enumerate(stages):
        for leaf in leaves:
            first, other = seen.setdefault(leaf.shared, (stage, leaf)) if leaf.shared is not None else (stage, leaf)
            if leaf != other:
                wrong.append(f"{leaf.shared!r} is {other} in stage {first} and {leaf} in stage {stage}")
    if wrong:
        raise ValueError(f"a shared leaf must be the same in all its stages: {'; '.join(wrong)}")


def _stored(leaf: Any) -> Stored:
    return leaf if isinstance(leaf, Stored) else Stored(tuple(leaf.shape), leaf.dtype)


def _is_stored(leaf: Any) -> bool:
    return isinstance(leaf, Stored)
