"""Parameters of a pipeline's rank that lie one behind the other and are updated alike, element by element: updated as one.

The update of a rank then has as many operations as that of one parameter, and not as many for each: less to trace and compile.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from axonml_jax.parallel.pipeline.resting.packing import Buffers, Packing, Slot, slot_value
from axonml_jax.parallel.pipeline.resting.stage_store import StageStore
from axonml_jax.training.optimizer.sharded.on_shards import seen_shard, stored_shard
from axonml_jax.training.optimizer.sharded.sharded_program import ShardedProgram


class Tree(NamedTuple):
    """A tree among the arguments of an update.

    Attributes:
      store: where its leaves lie.
      owners: of every leaf of the store, the parameter that it belongs to.
      given: of every leaf, its position among the arguments.
      made: of every leaf, that of its new value among the results; empty: it has none.
    """

    store: StageStore
    owners: Sequence[int]
    given: Sequence[int]
    made: Sequence[int] = ()


class _Place(NamedTuple):
    """Where a leaf lies, or the leaves that are one with it and behind it."""

    slot: Slot
    alone: bool


class Runs:
    """How ranks update their parameters: one after the other, or several that are alike as if they were one, flat.

    Args:
      program: the update; None: no parameters are one.
      trees: its arguments that belong to parameters; the parameters are the last.
    """

    def __init__(self, program: ShardedProgram | None, trees: Sequence[Tree]):
        self.trees, self._store = trees, trees[-1].store
        self._chains = {} if program is None else chains(program)
        self._leaves: dict[int, list[tuple[int, int]]] = {}  # of every parameter its leaf in each tree
        for number, tree in enumerate(trees):
            for leaf, owner in enumerate(tree.owners):
                self._leaves.setdefault(owner, []).append((number, leaf))
        self._places = [self._of_rank(rank) for rank in range(self._store.num_ranks)]

    def held(self, buffers: Sequence[Buffers], rank: int) -> dict[int, jax.Array]:
        """A rank's arguments by position; of parameters that are one those of the first."""
        values = {}
        for (number, leaf), (slot, alone) in self._places[rank].items():
            tree, value = self.trees[number], slot_value(slot, buffers[number][slot.group])
            values[tree.given[leaf]] = seen_shard(value, tree.store.layouts[leaf]) if alone else value
        return values

    def looks(self, rank: int) -> Hashable:
        """What ranks have in common that may update what they hold alike: what lies where."""
        return tuple((number, slot, alone) for (number, _), (slot, alone) in self._places[rank].items())

    def pack(self, number: int, made: Mapping[int, Any]) -> Buffers:
        """The buffers of one tree on a rank, from its results by position, as `held` gives arguments."""
        tree, packed = self.trees[number], {}
        for places in self._places:
            for (other, leaf), (slot, alone) in places.items():
                if other == number and tree.made[leaf] in made:
                    value = made[tree.made[leaf]]
                    packed[slot] = stored_shard(value, tree.store.layouts[leaf]) if alone else value
        return Packing(tuple(packed)).pack(list(packed.values()), tree.store.buffers.sizes)

    def _of_rank(self, rank: int) -> dict[tuple[int, int], _Place]:
        """Where a rank's leaves lie; of parameters that are one those of the first."""
        slots, runs = self._store.slots, []
        for owner in sorted(self._store.leaves_of_rank(rank), key=lambda i: (slots[i].group, slots[i].offset)):
            if runs and self._follows(owner, runs[-1][-1]):
                runs[-1].append(owner)
            else:
                runs.append([owner])
        places = {}
        for run in runs:
            for each in zip(*(self._leaves[owner] for owner in run), strict=True):
                first, sizes = self._slot(each[0]), [self._slot(place).size for place in each]
                slot = first if len(run) == 1 else first._replace(shape=(sum(sizes),))
                places[each[0]] = _Place(slot, len(run) == 1)
        return places

    def _follows(self, owner: int, before: int) -> bool:
        """Whether a parameter is updated like the one before it, and lies behind it in every tree."""
        chain = self._chains.get(owner)
        if chain is None or chain != self._chains.get(before):
            return False
        pairs = zip(self._leaves[before], self._leaves[owner], strict=True)
        slots = [(self._slot(first), self._slot(second)) for first, second in pairs]
        return all((a.group, a.offset + a.size) == (b.group, b.offset) for a, b in slots)

    def _slot(self, place: tuple[int, int]) -> Slot:
        number, leaf = place
        return self.trees[number].store.slots[leaf]


def chains(program: ShardedProgram) -> dict[int, Hashable]:
    """For every parameter what is done to each of its elements: equal where the same is done, and nothing but that."""
    known: dict[Hashable, int] = {}  # what a value is made of, so that equal numbers made twice are one
    made: dict[int, Hashable] = {}
    counts: Counter[int] = Counter()
    for number, owner in zip(program.inputs, program.owners[0], strict=True):
        made[number] = ("argument", number)
        if owner is not None:
            made[number], counts[owner] = ("own", counts[owner]), counts[owner] + 1
    for number, value in program.constants.items():
        one = not isinstance(value, Tracer) and np.size(value) == 1
        made[number] = ("number", str(value.dtype), np.asarray(value).tobytes()) if one else ("array", number)
    for step in program.steps:
        key = (step.kind, *(made[number] for number in step.inputs))
        for output, number in enumerate(step.outputs):
            made[number] = ("step", number) if step.kind is None else known.setdefault((output, *key), len(known))
    found: dict[int, list[Hashable]] = {}
    for number, owner in zip(program.outputs, program.owners[1], strict=True):
        if owner is not None:
            found.setdefault(owner, []).append(made[number])
    return {owner: tuple(results) for owner, results in found.items()}
