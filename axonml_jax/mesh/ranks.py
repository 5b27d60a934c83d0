"""Engines that run a program for all ranks of a group together: threads of one process, or real processes."""

import abc
import copy
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonml_jax.compat.processes import CoordinatorClient, coordinator_client

# --------------------------------------------------------------------------------------------------
# One rank's program as the whole group's: `jit(shard_map)` over the group's sub-mesh, compiled once and kept.
# --------------------------------------------------------------------------------------------------

Program = Callable[[Any], Any]
"""`program(x) -> y` for use inside `shard_map` over one axis named `data`: this rank's tree to this rank's tree."""

_STACKED = PartitionSpec("data")


def place(value: Any, device: Any) -> Any:
    """Put one rank's value on its device, with a leading dim of 1: its row of the stacked array."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device)[None], value)


def stack(rows: Sequence[Any], mesh: Mesh, num_rows: int) -> Any:
    """Combine this process's rows into global arrays [num_rows, ...] over the mesh, without copying."""
    sharding = NamedSharding(mesh, _STACKED)

    def assemble(*leaves):
        return jax.make_array_from_single_device_arrays((num_rows, *leaves[0].shape[1:]), sharding, list(leaves))

    return jax.tree.map(assemble, *rows)


def row(stacked: Any, device: Any) -> Any:
    """The row that lives on `device`, without its leading dim."""

    def own(leaf):
        (data,) = (shard.data for shard in leaf.addressable_shards if shard.device == device)
        return data.reshape(data.shape[1:])

    return jax.tree.map(own, stacked)


def compiled(program: Program, mesh: Mesh) -> Callable[[Any], Any]:
    """Compile a program over stacked arrays; equal programs on equal meshes are compiled once.

    Programs are equal when they are the same function, or `functools.partial`s (nested too) of the same function with
    equal arguments. A closure made for each call compiles at each call.
    """
    key = _key(program)
    return _compiled(key, mesh) if _hashable(key) else _compile(program, mesh)


@functools.lru_cache(maxsize=512)
def _compiled(key, mesh):
    return _compile(_rebuild(key), mesh)


def _compile(program, mesh):
    def one_row(stacked):
        result = program(jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    return jax.jit(jax.shard_map(one_row, mesh=mesh, in_specs=_STACKED, out_specs=_STACKED, check_vma=False))


class _Partial(tuple):
    """A hashable form of a `functools.partial`, so that equal ones are found equal."""


class _Argument(tuple):
    """A hashable form of an argument as (type, value): 1, 1.0 and True are equal but compute different things."""


def _key(program):
    if not isinstance(program, functools.partial):
        return program
    keywords = tuple((name, _argument_key(value)) for name, value in sorted(program.keywords.items()))
    return _Partial((_key(program.func), tuple(_argument_key(value) for value in program.args), keywords))


def _argument_key(value):
    return _key(value) if isinstance(value, functools.partial) else _Argument((type(value), value))


def _rebuild(key):
    if isinstance(key, _Argument):
        return key[1]
    if not isinstance(key, _Partial):
        return key
    function, arguments, keywords = key
    rebuilt = {name: _rebuild(value) for name, value in keywords}
    return functools.partial(_rebuild(function), *(_rebuild(value) for value in arguments), **rebuilt)


def _hashable(key):
    try:
        hash(key)
    except TypeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Where ranks that are threads of one process meet: the last to arrive acts for all, errors reach every one of them.
# --------------------------------------------------------------------------------------------------


class PeerError(RuntimeError):
    """Raised when another rank of the group has stopped, so that this rank's group call can never complete."""


class Rendezvous:
    """The meeting point of one group: a condition and a generation counter.

    Args:
      ranks: global ranks of the members.
      board: the board that knows which ranks have stopped.
    """

    def __init__(self, ranks: tuple[int, ...], board: "Board"):
        self.ranks = ranks
        self._board = board
        self._condition = threading.Condition()
        self._generation = 0
        self._offers: dict[int, Any] = {}
        self._outcomes: dict[int, _Outcome] = {}
        self._broken: Exception | None = None

    def meet(self, rank: int, offer: Any, act: Callable[[dict[int, Any]], dict[int, Any]], name: str) -> Any:
        """Wait for every member; the last one runs `act(offers)`, and each returns its own part of the result.

        Args:
          rank: the caller's global rank.
          offer: what this rank brings.
          act: offers by rank -> results by rank. Its exception is raised in every member.
          name: what is being called, for the errors.

        Raises:
          TimeoutError: naming the ranks that did not come in time; the group is broken from then on.
          PeerError: when a missing rank has failed or returned and can never come.
        """
        with self._condition:
            self._refuse_if_hopeless(name)
            assert rank not in self._offers, f"rank {rank} entered {name} twice: a rank is one thread"
            generation = self._generation
            self._offers[rank] = offer
            if len(self._offers) == len(self.ranks):
                self._act(act)
            else:
                self._wait(generation, name)
            return self._take(generation, rank)

    def wake(self) -> None:
        """Make waiting members check the board again."""
        with self._condition:
            self._condition.notify_all()

    def _act(self, act):
        offers, self._offers = self._offers, {}
        try:
            outcome = _Outcome(act({rank: offers[rank] for rank in self.ranks}), None, len(self.ranks))
        except Exception as error:
            outcome = _Outcome({}, error, len(self.ranks))
        self._outcomes[self._generation] = outcome
        self._generation += 1
        self._condition.notify_all()

    def _wait(self, generation, name):
        def settled():
            return self._generation != generation or self._broken or self._stopped()

        if not self._condition.wait_for(settled, self._board.timeout):
            missing = [rank for rank in self.ranks if rank not in self._offers]
            self._broken = TimeoutError(
                f"{name} on ranks {list(self.ranks)}: rank(s) {missing} did not call it within "
                f"{self._board.timeout:g} s; every member of a group must make the same calls in the same order"
            )
            self._condition.notify_all()
        if self._generation == generation:
            self._refuse_if_hopeless(name)

    def _refuse_if_hopeless(self, name):
        if self._broken:
            raise _own_copy(self._broken)
        if stopped := self._stopped():
            reasons = "; ".join(f"rank {rank} {reason}" for rank, reason in stopped.items())
            raise PeerError(f"{name} on ranks {list(self.ranks)} cannot complete: {reasons}")

    def _stopped(self):
        stopped = self._board.stopped
        return {rank: stopped[rank] for rank in self.ranks if rank in stopped and rank not in self._offers}

    def _take(self, generation, rank):
        outcome = self._outcomes[generation]
        outcome.left -= 1
        if outcome.left == 0:
            del self._outcomes[generation]
        if outcome.error is not None:
            raise _own_copy(outcome.error)
        return outcome.results[rank]


def _own_copy(error):
    # One exception raised in several threads would mix their tracebacks.
    try:
        return copy.copy(error).with_traceback(error.__traceback__)
    except TypeError:  # an exception whose constructor does not take its own args
        return error


class _Outcome:
    def __init__(self, results: dict[int, Any], error: Exception | None, left: int):
        self.results, self.error, self.left = results, error, left


class Board:
    """The shared state of one threaded world: a rendezvous per group, and which ranks have stopped and why.

    Args:
      timeout: seconds a rank waits for the others at a group call.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.stopped: dict[int, str] = {}
        self._lock = threading.Lock()
        self._rendezvous: dict[tuple[int, ...], Rendezvous] = {}

    def rendezvous(self, ranks: tuple[int, ...]) -> Rendezvous:
        """The meeting point of these ranks, shared by all groups with the same ranks in the same order."""
        with self._lock:
            return self._rendezvous.setdefault(ranks, Rendezvous(ranks, self))

    def stop(self, rank: int, reason: str) -> None:
        """Record that a rank makes no further calls; members that wait for it get an error at once.

        Args:
          rank: its global rank.
          reason: the rest of the sentence "rank 3 ...".
        """
        with self._lock:
            self.stopped[rank] = reason
            meeting_places = list(self._rendezvous.values())
        for place in meeting_places:
            place.wake()


# --------------------------------------------------------------------------------------------------
# How the ranks of one group run a program together, one value each: threads of one process, or real processes.
# --------------------------------------------------------------------------------------------------


class Engine(abc.ABC):
    """Protocol: runs one program for all members of a group; each member calls with its own row and gets its own result.

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
    """Engine for ranks that are threads: the last one to arrive runs the program for all."""

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
    """Engine for a group of one rank of this process, which waits for nothing."""

    def run(self, program: Program, value: Any, name: str) -> Any:
        """See `Engine.run`."""
        (device,) = self.sub_mesh.devices.flat
        return row(self._execute(program, [place(value, device)]), device)

    def barrier(self) -> None:
        """See `Engine.barrier`."""


def describe(name: str, rows: Any) -> str:
    """Describe a call as text: its name, and every leaf's path, dtype and shape (leading dims of 1 cut off).

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
    """Refuse calls that differ between ranks.

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


# --------------------------------------------------------------------------------------------------
# Ranks that are real processes: they agree through JAX's coordinator, then run the same program on their sub-mesh.
# --------------------------------------------------------------------------------------------------


class ProcessEngine(Engine):
    """Engine for a group with one member in this process and the others elsewhere; only members call.

    Before the program starts, its members meet at JAX's coordinator: a missing rank is named at the timeout and a
    disagreement is an error everywhere, where the transport alone (gloo, NCCL) would hang, abort, or cut lengths. The
    waiting for late ranks happens there too: gloo gives up after 30 s of skew.

    Args:
      ranks, sub_mesh: see `Engine`.
      rank: the member in this process.
      timeout: seconds to wait for the other members at a call.
    """

    def __init__(self, ranks: tuple[int, ...], sub_mesh: Mesh, rank: int, timeout: float):
        super().__init__(ranks, sub_mesh)
        self._rank = rank
        self._timeout = timeout

    def run(self, program: Program, value: Any, name: str) -> Any:
        """See `Engine.run`; ValueError in every member when names, trees, shapes or dtypes differ."""
        device = self.sub_mesh.devices.flat[self.ranks.index(self._rank)]
        own = place(value, device)
        self._meet(describe(name, own), name)
        return row(self._execute(program, [own]), device)

    def barrier(self) -> None:
        """See `Engine.barrier`."""
        self._meet("barrier()", "barrier()")

    def _meet(self, call: str, name: str) -> None:
        client = coordinator_client()
        where = f"axonml_jax/{hashlib.sha1(repr(self.ranks).encode()).hexdigest()}"
        # The coordinator counts each rank's calls, so that equal groups made anywhere in a process count together.
        generation = client.key_value_increment(f"{where}/calls/{self._rank}", 1)
        said = f"{where}/{generation}/"
        client.key_value_set(f"{said}{self._rank}", call)
        processes = [device.process_index for device in self.sub_mesh.devices.flat]
        try:
            client.wait_at_barrier(f"{where}/{generation}", int(self._timeout * 1000), processes)
        except jax.errors.JaxRuntimeError as error:
            missing = sorted(set(self.ranks) - _calls(client, said).keys())
            raise TimeoutError(
                f"{name} on ranks {list(self.ranks)}: rank(s) {missing} did not call it within {self._timeout:g} s, or "
                "their processes are gone; every member of a group must make the same calls in the same order"
            ) from error
        calls = _calls(client, said)
        # Every member is here, so every member has read what was said one generation ago.
        client.key_value_delete(f"{where}/{generation - 1}/{self._rank}")
        check_agreement(dict(sorted(calls.items())))


def _calls(client: CoordinatorClient, said: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[1]): call for key, call in client.key_value_dir_get(said)}
