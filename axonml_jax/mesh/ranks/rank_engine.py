"""How the ranks of one group run a program together, one value each: threads of one process, or real processes."""

import abc
from typing import Any

import jax
from jax.sharding import Mesh

from axonml_jax.mesh.ranks.group_program import Program, compiled, place, row, stack
from axonml_jax.mesh.ranks.rendezvous import Board


class Engine(abc.ABC):
    """Runs one program for all members of a group. Every member calls; each gives and gets its own row.

    Args:
      ranks: global ranks of the members, in the order of the sub-mesh.
      sub_mesh: their devices, as one axis named `data`.
    """

    def __init__(self, ranks: tuple[int, ...], sub_mesh: Mesh):
        self.ranks = ranks
        self.sub_mesh = sub_mesh

    @abc.abstractmethod
    def run(self, program: Program, value: Any, name: str) -> Any:
        """This rank's result of `program`, after every member has called with its value."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return once every member has called."""

    def _execute(self, program, rows):
        stacked = stack(rows, self.sub_mesh, len(self.ranks))
        return jax.block_until_ready(compiled(program, self.sub_mesh)(stacked))


class ThreadEngine(Engine):
    """Ranks are threads: the last to arrive runs the program for all. (ProcessEngine: process_engine.py)"""

    def __init__(self, ranks: tuple[int, ...], sub_mesh: Mesh, rank: int, board: Board):
        super().__init__(ranks, sub_mesh)
        self._rank = rank
        self._board = board

    def run(self, program: Program, value: Any, name: str) -> Any:
        """See `Engine.run`; ValueError in every member when names, trees, shapes or dtypes differ."""
        devices = dict(zip(self.ranks, self.sub_mesh.devices.flat, strict=True))

        def act(offers):
            check_agreement({rank: describe(offer_name, offer) for rank, (offer_name, offer) in offers.items()})
            result = self._execute(program, [offer for _, offer in offers.values()])
            return {rank: row(result, devices[rank]) for rank in self.ranks}

        offer = (name, place(value, devices[self._rank]))
        return self._board.rendezvous(self.ranks).meet(self._rank, offer, act, name)

    def barrier(self) -> None:
        """See `Engine.barrier`."""

        def act(offers):
            check_agreement({rank: name for rank, (name, _) in offers.items()})
            return dict.fromkeys(offers)

        self._board.rendezvous(self.ranks).meet(self._rank, ("barrier()", None), act, "barrier()")


class LoneEngine(Engine):
    """The group is one rank of this process: nothing to wait for."""

    def run(self, program: Program, value: Any, name: str) -> Any:
        """See `Engine.run`."""
        (device,) = self.sub_mesh.devices.flat
        return row(self._execute(program, [place(value, device)]), device)

    def barrier(self) -> None:
        """See `Engine.barrier`."""


def describe(name: str, rows: Any) -> str:
    """The call as text: its name and every leaf's path, dtype and shape (leading dims of 1 cut off).

    >>> import numpy as np
    >>> describe("all_reduce", {"w": np.zeros((1, 3), np.float32)})
    'all_reduce(w: float32[3])'
    """
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = ",".join(map(str, leaf.shape[1:]))
        parts.append(f"{where + ': ' if where else ''}{leaf.dtype}[{shape}]")
    return f"{name}({', '.join(parts)})"


def check_agreement(calls: dict[int, str]) -> None:
    """Every rank must make the same call.

    Raises:
      ValueError: with what each rank called, when they differ.
    """
    if len(set(calls.values())) > 1:
        said: dict[str, list[int]] = {}
        for rank, call in calls.items():
            said.setdefault(call, []).append(rank)
        listing = "; ".join(f"rank(s) {ranks} call {call}" for call, ranks in said.items())
        raise ValueError(
            f"the ranks of a group disagree: {listing}. Every member must make the same call with the same tree, "
            "shapes and dtypes: pad or cast to a common one first"
        )
